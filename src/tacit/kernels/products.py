"""One-vs-all and k-vs-all by matrix products: gradients by hand, without a copy of the table and of the scores.

Of the scores of all entities, (b, entities), there is one tensor, which becomes their gradient. What is left to
autograd is how a query is made of two rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import softplus

from tacit.kernels.contract import Chunk, Gradients, LossPart
from tacit.kernels.reference import Reference
from tacit.losses import KVsAll, OneVsAll
from tacit.models import Scorer, Tables

Tensor = Any


class Products(Reference):
    """The reference, but for products with all entities."""

    def covers(self) -> bool:
        """Whether this objective's plain gradients are done here."""
        objective, scorer = self.objective, self.objective.scorer
        plain = scorer.geometry == "product" and type(scorer).scaled is Scorer.scaled and objective.prior is None
        return plain and type(objective.loss) in (OneVsAll, KVsAll)

    def _plain(self, tables: Tables, chunk: Chunk, part: LossPart, into: Gradients) -> Tensor:
        if not (chunk.everyone and self.covers() and part == "both"):
            return super()._plain(tables, chunk, part, into)
        losses = tables.entity.new_zeros(len(chunk))
        for index, piece in self._pieces(tables, chunk, copies=False):
            party = int(piece.party[0]) if len(self.layout) > 1 else 0
            losses[index] = self._whole(tables, piece, party, into)
        return losses

    def _whole(self, tables: Tables, piece: Chunk, party: int, into: Gradients) -> Tensor:
        """One party's examples of one side; (b,) losses."""
        asks_head, scorer = bool(piece.asks_head[0]), self.objective.scorer
        rows = self.layout.rows("entity", party)
        everyone = tables.entity[rows]
        shared = tuple(tensor[party : party + 1].clone().requires_grad_() for tensor in tables.shared)
        own = (
            tables.entity[piece.head].requires_grad_(),
            tables.relation[piece.relation].requires_grad_(),
            tables.entity[piece.tail].requires_grad_(),
        )
        with torch.enable_grad():
            head, relation, tail = self.dropped(piece, asks_head, *own)
            query = (
                scorer.head_query(relation, tail, shared) if asks_head else scorer.tail_query(head, relation, shared)
            )
            penalty = self.penalty(asks_head, *own, shared)
        answer = (piece.head if asks_head else piece.tail) - rows.start
        loss, pull = self._pulled(query.detach() @ everyone.T, piece, answer, rows.start)
        weight = piece.weight.to(query.dtype)[:, None]
        into.tables.entity[rows].addmm_(pull.T, query.detach() * weight)
        into.entity_rows.append(torch.arange(rows.start, rows.stop, device=answer.device))
        ends, pulls = [query], [(pull @ everyone) * weight]
        if penalty is not None:
            loss = loss + penalty.detach()
            ends, pulls = [*ends, penalty], [*pulls, weight[:, 0]]
        found = torch.autograd.grad(ends, [*own, *shared], pulls, allow_unused=True)
        adding = (into.add_entities, into.add_relations, into.add_entities)
        for add, ids, values in zip(adding, (piece.head, piece.relation, piece.tail), found[:3], strict=True):
            if values is not None:
                add(ids, values)
        for buffer, values in zip(into.tables.shared, found[3:], strict=True):
            buffer[party] += values[0]
        return loss

    def _pulled(self, scores: Tensor, piece: Chunk, answer: Tensor, first: int) -> tuple[Tensor, Tensor]:
        """(b,) losses and the gradient of each by its scores, (b, entities). The scores are overwritten."""
        loss, entities = self.objective.loss, scores.shape[1]
        if not isinstance(loss, KVsAll):
            logs = torch.log_softmax(scores, -1)
            found = -logs.gather(1, answer[:, None])[:, 0]
            logs.exp_().scatter_add_(1, answer[:, None], torch.full_like(found, -1.0)[:, None])
            return found, logs
        assert piece.answers is not None
        offsets, ids = piece.answers
        many = offsets[1:] - offsets[:-1]
        example = torch.arange(len(many), device=ids.device).repeat_interleave(many)
        place, smooth = (example, ids - first), loss.smoothing / entities
        if loss.entropy == "softmax":
            logs = torch.log_softmax(scores, -1)
            label = (1 - loss.smoothing) / many.to(scores.dtype)[example]
            found = -smooth * logs.sum(-1) if loss.smoothing else torch.zeros_like(logs[:, 0])
            found = found.index_add(0, example, -label * logs[place])
            pull = logs.exp_()
        else:
            label = torch.full(example.shape, 1 - loss.smoothing, dtype=scores.dtype, device=ids.device)
            found = softplus(scores).sum(-1) - smooth * scores.sum(-1)
            found = found.index_add(0, example, -label * scores[place]) / entities
            pull = scores.sigmoid_()
        if loss.smoothing:
            pull -= smooth
        pull[place] -= label
        return found, pull if loss.entropy == "softmax" else pull.div_(entities)
