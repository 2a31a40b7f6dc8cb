"""TSV and CSV in: one statement per row, in columns found by name or position.

The common case is fast: a block of whole lines is searched for separators and line feeds, and if these alternate as
they must (so many columns, then a line feed), the fields go to the encoder as they lie. Any other block is taken line
by line, so that every row is read or rejected with its line number. A CSV file is read by Python's `csv` from the first
block on that holds a quote.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
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
ALIASES = {
    "head": "head",
    "subject": "head",
    "source": "head",
    "relation": "relation",
    "predicate": "relation",
    "tail": "tail",
    "object": "tail",
    "target": "tail",
    "confidential": "confidential",
    "group": "group",
}
EXPECTED = {role: f"the name of a {role}" for role in ROLES} | {"confidential": "true or false"}
TRUTH = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
LINE_FEED = 0x0A
BATCH = 1 << 16


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


def find_layout(first: Sequence[str], columns: Sequence[str | int] | None, place: str) -> Layout:
    """The layout that the first row and the user's `columns` (names, or positions from 1) give."""
    if columns is None:
        found = {ALIASES[name]: i for i, field in enumerate(first) if (name := field.strip().lower()) in ALIASES}
        if not {"head", "relation", "tail"} <= found.keys():
            return Layout(3, {"head": 0, "relation": 1, "tail": 2}, header=False)
        ignored = tuple(field for i, field in enumerate(first) if i not in found.values())
        return Layout(len(first), found, True, ignored)
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
        return Layout(len(first), dict(zip(ROLES, positions, strict=False)), header=False)
    names = [field.strip() for field in first]
    if missing := [str(column) for column in columns if column not in names]:
        raise BadInput(
            f"{place}: found the columns {excerpt(', '.join(names), 200)}; expected also {', '.join(missing)}.",
            hint="Columns can be given by their names in the first row, or by their positions from 1.",
        )
    positions = [names.index(str(column)) for column in columns]
    ignored = tuple(name for i, name in enumerate(names) if i not in positions)
    return Layout(len(first), dict(zip(ROLES, positions, strict=False)), True, ignored)


def read_delimited(
    path: Path, split: SplitName, *, separator: str, columns: Sequence[str | int] | None = None
) -> RawFile:
    """Read one file. A comma-separated file may quote its fields; in any other a quote is a character like the rest."""
    if len(separator.encode()) != 1 or separator in '\n\r"':
        raise BadInput(
            f"The separator is {excerpt(separator)}.", hint="It has to be a single character such as a tab or a comma."
        )
    reader = _Reader(path, separator, columns)
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
        elif reader.quotes(block):
            rest = chain([block], (block for block, _ in stream))
            reader.quoted(
                (line.decode("utf-8", "surrogateescape") + "\n" for b in rest for line in b.lines()), block.line
            )
        else:
            reader.line_by_line(block)
    return reader.finish(split)


class _Reader:
    """The state of reading one file."""

    def __init__(self, path: Path, separator: str, columns: Sequence[str | int] | None):
        self.path, self.separator, self.columns = path, separator, columns
        self.byte = separator.encode()
        self.encoder, self.faults, self.lines = Encoder(), Faults(path), LineNumbers()
        self.layout = Layout(3, dict(zip(ROLES[:3], range(3), strict=True)), header=False)
        self.header_line = 0

    def begin(self, block: Block) -> bool:
        """Learn the layout from the first row of the file; False if the block is blank."""
        for number, line in enumerate(block.lines(), block.line):
            if not self.blank(line):
                text = line.decode("utf-8", "surrogateescape")
                first = next(csv.reader([text])) if self.quotes(block) else text.split(self.separator)
                self.layout = find_layout(first, self.columns, f"{self.path}:{number}")
                self.header_line = number if self.layout.header else 0
                return True
        return False

    def blank(self, line: bytes) -> bool:
        """Whether a line holds no row: nothing but blanks, not even a separator."""
        return not line.strip() and self.byte not in line

    def quotes(self, block: Block) -> bool:
        """Whether fields of the block may be quoted."""
        return self.separator == "," and block.data.find(b'"', 0, block.end) >= 0

    def encode(self, block: Block) -> tuple[Block, pa.DictionaryArray | None]:
        """The fields of a block, if each of its lines is a well-formed row. Runs in a thread, changes nothing here."""
        if block.line <= self.header_line or self.quotes(block):
            return block, None
        data, width = np.frombuffer(block.data, np.uint8, block.end), self.layout.width
        found = data == LINE_FEED
        found |= data == self.byte[0]
        ends = np.flatnonzero(found)
        marks, rows = data[ends] == LINE_FEED, len(ends) // width
        if len(ends) % width or np.count_nonzero(marks) != rows or np.count_nonzero(marks[width - 1 :: width]) != rows:
            return block, None
        if self.separator == ",":
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

    def line_by_line(self, block: Block) -> None:
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

    def quoted(self, lines: Iterator[str], first: int) -> None:
        """Read CSV records with quotes from line `first` to the end of the file."""
        records = csv.reader(lines, delimiter=self.separator, strict=True)
        batch: list[str] = []
        numbers: list[int] = []
        while True:
            number = first + records.line_num
            try:
                record = next(records, None)
            except csv.Error as error:
                self.faults.reject(number, f"broken quoting ({error})", "fields in plain text or in double quotes")
                continue
            if record is None or len(numbers) == BATCH:
                self.encoder.add(batch)
                self.lines.add(numbers)
                batch, numbers = [], []
            if record is None:
                return
            if len(record) < 2 and not "".join(record).strip():
                continue
            if number != self.header_line and self._fits(
                len(record), number, self.separator.join(record).encode("utf-8", "surrogateescape")
            ):
                batch += [record[i] for i in self.layout.roles.values()]
                numbers.append(number)

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
            problems=tuple(sorted(self.faults.problems, key=lambda problem: problem.line or 0)),
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
