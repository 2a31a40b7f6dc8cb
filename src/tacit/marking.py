"""Which statements are confidential, and which belong together: the curator's word (DPKGE, Han et al. 2022)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from tacit.draws import Purpose, Stream
from tacit.errors import BadInput, TacitError, excerpt
from tacit.graph import NO_GROUP, Graph, Ids, Mask, Split, Vocab

Part = Literal["head", "relation", "tail"]
PARTS: tuple[Part, ...] = ("head", "relation", "tail")


def select(
    graph: Graph,
    *,
    relations: Sequence[str] = (),
    match: Mapping[Part, str] | Sequence[tuple[Part, str]] = (),
    triples: Iterable[tuple[str, str, str]] = (),
    share: float | None = None,
    seed: int = 0,
) -> Mask:
    """Which rows of `graph.statements` any of these ways of saying it means.

    Parameters
    ----------
    graph
        What to choose from.
    relations
        All statements of these relations.
    match
        Statements in whose head, relation or tail these regular expressions are found: all of them, of which a part may
        have several.
    triples
        These very statements; one that the graph does not have is an error.
    share
        A random share of all statements. A statement that stands in two splits is drawn once.
    seed
        Of that share.
    """
    pool = graph.statements.triples
    chosen = np.zeros(len(pool), bool)
    if isinstance(relations, str):
        raise TacitError(f"Relations come as a list: [{relations!r}].")
    if relations:
        chosen |= np.isin(pool[:, 1], [graph.relations.id(name) for name in relations])
    if match:
        fits = np.ones(len(pool), bool)
        for part, pattern in match.items() if isinstance(match, Mapping) else match:
            fits &= _matching(_vocab(graph, part), pattern)[pool[:, PARTS.index(part)]]
        chosen |= fits
    if wanted := list(triples):
        if strange := [triple for triple in wanted if isinstance(triple, str) or len(triple) != 3]:
            raise BadInput(f"found {excerpt(repr(strange[0]))}; expected three names: head, relation, tail.")
        entities, relations_ = graph.entities, graph.relations
        ids = np.array([(entities.id(h), relations_.id(r), entities.id(t)) for h, r, t in wanted], np.int32)
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
    """The graph with some of its statements confidential. What is confidential no longer is in no group any more.

    Parameters
    ----------
    graph
        What to mark in.
    chosen
        One truth value for each row of `graph.statements`, as `select` gives them.
    fresh
        Forget what was marked before; default: it stays marked.
    """
    if chosen.dtype != bool or len(chosen) != len(graph.statements):
        raise TacitError(f"A choice is one truth value for each of the {len(graph.statements):,} statements.")
    marks = chosen.copy()
    if not fresh and graph.statements.confidential is not None:
        marks |= graph.statements.confidential
    keys = graph.keys(graph.statements.triples)
    marks = np.isin(keys, keys[marks])  # a mark belongs to the statement, whichever split a copy stands in
    return _with(graph, marks, graph.statements.group, graph.groups)


def group(graph: Graph, part: Part, pattern: str | None = None) -> Graph:
    """The graph with its confidential statements grouped by their head, relation or tail.

    Parameters
    ----------
    graph
        With something marked.
    part
        head, relation or tail: what statements of one group have in common.
    pattern
        A regular expression: groups are by what its first bracket (or all of it) finds in that name. A statement in
        which it finds nothing, or that is not confidential, is in no group. Default: by the whole name.
    """
    pool = graph.statements
    if pool.confidential is None:
        raise TacitError("Groups are for confidential statements, and none is marked.")
    expression = _compiled("(?s:.*)" if pattern is None else pattern)
    found = [expression.search(name) for name in _vocab(graph, part)]
    labels = [hit and hit.group(1 if expression.groups else 0) for hit in found]
    groups = Vocab(label for label in labels if label)
    ids = np.array([groups.id(label) if label else NO_GROUP for label in labels], np.int32)
    return _with(graph, pool.confidential, ids[pool.triples[:, PARTS.index(part)]], groups)


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


def _with(graph: Graph, marks: Mask, groups: Ids | None, names: Vocab) -> Graph:
    """The graph with these marks and groups, one for each row of `statements`; groups only where there is a mark."""
    groups = np.full(len(marks), NO_GROUP, np.int32) if groups is None else np.where(marks, groups, NO_GROUP)
    used = np.unique(groups[groups != NO_GROUP])
    renumber = np.full(len(names) + 1, NO_GROUP, np.int32)  # its last place is where NO_GROUP points
    renumber[used] = np.arange(len(used), dtype=np.int32)
    cuts = np.cumsum([len(split) for split in graph.splits.values()])[:-1]
    parts = zip(graph.splits.items(), np.split(marks, cuts), np.split(renumber[groups], cuts), strict=True)
    splits = {
        name: Split(split.triples, mask if marks.any() else None, ids if len(used) else None)
        for (name, split), mask, ids in parts
    }
    kept = Vocab.trusted([names[i] for i in used.tolist()])
    return replace(graph, train=splits["train"], valid=splits["valid"], test=splits["test"], groups=kept)


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
