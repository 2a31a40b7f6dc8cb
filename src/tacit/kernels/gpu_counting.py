"""Counting on the GPU: tiles of queries and rows, whose distances exist in registers only."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from tacit.kernels.counting import Counts, Known

Tensor = Any
L1, L2, MODULUS, PRODUCT = (tl.constexpr(i) for i in range(4))
KINDS = {"l1": 0, "l2": 1, "modulus": 2, "product": 3}
QUERIES, ROWS, TILES, WARPS, REGISTERS = 16, 128, 3, 4, 64
"""A program compares so many queries with TILES times so many rows: the fastest on an H200 of those tried."""

PRODUCTS = 512
"""How many products of a query a program, which is one warp, looks at in one go."""


@triton.jit
def _tally(score, e, in_e, target, value, slack):
    """How many of a tile of scores (q, e) are clearly better than the answer's, and how many are close to it."""
    apart = score - value[:, None]
    there = in_e[None, :] & (e[None, :] != target[:, None])
    better = tl.sum((there & (apart > slack[:, None])).to(tl.int32), 1)
    return better, tl.sum((there & (tl.abs(apart) <= slack[:, None])).to(tl.int32), 1)


@triton.jit
def _distances(queries, entities, targets, values, slacks, better, close, q_total, e_total, q_wide, e_wide,
               KIND: tl.constexpr, D: tl.constexpr, BQ: tl.constexpr, BE: tl.constexpr,
               TILES_: tl.constexpr, BIG: tl.constexpr):  # fmt: skip
    """Some queries with some tiles of rows, which both lie column by column: queries (width, q), entities (width, e),
    with zeros up to the end of the last tile, so that nothing has to be masked in the inner loop.

    Whether a tile has rows that are close is kept, (q, tiles): it is looked at again, and none of it is counted here.
    """
    q = tl.program_id(0) * BQ + tl.arange(0, BQ)
    in_q = q < q_total
    target = tl.load(targets + q, mask=in_q, other=-1).to(tl.int32)  # 32 bits: registers are scarce here
    value = tl.load(values + q, mask=in_q, other=0.0)
    slack = tl.load(slacks + q, mask=in_q, other=0.0)
    next_q = q_wide
    next_e = e_wide
    if BIG:  # offsets beyond 32 bits
        next_q = (tl.program_id(0) * 0 + q_wide).to(tl.int64)
        next_e = (tl.program_id(0) * 0 + e_wide).to(tl.int64)
    all_better = tl.zeros([BQ], tl.int32)
    for number in range(TILES_):
        tile = tl.program_id(1) * TILES_ + number
        e = tile * BE + tl.arange(0, BE)
        in_e = e < e_total
        total = tl.zeros([BQ, BE], tl.float32)
        for d in range(D):
            x = tl.load(queries + d * next_q + q)[:, None]
            y = tl.load(entities + d * next_e + e)[None, :]
            if KIND == L1:
                total += tl.abs(x - y)
            elif KIND == L2:
                total += (x - y) * (x - y)
            else:
                u = tl.load(queries + (d + D) * next_q + q)[:, None]
                v = tl.load(entities + (d + D) * next_e + e)[None, :]
                total += tl.sqrt((x - y) * (x - y) + (u - v) * (u - v))
        if KIND == L2:
            total = tl.sqrt(total)
        some_better, some_close = _tally(-total, e, in_e, target, value, slack)
        all_better += tl.where(some_close == 0, some_better, 0)
        at = close + q.to(tl.int64) * (tl.num_programs(1) * TILES_) + tile
        tl.store(at, (some_close != 0).to(tl.int8), mask=in_q)
    tl.atomic_add(better + q, all_better, mask=in_q, sem="relaxed")


@triton.jit
def _products(scores, targets, values, slacks, better, listed, which, first, e_total, BE: tl.constexpr,
              MOST: tl.constexpr):  # fmt: skip
    """A query with all rows, whose products are given, (q, e): those that are close are listed at once."""
    q = tl.program_id(0) + first
    target = tl.load(targets + q).to(tl.int32)
    value = tl.load(values + q)
    slack = tl.load(slacks + q)
    row = scores + tl.program_id(0).to(tl.int64) * e_total
    count = tl.zeros([BE], tl.int32)
    for begin in range(0, e_total, BE):
        e = begin + tl.arange(0, BE)
        there = (e < e_total) & (e != target)
        apart = tl.load(row + e, mask=there, other=float("-inf")) - value
        near = there & (tl.abs(apart) <= slack)
        if tl.max(near.to(tl.int32), 0) > 0:  # mostly not
            slot = tl.atomic_add(listed + q + tl.zeros([BE], tl.int32), 1, mask=near, sem="relaxed")
            tl.store(which + q.to(tl.int64) * MOST + slot, e, mask=near & (slot < MOST))
        count += (there & (apart > slack)).to(tl.int32)
    tl.store(better + q, tl.sum(count, 0))


