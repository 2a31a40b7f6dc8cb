"""Tables run again: cells from files, results that are only added to, runs that go on."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from tacit import datasets
from tacit.cli import app, show
from tacit.cli.reproduce import _attacks as told_by_attacks
from tacit.cli.reproduce import _figures as told_by_figures
from tacit.clinic import clinic
from tacit.errors import BadInput, TacitError
from tacit.parties import pool
from tacit.privacy.privatizers import NoPrivacy
from tacit.reproduction import (
    Cell,
    Results,
    alike,
    load,
    main,
    read_cells,
    reproduce,
    run_cell,
    run_together,
    with_marks,
)
from tacit.settings import Settings, combine
from tacit.tensors import save_graph

GRAPH = clinic("small")[0]
HOME = Path(__file__).parent.parent / "benchmarks" / "linkprediction"
QUICK = """
[reproduce]
table = "small"
setting = "{setting}"
goal = 0.0
published."Some et al." = {{mrr = 0.123}}

[graph]
path = "{graph}"

[scorer]
name = "{scorer}"
dim = 4

[negatives]
count = 4

[training]
epochs = 6
batch = 64
device = "cpu"

[evaluation]
every = 2
"""


@pytest.fixture
def table(tmp_path):
    """A folder of two cells."""
    save_graph(tmp_path / "graph.safetensors", GRAPH)
    folder = tmp_path / "cells"
    folder.mkdir()
    for scorer in ("distmult", "transe"):
        text = QUICK.format(setting="quick", graph=tmp_path / "graph.safetensors", scorer=scorer)
        (folder / f"a-{scorer}.toml").write_text(text)
    return folder


def again(table, name="runs", results="results.jsonl", only=(), **options):
    home = table.parent
    return reproduce(read_cells(table, "small", only), runs=home / name, results=home / results,
                     command="tacit reproduce small", **options)  # fmt: skip


def test_every_cell_has_a_line_and_is_run_once(table):
    begun = []
    rows = again(table, on_cell=lambda cell, row: begun.append((cell.name, row is None)))
    assert begun == [("a-distmult", True), ("a-distmult", False), ("a-transe", True), ("a-transe", False)]
    lines = [json.loads(line) for line in (table.parent / "results.jsonl").read_text().splitlines()]
    assert lines == rows
    wanted = {"table", "dataset", "scorer", "setting", "parts", "seed", "metrics", "published", "seconds", "device",
              "commit", "command"}  # fmt: skip
    for row, scorer in zip(rows, ("distmult", "transe"), strict=True):
        assert wanted <= row.keys()
        assert {"mrr", "hits1", "hits3", "hits10", "mr"} <= row["metrics"].keys()
        assert (row["scorer"], row["published"]) == (scorer, {"Some et al.": {"mrr": 0.123}})
        assert row["command"].endswith(f"--only a-{scorer}")
        assert row["metrics"]["count"] == 2 * len(GRAPH.test)
    begun.clear()
    assert again(table, on_cell=lambda cell, row: begun.append((cell.name, row is None))) == rows
    assert begun == [("a-distmult", False), ("a-transe", False)]
    assert len((table.parent / "results.jsonl").read_text().splitlines()) == 2
    changed = (table / "a-transe.toml").read_text().replace("dim = 4", "dim = 5")
    (table / "a-transe.toml").write_text(changed)
    with pytest.raises(TacitError, match="other settings"):
        again(table)
    assert len(again(table, name="others")) == 2
    assert len((table.parent / "results.jsonl").read_text().splitlines()) == 3


def test_what_was_interrupted_goes_on_and_ends_the_same(table):
    whole = again(table, name="whole", results="whole.jsonl", only=["a-transe"])

    def stop(event):
        if event.get("epoch") == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        again(table, only=["a-transe"], on_event=stop)
    assert not (table.parent / "results.jsonl").exists()
    seen = []
    rows = again(table, only=["a-transe"], on_event=lambda event: seen.append(event.get("epoch")))
    assert next(n for n in seen if n) == 5  # from the checkpoint after epoch 4
    assert rows[0]["metrics"] == whole[0]["metrics"]


def test_device_and_kernels_are_not_what_sets_cells_apart(table):
    [cell] = read_cells(table, "small", ["a-transe"])
    text = (table / "a-transe.toml").read_text()
    (table / "a-transe.toml").write_text(text.replace('device = "cpu"', 'device = "auto"\nkernel = "reference"'))
    [other] = read_cells(table, "small", ["a-transe"])
    assert cell.fingerprint(GRAPH) == other.fingerprint(GRAPH)
    (table / "a-transe.toml").write_text(text.replace("count = 4", "count = 5"))
    [other] = read_cells(table, "small", ["a-transe"])
    assert cell.fingerprint(GRAPH) != other.fingerprint(GRAPH)
    assert cell.fingerprint(GRAPH) != cell.fingerprint(clinic("small")[1])


def test_settings_that_came_later_leave_kept_results_as_they_are():
    """Fingerprints as they were before noise could follow a signal."""
    for privacy, before in (
        ({"name": "dpsgd", "epsilon": 2.0}, "7a9ab48bed293631"),
        ({"epsilon": 1.0}, "96cbb2cae775a84f"),
        ({"name": "dpsgd", "epsilon": 2.0, "noise_least": 0.4}, None),
    ):
        cell = Cell("n", "t", "d", "", Settings.make({"privacy": privacy}), None, {})
        assert (cell.fingerprint(GRAPH) == before) == (before is not None)


def test_results_are_only_added_to(tmp_path):
    results = Results(tmp_path / "deep" / "results.jsonl")
    assert list(results) == []
    for mrr in (0.1, 0.2):
        results.append({"metrics": {"mrr": mrr}, "fingerprint": "same"})
    assert results.of("same")["metrics"]["mrr"] == 0.2
    results.path.write_bytes(results.path.read_bytes()[:-1])  # as another program may have left it
    results.append({"metrics": {"mrr": 0.3}, "fingerprint": "other"})
    assert [row["metrics"]["mrr"] for row in results] == [0.1, 0.2, 0.3]
    results.path.write_bytes(results.path.read_bytes()[:-7])  # the last was cut off, as by a full disk
    assert [row["metrics"]["mrr"] for row in results] == [0.1, 0.2]
    results.append({"metrics": {"mrr": 0.4}})
    assert [row["metrics"]["mrr"] for row in results] == [0.1, 0.2, 0.4]
    results.path.write_bytes(b'{"metrics"\n' + results.path.read_bytes())
    with pytest.raises(BadInput, match=r"results.jsonl:1: found .*expected a JSON object"):
        list(results)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("[reproduce]", "[reproduced]"), "no section"),
        (('table = "small"', ""), "no section"),
        (('table = "small"', "table = 3"), "reproduce.table; expected a str"),
        (("goal = 0.0", "goal = true"), "reproduce.goal; expected a float"),
        (("goal = 0.0", "gaol = 1.0"), "Did you mean 'reproduce.goal'"),
        (('published."Some et al." = {mrr = 0.123}', "published.Someone = 3"), "figures by name"),
        (("[graph]", "[graphs]"), "expected \\[graph\\] with a path"),
        (("dim = 4", "dmi = 4"), "Did you mean|dim"),
        (("[training]", "[training"), "cannot be read as TOML"),
    ],
)
def test_a_wrong_cell_is_refused_with_its_file(table, change, message):
    path = table / "a-transe.toml"
    assert change[0] in path.read_text()
    path.write_text(path.read_text().replace(*change))
    with pytest.raises(BadInput, match=message) as found:
        Cell.read(path)
    assert "a-transe.toml" in str(found.value)


def test_a_table_that_is_not_there_is_refused(table, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadInput, match="or name one by --configs"):
        read_cells(None, "small")
    with pytest.raises(BadInput, match="no such folder"):
        read_cells(tmp_path / "nowhere", "small")
    with pytest.raises(BadInput, match="no cell of the table 'large'"):
        read_cells(table, "large")
    with pytest.raises(TacitError, match="There are: a-distmult, a-transe"):
        read_cells(table, "small", ["b"])


def test_the_command_prints_ours_beside_the_published(table, monkeypatch):
    monkeypatch.chdir(table.parent)
    arguments = ["reproduce", "small", "--configs", "cells", "--results", "r.jsonl"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert "0.123 Some et al." in done.output
    as_json = CliRunner().invoke(app, [*arguments, "--json"])
    assert [row["scorer"] for row in json.loads(as_json.stdout)] == ["distmult", "transe"]
    assert (table.parent / "runs" / "small" / "a-transe" / "config.json").is_file()


def test_a_cell_is_a_config_of_train(table, monkeypatch):
    monkeypatch.chdir(table.parent)
    # A graph's file by save_graph is no source that `train` reads: the graph is given.
    done = CliRunner().invoke(app, ["train", "clinic-small", "--pool", "--config", "cells/a-transe.toml", "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["metrics"]["test"]["count"] > 0


@pytest.mark.slow
def test_machines_with_torch_alone_run_cells_too(table):
    blocked = ["pyarrow", "pyoxigraph", "duckdb", "typer", "rich", "backports", "pandas", "safetensors", "pydantic"]
    code = f"import sys, runpy\nfor name in {blocked}: sys.modules[name] = None\n"
    code += "runpy.run_module('tacit.reproduction', run_name='__main__')"
    home = table.parent
    arguments = ["small", "--configs", table, "--runs", home / "runs", "--results", home / "r.jsonl", "--only", "a-tr"]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=300,
                          check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["cell"] == "a-transe"
    [row] = Results(home / "r.jsonl")
    assert row["command"] == "python -m tacit.reproduction small --only a-transe"


def test_a_wrong_call_is_one_message(table, capsys):
    assert main(["small", "--configs", str(table / "nowhere")]) == 2
    assert "no such folder" in capsys.readouterr().err


def test_the_tables_cells_are_whole():
    cells = read_cells(HOME, "linkprediction")
    for cell in cells:
        assert cell.name == f"{cell.dataset}-{cell.scorer}"
        assert cell.dataset in datasets.BENCHMARKS
        assert (cell.settings.evaluation.sides, cell.settings.evaluation.ties) == ("both", "realistic")
    goals = {(c.dataset, c.scorer): c.goal for c in cells if c.goal is not None}
    assert goals == {
        ("fb15k-237", "transe"): 0.325, ("fb15k-237", "rotate"): 0.335, ("fb15k-237", "distmult"): 0.340,
        ("fb15k-237", "complex"): 0.345, ("fb15k-237", "rescal"): 0.350, ("wn18rr", "rotate"): 0.472,
        ("wn18rr", "complex"): 0.470, ("wn18rr", "distmult"): 0.445,
    }  # fmt: skip
    assert {c.scorer for c in cells if c.dataset == "nell-995"} == {"transe", "rotate", "distmult", "complex"}


def test_kept_results_are_of_the_cells_as_they_are():
    """What stands in the project's results with a goal was reached by settings that are still there."""
    results = Results(HOME.parent / "results" / "linkprediction.jsonl")
    cells = {(c.dataset, c.scorer): c for c in read_cells(HOME, "linkprediction")}
    latest = {(row["dataset"], row["scorer"]): row for row in results}
    assert latest
    for place, row in latest.items():
        ours = cells[place].settings.json()
        kept = row["settings"]
        for settings in (ours, kept):
            for key in ("device", "kernel", "checkpoint_every"):
                settings["training"].pop(key)
        assert kept == ours, place


