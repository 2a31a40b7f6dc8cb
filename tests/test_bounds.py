"""Lower bounds of epsilon: reference values, exact intervals, and that they hold as often as they say."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq
from scipy.stats import binom, norm

from tacit.errors import BadValue
from tacit.privacy.bounds import (
    best_threshold,
    clopper_pearson,
    epsilon_from_counts,
    epsilon_from_one_run,
    one_run_p_value,
)

DELTA = 1e-5


@st.composite
def counted(draw, most=2000):
    """(successes, trials)"""
    trials = draw(st.integers(1, most))
    return draw(st.integers(0, trials)), trials


@st.composite
def runs(draw, most=300):
    """(canaries, guesses, correct)"""
    canaries = draw(st.integers(1, most))
    guesses = draw(st.integers(1, canaries))
    return canaries, guesses, draw(st.integers(0, guesses))


def exact_epsilon(mu, delta):
    """Of normal noise, with sensitivity over deviation mu (Balle and Wang 2018)."""

    def excess(epsilon):
        return norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon + norm.logcdf(-mu / 2 - epsilon / mu)) - delta

    return float(brentq(excess, 0, 200)) if excess(0) > 0 else 0.0


def slow_p_value(canaries, guesses, correct, epsilon, delta):
    """As Steinke et al. print it, one term at a time."""
    chance = math.exp(epsilon) / (1 + math.exp(epsilon))
    terms = [math.comb(guesses, k) * chance**k * (1 - chance) ** (guesses - k) for k in range(guesses + 1)]
    worst = max((sum(terms[correct - i : correct]) / i for i in range(1, correct + 1)), default=0.0)
    return min(1.0, sum(terms[correct:]) + 2 * canaries * delta * worst)


# -- intervals ---------------------------------------------------------------------------------------------------------


@given(counted(), st.floats(1e-6, 0.5))
def test_intervals_leave_the_level_outside(count, level):
    successes, trials = count
    low, high = clopper_pearson(successes, trials, level)
    assert 0 <= low <= successes / trials <= high <= 1
    if successes:  # at the low end, so many or more happen with half the level
        assert binom.sf(successes - 1, trials, low) == pytest.approx(level / 2, rel=1e-6)
    if successes < trials:
        assert binom.cdf(successes, trials, high) == pytest.approx(level / 2, rel=1e-6)


@pytest.mark.parametrize("trials", [1, 7, 1000, 10**6])
def test_intervals_of_none_and_of_all(trials):
    assert clopper_pearson(0, trials, 0.05) == pytest.approx((0, 1 - 0.025 ** (1 / trials)), rel=1e-9)
    assert clopper_pearson(trials, trials, 0.05) == pytest.approx((0.025 ** (1 / trials), 1), rel=1e-9)


def test_no_trials_say_nothing():
    assert clopper_pearson(0, 0, 0.05) == (0, 1)


@given(counted(), st.floats(0.01, 0.5))
def test_intervals_mirror_and_shrink(count, level):
    successes, trials = count
    low, high = clopper_pearson(successes, trials, level)
    assert clopper_pearson(trials - successes, trials, level) == pytest.approx((1 - high, 1 - low), abs=1e-9)
    wide = clopper_pearson(successes, trials, level / 2)
    assert wide[0] <= low
    assert wide[1] >= high
    more = clopper_pearson(successes * 3, trials * 3, level)
    assert more[1] - more[0] <= high - low


@pytest.mark.parametrize("chance", [0.002, 0.1, 0.5, 0.97])
@pytest.mark.parametrize("trials", [20, 300])
def test_intervals_cover_as_often_as_they_say(chance, trials):
    rng = np.random.default_rng(5)
    drawn, times = np.unique(rng.binomial(trials, chance, 4000), return_counts=True)
    inside = [low <= chance <= high for low, high in (clopper_pearson(int(n), trials, 0.05) for n in drawn)]
    assert times[inside].sum() / 4000 >= 0.95 - 4 * (0.05 * 0.95 / 4000) ** 0.5


# -- two kinds of runs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ((10**4, 10**4, 0, 10**4), 7.9048),
        ((84134, 10**5, 15866, 10**5), 1.6512),
        ((500, 1000, 100, 1000), 1.3597),
    ],
)
def test_counts_give_the_reference_values(counts, expected):
    assert epsilon_from_counts(*counts, delta=DELTA) == pytest.approx(expected, abs=1e-4)


def test_the_most_that_counts_can_show():
    assert epsilon_from_counts(10**5, 10**5, 0, 10**5, delta=DELTA) == pytest.approx(10.21, abs=0.005)


@given(counted(200), counted(200), st.sampled_from([0.0, 1e-5, 0.01, 0.3]), st.floats(0.5, 0.999))
def test_counts_by_hand(positive, negative, delta, confidence):
    (true, positives), (false, negatives) = positive, negative
    low, _ = clopper_pearson(true, positives, 1 - confidence)
    _, high = clopper_pearson(false, negatives, 1 - confidence)
    by_hand = max((low - delta) / high, (1 - high - delta) / (1 - low), 1)
    assert epsilon_from_counts(
        true, positives, false, negatives, delta=delta, confidence=confidence
    ) == pytest.approx(math.log(by_hand), abs=1e-9)  # fmt: skip


@given(counted(200), counted(200), st.sampled_from([0.0, 1e-5, 0.01]))
def test_a_better_test_shows_more(positive, negative, delta):
    (true, positives), (false, negatives) = positive, negative
    found = epsilon_from_counts(true, positives, false, negatives, delta=delta)
    assert found >= 0
    assert epsilon_from_counts(min(true + 1, positives), positives, false, negatives, delta=delta) >= found - 1e-9
    assert epsilon_from_counts(true, positives, max(false - 1, 0), negatives, delta=delta) >= found - 1e-9
    assert epsilon_from_counts(true, positives, false, negatives, delta=delta + 0.01) <= found + 1e-9
    assert epsilon_from_counts(true, positives, false, negatives, delta=delta, confidence=0.99) <= found + 1e-9


@given(counted(200), counted(200), st.sampled_from([0.0, 1e-5, 0.01]))
def test_both_answers_count_alike(positive, negative, delta):
    """Who says "out" of what is out says as much as who says "in" of what is in."""
    (true, positives), (false, negatives) = positive, negative
    mirrored = epsilon_from_counts(negatives - false, negatives, positives - true, positives, delta=delta)
    assert epsilon_from_counts(true, positives, false, negatives, delta=delta) == pytest.approx(mirrored, abs=1e-9)


@pytest.mark.parametrize("counts", [(0, 10, 10, 10), (0, 0, 0, 0), (5, 10, 5, 10), (0, 10, 0, 10), (10, 10, 10, 10)])
def test_a_test_that_tells_nothing_shows_nothing(counts):
    assert epsilon_from_counts(*counts, delta=0) == 0


@pytest.mark.parametrize("sigma", [0.5, 1.0, 3.0])
def test_counts_of_normal_noise_stay_below_the_exact_epsilon(sigma):
    """At 95%, of 400 trials 20 and a few may exceed even what this threshold shows if it is run for ever."""
    rng, runs, cut = np.random.default_rng(11), 5000, 0.5 + sigma
    rates = [float(norm.sf((cut - mean) / sigma)) for mean in (1, 0)]
    shown = math.log((rates[0] - DELTA) / rates[1])
    assert shown < exact_epsilon(1 / sigma, DELTA)
    pairs = zip(*(rng.binomial(runs, rate, 400).tolist() for rate in rates), strict=True)
    found = np.array([epsilon_from_counts(true, runs, false, runs, delta=DELTA) for true, false in pairs])
    assert (found > shown).sum() <= 20 + 3 * 20**0.5
    assert found.mean() > 0.7 * shown


# -- a threshold -------------------------------------------------------------------------------------------------------


@settings(max_examples=30)
@given(
    st.lists(st.floats(-5, 5), min_size=2, max_size=60),
    st.lists(st.floats(-5, 5), min_size=2, max_size=60),
)
def test_a_threshold_is_the_best_of_one_half_and_counts_the_other(inside, outside):
    found = best_threshold(inside, outside)
    chosen, other = (inside[::2], outside[::2]), (inside[1::2], outside[1::2])

    def shown(value):
        true, false = (sum(x >= value for x in half) for half in chosen)
        return epsilon_from_counts(true, len(chosen[0]), false, len(chosen[1]), delta=0)

    assert shown(found.value) == pytest.approx(max(map(shown, {*chosen[0], *chosen[1]})), abs=1e-9)
    assert (found.true_positives, found.positives) == (sum(x >= found.value for x in other[0]), len(other[0]))
    assert (found.false_positives, found.negatives) == (sum(x >= found.value for x in other[1]), len(other[1]))
    expected = epsilon_from_counts(
        found.true_positives, found.positives, found.false_positives, found.negatives, delta=DELTA
    )
    assert found.epsilon(delta=DELTA) == expected


@pytest.mark.parametrize("sigma", [1.0, 0.25])
def test_a_chosen_threshold_keeps_the_confidence(sigma):
    rng, exact = np.random.default_rng(3), exact_epsilon(1 / sigma, DELTA)
    found = [
        best_threshold(rng.normal(1, sigma, 800), rng.normal(0, sigma, 800), delta=DELTA).epsilon(delta=DELTA)
        for _ in range(100)
    ]
    assert sum(x > exact for x in found) <= 5 + 3 * 5**0.5
    assert np.mean(found) > {1.0: 0.8, 0.25: 3.5}[sigma]


def test_equal_scores_show_nothing_and_separate_ones_all_there_is():
    same = np.random.default_rng(1).normal(size=(2, 2000))
    assert best_threshold(*same).epsilon(delta=DELTA) < 0.3
    assert best_threshold(np.ones(4000), np.zeros(4000)).epsilon(delta=0) == epsilon_from_counts(
        2000, 2000, 0, 2000, delta=0
    )


# -- one run -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("canaries", "guesses", "correct", "delta", "expected"),
    [
        (1000, 1000, 600, 1e-5, 0.2972),
        (1000, 1000, 750, 1e-5, 0.9764),
        (1000, 100, 100, 1e-5, 3.4654),
        (1000, 100, 95, 1e-5, 2.1652),
        (1000, 1000, 1000, 0, 5.8091),
        (1000, 1000, 990, 1e-5, 4.0592),
        (5000, 500, 480, 1e-5, 2.7830),
        (1000, 200, 173, 1e-5, 1.51),
        (1000, 200, 196, 1e-5, 3.04),
    ],
)
def test_one_run_gives_the_reference_values(canaries, guesses, correct, delta, expected):
    tolerance = 1e-4 if round(expected, 2) != expected else 0.005
    assert epsilon_from_one_run(canaries, guesses, correct, delta=delta) == pytest.approx(expected, abs=tolerance)


@given(runs(60), st.floats(0, 8), st.sampled_from([0.0, 1e-5, 1e-3, 0.1]))
def test_p_values_equal_the_slow_ones(run, epsilon, delta):
    slow = slow_p_value(*run, epsilon, delta)
    assert one_run_p_value(*run, epsilon, delta) == pytest.approx(slow, rel=1e-9, abs=1e-12)


@given(runs(), st.sampled_from([0.0, 1e-5, 1e-3]), st.floats(0.5, 0.999))
def test_one_run_excludes_no_more_than_its_p_value(run, delta, confidence):
    found = epsilon_from_one_run(*run, delta=delta, confidence=confidence)
    if found:
        assert one_run_p_value(*run, found, delta) < 1 - confidence
    assert one_run_p_value(*run, found + 1e-6, delta) >= (1 - confidence) * (1 - 1e-6)


@given(runs(), st.sampled_from([0.0, 1e-5, 1e-3]))
def test_more_correct_guesses_show_more(run, delta):
    canaries, guesses, correct = run
    found = epsilon_from_one_run(canaries, guesses, correct, delta=delta)
    assert epsilon_from_one_run(canaries, guesses, min(correct + 1, guesses), delta=delta) >= found - 1e-9
    assert epsilon_from_one_run(canaries + 50, guesses, correct, delta=delta) <= found + 1e-9
    assert epsilon_from_one_run(canaries, guesses, correct, delta=delta + 1e-4) <= found + 1e-9
    if 2 * correct <= guesses:
        assert found == 0


@pytest.mark.parametrize("guesses", [1, 4, 5, 100])
def test_all_correct_and_none_correct(guesses):
    assert epsilon_from_one_run(1000, guesses, 0, delta=0) == 0
    chance = 0.05 ** (1 / guesses)
    expected = max(0.0, math.log(chance / (1 - chance)))
    assert epsilon_from_one_run(1000, guesses, guesses, delta=0) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("sigma", [0.5, 1.0, 3.0])
def test_one_run_of_normal_noise_stays_below_the_exact_epsilon(sigma):
    """Canaries that do not touch each other, each with normal noise: the best case for the guesser."""
    rng, exact = np.random.default_rng(7), exact_epsilon(1 / sigma, DELTA)
    exceeded, shown = 0, []
    for _ in range(300):
        coins = rng.random(1000) < 0.5
        order = np.argsort(coins + rng.normal(0, sigma, 1000))
        correct = int((~coins[order[:50]]).sum() + coins[order[-50:]].sum())
        shown.append(epsilon_from_one_run(1000, 100, correct, delta=DELTA))
        exceeded += shown[-1] > exact
    assert exceeded <= 15 + 3 * 15**0.5
    assert np.mean(shown) > 0.1 * exact


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call",
    [
        lambda: clopper_pearson(-1, 10, 0.05),
        lambda: clopper_pearson(11, 10, 0.05),
        lambda: clopper_pearson(1, 10, 0),
        lambda: clopper_pearson(1, 10, math.nan),
        lambda: epsilon_from_counts(1, 0, 0, 1, delta=0),
        lambda: epsilon_from_counts(1, 2, 3, 2, delta=0),
        lambda: epsilon_from_counts(1, 2, 1, 2, delta=1),
        lambda: epsilon_from_counts(1, 2, 1, 2, delta=math.nan),
        lambda: epsilon_from_counts(1, 2, 1, 2, delta=0, confidence=1),
        lambda: one_run_p_value(10, 11, 5, 1, 0),
        lambda: one_run_p_value(10, 5, 6, 1, 0),
        lambda: one_run_p_value(10, 5, -1, 1, 0),
        lambda: one_run_p_value(10, 5, 5, math.nan, 0),
        lambda: one_run_p_value(10, 5, 5, -1, 0),
        lambda: epsilon_from_one_run(10, 5, 5, delta=-1e-5),
        lambda: epsilon_from_one_run(10, 5, 5, delta=0, confidence=0),
        lambda: best_threshold([1.0], [1.0, 2.0]),
        lambda: best_threshold([1.0, math.nan], [1.0, 2.0]),
        lambda: best_threshold([[1.0, 2.0]], [1.0, 2.0]),
    ],
)
def test_what_makes_no_sense_is_refused(call):
    with pytest.raises(BadValue):
        call()


def test_scipy_is_not_needed_to_import_it():
    code = "import sys; import tacit.privacy.bounds; sys.exit('scipy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
