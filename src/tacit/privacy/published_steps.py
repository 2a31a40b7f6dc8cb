"""Steps of DP-FLames and DPKGE as their papers print them: for replication, with no formal guarantee.

Batches are shuffled triples of a fixed number, as FedE's code and pykg2vec have it. Everything has fixed shapes, and
the host is never waited for, so that on a GPU several steps are one CUDA graph. What each mechanism gets wrong, and
where: `docs/published.md`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from tacit.cohort import Cohort
from tacit.draws import Purpose, Stream, below, bits, party_normals, party_words
from tacit.errors import TacitError
from tacit.examples import Examples
from tacit.graph import Graph
from tacit.kernels.contract import ABSENT, Chunk, Clipped, Kernel
from tacit.kernels.fused import Fused
from tacit.kernels.rows import First, add_noise, add_times
from tacit.models import Part
from tacit.models.tables import PARTS
from tacit.privacy.apart import PublicNegatives
from tacit.privacy.privatizers import DPKGE, DPFLames, Published
from tacit.privacy.published import least_epsilon

LOG = logging.getLogger(__name__)
Tensor = Any
AT_ONCE = 16
"""Steps in one CUDA graph."""
BEYOND = 1 << 40
"""Stands for a row that there is not, after all that there are."""


class PublishedSteps:
    """Epochs of a cohort's parties under a published mechanism.

    Attributes
    ----------
    per_epoch
        Of each party, steps.
    sigma
        (parties,): the noise as it is now.
    curve
        (parties, orders): what the paper's accounting counts so far.
    released
        (parties,): steps that released anything of protected triples' entity rows.
    """

    replays = True
    """Whether steps wait for nothing, so that a GPU can have several at once."""

    def __init__(self, privatizer: Published, cohort: Cohort, examples: Examples, kernel: Kernel,
                 graphs: Sequence[Graph]):  # fmt: skip
        if cohort.tables.shared:
            raise TacitError("the papers' mechanisms know entity and relation rows alone: use a scorer without weights")
        if examples.queries or examples.sampling.reciprocal:
            raise TacitError(
                "the papers' mechanisms train on triples: set training.reciprocal = false, and no k-vs-all"
            )
        if getattr(examples.sampling, "steps", None) is not None:
            raise TacitError("published mechanisms train whole epochs: leave out training.steps")
        if cohort.optimizer.touched_only:
            raise TacitError("the papers' steps are dense: use adam, adagrad or sgd")
        self.published, self.cohort, self.examples, self.objective = privatizer, cohort, examples, kernel.objective
        self.layout, self.device, self.seed = examples.layout, examples.device, examples.seed
        self.graphs, self.batch = tuple(graphs), examples.sampling.batch
        parties = len(graphs)
        self.whose = [(self.seed, number) for number in self.layout.numbers]
        """Of each party, its seed and number in draws."""
        self.seeds, self.numbers = (
            torch.tensor(all_of, device=self.device) for all_of in zip(*self.whose, strict=True)
        )
        self.divisor = torch.full((parties,), float(self.batch), device=self.device)
        self.sigma = torch.full((parties,), privatizer.sigma, device=self.device)
        self.curve = torch.zeros(parties, len(privatizer.orders), dtype=torch.float64)
        self.released, self.loss, self.count = (
            torch.zeros(parties, dtype=torch.float64, device=self.device) for _ in range(3)
        )
        self.number = torch.zeros((), dtype=torch.int64, device=self.device)
        self.wanted = torch.zeros(parties, dtype=torch.bool, device=self.device)
        self.per_epoch: list[int] = []
        self.before = torch.full((parties,), -math.inf, dtype=torch.float64)
        """Each party's validation MRR when it was last heard of."""
        self.graph: Any = None

    def state(self) -> dict[str, Tensor]:
        """What a resumed training needs, beyond the cohort's."""
        found = {"sigma": self.sigma, "curve": self.curve, "released": self.released, "before": self.before}
        return {f"published.{name}": tensor for name, tensor in found.items()}

    def load(self, state: dict[str, Tensor]) -> None:
        """Go on from a `state`."""
        for name, tensor in self.state().items():
            tensor.copy_(state[name])

    # -- an epoch ------------------------------------------------------------------------------------------------------

    def epoch(self, wanted: Tensor) -> tuple[Tensor, Tensor, int]:
        """All steps of the wanted parties; sums of losses and numbers of examples, (parties,), and steps."""
        self.shuffle()
        before = self.released.tolist()
        self.wanted.copy_(wanted)
        self.number.zero_()
        self.loss.zero_()
        self.count.zero_()
        most = max((many for many, there in zip(self.per_epoch, wanted.tolist(), strict=True) if there), default=0)
        if self.device.type == "cuda" and self.replays:
            self._replay(most)
        else:
            for _ in range(most):
                self.step()
        for party, there in enumerate(wanted.tolist()):
            if there:
                self.curve[party] += self.cost(party, float(self.released[party]) - before[party])
                self.ended(party)
        return self.loss.clone(), self.count.clone(), most

    def _replay(self, most: int) -> None:
        """So many steps, several to a graph; those beyond find no party active, and change nothing."""
        if self.graph is None:
            kept = {name: tensor.clone() for name, tensor in self._moving().items()}
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(3):
                    self.step()
            torch.cuda.current_stream().wait_stream(side)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                for _ in range(AT_ONCE):
                    self.step()
            for name, tensor in self._moving().items():
                tensor.copy_(kept[name])
        for _ in range(-(-most // AT_ONCE)):
            self.graph.replay()

    def _moving(self) -> dict[str, Tensor]:
        """Everything that a step changes."""
        own = {"released": self.released, "loss": self.loss, "count": self.count, "number": self.number}
        return self.cohort.state() | own

    def shuffle(self) -> None:
        """New orders of the triples."""
        raise NotImplementedError

    def step(self) -> None:
        """One step of every party that has one left."""
        raise NotImplementedError

    def rate(self, party: int) -> float:
        """B / N, by the paper."""
        raise NotImplementedError

    def cost(self, party: int, released: float) -> Tensor:
        """What the paper says that an epoch of this party costs, at its orders."""
        steps, sigma = self.per_epoch[party], float(self.sigma[party])
        return torch.tensor(self.published.cost(self.rate(party), sigma, steps, released), dtype=torch.float64)

    def accounted(self, party: int) -> float | None:
        """The epsilon of the paper's accounting so far; None: it has none."""
        found = self.published.accounted(self.curve[party].tolist())
        return found if math.isfinite(found) else None

    def spent(self, party: int) -> bool:
        """Whether another epoch might cost more than was asked for, by the paper's accounting."""
        asked: float | None = getattr(self.published, "published_epsilon", None)
        if asked is None:
            return False
        after = self.curve[party] + self.cost(party, self.per_epoch[party])
        return self.published.accounted(after.tolist()) > asked

    def ended(self, party: int) -> None:
        """An epoch of this party has ended."""

    def heard(self, party: int, mrr: float) -> None:
        """A party's validation MRR."""

    # -- what both have in common --------------------------------------------------------------------------------------

    def orders(self, chosen: Sequence[Tensor], which: int) -> Tensor:
        """(parties, places): rows of each party's chosen triples in a new order, padded; whole batches."""
        epoch = self.cohort.epochs.tolist()
        wide = max(1, max(-(-len(rows) // self.batch) for rows in chosen)) * self.batch
        made = torch.full((len(chosen), wide), ABSENT, device=self.device)
        for party, (rows, (seed, number)) in enumerate(zip(chosen, self.whose, strict=True)):
            draw = Stream(seed, Purpose.SHUFFLE, number, 2 * epoch[party] + which, device=str(self.device))
            made[party, : len(rows)] = rows[draw.permutation(len(rows))]
        return made

    def rows_at(self, order: Tensor, first: Tensor, active: Tensor) -> tuple[Tensor, Tensor]:
        """(parties, batch) rows of triples from each party's place on, and whether there is one."""
        at = first[:, None] + torch.arange(self.batch, device=self.device)
        row = order.gather(1, at.clamp(max=order.shape[1] - 1))
        there = (row != ABSENT) & (at < order.shape[1]) & active[:, None]
        return row.clamp(min=0), there

    def words(self, purpose: Purpose, count: int) -> Tensor:
        """(parties, count) 32-bit words at each party's count of steps."""
        return party_words(self.seeds, purpose, self.numbers, self.cohort.steps, count)

    def uniforms(self, purpose: Purpose, count: int) -> Tensor:
        """In (0, 1)."""
        return (self.words(purpose, count).double() + 0.5) * 2.0**-32

    def normals(self, purpose: Purpose, count: int) -> Tensor:
        """(parties, count) standard normals; simulated noise."""
        return party_normals(self.seeds, purpose, self.numbers, self.cohort.steps, count)


class FLamesSteps(PublishedSteps):
    """DP-FLames, Algorithms 1 and 2: positives clipped and selected, noise on what is selected; negatives public."""

    def __init__(self, privatizer: DPFLames, cohort: Cohort, examples: Examples, kernel: Kernel,
                 graphs: Sequence[Graph]):  # fmt: skip
        super().__init__(privatizer, cohort, examples, kernel, graphs)
        if not self.objective.loss.apart:
            raise TacitError(
                "DP-FLames protects the positive part of a loss: use one that has parts (self-adversarial)"
            )
        self.privatizer, self.selection = privatizer, privatizer.selection()
        rates = [self.batch / max(len(graph.train), self.batch + 1) for graph in graphs]
        least = max(least_epsilon(rate, privatizer.sigma, privatizer.delta) for rate in rates)
        if privatizer.published_epsilon is not None and privatizer.published_epsilon < least:
            raise TacitError(
                f"by the paper's accounting no training costs less than {least:.3g} at this batch size and sigma: "
                "raise privacy.published_epsilon, or leave it out"
            )
        self.per_epoch = [-(-len(graph.train) // self.batch) for graph in graphs]
        self.each = torch.tensor(self.per_epoch, device=self.device)
        starts = examples.start[:-1].tolist()
        self.all = [torch.arange(len(g.train), device=self.device) + s for g, s in zip(graphs, starts, strict=True)]
        self.order = self.orders(self.all, 0)
        many, begins = self.layout.entities, self.layout.entity_start[: len(graphs)]
        self.begins = torch.tensor(begins, device=self.device)[:, None]
        self.last = min(2 * self.batch, min(many) - 1)
        self.first = min(self.batch, self.last)
        self.kept = torch.arange(self.last, device=self.device)[None]
        early = torch.arange(min(max(many), 4 * self.batch + 1), device=self.device)[None]
        self.early = torch.where(early < torch.tensor(many, device=self.device)[:, None], early, BEYOND)
        """(parties, places): the first rows of each party, more than a batch can touch and the selection can take."""
        self.kernel, self.replays = kernel, isinstance(kernel, Fused) and kernel.covers()
        # As printed, clips are of the entity matrix alone; what relations get is neither clipped nor noisy.
        self.rule = Clipped(
            torch.full((len(graphs),), privatizer.clip, device=self.device), privatizer.row_clip, part="positive",
            entities_only=True,
        )  # fmt: skip
        self.asks_head = torch.zeros(len(graphs) * self.batch, dtype=torch.bool, device=self.device)
        self.none = torch.full((len(self.asks_head), 1), ABSENT, device=self.device)
        self.negatives = PublicNegatives(
            cohort, kernel, examples.world, seed=self.seed, batch=self.batch, tails=examples.negatives.count,
            pairs=privatizer.pairs != "random",
        )  # fmt: skip

    def shuffle(self) -> None:
        self.order.copy_(self.orders(self.all, 0))

    def step(self) -> None:
        cohort, active = self.cohort, self.wanted & (self.number < self.each)
        row, there = self.rows_at(self.order, (self.number * self.batch).expand(len(active)), active)
        loss, touched = self._positives(row, there)
        self._select(touched, there, active)
        self.loss += loss + self.negatives.add(active)
        self.count += there.sum(1)
        cohort.move(self.divisor, active)
        self.number += 1

    def _positives(self, row: Tensor, there: Tensor) -> tuple[Tensor, Tensor]:
        """Add up the positive parts, clipped; (parties,) sums of losses, and (parties, 2 batch) rows."""
        tables = self.cohort.tables
        h, r, t = self.examples.triples[row].unbind(-1)
        chunk = Chunk(h.reshape(-1), r.reshape(-1), t.reshape(-1), self.negatives.party, self.asks_head,
                      there.reshape(-1).to(tables.entity.dtype), negatives=self.none)  # fmt: skip
        losses, _ = self.kernel.accumulate(tables, chunk, self.rule, self.cohort.gradients)
        return losses.double().reshape(there.shape).sum(1), torch.cat([h, t], 1)

    def _select(self, touched: Tensor, there: Tensor, active: Tensor) -> None:
        """Algorithm 2, and noise on the rows it gives; all others lose what was added up.

        All norms are 0 but those of touched rows, and of equal norms the first rows come first: so no more than the
        touched rows and the first few have to be looked at.
        """
        into, width = self.cohort.gradients.tables.entity, self.cohort.tables.entity.shape[1]
        own = torch.where(there.repeat(1, 2), touched - self.begins, BEYOND)
        local = torch.cat([own, self.early], 1).sort(1)[0]
        real = local != BEYOND
        real[:, 1:] &= local[:, 1:] != local[:, :-1]
        place = torch.where(real, local, 0) + self.begins
        norms = torch.where(real, torch.linalg.vector_norm(into[place], dim=-1), -1.0)
        which = (norms.double() - local * 1e-13).topk(self.last + 1, dim=1)[1]
        top = norms.gather(1, which)
        gumbel = -(-self.uniforms(Purpose.NOISE_GAP, self.last + 1 - self.first).log()).log()
        k, passed = self.selection.choose(top, self.first, gumbel.float(), self.normals(Purpose.NOISE_TEST, 1)[:, 0])
        ids = place.gather(1, which[:, : self.last])
        chosen = (self.kept < k[:, None]) & (passed & active)[:, None]
        noise = self.normals(Purpose.NOISE_ENTITY, self.last * width).unflatten(1, (self.last, width))
        released = into[ids] + noise * (self.sigma * self.privatizer.clip)[:, None, None]
        into.index_fill_(0, touched.reshape(-1), 0.0)
        into.index_add_(0, ids.reshape(-1), torch.where(chosen[..., None], released, 0.0).flatten(0, 1))
        self.released += passed & active

    # -- what the paper says it costs ----------------------------------------------------------------------------------

    def rate(self, party: int) -> float:
        return self.batch / max(len(self.graphs[party].train), self.batch + 1)

    def heard(self, party: int, mrr: float) -> None:
        wanted = self.privatizer
        if wanted.follows == "validation" and mrr - float(self.before[party]) < wanted.least:
            self.sigma[party] *= wanted.falls
        self.before[party] = mrr

    def ended(self, party: int) -> None:
        wanted = self.privatizer
        if wanted.follows == "epochs" and (int(self.cohort.epochs[party]) + 1) % wanted.every == 0:
            self.sigma[party] *= wanted.falls


class DPKGESteps(PublishedSteps):
    """DPKGE, Algorithm 1: confidential batches clipped sample by sample, with noise on touched rows; others plain."""

    def __init__(self, privatizer: DPKGE, cohort: Cohort, examples: Examples, kernel: Kernel,
                 graphs: Sequence[Graph]):  # fmt: skip
        super().__init__(privatizer, cohort, examples, kernel, graphs)
        self.privatizer = privatizer
        self.percentile = torch.full((len(graphs), 1), privatizer.percentile, device=self.device)
        self.apart = torch.full((len(graphs),), privatizer.optimizers == 2, device=self.device)
        """Which parties' confidential batches have an optimizer of their own."""
        marks = [_marked(graph) for graph in graphs]
        starts = [int(start) for start in examples.start[:-1]]
        self.sets = [
            [
                torch.from_numpy(np.flatnonzero(mark == confidential) + start).to(self.device)
                for mark, start in zip(marks, starts, strict=True)
            ]
            for confidential in (True, False)
        ]
        self.batches = torch.tensor([[-(-len(rows) // self.batch) for rows in kind] for kind in self.sets])
        self.batches = self.batches.to(self.device)
        self.sizes = torch.tensor([[len(rows) for rows in kind] for kind in self.sets], device=self.device)
        self.per_epoch = self.batches.sum(0).tolist()
        self.each = self.batches.sum(0)
        most = (max(self.per_epoch), len(graphs))
        self.rows = torch.zeros(*most, self.batch, dtype=torch.int64, device=self.device)
        self.private = torch.zeros(most, dtype=torch.bool, device=self.device)
        """(steps, parties) of the epoch: whose batch is confidential; and `rows` of triples in it, or ABSENT."""
        self.learned: Tensor | None = None
        """Which numbers of a relation's row are learned, if not all: a weight that is given is not (TransM)."""
        if frozen := self.objective.scorer.frozen:
            self.learned = torch.ones(cohort.tables.relation.shape[1], device=self.device)
            self.learned[-frozen:] = 0.0
        self.places = {part: First(len(getattr(cohort.tables, part)), self.device) for part in PARTS}
        self.done = torch.zeros(2, len(graphs), dtype=torch.int64, device=self.device)
        """(2, parties): confidential and unrestricted batches so far."""

    def differ(self, seeds: Sequence[int], privatizers: Sequence[DPKGE]) -> None:
        """Every party as if it trained alone, each by a seed, a sigma and a percentile of its own.

        For tables of many small trainings of one graph: a GPU does thirty in little more time than one.
        """
        self.whose = [(seed, 0) for seed in seeds]
        self.seeds, self.numbers = (
            torch.tensor(all_of, device=self.device) for all_of in zip(*self.whose, strict=True)
        )
        self.sigma.copy_(torch.tensor([each.sigma for each in privatizers]))
        self.percentile.copy_(torch.tensor([[each.percentile] for each in privatizers]))
        self.apart.copy_(torch.tensor([each.optimizers == 2 for each in privatizers]))

    def state(self) -> dict[str, Tensor]:
        return super().state() | {"published.done": self.done}

    def _moving(self) -> dict[str, Tensor]:
        return super()._moving() | {"done": self.done}

    def shuffle(self) -> None:
        """Which batches the epoch has, in which order: all of it is known before."""
        orders = [self.orders(kind, which).unflatten(1, (-1, self.batch)) for which, kind in enumerate(self.sets)]
        done, sizes, batches = (tensor.T.tolist() for tensor in (self.done, self.sizes, self.batches))
        for party, begun in enumerate(self.cohort.steps.tolist()):
            (seed, number), steps = self.whose[party], begun + np.arange(self.per_epoch[party])
            coins = bits(seed, Purpose.COIN, number, steps, 0 * steps) % 2 == 0
            private = scheduled(tuple(done[party]), tuple(sizes[party]), coins.tolist())
            self.private[: len(private), party] = torch.from_numpy(private).to(self.device)
            for which, kind in enumerate((private, ~private)):
                place = (done[party][which] + np.arange(kind.sum())) % max(batches[party][which], 1)
                at = torch.from_numpy(np.flatnonzero(kind)).to(self.device)
                self.rows[at, party] = orders[which][party][torch.from_numpy(place).to(self.device)]

    def step(self) -> None:
        cohort, active = self.cohort, self.wanted & (self.number < self.each)
        number = self.number.clamp(max=len(self.rows) - 1).reshape(1)
        row, private = self.rows.index_select(0, number)[0], self.private.index_select(0, number)[0]
        there = (row != ABSENT) & active[:, None]
        self.loss += self._add(row.clamp(min=0), there, private)
        self.count += there.sum(1)
        self.done += torch.stack([private & active, ~private & active])
        self.released += private & active
        cohort.which.copy_(private & self.apart)
        cohort.move(self.divisor, active)
        self.number += 1

    def _add(self, row: Tensor, there: Tensor, private: Tensor) -> Tensor:
        """Add up the gradients of positives and of one corrupted triple each; (parties,) sums of losses."""
        tables, into = self.cohort.tables, self.cohort.gradients.tables
        h, r, t = self.examples.triples[row].unbind(-1)
        words = self.words(Purpose.NEGATIVES, 2 * self.batch).unflatten(1, (self.batch, 2))
        world = self.examples.world
        other = world.entity[world.first[:, None] + below(words[..., 0], world.many[:, None])]
        asks = words[..., 1] % 2 == 0
        heads, relations = torch.cat([h, torch.where(asks, other, h)], 1), torch.cat([r, r], 1)
        tails, both = torch.cat([t, torch.where(asks, t, other)], 1), torch.cat([there, there], 1)
        leaves = gathered(tables.entity[heads], tables.relation[relations], tables.entity[tails])
        with torch.enable_grad():
            loss = self._losses(self.objective.scorer.score(*leaves))
            head, relation, tail = torch.autograd.grad(torch.where(there, loss, 0.0).sum(), leaves)
        if self.learned is not None:
            relation = relation * self.learned
        sample = (head, relation, tail)
        lengths = length(sample)
        clip = self.clip_of(lengths, both)
        most = torch.where(private, clip, torch.inf)[:, None]
        factor = cut(lengths, most, both).reshape(-1)
        for part, rows, table in zip(
            sample, (heads, relations, tails), (into.entity, into.relation, into.entity), strict=True
        ):
            add_times(table, rows.reshape(-1), part.flatten(0, 1), factor)
        deviation = torch.where(private, self.sigma * clip, 0.0)
        self._noise("entity", torch.cat([heads, tails], 1), torch.cat([both, both], 1), deviation)
        self._noise("relation", r, there, deviation)
        return torch.where(there, loss.detach(), 0.0).double().sum(1)

    def _losses(self, scores: Tensor) -> Tensor:
        """(parties, batch) from (parties, 2 batch): first the true triples, then what they are compared with."""
        score, against = scores.chunk(2, 1)
        flat = against.reshape(-1, 1)
        parts = self.objective.loss(score.reshape(-1), flat, torch.ones_like(flat, dtype=torch.bool))
        return (parts[0] + parts[1]).reshape(score.shape)

    def clip_of(self, lengths: Tensor, there: Tensor) -> Tensor:
        """(parties,): the percentile of the batch's norms, of samples that have a gradient at all."""
        if self.privatizer.clip is not None:
            return torch.full_like(self.sigma, self.privatizer.clip)
        has = (lengths > 0) & there
        norms = torch.where(has, lengths, torch.inf).sort(1)[0]  # torch's quantiles would wait for the GPU
        place = self.percentile / 100 * (has.sum(1, keepdim=True) - 1).clamp(min=0)
        low, high = (norms.gather(1, at.long()) for at in (place.floor(), place.ceil()))
        return torch.where(has.any(1), torch.lerp(low, high, place.frac())[:, 0], 0.0)

    def _noise(self, part: Part, rows: Tensor, there: Tensor, deviation: Tensor) -> None:
        """On each row that the batch touched, once."""
        table = getattr(self.cohort.gradients.tables, part)
        purpose = Purpose.NOISE_ENTITY if part == "entity" else Purpose.NOISE_RELATION
        once = self.places[part].of(rows, there)
        add_noise(table, rows, once, deviation, self.seeds, purpose, self.numbers, self.cohort.steps)

    def rate(self, party: int) -> float:
        return self.batch / max(int(self.sizes[0, party]), self.batch + 1)

    def cost(self, party: int, released: float) -> Tensor:
        return super().cost(party, released) if released else torch.zeros(len(self.published.orders))

    def accounted(self, party: int) -> float | None:
        """None: nothing is confidential, and nothing to account for."""
        return super().accounted(party) if int(self.sizes[0, party]) else None


def published_steps(
    privatizer: Published, cohort: Cohort, examples: Examples, kernel: Kernel, graphs: Sequence[Graph]
) -> PublishedSteps:
    """The steps of a mechanism."""
    if isinstance(privatizer, DPFLames):
        return FLamesSteps(privatizer, cohort, examples, kernel, graphs)
    assert isinstance(privatizer, DPKGE)
    return DPKGESteps(privatizer, cohort, examples, kernel, graphs)


def public_pairs(privatizer: Published, graphs: Sequence[Graph]) -> list[np.ndarray] | None:
    """The (head, relation) that DP-FLames draws negatives from; None: it needs no list."""
    if not isinstance(privatizer, DPFLames) or privatizer.pairs == "random":
        return None
    found = [(graph.valid if privatizer.pairs == "validation" else graph.train).triples[:, :2] for graph in graphs]
    if any(not len(pairs) for pairs in found):
        raise TacitError('a party has no validation triples to take public pairs from: set privacy.pairs = "random"')
    return found


def scheduled(done: tuple[int, int], sizes: tuple[int, int], coins: Sequence[bool]) -> np.ndarray:
    """Which of the next batches are confidential, lines 4 to 9: the exact ratio decides, and a coin where it does not.

    done: confidential and unrestricted batches so far; sizes: triples of both kinds.
    """
    (conf, plain), (many, others), found = done, sizes, np.zeros(len(coins), bool)
    for step, coin in enumerate(coins):
        over = plain * many - others * conf
        if others == 0 or (conf == 0 and plain > 0) or (conf > 0 and over > 0):
            found[step] = True
        elif not (many == 0 or (plain == 0 and conf > 0) or (conf > 0 and over < 0)):
            found[step] = coin
        conf, plain = conf + int(found[step]), plain + int(not found[step])
    return found


def gathered(*rows: Tensor) -> tuple[Tensor, ...]:
    """Copies that a gradient goes back to."""
    return tuple(row.detach().requires_grad_() for row in rows)


def length(parts: Sequence[Tensor]) -> Tensor:
    """The norm over all of a sample's rows."""
    return torch.stack([torch.linalg.vector_norm(part, dim=-1) for part in parts]).square().sum(0).sqrt()


def cut(norm: Tensor, clip: Any, there: Tensor) -> Tensor:
    """What a sample of this norm is multiplied by; 0: it is absent, or not finite, and adds nothing."""
    factor = torch.where(norm > 0, (clip / norm).clamp(max=1.0), 1.0)
    return torch.where(there & norm.isfinite(), factor, 0.0)


def _marked(graph: Graph) -> np.ndarray:
    """Which triples are confidential; none of a graph without marks, which then trains as if there were no DPKGE."""
    if graph.train.confidential is None:
        LOG.warning("nothing in the graph is marked confidential: this is plain training (tacit data mark)")
        return np.zeros(len(graph.train), bool)
    return np.asarray(graph.train.confidential)
