"""Tables of published figures, run again cell by cell; also `python -m tacit.reproduction`, where there is torch alone.

A file of cells is a TOML file as `tacit train --config` takes it, or `tacit federate --config` if it has a recipe, with
one more section, and with a grid if it stands for several cells:

    [reproduce]
    table = "linkprediction"
    also = ["another-table"]               # that shows the same cells; may be left out
    setting = "one-vs-all, N3"             # what sets it apart from others of its dataset and scorer; or: the recipe;
                                           # {privacy.sigma} in it stands for that setting
    goal = 0.345                           # the MRR to reach; may be left out
    published.LibKGE = {mrr = 0.348, hits10 = 0.536}
    figures = {FedR = "published.csv"}     # or: a table beside the file, of dataset, scorer, setting, parts, mrr

    [mark]                                 # of one party's training: a random share of statements is confidential
    share = 0.5
    drop = true                            # and left out of train; may be left out

    [attack]                               # of a federation that is attacked: see `tacit.attacks.cells`
    names = ["cip", "si"]

    [peers]                                # of peers without a server, with [pairing]: see `tacit.peers.cells`
    setting = "published"

    [grid]                                 # every combination is a cell, named by the file and by its values
    "scorer.name" = ["transe", "rotate"]
    recipe = ["fede", "fedr"]

Each cell is a run folder, so it can be interrupted and goes on. What it measured is one line of a JSONL file; a cell
whose line is there already, with the same settings and graph, is not run again. Lines are only ever added.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import itertools
import json
import logging
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tacit import datasets
from tacit.errors import BadInput, Problem, TacitError, excerpt
from tacit.evaluation.ranking import Questions, rank
from tacit.federated import FederatedRun, Federation, check_recipe, split_settings, with_noise
from tacit.graph import SPLITS, Graph, Split
from tacit.marking import mark, select
from tacit.models import SCORERS, Layout, Tables
from tacit.models.tables import relation_weights
from tacit.parties import Parties, partition, pool
from tacit.privacy.plan import solved
from tacit.privacy.privatizers import DPKGE, Published, Sound
from tacit.run import CONFIG, Run, create
from tacit.settings import PARTITION, Settings, combine, plain_section, read_settings
from tacit.tensors import load_graph
from tacit.training import Event, Fit, evaluated

LOG = logging.getLogger(__name__)
ATTACK = {"names": list, "targets": list, "count": int, "every": int, "victim": int, "adversary": int, "shadows": int,
          "leaks": list, "pairs": int}  # fmt: skip
"""What the section [attack] of a cell may say."""
MARK = {"share": float, "drop": bool}
"""What the section [mark] may say."""
FIGURES = ("mrr", "mr", "hits1", "hits10")
"""What a table of published figures may have of a cell."""
KEYS = {"table": str, "also": list, "setting": str, "goal": float, "published": dict, "figures": dict}
LATER = ("secure", "vocabulary", "bound", "threshold", "min_contributors", "range", "agreement", "keys")
"""Settings of a federation that came after results were kept: at their default they are not part of a fingerprint."""
LATER_PRIVACY = ("noise_follows", "noise_least", "signal_sigma", "optimizers")
"""The same of private training."""
TARGETS = (0.2, 0.4)
"""Validation MRRs whose cost in rounds and bytes is told of a federation: those of FedR's Figure 3."""


