"""The command line as a user meets it: real processes, right and wrong input."""

from __future__ import annotations

import inspect as inspect_module
import json
import logging
import os
import shlex
import stat
import subprocess
import sys

import pytest
from click import UsageError
from click.testing import CliRunner
from rich.console import Console
from typer.main import get_command

from ledgers import CLAIM, KEYS, WHO, rows
from tacit import Graph, __version__, inspect, partition, pool, read_graph, read_parties, write_graph
from tacit.cli import app, models, show
from tacit.cli.federate import bar as federation_bar
from tacit.datasets import clinic
from tacit.ledger.ledger import Ledger
from tacit.ledger.record import Genesis, Model
from tacit.settings import Settings


def tacit(*args, cwd=None, code=0, env=None, timeout=120):
    """Run the command; whatever happens, no traceback."""
    command = [sys.executable, "-m", "tacit", *map(str, args)]
    environment = {**os.environ, "COLUMNS": "100", **(env or {})}
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )
    assert "Traceback" not in done.stderr
    assert done.returncode == code, done.stderr
    return done


@pytest.fixture
def graph_file(tmp_path):
    path = tmp_path / "graph.tsv"
    path.write_text("".join(f"e{i}\tr{i % 3}\te{i * 7 % 50}\n" for i in range(200)))
    return path


def test_version_and_help():
    assert tacit("--version").stdout == f"tacit {__version__}\n"
    listing = tacit("data", "--help").stdout
    assert all(command in listing for command in ("inspect", "partition", "convert"))
    assert "--install-completion" in tacit("--help").stdout


def test_inspect_prints_tables_and_json(graph_file):
    assert "50 entities" not in tacit("data", "inspect", graph_file).stderr
    shown = tacit("data", "inspect", graph_file)
    assert "200 entities" in shown.stdout
    assert shown.stderr == ""
    found = json.loads(tacit("data", "inspect", graph_file, "--json").stdout)
    assert found["triples"] == {"train": 200, "valid": 0, "test": 0}
    assert found == {"benchmark": None} | json.loads(json.dumps(inspect(read_graph(graph_file)).json()))


@pytest.mark.slow
@pytest.mark.data
def test_inspect_knows_a_benchmark_by_path_and_by_name(public_data):
    for call in ([public_data / "fb15k-237"], ["fb15k-237", "--data", public_data]):
        found = json.loads(tacit("data", "inspect", *call, "--json").stdout)
        assert (found["benchmark"], found["entities"], found["relations"]) == ("fb15k-237", 14_541, 237)
        assert found["triples"] == {"train": 272_115, "valid": 17_535, "test": 20_466}
    found = json.loads(tacit("data", "inspect", "wn18rr", "--json", env={"TACIT_DATA": str(public_data)}).stdout)
    assert found["benchmark"] == "wn18rr"


@pytest.mark.data
def test_inspect_reports_a_defective_release(public_data):
    shown = tacit("data", "inspect", public_data / "ddb14-fedr-as-released" / "fed3", env={"COLUMNS": "200"}).stdout
    assert "22,249 of them distinct" in shown
    assert "client00: 986 of 1,316 test triples (74.9%) stand in train too: do not evaluate on this split" in shown


@pytest.mark.slow
def test_partition_writes_what_the_library_makes(graph_file, tmp_path):
    out = tmp_path / "parts"
    options = ("--by", "entities", "--parts", 2, "--seed", 9, "--share", 0.9, "--split", "0.6,0.2,0.2")
    done = json.loads(tacit("data", "partition", graph_file, *options, "--out", out, "--json").stdout)
    parties = read_parties(out)
    expected = partition(read_graph(graph_file), "entities", 2, seed=9, share=0.9, split=(0.6, 0.2, 0.2))
    assert parties == expected
    assert done["parties"] == expected.statistics()["parties"]
    assert "party-00" in tacit("data", "inspect", out).stdout
    again = tacit("data", "partition", graph_file, "--out", out, code=2)
    assert "exists already" in again.stderr
    assert read_parties(out) == expected
    tacit("data", "partition", graph_file, "--parts", 2, "--out", out, "--force")
    assert read_parties(out) == partition(read_graph(graph_file), "triples", 2)


def test_given_graphs_are_put_together(tmp_path):
    (tmp_path / "zh.tsv").write_text("甲\t治\t乙\n", encoding="utf-8")
    (tmp_path / "en.tsv").write_text("A\ttreats\tB\n")
    (tmp_path / "links.tsv").write_text("甲\tA\n", encoding="utf-8")
    call = ("data", "partition", "zh.tsv", "en.tsv", "--by", "given", "--alignment", "links.tsv", "--out", "both")
    tacit(*call, cwd=tmp_path)
    parties = read_parties(tmp_path / "both")
    assert parties.names == ("zh", "en")
    assert len(parties.shared(0, 1)[0]) == 1


