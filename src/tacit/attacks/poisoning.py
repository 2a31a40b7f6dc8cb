"""Providers who lie: what they would send instead of what they learnt. Pure functions of rows, for trials of defences.

Each takes `before`, the rows that an update begins with, and `now`, those that the liar wants to bring in or would have
trained, (rows, width); and gives the rows of `count` liars, (count, rows, width). What is random follows from `seed`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tacit.draws import Purpose, Stream
from tacit.errors import BadValue

Tensor = Any


def random_weights(before: Tensor, now: Tensor, count: int, *, strength: float = 1.0, seed: int = 0) -> Tensor:
    """Noise instead of rows, as large as `now` is: no aim, no likeness to anybody. `strength`: times that large."""
    size = strength * now.double().square().mean().sqrt()
    return (size * _noise(now, count, seed)).to(now)


def sign_flip(before: Tensor, now: Tensor, count: int, *, strength: float = 1.0, seed: int = 0) -> Tensor:
    """The other way: as far from `before` as training went, times `strength`, in the opposite direction."""
    return _repeated(before - strength * (now - before), count)


def scaled(before: Tensor, now: Tensor, count: int, *, strength: float = 10.0, seed: int = 0) -> Tensor:
    """The right way, or the liar's, too far: so that a mean of many goes where this one wants."""
    return _repeated(before + strength * (now - before), count)


def sybil_copies(before: Tensor, now: Tensor, count: int, *, strength: float = 0.0, seed: int = 0) -> Tensor:
    """One update under several names. `strength`: noise on each copy, relative to the update, as a disguise."""
    size = strength * (now - before).double().square().mean().sqrt()
    return (now.double() + size * _noise(now, count, seed)).to(now)


def colluders(before: Tensor, now: Tensor, count: int, *, strength: float = 1.0, seed: int = 0) -> Tensor:
    """One aim by unequal updates: what each has of its own cancels out, and their mean is `now` exactly.

    With `strength` 1 the part of its own is as large as the update, and with many of them two updates have a cosine of
    about a half; larger, and they look like strangers.
    """
    if count < 2:
        raise BadValue(f"to collude takes two, not {count}")
    noise = _noise(now, count, seed)
    noise = noise - noise.mean(0)
    noise = noise / noise.square().mean((1, 2), keepdim=True).sqrt().clamp(min=1e-300)
    noise = noise - noise.mean(0)  # of one size each, and again without a sum
    size = strength * (now - before).double().square().mean().sqrt()
    return (now.double() + size * noise).to(now)


def _noise(like: Tensor, count: int, seed: int) -> Tensor:
    """(count, rows, width) standard normal numbers."""
    if count < 1:
        raise BadValue(f"there is one liar at least, not {count}")
    drawn = [Stream(seed, Purpose.POISON, party=party).normal(like.numel()) for party in range(count)]
    return torch.stack([torch.from_numpy(each) for each in drawn]).reshape(count, *like.shape).to(like.device)


def _repeated(rows: Tensor, count: int) -> Tensor:
    if count < 1:
        raise BadValue(f"there is one liar at least, not {count}")
    return rows[None].repeat(count, 1, 1)


ADVERSARIES: dict[str, Callable[..., Tensor]] = {
    "random": random_weights,
    "flip": sign_flip,
    "scaled": scaled,
    "copies": sybil_copies,
    "colluders": colluders,
}