FEDERATED = """
recipe = "{recipe}"

[reproduce]
table = "small"
also = ["a-figure"]
figures = {{Someone = "published.csv"}}

[grid]
"scorer.name" = ["transe", "distmult"]
seed = [0, 1]

[graph]
path = "clinic-small"
{partition}
[scorer]
dim = 4

[negatives]
count = 4

[training]
device = "cpu"

[federation]
rounds = 2
local_epochs = 1

[evaluation]
every = 1
"""


@pytest.mark.parametrize(("partition", "parts"), [('[partition]\nby = "triples"\nparts = 4\n', 4), ("", 3)])
def test_a_grid_of_federations(tmp_path, partition, parts):
    cells = tmp_path / "cells"
    cells.mkdir()
    (cells / "fed.toml").write_text(FEDERATED.format(recipe="fedr", partition=partition))
    published = (
        "dataset,scorer,setting,parts,mrr\nclinic-small,distmult,fedr,4,0.25\nclinic-small,distmult,fedr,9,0.5\n"
    )
    (cells / "published.csv").write_text(published)
    found = read_cells(cells, "a-figure")
    assert [cell.name for cell in found] == ["fed-transe-0", "fed-transe-1", "fed-distmult-0", "fed-distmult-1"]
    where = {"runs": tmp_path / "runs", "results": tmp_path / "r.jsonl"}
    rows = reproduce(found[1:3], **where)
    for row, (scorer, seed) in zip(rows, [("transe", 1), ("distmult", 0)], strict=True):
        assert (row["scorer"], row["seed"], row["setting"], row["parts"]) == (scorer, seed, "fedr", parts)
        assert len(row["loss"]) == row["rounds"] == 2
        assert row["bytes"]["bytes"] == row["bytes"]["to_server"] + row["bytes"]["from_server"] > 0
        assert row["cost"].keys() == {"0.2", "0.4"}
    assert rows[1]["published"] == ({"Someone": {"mrr": 0.25}} if parts == 4 else {})
    assert rows[0]["published"] == {}
    assert reproduce(found[1:3], **where) == rows
    for change in ({"recipe": "fede"}, {"federation": replace(found[1].federation, rounds=1)}):
        with pytest.raises(TacitError, match="other settings"):
            reproduce([replace(found[1], **change)], **where)
    shown = CliRunner().invoke(app, ["reproduce", "small", "--configs", str(cells), "--only", "fed-transe-1",
                                     "--results", str(tmp_path / "r.jsonl")])  # fmt: skip
    assert shown.exit_code == 0, shown.output
    (cells / "fed.toml").write_text(FEDERATED.format(recipe="fedx", partition=partition))
    with pytest.raises(BadInput, match=r"fed.toml: the recipe is"):
        read_cells(cells, "small")


