"""DAG-CBOR and CIDs, strictly: a value has one form in bytes, and bytes in any other form are refused.

DAG-CBOR is the subset of CBOR (RFC 8949) that IPLD fixed: numbers in their shortest form, floats of 64 bits that are
finite, maps with text keys in order of their length and then their bytes, no lengths left open, and one tag, 42, for
links. A link is a CID: here of version 1, by SHA-256, to DAG-CBOR, to raw bytes, or to DAG-PB (`unixfs.py`). Written
here because records are read by the hundred thousand, and the package for it takes a millisecond for each.
"""

from __future__ import annotations

import base64
import hashlib
import math
import struct
from collections.abc import Mapping
from typing import Any

from tacit.errors import BadValue, Refused, excerpt

Value = Any
"""None, bool, int, float, str, bytes, CID, or lists and dicts (with text keys) of these."""
RAW, DAG_PB, DAG_CBOR = 0x55, 0x70, 0x71
CODECS = {RAW: "raw bytes", DAG_PB: "DAG-PB", DAG_CBOR: "DAG-CBOR"}
DEEPEST = 16
"""Lists and maps in each other."""
_LINK = b"\xd8\x2a\x58\x25\x00"
"""What stands before a link's 36 bytes: tag 42, a string of 37 bytes, and the prefix for CIDs in binary."""


class CID(bytes):
    """The address of some bytes: version 1, their codec, SHA-256, and the hash; 36 bytes. As text: base32.

    >>> print(CID.of(b"hello"))
    bafkreibm6jg3ux5qumhcn2b3flc3tyu6dmlb4xa7u5bf44yegnrjhc4yeq
    """

    __slots__ = ()

    def __new__(cls, data: bytes) -> CID:
        if len(data) != 36 or data[0] != 1 or data[1] not in CODECS or data[2:4] != b"\x12\x20":
            raise Refused("is no address that is known here: CID version 1, raw, DAG-PB or DAG-CBOR, SHA-256")
        return super().__new__(cls, data)

    @classmethod
    def of(cls, data: bytes, codec: int = RAW) -> CID:
        """The address that these bytes have."""
        return cls(bytes((1, codec, 0x12, 0x20)) + hashlib.sha256(data).digest())

    @classmethod
    def parse(cls, text: str) -> CID:
        """Of its text; any but the one way to write it is refused."""
        try:
            data = base64.b32decode(text[1:].upper() + "=" * (-(len(text) - 1) % 8))
        except ValueError:
            data = b""
        if not text.startswith("b") or not data or _base32(data) != text:
            raise Refused(f"{excerpt(text)} is no address: expected 59 letters and digits that begin with b")
        try:
            return cls(data)
        except Refused as error:
            raise Refused(f"{excerpt(text)} {error}") from None

    @property
    def codec(self) -> int:
        return self[1]

    def __str__(self) -> str:
        return _base32(self)

    def __repr__(self) -> str:
        return f"CID({self})"


def _base32(data: bytes) -> str:
    return "b" + base64.b32encode(data).decode().rstrip("=").lower()


def encode(value: Value) -> bytes:
    """The one form of a value."""
    parts: list[bytes] = []
    _write(value, parts, 0)
    return b"".join(parts)


