"""Providers by votes: who teaches, what is asked, what that costs, and that nothing else of the triples leaves."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from tacit import Graph, write_graph
from tacit.clinic import clinic
from tacit.draws import Purpose, Secret, Stream
from tacit.errors import BadValue, TacitError
from tacit.federation.keys import make
from tacit.federation.letters import Away
from tacit.ledger import teachers as module
from tacit.ledger.cbor import CID
from tacit.ledger.process import provide
from tacit.ledger.provider import Provider, Terms, first_tables
from tacit.ledger.teachers import FALSE, FEW, HELD, Pate, PateProvider, Teachers, alike, questions, renamed
from tacit.models.model import Model
from tacit.privacy.accountant import epsilon
from tacit.privacy.audit import lower_bound
from tacit.privacy.budget import Holding
from tacit.privacy.events import Gaussian, Segment
from tacit.privacy.pate import GaussianVotes
from tacit.training import Diverged, Fit
from test_cli import tacit
from test_provider import WHO, a_ledger, newest, private, provider, settings

SMALL = clinic("small", 1)
MINE = SMALL[0]
PUBLIC = Graph.from_triples(SMALL[1].named("train"), SMALL[1].named("valid"))
MODEL = CID.of(b"model", 0x71)
FEWER = Pate(teachers=10, votes=20, sigma=4.0)


def voting(ledger, n=0, *, graph=MINE, public=PUBLIC, pate=FEWER, wanted=None, holding=None, candidates=None, **terms):
    chosen = Terms(**{"epochs": 1, "updates": 3, "validation": "none", **terms})
    return PateProvider(ledger, "drugs", WHO[n], graph, public, wanted or settings(), pate, chosen, number=n,
                        holding=holding, candidates=candidates)  # fmt: skip


def teaching(graph, pate=FEWER, wanted=None):
    return Teachers(graph, PUBLIC, wanted or settings(), MODEL, pate)


def weights(ledger):
    return [node.update.weights for node in ledger.dag.branch("drugs").nodes]


# -- what is asked -----------------------------------------------------------------------------------------------------


def test_questions_are_new_and_look_like_facts():
    found = questions(PUBLIC, 200, seed=3)
    assert found.shape == (200, 3)
    facts = {tuple(row) for row in PUBLIC.statements.triples.tolist()}
    asked = [tuple(row) for row in found.tolist()]
    assert len(set(asked)) == 200
    assert not facts & set(asked)
    train = PUBLIC.train.triples.tolist()
    heads, tails = {(r, h) for h, r, _ in train}, {(r, t) for _, r, t in train}
    for h, r, t in asked:
        assert (r, h) in heads
        assert (r, t) in tails
        assert any(r == fact[1] and (h == fact[0] or t == fact[2]) for fact in train)
    assert np.array_equal(found, questions(PUBLIC, 200, seed=3))
    assert not np.array_equal(found, questions(PUBLIC, 200, seed=4))


def test_candidates_are_asked_in_an_order_that_is_drawn():
    own = [("asks", "treats", "this")]
    public = Graph.from_triples([("asks", "treats", "that"), ("he", "treats", "this"), ("he", "likes", "that")])
    given = Graph.from_triples([*own, ("asks", "treats", "that"), ("he", "treats", "that"), ("asks", "likes", "this")])
    found = questions(public, 3, 0, candidates=given)
    named = {(public.entities[h], public.relations[r], public.entities[t]) for h, r, t in found.tolist()}
    assert named == set(given.named("train")) - set(public.named("train"))
    with pytest.raises(TacitError, match="there are 3 questions"):
        questions(public, 4, 0, candidates=given)
    with pytest.raises(TacitError, match="does not have: no such name: 'she'"):
        questions(public, 1, 0, candidates=Graph.from_triples([("she", "treats", "this")]))


def test_a_public_graph_that_has_no_room_says_so():
    with pytest.raises(TacitError, match="has room for 0 questions"):
        questions(Graph.from_triples([("a", "r", "b"), ("b", "q", "a")]), 1, 0)


@given(st.integers(0, 2**32), st.lists(st.integers(0, len(PUBLIC.train) - 1), min_size=1, max_size=20))
def test_what_looks_alike_has_an_end_of_another_fact(seed, rows):
    facts = PUBLIC.train.triples.astype(np.int64)
    for (h, r, t), (x, s, y) in zip(facts[rows], alike(facts[rows], facts, Stream(seed, Purpose.TEST)), strict=True):
        assert s == r
        assert (x == h and (facts[:, 1:] == (r, y)).all(1).any()) or (y == t and (facts[:, :2] == (x, r)).all(1).any())


# -- who answers -------------------------------------------------------------------------------------------------------


def slow_answers(graph, pate, wanted, asked):
    """Each teacher by itself, in loops over names."""
    names = {"entity": sorted({*PUBLIC.entities, *graph.entities}),
             "relation": sorted({*PUBLIC.relations, *graph.relations})}  # fmt: skip
    who = teaching(graph, pate, wanted)
    everything = who.graph
    assert list(everything.entities) == names["entity"]
    assert list(everything.relations) == names["relation"]
    assert list(everything.named("train")) == list(graph.named("train"))
    facts = [tuple(row) for row in renamed(PUBLIC.train.triples, PUBLIC, everything).tolist()]
    begin = Fit(wanted, [Graph(everything.entities, everything.relations, *(
        replace(everything.train, triples=np.array(sorted(rows), np.int32).reshape(-1, 3)) for rows in (facts, [], [])
    ))], numbers=[0], tables=first_tables(wanted.scorer, wanted.dim, MODEL, everything))  # fmt: skip
    for _ in range(wanted.training.epochs):
        begin.epoch()
    rows = renamed(asked, PUBLIC, everything).tolist()
    found = np.zeros((pate.teachers, len(rows)), bool)
    for teacher in range(pate.teachers):
        mine = [tuple(t) for t, s in zip(everything.train.triples.tolist(), who.shard, strict=True) if s == teacher]
        out = {tuple(t) for t, h in zip(everything.train.triples.tolist(), who.held, strict=True) if h}
        learnt, held = [t for t in mine if t not in out], [t for t in mine if t in out]
        tables = begin.cohort.tables
        if learnt:
            own = replace(everything, train=replace(everything.train, triples=np.array(learnt, np.int32)))
            fit = Fit(wanted, [own], numbers=[teacher], tables=tables.like(torch.clone))
            for _ in range(wanted.training.epochs):
                fit.epoch()
            tables = fit.cohort.tables
        model = Model(wanted.scorer, tables)

        def score(triple, model=model):
            return float(model.score(*torch.tensor([triple]).unbind(1)).double())

        held = [t for t in held if t[1] in {fact[1] for fact in facts}]
        copies = np.array([t for t in held for _ in range(FALSE)], np.int64).reshape(-1, 3)
        stream = Stream(wanted.seed, Purpose.QUESTION, 0, (1 << 31) + teacher)
        false = [tuple(t) for t in alike(copies, np.array(facts), stream).tolist()]
        false = [t for t in false if t not in {*facts, *mine}]

        def cut(true, false):
            if not true or not false:
                return np.inf
            values = sorted({*true, *false})
            cuts = [-np.inf, *((a + b) / 2 for a, b in itertools.pairwise(values)), np.inf]
            return max(cuts, key=lambda c: (sum(x >= c for x in true) + sum(x < c for x in false), -c))

        for place, question in enumerate(rows):
            r = question[1]
            here = [score(t) for t in held if t[1] == r], [score(t) for t in false if t[1] == r]
            enough = len(here[0]) >= FEW and here[1]
            bar = cut(*here) if enough else cut([score(t) for t in held], [score(t) for t in false])
            found[teacher, place] = score(question) >= bar
    return found


@pytest.mark.slow
@pytest.mark.parametrize("teachers", [3, 40])
def test_answers_are_those_of_each_teacher_alone(teachers, monkeypatch):
    wanted, pate = settings(training={"epochs": 2, "batch": 64, "device": "cpu"}), Pate(teachers=teachers, sigma=1.0)
    asked = questions(PUBLIC, 40, 5)
    monkeypatch.setattr("tacit.peers.learner.AT_ONCE", 10_000)  # several, but not all of them, at once
    found = teaching(MINE, pate, wanted).answers(asked).numpy()
    assert np.array_equal(found, slow_answers(MINE, pate, wanted, asked))
    assert 0 < found.mean() < 1


GRAPH = replace(MINE, train=MINE.train.at(np.arange(0, len(MINE.train), 4)))
ASKED = questions(PUBLIC, 60, 1)


def learning(**changed):
    """Settings with which a triple leaves a trace."""
    quick = {"training": {"epochs": 5, "batch": 32, "device": "cpu"}, "optimizer": {"learning_rate": 0.1}}
    return settings(**quick, **changed)


@hypothesis_settings(max_examples=12, deadline=None)
@given(st.integers(0, len(GRAPH.train) - 1), st.integers(2, 12), st.integers(0, 2**32))
def test_one_triple_changes_one_teacher_at_most(row, teachers, seed):
    rows = np.ones(len(GRAPH.train), bool)
    rows[row] = False
    pate, wanted = Pate(teachers=teachers, sigma=1.0), learning(seed=seed)
    whole, less = (teaching(graph, pate, wanted) for graph in (GRAPH, replace(GRAPH, train=GRAPH.train.at(rows))))
    assert np.array_equal(whole.shard[rows], less.shard)
    assert np.array_equal(whole.held[rows], less.held)
    one, two = whole.answers(ASKED), less.answers(ASKED)
    changed = np.flatnonzero((one != two).any(1).numpy())
    assert set(changed.tolist()) <= {int(whole.shard[row])}
    assert int((one.sum(0) - two.sum(0)).abs().max()) <= 1


def test_a_triple_does_change_its_teacher():
    """Else the test above would say nothing."""
    wanted = learning()
    whole, changed = teaching(GRAPH, wanted=wanted).answers(ASKED), 0
    for row in range(0, len(GRAPH.train), len(GRAPH.train) // 10):
        rows = np.arange(len(GRAPH.train)) != row
        less = teaching(replace(GRAPH, train=GRAPH.train.at(rows)), wanted=wanted).answers(ASKED)
        changed += not torch.equal(whole, less)
    assert changed > 3


def test_a_teacher_is_made_of_its_shard_alone():
    """All triples of the others may be others: what one says stays."""
    whole = teaching(MINE)
    keep = whole.shard == 4
    alone = teaching(replace(MINE, train=MINE.train.at(keep)))
    said, by_itself = whole.answers(ASKED), alone.answers(ASKED)
    assert torch.equal(said[4], by_itself[4])
    assert not by_itself[[each for each in range(10) if each != 4]].any()  # who has no triples says no
    assert 0 < whole.held[keep].mean() < 2 / HELD


def test_a_teacher_that_diverges_says_no_and_changes_no_other(monkeypatch):
    from tacit.peers import learner

    before, taught = teaching(MINE).answers(ASKED), learner._taught
    spoilt = int(before.any(1).nonzero()[0])

    def diverging(wanted, graphs, first):
        if spoilt in graphs:
            raise Diverged("the loss is not finite", 1, 1, wanted)
        return taught(wanted, graphs, first)

    monkeypatch.setattr(learner, "_taught", diverging)
    after = teaching(MINE).answers(ASKED)
    assert not after[spoilt].any()
    others = [each for each in range(10) if each != spoilt]
    assert torch.equal(before[others], after[others])


# -- what it costs -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_what_is_claimed_is_every_vote_and_no_more_than_was_asked_for():
    ledger = a_ledger()
    one = voting(ledger, pate=Pate(teachers=10, votes=20, epsilon=6.0))
    for update in range(3):
        one.step()
        assert newest(ledger).update.privacy.releases == (Segment(Gaussian(one.sigma), 20),)
        assert one.ballot.votes == 20 * (update + 1)
    assert one.step().ended == "all 3 updates are published"
    [(unit, releases)] = ledger.dag.claimed(WHO[0].public).items()
    assert unit == "one triple of a party's training triples"
    assert releases == (Segment(Gaussian(one.sigma), 60),) == one.ballot.spent == one.ballot.reserved
    assert 5.9 < epsilon(releases, 1e-5) <= 6
    said = one.statement()
    assert said["epsilon"] == epsilon(releases, 1e-5)
    assert said["guarantee"] == "differential privacy"
    assert module.PUBLIC_LIST in said["not_covered"]
    # One Gaussian of the whole vector of counts: the norm of what a triple changes is the root of their number.
    assert epsilon(releases, 1e-5) == pytest.approx(epsilon([Segment(Gaussian(one.sigma / 60**0.5))], 1e-5), rel=1e-3)


@pytest.mark.parametrize("counts", [1.0, 0.4], ids=["as claimed", "too little noise"])
def test_votes_tell_no_more_than_is_claimed(counts):
    """Two worlds in which one teacher answers every question in another way; whoever looks counts the yeses."""
    many, runs, teachers = 25, 20_000, 10
    claim = GaussianVotes(10.0, many, Secret.simulation(0))
    claimed = epsilon(claim.reserved, 1e-5)
    ballot = GaussianVotes(10.0 * counts, 4 * runs * many, Secret.simulation(1))
    yeses = []
    for ayes in (teachers // 2 + 1, teachers // 2):
        said = ballot.labels(torch.full((2 * runs * many,), ayes), teachers)
        yeses.append(said.reshape(-1, many).sum(1).double().numpy())
    found = lower_bound(yeses[0], yeses[1], 1e-5, 0.99)
    assert found > 0.2 * claimed
    assert (found > claimed) == (counts < 1)


def test_a_simulation_claims_nothing():
    ledger = a_ledger()
    one = voting(ledger, noise="seeded")
    one.step()
    assert newest(ledger).update.privacy is None
    assert one.statement()["epsilon"] is None


def test_it_stops_before_it_overspends_and_pays_for_the_private_graph(tmp_path):
    holding = Holding.begin("north", epsilon=4.0, delta=1e-5, home=tmp_path)
    ledger = a_ledger()
    one = voting(ledger, pate=Pate(teachers=10, votes=10, sigma=8.0), updates=40, holding=holding)
    looks = [one.step()]
    while looks[-1].ended is None:
        looks.append(one.step())
    assert 2 < len(looks) < 40
    assert "of the budget of the holding 'north'" in looks[-1].ended
    assert epsilon(Holding.load("north", tmp_path).spent, 1e-5) <= 4.0
    assert one.protected is MINE


def test_votes_are_fixed_in_advance():
    one = voting(a_ledger())
    one.ballot.votes = one.ballot.most - 19
    with pytest.raises(TacitError, match="no votes are left"):
        one.step()


# -- what leaves -------------------------------------------------------------------------------------------------------


def test_nothing_leaves_but_what_was_voted():
    """Other triples, the same counts: the same bytes."""
    found = []
    for graph in (MINE, SMALL[2]):
        ledger = a_ledger()
        one = voting(ledger, graph=graph, noise="seeded")
        one.__dict__["ayes"] = torch.arange(60) % 11
        for _ in range(3):
            one.step()
        found.append(weights(ledger))
    assert found[0] == found[1]
    assert len(set(found[0])) == 3


def test_names_that_only_the_private_graph_has_are_nowhere_in_what_is_published():
    ledger = a_ledger()
    voting(ledger).step()
    [cid] = weights(ledger)
    rows = ledger.rows(newest(ledger))
    assert rows.entities == tuple(PUBLIC.entities)
    data = ledger.blobs.get(cid, 1 << 24)
    mine = {*MINE.entities} - {*PUBLIC.entities}
    assert mine
    lines = set(data.replace(b"\\n", b"\n").replace(b'"', b"\n").split(b"\n"))
    assert not {name.encode() for name in mine} & lines
    assert PUBLIC.entities[0].encode() in lines


def test_a_student_learns_what_was_answered_yes():
    one = voting(a_ledger())
    labels = np.arange(20) % 3 == 0
    one.ballot.labels = lambda ayes, teachers: torch.from_numpy(labels)
    one.step()
    trained = {tuple(row) for row in one.learner.graph.train.triples.tolist()}
    facts = {tuple(row) for row in PUBLIC.train.triples.tolist()}
    assert trained - facts == {tuple(row) for row in one.asked[:20][labels].tolist()}
    assert facts < trained


def test_public_validation_decides_and_nothing_private():
    ledger = a_ledger()
    one = voting(ledger, validation="public")
    assert one.learner.graph.valid == PUBLIC.valid
    assert 0 < one.step().score < 1


def test_shares_that_have_to_agree():
    few, many = (GaussianVotes(0.01, 10, Secret.simulation(0), share=share) for share in (0.3, 0.7))
    assert few.labels(torch.tensor([2, 4, 6, 8]), 10).tolist() == [False, True, True, True]
    assert many.labels(torch.tensor([2, 4, 6, 8]), 10).tolist() == [False, False, False, True]


# -- coming back -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("validation", ["none", "public"])
def test_it_goes_on_exactly(validation):
    """Whether it is started anew for each update or not, and whoever else is there: the same bytes."""
    found = []
    for anew in (False, True):
        ledger = a_ledger()
        one = voting(ledger, noise="seeded", validation=validation)
        other = provider(ledger, 1, updates=3)
        for _ in range(3):
            one.step()
            other.step()
            if anew:
                one = voting(ledger, noise="seeded", validation=validation)
        assert one.step().ended == "all 3 updates are published"
        assert one.ballot.votes == 60
        found.append(weights(ledger))
    assert found[0] == found[1]


def test_an_update_that_was_not_published_is_not_voted_on_twice(monkeypatch):
    ledger = a_ledger()
    one = voting(ledger)
    monkeypatch.setattr(one, "publish", lambda *words: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        one.step()
    monkeypatch.undo()
    labels = one.labels.copy()
    one.step()
    assert np.array_equal(one.labels, labels)
    assert one.ballot.votes == 20


@pytest.mark.parametrize("fault", [KeyboardInterrupt, Away])
def test_an_update_that_was_kept_is_published_with_its_labels_once(tmp_path, monkeypatch, fault):
    """Killed between the kept update and its record, or a ledger that goes away there: as if nothing had happened."""
    found = []
    for fails in (False, True):
        ledger, folder = a_ledger(), tmp_path / str(fails)
        one, append, times = voting(ledger, noise="seeded"), ledger.log.append, []

        def failing(entries, append=append, times=times):
            times.append(len(entries))
            if len(times) == 2:
                raise fault
            return append(entries)

        if fails:
            monkeypatch.setattr(ledger.log, "append", failing)
        try:
            ended = provide(one, folder, rest=0, patience=0)
        except KeyboardInterrupt:
            assert (folder / "private/update").exists()
            one = voting(ledger, noise="seeded")
            ended = provide(one, folder, rest=0, patience=0)
        assert ended == "all 3 updates are published"
        assert len(one.labels) == one.ballot.votes == 60
        assert voting(ledger, noise="seeded").labels.tolist() == one.labels.tolist()
        found.append(weights(ledger))
    assert found[0] == found[1]


def test_it_does_not_go_on_with_other_questions():
    ledger = a_ledger()
    voting(ledger).step()
    for other in ({"wanted": settings(seed=5)}, {"updates": 4}):
        with pytest.raises(TacitError, match="not made of votes on these questions"):
            voting(ledger, **other)
    with pytest.raises(TacitError, match="trained with other settings"):
        voting(ledger, pate=replace(FEWER, sigma=5.0))
    with pytest.raises(TacitError, match="other names"):
        Provider(ledger, "drugs", WHO[0], MINE, settings(), Terms(validation="none"))
    plain = a_ledger()
    provider(plain, graph=PUBLIC).step()
    with pytest.raises(TacitError, match="not made of votes"):
        voting(plain)


# -- what makes no sense -----------------------------------------------------------------------------------------------


def test_what_makes_no_sense_is_refused():
    ledger = a_ledger()
    marked = replace(PUBLIC, train=replace(PUBLIC.train, confidential=np.arange(len(PUBLIC.train)) == 7))
    empty = replace(PUBLIC, train=PUBLIC.train.at(np.zeros(len(PUBLIC.train), bool)))
    unjudged = replace(PUBLIC, valid=PUBLIC.valid.at(np.zeros(len(PUBLIC.valid), bool)))
    for words, match in (
        ({"wanted": private()}, "leave out privacy.name"),
        ({"validation": "own"}, "validation is public or none"),
        ({"public": marked}, "marked confidential"),
        ({"candidates": marked}, "marked confidential"),
        ({"public": empty}, "no training triples"),
        ({"public": unjudged, "validation": "public"}, "no validation triples"),
        ({"wanted": settings(scorer={"name": "tucker", "dim": 4})}, "weights beside them"),
    ):
        with pytest.raises(TacitError, match=match):
            voting(ledger, **words)


@pytest.mark.parametrize(
    "wrong",
    [{"teachers": 1}, {"votes": 0}, {"epsilon": 1.0}, {"sigma": None}, {"delta": 1.0}, {"agree": 0.0}],
    ids=str,
)
def test_votes_that_make_no_sense(wrong):
    with pytest.raises(BadValue):
        Pate(**{"sigma": 1.0, **wrong})


# -- as a process ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_command(tmp_path):
    make("north", tmp_path)
    write_graph(PUBLIC, tmp_path / "public")
    tacit("ledger", "init", "ledger", "--key", "north.key", "--open", "--model", "drugs", "--entity", 4, cwd=tmp_path)
    words = ["provider", "start", "ledger", "clinic-small", "--party", "riverside", "--key", "north.key", "--trainer",
             "pate", "--public", "public", "--epsilon", 8, "--teachers", 10, "--votes", 15, "--updates", 2,
             "--first", 1, "--epochs", 1, "--patience", 0, "--out", "run", "--json"]  # fmt: skip
    told = json.loads(tacit(*words, cwd=tmp_path).stdout)
    assert told["published"] == len(told["updates"]) == 2
    assert 7.9 < told["epsilon"] <= 8
    again = json.loads(tacit(*words, cwd=tmp_path).stdout)
    assert (again["published"], again["updates"]) == (2, [])
    said = json.loads((tmp_path / "run/shareable/privacy.json").read_text())
    assert said["releases"][0][0]["count"] == 30
    assert {path.name for path in (tmp_path / "run/shareable").iterdir()} == {"privacy.json"}
    tacit("ledger", "verify", "ledger", cwd=tmp_path)
