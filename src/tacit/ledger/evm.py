"""A ledger's log on a chain: records are calldata of signed transactions to an address that follows from the genesis.

Any chain will do that speaks Ethereum's JSON-RPC. A transaction holds pairs of a record's address and its bytes,
several if they are added at once; it stands whole or not at all. The bytes are there too, and not the addresses alone:
an address whose record nobody gives would stop every reader, and on a public chain anybody may send one.

The newest blocks of a chain may be replaced by others. A record counts when so many blocks, `confirmations`, lie on top
of its own; nothing is told of it before. What was read is kept in a file with the hash of its block, which stands for
all blocks before it. If that block is there no more the reader goes back to the last one that is, and reads again.

Who pays for a transaction says nothing about who wrote a record: the account's key is another one than the provider's.
A node is believed the order of records, and nothing about them: each is verified by who reads it.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import secrets
import sqlite3
import stat
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tacit.errors import BadInput, BadValue, Refused, TacitError, excerpt
from tacit.federation.keys import write_new
from tacit.federation.letters import Away
from tacit.ledger.cbor import CID, DAG_CBOR, decode, encode
from tacit.ledger.log import Entry

LOG = logging.getLogger(__name__)
SCHEME = "evm:"
MARK = b"tac\x01"
"""What calldata begins with that holds records."""
MOST = 120_000
"""Bytes of calldata: nodes take transactions of 128 KiB."""
PAGE = 32
"""Blocks that are asked for at a time."""
CONFIRMATIONS = 12
MOST_FEE, GWEI = 200.0, 10**9
"""Gwei for a unit of gas, at most; and how many of a chain's smallest coins one is."""
PATIENCE, SETTLED = 20.0, 900.0
"""Seconds to wait for a node that is away, and for a transaction to be deep enough."""
PAUSE = 0.25
"""Seconds between two looks at a chain."""
ANSWER = 30.0
"""Seconds that a node has for an answer."""
AGAIN = 20
"""How often a chain is read again that changes while it is read."""
FURTHER = 5
"""Blocks to wait for the receipt of a transaction whose number was taken: another server may have it already."""
WRITING = ("eth_sendRawTransaction", "eth_estimateGas")
"""What a node may decline for good; whatever else it cannot answer now it can later."""
NO_METHOD, BUSY = -32601, -32005
"""Codes of errors: the node does not know what it was asked; it was asked too much."""
ORDER = 0xFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFEBAAEDCE6AF48A03BBFD25E8CD0364141
"""Private keys of chains are numbers below this one, the order of the curve secp256k1."""
FILE, FILE_VERSION = 0x7AC17107, 1
"""What SQLite's header says of the file of what was read."""
TABLES = (
    "CREATE TABLE IF NOT EXISTS blocks (number INTEGER PRIMARY KEY, hash TEXT NOT NULL)",
    "CREATE TABLE IF NOT EXISTS entries (position INTEGER PRIMARY KEY, block INTEGER NOT NULL, sent TEXT NOT NULL, "
    "name TEXT NOT NULL, data BLOB NOT NULL)",
)


def split_place(place: str, *, plain: bool = False) -> tuple[str, int]:
    """Where a log is, such as evm:https://rpc.example.org#1200: the node's address, and the block to begin at."""
    url, _, block = place.removeprefix(SCHEME).partition("#")
    try:
        parts = urlsplit(url)
        whole = bool(parts.hostname) and parts.scheme in ("http", "https") and parts.port != 0
    except ValueError:
        whole = False
    if not place.startswith(SCHEME) or not whole or not re.fullmatch(r"[0-9]{0,15}", block):
        raise BadValue(
            "a log on a chain is such as evm:https://rpc.example.org#1200, with a node's address and the block that "
            f"the ledger begins at; not {excerpt(place)}"
        )
    local = parts.hostname in ("localhost", "127.0.0.1", "::1")
    if parts.scheme == "http" and not (local or plain):
        raise BadValue(
            f"{_named(url)} is without TLS: whoever is on the way can show another chain. --plain allows it."
        )
    return url, int(block or 0)


