"""Private set union and intersection: right answers, held against plain sets, and nothing odd let in or out."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections import Counter
from itertools import permutations

import numpy as np
import pytest
import rbcl
from hypothesis import given
from hypothesis import strategies as st

from tacit.draws import Purpose, Stream, philox
from tacit.errors import BadValue, Refused, TacitError
from tacit.federation.sets import (
    POINT,
    Intersection,
    Pseudonyms,
    Sketch,
    inverse,
    multiplied,
    points_of,
    random_points,
    random_scalar,
)

ORDER = 2**252 + 27742317777372353535851937790883648493

# RFC 9496, appendix A.1: the generator times 1, 2, 3, ...
MULTIPLES = [
    "e2f2ae0a6abc4e71a884a961c500515f58e30b6aa582dd8db6a65945e08d2d76",
    "6a493210f7499cd17fecb510ae0cea23a110e8d5b901f8acadd3095c73a3b919",
    "94741f5d5d52755ece4f23f044ee27d5d1ea1e2bd196b462166b16152a9d0259",
    "da80862773358b466ffadfe0b3293ab3d9fd53c5ea6c955358f568322daf6a57",
    "e882b131016b52c1d3337080187cf768423efccbb517bb495ab812c4160ff44e",
    "f64746d3c92b13050ed8d80236a7f0007c3b3f962f5ba793d19a601ebb1df403",
    "44f53520926ec81fbd5a387845beb7df85a96a24ece18738bdcfa6a7822a176d",
    "903293d8f2287ebe10e2374dc1a53e0bc887e592699f02d077d5263cdd55601c",
]
GENERATOR = bytes.fromhex(MULTIPLES[0])

# Appendix A.2: no points. Not canonical, negative, without a square root, with a negative product, and minus one.
NO_POINTS = [
    "00ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff",
    "ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
    "edffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
    "0100000000000000000000000000000000000000000000000000000000000000",
    "01ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
    "ed57ffd8c914fb201471d1c3d245ce3c746fcbe63a3679d51b6a516ebebe0e20",
    "26948d35ca62e643e26a83177332e6b6afeb9d08e4268b650f1f5bbd8d81d371",
    "3eb858e78f5a7254d8c9731174a94f76755fd3941c0ac93735c07ba14579630e",
    "ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
]
IDENTITY = bytes(32)

# Appendix A.3: the points of SHA-512 of these lines.
DERIVED = {
    "Ristretto is traditionally a short shot of espresso coffee":
        "3066f82a1a747d45120d1740f14358531a8f04bbffe6a819f86dfe50f44a0a46",
    "made with the normal amount of ground coffee but extracted with":
        "f26e5b6f7d362d2d2a94c5d0e7602cb4773c95a2e5c31a64f133189fa76ed61b",
    "about half the amount of water in the same amount of time":
        "006ccd2a9e6867e6a2c5cea83d3302cc9de128dd2a9a57dd8ee7b9d7ffe02826",
    "by using a finer grind.":
        "f8f0c87cf237953c5890aec3998169005dae3eca1fbb04548c635953c817f92a",
}  # fmt: skip


def number(value):
    return value.to_bytes(32, "little")


def split(points):
    return [points[at : at + POINT] for at in range(0, len(points), POINT)]


# -- points ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("times", range(1, len(MULTIPLES) + 1))
def test_multiples_of_the_generator_are_those_of_the_standard(times):
    assert multiplied(GENERATOR, number(times)).hex() == MULTIPLES[times - 1]


def test_many_points_are_multiplied_each_by_itself():
    twice = [multiplied(bytes.fromhex(point), number(2)) for point in MULTIPLES]
    assert split(multiplied(bytes.fromhex("".join(MULTIPLES)), number(2))) == twice
    assert [point.hex() for point in twice[:4]] == MULTIPLES[1::2]
    assert multiplied(b"", number(2)) == b""


@pytest.mark.parametrize("line", DERIVED)
def test_points_of_hashes_are_those_of_the_standard(line):
    assert rbcl.crypto_core_ristretto255_from_hash(hashlib.sha512(line.encode()).digest()).hex() == DERIVED[line]


def test_the_point_of_a_name_never_changes():
    for name in ("a", "", "naïve", "\ud800"):
        hashed = hashlib.sha512(b"tacit 5 point 3 dom:" + name.encode("utf-8", "surrogatepass")).digest()
        assert points_of([name], b"dom") == rbcl.crypto_core_ristretto255_from_hash(hashed)


@given(st.lists(st.text(max_size=5), max_size=8))
def test_points_are_in_the_order_of_names_and_equal_where_they_are(names):
    points = split(points_of(names, b""))
    assert points == [points_of([name], b"") for name in names]
    assert len(set(points)) == len(set(names))


def test_domains_have_no_point_in_common():
    pairs = [(b"d", "e:f"), (b"d:e", "f"), (b"", "d:e:f"), (b"d:e:f", ""), (b"e", "e:f")]
    assert len({points_of([name], domain) for domain, name in pairs}) == len(pairs)


@pytest.mark.parametrize("wrong", [*map(bytes.fromhex, NO_POINTS), IDENTITY], ids=bytes.hex)
@pytest.mark.parametrize("at", range(3))
def test_what_is_no_point_is_refused(wrong, at):
    points = split(random_points(2))
    with pytest.raises(Refused, match="no point"):
        multiplied(b"".join([*points[:at], wrong, *points[at:]]), random_scalar())


@pytest.mark.parametrize("length", [1, 31, 33, 63, 65])
def test_half_a_point_is_refused(length):
    with pytest.raises(Refused, match=f"{length} bytes"):
        multiplied(random_points(3)[:length], random_scalar())


def test_scalars_are_random_and_inverses_undo_them():
    scalars = [random_scalar() for _ in range(20)]
    assert len(set(scalars)) == 20
    points = random_points(3)
    for scalar in scalars:
        assert 0 < int.from_bytes(scalar, "little") < ORDER
        assert int.from_bytes(scalar, "little") * int.from_bytes(inverse(scalar), "little") % ORDER == 1
        assert multiplied(points, scalar) != points
        assert multiplied(multiplied(points, scalar), inverse(scalar)) == points


def test_random_points_are_points_and_all_different():
    points = random_points(50)
    assert len(set(split(points))) == 50
    assert multiplied(points, number(1)) == points


# -- pseudonyms --------------------------------------------------------------------------------------------------------

any_name = st.text(st.characters(), max_size=4) | st.sampled_from(["a", "b", "c", "d"])  # surrogates and all
some_sets = st.lists(st.lists(any_name, unique=True, max_size=6), min_size=2, max_size=6)


def pseudonyms(sets, bounds, domain=b"test"):
    """The pseudonyms of all parties' names, by the whole protocol; each list goes round from its owner on."""
    parties = [Pseudonyms(names, bound, domain) for names, bound in zip(sets, bounds, strict=True)]
    results = []
    for owner, party in enumerate(parties):
        points = party.blinded()
        for other in parties[owner + 1 :] + parties[:owner]:
            points = other.passed(points, bounds[owner])
        results.append(party.finished(points))
    return results


