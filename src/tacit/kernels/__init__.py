"""The hot path: the gradient of a chunk of examples, by one contract and several implementations."""

from tacit.kernels.contract import ABSENT, Chunk, Clipped, Gradients, Kernel, Objective, Plain, Rule
from tacit.kernels.reference import Reference, row_gradients

KERNELS: dict[str, type[Kernel]] = {"reference": Reference}

__all__ = [
    "ABSENT",
    "KERNELS",
    "Chunk",
    "Clipped",
    "Gradients",
    "Kernel",
    "Objective",
    "Plain",
    "Reference",
    "Rule",
    "row_gradients",
]
