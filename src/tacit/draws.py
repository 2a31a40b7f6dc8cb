"""Counter-based randomness: the same bits everywhere.

Every public random number of the project is a pure function of five integers,

    bits(seed, purpose, party, step, index)

computed by Philox4x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
There is no generator state to save, share or advance: the order in which parties run, whether they run as one cohort or
one by one, on CPU or GPU, resumed or not, cannot change a draw.

The 128-bit counter of a block is laid out as

    word 0   block number, low 32 bits          (block = index // 4; the lane within the block is index % 4)
    word 1   block number, high 32 bits
    word 2   step
    word 3   purpose (high 12 bits) | party (low 20 bits)

and the 64-bit key is the seed. This layout is a promise: changing it changes every seeded result.

These bits are *public*: whoever knows the seed knows them all. Noise that protects data comes from `Secret`: ChaCha20
(Bernstein 2008; RFC 8439) under 256 bits from the operating system, at the same counter, whose blocks have 16 words.

The code runs unchanged on NumPy arrays and PyTorch tensors. Both hold the 32-bit words in int64, where the product of
two words wraps modulo 2**64, and shifting right and masking then gives the exact high and low words.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field, replace
from enum import IntEnum
from importlib.util import find_spec
from typing import Any

import numpy as np

from tacit.errors import BadValue

Array = Any
"""A NumPy array or a PyTorch tensor of int64."""

MASK = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
MAX_PARTY = 1 << 20
MAX_STEP = 1 << 32
MAX_HIGH = 1 << 32
CACHED = 1 << 13


class Purpose(IntEnum):
    """What a draw is for. Two purposes never share a counter. Never renumber; only add."""

    TEST = 0
    PARTITION = 1
    SPLIT = 2
    DATASET = 3
    MARK = 4
    INIT = 5
    SHUFFLE = 6
    NEGATIVES = 7
    POOL = 8
    SIDE = 9
    DROPOUT = 10
    CORRUPT = 11
    CLUSTER = 12
    NOISE_ENTITY = 13
    NOISE_RELATION = 14
    NOISE_SHARED = 15
    ROUND = 16
    SAMPLE = 17
    NOISE_SELECT = 18
    NOISE_COUNTS = 19
    CONTENT = 20
    NOISE_SIGNAL = 21
    TARGETS = 22
    COIN = 23
    NOISE_GAP = 24
    POISON = 25
    PAIR = 26
    NOISE_VOTE = 27
    NOISE_TEST = 28
    QUESTION = 29


def philox(
    counter: tuple[Array, Array, Array, Array], key: tuple[Array | int, Array | int]
) -> tuple[Array, Array, Array, Array]:
    """Philox4x32-10 of a 4-word counter under a 2-word key. Words are int64 in [0, 2**32) and broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        first, second = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((second >> 32) & MASK) ^ c1 ^ k0,
            second & MASK,
            ((first >> 32) & MASK) ^ c3 ^ k1,
            first & MASK,
        )
        k0, k1 = (k0 + KEY_STEPS[0]) & MASK, (k1 + KEY_STEPS[1]) & MASK
    return c0, c1, c2, c3


def blocks(seed: int, purpose: int, party: Array, step: Array, block: Array) -> tuple[Array, Array, Array, Array]:
    """The four 32-bit words of each `block`; `party` and `step` broadcast against it."""
    if not 0 <= seed < 1 << 64:
        raise BadValue(f"a seed is an integer from 0 to 2**64 - 1, not {seed}")
    for name, value, limit in (("party", party, MAX_PARTY), ("step", step, MAX_STEP)):
        if isinstance(value, int) and not 0 <= value < limit:
            raise BadValue(f"{name} must be in [0, {limit}), not {value}")
    zero = block * 0
    counter = (block & MASK, (block >> 32) & MASK, zero + step, zero + party | int(purpose) << 20)
    key = (seed & MASK, seed >> 32)
    if (kernels := _on_gpu(block)) is not None:
        return kernels.philox(counter, key)  # type: ignore[no-any-return]
    return philox(counter, key)