def union(sets, bound):
    """How many parties have each pseudonym, by sketches; with another salt if the first is bad luck."""
    for salt in (1, 2):
        try:
            keys, counts = Sketch.read(summed(sets, Sketch.cells(bound), salt), salt)
        except TacitError:
            continue
        return dict(zip(map(bytes, keys), counts.tolist(), strict=True))
    raise AssertionError("bad luck twice")


def summed(sets, cells, salt):
    total = np.zeros((cells, Sketch.WIDTH), np.uint32)
    for keys in sets:
        total += Sketch.of(keys, cells, salt)
    return total


def check_union(sets, bounds):
    results = pseudonyms(sets, bounds)
    named = {}
    for names, rows in zip(sets, results, strict=True):
        assert rows.shape == (len(names), 16)
        assert rows.dtype == np.uint8
        for name, row in zip(names, rows, strict=True):
            assert named.setdefault(name, bytes(row)) == bytes(row)
    assert len(set(named.values())) == len(named)
    expected = Counter(name for names in sets for name in names)
    assert union(results, len(named)) == {named[name]: count for name, count in expected.items()}


@given(some_sets, st.data())
def test_the_union_is_that_of_plain_sets(sets, data):
    check_union(sets, [len(names) + data.draw(st.integers(0, 3)) for names in sets])


MANY = [f"http://example.org/{i}" for i in range(12)]


