"""A ledger at a broker: its log is a stream of NATS JetStream, its weights lie in NATS's object store.

A record is one message of the stream, and its place is the number that the stream gave it: whoever reads has the same
one, and a number that is left out was deleted. Several at once are one batch of the server's, which stands whole or not
at all. Whatever is sent carries a number of its own, so that what is sent again because no answer came stands once.

The broker keeps bytes, and is believed nothing: records are verified by who reads them, weights by their address. It
can hold things back; it cannot change them unnoticed. Both streams are made so that nothing can be deleted by the
server's interface. That is a guard against mistakes: whoever has the broker's disk can do anything, and is found out.
"""

from __future__ import annotations

import asyncio
import base64
import datetime
import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tacit.errors import BadInput, BadValue, Refused, TacitError, excerpt
from tacit.federation.broker import Broker, inbox
from tacit.federation.keys import Identity, Roster
from tacit.federation.letters import Away
from tacit.federation.nats import Broken, Line
from tacit.folders import write_whole
from tacit.ledger.blobs import Withheld
from tacit.ledger.cbor import CID, RAW
from tacit.ledger.log import Entry
from tacit.ledger.record import LARGEST

T = TypeVar("T")
CA = "ca.pem"
"""The broker's certificate, in a ledger's folder."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
"""What a ledger may be called at a broker."""
ADDRESSED = "Tacit-Name"
"""The header of a message that says the record's address."""
AT_ONCE = 1000
"""Records that can be added at once, as the server has it."""
PAGE, PAGE_BYTES = 512, 8 << 20
"""Messages, and about how many bytes, that are asked for at a time."""
CHUNK, IN_FLIGHT = 128 << 10, 16
"""Bytes of weights in one message, and how many are sent before the first is confirmed."""
VERSIONS = 16
"""How many entries of the object store under one address are looked at: whoever may write can add worthless ones."""
ANSWER, TRANSFER = 5.0, 30.0
"""Seconds that the broker has for an answer, and for confirming or bringing a piece of weights."""
FULL = 10023, 10047
"""The server's numbers for a disk that is full."""
LAG = 5.0
"""Seconds that another server of a cluster may be behind the one that confirms."""
AGAIN = 600
"""Seconds in which the server knows what was sent twice. Nobody tries for longer than that."""
KEPT: dict[str, Any] = {
    "retention": "limits", "discard": "new", "storage": "file", "max_age": 0, "max_msgs": -1,
    "max_msgs_per_subject": -1, "deny_delete": True, "deny_purge": True, "allow_rollup_hdrs": False,
    "allow_msg_ttl": False, "allow_direct": True, "sealed": False,
}  # fmt: skip
"""What makes a stream one that forgets nothing."""


def log_stream(name: str) -> str:
    return f"tacit-ledger-{name}"


def blob_stream(name: str) -> str:
    return f"OBJ_{log_stream(name)}"  # as the object store calls the stream of a bucket


def log_subject(name: str) -> str:
    return f"tacit-ledger.{name}"


def blob_subject(name: str, kind: str, which: str) -> str:
    """`kind`: C, a piece of weights; M, an entry that says which pieces belong to an address."""
    return f"$O.{log_stream(name)}.{kind}.{which}"


def split_address(address: str) -> tuple[str, str]:
    """A ledger's address, such as tls://broker.example.org:4222/drugs, as the broker's and the ledger's name."""
    broker, slash, name = address.rpartition("/")
    if not slash or broker.endswith("/") or not NAME.fullmatch(name):
        raise BadValue(
            "a ledger's address is such as tls://broker.example.org:4222/drugs, with the ledger's name of letters, "
            f"digits, dashes and underscores; not {excerpt(address)}"
        )
    return broker, name


