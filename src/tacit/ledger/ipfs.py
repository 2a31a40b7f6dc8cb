"""Weights at peers that speak IPFS's protocol: blocks by their addresses, over libp2p and bitswap 1.2.

Each peer keeps blocks in its folder and gives them to whoever asks: what is there is public. Nobody is believed
anything: a block is what has its address, and all else that comes is dropped. What was fetched is kept, so that it is
there for others too. Peers are known by their addresses, and no directory is asked for more; any IPFS node that is
reached over TCP may be one, such as Kubo or Helia.

libp2p runs in a thread of its own, and is only loaded when something has to be fetched or given.
"""

from __future__ import annotations

import ipaddress
import logging
import re
import secrets
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from tacit.errors import BadInput, BadValue, Refused, TacitError, excerpt
from tacit.federation.keys import write_new
from tacit.folders import write_whole
from tacit.ledger.blobs import BlobFolder, Withheld
from tacit.ledger.cbor import CID, RAW
from tacit.ledger.unixfs import (
    LARGEST_BLOCK,
    LEAF,
    WIDTH,
    Child,
    address_of,
    blocks_of,
    children_of,
    decode_node,
    span,
    varint,
)

LOG = logging.getLogger(__name__)
T = TypeVar("T")
SCHEME = "ipfs:"
PROTOCOL = "/ipfs/bitswap/1.2.0"
BLOCKS, PEERS, KEY = "blobs", "peers", "peer.key"
HOST = re.compile(r"[0-9A-Za-z.:-]{1,253}")
PEER = re.compile(rf"/(ip4|ip6|dns|dns4|dns6)/{HOST.pattern}/tcp/[0-9]{{1,5}}/p2p/[0-9A-Za-z]{{20,80}}")
"""The address of a peer, as IPFS writes it."""
WAIT = 30.0
"""Seconds that a peer has for a block."""
DIAL = 10.0
"""Seconds to reach a peer."""
AT_ONCE = 8
"""Blocks that are asked for before the first has come."""
MESSAGE, PACKED = 4 << 20, 1 << 20
"""Bytes of a message, at most; and about how many are sent in one."""
ENTRIES = 4096
"""Blocks that may be asked for in one message."""
WAITING, LONGEST = 512, 128
"""Blocks that a peer may be waiting for: what it asks for beyond these is not heard; and bytes of such an address."""
ANSWERS = 16
"""Answers that are made and sent at a time: so many messages are in memory."""
STREAMS = 16
"""Streams of one peer that are heard at a time."""
HELD, LITTLE = 64 << 20, 16 << 10
"""Bytes that all unfinished messages together may have; and so many are heard of a stream whatever others hold."""
GRACE, SLOWEST = 10.0, 1 << 17
"""Seconds that a message may take to be sent, and one more for so many bytes: who takes, or gives, less is left."""
FORGETS = 30.0
"""Seconds between two looks for peers that are gone."""


def split_peers(text: str) -> list[str]:
    """Peers' addresses, as --blobs names them: ipfs: and what follows, with commas between."""
    return [check_peer(each) for each in text.removeprefix(SCHEME).split(",") if each]


def check_peer(address: str) -> str:
    if not PEER.fullmatch(address):
        raise BadValue(
            f"the address of a peer is such as /ip4/192.0.2.7/tcp/4001/p2p/12D3Koo...; not {excerpt(address)}"
        )
    return address


