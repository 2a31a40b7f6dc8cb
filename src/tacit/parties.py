"""One graph into the graphs of several parties, or several given graphs with an alignment.

    triples     every party gets a random share of all triples, split anew (FedR, Zhang et al. 2022)
    entities    every party draws a subset of the entities and gets triples among them (DP-FLames, Hu et al. 2023)
    relations   relations are dealt out, and every party gets the triples of its own (FedE, Chen et al. 2021)

No triple ever goes to two parties. The result depends on the graph and the seed alone, not on the order of any file.
"""

from __future__ import annotations

import itertools
import logging
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, overload

import numpy as np
import numpy.typing as npt

from tacit.draws import Purpose, Stream
from tacit.errors import TacitError, excerpt
from tacit.graph import NO_GROUP, SPLITS, Graph, Ids, Split, Vocab, assemble, concatenate

LOG = logging.getLogger(__name__)
PARTY_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
RESERVED = {"parties.json", "alignment.tsv", "alignment", "private", "tables", "run", "federations"}
"""Names that something else in a folder of parties has."""
Kind = Literal["entity", "relation"]
By = Literal["triples", "entities", "relations"]
FRESH_SPLIT = (0.8, 0.1, 0.1)


@dataclass(frozen=True)
class Link:
    """One thing under the names it has at two parties."""

    party: str
    name: str
    other: str
    other_name: str
    kind: Kind = "entity"


@dataclass(frozen=True)
class Parties(Sequence[Graph]):
    """The graphs of several parties.

    Attributes
    ----------
    names
        One per party; also its folder's name.
    graphs
        One per party, each with a vocabulary of its own.
    links
        Which names of different parties mean the same. None: equal names do, and no others.
    origin
        How the parties came about: method, seed, what was left out. JSON values only.
    """

    names: tuple[str, ...]
    graphs: tuple[Graph, ...]
    links: tuple[Link, ...] | None = None
    origin: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.names) != len(self.graphs) or len(set(self.names)) != len(self.names):
            raise TacitError("Every party needs a name of its own.")
        for name in self.names:
            if not PARTY_NAME.fullmatch(name) or name in RESERVED:
                raise TacitError(
                    f"{excerpt(name)} cannot be the name of a party: use letters, digits, dots, dashes and underscores."
                )

    def __len__(self) -> int:
        return len(self.graphs)

    @overload
    def __getitem__(self, item: int) -> Graph: ...
    @overload
    def __getitem__(self, item: slice) -> Sequence[Graph]: ...
    def __getitem__(self, item: int | slice) -> Graph | Sequence[Graph]:
        return self.graphs[item]

    def shared(self, one: int, two: int, kind: Kind = "entity") -> tuple[Ids, Ids]:
        """The ids at party `one` and at party `two` of what both of them hold."""
        vocabs = [self.graphs[i].entities if kind == "entity" else self.graphs[i].relations for i in (one, two)]
        if self.links is None:
            there = vocabs[0].positions(vocabs[1])
            return np.flatnonzero(there >= 0).astype(np.int32), there[there >= 0]
        pair = self.names[one], self.names[two]
        rows = []
        for link in self.links:
            if link.kind == kind and (link.party, link.other) == pair:
                rows.append((vocabs[0].id(link.name), vocabs[1].id(link.other_name)))
            elif link.kind == kind and (link.other, link.party) == pair:
                rows.append((vocabs[0].id(link.other_name), vocabs[1].id(link.name)))
        ids = np.array(rows, np.int32).reshape(-1, 2)
        return ids[:, 0], ids[:, 1]

    def statistics(self) -> dict[str, Any]:
        """Sizes per party, and what each pair of parties has in common."""
        held = [np.zeros(len(graph.entities), bool) for graph in self.graphs]
        overlaps = []
        for one, two in itertools.combinations(range(len(self)), 2):
            here, there = self.shared(one, two)
            held[one][here] = held[two][there] = True
            overlaps.append(
                {
                    "parties": [self.names[one], self.names[two]],
                    "entities": len(here),
                    "relations": len(self.shared(one, two, "relation")[0]),
                    "triples": self._common_triples(one, two),
                }
            )
        return {
            "parties": [
                {
                    "name": self.names[i],
                    "entities": len(graph.entities),
                    "entities_shared": int(held[i].sum()),
                    "relations": len(graph.relations),
                    "triples": {name: len(split) for name, split in graph.splits.items()},
                }
                for i, graph in enumerate(self.graphs)
            ],
            "overlaps": overlaps,
            "distinct_triples": self._distinct_triples() if self.links is None else None,
        }

    def _distinct_triples(self) -> int:
        rows = [split.triples for graph in _renamed(self.graphs)[1] for split in graph]
        return len(np.unique(np.concatenate(rows), axis=0))

    def _common_triples(self, one: int, two: int) -> int:
        """How many triples of one party are also the other's, under the alignment."""
        here, there = self.graphs[one], self.graphs[two]
        maps = []
        for kind, size in (("entity", len(there.entities)), ("relation", len(there.relations))):
            ids, others = self.shared(one, two, kind)  # type: ignore[arg-type]
            back = np.full(size, -1, np.int32)
            back[others] = ids
            maps.append(back)
        triples = there.statements.triples
        moved = np.stack([maps[0][triples[:, 0]], maps[1][triples[:, 1]], maps[0][triples[:, 2]]], 1)
        moved = moved[(moved >= 0).all(axis=1)]
        return len(np.intersect1d(here.keys(moved), here.keys(here.statements.triples)))


