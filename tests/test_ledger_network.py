"""Ledgers at a real broker over TLS: writers and brokers are killed, operators tamper, insiders make mischief."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("nats", reason="the extra nats is not installed")
from ledgers import CLAIM, KEYS, WHO, Operated, Providers, act, api, known, rewrite, roster, rows, tacit
from tacit.errors import BadInput, BadValue, Refused, TacitError
from tacit.federation import broker as broker_module
from tacit.federation.broker import nkey_of
from tacit.federation.letters import Away
from tacit.ledger import jetstream
from tacit.ledger.blobs import Withheld
from tacit.ledger.cbor import CID, DAG_CBOR
from tacit.ledger.jetstream import LedgerBroker, Remote, blob_stream, blob_subject, log_stream, log_subject
from tacit.ledger.ledger import Ledger
from tacit.ledger.record import Genesis, Model, Record
from test_nats import until

try:
    broker_module._server()
except TacitError:
    pytest.skip("nats-server is not installed", allow_module_level=True)

STRANGER = known("stranger")
LOG, STORE = log_stream("drugs"), blob_stream("drugs")


@pytest.fixture
def broker(tmp_path):
    with Operated(tmp_path / "broker", roster(), "drugs") as one:
        yield one


def remote(broker, who=WHO[0], **other):
    return Remote(**{"address": broker.place, "identity": who, "ca": broker.ca} | other)


@pytest.fixture
def ledger(broker, tmp_path):
    """A ledger with a model and five updates."""
    WHO[0].save(tmp_path / "provider-0.key")
    with Ledger.begin(
        tmp_path / "ledger", WHO[0], Genesis("drugs", keys=KEYS), remote(broker), key=tmp_path / "provider-0.key"
    ) as found:
        found.open_model(WHO[0], Model(found.genesis, "drugs", entity=3, relation=3))
        for n in range(5):
            tips = [node.cid for node in found.dag.branch("drugs").tips]
            found.publish_rows(WHO[n], "drugs", rows(tmp_path, n), CLAIM, tips)
        assert not found.faults
        yield found


def newcomer(broker, ledger, folder, who=WHO[5]):
    return Ledger.join(folder, remote(broker, who), ledger.genesis)


# -- streams -----------------------------------------------------------------------------------------------------------


NO_ADDRESSES = [
    "drugs", "tls://x:1", "tls://x:1/", "tls://x:1/a.b", "tls://x:1//a", "tls://x:1/a/b", "ftp://x:1/a", "tls://x/a",
    "tls://u:p@x:1/a", "nats://x:1/a", "tls://x:1/" + "a" * 65,
]  # fmt: skip


@pytest.mark.parametrize("address", NO_ADDRESSES)
def test_addresses_that_are_none(address):
    with pytest.raises(TacitError, match=r"address is such as|without TLS"):
        Remote(address, WHO[0])


@pytest.mark.slow
def test_a_place_without_a_ledger(broker):
    with remote(broker) as found:
        with pytest.raises(TacitError, match="There is no ledger 'drugs' at the broker"):
            found.check()
        with pytest.raises(TacitError, match="replicas > 1 not supported"):
            found.make(3)
        found.make()
        found.make()
        with pytest.raises(BadValue, match="plain text of ASCII"):
            found.log.append([("a\nb", b"")])
        with pytest.raises(BadValue, match="1,000 records can be added at once"):
            found.log.append([("a", b"")] * 1001)
        with pytest.raises(TacitError, match="message size exceeds"):
            found.log.append([("a", bytes(100_000))])
        assert list(found.log.read()) == []
    with remote(broker, address=broker.address + "/other") as found:
        with pytest.raises(TacitError, match=r"does not let provider-0, .*Is 'other' the ledger that it is for\?"):
            found.check()
    with pytest.raises(TacitError, match="refuses the key of stranger"):
        remote(broker, STRANGER)


def test_a_stream_that_could_forget_is_refused(broker):
    with remote(broker) as found:
        found.make()
        for stream, changed in ((LOG, {"max_age": 10**10}), (STORE, {"max_msgs": 5})):

            async def change(client, stream=stream, changed=changed):
                config = (await api(client, f"STREAM.INFO.{stream}"))["config"]
                await api(client, f"STREAM.UPDATE.{stream}", config | changed | {"duplicate_window": 10**9})
                return config

            config = act(broker, change)
            with pytest.raises(BadInput, match=f"{stream} has {next(iter(changed))} = .*could forget"):
                found.check()
            act(broker, lambda client, stream=stream, config=config: api(client, f"STREAM.UPDATE.{stream}", config))
            found.check()


@pytest.mark.parametrize("count", [1, 3])
def test_what_is_sent_again_after_a_lost_answer_stands_once(broker, monkeypatch, count):
    """The broker has it, the answer is lost with the connection."""
    with remote(broker) as found:
        found.make()
        put, lost = Remote.put, []

        async def loses(self, client, *words):
            number = await put(self, client, *words)
            if not lost:
                lost.append(number)
                await asyncio.sleep(0)
                client._transport._io_writer.transport.abort()
                await asyncio.sleep(5)
            return number

        monkeypatch.setattr(Remote, "put", loses)
        found.log.append([("before", b"")])  # it is lost, and stands once
        assert lost == [1]
        lost.clear()
        assert found.log.append([(f"n{n}", b"x") for n in range(count)]) == 1
        assert [each.name for each in found.log.read()] == ["before", *(f"n{n}" for n in range(count))]


def test_insiders_may_add_and_read_and_nothing_else(broker, ledger):
    verbs = [f"STREAM.{verb}.{stream}" for verb in ("DELETE", "UPDATE", "PURGE", "MSG.DELETE", "MSG.GET", "SNAPSHOT")
             for stream in (LOG, STORE)]  # fmt: skip
    verbs += ["STREAM.NAMES", f"CONSUMER.CREATE.{LOG}", "STREAM.CREATE.other"]
    complaints = []

    async def tries(client):
        async def error(found):
            complaints.append(str(found))

        client._error_cb = error
        for verb in verbs:
            await client.publish(f"$JS.API.{verb}", b"{}")
        for way in (">", "_INBOX.>", "tacit-inbox.>", "tacit-inbox.provider-2.>", log_subject("drugs"), "$O.>"):
            await client.subscribe(way)
        await client.flush()
        for _ in range(100):
            if len(complaints) < len(verbs) + 6:
                await asyncio.sleep(0.05)

    act(broker, tries, WHO[1])
    assert len(complaints) == len(verbs) + 6
    assert all("permissions violation" in each for each in complaints)

    async def operates(client):  # and even who may do all cannot delete by a slip
        for verb, content in ((f"STREAM.MSG.DELETE.{LOG}", {"seq": 2}), (f"STREAM.PURGE.{LOG}", {})):
            with pytest.raises(AssertionError, match="not permitted"):
                await api(client, verb, content)

    act(broker, operates)
    ledger.refresh()
    assert (len(ledger), ledger.faults) == (7, [])


def test_headers_of_mischief_change_nothing(broker, ledger):
    """A writer's headers are not taken for the server's."""

    async def mischief(client):
        for headers in ({"Nats-Sequence": "99"}, {"Status": "404"}, {"Nats-Sequence": "x", "Status": "204 EOB"},
                        {"nats-sequence": "1"}, {"Tacit-Name": str(CID.of(b"junk", DAG_CBOR))}):  # fmt: skip
            await client.request(log_subject("drugs"), b"junk", headers=headers)

    act(broker, mischief, WHO[2])
    ledger.refresh()
    assert [fault.where.split(" (")[0] for fault in ledger.faults] == [f"record {n}" for n in range(7, 12)]
    assert not ledger.rewritten
    record = ledger.publish_rows(WHO[1], "drugs", rows(ledger.folder, 9), CLAIM)
    assert record.cid in ledger.dag


def test_insiders_cannot_take_weights_away(broker, ledger):
    """Entries under an address that is taken, pieces behind the last: whoever reads goes by the bytes."""
    node = ledger.dag.branch("drugs").nodes[0]
    where = blob_subject("drugs", "M", base64.urlsafe_b64encode(str(node.update.weights).encode()).decode())

    async def mischief(client):
        found = await client.request(f"$JS.API.DIRECT.GET.{STORE}", json.dumps({"last_by_subj": where}).encode())
        told = json.loads(found.data)
        for changed in ({"nuid": "other"}, {"size": 1 << 40}, {"digest": "SHA-256=" + "A" * 43 + "="}, {"size": -1},
                        {"nuid": "a.b"}):  # fmt: skip
            await client.request(where, json.dumps(told | changed).encode())
        await client.request(where, b"\xff{")
        await client.request(blob_subject("drugs", "C", told["nuid"]), b"more")
        return told

    told = act(broker, mischief, WHO[2])
    assert ledger.rows(node).entity[0, 0] == 0
    assert ledger.verify().faults == []
    assert ledger.blobs.put(rows(ledger.folder, 0)) == node.update.weights

    # The object store's own reader finds an object as we put it.
    async def reads(client):
        bucket = await client.jetstream().object_store(LOG)
        got = await bucket.get(str(ledger.dag.branch("drugs").nodes[1].update.weights))
        return got.data

    assert act(broker, reads) == rows(ledger.folder, 1)
    assert told["chunks"] == 1


def test_pieces_that_never_fill_the_weights_are_not_read_to_their_end(broker):
    """An entry points to pieces that somebody put there: empty ones, or far more than so many bytes are cut into."""
    with remote(broker) as found:
        found.make()
        for size, piece in ((5, b""), (jetstream.CHUNK + 1, b"x")):
            data = os.urandom(size)
            cid = CID.of(data)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode()
            told = {"size": size, "nuid": f"own{size}", "digest": f"SHA-256={digest}"}

            async def mischief(client, cid=cid, told=told, piece=piece):
                for _ in range(300):
                    await client.request(blob_subject("drugs", "C", told["nuid"]), piece)
                where = blob_subject("drugs", "M", base64.urlsafe_b64encode(str(cid).encode()).decode())
                await client.request(where, json.dumps(told).encode())

            act(broker, mischief, WHO[2])
            asked = []
            found._page = lambda *words, asked=asked: (asked.append(words), Remote._page(found, *words))[1]
            with pytest.raises(Refused, match=r"pieces of the weights \w+ that were not cut as they are"):
                found.blobs.get(cid, size)
            assert len(asked) == 2  # the entry, and the first pieces
            del found._page
            assert found.blobs.get(found.blobs.put(data), size) == data


def test_large_weights_come_in_pieces_and_are_bounded(broker):
    with remote(broker) as found:
        found.make()
        data = os.urandom(3 * jetstream.CHUNK * jetstream.IN_FLIGHT + 1)
        cid = found.blobs.put(data)
        assert found.blobs.get(cid, len(data)) == data
        asked = []
        page = Remote.page
        found.page = lambda *words: (asked.append(words), page(found, *words))[1]
        with pytest.raises(Refused, match="more than 1,000 bytes"):
            found.blobs.get(cid, 1000)
        assert len([words for words in asked if ".C." in str(words)]) == 0  # nothing of it was fetched
        rewrite(broker, STORE, lambda number, subject, headers, data: None if number == 3 else (headers, data))
        with pytest.raises(Withheld, match="131,072 bytes are missing"):
            found.blobs.get(cid, len(data))
        assert found.blobs.put(data) == cid  # and is mended
        assert found.blobs.get(cid, len(data)) == data


# -- a broker that tampers ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_changed_record_is_found_named_and_ignored_by_all(broker, ledger, tmp_path):
    names = [entry.name for entry in ledger.log.read()]
    for position in (1, 4, 6):
        kept = {}

        def change(number, subject, headers, data, position=position, kept=kept):
            kept[number] = (headers, data)
            return headers, data if number != position + 1 else data[:-1] + bytes((data[-1] ^ 1,))

        rewrite(broker, LOG, change)
        new = newcomer(broker, ledger, tmp_path / f"new-{position}")
        old = Ledger.load(ledger.folder, who=WHO[0])
        for reader, reason in ((new, "holds other bytes"), (old, "history was rewritten")):
            with reader:
                assert reader.faults[0].where == f"record {position} ({names[position]})"
                assert reason in reader.faults[0].reason
                assert CID.parse(names[position]) not in reader.dag
                assert len(reader.dag) == position  # what came after was built on it
                assert reader.verify().faults[: len(reader.faults)] == reader.faults
        with Ledger.load(ledger.folder) as reader, pytest.raises(Refused, match="Nothing is added to it"):
            reader.publish(WHO[0], Model(ledger.genesis, "genes", entity=3, relation=3))
        rewrite(broker, LOG, lambda number, subject, headers, data, kept=kept: kept[number])
        with Ledger.load(ledger.folder) as reader:
            assert reader.faults == []


@pytest.mark.slow
def test_deleted_cut_and_replaced_records_are_found(broker, ledger, tmp_path):
    entries = list(ledger.log.read())

    def restore(number, subject, headers, data):
        return {"Tacit-Name": entries[number - 1].name}, entries[number - 1].data

    rewrite(broker, LOG, lambda number, *rest: None if number == 4 else rest[1:])
    for reader in (Ledger.load(ledger.folder), newcomer(broker, ledger, tmp_path / "one")):
        with reader:
            assert reader.rewritten
            assert str(reader.faults[0]) == "records 3 to 3: were deleted from the log"
    rewrite(broker, LOG, lambda number, *rest: None if number >= 6 else restore(number, *rest))
    with Ledger.load(ledger.folder) as found:
        assert found.rewritten
        assert str(found.faults[0]) == "record 5: 2 records that were read from here on are gone"
    with newcomer(broker, ledger, tmp_path / "two") as late:
        assert (late.faults, len(late)) == ([], 5)  # it cannot know, until something is added behind the hole
        assert late.head != ledger.head  # but compare heads
        late.publish_rows(WHO[5], "drugs", rows(tmp_path, 9), CLAIM)
        assert "records 5 to 6" in late.faults[0].where


@pytest.mark.slow
def test_another_record_rightly_signed_in_the_place_of_one(broker, ledger, tmp_path):
    branch = ledger.dag.branch("drugs")
    other = Record.sign(WHO[4], type(branch.nodes[4].update)(branch.cid, (branch.cid,), CID.of(b"x"), 1))

    def change(number, subject, headers, data):
        return ({"Tacit-Name": str(other.cid)}, other.data) if number == 7 else (headers, data)

    rewrite(broker, LOG, change)
    with Ledger.load(ledger.folder) as found:
        assert f"not what was read here before, {branch.nodes[4].cid}: history was rewritten" in found.faults[0].reason
    with newcomer(broker, ledger, tmp_path / "new") as late:
        assert late.head != ledger.head  # a newcomer compares heads


@pytest.mark.slow
def test_changed_and_withheld_weights_are_named_and_not_used(broker, ledger, tmp_path):
    nodes = ledger.dag.branch("drugs").nodes
    pieces, entries = [], []

    def change(number, subject, headers, data):
        kind = pieces if ".C." in subject else entries
        kind.append(number)
        if kind is pieces and len(pieces) == 1:
            return headers, data[:-1] + bytes((data[-1] ^ 1,))  # of the first update, a bit
        if kind is entries and len(entries) == 2:
            return None  # of the second, the entry
        if kind is pieces and len(pieces) == 3:
            return None  # of the third, the piece
        return headers, data

    rewrite(broker, STORE, change)
    for reader in (Ledger.load(ledger.folder), newcomer(broker, ledger, tmp_path / "new")):
        with reader:
            assert reader.faults == []
            found = reader.verify()
            assert found.head.hex() == ledger.head
            assert [fault.where for fault in found.faults] == [
                f"update {node.cid} by provider-{n}" for n, node in enumerate(nodes[:3])
            ]
            for word, fault in zip(("other bytes", "are not at", "are missing"), found.faults, strict=True):
                assert word in fault.reason
            for node, kind in zip(nodes[:3], (Refused, Withheld, Withheld), strict=True):
                with pytest.raises(kind):
                    reader.rows(reader.dag.nodes[node.cid])
            assert reader.rows(reader.dag.nodes[nodes[3].cid]).entity[0, 0] == 3


def test_a_stream_that_is_gone_is_named(broker, ledger):
    act(broker, lambda client: api(client, f"STREAM.DELETE.{LOG}"))
    with pytest.raises(TacitError, match="There is no ledger 'drugs' at the broker"):
        Ledger.load(ledger.folder)


def test_another_genesis_is_not_joined(broker, ledger, tmp_path):
    before = threading.active_count()
    with pytest.raises(BadInput, match="does not hold the genesis"):
        Ledger.join(tmp_path / "other", remote(broker, WHO[1]), CID.of(b"other", DAG_CBOR))
    assert not (tmp_path / "other").exists()
    with pytest.raises(TacitError, match=r"There is a ledger 'drugs' at the broker .* already"):
        Ledger.begin(tmp_path / "other", WHO[1], Genesis("drugs", keys=KEYS[:2]), remote(broker, WHO[1]))
    assert not (tmp_path / "other").exists()
    assert threading.active_count() == before  # no connection is left


# -- who goes away -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_broker_that_is_killed_has_all_that_it_confirmed(broker, ledger, tmp_path):
    os.kill(broker._process.pid, signal.SIGKILL)
    broker._process.wait()
    again = threading.Timer(1.0, broker.revive)
    again.start()
    record = ledger.publish_rows(WHO[2], "drugs", rows(tmp_path, 7), CLAIM)  # it waits
    again.join()
    assert record.cid in ledger.dag
    with newcomer(broker, ledger, tmp_path / "new") as found:
        assert (found.head, found.faults, found.verify().faults) == (ledger.head, [], [])
    broker.stop()
    patience, ledger._remote.patience = ledger._remote.patience, 0.5
    with pytest.raises(Away, match=r"not reached: for 0\.5 seconds there was no broker"):
        ledger.refresh()
    ledger._remote.patience = patience
    broker.start()
    ledger.refresh()
    assert len(ledger) == 8


def test_who_is_revoked_on_the_roster_is_shut_out(broker, ledger):
    with remote(broker, WHO[3]) as found:
        found.check()
        broker.reload(broker.roster.revoke(known("keeper"), "provider-3"))
        until(lambda: found._fault)
        with pytest.raises(TacitError, match="refuses the key of provider-3"):
            found.check()
    ledger.refresh()


WRITER = """
import os, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from ledgers import CLAIM, known, rows
from tacit.federation.letters import Away
from tacit.errors import Refused
from tacit.ledger.ledger import Ledger
home, name = Path(sys.argv[1]), Path(sys.argv[1]).name
who, accepted = known(name), open(home / "accepted", "a")
while True:
    try:
        with Ledger.load(home / "ledger", who=who) as ledger:
            while True:
                tips = [node.cid for node in ledger.dag.branch("drugs").tips]
                value = hash((name, len(ledger), os.getpid())) % 10**4
                record = ledger.publish_rows(who, "drugs", rows(home, value), CLAIM, tips[-2:])
                accepted.write(f"{record.cid}\\n"); accepted.flush(); os.fsync(accepted.fileno())
                time.sleep(0.02)
    except Away as error:
        print(error, flush=True)
