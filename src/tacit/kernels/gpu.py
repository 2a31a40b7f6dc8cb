"""Kernels for the GPU, in Triton: one program per example, everything about it in registers.

For TransE (L1 and L2), RotatE, DistMult and ComplEx, with any loss over sampled negatives, plain or clipped, negatives
of an example's own or a pool, with a prior. Each makes the example's query, goes over its candidates twice (a softmax
needs all scores before any gradient), and adds gradients to the dense buffers by atomic additions. So two runs on a GPU
may differ in the last digits; on a CPU they do not. The rows of a pool are pulled at by all examples at once: they
collect what pulls at them in a second kernel, and only its partial sums are added atomically.

Under `Clipped` a third pass writes, once the norm is known. The norm is exact: a candidate drawn twice counts once with
twice the gradient, one that is the example's own head or tail joins that row, and of a self-loop head and tail are one.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import triton
import triton.language as tl

from tacit.kernels.contract import Clipped, Rule
from tacit.kernels.fused import Fused, Places
from tacit.models import Tables

Tensor = Any
L1, L2, PRODUCT, ROTATION, COMPLEX = (tl.constexpr(i) for i in range(5))
SELF_ADVERSARIAL, LOGISTIC, SOFTMAX, MARGIN = (tl.constexpr(i) for i in range(4))
TINY = tl.constexpr(torch.finfo(torch.float32).tiny)
"""Below it the square of a modulus counts as 0, as in `tacit.models.scorer.modulus`."""


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
def _score(qx, qy, ex, ey, AXIS: tl.constexpr, MODEL: tl.constexpr):
    """The score of a query with a row, or with a tile of rows (AXIS 1), without gamma."""
    if MODEL == PRODUCT:
        s = tl.sum(qx * ex, AXIS)
    elif MODEL == COMPLEX:
        s = tl.sum(qx * ex + qy * ey, AXIS)
    elif MODEL == L1:
        s = -tl.sum(tl.abs(qx - ex), AXIS)
    elif MODEL == L2:
        s = -tl.sqrt(tl.sum((qx - ex) * (qx - ex), AXIS))
    else:
        s = -tl.sum(tl.sqrt((qx - ex) * (qx - ex) + (qy - ey) * (qy - ey)), AXIS)
    return s


@triton.jit
def _along(qx, qy, ex, ey, s, g, MODEL: tl.constexpr):
    """g x d score / d row, its two parts; the score s and g broadcast against a tile of rows."""
    if (MODEL == PRODUCT) | (MODEL == COMPLEX):
        vx = g * qx
        vy = g * qy
    elif MODEL == L1:
        df = qx - ex
        vx = tl.where(df > 0, g, tl.where(df < 0, -g, df * 0.0))  # of NaN it is NaN
        vy = vx
    elif MODEL == L2:
        vx = (qx - ex) * tl.where(s < 0, -g / s, s * 0.0)
        vy = vx
    else:
        dx = qx - ex
        dy = qy - ey
        n2 = dx * dx + dy * dy
        over = tl.where(n2 > TINY, g / tl.sqrt(n2), n2 * 0.0)
        vx = dx * over
        vy = dy * over
    return vx, vy


@triton.jit
def _length2(qx, qy, ex, ey, s, MODEL: tl.constexpr):
    """The squared length of d score / d e, candidate by candidate."""
    if MODEL == PRODUCT:
        long = tl.sum(qx * qx + 0.0 * ex, 1)
    elif MODEL == COMPLEX:
        long = tl.sum(qx * qx + qy * qy + 0.0 * ex, 1)
    elif MODEL == L1:
        long = tl.sum(tl.where(qx != ex, 1.0, 0.0), 1)
    elif MODEL == L2:
        long = tl.where(s < 0, 1.0, 0.0)
    else:
        long = tl.sum(tl.where((qx - ex) * (qx - ex) + (qy - ey) * (qy - ey) > TINY, 1.0, 0.0), 1)
    return long


@triton.jit
def _ask(entity, relation, k, r, d, phase, turn, D: tl.constexpr, EW: tl.constexpr, RW: tl.constexpr,
         WIDE: tl.constexpr, MODEL: tl.constexpr, EVEN: tl.constexpr):  # fmt: skip
    """A known row, a relation and the query they make; of complex factors also their two parts."""
    kx = _rows(entity, k, d, EW, False, D, EVEN)
    rx = _rows(relation, r, d, RW, False, D, EVEN)
    ky = kx
    cx = rx
    cy = rx
    qy = kx
    if WIDE:
        ky = _rows(entity, k, d, EW, True, D, EVEN)
        if MODEL == ROTATION:
            angle = rx * phase * turn
            cx = tl.where(d < D, tl.cos(angle), 0.0)
            cy = tl.sin(angle)
        else:
            cy = _rows(relation, r, d, RW, True, D, EVEN) * turn
        qx = kx * cx - ky * cy
        qy = kx * cy + ky * cx
    elif MODEL == PRODUCT:
        qx = kx * rx
    else:
        qx = kx + turn * rx
    return kx, ky, rx, cx, cy, qx, qy


@triton.jit
def _back(kx, ky, rx, cx, cy, gqx, gqy, phase, turn, WIDE: tl.constexpr, MODEL: tl.constexpr):
    """From the gradient of the query to those of its known row and its relation."""
    gky = gqy
    if WIDE:
        gkx = gqx * cx + gqy * cy
        gky = gqy * cx - gqx * cy
        gcx = gqx * kx + gqy * ky
        gcy = gqy * kx - gqx * ky
        if MODEL == ROTATION:
            grx = (gcy * cx - gcx * cy) * phase * turn
            gry = grx
        else:
            grx = gcx
            gry = gcy * turn
    elif MODEL == PRODUCT:
        gkx = gqx * rx
        grx = gqx * kx
        gry = grx
    else:
        gkx = gqx
        grx = gqx * turn
        gry = grx
    return gkx, gky, grx, gry


@triton.jit
def _softplus(x):
    return tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _candidates(entity, ids, own, prior_tails, prior_heads, prior_at, j0, party, b, start, h, t, turn, d, qx, qy,
                N: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, EW: tl.constexpr, WIDE: tl.constexpr,
                MODEL: tl.constexpr, POOL: tl.constexpr, PRIOR: tl.constexpr, SMALL: tl.constexpr,
                EVEN: tl.constexpr):  # fmt: skip
    """A tile of candidates: rows, which are there, their prior, their values and scores."""
    j = j0 + tl.arange(0, BN)
    row = tl.load(ids + (party if POOL else b) * N + j, mask=j < N, other=-1)
    there = row >= 0
    if POOL:
        there = there & (row != h) & (row != t)
    ID: tl.constexpr = tl.int32 if SMALL else tl.int64  # offsets of 32 bits: half the integer work of the inner loops
    row = tl.where(there, row.to(ID), own.to(ID))
    prior = tl.zeros([BN], tl.float32)
    if PRIOR:
        at = prior_at + row - start
        prior = tl.where(turn > 0, tl.load(prior_tails + at), tl.load(prior_heads + at))
    ex = _rows(entity, row[:, None], d[None, :], EW, False, D, EVEN)
    ey = ex
    if WIDE:
        ey = _rows(entity, row[:, None], d[None, :], EW, True, D, EVEN)
    return j, row, there, prior, ex, ey, _score(qx[None, :], qy[None, :], ex, ey, 1, MODEL)


@triton.jit
def _times(ids, b, row, N: tl.constexpr, NP: tl.constexpr, BN: tl.constexpr):
    """How often each row of a tile is among an example's candidates."""
    same = tl.zeros([BN, 16], tl.int32)
    for begin in range(0, NP, 16):
        every = begin + tl.arange(0, 16)
        others = tl.load(ids + b * N + every, mask=every < N, other=-1)
        same += (row[:, None] == others[None, :]).to(tl.int32)
    return tl.sum(same, 1).to(tl.float32)


