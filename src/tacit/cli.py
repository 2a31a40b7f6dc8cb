"""The command line: each command is one call into the library, and tells the result as a table or as JSON."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from tacit import __version__, datasets
from tacit.clinic import write_tables
from tacit.errors import TacitError
from tacit.files import (
    PARTIES,
    BadRows,
    fill_parties,
    holds_parties,
    read_graph,
    read_links,
    read_parties,
    write_graph,
)
from tacit.files.graphs import MANIFEST, fill_folder
from tacit.folders import log_to, new_folder
from tacit.graph import SPLITS, Graph
from tacit.inspection import Inspection, inspect
from tacit.marking import confidential_share, group, mark, marked_per_relation, select
from tacit.parties import METHODS, Parties, given, partition, pool
from tacit.sources import Imported, import_graph, read_mapping

LOG = logging.getLogger(__name__)
app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Learn knowledge-graph embeddings from graphs that may not be shown to each other.",
)
data = typer.Typer(no_args_is_help=True, help="Get graphs in, look at them, mark them, divide them.")
app.add_typer(data, name="data")
out = Console()

EMBEDDED = {"clinic-small": "small", "clinic-demo": "demo"}
SHOWN_RELATIONS = 10

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
SkipBad = Annotated[bool, typer.Option("--skip-bad", help="Leave out rows that cannot be read, and count them.")]
DataFolder = Annotated[Path | None, typer.Option("--data", envvar="TACIT_DATA", help="Where named benchmarks are.")]
Columns = Annotated[
    str | None,
    typer.Option(
        help="Columns of head, relation, tail[, confidential[, group]]: names, or positions from 1; comma-separated."
    ),
]
Separator = Annotated[str | None, typer.Option(help="What stands between columns, such as ';' or '\\t'.")]
Header = Annotated[
    bool | None,
    typer.Option(help="The first row holds names of columns. Default: if it names head, relation and tail."),
]
Force = Annotated[bool, typer.Option("--force", help="Replace an earlier result in the same place.")]


def _version(asked: bool) -> None:
    if asked:
        print(f"tacit {__version__}")
        raise typer.Exit


@app.callback()
def options(
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


@data.command("inspect")
def data_inspect(
    path: Annotated[
        str, typer.Argument(help="A file, a folder, the name of a benchmark, or clinic-small or clinic-demo.")
    ],
    relations: Annotated[
        bool, typer.Option("--relations", help="Show every relation, not only the most frequent.")
    ] = False,
    columns: Columns = None,
    separator: Separator = None,
    header: Header = None,
    skip_bad: SkipBad = False,
    data: DataFolder = None,
    as_json: AsJson = False,
) -> None:
    """Show what a graph holds and what is suspicious about it."""
    with _busy(f"reading {path}", as_json):
        found = _read(path, data, columns, separator, header, skip_bad)
        views = [inspect(graph) for graph in (found if isinstance(found, Parties) else [found])]
        statistics = found.statistics() if isinstance(found, Parties) else {}
    if isinstance(found, Parties):
        if as_json:
            parties = [{"name": name} | view.json() for name, view in zip(found.names, views, strict=True)]
            print(json.dumps(statistics | {"parties": parties}))
        else:
            _show_parties(found, statistics, views)
    elif as_json:
        print(json.dumps({"benchmark": datasets.recognise(found)} | views[0].json()))
    else:
        _show_graph(path, views[0], datasets.recognise(found), every_relation=relations)


@data.command("partition")
def data_partition(
    paths: Annotated[
        list[str],
        typer.Argument(help="The graph to divide; or, with --by given, each party's graph as PATH or NAME=PATH."),
    ],
    out_path: Annotated[Path, typer.Option("--out", help="The folder to write.")],
    by: Annotated[str, typer.Option(help=f"{', '.join(METHODS)}, or given.")] = "triples",
    parts: Annotated[int, typer.Option(min=1, help="How many parties.")] = 3,
    seed: Annotated[int, typer.Option(min=0, help="Everything random follows from it.")] = 0,
    share: Annotated[float, typer.Option(help="By entities: the share of all entities that each party draws.")] = 0.7,
    split: Annotated[
        str | None, typer.Option(help="'keep', or shares such as 0.8,0.1,0.1. Default: the method's own.")
    ] = None,
    alignment: Annotated[Path | None, typer.Option(help="By given: pairs of names that mean the same.")] = None,
    columns: Columns = None,
    separator: Separator = None,
    header: Header = None,
    skip_bad: SkipBad = False,
    data: DataFolder = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Divide a graph among parties, or put given graphs together, and write one folder each."""
    with new_folder(out_path, PARTIES, force=force) as folder, log_to(folder), _busy("dividing", as_json):
        sources = dict(map(_named_path, paths)) if by == "given" else dict(zip(paths, paths, strict=True))
        graphs = {
            name: _one(_read(path, data, columns, separator, header, skip_bad), path) for name, path in sources.items()
        }
        if by == "given":
            if len(graphs) < 2 or len(graphs) < len(paths):
                raise TacitError(
                    "--by given needs the graphs of two or more parties, in files or folders of different names."
                )
            pair = list(graphs) if len(graphs) == 2 else None
            made = given(graphs, read_links(alignment, graphs, pair) if alignment else None)
        elif len(paths) > 1 or alignment:
            raise TacitError(f"--by {by} divides one graph. For several graphs and an --alignment, write --by given.")
        else:
            [graph] = graphs.values()
            made = partition(graph, by, parts, seed=seed, share=share, split=_shares(split))  # type: ignore[arg-type]
        fill_parties(made, folder)
        statistics = made.statistics()
    if as_json:
        print(json.dumps({"out": str(out_path), "origin": dict(made.origin)} | statistics))
        return
    _show_parties(made, statistics, None)
    say(f"\nWritten to {out_path}. Each party's folder is a graph of its own, such as {out_path / made.names[0]}.")


