"""The command line: each command is one call into the library, and tells the result as a table or as JSON."""

from __future__ import annotations

import inspect
import logging
import os
import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from tacit import __version__
from tacit.cli import models
from tacit.cli.attack import attack
from tacit.cli.audit import audit
from tacit.cli.budget import budget
from tacit.cli.data import data
from tacit.cli.demo import demo
from tacit.cli.federate import federate
from tacit.cli.flaws import flaws
from tacit.cli.keys import keys
from tacit.cli.ledger import ledger
from tacit.cli.network import join, serve
from tacit.cli.peer import peer
from tacit.cli.provider import provider
from tacit.cli.report import report
from tacit.cli.reproduce import reproduce
from tacit.cli.tune import tune
from tacit.errors import TacitError

LOG = logging.getLogger(__name__)
app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Learn knowledge-graph embeddings from graphs that may not be shown to each other.\n\n"
    "Example:\n  tacit demo --out demo",
)
app.add_typer(data, name="data")
app.add_typer(budget, name="budget")
app.add_typer(keys, name="keys")
app.add_typer(ledger, name="ledger")
app.add_typer(peer, name="peer")
app.add_typer(provider, name="provider")
for command in (
    demo,
    models.train,
    tune,
    models.evaluate,
    models.predict,
    models.export,
    federate,
    attack,
    audit,
    flaws,
    report,
    serve,
    join,
    reproduce,
):
    app.command()(command)


def _flow(text: str) -> str:
    """A docstring as help: its paragraphs without the source's line breaks, its examples as they are."""
    paragraphs = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join(each if each.startswith("Example") else each.replace("\n", " ") for each in paragraphs)


for known in (app, data, budget, keys, ledger, peer, provider):
    for registered in known.registered_commands:
        registered.help = _flow(registered.callback.__doc__ or "")


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


OUT_OF_MEMORY = "there is not enough memory for this: try a smaller dim, batch, number of negatives or memory_mb."


def main() -> None:
    """Run; a mistake in the user's input is one message and exit code 2, never a traceback."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        app()
    except BrokenPipeError:  # the reader of our output, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and "alloc" not in str(error) and "out of memory" not in str(error):
            raise
        Console(stderr=True).print(Text.assemble(("error: ", "bold red"), OUT_OF_MEMORY), soft_wrap=True)
        sys.exit(2)
    except (TacitError, OSError) as error:
        # Only the kind of the error is logged: its text may quote the data.
        LOG.error("stopped by %s", type(error).__name__)
        message = (
            f"{error.filename}: {error.strerror}." if isinstance(error, OSError) and error.filename else str(error)
        )
        Console(stderr=True).print(Text.assemble(("error: ", "bold red"), message), soft_wrap=True)
        sys.exit(2)
