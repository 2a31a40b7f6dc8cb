"""Graphs from pandas' frames and back: a row is a statement."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from tacit.errors import BadInput, BadValue, Problem, TacitError, excerpt
from tacit.graph import NO_GROUP, SPLITS, Graph, Split, SplitName, assemble, name_fault

if TYPE_CHECKING:
    import pandas as pd

KEPT_PROBLEMS = 100
"""How many faults of a frame are told in full; all are counted."""
NOTHING = "nothing (NaN or None)"
EXPECTED = {
    "confidential": "True or False",
    "group": "the name of a group, or nothing",
    "split": f"{', '.join(SPLITS[:-1])} or {SPLITS[-1]}",
}


def read_frame(
    frame: pd.DataFrame,
    *,
    head: str = "head",
    relation: str = "relation",
    tail: str = "tail",
    confidential: str | None = None,
    group: str | None = None,
    split: str | None = None,
) -> Graph:
    """The graph of a frame's rows: see `Graph.from_pandas`."""
    pandas = _pandas()
    if not isinstance(frame, pandas.DataFrame):
        raise BadValue(f"a frame of pandas is expected, not {type(frame).__name__}")
    chosen = {"head": head, "relation": relation, "tail": tail, "confidential": confidential, "group": group,
              "split": split}  # fmt: skip
    columns = {role: _column(frame, role, name) for role, name in chosen.items() if name is not None}
    values: dict[str, list[Any]] = {}
    wrong: list[tuple[int, str, str]] = []
    of_names = _fault_of_names()
    faults = {"confidential": _mark_fault, "split": _split_fault}
    for role, column in columns.items():
        missing, fault = column.isna().tolist(), faults.get(role, of_names)
        values[role] = [None if gone else value for value, gone in zip(column.tolist(), missing, strict=True)]
        for row, value in enumerate(values[role]):
            why = fault(value) if value is not None else None if role == "group" else NOTHING
            if why is not None:
                wrong.append((row, role, why))
    if wrong:
        _refuse(wrong, chosen, len(frame))
    seen: dict[str, int] = {}
    ids = {
        role: np.fromiter((seen.setdefault(str(name), len(seen)) for name in values[role]), np.int32, len(frame))
        for role in ("head", "relation", "tail")
    }
    triples = np.stack([ids["head"], ids["relation"], ids["tail"]], 1)
    marks = np.array(values["confidential"], bool) if "confidential" in values else None
    groups = None
    if "group" in values:
        numbers = (NO_GROUP if name is None else seen.setdefault(str(name), len(seen)) for name in values["group"])
        groups = np.fromiter(numbers, np.int32, len(frame))
    which = np.array(values.get("split", ["train"] * len(frame)), object)
    parts: dict[SplitName, Split] = {}
    for name in SPLITS:
        rows = which == name
        parts[name] = Split(triples[rows], *(None if each is None else each[rows] for each in (marks, groups)))
    return assemble(list(seen), parts)[0]


def make_frame(graph: Graph) -> pd.DataFrame:
    """A frame of a graph's statements: see `Graph.to_pandas`."""
    pandas, whole = _pandas(), graph.statements
    entities, relations = (np.array(vocab.names, object) for vocab in (graph.entities, graph.relations))
    columns: dict[str, Any] = {
        "head": entities[whole.triples[:, 0]],
        "relation": relations[whole.triples[:, 1]],
        "tail": entities[whole.triples[:, 2]],
        "split": np.repeat(np.array(SPLITS, object), [len(part) for part in graph.splits.values()]),
    }
    if whole.confidential is not None:
        columns["confidential"] = whole.confidential
    if whole.group is not None:
        columns["group"] = np.array([*graph.groups, None], object)[whole.group]  # NO_GROUP is the last
    return pandas.DataFrame(columns)


def _pandas() -> Any:
    try:
        import pandas
    except ImportError:
        raise TacitError('Frames need the package pandas: pip install "tacit-kg[pandas]"') from None
    return pandas


def _column(frame: Any, role: str, name: str) -> Any:
    many = list(frame.columns).count(name)
    if many != 1:
        there = "no column" if not many else f"{many} columns"
        known = ", ".join(map(repr, frame.columns))
        raise BadInput(f"the frame has {there} {name!r}, which {role} is to be read from.", hint=f"It has: {known}.")
    return frame[name]


def _fault_of_names() -> Callable[[Any], str | None]:
    """What is wrong with a name, each distinct one looked at once."""
    known: dict[str, str | None] = {}

    def fault(value: Any) -> str | None:
        if not isinstance(value, str):
            return f"{excerpt(repr(value))}, which is no text but of the type {type(value).__name__}"
        if value not in known:
            known[value] = name_fault(value)
        return known[value]

    return fault


def _mark_fault(value: Any) -> str | None:
    return None if isinstance(value, bool | np.bool_) else excerpt(repr(value))


def _split_fault(value: Any) -> str | None:
    return None if isinstance(value, str) and value in SPLITS else excerpt(repr(value))


def _refuse(wrong: list[tuple[int, str, str]], chosen: dict[str, str | None], rows: int) -> None:
    """Say which rows are at fault, the first ones in full."""
    wrong.sort(key=lambda each: each[0])
    problems = [
        Problem(f"row {row}, column {chosen[role]!r}", None, why, EXPECTED.get(role, f"the name of a {role}"))
        for row, role, why in wrong[:KEPT_PROBLEMS]
    ]
    many = len({row for row, _, _ in wrong})
    raise BadInput(
        f"{many:,} of the frame's {rows:,} rows cannot be read.",
        problems,
        len(wrong),
        hint="Rows are counted from 0, as by frame.iloc. Drop or correct them first.",
    )
