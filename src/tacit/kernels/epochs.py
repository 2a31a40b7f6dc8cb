"""Whole epochs on the GPU: which triples a step sees, their negatives, their gradients, Adam; all in kernels.

The draws are those of `tacit.examples` and `tacit.negatives`, bit for bit: Philox on the GPU, facts looked up in a hash
table, pools made of the first distinct entities of a stream.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from tacit.cohort import Cohort
from tacit.draws import KEY_STEPS, MULTIPLIERS, Purpose
from tacit.errors import TacitError
from tacit.examples import Examples
from tacit.kernels.contract import Plain
from tacit.kernels.gpu import Triton
from tacit.models.tables import PARTS
from tacit.negatives import ATTEMPTS, Independent, Pool
from tacit.optimizers import Adam

Tensor = Any
M0, M1 = tl.constexpr(MULTIPLIERS[0]), tl.constexpr(MULTIPLIERS[1])
K0, K1 = tl.constexpr(KEY_STEPS[0]), tl.constexpr(KEY_STEPS[1])


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
