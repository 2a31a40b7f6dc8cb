"""Draws: published answers, an independent slow Philox, the same bits on both libraries, and plain statistics."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tacit.draws import MASK, Ahead, Purpose, Stream, below, bits, philox

# From the known-answer tests that Salmon et al. publish with their Random123 library, for philox4x32-10.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((MASK,) * 4, (MASK,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
words = st.integers(0, MASK)
seeds = st.integers(0, 2**64 - 1)
LIBRARIES = [lambda x: np.array([x], np.int64), lambda x: torch.tensor([x], dtype=torch.int64)]


def slow_philox(counter, key):
    """Philox4x32-10 as its paper states it, on Python integers of any size."""
    (a, b, c, d), (k, m) = counter, key
    for _ in range(10):
        p, q = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = (q >> 32) ^ b ^ k, q & MASK, (p >> 32) ^ d ^ m, p & MASK
        k, m = (k + 0x9E3779B9) & MASK, (m + 0xBB67AE85) & MASK
    return a, b, c, d


@pytest.mark.parametrize("array", LIBRARIES, ids=["numpy", "torch"])
@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_philox_gives_the_published_answers(array, counter, key, expected):
    assert tuple(int(word[0]) for word in philox(tuple(map(array, counter)), key)) == expected


@pytest.mark.parametrize("array", LIBRARIES, ids=["numpy", "torch"])
@given(st.tuples(words, words, words, words), st.tuples(words, words))
def test_philox_equals_the_slow_one(array, counter, key):
    assert tuple(int(word[0]) for word in philox(tuple(map(array, counter)), key)) == slow_philox(counter, key)


@given(seeds, st.sampled_from(Purpose), st.integers(0, 2**20 - 1), words, st.integers(0, 2**40))
def test_bits_are_the_documented_layout(seed, purpose, party, step, index):
    block = index // 4
    counter = (block & MASK, block >> 32, step, (purpose << 20) | party)
    expected = slow_philox(counter, (seed & MASK, seed >> 32))[index % 4]
    assert int(bits(seed, purpose, party, step, index)[0]) == expected
    assert int(bits(seed, purpose, party, step, torch.tensor([index]))[0]) == expected


@given(seeds, st.integers(0, 2**20 - 1), words, st.integers(0, 70))
def test_words_are_bits_in_order(seed, party, step, count):
    stream = Stream(seed, Purpose.TEST, party, step)
    assert stream.words(count).tolist() == bits(seed, Purpose.TEST, party, step, np.arange(count)).tolist()


def test_words_do_not_depend_on_the_pieces_they_are_made_in(monkeypatch):
    whole = Stream(3, Purpose.TEST).words(1003).tolist()
    monkeypatch.setattr("tacit.draws.CACHED", 7)
    assert Stream(3, Purpose.TEST).words(1003).tolist() == whole


@pytest.mark.parametrize("kind", [np.int32, np.uint8, torch.int32, torch.int16])
def test_any_integers_can_be_an_index(kind):
    index = np.arange(9, dtype=kind) if isinstance(kind, type) else torch.arange(9, dtype=kind)
    assert bits(5, Purpose.TEST, 1, 2, index).tolist() == Stream(5, Purpose.TEST, 1, 2).words(9).tolist()


def test_parties_broadcast():
    table = bits(5, Purpose.TEST, np.arange(3)[:, None], 2, np.arange(10)[None])
    for party in range(3):
        assert table[party].tolist() == Stream(5, Purpose.TEST, party, 2).words(10).tolist()


@given(seeds, st.integers(0, 200), st.integers(1, 2**32))
def test_both_libraries_draw_the_same(seed, count, high):
    here, there = Stream(seed, Purpose.TEST), Stream(seed, Purpose.TEST, device="cpu")
    assert here.integers(count, high).tolist() == there.integers(count, high).tolist()
    assert here.uniform(count).tolist() == there.uniform(count).tolist()
    assert here.permutation(count).tolist() == there.permutation(count).tolist()
    np.testing.assert_allclose(here.normal(count), there.normal(count).numpy(), rtol=1e-12, atol=1e-14)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")
@given(seeds, st.integers(0, 2000), st.integers(1, 2**32))
def test_a_gpu_draws_the_same(seed, count, high):
    here, there = Stream(seed, Purpose.TEST, 3, 5), Stream(seed, Purpose.TEST, 3, 5, device="cuda")
    assert here.integers(count, high).tolist() == there.integers(count, high).tolist()
    assert here.uniform(count).tolist() == there.uniform(count).tolist()
    assert here.permutation(count).tolist() == there.permutation(count).tolist()
    index = torch.arange(count, device="cuda")
    assert here.words(count).tolist() == bits(seed, Purpose.TEST, 3, 5, index).tolist()
    np.testing.assert_allclose(here.normal(count), there.normal(count).cpu().numpy(), rtol=1e-12, atol=1e-14)


@given(seeds, st.integers(1, 50), st.integers(1, 2**32))
def test_integers_are_the_high_word_of_a_product(seed, count, high):
    stream = Stream(seed, Purpose.TEST)
    pairs = zip(*(half.tolist() for half in stream.pairs(count)), strict=True)
    assert stream.integers(count, high).tolist() == [(upper << 32 | lower) * high >> 64 for upper, lower in pairs]


def test_uniforms_and_normals_are_what_they_say():
    stream = Stream(11, Purpose.TEST)
    uniform, normal = stream.uniform(200_000), stream.at(step=1).normal(200_001)
    assert uniform.min() >= 0
    assert uniform.max() < 1
    assert len(normal) == 200_001
    for drawn, mean, deviation in ((uniform, 0.5, 12**-0.5), (normal, 0, 1)):
        assert abs(drawn.mean() - mean) < 5 * deviation / len(drawn) ** 0.5
        assert abs(drawn.std() - deviation) < 0.01
    assert abs(np.corrcoef(normal[:100_000], normal[100_000:200_000])[0, 1]) < 0.02


def test_integers_fill_their_range_evenly():
    counts = np.bincount(Stream(2, Purpose.TEST).integers(100_000, 50), minlength=50)
    assert ((counts - 2000) ** 2 / 2000).sum() < 100  # chi-square with 49 degrees of freedom: 100 is beyond 1 in 10^4


@given(seeds, st.integers(0, 100))
def test_a_permutation_has_everything_once(seed, count):
    assert sorted(Stream(seed, Purpose.TEST).permutation(count).tolist()) == list(range(count))


def test_streams_differ_by_each_of_their_parts():
    base = Stream(1, Purpose.TEST)
    others = [Stream(2, Purpose.TEST), Stream(1, Purpose.PARTITION), base.at(party=1), base.at(step=1)]
    drawn = {tuple(stream.words(8).tolist()) for stream in (base, *others)}
    assert len(drawn) == 5


@pytest.mark.parametrize(
    "make",
    [
        lambda: Stream(-1, Purpose.TEST).words(1),
        lambda: Stream(1 << 64, Purpose.TEST).words(1),
        lambda: Stream(0, Purpose.TEST, party=1 << 20).words(1),
        lambda: Stream(0, Purpose.TEST, step=1 << 32).words(1),
        lambda: bits(0, Purpose.TEST, 1 << 20, 0, 0),
        lambda: Stream(0, Purpose.TEST).integers(1, 0),
    ],
)
def test_what_would_collide_is_refused(make):
    with pytest.raises(ValueError):
        make()


@given(start=st.integers(0, 40), count=st.integers(0, 30), seed=st.integers(0, 2**64 - 1))
def test_a_stream_can_be_read_from_any_place(start, count, seed):
    for device in (None, "cpu"):
        stream = Stream(seed, Purpose.TEST, device=device)
        assert stream.words(count, start).tolist() == stream.words(start + count)[start:].tolist()
        assert stream.uniform(count, start).tolist() == stream.uniform(start + count)[start:].tolist()


@given(words=st.lists(st.integers(0, 2**32 - 1), max_size=20), high=st.integers(1, 2**31))
def test_below_is_the_high_word_of_the_product(words, high):
    assert below(np.array(words, np.int64), high).tolist() == [word * high >> 32 for word in words]
    assert below(torch.tensor(words, dtype=torch.int64), high).tolist() == [word * high >> 32 for word in words]


@given(seeds, st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9)), min_size=1, max_size=8))
def test_draws_made_ahead_are_the_stream_s_own(seed, asked):
    stream = Stream(seed, Purpose.TEST, party=3)
    ahead = Ahead(stream, "cpu", steps=5)
    for step, count in asked:
        assert ahead.uniform(step, count).tolist() == stream.at(step=step).uniform(count).tolist()
