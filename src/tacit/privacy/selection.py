"""Which rows of a gradient are released: the largest gap between row norms, noisy, and a test of it (DP-FLames).

Hu, Liu, Chen, Wang and Zhu (WWW 2023), Algorithm 2, after Zhu and Wang (2022). Norms are sorted, the number k of rows
is where the gap to the next is largest under Gumbel noise, and the k rows are released if a noisy test says that the
gap is wide. As printed its noise is too small: one triple moves two rows, each up or down by the row clip C2, so a gap
changes by up to 2 C2, and the changes of two gaps differ by up to 3 C2. `repaired` has the noise that this takes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from tacit.errors import BadValue

Tensor = Any


@dataclass(frozen=True)
class Selection:
    """The noisy gap and its test.

    Attributes
    ----------
    row_clip
        C2: no triple moves a row by more.
    sigma_r, sigma_p
        The noise of the gaps, and of the test.
    delta_t
        How often the test may be wrong.
    repaired
        Noise for how much gaps really change; False: as printed.
    tests
        False: whatever k is, its rows are released.
    """

    row_clip: float = 0.8
    sigma_r: float = 1.0
    sigma_p: float = 1.0
    delta_t: float = 1e-10
    repaired: bool = False
    tests: bool = True

    def __post_init__(self) -> None:
        for name in ("row_clip", "sigma_r", "sigma_p"):
            if not (value := getattr(self, name)) > 0:
                raise BadValue(f"{name} is a number above 0, not {value}")
        if not 0 < self.delta_t < 1:
            raise BadValue(f"delta_t is above 0 and below 1, not {self.delta_t}")

    @property
    def spread(self) -> float:
        """The scale of the Gumbel noise on gaps."""
        return (3 if self.repaired else 2) * self.row_clip * self.sigma_r

    @property
    def unit(self) -> float:
        """What the test takes a gap to change by at most."""
        return (2 if self.repaired else 1) * self.row_clip

    @property
    def offset(self) -> float:
        """What is taken off the tested gap, in deviations of the test's noise."""
        return math.sqrt(2 * math.log(1 / self.delta_t))

    def choose(self, norms: Tensor, first: int, gumbel: Tensor, normal: Tensor) -> tuple[Tensor, Tensor]:
        """How many rows, and whether they are released. `norms`: (..., n) from the largest on; `gumbel`: (..., n -
        first) for k = first to n - 1; `normal`: (...).
        """
        gaps = norms[..., :-1] - norms[..., 1:]
        place = (gaps[..., first - 1 :] + self.spread * gumbel).argmax(-1, keepdim=True)
        gap = gaps[..., first - 1 :].gather(-1, place)[..., 0]
        tested = gap.clamp(min=self.unit) + self.unit * self.sigma_p * (normal - self.offset)
        passed = tested > self.unit if self.tests else torch.ones_like(tested, dtype=torch.bool)
        return place[..., 0] + first, passed

    def chances(self, gaps: Tensor) -> Tensor:
        """How likely each k is, of its gaps: the largest of values with Gumbel noise is a softmax."""
        return torch.softmax(gaps.double() / self.spread, -1)

    def passes(self, gap: float) -> float:
        """How likely the test is to pass a gap."""
        if not self.tests:
            return 1.0
        return upper_tail(self.offset - (max(self.unit, gap) - self.unit) / (self.unit * self.sigma_p))

    def most_passes(self, share: float = 1.0) -> float:
        """How likely it is to pass at most, for k not below the batch size B, in a batch of `share` x B triples.

        A triple adds no more than 2 C2 to the sum of all row norms, so that the k-th norm, and its gap to the next, is
        at most 2 C2 x share.
        """
        return self.passes(2 * self.row_clip * share)

    @property
    def divergence(self) -> float:
        """What both cost of Renyi divergence, per order, if `repaired`."""
        return 1 / (8 * self.sigma_r**2) + (1 / (2 * self.sigma_p**2) if self.tests else 0.0)


def upper_tail(x: float) -> float:
    """How likely a standard normal is above x."""
    return 0.5 * math.erfc(x / math.sqrt(2))
