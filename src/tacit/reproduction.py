"""Tables of published figures, run again cell by cell; also `python -m tacit.reproduction`, where there is torch alone.

A cell is a TOML file as `tacit train --config` takes it, with one more section:

    [reproduce]
    table = "linkprediction"
    setting = "one-vs-all, N3"             # what sets it apart from other cells of the same dataset and scorer
    goal = 0.345                           # the MRR to reach; may be left out
    published.LibKGE = {mrr = 0.348, hits10 = 0.536}

Each cell is a run folder, so it can be interrupted and goes on. What it measured is one line of a JSONL file; a cell
whose line is there already, with the same settings and graph, is not run again. Lines are only ever added.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from tacit import datasets
from tacit.errors import BadInput, Problem, TacitError, excerpt
from tacit.graph import Graph
from tacit.models import SCORERS
from tacit.parties import pool
from tacit.run import CONFIG, Run, create
from tacit.settings import Settings, combine, read_settings
from tacit.tensors import load_graph
from tacit.training import Event

KEYS = {"table": str, "setting": str, "goal": float, "published": dict}
EMBEDDED = {"clinic-small": "small", "clinic-demo": "demo"}


@dataclass(frozen=True)
class Cell:
    """One figure of a table: a dataset, a scorer, settings, and what others reached."""

    name: str
    table: str
    dataset: str
    setting: str
    settings: Settings
    goal: float | None = None
    published: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    @staticmethod
    def read(path: Path) -> Cell:
        """The cell that a file describes."""
        values = read_settings(path)
        about, graph = values.pop("reproduce", None), values.pop("graph", {})
        if not isinstance(about, dict) or "table" not in about:
            raise BadInput(f"{path}: has no section [reproduce] with a table; expected one cell of a table.")
        for key, value in about.items():
            wanted = KEYS.get(key)
            if wanted is None:
                raise BadInput(f"{path}: there is no 'reproduce.{key}'. There are: {', '.join(KEYS)}.")
            if not isinstance(value, (int, float) if wanted is float else wanted) or isinstance(value, bool):
                raise BadInput(f"{path}: found {value!r} as reproduce.{key}; expected a {wanted.__name__}.")
        if not isinstance(graph, dict) or set(graph) != {"path"} or not isinstance(graph["path"], str):
            raise BadInput(f"{path}: expected [graph] with a path, the name of a dataset, and nothing else.")
        if not all(isinstance(figures, dict) for figures in about.get("published", {}).values()):
            raise BadInput(f"{path}: expected figures by name for each source under reproduce.published.")
        try:
            settings = Settings.make(combine({"name": path.stem}, values))
        except BadInput as error:
            raise BadInput(f"{path}: {error}") from None
        return Cell(
            path.stem,
            about["table"],
            graph["path"],
            about.get("setting", ""),
            settings,
            about.get("goal"),
            about.get("published", {}),
        )

    @property
    def scorer(self) -> str:
        return next(name for name, kind in SCORERS.items() if type(self.settings.scorer) is kind)

    def fingerprint(self, graph: Graph) -> str:
        """Of all that decides the result, but for the device and the kernels."""
        settings = self.settings.json()
        for key in ("device", "kernel", "checkpoint_every"):
            del settings["training"][key]
        del settings["name"]
        text = json.dumps([settings, graph.fingerprint], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_cells(folder: Path, table: str, only: Sequence[str] = ()) -> list[Cell]:
    """The cells of a table in a folder, by name; `only`: those whose names begin so."""
    if not folder.is_dir():
        raise BadInput(f"{folder}: no such folder; expected the TOML files of a table there.")
    cells = [cell for path in sorted(folder.glob("*.toml")) if (cell := Cell.read(path)).table == table]
    if not cells:
        raise BadInput(f"{folder}: holds no cell of the table {table!r}.")
    for start in only:
        if not any(cell.name.startswith(start) for cell in cells):
            raise TacitError(f"no cell's name begins with {start!r}. There are: {', '.join(c.name for c in cells)}.")
    return [cell for cell in cells if not only or cell.name.startswith(tuple(only))]


def load(dataset: str, data: Path | None) -> Graph:
    """A benchmark by name from the folder of datasets, an embedded federation in one place, or a graph's file."""
    if dataset in EMBEDDED:
        return pool(datasets.clinic(EMBEDDED[dataset]))  # type: ignore[arg-type]
    if dataset.endswith(".safetensors"):
        return load_graph(Path(dataset))
    return datasets.load(dataset, data)