"""
"""A provider as far as the ledger sees it: it builds on the newest tips, and notes what it was told stands."""


class Consortium:
    """A broker and providers, each a process with a folder of its own; all they share is the broker's address."""

    command = (sys.executable, "-c", WRITER)
    """What a provider runs, with its folder and the tests' as arguments; full providers may take its place."""

    def __init__(self, root, names):
        self.root, self.names, self.running = root, names, {}
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.place = f"tls://127.0.0.1:{self.port}/drugs"
        roster().save(root / "roster.json")
        for each in WHO:
            (root / each.name).mkdir()
            each.save(root / each.name / "own.key")

    def start(self, name, *command, cwd=None):
        with open(self.root / f"{name}.said", "ab") as said:
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            self.running[name] = subprocess.Popen(
                command, cwd=cwd or self.root, stdout=said, stderr=said, env=environment
            )

    def serve(self):
        self.start("broker", sys.executable, "-m", "tacit", "ledger", "serve", "broker", "drugs", "--roster",
                   "roster.json", "--listen", f"127.0.0.1:{self.port}", "--json")  # fmt: skip
        until(self.answers)

    def answers(self):
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    @property
    def server(self):
        """The number of the process of NATS."""
        return int((self.root / "broker" / "broker.pid").read_text())

    def write(self, name):
        home = self.root / name
        if not (home / "ledger").exists():
            self.tacit("ledger", "join", "ledger", "--log", self.place, "--genesis", self.genesis, "--key", "own.key",
                       "--ca", str(self.root / "broker" / "ca.pem"), cwd=home)  # fmt: skip
        self.start(name, *self.command, str(home), str(Path(__file__).parent))

    def kill(self, name):
        process = self.running.pop(name)
        process.kill()
        process.wait()

    def tacit(self, *words, cwd, code=0):
        done = subprocess.run([sys.executable, "-m", "tacit", *words], cwd=cwd, capture_output=True, text=True,
                              timeout=120, check=False)  # fmt: skip
        assert done.returncode == code, (words, done.stdout[-2000:], done.stderr[-2000:])
        return done.stdout

    def accepted(self, name=None):
        """What providers were told stands; a line that was cut off when one was killed is none."""
        files = [self.root / each / "accepted" for each in ([name] if name else self.names)]
        return [line for file in files if file.exists() for line in file.read_text().split("\n")[:-1]]

    def close(self):
        for name in list(self.running):
            self.kill(name)
        try:
            os.kill(self.server, signal.SIGKILL)
        except (OSError, ValueError):
            return