@pytest.mark.parametrize("format", ["tsv", "nt"])
def test_convert(graph_file, tmp_path, format):
    tacit("data", "convert", graph_file, "--format", format, "--out", tmp_path / "out")
    assert (tmp_path / "out" / f"train.{format}").is_file()
    assert read_graph(tmp_path / "out") == read_graph(graph_file)


@pytest.mark.slow
def test_the_demo(tmp_path):
    found = json.loads(tacit("demo", "--out", "demo", "--json", cwd=tmp_path, timeout=400).stdout)
    assert read_parties(tmp_path / "demo") == clinic("demo", 0)
    assert len(found["hospitals"]["parties"]) == 5
    means = {label: sum(m["mrr"] for m in metrics) / 5 for label, metrics in found["test"].items()}
    assert means["popular"] < means["local"] < means["fedr"] < means["fede"]
    assert found["communication"]["fedr"]["bytes"] < found["communication"]["fede"]["bytes"] / 10
    assert 0 < found["privacy"]["epsilon"] <= 4
    assert 0.005 < means["private-1"] < means["private"] < means["private-16"] < means["local"]
    assert found["audit"]["status"] == "holds"
    assert set(found["attacks"]) == {"fede", "fedr", "secure", "private"}
    internal, shared = ((tmp_path / found[name]).read_text() for name in ("report", "shareable"))
    assert f"{found['audit']['lower_bound']:.3g}" in internal
    assert "riverside" in internal
    assert "riverside" not in shared


@pytest.mark.full
def test_the_demo_in_tables(tmp_path):
    shown = tacit("demo", "--out", "demo", cwd=tmp_path, timeout=400)
    assert "riverside" in shown.stdout
    assert "divided again by relations" in shown.stdout
    assert "strongest attack" in shown.stdout
    assert "report.html" in shown.stdout


BAD_CALLS = {
    "a missing file": (["data", "inspect", "absent.tsv"], "absent.tsv: no such file or folder"),
    "a bad row": (["data", "inspect", "bad.tsv"], "bad.tsv:2: found 2 columns, 'a\\tr'; expected 3 columns"),
    "no such method": (["data", "partition", "good.tsv", "--by", "colour", "--out", "o"], "not by 'colour'"),
    "no such benchmark folder": (["data", "inspect", "fb15k", "--data", "."], "no such folder"),
    "a split that is none": (["data", "partition", "good.tsv", "--split", "most", "--out", "o"], "--split is"),
    "shares that do not add up": (["data", "partition", "good.tsv", "--split", "1,1,1", "--out", "o"], "add up to 1"),
    "too many parties": (["data", "partition", "good.tsv", "--parts", "100", "--out", "o"], "not 100"),
    "parties with nothing to train on": (
        ["data", "partition", "good.tsv", "--out", "o", "--split", "0,1,0"],
        "fewer parties",
    ),
    "a bad row while dividing": (["data", "partition", "bad.tsv", "--out", "o"], "bad.tsv:2"),
    "one graph given": (["data", "partition", "good.tsv", "--by", "given", "--out", "o"], "two or more parties"),
    "an unknown format": (["data", "convert", "good.tsv", "--format", "docx", "--out", "o"], "tsv or nt"),
    "a column that is not there": (["data", "inspect", "good.tsv", "--columns", "x,y,z"], "expected also x, y, z"),
    "a strange separator": (["data", "inspect", "good.tsv", "--separator", "ab"], "single character"),
    "a negative seed": (["data", "partition", "good.tsv", "--seed", "-1", "--out", "o"], "--seed"),
    "a file where a folder goes": (["data", "convert", "good.tsv", "--out", "good.tsv/o"], "good.tsv"),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_a_mistake_is_one_message_and_exit_code_2(tmp_path, name):
    (tmp_path / "good.tsv").write_text("a\tr\tb\nb\tr\tc\nc\tr\td\n")
    (tmp_path / "bad.tsv").write_text("a\tr\tb\na\tr\n")
    before = sorted(path.name for path in tmp_path.iterdir())
    call, message = BAD_CALLS[name]
    done = tacit(*call, cwd=tmp_path, code=2)
    assert message in " ".join(done.stderr.split())
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) <= 24
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_bad_rows_can_be_left_out(tmp_path):
    (tmp_path / "bad.tsv").write_text("a\tr\tb\na\tr\n")
    assert (
        "1 rows could not be read and were left out"
        in tacit("data", "inspect", "bad.tsv", "--skip-bad", cwd=tmp_path).stdout
    )


