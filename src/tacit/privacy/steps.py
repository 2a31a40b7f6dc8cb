"""Private steps of a cohort: Poisson batches, clipped sums, noise, in numbers of steps that are public.

What an example's gradient depends on: the example, the rows, and public draws that follow the triple itself and the
step, never its place among others. So a triple more or less changes no other triple's gradient. Which triples are
drawn, and the noise, follow a key that nobody has: it is made here, belongs to one cohort, and is not kept.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from tacit.cohort import Cohort, SecretNoise
from tacit.draws import MASK, Purpose, Secret, blocks
from tacit.errors import TacitError
from tacit.examples import Examples
from tacit.graph import NO_GROUP, Graph
from tacit.kernels.contract import Clipped, Kernel, Plain
from tacit.privacy.apart import PublicNegatives
from tacit.privacy.privatizers import AdaFEST, Confidential, RepairedFLames, Sound

Tensor = Any
SLOTS = 1 << 22
"""Public draws of a triple follow one of so many numbers; two triples that share one share draws, and nothing else."""
WORDS = 16
"""Of a block of ChaCha20."""
AT_ONCE = {"cpu": 1 << 13, "cuda": 1 << 16}
"""Examples are added up so many at a time: a batch is as large as it is, and nothing is cut off."""


class Units:
    """What is protected, of all parties: triples, or groups of them, each a stretch of `rows`."""

    def __init__(self, parts: Sequence[tuple[np.ndarray, np.ndarray]], numbers: Sequence[int], device: Any):
        """`parts`: each party's rows of the examples' triples, and the unit of each. `numbers`: of the parties."""
        rows, owner, first, begin = [], [], [], 0
        ends: list[np.ndarray] = [np.zeros(1, np.int64)]
        for party, (mine, unit) in enumerate(parts):
            order = np.argsort(unit, kind="stable")
            size = np.unique(unit, return_counts=True)[1]
            rows.append(mine[order])
            ends.append(ends[-1][-1] + np.cumsum(size))
            owner.append(np.full(len(size), party))
            first.append(begin + np.arange(len(size)))
            begin += -(-len(size) // WORDS) * WORDS  # each party's words begin with a block of their own
        self.rows, self.ends, self.owner, self.words = (
            torch.from_numpy(np.concatenate(x).astype(np.int64)).to(device) for x in (rows, ends, owner, first)
        )
        self.counts = np.array([len(x) for x in owner])
        blocks_of = -(-self.counts // WORDS)
        whose = np.repeat(np.arange(len(parts)), blocks_of)
        within = np.arange(len(whose)) - np.repeat(np.cumsum(blocks_of) - blocks_of, blocks_of)
        self.block_party = torch.from_numpy(whose).to(device)
        self.block, self.block_number = torch.from_numpy(within).to(device), torch.tensor(numbers)[whose].to(device)

    def drawn(self, secret: Secret, steps: Tensor, bounds: Tensor, active: Tensor) -> Tensor:
        """Which units of the active parties are in their Poisson samples: those whose word is below their bound."""
        words = secret.blocks(Purpose.SAMPLE, self.block_number, steps[self.block_party], self.block).reshape(-1)
        return ((words[self.words] < bounds[self.owner]) & active[self.owner]).nonzero()[:, 0]

    def chosen(self, which: Tensor) -> tuple[Tensor, Tensor]:
        """The rows of these units, and which of them each belongs to, from 0 on."""
        place = torch.arange(len(which), device=which.device)
        if len(self.rows) == len(self.owner):
            return self.rows[which], place
        count = self.ends[which + 1] - self.ends[which]
        unit = place.repeat_interleave(count)
        within = torch.arange(len(unit), device=which.device) - (count.cumsum(0) - count)[unit]
        return self.rows[self.ends[which][unit] + within], unit


class PrivateSteps:
    """The steps of a cohort's parties under a privatizer whose noise is known.

    Attributes
    ----------
    rates, per_epoch, batch
        Of each party: the sampling rate, the steps of an epoch, the expected size of a batch. Public.
    falls
        How many times the noise has fallen by a signal (`tacit.privacy.schedule`).
    """

    def __init__(self, privatizer: Sound, cohort: Cohort, kernel: Kernel, examples: Examples, graphs: Sequence[Graph]):
        if privatizer.sigma is None:
            raise TacitError("the noise of this training has not been solved for yet")
        for reason in (examples.negatives.refusal(), examples.sampling.refusal()):
            if reason is not None:
                raise TacitError(f"this may not be done under privacy: {reason}")
        self.privatizer, self.cohort, self.kernel, self.examples = privatizer, cohort, kernel, examples
        self.graphs, self.device, self.layout = tuple(graphs), examples.device, examples.layout
        self.new_key()
        self.batch, self.rates, self.per_epoch = public_numbers(privatizer, self.graphs, examples.sampling.batch)
        self.units = Units([self._units(party) for party in range(len(graphs))], self.layout.numbers, self.device)
        self.bounds = torch.tensor([sampling_bound(rate) for rate in self.rates], device=self.device)
        self.divisor = torch.tensor(self.batch, dtype=torch.float32, device=self.device)
        self.clip = torch.full((len(graphs),), privatizer.clip, device=self.device)
        self.mask: Tensor | None = None
        self.falls = 0
        self.negatives: PublicNegatives | None = None
        if isinstance(privatizer, RepairedFLames):
            self.negatives = PublicNegatives(
                cohort, kernel, examples.world, seed=examples.seed, batch=examples.sampling.batch,
                tails=examples.negatives.count, pairs=False,
            )  # fmt: skip
        if isinstance(privatizer, Confidential):
            public = [np.flatnonzero(~_confidential(graph)) for graph in graphs]
            sizes = np.array([len(rows) for rows in public])
            moved = [rows + start for rows, start in zip(public, examples.start, strict=False)]
            place = [np.arange(size) for size in sizes]
            self.unrestricted, self.public_place, self.public_party = (
                torch.from_numpy(np.concatenate(x).astype(np.int64)).to(self.device)
                for x in (moved, place, [np.full(size, party) for party, size in enumerate(sizes)])
            )
            shares = [min(1.0, each / max(size, 1)) for each, size in zip(self.batch, sizes, strict=True)]
            self.public_bounds = torch.tensor([sampling_bound(share) for share in shares], device=self.device)

    def new_key(self) -> None:
        """For another training, or one that goes on from an earlier state: no noise is ever drawn twice."""
        seeded = self.privatizer.noise == "seeded"
        self.secret = Secret.simulation(self.examples.seed) if seeded else Secret.fresh()

    def _units(self, party: int) -> tuple[np.ndarray, np.ndarray]:
        """A party's protected rows, and the unit of each. Of a group that is too large, those stay that come first by a
        draw that follows the triple.
        """
        graph, start = self.graphs[party], int(self.examples.start[party])
        chosen = np.arange(len(graph.train))
        if isinstance(self.privatizer, Confidential):
            chosen = np.flatnonzero(_confidential(graph))
        if self.privatizer.unit == "triple":
            return chosen + start, chosen
        assert graph.train.group is not None
        group = graph.train.group[chosen].astype(np.int64)
        alone = group == NO_GROUP
        group[alone] = group.max(initial=0) + 1 + np.arange(alone.sum())
        place = content(graph.train.triples[chosen], self.examples.seed, self.layout.numbers[party])
        order = np.lexsort((place, group))
        first = np.searchsorted(group[order], group[order], side="left")
        kept = order[np.arange(len(order)) - first < self.privatizer.group]
        return chosen[kept] + start, group[kept]

    # -- before the first step -----------------------------------------------------------------------------------------

    def begin(self, dim: int, epochs: int, limit: int | None) -> None:
        """What is released once, if it was not yet: noisy degrees decide which rows move."""
        privatizer = self.privatizer
        if not privatizer.degree_share or self.mask is not None:
            return
        kept, steps = [], [min(epochs * each, limit or epochs * each) for each in self.per_epoch]
        for party, graph in enumerate(self.graphs):
            mine = graph.train.triples
            if isinstance(privatizer, Confidential):
                mine = mine[_confidential(graph)]
            number, entities = self.layout.numbers[party], len(graph.entities)
            degrees = noisy_degrees(mine, entities, privatizer.degree_sigma, self.secret, number)
            kept.append(degrees >= privatizer.threshold_of(dim, self.rates[party], steps[party]))
        self.mask = torch.from_numpy(np.concatenate(kept)).to(self.device)

    # -- a step --------------------------------------------------------------------------------------------------------

    def step(self, active: np.ndarray) -> tuple[Tensor, Tensor]:
        """One step of the active parties; (parties,) sums of losses and numbers of examples, which are not public."""
        privatizer, steps = self.privatizer, self.cohort.steps
        loss, count = torch.zeros(2, len(self.graphs), dtype=torch.float64, device=self.device)
        noisy = torch.from_numpy(active).to(self.device)
        if isinstance(privatizer, Confidential):
            kind = torch.tensor([privatizer.is_private(step) for step in steps.tolist()], device=self.device)
            plain, noisy = noisy & ~kind, noisy & kind
            if bool(plain.any()):
                rows = self._unrestricted(plain)
                self._add(rows, torch.arange(len(rows), device=self.device), Plain(), loss, count)
                self.cohort.which.zero_()
                self.cohort.finish(self.divisor, plain)
        if bool(noisy.any()):
            self.cohort.which.fill_(self.cohort.memories - 1)
            rows, unit = self.units.chosen(self.units.drawn(self.secret, steps, self.bounds, noisy))
            self._add(rows, unit, self.rule(), loss, count)
            self._finish(noisy, rows)
        return loss, count

    def rule(self) -> Clipped:
        """One norm over all rows of a unit, in both tables."""
        if isinstance(self.privatizer, RepairedFLames):
            return Clipped(self.clip, row_clip=self.privatizer.row_clip, part="positive")
        return Clipped(self.clip, row_mask=self.mask, relation_scale=self.privatizer.relation_scale)

    def _unrestricted(self, active: Tensor) -> Tensor:
        """Plain batches of public triples, by public draws."""
        whose = self.public_party
        numbers = torch.tensor(self.layout.numbers, device=self.device)[whose]
        step = self.cohort.steps[whose]
        words = blocks(self.examples.seed, Purpose.SHUFFLE, numbers, step, self.public_place)[0]
        return self.unrestricted[(words < self.public_bounds[whose]) & active[whose]]

    def _add(self, rows: Tensor, unit: Tensor, rule: Clipped | Plain, loss: Tensor, count: Tensor) -> None:
        """Add up what the examples contribute, so many at a time; a unit is never cut apart."""
        examples, cohort, begin = self.examples, self.cohort, 0
        starts = torch.tensor(self.examples.start[1:], device=self.device)
        party = torch.searchsorted(starts, rows, right=True)
        slot = self._slots(rows, party)
        while begin < len(rows):
            end = min(begin + AT_ONCE[self.device.type], len(rows))
            if end < len(rows):  # to the end of the unit that the last row belongs to
                end = int(torch.searchsorted(unit, unit[end - 1], right=True))
            here = slice(begin, end)
            made = examples.step(rows[here], party[here], slot[here], cohort.steps, unit[here] - unit[begin])
            found, _ = self.kernel.accumulate(cohort.tables, made.chunk, rule, cohort.gradients)
            loss.index_add_(0, made.chunk.party, found.double())
            count.index_add_(0, made.chunk.party, torch.ones_like(found, dtype=torch.float64))
            begin = end

    def _slots(self, rows: Tensor, party: Tensor) -> Tensor:
        """Where public draws of each triple begin: by its own ids at its party."""
        entity, relation, number = (
            torch.tensor(x, device=self.device)[party]
            for x in (self.layout.entity_start[:-1], self.layout.relation_start[:-1], self.layout.numbers)
        )
        h, r, t = self.examples.triples[rows].unbind(1)
        return content(torch.stack([h - entity, r - relation, t - entity], 1), self.examples.seed, number)

    def _finish(self, active: Tensor, rows: Tensor) -> None:
        """Noise and the optimizer; it also ends a step without examples."""
        cohort, privatizer = self.cohort, self.privatizer
        sigma = [privatizer.multiplier(step, self.falls) for step in cohort.steps.tolist()]
        kept = self.mask
        if isinstance(privatizer, AdaFEST):
            apart = [privatizer.apart(each) for each in sigma]
            kept, sigma = self._selected(active, rows, [a for a, _ in apart]), [b for _, b in apart]
        if isinstance(privatizer, RepairedFLames):
            kept = self._by_gap(active, sigma)
        noise = SecretNoise(self.secret, torch.tensor(sigma, device=self.device) * self.clip, kept)
        if self.negatives is not None:
            cohort.protect(noise, active)
            self.negatives.add(active)
            cohort.move(self.divisor, active, whole=bool(active.all()))
            return
        cohort.finish(self.divisor, active, noise=noise, relation_scale=privatizer.relation_scale)

    def _by_gap(self, active: Tensor, sigma: Sequence[float]) -> Tensor:
        """Entity rows that a noisy gap chooses, if its test passes: DP-FLames' selection with the noise that it takes.

        How many rows there may be is public: from the expected batch on to twice that.
        """
        privatizer, layout = self.privatizer, self.layout
        assert isinstance(privatizer, RepairedFLames)
        into = self.cohort.gradients.tables.entity
        kept = torch.zeros(len(into), dtype=torch.bool, device=self.device)
        parties = active.nonzero()[:, 0]
        numbers = torch.tensor(layout.numbers, device=self.device)[parties]
        lasts = [min(2 * round(batch), many - 1) for batch, many in zip(self.batch, layout.entities, strict=True)]
        firsts = [max(1, min(round(batch), last)) for batch, last in zip(self.batch, lasts, strict=True)]
        most = max(last + 1 - first for first, last in zip(firsts, lasts, strict=True))
        steps = self.cohort.steps[parties]
        words = self.secret.words(Purpose.NOISE_GAP, numbers, steps, 2 * most, self.device)
        halves = words.double().reshape(len(parties), -1, 2)
        gumbels = -(-((halves[..., 0] + (halves[..., 1] + 0.5) * 2.0**-32) * 2.0**-32).log()).log()
        normals = self.secret.normal(Purpose.NOISE_TEST, numbers, steps, 1, self.device).double()
        for at, party in enumerate(parties.tolist()):
            first, last = firsts[party], lasts[party]
            top, which = torch.linalg.vector_norm(into[layout.rows("entity", party)], dim=1).topk(last + 1)
            gumbel = gumbels[at, : last + 1 - first]
            k, passed = privatizer.selection(sigma[party]).choose(top.double(), first, gumbel, normals[at, 0])
            if bool(passed):
                kept[layout.entity_start[party] + which[: int(k)]] = True
        return kept

    def _selected(self, active: Tensor, rows: Tensor, sigma: Sequence[float]) -> Tensor:
        """Entity rows whose noisy count of touches in this batch is high enough; a triple's touches have norm 1."""
        privatizer, layout = self.privatizer, self.layout
        assert isinstance(privatizer, AdaFEST)
        touches = torch.zeros(layout.entity_start[-1], device=self.device)
        h, _, t = self.examples.triples[rows].unbind(1)
        each = torch.where(h == t, 1.0, math.sqrt(0.5))
        touches.index_add_(0, h, each)
        touches.index_add_(0, t, torch.where(h == t, 0.0, each))
        kept = torch.zeros_like(touches, dtype=torch.bool)
        for party in active.nonzero()[:, 0].tolist():
            own, step = touches[layout.rows("entity", party)], int(self.cohort.steps[party])
            self.secret.add_normals(Purpose.NOISE_SELECT, layout.numbers[party], step, sigma[party], own)
            kept[layout.rows("entity", party)] = own >= privatizer.threshold * sigma[party]
        return kept


