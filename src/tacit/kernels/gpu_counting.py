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
QUERIES, ROWS, TILES, WARPS = 64, 128, 8, 8
"""A program compares so many queries with TILES times so many rows: the fastest on an H200 of those tried."""
PRODUCTS = 1024
"""Products that a program looks at in one go."""


@triton.jit
def _tally(score, q, e, in_q, in_e, target, value, slack, close, which, NEAR: tl.constexpr):
    """How many of a tile of scores (q, e) are clearly better; those that are close are listed."""
    apart = score - value[:, None]
    there = in_q[:, None] & in_e[None, :] & (e[None, :] != target[:, None])
    near = there & (tl.abs(apart) <= slack[:, None])
    if tl.sum(tl.sum(near.to(tl.int32), 1), 0) > 0:  # mostly not
        at = tl.broadcast_to((close + q)[:, None], near.shape)
        slot = tl.atomic_add(at, 1, mask=near, sem="relaxed")
        entity = tl.broadcast_to(e[None, :], near.shape)
        tl.store(which + q[:, None].to(tl.int64) * NEAR + slot, entity, mask=near & (slot < NEAR))
    return tl.sum((there & (apart > slack[:, None])).to(tl.int32), 1)


@triton.jit
def _distances(queries, entities, targets, values, slacks, better, close, which, q_total, e_total,
               KIND: tl.constexpr, D: tl.constexpr, BQ: tl.constexpr, BE: tl.constexpr, TILES_: tl.constexpr,
               NEAR: tl.constexpr):  # fmt: skip
    """Some queries with some rows, both of which lie column by column: queries (width, q), entities (width, e)."""
    q = tl.program_id(0) * BQ + tl.arange(0, BQ)
    in_q = q < q_total
    target = tl.load(targets + q, mask=in_q, other=-1)
    value = tl.load(values + q, mask=in_q, other=0.0)
    slack = tl.load(slacks + q, mask=in_q, other=0.0)
    count = tl.zeros([BQ], tl.int32)
    for tile in range(TILES_):
        e = (tl.program_id(1) * TILES_ + tile) * BE + tl.arange(0, BE)
        in_e = e < e_total
        total = tl.zeros([BQ, BE], tl.float32)
        for d in range(D):
            x = tl.load(queries + d * q_total + q, mask=in_q, other=0.0)[:, None]
            y = tl.load(entities + d * e_total + e, mask=in_e, other=0.0)[None, :]
            if KIND == L1:
                total += tl.abs(x - y)
            elif KIND == L2:
                total += (x - y) * (x - y)
            else:
                u = tl.load(queries + (d + D) * q_total + q, mask=in_q, other=0.0)[:, None]
                v = tl.load(entities + (d + D) * e_total + e, mask=in_e, other=0.0)[None, :]
                total += tl.sqrt((x - y) * (x - y) + (u - v) * (u - v))
        if KIND == L2:
            total = tl.sqrt(total)
        count += _tally(-total, q, e, in_q, in_e, target, value, slack, close, which, NEAR)
    tl.atomic_add(better + q, count, mask=in_q, sem="relaxed")


@triton.jit
def _products(scores, targets, values, slacks, better, close, which, first, q_total, e_total, BQ: tl.constexpr,
              BE: tl.constexpr, NEAR: tl.constexpr):  # fmt: skip
    """Some queries with all rows, whose products are given, (q, e)."""
    local = tl.program_id(0) * BQ + tl.arange(0, BQ)
    q = local + first
    in_q = q < q_total
    target = tl.load(targets + q, mask=in_q, other=-1)
    value = tl.load(values + q, mask=in_q, other=0.0)
    slack = tl.load(slacks + q, mask=in_q, other=0.0)
    count = tl.zeros([BQ], tl.int32)
    for begin in range(0, e_total, BE):
        e = begin + tl.arange(0, BE)
        in_e = e < e_total
        at = scores + local[:, None].to(tl.int64) * e_total + e[None, :]
        score = tl.load(at, mask=in_q[:, None] & in_e[None, :], other=0.0)
        count += _tally(score, q, e, in_q, in_e, target, value, slack, close, which, NEAR)
    tl.store(better + q, count, mask=in_q)


