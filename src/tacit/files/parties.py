"""Folders of several parties, in and out."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path

from tacit.errors import BadInput, Problem, excerpt
from tacit.files.graphs import FORMATS, MANIFEST, PARTY_FILE, BadRows, fill_folder, read_graph, read_splits
from tacit.files.lines import bare, text_lines
from tacit.folders import new_folder, read_json, seal
from tacit.graph import SPLITS, Graph, SplitName
from tacit.parties import PARTY_NAME, Link, Parties, given

SCHEMA = "tacit.parties/1"
PARTIES = "parties.json"
ALIGNMENT = "alignment.tsv"


def write_parties(parties: Parties, path: str | PathLike[str], *, force: bool = False) -> None:
    """Write one folder per party, and parties.json.

    Parameters
    ----------
    parties
        What to write.
    path
        The folder; it appears whole or not at all.
    force
        Replace what an earlier call wrote there; anything else is never replaced.
    """
    with new_folder(Path(path), PARTIES, force=force) as folder:
        fill_parties(parties, folder)


def fill_parties(parties: Parties, folder: Path) -> None:
    """Write the parties' folders into a folder that exists."""
    for name, graph in zip(parties.names, parties.graphs, strict=True):
        (folder / name).mkdir()
        fill_folder(graph, folder / name)
    if parties.links is not None:
        rows = [(k.party, k.name, k.other, k.other_name, k.kind) for k in parties.links]
        lines = ["\t".join(row) + "\n" for row in [("party", "name", "other", "other_name", "kind"), *rows]]
        (folder / ALIGNMENT).write_text("".join(lines), encoding="utf-8")
    content = {"parties": list(parties.names), "aligned": parties.links is not None, "origin": dict(parties.origin)}
    seal(folder, PARTIES, SCHEMA, {**content, "statistics": parties.statistics()})


def holds_parties(folder: Path) -> bool:
    """Whether a folder is one of several parties rather than of one graph."""
    if not folder.is_dir() or _holds_graph(folder):
        return False
    below = any(path.is_dir() and _holds_graph(path) for path in folder.iterdir())
    return (folder / PARTIES).is_file() or bool(party_files(folder)) or below


