"""The command line: each command is one call into the library, and tells the result as a table or as JSON."""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from tacit import __version__, datasets
from tacit.cli import models, show
from tacit.cli.data import data
from tacit.cli.options import AsJson, Force
from tacit.clinic import write_tables
from tacit.errors import TacitError
from tacit.files import PARTIES, fill_parties
from tacit.folders import log_to, new_folder
from tacit.inspection import inspect
from tacit.marking import confidential_share, marked_per_relation
from tacit.parties import METHODS, partition, pool
from tacit.sources import import_graph, read_mapping

LOG = logging.getLogger(__name__)
app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Learn knowledge-graph embeddings from graphs that may not be shown to each other.",
)
app.add_typer(data, name="data")
for command in (models.train, models.evaluate, models.predict, models.export):
    app.command()(command)


def _version(asked: bool) -> None:
    if asked:
        print(f"tacit {__version__}")
        raise typer.Exit


@app.callback()
def before_any_command(
    verbose: Annotated[
        int, typer.Option("--verbose", "-v", count=True, help="Say what is being done; twice: in detail.")
    ] = 0,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    level = logging.DEBUG if verbose > 1 else logging.INFO
    logging.getLogger("tacit").setLevel(level)
    if verbose:
        logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")


@app.command()
def demo(
    out_path: Annotated[Path, typer.Option("--out", help="The folder to write.")] = Path("demo"),
    seed: Annotated[int, typer.Option(min=0, help="Everything random follows from it.")] = 0,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Make the embedded clinical federation, look it over, import one hospital from tables, divide the pooled graph."""
    with (
        new_folder(out_path, PARTIES, force=force) as folder,
        log_to(folder),
        show.busy("making five hospitals", as_json),
    ):
        hospitals = datasets.clinic("demo", seed)
        (folder / "tables").mkdir()
        write_tables(hospitals[0], folder / "tables")
        fill_parties(hospitals, folder)
        statistics = hospitals.statistics()
        imported = import_graph(read_mapping("clinic"), str(folder / "tables")).graph
        together = pool(hospitals)
        views = [inspect(graph) for graph in hospitals]
        divided = {by: partition(together, by, 3, seed=seed) for by in METHODS}  # type: ignore[arg-type]
        tables = {by: made.statistics() for by, made in divided.items()}
    marks, share = marked_per_relation(imported), confidential_share(imported)
    if as_json:
        facts = {"out": str(out_path), "hospitals": statistics, "pooled": inspect(together).json(), "divided": tables}
        print(json.dumps(facts | {"imported": {"relations": marks, "confidential_share": share}}))
        return
    show.out.rule("Five hospitals: each has its own patients, and a share of what medicine knows")
    show.parties(hospitals, statistics, views)
    show.out.rule(f"{hospitals.names[0]} again, imported from tables by a mapping that says what is confidential")
    show.marks(marks, share)
    show.say(f"{len(imported.groups):,} groups: all records of one patient belong together")
    show.out.rule("All of it in one place, as no one may ever see it")
    show.graph("pooled", inspect(together), None, every_relation=True)
    for by, made in divided.items():
        show.out.rule(f"The pooled graph divided by {by}")
        show.parties(made, tables[by], None)
    show.say(
        f"\nWritten to {out_path}/. To try next:\n"
        f"  tacit data inspect {out_path / hospitals.names[0]} --relations\n"
        f"  tacit data import clinic --source {out_path / 'tables'} --dry-run\n"
        f"  tacit data mark {out_path / hospitals.names[1]} --match 'head=^patient' --group head --dry-run\n"
        "  tacit data inspect YOUR-GRAPH.tsv\n"
        "  tacit data partition YOUR-GRAPH.tsv --by entities --parts 3 --out parts/"
    )


def main() -> None:
    """Run; a mistake in the user's input is one message and exit code 2, never a traceback."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        app()
    except BrokenPipeError:  # the reader of our output, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (TacitError, OSError) as error:
        # Only the kind of the error is logged: its text may quote the data.
        LOG.error("stopped by %s", type(error).__name__)
        message = (
            f"{error.filename}: {error.strerror}." if isinstance(error, OSError) and error.filename else str(error)
        )
        Console(stderr=True).print(Text.assemble(("error: ", "bold red"), message), soft_wrap=True)
        sys.exit(2)
