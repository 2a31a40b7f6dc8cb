"""Marking and grouping against plain Python."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategies import graphs, plain_triples
from tacit import BadInput, Graph, TacitError, read_graph, write_graph
from tacit.graph import NO_GROUP, SPLITS, UnknownName
from tacit.marking import confidential_share, group, mark, marked_per_relation, select
from test_cli import tacit


def rows(graph):
    return [triple for split in SPLITS for triple in graph.named(split)]


def marked(graph):
    marks = graph.statements.confidential
    return set() if marks is None else {triple for triple, mark in zip(rows(graph), marks, strict=True) if mark}


@given(
    graphs(plain_triples), st.sampled_from("rst"), st.sampled_from(["e[0-3]", "^e1$", "z"]), st.sampled_from(["e", "7"])
)
def test_relations_and_patterns_mean_what_they_say(graph, relation, head, tail):
    chosen = select(graph, match={"head": head, "tail": tail})
    expected = {t for t in rows(graph) if re.search(head, t[0]) and re.search(tail, t[2])}
    assert marked(mark(graph, chosen)) == expected
    if relation in graph.relations:
        by_relation = mark(graph, select(graph, relations=[relation]))
        assert marked(by_relation) == {t for t in rows(graph) if t[1] == relation}
        assert marked(mark(by_relation, chosen)) == expected | marked(by_relation)
        assert marked(mark(by_relation, chosen, fresh=True)) == expected


@given(graphs(plain_triples), st.data())
def test_a_list_of_triples_marks_these(graph, data):
    wanted = data.draw(st.lists(st.sampled_from(rows(graph)), min_size=1))
    assert marked(mark(graph, select(graph, triples=wanted))) == set(wanted)


@given(graphs(plain_triples), st.floats(0, 1), st.integers(0, 99))
def test_a_share_marks_so_many_statements_and_follows_its_seed(graph, share, seed):
    first, again = (mark(graph, select(graph, share=share, seed=seed)) for _ in range(2))
    assert len(marked(first)) == round(share * len(set(rows(graph))))
    assert first == again


def test_seeds_mark_differently():
    graph = Graph.from_triples([(f"e{i}", "r", "x") for i in range(100)])
    assert marked(mark(graph, select(graph, share=0.5, seed=1))) != marked(
        mark(graph, select(graph, share=0.5, seed=2))
    )


@given(graphs(plain_triples), st.sampled_from(["head", "relation", "tail"]))
def test_groups_follow_a_part_of_the_statement(graph, part):
    everything = mark(graph, np.ones(len(rows(graph)), bool))
    grouped = group(everything, part)
    place = ("head", "relation", "tail").index(part)
    for triple, number in zip(rows(grouped), grouped.statements.group, strict=True):
        assert grouped.groups[number] == triple[place]
    assert marked(grouped) == marked(everything)


def test_groups_by_what_a_pattern_finds(tmp_path):
    statements = [
        ("patient 7 street", "is", "x"),
        ("patient 7 town", "is", "y"),
        ("patient 8 town", "is", "y"),
        ("z", "is", "y"),
    ]
    graph = Graph.from_triples([*statements, ("patient 9 town", "was", "y")])
    grouped = group(mark(graph, select(graph, relations=["is"])), "head", r"(patient \d+)")
    names = ["-" if i == NO_GROUP else grouped.groups[i] for i in grouped.statements.group]
    assert dict(zip((h for h, _, _ in rows(grouped)), names, strict=True)) == {
        "patient 7 street": "patient 7",
        "patient 7 town": "patient 7",
        "patient 8 town": "patient 8",
        "patient 9 town": "-",
        "z": "-",
    }
    write_graph(grouped, tmp_path / "g")
    assert read_graph(tmp_path / "g") == grouped


def test_several_patterns_for_one_part_all_count():
    graph = Graph.from_triples([("ab", "r", "x"), ("a", "r", "x"), ("b", "r", "x")])
    assert marked(mark(graph, select(graph, match=[("head", "a"), ("head", "b")]))) == {("ab", "r", "x")}


def test_what_is_no_longer_confidential_is_in_no_group():
    graph = Graph.from_triples([("a", "r", "x"), ("b", "s", "x")])
    grouped = group(mark(graph, select(graph, share=1.0)), "head")
    fresh = mark(grouped, select(grouped, relations=["s"]), fresh=True)
    assert list(fresh.groups) == ["b"]
    assert fresh.statements.group.tolist() == [NO_GROUP, 0]
    assert mark(grouped, np.zeros(2, bool), fresh=True) == graph


def test_counts_and_share():
    graph = Graph.from_triples([("a", "r", "b"), ("a", "r", "c"), ("a", "s", "b")], test=[("a", "s", "d")])
    done = mark(graph, select(graph, relations=["s"]))
    assert marked_per_relation(done) == [
        {"relation": "r", "statements": 2, "confidential": 0},
        {"relation": "s", "statements": 2, "confidential": 2},
    ]
    assert confidential_share(done) == 0.5
    assert confidential_share(graph) == 0.0


def test_what_is_not_there_cannot_be_marked():
    graph = Graph.from_triples([("aspirin", "treats", "pain")])
    with pytest.raises(UnknownName, match="Did you mean 'treats'"):
        select(graph, relations=["treat"])
    with pytest.raises(BadInput, match="1 of 2 triples are not in the graph"):
        select(graph, triples=[("aspirin", "treats", "pain"), ("pain", "treats", "aspirin")])
    with pytest.raises(TacitError, match="no regular expression"):
        select(graph, match={"head": "("})
    with pytest.raises(TacitError, match="head, a relation and a tail"):
        select(graph, match={"colour": "x"})
    with pytest.raises(TacitError, match="from 0 to 1"):
        select(graph, share=1.5)
    with pytest.raises(TacitError, match="come as a list"):
        select(graph, relations="treats")
    with pytest.raises(TacitError, match="expected three names"):
        select(graph, triples=[("aspirin", "treats")])
    with pytest.raises(TacitError, match="a seed is"):
        select(graph, share=0.5, seed=-1)
    with pytest.raises(TacitError, match="one truth value for each of the 1 statements"):
        mark(graph, np.array([0]))
    with pytest.raises(TacitError, match="none is marked"):
        group(graph, "head")


@pytest.mark.slow
def test_the_command_shows_what_it_marks_and_then_writes(tmp_path):
    (tmp_path / "graph.tsv").write_text("p1\thas\tflu\np2\thas\tflu\nflu\tis a\tdisease\n")
    (tmp_path / "list.tsv").write_text("flu\tis a\tdisease\n")
    look = tacit("data", "mark", "graph.tsv", "--relation", "has", "--dry-run", cwd=tmp_path)
    assert "66.7% of the statements are confidential" in look.stdout
    assert not (tmp_path / "marked").exists()
    call = ("data", "mark", "graph.tsv", "--match", "head=^p", "--group", "head", "--out", "marked")
    tacit(*call, cwd=tmp_path)
    graph = read_graph(tmp_path / "marked")
    assert marked(graph) == {("p1", "has", "flu"), ("p2", "has", "flu")}
    assert list(graph.groups) == ["p1", "p2"]
    more = ("data", "mark", "marked", "--triples", "list.tsv", "--out", "all", "--json")
    found = json.loads(tacit(*more, cwd=tmp_path).stdout)
    assert found["confidential_share"] == 1.0
    assert len(marked(read_graph(tmp_path / "all"))) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "Say what to mark"),
        (["--relation", "hs"], "Did you mean 'has'"),
        (["--match", "p1"], "expected head=REGEX"),
        (["--relation", "has", "--group", "head="], "expected head=REGEX"),
        (["--relation", "has", "--dry-run"], "--dry-run writes nothing"),
        (["--match", "colour=x"], "head, a relation and a tail"),
        (["--share", "2"], "from 0 to 1"),
        (["--triples", "absent.tsv"], "no such file"),
        (["--group", "head"], "none is marked"),
    ],
)
def test_mistakes_in_marking(tmp_path, options, message):
    (tmp_path / "graph.tsv").write_text("p1\thas\tflu\n")
    done = tacit("data", "mark", "graph.tsv", *options, "--out", "o", cwd=tmp_path, code=2)
    assert message in " ".join(done.stderr.split())
    assert not (tmp_path / "o").exists()
