"""What a kernel takes and gives, whichever kernel it is.

A step is any number of calls of `accumulate`, each on a chunk of examples, and one `Cohort.finish`. A kernel adds what
a chunk contributes to gradient buffers and gives each example's loss; under the rule `Clipped` also each unit's norm.
It never gives the gradient of an example: `reference.row_gradients` does, for tests and audits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Literal, Protocol

import torch

from tacit.errors import BadValue
from tacit.losses import Loss, NoRegulariser, Regulariser
from tacit.models import Layout, Prior, Scorer, Tables

Tensor = Any
LossPart = Literal["positive", "negative", "both"]
ABSENT = -1
"""In place of a negative: there is none."""


@dataclass(frozen=True)
class Objective:
    """What is minimised."""

    scorer: Scorer
    loss: Loss
    regulariser: Regulariser = field(default_factory=NoRegulariser)
    prior: Prior | None = None


@dataclass(frozen=True)
class Chunk:
    """Some examples of a step. An example asks for the tail of (head, relation), or for the head of (relation, tail).

    Ids are rows of the stacked tables. Of `negatives`, `pool`, `triples` and `everyone` one says what the true
    answer is compared with.

    Attributes
    ----------
    head, relation, tail, party
        (b,) int64.
    asks_head
        (b,) bool: heads are the candidates, not tails.
    weight
        (b,): factor of the example's loss. 0: the example is padding, and changes nothing.
    unit
        (b,) int64 from 0 on: examples of one unit are clipped as one (both sides of a triple, a group of triples).
        None: each is a unit of its own.
    negatives
        (b, n): candidates of each example's own, or ABSENT.
    pool
        (parties, n): candidates that all examples of a party have in common, distinct, or ABSENT. An example's own head
        and tail are no candidates of it.
    triples
        (b, n, 3): negatives that stand for themselves: public pairs with a random tail, random triples.
    everyone
        All entities of the party but the true answer are candidates.
    answers
        k-vs-all: (offsets (b + 1,), entity rows): all true answers of each example. Its tail, or head, is any of them.
    drop_entity, drop_relation
        (b, width) factors of the known entity's and the relation's numbers: row dropout.
    """

    head: Tensor
    relation: Tensor
    tail: Tensor
    party: Tensor
    asks_head: Tensor
    weight: Tensor
    unit: Tensor | None = None
    negatives: Tensor | None = None
    pool: Tensor | None = None
    triples: Tensor | None = None
    everyone: bool = False
    answers: tuple[Tensor, Tensor] | None = None
    drop_entity: Tensor | None = None
    drop_relation: Tensor | None = None

    BY_EXAMPLE: ClassVar[frozenset[str]] = frozenset(
        [
            "head",
            "relation",
            "tail",
            "party",
            "asks_head",
            "weight",
            "unit",
            "negatives",
            "triples",
            "drop_entity",
            "drop_relation",
        ]
    )

    def __len__(self) -> int:
        return len(self.head)

    def select(self, which: Tensor) -> Chunk:
        """Some of the examples, by index."""
        chosen: dict[str, Any] = {
            f.name: None if (value := getattr(self, f.name)) is None else value[which]
            for f in fields(self)
            if f.name in self.BY_EXAMPLE
        }
        if self.answers is not None:
            offsets, ids = self.answers
            counts = (offsets[1:] - offsets[:-1])[which]
            ends = counts.cumsum(0)
            within = ids.new_ones(int(ends[-1]) if len(ends) else 0).cumsum(0) - 1
            starts = (offsets[which] - (ends - counts)).repeat_interleave(counts)
            chosen["answers"] = (torch.cat([ends.new_zeros(1), ends]), ids[starts + within])
        return replace(self, **chosen)


@dataclass(frozen=True)
class Plain:
    """Add the gradient of sum(weight x loss), or of a part of the loss."""

    part: LossPart = "both"


@dataclass(frozen=True)
class Clipped:
    """Add the sum over units of their gradients, each cut to a norm: what noise can then protect.

    One norm covers all rows a unit touches, in both tables and in shared weights. A unit whose gradient is not finite
    adds nothing. Weights only tell examples (1) from padding (0).

    Attributes
    ----------
    clip
        (parties,): the largest norm.
    row_clip
        After that, no entity row of a unit is longer than this (DP-FLames' C2).
    row_mask
        (entity rows,) bool: only these entity rows may change; applied before the norm is taken.
    relation_scale
        The relation's part is multiplied by this before the norm is taken (`finish` divides by it after the noise).
    part
        Which part of the loss.
    entities_only
        The norm is that of the entity rows, and only these are cut: a relation gets the plain gradient, so far as it is
        finite (DP-FLames as printed; noise on entity rows protects no such sum).
    """

    clip: Tensor
    row_clip: float | None = None
    row_mask: Tensor | None = None
    relation_scale: float = 1.0
    part: LossPart = "both"
    entities_only: bool = False

    def __post_init__(self) -> None:
        if not bool((self.clip.isfinite() & (self.clip >= 0)).all()):
            raise BadValue("a clip is a number, at least 0")
        if self.row_clip is not None and not self.row_clip >= 0:
            raise BadValue(f"row_clip is at least 0, not {self.row_clip}")


Rule = Plain | Clipped


@dataclass
class Gradients:
    """Buffers shaped as the tables, and which rows were written to since they were last empty (ABSENT is none)."""

    tables: Tables
    entity_rows: list[Tensor] = field(default_factory=list)
    relation_rows: list[Tensor] = field(default_factory=list)

    def add_entities(self, rows: Tensor, values: Tensor) -> None:
        self.tables.entity.index_add_(0, rows, values)
        self.entity_rows.append(rows)

    def add_relations(self, rows: Tensor, values: Tensor) -> None:
        self.tables.relation.index_add_(0, rows, values)
        self.relation_rows.append(rows)

    def tensors(self) -> Iterator[Tensor]:
        yield from self.tables.tensors().values()

    def empty(self) -> None:
        """Zeros everywhere."""
        for tensor in self.tensors():
            tensor.zero_()
        self.forget()

    def forget(self) -> None:
        """Buffers are empty: no row was written to."""
        self.entity_rows.clear()
        self.relation_rows.clear()


class Kernel(Protocol):
    """The hot path: one contract, several implementations, all equal to the reference on fresh inputs."""

    objective: Objective

    def __init__(self, objective: Objective, layout: Layout) -> None: ...

    def accumulate(self, tables: Tables, chunk: Chunk, rule: Rule, into: Gradients) -> tuple[Tensor, Tensor | None]:
        """Add the chunk's contributions to `into`; (b,) losses of examples, of the rule's part, and (units,) norms if
        they are clipped.
        """
        ...
