"""Checks and means against liars: each as its slow definition says, and what each of them withstands."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tacit.attacks.poisoning import ADVERSARIES, colluders, random_weights, scaled, sign_flip, sybil_copies
from tacit.draws import Purpose, Stream
from tacit.errors import BadValue
from tacit.federation import robust

NUMBER = st.floats(-8, 8, width=32)


@st.composite
def stacks(draw, least=1, most=7, masked=None):
    """Rows of several providers, one's own, and who has which row, or None."""
    count, rows, width = draw(st.integers(least, most)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    numbers = draw(st.lists(NUMBER, min_size=(count + 1) * rows * width, max_size=(count + 1) * rows * width))
    whole = torch.tensor(numbers, dtype=torch.float32).reshape(count + 1, rows, width)
    present = None
    if draw(st.booleans()) if masked is None else masked:
        flags = draw(st.lists(st.booleans(), min_size=count * rows, max_size=count * rows))
        present = torch.tensor(flags).reshape(count, rows)
    return whole[1:], whole[0], present


def has(present, i, r):
    return present is None or bool(present[i, r])


def common(stack, present, *who):
    """The rows that all of some have."""
    return [r for r in range(stack.shape[1]) if all(has(present, i, r) for i in who)]


def numbers(rows, which):
    return [float(x) for r in which for x in rows[r]]


def slow_distance(a, b):
    return math.sqrt(sum((x - y) ** 2 for x, y in zip(a, b, strict=True)) / len(a)) if a else math.inf


def slow_cosine(a, b):
    la, lb = math.sqrt(sum(x * x for x in a)), math.sqrt(sum(x * x for x in b))
    return sum(x * y for x, y in zip(a, b, strict=True)) / (la * lb) if la > 0 and lb > 0 else 0.0


@pytest.fixture(params=[1, 1 << 22], ids=["row by row", "at once"], autouse=True)
def _chunks(request, monkeypatch):
    monkeypatch.setattr(robust, "CHUNK", request.param)


# -- the definitions ---------------------------------------------------------------------------------------------------


@given(stacks())
def test_norms_distances_and_cosines_to_ones_own(case):
    stack, own, present = case
    for i in range(len(stack)):
        rows = common(stack, present, i)
        mine, theirs = numbers(own, rows), numbers(stack[i], rows)
        zero = [0.0] * len(theirs)
        assert robust.norms(stack, present)[i] == pytest.approx(slow_distance(theirs, zero) if theirs else 0, abs=1e-9)
        assert robust.distances_to(own, stack, present)[i] == pytest.approx(slow_distance(mine, theirs), abs=1e-9)
        assert robust.cosines_to(own, stack, present)[i] == pytest.approx(slow_cosine(mine, theirs), abs=1e-6)


@given(stacks())
def test_distances_and_similarities_between_all(case):
    stack, own, present = case
    apart, alike = robust.distances(stack, present), robust.similarities(own, stack, present)
    for i in range(len(stack)):
        for j in range(len(stack)):
            rows = common(stack, present, i, j)
            a, b, mine = (numbers(each, rows) for each in (stack[i], stack[j], own))
            expected = slow_distance(a, b) if i != j else 0.0
            assert apart[i, j] == pytest.approx(expected, abs=1e-6)
            moved = [[x - y for x, y in zip(each, mine, strict=True)] for each in (a, b)]
            assert alike[i, j] == pytest.approx(slow_cosine(*moved), abs=1e-6)
    assert torch.equal(apart, apart.T)


def test_distances_of_near_copies_keep_their_digits():
    """The difference of large squares would have none left."""
    base = 1e4 + torch.arange(12, dtype=torch.float64).reshape(4, 3)
    stack = torch.stack([base, base + 1e-6])
    assert robust.distances(stack)[0, 1] == pytest.approx(1e-6, rel=1e-3)


def slow_krum(stack, liars, present):
    scores = []
    for i in range(len(stack)):
        near = sorted(
            slow_distance(*(numbers(stack[each], common(stack, present, i, j)) for each in (i, j))) ** 2
            for j in range(len(stack)) if j != i
        )  # fmt: skip
        scores.append(sum(near[: len(stack) - liars - 2]))
    return scores


@given(stacks(least=5, most=8), st.integers(0, 2))
def test_krum_as_defined(case, liars):
    stack, _, present = case
    if len(stack) <= 2 * liars + 2:
        with pytest.raises(BadValue, match="too few"):
            robust.krum(stack, liars, present)
        return
    expected = slow_krum(stack, liars, present)
    scores = robust.krum_scores(robust.distances(stack, present), liars)
    assert scores.tolist() == pytest.approx(expected, abs=1e-5)
    chosen = robust.multi_krum(stack, liars, len(stack) - liars, present)
    assert len(set(chosen)) == len(chosen) == len(stack) - liars
    assert [expected[i] for i in chosen] == pytest.approx(sorted(expected)[: len(chosen)], abs=1e-5)
    assert chosen[0] == robust.krum(stack, liars, present)


@given(stacks(), st.sampled_from([0.0, 0.1, 0.2, 0.25, 1 / 3, 0.49]))
def test_means_as_defined(case, share):
    stack, before, present = case
    mean, trimmed = robust.mean(stack, present, before), robust.trimmed_mean(stack, share, present, before)
    middle = robust.median(stack, present, before)
    assert trimmed.dtype == stack.dtype
    for r in range(stack.shape[1]):
        who = [i for i in range(len(stack)) if has(present, i, r)]
        for d in range(stack.shape[2]):
            values = sorted(float(stack[i, r, d]) for i in who)
            cut = math.floor(share * len(values) + 1e-9)
            kept = values[cut : len(values) - cut]
            was = float(before[r, d])
            assert mean[r, d] == pytest.approx(statistics.mean(values) if values else was, abs=1e-5)
            assert trimmed[r, d] == pytest.approx(statistics.mean(kept) if kept else was, abs=1e-5)
            assert middle[r, d] == pytest.approx(statistics.median(values) if values else was, abs=1e-5)


@given(stacks())
def test_means_around_the_median_as_defined(case):
    stack, before, present = case
    centre = robust.median(stack, present, before)
    clipped, screened = robust.clipped_mean(stack, present, before), robust.screened_mean(stack, 1.5, present, before)
    for r in range(stack.shape[1]):
        who = [i for i in range(len(stack)) if has(present, i, r)]
        if not who:
            assert torch.equal(clipped[r], before[r])
            assert torch.equal(screened[r], before[r])
            continue
        steps = [stack[i, r].double() - centre[r].double() for i in who]
        lengths = [float(step.norm()) for step in steps]
        usual = sorted(lengths)[(len(who) - 1) // 2]
        shares = [min(1.0, usual / length) if length else 1.0 for length in lengths]
        wanted = centre[r].double() + sum(step * share for step, share in zip(steps, shares, strict=True)) / len(who)
        assert torch.allclose(clipped[r].double(), wanted, atol=1e-4)
        if any(abs(length - 1.5 * usual) < 1e-6 * (1 + usual) for length in lengths):
            continue  # on the edge rounding decides
        near = [step for step, length in zip(steps, lengths, strict=True) if length <= 1.5 * usual]
        assert torch.allclose(screened[r].double(), centre[r].double() + sum(near) / len(near), atol=1e-4)
    with pytest.raises(BadValue):
        robust.screened_mean(stack, 0.5)


def slow_trust(alike):
    """FoolsGold, provider by provider."""
    n = len(alike)
    cs = [[min(1.0, max(0.0, alike[i][j])) if i != j else 0.0 for j in range(n)] for i in range(n)]
    most = [max(row) for row in cs]
    pardoned = [[cs[i][j] * (most[i] / most[j] if most[i] < most[j] else 1.0) for j in range(n)] for i in range(n)]
    weight = [1 - max(row) for row in pardoned]
    top = max(weight)
    found = []
    for each in weight:
        each = each / top if top > 0 else 0.0
        logit = math.inf if each >= 1 else -math.inf if each <= 0 else math.log(each / (1 - each))
        found.append(min(1.0, max(0.0, logit + 0.5)))
    return found


@given(stacks(masked=False))
def test_trust_as_defined(case):
    stack, own, _ = case
    alike = robust.similarities(own, stack)
    assert robust.trust(alike).tolist() == pytest.approx(slow_trust(alike.tolist()), abs=1e-6)


@given(stacks(least=3), st.randoms(use_true_random=False))
def test_the_order_of_providers_does_not_matter(case, random):
    stack, before, present = case
    order = list(range(len(stack)))
    random.shuffle(order)
    turned = None if present is None else present[order]
    assert torch.equal(robust.median(stack, present, before), robust.median(stack[order], turned, before))
    torch.testing.assert_close(
        robust.distances(stack, present)[order][:, order], robust.distances(stack[order], turned)
    )


# -- wrong input -------------------------------------------------------------------------------------------------------


def test_what_makes_no_sense_is_refused():
    stack = torch.ones(3, 2, 2)
    with pytest.raises(BadValue, match="not finite"):
        robust.mean(torch.full((3, 2, 2), float("nan")))
    with pytest.raises(BadValue, match="below a half"):
        robust.trimmed_mean(stack, 0.5)
    with pytest.raises(BadValue, match="present is"):
        robust.mean(stack, torch.ones(3, 3, dtype=torch.bool))
    with pytest.raises(BadValue, match="nobody has"):
        robust.mean(stack, torch.zeros(3, 2, dtype=torch.bool))
    with pytest.raises(BadValue, match="beside a stack"):
        robust.distances_to(torch.ones(2, 3), stack)
    with pytest.raises(BadValue, match="providers, rows, width"):
        robust.median(torch.ones(2, 2))
    with pytest.raises(BadValue, match="chosen is from 1"):
        robust.multi_krum(torch.ones(5, 2, 2), 1, 5)


def test_what_is_absent_may_hold_anything():
    stack = torch.ones(3, 2, 2)
    stack[1, 0] = float("nan")
    present = torch.tensor([[True, True], [False, True], [True, True]])
    assert torch.equal(robust.mean(stack, present), torch.ones(2, 2))
    assert robust.distances(stack, present).max() == 0


# -- liars -------------------------------------------------------------------------------------------------------------


def honest(count=9, rows=40, width=8, spread=0.3):
    """Rows before, and what honest providers made of them: one direction in common, and something of their own."""
    before = torch.from_numpy(Stream(1, Purpose.TEST).normal(rows * width)).reshape(rows, width)
    way = torch.from_numpy(Stream(2, Purpose.TEST).normal(rows * width)).reshape(rows, width)
    own = torch.from_numpy(Stream(3, Purpose.TEST).normal(count * rows * width)).reshape(count, rows, width)
    return before, before + 0.2 * way, before + 0.2 * way + 0.2 * spread * own


@pytest.mark.parametrize("name", ADVERSARIES)
def test_liars_by_name(name):
    before, now, _ = honest()
    lies = ADVERSARIES[name](before.float(), now.float(), 3, seed=5)
    assert lies.shape == (3, *before.shape)
    assert lies.dtype == torch.float32
    assert bool(lies.isfinite().all())
    assert torch.equal(lies, ADVERSARIES[name](before.float(), now.float(), 3, seed=5))
    with pytest.raises(BadValue):
        ADVERSARIES[name](before, now, 0)
    assert ADVERSARIES[name].__doc__


def test_liars_do_what_they_say():
    before, now, _ = honest()
    moved = now - before
    torch.testing.assert_close(sign_flip(before, now, 2, strength=2.0)[1] - before, -2 * moved)
    torch.testing.assert_close(scaled(before, now, 1, strength=7.0)[0] - before, 7 * moved)
    assert torch.equal(sybil_copies(before, now, 2), torch.stack([now, now]))
    noise = random_weights(before, now, 50)
    assert robust.norms(noise).mean() == pytest.approx(robust.norms(now[None]).item(), rel=0.02)
    assert robust.similarities(before * 0, noise).fill_diagonal_(0).abs().max() < 0.3
    several = colluders(before, now, 6)
    torch.testing.assert_close(several.mean(0), now)
    alike = robust.similarities(before, several)
    assert 0.2 < alike.fill_diagonal_(0.4).min() <= alike.max() < 0.6
    assert robust.similarities(before, colluders(before, now, 6, strength=4.0)).fill_diagonal_(0).max() < 0.2
    with pytest.raises(BadValue, match="takes two"):
        colluders(before, now, 1)


@pytest.mark.parametrize("name", ["random", "flip", "scaled"])
def test_robust_means_stay_where_a_plain_one_does_not(name):
    before, truth, good = honest()
    lies = ADVERSARIES[name](before, truth, 3, seed=3, strength=20.0)
    stack = torch.cat([good, lies])

    def off(rows):
        return robust.distances_to(truth, rows[None]).item()

    limit = 3 * off(good.mean(0))
    assert off(robust.mean(stack)) > 5 * limit
    assert off(robust.median(stack)) < limit
    assert off(robust.trimmed_mean(stack, 0.25)) < limit
    chosen = robust.multi_krum(stack, 3, 5)
    assert max(chosen) < len(good)
    assert off(stack[chosen].mean(0)) < limit


def test_krum_alone_falls_for_copies_and_trust_does_not():
    """Copies are each other's nearest neighbours: that is why likeness is looked at as well."""
    before, truth, good = honest(spread=3.0)
    lies = sybil_copies(before, before - 2 * (truth - before), 3)
    stack = torch.cat([good, lies])
    weights = robust.trust(robust.similarities(before, stack))
    assert weights[-3:].max() == 0
    assert weights[:-3].min() > 0.5
    assert robust.krum(torch.cat([good, lies[:1].repeat(5, 1, 1)]), 5) >= len(good)


def test_trust_does_not_see_random_weights_but_krum_does():
    before, truth, good = honest()
    stack = torch.cat([good, random_weights(before, truth, 3)])
    weights = robust.trust(robust.similarities(before, stack))
    assert weights[-3:].min() > 0.5
    assert set(robust.multi_krum(stack, 3, 9)) == set(range(9))
