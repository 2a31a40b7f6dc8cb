"""The Python API as a contract: every public name says what it is, and what people write with it works."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import tacit
from tacit import Findings, Graph, OneRun, TacitError
from tacit.attacks.measures import Interval
from tacit.clinic import clinic
from tacit.evaluation import Metrics
from tacit.federated import FederatedRun
from tacit.graph import SPLITS
from tacit.parties import pool
from tacit.settings import combine

ROOT = Path(__file__).parent.parent
SMALL = clinic("small", seed=7)
QUICK = {
    "scorer": {"dim": 8},
    "negatives": {"count": 4},
    "training": {"batch": 64, "device": "cpu"},
    "evaluation": {"every": 2},
    "federation": {"rounds": 2, "local_epochs": 1},
}
COUNTS = {"privacy": {"name": "marginals", "epsilon": 4.0, "delta": 1e-5}}


# -- what is public says what it is ------------------------------------------------------------------------------------

FUNCTIONS = [name for name in tacit.__all__ if not inspect.isclass(getattr(tacit, name))]
CLASSES = [name for name in tacit.__all__ if inspect.isclass(getattr(tacit, name))]


def methods(kind):
    """What a class has of its own that people may call or read, as plain functions."""
    for name, found in vars(kind).items():
        function = getattr(found, "__func__", None) or getattr(found, "fget", None) or getattr(found, "func", found)
        if not name.startswith("_") and inspect.isfunction(function):
            yield name, function


def hinted(function):
    found = inspect.signature(function)
    given = [each.name for each in found.parameters.values() if each.name not in ("self", "cls")
             and each.annotation is inspect.Parameter.empty]  # fmt: skip
    return not given and found.return_annotation is not inspect.Signature.empty


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_document_every_parameter(name):
    function = getattr(tacit, name)
    text = inspect.getdoc(function)
    assert hinted(function)
    heading, _, rest = text.partition("\n\n")
    assert heading.endswith(".")
    section = re.split(
        r"^Raises$|^Examples$|^>>> ", rest.partition("Parameters\n----------\n")[2], maxsplit=1, flags=re.MULTILINE
    )[0]
    told = [part for line in re.findall(r"^(\w+(?:, \w+)*)$", section, re.MULTILINE) for part in line.split(", ")]
    assert set(told) == set(inspect.signature(function).parameters)


@pytest.mark.parametrize("name", CLASSES)
def test_classes_document_themselves_and_their_methods(name):
    kind = getattr(tacit, name)
    assert inspect.getdoc(kind)
    for method, function in methods(kind):
        assert function.__doc__, f"{name}.{method} has no docstring"
        assert hinted(function), f"{name}.{method} has no type hints"


def test_every_public_name_is_on_the_page_and_only_those():
    page = (ROOT / "docs" / "api.md").read_text()
    named = re.findall(r"^::: tacit\.(\w+)$", page, re.MULTILINE)
    modules = {path.stem for path in (ROOT / "src" / "tacit").iterdir()}
    assert sorted(each for each in named if each not in modules - set(tacit.__all__)) == sorted(tacit.__all__)


def test_every_example_is_on_the_page():
    page = (ROOT / "docs" / "api.md").read_text()
    assert sorted(re.findall(r"`(\w+\.py)` \|", page)) == sorted(path.name for path in (ROOT / "examples").glob("*.py"))


def test_names_are_there_for_type_checkers():
    """What `__getattr__` finds at run time stands as an import for mypy too, from the same place."""
    text = (ROOT / "src" / "tacit" / "__init__.py").read_text()
    block = text.partition("if TYPE_CHECKING:\n")[2].partition("\n\n")[0]
    imported = {name: home for home, names in re.findall(r"from tacit\.([\w.]+) import (.+)", block)
                for name in names.split(", ")}  # fmt: skip
    assert imported == tacit._HOME
    assert sorted(imported) == sorted(tacit.__all__)
    assert (ROOT / "src" / "tacit" / "py.typed").is_file()


# -- the ten lines -----------------------------------------------------------------------------------------------------

TEN_LINES = """
import tacit
graph = tacit.read_graph("hospital.tsv")
parties = tacit.partition(graph, by="entities", parts=3, split=(0.8, 0.1, 0.1), seed=7)
run = tacit.federate(parties, recipe="private_fede", scorer="transe", dim=64, epsilon=8, delta=1e-5, seed=7)
print(run.metrics["test"].mrr, run.epsilon)
found = tacit.attack(run, attack="counts", targets="canaries", count=200)
print(found.auc, found.tpr[0.01], found.f1)
audited = tacit.audit(run, canaries=200, guesses=60)
print(audited.claimed, audited.lower_bound, audited.status)
print(run.predict("party-00", head=parties[0].entities[0], relation=graph.relations[0], top=10))
"""


@pytest.mark.slow
def test_the_ten_lines_run(tmp_path):
    whole = pool(SMALL)
    rows = ["\t".join(triple) for split in SPLITS for triple in whole.named(split)]
    (tmp_path / "hospital.tsv").write_text("\n".join(rows))
    command = [sys.executable, "-W", "error", "-c", TEN_LINES]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    first, second, third, last = done.stdout.splitlines()
    mrr, epsilon = map(float, first.split())
    assert 0 < mrr < 1
    assert 7 < epsilon <= 8
    assert re.match(r"0\.\d{3} \(0\.\d{3} to \d\.\d{3}\) ", second)
    assert third.endswith("holds")
    assert last.count("Prediction(") == 10
    assert [path.name for path in tmp_path.iterdir()] == ["hospital.tsv"]


# -- attacks -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("api") / "run"
    return tacit.federate(SMALL, "fede", settings=combine(QUICK, {"federation": {"keep_every": 1}}), out=folder)


def test_an_attack_is_the_same_on_a_run_and_on_its_folder(plain):
    found = tacit.attack(plain, "cip", count=60)
    again = tacit.attack(plain.path, "cip", count=60)
    assert found.json() == again.json() == tacit.attack(str(plain.path), ["cip"], targets=["existing"], count=60).json()
    assert (found.epsilon, found.nothing) == (None, ())
    kept = json.loads((plain.path / "private" / "attacks" / "cip-party-existing.json").read_text())
    assert found.json()["attacks"][0].items() <= kept.items()
    with pytest.raises(TacitError, match="say which attack"):
        tacit.attack(plain, [])


def test_what_stands_for_an_attack_is_its_strongest_way_and_not_the_blind_one(plain):
    found = tacit.attack(plain, "cip", count=60)
    outcome, way = found.strongest
    assert outcome.attack == "cip"
    every = [each.last(one)[1].auc.value for each in found.outcomes if each.attack != "blind" for one in each.ways]
    assert found.auc.value == max(every)
    assert found.measured == outcome.last(way)[1]
    assert (found.auc, found.tpr, found.f1) == (found.measured.auc, found.measured.tpr, found.measured.f1)
    assert isinstance(found.auc, Interval)
    assert str(found.auc) in repr(found)
    assert repr(found).startswith("Findings(cip by ")
    only = Findings(None, tuple(each for each in found.outcomes if each.attack == "blind"))
    assert only.strongest[0].attack == "blind"


def test_where_there_is_nothing_to_attack_it_is_said_why(plain):
    found = tacit.attack(plain, "counts", targets="canaries", count=40, every=1)
    assert (found.strongest, found.measured, found.auc, found.f1, found.tpr) == (None, None, None, None, {})
    assert "no noisy counts are released" in found.nothing[0]
    assert "nothing to attack for counts by server" in repr(found)


def test_reconstruction_is_among_the_findings(plain):
    found = tacit.attack(plain, ["reconstruction"], victim=SMALL.names[2])
    assert [row["victim"] for row in found.reconstruction] == [SMALL.names[2]] * 3
    assert found.auc is None
    assert "reconstruction by 30%" in repr(found)
    assert found.json()["reconstruction"] == list(found.reconstruction)


@pytest.mark.slow
def test_attacks_on_statements_are_of_one_graph():
    graph = tacit.mark(SMALL[0], tacit.select(SMALL[0], share=0.2, seed=1))
    private = {"privacy": {"name": "confidential", "epsilon": 8.0, "noise": "seeded"}}
    base = {key: QUICK[key] for key in ("scorer", "negatives", "training")}
    run = tacit.train(graph, settings=combine(base, private), epochs=2)
    found = tacit.attack(run, count=20)
    assert list(found.statements) == ["critical"]
    assert (found.auc, found.epsilon, found.outcomes) == (None, None, ())
    assert "critical: private ranks larger" in repr(found)
    with pytest.raises(TacitError, match="no parties to be victim"):
        tacit.attack(run, victim="somebody")
    with pytest.raises(TacitError, match="one of critical, neighbours; not 'cip'"):
        tacit.attack(run, "cip")


def test_json_survives_a_round_trip(plain):
    found = tacit.attack(plain, ["cip", "reconstruction"], count=60)
    assert json.loads(json.dumps(found.json(), allow_nan=False)) == found.json()
    for metrics in plain.metrics.values():
        assert Metrics.of(json.loads(json.dumps(metrics.json()))) == metrics
    results = plain.results()
    assert json.loads(json.dumps(results, allow_nan=False)) == results


# -- audits ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_audit_is_the_same_on_a_run_and_on_its_folder(tmp_path):
    simulated = combine({"training": {"device": "cpu"}}, COUNTS, {"privacy": {"noise": "seeded"}})
    run = tacit.train(SMALL[0], settings=simulated, out=tmp_path / "run")
    found = tacit.audit(run, canaries=100, guesses=20, seed=1)
    assert found == tacit.audit(tmp_path / "run", canaries=100, guesses=20, seed=1)
    kept = json.loads((tmp_path / "run" / "private" / "audit.json").read_text())
    assert OneRun.of(kept) == found == OneRun.of(json.loads(json.dumps(found.json())))
    assert (found.status, found.party, found.simulation, list(found.measured)) == ("holds", None, True, ["cells"])
    assert repr(found).startswith("OneRun(holds: epsilon claimed ")
    assert "(simulation)" in repr(found)
    assert run.epsilon is None  # of a simulation nothing is claimed
    with pytest.raises(TacitError, match="no parties to choose from"):
        tacit.audit(run, party="somebody")


@pytest.mark.slow
def test_an_audit_of_a_federation_is_of_one_party(tmp_path):
    run = tacit.federate(SMALL, "private_fede", settings=combine(QUICK, COUNTS))
    found = tacit.audit(run, party=SMALL.names[1], canaries=100, guesses=20, seed=1)
    assert found.party == SMALL.names[1]
    assert f"100 canaries of {SMALL.names[1]}" in repr(found)
    assert found.claimed == pytest.approx(4, rel=0.05)
    with pytest.raises(TacitError, match="There are: riverside"):
        tacit.audit(run, party="nobody")
    with pytest.raises(TacitError, match="is no run"):
        tacit.audit(tmp_path)


# -- what a run says of itself -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_epsilons_are_claimed_by_party_and_only_where_there_is_a_guarantee(plain):
    run = tacit.federate(SMALL, "private_fede", settings=combine(QUICK, COUNTS))
    assert list(run.epsilons) == list(SMALL.names)
    assert run.epsilon == max(run.epsilons.values()) == pytest.approx(4, rel=0.01)
    assert (plain.epsilon, plain.epsilons) == (None, dict.fromkeys(SMALL.names))
    seeded = tacit.federate(SMALL, "private_fede", settings=combine(QUICK, COUNTS, {"privacy": {"noise": "seeded"}}))
    assert (seeded.epsilon, set(seeded.epsilons.values())) == (None, {None})


def test_a_federation_predicts_by_party(plain):
    name, graph = SMALL.names[1], SMALL[1]
    asked = {"head": graph.entities[0], "relation": graph.relations[0], "top": 4}
    found = plain.predict(name, **asked)
    assert found == plain.of_party(name).predict(**asked)
    assert len(found) == 4
    assert {answer.tail for answer in found} <= set(graph.entities)
    with pytest.raises(TacitError, match=r"say whose, by `party` \(riverside, "):
        plain.predict(**asked)
    with pytest.raises(TacitError, match="no party 'nobody' here"):
        plain.predict("nobody", **asked)


@pytest.mark.slow
def test_runs_have_a_line_of_their_own(plain):
    assert repr(plain) == (f"FederatedRun(fede, 3 parties, TransE, dim 8, not private, test MRR "
                           f"{plain.metrics['test'].mrr:.3f})")  # fmt: skip
    assert repr(FederatedRun.open(plain.path)) == repr(plain)
    run = tacit.train(Graph.from_triples([("a", "r", "b")]), settings=COUNTS)
    assert repr(run) == (
        "Run(TransE, dim 128, privacy marginals, nothing measured; "
        "Graph(2 entities, 1 relations; train 1, valid 0, test 0))"
    )