@triton.jit
def _pull(s, there, sp, m, z, alpha, LOSS: tl.constexpr):
    """d loss / d score of candidates, given what the first pass found."""
    if LOSS == SELF_ADVERSARIAL:
        g = tl.exp(alpha * s - m) * (1.0 / z) * _sigmoid(s)
    elif LOSS == LOGISTIC:
        g = _sigmoid(s) * (1.0 / z)
    elif LOSS == SOFTMAX:
        g = tl.exp(s - m) * (1.0 / z)
    else:
        far = alpha - sp + s
        g = tl.where((far > 0) | (far != far), 1.0 / z, 0.0)
    return tl.where(there, g, 0.0)


@triton.jit
def _example(
    entity, relation, g_entity, g_relation, heads, relations, tails, asks, weights, parties, ids, losses, norms, clips,
    row_mask, prior_tails, prior_heads, starts, gamma, phase, alpha, relation_scale, row_clip, prior_width, step_losses,
    number, ahead, parties_total, queries, pulls,
    N: tl.constexpr, BN: tl.constexpr, NP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, MODEL: tl.constexpr,
    LOSS: tl.constexpr, POOL: tl.constexpr, CLIPPED: tl.constexpr, MASKED: tl.constexpr, ROWS: tl.constexpr,
    ONLY: tl.constexpr, PRIOR: tl.constexpr, POSITIVE: tl.constexpr, NEGATIVE: tl.constexpr,
    SUMMED: tl.constexpr, ONCE: tl.constexpr, SMALL: tl.constexpr,
):  # fmt: skip
    """One example: its loss, and what it adds to the gradients."""
    b = tl.program_id(0).to(tl.int64)
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
        kx, ky, rx, cx, cy, qx, qy = _ask(entity, relation, k, r, d, phase, turn, D, EW, RW, WIDE, MODEL, EVEN)
        ax = _rows(entity, a, d, EW, False, D, EVEN)
        ay = ax
        if WIDE:
            ay = _rows(entity, a, d, EW, True, D, EVEN)
        if POOL:
            tl.store(queries + b * EW + d, qx, mask=in_d)
            if WIDE:
                tl.store(queries + b * EW + D + d, qy, mask=in_d)
        prior_at = r * prior_width
        constant = 0.0
        prior_answer = 0.0
        if PRIOR:
            on_tails = tl.load(prior_tails + prior_at + t - start)
            on_heads = tl.load(prior_heads + prior_at + h - start)
            constant = tl.where(ask != 0, on_tails, on_heads)
            prior_answer = tl.where(ask != 0, on_heads, on_tails)
        own_score = _score(qx, qy, ax, ay, 0, MODEL)  # of one row: as a tile of one it would be held by every thread
        sp = own_score + gamma + constant + prior_answer

        # First pass: all scores, and what the loss needs to know of them together.
        m = float("-inf")
        z = 0.0
        total = 0.0
        if LOSS == SOFTMAX:
            m = sp
            z = 1.0
        if ONCE:  # all candidates fit into registers: they are read once
            j, row, there, prior, ex, ey, s = _candidates(
                entity, ids, a, prior_tails, prior_heads, prior_at, 0, party, b, start, h, t, turn, d, qx, qy,
                N, BN, D, EW, WIDE, MODEL, POOL, PRIOR, SMALL, EVEN)  # fmt: skip
        for j0 in range(0, N, BN):
            if not ONCE:
                j, row, there, prior, ex, ey, s = _candidates(
                    entity, ids, a, prior_tails, prior_heads, prior_at, j0, party, b, start, h, t, turn, d, qx, qy,
                    N, BN, D, EW, WIDE, MODEL, POOL, PRIOR, SMALL, EVEN)  # fmt: skip
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
                total += tl.sum(tl.where(there & ((alpha - sp + sc > 0) | (sc != sc)), alpha - sp + sc, 0.0), 0)
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
            loss = (_softplus(-sp) if POSITIVE else 0.0) + (total / z if NEGATIVE else 0.0)
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
                j, row, there, prior, ex, ey, s = _candidates(
                    entity, ids, a, prior_tails, prior_heads, prior_at, j0, party, b, start, h, t, turn, d, qx, qy,
                    N, BN, D, EW, WIDE, MODEL, POOL, PRIOR, SMALL, EVEN)  # fmt: skip
            g = _pull(s + gamma + constant + prior, there, sp, m, z, alpha, LOSS) * w
            if LOSS == MARGIN:
                pull -= tl.sum(g, 0) / w
            if NEGATIVE:
                vx, vy = _along(qx[None, :], qy[None, :], ex, ey, s[:, None], g[:, None], MODEL)
                if (MODEL == PRODUCT) | (MODEL == COMPLEX):
                    gqx += tl.sum(g[:, None] * ex, 0)
                    if WIDE:  # else the sums would be made all the same, and nobody would use them
                        gqy += tl.sum(g[:, None] * ey, 0)
                else:
                    gqx -= tl.sum(vx, 0)
                    if WIDE:
                        gqy -= tl.sum(vy, 0)
                if CLIPPED:
                    free = there
                    times = there.to(tl.float32)
                    if not POOL:  # what was drawn twice is one row; what is the example's own joins its row
                        times = _times(ids, b, row, N, NP, BN)
                        on_a = there & (row == a)
                        on_k = there & (row == k) & (row != a)
                        free = there & (row != a) & (row != k)
                        if tl.sum((on_a | on_k).to(tl.int32), 0) > 0:
                            gax += tl.sum(tl.where(on_a[:, None], vx, 0.0), 0)
                            gkx += tl.sum(tl.where(on_k[:, None], vx, 0.0), 0)
                            if WIDE:
                                gay += tl.sum(tl.where(on_a[:, None], vy, 0.0), 0)
                                gky += tl.sum(tl.where(on_k[:, None], vy, 0.0), 0)
                    if MASKED:
                        free = free & (tl.load(row_mask + row, mask=there, other=0) != 0)
                    long = _length2(qx[None, :], qy[None, :], ex, ey, s, MODEL)
                    square += tl.sum(tl.where(free, times * g * g * long, 0.0), 0)
                    if POOL:
                        tl.store(pulls + b * N + j, tl.where(free, g, 0.0), mask=j < N)
                elif POOL:
                    tl.store(pulls + b * N + j, g, mask=j < N)
                else:
                    # What is absent stands at the answer's own row with a pull of 0.
                    _add(g_entity, row[:, None], d[None, :], EW, vx, False, D, EVEN)
                    if WIDE:
                        _add(g_entity, row[:, None], d[None, :], EW, vy, True, D, EVEN)
        if POSITIVE:
            px, py = _along(qx, qy, ax, ay, own_score, pull * w, MODEL)
            gax += px
            gay += py
            if (MODEL == PRODUCT) | (MODEL == COMPLEX):
                gqx += pull * w * ax
                gqy += pull * w * ay
            else:
                gqx -= px
                gqy -= py

        dkx, dky, grx, gry = _back(kx, ky, rx, cx, cy, gqx, gqy, phase, turn, WIDE, MODEL)
        gkx += dkx
        gky += dky
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
            if not ONLY:
                square += tl.sum(grx * grx, 0)
            if WIDE:
                of_k += tl.sum(gky * gky, 0)
                of_a += tl.sum(gay * gay, 0)
                if (MODEL == COMPLEX) and not ONLY:
                    square += tl.sum(gry * gry, 0)
            norm = tl.sqrt(square + of_k + of_a)
            tl.store(norms + b, norm)
            clip = tl.load(clips + party)
            finite = tl.zeros([DP], tl.float32) + norm < float("inf")  # false for NaN too
            factor = tl.where(norm <= clip, 1.0, clip / norm)
            fk = factor
            fa = factor
            if ONLY:
                grx = tl.where(tl.abs(grx) < float("inf"), grx, 0.0)
                gry = tl.where(tl.abs(gry) < float("inf"), gry, 0.0)
            else:
                grx = grx * factor
                gry = gry * factor
            if ROWS:
                long_k = tl.sqrt(of_k) * factor
                long_a = tl.sqrt(of_a) * factor
                fk = factor * tl.where(long_k > row_clip, row_clip / long_k, 1.0)
                fa = factor * tl.where(long_a > row_clip, row_clip / long_a, 1.0)
            tl.atomic_add(g_entity + k * EW + d, gkx * fk, mask=in_d & finite, sem="relaxed")
            tl.atomic_add(g_entity + a * EW + d, gax * fa, mask=in_d & finite, sem="relaxed")
            tl.atomic_add(g_relation + r * RW + d, grx, mask=in_d & finite, sem="relaxed")
            if WIDE:
                tl.atomic_add(g_entity + k * EW + D + d, gky * fk, mask=in_d & finite, sem="relaxed")
                tl.atomic_add(g_entity + a * EW + D + d, gay * fa, mask=in_d & finite, sem="relaxed")
                if MODEL == COMPLEX:
                    tl.atomic_add(g_relation + r * RW + D + d, gry, mask=in_d & finite, sem="relaxed")
            if NEGATIVE:
                if POOL:
                    tl.debug_barrier()  # the second pass has written what is read here
                for j0 in range(0, N, BN):
                    if POOL and not ROWS:
                        j = j0 + tl.arange(0, BN)
                        g = tl.load(pulls + b * N + j, mask=j < N, other=0.0) * factor
                        known = tl.zeros([BN], tl.float32) + norm < float("inf")
                        tl.store(pulls + b * N + j, tl.where(known, g, 0.0), mask=j < N)
                    else:
                        if not ONCE:
                            j, row, there, prior, ex, ey, s = _candidates(
                                entity, ids, a, prior_tails, prior_heads, prior_at, j0, party, b, start, h, t, turn,
                                d, qx, qy, N, BN, D, EW, WIDE, MODEL, POOL, PRIOR, SMALL, EVEN)  # fmt: skip
                        free = there & (tl.zeros([BN], tl.float32) + norm < float("inf"))
                        if not POOL:
                            free = free & (row != a) & (row != k)
                        if MASKED:
                            free = free & (tl.load(row_mask + row, mask=there, other=0) != 0)
                        g = _pull(s + gamma + constant + prior, there, sp, m, z, alpha, LOSS) * factor
                        if ROWS:
                            long = tl.sqrt(_length2(qx[None, :], qy[None, :], ex, ey, s, MODEL)) * g
                            if not POOL:
                                long = long * _times(ids, b, row, N, NP, BN)
                            g = g * tl.where(long > row_clip, row_clip / long, 1.0)
                        if POOL:
                            tl.store(pulls + b * N + j, tl.where(free, g, 0.0), mask=j < N)
                        else:
                            vx, vy = _along(qx[None, :], qy[None, :], ex, ey, s[:, None], g[:, None], MODEL)
                            at = g_entity + row[:, None] * EW + d[None, :]
                            write = in_d[None, :] & free[:, None]
                            tl.atomic_add(at, vx, mask=write, sem="relaxed")
                            if WIDE:
                                tl.atomic_add(at + D, vy, mask=write, sem="relaxed")
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
def _pool(entity, g_entity, weights, parties, ids, queries, pulls, batch, N: tl.constexpr, BN: tl.constexpr,
          D: tl.constexpr, DP: tl.constexpr, MODEL: tl.constexpr, PARTS: tl.constexpr):  # fmt: skip
    """Some rows of a party's pool collect what every PARTS-th example pulls at them."""
    EVEN: tl.constexpr = D == DP
    WIDE: tl.constexpr = (MODEL == ROTATION) | (MODEL == COMPLEX)
    EW: tl.constexpr = 2 * D if WIDE else D
    d = tl.arange(0, DP)
    party = tl.program_id(2)
    j = tl.program_id(0) * BN + tl.arange(0, BN)
    row = tl.load(ids + party * N + j, mask=j < N, other=-1).to(tl.int64)
    there = row >= 0
    row = tl.where(there, row, 0)
    ex = _rows(entity, row[:, None], d[None, :], EW, False, D, EVEN)
    ey = ex
    if WIDE:
        ey = _rows(entity, row[:, None], d[None, :], EW, True, D, EVEN)
    gx = tl.zeros([BN, DP], tl.float32)
    gy = gx
    for at_b in range(tl.program_id(1), batch, PARTS):
        b = at_b + (tl.program_id(1) * 0).to(tl.int64)
        if (tl.load(weights + b) != 0) & (tl.load(parties + b) == party):
            g = tl.load(pulls + b * N + j, mask=j < N, other=0.0)
            qx = _rows(queries, b, d, EW, False, D, EVEN)[None, :]
            qy = qx
            if WIDE:
                qy = _rows(queries, b, d, EW, True, D, EVEN)[None, :]
            vx, vy = _along(qx, qy, ex, ey, _score(qx, qy, ex, ey, 1, MODEL)[:, None], g[:, None], MODEL)
            pulls_at = g[:, None] != 0  # a pull of 0 is nothing at all, even of what is not finite
            gx += tl.where(pulls_at, vx, 0.0)
            if WIDE:
                gy += tl.where(pulls_at, vy, 0.0)
    write = there[:, None] & (d < D)[None, :]
    at = g_entity + row[:, None] * EW + d[None, :]
    tl.atomic_add(at, gx, mask=write, sem="relaxed")
    if WIDE:
        tl.atomic_add(at + D, gy, mask=write, sem="relaxed")


