"""What peers leave on disk: killed anywhere and put back, no row is lost, nothing is paid for twice or forgotten."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections import deque
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from tacit.cli import app
from tacit.errors import BadInput, TacitError
from tacit.federation.messages import Message
from tacit.federation.transcript import Transcript
from tacit.federation.transport import going
from tacit.files import write_parties
from tacit.graph import Graph
from tacit.parties import given as given_parties
from tacit.peers import Learner, Meeting, Pairing, Peer
from tacit.peers.alignment import bounds_of, by_links, by_rows, by_talk
from tacit.peers.kept import Journal, Lines, PeerRun, Plan, keep_meeting, pairing_of
from tacit.peers.meeting import meet, statement
from tacit.privacy.budget import Holding, cost
from tacit.privacy.plan import WITHOUT_BUDGET
from tacit.tensors import load_tensors
from test_peers import PARTIES, PUBLISHED, SOUND, done, everything, pair, wanted

# -- a file of lines ---------------------------------------------------------------------------------------------------


def test_a_line_that_was_cut_off_was_none(tmp_path):
    where = tmp_path / "lines"
    lines = Lines(where)
    lines.add({"a": 1})
    lines.add({"b": 2})
    where.write_bytes(where.read_bytes()[:-3])
    again = Lines(where)
    assert again.read() == [{"a": 1}]
    again.add({"c": 3})
    assert Lines(where).read() == [{"a": 1}, {"c": 3}]
    where.write_bytes(b"what is this\n")
    with pytest.raises(BadInput, match="is damaged"):
        Lines(where).read()


@pytest.mark.parametrize("line", ['{"trained": "many"}', "[1]"])
def test_a_journal_that_is_none_is_refused(tmp_path, line):
    (tmp_path / "journal.jsonl").write_text(line + "\n")
    with pytest.raises(BadInput, match="is damaged"):
        Journal(tmp_path)


# -- killed anywhere ---------------------------------------------------------------------------------------------------

VOTES = Pairing(ppat=replace(PUBLISHED.ppat, shards=50), retrain=2, trainings=3, noise="seeded", votes_sigma=5.0,
                validation="none", within=3.0)  # fmt: skip


class Killed(Meeting):
    """A meeting in which peers are killed, and come back some time after from what they had written down.

    kills: for each, at which of all the events, and whether before the journal was written, before anything was sent,
    or in the middle of what is sent. away: for how many seconds.
    """

    def __init__(self, peers, folders, make, kills, away=1.0):
        super().__init__(peers, Transcript(everything))
        self.folders, self.make, self.kills, self.away = folders, make, dict(kills), away
        self.journals = {peer.number: Journal(folders[peer.number]) for peer in peers}
        self.count, self.killed, self.unsent = itertools.count(), 0, 0
        self.gone = {}
        self.kept = {}

    def _after(self, peer, said):
        if peer is not self._by_number[peer.number]:
            return  # it is dead
        where = self.kills.get(next(self.count))
        if where == "before":
            self._kill(peer)
            return
        self.journals[peer.number].note(peer)
        if peer.learner.best is not None:
            self.kept[peer.number] = peer.learner.best.entity.clone()
        if where == "unsent":
            self.unsent += sum(len(m.arrays["values"]) for m in said if m.kind == "gradient")
            self._kill(peer)
            return
        if where == "middle":
            super()._after(peer, said[:1])
            self.unsent += sum(len(m.arrays["values"]) for m in said[1:] if m.kind == "gradient")
            self._kill(peer)
            return
        super()._after(peer, said)

    def _kill(self, peer):
        number = peer.number
        self.killed += 1
        back = self.make(number)
        self._by_number[number] = back
        self.peers = tuple(back if each.number == number else each for each in self.peers)
        self._events = [event for event in self._events if event[2] is not peer]
        self._alarms.pop(number, None)
        self.gone[number] = back
        self._at(self.now + self.away, back, "comes back")
        import heapq

        heapq.heapify(self._events)

    def run(self, until=math.inf):
        """As always; but who comes back is put back, and met by the others."""
        import heapq

        for peer in self.peers:
            self._after(peer, self.journals[peer.number].start(peer, self.now))
        while self._events and self._events[0][0] <= until:
            self.now, _, peer, what = heapq.heappop(self._events)
            number = peer.number
            if what == "comes back":
                self.gone.pop(number)
                journal = self.journals[number] = Journal(self.folders[number])
                said = journal.start(peer, self.now)
                if number in self.kept:
                    assert torch.equal(peer.learner.kept.entity, self.kept[number]), "an embedding was lost"
                self._after(peer, said)
                for other in self.peers:
                    if other.number != number and other.number not in self.gone:
                        self._after(other, other.met(number, self.now))
                        told = {place[1]: rows for place, rows in other.answered.items() if place[0] == number}
                        for handshake, rows in told.items():
                            self._by_number[number].told[other.number, handshake] = rows
            elif number in self.gone:
                continue
            elif what is None:
                self._alarms.pop(number, None)
                self._after(peer, peer.wake(self.now))
            elif isinstance(what, Message):
                self._after(peer, peer.receive(what, self.now))
            else:
                self._after(peer, peer.finish(what.run(), self.now))


def killed_meeting(tmp_path, kills, pairing, private):
    common = by_links(PARTIES)

    def make(number):
        own = wanted(private=private, noise="seeded") if private else wanted(epochs=3)
        if pairing is VOTES and number != 0:  # one peer votes, the others are clients with private rows
            own = wanted(private=True, noise="seeded")
        return Peer(Learner(number, PARTIES[number], own, common[number], pairing))

    folders = [tmp_path / str(number) for number in range(3)]
    for folder in folders:
        folder.mkdir(parents=True)
    return Killed([make(number) for number in range(3)], folders, make, kills)


def check_books(meeting):
    """What was sent, what is on the disk, and what both sides say, is the same."""
    rows = {}
    for message in meeting.transcript.payloads.values():
        if message.kind == "gradient":
            place = (message.sender, message.receiver, message.says["handshake"], message.round)
            assert place not in rows, "one batch was answered twice"
            rows[place] = len(message.arrays["values"])
    answered = unsent = 0
    for host in meeting.peers:
        counts, learner = Journal(meeting.folders[host.number]).counts, host.learner
        for (client, handshake), many in host.answered.items():
            assert counts[f"answered.{client}.{handshake}"] == many
            sent = sum(r for (h, c, number, _), r in rows.items() if (h, c, number) == (host.number, client, handshake))
            assert many >= sent, "a vote was forgotten"
            answered, unsent = answered + many, unsent + many - sent
            other = meeting._by_number[client]
            assert other.taught[host.number, handshake] <= many
            if (told := other.told.get((host.number, handshake))) is not None:
                assert told <= many
        if learner.votes is not None:
            assert learner.votes.votes == counts["votes"] == sum(host.answered.values())
        assert counts["trained"] == learner.trained <= learner.pairing.trainings
        begun = counts["started"] + counts["again"] + counts["trained"]
        assert learner.looks <= begun
        reserved, spent = learner.spent(reserved=True), learner.spent()
        for part, segments in spent.items():
            for segment in segments:
                [most] = [each.count for each in reserved[part] if each.event == segment.event]
                assert segment.count <= most
        assert learner.best is not None
    assert unsent == meeting.unsent, "what was paid for and not sent stays paid"
    return answered


KILLS = st.lists(
    st.tuples(st.integers(0, 120), st.sampled_from(["before", "unsent", "middle"])), min_size=1, max_size=4
)


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(KILLS)
def test_peers_that_are_killed_anywhere_go_on(tmp_path_factory, kills):
    meeting = killed_meeting(tmp_path_factory.mktemp("kept"), kills, PUBLISHED, False)
    meeting.run()
    assert check_books(meeting) > 0


@pytest.mark.slow
@settings(max_examples=6, deadline=None)
@given(KILLS)
def test_so_do_peers_that_pay(tmp_path_factory, kills):
    meeting = killed_meeting(tmp_path_factory.mktemp("kept"), kills, SOUND, True)
    meeting.run()
    check_books(meeting)


@pytest.mark.parametrize("where", ["before", "unsent", "middle"])
@pytest.mark.parametrize("kind", ["gradient", "generated", "answer", "translated", "ended", "offer", "invite"])
def test_a_peer_that_is_killed_at_a_message(tmp_path, kind, where):
    """Of each kind: the first that is sent, found by a meeting that nobody disturbs."""
    quiet, said = killed_meeting(tmp_path / "quiet", {}, VOTES, False), []
    plain = quiet._after

    def watched(peer, messages):
        said.append({message.kind for message in messages})
        plain(peer, messages)

    quiet._after = watched
    quiet.run()
    assert check_books(quiet) > 0
    at = next(number for number, kinds in enumerate(said) if kind in kinds)
    meeting = killed_meeting(tmp_path / "killed", {at: where}, VOTES, False)
    meeting.run()
    assert meeting.killed == 1
    assert check_books(meeting) > 0


def test_a_vote_that_is_asked_for_again_is_the_same_vote():
    host, client = pair()
    offer = done(client, 1.0)[0]
    done(host, 1.0)
    (invite,) = host.receive(offer, 1.0)
    answer, batch = client.receive(invite, 1.0)
    host.receive(answer, 1.0)
    (first,) = host.receive(batch, 1.0)
    before = host.counts()
    (again,) = host.receive(batch, 1.0)
    assert again.encode() == first.encode()
    assert host.counts() == before
    other = replace(batch, arrays={"values": batch.arrays["values"] + 1})
    assert host.receive(other, 1.0) == []
    assert (host.counts(), host.refused) == (before, 1)


def test_a_first_training_that_was_cut_off_is_paid_for_again(tmp_path):
    def make():
        return Peer(Learner(0, PARTIES[0], wanted(private=True), by_links(PARTIES)[0], replace(SOUND, noise="system")))

    peer, journal = make(), Journal(tmp_path)
    journal.start(peer, 0.0)
    whole = statement(peer.learner)["epsilon"]
    journal.note(peer)
    back = make()
    Journal(tmp_path).start(back, 1.0)
    assert (back.learner.again, back.take_job().what) == (1, "first")
    assert statement(back.learner)["epsilon"] > whole
    assert {s.count for s in back.learner.spent(reserved=True)["valid"]} == {SOUND.trainings + 2}


# -- the folder --------------------------------------------------------------------------------------------------------


def plan(own=None, pairing=PUBLISHED, **more):
    return Plan(**{"meeting": "trial", "peers": ("a", "b"), "settings": own or wanted(), "pairing": pairing} | more)


def test_a_peer_s_folder_says_what_it_was_told(tmp_path):
    whole = by_links(PARTIES)
    run = PeerRun.create(tmp_path / "a", plan(), "a", PARTIES[0])
    assert (tmp_path / "a" / "private").stat().st_mode & 0o777 == 0o700
    run.aligned["b"] = whole[0][1]
    run.use("b", vectors=False)
    run.began = ["b"]
    run.save_aligned()
    again = PeerRun.open(tmp_path / "a")
    assert (again.plan, again.graph, again.began, again.number) == (run.plan, PARTIES[0], ["b"], 0)
    assert again.aligned["b"].entity.tolist() == whole[0][1].entity.tolist()
    assert len(again.used["b"].relation) == 0 < len(again.aligned["b"].relation)
    with pytest.raises(TacitError, match="no rows yet"):
        again.run()
    with pytest.raises(BadInput, match=r"is no peer's folder"):
        PeerRun.open(tmp_path)
    with pytest.raises(TacitError, match="none of the peers"):
        PeerRun.create(tmp_path / "c", plan(), "c", PARTIES[0])
    with pytest.raises(TacitError, match="two peers or more"):
        plan(peers=("a", "a"))


def test_rows_that_are_not_private_are_never_shared(tmp_path):
    for pairing, private, shared in ((PUBLISHED, False, False), (SOUND, True, False),
                                     (replace(SOUND, noise="system"), True, True)):  # fmt: skip
        folder = tmp_path / f"{pairing.mode}-{pairing.noise}"
        run = PeerRun.create(folder, plan(wanted(private=private), pairing), "a", PARTIES[0])
        run.aligned["b"] = by_links(PARTIES)[0][1]
        run.use("b", vectors=True)
        learner = run.learner(run.used)
        peer = Peer(learner)
        journal = Journal(run.private)
        journal.start(peer, 0.0)
        done(peer, 1.0)
        journal.note(peer)
        found = run.finish(learner)
        assert (folder / "shareable" / "model.safetensors").exists() == shared
        assert (found["statement"]["epsilon"] is not None) == shared
        assert torch.equal(run.run().model.tables.entity, learner.kept.entity)
        for path in (folder / "shareable").rglob("*"):
            assert "score" not in path.read_bytes().decode("latin1")


def test_two_meetings_add_up_in_a_holding(tmp_path, monkeypatch):
    monkeypatch.setenv("TACIT_HOME", str(tmp_path / "home"))
    Holding.begin("ward", epsilon=50.0, delta=1e-5)
    pairing = replace(SOUND, noise="system")
    costs = []
    for meeting in ("one", "two"):
        run = PeerRun.create(tmp_path / meeting, plan(wanted(private=True), pairing, meeting=meeting), "a", PARTIES[0],
                             budget="ward")  # fmt: skip
        learner = run.learner({"b": by_links(PARTIES)[0][1]})
        run.pay(learner)
        run.pay(learner)  # started again: what was taken is taken
        assert WITHOUT_BUDGET not in run.state(learner)["not_covered"]
        assert WITHOUT_BUDGET in statement(learner)["not_covered"]
        holding = Holding.load("ward")
        costs.append(cost(holding.order, holding.spent))
    most = max(cost(holding.order, each) for each in learner.spent(reserved=True).values())
    assert costs == pytest.approx([most, 2 * most])
    learner.begun(first=True)
    learner.begun(first=True)  # after a kill
    run.pay(learner)
    holding = Holding.load("ward")
    assert cost(holding.order, holding.spent) > costs[1]
    assert len(holding.charges) == 3
    Holding.begin("little", epsilon=0.1, delta=1e-5)
    poor = PeerRun.create(tmp_path / "poor", plan(wanted(private=True), pairing), "a", PARTIES[1], budget="little")
    with pytest.raises(TacitError, match="little"):
        poor.pay(learner)
    groups = replace(wanted(private=True), privacy=replace(wanted(private=True).privacy, unit="group", group=2))
    for own, odd, why in ((wanted(), PUBLISHED, "published mode"), (wanted(private=True), SOUND, "a simulation"),
                          (groups, pairing, "counts what a triple costs")):  # fmt: skip
        with pytest.raises(TacitError, match=why):
            PeerRun.create(tmp_path / "odd", plan(own, odd), "a", PARTIES[0], budget="ward")
    assert not (tmp_path / "odd").exists()


def test_pairing_is_read_as_settings_are():
    assert pairing_of({}) == Pairing()
    found = pairing_of({"mode": "published", "trainings": 2, "ppat": {"epochs": 3}})
    assert (found.mode, found.trainings, found.ppat.epochs) == ("published", 2, 3)
    for odd, why in (({"training": 3}, "pairing.trainings"), ({"ppat": {"epoch": 3}}, "pairing.ppat.epochs"),
                     ({"trainings": "many"}, "a whole number"), ({"mode": "silent"}, "'sound', 'published'"),
                     ([], "a section"), ({"ppat": 3}, "a section"), ({"within": 0}, "within is above 0")):  # fmt: skip
        with pytest.raises(BadInput, match=why):
            pairing_of(odd)


def test_a_meeting_in_one_process_leaves_a_folder(tmp_path):
    pairing = replace(SOUND, noise="system")
    found = keep_meeting(tmp_path / "met", PARTIES, wanted(private=True), pairing, alignment="links",
                         run=lambda: meet(PARTIES, wanted(private=True), pairing))  # fmt: skip
    shared = json.loads((tmp_path / "met/shareable/privacy.json").read_text())
    assert all(claim["epsilon"] > 0 for claim in shared["peers"].values())
    assert found["test"].keys() == set(PARTIES.names)
    history = [json.loads(line) for line in (tmp_path / "met/private/history.jsonl").read_text().splitlines()]
    assert {"first", "hosts", "serves"} <= {note["what"] for note in history}
    tensors, _ = load_tensors(tmp_path / "met/shareable" / PARTIES.names[0] / "model.safetensors")
    assert len(tensors["entity"]) == len(PARTIES[0].entities)
    seen = keep_meeting(tmp_path / "seen", PARTIES, wanted(), PUBLISHED, alignment="links",
                        run=lambda: meet(PARTIES, wanted(), PUBLISHED))  # fmt: skip
    assert not list((tmp_path / "seen/shareable").rglob("*.safetensors"))
    assert all(claim["epsilon"] is None for claim in seen["statement"].values())


# -- alignment without the other's graph -------------------------------------------------------------------------------


def test_a_talk_finds_what_both_have():
    ends, graphs = (0, 1), (PARTIES[0], PARTIES[1])
    bounds = list(zip(*(bounds_of(graph) for graph in graphs), strict=True))
    asks = by_talk(graphs[0], ends, bounds, b"trial", first=True, attempt=3)
    answers = by_talk(graphs[1], ends, bounds, b"trial", first=False, attempt=3)
    talks, ended = {0: asks, 1: answers}, {}
    states = {number: going(talk) for number, talk in talks.items()}
    waiting = deque(message for said, _, _ in states.values() for message in said)
    while waiting:  # one message at a time, as over a network
        message = waiting.popleft()
        number = message.receiver
        inbox = states[number][1]
        inbox.take(message)
        states[number] = going(talks[number], inbox)
        waiting.extend(states[number][0])
        if states[number][1] is None:
            ended[number] = states[number][2]
    mine, theirs = ended[0], {1: ended[1]}
    whole = by_links(PARTIES)
    for found, expected in ((mine, whole[0][1]), (theirs[1], whole[1][0])):
        assert found.entity.tolist() == expected.entity.tolist()
        assert found.relation.tolist() == expected.relation.tolist()


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=12))
def test_rows_of_links_are_what_links_are_to_who_has_both_graphs(pairs):
    from tacit.parties import Link

    graphs = {name: Graph.from_triples([(f"{name}{i}", "is", f"{name}{i + 1}") for i in range(6)]) for name in "ab"}
    links = [Link("a", f"a{one}", "b", f"b{other}") for one, other in pairs]
    whole = by_links(given_parties(graphs, links))
    rows = [(f"a{one}", f"b{other}", "entity") for one, other in pairs]
    for number, name in enumerate("ab"):
        found = by_rows(rows, graphs[name], first=number == 0)
        expected = whole.get(number, {}).get(1 - number)
        assert found.entity.tolist() == ([] if expected is None else expected.entity.tolist())
    with pytest.raises(BadInput, match="which is no entity of this graph"):
        by_rows([("nobody", "b1", "entity")], graphs["a"], first=True)
    assert np.array(by_rows([], graphs["a"], first=True).relation).size == 0


# -- commands ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_meeting_by_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_parties(PARTIES, "parties")
    (tmp_path / "peer.toml").write_text(
        '[scorer]\ndim = 4\n[training]\nbatch = 32\nepochs = 2\nkernel = "reference"\n'
        "[pairing]\nretrain = 1\ntrainings = 1\n[pairing.ppat]\nepochs = 1\nhidden = 4\n"
    )
    common = ["peer", "meet", "parties", "--config", "peer.toml", "--device", "cpu"]
    told = CliRunner().invoke(app, [*common, "--mode", "published", "--out", "seen", "--json"])
    assert told.exit_code == 0, told.output
    found = json.loads(told.stdout)
    assert found["test"].keys() == set(PARTIES.names)
    assert all(each["epsilon"] is None for each in found["statement"].values())
    told = CliRunner().invoke(app, [*common, "--epsilon", "3", "--private-names", "--out", "met"])
    assert told.exit_code == 0, told.output
    assert re.search(r"private, epsilon (3|2\.9\d)", " ".join(told.stdout.split()))
    name = PARTIES.names[0]
    told = CliRunner().invoke(app, ["evaluate", "met", "--party", name, "--json"])
    assert told.exit_code == 0, told.output
    told = CliRunner().invoke(app, ["predict", "met", "--party", name, "--head", "e00", "--relation", "r0"])
    assert told.exit_code == 0, told.output
    told = CliRunner().invoke(app, ["evaluate", "met"])
    assert "by --party" in str(told.exception)
