"""Bytes in from any file: compression undone, cut at line ends."""

from __future__ import annotations

import bz2
import io
import lzma
import sys
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from tacit.errors import BadInput

BLOCK = 4 << 20
LONGEST_LINE = 16 << 20
BOMS = {b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}


def _zstd() -> Any:
    if sys.version_info >= (3, 14):
        from compression import zstd
    else:
        from backports import zstd
    return zstd


DECOMPRESSORS: dict[str, Callable[[], Any]] = {
    ".gz": lambda: zlib.decompressobj(wbits=31),
    ".xz": lzma.LZMADecompressor,
    ".bz2": bz2.BZ2Decompressor,
    ".zst": lambda: _zstd().ZstdDecompressor(),
}


def bare(path: Path) -> Path:
    """The file's path without the ending of its compression."""
    return path.with_suffix("") if path.suffix.lower() in DECOMPRESSORS else path


class Decompressed(io.RawIOBase):
    """A compressed file as plain bytes, to its very end.

    Python's own readers take damage after a first complete stream for padding and stop there without a word; here every
    byte has to belong to a stream, and every stream has to be complete.
    """

    def __init__(self, path: Path, make: Callable[[], Any]):
        self._file, self._make = path.open("rb"), make
        self._stream: Any = None
        self._ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, view: Any) -> int:
        while not self._ready:
            if not (packed := self._unused() or self._file.read(1 << 16)):
                if self._stream is not None:
                    raise EOFError("it ends in the middle of the compressed data")
                return 0
            if self._stream is None:
                self._stream = self._make()
            self._ready = self._stream.decompress(packed)
        count = min(len(view), len(self._ready))
        view[:count], self._ready = self._ready[:count], self._ready[count:]
        return count

    def _unused(self) -> bytes:
        """What followed the stream that has just ended; zero bytes between streams are padding."""
        if self._stream is None or not self._stream.eof:
            return b""
        left, self._stream = self._stream.unused_data, None
        return bytes(left.lstrip(b"\0"))

    def close(self) -> None:
        self._file.close()
        super().close()


@contextmanager
def reading(path: Path) -> Iterator[Any]:
    """The open file, decompressed as its name says; what a missing, broken or cut-off file raises becomes one error."""
    make = DECOMPRESSORS.get(path.suffix.lower())
    broken: tuple[type[BaseException], ...] = (OSError, EOFError, lzma.LZMAError, zlib.error)
    if path.suffix.lower() == ".zst":
        broken += (_zstd().ZstdError,)
    try:
        with Decompressed(path, make) if make else open(path, "rb", buffering=0) as file:
            yield file
    except FileNotFoundError:
        raise BadInput(f"{path}: no such file.") from None
    except broken as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error) or type(error).__name__
        raise BadInput(f"{path}: cannot be read to its end: {reason}.", hint="Is the file complete?") from error


@dataclass(frozen=True)
class Block:
    """Whole lines of a file: `data[:end]` ends with a line feed. `line` is the number of the first, from 1."""

    data: bytearray
    end: int
    line: int

    def lines(self) -> list[bytes]:
        """The lines without their line ends."""
        return bytes(memoryview(self.data)[: self.end - 1]).split(b"\n")


def blocks(path: Path) -> Iterator[Block]:
    """The file in blocks of whole lines; a last line without a line feed gets one, CR LF becomes LF."""
    with reading(path) as file:
        yield from _blocks(file, path, BLOCK)


def _blocks(file: Any, path: Path, size: int) -> Iterator[Block]:
    rest, line = b"", 1
    while True:
        data = bytearray(len(rest) + size)
        data[: len(rest)] = rest
        end = len(rest) + _fill(file, memoryview(data)[len(rest) :])
        last = end < len(data)
        if line == 1 and (encoding := BOMS.get(bytes(data[:2]))):
            raise BadInput(f"{path}:1: found {encoding} text; expected UTF-8.", hint="Save the file as UTF-8.")
        if line == 1 and data.startswith(b"\xef\xbb\xbf"):
            del data[:3]
            end -= 3
        if last and end and data[end - 1] != 0x0A:
            data[end : end + 1] = b"\n"
            end += 1
        cut = data.rfind(b"\n", 0, end) + 1
        rest = bytes(memoryview(data)[cut:end])
        if len(rest) > LONGEST_LINE:
            line += data.count(b"\n", 0, cut)
            raise BadInput(f"{path}:{line}: found a line of more than {LONGEST_LINE >> 20} MiB; is this a text file?")
        if data.find(b"\r", 0, cut) >= 0:  # looking for one byte is ten times as fast as for two
            data = data[:cut].replace(b"\r\n", b"\n")
            cut = len(data)
        if cut:
            lines = int(np.count_nonzero(np.frombuffer(data, np.uint8, cut) == 0x0A))
            yield Block(data, cut, line)
            line += lines
        if last:
            return


def text_lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a file that are not blank, with their numbers; for files small enough to take line by line."""
    for block in blocks(path):
        for number, line in enumerate(block.lines(), block.line):
            if line.strip():
                yield number, line.decode("utf-8", "surrogateescape")


def _fill(file: Any, view: memoryview) -> int:
    """Read until the view is full or the file ends; unbuffered files may return less than asked."""
    total = 0
    while total < len(view):
        count = file.readinto(view[total:])
        if not count:
            break
        total += count
    return total


T = TypeVar("T")
R = TypeVar("R")


def in_threads(work: Callable[[T], R], items: Iterable[T], threads: int = 2) -> Iterator[R]:
    """`map(work, items)`, a few items ahead: work runs in threads while the caller's thread makes the next item."""
    with ThreadPoolExecutor(threads) as executor:
        waiting: deque[Future[R]] = deque()
        for item in items:
            waiting.append(executor.submit(work, item))
            if len(waiting) > threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