@pytest.mark.slow
def test_the_papers_cells_are_all_there(monkeypatch):
    monkeypatch.chdir(HOME.parent.parent)
    cells = [cell for cell in read_cells(None, "fedr-table2") if cell.settings.seed == 0]
    assert len(cells) == 144
    assert len({(c.dataset, c.scorer, c.setting, c.parts) for c in cells}) == 144
    assert all("mrr" in cell.published["FedR"] for cell in cells)
    assert {cell.settings.evaluation.sides for cell in cells} == {"tails"}
    five = [cell for cell in read_cells(None, "fedr-table2") if cell.parts == 5]
    assert len(five) == 3 * 36
    for figure, many in (("fedr-fig3", 12), ("fedr-fig4", 36)):
        assert len(read_cells(None, figure)) == many


def test_a_defence_stands_beside_what_was_found_without_it(monkeypatch):
    def row(setting, epsilon, attack, value, low, high):
        about = {"cell": setting, "dataset": "d", "scorer": "transe", "parts": 3, "seed": 0, "adversary": "party",
                 "targets": "canaries", "metrics": {"f1": 0.7, "auc": value, "way": "score"}, "nothing": None,
                 "published": {}, "mrr": {"test": 0.2}}  # fmt: skip
        ways = {"score": {"last": {"auc": {"value": value, "low": low, "high": high}}}}
        return about | {"setting": setting, "epsilon": epsilon, "attack": attack, "ways": ways}

    printed = []
    monkeypatch.setattr(show, "table", lambda *columns, rows, **_: printed.append(list(rows)))
    plain, safe = row("none", None, "cip", 0.9, 0.88, 0.92), row("S1", 2.0, "cip", 0.5, 0.48, 0.52)
    open_ = row("S4", 8.0, "counts", 0.88, 0.87, 0.89)
    told_by_attacks([], [plain, safe, open_])
    _, [defended, not_defended] = printed
    assert defended[4:] == ("0.900", "0.500 (0.480-0.520)", "0.200", "defended")
    assert not_defended[4:] == ("", "0.880 (0.870-0.890)", "0.200", "not defended")
    printed.clear()
    told_by_attacks([], [plain])  # no defence, and without "none" nothing to judge one by
    told_by_attacks([], [safe])
    assert len(printed) == 2