@dataclass(frozen=True)
class Cell:
    """One figure of a table: a dataset, a scorer, settings, and what others reached.

    A federation's cell has a recipe, the settings of the federation, and how the graph is divided; the recipe is its
    setting.
    """

    name: str
    table: str
    dataset: str
    setting: str
    settings: Settings
    goal: float | None = None
    published: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    recipe: str | None = None
    federation: Federation | None = None
    divided: Mapping[str, Any] = field(default_factory=dict)
    also: tuple[str, ...] = ()
    """Other tables, or figures, that show this cell."""
    attack: Mapping[str, Any] = field(default_factory=dict)
    """What is tried on the federation; such a cell has a line for each attack, and none for its ranks."""
    marked: Mapping[str, Any] = field(default_factory=dict)
    """Which statements are confidential, and whether they are left out."""
    peers: Mapping[str, Any] = field(default_factory=dict)
    """Peers that learn in pairs, and what they do."""
    pairing: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def read(path: Path) -> list[Cell]:
        """The cells that a file describes."""
        values = read_settings(path)
        try:
            grid, about = values.pop("grid", {}), values.pop("reproduce", {})
            if not isinstance(grid, dict):
                raise BadInput("[grid] is a section with a list of values for each of some keys.")
            for key, choices in grid.items():
                if not isinstance(choices, list) or not choices:
                    raise BadInput(f"found {excerpt(repr(choices))} as grid.{key}; expected a list of values.")
            found = []
            for chosen in itertools.product(*grid.values()):
                name = "-".join([path.stem, *map(str, chosen)])
                found.append(
                    Cell._made(name, path.parent, about, combine(values, dict(zip(grid, chosen, strict=True))))
                )
        except BadInput as error:
            raise BadInput(f"{path}: {error}") from None
        return found

    @staticmethod
    def _made(name: str, folder: Path, about: Any, values: dict[str, Any]) -> Cell:
        about = plain_section(about, "reproduce", KEYS)
        if "table" not in about:
            raise BadInput("has no section [reproduce] with a table; expected cells of a table.")
        graph = plain_section(values.pop("graph", {}), "graph", {"path": str})
        if "path" not in graph:
            raise BadInput("expected [graph] with a path, the name of a dataset.")
        divided = plain_section(values.pop("partition", {}), "partition", PARTITION)
        attack = plain_section(values.pop("attack", {}), "attack", ATTACK)
        marked = plain_section(values.pop("mark", {}), "mark", MARK)
        peers, pairing = values.pop("peers", {}), values.pop("pairing", {})
        recipe, federation = values.pop("recipe", None), None
        if (peers or pairing) and (recipe is not None or marked or not peers):
            raise BadInput("[peers], which [pairing] belongs to, learn without a recipe and without [mark].")
        if marked and (recipe is not None or not 0 <= marked.get("share", -1) <= 1):
            raise BadInput("[mark] is for one party's training, and has a share from 0 to 1.")
        if attack and recipe is None:
            raise BadInput("only a federation is attacked: expected a recipe.")
        if recipe is not None and not isinstance(recipe, str):
            raise BadInput(f"found {excerpt(repr(recipe))} as recipe; expected a name. Several go into [grid].")
        values = combine({"name": name}, values)
        if recipe is None:
            settings = Settings.make(values)
        else:
            settings, federation = split_settings(values)
            try:
                check_recipe(recipe)
            except TacitError as error:
                raise BadInput(str(error)) from None
        if peers:
            from tacit.peers.cells import check_peers

            peers, pairing = check_peers(peers, pairing, settings)
        cell = Cell(
            name,
            about["table"],
            graph["path"],
            _filled(
                about.get("setting", recipe or peers.get("setting", "")),
                {**values, "mark": marked, "peers": peers, "pairing": pairing},
            ),
            settings,
            about.get("goal"),
            about.get("published", {}),
            recipe,
            federation,
            divided,
            tuple(about.get("also", ())),
            attack,
            marked,
            peers,
            pairing,
        )
        published = dict(cell.published)
        for who, file in about.get("figures", {}).items():
            if figure := cell._figure(folder / str(file)):
                published[who] = figure
        if not all(isinstance(figures, dict) for figures in published.values()):
            raise BadInput("expected figures by name for each source under reproduce.published.")
        return replace(cell, published=published)

    def _figure(self, path: Path) -> dict[str, Any]:
        """What a table of published figures has for this cell; nothing: it has none."""
        mine = {"dataset": self.dataset, "scorer": self.scorer, "setting": self.setting, "parts": str(self.parts)}
        try:
            with open(path, encoding="utf-8", newline="") as file:
                rows = list(csv.DictReader(file))
            if self.attack:  # several, by what is attacked and how
                columns = [name for name in ("attack", "leak", "victim") if name in rows[0]]
                mine = {key: value for key, value in mine.items() if key in rows[0]}
                chosen = [row for row in rows if all(row[key] == value for key, value in mine.items())]
                values = ("f1", "err", "trr")
                figures = [{value: float(row[value]) for value in values if value in row} for row in chosen]
                return dict(zip((" ".join(row[c] for c in columns) for row in chosen), figures, strict=True))
            for row in rows:
                if all(row[key] == value for key, value in mine.items()):
                    return {name: float(row[name]) for name in FIGURES if row.get(name)}
        except (OSError, LookupError, ValueError) as error:
            raise BadInput(f"{path}: cannot be read as published figures: {error}.") from None
        return {}

    @property
    def parts(self) -> int:
        return int(self.divided.get("parts", 1))

    @property
    def given(self) -> bool:
        """Whether its dataset is several parties already, rather than one graph."""
        return bool((self.recipe or self.peers) and not self.divided)

    @property
    def scorer(self) -> str:
        return next(name for name, kind in SCORERS.items() if type(self.settings.scorer) is kind)

    def fingerprint(self, graph: Graph | Parties, *, peers: bool = True) -> str:
        """Of all that decides the result, but for the device and the kernels; or also but for what peers do."""
        settings = self.settings.json()
        for key in ("device", "kernel", "checkpoint_every"):
            del settings["training"][key]
        del settings["name"]
        for key in LATER_PRIVACY:
            if settings.get("privacy", {}).get(key, ...) == getattr(type(self.settings.privacy), key, None):
                del settings["privacy"][key]
        given = [part.fingerprint for part in graph] if isinstance(graph, Parties) else graph.fingerprint
        whole: list[Any] = [settings, given]
        if self.federation is not None:
            federation, usual = asdict(self.federation), asdict(Federation())
            for key in ("keep_every", "keep_mb"):
                del federation[key]
            for key in LATER:
                if federation[key] == usual[key]:
                    del federation[key]
            whole += [self.recipe, federation, dict(self.divided)]
        if self.attack:
            whole.append(dict(self.attack))
        if self.marked:
            whole.append(["mark", dict(self.marked)])
        if self.peers:
            whole += [dict(self.divided), ["peers", dict(self.peers), dict(self.pairing)] if peers else []]
        return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()[:16]


