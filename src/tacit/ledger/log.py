"""The order in which records were published: entries that are only ever added.

A log keeps bytes and promises nothing about them: whatever is in it is verified by whoever reads it. What everybody
shares is the order, because a name is given to who came first, and a committee is drawn after so many updates. Behind
this interface may be a file, as here, or a stream of a message broker, or a chain.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tacit.errors import BadInput, TacitError

MARK, VERSION = 0x7AC17106, 1
"""What SQLite's header says of such a file."""
WAIT = 30.0
"""Seconds to wait for another process that writes."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One place in a log. `name`: the address under which it was put there, as text."""

    position: int
    name: str
    data: bytes


class Log(Protocol):
    """Where records are, in order."""

    def append(self, entries: Sequence[tuple[str, bytes]]) -> int:
        """Add names and bytes, all or none, at the end; they are kept when this returns. The place of the first."""
        ...

    def read(self, start: int = 0) -> Iterator[Entry]:
        """All entries from a place on, in order. A place that is left out was deleted."""
        ...


class BegunLog(Log, Protocol):
    """A log that is not made with its folder."""

    def begin(self, name: str, data: bytes) -> None:
        """Add the genesis as the first entry; refused if there is another one."""
        ...


class SqliteLog:
    """A log in one file of SQLite. Several processes may read and write it; an entry is there whole or not at all."""

    def __init__(self, path: Path, *, create: bool = False):
        self.path = Path(path)
        if create == self.path.exists():
            raise TacitError(
                f"{path}: exists already." if create else f"{path}: no such file: the ledger is not whole."
            )
        with self._open() as base:
            if create:
                self._make(base)
            marks = [base.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version")]
        if marks[0] != MARK:
            raise BadInput(f"{path}: is no log of a ledger.")
        if marks[1] > VERSION:
            hint = "A newer tacit reads it: pip install --upgrade tacit-kg"
            raise BadInput(f"{path}: was written by a newer tacit.", hint=hint)

    def _make(self, base: sqlite3.Connection) -> None:
        base.execute("BEGIN IMMEDIATE")
        base.execute("CREATE TABLE entries (position INTEGER PRIMARY KEY, name TEXT NOT NULL, data BLOB NOT NULL)")
        for what in ("UPDATE", "DELETE"):  # against mistakes; whoever means to can drop them, and is found out
            base.execute(
                f"CREATE TRIGGER no_{what.lower()} BEFORE {what} ON entries "
                "BEGIN SELECT RAISE(ABORT, 'a log is only added to'); END"
            )
        base.execute(f"PRAGMA application_id = {MARK}")
        base.execute(f"PRAGMA user_version = {VERSION}")
        base.execute("COMMIT")

    def append(self, entries: Sequence[tuple[str, bytes]]) -> int:
        with self._open() as base:
            base.execute("BEGIN IMMEDIATE")  # closing without COMMIT takes all of it back
            [first] = base.execute("SELECT COALESCE(MAX(position) + 1, 0) FROM entries").fetchone()
            rows = ((first + at, name, data) for at, (name, data) in enumerate(entries))
            base.executemany("INSERT INTO entries VALUES (?, ?, ?)", rows)
            base.execute("COMMIT")
        return int(first)

    def read(self, start: int = 0) -> Iterator[Entry]:
        with self._open() as base:
            found = base.execute(
                "SELECT position, name, data FROM entries WHERE position >= ? ORDER BY position", (start,)
            )
            for position, name, data in found:
                yield Entry(position, str(name), data if isinstance(data, bytes) else str(data).encode())

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        try:
            base = sqlite3.connect(self.path, timeout=WAIT, isolation_level=None)
            try:
                base.execute("PRAGMA synchronous = FULL")
                yield base
            finally:
                base.close()
        except sqlite3.OperationalError as error:
            raise TacitError(f"{self.path}: {error}.") from None
        except (sqlite3.DatabaseError, OverflowError) as error:
            raise BadInput(f"{self.path}: is no whole log of a ledger ({error}).") from None