class Swarm:
    """Weights at peers, and in this peer's own folder.

    Parameters
    ----------
    peers
        Addresses of others.
    wait
        Seconds that each of them has for a block.
    """

    def __init__(self, peers: Sequence[str] = (), *, wait: float = WAIT):
        self.peers, self.wait = list(dict.fromkeys(map(check_peer, peers))), wait
        self._folder: Path | None = None
        self._peer: Peer | None = None

    def keep(self, folder: Path) -> None:
        """Where this peer's blocks are, its key, and the addresses of others, one a line."""
        self._folder = Path(folder)
        self._known()

    def _known(self) -> list[str]:
        """The addresses of others: a line may be added to the file at any time."""
        try:
            lines = (self._home / PEERS).read_text(encoding="utf-8").split("\n")
        except FileNotFoundError:
            return self.peers
        except ValueError:
            raise BadInput(
                f"{self._home / PEERS}: is no text (UTF-8): write the address of a peer into each line, or empty it."
            ) from None
        found = [check_peer(line) for each in lines if (line := each.strip()) and not line.startswith("#")]
        return list(dict.fromkeys([*found, *self.peers]))

    def remember(self, draft: Path) -> None:
        """What belongs to a new folder."""
        self.keep(draft)
        (draft / BLOCKS).mkdir(exist_ok=True)  # no key yet: that is made by who listens
        write_whole(draft / PEERS, "".join(f"{each}\n" for each in self.peers).encode(), mode=0o644)

    @property
    def store(self) -> BlobFolder:
        return BlobFolder(self._home / BLOCKS)

    @property
    def _home(self) -> Path:
        if self._folder is None:
            raise TacitError("this peer has no folder yet")
        return self._folder

    def listen(self, host: str = "127.0.0.1", port: int = 0, names: Sequence[str] = ()) -> list[str]:
        """Give blocks to whoever asks; the addresses at which this peer is reached, by `names` if it has some."""
        if self._peer is not None and self._peer.addresses:
            raise TacitError("this peer listens already")
        self.close()
        if not names and host in ("0.0.0.0", "::"):
            raise BadValue(f"a peer that listens at {host} needs the names by which others reach it: say --host.")
        for name in names:
            if not HOST.fullmatch(name):
                raise BadValue(f"{excerpt(name)} is no name of a host.")
        wanted = [f"/{_kind(name)}/{name}/" for name in names]
        self._peer = Peer(self._secret(), self._given, (host, port))
        found = self._peer.addresses
        return [each + "/".join(address.split("/")[3:]) for each in wanted for address in found[:1]] or found

    @property
    def traffic(self) -> int:
        """Bytes of messages that were sent and came, since this peer was started."""
        return 0 if self._peer is None else self._peer.sent + self._peer.received

    def close(self) -> None:
        if self._peer is not None:
            self._peer.close()
            self._peer = None

    def _secret(self) -> bytes:
        """The peer's own key, which says nothing about who signs records. It is made when it is needed at first."""
        path = self._home / KEY
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            with suppress(TacitError):  # another process made it
                write_new(path, secrets.token_bytes(32))
        secret = path.read_bytes()
        if len(secret) != 32:
            raise TacitError(f"{path}: is no key of a peer: delete it, and another is made.")
        return secret

    def _given(self, cid: CID) -> bytes | None:
        """A block for somebody else."""
        with suppress(TacitError):
            return self.store.get(cid, LARGEST_BLOCK)
        return None

    # -- weights -------------------------------------------------------------------------------------------------------

    def address(self, data: bytes) -> CID:
        return address_of(data)

    def put(self, data: bytes) -> CID:
        store = self.store
        for cid, block in blocks_of(data):  # the last is the whole, so what is found is all there
            store.put(block, cid.codec)
        return cid

    def get(self, cid: CID, largest: int) -> bytes:
        [root] = self._blocks([cid], f"the weights {cid}")
        if cid.codec == RAW:
            if len(root) > largest:
                raise Refused(f"the weights {cid} have more than {largest:,} bytes")
            return root
        with _named(cid):
            size = sum(each.size for each in decode_node(root))
        if size > largest:
            raise Refused(f"the weights {cid} have more than {largest:,} bytes")
        level, blocks, part = [Child(cid, size, 0)], [root], span(size)
        while True:
            below: list[Child] = []
            for each, block in zip(level, blocks, strict=True):
                with _named(each.cid):
                    below += children_of(block, each.size, part)
            level, cids = below, [each.cid for each in below]
            # A node has fewer bytes than are below it, but for a last one.
            blocks = self._blocks(cids, f"the weights {cid}", size + LARGEST_BLOCK)
            if part == LEAF:
                break
            part //= WIDTH
        for each, leaf in zip(level, blocks, strict=True):
            if len(leaf) != each.size:
                raise Refused(f"the block {each.cid} has another size than the weights {cid} say")
        data = b"".join(blocks)
        if (own := address_of(data)) != cid:
            raise Refused(f"the weights {cid} have another address in the one form of a file: {own}")
        return data

    def _blocks(self, cids: Sequence[CID], what: str, size: int = LARGEST_BLOCK) -> list[bytes]:
        """Blocks, from the folder or from peers. `what` they belong to is said of one that nobody gives.

        Peers have as long as the first few may take, and then as `size` bytes take to who is only just fast enough.
        """
        store, found = self.store, dict[CID, bytes]()
        damaged: dict[CID, Refused] = {}
        for cid in dict.fromkeys(cids):
            try:
                found[cid] = store.get(cid, LARGEST_BLOCK)
            except Withheld:
                continue  # peers are asked for it
            except Refused as error:
                damaged[cid] = error
        missing = [cid for cid in dict.fromkeys(cids) if cid not in found]

        def take(cid: CID, block: bytes) -> None:
            store.put(block, cid.codec)
            found[cid] = block

        if missing and (peers := self._known()):
            if self._peer is None:
                # Another name than that of the peer that may listen for this folder: answers go by names.
                self._peer = Peer(secrets.token_bytes(32), self._given, None)
            within = DIAL + self.wait * len(peers) + size / SLOWEST
            why = self._peer.fetch(missing, peers, self.wait, within, take)
        else:
            why = "no other peers are known"
        for cid in missing:
            if cid in found:
                continue
            if cid in damaged:
                raise damaged[cid]
            which = "" if len(cids) == 1 else f", {cids.index(cid) + 1:,} of {len(cids):,},"
            raise Withheld(f"{what}: the block {cid}{which} did not come: {why}; ask their provider for them.")
        return [found[cid] for cid in cids]


