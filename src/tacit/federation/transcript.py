"""The record of a federation: every message, who could see it, how large it was; and what an adversary sees of it.

An attack is given a `View`, and nothing else: neither a party nor a graph nor a run. What it may assume beyond what its
adversary saw is a declared leak, which is named in whatever the attack reports.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from tacit.errors import BadInput, TacitError, excerpt
from tacit.federation.messages import SERVER, Message
from tacit.folders import write_whole
from tacit.graph import Graph
from tacit.tensors import load_tensors, save_tensors

Role = Literal["server", "party", "server+party", "peer", "ledger-reader", "outsider"]
ROLES: dict[Role, str] = {
    "server": "whoever runs the server: what reaches it and what it sends",
    "party": "one party: what it receives and sends, and its own graph",
    "server+party": "the server and one party together",
    "peer": "one party where there is no server: what it receives and sends, and its own graph",
    "ledger-reader": "anyone who reads the ledger: what was published there",
    "outsider": "anyone who is given the final rows",
}
Tensor = Any
GIVE = 0
"""The phase of a round in which the server gives its rows."""
PUBLISHED = frozenset({"record"})
"""Kinds of messages that a ledger shows to everyone."""


@dataclass(frozen=True)
class Adversary:
    """Who attacks: a role, and which party where the role is one."""

    role: Role
    party: int | None = None

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise TacitError(f"the adversary is {', '.join(ROLES)}; not {self.role!r}")
        if ("party" in self.role or self.role == "peer") != (self.party is not None):
            wanted = "one of the parties: say which" if self.party is None else "no party"
            raise TacitError(f"the adversary {self.role} is {wanted}")
        if self.party is not None and (not isinstance(self.party, int) or self.party < 0):
            raise TacitError("the adversary is none of the parties, which count from 0")

    def sees(self, record: Record) -> bool:
        """Whether this message passed before the adversary's eyes."""
        ends = {record.sender, record.receiver}
        if self.role == "ledger-reader":
            return record.kind in PUBLISHED
        if self.role == "outsider":
            return False
        own = {self.party} if self.party is not None else set()
        return bool(ends & (own | ({SERVER} if "server" in self.role else set())))


@dataclass(frozen=True)
class Record:
    """One message, as the transcript has it."""

    number: int
    round: int
    phase: int
    kind: str
    part: str | None
    sender: int
    receiver: int
    size: int
    sha256: str | None = None
    """Of its canonical bytes, where it was kept or sent."""

    @staticmethod
    def of(number: int, message: Message) -> Record:
        """The record of a message that is not kept."""
        return Record(number, message.round, message.phase, message.kind, message.says.get("part"), message.sender,
                      message.receiver, message.size)  # fmt: skip

    def json(self) -> dict[str, Any]:
        return dict(self.__dict__)


@dataclass(frozen=True)
class Known:
    """What everybody in a federation knows of it: how triples are scored, whose rows are averaged, how many take part.

    `part`: whose rows are shared, of entities or of relations.
    """

    scorer: Any
    dim: int
    part: str
    parties: int
    reciprocal: bool = False


@dataclass(frozen=True)
class View:
    """What an adversary has: messages that were kept, its own graph, the final rows, and leaks that were declared.

    Attributes
    ----------
    records
        Every message that it saw, kept or not.
    known
        What everybody in the federation knows.
    leaks
        What the attack is given beyond that, by name: to be printed with its result.
    """

    adversary: Adversary
    records: Sequence[Record]
    payloads: Mapping[int, Message]
    own: Mapping[int, Mapping[str, Tensor]] = field(default_factory=dict)
    """By round: rows that the adversary has and does not send, as they were after its training."""
    graph: Graph | None = None
    known: Known | None = None
    published: Mapping[str, Any] | None = None
    leaks: Mapping[str, Any] = field(default_factory=dict)

    def messages(self, **wanted: Any) -> Iterator[tuple[Record, Message]]:
        """Messages that were kept, in their order; `wanted`: fields of the record, such as round=3, sender=0."""
        for record in self.records:
            if record.number in self.payloads and all(getattr(record, name) == value for name, value in wanted.items()):
                yield record, self.payloads[record.number]


