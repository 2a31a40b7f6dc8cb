"""Whole epochs on the CPU: draws, gradients, secret noise and Adam in numba, none of it in Python.

A step has two parts, on all threads: examples with their draws; then rows, each of which collects its gradient and
moves. Only between the two do threads wait for each other. Noise, where there is any, is what gradients begin with.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from tacit import draws
from tacit.draws import CHACHA, Purpose, Secret
from tacit.kernels.cpu import (
    Array,
    Asked,
    Found,
    Limits,
    Numba,
    _collect,
    _collect_relations,
    _examples,
    _twice_artanh,
    jit,
    lean,
    limits_of,
    shared_out,
    threads_for,
)  # fmt: skip
from tacit.kernels.epochs import HASH, Epochs
from tacit.kernels.fused import Numbers
from tacit.models.tables import PARTS
from tacit.negatives import ATTEMPTS
from tacit.optimizers import Adam

_philox = jit(draws.philox)
NEGATIVES, POOL, SIDE = (int(purpose) << 20 for purpose in (Purpose.NEGATIVES, Purpose.POOL, Purpose.SIDE))
NOISE = {"entity": int(Purpose.NOISE_ENTITY) << 20, "relation": int(Purpose.NOISE_RELATION) << 20}
LANES = 16
"""So many blocks of ChaCha20 are made at once: as many as a vector register has words."""


class World(NamedTuple):
    """What a step's examples and negatives are drawn from; see `Epochs`."""

    order: Array
    begins: Array
    sizes: Array
    wanted: Array
    taken: Array
    most: Array
    triples: Array
    halves: Array
    share: Array
    weights: Array
    weighed: bool
    numbers: Array
    many: Array
    first: Array
    candidates: Array
    known: Array
    key: tuple[int, int]
    batch: int
    full_batch: int
    copies: int
    sides: int
    filtered: bool
    entity_total: int
    relation_total: int


class Move(NamedTuple):
    """How rows of one table move."""

    table: Array
    gradient: Array
    mean: Array
    square: Array
    owner: Array
    start: Array
    first: Array
    second: Array
    rate: Any
    beta1: Any
    beta2: Any
    eps: Any
    divisor: Any
    scale: Any
    """What gradients were multiplied by, and are divided by after the noise."""
    key: Array
    """Eight words; of size 0: there is no noise."""
    deviation: Array
    purpose: int


# -- draws -------------------------------------------------------------------------------------------------------------


@lean
def _is_known(known: Array, key: int) -> bool:
    mask = len(known) - 1
    place = ((key * HASH) >> 32) & 0xFFFFFFFF & mask
    while known[place] != -1 and known[place] != key:
        place = (place + 1) & mask
    return bool(known[place] == key)


