"""What a true answer is compared with: which side is asked for, and which candidates stand against it.

`refused` says why a choice may not be used under privacy: there, an example's gradient may depend on that example and
on public draws, and on no other triple.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch

from tacit.draws import Purpose, below, blocks
from tacit.errors import BadValue
from tacit.kernels.contract import ABSENT
from tacit.models import Layout

Tensor = Any
Side = Literal["tails", "heads", "both", "alternate", "random", "bernoulli"]
SIDES: dict[str, str] = {
    "tails": "every example asks for its tail",
    "heads": "every example asks for its head",
    "both": "every triple is two examples, one of each side",
    "alternate": "a step asks for tails, the next for heads (the RotatE authors)",
    "random": "each example asks for its head or its tail, by a fair coin",
    "bernoulli": "by a coin that favours the side with more answers (TransH, Wang et al. 2014)",
}
ATTEMPTS = 64
"""How often a negative that is a known fact is drawn again, before it counts as absent."""


@dataclass(frozen=True)
class Asked:
    """The examples of a step that need negatives: rows of the stacked tables, and their places in their batch."""

    head: Tensor
    relation: Tensor
    tail: Tensor
    party: Tensor
    asks_head: Tensor
    slot: Tensor
    """(b,): the example's place in its party's batch. Draws follow (party, step, slot), not the place in the stack."""
    step: Tensor
    """(parties,): each party's own count of steps."""


