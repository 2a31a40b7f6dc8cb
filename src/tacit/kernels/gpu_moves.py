"""The end of a step on a GPU: a launch for each table."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from tacit.kernels.moves import KINDS, betas
from tacit.optimizers import Optimizer

Tensor = Any
BLOCK = 512
"""A few rows: where a gradient is sparse, most blocks have none of it."""


@triton.jit
def _move(
    table, gradient, memory, square, owner, divisor, active, rate, second, which, count, first_beta, second_beta, eps,
    WIDTH: tl.constexpr, FROZEN: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = at < count
    g = tl.load(gradient + at, mask=there, other=0.0)
    if KIND == 1:
        there = there & (g != 0.0)  # the others stay as they are: most of a table need not be read
    if (KIND != 1) | (tl.sum(there.to(tl.int32), 0) > 0):
        party = tl.load(owner + at // WIDTH, mask=there, other=0)
        live = there & (tl.load(active + party, mask=there, other=0) != 0)
        g = g / tl.load(divisor + party, mask=live, other=1.0)
        pace = tl.load(rate + party, mask=live, other=0.0)
        own = at + tl.load(which + party, mask=live, other=0) * count
        m = tl.load(memory + own, mask=live, other=0.0)
        if KIND == 0:
            m = first_beta * m + g
            update = m
        elif KIND == 1:
            m = m + g * g
            update = g / (tl.sqrt(m) + eps)
        else:
            m = m + (1.0 - first_beta) * (g - m)
            v = second_beta * tl.load(square + own, mask=live, other=0.0) + (1.0 - second_beta) * g * g
            tl.store(square + own, v, mask=live)
            update = m / (tl.sqrt(v) / tl.load(second + party, mask=live, other=1.0) + eps)
        tl.store(memory + own, m, mask=live)
        moves = live & (at % WIDTH < WIDTH - FROZEN)
        old = tl.load(table + at, mask=moves, other=0.0)
        tl.store(table + at, old - pace * update, mask=moves)
        tl.store(gradient + at, tl.zeros([BLOCK], tl.float32), mask=there)


def move(
    optimizer: Optimizer,
    table: Tensor,
    gradient: Tensor,
    memory: list[Tensor],
    owner: Tensor,
    divisor: Tensor,
    active: Tensor,
    corrected: tuple[Tensor, Tensor],
    which: Tensor,
    frozen: int,
) -> None:
    """See `tacit.kernels.moves.Mover`."""
    if count := table.numel():
        _move[(triton.cdiv(count, BLOCK),)](
            table, gradient, memory[0], memory[-1], owner, divisor, active, *corrected, which, count, *betas(optimizer),
            getattr(optimizer, "eps", 0.0), WIDTH=table.shape[1], FROZEN=frozen, KIND=KINDS[type(optimizer)],
            BLOCK=BLOCK, num_warps=2,
        )  # fmt: skip