def partition(
    graph: Graph,
    by: By,
    parts: int,
    *,
    seed: int = 0,
    share: float = 0.7,
    split: tuple[float, float, float] | Literal["keep"] | None = None,
    known: int = 0,
) -> Parties:
    """Divide a graph among parties.

    Parameters
    ----------
    graph
        What is divided; no triple of it goes to two parties.
    by
        "triples", "entities" or "relations": what is dealt out.
    parts
        How many parties.
    seed
        Everything random follows from it.
    share
        For "entities": the share of all entities that each party draws. Triples whose ends no party drew together are
        left out, and counted in `origin`.
    split
        How each party's triples become train, valid and test: three shares, or "keep" for the graph's own splits.
        Default: the method's own, which is "keep" for entities and 80/10/10 for triples and relations; and 80/10/10
        for a graph that has no splits.
    known
        Hold a triple out for valid or test only if its head, its tail and its relation each keep so many triples in
        train. Fewer than asked for are held out if there are no more such triples. FedR's code does so with 2.
    """
    source = graph.fingerprint
    if by not in METHODS:
        raise TacitError(f"A graph is divided by {', '.join(METHODS)}; not by {by!r}.")
    if not 1 <= parts <= max(len(graph.statements), 1):
        raise TacitError(f"{len(graph.statements):,} triples can be divided among 1 or more parties, not {parts:,}.")
    if not 0 < share <= 1:
        raise TacitError(f"The share of entities is above 0 and at most 1, not {share}.")
    if split is None:
        split = "keep" if by == "entities" and (len(graph.valid) or len(graph.test)) else FRESH_SPLIT
    if known < 0 or (known and split == "keep"):
        raise TacitError(f"known is a number of triples from 0 on, for a fresh split; found {known} for {split}.")
    if split != "keep":
        _check_shares(split)
        graph = graph.carve({"train": np.arange(len(graph.statements))})  # one split, so that each triple is there once

    pool = graph.statements.triples
    _, first, which = np.unique(graph.keys(pool), return_index=True, return_inverse=True)
    owner = METHODS[by](graph, pool[first], parts, seed, share)
    graphs = []
    for party in range(parts):
        rows = np.flatnonzero(owner[which.reshape(-1)] == party)
        if split == "keep":
            cuts = np.cumsum([len(graph.train), len(graph.valid)])
            pieces = np.split(rows, np.searchsorted(rows, cuts))
        else:
            rows = rows[Stream(seed, Purpose.SPLIT, party).permutation(len(rows))]
            pieces = np.split(rows, np.rint(np.cumsum(split[:2]) * len(rows)).astype(int))
            if known:
                held = _well_known(pool[rows], known, len(rows) - len(pieces[0]))
                out = rows[held][Stream(seed, Purpose.SPLIT, party, step=1).permutation(int(held.sum()))]
                valid = round(len(out) * split[1] / (split[1] + split[2])) if len(out) else 0
                pieces = [rows[~held], *np.split(out, [valid])]
        graphs.append(graph.carve(dict(zip(SPLITS, pieces, strict=True))))
    if empty := [i for i, part in enumerate(graphs) if not len(part.train)]:
        raise TacitError(f"{len(empty)} of {parts} parties would get no training triple. Divide among fewer parties.")
    left_out = int((owner < 0).sum())
    origin: dict[str, Any] = {"by": by, "seed": seed, "source": source, "left_out": left_out}
    origin["split"] = split if split == "keep" else list(split)
    if by == "entities":
        origin["share"] = share
    if known:
        origin["known"] = known
    LOG.info("divided %d triples by %s among %d parties, %d left out", len(first), by, parts, left_out)
    return Parties(tuple(f"party-{i:02d}" for i in range(parts)), tuple(graphs), None, origin)


