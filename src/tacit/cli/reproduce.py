"""`tacit reproduce`: a table of published figures, run again cell by cell."""

from __future__ import annotations

import json
import shlex
from contextlib import ExitStack
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from tacit.cli import show
from tacit.cli.federate import bar as rounds_bar
from tacit.cli.federate import megabytes
from tacit.cli.models import bar
from tacit.cli.options import AsJson, DataFolder

if TYPE_CHECKING:
    from tacit.reproduction import Cell


def reproduce(
    table: Annotated[str, typer.Argument(help="The table, such as linkprediction.")],
    only: Annotated[
        list[str] | None, typer.Option(help="Cells whose names begin so, such as fb15k-237-rotate; may be repeated.")
    ] = None,
    configs: Annotated[
        Path | None, typer.Option(help="The folder of the cells' TOML files. Default: benchmarks/TABLE.")
    ] = None,
    runs: Annotated[Path | None, typer.Option(help="Where runs are kept. Default: runs/TABLE.")] = None,
    results: Annotated[
        Path | None, typer.Option(help="The file results are added to. Default: benchmarks/results/TABLE.jsonl.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or auto. Default: as the cells say.")] = None,
    data: DataFolder = None,
    as_json: AsJson = False,
) -> None:
    """Run a table of published figures again, and print ours beside them.

    One cell after the other; what has a result already is not run again. Interrupted, the same command goes on.

    Example:
      tacit reproduce s4 --data datasets
    """
    from tacit.reproduction import read_cells
    from tacit.reproduction import reproduce as run_cells

    cells = read_cells(configs, table, only or ())
    options = {"--configs": configs, "--device": device}
    command = f"tacit reproduce {table}" + "".join(
        f" {name} {shlex.quote(str(value))}" for name, value in options.items() if value is not None
    )
    running = ExitStack()
    progress: list[Any] = [lambda event: None]

    def told(cell: Cell, row: dict[str, Any] | None) -> None:
        running.close()
        if row is None:
            wanted = cell.federation
            drawn = bar(cell.settings, as_json, cell.name) if wanted is None else (
                rounds_bar(cell.name, wanted.rounds, as_json))  # fmt: skip
            progress[0] = running.enter_context(drawn)
        else:
            progress[0] = lambda event: None

    try:
        with running:
            rows = run_cells(
                cells,
                data=data,
                runs=runs,
                results=results,
                device=device,
                command=command,
                on_cell=told,
                on_event=lambda event: progress[0](event),
            )
    except KeyboardInterrupt:
        Console(stderr=True).print(Text("\nStopped. The same command goes on where it was."))
        raise typer.Exit(130) from None
    if as_json:
        print(json.dumps(rows))
        return
    shown = SHOWN.get(table, _figures)
    if any(cell.attack for cell in cells):
        shown = _attacks
    elif all(cell.peers for cell in cells):
        shown = _gains
    shown(cells, rows)
    for name in sorted({row["device"] for row in rows}):
        show.say(f"Measured on: {name}", "dim")


def _figures(cells: list[Cell], rows: list[dict[str, Any]]) -> None:
    """What each cell reached, beside the published."""
    lines = []
    for cell, row in zip(cells, rows, strict=True):
        found = row["metrics"]
        others = ", ".join(f"{f['mrr']:.3f} {who}" for who, f in row["published"].items() if "mrr" in f)
        goal = "" if row["goal"] is None else f"{row['goal']:.3f}"
        if row["goal"] is not None and found["mrr"] < row["goal"]:
            goal += ", not reached"
        took = f"{row['seconds']:,.0f} s"
        lines.append((cell.name, f"{found['mrr']:.4f}", f"{found['hits10']:.4f}", others, goal, took))
    sides = {row["settings"]["evaluation"]["sides"] for row in rows}
    title = f"Test split, sides: {', '.join(sorted(sides))}, filtered, ties count half"
    show.table("", "MRR", "Hits@10", "published MRR", "goal", "took", rows=lines, title=title)


