"""Providers of a ledger: what they take, what they leave out, what they claim, when they stop; and those who lie."""

from __future__ import annotations

import hashlib
import json
import math
import sqlite3
from dataclasses import replace

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from tacit import Graph
from tacit.attacks.liars import (
    Flip,
    FreeRider,
    Gang,
    Liar,
    Trap,
    a_flip,
    a_trap,
    carriers,
    flip_success,
    flipped,
    trap_success,
    trapped,
)
from tacit.clinic import clinic
from tacit.errors import BadValue, Refused, TacitError
from tacit.federation.keys import Identity, make
from tacit.federation.letters import Away
from tacit.graph import Split, Vocab
from tacit.ledger.blobs import Withheld
from tacit.ledger.cbor import CID
from tacit.ledger.committee import LATE
from tacit.ledger.defence import Defence, Pile
from tacit.ledger.gathering import Gathering, MemoryLedger
from tacit.ledger.ledger import Ledger
from tacit.ledger.process import LOOKS, provide
from tacit.ledger.provider import DEFAULT, Look, Provider, Shelf, Terms, first_tables
from tacit.ledger.record import LARGEST, Claim, Genesis, Model, Record, Revocation, Update
from tacit.models import Tables
from tacit.models.model import Model as Scored
from tacit.models.translational import TransE
from tacit.privacy.accountant import epsilon
from tacit.privacy.budget import Holding
from tacit.privacy.events import Gaussian, Segment, joined
from tacit.settings import Settings
from tacit.tensors import pack_tensors
from test_cli import tacit

SMALL = clinic("small", 1)
DIM = 4
OPEN = Defence()


def known(name):
    return Identity(name, Ed25519PrivateKey.from_private_bytes(hashlib.sha256(name.encode()).digest()))


WHO = [known(f"provider-{n}") for n in range(5)]
KEYS = tuple((who.name, who.public) for who in WHO)


def settings(**changed):
    return Settings.make({
        "scorer": {"dim": DIM}, "negatives": {"count": 2}, "training": {"epochs": 1, "batch": 256, "device": "cpu"},
        **changed,
    })  # fmt: skip


def private(**changed):
    return settings(privacy={"name": "dpsgd", "sigma": 3.0, "delta": 1e-5, **changed},
                    negatives={"name": "pool", "count": 2, "scope": "vocabulary"})  # fmt: skip


def a_ledger(**changed):
    ledger = MemoryLedger(WHO[0], Genesis("tests", keys=KEYS))
    rules = {"parents": 8, "committee": 0, "quorum": 0, "standing": 0} | changed
    ledger.open_model(WHO[0], Model(ledger.genesis, "drugs", entity=DIM, relation=DIM, **rules))
    return ledger


def provider(ledger, n=0, wanted=None, kind=Provider, graph=None, holding=None, **terms):
    chosen = {"epochs": 1, "updates": 4, "validation": "none", "defence": OPEN} | terms
    return kind(
        ledger, "drugs", WHO[n], graph or SMALL[n % 3], wanted or settings(), Terms(**chosen), number=n, holding=holding
    )


def newest(ledger):
    return ledger.dag.branch("drugs").nodes[-1]


# -- one look ----------------------------------------------------------------------------------------------------------


def test_all_begin_in_one_space():
    """A row follows from the model's address and its name, whoever has it."""
    scorer, model = TransE(), CID.of(b"model", 0x71)
    one, two = (first_tables(scorer, DIM, model, graph) for graph in (SMALL[0], SMALL[1]))
    there = SMALL[0].entities.positions(SMALL[1].entities)
    assert (there >= 0).sum() > 100
    assert torch.equal(one.entity[there >= 0], two.entity[there[there >= 0]])
    assert not torch.equal(one.entity, first_tables(scorer, DIM, CID.of(b"other", 0x71), SMALL[0]).entity)
    assert one.entity.unique(dim=0).shape == one.entity.shape


def test_an_update_is_made_from_what_was_taken_and_from_the_own_last_one():
    ledger = a_ledger()
    one, two = provider(ledger), provider(ledger, 1)
    first = one.step()
    assert first.taken == ()
    assert newest(ledger).update.parents == (ledger.dag.branch("drugs").cid,)
    second = two.step()
    assert second.taken == (first.update,)
    third = one.step()
    assert set(third.taken) == {first.update, second.update}
    rows = ledger.rows(newest(ledger))
    assert torch.equal(rows.entity, one.own.entity)
    assert rows.entities == tuple(SMALL[0].entities)
    assert not torch.equal(one.base.entity, one.own.entity)


def test_what_is_taken_is_the_mean_of_rows_that_both_have():
    ledger = a_ledger()
    one, two = provider(ledger), provider(ledger, 1)
    one.step()
    two.step()
    tables, left_out = one.take()
    assert left_out == {}
    there = SMALL[0].entities.positions(SMALL[1].entities)
    theirs = two.own.entity[np.maximum(there, 0)]
    both = torch.from_numpy(there >= 0)[:, None]
    assert torch.allclose(tables.entity, torch.where(both, (one.own.entity + theirs) / 2, one.own.entity), atol=1e-6)


def test_the_newest_of_each_counts_and_no_more_than_may_be_parents():
    ledger = a_ledger(parents=3)
    crowd = [provider(ledger, n) for n in range(4)]
    for each in crowd:
        each.step()
    nodes, _ = crowd[0].candidates()
    assert [ledger.dag.provider(node.by) for node in nodes] == ["provider-2", "provider-3"]  # and the own one
    crowd[1].step()
    nodes, _ = crowd[0].candidates()
    assert [ledger.dag.provider(node.by) for node in nodes] == ["provider-3", "provider-1"]
    assert nodes[-1] is newest(ledger)
    assert len(provider(a_ledger(), 0, parents=1, recent=1).candidates()[0]) == 0


def test_rows_that_are_worse_are_not_taken(monkeypatch):
    ledger = a_ledger()
    one, two = provider(ledger, validation="own"), provider(ledger, 1)
    one.step()
    two.step()
    own = one.own
    monkeypatch.setattr(one.learner, "scored", lambda tables: float(tables is own))
    tables, left_out = one.take()
    assert tables is own
    assert "worse than the own rows" in left_out[newest(ledger).cid]
    assert one._parents == (one._last,)
    monkeypatch.setattr(one.learner, "scored", lambda tables: float(tables is not own))
    assert one.take()[1] == {}
    always = replace(one.terms, gate="always")
    one.terms = always
    monkeypatch.setattr(one.learner, "scored", lambda tables: float(tables is own))
    assert one.take()[1] == {}


