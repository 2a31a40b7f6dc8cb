"""Reconstruction of a victim's graph, held against slow obvious versions; what it may look at, and what it finds."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tacit.attacks import reconstruction, seen
from tacit.attacks.reconstruction import (
    HOW_MANY,
    NAMELESS,
    Held,
    Inferred,
    Reconstruction,
    attack_reconstruction,
    directions,
    first_rows,
    held,
    how_inverted,
    inverse,
    measured,
    nameless_rows,
    nearest,
    reconstruct,
)
from tacit.attacks.seen import Nothing
from tacit.clinic import clinic
from tacit.errors import BadValue, TacitError
from tacit.federated import federate
from tacit.federation.transcript import Adversary
from tacit.graph import Graph, Vocab
from tacit.models import SCORERS
from tacit.settings import combine

SMALL = clinic("small")
ROUNDS, DIM = 8, 3
QUICK = {"scorer": {"name": "transe", "dim": 32}, "negatives": {"count": 8}, "evaluation": {"every": ROUNDS},
         "training": {"batch": 64, "device": "cpu"}, "optimizer": {"learning_rate": 0.02},
         "federation": {"keep_every": 1, "rounds": 1}}  # fmt: skip
NAMES = ("transe", "rotate", "distmult", "complex")
TRAITOR, VICTIM = 0, 1
TOGETHER = Adversary("server+party", TRAITOR)
seeds = st.integers(0, 2**32)


def trained(recipe, **sections):
    return federate(SMALL, recipe, settings=combine(QUICK, sections))


@pytest.fixture(scope="module")
def fede():
    return trained("fede", federation={"rounds": ROUNDS})


@pytest.fixture(scope="module")
def fedr():
    return trained("fedr", federation={"rounds": ROUNDS})


# -- slow and obvious --------------------------------------------------------------------------------------------------


def cosine(a, b):
    length = math.sqrt(sum(x * x for x in a)) * math.sqrt(sum(x * x for x in b))
    return sum(x * y for x, y in zip(a, b, strict=True)) / length if length else 0.0


def numbers(row):
    """Of a row of real parts, then imaginary parts."""
    half = len(row) // 2
    return [complex(row[i], row[half + i]) for i in range(half)]


def parts(values):
    return [value.real for value in values] + [value.imag for value in values]


def slow_inverse(name, head, tail):
    if name == "transe":
        return [t - h for h, t in zip(head, tail, strict=True)]
    if name == "distmult":
        return [h * t for h, t in zip(head, tail, strict=True)]
    turned = [t * h.conjugate() for h, t in zip(numbers(head), numbers(tail), strict=True)]
    return parts(turned if name == "complex" else [value / abs(value) for value in turned])


def slow_direction(name, relation, scorer, dim):
    if name != "rotate":
        return list(relation)
    spread = scorer.init_scale or scorer.spread(dim)
    return parts([complex(math.cos(x * math.pi / spread), math.sin(x * math.pi / spread)) for x in relation])


def world(rng, name, *, alike=0.7, kinds=False):
    """Random rows of a victim and a traitor who have some names in common, and the victim's graph."""
    scorer = SCORERS[name]()
    wide = scorer.widths(DIM)
    entities, relations = [f"e{i}" for i in range(9)], [f"r{i}" for i in range(4)]
    triples = [(entities[rng.integers(7)], relations[rng.integers(3)], entities[rng.integers(7)]) for _ in range(15)]
    truth = Graph.from_triples(triples)
    ours = Vocab(rng.choice(entities, 7, replace=False).tolist())
    known = Vocab(rng.choice(relations, 3, replace=False).tolist())
    whole = {name: rng.normal(size=wide[0]) for name in entities} | {
        name: rng.normal(size=wide[1]) for name in relations
    }

    def rows(names, how_alike):
        found = [how_alike * whole[name] + (1 - how_alike) * rng.normal(size=whole[name].shape) for name in names]
        return torch.tensor(np.array(found), dtype=torch.float32)

    return truth, Held(scorer, rows(truth.entities, alike), ours, rows(ours, 1.0), known, rows(known, 1.0),
                       rows(truth.relations, alike) if kinds else None, len(truth.train))  # fmt: skip


