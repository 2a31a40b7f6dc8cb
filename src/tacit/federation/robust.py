"""Rows of several providers, some of whom may lie: how alike they are, and means that a few liars cannot move far.

Pure functions of a stack of rows, (providers, rows, width), all for the same rows. Where providers have different rows,
`present` says who has which, (providers, rows): then distances are over the rows that both have, and a mean of a row is
over those who have it. Distances and norms are root mean squares per number, so that they do not grow with the number
of rows. All is computed in float64. The order of providers matters in ties alone, which the first one wins.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tacit.errors import BadValue

Tensor = Any
CHUNK = 1 << 22
"""Numbers that are worked on at once."""


# -- how alike they are ------------------------------------------------------------------------------------------------


def norms(stack: Tensor, present: Tensor | None = None) -> Tensor:
    """(k,) how large the rows of each are. 0 for who has none."""
    return distances_to(torch.zeros_like(stack[0]), stack, present).nan_to_num(posinf=0.0)


def distances_to(own: Tensor, stack: Tensor, present: Tensor | None = None) -> Tensor:
    """(k,) how far each is from one's own rows, (n, d). Infinity for who has none of them."""
    total = count = torch.zeros(len(stack), dtype=torch.float64, device=stack.device)
    for rows, has, mine in _chunks(stack, present, own):
        total = total + (rows - mine).square().sum(-1).mul(has).sum(1)
        count = count + has.sum(1) * stack.shape[2]
    return torch.where(count > 0, (total / count.clamp(min=1)).sqrt(), torch.inf)


def cosines_to(own: Tensor, stack: Tensor, present: Tensor | None = None) -> Tensor:
    """(k,) the cosine between each and one's own rows, over the rows it has; 0 where either has no direction."""
    dot = mine = theirs = torch.zeros(len(stack), dtype=torch.float64, device=stack.device)
    for rows, has, own_rows in _chunks(stack, present, own):
        dot = dot + (rows * own_rows).sum(-1).mul(has).sum(1)
        theirs = theirs + rows.square().sum(-1).mul(has).sum(1)
        mine = mine + (own_rows.square().sum(-1) * has).sum(1)
    return _cosine(dot, mine, theirs)


def distances(stack: Tensor, present: Tensor | None = None) -> Tensor:
    """(k, k) how far all are from each other. Infinity between those without a row in common."""
    # Around a point in their midst, for the difference of large squares has few digits.
    dot, squares, common = _products(stack, present, _middle(stack, present))
    total = (squares + squares.T - 2 * dot).clamp(min=0)
    apart = torch.where(common > 0, (total / (common * stack.shape[2]).clamp(min=1)).sqrt(), torch.inf)
    return apart.fill_diagonal_(0)


def similarities(own: Tensor, stack: Tensor, present: Tensor | None = None) -> Tensor:
    """(k, k) the cosines between what each would change of one's own rows: copies, and those of one aim, are near 1."""
    dot, squares, _ = _products(stack, present, own)
    return _cosine(dot, squares, squares.T)


def trust(similarity: Tensor) -> Tensor:
    """(k,) weights from 0 to 1 that are small for those whose updates are like another's: FoolsGold.

    Honest providers have data of their own, and differ; Sybils want one thing, and do not. Whoever is like somebody
    that is even more like others is pardoned in part. Of random weights it sees nothing: they are like nobody's.

    Fung, Yoon and Beschastnikh: "The limitations of federated learning in Sybil settings", RAID 2020.
    """
    _check(similarity.ndim == 2 and len(similarity) == similarity.shape[1], "similarities are a square")
    alike = similarity.double().clamp(0, 1).clone().fill_diagonal_(0)  # to point away from each other is no collusion
    most = alike.amax(1)
    alike = alike * torch.where(most[:, None] < most[None], most[:, None] / most[None].clamp(min=1e-300), 1.0)
    weight = 1 - alike.amax(1)
    weight = weight / weight.amax().clamp(min=1e-300)
    return (torch.logit(weight.clamp(0, 1)) + 0.5).clamp(0, 1)


# -- whom to take ------------------------------------------------------------------------------------------------------


