"""DPKGE's Table 4 again: do patients cluster alike with and without confidential statements, with and without privacy?

    python benchmarks/clustering.py --data DATASETS [--save mimic.safetensors] [--out FILE]
    python benchmarks/clustering.py --graph mimic.safetensors

Of the MIMIC-III demo five embeddings are trained each way: without privacy (NDP), as published (DPKGE, sigma 1),
without confidential statements (U-only). Rows of patients are clustered (k = 2, 3, 4), and the normalised mutual
information of NDP's clusters with the others' is the mean over all 5 x 5 pairs. NDP with NDP, of other seeds, is the
control that the paper does not have: what no privacy can exceed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from measure import row
from mimic import imported, trained_on

from tacit.evaluation.clustering import clusters, mutual_information
from tacit.graph import Graph, Split
from tacit.reproduction import Results, begun_together, commit, device_name
from tacit.settings import Settings
from tacit.tensors import load_graph, save_graph
from tacit.training import chosen_device

SETTINGS: dict[str, Any] = {
    "scorer": {"name": "transe", "dim": 50}, "loss": {"name": "margin"},
    "negatives": {"count": 1, "sides": "random"}, "optimizer": {"name": "adagrad", "learning_rate": 0.1},
}  # fmt: skip
WAYS: dict[str, Callable[[Graph], Graph]] = {
    "ndp": lambda graph: replace(graph, train=Split(graph.train.triples)),
    "u-only": lambda graph: trained_on(graph, "u-only"),
    "dpkge": lambda graph: graph,
}
"""What each way trains on: without confidential statements DPKGE's steps are plain ones."""
PUBLISHED = {"dpkge": {2: 0.96, 3: 0.34, 4: 0.28}, "u-only": {2: 0.02, 3: 0.04, 4: 0.05}}
"""Mean NMI with NDP, TransE on MIMIC-III (Han et al. 2022, Table 4)."""
KS = (2, 3, 4)


def patients(graph: Graph) -> np.ndarray:
    """The entity rows of patients."""
    found = [place for place, name in enumerate(graph.entities) if name.startswith("patient: ")]
    if not found:
        raise SystemExit("the graph has no patients: expected the MIMIC-III demo, imported by the mapping mimic-iii")
    return np.array(found)


def agreement(ours: list[np.ndarray], theirs: list[np.ndarray], k: int, *, same: bool) -> list[float]:
    """Of all pairs of embeddings; `same`: of two different ones of one list."""
    grouped = [[clusters(rows, k, seed=seed) for seed, rows in enumerate(rows_of)] for rows_of in (ours, theirs)]
    return [mutual_information(a, b) for (i, a), (j, b) in product(*map(enumerate, grouped)) if not (same and i >= j)]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--data", type=Path, help="the folder that holds mimic-iii-demo")
    options.add_argument("--graph", type=Path, help="the graph, as --save wrote it")
    options.add_argument("--save", type=Path)
    options.add_argument("--runs", type=int, default=5)
    options.add_argument("--epochs", type=int, default=100)
    options.add_argument("--sigma", type=float, default=1.0)
    options.add_argument("--device", default="auto")
    options.add_argument("--out", type=Path)
    chosen = options.parse_args()
    if (chosen.data is None) == (chosen.graph is None):
        options.error("give --data or --graph")
    graph = load_graph(chosen.graph) if chosen.graph else imported(chosen.data / "mimic-iii-demo")
    if chosen.save:
        save_graph(chosen.save, graph)
    which, began = patients(graph), time.perf_counter()
    batch = round(len(graph.train) ** 0.5)
    privacy = {"name": "dpkge", "mode": "published", "sigma": chosen.sigma, "delta": 1 / len(graph.train)}
    more = {"training": {"batch": batch, "epochs": chosen.epochs}, "privacy": privacy}
    seeds = [Settings.make(SETTINGS | more | {"seed": seed}) for seed in range(chosen.runs)]
    device = chosen_device(chosen.device)
    fit = begun_together(seeds * len(WAYS), [way_of(graph) for way_of in WAYS.values() for _ in seeds], device)
    for _ in range(chosen.epochs):
        fit.epoch()
    found_rows = [fit.model(party, best=False).tables.entity[which].cpu().numpy() for party in range(len(fit.graphs))]
    rows = {way: found_rows[at * len(seeds) : (at + 1) * len(seeds)] for at, way in enumerate(WAYS)}
    seconds = time.perf_counter() - began
    print(f"{len(found_rows)} trainings: {seconds:.0f} s", flush=True)
    row("NMI with NDP", [f"k = {k}" for k in KS], width=16)
    for way in ("ndp", "dpkge", "u-only"):
        found = {k: agreement(rows["ndp"], rows[way], k, same=way == "ndp") for k in KS}
        row(way, [f"{np.mean(each):.3f} ± {np.std(each):.3f}" for each in found.values()], width=16)
        if chosen.out is not None:
            Results(chosen.out).append({
                "table": "dpkge-clustering", "dataset": "mimic-iii-demo", "scorer": "transe", "setting": way,
                "parts": 1, "seed": list(range(chosen.runs)),
                "metrics": {f"nmi{k}": float(np.mean(found[k])) for k in KS},
                "deviation": {f"nmi{k}": float(np.std(found[k])) for k in KS}, "pairs": len(found[2]),
                "published": {"DPKGE": {f"nmi{k}": v for k, v in PUBLISHED[way].items()}} if way in PUBLISHED else {},
                "seconds": round(seconds / len(WAYS), 1), "device": device_name(device), "commit": commit(),
                "command": f"python benchmarks/clustering.py --runs {chosen.runs} --epochs {chosen.epochs} "
                f"--sigma {chosen.sigma:g}", "sigma": chosen.sigma, "patients": len(which), "batch": batch,
            })  # fmt: skip


if __name__ == "__main__":
    main()
