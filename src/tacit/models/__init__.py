"""Scorers by name. To add one: a class with its formula and its paper, and a line in `SCORERS`."""

from __future__ import annotations

from tacit.models.bilinear import RESCAL, ComplEx, DistMult, QuatE, TuckER
from tacit.models.neural import NTN
from tacit.models.scorer import DistanceScorer, Part, Scorer
from tacit.models.tables import Layout, Prior, Tables
from tacit.models.translational import RotatE, TransD, TransE, TransH, TransM, TransR

SCORERS: dict[str, type[Scorer]] = {
    "transe": TransE,
    "transh": TransH,
    "transr": TransR,
    "transd": TransD,
    "transm": TransM,
    "rotate": RotatE,
    "rescal": RESCAL,
    "distmult": DistMult,
    "complex": ComplEx,
    "quate": QuatE,
    "tucker": TuckER,
    "ntn": NTN,
}

__all__ = ["SCORERS", "DistanceScorer", "Layout", "Part", "Prior", "Scorer", "Tables"]
