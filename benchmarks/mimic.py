"""DPKGE on the MIMIC-III demo, from PostgreSQL to figures: confidential clinical statements at epsilon 4.

    python benchmarks/mimic.py --data DATASETS [--epsilon 4] [--seeds 0 1 2] [--ways dpkge ...] [--out FILE]

The demo's tables go into a PostgreSQL server of this script's own, come out by the mapping `mimic-iii`, which marks
what is said of patients and stays as confidential, and are trained on five ways, with the same settings:

    ndp       no privacy, all statements
    u-only    no privacy, unrestricted statements alone: what needs no protection
    dpkge     confidential statements by private steps, unrestricted ones by plain ones
    dpkge-2   the same, with an optimizer for either kind of steps
    full-dp   every statement by private steps

In the private ones noisy degrees decide which rows move in private steps. Plain steps are six for each private one,
about as many as there are unrestricted statements for a confidential one in such data. A line for each run: test MRR
(both sides, filtered) of all, of confidential and of unrestricted statements.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import csv

from tacit.evaluation import rank
from tacit.files.lines import reading
from tacit.graph import Graph, Split
from tacit.reproduction import Results, commit, device_name
from tacit.run import train
from tacit.sources import import_graph
from tacit.sources.mapping import read_mapping

WHOLE_NUMBERS = {"subject_id", "hadm_id", "icustay_id", "itemid", "cgid", "row_id"}
SETTINGS: dict[str, Any] = {
    "scorer": {"name": "complex", "dim": 32}, "loss": {"name": "softmax"},
    "negatives": {"name": "pool", "count": 256, "sides": "random", "scope": "vocabulary"},
    "optimizer": {"learning_rate": 0.01}, "training": {"batch": 1024, "epochs": 20}, "evaluation": {"every": 20},
}  # fmt: skip


def server() -> Any:
    """A PostgreSQL server on loopback, as the tests have one."""
    where = Path(__file__).parent.parent / "tests" / "postgresql.py"
    spec = importlib.util.spec_from_file_location("postgresql", where)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Server()


def fill(running: Any, folder: Path) -> int:
    """Put the demo's tables into the server; how many."""
    options = csv.ConvertOptions(null_values=[""], strings_can_be_null=True, quoted_strings_can_be_null=True)
    files = sorted(folder.glob("*.csv.xz"))
    with running.connect() as connection, connection.cursor() as cursor:
        for path in files:
            with reading(path) as file:
                data = file.read()
            names = data[: data.index(b"\n")].decode().split(",")
            options.column_types = {n: pa.int64() if n in WHOLE_NUMBERS else pa.string() for n in names}
            table = csv.read_csv(pa.BufferReader(data), convert_options=options,
                                 parse_options=csv.ParseOptions(newlines_in_values=True))  # fmt: skip
            cursor.adbc_ingest(path.name.split(".")[0].lower(), table, mode="create")
        connection.commit()
    return len(files)


def imported(folder: Path) -> Graph:
    """The demo by way of the server."""
    running = server()
    try:
        print(f"{fill(running, folder)} tables in PostgreSQL", flush=True)
        os.environ.update(running.environment)
        return import_graph(read_mapping("mimic-iii"), "postgresql").graph
    finally:
        running.close()


def trained_on(graph: Graph, setting: str) -> Graph:
    """What a setting trains on, over the same names."""
    marks = graph.train.confidential
    assert marks is not None
    if setting == "u-only":
        return replace(graph, train=Split(graph.train.triples[~marks], marks[~marks]))
    return graph


def measured(model: Any, graph: Graph) -> dict[str, dict[str, Any]]:
    """Test metrics of all statements, of the confidential and of the unrestricted ones."""
    marks = graph.test.confidential
    assert marks is not None
    parts = {"all": np.ones(len(marks), bool), "confidential": marks, "unrestricted": ~marks}
    known = graph.statements.triples
    return {name: rank(model, graph.test.triples[which], known).metrics().json() for name, which in parts.items()}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--data", type=Path, required=True, help="the folder that holds mimic-iii-demo")
    options.add_argument("--epsilon", type=float, default=4.0)
    options.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    options.add_argument("--ways", nargs="*", help="some of them; default: all")
    options.add_argument("--out", type=Path, default=None)
    chosen = options.parse_args()
    graph = imported(chosen.data / "mimic-iii-demo")
    private = {"epsilon": chosen.epsilon, "delta": 1e-5, "noise": "seeded"}
    ways: dict[str, dict[str, Any]] = {
        "ndp": {},
        "u-only": {},
        "dpkge": private | {"name": "confidential", "public_ratio": 6.0, "degree_share": 0.05},
        "dpkge-2": private | {"name": "confidential", "public_ratio": 6.0, "degree_share": 0.05, "optimizers": 2},
        "full-dp": private | {"name": "frozen", "degree_share": 0.05},
    }
    print(f"{'':10} {'seed':>4} {'epsilon':>8} {'all':>8} {'confid.':>8} {'unrestr.':>8} {'s':>6}")
    for seed in chosen.seeds:
        for setting, privacy in ways.items():
            if chosen.ways and setting not in chosen.ways:
                continue
            began = time.perf_counter()
            settings = SETTINGS | {"seed": seed} | ({"privacy": privacy} if privacy else {})
            run = train(trained_on(graph, setting), settings=settings)
            found, seconds = measured(run.model, graph), time.perf_counter() - began
            spent = run.claim.get("simulated_epsilon")
            shown = [f"{found[part]['mrr']:8.4f}" for part in found]
            print(f"{setting:10} {seed:4} {spent or float('nan'):8.3f} {' '.join(shown)} {seconds:6.1f}", flush=True)
            if chosen.out is not None:
                command = f"python benchmarks/mimic.py --epsilon {chosen.epsilon:g} --seeds {seed}"
                Results(chosen.out).append({
                    "table": "mimic", "dataset": "mimic-iii-demo", "scorer": "complex", "setting": setting, "parts": 1,
                    "seed": seed, "metrics": found["all"], "confidential": found["confidential"],
                    "unrestricted": found["unrestricted"], "epsilon": spent, "delta": 1e-5, "simulated": bool(privacy),
                    "published": {}, "seconds": round(seconds, 1), "device": device_name("cpu"), "commit": commit(),
                    "command": command, "settings": json.loads(json.dumps(run.settings.json())),
                })  # fmt: skip


if __name__ == "__main__":
    main()