@pytest.mark.full
def test_four_writers_and_the_broker_are_killed_and_nothing_that_was_accepted_is_lost(tmp_path):
    names = [each.name for each in WHO[:4]]
    consortium = Consortium(tmp_path, names)
    try:
        consortium.serve()
        told = consortium.tacit(
            "ledger", "init", "ledger", "--key", "own.key", "--roster", "../roster.json", "--model", "drugs",
            "--entity", "3", "--log", consortium.place, "--ca", "../broker/ca.pem", "--json", cwd=tmp_path / names[0],
        )  # fmt: skip
        consortium.genesis = json.loads(told)["genesis"]
        for name in names:
            consortium.write(name)
        for name in names:
            until(lambda name=name: len(consortium.accepted(name)) >= 3)

        def goes_on(by=3):
            before = {name: len(consortium.accepted(name)) for name in consortium.running if name in names}
            until(lambda: all(len(consortium.accepted(name)) >= n + by for name, n in before.items()))

        for name in names:  # each of them, in the middle of it
            consortium.kill(name)
            goes_on()
            consortium.write(name)
        os.kill(consortium.server, signal.SIGKILL)  # what runs it starts it again
        goes_on()
        number = consortium.server
        consortium.kill("broker")
        os.kill(number, signal.SIGKILL)
        until(lambda: not consortium.answers())
        consortium.serve()
        goes_on()
        for name in names:
            consortium.kill(name)

        found = json.loads(consortium.tacit("ledger", "join", "new", "--log", consortium.place, "--genesis",
                                            consortium.genesis, "--key", f"{names[1]}/own.key", "--ca",
                                            "broker/ca.pem", "--json", cwd=tmp_path))  # fmt: skip
        assert found["faults"] == []
        states = []
        for folder in ("new", *(f"{name}/ledger" for name in names)):
            with Ledger.load(tmp_path / folder) as ledger:
                assert not ledger.faults
                states.append((ledger.head, ledger.dag.json()))
        assert all(state == states[0] for state in states)
        standing = {update["update"] for update in states[0][1]["models"][0]["updates"]}
        accepted = consortium.accepted()
        assert len(accepted) >= 4 * 3 * 6
        assert set(accepted) <= standing
        assert len(accepted) == len(set(accepted))
        assert len(standing) - len(accepted) <= 8  # at most one of each who was killed, before it could note it
        shutil.rmtree(tmp_path / "new")
        consortium.tacit("ledger", "join", "new", "--log", consortium.place, "--genesis", consortium.genesis, "--key",
                         f"{names[1]}/own.key", "--ca", "broker/ca.pem", cwd=tmp_path)  # fmt: skip
        verified = json.loads(consortium.tacit("ledger", "verify", "new", "--json", cwd=tmp_path))
        assert verified["head"] == states[0][0]
        assert verified["faults"] == []
    finally:
        consortium.close()


