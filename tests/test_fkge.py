"""FKGE's experiments: how graphs become peers, cells of peers, what is kept and compared."""

from __future__ import annotations

import importlib
import itertools
import json
import lzma
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from strategies import graphs, plain_triples
from tacit import datasets
from tacit.cli import app
from tacit.clinic import clinic
from tacit.errors import BadInput, TacitError
from tacit.evaluation import rank, typed_candidates
from tacit.parties import given as parties_of
from tacit.parties import partition, rename_relations, some, split_anew
from tacit.peers.alignment import by_links
from tacit.peers.cells import FIGURES, SETTINGS, peers_of, summary
from tacit.peers.meeting import independent, scored
from tacit.reproduction import Cell, load, read_cells, reproduce
from tacit.settings import Settings
from tacit.tensors import load_parties, load_tensors, save_parties, save_tensors

HOME = Path(__file__).parent.parent
CELLS = HOME / "benchmarks" / "fkge"


def named(graph, split=None):
    """Triples by name, of one split or of all."""
    return [triple for each in ([split] if split else graph.splits) for triple in graph.named(each)]


# -- data --------------------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(graphs(plain_triples), st.integers(1, 4), st.integers(0, 99))
def test_peers_by_entities_have_each_triple_once_and_know_what_is_the_same(graph, parts, seed):
    try:
        plain = partition(graph, "entities", parts, seed=seed)
    except TacitError:  # a party without a training triple
        return
    peers = rename_relations(plain)
    assert peers.names == plain.names
    owners = {}
    divided = bool(len(graph.valid) or len(graph.test))
    for number, (name, peer, before) in enumerate(zip(peers.names, peers, plain, strict=True)):
        assert list(peer.entities) == list(before.entities)
        assert list(peer.relations) == [f"{name}:{relation}" for relation in before.relations]
        for split in peer.splits:
            back = [(h, r.removeprefix(f"{name}:"), t) for h, r, t in peer.named(split)]
            assert back == list(before.named(split))
            assert set(back) <= set(graph.named(split) if divided else named(graph))  # the graph's own split is kept
            for triple in back:
                owners.setdefault(triple, set()).add(number)
    assert all(len(owner) == 1 for owner in owners.values())
    assert len(owners) + peers.origin["left_out"] == len(set(named(graph)))
    for one, two in itertools.combinations(range(len(peers)), 2):
        here, there = peers.shared(one, two)
        pairs = {(peers[one].entities[a], peers[two].entities[b]) for a, b in zip(here, there, strict=True)}
        assert pairs == {(name, name) for name in set(peers[one].entities) & set(peers[two].entities)}
        here, there = peers.shared(one, two, "relation")
        pairs = {(plain[one].relations[a], plain[two].relations[b]) for a, b in zip(here, there, strict=True)}
        assert pairs == {(name, name) for name in set(plain[one].relations) & set(plain[two].relations)}
    found = by_links(peers)
    for one, own in found.items():
        for other, aligned in own.items():
            assert (aligned.entity.tolist(), aligned.relation.tolist()) == tuple(
                peers.shared(one, other, kind)[0].tolist() for kind in ("entity", "relation")
            )


def test_only_what_is_known_by_names_is_renamed():
    with pytest.raises(TacitError, match="have links"):
        rename_relations(rename_relations(clinic("small")))


@settings(deadline=None)
@given(st.lists(graphs(plain_triples), min_size=1, max_size=3), st.integers(0, 99))
def test_a_fresh_split_deals_every_triple_once(found, seed):
    parties = parties_of({f"p{number}": graph for number, graph in enumerate(found)})
    try:
        anew = split_anew(parties, (0.6, 0.2, 0.2), seed=seed)
    except TacitError:  # a party without a training triple
        return
    assert anew.names == parties.names
    for before, after in zip(parties, anew, strict=True):
        assert sorted(named(after)) == sorted(set(named(before)))
        assert after.entities == before.entities
        assert after.relations == before.relations
        ends = np.rint(np.cumsum([0.6, 0.2, 0.2]) * len(set(named(before)))).astype(int)
        assert [len(split) for split in after.splits.values()] == np.diff(ends, prepend=0).tolist()
    again = split_anew(parties, (0.6, 0.2, 0.2), seed=seed)
    assert [graph.fingerprint for graph in again] == [graph.fingerprint for graph in anew]