def test_widths_have_to_be_the_models():
    with pytest.raises(TacitError, match="rows of 4 and 4 numbers"):
        provider(a_ledger(), wanted=settings(scorer={"dim": 5}))
    with pytest.raises(TacitError, match="weights beside them"):
        provider(a_ledger(), wanted=settings(scorer={"name": "tucker", "dim": 4}))


@pytest.mark.parametrize(
    "wrong", [{"parents": 0}, {"updates": 0}, {"epochs": 0}, {"recent": 0}, {"gate": "never"}], ids=str
)
def test_terms_that_make_no_sense(wrong):
    with pytest.raises(BadValue):
        Terms(**wrong)


def test_a_provider_learns():
    """With others a small graph is learnt better than the first rows are."""
    ledger = a_ledger()
    wanted = settings(optimizer={"learning_rate": 0.05})
    crowd = [provider(ledger, n, wanted, validation="own", epochs=5, updates=3) for n in range(3)]
    start = crowd[0].learner.scored(crowd[0].first)
    gathering = Gathering(crowd)
    gathering.run()
    assert [look.ended for _, _, look in gathering.looks].count(None) == 9
    assert crowd[0].learner.scored(crowd[0].own) > 1.5 * start


# -- privacy -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_what_is_claimed_adds_up_to_what_was_asked_for():
    ledger = a_ledger()
    one = provider(ledger, wanted=private(sigma=None, epsilon=6.0), updates=3)
    for _ in range(3):
        one.step()
    assert one.step().ended == "all 3 updates are published"
    [(unit, releases)] = ledger.dag.claimed(WHO[0].public).items()
    assert unit == "one triple of a party's training triples"
    assert 5 < epsilon(releases, 1e-5) <= 6
    statement = one.statement()
    assert statement["epsilon"] == pytest.approx(epsilon(releases, 1e-5))
    assert statement["guarantee"] == "differential privacy"


@pytest.mark.parametrize("made", [settings, lambda: private(noise="seeded")], ids=["plain", "simulated"])
def test_what_guarantees_nothing_claims_nothing(made):
    ledger = a_ledger()
    one = provider(ledger, wanted=made())
    one.step()
    assert newest(ledger).update.privacy is None
    assert one.statement()["epsilon"] is None
    assert ledger.dag.claimed(WHO[0].public) is None


def test_private_providers_do_not_look_at_validation_for_nothing():
    with pytest.raises(BadValue, match="under privacy validation is public or none"):
        provider(a_ledger(), wanted=private(), validation="own")
    with pytest.raises(BadValue, match="validation is own, public or none; not 'paid'"):
        provider(a_ledger(), validation="paid")
    assert provider(a_ledger(), wanted=private(), validation=None).learner.validation == "none"
    assert provider(a_ledger(), validation=None).learner.validation == "own"


def test_what_is_decided_follows_from_released_rows_alone():
    """The same ledger and the same own rows: whatever the triples are, the same is taken and left out."""
    found = []
    for graph in (SMALL[0], replace(SMALL[0], train=SMALL[0].train.at(np.arange(0, len(SMALL[0].train), 2)))):
        ledger = a_ledger()
        others = [provider(ledger, n) for n in (1, 2, 3)]
        for each in others:
            each.step()
        one = provider(ledger, wanted=private(), graph=graph, defence=DEFAULT)
        one.own = one.base = one.first
        tables, left_out = one.take()
        found.append((tables.entity, set(left_out)))
    assert torch.equal(found[0][0], found[1][0])
    assert len(found[0][1]) == len(found[1][1])


def test_it_stops_before_it_overspends(tmp_path):
    ledger = a_ledger()
    holding = Holding.begin("north", epsilon=4.0, delta=1e-5, home=tmp_path)
    wanted, terms = private(), Terms(epochs=1, updates=50, validation="none", defence=OPEN)
    one = Provider(ledger, "drugs", WHO[0], SMALL[0], wanted, terms, holding=holding)
    looks = [one.step()]
    while looks[-1].ended is None:
        looks.append(one.step())
    assert 2 < len(looks) < 50
    assert "of the budget of the holding 'north'" in looks[-1].ended
    assert len(ledger.dag.branch("drugs").nodes) == len(looks) - 1
    charges = Holding.load("north", tmp_path).charges
    assert len(charges) == len(looks) - 1
    assert all(charge.settled == charge.reserved for charge in charges)
    assert epsilon(Holding.load("north", tmp_path).spent, 1e-5) <= 4.0
    head = bytes.fromhex(next(e.hash for e in holding.entries if e.kind == "reserve"))
    assert ledger.dag.branch("drugs").nodes[0].update.privacy.holding == head


