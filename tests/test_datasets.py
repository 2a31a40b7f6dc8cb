"""Named and embedded data."""

from __future__ import annotations

import pytest

from tacit import BadInput, TacitError, pool, read_graph, read_parties
from tacit.clinic import SIZES
from tacit.datasets import BENCHMARKS, clinic, load, recognise
from tacit.inspection import inspect


@pytest.mark.data
@pytest.mark.parametrize("name", [name for name, known in BENCHMARKS.items() if known.fingerprint])
def test_benchmarks_are_what_was_published(public_data, name):
    graph = load(name, public_data)
    assert recognise(graph) == name
    assert graph.reading.rejected == graph.reading.duplicates == 0


# Counted from the files by whoever collected them: rows of valid and test with an entity that never occurs in train.
UNSEEN = {"fb15k-237": (9, 28), "wn18rr": (210, 210), "ddb14": (103, 118), "nell-995": (102, 1159), "fb15k": (0, 0)}


@pytest.mark.data
@pytest.mark.parametrize("name", UNSEEN)
def test_unseen_rows_of_benchmarks(public_data, name):
    assert tuple(inspect(load(name, public_data)).unseen_rows.values()) == UNSEEN[name]


@pytest.mark.slow
@pytest.mark.data
def test_the_leakage_that_fb15k_is_known_for_is_found(public_data):
    assert inspect(load("fb15k", public_data)).exposed["test"] > 0.7 * 59_071
    assert inspect(load("fb15k-237", public_data)).exposed["test"] == 0


GIVEN = {
    "whisky": (642, 11, 1203, 68, 66),
    "worldlift": (355, 10, 1072, 61, 59),
    "tharawat": (4681, 12, 19323, 1074, 1073),
    "police": (11145, 4, 29966, 1666, 1664),
    "salit": (794, 7, 591, 34, 32),
    "tele": (660, 3, 659, 38, 36),
    "wrangler": (442, 7, 405, 23, 22),
}


@pytest.mark.data
def test_linked_graphs_with_their_alignments(public_data):
    parties = read_parties(public_data / "fkge")
    counts = {
        name: (len(g.entities), len(g.relations), len(g.train), len(g.valid), len(g.test))
        for name, g in zip(parties.names, parties.graphs, strict=True)
    }
    assert counts == GIVEN
    assert len(parties.links) == 9 + 7


@pytest.mark.data
@pytest.mark.parametrize(("language", "counts"), [("zh", (19_388, 1_701, 70_414)), ("en", (19_572, 1_323, 95_142))])
def test_single_files(public_data, language, counts):
    graph = read_graph(public_data / "dbp15k-zh-en" / f"triples-{language}.txt.xz")
    assert (len(graph.entities), len(graph.relations), len(graph.train)) == counts


@pytest.mark.data
@pytest.mark.parametrize(("parts", "sizes"), [(3, (248_090, 31_013, 31_013)), (10, (248_086, 31_015, 31_015))])
def test_released_federated_splits_are_sound(public_data, parts, sizes):
    parties = read_parties(public_data / "fb15k-237-fed" / f"r{parts}")
    assert len(parties) == parts
    assert tuple(sum(len(g.splits[s]) for g in parties) for s in ("train", "valid", "test")) == sizes
    found = parties.statistics()
    assert found["distinct_triples"] == 310_116
    assert all(row["triples"] == 0 and row["relations"] == 0 for row in found["overlaps"])


# From the collection's own count: rows of train, valid, test; distinct triples; repeated rows.
DEFECTIVE = {3: ((35_648, 4_455, 4_458), 22_249, 9_298), 5: ((35_646, 4_455, 4_460), 22_249, 6_710)}


@pytest.mark.data
@pytest.mark.parametrize("parts", DEFECTIVE)
def test_a_defective_release_is_reported_as_what_it_is(public_data, parts):
    parties = read_parties(public_data / "ddb14-fedr-as-released" / f"fed{parts}")
    rows, distinct, repeats = DEFECTIVE[parts]
    files = [file for graph in parties for file in graph.reading.files]
    assert tuple(sum(file.rows for file in files if file.split == s) for s in ("train", "valid", "test")) == rows
    assert sum(file.duplicates for file in files) == repeats
    assert parties.statistics()["distinct_triples"] == distinct
    for graph in parties:
        assert any("test triples" in warning and "stand in train too" in warning for warning in inspect(graph).warnings)


