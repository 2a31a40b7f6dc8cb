"""Hypothesis strategies for names, triples and graphs."""

from __future__ import annotations

from hypothesis import strategies as st

from tacit.graph import Graph

plain_names = st.sampled_from([f"e{i}" for i in range(8)])
odd_names = st.sampled_from(
    [
        '"quoted"',
        '"lit"@en',
        '"5"^^xsd:integer',
        "<http://x/y>",
        "http://x/y#z",
        "_:b1",
        "ex:a",
        "a,b",
        "100%",
        "a\\tb",
        "naïve",
        " x ",
    ]
)
characters = st.characters(exclude_categories=["Cc", "Cs"])
any_names = st.text(characters, min_size=1, max_size=8).map(lambda name: name if name.strip() else name + ".")
names = plain_names | odd_names | any_names

triples = st.tuples(names, names, names)
plain_triples = st.tuples(plain_names, st.sampled_from("rst"), plain_names)


@st.composite
def graphs(draw: st.DrawFn, statements: st.SearchStrategy[tuple[str, str, str]] = triples) -> Graph:
    """A graph with at least one training triple; splits may overlap, as in leaking benchmarks."""
    train = draw(st.lists(statements, min_size=1, max_size=30))
    valid, test = (draw(st.lists(statements, max_size=10)) for _ in range(2))
    return Graph.from_triples(train, valid, test)
