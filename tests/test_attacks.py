"""Membership attacks: each piece against a slow obvious version; what adversaries may look at, and what they find."""

from __future__ import annotations

import json
import math
import stat
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.stats import norm
from typer.testing import CliRunner

from strategies import graphs, plain_triples
from tacit.attacks import seen, shadows
from tacit.attacks.attack import attack_federation, curves, from_transcript
from tacit.attacks.measures import Interval, Measured, auc, best_f1, measure, roc, verdict
from tacit.attacks.membership import CIA, CIP, FEW, REST, SI, Concentrations, Counts, ratio, relation_vectors
from tacit.attacks.seen import Nothing
from tacit.attacks.shadows import likelihood_ratio, shadow_attacks, taught_scores
from tacit.attacks.targets import (
    READINGS,
    draw_targets,
    named_targets,
    others_add,
    targets_of,
    with_triples,
    without,
)
from tacit.attacks.trial import Outcome, Plot, Trial, Views, attacked, prepared
from tacit.cli import app
from tacit.clinic import clinic
from tacit.draws import Secret
from tacit.errors import BadValue, TacitError
from tacit.federated import FederatedRun, federate, split_settings, with_noise
from tacit.federation.messages import SERVER, Message
from tacit.federation.transcript import GIVE, Adversary, Known, Transcript
from tacit.federation.transport import InProcess
from tacit.folders import PRIVATE
from tacit.graph import NO_GROUP, Graph, Split, Vocab
from tacit.models import SCORERS
from tacit.parties import Parties
from tacit.parties import given as given_parties
from tacit.privacy.shared import shared_counts
from tacit.recipes import RECIPES, Setup
from tacit.run import train
from tacit.settings import combine

SMALL = clinic("small")
VICTIM, ADVERSARY, THIRD = 0, 1, 2
QUICK = {"scorer": {"name": "transe", "dim": 8}, "negatives": {"count": 4}, "evaluation": {"every": 100},
         "training": {"batch": 64, "device": "cpu"}, "optimizer": {"learning_rate": 0.02},
         "federation": {"rounds": 4, "local_epochs": 1}}  # fmt: skip
seeds = st.integers(0, 2**32)


# -- how well an attack does -------------------------------------------------------------------------------------------

scored = st.lists(
    st.tuples(st.integers(-3, 3) | st.floats(-1e6, 1e6), st.booleans()), min_size=2, max_size=40
).filter(lambda pairs: len({member for _, member in pairs}) == 2)  # fmt: skip


def columns(pairs):
    scores, member = zip(*pairs, strict=True)
    return np.array(scores, float), np.array(member)


@given(scored)
def test_an_auc_counts_pairs_and_a_tie_is_half_of_one(pairs):
    scores, member = columns(pairs)
    won = [(a > b) + (a == b) / 2 for a in scores[member] for b in scores[~member]]
    found = measure(scores, member)
    assert found.auc.value == pytest.approx(sum(won) / len(won))
    assert 0 <= found.auc.low <= found.auc.value <= found.auc.high <= 1
    assert (found.members, found.others, found.beyond) == (member.sum(), (~member).sum(), 0)
    turned = measure(-scores, member).auc
    assert turned.value == pytest.approx(1 - found.auc.value)
    assert (turned.low, turned.high) == pytest.approx((1 - found.auc.high, 1 - found.auc.low), abs=1e-9)


def test_limits_cover_the_true_auc_as_often_as_they_say():
    rng, apart = np.random.default_rng(), 1.0
    truth = norm.cdf(apart / math.sqrt(2))
    for members, others in ((40, 40), (15, 80)):
        found = [auc(rng.normal(apart, 1, members), rng.normal(0, 1, others)) for _ in range(400)]
        covered = np.mean([each.low <= truth <= each.high for each in found])
        assert covered >= 0.90
        spread = np.std([each.value for each in found])
        assert np.mean([each.high - each.low for each in found]) == pytest.approx(2 * 1.96 * spread, rel=0.25)


def test_limits_are_those_of_a_bootstrap():
    rng = np.random.default_rng()
    inside, outside = rng.normal(0.8, 1, 150), rng.normal(0, 1.5, 150)
    found = auc(inside, outside)
    again = [auc(rng.choice(inside, 150), rng.choice(outside, 150)).value for _ in range(1500)]
    assert (found.low, found.high) == pytest.approx(tuple(np.quantile(again, (0.025, 0.975))), abs=0.02)
    wider = auc(inside, outside, confidence=0.999)
    assert wider.low < found.low < found.value < found.high < wider.high


@pytest.mark.parametrize(("members", "others"), [(1, 1), (3, 5), (40, 7)])
def test_scores_wholly_apart_leave_as_much_doubt_as_there_are_few_of_them(members, others):
    high, low = np.arange(members) + 10.0, np.arange(others) * 1.0
    few = min(members, others)
    perfect, inverse = auc(high, low), auc(low, high)
    assert (perfect.value, perfect.high) == (1.0, 1.0)
    assert perfect.low**few == pytest.approx(0.025)
    assert (inverse.value, inverse.low) == (0.0, 0.0)
    assert inverse.high == pytest.approx(1 - perfect.low)


@given(st.integers(1, 9), st.integers(1, 9), st.floats(allow_nan=False))
def test_equal_scores_are_a_coin(members, others, value):
    found = measure([value] * (members + others), [True] * members + [False] * others)
    assert found.auc == Interval(0.5, 0.5, 0.5)
    assert found.f1 == pytest.approx(found.always)
    assert all(rate.value == 0 for rate in found.tpr.values())


def test_one_member_alone_says_nothing_of_members():
    many = np.arange(100.0)
    assert auc(np.array([98.5]), many) == Interval(0.99, 0.0, 1.0)
    assert auc(many, np.array([98.5])) == Interval(pytest.approx(0.01), 0.0, 1.0)


@given(scored)
def test_the_best_f1_is_the_best_of_all_thresholds(pairs):
    scores, member = columns(pairs)
    tried = {}
    for threshold in scores:
        right = sum(a >= threshold and b for a, b in zip(scores, member, strict=True))
        called = sum(a >= threshold for a in scores)
        tried[threshold] = 2 * right / (called + member.sum())
    value, threshold = best_f1(scores, member)
    assert value == pytest.approx(max(tried.values()))
    assert tried[threshold] == pytest.approx(value)
    found = measure(scores, member)
    assert found.f1 == value >= found.always - 1e-12 > 0
    assert found.always == pytest.approx(2 * member.sum() / (len(member) + member.sum()))


@given(scored, st.integers(100, 300), seeds)
def test_true_positives_are_counted_where_few_others_are_accused(pairs, many, seed):
    rng = np.random.default_rng(seed)
    scores, member = columns(pairs)
    scores, member = np.r_[scores, rng.normal(size=many).round(1)], np.r_[member, rng.random(many) < 0.4]
    found = measure(scores, member)
    for rate, counted in found.tpr.items():
        allowed = [
            (scores[member] > t).mean()
            for t in [-np.inf, *scores]
            if (scores[~member] > t).sum() <= rate * (~member).sum()
        ]
        assert counted.value == pytest.approx(max(allowed))
        assert counted.low <= counted.value <= counted.high
    assert found.resolution == 1 / (~member).sum()


@given(scored)
def test_a_roc_climbs_from_nothing_to_everything(pairs):
    scores, member = columns(pairs)
    false, true = roc(scores, member)
    assert (false[0], true[0], false[-1], true[-1]) == (0, 0, 1, 1)
    assert all((np.diff(side) >= 0).all() for side in (false, true))
    assert np.trapezoid(true, false) == pytest.approx(measure(scores, member).auc.value)
    for threshold, x, y in zip(sorted(set(scores), reverse=True), false[1:], true[1:], strict=True):
        assert (x, y) == ((scores[~member] >= threshold).mean(), (scores[member] >= threshold).mean())


@given(scored, st.lists(st.booleans(), max_size=5), seeds)
def test_targets_beyond_reach_are_left_out_and_counted(pairs, beyond, seed):
    scores, member = columns(pairs)
    where = np.random.default_rng(seed).integers(0, len(scores) + 1, len(beyond))
    more, truth = np.insert(scores, where, np.nan), np.insert(member, where, beyond)
    with_them, plain = measure(more, truth), measure(scores, member)
    assert with_them.beyond == len(beyond)
    assert 0 <= plain.f1_held_out <= 1
    assert replace(with_them, beyond=0) == plain
    assert all(map(np.array_equal, roc(more, truth), roc(scores, member)))


def test_always_yes_has_two_thirds_and_noise_is_not_better_than_that_on_what_did_not_choose():
    rng, member = np.random.default_rng(), np.arange(400) < 200
    found = [measure(rng.normal(size=400), member) for _ in range(60)]
    assert {each.always for each in found} == {2 / 3}
    assert np.mean([each.f1 for each in found]) > 0.667  # it chose its threshold
    assert np.mean([each.f1_held_out for each in found]) < 2 / 3 + 0.002
    assert measure(member + 0.1 * rng.normal(size=400), member).f1_held_out > 0.95


