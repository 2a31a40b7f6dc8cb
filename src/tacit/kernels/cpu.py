"""Kernels for the CPU, in numba: what `gpu.py` does for a GPU, on as many threads as torch has.

A step has two parts. First every example is looked at by itself: its query, the scores of its candidates, its loss and
norm, and how strongly it pulls at each candidate. Then every row of the tables collects what pulls at it, in the order
of the examples. So no two threads ever write to the same row, no row is written to more than once, and the result is
the same bit for bit with any number of threads.

Threads are Python's: numba lets go of the interpreter's lock. What was compiled is kept on disk, for the next process.
"""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from numba import njit

from tacit.kernels.contract import Clipped, Objective, Rule
from tacit.kernels.fused import Fused, Numbers, Places
from tacit.models import Layout, Tables

LOG = logging.getLogger(__name__)
Tensor = Any
Array = npt.NDArray[Any]
FASTER = {"reassoc", "contract", "nsz", "arcp"}
"""Sums in any order, so that they can be vectors. Not "nnan" or "ninf": what is not finite has to be seen."""


def _compilers() -> tuple[Any, Any]:
    """numba's decorator, and the same without its counts of references; what they compile is kept on disk, unless
    there is no place for it.
    """
    options: dict[str, Any] = {"cache": True, "nogil": True, "fastmath": FASTER, "error_model": "numpy"}
    try:
        njit(**options)(lambda: None)
    except RuntimeError:
        LOG.warning("no folder to keep compiled kernels in can be written to: every process compiles them anew, which "
                    "takes some seconds. The environment variable NUMBA_CACHE_DIR can name one.")  # fmt: skip
        options["cache"] = False
    return njit(**options), njit(_nrt=False, **options)


jit, lean = _compilers()
"""Whatever is called for each row, or for each candidate, is `lean`: every slice of an array is a reference, and to
count one up and down, atomically, takes as long as a row of a hundred numbers. Such a function makes no array, which
the compiler sees to, and gives none back.
"""
L1, L2, PRODUCT, ROTATION, COMPLEX = range(5)
SELF_ADVERSARIAL, LOGISTIC, SOFTMAX, MARGIN = range(4)
TINY = np.finfo(np.float32).tiny
SMALL = 1 << 20
"""With fewer numbers than this in a step's candidates, one thread is faster than two."""


class Asked(NamedTuple):
    """A chunk, as arrays."""

    head: Array
    relation: Array
    tail: Array
    asks_head: Array
    weight: Array
    party: Array
    ids: Array
    pooled: bool

    @staticmethod
    def of(places: Places, ids: Tensor, pooled: bool) -> Asked:
        p = places
        fields = (p.head, p.relation, p.tail, p.asks_head, p.weight, p.party, ids)
        head, relation, tail, asks_head, weight, party, candidates = (tensor.numpy() for tensor in fields)
        return Asked(head, relation, tail, asks_head, weight, party, candidates, pooled)


class Limits(NamedTuple):
    """What `Clipped` says, as arrays; all of size 0: nothing is clipped."""

    clip: Array
    row_mask: Array
    row_clip: Any
    relation_scale: Any
    entities_only: bool


class Found(NamedTuple):
    """What the first part of a step finds out: all that pulls at rows, for the second part to collect."""

    query: Array
    """(b, width) what candidates are compared with."""
    pull: Array
    """(b, n) by how much d score / d row of each candidate counts."""
    known: Array
    """(b, width) gradients of the known entity's row."""
    answer: Array
    """(b, width) of the true answer's row."""
    relation: Array
    """(b, width) of the relation's row."""
    loss: Array
    norm: Array

    @staticmethod
    def empty(batch: int, count: int, entity: Array, relation: Array, loss: Array, norm: Array) -> Found:
        """Room for a step of a batch with so many candidates each."""

        def room(width: int) -> Array:
            return np.empty((batch, width), np.float32)

        wide = entity.shape[1]
        return Found(room(wide), room(count), room(wide), room(wide), room(relation.shape[1]), loss, norm)


# -- scores, and their derivatives -------------------------------------------------------------------------------------
#
# All four ways to compare a query with a row are symmetric, so the same functions serve a query with its candidates and
# a row with its queries. Rows are taken four at a time: that is what keeps the processor busy.


