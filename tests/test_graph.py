"""Graph: canonical form against a slow one made of Python sets."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategies import graphs, plain_triples, triples
from tacit.errors import BadInput
from tacit.graph import NO_GROUP, SPLITS, Graph, Split, UnknownName, Vocab, assemble, triple_keys


@given(st.lists(triples, max_size=30), st.lists(triples, max_size=10), st.lists(triples, max_size=10))
def test_a_graph_is_its_sets_of_triples_in_sorted_order(train, valid, test):
    graph = Graph.from_triples(train, valid, test)
    everything = [*train, *valid, *test]
    assert list(graph.entities) == sorted({name for h, _, t in everything for name in (h, t)})
    assert list(graph.relations) == sorted({r for _, r, _ in everything})
    for name, given_triples in zip(SPLITS, (train, valid, test), strict=True):
        assert list(graph.named(name)) == sorted(set(given_triples))


@given(st.lists(plain_triples, min_size=1, max_size=20), st.randoms(use_true_random=False))
def test_order_and_repeats_do_not_matter(statements, random):
    shuffled = statements * 2
    random.shuffle(shuffled)
    graph, again = Graph.from_triples(statements), Graph.from_triples(shuffled)
    assert graph == again
    assert graph.fingerprint == again.fingerprint
    assert np.array_equal(graph.train.triples, again.train.triples)


@given(graphs(plain_triples), graphs(plain_triples))
def test_fingerprints_differ_when_content_does(one, two):
    same = all(set(one.named(s)) == set(two.named(s)) for s in SPLITS)
    assert (one.fingerprint == two.fingerprint) == same


def test_a_fingerprint_is_the_same_on_every_machine():
    graph = Graph.from_triples([("b", "r", "a"), ("a", "r", "ü")], [("a", "s", "a")])
    assert graph.fingerprint == "78aa9578c014218021871aaf407197ec5663e1b340b80793028a06385a76dee6"


marked = st.lists(st.tuples(plain_triples, st.booleans(), st.sampled_from(["", "g", "h"])), min_size=1, max_size=30)


@given(marked)
def test_marks_stay_with_their_triples(rows):
    """A repeat keeps the stricter mark; two groups for one triple are refused."""
    names = sorted({name for triple, _, _ in rows for name in triple} | {"g", "h"})
    place = {name: i for i, name in enumerate(names)}
    ids = np.array([[place[name] for name in triple] for triple, _, _ in rows], np.int32)
    groups = np.array([place[group] if group else NO_GROUP for _, _, group in rows], np.int32)
    raw = Split(ids, np.array([mark for _, mark, _ in rows]), groups)
    listed: dict = {}
    for triple, _, group in rows:
        listed.setdefault(triple, set()).add(group)
    if any(len(found) > 1 for found in listed.values()):
        with pytest.raises(BadInput, match="different groups"):
            assemble(names, {"train": raw})
        return
    graph, repeats = assemble(names, {"train": raw})
    assert repeats == {"train": len(rows) - len(listed), "valid": 0, "test": 0}
    for position, triple in enumerate(graph.named("train")):
        marked_here = graph.train.confidential is not None and graph.train.confidential[position]
        assert marked_here == any(mark for other, mark, _ in rows if other == triple)
        group = graph.train.group[position] if graph.train.group is not None else NO_GROUP
        assert ("" if group == NO_GROUP else graph.groups[group]) == next(iter(listed[triple]))


@given(graphs(), st.randoms(use_true_random=False))
def test_carve_takes_the_rows_it_is_given(graph, random):
    pool = [(name, triple) for name in SPLITS for triple in graph.named(name)]
    rows = {name: np.array([i for i in range(len(pool)) if random.random() < 0.5], np.intp) for name in SPLITS}
    part = graph.carve(rows)
    for name in SPLITS:
        assert list(part.named(name)) == sorted({pool[i][1] for i in rows[name]})
    occurring = {x for name in SPLITS for h, _, t in part.named(name) for x in (h, t)}
    assert set(part.entities) == occurring


def test_keys_tell_triples_apart_even_where_they_do_not_fit_into_62_bits():
    triples = np.array(list(itertools.product([0, 5, 2**31 - 1], repeat=3)), np.int32)
    keys = triple_keys(triples, 2**31, 2**31)
    assert len(set(keys.tolist())) == len(triples)
    assert (np.argsort(keys) == np.arange(len(triples))).all()


def test_a_graph_too_large_for_keys_is_put_in_order_all_the_same(monkeypatch):
    statements = [("b", "r", "a"), ("a", "s", "b"), ("b", "r", "a"), ("a", "r", "b")]
    expected = Graph.from_triples(statements)
    monkeypatch.setattr("tacit.graph._keys_fit", lambda entities, relations: False)
    assert Graph.from_triples(statements) == expected


def test_nothing_in_a_graph_can_be_changed():
    graph = Graph.from_triples([("a", "r", "b")])
    with pytest.raises(ValueError, match="read-only"):
        graph.train.triples[0, 0] = 1
    with pytest.raises(AttributeError):
        graph.train = graph.valid


def test_an_unknown_name_gets_suggestions():
    vocab = Vocab(["aspirin", "ibuprofen"])
    with pytest.raises(UnknownName, match="Did you mean 'aspirin'"):
        vocab.id("asprin")


def test_a_mark_in_one_split_holds_in_all(tmp_path):
    """A mark belongs to the statement: the copy that a leaking source has in train is as confidential."""
    ids = np.array([[0, 1, 2]], np.int32)
    splits = {"train": Split(np.array([[0, 1, 2], [2, 1, 0]], np.int32)), "test": Split(ids, np.array([True]))}
    graph, _ = assemble(["a", "r", "b"], splits)
    assert graph.train.confidential.tolist() == [True, False]
    assert graph.test.confidential.tolist() == [True]
    unmarked, _ = assemble(["a", "r", "b"], {"train": Split(ids, np.array([False]))})
    assert unmarked == Graph.from_triples([("a", "r", "b")])


@pytest.mark.parametrize("triple", [("a", "b"), ("a", "b", "c", "d"), "abc", ("a", "b", 3)])
def test_what_is_no_triple_of_names_is_refused(triple):
    with pytest.raises(BadInput, match="expected three names"):
        Graph.from_triples([triple])


@pytest.mark.parametrize("name", ["", "  ", "a\tb", "a\nb", "\x00", "\x7f", "\x9b", "\ud800"])
def test_what_cannot_be_a_name_is_refused(name):
    with pytest.raises(BadInput, match="cannot be a name"):
        Vocab(["fine", name])


@given(graphs(), graphs())
def test_positions_are_where_the_names_are(one, two):
    positions = one.entities.positions(two.entities)
    for name, position in zip(one.entities, positions.tolist(), strict=True):
        assert (two.entities[position] == name) if position >= 0 else (name not in two.entities)
