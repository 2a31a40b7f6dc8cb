"""Scorers that take a relation for a movement: the nearer the moved head comes to the tail, the truer the triple."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from tacit.errors import BadValue
from tacit.models.scorer import DistanceScorer, Geometry, Part, Tensor, modulus


@dataclass(frozen=True)
class Translation(DistanceScorer):
    """A distance in the L1 or the L2 norm."""

    norm: Literal[1, 2] = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.norm not in (1, 2):
            raise BadValue(f"norm is 1 or 2, not {self.norm}")

    def distance(self, difference: Tensor) -> Tensor:
        return torch.linalg.vector_norm(difference, ord=self.norm, dim=-1)


@dataclass(frozen=True)
class TransE(Translation):
    """gamma - ||h + r - t||, in L1 or L2.

    Bordes, Usunier, Garcia-Duran, Weston and Yakhnenko: "Translating embeddings for modeling multi-relational data",
    NIPS 2013. `unit_entities` keeps entity rows at length 1, as the paper does and the federated papers do not.
    """

    unit_entities: bool = False

    @property
    def geometry(self) -> Geometry:  # type: ignore[override]
        return "l1" if self.norm == 1 else "l2"

    def constrain(self, part: Part, rows: Tensor) -> Tensor:
        return torch.nn.functional.normalize(rows, dim=-1) if self.unit_entities and part == "entity" else rows

    def tail_query(self, head: Tensor, relation: Tensor, shared: tuple[Tensor, ...] = ()) -> Tensor:
        return head + relation

    def head_query(self, relation: Tensor, tail: Tensor, shared: tuple[Tensor, ...] = ()) -> Tensor:
        return tail - relation


@dataclass(frozen=True)
class TransM(TransE):
    """gamma - w ||h + r - t|| with a weight w = 1 / log(hpt + tph) per relation, given and not learned.

    Fan, Zhou, Chang and Zheng: "Transition-based knowledge graph embedding with relational mapping properties",
    PACLIC 2014. The weight, the last number of a relation's row, is a statistic of the triples: how many heads a tail
    of this relation has, and tails a head. Under privacy it has to come from public triples or a paid release.
    """

    frozen = 1
    statistics = True

    def widths(self, dim: int) -> tuple[int, int]:
        return dim, dim + 1

    def tail_query(self, head: Tensor, relation: Tensor, shared: tuple[Tensor, ...] = ()) -> Tensor:
        return head + relation[..., :-1]

    def head_query(self, relation: Tensor, tail: Tensor, shared: tuple[Tensor, ...] = ()) -> Tensor:
        return tail - relation[..., :-1]

    def scaled(self, compared: Tensor, relation: Tensor) -> Tensor:
        return self.gamma - relation[..., -1].detach() * compared


@dataclass(frozen=True)
class Projection(Translation):
    """gamma - ||P(h) + r - P(t)||: entities meet in a space of the relation's, where ranks need them only once."""

    norm: Literal[1, 2] = 2

    def placed(self, rows: Tensor, relation: Tensor) -> Tensor:
        """P of entity rows, (n, width), by a relation's row, (width,)."""
        raise NotImplementedError

    def moved(self, rows: Tensor, relation: Tensor, turn: int) -> Tensor:
        """What tails (turn = 1) or heads (-1) are compared with in that space, of known entities' rows."""
        placed = self.placed(rows, relation)
        return placed + turn * relation[: placed.shape[-1]]

    def reach(self, length: Tensor, relation: Tensor) -> Tensor:
        """At least as much as the terms are long that P adds up of a row of this length: they bound its rounding."""
        raise NotImplementedError


@dataclass(frozen=True)
class TransH(Projection):
    """gamma - ||(h - w'h w) + d - (t - w't w)||: entities meet on the relation's hyperplane with unit normal w.

    Wang, Zhang, Feng and Chen: "Knowledge graph embedding by translating on hyperplanes", AAAI 2014. A relation's row
    is d, then w; w is brought back to length 1 after every step.
    """

    def widths(self, dim: int) -> tuple[int, int]:
        return dim, 2 * dim

    def constrain(self, part: Part, rows: Tensor) -> Tensor:
        if part == "entity":
            return rows
        move, normal = rows.chunk(2, -1)
        return torch.cat([move, torch.nn.functional.normalize(normal, dim=-1)], -1)

    def score(self, head: Tensor, relation: Tensor, tail: Tensor, shared: tuple[Tensor, ...] = ()) -> Tensor:
        move, normal = relation.chunk(2, -1)
        apart = head - tail
        return self.gamma - self.distance(apart - (apart * normal).sum(-1, keepdim=True) * normal + move)

    def placed(self, rows: Tensor, relation: Tensor) -> Tensor:
        normal = relation.chunk(2)[1]
        return rows - (rows @ normal)[:, None] * normal

    def reach(self, length: Tensor, relation: Tensor) -> Tensor:
        return length * (1 + relation.chunk(2)[1].square().sum())


