"""Peers as real processes over a real broker, with TLS: killed in a handshake, and back; and letters that are none."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tacit.errors import BadInput, Refused, TacitError
from tacit.federation.keys import Identity, Roster
from tacit.federation.letters import Box, Letter
from tacit.federation.messages import Message
from tacit.files import write_graph
from tacit.graph import Graph
from tacit.models import Tables
from tacit.parties import partition
from tacit.peers.alignment import Aligned
from tacit.peers.kept import Journal, PeerRun, Plan
from tacit.peers.learner import Pairing
from tacit.peers.network import NEWS, Alone, Guest
from tacit.peers.ppat import PPAT
from tacit.tensors import load_tensors
from test_nats import real, until
from test_peers import PARTIES, ring, wanted

NAMES = ("north", "south", "east")
KEEPER = Identity.new("keeper")
KEYS = {name: Identity.new(name) for name in (*NAMES, "stranger")}
ROSTER = Roster.begin(KEEPER)
for each in NAMES:
    ROSTER = ROSTER.enrol(KEEPER, each, KEYS[each].public)
LONG = partition(Graph.from_triples(
    (f"person-{i:03d}", f"knows-{move}", f"person-{(i + move) % 96:03d}") for move in (1, 5, 7, 11) for i in range(96)
), "triples", 3, seed=1)  # fmt: skip

# -- what is sealed ----------------------------------------------------------------------------------------------------


def test_a_box_is_opened_by_its_process_alone():
    north, south, again = Box("north"), Box("south"), Box("south")
    sealed = north.seal("south", south.public, 7, b"rows")
    assert south.open("north", north.public, 7, sealed) == b"rows"
    assert b"rows" not in sealed
    for opener, sender, number in ((again, "north", 7), (south, "north", 8), (south, "east", 7)):
        with pytest.raises(Refused, match="not sealed for this process"):
            opener.open(sender, north.public, number, sealed)
    with pytest.raises(Refused, match="not sealed for this process"):
        north.open("north", south.public, 7, sealed)  # what one sent cannot be sent back to it
    with pytest.raises(Refused, match="nothing can be sealed"):
        north.seal("south", bytes(32), 1, b"rows")


# -- in one process, with a post that a test looks after ---------------------------------------------------------------


class Mail:
    """Letters between guests in threads; `spoil` may change, double or lose what is sent."""

    def __init__(self):
        import queue

        self.boxes = {name: queue.Queue() for name in NAMES}
        self.seen, self.spoil = [], lambda sender, to, data: [data]

    def of(self, name):
        mail = self

        class One:
            def send(self, to, letter):
                for data in mail.spoil(name, to, letter):
                    mail.seen.append((name, to, data))
                    mail.boxes[to].put((name, data))

            def receive(self, timeout):
                import queue

                try:
                    return mail.boxes[name].get(timeout=max(timeout, 0.001))
                except queue.Empty:
                    return None

        return One()


QUICK = Pairing(mode="published", ppat=PPAT(epochs=2, hidden=8), retrain=2, trainings=2, patience=1, within=30.0,
                linger=0.2, retry=0.2)  # fmt: skip


def guests(tmp_path, mail, names=NAMES, parties=PARTIES, pairing=QUICK, **options):
    found = {}
    for number, name in enumerate(NAMES):
        if name in names:
            plan = Plan("trial", NAMES, wanted(), options.get("pairings", {}).get(name, pairing),
                        "links" if "links" in options else "private")  # fmt: skip
            run = PeerRun.create(tmp_path / name, plan, name, parties[number])
            more = {key: value for key, value in options.items() if key != "pairings"}
            found[name] = Guest(run, mail.of(name), KEYS[name], ROSTER, keep=True, minutes=2, **more)
    return found


def together(found):
    """All of them to their ends."""
    import threading

    ends = {}

    def attend(name):
        try:
            ends[name] = found[name].attend()
        except BaseException as error:  # noqa: BLE001 - it is looked at below
            ends[name] = error

    threads = [threading.Thread(target=attend, args=(name,), daemon=True) for name in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(150)
    assert ends.keys() == found.keys()
    return ends


def messages(folder):
    return [Message.decode(path.read_bytes()) for path in sorted((folder / "private/messages").glob("0*"))]


@pytest.mark.slow
def test_guests_meet_and_part(tmp_path):
    mail = Mail()
    found = guests(tmp_path, mail, parties=LONG)  # short names stand in random bytes by chance
    ends = together(found)
    for number, name in enumerate(NAMES):
        assert isinstance(ends[name], dict), ends[name]
        run = PeerRun.open(tmp_path / name)
        kinds = {message.kind for message in messages(tmp_path / name)}
        assert {"blinded", "passed", "offer", "invite", "answer", "generated", "gradient", "translated"} <= kinds
        assert run.aligned.keys() == set(NAMES) - {name}
        for other, aligned in run.aligned.items():
            here, there = LONG[number], LONG[NAMES.index(other)]
            assert [here.entities[i] for i in aligned.entity] == sorted(set(here.entities) & set(there.entities))
        assert ends[name]["statement"]["epsilon"] is None
        assert torch.equal(run.run().model.tables.entity, found[name].peer.learner.kept.entity)
    check_books(tmp_path)
    secret = [name.encode() for name in LONG[0].entities]
    for _, _, data in mail.seen:
        assert not any(name in data for name in secret)
    rows = [message.arrays["values"] for message in messages(tmp_path / "north") if "values" in message.arrays]
    pieces = [bytes(row.numpy().tobytes()[:16]) for each in rows for row in each[:2]]
    assert not any(piece in data for _, _, data in mail.seen for piece in pieces), "who carries letters reads rows"


@pytest.mark.slow
def test_letters_that_are_lost_doubled_and_spoilt_stop_nobody(tmp_path):
    mail, count, old = Mail(), iter(range(10**9)), []

    def spoil(sender, to, data):
        number = next(count)
        old.append(data)
        if number % 23 == 7:
            return []
        if number % 11 == 3:
            return [data, data]
        if number % 13 == 5:
            return [data[: len(data) // 2], bytes([data[0] ^ 1]) + data[1:], data, old[len(old) // 2]]
        return [data]

    mail.spoil = spoil
    found = guests(tmp_path, mail, pairing=replace(QUICK, ppat=PPAT(epochs=1, hidden=8), within=3.0))
    ends = together(found)
    assert all(isinstance(end, dict) for end in ends.values()), ends
    assert all(guest.refused > 0 for guest in found.values())
    check_books(tmp_path, lossy=True)


@pytest.mark.slow
def test_who_means_something_else_or_never_comes_is_left_out(tmp_path):
    mail, odd = Mail(), Pairing(mode="published", ppat=PPAT(epochs=9), retrain=2, trainings=2, within=4.0)
    found = guests(tmp_path, mail, pairings={"east": odd}, wait=3.0,
                   pairing=replace(QUICK, trainings=1, within=4.0))  # fmt: skip
    ends = together(found)
    assert isinstance(ends["east"], Alone)
    assert "epochs is '2' there, and '9' here" in str(ends["east"])
    assert isinstance(ends["north"], dict)
    assert PeerRun.open(tmp_path / "north").aligned.keys() == {"south"}
    alone = guests(tmp_path / "more", Mail(), names=("north",), wait=0.5)
    assert "Nobody came to trial" in str(together(alone)["north"])


@pytest.mark.slow
def test_sound_peers_and_a_host_that_votes(tmp_path):
    """Two train privately; the third votes, and nothing but votes leaves it: no offer, no row."""
    mail, found = Mail(), {}
    quick = {"ppat": PPAT(epochs=1, hidden=8), "retrain": 2, "trainings": 2, "patience": 1, "linger": 0.2, "retry": 0.2}
    for number, name in enumerate(NAMES):
        votes = name == "north"
        pairing = Pairing(validation="none", idle="sleep", votes_sigma=9.0 if votes else None, **quick)
        plan = Plan("trial", NAMES, wanted(private=not votes), pairing)
        run = PeerRun.create(tmp_path / name, plan, name, PARTIES[number])
        found[name] = Guest(run, mail.of(name), KEYS[name], ROSTER, keep=True, minutes=2)
    ends, left = together(found), {}
    for number, name in enumerate(NAMES):
        said = ends[name]["statement"]
        assert said["guarantee"] == "differential privacy"
        assert said["epsilon"] > 0
        assert (tmp_path / name / "shareable/model.safetensors").exists() == (name != "north")
        left[name] = {message.kind for message in messages(tmp_path / name) if message.sender == number}
    rows = {"offer", "generated", "translated"}
    assert not left["north"] & rows
    assert all("offer" in left[name] for name in ("south", "east"))
    assert rows <= left["south"] | left["east"]  # who of the two is asked is a matter of time
    counts = Journal(tmp_path / "north/private").counts
    assert counts["votes"] == found["north"].peer.learner.votes.votes > 0
    assert counts["votes"] == sum(rows for key, rows in counts.items() if key.startswith("answered."))
    assert counts["votes"] <= found["north"].peer.learner.votes.most


@pytest.mark.slow
def test_who_comes_late_takes_part(tmp_path):
    import threading

    mail = Mail()
    found = guests(tmp_path, mail, names=("north", "south"), wait=1.5, pairing=replace(QUICK, within=12.0))
    late = guests(tmp_path, mail, names=("east",), wait=30.0, pairing=replace(QUICK, within=12.0))
    timer = threading.Timer(4.0, lambda: ends.update(together(late)))
    ends = {}
    timer.start()
    ends |= together(found)
    timer.join(60)
    assert all(isinstance(ends.get(name), dict) for name in NAMES), ends
    assert PeerRun.open(tmp_path / "north").began == ["south"]
    kinds = {message.kind for message in messages(tmp_path / "east")}
    assert {"offer", "invite", "generated"} <= kinds


@pytest.mark.slow
def test_nothing_new_is_begun_when_time_is_up(tmp_path):
    """The clock of one peer stands at its end after the first training: it keeps that, and leaves."""
    found = guests(tmp_path, Mail(), pairing=replace(QUICK, trainings=50, patience=50, within=3.0))
    north = found["north"]
    tell = north._tell

    def watched(what, **more):
        if what == "first":
            north._until = north.now
        tell(what, **more)

    north._tell = watched
    for name in ("south", "east"):
        found[name].minutes = 0.3
    ends = together(found)
    assert all(isinstance(end, dict) for end in ends.values()), ends
    assert north.peer.learner.best is not None
    history = (tmp_path / "north/private/history.jsonl").read_text().splitlines()
    assert [json.loads(line)["what"] for line in history if "score" in json.loads(line)] == ["first"]


@pytest.mark.slow
def test_links_instead_of_names(tmp_path):
    parties = [ring(24), ring(20), ring(16)]
    links = [("north", f"e{i:02d}", "south", f"e{i:02d}", "entity") for i in range(10)]
    links += [("east", "r0", "north", "r1", "relation"), ("east", "e03", "north", "e01", "entity")]
    found = guests(tmp_path, Mail(), parties=parties, links=links,
                   pairing=replace(QUICK, trainings=1, validation="none", within=5.0))  # fmt: skip
    ends = together(found)
    assert all(isinstance(ends[name], dict) for name in NAMES), ends
    run = PeerRun.open(tmp_path / "north")
    assert (len(run.aligned["south"].entity), run.aligned["east"].entity.tolist()) == (10, [1])
    assert not any(message.kind == "blinded" for message in messages(tmp_path / "north"))


@pytest.mark.parametrize(("change", "why"), [
    ({"sent": "3"}, "does not say"), ({"bounds": [1]}, "numbers that are none"), ({"box": "zz"}, "a key that is none"),
    ({"answered": {"x": 1}}, "books that are none"), ({"more": 1}, "does not say"),
    ({"answered": {str(n): 1 for n in range(5000)}}, "more handshakes"), ({"aligned": [1, 2, 3]}, "a tag that is none"),
    ({"aligned": [1, "x"]}, "numbers that are none"), ({"aligned": [1, -2, "x"]}, "numbers that are none"),
])  # fmt: skip
def test_signs_of_life_that_are_none_are_refused(change, why):
    from tacit.peers.network import _checked

    own = Box("south").public
    fine = {"box": own.hex(), "yours": "", "version": 1, "terms": {}, "links": "", "bounds": [1, 1],
            "vectors": True, "aligned": None, "rests": True, "sent": 0, "got": 0, "answered": {"1": 2}}  # fmt: skip
    assert _checked(fine) == own
    with pytest.raises(Refused, match=why):
        _checked(fine | change)


def test_a_letter_of_an_earlier_meeting_is_none(tmp_path):
    """A sign of life that was recorded does not make its process met: it does not say the key of this one."""
    guest = guests(tmp_path, Mail(), names=("north",))["north"]
    guest.life = 1
    old = Box("south")
    says = {"box": old.public.hex(), "yours": Box("north").public.hex(), "version": 1, "terms": guest.plan.terms(),
            "links": "", "bounds": [32, 4], "vectors": True, "aligned": None, "rests": True, "sent": 0, "got": 0,
            "answered": {}}  # fmt: skip
    letter = Letter("here", "south", "north", "trial", 5, 1, says).seal(KEYS["south"])
    guest._take("south", letter)
    assert (guest.others["south"].met, guest.refused) == (False, 0)
    guest._take("south", letter)
    assert guest.refused == 1
    for who, key, run in (("south", "stranger", "trial"), ("east", "south", "trial"), ("south", "south", "other")):
        guest._take(who, Letter("here", "south", "north", run, 6, 1, says).seal(KEYS[key]))
    assert guest.refused == 4
    assert not guest.others["south"].met


def met(guest, key=None, box=None, **more):
    """South says that it is there, as a process with this key of a box, and may say more; its box."""
    box = box or Box("south")
    says = {"box": (key or box.public).hex(), "yours": guest.box.public.hex(), "version": 1,
            "terms": guest.plan.terms(), "links": "", "bounds": [32, 4], "vectors": True, "aligned": None,
            "rests": True, "sent": 0, "got": 0, "answered": {}} | more  # fmt: skip
    number = guest.others["south"].last[1] + 1
    letter = Letter("here", "south", "north", "trial", 5, number, says)
    guest._take("south", letter.seal(KEYS["south"]))
    return box


def agreed(guest, entities=4):
    """The same, and means as many rows by what both have; its box."""
    guest.run.aligned["south"] = Aligned(np.arange(entities, dtype=np.int32), np.zeros(0, np.int32))
    box = met(guest)
    met(guest, box=box, aligned=guest._common(guest.others["south"]))
    assert guest.others["south"].agreed
    return box


def a_guest(tmp_path, **more):
    guest = guests(tmp_path, Mail(), names=("north",), **more)["north"]
    guest.life = 1
    guest._open_transcript()
    return guest


def test_a_key_that_nothing_can_be_sealed_with_makes_nobody_met(tmp_path):
    """Else the next offer could not be sealed, and that is nobody's letter that could be refused."""
    guest = a_guest(tmp_path)
    met(guest, bytes(32))
    assert (guest.others["south"].met, guest.refused) == (False, 1)
    met(guest)
    assert guest.others["south"].met
    guest._send(Message("offer", 0, 0, 0, 1, {}, {}))


