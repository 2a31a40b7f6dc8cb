"""What parties say to each other: typed, versioned, with one canonical form in bytes.

A message is a header and some arrays. Its bytes are

    b"tacit" version:u8  length:u32  header  arrays

all little-endian; the header is JSON with sorted keys and no blanks, and lists each array's name, type and shape, so
that the length of the arrays, one after the other, follows from it. `decode` takes exactly what `encode` gives and
refuses all else: so equal messages have equal bytes, and bytes have one meaning. Within one process a message holds
tensors and is never encoded; its size is known all the same.

What may arrive is another question than what can be read: an `Inbox` knows whom to expect with what, in which round,
and lets nothing else through. Nothing from outside reaches a table but by an inbox.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from tacit.errors import Refused

Tensor = Any
SERVER = -1
"""The server's number; parties count from 0."""
MAGIC, VERSION = b"tacit", 1
LARGEST_HEADER = 1 << 16
LARGEST = 1 << 36
"""Bytes of a header and of a whole message that are read at most."""
MOST_PARTIES, MOST_ROUNDS, MOST_COUNTED = 1 << 20, 1 << 31, 1 << 24


@dataclass(frozen=True)
class Array:
    """What an array of a message may be: one of some types, with so many dimensions."""

    types: tuple[str, ...]
    dimensions: int
    optional: bool = False


