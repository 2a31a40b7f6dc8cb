"""Figures of results that are kept: ours beside the published.

    python benchmarks/figures.py fedr-table2 --out docs/images/fedr-table2.svg

fedr-table2    MRR by the number of parties, for each dataset and scorer; the paper's dashed
fedr-fig4      the loss by round, five parties; FedE dashed
dpflames-fig3  attacks on FedE: the best F1 by round, and the ROC of the last; the paper's way dashed
dpflames-fig4  attacks by epsilon: the best F1 and the AUC; what they find without a defence dashed
dpflames-fig5  test MRR by epsilon, and what the strongest attack finds at that MRR
dpkge-fig5     DPKGE: Hits@10 and mean rank by the share of statements that are confidential
dpkge-loss     DPKGE: the loss, and epsilon by the paper's accounting, epoch by epoch
ledger-robustness  honest providers' MRR and the liars' success by defence, for each kind of liars
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

from tacit.reporting.drawing import COLOURS, GREY, Panel, Point, standalone
from tacit.reproduction import Results

RESULTS = Path(__file__).parent / "results"
NAMES = {"transe": "TransE", "transm": "TransM", "rescal": "RESCAL", "rotate": "RotatE", "distmult": "DistMult",
         "complex": "ComplEx", "fb15k-237": "FB15k-237", "wn18rr": "WN18RR", "ddb14": "DDB14",
         "local": "Local", "fede": "FedE", "fedr": "FedR", "cip": "CIP", "cia": "CIA", "si": "SI"}  # fmt: skip
SCORERS, RECIPES = ("transe", "rotate", "distmult", "complex"), ("local", "fede", "fedr")
DATASETS, ATTACKS = ("fb15k-237", "wn18rr", "ddb14"), ("cip", "cia", "si")
NO_TEST = "DP-FLames, no test"
DEFENCES = (("S1", "transe"), ("S1", "complex"), ("S4", "transe"))
LIARS = ("random", "flip", "scaled", "labels", "backdoor", "copies", "colluders", "stealthy")
WIDTH, HEIGHT, LEFT, TOP, BESIDE, BELOW = 190, 130, 60, 60, 60, 75
Row = dict[str, Any]
Draw = Callable[[list[Row]], str]


def panel(column: int, line: int, x: Point, y: Point, title: str, *, logarithmic: str = "") -> Panel:
    """One of many of the same size, in columns and lines."""
    left, top = LEFT + column * (WIDTH + BESIDE), TOP + line * (HEIGHT + BELOW)
    made = Panel(left, top, WIDTH, HEIGHT, x, y, logarithmic=logarithmic)
    made.text(title, 0, -8)
    return made


def sheet(title: str, panels: list[Panel], keys: list[tuple[str, str, bool]]) -> str:
    """Panels with what lines stand for above them."""
    across = 0
    for words, colour, dashed in keys:
        panels[0].key(words, across, -34, colour, dashed=dashed)
        across += 45 + 7 * len(words)
    wide, low = (max(getattr(p, end) for p in panels) for end in ("left", "top"))
    return standalone(int(wide + WIDTH + LEFT / 2), int(low + HEIGHT + 50), title, panels)


def tenths(low: float, high: float, step: float = 0.1) -> list[tuple[float, str]]:
    """Labels from one value to another."""
    return [(low + step * n, f"{low + step * n:.1f}") for n in range(round((high - low) / step) + 1)]


def known_split(rows: list[Row]) -> dict[tuple[Any, ...], list[Row]]:
    """Rows of each cell, one for each seed; only where what is held out is chosen as the paper's code does."""
    cells: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        if row.get("partition", {}).get("known") == 2:
            cells.setdefault((row["dataset"], row["scorer"], row["setting"], row["parts"]), []).append(row)
    return cells