def _named(url: str) -> str:
    """A node's address without what may be a secret in it."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.hostname}" + (f":{parts.port}" if parts.port else "")


class Declined(TacitError):
    """What a node answered with an error."""


class Account:
    """Who pays for transactions: a private key of a chain's, in a file of 64 hexadecimal digits."""

    def __init__(self, path: Path):
        self.path = path = Path(path)
        with open(path, "rb") as file:
            mode, data = stat.S_IMODE(os.fstat(file.fileno()).st_mode), file.read(200).strip()
        if not re.fullmatch(rb"(0x)?[0-9a-fA-F]{64}", data):
            raise TacitError(
                f"{path}: is no account of a chain: expected a private key of 64 hexadecimal digits. "
                "tacit ledger account makes one."
            )
        if mode & 0o077:
            raise TacitError(f"{path}: others may read this private key (mode {mode:04o}): chmod 600 {path}")
        if not 0 < int(data, 16) < ORDER:
            raise TacitError(f"{path}: is no private key of a chain: the number is out of range.")
        self._key = _packages()[1].Account.from_key(int(data, 16).to_bytes(32, "big"))
        self.address = str(self._key.address)

    @classmethod
    def new(cls, path: Path) -> Account:
        """Make one; a file that exists is never replaced."""
        write_new(Path(path), f"0x{secrets.token_hex(32)}\n".encode())
        return cls(path)

    def sign(self, transaction: dict[str, Any]) -> tuple[str, str]:
        """The hash of a transaction, and its bytes, both in hexadecimal."""
        signed = self._key.sign_transaction(transaction)
        return "0x" + bytes(signed.hash).hex(), "0x" + bytes(signed.raw_transaction).hex()


def _packages() -> tuple[Any, Any]:
    """web3 and eth_account. One of theirs, py_ecc, lets this process nest 100 times as deep as it did, and then deep
    JSON, which anybody may send, ends it where it should be refused: that is taken back.
    """
    deepest = sys.getrecursionlimit()
    try:
        import eth_account
        import web3
    except ImportError:
        raise TacitError('A ledger on a chain needs the package web3: pip install "tacit-kg[evm]"') from None
    finally:
        sys.setrecursionlimit(deepest)
    return web3, eth_account


