"""Critical attacks and neighbouring graphs: does an embedding give its confidential statements away? (DPKGE)

Han et al. 2022, section 4. An attacker has rows and names, but no statements, and asks a head and a relation for their
tails: whatever ranks high is probably in the graph. `critical` asks for confidential statements of a model that was
trained privately and of one that was not. `neighbours` trains on a graph with and without one statement, many times,
and looks at that statement.

The paper gives a p value alone, which becomes as small as one likes with enough statements, and compares with nothing.
Beside it stand here how often a rank is larger (the AUC), how well true statements are told from false ones, and for
neighbours a control. SciPy is imported where it is needed, because whatever trains has NumPy and torch alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tacit.attacks.measures import Interval, auc
from tacit.draws import Purpose, Secret, Stream
from tacit.errors import BadValue, TacitError
from tacit.evaluation.ranking import rank
from tacit.graph import Graph, Split
from tacit.models.model import Model
from tacit.privacy.bounds import clopper_pearson
from tacit.privacy.plan import solved
from tacit.privacy.privatizers import Sound
from tacit.privacy.steps import count_units
from tacit.settings import Settings
from tacit.training import Fit

Floats = npt.NDArray[np.float64]
Triples = npt.NDArray[np.int64]
LEVEL = 0.05
"""Intervals miss what they are of so often."""
QUANTILES = (5, 25, 50, 75, 95)
"""In percent."""


@dataclass(frozen=True)
class Apart:
    """How far one sample of numbers lies above another.

    Attributes
    ----------
    u
        Mann and Whitney's: how many of all pairs have the larger number in the first sample, ties half.
    auc
        The same as a share: 0.5 for samples that cannot be told apart.
    p
        How likely so large a `u` is by chance, one-sided, if the samples are independent. Ranks of the same statements
        by two models are not quite; and of what other trainings would do it says nothing.
    """

    u: float
    auc: Interval
    p: float

    @property
    def biserial(self) -> float:
        """The rank-biserial correlation: 0 for samples that cannot be told apart, 1 for one all above the other."""
        return 2 * self.auc.value - 1

    def json(self) -> dict[str, Any]:
        return asdict(self) | {"biserial": self.biserial}


def apart(above: npt.ArrayLike, below: npt.ArrayLike) -> Apart:
    """Mann and Whitney's test (1947) of whether the numbers `above` are larger than those `below`.

    >>> found = apart([3, 4, 5], [1, 2, 4])
    >>> found.u, round(found.auc.value, 3)
    (7.5, 0.833)
    """
    from scipy.stats import mannwhitneyu

    first, second = np.asarray(above, np.float64), np.asarray(below, np.float64)
    if min(len(first), len(second)) < 2:
        raise BadValue("samples to tell apart have two numbers at least")
    if not (np.isfinite(first).all() and np.isfinite(second).all()):
        raise BadValue("numbers that are not finite cannot be told apart")
    found = auc(first, second)
    p = float(mannwhitneyu(first, second, alternative="greater", method="asymptotic").pvalue)
    return Apart(found.value * len(first) * len(second), found, p)


def _quantiles(values: Floats) -> dict[str, float]:
    return {str(each): float(value) for each, value in zip(QUANTILES, np.percentile(values, QUANTILES), strict=True)}


# -- critical attacks --------------------------------------------------------------------------------------------------


def chosen(graph: Graph, *, statements: int, seed: int = 0) -> Triples:
    """Up to so many confidential training statements, each of a head and relation of its own.

    As the paper draws them: a head and a relation, then one of their confidential tails.
    """
    if statements < 2:
        raise BadValue(f"ranks are compared of two statements at least, not {statements}")
    marks = graph.train.confidential
    if marks is None or not marks.any():
        raise TacitError("nothing in the training triples is marked confidential: mark statements (tacit data mark)")
    rows: Triples = graph.train.triples[marks].astype(np.int64)
    draws = Stream(seed, Purpose.MARK, step=1)  # marking at random draws at step 0
    rows = rows[draws.permutation(len(rows))]
    rows = rows[np.unique(rows[:, :2], axis=0, return_index=True)[1]]
    if len(rows) < 2:
        raise TacitError("only one head and relation has confidential statements: mark more (tacit data mark)")
    found: Triples = rows[draws.at(step=2).permutation(len(rows))[:statements]]
    return found


def false_tails(graph: Graph, asked: Triples, *, seed: int = 0, typed: bool = False) -> Triples:
    """The same heads and relations with another tail each, such that no split has the statement.

    `typed`: only tails that the relation has in training. Who has no such tail is left out.
    """
    facts, made = graph.statements.triples, []
    facts = facts[np.isin(facts[:, 0], asked[:, 0])]
    train, every = graph.train.triples, np.arange(len(graph.entities))
    fitting = {int(r): np.unique(train[train[:, 1] == r, 2]) for r in np.unique(asked[:, 1])} if typed else {}
    draws = Stream(seed, Purpose.CORRUPT, step=int(typed)).uniform(len(asked)).tolist()
    for (h, r, _), draw in zip(asked.tolist(), draws, strict=True):
        allowed = fitting.get(r, every)
        true = np.unique(facts[(facts[:, 0] == h) & (facts[:, 1] == r), 2])
        taken = np.flatnonzero(np.isin(allowed, true))
        free = len(allowed) - len(taken)
        if free:
            place = int(draw * free)
            made.append((h, r, allowed[place + np.searchsorted(taken - np.arange(len(taken)), place, side="right")]))
    return np.array(made, np.int64).reshape(-1, 3)


@dataclass(frozen=True, eq=False)
class Exposed:
    """What one model's ranks say of confidential statements.

    Attributes
    ----------
    ranks
        Of the true tails, in the order of the statements.
    any_tail, fitting_tail
        How well the ranks of true tails are told from those of false ones, which are to be larger: tails drawn from all
        entities, and from those that the relation has in training. The first are told apart by their kind already, so
        the second is what a statement is worth. None: nearly all such tails are true.
    """

    ranks: Floats
    any_tail: Apart | None
    fitting_tail: Apart | None

    def json(self) -> dict[str, Any]:
        told = {"any_tail": self.any_tail, "fitting_tail": self.fitting_tail}
        return {
            "median": float(np.median(self.ranks)),
            "mean": float(self.ranks.mean()),
            "top1": self.top(1),
            "top10": self.top(10),
            "quantiles": _quantiles(self.ranks),
        } | {name: None if found is None else found.json() for name, found in told.items()}

    def top(self, most: int) -> float:
        """The share of statements whose rank is no larger."""
        return float((self.ranks <= most).mean())


@dataclass(frozen=True, eq=False)
class Critical:
    """Ranks of confidential statements by a private model and by a plain one.

    Attributes
    ----------
    statements
        (n, 3): which; they are confidential, and no part of `json`.
    larger
        Whether the private ranks are larger: the paper's test.
    log_ratio, median_log_ratio
        Of each statement's private rank over its plain one, natural logarithm; 0: privacy moved nothing.
    """

    statements: Triples
    entities: int
    filtered: bool
    private: Exposed
    plain: Exposed
    larger: Apart
    log_ratio: Interval
    median_log_ratio: float

    def json(self) -> dict[str, Any]:
        return {
            "statements": len(self.statements),
            "entities": self.entities,
            "filtered": self.filtered,
            "private": self.private.json(),
            "plain": self.plain.json(),
            "larger": self.larger.json(),
            "log_ratio": asdict(self.log_ratio),
            "median_log_ratio": self.median_log_ratio,
        }


def critical(
    private: Model, plain: Model, graph: Graph, *, statements: int = 1000, seed: int = 0, filtered: bool = False
) -> Critical:
    """Critical attacks on two models of a graph (Han et al. 2022, section 4.8 and Fig. 6).

    Parameters
    ----------
    graph
        What both were trained on, with confidential training triples.
    statements
        At most so many are asked for.
    filtered
        Leave other true tails out of the candidates; an attacker cannot, who does not know them.
    """
    for model in (private, plain):
        if (model.entities, model.relations) != (len(graph.entities), len(graph.relations)):
            raise BadValue("a model has other numbers of entities and relations than the graph: it is of another one")
    asked = chosen(graph, statements=statements, seed=seed)
    false = [false_tails(graph, asked, seed=seed, typed=typed) for typed in (False, True)]
    known = graph.statements.triples if filtered else graph.statements.triples[:0]

    def exposed(model: Model) -> Exposed:
        ranks, *others = (rank(model, triples, known, sides="tails").of() for triples in (asked, *false))
        return Exposed(ranks, *(apart(other, ranks) if len(other) > 1 else None for other in others))

    one, two = exposed(private), exposed(plain)
    ratios = np.log(one.ranks / two.ranks)
    return Critical(asked, len(graph.entities), filtered, one, two, apart(one.ranks, two.ranks),
                    Interval.of_mean(ratios), float(np.median(ratios)))  # fmt: skip


# -- neighbouring graphs -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Change:
    """What became of statements from one training to another.

    Attributes
    ----------
    worse, same, better
        Shares of statements whose rank became larger, stayed, or became smaller.
    quantiles
        Of how much larger it became, at 5, 25, 50, 75 and 95 percent.
    log_ratio
        Of the later rank over the earlier one, natural logarithm.
    auc
        How often a statement's score fell, ties half; the interval is Clopper and Pearson's, ties on its outer side.
    """

    worse: float
    same: float
    better: float
    quantiles: dict[str, float]
    log_ratio: Interval
    auc: Interval

    @staticmethod
    def between(earlier: Floats, later: Floats) -> Change:
        """Of (n, 2) ranks and scores."""
        more, fell, level = later[:, 0] - earlier[:, 0], later[:, 1] < earlier[:, 1], later[:, 1] == earlier[:, 1]
        won, tied, many = int(fell.sum()), int(level.sum()), len(more)
        low, high = clopper_pearson(won, many, LEVEL)[0], clopper_pearson(won + tied, many, LEVEL)[1]
        worse, same, better = (float(which.mean()) for which in (more > 0, more == 0, more < 0))
        ratio = Interval.of_mean(np.log(later[:, 0] / earlier[:, 0]))
        return Change(worse, same, better, _quantiles(more), ratio, Interval((won + tied / 2) / many, low, high))


@dataclass(frozen=True, eq=False)
class Neighbours:
    """What the training on a graph says of a statement, and the training without that statement.

    Attributes
    ----------
    statements
        (n, 3): which; they are confidential, and no part of `json`.
    whole, without, control
        (n, 2) the rank and the score of each statement, trained on the graph, on the graph without that statement, and
        on the graph without another one.
    """

    statements: Triples
    entities: int
    filtered: bool
    private: bool
    whole: Floats
    without: Floats
    control: Floats

    @property
    def removed(self) -> Change:
        """From the whole graph to the one without the statement: the paper's comparison."""
        return Change.between(self.whole, self.without)

    @property
    def shuffled(self) -> Change:
        """From the whole graph to the one without another statement: what any removal does.

        Plain training goes through its triples in an order that follows their places. One triple less moves those after
        it, and so every batch: two models of neighbouring graphs differ, whatever was removed. Under privacy it is the
        noise that differs.
        """
        return Change.between(self.whole, self.control)

    @property
    def own(self) -> Change:
        """From the graph without another statement to the one without this one: what is left of the first beyond the
        second, and what an attacker can learn of the statement itself.
        """
        return Change.between(self.control, self.without)

    def json(self) -> dict[str, Any]:
        return {
            "statements": len(self.statements),
            "entities": self.entities,
            "filtered": self.filtered,
            "private": self.private,
            "ranks": {name: float(np.median(getattr(self, name)[:, 0])) for name in ("whole", "without", "control")},
        } | {name: asdict(getattr(self, name)) for name in ("removed", "shuffled", "own")}


