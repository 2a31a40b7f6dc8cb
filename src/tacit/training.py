"""Training: epochs over all parties at once, validation, early stopping that gives back the best.

`Fit` is the state of a training that parties do each by itself (one party, or several that never meet); federations
drive `Fit.epoch` round by round. Everything it needs to go on is in `state`, and every draw is a function of counters
that are part of it, so that a resumed training ends exactly where an uninterrupted one does; on a CPU, with the same
number of threads. On a GPU sums are made in no fixed order, and two runs may differ in the last digits.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tacit.cohort import Cohort
from tacit.errors import BadInput, TacitError, excerpt
from tacit.evaluation.ranking import NO_METRICS, Metrics, Questions, rank
from tacit.examples import Examples
from tacit.graph import Graph, SplitName
from tacit.kernels import Objective, Plain, kernel_for
from tacit.losses import KVsAll
from tacit.models import Layout, Tables
from tacit.models.model import Model
from tacit.models.scorer import matrix_products
from tacit.models.tables import Prior, relation_weights
from tacit.privacy.privatizers import Published, Sound
from tacit.settings import Settings

LOG = logging.getLogger(__name__)
Tensor = Any
Event = dict[str, Any]
LOOK = 64
"""Losses are looked at every so many steps: looking makes a GPU wait."""


class Diverged(TacitError):
    """The loss, or a row, is not a number any more."""

    def __init__(self, what: str, step: int, epoch: int, settings: Settings):
        self.step, self.epoch = step, epoch
        rate = settings.optimizer.learning_rate
        super().__init__(
            f"{what} at step {step:,} (epoch {epoch:,}). The usual cause is a learning rate that is too high: it is "
            f"{rate:g}, try {rate / 10:g}. Rows that begin too large (scorer.init_scale), or a product scorer "
            "without a regulariser, do the same."
        )


@dataclass(frozen=True)
class EpochReport:
    """What an epoch did: each party's mean loss (NaN: it rested); steps, examples and seconds of all of them."""

    loss: tuple[float, ...]
    steps: int
    examples: int
    seconds: float


