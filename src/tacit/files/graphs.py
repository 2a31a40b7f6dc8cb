"""Graphs in from any file, and out again.

A path is a file (all its triples are training triples), a folder with train, valid and test files in any of the
formats, a folder of OpenKE id files, or a folder that `write_graph` wrote.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa

from tacit.errors import BadInput
from tacit.files.delimited import Columns, read_delimited
from tacit.files.encoder import unite
from tacit.files.lines import bare
from tacit.files.openke import find_openke, read_openke
from tacit.files.rdf import LINE_FORMATS, TREE_FORMATS, n_triples, read_rdf, readable
from tacit.files.records import RawFile, Reading
from tacit.folders import new_folder, read_json, seal
from tacit.graph import NO_GROUP, SPLITS, Graph, Ids, Split, SplitName, Vocab, assemble, name_fault

LOG = logging.getLogger(__name__)
SCHEMA = "tacit.graph/1"
MANIFEST = "graph.json"
SEPARATORS = {".tsv": "\t", ".txt": "\t", ".csv": ","}
FORMATS = {*SEPARATORS, *LINE_FORMATS, *TREE_FORMATS}
SPLIT_OF: dict[str, SplitName] = {
    "train": "train",
    "valid": "valid",
    "val": "valid",
    "validation": "valid",
    "dev": "valid",
    "test": "test",
}
PARTY_FILE = re.compile(r"(?P<party>.+)[-_.](?P<split>train|valid|test)")

BadRows = Literal["refuse", "skip"]


def read_graph(
    path: str | PathLike[str],
    *,
    columns: Columns | None = None,
    separator: str | None = None,
    header: bool | None = None,
    bad_rows: BadRows = "refuse",
) -> Graph:
    """Read a graph from a file or a folder.

    Parameters
    ----------
    path
        .tsv, .txt, .csv, .nt, .nq, .ttl, .trig, .rdf, .xml, .owl, each also as .gz, .xz, .bz2, .zst; or a folder.
    columns
        For tables: head, relation, tail and optionally confidential and group, by name in the first row or by position
        from 1. Default: the first row's names if it has these, else the only three columns.
    separator
        For tables: what stands between columns. Default: a tab, or a comma in .csv.
    header
        For tables: whether the first row holds names of columns. Default: if it names head, relation and tail.
    bad_rows
        "refuse": one bad row and nothing is read. "skip": bad rows are left out, and counted in `graph.reading`.

    Raises
    ------
    BadInput
        With file, line, what was found and what was expected.
    """
    if bad_rows not in ("refuse", "skip"):
        raise ValueError(f"bad_rows is 'refuse' or 'skip', not {bad_rows!r}")
    path = Path(path)
    try:
        if path.is_dir() and (path / MANIFEST).is_file():
            return _read_own(path)
        if path.is_dir() and (openke := find_openke(path)):
            raws, entities, relations = read_openke(openke)
            return _join(raws, bad_rows, entities, relations)
        if not path.is_dir() and not path.is_file():
            raise BadInput(f"{path}: no such file or folder.")
        files: dict[SplitName, Path] = split_files(path) if path.is_dir() else {"train": path}
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror}.") from error
    return read_splits(files, columns=columns, separator=separator, header=header, bad_rows=bad_rows)


def read_splits(
    files: Mapping[SplitName, Path],
    *,
    columns: Columns | None = None,
    separator: str | None = None,
    header: bool | None = None,
    bad_rows: BadRows = "refuse",
) -> Graph:
    """Read a graph whose splits stand in the given files."""
    raws = []
    for split, file in files.items():
        suffix = bare(file).suffix.lower()
        if suffix in SEPARATORS:
            between, quotes = separator or SEPARATORS[suffix], suffix == ".csv"
            raw = read_delimited(file, split, separator=between, quotes=quotes, columns=columns, header=header)
        elif suffix in FORMATS:
            raw = read_rdf(file, split, suffix)
        else:
            known = ", ".join(sorted(FORMATS))
            raise BadInput(f"{file}: found a file of unknown format; expected one of {known}, also compressed.")
        if not raw.reading.rows and not (raw.reading.header and split != "train"):
            raise BadInput(f"{file}: found no statement in it; expected at least one.")
        raws.append(raw)
    return _join(raws, bad_rows)


def split_files(folder: Path) -> dict[SplitName, Path]:
    """The train, valid and test files of a folder."""
    found: dict[SplitName, Path] = {}
    for file in sorted(folder.iterdir()):
        name = bare(file)
        split = SPLIT_OF.get(name.stem.lower())
        if split is None or name.suffix.lower() not in FORMATS:
            continue
        if not file.is_file():
            raise BadInput(
                f"{file}: found no file here, but a folder or a link to nothing; expected the {split} triples."
            )
        if split in found:
            raise BadInput(f"{folder}: found two files for {split}, {found[split].name} and {file.name}; expected one.")
        found[split] = file
    if "train" in found:
        return {split: found[split] for split in SPLITS if split in found}
    content = sorted(file.name for file in folder.iterdir())
    hint = "Expected train.tsv, valid.tsv and test.tsv or the like, or OpenKE's train2id.txt and its companions."
    if any(PARTY_FILE.fullmatch(bare(file).stem) for file in folder.iterdir()):
        hint = "It looks like a folder of several parties: tacit.read_parties reads those."
    listing = ", ".join(content[:6]) + (", ..." if len(content) > 6 else "") if content else "nothing"
    raise BadInput(f"{folder}: nothing to read here; the folder holds {listing}.", hint=hint)


def _join(
    raws: list[RawFile],
    bad_rows: BadRows,
    entities: Sequence[str] = (),
    relations: Sequence[str] = (),
    prefixes: Mapping[str, str] | None = None,
) -> Graph:
    """One graph from the files of its splits, and from entities and relations that may occur in no triple."""
    reading = Reading(tuple(raw.reading for raw in raws))
    if bad_rows == "refuse" or reading.rejected == reading.rows > 0:
        reading.refuse()
    raws, prefixes = readable(raws, prefixes)
    extra = [pa.array(names, pa.string()) if names else pa.nulls(0, pa.string()) for names in (entities, relations)]
    names, rank, places = unite([*(raw.names for raw in raws), *extra])
    splits: dict[SplitName, Split] = {}
    for raw, place in zip(raws, places[: len(raws)], strict=True):
        group = None if raw.group is None else np.where(raw.group == NO_GROUP, NO_GROUP, place[raw.group])
        moved = not np.array_equal(place, np.arange(len(place)))  # a single table's names stay: no copy of its ids
        splits[raw.reading.split] = Split(place[raw.triples] if moved else raw.triples, raw.confidential, group)
    graph, repeats = assemble(
        names,
        splits,
        rank=rank,
        entities=places[-2],
        relations=places[-1],
        prefixes=prefixes,
        checked=not any(raw.rdf for raw in raws),
    )
    reading = reading.with_duplicates(repeats)
    LOG.info(
        "read %s rows from %d files: %s duplicates, %s rejected",
        reading.rows,
        len(raws),
        reading.duplicates,
        reading.rejected,
    )
    return replace(graph, reading=reading)


def write_graph(
    graph: Graph, path: str | PathLike[str], *, format: Literal["tsv", "nt"] = "tsv", force: bool = False
) -> None:
    """Write a graph to a folder: one file per split, and graph.json with its schema, counts and fingerprint.

    Parameters
    ----------
    graph
        What to write.
    path
        The folder; it appears whole or not at all.
    format
        tsv; or nt, N-Triples, which has no place for marks and groups: a graph that has any is refused rather than
        stripped.
    force
        Replace what an earlier call wrote there; anything else is never replaced.
    """
    if format not in ("tsv", "nt"):
        raise ValueError(f"format is 'tsv' or 'nt', not {format!r}")
    if format == "nt" and (graph.statements.confidential is not None or graph.statements.group is not None):
        raise BadInput("N-Triples cannot hold confidential marks or groups.", hint="Write this graph as TSV.")
    with new_folder(Path(path), MANIFEST, force=force) as folder:
        fill_folder(graph, folder, format)


def fill_folder(graph: Graph, folder: Path, format: Literal["tsv", "nt"] = "tsv") -> None:
    """Write a graph's files into a folder that exists."""
    for name in SPLITS:
        with open(folder / f"{name}.{format}", "w", encoding="utf-8", newline="\n") as file:
            file.writelines(n_triples(graph, name) if format == "nt" else _table(graph, name))
    occurring = graph.statements.triples
    content = {
        "format": format,
        "entities": len(graph.entities),
        "relations": len(graph.relations),
        "triples": {name: len(split) for name, split in graph.splits.items()},
        "fingerprint": graph.fingerprint,
        "prefixes": dict(graph.prefixes),
        "unused_entities": _missing(graph.entities, occurring[:, [0, 2]]),
        "unused_relations": _missing(graph.relations, occurring[:, 1]),
    }
    seal(folder, MANIFEST, SCHEMA, content)


