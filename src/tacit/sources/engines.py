"""What answers a mapping's queries: DuckDB for files, SQLite, a PostgreSQL server."""

from __future__ import annotations

import logging
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa

from tacit.errors import BadInput, TacitError
from tacit.files.lines import bare, reading
from tacit.sources.mapping import POSTGRESQL

LOG = logging.getLogger(__name__)
BATCH = 1 << 16


class Source(Protocol):
    """Something that answers a query with batches of rows."""

    def batches(self, query: str) -> Iterator[pa.RecordBatch]:
        """The rows of a query; whatever goes wrong is raised as `TacitError`."""


class _Tables:
    """CSV and Parquet files of a folder, each a table named after its file, by DuckDB."""

    def __init__(self, folder: Path, scratch: Path):
        import duckdb

        self._error = duckdb.Error
        self._connection = duckdb.connect(":memory:", config={"autoinstall_known_extensions": "false"})
        self._connection.execute(f"SET temp_directory = '{_quoted(scratch)}'")
        for file in sorted(folder.iterdir()):
            suffix = bare(file).suffix.lower()
            if suffix not in (".csv", ".tsv", ".parquet") or not file.is_file():
                continue
            name = bare(file).stem.lower()
            if suffix != ".parquet" and file.suffix.lower() in (".xz", ".bz2"):  # what DuckDB does not decompress
                file = _unpacked(file, scratch)
            read = f"read_csv('{_quoted(file)}', all_varchar = true, header = true)"
            if suffix == ".parquet":
                read = f"read_parquet('{_quoted(file)}')"
            try:
                self._connection.execute(f'CREATE VIEW "{name.replace(chr(34), chr(34) * 2)}" AS SELECT * FROM {read}')
            except self._error as error:
                raise BadInput(f"{file}: cannot be read as a table: {_first_line(error)}") from None

    def batches(self, query: str) -> Iterator[pa.RecordBatch]:
        try:
            kinds = [statement.type.name for statement in self._connection.extract_statements(query)]
            if kinds != ["SELECT"]:
                raise TacitError(f"found {' and '.join(kinds) or 'nothing'}; expected one query.")
            yield from self._connection.sql(query).to_arrow_reader(BATCH)
        except (self._error, pa.ArrowException) as error:
            raise TacitError(_first_line(error)) from None

    def close(self) -> None:
        self._connection.close()


class _Sqlite:
    """An SQLite file, by SQLite itself, opened to be read only."""

    def __init__(self, file: Path):
        self._connection = sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro", uri=True)

    def batches(self, query: str) -> Iterator[pa.RecordBatch]:
        try:
            cursor = self._connection.execute(query)
            names = [column[0] for column in cursor.description or ()]
            while rows := cursor.fetchmany(BATCH):
                columns = [
                    pa.array([None if v is None else str(v) for v in column], pa.string())
                    for column in zip(*rows, strict=True)
                ]
                yield pa.RecordBatch.from_arrays(columns, names)
        except sqlite3.Error as error:
            raise TacitError(str(error)) from None

    def close(self) -> None:
        self._connection.close()


class _Postgres:
    """A PostgreSQL server, by ADBC; one read-only transaction, so that all queries see the same state."""

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
                f"PostgreSQL: {_first_line(error)}",
                hint="Where and who comes from PGHOST, PGPORT, PGDATABASE, PGUSER, PGPASSWORD, PGSERVICE or ~/.pgpass.",
            ) from None

    def batches(self, query: str) -> Iterator[pa.RecordBatch]:
        try:
            with self._connection.cursor() as cursor:
                cursor.execute(query)
                yield from cursor.fetch_record_batch()
        except (self._error, pa.ArrowException, OSError) as error:
            raise TacitError(_first_line(error)) from None

    def close(self) -> None:
        try:
            self._connection.close()
        except self._error as error:  # the server is gone already; what it sent before was dealt with
            LOG.debug("closing the connection: %s", type(error).__name__)


def _quoted(path: Path) -> str:
    return str(path).replace("'", "''")


def _unpacked(file: Path, scratch: Path) -> Path:
    target = scratch / bare(file).name
    with reading(file) as packed, open(target, "wb") as plain:
        shutil.copyfileobj(packed, plain, 1 << 20)
    return target


def _first_line(error: BaseException) -> str:
    """What an engine says, in one line, without any secret that it might quote."""
    text = " ".join(str(error).split("\n\n")[0].split())
    for name in ("PGPASSWORD",):
        if secret := os.environ.get(name):
            text = text.replace(secret, "***")
    return text if text.endswith(".") else f"{text}."


@contextmanager
def open_source(where: str, base: Path) -> Iterator[Source]:
    """Open what a mapping or the command line names as its source; relative paths are relative to `base`."""
    if where.startswith(POSTGRESQL):
        source: Any = _Postgres(where if "://" in where else "postgresql://")
    else:
        path = base / where
        if path.is_dir():
            with tempfile.TemporaryDirectory(prefix="tacit-") as scratch:
                tables = _Tables(path, Path(scratch))
                try:
                    yield tables
                finally:
                    tables.close()
            return
        if not path.is_file():
            raise BadInput(
                f"{path}: no such folder of tables or SQLite file.", hint="Say where the data are with --source."
            )
        source = _Sqlite(path)
    try:
        yield source
    finally:
        source.close()