def test_each_cell_has_the_results_of_its_own_table(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for table in ("one", "two"):
        (tmp_path / "benchmarks" / table).mkdir(parents=True)
        text = FEDERATED.format(recipe="fede", partition="").replace('table = "small"', f'table = "{table}"')
        (tmp_path / "benchmarks" / table / f"{table}.toml").write_text(
            text.replace('figures = {Someone = "published.csv"}', "")
        )
    cells = [cell for cell in read_cells(None, "a-figure") if cell.name.endswith("transe-0")]
    reproduce(cells)
    for table in ("one", "two"):
        [row] = Results(tmp_path / "benchmarks" / "results" / f"{table}.jsonl")
        assert row["table"] == table
        assert (tmp_path / "runs" / table / f"{table}-transe-0").is_dir()
    (tmp_path / "benchmarks" / "two" / "two.toml").rename(tmp_path / "benchmarks" / "two" / "one.toml")
    with pytest.raises(BadInput, match="two cells are called"):
        read_cells(None, "a-figure")


def test_a_grid_is_not_for_federate(tmp_path):
    (tmp_path / "fed.toml").write_text(FEDERATED.format(recipe="fede", partition=""))
    done = CliRunner().invoke(app, ["federate", "--config", str(tmp_path / "fed.toml")])
    assert "tacit reproduce runs them" in str(done.exception)


def test_marks_and_settings_in_a_cells_name(tmp_path):
    """A share of statements is confidential, or left out of train; the setting's name says which."""
    (tmp_path / "dpkge.toml").write_text("""
[reproduce]
table = "dpkge"
setting = "sigma {privacy.sigma}, confidential {mark.share}"
figures = {Someone = "published.csv"}

[grid]
"privacy.sigma" = [0.5]
"mark.share" = [0.25]

[graph]
path = "clinic-small"

[scorer]
dim = 4

[loss]
name = "margin"

[negatives]
count = 1

[training]
batch = 64
epochs = 2

[privacy]
name = "dpkge"
mode = "published"
""")
    (tmp_path / "published.csv").write_text(
        'dataset,scorer,setting,parts,mr,hits10\nclinic-small,transe,"sigma 0.5, confidential 0.25",1,99.5,0.25\n'
    )
    [cell] = read_cells(tmp_path, "dpkge")
    assert cell.setting == "sigma 0.5, confidential 0.25"
    assert cell.published == {"Someone": {"mr": 99.5, "hits10": 0.25}}
    graph = load(cell, None)
    marked = with_marks(cell, graph).train.confidential
    assert marked.mean() == pytest.approx(0.25, abs=0.03)
    row = run_cell(cell, graph, tmp_path / "run")
    assert len(row["loss"]) == len(row["published_accounting"]["by"]) == 2
    assert "epsilon" not in row
    assert json.dumps(row, allow_nan=False)
    dropped = replace(cell, marked={"share": 0.25, "drop": True}, settings=replace(cell.settings, privacy=NoPrivacy()))
    assert len(with_marks(dropped, graph).train) == int((~marked).sum())
    assert dropped.fingerprint(graph) != cell.fingerprint(graph)
    assert run_cell(dropped, graph, tmp_path / "dropped")["metrics"]["count"] == 2 * len(graph.test)
    wrong = (tmp_path / "dpkge.toml").read_text()
    changes = [("[0.25]", "[1.5]", "share from 0 to 1"), ("{mark.share}", "{mark.shore}", r"mark\.shore")]
    for old, new, words in changes:
        (tmp_path / "dpkge.toml").write_text(wrong.replace(old, new))
        with pytest.raises(BadInput, match=words):
            read_cells(tmp_path, "dpkge")


@pytest.mark.slow
@pytest.mark.parametrize("scorer", ["transm", "rescal"])
def test_cells_that_train_together_are_as_each_alone(tmp_path, scorer):
    """Seeds, noise, percentiles and marks differ; the rest of their settings does not."""
    base = {"scorer": {"name": scorer, "dim": 4}, "loss": {"name": "margin"}, "training": {"batch": 30, "epochs": 2},
            "negatives": {"count": 1, "sides": "random"}, "optimizer": {"name": "adagrad", "learning_rate": 0.1},
            "evaluation": {"every": 2}, "privacy": {"name": "dpkge", "mode": "published"}}  # fmt: skip
    graph, cells = pool(clinic("small", 3)), []
    for number, (share, drop, sigma, percentile) in enumerate(
        ((0.0, False, 1.0, 20.0), (0.5, False, 0.7, 80.0), (0.5, True, 1.0, 20.0), (1.0, False, 3.0, 100.0))
    ):
        privacy = {"sigma": sigma, "percentile": percentile}
        wanted = Settings.make(combine(base, {"seed": number, "name": f"c{number}", "privacy": privacy}))
        marked = {"share": share, "drop": drop}
        cells.append(Cell(f"c{number}", "together", "clinic", f"s{number}", wanted, marked=marked))
    assert len({alike(cell) for cell in cells}) == 1
    assert alike(replace(cells[0], settings=replace(cells[0].settings, dim=5))) != alike(cells[0])
    together = run_together(cells, graph, device="cpu")
    for cell, row in zip(cells, together, strict=True):
        alone = run_cell(cell, graph, tmp_path / cell.name, device="cpu")
        assert row["metrics"] == pytest.approx(alone["metrics"], rel=0.02), cell.name
        assert row["valid"] == pytest.approx(alone["valid"], rel=0.02), cell.name
        assert row["loss"] == pytest.approx(alone["loss"], rel=1e-4)
        ours, theirs = (each["published_accounting"]["by"] for each in (row, alone))
        assert ours == pytest.approx(theirs) if cell.marked["share"] and not cell.marked["drop"] else ours == theirs
        assert row.keys() - {"together"} == alone.keys()


def test_seeds_of_a_setting_are_one_line(monkeypatch):
    """Their mean and how far they are apart; what a paper's accounting says stands apart from what is claimed."""

    def row(setting, seed, mrr, **more):
        return {"table": "t", "dataset": "d", "parts": 1, "scorer": "transe", "setting": setting, "seed": seed,
                "metrics": {"mrr": mrr, "hits10": 2 * mrr, "mr": 1000 * mrr}, "goal": None, "published": {},
                "settings": {"evaluation": {"sides": "both"}}} | more  # fmt: skip

    printed = []
    monkeypatch.setattr(show, "table", lambda *columns, rows, **_: printed.append((columns, list(rows))))
    accounts = [{"published_accounting": {"epsilon": value}} for value in (3.0, 4.5)]
    cell = SimpleNamespace(published={"Some et al.": {"mr": 250.4, "hits10": 0.4}})
    told_by_figures([cell] * 3, [row("a", 0, 0.1, **accounts[0]), row("a", 1, 0.3, **accounts[1]), row("b", 0, 0.25)])
    [(columns, [a, b])] = printed
    assert columns == ("", "MRR", "Hits@10", "MR", "published", "published accounting")
    published = "Hits@10 0.400, MR 250 Some et al."
    assert a == ["a", "0.200 ± 0.141", "0.400 ± 0.283", "200 ± 141", published, "4.5"]
    assert b == ["b", "0.250", "0.500", "250", published, ""]
    printed.clear()
    told_by_figures([SimpleNamespace(published={})], [row("a", 0, 0.1, goal=0.2, epsilon=8.0)])
    [(columns, lines)] = printed
    assert columns == ("", "MRR", "Hits@10", "epsilon", "goal")
    assert lines == [["a", "0.100", "0.200", "8", "0.200, not reached"]]
