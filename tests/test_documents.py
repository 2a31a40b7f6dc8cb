"""What we show people works: every example runs, and so does the Python of the README."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tacit.datasets import clinic
from tacit.graph import SPLITS
from tacit.parties import pool
from tacit.settings import REGISTRIES, Settings

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.stem)
def test_examples_run(example, tmp_path):
    done = subprocess.run(
        [sys.executable, example], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout
    assert list(tmp_path.iterdir()) == []
    assert len(example.read_text().splitlines()) < 60


def test_the_python_of_the_readme_runs(tmp_path):
    [code] = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    whole = pool(clinic("small"))
    rows = ["\t".join(triple) for split in SPLITS for triple in whole.named(split)]
    (tmp_path / "hospital.tsv").write_text("\n".join(rows))
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "parts" / "parties.json").is_file()
    assert (tmp_path / "runs" / "first" / "config.json").is_file()


def test_the_settings_in_the_documentation_are_the_defaults():
    [text] = re.findall(r"```toml\n(.*?)```", (ROOT / "docs" / "training.md").read_text(), re.DOTALL)
    written = tomllib.loads(text)
    assert Settings.make(written) == Settings()
    nothing = {"scorer.init_scale", "training.steps", "training.checkpoint_every"}  # None has no place in TOML
    everything = {f"{s}.{k}" for s, keys in Settings().json().items() if isinstance(keys, dict) for k in keys}
    everything.add("privacy.name")  # without privacy nothing is said of it
    assert everything - nothing == {f"{s}.{k}" for s, keys in written.items() if isinstance(keys, dict) for k in keys}
    for registry in REGISTRIES.values():
        for name in registry:
            assert name in text


def test_links_between_documents_lead_somewhere():
    for document in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"


def test_figures_show_the_results_that_are_kept(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    figures = importlib.import_module("figures")
    for name, (table, draw) in figures.FIGURES.items():
        drawn = draw(list(figures.Results(figures.RESULTS / f"{table}.jsonl")))
        assert drawn == (ROOT / "docs" / "images" / f"{name}.svg").read_text(), f"draw {name} again"


def test_the_architecture_page_names_every_module():
    page = (ROOT / "docs" / "architecture.md").read_text()
    modules = [path.name for path in (ROOT / "src" / "tacit").rglob("*.py") if not path.name.startswith("__")]
    assert not [name for name in modules if f"  {name} " not in page]


def test_whatever_trains_needs_numpy_and_torch_alone():
    """A GPU box or an air-gapped hospital may have nothing else."""
    code = """
import sys
for name in ("pyarrow", "pyoxigraph", "typer", "rich", "backports"):
    sys.modules[name] = None
import tacit
from tacit import clinic, cohort, draws, evaluation, graph, kernels, parties, prediction, run, settings, training
hospitals = clinic.clinic("small", 1)
assert len(tacit.pool(hospitals).train) > 1000
assert len(tacit.partition(tacit.pool(hospitals), "triples", 2)) == 2
assert tacit.inspect(hospitals[0]).entities
try:
    tacit.read_graph("x.tsv")
except ImportError as error:
    assert "pyarrow" in str(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_every_public_name_is_there():
    import tacit

    for name in tacit.__all__:
        assert getattr(tacit, name).__module__.startswith("tacit.")
    assert set(tacit.__all__) <= set(dir(tacit))
    with pytest.raises(AttributeError, match="no attribute 'colour'"):
        _ = tacit.colour