def krum_scores(apart: Tensor, liars: int) -> Tensor:
    """(k,) the sum of squared distances of each to its k - liars - 2 nearest others; `apart` is of `distances`.

    Blanchard, El Mhamdi, Guerraoui and Stainer: "Machine learning with adversaries: Byzantine tolerant gradient
    descent", NeurIPS 2017.
    """
    count = len(apart)
    _check(apart.shape == (count, count), "distances are a square")
    _check(liars >= 0 and count > 2 * liars + 2, f"Krum needs more than 2 x liars + 2 providers; {count} with {liars} "
           "liars are too few")  # fmt: skip
    others = apart.double().square().clone().fill_diagonal_(torch.inf)
    return others.sort(1).values[:, : count - liars - 2].sum(1)


def krum(stack: Tensor, liars: int, present: Tensor | None = None) -> int:
    """Whose rows have the nearest neighbours: the one to take, if so many lie."""
    return multi_krum(stack, liars, 1, present)[0]


def multi_krum(stack: Tensor, liars: int, chosen: int, present: Tensor | None = None) -> list[int]:
    """The `chosen` with the best scores of Krum, the best first."""
    _check(0 < chosen <= len(stack) - liars, f"chosen is from 1 to {len(stack) - liars}, the honest ones; not {chosen}")
    scores = krum_scores(distances(stack, present), liars)
    return [int(each) for each in scores.sort(stable=True).indices[:chosen]]


# -- means -------------------------------------------------------------------------------------------------------------


def mean(stack: Tensor, present: Tensor | None = None, before: Tensor | None = None) -> Tensor:
    """(n, d) the plain mean, which one liar can move anywhere."""
    return _row_by_row(stack, present, before, lambda rows, has: rows.sum(0) / has.sum(0).clamp(min=1)[:, None])


def trimmed_mean(stack: Tensor, share: float, present: Tensor | None = None, before: Tensor | None = None) -> Tensor:
    """(n, d) number by number, the mean without the `share` of the largest and that of the smallest.

    With c values, floor(share x c) go at either end. `before`: what rows that nobody has stay as.

    Yin, Chen, Ramchandran and Bartlett: "Byzantine-robust distributed learning: towards optimal statistical rates",
    ICML 2018.
    """
    _check(0 <= share < 0.5, f"a share is at least 0 and below a half, not {share}")

    def middle(ordered: Tensor, count: Tensor) -> Tensor:
        cut = torch.floor(share * count + 1e-9)
        place = torch.arange(len(ordered), device=ordered.device)[:, None]
        kept = (place >= cut) & (place < count - cut)
        total = torch.where(kept[:, :, None], ordered, 0.0).sum(0)
        return total / (count - 2 * cut).clamp(min=1)[:, None]

    return _row_by_row(stack, present, before, lambda rows, has: middle(*_ordered(rows, has)))


