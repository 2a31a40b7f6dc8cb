"""Letters between a coordinator and its parties, or between peers, by way of a broker, over TLS, with calls that block.

A letter is bytes, and larger ones travel in pieces. Nothing here says whether a letter is genuine or was answered:
whoever sends one signs it, and sends it again until there is an answer. The broker vouches only for the subject that a
letter came on, and so for its sender. Connections go out to the broker, and none come in.

A login proves who has a key, but not on which connection: a broker that a party trusts could pass on the nonce of
another broker that knows the same key, and log in there in its place. So what a letter says counts by its signature.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import logging
import os
import random
import ssl
import struct
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar
from urllib.parse import urlsplit

from tacit.errors import BadValue, TacitError, excerpt
from tacit.federation.broker import between, inbox, nkey_of, subject
from tacit.federation.keys import Identity, fingerprint
from tacit.federation.letters import Away

LOG = logging.getLogger(__name__)
T = TypeVar("T")
CHUNK = 256 << 10
"""Bytes of a letter in one piece."""
HEAD = struct.Struct(">4s16sIIQ")
MAGIC = b"tcl1"
"""A piece is MAGIC, the letter's random number, which piece it is, of how many, the letter's length; a digest of all
that and of what follows; and the bytes."""
DIGEST = 16
LARGEST = 1 << 30
"""Bytes of a letter, unless told otherwise."""
UNFINISHED = 4
"""Letters of one sender that are put together at a time; one more, and the oldest is given up."""
STALE = 120.0
"""Seconds after which a letter is given up of which no further piece came."""
REMEMBERED = 1024
"""Numbers of letters that are known to have come, for each sender: a second copy of these is not delivered."""
WAITING = 1024
"""Letters of one sender that wait to be received; what comes beyond is dropped."""
PAUSES = 0.1, 5.0
"""Seconds between two attempts to reach a broker that is away: at first, and at most."""
JITTER = random.SystemRandom()
"""Attempts of many are not made at once. The generator that a program may have seeded is left alone."""
TRIES = 3
"""How often a letter is begun anew when the connection breaks in the middle of it."""
STEP = 5
"""Seconds that a broker has for each step of a login."""
QUIET = logging.NullHandler()
"""What the library logs is told in our words, or is no news."""


class Broken(Exception):
    """A connection broke in the middle of something, or an answer did not come: whoever wants it begins anew."""


def pieces(letter: bytes, number: bytes) -> Iterator[bytes]:
    """A letter as it travels. `number`, 16 random bytes, is its own: with the same one it is the same letter again."""
    count, view = max(1, -(-len(letter) // CHUNK)), memoryview(letter)
    for index in range(count):
        head, body = HEAD.pack(MAGIC, number, index, count, len(letter)), view[index * CHUNK : (index + 1) * CHUNK]
        yield b"".join([head, _digest(head, body), body])


def _digest(head: bytes, body: bytes | memoryview) -> bytes:
    found = hashlib.blake2b(head, digest_size=DIGEST)
    found.update(body)
    return found.digest()


class Assembly:
    """The letters of one sender, put together from pieces that come in any order, twice, damaged, or never.

    What it holds is bounded: the pieces of unfinished letters, together, by the largest letter that is taken.

    Attributes
    ----------
    held
        Bytes of unfinished letters.
    dropped
        Pieces that were none, and letters that were given up.
    """

    def __init__(self, largest: int = LARGEST):
        self.largest, self.held, self.dropped = largest, 0, 0
        self._unfinished: OrderedDict[tuple[bytes, int], tuple[float, dict[int, bytes]]] = OrderedDict()
        self._done: OrderedDict[bytes, None] = OrderedDict()

    def take(self, piece: bytes, now: float) -> bytes | None:
        """A letter, if this piece was the last that it lacked. `now`: seconds of a clock that only goes forward."""
        self.give_up(now)
        read = self._read(piece)
        if read is None:
            self.dropped += 1
            return None
        number, index, count, total, body = read
        if number in self._done:
            return None
        key = (number, total)
        _, there = self._unfinished.pop(key, (now, {}))
        if index not in there:
            there[index] = body
            self.held += len(body)
        self._unfinished[key] = (now, there)
        if len(there) < count:
            while len(self._unfinished) > UNFINISHED or self.held > self.largest:
                self._drop(next(iter(self._unfinished)))
            return None
        del self._unfinished[key]
        self.held -= total
        self._done[number] = None
        if len(self._done) > REMEMBERED:
            self._done.popitem(last=False)
        return b"".join(there[at] for at in range(count))

    def give_up(self, now: float) -> None:
        """Forget letters of which nothing came for long: a piece of theirs was lost."""
        while self._unfinished and now - next(iter(self._unfinished.values()))[0] > STALE:
            self._drop(next(iter(self._unfinished)))

    def _drop(self, key: tuple[bytes, int]) -> None:
        _, there = self._unfinished.pop(key)
        self.held -= sum(map(len, there.values()))
        self.dropped += 1

    def _read(self, piece: bytes) -> tuple[bytes, int, int, int, bytes] | None:
        """What is in a piece; None: it is not one."""
        if len(piece) < HEAD.size + DIGEST:
            return None
        head, body = piece[: HEAD.size], piece[HEAD.size + DIGEST :]
        magic, number, index, count, total = HEAD.unpack(head)
        if magic != MAGIC or total > self.largest or count != max(1, -(-total // CHUNK)) or index >= count:
            return None
        if len(body) != min(CHUNK, total - index * CHUNK) or _digest(head, body) != piece[HEAD.size :][:DIGEST]:
            return None
        return number, index, count, total, body


class Line:
    """A connection to a broker that is kept: whoever has a key logs in, over TLS, again whenever it was lost.

    A broker that goes away is awaited, for ever. One that refuses the login is not: every call raises from then on.
    All methods may be called from any thread. What is done with it is for those who build on this.

    Parameters
    ----------
    address
        The broker's, such as tls://broker.example.org:4222.
    identity
        Who logs in.
    purpose
        What the broker is for, in words: "federation".
    ca
        The broker's ca.pem. Whoever has no certificate of it is not the broker, whatever else vouches for him.
    plain
        Take nats:// too, without TLS: whoever sees the network reads all that is sent, and can change it.
    patience
        Seconds that the first login, and each call, wait for a broker that is away.
    """

    def __init__(
        self, address: str, identity: Identity, purpose: str, *, ca: Path | None, plain: bool, patience: float
    ):
        try:
            import nats.aio.client  # noqa: F401 - whether it is there
        except ImportError:
            raise TacitError('A broker is reached by the package nats-py: pip install "tacit-kg[nats]"') from None
        self.address, self.identity, self.purpose, self.patience = address, identity, purpose, patience
        self._tls = _tls(address, ca, plain)
        self._arrived = threading.Condition()
        self._fault = ""
        """Why nothing can be done any more."""
        self._away = ""
        """Why there is no connection."""
        self._client: Any = None
        self._up = asyncio.Event()
        self._stopping = asyncio.Event()
        self._begun: Future[None] = Future()

    def close(self) -> None:
        """Log off."""
        with self._arrived:  # whoever does something does it before this, or is told
            self._end("The connection was closed.")
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- how it is done; from `_run` on, and what is awaited, in a thread of its own ----------------------------------

    def _begin(self) -> None:
        """Log in. To be called last of all when one is made."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="tacit-line", daemon=True)
        self._thread.start()
        try:
            self._begun.result()
        except BaseException:
            Line.close(self)
            raise

    async def _greet(self, client: Any) -> None:
        """What is done first on each new connection."""

    def _doubt(self) -> str:
        """What to look at if the broker does not allow something."""
        return f"Is it the broker of this {self.purpose}?"

    def _await(self, doing: Coroutine[Any, Any, T]) -> T:
        """Do something in the thread of the connection, and wait for it here."""
        with self._arrived:
            try:
                self._check()
            except TacitError:
                doing.close()
                raise
            future = asyncio.run_coroutine_threadsafe(doing, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            self._check()
            raise

    async def _attempt(self, act: Callable[[Any], Coroutine[Any, Any, T]], undone: str) -> T:
        """Do something with the connection when there is one; `Broken` if it breaks in the middle, or is of no use.

        `undone`: what to say if there is none, such as "The letter was not sent".
        """
        try:
            async with asyncio.timeout(self.patience):
                await self._up.wait()
        except TimeoutError:
            raise Away(
                f"{undone}: for {self.patience:g} seconds there was no broker. "
                f"{self._away or f'The connection to {self.address} was lost.'}"
            ) from None
        self._check()
        client = self._client
        doing = asyncio.create_task(act(client))
        await asyncio.wait({doing, client._reading_task}, return_when=asyncio.FIRST_COMPLETED)
        if doing.done() and doing.exception() is None:
            return doing.result()
        doing.cancel()
        await asyncio.wait({doing})
        fault = None if doing.cancelled() else doing.exception()
        if isinstance(fault, TacitError):
            raise fault
        await asyncio.wait({client._reading_task}, timeout=1)  # and `_up` is cleared
        await asyncio.sleep(0)
        raise Broken from fault

    def _check(self) -> None:
        if self._fault:
            raise TacitError(self._fault)

    def _end(self, why: str) -> None:
        with self._arrived:
            self._fault = self._fault or why
            self._arrived.notify_all()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._keep())

    async def _keep(self) -> None:
        """Stay connected until `close`, or until there is no use in it; and then tell everybody why, until `close`."""
        self._loop.set_exception_handler(lambda loop, context: LOG.debug("nats: %s", context.get("message")))
        logging.getLogger("nats").addHandler(QUIET)
        logging.getLogger("asyncio").addFilter(_no_eof)
        stopping = asyncio.create_task(self._stopping.wait())
        keeping = asyncio.create_task(self._keep_connected())
        await asyncio.wait({stopping, keeping}, return_when=asyncio.FIRST_COMPLETED)
        fault = keeping.exception() if keeping.done() else None
        self._end("The connection was closed." if fault is None else str(fault) or repr(fault))
        self._up.set()  # whoever waits for it learns that there is none
        while not keeping.done():  # the library swallows a cancellation here and there
            keeping.cancel()
            await asyncio.wait({keeping}, timeout=0.5)
        if self._client is not None:
            await _hang_up(self._client)
        if not self._begun.done():
            self._begun.set_exception(TacitError(self._fault))
        await stopping
        if others := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(others, timeout=STEP)

    async def _keep_connected(self) -> None:
        began, pause = time.monotonic(), PAUSES[0]
        while True:
            try:
                client = await self._log_in()
            except Exception as error:  # noqa: BLE001 - whatever a server says, or what is none
                why, hopeless = self._explained(error)
                first = not self._begun.done()
                if hopeless and (first or not isinstance(error, ssl.SSLError)):
                    raise TacitError(why) from None
                if first and time.monotonic() - began + pause > self.patience:
                    raise TacitError(why) from None
                if why != self._away and not first:
                    LOG.log(logging.WARNING if hopeless else logging.INFO, "%s It is tried again.", why)
                self._away = why
                await asyncio.sleep(pause * JITTER.uniform(0.5, 1))
                pause = min(2 * pause, PAUSES[1])
                continue
            self._client, self._away, since = client, "", time.monotonic()
            self._up.set()
            if not self._begun.done():
                self._begun.set_result(None)
            await asyncio.wait({client._reading_task})  # it ends with the connection, however that ends
            self._up.clear()
            self._client, why = None, client.last_error
            await _hang_up(client)
            if _is_refusal(why):
                raise TacitError(self._explained(why)[0])
            if time.monotonic() - since > PAUSES[1]:
                pause = PAUSES[0]
            LOG.info("The connection to the broker was lost.")

    async def _log_in(self) -> Any:
        """A connection that is logged in and listens. Each is made anew, so that nothing of a broken one is left."""
        from nats.aio.client import Client

        errors: list[Exception] = []
        asked: list[str] = []

        async def fault(error: Exception) -> None:
            errors.append(error)
            del errors[:-8]

        def answer(nonce: str) -> bytes:
            asked.append(nonce)
            return base64.b64encode(self.identity.answer(nonce))

        client = Client()
        client._public_nkey = nkey_of(self.identity.public)  # there is no option for it without the private key
        client.errors = errors
        try:
            try:
                await client.connect(
                    self.address,
                    error_cb=fault,
                    signature_cb=answer,
                    tls=self._tls,
                    tls_handshake_first=self._tls is not None,  # TLS or nothing: not a word before it
                    allow_reconnect=False,
                    max_reconnect_attempts=1,
                    reconnect_time_wait=0,
                    connect_timeout=STEP,
                    ping_interval=10,
                    max_outstanding_pings=12,
                    pending_size=1,  # what is published is written before the call returns
                    inbox_prefix=inbox(self.identity.name),
                )
            except Exception:
                if errors and not asked:
                    raise errors[-1] from None  # the library's own says only that no server is left
                raise
            if not asked:
                raise TacitError(
                    f"The broker at {self.address} lets anybody in, without a key: it is none of this "
                    f"{self.purpose}. Ask whoever runs it."
                )
            await self._greet(client)
            await client.flush(STEP)
            if errors:
                raise errors[-1]
        except BaseException:
            await _hang_up(client)
            raise
        return client

    def _explained(self, error: Any) -> tuple[str, bool]:
        """What went wrong and what to do about it; and whether there is no use in trying again."""
        me = f"{self.identity.name}, {fingerprint(self.identity.public)}"
        if isinstance(error, TacitError):
            return str(error), True
        if isinstance(error, ssl.SSLCertVerificationError):
            if error.verify_code in (62, 64):  # of OpenSSL: another host name, another address
                return (
                    f"The broker at {self.address} has a certificate for other names. Use the address that whoever "
                    "runs it gave out; or the certificate has to be made for this one.",
                    True,
                )
            if error.verify_code in (9, 10):  # not valid yet, not valid any more
                return (
                    f"The certificate of the broker at {self.address}: {error.verify_message}. Look at this machine's "
                    "clock; if it is right, whoever runs the broker has to make new certificates.",
                    True,
                )
            return (
                f"Whoever answers at {self.address} is not the broker that the given ca.pem is of "
                f"({error.verify_message}). If the broker has new certificates, get its new ca.pem from whoever runs "
                "it; if not, somebody is in between.",
                True,
            )
        if isinstance(error, ssl.SSLError):
            return f"Whoever answers at {self.address} does not speak TLS 1.3: {error.reason or error}.", True
        if _is_refusal(error):
            return (
                f"The broker at {self.address} refuses the key of {me}. It is not enrolled, not a party of this "
                f"{self.purpose}, or was revoked or replaced. Ask the keeper of the roster.",
                True,
            )
        if "permissions violation" in str(error).lower():
            return (
                f"The broker at {self.address} does not let {me}, do this: {error}. {self._doubt()}",
                True,
            )
        return (
            f"No broker of this {self.purpose} answers at {self.address}: {str(error) or type(error).__name__}.",
            False,
        )


