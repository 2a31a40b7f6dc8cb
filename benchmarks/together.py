"""How long many take to learn together, by a virtual clock: on a ledger, in FKGE's pairs, in FedE's rounds.

    python benchmarks/together.py --data data --parts 10 --device cuda --out results

The same parties, scorer and step of training: a step takes a thousandth of a second at everybody, a message a hundredth
(`tacit.peers.meeting`). What is told is when the mean validation MRR of all was first above some numbers. Nothing is
private, and nobody lies: it is about time. On a ledger everybody trains all the time; a round of
FedE takes as long as the slowest does, and `--slow` makes one of them slower; a pair of FKGE is busy with each other.
"""

from __future__ import annotations

import argparse
import math
import shlex
import sys
import time
from pathlib import Path
from typing import Any

from robustness import an_identity, loaded

from tacit.reproduction import Results, commit

TABLE = "ledger-together"
TARGETS = (0.05, 0.08, 0.1, 0.12, 0.14, 0.15, 0.16)
Course = list[tuple[float, float]]
"""Virtual seconds, and the mean MRR then."""


def on_a_ledger(parties: Any, settings: Any, updates: int, speeds: dict[int, float]) -> Course:
    from statistics import mean

    from tacit.ledger.gathering import Gathering, MemoryLedger
    from tacit.ledger.provider import Provider, Shelf, Terms
    from tacit.ledger.record import Genesis, Model

    who = [an_identity(n, settings.seed) for n in range(len(parties))]
    ledger = MemoryLedger(who[0], Genesis("together", keys=tuple((each.name, each.public) for each in who)))
    entity, relation = settings.scorer.widths(settings.dim)
    ledger.open_model(who[0], Model(ledger.genesis, "model", entity, relation, parents=len(parties), committee=0,
                                    quorum=0, standing=0))  # fmt: skip
    shelf = Shelf(ledger, settings.training.device)
    terms = Terms(parents=len(parties), recent=3 * len(parties), updates=updates, epochs=settings.training.epochs,
                  gate="always", serve=False)  # fmt: skip
    providers = [Provider(ledger, "model", who[n], graph, settings, terms, number=n, shelf=shelf)
                 for n, graph in enumerate(parties)]  # fmt: skip
    latest, course = dict.fromkeys(range(len(parties)), 0.0), Course()

    def on_look(now: float, number: int, look: Any) -> None:
        if look.score is not None:
            latest[number] = look.score
            course.append((now, mean(latest.values())))
            shelf.forget(providers[0].branch.nodes[-4 * len(parties) :])

    Gathering(providers, speeds=speeds).run(on_look=on_look)
    return course


