"""Federations under secure sums and private names: the same learning, with a server that learns little."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import tacit
from tacit.cli import app
from tacit.clinic import clinic
from tacit.draws import Secret
from tacit.errors import Refused, TacitError
from tacit.federated import FederatedRun, federate
from tacit.federation.aggregation import CircularMean, OwnerMean
from tacit.federation.keys import Identity, Roster
from tacit.federation.messages import SERVER
from tacit.federation.secure import SumFailed
from tacit.federation.secured import Secured
from tacit.federation.star import Star
from tacit.federation.transcript import Transcript
from tacit.federation.transport import InProcess
from tacit.federation.vocabulary import open_union, private_union, usual_bound
from tacit.graph import Graph, Vocab
from tacit.parties import given as given_parties
from tacit.parties import partition, pool
from tacit.privacy.shared import shared_counts
from tacit.settings import Settings
from tacit.training import Fit

SMALL = clinic("small")
FIVE = partition(pool(SMALL), "triples", 5, seed=2)
QUICK = {"scorer": {"dim": 4}, "negatives": {"count": 4}, "training": {"batch": 64, "device": "cpu"},
         "optimizer": {"learning_rate": 0.02}}  # fmt: skip


def star(
    how, parties=SMALL, part="relation", lost=lambda message: False, scorer="transe", keep=False, more=None, **options
):
    fit = Fit(Settings.make(tacit.settings.combine(QUICK, {"scorer": {"name": scorer}}, more or {})), parties.graphs)
    transcript = Transcript(lambda record: keep)
    made = Star(fit, part, how, transcript, local_epochs=1, **options)
    made.transport.lost = lost
    return made


def secured(parties=SMALL, part="relation", inner=None, **options):
    return Secured.of(inner or OwnerMean(), parties.names, part, **options)


def shared_rows(federation, party):
    """A party's rows by name: places differ where names are agreed on in private."""
    graph, part = federation.fit.graphs[party], federation.part
    names = (graph.entities if part == "entity" else graph.relations).names
    return dict(zip(names, federation.rows(party).clone(), strict=True))


# -- the same learning -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["entity", "relation"])
@pytest.mark.parametrize("fraction", [1.0, 0.7])
def test_rows_are_those_of_the_plain_mean(part, fraction):
    how = secured(part=part, rounds=2) if fraction == 1 else secured(part=part, rounds=1, expected=2)
    plain, secret = star(OwnerMean(), part=part, fraction=fraction), star(how, part=part, fraction=fraction)
    for number in range(1, 6):
        assert plain.round().trained == secret.round().trained
        for each in (plain, secret):
            each.give(range(3))
        chosen = plain.center.sampled(number)
        together = [i for i in range(plain.total) if sum(i in plain.places[p].tolist() for p in chosen) > 1]
        apart = (plain.table - secret.table)[together].abs().max()
        assert apart < 100 * number * how.fixed.step, number
        if fraction < 1:
            break  # rows that only one of a round's parties has stay with it: from here on they differ
        for party in range(3):
            apart = (plain.rows(party) - secret.rows(party)).abs().max()
            assert apart < 100 * number * how.fixed.step, (number, party)
    assert how.beyond == 0


def test_angles_are_averaged_as_directions():
    wide = {"scorer": {"dim": 64}}
    plain = star(CircularMean(), scorer="rotate", more=wide)
    secret = star(secured(inner=CircularMean()), scorer="rotate", more=wide)
    assert secret.aggregation.inner.radians == plain.aggregation.radians > 10
    for _ in range(2):
        plain.round()
        secret.round()
    torch.testing.assert_close(plain.table, secret.table, atol=1e-4, rtol=1e-4)


def test_numbers_beyond_the_range_are_counted(caplog):
    how = secured(limit=0.01)
    federation = star(how)
    with caplog.at_level("WARNING"):
        report = federation.round()
    assert report.beyond == how.beyond > 0
    assert [f"{report.beyond} numbers of round 1" in record.getMessage() for record in caplog.records] == [True]
    sent = federation.table[(federation.center.changed == 1)]
    assert len(sent)
    assert float(sent.abs().max()) <= 0.01 + how.fixed.step