def _table(graph: Graph, name: SplitName) -> list[str]:
    split = graph.splits[name]
    names = (graph.entities.names, graph.relations.names, graph.entities.names)
    header = ["head", "relation", "tail"]
    rows = [[column[i] for i in ids] for column, ids in zip(names, split.triples.T.tolist(), strict=True)]
    if split.confidential is not None:
        header.append("confidential")
        rows.append(["true" if mark else "false" for mark in split.confidential.tolist()])
    if split.group is not None:
        header.append("group")
        rows.append(["" if group == NO_GROUP else graph.groups[group] for group in split.group.tolist()])
    return ["\t".join(row) + "\n" for row in [tuple(header), *zip(*rows, strict=True)]]


def _missing(vocab: Vocab, used: Ids) -> list[str]:
    absent = np.ones(len(vocab), bool)
    absent[used] = False
    return [vocab[i] for i in np.flatnonzero(absent).tolist()]


def _read_own(folder: Path) -> Graph:
    """Read what `write_graph` wrote, and check that it is still that."""
    fields = {"format": str, "fingerprint": str, "prefixes": dict, "unused_entities": list, "unused_relations": list}
    manifest = read_json(folder / MANIFEST, SCHEMA, fields)
    suffix = f".{manifest['format']}"
    texts = [*manifest["prefixes"].values(), *manifest["unused_entities"], *manifest["unused_relations"]]
    if suffix not in (".tsv", ".nt") or not all(isinstance(text, str) and name_fault(text) is None for text in texts):
        raise BadInput(f"{folder / MANIFEST}: found values that tacit does not write there.")
    raws = [
        read_delimited(file, split, separator="\t", quotes=False, header=True)
        if suffix == ".tsv"
        else read_rdf(file, split, suffix)
        for split in SPLITS
        if (file := folder / f"{split}{suffix}")
    ]
    graph = _join(raws, "refuse", manifest["unused_entities"], manifest["unused_relations"], manifest["prefixes"])
    if graph.fingerprint != manifest["fingerprint"]:
        raise BadInput(
            f"{folder}: its files no longer hold the graph that {MANIFEST} was written for.",
            hint=f"If you changed them on purpose, delete {folder / MANIFEST} and they are read as they are.",
        )
    return graph