class Post(Line):
    """Letters by way of a broker: what is sent reaches its receiver at most once, whole or not at all, maybe late.

    A broker that goes away is awaited, for ever. One that refuses the login is not: `send` and `receive` raise from
    then on. All methods may be called from any thread.

    Parameters
    ----------
    address
        The broker's, such as tls://broker.example.org:4222.
    identity
        Who logs in.
    federation
        Its name, as the broker has it.
    to
        Of the coordinator: the parties. Letters of others are dropped. Of a party: None.
    peers
        Where there is no coordinator: the others, to whom letters go and of whom they are taken.
    ca
        The broker's ca.pem. Whoever has no certificate of it is not the broker, whatever else vouches for him.
    plain
        Take nats:// too, without TLS: whoever sees the network reads all letters, and can change them.
    largest
        Bytes of a letter at most. For each sender, twice as many may be held in memory: unfinished, and not received.
    patience
        Seconds that the first login, and each `send`, wait for a broker that is away.

    Attributes
    ----------
    sent_bytes, received_bytes
        What was handed to the broker and came from it: letters and the headers of their pieces.
    """

    def __init__(
        self,
        address: str,
        identity: Identity,
        federation: str,
        *,
        to: Sequence[str] | None = None,
        peers: Sequence[str] | None = None,
        ca: Path | None = None,
        plain: bool = False,
        largest: int = LARGEST,
        patience: float = 10.0,
    ):
        super().__init__(address, identity, "federation", ca=ca, plain=plain, patience=patience)
        self.federation = federation
        self.sent_bytes = self.received_bytes = self._strays = 0
        self._largest = largest
        self._ways: dict[str | None, str]
        if peers is not None:
            self._ways = {name: between(federation, name, identity.name) for name in peers}
            self._listens = between(federation, identity.name)
            self._senders = {between(federation, identity.name, name): name for name in peers}
        elif to is None:
            self._ways = {None: subject(federation, "up", identity.name)}
            self._listens = subject(federation, "down", identity.name)
            self._senders = {self._listens: ""}
        else:
            self._ways = {name: subject(federation, "down", name) for name in to}
            self._listens = subject(federation, "up")
            self._senders = {subject(federation, "up", name): name for name in to}
        self._assemblies = {name: Assembly(largest) for name in self._senders.values()}
        self._letters: deque[tuple[str, bytes]] = deque()
        self._turns = {way: asyncio.Lock() for way in self._ways.values()}
        self._begin()

    def send(self, to: str | None, letter: bytes) -> None:
        """Hand a letter to the broker; `to`: a party, or None for the coordinator. It returns when the broker has it.

        That is no promise that it arrives: a receiver who is not there, or loses its connection, misses it. A letter
        that broke off with the connection begins anew when there is one, and is still delivered once. Without a
        broker for `patience` seconds it is an error, and the letter is not kept: send it again later.
        """
        if to not in self._ways:
            known = ", ".join(str(name) for name in self._ways if name is not None) or "the coordinator, by None"
            raise BadValue(f"no letters go from here to {excerpt(str(to))}, but to {known}")
        if len(letter) > self._largest:
            raise BadValue(f"a letter has {self._largest:,} bytes at most; not {len(letter):,}")
        self._await(self._deliver(self._ways[to], bytes(letter)))

    def receive(self, timeout: float) -> tuple[str, bytes] | None:
        """Who sent, by the subject that it came on, and the letter; None: nothing came in time.

        The coordinator, who is the only one to write to a party, has the empty name.
        """
        with self._arrived:
            self._arrived.wait_for(lambda: self._letters or self._fault, timeout)
            if self._letters:
                return self._letters.popleft()
        self._check()
        return None

    def close(self) -> None:
        """Log off. Letters that came and were not received are lost."""
        super().close()
        self._letters.clear()

    @property
    def dropped(self) -> int:
        """How much came and was not taken: pieces that were none or of nobody known, letters that were given up."""
        return self._strays + sum(each.dropped for each in self._assemblies.values())

    def _doubt(self) -> str:
        return f"Is {self.federation!r} the federation that it is for, and is this the party or the coordinator?"

    async def _greet(self, client: Any) -> None:
        await client.subscribe(self._listens, cb=self._heard(client))

    def _heard(self, client: Any) -> Callable[[Any], Any]:
        async def heard(message: Any) -> None:
            client._pings_outstanding = 0  # a pong may be waiting behind what is coming
            self.received_bytes += len(message.data)
            sender = self._senders.get(message.subject)
            if sender is None:
                self._strays += 1
                return
            now = time.monotonic()
            for each in self._assemblies.values():
                each.give_up(now)
            letter = self._assemblies[sender].take(message.data, now)
            if letter is None:
                return
            with self._arrived:
                waiting = [len(each) for name, each in self._letters if name == sender]
                if waiting and (len(waiting) >= WAITING or sum(waiting) + len(letter) > self._largest):
                    self._strays += 1
                    return
                self._letters.append((sender, letter))
                self._arrived.notify()

        return heard

    async def _deliver(self, way: str, letter: bytes) -> None:
        async with self._turns[way]:  # one after the other: a receiver puts only a few together at a time
            await self._deliver_now(way, letter)

    async def _deliver_now(self, way: str, letter: bytes) -> None:
        number = os.urandom(16)
        for _ in range(TRIES):
            with contextlib.suppress(Broken):
                return await self._attempt(
                    lambda client: self._hand_over(client, way, letter, number), "The letter was not sent"
                )
        raise Away(
            f"The letter was not sent: {TRIES} times the connection to {self.address} broke in the middle of it."
        )

    async def _hand_over(self, client: Any, way: str, letter: bytes, number: bytes) -> None:
        for piece in pieces(letter, number):
            await client.publish(way, piece)
            self.sent_bytes += len(piece)
        await client.flush(600)
        for error in client.errors:
            if "permissions violation" in str(error):
                raise TacitError(self._explained(error)[0])