def test_what_was_measured_is_json_whatever_the_scores():
    member = np.arange(8) < 4
    scores = np.array([-np.inf, -np.inf, 2, 3, -np.inf, 0, 1, np.nan])
    found = measure(scores, member)
    text = json.loads(json.dumps(found.json(), allow_nan=False))
    assert text["beyond_reach"] == 1
    assert text["members"] == 4
    assert set(text["tpr"]) == {"0.01", "0.001"}
    assert text["threshold"] is None  # all are called
    assert json.loads(json.dumps(measure(np.arange(8.0), member[::-1]).json()))["threshold"] == 4.0


def test_scores_that_cannot_be_measured():
    for scores, member in (([1.0], [True]), ([1.0, 2.0], [False, False]), ([np.nan, 1.0], [True, False])):
        with pytest.raises(BadValue, match="no members, or no others"):
            measure(scores, member)
    with pytest.raises(BadValue, match="a score for each"):
        measure([1.0, 2.0], [True])
    with pytest.raises(BadValue, match="a score for each"):
        measure([[1.0, 2.0]], [[True, False]])
    for confidence in (0.0, 1.0, math.nan):
        with pytest.raises(BadValue, match="confidence"):
            measure([1.0, 2.0], [True, False], confidence=confidence)


def test_a_defence_is_judged_by_an_attack_that_works_without_it():
    strong, weak = Interval(0.9, 0.8, 0.95), Interval(0.69, 0.6, 0.8)
    safe, wide = Interval(0.5, 0.45, 0.55), Interval(0.5, 0.44, 0.56)
    assert verdict(strong, safe) == "defended"
    assert verdict(strong, wide) == "not shown to be defended"
    assert verdict(strong, Interval(0.2, 0.1, 0.3)) == "defended"
    assert verdict(weak, safe) == "cannot tell: the attack is weak without the defence"
    assert verdict(None, safe) == "cannot tell: the attack was not tried without the defence"
    assert verdict(strong, Interval(0.5, 0.5, 0.5)) == "cannot tell: the attack has the same score for everything"
    for plain in (strong, weak, None):  # whatever it was: it works under the defence
        assert verdict(plain, Interval(0.6, 0.56, 0.64)) == "not defended"
    assert verdict(strong, Interval(0.6, 0.55, 0.65)) == "not shown to be defended"


# -- whom an attack is tried on ----------------------------------------------------------------------------------------

three_parties = st.lists(graphs(plain_triples), min_size=3, max_size=3).map(
    lambda some: given_parties(dict(zip("abc", some, strict=True)))
)


def drawn(parties, reading, **options):
    """Targets, or nothing where there are none."""
    try:
        return draw_targets(parties, reading, **options)
    except TacitError:
        return None


def holders(parties, triple, split="train"):
    return {i for i, graph in enumerate(parties) if triple in set(graph.named(split))}


@pytest.mark.parametrize("reading", READINGS)
@given(three_parties, st.integers(2, 12), st.integers(0, 2**32 - 1), st.booleans())
def test_targets_are_what_their_kind_says(reading, parties, count, seed, apart):
    if (made := drawn(parties, reading, count=count, seed=seed, apart=apart)) is None:
        return
    changed, targets = made
    names = named_targets(targets.candidates)
    assert len(set(names)) == len(names) == len(targets) == len(targets.candidates) <= count
    assert 2 * targets.member.sum() == len(targets) > 0
    assert (targets.reading, targets.candidates.victim) == (reading, VICTIM)
    shared = [set(getattr(parties[VICTIM], part)) & set(getattr(parties[ADVERSARY], part))
              for part in ("entities", "relations")]  # fmt: skip
    for (h, r, t), member in zip(names, targets.member, strict=True):
        assert {h, t} <= shared[0]
        assert r in shared[1]
        assert h != t
        who = holders(parties, (h, r, t))
        anywhere = who | holders(parties, (h, r, t), "valid") | holders(parties, (h, r, t), "test")
        if reading == "canaries":
            assert anywhere == set()
            assert holders(changed, (h, r, t)) == ({VICTIM} if member else set())
        elif member:
            assert who == {VICTIM}
        elif reading == "held":
            assert who == {THIRD}
        else:
            assert anywhere == set()
    if reading == "canaries":
        put = [name for name, member in zip(names, targets.member, strict=True) if member]
        assert sorted(changed[VICTIM].named("train")) == sorted([*parties[VICTIM].named("train"), *put])
        assert replace(changed[VICTIM], train=parties[VICTIM].train) == parties[VICTIM]
        assert changed.graphs[1:] == parties.graphs[1:]
    else:
        assert changed is parties
    if apart:
        for i, (_, _, t) in enumerate(names):
            assert all(t not in (h, other) for j, (h, _, other) in enumerate(names) if j != i)
    again = draw_targets(parties, reading, count=count, seed=seed, apart=apart)
    assert again[0] == changed
    assert named_targets(again[1].candidates) == names
    assert np.array_equal(again[1].member, targets.member)


@pytest.mark.parametrize("reading", READINGS)
def test_as_many_targets_as_are_asked_for_if_there_are_so_many(reading):
    assert len(draw_targets(SMALL, reading, count=101)[1]) == 100
    assert len(draw_targets(SMALL, reading, count=2)[1]) == 2
    whole = draw_targets(SMALL, reading, count=2000)[1]
    if reading == "existing":
        own, common = SMALL[VICTIM], set(SMALL[ADVERSARY].entities)
        elsewhere = {triple for graph in SMALL.graphs[1:] for triple in graph.named("train")}
        wanted = {x for x in own.named("train") if {x[0], x[2]} <= common and x[0] != x[2]} - elsewhere
        inside = {x for x, m in zip(named_targets(whole.candidates), whole.member, strict=True) if m}
        assert inside == wanted
    one, two = (draw_targets(SMALL, reading, seed=seed)[1] for seed in (0, 1))
    assert named_targets(one.candidates) != named_targets(two.candidates)


