"""Plots as SVG, by hand: a few axes, lines and points do not need a library."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from html import escape

COLOURS = ("#0b6e4f", "#c1440e", "#1f4e9c", "#7a5195")
Point = tuple[float, float]


class Panel:
    """One pair of axes on a page; numbers in, SVG lines out."""

    def __init__(
        self, left: float, top: float, width: float, height: float, x: Point, y: Point, *, logarithmic: bool = False
    ):
        self.left, self.top, self.width, self.height = left, top, width, height
        self.scale: Callable[[float], float] = math.log10 if logarithmic else float
        (self.x0, self.x1), (self.y0, self.y1) = (tuple(map(self.scale, ends)) for ends in (x, y))
        self.lines: list[str] = []

    def at(self, x: float, y: float) -> Point:
        across = (self.scale(x) - self.x0) / ((self.x1 - self.x0) or 1)
        up = (self.scale(y) - self.y0) / ((self.y1 - self.y0) or 1)
        return round(self.left + across * self.width, 1), round(self.top + (1 - up) * self.height, 1)

    def grid(self, xs: Iterable[tuple[float, str]], ys: Iterable[tuple[float, str]]) -> None:
        """Lines at some values, each with its label."""
        low_x, low_y = (10**v if self.scale is math.log10 else v for v in (self.x0, self.y0))
        for value, label in xs:
            x, _ = self.at(value, low_y)
            bottom = self.top + self.height
            self.lines.append(f'<path d="M{x} {self.top}V{bottom}" stroke="#ddd"/>')
            self.lines.append(f'<text x="{x}" y="{bottom + 16}" text-anchor="middle">{escape(label)}</text>')
        for value, label in ys:
            _, y = self.at(low_x, value)
            self.lines.append(f'<path d="M{self.left} {y}H{self.left + self.width}" stroke="#ddd"/>')
            self.lines.append(f'<text x="{self.left - 6}" y="{y + 4}" text-anchor="end">{escape(label)}</text>')

    def series(self, points: Sequence[Point], colour: str, *, dashed: bool = False) -> None:
        """A line through points; dashed ones have no marks."""
        places = [self.at(*point) for point in points]
        path = " ".join(f"{x},{y}" for x, y in places)
        style = ' stroke-dasharray="4 3"' if dashed else ""
        self.lines.append(f'<polyline points="{path}" fill="none" stroke="{colour}"{style}/>')
        if not dashed:
            self.lines += [f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"/>' for x, y in places]

    def text(self, words: str, across: float, down: float, colour: str = "black", anchor: str = "start") -> None:
        """Words at a place counted from the panel's left upper corner."""
        place = f'x="{self.left + across}" y="{self.top + down}"'
        self.lines.append(f'<text {place} fill="{colour}" text-anchor="{anchor}">{escape(words)}</text>')


def page(width: int, height: int, title: str, panels: Iterable[Panel]) -> str:
    """All panels as one SVG."""
    style = 'font-family="sans-serif" font-size="12"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" {style}>'
    lines = [head, f"<title>{escape(title)}</title>", f'<rect width="{width}" height="{height}" fill="white"/>']
    return "\n".join([*lines, *(line for panel in panels for line in panel.lines), "</svg>"]) + "\n"
