"""S4: noisy counts of (relation, role, entity), released once: a score by themselves, a prior of any other, or vectors.

None of the papers has this baseline. One triple moves two counts by 1, so their L2 sensitivity is sqrt 2 and the cost
that of one Gaussian, without a sample. All that is made of the counts afterwards is free.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tacit.draws import Purpose, Secret
from tacit.errors import TacitError
from tacit.graph import Graph
from tacit.models.tables import Prior, Tables

Tensor = Any
FLOOR = 0.3
"""What is added to a count before its logarithm is taken: an entity that was never seen is unlikely, not impossible."""
CERTAIN = 2.0
"""Deviations of noise that are taken off a count before it becomes vectors."""
MOST_CELLS = 1 << 30


@dataclass(frozen=True)
class Marginals:
    """Counts of a party's training triples, with noise: tails[r, e] of (?, r, e), heads[r, e] of (e, r, ?).

    deviation: of each count's noise, or of each by itself, which all may know; 0: there is none, nothing is private.
    """

    tails: Tensor
    heads: Tensor
    deviation: Any

    @staticmethod
    def release(graph: Graph, sigma: float, secret: Secret | None, party: int = 0) -> Marginals:
        """Count, and add noise of `sigma` times the sensitivity; without a secret there is none, to compare with."""
        relations, entities = len(graph.relations), len(graph.entities)
        cells = relations * entities
        if cells > MOST_CELLS:
            raise TacitError(
                f"{relations:,} relations with {entities:,} entities are too many counts to release: leave out "
                "privacy.prior_share, and name a trainer (privacy.name), such as dpsgd"
            )
        triples, deviation = graph.train.triples.astype(np.int64), sigma * math.sqrt(2)
        tables = []
        for step, column in enumerate((2, 0)):
            where = triples[:, 1] * entities + triples[:, column]
            counts = torch.from_numpy(np.bincount(where, minlength=cells).astype(np.float32))
            if secret is not None:
                secret.add_normals(Purpose.NOISE_COUNTS, party, step, deviation, counts)
            tables.append(counts.reshape(relations, entities))
        return Marginals(tables[0], tables[1], 0.0 if secret is None else deviation)

    def prior(self, twice: bool = False) -> Prior:
        """Logarithms of what the counts probably are: negative ones become small, large ones stay.

        `twice`: relations have a second row each, for their inverses, whose tails are heads.
        """
        tails, heads = (torch.log(self._likely(table) + FLOOR) for table in (self.tails, self.heads))
        return Prior(torch.cat([tails, heads]), torch.cat([heads, tails])) if twice else Prior(tails, heads)

    def _likely(self, counts: Tensor) -> Tensor:
        if isinstance(self.deviation, float) and not self.deviation:
            return counts
        return torch.nn.functional.softplus(counts / self.deviation) * self.deviation

    def _certain(self, counts: Tensor) -> Tensor:
        """Logarithms again, 0 for what may well be noise: it would fill the singular vectors."""
        if isinstance(self.deviation, float) and not self.deviation:
            return torch.log(counts + FLOOR)
        return torch.log1p((counts / self.deviation - CERTAIN).clamp(min=0))

    def vectors(self, dim: int) -> Tables:
        """RESCAL's rows that come nearest to the counts: their singular vectors, and a last number that is 1.

        With h = (u, 1) and t = (v, 1), a matrix with a last column a and a last row b gives u.a + v.b: what the head
        and the tail say of the relation, each by itself.
        """
        whole = torch.cat([self._certain(self.heads), self._certain(self.tails)]).double()
        mean = whole.mean(1, keepdim=True)
        left, size, right = torch.linalg.svd(whole - mean, full_matrices=False)
        kept = min(dim - 1, len(size))
        root = size[:kept].sqrt()
        entity = torch.zeros(whole.shape[1], dim, dtype=torch.float64)
        entity[:, :kept], entity[:, -1] = right[:kept].T * root, 1.0
        head, tail = (left[:, :kept] * root).chunk(2)
        matrix = torch.zeros(len(head), dim, dim, dtype=torch.float64)
        matrix[:, :kept, -1], matrix[:, -1, :kept] = head, tail
        matrix[:, -1, -1] = mean.reshape(2, -1).sum(0)
        return Tables(entity.float(), matrix.flatten(1).float())
