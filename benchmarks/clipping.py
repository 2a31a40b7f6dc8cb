"""How fast a private step is: gradients clipped example by example, secret noise on every row, Adam.

    python benchmarks/clipping.py --graph FB15K-237 [--device cuda] [--peer-steps 20]

TransE, dim 128, 256 negatives. The noise is ChaCha20's, keyed by the operating system. The floor: the bytes of reading
rows three times and adding to them once, and of Adam's seven passes over both tables. --peer-steps times Opacus, both
with gradients per example and with ghost clipping (whose noise is not secret), beside it.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import torch
from measure import floor, load, row, timed, write
from peers import opacus_step

from tacit.cohort import SecretNoise
from tacit.draws import Secret
from tacit.kernels import Clipped
from tacit.settings import Settings
from tacit.training import Fit

ROWS: list[tuple[str, int, str, bool, bool, float | None]] = [
    ("64 x 256 own negatives, plain", 64, "independent", False, False, None),
    ("64 x 256 own negatives, clip + noise", 64, "independent", True, True, 0.06e-3),
    ("64 x pool of 256, plain", 64, "pool", False, False, None),
    ("64 x pool of 256, clip + noise", 64, "pool", True, True, 0.06e-3),
    ("16,384 x pool of 256, plain", 16384, "pool", False, False, None),
    ("16,384 x pool of 256, clipped", 16384, "pool", True, False, None),
    ("16,384 x pool of 256, clip + noise", 16384, "pool", True, True, None),
]
"""Label, batch, negatives, clipped, noise, and the seconds that an H200 was to reach."""


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--graph", required=True, help="a dataset by name or folder, or a file by save_graph")
    options.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options.add_argument("--repeat", type=int, default=4)
    options.add_argument("--peer-steps", type=int, default=0)
    options.add_argument("--out", type=Path, default=None)
    chosen = options.parse_args()
    graph, device, results = load(chosen.graph), chosen.device, []
    row("", ["ms/step", "median", "goal (H200)", "floor", "of plain"])
    plain = 1.0
    for label, batch, kind, clipped, noisy, goal in ROWS:
        settings = Settings.make({
            "scorer": {"dim": 128}, "training": {"batch": batch},
            "negatives": {"name": kind, "count": 256, "scope": "vocabulary"}})  # fmt: skip
        fit = Fit(settings, [graph], device=device)
        fit.prepare()
        if clipped:
            rule = Clipped(torch.ones(1, device=device))
            noise = SecretNoise(Secret.fresh(), torch.ones(1, device=device)) if noisy else None
            fit.epochs = type(fit.epochs)(
                fit.cohort, fit.examples, fit.kernel, rule=rule, noise=noise, divisor=float(batch)
            )
        steps = min(int(fit.examples.steps_per_epoch()[0]), 400 if device == "cpu" else 1 << 31)
        limit = torch.tensor([0], device=device)
        everyone = torch.ones(1, dtype=torch.bool, device=device)

        def some(fit: Fit = fit, steps: int = steps, limit: Any = limit, everyone: Any = everyone) -> None:
            fit.epochs.run(everyone, limit.copy_(fit.cohort.steps + steps))

        some()
        seconds = [took / steps for took in timed(some, device, chosen.repeat)]
        entity = fit.cohort.tables.entity
        rows = batch * 256 * entity.shape[1] * 4 * (4 if clipped else 3) if kind == "independent" else 0
        plain = statistics.median(seconds) if not clipped else plain
        found: dict[str, Any] = {
            "what": label, "best": min(seconds), "median": statistics.median(seconds), "goal_h200": goal,
            "floor_s": floor(device, bytes_=rows + 7 * 4 * entity.numel(), flops=6.0 * batch * 256 * 128),
            "of_plain": statistics.median(seconds) / plain, "steps": steps, "settings": settings.json(),
        }  # fmt: skip
        results.append(found)
        shown = [found[name] and 1e3 * found[name] for name in ("best", "median", "goal_h200", "floor_s")]
        row(label, [*shown, found["of_plain"]])
        write(chosen.out, device, results)
    ours = next(found["median"] for found in results if "64 x 256 own negatives, clip" in found["what"])
    for mode in ("flat", "ghost") if chosen.peer_steps else ():
        peer = opacus_step(len(graph.entities), len(graph.relations), dim=128, batch=64, negatives=256, mode=mode,
                           steps=chosen.peer_steps, device=device)  # fmt: skip
        results.append({"what": f"Opacus, {mode}", "peer": peer, "times_faster": peer["seconds_per_step"] / ours})
        row(f"Opacus, {mode}, 64 x 256", [1e3 * peer["seconds_per_step"], None, None, None, "x" + str(
            round(results[-1]["times_faster"], 1))])  # fmt: skip
        write(chosen.out, device, results)


if __name__ == "__main__":
    main()