@pytest.mark.parametrize(("life", "number"), [(5, 1 << 100), (6, -1), (1 << 70, 7)])
def test_a_letter_with_a_number_that_is_none_is_refused(tmp_path, life, number):
    guest = a_guest(tmp_path)
    met(guest)
    letter = Letter("tell", "south", "north", "trial", life, number, {}, [b"sealed"])
    guest._take("south", letter.seal(KEYS["south"]))
    assert guest.refused == 1


def test_books_of_another_are_heard_of_up_to_a_limit(tmp_path, monkeypatch):
    monkeypatch.setattr("tacit.peers.network.MOST", 20)
    guest = a_guest(tmp_path)
    guest.journal = Journal(guest.run.private)
    box = agreed(guest)
    guest._begin()
    guest._doing.join()
    met(guest, box=box, answered={str(n): 1 for n in range(20)})
    assert len(guest.peer.told) == NEWS
    for first in range(0, 60, NEWS):
        met(guest, box=box, answered={str(n): 1 for n in range(first, first + NEWS)})
    assert len(guest.peer.told) == 20
    for rows, expected in ((7, 7), (2, 7), (9, 7), (10**4000, 7), (8, 8)):  # there are 4 rows, and 2 epochs
        met(guest, box=box, answered={"0": rows})
        assert guest.peer.told[1, 0] == expected


