"""Figures of results that are kept: ours beside the published.

    python benchmarks/figures.py fedr-table2 --out docs/images/fedr-table2.svg

A panel for each dataset and scorer: MRR by the number of parties; ours in full lines, the paper's dashed.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from drawing import COLOURS, Panel, page

from tacit.reproduction import Results

RESULTS = Path(__file__).parent / "results"
SCORERS, RECIPES = ("transe", "rotate", "distmult", "complex"), ("local", "fede", "fedr")
WIDTH, HEIGHT, LEFT, TOP, BETWEEN = 190, 130, 60, 40, 60


def by_parties(rows: list[dict[str, Any]]) -> str:
    """Small multiples: datasets across, scorers down."""
    kept = {(r["dataset"], r["scorer"], r["setting"], r["parts"]): r for r in rows if r["seed"] == 0}
    datasets = sorted({place[0] for place in kept})
    panels = []
    for column, dataset in enumerate(datasets):
        for line, scorer in enumerate(SCORERS):
            own = {place[2:]: row for place, row in kept.items() if place[:2] == (dataset, scorer)}
            if not own:
                continue
            published = {at: row["published"]["FedR"]["mrr"] for at, row in own.items() if "FedR" in row["published"]}
            most = max([row["metrics"]["mrr"] for row in own.values()] + list(published.values()))
            top = 0.1 * (int(most / 0.1) + 1)
            left, down = LEFT + column * (WIDTH + BETWEEN), TOP + line * (HEIGHT + BETWEEN)
            panel = Panel(left, down, WIDTH, HEIGHT, (5, 20), (0.0, top))
            panel.grid([(n, str(n)) for n in (5, 10, 15, 20)], [(y, f"{y:.1f}") for y in (0.0, top / 2, top)])
            panel.text(f"{dataset}, {scorer}", 0, -8)
            for number, recipe in enumerate(RECIPES):
                ours = sorted((parts, row["metrics"]["mrr"]) for (r, parts), row in own.items() if r == recipe)
                theirs = sorted((parts, mrr) for (r, parts), mrr in published.items() if r == recipe)
                panel.series(ours, COLOURS[number])
                panel.series(theirs, COLOURS[number], dashed=True)
            panels.append(panel)
    for number, recipe in enumerate(RECIPES):
        panels[0].text(recipe, 60 * number, -26, COLOURS[number])
    width = LEFT + len(datasets) * (WIDTH + BETWEEN)
    return page(width, TOP + len(SCORERS) * (HEIGHT + BETWEEN), "MRR by number of parties", panels)


FIGURES = {"fedr-table2": by_parties}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("table", choices=sorted(FIGURES))
    options.add_argument("--results", type=Path, help="default: benchmarks/results/TABLE.jsonl")
    options.add_argument("--out", type=Path, required=True)
    chosen = options.parse_args()
    rows = list(Results(chosen.results or RESULTS / f"{chosen.table}.jsonl"))
    if not rows:
        options.error("there are no results yet")
    chosen.out.write_text(FIGURES[chosen.table](rows))


if __name__ == "__main__":
    main()
