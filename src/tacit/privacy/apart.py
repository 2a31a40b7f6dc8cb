"""The negative part of a loss on draws that are public: a gradient that tells nothing of any triple (DP-FLames).

Positives are protected by themselves; what they are compared with are heads and relations from a public list, or random
ones, each with random tails. How many there are is public as well.
"""

from __future__ import annotations

from typing import Any

import torch

from tacit.cohort import Cohort
from tacit.draws import Purpose, below
from tacit.kernels.contract import Chunk, Kernel, Plain
from tacit.negatives import Asked, World

Tensor = Any


class PublicNegatives:
    """So many (head, relation) for each party in each step, each with so many tails.

    pairs: of the world's public list; False: head and relation are random.
    """

    def __init__(self, cohort: Cohort, kernel: Kernel, world: World, *, seed: int, batch: int, tails: int,
                 pairs: bool):  # fmt: skip
        self.cohort, self.kernel, self.world = cohort, kernel, world
        self.seed, self.tails, self.pairs = seed, tails, pairs
        parties, device = len(world.layout), world.device
        self.party = torch.arange(parties, device=device).repeat_interleave(batch)
        self.slot = torch.arange(batch, device=device).repeat(parties)
        self.nothing = torch.zeros_like(self.party)

    def draw(self) -> tuple[Tensor, Tensor, Tensor]:
        """Stacked rows of heads and relations, (n,), and of tails, (n, tails), at each party's count of steps."""
        world, party, none = self.world, self.party, self.nothing
        asked = Asked(none, none, none, party, none.bool(), self.slot, self.cohort.steps)
        words = world.words(self.seed, Purpose.NEGATIVES, asked, 4 + self.tails)
        many, first = world.many[party], world.first[party]
        tails = world.entity[first[:, None] + below(words[:, 4:], many[:, None])]
        if self.pairs:
            assert world.pairs is not None
            sizes, begins, pairs = world.pairs
            pair = pairs[begins[party] + below(words[:, 0], sizes[party])]
            return pair[:, 0], pair[:, 1], tails
        relation = world.relation_start[party] + below(words[:, 1], world.relations[party])
        return world.entity[first + below(words[:, 0], many)], relation, tails

    def add(self, active: Tensor) -> Tensor:
        """Add the gradient to the cohort's buffers; (parties,) sums of losses."""
        cohort, party = self.cohort, self.party
        head, relation, tails = self.draw()
        # What is asked for has no answer: where an example has one stands the head, which the negative part leaves out.
        chunk = Chunk(head, relation, head, party, self.nothing.bool(), active[party].to(cohort.tables.entity.dtype),
                      negatives=tails)  # fmt: skip
        losses, _ = self.kernel.accumulate(cohort.tables, chunk, Plain("negative"), cohort.gradients)
        return losses.double().reshape(len(active), -1).sum(1)
