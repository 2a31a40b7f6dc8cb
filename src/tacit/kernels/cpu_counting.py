"""Counting on the CPU: blocks of rows that stay in the cache against all queries; products by matrix products."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tacit.kernels.counting import Counts, Known
from tacit.kernels.cpu import L1, L2, PRODUCT, ROTATION, Array, _compare, jit, shared_out

Tensor = Any
ROWS = 256
"""Entity rows at a time."""
MODELS = {"l1": L1, "l2": L2, "modulus": ROTATION, "product": PRODUCT}


@jit
def _tally(q: int, begin: int, size: int, scores: Array, target: Array, value: Array, slack: Array, better: Array,
           close: Array, which: Array) -> None:  # fmt: skip
    """Count the scores of entities begin to begin + size with query q."""
    low, high = value[q] - slack[q], value[q] + slack[q]
    above, near = 0, 0
    for i in range(size):
        above += 1 if scores[i] > high else 0
        near += 1 if scores[i] >= low else 0
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
    if geometry == "product":
        several = max(1, int(memory / (4 * len(entity))))
        for first in range(0, len(query), several):
            piece = slice(first, first + several)
            scores = (query[piece] @ entity.T).numpy()
            shared_out(len(scores), scores.size, _products, 0, scores, *(array[piece] for array in (*own, *found)))
    else:
        shared_out(len(query), query.numel() * len(entity), _distances, *rows, *own, *found)
    answers = tuple(tensor.contiguous().numpy() for tensor in known[:3])
    shared_out(len(query), query.numel() * len(entity), _leave_out, *rows, *own, *found, answers)
    return counts
