"""Shared by all tests: Hypothesis profiles, the public datasets, and the JSON account of a full run."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "2000")  # before anything loads torch: see tacit/__init__.py
if "PYTEST_XDIST_WORKER" in os.environ:  # as many processes as cores: one thread each, and none waits for another's
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import pytest

ROOT = Path(__file__).parent.parent

hypothesis.settings.register_profile("default", deadline=None, max_examples=60)
hypothesis.settings.register_profile("full", deadline=None, max_examples=500)
hypothesis.settings.register_profile("quick", deadline=None, max_examples=15)


def pytest_addoption(parser):
    parser.addoption("--result", default=None, help="write counts, time and environment of this run to a JSON file")
    parser.addoption("--quick", action="store_true", help="few examples of each property")


def pytest_configure(config):
    profile = "full" if config.getoption("--result") else "quick" if config.getoption("--quick") else "default"
    hypothesis.settings.load_profile(profile)  # workers of xdist, too
    config.started = time.time()


def pytest_terminal_summary(terminalreporter, exitstatus, config):
    """`make full` keeps its last result."""
    if not (target := config.getoption("--result")):
        return
    counts = {name: len(terminalreporter.stats.get(name, [])) for name in ("passed", "failed", "error", "skipped")}
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    result = {
        "schema": "tacit.full-run/1",
        "exit_status": int(exitstatus),
        **counts,
        "seconds": round(time.time() - config.started, 1),
        "commit": commit.strip(),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "command": "make full",
    }
    Path(target).write_text(json.dumps(result, indent=2) + "\n")


def data_folder() -> Path | None:
    """Where the public datasets are: TACIT_DATA, or shared/data in a folder above."""
    if given := os.environ.get("TACIT_DATA"):
        return Path(given)
    return next((up / "shared" / "data" for up in ROOT.parents if (up / "shared" / "data").is_dir()), None)


@pytest.fixture(scope="session")
def public_data() -> Path:
    folder = data_folder()
    if folder is None:
        pytest.skip("the public datasets are not here: set TACIT_DATA to a folder that has them")
    return folder


@pytest.fixture
def mistaken(monkeypatch, capsys):
    """What a command says of wrong input; in this process, where a process of its own would take seconds."""
    from tacit.cli import main

    def call(*args, cwd):
        monkeypatch.setattr(sys, "argv", ["tacit", *map(str, args)])
        monkeypatch.chdir(cwd)
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 2
        told = capsys.readouterr()
        assert "Traceback" not in told.err
        assert not told.out
        return told.err

    return call
