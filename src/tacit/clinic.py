"""A made-up clinical federation: several hospitals, each with patients of its own and a share of common knowledge.

Nothing here is about anyone. The data are drawn so that they behave like clinical graphs: disease areas give latent
structure, degrees are skewed, medical knowledge (which drug treats what, which gene is involved) is known to one
hospital or another but to none in full, and patients follow from it. So hospitals have something to gain from each
other, which is what a federation is for, and something to lose, which is what an attack looks for.

That gain is by design: sizes, sharpness and popularity were chosen, out of some fourteen settings, for FedE to beat
Local. It shows that a federation works as it should, and says nothing about how much real hospitals would gain.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from tacit.draws import Purpose, Stream
from tacit.graph import SPLITS, Graph
from tacit.parties import FRESH_SPLIT, Parties

Floats = npt.NDArray[np.float64]
HOSPITALS = ("riverside", "northgate", "st-anna", "lakeview", "hillcrest", "old-harbour")


@dataclass(frozen=True)
class Size:
    """How much of everything; patients and providers are per hospital."""

    hospitals: int
    areas: int
    conditions: int
    drugs: int
    genes: int
    symptoms: int
    patients: int
    providers: int


SIZES = {
    "small": Size(hospitals=3, areas=10, conditions=60, drugs=80, genes=80, symptoms=36, patients=24, providers=4),
    "demo": Size(hospitals=5, areas=12, conditions=200, drugs=300, genes=300, symptoms=100, patients=60, providers=6),
}
SizeName = Literal["small", "demo"]

ORGANS = (
    "renal",
    "cardiac",
    "hepatic",
    "pulmonary",
    "gastric",
    "dermal",
    "neural",
    "ocular",
    "skeletal",
    "vascular",
    "thyroid",
    "splenic",
)
COURSES = (
    "acute",
    "chronic",
    "recurrent",
    "congenital",
    "idiopathic",
    "secondary",
    "atypical",
    "progressive",
    "mild",
    "severe",
)
PROCESSES = (
    "inflammation",
    "fibrosis",
    "insufficiency",
    "infection",
    "dystrophy",
    "stenosis",
    "neoplasia",
    "ischaemia",
)
SIGNS = ("pain", "fatigue", "swelling", "fever", "rash", "cough", "dizziness", "nausea", "tremor", "pallor")
STEMS = ("vel", "tor", "mira", "zan", "lumo", "pex", "dari", "quin", "sol", "fena", "bruto", "cale")
MIDDLES = ("ba", "co", "di", "fu", "ga", "lo", "me", "nu", "pa", "ri", "sa", "te")
ENDINGS = ("olol", "pril", "statin", "mab", "azole", "cillin", "sartan", "idine", "oxacin", "tinib", "parin", "gliptin")
LETTERS = "ABCDEFGHKLMNPRST"
SURNAMES = (
    "Adler",
    "Brandt",
    "Chen",
    "Diallo",
    "Eriksen",
    "Fuentes",
    "Gruber",
    "Haddad",
    "Ivanov",
    "Jansen",
    "Kimura",
    "Lindqvist",
    "Moreau",
    "Nowak",
    "Okafor",
)

SHARPNESS = 5.0
"""How strongly a statement follows from its latent structure; at 0 everything would be chance."""


class _World:
    """The common medical ground: named things with a latent position each, the same for every hospital."""

    def __init__(self, size: Size, seed: int):
        self.size, self.seed, self.calls = size, seed, 0
        self.centres = self.normal(size.areas, 8) * 1.5
        self.conditions, self.drugs = self.place(size.conditions), self.place(size.drugs)
        self.genes, self.symptoms = self.place(size.genes), self.place(size.symptoms)
        areas = range(size.areas)
        self.names = {
            "condition": _distinct(
                f"{c} {ORGANS[a % len(ORGANS)]} {p}" for c in COURSES for p in PROCESSES for a in areas
            ),
            "drug": _distinct(f"{s}{m}{ENDINGS[a % len(ENDINGS)]}" for s in STEMS for m in MIDDLES for a in areas),
            "gene": _distinct(f"{x}{y}{z}{a + 1}" for x in LETTERS for y in LETTERS for z in "KXR" for a in areas),
            "symptom": _distinct(f"{ORGANS[a % len(ORGANS)]} {s}" for s in SIGNS for a in areas),
        }

    def stream(self) -> Stream:
        """Fresh draws: every call of the generator is a step of its own."""
        self.calls += 1
        return Stream(self.seed, Purpose.DATASET, step=self.calls)

    def normal(self, rows: int, columns: int) -> Floats:
        drawn: Floats = self.stream().normal(rows * columns).reshape(rows, columns)
        return drawn

    def place(self, count: int) -> Floats:
        """Positions around the centre of an area: thing i belongs to area i modulo the number of areas."""
        return self.centres[np.arange(count) % self.size.areas] + 0.6 * self.normal(count, 8)

    def name(self, kind: str, index: int) -> str:
        return f"{kind}: {self.names[kind][index]}"

    def choose(self, given: Floats, among: Floats, each: Floats, popularity: float = 0.3) -> list[tuple[int, int]]:
        """For row i of `given` about `each[i]` of `among`: the nearer and the more popular, the likelier."""
        logits = -SHARPNESS * ((given[:, None] - among[None]) ** 2).mean(axis=2)
        logits = logits + popularity * self.normal(1, len(among))
        noise = -np.log(-np.log(self.stream().uniform(logits.size).reshape(logits.shape) + 1e-300))
        ranked = np.argsort(-(logits + noise), axis=1)  # Gumbel noise and the top k: sampling without replacement
        count = np.floor(each + self.stream().uniform(len(given))).astype(int)
        return [(i, int(j)) for i, k in enumerate(count) for j in ranked[i, :k]]


def _distinct(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))


def clinic(size: SizeName = "demo", seed: int = 0) -> Parties:
    """The embedded federation in one of two sizes; one party per hospital, split 80/10/10.

    >>> parties = clinic("small", seed=1)
    >>> parties.names
    ('riverside', 'northgate', 'st-anna')
    """
    sizes = SIZES[size]
    world = _World(sizes, seed)
    common = _knowledge(world)
    owner = world.stream().integers(len(common), sizes.hospitals).tolist()
    graphs = []
    for hospital in range(sizes.hospitals):
        known = [triple for triple, who in zip(common, owner, strict=True) if who == hospital]
        triples = sorted({*known, *_records(world, HOSPITALS[hospital])})
        order = Stream(seed, Purpose.SPLIT, hospital).permutation(len(triples)).tolist()
        cuts = np.rint(np.cumsum([0, *FRESH_SPLIT]) * len(triples)).astype(int).tolist()
        graphs.append(Graph.from_triples(*([triples[i] for i in order[a:b]] for a, b in pairwise(cuts))))
    origin = {"by": "given", "dataset": f"clinic-{size}", "seed": seed}
    return Parties(HOSPITALS[: sizes.hospitals], tuple(graphs), None, origin)


Triple = tuple[str, str, str]


def _knowledge(world: _World) -> list[Triple]:
    """What medicine knows, whoever knows it."""
    size, name = world.size, world.name

    def each(count: int, mean: float) -> Floats:
        skewed: Floats = mean * np.exp(0.5 * world.normal(1, count)[0] - 0.125)
        return skewed

    facts = [
        (name("drug", i), "treats", name("condition", j))
        for i, j in world.choose(world.drugs, world.conditions, each(size.drugs, 5))
    ]
    facts += [
        (name("drug", i), "targets", name("gene", j))
        for i, j in world.choose(world.drugs, world.genes, each(size.drugs, 5))
    ]
    facts += [
        (name("gene", i), "is associated with", name("condition", j))
        for i, j in world.choose(world.genes, world.conditions, each(size.genes, 6))
    ]
    facts += [
        (name("condition", i), "shows as", name("symptom", j))
        for i, j in world.choose(world.conditions, world.symptoms, each(size.conditions, 4))
    ]
    facts += [
        (name("drug", i), "interacts with", name("drug", j))
        for i, j in world.choose(world.drugs, world.drugs, each(size.drugs, 4))
        if i != j
    ]
    facts += [
        (name("gene", i), "regulates", name("gene", j))
        for i, j in world.choose(world.genes, world.genes, each(size.genes, 4))
        if i != j
    ]
    return sorted(set(facts))


def _records(world: _World, hospital: str) -> list[Triple]:
    """What a hospital alone knows: its patients and who treats them."""
    size, name = world.size, world.name
    patients = world.place(size.patients)
    providers = world.place(size.providers)
    people = [f"patient: {hospital} {i:04d}" for i in range(size.patients)]
    doctors = [f"provider: Dr {SURNAMES[i % len(SURNAMES)]} {hospital}" for i in range(size.providers)]
    many = np.exp(0.4 * world.normal(1, size.patients)[0])
    records = [
        (people[i], "has condition", name("condition", j))
        for i, j in world.choose(patients, world.conditions, 3 * many)
    ]
    records += [(people[i], "takes", name("drug", j)) for i, j in world.choose(patients, world.drugs, 4 * many)]
    records += [(people[i], "reports", name("symptom", j)) for i, j in world.choose(patients, world.symptoms, 2 * many)]
    records += [
        (people[i], "carries variant of", name("gene", j)) for i, j in world.choose(patients, world.genes, 2 * many)
    ]
    records += [
        (people[i], "is seen by", doctors[j]) for i, j in world.choose(patients, providers, np.ones(size.patients))
    ]
    return records


def write_tables(graph: Graph, folder: Path) -> None:
    """A hospital's graph as the tables it might have come from: records of patients, and knowledge."""
    tables: dict[str, list[Triple]] = {"records": [], "knowledge": []}
    for split in SPLITS:
        for triple in graph.named(split):
            tables["records" if triple[0].startswith("patient: ") else "knowledge"].append(triple)
    for name, rows in tables.items():
        with open(folder / f"{name}.csv", "w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([("head", "relation", "tail"), *sorted(rows)])