def slowly_measured(name, what, claims, truth, order):
    """ERR, TRR and the rest by loops over rows, pairs and triples; names as they were claimed."""
    called = {int(order[i]): claims.entities[int(claims.name[i])] for i in range(len(order))}
    row = {int(order[i]): i for i in range(len(order))}
    right = {i: called[i] == truth.entities[i] for i in called}
    related, whole, top = 0, 0, 0
    rows = what.rows.double().tolist()
    if what.kinds is None:
        candidates = [(what.relations[i], what.relation[i].double().tolist()) for i in claims.given_relations]
    else:
        leaked = [(what.relations[i], slow_direction(name, what.relation[i].double().tolist(), what.scorer, DIM))
                  for i in claims.given_relations]  # fmt: skip
        candidates = []
        for kind in what.kinds.double().tolist():
            best = max(leaked, key=lambda pair: cosine(pair[1], slow_direction(name, kind, what.scorer, DIM)))
            candidates.append((best[0], kind))
    for h, r, t in truth.train.triples.tolist():
        wanted = slow_inverse(name, rows[row[h]], rows[row[t]])
        alike = [cosine(wanted, slow_direction(name, vector, what.scorer, DIM)) for _, vector in candidates]
        found = candidates[int(np.argmax(alike))][0] == truth.relations[r]
        related += found
        whole += found and right[h] and right[t]
        top += found and right[h] and right[t] and max(alike) >= claims.top.alike - 1e-6
    return sum(right.values()), related, whole, top


# -- cosines, inverses, rates ------------------------------------------------------------------------------------------


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 4), st.integers(1, 20), seeds)
def test_a_row_has_the_name_of_the_most_alike(many, known, width, at_once, seed):
    rng = np.random.default_rng(seed)
    rows, others = (torch.from_numpy(rng.normal(size=(n, width))).float() for n in (many, known))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reconstruction, "AT_ONCE", {"cpu": at_once})
        which, alike, sure = nearest(rows, others)
    table = [[cosine(row, other) for other in others.tolist()] for row in rows.tolist()]
    for i in range(many):
        assert table[i][which[i]] == pytest.approx(max(table[i]), abs=1e-5)
        assert alike[i] == pytest.approx(max(table[i]), abs=1e-5)
        best = max(table[j][which[i]] for j in range(many))
        if sure[i]:
            assert table[i][which[i]] == pytest.approx(best, abs=1e-5)
        elif width > 1:  # in one dimension all are alike
            assert table[i][which[i]] <= best + 1e-5
    assert sure.any()
    assert len(set(which[sure].tolist())) == sure.sum()  # no name twice


@pytest.mark.parametrize("name", NAMES)
@given(st.integers(1, 4), seeds)
def test_the_inverse_is_the_relation_that_scores_best(name, dim, seed):
    rng, scorer = np.random.default_rng(seed), SCORERS[name]()
    wide = scorer.widths(dim)
    head, tail = (torch.from_numpy(rng.normal(size=(5, wide[0]))) for _ in range(2))
    found = inverse(scorer, head, tail)
    for i in range(5):
        torch.testing.assert_close(found[i].tolist(), slow_inverse(name, head[i].tolist(), tail[i].tolist()),
                                   atol=1e-9, rtol=1e-9)  # fmt: skip
    relation = torch.from_numpy(rng.normal(size=(5, wide[1])))
    for i in range(5):
        wanted = slow_direction(name, relation[i].tolist(), scorer, dim)
        torch.testing.assert_close(directions(scorer, relation)[i].tolist(), wanted, atol=1e-6, rtol=1e-6)
    # No relation of the same length scores better.
    if name in ("distmult", "complex"):
        best = found * (relation.norm(dim=1) / found.norm(dim=1))[:, None]
    elif name == "rotate":
        unit = (scorer.init_scale or scorer.spread(dim)) / math.pi
        best = torch.atan2(found[:, dim:], found[:, :dim]) * unit
    else:
        best = found
    assert (scorer.score(head, best, tail) >= scorer.score(head, relation, tail) - 1e-9).all()


def test_a_whole_turn_is_no_turn():
    scorer = SCORERS["rotate"]()
    relation = torch.rand(3, 4, dtype=torch.float64)
    round_again = relation + 2 * scorer.spread(4)
    torch.testing.assert_close(directions(scorer, relation), directions(scorer, round_again))