class Node:
    """A node of a chain, asked by JSON-RPC. One that is away is awaited for `patience` seconds."""

    def __init__(self, url: str, patience: float = PATIENCE):
        web3, _ = _packages()
        import requests

        self.name, self.patience = _named(url), patience
        self._session = requests.Session()
        self._http = web3.HTTPProvider(url, {"timeout": ANSWER}, self._session, exception_retry_configuration=None)

    def ask(self, method: str, *words: Any) -> Any:
        """What the node answers. What it cannot tell now is asked again; what it does not want to do is `Declined`."""
        return self._persist(lambda: self._answer(method, self._http.make_request(method, list(words))))

    def send(self, raw: str) -> None:
        """Hand over a signed transaction, once: what the answer to a second try says is not told of the first."""
        method = "eth_sendRawTransaction"
        self._persist(lambda: self._answer(method, self._http.make_request(method, [raw])), patience=0)

    def blocks(self, numbers: Sequence[int], *, whole: bool = False) -> list[dict[str, Any] | None]:
        """Blocks by their numbers, with all transactions if they are wanted `whole`. None: it is not there."""
        method = "eth_getBlockByNumber"
        asked = [(method, [hex(number), whole]) for number in numbers]
        if not asked:
            return []

        def several() -> list[Any] | None:
            try:
                with warnings.catch_warnings(action="ignore"):  # an error may have no number; blocks say their own
                    found = self._http.make_batch_request(asked)
            except (AttributeError, TypeError):  # answers that are none cannot be put in order
                raise ValueError from None
            whole = isinstance(found, list) and len(found) == len(asked)
            return [self._answer(method, each) for each in found] if whole else None

        answers: list[Any] | None = self._persist(several)
        if answers is None:  # not every node takes several questions at once
            answers = [self.ask(method, *words) for _, words in asked]
        for block, number in zip(answers, numbers, strict=True):
            if block is not None and (not isinstance(block, dict) or _number(block.get("number")) != number):
                raise Refused(f"{self.name} gave another block than number {number:,}.")
        return answers

    def head(self) -> int:
        """The number of the newest block."""
        return _number(self.ask("eth_blockNumber"))

    def close(self) -> None:
        self._session.close()

    def _answer(self, method: str, found: Any) -> Any:
        if not isinstance(found, dict) or ("result" not in found and "error" not in found):
            raise Refused(f"{self.name}: whoever answers there is no node of a chain.")
        if fault := found.get("error"):
            code, told = (fault.get("code"), fault.get("message")) if isinstance(fault, dict) else (None, fault)
            words = f"{self.name} refuses {method}: {excerpt(str(told))[1:-1]}."
            for_good = code == NO_METHOD or (method in WRITING and code != BUSY)
            raise Declined(words) if for_good else Away(words)
        return found.get("result")

    def _persist(self, act: Callable[[], Any], patience: float | None = None) -> Any:
        from requests.exceptions import RequestException

        until = time.monotonic() + (self.patience if patience is None else patience)
        while True:
            try:
                return act()
            except Away as error:
                why = error
            except (ValueError, RecursionError) as error:  # JSON that is none; some of the kinds below are such, too
                if not isinstance(error, RequestException):
                    raise Refused(f"{self.name}: whoever answers there is no node of a chain.") from None
                why = self._unreached(error)
            except (RequestException, OSError) as error:
                why = self._unreached(error)
            if time.monotonic() > until:
                raise why from None
            time.sleep(PAUSE)

    def _unreached(self, error: Exception) -> Away:
        kind = type(error).__name__  # its words would show the whole address, with what may be a secret in it
        return Away(f"The chain was not reached: {self.name} does not answer ({kind}).")


def _number(text: Any) -> int:
    if not isinstance(text, str) or not re.fullmatch(r"0x[0-9a-fA-F]{1,16}", text):
        raise Refused(f"a node of a chain gave {excerpt(repr(text))}, which is no number.")
    return int(text, 16)


def log_address(genesis: CID) -> str:
    """Where the transactions of a ledger go. Nobody has a key to it."""
    return "0x" + hashlib.sha256(b"tacit.ledger/evm\0" + genesis).digest()[:20].hex()


def calldata(entries: Sequence[tuple[str, bytes]]) -> bytes:
    """What a transaction says."""
    return MARK + encode([[CID.parse(name), data] for name, data in entries])


def entries_of(data: bytes) -> list[tuple[str, bytes]]:
    """What `calldata` wrote; nothing, if it is something else: anybody may send anything to an address."""
    if not data.startswith(MARK):
        return []
    try:
        found = decode(data[len(MARK) :])
    except TacitError:
        return []
    if not isinstance(found, list) or not all(
        isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], CID) and type(pair[1]) is bytes
        for pair in found
    ):
        return []
    return [(str(cid), content) for cid, content in found]


@dataclass(frozen=True)
class Receipt:
    """What adding to the log took: the transaction, its block, gas, and bytes of calldata."""

    transaction: str
    block: int
    gas: int
    size: int