@data.command("convert")
def data_convert(
    path: Annotated[str, typer.Argument(help="A file, a folder, or the name of a benchmark.")],
    out_path: Annotated[Path, typer.Option("--out", help="The folder to write.")],
    format: Annotated[str, typer.Option(help="tsv or nt (N-Triples).")] = "tsv",
    columns: Columns = None,
    separator: Separator = None,
    header: Header = None,
    skip_bad: SkipBad = False,
    data: DataFolder = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Write a graph, read from anything, as a folder of TSV or N-Triples files."""
    if format not in ("tsv", "nt"):
        raise TacitError(f"--format is tsv or nt, not {format}.")
    with _busy("converting", as_json):
        graph = _one(_read(path, data, columns, separator, header, skip_bad), path)
        write_graph(graph, out_path, format=format, force=force)  # type: ignore[arg-type]
    if as_json:
        sizes = {name: len(split) for name, split in graph.splits.items()}
        print(json.dumps({"out": str(out_path), "fingerprint": graph.fingerprint, "triples": sizes}))
    else:
        say(f"{graph} written to {out_path}.")


@data.command("import")
def data_import(
    mapping: Annotated[str, typer.Argument(help="A mapping file (TOML), or mimic-iii or eicu, which come with tacit.")],
    out_path: Annotated[Path | None, typer.Option("--out", help="The folder to write.")] = None,
    source: Annotated[
        str | None, typer.Option(help="Where the data are: a folder of tables, an SQLite file, or postgresql.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show counts and first rows; write nothing.")] = False,
    skip_bad: SkipBad = False,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Make a graph out of databases, by a mapping of queries to statements."""
    if (out_path is None) != dry_run:
        raise TacitError("Say where to write with --out, or look first with --dry-run.")
    if out_path is None:
        made = _import(mapping, source, skip_bad, as_json)
    else:
        with new_folder(out_path, MANIFEST, force=force) as folder, log_to(folder):
            made = _import(mapping, source, skip_bad, as_json)
            fill_folder(made.graph, folder)
    counts, share = marked_per_relation(made.graph), confidential_share(made.graph)
    if as_json:
        sizes = {name: len(split) for name, split in made.graph.splits.items()}
        facts = {"entities": len(made.graph.entities), "triples": sizes, "relations": counts}
        entries = [{k: v for k, v in asdict(entry).items() if k != "problems"} for entry in made.entries]
        print(json.dumps(facts | {"out": out_path and str(out_path), "confidential_share": share, "entries": entries}))
        return
    rows = [(entry.place.partition(": ")[2], entry.rows, entry.nulls, entry.rejected) for entry in made.entries]
    _table("entry", "rows", "skipped for a NULL", "rejected", rows=rows)
    if dry_run:
        first = [row for entry in made.entries for row in entry.first[:1]]
        _table("head", "relation", "tail", rows=first, title="the first row of each")
    _show_marks(counts, share)
    if nulls := sum(entry.nulls for entry in made.entries):
        _warn([f"{nulls:,} rows have a NULL where a name is needed, and are skipped"])
    if rejected := sum(entry.rejected for entry in made.entries):
        _warn([f"{rejected:,} rows give names that cannot be, and are left out"])
    say(f"{made.graph}" + (f" written to {out_path}." if out_path else "; nothing written."))


@data.command("mark")
def data_mark(
    path: Annotated[str, typer.Argument(help="A file, a folder, or the name of a benchmark.")],
    out_path: Annotated[Path | None, typer.Option("--out", help="The folder to write.")] = None,
    relation: Annotated[
        list[str] | None, typer.Option(help="All statements of this relation; may be repeated.")
    ] = None,
    match: Annotated[
        list[str] | None,
        typer.Option(help="head=REGEX, relation=REGEX or tail=REGEX; repeated, all have to match."),
    ] = None,
    triples: Annotated[Path | None, typer.Option(help="The statements in this file.")] = None,
    share: Annotated[float | None, typer.Option(help="A random share of all statements.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="For --share.")] = 0,
    group_by: Annotated[
        str | None,
        typer.Option("--group", help="Group what is marked by head, relation or tail; head=REGEX: by what it finds."),
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Forget the marks that are there.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Write without asking.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be marked; write nothing.")] = False,
    columns: Columns = None,
    separator: Separator = None,
    header: Header = None,
    skip_bad: SkipBad = False,
    data: DataFolder = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Say which statements are confidential, and which belong together. Shows what is marked before it writes."""
    if (out_path is None) != dry_run:
        raise TacitError("Say where to write with --out, or look first with --dry-run.")
    if not (relation or match or triples or share is not None or group_by or fresh):
        raise TacitError("Say what to mark: by --relation, --match, --triples or --share.")
    graph = _one(_read(path, data, columns, separator, header, skip_bad), path)
    wanted = [triple for split in SPLITS for triple in read_graph(triples).named(split)] if triples else []
    patterns = dict(_part_and_pattern(text) for text in match or ())
    chosen = select(graph, relations=relation or (), match=patterns, triples=wanted, share=share, seed=seed)
    graph = mark(graph, chosen, fresh=fresh)
    if group_by:
        part, pattern = _part_and_pattern(group_by) if "=" in group_by else (group_by, None)
        graph = group(graph, part, pattern)  # type: ignore[arg-type]
    counts, portion = marked_per_relation(graph), confidential_share(graph)
    if not as_json:
        _show_marks(counts, portion)
        say(f"{len(graph.groups):,} groups")
    if out_path is not None:
        if not yes and not as_json and sys.stdin.isatty():
            typer.confirm(f"Write this to {out_path}?", abort=True)
        write_graph(graph, out_path, force=force)
    if as_json:
        facts = {"relations": counts, "confidential_share": portion, "groups": len(graph.groups)}
        print(json.dumps(facts | {"out": out_path and str(out_path)}))
    else:
        say(f"Written to {out_path}." if out_path else "Nothing written.")


@app.command()
def demo(
    out_path: Annotated[Path, typer.Option("--out", help="The folder to write.")] = Path("demo"),
    seed: Annotated[int, typer.Option(min=0, help="Everything random follows from it.")] = 0,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Make the embedded clinical federation, look it over, import one hospital from tables, divide the pooled graph."""
    with new_folder(out_path, PARTIES, force=force) as folder, log_to(folder), _busy("making five hospitals", as_json):
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
    out.rule("Five hospitals: each has its own patients, and a share of what medicine knows")
    _show_parties(hospitals, statistics, views)
    out.rule(f"{hospitals.names[0]} again, imported from tables by a mapping that says what is confidential")
    _show_marks(marks, share)
    say(f"{len(imported.groups):,} groups: all records of one patient belong together")
    out.rule("All of it in one place, as no one may ever see it")
    _show_graph("pooled", inspect(together), None, every_relation=True)
    for by, made in divided.items():
        out.rule(f"The pooled graph divided by {by}")
        _show_parties(made, tables[by], None)
    say(
        f"\nWritten to {out_path}/. To try next:\n"
        f"  tacit data inspect {out_path / hospitals.names[0]} --relations\n"
        f"  tacit data import clinic --source {out_path / 'tables'} --dry-run\n"
        f"  tacit data mark {out_path / hospitals.names[1]} --match 'head=^patient' --group head --dry-run\n"
        "  tacit data inspect YOUR-GRAPH.tsv\n"
        "  tacit data partition YOUR-GRAPH.tsv --by entities --parts 3 --out parts/"
    )


def say(text: str, style: str = "") -> None:
    """Print text as it is: names and paths may hold what rich would take for markup."""
    out.print(Text(text, style=style))


def _import(mapping: str, source: str | None, skip_bad: bool, quiet: bool) -> Imported:
    """Import with a bar on a terminal."""
    recipe = read_mapping(mapping)
    if quiet or not sys.stderr.isatty():
        return import_graph(recipe, source, skip_bad=skip_bad)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[rows]:,} rows"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("importing", total=len(recipe.statements), rows=0)
        return import_graph(
            recipe,
            source,
            skip_bad=skip_bad,
            progress=lambda entry, _, rows: bar.update(task, completed=entry, rows=rows),
        )


def _part_and_pattern(text: str) -> tuple[Any, str]:
    part, equals, pattern = text.partition("=")
    if not equals:
        raise TacitError(f"{text!r}: expected head=REGEX, relation=REGEX or tail=REGEX.")
    return part, pattern


def _show_marks(counts: list[dict[str, Any]], share: float) -> None:
    _table("relation", "statements", "confidential", rows=[tuple(row.values()) for row in counts])
    say(f"{share:.1%} of the statements are confidential")


def _busy(doing: str, quiet: bool) -> Any:
    """A sign of life on a terminal; nothing anywhere else."""
    return Console(stderr=True).status(Text(doing)) if sys.stderr.isatty() and not quiet else nullcontext()


def _read(
    path: str, data: Path | None, columns: str | None, separator: str | None, header: bool | None, skip_bad: bool
) -> Graph | Parties:
    """What `path` means: a file or folder if there is one, else a name."""
    if path in EMBEDDED and not Path(path).exists():
        return datasets.clinic(EMBEDDED[path])  # type: ignore[arg-type]
    if path in datasets.BENCHMARKS and not Path(path).exists():
        return datasets.load(path, data)
    bad_rows: BadRows = "skip" if skip_bad else "refuse"
    if holds_parties(Path(path)):
        return read_parties(path, bad_rows=bad_rows)
    wanted: list[str | int] | None = None
    if columns:
        names = [name.strip() for name in columns.split(",")]
        wanted = [int(name) if re.fullmatch("[0-9]{1,4}", name) else name for name in names]
    between = separator.replace("\\t", "\t") if separator else None
    return read_graph(path, columns=wanted, separator=between, header=header, bad_rows=bad_rows)


def _one(found: Graph | Parties, path: str) -> Graph:
    if isinstance(found, Parties):
        raise TacitError(
            f"{path} holds {len(found)} parties; one graph is needed here. Name one of them: {', '.join(found.names)}."
        )
    return found


def _named_path(argument: str) -> tuple[str, str]:
    """NAME=PATH, or a path whose file or folder gives the name."""
    name, equals, path = argument.partition("=")
    return (name, path) if equals and "/" not in name else (Path(argument).name.split(".")[0], argument)


def _shares(text: str | None) -> Any:
    if text is None or text == "keep":
        return text
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise TacitError(f"--split is 'keep' or three shares such as 0.8,0.1,0.1; not {text!r}.") from None


def _table(*columns: str, rows: Any, title: str | None = None) -> None:
    """Print a table; what is not a string is a number and stands to the right."""
    rows = list(rows)
    table = Table(title=title, title_justify="left", header_style="bold", title_style="bold")
    for place, name in enumerate(columns):
        table.add_column(
            name, justify="left" if not rows or isinstance(rows[0][place], str) else "right", overflow="fold"
        )
    for row in rows:
        table.add_row(
            *(
                Text(cell if isinstance(cell, str) else f"{cell:,}" if isinstance(cell, int) else f"{cell:,.2f}")
                for cell in row
            )
        )
    out.print(table)


def _warn(warnings: Any) -> None:
    for warning in warnings:
        say("! " + warning, "yellow")


def _show_graph(path: str, seen: Inspection, benchmark: str | None, *, every_relation: bool) -> None:
    head = f"{path}: {seen.entities:,} entities, {seen.relations:,} relations"
    say(head + (f"; this is {benchmark} as published" if benchmark else ""), "bold")
    _table(
        "split",
        "triples",
        "rows with an entity unseen in train",
        rows=[(s, n, seen.unseen_rows.get(s, 0)) for s, n in seen.triples.items()],
    )
    degree = seen.degree
    _table(
        "triples per entity", "median", "most", "entities in one triple only", "self-loops",
        rows=[(degree["mean"], degree["median"], int(degree["max"]), int(degree["once"]), seen.self_loops)],
    )  # fmt: skip
    shown = seen.relation_table if every_relation else seen.relation_table[:SHOWN_RELATIONS]
    rows = [(r.name, r.train, r.valid, r.test, r.heads, r.tails, r.category) for r in shown]
    _table("relation", "train", "valid", "test", "heads", "tails", "category", rows=rows)
    if len(shown) < seen.relations:
        say(f"... and {seen.relations - len(shown):,} more relations (--relations shows all)", "dim")
    if pairs := [pair for pair in seen.related if pair.kind != "symmetric"]:
        few = pairs if every_relation else pairs[:SHOWN_RELATIONS]
        related = [(pair.first, pair.second, pair.kind, pair.share) for pair in few]
        _table("relation", "says nearly the same as", "how", "share of pairs", rows=related)
        if len(few) < len(pairs):
            say(f"... and {len(pairs) - len(few):,} more pairs (--relations shows all)", "dim")
    if symmetric := len(seen.related) - len(pairs):
        say(f"{symmetric:,} relations hold in both directions for at least 80% of their pairs")
    if seen.confidential or seen.groups:
        say(f"{seen.confidential:,} statements are confidential; {seen.groups:,} groups")
    for note in seen.notes:
        say(note, "dim")
    _warn(seen.warnings)


def _show_parties(parties: Parties, statistics: dict[str, Any], views: list[Inspection] | None) -> None:
    rows = [
        (
            p["name"],
            p["entities"],
            p["entities_shared"],
            p["relations"],
            *(p["triples"][s] for s in ("train", "valid", "test")),
        )
        for p in statistics["parties"]
    ]
    _table("party", "entities", "shared with others", "relations", "train", "valid", "test", rows=rows)
    overlaps = statistics["overlaps"]
    most = sorted(overlaps, key=lambda row: -row["entities"])[:SHOWN_RELATIONS]
    rows = [(" and ".join(row["parties"]), row["entities"], row["relations"], row["triples"]) for row in most]
    _table("in common", "entities", "relations", "triples", rows=rows)
    if len(most) < len(overlaps):
        say(f"... and {len(overlaps) - len(most):,} more pairs of parties (--json shows all)", "dim")
    if statistics["distinct_triples"] is not None:
        total = sum(sum(p["triples"].values()) for p in statistics["parties"])
        say(f"{total:,} triples in all splits, {statistics['distinct_triples']:,} of them distinct")
    if others := parties.origin.get("alignments_of_others"):
        _warn([f"{len(others)} alignment files name a graph that is not here, and are not read: {', '.join(others)}"])
    if left := parties.origin.get("left_out"):
        _warn([f"{left:,} triples have no party that drew both ends, and are left out"])
    if twice := sum(row["triples"] for row in overlaps):
        _warn([f"{twice:,} times two parties hold the same triple: these parties are not disjoint"])
    for name, view in zip(parties.names, views or (), strict=False):
        _warn(f"{name}: {warning}" for warning in view.warnings)


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
