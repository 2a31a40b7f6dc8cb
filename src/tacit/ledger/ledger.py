"""A ledger: its log, its weights, and what its reader has verified.

    ledger.json    schema, and the address of the genesis
    log.sqlite     the records, in order
    blobs/         weights by their address
    seen           what this reader found at each place of the log, and whether its signature was right

Of a ledger at a broker, log and weights are there; ledger.json says where, and which key logs in, and beside it lies
the broker's certificate, ca.pem. Of one on a chain the log is there, and chain.sqlite holds what was read of it; of one
among peers, blobs/ holds the blocks that this peer has, `peers` the addresses of others, peer.key its own key.

Everything follows from the log. `seen` only saves time, and notices if what was read once is read no more: a place that
holds another record than it did, or a log that became shorter. `Ledger.verify` takes nothing from it but that.
"""

from __future__ import annotations

import fcntl
import gc
import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from tacit.errors import BadInput, Refused, TacitError, excerpt
from tacit.federation.keys import Identity
from tacit.folders import new_folder, read_json, seal
from tacit.ledger.blobs import BlobFolder, Blobs, Rows, Withheld
from tacit.ledger.cbor import CID, DAG_CBOR
from tacit.ledger.dag import Branch, Dag, Node
from tacit.ledger.log import Entry, Log, SqliteLog
from tacit.ledger.record import Body, Claim, Genesis, Model, Record, Update
from tacit.privacy.events import Segment

if TYPE_CHECKING:
    from tacit.ledger.jetstream import Remote
    from tacit.ledger.public import Public

    Place = Remote | Public

LOG = logging.getLogger(__name__)
SCHEMA = "tacit.ledger-folder/1"
MANIFEST, RECORDS, BLOBS, SEEN, CA = "ledger.json", "log.sqlite", "blobs", "seen", "ca.pem"
LATER = SEEN, "chain.sqlite", "peers", "peer.key", BLOBS
"""What may come to be in a ledger's folder."""
WIDTH = 33
"""Bytes in `seen` of each place: the hash of what stood there, and 1 if it was signed as it says."""
NOTHING = bytes(32)
MOST = 1 << 40
"""Places that a log may have."""


@dataclass(frozen=True)
class Fault:
    """Something that is not as it should be, and is ignored: where, and why."""

    where: str
    reason: str

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}"

    def json(self) -> dict[str, Any]:
        return dict(self.__dict__)


@dataclass(frozen=True)
class News:
    """What was found at a place of the log: a record that stands in the ledger, or what is wrong there."""

    position: int
    found: Record | Fault