def test_there_may_be_an_odd_number_of_canaries_left_or_none():
    names = [("a", "r", "b"), ("b", "r", "c"), ("c", "r", "a"), ("a", "r", "c"), ("c", "r", "b"), ("b", "r", "a")]
    for held in range(3, 7):
        graph = Graph.from_triples(names[:held])
        parties = given_parties({"one": graph, "two": graph})
        if left := (6 - held) // 2 * 2:
            changed, targets = draw_targets(parties, "canaries", count=10)
            assert (len(targets), targets.member.sum()) == (left, left // 2)
            assert len(changed[0].train) == held + left // 2
        else:
            with pytest.raises(TacitError, match="does not hold"):
                draw_targets(parties, "canaries", count=10)


def test_targets_that_cannot_be():
    with pytest.raises(BadValue, match="targets are existing, canaries, held"):
        draw_targets(SMALL, "some")
    with pytest.raises(BadValue, match="at least 2"):
        draw_targets(SMALL, "existing", count=1)
    with pytest.raises(TacitError, match="no party 3 to be the victim"):
        draw_targets(SMALL, "existing", victim=3)
    with pytest.raises(TacitError, match="no party -1 to be the adversary"):
        draw_targets(SMALL, "existing", adversary=-1)
    with pytest.raises(TacitError, match="another than the victim"):
        draw_targets(SMALL, "existing", victim=1, adversary=1)
    two = Parties(SMALL.names[:2], SMALL.graphs[:2])
    with pytest.raises(TacitError, match="is no third party"):
        draw_targets(two, "held")
    strangers = given_parties({"a": Graph.from_triples([("x", "r", "y")]), "b": Graph.from_triples([("u", "r", "v")])})
    with pytest.raises(TacitError, match="no names in common"):
        draw_targets(strangers, "existing")
    same = given_parties({"a": SMALL[0], "b": SMALL[0]})
    with pytest.raises(TacitError, match="no training triples of its own"):
        draw_targets(same, "existing")
    every = [(h, "r", t) for h in "ab" for t in "ab" if h != t]
    full = given_parties({"a": Graph.from_triples(every[:1]), "b": Graph.from_triples(every[1:])})
    with pytest.raises(TacitError, match="to tell its own from"):
        draw_targets(full, "existing")


@given(graphs(plain_triples), st.lists(plain_triples, max_size=8), seeds)
def test_triples_that_are_put_in_can_be_taken_out_again(graph, more, seed):
    rng, known = np.random.default_rng(seed), set(graph.named("train"))
    more = [(h, r, t) for h, r, t in dict.fromkeys(more) if {h, t} <= set(graph.entities) and r in graph.relations]
    more = [triple for triple in more if triple not in known]
    old = graph.train
    groups = Vocab(["one", "two"])
    marked = Split(old.triples, rng.random(len(old)) < 0.5, rng.choice([NO_GROUP, 0, 1], len(old)).astype(np.int32))
    for before in (graph, replace(graph, train=marked, groups=groups)):
        after = with_triples(before, more)
        assert sorted(after.named("train")) == sorted([*before.named("train"), *more])
        assert (np.diff(after.keys(after.train.triples)) > 0).all()
        assert (after.valid, after.test, after.entities, after.relations) == (
            before.valid, before.test, before.entities, before.relations)  # fmt: skip
        for i, triple in enumerate(after.named("train")):
            if triple in more and before.train.group is not None:
                assert (after.train.confidential[i], after.train.group[i]) == (True, NO_GROUP)
        if more:
            assert without(after, targets_of(more, np.ones(len(more), bool), "canaries", 0)) == before


@given(graphs(plain_triples), graphs(plain_triples))
def test_candidates_are_found_by_name(one, two):
    candidates = seen.Candidates(VICTIM, one.entities, one.relations, one.train.triples.astype(np.int64))
    assert len(candidates) == len(one.train)
    for names, ids in zip(one.named("train"), candidates.at(two.entities, two.relations), strict=True):
        vocabs = (two.entities, two.relations, two.entities)
        assert [v.id(n) if n in v else -1 for v, n in zip(vocabs, names, strict=True)] == ids.tolist()
    assert (candidates.at(two.entities, None)[:, 1] == -1).all()


@pytest.mark.slow
def test_canaries_differ_in_nothing_but_membership():
    """Relation, and how often head and tail occur, tell members of no canaries from others; of `existing` they do."""
    own = SMALL[ADVERSARY]
    cells = np.zeros((2, len(own.relations), len(own.entities)))
    for side, column in enumerate((0, 2)):
        np.add.at(cells[side], (own.train.triples[:, 1], own.train.triples[:, column]), 1.0)
    blind = {}
    for reading in ("existing", "canaries"):
        found = []
        for seed in range(5):
            targets = draw_targets(SMALL, reading, count=600, seed=seed)[1]
            h, r, t = targets.candidates.at(own.entities, own.relations).T
            found.append(measure(np.log1p(cells[0][r, h]) + np.log1p(cells[1][r, t]), targets.member).auc.value)
        blind[reading] = np.mean(found)
    assert abs(blind["canaries"] - 0.5) < 0.05
    assert blind["existing"] > 0.8  # no federation is needed for that: such an AUC is no leak


# -- what an adversary saw ---------------------------------------------------------------------------------------------


def setting(**sections):
    return split_settings(combine(QUICK, sections))


def watched(recipe="fede", parties=SMALL, rounds=3, **sections):
    """A federation, round by round: what was kept of it, and what the rows really were.

    By round: each party's rows of what is shared after its training, and the server's after the round.
    """
    wanted, chosen = setting(**sections)
    transcript = Transcript(lambda record: True)
    setup = Setup(parties, wanted, chosen, transcript)
    star = RECIPES[recipe](setup).star
    trained, shared = {}, {}
    remember = star._remember

    def noted(number, party):
        trained[number, party] = star.fit.cohort.tables.party(star.fit.layout, party).tensors()
        trained[number, party] = {name: tensor.clone() for name, tensor in trained[number, party].items()}
        remember(number, party)

    star._remember = noted
    for number in range(1, rounds + 1):
        star.round()
        shared[number] = star.table.clone()
    star.give(range(len(parties)))
    return star, transcript, setup, trained, shared


def view_of(transcript, setup, recipe, role, party=None, **leaks):
    adversary = Adversary(role, party)
    return transcript.view(adversary, graphs=setup.parties.graphs, known=setup.known(recipe), leaks=leaks)


@pytest.mark.parametrize("recipe", ["fede", "fedr"])
@pytest.mark.parametrize("secure", [None, "open", "private"])
def test_what_is_read_of_a_round_is_what_happened(recipe, secure):
    part, other = ("entity", "relation") if recipe == "fede" else ("relation", "entity")
    federation = {"secure": True, "vocabulary": secure} if secure else {}
    star, transcript, setup, trained, shared = watched(recipe, federation=federation)
    server, party = (view_of(transcript, setup, recipe, *who) for who in (("server",), ("party", ADVERSARY)))
    assert server.own == {}
    assert server.graph is None
    assert party.graph is SMALL[ADVERSARY]
    assert seen.kept_rounds(server) == seen.kept_rounds(party) == [1, 2, 3]
    assert seen.names(party, ADVERSARY) == getattr(SMALL[ADVERSARY], "entities" if recipe == "fede" else "relations")
    for number in (1, 2, 3):
        mine = seen.own(party, number)
        assert set(mine) == {other, "places"} | ({part} if secure else set())
        for name in set(mine) - {"places"}:
            assert torch.equal(mine[name], trained[number, ADVERSARY][name])
        after = seen.given(party, ADVERSARY, number + 1)
        assert torch.equal(after, shared[number][star.places[ADVERSARY]])
        assert seen.last(party, number + 1) == min(number + 1, 3)
        for victim in range(3):
            if secure:
                with pytest.raises(Nothing, match="masks"):
                    seen.sent(server, victim, number)
            else:
                assert torch.equal(seen.sent(server, victim, number), trained[number, victim][part])
                assert torch.equal(seen.given(server, victim, number + 1), shared[number][star.places[victim]])
            if victim != ADVERSARY:
                with pytest.raises(Nothing, match="sees nothing that party"):
                    seen.sent(party, victim, number)
                with pytest.raises(Nothing, match="was not kept"):
                    seen.given(party, victim, number)
        if not secure:
            assert torch.equal(seen.sent(party, ADVERSARY, number), trained[number, ADVERSARY][part])
    for victim, graph in enumerate(SMALL):
        if secure == "private":
            with pytest.raises(Nothing, match="knows no names"):
                seen.names(server, victim)
        else:
            assert seen.names(server, victim) == (graph.entities if recipe == "fede" else graph.relations)
    together = view_of(transcript, setup, recipe, "server+party", THIRD)
    assert all(
        torch.equal(together.own[3][name], trained[3, THIRD][name]) for name in together.own[3] if name != "places"
    )
    assert {record.number for record in together.records} >= {record.number for record in server.records}


def test_where_there_is_nothing_to_read_it_is_said_why():
    _, transcript, setup, *_ = watched(federation={"changed_only": True})
    server = view_of(transcript, setup, "fede", "server")
    with pytest.raises(Nothing, match="only rows that changed"):
        seen.sent(server, VICTIM, 2)
    for number in (2, 3):
        transcript.payloads = {
            i: message for i, message in transcript.payloads.items() if message.round != number or message.phase == GIVE
        }
    server = view_of(transcript, setup, "fede", "server")
    with pytest.raises(Nothing, match="round 2 was not kept: set federation"):
        seen.sent(server, VICTIM, 2)
    assert seen.kept_rounds(server) == [1]
    with pytest.raises(Nothing, match="no graph of its own"):
        seen.own_graph(server)
    with pytest.raises(Nothing, match="round 9 were not kept"):
        seen.own(server, 9)
    with pytest.raises(Nothing, match="noisy counts alone"):
        seen.own(server, 0)
    with pytest.raises(Nothing, match="never meet"):
        seen.known(replace(server, known=None))


@given(st.sets(st.tuples(st.integers(0, 6), st.integers(1, 5))), st.sets(st.integers(0, 6)), st.integers(0, 8))
def test_what_is_before_a_round_is_let_go_of_and_nothing_else(events, wanted, before):
    transcript = Transcript(lambda record: record.round in wanted)
    for number, rows in sorted(events):
        transcript.record(
            Message("rows", number, GIVE, SERVER, 0, {"part": "entity"}, {"values": torch.zeros(rows, 2)})
        )
        transcript.remember(number, rows, {"relation": torch.zeros(rows, 3)})
    payloads, memories, records = dict(transcript.payloads), dict(transcript.memories), list(transcript.records)
    assert set(memories) == {place for place in events if place[0] in wanted}
    transcript.forget(before)
    assert transcript.records == records
    assert transcript.payloads == {i: m for i, m in payloads.items() if m.round == 0 or m.round >= before}
    assert set(transcript.memories) == {place for place in memories if place[0] >= before}
    sizes = sum(records[i].size for i in transcript.payloads) + sum(12 * rows for _, rows in transcript.memories)
    assert transcript.kept == sizes


# -- by looking at the rows of others ----------------------------------------------------------------------------------


def slow_score(name, scorer, dim, h, r, t):
    if name == "transe":
        size = sum(abs(a + b - c) ** scorer.norm for a, b, c in zip(h, r, t, strict=True)) ** (1 / scorer.norm)
        return scorer.gamma - size
    if name == "distmult":
        return sum(a * b * c for a, b, c in zip(h, r, t, strict=True))
    half = len(h) // 2
    complexes = [complex(h[i], h[half + i]) for i in range(half)], [complex(t[i], t[half + i]) for i in range(half)]
    if name == "complex":
        kinds = [complex(r[i], r[half + i]) for i in range(half)]
        return sum((a * b * c.conjugate()).real for a, b, c in zip(complexes[0], kinds, complexes[1], strict=True))
    spread = scorer.init_scale or scorer.spread(dim)
    turns = [complex(math.cos(x * math.pi / spread), math.sin(x * math.pi / spread)) for x in r]
    return scorer.gamma - sum(abs(a * b - c) for a, b, c in zip(complexes[0], turns, complexes[1], strict=True))


NAMES = ("transe", "distmult", "complex", "rotate")
DIM = 4


def planted(rng, name, part, *, parties=3, unshared=()):
    """A party's view of one round, made by hand: its rows, those of the others, which it does not see, and the mean.

    Rows in `unshared` no one else has.
    """
    scorer, graph = SCORERS[name](), SMALL[ADVERSARY]
    wide, many = scorer.widths(DIM), (len(graph.entities), len(graph.relations))
    tables = [torch.from_numpy(rng.normal(size=size)).float() for size in zip(many, wide, strict=True)]
    own = dict(zip(("entity", "relation"), tables, strict=True))
    shared = own[part]
    others = torch.from_numpy(rng.normal(size=(parties - 1, *shared.shape))).float()
    back = (shared + others.sum(0)) / parties
    back[list(unshared)] = shared[list(unshared)]
    transcript = Transcript(lambda record: True)
    transcript.remember(5, ADVERSARY, {key: rows for key, rows in own.items() if key != part})
    about = {"part": part}
    transcript.record(Message("rows", 5, 1, ADVERSARY, SERVER, about, {"values": shared}))
    transcript.record(Message("rows", 6, GIVE, SERVER, ADVERSARY, about, {"values": back}))
    known = Known(scorer, DIM, part, parties)
    return transcript.view(Adversary("party", ADVERSARY), graphs=SMALL.graphs, known=known), own, others.mean(0)


def some_candidates(rng, many=12):
    names = (SMALL[ADVERSARY].entities, SMALL[ADVERSARY].relations, SMALL[ADVERSARY].entities)
    triples = [tuple(each[rng.integers(len(each))] for each in names) for _ in range(many)]
    triples[0] = ("nobody", *triples[0][1:])
    triples[1] = (triples[1][0], "nothing", triples[1][2])
    return targets_of(triples, np.arange(len(triples)) % 2 == 0, "existing", VICTIM), triples


@pytest.mark.parametrize("part", ["entity", "relation"])
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=10)
@given(seeds)
def test_a_party_takes_its_own_rows_out_and_looks_at_what_is_left(name, part, seed):
    rng = np.random.default_rng(seed)
    graph = SMALL[ADVERSARY]
    targets, triples = some_candidates(rng)
    unshared = {graph.entities.id(triples[2][0]) if part == "entity" else graph.relations.id(triples[2][1])}
    view, own, mean = planted(rng, name, part, unshared=unshared)
    found = CIP().scores(view, targets.candidates, 5)
    theirs = own | {part: mean}
    scorer = SCORERS[name]()
    for i, (h, r, t) in enumerate(triples):
        known = h in graph.entities and r in graph.relations
        ids = (graph.entities.id(h), graph.entities.id(t)) if known else ()
        beyond = not known or unshared & (set(ids) if part == "entity" else {graph.relations.id(r)})
        if beyond:
            assert all(np.isnan(scores[i]) for scores in found.values())
            continue
        places = {"head": ("entity", ids[0]), "kind": ("relation", graph.relations.id(r)), "tail": ("entity", ids[1])}
        better, worse = (
            slow_score(name, scorer, DIM, *(rows[key][place].double().tolist() for key, place in places.values()))
            for rows in (theirs, own)
        )
        assert found["score"][i] == pytest.approx(better, abs=1e-4)
        assert found["difference"][i] == pytest.approx(better - worse, abs=1e-4)
        if name in ("transe", "rotate"):
            assert found["ratio"][i] == pytest.approx((scorer.gamma - worse) / (scorer.gamma - better), rel=1e-4)
        elif abs(worse) > 1e-2:
            assert found["ratio"][i] == pytest.approx(better / worse, rel=1e-2, abs=1e-3)