IN_REGISTERS, FEW, WARPS_FEW = 1 << 15, 128, 16
"""The largest tile of candidates that is kept in registers, up to how many examples, and their warps."""
TILE, WARPS = 1 << 13, 4
"""The size of tiles otherwise, and their warps: the fastest on an H200 of those tried."""
REGISTERS = 128
"""Of a thread: with more, fewer than four programs of WARPS fit on a multiprocessor, and 512 examples take turns."""
POOL_ROWS, POOL_PROGRAMS = 16, 1024
"""How many rows of a pool a program collects for, and about how many programs there are."""


class Triton(Fused):
    """The kernels for the GPU, and the reference for what they do not cover."""

    _starts: Tensor | None = None
    _priors: tuple[Tensor, Tensor] | None = None

    def epochs(self) -> Any:
        from tacit.kernels.gpu_epochs import GpuEpochs

        return GpuEpochs

    def launch(
        self, tables: Tables, asked: Places, ids: Tensor, pooled: bool, rule: Rule, into: Tables, losses: Tensor,
        norms: Tensor | None, summed: tuple[Tensor, Tensor, int] | None = None,
        between: tuple[Tensor, Tensor] | None = None,
    ) -> None:  # fmt: skip
        """Start the kernel for every example of the chunk.

        `summed`: sums of losses by step and party, the number of the step, how many more. `between`: room for queries
        and pulls of examples with a pool.
        """
        device, batch, count = tables.entity.device, len(asked.head), ids.shape[1]
        n = self.numbers(rule, tables.relation.shape[1])
        dim = tables.entity.shape[1] // (2 if n.model in (3, 4) else 1)
        if self._starts is None:
            self._starts = torch.tensor(self.layout.entity_start, device=device)
        prior = self.objective.prior
        if prior is not None and self._priors is None:
            self._priors = (prior.tails * prior.scale).contiguous(), (prior.heads * prior.scale).contiguous()
        tails, heads = self._priors or (losses, losses)
        clipped, how = isinstance(rule, Clipped), cast(Any, rule)
        mask = how.row_mask.to(torch.int8) if clipped and how.row_mask is not None else losses
        wide, several = triton.next_power_of_2(dim), triton.next_power_of_2(count)
        # Few examples leave the GPU idle: then each takes more warps, and keeps its candidates in registers (unless it
        # needs these to find out which of them it has twice).
        few = batch <= FEW
        once = few and n.model in (0, 1, 2) and several * wide <= IN_REGISTERS and (pooled or not clipped)
        rows = several if once else min(max(TILE // (wide * (2 if n.model in (3, 4) else 1)), 4), several)
        if pooled and between is None:
            between = tables.entity.new_empty(batch, tables.entity.shape[1]), tables.entity.new_zeros(batch, count)
        queries, pulls = between or (losses, losses)
        _example[(batch,)](
            tables.entity, tables.relation, into.entity, into.relation, asked.head, asked.relation, asked.tail,
            asked.asks_head, asked.weight, asked.party, ids, losses, losses if norms is None else norms,
            how.clip.float() if clipped else losses, mask, tails, heads, self._starts, float(n.gamma),
            float(n.phase), float(n.alpha), how.relation_scale if clipped else 1.0,
            float(how.row_clip or 0.0) if clipped else 0.0, 0 if prior is None else prior.tails.shape[1],
            *(summed or (losses, losses, 0)), len(self.layout), queries, pulls,
            N=count, BN=rows, NP=several, D=dim, DP=wide, MODEL=n.model, LOSS=n.loss, POOL=pooled, CLIPPED=clipped,
            MASKED=clipped and how.row_mask is not None, ROWS=clipped and how.row_clip is not None,
            ONLY=clipped and how.entities_only,
            PRIOR=prior is not None, POSITIVE=n.positive, NEGATIVE=n.negative,
            SUMMED=summed is not None, ONCE=once, SMALL=tables.entity.numel() < 1 << 31,
            num_warps=WARPS_FEW if few else WARPS, maxnreg=None if few or clipped else REGISTERS,
        )  # fmt: skip
        if pooled and n.negative:
            groups = triton.cdiv(count, POOL_ROWS)
            parts = max(1, min(batch, POOL_PROGRAMS // (groups * len(self.layout))))
            _pool[(groups, parts, len(self.layout))](
                tables.entity, into.entity, asked.weight, asked.party, ids, queries, pulls, batch, N=count,
                BN=POOL_ROWS, D=dim, DP=wide, MODEL=n.model, PARTS=parts, num_warps=4,
            )  # fmt: skip
