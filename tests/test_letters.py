"""A coordinator and parties by letters, over a post that loses, doubles, delays and spoils them; in threads here, as
processes over a real broker in test_network.py.
"""

import contextlib
import json
import queue
import random
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tacit import correspondence
from tacit.clinic import clinic
from tacit.coordinator import Ask, Coordinator, Stopped
from tacit.correspondence import Correspondence, attend
from tacit.errors import Refused, TacitError
from tacit.federated import Plan, federate, split_settings
from tacit.federation.aggregation import OwnerMean
from tacit.federation.keys import Identity, Roster
from tacit.federation.letters import Letter
from tacit.federation.messages import SERVER, Message
from tacit.federation.secure import SumFailed
from tacit.federation.secured import Secured
from tacit.federation.transcript import Transcript
from tacit.federation.transport import InProcess
from tacit.federation.vocabulary import added, added_up
from tacit.participant import Declined, Lost, Participant
from tacit.privacy.events import Gaussian, Segment
from tacit.run import Run, train
from tacit.settings import combine
from tacit.tensors import load_tensors

SMALL = clinic("small")
NAMES = SMALL.names
QUICK = {"scorer": {"dim": 4}, "negatives": {"count": 4}, "training": {"batch": 64, "device": "cpu"},
         "optimizer": {"learning_rate": 0.02}, "evaluation": {"every": 2},
         "federation": {"rounds": 3, "local_epochs": 1}}  # fmt: skip
KEYS = {name: Identity.new(name) for name in (*NAMES, "coordinator", "stranger")}
KEEPER = Identity.new("keeper")
ROSTER = Roster.begin(KEEPER)
for _name in (*NAMES, "coordinator"):
    ROSTER = ROSTER.enrol(KEEPER, _name, KEYS[_name].public)


def plan(recipe="fede", **more):
    return Plan(recipe, NAMES, *split_settings(combine(QUICK, {"name": recipe}, more)))


class Street:
    """Letter boxes in one process; `meddle` may lose, double, spoil or keep back what is put into them."""

    def __init__(self, meddle=lambda to, letter: [letter]):
        self.boxes = {name: queue.Queue() for name in KEYS}
        self.meddle = meddle

    def post(self, name):
        street = self

        class Box:
            def send(self, to, letter):
                for each in street.meddle(to or "coordinator", letter):
                    street.boxes[to or "coordinator"].put((name if to is None else "", each))

            def receive(self, timeout):
                try:
                    return street.boxes[name].get(timeout=timeout)
                except queue.Empty:
                    return None

        return Box()


def together(tmp_path, wanted, street=None, *, patience=60, **options):
    """All of them, in threads; the coordinator, and what stopped the parties."""
    street = street or Street()
    stopped = {}

    def party(name, graph):
        try:
            one = Participant(wanted, graph, KEYS[name], ROSTER, tmp_path / name)
            attend(one, street.post(name), KEYS[name], ROSTER, "coordinator", patience=patience)
            one.close()
        except Exception as error:  # noqa: BLE001 - it is looked at
            stopped[name] = error

    threads = [threading.Thread(target=party, args=each) for each in zip(NAMES, SMALL, strict=True)]
    for thread in threads:
        thread.start()
    letters = Correspondence(street.post("coordinator"), KEYS["coordinator"], ROSTER, NAMES)
    try:
        return Coordinator(wanted, tmp_path / "coordinator", letters, **options).run(), stopped
    finally:
        letters.end("")
        for thread in threads:
            thread.join(30)


@pytest.fixture(autouse=True)
def _quickly(monkeypatch):
    for name, seconds in (("POKE", 0.1), ("KNOCK", 0.1), ("LINGER", 0.5)):
        monkeypatch.setattr(correspondence, name, seconds)


def rows(tmp_path):
    tensors, _ = load_tensors(tmp_path / "coordinator" / "private" / "rows.safetensors")
    return next(iter(tensors.values()))


def check_the_same(tmp_path, one, wanted, places=None):
    """The same rows and metrics as in one process."""
    star = federate_in_process(wanted, places)
    torch.testing.assert_close(rows(tmp_path), star["star.table"], atol=1e-6, rtol=0)
    for i, name in enumerate(NAMES):
        run = Run.open(tmp_path / name)
        for part in ("entity", "relation"):
            mine = getattr(run.model.tables, part)
            torch.testing.assert_close(mine, star[f"model.{i}.{part}"], atol=1e-6, rtol=0)


