"""What a graph is like, and what would spoil an experiment on it.

Beside counts, this finds leakage between splits: triples that stand in two of them, and relations that say nearly the
same as another (near-duplicates, inverses; Toutanova and Chen 2015, Akrami et al. 2020), so that a test triple can be
read off the training triples.
"""

from __future__ import annotations

import unicodedata
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from tacit.graph import Graph, SplitName

RELATED_SHARE = 0.8
"""Two relations are related when this share of each one's pairs are the other's too."""
RELATED_LEAST = 20
"""... and at least so many pairs are."""


@dataclass(frozen=True)
class RelationRow:
    """One relation: triples per split, distinct heads and tails, and the usual category by means per head and tail."""

    name: str
    train: int
    valid: int
    test: int
    heads: int
    tails: int
    category: str


@dataclass(frozen=True)
class RelatedPair:
    """Two relations whose pairs are nearly the same (or one whose pairs are nearly its own, turned round)."""

    first: str
    second: str
    kind: Literal["duplicate", "inverse", "symmetric"]
    share: float


@dataclass(frozen=True)
class Inspection:
    """Everything `tacit data inspect` shows of one graph."""

    entities: int
    relations: int
    triples: dict[SplitName, int]
    rows: int
    duplicates: int
    rejected: int
    confidential: int
    groups: int
    degree: dict[str, float]
    unseen_entities: int
    unseen_rows: dict[SplitName, int]
    repeated: dict[str, int]
    related: list[RelatedPair]
    exposed: dict[SplitName, int]
    self_loops: int
    similar_names: int
    relation_table: list[RelationRow]
    fingerprint: str
    notes: list[str]
    warnings: list[str]

    def json(self) -> dict[str, Any]:
        return asdict(self)


def inspect(graph: Graph) -> Inspection:
    """Look a graph over: counts, and what would spoil an experiment on it.

    Parameters
    ----------
    graph
        What to look at; nothing of it is changed.
    """
    sizes = {name: len(split) for name, split in graph.splits.items()}
    pool = graph.statements
    degrees = np.bincount(pool.triples[:, [0, 2]].reshape(-1), minlength=len(graph.entities))
    seen = np.zeros(len(graph.entities), bool)
    seen[graph.train.triples[:, [0, 2]]] = True
    held_out: tuple[SplitName, ...] = ("valid", "test")
    unseen_rows = {name: int((~seen[graph.splits[name].triples[:, [0, 2]]]).any(axis=1).sum()) for name in held_out}
    occurring = np.zeros(len(graph.entities), bool)
    occurring[pool.triples[:, [0, 2]]] = True
    keys = {name: graph.keys(split.triples) for name, split in graph.splits.items()}
    pairs: tuple[tuple[SplitName, SplitName], ...] = (("valid", "train"), ("test", "train"), ("test", "valid"))
    repeated = {f"{late} in {early}": int(np.isin(keys[late], keys[early]).sum()) for late, early in pairs}
    related = related_relations(graph)
    exposed = {name: exposed_rows(graph, related, name) for name in held_out}
    reading = graph.reading
    files = reading.files if reading else ()
    facts: dict[str, Any] = {
        "entities": len(graph.entities),
        "relations": len(graph.relations),
        "triples": sizes,
        "rows": reading.rows if reading else len(pool),
        "duplicates": reading.duplicates if reading else 0,
        "rejected": reading.rejected if reading else 0,
        "confidential": 0 if pool.confidential is None else int(pool.confidential.sum()),
        "groups": len(graph.groups),
        "degree": {
            "mean": float(degrees.mean()) if len(degrees) else 0.0,
            "median": float(np.median(degrees)) if len(degrees) else 0.0,
            "max": float(degrees.max(initial=0)),
            "once": float((degrees == 1).sum()),
        },
        "unseen_entities": int((occurring & ~seen).sum()),
        "unseen_rows": unseen_rows,
        "repeated": repeated,
        "related": [
            RelatedPair(graph.relations[a], graph.relations[b], _kind(a, b, inverse), round(share, 4))
            for a, b, inverse, share in related
        ],
        "exposed": exposed,
        "self_loops": int((pool.triples[:, 0] == pool.triples[:, 2]).sum()),
        "similar_names": similar_names(graph),
        "relation_table": relation_table(graph),
        "fingerprint": graph.fingerprint,
        "notes": [f"{file.file}: {note}" for file in files for note in file.notes],
    }
    return Inspection(**facts, warnings=_warnings(facts))


def _kind(first: int, second: int, inverse: bool) -> Literal["duplicate", "inverse", "symmetric"]:
    return "duplicate" if not inverse else "symmetric" if first == second else "inverse"


def _warnings(facts: dict[str, Any]) -> list[str]:
    found = []

    def share(count: int, split: str) -> str:
        return f"{count:,} of {facts['triples'][split]:,} {split} triples ({count / facts['triples'][split]:.1%})"

    for pair, count in facts["repeated"].items():
        late, _, early = pair.split()
        if count:
            found.append(f"{share(count, late)} stand in {early} too: do not evaluate on this split")
    for split, count in facts["exposed"].items():
        if count and count >= 0.01 * facts["triples"][split]:
            found.append(f"{share(count, split)} can be read off train through a related relation")
    if facts["unseen_entities"]:
        rows = facts["unseen_rows"]
        found.append(
            f"{facts['unseen_entities']:,} entities occur only outside train; they are kept "
            f"(rows: {rows['valid']:,} of valid, {rows['test']:,} of test)"
        )
    if facts["duplicates"]:
        found.append(f"{facts['duplicates']:,} rows repeat a triple of the same split; each triple is kept once")
    if facts["rejected"]:
        found.append(f"{facts['rejected']:,} rows could not be read and were left out")
    if facts["similar_names"]:
        found.append(
            f"{facts['similar_names']:,} entity names differ from another only in case, blanks or Unicode form"
        )
    return found