def test_an_agreement_serves_some_rounds():
    federation = star(secured(rounds=3))
    for _ in range(7):
        federation.round()
    kinds = Counter((r.kind, r.round) for r in federation.transport.transcript.records if r.sender == SERVER)
    assert [number for number in range(1, 8) if kinds["members", number]] == [1, 4, 7]
    assert [number for number in range(1, 8) if kinds["owners", number]] == [1, 4, 7]


# -- who drops out -----------------------------------------------------------------------------------------------------


def losing(kind, sender, round_, times=1):
    """Lose one party's message of a kind in a round, the first or a later one."""
    seen = []

    def lost(message):
        hit = (message.kind, message.sender, message.round) == (kind, sender, round_)
        seen.extend([1] if hit else [])
        return hit and len(seen) == times

    return lost


@pytest.mark.parametrize("kind", ["keys", "shares", "masked", "signed", "opened"])
def test_a_party_that_drops_out_is_left_out_and_comes_back(kind):
    """Party 4 is lost in round 1 of three: in it, its rows do not count where it had not sent them yet."""
    federation = star(secured(FIVE, threshold=3), FIVE, lost=losing(kind, 4, 1))
    assert federation.round().absent == (4,)
    counted = 5 if kind in ("signed", "opened") else 4
    rows = [shared_rows(federation, party) for party in range(5)]
    checked = 0
    for party in range(4):
        for place, name in zip(federation.places[party].tolist(), FIVE[party].relations.names, strict=True):
            owners = [p for p in range(4) if name in rows[p]]
            if sum(name in each for each in rows[:counted]) >= 2:
                mean = torch.stack([rows[p][name] for p in owners]).mean(0)
                assert (federation.table[place] - mean).abs().max() < 1e-5, (kind, name)
                checked += 1
    assert checked
    for _ in range(2):
        assert federation.round().trained == (0, 1, 2, 3, 4)
    last = [r for r in federation.transport.transcript.records if (r.kind, r.round, r.sender) == ("masked", 3, 4)]
    assert last, "it is there again"


def test_a_loss_in_the_second_sum_counts_who_was_heard():
    """Ownership was counted with party 4; its rows were lost: the mean is over the others."""
    federation = star(secured(FIVE, threshold=3), FIVE, lost=losing("masked", 4, 1, times=2))
    federation.round()
    rows = [shared_rows(federation, party) for party in range(5)]
    for place, name in zip(federation.places[0].tolist(), FIVE[0].relations.names, strict=True):
        owners = [p for p in range(4) if name in rows[p]]
        if len(owners) >= 2:
            mean = torch.stack([rows[p][name] for p in owners]).mean(0)
            assert (federation.table[place] - mean).abs().max() < 1e-5


@pytest.mark.parametrize("kind", ["keys", "shares", "masked", "signed", "opened"])
def test_too_few_and_no_row_moves(kind):
    def lost(message):
        return message.kind == kind and message.sender in (2, 3, 4) and message.round == 2

    federation = star(secured(FIVE, threshold=4, rounds=1), FIVE, lost=lost)
    federation.round()
    before, changed = federation.table.clone(), federation.center.changed.clone()
    with pytest.raises(SumFailed, match="needed"):
        federation.round()
    assert torch.equal(federation.table, before)
    assert torch.equal(federation.center.changed, changed)
    assert federation.rounds == 1


# -- rows that one party has -------------------------------------------------------------------------------------------