class Declined(TacitError):
    """What the broker answered with an error. `code`: the server's number for it."""

    def __init__(self, what: str, code: int):
        super().__init__(what)
        self.code = code


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a stream."""

    sequence: int
    headers: dict[str, str]
    data: bytes


class Remote(Line):
    """A ledger at a broker: `log` and `blobs`. Calls block; a broker that goes away is awaited for `patience` seconds.

    Parameters
    ----------
    address
        Of the broker, and the ledger's name: tls://broker.example.org:4222/drugs.
    identity
        Who logs in. The broker lets in whom its roster names.
    ca, plain, patience
        As of any connection to a broker.
    """

    public = False

    def __init__(
        self,
        address: str,
        identity: Identity,
        *,
        ca: Path | None = None,
        plain: bool = False,
        patience: float = 20.0,
    ):
        broker, self.name = split_address(address)
        super().__init__(broker, identity, "ledger", ca=ca, plain=plain, patience=min(patience, AGAIN / 4))
        self.place, self.ca, self.plain = address, ca, plain
        self.replicas = 1
        self.log, self.blobs = StreamLog(self), ObjectBlobs(self)
        self._begin()

    def make(self, replicas: int = 1) -> None:
        """Make the streams of a new ledger, if they are not there. `replicas`: servers that keep them."""
        ours = [
            {"name": blob_stream(self.name), "max_msg_size": 2 * CHUNK,
             "subjects": [blob_subject(self.name, kind, ">") for kind in "CM"]},
            {"name": log_stream(self.name), "max_msg_size": LARGEST + (4 << 10),
             "subjects": [log_subject(self.name)], "allow_atomic": True},
        ]  # fmt: skip
        common = KEPT | {"num_replicas": replicas, "duplicate_window": AGAIN * 10**9}
        for each in ours:
            self._asked("STREAM.CREATE", str(each["name"]), common | each)
        self.check()

    def check(self) -> None:
        """Refuse a place where no ledger is, or one that would forget."""
        for stream in (blob_stream(self.name), log_stream(self.name)):
            try:
                found = self._asked("STREAM.INFO", stream)
            except Declined as error:
                if error.code != 10059:
                    raise
                raise TacitError(
                    f"There is no ledger {self.name!r} at the broker {self.address}. Look at the name; tacit ledger "
                    "init --log begins one."
                ) from None
            config = found.get("config")
            config = config if isinstance(config, dict) else {}
            for key, value in KEPT.items():
                has = config.get(key, False if value is False else None)  # older servers do not know of all
                if has != value:
                    raise BadInput(
                        f"{self.place}: the stream {stream} has {key} = {has!r}, where a ledger has {value!r}: it "
                        "could forget records, or cannot be read. Ask whoever runs the broker."
                    )
            self.replicas = int(config.get("num_replicas", 1))

    def settle(self, folder: Path) -> None:
        """Of what is at a broker nothing is kept in the folder but what was found there."""

    def remember(self, draft: Path) -> dict[str, Any]:
        """What a ledger's folder says of where it is."""
        if self.ca is not None:
            write_whole(draft / CA, self.ca.read_bytes(), mode=0o644)
        return {"log": self.place, "plain": self.plain}

    def call(self, act: Callable[[Any], Coroutine[Any, Any, T]], undone: str = "The ledger was not reached") -> T:
        """Do something with the connection, and wait for it; again if it breaks. It has to bear being done twice."""
        return self._await(self._persist(act, undone))

    def _asked(self, verb: str, stream: str, content: dict[str, Any] | None = None) -> dict[str, Any]:
        return self.call(lambda client: self._api(client, verb, stream, content))

    async def _persist(self, act: Callable[[Any], Coroutine[Any, Any, T]], undone: str) -> T:
        until = self._loop.time() + self.patience
        while True:
            try:
                return await self._attempt(act, undone)
            except Broken as broken:
                if self._loop.time() > until:
                    why = broken.__cause__
                    told = str(why) if isinstance(why, Broken) else "no answer came, or it keeps no streams"
                    raise Away(f"{undone}: the broker {self.address} is there, but {told}.") from None

    # -- the server's interface; in the connection's thread ------------------------------------------------------------

    async def ask(
        self, client: Any, subject: str, data: bytes = b"", headers: dict[str, str] | None = None, wait: float = ANSWER
    ) -> dict[str, Any]:
        """What the server answers, as JSON."""
        from nats.errors import TimeoutError as Late

        try:
            message = await client.request(subject, data, timeout=wait, headers=headers)
        except Late:
            self._complain(client)
            raise
        try:
            answer = json.loads(message.data)
            fault = answer.get("error") or {}
            code, about, number = fault.get("code"), str(fault.get("description")), int(fault.get("err_code", 0))
        except (ValueError, AttributeError, TypeError, RecursionError):
            raise Refused(f"{self.place}: whoever answers there is no NATS server with streams.") from None
        if code == 503 and number not in FULL:  # not for now: a cluster without a leader, a server that is starting
            raise Broken(about)
        if fault:
            raise Declined(f"{self.place}: the broker refuses this: {about}.", number)
        return dict(answer)

    async def _api(self, client: Any, verb: str, stream: str, content: dict[str, Any] | None = None) -> dict[str, Any]:
        data = b"" if content is None else json.dumps(content).encode()
        return await self.ask(client, f"$JS.API.{verb}.{stream}", data)

    async def put(self, client: Any, subject: str, data: bytes, headers: dict[str, str], wait: float = ANSWER) -> int:
        """Add a message; its number in the stream."""
        answer = await self.ask(client, subject, data, headers, wait)
        if type(number := answer.get("seq")) is not int or number < 1:
            raise Refused(f"{self.place}: whoever answers there is no NATS server with streams.")
        return number

    async def last(self, client: Any, stream: str) -> int:
        """The number of the last message; 0: there is none."""
        state = (await self._api(client, "STREAM.INFO", stream)).get("state")
        if not isinstance(state, dict) or type(number := state.get("last_seq")) is not int:
            raise Refused(f"{self.place}: whoever answers there is no NATS server with streams.")
        return number

    async def count(self, client: Any, stream: str, subject: str) -> int:
        """How many messages a subject has."""
        state = (await self._api(client, "STREAM.INFO", stream, {"subjects_filter": subject})).get("state")
        counts = state.get("subjects") if isinstance(state, dict) else None
        return int(counts.get(subject, 0)) if isinstance(counts, dict) else 0

    async def page(self, client: Any, stream: str, start: int, most: int, subject: str | None = None) -> list[Message]:
        """Messages from a number on, in order: as many as fit, none only if there are none."""
        from nats.errors import TimeoutError as Late

        wanted: dict[str, Any] = {"seq": start, "batch": most, "max_bytes": PAGE_BYTES}
        if subject is not None:
            wanted["next_by_subj"] = subject
        found: list[Message] = []
        answers = await client.subscribe(to := client.new_inbox())
        try:
            await client.publish(f"$JS.API.DIRECT.GET.{stream}", json.dumps(wanted).encode(), reply=to)
            while True:
                message = await answers.next_msg(TRANSFER)
                client._pings_outstanding = 0  # a pong may be waiting behind what is coming
                headers = message.headers or {}
                # What the server adds comes after what a writer wrote, and counts.
                if (number := headers.get("Nats-Sequence", "")).isdigit():
                    found.append(Message(int(number), headers, message.data))
                elif headers.get("Status") == "503":
                    raise Broken("no server has the stream now")
                elif headers.get("Status") in ("204", "404"):
                    break
                else:
                    raise Refused(f"{self.place}: the broker refuses this: {excerpt(str(headers))}.")
        except Late:
            self._complain(client)
            raise
        finally:
            with suppress(Exception):  # the connection may be gone
                await answers.unsubscribe()
        numbers = [each.sequence for each in found]
        if numbers != sorted(set(numbers)) or (numbers and numbers[0] < start):
            raise Refused(f"{self.place}: the broker gave messages out of order.")
        return found

    def _complain(self, client: Any) -> None:
        for error in client.errors:
            if "permissions violation" in str(error).lower():
                raise TacitError(self._explained(error)[0])

    def _doubt(self) -> str:
        return f"Is {self.name!r} the ledger that it is for?"

    def _page(self, stream: str, start: int, most: int, subject: str | None) -> list[Message]:
        return self.call(lambda client: self.page(client, stream, start, most, subject))

    def pages(
        self, stream: str, start: int, subject: str | None = None, most: int = PAGE, lag: float = LAG
    ) -> Iterator[list[Message]]:
        """Everything from a number on up to what is there now. In a cluster, a server that is behind is waited for."""
        end = self.call(lambda client: self.last(client, stream))
        lag = lag if self.replicas > 1 else 0.0
        until = time.monotonic() + lag
        while start <= end:
            found = self._page(stream, start, most, subject)
            if found:
                start = found[-1].sequence + 1
                yield found
                until = time.monotonic() + lag
            elif time.monotonic() < until:
                time.sleep(0.1)
            else:  # the rest is of other subjects, or was deleted
                return


