"""TSV and CSV in: one statement per row, in columns found by name or position.

The common case is fast: a block of whole lines is searched for separators and line feeds, and if these alternate as
they must (so many columns, then a line feed), the fields go to the encoder as they lie. Any other block is taken line
by line, so that every row is read or rejected with its line number. A CSV file is read by Python's `csv` from the first
block on that holds a quote.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
import pyarrow as pa

from tacit.errors import BadInput, excerpt
from tacit.files.encoder import Encoder, encode_fields
from tacit.files.lines import Block, blocks, in_threads
from tacit.files.records import Faults, FileReading, LineNumbers, RawFile
from tacit.graph import EMPTY, NO_GROUP, Ids, Mask, SplitName

ROLES = ("head", "relation", "tail", "confidential", "group")
ALIASES = {"head": {"subject", "source"}, "relation": {"predicate"}, "tail": {"object", "target"}}
Columns = Sequence[str | int]
"""Head, relation, tail and maybe confidential and group: names in the first row, or positions from 1."""
EXPECTED = {role: f"the name of a {role}" for role in ROLES} | {"confidential": "true or false"}
TRUTH = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
LINE_FEED = 0x0A
BATCH = 1 << 16
LONGEST_RECORD = 100
"""How many lines a quoted record may go over."""


@dataclass(frozen=True)
class Layout:
    """Where the parts of a statement stand.

    Attributes
    ----------
    width
        Number of columns every row must have.
    roles
        The position of head, relation, tail and, where there are such columns, confidential and group.
    header
        Whether the first row holds column names.
    ignored
        Names of columns that are not read.
    """

    width: int
    roles: dict[str, int]
    header: bool
    ignored: tuple[str, ...] = ()


def find_layout(first: Sequence[str], columns: Columns | None, header: bool | None, place: str) -> Layout:
    """The layout that the first row and the user's wishes give; `place` is where that row stands."""
    if columns is None:
        roles = _roles(first, place) if header is not False else None
        if roles is None:
            return Layout(3, dict(zip(ROLES[:3], range(3), strict=True)), header=bool(header))
        ignored = tuple(field for i, field in enumerate(first) if i not in roles.values())
        return Layout(len(first), roles, True, ignored)
    if not 3 <= len(columns) <= len(ROLES) or len(set(columns)) < len(columns):
        raise BadInput(
            f"{len(columns)} columns were asked for ({', '.join(map(str, columns))}).",
            hint=f"Name 3 to 5 different ones, in this order: {', '.join(ROLES)}.",
        )
    if all(isinstance(column, int) for column in columns):
        positions = [int(column) - 1 for column in columns]
        if not all(0 <= position < len(first) for position in positions):
            raise BadInput(
                f"{place}: found {len(first)} columns; expected columns {', '.join(map(str, columns))} (from 1)."
            )
        return Layout(len(first), dict(zip(ROLES, positions, strict=False)), header=bool(header))
    names = [field.strip() for field in first]
    if missing := [str(column) for column in columns if column not in names]:
        raise BadInput(
            f"{place}: found the columns {excerpt(', '.join(names), 200)}; expected also {', '.join(missing)}.",
            hint="Columns can be given by their names in the first row, or by their positions from 1.",
        )
    positions = [names.index(str(column)) for column in columns]
    ignored = tuple(name for i, name in enumerate(names) if i not in positions)
    return Layout(len(first), dict(zip(ROLES, positions, strict=False)), True, ignored)


def _roles(first: Sequence[str], place: str) -> dict[str, int] | None:
    """What the columns are for, if the first row names head, relation and tail.

    "tail" itself goes before another word for it; two columns for one role have to be told apart by the user.
    """
    names = [field.strip().lower() for field in first]
    found: dict[str, list[int]] = {}
    for role in ROLES:
        own = [i for i, name in enumerate(names) if name == role]
        found[role] = own or [i for i, name in enumerate(names) if name in ALIASES.get(role, ())]
    if not all(found[role] for role in ROLES[:3]):
        return None
    for role, places in found.items():
        if len(places) > 1:
            raise BadInput(f"{place}: found {len(places)} columns for the {role}; say which with --columns.")
    return {role: places[0] for role, places in found.items() if places}


