"""How much privacy a list of releases has cost, and what noise, steps or batch a budget pays for.

Everything is computed by dp-accounting: by the distribution of the privacy loss (PLD; Koskela et al. 2020) and by Renyi
divergences (RDP; Mironov 2017; converted as Balle et al. 2020). Both are upper bounds, so the smaller one holds.
Nothing here looks at data.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from tacit.errors import TacitError
from tacit.privacy.events import Gaussian, Sampled, SampledCurve, Segment, Spent, joined

ORDERS: tuple[float, ...] = (
    *(round(1 + x / 10, 1) for x in range(1, 100)), *map(float, range(11, 65)), 80.0, 128.0, 256.0, 512.0,
)  # fmt: skip
"""Of Renyi divergences: fixed, so that curves can be added and compared."""
INTERVAL = 1e-4
"""Of the grid of privacy losses. A coarse one inflates the result."""
MIXED_INTERVAL = 1e-3
LEAST_DELTA = 1e-7
HOPELESS = 200.0
"""An epsilon that nobody would call private: there the distribution of losses has more points than memory."""
FACTOR = 3.0
"""Of the general amplification's terms from the third on: the form with a complete proof."""
CAREFUL = 1e-3
"""How close, relatively, a calibrated noise comes to the least that is enough."""
CLOSE = 1 - 1e-9
"""Of a cap: room for the rounding of whoever adds it up elsewhere."""
LEAST_SIGMA, MOST_SIGMA = 0.05, 1e7


class CannotAccount(TacitError):
    """There is no bound for what was asked."""


def epsilon(segments: Sequence[Segment], delta: float, *, group: int = 1) -> float:
    """The smallest epsilon that is known to hold for all of these releases together, at `delta`.

    `group`: for neighbours that differ by up to so many triples. Nothing released costs 0.
    """
    _check(delta, group)
    return _epsilon(joined(segments), delta, group)


@lru_cache(maxsize=4096)
def _epsilon(spent: Spent, delta: float, group: int) -> float:
    if not spent:
        return 0.0
    best = by_renyi(spent, delta, group=group)
    if losses_are_known(spent, delta, group):
        best = min(best, by_losses(spent, delta, group=group))
    if not math.isfinite(best):
        raise CannotAccount("no finite epsilon is known for these releases: there is too little noise, or delta is 0")
    return best


def losses_are_known(spent: Spent, delta: float, group: int = 1) -> bool:
    """Whether `by_losses` can be asked: it is no bound at the smallest deltas, and has no end without privacy.

    Its sums are made by Fourier transforms, whose rounding is below 1e-12; at a delta below 1e-7 that was seen to make
    the epsilon of many releases too small.
    """
    if delta < LEAST_DELTA or any(isinstance(s.event, SampledCurve) for s in spent):
        return False
    many = sum(s.count * (group / s.event.sigma) ** 2 for s in spent if isinstance(s.event, Gaussian))
    rough = math.inf
    if group == 1:
        orders = (2.0, 4.0, 8.0)
        rough = min(converted(a, r, delta) for a, r in zip(orders, curve(spent, orders=orders), strict=True))
    elif all(s.event.sigma >= 0.3 for s in spent if not isinstance(s.event, SampledCurve)):
        rough = 0.0
    return rough < HOPELESS and many < HOPELESS


def by_losses(segments: Sequence[Segment], delta: float, *, group: int = 1) -> float:
    """Epsilon by the distribution of privacy losses: sums with normal noise, sampled or not."""
    whole = None
    for segment in joined(segments):
        if isinstance(segment.event, SampledCurve):
            raise CannotAccount("the distribution of privacy losses of a curve is not known")
        made = _losses(segment, group)
        whole = made if whole is None else whole.compose(made)
    with np.errstate(over="ignore"):  # an epsilon of thousands may come out as infinite
        return 0.0 if whole is None else float(whole.get_epsilon_for_delta(delta))


