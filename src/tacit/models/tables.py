"""The parameters: rows of entities and relations, for one party or several stacked on each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch

from tacit.draws import Purpose, Stream
from tacit.errors import BadValue
from tacit.graph import Graph
from tacit.models.scorer import Part, Scorer, Tensor

PARTS: tuple[Part, Part] = ("entity", "relation")
LARGEST_VALUE = 1e4
"""In a row that is taken from somebody else, or judged: of larger ones some scores overflow, and no training has them
that did not run away."""


@dataclass(frozen=True)
class Layout:
    """Which rows of the stacked tables are whose.

    Attributes
    ----------
    entities, relations
        How many rows each party has. With reciprocal relations a party has twice as many relation rows: the inverse of
        its relation r is its row r + half.
    numbers
        Each party's number in every draw. It belongs to the party and not to its place in the stack, so that a party
        draws the same alone, in a cohort, and in whatever order the cohort is.
    """

    entities: tuple[int, ...]
    relations: tuple[int, ...]
    numbers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.numbers:
            object.__setattr__(self, "numbers", tuple(range(len(self.entities))))
        if not len(self.entities) == len(self.relations) == len(self.numbers) == len(set(self.numbers)):
            raise BadValue("every party needs a number of rows in each table, and a number of its own")

    def __len__(self) -> int:
        return len(self.entities)

    @cached_property
    def entity_start(self) -> tuple[int, ...]:
        """Where each party's entity rows begin, and at the end where all of them end."""
        return tuple(np.cumsum([0, *self.entities]).tolist())

    @cached_property
    def relation_start(self) -> tuple[int, ...]:
        return tuple(np.cumsum([0, *self.relations]).tolist())

    def rows(self, part: Part, party: int) -> slice:
        start = self.entity_start if part == "entity" else self.relation_start
        return slice(start[party], start[party + 1])

    def owner(self, part: Part, device: Any = None) -> Tensor:
        """The party of every row."""
        sizes = torch.tensor(self.entities if part == "entity" else self.relations, device=device)
        return torch.repeat_interleave(torch.arange(len(self), device=device), sizes)


