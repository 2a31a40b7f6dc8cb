"""RDF: the same graph from every syntax, names that read well, and nothing lost on the way out and back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategies import names
from tacit import BadInput, read_graph, write_graph
from tacit.files.rdf import Prefixes

NT = """\
# a comment
<http://ex.org/aspirin> <http://ex.org/treats> <http://ex.org/headache> .
<http://ex.org/aspirin> <http://www.w3.org/2000/01/rdf-schema#label> "Aspirin\\t\\"ASA\\""@en .

<http://ex.org/aspirin> <http://ex.org/dose> "5"^^<http://www.w3.org/2001/XMLSchema#integer> .
_:b0 <http://ex.org/treats> <urn:isbn:1> .
"""
TTL = """\
@prefix ex: <http://ex.org/> .
@prefix rdfs: <http://www.w3.org/2000/01/rdf-schema#> .
ex:aspirin ex:treats ex:headache ; rdfs:label "Aspirin\\t\\"ASA\\""@en ; ex:dose 5 .
_:b0 ex:treats <urn:isbn:1> .
"""
XML = """\
<?xml version="1.0"?>
<rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#" xmlns:ex="http://ex.org/"
         xmlns:rdfs="http://www.w3.org/2000/01/rdf-schema#">
  <rdf:Description rdf:about="http://ex.org/aspirin">
    <ex:treats rdf:resource="http://ex.org/headache"/>
    <rdfs:label xml:lang="en">Aspirin&#9;"ASA"</rdfs:label>
    <ex:dose rdf:datatype="http://www.w3.org/2001/XMLSchema#integer">5</ex:dose>
  </rdf:Description>
  <rdf:Description rdf:nodeID="b0"><ex:treats rdf:resource="urn:isbn:1"/></rdf:Description>