def party_words(seeds: Any, purpose: int, numbers: Any, steps: Any, count: int) -> Any:
    """(parties, count) 32-bit words, of each party by its seed at its step; all are tensors, a seed modulo 2**64."""
    import torch

    if (kernels := _on_gpu(numbers)) is not None:
        return kernels.party_words(seeds, purpose, numbers, steps, count)
    block = torch.arange(-(-count // 4), device=numbers.device)[None]
    counter = (block, block * 0, steps[:, None], numbers[:, None] | int(purpose) << 20)
    found = philox(counter, (seeds[:, None] & MASK, (seeds[:, None] >> 32) & MASK))
    return torch.stack(torch.broadcast_tensors(*found), -1).flatten(1)[:, :count]


def party_normals(seeds: Any, purpose: int, numbers: Any, steps: Any, count: int) -> Any:
    """(parties, count) standard normal float32 (Box and Muller 1958) of the same words: noise of simulations alone."""
    import torch

    if (kernels := _on_gpu(numbers)) is not None:
        return kernels.party_words(seeds, purpose, numbers, steps, count, normal=True)
    words = party_words(seeds, purpose, numbers, steps, count + count % 2).double()
    u = ((words + 0.5) * 2.0**-32).unflatten(1, (-1, 2))
    radius, angle = (-2.0 * u[..., 0].log()).sqrt(), (2.0 * np.pi) * u[..., 1]
    return torch.stack([radius * angle.cos(), radius * angle.sin()], -1).flatten(1)[:, :count].float()


def _on_gpu(words: Array) -> Any:
    """The kernels that draw on a GPU, if that is where these words are."""
    if isinstance(words, np.ndarray) or words.device.type != "cuda" or find_spec("triton") is None:
        return None
    from tacit.kernels import gpu_draws

    return gpu_draws


def bits(seed: int, purpose: int, party: Array | int, step: Array | int, index: Array | int) -> Array:
    """The 32-bit word at each `index` (int64 in [0, 2**32)); `party`, `step` and `index` broadcast.

    Arrays and tensors are of integers, all of one library; tensors are drawn on their device. Parties are below 2**20
    and steps below 2**32: beyond, counters of different purposes would meet.
    """
    party, step, index = (_int64(value) for value in (party, step, index))
    if isinstance(index, int):
        index = np.array([index], np.int64)  # an array, not a number: NumPy warns of numbers that wrap
    words = blocks(seed, purpose, party, step, index >> 2)
    # Choosing by arithmetic keeps one code path for both libraries: exactly one factor is 1.
    return sum(word * (index & 3 == lane) for lane, word in enumerate(words))


def _int64(value: Array | int) -> Array | int:
    if isinstance(value, int):
        return value
    return value.astype(np.int64) if isinstance(value, np.ndarray) else value.long()


def below(words: Array, high: Array | int) -> Array:
    """Each 32-bit word as an integer in [0, high), for high up to 2**31.

    One word instead of the two of `Stream.integers`: some values are drawn more often than others by one part in
    2**32 / high. That is nothing to a negative sample, and half the work.
    """
    return (words * high) >> 32


@dataclass(frozen=True)
class Stream:
    """The draws of one purpose, party and step, as the shapes a caller wants.

    Each method reads the stream from its beginning, so equal calls give equal results; use `at` for another step.
    Integers, uniforms and permutations are the same bits on NumPy and PyTorch. Normals go through `log` and `cos`,
    whose last digit may differ between libraries.

    >>> Stream(seed=7, purpose=Purpose.TEST).integers(4, high=100).tolist()
    [95, 11, 40, 17]
    """

    seed: int
    purpose: Purpose
    party: int = 0
    step: int = 0
    device: str | None = None
    """A torch device ("cpu", "cuda"): draw tensors there. None: draw NumPy arrays."""

    def at(self, *, party: int | None = None, step: int | None = None) -> Stream:
        """The same purpose at another party or step."""
        party = self.party if party is None else party
        return replace(self, party=party, step=self.step if step is None else step)

    def words(self, count: int, start: int = 0) -> Array:
        """`count` 32-bit words from index `start` on, as int64; a quarter of the work of `bits`."""
        skip, total = start % 4, -(-(start % 4 + count) // 4)
        if self.device is None:
            out = np.empty((total, 4), np.int64)
            for first in range(0, total, CACHED):  # pieces that stay in the processor's cache: three times as fast
                piece = np.arange(first, min(first + CACHED, total), dtype=np.int64) + start // 4
                for lane, word in enumerate(self._blocks(piece)):
                    out[first : first + CACHED, lane] = word
            return out.reshape(-1)[skip : skip + count]
        import torch

        block = torch.arange(total, dtype=torch.int64, device=self.device) + start // 4
        return torch.stack(self._blocks(block), 1).reshape(-1)[skip : skip + count]

    def _blocks(self, block: Array) -> tuple[Array, Array, Array, Array]:
        return blocks(self.seed, self.purpose, self.party, self.step, block)

    def pairs(self, count: int, start: int = 0) -> tuple[Array, Array]:
        """`count` 64-bit words from the `start`-th on, as their (high, low) 32-bit halves."""
        words = self.words(2 * count, 2 * start)
        return words[0::2], words[1::2]

    def integers(self, count: int, high: int) -> Array:
        """`count` integers uniform over [0, high): the high word of 64 random bits x high; bias below high / 2**64."""
        if not 0 < high <= MAX_HIGH:
            raise BadValue(f"high must be in [1, 2**32], not {high}")
        upper, lower = self.pairs(count)
        # Sums below 2**64 may wrap in int64; the shift and mask recover their high word exactly.
        return ((upper * high + (((lower * high) >> 32) & MASK)) >> 32) & MASK

    def uniform(self, count: int, start: int = 0) -> Array:
        """`count` float64 uniform over [0, 1), each a multiple of 2**-53, from the `start`-th of the stream on."""
        upper, lower = self.pairs(count, start)
        whole = (upper >> 5) * (1 << 26) + (lower >> 6)
        return (whole.astype(np.float64) if self.device is None else whole.double()) * 2.0**-53

    def normal(self, count: int) -> Array:
        """`count` standard normal float64 (Box and Muller 1958)."""
        half = -(-count // 2)
        u = self.uniform(2 * half)
        if self.device is None:
            log, sqrt, cos, sin, concatenate = np.log1p, np.sqrt, np.cos, np.sin, np.concatenate
        else:
            import torch

            log, sqrt, cos, sin, concatenate = torch.log1p, torch.sqrt, torch.cos, torch.sin, torch.cat
        radius, angle = sqrt(-2.0 * log(-u[:half])), (2.0 * np.pi) * u[half:]
        return concatenate([radius * cos(angle), radius * sin(angle)])[:count]

    def permutation(self, count: int) -> Array:
        """A uniformly random order of range(count): positions sorted by a 63-bit key, ties by position."""
        upper, lower = self.pairs(count)
        keys = (upper << 31) | (lower >> 1)
        return keys.argsort(kind="stable") if self.device is None else keys.argsort(stable=True)


class Ahead:
    """Uniforms of the steps of a stream, drawn for many steps at once and kept on a torch device.

    `uniform(step, count)` is `stream.at(step=step).uniform(count)`. One by one, a few draws cost more than what they
    are for.
    """

    def __init__(self, stream: Stream, device: Any, steps: int = 128):
        self.stream, self.device, self.steps = stream, device, steps
        self._first, self._drawn = 0, np.zeros((0, 0))

    def uniform(self, step: int, count: int) -> Array:
        """(count,) float64 over [0, 1)."""
        if not 0 <= step - self._first < len(self._drawn) or count > self._drawn.shape[1]:
            import torch

            stream, self._first = self.stream, step
            steps = np.arange(step, min(step + self.steps, MAX_STEP), dtype=np.int64)[:, None]
            block = np.zeros_like(steps) + np.arange(-(-count // 2), dtype=np.int64)
            words = np.stack(blocks(stream.seed, stream.purpose, stream.party, steps, block), -1).reshape(
                len(steps), -1
            )
            whole = (words[:, 0::2] >> 5) * (1 << 26) + (words[:, 1::2] >> 6)
            self._drawn = torch.from_numpy(whole * 2.0**-53).to(self.device)
        return self._drawn[step - self._first, :count]


CHACHA = (0x61707865, 0x3320646E, 0x79622D32, 0x6B206574)
"""The words of "expand 32-byte k"."""
QUARTERS = (
    (0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15),
    (0, 5, 10, 15), (1, 6, 11, 12), (2, 7, 8, 13), (3, 4, 9, 14),
)  # fmt: skip
"""The words of the quarter rounds of a double round: columns, then diagonals."""


def chacha(counter: tuple[Array, Array, Array, Array], key: tuple[int, ...]) -> list[Array]:
    """The 16 words of ChaCha20's blocks at these counters. Words are int64 in [0, 2**32) and broadcast."""
    begin = [counter[0] * 0 + word for word in (*CHACHA, *key)] + list(counter)
    x = list(begin)
    for _ in range(10):
        for a, b, c, d in QUARTERS:
            for into, other, mixed, left in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
                x[into] = (x[into] + x[other]) & MASK
                word = x[mixed] ^ x[into]
                x[mixed] = ((word << left) & MASK) | (word >> (32 - left))
    return [(word + first) & MASK for word, first in zip(x, begin, strict=True)]


@dataclass(frozen=True)
class Secret:
    """Normal draws that nobody can know who does not have the key; the same from every kernel, but for rounding.

    A key is made once for a run and never leaves it. One that is made from a seed makes a run a *simulation*, whose
    noise protects nothing: it is for tests, and for experiments that others shall repeat.
    """

    key: tuple[int, ...] = field(repr=False)
    """Eight 32-bit words."""
    simulated: bool = False

    @staticmethod
    def fresh() -> Secret:
        """A key from the operating system."""
        return Secret(tuple(np.frombuffer(secrets.token_bytes(32), np.uint32).tolist()))

    @staticmethod
    def simulation(seed: int) -> Secret:
        words = Stream(seed, Purpose.NOISE_ENTITY).words(8)
        return Secret(tuple(words.tolist()), simulated=True)

    def words(self, purpose: Purpose, party: Array | int, step: Array | int, count: int, device: Any = "cpu") -> Array:
        """`count` 32-bit words as an int64 tensor, of a purpose, party and step; or a row of them of each of several
        parties, whose numbers and steps are tensors.
        """
        import torch

        block = torch.arange(-(-count // 16), dtype=torch.int64, device=device)
        if isinstance(party, int):
            return self.blocks(purpose, party, step, block).reshape(-1)[:count]
        many = len(block)
        whose, steps = (torch.as_tensor(each, device=device).repeat_interleave(many) for each in (party, step))
        return self.blocks(purpose, whose, steps, block.repeat(len(party))).reshape(len(party), -1)[:, :count]

    def blocks(self, purpose: Purpose, party: Array | int, step: Array | int, block: Array) -> Array:
        """(blocks, 16) 32-bit words; `party` and `step` broadcast against the tensor `block`."""
        import torch

        step, whose = block * 0 + step, block * 0 + party | int(purpose) << 20
        if (kernels := _on_gpu(block)) is not None:
            return kernels.secret_blocks(self, whose, step, block)
        return torch.stack(chacha((block & MASK, block >> 32, step, whose), self.key), 1)

    def normal(self, purpose: Purpose, party: Array | int, step: Array | int, count: int, device: Any = "cpu") -> Array:
        """`count` standard normal float32 as a tensor, or as many of each of several parties, as with `words`: what the
        kernels' noise is held against.

        Of each four words two make a radius and one an angle, and so two normals (Box and Muller 1958); the fourth is
        left out. 64 bits of radius cut nothing off below 9.4 deviations, which a whole training does not see, and an
        angle of 32 bits is finer than float32, so that pure noise has no grid that noise with a gradient in it leaves.
        Rounding itself still tells a little (Mironov, CCS 2012); against that there is no defence here.
        """
        import torch

        words = self.words(purpose, party, step, 2 * (count + count % 2), device)
        words = words.reshape(*words.shape[:-1], -1, 4)
        first, second = words[..., 0].double(), words[..., 1].double()
        below = (first + (second + 0.5) * 2.0**-32) * 2.0**-32
        above = (MASK - first + (MASK - second + 0.5) * 2.0**-32) * 2.0**-32
        radius = (-2.0 * torch.where(below < 0.5, below.log(), torch.log1p(-above))).sqrt()
        angle = words[..., 2].double() * (2.0 * np.pi * 2.0**-32)
        return torch.stack([radius * angle.cos(), radius * angle.sin()], -1).flatten(-2)[..., :count].float()

    def add_normals(self, purpose: Purpose, party: int, step: int, deviation: float, into: Array) -> None:
        """Add `normal`, times the deviation, to the numbers of a contiguous tensor; by a kernel, where there is one."""
        import torch

        kernels = _on_gpu(into)
        if into.device.type == "cpu" and find_spec("numba") is not None:
            from tacit.kernels import cpu_epochs as kernels
        if kernels is not None and into.dtype == torch.float32:
            kernels.add_secret_normals(self, purpose, party, step, deviation, into)
            return
        noise = deviation * self.normal(purpose, party, step, into.numel(), into.device)
        into += noise.to(into.dtype).reshape(into.shape)
