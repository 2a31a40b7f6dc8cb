"""Figures that others published, of the cells here, as one file for `tacit report`: python benchmarks/published.py"""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

from tacit.reproduction import read_cells

HERE = Path(__file__).parent
TARGET = HERE.parent / "src" / "tacit" / "reporting" / "published.json"


def figures() -> list[dict[str, Any]]:
    """Link prediction on one graph, and FedR's Table 2."""
    found = [
        {"paper": paper, "dataset": cell.dataset, "recipe": "train", "scorer": cell.scorer, "parts": 1, "sides": "both",
         "mrr": figures["mrr"], "hits10": figures.get("hits10")}
        for cell in read_cells(HERE / "linkprediction", "linkprediction")
        for paper, figures in cell.published.items()
    ]  # fmt: skip
    with open(HERE / "fedr-table2" / "published.csv", encoding="utf-8", newline="") as file:
        found += [
            {"paper": "FedR, Table 2", "dataset": row["dataset"], "recipe": row["setting"], "scorer": row["scorer"],
             "parts": int(row["parts"]), "sides": "tails", "mrr": float(row["mrr"]), "hits10": None}
            for row in csv.DictReader(file)
        ]  # fmt: skip
    unique = {json.dumps(figure, sort_keys=True): figure for figure in found}
    return list(unique.values())


def text() -> str:
    """A line for each."""
    return "[\n" + ",\n".join(json.dumps(figure) for figure in figures()) + "\n]\n"


if __name__ == "__main__":
    TARGET.write_text(text(), encoding="utf-8")