def test_some_parties_keep_the_links_between_them():
    whole = rename_relations(partition(clinic("small")[0], "entities", 3))
    two = some(whole, ["party-02", "party-00"])
    assert two.graphs == (whole[2], whole[0])
    assert two.links == tuple(link for link in whole.links if "party-01" not in (link.party, link.other))
    for ours, theirs in zip(two.shared(0, 1), reversed(whole.shared(0, 2)), strict=True):
        assert ours.tolist() == theirs.tolist()
    with pytest.raises(TacitError, match="there is no party"):
        some(whole, ["party-07"])


@pytest.mark.parametrize("linked", [False, True])
def test_parties_in_one_file(tmp_path, linked):
    parties = rename_relations(clinic("small")) if linked else clinic("small")
    path = tmp_path / "parties.safetensors"
    save_parties(path, parties)
    assert load_parties(path) == parties
    tensors, metadata = load_tensors(path)
    tensors["0.train.triples"][0] = tensors["0.train.triples"][1]
    save_tensors(path, tensors, metadata)
    with pytest.raises(BadInput, match="damaged"):
        load_parties(path)
    del tensors["1.valid.triples"]
    save_tensors(path, tensors, metadata)
    with pytest.raises(BadInput, match="whole parties"):
        load_parties(path)


def test_dbp15k_is_what_was_published_or_is_refused(tmp_path, monkeypatch):
    folder = tmp_path / "dbp15k-zh-en"
    folder.mkdir()
    files = {"triples-zh.txt.xz": "一\tr\t二\n二\ts\t三\n", "triples-en.txt.xz": "one\tr\ttwo\n",
             "links-train.txt.xz": "一\tone\n", "links-test.txt.xz": "二\ttwo\n"}  # fmt: skip
    for name, text in files.items():
        (folder / name).write_bytes(lzma.compress(text.encode()))
    with pytest.raises(BadInput, match="not dbp15k-zh-en as published"):
        datasets.load_parties("dbp15k-zh-en", tmp_path)
    monkeypatch.setattr(datasets, "SIZES", {"zh": (3, 2, 2), "en": (2, 1, 1)})
    monkeypatch.setattr(datasets, "LINKS", 2)
    parties = datasets.load_parties("dbp15k-zh-en", tmp_path)
    assert parties.names == ("zh", "en")
    assert sorted((link.name, link.other_name) for link in parties.links) == [("一", "one"), ("二", "two")]
    save_parties(tmp_path / "dbp15k-zh-en.safetensors", parties)
    (folder / "links-test.txt.xz").unlink()
    with pytest.raises(BadInput, match="found no file links-test"):
        datasets.load_parties("dbp15k-zh-en", tmp_path)
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
    assert datasets.load_parties("dbp15k-zh-en", tmp_path) == parties
    with pytest.raises(BadInput, match="no such folder"):
        datasets.load_parties("other", tmp_path)


def test_the_public_data_becomes_peers(public_data):
    zh, en = datasets.load_parties("dbp15k-zh-en", public_data)
    assert (len(zh.train), len(en.train)) == (70_414, 95_142)
    small = datasets.load_parties("fkge", public_data)
    assert {"tharawat", "whisky", "worldlift"} <= set(small.names)


# -- cells -------------------------------------------------------------------------------------------------------------

QUICK = """
[reproduce]
table = "quick"

[grid]
"peers.setting" = {settings}
seed = [0, 1]

[graph]
path = "clinic-small"
{more}
[pairing]
retrain = 1
trainings = 2
patience = 2

[pairing.ppat]
epochs = 1

[scorer]
dim = 4

[loss]
name = "margin"

[negatives]
count = 1

[training]
epochs = 2
batch = 64
device = "cpu"
"""
PUBLIC = ["independent", "continued", "unified", "published", "procrustes"]


@pytest.fixture
def cells(tmp_path):
    folder = tmp_path / "cells"
    folder.mkdir()
    more = '\n[peers]\nsplit = [0.8, 0.1, 0.1]\nrename = true\nnames = ["hospital-00", "hospital-01"]\n'
    more = more.replace("hospital-00", clinic("small").names[0]).replace("hospital-01", clinic("small").names[1])
    (folder / "quick.toml").write_text(QUICK.format(settings=json.dumps(PUBLIC), more=more))
    return folder