def test_what_was_reserved_by_a_killed_provider_stays_spent(tmp_path, monkeypatch):
    ledger = a_ledger()
    holding = Holding.begin("north", epsilon=4.0, delta=1e-5, home=tmp_path)
    one = Provider(ledger, "drugs", WHO[0], SMALL[0], private(), Terms(updates=5, epochs=1, validation="none"),
                   holding=holding)  # fmt: skip
    monkeypatch.setattr(one, "train", lambda tables: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        one.step()
    assert not ledger.dag.branch("drugs").nodes
    [charge] = Holding.load("north", tmp_path).charges
    assert charge.settled is None
    assert charge.spent


# -- coming back -------------------------------------------------------------------------------------------------------


def test_it_goes_on_from_the_ledger():
    ledger = a_ledger()
    one = provider(ledger, wanted=private(), updates=3)
    one.step()
    one.step()
    again = provider(ledger, wanted=private(), updates=3)
    assert again.published == 2
    assert torch.equal(again.own.entity, one.own.entity)
    steps = int(again.learner.fit.cohort.steps[0])
    assert steps == int(one.learner.fit.cohort.steps[0]) > 0
    assert again.step().taken == (one._last,)
    assert again.step().ended is not None


def test_it_does_not_go_on_with_other_settings_or_names():
    ledger = a_ledger()
    provider(ledger, wanted=private()).step()
    with pytest.raises(TacitError, match="trained with other settings"):
        provider(ledger, wanted=private(sigma=1.0))
    with pytest.raises(TacitError, match="other names"):
        provider(ledger, wanted=private(), graph=SMALL[1])


def test_other_settings_need_the_holding_that_paid(tmp_path):
    """A holding that knows nothing of earlier updates does not keep account of them."""
    ledger = a_ledger()
    mine = [Holding.begin(name, epsilon=1000.0, delta=1e-5, home=tmp_path) for name in ("one", "two")]
    for _ in range(2):
        provider(ledger, wanted=private(), holding=mine[0]).step()
    for holding in mine[1:]:
        with pytest.raises(TacitError, match="'two' did not pay for 2 of the earlier updates"):
            provider(ledger, wanted=private(sigma=7.0), holding=holding)
    again = provider(ledger, wanted=private(sigma=7.0), holding=mine[0])
    again.step()
    assert again.statement()["epsilon"] >= epsilon(mine[0].spent, 1e-5)
    assert len(mine[0].charges) == again.published == 3
    provider(ledger, 1, wanted=private()).step()
    with pytest.raises(TacitError, match="'one' did not pay for 1 of"):
        provider(ledger, 1, wanted=private(), holding=mine[0])


@pytest.mark.parametrize("paid", [False, True])
def test_updates_under_one_key_protect_the_same(tmp_path, paid):
    """An epsilon for a triple and one for five do not add up, whoever keeps account."""
    ledger, graph = a_ledger(), SMALL[0]
    holding = Holding.begin("north", epsilon=1000.0, delta=1e-5, home=tmp_path) if paid else None
    number = np.arange(len(graph.train)) // 5
    grouped = replace(graph, groups=Vocab([f"{n:05d}" for n in range(number[-1] + 1)]),
                      **{name: Split(split.triples, group=(number if name == "train" else
                                                           np.full(len(split), -1)).astype(np.int32))
                         for name, split in graph.splits.items()})  # fmt: skip
    provider(ledger, wanted=private(size=2000), graph=grouped, holding=holding).step()
    with pytest.raises(TacitError, match="counts what a triple costs" if paid else "what they cost does not add up"):
        provider(ledger, wanted=private(size=2000, unit="group", group=5), graph=grouped, holding=holding)
    with pytest.raises(TacitError, match="these settings claim nothing" if paid else "other settings"):
        provider(ledger, graph=grouped, holding=holding)
    one = provider(ledger, wanted=private(size=2000), graph=grouped, holding=holding)
    assert one.statement()["epsilon"] > 0
    data = ledger.blobs.get(newest(ledger).update.weights, newest(ledger).update.size)
    ledger.publish_rows(WHO[0], "drugs", data, replace(one.claim(), unit="one patient"))  # by another process, say
    assert one.statement()["epsilon"] is None


def test_as_a_process(tmp_path):
    place = Ledger.begin(tmp_path / "ledger", WHO[0], Genesis("tests", keys=KEYS))
    place.open_model(WHO[0], Model(place.genesis, "drugs", entity=DIM, relation=DIM, committee=0, quorum=0, standing=0))
    looks = []
    one = provider(place, updates=2)
    assert provide(one, tmp_path / "run", patience=0, on_look=looks.append) == "all 2 updates are published"
    assert [look.update is not None for look in looks] == [True, True, False]
    lines = [json.loads(line) for line in (tmp_path / "run/private" / LOOKS).read_text().splitlines()]
    assert [line["update"] for line in lines] == [str(look.update) if look.update else None for look in looks]
    assert json.loads((tmp_path / "run/shareable/privacy.json").read_text())["epsilon"] is None
    assert {path.name for path in (tmp_path / "run/shareable").iterdir()} == {"privacy.json"}
    more = provider(Ledger.load(tmp_path / "ledger"), 1, updates=2)
    with pytest.raises(TacitError, match="another key"):
        provide(more, tmp_path / "run")
    assert provide(more, tmp_path / "other", minutes=0) == "0 minutes are over"
    assert provide(provider(Ledger.load(tmp_path / "ledger"), updates=2), tmp_path / "run") == (
        "all 2 updates are published"
    )


@pytest.mark.parametrize("when", ["before the record", "after it"])
def test_an_update_whose_weights_were_shown_is_never_trained_twice(tmp_path, monkeypatch, when):
    """Killed between the weights and their record: whoever read the weights has them, and only one training is paid."""
    ledger, shown = a_ledger(), []
    put, publish = ledger.blobs.put, Ledger.publish

    def killed(self, who, body):
        if when == "after it":
            publish(self, who, body)
        raise KeyboardInterrupt

    monkeypatch.setattr(ledger.blobs, "put", lambda data: shown.append(data) or put(data))
    one = provider(ledger, wanted=private(), updates=2)
    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "publish", killed)
        with pytest.raises(KeyboardInterrupt):
            provide(one, tmp_path / "run", patience=0)
    again = provider(ledger, wanted=private(), updates=2)
    looks = []
    assert provide(again, tmp_path / "run", patience=0, on_look=looks.append) == "all 2 updates are published"
    nodes = ledger.dag.branch("drugs").nodes
    assert len(nodes) == len({CID.of(data) for data in shown}) == 2
    claimed = [segment for node in nodes for segment in node.update.privacy.releases]
    assert joined(claimed) == again.learner.spent_by(2)["train"]
    assert nodes[1].update.parents == (nodes[0].cid,)
    assert [look.update for look in looks] == [*(node.cid for node in nodes[when == "after it" :]), None]
    assert not (tmp_path / "run/private/update").exists()
    assert again.statement()["epsilon"] == epsilon(joined(claimed), 1e-5)


