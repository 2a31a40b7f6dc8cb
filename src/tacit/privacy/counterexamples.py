"""What is wrong with the published mechanisms, shown: what each paper claims, and what can be measured or computed.

Each flaw is a small function that anyone can run (`tacit flaws`). Numbers are exact where a distribution can be written
down, an accountant's where two accounts of the same release are compared, and lower bounds with 95% confidence where
many copies of a real step are looked at.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from tacit.graph import Graph, Split
from tacit.kernels.contract import Chunk, Clipped, Gradients, Objective
from tacit.kernels.reference import Reference
from tacit.losses import SelfAdversarial
from tacit.models import Layout, Tables
from tacit.models.translational import TransE
from tacit.privacy.accountant import by_renyi, epsilon
from tacit.privacy.audit import CANARY, KNOWN, graph_of, lower_bound
from tacit.privacy.events import Gaussian, Sampled, Segment
from tacit.privacy.pate import by_moments
from tacit.privacy.privatizers import DPKGE, DPFLames, Published
from tacit.privacy.selection import Selection
from tacit.settings import Settings
from tacit.training import Fit

Tensor = Any
DELTA = 1e-5


@dataclass(frozen=True)
class Flaw:
    """What a paper claims of a mechanism, and what is so."""

    number: int
    mechanism: str
    claim: str
    claimed: float
    found: float
    how: str

    @property
    def refuted(self) -> bool:
        return self.found > self.claimed


# -- DP-FLames' selection, exactly -------------------------------------------------------------------------------------


def selection_example(selection: Selection | None = None) -> tuple[Selection, list[list[float]], list[list[int]]]:
    """Gaps at k = 2, 3, 4 and the order of rows, without and with one triple more: of real TransE gradients.

    Entities a = (0, 0), b = (-50, 0), c = (50, 0) and five more at the origin; r1 = (0, 5), r2 = (0, 0); (a, r1, b) and
    (b, r1, a), and then (a, r2, c) as well.
    """
    selection = selection or Selection()
    scorer = TransE(norm=2, gamma=10.0)
    entity = torch.zeros(8, 2, dtype=torch.float64)
    entity[1, 0], entity[2, 0] = -50.0, 50.0
    relation = torch.tensor([[0.0, 5.0], [0.0, 0.0]], dtype=torch.float64)
    layout = Layout((8,), (2,), (0,))
    kernel = Reference(Objective(scorer, SelfAdversarial()), layout)
    gaps, orders = [], []
    for triples in ([(0, 0, 1), (1, 0, 0)], [(0, 0, 1), (1, 0, 0), (0, 1, 2)]):
        h, r, t = torch.tensor(triples).unbind(1)
        none, many = torch.zeros_like(h), len(h)
        far = torch.zeros(many, 1, 3, dtype=torch.int64)
        chunk = Chunk(
            h, r, t, none, none.bool(), torch.ones(many, dtype=torch.float64), torch.arange(many), triples=far
        )
        tables = Tables(entity, relation, ())
        into = Gradients(tables.like(torch.zeros_like))
        # The printed clip is of the entity matrix alone: the relation's part is all but left out of the norm.
        clip = torch.tensor([1.2], dtype=torch.float64)
        rule = Clipped(clip, row_clip=selection.row_clip, relation_scale=1e-12, part="positive")
        kernel.accumulate(tables, chunk, rule, into)
        norms, order = torch.linalg.vector_norm(into.tables.entity, dim=1).sort(descending=True, stable=True)
        gaps.append((norms[1:4] - norms[2:5]).tolist())
        orders.append(order.tolist())
    return selection, gaps, orders


def divergence(one: Tensor, other: Tensor, order: float) -> float:
    """The Renyi divergence of two distributions over the same few outcomes."""
    return float((one**order * other ** (1 - order)).sum().log() / (order - 1))


def noisy_gap() -> Flaw:
    """1: the Gumbel noise is for a gap that changes by C2."""
    selection, gaps, _ = selection_example()
    with_it, without = (selection.chances(torch.tensor(each)) for each in gaps)
    found = max(divergence(with_it, without, 2), divergence(without, with_it, 2))
    return Flaw(1, "DP-FLames, noisy gap", "Renyi divergence of order 2", 2 / (8 * selection.sigma_r**2), found,
                "exact, of TransE gradients of two triples and of three")  # fmt: skip


def release_by_test(delta_t: float = 1e-3) -> Flaw:
    """2: threshold and noise of the test are for a gap that changes by C2: rows are released that tell graphs apart."""
    selection, gaps, orders = selection_example(Selection(delta_t=delta_t))
    assert set(orders[0][:2]) != set(orders[1][:2])
    chance = float(selection.chances(torch.tensor(gaps[0]))[0]) * selection.passes(gaps[0][0])
    return Flaw(2, "DP-FLames, propose-test-release", "chance of what a neighbour cannot release", delta_t, chance,
                "exact, the same triples: the rows {a, b}")  # fmt: skip


def vacuous(delta_t: float = 1e-10) -> Flaw:
    """3: with k from B to 2B no gap is wide: the test all but never passes, so that nothing is learned."""
    return Flaw(3, "DP-FLames, k in [B, 2B]", "share of steps that release nothing", 0.0,
                1 - Selection(delta_t=delta_t).most_passes(),
                "exact, a lower bound for any batch of B triples")  # fmt: skip


def same_batch() -> Flaw:
    """4: selection and gradient see one batch, and are amplified as if each had one of its own."""
    apart = epsilon([Segment(Sampled(0.01, (1.0,)), 2000)], DELTA)
    together = epsilon([Segment(Sampled(0.01, (1.0, 1.0)), 1000)], DELTA)
    return Flaw(4, "DP-FLames, one batch counted as two", "epsilon of two sums with sigma 1, 1,000 steps", apart,
                together, "privacy loss distributions, rate 0.01")  # fmt: skip


# -- real steps, many copies -------------------------------------------------------------------------------------------


def example(there: bool) -> Graph:
    """The step audit's few triples, with its canary or without; and one that is public, of another relation."""
    graph = graph_of(there)
    names = graph.entities.id("a"), graph.relations.id("likes"), graph.entities.id("c")
    return replace(graph, valid=Split(np.array([names], np.int32)))


