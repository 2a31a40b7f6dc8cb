"""Whole epochs on the GPU: draws, gradients, secret noise and Adam in kernels, several steps in one CUDA graph.

A step is two or three launches, and the draws of all steps of a graph are one more; the host is not waited for.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl

from tacit.draws import Purpose
from tacit.errors import TacitError
from tacit.kernels.contract import Clipped
from tacit.kernels.epochs import HASH, Epochs
from tacit.kernels.fused import Places
from tacit.kernels.gpu import Triton
from tacit.kernels.gpu_draws import normals, philox_words
from tacit.negatives import ATTEMPTS
from tacit.optimizers import Adam

Tensor = Any
HASH_ = tl.constexpr(HASH)


@triton.jit
def _lane(c0, c1, c2, c3, k0, k1, lane):
    """One of the four words of each block: made four times over, and still nothing beside reading the rows."""
    w0, w1, w2, w3 = philox_words(c0, c1, c2, c3, k0, k1)
    return tl.where(lane == 0, w0, tl.where(lane == 1, w1, tl.where(lane == 2, w2, w3)))


@triton.jit
def _pick(entity, word, many, first):
    return tl.load(entity + first + tl.umulhi(word, many).to(tl.int64))


@triton.jit
def _is_known(known, key, ask, MASK: tl.constexpr):
    """Whether each key is in the hash table of facts; only for those that are asked for."""
    place = (((key * HASH_) >> 32) & 0xFFFFFFFF) & MASK
    found = tl.load(known + place, mask=ask, other=-1)
    further = ask & (found != -1) & (found != key)
    while tl.sum(further.to(tl.int32), 0) > 0:
        place = (place + 1) & MASK
        found = tl.where(further, tl.load(known + place, mask=further, other=-1), found)
        further = further & (found != -1) & (found != key)
    return ask & (found == key)


@triton.jit
def _draw(
    order, begins, sizes, wanted, taken, most, triples, halves, head_share, shares, numbers, many, first, candidates,
    known, number, heads, relations, tails, asks, weights, parties, ids, key0, key1, batch, entity_total,
    relation_total, full_batch, size, N: tl.constexpr, NP: tl.constexpr, MASK: tl.constexpr, SIDES: tl.constexpr,
    COPIES: tl.constexpr, WEIGHED: tl.constexpr, FILTERED: tl.constexpr, POOL: tl.constexpr,
    MOST_ATTEMPTS: tl.constexpr,
    NEGATIVES: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    """Which triple is at this place of one of the next steps, from which side it is asked, and its negatives."""
    b = tl.program_id(0).to(tl.int64)
    party = b % size // (batch * COPIES)
    inside = b % size % (batch * COPIES)
    copy = inside // batch
    place = inside % batch
    n = tl.load(number) + b // size
    step = tl.load(taken + party) + n
    own = tl.load(sizes + party)
    there = (tl.load(wanted + party) != 0) & (n * full_batch + place < own) & (step < tl.load(most + party))
    tl.store(weights + b, tl.where(there, 1.0, 0.0))
    tl.store(parties + b, party)
    if there:
        row = tl.load(order + tl.load(begins + party) + n * full_batch + place)
        if WEIGHED:
            tl.store(weights + b, tl.load(shares + row))
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
                coin, _1, _2, _3 = philox_words(word0, word0 * 0, word2, whose | (SIDE << 20), key0, key1)
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
def _draw_pool(numbers, many, first, candidates, taken, number, pool, short, key0, key1, P: tl.constexpr,
               DRAWN: tl.constexpr, PURPOSE: tl.constexpr):  # fmt: skip
    """A party's pool: the first P distinct entities of its stream."""
    party = tl.program_id(0)
    step = (tl.load(taken + party) + tl.load(number) + tl.program_id(1)).to(tl.uint32)
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
    tl.store(pool + (tl.program_id(1) * tl.num_programs(0) + party) * P + rank, row, mask=fresh & (rank < P))
    tl.atomic_or(short, (tl.sum(fresh.to(tl.int32), 0) < P).to(tl.int32))


