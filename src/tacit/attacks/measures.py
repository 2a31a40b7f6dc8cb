"""How well an attack tells members from others: ROC, AUC, true positives at few false ones, F1; with their confidence.

F1 at the best threshold is what the papers report. With as many members as others, saying "member" of everything has
an F1 of 0.667 already, and a threshold that was chosen on the very scores it is counted on flatters itself; so the
area under the ROC stands beside it, and what is found when hardly anyone may be accused wrongly (Carlini et al. 2022).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tacit.errors import BadValue
from tacit.privacy.bounds import at_or_above, clopper_pearson

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

RATES = (0.01, 0.001)
"""False-positive rates at which true positives are counted."""
NORMAL = 1.959964
"""Deviations on each side that leave out 5% of a normal distribution."""
STRONG, HARMLESS = 0.7, 0.55
"""An AUC that is worth defending against; one that a defence has to stay below."""


@dataclass(frozen=True)
class Interval:
    """A number, and the limits of its confidence."""

    value: float
    low: float
    high: float

    @staticmethod
    def of_mean(values: np.ndarray) -> Interval:
        """The mean of at least two values, by a normal distribution; 95%."""
        mean, reach = float(values.mean()), NORMAL * float(values.std(ddof=1)) / math.sqrt(len(values))
        return Interval(mean, mean - reach, mean + reach)

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f})"

    def json(self) -> dict[str, float]:
        return {name: round(value, 6) for name, value in self.__dict__.items()}


@dataclass(frozen=True)
class Measured:
    """What scores say of members and others.

    Attributes
    ----------
    f1, threshold
        The best F1 over all thresholds, and where; as the papers report it. In JSON an infinite one is null.
    f1_held_out
        With a threshold that one half of the targets chose, on the other half.
    always
        The F1 of saying "member" of everything.
    tpr
        By false-positive rate: true positives at the threshold that accuses at most that share of others wrongly. With
        few others the share that can be told from 0 is larger than that, which the limits do not say: `resolution`.
    beyond
        Targets that the attack can say nothing of; they are left out.
    """

    members: int
    others: int
    beyond: int
    auc: Interval
    f1: float
    threshold: float
    f1_held_out: float
    always: float
    tpr: dict[float, Interval]

    @property
    def resolution(self) -> float:
        """The smallest share of others that is not nothing."""
        return 1 / self.others

    def json(self) -> dict[str, Any]:
        return {
            "members": self.members,
            "others": self.others,
            "beyond_reach": self.beyond,
            "auc": self.auc.json(),
            "f1": round(self.f1, 6),
            "threshold": self.threshold if math.isfinite(self.threshold) else None,
            "f1_held_out": round(self.f1_held_out, 6),
            "f1_of_always_yes": round(self.always, 6),
            "tpr": {f"{rate:g}": found.json() for rate, found in self.tpr.items()},
            "resolution": round(self.resolution, 6),
        }


def measure(scores: ArrayLike, member: ArrayLike, *, confidence: float = 0.95) -> Measured:
    """Scores, larger for members, against the truth. NaN: the attack can say nothing of that target.

    >>> found = measure([3.0, 2.0, 1.0, 0.0], [True, True, False, False])
    >>> found.auc.value, found.f1
    (1.0, 1.0)
    """
    values, truth = np.asarray(scores, np.float64), np.asarray(member, bool)
    if values.shape != truth.shape or values.ndim != 1:
        raise BadValue(f"a score for each target, not {values.shape} for {truth.shape}")
    if not 0 < confidence < 1:
        raise BadValue(f"confidence is above 0 and below 1, not {confidence}")
    there = ~np.isnan(values)
    inside, outside = values[there & truth], values[there & ~truth]
    if not len(inside) or not len(outside):
        raise BadValue("there are no members, or no others, that the attack could say anything of")
    kept, known = values[there], truth[there]
    f1, threshold = best_f1(kept, known)
    chosen, counted = slice(0, None, 2), slice(1, None, 2)
    order = np.argsort(known, kind="stable")  # both halves have members and others
    held = _f1_at(kept[order][counted], known[order][counted], best_f1(kept[order][chosen], known[order][chosen])[1])
    share = len(inside) / len(kept)
    rates = {rate: _tpr(inside, outside, rate, confidence) for rate in RATES}
    return Measured(len(inside), len(outside), int((~there).sum()), auc(inside, outside, confidence=confidence), f1,
                    threshold, held, 2 * share / (1 + share), rates)  # fmt: skip


def auc(inside: np.ndarray, outside: np.ndarray, *, confidence: float = 0.95) -> Interval:
    """The chance that a member's score is larger than another's, a tie counting half (Mann and Whitney).

    Limits by DeLong, DeLong and Clarke-Pearson (1988), on the scale of logits so that they stay within 0 and 1; where
    the two are wholly apart, by the chance of that if they overlapped by so much. Of one member, or one other, alone
    nothing is known of how such scores vary: no limits.
    """
    from scipy.stats import norm  # type: ignore[import-untyped,unused-ignore]

    ones, others = len(inside), len(outside)
    placed_in = _placed(inside, outside)  # for each member: the share of others below it
    placed_out = 1 - _placed(outside, inside)
    value = float(placed_in.mean())
    variance = (placed_in.var(ddof=1) / ones if ones > 1 else 0.0) + (
        placed_out.var(ddof=1) / others if others > 1 else 0.0
    )
    level = 1 - confidence
    if variance == 0:
        edge = (level / 2) ** (1 / min(ones, others))
        if value in (0.0, 1.0):
            return Interval(value, *((edge, 1.0) if value else (0.0, 1 - edge)))
        alike = len(np.unique([*inside, *outside])) == 1  # all scores the same: a guess, whatever the targets
        return Interval(value, *((value, value) if alike else (0.0, 1.0)))
    if min(ones, others) == 1:
        return Interval(value, 0.0, 1.0)
    reach = float(norm.isf(level / 2)) * math.sqrt(variance) / (value * (1 - value))
    middle = math.log(value / (1 - value))
    return Interval(value, _logistic(middle - reach), _logistic(middle + reach))


def roc(scores: ArrayLike, member: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    """False and true positive rates at every threshold, from (0, 0) to (1, 1)."""
    values, truth = np.asarray(scores, np.float64), np.asarray(member, bool)
    there = ~np.isnan(values)
    values, truth = values[there], truth[there]
    levels = np.unique(values)[::-1]
    false, true = (
        np.concatenate([[0.0], at_or_above(values[truth == kind], levels) / max((truth == kind).sum(), 1)])
        for kind in (False, True)
    )
    return false, true


def best_f1(scores: np.ndarray, member: np.ndarray) -> tuple[float, float]:
    """The best F1 over all thresholds, and the threshold: at or above it is called a member."""
    levels = np.unique(scores)
    called, right = at_or_above(scores, levels), at_or_above(scores[member], levels)
    found = 2 * right / np.maximum(called + member.sum(), 1)
    best = int(found.argmax())
    return float(found[best]), float(levels[best])


def verdict(undefended: Interval | None, defended: Interval) -> str:
    """Whether a defence holds, by the AUC with it and without it.

    Where an attack is weak without the defence, that it is weak with it shows nothing; that it works shows enough.
    """
    if defended.low > HARMLESS:
        return "not defended"
    if defended.low == defended.high:
        return "cannot tell: the attack has the same score for everything"
    if undefended is None:
        return "cannot tell: the attack was not tried without the defence"
    if undefended.value < STRONG:
        return "cannot tell: the attack is weak without the defence"
    return "defended" if defended.high <= HARMLESS else "not shown to be defended"


def _f1_at(scores: np.ndarray, member: np.ndarray, threshold: float) -> float:
    called = scores >= threshold
    return float(2 * (called & member).sum() / max(called.sum() + member.sum(), 1))


def _tpr(inside: np.ndarray, outside: np.ndarray, rate: float, confidence: float) -> Interval:
    """Members above all but `rate` of the others."""
    allowed = math.floor(rate * len(outside) + 1e-9)
    threshold = np.sort(outside)[::-1][allowed] if allowed < len(outside) else -np.inf
    many = int((inside > threshold).sum())
    return Interval(many / len(inside), *clopper_pearson(many, len(inside), 1 - confidence))


def _placed(these: np.ndarray, those: np.ndarray) -> np.ndarray:
    """For each of these the share of those below it, ties counting half."""
    ordered = np.sort(those)
    below, upto = (np.searchsorted(ordered, these, side=side) for side in ("left", "right"))
    found: np.ndarray = (below + upto) / (2 * len(those))
    return found


def _logistic(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x > -700 else 0.0