class Fit:
    """A training of one party, or of several at once that do not meet.

    Parameters
    ----------
    graphs
        One per party.
    numbers
        Each party's number in every draw; a party alone and the same party in a cohort have the same.
    tables
        Rows to begin with; default: drawn.
    kernel, device
        Other than the settings'.
    weights
        Relation weights for a scorer that needs statistics; default: from the parties' own training triples.
    ledger
        What noise that follows a signal is charged to (`tacit.privacy.schedule.Ledger`).
    """

    def __init__(
        self,
        settings: Settings,
        graphs: Sequence[Graph],
        *,
        numbers: Sequence[int] | None = None,
        tables: Tables | None = None,
        prior: Prior | None = None,
        weights: Sequence[Tensor] | None = None,
        pairs: Sequence[np.ndarray] | None = None,
        kernel: str | None = None,
        device: str | None = None,
        ledger: Any = None,
    ):
        for graph in graphs:
            if not len(graph.train):
                raise TacitError("there is nothing to train on: a graph has no training triples")
        self.settings, self.graphs = settings, tuple(graphs)
        self.device = torch.device(device or chosen_device(settings.training.device))
        twice = 2 if settings.training.reciprocal else 1
        self.layout = Layout(
            tuple(len(graph.entities) for graph in graphs),
            tuple(twice * len(graph.relations) for graph in graphs),
            tuple(numbers or range(len(graphs))),
        )
        scorer, dim = settings.scorer, settings.dim
        if tables is None:
            if scorer.statistics and weights is None:
                weights = [relation_weights(graph).repeat(twice) for graph in graphs]
            # Logarithms and cosines, of which normal values are made, round in another way on a GPU.
            there = str(self.device) if self.device.type == "cuda" and scorer.init == "uniform" else None
            tables = Tables.begin(scorer, dim, self.layout, seed=settings.seed, weights=weights, device=there)
        tables = tables.like(lambda tensor: tensor.to(self.device))
        prior = self.prior = None if prior is None else prior.to(self.device)
        memories = getattr(settings.privacy, "optimizers", 1)
        self.cohort = Cohort(scorer, tables, self.layout, settings.optimizer, memories)
        objective = Objective(scorer, settings.loss, settings.regulariser, prior)
        self.kernel = kernel_for(kernel or settings.training.kernel, self.device)(objective, self.layout)
        if isinstance(settings.privacy, Published):
            from tacit.privacy.published_steps import public_pairs, published_steps

            pairs = public_pairs(settings.privacy, graphs)
        self.examples = Examples(
            graphs,
            self.layout,
            settings.training,
            settings.negatives,
            seed=settings.seed,
            queries=isinstance(settings.loss, KVsAll),
            pairs=pairs,
            widths=scorer.widths(dim),
            device=self.device,
        )
        self.epochs: Any = None
        self.total_epochs: int | None = None
        """Over how many the learning rate falls, where it does; default: the settings' epochs."""
        self._prepared = False
        self._asked: dict[tuple[int, str], Questions] = {}
        self.best = tables.like(torch.clone)
        parties = len(graphs)
        self.best_mrr, self.best_epoch = np.full(parties, -np.inf), np.zeros(parties, np.int64)
        self.waited, self.finished = np.zeros(parties, np.int64), np.zeros(parties, bool)
        self.private: Any = None
        self.schedule: Any = None
        self.published: Any = None
        if isinstance(settings.privacy, Published):
            self.published = published_steps(settings.privacy, self.cohort, self.examples, self.kernel, self.graphs)
        if isinstance(settings.privacy, Sound):
            from tacit.privacy.steps import PrivateSteps

            self.private = PrivateSteps(settings.privacy, self.cohort, self.kernel, self.examples, graphs)
            if settings.privacy.adaptive:
                from tacit.privacy.schedule import Schedule

                if ledger is None or len(graphs) != 1:
                    raise TacitError("noise that follows a signal is for one party, whose run keeps a ledger of it")
                self.schedule = Schedule(self.private, self.graphs[0], ledger, settings)

    def prepare(self) -> float:
        """Compile what has to be compiled, if that was not done yet; seconds. A first epoch does it too.

        Whole epochs are done by fused kernels, where they cover this training.
        """
        if self._prepared:
            return 0.0
        began = time.perf_counter()
        kind = getattr(self.kernel, "epochs", lambda: None)()
        own = self.private is None and self.published is None
        if kind is not None and own and kind.fits(self.cohort, self.examples, self.kernel):
            self.epochs = kind(self.cohort, self.examples, self.kernel)
        self._prepared = True
        seconds = time.perf_counter() - began
        LOG.info("the %s kernels were ready after %.1f s", self.kernel_name, seconds)
        return seconds

    @property
    def kernel_name(self) -> str:
        """Of the kernel that trains these settings, where the one that was asked for leaves them to another."""
        return getattr(self.kernel, "name", type(self.kernel).__name__.lower())

    # -- moving -------------------------------------------------------------------------------------------------------

    def epoch(self, active: np.ndarray | None = None) -> EpochReport:
        """Every active party goes once through its triples, or until it has no steps left."""
        self.prepare()
        with matrix_products(self.settings.training.products):
            return self._epoch(active)

    def _epoch(self, active: np.ndarray | None) -> EpochReport:
        cohort, began = self.cohort, time.perf_counter()
        wanted = torch.from_numpy(~self.finished if active is None else active).to(self.device)
        limit = self.settings.training.steps
        most = None if limit is None else torch.full_like(cohort.steps, limit)
        total = torch.zeros(len(self.layout), dtype=torch.float64, device=self.device)
        count, losses, steps = torch.zeros_like(total), [], 0
        first = cohort.steps.clone()
        cohort.pace.copy_(torch.from_numpy(self.settings.training.pace(cohort.epochs.cpu().numpy(), self.total_epochs)))
        if self.private is not None:
            return self._private_epoch(wanted.cpu().numpy(), began)
        if self.published is not None:
            wanted &= torch.from_numpy(~self.spent()).to(self.device)
            total, count, steps = self.published.epoch(wanted)
            cohort.epochs += wanted
            self._look(total.sum()[None], steps, first)
            return EpochReport(tuple((total / count).tolist()), steps, int(count.sum()), time.perf_counter() - began)
        if self.epochs is not None:
            sums, taken, examples_seen = self.epochs.run(wanted, most)
            total, count, steps = sums.double().sum(0), examples_seen.double(), int(taken.max())
            self._look(sums.sum(1), steps, first)
            cohort.epochs += wanted
            mean = (total / count).tolist()
            return EpochReport(tuple(mean), steps, int(count.sum()), time.perf_counter() - began)
        for step in self.examples.epoch(cohort.epochs, cohort.steps, wanted, most):
            loss, _ = self.kernel.accumulate(cohort.tables, step.chunk, Plain(), cohort.gradients)
            cohort.finish(step.divisor, step.active)
            total.index_add_(0, step.chunk.party, loss.double())
            count.index_add_(0, step.chunk.party, torch.ones_like(loss, dtype=torch.float64))
            losses.append(loss.sum())
            steps += 1
            if len(losses) == LOOK:
                self._look(torch.stack(losses), steps, first)
                losses.clear()
        if losses:
            self._look(torch.stack(losses), steps, first)
        cohort.epochs += wanted
        mean = (total / count).tolist()
        examples = int(count.sum())
        return EpochReport(tuple(mean), steps, examples, time.perf_counter() - began)

    def _private_epoch(self, wanted: np.ndarray, began: float) -> EpochReport:
        """As many steps as everybody may know an epoch to have; a step without examples is one too."""
        cohort, private, limit = self.cohort, self.private, self.settings.training.steps
        if self.schedule is not None:
            self.schedule.check_paid()
        private.begin(self.settings.dim, self.total_epochs or self.settings.training.epochs, limit)
        total, count = torch.zeros(2, len(self.layout), dtype=torch.float64, device=self.device)
        number = 0
        while True:
            active = wanted & (number < np.array(private.per_epoch))
            if limit is not None:
                active &= cohort.steps.cpu().numpy() < limit
            if not active.any():
                break
            loss, many = private.step(active)
            total, count, number = total + loss, count + many, number + 1
        # A unit whose loss is not finite adds nothing; to stop for it would tell of it. Rows are looked at, as always.
        cohort.epochs += torch.from_numpy(wanted).to(self.device)
        mean = (total / count).tolist()
        return EpochReport(tuple(mean), number, int(count.sum()), time.perf_counter() - began)

    def _look(self, losses: Tensor, steps: int, first: Tensor) -> None:
        """Stop at the first loss that is not finite."""
        finite = losses.isfinite()
        if not bool(finite.all()):
            at = int(first.max()) + steps - len(finite) + finite.tolist().index(False) + 1
            raise Diverged("the loss is not finite", at, int(self.cohort.epochs.max()) + 1, self.settings)

    def check_rows(self) -> None:
        """Refuse to go on, and to be saved, with rows that are not finite."""
        for name, tensor in self.cohort.tables.tensors().items():
            if not bool(tensor.isfinite().all()):
                epochs, steps = int(self.cohort.epochs.max()), int(self.cohort.steps.max())
                raise Diverged(f"the {name} table holds values that are not finite", steps, epochs, self.settings)

    # -- looking ------------------------------------------------------------------------------------------------------

    def model(self, party: int = 0, *, best: bool = True) -> Model:
        """A party's model as it is, or as it was when validation was best."""
        tables = (self.best if best else self.cohort.tables).party(self.layout, party)
        prior = self.prior
        if prior is not None:
            rows, columns = self.layout.rows("relation", party), self.layout.entities[party]
            prior = Prior(prior.tails[rows, :columns], prior.heads[rows, :columns], prior.scale)
        return Model(self.settings.scorer, tables, prior, self.settings.training.reciprocal)

    def evaluate(self, split: SplitName, *, best: bool = True) -> list[Metrics]:
        """Each party's link prediction among its own entities; a party without such triples has a count of 0."""
        return [self._evaluated(party, split, best=best) for party in range(len(self.graphs))]

    def _evaluated(self, party: int, split: SplitName, *, best: bool) -> Metrics:
        """The index of true answers is made once for a party and a split, and kept."""
        place = (party, split)
        if place not in self._asked:
            graph = self.graphs[party]
            self._asked[place] = Questions(graph.splits[split].triples, graph.statements.triples)
        wanted = self.settings.evaluation
        ranks = rank(self.model(party, best=best), self._asked[place], sides=wanted.sides, memory_mb=wanted.memory_mb)
        return ranks.metrics(wanted.ties)

    def validate(self, which: np.ndarray | None = None) -> list[Metrics]:
        """Rank the validation triples; keep what is better than ever before, and stop who has waited long enough.

        `which` parties: default, all that have not finished. The others have no ranks. Without validation triples the
        latest is the best.
        """
        epochs, found = self.cohort.epochs.cpu().numpy(), [NO_METRICS] * len(self.graphs)
        for party in np.flatnonzero(~self.finished if which is None else which & ~self.finished).tolist():
            metrics = self._evaluated(party, "valid", best=False)
            found[party] = metrics
            self.heard(party, metrics)
            # Under privacy the last is kept: which one was best on validation would tell of the validation triples.
            if self.private is None and metrics.count and not metrics.mrr > self.best_mrr[party]:
                self.waited[party] += 1
                self.finished[party] = self.waited[party] >= self.settings.evaluation.patience
                continue
            self.waited[party], self.best_epoch[party] = 0, epochs[party]
            self.best_mrr[party] = metrics.mrr if metrics.count else -np.inf
            now, kept = (t.party(self.layout, party) for t in (self.cohort.tables, self.best))
            for name, tensor in kept.tensors().items():
                tensor.copy_(now.tensors()[name])
        return found

    def heard(self, party: int, metrics: Metrics) -> None:
        """Validation of a party: a published mechanism may let its noise follow it."""
        if self.published is not None and metrics.count:
            self.published.heard(party, metrics.mrr)

    def spent(self) -> np.ndarray:
        """(parties,): whose epsilon, by a paper's own accounting, does not allow another epoch."""
        return np.array([self.published is not None and self.published.spent(n) for n in range(len(self.graphs))])

    def by_the_paper(self) -> Event:
        """What a published mechanism has cost each party by its paper's accounting, which is no claim."""
        if self.published is None:
            return {}
        return {"published_accounting": [self.published.accounted(party) for party in range(len(self.graphs))]}

    def run(self, on_event: Callable[[Event], None], checkpoint: Callable[[], None] | None = None) -> None:
        """Train until every party has had its epochs or steps, or validation has not improved for long enough."""
        training, evaluation = self.settings.training, self.settings.evaluation
        save_every = training.checkpoint_every or evaluation.every
        on_event({"event": "kernels", "name": self.kernel_name, "seconds": None})
        on_event({"event": "kernels", "name": self.kernel_name, "seconds": self.prepare()})
        self._pay_to_go_on(checkpoint)
        while not self.finished.all():
            report = self.epoch()
            number, steps = int(self.cohort.epochs.max()), self.cohort.steps.cpu().numpy()
            on_event({"event": "epoch", "epoch": number, "loss": listed(report.loss), "steps": int(steps.max()),
                      "examples": report.examples, **self.by_the_paper(),
                      "seconds": round(report.seconds, 4)})  # fmt: skip
            done = self.cohort.epochs.cpu().numpy() >= training.epochs
            if training.steps is not None:
                done |= steps >= training.steps
            done |= self.spent()
            if self.schedule is not None and not done.all():
                if number % evaluation.every == 0:
                    self.check_rows()
                    on_event({"event": "signal", "epoch": number} | self.schedule.look(self.model(best=False)))
                done |= not self.schedule.pays()
            # As each would alone: all at their validations, and whoever ends here at its end.
            due = (self.cohort.epochs.cpu().numpy() % evaluation.every == 0) | done
            if (due & ~self.finished).any():
                self.check_rows()
                began = time.perf_counter()
                found = self.validate(due)
                seconds = round(time.perf_counter() - began, 4)
                on_event({"event": "validation", "epoch": number, "mrr": listed([m.mrr for m in found]),
                          "hits10": listed([m.hits10 for m in found]), "best": listed(self.best_mrr.tolist()),
                          "best_epoch": self.best_epoch.tolist(), "seconds": seconds})  # fmt: skip
            self.finished |= done
            if checkpoint is not None and (number % save_every == 0 or self.finished.all()):
                self.check_rows()
                checkpoint()

    def _pay_to_go_on(self, checkpoint: Callable[[], None] | None) -> None:
        """Charge the first epoch to the cap, where there is one; end here if that does not allow it any more."""
        if self.schedule is None or self.finished.all() or self.schedule.pays():
            return
        if not int(self.cohort.epochs.max()):
            from tacit.privacy.schedule import USED_UP

            raise TacitError(USED_UP)
        self.validate()
        self.finished[:] = True
        if checkpoint is not None:
            checkpoint()

    # -- saving -------------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """Everything a resumed training needs."""
        kept = {f"best.{name}": tensor for name, tensor in self.best.tensors().items()}
        early = {"best_mrr": self.best_mrr, "best_epoch": self.best_epoch, "waited": self.waited}
        early |= {"finished": self.finished}
        if self.private is not None and self.private.mask is not None:
            kept["private.mask"] = self.private.mask
        if self.schedule is not None:
            kept |= self.schedule.state()
        if self.published is not None:
            kept |= self.published.state()
        return self.cohort.state() | kept | {name: torch.from_numpy(array.copy()) for name, array in early.items()}

    def load(self, state: dict[str, Tensor]) -> None:
        """Go on from a `state` of a training with the same settings and graphs."""
        for name, tensor in self.state().items():
            if name not in state or state[name].shape != tensor.shape or state[name].dtype != tensor.dtype:
                raise BadInput(f"the state has no {name!r} that fits this training.")
        self.cohort.load(state)
        if self.private is not None:
            self.private.new_key()
            self.private.mask = state["private.mask"].to(self.device) if "private.mask" in state else None
        if self.schedule is not None:
            self.schedule.load(state)
        if self.published is not None:
            self.published.load(state)
        for name, tensor in self.best.tensors().items():
            tensor.copy_(state[f"best.{name}"])
        for name in ("best_mrr", "best_epoch", "waited", "finished"):
            setattr(self, name, state[name].numpy().copy())


def evaluated(model: Model, graph: Graph, split: SplitName, settings: Settings) -> Metrics:
    """Link prediction on a split, by the settings' sides and ties, filtered against all splits."""
    wanted = settings.evaluation
    triples, known = graph.splits[split].triples, graph.statements.triples
    ranks = rank(model, triples, known, sides=wanted.sides, memory_mb=wanted.memory_mb)
    return ranks.metrics(wanted.ties)


def chosen_device(name: str) -> str:
    """The device that `auto` means here; one that is asked for and not there is an error."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    match = re.fullmatch(r"cpu|cuda(:(?P<number>[0-9]{1,3}))?", name)
    if match is None:
        raise TacitError(f"the device is cpu, cuda, cuda:0 (and so on) or auto, not {excerpt(name)}")
    if name != "cpu" and torch.cuda.device_count() <= int(match["number"] or 0):
        raise TacitError("there is no GPU of that number that torch can use: set training.device to cpu or auto")
    return name


def listed(values: Any) -> list[float | None]:
    """JSON has no NaN and no infinity."""
    return [float(value) if np.isfinite(value) else None for value in values]