@triton.jit
def _rows_move(
    table, gradient, mean, square, begin, local, rows_numbers, party, number, ahead, active, divisor, first, second,
    rate, beta1, beta2, eps, parties, key, deviations, step, whose, block, NOISE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Dense Adam on BLOCK numbers of one party's rows, after the noise if there is any; empties their gradient."""
    there = local < rows_numbers
    i = begin + local
    g = tl.load(gradient + i, mask=there, other=0.0)
    if NOISE:
        g += tl.load(deviations + party) * normals(key, block, step, whose, BLOCK // 8)
    g = g / divisor
    live = there & (local * 0 + active > 0)
    m = beta1 * tl.load(mean + i, mask=live, other=0.0) + (1.0 - beta1) * g
    v = beta2 * tl.load(square + i, mask=live, other=0.0) + (1.0 - beta2) * g * g
    at = (tl.load(number) + ahead) * parties + party
    update = m / (tl.sqrt(v) / tl.load(second + at) + eps)
    old = tl.load(table + i, mask=live, other=0.0)
    tl.store(table + i, old - rate / tl.load(first + at) * update, mask=live)
    tl.store(mean + i, m, mask=live)
    tl.store(square + i, v, mask=live)
    tl.store(gradient + i, tl.zeros([BLOCK], tl.float32), mask=there)


@triton.jit
def _move(
    entity, g_entity, mean_entity, square_entity, entity_starts, relation, g_relation, mean_relation, square_relation,
    relation_starts, sizes, wanted, taken, most, numbers, number, ahead, first, second, batch, rate, beta1, beta2, eps,
    parties, key, deviations, divisor, relation_scale, entity_blocks, EW: tl.constexpr, RW: tl.constexpr,
    NOISE: tl.constexpr, BLOCK: tl.constexpr, FOR_ENTITY: tl.constexpr, FOR_RELATION: tl.constexpr,
):  # fmt: skip
    """A piece of one party's rows of either table moves, if the party takes this step."""
    party = tl.program_id(1)
    piece = tl.program_id(0)
    n = tl.load(number) + ahead
    step = tl.load(taken + party) + n
    left = tl.load(sizes + party) - n * batch
    active = tl.where((tl.load(wanted + party) != 0) & (left > 0) & (step < tl.load(most + party)), 1, 0)
    over = tl.where(divisor == 0.0, tl.minimum(left, batch).to(tl.float32), divisor)
    whose = tl.load(numbers + party)
    if piece < entity_blocks:
        local = piece.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        start = tl.load(entity_starts + party)
        _rows_move(
            entity, g_entity, mean_entity, square_entity, start * EW, local,
            (tl.load(entity_starts + party + 1) - start) * EW, party, number, ahead, active, over, first, second, rate,
            beta1, beta2, eps, parties, key, deviations, step, whose | FOR_ENTITY, piece.to(tl.int64) * (BLOCK // 8),
            NOISE, BLOCK)  # fmt: skip
    else:
        piece = piece - entity_blocks
        local = piece.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        start = tl.load(relation_starts + party)
        _rows_move(
            relation, g_relation, mean_relation, square_relation, start * RW, local,
            (tl.load(relation_starts + party + 1) - start) * RW, party, number, ahead, active, over * relation_scale,
            first, second, rate, beta1, beta2, eps, parties, key, deviations, step, whose | FOR_RELATION,
            piece.to(tl.int64) * (BLOCK // 8), NOISE, BLOCK)  # fmt: skip


@triton.jit
def _advance(number, steps):
    tl.store(number, tl.load(number) + steps)


CHAIN, CANDIDATES = 32, 1 << 23
"""The most steps that one CUDA graph holds, and the most candidates: what is left over at an epoch's end is idle."""
BLOCK = 1024


class GpuEpochs(Epochs):
    """Whole epochs on the GPU."""

    kernel: Triton
    smallest_world = 4

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        cohort, device = self.cohort, self.cohort.tables.entity.device
        if len(cohort.tables.entity) < 1 << 31:
            self.ids = self.ids.to(torch.int32)
        if isinstance(self.rule, Clipped):
            mask = None if self.rule.row_mask is None else self.rule.row_mask.to(torch.int8)
            self.rule = replace(self.rule, clip=self.rule.clip.float(), row_mask=mask)
        width = cohort.tables.entity.shape[1]
        shape = (self.size, width), (self.size, self.count)
        self.between = tuple(torch.zeros(s, device=device) for s in shape) if self.pooled else None
        self.short = torch.zeros(1, dtype=torch.int32, device=device)
        self.number = torch.zeros(1, dtype=torch.int64, device=device)
        noise = self.noise
        self.key = torch.tensor([0] * 8 if noise is None else noise.secret.key, dtype=torch.int64, device=device)
        self.deviation = torch.zeros(self.parties, device=device)
        if noise is not None:
            self.deviation.copy_(noise.deviation)
        layout = cohort.layout
        self.starts = [torch.tensor(s, device=device) for s in (layout.entity_start, layout.relation_start)]
        self.graph: Any = None
        if device.type == "cuda":
            self._chain()  # compiles; no one is wanted yet, so nothing moves
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self._chain()

    def steps_at_once(self) -> int:
        return max(1, min(CHAIN, CANDIDATES // (self.size * self.count)))

    def _chain(self) -> None:
        """Some steps, from the one on whose number is on the device."""
        examples, world, p, size = self.examples, self.examples.world, self.places, self.count
        key = (examples.seed & 0xFFFFFFFF, examples.seed >> 32)
        _draw[(len(p.head),)](
            self.order, self.begins, self.sizes, self.wanted, self.taken, self.most, examples.triples, examples.half,
            self.share, self.weights, world.numbers, world.many, world.first, world.entity, self.known, self.number,
            p.head, p.relation, p.tail, p.asks_head, p.weight, p.party, self.ids, *key, self.batch, world.entity_total,
            world.relation_total, examples.sampling.batch, self.size, N=size, NP=triton.next_power_of_2(size),
            MASK=len(self.known) - 1, SIDES=self.sides, COPIES=self.copies,
            WEIGHED=examples.sampling.subsampling, FILTERED=self.filtered, POOL=self.pooled,
            MOST_ATTEMPTS=ATTEMPTS, NEGATIVES=int(Purpose.NEGATIVES), SIDE=int(Purpose.SIDE), num_warps=4,
        )  # fmt: skip
        if self.pooled:
            _draw_pool[(self.parties, self.ahead)](
                world.numbers, world.many, world.first, world.entity, self.taken, self.number, self.ids, self.short,
                *key, P=size, DRAWN=triton.next_power_of_2(3 * size // 2 + 32), PURPOSE=int(Purpose.POOL), num_warps=8,
            )  # fmt: skip
        for ahead in range(self.ahead):
            self._step(ahead)
        _advance[(1,)](self.number, self.ahead)

    def _step(self, ahead: int) -> None:
        cohort, adam, p = self.cohort, self.cohort.optimizer, self.places
        assert isinstance(adam, Adam)
        of_step, rows = slice(ahead * self.size, (ahead + 1) * self.size), self.parties if self.pooled else self.size
        asked = Places(*(getattr(p, name)[of_step] for name in p.__dataclass_fields__))
        self.kernel.launch(
            cohort.tables, asked, self.ids[ahead * rows : (ahead + 1) * rows], self.pooled, self.rule,
            cohort.gradients.tables, self.losses[of_step], self.norms[of_step],
            (self.step_losses, self.number, ahead), self.between,
        )  # fmt: skip
        scale = self.rule.relation_scale if isinstance(self.rule, Clipped) else 1.0
        noisy = self.noise is not None
        layout, tables, gradients = cohort.layout, cohort.tables, cohort.gradients.tables
        mean, square = cohort.memory
        widths = tables.entity.shape[1], tables.relation.shape[1]
        blocks = [
            triton.cdiv(max(n) * w, BLOCK) for n, w in zip((layout.entities, layout.relations), widths, strict=True)
        ]
        _move[(sum(blocks), self.parties)](
            tables.entity, gradients.entity, mean.entity, square.entity, self.starts[0], tables.relation,
            gradients.relation, mean.relation, square.relation, self.starts[1], self.sizes, self.wanted, self.taken,
            self.most, self.examples.world.numbers, self.number, ahead, self.first, self.second,
            self.examples.sampling.batch, adam.learning_rate, adam.beta1, adam.beta2, adam.eps, self.parties, self.key,
            self.deviation, self.divisor, scale, blocks[0],
            EW=widths[0], RW=widths[1], NOISE=noisy, BLOCK=BLOCK, FOR_ENTITY=int(Purpose.NOISE_ENTITY) << 20,
            FOR_RELATION=int(Purpose.NOISE_RELATION) << 20, num_warps=4,
        )  # fmt: skip

    def steps(self, number: int) -> None:
        self.number.zero_()
        for _ in range(-(-number // self.ahead)):
            if self.graph is None:
                self._chain()
            else:
                self.graph.replay()
        if self.pooled and int(self.short):
            raise TacitError("a pool had too few distinct entities: use fewer negatives")
