"""Graphs and parties in from any file, and out again.

`tacit.files` needs pyarrow and pyoxigraph; everything else in the training path does without, so this package is only
imported by what reads or writes.
"""

from tacit.files.graphs import BadRows, read_graph, read_splits, write_graph
from tacit.files.parties import (
    PARTIES,
    fill_parties,
    holds_parties,
    read_links,
    read_parties,
    write_parties,
)
from tacit.files.records import FileReading, Reading

__all__ = [
    "PARTIES",
    "BadRows",
    "FileReading",
    "Reading",
    "fill_parties",
    "holds_parties",
    "read_graph",
    "read_links",
    "read_parties",
    "read_splits",
    "write_graph",
    "write_parties",
]