@pytest.mark.full
def test_four_providers_and_the_broker_are_killed_and_all_updates_stand_once(tmp_path):
    """Whole providers, who train privately and take each other's rows."""
    names = [each.name for each in WHO[:4]]
    consortium, providers = Consortium(tmp_path, names), Providers(tmp_path, names, updates=6)
    try:
        consortium.serve()
        at = ("--log", consortium.place, "--ca", "../broker/ca.pem", "--key", "own.key")
        told = tacit("ledger", "init", "ledger", *at, "--roster", "../roster.json", "--model", "drugs", "--entity", 8,
                     "--json", cwd=tmp_path / names[0])  # fmt: skip
        genesis = json.loads(told)["genesis"]
        for name in names[1:]:
            tacit("ledger", "join", "ledger", *at, "--genesis", genesis, cwd=tmp_path / name)
        for name in names:
            providers.start(name)
        providers.goes_on()
        for name in names[:2]:
            providers.kill(name)
            providers.goes_on()
            providers.start(name)
        os.kill(consortium.server, signal.SIGKILL)  # what runs it starts it again
        ended = providers.end()
        assert all(each["published"] == 6 and 0 < each["epsilon"] <= 2 for each in ended.values())
        verified = json.loads(tacit("ledger", "verify", "ledger", "--json", cwd=tmp_path / names[0]))
        assert verified["faults"] == []
        for name in names:
            with Ledger.load(tmp_path / name / "ledger") as ledger:
                assert (ledger.head, ledger.faults) == (verified["head"], [])
        nodes = ledger.dag.nodes.values()
        assert len(nodes) == len({node.update.weights for node in nodes}) == 4 * 6
        for each in WHO[:4]:
            standing = {str(node.cid) for node in nodes if node.by == each.public}
            assert set(providers.published(each.name)) <= standing
            assert len(standing) == 6
            assert any(parent.by != each.public for node in nodes if node.by == each.public for parent in node.parents)
    finally:
        providers.close()
        consortium.close()