def test_before_it_begins_a_peer_keeps_offers_and_invitations_alone(tmp_path):
    guest = a_guest(tmp_path)
    box = agreed(guest)
    scale, rows = torch.zeros(1 << 16, dtype=torch.float64), torch.zeros(8, 8)
    says = {"handshake": 1, "count": 1, "width": 8, "epochs": 1, "batch": 1, "seed": 1}
    for number, message in enumerate((
        Message("generated", 0, 0, 1, 0, {"handshake": 1}, {"values": rows}),
        Message("invite", 0, 0, 1, 0, says, {"scale": scale}),
        Message("invite", 0, 0, 1, 0, says, {"scale": scale[:1]}),
        Message("offer", 0, 0, 1, 0, {}, {}),
    ), 10):  # fmt: skip
        sealed = box.seal("north", guest.box.public, number, message.encode())
        guest._take("south", Letter("tell", "south", "north", "trial", 5, number, {}, [sealed]).seal(KEYS["south"]))
    assert [(m.kind, m.size < 1000) for m in guest._early] == [("invite", True), ("offer", True)]


def circle(letters):
    names = [f"{letter}{n:02d}" for letter in letters for n in range(8)]
    return Graph.from_triples((one, "r0", names[(n + by) % 16]) for n, one in enumerate(names) for by in (1, 2))


