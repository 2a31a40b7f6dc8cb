"""What a round costs in one process and over NATS: seconds and bytes, side by side in one run.

    python benchmarks/network.py [--rounds 10] [--dim 128] [--clinic demo] [--out FILE]

Loopback, real processes, TLS. The same federation everywhere: the embedded clinic, FedE, and FedR under secure sums.
Over Flower, whose rounds are mostly waiting: `pytest -s -m 'slow or full' tests/test_flower.py -k by_flower`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from measure import row, write

from tacit.clinic import clinic
from tacit.federated import federate
from tacit.federation.keys import Identity, Roster
from tacit.files import write_graph
from tacit.parties import Parties
from tacit.settings import combine

SETTINGS: dict[str, Any] = {"negatives": {"count": 32}, "training": {"batch": 64, "device": "cpu"},
                            "evaluation": {"every": 1000}}  # fmt: skip
WAYS = {"fede": ("fede", {}), "fedr, secure": ("fedr", {"secure": True})}


def in_process(parties: Parties, recipe: str, settings: dict[str, Any]) -> dict[str, float]:
    """Median seconds of a round, and bytes of one."""
    events: list[dict[str, Any]] = []
    run = federate(parties, recipe, settings=settings, on_event=events.append)
    rounds = [event["seconds"] for event in events if event["event"] == "round"]
    return {"seconds": statistics.median(rounds[1:]), "bytes": run.communication()["bytes"] / len(rounds)}


def over_nats(parties: Parties, recipe: str, settings: dict[str, Any], root: Path) -> dict[str, float]:
    """The same, of processes; bytes as they went to the broker and came from it."""
    keeper, roster = Identity.new("keeper"), None
    for name in ("coordinator", *parties.names):
        (root / name).mkdir(parents=True)
        identity = Identity.new(name)
        identity.save(root / name / "own.key")
        roster = (roster or Roster.begin(keeper)).enrol(keeper, name, identity.public)
    assert roster is not None
    roster.save(root / "roster.json")
    plan = [f'name = "bench"\nrecipe = "{recipe}"\nparties = {json.dumps(list(parties.names))}']
    plan += [f"[{section}]\n" + "\n".join(f"{key} = {json.dumps(value)}" for key, value in values.items())
             for section, values in settings.items()]  # fmt: skip
    (root / "plan.toml").write_text("\n".join(plan) + "\n")
    port = 4400 + os.getpid() % 500

    def start(name: str, *words: str) -> subprocess.Popen[bytes]:
        with open(root / name / "said", "wb") as said, open(root / name / "errors", "wb") as errors:
            return subprocess.Popen(
                [sys.executable, "-m", "tacit", *words, "--key", "own.key", "--roster", "../roster.json", "--json",
                 "--out", "run"],
                cwd=root / name, stdout=said, stderr=errors, env={**os.environ, "OMP_NUM_THREADS": "1"},
            )  # fmt: skip

    running = [start("coordinator", "serve", "../plan.toml", "--listen", f"127.0.0.1:{port}", "--broker-folder", "b")]
    while not (root / "coordinator" / "b" / "ca.pem").exists():
        time.sleep(0.1)
    for name, graph in zip(parties.names, parties, strict=True):
        write_graph(graph, root / name / "graph")
        running.append(start(name, "join", "../plan.toml", "graph", "--broker", f"tls://127.0.0.1:{port}", "--ca",
                             "../coordinator/b/ca.pem"))  # fmt: skip
    if any(process.wait(600) for process in running):
        raise SystemExit((root / "coordinator" / "errors").read_text()[-2000:])
    lines = (root / "coordinator" / "errors").read_text().splitlines()
    events = [json.loads(line) for line in lines if line.startswith("{")]
    rounds = [event["seconds"] for event in events if event["event"] == "round"]
    told = json.loads((root / "coordinator" / "said").read_text().splitlines()[-1])["bytes"]
    return {"seconds": statistics.median(rounds[1:]), "bytes": (told["sent"] + told["received"]) / len(rounds)}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=10)
    options.add_argument("--dim", type=int, default=128)
    options.add_argument("--clinic", choices=["small", "demo"], default="demo")
    options.add_argument("--out", type=Path, default=None)
    wanted = options.parse_args()
    parties = clinic(wanted.clinic)
    results: list[dict[str, Any]] = []
    row("", ["ms a round", "MB a round"])
    for label, (recipe, more) in WAYS.items():
        federation = {"rounds": wanted.rounds, "local_epochs": 1} | more
        settings = combine(SETTINGS, {"scorer": {"dim": wanted.dim}, "federation": federation})
        with tempfile.TemporaryDirectory() as folder:
            ways = {"in process": in_process(parties, recipe, settings),
                    "nats": over_nats(parties, recipe, settings, Path(folder))}  # fmt: skip
        for way, found in ways.items():
            row(f"{label}, {way}", [1000 * found["seconds"], found["bytes"] / 1e6])
            results.append({"what": label, "way": way, **found})
    write(wanted.out, "cpu", results, rounds=wanted.rounds, dim=wanted.dim, parties=len(parties))


if __name__ == "__main__":
    main()
