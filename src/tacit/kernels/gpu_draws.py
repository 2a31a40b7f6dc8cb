"""The draws of `tacit.draws` on a GPU, each in one launch: the same bits, and normals that differ in rounding alone.

Written out by torch, a block of ChaCha20 is two thousand launches: a private step would do little but wait for them.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from tacit.draws import CHACHA, KEY_STEPS, MULTIPLIERS, Purpose, Secret

Tensor = Any
M0, M1 = tl.constexpr(MULTIPLIERS[0]), tl.constexpr(MULTIPLIERS[1])
K0, K1 = tl.constexpr(KEY_STEPS[0]), tl.constexpr(KEY_STEPS[1])
C0, C1, C2, C3 = (tl.constexpr(word) for word in CHACHA)
BLOCK = 1024


@triton.jit
def philox_words(c0, c1, c2, c3, k0, k1):
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
def _quarter(a, b, c, d):
    """A quarter round of ChaCha20 on uint32 words."""
    a = a + b
    d = d ^ a
    d = (d << 16) | (d >> 16)
    c = c + d
    b = b ^ c
    b = (b << 12) | (b >> 20)
    a = a + b
    d = d ^ a
    d = (d << 8) | (d >> 24)
    c = c + d
    b = b ^ c
    b = (b << 7) | (b >> 25)
    return a, b, c, d


@triton.jit
def _chacha(at, step, whose, key):
    """The 16 words of ChaCha20's blocks at these numbers: the same bits as `tacit.draws.chacha`."""
    zero = (at * 0).to(tl.uint32)
    s0 = zero + C0
    s1 = zero + C1
    s2 = zero + C2
    s3 = zero + C3
    s4 = zero + tl.load(key).to(tl.uint32)
    s5 = zero + tl.load(key + 1).to(tl.uint32)
    s6 = zero + tl.load(key + 2).to(tl.uint32)
    s7 = zero + tl.load(key + 3).to(tl.uint32)
    s8 = zero + tl.load(key + 4).to(tl.uint32)
    s9 = zero + tl.load(key + 5).to(tl.uint32)
    s10 = zero + tl.load(key + 6).to(tl.uint32)
    s11 = zero + tl.load(key + 7).to(tl.uint32)
    s12 = (at & 0xFFFFFFFF).to(tl.uint32)
    s13 = (at >> 32).to(tl.uint32)
    s14 = zero + step.to(tl.uint32)
    s15 = zero + whose.to(tl.uint32)
    x0, x1, x2, x3, x4, x5, x6, x7 = s0, s1, s2, s3, s4, s5, s6, s7
    x8, x9, x10, x11, x12, x13, x14, x15 = s8, s9, s10, s11, s12, s13, s14, s15
    for _ in range(10):
        x0, x4, x8, x12 = _quarter(x0, x4, x8, x12)
        x1, x5, x9, x13 = _quarter(x1, x5, x9, x13)
        x2, x6, x10, x14 = _quarter(x2, x6, x10, x14)
        x3, x7, x11, x15 = _quarter(x3, x7, x11, x15)
        x0, x5, x10, x15 = _quarter(x0, x5, x10, x15)
        x1, x6, x11, x12 = _quarter(x1, x6, x11, x12)
        x2, x7, x8, x13 = _quarter(x2, x7, x8, x13)
        x3, x4, x9, x14 = _quarter(x3, x4, x9, x14)
    return (
        x0 + s0, x1 + s1, x2 + s2, x3 + s3, x4 + s4, x5 + s5, x6 + s6, x7 + s7,
        x8 + s8, x9 + s9, x10 + s10, x11 + s11, x12 + s12, x13 + s13, x14 + s14, x15 + s15,
    )  # fmt: skip


