"""Records: what stands in a ledger, each signed, each known by the hash of its bytes.

A record is DAG-CBOR, a list of two: what it says, and the Ed25519 signature over the bytes of that. What it says is a
map with the schema, the kind, the public key `by` which it is signed, and the fields of the kind:

    genesis   begins a ledger: who may write in it. Its address is the ledger's name.
    model     opens a model: task, widths of rows, how many parents, the rule of its committee. Its address names it.
    update    weights of a model: which updates they were made from, where the weights are, what they cost in privacy
    beacon    a number of a chain of hashes, from which committees are drawn
    verdict   what a member of a committee thinks of the updates of a batch
    revocation  a key that was lost or stolen: what it signs is refused from this place of the log on

Here is what a record is by itself: its form and its signature. Whether it may stand in a ledger is `dag.py`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any, ClassVar, Literal, get_args

from tacit.errors import Refused, TacitError, excerpt
from tacit.federation.keys import Identity, verify
from tacit.graph import name_fault
from tacit.ledger.cbor import CID, DAG_CBOR, DAG_PB, RAW, decode, encode
from tacit.privacy.events import Segment, Spent

SCHEMA = "tacit.ledger/1"
PURPOSE = "ledger"
LARGEST = 1 << 16
"""Bytes of a record."""
LARGEST_BLOB = 1 << 36
MOST_KEYS, MOST_PARENTS, MOST_SEATS, MOST_BATCH, MOST_BATCHES = 1000, 64, 255, 1 << 10, 1 << 20
LONGEST_NAME, LONGEST_REASON = 100, 200
Admission = Literal["listed", "open"]
Task = Literal["link prediction", "entity classification"]


@dataclass(frozen=True, slots=True)
class Genesis:
    """The first record of a ledger. `keys`: name and public key of each who may write, if they are listed."""

    kind: ClassVar[str] = "genesis"
    name: str
    admission: Admission = "listed"
    keys: tuple[tuple[str, bytes], ...] = ()

    def __post_init__(self) -> None:
        _check_name("a ledger", self.name)
        _check_word("admission", self.admission, Admission)
        if (self.admission == "open") != (not self.keys):
            raise Refused(
                "lists keys, although everybody is admitted" if self.keys else "admits nobody: keys are listed"
            )
        if len(self.keys) > MOST_KEYS:
            raise Refused(f"lists {len(self.keys):,} keys, where {MOST_KEYS:,} are the most")
        for name, key in self.keys:
            _check_name("a provider", name)
            _check_bytes("a public key", key, 32)
        for place, what in ((0, "name"), (1, "key")):
            if len({each[place] for each in self.keys}) < len(self.keys):
                raise Refused(f"lists a {what} twice")

    def content(self) -> dict[str, Any]:
        return {"name": self.name, "admission": self.admission, "keys": [list(each) for each in self.keys]}

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> Genesis:
        pairs = _list("keys", found["keys"])
        if not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
            raise Refused("'keys' are pairs of a name and a key")
        return cls(found["name"], found["admission"], tuple((name, key) for name, key in pairs))


@dataclass(frozen=True, slots=True)
class Model:
    """What is learnt together, and by which rules."""

    kind: ClassVar[str] = "model"
    genesis: CID
    name: str
    entity: int
    relation: int
    """Numbers in a row."""
    task: Task = "link prediction"
    parents: int = 2
    """How many updates one may be made from."""
    largest: int = 1 << 30
    """Bytes of weights."""
    committee: int = 5
    """Seats; 0: no committee."""
    quorum: int = 3
    """Votes that decide: more than half of the seats."""
    standing: int = 5
    """How many have to stand for a committee: with fewer there is none for that batch."""
    batch: int = 10
    """Updates between two elections."""

    def __post_init__(self) -> None:
        _check_link("genesis", self.genesis, DAG_CBOR)
        _check_name("a model", self.name)
        _check_word("task", self.task, Task)
        for name, least, most in (
            ("entity", 1, 1 << 20),
            ("relation", 1, 1 << 20),
            ("parents", 1, MOST_PARENTS),
            ("largest", 1, LARGEST_BLOB),
            ("committee", 0, MOST_SEATS),
            ("quorum", 0, MOST_SEATS),
            ("standing", 0, MOST_KEYS),
            ("batch", 1, MOST_BATCH),
        ):
            _check_number(name, getattr(self, name), least, most)
        if self.committee and not self.committee < 2 * self.quorum <= 2 * self.committee:
            raise Refused(
                f"'quorum' is more than half of {self.committee} seats, and no more than all; not {self.quorum}"
            )
        if self.committee and self.standing < self.quorum:
            raise Refused(
                f"'standing' is at least the quorum, {self.quorum}: fewer decide nothing; not {self.standing}"
            )

    def content(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(self)}

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> Model:
        return cls(**found)


@dataclass(frozen=True, slots=True)
class Claim:
    """What a provider says that an update cost: releases, from which the curve of its privacy loss follows.

    Nobody can verify it from weights. Releases and not an epsilon, because epsilons do not add up tightly.
    """

    releases: Spent
    unit: str = "one triple of a party's training triples"
    neighbours: str = "graphs that differ by one triple, more or less, over the same names"
    """What is protected, and against what it cannot be told apart: in the words of the run's own guarantee."""
    holding: bytes = b""
    """The hash of the entry of a budget's record that reserved it; empty: no budget kept account."""

    def __post_init__(self) -> None:
        _check_text("'unit'", self.unit, LONGEST_REASON)
        _check_text("'neighbours'", self.neighbours, LONGEST_REASON)
        if self.holding != b"":
            _check_bytes("holding", self.holding, 32)

    def content(self) -> dict[str, Any]:
        releases = [segment.json() for segment in self.releases]
        return {"releases": releases, "unit": self.unit, "neighbours": self.neighbours, "holding": self.holding}

    @classmethod
    def of(cls, found: Any) -> Claim:
        if not isinstance(found, dict) or found.keys() != CLAIMED:
            raise Refused("a claim of privacy says releases, unit, neighbours and holding, and no more")
        try:
            releases = tuple(Segment.of(each) for each in _list("releases", found["releases"]))
        except TacitError as error:
            raise Refused(f"claims what cannot be: {error}") from None
        return cls(releases, found["unit"], found["neighbours"], found["holding"])


