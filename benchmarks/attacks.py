"""How long a curious server takes to cluster all pairs of entities (SI), and what that needs.

    python benchmarks/attacks.py [--out benchmarks/results/attacks.json]   # as large as FB15k-237

Floor: each of n^2 pairs is compared with each of k centres in d numbers, 2 n^2 k d operations in a pass (26 T for
FB15k-237 and 128 numbers), and as many to add the pairs up; pairs are made on the way, and none is kept. On a CPU a
sample is clustered, and the error of the mean squared distance is told.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from resource import RUSAGE_SELF, getrusage

import torch
from measure import floor, now, row, write

from tacit.attacks.membership import ON_A_CPU, Concentrations
from tacit.draws import Purpose, Stream
from tacit.models import SCORERS


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--entities", type=int, default=14_541)
    options.add_argument("--relations", type=int, default=237)
    options.add_argument("--dim", type=int, default=128)
    options.add_argument("--rounds", type=int, default=10)
    options.add_argument("--pairs", type=int, help="cluster a sample of so many; default: all on a GPU")
    options.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options.add_argument("--out", type=Path)
    chosen = options.parse_args()
    device = "cuda" if chosen.device != "cpu" else "cpu"
    rows, passes = [], chosen.rounds + 1
    pairs = chosen.pairs or (chosen.entities**2 if device == "cuda" else ON_A_CPU)
    row("", ["pairs", "seconds", "floor", "GB", "distance", "its error"])
    for name in ("transe", "rotate"):
        scorer = SCORERS[name]()
        width = scorer.widths(chosen.dim)[0]
        draw = Stream(0, Purpose.INIT)
        entity = scorer.initial("entity", chosen.entities, width, chosen.dim, draw).to(chosen.device)
        began = now(device)
        made = Concentrations.of(entity, scorer, 2 * chosen.relations, pairs=pairs, rounds=chosen.rounds)
        seconds = now(device) - began
        least = floor(device, flops=4.0 * pairs * 2 * chosen.relations * made.centres.shape[1] * passes)
        memory = torch.cuda.max_memory_allocated() if device == "cuda" else 1024 * getrusage(RUSAGE_SELF).ru_maxrss
        row(name, [f"{pairs:,}", seconds, least, memory / 1e9, made.inertia, made.error])
        rows.append({"scorer": name, "entities": chosen.entities, "clusters": 2 * chosen.relations, "pairs": pairs,
                     "passes": passes, "seconds": seconds, "floor": least, "memory_gb": memory / 1e9,
                     "mean_squared_distance": made.inertia, "its_error": made.error})  # fmt: skip
    write(chosen.out, device, rows)


if __name__ == "__main__":
    main()