def read_delimited(
    path: Path,
    split: SplitName,
    *,
    separator: str,
    quotes: bool,
    columns: Columns | None = None,
    header: bool | None = None,
) -> RawFile:
    """Read one file; only where `quotes` says so can a field be quoted, and a quote is more than a character."""
    if len(separator) != 1 or not separator.isascii() or separator in '\n\r"':
        raise BadInput(
            f"The separator is {excerpt(separator)}.", hint="It has to be a single character such as a tab or a comma."
        )
    reader = _Reader(path, separator, quotes, columns, header)
    source = blocks(path)
    for first in source:
        if reader.begin(first):
            break
    else:
        return reader.finish(split)
    stream = in_threads(reader.encode, chain([first], source))
    for block, batch in stream:
        if batch is not None:
            reader.take(block, batch)
        elif reader.quoted(block):
            reader.take_records(chain([block], (block for block, _ in stream)), block.line)
        else:
            reader.take_lines(block)
    return reader.finish(split)


class _Lines:
    """The lines of blocks, one at a time, with a way back."""

    def __init__(self, source: Iterable[Block]):
        self._lines = (line.decode("utf-8", "surrogateescape") + "\n" for block in source for line in block.lines())
        self._returned: list[str] = []
        self.record: list[str] = []

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        if len(self.record) == LONGEST_RECORD:
            raise StopIteration
        line = self._returned.pop() if self._returned else next(self._lines)
        self.record.append(line)
        return line

    def give_back(self) -> None:
        """All lines of the record but its first are to be read again."""
        self._returned += reversed(self.record[1:])
        del self.record[1:]