def test_other_names_after_a_restart_are_noticed(tmp_path):
    """As many names as before, but others: rows of one thing would be refined by those of another."""
    mail, here = Mail(), {}

    def come(name, letters, life):
        graph = circle(letters)
        own = replace(QUICK, validation="none")
        here[name] = guests(tmp_path, mail, names=(name,), parties=[graph] * 3, pairing=own)[name]
        here[name].life = life
        here[name]._open_transcript()

    def beats():
        for _ in range(4):
            for guest in here.values():
                guest._beat()
            while any(not mail.boxes[name].empty() for name in here):
                for name, guest in here.items():
                    if not mail.boxes[name].empty():
                        guest._take(*mail.boxes[name].get())

    come("north", "ab", 1)
    come("south", "ac", 1)
    beats()
    north = here["north"].others["south"]
    assert north.agreed
    assert here["south"].others["north"].agreed
    shutil.rmtree(tmp_path / "south")
    come("south", "bc", 2)
    for _ in range(2):
        beats()
        assert (north.agreed, north.odd) == (False, "has other names than it had before")
        assert not here["south"].others["north"].agreed
    box, other = here["south"].box, here["south"].others["north"]
    sealed = box.seal("north", here["north"].box.public, 10**6, Message("offer", 0, 0, 1, 0, {}, {}).encode())
    refused = here["north"].refused
    here["north"]._take("south", Letter("tell", "south", "north", "trial", 2, 10**6, {}, [sealed]).seal(KEYS["south"]))
    assert here["north"].refused == refused + 1
    shutil.rmtree(tmp_path / "south")
    come("south", "ac", 3)
    beats()
    assert (north.agreed, north.odd, other.agreed) == (True, "", False)