@given(st.floats(0.01, 100), st.floats(0.01, 100))
def test_a_ratio_is_larger_where_the_others_are_nearer(one, two):
    scorer = SCORERS["transe"]()
    [found] = ratio(scorer, np.array([scorer.gamma - one]), np.array([scorer.gamma - two]))
    assert found == pytest.approx(two / one, rel=1e-6)
    assert np.isfinite(ratio(scorer, np.array([scorer.gamma]), np.array([0.0])))
    for worse in (0.0, -0.0):
        assert np.isfinite(ratio(SCORERS["distmult"](), np.array([1.0]), np.array([worse])))
    assert ratio(SCORERS["distmult"](), np.array([one]), np.array([-two]))[0] == pytest.approx(-one / two)


def test_with_the_server_the_victims_own_rows_are_scored():
    _, transcript, setup, trained, _ = watched()
    targets = draw_targets(SMALL, "existing", count=40)[1]
    strangers = [each for each in SMALL[VICTIM].named("train") if each[0] not in SMALL[ADVERSARY].entities][:5]
    assert strangers
    asked = targets_of([*named_targets(targets.candidates), *strangers], np.ones(45, bool), "existing", VICTIM)
    view = view_of(transcript, setup, "fede", "server+party", ADVERSARY)
    [(way, found)] = CIP().scores(view, asked.candidates, 3).items()
    assert way == "of the victim"
    scorer, rows, kinds = SCORERS["transe"](), trained[3, VICTIM]["entity"], trained[3, ADVERSARY]["relation"]
    for (h, r, t), score in zip(named_targets(asked.candidates), found, strict=True):
        three = (rows[SMALL[VICTIM].entities.id(h)], kinds[SMALL[ADVERSARY].relations.id(r)],
                 rows[SMALL[VICTIM].entities.id(t)])  # fmt: skip
        assert score == pytest.approx(
            slow_score("transe", scorer, 8, *(row.double().tolist() for row in three)), abs=1e-5
        )
    alone = CIP().scores(view_of(transcript, setup, "fede", "party", ADVERSARY), asked.candidates, 3)
    assert np.isnan(alone["score"][-5:]).all()
    assert not np.isnan(alone["score"][:-5]).any()
    with pytest.raises(Nothing, match="a party attacks here"):
        CIP().scores(view_of(transcript, setup, "fede", "server"), asked.candidates, 3)


# -- by turning a tail round -------------------------------------------------------------------------------------------


@given(st.integers(2, 7), st.integers(2, 6), st.booleans(), st.lists(st.integers(-1, 9), max_size=6), seeds)
def test_tails_are_turned_sent_back_and_left_alone(every, parties, boost, tails, seed):
    rng = np.random.default_rng(seed)
    shown = CIA(every=every, boost=boost).disguise(np.array(tails, np.int64), parties)
    rows = sorted({tail for tail in tails if tail >= 0})
    for number in range(1, 3 * every):
        given_rows, now = (torch.from_numpy(rng.normal(size=(10, 3))) for _ in range(2))
        before = now.clone()
        sent = shown(number, given_rows, now)
        assert torch.equal(now, before)
        expected = now.clone()
        if number % every == 0:
            expected[rows] = given_rows[rows] * (1 - 2 * parties if boost else -1)
            if boost:
                mean = (expected[rows] + (parties - 1) * given_rows[rows]) / parties
                torch.testing.assert_close(mean, -given_rows[rows])
        elif number % every == 1 and number > 1:
            expected[rows] = given_rows[rows]
        assert torch.equal(sent, expected)


def test_an_active_attack_takes_two_rounds():
    with pytest.raises(TacitError, match="two rounds"):
        CIA(every=1).disguise(np.array([0]), 3)
    wanted, chosen = setting()
    targets = {reading: draw_targets(SMALL, reading, count=20)[1] for reading in ("existing", "held")}
    for names, some in ((["cia", "cip"], {"held": targets["held"]}), (["cia"], targets)):
        with pytest.raises(TacitError, match="one of its own"):
            Trial("fede", SMALL, wanted, chosen, names, some)
    with pytest.raises(TacitError, match="every is at least 1"):
        Trial("fede", SMALL, wanted, chosen, ["cip"], targets, every=0)
    with pytest.raises(TacitError, match="the attack is si, cip, cia, counts"):
        Trial("fede", SMALL, wanted, chosen, ["cib"], targets)


