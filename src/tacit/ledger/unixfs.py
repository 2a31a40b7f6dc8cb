"""Large weights as blocks, in the form in which IPFS keeps files: raw leaves under nodes of DAG-PB.

A file of more than a mebibyte is cut into leaves of that size. A node lists its children: the address of each, how many
bytes of the file are below it, and how many bytes of blocks. A node has at most 1,024 children, so a large file has
several levels, and the address of the topmost node is that of the whole. This is what IPFS calls the profile
unixfs-v1-2025, so other programs give the same file the same address, and read ours. A smaller file is one raw block.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from tacit.errors import Refused
from tacit.ledger.cbor import CID, DAG_PB, RAW

LEAF, WIDTH = 1 << 20, 1 << 10
LARGEST_BLOCK = 2 << 20
"""Bytes of a block that peers hand on to each other."""
LEAST = 1 << 12
"""Bytes below a child that has others behind it: a file of countless tiny blocks is a trap."""
FILE = 2
"""What a node says that it is."""


@dataclass(frozen=True, slots=True)
class Child:
    """One of a node's: its address, bytes of the file below it, bytes of all blocks below it."""

    cid: CID
    size: int
    total: int


def blocks_of(data: bytes, leaf: int = LEAF, width: int = WIDTH) -> Iterator[tuple[CID, bytes]]:
    """All blocks of a file with their addresses; the last one is that of the whole."""
    view = memoryview(data)
    level: list[Child] = []
    for at in range(0, max(1, len(data)), leaf):
        piece = bytes(view[at : at + leaf])
        level.append(Child(CID.of(piece, RAW), len(piece), len(piece)))
        yield level[-1].cid, piece
    while len(level) > 1:
        above = []
        for at in range(0, len(level), width):
            children = level[at : at + width]
            block = encode_node(children)
            below = len(block) + sum(each.total for each in children)
            above.append(Child(CID.of(block, DAG_PB), sum(each.size for each in children), below))
            yield above[-1].cid, block
        level = above


def address_of(data: bytes) -> CID:
    """The address of a file."""
    [(cid, _)] = deque(blocks_of(data), maxlen=1)
    return cid


def span(size: int) -> int:
    """Bytes of a file of this size that are below each child of its topmost node, but for the last one."""
    part = LEAF
    while part * WIDTH < size:
        part *= WIDTH
    return part


def children_of(block: bytes, size: int, part: int) -> list[Child]:
    """A node's children, with `part` bytes of the file's `size` below each but the last; refused if it has others.

    Whoever could choose what is below each could give one file countless addresses, and countless tiny blocks.
    """
    children = decode_node(block)
    sizes = [min(part, size - at) for at in range(0, size, part)]
    codec = RAW if part == LEAF else DAG_PB
    if [each.size for each in children] != sizes or any(each.cid.codec != codec for each in children):
        raise Refused("is not cut as a file of this size is")
    return children


def encode_node(children: list[Child]) -> bytes:
    """The one form of a node."""
    parts = []
    for each in children:
        link = _field(1, bytes(each.cid)) + _field(2, b"") + _number(3, each.total)
        parts.append(_field(2, link))
    sizes = b"".join(_number(4, each.size) for each in children)
    parts.append(_field(1, _number(1, FILE) + _number(3, sum(each.size for each in children)) + sizes))
    return b"".join(parts)


def decode_node(block: bytes) -> list[Child]:
    """A node's children. Refused: what is written in another form, or is no node of a file."""
    links: list[tuple[CID, int]] = []
    sizes: list[int] = []
    for tag, value in _fields(block):
        if tag == 2 and isinstance(value, bytes):
            link = dict(_fields(value))
            cid, total = link.get(1), link.get(3)
            if not isinstance(cid, bytes) or not isinstance(total, int):
                raise Refused("is no node of a file: a link is not whole")
            links.append((CID(cid), total))
        elif tag == 1 and isinstance(value, bytes):
            sizes += [number for field, number in _fields(value) if field == 4 and isinstance(number, int)]
    if not links or len(links) != len(sizes) or any(cid.codec not in (RAW, DAG_PB) for cid, _ in links):
        raise Refused("is no node of a file")
    children = [Child(cid, size, total) for (cid, total), size in zip(links, sizes, strict=True)]
    if any(each.size < LEAST for each in children[:-1]) or children[-1].size < 1:
        raise Refused("has children with next to nothing below them")
    if encode_node(children) != block:
        raise Refused("is not written in the one form that a node has")
    return children


def varint(number: int) -> bytes:
    """A number in groups of seven bits, the lowest first."""
    found = bytearray()
    while number > 127:
        found.append(number & 127 | 128)
        number >>= 7
    return bytes((*found, number))


def _field(tag: int, data: bytes) -> bytes:
    return bytes((tag << 3 | 2,)) + varint(len(data)) + data


def _number(tag: int, number: int) -> bytes:
    return bytes((tag << 3,)) + varint(number)


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Fields of a protocol buffer: numbers, and strings of bytes."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, at = _varint(data, at)
        if key & 7 == 0:
            yield key >> 3, number
        elif key & 7 == 2 and at + number <= len(data):
            yield key >> 3, data[at : at + number]
            at += number
        else:
            raise Refused("is no node of a file: a field is cut short, or of another kind")


def _varint(data: bytes, at: int) -> tuple[int, int]:
    number = 0
    for shift in range(0, 64, 7):
        if at >= len(data):
            break
        number |= (data[at] & 127) << shift
        at += 1
        if data[at - 1] < 128:
            return number, at
    raise Refused("is no node of a file: a number is cut short, or too long")
