"""Pieces of a page: tables, figures with their numbers, words for counts and sizes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from tacit.reporting.drawing import COLOURS, Panel, dash


def table(caption: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    top = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head) if any(head) else ""
    body = "".join(
        f'<tr><th scope="row">{escape(row[0])}</th>' + "".join(f"<td>{escape(cell)}</td>" for cell in row[1:]) + "</tr>"
        for row in rows
    )
    start = f"<thead><tr>{top}</tr></thead>" if top else ""
    return (
        f'<div class="table" tabindex="0" role="region" aria-label="{escape(caption)}"><table>'
        f"<caption>{escape(caption)}</caption>{start}<tbody>{body}</tbody></table></div>"
    )


def figure(svg: str, caption: str, numbers: str = "") -> str:
    more = details("The numbers", numbers) if numbers else ""
    return f"<figure>{svg}<figcaption>{escape(caption)}</figcaption>{more}</figure>"


def details(summary: str, body: str, *, open_it: bool = False) -> str:
    return f"<details{' open' if open_it else ''}><summary>{escape(summary)}</summary>{body}</details>"


def key(panel: Panel, place: int, label: str, across: float, *, dot: bool = False, down: float | None = None) -> None:
    """What the colour of a series stands for, at a place of the panel; by default in a line of its number."""
    down = 14 + 20 * place if down is None else down
    short = label if len(label) < 34 else label[:32] + "…"
    panel.key(short, across, down, COLOURS[place % len(COLOURS)], dashed=dash(place), dot=dot)


def number(found: Any, key: str) -> str:
    return "-" if found is None or not found.count else f"{getattr(found, key):.3f}"


def count(number: int, one: str, many: str = "") -> str:
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def sized(size: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000 or unit == "GB":
            return f"{size:.3g} {unit}" if unit != "B" else f"{size:.0f} B"
        size /= 1000
    raise AssertionError


def times(epsilon: float) -> str:
    """e to the epsilon, as people say it."""
    value = math.exp(min(epsilon, 50))
    return f"{value:.2f}" if value < 10 else f"{value:,.0f}" if value < 1e6 else f"{value:.1e}"


def share_of(value: float) -> str:
    """A share as percent, with as many digits as keep it apart from all and nothing."""
    for digits in range(5):
        shown = f"{100 * value:.{digits}f}"
        if value in (0.0, 1.0) or 0 < float(shown) < 100:
            return f"{shown}%"
    return f"{'over' if value > 0.5 else 'under'} {99.9999 if value > 0.5 else 0.0001:g}%"