def tried(names, reading="existing", recipe="fede", *, every=2, count=60, seed=0, **sections):
    """Trials of these attacks on one kind of targets: their outcomes, and the last of the trials."""
    wanted, chosen = setting(seed=seed, **sections)
    plot, outcomes, trial = Plot(targets=count, seed=seed, keep_scores=True), [], None
    for parties, some, targets in prepared(SMALL, names, [reading], plot):
        trial = Trial(recipe, parties, wanted, chosen, some, targets, plot=plot, every=every)
        outcomes += trial.run()
    return outcomes, trial


@pytest.mark.parametrize("secure", [False, True])
def test_to_look_changes_nothing_and_to_turn_tails_does(secure):
    federation = {"secure": True, "vocabulary": "open"} if secure else {}
    outcomes, trial = tried(["cip"], federation=federation)
    run = federate(SMALL, "fede", settings=combine(QUICK, {"federation": federation}))
    assert trial.metrics == run.metrics
    assert trial.rounds == 4
    assert [sorted(outcome.by_round) for outcome in outcomes] == [[2, 4], [] if secure else [2, 4]]
    turned, other = tried(["cia"], federation=federation)
    assert other.metrics != run.metrics
    assert sorted(turned[0].by_round) == [2]
    assert set(turned[0].ways) == {"ratio", "difference"}


def test_who_turns_a_tail_looks_at_what_became_of_it():
    wanted, chosen = setting()
    targets = draw_targets(SMALL, "existing", count=30, apart=True)[1]
    graph, scorer = SMALL[ADVERSARY], wanted.scorer
    ids = targets.candidates.at(graph.entities, graph.relations)
    transcript = Transcript(lambda record: True)
    setup = Setup(SMALL, wanted, chosen, transcript, disguises={ADVERSARY: CIA(every=2).disguise(ids[:, 2], 3)})
    RECIPES["fede"](setup).run(lambda event: None)
    view = view_of(transcript, setup, "fede", "party", ADVERSARY)
    tails, rest = np.unique(ids[:, 2]), np.setdiff1d(np.arange(len(graph.entities)), ids[:, 2])
    for number, factor in ((2, -1.0), (3, 1.0), (4, -1.0)):
        sent, before = seen.sent(view, ADVERSARY, number), seen.given(view, ADVERSARY, number)
        assert torch.equal(sent[tails], factor * before[tails])
        assert not torch.equal(sent[rest], before[rest])
    found = CIA(every=2).scores(view, targets.candidates, 2)
    kinds = seen.own(view, 2)["relation"]
    for i, (h, r, t) in enumerate(ids.tolist()):
        one, two = (
            slow_score("transe", scorer, 8, *(row.double().tolist() for row in (rows[h], kinds[r], rows[t])))
            for rows in (seen.given(view, ADVERSARY, 3), seen.given(view, ADVERSARY, 4))
        )
        assert found["difference"][i] == pytest.approx(two - one, abs=1e-5)
        assert found["ratio"][i] == pytest.approx((scorer.gamma - one) / (scorer.gamma - two), rel=1e-5)


# -- by clustering what relations could be -----------------------------------------------------------------------------


@given(st.integers(1, 6), seeds)
def test_the_relation_of_a_translation_and_of_a_turn_is_found_exactly(dim, seed):
    rng = np.random.default_rng(seed)
    head, relation = (torch.from_numpy(rng.normal(size=(5, dim))) for _ in range(2))
    torch.testing.assert_close(relation_vectors(SCORERS["transe"](), head, head + relation), relation)
    real, imaginary = head, torch.from_numpy(rng.normal(size=(5, dim)))
    turned = torch.complex(real, imaginary) * torch.polar(torch.ones_like(relation), relation) * 3.0
    found = relation_vectors(
        SCORERS["rotate"](), torch.cat([real, imaginary], 1), torch.cat([turned.real, turned.imag], 1)
    )
    torch.testing.assert_close(found, torch.cat([relation.cos(), relation.sin()], 1))


def every_pair(entity, scorer):
    many = len(entity)
    pairs = [(h, t) for h in range(many) for t in range(many) if h != t]
    return np.array([relation_vectors(scorer, entity[h], entity[t]).tolist() for h, t in pairs])


def plain_k_means(vectors, centres, rounds):
    """Squared distances to the nearest centre, which it is, and the centres, after so many rounds."""
    centres = np.array(centres)
    for number in range(rounds + 1):
        apart = ((vectors[:, None] - centres[None]) ** 2).sum(2)
        nearest = apart.argmin(1)
        if number < rounds:
            for cluster in set(nearest):
                centres[cluster] = vectors[nearest == cluster].mean(0)
    return apart.min(1), nearest, centres


@pytest.mark.parametrize("name", ["transe", "rotate", "distmult"])
@settings(max_examples=15)
@given(st.integers(4, 12), st.integers(1, 6), st.integers(0, 6), st.integers(0, 2**31))
def test_clusters_are_those_of_a_plain_k_means_over_all_pairs(name, many, clusters, rounds, seed):
    scorer = SCORERS[name]()
    entity = torch.from_numpy(np.random.default_rng(seed).normal(size=(many, scorer.widths(3)[0])))
    vectors = every_pair(entity, scorer)
    start = Concentrations.of(entity, scorer, clusters, rounds=0, seed=seed).centres.numpy()
    assert all(np.abs(vectors - centre).sum(1).min() < 1e-9 for centre in start)
    assume(len(np.unique(start.round(9), axis=0)) == clusters)  # else a pair may choose among equals
    made = Concentrations.of(entity, scorer, clusters, rounds=rounds, seed=seed)
    squares, nearest, centres = plain_k_means(vectors, start, rounds)
    there = np.unique(nearest)
    np.testing.assert_allclose(made.centres.numpy()[there], centres[there], atol=1e-4)
    spread = np.array(
        [squares[nearest == each].mean() if (nearest == each).sum() >= FEW else np.inf for each in range(clusters)]
    )
    np.testing.assert_allclose(made.spread.numpy(), spread, atol=1e-4)
    assert made.inertia == pytest.approx(squares.mean(), abs=1e-4)
    assert made.error == 0.0
    pairs = torch.tensor([(h, t) for h in range(many) for t in range(many) if h != t])
    found, distance = made.of_pairs(pairs[:, 0], pairs[:, 1])
    np.testing.assert_allclose(distance.numpy(), squares, atol=1e-4)
    np.testing.assert_allclose(found.numpy(), spread[nearest], atol=1e-4)


def test_a_sample_of_pairs_is_as_wrong_as_it_says():
    rng, scorer = np.random.default_rng(5), SCORERS["transe"]()
    entity = torch.from_numpy(rng.normal(size=(60, 4)) * rng.random((60, 1)))
    wrong = []
    for seed in range(40):
        every, some = (Concentrations.of(entity, scorer, 5, rounds=0, seed=seed, pairs=pairs) for pairs in (None, 300))
        assert torch.equal(every.centres, some.centres)
        wrong.append((some.inertia - every.inertia) / some.error)
    assert 0.7 < np.sqrt(np.mean(np.square(wrong))) < 1.4
    assert abs(np.mean(wrong)) < 0.6
    whole = Concentrations.of(entity, scorer, 5, seed=1)
    enough = Concentrations.of(entity, scorer, 5, seed=1, pairs=60 * 59)
    assert (whole.error, whole.inertia) == (enough.error, enough.inertia) == (0.0, enough.inertia)
    with pytest.raises(Nothing, match="no pairs"):
        Concentrations.of(entity[:1], scorer, 2)


def test_a_server_that_is_told_other_facts_uses_them():
    _, transcript, setup, trained, _ = watched()
    targets = draw_targets(SMALL, "existing", count=80)[1]
    unknown = targets_of([*named_targets(targets.candidates), ("nobody", *named_targets(targets.candidates)[0][1:])],
                         np.ones(81, bool), "existing", VICTIM)  # fmt: skip
    view = Views(transcript, SMALL, setup, "fede", Plot()).of("server", SI(), targets)
    auxiliary = view.leaks["auxiliary graph"]
    assert sorted(view.leaks) == ["auxiliary graph", "number of relations"]
    others = {triple for graph in SMALL.graphs[1:] for triple in graph.named("train")}
    assert set(auxiliary.named("train")) == others
    found = SI(rounds=3, seed=4).scores(view, unknown.candidates, 2)
    rows, graph = trained[2, VICTIM]["entity"], SMALL[VICTIM]
    made = Concentrations.of(rows, SCORERS["transe"](), 2 * len(graph.relations), rounds=3, seed=4)
    heads, tails = ({(r, each[column]) for *each, r in ((h, t, r) for h, r, t in others)} for column in (0, 1))
    lowest = np.nanmin(found["concentrated"])
    likely = 0
    for i, (h, r, t) in enumerate(named_targets(unknown.candidates)[:-1]):
        pair = (torch.tensor([graph.entities.id(name)]) for name in (h, t))
        spread, distance = made.of_pairs(*pair)
        assert found["concentrated"][i] == pytest.approx(-float(spread))
        assert found["near"][i] == pytest.approx(-float(distance))
        if (r, h) in heads and (r, t) in tails:
            likely += 1
            assert found["with auxiliary facts"][i] == found["concentrated"][i]
        else:
            assert found["with auxiliary facts"][i] < lowest
    assert 0 < likely < 80
    assert all(np.isnan(scores[-1]) for scores in found.values())
    told = Views(transcript, SMALL, setup, "fede", Plot(auxiliary=False)).of("server", SI(), targets)
    assert "with auxiliary facts" not in SI(rounds=1).scores(told, unknown.candidates, 2)
    with pytest.raises(Nothing, match="was not told"):
        SI().scores(replace(told, leaks={}), unknown.candidates, 2)
    only = targets_of([("nobody", "r", "someone")], np.ones(1, bool), "existing", VICTIM)
    assert np.isnan(SI(rounds=1).scores(view, only.candidates, 2)["with auxiliary facts"]).all()