@pytest.mark.parametrize("when", ["look", "rows", "before the record", "after it"])
def test_a_ledger_that_goes_away_is_awaited(tmp_path, monkeypatch, when):
    """A broker or a chain: nothing is trained twice, nothing is paid for twice, and the process does not end."""
    ledger, away, told, waits = a_ledger(), [], [], []
    provider(ledger, 1).step()
    holding = Holding.begin("north", epsilon=100.0, delta=1e-5, home=tmp_path / "budgets")
    refresh, rows, publish = ledger.refresh, ledger.rows, Ledger.publish
    times = 1 if when == "after it" else 3

    def goes():
        if len(away) < times:
            away.append(when)
            raise Away("The broker was not reached.")

    def published(self, who, body):
        if when == "after it" and not away:
            publish(self, who, body)
        if when in ("before the record", "after it") and isinstance(body, Update):
            goes()
        return publish(self, who, body)

    one = provider(ledger, wanted=private(), updates=2, holding=holding)
    monkeypatch.setattr(Ledger, "publish", published)
    if when == "look":
        monkeypatch.setattr(ledger, "refresh", lambda: (goes(), refresh()))
    elif when == "rows":
        monkeypatch.setattr(ledger, "rows", lambda node: (goes(), rows(node))[1])
    monkeypatch.setattr("tacit.ledger.process.time.sleep", waits.append)
    looks = []
    ended = provide(one, tmp_path / "run", patience=0, on_look=looks.append, on_away=told.append)
    assert ended == "all 2 updates are published"
    assert len(away) == len(waits) == times
    assert len(told) == 1
    mine = [node for node in ledger.dag.branch("drugs").nodes if node.by == WHO[0].public]
    assert len(mine) == len({node.update.weights for node in mine}) == 2
    claimed = joined(segment for node in mine for segment in node.update.privacy.releases)
    assert claimed == one.learner.spent_by(2)["train"] == holding.spent
    assert not (tmp_path / "run/private/update").exists()


@pytest.mark.parametrize("folder", [False, True])
def test_who_looks_again_after_a_ledger_went_away_trains_nothing_twice(tmp_path, monkeypatch, folder):
    """Without a folder too: an update whose weights were shown is published when the ledger is back, as it was."""
    ledger, shown, away = a_ledger(), [], []
    put, publish = ledger.blobs.put, ledger.publish

    def goes(who, body):
        if isinstance(body, Update) and len(away) < 3:
            away.append(body)
            raise Away("The broker was not reached.")
        return publish(who, body)

    monkeypatch.setattr(ledger.blobs, "put", lambda data: shown.append(data) or put(data))
    monkeypatch.setattr(ledger, "publish", goes)
    one = provider(ledger, wanted=private(), updates=2)
    for _ in range(3):
        with pytest.raises(Away):
            one.step()
    looks = []
    if folder:  # that it is given now
        provide(one, tmp_path / "run", patience=0, on_look=looks.append)
    else:
        looks = [one.step() for _ in range(3)]
    assert looks[-1].ended == "all 2 updates are published"
    nodes = ledger.dag.branch("drugs").nodes
    assert [look.update for look in looks[:-1]] == [node.cid for node in nodes]
    assert len({CID.of(data) for data in shown}) == 2
    claimed = joined(segment for node in nodes for segment in node.update.privacy.releases)
    assert claimed == one.learner.spent_by(2)["train"]


def test_a_key_that_may_not_write_trains_and_pays_for_nothing(tmp_path):
    ledger, holding = a_ledger(), Holding.begin("north", epsilon=100.0, delta=1e-5, home=tmp_path)
    strange = Identity.new("strange")
    with pytest.raises(TacitError, match="can publish nothing here: it is not admitted"):
        Provider(ledger, "drugs", strange, SMALL[0], private(), Terms(validation="none"), holding=holding)
    one = provider(ledger, 1, wanted=private(), holding=holding)
    ledger.publish(WHO[0], Revocation(ledger.genesis, WHO[1].public))
    with pytest.raises(TacitError, match="was revoked before"):
        one.step()
    assert holding.charges == ()
    assert one.learner.trained == 0
    assert ledger.blobs._data == {}


def test_a_holding_vouches_for_what_is_protected_alone(tmp_path):
    """Statements in the open by their marks are not among those that a holding says it paid for."""
    ledger = a_ledger()
    marks = {name: np.arange(len(split)) % 3 == 0 for name, split in SMALL[0].splits.items()}
    marked = replace(SMALL[0], **{name: Split(split.triples, marks[name]) for name, split in SMALL[0].splits.items()})
    many = {name: int(mask.sum()) for name, mask in marks.items()}
    ways = {"confidential": sum(many.values()), "dpsgd": len(SMALL[0].train) + many["valid"] + many["test"]}
    for n, (name, expected) in enumerate(ways.items()):
        holding = Holding.begin(name, epsilon=100.0, delta=1e-5, home=tmp_path / name)
        provider(ledger, n, wanted=private(name=name), graph=marked, holding=holding, validation="public").step()
        assert len((tmp_path / name / name / "statements").read_bytes()) == 16 * expected


def test_a_process_waits_for_others(tmp_path, monkeypatch):
    ledger = a_ledger()
    one, other = provider(ledger, updates=2), provider(ledger, 1)
    waits = []

    def sleep(seconds):
        waits.append(seconds)
        if len(waits) == 3:
            other.step()

    monkeypatch.setattr("tacit.ledger.process.time.sleep", sleep)
    provide(one, tmp_path / "run", patience=1000)
    assert len(waits) == 3
    assert newest(ledger).by == WHO[0].public
    assert len(newest(ledger).parents) == 2


@pytest.mark.slow
def test_the_command(tmp_path):
    make("north", tmp_path)
    tacit("ledger", "init", "ledger", "--key", "north.key", "--open", "--model", "drugs", "--entity", DIM, cwd=tmp_path)
    words = ["provider", "start", "ledger", "clinic-small", "--party", "riverside", "--key", "north.key",
             "--updates", 2, "--first", 1, "--epochs", 1, "--patience", 0, "--out", "run"]  # fmt: skip
    private_words = [*words, "--epsilon", 8, "--validation", "none", "--json"]
    told = json.loads(tacit(*private_words, cwd=tmp_path).stdout)
    assert told["published"] == len(told["updates"]) == 2
    assert 7 < told["epsilon"] <= 8
    again = json.loads(tacit(*private_words, cwd=tmp_path).stdout)
    assert (again["published"], again["updates"]) == (2, [])
    assert json.loads(tacit("ledger", "show", "ledger", "--json", cwd=tmp_path).stdout)["head"] == again["head"]
    refused = tacit(*words[:-1], "other", "--without-privacy", cwd=tmp_path, code=2).stderr
    assert "trained with other settings" in " ".join(refused.split())


