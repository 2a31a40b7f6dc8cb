"""Lower bounds of epsilon, from how well somebody told apart what ought to look alike.

A claim is an upper bound. An attack that does better than the claim allows shows that the claim is wrong; one that does
worse shows nothing. SciPy is imported where it is needed, because whatever trains has NumPy and torch alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tacit.errors import BadValue

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

HALVINGS = 60
"""Of the interval in which the bound of one run is looked for."""


def clopper_pearson(successes: int, trials: int, level: float) -> tuple[float, float]:
    """The interval that misses a chance with probability `level` at most, half of it on each side.

    Exact for the binomial distribution (Clopper and Pearson 1934). Without trials it is all of 0 to 1.

    >>> low, high = clopper_pearson(0, 100, 0.05)
    >>> low, round(high, 4)
    (0.0, 0.0362)
    """
    _check_counts("successes", successes, "trials", trials)
    _check_chance("level", level)
    low, high = _intervals(np.array([successes]), trials, level)
    return float(low[0]), float(high[0])


def epsilon_from_counts(
    true_positives: int, positives: int, false_positives: int, negatives: int, *, delta: float, confidence: float = 0.95
) -> float:
    """The epsilon that a test shows to be exceeded: it said "in" so often with the triple, and so often without it.

    Both directions are looked at (what was said of "in" and of "out"), by Clopper-Pearson bounds of both rates at once
    (Nasr et al. 2021). The test and its threshold must have been fixed before these runs: see `best_threshold`.

    >>> round(epsilon_from_counts(500, 1000, 100, 1000, delta=1e-5), 4)
    1.3597
    """
    _check_counts("true_positives", true_positives, "positives", positives)
    _check_counts("false_positives", false_positives, "negatives", negatives)
    _check_delta(delta)
    _check_chance("confidence", confidence)
    found = _from_counts(
        np.array([true_positives]), positives, np.array([false_positives]), negatives, delta, 1 - confidence
    )
    return float(found[0])


def one_run_p_value(canaries: int, guesses: int, correct: int, epsilon: float, delta: float) -> float:
    """How likely so many correct guesses are, at most, if one training is (epsilon, delta)-private.

    Each of the canaries was in the training by a fair coin of its own. The guesser abstained from all but `guesses` of
    them; how many that would be was fixed before (Steinke, Nasr and Jagielski 2023).
    """
    from scipy.stats import binom  # type: ignore[import-untyped,unused-ignore]

    _check_run(canaries, guesses, correct)
    _check_delta(delta)
    if not (epsilon >= 0 and math.isfinite(epsilon)):
        raise BadValue(f"epsilon is a number of at least 0, not {epsilon}")
    chance = 1 / (1 + math.exp(-epsilon))  # of one guess, if delta is 0
    likely = float(binom.sf(correct - 1, guesses, chance))
    if delta and correct:
        fewer = np.arange(
            1, correct + 1
        )  # what an event of probability delta may add to the correct ones, and its cost
        likely += 2 * canaries * delta * float((np.cumsum(binom.pmf(correct - fewer, guesses, chance)) / fewer).max())
    return min(1.0, likely)


def epsilon_from_one_run(canaries: int, guesses: int, correct: int, *, delta: float, confidence: float = 0.95) -> float:
    """The epsilon that the guesses of one training show to be exceeded (Steinke, Nasr and Jagielski 2023); 0 if none.

    Loose: what it does not find may still be there.

    >>> round(epsilon_from_one_run(1000, 1000, 750, delta=1e-5), 4)
    0.9764
    """
    _check_chance("confidence", confidence)

    def excluded(epsilon: float) -> bool:
        return one_run_p_value(canaries, guesses, correct, epsilon, delta) < 1 - confidence

    if not excluded(0.0):
        return 0.0
    low, high = 0.0, 1.0
    while excluded(high):
        low, high = high, 2 * high
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if excluded(middle) else (low, middle)
    return low


@dataclass(frozen=True)
class Threshold:
    """A threshold that one half of the scores chose, and how often the other half is at or above it."""

    value: float
    true_positives: int
    positives: int
    false_positives: int
    negatives: int

    def epsilon(self, *, delta: float, confidence: float = 0.95) -> float:
        """`epsilon_from_counts` of the half that did not choose."""
        return epsilon_from_counts(
            self.true_positives,
            self.positives,
            self.false_positives,
            self.negatives,
            delta=delta,
            confidence=confidence,
        )


def best_threshold(scores_in: ArrayLike, scores_out: ArrayLike, *, delta: float = 0.0) -> Threshold:
    """The threshold with the highest `epsilon_from_counts` among the first, third, fifth... scores; "in" is high.

    The second, fourth, sixth... are counted with it. A threshold that has seen the scores it is counted on flatters
    itself, and its bound is none.
    """
    chosen_in, counted_in = _halves("scores_in", scores_in)
    chosen_out, counted_out = _halves("scores_out", scores_out)
    _check_delta(delta)
    values = np.unique(np.concatenate([chosen_in, chosen_out]))
    above_in, above_out = (at_or_above(scores, values) for scores in (chosen_in, chosen_out))
    found = _from_counts(above_in, len(chosen_in), above_out, len(chosen_out), delta, 0.05)
    value = float(values[int(np.argmax(found))])
    true, false = (int((scores >= value).sum()) for scores in (counted_in, counted_out))
    return Threshold(value, true, len(counted_in), false, len(counted_out))


def _intervals(successes: np.ndarray, trials: int, level: float) -> tuple[np.ndarray, np.ndarray]:
    from scipy.stats import beta  # type: ignore[import-untyped,unused-ignore]

    low, high = np.zeros(len(successes)), np.ones(len(successes))
    some, missing = successes > 0, successes < trials
    low[some] = beta.ppf(level / 2, successes[some], trials - successes[some] + 1)
    high[missing] = beta.isf(level / 2, successes[missing] + 1, trials - successes[missing])
    return low, high


def _from_counts(
    true: np.ndarray, positives: int, false: np.ndarray, negatives: int, delta: float, level: float
) -> np.ndarray:
    rate_low, _ = _intervals(true, positives, level)
    _, rate_high = _intervals(false, negatives, level)
    best = np.zeros(len(true))
    for more, less in ((rate_low - delta, rate_high), (1 - rate_high - delta, 1 - rate_low)):
        usable = (more > 0) & (less > 0)
        best[usable] = np.maximum(best[usable], np.log(more[usable] / less[usable]))
    return best


def at_or_above(scores: np.ndarray, values: np.ndarray) -> np.ndarray:
    """For each value, how many scores are at or above it."""
    found: np.ndarray = len(scores) - np.searchsorted(np.sort(scores), values, side="left")
    return found


def _halves(name: str, scores: Any) -> tuple[np.ndarray, np.ndarray]:
    found = np.asarray(scores, float)
    if found.ndim != 1 or len(found) < 2:
        raise BadValue(f"{name} are at least 2 numbers: one half chooses and the other is counted")
    if np.isnan(found).any():
        raise BadValue(f"{name} have something that is no number")
    return found[::2], found[1::2]


def _check_counts(name: str, count: int, of: str, total: int) -> None:
    if not 0 <= count <= total:
        raise BadValue(f"{name} are at least 0 and at most all {of}, not {count} of {total}")


def _check_run(canaries: int, guesses: int, correct: int) -> None:
    if not 0 <= correct <= guesses <= canaries:
        raise BadValue(
            f"correct guesses are guesses, and guesses are of canaries, not {correct} of {guesses} of {canaries}"
        )


def _check_delta(delta: float) -> None:
    if not 0 <= delta < 1:
        raise BadValue(f"delta is at least 0 and below 1, not {delta}")


def _check_chance(name: str, value: float) -> None:
    if not 0 < value < 1:
        raise BadValue(f"{name} is above 0 and below 1, not {value}")
