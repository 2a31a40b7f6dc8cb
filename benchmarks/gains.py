"""What peers gain, from lines that are kept, as tables of Markdown.

    python benchmarks/gains.py [--table fkge-ablations] [--results FOLDER]

Mean and deviation over seeds. A gain is over training alone for as long, the best kept ("continued"), seed by seed.
"""

from __future__ import annotations

import argparse
from itertools import groupby
from pathlib import Path
from typing import Any

from tacit.peers.cells import summary
from tacit.reproduction import Results

SHOWN = {"accuracy": "accuracy", "mrr": "MRR", "hits1": "Hits@1", "hits3": "Hits@3", "hits10": "Hits@10",
         "typed_hits10": "Hits@10, typed"}  # fmt: skip
GAINS = {"accuracy": "gain, accuracy", "mrr": "gain, MRR", "typed_hits10": "gain, Hits@10, typed"}
TABLES = ("fkge", "fkge-ablations")


def told(value: tuple[float, float | None] | None, sign: bool = False) -> str:
    """Mean and deviation."""
    if value is None:
        return ""
    mean, spread = value
    return f"{mean:+.4f}" * sign + f"{mean:.4f}" * (not sign) + (f" ± {spread:.4f}" if spread is not None else "")


def markdown(rows: list[dict[str, Any]], table: str) -> str:
    """A table for each dataset, number of peers and scorer."""
    found = [each for each in summary(rows) if each["table"] == table]
    lines = []
    place = lambda each: (each["dataset"], each["parts"], each["scorer"])  # noqa: E731
    for (dataset, parts, scorer), some in groupby(sorted(found, key=place), place):
        lines += [f"{dataset}, {parts} peers, {scorer}:", ""]
        lines += ["| " + " | ".join(["", *SHOWN.values(), *GAINS.values(), "seeds"]) + " |"]
        lines += ["|---" * (len(SHOWN) + len(GAINS) + 2) + "|"]
        for each in some:
            numbers = [told(each["metrics"][name]) for name in SHOWN]
            gains = [told(each["gain"] and each["gain"][name], sign=True) for name in GAINS]
            lines.append("| " + " | ".join([each["setting"], *numbers, *gains, str(each["seeds"])]) + " |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--table", default="fkge", choices=TABLES)
    options.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    chosen = options.parse_args()
    rows = [row for table in TABLES for row in Results(chosen.results / f"{table}.jsonl")]
    if not rows:
        options.error("there are no results yet")
    print(markdown(rows, chosen.table))


if __name__ == "__main__":
    main()
