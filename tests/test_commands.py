"""`tacit train`, `evaluate`, `predict`, `export` as a user meets them: real processes, right and wrong input."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from tacit import Graph, read_graph, write_graph
from tacit.clinic import clinic
from tacit.prediction import export, links, predict
from tacit.run import Run, train
from test_cli import tacit

SMALL = clinic("small", 1)
FAST = ("--dim", 8, "--epochs", 4, "--batch", 256, "--negatives", 8, "--every", 2, "--learning-rate", 0.05)


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """One trained run for all that look at one."""
    folder = tmp_path_factory.mktemp("runs")
    write_graph(SMALL[0], folder / "graph")
    tacit("train", folder / "graph", *FAST, "--out", folder / "run", cwd=folder)
    return folder / "run"


@pytest.mark.slow
def test_train_keeps_a_run_and_says_what_it_is_worth(tmp_path):
    shown = tacit("train", "clinic-small", "--pool", *FAST, cwd=tmp_path)
    assert "by popularity" in shown.stdout
    assert "Not private" in shown.stdout
    assert shown.stderr == ""
    found = json.loads(tacit("train", "clinic-small", "--pool", *FAST, "--json", "--out", tmp_path / "b").stdout)
    assert found["epsilon"] is None
    assert found["metrics"]["test"]["count"] == found["popularity"]["test"]["count"] > 0
    assert Run.open(tmp_path / "runs" / "run").metrics == Run.open(tmp_path / "b").metrics
    again = tacit("train", "clinic-small", "--pool", *FAST, cwd=tmp_path, code=2)
    assert "--force" in again.stderr
    assert "finished already" in tacit("train", "--resume", tmp_path / "b", code=2).stderr


@pytest.mark.slow
def test_flags_config_and_set_are_the_same_keys(tmp_path):
    config = tmp_path / "config.toml"
    config.write_text(
        'name = "mine"\nseed = 3\n[graph]\npath = "clinic-small"\nparty = "hillcrest"\n[scorer]\nname = "distmult"\n'
        "[training]\nepochs = 1\n"
    )
    name = json.loads(tacit("data", "inspect", "clinic-small", "--json").stdout)["parties"][0]["name"]
    config.write_text(config.read_text().replace("hillcrest", name))
    tacit("train", "--config", config, "--dim", 5, "--set", "optimizer.name=adagrad", cwd=tmp_path)
    run = Run.open(tmp_path / "runs" / "mine")
    assert (run.settings.seed, run.settings.dim, type(run.settings.optimizer).__name__) == (3, 5, "Adagrad")
    assert run.graph == clinic("small")[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["clinic-small"], "--party"),
        (["clinic-small", "--party", "nobody"], "There are:"),
        (["clinic-small", "--pool", "--scorer", "transx"], "Did you mean 'trans"),
        (["clinic-small", "--pool", "--set", "scorer.nrom=2"], "Did you mean 'scorer.norm'"),
        (["clinic-small", "--pool", "--set", "nonsense"], "key=value"),
        (["clinic-small", "--pool", "--config", "missing.toml"], "missing.toml"),
        (["clinic-small", "--pool", "--device", "cuda"], "no GPU"),
        (["clinic-small", "--pool", "--split", "0.5,0.1"], "add up to 1"),
        (["clinic-small", "--pool", "--set", "negatives.name='public-pairs'"], "no place for"),
        ([], "Say what to train on"),
        (["nowhere.tsv"], "nowhere.tsv"),
        (["--resume", "nowhere"], "is no run"),
        (["--resume", "nowhere", "--dim", "5"], "cannot change it"),
        (["--resume", "nowhere", "--seed", "0"], "cannot change it"),
        (["--resume", "nowhere", "--force"], "cannot change it"),
        (["clinic-small", "--pool", "--device", "cpu:foo"], "or auto, not"),
        (["clinic-small", "--pool", "--name", "../x"], "letters, digits"),
        (["clinic-small", "--pool", "--set", "a.a.a.a.a.a.a.a.a.a.a.a=1"], "none is so deep"),
    ],
)
def test_wrong_input_is_one_message_and_nothing_written(tmp_path, mistaken, arguments, message):
    if "cuda" in arguments and torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    assert message in mistaken("train", *arguments, cwd=tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_wrong_toml_says_where(tmp_path):
    (tmp_path / "c.toml").write_text("[scorer\n")
    assert "line 1" in tacit("train", "clinic-small", "--pool", "--config", tmp_path / "c.toml", code=2).stderr
    (tmp_path / "c.toml").write_text("[graph]\npaht = 'x'\n")
    assert "graph.paht" in tacit("train", "--config", tmp_path / "c.toml", code=2).stderr


@pytest.mark.slow
def test_a_single_file_can_be_split(tmp_path):
    rows = ["\t".join(triple) for triple in SMALL[0].named("train")]
    (tmp_path / "g.tsv").write_text("\n".join(rows))
    assert "nothing is measured" in tacit("train", tmp_path / "g.tsv", *FAST, "--out", tmp_path / "a").stdout
    shown = json.loads(tacit("train", tmp_path / "g.tsv", *FAST, "--split", "0.8,0.1,0.1", "--json", "--out",
                             tmp_path / "b").stdout)  # fmt: skip
    assert shown["metrics"]["test"]["count"] == 2 * len(Run.open(tmp_path / "b").graph.test)
    assert Run.open(tmp_path / "b").graph.statements.triples.shape == read_graph(tmp_path / "g.tsv").train.triples.shape


@pytest.mark.slow
def test_a_stopped_run_is_resumed(tmp_path):
    write_graph(SMALL[0], tmp_path / "graph")
    arguments = [sys.executable, "-m", "tacit", "train", "graph", *map(str, FAST), "--epochs", "1000", "--out", "run",
                 "--set", "evaluation.patience=1000"]  # fmt: skip
    process = subprocess.Popen(
        arguments,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # tests in the background ignore it
    )
    journal = tmp_path / "run" / "private" / "metrics.jsonl"
    for _ in range(3000):
        if journal.exists() and journal.stat().st_size > 200:
            break
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    out, told = process.communicate(timeout=180)
    assert process.returncode == 130
    assert "tacit train --resume run" in told
    assert out == ""
    assert "not finished" in tacit("evaluate", "run", cwd=tmp_path, code=2).stderr
    found = json.loads(tacit("train", "--resume", "run", "--json", cwd=tmp_path).stdout)
    assert found["metrics"]["test"]["count"] == 2 * len(SMALL[0].test)


@pytest.mark.slow
def test_a_terminal_gets_a_progress_bar(tmp_path):
    write_graph(SMALL[0], tmp_path / "graph")
    main, other = pty.openpty()
    command = [sys.executable, "-m", "tacit", "train", "graph", *map(str, FAST), "--epochs", "30", "--out", "run"]
    environment = {**os.environ, "COLUMNS": "120", "TERM": "xterm"}
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=other, env=environment) as process:
        os.close(other)
        seen = b""
        while True:
            try:
                piece = os.read(main, 4096)
            except OSError:
                break
            if not piece:
                break
            seen += piece
    os.close(main)
    assert process.returncode == 0
    for word in (b"epoch", b"loss", b"examples/s", b"valid MRR"):
        assert word in seen


@pytest.mark.slow
def test_evaluate_shows_what_is_asked_for(run_folder, tmp_path):
    run = Run.open(run_folder)
    plain = json.loads(tacit("evaluate", run_folder, "--json").stdout)
    assert plain["model"] == run.metrics["test"].json()
    assert plain["by_side"].keys() == {"tails", "heads"}
    labels = tmp_path / "labels.tsv"
    labels.write_text("".join(f"{name}\t{name.split(':')[0]}\n" for name in run.graph.entities))
    more = ("--per-relation", "--classify", "--typed", "--probe", labels, "--compare", run_folder, "--split", "valid")
    full = json.loads(tacit("evaluate", run_folder, *more, "--sides", "tails", "--ties", "optimistic", "--json").stdout)
    assert full["by_relation"].keys() <= set(run.graph.relations)
    assert 0 <= full["classification"]["accuracy"] <= 1
    assert full["probe"]["majority"] <= 1
    assert full["cluster_agreement"] == {"2": 1.0, "3": 1.0, "4": 1.0}
    assert full["by_side"].keys() == {"tails"}
    shown = tacit("evaluate", run_folder, *more).stdout
    assert "Linear probe" in shown
    assert "Triple classification" in shown
    labels.write_text("no tab here\n")
    assert "labels.tsv:1" in tacit("evaluate", run_folder, "--probe", labels, code=2).stderr
    assert "train, valid or test" in tacit("evaluate", run_folder, "--split", "dev", code=2).stderr
    assert "sides" in tacit("evaluate", run_folder, "--sides", "top", code=2).stderr
    assert "is no run" in tacit("evaluate", tmp_path, code=2).stderr


def test_a_baseline_too_large_for_the_memory_is_left_out_and_said(run_folder, capsys):
    from tacit.cli import models

    run = Run.open(run_folder)
    need = 8 * len(run.graph.relations) * len(run.graph.entities) / 2**20
    assert models._popular(run.graph, need * 1.01) is not None
    assert models._popular(run.graph, need * 0.99) is None
    assert "popularity is left out" in capsys.readouterr().err
    done = tacit("evaluate", run_folder, "--memory-mb", 0, "--json", code=2)
    assert "memory_mb is above 0" in done.stderr


@pytest.mark.slow
def test_predict_answers_by_name(run_folder):
    run = Run.open(run_folder)
    h, r, t = next(run.graph.named("test"))
    tails = json.loads(tacit("predict", run_folder, "--head", h, "--relation", r, "--top", 5, "--json").stdout)
    assert len(tails) == 5
    assert not any(answer["known"] for answer in tails)
    facts = {triple for split in ("train", "valid", "test") for triple in run.graph.named(split)}
    assert not {(a["head"], a["relation"], a["tail"]) for a in tails} & facts
    everything = json.loads(
        tacit("predict", run_folder, "--head", h, "--relation", r, "--known", "--top", 10**6, "--json").stdout
    )
    assert len(everything) == len(run.graph.entities)
    assert {a["tail"] for a in everything if a["known"]} == {c for a, b, c in facts if (a, b) == (h, r)}
    assert [a["score"] for a in everything] == sorted((a["score"] for a in everything), reverse=True)
    assert tacit("predict", run_folder, "--head", h, "--tail", t, "--known").stdout.count("known") >= 1
    assert "relation" in tacit("predict", run_folder, "--relation", r, "--tail", t).stdout
    assert "Did you mean" in tacit("predict", run_folder, "--head", h[:-1], "--relation", r, code=2).stderr
    assert "Did you mean" in tacit("predict", run_folder, "--head", h, "--relation", r.upper(), code=2).stderr
    assert "two of" in tacit("predict", run_folder, "--head", h, code=2).stderr


@pytest.mark.slow
def test_export_writes_rows_with_their_names(run_folder, tmp_path):
    run = Run.open(run_folder)
    rows = run.model.tables.entity.numpy()
    for kind in ("npy", "tsv", "safetensors", "nt"):
        found = json.loads(tacit("export", run_folder, "--format", kind, "--out", tmp_path / kind, "--json").stdout)
        assert sorted(found["files"]) == sorted(p.name for p in (tmp_path / kind).iterdir() if p.name != "export.json")
    assert np.array_equal(np.load(tmp_path / "npy" / "entities.npy"), rows)
    names = [line.split("\t")[1] for line in (tmp_path / "npy" / "entities.tsv").read_text().splitlines()]
    assert names == list(run.graph.entities)
    table = [line.split("\t") for line in (tmp_path / "tsv" / "entities.tsv").read_text().splitlines()]
    assert [row[0] for row in table] == names
    assert np.array_equal(np.array([[float(x) for x in row[1:]] for row in table], np.float32), rows)
    made = read_graph(tmp_path / "nt" / "links.nt")
    assert len(made.train) <= 100 * len(run.graph.relations)
    assert set(made.entities) <= set(run.graph.entities)
    assert not set(made.named("train")) & {t for s in ("train", "valid", "test") for t in run.graph.named(s)}
    assert "exists already" in tacit("export", run_folder, "--out", tmp_path / "npy", code=2).stderr
    assert "format" in tacit("export", run_folder, "--out", tmp_path / "x", "--format", "xls", code=2).stderr
    assert "without privacy" in tacit("export", run_folder, "--out", tmp_path / "npy", "--force").stdout.replace(
        "\n", " "
    )


def test_predictions_and_links_equal_a_slow_search():
    graph = Graph.from_triples([(f"e{i}", f"r{i % 2}", f"e{i * 3 % 7}") for i in range(14)], test=[("e1", "r0", "e2")])
    for scorer, flip in (
        ("complex", False),
        ("complex", True),
        ("transh", False),
        ("transr", False),
        ("transd", False),
    ):
        extra = {"training": {"reciprocal": flip}, "negatives": {"sides": "both"}}
        run = train(graph, scorer=scorer, dim=4, epochs=3, settings=extra)
        model = run.model
        facts = {triple for split in ("train", "valid", "test") for triple in graph.named(split)}

        def score(h, r, t, model=model):
            ids = [
                torch.tensor([vocab.id(name)])
                for vocab, name in zip((graph.entities, graph.relations, graph.entities), (h, r, t), strict=True)
            ]
            return float(model.score(*ids))

        slow = sorted((-score("e1", "r0", t), t) for t in graph.entities if ("e1", "r0", t) not in facts)
        assert [a.tail for a in predict(model, graph, head="e1", relation="r0", top=99)] == [t for _, t in slow]
        if not flip:
            slow = sorted((-score(h, "r0", "e2"), h) for h in graph.entities if (h, "r0", "e2") not in facts)
            assert [a.head for a in predict(model, graph, relation="r0", tail="e2", top=99)] == [h for _, h in slow]
        slow = sorted((-score("e1", r, "e2"), r) for r in graph.relations if ("e1", r, "e2") not in facts)
        assert [a.relation for a in predict(model, graph, head="e1", tail="e2", top=99)] == [r for _, r in slow]
        for relation in graph.relations:
            heads = {h for h, r, _ in graph.named("train") if r == relation}
            best = sorted(
                -score(h, relation, t) for h in heads for t in graph.entities if (h, relation, t) not in facts
            )
            found = [-p.score for p in links(model, graph, top=5) if p.relation == relation]
            assert found == pytest.approx(best[:5])


def test_a_prior_goes_along_when_rows_are_exported(tmp_path):
    from tacit.models.model import Model

    files = export(Model.popular(SMALL[0]), SMALL[0], tmp_path / "x")
    assert {"prior-heads.npy", "prior-tails.npy"} <= set(files)