def _losses(segment: Segment, group: int) -> Any:
    """The distribution of privacy losses of so many releases."""
    from dp_accounting.pld import privacy_loss_distribution as pld

    event: Any = segment.event
    if isinstance(event, Gaussian):  # many are one, of less noise
        sigma, interval = event.sigma / (group * math.sqrt(segment.count)), INTERVAL if group == 1 else MIXED_INTERVAL
        return pld.from_gaussian_mechanism(sigma, value_discretization_interval=interval)
    if group == 1:
        return sampled_losses(event.sigma, event.rate, INTERVAL).self_compose(segment.count)
    many = range(group + 1)  # of the group's triples, 0 to all may be in the batch
    chances = [math.comb(group, k) * event.rate**k * (1 - event.rate) ** (group - k) for k in many]
    return pld.from_mixture_gaussian_mechanism(
        event.sigma, [float(k) for k in many], chances, value_discretization_interval=MIXED_INTERVAL
    ).self_compose(segment.count)


def sampled_losses(sigma: float, rate: float, interval: float) -> Any:
    """The distribution of the privacy losses of a sampled sum with normal noise, on a grid.

    It is what dp_accounting's `from_gaussian_mechanism` makes, with the losses of all points at once: that asks for a
    million of them, one by one. A loss that sampling makes smaller belongs to a larger one without sampling, at the
    same place; the divergence there is in closed form (Doroshenko et al. 2022, connect the dots).
    """
    from dp_accounting.pld import pld_pmf
    from dp_accounting.pld import privacy_loss_distribution as pld
    from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType, GaussianPrivacyLoss

    if rate == 1:
        return pld.from_gaussian_mechanism(sigma, value_discretization_interval=interval)
    made, furthest = [], math.log1p(-rate)
    for kind, sign in ((AdjacencyType.REMOVE, 1.0), (AdjacencyType.ADD, -1.0)):
        known = GaussianPrivacyLoss(sigma, sampling_prob=rate, adjacency_type=kind)
        bounds = known.connect_dots_bounds()
        first, last = math.floor(bounds.epsilon_lower / interval), math.ceil(bounds.epsilon_upper / interval)
        points = np.arange(first, last + 1) * interval
        reached = sign * points > furthest
        deltas = np.where(reached, 0.0, -np.expm1(points) if sign > 0 else 0.0)
        inside = points[reached]
        scaled = sign * inside - math.log(rate)
        with np.errstate(divide="ignore"):  # at the very end of what is reached the place is infinite
            alone = sign * (scaled + np.log1p(-np.exp(furthest - math.log(rate) - scaled)))
        places = (-0.5 if sign > 0 else 0.5) - alone * sigma**2
        deltas[reached] = known.mu_upper_cdf(places) - np.exp(inside + known.mu_lower_log_cdf(places))
        made.append(pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(interval, first, last, np.clip(deltas, 0, 1)))
    return pld.PrivacyLossDistribution(*made)


def by_renyi(segments: Sequence[Segment], delta: float, *, group: int = 1) -> float:
    """Epsilon by Renyi divergences; infinite where no order gives one."""
    spent = joined(segments)
    left = delta - own_delta(spent)
    if left <= 1e-9 * delta:  # nothing, but for rounding
        return math.inf
    if group > 1 and any(not isinstance(s.event, Gaussian) for s in spent):
        return math.inf  # only the distribution of losses knows groups in samples
    return min(converted(order, r, left) for order, r in zip(ORDERS, curve(spent, group=group), strict=True))


def held_by(spent: Sequence[Spent], holders: int, delta: float) -> list[float]:
    """Each party's epsilon, if a triple is held by so many of them at most: its own, or with what others may add to it.

    Others add no more than the largest divergence of any party, at each order.
    """
    if holders == 1:
        return [epsilon(each, delta) for each in spent]
    most = np.max([curve(each) for each in spent], axis=0)
    left = delta - holders * max(own_delta(each) for each in spent)
    if left <= 1e-9 * delta:
        return [math.inf] * len(spent)
    return [
        max(epsilon(each, delta), min(converted(a, r, left) for a, r in zip(ORDERS, holders * most, strict=True)))
        for each in spent
    ]


def own_delta(segments: Sequence[Segment]) -> float:
    """What releases take of delta by themselves: events that hold but for a chance."""
    return sum(s.event.delta * s.count for s in segments if isinstance(s.event, SampledCurve))


def converted(order: float, divergence: float, delta: float) -> float:
    """The epsilon that a Renyi divergence of that order gives (Balle et al. 2020; Canonne et al. 2020)."""
    return max(0.0, divergence + math.log1p(-1 / order) - math.log(delta * order) / (order - 1))


def allowed(order: float, epsilon: float, delta: float) -> float:
    """The largest Renyi divergence of that order that gives no more than this epsilon; the inverse of `converted`."""
    return max(0.0, epsilon - math.log1p(-1 / order) + math.log(delta * order) / (order - 1))


