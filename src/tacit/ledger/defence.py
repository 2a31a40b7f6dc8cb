"""What a provider does about updates of whom some may be lies: which to leave out, and how to bring the rest together.

A defence sees rows and nothing else: those that the provider's own last training began with and ended with, and those
of others. So whatever follows from it tells no more of the provider's triples than its own published rows do.

Checks leave out whole updates. Each compares what an update changed with what others changed:

    norm         how much it changed: more than `far` times the median
    distance     how far it is from the own rows: more than `far` times the median
    cosine       whether it changed rows in the direction of the own training: a cosine below `least`
    krum         all but the one with the nearest neighbours
    multi-krum   as many as may lie, those with the farthest neighbours
    copies       all but one of those that are nearly the same: they differ from the median of all with a cosine above
                 `alike`

A mean brings the own rows and those that are left together, row by row over those who have the row:

    mean       one liar can move it anywhere
    trimmed    without the largest and the smallest `liars` of each number
    median     of each number
    clipped    the mean of steps from the median, none of them longer than the median of their lengths
    screened   the mean of those that are no farther from the median than `outlying` times the median of that
    trusted    weights against updates that are alike (FoolsGold)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from tacit.errors import BadValue
from tacit.federation import robust

Tensor = Any
Check = Literal["norm", "distance", "cosine", "krum", "multi-krum", "copies"]
Mean = Literal["mean", "trimmed", "median", "clipped", "screened", "trusted"]

FEWEST = 3
"""Others that a comparison with what is usual takes."""


@dataclass(frozen=True)
class Pile:
    """Rows of one table: of the provider, and of others.

    Attributes
    ----------
    base, own
        (n, d) rows that the own last training began with, and those it ended with.
    others
        (k, n, d) the same rows of others; whatever stands where they have none.
    present
        (k, n) bool: who has which.
    """

    base: Tensor
    own: Tensor
    others: Tensor
    present: Tensor

    @property
    def all(self) -> tuple[Tensor, Tensor]:
        """Everybody's rows, the own ones first, and who has which."""
        mine = self.present.new_ones((1, len(self.own)))
        return torch.cat([self.own[None], self.others]), torch.cat([mine, self.present])

    def only(self, kept: Sequence[int]) -> Pile:
        """With some of the others."""
        chosen = torch.tensor(list(kept), dtype=torch.int64, device=self.others.device)
        return Pile(self.base, self.own, self.others[chosen], self.present[chosen])


