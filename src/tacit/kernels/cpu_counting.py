"""Counting on the CPU: blocks of rows that stay in the cache against all queries; products by matrix products.

Euclidean distances are products too: |q - e|^2 = |q|^2 - 2 (q e - |e|^2 / 2). That is faster, and rounds more, which is
made up for by calling more of them close.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tacit.kernels.counting import Counts, Known
from tacit.kernels.cpu import L1, L2, PRODUCT, ROTATION, Array, _compare, jit, lean, shared_out
from tacit.models.model import UNDERFLOW

Tensor = Any
ROWS = 256
"""Entity rows at a time."""
BLOCK = 512, 1024
"""So many queries and rows are multiplied at once: their products stay in the cache."""
MODELS = {"l1": L1, "l2": L2, "modulus": ROTATION, "product": PRODUCT}


@lean
def _tally(q: int, begin: int, size: int, scores: Array, target: Array, value: Array, slack: Array, better: Array,
           close: Array, which: Array) -> None:  # fmt: skip
    """Count the scores of entities begin to begin + size with query q."""
    low, high = value[q] - slack[q], value[q] + slack[q]
    above, near = np.int32(0), np.int32(0)  # as wide as scores, so that as many are compared at once as fit
    for i in range(size):
        above += np.int32(1) if scores[i] > high else np.int32(0)
        near += np.int32(1) if scores[i] >= low else np.int32(0)
    better[q] += above
    if near > above:  # mostly not
        for i in range(size):
            if low <= scores[i] <= high and begin + i != target[q]:
                if close[q] < which.shape[1]:
                    which[q, close[q]] = begin + i
                close[q] += 1
        if begin <= target[q] < begin + size and scores[target[q] - begin] > high:
            better[q] -= 1
    elif begin <= target[q] < begin + size and scores[target[q] - begin] > high:
        better[q] -= 1


@jit
def _distances(first: int, last: int, model: int, query: Array, entity: Array, target: Array, value: Array,
               slack: Array, better: Array, close: Array, which: Array) -> None:  # fmt: skip
    """Queries first to last with all rows."""
    rows, scores = np.empty(ROWS, np.int64), np.empty(ROWS, np.float32)
    for begin in range(0, len(entity), ROWS):
        size = min(ROWS, len(entity) - begin)
        for i in range(size):
            rows[i] = begin + i
        for q in range(first, last):
            _compare(model, query[q], entity, rows, size, scores)
            _tally(q, begin, size, scores, target, value, slack, better, close, which)


@jit
def _products(first: int, last: int, begin: int, scores: Array, target: Array, value: Array, slack: Array,
              better: Array, close: Array, which: Array) -> None:  # fmt: skip
    """Queries first to last with some rows, whose products are given."""
    for q in range(first, last):
        _tally(q, begin, scores.shape[1], scores[q], target, value, slack, better, close, which)


@jit
def _leave_out(first: int, last: int, model: int, query: Array, entity: Array, target: Array, value: Array,
               slack: Array, better: Array, close: Array, which: Array,
               known: tuple[Array, Array, Array]) -> None:  # fmt: skip
    """Take the true answers of queries first to last out of the counts."""
    scores = np.empty(ROWS, np.float32)
    for q in range(first, last):
        low, high = value[q] - slack[q], value[q] + slack[q]
        for begin in range(known[0][q], known[1][q], ROWS):
            rows = known[2][begin : min(begin + ROWS, known[1][q])]
            _compare(model, query[q], entity, rows, len(rows), scores)
            for i in range(len(rows)):
                if rows[i] != target[q] and scores[i] > high:
                    better[q] -= 1
                elif rows[i] != target[q] and scores[i] >= low:
                    if close[q] < which.shape[1]:
                        which[q, close[q]] = -1 - rows[i]
                    close[q] += 1


def _squares(rows: Tensor) -> Tensor:
    return rows.double().square().sum(1)


def _as_products(query: Tensor, longest: Tensor, distance: Tensor, slack: Tensor) -> tuple[Tensor, Tensor]:
    """Value and slack for products less half a row's square: who is beyond them is clearly nearer, or close.

    `longest`: the square of the longest row.
    """
    width, eps, whole = query.shape[1], torch.finfo(query.dtype).eps, _squares(query)
    length, longest = whole.sqrt(), longest.sqrt()
    # The sum's rounding as in `Queries.close`; and that of rows and queries that were moved, and of half a square.
    error = eps * ((width + 8) * length * longest + (length + longest).square()) + width * UNDERFLOW
    distance, slack = distance.double(), slack.double()
    high = (whole - (distance - slack).clamp(min=0).square()) / 2 + error
    low = (whole - (distance + slack).square()) / 2 - error
    around = (high - low) / 2 + 2 * eps * (high.abs() + low.abs())
    return ((high + low) / 2).float(), around.float()


def count(geometry: str, query: Tensor, entity: Tensor, target: Tensor, value: Tensor, slack: Tensor, known: Known,
          listed: int, memory: float) -> Counts:  # fmt: skip
    """See `tacit.kernels.counting.Counter`. Distances are counted as their negatives: larger is better."""
    counts = Counts(
        torch.zeros(len(query), dtype=torch.int64),
        torch.zeros(len(query), dtype=torch.int64),
        torch.zeros(len(query), listed, dtype=torch.int64),
    )
    own = [tensor.contiguous().numpy() for tensor in (target, value if geometry == "product" else -value, slack)]
    found = [tensor.numpy() for tensor in counts]
    rows = MODELS[geometry], query.contiguous().numpy(), entity.contiguous().numpy()
    if geometry in ("product", "l2"):
        blocks, center = entity.split(BLOCK[1]), None
        if geometry == "l2":
            # First everything is moved so that the rows' mean is 0, which changes no distance: less of it is rounded.
            center = entity.mean(0)
            query = query - center
            longest = torch.stack([_squares(block - center).max() for block in blocks]).max()
            value, slack = _as_products(query, longest, value, slack)
        arrays = (own[0], value.contiguous().numpy(), slack.contiguous().numpy(), *found)
        several = max(1, min(BLOCK[0], int(memory / (4 * BLOCK[1]))))
        for number, block in enumerate(blocks):
            if center is not None:
                block = block - center
                half = (_squares(block) / 2).float()
            for first in range(0, len(query), several):
                piece = slice(first, first + several)
                scores = query[piece] @ block.T
                if center is not None:
                    scores -= half
                shared_out(len(scores), scores.numel(), _products, number * BLOCK[1], scores.numpy(),
                           *(array[piece] for array in arrays))  # fmt: skip
    else:
        shared_out(len(query), query.numel() * len(entity), _distances, *rows, *own, *found)
    answers = tuple(tensor.contiguous().numpy() for tensor in known[:3])
    shared_out(len(query), query.numel() * len(entity), _leave_out, *rows, *own, *found, answers)
    return counts