@lean
def _compare(model: int, x: Array, table: Array, rows: Array, count: int, out: Array) -> None:
    """out[i] = the score of x with table[rows[i]], without gamma."""
    width = len(x)
    half = width // 2
    for i in range(0, count, 4):
        i1, i2, i3 = min(i + 1, count - 1), min(i + 2, count - 1), min(i + 3, count - 1)
        a, b, c, d = table[rows[i]], table[rows[i1]], table[rows[i2]], table[rows[i3]]
        s0, s1, s2, s3 = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
        if model == L1:
            for k in range(width):
                s0 -= abs(x[k] - a[k])
                s1 -= abs(x[k] - b[k])
                s2 -= abs(x[k] - c[k])
                s3 -= abs(x[k] - d[k])
        elif model == L2:
            for k in range(width):
                s0 += (x[k] - a[k]) * (x[k] - a[k])
                s1 += (x[k] - b[k]) * (x[k] - b[k])
                s2 += (x[k] - c[k]) * (x[k] - c[k])
                s3 += (x[k] - d[k]) * (x[k] - d[k])
            s0, s1, s2, s3 = -np.sqrt(s0), -np.sqrt(s1), -np.sqrt(s2), -np.sqrt(s3)
        elif model == ROTATION:
            for k in range(half):
                u, v = x[k], x[half + k]
                s0 -= np.sqrt((u - a[k]) * (u - a[k]) + (v - a[half + k]) * (v - a[half + k]))
                s1 -= np.sqrt((u - b[k]) * (u - b[k]) + (v - b[half + k]) * (v - b[half + k]))
                s2 -= np.sqrt((u - c[k]) * (u - c[k]) + (v - c[half + k]) * (v - c[half + k]))
                s3 -= np.sqrt((u - d[k]) * (u - d[k]) + (v - d[half + k]) * (v - d[half + k]))
        else:
            for k in range(width):
                s0 += x[k] * a[k]
                s1 += x[k] * b[k]
                s2 += x[k] * c[k]
                s3 += x[k] * d[k]
        out[i], out[i1], out[i2], out[i3] = s0, s1, s2, s3


@jit
def _toward(g: Any, apart: Any) -> Any:
    """g x the sign of apart, which of NaN is NaN."""
    return g if apart > 0 else (-g if apart < 0 else apart * np.float32(0))


@jit
def _over(length: Any) -> Any:
    """1 / length, 0 of nothing, and NaN of NaN."""
    return np.float32(1) / length if length > 0 else length * np.float32(0)


@jit
def _over_root(square: Any) -> Any:
    """1 / the modulus of this square, 0 of next to nothing, as in `tacit.models.scorer.modulus`, and NaN of NaN."""
    return np.float32(1) / np.sqrt(square) if square > TINY else square * np.float32(0)


@lean
def _pull(model: int, x: Array, table: Array, rows: Array, g: Array, count: int, into: Array) -> None:
    """Add the sum over i of g[i] x d score(x, table[rows[i]]) / d x; of L2 each g is already over the distance."""
    width = len(x)
    half = width // 2
    none = np.float32(0)
    for i in range(0, count, 4):
        i1, i2, i3 = min(i + 1, count - 1), min(i + 2, count - 1), min(i + 3, count - 1)
        a, b, c, d = table[rows[i]], table[rows[i1]], table[rows[i2]], table[rows[i3]]
        g0 = g[i]
        g1 = g[i1] if i1 > i else none
        g2 = g[i2] if i2 > i1 else none
        g3 = g[i3] if i3 > i2 else none
        if model == L1:
            for k in range(width):
                at = x[k]
                into[k] -= (_toward(g0, at - a[k]) + _toward(g1, at - b[k])) + (
                    _toward(g2, at - c[k]) + _toward(g3, at - d[k])
                )
        elif model == L2:
            for k in range(width):
                at = x[k]
                into[k] -= (g0 * (at - a[k]) + g1 * (at - b[k])) + (g2 * (at - c[k]) + g3 * (at - d[k]))
        elif model == ROTATION:
            for k in range(half):
                u, v = x[k], x[half + k]
                u0, u1, u2, u3 = u - a[k], u - b[k], u - c[k], u - d[k]
                v0, v1, v2, v3 = v - a[half + k], v - b[half + k], v - c[half + k], v - d[half + k]
                f0, f1 = g0 * _over_root(u0 * u0 + v0 * v0), g1 * _over_root(u1 * u1 + v1 * v1)
                f2, f3 = g2 * _over_root(u2 * u2 + v2 * v2), g3 * _over_root(u3 * u3 + v3 * v3)
                into[k] -= (f0 * u0 + f1 * u1) + (f2 * u2 + f3 * u3)
                into[half + k] -= (f0 * v0 + f1 * v1) + (f2 * v2 + f3 * v3)
        else:
            for k in range(width):
                into[k] += (g0 * a[k] + g1 * b[k]) + (g2 * c[k] + g3 * d[k])


