"""Tacit: learn knowledge-graph embeddings from graphs that may not be shown to each other."""

from tacit.files import read_graph, write_graph
from tacit.graph import Graph

__version__ = "0.1.0"
__all__ = ["Graph", "read_graph", "write_graph"]