def neighbours(
    graph: Graph,
    settings: Settings,
    *,
    statements: int = 100,
    seed: int = 0,
    together: int = 10,
    filtered: bool = False,
) -> Neighbours:
    """Train on a graph and on the graph less one confidential statement, for many statements (Han et al. 2022, 4.7).

    Models of a comparison begin with the same rows and follow the same public draws: an attacker may know these. Under
    privacy each has noise of its own, so that the whole graph is trained once for every statement; without, once for
    every party of a cohort. Names, and the public number of confidential triples, stay those of the whole graph.

    Parameters
    ----------
    settings
        Of every training; `privacy` decides which study this is. The same `seed`: the same statements.
    together
        So many graphs are trained at once, each with draws of its own, and every so-many-th statement has the same
        ones: the results follow it.
    filtered
        Leave other true tails out of the candidates.
    """
    if together < 1:
        raise BadValue(f"together is at least 1, not {together}")
    asked, entities = chosen(graph, statements=statements, seed=seed), len(graph.entities)
    facts = graph.statements.triples if filtered else graph.statements.triples[:0]
    private = isinstance(settings.privacy, Sound)
    if isinstance(settings.privacy, Sound):
        settings = _solved(settings, graph)
        graph = replace(graph, valid=Split(graph.valid.triples[:0]))  # which decides nothing under privacy
    many, cohorts = len(asked), itertools.count()
    width = min(together, many // 2)  # each number has two statements or more, which are each other's controls
    found = np.empty((3, many, 2))
    whole: list[Model] = []

    def look(model: Model, which: int) -> tuple[float, float]:
        mine = asked[[which]]
        known = facts[(facts[:, :2] == mine[0, :2]).all(1)]
        h, r, t = torch.from_numpy(mine).to(model.tables.entity.device).unbind(1)
        with torch.no_grad():
            return float(rank(model, mine, known, sides="tails").of()[0]), float(model.score(h, r, t))

    for first in range(0, many, width):
        here = range(first, min(first + width, many))
        if private or not whole:
            whole = _trained(settings, [graph] * len(here), next(cohorts))
        less = _trained(settings, [_without(graph, asked[which]) for which in here], next(cohorts))
        for number, which in enumerate(here):
            before = which - width if first else number + (many - 1 - number) // width * width
            found[0, which], found[1, which] = look(whole[number], which), look(less[number], which)
            found[2, before] = look(less[number], before)
    return Neighbours(asked, entities, filtered, private, found[0], found[1], found[2])


def _solved(settings: Settings, graph: Graph) -> Settings:
    """All noise known, and the public number of units that of the whole graph: no neighbour rounds to another one."""
    privacy = settings.privacy
    assert isinstance(privacy, Sound)
    if not privacy.trains or privacy.prior_share or privacy.adaptive:
        raise TacitError("neighbours are trained by private steps alone: use dpsgd or confidential, no noisy counts "
                         'beside them (privacy.prior_share), and privacy.noise_follows = "steps"')  # fmt: skip
    size = privacy.public_size(count_units(privacy, graph))
    return solved(replace(settings, privacy=replace(privacy, size=size)), [graph])


def _without(graph: Graph, statement: Triples) -> Graph:
    """The graph less a statement, in every split; its names stay."""
    train, valid, test = (split.at((split.triples != statement).any(1)) for split in graph.splits.values())
    return replace(graph, train=train, valid=valid, test=test)


def _trained(settings: Settings, graphs: Sequence[Graph], cohort: int) -> list[Model]:
    """A model of each graph, of the same public draws in every cohort, and of secret draws that no other cohort has."""
    fit = Fit(settings, graphs)
    if getattr(settings.privacy, "noise", None) == "seeded":  # else each has a key from the operating system
        fit.private.secret = Secret.simulation((settings.seed + 1 + cohort) % (1 << 64))
    fit.run(lambda event: None)
    return [fit.model(party) for party in range(len(graphs))]
