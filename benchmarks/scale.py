"""How cost grows with the graph, up to the size of Wikidata5M: 4.6 million entities, 800 relations, 21 million triples.

    python benchmarks/scale.py [--device cuda] [--sizes 0.01 0.03 0.1 0.3 1] [--results benchmarks/results/scale.jsonl]

Synthetic graphs with power-law degrees. TransE and ComplEx, dim 128, 256 negatives, Adam on all rows. The batch grows
with the graph, so that an epoch has always as many steps: each step passes over the whole table, and with a batch that
stays, cost would grow with triples times entities. Then 1,000 test triples are ranked among all entities, both sides,
filtered. Memory is the most that was allocated on the device. --plot draws what a file of results holds.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import environment, floor, now, row

from tacit.draws import Purpose, Stream
from tacit.evaluation import rank
from tacit.evaluation.ranking import Questions
from tacit.graph import Graph, Split, Vocab
from tacit.reporting.drawing import COLOURS, Panel, standalone
from tacit.reproduction import Results
from tacit.settings import Settings
from tacit.training import Fit

ENTITIES, RELATIONS, TRIPLES = 4_600_000, 800, 21_000_000
STEPS, HELD_OUT, GOAL = 1300, 1000, 20.0
"""Steps of an epoch, test triples, and the seconds that an epoch of the whole was to take on an H200."""


def synthetic(size: float, seed: int = 0) -> Graph:
    """A graph of this share of the whole: a few entities are in very many triples, most in a few."""
    entities, count = max(2, int(ENTITIES * size)), int(TRIPLES * size) + HELD_OUT
    draw = Stream(seed, Purpose.DATASET)
    order = draw.at(step=0).permutation(entities)  # who is popular does not follow from the id
    keys = np.zeros(0, np.int64)
    step = 1
    while len(keys) < count:
        more = int(1.1 * (count - len(keys))) + 100
        u, v, w = (draw.at(step=step + i).uniform(more) for i in range(3))
        h, t = (order[(entities * share).astype(np.int64)] for share in (u**1.5, w**4))
        keys = np.union1d(keys, (h * RELATIONS + (RELATIONS * v**3).astype(np.int64)) * entities + t)
        step += 3
    chosen = draw.at(step=1 << 20).permutation(len(keys))[:count]
    parts = []
    for some in (chosen[HELD_OUT:], chosen[:HELD_OUT]):
        pair, tail = np.divmod(np.sort(keys[some]), entities)
        parts.append(Split(np.stack([pair // RELATIONS, pair % RELATIONS, tail], 1).astype(np.int32)))
    names = (tuple(f"{kind}{i:07d}" for i in range(n)) for kind, n in (("e", entities), ("r", RELATIONS)))
    entity, relation = (Vocab.trusted(some) for some in names)
    return Graph(entity, relation, parts[0], Split(np.zeros((0, 3), np.int32)), parts[1])


def measured(
    graph: Graph, asked: Questions, index: float, size: float, scorer: str, device: str, epochs: int
) -> dict[str, Any]:
    """One line of results; `index`: how long it took to make the questions."""
    batch = max(1, round(len(graph.train) / STEPS))
    settings = Settings.make({"scorer": {"name": scorer, "dim": 128}, "training": {"batch": batch, "device": device}})
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    began = now(device)
    fit = Fit(settings, [graph], device=device)
    fit.prepare()
    ready = now(device) - began
    seconds = []
    for _ in range(epochs):
        began = now(device)
        fit.epoch()
        seconds.append(now(device) - began)
    memory = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else None
    model = fit.model(best=False)
    rank(model, Questions(graph.test.triples[:1], graph.test.triples))  # compiles
    began = now(device)
    metrics = rank(model, asked).metrics()
    ranking = now(device) - began
    width = model.tables.entity.shape[1]
    moved = 4 * width * (7 * len(graph.entities) * STEPS + 3 * 256 * len(graph.train))
    about = environment(device)
    return {
        "table": "scale", "dataset": f"synthetic, {size:g} of Wikidata5M's size", "scorer": scorer,
        "setting": "dim 128, 256 negatives, Adam", "parts": 1, "seed": 0,
        "metrics": {
            "mrr": metrics.mrr, "epoch_s": min(seconds), "epochs_s": seconds, "floor_s": floor(device, bytes_=moved),
            "memory_gib": memory, "ready_s": ready, "index_s": index, "rank_1000_s": ranking, "size": size,
            "entities": len(graph.entities), "triples": len(graph.train), "batch": batch,
        },
        "published": {}, "seconds": sum(seconds), "device": about.get("device", about["processor"]),
        "commit": about["commit"], "command": about["command"],
    }  # fmt: skip


def drawn(rows: list[dict[str, Any]]) -> str:
    """Seconds per epoch by size, both logarithmic: a straight line at 45 degrees is linear growth."""
    sizes, times = ([found["metrics"][key] for found in rows] for key in ("size", "epoch_s"))
    (x0, x1), (y0, y1) = ((math.floor(math.log10(min(v))), math.ceil(math.log10(max(v)))) for v in (sizes, times))
    panel = Panel(70, 20, 550, 310, (10.0**x0, 10.0**x1), (10.0**y0, 10.0**y1), logarithmic="xy")
    panel.grid(
        [(10.0**power, f"{ENTITIES * 10.0**power:,.0f}") for power in range(x0, x1 + 1)],
        [(10.0**power, f"{10.0**power:g} s") for power in range(y0, y1 + 1)],
    )
    panel.text("entities; triples, and the batch, grow alike", 275, 350, anchor="middle")
    for number, scorer in enumerate(sorted({found["scorer"] for found in rows})):
        own = sorted((f["metrics"]["size"], f["metrics"]["epoch_s"]) for f in rows if f["scorer"] == scorer)
        panel.series(own, COLOURS[number])
        panel.text(scorer, 15, 20 + 20 * number, COLOURS[number])
    return standalone(640, 400, "Seconds per epoch by size of the graph", [panel])


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options.add_argument("--sizes", type=float, nargs="*", default=[0.01, 0.03, 0.1, 0.3, 1.0])
    options.add_argument("--scorers", nargs="*", default=["transe", "complex"])
    options.add_argument("--epochs", type=int, default=2)
    options.add_argument("--out", type=Path, help="a JSONL file to add the results to")
    options.add_argument("--plot", type=Path, help="draw what the file of results holds, into this SVG; nothing is run")
    chosen = options.parse_args()
    if chosen.plot:
        if chosen.out is None:
            options.error("--plot needs --out, the file that holds the results")
        latest = {(found["scorer"], found["metrics"]["size"]): found for found in Results(chosen.out)}
        chosen.plot.write_text(drawn(list(latest.values())))
        return
    row("", ["size", "batch", "s/epoch", "floor", "GiB", "ready s", "index s", "rank 1,000", "MRR"])
    for size in chosen.sizes:
        graph = synthetic(size)
        began = now(chosen.device)
        asked = Questions(graph.test.triples, graph.statements.triples)
        asked.known((False, True), chosen.device)
        index = now(chosen.device) - began
        for scorer in chosen.scorers:
            found = measured(graph, asked, index, size, scorer, chosen.device, chosen.epochs)
            m = found["metrics"]
            row(scorer, [m["size"], m["batch"], m["epoch_s"], m["floor_s"], m["memory_gib"], m["ready_s"], m["index_s"],
                         m["rank_1000_s"], m["mrr"]])  # fmt: skip
            if chosen.out:
                Results(chosen.out).append(found)


if __name__ == "__main__":
    main()
