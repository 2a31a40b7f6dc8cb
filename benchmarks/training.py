"""How fast training is: seconds per epoch on FB15k-237, and whether it learns what the reference kernel learns.

    python benchmarks/training.py --graph FB15K-237 [--device cuda] [--epochs 3] [--reference] [--peer-steps 40]

Dim 128, 256 filtered negatives, self-adversarial loss, Adam, float32. An epoch includes shuffling, sampling, filtering,
gradients and the optimizer. Each row says its floor: the bytes that gathering and scattering the rows, and a dense
Adam, have to move, at the device's memory bandwidth. --reference trains as many epochs with the reference kernel and
compares validation MRR; --peer-steps times so many steps of PyKEEN beside ours (see peers.py for how).
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import torch
from measure import floor, load, now, row, timed, write
from peers import pykeen_training

from tacit.parties import partition
from tacit.settings import Settings, combine
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
"""Label, settings, parties, and the seconds that an H200 was to reach."""


def floor_seconds(fit: Fit, device: str) -> float:
    """Rows read twice and added to once for every example, and Adam's seven passes over both tables for every step."""
    entity, relation = fit.cohort.tables.entity, fit.cohort.tables.relation
    steps = int(fit.examples.steps_per_epoch().max())
    rows = len(fit.examples.triples) * fit.settings.negatives.count * entity.shape[1] * 4 * 3
    return floor(device, bytes_=rows + steps * 7 * 4 * (entity.numel() + relation.numel()))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--graph", required=True, help="a dataset by name or folder, or a file by save_graph")
    options.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options.add_argument("--epochs", type=int, default=3, help="that are timed, after one to warm up")
    options.add_argument("--only", nargs="*", help="rows whose label begins so")
    options.add_argument("--reference", action="store_true")
    options.add_argument("--peer-steps", type=int, default=0)
    options.add_argument("--out", type=Path, default=None)
    chosen = options.parse_args()
    graph, device, results = load(chosen.graph), chosen.device, []
    row("", ["s/epoch", "median", "goal (H200)", "floor", "ready s", "MRR", "reference", "s/epoch", "PyKEEN", "times"])
    for label, changes, parties, goal in ROWS:
        if chosen.only and not any(label == name for name in chosen.only):
            continue
        settings = Settings.make(combine(BASE, changes))
        graphs = list(partition(graph, "triples", parties, seed=0)) if parties > 1 else [graph]
        began = now(device)
        fit = Fit(settings, graphs, device=device)
        fit.prepare()
        ready = now(device) - began
        fit.epoch()
        seconds = timed(fit.epoch, device, chosen.epochs)
        found: dict[str, Any] = {
            "what": label, "best": min(seconds), "median": statistics.median(seconds), "all": seconds,
            "goal_h200": goal, "floor_s": floor_seconds(fit, device), "ready_s": ready, "epochs": chosen.epochs + 1,
            "mrr": fit.evaluate("valid", best=False)[0].mrr, "parties": parties, "settings": settings.json(),
        }  # fmt: skip
        if chosen.reference and parties == 1 and settings.training.batch == 512:
            slow = Fit(settings, graphs, device=device, kernel="reference")
            took = timed(slow.epoch, device, chosen.epochs + 1)
            found |= {"reference_mrr": slow.evaluate("valid", best=False)[0].mrr, "reference_s": min(took)}
        if chosen.peer_steps and parties == 1 and settings.training.batch == 512:
            peer = pykeen_training(
                graph, str(changes["scorer.name"]), batch=512, dim=128, negatives=256, steps=chosen.peer_steps,
                device=device,
            )  # fmt: skip
            found |= {"peer": peer, "times_faster": peer["seconds_per_epoch"] / found["median"]}
        results.append(found)
        names = ("best", "median", "goal_h200", "floor_s", "ready_s", "mrr", "reference_mrr", "reference_s")
        peers = [found["peer"]["seconds_per_epoch"], found["times_faster"]] if "peer" in found else [None, None]
        row(label, [*(found.get(name) for name in names), *peers])
        write(chosen.out, device, results)


if __name__ == "__main__":
    main()