def test_a_row_that_one_party_has_is_not_sent_and_stays_with_it():
    one = Graph.from_triples([("a", "ours", "b"), ("b", "both", "c"), ("c", "ours", "a"), ("a", "both", "c")])
    two = Graph.from_triples([("a", "both", "b"), ("b", "both", "c"), ("c", "both", "a"), ("b", "theirs", "a")])
    parties = given_parties({"one": one, "two": two})
    plain, secret = star(OwnerMean(), parties), star(secured(parties), parties)
    begun = secret.table.clone()
    for _ in range(3):
        plain.round(), secret.round()
    for each in (plain, secret):
        each.give([0, 1])
    for party in (0, 1):
        torch.testing.assert_close(plain.rows(party), secret.rows(party), atol=1e-5, rtol=1e-5)
    alone = [i for i in range(3) if sum(i in ids.tolist() for ids in secret.places) == 1]
    assert len(alone) == 2
    assert torch.equal(secret.table[alone], begun[alone]), "the server never saw them"


def owning():
    """Three parties; each has a relation of its own."""
    names = ("one", "two", "three")
    return given_parties({
        name: Graph.from_triples([("a", "both", "b"), ("b", "both", "c"), ("c", f"of {name}", "a"), ("a", "both", "c")])
        for name in names
    })  # fmt: skip


@pytest.mark.parametrize("vocabulary", ["open", "private"])
@pytest.mark.parametrize("kind", ["keys", "shares", "masked", "signed", "opened"])
def test_who_drops_out_keeps_the_rows_that_it_alone_has(kind, vocabulary):
    parties = owning()
    federation = star(
        secured(parties, threshold=2, rounds=1, least=2), parties, lost=losing(kind, 2, 2), vocabulary=vocabulary
    )
    federation.round()
    federation.give(range(3))
    assert federation.round().absent == (2,)
    before = shared_rows(federation, 2)["of three"]
    federation.give(range(3))
    after = shared_rows(federation, 2)
    assert torch.equal(after["of three"], before)
    place = federation.places[2].tolist()[parties[2].relations.id("both")]
    assert torch.equal(after["both"], federation.table[place]), "what others have as well is taken"


def test_what_others_made_of_a_row_is_taken_by_who_once_had_it_alone():
    """Sampled parties: who was the only owner in its round takes the row once two others have made it anew."""
    both = [("a", "both", "b"), ("b", "both", "c"), ("c", "both", "a")]
    parties = given_parties({
        "one": Graph.from_triples([*both, ("a", "rare", "b")]), "two": Graph.from_triples([*both, ("a", "rare", "c")]),
        "three": Graph.from_triples([*both, ("b", "rare", "c")]), "four": Graph.from_triples(both),
    })  # fmt: skip
    turns = [[0, 3], [1, 2], [0, 3]]
    federation = star(secured(parties, rounds=1, expected=2), parties, fraction=0.5)
    federation.sampled = lambda number: turns[number - 1]
    federation.round()
    federation.give(range(4))
    place = federation.places[0].tolist()[parties[0].relations.id("rare")]
    assert not torch.equal(shared_rows(federation, 0)["rare"], federation.table[place]), (
        "it was alone, and keeps its own"
    )
    federation.round()
    federation.give(range(4))
    assert torch.equal(shared_rows(federation, 0)["rare"], federation.table[place])


# -- names -------------------------------------------------------------------------------------------------------------


@settings(max_examples=15, deadline=None)
@given(st.lists(st.sets(st.text("abcd", min_size=1, max_size=3), min_size=1, max_size=8), min_size=2, max_size=5))
def test_the_private_union_is_the_union(names):
    vocabularies = [Vocab(sorted(each)) for each in names]
    labels = tuple(f"party-{i}" for i in range(len(names)))
    how = Secured.of(OwnerMean(), labels, "entity")
    total, places, _ = private_union(vocabularies, "entity", InProcess(Transcript()), *how.for_one_sum())
    plain_total, plain_places = open_union(vocabularies, "entity", InProcess(Transcript()))
    assert total == plain_total == len(set().union(*names))
    place = {}
    for vocabulary, ids in zip(vocabularies, places, strict=True):
        assert len(ids) == len(vocabulary)
        for name, at in zip(vocabulary.names, ids.tolist(), strict=True):
            assert place.setdefault(name, at) == at
    assert sorted(place.values()) == list(range(total))
    assert [len(ids) for ids in places] == [len(ids) for ids in plain_places]