@contextmanager
def _named(cid: CID) -> Iterator[None]:
    """What is refused meanwhile is this block."""
    try:
        yield
    except Refused as error:
        raise Refused(f"the block {cid} {error}") from None


class _Wish:
    """A block that is wanted: what came, and who says not to have it."""

    def __init__(self, changed: Any):
        self.changed = changed
        self.data: bytes | None = None
        self.denied: set[Any] = set()


class Peer:
    """A libp2p host that speaks bitswap, in a thread of its own. Calls block.

    Parameters
    ----------
    secret
        32 bytes from which its key follows.
    give
        The block of an address, or None.
    listen
        Address and port; None: it reaches others, and is not reached.
    """

    def __init__(self, secret: bytes, give: Callable[[CID], bytes | None], listen: tuple[str, int] | None):
        self._load()
        self._give, self._listen, self._secret = give, listen, secret
        self.addresses: list[str] = []
        self.sent = self.received = 0
        """Bytes of messages, both ways."""
        self._ready, self._turn = threading.Event(), threading.Lock()
        self._fault: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="libp2p", daemon=True)
        self._thread.start()
        self._ready.wait()
        if self._fault is not None:
            where = "" if listen is None else f" at {listen[0]}:{listen[1]}"
            raise TacitError(f"This peer could not start{where}: {_reason(self._fault)}.")

    def _load(self) -> None:
        try:
            import libp2p
            import trio
            from libp2p.bitswap.pb.bitswap_pb2 import Message
        except ImportError:
            raise TacitError('Peers of IPFS need the package libp2p: pip install "tacit-kg[ipfs]"') from None
        self._libp2p, self._trio, self._message = libp2p, trio, Message

    def fetch(
        self, cids: Sequence[CID], peers: Sequence[str], wait: float, within: float, take: Callable[[CID, bytes], None]
    ) -> str:
        """Get blocks, and hand each over as it comes. What was in the way of those that did not come, in words.

        `wait`: seconds that each peer has for a block; `within`: that there are for all of them.
        """
        with self._turn:
            return self._call(lambda: self._fetch(cids, peers, wait, within, take))

    def close(self) -> None:
        with suppress(Exception):  # it may have ended by itself
            self._token.run_sync_soon(self._stop.set)
        self._thread.join(10)

    def _call(self, act: Callable[[], Coroutine[Any, Any, T]]) -> T:
        try:
            return self._trio.from_thread.run(act, trio_token=self._token)
        except (self._trio.RunFinishedError, self._trio.Cancelled):
            raise TacitError(f"This peer has ended: {_reason(self._fault)}.") from None

    # -- in the peer's own thread --------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._trio.run(self._live)
        except BaseException as error:  # noqa: BLE001 - whoever waits is told
            self._fault = error
        finally:
            self._ready.set()

    async def _live(self) -> None:
        from libp2p.crypto.ed25519 import create_new_key_pair
        from multiaddr import Multiaddr

        trio = self._trio
        self._token, self._stop = trio.lowlevel.current_trio_token(), trio.Event()
        self._wishes: dict[CID, _Wish] = {}
        self._streams: dict[Any, Any] = {}
        self._locks: dict[Any, Any] = {}
        self._waiting: dict[Any, dict[bytes, tuple[bool, bool]]] = {}
        """Of each peer: what it waits for, whether the word that it is here is enough, whether it is told if not."""
        self._answering = trio.CapacityLimiter(ANSWERS)
        self._heard: dict[Any, int] = {}
        self._held = 0
        where = []
        if self._listen is not None:
            host, port = self._listen
            where = [Multiaddr(f"/ip{6 if ':' in host else 4}/{host}/tcp/{port}")]
        pair = create_new_key_pair(self._secret)
        self._host = self._libp2p.new_host(key_pair=pair, muxer_preference="YAMUX", listen_addrs=where or None)
        self._host.set_stream_handler(PROTOCOL, self._hear)
        async with self._host.run(listen_addrs=where), trio.open_nursery() as nursery:
            self._nursery = nursery
            if where and not self._host.get_addrs():  # libp2p says so in its log alone
                raise TacitError("it cannot listen there; the port may be taken")
            if where:
                # As it says it itself, with the peer's name at the end.
                name = f"/p2p/{self._host.get_id()}"
                self.addresses = [
                    str(each) if str(each).endswith(name) else f"{each}{name}" for each in self._host.get_addrs()
                ]
            self._ready.set()
            while not self._stop.is_set():
                with trio.move_on_after(FORGETS):
                    await self._stop.wait()
                self._forget()
            for peer in self._host.get_connected_peers():  # ending the host leaves them open
                with suppress(Exception), trio.move_on_after(1):
                    await self._host.disconnect(peer)
            nursery.cancel_scope.cancel()

    async def _fetch(
        self, cids: Sequence[CID], peers: Sequence[str], wait: float, within: float, take: Callable[[CID, bytes], None]
    ) -> str:
        trio = self._trio
        reached: list[Any] = []
        faults: list[str] = []

        async def reach(address: str) -> None:
            try:
                with trio.fail_after(DIAL):
                    info = await self._resolved(address)
                    await self._host.connect(info)
                reached.append(info.peer_id)
            except trio.TooSlowError:
                faults.append(f"{address} did not answer in {DIAL:g} seconds")
            except Exception as error:  # noqa: BLE001 - libp2p's errors are many
                faults.append(f"{address} was not reached ({_reason(error)})")

        async with trio.open_nursery() as nursery:
            for address in peers:
                nursery.start_soon(reach, address)
        limit = trio.CapacityLimiter(AT_ONCE)
        missed: list[str] = []

        async def one(cid: CID) -> None:
            async with limit:
                if missed:  # without it the rest is worth nothing
                    return
                found = await self._asked(cid, reached, wait)
                if isinstance(found, str):
                    missed.append(found)
                else:
                    await trio.to_thread.run_sync(take, cid, found)

        with trio.move_on_after(within) as patience:
            async with trio.open_nursery() as nursery:
                for cid in cids:
                    nursery.start_soon(one, cid)
        if patience.cancelled_caught:
            missed.insert(0, f"blocks came so slowly that the rest was not awaited after {within:,.0f} seconds")
        told = f"{len(reached)} of {len(peers)} peers were reached"
        return "; ".join(filter(None, [told, *missed[:1], *faults[:3]]))

    async def _resolved(self, address: str) -> Any:
        """A peer and where it is; names of hosts are looked up as the system does."""
        from libp2p.peer.id import ID
        from libp2p.peer.peerinfo import PeerInfo
        from multiaddr import Multiaddr

        _, kind, host, _, port, _, name = address.split("/")
        where = [(4 if kind == "ip4" else 6, host)]
        if kind.startswith("dns"):
            found = await self._trio.socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
            both = [(4 if family == socket.AF_INET else 6, at[0]) for family, _, _, _, at in found]
            where = [each for each in both if kind == "dns" or each[0] == int(kind[3:])]
        return PeerInfo(ID.from_string(name), [Multiaddr(f"/ip{version}/{at}/tcp/{port}") for version, at in where])

    async def _asked(self, cid: CID, peers: list[Any], wait: float) -> bytes | str:
        """A block, from the first peer that gives it; or why none does. The one that gave the last is asked first."""
        trio = self._trio
        wish = self._wishes[cid] = _Wish(trio.Event())
        try:
            for peer in list(peers):
                with trio.move_on_after(wait):
                    try:
                        await self._say(peer, self._want(cid))
                    except Exception:  # noqa: BLE001 - that peer is gone; another may have it
                        continue
                    while wish.data is None and peer not in wish.denied:
                        wish.changed = trio.Event()
                        await wish.changed.wait()
                # Whoever is not told remembers the wish, and does not heed the same one again.
                with suppress(Exception), trio.move_on_after(1):
                    await self._say(peer, self._want(cid, cancel=True))
                if wish.data is not None:
                    if peers[0] != peer and peer in peers:
                        peers.remove(peer)
                        peers.insert(0, peer)
                    return bytes(wish.data)
            silent = len(peers) - len(wish.denied)
            told = [f"{len(wish.denied)} do not have it"] if wish.denied else []
            return ", ".join(told + ([f"{silent} gave nothing in {wait:g} seconds"] if silent else []))
        finally:
            del self._wishes[cid]

    def _want(self, cid: CID, *, cancel: bool = False) -> Any:
        message = self._message()
        message.wantlist.full = False
        entry = message.wantlist.entries.add()
        entry.block, entry.priority, entry.cancel, entry.sendDontHave = bytes(cid), 1, cancel, not cancel
        return message

    async def _say(self, peer: Any, message: Any) -> None:
        """Send a message on the stream that is kept for it; a stream that broke is opened anew, once."""
        data = message.SerializeToString()
        lock = self._locks.setdefault(peer, self._trio.Lock())
        async with lock:
            for fresh in (False, True):
                stream = None if fresh else self._streams.get(peer)
                try:
                    if stream is None:
                        stream = self._streams[peer] = await self._host.new_stream(peer, [PROTOCOL])
                    await stream.write(varint(len(data)) + data)
                    self.sent += len(data)
                    return
                except BaseException as error:  # what was broken off leaves half a message on the stream
                    self._streams.pop(peer, None)
                    if stream is not None:
                        with suppress(Exception), self._trio.move_on_after(1) as limit:
                            limit.shield = True
                            await stream.reset()
                    if fresh or not isinstance(error, Exception):
                        raise

    async def _hear(self, stream: Any) -> None:
        """Whatever comes on a stream that another peer opened."""
        peer = stream.muxed_conn.peer_id
        self._heard[peer] = self._heard.get(peer, 0) + 1
        try:
            if self._heard[peer] <= STREAMS:
                await self._messages(peer, stream)
        except Exception as error:  # noqa: BLE001 - a peer that goes away, or sends what is no message
            LOG.debug("a peer is heard no more: %s", error)
        finally:
            self._heard[peer] -= 1
            if not self._heard[peer]:
                del self._heard[peer]
        with suppress(Exception):
            await stream.reset()

    async def _messages(self, peer: Any, stream: Any) -> None:
        """Heed one message after the other, until one is too large, or there are too many halves of messages."""
        held = bytearray()
        try:
            while True:
                size, start = _length(held)
                if size is not None and size > MESSAGE + (64 << 10):
                    break
                if size is None or len(held) < start + size:
                    if self._held > HELD and len(held) > LITTLE:
                        break
                    piece = await stream.read(1 << 16)
                    if not piece:
                        break
                    held += piece
                    self._held += len(piece)
                    continue
                message = self._message.FromString(bytes(held[start : start + size]))
                del held[: start + size]
                self._held -= start + size
                self.received += size
                self._heed(peer, message)
        finally:
            self._held -= len(held)

    def _heed(self, peer: Any, message: Any) -> None:
        for block in message.payload:
            prefix = bytes(block.prefix)
            if len(prefix) == 4 and len(block.data) <= LARGEST_BLOCK:
                with suppress(Refused):  # another kind of address, which was not asked for
                    cid = CID.of(block.data, prefix[1])
                    if (wish := self._wishes.get(cid)) is not None:
                        wish.data = block.data
                        wish.changed.set()
        for each in message.blockPresences:
            wish = self._wishes.get(each.cid)
            if wish is not None and each.type == self._message.DontHave:
                wish.denied.add(peer)
                wish.changed.set()
        waiting = self._waiting.get(peer, {})
        for each in message.wantlist.entries[:ENTRIES]:
            if each.cancel:
                waiting.pop(each.block, None)
            elif len(each.block) <= LONGEST and (each.block in waiting or len(waiting) < WAITING):
                word, _ = waiting.get(each.block, (True, True))
                waiting[each.block] = word and each.wantType == self._message.Wantlist.Have, each.sendDontHave
        if waiting and peer not in self._waiting:
            self._waiting[peer] = waiting
            self._nursery.start_soon(self._answer, peer, waiting)

    async def _answer(self, peer: Any, waiting: dict[bytes, tuple[bool, bool]]) -> None:
        """Give what somebody waits for, if it is here, a message after the other; whoever does not take it is left."""
        try:
            while waiting:
                async with self._answering:
                    message = await self._made(waiting)
                    if message.payload or message.blockPresences:
                        with self._trio.fail_after(GRACE + message.ByteSize() / SLOWEST):
                            await self._say(peer, message)
        except Exception as error:  # noqa: BLE001 - whoever asked may be gone
            LOG.debug("a peer is answered no more: %s", error)
            await self._hang_up(peer)
        finally:
            del self._waiting[peer]

    async def _made(self, waiting: dict[bytes, tuple[bool, bool]]) -> Any:
        """An answer to as much of what is waited for as goes into one message."""
        trio, message, size = self._trio, self._message(), 0
        while waiting and size < PACKED:
            cid = next(iter(waiting))
            word, told = waiting.pop(cid)
            block = None
            with suppress(Refused):  # an address of another kind
                block = await trio.to_thread.run_sync(self._give, CID(cid), abandon_on_cancel=True)
            if block is None:
                if told:
                    message.blockPresences.add(cid=cid, type=self._message.DontHave)
            elif word:
                message.blockPresences.add(cid=cid, type=self._message.Have)
            else:
                message.payload.add(prefix=cid[:4], data=block)
                size += len(block)
        return message

    async def _hang_up(self, peer: Any) -> None:
        """End all connections with a peer. A farewell would have to be taken, too."""
        for each in self._host.get_network().get_connections(peer):
            with suppress(Exception), self._trio.move_on_after(1):
                await each.muxed_conn.secured_conn.close()

    def _forget(self) -> None:
        """What is known of peers that are gone."""
        there = set(self._host.get_connected_peers())
        for peer in {*self._streams, *self._locks} - there:
            self._streams.pop(peer, None)
            if not self._locks[peer].locked():
                del self._locks[peer]


def _length(held: bytearray) -> tuple[int | None, int]:
    """How long the next message is, and where it begins; None: that has not come yet."""
    number = 0
    for at, byte in enumerate(held[:5]):
        number |= (byte & 127) << 7 * at
        if byte < 128:
            return number, at + 1
    return (1 << 40, 5) if len(held) >= 5 else (None, 0)


def _kind(host: str) -> str:
    """What a host's name is in the address of a peer."""
    try:
        return f"ip{ipaddress.ip_address(host).version}"
    except ValueError:
        return "dns"


def _reason(error: BaseException | None) -> str:
    """The innermost of libp2p's errors, in words."""
    while error is not None:
        inner = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error.__cause__
        if inner is None:
            break
        error = inner
    if isinstance(error, TacitError):
        return str(error)
    return "it was stopped" if error is None else excerpt(f"{type(error).__name__} {error}".strip())[1:-1]
