"""Draw the pictures of docs/threats.md, one for each system, all alike: `python docs/threats.py`.

The party whose triples are at stake stands on the left, whoever gets something from it to the right and below. Colours
say what the others learn of single triples; every box says it in words too.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

FOLDER = Path(__file__).parent / "images"
WIDTH, HEIGHT = 860, 344
INK, PANEL = "#1f2933", "#fcfcfa"
COLOURS = {
    "owner": ("#dbe7f6", "#2f5f98"),
    "all": ("#fadcd8", "#b3392b"),
    "sums": ("#fdeecb", "#a86f00"),
    "noisy": ("#d9efdd", "#2c7a41"),
    "nothing": ("#ececea", "#6b7280"),
}
LEGEND = {
    "all": "no bound: rows tell of triples",
    "sums": "sums alone; no bound either",
    "noisy": "at most what epsilon allows",
    "nothing": "nothing of triples",
}
PLACES = {
    "left": (20, 56, 214, 112),
    "middle": (324, 56, 214, 112),
    "right": (626, 56, 214, 112),
    "below left": (20, 226, 214, 84),
    "below": (324, 226, 214, 84),
    "below right": (626, 226, 214, 84),
}
"""x, y, width and height of the boxes."""


@dataclass(frozen=True)
class Box:
    """Someone, and what they have or see: lines of text, with " / " between them."""

    place: str
    kind: str
    name: str
    says: str

    @property
    def lines(self) -> list[str]:
        return self.says.split(" / ")

    def drawn(self) -> str:
        x, y, width, height = PLACES[self.place]
        fill, edge = COLOURS[self.kind]
        text = [f'<text x="{x + 12}" y="{y + 21}" font-weight="600" fill="{edge}">{escape(self.name)}</text>']
        text += [
            f'<text x="{x + 12}" y="{y + 40 + 16 * i}" font-size="12">{escape(line)}</text>'
            for i, line in enumerate(self.lines)
        ]
        frame = f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="8" fill="{fill}" stroke="{edge}"/>'
        return "\n".join([frame, *text])


@dataclass(frozen=True)
class Arrow:
    """Something that passes from one place to another; `kind`: what it tells whoever sees it. `back`: both ways."""

    start: str
    end: str
    kind: str
    says: str
    back: bool = False

    def drawn(self) -> str:
        label = self.says.split(" / ")
        (x, y, width, height), (to_x, to_y, to_width, _) = PLACES[self.start], PLACES[self.end]
        edge = COLOURS[self.kind][1]
        if y == to_y:
            x1, x2 = (x + width + 6, to_x - 8) if x < to_x else (x - 6, to_x + to_width + 8)
            y1 = y2 = y + height // 2
            middle, first, anchor = (x1 + x2) / 2, y1 - 9.0 - 14 * (len(label) - 1), "middle"
        else:
            x1 = x2 = x + width // 2
            y1, y2 = y + height + 6, to_y - 8
            middle, first, anchor = x1 + 10, (y1 + y2) / 2 + 4 - 7 * (len(label) - 1), "start"
        ends = f'marker-end="url(#{self.kind})"' + (f' marker-start="url(#{self.kind})"' if self.back else "")
        line = f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{edge}" stroke-width="2" {ends}/>'
        text = [
            f'<text x="{middle:g}" y="{first + 14 * i:g}" font-size="11.5" text-anchor="{anchor}">{escape(part)}</text>'
            for i, part in enumerate(label)
        ]
        return "\n".join([line, *text])


@dataclass(frozen=True)
class Picture:
    """One system: its name, who is in it and what passes."""

    title: str
    boxes: tuple[Box, ...]
    arrows: tuple[Arrow, ...] = ()

    def drawn(self) -> str:
        words = "; ".join(f"{box.name}: {', '.join(box.lines)}" for box in self.boxes)
        tips = "".join(
            f'<marker id="{kind}" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="5" markerHeight="5" '
            f'orient="auto-start-reverse"><path d="M0 0 8 4 0 8z" fill="{edge}"/></marker>'
            for kind, (_, edge) in COLOURS.items()
        )
        key, at = [], 20.0
        for kind, meaning in LEGEND.items():
            fill, edge = COLOURS[kind]
            key.append(f'<rect x="{at:g}" y="322" width="12" height="12" rx="3" fill="{fill}" stroke="{edge}"/>')
            key.append(f'<text x="{at + 18:g}" y="332" font-size="11.5">{meaning}</text>')
            at += 215
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
            f"role=\"img\" font-family=\"system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif\" "
            f'font-size="13" fill="{INK}">',
            f"<title>{escape(self.title)}</title>",
            f"<desc>{escape(words)}</desc>",
            f"<defs>{tips}</defs>",
            f'<rect width="{WIDTH}" height="{HEIGHT}" rx="10" fill="{PANEL}"/>',
            f'<text x="20" y="32" font-size="15" font-weight="600">{escape(self.title)}</text>',
            *(arrow.drawn() for arrow in self.arrows),
            *(box.drawn() for box in self.boxes),
            *key,
            "</svg>",
        ]
        return "\n".join(parts) + "\n"


def owner(says: str, name: str = "Hospital A") -> Box:
    return Box("left", "owner", name, says)


def receiver(kind: str, says: str) -> Box:
    return Box("below left", kind, "Receiver of shareable/", says)


def outsider(says: str, kind: str = "nothing") -> Box:
    return Box("below right", kind, "Outsider", says)


PICTURES = {
    "local": Picture(
        "Local: each party alone",
        (
            owner("triples, rows, metrics: / all of it stays here"),
            receiver("nothing", "privacy.json, which says: / none; no rows are in it"),
            Box(
                "middle",
                "all",
                "Whoever is given rows",
                "exported by choice: / rows tell of the triples / that they learned",
            ),
        ),
        (
            Arrow("left", "below left", "nothing", "a statement"),
            Arrow("left", "middle", "all", "tacit / export"),
        ),
    ),
    "fede": Picture(
        "FedE: entity rows are averaged",
        (
            owner("triples stay / relation rows stay"),
            Box("middle", "all", "Server", "A's entity names / A's entity rows, each round / A's validation MRR"),
            Box(
                "right",
                "all",
                "Hospital B",
                "mean rows of its own names; / less its own: the others' mean / own triples and relation rows",
            ),
            Box("below", "all", "Server and B together", "both views: A's own rows, / and B's relations to read them"),
            receiver("nothing", "the statement, and sizes: / how many rows A has"),
            outsider("nothing, unless someone / gives rows away"),
        ),
        (
            Arrow("left", "middle", "all", "names, / rows", back=True),
            Arrow("middle", "right", "all", "mean", back=True),
            Arrow("left", "below left", "nothing", "a statement, sizes"),
            Arrow("middle", "below", "all", "collude"),
        ),
    ),
    "fedr": Picture(
        "FedR: relation rows are averaged",
        (
            owner("triples stay / entity names stay / entity rows stay"),
            Box("middle", "all", "Server", "A's relation names / A's relation rows, each round / A's validation MRR"),
            Box("right", "all", "Hospital B", "mean rows of its own relations; / less its own: the others' mean"),
            Box("below", "all", "Server and B together", "both views: A's relation rows; / no entity row of A's"),
            receiver("nothing", "the statement, and sizes: / how many rows A has"),
            outsider("nothing, unless someone / gives rows away"),
        ),
        (
            Arrow("left", "middle", "all", "names, / rows", back=True),
            Arrow("middle", "right", "all", "mean", back=True),
            Arrow("left", "below left", "nothing", "a statement, sizes"),
            Arrow("middle", "below", "all", "collude"),
        ),
    ),
    "secure": Picture(
        "FedR with secure sums and private names",
        (
            owner("triples stay / entity names and rows stay / relation names stay / rows leave under masks"),
            Box(
                "middle",
                "sums",
                "Server",
                "pseudonyms of all names / how many have each / sums of rows, each round / A's validation MRR",
            ),
            Box(
                "right",
                "sums",
                "Hospital B",
                "means of all rows, and how / many parties have each; may / guess names, up to a bound",
            ),
            Box("below", "sums", "Server and B together", "sums less B's part; with all / but A: A's rows exactly"),
            receiver("nothing", "the statement, and sizes, / the same for all parties"),
            outsider("nothing, unless someone / gives rows away"),
        ),
        (
            Arrow("left", "middle", "nothing", "masked", back=True),
            Arrow("middle", "right", "sums", "means", back=True),
            Arrow("left", "below left", "nothing", "a statement, sizes"),
            Arrow("middle", "below", "sums", "collude"),
        ),
    ),
    "counts": Picture(
        "Private FedE, noisy counts (S4, the default)",
        (
            owner("triples stay / counts leave once, with / noise that A draws itself"),
            Box("middle", "noisy", "Server", "A's names / A's noisy counts, once / (with --secure: their sum)"),
            Box("right", "noisy", "Hospital B", "the sum of noisy counts, / for its own names"),
            Box("below", "noisy", "Server and B together", "both: the same bound holds"),
            receiver("noisy", "the statement with epsilon; / of a party of its own: the model"),
            outsider("the same bound, whatever / it is given", kind="noisy"),
        ),
        (
            Arrow("left", "middle", "noisy", "counts / + noise"),
            Arrow("middle", "right", "noisy", "sum", back=True),
            Arrow("left", "below left", "noisy", "what may be published"),
            Arrow("middle", "below", "noisy", "collude"),
            Arrow("right", "below right", "noisy", "publishes"),
        ),
    ),
    "steps": Picture(
        "Private FedE, noisy steps (S1)",
        (
            owner("triples, exact metrics stay / every step is clipped, with / noise on all rows"),
            Box("middle", "noisy", "Server", "A's entity names / A's rows, each round, / made by noisy steps alone"),
            Box("right", "noisy", "Hospital B", "the mean of such rows, / each round"),
            Box("below", "noisy", "Server and B together", "both, over all rounds: / the same bound holds"),
            receiver("noisy", "the statement with epsilon; / of a party of its own: the model"),
            outsider("the same bound, whatever / it is given", kind="noisy"),
        ),
        (
            Arrow("left", "middle", "noisy", "names, / rows", back=True),
            Arrow("middle", "right", "noisy", "mean", back=True),
            Arrow("left", "below left", "noisy", "what may be published"),
            Arrow("middle", "below", "noisy", "collude"),
            Arrow("right", "below right", "noisy", "publishes"),
        ),
    ),
    "dpkge": Picture(
        "DPKGE: one owner, confidential and unrestricted statements",
        (
            owner("confidential: noisy steps / unrestricted: plain steps / metrics stay", name="Owner"),
            Box(
                "middle",
                "noisy",
                "Receiver of shareable/",
                "rows of both tables, all names, / the statement with epsilon",
            ),
            Box(
                "below",
                "noisy",
                "... of confidential triples",
                "at most what epsilon allows; / what public ones imply, besides",
            ),
            Box("right", "noisy", "Outsider", "whatever the receiver / gives on"),
            Box(
                "below right",
                "all",
                "... of unrestricted triples",
                "anything: they are public, / because the owner says so",
            ),
        ),
        (
            Arrow("left", "middle", "noisy", "model"),
            Arrow("middle", "right", "noisy", "model"),
            Arrow("middle", "below", "noisy", "learns"),
            Arrow("right", "below right", "all", "learns"),
        ),
    ),
    "network": Picture(
        "Over a network: parties, a broker, a coordinator",
        (
            owner("triples and key stay / connects outwards only / signs every letter"),
            Box(
                "middle",
                "all",
                "Broker",
                "reads letters: rows, or masked / numbers. May delay, lose and / repeat, not change or write them",
            ),
            Box(
                "right",
                "all",
                "Coordinator",
                "what the server of the recipe / sees; metrics of parties, / unless training is private",
            ),
            Box("below", "nothing", "Wire tapper", "TLS 1.3: sizes and times / (with --plain: all of it)"),
            receiver("nothing", "as the recipe has it"),
            outsider("no key on the roster: / is not let in"),
        ),
        (
            Arrow("left", "middle", "all", "signed / letters", back=True),
            Arrow("middle", "right", "all", "signed / letters", back=True),
            Arrow("middle", "below", "nothing", "encrypted"),
            Arrow("left", "below left", "nothing", ""),
        ),
    ),
}


def main() -> None:
    for name, picture in PICTURES.items():
        (FOLDER / f"threat-{name}.svg").write_text(picture.drawn())


if __name__ == "__main__":
    main()
