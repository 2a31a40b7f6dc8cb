"""`tacit.kernels.rows` on a CPU, in numba: noise is made for those rows alone that get some."""

from __future__ import annotations

from math import cos, log, sin, sqrt
from typing import Any

import numpy as np

from tacit import draws
from tacit.draws import Purpose
from tacit.kernels.cpu import Array, jit, lean

Tensor = Any
_philox = jit(draws.philox)
TURN = 2.0 * np.pi


@lean
def _add_times(table: Array, rows: Array, values: Array, factor: Array) -> None:
    for i in range(len(rows)):
        times = factor[i]
        if times != 0:
            row = rows[i]
            for d in range(table.shape[1]):
                table[row, d] += values[i, d] * times


def add_times(table: Tensor, rows: Tensor, values: Tensor, factor: Tensor) -> None:
    """See `tacit.kernels.rows.add_times`."""
    _add_times(*(tensor.numpy() for tensor in (table, rows, values, factor)))


@jit
def _add_noise(table: Array, rows: Array, once: Array, deviation: Array, seeds: Array, purpose: int, numbers: Array,
               steps: Array) -> None:  # fmt: skip
    width = table.shape[1]
    for party in range(len(rows)):
        if deviation[party] == 0:
            continue
        key = (seeds[party] & 0xFFFFFFFF, (seeds[party] >> 32) & 0xFFFFFFFF)
        whose = numbers[party] | purpose
        for place in range(rows.shape[1]):
            if not once[party, place]:
                continue
            row, begin = rows[party, place], place * width
            for block in range(begin // 4, (begin + width - 1) // 4 + 1):
                words = _philox((block, 0, steps[party], whose), key)
                for half in range(2):
                    first, second = words[2 * half], words[2 * half + 1]
                    radius = deviation[party] * np.float32(sqrt(-2.0 * log((first + 0.5) * 2.0**-32)))
                    angle = TURN * ((second + 0.5) * 2.0**-32)
                    d = 4 * block + 2 * half - begin
                    if 0 <= d < width:
                        table[row, d] += radius * np.float32(cos(angle))
                    if 0 <= d + 1 < width:
                        table[row, d + 1] += radius * np.float32(sin(angle))


def add_noise(
    table: Tensor, rows: Tensor, once: Tensor, deviation: Tensor, seeds: Tensor, purpose: Purpose, numbers: Tensor,
    steps: Tensor,
) -> None:  # fmt: skip
    """See `tacit.kernels.rows.add_noise`."""
    given = (tensor.numpy() for tensor in (table, rows, once, deviation, seeds))
    _add_noise(*given, int(purpose) << 20, numbers.numpy(), steps.numpy())