@pytest.mark.parametrize("kinds", [False, True])
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=25)
@given(st.sampled_from([0.3, 0.6, 1.0]), seeds)
def test_rates_are_those_of_loops(name, kinds, leak, seed):
    rng = np.random.default_rng(seed)
    truth, what = world(rng, name, kinds=kinds)
    order = rng.permutation(len(truth.entities))
    what = replace(what, rows=what.rows[torch.from_numpy(order)])
    claims = Reconstruction(leak, seed).of(what)
    rates = measured(claims, truth, order)
    entities, related, whole, top = slowly_measured(name, what, claims, truth, order)
    assert (rates.entities.right, rates.relations.right, rates.triples.right) == (entities, related, whole)
    assert rates.top_triples.right == top
    rows, triples = len(truth.entities), len(truth.train)
    assert (rates.err, rates.trr) == (entities / rows, whole / triples)
    assert (rates.entities.precision, rates.triples.precision) == (entities / rows, whole / rows**2)
    given_names = {claims.entities[i] for i in claims.given_entities}
    assert rates.known_entities == len(given_names & set(truth.entities))
    known = {claims.relations[i] for i in claims.given_relations}
    could = [x for x in truth.named("train") if {x[0], x[2]} <= given_names and x[1] in known]
    assert rates.known_triples == len(could)
    chance = sum(len(given_names) ** -len({h, t}) / len(known) for h, _, t in could) / triples
    assert rates.chance["trr"] == pytest.approx(chance)
    assert rates.chance["err"] == pytest.approx(rates.known_entities / rows / len(given_names))
    assert rates.entities.right <= rates.known_entities
    assert rates.triples.right <= rates.known_triples
    assert json.loads(json.dumps(rates.json()))["err"] == rates.err


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=25)
@given(st.integers(1, 70), st.integers(1, 50), seeds)
def test_a_threshold_leaves_so_many_of_all_pairs(name, count, at_once, seed):
    _, what = world(np.random.default_rng(seed), name)
    claims = Reconstruction().of(replace(what, triples=None))
    many = len(what.rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reconstruction, "AT_ONCE", {"cpu": at_once})
        top = claims.relation.threshold(count)
    pairs = np.arange(many**2)
    alike = np.sort(claims.relation.of(pairs // many, pairs % many)[1])[::-1]
    assert top.alike == pytest.approx(alike[min(count, many**2) - 1], abs=1e-6)
    assert (top.claimed, top.tried) == (min(count, many**2), many**2)


def test_a_sample_of_pairs_finds_about_the_same_threshold():
    rng = np.random.default_rng(3)
    rows, kinds = (torch.from_numpy(rng.normal(size=(n, 6))).float() for n in (200, 5))
    pairs = Inferred(SCORERS["transe"](), rows, torch.nn.functional.normalize(kinds, dim=1), np.arange(5))
    top = pairs.threshold(2000, pairs=20_000, seed=1)
    assert top.tried == 20_000
    every = np.arange(200**2)
    beyond = (pairs.of(every // 200, every % 200)[1] >= top.alike).sum()
    assert beyond == pytest.approx(2000, rel=0.15)  # 1000 of the sample, deviation 3%


# -- a world in which everything is known ------------------------------------------------------------------------------


def test_exact_rows_give_the_whole_graph_away():
    """t = h + r, and victim and traitor have the same rows."""
    rng = np.random.default_rng(5)
    steps = {name: rng.normal(size=16) for name in ("left", "up", "on")}
    spots = {(x, y, z): x * steps["left"] + y * steps["up"] + z * steps["on"] + 3.0
             for x in range(4) for y in range(3) for z in range(3)}  # fmt: skip
    moves = {"left": (1, 0, 0), "up": (0, 1, 0), "on": (0, 0, 1)}
    triples = []
    for spot in spots:
        for name, move in moves.items():
            there = tuple(a + b for a, b in zip(spot, move, strict=True))
            if there in spots:
                triples.append((str(spot), name, str(there)))
    truth = Graph.from_triples(triples)
    rows = {str(spot): values for spot, values in spots.items()}
    entity = torch.tensor(np.array([rows[name] for name in truth.entities])).float()
    relation = torch.tensor(np.array([steps[name] for name in truth.relations])).float()
    what = Held(SCORERS["transe"](), entity, truth.entities, entity, truth.relations, relation, None, len(truth.train))
    rates = measured(Reconstruction().of(what), truth)
    assert (rates.err, rates.trr, rates.sure_entities.precision) == (1.0, 1.0, 1.0)
    # Steps of two and more are as alike, so that more pairs than true ones look perfect.
    assert rates.top_triples.precision <= 1.0
    half = measured(Reconstruction(0.5).of(what), truth)
    assert half.err == 0.5
    assert half.trr < 1.0
    assert half.err_of_known == 1.0


def test_a_victim_without_training_triples_has_no_rate_of_them():
    graph = Graph.from_triples([], [("a", "r", "b")])
    rows = torch.eye(2)
    what = Held(SCORERS["transe"](), rows, graph.entities, rows, graph.relations, torch.ones(1, 2), None, 0)
    rates = measured(Reconstruction().of(what), graph)
    assert (rates.err, rates.trr) == (1.0, None)


# -- what an attack may look at ----------------------------------------------------------------------------------------


def same(one, two):
    pairs = np.arange(50)
    return all(np.array_equal(getattr(one, name), getattr(two, name)) for name in ("name", "alike", "sure")) and all(
        np.array_equal(a, b) for a, b in zip(one.relation.of(pairs, pairs[::-1]), two.relation.of(pairs, pairs[::-1]),
                                             strict=True)
    )  # fmt: skip


def leaky(run, number=ROUNDS):
    rows, order = nameless_rows(run.transcript, VICTIM, number)
    return run.view(TOGETHER, leaks={NAMELESS: rows}), order


@pytest.mark.parametrize("recipe", ["fede", "fedr"])
def test_names_that_the_server_was_told_are_not_used(recipe, request):
    run = request.getfixturevalue(recipe)
    view = leaky(run)[0] if recipe == "fedr" else run.view(TOGETHER)
    assert len(seen.names(view, VICTIM))  # it was told
    blind = replace(view, payloads={n: m for n, m in view.payloads.items() if m.kind != "names"},
                    records=[record for record in view.records if record.kind != "names"])  # fmt: skip
    with pytest.raises(Nothing, match="knows no names"):
        seen.names(blind, VICTIM)
    assert same(reconstruct(view, ROUNDS, victim=VICTIM, leak=0.5), reconstruct(blind, ROUNDS, victim=VICTIM, leak=0.5))


@pytest.mark.parametrize("recipe", ["fede", "fedr"])
def test_the_order_of_rows_says_nothing(recipe, request):
    run = request.getfixturevalue(recipe)
    view, order = leaky(run) if recipe == "fedr" else (run.view(TOGETHER), np.arange(len(SMALL[VICTIM].entities)))
    what, shuffled = held(view, VICTIM, ROUNDS), np.random.default_rng(0).permutation(len(order))
    what = replace(what, triples=len(SMALL[VICTIM].train))
    other = replace(what, rows=what.rows[torch.from_numpy(shuffled)])
    if what.kinds is not None:  # their order says nothing either
        other = replace(other, kinds=what.kinds.flip(0))
    one, two = (Reconstruction(0.5).of(each) for each in (what, other))
    assert np.array_equal(one.name[shuffled], two.name)
    assert np.array_equal(one.sure[shuffled], two.sure)
    back = np.argsort(shuffled)
    h, _, t = SMALL[VICTIM].train.triples.T
    assert np.array_equal(one.relation.of(h, t)[0], two.relation.of(back[h], back[t])[0])
    rates = [measured(one, SMALL[VICTIM], order), measured(two, SMALL[VICTIM], order[shuffled])]
    assert rates[0].json() == rates[1].json()


def test_rows_without_names_are_in_an_order_of_chance(fedr):
    rows, order = nameless_rows(fedr.transcript, VICTIM, ROUNDS)
    own = fedr.transcript.memories[ROUNDS, VICTIM]["entity"]
    assert torch.equal(rows, own[torch.from_numpy(order)])
    assert not np.array_equal(order, np.arange(len(order)))
    assert not np.array_equal(order, nameless_rows(fedr.transcript, VICTIM, ROUNDS, seed=1)[1])
    assert NAMELESS not in fedr.view(TOGETHER).leaks  # unless it is declared
    with pytest.raises(Nothing, match="was not given any"):
        reconstruct(fedr.view(TOGETHER), ROUNDS, victim=VICTIM)
    with pytest.raises(Nothing, match="were not kept"):
        nameless_rows(fedr.transcript, VICTIM, 99)


@pytest.mark.parametrize("adversary", [Adversary("server"), Adversary("party", TRAITOR), Adversary("outsider")])
def test_neither_can_do_it_alone(fede, adversary):
    with pytest.raises(Nothing, match="together"):
        reconstruct(fede.view(adversary), ROUNDS, victim=VICTIM)


def test_first_rows_are_those_that_were_given_first(fede):
    view, first = fede.view(TOGETHER), first_rows(fede, TRAITOR, VICTIM)
    assert torch.equal(first.rows, seen.given(view, VICTIM, 1))
    assert torch.equal(first.entity, seen.given(view, TRAITOR, 1))


def test_first_relation_rows_are_those_that_were_given_first(fedr):
    view, first = fedr.view(TOGETHER), first_rows(fedr, TRAITOR, VICTIM)
    assert torch.equal(first.kinds, seen.given(view, VICTIM, 1))
    assert torch.equal(first.relation, seen.given(view, TRAITOR, 1))


# -- whole federations -------------------------------------------------------------------------------------------------


def test_entity_rows_give_names_away_and_relation_rows_do_not(fede, fedr):
    found = attack_reconstruction(fede)
    assert json.loads(json.dumps(found)) == found
    assert [(each["victim"], each["leak"]) for each in found] == [
        (SMALL.names[victim], leak) for victim in (1, 2) for leak in (0.3, 0.5, 1.0)
    ]
    for victim in (found[:3], found[3:]):
        assert victim[0]["err"] < victim[1]["err"] < victim[2]["err"]
        assert victim[0]["trr"] <= victim[1]["trr"] < victim[2]["trr"]
        assert victim[2]["err_of_known"] >= 0.9
        assert victim[2]["sure_entities"]["precision"] >= 0.95
        for each in victim:  # names need no training
            assert each["control"]["err_of_known"] == 1.0
            assert each["told"] == [HOW_MANY]
            assert each["round"] == ROUNDS
        assert victim[2]["trr"] > 2 * victim[2]["control"]["trr"]  # relations do
    safer = attack_reconstruction(fedr)
    assert [(each["victim"], each["leak"]) for each in safer] == [(name, 1.0) for name in SMALL.names[1:]]
    for each in safer:
        assert each["told"] == sorted([HOW_MANY, NAMELESS])
        assert each["err"] < 0.1
        assert each["trr"] < 0.02


@pytest.mark.parametrize("recipe", ["fede", "fedr"])
def test_with_secure_sums_there_is_nothing_to_attack(recipe):
    run = trained(recipe, federation={"secure": True})
    for each in attack_reconstruction(run, leaks=[1.0]):
        assert each["err"] is each["trr"] is None
        assert "masks" in each["nothing"]


def test_parties_that_share_nothing_have_nothing_to_attack():
    run = trained("local")
    assert all("never meet" in each["nothing"] for each in attack_reconstruction(run))


def test_products_are_marked(caplog):
    run = trained("fede", scorer={"name": "distmult"})
    [found] = attack_reconstruction(run, victims=[2], leaks=[1.0])
    assert found["inverse"].startswith("fallback")
    assert how_inverted(SCORERS["rotate"]()) == "exact"
    assert "cannot be inverted" in caplog.text
    with pytest.raises(Nothing, match="TransH does not say"):
        Reconstruction().of(replace(world(np.random.default_rng(0), "transe")[1], scorer=SCORERS["transh"]()))


def test_inverse_relations_are_left_out():
    for recipe in ("fede", "fedr"):
        run = trained(recipe, training={"reciprocal": True}, negatives={"sides": "both"})
        view = leaky(run, 1)[0] if recipe == "fedr" else run.view(TOGETHER)
        what = held(view, VICTIM, 1)
        assert len(what.relation) == len(SMALL[TRAITOR].relations)
        assert what.kinds is None or len(what.kinds) == len(SMALL[VICTIM].relations)
        assert attack_reconstruction(run, victims=[VICTIM], leaks=[1.0])[0]["err"] is not None


# -- what cannot be ----------------------------------------------------------------------------------------------------


def test_bad_arguments(fede):
    for leak in (0.0, -0.5, 1.5, math.nan):
        with pytest.raises(BadValue, match="a share above 0"):
            Reconstruction(leak)
    with pytest.raises(BadValue, match="at least 1"):
        Reconstruction(pairs=0)
    with pytest.raises(TacitError, match="the device is"):
        Reconstruction(device="abacus")
    for victim in (TRAITOR, 3, -1):
        with pytest.raises(TacitError, match="another of the 3 parties"):
            reconstruct(fede.view(TOGETHER), ROUNDS, victim=victim)
        with pytest.raises(TacitError, match="another of the 3 parties"):
            attack_reconstruction(fede, victims=[victim])
    with pytest.raises(TacitError, match="no party 7"):
        attack_reconstruction(fede, traitor=7)
    [missed] = attack_reconstruction(fede, number=99, victims=[1], leaks=[1.0])
    assert "round 99" in missed["nothing"]
    claims = reconstruct(fede.view(TOGETHER), ROUNDS, victim=VICTIM)
    assert claims.top is None  # it was not told how many there are
    assert measured(claims, SMALL[VICTIM]).json()["top_triples"] is None
    with pytest.raises(BadValue, match="claims of"):
        measured(claims, SMALL[2])
    with pytest.raises(BadValue, match="an order"):
        measured(claims, SMALL[VICTIM], np.zeros(len(SMALL[VICTIM].entities), int))


def test_a_federation_that_kept_nothing_cannot_be_attacked():
    run = trained("fede", federation={"keep_every": 5})
    with pytest.raises(TacitError, match="keep_every"):
        attack_reconstruction(run)
