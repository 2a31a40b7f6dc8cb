"""Databases in: relational data become a knowledge graph by a declarative mapping (as in DPKGE, Han et al. 2022).

A mapping is a TOML file. Each of its entries is a SQL query, and templates that make head, relation and tail out of the
query's columns:

    schema = "tacit.mapping/1"
    source = "tables/"                       # a folder of CSV and Parquet files, an SQLite file, or "postgresql"

    [split]                                  # by a public coin: a hash of the triple's names
    valid = 0.1
    test = 0.1

    [[statements]]
    query = "SELECT hadm_id, icd9_code FROM diagnoses_icd"
    head = "admission: {hadm_id}"
    relation = "has diagnosis"
    tail = "ICD-9 diagnosis: {icd9_code}"
    confidential = true
    group = "admission: {hadm_id}"           # statements that belong together

A row with a NULL, or an empty text, in a column that a template uses says nothing; it is skipped and counted. Columns
of CSV files are text, as they stand there: the code 0389 does not become the number 389.

Queries run where the data are: DuckDB for CSV and Parquet, SQLite's own engine for SQLite, the server for PostgreSQL
(through ADBC, in one read-only transaction). Rows arrive in batches and become ids at once, so memory grows with the
graph and not with the tables. Credentials come from the environment or a service file, and from nowhere else.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tacit.draws import philox
from tacit.errors import BadInput, Problem, TacitError
from tacit.files.encoder import END, Encoder, unite
from tacit.files.records import KEPT_PROBLEMS
from tacit.graph import NO_GROUP, SPLITS, Graph, Ids, Split, assemble
from tacit.sources.engines import BATCH, open_source
from tacit.sources.mapping import COLUMN, PARTS, GraphMapping, Statements, read_mapping

__all__ = ["Entry", "GraphMapping", "Imported", "Statements", "import_graph", "public_coin", "read_mapping"]

LOG = logging.getLogger(__name__)
COMPACT = 1 << 20
SHOWN_ROWS = 3


@dataclass
class Entry:
    """The account of one entry: rows == kept + nulls + duplicates + rejected, always."""

    place: str
    confidential: bool
    rows: int = 0
    nulls: int = 0
    """Rows without a value that a template needs."""
    duplicates: int = 0
    """Rows that say what an earlier row of the same entry said."""
    rejected: int = 0
    """Rows that give a name that cannot be."""
    first: list[tuple[str, ...]] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    @property
    def kept(self) -> int:
        return self.rows - self.nulls - self.duplicates - self.rejected


@dataclass(frozen=True)
class Imported:
    """A graph and the account of how it came about."""

    graph: Graph
    entries: tuple[Entry, ...]
    said_by_several: int
    """Statements that more than one entry made, counted once for each beyond the first."""


HEAD, RELATION, TAIL, GROUP, ENTRY = range(5)


class _Collector:
    """Rows as they come in: names to ids, repeats left out as they pile up.

    However often a table repeats a statement, memory stays within a few times what the distinct rows take.
    """

    def __init__(self) -> None:
        self.encoder = Encoder()
        self.rows = np.empty((0, 5), np.int32)
        """Distinct rows: head, relation, tail and group by id, and the entry they come from."""
        self.times = np.empty(0, np.int64)
        """How often each has come."""
        self._waiting: list[tuple[int, bool, int]] = []
        self._waiting_rows = 0

    def add(self, columns: Mapping[str, pa.Array], entry: int) -> None:
        """Columns of head, relation, tail and maybe group, without NULLs."""
        for part in PARTS:
            if part in columns:
                closed = pc.binary_join_element_wise(columns[part], "", END.decode()).cast(pa.binary())
                self.encoder.add_batch(closed.dictionary_encode())
        self._waiting.append((len(columns["head"]), "group" in columns, entry))
        self._waiting_rows += len(columns["head"])
        if self._waiting_rows > max(len(self.rows), COMPACT):
            self.compact()

    def compact(self) -> None:
        """Take what waits among the rows, each once."""
        flat, start, total = self.encoder.take(), 0, len(self.rows)
        rows = np.empty((total + self._waiting_rows, 5), np.int32)
        rows[:total] = self.rows
        times = np.concatenate([self.times, np.ones(self._waiting_rows, np.int64)])
        for size, grouped, entry in self._waiting:
            target = rows[total : total + size]
            target[:, GROUP], target[:, ENTRY] = NO_GROUP, entry
            for column in range(3 + grouped):
                target[:, column] = flat[start : start + size]
                start += size
            total += size
        del flat
        self._waiting, self._waiting_rows = [], 0
        # Any order that puts equal rows side by side will do; two packed keys sort faster than four plain ones.
        ends = rows[:, HEAD].astype(np.int64) << 32 | rows[:, TAIL]
        order = np.lexsort((rows[:, GROUP], rows[:, RELATION].astype(np.int64) << 32 | rows[:, ENTRY], ends))
        del ends
        rows = rows[order]
        first = np.flatnonzero(np.concatenate([[True], (rows[1:] != rows[:-1]).any(axis=1)])[: len(rows)])
        self.rows, self.times = rows[first], np.add.reduceat(times[order], first) if len(first) else times


def import_graph(
    mapping: GraphMapping,
    source: str | None = None,
    *,
    skip_bad: bool = False,
    progress: Callable[[int, int, int], None] = lambda entry, entries, rows: None,
) -> Imported:
    """Run a mapping's queries and make a graph of what they say.

    Parameters
    ----------
    mapping
        As `read_mapping` gives it.
    source
        Where the data are; default: what the mapping says.
    skip_bad
        Leave out rows whose names cannot be (blank, control characters), and count them; otherwise they are an error.
    progress
        Called with (entry, number of entries, rows so far).
    """
    where = source if source is not None else mapping.source
    base = Path() if source is not None else mapping.file.parent
    if not where:
        raise BadInput(f"{mapping.file}: it names no source.", hint="Say where the data are with --source.")
    collector = _Collector()
    entries = [Entry(statements.place, statements.confidential) for statements in mapping.statements]
    total = 0
    with open_source(where, base, mapping.separator) as opened:
        for number, (statements, entry) in enumerate(zip(mapping.statements, entries, strict=True)):
            try:
                for batch in opened.batches(statements.query):
                    columns = _apply(statements, batch, entry)
                    collector.add(columns, number)
                    total += batch.num_rows
                    progress(number, len(entries), total)
            except TacitError as error:
                raise BadInput(f"{statements.place}: {error}") from None
            LOG.info("entry %d of %d: %d rows, %d with a NULL", number + 1, len(entries), entry.rows, entry.nulls)
    graph, repeats = _graph(mapping, collector, entries, skip_bad)
    return Imported(graph, tuple(entries), repeats)


def _apply(statements: Statements, batch: pa.RecordBatch, entry: Entry) -> dict[str, pa.Array]:
    """The columns that the templates make of a batch; rows with a NULL are left out, and counted."""
    made = {part: _fill(template, batch) for part, template in statements.templates().items()}
    good = pc.is_valid(made["head"])
    for column in made.values():
        good = pc.and_(good, pc.is_valid(column))
    kept = {part: column.filter(good) for part, column in made.items()}
    entry.rows += batch.num_rows
    entry.nulls += batch.num_rows - len(kept["head"])
    if (missing := SHOWN_ROWS - len(entry.first)) > 0:
        entry.first += zip(*(kept[part].slice(0, missing).to_pylist() for part in PARTS[:3]), strict=True)
    return kept


def _fill(template: str, batch: pa.RecordBatch) -> pa.Array:
    """A template with its columns filled in; NULL where one of them is."""
    pieces: list[Any] = []
    for place, text in enumerate(COLUMN.split(template)):
        if place % 2 == 0:
            pieces += [pa.scalar(text)] if text else []
            continue
        if (times := batch.schema.names.count(text)) != 1:
            found = ", ".join(batch.schema.names)
            wanted = f"also {text!r}, which a template uses" if not times else f"{text!r} once"
            raise TacitError(f"found the columns {found} in the query's result; expected {wanted}.")
        pieces.append(_text(batch.column(text), text))
    if not any(isinstance(piece, pa.Array) for piece in pieces):
        return pa.array([template], pa.string()).take(pa.array(np.zeros(batch.num_rows, np.int32)))
    return pc.binary_join_element_wise(*pieces, "", null_handling="emit_null")


def _text(column: pa.Array, name: str) -> pa.Array:
    """A column as text, an empty one being no value; what has no one spelling (a float, a list) is for the query."""
    if isinstance(column, pa.ExtensionArray) and pa.types.is_string(column.storage.type):  # PostgreSQL's numeric
        column = column.storage
    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    types = pa.types
    plain = (
        types.is_string,
        types.is_large_string,
        types.is_integer,
        types.is_boolean,
        types.is_date,
        types.is_decimal,
    )
    if types.is_null(kind):
        return pa.nulls(len(column), pa.string())
    if not any(fits(kind) for fits in plain):
        asked = "expected text or whole numbers: CAST it AS VARCHAR in the query"
        raise TacitError(f"found the type {kind} in column {name!r}; {asked}.")
    text = column.cast(pa.string())
    if types.is_date(kind) and pc.any(pc.starts_with(text, "<")).as_py():
        raise TacitError(f"found a date beyond all calendars in column {name!r}; expected none.")
    return pc.if_else(pc.equal(text, ""), pa.scalar(None, pa.string()), text)


def _graph(mapping: GraphMapping, collector: _Collector, entries: list[Entry], skip_bad: bool) -> tuple[Graph, int]:
    """The graph of all rows, and how many statements of it more than one entry made."""
    collector.compact()
    names, faulty, _ = collector.encoder.finish(1)
    rows = _good_rows(mapping, collector, faulty, entries, skip_bad)
    marks = np.array([entry.confidential for entry in entries])[rows[:, ENTRY]]
    texts, rank, _ = unite([names])
    part = public_coin(texts, rows[:, :3], mapping.coin, (mapping.valid, mapping.test))
    grouped = bool((rows[:, GROUP] != NO_GROUP).any())
    splits = {}
    for number, split in enumerate(SPLITS):
        here = rows[part == number]
        splits[split] = Split(here[:, :3], marks[part == number], here[:, GROUP] if grouped else None)
    del rows
    graph, repeats = assemble(texts, splits, rank=rank, checked=True)
    return graph, sum(repeats.values())


def _good_rows(
    mapping: GraphMapping, collector: _Collector, faulty: Mapping[int, str], entries: list[Entry], skip_bad: bool
) -> Ids:
    """The rows whose names can be; every row that came is accounted for in its entry."""
    rows, times = collector.rows, collector.times
    collector.rows = np.empty((0, 5), np.int32)
    bad = np.isin(rows[:, :ENTRY], list(faulty)).any(axis=1) if faulty else np.zeros(len(rows), bool)
    repeats = np.bincount(rows[~bad, ENTRY], times[~bad] - 1, len(entries))
    rejects = np.bincount(rows[bad, ENTRY], times[bad], len(entries))
    for entry, again, rejected in zip(entries, repeats.tolist(), rejects.tolist(), strict=True):
        entry.duplicates, entry.rejected = int(again), int(rejected)
    for row in rows[bad][:KEPT_PROBLEMS].tolist():
        fault = next(faulty[name] for name in row[:ENTRY] if name in faulty)
        entries[row[ENTRY]].problems.append(
            Problem(entries[row[ENTRY]].place, None, f"{fault} in a name", "plain text")
        )
    if bad.any() and not skip_bad:
        raise BadInput(
            f"{mapping.file}: {int(times[bad].sum()):,} rows give names that cannot be.",
            [problem for entry in entries for problem in entry.problems],
            int(times[bad].sum()),
            hint="Clean them up in the query (TRIM, REPLACE), or leave them out with --skip-bad.",
        )
    if bad.all():
        raise BadInput(f"{mapping.file}: its queries gave no statement.")
    return rows[~bad] if bad.any() else rows


def public_coin(names: Sequence[str], triples: Ids, coin: str, shares: tuple[float, float]) -> npt.NDArray[np.int8]:
    """0, 1 or 2 (train, valid, test) for each triple: a function of its names and the public coin alone.

    So new rows never move old ones, a triple falls the same way at every party, and which split it falls into says
    nothing about what else is in the data. Each name is hashed once (BLAKE2b); a triple's number is Philox with head
    and tail as its counter and the relation as its key.
    """
    key = hashlib.blake2b(coin.encode(), digest_size=32).digest()
    digests = b"".join(hashlib.blake2b(name.encode(), digest_size=8, key=key).digest() for name in names)
    words = np.frombuffer(digests, "<u4").reshape(-1, 2).astype(np.int64)
    part = np.empty(len(triples), np.int8)
    edges = np.cumsum(shares)
    for start in range(0, len(triples), BATCH):
        h, r, t = triples[start : start + BATCH].T
        counter = (words[h, 0], words[h, 1], words[t, 0], words[t, 1])
        first, second, _, _ = philox(counter, (words[r, 0], words[r, 1]))
        uniform = ((first << 21) | (second >> 11)).astype(np.float64) * 2.0**-53
        part[start : start + BATCH] = np.where(uniform < edges[0], 1, np.where(uniform < edges[1], 2, 0))
    return part