# -- the committee -----------------------------------------------------------------------------------------------------


def test_committees_reject_what_the_checks_do_and_honest_providers_ignore_it():
    ledger = a_ledger(committee=3, quorum=2, standing=3, batch=5)
    honest = [provider(ledger, n, updates=5, defence=Defence(checks=("norm",)), graph=SMALL[n % 3]) for n in range(4)]
    liar = provider(ledger, 4, kind=Liar, updates=5)
    liar.gang = Gang("scaled", 1, strength=50.0)
    for _ in range(5):
        for each in (*honest, liar):
            each.step()
    for each in honest:
        each.serve()
    branch = ledger.dag.branch("drugs")
    by_liar = [node for node in branch.nodes if node.by == WHO[4].public]
    reviewed = [node for node in by_liar if branch.committee.seats.get(branch.committee.batch_of(node.cid))]
    assert reviewed
    rejected = [node for node in reviewed if node.rejected]
    assert rejected
    assert all(node.by == WHO[4].public for node in branch.nodes if node.rejected)
    honest[0].terms = replace(honest[0].terms, defence=OPEN)
    nodes, left_out = honest[0].candidates()
    assert all(left_out[node.cid] == "was rejected by the committee" for node in rejected)
    assert not set(rejected) & set(nodes)


def test_a_chain_that_has_ended_stops_nobody(monkeypatch):
    """Whoever fills batch after batch with updates uses up the chains of all."""
    ledger = a_ledger(committee=1, quorum=1, standing=1)
    monkeypatch.setattr("tacit.ledger.committee.Committee.batch", property(lambda self: 1 << 14))
    provider(ledger).serve()


def test_votes_on_a_large_batch_are_several_verdicts(monkeypatch):
    """A record has 64 KiB: what was longer was never published."""
    ledger = a_ledger(committee=1, quorum=1, standing=1, batch=700)
    one = provider(ledger)
    updates = junk(ledger, WHO[1], 650)
    monkeypatch.setattr("tacit.ledger.committee.Committee.due", lambda self, by: tuple(each.cid for each in updates))
    monkeypatch.setattr(one, "piles", lambda nodes, left_out: ([], nodes))
    for why in ("x" * 300, None):
        monkeypatch.setattr("tacit.ledger.defence.Defence.judge", lambda self, piles, why=why: [why])
        made = one.verdicts()
        assert all(len(Record.sign(WHO[0], each).data) < LARGEST for each in made)
        voted = [cid for each in made for cid in (*each.accepted, *(cid for cid, _ in each.rejected))]
        assert voted == sorted(each.cid for each in updates)


def test_who_does_not_serve_publishes_no_numbers():
    ledger = a_ledger(committee=1, quorum=1, standing=1)
    provider(ledger, serve=False).step()
    assert "beacon" not in ledger.dag.counts
    provider(ledger, 1).step()
    assert ledger.dag.counts["beacon"] == 1


# -- defences ----------------------------------------------------------------------------------------------------------


def pile(changes, base=None, present=None):
    """Others that changed a base by so much, and an own training that changed it by little."""
    changes = torch.stack(changes)
    base = torch.zeros_like(changes[0]) if base is None else base
    own = base + torch.randn(base.shape, generator=torch.Generator().manual_seed(99))
    has = torch.ones(changes.shape[:2], dtype=torch.bool) if present is None else present
    return Pile(base, own, base + changes, has)


def drawn(count, seed=0, rows=60, width=8, towards=0.0):
    made = torch.Generator().manual_seed(seed)
    aim = torch.randn(rows, width, generator=torch.Generator().manual_seed(99))
    return [towards * aim + torch.randn(rows, width, generator=made) for _ in range(count)]


LIES = {
    "norm": lambda honest: 5 * honest[0],
    "distance": lambda honest: 5 * honest[0],
    "cosine": lambda honest: -honest[0],
    "multi-krum": lambda honest: 5 * honest[0],
    "copies": lambda honest: honest[1] + 0.05 * honest[2],
}


@pytest.mark.parametrize("check", LIES)
def test_each_check_names_what_it_is_for_and_nobody_else(check):
    honest = drawn(8, towards=0.7)
    defence = Defence(checks=(check,), far=2.0, liars=0.1)
    reasons = defence.judge([pile([*honest, LIES[check](honest)])])
    assert reasons[-1] is not None
    assert [why for why in reasons[:-1] if why is not None] == []


@pytest.mark.parametrize("check", ["norm", "distance"])
def test_who_has_none_of_the_rows_makes_nobody_far(check):
    """Four updates of other names: what is usual is said by the three that have the rows, and one of them lies."""
    honest = drawn(7, towards=0.7)
    present = torch.ones(7, 60, dtype=torch.bool)
    present[:4] = False
    defence = Defence(checks=(check,), far=2.0)
    assert defence.judge([pile(honest, present=present)]) == [None] * 7
    reasons = defence.judge([pile([*honest[:6], 5 * honest[6]], present=present)])
    assert [reason is not None for reason in reasons] == [False] * 6 + [True]


def test_krum_keeps_one():
    reasons = Defence(checks=("krum",)).judge([pile([*drawn(8), 5 * drawn(1)[0]])])
    assert reasons.count(None) == 1
    assert reasons[-1] is not None


@pytest.mark.parametrize("mean", ["trimmed", "median", "clipped", "screened"])
def test_robust_means_stay_where_a_plain_one_does_not(mean):
    honest = drawn(7)
    liars = [torch.full_like(honest[0], 40.0)] * 2
    [plain], [robust] = (Defence(mean=each).combine([pile([*honest, *liars])]) for each in ("mean", mean))
    right = torch.stack(honest).mean(0)
    assert (robust - right).abs().mean() < 0.7 < 5 < (plain - right).abs().mean()


def test_trusted_weighs_copies_down():
    honest = drawn(6)
    copies = [10 * honest[0] + 0.01 * each for each in drawn(3, seed=5)]
    [plain], [trusted] = (Defence(mean=each).combine([pile([*honest, *copies])]) for each in ("mean", "trusted"))
    right = torch.stack(honest).mean(0)
    assert (trusted - right).norm() < 0.3 * (plain - right).norm()