def fit_of(privatizer: Published, there: bool, copies: int, seed: int) -> Fit:
    """Copies that have all their triples in one batch, and plain gradient descent."""
    loss = "margin" if isinstance(privatizer, DPKGE) else "self-adversarial"
    settings = replace(Settings.make({
        "seed": seed, "scorer": {"name": "transe", "dim": 4, "gamma": 4.0}, "loss": {"name": loss},
        "negatives": {"count": 4}, "optimizer": {"name": "sgd", "learning_rate": 1.0},
        "training": {"batch": len(KNOWN) + 1, "device": "cpu"},
    }), privacy=privatizer)  # fmt: skip
    return Fit(settings, [example(there)] * copies)


def relation_moves(privatizer: Published, there: bool, copies: int, seed: int) -> np.ndarray:
    """Whether the canary's relation row moved in one step of each copy."""
    fit = fit_of(privatizer, there, copies, seed)
    before, relations = fit.cohort.tables.relation.clone(), len(fit.graphs[0].relations)
    fit.published.epoch(torch.ones(copies, dtype=torch.bool))
    moved = (fit.cohort.tables.relation != before).any(1).reshape(copies, relations)
    found: np.ndarray = moved[:, fit.graphs[0].relations.id(CANARY[1])].numpy()
    return found


def measured(privatizer: Published, runs: int) -> float:
    """A lower bound of one step's epsilon, by whether the canary's relation row moved."""
    inside, outside = (relation_moves(privatizer, there, runs, 7).astype(float) for there in (True, False))
    return lower_bound(inside, outside, DELTA, 0.975)  # two ways to guess


def relations_without_noise(runs: int = 2000) -> Flaw:
    """6: relation rows get the sum of the positives' gradients as it is."""
    return Flaw(6, "DP-FLames, relations", "epsilon of a step on all triples, sigma 1",
                epsilon([Segment(Gaussian(1.0))], DELTA),
                measured(DPFLames(mode="published", test=False), runs),
                f"{runs:,} real steps with a triple, and without: does its relation's row move?")  # fmt: skip