def _filled(setting: str, values: Mapping[str, Any]) -> str:
    """The name of a setting, with values where it names keys in braces."""

    def value(match: re.Match[str]) -> str:
        found: Any = values
        for key in match[1].split("."):
            if not isinstance(found, Mapping) or key not in found:
                raise BadInput(f"reproduce.setting names {match[0]}, which the cell does not set.")
            found = found[key]
        return f"{found:g}" if isinstance(found, float) else str(found)

    return re.sub(r"\{([a-z_.]+)\}", value, setting)


def of_each_setting(rows: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """Lines of one table, dataset, number of parts, scorer and setting together; the latest of each seed."""
    groups: dict[tuple[Any, ...], dict[int, Mapping[str, Any]]] = {}
    for row in rows:
        key = tuple(row[name] for name in ("table", "dataset", "parts", "scorer", "setting"))
        groups.setdefault(key, {})[row["seed"]] = row
    return [list(own.values()) for own in groups.values()]


def spread(values: Sequence[float]) -> tuple[float, float | None]:
    """The mean, and the standard deviation if there are several."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None


def with_marks(cell: Cell, graph: Graph) -> Graph:
    """A random share of statements confidential, as the cell says; what it drops is not trained on."""
    if not cell.marked:
        return graph
    marked = mark(graph, select(graph, share=cell.marked["share"], seed=cell.settings.seed), fresh=True)
    if not cell.marked.get("drop"):
        return marked
    assert marked.train.confidential is not None
    return replace(graph, train=Split(graph.train.triples[~marked.train.confidential]))


def read_cells(folder: Path | None, table: str, only: Sequence[str] = ()) -> list[Cell]:
    """The cells of a table; `only`: those whose names begin so.

    From a folder; or from benchmarks/TABLE, and if there is none from whatever table under benchmarks/ shows them.
    """
    home = Path("benchmarks") / table
    if folder is not None and not folder.is_dir():
        raise BadInput(f"{folder}: no such folder; expected the TOML files of a table there.")
    if folder is None:
        files = sorted(home.glob("*.toml")) or sorted(Path("benchmarks").glob("*/*.toml"))
        if not files:
            raise BadInput(f"{home}: no such folder here; run this in the project's folder, or name one by --configs.")
    else:
        files = sorted(folder.glob("*.toml"))
    cells = [cell for path in files for cell in Cell.read(path) if table in (cell.table, *cell.also)]
    if not cells:
        raise BadInput(f"{folder or home}: holds no cell of the table {table!r}.")
    names = [cell.name for cell in cells]
    if twice := [name for name in names if names.count(name) > 1]:
        raise BadInput(f"{folder or home}: two cells are called {twice[0]!r}.")
    for start in only:
        if not any(cell.name.startswith(start) for cell in cells):
            shown = ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")
            raise TacitError(f"no cell's name begins with {start!r}. There are: {shown}.")
    return [cell for cell in cells if not only or cell.name.startswith(tuple(only))]


def load(cell: Cell, data: Path | None) -> Graph | Parties:
    """A benchmark by name from the folder of datasets, an embedded federation, or a graph's file.

    Where a cell of a federation or of peers does not say how to divide it, it is a folder of parties.
    """
    dataset = cell.dataset
    if dataset in datasets.EMBEDDED:
        hospitals = datasets.clinic(datasets.EMBEDDED[dataset])  # type: ignore[arg-type]
        return hospitals if cell.given else pool(hospitals)
    if cell.peers and cell.given:
        return datasets.load_parties(dataset, data)
    if cell.given:
        from tacit.files import read_parties

        return read_parties(Path(data or os.environ.get("TACIT_DATA", ".")) / dataset)
    if dataset.endswith(".safetensors"):
        return load_graph(Path(dataset))
    return datasets.load(dataset, data)


class Results:
    """A JSONL file of results, one object a line. A last line that was cut off is none; the next one replaces it."""

    def __init__(self, path: Path):
        self.path = path

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if not self.path.exists():
            return
        whole, _ = self._parts()
        for number, line in enumerate(whole.decode("utf-8").splitlines(), 1):
            row = _result(line)
            if row is None:
                found = Problem(str(self.path), number, excerpt(line), "a JSON object with metrics")
                raise BadInput(f"{self.path}: a line is no result.", [found])
            yield row

    def _parts(self) -> tuple[bytes, bytes]:
        """The lines that are whole, and what is left of one that was cut off."""
        data = self.path.read_bytes()
        end = data.rfind(b"\n") + 1
        if end == len(data) or _result(data[end:].decode("utf-8", "replace")) is not None:
            return data, b""
        LOG.warning("the last line of %s was cut off, and is passed over", self.path.name)
        return data[:end], data[end:]

    def of(self, fingerprint: str) -> dict[str, Any] | None:
        """The latest with this fingerprint."""
        return next((row for row in reversed(list(self)) if row.get("fingerprint") == fingerprint), None)

    def all_of(self, fingerprint: str) -> list[dict[str, Any]]:
        """Every line of a cell that has several, if all of them are there; the latest of each."""
        found = {row["line"]: row for row in self if row.get("fingerprint") == fingerprint and "line" in row}
        rows = [found[number] for number in sorted(found)]
        return rows if rows and len(rows) == rows[0]["lines"] else []

    def append(self, row: Mapping[str, Any]) -> None:
        """Add a line."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        whole, cut = self._parts() if self.path.exists() else (b"", b"")
        with open(self.path, "ab") as file:
            if cut:
                file.truncate(len(whole))
            between = b"" if not whole or whole.endswith(b"\n") else b"\n"
            file.write(between + json.dumps(row, ensure_ascii=False, allow_nan=False).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())


def _result(line: str) -> dict[str, Any] | None:
    """The result that a line is; None: it is none."""
    try:
        row = json.loads(line)
        row["metrics"].keys()
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None
    return dict(row)


def run_cell(
    cell: Cell,
    graph: Graph | Parties,
    folder: Path,
    *,
    device: str | None = None,
    command: str = "",
    on_event: Callable[[Event], None] = lambda event: None,
) -> dict[str, Any]:
    """Train a cell in its folder, from the beginning or from where it was left; the line of its result."""
    if cell.peers:
        from tacit.peers.cells import peers_cell

        return peers_cell(cell, graph, device=device, command=command)
    settings = cell.settings
    if device is not None:
        settings = replace(settings, training=replace(settings.training, device=device))
    more: dict[str, Any]
    if cell.federation is None:
        assert isinstance(graph, Graph)
        mine = with_marks(cell, graph)
        settings = solved(settings, [mine])
        run = _opened(cell, settings, (mine,), folder, Run.open, partial(create, mine, settings, folder))
        if not run.finished:
            run.train(on_event)
        events, more = list(run.events()), {"best_epoch": run.best_epoch} | _of_privacy(run)
        more |= _by_the_paper(settings, events, "epoch")
    else:
        parties = graph if isinstance(graph, Parties) else divide(graph, cell)
        settings = with_noise(str(cell.recipe), parties, settings, cell.federation)
        make = partial(FederatedRun.create, str(cell.recipe), parties, settings, cell.federation, folder)
        run = _opened(cell, settings, parties.graphs, folder, FederatedRun.open, make)
        if not run.finished:
            run.train(on_event)
        events, more = run.events(), {"partition": dict(cell.divided)} | _of_federation(run) | _cost(run)
        more |= _by_the_paper(settings, events, "round")
    test, valid = (run.metrics[split].json() for split in ("test", "valid"))
    if cell.marked.get("drop"):  # what was not trained on is known to be true all the same
        assert isinstance(graph, Graph)
        test, valid = (evaluated(run.model, graph, split, settings).json() for split in ("test", "valid"))
    parts, seconds = 1 if cell.federation is None else len(run.parties), sum(event["seconds"] for event in events)
    return line(cell, graph, settings, parts=parts, metrics=test, seconds=seconds, command=command, valid=valid, **more)


def alike(cell: Cell) -> Any:
    """What cells that can train together have in common; None: the cell trains by itself.

    Of DPKGE as published, everything but the seed, the noise, the percentile, the optimizers, and what is confidential.
    """
    privacy, settings = cell.settings.privacy, cell.settings
    if not isinstance(privacy, DPKGE) or settings.evaluation.every < settings.training.epochs:
        return None
    same = replace(privacy, sigma=1.0, percentile=50.0, optimizers=1)
    return cell.dataset, json.dumps(replace(settings, name="any", seed=0, privacy=same).json(), sort_keys=True)


def begun_together(settings: Sequence[Settings], graphs: Sequence[Graph], device: str | None = None) -> Fit:
    """Trainings that are `alike`, of graphs with the same names, as one of parties that never meet."""
    first, begun = settings[0], []
    for wanted, graph in zip(settings, graphs, strict=True):
        own = Layout((len(graph.entities),), (len(graph.relations),))
        weights = [relation_weights(graph)] if wanted.scorer.statistics else None
        begun.append(Tables.begin(wanted.scorer, wanted.dim, own, seed=wanted.seed, weights=weights))
    stacked = Tables(torch.cat([tables.entity for tables in begun]), torch.cat([tables.relation for tables in begun]))
    mechanisms = [wanted.privacy for wanted in settings if isinstance(wanted.privacy, DPKGE)]
    most = replace(mechanisms[0], optimizers=max(each.optimizers for each in mechanisms))
    fit = Fit(replace(first, privacy=most), graphs, tables=stacked, device=device)
    fit.published.differ([wanted.seed for wanted in settings], mechanisms)
    return fit


def run_together(
    cells: Sequence[Cell],
    graph: Graph,
    *,
    device: str | None = None,
    command: Callable[[Cell], str] = lambda cell: "",
    on_epoch: Callable[[int], None] = lambda epoch: None,
) -> list[dict[str, Any]]:
    """Train cells that are `alike` side by side, as parties that never meet; each cell's line.

    Each comes out as it would alone, but for rounding. Seconds are a cell's share of those of all.
    """
    first, began, events = cells[0].settings, time.perf_counter(), []
    fit = begun_together([cell.settings for cell in cells], [with_marks(cell, graph) for cell in cells], device)
    for epoch in range(first.training.epochs):
        losses = fit.epoch().loss
        events.append([{"event": "epoch", "loss": [loss], "published_accounting": [fit.published.accounted(party)]}
                       for party, loss in enumerate(losses)])  # fmt: skip
        on_epoch(epoch)
    wanted, asked = first.evaluation, [Questions(graph.splits[split].triples, graph.statements.triples)
                                       for split in SPLITS[1:]]  # fmt: skip
    measured = [
        [rank(fit.model(party, best=False), each, sides=wanted.sides, memory_mb=wanted.memory_mb)
         .metrics(wanted.ties).json() for each in asked] for party in range(len(cells))
    ]  # fmt: skip
    share = (time.perf_counter() - began) / len(cells)
    found = []
    for party, (cell, (valid, test)) in enumerate(zip(cells, measured, strict=True)):
        settings = replace(cell.settings, training=replace(cell.settings.training, device=device or "auto"))
        more = _by_the_paper(settings, [each[party] for each in events], "epoch") | {"together": len(cells)}
        found.append(line(cell, graph, settings, parts=1, metrics=test, seconds=share, command=command(cell),
                          valid=valid, best_epoch=first.training.epochs, **more))  # fmt: skip
    return found


def line(
    cell: Cell,
    graph: Graph | Parties,
    settings: Settings,
    *,
    parts: int,
    metrics: Mapping[str, Any],
    seconds: float,
    command: str,
    **more: Any,
) -> dict[str, Any]:
    """A result, with all that is needed to get it again."""
    return {
        "table": cell.table,
        "cell": cell.name,
        "dataset": cell.dataset,
        "scorer": cell.scorer,
        "setting": cell.setting,
        "parts": parts,
        "seed": settings.seed,
        "metrics": metrics,
        "published": cell.published,
        "goal": cell.goal,
        "seconds": round(seconds, 2),
        "device": device_name(settings.training.device),
        "commit": commit(),
        "command": command,
        **more,
        "fingerprint": cell.fingerprint(graph),
        "settings": settings.json(),
    }


def divide(graph: Graph, cell: Cell) -> Parties:
    """The parties of a federation's cell."""
    options: dict[str, Any] = {k: tuple(v) if k == "split" else v for k, v in cell.divided.items()}
    by, parts = options.pop("by", "triples"), options.pop("parts", 1)
    return partition(graph, by, parts, seed=cell.settings.seed, **options)


def _opened(
    cell: Cell,
    settings: Settings,
    graphs: Sequence[Graph],
    folder: Path,
    open_it: Callable[[Path], Any],
    make: Callable[[], Any],
) -> Any:
    """The run in a folder, if it is the one that is wanted; or a new one."""
    if not (folder / CONFIG).is_file():
        return make()
    run = open_it(folder)
    federated = isinstance(run, FederatedRun)
    held = (run.parties.graphs, run.recipe, run.federation) if federated else ((run.graph,), None, None)
    if (run.settings, *held) != (settings, tuple(graphs), cell.recipe, cell.federation):
        raise TacitError(f"{folder} holds a run with other settings: remove it, or choose another --runs.")
    return run


def _of_privacy(run: Run) -> dict[str, Any]:
    """What only a private training has: what it costs, and each side of its ranks. A simulation's epsilon is one too
    here: figures are to be repeated by others.
    """
    if not isinstance(run.settings.privacy, Sound):
        return {}
    graph, wanted = run.graph, run.settings.evaluation
    ranks = rank(run.model, graph.test.triples, graph.statements.triples, memory_mb=wanted.memory_mb)
    sides = {side: metrics.json()["mrr"] for side, metrics in ranks.by_side(wanted.ties).items()}
    return _cost(run) | {"sides": sides}


def _by_the_paper(settings: Settings, events: Sequence[Event], each: str) -> dict[str, Any]:
    """Loss and epsilon by the paper's own accounting, epoch by epoch or round by round: of published mechanisms."""
    if not isinstance(settings.privacy, Published):
        return {}
    found = [event for event in events if event["event"] == each]
    known = [max((e for e in event["published_accounting"] if e is not None), default=None) for event in found]
    return {
        "published_accounting": {"epsilon": known[-1] if known else None, "delta": settings.privacy.delta, "by": known},
        "loss": [round(float(np.mean(event["loss"])), 5) if None not in event["loss"] else None for event in found],
    }


def _cost(run: Run | FederatedRun) -> dict[str, Any]:
    claim = run.claim
    return {
        "epsilon": claim["epsilon"] if claim["epsilon"] is not None else claim.get("simulated_epsilon"),
        "delta": claim.get("delta"),
        "simulated": "simulated_epsilon" in claim,
    }


def _of_federation(run: FederatedRun) -> dict[str, Any]:
    """What only a federation has: its cost, its course, its parties' sizes."""
    events = run.events()
    rounds = [event for event in events if event["event"] == "round"]
    sizes = [len(graph.entities) for graph in run.parties]
    communication = run.communication()
    return {
        "best_round": run.best_round,
        "rounds": len(rounds),
        "bytes": {key: communication[key] for key in ("bytes", "to_server", "from_server")},
        "cost": {f"{target:g}": run.cost_of(target, events) for target in TARGETS},
        "loss": [round(float(np.mean([x for x in event["loss"] if x is not None])), 6) for event in rounds],
        "entities": {"mean": round(float(np.mean(sizes)), 2), "std": round(float(np.std(sizes, ddof=1)), 2)
                     if len(sizes) > 1 else 0.0},
        "federation": asdict(run.federation),
        "by_party": [metrics.json()["mrr"] for metrics in run.by_party["test"]],
    }  # fmt: skip


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
    """Of the code that runs: as TACIT_COMMIT says, or of the repository it is in, with a mark if it was changed."""
    if named := os.environ.get("TACIT_COMMIT"):
        return named
    here = Path(__file__).parent
    git = ["git", "-C", str(here)]
    try:
        subprocess.run([*git, "ls-files", "--error-unmatch", __file__], capture_output=True, check=True)
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        changed = subprocess.run(
            [*git, "status", "--porcelain", "."], capture_output=True, text=True, check=True
        ).stdout
        return f"{head}-changed" if changed.strip() else head
    except (FileNotFoundError, subprocess.CalledProcessError):  # no git, or not from a repository
        return None


def reproduce(
    cells: Sequence[Cell],
    *,
    data: Path | None = None,
    runs: Path | None = None,
    results: Path | None = None,
    device: str | None = None,
    command: str = "",
    on_cell: Callable[[Cell, dict[str, Any] | None], Any] = lambda cell, row: None,
    on_event: Callable[[Event], None] = lambda event: None,
) -> list[dict[str, Any]]:
    """Run the cells that have no result yet; each cell's line, or lines.

    Parameters
    ----------
    runs, results
        The folder of runs and the file of results. Default: runs/TABLE and benchmarks/results/TABLE.jsonl, of the
        table that is the cell's home.
    on_cell
        Hears of a cell when it begins, without a line, and when it ends.
    """
    graphs: dict[tuple[str, bool], Graph | Parties] = {}
    rows = []
    for cell in cells:
        place = (cell.dataset, cell.given)
        if place not in graphs:
            graphs = {place: load(cell, data)}  # one at a time in memory
        graph = graphs[place]
        kept = Results(results or Path("benchmarks/results") / f"{cell.table}.jsonl")
        own = f"{command} --only {cell.name}"
        if cell.attack:
            found = kept.all_of(cell.fingerprint(graph))
            if not found:
                from tacit.attacks.cells import attack_cell

                on_cell(cell, None)
                found = attack_cell(cell, graph, device=device, command=own, on_event=on_event)
                for row in found:
                    kept.append(row)
        else:
            earlier = kept.of(cell.fingerprint(graph))
            if earlier is None:
                on_cell(cell, None)
                folder = (runs or Path("runs") / cell.table) / cell.name
                earlier = run_cell(cell, graph, folder, device=device, command=own, on_event=on_event)
                kept.append(earlier)
            found = [earlier]
        for row in found:
            on_cell(cell, row)
        rows += found
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
        cells = read_cells(chosen.configs, chosen.table, chosen.only)
        reproduce(
            cells,
            data=chosen.data,
            runs=chosen.runs,
            results=chosen.results,
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