def test_a_link_to_what_there_is_not_is_told_before_anybody_comes(tmp_path):
    links = [("north", "nobody", "south", "e01", "entity")]
    with pytest.raises(BadInput, match="nobody"):
        guests(tmp_path, Mail(), names=("north",), links=links)
    guests(tmp_path, Mail(), names=("east",), links=links)


def test_who_came_alone_and_has_nothing_in_common_does_not_end_the_meeting_for_ever(tmp_path):
    guest = a_guest(tmp_path)
    guest.journal = Journal(guest.run.private)
    agreed(guest, 0)
    with pytest.raises(TacitError, match="a name in common"):
        guest._begin()
    assert PeerRun.open(tmp_path / "north").began is None


def test_graphs_of_more_names_than_an_intersection_is_of(tmp_path, monkeypatch):
    guest = a_guest(tmp_path)
    met(guest, bounds=[1 << 21, 4])
    assert "file of links" in guest.others["south"].odd
    monkeypatch.setattr("tacit.peers.network.NAMES", 8)
    with pytest.raises(TacitError, match="file of links"):
        guests(tmp_path / "more", Mail(), names=("north",))


def test_intersections_with_one_peer_are_few_however_often_it_is_started(tmp_path):
    """Each tells which of the names that it asks for are here."""
    from tacit.peers.network import ATTEMPTS

    south = guests(tmp_path, Mail(), names=("south",))["south"]
    south.life = 1
    south._open_transcript()
    opened, number = 0, 0
    for _ in range(3 * ATTEMPTS):
        box, number = Box("north"), number + 2
        says = {"box": box.public.hex(), "yours": south.box.public.hex(), "version": 1, "terms": south.plan.terms(),
                "links": "", "bounds": [1, 1], "vectors": True, "aligned": None, "rests": True, "sent": 0, "got": 0,
                "answered": {}}  # fmt: skip
        south._take("north", Letter("here", "north", "south", "trial", 5, number, says).seal(KEYS["north"]))
        message = Message("blinded", 1, 0, 0, 1, {"part": "entity"}, {"points": guest_point()})
        sealed = box.seal("south", south.box.public, number + 1, message.encode())
        south._take("north", Letter("tell", "north", "south", "trial", 5, number + 1, {}, [sealed]).seal(KEYS["north"]))
        opened += south.others["north"].talk is not None
    assert opened == ATTEMPTS