def followed_validation(triples: int = 1000) -> Flaw:
    """7: noise that follows private validation: one triple decides which noise there is, without any doubt."""
    before, after = 0.1, []
    for right in (0, 1):  # one more validation triple, ranked first, at the edge of what counts as better
        steps = fit_of(DPFLames(mode="published", follows="validation"), True, 1, 0).published
        steps.heard(0, before)
        steps.heard(0, ((before + steps.privatizer.least) * triples - 0.5 + right) / triples)
        after.append(float(steps.sigma[0]))
    return Flaw(7, "DP-FLames-Adp, private validation", "epsilon of a decision that costs nothing", 0.0,
                math.inf if after[0] != after[1] else 0.0,
                f"exact: sigma {after[0]:g} or {after[1]:g}, by one of {triples:,} validation triples")  # fmt: skip


def touched_rows(runs: int = 2000) -> Flaw:
    """8: noise goes only to rows of the batch."""
    return Flaw(8, "DPKGE, touched rows", "epsilon of a step on all triples, sigma 1",
                epsilon([Segment(Gaussian(1.0))], DELTA), measured(DPKGE(mode="published"), runs),
                f"{runs:,} real steps with a triple, and without: does its relation's row move?")  # fmt: skip


def clipped_apart(sigma: float = 0.7) -> Flaw:
    """9: a triple and its negative are clipped one by one, so that a triple moves the sum by 2 C."""
    rate, steps, delta = 695 / (483_142 / 2), 34_758, 1 / 483_142
    claimed, found = (by_renyi([Segment(Sampled(rate, (s,)), steps)], delta) for s in (sigma, sigma / 2))
    return Flaw(9, "DPKGE, clipped one by one", f"epsilon on FB15k, sigma {sigma:g}", claimed, found,
                "Renyi divergences, with the sensitivity C and with 2 C")  # fmt: skip


def clip_by_percentile() -> Flaw:
    """10: the clip is a percentile of the batch's own norms, and the noise a multiple of it: its size tells of them."""
    steps = fit_of(DPKGE(mode="published", percentile=100.0), True, 1, 0).published
    norms, there = torch.tensor([[0.5, 1.0, 50.0]]), torch.tensor([[True, True, False]])
    less, more = (float(steps.clip_of(norms, present)[0]) for present in (there, torch.ones_like(there)))
    return Flaw(10, "DPKGE, clip from the data", "factor by which one triple changes the noise", 1.0, more / less,
                "exact: norms 0.5 and 1, and then one of 50, at the 100th percentile")  # fmt: skip


def votes_undercounted(batches: int = 29, batch: int = 32) -> Flaw:
    """11: a batch of labels is charged as one vote; and rows are sent as WX, which no vote protects at all."""
    claimed, found = (by_moments(votes, 0.05, DELTA)[0] for votes in (batches, batches * batch))
    return Flaw(11, "FKGE, noisy votes", "epsilon by the paper's moments", claimed, found,
                f"its own accounting of {batches} batches, once with each of their {batch} labels")  # fmt: skip


def added_by_epoch() -> Flaw:
    """13: epsilons of epochs added up: valid, and so loose that a budget is gone before it is used."""
    each, whole = (account([Segment(Sampled(0.01, (1.0,)), steps)], DELTA)
                   for account, steps in ((by_renyi, 100), (epsilon, 10_000)))  # fmt: skip
    return Flaw(13, "ledger of Hoang et al., epsilons added up", "epsilon of 100 epochs, by the best account", whole,
                100 * each, "an epoch by Renyi divergences, 100 times, and all of it at once")  # fmt: skip


FLAWS: tuple[Callable[[], Flaw], ...] = (
    noisy_gap,
    release_by_test,
    vacuous,
    same_batch,
    relations_without_noise,
    followed_validation,
    touched_rows,
    clipped_apart,
    clip_by_percentile,
    votes_undercounted,
    added_by_epoch,
)
"""Of the 13 of `docs/published.md`; the others are arguments, and stand there."""


def flaws() -> Iterator[Flaw]:
    """Each shown, one after the other."""
    for show in FLAWS:
        yield show()