# -- by noisy counts ---------------------------------------------------------------------------------------------------


def alone_in_their_cells(reading="existing", count=700, seed=0):
    """Targets no two of which add to the same count."""
    parties, targets = draw_targets(SMALL, reading, count=count, seed=seed)
    names, kept, cells = named_targets(targets.candidates), [], set()
    for i in np.random.default_rng(seed).permutation(len(names)):
        h, r, t = names[i]
        if not cells & {(r, "head", h), (r, "tail", t)}:
            cells |= {(r, "head", h), (r, "tail", t)}
            kept.append(int(i))
    return parties, targets_of([names[i] for i in kept], targets.member[kept], reading, VICTIM)


def counted(parties, sigma, secret, secured=None):
    transcript = Transcript(lambda record: True)
    shared_counts(parties.graphs, sigma, secret, InProcess(transcript), secured)
    return transcript


@pytest.mark.parametrize("reading", ["existing", "canaries", "held"])
def test_counts_without_noise_tell_everything(reading):
    parties, targets = draw_targets(SMALL, reading, count=700)
    transcript, rest = counted(parties, 1.0, None), others_add(parties[VICTIM], targets)
    known = Known(SCORERS["transe"](), 8, "entity", 3)
    view = transcript.view(Adversary("server"), known=known, leaks={REST: rest})
    found = Counts().scores(view, targets.candidates, 0)
    assert np.array_equal(found["all but this one"], np.where(targets.member, 2.0, 0.0))
    party = transcript.view(Adversary("party", ADVERSARY), graphs=parties.graphs, known=known)
    [(way, of_sum)] = Counts().scores(party, targets.candidates, 0).items()
    assert way == "cells of the sum"
    for i, (h, r, t) in enumerate(named_targets(targets.candidates)):
        one, every = (sum((r, h) == (b, a) for g in some for a, b, _ in g.named("train")) +
                      sum((r, t) == (b, c) for g in some for _, b, c in g.named("train"))
                      for some in (parties.graphs[:1], parties.graphs))  # fmt: skip
        assert (found["cells"][i], of_sum[i]) == (one, every)
        if i > 20:
            break


@pytest.mark.parametrize("sigma", [0.5, 1.0, 3.0])
def test_who_knows_all_but_the_targets_finds_what_the_noise_allows(sigma):
    """Two cells, each with a deviation of sigma times sqrt 2: the AUC is Phi(1 / (sigma sqrt 2))."""
    parties, targets = alone_in_their_cells("canaries")
    rest, found = others_add(parties[VICTIM], targets), []
    for seed in range(8):
        view = counted(parties, sigma, Secret.simulation(seed)).view(Adversary("server"), known=Known(
            SCORERS["transe"](), 8, "entity", 3), leaks={REST: rest})  # fmt: skip
        found.append(Counts().scores(view, targets.candidates, 0)["all but this one"])
    scores, member = np.concatenate(found), np.tile(targets.member, 8)
    assert len(scores) > 1500
    limits = measure(scores, member, confidence=0.999).auc
    truth = norm.cdf(1 / (sigma * math.sqrt(2)))
    assert limits.low < truth < limits.high
    assert limits.high - limits.low < 0.12
    assert np.std(scores - 2 * member) == pytest.approx(2 * sigma, rel=0.1)


def test_without_counts_there_is_nothing_to_count():
    targets = draw_targets(SMALL, "existing", count=10)[1].candidates
    _, transcript, setup, *_ = watched(rounds=1)
    with pytest.raises(Nothing, match="no noisy counts are released"):
        Counts().scores(view_of(transcript, setup, "fede", "server"), targets, 0)
    chosen = setting(federation={"secure": True})[1]
    secured = chosen.how(SMALL.names, "relation")
    view = counted(SMALL, 1.0, Secret.simulation(0), secured).view(Adversary("server"), known=setup.known("fede"))
    with pytest.raises(Nothing, match="under masks"):
        Counts().scores(view, targets, 0)


# -- by federations of one's own ---------------------------------------------------------------------------------------


@settings(max_examples=30)
@given(st.integers(4, 12), st.integers(2, 8), seeds)
def test_a_likelihood_ratio_is_of_two_normal_distributions(many, count, seed):
    rng = np.random.default_rng(seed)
    coins = rng.random((many, count)) < 0.5
    coins[:, 0] = True
    scores = rng.normal(size=(many, count)) + coins
    scores[rng.random((many, count)) < 0.1] = np.nan
    true = rng.normal(size=count)
    found = likelihood_ratio(true, scores, coins)
    sides = []
    for side in (True, False):
        by_target = [[s for s, c in zip(scores[:, j], coins[:, j], strict=True) if c == side and not math.isnan(s)]
                     for j in range(count)]  # fmt: skip
        rest = sum(sum((x - sum(each) / len(each)) ** 2 for x in each) for each in by_target if each)
        free = sum(len(each) - 1 for each in by_target if each)
        sides.append(([sum(each) / len(each) if each else math.nan for each in by_target],
                      max(math.sqrt(rest / max(free, 1)), 1e-6)))  # fmt: skip
    for j in range(count):
        one, two = (norm.logpdf(true[j], means[j], deviation) for means, deviation in sides)
        assert found[j] == pytest.approx(one - two, rel=1e-9, abs=1e-9, nan_ok=True)
    assert np.isnan(found[0])  # it was in all of them: there is nothing to compare with
    assert np.isnan(likelihood_ratio(np.full(count, np.nan), scores, coins)).all()


def slowly_taught(lessons, member, asked, ridge=1.0):
    middle, spread = lessons.mean(0), lessons.std(0)
    known = np.column_stack([np.ones(len(lessons)), (lessons - middle) / spread])
    weights = np.zeros(known.shape[1])
    rate = 4 / (np.linalg.norm(known, 2) ** 2 + 4 * ridge)
    for _ in range(4000):
        slope = known.T @ (member - 1 / (1 + np.exp(-known @ weights))) - ridge * np.r_[0, weights[1:]]
        weights += rate * slope
    return np.column_stack([np.ones(len(asked)), (asked - middle) / spread]) @ weights


@settings(max_examples=15)
@given(st.integers(1, 4), st.integers(20, 60), st.floats(0, 3), seeds)
def test_what_is_taught_is_a_logistic_regression(features, many, apart, seed):
    rng = np.random.default_rng(seed)
    member = np.arange(many) % 2 == 0
    lessons = rng.normal(size=(many, features)) + apart * member[:, None]
    asked = rng.normal(size=(30, features))
    np.testing.assert_allclose(taught_scores(lessons, member, asked), slowly_taught(lessons, member, asked), atol=1e-3)
    with_gaps = np.concatenate([lessons, np.full((3, features), np.nan)])
    truth = np.concatenate([member, [True, True, False]])
    asked[0, 0] = np.nan
    found = taught_scores(with_gaps, truth, asked)
    assert np.isnan(found[0])
    np.testing.assert_allclose(found[1:], taught_scores(lessons, member, asked[1:]))


def test_lessons_that_are_wholly_apart_are_learned():
    rng = np.random.default_rng()
    member = rng.random(200) < 0.5
    lessons = rng.random((200, 3)) + 1e6 * member[:, None]
    assert measure(taught_scores(lessons, member, lessons), member).auc.value == 1.0
    same = np.ones((4, 2))
    assert np.isfinite(taught_scores(same, np.array([True, True, False, False]), same)).all()
    for wrong in (np.zeros(4, bool), np.ones(4, bool)):
        with pytest.raises(TacitError, match="no members, or nothing else"):
            taught_scores(same, wrong, same)