def federate_in_process(wanted, places=None, parties=SMALL):
    from tacit.federated import with_noise
    from tacit.recipes import RECIPES, Setup

    settings = with_noise(wanted.recipe, parties, wanted.settings, wanted.federation)
    together = RECIPES[wanted.recipe](Setup(parties, settings, wanted.federation, Transcript()))
    if places is not None:  # pseudonyms are drawn, and with them which row a name has
        for seat, ids in zip(together.star.seats, places, strict=True):
            seat.places = ids
    together.run(lambda event: None)
    found = dict(together.star.state())
    for i in range(len(parties)):
        tables = together.fit.best.party(together.fit.layout, i)
        found |= {f"model.{i}.{part}": getattr(tables, part).clone() for part in ("entity", "relation")}
    return found


@pytest.mark.parametrize("recipe", ["fede", "fedr"])
@pytest.mark.parametrize("more", [{}, {"aggregation": "weighted"}, {"changed_only": True}, {"fraction": 0.7}],
                         ids=["plain", "weighted", "changed", "sampled"])  # fmt: skip
def test_parties_by_letters_learn_what_they_would_in_one_process(tmp_path, recipe, more):
    wanted = plan(recipe, federation=QUICK["federation"] | more)
    one, stopped = together(tmp_path, wanted)
    assert not stopped
    check_the_same(tmp_path, one, wanted)
    run = federate(SMALL, recipe, settings=combine(QUICK, {"federation": more}))
    assert one.metrics["test"].mrr == pytest.approx(run.metrics["test"].mrr, abs=1e-9)
    assert one.patience.best_round == run.best_round


@pytest.mark.parametrize("names", ["open", "private"])
def test_secure_sums_by_letters(tmp_path, names):
    wanted = plan("fedr", federation=QUICK["federation"] | {"secure": True, "vocabulary": names})
    one, stopped = together(tmp_path, wanted)
    assert not stopped
    where = [tmp_path / name / "private" / "places.safetensors" for name in NAMES]
    check_the_same(tmp_path, one, wanted, [load_tensors(path)[0]["places"] for path in where])
    if names == "private":
        assert all(len(ids) == 0 for ids in one.center.places)


