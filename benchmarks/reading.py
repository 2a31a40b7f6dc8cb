"""How fast, and in how much memory, one million triples with string names are read.

    make bench                                  (or: python benchmarks/reading.py --triples 1000000)

Side by side in one run, each measurement in a process of its own, rounds interleaved, the best time and the largest
peak of all rounds reported:

    floor       the bytes of the file read (and decompressed) and nothing else
    tacit       read_graph: checked, numbered, sorted, without repeats, ready to train on
    pandas      read_csv and factorize: numbered; its strings kept as `pip install pandas` alone would
    +arrow      the same with strings kept by pyarrow, and read by several threads, as it is where pyarrow is installed
    PyKEEN      TriplesFactory.from_path: numbered, sorted names, without repeats

Peak memory is the process's resident set at its largest, and the same less what it was after the imports.
"""

from __future__ import annotations

import argparse
import json
import lzma
import subprocess
import sys
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from measure import environment

RESULTS = Path(__file__).parent / "results" / "reading.json"
TOOLS = ("floor", "tacit", "pandas", "pandas+arrow", "pykeen")


def write_triples(path: Path, count: int, entities: int = 100_000, relations: int = 500) -> None:
    """Triples with long names; heads are skewed, as in most graphs."""
    import numpy as np

    from tacit.draws import Purpose, Stream

    stream = Stream(1, Purpose.DATASET)
    heads = (entities * stream.uniform(count) ** 3).astype(np.int64).tolist()
    middle = stream.at(step=1).integers(count, relations).tolist()
    tails = stream.at(step=2).integers(count, entities).tolist()
    with open(path, "w", encoding="utf-8") as file:
        file.writelines(
            f"http://example.org/entity/{h}\thttp://example.org/relation/{r}\thttp://example.org/entity/{t}\n"
            for h, r, t in zip(heads, middle, tails, strict=True)
        )
    path.with_name(path.name + ".xz").write_bytes(lzma.compress(path.read_bytes(), preset=1))


def peak_mib() -> float:
    """The largest resident set of this process so far; unlike getrusage's, not inherited from the parent."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) / 1024


def measure(tool: str, path: str) -> dict[str, Any]:
    """One reading by one tool, in this process."""
    if tool == "floor":

        def read() -> tuple[int, ...]:
            size = 0
            with lzma.open(path) if path.endswith(".xz") else open(path, "rb", buffering=0) as file:
                while chunk := file.read(1 << 20):
                    size += len(chunk)
            return (size,)

    elif tool == "tacit":
        from tacit import read_graph

        def read() -> tuple[int, ...]:
            graph = read_graph(path)
            return len(graph.entities), len(graph.relations), len(graph.train)

    elif tool.startswith("pandas"):
        import pandas as pd

        pd.options.mode.string_storage = "pyarrow" if tool == "pandas+arrow" else "python"

        def read() -> tuple[int, ...]:
            table = pd.read_csv(path, sep="\t", header=None, names=["head", "relation", "tail"], keep_default_na=False)
            _, entities = pd.factorize(pd.concat([table["head"], table["tail"]]))
            _, relations = pd.factorize(table["relation"])
            return len(entities), len(relations), len(table)

    else:
        from pykeen.triples import TriplesFactory

        def read() -> tuple[int, ...]:
            factory = TriplesFactory.from_path(path)
            return factory.num_entities, factory.num_relations, factory.num_triples

    before, start = peak_mib(), time.perf_counter()
    found = read()
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "peak_mib": peak_mib(), "grown_mib": peak_mib() - before, "found": found}


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--triples", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--child", nargs=2, metavar=("TOOL", "FILE"))
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure(*options.child)))
        return
    tools = [tool for tool in TOOLS if tool in ("floor", "tacit") or installed(tool.removesuffix("+arrow"))]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / "triples.tsv"
        write_triples(plain, options.triples)
        files = [plain, plain.with_name(plain.name + ".xz")]
        runs: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for _ in range(options.rounds):
            for file in files:
                for tool in tools:
                    command = [sys.executable, __file__, "--child", tool, str(file)]
                    done = subprocess.run(command, capture_output=True, text=True, check=True)
                    runs.setdefault((file.name, tool), []).append(json.loads(done.stdout.splitlines()[-1]))
        print(f"{'file':<16}{'reader':<14}{'seconds':>9}{'median':>9}{'peak MiB':>10}{'grown MiB':>11}   found")
        for (name, tool), found in runs.items():
            seconds = sorted(run["seconds"] for run in found)
            row = {
                "file": name,
                "reader": tool,
                "seconds": round(seconds[0], 4),
                "median_seconds": round(seconds[len(seconds) // 2], 4),
                "peak_mib": round(max(run["peak_mib"] for run in found), 1),
                "grown_mib": round(max(run["grown_mib"] for run in found), 1),
                "found": found[0]["found"],
            }
            rows.append(row)
            print(
                f"{name:<16}{tool:<14}{row['seconds']:>9.3f}{row['median_seconds']:>9.3f}{row['peak_mib']:>10.0f}"
                f"{row['grown_mib']:>11.0f}   {', '.join(f'{n:,}' for n in row['found'])}"
            )
        bytes_read = {file.name: file.stat().st_size for file in files}
    result = {
        "schema": "tacit.benchmark/1",
        "benchmark": "reading",
        "triples": options.triples,
        "rounds": options.rounds,
        "bytes": bytes_read,
        "rows": rows,
        "environment": environment(),
    }
    RESULTS.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
