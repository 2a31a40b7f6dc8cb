"""A ledger on disk: its log, its weights, and what its reader has verified.

    ledger.json    schema, and the address of the genesis
    log.sqlite     the records, in order
    blobs/         weights by their address
    seen           what this reader found at each place of the log, and whether its signature was right

Everything follows from the log. `seen` only saves time, and notices if what was read once is read no more: a place that
holds another record than it did, or a log that became shorter. `Ledger.verify` takes nothing from it but that.
"""

from __future__ import annotations

import fcntl
import gc
import hashlib
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tacit.errors import BadInput, TacitError, excerpt
from tacit.federation.keys import Identity
from tacit.federation.messages import Refused
from tacit.folders import new_folder, read_json, seal
from tacit.ledger.blobs import BlobFolder, Blobs, Rows, Withheld
from tacit.ledger.cbor import CID, DAG_CBOR
from tacit.ledger.dag import Branch, Dag, Node
from tacit.ledger.log import Entry, Log, SqliteLog
from tacit.ledger.record import Body, Claim, Genesis, Model, Record, Update
from tacit.privacy.events import Segment

LOG = logging.getLogger(__name__)
SCHEMA = "tacit.ledger-folder/1"
MANIFEST, RECORDS, BLOBS, SEEN = "ledger.json", "log.sqlite", "blobs", "seen"
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

    def take(self, entries: Iterator[Entry] | Sequence[Entry], seen: bytes = b"") -> bytes:
        """Read on; `seen`: what was found from here on before. Returns the same of what is found now."""
        notes, begin = bytearray(), self.end
        for entry in entries:
            if entry.position >= MOST:
                self.rewritten = True
                self.faults.append(Fault(f"record {entry.position}", "stands where no log reaches: reading ends here"))
                break
            if entry.position > self.end:
                self.rewritten = True
                self.faults.append(Fault(f"records {self.end} to {entry.position - 1}", "were deleted from the log"))
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
                self.dag.add(entry.data, verified=signed)
                signed = True
            except TacitError as error:
                self.faults.append(Fault(f"record {entry.position} ({excerpt(entry.name)[1:-1]})", str(error)))
            notes += digest + (b"\1" if signed else b"\0")
            self.end += 1
        if self.end - begin < (had := len(seen) // WIDTH):
            self.rewritten = True
            gone = had - (self.end - begin)
            self.faults.append(Fault(f"record {self.end}", f"{gone:,} records that were read from here on are gone"))
        return bytes(notes)


def _address(digest: bytes) -> CID:
    """Of a record, by the hash of its bytes."""
    return CID(bytes((1, DAG_CBOR, 0x12, 0x20)) + digest)


class Ledger:
    """A ledger that is open: `dag` says what stands in it, `faults` what does not."""

    def __init__(self, folder: Path, genesis: CID, log: Log, blobs: Blobs):
        self.folder, self.genesis, self.log, self.blobs = folder, genesis, log, blobs
        self._reading = Reading(Dag(genesis))

    @classmethod
    def begin(cls, folder: Path, who: Identity, genesis: Genesis) -> Ledger:
        """Make a ledger in a folder, signed by who begins it."""
        if genesis.admission == "listed" and who.public not in {key for _, key in genesis.keys}:
            raise TacitError(f"{who.name} begins the ledger and is not admitted to it: list that key too.")
        record = Record.sign(who, genesis)
        with new_folder(Path(folder), MANIFEST) as draft:
            SqliteLog(draft / RECORDS, create=True).append([(str(record.cid), record.data)])
            (draft / BLOBS).mkdir()
            seal(draft, MANIFEST, SCHEMA, {"genesis": str(record.cid)}, later=[SEEN])
        return cls.load(folder)

    @classmethod
    def load(cls, folder: Path, genesis: CID | None = None) -> Ledger:
        """Open a ledger and read all of it. `genesis`: what its address has to be, as it was told by another way."""
        folder = Path(folder)
        if not (folder / MANIFEST).is_file():
            raise TacitError(f"{folder}: is no ledger: it has no {MANIFEST}. tacit ledger init makes one.")
        found = CID.parse(read_json(folder / MANIFEST, SCHEMA, {"genesis": str})["genesis"])
        if genesis is not None and found != genesis:
            raise Refused(f"{folder}: is the ledger {found}, not {genesis}.")
        ledger = cls(folder, found, SqliteLog(folder / RECORDS), BlobFolder(folder / BLOBS))
        ledger.refresh()
        if ledger.dag.genesis is None:
            raise BadInput(f"{folder}: the log does not hold the genesis {found}.", hint=ledger._first_fault())
        return ledger

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

    def refresh(self) -> None:
        """Read what was added since."""
        begin = self._reading.end
        seen = self._seen(begin)
        with _uncollected():
            notes = self._reading.take(self.log.read(begin), seen)
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
            raise Refused(f"{self.folder}: another record came before this one. {self.faults[-1]}")
        return record

    def publish_rows(
        self, who: Identity, model: str, data: bytes, claim: Claim | None, parents: Sequence[CID] = ()
    ) -> Record:
        """Add an update. `parents`: what it was made from; none: it was trained from nothing."""
        branch = self.dag.branch(model)
        rule = branch.model
        if len(data) > rule.largest:
            raise Refused(f"weights of {len(data):,} bytes, where {rule.largest:,} are the most in {rule.name}")
        try:
            Rows.of(data, rule)
        except Refused as error:
            raise Refused(f"the weights {error}") from None
        over = tuple(sorted(set(parents))) or (branch.cid,)
        update = Update(branch.cid, over, CID.of(data), len(data), claim)
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
            found.take(self.log.read(), b"".join(seen[at : at + 32] + b"\0" for at in range(0, len(seen), WIDTH)))
        faults: dict[tuple[CID, int, CID], str | None] = {}
        for node in found.dag.nodes.values():
            which = (node.update.weights, node.update.size, node.update.model)
            if which not in faults:
                try:
                    self._rows(node, found.dag)
                    faults[which] = None
                except (Withheld, Refused) as error:
                    faults[which] = str(error)
            if (reason := faults[which]) is not None:
                found.faults.append(Fault(f"update {node.cid} by {found.dag.provider(node.by)}", reason))
        return found

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

    def _note(self, begin: int, notes: bytes) -> None:
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