@pytest.mark.slow
@pytest.mark.parametrize(
    "privacy",
    [
        {"name": "dpsgd", "sigma": 1.0},
        {"name": "dpsgd", "sigma": 1.0, "prior_share": 0.5, "prior_sigma": 2.0},
        {"epsilon": 2.0},
    ],
    ids=["steps", "both", "counts"],
)
@pytest.mark.parametrize("secure", [False, True])
def test_private_training_by_letters(tmp_path, privacy, secure):
    federation = QUICK["federation"] | {"secure": secure, "vocabulary": "open"}
    wanted = plan("private_fede", privacy={"noise": "seeded"} | privacy, federation=federation,
                  negatives={"count": 4, "scope": "vocabulary"})  # fmt: skip
    one, stopped = together(tmp_path, wanted)
    assert not stopped
    if one.center is not None:
        check_the_same(tmp_path, one, wanted)
    whole = federate(SMALL, "private_fede", settings=combine(
        QUICK, {"privacy": {"noise": "seeded"} | privacy, "federation": federation,
                "negatives": {"count": 4, "scope": "vocabulary"}}))  # fmt: skip
    assert not one.metrics, "what is computed from the triples without noise stays with them"
    for i, name in enumerate(NAMES):
        run = Run.open(tmp_path / name)
        assert run.metrics["test"].mrr == pytest.approx(whole.by_party["test"][i].mrr, abs=1e-5)
        if "epsilon" in privacy:
            assert run.claim["simulated_epsilon"] <= privacy["epsilon"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_letters_that_are_lost_doubled_late_or_spoilt_change_nothing(tmp_path, seed):
    draw, late = random.Random(seed), []

    def meddle(to, letter):
        found, chance = [letter], draw.random()
        if chance < 0.1:
            found = []
        elif chance < 0.2:
            found = [letter, letter]
        elif chance < 0.3:
            spoilt = bytearray(letter)
            spoilt[draw.randrange(len(spoilt))] ^= 1 << draw.randrange(8)
            found = [bytes(spoilt), letter]
        elif chance < 0.4:
            late.append((to, letter))
            found = []
        if late and draw.random() < 0.3:
            kept = late.pop(draw.randrange(len(late)))
            if kept[0] == to:
                found.append(kept[1])
        return found

    wanted = plan("fede")
    one, stopped = together(tmp_path, wanted, Street(meddle), wait=30, deadline=30)
    assert not stopped
    check_the_same(tmp_path, one, wanted)


@pytest.mark.slow
def test_what_a_party_does_not_agree_to_is_said_with_the_difference(tmp_path):
    street, wanted = Street(), plan("fede")
    other = plan("fede", scorer={"dim": 8, "name": "rotate"}, training={"batch": 64, "device": "cpu"})
    caught = []

    def party():
        one = Participant(other, SMALL[0], KEYS[NAMES[0]], ROSTER, tmp_path / "party")
        try:
            attend(one, street.post(NAMES[0]), KEYS[NAMES[0]], ROSTER, "coordinator", patience=20)
        except Exception as error:  # noqa: BLE001 - it is looked at
            caught.append(error)

    thread = threading.Thread(target=party)
    thread.start()
    letters = Correspondence(street.post("coordinator"), KEYS["coordinator"], ROSTER, NAMES)
    with pytest.raises(Stopped, match=r"declines: .*settings.scorer.dim is 4 there, and 8 here"):
        Coordinator(wanted, tmp_path / "coordinator", letters, wait=5).run()
    thread.join(10)
    assert "settings.scorer.name" in str(caught[0])
    assert not (tmp_path / "party").exists()


def test_versions_are_compared_before_anything_else(tmp_path):
    one = a_party(tmp_path, plan("fede"))
    with pytest.raises(Declined, match="version 99 of the protocol, and this party version 1"):
        one.answer("hello", {"protocol": 99, "tacit": "9.0", "plan": plan("fede").json()}, [])
    assert not (tmp_path / "party").exists()


def test_names_that_changed_since_the_federation_began_are_refused(tmp_path):
    street, wanted = Street(), plan("fede")
    together(tmp_path, wanted, street)
    where = tmp_path / "coordinator" / "private"
    (where / "metrics.json").unlink()  # as if it had been killed before its first checkpoint
    for path in (where / "checkpoints").iterdir():
        path.unlink()
    known = json.loads((where / "agreed.json").read_text())
    (where / "agreed.json").write_text(json.dumps(known | {"names": dict.fromkeys(NAMES, "other")}))
    for name in NAMES:
        (tmp_path / name).rename(tmp_path / f"{name}.old")
    with pytest.raises(Stopped, match="has other names than when the federation began"):
        together(tmp_path, wanted, Street(), patience=1)


def test_each_ones_own_affairs_may_differ():
    mine, theirs = plan("fede"), plan("fede", training={"batch": 64, "device": "cuda"}, name="other")
    assert mine.differences(json.loads(json.dumps(theirs.json()))) == []


def test_who_does_not_come_is_named(tmp_path):
    letters = Correspondence(Street().post("coordinator"), KEYS["coordinator"], ROSTER, NAMES)
    with pytest.raises(Stopped, match=f"{NAMES[0]}.*not there after 0.3 s"):
        Coordinator(plan("fede"), tmp_path / "coordinator", letters, wait=0.3).run()


# -- a coordinator that lies -------------------------------------------------------------------------------------------


def a_party(tmp_path, wanted, name="party"):
    return Participant(wanted, SMALL[0], KEYS[NAMES[0]], ROSTER, tmp_path / name)


@pytest.mark.slow
def test_noise_that_a_smaller_party_needs_is_no_lack_of_budget(tmp_path, monkeypatch):
    """What the parties agree on is the most that any of them needs; a holding is asked about its own party's."""
    from tacit.privacy.budget import Holding

    monkeypatch.setenv("TACIT_HOME", str(tmp_path / "home"))
    held = Holding.begin("study", epsilon=8.0, delta=1e-5)
    wanted = plan("private_fede", privacy={"name": "dpsgd", "epsilon": 4.0}, training={"batch": 16, "device": "cpu"})
    keys = (KEYS[NAMES[0]], ROSTER)
    one = Participant(wanted, SMALL[0], *keys, tmp_path / "party", budget="study")
    noise = one._needed | {"sigma": 3 * one._needed["sigma"]}
    one.answer("begin", {"run": "1", "noise": noise}, [])
    assert one.run.settings.privacy.sigma == noise["sigma"]
    assert 0 < one.run.epsilon < 2.0
    held.reserve([Segment(Gaussian(0.65), 1)], run="earlier")
    with pytest.raises(TacitError, match="'study' has too little left for epsilon 4"):
        Participant(wanted, SMALL[0], *keys, tmp_path / "another", budget="study")


def test_a_coordinator_cannot_talk_a_party_out_of_its_privacy(tmp_path):
    wanted = plan(
        "private_fede", privacy={"name": "dpsgd", "sigma": 1.0}, negatives={"count": 4, "scope": "vocabulary"}
    )
    one = a_party(tmp_path, wanted)
    with pytest.raises(Declined, match="this party needs 1"):
        one.answer("begin", {"run": "ab", "noise": {"sigma": 0.5}}, [])
    for noise in ({"sigma": None}, {}, {"sigma": float("nan")}, {"sigma": float("inf")}, {"sigma": "1"}):
        with pytest.raises(Declined):
            one.answer("begin", {"run": "ab", "noise": noise}, [])
    one.answer("begin", {"run": "ab", "noise": {"sigma": 2.0, "noise": "seeded", "clip": 1e9, "size": 1}}, [])
    privacy = one.run.settings.privacy
    assert (privacy.sigma, privacy.noise, privacy.clip, privacy.size) == (2.0, "system", 1.0, None)
    with pytest.raises(Declined, match="settings"):
        one.answer("begin", {"run": "ab", "noise": {"sigma": 4.0}}, [])


def test_a_party_trains_no_more_rounds_than_were_agreed_on_and_none_twice(tmp_path):
    one, places = a_party(tmp_path, plan("fede")), torch.arange(len(SMALL[0].entities))
    one.answer("begin", {"run": "ab", "noise": {}}, [])
    one.answer("start", {"about": "names", "id": "1"}, [])
    told = {"part": "entity", "total": len(places)}
    one.answer("go on", {"id": "1"}, [Message("places", 0, 1, SERVER, 0, told, {"ids": places})])
    rows = torch.zeros(len(places), 4)

    def train(number, rows=rows):
        message = Message("rows", number, 0, SERVER, 0, {"part": "entity"}, {"values": rows})
        return one.answer("start", {"about": "train", "round": number, "after": 0, "id": "2"}, [message])

    for number in (0, 4, -1, 2.0, True, "1", None):
        with pytest.raises((Declined, Refused)):
            train(number)
    first = train(1)[1][0].arrays["values"].clone()
    epochs = int(one.fit.cohort.epochs[0])
    assert torch.equal(train(1)[1][0].arrays["values"], first)
    with pytest.raises(Declined, match="other rows"):
        train(1, rows + 1)
    assert int(one.fit.cohort.epochs[0]) == epochs == 1
    train(3)
    with pytest.raises(Declined, match="older state"):
        train(2)
    one.close()


@pytest.mark.parametrize("privacy", [{}, {"privacy": {"name": "dpsgd", "sigma": 1.0}}])
def test_a_party_tells_exact_counts_only_where_the_plan_has_them_told(tmp_path, privacy):
    recipe = "private_fede" if privacy else "fede"
    one = a_party(tmp_path, plan(recipe, **privacy, negatives={"count": 4, "scope": "vocabulary"}))
    one.answer("begin", {"run": "ab", "noise": {"sigma": 1.0} if privacy else {}}, [])
    for about in ("counts", "marginals", "everything", None):
        with pytest.raises(Declined, match="nothing to tell"):
            one.answer("start", {"about": about, "id": "1"}, [])
    one.close()


def test_a_run_that_is_no_partys_is_not_touched(tmp_path):
    train(SMALL[0], out=tmp_path / "party", dim=4, epochs=1)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "party").rglob("*") if path.is_file()}
    with pytest.raises(TacitError, match="choose another --out"):
        a_party(tmp_path, plan("fede"))
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "party").rglob("*") if path.is_file()}