def by_parties(rows: list[Row]) -> str:
    """Small multiples: datasets across, scorers down."""
    cells = known_split(rows)
    ours = {place: mean(row["metrics"]["mrr"] for row in found) for place, found in cells.items()}
    theirs = {place: found[0]["published"]["FedR"]["mrr"] for place, found in cells.items()}
    panels = []
    for column, dataset in enumerate(DATASETS):
        for line, scorer in enumerate(SCORERS):
            most = max(mrr for kind in (ours, theirs) for place, mrr in kind.items() if place[:2] == (dataset, scorer))
            top = 0.05 * (int(most / 0.05) + 1)
            made = panel(column, line, (5, 20), (0.0, top), f"{NAMES[dataset]}, {NAMES[scorer]}")
            made.grid([(n, str(n)) for n in (5, 10, 15, 20)], [(y, f"{y:.3g}") for y in (0.0, top / 2, top)])
            for colour, recipe in zip(COLOURS, RECIPES, strict=False):
                for kind, dashed in ((ours, False), (theirs, True)):
                    points = sorted((p[3], mrr) for p, mrr in kind.items() if p[:3] == (dataset, scorer, recipe))
                    made.series(points, colour, dashed=dashed)
            if line == len(SCORERS) - 1:
                made.text("parties", WIDTH / 2, HEIGHT + 34, anchor="middle")
            panels.append(made)
    keys = [(NAMES[recipe], colour, False) for colour, recipe in zip(COLOURS, RECIPES, strict=False)]
    return sheet("Test MRR by number of parties", panels, [*keys, ("the paper's, of the same colour", GREY, True)])


def losses(rows: list[Row]) -> str:
    """A panel for each dataset: the mean training loss of a round; lines end where training stopped."""
    cells, panels = known_split(rows), []
    for column, dataset in enumerate(DATASETS):
        made = panel(column, 0, (1, 300), (0.0, 2.6), NAMES[dataset], logarithmic="x")
        made.grid([(n, str(n)) for n in (1, 3, 10, 30, 100, 300)], tenths(0.0, 2.5, 0.5))
        for colour, scorer in zip(COLOURS, SCORERS, strict=False):
            for recipe in ("fede", "fedr"):
                [row] = [row for row in cells[dataset, scorer, recipe, 5] if row["seed"] == 0]
                points = [(n, loss) for n, loss in enumerate(row["loss"], 1) if n < 20 or n % 5 == 0]
                made.series(points, colour, dashed=recipe == "fede", marks=False)
        made.text("round", WIDTH / 2, HEIGHT + 34, anchor="middle")
        panels.append(made)
    keys = [(NAMES[scorer], colour, False) for colour, scorer in zip(COLOURS, SCORERS, strict=False)]
    return sheet("Training loss by round", panels, [*keys, ("FedE, of the same colour", GREY, True)])


def alone(rows: list[Row], **wanted: str) -> Row:
    """The only row with these values."""
    [row] = [row for row in rows if all(row[key] == value for key, value in wanted.items())]
    return row