def in_rounds(parties: Any, settings: Any, rounds: int, speeds: dict[int, float]) -> Course:
    from tacit.federated import federate
    from tacit.peers.meeting import LATENCY, STEP

    epochs, batch = settings.training.epochs, settings.training.batch
    slowest = max(-(-len(graph.train) // batch) / speeds.get(n, 1.0) for n, graph in enumerate(parties))
    each, course = epochs * slowest * STEP + 2 * LATENCY, Course()

    def on_event(event: dict[str, Any]) -> None:
        if event["event"] == "validation":
            course.append((event["round"] * each, float(event["mrr"])))

    chosen = settings.json()
    chosen["evaluation"] |= {"every": 1, "patience": rounds}
    chosen["federation"] = {"rounds": rounds, "local_epochs": epochs}
    federate(parties, "fede", settings=chosen, on_event=on_event)
    return course


def in_pairs(parties: Any, settings: Any, trainings: int, speeds: dict[int, float]) -> Course:
    from statistics import mean

    from tacit.federation.transcript import Transcript
    from tacit.peers.learner import Pairing
    from tacit.peers.meeting import prepared

    pairing = Pairing(mode="published", retrain=settings.training.epochs, trainings=trainings, patience=trainings)
    meeting = prepared(parties, settings, pairing, alignment="links", transcript=Transcript(), public={}, speeds=speeds,
                       lost=lambda message: False)  # fmt: skip
    course: Course = []
    until = step = 1.0
    while not course or meeting._events:
        meeting.run(until)
        course.append((until, mean(peer.learner.score or 0.0 for peer in meeting.peers)))
        until += step
    return course


def reached(course: Course, mrr: float) -> float | None:
    """When it was first as good as that; None: never."""
    return next((seconds for seconds, found in course if found >= mrr), None)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--data", type=Path)
    options.add_argument("--dataset", default="fb15k-237")
    options.add_argument("--sample", type=float, default=1.0)
    options.add_argument("--parts", type=int, default=10)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--dim", type=int, default=64)
    options.add_argument("--negatives", type=int, default=64)
    options.add_argument("--batch", type=int, default=512)
    options.add_argument("--rate", type=float, default=0.005)
    options.add_argument("--epochs", type=int, default=3, help="of each update, round or training")
    options.add_argument("--rounds", type=int, default=40, help="updates of each, rounds, or trainings")
    options.add_argument("--slow", type=float, default=1.0, help="the speed of party 0")
    options.add_argument("--device", default="cuda")
    options.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS), help="which to run (again)")
    options.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options.add_argument("--table", action="store_true", help="print what is in --out as a table, and run nothing")
    chosen = options.parse_args()
    results = Results(chosen.out / f"{TABLE}.jsonl")
    if chosen.table:
        print(table(results))
        return
    from tacit.parties import partition
    from tacit.settings import Settings

    parties = partition(loaded(chosen.data, chosen.dataset, chosen.sample), "triples", chosen.parts, seed=chosen.seed)
    settings = Settings.make({
        "seed": chosen.seed, "scorer": {"name": "transe", "dim": chosen.dim},
        "negatives": {"count": chosen.negatives, "sides": "both"}, "optimizer": {"learning_rate": chosen.rate},
        "training": {"batch": chosen.batch, "epochs": chosen.epochs, "device": chosen.device},
    })  # fmt: skip
    for name in chosen.ways:
        began = time.perf_counter()
        course = WAYS[name](parties, settings, chosen.rounds, {0: chosen.slow})
        seconds = time.perf_counter() - began
        every = max(1, math.ceil(len(course) / 100))
        results.append({
            "table": TABLE, "dataset": chosen.dataset, "scorer": "transe", "setting": name, "parts": chosen.parts,
            "seed": chosen.seed, "slow": chosen.slow, "metrics": {"mrr": max(mrr for _, mrr in course)},
            "reached": {f"{mrr:g}": reached(course, mrr) for mrr in TARGETS}, "course": course[::every],
            "published": {}, "seconds": round(seconds, 2), "device": chosen.device, "commit": commit(),
            "command": "python benchmarks/together.py " + shlex.join(sys.argv[1:]),
        })  # fmt: skip
        print(f"{name}: {seconds:.0f} s", flush=True)
    print(table(results))


def table(results: Results) -> str:
    """Markdown: when each way first had an MRR, in virtual seconds; the latest line of each."""
    found = {(row["setting"], row["parts"], row["slow"]): row for row in results}
    lines = ["| | parties | speed of one | best MRR | " + " | ".join(f"{mrr:g} by" for mrr in TARGETS) + " |"]
    lines.append("|---" * (4 + len(TARGETS)) + "|")
    for (name, parts, slow), row in sorted(found.items(), key=lambda each: each[0][1:]):
        times = [reached(row["course"], mrr) for mrr in TARGETS]
        told = ["" if at is None else f"{at:.1f}" for at in times]
        lines.append(f"| {name} | {parts} | {slow:g} | {row['metrics']['mrr']:.4f} | " + " | ".join(told) + " |")
    return "\n".join(lines)


WAYS = {"ledger": on_a_ledger, "fede": in_rounds, "fkge": in_pairs}


if __name__ == "__main__":
    main()