@dataclass(frozen=True)
class Defence:
    """Checks and a mean. `liars`: the share of all providers, the own one among them, that may lie. `few`: rows that
    fewer have, oneself among them, stay as the own ones are. `odd`: rows of an update that answers some question in
    one way for so much larger a share of all heads than most others do are left out (`provider.Shelf.answers`).
    """

    checks: tuple[Check, ...] = ()
    mean: Mean = "mean"
    liars: float = 0.3
    far: float = 3.0
    least: float = 0.0
    alike: float = 0.9
    outlying: float = 1.5
    few: int = 0
    odd: float | None = None

    def __post_init__(self) -> None:
        for check in self.checks:
            if check not in get_args(Check):
                raise BadValue(f"a check is one of {', '.join(get_args(Check))}; not {check!r}")
        if self.mean not in get_args(Mean):
            raise BadValue(f"a mean is one of {', '.join(get_args(Mean))}; not {self.mean!r}")
        if not 0 <= self.liars < 0.5:
            raise BadValue(f"the share of liars is at least 0 and below a half, not {self.liars}")
        if not self.far >= 1 or not -1 <= self.least < self.alike <= 1:
            raise BadValue("far is at least 1, and least below alike, both cosines")

    # -- whom to leave out ---------------------------------------------------------------------------------------------

    def judge(self, piles: Sequence[Pile]) -> list[str | None]:
        """Of each of the others why it is left out; None: it is not."""
        found: list[str | None] = [None] * len(piles[0].others)
        for check in self.checks:
            for at, reason in enumerate(getattr(self, f"_{check.replace('-', '_')}")(piles) if found else ()):
                found[at] = found[at] or reason
        return found

    def _norm(self, piles: Sequence[Pile]) -> list[str | None]:
        return self._farther(piles, "base", "changed {0:.3g} times as much as is usual")

    def _distance(self, piles: Sequence[Pile]) -> list[str | None]:
        return self._farther(piles, "own", "is {0:.3g} times as far from the own rows as is usual")

    def _farther(self, piles: Sequence[Pile], whence: str, words: str) -> list[str | None]:
        """Who is more than `far` times as far from some rows as the median of the others is, of those who have any of
        them; of fewer than three nobody can be told.
        """
        most = [0.0] * len(piles[0].others)
        for pile in piles:
            away = robust.distances_to(getattr(pile, whence), pile.others, pile.present)
            has = away.isfinite()  # who has none of the rows says nothing of them, nor of what is usual
            if int(has.sum()) < FEWEST:
                continue
            times = torch.where(has, away, 0.0) / away[has].median().clamp(min=1e-30)
            most = [max(pair) for pair in zip(most, times.tolist(), strict=True)]
        return [words.format(times) if times > self.far else None for times in most]

    def _cosine(self, piles: Sequence[Pile]) -> list[str | None]:
        least = [1.0] * len(piles[0].others)
        for pile in piles:
            towards = robust.cosines_to(pile.own - pile.base, pile.others - pile.base, pile.present)
            least = [min(pair) for pair in zip(least, towards.tolist(), strict=True)]
        return [
            f"goes another way: a cosine of {c:.2f} with the own changes" if c < self.least else None for c in least
        ]

    def _krum(self, piles: Sequence[Pile]) -> list[str | None]:
        return self._nearest(piles, 1)

    def _multi_krum(self, piles: Sequence[Pile]) -> list[str | None]:
        return self._nearest(piles, None)

    def _nearest(self, piles: Sequence[Pile], many: int | None) -> list[str | None]:
        """All but so many, or but those who do not lie, by their distance to their nearest neighbours."""
        everybody = len(piles[0].others) + 1
        if everybody < 3:
            return ["stands alone: Krum compares three at least"] * (everybody - 1)
        liars = min(int(self.liars * everybody), (everybody - 3) // 2)
        total = torch.zeros(everybody, dtype=torch.float64)
        for pile in piles:
            apart = robust.distances(*pile.all)
            usual = apart[apart.isfinite() & (apart > 0)]
            apart = torch.where(apart.isfinite(), apart, usual.max() if len(usual) else 0.0)
            scores = robust.krum_scores(apart, liars).cpu()
            total += scores / scores.median().clamp(min=1e-300)
        order = [each - 1 for each in total.sort(stable=True).indices.tolist() if each]
        kept = set(order[: many or max(everybody - 1 - liars, 1)])
        return [None if at in kept else "others have nearer neighbours (Krum)" for at in range(everybody - 1)]

    def _copies(self, piles: Sequence[Pile]) -> list[str | None]:
        """Whoever differs from the median of all in the way that one before it in the order of the log does.

        From the median and not from one's own rows: all that are newer than these differ from them in one way.
        """
        alike = torch.ones(len(piles[0].others), len(piles[0].others), dtype=torch.float64)
        for pile in piles:
            centre = robust.median(*pile.all, pile.own)
            alike = torch.minimum(alike, robust.similarities(centre, pile.others, pile.present).cpu())
        found: list[str | None] = []
        for at, row in enumerate(alike.tolist()):
            twin = next((other for other in range(at) if row[other] > self.alike and found[other] is None), None)
            found.append(None if twin is None else f"is a copy: a cosine of {row[twin]:.2f} with another's changes")
        return found

    # -- how the rest comes together -----------------------------------------------------------------------------------

    def combine(self, piles: Sequence[Pile]) -> list[Tensor]:
        """(n, d) of each table: the own rows and those of all others that are there."""
        if self.mean == "trusted":
            return self._trusted(piles)
        found = []
        for pile in piles:
            rows = self._combined(*pile.all, pile.own)
            if self.few:
                enough = pile.present.sum(0) + 1 >= self.few
                rows = torch.where(enough[:, None], rows, pile.own)
            found.append(rows)
        return found

    def _combined(self, stack: Tensor, present: Tensor, own: Tensor) -> Tensor:
        if self.mean == "median":
            return robust.median(stack, present, own)
        if self.mean == "clipped":
            return robust.clipped_mean(stack, present, own)
        if self.mean == "screened":
            return robust.screened_mean(stack, self.outlying, present, own)
        if self.mean == "trimmed":
            return robust.trimmed_mean(stack, self.liars, present, own)
        return robust.mean(stack, present, own)

    def _trusted(self, piles: Sequence[Pile]) -> list[Tensor]:
        alike = torch.ones(len(piles[0].others), len(piles[0].others), dtype=torch.float64)
        for pile in piles:
            alike = torch.minimum(alike, robust.similarities(pile.base, pile.others, pile.present).cpu())
        weight = torch.cat([torch.ones(1, dtype=torch.float64), robust.trust(alike)])
        found = []
        for pile in piles:
            stack, present = pile.all
            each = weight.to(stack)[:, None] * present
            rows = torch.where(present[:, :, None], stack, 0.0)
            found.append((rows * each[:, :, None]).sum(0) / each.sum(0)[:, None])
        return found