def median(stack: Tensor, present: Tensor | None = None, before: Tensor | None = None) -> Tensor:
    """(n, d) number by number, the middle value, or the mean of the two in the middle."""

    def middle(ordered: Tensor, count: Tensor) -> Tensor:
        low, high = ((count - 1).clamp(min=0) // 2).long(), (count // 2).clamp(max=len(ordered) - 1).long()
        at = [each[None, :, None].expand(1, -1, ordered.shape[2]) for each in (low, high)]
        return (ordered.gather(0, at[0])[0] + ordered.gather(0, at[1])[0]) / 2

    return _row_by_row(stack, present, before, lambda rows, has: middle(*_ordered(rows, has)))


def clipped_mean(stack: Tensor, present: Tensor | None = None, before: Tensor | None = None) -> Tensor:
    """(n, d) row by row, the median plus the mean of the steps from it to each, none longer than the median step.

    A liar moves a row by no more than an honest provider of the usual distance does. That is one step of centred
    clipping, with a radius that each row sets for itself.

    Karimireddy, He and Jaggi: "Learning from history for Byzantine robust optimization", ICML 2021.
    """
    return _from_median(stack, present, before, lambda length, usual: (usual / length.clamp(min=1e-300)).clamp(max=1.0))


def screened_mean(stack: Tensor, far: float, present: Tensor | None = None, before: Tensor | None = None) -> Tensor:
    """(n, d) row by row, the mean of those that are not more than `far` times as far from the median as the median is.

    Whoever is far from most others in a row says nothing about it, where a median still follows a little.
    """
    _check(far >= 1, f"far is at least 1, not {far}")
    return _from_median(stack, present, before, lambda length, usual: (length <= far * usual).double(), weighted=True)


def _from_median(
    stack: Tensor,
    present: Tensor | None,
    before: Tensor | None,
    share: Callable[[Tensor, Tensor], Tensor],
    *,
    weighted: bool = False,
) -> Tensor:
    """The median, and a mean of shares of the steps from it; a share follows a step's length and the median of these.

    `weighted`: over the sum of shares, and not over all who have the row.
    """
    centre, at = median(stack, present, before), 0
    whole = torch.empty_like(centre)
    for rows, has, middle in _chunks(stack, present, centre):
        steps = (rows - middle) * has[:, :, None]
        length = steps.square().sum(-1).sqrt()
        count = has.sum(0)
        ordered = torch.where(has > 0, length, torch.inf).sort(0).values
        usual = ordered.gather(0, ((count - 1).clamp(min=0) // 2).long()[None])[0]
        part = share(length, usual) * has
        total = (part.sum(0) if weighted else count).clamp(min=1e-300)
        found = middle + (steps * part[:, :, None]).sum(0) / total[:, None]
        whole[at : at + len(found)] = torch.where(count[:, None] > 0, found, middle).to(whole)
        at += len(found)
    return whole


def _row_by_row(
    stack: Tensor, present: Tensor | None, before: Tensor | None, made: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """Rows that `made` makes of those of all, and of who has them; what is absent is 0 there."""
    whole = torch.empty_like(stack[0])
    at = 0
    for rows, has, was in _chunks(stack, present, before):
        found, owned = made(rows, has), has.sum(0) > 0
        if before is not None:
            found = torch.where(owned[:, None], found, was)
        else:
            _check(bool(owned.all()), "a row that nobody has stays as it was before: say how that is")
        whole[at : at + len(found)] = found.to(whole)
        at += len(found)
    return whole


def _ordered(rows: Tensor, has: Tensor) -> tuple[Tensor, Tensor]:
    """The values of each number in order, those that are absent last, and how many there are of each row."""
    return torch.where(has[:, :, None] > 0, rows, torch.inf).sort(0).values, has.sum(0)


def _products(stack: Tensor, present: Tensor | None, around: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(k, k) each: dot products of rows less `around`, the first's squares, and rows in common; all over those."""
    size = (len(stack), len(stack))
    dot, squares, common = (torch.zeros(size, dtype=torch.float64, device=stack.device) for _ in range(3))
    for rows, has, middle in _chunks(stack, present, around):
        moved = (rows - middle) * has[:, :, None]
        flat = moved.flatten(1)
        dot += flat @ flat.T
        squares += moved.square().sum(-1) @ has.T
        common += has @ has.T
    return (dot + dot.T) / 2, squares, common  # a product of matrices is symmetric but for rounding


def _middle(stack: Tensor, present: Tensor | None) -> Tensor:
    has = torch.ones(stack.shape[:2], device=stack.device) if present is None else present.to(stack)
    total = torch.where(has[:, :, None] > 0, stack, 0).sum(0, dtype=torch.float64)
    return total / has.sum(0).clamp(min=1)[:, None]


def _cosine(dot: Tensor, first: Tensor, second: Tensor) -> Tensor:
    length = first.sqrt() * second.sqrt()
    return torch.where(length > 0, dot / length.clamp(min=1e-300), 0.0).clamp(-1, 1)


def _chunks(stack: Tensor, present: Tensor | None, beside: Tensor | None) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Some rows of all, who has them as 0 and 1, and the same rows of `beside`; in float64. What is absent is 0."""
    _check(stack.ndim == 3 and len(stack) > 0, "a stack is (providers, rows, width), of one provider at least")
    _check(present is None or present.shape == stack.shape[:2], "present is (providers, rows)")
    _check(beside is None or beside.shape == stack.shape[1:], f"rows beside a stack are {tuple(stack.shape[1:])}")
    step = max(1, CHUNK // max(1, math.prod((len(stack), stack.shape[2]))))
    for at in range(0, stack.shape[1], step):
        rows = stack[:, at : at + step].double()
        has = torch.ones(rows.shape[:2], dtype=torch.float64, device=rows.device)
        if present is not None:
            has = present[:, at : at + step].double()
            rows = torch.where(has[:, :, None] > 0, rows, 0.0)
        other = rows[0] if beside is None else beside[at : at + step].double()
        _check(bool(rows.isfinite().all() & other.isfinite().all()), "rows hold numbers that are not finite")
        yield rows, has, other


def _check(right: bool, wrong: str) -> None:
    if not right:
        raise BadValue(wrong)