@pytest.mark.parametrize("parties", [2, 3, 6])
@pytest.mark.parametrize("room", [0, 5])
@pytest.mark.parametrize(
    "names_of",
    [
        lambda party, parties: [],
        lambda party, parties: MANY,
        lambda party, parties: MANY[:: -1 if party else 1],
        lambda party, parties: MANY[party::parties],
        lambda party, parties: MANY if party == 0 else [],
        lambda party, parties: MANY[: party + 1],
    ],
    ids=["empty", "equal", "reversed", "disjoint", "one", "nested"],
)
def test_unions_at_the_edges(names_of, parties, room):
    sets = [names_of(party, parties) for party in range(parties)]
    check_union(sets, [len(names) + room for names in sets])


def test_the_order_of_parties_does_not_matter():
    owner, *others = [Pseudonyms(MANY, 15, b"") for _ in range(4)]
    results = set()
    for route in permutations(others):
        points = owner.blinded()
        for other in route:
            points = other.passed(points, 15)
        results.add(owner.finished(points).tobytes())
    assert len(results) == 1


def test_a_pseudonym_is_the_hash_of_a_point_with_all_keys_on_it():
    parties = [Pseudonyms(MANY, 20, b"dom") for _ in range(3)]
    points = points_of(MANY, b"dom")
    for party in parties:
        points = multiplied(points, party._key)
    expected = [hashlib.sha256(b"tacit 9 pseudonym 3 dom:" + point).digest()[:16] for point in split(points)]
    sent = parties[1].blinded()
    found = parties[1].finished(parties[2].passed(parties[0].passed(sent, 20), 20))
    assert [bytes(row) for row in found] == expected


@pytest.mark.parametrize("missing", [1, 2])
def test_no_party_can_be_left_out(missing):
    parties = [Pseudonyms(MANY, 12, b"") for _ in range(3)]
    right = parties[1].finished(parties[2].passed(parties[0].passed(parties[1].blinded(), 12), 12))
    left = parties[0].finished(parties[3 - missing].passed(parties[0].blinded(), 12))
    assert not set(map(bytes, left)) & set(map(bytes, right))


def test_another_run_has_other_pseudonyms():
    first, second = (pseudonyms([MANY, MANY], [12, 12])[0] for _ in range(2))
    assert not set(map(bytes, first)) & set(map(bytes, second))


@pytest.mark.parametrize("make", [Pseudonyms, lambda names, bound, domain: Intersection(names, bound, 3, domain)])
def test_names_that_do_not_fit_are_refused(make):
    with pytest.raises(TacitError, match=r"12 names.* 11"):
        make(MANY, 11, b"")
    with pytest.raises(BadValue, match="twice"):
        make(["a", "b", "a"], 9, b"")


def wrong_lists(points):
    """What is not a list of as many points as `points`, each once; with the reason."""
    first, second, *rest = split(points)
    return [
        (points[:-1], "bytes"),
        (points[:-POINT], "bytes"),
        (points + random_points(1), "bytes"),
        (b"", "bytes"),
        (first + first + b"".join(rest), "twice"),
        (IDENTITY + second + b"".join(rest), "no point"),
        (first + bytes.fromhex(NO_POINTS[0]) + b"".join(rest), "no point"),
    ]


def test_wrong_lists_are_refused():
    party = Pseudonyms(MANY[:3], 5, b"")
    for points, reason in wrong_lists(party.blinded()):
        with pytest.raises(Refused, match=reason):
            party.finished(points)
        with pytest.raises(Refused, match=reason):
            party.passed(points, 5)
    with pytest.raises(Refused, match="bytes"):
        party.passed(party.blinded(), 6)


# -- what is sent ------------------------------------------------------------------------------------------------------

BOUND = 40
SENDERS = {
    "pseudonyms": lambda names: Pseudonyms(names, BOUND, b"d"),
    "intersection": lambda names: Intersection(names, BOUND, BOUND, b"d"),
}


@pytest.fixture(params=SENDERS)
def sender(request):
    return SENDERS[request.param]