class StreamLog:
    """A log in a stream."""

    def __init__(self, remote: Remote):
        self._remote = remote
        self._subject, self._stream = log_subject(remote.name), log_stream(remote.name)

    def append(self, entries: Sequence[tuple[str, bytes]]) -> int:
        return self._append(entries, {})

    def begin(self, name: str, data: bytes) -> None:
        """Add the first entry; refused if there is one."""
        try:
            self._append([(name, data)], {"Nats-Expected-Last-Sequence": "0"})
        except Declined as error:
            first = next(self.read(), None)
            if first is not None and (first.name, first.data) == (name, data):
                return  # it was added, and the answer was lost
            if first is None or error.code != 10071:
                raise
            raise TacitError(
                f"There is a ledger {self._remote.name!r} at the broker {self._remote.address} already: tacit ledger "
                "join takes part in it; or choose another name."
            ) from None

    def _append(self, entries: Sequence[tuple[str, bytes]], more: dict[str, str]) -> int:
        for name, data in entries:
            if not isinstance(data, bytes):
                raise BadValue(f"a log keeps bytes; not {excerpt(repr(data))}")
            if not name.isascii() or not name.isprintable() or name != name.strip():
                raise BadValue(f"a name in a log is plain text of ASCII letters; not {excerpt(name)}")
        if len(entries) > AT_ONCE:
            raise BadValue(f"{AT_ONCE:,} records can be added at once; not {len(entries):,}")
        tag, remote = os.urandom(16).hex(), self._remote
        if not entries:
            return remote.call(lambda client: remote.last(client, self._stream))
        if len(entries) == 1:
            [(name, data)] = entries
            headers = {"Nats-Msg-Id": tag, ADDRESSED: name} | more
            return -1 + remote.call(
                lambda client: remote.put(client, self._subject, data, headers), "The record may not have been added"
            )
        before = remote.call(lambda client: remote.last(client, self._stream))

        async def add(client: Any) -> int:
            batch = os.urandom(16).hex()  # a try that broke off is none of this one's
            number = 0
            for at, (name, data) in enumerate(entries, 1):
                headers = {"Nats-Batch-Id": batch, "Nats-Batch-Sequence": str(at), "Nats-Msg-Id": f"{tag}.{at}",
                           ADDRESSED: name}  # fmt: skip
                if at < len(entries):
                    await client.publish(self._subject, data, headers=headers)
                else:
                    number = await remote.put(client, self._subject, data, headers | {"Nats-Batch-Commit": "1"})
            return number - len(entries)

        try:
            return remote.call(add, "The records may not have been added")
        except Declined as error:
            if error.code == 10201:  # some of it was sent before
                for page in remote.pages(self._stream, before + 1):
                    for message in page:
                        if message.headers.get("Nats-Msg-Id") == f"{tag}.1":
                            return message.sequence - 1
            raise

    def read(self, start: int = 0) -> Iterator[Entry]:
        for page in self._remote.pages(self._stream, start + 1):
            for message in page:
                yield Entry(message.sequence - 1, message.headers.get(ADDRESSED, ""), message.data)