def test_what_is_validated_is_a_round_of_the_plan_and_never_an_older_one(tmp_path):
    one, places = a_party(tmp_path, plan("fede")), torch.arange(len(SMALL[0].entities))
    one.answer("begin", {"run": "ab", "noise": {}}, [])
    one.answer("start", {"about": "names", "id": "1"}, [])
    told = {"part": "entity", "total": len(places)}
    one.answer("go on", {"id": "1"}, [Message("places", 0, 1, SERVER, 0, told, {"ids": places})])

    def validate(number):
        rows = {"values": torch.zeros(len(places), 4)}
        message = Message("rows", number + 1, 0, SERVER, 0, {"part": "entity"}, rows)
        return one.answer("validate", {"round": number}, [message])

    for number in (0, 4, 1000):
        with pytest.raises(Declined, match="cannot be validated"):
            validate(number)
    validate(2)
    with pytest.raises(Declined, match="cannot be validated"):
        validate(1)
    one.close()


def test_answers_of_another_run_are_not_taken():
    street = Street()
    post, letters = (
        street.post(NAMES[0]),
        Correspondence(street.post("coordinator"), KEYS["coordinator"], ROSTER, NAMES),
    )
    for run in ("old", "new"):
        post.send(None, Letter("answer", NAMES[0], "coordinator", run, 1, 1, {"of": run}).seal(KEYS[NAMES[0]]))
    found = letters.ask("new", {NAMES[0]: Ask("hello", {})}, 5)
    assert found[NAMES[0]].says == {"of": "new"}


