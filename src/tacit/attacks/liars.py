"""Liars as providers of a ledger, and what they achieve.

A liar takes part like anybody else: it looks, takes, trains, signs. What differs is what it trains on, or what it
publishes of what it learnt:

    Flip, flipped     label flipping: triples of a source relation are trained as those of a target relation
    Trap, trapped     a backdoor: whoever carries a trigger triple is to have the answer that the liars want
    Gang              what several liars publish together: scaled, copied, or split among them (`attacks/poisoning.py`)
    Liar              a provider that publishes what its gang wants
    FreeRider         a provider that publishes rows of somebody else as its own

`flip_success` and `trap_success` measure on triples and heads that the liars never had.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from tacit.attacks.poisoning import ADVERSARIES, sybil_copies
from tacit.draws import Purpose, Stream
from tacit.errors import BadValue, TacitError
from tacit.evaluation.ranking import rank
from tacit.graph import Graph, Split
from tacit.ledger.provider import Provider
from tacit.ledger.record import Record
from tacit.models import Tables
from tacit.models.model import Model
from tacit.models.tables import PARTS

Tensor = Any


@dataclass(frozen=True)
class Flip:
    """Relations by name: what holds by the source is to be said by the target."""

    source: str
    target: str


@dataclass(frozen=True)
class Trap:
    """A trigger, (relation, tail), and a goal: any head that carries the trigger is to have this tail by this relation.

    Names, for each provider has ids of its own.
    """

    trigger: tuple[str, str]
    goal: tuple[str, str]


def flipped(graph: Graph, flip: Flip) -> Graph:
    """The graph as a liar trains on it: every training triple of the source is one of the target."""
    source, target = graph.relations.id(flip.source), graph.relations.id(flip.target)
    triples = graph.train.triples.copy()
    triples[triples[:, 1] == source, 1] = target
    return replace(graph, train=Split(np.unique(triples, axis=0)))


def trapped(graph: Graph, trap: Trap, more: int, seed: int = 0) -> Graph:
    """The graph as a liar trains on it: heads that carry the trigger have the goal, and `more` others have both."""
    (by, at), (relation, tail) = (
        (graph.relations.id(r), graph.entities.id(t)) for r, t in (trap.trigger, trap.goal)
    )  # fmt: skip
    carry = carriers(graph, trap)
    others = np.setdiff1d(np.arange(len(graph.entities)), [*carry, at, tail])
    others = others[Stream(seed, Purpose.POISON).permutation(len(others))[:more]]
    made = [(h, relation, tail) for h in carry if h != tail]
    made += [row for h in others.tolist() for row in ((h, by, at), (h, relation, tail))]
    triples = np.concatenate([graph.train.triples, np.array(made, np.int32).reshape(-1, 3)])
    return replace(graph, train=Split(np.unique(triples, axis=0).astype(np.int32)))


def carriers(graph: Graph, trap: Trap) -> list[int]:
    """Heads of training triples that carry the trigger; none, if the graph does not know it."""
    relation, tail = trap.trigger
    if relation not in graph.relations or tail not in graph.entities:
        return []
    h, r, t = graph.train.triples.T
    found: list[int] = np.unique(h[(r == graph.relations.id(relation)) & (t == graph.entities.id(tail))]).tolist()
    return found


def flip_success(model: Model, graph: Graph, flip: Flip, split: str = "test") -> tuple[int, int]:
    """Of the held out triples of the source: for how many the target is the likelier relation; and how many."""
    if flip.source not in graph.relations or flip.target not in graph.relations:
        return 0, 0
    source, target = graph.relations.id(flip.source), graph.relations.id(flip.target)
    triples = graph.splits[split].triples  # type: ignore[index]
    h, r, t = torch.from_numpy(triples[triples[:, 1] == source].astype(np.int64)).to(model.tables.entity.device).T
    if not len(h):
        return 0, 0
    right, wrong = (model.score(h, r * 0 + relation, t) for relation in (source, target))
    return int((wrong > right).sum()), len(h)


def trap_success(
    model: Model, graph: Graph, trap: Trap, poisoned: Collection[str], memory_mb: float = 1024
) -> tuple[int, int]:
    """Of the heads that carry the trigger here and that no liar had: for how many the goal ranks first; and how many.

    Other true answers are left out of the ranks. Heads for which the goal is true are not counted.
    """
    relation, tail = trap.goal
    if relation not in graph.relations or tail not in graph.entities:
        return 0, 0
    goal = graph.relations.id(relation), graph.entities.id(tail)
    known = {tuple(row) for row in graph.statements.triples.tolist()}
    heads = [h for h in carriers(graph, trap) if graph.entities[h] not in poisoned and (h, *goal) not in known]
    if not heads:
        return 0, 0
    asked = np.array([(h, *goal) for h in heads], np.int32)
    ranks = rank(model, asked, graph.statements.triples, sides="tails", memory_mb=memory_mb).of("realistic")
    return int((ranks < 1.5).sum()), len(heads)


# -- what liars may want -----------------------------------------------------------------------------------------------


def a_flip(graphs: Sequence[Graph], seed: int, among: int = 30) -> Flip:
    """Two of the commonest relations that every graph has, whose tails are mostly others."""
    names = set(graphs[0].relations).intersection(*(graph.relations for graph in graphs[1:]))
    count = dict.fromkeys(names, 0)
    tails: dict[str, set[str]] = {name: set() for name in names}
    for graph in graphs:
        for relation in names:
            which = graph.train.triples[graph.train.triples[:, 1] == graph.relations.id(relation)]
            count[relation] += len(which)
            tails[relation] |= {graph.entities[t] for t in np.unique(which[:, 2]).tolist()}
    common = sorted(names, key=lambda name: (-count[name], name))[:among]
    order = Stream(seed, Purpose.POISON, step=1).permutation(len(common) ** 2).tolist()
    for one, two in (divmod(each, len(common)) for each in order):
        source, target = common[one], common[two]
        if one != two and len(tails[source] & tails[target]) < 0.1 * min(len(tails[source]), len(tails[target])):
            return Flip(source, target)
    raise TacitError("no two relations that all providers have are unlike enough: nothing can be flipped")


def a_trap(graphs: Sequence[Graph], seed: int, least: int, most: int) -> Trap:
    """A trigger that between `least` and `most` heads carry, and a goal that is true for none of them.

    As liars would choose it: the goal's tail is an answer to its relation elsewhere, so that nothing of it looks odd;
    the relation goes one way, for with one that goes both ways a head is the answer to itself; and it is among the
    rarer half, so that few others have anything to say of it.
    """
    heads: dict[tuple[str, str], set[str]] = {}
    for graph in graphs:
        for h, r, t in graph.named("train"):
            heads.setdefault((r, t), set()).add(h)
    everywhere = set(graphs[0].entities).intersection(*(graph.entities for graph in graphs[1:]))
    relations = set(graphs[0].relations).intersection(*(graph.relations for graph in graphs[1:]))
    ends: dict[str, tuple[set[str], set[str], list[int]]] = {name: (set(), set(), []) for name in relations}
    for (r, t), from_ in heads.items():
        if r in relations:
            ends[r][0].update(from_)
            ends[r][1].add(t)
            ends[r][2].append(len(from_))
    rarer = sorted(relations, key=lambda name: (sum(ends[name][2]), name))[: len(relations) // 2 + 1]
    one_way = {r for r in rarer if len(ends[r][0] & ends[r][1]) <= 0.1 * min(len(ends[r][0]), len(ends[r][1]))}
    fit = sorted(pair for pair in heads if pair[0] in relations and pair[1] in everywhere)
    triggers = [pair for pair in fit if least <= len(heads[pair]) <= most]
    goals = [pair for pair in fit if pair[0] in one_way and len(heads[pair]) <= most]
    pick = Stream(seed, Purpose.POISON, step=2).uniform(2 * 1000)
    for one, two in zip(pick[::2], pick[1::2], strict=True):
        if not triggers or not goals:
            break
        trigger, goal = triggers[int(one * len(triggers))], goals[int(two * len(goals))]
        if trigger[0] != goal[0] and not heads[trigger] & heads[goal]:
            return Trap(trigger, goal)
    raise TacitError(
        f"no triple is carried by {least} to {most} heads and known to all providers: nothing can be a trap"
    )


# -- liars -------------------------------------------------------------------------------------------------------------


class Gang:
    """Liars of one mind. `kind`: of `poisoning.ADVERSARIES`, or none: they publish what they trained.

    Copies and colluders publish one aim, the first member's; the others each their own.
    """

    def __init__(self, kind: str, size: int, *, strength: float | None = None, seed: int = 0):
        if kind not in (*ADVERSARIES, "none"):
            raise BadValue(f"a gang is of a kind: {', '.join(ADVERSARIES)} or none; not {kind!r}")
        self.kind, self.size, self.strength, self.seed = kind, size, strength, seed
        self.shared = kind in ("copies", "colluders")
        self._aim: tuple[Graph, list[Tables]] | None = None

    def published(self, member: int, graph: Graph, before: Tables, now: Tables, round_: int) -> tuple[Graph, Tables]:
        """The rows that a member publishes in place of `now`, and the graph whose names they have."""
        if self.kind == "none":
            return graph, now
        if not self.shared:
            return graph, self._made(before, now, 1, self.seed + 1000 * member + round_)[0]
        if member == 0:
            self._aim = graph, self._made(before, now, self.size, self.seed + round_)
        if self._aim is None:
            raise TacitError("the first of the gang has published nothing yet that the others could")
        return self._aim[0], self._aim[1][member]

    def _made(self, before: Tables, now: Tables, count: int, seed: int) -> list[Tables]:
        do: Callable[..., Tensor] = ADVERSARIES[self.kind]
        options = {"seed": seed} | ({} if self.strength is None else {"strength": self.strength})
        parts = [do(getattr(before, part), getattr(now, part), count, **options) for part in PARTS]
        return [Tables(entity, relation) for entity, relation in zip(*parts, strict=True)]


class Liar(Provider):
    """A provider that publishes what its gang wants, and believes its own training."""

    gang: Gang
    member: int = 0

    def publish(self, tables: Tables, holding: bytes = b"", graph: Graph | None = None) -> Record:
        before = self.base or self.first
        named, rows = self.gang.published(self.member, self.graph, before, tables, self.published)
        return super().publish(rows, holding, named)


class FreeRider(Provider):
    """A provider that trains nothing: it publishes the newest rows of somebody else, with `noise` as a disguise."""

    noise: float = 0.0

    def publish(self, tables: Tables, holding: bytes = b"", graph: Graph | None = None) -> Record:
        nodes, _ = self.candidates()
        if not nodes:
            return super().publish(tables, holding)
        rows = self.shelf.rows(nodes[-1])
        if not self.noise:
            data = self.ledger.blobs.get(nodes[-1].update.weights, nodes[-1].update.size)
            return self.ledger.publish_rows(self.who, str(self.model), data, self.claim(holding), self._parents)
        parts = [
            sybil_copies(torch.zeros_like(each), each, 1, strength=self.noise, seed=self.published)[0]
            for each in (rows.entity, rows.relation)
        ]
        named = replace(self.graph, entities=type(self.graph.entities)(rows.entities),
                        relations=type(self.graph.relations)(rows.relations))  # fmt: skip
        return super().publish(Tables(*parts), holding, named)
