"""Tacit: learn knowledge-graph embeddings from graphs that may not be shown to each other."""

import logging

from tacit.errors import BadInput, TacitError
from tacit.files import read_graph, write_graph
from tacit.graph import Graph
from tacit.inspection import inspect
from tacit.partition import Parties, partition, pool, read_parties, write_parties

__version__ = "0.1.0"
logging.getLogger(__name__).addHandler(logging.NullHandler())
__all__ = [
    "BadInput",
    "Graph",
    "Parties",
    "TacitError",
    "inspect",
    "partition",
    "pool",
    "read_graph",
    "read_parties",
    "write_graph",
    "write_parties",
]