def test_sums_before_round_1_are_over_everyone():
    """Made again without someone, of the same pseudonyms, they would tell by their difference what that one has."""
    how = Secured.of(OwnerMean(), [f"party-{i}" for i in range(4)], "relation")
    members, server = how.for_one_sum()
    talks = {i: added(np.arange(3, dtype=np.uint32), "relation", member, 1) for i, member in members.items()}
    transport = InProcess(Transcript(), lambda message: message.kind == "masked" and message.sender == 3)
    with pytest.raises(SumFailed, match="not all parties"):
        transport.meet(added_up(3, "relation", server, 1), talks)


@given(st.dictionaries(st.sampled_from(["run", "noise", "round", "about", "id", "after", "plan", "protocol", "best"]),
                       st.none() | st.integers() | st.text(max_size=3) | st.lists(st.integers(), max_size=2)
                       | st.dictionaries(st.text(max_size=3), st.integers(), max_size=2)))  # fmt: skip
def test_questions_that_make_no_sense_are_declined(says):
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        one = a_party(Path(folder), plan("fede"))
        for asked in ("hello", "begin", "start", "go on", "validate", "end", "dance"):
            with contextlib.suppress(Declined, Refused, Lost):
                one.answer(asked, dict(says), [])
        one.close()


# -- letters -----------------------------------------------------------------------------------------------------------

SAMPLE = Letter("ask", "coordinator", NAMES[0], "ab", 1, 2, {"asked": "hello"}, (b"one", b"", b"three"))


def test_a_letter_is_what_was_written():
    assert Letter.open(SAMPLE.seal(KEYS["coordinator"]), ROSTER, NAMES[0]) == SAMPLE


@given(st.data())
def test_a_letter_that_was_changed_anywhere_is_refused(data):
    sealed = bytearray(SAMPLE.seal(KEYS["coordinator"]))
    place = data.draw(st.integers(0, len(sealed) - 1))
    sealed[place] ^= data.draw(st.integers(1, 255))
    with pytest.raises(Refused):
        Letter.open(bytes(sealed), ROSTER, NAMES[0])


@given(st.binary(max_size=300))
def test_bytes_that_are_no_letter_are_refused(data):
    for each in (data, b"tacit-letter\x01" + data):
        with pytest.raises(Refused):
            Letter.open(each, ROSTER, NAMES[0])


def test_a_letter_of_a_stranger_or_in_anothers_name_or_to_another_is_refused():
    for sealed, receiver, reason in (
        (replace(SAMPLE, sender="stranger").seal(KEYS["stranger"]), NAMES[0], "stranger"),
        (SAMPLE.seal(KEYS["stranger"]), NAMES[0], "signature"),
        (SAMPLE.seal(KEYS["coordinator"]), NAMES[1], "someone else"),
    ):
        with pytest.raises(Refused, match=reason):
            Letter.open(sealed, ROSTER, receiver)
    revoked = ROSTER.revoke(KEEPER, "coordinator")
    with pytest.raises(Refused, match="revoked"):
        Letter.open(SAMPLE.seal(KEYS["coordinator"]), revoked, NAMES[0])