class _Reader:
    """The state of reading one file."""

    def __init__(self, path: Path, separator: str, quotes: bool, columns: Columns | None, header: bool | None):
        self.path, self.separator, self.quotes, self.columns, self.header = path, separator, quotes, columns, header
        self.byte = separator.encode()
        self.encoder, self.faults, self.lines = Encoder(), Faults(path), LineNumbers()
        self.layout = Layout(3, dict(zip(ROLES[:3], range(3), strict=True)), header=False)
        self.header_line = 0

    def begin(self, block: Block) -> bool:
        """Learn the layout from the first row of the file; False if the block is blank."""
        for number, line in enumerate(block.lines(), block.line):
            if not self.blank(line):
                text = line.decode("utf-8", "surrogateescape")
                first = text.split(self.separator)
                if self.quoted(block):
                    with suppress(csv.Error):  # said when the row is read
                        first = next(csv.reader([text], delimiter=self.separator, strict=True))
                self.layout = find_layout(first, self.columns, self.header, f"{self.path}:{number}")
                self.header_line = number if self.layout.header else 0
                return True
        return False

    def blank(self, line: bytes) -> bool:
        """Whether a line holds no row: nothing but blanks, not even a separator."""
        return not line.strip() and self.byte not in line

    def quoted(self, block: Block) -> bool:
        """Whether fields of the block may be quoted."""
        return self.quotes and block.data.find(b'"', 0, block.end) >= 0

    def encode(self, block: Block) -> tuple[Block, pa.DictionaryArray | None]:
        """The fields of a block, if each of its lines is a well-formed row. Runs in a thread, changes nothing here."""
        if block.line <= self.header_line or self.quoted(block):
            return block, None
        data, width = np.frombuffer(block.data, np.uint8, block.end), self.layout.width
        found = data == LINE_FEED
        found |= data == self.byte[0]
        ends = np.flatnonzero(found)
        marks, rows = data[ends] == LINE_FEED, len(ends) // width
        if len(ends) % width or np.count_nonzero(marks) != rows or np.count_nonzero(marks[width - 1 :: width]) != rows:
            return block, None
        if self.quotes:
            data = data.copy()  # a quote in an earlier block may still ask for this one's lines
        data[ends] = LINE_FEED
        used, keep = list(self.layout.roles.values()), None
        if used != list(range(width)):
            keep = (np.arange(0, len(ends), width)[:, None] + np.array(used)).reshape(-1)
        return block, encode_fields(data, ends, keep)

    def take(self, block: Block, batch: pa.DictionaryArray) -> None:
        """Take over the rows of a well-formed block."""
        self.encoder.add_batch(batch)
        self.lines.add(range(block.line, block.line + len(batch) // len(self.layout.roles)))

    def take_lines(self, block: Block) -> None:
        """Read a block that holds the header, or lines that are blank or malformed."""
        kept: list[bytes] = []
        numbers: list[int] = []
        for number, line in enumerate(block.lines(), block.line):
            if (
                number != self.header_line
                and not self.blank(line)
                and self._fits(line.count(self.byte) + 1, number, line)
            ):
                kept.append(line)
                numbers.append(number)
        if kept:
            text = bytearray(b"\n".join(kept) + b"\n")
            _, batch = self.encode(Block(text, len(text), self.header_line + 1))
            assert batch is not None
            self.encoder.add_batch(batch)
            self.lines.add(numbers)

    def _fits(self, width: int, number: int, line: bytes) -> bool:
        if width == self.layout.width:
            return True
        name = {"\t": "tabs", ",": "commas", " ": "spaces"}.get(self.separator, repr(self.separator))
        text = excerpt(line[:200].decode("utf-8", "backslashreplace"))
        columns = "1 column" if width == 1 else f"{width} columns"
        self.faults.reject(number, f"{columns}, {text}", f"{self.layout.width} columns separated by {name}")
        return False

    def take_records(self, source: Iterable[Block], first: int) -> None:
        """Read CSV records with quotes from line `first` to the end of the file.

        A record may go over several lines. One that is broken costs its first line only: a quote that nobody closed
        does not swallow what follows.
        """
        lines = _Lines(source)
        records = csv.reader(lines, delimiter=self.separator, strict=True)
        batch: list[str] = []
        numbers: list[int] = []
        number = first
        while True:
            lines.record.clear()
            fault = ""
            try:
                record = next(records, None)
            except csv.Error as error:
                record, fault = [], f"a record that is no CSV ({error})"
            if record is None or len(numbers) == BATCH:
                self.encoder.add(batch)
                self.lines.add(numbers)
                batch, numbers = [], []
            if record is None:
                return
            if fault or len(record) != self.layout.width:
                lines.give_back()
            line = lines.record[0].encode("utf-8", "surrogateescape").rstrip(b"\n")
            if fault:
                self.faults.reject(number, fault, "fields in plain text or in double quotes")
            elif number != self.header_line and not self.blank(line) and self._fits(len(record), number, line):
                batch += [record[i] for i in self.layout.roles.values()]
                numbers.append(number)
            number += len(lines.record)

    def finish(self, split: SplitName) -> RawFile:
        """Check the distinct names, drop the rows that have a faulty one, and give an account."""
        roles = list(self.layout.roles)
        names, faulty, ids = self.encoder.finish(len(roles))
        rows, good = len(ids) + self.faults.rejected, np.ones(len(ids), bool)
        column = {role: ids[:, place] for place, role in enumerate(roles)}
        for role in ROLES[:3]:
            self._reject(column[role], role, faulty, good)
        confidential: Mask | None = None
        group: Ids | None = None
        if "confidential" in column:
            truth = {i: TRUTH.get(names[i].as_py().strip().lower()) for i in np.unique(column["confidential"]).tolist()}
            strange = {i: excerpt(names[i].as_py()) for i, value in truth.items() if value is None}
            self._reject(column["confidential"], "confidential", strange | faulty, good)
            confidential = np.isin(column["confidential"], [i for i, value in truth.items() if value])[good]
        if "group" in column:
            blank = [i for i, fault in faulty.items() if fault == EMPTY]
            self._reject(column["group"], "group", {i: faulty[i] for i in faulty if i not in blank}, good)
            group = np.where(np.isin(column["group"], blank), NO_GROUP, column["group"])[good]
        triples = ids if roles == list(ROLES[:3]) else np.stack([column[role] for role in ROLES[:3]], 1)
        reading = FileReading(
            str(self.path),
            split,
            rows,
            self.faults.rejected,
            header=self.layout.header,
            problems=self.faults.by_line(),
            notes=tuple(f"column {name!r} is not read" for name in self.layout.ignored),
        )
        return RawFile(names, triples if good.all() else triples[good], reading, confidential, group)

    def _reject(self, column: Ids, role: str, faulty: dict[int, str], good: Mask) -> None:
        """Reject the rows, good until now, that have a faulty name in this column."""
        if not faulty:
            return
        wrong = np.flatnonzero(np.isin(column, list(faulty)) & good)
        good[wrong] = False
        self.faults.reject_all(
            (line, f"{faulty[int(column[row])]} as {role}", EXPECTED[role])
            for row, line in zip(wrong.tolist(), self.lines.of(wrong), strict=True)
        )
