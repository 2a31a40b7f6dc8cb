"""Whole epochs by fused kernels: which triples a step sees, their negatives, their gradients, noise, Adam.

The draws are those of `tacit.examples` and `tacit.negatives`, bit for bit. What is here knows what such an epoch needs
and what it changes; `cpu_epochs` and `gpu_epochs` do the steps.
"""

from __future__ import annotations

from typing import Any

import torch

from tacit.cohort import Cohort, SecretNoise
from tacit.errors import TacitError
from tacit.examples import Examples
from tacit.kernels.contract import Clipped, Plain, Rule
from tacit.kernels.fused import Fused, Places
from tacit.negatives import Independent, Pool
from tacit.optimizers import Adam

Tensor = Any
SIDE_OF = {"tails": 0, "heads": 1, "both": 2, "alternate": 3, "random": 4, "bernoulli": 5}
RECIPROCAL = 6
FOREVER = 1 << 62
HASH = 0x2545F4914F6CDD1D


def hash_table(keys: Tensor) -> Tensor:
    """Keys in a table of a power of two, at most a quarter full, each at or after its hashed place; -1 is empty."""
    size = 1 << max(4, (4 * len(keys) - 1).bit_length())
    table = torch.full((size,), -1, dtype=torch.int64, device=keys.device)
    place = (((keys * HASH) >> 32) & 0xFFFFFFFF) & (size - 1)
    while len(keys):
        free = table[place] == -1
        table[place[free]] = keys[free]  # of several for one place, one stays
        rest = table[place] != keys
        keys, place = keys[rest], (place[rest] + 1) & (size - 1)
    return table


class Epochs:
    """What a whole epoch needs, on a device. All that changes from step to step is the step's number."""

    smallest_world = 0
    """Pools are drawn if there are so many times more entities than the pool has."""

    def __init__(
        self,
        cohort: Cohort,
        examples: Examples,
        kernel: Fused,
        *,
        rule: Rule | None = None,
        noise: SecretNoise | None = None,
        divisor: float | None = None,
    ):
        """`divisor`: what sums of gradients are divided by; default: the number of a step's triples.

        Noise without a clip protects nothing, and a divisor that counts the triples tells how many there were. Which
        triples a step sees, and how many steps there are, follows the party's triples all the same: this alone is no
        private training.
        """
        if not self.fits(cohort, examples, kernel):
            raise TacitError("whole epochs by fused kernels do not cover this training")
        if noise is not None and (not isinstance(rule, Clipped) or divisor is None):
            raise TacitError("noise needs a clip and a divisor that does not depend on the triples")
        if divisor is not None and not 0 < divisor < float("inf"):
            raise TacitError(f"the divisor is above 0, not {divisor}")
        if isinstance(rule, Clipped) and examples.negatives.sides == "both":
            raise TacitError("both sides of a triple are one unit, and these kernels clip each side by itself")
        if rule is not None and rule.part != "both" and not kernel.objective.loss.apart:
            raise TacitError("this loss has no positive and negative part of its own")
        self.cohort, self.examples, self.kernel, device = cohort, examples, kernel, cohort.tables.entity.device
        self.rule, self.noise, self.divisor = rule or Plain(), noise, divisor or 0.0
        negatives, sampling, world, layout = examples.negatives, examples.sampling, examples.world, examples.layout
        self.batch, self.parties = min(sampling.batch, int(examples.sizes.max())), len(layout)
        self.copies = 2 if negatives.sides == "both" else 1
        self.sides = RECIPROCAL if sampling.reciprocal else SIDE_OF[negatives.sides]
        self.pooled, self.filtered = isinstance(negatives, Pool), getattr(negatives, "filtered", False)
        self.count = min(negatives.count, int(world.many.max())) if self.pooled else negatives.count
        self.size = self.parties * self.batch * self.copies
        self.ahead = self.steps_at_once()
        places = self.ahead * self.size
        ids = torch.zeros(4, places, dtype=torch.int64, device=device)
        rows = self.ahead * self.parties if self.pooled else places
        self.places = Places(
            ids[0],
            ids[1],
            ids[2],
            torch.zeros(places, dtype=torch.int8, device=device),
            torch.zeros(places, device=device),
            ids[3],
        )
        self.ids = torch.full((rows, self.count), -1, dtype=torch.int64, device=device)
        self.losses, self.norms = torch.zeros(2, places, device=device)
        steps = -(-int(examples.steps_per_epoch().max()) // self.ahead) * self.ahead
        self.step_losses = torch.zeros(
            steps, self.parties, device=device, dtype=torch.float64 if device.type == "cpu" else torch.float32
        )
        self.first, self.second = torch.ones(2, steps, self.parties, device=device)
        self.order = torch.zeros(len(examples.triples), dtype=torch.int64, device=device)
        vectors = torch.zeros(5, self.parties, dtype=torch.int64, device=device)
        self.begins, self.sizes, self.wanted, self.taken, self.most = vectors
        self.sizes.copy_(torch.from_numpy(examples.sizes))
        self.known = hash_table(world.known)
        self.share = examples.head_share if negatives.sides == "bernoulli" else self.losses[:1]
        self.weights = examples.weights if sampling.subsampling else self.losses[:1]

    @classmethod
    def fits(cls, cohort: Cohort, examples: Examples, kernel: Any) -> bool:
        """Whether whole epochs of this training can be done here."""
        negatives, sampling = examples.negatives, examples.sampling
        drawn = type(negatives) is Independent or (
            type(negatives) is Pool and int(examples.world.many.min()) >= cls.smallest_world * negatives.count
        )
        return (
            isinstance(kernel, Fused)
            and kernel.covers()
            and drawn
            and type(cohort.optimizer) is Adam
            and cohort.tables.entity.dtype == torch.float32
            and not (sampling.dropout or examples.queries)
            and not getattr(cohort.scorer, "unit_entities", False)
            and int(examples.steps_per_epoch().max()) < 1 << 31
        )

    def steps_at_once(self) -> int:
        """How many steps are drawn at once: buffers hold so many."""
        return 1

    def steps(self, number: int) -> None:
        """Do the first `number` steps of the epoch that was prepared."""
        raise NotImplementedError

    def run(self, wanted: Tensor, most: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """An epoch of the wanted parties: (steps, parties) sums of losses, and each party's steps and examples."""
        cohort, examples = self.cohort, self.examples
        order = examples.order(cohort.epochs, wanted)
        self.order[: len(order)] = order
        size = torch.where(wanted, self.sizes, 0)
        self.begins.copy_(size.cumsum(0) - size)
        self.wanted.copy_(wanted)
        self.taken.copy_(cohort.steps)
        self.most.copy_(torch.full_like(self.most, FOREVER) if most is None else most)
        batch = examples.sampling.batch
        steps = torch.minimum(-(-size // batch), (self.most - self.taken).clamp(min=0))
        moment = cohort.moments[None, :] + torch.arange(1, len(self.first) + 1, device=size.device)[:, None]
        adam = cohort.optimizer
        assert isinstance(adam, Adam)
        self.first.copy_((1 - adam.beta1 ** moment.double()) / cohort.pace)  # the learning rate is divided by it
        self.second.copy_((1 - adam.beta2 ** moment.double()).sqrt())
        self.step_losses.zero_()
        number = int(steps.max())
        cohort.steps += steps  # before they are taken: if they are interrupted, no noise is ever drawn twice
        cohort.moments += steps
        self.steps(number)
        return self.step_losses[:number], steps, torch.minimum(size, steps * batch) * self.copies
