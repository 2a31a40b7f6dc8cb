"""Whom an attack is tried on: triples of which half are in the victim's training set, and how they came there.

existing   members are training triples of the victim, others are random triples that no one holds
canaries   all are random triples that no one held; half were put into the victim's training set before it began
held       members are training triples of the victim, others are true too, and held by someone else

The DP-FLames paper (Hu et al. 2023) generates 1000 triples, "500 of them included in the victim's training data": that
can be read as either of the first two. With `existing` much of an attack's success is telling what is plausible from
what is not, which needs no member at all; with `canaries` only memory of the triple itself helps; `held` is what an
attacker wants to know.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np

from tacit.attacks.seen import Candidates
from tacit.draws import Purpose, Stream
from tacit.errors import BadValue, TacitError
from tacit.graph import Graph, SplitName, Vocab
from tacit.parties import Parties

Reading = Literal["existing", "canaries", "held"]
READINGS: tuple[Reading, ...] = get_args(Reading)
Names = tuple[str, str, str]
Ids = list[int]
TRIES = 200
"""Random triples are drawn at most so many times as are wanted."""


@dataclass(frozen=True)
class Targets:
    """Candidates, and the truth, which no attack is shown."""

    candidates: Candidates
    member: np.ndarray
    reading: Reading

    def __len__(self) -> int:
        return len(self.member)


def draw_targets(
    parties: Parties,
    reading: Reading,
    *,
    victim: int = 0,
    adversary: int = 1,
    count: int = 1000,
    seed: int = 0,
    apart: bool = False,
) -> tuple[Parties, Targets]:
    """Targets among names that the victim and the adversary both have; and the parties, canaries put in.

    Half of them are members; fewer than `count` if there are not so many. `apart`: no tail is an entity of any other
    target, so that what is done to one tail does not disturb another target.
    """
    if reading not in READINGS:
        raise BadValue(f"targets are {', '.join(READINGS)}; not {reading!r}")
    if count < 2:
        raise BadValue(f"there are at least 2 targets, not {count}")
    for who, name in ((victim, "victim"), (adversary, "adversary")):
        if not 0 <= who < len(parties):
            raise TacitError(f"there are {len(parties)} parties, and no party {who} to be the {name}")
    if victim == adversary:
        raise TacitError("the adversary is another than the victim")
    union = _Union(parties)
    mine, theirs = (union.triples(i, "train") for i in (victim, adversary))
    entities, relations = (
        np.intersect1d(union.held(victim, part), union.held(adversary, part)) for part in ("entity", "relation")
    )
    if len(entities) < 2 or not len(relations):
        raise TacitError("the adversary and the victim have no names in common: there is nothing to ask")
    made = _Drawn(apart)
    if reading == "canaries":
        source = iter(union.invented(entities, relations, count, seed))
        while len(made.chosen) < 2 * (count // 2) and made.next(source) is not None:
            pass
        chosen = made.chosen[: 2 * (len(made.chosen) // 2)]
        if not chosen:
            raise TacitError("victim and adversary have no names of which someone does not hold a triple already")
        member = np.zeros(len(chosen), bool)
        member[Stream(seed, Purpose.TARGETS, victim, 2).permutation(len(chosen))[: len(chosen) // 2]] = True
        names = union.named(chosen)
        parties = _with(parties, victim, [names[i] for i in np.flatnonzero(member)])
        return parties, targets_of(names, member, reading, victim)

    def within(triples: np.ndarray, *, none_of: np.ndarray, step: int) -> Iterator[Ids]:
        h, r, t = triples.T
        there = np.isin(h, entities) & np.isin(t, entities) & np.isin(r, relations) & (h != t)
        there &= ~np.isin(union.keys(triples), union.keys(none_of))
        left = triples[there]
        return iter(left[Stream(seed, Purpose.TARGETS, 1, step).permutation(len(left))].tolist())

    rest = [i for i in range(len(parties)) if i != victim]
    members = within(mine, none_of=np.concatenate([union.triples(i, "train") for i in rest]), step=0)
    if reading == "held":
        third = [union.triples(i, "train") for i in rest if i != adversary]
        own = [union.triples(victim, split) for split in parties[victim].splits]
        facts = np.unique(np.concatenate([mine[:0], *third]), axis=0)
        others = within(facts, none_of=np.concatenate([*own, theirs]), step=1)
    else:
        others = iter(union.invented(entities, relations, count, seed))
    inside, outside = [], []
    for _ in range(count // 2):  # one of each at a time, so that there are as many of both
        pair = [made.next(members), made.next(others)]
        if pair[0] is None or pair[1] is None:
            break
        inside.append(pair[0])
        outside.append(pair[1])
    if reading == "held" and not len(facts):
        raise TacitError("there is no third party, or it holds no facts: there are no such targets")
    if not inside and pair[0] is None:
        raise TacitError("the victim has no training triples of its own of names that the adversary has too")
    if not inside:
        raise TacitError("there are no triples that the victim does not hold, to tell its own from")
    order = Stream(seed, Purpose.TARGETS, victim, 3).permutation(2 * len(inside))
    chosen = [[*inside, *outside][i] for i in order.tolist()]
    return parties, targets_of(union.named(chosen), order < len(inside), reading, victim)


class _Union:
    """All parties' triples by ids of the union of their names."""

    def __init__(self, parties: Parties):
        self.parties = parties
        self.entities = Vocab(name for graph in parties for name in graph.entities)
        self.relations = Vocab(name for graph in parties for name in graph.relations)
        self.places = [
            (graph.entities.positions(self.entities), graph.relations.positions(self.relations)) for graph in parties
        ]

    def held(self, party: int, part: str) -> np.ndarray:
        return np.sort(self.places[party][0 if part == "entity" else 1])

    def triples(self, party: int, split: SplitName) -> np.ndarray:
        """(n, 3) int64."""
        (entity, relation), triples = self.places[party], self.parties[party].splits[split].triples
        return np.stack([entity[triples[:, 0]], relation[triples[:, 1]], entity[triples[:, 2]]], 1).astype(np.int64)

    def keys(self, triples: np.ndarray) -> np.ndarray:
        found: np.ndarray = (triples[:, 0] * len(self.relations) + triples[:, 1]) * len(self.entities) + triples[:, 2]
        return found

    def invented(self, entities: np.ndarray, relations: np.ndarray, count: int, seed: int) -> list[Ids]:
        """Triples that no one holds, of names drawn evenly."""
        draws = np.asarray(Stream(seed, Purpose.TARGETS, 0, 1).uniform(3 * TRIES * count)).reshape(-1, 3)
        place = (draws * [len(entities), len(relations), len(entities)]).astype(np.int64)
        found = np.stack([entities[place[:, 0]], relations[place[:, 1]], entities[place[:, 2]]], 1)
        taken = [self.triples(i, split) for i, graph in enumerate(self.parties) for split in graph.splits]
        fine = ~np.isin(self.keys(found), self.keys(np.concatenate(taken))) & (found[:, 0] != found[:, 2])
        listed: list[Ids] = found[fine].tolist()
        return listed

    def named(self, triples: Sequence[Ids]) -> list[Names]:
        return [(self.entities[h], self.relations[r], self.entities[t]) for h, r, t in triples]