CLAIMED = {each.name for each in fields(Claim)}


@dataclass(frozen=True, slots=True)
class Update:
    """Weights of a model that somebody trained from those of the parents; the first ones have the model as parent.

    `privacy` None: they are not private.
    """

    kind: ClassVar[str] = "update"
    model: CID
    parents: tuple[CID, ...]
    weights: CID
    size: int
    privacy: Claim | None = None

    def __post_init__(self) -> None:
        _check_link("model", self.model, DAG_CBOR)
        _check_links("parents", self.parents)
        if not 1 <= len(self.parents) <= MOST_PARENTS:
            raise Refused(f"an update has from 1 to {MOST_PARENTS} parents, not {len(self.parents)}")
        _check_link("weights", self.weights, RAW, DAG_PB)
        _check_number("size", self.size, 1, LARGEST_BLOB)

    def content(self) -> dict[str, Any]:
        privacy = None if self.privacy is None else self.privacy.content()
        return {"model": self.model, "parents": list(self.parents), "weights": self.weights, "size": self.size,
                "privacy": privacy}  # fmt: skip

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> Update:
        parents = tuple(_list("parents", found["parents"]))
        privacy = None if found["privacy"] is None else Claim.of(found["privacy"])
        return cls(found["model"], parents, found["weights"], found["size"], privacy)


@dataclass(frozen=True, slots=True)
class Beacon:
    """One number of a provider's chain: the hash of each is the one before. With batch 0 the chain is begun."""

    kind: ClassVar[str] = "beacon"
    model: CID
    batch: int
    value: bytes

    def __post_init__(self) -> None:
        _check_link("model", self.model, DAG_CBOR)
        _check_number("batch", self.batch, 0, MOST_BATCHES)
        _check_bytes("value", self.value, 32)

    def content(self) -> dict[str, Any]:
        return {"model": self.model, "batch": self.batch, "value": self.value}

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> Beacon:
        return cls(**found)


@dataclass(frozen=True, slots=True)
class Verdict:
    """A member's votes on updates of a batch; `rejected` with the reason of each."""

    kind: ClassVar[str] = "verdict"
    model: CID
    batch: int
    accepted: tuple[CID, ...] = ()
    rejected: tuple[tuple[CID, str], ...] = ()

    def __post_init__(self) -> None:
        _check_link("model", self.model, DAG_CBOR)
        _check_number("batch", self.batch, 0, MOST_BATCHES)
        against = tuple(update for update, _ in self.rejected)
        _check_links("accepted", self.accepted)
        _check_links("rejected", against)
        if not 1 <= len(self.accepted) + len(against) <= MOST_BATCH:
            raise Refused(f"a verdict is on 1 to {MOST_BATCH:,} updates")
        if set(self.accepted) & set(against):
            raise Refused("both accepts and rejects an update")
        for _, reason in self.rejected:
            _check_text("a reason", reason, LONGEST_REASON)

    def content(self) -> dict[str, Any]:
        return {"model": self.model, "batch": self.batch, "accepted": list(self.accepted),
                "rejected": [list(each) for each in self.rejected]}  # fmt: skip

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> Verdict:
        pairs = _list("rejected", found["rejected"])
        if not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
            raise Refused("'rejected' are pairs of an update and a reason")
        accepted = tuple(_list("accepted", found["accepted"]))
        return cls(found["model"], found["batch"], accepted, tuple((update, why) for update, why in pairs))