class ObjectBlobs:
    """Weights in an object store, under their addresses. What is given out was verified.

    Nothing in this store is ever replaced: whoever may write can add an entry under an address that is taken, and
    whoever reads goes by those whose bytes have that address. Weights that broke off while they were sent leave pieces
    that nobody finds.
    """

    def __init__(self, remote: Remote):
        self._remote = remote
        self._stream = blob_stream(remote.name)

    def address(self, data: bytes) -> CID:
        return CID.of(data, RAW)

    def _entry(self, cid: CID) -> str:
        return blob_subject(self._remote.name, "M", base64.urlsafe_b64encode(str(cid).encode()).decode())

    def put(self, data: bytes) -> CID:
        cid, remote = CID.of(data, RAW), self._remote
        with suppress(Withheld, Refused):  # it is not there, or damaged: then it is added anew
            self._get(cid, len(data), lag=0.0)
            return cid

        async def add(client: Any) -> None:
            own = os.urandom(16).hex()  # pieces are read in the order in which they came, so a new try is all anew
            way = blob_subject(remote.name, "C", own)
            pieces = [data[at : at + CHUNK] for at in range(0, len(data), CHUNK)]
            numbers: list[int] = []
            await remote.last(client, self._stream)
            for at in range(0, len(pieces), IN_FLIGHT):
                sent = [
                    remote.put(client, way, piece, {"Nats-Msg-Id": f"{own}.{at + n}"}, TRANSFER)
                    for n, piece in enumerate(pieces[at : at + IN_FLIGHT])
                ]  # fmt: skip
                for each in await asyncio.gather(*sent, return_exceptions=True):  # none goes on behind our back
                    if isinstance(each, BaseException):
                        raise each
                    numbers.append(each)
            if numbers != sorted(numbers) or await remote.count(client, self._stream, way) != len(pieces):
                raise Broken("pieces came out of order, or somebody put others between them")
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode()
            told = {
                "name": str(cid), "bucket": log_stream(remote.name), "nuid": own, "size": len(data),
                "chunks": len(pieces), "digest": f"SHA-256={digest}", "options": {"max_chunk_size": CHUNK},
                "mtime": datetime.datetime.now(datetime.UTC).isoformat(),
            }  # fmt: skip
            await remote.put(client, self._entry(cid), json.dumps(told).encode(), {"Nats-Msg-Id": own})

        remote.call(add, f"The weights {cid} may not have been kept")
        return cid

    def get(self, cid: CID, largest: int) -> bytes:
        return self._get(cid, largest, LAG)

    def _get(self, cid: CID, largest: int, lag: float) -> bytes:
        faults: list[TacitError] = []
        looked = 0
        for page in self._remote.pages(self._stream, 1, self._entry(cid), VERSIONS, lag):
            for message in page:
                try:
                    data = self._fetched(cid, message, largest)
                    if CID.of(data, RAW) == cid:
                        return data
                    raise Refused(f"the store has other bytes in the place of the weights {cid}: they were changed")
                except (Withheld, Refused) as error:
                    faults.append(error)
            looked += len(page)
            if looked >= VERSIONS:
                break
        if faults:
            raise faults[0]
        raise Withheld(f"the weights {cid} are not at {self._remote.place}: ask their provider for them.")

    def _fetched(self, cid: CID, message: Message, largest: int) -> bytes:
        """What an entry points to, if it can be what is wanted."""
        try:
            told = json.loads(message.data)
            size, own, digest = told["size"], told["nuid"], told["digest"]
            if type(size) is not int or size < 0 or not re.fullmatch(r"[A-Za-z0-9]{1,64}", own):
                raise ValueError
        except (ValueError, LookupError, TypeError, RecursionError):
            raise Refused(f"the store's entry for the weights {cid} is none") from None
        if size > largest:
            raise Refused(f"the weights {cid} have more than {largest:,} bytes")
        # The address is the same hash, after four bytes that say which: other bytes are not even fetched.
        if digest != f"SHA-256={base64.urlsafe_b64encode(bytes(cid)[4:]).decode()}":
            raise Refused(f"the store has other bytes in the place of the weights {cid}: they were changed")
        found: list[bytes] = []
        held = 0
        for page in self._remote.pages(self._stream, 1, blob_subject(self._remote.name, "C", own)) if size else ():
            for piece in page:
                # As they were cut: an entry may point to any number of pieces, and empty ones never fill a size.
                if not piece.data or len(found) * CHUNK >= size:
                    raise Refused(f"the store has pieces of the weights {cid} that were not cut as they are")
                found.append(piece.data)
                held += len(piece.data)
                if held >= size:  # whoever may write can add more pieces behind the last, which are none
                    return b"".join(found)
        if held < size:
            raise Withheld(f"of the weights {cid}, {size - held:,} bytes are missing at {self._remote.place}.")
        return b""