@triton.jit
def _two_normals(first, second, third):
    """Two standard normals from three words, as `tacit.draws.Secret.normal`."""
    u = first.to(tl.float32) * 2.0**-32 + (second.to(tl.float32) + 0.5) * 2.0**-64
    less = (first ^ 0xFFFFFFFF).to(tl.float32) * 2.0**-32 + ((second ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.0**-64
    y = less / (2.0 - less)  # near 1 by the series of the inverse hyperbolic tangent: a logarithm would lose digits
    z = y * y
    series = 2.0 + z * (2 / 3 + z * (2 / 5 + z * (2 / 7 + z * (2 / 9 + z * (2 / 11 + z * (2 / 13))))))
    radius = tl.sqrt(2.0 * tl.where(first >= 0x80000000, y * series, tl.maximum(-tl.log(u), 0.0)))
    moved = third + 0x20000000
    quarter = moved >> 30
    x = ((moved & 0x3FFFFFFF).to(tl.int32) - 0x20000000).to(tl.float32) * 1.4629180792671596e-09
    cos = tl.cos(x)
    sin = tl.sin(x)
    odd = (quarter & 1) != 0
    turn = tl.where((quarter & 2) != 0, -radius, radius)
    return turn * tl.where(odd, -sin, cos), turn * tl.where(odd, cos, sin)


@triton.jit
def normals(key, block, step, whose, BLOCKS: tl.constexpr):
    """(BLOCKS x 8,) standard normals: those of so many blocks of ChaCha20 from `block` on."""
    at = block + tl.arange(0, BLOCKS).to(tl.int64)
    w0, w1, w2, _3, w4, w5, w6, _7, w8, w9, w10, _11, w12, w13, w14, _15 = _chacha(at, step, whose, key)
    z0, z1 = _two_normals(w0, w1, w2)
    z2, z3 = _two_normals(w4, w5, w6)
    z4, z5 = _two_normals(w8, w9, w10)
    z6, z7 = _two_normals(w12, w13, w14)
    # Number by number into one row for each block: of a number's place, the first join is the highest bit.
    even = tl.join(tl.join(z0, z4), tl.join(z2, z6))
    odd = tl.join(tl.join(z1, z5), tl.join(z3, z7))
    return tl.reshape(tl.join(even, odd), (BLOCKS * 8,))


@triton.jit
def _philox_blocks(counter, out, count, key0, key1, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = at < count
    c0 = tl.load(counter + at, mask=there, other=0).to(tl.uint32)
    c1 = tl.load(counter + count + at, mask=there, other=0).to(tl.uint32)
    c2 = tl.load(counter + 2 * count + at, mask=there, other=0).to(tl.uint32)
    c3 = tl.load(counter + 3 * count + at, mask=there, other=0).to(tl.uint32)
    w0, w1, w2, w3 = philox_words(c0, c1, c2, c3, key0, key1)
    tl.store(out + at, w0.to(tl.int64), mask=there)
    tl.store(out + count + at, w1.to(tl.int64), mask=there)
    tl.store(out + 2 * count + at, w2.to(tl.int64), mask=there)
    tl.store(out + 3 * count + at, w3.to(tl.int64), mask=there)


def philox(counter: tuple[Tensor, ...], key: tuple[int, int]) -> tuple[Tensor, ...]:
    """As `tacit.draws.philox`, of tensors that broadcast."""
    given = torch.stack(torch.broadcast_tensors(*counter))
    out = torch.empty_like(given)
    count = given[0].numel()
    if count:
        _philox_blocks[(triton.cdiv(count, BLOCK),)](given, out, count, *key, BLOCK=BLOCK, num_warps=4)
    return tuple(out)


@triton.jit
def _party_words(seeds, numbers, steps, out, count, purpose, NORMAL: tl.constexpr, BLOCK: tl.constexpr):
    party = tl.program_id(1)
    block = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    zero = (block * 0).to(tl.uint32)
    step = zero + tl.load(steps + party).to(tl.uint32)
    whose = zero + (tl.load(numbers + party) | purpose).to(tl.uint32)
    seed = tl.load(seeds + party)
    w0, w1, w2, w3 = philox_words(
        block.to(tl.uint32), zero, step, whose, (seed & 0xFFFFFFFF).to(tl.uint32), (seed >> 32).to(tl.uint32)
    )
    out += party * count
    at = 4 * block
    if NORMAL:
        n0, n1 = box_muller(w0, w1)
        n2, n3 = box_muller(w2, w3)
    else:
        n0, n1, n2, n3 = w0.to(tl.int64), w1.to(tl.int64), w2.to(tl.int64), w3.to(tl.int64)
    tl.store(out + at, n0, mask=at < count)
    tl.store(out + at + 1, n1, mask=at + 1 < count)
    tl.store(out + at + 2, n2, mask=at + 2 < count)
    tl.store(out + at + 3, n3, mask=at + 3 < count)


@triton.jit
def box_muller(first, second):
    """Two standard normals from two words, as `tacit.draws.party_normals`."""
    radius = tl.sqrt(-2.0 * tl.log((first.to(tl.float64) + 0.5) * 2.0**-32))
    angle = (second.to(tl.float64) + 0.5) * 1.4629180792671596e-09
    return (radius * tl.cos(angle)).to(tl.float32), (radius * tl.sin(angle)).to(tl.float32)


def party_words(
    seeds: Tensor, purpose: int, numbers: Tensor, steps: Tensor, count: int, *, normal: bool = False
) -> Tensor:
    """As `tacit.draws.party_words`; `normal`: as `tacit.draws.party_normals`."""
    kind = torch.float32 if normal else torch.int64
    out = torch.empty(len(numbers), count, dtype=kind, device=numbers.device)
    _party_words[(triton.cdiv(count, 4 * 256), len(numbers))](
        seeds, numbers, steps, out, count, int(purpose) << 20, NORMAL=normal, BLOCK=256, num_warps=4
    )
    return out


@triton.jit
def _secret_blocks(blocks, steps, whose, out, count, key, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = at < count
    words = _chacha(
        tl.load(blocks + at, mask=there, other=0), tl.load(steps + at, mask=there, other=0),
        tl.load(whose + at, mask=there, other=0), key,
    )  # fmt: skip
    for i in tl.static_range(16):
        tl.store(out + at * 16 + i, words[i].to(tl.int64), mask=there)


def secret_blocks(secret: Secret, whose: Tensor, step: Tensor, block: Tensor) -> Tensor:
    """(blocks, 16) words, as `Secret.blocks`; `whose` is party and purpose as the counter has them."""
    given = [tensor.contiguous() for tensor in torch.broadcast_tensors(block, step, whose)]
    out = torch.empty(len(block), 16, dtype=torch.int64, device=block.device)
    key = torch.tensor(secret.key, dtype=torch.int64, device=block.device)
    if len(block):
        _secret_blocks[(triton.cdiv(len(block), 128),)](*given, out, len(block), key, BLOCK=128, num_warps=4)
    return out


@triton.jit
def _add_normals(into, count, key, step, whose, deviation, BLOCK: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * BLOCK
    at = first + tl.arange(0, BLOCK)
    there = at < count
    zero = (first * 0).to(tl.int64)
    found = normals(key, first // 8, zero + step, zero + whose, BLOCK // 8)
    tl.store(into + at, tl.load(into + at, mask=there, other=0.0) + deviation * found, mask=there)


def add_secret_normals(secret: Secret, purpose: Purpose, party: int, step: int, deviation: float, into: Tensor) -> None:
    """Add a secret's normals, times the deviation, to a contiguous float32 tensor."""
    key = torch.tensor(secret.key, dtype=torch.int64, device=into.device)
    if count := into.numel():
        _add_normals[(triton.cdiv(count, BLOCK),)](
            into, count, key, step, party | int(purpose) << 20, deviation, BLOCK=BLOCK, num_warps=4
        )
