"""Kernels for the GPU, in Triton: one program per example, everything about it in registers.

For TransE (L1 and L2), RotatE, DistMult and ComplEx, with any loss over sampled negatives, plain or clipped, negatives
of an example's own or a pool, with a prior. Each makes the example's query, goes over its candidates twice (a softmax
needs all scores before any gradient), and adds gradients to the dense buffers by atomic additions. So two runs on a GPU
may differ in the last digits; on a CPU they do not.

Under `Clipped` a third pass writes, once the norm is known. The norm is exact: a candidate drawn twice counts once with
twice the gradient, one that is the example's own head or tail joins that row, and of a self-loop head and tail are one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, cast

import torch
import triton
import triton.language as tl

from tacit.cohort import Cohort
from tacit.draws import KEY_STEPS, MULTIPLIERS, Purpose
from tacit.errors import TacitError
from tacit.examples import Examples
from tacit.kernels.contract import Chunk, Clipped, Gradients, Objective, Plain, Rule
from tacit.kernels.reference import Reference
from tacit.losses import Logistic, Margin, SelfAdversarial, Softmax
from tacit.models import Layout, Tables
from tacit.models.bilinear import ComplEx, DistMult
from tacit.models.tables import PARTS
from tacit.models.translational import RotatE, TransE
from tacit.negatives import ATTEMPTS, Independent, Pool
from tacit.optimizers import Adam

Tensor = Any
L1, L2, PRODUCT, ROTATION, COMPLEX = (tl.constexpr(i) for i in range(5))
SELF_ADVERSARIAL, LOGISTIC, SOFTMAX, MARGIN = (tl.constexpr(i) for i in range(4))
LOSS_OF: dict[type, int] = {SelfAdversarial: 0, Logistic: 1, Softmax: 2, Margin: 3}
M0, M1 = tl.constexpr(MULTIPLIERS[0]), tl.constexpr(MULTIPLIERS[1])
K0, K1 = tl.constexpr(KEY_STEPS[0]), tl.constexpr(KEY_STEPS[1])


@triton.jit
def _rows(table, row, at, width, IMAGINARY: tl.constexpr, D: tl.constexpr, EVEN: tl.constexpr):
    """A row, or a tile of rows, at columns `at`; the second half of a row if it is imaginary.

    Without a mask where no column is padding: masks keep loads from being wide.
    """
    shift = D if IMAGINARY else 0
    if EVEN:
        found = tl.load(table + row * width + at + shift)
    else:
        found = tl.load(table + row * width + at + shift, mask=at < D, other=0.0)
    return found


@triton.jit
def _add(table, row, at, width, values, IMAGINARY: tl.constexpr, D: tl.constexpr, EVEN: tl.constexpr):
    """Add values to a row, or to a tile of rows."""
    shift = D if IMAGINARY else 0
    if EVEN:
        tl.atomic_add(table + row * width + at + shift, values, sem="relaxed")
    else:
        there = tl.broadcast_to(at < D, values.shape)
        tl.atomic_add(table + row * width + at + shift, values, mask=there, sem="relaxed")


@triton.jit
def _away(qx, qy, ex, ey, MODEL: tl.constexpr):
    """The score of candidates e (n, d) with the query q, without gamma, and d score / d e as (n, d) parts."""
    if MODEL == PRODUCT:
        s = tl.sum(qx * ex, 1)
        ux = qx + 0.0 * ex
        uy = ux
    elif MODEL == COMPLEX:
        s = tl.sum(qx * ex + qy * ey, 1)
        ux = qx + 0.0 * ex
        uy = qy + 0.0 * ey
    elif MODEL == L1:
        df = qx - ex
        s = -tl.sum(tl.abs(df), 1)
        ux = tl.where(df > 0, 1.0, tl.where(df < 0, -1.0, 0.0))
        uy = ux
    elif MODEL == L2:
        df = qx - ex
        n = tl.sqrt(tl.sum(df * df, 1))
        s = -n
        ux = df * tl.where(n > 0, 1.0 / n, 0.0)[:, None]
        uy = ux
    else:
        dx = qx - ex
        dy = qy - ey
        n2 = dx * dx + dy * dy
        n = tl.sqrt(n2)
        s = -tl.sum(n, 1)
        over = tl.where(n2 > 0, 1.0 / n, 0.0)
        ux = dx * over
        uy = dy * over
    return s, ux, uy


@triton.jit
def _softplus(x):
    return tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _candidates(ids, own, prior_tails, prior_heads, prior_at, j, party, b, start, h, t, turn, N: tl.constexpr,
                POOL: tl.constexpr, PRIOR: tl.constexpr, SMALL: tl.constexpr):  # fmt: skip
    """Rows of a block of candidates, which are there, and their prior."""
    if POOL:
        row = tl.load(ids + party * N + j, mask=j < N, other=-1)
        there = (row >= 0) & (row != h) & (row != t)
    else:
        row = tl.load(ids + b * N + j, mask=j < N, other=-1)
        there = row >= 0
    row = tl.where(there, row, own)
    if SMALL:  # offsets of 32 bits: half the integer work of the inner loops
        row = row.to(tl.int32)
    prior = tl.zeros_like(row).to(tl.float32)
    if PRIOR:
        at = prior_at + row - start
        prior = tl.where(turn > 0, tl.load(prior_tails + at), tl.load(prior_heads + at))
    return row, there, prior


@triton.jit
def _pull(s, there, sp, m, z, alpha, LOSS: tl.constexpr):
    """d loss / d score of candidates, given what the first pass found."""
    if LOSS == SELF_ADVERSARIAL:
        g = tl.exp(alpha * s - m) / z * _sigmoid(s)
    elif LOSS == LOGISTIC:
        g = _sigmoid(s) / z
    elif LOSS == SOFTMAX:
        g = tl.exp(s - m) / z
    else:
        g = tl.where(alpha - sp + s > 0, 1.0, 0.0) / z
    return tl.where(there, g, 0.0)


@triton.jit
def _example(
    entity, relation, g_entity, g_relation, heads, relations, tails, asks, weights, parties, ids, losses, norms, clips,
    row_mask, prior_tails, prior_heads, starts, gamma, phase, alpha, relation_scale, row_clip, prior_width, step_losses,
    number, ahead, parties_total,
    N: tl.constexpr, BN: tl.constexpr, NP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, MODEL: tl.constexpr,
    LOSS: tl.constexpr, POOL: tl.constexpr, CLIPPED: tl.constexpr, MASKED: tl.constexpr, ROWS: tl.constexpr,
    PRIOR: tl.constexpr, POSITIVE: tl.constexpr, NEGATIVE: tl.constexpr,
    SUMMED: tl.constexpr, ONCE: tl.constexpr, SMALL: tl.constexpr,
):  # fmt: skip
    """One example: its loss, and what it adds to the gradients."""
    b = tl.program_id(0)
    weight = tl.load(weights + b)
    if weight != 0:
        EVEN: tl.constexpr = D == DP
        WIDE: tl.constexpr = (MODEL == ROTATION) | (MODEL == COMPLEX)
        EW: tl.constexpr = 2 * D if WIDE else D
        RW: tl.constexpr = 2 * D if MODEL == COMPLEX else D
        d = tl.arange(0, DP)
        in_d = d < D
        h = tl.load(heads + b)
        r = tl.load(relations + b)
        t = tl.load(tails + b)
        party = tl.load(parties + b)
        ask = tl.load(asks + b).to(tl.int32)
        k = tl.where(ask != 0, t, h)
        a = tl.where(ask != 0, h, t)
        turn = tl.where(ask != 0, -1.0, 1.0)
        start = tl.load(starts + party)
        kx = _rows(entity, k, d, EW, False, D, EVEN)
        rx = _rows(relation, r, d, RW, False, D, EVEN)
        ax = _rows(entity, a, d, EW, False, D, EVEN)
        ky = kx
        ay = ax
        cx = rx
        cy = rx
        qy = kx
        if WIDE:
            ky = _rows(entity, k, d, EW, True, D, EVEN)
            ay = _rows(entity, a, d, EW, True, D, EVEN)
            if MODEL == ROTATION:
                angle = rx * phase * turn
                cx = tl.where(in_d, tl.cos(angle), 0.0)
                cy = tl.sin(angle)
            else:
                cy = _rows(relation, r, d, RW, True, D, EVEN) * turn
            qx = kx * cx - ky * cy
            qy = kx * cy + ky * cx
        elif MODEL == PRODUCT:
            qx = kx * rx
        else:
            qx = kx + turn * rx
        prior_at = r * prior_width
        constant = 0.0
        prior_answer = 0.0
        if PRIOR:
            on_tails = tl.load(prior_tails + prior_at + t - start)
            on_heads = tl.load(prior_heads + prior_at + h - start)
            constant = tl.where(ask != 0, on_tails, on_heads)
            prior_answer = tl.where(ask != 0, on_heads, on_tails)
        sp1, upx, upy = _away(qx[None, :], qy[None, :], ax[None, :], ay[None, :], MODEL)
        sp = tl.sum(sp1, 0) + gamma + constant + prior_answer

        # First pass: all scores, and what the loss needs to know of them together.
        m = float("-inf")
        z = 0.0
        total = 0.0
        if LOSS == SOFTMAX:
            m = sp
            z = 1.0
        if ONCE:  # all candidates fit into registers: they are read once
            j = tl.arange(0, BN)
            row, there, prior = _candidates(
                ids, a, prior_tails, prior_heads, prior_at, j, party, b, start, h, t, turn, N, POOL, PRIOR, SMALL
            )
            ex = _rows(entity, row[:, None], d[None, :], EW, False, D, EVEN)
            ey = ex
            if WIDE:
                ey = _rows(entity, row[:, None], d[None, :], EW, True, D, EVEN)
            s, ux, uy = _away(qx[None, :], qy[None, :], ex, ey, MODEL)
        for j0 in range(0, N, BN):
            if not ONCE:
                j = j0 + tl.arange(0, BN)
                row, there, prior = _candidates(
                    ids, a, prior_tails, prior_heads, prior_at, j, party, b, start, h, t, turn, N, POOL, PRIOR, SMALL
                )
                ex = _rows(entity, row[:, None], d[None, :], EW, False, D, EVEN)
                ey = ex
                if WIDE:
                    ey = _rows(entity, row[:, None], d[None, :], EW, True, D, EVEN)
                s, ux, uy = _away(qx[None, :], qy[None, :], ex, ey, MODEL)
            sc = s + gamma + constant + prior
            if (LOSS == SELF_ADVERSARIAL) | (LOSS == SOFTMAX):
                sharp = alpha if LOSS == SELF_ADVERSARIAL else 1.0
                top = tl.max(tl.where(there, sharp * sc, float("-inf")), 0)
                new = tl.maximum(m, top)
                old = tl.where(m == float("-inf"), 0.0, tl.exp(m - new))
                e = tl.where(there, tl.exp(sharp * sc - new), 0.0)
                z = z * old + tl.sum(e, 0)
                if LOSS == SELF_ADVERSARIAL:
                    total = total * old + tl.sum(e * _softplus(sc), 0)
                m = tl.where(new == float("-inf"), m, new)
            elif LOSS == LOGISTIC:
                z += tl.sum(tl.where(there, 1.0, 0.0), 0)
                total += tl.sum(tl.where(there, _softplus(sc), 0.0), 0)
            else:
                z += tl.sum(tl.where(there, 1.0, 0.0), 0)
                total += tl.sum(tl.where(there, tl.maximum(alpha - sp + sc, 0.0), 0.0), 0)
        if LOSS != SOFTMAX:
            z = tl.where(z == 0.0, 1.0, z)  # no candidate is there
        if LOSS == SELF_ADVERSARIAL:
            m = tl.where(m == float("-inf"), 0.0, m)
        if LOSS == SOFTMAX:
            loss = m + tl.log(z) - sp
            pull = tl.exp(sp - m) / z - 1.0
        elif LOSS == MARGIN:
            loss = total / z
            pull = 0.0
        else:
            loss = _softplus(-sp) + total / z
            pull = -_sigmoid(-sp)
        tl.store(losses + b, loss)
        if SUMMED:
            tl.atomic_add(step_losses + (tl.load(number) + ahead) * parties_total + party, loss, sem="relaxed")
        w = weight
        if CLIPPED:
            w = 1.0

        # Second pass: gradients of candidates, and of the query through them.
        gqx = tl.zeros([DP], tl.float32)
        gqy = tl.zeros([DP], tl.float32)
        gax = tl.zeros([DP], tl.float32)
        gay = tl.zeros([DP], tl.float32)
        gkx = tl.zeros([DP], tl.float32)
        gky = tl.zeros([DP], tl.float32)
        square = 0.0
        for j0 in range(0, N, BN):
            if not ONCE:
                j = j0 + tl.arange(0, BN)
                row, there, prior = _candidates(
                    ids, a, prior_tails, prior_heads, prior_at, j, party, b, start, h, t, turn, N, POOL, PRIOR, SMALL
                )
                ex = _rows(entity, row[:, None], d[None, :], EW, False, D, EVEN)
                ey = ex
                if WIDE:
                    ey = _rows(entity, row[:, None], d[None, :], EW, True, D, EVEN)
                s, ux, uy = _away(qx[None, :], qy[None, :], ex, ey, MODEL)
            g = _pull(s + gamma + constant + prior, there, sp, m, z, alpha, LOSS) * w
            if LOSS == MARGIN:
                pull -= tl.sum(g, 0) / w
            if NEGATIVE:
                if (MODEL == PRODUCT) | (MODEL == COMPLEX):
                    gqx += tl.sum(g[:, None] * ex, 0)
                    gqy += tl.sum(g[:, None] * ey, 0)
                else:
                    gqx -= tl.sum(g[:, None] * ux, 0)
                    gqy -= tl.sum(g[:, None] * uy, 0)
                if CLIPPED:
                    free = there
                    times = there.to(tl.float32)
                    if not POOL:  # what was drawn twice is one row; what is the example's own joins its row
                        every = tl.arange(0, NP)
                        others = tl.load(ids + b * N + every, mask=every < N, other=-1)
                        times = tl.sum((row[:, None] == others[None, :]).to(tl.float32), 1)
                        on_a = (there & (row == a)).to(tl.float32) * g
                        on_k = (there & (row == k) & (row != a)).to(tl.float32) * g
                        free = there & (row != a) & (row != k)
                        gax += tl.sum(on_a[:, None] * ux, 0)
                        gkx += tl.sum(on_k[:, None] * ux, 0)
                        if WIDE:
                            gay += tl.sum(on_a[:, None] * uy, 0)
                            gky += tl.sum(on_k[:, None] * uy, 0)
                    long = tl.sum(ux * ux, 1)
                    if WIDE:
                        long += tl.sum(uy * uy, 1)
                    if MASKED:
                        free = free & (tl.load(row_mask + row, mask=there, other=0) != 0)
                    square += tl.sum(tl.where(free, times * g * g * long, 0.0), 0)
                else:
                    # What is absent stands at the answer's own row with a pull of 0.
                    _add(g_entity, row[:, None], d[None, :], EW, g[:, None] * ux, False, D, EVEN)
                    if WIDE:
                        _add(g_entity, row[:, None], d[None, :], EW, g[:, None] * uy, True, D, EVEN)
        if POSITIVE:
            pull = pull * w
            px = tl.sum(upx, 0)
            gax += pull * px
            if (MODEL == PRODUCT) | (MODEL == COMPLEX):
                gqx += pull * ax
            else:
                gqx -= pull * px
            if WIDE:
                py = tl.sum(upy, 0)
                gay += pull * py
                if MODEL == COMPLEX:
                    gqy += pull * ay
                else:
                    gqy -= pull * py

        # From the query to the known entity and the relation.
        if WIDE:
            gkx += gqx * cx + gqy * cy
            gky += gqy * cx - gqx * cy
            gcx = gqx * kx + gqy * ky
            gcy = gqy * kx - gqx * ky
            if MODEL == ROTATION:
                grx = (gcy * cx - gcx * cy) * phase * turn
                gry = grx
            else:
                grx = gcx
                gry = gcy * turn
        elif MODEL == PRODUCT:
            gkx += gqx * rx
            grx = gqx * kx
            gry = grx
        else:
            gkx += gqx
            grx = gqx * turn
            gry = grx
        loop = h == t
        if CLIPPED:
            grx = grx * relation_scale
            gry = gry * relation_scale
            if loop:  # head and tail are one row
                gkx += gax
                gky += gay
                gax = gax * 0.0
                gay = gay * 0.0
            if MASKED:
                on_k = tl.load(row_mask + k).to(tl.float32)
                on_a = tl.load(row_mask + a).to(tl.float32)
                gkx = tl.where(on_k != 0, gkx, 0.0)
                gky = tl.where(on_k != 0, gky, 0.0)
                gax = tl.where(on_a != 0, gax, 0.0)
                gay = tl.where(on_a != 0, gay, 0.0)
            of_k = tl.sum(gkx * gkx, 0)
            of_a = tl.sum(gax * gax, 0)
            square += tl.sum(grx * grx, 0)
            if WIDE:
                of_k += tl.sum(gky * gky, 0)
                of_a += tl.sum(gay * gay, 0)
                if MODEL == COMPLEX:
                    square += tl.sum(gry * gry, 0)
            norm = tl.sqrt(square + of_k + of_a)
            tl.store(norms + b, norm)
            clip = tl.load(clips + party)
            finite = tl.zeros([DP], tl.float32) + norm < float("inf")  # false for NaN too
            factor = tl.where(norm > clip, clip / norm, 1.0)
            fk = factor
            fa = factor
            if ROWS:
                long_k = tl.sqrt(of_k) * factor
                long_a = tl.sqrt(of_a) * factor
                fk = factor * tl.where(long_k > row_clip, row_clip / long_k, 1.0)
                fa = factor * tl.where(long_a > row_clip, row_clip / long_a, 1.0)
            tl.atomic_add(g_entity + k * EW + d, gkx * fk, mask=in_d & finite, sem="relaxed")
            tl.atomic_add(g_entity + a * EW + d, gax * fa, mask=in_d & finite, sem="relaxed")
            tl.atomic_add(g_relation + r * RW + d, grx * factor, mask=in_d & finite, sem="relaxed")
            if WIDE:
                tl.atomic_add(g_entity + k * EW + D + d, gky * fk, mask=in_d & finite, sem="relaxed")
                tl.atomic_add(g_entity + a * EW + D + d, gay * fa, mask=in_d & finite, sem="relaxed")
                if MODEL == COMPLEX:
                    tl.atomic_add(g_relation + r * RW + D + d, gry * factor, mask=in_d & finite, sem="relaxed")
            if NEGATIVE:
                for j0 in range(0, N, BN):
                    j = j0 + tl.arange(0, BN)
                    row, there, prior = _candidates(
                        ids,
                        a,
                        prior_tails,
                        prior_heads,
                        prior_at,
                        j,
                        party,
                        b,
                        start,
                        h,
                        t,
                        turn,
                        N,
                        POOL,
                        PRIOR,
                        SMALL,
                    )
                    free = there
                    times = there.to(tl.float32)
                    if not POOL:
                        free = there & (row != a) & (row != k)
                        every = tl.arange(0, NP)
                        others = tl.load(ids + b * N + every, mask=every < N, other=-1)
                        times = tl.sum((row[:, None] == others[None, :]).to(tl.float32), 1)
                    if MASKED:
                        free = free & (tl.load(row_mask + row, mask=there, other=0) != 0)
                    ex = _rows(entity, row[:, None], d[None, :], EW, False, D, EVEN)
                    ey = ex
                    if WIDE:
                        ey = _rows(entity, row[:, None], d[None, :], EW, True, D, EVEN)
                    s, ux, uy = _away(qx[None, :], qy[None, :], ex, ey, MODEL)
                    g = _pull(s + gamma + constant + prior, there, sp, m, z, alpha, LOSS) * factor
                    if ROWS:
                        long = tl.sum(ux * ux, 1)
                        if WIDE:
                            long += tl.sum(uy * uy, 1)
                        long = tl.sqrt(long) * g * times
                        g = g * tl.where(long > row_clip, row_clip / long, 1.0)
                    at = g_entity + row[:, None] * EW + d[None, :]
                    write = (in_d & finite)[None, :] & free[:, None]
                    tl.atomic_add(at, g[:, None] * ux, mask=write, sem="relaxed")
                    if WIDE:
                        tl.atomic_add(at + D, g[:, None] * uy, mask=write, sem="relaxed")
        else:
            _add(g_entity, k, d, EW, gkx, False, D, EVEN)
            _add(g_entity, a, d, EW, gax, False, D, EVEN)
            _add(g_relation, r, d, RW, grx, False, D, EVEN)
            if WIDE:
                _add(g_entity, k, d, EW, gky, True, D, EVEN)
                _add(g_entity, a, d, EW, gay, True, D, EVEN)
                if MODEL == COMPLEX:
                    _add(g_relation, r, d, RW, gry, True, D, EVEN)


@triton.jit
def _philox(c0, c1, c2, c3, k0, k1):
    """Philox4x32-10 on uint32 words: the same bits as `tacit.draws.philox`."""
    k0 = (c0 * 0 + k0).to(tl.uint32)
    k1 = (c0 * 0 + k1).to(tl.uint32)
    for _ in tl.static_range(10):
        high0 = tl.umulhi(c0, M0)
        low0 = c0 * M0
        high1 = tl.umulhi(c2, M1)
        low1 = c2 * M1
        c0 = high1 ^ c1 ^ k0
        c1 = low1
        c2 = high0 ^ c3 ^ k1
        c3 = low0
        k0 = k0 + K0
        k1 = k1 + K1
    return c0, c1, c2, c3


@triton.jit
def _lane(c0, c1, c2, c3, k0, k1, lane):
    """One of the four words of each block: made four times over, and still nothing beside reading the rows."""
    w0, w1, w2, w3 = _philox(c0, c1, c2, c3, k0, k1)
    return tl.where(lane == 0, w0, tl.where(lane == 1, w1, tl.where(lane == 2, w2, w3)))


@triton.jit
def _pick(entity, word, many, first):
    return tl.load(entity + first + tl.umulhi(word, many).to(tl.int64))


@triton.jit
def _is_known(known, key, ask, MASK: tl.constexpr):
    """Whether each key is in the hash table of facts; only for those that are asked for."""
    place = (((key * 0x2545F4914F6CDD1D) >> 40) & 0xFFFFFF) & MASK
    found = tl.load(known + place, mask=ask, other=-1)
    further = ask & (found != -1) & (found != key)
    while tl.sum(further.to(tl.int32), 0) > 0:
        place = (place + 1) & MASK
        found = tl.where(further, tl.load(known + place, mask=further, other=-1), found)
        further = further & (found != -1) & (found != key)
    return ask & (found == key)


@triton.jit
def _draw(
    order, begins, sizes, wanted, taken, most, triples, halves, head_share, numbers, many, first, candidates, known,
    number, ahead, heads, relations, tails, asks, weights, parties, ids, key0, key1, batch, entity_total,
    relation_total, full_batch, N: tl.constexpr, NP: tl.constexpr, MASK: tl.constexpr, SIDES: tl.constexpr,
    COPIES: tl.constexpr, FILTERED: tl.constexpr, POOL: tl.constexpr, MOST_ATTEMPTS: tl.constexpr,
    NEGATIVES: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    """Which triple is at this place of this step, from which side it is asked, and its negatives."""
    b = tl.program_id(0).to(tl.int64)
    party = b // (batch * COPIES)
    inside = b % (batch * COPIES)
    copy = inside // batch
    place = inside % batch
    n = tl.load(number) + ahead
    step = tl.load(taken + party) + n
    size = tl.load(sizes + party)
    there = (tl.load(wanted + party) != 0) & (n * full_batch + place < size) & (step < tl.load(most + party))
    tl.store(weights + b, tl.where(there, 1.0, 0.0))
    tl.store(parties + b, party)
    if there:
        row = tl.load(order + tl.load(begins + party) + n * full_batch + place)
        h = tl.load(triples + row * 3)
        r = tl.load(triples + row * 3 + 1)
        t = tl.load(triples + row * 3 + 2)
        slot = place + copy * full_batch
        word2 = step.to(tl.uint32)
        whose = tl.load(numbers + party).to(tl.uint32)
        ask = copy * 0
        if SIDES == 1:
            ask = copy * 0 + 1
        elif SIDES == 2:
            ask = copy
        elif SIDES == 3:
            ask = step % 2
        elif SIDES >= 4:
            if SIDES == 6:  # reciprocal: the second copy is turned round
                half = tl.load(halves + party)
                h2 = tl.where(copy != 0, t, h)
                t = tl.where(copy != 0, h, t)
                h = h2
                r = tl.where(copy != 0, r + half, r)
            else:
                word0 = slot.to(tl.uint32)
                coin, _1, _2, _3 = _philox(word0, word0 * 0, word2, whose | (SIDE << 20), key0, key1)
                coin = coin.to(tl.float64) * 2.3283064365386963e-10
                share = coin * 0.0 + 0.5
                if SIDES == 5:
                    share = tl.load(head_share + row).to(tl.float64)
                ask = tl.where(coin < share, 1, 0).to(tl.int64)
        tl.store(heads + b, h)
        tl.store(relations + b, r)
        tl.store(tails + b, t)
        tl.store(asks + b, ask.to(tl.int8))
        if not POOL:
            at = tl.arange(0, NP)
            lane = at % 4
            word0 = (slot * ((N + 3) // 4) + at // 4).to(tl.uint32)
            zero = word0 * 0
            word3 = zero + (whose | (NEGATIVES << 20))
            many_ = zero + tl.load(many + party).to(tl.uint32)
            first_ = tl.load(first + party)
            chosen = _pick(candidates, _lane(word0, zero, zero + word2, word3, key0, key1, lane), many_, first_)
            if FILTERED:
                head = tl.where(ask != 0, chosen, h)
                tail = tl.where(ask != 0, t, chosen)
                bad = _is_known(known, (head * relation_total + r) * entity_total + tail, at < N, MASK)
                attempt = 1
                while (tl.sum(bad.to(tl.int32), 0) > 0) & (attempt < MOST_ATTEMPTS):
                    again = _lane(word0, zero + attempt, zero + word2, word3, key0, key1, lane)
                    chosen = tl.where(bad, _pick(candidates, again, many_, first_), chosen)
                    head = tl.where(ask != 0, chosen, h)
                    tail = tl.where(ask != 0, t, chosen)
                    bad = _is_known(known, (head * relation_total + r) * entity_total + tail, bad, MASK)
                    attempt += 1
                chosen = tl.where(bad, -1, chosen)
            tl.store(ids + b * N + at, chosen, mask=at < N)


@triton.jit
def _draw_pool(numbers, many, first, candidates, taken, number, ahead, pool, short, key0, key1, P: tl.constexpr,
               DRAWN: tl.constexpr, PURPOSE: tl.constexpr):  # fmt: skip
    """A party's pool: the first P distinct entities of its stream."""
    party = tl.program_id(0)
    step = (tl.load(taken + party) + tl.load(number) + ahead).to(tl.uint32)
    whose = tl.load(numbers + party).to(tl.uint32) | (PURPOSE << 20)
    range_ = tl.load(many + party).to(tl.uint32)
    at = tl.arange(0, DRAWN)
    zero = (at * 0).to(tl.uint32)
    word = _lane((at // 4).to(tl.uint32), zero, zero + step, zero + whose, key0, key1, at % 4)
    value = tl.umulhi(word, zero + range_).to(tl.int32)
    repeats = at * 0
    for begin in range(0, DRAWN, 32):  # against all that came before, some at a time
        other_at = begin + tl.arange(0, 32)
        none = (other_at * 0).to(tl.uint32)
        drawn = _lane((other_at // 4).to(tl.uint32), none, none + step, none + whose, key0, key1, other_at % 4)
        other = tl.umulhi(drawn, none + range_).to(tl.int32)
        same = (value[:, None] == other[None, :]) & (other_at[None, :] < at[:, None])
        repeats += tl.sum(same.to(tl.int32), 1)
    fresh = repeats == 0
    rank = tl.cumsum(fresh.to(tl.int32), 0) - 1
    row = tl.load(candidates + tl.load(first + party) + value.to(tl.int64))
    tl.store(pool + party * P + rank, row, mask=fresh & (rank < P))
    tl.atomic_or(short, (tl.sum(fresh.to(tl.int32), 0) < P).to(tl.int32))


@triton.jit
def _adam(
    table, gradient, mean, square, owner, sizes, wanted, taken, most, number, ahead, first, second, batch, rate,
    beta1, beta2, eps, count, parties, WIDTH: tl.constexpr, ONE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Dense Adam on stacked rows of active parties; empties the gradient."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = i < count
    n = tl.load(number) + ahead
    party = tl.load(number) * 0 if ONE else tl.load(owner + i // WIDTH, mask=there, other=0)
    left = tl.load(sizes + party) - n * batch
    active = (tl.load(wanted + party) != 0) & (left > 0) & (tl.load(taken + party) + n < tl.load(most + party))
    g = tl.load(gradient + i, mask=there, other=0.0) / tl.minimum(left, batch).to(tl.float32)
    live = there & active
    m = beta1 * tl.load(mean + i, mask=live, other=0.0) + (1.0 - beta1) * g
    v = beta2 * tl.load(square + i, mask=live, other=0.0) + (1.0 - beta2) * g * g
    at = n * parties + party
    update = m / (tl.sqrt(v) / tl.load(second + at) + eps)
    old = tl.load(table + i, mask=live, other=0.0)
    tl.store(table + i, old - rate / tl.load(first + at) * update, mask=live)
    tl.store(mean + i, m, mask=live)
    tl.store(square + i, v, mask=live)
    tl.store(gradient + i, tl.zeros([BLOCK], tl.float32), mask=there)


@triton.jit
def _advance(number, steps):
    tl.store(number, tl.load(number) + steps)


IN_REGISTERS, FEW, WARPS_ONCE = 1 << 15, 128, 16
"""The largest tile of candidates that is kept in registers, up to how many examples, and its warps."""
TILE, WARPS = 1 << 11, 4
"""The size of tiles otherwise, and their warps: the fastest on an H200 of those tried."""


def model_of(scorer: Any) -> int | None:
    """Which of the kernels' scores a scorer is; None: none of them."""
    if type(scorer) is TransE:
        return 0 if scorer.norm == 1 else 1
    return {DistMult: 2, RotatE: 3, ComplEx: 4}.get(type(scorer))


class Triton:
    """The kernels for the GPU, and the reference for what they do not cover."""

    def __init__(self, objective: Objective, layout: Layout) -> None:
        self.objective, self.layout = objective, layout
        self.reference = Reference(objective, layout)
        self._starts: Tensor | None = None
        self._priors: tuple[Tensor, Tensor] | None = None

    def covers(self) -> bool:
        """Whether the kernels can do this objective at all."""
        objective = self.objective
        known = model_of(objective.scorer) is not None and type(objective.loss) in LOSS_OF
        return known and not objective.regulariser.weight

    def accumulate(self, tables: Tables, chunk: Chunk, rule: Rule, into: Gradients) -> tuple[Tensor, Tensor | None]:
        sampled = chunk.negatives is not None or chunk.pool is not None
        whole = chunk.drop_entity is None and chunk.drop_relation is None and tables.entity.dtype == torch.float32
        clipped = isinstance(rule, Clipped)
        alone = not clipped or bool((chunk.unit == torch.arange(len(chunk), device=chunk.unit.device)).all())
        if not (self.covers() and sampled and whole and alone):
            return self.reference.accumulate(tables, chunk, rule, into)
        if isinstance(rule, Clipped) and rule.part != "both" and not self.objective.loss.apart:
            return self.reference.accumulate(tables, chunk, rule, into)  # which says why not
        losses = tables.entity.new_zeros(len(chunk))
        norms = tables.entity.new_zeros(len(chunk)) if clipped else None
        if len(chunk):
            ids = chunk.negatives if chunk.pool is None else chunk.pool
            assert ids is not None
            self.launch(tables, chunk, ids.contiguous(), chunk.pool is not None, rule, into.tables, losses, norms)
            into.entity_rows += [chunk.head, chunk.tail, ids[ids >= 0]]
            into.relation_rows.append(chunk.relation)
        return losses, norms

    def launch(
        self, tables: Tables, chunk: Any, ids: Tensor, pool: bool, rule: Rule, into: Tables, losses: Tensor,
        norms: Tensor | None, summed: tuple[Tensor, Tensor, int] | None = None,
    ) -> None:  # fmt: skip
        """Start the kernel for every example of the chunk."""
        scorer, loss, device = self.objective.scorer, self.objective.loss, tables.entity.device
        model, count = model_of(scorer), ids.shape[1]
        dim = tables.relation.shape[1] // (2 if model == 4 else 1)
        if self._starts is None:
            self._starts = torch.tensor(self.layout.entity_start, device=device)
        prior = self.objective.prior
        if prior is not None and self._priors is None:
            self._priors = (prior.tails * prior.scale).contiguous(), (prior.heads * prior.scale).contiguous()
        tails, heads = self._priors or (losses, losses)
        clipped, how = isinstance(rule, Clipped), cast(Any, rule)
        part = how.part if clipped else "both"
        mask = how.row_mask.to(torch.int8) if clipped and how.row_mask is not None else losses
        phase = math.pi / (scorer.init_scale or scorer.spread(dim)) if model == 3 else 0.0
        wide = triton.next_power_of_2(dim)
        several = triton.next_power_of_2(count)
        # Few examples leave the GPU idle: then each takes more warps, and keeps its candidates in registers.
        once = not clipped and model in (0, 1, 2) and several * wide <= IN_REGISTERS and len(chunk.head) <= FEW
        rows = several if once else min(max(TILE // wide, 4), several)
        _example[(len(chunk.head),)](
            tables.entity, tables.relation, into.entity, into.relation, chunk.head, chunk.relation, chunk.tail,
            chunk.asks_head, chunk.weight, chunk.party, ids, losses, losses if norms is None else norms,
            how.clip.float() if clipped else losses, mask, tails, heads, self._starts,
            getattr(scorer, "gamma", 0.0), phase,
            getattr(loss, "alpha", getattr(loss, "margin", 1.0)), how.relation_scale if clipped else 1.0,
            float(how.row_clip or 0.0) if clipped else 0.0, 0 if prior is None else prior.tails.shape[1],
            *(summed or (losses, losses, 0)), len(self.layout),
            N=count, BN=rows, NP=several, D=dim, DP=wide, MODEL=model, LOSS=LOSS_OF[type(loss)], POOL=pool,
            CLIPPED=clipped,
            MASKED=clipped and how.row_mask is not None, ROWS=clipped and how.row_clip is not None,
            PRIOR=prior is not None, POSITIVE=part in ("positive", "both"), NEGATIVE=part in ("negative", "both"),
            SUMMED=summed is not None, ONCE=once, SMALL=tables.entity.numel() < 1 << 31,
            num_warps=WARPS_ONCE if once else WARPS,
        )  # fmt: skip


SIDE_OF = {"tails": 0, "heads": 1, "both": 2, "alternate": 3, "random": 4, "bernoulli": 5}
RECIPROCAL = 6
CHAIN = 8
"""Steps that one CUDA graph holds: what is left over at the end of an epoch does nothing."""
BLOCK = 1024
FOREVER = 1 << 62


def hash_table(keys: Tensor) -> Tensor:
    """Keys in a table of a power of two, at most a quarter full, each at or after its hashed place; -1 is empty."""
    size = 1 << max(4, (4 * len(keys) - 1).bit_length())
    table = torch.full((size,), -1, dtype=torch.int64, device=keys.device)
    place = (((keys * 0x2545F4914F6CDD1D) >> 40) & 0xFFFFFF) & (size - 1)
    while len(keys):
        free = table[place] == -1
        table[place[free]] = keys[free]  # of several for one place, one stays
        rest = table[place] != keys
        keys, place = keys[rest], (place[rest] + 1) & (size - 1)
    return table


@dataclass
class _Places:
    """The fields of a chunk that the kernels read, in buffers of a step's full size."""

    head: Tensor
    relation: Tensor
    tail: Tensor
    party: Tensor
    asks_head: Tensor
    weight: Tensor


class Epochs:
    """Whole epochs on the GPU: draws, gradients and Adam, in CUDA graphs of several steps; the host is not waited for.

    A step is four launches: which triples and negatives, gradients, and Adam on either table. All that changes from
    step to step is one counter on the device. The draws are those of `tacit.examples`, bit for bit.
    """

    def __init__(self, cohort: Cohort, examples: Examples, kernel: Triton):
        self.cohort, self.examples, self.kernel, device = cohort, examples, kernel, cohort.tables.entity.device
        negatives, sampling, world, layout = examples.negatives, examples.sampling, examples.world, examples.layout
        self.batch, self.parties = min(sampling.batch, int(examples.sizes.max())), len(layout)
        self.copies = 2 if negatives.sides == "both" else 1
        self.sides = RECIPROCAL if sampling.reciprocal else SIDE_OF[negatives.sides]
        self.pool, self.filtered = isinstance(negatives, Pool), getattr(negatives, "filtered", False)
        self.count = min(negatives.count, int(world.many.max())) if self.pool else negatives.count
        places = self.parties * self.batch * self.copies
        ids = torch.zeros(6, places, dtype=torch.int64, device=device)
        self.places = _Places(ids[0], ids[1], ids[2], ids[3], ids[4].to(torch.int8), torch.zeros(places, device=device))
        rows = self.parties if self.pool else places
        self.ids = torch.full((rows, self.count), -1, dtype=torch.int64, device=device)
        self.losses, self.short = torch.zeros(places, device=device), torch.zeros(1, dtype=torch.int32, device=device)
        steps = -(-int(examples.steps_per_epoch().max()) // CHAIN) * CHAIN
        self.step_losses = torch.zeros(steps, self.parties, device=device)
        self.first, self.second = torch.ones(2, steps, self.parties, device=device)
        self.number = torch.zeros(1, dtype=torch.int64, device=device)
        self.order = torch.zeros(len(examples.triples), dtype=torch.int64, device=device)
        vectors = torch.zeros(5, self.parties, dtype=torch.int64, device=device)
        self.begins, self.sizes, self.wanted, self.taken, self.most = vectors
        self.sizes.copy_(torch.from_numpy(examples.sizes))
        self.known = hash_table(world.known)
        self.graph: Any = None
        if device.type == "cuda":
            self._steps()  # compiles; no one is wanted yet, so nothing moves
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self._steps()

    @staticmethod
    def fits(cohort: Cohort, examples: Examples, kernel: Any) -> bool:
        """Whether whole epochs of this training can be done here."""
        negatives, sampling = examples.negatives, examples.sampling
        drawn = type(negatives) is Independent or (
            type(negatives) is Pool and int(examples.world.many.min()) >= 4 * negatives.count
        )
        return (
            isinstance(kernel, Triton)
            and kernel.covers()
            and drawn
            and type(cohort.optimizer) is Adam
            and not (sampling.subsampling or sampling.dropout or examples.queries)
            and not getattr(cohort.scorer, "unit_entities", False)
            and int(examples.steps_per_epoch().max()) < 1 << 31
        )

    def _steps(self) -> None:
        for ahead in range(CHAIN):
            self._step(ahead)
        _advance[(1,)](self.number, CHAIN)

    def _step(self, ahead: int) -> None:
        examples, world, cohort, adam = self.examples, self.examples.world, self.cohort, self.cohort.optimizer
        assert isinstance(adam, Adam)
        key, p, size = (examples.seed & 0xFFFFFFFF, examples.seed >> 32), self.places, self.count
        share = examples.head_share if examples.negatives.sides == "bernoulli" else self.losses
        _draw[(len(p.head),)](
            self.order, self.begins, self.sizes, self.wanted, self.taken, self.most, examples.triples, examples.half,
            share, world.numbers, world.many, world.first, world.entity, self.known, self.number, ahead, p.head,
            p.relation, p.tail, p.asks_head, p.weight, p.party, self.ids, *key, self.batch, world.entity_total,
            world.relation_total, examples.sampling.batch, N=size, NP=triton.next_power_of_2(size),
            MASK=len(self.known) - 1, SIDES=self.sides,
            COPIES=self.copies, FILTERED=self.filtered, POOL=self.pool, MOST_ATTEMPTS=ATTEMPTS,
            NEGATIVES=int(Purpose.NEGATIVES), SIDE=int(Purpose.SIDE), num_warps=4,
        )  # fmt: skip
        if self.pool:
            _draw_pool[(self.parties,)](
                world.numbers, world.many, world.first, world.entity, self.taken, self.number, ahead, self.ids,
                self.short, *key, P=size, DRAWN=triton.next_power_of_2(2 * size + 64), PURPOSE=int(Purpose.POOL),
                num_warps=8,
            )  # fmt: skip
        summed = self.step_losses, self.number, ahead
        self.kernel.launch(
            cohort.tables, p, self.ids, self.pool, Plain(), cohort.gradients.tables, self.losses, None, summed
        )
        for part in PARTS:
            table, gradient = getattr(cohort.tables, part), getattr(cohort.gradients.tables, part)
            mean, square = (getattr(memory, part) for memory in cohort.memory)
            _adam[(triton.cdiv(table.numel(), BLOCK),)](
                table, gradient, mean, square, cohort.owner[part], self.sizes, self.wanted, self.taken, self.most,
                self.number, ahead, self.first, self.second, examples.sampling.batch, adam.learning_rate,
                adam.beta1, adam.beta2, adam.eps, table.numel(), self.parties, WIDTH=table.shape[1],
                ONE=self.parties == 1,                 BLOCK=BLOCK, num_warps=4,
            )  # fmt: skip

    def run(self, wanted: Tensor, most: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """An epoch of the wanted parties: (steps, parties) sums of losses, and each party's steps and examples."""
        cohort, examples = self.cohort, self.examples
        order = examples.order(cohort.epochs, wanted)
        self.order[: len(order)] = order
        size = torch.where(wanted, self.sizes, 0)
        self.begins.copy_(size.cumsum(0) - size)
        self.wanted.copy_(wanted)
        self.taken.copy_(cohort.steps)
        self.most.copy_(torch.full_like(self.most, FOREVER) if most is None else most)
        batch = examples.sampling.batch
        steps = torch.minimum(-(-size // batch), (self.most - self.taken).clamp(min=0))
        number = int(steps.max())
        moment = cohort.moments[None, :] + torch.arange(1, len(self.first) + 1, device=size.device)[:, None]
        adam = cohort.optimizer
        assert isinstance(adam, Adam)
        self.first.copy_(1 - adam.beta1 ** moment.double())
        self.second.copy_((1 - adam.beta2 ** moment.double()).sqrt())
        self.step_losses.zero_()
        self.number.zero_()
        for _ in range(-(-number // CHAIN)):
            if self.graph is None:
                self._steps()
            else:
                self.graph.replay()
        if self.pool and int(self.short):
            raise TacitError("a pool had too few distinct entities: use fewer negatives")
        cohort.steps += steps
        cohort.moments += steps
        return self.step_losses[:number], steps, torch.minimum(size, steps * batch) * self.copies