def _write(value: Value, parts: list[bytes], depth: int) -> None:
    if depth > DEEPEST:
        raise BadValue(f"lists and maps are at most {DEEPEST} deep")
    if value is None:
        parts.append(b"\xf6")
    elif value is True or value is False:
        parts.append(b"\xf5" if value else b"\xf4")
    elif type(value) is int:
        if not -(1 << 64) <= value < 1 << 64:
            raise BadValue(f"integers have at most 64 bits: {value} has more")
        parts.append(_start(0, value) if value >= 0 else _start(1, -1 - value))
    elif isinstance(value, CID):
        parts.append(_LINK + value)
    elif isinstance(value, bytes):
        parts += (_start(2, len(value)), value)
    elif isinstance(value, str):
        try:
            text = value.encode()
        except UnicodeEncodeError:
            raise BadValue(f"{excerpt(value)} is no text that UTF-8 can hold") from None
        parts += (_start(3, len(text)), text)
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise BadValue(f"{value} is no number that can be recorded")
        parts.append(b"\xfb" + struct.pack(">d", value))
    elif isinstance(value, list | tuple):
        parts.append(_start(4, len(value)))
        for each in value:
            _write(each, parts, depth + 1)
    elif isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise BadValue("the keys of a map are text")
        parts.append(_start(5, len(value)))
        for key in sorted(value, key=lambda key: (len(key.encode()), key.encode())):
            _write(key, parts, depth + 1)
            _write(value[key], parts, depth + 1)
    else:
        raise BadValue(f"a {type(value).__name__} cannot be recorded")


def _start(major: int, number: int) -> bytes:
    if number < 24:
        return bytes((major << 5 | number,))
    size = 0 if number < 1 << 8 else 1 if number < 1 << 16 else 2 if number < 1 << 32 else 3
    return bytes((major << 5 | 24 + size,)) + number.to_bytes(1 << size, "big")


def decode(data: bytes) -> Value:
    """What `encode` wrote; all else is refused."""
    try:
        value, end = _read(data, 0, 0)
    except (IndexError, struct.error):
        raise Refused("is cut short") from None
    except UnicodeDecodeError:
        raise Refused("holds text that is not UTF-8") from None
    # What was read beyond the end was read short, and shows here at the latest.
    if end != len(data):
        raise Refused("is cut short" if end > len(data) else f"has {len(data) - end} bytes too many")
    return value


def _read(data: bytes, at: int, depth: int) -> tuple[Value, int]:
    first = data[at]
    major, number = first >> 5, first & 31
    at += 1
    if major == 7:
        if first == 0xF6:
            return None, at
        if first == 0xF4 or first == 0xF5:
            return first == 0xF5, at
        if first != 0xFB:
            raise Refused("holds a float of less than 64 bits, or something that DAG-CBOR does not know")
        [value] = struct.unpack_from(">d", data, at)
        if not math.isfinite(value):
            raise Refused(f"holds {value}, which is no number")
        return value, at + 8
    if number >= 24:
        if number > 27:
            raise Refused("leaves a length open")
        size = 1 << number - 24
        number = int.from_bytes(data[at : at + size], "big")
        at += size
        if number < 24 or (size > 1 and number >> (size << 2) == 0):
            raise Refused("holds a number that is not written in its shortest form")
    if major == 3:
        return data[at : at + number].decode(), at + number
    if major == 2:
        return data[at : at + number], at + number
    if major == 6:
        if data[at - 2 : at + 3] != _LINK:
            raise Refused("holds a tag that is no link")
        return CID(data[at + 3 : at + 39]), at + 39
    if major == 0:
        return number, at
    if major == 1:
        return -1 - number, at
    if depth >= DEEPEST:
        raise Refused(f"has lists and maps more than {DEEPEST} deep")
    if number > len(data):
        raise Refused("is cut short")
    if major == 4:
        items = []
        for _ in range(number):
            value, at = _read(data, at, depth + 1)
            items.append(value)
        return items, at
    found: dict[str, Value] = {}
    before = b""
    for _ in range(number):
        begin = at
        if 0x60 <= (first := data[at]) < 0x78:  # most keys are short: no call for them
            at += first - 0x5F
            key = data[begin + 1 : at].decode()
        else:
            key, at = _read(data, at, depth + 1)
            if type(key) is not str:
                raise Refused("has a map with keys that are no text")
        # What stands before a longer text is greater too, so the order of keys is that of their bytes in CBOR.
        if (place := data[begin:at]) <= before:
            raise Refused("has a map whose keys are out of order, or twice the same")
        before = place
        found[key], at = _read(data, at, depth + 1)
    return found, at
