"""How results look on a terminal."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from typing import Any

from rich.console import Console, JustifyMethod
from rich.progress import Progress, ProgressColumn, TextColumn
from rich.table import Table
from rich.text import Text

from tacit.inspection import Inspection
from tacit.parties import Parties

out = Console()
SHOWN = 10
"""How many rows of a long table are shown unless all are asked for."""


def say(text: str, style: str = "") -> None:
    """Print text as it is: names and paths may hold what rich would take for markup. In a file no line is broken."""
    out.print(Text(text, style=style), soft_wrap=not out.is_terminal)


def busy(doing: str, quiet: bool) -> Any:
    """A sign of life on a terminal; nothing anywhere else."""
    return Console(stderr=True).status(Text(doing)) if sys.stderr.isatty() and not quiet else nullcontext()


def progress(*columns: str | ProgressColumn) -> Progress:
    """Bars on a terminal, that vanish when they are done; what is a string is shown as it is, with a task's fields."""
    drawn = (TextColumn(each, markup=False) if isinstance(each, str) else each for each in columns)
    return Progress(*drawn, console=Console(stderr=True), transient=True)


def table(*columns: str, rows: Any, title: str | None = None) -> None:
    """Print a table; what is not a string is a number and stands to the right."""
    rows = list(rows)
    drawn = Table(title=None if title is None else Text(title, style="bold"), title_justify="left")
    for place, name in enumerate(columns):
        justify: JustifyMethod = "left" if not rows or isinstance(rows[0][place], str) else "right"
        drawn.add_column(Text(name, style="bold"), justify=justify, overflow="fold")
    for row in rows:
        drawn.add_row(
            *(
                Text(cell if isinstance(cell, str) else f"{cell:,}" if isinstance(cell, int) else f"{cell:,.2f}")
                for cell in row
            )
        )
    out.print(drawn)


def warn(warnings: Any) -> None:
    for warning in warnings:
        say("! " + warning, "yellow")


def say_aside(text: str) -> None:
    """What is no result, and may not get in the way of one."""
    Console(stderr=True).print(Text(text, style="dim"))


def warn_aside(warning: str) -> None:
    """A warning that may not get in the way of JSON on the standard output."""
    Console(stderr=True).print(Text("! " + warning, style="yellow"))


def graph(path: str, seen: Inspection, benchmark: str | None, *, every_relation: bool) -> None:
    head = f"{path}: {seen.entities:,} entities, {seen.relations:,} relations"
    say(head + (f"; this is {benchmark} as published" if benchmark else ""), "bold")
    table(
        "split",
        "triples",
        "rows with an entity unseen in train",
        rows=[(s, n, seen.unseen_rows.get(s, 0)) for s, n in seen.triples.items()],
    )
    degree = seen.degree
    table(
        "triples per entity", "median", "most", "entities in one triple only", "self-loops",
        rows=[(degree["mean"], degree["median"], int(degree["max"]), int(degree["once"]), seen.self_loops)],
    )  # fmt: skip
    shown = seen.relation_table if every_relation else seen.relation_table[:SHOWN]
    rows = [(r.name, r.train, r.valid, r.test, r.heads, r.tails, r.category) for r in shown]
    table("relation", "train", "valid", "test", "heads", "tails", "category", rows=rows)
    if len(shown) < seen.relations:
        say(f"... and {seen.relations - len(shown):,} more relations (--relations shows all)", "dim")
    if pairs := [pair for pair in seen.related if pair.kind != "symmetric"]:
        few = pairs if every_relation else pairs[:SHOWN]
        related = [(pair.first, pair.second, pair.kind, pair.share) for pair in few]
        table("relation", "says nearly the same as", "how", "share of pairs", rows=related)
        if len(few) < len(pairs):
            say(f"... and {len(pairs) - len(few):,} more pairs (--relations shows all)", "dim")
    if symmetric := len(seen.related) - len(pairs):
        say(f"{symmetric:,} relations hold in both directions for at least 80% of their pairs")
    if seen.confidential or seen.groups:
        say(f"{seen.confidential:,} statements are confidential; {seen.groups:,} groups")
    for note in seen.notes:
        say(note, "dim")
    warn(seen.warnings)


def parties(held: Parties, statistics: dict[str, Any], views: list[Inspection] | None) -> None:
    rows = [
        (
            p["name"],
            p["entities"],
            p["entities_shared"],
            p["relations"],
            *(p["triples"][s] for s in ("train", "valid", "test")),
        )
        for p in statistics["parties"]
    ]
    table("party", "entities", "shared with others", "relations", "train", "valid", "test", rows=rows)
    overlaps = statistics["overlaps"]
    most = sorted(overlaps, key=lambda row: -row["entities"])[:SHOWN]
    rows = [(" and ".join(row["parties"]), row["entities"], row["relations"], row["triples"]) for row in most]
    table("in common", "entities", "relations", "triples", rows=rows)
    if len(most) < len(overlaps):
        say(f"... and {len(overlaps) - len(most):,} more pairs of parties (--json shows all)", "dim")
    if statistics["distinct_triples"] is not None:
        total = sum(sum(p["triples"].values()) for p in statistics["parties"])
        say(f"{total:,} triples in all splits, {statistics['distinct_triples']:,} of them distinct")
    if others := held.origin.get("alignments_of_others"):
        warn([f"{len(others)} alignment files name a graph that is not here, and are not read: {', '.join(others)}"])
    if left := held.origin.get("left_out"):
        warn([f"{left:,} triples have no party that drew both ends, and are left out"])
    if twice := sum(row["triples"] for row in overlaps):
        warn([f"{twice:,} times two parties hold the same triple: these parties are not disjoint"])
    if views:
        for name, view in zip(held.names, views, strict=True):
            warn(f"{name}: {warning}" for warning in view.warnings)


def marks(counts: list[dict[str, Any]], share: float) -> None:
    table("relation", "statements", "confidential", rows=[tuple(row.values()) for row in counts])
    say(f"{share:.1%} of the statements are confidential")