@dataclass(frozen=True)
class Kind:
    """What a message of a kind holds beside round, phase, sender and receiver."""

    about: str
    arrays: Mapping[str, Array]
    words: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Fields that are one of some words."""
    numbers: Mapping[str, int] = field(default_factory=dict)
    """Fields that are integers from 0 up to this."""


PARTS = ("entity", "relation")
_PART: Mapping[str, tuple[str, ...]] = {"part": PARTS}
_MEMBERS = Array(("i8",), 1)
_HANDSHAKE = {"handshake": 1 << 31}
KINDS: dict[str, Kind] = {
    "names": Kind(
        "the names a party has rows for, one a line",
        {"text": Array(("u1",), 1)},
        {"part": PARTS},
        {"count": 1 << 40},
    ),
    "places": Kind(
        "which shared row each of a party's names has",
        {"ids": Array(("i8",), 1)},
        {"part": PARTS},
        {"total": 1 << 40},
    ),
    "counts": Kind(
        "how many training triples of the party each of its rows occurs in",
        {"values": Array(("f4",), 1)},
        {"part": PARTS},
    ),
    "marginals": Kind(
        "noisy counts of each relation with each entity, as its tail and then as its head",
        {"values": Array(("f4",), 2)},
        {"part": PARTS},
    ),
    "rows": Kind(
        "rows: all that the party has a place for, in its order, or those of the ids",
        {"ids": Array(("i8",), 1, optional=True), "values": Array(("f4", "f2"), 2)},
        {"part": PARTS},
    ),
    "begin": Kind("whether a secure sum begins with new keys", {}, _PART, {"fresh": 1}),
    "keys": Kind(
        "a member's public keys, signed", {"public": Array(("u1",), 2), "signature": Array(("u1",), 1)}, _PART
    ),
    "members": Kind(
        "everyone's public keys",
        {"members": _MEMBERS, "public": Array(("u1",), 2), "signatures": Array(("u1",), 2)},
        _PART,
    ),
    "shares": Kind(
        "shares of secrets, sealed for each member", {"members": _MEMBERS, "sealed": Array(("u1",), 2)}, _PART
    ),
    "masked": Kind("numbers under masks", {"words": Array(("u4",), 1)}, _PART),
    "heard": Kind("whose numbers the server has", {"members": _MEMBERS}, _PART),
    "signed": Kind("a member's signature on who was heard", {"signature": Array(("u1",), 1)}, _PART),
    "agreed": Kind("everyone's signatures", {"members": _MEMBERS, "signatures": Array(("u1",), 2)}, _PART),
    "opened": Kind("shares that take masks off a sum", {"members": _MEMBERS, "shares": Array(("u1",), 2)}, _PART),
    "owners": Kind("how many parties have each shared row", {"words": Array(("u4",), 1)}, _PART),
    "points": Kind(
        "a party's blinded names",
        {"points": Array(("u1",), 2), "signature": Array(("u1",), 1)},
        _PART,
        {"owner": 1 << 20},
    ),
    "naming": Kind(
        "an agreement on names begins", {"domain": Array(("u1",), 1)}, _PART, {"bound": 1 << 40, "salt": 1 << 63}
    ),
    "union": Kind(
        "the pseudonyms of all names; without any: a sum that could not be read is made once more, by this salt",
        {"keys": Array(("u1",), 2)},
        _PART,
        {"salt": 1 << 63},
    ),
    "score": Kind("how well a party's model answers its own questions", {"numbers": Array(("f8",), 2)}, _PART),
    "blinded": Kind("a peer's names under its key", {"points": Array(("u1",), 2)}, _PART),
    "passed": Kind(
        "the other's names under both keys, and the own ones under one where the other has not had them",
        {"points": Array(("u1",), 2), "own": Array(("u1",), 2, optional=True)},
        _PART,
    ),
    "offer": Kind("a peer's rows are better than before: a handshake is welcome", {}),
    "invite": Kind(
        "a host asks a client to translate its rows: how many, how wide, how long they are, in which order",
        {"scale": Array(("f8",), 1)},
        {},
        {
            "handshake": 1 << 31,
            "count": 1 << 40,
            "width": 1 << 20,
            "epochs": 1 << 20,
            "batch": 1 << 20,
            "seed": 1 << 63,
        },
    ),
    "answer": Kind("what a client says to that", {}, {"answer": ("yes", "busy", "no")}, _HANDSHAKE),
    "generated": Kind("a batch of a client's rows, translated", {"values": Array(("f4",), 2)}, {}, _HANDSHAKE),
    "gradient": Kind(
        "where these should move; keep: the translation that made this epoch's rows is the best so far",
        {"values": Array(("f4",), 2)},
        {},
        {"handshake": 1 << 31, "keep": 1},
    ),
    "translated": Kind(
        "all aligned rows of a client, translated; and neighbours of them, with links, if any are sent",
        {
            "values": Array(("f4",), 2),
            "entity": Array(("f4",), 2, optional=True),
            "relation": Array(("f4",), 2, optional=True),
            "links": Array(("i8",), 2, optional=True),
        },
        {},
        _HANDSHAKE,
    ),
    "ended": Kind(
        "a host has what it wants; a map: what it did to the rows beyond the translation",
        {"map": Array(("f4",), 2, optional=True)},
        {},
        _HANDSHAKE,
    ),
}
"""Each kind of message. A new one is a line here."""
TYPES = {"u1": torch.uint8, "u4": torch.uint32, "i8": torch.int64, "f8": torch.float64, "f4": torch.float32,
         "f2": torch.float16}  # fmt: skip
NAMES = {tensor_type: name for name, tensor_type in TYPES.items()}


@dataclass(frozen=True)
class Message:
    """One message. Arrays are tensors, of the types of `TYPES`."""

    kind: str
    round: int
    phase: int
    sender: int
    receiver: int
    says: Mapping[str, Any]
    arrays: Mapping[str, Tensor]

    def __post_init__(self) -> None:
        kind = KINDS.get(self.kind)
        if kind is None:
            raise Refused(f"there is no kind of message {self.kind!r}")
        _check_number("round", self.round, MOST_ROUNDS)
        _check_number("phase", self.phase, 255)
        for name in ("sender", "receiver"):
            if (value := getattr(self, name)) != SERVER or not isinstance(value, int):
                _check_number(name, value, MOST_PARTIES)
        if self.sender == self.receiver:
            raise Refused("a message to oneself")
        if self.says.keys() != kind.words.keys() | kind.numbers.keys():
            raise Refused(f"a message of kind {self.kind} says {', '.join(sorted(kind.words.keys() | kind.numbers))}")
        for name, allowed in kind.words.items():
            if not isinstance(self.says[name], str) or self.says[name] not in allowed:
                raise Refused(f"{name} is one of {', '.join(allowed)}")
        for name, most in kind.numbers.items():
            _check_number(name, self.says[name], most)
        needed = {name for name, array in kind.arrays.items() if not array.optional}
        if not needed <= self.arrays.keys() <= kind.arrays.keys():
            raise Refused(f"a message of kind {self.kind} has the arrays {', '.join(sorted(kind.arrays))}")
        for name, tensor in self.arrays.items():
            wanted = kind.arrays[name]
            if NAMES.get(tensor.dtype) not in wanted.types:
                raise Refused(f"the array {name} is of type {' or '.join(wanted.types)}")
            if tensor.dim() != wanted.dimensions:
                raise Refused(f"the array {name} has {wanted.dimensions} dimensions")

    @property
    def header(self) -> bytes:
        """The header's canonical form."""
        content = {
            "arrays": [[name, NAMES[t.dtype], list(t.shape)] for name, t in sorted(self.arrays.items())],
            "kind": self.kind,
            "phase": self.phase,
            "receiver": self.receiver,
            "round": self.round,
            "says": dict(self.says),
            "sender": self.sender,
        }
        return _canonical(content)

    @property
    def size(self) -> int:
        """How many bytes `encode` gives, without making them."""
        arrays = sum(tensor.numel() * tensor.element_size() for tensor in self.arrays.values())
        return len(MAGIC) + 5 + len(self.header) + int(arrays)

    def encode(self) -> bytes:
        """The canonical bytes."""
        header = self.header
        parts = [MAGIC, struct.pack("<BI", VERSION, len(header)), header]
        for _, tensor in sorted(self.arrays.items()):
            array = tensor.detach().cpu().contiguous().numpy()
            parts.append(array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes())
        return b"".join(parts)

    @staticmethod
    def decode(data: bytes, *, largest: int = LARGEST) -> Message:
        """The message that these bytes are; anything else than what `encode` gives is refused."""
        begin = len(MAGIC) + 5
        if len(data) > largest:
            raise Refused(f"{len(data):,} bytes, and no message has more than {largest:,}")
        if len(data) < begin or data[: len(MAGIC)] != MAGIC:
            raise Refused("not a message of tacit")
        version, length = struct.unpack_from("<BI", data, len(MAGIC))
        if version != VERSION:
            raise Refused(f"of version {version}; this side speaks version {VERSION}")
        if length > LARGEST_HEADER or begin + length > len(data):
            raise Refused("the header is longer than it may be, or cut off")
        header = data[begin : begin + length]
        try:
            content = json.loads(header.decode("utf-8"))
        except (ValueError, RecursionError):
            raise Refused("the header is not JSON") from None
        fields = {"arrays", "kind", "phase", "receiver", "round", "says", "sender"}
        if not isinstance(content, dict) or content.keys() != fields:
            raise Refused(f"a header has {', '.join(sorted(fields))}, and nothing else")
        if not isinstance(content["kind"], str) or not isinstance(content["says"], dict):
            raise Refused("a header's kind is a word, and what it says is by name")
        arrays, at = {}, begin + length
        for name, kind, shape in _described(content.pop("arrays")):
            size = math.prod(shape) * np.dtype(kind).itemsize
            if at + size > len(data):
                raise Refused(f"the array {name} is cut off")
            values = np.frombuffer(data, np.dtype(kind).newbyteorder("<"), math.prod(shape), at)
            arrays[name] = torch.from_numpy(values.astype(kind).reshape(shape))
            at += size
        if at != len(data):
            raise Refused(f"{len(data) - at:,} bytes after the last array")
        message = Message(**content, arrays=arrays)
        if message.header != header:
            raise Refused("the header is not in its canonical form")
        return message