def test_every_setting_has_lines_that_can_be_compared(cells, tmp_path, monkeypatch):
    found = read_cells(cells, "quick")
    rows = reproduce(found, results=tmp_path / "r.jsonl", runs=tmp_path / "runs", command="tacit reproduce quick")
    wanted = {"table", "dataset", "scorer", "setting", "parts", "seed", "metrics", "published", "seconds", "device",
              "commit", "command"}  # fmt: skip
    for row in rows:
        assert wanted <= row.keys()
        assert (row["parts"], row["scorer"], tuple(row["metrics"])) == (2, "transe", FIGURES)
        for figure in FIGURES:
            assert row["metrics"][figure] == pytest.approx(np.mean([peer[figure] for peer in row["by_peer"]]), abs=1e-6)
    by_setting = {(row["setting"], row["seed"]): row for row in rows}
    assert len(by_setting) == 2 * len(PUBLIC)
    assert len({row["fingerprint"] for row in rows}) == len(rows)
    for seed in (0, 1):  # one control for all, and each has as many trainings
        assert len({by_setting[setting, seed]["control"] for setting in PUBLIC}) == 1
        for setting in ("continued", "published", "procrustes"):
            course = by_setting[setting, seed]["course"]
            assert sum(each["trainings"] for each in course.values()) == 2 * (1 + 2)
        assert by_setting["independent", seed]["course"] == {"first": {"trainings": 2, "kept": 2}}
    assert by_setting["published", 0]["batches"]["count"] > 0
    assert "published_accounting" in by_setting["published", 0]
    assert all(row.get("epsilon") is None for row in rows)
    assert reproduce(found, results=tmp_path / "r.jsonl") == rows  # nothing is run again

    gains = {each["setting"]: each for each in summary(rows)}
    assert gains["continued"]["gain"] is None
    for setting in set(PUBLIC) - {"continued"}:
        apart = [
            by_setting[setting, s]["metrics"]["mrr"] - by_setting["continued", s]["metrics"]["mrr"] for s in (0, 1)
        ]
        assert gains[setting]["gain"]["mrr"] == (pytest.approx(np.mean(apart)), pytest.approx(np.std(apart, ddof=1)))
        assert gains[setting]["seeds"] == 2
    [alone] = summary([row for row in rows if row["setting"] == "published"])
    assert alone["gain"] is None  # without a control there is no gain

    shown = CliRunner().invoke(app, ["reproduce", "quick", "--configs", str(cells), "--results",
                                     str(tmp_path / "r.jsonl")])  # fmt: skip
    assert shown.exit_code == 0, shown.output
    assert "published" in shown.output
    monkeypatch.syspath_prepend(str(HOME / "benchmarks"))
    text = importlib.import_module("gains").markdown([row | {"table": "fkge"} for row in rows], "fkge")
    assert text.count("\n| ") == 1 + len(PUBLIC)
    assert "clinic-small, 2 peers, transe:" in text


def test_first_trainings_are_the_same_in_every_setting(cells):
    """So that what a meeting adds is what a meeting adds."""
    found = {cell.peers["setting"]: cell for cell in read_cells(cells, "quick") if cell.settings.seed == 0}
    rows = {name: reproduce_one(found[name]) for name in ("independent", "continued", "published", "procrustes")}
    first = [[peer["first"] for peer in row["validation"]] for row in rows.values()]
    assert all(scores == first[0] for scores in first)


def reproduce_one(cell):
    from tacit.peers.cells import peers_cell

    return peers_cell(cell, load(cell, None))


@pytest.mark.slow
def test_sound_cells_state_what_they_would_cost(tmp_path):
    text = QUICK.format(settings='["sound", "continued"]', more="") + (
        '\n[privacy]\nname = "dpsgd"\nsigma = 2.0\nnoise = "seeded"\n'
    )
    text = text.replace("count = 1", 'name = "pool"\ncount = 4\nscope = "vocabulary"\nsides = "random"')
    text = text.replace("patience = 2\n", 'patience = 2\nlook_sigma = 5.0\nnoise = "seeded"\n')
    (tmp_path / "sound.toml").write_text(text)
    for cell in read_cells(tmp_path, "quick"):
        if cell.settings.seed == 0:
            row = reproduce_one(cell)
            assert row["simulated"]
            assert 0 < row["epsilon"] < math.inf
            assert row["validation"] is None
            assert "published_accounting" not in row


