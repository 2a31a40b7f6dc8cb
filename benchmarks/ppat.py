"""Time of a handshake by how many entities are aligned, and the bytes of a batch.

    python benchmarks/ppat.py --out benchmarks/results/ppat-cpu.json [--device cpu] [--plot docs/images/ppat.svg]

Two peers in one process, both sides' work and every message looked at: from an offer to all rows, translated. Rows are
random, which changes no time. On a CPU seconds are those of the processor, whatever else the machine has to do: use one
thread (OMP_NUM_THREADS=1). FKGE says 0.845 megabits for a batch of 32 rows of 100 numbers, both ways.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
from measure import now, row, write

from tacit.federation.messages import Message
from tacit.federation.transcript import Transcript
from tacit.graph import Graph
from tacit.peers import PPAT, Learner, Pairing, Peer
from tacit.peers.alignment import Aligned
from tacit.peers.ppat import batches
from tacit.reporting.drawing import COLOURS, Panel, standalone, ticks
from tacit.settings import Settings

PAPER_MEGABITS = 0.845
EPOCHS = 2


def clock(device: str) -> float:
    """Seconds of the processor, or by the clock once a GPU has done all that it was given."""
    return time.process_time() if device == "cpu" else now(device)


def ring(size: int) -> Graph:
    """As many triples as entities."""
    return Graph.from_triples([(f"e{n:07d}", "next", f"e{(n + 1) % size:07d}") for n in range(size)])


def handshake(graph: Graph, judge: str, dim: int, device: str) -> tuple[float, Transcript]:
    """Seconds of one, and what was said."""
    private = {"negatives": {"name": "pool", "scope": "vocabulary", "count": 16}}
    private |= {"privacy": {"name": "dpsgd", "sigma": 1.0, "noise": "seeded"}}
    settings = Settings.make({"scorer": {"name": "transe", "dim": dim}, "training": {"device": device, "epochs": 1}}
                             | (private if judge == "direct" else {}))  # fmt: skip
    pairing = Pairing(mode="sound" if judge == "direct" else "published", ppat=PPAT(epochs=EPOCHS), trainings=1,
                      retrain=1, validation="none", noise="seeded")  # fmt: skip
    aligned = Aligned(np.arange(len(graph.entities), dtype=np.int32), np.zeros(0, np.int32))
    peers = [Peer(Learner(n, graph, settings, {1 - n: aligned}, pairing)) for n in (0, 1)]
    for peer in peers:
        peer.learner.best = peer.learner.fit.cohort.tables
    record = Transcript()
    began = clock(device)
    said = deque([Message("offer", 0, 0, 1, 0, {}, {})])
    while said:
        message = said.popleft()
        record.record(message)
        said += peers[message.receiver].receive(message, 0.0)
        if message.kind == "translated":
            break
    else:
        raise RuntimeError("the handshake did not come to its end")
    return clock(device) - began, record


def drawn(rows: list[dict[str, Any]]) -> str:
    """Seconds by aligned entities: a straight line through zero is linear growth."""
    most = max(found["aligned"] for found in rows)
    high = 1.05 * max(found["seconds"] for found in rows)
    panel = Panel(70, 20, 550, 310, (0.0, most), (0.0, high))
    panel.grid([(x, f"{x:,.0f}") for x in ticks(0, most)], [(y, f"{y:g} s") for y in ticks(0, high)])
    panel.text("aligned entities", 275, 350, anchor="middle")
    for number, judge in enumerate(sorted({found["judge"] for found in rows})):
        panel.series([(f["aligned"], f["seconds"]) for f in rows if f["judge"] == judge], COLOURS[number])
        panel.key(judge, 15, 20 + 20 * number, COLOURS[number])
    return standalone(640, 400, f"Seconds of a handshake of {EPOCHS} epochs by aligned entities", [panel])


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--device", default="cpu")
    options.add_argument("--dim", type=int, default=100)
    options.add_argument("--sizes", type=int, nargs="*", default=[2000, 4000, 8000, 16000, 32000])
    options.add_argument("--repeat", type=int, default=3)
    options.add_argument("--out", type=Path)
    options.add_argument("--plot", type=Path, help="draw it, too, into this SVG")
    chosen = options.parse_args()
    rows: list[dict[str, Any]] = []
    row("", ["aligned", "seconds", "ms/batch", "us/entity", "Mb/batch"])
    for size in chosen.sizes:
        graph = ring(size)
        for judge in ("voted", "direct"):
            took = [handshake(graph, judge, chosen.dim, chosen.device) for _ in range(chosen.repeat)]
            seconds, record = statistics.median(each for each, _ in took), took[0][1]
            sizes = [each.size for each in record.records if each.kind in ("generated", "gradient")]
            many = len(batches(size, EPOCHS, 32, 0))
            found = {"judge": judge, "aligned": size, "epochs": EPOCHS, "batches": many, "seconds": seconds,
                     "ms_per_batch": 1e3 * seconds / many, "us_per_entity": 1e6 * seconds / EPOCHS / size,
                     "megabits_per_batch": 8e-6 * (sizes[0] + sizes[1]), "paper_megabits": PAPER_MEGABITS}  # fmt: skip
            rows.append(found)
            row(judge, [size, seconds, found["ms_per_batch"], found["us_per_entity"], found["megabits_per_batch"]])
    write(chosen.out, chosen.device, rows, benchmark="ppat", dim=chosen.dim, batch=32)
    if chosen.plot:
        chosen.plot.write_text(drawn(rows))


if __name__ == "__main__":
    main()