@pytest.mark.parametrize("reading", READINGS)
def test_a_shadow_victim_has_what_its_coin_says_and_nothing_of_the_victims(reading, monkeypatch):
    worlds = []

    class Watched:
        """A training that only says what it was given; scores tell who was asked, larger for what it holds."""

        def __init__(self, recipe, parties, wanted, chosen, names, targets, *, plot, every):
            self.parties, self.asked = parties, targets[reading]
            worlds.append((parties, wanted.seed, self.asked))

        def run(self, on_event):
            names, held = named_targets(self.asked.candidates), set(self.parties[VICTIM].named("train"))
            scores = np.array([float(name in held) + 0.01 * (i % 7) for i, name in enumerate(names)])
            return [Outcome("cip", "party", reading, "", None, self.asked.member, by_round={5: {}},
                            scores={5: {"score": scores}})]  # fmt: skip

    monkeypatch.setattr(shadows, "Trial", Watched)
    wanted, chosen = setting(seed=3)
    plot = Plot(targets=80, seed=6)
    found = shadow_attacks("fede", SMALL, wanted, chosen, reading, shadows=8, plot=plot)
    assert [outcome.attack for outcome in found] == ["lira", "trajectory"]
    (changed, seed, asked), *rest = worlds
    expected, targets = draw_targets(SMALL, reading, count=80, seed=6)
    assert (changed, seed, len(rest)) == (expected, 3, 8)
    names = named_targets(asked.candidates)
    assert names[:80] == named_targets(targets.candidates)
    assert len(set(names)) == len(names) > 100
    lessons = set(names[80:])
    assert not lessons & set(changed[VICTIM].named("train"))
    known = {triple for graph in SMALL.graphs[1:] for triple in graph.named("train")}
    held = []
    for number, (parties, seed, again) in enumerate(rest):
        assert seed == 4 + number
        assert named_targets(again.candidates) == names
        assert parties.graphs[1:] == SMALL.graphs[1:]
        own = set(parties[VICTIM].named("train"))
        assert own - set(names) <= known  # not one of the victim's own triples but for targets
        assert len(parties[VICTIM].valid) == len(parties[VICTIM].test) == 0
        held.append([name in own for name in names])
    share = np.mean(held, 0)
    assert 0.42 < share[:80].mean() < 0.58
    assert 0.42 < share[80:].mean() < 0.58  # by a coin, whoever else knows it
    assert len({tuple(row) for row in held}) == 8
    for outcome in found:
        [(number, ways)] = outcome.by_round.items()
        assert (number, outcome.leaks) == (5, (shadows.LEAK,))
        assert all(measured.auc.value == 1.0 for measured in ways.values())
    with pytest.raises(BadValue, match="at least 4"):
        shadow_attacks("fede", SMALL, wanted, chosen, reading, shadows=3)


@pytest.mark.slow
def test_shadows_of_private_training_have_its_noise(monkeypatch):
    made = []

    class Noted(Trial):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            made.append(self.settings.privacy)

    monkeypatch.setattr(shadows, "Trial", Noted)
    federation = {"rounds": 1, "local_epochs": 1}
    wanted, chosen = setting(privacy={"name": "dpsgd", "epsilon": 2.0, "noise": "seeded"}, federation=federation)
    found = shadow_attacks("private_fede", SMALL, wanted, chosen, "canaries", shadows=4, plot=Plot(targets=40), every=1)
    assert all(outcome.nothing is None for outcome in found)
    assert len(made) == 5
    assert len({privacy.sigma for privacy in made}) == 1
    assert made[0].sigma > 0.5


def test_where_a_party_finds_nothing_its_shadows_are_not_trained():
    wanted, chosen = setting(federation={"changed_only": True})
    found = shadow_attacks("fede", SMALL, wanted, chosen, "canaries", plot=Plot(targets=20), every=2)
    assert [(each.attack, each.ways) for each in found] == [("lira", ()), ("trajectory", ())]
    assert all("only rows that changed" in each.nothing for each in found)


# -- whole federations -------------------------------------------------------------------------------------------------

MEMORY = {"scorer": {"dim": 32}, "negatives": {"count": 8}, "training": {"batch": 256},
          "optimizer": {"learning_rate": 0.05}, "federation": {"rounds": 2, "local_epochs": 10}}  # fmt: skip
"""A few rounds that learn by heart."""


def on_canaries(recipe, wanted, chosen, seed, names=("cip",)):
    """By adversary: what attacks find of canaries that went through the last round."""
    plot = Plot(targets=400, seed=seed)
    [(parties, some, targets)] = prepared(clinic("small", seed), names, ["canaries"], plot)
    trial = Trial(recipe, parties, replace(wanted, seed=seed), chosen, some, targets, plot=plot, every=chosen.rounds)
    return {outcome.role: {way: outcome.last(way)[1] for way in outcome.ways} for outcome in trial.run()}


def test_canaries_are_found_where_there_is_no_defence():
    wanted, chosen = setting(**MEMORY)
    for seed in range(3):
        found = on_canaries("fede", wanted, chosen, seed)
        assert found["party"]["score"].auc.value >= 0.7
        assert found["party"]["score"].auc.low > 0.6
        assert found["server+party"]["of the victim"].auc.value >= 0.8
        assert found["server+party"]["of the victim"].tpr[0.01].low > 0.02


@pytest.mark.slow
def test_canaries_are_not_found_where_training_is_private():
    _, chosen = setting(**MEMORY)
    private, _ = setting(**MEMORY, privacy={"name": "dpsgd", "epsilon": 1.0, "noise": "seeded"})
    private = with_noise("private_fede", SMALL, private, chosen)
    defended = []
    for seed in range(3):
        found = on_canaries("private_fede", private, chosen, seed)
        defended += [found["party"]["score"], found["server+party"]["of the victim"]]
    assert np.mean([each.auc.value for each in defended]) < 0.56
    assert max(each.auc.high for each in defended) < 0.66


@pytest.mark.slow
def test_shadows_find_canaries():
    wanted, chosen = setting(**MEMORY)
    for seed in range(3):
        plot = Plot(targets=200, seed=seed)
        found = shadow_attacks("fede", clinic("small", seed), replace(wanted, seed=seed), chosen, "canaries", plot=plot,
                               every=1)  # fmt: skip
        for outcome, least in zip(found, (0.7, 0.65), strict=True):
            [measured] = outcome.by_round[2].values()
            assert measured.auc.value >= least


def test_what_travels_under_masks_or_not_at_all_cannot_be_attacked():
    for vocabulary in ("open", "private"):
        found, _ = tried(["si", "cip"], federation={"secure": True, "vocabulary": vocabulary})
        silent = {(outcome.attack, outcome.role): outcome.nothing for outcome in found}
        assert silent.pop(("cip", "party")) is None  # it has its own rows, and the mean
        assert set(silent) == {("si", "server"), ("cip", "server+party")}
        assert all("masks" in why for why in silent.values())
    found, _ = tried(["si", "cip"], recipe="fedr")
    silent = {(outcome.attack, outcome.role): outcome.nothing for outcome in found}
    assert silent.pop(("cip", "party")) is None
    assert all("entity rows do not travel" in why for why in silent.values())
    [turned, _], _ = tried(["cia"], recipe="fedr")
    assert "no tail to turn" in turned.nothing
    assert turned.json()["ways"] == {}


@pytest.mark.parametrize("recipe", ["fede", "fedr"])
def test_secure_sums_show_a_party_what_plain_ones_do(recipe):
    """The mean is the same but for rounding: who has the names, and in which order the server has them, is nothing."""
    plain, *others = (
        tried(["cip"], recipe=recipe, **combine(MEMORY, {"federation": federation}))[0][0]
        for federation in ({}, {"secure": True, "vocabulary": "open"}, {"secure": True, "vocabulary": "private"})
    )
    np.testing.assert_allclose(others[0].scores[2]["score"], plain.scores[2]["score"], atol=1e-2)
    # Private names are in another order each time, and so are first rows: what is found is as good all the same.
    assert all(each.last("score")[1].auc.value > 0.8 for each in (plain, *others))