class World:
    """What negatives are drawn from: each party's candidates, what it knows to be true, and pairs that are public."""

    def __init__(self, layout: Layout, candidates: list[np.ndarray], known: np.ndarray, pairs: list[np.ndarray] | None,
                 device: Any = "cpu"):  # fmt: skip
        """`candidates`: each party's entities, by its own ids. `known`: (n, 3) facts by stacked rows. `pairs`: public
        (head, relation) by each party's own ids."""
        self.layout, self.device = layout, device
        self.numbers = torch.tensor(layout.numbers, device=device)
        self.entity_start = torch.tensor(layout.entity_start, device=device)
        self.relation_start = torch.tensor(layout.relation_start, device=device)
        self.relations = torch.tensor(layout.relations, device=device)
        self.entity_total, self.relation_total = layout.entity_start[-1], layout.relation_start[-1]
        self.many, self.first, self.entity = self._stacked(candidates, layout.entity_start)
        self.pairs = None
        if pairs is not None:
            starts = [(layout.entity_start[i], layout.relation_start[i]) for i in range(len(layout))]
            moved = [np.asarray(p, np.int64).reshape(-1, 2) + start for p, start in zip(pairs, starts, strict=True)]
            if any(not len(p) for p in moved):
                raise BadValue("every party needs public pairs of head and relation to draw from")
            self.pairs = self._stacked(moved, (0,) * len(layout))
        self.known = torch.from_numpy(np.unique(self.keys(*np.asarray(known, np.int64).reshape(-1, 3).T))).to(device)

    def _stacked(self, lists: list[np.ndarray], shift: Any) -> tuple[Tensor, Tensor, Tensor]:
        sizes = np.array([len(part) for part in lists])
        whole = np.concatenate([np.asarray(p, np.int64) + s for p, s in zip(lists, shift, strict=False)])
        first = np.cumsum([0, *sizes[:-1]])
        return tuple(torch.from_numpy(array).to(self.device) for array in (sizes, first, whole))

    def keys(self, head: Any, relation: Any, tail: Any) -> Any:
        """One integer per triple of stacked rows."""
        entities, relations = self.layout.entity_start[-1], self.layout.relation_start[-1]
        World.check_keys(entities, relations)
        return (head * relations + relation) * entities + tail

    @staticmethod
    def check_keys(entities: int, relations: int) -> None:
        if entities * entities * max(relations, 1) >= 1 << 63:
            raise BadValue(f"{entities:,} entities and {relations:,} relations are too many to filter negatives")

    def is_known(self, head: Tensor, relation: Tensor, tail: Tensor) -> Tensor:
        keys = self.keys(head, relation, tail)
        if not len(self.known):
            return torch.zeros_like(keys, dtype=torch.bool)
        place = torch.searchsorted(self.known, keys).clamp(max=len(self.known) - 1)
        return self.known[place] == keys

    def words(self, seed: int, purpose: Purpose, asked: Asked, count: int, attempt: int = 0) -> Tensor:
        """(b, count) 32-bit words. Each slot has blocks of its own, so that any kernel can begin at any slot."""
        each = -(-count // 4)
        block = asked.slot[:, None] * each + torch.arange(each, device=self.device) + (attempt << 32)
        party, step = self.numbers[asked.party][:, None], asked.step[asked.party][:, None]
        words = torch.stack(blocks(seed, purpose, party, step, block), -1)
        return words.flatten(1)[:, :count]


@dataclass(frozen=True)
class Negatives:
    """Base of the ways to draw negatives."""

    refused: ClassVar[str | None] = None
    count: int = 256
    sides: Side = "tails"
    scope: Literal["own", "vocabulary"] = "own"
    """From which entities: those of the party's own graph, or all that its table has a row for."""

    def __post_init__(self) -> None:
        if self.count < 1:
            raise BadValue(f"the number of negatives is at least 1, not {self.count}")
        if self.sides not in SIDES:
            raise BadValue(f"sides is one of {', '.join(SIDES)}; not {self.sides!r}")
        if self.scope not in ("own", "vocabulary"):
            raise BadValue(f"scope is own or vocabulary, not {self.scope!r}")

    def refusal(self) -> str | None:
        """Why this may not be used under privacy; None: it may."""
        return self._refusal()

    def _refusal(self) -> str | None:
        if self.sides == "bernoulli":
            return 'bernoulli sides follow statistics of all triples of a relation: set negatives.sides = "random"'
        if self.scope == "own":
            return (
                'negatives from a party\'s own entities tell which its triples have: set negatives.scope = "vocabulary"'
            )
        return self.refused

    def draw(self, world: World, asked: Asked, seed: int) -> dict[str, Any]:
        """The fields of `Chunk` that say what the true answers are compared with."""
        raise NotImplementedError


@dataclass(frozen=True)
class Independent(Negatives):
    """Candidates of each example's own, uniform over the party's candidates, with repeats.

    `filtered` draws again what is a known fact. A candidate for which no false one was found in 64 draws is left out.
    """

    filtered: bool = False

    def refusal(self) -> str | None:
        why = "filtered negatives depend on which other triples are there: set negatives.filtered = false"
        return why if self.filtered else super().refusal()

    def draw(self, world: World, asked: Asked, seed: int) -> dict[str, Any]:
        many, first = world.many[asked.party][:, None], world.first[asked.party][:, None]

        def candidates(attempt: int) -> Tensor:
            return world.entity[first + below(world.words(seed, Purpose.NEGATIVES, asked, self.count, attempt), many)]

        ids = candidates(0)
        if self.filtered:
            head, relation, tail = asked.head[:, None], asked.relation[:, None], asked.tail[:, None]
            side = asked.asks_head[:, None]
            for attempt in range(1, ATTEMPTS + 1):
                bad = world.is_known(torch.where(side, ids, head), relation, torch.where(side, tail, ids))
                if not bool(bad.any()):
                    break
                again = ABSENT if attempt == ATTEMPTS else candidates(attempt)
                ids = torch.where(bad, again, ids)
        return {"negatives": ids}


@dataclass(frozen=True)
class Pool(Negatives):
    """One pool of distinct candidates for all examples of a party's step; all of them if there are no more.

    Uniform over all such pools: entities are drawn one after the other, and one that is there already is skipped. An
    example's own head and tail are masked out of it, so that under clipping an example's rows are distinct.
    """

    def draw(self, world: World, asked: Asked, seed: int) -> dict[str, Any]:
        parties, wanted = len(world.layout), world.many.clamp(max=self.count)
        longest, device = int(world.many.max()), world.device
        size, step = 2 * self.count + 64, asked.step[:, None]
        while True:
            block = torch.arange(-(-size // 4), device=device)[None]
            words = torch.stack(blocks(seed, Purpose.POOL, world.numbers[:, None], step, block), -1).flatten(1)
            drawn = below(words, world.many[:, None])
            order = drawn * drawn.shape[1] + torch.arange(drawn.shape[1], device=device)
            ordered, place = order.sort(dim=1)
            value = ordered // drawn.shape[1]
            repeat = torch.zeros_like(drawn, dtype=torch.bool)
            repeat[:, 1:] = value[:, 1:] == value[:, :-1]
            fresh = ~torch.zeros_like(repeat).scatter(1, place, repeat)
            rank = fresh.cumsum(1) - 1
            if bool((rank[:, -1] + 1 >= wanted).all()):
                break
            size *= 2  # a longer stream begins as the shorter one did, so the result is the same
        pool = torch.full((parties, min(self.count, longest)), ABSENT, dtype=torch.int64, device=device)
        take = fresh & (rank < wanted[:, None])
        party, column = take.nonzero(as_tuple=True)
        pool[party, rank[party, column]] = world.entity[world.first[party] + drawn[party, column]]
        return {"pool": pool}


@dataclass(frozen=True)
class Everyone(Negatives):
    """All entities of the party, for one-vs-all and k-vs-all."""

    def refusal(self) -> str | None:
        # Nothing is drawn, and whoever is in the table is in the vocabulary.
        return replace(self, scope="vocabulary")._refusal()

    def draw(self, world: World, asked: Asked, seed: int) -> dict[str, Any]:
        return {"everyone": True}


@dataclass(frozen=True)
class PublicPairs(Negatives):
    """(head, relation) from a public list, with a random tail: negatives that tell nothing of the triples (DP-FLames).

    The list has to be given, and has to be public indeed.
    """

    def draw(self, world: World, asked: Asked, seed: int) -> dict[str, Any]:
        if world.pairs is None:
            raise BadValue("negatives from public pairs need a list of public (head, relation) pairs")
        many, first, pairs = world.pairs
        words = world.words(seed, Purpose.NEGATIVES, asked, 2 * self.count).unflatten(1, (self.count, 2))
        party = asked.party[:, None]
        pair = pairs[first[party] + below(words[..., 0], many[party])]
        tail = world.entity[world.first[party] + below(words[..., 1], world.many[party])]
        return {"triples": torch.cat([pair, tail[..., None]], -1)}


@dataclass(frozen=True)
class RandomTriples(Negatives):
    """Head, relation and tail all random (DP-FLames)."""

    def draw(self, world: World, asked: Asked, seed: int) -> dict[str, Any]:
        words = world.words(seed, Purpose.NEGATIVES, asked, 4 * self.count).unflatten(1, (self.count, 4))
        party = asked.party[:, None]
        many, first = world.many[party], world.first[party]
        head, tail = (world.entity[first + below(words[..., i], many)] for i in (0, 1))
        relation = world.relation_start[party] + below(words[..., 2], world.relations[party])
        return {"triples": torch.stack([head, relation, tail], -1)}


NEGATIVES: dict[str, type[Negatives]] = {
    "independent": Independent,
    "pool": Pool,
    "all": Everyone,
    "public-pairs": PublicPairs,
    "random-triples": RandomTriples,
}