@dataclass
class Tables:
    """All parameters of a cohort: stacked entity rows, stacked relation rows, and shared weights by party."""

    entity: Tensor
    relation: Tensor
    shared: tuple[Tensor, ...] = ()
    """Each (parties, ...): a party has its own copy."""

    @staticmethod
    def begin(
        scorer: Scorer,
        dim: int,
        layout: Layout,
        *,
        seed: int,
        weights: Sequence[Tensor] | None = None,
        device: str | None = None,
    ) -> Tables:
        """First values, drawn for each party by its number; on a GPU if one is named: uniform ones are the same there.

        `weights` are the relation weights of a scorer that needs statistics (`relation_weights`), one tensor per party.
        """
        if dim < 1:
            raise BadValue(f"dim is at least 1, not {dim}")
        if scorer.statistics and weights is None:
            raise BadValue(f"{type(scorer).__name__} needs the weights of its relations")
        entity, relation = scorer.widths(dim)
        pieces: list[list[Tensor]] = [[], [], *([] for _ in scorer.shared_shapes(dim))]
        for party, number in enumerate(layout.numbers):
            draw = Stream(seed, Purpose.INIT, number, device=device)
            pieces[0].append(scorer.initial("entity", layout.entities[party], entity, dim, draw.at(step=0)))
            pieces[1].append(scorer.initial("relation", layout.relations[party], relation, dim, draw.at(step=1)))
            if weights is not None:
                pieces[1][-1][:, -scorer.frozen :] = weights[party].reshape(-1, scorer.frozen)
            for which, shape in enumerate(scorer.shared_shapes(dim)):
                first = scorer.initial(which, 1, int(np.prod(shape)), dim, draw.at(step=2 + which))
                pieces[2 + which].append(first.reshape(1, *shape))
        tables = Tables(torch.cat(pieces[0]), torch.cat(pieces[1]), tuple(torch.cat(p) for p in pieces[2:]))
        tables.constrain(scorer)
        return tables

    def constrain(self, scorer: Scorer) -> None:
        """Bring all rows to what the scorer wants of them; in place."""
        for part in PARTS:
            rows = getattr(self, part)
            if (wanted := scorer.constrain(part, rows)) is not rows:
                rows.copy_(wanted)

    @property
    def fine(self) -> bool:
        """Whether all numbers are finite, and so small that no score overflows."""
        return all(bool((tensor.abs() <= LARGEST_VALUE).all()) for tensor in self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name."""
        return {"entity": self.entity, "relation": self.relation} | {
            f"shared.{i}": tensor for i, tensor in enumerate(self.shared)
        }

    @staticmethod
    def of(tensors: dict[str, Tensor]) -> Tables:
        """The tables whose `tensors` these are."""
        shared = sum(name.startswith("shared.") for name in tensors)
        return Tables(tensors["entity"], tensors["relation"], tuple(tensors[f"shared.{i}"] for i in range(shared)))

    @staticmethod
    def empty(scorer: Scorer, entities: int, relations: int, parties: int = 1) -> Tables:
        """Rows of zeros, as short as the scorer has them: every score is the same."""
        entity, relation = scorer.widths(1)
        shared = tuple(torch.zeros(parties, *shape) for shape in scorer.shared_shapes(1))
        return Tables(torch.zeros(entities, entity), torch.zeros(relations, relation), shared)

    def like(self, function: Any) -> Tables:
        """Tables of `function` of each tensor (`torch.clone`, `torch.zeros_like`)."""
        return Tables(function(self.entity), function(self.relation), tuple(function(s) for s in self.shared))

    def party(self, layout: Layout, party: int) -> Tables:
        """Views of one party's rows."""
        return Tables(
            self.entity[layout.rows("entity", party)],
            self.relation[layout.rows("relation", party)],
            tuple(shared[party : party + 1] for shared in self.shared),
        )


@dataclass(frozen=True)
class Prior:
    """An additive term of every score: for (h, r, t) it is tails[r, t] + heads[r, h].

    Rows follow the relation table, columns a party's own entities (stacked parties: as many columns as the largest
    has). A release of noisy counts becomes a prior; so does plain popularity.
    """

    tails: Tensor
    heads: Tensor
    scale: float = field(default=1.0)

    def to(self, device: Any) -> Prior:
        """The same on a device."""
        return Prior(self.tails.to(device), self.heads.to(device), self.scale)

    def of(self, head: Tensor, relation: Tensor, tail: Tensor) -> Tensor:
        """The term of each triple; relation by its row in the table, entities by their ids at their party."""
        return self.scale * (self.tails[relation, tail] + self.heads[relation, head])


def relation_weights(graph: Graph) -> Tensor:
    """TransM's weights 1 / log(hpt + tph): mean heads per tail and tails per head of each relation, from train.

    A relation with one head per tail and one tail per head has 1 / log 2; one without any triple counts as such.
    """
    triples, relations = graph.train.triples.astype(np.int64), len(graph.relations)
    size = np.bincount(triples[:, 1], minlength=relations)
    distinct = []
    for column in (0, 2):
        pairs = np.unique(triples[:, 1] * len(graph.entities) + triples[:, column])
        distinct.append(np.bincount(pairs // max(len(graph.entities), 1), minlength=relations))
    per_head, per_tail = (np.where(size > 0, size / np.maximum(d, 1), 1.0) for d in distinct)
    return torch.from_numpy(1.0 / np.log(per_head + per_tail)).float()


def popularity(graph: Graph) -> Prior:
    """log(1 + how often each entity is head or tail of each relation in train): the baseline of every model."""
    made = []
    for column in (2, 0):
        counts = torch.zeros(len(graph.relations), len(graph.entities))
        rows = torch.from_numpy(graph.train.triples.astype(np.int64))
        counts.index_put_((rows[:, 1], rows[:, column]), torch.ones(len(rows)), accumulate=True)
        made.append(counts.log1p())
    return Prior(*made)
