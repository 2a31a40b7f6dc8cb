"""The hot path: the gradient of a chunk of examples, by one contract and several implementations."""

from __future__ import annotations

import logging
from importlib.util import find_spec
from typing import Any

from tacit.errors import BadValue
from tacit.kernels.contract import ABSENT, Chunk, Clipped, Gradients, Kernel, Objective, Plain, Rule
from tacit.kernels.reference import Reference, row_gradients

LOG = logging.getLogger(__name__)


def _reference() -> type[Kernel]:
    return Reference


def _triton() -> type[Kernel]:
    from tacit.kernels.gpu import Triton

    return Triton


KERNELS = {"reference": _reference, "triton": _triton}
"""Each by a function that imports it: a machine has what it has."""


def kernel_for(name: str, device: Any) -> type[Kernel]:
    """The kernel of that name; "auto": the fastest that this device and this machine have."""
    if name == "auto":
        name = "reference"
        if device.type == "cuda":
            if find_spec("triton") is not None:
                name = "triton"
            else:
                LOG.warning("triton is not installed: training on this GPU takes the reference kernel, which is slow")
    if name not in KERNELS:
        raise BadValue(f"the kernel is auto, {' or '.join(KERNELS)}; not {name!r}")
    return KERNELS[name]()


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
    "kernel_for",
    "row_gradients",
]