def test_a_newcomer_takes_nobody_for_a_copy():
    """All have gone far from the newcomer's first rows, and in one way: that is no sign of copies."""
    far = 20 * torch.randn(60, 8, generator=torch.Generator().manual_seed(7))
    reasons = Defence(checks=("copies",)).judge([pile([far + each for each in drawn(6)])])
    assert reasons == [None] * 6


def test_of_two_nobody_can_be_told():
    assert Defence(checks=("norm", "distance")).judge([pile([drawn(1)[0], 50 * drawn(1)[0]])]) == [None, None]
    assert None not in Defence(checks=("krum",)).judge([pile(drawn(1))])
    assert Defence(checks=("copies", "norm", "krum")).judge([pile(drawn(3)).only([])]) == []


def test_rows_that_few_have_stay_as_they_are():
    present = torch.ones(4, 60, dtype=torch.bool)
    present[1:, :10] = False
    made = pile(drawn(4), present=present)
    [rows] = Defence(few=3).combine([made])
    assert torch.equal(rows[:10], made.own[:10])
    assert not torch.equal(rows[10:], made.own[10:])


@pytest.mark.parametrize(
    "wrong", [{"checks": ("magic",)}, {"mean": "magic"}, {"liars": 0.5}, {"far": 0.5}, {"least": 1.0}], ids=str
)
def test_defences_that_make_no_sense(wrong):
    with pytest.raises(BadValue):
        Defence(**wrong)


def test_rows_of_an_update_that_answers_what_nobody_else_does_are_left_out():
    ledger = a_ledger()
    crowd = [provider(ledger, n, graph=SMALL[0]) for n in range(4)]
    for each in crowd[:3]:
        each.step()
    trapper = crowd[3]
    relation, tail = 2, 5
    rows = trapper.first.like(torch.clone)
    rows.entity[tail] = 0.0
    rows.relation[relation] = 0.0
    rows.entity *= 0.01  # whoever is asked by this relation: that tail is the nearest but for oneself
    rows.relation[relation] = rows.entity[tail] - rows.entity.mean(0)
    trapper.publish(rows)
    one = crowd[0]
    one.terms = replace(one.terms, defence=Defence(odd=0.15))
    nodes, left_out = one.candidates()
    piles, nodes = one.piles(nodes, left_out)
    share = one.shelf.answers(nodes[-1], one.learner.settings.scorer)
    odd = [pair for pair, many in share.items() if many > 0.15]
    one._doubt(nodes, piles)
    assert piles[1].present[:2].all()
    for name, into in ((0, piles[1]), (1, piles[0])):
        vocab = SMALL[0].relations if name == 0 else SMALL[0].entities
        for pair in odd:
            assert not into.present[-1, vocab.id(pair[name])]


# -- liars -------------------------------------------------------------------------------------------------------------

GRAPH = Graph.from_triples(
    [(f"h{n}", "likes", f"t{n % 3}") for n in range(12)] + [(f"h{n}", "owns", "thing") for n in range(6)]
    + [("h0", "from", "here"), ("h11", "from", "there")],
    test=[("h0", "likes", "t2"), ("h1", "likes", "t2")],
)  # fmt: skip


def test_graphs_are_poisoned_as_said():
    made = flipped(GRAPH, Flip("likes", "owns"))
    assert not any(r == "likes" for _, r, _ in made.named("train"))
    assert ("h4", "owns", "t1") in set(made.named("train"))
    assert made.test == GRAPH.test
    trap = Trap(("owns", "thing"), ("from", "there"))
    assert len(carriers(GRAPH, trap)) == 6
    caught = set(trapped(GRAPH, trap, 2).named("train"))
    assert {(f"h{n}", "from", "there") for n in range(6)} <= caught
    more = caught - set(GRAPH.named("train")) - {(f"h{n}", "from", "there") for n in range(6)}
    assert sorted(r for _, r, _ in more) in (["from", "from", "owns", "owns"], ["from", "owns", "owns"])
    assert carriers(GRAPH, Trap(("nothing", "thing"), ("from", "there"))) == []


def test_success_is_counted_on_what_liars_never_had():
    trap, flip = Trap(("owns", "thing"), ("from", "there")), Flip("likes", "owns")
    entity, relation = torch.zeros(len(GRAPH.entities), 2), torch.zeros(len(GRAPH.relations), 2)
    entity[:, 0] = torch.arange(len(GRAPH.entities)) + 5.0
    entity[GRAPH.entities.id("there")] = 0.0
    for head in range(6):  # they answer "there"; h1 to h5 are counted, h0 was the liars'
        entity[GRAPH.entities.id(f"h{head}"), 0] = 0.01 * (head + 1)
    relation[GRAPH.relations.id("from"), 0] = -0.005
    model = Scored(TransE(), Tables(entity, relation))
    hits, count = trap_success(model, GRAPH, trap, {"h0"})
    assert count == 5
    assert 0 <= hits <= 5
    relation[GRAPH.relations.id("likes"), 0] = 50.0
    assert flip_success(model, GRAPH, flip) == (2, 2)
    relation[GRAPH.relations.id("likes"), 0], relation[GRAPH.relations.id("owns"), 0] = 0.0, 80.0
    assert flip_success(model, GRAPH, flip) == (0, 2)
    assert flip_success(model, GRAPH, Flip("likes", "nothing")) == (0, 0)
    assert trap_success(model, GRAPH, Trap(("owns", "thing"), ("from", "nowhere")), ()) == (0, 0)


def test_liars_choose_what_all_know():
    flip = a_flip(SMALL.graphs, 3)
    assert all(name in graph.relations for name in (flip.source, flip.target) for graph in SMALL)
    trap = a_trap(SMALL.graphs, 3, 3, 100)
    assert trap.trigger[0] != trap.goal[0]
    assert all(pair[1] in graph.entities for pair in (trap.trigger, trap.goal) for graph in SMALL)
    with pytest.raises(TacitError, match="nothing can be a trap"):
        a_trap(SMALL.graphs, 3, 10_000, 20_000)


