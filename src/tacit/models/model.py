"""A trained model of one party: tables, how to score with them, and what is added to the scores."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from tacit.errors import BadValue
from tacit.graph import Graph
from tacit.models.bilinear import DistMult
from tacit.models.scorer import DistanceScorer, Scorer, compare, compare_all
from tacit.models.tables import Prior, Tables, popularity
from tacit.models.translational import Projection

Tensor = Any
UNDERFLOW = 1e-18
"""Squares and products of numbers below it may vanish, here or there."""
PIECE, NUMBERS = 1024, 1 << 22
"""How many queries are made at once where there are shared weights, and how many numbers are gathered where not."""


@dataclass(frozen=True)
class Model:
    """One party's tables with their scorer. Ids are the party's own."""

    scorer: Scorer
    tables: Tables
    prior: Prior | None = None
    reciprocal: bool = False
    """The second half of the relation rows are inverses, and heads are asked for by them."""

    @property
    def entities(self) -> int:
        return len(self.tables.entity)

    @property
    def relations(self) -> int:
        return len(self.tables.relation) // (2 if self.reciprocal else 1)

    def score(self, head: Tensor, relation: Tensor, tail: Tensor) -> Tensor:
        """Scores of triples by their ids, (n,) each."""
        queries = Queries(self, relation, head, asks_head=False)
        return torch.cat([
            queries.pairs(index, tail[index])
            for index in torch.arange(len(head), device=head.device).split(PIECE * 16)
        ]) if len(head) else self.tables.entity.new_zeros(0)  # fmt: skip

    def seen_by(self, whole: Graph, party: Graph) -> Model:
        """The same model with only the rows that a party has, in the party's order: to compare like with like."""
        entity, relation = party.entities.positions(whole.entities), party.relations.positions(whole.relations)
        if (entity < 0).any() or (relation < 0).any():
            raise BadValue("the party has entities or relations that the model has no row for")
        relations = np.concatenate([relation, relation + self.relations]) if self.reciprocal else relation
        tables = Tables(self.tables.entity[entity], self.tables.relation[relations], self.tables.shared)
        prior = self.prior
        if prior is not None:
            tails, heads = (table[relation][:, entity] for table in (prior.tails, prior.heads))
            prior = Prior(tails, heads, prior.scale)
        return replace(self, tables=tables, prior=prior)

    @staticmethod
    def popular(graph: Graph) -> Model:
        """The baseline that only knows how often an entity is head or tail of a relation."""
        nothing = Tables(torch.zeros(len(graph.entities), 1), torch.zeros(len(graph.relations), 1))
        return Model(DistMult(), nothing, popularity(graph))