def test_a_benchmark_that_is_another_is_refused(tmp_path, monkeypatch):
    (tmp_path / "wn18rr").mkdir()
    (tmp_path / "wn18rr" / "train.tsv").write_text("a\tr\tb\n")
    with pytest.raises(BadInput, match=r"this is not wn18rr as published: found entities 2 \(published: 40,943\)"):
        load("wn18rr", tmp_path)
    with pytest.raises(BadInput, match="no such folder"):
        load("fb15k", tmp_path)
    with pytest.raises(TacitError, match="No benchmark is called"):
        load("fb15k-238", tmp_path)
    monkeypatch.delenv("TACIT_DATA", raising=False)
    with pytest.raises(TacitError, match="TACIT_DATA"):
        load("fb15k")
    monkeypatch.setenv("TACIT_DATA", str(tmp_path))
    with pytest.raises(BadInput, match="this is not wn18rr"):
        load("wn18rr")


@pytest.mark.parametrize("size", SIZES)
def test_the_clinic_is_a_federation_worth_having(size):
    parties = clinic(size, seed=4)
    found = parties.statistics()
    assert len(parties) == SIZES[size].hospitals
    assert all(row["triples"] == 0 for row in found["overlaps"])
    for graph, party in zip(parties, found["parties"], strict=True):
        assert party["entities_shared"] > 0.5 * party["entities"]
        patients = [name for name in graph.entities if name.startswith("patient: ")]
        assert len(patients) >= 0.9 * SIZES[size].patients
    everyone = [name for graph in parties for name in graph.entities if name.startswith(("patient: ", "provider: "))]
    assert len(everyone) == len(set(everyone))
    whole = inspect(pool(parties))
    assert not any(whole.repeated.values())
    assert whole.related == []


def test_the_clinic_follows_its_seed():
    assert clinic("small", 1) == clinic("small", 1)
    assert clinic("small", 1).graphs != clinic("small", 2).graphs


def test_the_clinic_is_what_it_always_was():
    assert [graph.fingerprint[:12] for graph in clinic("small", 0)] == ["9bc6d0c8d815", "1f188a34dedf", "d6cf19fbb3ac"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_the_clinic_has_structure_to_learn(seed):
    """Neighbours predict: a drug treats what drugs with the same targets treat, far above chance, and more so pooled.

    A stand-in for training until the engine exists: rank conditions for each held-out (drug, treats, ?) by how many
    training drugs that share a gene target treat them.
    """
    parties = clinic("demo", seed)

    def mean_reciprocal_rank(graphs, ask):
        treats, targets = {}, {}
        for graph in graphs:
            for h, r, t in graph.named("train"):
                if r in ("treats", "targets"):
                    (treats if r == "treats" else targets).setdefault(h, set()).add(t)
        conditions = sorted({c for held in treats.values() for c in held})
        total = []
        for h, r, t in ask:
            if r != "treats" or t not in conditions:
                continue
            votes = dict.fromkeys(conditions, 0)
            for drug, held in treats.items():
                if drug != h:
                    alike = len(targets.get(drug, set()) & targets.get(h, set())) + len(held & treats.get(h, set()))
                    for condition in held:
                        votes[condition] += alike
            better = sum(vote > votes[t] for vote in votes.values())
            equal = sum(vote == votes[t] for vote in votes.values())
            total.append(1 / (better + (equal + 1) / 2))
        return sum(total) / len(total)

    ask = [triple for graph in parties for triple in graph.named("test")]
    pooled = mean_reciprocal_rank(parties, ask)
    alone = [mean_reciprocal_rank([graph], graph.named("test")) for graph in parties]
    assert pooled > 1.1 * sum(alone) / len(alone)
    assert pooled > 5 / SIZES["demo"].conditions