def test_a_party_with_more_names_than_the_bound_is_told_so():
    how = secured()
    with pytest.raises(TacitError, match="bound"):
        star(how, vocabulary="private", bound=2)


def test_the_usual_bound_holds_everyone():
    for sizes in ([1, 3], [4, 4], [255], [256, 1]):
        vocabularies = [Vocab(str(i) for i in range(size)) for size in sizes]
        assert usual_bound(vocabularies) >= max(sizes) > usual_bound(vocabularies) // 2


def test_private_names_need_secure_sums():
    with pytest.raises(TacitError, match="added up securely"):
        star(OwnerMean(), vocabulary="private")
    with pytest.raises(TacitError, match="secure = true"):
        federate(SMALL, "fedr", settings={"federation": {"vocabulary": "private"}})


def swapped():
    """Two federations in which one relation is held by different parties, and all else is as large."""

    def graph(own, entities):
        a, b, c = entities
        return Graph.from_triples([(a, "both", b), (b, "both", c), (c, "both", a), (a, own, c), (b, "also", a)])

    first = {"one": graph("x", "abc"), "two": graph("x", "def"), "three": graph("y", "ghi")}
    second = {"one": graph("y", "abc"), "two": graph("x", "def"), "three": graph("x", "ghi")}
    return given_parties(first), given_parties(second)


def test_a_server_cannot_tell_who_holds_which_relation():
    """All that its messages have beside random bits: kinds, ends, sizes, and the counts of owners, in any order."""
    seen = []
    for parties in swapped():
        federation = star(secured(parties, least=2), parties, vocabulary="private", keep=True)
        for _ in range(2):
            federation.round()
        transcript = federation.transport.transcript
        met = [r for r in transcript.records if SERVER in (r.sender, r.receiver)]
        owners = [sorted(m.arrays["words"].tolist()) for m in transcript.payloads.values() if m.kind == "owners"]
        heard = [m.arrays["members"].tolist() for m in transcript.payloads.values() if m.kind == "heard"]
        shapes = [(r.kind, r.sender, r.receiver, r.round, r.phase, r.size) for r in met]
        seen.append((shapes, owners, heard, len(federation.table)))
        told = [m for m in transcript.payloads.values() if m.kind in ("names", "places", "counts")]
        assert not told
        up = {m.sender: set() for m in transcript.payloads.values() if m.kind == "masked"}
        for message in transcript.payloads.values():
            if message.kind == "masked":
                up[message.sender].add(tuple(message.arrays["words"].shape))
        assert len(set(map(frozenset, up.values()))) == 1, "every party sends as much as every other"
    assert seen[0] == seen[1]


@pytest.mark.parametrize("what", ["owners", "union"])
def test_parties_that_are_told_different_things_open_nothing(what):
    """A server tells all but party 0 that no row has owners: they would leave theirs out, and the sum be party 0's."""

    class Splitting(InProcess):
        def send(self, messages):
            for m in messages:
                if m.kind == what == "owners" and m.receiver > 0:
                    m = replace(m, arrays={"words": torch.zeros_like(m.arrays["words"])})
                if m.kind == what == "union" and m.receiver == 0:
                    more = torch.cat([m.arrays["keys"], torch.full((1, 16), 255, dtype=torch.uint8)])
                    m = replace(m, arrays={"keys": more})
                super().send([m])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tacit.federation.star.InProcess", Splitting)
        federation = star(secured(FIVE), FIVE, vocabulary="private")
        before = federation.table.clone()
        with pytest.raises(Refused, match="signature"):
            federation.round()
    assert torch.equal(federation.table, before)
    assert not [
        r for r in federation.transport.transcript.records if r.kind == "opened" and r.round == 1 and r.phase > 5
    ]


def test_counts_that_cannot_be_are_refused():
    class Boasting(InProcess):
        def send(self, messages):
            super().send([
                replace(m, arrays={"words": m.arrays["words"].to(torch.int64).add(9).to(torch.uint32)})
                if m.kind == "owners" else m for m in messages
            ])  # fmt: skip

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tacit.federation.star.InProcess", Boasting)
        with pytest.raises(Refused, match="more parties have than there are"):
            star(secured()).round()


