"""The step audit: does a mechanism keep what its event claims, against an adversary who knows everything but one bit?

Rows, triples, public draws and settings are known; unknown is whether one more triple, the canary, is there, and the
noise. One or two real steps of many copies at once are taken with and without it, all triples drawn, and the adversary
looks at what was released in several ways: along what the canary would add, to all rows and to each kind of them alone,
and at what stands still, how long it is, and whether two steps are alike. Each way gives a lower bound of epsilon that
holds with confidence (half of the copies choose a threshold, the other half count). A bound above the claim is a fault
of the mechanism or its code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from tacit.draws import Secret
from tacit.graph import Graph, Split, Vocab
from tacit.kernels.contract import Gradients
from tacit.models import Tables
from tacit.privacy.accountant import epsilon
from tacit.privacy.bounds import best_threshold, epsilon_from_counts
from tacit.privacy.marginals import Marginals as Counts
from tacit.privacy.privatizers import Confidential, Marginals, RepairedFLames, Sound
from tacit.privacy.steps import PrivateSteps
from tacit.settings import Settings
from tacit.training import Fit

Tensor = Any
KNOWN = [("a", "likes", "b"), ("b", "likes", "c"), ("c", "knows", "a")]
CANARY = ("x", "trusts", "y")
OTHERS = tuple("defghijklm")
AT_ONCE, STEPS, POOL = 500, 2, 8
ROUNDING = 1e-5
"""What is smaller was not released."""
CLIP = 0.05
"""Far below the norm of any gradient here, so that every unit weighs as much as it may."""


@dataclass(frozen=True)
class StepAudit:
    """What was claimed for these steps, and what each way of looking proves at least."""

    claimed: float
    measured: dict[str, float]
    runs: int
    delta: float
    confidence: float

    @property
    def lower_bound(self) -> float:
        return max(self.measured.values())

    @property
    def violated(self) -> bool:
        return self.lower_bound > self.claimed


def audit_step(
    privatizer: Sound,
    *,
    runs: int = 10_000,
    delta: float = 1e-5,
    confidence: float = 0.95,
    kind: Callable[..., PrivateSteps] = PrivateSteps,
    seed: int = 0,
) -> StepAudit:
    """Take steps with and without the canary, `runs` copies of each. `kind`: the code that is looked at."""
    privatizer = replace(privatizer, size=len(KNOWN), clip=CLIP)
    if isinstance(privatizer, Confidential):
        privatizer = replace(privatizer, public_ratio=0.0)
    claimed = epsilon(privatizer.whole(1.0, STEPS if privatizer.trains else 0), delta)
    look = _counts if isinstance(privatizer, Marginals) else _steps
    worlds: dict[bool, list[dict[str, np.ndarray]]] = {True: [], False: []}
    for first in range(0, runs, AT_ONCE):
        many = min(AT_ONCE, runs - first)
        for there in (True, False):
            worlds[there].append(look(privatizer, many, there, kind, seed + first))
    ways = list(worlds[True][0])
    measured = {}
    for way in ways:
        inside, outside = (np.concatenate([found[way] for found in worlds[there]]) for there in (True, False))
        measured[way] = lower_bound(inside, outside, delta, 1 - (1 - confidence) / (2 * len(ways)))
    return StepAudit(claimed, measured, runs, delta, confidence)


def lower_bound(inside: np.ndarray, outside: np.ndarray, delta: float, confidence: float) -> float:
    """The better of guessing that high scores, or that low ones, have the canary."""
    found = [best_threshold(sign * inside, sign * outside, delta=delta) for sign in (1.0, -1.0)]
    return max(
        epsilon_from_counts(t.true_positives, t.positives, t.false_positives, t.negatives, delta=delta,
                            confidence=confidence)
        for t in found
    )  # fmt: skip


def graph_of(there: bool) -> Graph:
    """The known triples, with the canary or without, over the same names; all of them marked confidential."""
    triples = [*KNOWN, CANARY] if there else KNOWN
    entities = Vocab([*OTHERS, *(name for h, _, t in [*KNOWN, CANARY] for name in (h, t))])
    relations = Vocab(r for _, r, _ in [*KNOWN, CANARY])
    ids = sorted((entities.id(h), relations.id(r), entities.id(t)) for h, r, t in triples)
    none = Split(np.zeros((0, 3), np.int32))
    return Graph(entities, relations, Split(np.array(ids, np.int32), np.ones(len(ids), bool)), none, none)


def _counts(privatizer: Sound, many: int, there: bool, kind: object, seed: int) -> dict[str, np.ndarray]:
    """Noisy counts: the canary's two cells."""
    graph = graph_of(there)
    h, r, t = graph.entities.id(CANARY[0]), graph.relations.id(CANARY[1]), graph.entities.id(CANARY[2])
    assert privatizer.sigma is not None
    found = []
    for _ in range(many):
        counts = Counts.release(graph, privatizer.sigma, Secret.fresh())
        found.append(float(counts.heads[r, h] + counts.tails[r, t]))
    return {"projection": np.array(found)}