@triton.jit
def _look_again(queries, entities, targets, values, slacks, better, listed, which, asked, firsts, lasts, answers,
                KIND: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BE: tl.constexpr, MOST: tl.constexpr,
                TRUE: tl.constexpr):  # fmt: skip
    """A stretch of rows with one query: count those that are clearly better, and list those that are close. TRUE: it
    is a stretch of true answers, which are taken out of the counts. Here rows lie one after the other.
    """
    q = tl.load(asked + tl.program_id(0))
    d = tl.arange(0, DP)
    WIDTH: tl.constexpr = 2 * D if KIND == MODULUS else D
    x = tl.load(queries + q * WIDTH + d, mask=d < D, other=0.0)[None, :]
    u = x
    if KIND == MODULUS:
        u = tl.load(queries + q * WIDTH + D + d, mask=d < D, other=0.0)[None, :]
    target = tl.load(targets + q)
    value = tl.load(values + q)
    slack = tl.load(slacks + q)
    last = tl.load(lasts + tl.program_id(0))
    more = 0
    for begin in range(tl.load(firsts + tl.program_id(0)), last, BE):
        at = begin + tl.arange(0, BE)
        e = at
        if TRUE:
            e = tl.load(answers + at, mask=at < last, other=0)
        inside = (at < last)[:, None] & (d < D)[None, :]
        y = tl.load(entities + e[:, None] * WIDTH + d[None, :], mask=inside, other=0.0)
        if KIND == PRODUCT:
            score = tl.sum(x * y, 1)
        else:
            apart = tl.where(inside, x - y, 0.0)
            if KIND == L1:
                score = -tl.sum(tl.abs(apart), 1)
            elif KIND == L2:
                score = -tl.sqrt(tl.sum(apart * apart, 1))
            else:
                v = tl.load(entities + e[:, None] * WIDTH + D + d[None, :], mask=inside, other=0.0)
                across = tl.where(inside, u - v, 0.0)
                score = -tl.sum(tl.sqrt(apart * apart + across * across), 1)
        there = (at < last) & (e != target)
        near = there & (tl.abs(score - value) <= slack)
        more += tl.sum((there & (score - value > slack)).to(tl.int32), 0)
        if tl.sum(near.to(tl.int32), 0) > 0:
            slot = tl.atomic_add(listed + q + tl.zeros([BE], tl.int32), 1, mask=near, sem="relaxed")
            tl.store(which + q * MOST + slot, -1 - e if TRUE else e, mask=near & (slot < MOST))
    tl.atomic_add(better + q, -more if TRUE else more, sem="relaxed")


def count(geometry: str, query: Tensor, entity: Tensor, target: Tensor, value: Tensor, slack: Tensor, known: Known,
          listed: int, memory: float) -> Counts:  # fmt: skip
    """See `tacit.kernels.counting.Counter`. Distances are counted as their negatives: larger is better.

    Of distances, tiles in which no row is close to the answer are done with once they are counted. The others are
    looked at again, row by row; these sums may round differently, and `slack` allows for either.
    """
    device, many, entities = query.device, len(query), len(entity)
    better, close = torch.zeros(2, many, dtype=torch.int32, device=device)
    which = torch.zeros(many, listed, dtype=torch.int64, device=device)
    if not many:
        return Counts(better.long(), close.long(), which)
    query, entity, target, slack = (tensor.contiguous() for tensor in (query, entity, target, slack))
    value = (value if geometry == "product" else -value).contiguous()
    kind, dim = KINDS[geometry], query.shape[1] // (2 if geometry == "modulus" else 1)
    own = (query, entity, target, value, slack, better, close, which)
    shape = {"KIND": kind, "D": dim, "DP": triton.next_power_of_2(dim), "BE": 32, "MOST": listed, "num_warps": 4}
    if geometry == "product":
        several = max(1, int(memory / (4 * entities)))
        for first in range(0, many, several):
            scores = query[first : first + several] @ entity.T
            _products[(len(scores),)](scores, target, value, slack, better, close, which, first, entities,
                                      BE=PRODUCTS, MOST=listed, num_warps=1)  # fmt: skip
    else:
        grid = (triton.cdiv(many, QUERIES), triton.cdiv(entities, ROWS * TILES))
        near = torch.empty(many, grid[1] * TILES, dtype=torch.int8, device=device)
        by_column = [torch.nn.functional.pad(t.T, (0, n * size - len(t))).contiguous() for t, n, size in
                     zip((query, entity), grid, (QUERIES, ROWS * TILES), strict=True)]  # fmt: skip
        _distances[grid](
            *by_column, target, value, slack, better, near, many, entities,
            *(table.shape[1] for table in by_column),
            KIND=kind, D=dim, BQ=QUERIES, BE=ROWS, TILES_=TILES,
            BIG=max(table.numel() for table in by_column) >= 1 << 31, num_warps=WARPS,
            maxnreg=None if geometry == "modulus" else REGISTERS,
        )  # fmt: skip
        asked, tile = near.nonzero(as_tuple=True)
        if len(asked):
            first = tile * ROWS
            last = (first + ROWS).clamp(max=entities)
            _look_again[(len(asked),)](*own, asked, first, last, asked, TRUE=False, **shape)
    first, last, answers = (tensor.contiguous() for tensor in known[:3])
    every = torch.arange(many, device=device)
    _look_again[(many,)](*own, every, first, last, answers, TRUE=True, **shape)
    return Counts(better.long(), close.long(), which)
