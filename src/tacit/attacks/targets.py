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

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np

from tacit.attacks.seen import Candidates
from tacit.draws import Purpose, Stream
from tacit.errors import BadValue, TacitError
from tacit.graph import NO_GROUP, Graph, Split, Vocab
from tacit.parties import Parties

Reading = Literal["existing", "canaries", "held"]
READINGS: tuple[Reading, ...] = get_args(Reading)
Names = tuple[str, str, str]
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
    own, other = parties[victim], parties[adversary]
    entities = sorted(set(own.entities) & set(other.entities))
    relations = sorted(set(own.relations) & set(other.relations))
    if len(entities) < 2 or not relations:
        raise TacitError("the adversary and the victim have no names in common: there is nothing to ask")
    reach = (set(entities), set(relations))
    everything = [set(graph.named(split)) for graph in parties for split in graph.splits]
    taken: set[Names] = set().union(*everything)
    made = _Drawn(apart)
    if reading == "canaries":
        made.take(_random(entities, relations, taken, count, seed), 2 * (count // 2))
        chosen = made.chosen[: len(made.chosen) // 2 * 2]
        if not chosen:
            raise TacitError("victim and adversary have no names of which someone does not hold a triple already")
        coins = Stream(seed, Purpose.TARGETS, victim, 2).permutation(len(chosen))
        member = np.zeros(len(chosen), bool)
        member[coins[: len(chosen) // 2]] = True
        parties = _with(parties, victim, [chosen[i] for i in np.flatnonzero(member)])
        return parties, targets_of(chosen, member, reading, victim)
    elsewhere = set().union(*(set(g.named("train")) for i, g in enumerate(parties) if i != victim))
    mine = _shuffled([x for x in own.named("train") if _within(x, reach) and x not in elsewhere], seed, 0)
    if reading == "held":
        everyone = set().union(*(own.named(split) for split in own.splits), other.named("train"))
        third = [g for i, g in enumerate(parties) if i not in (victim, adversary)]
        true = {x for graph in third for x in graph.named("train") if _within(x, reach)} - everyone
        if not true:
            raise TacitError("no third party holds facts of names that victim and adversary have: there are no such "
                             "targets")  # fmt: skip
        others: Iterator[Names] = iter(_shuffled(sorted(true), seed, 1))
    else:
        others = _random(entities, relations, taken, count, seed)
    members = iter(mine)
    inside: list[Names] = []
    outside: list[Names] = []
    for _ in range(count // 2):  # one of each at a time, so that there are as many of both
        pair = [made.next(members), made.next(others)]
        if pair[0] is None or pair[1] is None:
            break
        inside.append(pair[0])
        outside.append(pair[1])
    if not mine:
        raise TacitError("the victim has no training triples of its own of names that the adversary has too")
    if not inside:
        raise TacitError("there are no triples that the victim does not hold, to tell its own from")
    chosen = [*inside, *outside]
    return parties, targets_of(chosen, np.arange(len(chosen)) < len(inside), reading, victim)


class _Drawn:
    """Targets one by one, none of which disturbs another if they are to be apart."""

    def __init__(self, apart: bool):
        self.apart = apart
        self.chosen: list[Names] = []
        self._seen: set[Names] = set()
        self._tails: set[str] = set()
        self._others: set[str] = set()

    def next(self, source: Iterator[Names]) -> Names | None:
        for h, r, t in source:
            if (h, r, t) in self._seen:
                continue
            if self.apart and (h == t or t in self._tails or t in self._others or h in self._tails):
                continue
            self._seen.add((h, r, t))
            self._tails.add(t)
            self._others.add(h)
            self.chosen.append((h, r, t))
            return h, r, t
        return None

    def take(self, source: Iterator[Names], count: int) -> None:
        while len(self.chosen) < count and self.next(source) is not None:
            pass


def _random(entities: list[str], relations: list[str], taken: set[Names], count: int, seed: int) -> Iterator[Names]:
    """Triples that no one holds, of names drawn evenly."""
    stream = Stream(seed, Purpose.TARGETS, 0, 1)
    draws = np.asarray(stream.uniform(3 * TRIES * count)).reshape(-1, 3)
    places = (draws * [len(entities), len(relations), len(entities)]).astype(np.int64)
    for h, r, t in places.tolist():
        triple = (entities[h], relations[r], entities[t])
        if triple not in taken and h != t:
            yield triple


def _shuffled(triples: list[Names], seed: int, step: int) -> list[Names]:
    return [triples[i] for i in Stream(seed, Purpose.TARGETS, 1, step).permutation(len(triples)).tolist()]


def _within(triple: Names, reach: tuple[set[str], set[str]]) -> bool:
    h, r, t = triple
    return h in reach[0] and t in reach[0] and r in reach[1] and h != t


def _with(parties: Parties, victim: int, more: list[Names]) -> Parties:
    """The parties, with more training triples for one of them."""
    graphs = list(parties.graphs)
    graphs[victim] = with_triples(graphs[victim], more)
    return replace(parties, graphs=tuple(graphs))


def with_triples(graph: Graph, more: list[Names]) -> Graph:
    """A graph with more training triples, of names that it has; confidential where any are, and in no group."""
    ids = np.array([(graph.entities.id(h), graph.relations.id(r), graph.entities.id(t)) for h, r, t in more], np.int32)
    old, many = graph.train, len(more)
    triples = np.concatenate([old.triples, ids.reshape(-1, 3)])
    order = np.lexsort(triples.T[::-1])
    marked = None if old.confidential is None else np.concatenate([old.confidential, np.ones(many, bool)])[order]
    group = None if old.group is None else np.concatenate([old.group, np.full(many, NO_GROUP, np.int32)])[order]
    return replace(graph, train=Split(triples[order], marked, group))


def without(graph: Graph, targets: Targets) -> Graph:
    """A graph without the targets among its training triples."""
    ids = targets.candidates.at(graph.entities, graph.relations)
    gone = graph.keys(ids[(ids >= 0).all(1)].astype(np.int32))
    kept, old = ~np.isin(graph.keys(graph.train.triples), gone), graph.train
    marked = None if old.confidential is None else old.confidential[kept]
    group = None if old.group is None else old.group[kept]
    return replace(graph, train=Split(old.triples[kept], marked, group))


def named_targets(candidates: Candidates) -> list[Names]:
    """The candidates by name."""
    entities, relations = candidates.entities, candidates.relations
    return [(entities[h], relations[r], entities[t]) for h, r, t in candidates.triples.tolist()]


def targets_of(chosen: list[Names], member: np.ndarray, reading: Reading, victim: int) -> Targets:
    """Targets of these names."""
    entities, relations = Vocab(n for h, _, t in chosen for n in (h, t)), Vocab(r for _, r, _ in chosen)
    ids = np.array([(entities.id(h), relations.id(r), entities.id(t)) for h, r, t in chosen], np.int64)
    return Targets(Candidates(victim, entities, relations, ids), member, reading)
