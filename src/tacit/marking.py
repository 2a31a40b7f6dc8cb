"""Which statements are confidential, and which belong together: the curator's word (DPKGE, Han et al. 2022)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from tacit.draws import Purpose, Stream
from tacit.errors import BadInput, TacitError, excerpt
from tacit.graph import NO_GROUP, SPLITS, Graph, Ids, Mask, Split, Vocab

Part = Literal["head", "relation", "tail"]
PARTS: tuple[Part, ...] = ("head", "relation", "tail")


def select(
    graph: Graph,
    *,
    relations: Sequence[str] = (),
    match: Mapping[Part, str] | None = None,
    triples: Iterable[tuple[str, str, str]] = (),
    share: float | None = None,
    seed: int = 0,
) -> Mask:
    """Which rows of `graph.statements` any of these ways of saying it means.

    Parameters
    ----------
    relations
        All statements of these relations.
    match
        Statements whose head, relation and tail contain these regular expressions (all that are given).
    triples
        These very statements; one that the graph does not have is an error.
    share
        A random share of all statements, drawn with `seed`. A statement that stands in two splits is drawn once.
    """
    pool = graph.statements.triples
    chosen = np.zeros(len(pool), bool)
    if relations:
        chosen |= np.isin(pool[:, 1], [graph.relations.id(name) for name in relations])
    if match:
        fits = np.ones(len(pool), bool)
        for part, pattern in match.items():
            fits &= _matching(_vocab(graph, part), pattern)[pool[:, PARTS.index(part)]]
        chosen |= fits
    if wanted := list(triples):
        ids = np.array(
            [(graph.entities.id(h), graph.relations.id(r), graph.entities.id(t)) for h, r, t in wanted], np.int32
        )
        keys, known = graph.keys(ids), graph.keys(pool)
        if absent := np.flatnonzero(~np.isin(keys, known)).tolist():
            example = excerpt(str(wanted[absent[0]]))
            raise BadInput(f"{len(absent):,} of {len(wanted):,} triples are not in the graph, such as {example}.")
        chosen |= np.isin(known, keys)
    if share is not None:
        if not 0 <= share <= 1:
            raise TacitError(f"A share is from 0 to 1, not {share}.")
        distinct, which = np.unique(graph.keys(pool), return_inverse=True)
        drawn = np.zeros(len(distinct), bool)
        drawn[Stream(seed, Purpose.MARK).permutation(len(distinct))[: round(share * len(distinct))]] = True
        chosen |= drawn[which.reshape(-1)]
    return chosen


def mark(graph: Graph, chosen: Mask, *, fresh: bool = False) -> Graph:
    """The graph with these rows of `statements` confidential, beside what was (unless `fresh`)."""
    marks = chosen.copy()
    if not fresh and graph.statements.confidential is not None:
        marks |= graph.statements.confidential
    keys = graph.keys(graph.statements.triples)
    marks = np.isin(keys, keys[marks])  # a mark belongs to the statement, whichever split a copy stands in
    return _with(graph, marks if marks.any() else None, graph.statements.group, graph.groups)


def group(graph: Graph, part: Part, pattern: str | None = None) -> Graph:
    """The graph with its confidential statements grouped by their head, relation or tail.

    With a pattern, by what its first bracket (or all of it) finds there; a statement in which it finds nothing, or that
    is not confidential, is in no group.
    """
    pool = graph.statements
    if pool.confidential is None:
        raise TacitError("Groups are for confidential statements, and none is marked.")
    expression = _compiled(pattern or "(?s:.*)")
    found = [expression.search(name) for name in _vocab(graph, part)]
    labels = [hit and hit.group(1 if expression.groups else 0) for hit in found]
    groups = Vocab(label for label in labels if label)
    ids = np.array([groups.id(label) if label else NO_GROUP for label in labels], np.int32)
    rows = np.where(pool.confidential, ids[pool.triples[:, PARTS.index(part)]], NO_GROUP).astype(np.int32)
    used = np.unique(rows[rows != NO_GROUP])
    renumber = np.full(len(groups) + 1, NO_GROUP, np.int32)
    renumber[used] = np.arange(len(used), dtype=np.int32)
    return _with(graph, pool.confidential, renumber[rows], Vocab(groups[i] for i in used.tolist()))


def marked_per_relation(graph: Graph) -> list[dict[str, Any]]:
    """Statements and confidential statements of each relation, the most frequent first."""
    pool, names = graph.statements, graph.relations
    total = np.bincount(pool.triples[:, 1], minlength=len(names))
    marks = np.zeros(len(pool), bool) if pool.confidential is None else pool.confidential
    secret = np.bincount(pool.triples[marks, 1], minlength=len(names))
    order = np.argsort(-total, kind="stable").tolist()
    return [{"relation": names[r], "statements": int(total[r]), "confidential": int(secret[r])} for r in order]


def confidential_share(graph: Graph) -> float:
    """The share of statements that are confidential."""
    marks = graph.statements.confidential
    return 0.0 if marks is None else float(marks.mean())


def _with(graph: Graph, marks: Mask | None, groups: Ids | None, names: Vocab) -> Graph:
    cuts = np.cumsum([len(split) for split in graph.splits.values()])[:-1]
    pieces: list[list[npt.NDArray[Any] | None]] = [
        [None] * len(SPLITS) if rows is None or (rows is groups and not len(names)) else list(np.split(rows, cuts))
        for rows in (marks, groups)
    ]
    splits = {
        name: Split(split.triples, confidential, ids)
        for (name, split), confidential, ids in zip(graph.splits.items(), *pieces, strict=True)
    }
    return replace(graph, train=splits["train"], valid=splits["valid"], test=splits["test"], groups=names)


def _vocab(graph: Graph, part: Part) -> Vocab:
    if part not in PARTS:
        raise TacitError(f"A statement has a head, a relation and a tail; not {excerpt(part)}.")
    return graph.relations if part == "relation" else graph.entities


def _matching(vocab: Vocab, pattern: str) -> Mask:
    expression = _compiled(pattern)
    return np.fromiter((expression.search(name) is not None for name in vocab), bool, len(vocab))


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise TacitError(f"{excerpt(pattern)} is no regular expression: {error}.") from None