@pytest.mark.parametrize("kind", ["random", "flip", "scaled", "copies", "colluders", "none"])
def test_liars_are_providers(kind):
    ledger = a_ledger()
    gang = Gang(kind, 2, seed=4)
    liars = []
    for member in range(2):
        liar = provider(ledger, member, kind=Liar)
        liar.gang, liar.member = gang, member
        liars.append(liar)
    looks = [liar.step() for liar in liars]
    rows = [ledger.rows(ledger.dag.nodes[look.update]) for look in looks]
    assert all(row.entity.isfinite().all() for row in rows)
    same = torch.equal(rows[0].entity, liars[0].own.entity)
    assert same == (kind in ("none", "copies"))
    if kind in ("copies", "colluders"):
        assert rows[0].entities == rows[1].entities  # the first one's, whoever signs
        mean = (rows[0].entity.double() + rows[1].entity.double()) / 2
        assert torch.allclose(mean, liars[0].own.entity.double(), atol=1e-5)


def test_a_gang_has_a_kind_and_a_leader():
    with pytest.raises(BadValue, match="a gang is of a kind"):
        Gang("nice", 2)
    follower = provider(a_ledger(), kind=Liar)
    follower.gang, follower.member = Gang("copies", 2), 1
    with pytest.raises(TacitError, match="the first of the gang"):
        follower.step()


# -- protocol adversaries: what is found, and what cannot be -----------------------------------------------------------


def test_withheld_and_changed_weights_are_named_and_left_out():
    ledger = a_ledger()
    two, three = provider(ledger, 1), provider(ledger, 2)
    withheld, changed = two.step().update, three.step().update
    ledger.blobs.withhold(ledger.dag.nodes[withheld].update.weights)
    other = ledger.dag.nodes[changed].update.weights
    ledger.blobs._data[other] = ledger.blobs._data[other][:-1] + b"!"
    look = provider(ledger).step()
    assert "are not here" in look.left_out[withheld]
    assert "other bytes" in look.left_out[changed]
    assert look.taken == ()
    assert {str(fault.where).split()[1] for fault in ledger.verify().faults} == {str(withheld), str(changed)}


@pytest.mark.parametrize("large", [1e300, 3e38, 2e4])
def test_rows_that_are_too_large_are_named_and_left_out(large):
    """Numbers of 64 bits that are finite may be none of 32: whoever reckoned with them could not go on."""
    ledger = a_ledger(committee=1, quorum=1, standing=1)
    two = provider(ledger, 1)
    tables = two.first.like(lambda tensor: tensor.double())
    tables.relation[0, 0] = large
    words = {"schema": "tacit.shared/1", "entities": "\n".join(two.graph.entities),
             "relations": "\n".join(two.graph.relations)}  # fmt: skip
    data = pack_tensors(tables.tensors(), words)
    with pytest.raises(Refused, match="not finite, or above"):
        ledger.publish_rows(WHO[1], "drugs", data, None)
    update = Update(two.model, (two.model,), ledger.blobs.put(data), len(data))
    bad = ledger.publish(WHO[1], update).cid  # as one would who does not check
    look = provider(ledger).step()
    assert "not finite, or above" in look.left_out[bad]
    assert look.update is not None


@pytest.mark.parametrize("shape", ["[Infinity]", "[1e999, 2]"])
def test_weights_that_cannot_be_read_are_named_and_left_out(shape):
    ledger = a_ledger()
    header = f'{{"entity": {{"dtype": "F32", "shape": {shape}, "data_offsets": [0, 0]}}}}'.encode()
    data = len(header).to_bytes(8, "little") + header
    model = ledger.dag.branch("drugs").cid
    bad = ledger.publish(WHO[1], Update(model, (model,), ledger.blobs.put(data), len(data))).cid
    assert "no whole safetensors file" in provider(ledger).step().left_out[bad]
    assert len(ledger.verify().faults) == 1


def junk(ledger, who, count):
    """Records of weights that are nowhere."""
    model = ledger.dag.branch("drugs").cid
    return [ledger.publish(who, Update(model, (model,), CID.of(f"{ledger.head}{n}".encode()), 100)) for n in
            range(count)]  # fmt: skip


@given(st.lists(st.floats(0.1, 10_000), min_size=1, max_size=60))
@hypothesis_settings(max_examples=20)
def test_weights_that_are_nowhere_are_asked_for_less_and_less_often(pauses):
    ledger, now, asked = a_ledger(), [0.0], []
    provider(ledger, 1).step()
    node = newest(ledger)
    data = ledger.blobs._data.pop(node.update.weights)
    ledger.blobs.get = lambda cid, largest, get=ledger.blobs.get: asked.append(now[0]) or get(cid, largest)
    shelf = Shelf(ledger, clock=lambda: now[0])
    for pause in (0, *pauses):
        now[0] += pause
        with pytest.raises(Withheld, match="are not here"):
            shelf.rows(node)
    waits = np.diff(asked)
    assert all(wait >= min(2.0 * 2**n, 3600) for n, wait in enumerate(waits))
    assert all(wait <= min(2.0 * 2**n, 3600) + max(pauses) for n, wait in enumerate(waits))
    ledger.blobs.put(data)
    now[0] += 3600
    assert shelf.rows(node).entities == tuple(SMALL[1].entities)


def test_a_committee_does_not_wait_for_weights_that_are_nowhere(monkeypatch):
    """Each look asks at most once for those of one provider, and none for ever; what is there is voted on."""
    ledger, asked = a_ledger(committee=1, quorum=1, standing=1, batch=5), []
    now, one, other = [0.0], provider(ledger, 1, updates=50), provider(ledger, 2, updates=50)
    one.shelf = Shelf(ledger, clock=lambda: now[0])
    one.step()
    while not (ledger.dag.branch("drugs").committee.seats.get(ledger.dag.branch("drugs").committee.batch)):
        one.serve()
        junk(ledger, WHO[0], 1)
    liars = junk(ledger, WHO[0], 3)
    honest = other.step().update
    get = ledger.blobs.get
    monkeypatch.setattr(ledger.blobs, "get", lambda cid, largest: asked.append(cid) or get(cid, largest))
    one.serve()
    assert ledger.dag.outcome(honest) != "undecided"
    missing = {record.body.weights for record in liars}
    assert len(missing & set(asked)) == 1
    for _ in range(5):
        one.serve()
    assert set(asked) == missing | {ledger.dag.nodes[honest].update.weights}
    assert len(asked) == 4
    for _ in range(50):
        now[0] += 3600
        one.serve()
    assert 50 <= len(asked) < 60
    junk(ledger, WHO[0], 5 * (LATE + 2))
    assert not set(one.branch.committee.due(WHO[1].public)) & {record.cid for record in liars}


