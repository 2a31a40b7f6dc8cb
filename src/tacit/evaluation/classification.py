"""Telling true triples from corrupted ones, and entities' classes from their rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tacit.draws import Purpose, Stream, below
from tacit.errors import BadValue
from tacit.graph import Graph, SplitName, triple_keys
from tacit.models.model import Model

Tensor = Any
ATTEMPTS = 64


@dataclass(frozen=True)
class TripleClassification:
    """accuracy: share of true and corrupted test triples told apart. thresholds: by relation, else `elsewhere`."""

    accuracy: float
    thresholds: Mapping[int, float]
    elsewhere: float
    count: int


def corrupted(graph: Graph, split: SplitName, *, seed: int = 0, sides: str = "both") -> npt.NDArray[np.int64]:
    """One corrupted triple for each of the split: head or tail replaced, and no fact of any split."""
    if sides not in ("tails", "heads", "both"):
        raise BadValue(f"sides is tails, heads or both; not {sides!r}")
    triples = graph.splits[split].triples.astype(np.int64)
    sizes = len(graph.entities), len(graph.relations)
    facts = triple_keys(graph.statements.triples, *sizes)
    false = triples.copy()
    stream = Stream(seed, Purpose.CORRUPT, party={"train": 0, "valid": 1, "test": 2}[split])
    bad = np.ones(len(triples), bool)
    for attempt in range(ATTEMPTS):
        words = stream.at(step=attempt).words(2 * len(triples)).reshape(-1, 2)
        heads = (words[:, 0] & 1 == 1) if sides == "both" else np.full(len(triples), sides == "heads")
        entity = below(words[:, 1], sizes[0])
        made = np.where(np.stack([heads, heads & False, ~heads], 1), entity[:, None], triples)
        false[bad] = made[bad]
        bad = np.isin(triple_keys(false.astype(np.int32), *sizes), facts)
        if not bad.any():
            return false
    entities, coins = np.arange(sizes[0]), stream.at(step=ATTEMPTS).uniform(len(triples))
    for row in np.flatnonzero(bad).tolist():  # nearly everything is a fact: look at all that could be
        free = []
        for column in [c for c, side in ((0, "heads"), (2, "tails")) if sides in (side, "both")]:
            other = np.repeat(triples[[row]], sizes[0], axis=0)
            other[:, column] = entities
            free.append(other[~np.isin(triple_keys(other.astype(np.int32), *sizes), facts)])
        choice = np.concatenate(free)
        if not len(choice):
            raise BadValue(f"a triple of {split} has no corruption that is not a fact itself")
        false[row] = choice[int(coins[row] * len(choice))]
    return false


def classify_triples(model: Model, graph: Graph, *, seed: int = 0) -> TripleClassification:
    """One corrupted triple per test triple, a threshold per relation from validation, accuracy on test.

    Socher et al.: "NTN", NIPS 2013; FKGE reports it. A relation without validation triples uses one threshold for all.
    """
    if not len(graph.valid) or not len(graph.test):
        raise BadValue("triple classification needs validation triples for thresholds, and test triples")
    relation, scores, truth = _scored(model, graph, "valid", seed)
    elsewhere = threshold(scores, truth)
    thresholds = {int(r): threshold(scores[relation == r], truth[relation == r]) for r in np.unique(relation)}
    relation, scores, truth = _scored(model, graph, "test", seed)
    bar = np.array([thresholds.get(int(r), elsewhere) for r in relation])
    return TripleClassification(float(((scores >= bar) == truth).mean()), thresholds, elsewhere, len(truth))


def told_apart(model: Model, graph: Graph, split: SplitName, *, seed: int = 0) -> float:
    """The share of true and corrupted triples of a split that one threshold of its own tells apart, at best.

    For choosing between models: no threshold per relation, which would fit what it is judged by.
    """
    _, scores, truth = _scored(model, graph, split, seed)
    return float(((scores >= threshold(scores, truth)) == truth).mean())


def _scored(model: Model, graph: Graph, split: SplitName, seed: int) -> tuple[Any, Any, Any]:
    """Relations, scores and truth of a split's triples and of as many corrupted ones."""
    rows = np.concatenate([graph.splits[split].triples.astype(np.int64), corrupted(graph, split, seed=seed)])
    ids = torch.from_numpy(rows).to(model.tables.entity.device)
    with torch.no_grad():
        scores = model.score(*ids.unbind(1)).double().cpu().numpy()
    return rows[:, 1], scores, np.arange(len(rows)) < len(rows) // 2


def threshold(scores: npt.NDArray[np.float64], truth: npt.NDArray[np.bool_]) -> float:
    """The score from which on to say true, right most often; midway between scores, and the lowest of equally good."""
    values = np.unique(scores)
    cuts = np.concatenate([[-np.inf], (values[1:] + values[:-1]) / 2, [np.inf]])
    order = np.sort(scores[truth]), np.sort(scores[~truth])
    right = len(order[0]) - np.searchsorted(order[0], cuts) + np.searchsorted(order[1], cuts)
    return float(cuts[right.argmax()])


@dataclass(frozen=True)
class ProbeScores:
    """accuracy and macro_f1 of a linear probe on held-out entities; majority: of always the commonest class."""

    accuracy: float
    macro_f1: float
    majority: float
    classes: int
    count: int


def classify_entities(
    rows: Tensor, labels: npt.NDArray[np.int64], *, train: npt.NDArray[np.bool_], penalty: float = 1e-3
) -> ProbeScores:
    """A logistic regression from entity rows to classes, fitted on `train` and scored on the rest.

    Rows are standardised by the training rows; `penalty` is of the squared weights. It is convex, so that the result
    depends on no seed.
    """
    labels, train = np.asarray(labels), np.asarray(train, bool)
    if not train.any() or train.all():
        raise BadValue("a probe needs entities to fit on, and others to be scored on")
    names, classes = np.unique(labels, return_inverse=True)
    x, y = rows.detach().double().cpu(), torch.from_numpy(classes)
    fit = torch.from_numpy(train)
    if not bool(x.isfinite().all()):
        raise BadValue("rows that are not finite cannot be probed")
    spread = x[fit].std(0, correction=0)
    says = spread > 1e-9 * x[fit].abs().amax(0)  # a column that is constant but for rounding says nothing
    x = torch.where(says, (x - x[fit].mean(0)) / torch.where(says, spread, 1.0), 0.0)
    weight = torch.zeros(x.shape[1], len(names), dtype=torch.float64, requires_grad=True)
    bias = torch.zeros(len(names), dtype=torch.float64, requires_grad=True)
    solver = torch.optim.LBFGS([weight, bias], max_iter=200, line_search_fn="strong_wolfe", tolerance_grad=1e-9)

    def loss() -> Tensor:
        solver.zero_grad()
        value = torch.nn.functional.cross_entropy(x[fit] @ weight + bias, y[fit]) + penalty * weight.square().sum()
        value.backward()
        return value

    solver.step(loss)
    said, truth = (x[~fit] @ weight + bias).argmax(1).detach().numpy(), classes[~train]
    f1 = []
    for which in np.unique(np.concatenate([said, truth])):
        right = ((said == which) & (truth == which)).sum()
        f1.append(2 * right / max((said == which).sum() + (truth == which).sum(), 1))
    commonest = np.bincount(classes[train]).argmax()
    return ProbeScores(
        float((said == truth).mean()), float(np.mean(f1)), float((truth == commonest).mean()), len(names), len(truth)
    )
