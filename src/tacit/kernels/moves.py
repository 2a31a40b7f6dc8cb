"""The end of a step by fused kernels: the mean, a dense optimizer, an empty gradient, in one pass over each table.

Operation by operation torch reads and writes a table some forty times for Adam; here it is seven.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, Protocol

import torch

from tacit.optimizers import SGD, Adagrad, Adam, Optimizer

Tensor = Any
KINDS: dict[type[Optimizer], int] = {SGD: 0, Adagrad: 1, Adam: 2}
"""Optimizers that are covered, by what the kernels call them."""


class Mover(Protocol):
    """Moves the rows of active parties, and empties the gradient of all. `frozen`: so many last numbers of a row stay.

    `owner`: (rows,) the party of each. `divisor`, `active`: (parties,). `corrected`: see `corrections`. `which`:
    (parties,) which of several memories, one after the other in its tables.
    """

    def __call__(
        self, optimizer: Optimizer, table: Tensor, gradient: Tensor, memory: list[Tensor], owner: Tensor,
        divisor: Tensor, active: Tensor, corrected: tuple[Tensor, Tensor], which: Tensor, frozen: int,
    ) -> None: ...  # fmt: skip


def mover_for(device: str, optimizer: Optimizer, dtype: torch.dtype) -> Mover | None:
    """The kernel of this kind of device; None: there is none here, or it does not know the optimizer."""
    if type(optimizer) not in KINDS or dtype != torch.float32:
        return None
    if device == "cpu" and find_spec("numba") is not None:
        from tacit.kernels import cpu_moves

        return cpu_moves.move
    if device == "cuda" and find_spec("triton") is not None:
        from tacit.kernels import gpu_moves

        return gpu_moves.move
    return None


def corrections(optimizer: Optimizer, moments: Tensor, pace: Tensor) -> tuple[Tensor, Tensor]:
    """(parties,): the learning rate, and what Adam divides the root of the second moment by."""
    if not isinstance(optimizer, Adam):
        rate = optimizer.learning_rate * pace.float()
        return rate, rate
    step = moments.clamp(min=1).double()
    rate = optimizer.learning_rate * pace / (1 - optimizer.beta1**step)
    return rate.float(), (1 - optimizer.beta2**step).sqrt().float()


def betas(optimizer: Optimizer) -> tuple[float, float]:
    """What of its memory an optimizer keeps; Adagrad all of it."""
    if isinstance(optimizer, Adam):
        return optimizer.beta1, optimizer.beta2
    return getattr(optimizer, "momentum", 0.0), 0.0
