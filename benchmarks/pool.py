"""Cells of tables, several at a time on one GPU: each alone leaves most of it idle.

    python benchmarks/pool.py --workers 12 --seconds 580 --data data --out results \
        fedr-table2:wn18rr-complex dpflames-table2:nell-995

Cells whose lines are kept already, or stand in --out, are not run again. What was found is added to OUT/TABLE.jsonl as
it comes, by this process alone. Trainings that are cut off by --seconds go on from their checkpoints the next time;
attacks, which train in memory, begin again, and so do cells that train together: many small trainings of one graph that
differ in seed and noise alone are one training of many parties, because launches are as many for thirty as for one.
Start a CUDA multi-process server (nvidia-cuda-mps-control -d) before it. With one, whoever is killed takes along what
the others have on the GPU: give pools that run beside each other the same --seconds. An H200 starts some 340,000
kernels a second for all processes together, so that small steps gain by being fewer, and not by being shared out.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import queue
import sys
import time
import traceback
from functools import partial
from pathlib import Path
from typing import Any

from tacit.reproduction import Cell, Results, alike, load, read_cells, run_cell, run_together


def work(data: Path, device: str, wanted: Any, found: Any) -> None:
    """Take cells, some of which train together, until there are none; tell their lines, or what went wrong."""
    import torch

    def command(cell: Cell) -> str:
        return f"python -m tacit.reproduction {cell.table} --device {device} --only {cell.name}"

    torch.set_num_threads(1)
    graphs: dict[tuple[str, bool], Any] = {}
    while True:
        try:
            cells: list[Cell] = wanted.get(timeout=1)
        except queue.Empty:
            return
        cell, began = cells[0], time.perf_counter()
        try:
            if kind(cell) not in graphs:
                graphs[kind(cell)] = load(cell, data)
            graph = graphs[kind(cell)]
            if cell.attack:
                from tacit.attacks.cells import attack_cell

                rows = attack_cell(cell, graph, device=device, command=command(cell), on_event=lambda event: None)
            elif len(cells) > 1:
                rows = run_together(cells, graph, device=device, command=command, on_epoch=partial(tell, cell, began))
            else:
                folder = Path("runs") / cell.table / cell.name
                rows = [run_cell(cell, graph, folder, device=device, command=command(cell))]
        except Exception:  # noqa: BLE001  (told by the process that waits for it)
            found.put((cells, None, traceback.format_exc()))
        else:
            found.put((cells, rows, f"{time.perf_counter() - began:.0f} s"))


def tell(cell: Cell, began: float, epoch: int) -> None:
    """How far a training of several cells is, now and then."""
    if epoch % 20 == 19:
        print(f"{cell.name} and others: epoch {epoch + 1}, {time.perf_counter() - began:.0f} s", flush=True)


def kind(cell: Cell) -> tuple[str, bool]:
    """What a cell's graph is known by."""
    return cell.dataset, cell.given


def missing(tables: list[str], data: Path, out: Path) -> list[Cell]:
    """The cells that are asked for and have no line, in the order they are asked for."""
    graphs: dict[tuple[str, bool], Any] = {}
    cells: list[Cell] = []
    for asked in tables:
        table, _, start = asked.partition(":")
        for cell in read_cells(None, table, [start] if start else []):
            if kind(cell) not in graphs:
                graphs[kind(cell)] = load(cell, data)
            kept = [Path("benchmarks/results") / f"{cell.table}.jsonl", out / f"{cell.table}.jsonl"]
            print_of = cell.fingerprint(graphs[kind(cell)])
            if cell not in cells and not any(Results(file).of(print_of) for file in kept):
                cells.append(cell)
    return cells


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("tables", nargs="+", help="TABLE, or TABLE:how cells' names begin")
    options.add_argument("--workers", type=int, default=8)
    options.add_argument("--seconds", type=float, default=float("inf"), help="stop what is left after so many")
    options.add_argument("--data", type=Path)
    options.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options.add_argument("--device", default="cuda")
    options.add_argument("--seeds", type=int, nargs="+", help="only cells with one of these")
    chosen = options.parse_args()
    began = time.perf_counter()
    cells = [cell for cell in missing(chosen.tables, chosen.data, chosen.out)
             if chosen.seeds is None or cell.settings.seed in chosen.seeds]  # fmt: skip
    print(f"{len(cells)} cells", flush=True)
    context = multiprocessing.get_context("spawn")
    wanted, found = context.Queue(), context.Queue()
    groups: dict[Any, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(alike(cell) or cell.name, []).append(cell)
    for group in groups.values():
        wanted.put(group)
    workers = [context.Process(target=work, args=(chosen.data, chosen.device, wanted, found), daemon=True)
               for _ in range(min(chosen.workers, len(groups)))]  # fmt: skip
    for worker in workers:
        worker.start()
    left, failed = len(cells), 0
    while left and time.perf_counter() - began < chosen.seconds and any(worker.is_alive() for worker in workers):
        try:
            done, rows, told = found.get(timeout=1)
        except queue.Empty:
            continue
        left -= len(done)
        failed += len(done) if rows is None else 0
        for row in rows or ():
            Results(chosen.out / f"{row['table']}.jsonl").append(row)
        shown = json.dumps(rows[0]["metrics"]) if rows else ""
        print(f"{time.perf_counter() - began:.0f} s: {len(done)} x {done[0].name}: {told} {shown[:120]}", flush=True)
    for worker in workers:
        worker.kill()
    wanted.cancel_join_thread()  # nobody takes what is left
    print(f"{left} left, {failed} failed", flush=True)
    return 1 if left or failed else 0


if __name__ == "__main__":
    sys.exit(main())