def split_by_coin(graph: Graph, split: tuple[float, float, float], *, seed: int = 0) -> Graph:
    """A graph's triples in train, valid and test: where one goes follows from its names and the seed alone.

    So one triple more or less moves no other, as privacy for a triple needs it; the shares are met on average.
    """
    from tacit.sources import public_coin

    _check_shares(split)
    graph = graph.carve({"train": np.arange(len(graph.statements))})
    names = [*graph.entities, *graph.relations]
    rows = graph.statements.triples + np.array([0, len(graph.entities), 0], np.int32)
    part = public_coin(names, rows, f"tacit/split/{seed}", (split[1], split[2]))
    if not (part == 0).any():
        raise TacitError(f"no triple of {len(part):,} would be in train: set other shares.")
    return graph.carve({name: np.flatnonzero(part == at) for at, name in enumerate(SPLITS)})


def _check_shares(split: Any) -> None:
    if isinstance(split, str) or len(split) != 3 or not (min(split) >= 0 and abs(sum(split) - 1) < 1e-9):
        raise TacitError(f"The shares of train, valid and test have to add up to 1; found {split}.")


def _well_known(triples: Ids, known: int, wanted: int) -> npt.NDArray[np.bool_]:
    """Up to `wanted` triples, the first that leave their head, tail and relation `known` others that are not chosen."""
    entities, relations = Counter(triples[:, [0, 2]].ravel().tolist()), Counter(triples[:, 1].tolist())
    entities.subtract(triples[triples[:, 0] == triples[:, 2], 0].tolist())  # a loop is one triple of its entity
    held = np.zeros(len(triples), bool)
    for place, (h, r, t) in enumerate(triples.tolist()):
        if wanted == 0:
            break
        if min(entities[h], entities[t], relations[r]) > known:
            held[place] = True
            wanted -= 1
            entities.subtract({h, t})
            relations[r] -= 1
    return held


Owner = npt.NDArray[np.int64]


def _by_triples(graph: Graph, triples: Ids, parts: int, seed: int, share: float) -> Owner:
    return _deal(len(triples), parts, seed)


def _by_relations(graph: Graph, triples: Ids, parts: int, seed: int, share: float) -> Owner:
    if parts > len(graph.relations):
        raise TacitError(
            f"{len(graph.relations)} relations cannot be dealt to {parts} parties: each needs at least one."
        )
    return _deal(len(graph.relations), parts, seed)[triples[:, 1]]


def _by_entities(graph: Graph, triples: Ids, parts: int, seed: int, share: float) -> Owner:
    size = max(1, round(share * len(graph.entities)))
    candidate = np.zeros((parts, len(triples)), bool)
    for party in range(parts):
        drawn = np.zeros(len(graph.entities), bool)
        drawn[Stream(seed, Purpose.PARTITION, party).permutation(len(drawn))[:size]] = True
        candidate[party] = drawn[triples[:, 0]] & drawn[triples[:, 2]]
    # Of the parties that hold both ends of a triple, one gets it: the k-th, k drawn for each triple.
    count = candidate.sum(axis=0)
    turn = (Stream(seed, Purpose.PARTITION, step=1).uniform(len(triples)) * count).astype(np.int64) + 1
    owner = (np.cumsum(candidate, axis=0) < turn).sum(axis=0)
    return np.where(count > 0, owner, -1)


def _deal(items: int, parts: int, seed: int) -> Owner:
    """Deal items out like cards: sizes differ by one at most."""
    owner = np.empty(items, np.int64)
    owner[Stream(seed, Purpose.PARTITION).permutation(items)] = np.arange(items) % parts
    return owner