</rdf:RDF>
"""
READABLE = {
    ("ex:aspirin", "ex:treats", "ex:headache"),
    ("ex:aspirin", "rdfs:label", '"Aspirin\\t\\"ASA\\""@en'),
    ("ex:aspirin", "ex:dose", '"5"^^xsd:integer'),
    ("_:b0", "ex:treats", "<urn:isbn:1>"),
}


@pytest.mark.parametrize(("suffix", "text"), [("ttl", TTL), ("trig", TTL), ("rdf", XML), ("owl", XML)])
def test_declared_prefixes_make_names_readable(tmp_path, suffix, text):
    (tmp_path / f"graph.{suffix}").write_text(text)
    graph = read_graph(tmp_path / f"graph.{suffix}")
    assert set(graph.named("train")) == READABLE
    assert graph.prefixes["ex"] == "http://ex.org/"
    for kind in ("tsv", "nt"):
        write_graph(graph, tmp_path / kind, format=kind)
        assert read_graph(tmp_path / kind) == graph


def test_nodes_are_told_apart(tmp_path):
    """A node without a label is no other node, in its file or the next."""
    (tmp_path / "train.ttl").write_text("@prefix e: <http://e/> . _:anon-train-1 e:p e:o . e:s e:q [ e:r e:t ] .")
    (tmp_path / "test.ttl").write_text("@prefix e: <http://e/> . e:s e:q [ e:r e:t ] .")
    nodes = {name for name in read_graph(tmp_path).entities if name.startswith("_:")}
    assert nodes == {"_:anon-train-1", "_:anon-train-2", "_:anon-test-1"}


def test_a_cut_off_xml_file_is_an_error(tmp_path):
    path = tmp_path / "graph.rdf"
    for cut in range(len(XML.rstrip())):
        path.write_text(XML[:cut])
        with pytest.raises(BadInput, match=r"graph.rdf:"):
            read_graph(path)


def test_without_prefixes_only_the_well_known_are_used(tmp_path):
    (tmp_path / "graph.nt").write_text(NT)
    graph = read_graph(tmp_path / "graph.nt")
    expected = {tuple(name.replace("ex:", "http://ex.org/") for name in triple) for triple in READABLE}
    assert set(graph.named("train")) == expected
    assert set(graph.prefixes) == {"rdfs", "xsd"}
    assert graph.reading.rows == 4


def test_a_prefix_that_two_files_disagree_on_keeps_its_first_meaning(tmp_path):
    (tmp_path / "train.ttl").write_text("@prefix p: <http://one/> . p:a p:r p:b .")
    (tmp_path / "test.ttl").write_text("@prefix p: <http://two/> . p:a p:r <http://one/b> .")
    graph = read_graph(tmp_path)
    assert list(graph.named("train")) == [("p:a", "p:r", "p:b")]
    assert list(graph.named("test")) == [("http://two/a", "http://two/r", "p:b")]


def test_a_name_does_not_depend_on_where_the_prefix_is_declared(tmp_path):
    (tmp_path / "graph.ttl").write_text(
        "<http://e/a> <http://e/r> <http://e/b> . @prefix e: <http://e/> . e:a e:r e:c ."
    )
    assert set(read_graph(tmp_path / "graph.ttl").named("train")) == {("e:a", "e:r", "e:b"), ("e:a", "e:r", "e:c")}


def test_nodes_without_a_label_are_the_same_each_time(tmp_path):
    (tmp_path / "graph.ttl").write_text("@prefix e: <http://e/> . [ e:r e:b ] e:s [ e:r e:c ] .")
    first = read_graph(tmp_path / "graph.ttl")
    assert first == read_graph(tmp_path / "graph.ttl")
    assert [name for name in first.entities if name.startswith("_:")] == ["_:anon-train-1", "_:anon-train-2"]


def test_bad_lines_of_n_triples_are_rejected_one_by_one(tmp_path):
    path = tmp_path / "graph.nt"
    good = "<http://a> <http://r> <http://b> .\n"
    path.write_text(f"{good}nonsense\n# fine\n<http://a> <http://r> .\n{good.replace('b', 'c')}")
    graph = read_graph(path, bad_rows="skip")
    assert len(graph.train) == 2
    assert [problem.line for problem in graph.reading.files[0].problems] == [2, 4]
    assert graph.reading.rows == 4
    with pytest.raises(BadInput, match=r"graph.nt:2: found 'nonsense' \((?!.*line 1)"):
        read_graph(path)


def test_a_fault_in_turtle_names_its_line(tmp_path):
    (tmp_path / "graph.ttl").write_text("@prefix e: <http://e/> .\ne:a e:r e:b .\ne:a e:r\n")
    with pytest.raises(BadInput, match=r"graph.ttl:\d+: not valid Turtle"):
        read_graph(tmp_path / "graph.ttl")


def test_named_graphs_are_read_and_said(tmp_path):
    (tmp_path / "graph.nq").write_text(
        "<http://a> <http://r> <http://b> <http://g> .\n<http://a> <http://r> <http://b> .\n"
    )
    graph = read_graph(tmp_path / "graph.nq")
    assert graph.reading.duplicates == 1
    assert graph.reading.files[0].notes == ("1 statements of named graphs are read as plain triples",)


PREFIXES = {"ex": "http://ex.org/", "": "http://empty/", "deep": "http://ex.org/deep/", "http": "http:"}


@given(
    names
    | st.sampled_from(
        ["ex:a/b", ":x", "deep:", "http://ex.org/a", "http://", "<a", "urn:tacit:x", "<urn:tacit:x>", '"a']
    )
)
def test_every_name_survives_as_every_part(name):
    for allowed in ("<", "<_", '<_"'):
        assert Prefixes(PREFIXES).shorten(Prefixes(PREFIXES).write(name, allowed)) == name


IRIS = [
    "http://ex.org/a",
    "http://ex.org/deep/x",
    "http://ex.org/",
    "http:////odd",
    "urn:a:b",
    "http://other/ex:a",
    "http://empty/#",
]


@pytest.mark.parametrize("iri", IRIS)
def test_every_iri_survives(iri):
    prefixes = Prefixes(PREFIXES)
    assert str(prefixes.expand(prefixes.shorten(f"<{iri}>"))) == f"<{iri}>"
