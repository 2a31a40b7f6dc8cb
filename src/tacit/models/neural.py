"""Scorers with a hidden layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tacit.errors import BadValue
from tacit.models.scorer import Scorer, Tensor


@dataclass(frozen=True)
class NTN(Scorer):
    """u' tanh(h' W t + V [h; t] + b) with k slices: a small network of its own for every relation.

    Socher, Chen, Manning and Ng: "Reasoning with neural tensor networks for knowledge base completion", NIPS 2013.
    All of W, V, b and u belong to the relation, so its row holds them, in that order: keep dim small.
    """

    slices: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.slices < 1:
            raise BadValue(f"slices is at least 1, not {self.slices}")

    def widths(self, dim: int) -> tuple[int, int]:
        return dim, self.slices * (dim * dim + 2 * dim + 2)

    def score(self, head: Tensor, relation: Tensor, tail: Tensor, shared: tuple[Tensor, ...] = ()) -> Tensor:
        k, dim = self.slices, head.shape[-1]
        parts = relation.split([k * dim * dim, k * 2 * dim, k, k], -1)
        tensor, linear = parts[0].unflatten(-1, (k, dim, dim)), parts[1].unflatten(-1, (k, 2 * dim))
        # Broadcast first, so that one side may be a table of candidates and the other one query.
        head, tail = torch.broadcast_tensors(head, tail)
        through = torch.einsum("...i,...kij,...j->...k", head, tensor, tail)
        beside = (linear @ torch.cat([head, tail], -1)[..., None])[..., 0]
        return (parts[3] * torch.tanh(through + beside + parts[2])).sum(-1)
