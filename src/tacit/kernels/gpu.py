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
from typing import Any, cast

import torch
import triton
import triton.language as tl

from tacit.kernels.contract import Chunk, Clipped, Gradients, Objective, Rule
from tacit.kernels.reference import Reference
from tacit.losses import Logistic, Margin, SelfAdversarial, Softmax
from tacit.models import Layout, Tables
from tacit.models.bilinear import ComplEx, DistMult
from tacit.models.translational import RotatE, TransE

Tensor = Any
L1, L2, PRODUCT, ROTATION, COMPLEX = (tl.constexpr(i) for i in range(5))
SELF_ADVERSARIAL, LOGISTIC, SOFTMAX, MARGIN = (tl.constexpr(i) for i in range(4))
LOSS_OF: dict[type, int] = {SelfAdversarial: 0, Logistic: 1, Softmax: 2, Margin: 3}


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
                    row, there, prior = _candidates(ids, a, prior_tails, prior_heads, prior_at, j, party, b, start, h,
                                                    t, turn, N, POOL, PRIOR, SMALL)  # fmt: skip
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
