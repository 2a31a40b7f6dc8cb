"""Partition: promises checked on any graph, by any method."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategies import graphs, plain_triples
from tacit import BadInput, Graph, TacitError, partition, pool, read_graph, read_parties, write_graph, write_parties
from tacit.clinic import clinic
from tacit.federation.keys import make
from tacit.files import read_links
from tacit.graph import SPLITS
from tacit.parties import METHODS, Link, Parties, split_by_coin
from tacit.parties import given as given_parties

methods = st.sampled_from(list(METHODS))
splits = st.sampled_from([None, "keep", (0.8, 0.1, 0.1), (1.0, 0.0, 0.0)])


def named(graph):
    return {split: set(graph.named(split)) for split in SPLITS}


def divide(graph, *args, **options):
    """A partition, or None where the graph is too small for it (said in one sentence)."""
    try:
        return partition(graph, *args, **options)
    except TacitError:
        return None


@given(graphs(plain_triples), st.integers(0, 2**64 - 1), st.data())
def test_by_a_coin_one_triple_moves_no_other(graph, seed, data):
    """What privacy for one triple rests on: with and without it, all others are in the same split."""
    triples = sorted(set().union(*named(graph).values()))
    one = data.draw(st.sampled_from(triples))
    found = []
    for some in (triples, [each for each in triples if each != one]):
        try:
            found.append(named(split_by_coin(Graph.from_triples(some), (0.6, 0.2, 0.2), seed=seed)))
        except TacitError:
            return  # nothing would be trained on
    assert set().union(*found[0].values()) == set(triples)
    assert sum(map(len, found[0].values())) == len(triples)
    assert {split: rows - {one} for split, rows in found[0].items()} == found[1]


@given(graphs(plain_triples), methods, st.integers(1, 4), st.integers(0, 2**64 - 1), splits)
def test_no_triple_is_lost_or_held_twice(graph, by, parts, seed, split):
    parties = divide(graph, by, parts, seed=seed, split=split)
    if parties is None:
        return
    held = [set().union(*named(party).values()) for party in parties]
    everything = set().union(*named(graph).values())
    assert sum(map(len, held)) == len(set().union(*held))
    assert len(set().union(*held)) + parties.origin["left_out"] == len(everything)
    assert set().union(*held) <= everything
    if by != "entities":
        assert parties.origin["left_out"] == 0
    for party in parties:
        assert set(party.entities) == {x for h, _, t in set().union(*named(party).values()) for x in (h, t)}
        if parties.origin["split"] == "keep":
            assert all(named(party)[name] <= named(graph)[name] for name in SPLITS)
        else:
            assert sum(len(part) for part in party.splits.values()) == len(set().union(*named(party).values()))


@given(st.lists(plain_triples, min_size=6, max_size=30), methods, st.integers(0, 99), st.randoms(use_true_random=False))
def test_the_order_of_lines_does_not_matter(statements, by, seed, random):
    shuffled = statements[:]
    random.shuffle(shuffled)
    one, two = (divide(Graph.from_triples(rows), by, 2, seed=seed) for rows in (statements, shuffled))
    assert (one is None) == (two is None)
    assert one is None or one.graphs == two.graphs


@given(graphs(plain_triples), st.integers(2, 3), st.integers(0, 99))
def test_relations_go_to_one_party_each(graph, parts, seed):
    if parties := divide(graph, "relations", parts, seed=seed):
        relations = [set(party.relations) for party in parties]
        assert sum(map(len, relations)) == len(graph.relations)


@given(graphs(plain_triples), st.integers(2, 3), st.integers(0, 99))
def test_triples_are_dealt_evenly(graph, parts, seed):
    if parties := divide(graph, "triples", parts, seed=seed):
        sizes = [len(party.statements) for party in parties]
        assert max(sizes) - min(sizes) <= 1


def grid(size=30):
    return Graph.from_triples(
        [(f"e{i:02}", f"r{(i * j) % 5}", f"e{j:02}") for i in range(size) for j in range(size) if i != j]
    )


def test_seeds_differ_and_repeat():
    graph = grid()
    one, again, other = (partition(graph, "entities", 3, seed=seed) for seed in (1, 1, 2))
    assert one.graphs == again.graphs
    assert one.graphs != other.graphs


def test_a_party_gets_its_share_of_the_entities():
    parties = partition(grid(), "entities", 3, seed=5, share=0.5)
    assert [len(party.entities) for party in parties] == [15, 15, 15]
    assert [round(len(p.train) / len(p.statements), 2) for p in parties] == [0.8] * 3


@given(graphs(plain_triples), methods, st.integers(1, 3), st.integers(0, 2**64 - 1), st.integers(1, 3))
def test_what_is_held_out_may_be_well_known(graph, by, parts, seed, known):
    plain, careful = (divide(graph, by, parts, seed=seed, split=(0.6, 0.2, 0.2), known=k) for k in (0, known))
    if plain is None:
        return
    for usual, party in zip(plain, careful, strict=True):
        assert set().union(*named(usual).values()) == set().union(*named(party).values())
        train = named(party)["train"]
        held = named(party)["valid"] | named(party)["test"]
        for h, r, t in held:
            assert sum(h in (x, z) for x, _, z in train) >= known
            assert sum(t in (x, z) for x, _, z in train) >= known
            assert sum(r == y for _, y, _ in train) >= known
        wanted = len(named(usual)["valid"] | named(usual)["test"])
        assert len(held) <= wanted
        if len(held) < wanted:  # then no triple that is left could be held out as well
            for h, r, t in train:
                rest = train - {(h, r, t)}
                counts = [sum(e in (x, z) for x, _, z in rest) for e in (h, t)] + [sum(r == y for _, y, _ in rest)]
                assert min(counts) < known


def test_a_small_partition_is_what_it_always_was():
    """The draws behind a seed are a promise; a change here changes every published split."""
    prints = [party.fingerprint[:12] for by in METHODS for party in partition(grid(10), by, 2, seed=7)]
    assert prints == ["d133c152cffd", "68ba0b5da261", "5e376db507fa", "0c0d2edbc582", "4d2a6b70085b", "9c491ef3f133"]


@pytest.mark.parametrize(
    ("by", "options", "message"),
    [
        ("colour", {}, "divided by triples, entities, relations"),
        ("triples", {"parts": 0}, "not 0"),
        ("entities", {"share": 0.0}, "share of entities"),
        ("triples", {"split": (0.5, 0.1, 0.1)}, "add up to 1"),
        ("relations", {"parts": 9}, "cannot be dealt to 9 parties"),
        ("triples", {"parts": 5000}, "not 5,000"),
        ("triples", {"split": (0.0, 1.0, 0.0)}, "would get no training triple"),
        ("triples", {"split": "most"}, "add up to 1"),
        ("triples", {"split": (float("nan"),) * 3}, "add up to 1"),
        ("triples", {"seed": -1}, "a seed is"),
        ("triples", {"known": -1}, "from 0 on"),
        ("triples", {"known": 2, "split": "keep"}, "for a fresh split"),
    ],
)
def test_what_makes_no_sense_is_refused(by, options, message):
    with pytest.raises(TacitError, match=message):
        partition(grid(), by, **({"parts": 3} | options))


@given(graphs(), st.integers(1, 3))
def test_pooled_parties_are_the_graph_again(graph, parts):
    parties = divide(graph, "triples", parts, split="keep")
    if parties is None:
        return
    whole = pool(parties)
    assert named(whole) == named(graph)


@given(graphs(), methods, st.integers(1, 3))
def test_written_parties_are_read_back(tmp_path_factory, graph, by, parts):
    if (parties := divide(graph, by, parts)) is None:
        return
    folder = tmp_path_factory.mktemp("parties") / "out"
    write_parties(parties, folder)
    again = read_parties(folder)
    assert again == parties
    assert json.loads((folder / "parties.json").read_text())["statistics"] == parties.statistics()


def test_statistics_count_what_is_shared():
    one = Graph.from_triples([("a", "r", "b"), ("b", "r", "c")])
    two = Graph.from_triples([("b", "r", "c"), ("c", "s", "d")])
    found = given_parties({"one": one, "two": two}).statistics()
    assert [party["entities_shared"] for party in found["parties"]] == [2, 2]
    assert found["overlaps"] == [{"parties": ["one", "two"], "entities": 2, "relations": 1, "triples": 1}]
    assert found["distinct_triples"] == 3


def aligned():
    zh = Graph.from_triples([("甲", "治", "乙"), ("乙", "治", "丙")])
    en = Graph.from_triples([("A", "treats", "B"), ("C", "treats", "A")])
    links = (Link("zh", "甲", "en", "A"), Link("en", "B", "zh", "乙"), Link("zh", "治", "en", "treats", "relation"))
    return Parties(("zh", "en"), (zh, en), links, {"by": "given"})


def test_an_alignment_says_which_names_mean_the_same(tmp_path):
    parties = aligned()
    here, there = parties.shared(0, 1)
    pairs = {(parties[0].entities[i], parties[1].entities[j]) for i, j in zip(here, there, strict=True)}
    assert pairs == {("甲", "A"), ("乙", "B")}
    assert [a.tolist() for a in parties.shared(1, 0)] == [there.tolist(), here.tolist()]
    assert parties.statistics()["overlaps"][0] == {"parties": ["zh", "en"], "entities": 2, "relations": 1, "triples": 1}
    write_parties(parties, tmp_path / "out")
    assert read_parties(tmp_path / "out") == parties
    with pytest.raises(TacitError, match="cannot be pooled by name"):
        pool(parties)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("甲\tnobody", "'nobody', which is no entity of en"),
        ("one\ttwo\tthree", "3 columns"),
        ("zh\t甲\tfr\tA", "the party 'fr'"),
        ("zh\t甲\ten\tA\tcolour", "the kind 'colour'"),
    ],
)
def test_a_bad_alignment_names_its_lines(tmp_path, row, message):
    graphs = dict(zip(("zh", "en"), aligned().graphs, strict=True))
    (tmp_path / "links.tsv").write_text(f"甲\tA\n{row}\n", encoding="utf-8")
    with pytest.raises(BadInput, match=f"links.tsv:2: found {message}"):
        read_links(tmp_path / "links.tsv", graphs, ("zh", "en"))


def test_parties_in_files_named_after_them(tmp_path):
    for party in ("north", "south"):
        (tmp_path / f"{party}-train.tsv").write_text(f"a\tr\t{party}\n")
        (tmp_path / f"{party}-test.tsv").write_text("a\tr\tb\n")
    parties = read_parties(tmp_path)
    assert parties.names == ("north", "south")
    assert list(parties[1].named("train")) == [("a", "r", "south")]


def test_parties_in_folders_with_alignments_beside(tmp_path):
    for party in ("north", "south"):
        write_graph(Graph.from_triples([(f"{party} a", "r", "b")]), tmp_path / party)
    assert read_parties(tmp_path).links is None
    (tmp_path / "alignment").mkdir()
    (tmp_path / "alignment" / "north_south.txt").write_text("north a\tsouth a\n")
    assert read_parties(tmp_path).links == (Link("north", "north a", "south", "south a"),)


def test_folders_that_hold_no_parties(tmp_path):
    with pytest.raises(BadInput, match="no party's graph"):
        read_parties(tmp_path)
    with pytest.raises(BadInput, match="no such folder"):
        read_parties(tmp_path / "absent")
    (tmp_path / "north-train.tsv").write_text("a\tr\tb\n")
    with pytest.raises(BadInput, match="folder of several parties"):
        read_graph(tmp_path)
    (tmp_path / "north_train.csv").write_text("a,r,b\n")
    with pytest.raises(BadInput, match="expected one of them"):
        read_parties(tmp_path)
    (tmp_path / "north_train.csv").rename(tmp_path / "south-test.csv")
    with pytest.raises(BadInput, match="no south-train file"):
        read_parties(tmp_path)


def test_alignments_of_graphs_that_are_not_there_are_named(tmp_path):
    for party in ("North", "south_west"):
        write_graph(Graph.from_triples([(f"{party} a", "r", "b")]), tmp_path / party)
    (tmp_path / "alignment").mkdir()
    (tmp_path / "alignment" / "North_south_west.tsv").write_text("North a\tsouth_west a\n" * 2)
    (tmp_path / "alignment" / "North_elsewhere.tsv").write_text("North a\tx\n")
    parties = read_parties(tmp_path)
    assert parties.links == (Link("North", "North a", "south_west", "south_west a"),)
    assert parties.origin["alignments_of_others"] == ["North_elsewhere"]


def test_marks_are_kept_by_every_partition(tmp_path):
    rows = [f"e{i}\tr{i % 3}\te{i + 1}\t{str(i % 4 == 0).lower()}\tg{i % 5}" for i in range(40)]
    (tmp_path / "train.tsv").write_text("\n".join(["head\trelation\ttail\tconfidential\tgroup", *rows]))
    (tmp_path / "test.tsv").write_text("head\trelation\ttail\tconfidential\tgroup\ne1\tr1\te2\ttrue\tg1\n")
    graph = read_graph(tmp_path)
    expected = {i for i in range(40) if i % 4 == 0} | {1}
    for by in METHODS:
        for split in ("keep", (0.8, 0.1, 0.1)):
            parties = partition(graph, by, 2, seed=1, share=1.0, split=split)
            marked = set()
            for party in parties:
                pool_, names = party.statements, party.entities
                marked |= {names[h] for h, mark in zip(pool_.triples[:, 0], pool_.confidential, strict=True) if mark}
                groups = zip(pool_.triples[:, 0], pool_.group, strict=True)
                assert all(int(names[h][1:]) % 5 == int(party.groups[g][1:]) for h, g in groups)
            assert marked == {f"e{i}" for i in expected}


def test_parties_may_group_the_same_triple_differently(tmp_path):
    graphs = {}
    for party in ("one", "two"):
        path = tmp_path / f"{party}.csv"
        path.write_text(f"head,relation,tail,group\na,r,b,{party}'s\n")
        graphs[party] = read_graph(path)
    write_parties(given_parties(graphs), tmp_path / "out")
    assert read_parties(tmp_path / "out").statistics()["distinct_triples"] == 1


@pytest.mark.parametrize(
    "change", [("parties", None), ("parties", 5), ("parties", ["one", "one"]), ("aligned", "no"), ("origin", 5)]
)
def test_a_damaged_manifest_is_refused(tmp_path, change):
    write_parties(given_parties({"one": Graph.from_triples([("a", "r", "b")])}), tmp_path / "out")
    manifest = tmp_path / "out" / "parties.json"
    content = json.loads(manifest.read_text()) | dict([change])
    manifest.write_text(json.dumps(content))
    with pytest.raises(BadInput, match=r"parties.json: found"):
        read_parties(tmp_path / "out")


def test_a_manifest_cannot_lead_out_of_its_folder(tmp_path):
    write_graph(Graph.from_triples([("a", "r", "b")]), tmp_path / "secret")
    write_parties(given_parties({"one": Graph.from_triples([("a", "r", "b")])}), tmp_path / "out")
    manifest = tmp_path / "out" / "parties.json"
    manifest.write_text(manifest.read_text().replace('"one"', '"../secret"'))
    with pytest.raises(BadInput, match="expected the names of the parties' folders"):
        read_parties(tmp_path / "out")


@pytest.mark.parametrize("name", ["", "..", "a/b", ".hidden", "x" * 200, "private", "parties.json"])
def test_party_names_are_folder_names(name):
    with pytest.raises(TacitError, match="cannot be the name of a party"):
        given_parties({name: Graph.from_triples([("a", "r", "b")])})


def test_uneven_counts_are_kept_exactly():
    parties = partition(grid(), "triples", 7, seed=3, split=(0.6, 0.3, 0.1))
    for party in parties:
        total = len(party.statements)
        assert abs(len(party.train) - 0.6 * total) <= 1
        assert abs(len(party.valid) - 0.3 * total) <= 1
        assert np.sum([len(split) for split in party.splits.values()]) == total


def test_a_coin_meets_its_shares_on_average_and_follows_the_seed():
    graph = clinic("small", 1)[0]
    one, other = (split_by_coin(graph, (0.8, 0.15, 0.05), seed=seed) for seed in (1, 2))
    for split, share in zip(SPLITS, (0.8, 0.15, 0.05), strict=True):
        count = len(graph.statements)
        assert abs(len(one.splits[split]) - share * count) < 5 * (share * (1 - share) * count) ** 0.5
    assert named(one) != named(other)
    with pytest.raises(TacitError, match="add up to 1"):
        split_by_coin(graph, (0.8, 0.1, 0.2))
    with pytest.raises(TacitError, match="would be in train"):
        split_by_coin(graph, (0.0, 1.0, 0.0))


@pytest.mark.slow
@pytest.mark.parametrize("command", ["train", "provider"])
def test_commands_split_by_a_coin_under_privacy(tmp_path, monkeypatch, command):
    from click.testing import CliRunner
    from typer.main import get_command

    from tacit.cli import app

    found, lines = [], ["\t".join(triple) for triple in clinic("small", 1)[0].named("train")]
    make("north", tmp_path)

    def call(*words):
        done = CliRunner().invoke(get_command(app), [str(word) for word in words], catch_exceptions=True)
        assert done.exit_code == 0 or isinstance(done.exception, InterruptedError), done.output

    def caught(graph, *words, **more):
        found.append(set((graph if command == "train" else graph.graph).named("train")))
        raise InterruptedError

    monkeypatch.setattr("tacit.run.create" if command == "train" else "tacit.ledger.process.provide", caught)
    key = ("--key", tmp_path / "north.key")
    call("ledger", "init", tmp_path / "ledger", *key, "--open", "--model", "drugs", "--entity", 4)
    for some in (lines, lines[1:]):
        (tmp_path / "g.tsv").write_text("\n".join(some) + "\n")
        words = ("train",) if command == "train" else ("provider", "start", tmp_path / "ledger")
        call(*words, tmp_path / "g.tsv", "--split", "0.8,0.1,0.1", "--epsilon", 8,
             *(() if command == "train" else (*key, "--out", tmp_path / "run")))  # fmt: skip
    assert len(found[0] ^ found[1]) <= 1
    assert 0.7 * len(lines) < len(found[0]) < 0.9 * len(lines)