@triton.jit
def _leave_out(queries, entities, targets, values, slacks, better, close, which, firsts, lasts, answers,
               KIND: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BE: tl.constexpr, NEAR: tl.constexpr):  # fmt: skip
    """Take the true answers of a query out of its counts; here rows lie one after the other."""
    q = tl.program_id(0)
    d = tl.arange(0, DP)
    WIDTH: tl.constexpr = 2 * D if KIND == MODULUS else D
    x = tl.load(queries + q.to(tl.int64) * WIDTH + d, mask=d < D, other=0.0)[None, :]
    u = x
    if KIND == MODULUS:
        u = tl.load(queries + q.to(tl.int64) * WIDTH + D + d, mask=d < D, other=0.0)[None, :]
    target = tl.load(targets + q)
    value = tl.load(values + q)
    slack = tl.load(slacks + q)
    last = tl.load(lasts + q)
    fewer = 0
    for begin in range(tl.load(firsts + q), last, BE):
        at = begin + tl.arange(0, BE)
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
        fewer += tl.sum((there & (score - value > slack)).to(tl.int32), 0)
        near = there & (tl.abs(score - value) <= slack)
        if tl.sum(near.to(tl.int32), 0) > 0:
            slot = tl.atomic_add(close + q + tl.zeros([BE], tl.int32), 1, mask=near, sem="relaxed")
            tl.store(which + q.to(tl.int64) * NEAR + slot, -1 - e, mask=near & (slot < NEAR))
    tl.atomic_add(better + q, -fewer, sem="relaxed")


def count(geometry: str, query: Tensor, entity: Tensor, target: Tensor, value: Tensor, slack: Tensor, known: Known,
          listed: int, memory: float) -> Counts:  # fmt: skip
    """See `tacit.kernels.counting.Counter`. Distances are counted as their negatives: larger is better."""
    device, many, entities = query.device, len(query), len(entity)
    better, close = torch.zeros(2, many, dtype=torch.int32, device=device)
    which = torch.zeros(many, listed, dtype=torch.int64, device=device)
    if not many:
        return Counts(better.long(), close.long(), which)
    query, entity, target, slack = (tensor.contiguous() for tensor in (query, entity, target, slack))
    value = (value if geometry == "product" else -value).contiguous()
    kind, dim = KINDS[geometry], query.shape[1] // (2 if geometry == "modulus" else 1)
    if geometry == "product":
        several = max(1, int(memory / (4 * entities)))
        for first in range(0, many, several):
            scores = query[first : first + several] @ entity.T
            _products[(triton.cdiv(len(scores), 4),)](
                scores, target, value, slack, better, close, which, first, min(many, first + several), entities,
                BQ=4, BE=PRODUCTS, NEAR=listed, num_warps=4,
            )  # fmt: skip
    else:
        grid = (triton.cdiv(many, QUERIES), triton.cdiv(entities, ROWS * TILES))
        _distances[grid](
            query.T.contiguous(), entity.T.contiguous(), target, value, slack, better, close, which, many, entities,
            KIND=kind, D=dim, BQ=QUERIES, BE=ROWS, TILES_=TILES, NEAR=listed, num_warps=WARPS,
        )  # fmt: skip
    first, last, answers = (tensor.contiguous() for tensor in known[:3])
    _leave_out[(many,)](
        query, entity, target, value, slack, better, close, which, first, last, answers, KIND=kind, D=dim,
        DP=triton.next_power_of_2(dim), BE=32, NEAR=listed, num_warps=4,
    )  # fmt: skip
    return Counts(better.long(), close.long(), which)