def test_the_server_of_a_blind_star_holds_no_places():
    federation = star(secured(), vocabulary="private")
    caught = []
    inner = federation.aggregation.advance
    object.__setattr__(
        federation.aggregation,
        "advance",
        lambda phase, shared, inbox: (caught.append(shared), inner(phase, shared, inbox))[1],
    )
    federation.round()
    assert caught
    assert all(len(ids) == 0 for shared in caught for ids in shared.owners.values())


def test_a_blind_star_goes_on_with_its_places():
    one = star(secured(), vocabulary="private")
    for _ in range(2):
        one.round()
    state = {name: tensor.clone() for name, tensor in (one.fit.state() | one.state()).items()}
    two = star(secured(), vocabulary="private")
    two.fit.load(state)
    two.load(state)
    for each in (one, two):
        each.round()
        each.give(range(3))
    for party in range(3):
        torch.testing.assert_close(one.rows(party), two.rows(party), atol=1e-5, rtol=1e-5)


def test_a_list_that_the_server_puts_in_is_refused():
    """It would have names that it guesses turned into pseudonyms."""
    from tacit.federation.sets import points_of

    guesses = points_of(["diabetes", "insulin"], b"guess")

    class Guessing(InProcess):
        def send(self, messages):
            for m in messages:
                if m.kind == "points" and m.sender == SERVER:
                    points = m.arrays["points"].clone()
                    points[:2] = torch.frombuffer(bytearray(guesses), dtype=torch.uint8).reshape(2, 32)
                    m = replace(m, arrays={**m.arrays, "points": points})
                super().send([m])

    with pytest.raises(Refused, match="signature"):
        private_union(
            [graph.relations for graph in SMALL], "relation", Guessing(Transcript()), *secured().for_one_sum()
        )


def test_a_changed_union_is_refused():
    federation = secured()
    vocabularies = [graph.relations for graph in SMALL]

    class Forging(InProcess):
        def send(self, messages):
            super().send(
                [replace(m, arrays={"keys": m.arrays["keys"] ^ 1}) if m.kind == "union" else m for m in messages]
            )

    with pytest.raises(Refused, match="without a name"):
        private_union(vocabularies, "relation", Forging(Transcript()), *federation.for_one_sum())


# -- runs --------------------------------------------------------------------------------------------------------------


def quickly(recipe, secure=None, out=None, **flags):
    wanted = tacit.settings.combine(QUICK, {"federation": secure or {}}, {"evaluation": {"every": 2}})
    return federate(SMALL, recipe, settings=wanted, rounds=4, out=out, **flags)


def test_secure_runs_measure_what_plain_ones_do():
    for recipe in ("fede", "fedr"):
        plain, secret = quickly(recipe), quickly(recipe, {"secure": True, "vocabulary": "open"})
        assert secret.metrics["test"].mrr == pytest.approx(plain.metrics["test"].mrr, abs=1e-3)
        blind = quickly(recipe, {"secure": True})
        assert blind.metrics["test"].count == plain.metrics["test"].count


def test_a_secure_run_goes_on_where_it_was(tmp_path):
    """Killed after a checkpoint: the sums are the same, so the model is."""
    whole = quickly("fedr", {"secure": True, "vocabulary": "open"}, tmp_path / "whole")
    run = FederatedRun.create("fedr", SMALL, whole.settings, whole.federation, tmp_path / "part")

    class Killed(Exception):
        pass

    def stop(event):
        if event["event"] == "round" and event["round"] == 3:
            raise Killed

    with pytest.raises(Killed):
        run.train(stop)
    again = FederatedRun.open(tmp_path / "part").train()
    for party in range(3):
        one, two = (r.model(party).tables for r in (whole, again))
        assert torch.equal(one.entity, two.entity)
        assert torch.equal(one.relation, two.relation)
    told = json.loads((tmp_path / "part" / "shareable" / "privacy.json").read_text())
    assert "sums" in told["the_server_learns_of_each_party"]