def courses(rows: list[Row]) -> str:
    """F1 by round above, ROC below; translational scorers and both readings of the targets across."""
    panels = []
    rows = [row for row in rows if row["dataset"] == "fb15k-237" and row["adversary"] in ("party", "server")]
    for column, (scorer, targets) in enumerate((s, t) for s in SCORERS[:2] for t in ("existing", "canaries")):
        title = f"{NAMES[scorer]}, {targets}"
        course = panel(column, 0, (0, 100), (0.6, 1.0), f"best F1: {title}")
        course.grid([(n, str(n)) for n in (0, 25, 50, 75, 100)], tenths(0.6, 1.0))
        course.text("round", WIDTH / 2, HEIGHT + 34, anchor="middle")
        rates = panel(column, 1, (0.0, 1.0), (0.0, 1.0), f"ROC: {title}")
        rates.grid(tenths(0.0, 1.0, 0.5), tenths(0.0, 1.0, 0.5))
        rates.text("false positives", WIDTH / 2, HEIGHT + 34, anchor="middle")
        drawn = [(attack, colour) for attack, colour in zip(ATTACKS, COLOURS, strict=False)]
        drawn += [("blind", GREY)] if targets == "existing" else []
        for attack, colour in drawn:
            row = alone(rows, scorer=scorer, targets=targets, attack=attack)
            best, first = max(row["ways"], key=lambda way: row["ways"][way]["best"]["f1"]), next(iter(row["ways"]))
            for way, dashed in {first: True, best: False}.items():
                by_round = row["ways"][way]["by_round"]
                course.series([(int(n), by_round[n]["f1"]) for n in by_round], colour, dashed=dashed, marks=False)
                rates.series(list(zip(*row["roc"][way], strict=True)), colour, dashed=dashed, marks=False)
        panels += [course, rates]
    keys = [(NAMES[attack], colour, False) for attack, colour in zip(ATTACKS, COLOURS, strict=False)]
    keys += [("the paper's way, where another is better", GREY, True), ("looks at nothing that was sent", GREY, False)]
    return sheet("Attacks on FedE without a defence, FB15k-237", panels, keys)


def strongest(rows: list[Row], measure: str) -> float:
    """The most that any way by any adversary finds, chosen after the fact; F1: of the best round."""
    ways = [found for row in rows for found in row["ways"].values()]
    return max(float(found["best"]["f1"] if measure == "F1" else found["last"]["auc"]["value"]) for found in ways)


def levels(rows: list[Row]) -> dict[int, list[Row]]:
    """Rows by the epsilon that was asked for; what was spent is just below it."""
    found: dict[int, list[Row]] = {}
    for row in rows:
        found.setdefault(round(row["epsilon"]), []).append(row)
    return dict(sorted(found.items()))


def of(rows: list[Row], setting: str, scorer: str, attack: str | None = None) -> list[Row]:
    return [r for r in rows if (r["setting"], r["scorer"]) == (setting, scorer) and attack in (None, r["attack"])]


def by_epsilon(rows: list[Row]) -> str:
    """F1 above, AUC below; S1 with two scorers, and S4, across."""
    panels = []
    for line, measure in enumerate(("F1", "AUC")):
        for column, (setting, scorer) in enumerate(DEFENCES):
            name = NAMES[scorer] if setting == "S1" else "noisy counts"
            made = panel(column, line, (2, 64), (0.4, 1.0), f"{measure}: {setting}, {name}", logarithmic="x")
            made.grid([(n, str(n)) for n in (2, 4, 8, 16, 32, 64)], tenths(0.4, 1.0, 0.2))
            made.text("epsilon", WIDTH / 2, HEIGHT + 34, anchor="middle")
            if setting == "S4":
                for who, colour in (("server", COLOURS[3]), ("party", GREY)):
                    found = levels([row for row in of(rows, setting, scorer) if row["adversary"] == who])
                    made.series([(e, strongest(some, measure)) for e, some in found.items()], colour)
            for attack, colour in zip(ATTACKS, COLOURS, strict=False) if setting == "S1" else ():
                found = levels(of(rows, setting, scorer, attack))
                made.series([(e, strongest(some, measure)) for e, some in found.items()], colour)
                without = strongest(of(rows, "none", scorer, attack), measure)
                made.series([(2, without), (64, without)], colour, dashed=True)
            panels.append(made)
    keys = [(NAMES[attack], colour, False) for attack, colour in zip(ATTACKS, COLOURS, strict=False)]
    keys += [("without a defence", GREY, True), ("counts: server", COLOURS[3], False), ("counts: a party", GREY, False)]
    return sheet("Attacks by epsilon, FB15k-237, canaries", panels, keys)


def worth(rows: list[Row]) -> float:
    """Test MRR where no one disturbs the training."""
    return next(float(row["mrr"]["test"]) for row in rows if row["attack"] != "cia")


