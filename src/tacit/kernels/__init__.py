"""The hot path: the gradient of a chunk of examples, by one contract and several implementations."""

from __future__ import annotations

import logging
import os
from functools import cache
from importlib.util import find_spec
from typing import Any

from tacit.errors import BadValue
from tacit.kernels.contract import ABSENT, Chunk, Clipped, Gradients, Kernel, Objective, Plain, Rule
from tacit.kernels.reference import Reference, row_gradients

LOG = logging.getLogger(__name__)


def _reference() -> type[Kernel]:
    return Reference


def _compiled() -> type[Kernel]:
    from tacit.kernels.compiled import Compiled

    return Compiled


def _numba() -> type[Kernel]:
    from tacit.kernels.cpu import Numba

    return Numba


def _triton() -> type[Kernel]:
    from tacit.kernels.gpu import Triton

    return Triton


KERNELS = {"reference": _reference, "compiled": _compiled, "numba": _numba, "triton": _triton}
"""Each by a function that imports it: a machine has what it has."""
FASTEST = {"cpu": "numba", "cuda": "triton"}


@cache
def _say_missing(name: str, device: str) -> None:
    """Once."""
    LOG.warning("%s is not installed: training on this %s takes the reference kernel, which is slow. "
                "`pip install %s` makes it many times faster.", name, device.upper(), name)  # fmt: skip


def kernel_for(name: str, device: Any) -> type[Kernel]:
    """The kernel of that name; "auto": the fastest that this device and this machine have."""
    if name == "auto":
        name = FASTEST.get(device.type, "reference")
        if name != "reference" and find_spec(name) is None:
            _say_missing(name, device.type)
            name = "reference"
    if name not in KERNELS:
        raise BadValue(f"the kernel is auto, {' or '.join(KERNELS)}; not {name!r}")
    home = {kernel: kind for kind, kernel in FASTEST.items()}.get(name, device.type)
    if home != device.type and not (name == "triton" and os.environ.get("TRITON_INTERPRET") == "1"):
        raise BadValue(f"the kernel {name} is for a {home} device, and this is {device.type}")
    if name in FASTEST.values() and find_spec(name) is None:
        raise BadValue(f"the kernel {name} needs the package of that name: pip install {name}")
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