def test_what_is_sent_is_as_long_whatever_is_held(sender):
    for names in ([], ["a"], MANY, [str(i) for i in range(BOUND)]):
        assert len(sender(names).blinded()) == POINT * BOUND
    other = Pseudonyms(["a"], 1, b"d")
    assert len(other.passed(sender(MANY).blinded(), BOUND)) == POINT * BOUND
    assert len(Intersection(["a"], 1, BOUND, b"d").passed(sender(MANY).blinded())) == POINT * BOUND


def test_lists_of_different_names_look_alike(sender):
    plain = set(split(points_of([*MANY, *map(str, range(BOUND))], b"d")))
    seen = set()
    for names in ([], MANY, MANY, [str(i) for i in range(BOUND)]):
        points = split(sender(names).blinded())
        assert len(set(points)) == BOUND
        assert not plain & set(points)
        assert not seen & set(points)
        assert multiplied(b"".join(points), number(1)) == b"".join(points)
        seen |= set(points)


def test_secrets_are_fresh_and_so_are_the_points_that_fill_up(sender):
    parties = [sender(["a"]) for _ in range(5)]
    scalars = [value for party in parties for name, value in vars(party).items() if name in ("_key", "_blinding")]
    assert len(set(scalars)) == len(scalars) >= 5
    points = [set(split(party._points)) for party in parties]
    assert set.intersection(*points) == {points_of(["a"], b"d")}
    assert len(set.union(*points)) == 5 * (BOUND - 1) + 1


def test_a_list_is_the_same_when_it_is_sent_again(sender):
    party = sender(MANY)
    assert party.blinded() == party.blinded()


