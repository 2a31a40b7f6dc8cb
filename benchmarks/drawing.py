"""Plots as SVG, by hand: a few axes, lines and points do not need a library."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from html import escape

COLOURS = ("#0b6e4f", "#c1440e", "#1f4e9c", "#7a5195")
GREY = "#777"
Point = tuple[float, float]


class Panel:
    """One pair of axes on a page; numbers in, SVG lines out. Logarithmic: "", "x" or "xy"."""

    def __init__(
        self, left: float, top: float, width: float, height: float, x: Point, y: Point, *, logarithmic: str = ""
    ):
        self.left, self.top, self.width, self.height = left, top, width, height
        self.across, self.up = (_scale("x" in logarithmic, x), _scale("y" in logarithmic, y))
        self.lines: list[str] = []

    def at(self, x: float, y: float) -> Point:
        return round(self.left + self.across(x) * self.width, 1), round(self.top + (1 - self.up(y)) * self.height, 1)

    def grid(self, xs: Iterable[tuple[float, str]], ys: Iterable[tuple[float, str]]) -> None:
        """Lines at some values, each with its label."""
        bottom = self.top + self.height
        for value, label in xs:
            x = round(self.left + self.across(value) * self.width, 1)
            self.lines.append(f'<path d="M{x} {self.top}V{bottom}" stroke="#ddd"/>')
            self.lines.append(f'<text x="{x}" y="{bottom + 16}" text-anchor="middle">{escape(label)}</text>')
        for value, label in ys:
            y = round(self.top + (1 - self.up(value)) * self.height, 1)
            self.lines.append(f'<path d="M{self.left} {y}H{self.left + self.width}" stroke="#ddd"/>')
            self.lines.append(f'<text x="{self.left - 6}" y="{y + 4}" text-anchor="end">{escape(label)}</text>')

    def series(self, points: Sequence[Point], colour: str, *, dashed: bool = False, marks: bool = True) -> None:
        """A line through points; dashed ones have no marks."""
        places = [self.at(*point) for point in points]
        path = " ".join(f"{x},{y}" for x, y in places)
        self.lines.append(f'<polyline points="{path}" fill="none" stroke="{colour}"{_dashes(dashed)}/>')
        if marks and not dashed:
            self.lines += [f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"/>' for x, y in places]

    def text(self, words: str, across: float, down: float, colour: str = "black", anchor: str = "start") -> None:
        """Words at a place counted from the panel's left upper corner."""
        place = f'x="{self.left + across}" y="{self.top + down}"'
        self.lines.append(f'<text {place} fill="{colour}" text-anchor="{anchor}">{escape(words)}</text>')

    def note(self, words: str, x: float, y: float, colour: str) -> None:
        """Words above a point."""
        across, down = self.at(x, y)
        self.text(words, across - self.left, down - self.top - 8, colour, "middle")

    def key(self, words: str, across: float, down: float, colour: str, *, dashed: bool = False) -> None:
        """A piece of a line and what it stands for, at a place as of `text`."""
        x, y = self.left + across, self.top + down - 4
        self.lines.append(f'<path d="M{x} {y}h22" stroke="{colour}"{_dashes(dashed)}/>')
        self.text(words, across + 28, down, colour)


def page(width: int, height: int, title: str, panels: Iterable[Panel]) -> str:
    """All panels as one SVG."""
    style = 'font-family="sans-serif" font-size="12"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" {style}>'
    lines = [head, f"<title>{escape(title)}</title>", f'<rect width="{width}" height="{height}" fill="white"/>']
    return "\n".join([*lines, *(line for panel in panels for line in panel.lines), "</svg>"]) + "\n"


def _scale(logarithmic: bool, ends: Point) -> Callable[[float], float]:
    """From a value to its place between the ends, 0 to 1."""
    taken: Callable[[float], float] = math.log if logarithmic else float
    low, high = map(taken, ends)
    return lambda value: (taken(value) - low) / ((high - low) or 1)


def _dashes(dashed: bool) -> str:
    return ' stroke-dasharray="4 3"' if dashed else ""