def test_mixed_scorers(cells):
    [cell] = [c for c in read_cells(cells, "quick") if c.name == "quick-published-0"]
    row = reproduce_one(replace(cell, peers={**cell.peers, "scorers": ["transe", "transd"]}))
    assert row["scorer"] == "transe+transd"
    with pytest.raises(BadInput, match="1 scorers for 2 peers"):
        reproduce_one(replace(cell, peers={**cell.peers, "scorers": ["transe"]}))
    united = {**cell.peers, "scorers": ["transe", "transd"], "setting": "unified"}
    with pytest.raises(BadInput, match="one scorer"):
        reproduce_one(replace(cell, peers=united))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("rename = true", "renamed = true"), "Did you mean 'peers.rename'"),
        (('"independent"', '"alone"'), "peers.setting; expected one of independent"),
        (('"independent"', '"sound"'), "needs private training"),
        (("retrain = 1", "retrains = 1"), "Did you mean 'pairing.retrain'"),
        (("retrain = 1", "retrain = 0"), "retrain is at least 1"),
        (("retrain = 1", 'mode = "sound"'), "follows from peers.setting"),
        (("rename = true", 'scorers = ["transx"]'), "peers.scorers; expected some of"),
        (("[pairing.ppat]\nepochs = 1", "[pairing.ppat]\nepoch = 1"), "Did you mean 'pairing.ppat.epochs'"),
        (("[pairing]", "[mark]\nshare = 0.5\n\n[pairing]"), "without a recipe"),
    ],
)
def test_a_wrong_cell_is_refused_with_its_file(cells, change, message):
    file = cells / "quick.toml"
    text = file.read_text()
    assert change[0] in text
    file.write_text(text.replace(*change))
    with pytest.raises(BadInput, match=message) as error:
        read_cells(cells, "quick")
    assert "quick.toml" in str(error.value)


def test_pairing_without_peers_is_refused(cells):
    file = cells / "quick.toml"
    text = file.read_text()
    text = text[: text.index("[peers]")] + text[text.index("[pairing]") :]
    file.write_text(text.replace(f'"peers.setting" = {json.dumps(PUBLIC)}\n', ""))
    with pytest.raises(BadInput, match=r"which \[pairing\] belongs to"):
        read_cells(cells, "quick")


@pytest.mark.slow
def test_the_project_s_cells_are_whole(monkeypatch):
    monkeypatch.chdir(HOME)
    cells = read_cells(None, "fkge")
    assert {cell.peers["setting"] for cell in cells} == SETTINGS.keys()
    groups: dict[tuple, set] = {}
    for cell in cells:
        groups.setdefault((cell.dataset, cell.parts, cell.setting), set()).add(cell.settings.seed)
    assert all(seeds == {0, 1, 2} for seeds in groups.values())
    for cell in cells:
        assert cell.pairing["patience"] == cell.pairing["trainings"]
    assert {cell.parts for cell in cells if cell.dataset == "fb15k-237"} == {2, 3, 5}
    ablations = [cell for cell in read_cells(None, "fkge-ablations") if cell.table == "fkge-ablations"]
    shares = {cell.pairing["share"] for cell in ablations if "share" in cell.pairing}
    assert shares == {0.2, 0.4, 0.6, 0.8}
    assert {cell.pairing["parts"] for cell in ablations if "parts" in cell.pairing} == {"entities", "relations"}
    assert len(read_cells(None, "fkge-smoke")) == 7


@pytest.mark.slow
def test_the_smoke_test_runs_on_the_small_graphs(public_data, tmp_path, monkeypatch):
    monkeypatch.chdir(HOME)
    cells = [cell for cell in read_cells(None, "fkge-smoke") if cell.name in ("smoke-published", "smoke-sound-sound")]
    rows = reproduce(cells, data=Path(public_data), results=tmp_path / "r.jsonl")
    assert [row["parts"] for row in rows] == [3, 3]
    assert all(0 < row["metrics"]["typed_mrr"] <= 1 for row in rows)


def test_a_cell_s_peers_follow_its_seed():
    [cell, other] = [
        Cell(f"c{seed}", "t", "clinic-small", "", Settings(seed=seed), peers={"split": [0.8, 0.1, 0.1]})
        for seed in (0, 1)
    ]  # fmt: skip
    one, two = (peers_of(each, load(each, None)) for each in (cell, other))
    assert [g.entities for g in one] == [g.entities for g in two]
    assert any(a.fingerprint != b.fingerprint for a, b in zip(one, two, strict=True))


def test_scores_are_ranks_among_all_and_among_what_fits(cells):
    graph = clinic("small")[0]
    wanted = Settings.make({"scorer": {"dim": 4}, "training": {"epochs": 1, "device": "cpu"}})
    [peer] = independent(parties_of({"one": graph}), wanted).peers
    model = peer.learner.model()
    found = scored(model, graph, wanted)
    plain = rank(model, graph.test.triples, graph.statements.triples).metrics()
    typed = rank(model, graph.test.triples, graph.statements.triples, typed=typed_candidates(graph)).metrics()
    assert (found.mrr, found.hits1, found.hits3, found.hits10) == (plain.mrr, plain.hits1, plain.hits3, plain.hits10)
    assert (found.typed_mrr, found.typed_hits10) == (typed.mrr, typed.hits10)
    assert found.typed_mrr >= found.mrr  # fewer candidates