@dataclass(frozen=True, slots=True)
class Revocation:
    """The end of a key in this ledger: said by the key itself, or by who began the ledger."""

    kind: ClassVar[str] = "revocation"
    genesis: CID
    key: bytes

    def __post_init__(self) -> None:
        _check_link("genesis", self.genesis, DAG_CBOR)
        _check_bytes("key", self.key, 32)

    def content(self) -> dict[str, Any]:
        return {"genesis": self.genesis, "key": self.key}

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> Revocation:
        return cls(**found)


Body = Genesis | Model | Update | Beacon | Verdict | Revocation
KINDS: dict[str, type[Any]] = {kind.kind: kind for kind in (Genesis, Model, Update, Beacon, Verdict, Revocation)}
_KEYS = {name: {"schema", "kind", "by", *(each.name for each in fields(kind))} for name, kind in KINDS.items()}
_OF: dict[str, Callable[[Mapping[str, Any]], Body]] = {name: kind.of for name, kind in KINDS.items()}


@dataclass(frozen=True, slots=True)
class Record:
    """A record of right form. Its signature is right only if `verify` says nothing."""

    cid: CID
    by: bytes
    """The public key of who signed it."""
    body: Body
    data: bytes

    @classmethod
    def sign(cls, who: Identity, body: Body) -> Record:
        """Say something in one's own name."""
        content = encode({"schema": SCHEMA, "kind": body.kind, "by": who.public} | body.content())
        data = b"\x82" + content + b"\x58\x40" + who.sign(PURPOSE, content)
        if len(data) > LARGEST:
            raise Refused(f"a record has at most {LARGEST:,} bytes; this one would have {len(data):,}")
        return cls(CID.of(data, DAG_CBOR), who.public, body, data)

    @classmethod
    def decode(cls, data: bytes) -> Record:
        """Of its bytes; what is not written as a record is refused with the reason."""
        if len(data) > LARGEST:
            raise Refused(f"has {len(data):,} bytes, where {LARGEST:,} are the most")
        found = decode(data)
        if not isinstance(found, list) or len(found) != 2 or not isinstance(found[0], dict):
            raise Refused("is no record: expected a list of content and signature")
        content, signature = found
        if type(signature) is not bytes or len(signature) != 64:
            raise Refused("has no signature of 64 bytes")
        if content.get("schema") != SCHEMA:
            raise Refused(
                f"has the schema {excerpt(repr(content.get('schema')))}; this version of tacit reads {SCHEMA}"
            )
        kind = content.get("kind")
        if not isinstance(kind, str) or kind not in KINDS:
            raise Refused(f"is of the kind {excerpt(repr(kind))}; there are {', '.join(KINDS)}")
        if content.keys() != _KEYS[kind]:
            odd = sorted(content.keys() ^ _KEYS[kind])
            raise Refused(f"of kind {kind} has other fields than it should: {excerpt(odd[0])}")
        by = content["by"]
        _check_bytes("by", by, 32)
        for name in ("schema", "kind", "by"):
            del content[name]
        return cls(CID.of(data, DAG_CBOR), by, _OF[kind](content), data)

    def verify(self) -> None:
        """Refuse a signature that is not by the key that is named."""
        # A list of two, the second a string of 64 bytes: what is signed lies between.
        verify(self.by, PURPOSE, self.data[1:-66], self.data[-64:])


def _check_name(what: str, name: Any) -> None:
    _check_text(f"the name of {what}", name, LONGEST_NAME)


def _check_text(what: str, text: Any, most: int) -> None:
    if not isinstance(text, str):
        raise Refused(f"{what} is text; not {excerpt(repr(text))}")
    if fault := name_fault(text):
        raise Refused(f"{what} is text to be shown: found {fault}")
    if len(text) > most:
        raise Refused(f"{what} has {len(text):,} letters, where {most} are the most")


def _check_word(name: str, word: Any, words: Any) -> None:
    if word not in get_args(words):
        raise Refused(f"{name!r} is {' or '.join(get_args(words))}; not {excerpt(repr(word))}")


def _check_number(name: str, number: Any, least: int, most: int) -> None:
    if type(number) is not int or not least <= number <= most:
        raise Refused(f"{name!r} is a whole number from {least:,} to {most:,}; not {excerpt(repr(number))}")


def _check_bytes(name: str, value: Any, length: int) -> None:
    if type(value) is not bytes or len(value) != length:
        raise Refused(f"{name!r} has {length} bytes; not {excerpt(repr(value))}")


def _check_link(name: str, link: Any, *codecs: int) -> None:
    if type(link) is not CID or link[1] not in codecs:
        raise Refused(f"{name!r} is the address of {'a record' if DAG_CBOR in codecs else 'weights'}")


def _check_links(name: str, links: Sequence[Any]) -> None:
    for link in links:
        _check_link(name, link, DAG_CBOR)
    if len(links) > 1 and any(a >= b for a, b in pairwise(links)):
        raise Refused(f"{name!r} are not in order, or twice the same")


def _list(name: str, found: Any) -> list[Any]:
    if not isinstance(found, list):
        raise Refused(f"{name!r} is a list; not {excerpt(repr(found))}")
    return found