def _described(arrays: Any) -> Sequence[tuple[str, str, tuple[int, ...]]]:
    """The list of arrays of a header, checked."""
    if not isinstance(arrays, list) or len(arrays) > 16:
        raise Refused("a header lists its arrays, a few at most")
    found: list[tuple[str, str, tuple[int, ...]]] = []
    for one in arrays:
        if not isinstance(one, list) or len(one) != 3:
            raise Refused("an array is described by name, type and shape")
        name, kind, shape = one
        if not isinstance(name, str) or not isinstance(kind, str) or kind not in TYPES:
            raise Refused(f"the type of an array is one of {', '.join(TYPES)}")
        if not isinstance(shape, list) or len(shape) > 2 or name in (other for other, _, _ in found):
            raise Refused("an array has a name of its own, and one dimension or two")
        for number in shape:
            _check_number("the size of an array", number, LARGEST)
        if math.prod(shape) > LARGEST:
            raise Refused("an array is larger than a message may be")
        found.append((name, kind, tuple(shape)))
    return found


def _canonical(content: Any) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()


def _check_number(name: str, value: Any, most: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
        raise Refused(f"{name} is a whole number from 0 to {most:,}")


@dataclass
class Inbox:
    """What one side takes in one phase of one round: so much from each of some senders, once.

    Parameters
    ----------
    rows
        What each sender may send rows of: its number of rows, or all ids it may name. Others are not expected.
    width
        Of rows, or of each sender's; None: the kind has no rows.
    """

    kind: str
    part: str | None
    round: int
    phase: int
    receiver: int
    rows: Mapping[int, int]
    width: int | Mapping[int, int] | None = None
    total: int | None = None
    """How many shared rows there are, where ids are named."""
    taken: dict[int, Message] = field(default_factory=dict)

    def take(self, message: Message | bytes) -> Message:
        """Let a message in, or refuse it with the reason."""
        if not isinstance(message, Message):
            message = Message.decode(bytes(message))
        if message.receiver != self.receiver:
            raise Refused("addressed to someone else")
        if message.kind != self.kind:
            raise Refused(f"of kind {message.kind}, where {self.kind} is expected")
        if message.round != self.round:
            raise Refused(f"of round {message.round:,}; this is round {self.round:,}")
        if message.phase != self.phase:
            raise Refused(f"of phase {message.phase}; this is phase {self.phase}")
        if message.sender not in self.rows:
            raise Refused(f"from {message.sender}, of whom nothing is expected now")
        if message.sender in self.taken:
            raise Refused(f"from {message.sender}, who has sent this already")
        if message.says.get("part") != self.part:
            raise Refused(f"about {message.says.get('part')} rows, where {self.part} rows are expected")
        self._check_arrays(message, self.rows[message.sender])
        self.taken[message.sender] = message
        return message

    def _check_arrays(self, message: Message, most: int) -> None:
        ids, values = message.arrays.get("ids"), message.arrays.get("values")
        if (count := message.says.get("count", 0)) > most:
            raise Refused(f"{count:,} names, where there are {most:,} rows")
        if ids is not None:
            if len(ids) > most or (message.kind == "places" and len(ids) != most):
                raise Refused(f"{len(ids):,} ids, where there are {most:,} rows")
            limit = message.says.get("total", self.total)
            if self.total is not None and limit != self.total:
                raise Refused(f"of {limit:,} shared rows, where there are {self.total:,}")
            if limit is None:
                raise Refused("ids, where none are expected")
            if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= limit):
                raise Refused("ids beyond the shared rows")
            if message.kind == "rows" and len(ids) > 1 and not bool((ids[1:] > ids[:-1]).all()):
                raise Refused("ids that are not in order, or named twice")
            if message.kind == "places" and len(ids.unique()) != len(ids):
                raise Refused("two names with one place")
        if values is not None:
            length = most if ids is None else len(ids)
            width = self.width[message.sender] if isinstance(self.width, Mapping) else self.width
            shape = (length,) if width is None else (length, width)
            if tuple(values.shape) != shape:
                raise Refused(f"values of shape {tuple(values.shape)}, where {shape} is expected")
            if not bool(values.isfinite().all()):
                raise Refused("values that are not finite")
            if message.kind == "counts" and not bool(((values >= 0) & (values <= MOST_COUNTED)).all()):
                raise Refused(f"counts that are not from 0 to {MOST_COUNTED:,}")

    @property
    def missing(self) -> set[int]:
        """Who has not sent anything that was taken."""
        return set(self.rows) - self.taken.keys()

    def messages(self) -> list[Message]:
        """What was taken, in the order of senders: sums do not depend on who came first."""
        return [self.taken[sender] for sender in sorted(self.taken)]
