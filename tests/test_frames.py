"""Graphs from pandas' frames and back."""

from __future__ import annotations

import sys

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tacit
from strategies import graphs, names
from tacit import BadInput, Graph, TacitError
from tacit.graph import NO_GROUP, SPLITS, Split, assemble

ALL = {"split": "split", "confidential": "confidential", "group": "group"}


def back(graph: Graph) -> Graph:
    frame = graph.to_pandas()
    return Graph.from_pandas(frame, **{role: name for role, name in ALL.items() if name in frame})


@given(graphs())
def test_what_goes_out_comes_back(graph):
    frame = graph.to_pandas()
    assert list(frame.columns) == ["head", "relation", "tail", "split"]
    assert list(frame[["head", "relation", "tail"]].itertuples(index=False, name=None)) == [
        triple for split in SPLITS for triple in graph.named(split)
    ]
    assert back(graph) == graph


@given(graphs(), st.floats(0.1, 1), st.sampled_from(["head", "relation", "tail"]))
def test_marks_and_groups_come_back(graph, share, part):
    marked = tacit.mark(graph, tacit.select(graph, share=share))
    assert back(marked) == marked
    if marked.statements.confidential is not None:
        grouped = tacit.group(marked, part)
        assert back(grouped) == grouped
        assert ("group" in grouped.to_pandas()) == (grouped.statements.group is not None)


@given(st.lists(st.tuples(names, names, names, st.booleans(), st.none() | names, st.sampled_from(SPLITS)), max_size=20))
def test_a_frame_makes_the_graph_that_its_rows_are(rows):
    """Against `assemble`, fed by a plain loop; groups follow the triple, as they must."""
    group_of = {}
    rows = [(*row[:4], group_of.setdefault(row[:3], row[4]), row[5]) for row in rows]
    frame = pd.DataFrame(rows, columns=["from", "is", "to", "secret", "who", "part"], dtype=object)
    made = Graph.from_pandas(
        frame, head="from", relation="is", tail="to", confidential="secret", group="who", split="part"
    )
    known = sorted({name for h, r, t, _, group, _ in rows for name in (h, r, t, group) if name is not None})
    place = {name: i for i, name in enumerate(known)} | {None: NO_GROUP}
    splits = {}
    for split in SPLITS:
        here = [row for row in rows if row[5] == split]
        triples = np.array([[place[name] for name in row[:3]] for row in here], np.int32).reshape(-1, 3)
        marks, groups = np.array([row[3] for row in here], bool), np.array([place[row[4]] for row in here], np.int32)
        splits[split] = Split(triples, marks, groups)
    assert made == assemble(known, splits)[0]


def test_kinds_of_columns_do_not_matter():
    plain = Graph.from_triples([("a", "r", "b"), ("b", "r", "c")])
    frame = pd.DataFrame({"head": ["b", "a"], "relation": "r", "tail": ["c", "b"], "more": [1, 2]}, index=[7, 7])
    for kind in ("category", object, "string"):
        assert Graph.from_pandas(frame.astype({"head": kind, "relation": kind, "tail": kind})) == plain
    assert len(Graph.from_pandas(frame[:0]).train) == 0


GOOD = {"head": ["a", "b"], "relation": ["r", "r"], "tail": ["b", "c"]}


@pytest.mark.parametrize(
    ("column", "values", "told"),
    [
        ("head", ["a", None], "row 1, column 'head': found nothing (NaN or None); expected the name of a head"),
        ("relation", [np.nan, "r"], "row 0, column 'relation': found nothing"),
        ("tail", ["b", pd.NA], "row 1, column 'tail': found nothing"),
        ("tail", ["b", 3], "row 1, column 'tail': found '3', which is no text but of the type int"),
        ("head", [["a"], "b"], "row 0, column 'head'"),
        ("head", ["a", ""], "row 1, column 'head': found an empty field"),
        ("head", ["a", "x\ty"], "row 1, column 'head': found the control character U+0009"),
        ("head", [1, 2], "2 of the frame's 2 rows cannot be read"),
        ("confidential", [True, None], "row 1, column 'confidential': found nothing"),
        ("confidential", [True, "no"], "row 1, column 'confidential': found \"'no'\"; expected True or False"),
        ("confidential", [1, 0], "row 0, column 'confidential': found '1'"),
        ("group", ["g", 7], "row 1, column 'group': found '7', which is no text"),
        ("group", ["g", ""], "row 1, column 'group': found an empty field; expected the name of a group, or nothing"),
        ("split", ["train", "dev"], "row 1, column 'split': found \"'dev'\"; expected train, valid or test"),
        ("split", ["train", None], "row 1, column 'split': found nothing"),
    ],
)
def test_faults_are_told_with_their_row(column, values, told):
    frame = pd.DataFrame(GOOD | {column: pd.Series(values, dtype=object)}, index=[0, 1])
    with pytest.raises(BadInput) as error:
        Graph.from_pandas(frame, **{column: column})
    assert told in str(error.value)
    assert "counted from 0" in str(error.value)


def test_faults_are_counted_and_stand_in_the_order_of_rows():
    frame = pd.DataFrame({"head": ["a"] * 300, "relation": ["r"] * 299 + [None], "tail": [None] + [5] * 299})
    with pytest.raises(BadInput) as error:
        Graph.from_pandas(frame)
    assert error.value.total == 301
    assert [problem.file for problem in error.value.problems[:2]] == ["row 0, column 'tail'", "row 1, column 'tail'"]
    assert "... and 293 more" in str(error.value)


def test_a_column_that_is_not_there_or_there_twice():
    frame = pd.DataFrame(GOOD)
    with pytest.raises(
        BadInput, match=r"no column 'object', which tail is to be read from.\nIt has: 'head', 'relation'"
    ):
        Graph.from_pandas(frame, tail="object")
    with pytest.raises(BadInput, match="2 columns 'head'"):
        Graph.from_pandas(pd.concat([frame, frame[["head"]]], axis=1))
    with pytest.raises(ValueError, match="not list"):
        Graph.from_pandas([("a", "r", "b")])


def test_a_statement_in_two_groups_is_refused():
    frame = pd.DataFrame({"head": ["a", "a"], "relation": ["r", "r"], "tail": ["b", "b"], "group": ["g", "h"]})
    with pytest.raises(BadInput, match="different groups"):
        Graph.from_pandas(frame, group="group")


def test_without_pandas_it_is_said_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(TacitError, match=r"pip install \"tacit-kg\[pandas\]\""):
        Graph.from_triples([("a", "r", "b")]).to_pandas()
