"""What every scorer is: a pure function of gathered rows, larger for what is truer.

A scorer holds no parameters. `Tables` hold them; a scorer says how wide their rows are, how they begin, what they have
to satisfy after a step, and how plausible the triple is that three rows stand for. Because a score depends on nothing
but its own rows (and on weights that all triples share), the gradient with respect to the gathered rows *is* the
gradient of one example, and clipping it costs next to nothing.

Shapes. `score` takes rows of equal leading shape, (..., width) -> (...). `score_tails` and `score_heads` take one query
per line, (b, width), and candidates either common to all queries, (n, width), or each query's own, (b, n, width), and
give (b, n).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch

from tacit.draws import Stream
from tacit.errors import BadValue

Tensor = Any
Part = Literal["entity", "relation"]
Geometry = Literal["product", "l1", "l2", "modulus"]
PIECE = 1 << 22
"""How many numbers are drawn at once when a table begins: bounds the memory of a large one."""


@dataclass(frozen=True)
class Scorer:
    """Base of all scorers; a subclass needs `widths` and either `tail_query` and `head_query`, or `score`.

    Many scores compare a *query* made of the known entity and the relation with the other entity's row, by an inner
    product or a distance; the `geometry` says which. Those get all three ways of scoring from their two queries. The
    others write `score`, and all candidates are scored by broadcasting.
    """

    separable: ClassVar[bool] = True
    """An example's loss depends on its own rows and the shared weights alone, so that private training is possible."""
    geometry: ClassVar[Geometry | None] = None
    frozen: ClassVar[int] = 0
    """How many columns at the end of a relation's row are given, and not learned."""
    statistics: ClassVar[bool] = False
    """Whether rows begin with statistics of the triples (TransM), which privacy forbids unless they are paid for."""

    init: Literal["uniform", "normal"] = "uniform"
    init_scale: float | None = None
    """Half the width of the uniform, or the deviation of the normal, that rows begin with. Default: the scorer's."""

    def __post_init__(self) -> None:
        if self.init not in ("uniform", "normal"):
            raise BadValue(f"rows begin uniform or normal, not {self.init!r}")
        if self.init_scale is not None and not self.init_scale > 0:
            raise BadValue(f"init_scale is above 0, not {self.init_scale}")

    # -- what the tables look like ------------------------------------------------------------------------------------

    def widths(self, dim: int) -> tuple[int, int]:
        """How many numbers a row of the entity table has, and of the relation table."""
        return dim, dim

    def shared_shapes(self, dim: int) -> tuple[tuple[int, ...], ...]:
        """The weights that all triples of a party share; most scorers have none."""
        return ()

    def spread(self, dim: int) -> float:
        """The scale of the first values where `init_scale` gives none: 12 / dim, as FedE's code with gamma 10."""
        return 12.0 / dim

    def initial(self, part: Part | int, rows: int, width: int, dim: int, draw: Stream) -> Tensor:
        """The first values of a table (or of the shared weight of that number), (rows, width) float32.

        Row i depends on the draw and on i alone, not on how many rows there are.
        """
        scale, out = self.init_scale or self.spread(dim), torch.empty(rows * width, device=draw.device)
        for first in range(0, len(out), PIECE):
            size = min(PIECE, len(out) - first)
            if self.init == "uniform":
                out[first : first + size] = torch.as_tensor((2.0 * draw.uniform(size, first) - 1.0) * scale)
            else:
                u = torch.as_tensor(draw.uniform(2 * size, 2 * first))
                radius, angle = torch.sqrt(-2.0 * torch.log1p(-u[0::2])), 2.0 * np.pi * u[1::2]
                out[first : first + size] = radius * torch.cos(angle) * scale
        return out.reshape(rows, width)

    def constrain(self, part: Part, rows: Tensor) -> Tensor:
        """The rows as the model wants them after a step (unit norms and the like). The same tensor: nothing to do."""
        return rows

    # -- scores -------------------------------------------------------------------------------------------------------

    def tail_query(self, head: Tensor, relation: Tensor, shared: tuple[Tensor, ...] = ()) -> Tensor:
        """What a tail is compared with, in the space of entity rows."""
        raise NotImplementedError

    def head_query(self, relation: Tensor, tail: Tensor, shared: tuple[Tensor, ...] = ()) -> Tensor:
        """What a head is compared with, in the space of entity rows."""
        raise NotImplementedError

    def scaled(self, compared: Tensor, relation: Tensor) -> Tensor:
        """The score, given the product or distance; `relation` broadcasts against it but for its last dimension."""
        return compared if self.geometry == "product" else -compared

    def score(self, head: Tensor, relation: Tensor, tail: Tensor, shared: tuple[Tensor, ...] = ()) -> Tensor:
        """How plausible each triple is: rows of equal leading shape in, (...) out."""
        return self.scaled(compare(self.geometry, self.tail_query(head, relation, shared), tail), relation)

    def score_tails(self, head: Tensor, relation: Tensor, tails: Tensor, shared: tuple[Tensor, ...] = ()) -> Tensor:
        """Scores of (head, relation, each candidate): (b, width), (b, width), (n, width) or (b, n, width) -> (b, n)."""
        if self.geometry is None:
            return self.score(head[:, None], relation[:, None], tails, shared)
        query = self.tail_query(head, relation, shared)
        return self.scaled(compare_all(self.geometry, query, tails), relation[:, None])

    def score_heads(self, relation: Tensor, tail: Tensor, heads: Tensor, shared: tuple[Tensor, ...] = ()) -> Tensor:
        """Scores of (each candidate, relation, tail), shaped as in `score_tails`."""
        if self.geometry is None:
            return self.score(heads, relation[:, None], tail[:, None], shared)
        query = self.head_query(relation, tail, shared)
        return self.scaled(compare_all(self.geometry, query, heads), relation[:, None])

    def magnitudes(self, part: Part, rows: Tensor) -> Tensor:
        """The size of each number in a row that is learned, for regularisers: of complex numbers their modulus."""
        learned = rows[..., : rows.shape[-1] - self.frozen] if part == "relation" else rows
        return learned.abs()


