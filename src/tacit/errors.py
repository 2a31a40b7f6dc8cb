"""What went wrong with the user's input, said so that it can be put right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SHOWN = 8
"""How many problems one message lists: it has to fit on one screen."""


@dataclass(frozen=True)
class Problem:
    """One fault in one place: what stands there and what should.

    `found` may quote the user's data. It is for the user's eyes only and never goes into a log.
    """

    file: str
    line: int | None
    found: str
    expected: str

    def __str__(self) -> str:
        place = self.file if self.line is None else f"{self.file}:{self.line}"
        return f"{place}: found {self.found}; expected {self.expected}"


class TacitError(Exception):
    """Base of every error that a user can cause and mend. The command line prints it and exits with 2."""


class Refused(TacitError):
    """Something that came from another and is not taken, with the reason."""


class BadValue(TacitError, ValueError):
    """An argument out of its range."""


class BadInput(TacitError):
    """Data that cannot be read as it stands.

    Parameters
    ----------
    summary
        One sentence that says what is wrong.
    problems
        The first faults found, each with its place.
    total
        How many faults there are in all, when that is more than `problems` holds.
    hint
        What to do about it.
    """

    def __init__(self, summary: str, problems: Sequence[Problem] = (), total: int | None = None, hint: str = ""):
        self.summary = summary
        self.problems = tuple(problems)
        self.total = len(self.problems) if total is None else total
        self.hint = hint
        super().__init__(str(self))

    def __str__(self) -> str:
        lines = [self.summary]
        lines += [f"  {problem}" for problem in self.problems[:SHOWN]]
        if (more := self.total - min(len(self.problems), SHOWN)) > 0:
            lines.append(f"  ... and {more:,} more")
        if self.hint:
            lines.append(self.hint)
        return "\n".join(lines)


def excerpt(text: str, width: int = 60) -> str:
    """`text` quoted, made printable and cut to `width`, for use in a message."""
    return repr(text if len(text) <= width else text[: width - 3] + "...")