def test_noisy_counts_are_added_up_securely():
    secret = Secret.simulation(5)
    plain = shared_counts(SMALL.graphs, 2.0, secret, InProcess(Transcript()))
    transcript = Transcript()
    found = shared_counts(SMALL.graphs, 2.0, secret, InProcess(transcript), secured())
    for one, two in zip(plain, found, strict=True):
        torch.testing.assert_close(one.tails, two.tails, atol=2e-3, rtol=0)
        torch.testing.assert_close(one.heads, two.heads, atol=2e-3, rtol=0)
        assert torch.equal(one.deviation, two.deviation)
    assert not [r for r in transcript.records if r.kind == "marginals" and r.receiver == SERVER]


@pytest.mark.slow
def test_private_and_secure_go_together():
    run = quickly("private_fede", {"secure": True}, epsilon=4.0)
    assert run.epsilon is not None
    assert run.epsilon <= 4.0
    assert Counter(r.kind for r in run.transcript.records)["masked"] == 3


def test_parties_bring_their_keys_and_a_revoked_one_is_refused(tmp_path):
    keeper, roster = Identity.new("keeper"), None
    roster = Roster.begin(keeper)
    for name in SMALL.names:
        one = Identity.new(name)
        one.save(tmp_path / f"{name}.key")
        roster = roster.enrol(keeper, name, one.public)
    roster.save(tmp_path / "roster.json")
    wanted = {"secure": True, "keys": str(tmp_path)}
    assert quickly("fedr", wanted).metrics["test"].count
    roster.revoke(keeper, SMALL.names[1]).save(tmp_path / "roster.json")
    with pytest.raises(TacitError, match="revoked"):
        quickly("fedr", wanted, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    (tmp_path / f"{SMALL.names[0]}.key").unlink()
    with pytest.raises(TacitError, match=SMALL.names[0]):
        quickly("fedr", wanted)


@pytest.mark.parametrize(
    ("recipe", "federation", "message"),
    [
        ("local", {}, "no rows that could be added up"),
        ("fedr", {"changed_only": True}, "leave out"),
        ("fedr", {"values": "float16"}, "leave out"),
        ("fedr", {"aggregation": "weighted"}, "leave out"),
        ("fedr", {"min_contributors": 4}, "from 2 to the number of parties"),
        ("fedr", {"min_contributors": 1}, "from 2 to the number of parties"),
        ("fedr", {"threshold": 1}, "more than half"),
        ("fedr", {"threshold": 9}, "more than half"),
        ("fedr", {"threshold": 3, "fraction": 0.7}, "sums of 2 parties"),
        ("fedr", {"min_contributors": 3, "fraction": 0.7}, "parties in a round, 2"),
        ("fedr", {"fraction": 0.3}, "sum of one"),
        ("fedr", {"range": 1e10}, r"smaller federation\.range"),
        ("fedr", {"range": -1.0}, "above 0"),
    ],
)
def test_what_cannot_be_secure_is_refused_before_anything_is_written(recipe, federation, message, tmp_path):
    with pytest.raises(TacitError, match=message):
        quickly(recipe, {"secure": True} | federation, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_command(tmp_path):
    out = str(tmp_path / "run")
    arguments = [
        "federate",
        "clinic-small",
        "--recipe",
        "fedr",
        "--secure",
        "--dim",
        "4",
        "--rounds",
        "2",
        "--out",
        out,
    ]
    done = CliRunner().invoke(app, [*arguments, "--json"])
    assert done.exit_code == 0, done.output
    lines = (tmp_path / "run/shareable/transcript.jsonl").read_text().splitlines()
    kinds = Counter(json.loads(line)["kind"] for line in lines)
    assert kinds["masked"]
    assert kinds["points"]
    assert not kinds["names"]
    assert np.isfinite(json.loads(done.stdout)["metrics"]["test"]["mrr"])
