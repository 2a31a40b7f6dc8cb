"""Scorers that are linear in each row: inner products of the tail with what the relation makes of the head.

None of them has a margin. TuckER alone has weights that all triples share.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from tacit.models.scorer import Part, Scorer, Tensor, modulus


@dataclass(frozen=True)
class DistMult(Scorer):
    """sum_i h_i r_i t_i. It cannot tell head from tail.

    Yang, Yih, He, Gao and Deng: "Embedding entities and relations for learning and inference in knowledge bases",
    ICLR 2015.
    """

    geometry = "product"

    def tail_query(self, head: Tensor, relation: Tensor, shared: tuple[Tensor, ...] = ()) -> Tensor:
        return head * relation

    def head_query(self, relation: Tensor, tail: Tensor, shared: tuple[Tensor, ...] = ()) -> Tensor:
        return tail * relation


@dataclass(frozen=True)
class ComplEx(Scorer):
    """Re(sum_i h_i r_i conj(t_i)) over complex numbers; rows are real parts, then imaginary parts.

    Trouillon, Welbl, Riedel, Gaussier and Bouchard: "Complex embeddings for simple link prediction", ICML 2016.
    """

    geometry = "product"

    def widths(self, dim: int) -> tuple[int, int]:
        return 2 * dim, 2 * dim

    def tail_query(self, head: Tensor, relation: Tensor, shared: tuple[Tensor, ...] = ()) -> Tensor:
        (h, h_i), (r, r_i) = head.chunk(2, -1), relation.chunk(2, -1)
        return torch.cat([h * r - h_i * r_i, h * r_i + h_i * r], -1)

    def head_query(self, relation: Tensor, tail: Tensor, shared: tuple[Tensor, ...] = ()) -> Tensor:
        (r, r_i), (t, t_i) = relation.chunk(2, -1), tail.chunk(2, -1)
        return torch.cat([r * t + r_i * t_i, r * t_i - r_i * t], -1)

    def magnitudes(self, part: Part, rows: Tensor) -> Tensor:
        return modulus(rows)


@dataclass(frozen=True)
class RESCAL(Scorer):
    """h' M_r t: a relation's row is its matrix, by rows.

    Nickel, Tresp and Kriegel: "A three-way model for collective learning on multi-relational data", ICML 2011.
    """

    geometry = "product"

    def widths(self, dim: int) -> tuple[int, int]:
        return dim, dim * dim

    def tail_query(self, head: Tensor, relation: Tensor, shared: tuple[Tensor, ...] = ()) -> Tensor:
        dim = head.shape[-1]
        return (head[..., None, :] @ relation.unflatten(-1, (dim, dim)))[..., 0, :]

    def head_query(self, relation: Tensor, tail: Tensor, shared: tuple[Tensor, ...] = ()) -> Tensor:
        dim = tail.shape[-1]
        return (relation.unflatten(-1, (dim, dim)) @ tail[..., :, None])[..., 0]


@dataclass(frozen=True)
class QuatE(Scorer):
    """<h (x) r / |r|, t>: the head turned by the relation's unit quaternions, and its inner product with the tail.

    Zhang, Tay, Yao and Liu: "Quaternion knowledge graph embeddings", NeurIPS 2019. Rows are the parts 1, i, j and k.
    """

    geometry = "product"

    def widths(self, dim: int) -> tuple[int, int]:
        return 4 * dim, 4 * dim

    def units(self, relation: Tensor) -> tuple[Tensor, ...]:
        parts = torch.stack(relation.chunk(4, -1), -1)
        return tuple(torch.nn.functional.normalize(parts, dim=-1).unbind(-1))

    def tail_query(self, head: Tensor, relation: Tensor, shared: tuple[Tensor, ...] = ()) -> Tensor:
        return torch.cat(_hamilton(head.chunk(4, -1), self.units(relation)), -1)

    def head_query(self, relation: Tensor, tail: Tensor, shared: tuple[Tensor, ...] = ()) -> Tensor:
        a, b, c, d = self.units(relation)  # <h (x) r, t> = <h, t (x) conj(r)>
        return torch.cat(_hamilton(tail.chunk(4, -1), (a, -b, -c, -d)), -1)

    def magnitudes(self, part: Part, rows: Tensor) -> Tensor:
        return torch.linalg.vector_norm(torch.stack(rows.chunk(4, -1), -1), dim=-1)


def _hamilton(p: tuple[Tensor, ...], q: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The product of quaternions: i^2 = j^2 = k^2 = ijk = -1."""
    (a, b, c, d), (x, i, j, k) = p, q
    return (
        a * x - b * i - c * j - d * k,
        a * i + b * x + c * k - d * j,
        a * j - b * k + c * x + d * i,
        a * k + b * j - c * i + d * x,
    )


@dataclass(frozen=True)
class TuckER(Scorer):
    """sum_ijk W_ijk h_i r_j t_k with one core W that all triples share.

    Balazevic, Allen and Hospedales: "TuckER: Tensor factorization for knowledge graph completion", EMNLP 2019. Without
    the paper's batch normalisation, which makes one example's loss depend on the others of its batch.
    """

    geometry = "product"

    def shared_shapes(self, dim: int) -> tuple[tuple[int, ...], ...]:
        return ((dim, dim, dim),)

    def initial(self, part: Part | int, rows: int, width: int, dim: int, draw: object) -> Tensor:
        made = super().initial(part, rows, width, dim, draw)  # type: ignore[arg-type]
        if isinstance(part, int):  # the core: deviation 1 / dim, so that a query is about as long as its rows are
            deviation = (self.init_scale or self.spread(dim)) / (math.sqrt(3.0) if self.init == "uniform" else 1.0)
            made /= dim * deviation
        return made

    def tail_query(self, head: Tensor, relation: Tensor, shared: tuple[Tensor, ...] = ()) -> Tensor:
        return torch.einsum("...i,...j,...ijk->...k", head, relation, shared[0])

    def head_query(self, relation: Tensor, tail: Tensor, shared: tuple[Tensor, ...] = ()) -> Tensor:
        return torch.einsum("...j,...k,...ijk->...i", relation, tail, shared[0])
