"""How long a round of a federation takes: FedE on FB15k-237, five and twenty parties, validation included.

    python benchmarks/federation.py --graph fb15k-237 [--device cuda] [--rounds 3] [--out FILE]

A round: rows to every party, three local epochs (batch 512, 256 filtered negatives, dim 128, TransE, Adam), rows back,
their mean, rows to every party again, and the validation triples of all parties ranked, tails. The triples are the same
in all, divided at random. The floor is that of three epochs (see training.py), messages and ranks not counted.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from pathlib import Path
from typing import Any

import torch
from measure import floor, load, now, row, write

from tacit.federated import Federation, Together
from tacit.federation.transcript import Transcript
from tacit.parties import partition
from tacit.recipes import RECIPES, Setup
from tacit.settings import Settings

PARTS = (5, 20)
GOAL = {"cuda": 0.3, "cpu": 60.8}
"""Seconds for five parties: set out for on an H200; on two cores a tenth of FedE's own code, which took 608."""


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--graph", required=True, help="a dataset by name or folder, or a file by save_graph")
    options.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--recipes", nargs="*", default=["fede", "fedr"])
    options.add_argument("--out", type=Path, default=None)
    chosen = options.parse_args()
    graph, device, results = load(chosen.graph), chosen.device, []
    settings = Settings.make({
        "scorer": {"name": "transe", "dim": 128}, "negatives": {"count": 256, "filtered": True},
        "training": {"batch": 512, "device": device}, "evaluation": {"every": 1, "sides": "tails", "patience": 1000},
    })  # fmt: skip
    row("", ["parties", "best s", "median", "goal", "floor", "training", "validation", "MB a round", "valid MRR"])
    for recipe in chosen.recipes:
        for parts in PARTS:
            parties = partition(graph, "triples", parts, seed=0)
            wanted = Federation(rounds=chosen.rounds + 1)
            together: Together = RECIPES[recipe](Setup(parties, settings, wanted, Transcript()))
            together.fit.prepare()
            stamps: list[float] = [now(device)]
            events: list[dict[str, Any]] = []

            def told(event: dict[str, Any], stamps: list[float] = stamps, events: list[Any] = events) -> None:
                if event["event"] == "validation":
                    stamps.append(now(device))
                events.append(event)

            together.run(told)
            # The first round makes the index of true answers, and may compile.
            seconds = [after - before for before, after in itertools.pairwise(stamps[1:])]
            rounds = [event for event in events if event["event"] == "round"][1:]
            checks = [event for event in events if event["event"] == "validation"][1:]
            triples = sum(len(party.train) for party in parties)
            rows_ = sum(len(party.entities) for party in parties)
            moved = 3 * 4 * 128 * (3 * 256 * triples + 7 * rows_ * max(len(p.train) for p in parties) / 512)
            found = {
                "what": recipe, "parties": parts, "best": min(seconds), "median": statistics.median(seconds),
                "all": seconds, "goal": GOAL[device] if (recipe, parts) == ("fede", 5) else None,
                "floor_s": floor(device, bytes_=moved),
                "training_s": statistics.median(event["seconds"] for event in rounds),
                "validation_s": statistics.median(event["seconds"] for event in checks),
                "bytes": statistics.median(r["given"] + r["sent"] + c["given"]
                                           for r, c in zip(rounds, checks, strict=True)),
                "mrr": checks[-1]["mrr"], "settings": settings.json(),
            }  # fmt: skip
            results.append(found)
            row(recipe, [parts, found["best"], found["median"], found["goal"], found["floor_s"], found["training_s"],
                         found["validation_s"], found["bytes"] / 1e6, found["mrr"]])  # fmt: skip
    write(chosen.out, device, results)


if __name__ == "__main__":
    main()
