"""What answers a mapping's queries: DuckDB for files, SQLite, a PostgreSQL server. Each can read, and nothing else."""

from __future__ import annotations

import glob
import logging
import os
import re
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Protocol

import pyarrow as pa

from tacit.errors import BadInput, TacitError
from tacit.files.lines import DECOMPRESSORS, bare, reading
from tacit.sources.mapping import postgres_uri

LOG = logging.getLogger(__name__)
BATCH = 1 << 16
QUERY = re.compile(r"(\s|--[^\n]*(\n|$)|/\*.*?\*/|\()*(select|with|values|table)\b", re.IGNORECASE | re.DOTALL)


class Source(Protocol):
    """Something that answers a query with batches of rows."""

    def batches(self, query: str) -> Iterator[pa.RecordBatch]:
        """The rows of a query; whatever goes wrong is raised as `TacitError`."""

    def close(self) -> None: ...


def open_source(where: str, base: Path, separator: str = ",") -> closing[Source]:
    """Open what a mapping or the command line names; relative paths are relative to `base`."""
    if (uri := postgres_uri(where)) is not None:
        return closing(Postgres(uri))
    path = base / where
    if path.is_dir():
        return closing(Tables(path, separator))
    if path.is_file():
        return closing(Sqlite(path))
    raise BadInput(f"{path}: no such folder of tables or SQLite file.", hint="Say where the data are with --source.")


def one_query(query: str) -> str:
    """The query without a final semicolon; anything but a query is refused before it gets near a database."""
    if not QUERY.match(query):
        raise TacitError("found a command; expected a query: SELECT, WITH, VALUES or TABLE.")
    return query.rstrip().rstrip(";").rstrip()


class Tables:
    """CSV, TSV and Parquet files of a folder, each a table named after its file, by DuckDB.

    How a file is laid out is said, not guessed: a guess that skips a line or eats a quote loses data without a word.
    Compressed files are unpacked by our own reader, which knows a cut-off file from a whole one, and only when a query
    asks for them.
    """

    def __init__(self, folder: Path, separator: str):
        import duckdb

        self._files: dict[str, Path] = {}
        for file in sorted(folder.iterdir()):
            name = bare(file)
            if name.suffix.lower() not in (".csv", ".tsv", ".parquet") or not file.is_file():
                continue
            if (table := name.stem.lower()) in self._files:
                raise BadInput(
                    f"{folder}: found {self._files[table].name} and {file.name} for one table; expected one."
                )
            self._files[table] = file
        self._error, self._separator = duckdb.Error, separator
        self._scratch = tempfile.TemporaryDirectory(prefix="tacit-")
        self._connection = duckdb.connect(":memory:", config={"autoinstall_known_extensions": "false"})
        self._connection.execute(f"SET temp_directory = {_text(self._scratch.name)}")
        self._connection.execute("SET python_enable_replacements = false")

    def batches(self, query: str) -> Iterator[pa.RecordBatch]:
        query = one_query(query)
        try:
            kinds = [statement.type.name for statement in self._connection.extract_statements(query)]
            if kinds != ["SELECT"]:
                raise TacitError(f"found {' and '.join(kinds) or 'nothing'}; expected one query.")
            for name in sorted(self._connection.get_table_names(query)):
                if file := self._files.pop(name.lower(), None):
                    self._view(name.lower(), file)
            yield from self._connection.sql(query).to_arrow_reader(BATCH)
        except (self._error, pa.ArrowException, OSError) as error:
            raise TacitError(_one_line(error)) from None

    def _view(self, table: str, file: Path) -> None:
        kind, source = bare(file).suffix.lower(), file
        if file.suffix.lower() in DECOMPRESSORS:
            source = Path(self._scratch.name) / bare(file).name
            with reading(file) as packed, open(source, "wb") as plain:
                shutil.copyfileobj(packed, plain, 1 << 20)
        place = _text(glob.escape(str(source)))
        read = f"read_parquet({place})"
        if kind != ".parquet":
            quote = _text('"' if kind == ".csv" else "")
            between = _text(self._separator if kind == ".csv" else "\t")
            layout = f"delim = {between}, quote = {quote}, escape = {quote}, comment = '', skip = 0"
            read = f"read_csv({place}, all_varchar = true, header = true, {layout})"
        name = table.replace('"', '""')
        try:
            self._connection.execute(f'CREATE VIEW "{name}" AS SELECT * FROM {read}')
        except self._error as error:
            raise TacitError(f"{file}: cannot be read as a table: {_one_line(error)}") from None

    def close(self) -> None:
        self._connection.close()
        self._scratch.cleanup()