def test_a_transcript_says_what_a_trial_of_the_same_settings_does(tmp_path):
    federation = {"federation": {"keep_every": 2}}
    federate(SMALL, "fede", settings=combine(QUICK, federation), out=tmp_path / "run")
    run = FederatedRun.open(tmp_path / "run")
    own = sum(t.numel() * t.element_size() for rows in run.transcript.memories.values() for t in rows.values())
    assert own > 0
    assert run.transcript.kept == own + sum(run.transcript.records[i].size for i in run.transcript.payloads)
    plot = Plot(targets=60, keep_scores=True)
    found = attack_federation(
        run, ["cip", "si"], ["existing", "held"], plot=plot, on_event=lambda event: pytest.fail("trained")
    )
    assert [(each.attack, each.role, each.reading) for each in found] == [
        (name, role, reading)
        for name, roles in (("cip", ("party", "server+party")), ("si", ("server",)), ("blind", ("party",)))
        for reading in ("existing", "held")
        for role in roles
    ]
    for reading in ("existing", "held"):
        live = {(each.attack, each.role): each for each in tried(["cip", "si", "blind"], reading)[0]}
        for outcome in (each for each in found if each.reading == reading):
            other = live[outcome.attack, outcome.role]
            assert sorted(outcome.scores) == sorted(other.scores) == [2, 4]
            assert (
                outcome.leaks
                == other.leaks
                == (("number of relations", "auxiliary graph") if outcome.attack == "si" else ())
            )
            for number, ways in outcome.scores.items():
                assert set(ways) == set(other.scores[number])
                for way, scores in ways.items():
                    assert np.array_equal(scores, other.scores[number][way], equal_nan=True)
            assert outcome.json() == other.json()
    folder = tmp_path / "run" / PRIVATE / "attacks"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert sorted(each.name for each in folder.iterdir()) == sorted(
        f"{each.attack}-{each.role.replace('+', '-')}-{each.reading}.json" for each in found
    )
    for outcome in found:
        written = json.loads(
            (folder / f"{outcome.attack}-{outcome.role.replace('+', '-')}-{outcome.reading}.json").read_text()
        )
        assert written["schema"] == "tacit.attack/1"
        assert json.loads(json.dumps(outcome.json())).items() <= written.items()
        assert set(written["roc"]) == set(outcome.ways)
        for way, (false, true) in written["roc"].items():
            assert (false[0], true[0], false[-1], true[-1]) == (0, 0, 1, 1)
            area = sum((b - a) * (c + d) / 2 for (a, b), (c, d) in zip(pairwise(false), pairwise(true), strict=True))
            assert area == pytest.approx(outcome.last(way)[1].auc.value, abs=1e-3)
    with pytest.raises(TacitError, match="too late for it"):
        from_transcript(run, ["cia"], ["existing"])
    with pytest.raises(TacitError, match="too late for them"):
        from_transcript(run, ["cip"], ["canaries"])


def test_an_order_of_targets_says_nothing():
    _, transcript, setup, *_ = watched()
    targets = draw_targets(SMALL, "existing", count=60)[1]
    order = np.random.default_rng(1).permutation(60)
    names = named_targets(targets.candidates)
    mixed = targets_of([names[i] for i in order], targets.member[order], "existing", VICTIM)
    views = Views(transcript, SMALL, setup, "fede", Plot())
    for how, role in ((CIP(), "party"), (CIP(), "server+party"), (SI(), "server")):
        one, two = (how.scores(views.of(role, how, each), each.candidates, 2) for each in (targets, mixed))
        assert set(one) == set(two)
        for way, scores in one.items():
            assert np.array_equal(scores[order], two[way], equal_nan=True)


def test_an_attack_that_is_out_of_reach_says_so():
    outcome = Outcome("cip", "party", "existing", "a", "b", np.array([True, False]))
    targets = targets_of([("nobody", "r", "t"), ("t", "r", "nobody")], np.array([True, False]), "existing", VICTIM)
    view = planted(np.random.default_rng(0), "transe", "entity")[0]
    silent = attacked(outcome, CIP(), view, targets, 5)
    assert "within the adversary's reach" in silent.nothing
    assert "were not kept" in attacked(outcome, CIP(), view, targets, 4).nothing
    assert curves(silent) == {}
    measured = Measured(9, 9, 0, Interval(0.5, 0.4, 0.6), 0.9, 0.0, 1.0, 2 / 3, {})
    found = replace(outcome, by_round={2: {"score": measured}})
    assert attacked(found, CIP(), view, targets, 5) is found  # what was found before stays
    worse = replace(measured, f1=0.8)
    more = replace(found, by_round={2: {"score": measured}, 4: {"score": worse}, 6: {"score": measured}})
    assert (more.best()[0], more.last()[0]) == (2, 6)


def test_too_few_rounds_are_said_to_be_too_few():
    found, _ = tried(["cip"], every=5)
    assert all("no round was attacked" in outcome.nothing for outcome in found)


def test_a_party_attacks_rounds_that_it_takes_part_in_and_hears_of():
    wanted, chosen = setting(federation={"rounds": 12, "fraction": 0.7})
    targets = {"existing": draw_targets(SMALL, "existing", count=40)[1]}
    trial, trained = Trial("fede", SMALL, wanted, chosen, ["cip"], targets, every=1), {}

    def told(event):
        if event["event"] == "round":
            trained[event["round"]] = set(event["trained"])

    alone, together = trial.run(told)
    there = [number for number in trained if ADVERSARY in trained[number]]
    heard = [number for number in there if number == 12 or number + 1 in there]
    assert 0 < len(heard) < len(there) < 12
    assert sorted(alone.by_round) == heard
    assert sorted(together.by_round) == [number for number in there if VICTIM in trained[number]]


# -- the command -------------------------------------------------------------------------------------------------------


def invoke(*arguments):
    return CliRunner().invoke(app, ["attack", *map(str, arguments)], env={"COLUMNS": "120"})


@pytest.fixture(scope="module")
def kept_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("attacked") / "run"
    federate(SMALL, "fede", settings=combine(QUICK, {"federation": {"keep_every": 2}}), out=folder)
    return folder


def test_the_command_shows_what_was_found(kept_run):
    done = invoke(kept_run, "--attack", "cip, si,counts", "--count", 60, "--targets", "existing,held")
    assert done.exit_code == 0, done.output
    text = " ".join(done.output.split())
    for expected in ("is this triple in the training set of riverside? Targets: existing.", "Targets: held.",
                     "The party is northgate.", "of the victim", "concentrated", "0.667 is that of always saying yes",
                     "counts by server: nothing to attack: no noisy counts are released here.", "(4)",
                     "Told beyond what the adversary saw: auxiliary graph; number of relations."):  # fmt: skip
        assert expected in text
    done = invoke(kept_run, "--attack", "cip", "--count", 60, "--victim", SMALL.names[2], "--json", "--seed", 3)
    found = json.loads(done.stdout)
    assert found["epsilon"] is None
    assert [(each["victim"], each["party"], each["adversary"], each["members"]) for each in found["attacks"]] == [
        (SMALL.names[2], SMALL.names[0], role, 30) for role in ("party", "server+party", "party")
    ]
    ways = found["attacks"][0]["ways"]
    assert list(ways) == ["ratio", "difference", "score"]
    assert set(ways["score"]["by_round"]) == {"2", "4"}
    one = attack_federation(FederatedRun.open(kept_run), ["cip"], plot=Plot(2, 0, 60, 3))[0].last("score")[1]
    assert ways["score"]["last"] == {"round": 4} | one.json()


def test_the_command_trains_where_it_has_to(kept_run):
    done = invoke(kept_run, "--attack", "cia,cip", "--targets", "canaries", "--count", 40, "--every", 2, "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)["attacks"]
    assert {(each["attack"], each["adversary"]) for each in found} == {
        (name, role) for name in ("cia", "cip") for role in ("party", "server+party")
    }
    assert all(each["nothing"] is None and each["members"] == each["others"] for each in found)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--attack", "cib"], "the attack is one of si, cip, cia, counts, blind, lira, trajectory; not 'cib'"),
        (["--targets", "some"], "targets are existing, canaries, held; not 'some'"),
        (["--victim", "nobody"], "there is no party 'nobody' to be the victim. There are: riverside"),
        (["--adversary", "nobody"], "there is no party 'nobody' to be the adversary"),
        (["--victim", "riverside", "--adversary", "riverside"], "another than the victim"),
        (["--count", "1"], "at least 2 targets"),
        (["--attack", "cia", "--every", "1"], "every is at least 2"),
        (["--attack", "cip", "--targets", "canaries", "--every", "0"], "every is at least 1"),
        (["--attack", "lira", "--shadows", "1"], "at least 4 shadow"),
    ],
)
def test_wrong_calls_are_one_message(kept_run, arguments, message):
    done = invoke(kept_run, *arguments)
    assert done.exit_code != 0
    assert isinstance(done.exception, TacitError)
    assert message in str(done.exception)


def test_what_is_no_federation_or_shares_nothing_cannot_be_attacked(tmp_path):
    federate(SMALL, "local", settings=QUICK, out=tmp_path / "local")
    assert "nothing is shared by the recipe local" in str(invoke(tmp_path / "local").exception)
    train(SMALL[0], settings={key: QUICK[key] for key in ("scorer", "negatives", "training")} | {"training": {
        "epochs": 1, "batch": 64, "device": "cpu"}}, out=tmp_path / "one")  # fmt: skip
    assert "this one is plain" in str(invoke(tmp_path / "one").exception)
    assert "is one of critical, neighbours; not 'cip'" in str(invoke(tmp_path / "one", "--attack", "cip").exception)
    assert isinstance(invoke(tmp_path).exception, TacitError)
    assert isinstance(invoke(tmp_path / "missing").exception, TacitError)
