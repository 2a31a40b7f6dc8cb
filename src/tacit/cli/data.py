"""`tacit data`: get graphs in, look at them, mark them, divide them."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, TimeElapsedColumn

from tacit import datasets
from tacit.cli import show
from tacit.cli.options import AsJson, Columns, DataFolder, Force, Header, Separator, SkipBad, one_of, read_any, shares
from tacit.errors import TacitError
from tacit.files import (
    PARTIES,
    fill_parties,
    read_graph,
    read_links,
    write_graph,
)
from tacit.files.graphs import MANIFEST, fill_folder
from tacit.folders import log_to, new_folder
from tacit.graph import SPLITS
from tacit.inspection import inspect
from tacit.marking import confidential_share, group, mark, marked_per_relation, select
from tacit.parties import METHODS, Parties, given, partition
from tacit.sources import Imported, import_graph, read_mapping
from tacit.sources.mapping import shipped

data = typer.Typer(no_args_is_help=True, help="Get graphs in, look at them, mark them, divide them.")


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
    """Show what a graph holds and what is suspicious about it.

    PATH is a file, a folder, the name of a benchmark, or clinic-small or clinic-demo.

    Examples:
      tacit data inspect hospital.tsv
      tacit data inspect clinic-demo --relations
    """
    with show.busy(f"reading {path}", as_json):
        found = read_any(path, data, columns, separator, header, skip_bad)
        views = [inspect(graph) for graph in (found if isinstance(found, Parties) else [found])]
        statistics = found.statistics() if isinstance(found, Parties) else {}
    if isinstance(found, Parties):
        if as_json:
            parties = [{"name": name} | view.json() for name, view in zip(found.names, views, strict=True)]
            print(json.dumps(statistics | {"parties": parties}))
        else:
            show.parties(found, statistics, views)
    elif as_json:
        print(json.dumps({"benchmark": datasets.recognise(found)} | views[0].json()))
    else:
        show.graph(path, views[0], datasets.recognise(found), every_relation=relations)


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
    known: Annotated[
        int, typer.Option(min=0, help="Hold out only triples whose ends and relation keep so many in train.")
    ] = 0,
    alignment: Annotated[Path | None, typer.Option(help="By given: pairs of names that mean the same.")] = None,
    columns: Columns = None,
    separator: Separator = None,
    header: Header = None,
    skip_bad: SkipBad = False,
    data: DataFolder = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Divide a graph among parties, or put given graphs together, and write one folder each.

    Examples:
      tacit data partition hospital.tsv --by relations --parts 3 --out parts
      tacit data partition zh.tsv en.tsv --by given --alignment links.tsv --out both
    """
    with new_folder(out_path, PARTIES, force=force) as folder, log_to(folder), show.busy("dividing", as_json):
        sources = dict(map(_named_path, paths)) if by == "given" else dict(zip(paths, paths, strict=True))
        graphs = {
            name: one_of(read_any(path, data, columns, separator, header, skip_bad), path)
            for name, path in sources.items()
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
            made = partition(graph, by, parts, seed=seed, share=share, split=shares(split), known=known)  # type: ignore[arg-type]
        fill_parties(made, folder)
        statistics = made.statistics()
    if as_json:
        print(json.dumps({"out": str(out_path), "origin": dict(made.origin)} | statistics))
        return
    show.parties(made, statistics, None)
    show.say(f"\nWritten to {out_path}. Each party's folder is a graph of its own, such as {out_path / made.names[0]}.")


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
    """Write a graph, read from anything, as a folder of TSV or N-Triples files.

    Examples:
      tacit data convert hospital.csv --columns patient,has,code --out graph
      tacit data convert fb15k-237 --format nt --out triples
    """
    if format not in ("tsv", "nt"):
        raise TacitError(f"--format is tsv or nt, not {format}.")
    with show.busy("converting", as_json):
        graph = one_of(read_any(path, data, columns, separator, header, skip_bad), path)
        write_graph(graph, out_path, format=format, force=force)  # type: ignore[arg-type]
    if as_json:
        sizes = {name: len(split) for name, split in graph.splits.items()}
        print(json.dumps({"out": str(out_path), "fingerprint": graph.fingerprint, "triples": sizes}))
    else:
        show.say(f"{graph} written to {out_path}.")


@data.command("import")
def data_import(
    mapping: Annotated[
        str, typer.Argument(help=f"A mapping file (TOML), or one that comes with tacit: {', '.join(shipped())}.")
    ],
    out_path: Annotated[Path | None, typer.Option("--out", help="The folder to write.")] = None,
    source: Annotated[
        str | None, typer.Option(help="Where the data are: a folder of tables, an SQLite file, or postgresql.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show counts and first rows; write nothing.")] = False,
    skip_bad: SkipBad = False,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Make a graph out of databases, by a mapping of queries to statements.

    Examples:
      tacit data import mapping.toml --source tables/ --dry-run
      tacit data import mimic-iii --source postgresql --out graph
    """
    _write_or_look(out_path, dry_run)
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
        entries = [{**asdict(entry), "problems": [str(p) for p in entry.problems]} for entry in made.entries]
        facts["said_by_several"] = made.said_by_several
        print(json.dumps(facts | {"out": out_path and str(out_path), "confidential_share": share, "entries": entries}))
        return
    rows = [
        (entry.place.partition(": ")[2], entry.rows, entry.kept, entry.nulls, entry.duplicates, entry.rejected)
        for entry in made.entries
    ]
    show.table("entry", "rows", "kept", "no value", "repeated", "rejected", rows=rows)
    if dry_run:
        first = [row for entry in made.entries for row in entry.first[:1]]
        show.table("head", "relation", "tail", rows=first, title="the first row of each")
    show.marks(counts, share)
    if nulls := sum(entry.nulls for entry in made.entries):
        show.warn([f"{nulls:,} rows have no value where a name needs one, and are skipped"])
    if rejected := sum(entry.rejected for entry in made.entries):
        show.warn([f"{rejected:,} rows give names that cannot be, and are left out"])
    show.say(f"{made.graph}" + (f" written to {out_path}." if out_path else "; nothing written."))


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
    """Say which statements are confidential, and which belong together. Shows what is marked before it writes.

    Examples:
      tacit data mark graph --relation diagnosed_with --dry-run
      tacit data mark graph --match head=^patient: --group head --out marked --yes
    """
    _write_or_look(out_path, dry_run)
    if not (relation or match or triples or share is not None or group_by or fresh):
        raise TacitError("Say what to mark: by --relation, --match, --triples or --share.")
    graph = one_of(read_any(path, data, columns, separator, header, skip_bad), path)
    wanted = [triple for split in SPLITS for triple in read_graph(triples).named(split)] if triples else []
    patterns = [_part_and_pattern(text) for text in match or ()]
    chosen = select(graph, relations=relation or (), match=patterns, triples=wanted, share=share, seed=seed)
    graph = mark(graph, chosen, fresh=fresh)
    if group_by:
        part, pattern = _part_and_pattern(group_by) if "=" in group_by else (group_by, None)
        graph = group(graph, part, pattern)  # type: ignore[arg-type]
    counts, portion = marked_per_relation(graph), confidential_share(graph)
    if not as_json:
        show.marks(counts, portion)
        show.say(f"{len(graph.groups):,} groups")
    if out_path is not None:
        if not yes and not as_json and sys.stdin.isatty():
            typer.confirm(f"Write this to {out_path}?", abort=True)
        write_graph(graph, out_path, force=force)
    if as_json:
        facts = {"relations": counts, "confidential_share": portion, "groups": len(graph.groups)}
        print(json.dumps(facts | {"out": out_path and str(out_path)}))
    else:
        show.say(f"Written to {out_path}." if out_path else "Nothing written.")


def _import(mapping: str, source: str | None, skip_bad: bool, quiet: bool) -> Imported:
    """Import with a bar on a terminal."""
    recipe = read_mapping(mapping)
    if quiet or not sys.stderr.isatty():
        return import_graph(recipe, source, skip_bad=skip_bad)
    columns = ("{task.description}", BarColumn(), "{task.fields[rows]:,} rows", TimeElapsedColumn())
    with show.progress(*columns) as bar:
        task = bar.add_task("importing", total=len(recipe.statements), rows=0)
        return import_graph(
            recipe,
            source,
            skip_bad=skip_bad,
            progress=lambda entry, _, rows: bar.update(task, completed=entry, rows=rows),
        )


def _write_or_look(out_path: Path | None, dry_run: bool) -> None:
    if out_path is None and not dry_run:
        raise TacitError("Say where to write with --out, or look first with --dry-run.")
    if out_path is not None and dry_run:
        raise TacitError("--dry-run writes nothing: leave it out, or leave out --out.")


def _part_and_pattern(text: str) -> tuple[Any, str]:
    part, _, pattern = text.partition("=")
    if not pattern:
        raise TacitError(f"{text!r}: expected head=REGEX, relation=REGEX or tail=REGEX.")
    return part, pattern


def _named_path(argument: str) -> tuple[str, str]:
    """NAME=PATH, or a path whose file or folder gives the name."""
    name, equals, path = argument.partition("=")
    return (name, path) if equals and "/" not in name else (Path(argument).name.split(".")[0], argument)