def guest_point():
    from tacit.federation.sets import Intersection

    return torch.frombuffer(bytearray(Intersection(["e00"], 1, 32, b"x").blinded()), dtype=torch.uint8).reshape(1, 32)


# -- books -------------------------------------------------------------------------------------------------------------


def check_books(root, *, lossy=False):
    """Both sides' books, on the disk: what hosts answered is what clients were told, once, and all of it."""
    journals = {name: Journal(root / name / "private").counts for name in NAMES}
    whole = 0
    for number, host in enumerate(NAMES):
        sent = {}
        for message in messages(root / host):
            if message.kind == "gradient" and message.sender == number:
                place = (message.receiver, message.says["handshake"], message.round)
                assert place not in sent, "a vote was given twice"
                sent[place] = len(message.arrays["values"])
        books = {key: rows for key, rows in journals[host].items() if key.startswith("answered.")}
        assert journals[host]["votes"] == sum(books.values()), "every vote is in a book"
        for key, rows in books.items():
            _, client, handshake = key.split(".")
            mine = sum(n for (c, h, _), n in sent.items() if (c, h) == (int(client), int(handshake)))
            assert rows >= mine, "a vote was forgotten"
            assert rows - mine <= 32, "what was written down and not sent is one batch at most"
            theirs = journals[NAMES[int(client)]]
            assert theirs[f"taught.{number}.{handshake}"] <= rows
            if not lossy:
                assert theirs[f"told.{number}.{handshake}"] == rows, "the client knows what the host has paid"
            whole += rows
    return whole


# -- real processes ----------------------------------------------------------------------------------------------------

MANY = {"pairing.ppat.epochs": 60, "pairing.ppat.hidden": 8, "pairing.retrain": 2, "pairing.trainings": 4,
        "pairing.patience": 1, "pairing.within": 40, "pairing.linger": 1, "pairing.retry": 1,
        "training.kernel": "reference", "negatives.count": 1}  # fmt: skip


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


class Scene:
    """Three folders, with nothing in common but what they were sent."""

    def __init__(self, root, parties=LONG):
        self.root, self.running = root, []
        self.address = f"tls://127.0.0.1:{free_port()}"
        for number, name in enumerate(NAMES):
            (root / name).mkdir()
            KEYS[name].save(root / name / "own.key")
            ROSTER.save(root / name / "roster.json")
            write_graph(parties[number], root / name / "graph")
        (root / NAMES[0] / "run").mkdir()  # an empty folder is as good as none
        ROSTER.save(root / "roster.json")

    def _start(self, home, *words):
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TACIT_HOME": str(home)}
        with open(home / "said", "ab") as said, open(home / "errors", "ab") as errors:
            process = subprocess.Popen([sys.executable, "-m", "tacit", "peer", *words], cwd=home, stdout=said,
                                       stderr=errors, env=environment)  # fmt: skip
        self.running.append(process)
        return process

    def broker(self):
        one = self._start(self.root, "broker", "--roster", "roster.json", "--listen", self.address[6:], "--json")
        until(lambda: (self.root / "said").exists() and "address" in (self.root / "said").read_text())
        for name in NAMES:
            shutil.copy(self.root / "broker" / "ca.pem", self.root / name / "ca.pem")
        return one

    def start(self, name, *words):
        own = [word for key, value in MANY.items() for word in ("--set", f"{key}={value}")]
        chosen = words or ("graph", "--mode", "published", "--epochs", "3", "--dim", "8", "--batch", "32", "--out",
                           "run", *own)  # fmt: skip
        return self._start(self.root / name, "start", *chosen, "--key", "own.key", "--roster", "roster.json",
                           "--broker", self.address, "--ca", "ca.pem", "--json", "--keep", "--minutes", "5",
                           "--wait", "120")  # fmt: skip

    def counts(self, name):
        where = self.root / name / "run/private/journal.jsonl"
        found = {}
        for line in where.read_bytes().split(b"\n")[:-1] if where.exists() else ():
            found |= json.loads(line)
        return found

    def errors(self, name):
        return (self.root / name / "errors").read_text()

    def end(self, process, name, seconds=240):
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = "still running"
        assert code == 0, (name, {each: self.errors(each)[-1500:] for each in NAMES})

    def close(self):
        for process in self.running:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(20)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