def _attacks(cells: list[Cell], rows: list[dict[str, Any]]) -> None:
    """What attacks found, beside the published."""
    lines, rates = [], []
    for row in rows:
        found, others = row["metrics"], row["published"]
        if "err" in found:
            numbers = [f"{value:.4f}" if value is not None else "" for value in (found["err"], found["trr"])]
            told = ", ".join(f"{f['err']:.4f} and {f['trr']:.4f} {who}" for who, f in others.items())
            rates.append((row["cell"], row["place"], f"{row['leak']:g}", *numbers, row["nothing"] or told))
            continue
        told = row["nothing"] or ", ".join(f"{f['f1']:.3f} {who}" for who, f in others.items())
        numbers = [f"{found[name]:.3f}" if found[name] is not None else "" for name in ("f1", "auc")]
        lines.append((row["cell"], row["attack"], row["adversary"], row["targets"], *numbers, told))
    if lines:
        show.table("", "attack", "by", "targets", "best F1", "AUC", "published F1", rows=lines)
        _defences([row for row in rows if row["metrics"].get("way")])
    if rates:
        show.table("", "victim", "leak", "ERR", "TRR", "published ERR and TRR", rows=rates)


def _defences(rows: list[dict[str, Any]]) -> None:
    """What each way finds under privacy, beside what it finds where the setting is "none", and what follows."""
    from tacit.attacks.measures import Interval, verdict

    def of(row: dict[str, Any], way: str) -> tuple[Any, ...]:
        return *(row[key] for key in ("dataset", "scorer", "parts", "seed", "attack", "adversary", "targets")), way

    found = [(row, way, Interval(**told["last"]["auc"])) for row in rows for way, told in row["ways"].items()]
    without = {of(row, way): auc for row, way, auc in found if row["setting"] == "none"}
    lines = []
    for row, way, auc in found:
        if row.get("epsilon") is not None and without:
            plain = without.get(of(row, way))
            limits = f"{auc.value:.3f} ({auc.low:.3f}-{auc.high:.3f})"
            lines.append((row["cell"], row["attack"], row["adversary"], way, f"{plain.value:.3f}" if plain else "",
                          limits, f"{row['mrr']['test']:.3f}", verdict(plain, auc)))  # fmt: skip
    if lines:
        show.table("", "attack", "by", "way", "AUC without", "AUC", "test MRR", "", rows=lines, title="Defences")


def _gains(cells: list[Cell], rows: list[dict[str, Any]]) -> None:
    """What peers reached and gained: means over seeds, and how far these are apart."""
    from tacit.peers.cells import summary

    def told(value: tuple[float, float | None]) -> str:
        mean, spread = value
        return f"{mean:+.3f}" + (f" ± {spread:.3f}" if spread is not None else "")

    def place(each: dict[str, Any]) -> tuple[str, int, str]:
        return each["dataset"], each["parts"], each["scorer"]

    show.say(
        "Test split, means over peers and seeds; filtered, ties count half. Gain: over training alone for as long."
    )
    for (dataset, parts, scorer), some in groupby(sorted(summary(rows), key=place), place):
        lines = []
        for each in some:
            found, gain = each["metrics"], each["gain"]
            gained = ("", "") if gain is None else (told(gain[name]) for name in ("accuracy", "mrr"))
            figures = (f"{found[name][0]:.3f}" for name in ("accuracy", "mrr", "hits10", "typed_hits10"))
            lines.append((each["setting"], *figures, *gained))
        show.table("", "accuracy", "MRR", "Hits@10", "Hits@10, typed", "gain, accuracy", "gain, MRR", rows=lines,
                   title=f"{dataset}, {parts} peers, {scorer}")  # fmt: skip


def _costs(cells: list[Cell], rows: list[dict[str, Any]]) -> None:
    """Rounds and bytes until validation reached some MRRs."""
    targets = list(rows[0].get("cost", {}))
    lines = []
    for cell, row in zip(cells, rows, strict=True):
        if not row["bytes"]["bytes"]:  # who trains alone sends nothing
            continue
        costs = [row["cost"].get(target) for target in targets]
        told = ("never" if cost is None else f"{cost['rounds']} rounds, {megabytes(cost['bytes'])}" for cost in costs)
        lines.append((cell.name, *told))
    show.table("", *(f"to validation MRR {target}" for target in targets), rows=lines)


def _losses(cells: list[Cell], rows: list[dict[str, Any]]) -> None:
    """The loss after some rounds."""
    at = (1, 2, 5, 10, 20, 50, 100, 200, 300)
    lines = [
        (cell.name, *(f"{row['loss'][n - 1]:.4f}" if n <= len(row["loss"]) else "" for n in at), str(row["rounds"]))
        for cell, row in zip(cells, rows, strict=True)
    ]
    show.table("loss after round", *map(str, at), "rounds", rows=lines)


SHOWN = {"fedr-fig3": _costs, "fedr-fig4": _losses}
"""What some tables show of their cells."""