class EvmLog:
    """A log on a chain.

    Parameters
    ----------
    place
        The node and the block to begin at: evm:https://rpc.example.org#1200.
    genesis
        The ledger's address; None: it is told by `begin`.
    account
        Who pays for what is added, or the file of it, which is read when something is; None: nothing can be added.
    confirmations
        How many blocks have to lie on top of a record's.
    most_fee
        Gwei that a unit of gas may cost; what a node asks beyond it is not paid.
    chain
        The chain's number, if it is known: a node of another one is refused.
    plain, patience, settled
        Whether TLS may be missing. Seconds to wait for the node, and for a transaction to be deep enough.
    """

    def __init__(
        self,
        place: str,
        genesis: CID | None = None,
        *,
        account: Account | Path | None = None,
        confirmations: int = CONFIRMATIONS,
        most_fee: float = MOST_FEE,
        chain: int | None = None,
        plain: bool = False,
        patience: float = PATIENCE,
        settled: float = SETTLED,
    ):
        if not 0 <= confirmations <= 10_000:
            raise BadValue(f"confirmations are from 0 to 10,000 blocks; not {confirmations:,}")
        if not 0 < most_fee <= 1e9:
            raise BadValue(f"the most that a unit of gas may cost is above 0 gwei, and at most 1e9; not {most_fee:g}")
        self.url, self.start = split_place(place, plain=plain)
        self.plain, self.most_fee = plain, most_fee
        self.genesis, self.confirmations, self.settled = genesis, confirmations, settled
        self._account = account
        self.node = Node(self.url, patience)
        self.chain = _number(self.node.ask("eth_chainId"))
        if chain is not None and chain != self.chain:
            raise Refused(f"{self.node.name} is a node of the chain {self.chain}, where the ledger is on {chain}.")
        self.receipts: list[Receipt] = []
        self._told: list[str] = []  # names of what was given out, and the last block then
        self._told_at: tuple[int, str] | None = None
        self._lock = threading.RLock()
        self._path: Path | None = None
        self._base = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        self._prepare()

    @property
    def account(self) -> Account | None:
        if isinstance(self._account, Path):
            try:
                self._account = Account(self._account)
            except FileNotFoundError:
                raise TacitError(
                    f"{self._account}: the account that pays is not there: put it back, or say where it is: account in "
                    "ledger.json."
                ) from None
        return self._account

    @property
    def address(self) -> str:
        """Where it is, for its owner alone: what is behind the host's name may be a secret that the owner pays for."""
        return f"{SCHEME}{self.url}#{self.start}"

    @property
    def place(self) -> str:
        """Where it is, as anybody may be told."""
        return f"{SCHEME}{self.node.name}#{self.start}"

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """One at a time; what is wrong with the file of what was read is said with what to do about it."""
        try:
            with self._lock:
                yield
        except sqlite3.ProgrammingError:
            raise
        except sqlite3.DatabaseError as error:
            code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF
            if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                raise Away(f"{self._path}: another process holds it ({error}). Try again.") from None
            if code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_IOERR):
                raise TacitError(f"{self._path}: cannot be written ({error}): see that there is room for it.") from None
            raise BadInput(f"{self._path}: is damaged ({error}): delete it, and the chain is read again.") from None

    def keep(self, path: Path) -> None:
        """Keep what is read in this file, and go on with what it holds."""
        self._path = path
        with self._lock:
            self._base.close()
            try:
                self._base = sqlite3.connect(path, timeout=30, isolation_level=None, check_same_thread=False)
                self._prepare()
            except sqlite3.OperationalError as error:
                LOG.info("%s: cannot be written to (%s): the chain is read anew each time", path, error)
                self._base = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
                self._prepare()
            except sqlite3.DatabaseError as error:
                raise BadInput(f"{path}: is not what was read of a chain ({error}): delete it.") from None

    def _prepare(self) -> None:
        for words in TABLES:
            self._base.execute(words)
        [mark] = self._base.execute("PRAGMA application_id").fetchone()
        if mark not in (0, FILE):
            raise sqlite3.DatabaseError("another kind of file")
        self._base.execute(f"PRAGMA application_id = {FILE}")
        self._base.execute(f"PRAGMA user_version = {FILE_VERSION}")

    def close(self) -> None:
        self._base.close()
        self.node.close()

    # -- reading -------------------------------------------------------------------------------------------------------

    def read(self, start: int = 0) -> Iterator[Entry]:
        with self._reading():
            self._scan()
            self._check_told()
            words = "SELECT position, name, data FROM entries WHERE position >= ? ORDER BY position"
            found = [Entry(*each) for each in self._base.execute(words, (start,))]
            if start <= len(self._told):
                self._told[start:] = [each.name for each in found]
            self._told_at = self._last()
        yield from found

    def _check_told(self) -> None:
        """Refuse to go on if something was given out that is there no more."""
        if self._told_at is not None:
            there = self._base.execute("SELECT number, hash FROM blocks WHERE number = ?", self._told_at[:1]).fetchone()
            if there == self._told_at:  # it stands for all that was before
                return
        words = "SELECT name FROM entries ORDER BY position LIMIT ?"
        now = [name for [name] in self._base.execute(words, (len(self._told),))]
        for at, name in enumerate(self._told):
            if now[at : at + 1] != [name]:
                raise Refused(
                    f"{self.node.name}: record {at} ({name}) was read, and is there no more: history was rewritten. "
                    f"The chain replaced more than {self.confirmations} blocks: wait, or read it with more "
                    "confirmations."
                )

    def _last(self, most: int = 1 << 62) -> tuple[int, str] | None:
        """The last block that was read, up to this number, and its hash."""
        words = "SELECT number, hash FROM blocks WHERE number <= ? ORDER BY number DESC LIMIT 1"
        found = self._base.execute(words, (most,)).fetchone()
        return None if found is None else (int(found[0]), str(found[1]))

    def _scan(self) -> None:
        """Read all blocks that are deep enough and were not read before."""
        for _ in range(AGAIN):
            head = self.node.head()
            last = self._last()
            if last is not None and not self._stands(head, last[0]):
                continue
            if self._advance(last, head - self.confirmations):
                return
            time.sleep(PAUSE)  # or another of the node's servers answered, which is behind
        raise Away(f"{self.node.name}: the chain changes while it is read. Try again.")

    def _stands(self, head: int, number: int) -> bool:
        """Whether the last block that was read is there; if not, this goes back to one that is."""
        until = time.monotonic() + self.node.patience
        while head < number and time.monotonic() < until:
            time.sleep(PAUSE)
            head = self.node.head()
        back, replaced = self.start - 1, False
        known = self._last(head)
        while known is not None:
            [block] = self.node.blocks([known[0]])
            if block is not None and block.get("hash") == known[1]:
                back = known[0]
                break
            replaced = True
            known = self._last(known[0] - 1)
        if back == number:
            return True
        if head < number and not replaced:
            raise Away(
                f"{self.node.name} is at block {head:,}, where {number:,} was read before: it is behind, or lost "
                "blocks. Try again, or ask another node."
            )
        with self._writing():
            self._base.execute("DELETE FROM blocks WHERE number > ?", (back,))
            self._base.execute("DELETE FROM entries WHERE block > ?", (back,))
        return False

    def _advance(self, last: tuple[int, str] | None, end: int) -> bool:
        """Read on up to a block; False: the chain became another meanwhile."""
        number, before = last or (self.start - 1, None)
        while number < end:
            numbers = range(number + 1, min(number + PAGE, end) + 1)
            blocks = self.node.blocks(numbers, whole=True)
            found: list[tuple[int, str, str, bytes]] = []
            marks: dict[int, str] = {}
            for at, block in zip(numbers, blocks, strict=True):
                if block is None or (before is not None and block.get("parentHash") != before):
                    return False
                before = str(block.get("hash"))
                held = [(at, *each) for each in self._held(block)]
                found += held
                if held or at == numbers[-1]:
                    marks[at] = before
            with self._writing():
                if self._last() != last:
                    return False  # another process read on
                self._add(found)
                self._base.executemany("INSERT INTO blocks VALUES (?, ?)", marks.items())
            number, last = numbers[-1], (numbers[-1], marks[numbers[-1]])
        return True

    def _held(self, block: dict[str, Any]) -> Iterator[tuple[str, str, bytes]]:
        """The records in a block: transaction, name, bytes."""
        to = self._to()
        for each in block.get("transactions") or ():
            if isinstance(each, dict) and str(each.get("to")).lower() == to:
                try:
                    data = bytes.fromhex(str(each.get("input", each.get("data", ""))).removeprefix("0x"))
                except ValueError:
                    raise Refused(f"{self.node.name} gave a transaction that is none.") from None
                for name, content in entries_of(data):
                    yield str(each.get("hash")).lower(), name, content

    def _add(self, found: list[tuple[int, str, str, bytes]]) -> None:
        """Entries behind those that are there. Nothing counts before the genesis."""
        [end] = self._base.execute("SELECT COALESCE(MAX(position) + 1, 0) FROM entries").fetchone()
        for block, sent, name, data in found:
            if end == 0 and name != str(self.genesis):
                continue
            self._base.execute("INSERT INTO entries VALUES (?, ?, ?, ?, ?)", (end, block, sent, name, data))
            end += 1

    def _to(self) -> str:
        if self.genesis is None:
            raise TacitError(f"No ledger was begun at {self.node.name} yet.")
        return log_address(self.genesis)

    def _writing(self) -> _Transaction:
        return _Transaction(self._base)

    # -- adding --------------------------------------------------------------------------------------------------------

    def begin(self, name: str, data: bytes) -> None:
        """Add the genesis, which says where all else goes."""
        self.genesis, self.start = CID.parse(name), self.node.head()
        self._append([(name, data)])
        # A block that is replaced may come earlier the second time; nothing counts before the genesis.
        self.start = max(0, self.receipts[-1].block - self.confirmations)

    def append(self, entries: Sequence[tuple[str, bytes]]) -> int:
        if not entries:
            with self._reading():
                self._scan()
                [end] = self._base.execute("SELECT COALESCE(MAX(position) + 1, 0) FROM entries").fetchone()
            return int(end)
        return self._append(entries)

    def _append(self, entries: Sequence[tuple[str, bytes]]) -> int:
        for name, data in entries:
            if not isinstance(data, bytes):
                raise BadValue(f"a log keeps bytes; not {excerpt(repr(data))}")
            if name != str(CID.of(data, DAG_CBOR)):
                raise BadValue(f"on a chain a record stands under its address; not {excerpt(name)}")
        content = calldata(entries)
        if len(content) > MOST:
            raise BadValue(f"{MOST:,} bytes can be added at once to a chain; not {len(content):,}")
        if self.account is None:
            raise TacitError("Adding to a chain costs gas: say which account pays, by --account.")
        until = time.monotonic() + self.settled
        with self._reading():
            self.receipts.append(self._settled(self.account, content, until))
            return self._position(self.receipts[-1].transaction, until)

    def _settled(self, account: Account, content: bytes, until: float) -> Receipt:
        """Send a transaction, and see to it that it stands deep enough; again if a chain loses it.

        A node may be many servers, some of them behind others. So a transaction that one of them may have taken is
        signed anew, which would add the record twice, only if it cannot stand any more: the account's number that it
        has is used up, and for some blocks after that was seen nobody has shown a receipt of it.
        """
        signed = [self._signed(account, content)]
        taken, used_up, said = False, None, ""
        while time.monotonic() < until:
            try:
                found = next((each for one in signed if (each := self._receipt(one.sent)) is not None), None)
                if found is not None:
                    used_up, block = None, _number(found["blockNumber"])
                    if self.node.head() - block >= self.confirmations:
                        sent = str(found["transactionHash"]).lower()
                        return Receipt(sent, block, _number(found["gasUsed"]), len(content))
                elif (refused := self._refusal(signed[-1])) is None:
                    taken, said = True, ""
                else:
                    said, told = f" The node said last: {refused}", str(refused).lower()
                    if ("nonce" in told and "low" in told) or "replacement" in told:
                        if taken and used_up is None and self._used(account) > signed[-1].number:
                            used_up = self.node.head()
                        if not taken or (used_up is not None and self.node.head() - used_up >= FURTHER):
                            signed.append(self._signed(account, content, signed[-1].number + 1))
                            taken, used_up = False, None
                    elif not taken and "insufficient funds" in told:
                        raise TacitError(f"The account {account.address} cannot pay for it: {refused}")
                    elif any(word in told for word in ("already", "known", "imported")):
                        taken = True
                    elif not taken:
                        raise refused
            except Away as error:
                said = f" The node said last: {error}"
            time.sleep(PAUSE)
        raise Away(
            f"The record may not have been added: the transaction {signed[-1].sent} is not {self.confirmations} blocks "
            f"deep after {self.settled:g} seconds. Look for it on the chain before you try again.{said}"
        )

    def _refusal(self, signed: _Signed) -> Declined | None:
        """Send a transaction; why the node does not take it. Without an answer it may have been taken."""
        try:
            with suppress(Away):
                self.node.send(signed.raw)
        except Declined as error:
            return error
        return None

    def _position(self, sent: str, until: float) -> int:
        """Where the first record of a transaction stands that is deep enough. Another server may not know of it yet."""
        while True:
            with suppress(Away):
                self._scan()
            [first] = self._base.execute("SELECT MIN(position) FROM entries WHERE sent = ?", (sent,)).fetchone()
            if first is not None:
                return int(first)
            if time.monotonic() > until:
                raise Refused(f"{self.node.name} does not show the transaction {sent} that it confirmed.")
            time.sleep(PAUSE)

    def _used(self, account: Account, at: str = "latest") -> int:
        """How many transactions an account has made, and so the number of its next one."""
        return _number(self.node.ask("eth_getTransactionCount", account.address, at))

    def _receipt(self, sent: str) -> dict[str, Any] | None:
        """Of a transaction that stands in a block; None: it does not, or no more."""
        found = self.node.ask("eth_getTransactionReceipt", sent)
        if not isinstance(found, dict) or found.get("blockNumber") is None:
            return None
        [block] = self.node.blocks([_number(found["blockNumber"])])
        return found if block is not None and block.get("hash") == found.get("blockHash") else None

    def _signed(self, account: Account, content: bytes, least: int = 0) -> _Signed:
        """A transaction, with the account's next number, or a higher one."""
        mine, data = account.address, "0x" + content.hex()
        to = _packages()[0].Web3.to_checksum_address(self._to())
        block = self.node.ask("eth_getBlockByNumber", "latest", False)
        price = _number(self.node.ask("eth_gasPrice"))
        asked = {"from": mine, "to": to, "data": data, "value": "0x0"}
        try:
            gas = _number(self.node.ask("eth_estimateGas", asked))
        except Declined as error:
            if "funds" in str(error).lower():
                raise TacitError(f"The account {mine} cannot pay for it: {error}") from None
            raise
        fields: dict[str, Any] = {
            "to": to, "value": 0, "data": data, "gas": gas + gas // 5, "chainId": self.chain,
            "nonce": max(least, self._used(account, "pending")),
        }  # fmt: skip
        base, most = 0, int(self.most_fee * GWEI)
        if isinstance(block, dict) and block.get("baseFeePerGas") is not None:
            base = _number(block["baseFeePerGas"])
        if (asked_for := max(base, price)) > most:
            raise Away(
                f"{self.node.name} asks {asked_for / GWEI:,.6g} gwei for a unit of gas, where {self.most_fee:,.6g} are "
                "the most that you pay (--most-fee). Nothing was sent. Wait until it costs less; or, if others say the "
                "same of that chain, allow more: most_fee in ledger.json."
            )
        if base:  # more than it costs now, as far as that may go: the chain takes no more than it costs then
            tip = max(0, price - base)
            fields |= {"maxFeePerGas": min(3 * base + tip, most), "maxPriorityFeePerGas": tip}
        else:
            fields |= {"gasPrice": min(price + price // 5, most)}
        return _Signed(*account.sign(fields), fields["nonce"])


@dataclass(frozen=True)
class _Signed:
    """A transaction as it is sent: its hash, its bytes in hexadecimal, and which of its account's it is."""

    sent: str
    raw: str
    number: int


class _Transaction:
    """Of a file: all of what is done meanwhile, or nothing."""

    def __init__(self, base: sqlite3.Connection):
        self._base = base

    def __enter__(self) -> None:
        self._base.execute("BEGIN IMMEDIATE")

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        try:
            if kind is None:
                self._base.execute("COMMIT")
        finally:
            if self._base.in_transaction:
                self._base.execute("ROLLBACK")