@pytest.fixture
def scene(tmp_path):
    made = []

    def make(*args):
        made.append(Scene(tmp_path, *args))
        return made[-1]

    yield make
    for each in made:
        each.close()


def move_runs(root, into):
    """The folders of all peers, as `check_books` and `messages` look for them."""
    into.mkdir()
    for name in NAMES:
        os.symlink(root / name / "run", into / name)
    return into


@real
@pytest.mark.slow
@pytest.mark.parametrize("role", ["client", "host"])
def test_a_peer_that_is_killed_in_a_handshake_comes_back(scene, tmp_path, role):
    here = scene()
    here.broker()
    processes = {name: here.start(name) for name in NAMES}
    book = "taught." if role == "client" else "answered."
    found = []

    def in_a_handshake():
        found.extend(name for name in NAMES if any(key.startswith(book) for key in here.counts(name)))
        return found

    until(in_a_handshake, 240)
    killed = found[0]  # whoever is the first
    processes[killed].kill()
    processes[killed].wait()
    before = here.counts(killed)
    if role == "client":  # its rows are those that it has just translated
        assert no_raw_row(here.root / killed / "run", NAMES.index(killed)) > 0
    whole = 60 * min(len(set(one.entities) & set(two.entities)) for one, two in itertools.combinations(LONG, 2))
    cut = {key: rows for key, rows in before.items() if key.startswith(book)}
    assert any(rows < whole for rows in cut.values()), "it was killed before a handshake ended"
    model = here.root / killed / "run/private/model.safetensors"
    kept, facts = load_tensors(model)
    time.sleep(1)
    processes[killed] = here.start(killed, "--resume", "run")
    until(lambda: '"resumed"' in here.errors(killed), 120)
    now, said = load_tensors(model)[0], here.errors(killed).split('"resumed"')[1]
    assert '"kept": true' in said or torch.equal(now["entity"], kept["entity"]), "no embedding is lost"
    for name in NAMES:
        here.end(processes[name], name)
    runs = move_runs(here.root, tmp_path / "runs")
    assert check_books(runs) > 0
    for key, rows in here.counts(killed).items():
        assert key == "fruitless" or rows >= before.get(key, 0), "nothing that was spent is forgotten"
    assert json.loads(load_tensors(model)[1]["score"]) >= json.loads(facts["score"])
    for name in NAMES:
        run = PeerRun.open(runs / name)
        assert here.counts(name)["trained"] <= 4
        assert bool(run.run().model.tables.entity.isfinite().all())
        events = [json.loads(line)["event"] for line in here.errors(name).splitlines() if line.startswith('{"time"')]
        assert events[-1] == "ends"
    assert any("given up" in here.errors(name) or "left alone" in here.errors(name) for name in NAMES)


def no_raw_row(folder, number):
    """How many messages a peer has sent, none of which holds a row that it has, whatever its length, or a name."""
    tables = Tables.of(load_tensors(folder / "private" / "model.safetensors")[0])
    had = torch.nn.functional.normalize(torch.cat([tables.entity, tables.relation]), dim=-1)
    sent = [m for m in messages(folder) if m.sender == number and "values" in m.arrays]
    for message in sent:
        cosine = torch.nn.functional.normalize(message.arrays["values"], dim=-1) @ had.T
        assert float(cosine.max()) < 0.9999
    names = [entity.encode() for entity in PeerRun.open(folder).graph.entities]
    assert not any(entity in message.encode() for message in sent for entity in names)
    return len(sent)


@real
@pytest.mark.slow
def test_the_same_words_go_on_and_other_words_are_refused(scene):
    here = scene()
    here.broker()
    processes = {name: here.start(name) for name in NAMES}
    until(lambda: here.counts("east").get("started"), 240)
    processes["east"].send_signal(signal.SIGTERM)  # in the middle of a training, which no thread can stop
    assert processes["east"].wait(60) == 143
    wrong = here.start("east", "graph", "--mode", "published", "--dim", "4", "--out", "run")
    assert wrong.wait(120) == 2
    assert "holds a peer with other settings" in " ".join(here.errors("east").split())
    processes["east"] = here.start("east")
    for name in NAMES:
        here.end(processes[name], name)
    assert here.counts("east")["again"] <= 1
    assert Path(here.root / "east/run/private/model.safetensors").is_file()