@given(st.integers(5, 300))
@hypothesis_settings(max_examples=5)
def test_whoever_floods_the_ledger_hides_nobody_and_sets_no_pace(many):
    ledger = a_ledger()
    others = {provider(ledger, n).step().update for n in range(3)}
    one = provider(ledger, 3, recent=20)
    assert one.news()
    first = one.step()
    assert set(first.taken) == others
    assert not one.news()
    for _ in range(many):
        ledger.publish(WHO[4], Update(one.model, (one.model,), CID.of(ledger.head.encode()), 100))
    nodes, _ = one.candidates()
    assert others < {node.cid for node in nodes}
    assert not one.news()
    copied = newest(ledger).parents or ledger.dag.nodes[first.update]
    ledger.publish(WHO[4], replace(copied.update, parents=(one.model,)))
    assert not one.news()
    assert others <= {node.cid for node in one.candidates()[0]}
    provider(ledger, 0).step()
    assert one.news()


def test_forged_updates_are_never_candidates():
    ledger = a_ledger()
    provider(ledger, 1).step()
    right = newest(ledger)
    stranger = known("stranger")
    update = Update(right.update.model, (right.cid,), right.update.weights, right.update.size)
    for record in (Record.sign(stranger, update), Record.sign(WHO[2], update)):
        data = record.data if record.by == stranger.public else record.data[:-1] + bytes([record.data[-1] ^ 1])
        ledger.log.append([(str(CID.of(data, 0x71)), data)])
    one = provider(ledger)
    look = one.step()
    assert look.taken == (right.cid,)
    assert "is not admitted" in str(ledger.faults[0])
    assert len(ledger.faults) == 2


def test_nothing_is_added_to_a_history_that_was_rewritten(tmp_path):
    place = Ledger.begin(tmp_path / "ledger", WHO[0], Genesis("tests", keys=KEYS))
    place.open_model(WHO[0], Model(place.genesis, "drugs", entity=DIM, relation=DIM, committee=0, quorum=0, standing=0))
    one, two = provider(place), provider(place, 1)
    one.step()
    two.step()
    base = sqlite3.connect(tmp_path / "ledger/log.sqlite")
    base.executescript("DROP TRIGGER no_update; DROP TRIGGER no_delete; DELETE FROM entries WHERE position = 3")
    base.close()
    again = Ledger.load(tmp_path / "ledger")
    assert again.rewritten
    with pytest.raises(Refused, match="Nothing is added to it"):
        provider(again, 2).step()


def test_a_false_claim_of_privacy_cannot_be_seen():
    """Rows trained without privacy under a claim of nearly nothing: it stands, and everybody takes it."""
    ledger = a_ledger()

    class Boaster(Provider):
        def claim(self, holding=b""):
            return Claim((Segment(Gaussian(1000.0), 1),))

    boast = provider(ledger, 1, kind=Boaster).step()
    assert ledger.verify().faults == []
    assert provider(ledger).step().taken == (boast.update,)


def test_a_claim_of_nothing_at_all_can_be_seen():
    """An update without a claim makes all that its provider claims nothing: that follows from the log."""
    ledger = a_ledger()
    provider(ledger, wanted=private()).step()
    assert ledger.dag.claimed(WHO[0].public)
    data = ledger.blobs.get(newest(ledger).update.weights, 1 << 20)
    ledger.publish_rows(WHO[0], "drugs", data, None, [newest(ledger).cid])
    assert ledger.dag.claimed(WHO[0].public) is None


def test_a_free_rider_is_found_by_its_weights_and_in_disguise_by_its_likeness():
    ledger = a_ledger()
    honest = [provider(ledger, n, graph=SMALL[n % 3]) for n in range(3)]
    for each in honest:
        each.step()
    rider = provider(ledger, 3, kind=FreeRider)
    first = rider.step().update
    reader = provider(ledger, 4, defence=Defence(checks=("copies",)))
    assert reader.candidates()[1][first] == "has the very weights of another's update"
    assert first not in [node.cid for node in reader.candidates()[0]]
    rider.noise = 1e-5
    second = rider.step().update
    nodes, _ = reader.candidates()
    assert second in [node.cid for node in nodes]
    assert "is a copy" in reader.take()[1][second]


# -- by the clock ------------------------------------------------------------------------------------------------------


def test_a_gathering_follows_its_clock():
    found = []
    for _ in range(2):
        ledger = a_ledger()
        crowd = [provider(ledger, n, updates=2) for n in range(3)]
        gathering = Gathering(crowd, speeds={1: 0.1, 2: 0.0})
        gathering.run()
        found.append([(round(time, 6), n, look.ended) for time, n, look in gathering.looks])
        assert len(ledger.dag.branch("drugs").nodes) == 4
        rows = ledger.rows(newest(ledger)).entity
        found.append(rows)
    assert found[0] == found[2]
    assert torch.equal(found[1], found[3])
    assert [n for _, n, ended in found[0] if ended is None] == [0, 0, 1, 1]
    assert all(n != 2 for _, n, _ in found[0])


def test_a_gathering_stops_by_the_clock_and_goes_on():
    ledger = a_ledger()
    seen = []
    gathering = Gathering([provider(ledger, n, updates=2) for n in range(2)])
    gathering.run(until=0.02, on_look=lambda *told: seen.append(told))
    few = len(seen)
    gathering.run(on_look=lambda *told: seen.append(told))
    assert 0 < few < len(seen)
    assert [time for time, _, _ in seen] == sorted(time for time, _, _ in seen)
    with pytest.raises(BadValue):
        Gathering([], speeds={0: math.nan})


def test_a_shelf_is_shared_and_forgets():
    ledger = a_ledger()
    shelf = Shelf(ledger)
    provider(ledger).step()
    rows = shelf.rows(newest(ledger))
    assert shelf.rows(newest(ledger)) is rows
    shelf.places(SMALL[0].entities, rows.entities)
    shelf.forget([])
    assert shelf.rows(newest(ledger)) is not rows
    assert not shelf._names
    assert isinstance(Look(), Look)