def curve(segments: Sequence[Segment], *, orders: Sequence[float] = ORDERS, group: int = 1) -> np.ndarray:
    """(orders,): the Renyi divergences of all of these releases together."""
    total = np.zeros(len(orders))
    for segment in joined(segments):
        total += segment.count * np.asarray(_one_curve(segment.event, tuple(orders), group))
    return total


@contextmanager
def _silent() -> Iterator[None]:
    """dp-accounting warns of every order that it leaves out, which is infinite here. Before it does, where nobody else
    has, it has everything that is logged written to standard error.
    """
    logger, root = logging.getLogger("absl"), logging.getLogger()
    level, handlers = logger.level, list(root.handlers)
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
        for handler in root.handlers[:]:
            if handler not in handlers:
                root.removeHandler(handler)


@lru_cache(maxsize=4096)
def _one_curve(event: Any, orders: tuple[float, ...], group: int) -> tuple[float, ...]:
    from dp_accounting import dp_event
    from dp_accounting.rdp import rdp_privacy_accountant

    if isinstance(event, Gaussian):
        return tuple(order * group**2 / (2 * event.sigma**2) for order in orders)
    if group > 1:
        raise CannotAccount("Renyi divergences of groups of triples in a sample are not known")
    if isinstance(event, Sampled):
        with _silent():
            accountant = rdp_privacy_accountant.RdpAccountant(orders=list(orders))
            noisy = dp_event.GaussianDpEvent(event.sigma)
            accountant.compose(dp_event.PoissonSampledDpEvent(event.rate, noisy))
        found = np.asarray(accountant._rdp, float)
        # Rounding never makes a step that gives budget back.
        return tuple(np.where(np.isnan(found), np.inf, np.maximum(found, 0.0)).tolist())
    return tuple(
        amplified(int(order), event.rate, lambda k: event.rho * k) if order == int(order) and 2 <= order <= 128
        else math.inf
        for order in orders
    )  # fmt: skip


def amplified(order: int, rate: float, curve: Callable[[int], float], factor: float = FACTOR) -> float:
    """The divergence of a release from a Poisson batch, given that of the whole release without sampling, `curve`."""
    if rate == 1:
        return curve(order)
    logs = [(order - 1) * math.log1p(-rate) + math.log1p((order - 1) * rate)]
    for k in range(2, order + 1):
        chosen = math.lgamma(order + 1) - math.lgamma(k + 1) - math.lgamma(order - k + 1)
        logs.append(chosen + (order - k) * math.log1p(-rate) + k * math.log(rate) + (k - 1) * curve(k)
                    + (math.log(factor) if k > 2 else 0.0))  # fmt: skip
    return max(0.0, float(np.logaddexp.reduce(logs))) / (order - 1)


