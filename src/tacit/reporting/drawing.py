"""Plots as SVG, by hand: a few axes, lines, bars and points need no library, and a page with them no script.

Colours are CSS variables, so that a page in the dark, or on paper, has its own; `standalone` makes a file of a plot.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from html import escape

Point = tuple[float, float]
GREY = "var(--faint)"
COLOURS = tuple(f"var(--plot-{n})" for n in range(1, 8))
"""Of series; they differ in brightness too, for eyes and printers that see no hue."""
PALETTE = {
    "light": ("#0b6e4f", "#c1440e", "#1f4e9c", "#8a5fb0", "#a67c00", "#0f8ca8", "#5f5f5f"),
    "dark": ("#4cc9a0", "#ff8f5e", "#7fb0ff", "#c9a5ee", "#e0bb4a", "#5fd0ea", "#b5b5b5"),
}
DASHES = ("", "6 3", "2 3", "8 3 2 3", "1 2", "10 4", "4 2")


def dash(place: int) -> str:
    """The pattern of a series' line: where colours begin again, it is another."""
    return DASHES[(place + place // len(COLOURS)) % len(DASHES)]


def variables(shade: str) -> str:
    """The colours of series as CSS."""
    return "".join(f"--plot-{n}:{colour};" for n, colour in enumerate(PALETTE[shade], 1))


class Panel:
    """One pair of axes; numbers in, SVG lines out.

    Parameters
    ----------
    x, y
        The lowest and the highest value shown.
    logarithmic
        Both axes, or those named: "x", "y", "xy".
    """

    def __init__(
        self, left: float, top: float, width: float, height: float, x: Point, y: Point, *, logarithmic: bool | str = ""
    ):
        self.left, self.top, self.width, self.height = left, top, width, height
        which = ("xy" if logarithmic else "") if isinstance(logarithmic, bool) else logarithmic
        self.scales: list[Callable[[float], float]] = [math.log10 if axis in which else float for axis in "xy"]
        self.x, self.y = x, y
        self.lines: list[str] = []

    def at(self, x: float, y: float) -> Point:
        """The place of a value."""
        share = [
            (scale(value) - scale(low)) / ((scale(high) - scale(low)) or 1)
            for value, scale, (low, high) in zip((x, y), self.scales, (self.x, self.y), strict=True)
        ]
        return round(self.left + share[0] * self.width, 1), round(self.top + (1 - share[1]) * self.height, 1)

    def grid(self, xs: Iterable[tuple[float, str]], ys: Iterable[tuple[float, str]]) -> None:
        """Lines at some values, each with its label."""
        bottom = self.top + self.height
        for value, label in xs:
            x, _ = self.at(value, self.y[0])
            self.lines.append(f'<path class="grid" d="M{x} {self.top}V{bottom}"/>')
            self.lines.append(f'<text x="{x}" y="{bottom + 16}" text-anchor="middle">{escape(label)}</text>')
        for value, label in ys:
            _, y = self.at(self.x[0], value)
            self.lines.append(f'<path class="grid" d="M{self.left} {y}H{self.left + self.width}"/>')
            self.lines.append(f'<text x="{self.left - 6}" y="{y + 4}" text-anchor="end">{escape(label)}</text>')

    def series(self, points: Sequence[Point], colour: str, *, dashed: bool | str = False, marks: bool = True) -> None:
        """A line through points. `dashed`: without marks; or the pattern."""
        places = [self.at(*point) for point in points]
        path = " ".join(f"{x},{y}" for x, y in places)
        self.lines.append(f'<polyline points="{path}" style="fill:none;stroke:{colour}{_dashes(dashed)}"/>')
        if marks and dashed is False:
            self.points(points, colour)

    def points(self, points: Iterable[Point], colour: str, radius: float = 3) -> None:
        """Dots."""
        places = [self.at(*point) for point in points]
        dots = "".join(f'<circle cx="{x}" cy="{y}" r="{radius:g}"/>' for x, y in places)
        self.lines.append(f'<g style="fill:{colour}">{dots}</g>')

    def bar(self, x0: float, x1: float, y0: float, y1: float, colour: str) -> None:
        """A rectangle between two values on each axis."""
        (left, bottom), (right, top) = self.at(x0, y0), self.at(x1, y1)
        size = f'width="{round(right - left, 1)}" height="{round(bottom - top, 1)}"'
        self.lines.append(f'<rect x="{left}" y="{top}" {size} style="fill:{colour}"/>')

    def note(self, words: str, x: float, y: float, colour: str = "") -> None:
        """Words above a point."""
        across, down = self.at(x, y)
        self.text(words, across - self.left, down - self.top - 8, colour, "middle")

    def key(
        self, words: str, across: float, down: float, colour: str, *, dashed: bool | str = False, dot: bool = False
    ) -> None:
        """What a colour stands for, at a place as of `text`: a piece of its line, or a dot."""
        x, y = round(self.left + across, 1), round(self.top + down - 4, 1)
        style = f"stroke:{colour}{_dashes(dashed)}"
        mark = f'<circle cx="{x + 9}" cy="{y}" r="4" style="fill:{colour}"/>'
        self.lines.append(mark if dot else f'<path d="M{x} {y}h20" style="{style}"/>')
        self.text(words, across + 26, down)

    def text(self, words: str, across: float, down: float, colour: str = "", anchor: str = "start") -> None:
        """Words at a place counted from the panel's left upper corner."""
        place = f'x="{round(self.left + across, 1)}" y="{round(self.top + down, 1)}"'
        style = f' style="fill:{colour}"' if colour else ""
        self.lines.append(f'<text {place}{style} text-anchor="{anchor}">{escape(words)}</text>')


def drawn(width: float, height: float, title: str, panels: Iterable[Panel], describe: str = "") -> str:
    """All panels as one SVG inside a page, whose style it has. `describe`: for who does not see it."""
    words = f"<title>{escape(title)}</title>" + (f"<desc>{escape(describe)}</desc>" if describe else "")
    lines = (line for panel in panels for line in panel.lines)
    return "\n".join([f'<svg class="plot" role="img" viewBox="0 0 {width:g} {height:g}">{words}', *lines, "</svg>"])


def standalone(width: float, height: float, title: str, panels: Iterable[Panel]) -> str:
    """All panels as a file of their own, on white, in colours of its own."""
    head, rest = drawn(width, height, title, panels).split("</title>", 1)
    rest = rest.replace(GREY, "#777").replace('class="grid"', 'style="stroke:#ddd"')
    for colour, own in zip(COLOURS, PALETTE["light"], strict=True):
        rest = rest.replace(colour, own)
    head = head.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" font-family="sans-serif" font-size="12" ')
    return f'{head}</title>\n<rect width="{width:g}" height="{height:g}" fill="white"/>{rest}\n'


def _dashes(dashed: bool | str) -> str:
    pattern = ("4 3" if dashed else "") if isinstance(dashed, bool) else dashed
    return f";stroke-dasharray:{pattern}" if pattern else ""


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round values between two, about so many."""
    if not high > low:
        return [low]
    rough = (high - low) / about
    step = 10 ** math.floor(math.log10(rough))
    step *= next(m for m in (1, 2, 5, 10) if m * step >= rough)
    first = math.ceil(low / step - 1e-9)
    return [round(n * step, 12) for n in range(first, math.floor(high / step + 1e-9) + 1)]