METHODS: dict[str, Callable[[Graph, Ids, int, int, float], Owner]] = {
    "triples": _by_triples,
    "entities": _by_entities,
    "relations": _by_relations,
}


def given(graphs: Mapping[str, Graph], links: Sequence[Link] | None = None) -> Parties:
    """Parties from graphs that exist; without links, equal names mean the same thing."""
    return Parties(tuple(graphs), tuple(graphs.values()), None if links is None else tuple(links), {"by": "given"})


def some(parties: Parties, names: Sequence[str]) -> Parties:
    """These parties alone, in this order, and the links between them."""
    if unknown := [name for name in names if name not in parties.names]:
        raise TacitError(f"there is no party {excerpt(unknown[0])}. There are: {', '.join(parties.names)}.")
    links = parties.links
    if links is not None:
        links = tuple(link for link in links if link.party in names and link.other in names)
    graphs = tuple(parties.graphs[parties.names.index(name)] for name in names)
    return Parties(tuple(names), graphs, links, parties.origin)


def split_anew(parties: Parties, split: tuple[float, float, float], *, seed: int = 0, known: int = 0) -> Parties:
    """Each party's triples dealt anew into train, valid and test, as `partition` does it."""
    graphs = tuple(partition(graph, "triples", 1, seed=seed, split=split, known=known)[0] for graph in parties)
    origin = {**parties.origin, "split": list(split), "seed": seed} | ({"known": known} if known else {})
    return Parties(parties.names, graphs, parties.links, origin)


def rename_relations(parties: Parties) -> Parties:
    """Each party gets names of its own for its relations; links say which were the same, and which entities are."""
    if parties.links is not None:
        raise TacitError("Only relations that are known by equal names can be renamed: these parties have links.")
    own = [
        Vocab([f"{name}:{relation}" for relation in graph.relations])  # one beginning for all: their order stays
        for name, graph in zip(parties.names, parties.graphs, strict=True)
    ]
    links = []
    for one, two in itertools.combinations(range(len(parties)), 2):
        pair = parties.names[one], parties.names[two]
        for kind in ("entity", "relation"):
            ids, others = parties.shared(one, two, kind)
            vocabs = [parties.graphs[i].entities if kind == "entity" else own[i] for i in (one, two)]
            links += [
                Link(pair[0], vocabs[0][here], pair[1], vocabs[1][there], kind)
                for here, there in zip(ids.tolist(), others.tolist(), strict=True)
            ]
    graphs = tuple(replace(graph, relations=vocab) for graph, vocab in zip(parties.graphs, own, strict=True))
    return Parties(parties.names, graphs, tuple(links), {**parties.origin, "renamed": "relations"})


def pool(parties: Parties) -> Graph:
    """All triples of all parties in one graph, equal names being the same thing: what the recipe central trains on.

    Parameters
    ----------
    parties
        Without an alignment between different names.
    """
    if parties.links is not None:
        raise TacitError("Parties whose names are linked by an alignment cannot be pooled by name.")
    names, renamed = _renamed(parties.graphs)
    splits = {split: concatenate(pieces) for split, pieces in zip(SPLITS, zip(*renamed, strict=True), strict=True)}
    prefixes = {prefix: base for graph in reversed(parties) for prefix, base in graph.prefixes.items()}
    return assemble(names, splits, prefixes=prefixes, checked=True)[0]


def _renamed(graphs: Sequence[Graph]) -> tuple[list[str], list[list[Split]]]:
    """The names of several graphs numbered together, and each graph's splits in these numbers."""
    place: dict[str, int] = {}
    renamed = []
    for graph in graphs:
        vocabs = (graph.entities, graph.relations, graph.groups)
        entity, relation, group = (
            np.array([place.setdefault(n, len(place)) for n in vocab], np.int32) for vocab in vocabs
        )
        splits = []
        for split in graph.splits.values():
            h, r, t = split.triples.T
            ids = None if split.group is None else np.where(split.group == NO_GROUP, NO_GROUP, group[split.group])
            splits.append(Split(np.stack([entity[h], relation[r], entity[t]], 1), split.confidential, ids))
        renamed.append(splits)
    return list(place), renamed