# -- what a budget pays for --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """What all releases together may cost, and what has been released already.

    limits: (order, divergence) pairs that the releases may not exceed either: what is left of a holding.
    """

    epsilon: float
    delta: float
    before: Spent = ()
    group: int = 1
    limits: tuple[tuple[float, float], ...] = ()

    def __post_init__(self) -> None:
        _check(self.delta, self.group)
        if not (self.epsilon > 0 and math.isfinite(self.epsilon)):
            raise TacitError(f"epsilon is a number above 0, not {self.epsilon}")

    def holds(self, more: Sequence[Segment]) -> bool:
        """Whether these releases too stay within it."""
        if self.limits and not Filter(self.limits).fits(more, group=self.group):
            return False
        whole = joined([*self.before, *more])
        if losses_are_known(whole, self.delta, self.group):
            # Nearly always the smaller bound, and many times faster to ask than all orders.
            return not whole or by_losses(whole, self.delta, group=self.group) <= self.epsilon
        return by_renyi(whole, self.delta, group=self.group) <= self.epsilon


@dataclass(frozen=True)
class HeldBy(Target):
    """The same for a triple that several parties hold, each of whom releases as much."""

    holders: int = 1

    def holds(self, more: Sequence[Segment]) -> bool:
        """Whether so many such releases stay within it."""
        return super().holds(more) and held_by([joined(more)], self.holders, self.delta)[0] <= self.epsilon


@dataclass(frozen=True)
class Capped(Target):
    """The same for releases that follow earlier ones: a filter keeps them below one order's divergence.

    The order is chosen before anything is released; with limits it is theirs.
    """

    def budgets(self) -> list[tuple[float, float]]:
        """Each (order, divergence) that gives no more than the epsilon; at least one."""
        left = dict(self.limits) if self.limits else dict.fromkeys(ORDERS, math.inf)
        found = [(order, CLOSE * min(most, allowed(order, self.epsilon, self.delta))) for order, most in left.items()]
        if not (found := [(order, most) for order, most in found if most > 0]):
            raise TacitError(
                f"nothing can be released for epsilon {self.epsilon:g} at delta {self.delta:g}: one of them is too "
                "small, or nothing is left of the holding"
            )
        return found

    def holds(self, more: Sequence[Segment]) -> bool:
        """Whether there is an order at which these releases too stay within it."""
        whole = joined([*self.before, *more])
        if any(isinstance(segment.event, SampledCurve) for segment in whole):
            return False
        orders, most = zip(*self.budgets(), strict=True)
        return bool((curve(whole, orders=orders, group=self.group) <= most).any())


def noise_for(target: Target, release: Callable[[float], Sequence[Segment]]) -> float:
    """The least noise multiplier, to a thousandth, with which `release(sigma)` stays within the target."""
    high, step = 0.0, math.log(2)
    while not target.holds(release(math.exp(high))):
        high += step
        if high > math.log(MOST_SIGMA):
            raise TacitError(
                f"no noise is enough for epsilon {target.epsilon:g} at delta {target.delta:g}: what was released "
                "before has used it up, or there is too little of it"
            )
    while high <= 0 and high > math.log(LEAST_SIGMA) and target.holds(release(math.exp(high - step))):
        high -= step
    low = high - step
    while high - low > CAREFUL / 2:
        middle = (low + high) / 2
        low, high = (low, middle) if target.holds(release(math.exp(middle))) else (middle, high)
    return math.exp(high)


def count_for(target: Target, release: Callable[[int], Sequence[Segment]], most: int = 1 << 40) -> int:
    """The most of something whole, steps or a batch's size, with which `release(count)` stays within the target."""
    if most < 1 or not target.holds(release(1)):
        return 0
    low = 1
    while low < most and target.holds(release(min(2 * low, most))):
        low = min(2 * low, most)
    high = min(2 * low, most)
    if low == most:
        return most
    while high - low > max(1, low // 1000):
        middle = (low + high) // 2
        low, high = (middle, high) if target.holds(release(middle)) else (low, middle)
    return low


class Filter:
    """A budget of Renyi divergences, fixed before anything is released, for choices that follow earlier releases.

    As long as no order's sum exceeds its budget, the whole has that divergence, however each release was chosen
    (Feldman and Zrnic 2021). Summing up what adaptive choices have cost afterwards is no such guarantee. Releases that
    hold only with some probability of their own are refused: their deltas have no budget here.
    """

    def __init__(self, budget: Sequence[tuple[float, float]]):
        if not budget:
            raise TacitError("a filter has a budget for at least one order")
        self.orders, self.most = (np.array(x, float) for x in zip(*budget, strict=True))
        if not (self.orders > 1).all():
            raise TacitError("the orders of a filter are above 1")
        self.used = np.zeros(len(self.orders))

    def fits(self, more: Sequence[Segment], *, group: int = 1) -> bool:
        """Whether no order's budget would be exceeded."""
        if any(isinstance(s.event, SampledCurve) and s.event.delta and s.count for s in more):
            return False
        return bool((self.used + curve(more, orders=self.orders.tolist(), group=group) <= self.most).all())

    def spend(self, more: Sequence[Segment]) -> None:
        """Charge it, or refuse."""
        if not self.fits(more):
            after = self.used + curve(more, orders=self.orders.tolist())
            order = float(self.orders[np.argmax(after - self.most)])
            raise TacitError(f"that would exceed the budget at the order {order:g}")
        self.used += curve(more, orders=self.orders.tolist())


def best_order(epsilon: float, delta: float) -> float:
    """The order at which normal noise has the most room under (epsilon, delta): of a budget with one order."""
    return max(ORDERS, key=lambda order: allowed(order, epsilon, delta) / order)


def _check(delta: float, group: int) -> None:
    if not 0 < delta < 1:
        raise TacitError(f"delta is above 0 and below 1, not {delta}")
    if group < 1:
        raise TacitError(f"a group has at least 1 triple, not {group}")
