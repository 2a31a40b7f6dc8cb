"""A model's rows in PyKEEN's own models, for its evaluators, predictions and training loops.

PyKEEN is imported by this module alone. Its ids are the graph's: entity 3 there is `graph.entities[3]`.
"""

from __future__ import annotations

from typing import Any

import torch

from tacit.errors import TacitError
from tacit.models.bilinear import RESCAL, ComplEx, DistMult
from tacit.models.model import Model
from tacit.models.neural import NTN
from tacit.models.scorer import Scorer
from tacit.models.translational import RotatE, TransE, TransH

try:
    from pykeen.models import ERModel
    from pykeen.nn import Embedding
    from pykeen.nn.modules import (
        ComplExInteraction,
        DistMultInteraction,
        NTNInteraction,
        RESCALInteraction,
        RotatEInteraction,
        TransEInteraction,
        TransHInteraction,
    )
    from pykeen.triples import KGInfo
    from pykeen.utils import NoRandomSeedNecessary
except ImportError:
    raise TacitError('PyKEEN is not installed: pip install "tacit-kg[pykeen]"') from None

Tensor = Any
REFUSED = {
    "TransM": "PyKEEN has no weight per relation",
    "TransR": "PyKEEN clips the length of what it projected, which changes scores",
    "TransD": "PyKEEN clips the length of what it projected, which changes scores",
    "QuatE": "PyKEEN's score has the other sign",
    "TuckER": "PyKEEN's has batch normalisation, which makes a score depend on the others of its batch",
}
"""Why a score would be another there."""
TAKEN = ("TransE", "TransH", "RotatE", "DistMult", "ComplEx", "RESCAL", "NTN")


class SumOfModuli(RotatEInteraction):  # type: ignore[misc]
    """RotatE as its authors have it: the sum of the moduli. PyKEEN's takes the L2 norm, which ranks otherwise."""

    def forward(self, h: Tensor, r: Tensor, t: Tensor) -> Tensor:
        """The score of rows as complex numbers."""
        return -(h * r - t).abs().sum(-1)


def to_pykeen(model: Model) -> ERModel:
    """A PyKEEN model with these rows and this score, but for the margin gamma, which moves no rank.

    Training there begins with these rows. It has no constraints, so turns and normals need not stay at length 1.

    Parameters
    ----------
    model
        Of a scorer in `TAKEN`; without inverse relations and without a prior.
    """
    if model.reciprocal:
        raise TacitError("the model has inverse relations to ask for heads by, and PyKEEN numbers those otherwise: "
                         "train with training.reciprocal = false")  # fmt: skip
    if model.prior is not None:
        raise TacitError("noisy counts are added to this model's scores, and PyKEEN's models have no place for them")
    entity, relation = (rows.detach().cpu() for rows in (model.tables.entity, model.tables.relation))
    interaction, entity, relation = _translated(model.scorer, entity, relation)
    with torch.random.fork_rng(devices=[]):  # nobody else's draws shall move by what is drawn here and not kept
        made = ERModel(
            triples_factory=KGInfo(model.entities, model.relations, create_inverse_triples=False),
            interaction=interaction,
            entity_representations=[_table(entity)],
            relation_representations=[_table(part) for part in relation],
            random_seed=NoRandomSeedNecessary,
        )
    made._random_seed = None  # it forgets to say so, and its training loops ask
    made.eval()
    return made


def _translated(scorer: Scorer, entity: Tensor, relation: Tensor) -> tuple[Any, Tensor, list[Tensor]]:
    """PyKEEN's score, and the rows as it reads them: those of a relation may be several tables."""
    kind, dim = type(scorer), entity.shape[1]
    if isinstance(scorer, TransE) and kind is TransE:
        return TransEInteraction(p=scorer.norm), entity, [relation]
    if isinstance(scorer, TransH):
        move, normal = relation.chunk(2, -1)
        return TransHInteraction(p=scorer.norm), entity, [normal, move]
    if isinstance(scorer, RotatE):
        angle = scorer.angles(relation)
        return SumOfModuli(), _complex(entity), [torch.polar(torch.ones_like(angle), angle)]
    if isinstance(scorer, DistMult):
        return DistMultInteraction(), entity, [relation]
    if isinstance(scorer, ComplEx):
        return ComplExInteraction(), _complex(entity), [_complex(relation)]
    if isinstance(scorer, RESCAL):
        return RESCALInteraction(), entity, [relation.unflatten(-1, (dim, dim))]
    if isinstance(scorer, NTN):
        k = scorer.slices
        tensor, linear, bias, out = relation.split([k * dim * dim, k * 2 * dim, k, k], -1)
        of_head, of_tail = linear.unflatten(-1, (k, 2 * dim)).chunk(2, -1)
        return NTNInteraction(activation=torch.nn.Tanh()), entity, [
            tensor.unflatten(-1, (k, dim, dim)), of_head, of_tail, bias, out
        ]  # fmt: skip
    why = REFUSED.get(kind.__name__, "it is not known to be the same there")
    raise TacitError(f"the scorer {kind.__name__} does not go to PyKEEN: {why}. {', '.join(TAKEN)} do.")


def _complex(rows: Tensor) -> Tensor:
    return torch.complex(*(part.contiguous() for part in rows.chunk(2, -1)))


def _table(rows: Tensor) -> Embedding:
    """A table that begins with these rows, and begins with them again whenever it is reset."""
    values = torch.view_as_real(rows) if rows.is_complex() else rows
    return Embedding(max_id=len(rows), shape=tuple(rows.shape[1:]), dtype=rows.dtype, initializer=Beginning(values))


class Beginning:
    """Gives a copy of the same rows each time: PyKEEN's training loops reset a model before they begin."""

    def __init__(self, rows: Tensor):
        self.rows = rows.clone()

    def __call__(self, table: Tensor) -> Tensor:
        """In the shape of the table that asks."""
        return self.rows.reshape(table.shape).clone()