class Sqlite:
    """An SQLite file, by SQLite itself, which is allowed to select and to read, and nothing else."""

    ALLOWED = (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE)

    def __init__(self, file: Path):
        self._connection = sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro", uri=True)
        try:
            self._connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        except sqlite3.Error as error:
            self._connection.close()
            raise BadInput(f"{file}: cannot be read as an SQLite file: {_one_line(error)}") from None
        self._connection.set_authorizer(
            lambda action, *_: sqlite3.SQLITE_OK if action in self.ALLOWED else sqlite3.SQLITE_DENY
        )

    def batches(self, query: str) -> Iterator[pa.RecordBatch]:
        try:
            cursor = self._connection.execute(one_query(query))
            names = [column[0] for column in cursor.description]
            while rows := cursor.fetchmany(BATCH):
                columns = [
                    pa.array([_sqlite_text(value) for value in column], pa.string())
                    for column in zip(*rows, strict=True)
                ]
                yield pa.RecordBatch.from_arrays(columns, names)
        except sqlite3.Error as error:
            raise TacitError(_one_line(error)) from None

    def close(self) -> None:
        self._connection.close()


class Postgres:
    """A PostgreSQL server, by ADBC, in one read-only transaction that is never committed.

    All queries see the same state of the data. Beyond that, give the job a role that may only read.
    """

    def __init__(self, uri: str):
        from adbc_driver_manager import Error
        from adbc_driver_postgresql import dbapi

        self._error = Error
        try:
            self._connection = dbapi.connect(uri)
            with self._connection.cursor() as cursor:
                cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
        except Error as error:
            raise BadInput(
                f"PostgreSQL: {_one_line(error)}",
                hint="Where and who comes from PGHOST, PGPORT, PGDATABASE, PGUSER, PGPASSWORD, PGSERVICE or ~/.pgpass.",
            ) from None

    def batches(self, query: str) -> Iterator[pa.RecordBatch]:
        try:
            with self._connection.cursor() as cursor:
                cursor.execute(one_query(query))
                yield from cursor.fetch_record_batch()
        except (self._error, pa.ArrowException, OSError) as error:
            raise TacitError(_one_line(error)) from None

    def close(self) -> None:
        try:
            self._connection.close()
        except self._error as error:  # the server is gone already; what it sent before was dealt with
            LOG.debug("closing the connection: %s", type(error).__name__)


def _text(value: str) -> str:
    """A text as SQL writes it."""
    return "'" + value.replace("'", "''") + "'"


def _sqlite_text(value: object) -> str | None:
    """A value as text; what has no one spelling is for the query to spell."""
    if isinstance(value, float | bytes):
        kind = "number with a fraction" if isinstance(value, float) else "blob"
        raise TacitError(f"found a {kind} in the result; expected text or whole numbers: CAST it AS TEXT in the query.")
    return None if value is None else str(value)


def _one_line(error: BaseException) -> str:
    """What an engine says, cut to its first line: what follows may quote the data."""
    text = (str(error).strip().splitlines() or [type(error).__name__])[0].strip()
    secret = os.environ.get("PGPASSWORD", "")
    if len(secret) > 5:
        text = text.replace(secret, "***")
    return text if text.endswith((".", "!", "?")) else f"{text}."
