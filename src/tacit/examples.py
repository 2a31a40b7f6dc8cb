"""Which examples a step sees: the triples of all parties, shuffled, cut into batches, asked from one side or both.

All parties go through their own triples at once. A party with fewer triples has done its epoch earlier, and rests.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from tacit.draws import Purpose, blocks
from tacit.errors import BadValue
from tacit.graph import Graph
from tacit.kernels.contract import Chunk
from tacit.models import Layout
from tacit.negatives import Asked, Negatives, World

Tensor = Any


@dataclass(frozen=True)
class Sampling:
    """How triples become examples; the negatives' `sides` say which side is asked for.

    Attributes
    ----------
    batch
        Triples (k-vs-all: queries) per party and step.
    reciprocal
        Ask for heads as for tails of an inverse relation that has a row of its own (Lacroix et al. 2018). Allowed under
        privacy: both examples of a triple are one unit.
    subsampling
        Weigh a triple by 1 / sqrt(how often its (h, r) and (r, t) occur), as the RotatE authors. A party's weights have
        a mean of 1 (theirs are divided by each batch's sum). Not under privacy: it is a statistic of other triples.
    dropout
        The share of a query's numbers set to 0 in training. Allowed under privacy: a public draw.
    """

    batch: int = 512
    reciprocal: bool = False
    subsampling: bool = False
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise BadValue(f"batch is at least 1, not {self.batch}")
        if not 0 <= self.dropout < 1:
            raise BadValue(f"dropout is in [0, 1), not {self.dropout}")

    def refusal(self) -> str | None:
        """Why this may not be used under privacy; None: it may."""
        why = "subsampling weights count how often a triple's parts occur in others: set training.subsampling = false"
        return why if self.subsampling else None


@dataclass(frozen=True)
class Step:
    """The examples of one step of all parties."""

    chunk: Chunk
    active: Tensor
    """(parties,) bool: who takes this step."""
    divisor: Tensor
    """(parties,): how many triples of a party the step has, at least 1."""


class Examples:
    """The training triples of several parties, on a device.

    Parameters
    ----------
    graphs
        One per party.
    layout
        Rows of the stacked tables; twice the relations if `sampling.reciprocal`.
    queries
        k-vs-all: examples are queries with all their answers, not triples.
    pairs
        Public (head, relation) pairs by each party's own ids, for negatives that need them.
    own
        The entities of each party's graph by their rows in its table, where the table has rows for others too. Default:
        the rows are the graph's entities.
    """

    def __init__(
        self,
        graphs: Sequence[Graph],
        layout: Layout,
        sampling: Sampling,
        negatives: Negatives,
        *,
        seed: int,
        queries: bool = False,
        pairs: Sequence[np.ndarray] | None = None,
        own: Sequence[np.ndarray] | None = None,
        widths: tuple[int, int] = (0, 0),
        device: Any = "cpu",
    ):
        if sampling.reciprocal and negatives.sides != "both":
            raise BadValue('reciprocal relations ask for both sides: negatives.sides has to be "both"')
        self.layout, self.sampling, self.negatives = layout, sampling, negatives
        self.seed, self.queries, self.widths, self.device = seed, queries, widths, torch.device(device)
        shifts = [
            np.array([layout.entity_start[i], layout.relation_start[i], layout.entity_start[i]], np.int64)
            for i in range(len(layout))
        ]
        triples = [graph.train.triples + shift for graph, shift in zip(graphs, shifts, strict=True)]
        self.half = torch.tensor([len(graph.relations) for graph in graphs], device=device)
        if sampling.reciprocal and any(
            rows != 2 * len(graph.relations) for rows, graph in zip(layout.relations, graphs, strict=True)
        ):
            raise BadValue("reciprocal relations need twice the relation rows")
        self.sizes = np.array([len(part) for part in triples])
        self.triples = torch.from_numpy(np.concatenate(triples)).to(device)
        self.start = np.cumsum([0, *self.sizes])
        if queries:
            self._make_queries(np.concatenate(triples), graphs)
        self.world = World(
            layout,
            [np.arange(rows) for rows in layout.entities] if own is None or negatives.scope != "own" else list(own),
            self._known(triples, graphs),
            None if pairs is None else list(pairs),
            device,
        )
        self.numbers = torch.tensor(layout.numbers, device=device)
        self.many, self.first = (torch.from_numpy(array).to(device) for array in (self.sizes, self.start[:-1].copy()))

    @staticmethod
    def check_size(graph: Graph, sampling: Sampling, negatives: Negatives) -> None:
        """Refuse a graph that is too large for these negatives, before anything is made of it."""
        if getattr(negatives, "filtered", False):
            twice = 2 if sampling.reciprocal else 1
            World.check_keys(len(graph.entities), twice * len(graph.relations))

    def _known(self, triples: list[np.ndarray], graphs: Sequence[Graph]) -> np.ndarray:
        """Training facts by stacked rows, and their inverses."""
        whole = np.concatenate(triples)
        if not getattr(self.negatives, "filtered", False):
            return whole[:0]
        if self.sampling.reciprocal:
            half = np.repeat([len(graph.relations) for graph in graphs], self.sizes)
            whole = np.concatenate([whole, np.stack([whole[:, 2], whole[:, 1] + half, whole[:, 0]], 1)])
        return whole

    def _make_queries(self, triples: np.ndarray, graphs: Sequence[Graph]) -> None:
        """Distinct (known entity, relation, side) per party, with all answers."""
        if self.negatives.sides not in ("tails", "heads", "both"):
            raise BadValue("k-vs-all asks for tails, heads or both sides of every query")
        party = np.repeat(np.arange(len(self.sizes)), self.sizes)
        rows = []  # party, side, known, relation, answer
        if self.negatives.sides in ("tails", "both"):
            rows.append(np.stack([party, party * 0, triples[:, 0], triples[:, 1], triples[:, 2]], 1))
        if self.negatives.sides in ("heads", "both"):
            half = np.repeat([len(graph.relations) for graph in graphs], self.sizes) * self.sampling.reciprocal
            side = party * 0 + (not self.sampling.reciprocal)
            rows.append(np.stack([party, side, triples[:, 2], triples[:, 1] + half, triples[:, 0]], 1))
        whole = np.unique(np.concatenate(rows), axis=0)
        new = np.ones(len(whole), bool)
        new[1:] = (whole[1:, :4] != whole[:-1, :4]).any(axis=1)
        first = np.flatnonzero(new)
        self.offsets = torch.from_numpy(np.append(first, len(whole))).to(self.device)
        self.answers = torch.from_numpy(whole[:, 4].copy()).to(self.device)
        asked = whole[first]
        self.asks_head = torch.from_numpy(asked[:, 1] == 1).to(self.device)
        known, relation, answer = asked[:, 2], asked[:, 3], asked[:, 4]
        turned = asked[:, 1] == 1
        both = np.stack([np.where(turned, answer, known), relation, np.where(turned, known, answer)], 1)
        self.triples = torch.from_numpy(both).to(self.device)
        self.sizes = np.bincount(asked[:, 0], minlength=len(self.sizes))
        self.start = np.cumsum([0, *self.sizes])

    @cached_property
    def weights(self) -> Tensor:
        """1 / sqrt(count(h, r) + count(r, t)) of every triple, each count begun at 3 as in the authors' code, over the
        mean of the party's.
        """
        h, r, t = self.triples.unbind(1)
        entities = self.layout.entity_start[-1]
        counts = []
        for side, entity in ((0, h), (1, t)):
            key = (r * 2 + side) * entities + entity
            _, where, count = key.unique(return_inverse=True, return_counts=True)
            counts.append(count[where] + 3)
        weights = (counts[0] + counts[1]).double().rsqrt()
        mean = torch.segment_reduce(weights, "mean", lengths=self.many)
        return (weights / mean.repeat_interleave(self.many)).float()

    @cached_property
    def head_share(self) -> Tensor:
        """How likely bernoulli asks for the head of each triple: tph / (tph + hpt) of its relation."""
        h, r, t = self.triples.unbind(1)
        entities, relations = self.layout.entity_start[-1], self.layout.relation_start[-1]
        size = torch.bincount(r, minlength=relations)
        heads, tails = (torch.bincount((r * entities + e).unique() // entities, minlength=relations) for e in (h, t))
        per_head, per_tail = size / heads.clamp(min=1), size / tails.clamp(min=1)
        return (per_head / (per_head + per_tail))[r]

    def steps_per_epoch(self) -> np.ndarray:
        """(parties,): how many steps an epoch of each party has."""
        return -(-self.sizes // self.sampling.batch)

    def epoch(self, epochs: Tensor, steps: Tensor, active: Tensor, most: Tensor | None = None) -> Iterator[Step]:
        """The steps in which every active party goes once through its triples.

        `epochs` and `steps` are the parties' counts before it; `most` bounds how many steps a party may have taken, and
        a party that reaches it rests from then on.
        """
        taken, wanted = steps.clone(), active.cpu().numpy()
        order = self.order(epochs, active)
        sizes = torch.from_numpy(np.where(wanted, self.sizes, 0)).to(self.device)
        begin = sizes.cumsum(0) - sizes
        batch = self.sampling.batch
        for number in range(int((self.steps_per_epoch() * np.array(wanted)).max(initial=0))):
            last = min((number + 1) * batch, int(self.sizes.max()))  # a batch may be larger than any party
            slot = torch.arange(number * batch, last, device=self.device)
            there = slot[None] < sizes[:, None]
            if most is not None:
                there &= (taken < most)[:, None]
            moving = there.any(1)
            if not bool(moving.any()):
                return
            party, place = there.nonzero(as_tuple=True)
            yield self.step(order[begin[party] + number * batch + place], party, place, taken)
            taken = taken + moving

    def order(self, epochs: Tensor, active: Tensor) -> Tensor:
        """The triples of all active parties, one party after the other, each in its order of this epoch.

        A party's order is `Stream.permutation` of its own stream: sorted by 63 bits, ties by place.
        """
        owner = torch.repeat_interleave(torch.where(active, self.many, 0))
        place = torch.arange(len(owner), device=self.device)
        before = torch.where(active, self.many, 0).cumsum(0) - torch.where(active, self.many, 0)
        place = place - before[owner]
        words = blocks(self.seed, Purpose.SHUFFLE, self.numbers[owner], epochs[owner], place >> 1)
        odd = (place & 1).bool()
        high, low = torch.where(odd, words[2], words[0]), torch.where(odd, words[3], words[1])
        sorted_ = ((high << 31) | (low >> 1)).argsort(stable=True)
        sorted_ = sorted_[owner[sorted_].argsort(stable=True)]
        return place[sorted_] + self.first[owner]

    def step(self, rows: Tensor, party: Tensor, slot: Tensor, steps: Tensor, unit: Tensor | None = None) -> Step:
        """The examples of these `rows` of `triples`, each at its party's batch's `slot`; `unit`: default, each its own.

        Public draws follow the slot.
        """
        h, r, t = self.triples[rows].unbind(1)
        weight = self.weights[rows] if self.sampling.subsampling else torch.ones(len(rows), device=self.device)
        unit = torch.arange(len(rows), device=self.device) if unit is None else unit.to(self.device)
        active = torch.zeros(len(self.layout), dtype=torch.bool, device=self.device)
        active[party] = True
        divisor = torch.bincount(party, minlength=len(self.layout)).clamp(min=1).float()
        answers = None
        if self.queries:
            asks_head = self.asks_head[rows]
            count = self.offsets[rows + 1] - self.offsets[rows]
            ends = count.cumsum(0)
            within = torch.arange(int(ends[-1]) if len(ends) else 0, device=self.device)
            at = (self.offsets[rows] - (ends - count)).repeat_interleave(count) + within
            answers = (torch.cat([ends.new_zeros(1), ends]), self.answers[at])
        elif self.negatives.sides == "both":
            flip = self.half[party] if self.sampling.reciprocal else None
            if flip is None:
                h, r, t = h.repeat(2), r.repeat(2), t.repeat(2)
                asks_head = torch.arange(2, device=self.device).bool().repeat_interleave(len(rows))
            else:
                h, r, t = torch.cat([h, t]), torch.cat([r, r + flip]), torch.cat([t, h])
                asks_head = torch.zeros(2 * len(rows), dtype=torch.bool, device=self.device)
            party, slot, unit, weight = (
                party.repeat(2),
                torch.cat([slot, slot + self.sampling.batch]),
                unit.repeat(2),
                weight.repeat(2),
            )
        else:
            asks_head = self._side(rows, party, slot, steps)
        asked = Asked(h, r, t, party, asks_head, slot, steps)
        drawn = self.negatives.draw(self.world, asked, self.seed)
        chunk = Chunk(h, r, t, party, asks_head, weight, unit, answers=answers, **drawn, **self._dropped(asked))
        return Step(chunk, active, divisor)

    def _side(self, rows: Tensor, party: Tensor, slot: Tensor, steps: Tensor) -> Tensor:
        """Which examples ask for their head."""
        sides = self.negatives.sides
        if sides in ("tails", "heads"):
            return torch.full((len(rows),), sides == "heads", device=self.device)
        if sides == "alternate":
            return steps[party] % 2 == 1
        words = blocks(self.seed, Purpose.SIDE, self.numbers[party], steps[party], slot)[0]
        share = self.head_share[rows].double() if sides == "bernoulli" else 0.5
        return words.double() * 2.0**-32 < share

    def _dropped(self, asked: Asked) -> dict[str, Tensor]:
        """Factors that set a share of the query's numbers to 0 and make up for it."""
        rate = self.sampling.dropout
        if not rate:
            return {}
        entity, relation = self.widths
        words = self.world.words(self.seed, Purpose.DROPOUT, asked, entity + relation)
        kept = (words >= int(rate * 2**32)).float() / (1.0 - rate)
        return {"drop_entity": kept[:, :entity], "drop_relation": kept[:, entity:]}
