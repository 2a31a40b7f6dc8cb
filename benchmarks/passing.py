"""How often DP-FLames' test passes on real batches, as printed: the chance of each step, exactly.

    python benchmarks/passing.py --graph FB15K-237 [--out benchmarks/results/passing.json]

Three parties by entities, TransE, dim 128, in the paper's settings. In each step the gaps are those of real gradients,
the chance of every k follows from its gap (the largest of values with Gumbel noise), and so does the chance that the
test passes it. Rows are trained as if every test passed, so that gradients are those of a training that learns.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import load, row, write

from tacit.parties import partition
from tacit.privacy.privatizers import DPFLames
from tacit.privacy.published_steps import FLamesSteps
from tacit.privacy.selection import Selection
from tacit.settings import Settings
from tacit.training import Fit

Tensor = Any


class Watched(FLamesSteps):
    """Notes the sorted norms of every step."""

    tops: list[Tensor]

    def _select(self, touched: Tensor, there: Tensor, active: Tensor) -> None:
        norms = torch.linalg.vector_norm(self.cohort.gradients.tables.entity, dim=1)
        parts = norms.split(self.layout.entities)
        self.tops.append(torch.stack([part.topk(self.last + 1)[0].double() for part in parts]))
        super()._select(touched, there, active)


def chances(tops: Tensor, first: int, selection: Selection) -> np.ndarray:
    """Of each row of sorted norms, how likely its step is to release anything."""
    gaps = (tops[:, :-1] - tops[:, 1:])[:, first - 1 :]
    passing = torch.tensor([[selection.passes(float(gap)) for gap in line] for line in gaps])
    found: np.ndarray = (selection.chances(gaps) * passing).sum(1).numpy()
    return found


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--graph", required=True)
    options.add_argument("--batches", type=int, nargs="+", default=[64, 512])
    options.add_argument("--steps", type=int, default=50)
    options.add_argument("--delta-t", type=float, nargs="+", default=[1e-5, 1e-8, 1e-10])
    options.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options.add_argument("--out", type=Path)
    chosen = options.parse_args()
    parties, rows = partition(load(chosen.graph), "entities", 3, seed=0), []
    row("", ["steps", "largest gap", "mean chance", "largest", "bound"])
    for batch in chosen.batches:
        settings = Settings.make({
            "scorer": {"name": "transe", "dim": 128}, "negatives": {"count": 256},
            "optimizer": {"learning_rate": 0.001}, "training": {"batch": batch, "device": chosen.device},
            "privacy": {"name": "dp-flames", "mode": "published", "test": False},
        })  # fmt: skip
        fit = Fit(settings, list(parties))
        assert isinstance(settings.privacy, DPFLames)
        steps = Watched(settings.privacy, fit.cohort, fit.examples, fit.kernel, fit.graphs)
        steps.tops = []
        steps.shuffle()
        steps.wanted[:] = True
        for _ in range(chosen.steps):
            steps.step()
        tops = torch.cat([top.cpu() for top in steps.tops])
        gaps = (tops[:, :-1] - tops[:, 1:])[:, steps.first - 1 :]
        for delta_t in chosen.delta_t:
            selection = replace(steps.selection, delta_t=delta_t, tests=True)
            found = chances(tops, steps.first, selection)
            largest = float(gaps.max()) / selection.row_clip
            row(f"B {batch}, delta_t {delta_t:g}", [len(tops), largest, found.mean(), found.max(),
                                                   selection.most_passes()])  # fmt: skip
            rows.append({"batch": batch, "delta_t": delta_t, "steps": len(tops), "largest_gap_over_c2": largest,
                         "mean_chance": float(found.mean()), "largest_chance": float(found.max()),
                         "bound": selection.most_passes()})  # fmt: skip
    write(chosen.out, chosen.device, rows)


if __name__ == "__main__":
    main()
