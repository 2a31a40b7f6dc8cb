"""What the fused kernels have in common: which work they cover, and who does all other."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from tacit.kernels.contract import Chunk, Clipped, Gradients, Objective, Rule
from tacit.kernels.products import Products
from tacit.losses import Logistic, Margin, SelfAdversarial, Softmax
from tacit.models import Layout, Tables
from tacit.models.bilinear import ComplEx, DistMult
from tacit.models.translational import RotatE, TransE

Tensor = Any
LOSS_NUMBERS: dict[type, int] = {SelfAdversarial: 0, Logistic: 1, Softmax: 2, Margin: 3}


class Numbers(NamedTuple):
    """An objective and a rule, as numbers."""

    model: int
    """0 TransE L1, 1 TransE L2, 2 DistMult, 3 RotatE, 4 ComplEx."""
    loss: int
    gamma: Any
    phase: Any
    """Radians per unit of a relation's angle."""
    alpha: Any
    """The loss's own number: temperature or margin."""
    positive: bool
    """Whether the positive part of the loss counts."""
    negative: bool


def model_number(scorer: Any) -> int | None:
    """Which of the kernels' scores a scorer is; None: none of them."""
    if type(scorer) is TransE:
        return 0 if scorer.norm == 1 else 1
    return {DistMult: 2, RotatE: 3, ComplEx: 4}.get(type(scorer))


@dataclass
class Places:
    """The fields of a chunk that the kernels read: contiguous, one entry per example."""

    head: Tensor
    relation: Tensor
    tail: Tensor
    asks_head: Tensor
    weight: Tensor
    party: Tensor


class Fused:
    """Base of the kernels that do a whole chunk at once. What they do not cover is left to matrix products, where
    all entities are candidates, or to the reference.
    """

    def __init__(self, objective: Objective, layout: Layout) -> None:
        self.objective, self.layout = objective, layout
        self.others = Products(objective, layout)

    def covers(self) -> bool:
        """Whether the kernels can do this objective at all."""
        objective = self.objective
        known = model_number(objective.scorer) is not None and type(objective.loss) in LOSS_NUMBERS
        return known and not objective.regulariser.weight

    @property
    def name(self) -> str:
        """Of the kernel that does this objective."""
        return type(self).__name__.lower() if self.covers() else "products" if self.others.covers() else "reference"

    def accumulate(self, tables: Tables, chunk: Chunk, rule: Rule, into: Gradients) -> tuple[Tensor, Tensor | None]:
        sampled = chunk.negatives is not None or chunk.pool is not None
        whole = chunk.drop_entity is None and chunk.drop_relation is None and tables.entity.dtype == torch.float32
        clipped = isinstance(rule, Clipped)
        alone = (
            not clipped
            or chunk.unit is None
            or bool((chunk.unit == torch.arange(len(chunk), device=chunk.unit.device)).all())
        )
        parts = rule.part == "both" or self.objective.loss.apart
        if not (self.covers() and sampled and whole and alone and parts):
            return self.others.accumulate(tables, chunk, rule, into)
        losses = tables.entity.new_zeros(len(chunk))
        norms = tables.entity.new_zeros(len(chunk)) if clipped else None
        if len(chunk):
            ids = chunk.negatives if chunk.pool is None else chunk.pool
            assert ids is not None
            fields = (getattr(chunk, name).contiguous() for name in Places.__dataclass_fields__)
            self.launch(tables, Places(*fields), ids.contiguous(), chunk.pool is not None, rule, into.tables, losses,
                        norms)  # fmt: skip
            into.entity_rows += [chunk.head, chunk.tail, ids]
            into.relation_rows.append(chunk.relation)
        return losses, norms

    def launch(self, tables: Tables, asked: Places, ids: Tensor, pooled: bool, rule: Rule, into: Tables, losses: Tensor,
               norms: Tensor | None) -> None:  # fmt: skip
        """Do every example; `losses` and `norms` are filled in."""
        raise NotImplementedError

    def epochs(self) -> Any:
        """The class that does whole epochs with this kernel."""
        raise NotImplementedError

    def numbers(self, rule: Rule, relation_width: int) -> Numbers:
        scorer, loss = self.objective.scorer, self.objective.loss
        model = model_number(scorer)
        assert model is not None
        phase = 0.0
        if isinstance(scorer, RotatE):
            phase = math.pi / (scorer.init_scale or scorer.spread(relation_width))
        own = getattr(loss, "alpha", getattr(loss, "margin", 1.0))
        return Numbers(
            model,
            LOSS_NUMBERS[type(loss)],
            np.float32(getattr(scorer, "gamma", 0.0)),
            np.float32(phase),
            np.float32(own),
            rule.part != "negative",
            rule.part != "positive",
        )
