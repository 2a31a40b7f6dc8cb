"""What a reader hands over, and its account of every row it met."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tacit.errors import BadInput, Problem
from tacit.graph import Ids, Mask, SplitName

KEPT_PROBLEMS = 100
"""How many problems of a file are kept in full; all are counted."""


@dataclass(frozen=True)
class FileReading:
    """The account of one file: rows == kept + duplicates + rejected, always.

    A row is a line or record that should hold a statement: not a blank line, a comment or the header.
    """

    file: str
    split: SplitName
    rows: int
    rejected: int
    duplicates: int = 0
    header: bool = False
    problems: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def kept(self) -> int:
        return self.rows - self.rejected - self.duplicates


@dataclass(frozen=True)
class Reading:
    """What reading a graph's files found."""

    files: tuple[FileReading, ...]

    @property
    def rows(self) -> int:
        return sum(file.rows for file in self.files)

    @property
    def rejected(self) -> int:
        return sum(file.rejected for file in self.files)

    @property
    def duplicates(self) -> int:
        return sum(file.duplicates for file in self.files)

    def refuse(self) -> None:
        """Raise `BadInput` if any row was rejected."""
        if not self.rejected:
            return
        places = [file.file for file in self.files if file.rejected]
        rows = "1 row" if self.rejected == 1 else f"{self.rejected:,} of {self.rows:,} rows"
        hint = "Correct the file, or leave such rows out with --skip-bad (Python: bad_rows='skip')."
        if self.rejected == self.rows:
            rows, hint = "none of its rows", "Is this the right file, and are its columns separated as expected?"
        problems = [problem for file in self.files for problem in file.problems]
        verb = "cannot" if self.rejected < self.rows else "can"
        raise BadInput(f"{', '.join(places)}: {rows} {verb} be read.", problems, self.rejected, hint=hint)

    def with_duplicates(self, repeats: Mapping[SplitName, int]) -> Reading:
        return Reading(tuple(replace(file, duplicates=repeats[file.split]) for file in self.files))


class Faults:
    """Collects what is wrong with a file's rows while it is read."""

    def __init__(self, path: Path):
        self.path = path
        self.problems: list[Problem] = []
        self.rejected = 0

    def reject(self, line: int | None, found: str, expected: str) -> None:
        """One row is not read."""
        self.rejected += 1
        if len(self.problems) < KEPT_PROBLEMS:
            self.problems.append(Problem(str(self.path), line, found, expected))

    def by_line(self) -> tuple[Problem, ...]:
        return tuple(sorted(self.problems, key=lambda problem: problem.line or 0))

    def reject_all(self, rows: Iterable[tuple[int | None, str, str]]) -> None:
        """Several rows, each with its line, what was found and what was expected."""
        for row in rows:
            self.reject(*row)


@dataclass(frozen=True)
class RawFile:
    """A file's rows with its own numbering of names, before files are joined into a graph."""

    names: pa.Array
    triples: Ids
    reading: FileReading
    confidential: Mask | None = None
    group: Ids | None = None
    rdf: bool = False
    """Whether names are RDF terms in N-Triples form, still to be made readable under the graph's prefixes."""
    prefixes: Mapping[str, str] = field(default_factory=dict)


class LineNumbers:
    """The line of every row, kept as runs: rows nearly always stand on consecutive lines."""

    def __init__(self) -> None:
        self._runs: list[Iterable[int]] = []

    def add(self, lines: Iterable[int]) -> None:
        self._runs.append(lines)

    def of(self, rows: npt.NDArray[np.intp]) -> Any:
        runs = [np.asarray(run, np.int64) for run in self._runs]
        return np.concatenate([np.empty(0, np.int64), *runs])[rows].tolist()
