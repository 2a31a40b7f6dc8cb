"""What the papers say their mechanisms cost, by their own formulas: for replication, and never a claim.

DP-FLames (Hu et al. 2023): Lemma 4.2, Theorems 4.3 and 4.4, misprints resolved. DPKGE (Han et al. 2022): the moments
accountant of 2016, with the conversion of its time. Why none of them is a guarantee: `docs/published.md`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

from tacit.errors import BadValue

FLAMES_ORDERS = tuple(range(2, 65))
GAUSSIAN_ORDERS = tuple(1 + x / 10 for x in range(1, 100)) + tuple(float(x) for x in range(12, 64))
"""Of TensorFlow Privacy at that time, with which DPKGE was made."""


def gradient_cost(order: float, rate: float, sigma: float) -> float:
    """Lemma 4.2, with sigma**2 for the printed sigma."""
    return 2 * rate**2 * order / sigma**2


def within_lemma(order: float, rate: float, sigma: float) -> bool:
    """Whether Lemma 4.2 says anything at this order."""
    wide = math.log1p(1 / (rate * (order - 1)))
    first = sigma**2 * wide / 2 - 2 * math.log(sigma)
    below = wide + math.log(rate * order) + 1 / (2 * sigma**2)
    second = (sigma**2 * wide**2 / 2 - math.log(5) - 2 * math.log(sigma)) / below if below > 0 else math.inf
    return order <= min(first, second)


@lru_cache(maxsize=4096)
def largest_order(rate: float, sigma: float) -> int:
    """The largest whole order that Lemma 4.2 allows, 1 if it allows none."""
    order = 1
    while order < FLAMES_ORDERS[-1] and within_lemma(order + 1, rate, sigma):
        order += 1
    return order


@lru_cache(maxsize=4096)
def selection_cost(order: int, rate: float, sigma_r: float, sigma_p: float) -> float:
    """Theorem 4.3: all inside one logarithm, the printed p is the rate."""

    def alone(j: int) -> float:
        return j / (8 * sigma_r**2) + j / (2 * sigma_p**2)

    first = min(4 * math.expm1(alone(2)), 2 * math.exp(alone(2)))
    terms = rate**2 * math.comb(order, 2) * first
    for j in range(3, order + 1):
        terms += 2 * math.exp(j * math.log(rate) + math.log(math.comb(order, j)) + (j - 1) * alone(j))
    return math.log1p(terms) / (order - 1)


def dpflames_curve(
    rate: float, sigma: float, steps: int, released: float, *, sigma_r: float | None = 1.0, sigma_p: float = 1.0
) -> list[float]:
    """What steps of one sigma cost at each of `FLAMES_ORDERS`; infinite where Lemma 4.2 says nothing.

    `released`: how many of them passed the test; the others cost no gradient. sigma_r None: no selection.
    """
    found, most = [], largest_order(rate, sigma)
    for order in FLAMES_ORDERS:
        if order > most:
            found.append(math.inf)
            continue
        selecting = 0.0 if sigma_r is None else selection_cost(order, rate, sigma_r, sigma_p)
        found.append(released * gradient_cost(order, rate, sigma) + steps * selecting)
    return found


def dpflames_epsilon(
    rate: float,
    steps: Sequence[tuple[int, float]],
    *,
    sigma_r: float | None = 1.0,
    sigma_p: float = 1.0,
    delta: float = 1e-5,
) -> float:
    """Theorem 4.4, after so many steps of each sigma, all of which released something.

    Half of delta goes to the tests; sigma_r None: gradients alone, as its baseline DPSGD, and all of delta. Infinite:
    no order is allowed.
    """
    if not steps or not 0 < rate < 1:
        raise BadValue("there are no steps, or the rate is no rate")
    curves = [dpflames_curve(rate, sigma, n, n, sigma_r=sigma_r, sigma_p=sigma_p) for n, sigma in steps]
    return converted_as_then(FLAMES_ORDERS, [sum(each) for each in zip(*curves, strict=True)],
                             delta if sigma_r is None else delta / 2)  # fmt: skip


def converted_as_then(orders: Sequence[float], curve: Sequence[float], delta: float) -> float:
    """The epsilon of Renyi divergences by the conversion of Mironov (2017), which both papers use."""
    return min(r + math.log(1 / delta) / (order - 1) for order, r in zip(orders, curve, strict=True))


def dpflames_steps(epsilon: float, rate: float, sigma: float, **others: float | None) -> int:
    """How many steps of one sigma fit into an epsilon by Theorem 4.4."""

    def cost(count: int) -> float:
        return dpflames_epsilon(rate, [(count, sigma)], **others)  # type: ignore[arg-type]

    if cost(1) > epsilon:
        return 0
    low, high = 1, 2
    while cost(high) <= epsilon:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if cost(middle) <= epsilon else (low, middle)
    return low


def least_epsilon(rate: float, sigma: float, delta: float = 1e-5, *, selects: bool = True) -> float:
    """What Theorem 4.4 says before the first step: no training costs less, whatever is asked for."""
    left = delta / 2 if selects else delta
    most = largest_order(rate, sigma)
    return math.log(1 / left) / (most - 1) if most > 1 else math.inf


def moments_epsilon(rate: float, sigma: float, steps: int, delta: float) -> float:
    """The moments accountant as DPKGE used it: exact moments of the sampled Gaussian, the conversion of 2016."""
    return converted_as_then(GAUSSIAN_ORDERS, [steps * r for r in sampled_gaussian(rate, sigma)], delta)


@lru_cache(maxsize=256)
def sampled_gaussian(rate: float, sigma: float) -> tuple[float, ...]:
    """The exact divergences of one step at `GAUSSIAN_ORDERS`."""
    from tacit.privacy.accountant import curve
    from tacit.privacy.events import Sampled, Segment

    return tuple(float(r) for r in curve([Segment(Sampled(rate, (sigma,)))], orders=GAUSSIAN_ORDERS))
