"""How fast, and in how much memory, ten million rows of a Parquet file become a graph.

    make bench                                  (or: python benchmarks/importing.py --rows 10000000)

The rows are visits: a patient, a drug and a note each, with names made by templates. Each line is a process of its own;
memory is that process's resident set at its largest. The floor is the graph itself: 12 bytes a triple, and the names.
The first two lines make the same graph from tables of different length: memory that grew with the table and not with
the graph would show between them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from measure import environment

RESULTS = Path(__file__).parent / "results" / "importing.json"
MAPPING = """
schema = "tacit.mapping/1"
[split]
valid = 0.1
test = 0.1
[[statements]]
query = "SELECT patient, drug FROM visits"
head = "patient: {patient}"
relation = "takes"
tail = "drug: {drug}"
confidential = true
"""


def write_visits(path: Path, rows: int, distinct: int) -> None:
    """Rows of (patient, drug, note), of which `distinct` differ; the note is ballast that no template uses."""
    import duckdb

    duckdb.sql(
        f"COPY (SELECT (i % {distinct}) // 20 AS patient, (hash(i % {distinct}) % 5000)::BIGINT AS drug, "
        f"repeat('note ' || i, 4) AS note FROM range({rows}) t(i)) TO '{path}' (FORMAT parquet)"
    )


def peak_mib() -> float:
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) / 1024


def measure(folder: str) -> dict[str, Any]:
    from tacit.sources import import_graph, read_mapping

    before, start = peak_mib(), time.perf_counter()
    made = import_graph(read_mapping(Path(folder) / "mapping.toml"), folder)
    seconds = time.perf_counter() - start
    graph, rows = made.graph, made.entries[0].rows
    floor = len(graph.statements) * 12 + sum(len(name) for name in graph.entities)
    return {
        "rows": rows,
        "triples": len(graph.statements),
        "entities": len(graph.entities),
        "seconds": round(seconds, 2),
        "rows_per_second": round(rows / seconds),
        "peak_mib": round(peak_mib(), 1),
        "grown_mib": round(peak_mib() - before, 1),
        "floor_mib": round(floor / 2**20, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--child", metavar="FOLDER")
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure(options.child)))
        return
    found = []
    titles = ("rows", "triples", "entities", "seconds", "rows/s", "peak MiB", "grown MiB", "floor")
    print("".join(f"{title:>12}" for title in titles))
    tenth = options.rows // 10
    for rows, distinct in ((tenth, tenth), (options.rows, tenth), (options.rows, options.rows)):
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "mapping.toml").write_text(MAPPING)
            write_visits(Path(folder) / "visits.parquet", rows, distinct)
            command = [sys.executable, __file__, "--child", folder]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
        found.append(json.loads(done.stdout.splitlines()[-1]))
        print("".join(f"{value:>12,}" for value in found[-1].values()))
    result = {
        "schema": "tacit.benchmark/1",
        "benchmark": "importing",
        "rows": found,
        "environment": environment(),
    }
    RESULTS.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
