"""Tacit: learn knowledge-graph embeddings from graphs that may not be shown to each other."""

import logging
import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tacit.attacks.attack import Findings, attack
    from tacit.errors import BadInput, TacitError
    from tacit.federated import FederatedRun, federate
    from tacit.files import read_graph, read_parties, write_graph, write_parties
    from tacit.graph import Graph
    from tacit.inspection import inspect
    from tacit.marking import group, mark, select
    from tacit.parties import Parties, partition, pool
    from tacit.privacy.onerun import OneRun, audit
    from tacit.reporting import report
    from tacit.run import Run, train
    from tacit.settings import Settings
    from tacit.sources import import_graph, read_mapping
    from tacit.tuning import tune

__version__ = "0.1.0"
__all__ = [
    "BadInput",
    "FederatedRun",
    "Findings",
    "Graph",
    "OneRun",
    "Parties",
    "Run",
    "Settings",
    "TacitError",
    "attack",
    "audit",
    "federate",
    "group",
    "import_graph",
    "inspect",
    "mark",
    "partition",
    "pool",
    "read_graph",
    "read_mapping",
    "read_parties",
    "report",
    "select",
    "train",
    "tune",
    "write_graph",
    "write_parties",
]

# Where other work has the cores, OpenMP threads that wait by spinning make torch twenty times slower, and threads that
# sleep at once make small steps twice as slow even where they have the cores: so they spin for some microseconds. It
# takes effect if torch is not loaded yet, and gives way to whoever sets either variable.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")
logging.getLogger(__name__).addHandler(logging.NullHandler())

# Imported when first used: a GPU box or an air-gapped machine has torch and NumPy, and maybe nothing else.
_HOME = {
    "BadInput": "errors",
    "FederatedRun": "federated",
    "Findings": "attacks.attack",
    "Graph": "graph",
    "OneRun": "privacy.onerun",
    "Parties": "parties",
    "Run": "run",
    "Settings": "settings",
    "TacitError": "errors",
    "attack": "attacks.attack",
    "audit": "privacy.onerun",
    "federate": "federated",
    "group": "marking",
    "import_graph": "sources",
    "inspect": "inspection",
    "mark": "marking",
    "partition": "parties",
    "pool": "parties",
    "read_graph": "files",
    "read_mapping": "sources",
    "read_parties": "files",
    "report": "reporting",
    "select": "marking",
    "train": "run",
    "tune": "tuning",
    "write_graph": "files",
    "write_parties": "files",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'tacit' has no attribute {name!r}")
    return getattr(import_module(f"tacit.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
