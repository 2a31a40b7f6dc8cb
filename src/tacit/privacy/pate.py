"""Votes of teachers with noise (PATE), and what they cost: as FKGE counts it, and as it is.

A teacher sees its own part of what is protected and nothing of the others'. What leaves is a noisy vote of all of them,
so that one part, however it is, moves a count by one at most.

    LaplaceVotes    the larger of two counts, each with Laplace noise (Papernot et al., ICLR 2017; FKGE, Peng et al.
                    2021). Published mode: the parts are of rows, every one of which depends on every triple, so no
                    epsilon of it protects a triple
    GaussianVotes   whether a count with normal noise is above a share of the teachers. The parts are of triples: one
                    more or less changes one teacher, and so the count by 1. Every label is one `Gaussian` event

Noise and cost follow from one object: whoever counts takes the deviation from whoever draws.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from tacit.draws import Ahead, Purpose, Secret, Stream
from tacit.errors import BadValue, TacitError
from tacit.privacy.events import Gaussian, Segment, Spent, joined

Tensor = Any
ORDERS = tuple(range(1, 257))
"""Moments that are tried."""
WHY_NONE = (
    "the rows of the client are sent through a matrix without noise, and as many known pairs as it has columns undo it",
    "one row is no unit: every row depends on every triple, so no statement about a triple follows from the votes",
    "the published accounting takes the scale of the noise for its inverse, and counts a batch of labels as one vote",
    "whether a peer improved is told to others without noise",
)
"""Why the published mode guarantees nothing."""


def moment(order: int, gamma: float, gap: float | None = None) -> float:
    """A bound of the log moment of one vote whose two counts have Laplace noise of scale 1 / gamma.

    2 gamma^2 l (l + 1), or less if nearly all teachers agree: `gap` is the difference of the two counts (theorems 2
    and 3 of Papernot et al. 2017). FKGE prints exp(2 gamma q) where the theorem has exp(2 gamma) q, and that is no
    number. A bound that knows the gap depends on private votes, and may not be shown to anybody.
    """
    if order < 1 or not gamma >= 0:
        raise BadValue(f"a moment has an order from 1 on and gamma at least 0, not {order} and {gamma}")
    always = 2 * gamma**2 * order * (order + 1)
    if gap is None or gamma == 0:
        return always
    wrong = (2 + gamma * gap) / (4 * math.exp(gamma * gap))
    if not wrong < math.expm1(2 * gamma) / math.expm1(4 * gamma):
        return always
    right = math.log1p(-wrong) - math.log1p(-wrong * math.exp(2 * gamma))
    found = float(torch.logaddexp(
        torch.tensor(math.log1p(-wrong) + order * right, dtype=torch.float64),
        torch.tensor(math.log(wrong) + 2 * gamma * order, dtype=torch.float64),
    ))  # fmt: skip
    return min(always, max(found, 0.0))


def by_moments(votes: int | Sequence[float], gamma: float, delta: float) -> tuple[float, int]:
    """(epsilon, the moment that gives it) of so many votes, or of votes with these gaps.

    >>> epsilon, order = by_moments(29, 0.05, 1e-5)
    >>> round(epsilon, 5), order
    (2.72921, 9)
    """
    if not 0 < delta < 1:
        raise BadValue(f"delta is above 0 and below 1, not {delta}")

    def total(order: int) -> float:
        if isinstance(votes, int):
            return votes * moment(order, gamma)
        return sum(moment(order, gamma, gap) for gap in votes)

    return min(((total(order) - math.log(delta)) / order, order) for order in ORDERS)


class LaplaceVotes:
    """The larger of two noisy counts. scale: of the Laplace noise; 0: none.

    Draws follow a seed: this mode protects nothing that a secret could.
    """

    def __init__(self, scale: float, stream: Stream):
        if not (scale >= 0 and math.isfinite(scale)):
            raise BadValue(f"the scale of the votes' noise is at least 0, not {scale}")
        self.scale, self.stream = scale, stream
        self.votes = self.batches = 0
        self._draws: Ahead | None = None

    def labels(self, ayes: Tensor, teachers: int) -> Tensor:
        """(b,) bool: what the teachers say, given how many of them say yes."""
        ahead = 2 * ayes.double() - teachers  # of those who say yes
        if self.scale:
            if self._draws is None or self._draws.device != ayes.device:
                self._draws = Ahead(self.stream, ayes.device)
            tail = self._draws.uniform(self.batches, 2 * len(ayes)).reshape(2, -1) - 0.5
            noise = tail.sign() * torch.log1p((-2 * tail.abs()).clamp(min=-1 + 2.0**-53))
            ahead -= self.scale * (noise[1] - noise[0])
        self.votes += len(ayes)
        self.batches += 1
        found: Tensor = ahead > 0
        return found

    def accounting(self, delta: float) -> dict[str, Any]:
        """What the paper's way of counting gives, and what it leaves out. None of these numbers is a guarantee."""
        as_drawn = None
        if self.scale:
            as_drawn = min(by_moments(self.votes, 1 / self.scale, delta)[0], 2 * self.votes / self.scale)
        return {
            "delta": delta,
            "scale": self.scale,
            "votes": self.votes,
            "batches": self.batches,
            "a batch as one vote, the scale for its inverse": by_moments(self.batches, self.scale, delta)[0],
            "every vote, the scale for its inverse": by_moments(self.votes, self.scale, delta)[0],
            "every vote, the noise that was drawn": as_drawn,
        }


class GaussianVotes:
    """Whether a noisy count is above a share of the teachers.

    Parameters
    ----------
    sigma
        Deviation of the noise. A triple changes one teacher, so it is the multiplier too.
    most
        How many labels there will be at most, fixed before the first.
    secret
        Draws the noise.
    party
        Whose votes these are, in the draws.
    share
        Of the teachers. It is paid for the noisy count, so this costs nothing, whatever it is.
    """

    def __init__(self, sigma: float, most: int, secret: Secret, party: int = 0, share: float = 0.5):
        if not (sigma > 0 and math.isfinite(sigma)):
            raise BadValue(f"the deviation of the votes' noise is above 0, not {sigma}")
        self.sigma, self.most, self.secret, self.party, self.share = sigma, most, secret, party, share
        self.votes = self.batches = 0

    def labels(self, ayes: Tensor, teachers: int) -> Tensor:
        """(b,) bool; refused where the number fixed in advance would be exceeded, before anything is looked at."""
        if self.votes + len(ayes) > self.most:
            raise TacitError(f"no votes are left: {self.most:,} were fixed in advance, and {self.votes:,} are used")
        self.votes += len(ayes)
        noise = self.secret.normal(Purpose.NOISE_VOTE, self.party, self.batches, len(ayes), ayes.device)
        self.batches += 1
        found: Tensor = ayes.float() + self.sigma * noise > self.share * teachers
        return found

    @property
    def spent(self) -> Spent:
        """Every label that was given."""
        return joined([Segment(Gaussian(self.sigma), self.votes)])

    @property
    def reserved(self) -> Spent:
        """Every label that may be given."""
        return joined([Segment(Gaussian(self.sigma), self.most)])