@lean
def _compare_one(model: int, x: Array, y: Array) -> Any:
    """The score of x with y: as `_compare`, of one row."""
    half = len(x) // 2
    s = np.float32(0)
    if model == L1:
        for k in range(len(x)):
            s -= abs(x[k] - y[k])
    elif model == L2:
        for k in range(len(x)):
            s += (x[k] - y[k]) * (x[k] - y[k])
        s = -np.sqrt(s)
    elif model == ROTATION:
        for k in range(half):
            u, v = x[k] - y[k], x[half + k] - y[half + k]
            s -= np.sqrt(u * u + v * v)
    else:
        for k in range(len(x)):
            s += x[k] * y[k]
    return s


@lean
def _pull_one(model: int, x: Array, y: Array, g: Any, into: Array) -> None:
    """Add g x d score(x, y) / d x: as `_pull`, of one row."""
    half = len(x) // 2
    if model == L1:
        for k in range(len(x)):
            into[k] -= _toward(g, x[k] - y[k])
    elif model == L2:
        for k in range(len(x)):
            into[k] -= g * (x[k] - y[k])
    elif model == ROTATION:
        for k in range(half):
            u, v = x[k] - y[k], x[half + k] - y[half + k]
            f = g * _over_root(u * u + v * v)
            into[k] -= f * u
            into[half + k] -= f * v
    else:
        for k in range(len(x)):
            into[k] += g * y[k]


@lean
def _length2(model: int, x: Array, y: Array, g: Any, compared: Any) -> Any:
    """The square of the length of g x d score / d y; of L2 each g is already over the distance."""
    width = len(x)
    half = width // 2
    total = np.float32(0)
    if model == L1:
        for k in range(width):
            total += np.float32(1) if x[k] != y[k] else np.float32(0)
    elif model == L2:
        return (g * compared) * (g * compared)
    elif model == ROTATION:
        for k in range(half):
            u, v = x[k] - y[k], x[half + k] - y[half + k]
            total += np.float32(1) if u * u + v * v > TINY else np.float32(0)
    else:
        for k in range(width):
            total += x[k] * x[k]
    return g * g * total


