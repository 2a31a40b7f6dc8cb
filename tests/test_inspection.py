"""Inspection against counts made with Python sets and loops."""

from __future__ import annotations

import statistics as plain

from hypothesis import given
from hypothesis import strategies as st

from strategies import graphs, plain_triples
from tacit import Graph, inspect, inspection
from tacit.graph import SPLITS

few = st.tuples(st.sampled_from("abcd"), st.sampled_from("rst"), st.sampled_from("abcd"))


def everything(graph):
    return [triple for split in SPLITS for triple in graph.named(split)]


@given(graphs(plain_triples))
def test_counts_equal_slow_counts(graph):
    seen = inspect(graph)
    train = set(graph.named("train"))
    in_train = {x for h, _, t in train for x in (h, t)}
    assert seen.triples == {split: len(set(graph.named(split))) for split in SPLITS}
    assert seen.unseen_entities == len(set(graph.entities) - in_train)
    for split in ("valid", "test"):
        rows = list(graph.named(split))
        assert seen.unseen_rows[split] == sum(not {h, t} <= in_train for h, _, t in rows)
        assert seen.repeated[f"{split} in train"] == len(train & set(rows))
    assert seen.repeated["test in valid"] == len(set(graph.named("test")) & set(graph.named("valid")))
    degrees = [sum((h == e) + (t == e) for h, _, t in everything(graph)) for e in graph.entities]
    assert seen.degree == {
        "mean": plain.fmean(degrees),
        "median": plain.median(degrees),
        "max": max(degrees),
        "once": degrees.count(1),
    }
    assert seen.self_loops == sum(h == t for h, _, t in everything(graph))


@given(graphs(plain_triples))
def test_the_relation_table_equals_a_slow_one(graph):
    table = inspect(graph).relation_table
    sizes = [row.train + row.valid + row.test for row in table]
    assert sizes == sorted(sizes, reverse=True)
    assert {row.name for row in table} == set(graph.relations)
    for row in table:
        rows = [(h, t) for h, r, t in everything(graph) if r == row.name]
        assert row.train == sum(r == row.name for _, r, _ in graph.named("train"))
        assert (row.heads, row.tails) == (len({h for h, _ in rows}), len({t for _, t in rows}))
        many_heads, many_tails = len(rows) / row.tails >= 1.5, len(rows) / row.heads >= 1.5
        assert row.category == f"{'N' if many_heads else '1'}-{'N' if many_tails else '1'}"


def slow_related(graph, share, least):
    pairs = {r: {(h, t) for h, q, t in everything(graph) if q == r and h != t} for r in graph.relations}
    found = set()
    for a in pairs:
        for b in pairs:
            for kind, other in (("duplicate", pairs[b]), ("inverse", {(t, h) for h, t in pairs[b]})):
                if a > b or (a == b and kind == "duplicate"):
                    continue
                common = len(pairs[a] & other)
                if common >= least and common / max(len(pairs[a]), len(pairs[b])) >= share:
                    found.add((a, b, "symmetric" if a == b else kind))
    return found


@given(graphs(few), st.integers(1, 4), st.sampled_from([0.3, 0.5, 0.8]))
def test_related_relations_equal_slow_ones(graph, least, share):
    before = inspection.RELATED_LEAST, inspection.RELATED_SHARE
    inspection.RELATED_LEAST, inspection.RELATED_SHARE = least, share
    try:
        seen = inspect(graph)
    finally:
        inspection.RELATED_LEAST, inspection.RELATED_SHARE = before
    related = slow_related(graph, share, least)
    assert {(pair.first, pair.second, pair.kind) for pair in seen.related} == related
    train = set(graph.named("train"))

    def exposed(h, r, t):
        for a, b, kind in related:
            for here, there in ((a, b), (b, a)):
                if r == here and ((h, there, t) if kind == "duplicate" else (t, there, h)) in train:
                    return True
        return False

    for split in ("valid", "test"):
        assert seen.exposed[split] == sum(exposed(*triple) for triple in graph.named(split))


def test_warnings_say_what_would_spoil_an_experiment():
    train = [(f"a{i}", "parent of", f"b{i}") for i in range(40)]
    test = [(f"b{i}", "child of", f"a{i}") for i in range(40)] + train[:5] + [("Aspirin", "parent of", "aspirin")]
    text = "\n".join(inspect(Graph.from_triples(train, test=test)).warnings)
    assert "5 of 46 test triples (10.9%) stand in train too: do not evaluate on this split" in text
    assert "40 of 46 test triples (87.0%) can be read off train through a related relation" in text
    assert "2 entities occur only outside train; they are kept (rows: 0 of valid, 1 of test)" in text
    assert "1 entity names differ from another only in case" in text


def test_a_clean_graph_has_no_warnings():
    assert inspect(Graph.from_triples([("a", "r", "b"), ("b", "r", "c")])).warnings == []