def read_parties(path: str | PathLike[str], *, bad_rows: BadRows = "refuse") -> Parties:
    """Read parties from a folder.

    The folder was written by `write_parties`; or holds files named NAME-train, NAME-valid, NAME-test in any format; or
    one folder per party, with pairs of aligned names in files named alignment/A_B.

    Parameters
    ----------
    path
        The folder.
    bad_rows
        "refuse": one bad row and nothing is read. "skip": bad rows are left out, and counted in each `graph.reading`.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise BadInput(f"{folder}: no such folder.")
    try:
        return _read_own(folder) if (folder / PARTIES).is_file() else _read_given(folder, bad_rows)
    except OSError as error:
        raise BadInput(f"{error.filename or folder}: {error.strerror}.") from error


def _read_own(folder: Path) -> Parties:
    manifest = read_json(folder / PARTIES, SCHEMA, {"parties": list, "aligned": bool, "origin": dict})
    names = manifest["parties"]
    if not all(isinstance(name, str) and PARTY_NAME.fullmatch(name) for name in names) or len(set(names)) < len(names):
        raise BadInput(f"{folder / PARTIES}: found {excerpt(repr(names))}; expected the names of the parties' folders.")
    graphs = {name: read_graph(folder / name) for name in names}
    links = read_links(folder / ALIGNMENT, graphs) if manifest["aligned"] else None
    return Parties(tuple(graphs), tuple(graphs.values()), links, manifest["origin"])


def _read_given(folder: Path, bad_rows: BadRows) -> Parties:
    if files := party_files(folder):
        return given({name: read_splits(splits, bad_rows=bad_rows) for name, splits in files.items()})
    graphs = {
        path.name: read_graph(path, bad_rows=bad_rows)
        for path in sorted(folder.iterdir())
        if path.is_dir() and _holds_graph(path)
    }
    if not graphs:
        raise BadInput(
            f"{folder}: found no party's graph here.",
            hint="Expected folders with train files, or files named like hospital-train.tsv and hospital-test.tsv.",
        )
    if not (folder / "alignment").is_dir():
        return given(graphs)
    pairs = {f"{one}_{two}": (one, two) for one, two in itertools.permutations(graphs, 2)}
    files_of = {bare(file).stem: file for file in sorted((folder / "alignment").iterdir())}
    links = [link for stem, file in files_of.items() if stem in pairs for link in read_links(file, graphs, pairs[stem])]
    unused = [stem for stem in files_of if stem not in pairs]
    return replace(given(graphs, links), origin={"by": "given", "alignments_of_others": unused})


def _holds_graph(folder: Path) -> bool:
    names = [bare(path) for path in folder.iterdir()]
    return any(
        name.name == MANIFEST
        or name.stem == "train2id"
        or (name.stem.lower() == "train" and name.suffix.lower() in FORMATS)
        for name in names
    )


def party_files(folder: Path) -> dict[str, dict[SplitName, Path]]:
    """The files of a folder that are named after a party and a split."""
    found: dict[str, dict[SplitName, Path]] = {}
    for file in sorted(folder.iterdir()):
        name = bare(file)
        if name.suffix.lower() in FORMATS and (match := PARTY_FILE.fullmatch(name.stem)):
            splits = found.setdefault(match["party"], {})
            split: SplitName = match["split"]  # type: ignore[assignment]
            if split in splits:
                raise BadInput(f"{folder}: found {splits[split].name} and {file.name}; expected one of them.")
            splits[split] = file
    if headless := [party for party, splits in found.items() if "train" not in splits]:
        raise BadInput(f"{folder}: found files of {headless[0]!r}, but no {headless[0]}-train file among them.")
    return {party: {split: splits[split] for split in SPLITS if split in splits} for party, splits in found.items()}


def read_links(
    path: str | PathLike[str], graphs: Mapping[str, Graph], pair: Sequence[str] | None = None
) -> tuple[Link, ...]:
    """Read an alignment: rows of two names, those of the parties `pair`; or of party, name, party, name[, kind]."""
    problems, links = [], []
    for number, text in text_lines(Path(path)):
        fields = text.split("\t")
        if fields[:2] == ["party", "name"] and number == 1:
            continue
        if len(fields) == 2 and pair is not None:
            fields = [pair[0], fields[0], pair[1], fields[1]]
        try:
            links.append(_link(fields, graphs))
        except ValueError as error:
            expected = (
                "two names"
                if pair is not None
                else "party, name, party, name and maybe entity or relation, separated by tabs"
            )
            problems.append(Problem(str(path), number, str(error), expected))
    if problems:
        raise BadInput(f"{path}: {len(problems):,} rows cannot be used as an alignment.", problems)
    return tuple(dict.fromkeys(links))


def link_rows(path: str | PathLike[str], parties: Sequence[str]) -> tuple[Link, ...]:
    """Rows of party, name, party, name[, kind] between these parties, whose graphs are elsewhere."""
    problems, links = [], []
    for number, text in text_lines(Path(path)):
        fields = text.split("\t")
        if fields[:2] == ["party", "name"] and number == 1:
            continue
        try:
            link = _row(fields)
            if unknown := {link.party, link.other} - set(parties):
                raise ValueError(f"the party {excerpt(min(unknown))}, which is none of {', '.join(parties)}")
            links.append(link)
        except ValueError as error:
            expected = "party, name, party, name and maybe entity or relation, separated by tabs"
            problems.append(Problem(str(path), number, str(error), expected))
    if problems:
        raise BadInput(f"{path}: {len(problems):,} rows cannot be used as an alignment.", problems)
    return tuple(dict.fromkeys(links))


def _row(fields: Sequence[str]) -> Link:
    if len(fields) not in (4, 5):
        raise ValueError(f"{len(fields)} columns")
    kind = fields[4] if len(fields) == 5 else "entity"
    if kind not in ("entity", "relation"):
        raise ValueError(f"the kind {excerpt(kind)}")
    if fields[0] == fields[2]:
        raise ValueError(f"{excerpt(fields[0])} twice, where two parties meet")
    return Link(fields[0], fields[1], fields[2], fields[3], "entity" if kind == "entity" else "relation")


def _link(fields: Sequence[str], graphs: Mapping[str, Graph]) -> Link:
    link = _row(fields)
    for party, name in ((link.party, link.name), (link.other, link.other_name)):
        if party not in graphs:
            raise ValueError(f"the party {excerpt(party)}, which is not given")
        vocab = graphs[party].entities if link.kind == "entity" else graphs[party].relations
        if name not in vocab:
            raise ValueError(f"{excerpt(name)}, which is no {link.kind} of {party}")
    return link
