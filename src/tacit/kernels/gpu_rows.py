"""`tacit.kernels.rows` on a GPU."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from tacit.draws import Purpose
from tacit.kernels.gpu_draws import box_muller, philox_words

Tensor = Any
BLOCK = 1024


@triton.jit
def _add_times(table, rows, values, factors, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64)
    factor = tl.load(factors + at)
    if factor != 0:
        row = tl.load(rows + at)
        for begin in range(0, WIDTH, BLOCK):
            column = begin + tl.arange(0, BLOCK)
            there = column < WIDTH
            value = tl.load(values + at * WIDTH + column, mask=there, other=0.0)
            tl.atomic_add(table + row * WIDTH + column, value * factor, mask=there, sem="relaxed")


def add_times(table: Tensor, rows: Tensor, values: Tensor, factor: Tensor) -> None:
    """See `tacit.kernels.rows.add_times`."""
    if len(rows):
        width = table.shape[1]
        block = min(triton.next_power_of_2(width), BLOCK)
        _add_times[(len(rows),)](table, rows, values, factor, WIDTH=width, BLOCK=block, num_warps=max(1, block // 128))


@triton.jit
def _add_noise(table, rows, once, deviations, seeds, numbers, steps, count, purpose, WIDTH: tl.constexpr,
               BLOCK: tl.constexpr):  # fmt: skip
    place = tl.program_id(0).to(tl.int64)
    party = tl.program_id(1)
    at = party * count + place
    deviation = tl.load(deviations + party)
    if (tl.load(once + at) != 0) & (deviation != 0):
        into = table + tl.load(rows + at) * WIDTH
        seed = tl.load(seeds + party)
        begin = place * WIDTH
        for first in range(0, WIDTH // 4 + 2, BLOCK):
            block = begin // 4 + first + tl.arange(0, BLOCK)
            zero = (block * 0).to(tl.uint32)
            step = zero + tl.load(steps + party).to(tl.uint32)
            whose = zero + (tl.load(numbers + party) | purpose).to(tl.uint32)
            w0, w1, w2, w3 = philox_words(
                block.to(tl.uint32), zero, step, whose, (seed & 0xFFFFFFFF).to(tl.uint32), (seed >> 32).to(tl.uint32)
            )
            n0, n1 = box_muller(w0, w1)
            n2, n3 = box_muller(w2, w3)
            # Nobody else adds to this row: it has one place.
            column = 4 * block - begin
            _add(into, column, n0 * deviation, WIDTH)
            _add(into, column + 1, n1 * deviation, WIDTH)
            _add(into, column + 2, n2 * deviation, WIDTH)
            _add(into, column + 3, n3 * deviation, WIDTH)


@triton.jit
def _add(into, column, values, WIDTH: tl.constexpr):
    there = (column >= 0) & (column < WIDTH)
    tl.store(into + column, tl.load(into + column, mask=there, other=0.0) + values, mask=there)


def add_noise(
    table: Tensor, rows: Tensor, once: Tensor, deviation: Tensor, seeds: Tensor, purpose: Purpose, numbers: Tensor,
    steps: Tensor,
) -> None:  # fmt: skip
    """See `tacit.kernels.rows.add_noise`."""
    (parties, count), width = rows.shape, table.shape[1]
    block = min(triton.next_power_of_2(width // 4 + 2), 256)
    if count:
        _add_noise[(count, parties)](
            table, rows, once, deviation, seeds, numbers, steps, count, int(purpose) << 20, WIDTH=width, BLOCK=block,
            num_warps=max(1, block // 64),
        )  # fmt: skip