# -- the commands ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_following_a_ledger_at_a_broker(broker, ledger, tmp_path):
    """Records as they come, junk by an insider named, a broker that goes away awaited."""
    WHO[1].save(tmp_path / "provider-1.key")
    with open(tmp_path / "said", "w") as said:
        process = subprocess.Popen([sys.executable, "-m", "tacit", "ledger", "follow", "ledger", "--json", "--weights",
                                    "--until", "10"], cwd=tmp_path, stdout=said, stderr=subprocess.PIPE)  # fmt: skip

    def lines():
        return [json.loads(line) for line in (tmp_path / "said").read_text().splitlines()]

    try:
        until(lambda: len(lines()) == 7)
        assert [line["kind"] for line in lines()] == ["genesis", "model", *["update"] * 5]
        assert [line["position"] for line in lines()] == list(range(7))
        ledger.publish_rows(WHO[2], "drugs", rows(tmp_path, 7), CLAIM)
        until(lambda: len(lines()) == 8)
        assert lines()[7]["by"] == "provider-2"
        assert lines()[7]["weights"] == str(CID.of(rows(tmp_path, 7)))
        broker.stop()
        broker.start()
        act(broker, lambda client: client.request(log_subject("drugs"), b"junk"), WHO[3])
        until(lambda: len(lines()) == 9)
        assert lines()[8]["fault"]["where"] == "record 8 ()"
        ledger.publish_rows(WHO[2], "drugs", rows(tmp_path, 9), None)
        assert process.wait(60) == 2  # something was wrong
        assert "epsilon" not in (tmp_path / "said").read_text()
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


