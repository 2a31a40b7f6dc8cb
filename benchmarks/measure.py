"""What the benchmarks have in common: the clock, the graph, the environment, the table and the file of results."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PEAKS = {"cuda": {"bytes": 4.8e12, "flops": 6.7e13}, "cpu": {"bytes": 4e10, "flops": 1.5e11}}
"""Bytes and float32 operations per second that the floors count with: an H200's data sheet; two cores of a server."""


def load(name: str) -> Any:
    """A graph: a dataset's folder or name, or a file by tacit.tensors.save_graph for a machine with torch alone."""
    path = Path(name)
    if path.is_dir():
        from tacit.files import read_graph

        return read_graph(path)
    if path.is_file():
        from tacit.tensors import load_graph

        return load_graph(path)
    from tacit import datasets

    return datasets.load(name)


def now(device: str) -> float:
    """Seconds, once the device has done all that it was given."""
    if device == "cuda":
        import torch

        torch.cuda.synchronize()
    return time.perf_counter()


def timed(work: Callable[[], Any], device: str, repeat: int) -> list[float]:
    """Seconds of each repetition."""
    seconds = []
    for _ in range(repeat):
        began = now(device)
        work()
        seconds.append(now(device) - began)
    return seconds


def floor(device: str, *, bytes_: float = 0.0, flops: float = 0.0) -> float:
    """Seconds that moving so many bytes, or doing so many operations, takes at the least."""
    return max(bytes_ / PEAKS[device]["bytes"], flops / PEAKS[device]["flops"])


def environment(device: str = "cpu") -> dict[str, Any]:
    """Versions, machine, threads, commit and command."""
    from tacit.reproduction import commit, processor

    versions = {}
    for package in (
        "numpy",
        "torch",
        "numba",
        "triton",
        "pykeen",
        "opacus",
        "pandas",
        "pyarrow",
        "duckdb",
        "web3",
        "libp2p",
    ):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    words = sys.argv[1:]
    if "--out" in words:  # where the results went is of no interest
        at = words.index("--out")
        words = words[:at] + words[at + 2 :]
    found = {
        "python": platform.python_version(),
        "system": platform.platform(terse=True),
        "processor": processor(),
        "cores": os.cpu_count(),
        "versions": versions,
        "commit": commit(),
        "command": "python " + shlex.join([os.path.relpath(sys.argv[0]), *words]),
    }
    if "torch" in versions:
        import torch

        found["threads"] = torch.get_num_threads()
        if device == "cuda":
            found["device"] = torch.cuda.get_device_name()
    return found


def row(label: str, numbers: Sequence[float | str | None], width: int = 12) -> None:
    """A line of a table, at once."""
    cells = ("" if n is None else n if isinstance(n, str) else f"{n:.4g}" for n in numbers)
    print(f"{label:38}" + "".join(f"{cell:>{width}}" for cell in cells), flush=True)


def write(path: Path | None, device: str, rows: list[dict[str, Any]], **about: Any) -> None:
    """Keep the results, if a file is given."""
    if path is not None:
        whole = {"schema": "tacit.benchmark/1", "environment": environment(device), **about, "rows": rows}
        path.write_text(json.dumps(whole, indent=2) + "\n")
