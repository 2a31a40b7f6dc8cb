"""`tacit reproduce`: a table of published figures, run again cell by cell."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
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
    """What was reached, a mean and how far seeds are apart where there are several, beside the published."""
    from tacit.reproduction import of_each_setting, spread

    def told(some: Sequence[Mapping[str, Any]], name: str) -> str:
        digits = 0 if name == "mr" else 3
        mean, apart = spread([row["metrics"][name] for row in some])
        return f"{mean:,.{digits}f}" + (f" ± {apart:,.{digits}f}" if apart is not None else "")

    def published(figures: dict[str, float]) -> str:
        wanted = {"mrr": "MRR"} if "mrr" in figures else {"hits10": "Hits@10", "hits1": "Hits@1", "mr": "MR"}
        numbers = {name: f"{figures[name]:,.{0 if name == 'mr' else 3}f}" for name in wanted if name in figures}
        return ", ".join(f"{wanted[name]} {number}" for name, number in numbers.items())

    def place(some: Sequence[Mapping[str, Any]]) -> tuple[str, int, str]:
        return some[0]["dataset"], some[0]["parts"], some[0]["scorer"]

    # Figures as the cells have them now: lines that were kept may be older.
    rows = [row | {"published": cell.published} for cell, row in zip(cells, rows, strict=True)]
    sides = {row["settings"]["evaluation"]["sides"] for row in rows}
    show.say(f"Test split, sides: {', '.join(sorted(sides))}, filtered, ties count half.")
    by_rank = any("mr" in figures for row in rows for figures in row["published"].values())
    for (dataset, parts, scorer), settings in groupby(sorted(of_each_setting(rows), key=place), place):
        lines = []
        for some in settings:
            first, found = some[0], [told(some, name) for name in ("mrr", "hits10", "mr")]
            others = [(published(figures), who) for who, figures in first["published"].items()]
            goal = "" if first["goal"] is None else f"{first['goal']:.3f}"
            if first["goal"] is not None and spread([row["metrics"]["mrr"] for row in some])[0] < first["goal"]:
                goal += ", not reached"
            costs = (row.get("epsilon") for row in some), (_accounted(row) for row in some)
            highest = (max((cost for cost in each if cost is not None), default=None) for each in costs)
            cost = ("" if epsilon is None else f"{epsilon:.3g}" for epsilon in highest)
            lines.append((first["setting"], *found, "; ".join(f"{f} {who}" for f, who in others if f), *cost, goal))
        title = f"{dataset}, {scorer}" if parts == 1 else f"{dataset}, {parts} parties, {scorer}"
        columns = ["", "MRR", "Hits@10", "MR", "published", "epsilon", "published accounting", "goal"]
        kept = [at for at in range(len(columns)) if at < 3 or (at == 3 and by_rank)
                or (at > 3 and any(line[at] for line in lines))]  # fmt: skip
        show.table(*(columns[at] for at in kept), rows=[[line[at] for at in kept] for line in lines], title=title)
    if any(row.get("simulated") for row in rows):
        show.say(
            "Noise was seeded, so that runs can be repeated: epsilon is what they cost with noise that no one knows."
        )
    if any(_accounted(row) is not None for row in rows):
        show.say("Published accounting is what a paper's own formula says. It is no guarantee (docs/published.md).")


def _accounted(row: Mapping[str, Any]) -> float | None:
    """The epsilon of a paper's own accounting, which is no claim."""
    found: float | None = (row.get("published_accounting") or {}).get("epsilon")
    return found


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