def trade(rows: list[Row]) -> str:
    """Test MRR by epsilon; and the strongest attack's AUC by test MRR."""
    left = panel(0, 0, (2, 64), (0.0, 0.3), "test MRR", logarithmic="x")
    left.grid([(n, str(n)) for n in (2, 4, 8, 16, 32, 64)], tenths(0.0, 0.3))
    left.text("epsilon", WIDTH / 2, HEIGHT + 34, anchor="middle")
    right = panel(1, 0, (0.0, 0.3), (0.4, 1.0), "AUC of the strongest attack")
    right.grid(tenths(0.0, 0.3), tenths(0.4, 1.0, 0.2))
    right.text("test MRR", WIDTH / 2, HEIGHT + 34, anchor="middle")
    keys: list[tuple[str, str, bool]] = []
    for (setting, scorer), colour in zip(DEFENCES, COLOURS, strict=False):
        found = {e: (worth(some), strongest(some, "AUC")) for e, some in levels(of(rows, setting, scorer)).items()}
        left.series([(e, mrr) for e, (mrr, _) in found.items()], colour)
        right.series(list(found.values()), colour)
        if setting == "S1":
            without = of(rows, "none", scorer)
            undefended = worth(without), strongest(without, "AUC")
            left.series([(2, undefended[0]), (64, undefended[0])], colour, dashed=True)
            right.series([undefended], colour)
            if not keys:
                right.note("no defence", *undefended, GREY)
        keys.append((f"{setting}, {NAMES[scorer]}", colour, False))
    colour = COLOURS[len(DEFENCES)]
    for scorer in ("transe", "complex"):
        if some := of(rows, NO_TEST, scorer):  # which has no epsilon, and no place on the left
            found_at = worth(some), strongest(some, "AUC")
            right.series([found_at], colour)
            right.note("as published", *found_at, colour)
    return sheet("What privacy costs and keeps, FB15k-237", [left, right], [*keys, ("no defence", GREY, True)])


def by_share(rows: list[Row]) -> str:
    """Scorers across, Hits@10 above and mean rank below: the mean over seeds."""
    panels = []
    for column, scorer in enumerate(("transe", "transm", "rescal", "distmult")):
        mine = [row for row in rows if row["scorer"] == scorer]
        shares = sorted({share_of(row) for row in mine})
        thousands = [(float(n), f"{n:,}") for n in (0, 2000, 4000, 6000)]
        for line, (measure, labels) in enumerate((("hits10", tenths(0, 0.5)), ("mr", thousands))):
            title = f"{('Hits@10', 'MR')[line]}: {NAMES[scorer]}"
            made = panel(column, line, (0, 1), (0, labels[-1][0]), title)
            made.grid([(0, "0"), (0.5, "0.5"), (1, "1")], labels)
            made.series(
                [(share, mean(row["metrics"][measure] for row in mine if share_of(row) == share)) for share in shares],
                COLOURS[0],
            )
            if line == 1:
                made.text("confidential", WIDTH / 2, HEIGHT + 34, anchor="middle")
            panels.append(made)
    return sheet("DPKGE as published, sigma 1, FB15k-237", panels, [])


def by_epoch(rows: list[Row]) -> str:
    """Scorers across; the loss above, what the paper's accounting says below; seed 0."""
    settings = ["NDP", *(f"DPKGE, sigma {sigma}" for sigma in ("0.7", "1", "1.3", "10"))]
    panels = []
    for column, scorer in enumerate(("transe", "transm", "rescal", "distmult")):
        mine = {row["setting"]: row for row in rows if row["scorer"] == scorer and row["seed"] == 0}
        top = max(max(mine[setting]["loss"]) for setting in settings[:4])
        high = next(n for n in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000) if n >= top)
        for line, title in enumerate(("loss", "published accounting")):
            made = panel(column, line, (1, 100), (0, (high, 12)[line]), f"{title}: {NAMES[scorer]}")
            labels = ((0, high / 2, high), (0, 4, 8, 12))[line]
            made.grid([(n, str(n)) for n in (1, 50, 100)], [(n, f"{n:g}") for n in labels])
            for setting, colour in zip(settings, (GREY, *COLOURS), strict=False):
                row = mine[setting]
                values = row["loss"] if line == 0 else row["published_accounting"]["by"]
                shown = [(n, v) for n, v in enumerate(values, 1) if v is not None and v <= (high, 12)[line]]
                made.series(shown, colour, marks=False)
            if line == 1:
                made.text("epoch", WIDTH / 2, HEIGHT + 34, anchor="middle")
            panels.append(made)
    return sheet("DPKGE as published, FB15k-237", panels, [(name, colour, False) for name, colour in
                                                           zip(settings, (GREY, *COLOURS), strict=False)])  # fmt: skip