class Results:
    """A JSONL file of results, one object a line."""

    def __init__(self, path: Path):
        self.path = path

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if not self.path.exists():
            return
        for number, line in enumerate(self.path.read_text(encoding="utf-8").splitlines(), 1):
            try:
                row = json.loads(line)
                row["metrics"]["mrr"]
            except (ValueError, LookupError, TypeError):
                found = Problem(str(self.path), number, excerpt(line), "a JSON object with metrics")
                raise BadInput(f"{self.path}: a line is no result.", [found]) from None
            yield row

    def of(self, fingerprint: str) -> dict[str, Any] | None:
        """The latest with this fingerprint."""
        return next((row for row in reversed(list(self)) if row.get("fingerprint") == fingerprint), None)

    def append(self, row: Mapping[str, Any]) -> None:
        """Add a line, after a last one that was cut off too."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "ab+") as file:
            if file.seek(0, os.SEEK_END):
                file.seek(-1, os.SEEK_END)
                before = b"" if file.read() == b"\n" else b"\n"
            else:
                before = b""
            file.write(before + json.dumps(row, ensure_ascii=False, allow_nan=False).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())


def run_cell(
    cell: Cell,
    graph: Graph,
    folder: Path,
    *,
    device: str | None = None,
    command: str = "",
    on_event: Callable[[Event], None] = lambda event: None,
) -> dict[str, Any]:
    """Train a cell in its folder, from the beginning or from where it was left; the line of its result."""
    settings = cell.settings
    if device is not None:
        settings = replace(settings, training=replace(settings.training, device=device))
    if (folder / CONFIG).is_file():
        run = Run.open(folder)
        if (run.settings, run.graph) != (settings, graph):
            raise TacitError(f"{folder} holds a run with other settings: remove it, or choose another --runs.")
    else:
        run = create(graph, settings, folder)
    if not run.finished:
        run.train(on_event)
    seconds = sum(event["seconds"] for event in run.events())
    test, valid = (run.metrics[split].json() for split in ("test", "valid"))
    return {
        "table": cell.table,
        "dataset": cell.dataset,
        "scorer": cell.scorer,
        "setting": cell.setting,
        "parts": 1,
        "seed": settings.seed,
        "metrics": test,
        "valid": valid,
        "published": cell.published,
        "goal": cell.goal,
        "seconds": round(seconds, 2),
        "device": device_name(settings.training.device),
        "commit": commit(),
        "command": command,
        "best_epoch": run.best_epoch,
        "fingerprint": cell.fingerprint(graph),
        "settings": settings.json(),
    }


def device_name(device: str) -> str:
    """The GPU's name, or the processor's and how many threads."""
    if device.startswith("cuda") or (device == "auto" and torch.cuda.is_available()):
        return str(torch.cuda.get_device_name())
    return f"{processor()}, {torch.get_num_threads()} threads"


def processor() -> str:
    """Its name, where the system tells."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return (names or [platform.processor() or platform.machine()])[0]


def commit() -> str | None:
    """Of the code that runs: as TACIT_COMMIT says, or of the repository it is in."""
    if named := os.environ.get("TACIT_COMMIT"):
        return named
    here = Path(__file__).parent
    git = ["git", "-C", str(here)]
    try:
        subprocess.run([*git, "ls-files", "--error-unmatch", __file__], capture_output=True, check=True)
        return subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    except (FileNotFoundError, subprocess.CalledProcessError):  # no git, or not from a repository
        return None


def reproduce(
    cells: Sequence[Cell],
    *,
    data: Path | None,
    runs: Path,
    results: Results,
    device: str | None = None,
    command: str = "",
    on_cell: Callable[[Cell, dict[str, Any] | None], Any] = lambda cell, row: None,
    on_event: Callable[[Event], None] = lambda event: None,
) -> list[dict[str, Any]]:
    """Run the cells that have no result yet; each cell's line. `on_cell` hears of a cell when it begins, without a
    line, and when it ends.
    """
    graphs: dict[str, Graph] = {}
    rows = []
    for cell in cells:
        if cell.dataset not in graphs:
            graphs = {cell.dataset: load(cell.dataset, data)}  # one at a time in memory
        graph = graphs[cell.dataset]
        row = results.of(cell.fingerprint(graph))
        if row is None:
            on_cell(cell, None)
            own = f"{command} --only {cell.name}"
            row = run_cell(cell, graph, runs / cell.name, device=device, command=own, on_event=on_event)
            results.append(row)
        on_cell(cell, row)
        rows.append(row)
    return rows


def main(arguments: list[str]) -> int:
    """`python -m tacit.reproduction linkprediction`: as `tacit reproduce`, in plain lines."""
    options = argparse.ArgumentParser(prog="python -m tacit.reproduction", description=main.__doc__)
    options.add_argument("table")
    options.add_argument("--configs", type=Path, help="default: benchmarks/TABLE")
    options.add_argument("--only", action="append", default=[], help="cells whose names begin so")
    options.add_argument("--data", type=Path)
    options.add_argument("--runs", type=Path, help="default: runs/TABLE")
    options.add_argument("--results", type=Path, help="default: benchmarks/results/TABLE.jsonl")
    options.add_argument("--device")
    chosen = options.parse_args(arguments)
    command = f"python -m tacit.reproduction {chosen.table}"
    if chosen.device:
        command += f" --device {shlex.quote(chosen.device)}"

    def told(cell: Cell, row: dict[str, Any] | None) -> None:
        if row is None:
            print(f"{cell.name} begins", file=sys.stderr, flush=True)
        else:
            facts = {key: row[key] for key in ("metrics", "goal", "published", "seconds", "device")}
            print(json.dumps({"cell": cell.name} | facts), flush=True)

    try:
        reproduce(
            read_cells(chosen.configs or Path("benchmarks") / chosen.table, chosen.table, chosen.only),
            data=chosen.data,
            runs=chosen.runs or Path("runs") / chosen.table,
            results=Results(chosen.results or Path("benchmarks/results") / f"{chosen.table}.jsonl"),
            device=chosen.device,
            command=command,
            on_cell=told,
            on_event=lambda event: (
                print(json.dumps(event), file=sys.stderr, flush=True) if event["event"] == "validation" else None
            ),
        )
    except (TacitError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