def test_a_reader_that_has_seen_enough_is_no_error(graph_file):
    done = subprocess.run(
        f"{sys.executable} -m tacit data inspect {graph_file} --json | head -c 1",
        shell=True,
        capture_output=True,
        text=True,
        check=True,
    )
    assert (done.stdout, done.stderr) == ("{", "")


def test_names_are_shown_as_they_are(tmp_path):
    """Brackets are not taken for markup, and nothing of a name is lost."""
    (tmp_path / "graph.tsv").write_text("a\t[bold]treats[/bold]\tb\n")
    assert "[bold]treats[/bold]" in tacit("data", "inspect", "graph.tsv", cwd=tmp_path).stdout


NOT_MARKUP = ["[/b]x", "[red]", "[link=https://example.org]x[/link]", "a [bold]treats[/bold] b", "\\[x]"]


@pytest.mark.parametrize("name", NOT_MARKUP)
def test_names_from_outside_are_never_markup(name, monkeypatch, capsys):
    monkeypatch.setattr(show, "out", Console(width=200))
    show.table(name, "number", rows=[(name, 1)], title=f"Newest of {name}")
    show.say(name, "bold")
    show.warn([name])
    show.warn_aside(name)
    show.say_aside(name)
    shown = capsys.readouterr()
    assert shown.out.count(name) == 5
    assert shown.err.count(name) == 2
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("COLUMNS", "200")
    settings = Settings.make({"training": {"epochs": 1}})
    event = {"event": "kernels", "name": name, "seconds": 2.0}
    for drawn in (federation_bar(name, 3, quiet=False), models.bar(settings, quiet=False, doing=name)):
        with drawn as tell:
            tell(event)
        assert name in capsys.readouterr().err
    with show.busy(name, quiet=False):
        pass
    assert name in capsys.readouterr().err


def test_a_model_with_such_a_name_stops_no_reader_of_its_ledger(tmp_path):
    name = NOT_MARKUP[0]
    with Ledger.begin(tmp_path / "ledger", WHO[0], Genesis("drugs", keys=KEYS)) as ledger:
        ledger.open_model(WHO[0], Model(ledger.genesis, name, entity=3, relation=3))
        ledger.publish_rows(WHO[0], name, rows(tmp_path, 1), CLAIM)
    shown = CliRunner().invoke(get_command(app), ["ledger", "show", str(tmp_path / "ledger")])
    assert shown.exit_code == 0, shown.exception
    assert f"Newest of {name}" in shown.output


def test_no_name_gets_into_a_log(tmp_path, caplog):
    """Patients, drugs and all: whatever is read, divided or refused, the log above debug level holds none of it."""
    hospitals = clinic("small", 3)
    names = {name for graph in hospitals for name in (*graph.entities, *graph.relations)}
    write_graph(pool(hospitals), tmp_path / "pooled")
    done = tacit("-v", "data", "partition", tmp_path / "pooled", "--by", "relations", "--out", tmp_path / "parts")
    log = (tmp_path / "parts" / "private" / "tacit.log").read_text()
    assert "INFO tacit.parties: divided" in log
    assert "divided" in done.stderr
    patient = next(name for name in hospitals[0].entities if name.startswith("patient"))
    (tmp_path / "bad.tsv").write_text(f"{patient}\tbroken\n{patient}\t\tx\n")
    broken = tacit("-v", "data", "inspect", tmp_path / "bad.tsv", code=2)
    logged = [line for line in broken.stderr.splitlines() if line.startswith(("INFO", "WARNING", "ERROR"))]
    with caplog.at_level(logging.INFO, logger="tacit"):
        inspect(pool(partition(read_graph(tmp_path / "pooled"), "entities", 3)))
    text = "\n".join([log, done.stderr, *logged, *(record.getMessage() for record in caplog.records)])
    assert len(text) > 200
    assert not [name for name in names if name in text]
    assert patient in broken.stderr  # the user's own screen shows what is wrong
    assert stat.S_IMODE((tmp_path / "parts" / "private").stat().st_mode) == 0o700