@pytest.mark.full
def test_a_cluster_keeps_a_ledger_while_one_of_its_servers_is_killed(tmp_path):
    """Three copies: what was confirmed stands on two servers at least."""
    ports = []
    for _ in range(6):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            ports.append(probe.getsockname()[1])
    routes = ", ".join(f"nats://127.0.0.1:{port}" for port in ports[3:])
    running = {}

    def start(n):
        conf = tmp_path / f"{n}.conf"
        users = ", ".join(f"{{ nkey: {nkey_of(each.public)} }}" for each in WHO)
        conf.write_text(f"""
            server_name: s{n}\nport: {ports[n]}\nhost: 127.0.0.1
            jetstream {{ store_dir: "{tmp_path}/store-{n}", sync_interval: always }}
            cluster {{ name: c, host: 127.0.0.1, port: {ports[3 + n]}, routes: [{routes}] }}
            authorization {{ users: [{users}] }}
        """)
        with open(tmp_path / f"{n}.log", "ab") as log:
            running[n] = subprocess.Popen([broker_module._server(), "--config", str(conf)], stdout=log, stderr=log)

    def kill(n):
        running[n].kill()
        running.pop(n).wait()

    try:
        for n in range(3):
            start(n)
        at = Remote(f"nats://127.0.0.1:{ports[0]}/drugs", WHO[0], plain=True, patience=60)
        accepted = []
        with Ledger.begin(tmp_path / "ledger", WHO[0], Genesis("drugs", keys=KEYS), at, replicas=3) as ledger:
            assert at.replicas == 3
            ledger.open_model(WHO[0], Model(ledger.genesis, "drugs", entity=3, relation=3))
            for n in (1, 2):
                kill(n)
                for _ in range(4):
                    record = ledger.publish_rows(WHO[n], "drugs", rows(tmp_path, len(ledger)), CLAIM)
                    accepted.append(record.cid)
                start(n)
                time.sleep(3)  # it catches up, so that two of three have everything
            assert not ledger.faults
            assert ledger.verify().faults == []
            kill(0)
            other = Remote(f"nats://127.0.0.1:{ports[1]}/drugs", WHO[1], plain=True, patience=60)
            with Ledger.join(tmp_path / "new", other, ledger.genesis) as new:
                assert (new.head, new.faults) == (ledger.head, [])
                assert all(cid in new.dag for cid in accepted)
                assert new.verify().faults == []
    finally:
        for n in list(running):
            kill(n)


def test_brokers_that_cannot_be(tmp_path):
    with pytest.raises(BadValue, match="a ledger's name at a broker"):
        LedgerBroker(tmp_path / "b", roster(), "a b")
    with pytest.raises(BadValue, match="above 0"):
        LedgerBroker(tmp_path / "b", roster(), "a", room=0)
    from tacit.federation.keys import Roster

    with pytest.raises(TacitError, match="names nobody"):
        LedgerBroker(tmp_path / "b", Roster.begin(known("keeper")), "a")


def test_a_full_disk_stops_writing_and_loses_nothing(tmp_path):
    def fill(found):
        for n in range(40):
            found.blobs.put(os.urandom(100_000) + bytes((n,)))

    with LedgerBroker(tmp_path / "b", roster(), "drugs", room=2_000_000) as one, remote(one) as found:
        found.make()
        found.log.append([("a", b"x")])
        with pytest.raises(TacitError, match="insufficient resources"):
            fill(found)
        assert [each.name for each in found.log.read()] == ["a"]
