"""The search for settings: by validation alone, killed anywhere and gone on with, and never under an epsilon."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from dataclasses import replace

import numpy as np
import pytest

from tacit import Graph, TacitError, pool, tune, write_graph
from tacit.clinic import clinic
from tacit.errors import BadInput
from tacit.kept import locked
from tacit.run import Run, train
from tacit.settings import Settings, read_settings, to_toml
from tacit.tuning import Search, Space, begin
from test_cli import tacit

pytest.importorskip("optuna")

WHOLE = pool(clinic("small", 1))
FAST = {"training": {"epochs": 6}, "evaluation": {"every": 2}, "negatives": {"count": 8}}
SPACE = {"scorers": ["transe", "distmult"], "dims": [4, 8], "batches": [256]}
CALL = ("--trials", 7, "--epochs", 6, "--every", 2, "--scorers", "transe,distmult", "--dims", "4,8", "--batches", 256,
        "--set", "negatives.count=8")  # fmt: skip


def _shown(search):
    """All of a search but what the clock says."""
    return [replace(tried, seconds=0) for tried in search.tried]


@pytest.fixture(scope="module")
def searched():
    """One search that others are held against."""
    return tune(WHOLE, settings=FAST, space=SPACE, trials=8)


def test_it_finds_the_better_of_two():
    """A learning rate at which nothing moves in six epochs, and one at which it does."""
    fixed = FAST | {"scorer": {"name": "transe", "dim": 8}, "training": {"epochs": 6, "batch": 256}}
    slow, fast = (
        tune(WHOLE, settings=fixed, trials=1, space={"learning_rates": [rate], "margins": [8.0]}).best.mrr
        for rate in (1e-6, 0.05)
    )
    assert fast > 2 * slow
    found = tune(WHOLE, settings=fixed, trials=8, space={"learning_rates": [1e-6, 0.05], "margins": [8.0]})
    assert found.best.mrr == max(tried.mrr for tried in found.tried if tried.ending == "complete")
    assert found.best.mrr > (slow + fast) / 2
    assert found.settings().optimizer.learning_rate == found.best.chosen["optimizer.learning_rate"] > 1e-4
    assert found.settings().dim == 8


def test_it_follows_from_the_seed_and_repeats_nothing(searched):
    assert _shown(tune(WHOLE, settings=FAST, space=SPACE, trials=8)) == _shown(searched)
    other = tune(WHOLE, settings=FAST, space=SPACE, trials=2, seed=5)
    assert _shown(other) != _shown(searched)[:2]
    drawn = [tuple(sorted(tried.drawn.items())) for tried in searched.tried]
    assert len(set(drawn)) == len(drawn)
    assert {tried.chosen["scorer.name"] for tried in searched.tried} == {"transe", "distmult"}
    for tried in searched.tried:
        assert ("scorer.gamma" in tried.chosen) == (tried.chosen["scorer.name"] == "transe")


def test_test_triples_have_no_part_in_it(monkeypatch, searched):
    """Poisoned: whoever ranks one of them fails. And other test triples change nothing, not one bit."""
    from tacit import training

    keys = set(WHOLE.keys(WHOLE.test.triples).tolist()) - set(WHOLE.keys(WHOLE.valid.triples).tolist())
    assert keys
    genuine = training.rank

    def rank(model, asked, *others, **more):
        triples = getattr(asked, "triples", asked)
        assert not keys & set(WHOLE.keys(np.asarray(triples)).tolist())
        return genuine(model, asked, *others, **more)

    monkeypatch.setattr(training, "rank", rank)
    assert _shown(tune(WHOLE, settings=FAST, space=SPACE, trials=2)) == _shown(searched)[:2]
    with pytest.raises(AssertionError):
        train(WHOLE, settings=FAST, dim=4, epochs=1)
    without = replace(WHOLE, test=WHOLE.test.at(np.arange(3)))
    assert _shown(tune(without, settings=FAST, space=SPACE, trials=2)) == _shown(searched)[:2]


def test_nothing_of_the_test_triples_is_kept(tmp_path):
    search = begin(WHOLE, settings=FAST, space=SPACE, out=tmp_path / "s")
    assert not len(search.graph.test)
    assert not len(Search.open(tmp_path / "s").graph.test)


def test_a_search_that_was_stopped_goes_on_as_if_it_had_not(tmp_path, searched):
    """Stopped inside a trial, and between two; a line that was cut off was no trial."""

    class Stop(Exception):
        pass

    def stop(number, settings, event):
        if number == 6 and event["event"] == "validation":
            raise Stop

    search = begin(WHOLE, settings=FAST, space=SPACE, trials=8, out=tmp_path / "s")
    with pytest.raises(Stop):
        search.run(on_event=stop)
    journal = tmp_path / "s" / "private" / "trials.jsonl"
    assert len(journal.read_text().splitlines()) == 6
    with open(journal, "a") as file:
        file.write('{"number": 6, "ending": "comp')
    (tmp_path / "s" / "best.toml").unlink()
    again = Search.open(tmp_path / "s")
    assert len(again.tried) == 6
    assert _shown(again.run()) == _shown(searched)
    assert _shown(Search.open(tmp_path / "s")) == _shown(searched)
    assert Settings.make(read_settings(tmp_path / "s" / "best.toml")) == searched.settings()
    more = Search.open(tmp_path / "s")
    more.limit(9, None)
    assert _shown(more.run())[:8] == _shown(searched)
    assert len(more.tried) == 9


@pytest.mark.full
def test_killed_and_resumed_at_the_command_line(tmp_path):
    write_graph(WHOLE, tmp_path / "graph")
    whole = json.loads(tacit("tune", "graph", *CALL, "--out", "a", "--json", cwd=tmp_path).stdout)
    assert sum(whole["trials"].values()) == 7
    assert (whole["epsilon"], whole["public"]) == (None, False)
    assert "test" not in json.dumps(whole["best"])
    command = [sys.executable, "-m", "tacit", "tune", "graph", *map(str, CALL), "--out", "b"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        journal = tmp_path / "b" / "private" / "trials.jsonl"
        for _ in range(6000):
            if journal.exists() and journal.stat().st_size:
                break
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert len(Search.open(tmp_path / "b").tried) < 7
    shown = tacit("tune", "--resume", "b", cwd=tmp_path).stdout
    assert "7/7" in shown or "7 trials" in shown
    assert "Not private" in shown
    a, b = (Search.open(tmp_path / name) for name in "ab")
    assert _shown(a) == _shown(b)
    assert (tmp_path / "a" / "best.toml").read_text() == (tmp_path / "b" / "best.toml").read_text()
    text = (tmp_path / "a" / "best.toml").read_text()
    assert f"Validation MRR {whole['best']['valid_mrr']:.4f}" in text
    tacit("train", "--config", "a/best.toml", "--out", "run", cwd=tmp_path)
    run = Run.open(tmp_path / "run")
    assert run.settings == a.settings()
    assert run.graph == WHOLE
    done = json.loads(
        tacit("tune", "graph", *CALL, "--trials", 1, "--out", "a", "--force", "--json", cwd=tmp_path).stdout
    )
    assert sum(done["trials"].values()) == 1
    assert os.stat(tmp_path / "a" / "private").st_mode & 0o777 == 0o700


def test_hopeless_trials_are_given_up_and_diverged_ones_count_as_nothing():
    space = {"scorers": ["distmult"], "dims": [4], "batches": [256], "learning_rates": [1e-6, 0.5]}
    found = tune(WHOLE, settings=FAST | {"training": {"epochs": 20}}, space=space, trials=14, seed=3)
    assert {tried.ending for tried in found.tried} == {"complete", "pruned"}
    assert all(tried.ending != "pruned" for tried in found.tried[:5])
    given_up = [tried for tried in found.tried if tried.ending == "pruned"]
    assert all(len(tried.reports) < 10 for tried in given_up)
    assert all(tried.mrr < found.best.mrr for tried in given_up)
    wild = {**space, "learning_rates": [1e38]}
    lost = tune(WHOLE, settings={**FAST, "optimizer": {"name": "sgd"}}, space=wild, trials=2)
    assert [(tried.ending, tried.mrr) for tried in lost.tried] == [("diverged", 0.0)] * 2
    with pytest.raises(TacitError, match="every one diverged"):
        lost.settings()


def test_minutes_end_a_search_too():
    search = begin(WHOLE, settings=FAST, space=SPACE, minutes=1e-9)
    assert search.trials is None
    assert len(search.run().tried) == 1
    with pytest.raises(TacitError, match="minutes is a number above 0"):
        begin(WHOLE, minutes=-1.0)


@pytest.mark.parametrize("noise", ["system", "seeded"])
def test_no_epsilon_for_a_search_on_private_triples(noise):
    private = {"privacy": {"name": "dpsgd", "epsilon": 4.0, "noise": noise}}
    with pytest.raises(TacitError, match=r"not covered by an epsilon.*--public"):
        tune(WHOLE, settings=private, trials=1)
    with pytest.raises(TacitError, match="nothing to tune"):
        tune(WHOLE, settings={"privacy": {"epsilon": 4.0}}, trials=1, public=True)


@pytest.mark.full
def test_private_settings_are_found_on_public_triples(tmp_path):
    """Trials simulate the noise; what is written asks for real noise; the private graph is not even there."""
    write_graph(WHOLE, tmp_path / "public")
    call = ("tune", "absent.tsv", "--split", "0.8,0.1,0.1", "--public", "public", "--privacy", "dpsgd", "--epsilon", 8,
            "--trials", 2, "--epochs", 4, "--every", 2, "--dims", 4, "--scorers", "transe", "--batches", 512,
            "--negatives", 8)  # fmt: skip
    shown = tacit(*call, "--out", "s", cwd=tmp_path)
    assert "Searched on a public graph" in shown.stdout
    written = read_settings(tmp_path / "s" / "best.toml")
    assert written.pop("graph") == {"path": "absent.tsv", "split": [0.8, 0.1, 0.1]}
    privacy = Settings.make(written).privacy
    assert (privacy.epsilon, privacy.noise, privacy.sigma) == (8.0, "system", None)
    assert 0.1 <= privacy.clip <= 10
    found = Search.open(tmp_path / "s")
    assert found.json()["epsilon"] is None
    (tmp_path / "absent.tsv").write_text("\n".join("\t".join(triple) for triple in WHOLE.named("train")))
    tacit("train", "--config", "s/best.toml", "--out", "run", cwd=tmp_path)
    assert Run.open(tmp_path / "run").epsilon == pytest.approx(8, rel=0.02)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Say what to search on"),
        (["absent.tsv"], "absent.tsv: no such file"),
        (["clinic-small"], "--party"),
        (["clinic-small", "--pool", "--scorers", "transx"], "there is no scorer 'transx'"),
        (["clinic-small", "--pool", "--dims", "big"], "--dims is a list of whole numbers"),
        (["clinic-small", "--pool", "--dims", "-4"], "dims are whole numbers above 0"),
        (["clinic-small", "--pool", "--learning-rates", "0.1,0.01"], "the smaller one first"),
        (["clinic-small", "--pool", "--scorers", ","], "at least one scorer"),
        (["clinic-small", "--pool", "--trials", "0"], "trials is at least 1"),
        (["clinic-small", "--pool", "--minutes", "-3"], "minutes is a number above 0"),
        (["clinic-small", "--pool", "--minutes", "nan"], "minutes is a number above 0"),
        (["clinic-small", "--pool", "--epsilon", "4"], "nothing to tune"),
        (["clinic-small", "--pool", "--epsilon", "4", "--privacy", "dpsgd"], "--public PATH"),
        (["clinic-small", "--pool", "--dims", "8", "--set", "scorer.dim=9"], "scorer.dim is set to 9"),
        (["clinic-small", "--pool", "--set", "scorer.nrom=2"], "Did you mean 'scorer.norm'"),
        (["clinic-small", "--pool", "--set", "scorer=3"], "no keys of its own"),
        (["clinic-small", "--pool", "--set", "seed=x", "--split", "0.8,0.1,0.1"], "seed"),
        (["g.tsv"], "no validation triples"),
        (["g.tsv", "--config", "g.tsv"], "TOML"),
        (["g.tsv", "--device", "tpu"], "the device is"),
        (["--resume", "nowhere"], "is no search"),
        (["--resume", "nowhere", "--dims", "8"], "cannot change it"),
        (["--resume", "."], "is no search"),
        (["clinic-small", "--pool", "--out", "g.tsv"], "exists already"),
    ],
)
def test_wrong_input_is_one_message_and_nothing_written(tmp_path, mistaken, arguments, message):
    (tmp_path / "g.tsv").write_text("a\tr\tb\n")
    assert message in mistaken("tune", *arguments, cwd=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["g.tsv"]


def test_one_process_at_a_time(tmp_path, mistaken):
    search = begin(WHOLE, settings=FAST, space=SPACE, trials=1, out=tmp_path / "s")
    with locked(search.path):
        assert "another process" in mistaken("tune", "--resume", "s", cwd=tmp_path)
        assert "another process" in mistaken("tune", "clinic-small", "--pool", "--out", "s", "--force", cwd=tmp_path)
    assert not Search.open(search.path).tried


def test_a_damaged_folder_is_refused(tmp_path, mistaken):
    search = tune(WHOLE, settings=FAST, space=SPACE, trials=1, out=tmp_path / "s")
    journal = search.path / "private" / "trials.jsonl"
    journal.write_text("nonsense\n" + journal.read_text())
    assert "trials.jsonl:1" in mistaken("tune", "--resume", "s", cwd=tmp_path)
    config = search.path / "config.json"
    kept = config.read_text()
    config.write_text(kept.replace('"dims"', '"sizes"'))
    assert "found" in mistaken("tune", "--resume", "s", cwd=tmp_path)
    config.write_text(kept)
    journal.unlink()
    (search.path / "private" / "graph.safetensors").write_bytes(b"")
    assert "graph.safetensors" in mistaken("tune", "--resume", "s", cwd=tmp_path)


def test_without_optuna_it_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(TacitError, match=re.escape("pip install 'tacit-kg[tune]'")):
        begin(WHOLE, out=tmp_path / "s")
    assert not list(tmp_path.iterdir())


def test_settings_as_toml_are_the_settings():
    values = {"name": "a", "none": None, "list": [0.5, 1], "text": 'q"\\\x7f\u2028é\t', "on": True,
              "sub": {"x": 1e-9, "y": 1e22, "none": None}}  # fmt: skip
    read = tomllib.loads(to_toml(values))
    assert read == {**{k: v for k, v in values.items() if k != "none"}, "sub": {"x": 1e-9, "y": 1e22}}
    assert Settings.make(tomllib.loads(to_toml(Settings().json()))) == Settings()


def test_spaces_that_are_none():
    for wrong in ({"dims": 8}, {"dims": [True]}, {"scorers": [3]}, {"colours": [1]}, {"dims": ["8"]}):
        with pytest.raises(BadInput):
            Space.of(wrong)
    small = Graph.from_triples([("a", "r", "b"), ("b", "r", "c")], valid=[("c", "r", "a")])
    assert begin(small).space.batches == (2,)