def relation_table(graph: Graph) -> list[RelationRow]:
    """One row per relation, the most frequent first."""
    size, entities = len(graph.relations), max(len(graph.entities), 1)
    train, valid, test = (np.bincount(split.triples[:, 1], minlength=size) for split in graph.splits.values())
    triples = graph.statements.triples.astype(np.int64)
    distinct = [np.unique(triples[:, 1] * entities + triples[:, side]) for side in (0, 2)]
    heads, tails = (np.bincount(keys // entities, minlength=size) for keys in distinct)
    total = train + valid + test
    columns = zip(graph.relations, *(column.tolist() for column in (train, valid, test, heads, tails)), strict=True)
    rows = [RelationRow(name, a, b, c, h, t, _category(a + b + c, h, t)) for name, a, b, c, h, t in columns]
    return [rows[r] for r in np.argsort(-total, kind="stable").tolist()]


def _category(triples: int, heads: int, tails: int) -> str:
    """1-1, 1-N, N-1 or N-N: "many" from 1.5 on average (Bordes et al. 2013)."""
    if not triples:
        return "-"
    return f"{'N' if triples / tails >= 1.5 else '1'}-{'N' if triples / heads >= 1.5 else '1'}"


def related_relations(graph: Graph) -> list[tuple[int, int, bool, float]]:
    """Pairs of relations (first <= second) with nearly the same pairs of entities, as they are or turned round.

    Returns (first, second, turned round, share), the largest overlap first; share is of the larger relation.
    """
    triples = np.unique(graph.statements.triples, axis=0) if len(graph.statements) else graph.statements.triples
    triples = triples[triples[:, 0] != triples[:, 2]].astype(np.int64)
    relations, entities = len(graph.relations), len(graph.entities)
    sizes = np.bincount(triples[:, 1], minlength=relations)
    # Every triple also stands in turned round, under a relation of its own: inverses become duplicates.
    pairs = np.concatenate([triples[:, 0] * entities + triples[:, 2], triples[:, 2] * entities + triples[:, 0]])
    labels = np.concatenate([triples[:, 1], triples[:, 1] + relations])
    order = np.lexsort((labels, pairs))
    first, second, count = _co_occurrences(pairs[order], labels[order], 2 * relations)
    turned = second >= relations
    other = second - relations * turned
    keep = (first < relations) & (first <= other) & (count >= RELATED_LEAST)
    share = count / np.maximum(np.maximum(sizes[first % max(relations, 1)], sizes[other]), 1)
    keep &= share >= RELATED_SHARE
    rows = [
        (int(a), int(b), bool(c), float(d))
        for a, b, c, d in zip(first[keep], other[keep], turned[keep], share[keep], strict=True)
    ]
    return sorted(rows, key=lambda row: (-row[3], row))


def _co_occurrences(
    groups: npt.NDArray[np.int64], labels: npt.NDArray[np.int64], size: int
) -> tuple[npt.NDArray[np.int64], ...]:
    """How often two labels stand in the same group; rows are sorted by (group, label), without repeats.

    Compares each row with the one k places on, for k = 1, 2, ..., going on with those rows whose group is that large.
    """
    pieces: list[npt.NDArray[np.int64]] = []
    here = np.arange(len(groups))
    for gap in range(1, len(groups)):
        here = here[: np.searchsorted(here, len(groups) - gap)]
        here = here[groups[here + gap] == groups[here]]
        if not len(here):
            break
        pieces.append(labels[here] * size + labels[here + gap])
    codes, times = np.unique(np.concatenate([np.empty(0, np.int64), *pieces]), return_counts=True)
    return codes // max(size, 1), codes % max(size, 1), times


def exposed_rows(graph: Graph, related: list[tuple[int, int, bool, float]], split: SplitName) -> int:
    """How many triples of a split have a counterpart in train under a related relation."""
    triples = graph.splits[split].triples
    rows_of = [np.flatnonzero(triples[:, 1] == r) for r in range(len(graph.relations))] if related else []
    rows, counterparts = [np.empty(0, np.intp)], [np.empty((0, 3), np.int32)]
    for first, second, turned, _ in related:
        for here, there in {(first, second), (second, first)}:
            counterpart = triples[rows_of[here]][:, [2, 1, 0] if turned else [0, 1, 2]]
            counterpart[:, 1] = there
            rows.append(rows_of[here])
            counterparts.append(counterpart)
    hit = np.isin(graph.keys(np.concatenate(counterparts)), graph.keys(graph.train.triples))
    return len(np.unique(np.concatenate(rows)[hit]))


def similar_names(graph: Graph) -> int:
    """How many entity names fall together with another one once case, blanks and Unicode form are ignored."""
    folded = {unicodedata.normalize("NFKC", " ".join(name.split())).casefold() for name in graph.entities}
    return len(graph.entities) - len(folded)
