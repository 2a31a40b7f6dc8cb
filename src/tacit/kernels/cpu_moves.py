"""The end of a step on a CPU, in numba: rows on as many threads as torch has."""

from __future__ import annotations

from typing import Any

import numpy as np

from tacit.kernels.cpu import Array, jit, shared_out
from tacit.kernels.moves import KINDS, betas
from tacit.optimizers import SGD, Adagrad, Optimizer

Tensor = Any
OF_SGD, OF_ADAGRAD = KINDS[SGD], KINDS[Adagrad]


@jit
def _move(first: int, last: int, kind: int, table: Array, gradient: Array, memory: Array, square: Array, owner: Array,
          divisor: Array, active: Array, rate: Array, root: Array, which: Array, beta1: Any, beta2: Any, new1: Any,
          new2: Any, eps: Any, frozen: int) -> None:  # fmt: skip
    """Rows first to last. new1, new2: 1 - beta1 and 1 - beta2, which float32 numbers would not give exactly enough."""
    one, width = np.float32(1), table.shape[1]
    moving = width - frozen
    for row in range(first, last):
        party = owner[row]
        if kind == OF_ADAGRAD:  # rows without a gradient stay as they are: most of a table need not be read
            touched = False
            for d in range(width):
                touched |= gradient[row, d] != 0
            if not touched:
                continue
        if active[party]:
            over, pace, second = one / divisor[party], rate[party], one / root[party]
            own = row + which[party] * len(table)
            for d in range(width):
                g = gradient[row, d] * over
                m = memory[own, d]
                if kind == OF_SGD:
                    m = beta1 * m + g
                    update = m
                elif kind == OF_ADAGRAD:
                    m = m + g * g
                    update = g / (np.sqrt(m) + eps)
                else:
                    m = m + new1 * (g - m)
                    v = beta2 * square[own, d] + new2 * g * g
                    square[own, d] = v
                    update = m / (np.sqrt(v) * second + eps)
                memory[own, d] = m
                if d < moving:
                    table[row, d] -= pace * update
        gradient[row] = 0


def move(optimizer: Optimizer, table: Tensor, gradient: Tensor, memory: list[Tensor], owner: Tensor, divisor: Tensor,
         active: Tensor, corrected: tuple[Tensor, Tensor], which: Tensor, frozen: int) -> None:  # fmt: skip
    """See `tacit.kernels.moves.Mover`."""
    tensors = (table, gradient, memory[0], memory[-1], owner, divisor, active, *corrected, which)
    arrays = [tensor.numpy() for tensor in tensors]
    kept, eps = betas(optimizer), getattr(optimizer, "eps", 0.0)
    numbers = [np.float32(number) for number in (*kept, *(1 - beta for beta in kept), eps)]
    shared_out(len(table), table.numel(), _move, KINDS[type(optimizer)], *arrays, *numbers, frozen)