@dataclass(eq=False)
class Reading:
    """A log, read so far: its state, and all that was wrong with it."""

    dag: Dag
    faults: list[Fault] = field(default_factory=list)
    end: int = 0
    """Places in the log, those of refused records too."""
    head: bytes = NOTHING
    """A hash over everything in the log, in order: two readers who have the same one have the same ledger."""
    rewritten: bool = False
    """Whether something that was read before is not there any more."""
    tell: Callable[[News], None] | None = None
    """Who is told of each place, as it is read."""

    def take(self, entries: Iterator[Entry], seen: bytes, notes: bytearray) -> None:
        """Read on; `seen`: what was found from here on before. The same of what is found now is added to `notes`."""
        begin = self.end
        for entry in entries:
            if entry.position >= MOST:
                self._wrong(
                    f"record {entry.position}", "stands where no log reaches: reading ends here", rewritten=True
                )
                break
            if entry.position > self.end:
                where = f"records {self.end} to {entry.position - 1}"
                self._wrong(where, "were deleted from the log", rewritten=True)
                self.head = hashlib.sha256(self.head + NOTHING).digest()
                self.end = entry.position
            digest = hashlib.sha256(entry.data).digest()
            self.head = hashlib.sha256(self.head + digest).digest()
            at = WIDTH * (entry.position - begin)
            known = seen[at : at + 32]
            signed = known == digest and seen[at + 32 : at + WIDTH] == b"\1"
            try:
                if known not in (b"", NOTHING, digest):  # nothing but zeros: a disk that lost power had it so
                    self.rewritten = True
                    raise Refused(f"is not what was read here before, {_address(known)}: history was rewritten")
                if entry.name != str(_address(digest)):
                    raise Refused("holds other bytes than it says: it was changed, or is damaged")
                record = self.dag.add(entry.data, verified=signed)
            except TacitError as error:
                self._wrong(f"record {entry.position} ({excerpt(entry.name)[1:-1]})", str(error))
            else:
                signed = True
                if self.tell is not None:
                    self.tell(News(self.end, record))
            notes += digest + (b"\1" if signed else b"\0")
            self.end += 1
        if self.end - begin < (had := len(seen) // WIDTH):
            gone = had - (self.end - begin)
            self._wrong(f"record {self.end}", f"{gone:,} records that were read from here on are gone", rewritten=True)

    def _wrong(self, where: str, reason: str, *, rewritten: bool = False) -> None:
        self.rewritten |= rewritten
        self.faults.append(fault := Fault(where, reason))
        if self.tell is not None:
            self.tell(News(self.end, fault))


def _address(digest: bytes) -> CID:
    """Of a record, by the hash of its bytes."""
    return CID(bytes((1, DAG_CBOR, 0x12, 0x20)) + digest)


@contextmanager
def _closed_if_it_fails(remote: Place | None) -> Iterator[None]:
    """Whoever opens a ledger gives its connection away: if no ledger comes of it, it is closed."""
    try:
        yield
    except BaseException:
        if remote is not None:
            remote.close()
        raise


class Ledger:
    """A ledger that is open: `dag` says what stands in it, `faults` what does not."""

    def __init__(self, folder: Path, genesis: CID, log: Log, blobs: Blobs, remote: Place | None = None):
        self.folder, self.genesis, self.log, self.blobs, self._remote = folder, genesis, log, blobs, remote
        self._reading = Reading(Dag(genesis))

    @classmethod
    def begin(
        cls,
        folder: Path,
        who: Identity,
        genesis: Genesis,
        remote: Place | None = None,
        *,
        replicas: int = 1,
        key: Path | None = None,
    ) -> Ledger:
        """Make a ledger, signed by who begins it: in a folder, or at a broker with the folder for what is read there.

        `replicas`: servers of the broker that keep it. `key`: the file of the key that logs in, to be remembered.
        """
        if genesis.admission == "listed" and who.public not in {key for _, key in genesis.keys}:
            raise TacitError(f"{who.name} begins the ledger and is not admitted to it: list that key too.")
        record = Record.sign(who, genesis)
        with _closed_if_it_fails(remote), new_folder(Path(folder), MANIFEST) as draft:
            if remote is not None:
                remote.make(replicas)
            if remote is not None and remote.log is not None:
                remote.log.begin(str(record.cid), record.data)
            else:
                SqliteLog(draft / RECORDS, create=True).append([(str(record.cid), record.data)])
            if remote is None or remote.blobs is None:
                (draft / BLOBS).mkdir()
            cls._remember(draft, record.cid, remote, key)
        return cls.load(folder, remote=remote)

    @classmethod
    def join(cls, folder: Path, remote: Place, genesis: CID, *, key: Path | None = None) -> Ledger:
        """A folder for what is read of a ledger elsewhere, of which somebody told the address of its genesis."""
        if remote.log is None:
            raise TacitError("a ledger whose log is in a folder is not joined: share the folder.")
        with _closed_if_it_fails(remote), new_folder(Path(folder), MANIFEST) as draft:
            remote.check()
            cls._remember(draft, genesis, remote, key)
            found = cls.load(draft, remote=remote)  # it is what it should be, or there is no folder
        found.folder = Path(folder)
        if isinstance(found.blobs, BlobFolder):
            found.blobs = BlobFolder(found.folder / BLOBS)
        remote.settle(found.folder)
        return found

    @staticmethod
    def _remember(draft: Path, genesis: CID, remote: Place | None, key: Path | None) -> None:
        told = {"genesis": str(genesis)} | ({} if remote is None else remote.remember(draft))
        if "log" in told and key is not None:
            told["key"] = str(key.resolve())
        secret = str(told.get("log", "")).startswith("evm:")  # the address of a node may hold one
        seal(draft, MANIFEST, SCHEMA, told, later=LATER, mode=0o600 if secret else None)

    @classmethod
    def load(
        cls,
        folder: Path,
        genesis: CID | None = None,
        *,
        who: Identity | None = None,
        remote: Place | None = None,
        tell: Callable[[News], None] | None = None,
    ) -> Ledger:
        """Open a ledger and read all of it.

        `genesis`: what its address has to be, as it was told by another way. Of a ledger at a broker: `who` logs in,
        by default whoever did when the folder was made; `remote`: a connection that there is already, which is closed
        with the ledger. `tell` is called with each place that is read, now and later.
        """
        folder = Path(folder)
        manifest = read_manifest(folder)
        found = CID.parse(manifest["genesis"])
        if genesis is not None and found != genesis:
            raise Refused(f"{folder}: is the ledger {found}, not {genesis}.")
        if remote is None and ("log" in manifest or "blobs" in manifest):
            remote = cls._reached(folder, manifest, who)
        with _closed_if_it_fails(remote):
            log: Log | None = None
            blobs: Blobs | None = None
            if remote is not None:
                remote.settle(folder)
                remote.check()
                log, blobs = remote.log, remote.blobs
            ledger = cls(folder, found, log or SqliteLog(folder / RECORDS), blobs or BlobFolder(folder / BLOBS), remote)
            ledger.tell(tell)
            ledger.refresh()
            if ledger.dag.genesis is None:
                raise BadInput(f"{folder}: the log does not hold the genesis {found}.", hint=ledger._first_fault())
        return ledger

    @staticmethod
    def _reached(folder: Path, manifest: dict[str, Any], who: Identity | None) -> Place | None:
        """Where a ledger is, by what its folder says."""
        from tacit.ledger.public import reach

        ca, account = folder / CA, manifest.get("account")
        try:
            log, blobs = manifest.get("log"), manifest.get("blobs")
            more: dict[str, Any] = {}
            for name, kind in (("chain", int), ("confirmations", int), ("most_fee", float)):
                if name in manifest:
                    more[name] = kind(manifest[name])
            return reach(
                None if log is None else str(log), None if blobs is None else str(blobs),
                who=lambda: who or Identity.load(login(folder)), genesis=CID.parse(manifest["genesis"]),
                ca=ca if ca.is_file() else None, plain=manifest.get("plain") is True,
                account=None if account is None else Path(str(account)), **more,
            )  # fmt: skip
        except (ValueError, TypeError) as error:
            raise BadInput(f"{folder / MANIFEST}: does not say where the ledger is: {error}.") from None

    def close(self) -> None:
        """Log off, if it is at a broker, or among peers."""
        if self._remote is not None:
            self._remote.close()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- what it says --------------------------------------------------------------------------------------------------

    @property
    def dag(self) -> Dag:
        return self._reading.dag

    @property
    def faults(self) -> list[Fault]:
        return self._reading.faults

    @property
    def head(self) -> str:
        """A hash over the whole log: whoever has the same one has the same ledger."""
        return self._reading.head.hex()

    @property
    def rewritten(self) -> bool:
        return self._reading.rewritten

    @property
    def place(self) -> str | None:
        """Where its log is; None: in the folder."""
        return None if self._remote is None else self._remote.place

    @property
    def public(self) -> bool:
        """Whether its log or its weights are on a network that nobody owns."""
        return self._remote is not None and self._remote.public

    def __len__(self) -> int:
        """Places in the log, those of refused records too."""
        return self._reading.end

    def rows(self, node: Node) -> Rows:
        """The weights of an update: verified, and checked against its model. Withheld, or refused with the reason."""
        return self._rows(node, self.dag)

    def _rows(self, node: Node, dag: Dag) -> Rows:
        data = self.blobs.get(node.update.weights, node.update.size)
        if len(data) != node.update.size:
            raise Refused(f"the weights {node.update.weights} have {len(data):,} bytes, not {node.update.size:,}")
        try:
            return Rows.of(data, dag.branches[node.update.model].model)
        except Refused as error:
            raise Refused(f"the weights {node.update.weights} {error}") from None

    # -- reading and writing -------------------------------------------------------------------------------------------

    def tell(self, whom: Callable[[News], None] | None) -> None:
        """Who is told of what is read from now on."""
        self._reading.tell = whom

    def refresh(self) -> None:
        """Read what was added since."""
        begin = self._reading.end
        seen = self._seen(begin)
        notes = bytearray()
        try:
            with _uncollected():
                self._reading.take(self.log.read(begin), seen, notes)
        finally:  # a broker may have gone away in the middle of it
            if not self.rewritten and len(notes) > len(seen):
                self._note(begin, notes)

    def publish(self, who: Identity, body: Body) -> Record:
        """Sign and add a record, if it may stand in the ledger as that is now."""
        self.refresh()
        if self.rewritten:
            raise Refused(
                f"{self.folder}: {self._first_fault()} Nothing is added to it: tacit ledger verify says more."
            )
        record = self._signed(who, body)
        self.log.append([(str(record.cid), record.data)])
        self.refresh()
        if record.cid not in self.dag:
            which = f"({record.cid})"
            why = next((fault for fault in self.faults if which in fault.where), None)
            if why is not None:
                raise Refused(f"{self.folder}: another record came before this one. {why}")
            raise Refused(
                f"{self.folder}: this {body.kind} was taken by the log, and is not read there: look with tacit ledger "
                f"show before it is written again. Its address is {record.cid}"
            )
        return record

    def publish_rows(
        self,
        who: Identity,
        model: str,
        data: bytes,
        claim: Claim | None,
        parents: Sequence[CID] = (),
        *,
        reveal: bool = False,
    ) -> Record:
        """Add an update. `parents`: what it was made from; none: it was trained from nothing.

        On a public network rows that claim no privacy are refused, unless they are to be revealed: `reveal`.
        """
        if claim is None and self.public and not reveal:
            raise Refused(
                f"{self.folder}: is on a public network, and these rows claim no privacy: whoever looks, now or ever, "
                "may learn from them what they were trained on. Train with --epsilon; --reveal-for-ever publishes them "
                "nevertheless."
            )
        branch = self.dag.branch(model)
        rule = branch.model
        if len(data) > rule.largest:
            raise Refused(f"weights of {len(data):,} bytes, where {rule.largest:,} are the most in {rule.name}")
        try:
            Rows.of(data, rule)
        except Refused as error:
            raise Refused(f"the weights {error}") from None
        over = tuple(sorted(set(parents))) or (branch.cid,)
        update = Update(branch.cid, over, self.blobs.address(data), len(data), claim)
        self._signed(who, update)  # refused before anything is kept
        self.blobs.put(data)
        return self.publish(who, update)

    def _signed(self, who: Identity, body: Body) -> Record:
        try:
            return self.dag.check(Record.sign(who, body))
        except Refused as error:
            raise Refused(f"{self.folder}: this {body.kind} {error}.") from None

    def open_model(self, who: Identity, model: Model) -> Branch:
        """Add a model."""
        return self.dag.branches[self.publish(who, model).cid]

    def verify(self) -> Reading:
        """Read everything again and verify everything: each signature, each record, and the weights of each update.

        Weights that are withheld are faults of this copy, and not of the ledger.
        """
        seen, found = self._seen(), Reading(Dag(self.genesis))
        # What stands at a place is compared with what was read there; that it was found right then is not believed.
        with _uncollected():
            unsigned = b"".join(seen[at : at + 32] + b"\0" for at in range(0, len(seen), WIDTH))
            found.take(self.log.read(), unsigned, bytearray())
        known: dict[tuple[CID, int, CID], Fault | None] = {}
        for node in found.dag.nodes.values():
            which = (node.update.weights, node.update.size, node.update.model)
            if which not in known:
                known[which] = self._fault(node, found.dag)
            if (fault := known[which]) is not None:
                found.faults.append(Fault(_named(node, found.dag), fault.reason))
        return found

    def fault_of(self, update: CID) -> Fault | None:
        """What is wrong with the weights of an update; None: they are here, and as they should be."""
        return self._fault(self.dag.nodes[update], self.dag)

    def _fault(self, node: Node, dag: Dag) -> Fault | None:
        try:
            self._rows(node, dag)
        except (Withheld, Refused) as error:
            return Fault(_named(node, dag), str(error))
        return None

    def _first_fault(self) -> str:
        return f"{self.faults[0]}." if self.faults else "The log is empty."

    def _seen(self, start: int = 0) -> bytes:
        """What was found from a place on."""
        try:
            with open(self.folder / SEEN, "rb") as file:
                file.seek(start * WIDTH)
                data = file.read()
        except FileNotFoundError:
            return b""
        return data[: len(data) // WIDTH * WIDTH]

    def _note(self, begin: int, notes: bytearray) -> None:
        """Add to `seen`, unless another process did."""
        try:
            with open(self.folder / SEEN, "ab") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                there = file.tell() // WIDTH * WIDTH - begin * WIDTH
                if 0 <= there < len(notes):
                    file.truncate(begin * WIDTH + there)
                    file.write(notes[there:])
        except PermissionError:
            LOG.info("the ledger cannot be written to: it is verified anew each time")


def _named(node: Node, dag: Dag) -> str:
    return f"update {node.cid} by {dag.provider(node.by)}"


def read_manifest(folder: Path) -> dict[str, Any]:
    """What a ledger's folder says of itself."""
    if not (folder / MANIFEST).is_file():
        raise TacitError(
            f"{folder}: is no ledger: it has no {MANIFEST}. tacit ledger init makes one, tacit ledger join takes "
            "part in one elsewhere."
        )
    return read_json(folder / MANIFEST, SCHEMA, {"genesis": str})


def login(folder: Path) -> Path:
    """The file of the key that logs in to the broker of a ledger."""
    found = Path(str(read_manifest(folder).get("key", "")))
    if not found.is_file():
        raise TacitError(f"{folder}: the key that logs in to its broker, {found}, is not there: say which by --key.")
    return found


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without looking for garbage in cycles: there is none, and to go over all records again and again takes long."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def claim_of(statement: dict[str, Any]) -> Claim:
    """What a run's privacy.json guarantees, as an update claims it; a run that guarantees nothing is refused."""
    if statement.get("guarantee") != "differential privacy":
        raise TacitError(
            f"guarantees {excerpt(str(statement.get('guarantee')))}: a record cannot be recalled, so only what was "
            "trained privately is published. Train with --epsilon."
        )
    if "cap" in statement:
        raise TacitError(
            "guarantees a cap on noise that followed what was released before. An update claims releases, and those "
            'alone do not tell that cap: train with privacy.noise_follows = "steps".'
        )
    try:
        [releases], budget = statement["releases"], statement.get("budget")
        holding = bytes.fromhex(budget["head"]) if budget else b""
        return Claim(tuple(map(Segment.of, releases)), statement["unit"], statement["neighbours"], holding)
    except (LookupError, TypeError, ValueError):
        raise BadInput("privacy.json holds no whole statement of one provider's privacy.") from None