class _Drawn:
    """Targets one by one, none of which disturbs another if they are to be apart."""

    def __init__(self, apart: bool):
        self.apart = apart
        self.chosen: list[Ids] = []
        self._seen: set[tuple[int, ...]] = set()
        self._tails: set[int] = set()
        self._heads: set[int] = set()

    def next(self, source: Iterator[Ids]) -> Ids | None:
        for triple in source:
            h, _, t = triple
            near = t in self._tails or t in self._heads or h in self._tails
            if tuple(triple) in self._seen or (self.apart and near):
                continue
            self._seen.add(tuple(triple))
            self._tails.add(t)
            self._heads.add(h)
            self.chosen.append(triple)
            return triple
        return None


def _with(parties: Parties, victim: int, more: list[Names]) -> Parties:
    """The parties, with more training triples for one of them."""
    graphs = list(parties.graphs)
    graphs[victim] = with_triples(graphs[victim], more)
    return replace(parties, graphs=tuple(graphs))


def with_triples(graph: Graph, more: list[Names]) -> Graph:
    """A graph with more training triples, of names that it has; confidential where any are, and in no group."""
    ids = np.array([(graph.entities.id(h), graph.relations.id(r), graph.entities.id(t)) for h, r, t in more], np.int32)
    return replace(graph, train=graph.train.plus(ids.reshape(-1, 3)))


def without(graph: Graph, targets: Targets) -> Graph:
    """A graph without the targets among its training triples."""
    ids = targets.candidates.at(graph.entities, graph.relations)
    gone = graph.keys(ids[(ids >= 0).all(1)].astype(np.int32))
    return replace(graph, train=graph.train.at(~np.isin(graph.keys(graph.train.triples), gone)))


def others_add(graph: Graph, targets: Targets) -> np.ndarray:
    """What a graph's training triples add to (relation, tail) and (relation, head) of each target, less the target."""
    ids, facts = targets.candidates.at(graph.entities, graph.relations), graph.train.triples.astype(np.int64)
    found, many = -2.0 * targets.member, max(len(graph.entities), 1)
    for column in (0, 2):
        cells, counts = np.unique(facts[:, 1] * many + facts[:, column], return_counts=True)
        mine = ids[:, 1] * many + ids[:, column]
        place = np.searchsorted(cells, mine).clip(max=len(cells) - 1)
        found = found + np.where(cells[place] == mine, counts[place], 0)
    return found


def named_targets(candidates: Candidates) -> list[Names]:
    """The candidates by name."""
    entities, relations = candidates.entities, candidates.relations
    return [(entities[h], relations[r], entities[t]) for h, r, t in candidates.triples.tolist()]


def targets_of(chosen: list[Names], member: np.ndarray, reading: Reading, victim: int) -> Targets:
    """Targets of these names."""
    entities, relations = Vocab(n for h, _, t in chosen for n in (h, t)), Vocab(r for _, r, _ in chosen)
    ids = np.array([(entities.id(h), relations.id(r), entities.id(t)) for h, r, t in chosen], np.int64)
    return Targets(Candidates(victim, entities, relations, ids), member, reading)
