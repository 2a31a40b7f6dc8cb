"""The reference kernel with its arithmetic compiled by torch: for scorers and losses that have no fused kernel.

It is not chosen by itself: compiling takes most of a minute, on a CPU it needs a C++ compiler, and on small steps it
gains nothing.
"""

from __future__ import annotations

import torch

from tacit.kernels.contract import Objective
from tacit.kernels.reference import Reference
from tacit.models import Layout


class Compiled(Reference):
    """The reference, compiled when first used. Shapes that change are compiled once more, for any size."""

    def __init__(self, objective: Objective, layout: Layout) -> None:
        super().__init__(objective, layout)
        self.arithmetic = torch.compile(super().arithmetic)  # type: ignore[method-assign]