@lean
def _draw(n: int, first: int, last: int, w: World, asked: Asked) -> None:
    """Which triples are at places first to last of step n, from which side they are asked, and their negatives."""
    count = asked.ids.shape[1]
    each = (count + 3) // 4
    for b in range(first, last):
        party, inside = b // (w.batch * w.copies), b % (w.batch * w.copies)
        copy, place = inside // w.batch, inside % w.batch
        step, at = w.taken[party] + n, n * w.full_batch + place
        asked.party[b] = party
        if w.wanted[party] == 0 or at >= w.sizes[party] or step >= w.most[party]:
            asked.weight[b] = 0
            continue
        row = w.order[w.begins[party] + at]
        asked.weight[b] = w.weights[row] if w.weighed else np.float32(1)
        h, r, t = w.triples[row, 0], w.triples[row, 1], w.triples[row, 2]
        slot, whose, ask = place + copy * w.full_batch, w.numbers[party], False
        if w.sides == 1:
            ask = True
        elif w.sides == 2:
            ask = copy == 1
        elif w.sides == 3:
            ask = step % 2 == 1
        elif w.sides == 6:  # reciprocal: the second copy is turned round
            if copy == 1:
                h, r, t = t, r + w.halves[party], h
        elif w.sides >= 4:
            words = _philox((slot, 0, step, whose | SIDE), w.key)
            ask = words[0] * 2.0**-32 < (np.float64(w.share[row]) if w.sides == 5 else 0.5)
        asked.head[b], asked.relation[b], asked.tail[b], asked.asks_head[b] = h, r, t, ask
        if asked.pooled:
            continue
        ids, begin, many = asked.ids[b], w.first[party], w.many[party]
        for block in range(each):
            words = _philox((slot * each + block, 0, step, whose | NEGATIVES), w.key)
            for lane in range(min(4, count - 4 * block)):
                word = words[0] if lane == 0 else words[1] if lane == 1 else words[2] if lane == 2 else words[3]
                ids[4 * block + lane] = w.candidates[begin + ((word * many) >> 32)]
        if w.filtered:
            for j in range(count):
                attempt = 1
                while _is_known(w.known, ((ids[j] if ask else h) * w.relation_total + r) * w.entity_total
                                + (t if ask else ids[j])):  # fmt: skip
                    if attempt == ATTEMPTS:
                        ids[j] = -1
                        break
                    words = _philox((slot * each + j // 4, attempt, step, whose | NEGATIVES), w.key)
                    lane = j % 4
                    word = words[0] if lane == 0 else words[1] if lane == 1 else words[2] if lane == 2 else words[3]
                    ids[j] = w.candidates[begin + ((word * many) >> 32)]
                    attempt += 1


@jit
def _draw_pools(n: int, w: World, pools: Array) -> None:
    """Every party's pool at step n: the first distinct entities of its stream."""
    for party in range(len(pools)):
        pool, many, found, block = pools[party], w.many[party], 0, 0
        pool[:] = -1
        seen = np.zeros(many, np.bool_)
        while found < min(len(pool), many):
            words = _philox((block, 0, w.taken[party] + n, w.numbers[party] | POOL), w.key)
            for word in words:
                value = (word * many) >> 32
                if found < len(pool) and not seen[value]:
                    seen[value] = True
                    pool[found] = w.candidates[w.first[party] + value]
                    found += 1
            block += 1


# -- noise -------------------------------------------------------------------------------------------------------------


@jit
def _quarter(x: Array, a: int, b: int, c: int, d: int) -> None:
    """A quarter round of ChaCha20, on LANES blocks at once."""
    for i in range(LANES):
        p, q, r, s = x[a, i], x[b, i], x[c, i], x[d, i]
        p = np.uint32(p + q)
        s = np.uint32(s ^ p)
        s = np.uint32(np.uint32(s << np.uint32(16)) | (s >> np.uint32(16)))
        r = np.uint32(r + s)
        q = np.uint32(q ^ r)
        q = np.uint32(np.uint32(q << np.uint32(12)) | (q >> np.uint32(20)))
        p = np.uint32(p + q)
        s = np.uint32(s ^ p)
        s = np.uint32(np.uint32(s << np.uint32(8)) | (s >> np.uint32(24)))
        r = np.uint32(r + s)
        q = np.uint32(q ^ r)
        q = np.uint32(np.uint32(q << np.uint32(7)) | (q >> np.uint32(25)))
        x[a, i], x[b, i], x[c, i], x[d, i] = p, q, r, s


@jit
def _chacha(key: Array, block: int, step: int, whose: int, x: Array, begin: Array) -> None:
    """x[w, i] = word w of block + i."""
    for i in range(LANES):
        begin[0, i], begin[1, i], begin[2, i], begin[3, i] = CHACHA
        for w in range(8):
            begin[4 + w, i] = key[w]
        begin[12, i], begin[13, i] = (block + i) & 0xFFFFFFFF, (block + i) >> 32
        begin[14, i], begin[15, i] = step, whose
    x[:] = begin
    for _ in range(10):
        _quarter(x, 0, 4, 8, 12)
        _quarter(x, 1, 5, 9, 13)
        _quarter(x, 2, 6, 10, 14)
        _quarter(x, 3, 7, 11, 15)
        _quarter(x, 0, 5, 10, 15)
        _quarter(x, 1, 6, 11, 12)
        _quarter(x, 2, 7, 8, 13)
        _quarter(x, 3, 4, 9, 14)
    for w in range(16):
        for i in range(LANES):
            x[w, i] = np.uint32(x[w, i] + begin[w, i])


@jit
def _minus_log(first: Any, second: Any) -> Any:
    """-log of a uniform number of 64 bits, in float32 and to some 1e-7 of itself, however close to 0 that is.

    A number in the lower half is 2**power x m; of one in the upper half, by how much it is less than 1 says more.
    """
    upper = first >= np.uint32(0x80000000)
    turned = np.uint32(0xFFFFFFFF) if upper else np.uint32(0)
    u = np.float32(np.uint32(first ^ turned)) * np.float32(2.0**-32)
    u += (np.float32(np.uint32(second ^ turned)) + np.float32(0.5)) * np.float32(2.0**-64)
    bits = np.float32(u).view(np.int32)
    m = np.int32((bits & np.int32(0x7FFFFF)) | np.int32(0x3F800000)).view(np.float32)
    half = np.float32(0.5) if m > np.float32(1.41421356) else np.float32(1)
    m *= half
    power = np.float32((bits >> np.int32(23)) - 127) + (np.float32(1) if half < np.float32(1) else np.float32(0))
    y = (u if upper else np.float32(1) - m) / (np.float32(2) - u if upper else np.float32(1) + m)
    return _twice_artanh(y) - (np.float32(0) if upper else power * np.float32(0.69314718))


@jit
def _turned(part: Any) -> tuple[Any, Any]:
    """The cosine and sine of part / 2**32 of a full turn: by quarters, then by their series."""
    moved = np.uint32(part + np.uint32(0x20000000))
    quarter = moved >> np.uint32(30)
    x = np.float32(np.int32(moved & np.uint32(0x3FFFFFFF)) - np.int32(0x20000000)) * np.float32(2 * np.pi / 2**32)
    z = x * x
    sin = np.float32(2.7557319e-6)
    sin = sin * z - np.float32(1.9841270e-4)
    sin = sin * z + np.float32(8.3333333e-3)
    sin = sin * z - np.float32(1.6666667e-1)
    sin = sin * z * x + x
    cos = np.float32(2.4801587e-5)
    cos = cos * z - np.float32(1.3888889e-3)
    cos = cos * z + np.float32(4.1666667e-2)
    cos = cos * z - np.float32(0.5)
    cos = cos * z + np.float32(1)
    odd, back = (quarter & np.uint32(1)) != 0, (quarter & np.uint32(2)) != 0
    a, b = (-sin, cos) if odd else (cos, sin)
    return (-a, -b) if back else (a, b)


@jit
def add_normals(low: int, high: int, into: Array, key: Array, step: int, whose: int, deviation: Any) -> None:
    """Add numbers low to high of a stream of normals, times the deviation, to those of `into`: as `Secret.normal`."""
    x, begin = np.empty((16, LANES), np.uint32), np.empty((16, LANES), np.uint32)
    z = np.empty((LANES, 8), np.float32)
    for base in range(low // 8, (high + 7) // 8, LANES):
        _chacha(key, base, step, whose, x, begin)
        for pair in range(4):
            for i in range(LANES):
                radius = np.sqrt(np.float32(2) * _minus_log(x[4 * pair, i], x[4 * pair + 1, i]))
                cos, sin = _turned(x[4 * pair + 2, i])
                z[i, 2 * pair], z[i, 2 * pair + 1] = radius * cos, radius * sin
        numbers = z.reshape(-1)
        for at in range(max(low, base * 8), min(high, (base + LANES) * 8)):
            into[at] += deviation * numbers[at - base * 8]


@jit
def _add_noise(first: int, last: int, n: int, m: Move, w: World) -> None:
    """Add noise to the gradients of rows first to last, of those parties that take step n.

    A function of its own, so that it is compiled only where there is noise.
    """
    width, row = m.gradient.shape[1], first
    while row < last:
        party = m.owner[row]
        end, begin = min(last, m.start[party + 1]), m.start[party]
        if _active(n, party, w):
            whole = m.gradient[begin : m.start[party + 1]].reshape(-1)
            add_normals((row - begin) * width, (end - begin) * width, whole, m.key, w.taken[party] + n,
                        w.numbers[party] | m.purpose, m.deviation[party])  # fmt: skip
        row = end


# -- steps -------------------------------------------------------------------------------------------------------------


@jit
def _active(n: int, party: int, w: World) -> bool:
    left = w.sizes[party] - n * w.full_batch
    return bool(w.wanted[party] != 0 and left > 0 and w.taken[party] + n < w.most[party])


@lean
def _move(n: int, first: int, last: int, m: Move, w: World) -> None:
    """Dense Adam on rows first to last, of those parties that take step n; empties their gradients."""
    for row in range(first, last):
        party, g = m.owner[row], m.gradient[row]
        if _active(n, party, w):
            table, mean, square = m.table[row], m.mean[row], m.square[row]
            over = np.float32(min(w.sizes[party] - n * w.full_batch, w.full_batch)) if m.divisor == 0 else m.divisor
            over = np.float32(1) / (over * m.scale)
            rate, root = m.rate / m.first[n, party], np.float32(1) / m.second[n, party]
            for d in range(len(g)):
                value = g[d] * over
                mean[d] = m.beta1 * mean[d] + (np.float32(1) - m.beta1) * value
                square[d] = m.beta2 * square[d] + (np.float32(1) - m.beta2) * value * value
                table[d] -= rate * mean[d] / (np.sqrt(square[d]) * root + m.eps)
        g[:] = 0


@jit
def _rows(first: int, last: int, n: int, w: World, moves: tuple[Move, Move], model: int, asked: Asked,
          found: Found) -> None:  # fmt: skip
    """Rows first to last of both tables, one after the other: relations come after all entities."""
    entities = len(moves[0].table)
    for which in range(2):
        m = moves[0] if which == 0 else moves[1]
        low, high = (first, min(last, entities)) if which == 0 else (max(first, entities) - entities, last - entities)
        if low < high:
            if which == 0:
                _collect(low, high, m.table, model, asked, found, m.gradient)
            else:
                _collect_relations(low, high, asked, found, m.gradient)
            _move(n, low, high, m, w)


@jit
def _work(first: int, last: int, part: int, begin: int, end: int, w: World, starts: Array, prior: tuple[Array, Array],
          moves: tuple[Move, Move], numbers: Numbers, asked: Asked, limits: Limits, found: Found,
          losses: Array) -> None:  # fmt: skip
    """Steps begin to end: their examples first to last (part 1), or their rows (part 2), or all of both (part 0).

    One function for all three, so that there is one to compile.
    """
    entity, relation = moves[0].table, moves[1].table
    for n in range(begin, end):
        if part != 2:
            if asked.pooled and last == 0:  # not by threads: see `CpuEpochs.steps`
                _draw_pools(n, w, asked.ids)
            low, high = (first, last) if part == 1 else (0, len(asked.head))
            _draw(n, low, high, w, asked)
            _examples(low, high, entity, relation, starts, prior, numbers, asked, limits, found)
        if part != 1:
            low, high = (first, last) if part == 2 else (0, len(entity) + len(relation))
            _rows(low, high, n, w, moves, numbers.model, asked, found)
            if low == 0:
                for b in range(len(asked.head)):
                    losses[n, asked.party[b]] += found.loss[b]


def add_secret_normals(secret: Secret, purpose: Purpose, party: int, step: int, deviation: float, into: Any) -> None:
    """Add a secret's normals, times the deviation, to a contiguous float32 tensor, on as many threads as torch has."""
    flat, key = into.numpy().reshape(-1), np.array(secret.key, np.uint32)
    shared_out(len(flat), len(flat), add_normals, flat, key, step, party | int(purpose) << 20, np.float32(deviation))


class CpuEpochs(Epochs):
    """Whole epochs on the CPU."""

    kernel: Numba

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self.steps(0)  # compiles

    def steps(self, number: int) -> None:
        cohort, examples, world, kernel = self.cohort, self.examples, self.examples.world, self.kernel
        adam, layout = cohort.optimizer, cohort.layout
        assert isinstance(adam, Adam)
        w = World(
            self.order.numpy(), self.begins.numpy(), self.sizes.numpy(), self.wanted.numpy(), self.taken.numpy(),
            self.most.numpy(), examples.triples.numpy(), examples.half.numpy(), self.share.numpy(),
            self.weights.numpy(), examples.sampling.subsampling, world.numbers.numpy(), world.many.numpy(),
            world.first.numpy(), world.entity.numpy(), self.known.numpy(),
            (examples.seed & 0xFFFFFFFF, examples.seed >> 32), self.batch, examples.sampling.batch, self.copies,
            self.sides, self.filtered, world.entity_total, world.relation_total,
        )  # fmt: skip
        asked = Asked.of(self.places, self.ids, self.pooled)
        key = np.array([] if self.noise is None else self.noise.secret.key, np.uint32)
        deviation = np.zeros(self.parties) if self.noise is None else self.noise.deviation.numpy()
        limits = limits_of(self.rule)
        rates = [np.float32(n) for n in (adam.learning_rate, adam.beta1, adam.beta2, adam.eps, self.divisor)]
        moves: list[Any] = []
        for part in PARTS:
            tensors = [getattr(t, part).numpy() for t in (cohort.tables, cohort.gradients.tables, *cohort.memory)]
            start = np.array(layout.entity_start if part == "entity" else layout.relation_start)
            fields: list[Any] = [
                *tensors,
                cohort.owner[part].numpy(),
                start,
                self.first.numpy(),
                self.second.numpy(),
                *rates,
            ]
            scale = np.float32(1) if part == "entity" else limits.relation_scale
            fields += [scale, key, deviation.astype(np.float32), NOISE[part]]
            moves.append(Move(*fields))
        entity, relation = moves[0].table, moves[1].table
        found = Found.empty(self.size, self.count, entity, relation, self.losses.numpy(), self.norms.numpy())
        numbers = kernel.numbers(self.rule, relation.shape[1])
        losses = self.step_losses.numpy()
        work = found.pull.size * entity.shape[1] + entity.size
        arguments = (w, kernel.starts, kernel.priors, tuple(moves), numbers, asked, limits, found, losses)
        if self.noise is None and (not number or threads_for(self.size, work) == 1):
            _work(0, 0, 0, 0, number, *arguments)
            return
        if not number:  # compile, on nothing
            _work(0, 0, 0, 0, 0, *arguments)
            _add_noise(0, 0, 0, moves[0], w)
        for n in range(number):
            if self.noise is not None:
                for m in moves:
                    shared_out(len(m.table), m.table.size, _add_noise, n, m, w)
            if self.pooled:
                _work(0, 0, 1, n, n + 1, *arguments)  # the pool first: no thread may begin without it
            shared_out(self.size, work, _work, 1, n, n + 1, *arguments)
            shared_out(len(entity) + len(relation), work, _work, 2, n, n + 1, *arguments)
