"""How a gradient moves rows. All work on stacked tables: each party has its own count of steps, and rests if inactive.

An optimizer holds settings only; its state is tensors that the cohort keeps, so that it can be saved and reset.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from tacit.errors import BadValue

Tensor = Any


@dataclass(frozen=True)
class Optimizer:
    """Base: `memory` tensors per table, and `moved` says what becomes of rows and memory."""

    refused: ClassVar[str | None] = None
    memory: ClassVar[int] = 0
    touched_only: ClassVar[bool] = False
    """Only rows that the step wrote to are moved."""
    learning_rate: float = 1e-3

    def __post_init__(self) -> None:
        if not self.learning_rate > 0:
            raise BadValue(f"learning_rate is above 0, not {self.learning_rate}")
        if not getattr(self, "eps", 1.0) >= 0:
            raise BadValue(f"eps is at least 0, not {self.eps}")  # type: ignore[attr-defined]

    def moved(
        self, rows: Tensor, gradient: Tensor, memory: tuple[Tensor, ...], step: Tensor, pace: Tensor
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The rows and the memory after a step. `step`, 1 for the first, and `pace`, which the learning rate is
        multiplied by, broadcast against the rows.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class SGD(Optimizer):
    """Gradient descent, with momentum if asked for (Polyak 1964)."""

    memory = 1
    momentum: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.momentum < 1:
            raise BadValue(f"momentum is in [0, 1), not {self.momentum}")

    def moved(
        self, rows: Tensor, gradient: Tensor, memory: tuple[Tensor, ...], step: Tensor, pace: Tensor
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        velocity = self.momentum * memory[0] + gradient
        return rows - self.learning_rate * pace * velocity, (velocity,)


@dataclass(frozen=True)
class Adagrad(Optimizer):
    """Duchi, Hazan and Singer: "Adaptive subgradient methods", JMLR 2011."""

    memory = 1
    eps: float = 1e-10

    def moved(
        self, rows: Tensor, gradient: Tensor, memory: tuple[Tensor, ...], step: Tensor, pace: Tensor
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        squares = memory[0] + gradient.square()
        return rows - self.learning_rate * pace * gradient / (squares.sqrt() + self.eps), (squares,)


@dataclass(frozen=True)
class Adam(Optimizer):
    """Kingma and Ba: "Adam", ICLR 2015; dense, as the papers use it: rows without a gradient move on by momentum."""

    memory = 2
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (0 <= self.beta1 < 1 and 0 <= self.beta2 < 1):
            raise BadValue(f"beta1 and beta2 are in [0, 1), not {self.beta1} and {self.beta2}")

    def moved(
        self, rows: Tensor, gradient: Tensor, memory: tuple[Tensor, ...], step: Tensor, pace: Tensor
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        mean = torch.lerp(memory[0], gradient, 1 - self.beta1)
        square = self.beta2 * memory[1] + (1 - self.beta2) * gradient.square()
        step = step.double()  # in float32 the first corrections would be off in the sixth digit
        first, second = 1 - self.beta1**step, (1 - self.beta2**step).sqrt()
        update = mean / (square.sqrt() / second.to(rows.dtype) + self.eps)
        return rows - (self.learning_rate * pace / first).to(rows.dtype) * update, (mean, square)


@dataclass(frozen=True)
class SparseAdam(Adam):
    """Adam that moves only the rows a step touched: for tables too large to move all of.

    As torch's SparseAdam, but for eps, which is added after the second moment is corrected, as in Adam.
    """

    refused = "the rows it moves are the rows of the triples that were drawn: use adam"
    touched_only = True


OPTIMIZERS: dict[str, type[Optimizer]] = {"adam": Adam, "adagrad": Adagrad, "sgd": SGD, "sparse-adam": SparseAdam}