def _steps(privatizer: Sound, many: int, there: bool, kind: Any, seed: int) -> dict[str, np.ndarray]:
    """Two steps of plain gradient descent, from which what was added up can be read off."""
    drawn = "random-triples" if isinstance(privatizer, RepairedFLames) else "pool"
    settings = Settings.make({
        "seed": seed, "scorer": {"name": "transe", "dim": 4, "gamma": 4.0}, "loss": {"name": "logistic"},
        "negatives": {"name": drawn, "count": POOL, "scope": "vocabulary"},
        "optimizer": {"name": "sgd", "learning_rate": 1.0}, "training": {"batch": len(KNOWN), "device": "cpu"},
    })  # fmt: skip
    settings = replace(settings, privacy=privatizer)
    fit = Fit(settings, [graph_of(there)] * many)
    fit.private = private = kind(privatizer, fit.cohort, fit.kernel, fit.examples, fit.graphs)
    _alike(fit)
    private.begin(settings.dim, STEPS, STEPS)
    other = Fit(settings, [graph_of(True)] * many)  # in which the canary can be asked for
    h, r, t = graph_of(True).train.triples[_place()].tolist()
    entities, width = len(fit.graphs[0].entities), settings.dim
    own = [slice(row * width, (row + 1) * width) for row in (h, t, entities + r)]
    relations, blocks = slice(entities * width, None), _blocks(own, _flat(fit, fit.cohort.tables).shape[1])
    residuals, directions, still = [], [], []
    active = np.ones(many, bool)
    for _ in range(STEPS):
        _copy(fit, other)
        before = fit.cohort.tables.like(torch.clone)
        reader = kind(privatizer, other.cohort, other.kernel, other.examples, other.graphs)
        known, canary = _sums(other, reader, private)
        private.step(active)
        released = private.batch[0] * (_flat(fit, before) - _flat(fit, fit.cohort.tables)) - _public(other, reader)
        released[:, relations] *= reader.rule().relation_scale  # as the sums were when they got their noise
        still.append(torch.stack([(released[:, place] == 0).all(1) for place in own], 1).sum(1))
        residuals.append(torch.where(released.abs() > ROUNDING, released - _flat(fit, known), 0.0))
        directions.append(_flat(fit, canary))
    left, toward = torch.cat(residuals, 1).double(), torch.cat(directions, 1).double()
    return {
        **{way: _along(left, toward * block.repeat(STEPS)) for way, block in blocks.items()},
        "rows that stand still": torch.stack(still, 1).sum(1).double().numpy(),
        "length": left.norm(dim=1).numpy(),
        "two steps alike": (residuals[0] - residuals[1]).norm(dim=1).double().numpy(),
    }


def _blocks(own: Sequence[slice], numbers: int) -> dict[str, Tensor]:
    """Which numbers of a copy each projection is of. One over all of them sees little of a block whose noise is too
    small: the noise of the others drowns it.
    """
    whole = torch.ones(numbers, dtype=torch.float64)
    head, tail, relation = (torch.zeros_like(whole) for _ in own)
    for mask, place in zip((head, tail, relation), own, strict=True):
        mask[place] = 1.0
    return {
        "projection": whole,
        "projection on its entities": head + tail,
        "projection on its relation": relation,
        "projection on negatives": whole - head - tail - relation,
    }


def _along(left: Tensor, toward: Tensor) -> np.ndarray:
    """(copies,): how far each goes in its direction."""
    found: np.ndarray = ((left * toward).sum(1) / toward.norm(dim=1).clamp(min=1e-12)).numpy()
    return found


def _place() -> int:
    """Where the canary stands among the triples."""
    whole = graph_of(True)
    return int(np.flatnonzero(whole.train.triples[:, 1] == whole.relations.id(CANARY[1]))[0])


def _alike(fit: Fit) -> None:
    """Every copy begins with the same rows."""
    many = len(fit.graphs)
    for tensor in fit.cohort.tables.tensors().values():
        tensor.copy_(tensor[: len(tensor) // many].repeat(many, *[1] * (tensor.dim() - 1)))


def _copy(fit: Fit, other: Fit) -> None:
    """The same rows and counts of steps."""
    for name, tensor in other.cohort.tables.tensors().items():
        tensor.copy_(fit.cohort.tables.tensors()[name])
    other.cohort.steps.copy_(fit.cohort.steps)


def _sums(other: Fit, reader: PrivateSteps, private: PrivateSteps) -> tuple[Tables, Tables]:
    """What the known triples add up to without noise, and what the canary would add: by the mechanism's own code."""
    place, made = _place(), []
    reader.mask = private.mask
    starts = torch.from_numpy(other.examples.start[:-1])
    others = torch.cat([starts + i for i in range(len(KNOWN) + 1) if i != place]).sort().values
    for rows in (others, starts + place):
        gradients = Gradients(other.cohort.tables.like(torch.zeros_like))
        party = torch.searchsorted(torch.from_numpy(other.examples.start[1:]), rows, right=True)
        slot = reader._slots(rows, party)
        chunk = other.examples.step(rows, party, slot, other.cohort.steps).chunk
        reader.kernel.accumulate(other.cohort.tables, chunk, reader.rule(), gradients)
        made.append(gradients.tables)
    return made[0], made[1]


def _public(other: Fit, reader: PrivateSteps) -> Tensor:
    """What a step adds of public draws, which everybody can take off again."""
    gradients = other.cohort.gradients
    if reader.negatives is None:
        return torch.zeros(())
    reader.negatives.add(torch.ones(len(other.graphs), dtype=torch.bool))
    found = _flat(other, gradients.tables).clone()
    gradients.empty()
    return found


def _flat(fit: Fit, tables: Tables) -> Tensor:
    """(copies, numbers): all of each copy's numbers."""
    many = len(fit.graphs)
    return torch.cat([t.reshape(many, -1) for t in tables.tensors().values()], 1)