def test_a_log_rotates(tmp_path, monkeypatch):
    from tacit import folders

    monkeypatch.setattr(folders, "LOG_BYTES", 500)
    with folders.log_to(tmp_path):
        for i in range(50):
            logging.getLogger("tacit.test").warning("message number %d", i)
    assert (tmp_path / "private" / "tacit.log.1").exists()
    assert len(list((tmp_path / "private").iterdir())) <= 1 + folders.LOG_FILES


def test_an_interrupted_write_leaves_nothing(tmp_path):
    from tacit.folders import new_folder

    write_graph(Graph.from_triples([("a", "r", "b")]), tmp_path / "g")

    def interrupted():
        with new_folder(tmp_path / "g", "graph.json", force=True) as folder:
            (folder / "half").touch()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [path.name for path in tmp_path.iterdir()] == ["g"]
    assert read_graph(tmp_path / "g") == Graph.from_triples([("a", "r", "b")])


@pytest.mark.slow
def test_force_replaces_only_what_is_ours(graph_file, tmp_path):
    """Neither a foreign folder that has a file of our name, nor a foreign file in a folder of ours, is lost."""
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "graph.json").write_text('{"nodes": []}')
    tacit("data", "convert", graph_file, "--out", tmp_path / "theirs", "--force", code=2)
    assert (tmp_path / "theirs" / "graph.json").read_text() == '{"nodes": []}'
    tacit("data", "convert", graph_file, "--out", tmp_path / "ours")
    (tmp_path / "ours" / "thesis.tex").write_text("years of work")
    done = tacit("data", "convert", graph_file, "--out", tmp_path / "ours", "--force", code=2)
    assert "'thesis.tex', which is none of ours" in done.stderr
    (tmp_path / "ours" / "thesis.tex").unlink()
    tacit("data", "convert", graph_file, "--out", tmp_path / "ours", "--format", "nt", "--force")
    assert read_graph(tmp_path / "ours") == read_graph(graph_file)


@pytest.mark.slow
def test_a_failure_leaves_no_folder_behind(tmp_path):
    (tmp_path / "bad.tsv").write_text("a\tr\n")
    tacit("data", "partition", "bad.tsv", "--out", "new/deep", cwd=tmp_path, code=2)
    assert [path.name for path in tmp_path.iterdir()] == ["bad.tsv"]
    tacit("data", "convert", "clinic-small", "--out", "new/deep", cwd=tmp_path, code=2)
    (tmp_path / "good.tsv").write_text("a\tr\tb\n")
    tacit("data", "convert", "good.tsv", "--out", "new/deep[red]", cwd=tmp_path)
    assert read_graph(tmp_path / "new" / "deep[red]") == read_graph(tmp_path / "good.tsv")


def test_an_empty_folder_is_filled(graph_file, tmp_path):
    (tmp_path / "empty").mkdir()
    tacit("data", "convert", graph_file, "--out", tmp_path / "empty")
    assert read_graph(tmp_path / "empty") == read_graph(graph_file)


def test_a_terminal_without_unicode_gets_escapes(tmp_path):
    (tmp_path / "graph.tsv").write_text("甲\t治\t乙\n", encoding="utf-8")
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}
    assert "\\u6cbb" in tacit("data", "inspect", "graph.tsv", cwd=tmp_path, env=plain).stdout


def leaves(command, names=()):
    """Every command that does something, with the words that call it."""
    if not hasattr(command, "commands"):
        return [(names, command)]
    return [leaf for name, below in command.commands.items() for leaf in leaves(below, (*names, name))]


LEAVES = dict(leaves(get_command(app)))


@pytest.mark.parametrize("names", LEAVES, ids=" ".join)
def test_every_command_shows_an_example_that_would_run(names):
    """Its words parse: an option that was renamed, or one that was forgotten, fails here."""
    command = LEAVES[names]
    blocks = [each for each in inspect_module.cleandoc(command.help).split("\n\n") if each.startswith("Example")]
    assert len(blocks) == 1
    heading, *lines = blocks[0].splitlines()
    assert heading == ("Example:" if len(lines) == 1 else "Examples:")
    assert lines
    for line in lines:
        words = shlex.split(line)
        assert words[: len(names) + 1] == ["tacit", *names]
        command.make_context(" ".join(names), words[len(names) + 1 :])
    shown = CliRunner(env={"COLUMNS": "110", "TERM": "dumb"}).invoke(get_command(app), [*names, "--help"]).output
    told = [line.strip() for line in shown.splitlines()]
    assert all(line.strip() in told for line in lines)  # not broken into two


def test_an_example_with_a_wrong_option_would_not_parse():
    with pytest.raises(UsageError):
        LEAVES[("train",)].make_context("train", ["graph", "--no-such-option"])