@dataclass(frozen=True)
class TransR(Projection):
    """gamma - ||M h + r - M t||: a relation has a space of its own, and a matrix M that leads there.

    Lin, Liu, Sun, Liu and Zhu: "Learning entity and relation embeddings for knowledge graph completion", AAAI 2015.
    A relation's row is r, then M by rows; M begins as the identity.
    """

    def widths(self, dim: int) -> tuple[int, int]:
        return dim, dim + dim * dim

    def initial(self, part: Part | int, rows: int, width: int, dim: int, draw: object) -> Tensor:
        made = super().initial(part, rows, width, dim, draw)  # type: ignore[arg-type]
        if part == "relation":
            made[:, dim:] = torch.eye(dim).reshape(-1)
        return made

    def score(self, head: Tensor, relation: Tensor, tail: Tensor, shared: tuple[Tensor, ...] = ()) -> Tensor:
        dim = head.shape[-1]
        matrix = relation[..., dim:].unflatten(-1, (dim, dim))
        apart = head - tail
        if matrix.shape[:-1] == (*apart.shape[:-1], dim):  # triple by triple: sums that no other triple can round
            moved = (matrix * apart[..., None, :]).sum(-1)
        else:
            moved = (matrix @ apart[..., None])[..., 0]
        return self.gamma - self.distance(moved + relation[..., :dim])

    def placed(self, rows: Tensor, relation: Tensor) -> Tensor:
        dim = rows.shape[-1]
        return rows @ relation[dim:].unflatten(0, (dim, dim)).T

    def reach(self, length: Tensor, relation: Tensor) -> Tensor:
        return length * torch.linalg.vector_norm(relation)


@dataclass(frozen=True)
class TransD(Projection):
    """gamma - ||h' + r - t'|| with e' = e + (p_e . e) p_r: a projection made of the entity's and the relation's p.

    Ji, He, Xu, Liu and Zhao: "Knowledge graph embedding via dynamic mapping matrix", ACL 2015. Rows are the vector,
    then its p.
    """

    def widths(self, dim: int) -> tuple[int, int]:
        return 2 * dim, 2 * dim

    def score(self, head: Tensor, relation: Tensor, tail: Tensor, shared: tuple[Tensor, ...] = ()) -> Tensor:
        (h, h_p), (r, r_p), (t, t_p) = (rows.chunk(2, -1) for rows in (head, relation, tail))
        along = (h_p * h).sum(-1, keepdim=True) - (t_p * t).sum(-1, keepdim=True)
        return self.gamma - self.distance(h - t + along * r_p + r)

    def placed(self, rows: Tensor, relation: Tensor) -> Tensor:
        row, p = rows.chunk(2, -1)
        return row + (row * p).sum(-1, keepdim=True) * relation.chunk(2)[1]

    def reach(self, length: Tensor, relation: Tensor) -> Tensor:
        return length + length.square() * torch.linalg.vector_norm(relation.chunk(2)[1])


@dataclass(frozen=True)
class RotatE(DistanceScorer):
    """gamma - sum_i |h_i r_i - t_i| over complex numbers, the relation's of modulus 1: it turns each coordinate.

    Sun, Deng, Nie and Tang: "RotatE: Knowledge graph embedding by relational rotation in complex space", ICLR 2019.
    An entity's row is its real parts, then its imaginary parts. A relation's row is its angles in units in which the
    first values fill the circle: angle = pi * number / first spread, as the authors' code.
    """

    geometry = "modulus"

    def widths(self, dim: int) -> tuple[int, int]:
        return 2 * dim, dim

    def angles(self, relation: Tensor) -> Tensor:
        """The rotation of each coordinate in radians."""
        dim = relation.shape[-1]
        return relation * (math.pi / (self.init_scale or self.spread(dim)))

    def turned(self, rows: Tensor, angle: Tensor) -> Tensor:
        (real, imaginary), cos, sin = rows.chunk(2, -1), angle.cos(), angle.sin()
        return torch.cat([real * cos - imaginary * sin, real * sin + imaginary * cos], -1)

    def tail_query(self, head: Tensor, relation: Tensor, shared: tuple[Tensor, ...] = ()) -> Tensor:
        return self.turned(head, self.angles(relation))

    def head_query(self, relation: Tensor, tail: Tensor, shared: tuple[Tensor, ...] = ()) -> Tensor:
        return self.turned(tail, -self.angles(relation))

    def magnitudes(self, part: Part, rows: Tensor) -> Tensor:
        return modulus(rows) if part == "entity" else rows.abs()