class Queries:
    """What is asked of a model: tails of (known, relation), or heads of (relation, known).

    `pairs` is what a score *is*: sums of each pair alone, the same whatever else is scored beside it. `block` is the
    fast way for all pairs at once; matrix products round differently, by no more than `slack`.
    """

    def __init__(self, model: Model, relation: Tensor, known: Tensor, *, asks_head: bool):
        self.asks_head, self.known, self.prior_relation = asks_head, known, relation
        self.turned = asks_head and model.reciprocal
        self.relation = relation + model.relations if self.turned else relation
        self.model, self.scorer, self.entity = model, model.scorer, model.tables.entity
        self.shared = tuple(tensor[0] for tensor in model.tables.shared)
        self.query = None
        if self.scorer.geometry is not None and len(known):
            # Weights that all queries share make them by a matrix product, whose rounding depends on its shape: so it
            # has always the same.
            size = PIECE if self.shared else max(1, NUMBERS // model.tables.relation.shape[1])
            pieces = torch.arange(len(known), device=known.device).split(size)
            padded = [torch.cat([p, p.new_zeros(size - len(p))]) if self.shared else p for p in pieces]
            self.query = torch.cat([self._query(index) for index in padded])[: len(known)]

    @staticmethod
    def together(sides: Sequence[Queries]) -> Queries | None:
        """Tails' and heads' queries as one; None: a score does not follow from query, relation and row alone."""
        joined = copy(sides[0])
        if joined.query is None or joined.model.prior is not None:
            return None
        for name in ("query", "relation", "prior_relation", "known"):
            setattr(joined, name, torch.cat([getattr(side, name) for side in sides]))
        return joined

    def _query(self, index: Tensor) -> Tensor:
        row, relation = self.entity[self.known[index]], self.model.tables.relation[self.relation[index]]
        if self.asks_head and not self.turned:
            return self.scorer.head_query(relation, row, self.shared)
        return self.scorer.tail_query(row, relation, self.shared)

    @cached_property
    def longest(self) -> Tensor:
        return torch.linalg.vector_norm(self.entity, dim=-1).max()

    def compared(self, index: Tensor, candidate: Tensor) -> Tensor:
        """The product or distance of query `index[i]` and the row of entity `candidate[i]`."""
        assert self.query is not None
        return compare(self.scorer.geometry, self.query[index], self.entity[candidate])

    def pairs(self, index: Tensor, candidate: Tensor) -> Tensor:
        """The score of query `index[i]` with entity `candidate[i]`."""
        relation = self.model.tables.relation[self.relation[index]]
        if self.query is not None:
            score = self.scorer.scaled(self.compared(index, candidate), relation)
        else:
            row, known = self.entity[candidate], self.entity[self.known[index]]
            head, tail = (row, known) if self.asks_head and not self.turned else (known, row)
            score = self.scorer.score(head, relation, tail, self.shared)
        if (prior := self.model.prior) is not None:
            head, tail = (candidate, self.known[index]) if self.asks_head else (self.known[index], candidate)
            score = score + prior.of(head, self.prior_relation[index], tail)
        return score

    def close(self, score: Tensor) -> Tensor | None:
        """(q,): how close to the product or distance of this score another may be so that rounding decides which is
        larger. None: scores do not follow from products or distances alone, or these might overflow.
        """
        query, scorer, rows = self.query, self.scorer, self.entity
        plain = type(scorer).scaled in (Scorer.scaled, DistanceScorer.scaled) and rows.dtype == torch.float32
        if query is None or not plain or self.model.prior is not None:
            return None
        length, eps, width = torch.linalg.vector_norm(query, dim=-1), torch.finfo(rows.dtype).eps, rows.shape[-1]
        most = (length.max() + self.longest).square() * width
        if not bool(most.isfinite()):
            return None
        # A sum of n terms, in whatever order, is off by at most n / 2 x eps x the sum of their sizes (Higham 2002,
        # section 4.2); here two sums are compared, and each term is rounded as well.
        if scorer.geometry == "product":
            return (width + 8) * eps * length * self.longest + width * UNDERFLOW
        gamma = getattr(scorer, "gamma", 0.0)
        return eps * (1.1 * (width + 8) * (gamma - score).abs() + 2 * gamma) + width * UNDERFLOW

    def block(self, index: Tensor, candidates: slice) -> tuple[Tensor, Tensor]:
        """Scores of some queries with a range of entities, (q, c), and (q, 1) how far they may be from `pairs`."""
        relation, rows = self.model.tables.relation[self.relation[index]], self.entity[candidates]
        eps, width = torch.finfo(rows.dtype).eps, rows.shape[-1]
        if self.query is not None:
            query = self.query[index]
            compared = compare_all(self.scorer.geometry, query, rows)
            score = self.scorer.scaled(compared, relation[:, None])
            reach = torch.linalg.vector_norm(query, dim=-1, keepdim=True)
            if self.scorer.geometry == "product":
                slack = 4 * width * eps * reach * self.longest
            else:  # of a distance only the order of the sum differs; the score's own rounding comes on top
                slack = 4 * width * eps * (compared.amax(-1, keepdim=True) + score.abs().amax(-1, keepdim=True))
        elif isinstance(self.scorer, Projection):
            score, slack = self._by_relation(self.scorer, index, rows)
        else:
            known = self.entity[self.known[index]]
            if self.asks_head and not self.turned:
                score = self.scorer.score_heads(relation, known, rows, self.shared)
            else:
                score = self.scorer.score_tails(known, relation, rows, self.shared)
            slack = 64 * width * eps * (1.0 + score.abs().amax(-1, keepdim=True))
        if (prior := self.model.prior) is not None:
            entity = torch.arange(*candidates.indices(len(self.entity)), device=rows.device)[None]
            relations, known_ids = self.prior_relation[index][:, None], self.known[index][:, None]
            head, tail = (entity, known_ids) if self.asks_head else (known_ids, entity)
            term = prior.of(head, relations, tail)
            score = score + term
            more = 4 * eps * (term.abs().amax(-1, keepdim=True) + score.abs().amax(-1, keepdim=True))
            slack = torch.where(slack == 0, 0.0, slack + more)  # a prior alone is added as `pairs` adds it
        return score, slack

    def _by_relation(self, scorer: Projection, index: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """`block`, relation by relation: its space has the candidates once, and not once for each query."""
        score, slack = rows.new_empty(len(index), len(rows)), rows.new_empty(len(index), 1)
        turn = -1 if self.asks_head and not self.turned else 1
        each = (4 * rows.shape[-1] + 8) * torch.finfo(rows.dtype).eps
        wide = rows.shape[-1] ** 0.5 if scorer.norm == 1 else 1.0
        relations, which = self.relation[index].unique(return_inverse=True)
        for number, relation in enumerate(self.model.tables.relation[relations]):
            mine = (which == number).nonzero()[:, 0]
            known = self.entity[self.known[index[mine]]]
            query = scorer.moved(known, relation, turn)
            compared = compare_all(("l1", "l2")[scorer.norm - 1], query, scorer.placed(rows, relation))
            score[mine] = scorer.scaled(compared, relation)
            length = torch.linalg.vector_norm(known, dim=-1) + self.longest
            terms = scorer.reach(length, relation) + torch.linalg.vector_norm(relation[: query.shape[-1]])
            most = compared.amax(-1) + score[mine].abs().amax(-1)
            slack[mine] = each * (most + wide * terms)[:, None]
        return score, slack

    def bytes_per_candidate(self) -> int:
        """About how much memory `block` takes for each candidate beside: rows that a relation has placed."""
        if not isinstance(self.scorer, Projection):
            return 0
        return int(4 * self.entity.element_size() * self.entity.shape[1])

    def bytes_per_pair(self) -> int:
        """About how much memory `block` takes for each pair."""
        size = int(self.entity.element_size())
        if self.scorer.geometry in ("product", "l1", "l2") or isinstance(self.scorer, Projection):
            return 8 * size
        relation = self.model.tables.relation.shape[1] if self.query is None else 0
        return int(4 * size * (self.entity.shape[1] + relation))
