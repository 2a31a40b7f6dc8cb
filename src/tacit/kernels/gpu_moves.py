"""The end of a step on a GPU in one launch for each table: the mean, a dense optimizer, an empty gradient.

Operation by operation torch reads and writes a table some forty times for Adam; here it is seven.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from tacit.optimizers import SGD, Adagrad, Adam, Optimizer

Tensor = Any
BLOCK = 1024
KINDS: dict[type[Optimizer], int] = {SGD: 0, Adagrad: 1, Adam: 2}
"""Optimizers that are covered, by what the kernel calls them."""


@triton.jit
def _move(
    table, gradient, memory, square, owner, divisor, active, rate, second, count, first_beta, second_beta, eps,
    WIDTH: tl.constexpr, FROZEN: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = at < count
    party = tl.load(owner + at // WIDTH, mask=there, other=0)
    live = there & (tl.load(active + party, mask=there, other=0) != 0)
    g = tl.load(gradient + at, mask=there, other=0.0)
    if KIND == 1:
        there = there & (g != 0.0)  # the others stay as they are: most of a table need not be read
        live = live & there
    g = g / tl.load(divisor + party, mask=live, other=1.0)
    pace = tl.load(rate + party, mask=live, other=0.0)
    m = tl.load(memory + at, mask=live, other=0.0)
    if KIND == 0:
        m = first_beta * m + g
        update = m
    elif KIND == 1:
        m = m + g * g
        update = g / (tl.sqrt(m) + eps)
    else:
        m = m + (1.0 - first_beta) * (g - m)
        v = second_beta * tl.load(square + at, mask=live, other=0.0) + (1.0 - second_beta) * g * g
        tl.store(square + at, v, mask=live)
        update = m / (tl.sqrt(v) / tl.load(second + party, mask=live, other=1.0) + eps)
    tl.store(memory + at, m, mask=live)
    moves = live & (at % WIDTH < WIDTH - FROZEN)
    old = tl.load(table + at, mask=moves, other=0.0)
    tl.store(table + at, old - pace * update, mask=moves)
    tl.store(gradient + at, tl.zeros([BLOCK], tl.float32), mask=there)


def covers(optimizer: Optimizer, table: Tensor) -> bool:
    """Whether `move` knows it."""
    return type(optimizer) in KINDS and table.dtype == torch.float32


def corrections(optimizer: Optimizer, moments: Tensor, pace: Tensor) -> tuple[Tensor, Tensor]:
    """(parties,): the learning rate, and what Adam divides the root of the second moment by."""
    if not isinstance(optimizer, Adam):
        rate = optimizer.learning_rate * pace.float()
        return rate, rate
    step = moments.clamp(min=1).double()
    rate = optimizer.learning_rate * pace / (1 - optimizer.beta1**step)
    return rate.float(), (1 - optimizer.beta2**step).sqrt().float()


def move(
    optimizer: Optimizer,
    table: Tensor,
    gradient: Tensor,
    memory: list[Tensor],
    owner: Tensor,
    divisor: Tensor,
    active: Tensor,
    corrected: tuple[Tensor, Tensor],
    frozen: int,
) -> None:
    """Move the rows of active parties, and empty the gradient of all. `frozen`: so many last numbers of a row stay."""
    betas = (optimizer.beta1, optimizer.beta2) if isinstance(optimizer, Adam) else (
        getattr(optimizer, "momentum", 0.0), 0.0)  # fmt: skip
    if count := table.numel():
        _move[(triton.cdiv(count, BLOCK),)](
            table, gradient, memory[0], memory[-1], owner, divisor, active, *corrected, count, *betas,
            getattr(optimizer, "eps", 0.0), WIDTH=table.shape[1], FROZEN=frozen, KIND=KINDS[type(optimizer)],
            BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
