"""How fast training is: seconds per epoch on FB15k-237, and whether it learns what the reference kernel learns.

    python benchmarks/training.py --graph FB15K-237 [--device cuda] [--epochs 3] [--no-reference]

FB15K-237 is the folder of the dataset, or a file made of it by tacit.tensors.save_graph (for a machine with torch
alone). Dim 128, 256 filtered negatives, self-adversarial loss, Adam, float32. An epoch includes shuffling, sampling,
filtering, gradients and the optimizer. Each row says its floor: the bytes that gathering and scattering the rows, and a
dense Adam, have to move, at the device's memory bandwidth.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

import torch

from tacit.graph import Graph
from tacit.parties import partition
from tacit.settings import Settings, combine
from tacit.tensors import load_graph
from tacit.training import Fit

BASE = {
    "scorer": {"dim": 128},
    "training": {"batch": 512, "epochs": 1000},
    "negatives": {"count": 256, "filtered": True},
}
ROWS: list[tuple[str, dict[str, Any], int, float | None]] = [
    ("TransE", {"scorer.name": "transe"}, 1, 0.04),
    ("RotatE", {"scorer.name": "rotate"}, 1, 0.08),
    ("DistMult", {"scorer.name": "distmult"}, 1, 0.04),
    ("ComplEx", {"scorer.name": "complex"}, 1, 0.07),
    ("TransE, batch 64", {"scorer.name": "transe", "training.batch": 64}, 1, 0.17),
    ("TransE, 5 parties in one cohort", {"scorer.name": "transe"}, 5, 0.04),
]
BANDWIDTH = {"cuda": 4.8e12, "cpu": 4e10}


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def timed(fit: Fit, device: str, epochs: int) -> list[float]:
    seconds = []
    for _ in range(epochs):
        wait(device)
        began = time.perf_counter()
        fit.epoch()
        wait(device)
        seconds.append(time.perf_counter() - began)
    return seconds


def floor_bytes(fit: Fit) -> float:
    """Rows read twice and added to once for every example, and Adam's seven passes over both tables for every step."""
    entity, relation = fit.cohort.tables.entity, fit.cohort.tables.relation
    steps = int(fit.examples.steps_per_epoch().max())
    rows = len(fit.examples.triples) * fit.settings.negatives.count * entity.shape[1] * 4 * 3
    return float(rows + steps * 7 * 4 * (entity.numel() + relation.numel()))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--graph", type=Path, required=True)
    options.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options.add_argument("--epochs", type=int, default=3)
    options.add_argument("--no-reference", action="store_true")
    options.add_argument("--out", type=Path, default=None)
    chosen = options.parse_args()
    if chosen.graph.is_dir():
        from tacit.files import read_graph

        graph: Graph = read_graph(chosen.graph)
    else:
        graph = load_graph(chosen.graph)
    results = []
    heads = ("s/epoch", "median", "goal", "floor", "compile", "MRR", "reference", "s/epoch")
    print(f"{'':34}" + "".join(f"{head:>10}" for head in heads))
    for label, changes, parties, goal in ROWS:
        settings = Settings.make(combine(BASE, changes))
        graphs = list(partition(graph, "triples", parties, seed=0)) if parties > 1 else [graph]
        began = time.perf_counter()
        fit = Fit(settings, graphs, device=chosen.device)
        wait(chosen.device)
        compile_ = time.perf_counter() - began
        seconds = timed(fit, chosen.device, chosen.epochs + 1)[
            1:
        ]  # the first is for warming up; it trains all the same
        mrr = fit.evaluate("valid", best=False)[0].mrr
        row = {"what": label, "best": min(seconds), "median": statistics.median(seconds), "goal": goal, "mrr": mrr}
        row |= {
            "epochs": chosen.epochs + 1,
            "floor_s": floor_bytes(fit) / BANDWIDTH[chosen.device],
            "compile_s": compile_,
        }
        row |= {"settings": settings.json(), "parties": parties}
        if not chosen.no_reference and parties == 1 and settings.training.batch == 512:
            slow = Fit(settings, graphs, device=chosen.device, kernel="reference")
            took = timed(slow, chosen.device, chosen.epochs + 1)
            row |= {"reference_mrr": slow.evaluate("valid", best=False)[0].mrr, "reference_s": min(took)}
        results.append(row)
        numbers = [row["best"], row["median"], goal, row["floor_s"], compile_, mrr]
        numbers += [row.get("reference_mrr"), row.get("reference_s")]
        print(f"{label:34}" + "".join(f"{'':10}" if n is None else f"{n:10.4f}" for n in numbers), flush=True)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    device = torch.cuda.get_device_name() if chosen.device == "cuda" else platform.processor() or platform.machine()
    command = f"python benchmarks/training.py --graph {chosen.graph} --device {chosen.device} --epochs {chosen.epochs}"
    about = {"schema": "tacit.benchmark/1", "device": device, "torch": torch.__version__, "commit": commit or None}
    about |= {"python": platform.python_version(), "threads": torch.get_num_threads(), "command": command}
    if chosen.out is not None:
        chosen.out.write_text(json.dumps(about | {"rows": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
