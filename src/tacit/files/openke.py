"""OpenKE id files in: `entity2id`, `relation2id` and `train2id`, `valid2id`, `test2id`, each with its row count on top.

Triples stand as *head tail relation* (not head relation tail), by number.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

from tacit.errors import BadInput, excerpt
from tacit.files.lines import bare, text_lines
from tacit.files.records import Faults, FileReading, RawFile
from tacit.graph import SPLITS, Ids, SplitName, name_fault

MAPS = ("entity2id", "relation2id")
STEMS = {*MAPS, *(f"{split}2id" for split in SPLITS)}


def find_openke(folder: Path) -> dict[str, Path] | None:
    """The id files of a folder by their stem, or None if it is no OpenKE folder."""
    found: dict[str, Path] = {}
    for path in sorted(folder.iterdir()):
        name = bare(path)
        if name.stem in STEMS and name.suffix in ("", ".txt", ".tsv"):
            if name.stem in found:
                raise BadInput(f"{folder}: found {found[name.stem].name} and {path.name}; expected one of them.")
            found[name.stem] = path
    return found if {*MAPS, "train2id"} <= found.keys() else None


def read_openke(files: dict[str, Path]) -> tuple[list[RawFile], list[str], list[str]]:
    """The splits of an OpenKE folder, and its entities and relations, some of which may occur in no triple."""
    entities, relations = (_read_map(files[stem]) for stem in MAPS)
    distinct = pa.array(
        [*entities, *relations], pa.string()
    ).dictionary_encode()  # a relation may share an entity's name
    place = np.array(distinct.indices.to_pylist(), np.int32)
    raws = [
        _read_split(files[f"{split}2id"], split, distinct.dictionary, place[: len(entities)], place[len(entities) :])
        for split in SPLITS
        if f"{split}2id" in files
    ]
    return raws, entities, relations


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 18


def _count(path: Path, rows: Iterator[tuple[int, str]]) -> int:
    number, text = next(rows, (1, ""))
    text = text.strip()
    if not _is_number(text):
        raise BadInput(f"{path}:{number}: found {excerpt(text)}; expected the number of rows that follow.")
    return int(text)


def _read_map(path: Path) -> list[str]:
    """Names by id."""
    rows = text_lines(path)
    count = _count(path, rows)
    names: dict[int, str] = {}
    for line, text in rows:
        name, _, digits = text.strip().replace("\t", " ").rpartition(" ")
        name = name.strip()
        if name_fault(name) or not _is_number(digits) or int(digits) >= count or int(digits) in names:
            raise BadInput(
                f"{path}:{line}: found {excerpt(text)}; expected a name and its own id from 0 to {count - 1}."
            )
        names[int(digits)] = name
    if len(names) != count or len(set(names.values())) != count:
        raise BadInput(
            f"{path}: found {len(names):,} ids of {len(set(names.values())):,} names; expected {count:,} of each."
        )
    return [names[i] for i in range(count)]


def _read_split(path: Path, split: SplitName, names: pa.Array, entities: Ids, relations: Ids) -> RawFile:
    rows = text_lines(path)
    count, faults = _count(path, rows), Faults(path)
    limits = (len(entities), len(entities), len(relations))
    kept: list[tuple[int, ...]] = []
    for line, text in rows:
        fields = text.split()
        if len(fields) == 3 and all(map(_is_number, fields)):
            row = tuple(map(int, fields))
            if all(number < limit for number, limit in zip(row, limits, strict=True)):
                kept.append(row)
                continue
        faults.reject(
            line, excerpt(text), f"head, tail and relation ids below {limits[0]}, {limits[1]} and {limits[2]}"
        )
    ids = np.array(kept, np.int64).reshape(-1, 3)
    triples = np.stack([entities[ids[:, 0]], relations[ids[:, 2]], entities[ids[:, 1]]], 1)
    total = len(kept) + faults.rejected
    if count != total:
        raise BadInput(f"{path}:1: found {count:,} as the number of rows; expected {total:,}, which follow.")
    reading = FileReading(str(path), split, total, faults.rejected, header=True, problems=faults.by_line())
    return RawFile(names, triples, reading)