@jit
def _exp(x: Any) -> Any:
    """exp of x <= 0 to the last digit or two: short enough to be done for sixteen numbers at once."""
    power = np.floor(x * np.float32(1.44269504) + np.float32(0.5))
    r = (x - power * np.float32(0.693359375)) + power * np.float32(2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    scale = np.int32((np.int32(max(power, np.float32(-127))) + 127) << 23).view(np.float32)
    return (p * r * r + r + np.float32(1)) * scale if x > -87 or x != x else np.float32(0)


@jit
def _twice_artanh(y: Any) -> Any:
    """log((1 + y) / (1 - y)) of |y| <= 1/3, by its series, to the last digit or two."""
    z = y * y
    p = np.float32(2 / 13)
    p = p * z + np.float32(2 / 11)
    p = p * z + np.float32(2 / 9)
    p = p * z + np.float32(2 / 7)
    p = p * z + np.float32(2 / 5)
    p = p * z + np.float32(2 / 3)
    p = p * z + np.float32(2)
    return p * y


@jit
def _log1p(x: Any) -> Any:
    """log(1 + x) of 0 <= x <= 1."""
    return _twice_artanh(x / (np.float32(2) + x))


@jit
def _softplus(x: Any) -> Any:
    return max(x, np.float32(0)) + _log1p(_exp(-abs(x)))


@jit
def _sigmoid(x: Any) -> Any:
    small = _exp(-abs(x))
    return (np.float32(1) if x >= 0 else small) / (np.float32(1) + small)


@lean
def _weigh(loss: int, alpha: Any, sp: Any, s: Array, count: int) -> tuple[Any, Any, Any]:
    """From scores of candidates to how strongly they pull, in place; gives both parts of the loss, and how the answer
    pulls.
    """
    total, share = np.float32(0), np.float32(0)
    if loss == SELF_ADVERSARIAL:
        top = np.float32(-np.inf)
        for j in range(count):
            top = max(top, alpha * s[j])
        for j in range(count):
            weight = _exp(alpha * s[j] - top)
            small = _exp(-abs(s[j]))
            share += weight
            total += weight * (max(s[j], np.float32(0)) + _log1p(small))
            s[j] = weight * (np.float32(1) if s[j] >= 0 else small) / (np.float32(1) + small)
        over = np.float32(1) / share if count else np.float32(0)
        for j in range(count):
            s[j] *= over
        return _softplus(-sp), total * over, -_sigmoid(-sp)
    if loss == SOFTMAX:
        top = sp
        for j in range(count):
            top = max(top, s[j])
        share = _exp(sp - top)
        for j in range(count):
            s[j] = _exp(s[j] - top)
            share += s[j]
        for j in range(count):
            s[j] /= share
        return np.float32(0), top + np.log(share) - sp, _exp(sp - top) / share - np.float32(1)
    over = _over(np.float32(count))
    if loss == LOGISTIC:
        for j in range(count):
            total += _softplus(s[j])
            s[j] = _sigmoid(s[j]) * over
        return _softplus(-sp), total * over, -_sigmoid(-sp)
    pull = np.float32(0)
    for j in range(count):
        far = alpha - sp + s[j]
        total += far if far > 0 or far != far else np.float32(0)
        s[j] = over if far > 0 or far != far else np.float32(0)
        pull -= s[j]
    return np.float32(0), total * over, pull


# -- first part: examples ----------------------------------------------------------------------------------------------


@lean
def _ask(model: int, turn: Any, phase: Any, k: Array, r: Array, q: Array, cos: Array, sin: Array) -> None:
    """The query of a known row and a relation; `turn` is -1 for heads. Of complex factors also their two parts."""
    width = len(k)
    if model in (ROTATION, COMPLEX):
        half = width // 2
        for d in range(half):
            if model == ROTATION:
                cos[d], sin[d] = np.cos(r[d] * phase * turn), np.sin(r[d] * phase * turn)
            else:
                cos[d], sin[d] = r[d], r[half + d] * turn
            q[d] = k[d] * cos[d] - k[half + d] * sin[d]
            q[half + d] = k[d] * sin[d] + k[half + d] * cos[d]
    elif model == PRODUCT:
        for d in range(width):
            q[d] = k[d] * r[d]
    else:
        for d in range(width):
            q[d] = k[d] + turn * r[d]


@lean
def _back(model: int, turn: Any, phase: Any, k: Array, r: Array, cos: Array, sin: Array, gq: Array, gk: Array,
          gr: Array) -> None:  # fmt: skip
    """Add the gradient of the query to that of its known row; set that of its relation."""
    width = len(k)
    if model in (ROTATION, COMPLEX):
        half = width // 2
        for d in range(half):
            x, y = gq[d], gq[half + d]
            gk[d] += x * cos[d] + y * sin[d]
            gk[half + d] += y * cos[d] - x * sin[d]
            of_cos, of_sin = x * k[d] + y * k[half + d], y * k[d] - x * k[half + d]
            if model == ROTATION:
                gr[d] = (of_sin * cos[d] - of_cos * sin[d]) * phase * turn
            else:
                gr[d], gr[half + d] = of_cos, of_sin * turn
    elif model == PRODUCT:
        for d in range(width):
            gk[d] += gq[d] * r[d]
            gr[d] = gq[d] * k[d]
    else:
        for d in range(width):
            gk[d] += gq[d]
            gr[d] = gq[d] * turn


@lean
def _square(x: Array) -> Any:
    total = np.float32(0)
    for d in range(len(x)):
        total += x[d] * x[d]
    return total


@lean
def _scale(x: Array, factor: Any) -> None:
    """In place; a factor of 0 means nothing at all, even of what is not finite."""
    for d in range(len(x)):
        x[d] = x[d] * factor if factor != 0 else np.float32(0)


@jit
def _within(factor: Any, long: Any, most: Any) -> Any:
    """The factor, or less, if a row as long as that would still be longer than `most`; below 0: there is no limit."""
    return factor * (most / (long * factor)) if most >= 0 and long * factor > most else factor


@jit
def _examples(first: int, last: int, entity: Array, relation: Array, starts: Array, prior: tuple[Array, Array],
              n: Numbers, asked: Asked, limits: Limits, found: Found) -> None:  # fmt: skip
    """Examples first to last: their losses and norms, and all that pulls at rows."""
    width, most = entity.shape[1], asked.ids.shape[1]
    vectors = np.empty((3, width), np.float32)
    rows, places = np.empty(most, np.int64), np.empty(most, np.int64)
    compared, g = np.empty(most, np.float32), np.empty(most, np.float32)
    times = np.zeros(len(entity) if len(limits.clip) > 0 and not asked.pooled else 0, np.int32)
    _each(first, last, entity, relation, starts, prior, n, asked, limits, found, vectors, rows, places, compared, g,
          times)  # fmt: skip


@lean
def _each(first: int, last: int, entity: Array, relation: Array, starts: Array, prior: tuple[Array, Array], n: Numbers,
          asked: Asked, limits: Limits, found: Found, vectors: Array, rows: Array, places: Array, compared: Array,
          g: Array, times: Array) -> None:  # fmt: skip
    """The same, with room for what is between."""
    width, most = entity.shape[1], asked.ids.shape[1]
    clipped, masked, has_prior = len(limits.clip) > 0, len(limits.row_mask) > 0, len(prior[0]) > 0
    gq, cos, sin = vectors[0], vectors[1], vectors[2]
    for b in range(first, last):
        gk, ga, gr, q, pull = found.known[b], found.answer[b], found.relation[b], found.query[b], found.pull[b]
        gk[:] = 0
        ga[:] = 0
        gr[:] = 0
        pull[:] = 0
        found.loss[b] = 0
        found.norm[b] = 0
        if asked.weight[b] == 0:
            continue
        h, r, t, ask, party = asked.head[b], asked.relation[b], asked.tail[b], asked.asks_head[b] != 0, asked.party[b]
        k, a = (t, h) if ask else (h, t)
        turn = np.float32(-1) if ask else np.float32(1)
        ids, start = asked.ids[party if asked.pooled else b], starts[party]
        _ask(n.model, turn, n.phase, entity[k], relation[r], q, cos, sin)

        # Scores, and what they are to the loss.
        count = 0
        for j in range(most):
            if ids[j] >= 0 and not (asked.pooled and (ids[j] == h or ids[j] == t)):
                rows[count], places[count] = ids[j], j
                count += 1
        _compare(n.model, q, entity, rows, count, compared)
        alone = _compare_one(n.model, q, entity[a])
        constant, on_answer, side = n.gamma, np.float32(0), prior[1] if ask else prior[0]
        if has_prior:
            constant += prior[0][r, t - start] if ask else prior[1][r, h - start]
            on_answer = side[r, a - start]
        for i in range(count):
            g[i] = compared[i] + constant
            if has_prior:
                g[i] += side[r, rows[i] - start]
        positive, negative, of_answer = _weigh(n.loss, n.alpha, alone + constant + on_answer, g, count)
        found.loss[b] = (positive if n.positive else np.float32(0)) + (negative if n.negative else np.float32(0))

        # Gradients of the query, and from there of the known row and the relation.
        weight = np.float32(1) if clipped else asked.weight[b]
        for i in range(count):
            g[i] *= weight if n.negative else np.float32(0)
            if n.model == L2:
                g[i] *= _over(-compared[i])
        gq[:] = 0
        _pull(n.model, q, entity, rows, g, count, gq)
        of_answer *= weight if n.positive else np.float32(0)
        if n.model == L2:
            of_answer *= _over(-alone)
        _pull_one(n.model, q, entity[a], of_answer, gq)
        _pull_one(n.model, entity[a], q, of_answer, ga)
        square = np.float32(0)
        if clipped and not asked.pooled:
            # What was drawn twice is one row with twice the gradient; what is the example's own joins its row.
            for i in range(count):
                times[rows[i]] += 1
            for i in range(count):
                if rows[i] == a or rows[i] == k:
                    _pull_one(n.model, entity[rows[i]], q, g[i], ga if rows[i] == a else gk)
                    g[i] = 0
        if clipped:
            for i in range(count):
                if masked and not limits.row_mask[rows[i]]:
                    g[i] = 0
                if g[i] != 0:
                    many = np.float32(1) if asked.pooled else np.float32(times[rows[i]])
                    square += many * _length2(n.model, q, entity[rows[i]], g[i], compared[i])
        _back(n.model, turn, n.phase, entity[k], relation[r], cos, sin, gq, gk, gr)

        if clipped:
            _scale(gr, limits.relation_scale)
            if h == t:  # head and tail are one row
                for d in range(width):
                    gk[d] += ga[d]
                ga[:] = 0
            if masked and not limits.row_mask[k]:
                gk[:] = 0
            if masked and not limits.row_mask[a]:
                ga[:] = 0
            of_k, of_a = _square(gk), _square(ga)
            norm = np.sqrt(square + of_k + of_a + (np.float32(0) if limits.entities_only else _square(gr)))
            found.norm[b] = norm
            clip = limits.clip[party]
            factor = np.float32(1) if norm <= clip else clip / norm
            if not norm < np.inf:  # nor if it is NaN
                factor = np.float32(0)
            if limits.entities_only:
                for d in range(len(gr)):
                    gr[d] = gr[d] if norm < np.inf and abs(gr[d]) < np.inf else np.float32(0)
            else:
                _scale(gr, factor)
            _scale(gk, _within(factor, np.sqrt(of_k), limits.row_clip))
            _scale(ga, _within(factor, np.sqrt(of_a), limits.row_clip))
            for i in range(count):
                fits = factor
                if limits.row_clip >= 0 and g[i] != 0:
                    many = np.float32(1) if asked.pooled else np.float32(times[rows[i]])
                    long = np.sqrt(_length2(n.model, q, entity[rows[i]], g[i], compared[i])) * many
                    fits = _within(factor, long, limits.row_clip)
                g[i] = g[i] * fits if fits != 0 else np.float32(0)
            if not asked.pooled:
                for i in range(count):
                    times[rows[i]] = 0
        for i in range(count):
            pull[places[i]] = g[i]


# -- second part: rows -------------------------------------------------------------------------------------------------


@jit
def _collect(first: int, last: int, entity: Array, model: int, asked: Asked, found: Found, into: Array) -> None:
    """Entity rows first to last: each collects what pulls at it, in the order of the examples."""
    ends = np.zeros(last - first + 1, np.int64)
    _count(first, last, asked, found, ends)
    whose, g, place = np.empty(ends[-1], np.int64), np.empty(ends[-1], np.float32), ends[:-1].copy()
    _gather(first, last, entity, model, asked, found, ends, whose, g, place, into)


@lean
def _count(first: int, last: int, asked: Asked, found: Found, ends: Array) -> None:
    """How much pulls at each row, and at all rows before it."""
    batch, count = found.pull.shape
    for b in range(batch):
        ids, pull = asked.ids[asked.party[b] if asked.pooled else b], found.pull[b]
        for j in range(count):
            if first <= ids[j] < last and pull[j] != 0:
                ends[ids[j] - first + 1] += 1
    for row in range(1, len(ends)):
        ends[row] += ends[row - 1]


@lean
def _gather(first: int, last: int, entity: Array, model: int, asked: Asked, found: Found, ends: Array, whose: Array,
            g: Array, place: Array, into: Array) -> None:  # fmt: skip
    """Put what pulls at a row together, and add it up."""
    batch, count = found.pull.shape
    for b in range(batch):
        ids, pull = asked.ids[asked.party[b] if asked.pooled else b], found.pull[b]
        for j in range(count):
            if first <= ids[j] < last and pull[j] != 0:
                at = place[ids[j] - first]
                whose[at], g[at] = b, pull[j]
                place[ids[j] - first] = at + 1
    for row in range(first, last):
        begin, end = ends[row - first], ends[row - first + 1]
        if end > begin:
            _pull(model, entity[row], found.query, whose[begin:end], g[begin:end], end - begin, into[row])
    for b in range(batch):
        if asked.weight[b] != 0:
            turned = asked.asks_head[b] != 0
            k, a = (asked.tail[b], asked.head[b]) if turned else (asked.head[b], asked.tail[b])
            if first <= k < last:
                _add(found.known[b], into[k])
            if first <= a < last:
                _add(found.answer[b], into[a])


@lean
def _collect_relations(first: int, last: int, asked: Asked, found: Found, into: Array) -> None:
    """Relation rows first to last, the same."""
    for b in range(len(asked.relation)):
        if first <= asked.relation[b] < last and asked.weight[b] != 0:
            _add(found.relation[b], into[asked.relation[b]])


@lean
def _add(values: Array, into: Array) -> None:
    for d in range(len(values)):
        into[d] += values[d]


# -- threads -----------------------------------------------------------------------------------------------------------


@cache
def _workers(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="tacit-kernel")


def threads_for(size: int, work: int) -> int:
    """As many as torch has, if there is enough work (numbers to look at) for it to be worth it."""
    return min(int(torch.get_num_threads()), max(size, 1)) if work >= SMALL else 1


def shared_out(size: int, work: int, task: Any, *arguments: Any) -> None:
    """task(first, last, ...) on pieces of range(size), one per thread."""
    threads = threads_for(size, work)
    bounds = [size * i // threads for i in range(threads + 1)]
    others = [_workers(threads - 1).submit(task, bounds[i], bounds[i + 1], *arguments) for i in range(1, threads)]
    try:
        task(bounds[0], bounds[1], *arguments)
    finally:
        for other in others:
            other.result()


class Numba(Fused):
    """The kernels for the CPU, and the reference for what they do not cover."""

    def __init__(self, objective: Objective, layout: Layout) -> None:
        super().__init__(objective, layout)
        self.starts = np.array(layout.entity_start)
        nothing, prior = np.zeros((0, 0), np.float32), objective.prior
        self.priors = (nothing, nothing)
        if prior is not None:
            tails, heads = ((table * prior.scale).float().contiguous().numpy() for table in (prior.tails, prior.heads))
            self.priors = tails, heads

    def epochs(self) -> Any:
        from tacit.kernels.cpu_epochs import CpuEpochs

        return CpuEpochs

    def launch(self, tables: Tables, asked: Places, ids: Tensor, pooled: bool, rule: Rule, into: Tables, losses: Tensor,
               norms: Tensor | None) -> None:  # fmt: skip
        entity, relation = tables.entity.numpy(), tables.relation.numpy()
        norm = np.empty(len(losses), np.float32) if norms is None else norms.numpy()
        found = Found.empty(len(losses), ids.shape[1], entity, relation, losses.numpy(), norm)
        arrays = Asked.of(asked, ids, pooled)
        self.gradients(entity, relation, arrays, rule, found, into)

    def gradients(self, entity: Array, relation: Array, asked: Asked, rule: Rule, found: Found, into: Tables) -> None:
        """Both parts, on as many threads as it is worth."""
        work, numbers = found.pull.size * entity.shape[1], self.numbers(rule, relation.shape[1])
        shared_out(len(asked.head), work, _examples, entity, relation, self.starts, self.priors, numbers, asked,
                   limits_of(rule), found)  # fmt: skip
        shared_out(len(entity), work, _collect, entity, numbers.model, asked, found, into.entity.numpy())
        _collect_relations(0, len(relation), asked, found, into.relation.numpy())


def limits_of(rule: Rule) -> Limits:
    if not isinstance(rule, Clipped):
        return Limits(np.zeros(0, np.float32), np.zeros(0, np.bool_), np.float32(-1), np.float32(1), False)
    mask = np.zeros(0, np.bool_) if rule.row_mask is None else rule.row_mask.contiguous().numpy()
    clip = rule.clip.float().contiguous().numpy()
    row_clip = np.float32(-1 if rule.row_clip is None else rule.row_clip)
    return Limits(clip, mask, row_clip, np.float32(rule.relation_scale), rule.entities_only)