def share_of(row: Row) -> float:
    """The share of statements that are confidential, as the setting's name ends."""
    return float(row["setting"].rsplit(" ", 1)[1])


def defended(rows: list[Row]) -> str:
    """Kinds of liars across, defences along: MRR above, the share of the liars' goals below."""
    size = Counter(str(row["size"]) for row in rows).most_common(1)[0][0]  # that of which most is known
    rows = [row for row in rows if str(row["size"]) == size]
    share = "" if rows[0]["size"]["sample"] == 1 else f", {rows[0]['size']['sample']:.0%} of the entities"
    kinds = [each for each in LIARS if any(row["liars"] == each for row in rows)]
    defences = list(dict.fromkeys(row["setting"] for row in rows))
    panels = []
    for column, kind in enumerate(kinds):
        goal = "flip" if kind == "labels" else "trap"
        for line, (measure, title, most) in enumerate((("mrr", "MRR", 0.3), (goal, goal, 1.0))):
            made = panel(column, line, (0, len(defences) - 1), (0.0, most), f"{title}: {kind}")
            made.grid([(n, str(n + 1)) for n in range(len(defences))], tenths(0.0, most, most / 2))
            points = []
            for n, defence in enumerate(defences):
                found = [row["metrics"][measure] for row in rows if (row["liars"], row["setting"]) == (kind, defence)]
                found = [each for each in found if each is not None]
                points += [(n, mean(found))] if found else []
            made.series(points, COLOURS[line])
            without = [row["metrics"]["mrr"] for row in rows if (row["liars"], row["setting"]) == ("honest", "none")]
            if measure == "mrr" and without:
                made.series([(0, mean(without)), (len(defences) - 1, mean(without))], GREY, dashed=True)
            panels.append(made)
    keys = [(f"{n}: {defence}", GREY, False) for n, defence in enumerate(defences, 1)]
    return sheet(
        f"Three liars of ten by defence, FB15k-237{share}", panels, [*keys, ("nobody lies, no defence", GREY, True)]
    )


FIGURES: dict[str, tuple[str, Draw]] = {
    "fedr-table2": ("fedr-table2", by_parties),
    "fedr-fig4": ("fedr-table2", losses),
    "dpflames-fig3": ("dpflames-table2", courses),
    "dpflames-fig4": ("dpflames-fig4", by_epsilon),
    "dpflames-fig5": ("dpflames-fig4", trade),
    "dpkge-fig5": ("dpkge-fig5", by_share),
    "dpkge-loss": ("dpkge-table7", by_epoch),
    "ledger-robustness": ("ledger-robustness", defended),
}
"""By name: the table whose results it shows, and how."""


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("figure", choices=sorted(FIGURES))
    options.add_argument("--results", type=Path, help="default: benchmarks/results/TABLE.jsonl")
    options.add_argument("--out", type=Path, required=True)
    chosen = options.parse_args()
    table, draw = FIGURES[chosen.figure]
    rows = list(Results(chosen.results or RESULTS / f"{table}.jsonl"))
    if not rows:
        options.error("there are no results yet")
    chosen.out.write_text(draw(rows))


if __name__ == "__main__":
    main()
