"""Counting for ranks by fused kernels: how many entities beat the true answer, without keeping any score.

A kernel counts what is clear beyond rounding, and lists for each query the few candidates that rounding could decide;
`evaluation.ranking` scores those pair by pair. So ranks do not depend on which kernel counted.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple, Protocol

Tensor = Any


class Known(NamedTuple):
    """The true answers of each query, which are no candidates: those from `first` to `last` (q,) of `answers`.

    `others`: (q,) how many they are without the one that is asked for, which need not be among them.
    """

    first: Tensor
    last: Tensor
    answers: Tensor
    others: Tensor


class Counts(NamedTuple):
    """Of each query, (q,): how many candidates are clearly better, how many entities are close, and (q, listed) which.

    A close entity e that is a true answer is listed twice: as e, and as -1 - e.
    """

    better: Tensor
    close: Tensor
    which: Tensor


class Counter(Protocol):
    """Compares every query (q, width) with every entity row by a geometry.

    `target`: (q,) the true answer that is asked for, which is no candidate. `value`, `slack`: (q,) its product or
    distance, and how close to it is close. `listed`: how many close ones are listed; `close` says how many there are.
    `memory`: bytes for products.
    """

    def __call__(self, geometry: str, query: Tensor, entity: Tensor, target: Tensor, value: Tensor, slack: Tensor,
                 known: Known, listed: int, memory: float) -> Counts: ...  # fmt: skip


@cache
def counter_for(device: str) -> Counter | None:
    """The kernel of this kind of device; None: there is none here."""
    if device == "cpu" and find_spec("numba") is not None:
        from tacit.kernels.cpu_counting import count

        return count
    if device == "cuda" and find_spec("triton") is not None:
        from tacit.kernels.gpu_counting import count

        return count
    return None