def test_places_in_a_list_tell_nothing_of_the_order_of_names(sender):
    half = [str(i) for i in range(BOUND // 2)]
    plain = split(points_of(half, b"d"))
    places = []
    for _ in range(60):
        party = sender(half)
        scalar = getattr(party, "_blinding", party._key)
        points = split(multiplied(party.blinded(), inverse(scalar)))
        places.append([points.index(point) for point in plain])
    # Each name at a uniformly random place: the mean over 60 lists has a deviation of 1.5 about 19.5.
    assert np.all(np.abs(np.mean(places, 0) - (BOUND - 1) / 2) < 9)
    assert len(set(map(tuple, places))) == 60
    assert all(place != sorted(place) for place in places)


# -- sketches ----------------------------------------------------------------------------------------------------------


def table(*keys):
    return np.frombuffer(b"".join(keys), np.uint8).reshape(-1, 16)


def random_keys(count, seed, step=0):
    words = Stream(seed, Purpose.TEST, step=step).words(4 * count)
    return words.astype("<u4").view(np.uint8).reshape(-1, 16)


def slow_sketch(keys, cells, salt):
    """What `Sketch.of` gives, with Python's integers, one number at a time."""
    total = [[0] * 11 for _ in range(cells)]
    for key in map(bytes, keys):
        counter = tuple(int.from_bytes(key[at : at + 4], "little") for at in range(0, 16, 4))
        places, check = (philox(counter, (seed % 2**32, seed // 2**32)) for seed in (2 * salt, 2 * salt + 1))
        words = [int.from_bytes(key[at : at + 2], "little") for at in range(0, 16, 2)]
        for quarter, place in enumerate(places):
            cell = total[quarter * (cells // 4) + place * (cells // 4) // 2**32]
            for at, add in enumerate([1, *words, check[0] % 2**16, check[0] // 2**16]):
                cell[at] += add
    return total


def counted(sets):
    return Counter(bytes(key) for keys in sets for key in keys)


any_key = st.binary(min_size=16, max_size=16) | st.integers(0, 20).map(lambda i: i.to_bytes(16, "big"))
key_sets = st.lists(
    st.lists(any_key | st.integers(0, 20).map(number).map(lambda key: key[:16]), unique=True), max_size=6
)


@given(st.lists(any_key, unique=True), st.integers(1, 30), st.integers(0, 2**63 - 1))
def test_a_sketch_is_what_it_is_said_to_be(keys, quarter, salt):
    assert Sketch.of(table(*keys), 4 * quarter, salt).tolist() == slow_sketch(table(*keys), 4 * quarter, salt)


@given(key_sets)
def test_a_sum_of_sketches_is_the_union_with_counts(sets):
    sets = [table(*keys) for keys in sets]
    expected = counted(sets)
    found = union(sets, len(expected))
    assert found == expected
    assert list(found) == sorted(expected)


@given(st.integers(0, 300), st.integers(1, 6), st.integers(0, 2**32), st.sampled_from([0.0, 0.5, 1.0]))
def test_sums_of_random_sets_up_to_the_bound_are_read(bound, parties, seed, share):
    keys = random_keys(int(bound * share), seed)
    draws = Stream(seed, Purpose.TEST, party=1).uniform(parties * len(keys)).reshape(parties, -1)
    sets = [keys[draw < 0.5] for draw in draws]
    assert union(sets, bound) == counted(sets)


@pytest.mark.parametrize("bound", [0, 1, 2, 3, 5, 10, 50, 700, 20_000])
def test_tables_as_full_as_their_bound_are_read(bound):
    for step in range(max(1, 1000 // max(bound, 5))):
        keys = random_keys(bound, 5, step)
        found, counts = Sketch.read(Sketch.of(keys, Sketch.cells(bound), step), step)
        assert list(map(bytes, found)) == sorted(map(bytes, keys))
        assert counts.tolist() == [1] * bound
        assert counts.dtype == np.int64


def test_cells_are_few_and_grow_with_the_bound():
    cells = [Sketch.cells(bound) for bound in range(3000)]
    assert cells == sorted(cells)
    assert all(number % 4 == 0 for number in cells)
    assert (cells[0], cells[1], cells[50]) == (4, 8, 284)
    assert 1.3 < Sketch.cells(50_000) / 50_000 < 1.35


def meet(keys, cells, salt):
    """Whether two keys share all four cells, in each of some sets: (sets, n, 16)."""
    places, _ = Sketch._added(keys.reshape(-1, 16), cells, salt)
    joint = np.ravel_multi_index(tuple(places % (cells // 4)), (cells // 4,) * 4).reshape(keys.shape[:2])
    joint.sort(axis=1)
    return (joint[:, 1:] == joint[:, :-1]).any(1)


@pytest.mark.full
def test_keys_can_be_read_unless_two_share_all_their_cells():
    times = {2: 4000, 3: 4000, 10: 4000, 50: 4000, 200: 3000, 500: 2000, 680: 2000, 2000: 1000, 20_000: 50}
    for bound, trials in times.items():
        cells = Sketch.cells(bound)
        for step in range(trials):
            keys = random_keys(bound, 11, step)
            try:
                found, _ = Sketch.read(Sketch.of(keys, cells, step), step)
            except TacitError:
                assert meet(keys[None], cells, step).all()
            else:
                assert len(found) == bound


@pytest.mark.full
@pytest.mark.parametrize(("bound", "trials"), [(2, 10_000), (3, 10_000), (10, 10_000), (50, 2000), (300, 500)])
def test_two_keys_share_all_their_cells_less_than_once_in_ten_thousand_times(bound, trials):
    """A hundred salts: 0.5 in 10,000 are expected, which is 50 in a million; of the smallest number 2.5."""
    found = 0
    for salt in range(100):
        keys = random_keys(trials * bound, 12, salt).reshape(trials, bound, 16)
        found += int(meet(keys, Sketch.cells(bound), salt).sum())
    assert found < 1e-4 * 100 * trials


@given(st.integers(1, 6), st.integers(1, 40), st.integers(0, 2**32))
def test_more_keys_than_the_bound_are_read_as_they_are_or_not_at_all(bound, more, seed):
    keys = random_keys(bound + more, seed)
    sets = [keys, keys[::2], keys[::3]]
    try:
        found, counts = Sketch.read(summed(sets, Sketch.cells(bound), 3), 3)
    except TacitError:
        return
    assert dict(zip(map(bytes, found), counts.tolist(), strict=True)) == counted(sets)


@pytest.mark.parametrize("bound", [0, 1, 2, 10, 1000])
def test_far_more_keys_than_the_bound_cannot_be_read(bound):
    keys = random_keys(Sketch.cells(bound) + 1, 8)
    with pytest.raises(TacitError, match="another salt"):
        Sketch.read(Sketch.of(keys, Sketch.cells(bound), 0), 0)


def test_as_many_parties_as_there_may_be_do_not_wrap():
    keys = table(b"\xff" * 16, bytes(16), b"\xff\xff" + bytes(14))
    total = Sketch.of(keys, 80, 4)
    found, counts = Sketch.read(total * np.uint32(65_535), 4)
    assert list(map(bytes, found)) == sorted(map(bytes, keys))
    assert counts.tolist() == [65_535] * 3
    with pytest.raises(TacitError):
        Sketch.read(total * np.uint32(65_536), 4)


def test_full_cells_may_wrap():
    keys = np.concatenate([random_keys(990, 1) | 0xF0, table(*[bytes([0xFF] * 14 + [0, i]) for i in range(10)])])
    total = Sketch.of(keys, Sketch.cells(1000), 6) * np.uint32(60_000)
    assert (Sketch.of(keys, Sketch.cells(1000), 6).astype(np.int64) * 60_000).max() >= 2**32
    found, counts = Sketch.read(total, 6)
    assert list(map(bytes, found)) == sorted(map(bytes, keys))
    assert set(counts.tolist()) == {60_000}


@pytest.mark.parametrize("salt", range(40))
def test_keys_whose_mean_is_a_key_too_are_told_apart(salt):
    """Words that are multiples of 60: a cell of several keys has their mean as its word, and only the check tells."""
    words = 60 * Stream(9, Purpose.TEST).at(step=salt).integers(8 * 150, 1000)
    keys = words.astype("<u2").view(np.uint8).reshape(-1, 16)
    sets = [keys, keys[:50], keys[::2]]
    found, counts = Sketch.read(summed(sets, Sketch.cells(150), salt), salt)
    assert dict(zip(map(bytes, found), counts.tolist(), strict=True)) == counted(sets)


@pytest.mark.parametrize(
    ("at", "more"),
    [(0, 1), (1, 1), (8, 1), (1, 2 << 16), (8, 2 << 16), (9, 2), (10, 2), (9, 2 << 16), (10, 2 << 16), (10, 1)],
)
def test_a_cell_that_is_not_one_keys_shows_none(at, more):
    total = 2 * Sketch.of(random_keys(1, 1), 40, 0)
    total[total[:, 0] > 0, at] += np.uint32(more)
    with pytest.raises(TacitError, match=": 0 keys"):
        Sketch.read(total, 0)


def test_a_key_in_a_cell_that_is_not_its_own_does_not_show():
    total = np.roll(Sketch.of(random_keys(1, 1), 40, 0), 1, axis=0)
    with pytest.raises(TacitError, match=": 0 keys"):
        Sketch.read(total, 0)


@given(st.integers(0, 12), st.data())
def test_a_changed_sum_is_not_read(count, data):
    keys = random_keys(count, 2)
    total = Sketch.of(keys, 160, 0) + Sketch.of(keys[::2], 160, 0)
    cell = data.draw(st.sampled_from(np.flatnonzero(total[:, 0]).tolist() or [0]) | st.integers(0, 159))
    change = np.zeros_like(total)
    change[cell, data.draw(st.integers(0, 10))] = data.draw(st.integers(1, 3) | st.integers(1, 2**32 - 1))
    total += change
    with pytest.raises(TacitError, match="cannot be read"):
        Sketch.read(total, 0)


def test_a_key_that_comes_out_for_ever_is_not_read():
    """One key in a cell of its own, and gone from its others: it can be taken out, and comes back negative."""
    total = Sketch.of(random_keys(1, 1), 8, 0)
    first = np.flatnonzero(total[:, 0])[0]
    total[np.arange(8) != first] = 0
    with pytest.raises(TacitError, match="cannot be read"):
        Sketch.read(total, 0)


def test_another_salt_is_another_table():
    keys = random_keys(30, 3)
    assert (Sketch.of(keys, 400, 0) != Sketch.of(keys, 400, 1)).any()
    with pytest.raises(TacitError, match="cannot be read"):
        Sketch.read(Sketch.of(keys, 400, 0), 1)


def test_keys_may_lie_in_memory_as_they_like():
    keys = random_keys(30, 3)
    expected = Sketch.of(keys, 400, 0)
    assert (Sketch.of(np.asfortranarray(keys), 400, 0) == expected).all()
    assert (Sketch.of(np.repeat(keys, 2, axis=1)[:, ::2], 400, 0) == expected).all()


def test_reading_leaves_the_sum_as_it_is():
    total = Sketch.of(random_keys(30, 3), 400, 0)
    before = total.copy()
    Sketch.read(total, 0)
    assert (total == before).all()


@pytest.mark.parametrize(
    ("keys", "cells", "salt"),
    [
        (random_keys(3, 1)[[0, 1, 2, 1]], 40, 0),
        (random_keys(3, 1)[:, :15], 40, 0),
        (random_keys(3, 1)[0], 40, 0),
        (random_keys(3, 1).astype(np.int64), 40, 0),
        (random_keys(3, 1), 42, 0),
        (random_keys(3, 1), 0, 0),
        (random_keys(3, 1), -4, 0),
        (random_keys(3, 1), 40, -1),
        (random_keys(3, 1), 40, 2**63),
    ],
    ids=["twice", "short", "one", "wide", "42", "none", "negative", "salt -1", "salt 2**63"],
)
def test_what_makes_no_sketch_is_refused(keys, cells, salt):
    with pytest.raises(BadValue):
        Sketch.of(keys, cells, salt)


@pytest.mark.parametrize("shape", [(40,), (40, 10), (4, 11, 1), (42, 11), (0, 11)])
def test_what_is_no_sketch_is_refused(shape):
    with pytest.raises(BadValue):
        Sketch.read(np.zeros(shape, np.uint32), 0)


def test_a_bound_is_not_negative():
    with pytest.raises(BadValue):
        Sketch.cells(-1)


# -- intersection ------------------------------------------------------------------------------------------------------


def intersection(names, others, bound, others_bound):
    """What both sides learn, as the names themselves."""
    one, other = Intersection(names, bound, others_bound, b"x"), Intersection(others, others_bound, bound, b"x")
    own, theirs = other.passed(one.blinded()), one.passed(other.blinded())
    assert (len(own), len(theirs)) == (POINT * bound, POINT * others_bound)
    found, others_found = one.finished(own, theirs), other.finished(theirs, own)
    assert (found.shape, found.dtype) == ((len(names),), bool)
    return (
        [name for name, shared in zip(names, found, strict=True) if shared],
        [name for name, shared in zip(others, others_found, strict=True) if shared],
    )


@given(st.lists(any_name, unique=True), st.lists(any_name, unique=True), st.integers(0, 4), st.integers(0, 4))
def test_the_intersection_is_that_of_plain_sets(names, others, room, others_room):
    found, others_found = intersection(names, others, len(names) + room, len(others) + others_room)
    assert found == [name for name in names if name in others]
    assert others_found == [name for name in others if name in names]


@pytest.mark.parametrize(
    ("names", "others"), [([], []), (MANY, []), ([], MANY), (MANY, MANY), (MANY, MANY[::-1]), (MANY[:6], MANY[6:])]
)
@pytest.mark.parametrize("room", [0, 3])
def test_intersections_at_the_edges(names, others, room):
    found, others_found = intersection(names, others, len(names) + room, len(others) + room)
    assert found == [name for name in names if name in others]
    assert others_found == [name for name in others if name in names]


def test_wrong_lists_do_not_get_into_an_intersection():
    one, other = Intersection(MANY[:3], 5, 4, b""), Intersection(MANY[:2], 4, 5, b"")
    for points, reason in wrong_lists(other.blinded()):
        with pytest.raises(Refused, match=reason):
            one.passed(points)
    own, theirs = other.passed(one.blinded()), one.passed(other.blinded())
    assert one.finished(own, theirs).tolist() == [True, True, False]
    for wrong in ((own[:-POINT], theirs), (own, theirs[:-POINT]), (own + own, theirs), (theirs, own)):
        with pytest.raises(Refused, match="bytes"):
            one.finished(*wrong)


def test_other_domains_have_no_intersection():
    one, other = Intersection(MANY, 12, 12, b"x"), Intersection(MANY, 12, 12, b"y")
    assert not one.finished(other.passed(one.blinded()), one.passed(other.blinded())).any()


@pytest.mark.slow
def test_nothing_is_left_in_the_temporary_folder(tmp_path):
    where = os.environ | {"TMPDIR": str(tmp_path)}
    program = "import tacit.federation.sets as s; print(len(s.random_points(2)))"
    done = subprocess.run([sys.executable, "-c", program], env=where, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["64"]
    assert not list(tmp_path.rglob("*.so"))