class LedgerBroker(Broker):
    """A NATS server that keeps one ledger, as a process of its own. All on the roster may add to it, and read it.

    Nobody may delete, change how it is kept, or listen to what others are sent. What it confirms is on its disk.

    Parameters
    ----------
    folder
        Where its configuration, its certificates and the ledger are; nobody else may look into it.
    roster
        Whose key is whose. Who is not on it, or was revoked, is not let in.
    name
        The ledger's.
    room
        Bytes that it may take on the disk. When it is full nothing more is added, and nothing is lost. None: as the
        server has it, three quarters of what is free.
    host, port, hosts, plain
        As of any broker.
    """

    def __init__(
        self,
        folder: Path,
        roster: Roster,
        name: str,
        *,
        room: int | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        hosts: Sequence[str] = (),
        plain: bool = False,
    ):
        if not NAME.fullmatch(name):
            raise BadValue(
                "a ledger's name at a broker has letters, digits, dashes and underscores, 64 at most; not "
                f"{excerpt(name)}"
            )
        if room is not None and room < 1:
            raise BadValue(f"room on a disk is a number of bytes above 0; not {room}")
        self.room = room
        super().__init__(folder, roster, None, roster.names, federation=name, host=host, port=port, hosts=hosts,
                         plain=plain)  # fmt: skip

    @property
    def place(self) -> str:
        """The ledger's address, such as tls://127.0.0.1:4222/drugs."""
        return f"{self.address}/{self.federation}"

    def _abilities(self) -> list[str]:
        store = json.dumps(str((self.folder / "store").resolve()))
        room = "" if self.room is None else f", max_file_store: {self.room}"
        # always: what is confirmed was written to the disk before
        return [f"jetstream {{ store_dir: {store}, sync_interval: always{room} }}", "max_subscriptions: 64"]

    def _users(self) -> list[str]:
        if not self.roster.names:
            raise TacitError("the roster names nobody who could log in: tacit keys enrol adds a party.")
        name, streams = self.federation, (log_stream(self.federation), blob_stream(self.federation))
        may = [log_subject(name), blob_subject(name, "C", "*"), blob_subject(name, "M", "*")]
        may += [f"$JS.API.{verb}.{each}" for verb in ("STREAM.CREATE", "STREAM.INFO", "DIRECT.GET") for each in streams]
        return [self._user(each, may, [f"{inbox(each)}.>"]) for each in self.roster.names]