Filter = Callable[[Record], bool]
OWN = "own-{}-{}.safetensors"
"""The file of a party's own rows of a round."""


class Transcript:
    """Every message of a federation.

    Parameters
    ----------
    keep
        Which messages' content is kept, beside its size; default: of none.
    cap
        Bytes of content that are kept at most; what does not fit is recorded without content, and `dropped` counts it.
    """

    def __init__(self, keep: Filter = lambda record: False, cap: int = 1 << 30):
        self.keep, self.cap = keep, cap
        self.records: list[Record] = []
        self.payloads: dict[int, Message] = {}
        self.memories: dict[tuple[int, int], dict[str, Tensor]] = {}
        """By round and party: what a party has of its own beside what it sends, for the views of that party alone."""
        self.kept = self.dropped = 0
        self._written = 0

    def remember(self, number: int, party: int, rows: Mapping[str, Tensor]) -> None:
        """Keep a party's own rows of a round, if messages of that round are kept. This is nothing that was sent."""
        size = _size(rows)
        if self.keep(Record(len(self.records), number, GIVE, "own", None, party, party, size)):
            if self.kept + size > self.cap:
                self.dropped += 1
                return
            self.memories[number, party] = {name: tensor.detach().cpu().clone() for name, tensor in rows.items()}
            self.kept += size

    def forget(self, before: int) -> None:
        """Let go of what was kept of earlier rounds; not of the agreement on names, before round 1."""
        for record in self.records:
            if 0 < record.round < before and self.payloads.pop(record.number, None) is not None:
                self.kept -= record.size
        for number, party in [place for place in self.memories if place[0] < before]:
            self.kept -= _size(self.memories.pop((number, party)))

    def record(self, message: Message) -> Record:
        """Note a message as it is sent."""
        record = Record.of(len(self.records), message)
        if self.keep(record):
            if self.kept + record.size > self.cap:
                self.dropped += 1
            else:
                # A copy: in one process a message is a look at rows that will move.
                arrays = {name: tensor.detach().cpu().clone() for name, tensor in message.arrays.items()}
                copy = replace(message, says=dict(message.says), arrays=arrays)
                record = replace(record, sha256=hashlib.sha256(copy.encode()).hexdigest())
                self.payloads[record.number] = copy
                self.kept += record.size
        self.records.append(record)
        return record

    def view(
        self,
        adversary: Adversary,
        *,
        graphs: Sequence[Graph] = (),
        known: Known | None = None,
        published: Mapping[str, Any] | None = None,
        leaks: Mapping[str, Any] | None = None,
    ) -> View:
        """What this adversary has seen. Of the graphs it gets its own, and of the rows the published ones."""
        if graphs and adversary.party is not None and adversary.party >= len(graphs):
            raise TacitError(f"there are {len(graphs)} parties, and no party {adversary.party}")
        seen = [record for record in self.records if adversary.sees(record)]
        graph = graphs[adversary.party] if adversary.party is not None and graphs else None
        content = {record.number: self.payloads[record.number] for record in seen if record.number in self.payloads}
        own = {number: rows for (number, party), rows in self.memories.items() if party == adversary.party}
        return View(adversary, seen, content, own, graph, known, published, dict(leaks or {}))

    # -- how much was sent ---------------------------------------------------------------------------------------------

    def bytes_by(self, *fields: str) -> dict[tuple[Any, ...], int]:
        """How many bytes, by fields of the record: bytes_by("round", "sender")."""
        found: dict[tuple[Any, ...], int] = {}
        for record in self.records:
            key = tuple(getattr(record, name) for name in fields)
            found[key] = found.get(key, 0) + record.size
        return found

    def traffic(self, party: int) -> dict[str, int]:
        """Bytes that a party sent and received."""
        sent = sum(record.size for record in self.records if record.sender == party)
        return {"sent": sent, "received": sum(record.size for record in self.records if record.receiver == party)}

    # -- on disk -------------------------------------------------------------------------------------------------------

    def lines(self, first: int = 0, *, hashes: bool = True) -> Iterable[str]:
        """The records from a number on, as lines of JSON.

        A hash confirms a guess of what was sent: what is shown to others has none.
        """
        records = self.records[first:]
        return (json.dumps((r if hashes else replace(r, sha256=None)).json(), sort_keys=True) for r in records)

    def load(self, path: Path, payloads: Path) -> None:
        """Become what a transcript wrote: its lines, and the contents that were kept."""
        self.records.clear()
        self.payloads.clear()
        self.memories.clear()
        self.kept = self.dropped = 0
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines()):
            place = f"{path}:{number + 1}"
            try:
                record = Record(**json.loads(line))
            except (ValueError, TypeError, RecursionError):
                raise BadInput(f"{place}: found {excerpt(line)}; expected the record of a message.") from None
            numbers = (record.number, record.round, record.phase, record.sender, record.receiver, record.size)
            if any(type(value) is not int for value in numbers) or record.size < 0:
                raise BadInput(f"{place}: found {excerpt(line)}; expected the record of a message.")
            if record.number != number:
                raise BadInput(f"{place}: found number {record.number}; expected {number}.")
            if record.sha256 is not None:
                self.payloads[number] = self._payload(payloads / f"{number:08d}", record)
                self.kept += record.size
            elif self.keep(record):
                self.dropped += 1
            self.records.append(record)
        last = max((record.round for record in self.records), default=0)
        for memory in sorted(payloads.glob(OWN.format("*", "*"))):
            number, party = (int(text) for text in memory.stem.split("-")[1:])
            if number <= last:  # what is later is of a round that will be made again
                self.memories[number, party], _ = load_tensors(memory)
                self.kept += _size(self.memories[number, party])
        self._written = max((number for number, _ in self.memories), default=0)

    def write_contents(self, folder: Path, first: int) -> None:
        """Write what was kept of the messages from a number on, and of parties' own rows that are not there yet."""
        for number in range(first, len(self.records)):
            if (message := self.payloads.get(number)) is not None:
                write_whole(folder / f"{number:08d}", message.encode())
        for (number, party), rows in self.memories.items():
            where = folder / OWN.format(f"{number:06d}", f"{party:04d}")
            if number > self._written:
                save_tensors(where, rows, {"schema": "tacit.own/1"})
        self._written = max((number for number, _ in self.memories), default=0)

    def _payload(self, path: Path, record: Record) -> Message:
        """What a message held, if it is still what was recorded."""
        try:
            data = path.read_bytes()
        except OSError as error:
            raise BadInput(f"{path}: cannot be read: {error.strerror}.") from None
        if hashlib.sha256(data).hexdigest() != record.sha256:
            raise BadInput(f"{path}: was changed: its hash is not the transcript's.")
        message = Message.decode(data)
        if replace(record, sha256=None) != Record.of(record.number, message):
            raise BadInput(f"{path}: is another message than the transcript's record of it.")
        return message


def _size(rows: Mapping[str, Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in rows.values())


def rounds(every: int, parties: Iterable[int] | None = None) -> Filter:
    """Keep messages of every so many rounds, and what the server gives after them, which tells what came of them.

    Of these parties alone, if any are named.
    """
    wanted = None if parties is None else set(parties)

    def keep(record: Record) -> bool:
        ends, after = {record.sender, record.receiver}, record.round % every
        due = after == 0 or (after == 1 and record.round > 1 and record.kind == "rows" and record.phase == GIVE)
        return due and (wanted is None or bool(ends & wanted))

    return keep