@dataclass(frozen=True)
class DistanceScorer(Scorer):
    """A scorer gamma - distance: gamma is what the logistic losses call a distance of nothing, and moves no rank."""

    gamma: float = 10.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.gamma >= 0:
            raise BadValue(f"gamma is at least 0, not {self.gamma}")

    def spread(self, dim: int) -> float:
        return (self.gamma + 2.0) / dim

    def scaled(self, compared: Tensor, relation: Tensor) -> Tensor:
        return self.gamma - compared


def compare(geometry: Geometry | None, query: Tensor, row: Tensor) -> Tensor:
    """Each query with its own row, (..., width) -> (...). Of L2 and moduli the derivative at 0 is 0, not NaN."""
    if geometry == "product":
        return (query * row).sum(-1)
    if geometry == "l1":
        return (query - row).abs().sum(-1)
    if geometry == "l2":
        return torch.linalg.vector_norm(query - row, dim=-1)
    assert geometry == "modulus"
    return modulus(query - row).sum(-1)


def compare_all(geometry: Geometry | None, query: Tensor, rows: Tensor) -> Tensor:
    """Each query, (b, width), with all rows, (n, width) or (b, n, width) -> (b, n); sums may round differently."""
    if geometry == "product":
        return query @ rows.T if rows.dim() == 2 else torch.matmul(rows, query[:, :, None])[..., 0]
    if geometry in ("l1", "l2") and rows.dim() == 2:
        power = 1.0 if geometry == "l1" else 2.0
        return torch.cdist(query, rows, p=power, compute_mode="donot_use_mm_for_euclid_dist")
    return compare(geometry, query[:, None], rows)


@contextmanager
def matrix_products(precision: Literal["float32", "tf32"]) -> Iterator[None]:
    """What matrix products of float32 on a GPU multiply in, whatever was asked for elsewhere."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision({"float32": "highest", "tf32": "high"}[precision])
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def modulus(rows: Tensor) -> Tensor:
    """The moduli of complex numbers kept as (real parts, imaginary parts); derivative 0 at 0, where clamp has none."""
    real, imaginary = rows.chunk(2, -1)
    return (real.square() + imaginary.square()).clamp(min=torch.finfo(rows.dtype).tiny).sqrt()
