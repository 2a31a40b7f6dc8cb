"""How fast link prediction is ranked: the test split of FB15k-237, both sides, filtered, against all entities.

    python benchmarks/ranking.py --graph FB15K-237 [--device cuda] [--repeat 5] [--peer-triples 512]

Dim 128, after two epochs of training. The index of true answers is made once for a split and not timed (it has a column
of its own). The floor: for distances a subtraction, an absolute value and an addition per number (RotatE: eight), for
products a multiplication and an addition; on a CPU L2 distances are counted as products. --peer-triples ranks so many
triples by PyKEEN's evaluator beside it.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import torch
from measure import floor, load, now, row, timed, write
from peers import pykeen_ranking, ranked_part

from tacit.evaluation import rank
from tacit.evaluation.ranking import Questions
from tacit.settings import Settings
from tacit.training import Fit

ROWS: list[tuple[str, dict[str, Any], float, float | None]] = [
    ("transe", {}, 3, 0.020), ("distmult", {}, 2, 0.015), ("rotate", {}, 8, None), ("complex", {}, 2, None),
    ("transe L2", {"norm": 2}, 2, None), ("transh", {}, 3, None),
]  # fmt: skip
"""Scorer and its options, operations per number, and the seconds that an H200 was to reach."""
PEERS = ("transe", "distmult", "complex")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--graph", required=True, help="a dataset by name or folder, or a file by save_graph")
    options.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options.add_argument("--repeat", type=int, default=3)
    options.add_argument("--only", nargs="*", help="rows of the table, such as transe or 'transe L2'")
    options.add_argument("--peer-triples", type=int, default=0)
    options.add_argument("--out", type=Path, default=None)
    chosen = options.parse_args()
    graph, device, results = load(chosen.graph), chosen.device, []
    row(
        "",
        ["best s", "median", "goal (H200)", "floor", "index s", "MRR", "MiB", "PyKEEN s", "its MRR", "ours", "times"],
    )
    for name, options_of, operations, goal in ROWS:
        if chosen.only and name not in chosen.only:
            continue
        scorer = {"name": name.split()[0], "dim": 128, **options_of}
        settings = Settings.make({"scorer": scorer, "negatives": {"filtered": True}})
        fit = Fit(settings, [graph], device=device)
        for _ in range(2):
            fit.epoch()
        model = fit.model(best=False)
        began = now(device)
        asked = Questions(graph.test.triples, graph.statements.triples)
        asked.known((False, True), device)
        index = now(device) - began
        metrics = rank(model, asked).metrics()
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        seconds = timed(lambda model=model, asked=asked: rank(model, asked), device, chosen.repeat)  # type: ignore[misc]
        pairs = 2 * len(graph.test) * len(graph.entities) * model.tables.entity.shape[1]
        found: dict[str, Any] = {
            "what": name, "best": min(seconds), "median": statistics.median(seconds), "all": seconds,
            "goal_h200": goal, "index_s": index, "mrr": metrics.mrr,
            "floor_s": floor(device, flops=pairs * operations / (2 if name == "rotate" else 1)),
        }  # fmt: skip
        if device == "cuda":
            found["mib"] = (torch.cuda.max_memory_allocated() - before) / 2**20
        if chosen.peer_triples and name in PEERS:
            tables = model.tables
            peer = pykeen_ranking(graph, name, tables.entity, tables.relation, device=device,
                                  triples=chosen.peer_triples)  # fmt: skip
            found |= {"peer": peer, "times_faster": peer["seconds"] / found["median"]}
            part = ranked_part(graph, chosen.peer_triples)
            found["mrr_of_its_part"] = rank(model, part, graph.statements.triples).metrics().mrr
        results.append(found)
        names = ("best", "median", "goal_h200", "floor_s", "index_s", "mrr", "mib")
        peers = []
        if "peer" in found:
            peers = [found["peer"]["seconds"], found["peer"]["mrr"], found["mrr_of_its_part"], found["times_faster"]]
        row(name, [*(found.get(key) for key in names), *peers])
        write(chosen.out, device, results)


if __name__ == "__main__":
    main()