def _tls(address: str, ca: Path | None, plain: bool) -> ssl.SSLContext | None:
    """How the broker is verified; None: not at all, which is only for who said `plain`."""
    try:
        parts = urlsplit(address)
        fine = parts.scheme in ("tls", "nats") and parts.hostname and parts.port and parts.netloc.count("@") == 0
        fine = fine and address == f"{parts.scheme}://{parts.netloc}"
    except ValueError:
        fine = False
    if not fine:
        raise BadValue(f"a broker's address is such as tls://broker.example.org:4222; not {excerpt(address)}")
    if parts.scheme == "nats":
        if not plain:
            raise TacitError(
                f"{address} is without TLS: whoever sees the network reads all letters, and can change them. Use "
                "tls://; or, on one machine or where the network itself is encrypted, say that it shall be plain."
            )
        return None
    if ca is None:
        raise TacitError(f"{address} needs the broker's ca.pem, to know it by. Get it from whoever runs the broker.")
    if not Path(ca).is_file():
        raise TacitError(
            f"{ca}: there is no such file. It is the broker's ca.pem: get it from whoever runs the broker."
        )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # which checks host names, and trusts nobody yet
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        context.load_verify_locations(cafile=ca)
    except ssl.SSLError:
        raise TacitError(f"{ca}: is no certificate in PEM. Get ca.pem from whoever runs the broker.") from None
    return context


def _no_eof(record: logging.LogRecord) -> bool:
    """Leave out what asyncio warns of whenever a connection that the library made over TLS ends; it means nothing."""
    return not record.getMessage().startswith("returning true from eof_received()")


def _is_refusal(error: Any) -> bool:
    text = str(error).lower()
    return any(words in text for words in ("authorization", "authentication revoked", "authentication expired"))


async def _hang_up(client: Any) -> None:
    """Close a connection, whatever state it is in."""
    if client._reading_task is not None:  # without, there is only the socket: closing waits for what never comes
        try:
            async with asyncio.timeout(2):
                await client.close()
        except Exception as error:  # noqa: BLE001 - it is gone in any case
            LOG.debug("nats: %r", error)
    writer = getattr(client._transport, "_io_writer", None)
    if writer is not None:
        writer.transport.abort()