def public_numbers(
    privatizer: Sound, graphs: Sequence[Graph], batch: int
) -> tuple[list[float], list[float], list[int]]:
    """Each party's expected batch, sampling rate and steps of an epoch: they follow the public number of its units."""
    sizes = [privatizer.public_size(count_units(privatizer, graph)) for graph in graphs]
    rates = [sampling_bound(min(1.0, batch / size)) / 2**32 for size in sizes]
    expected = [rate * size for rate, size in zip(rates, sizes, strict=True)]
    return expected, rates, [privatizer.steps_of(-(-size // batch)) for size in sizes]


def count_units(privatizer: Sound, graph: Graph) -> int:
    """How many triples or groups there are to protect."""
    mask = _confidential(graph) if isinstance(privatizer, Confidential) else np.ones(len(graph.train), bool)
    if privatizer.unit == "triple":
        return int(mask.sum())
    if graph.train.group is None:
        raise TacitError('the graph has no groups: mark them (tacit data mark), or set privacy.unit = "triple"')
    group = graph.train.group[mask]
    return len(np.unique(group[group != NO_GROUP])) + int((group == NO_GROUP).sum())


def _confidential(graph: Graph) -> np.ndarray:
    if graph.train.confidential is None:
        raise TacitError("nothing in the graph is marked confidential: mark statements (tacit data mark), or use dpsgd")
    found: np.ndarray = graph.train.confidential
    return found


def sampling_bound(rate: float) -> int:
    """A unit is drawn if its 32-bit word is below this: never more often than `rate` says."""
    return min(1 << 32, int(rate * 2**32))


def content(triples: Any, seed: int, party: Any) -> Any:
    """A number in [0, SLOTS) for each triple of a party's own ids, which follows the triple and nothing else."""
    if isinstance(triples, np.ndarray):
        triples = triples.astype(np.int64)
    h, r, t = triples[:, 0], triples[:, 1], triples[:, 2]
    return blocks(seed, Purpose.CONTENT, party, r, (h << 32) | t)[0] & (SLOTS - 1)


def noisy_degrees(triples: np.ndarray, entities: int, sigma: float | None, secret: Secret, party: int) -> np.ndarray:
    """How many triples each entity is in, with noise for the L2 sensitivity sqrt 2; a loop counts once."""
    assert sigma is not None
    h, t = triples[:, 0], triples[triples[:, 0] != triples[:, 2], 2]
    degrees = np.bincount(np.concatenate([h, t]), minlength=entities).astype(np.float32)
    secret.add_normals(Purpose.NOISE_SELECT, party, MASK, sigma * math.sqrt(2), torch.from_numpy(degrees))
    return degrees
