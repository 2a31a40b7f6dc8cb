"""`tacit reproduce`: a table of published figures, run again cell by cell."""

from __future__ import annotations

import json
import shlex
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from tacit.cli import show
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
    """
    from tacit.reproduction import Results, read_cells
    from tacit.reproduction import reproduce as run_cells

    cells = read_cells(configs or Path("benchmarks") / table, table, only or ())
    options = {"--configs": configs, "--device": device}
    command = f"tacit reproduce {table}" + "".join(
        f" {name} {shlex.quote(str(value))}" for name, value in options.items() if value is not None
    )
    running = ExitStack()
    progress: list[Any] = [lambda event: None]

    def told(cell: Cell, row: dict[str, Any] | None) -> None:
        running.close()
        if row is None:
            progress[0] = running.enter_context(bar(cell.settings, as_json, cell.name))
        else:
            progress[0] = lambda event: None

    try:
        with running:
            rows = run_cells(
                cells,
                data=data,
                runs=runs or Path("runs") / table,
                results=Results(results or Path("benchmarks/results") / f"{table}.jsonl"),
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
    lines = []
    for row in rows:
        found = row["metrics"]
        others = ", ".join(f"{f['mrr']:.3f} {who}" for who, f in row["published"].items() if "mrr" in f)
        goal = "" if row["goal"] is None else f"{row['goal']:.3f}"
        if row["goal"] is not None and found["mrr"] < row["goal"]:
            goal += ", not reached"
        name, took = f"{row['dataset']} {row['scorer']}", f"{row['seconds']:,.0f} s"
        lines.append((name, f"{found['mrr']:.4f}", f"{found['hits10']:.4f}", others, goal, took))
    title = "Test split, both sides, filtered, ties count half"
    show.table("", "MRR", "Hits@10", "published MRR", "goal", "took", rows=lines, title=title)
    for name in sorted({row["device"] for row in rows}):
        show.say(f"Measured on: {name}", "dim")
