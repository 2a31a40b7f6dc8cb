"""The kernel that defines what is right: autograd on gathered rows, for any scorer, loss and rule.

It gathers a copy of every row for every example that uses it and lets autograd go back to those copies. Since no
example depends on another, what arrives at an example's copies is the gradient of that example.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from tacit.errors import TacitError
from tacit.kernels.contract import Chunk, Clipped, Gradients, LossPart, Objective, Plain, Rule
from tacit.losses import KVsAll
from tacit.models import Layout, Tables

Tensor = Any
AT_ONCE = {"cpu": 1 << 24, "cuda": 1 << 28}
"""About how many numbers one piece of a chunk may take: bounds memory, and changes no result beyond rounding."""


@dataclass(frozen=True)
class Rows:
    """Gradients of rows, unit by unit: no (unit, row) stands twice."""

    unit: Tensor
    row: Tensor
    values: Tensor


@dataclass(frozen=True)
class RowGradients:
    """The gradient of every unit of a chunk, whole: what a kernel must never need."""

    entity: Rows
    relation: Rows
    shared: tuple[Tensor, ...]
    """Each (units, ...)."""
    party: Tensor
    """(units,)"""
    loss: Tensor
    """(examples,)"""

    def norms(self) -> Tensor:
        """The norm of each unit's gradient over all it touches."""
        squares = self.entity.values.new_zeros(len(self.party))
        for rows in (self.entity, self.relation):
            squares.index_add_(0, rows.unit, rows.values.square().sum(-1))
        for tensor in self.shared:
            squares += tensor.flatten(1).square().sum(-1)
        return squares.sqrt()


class Reference:
    """Autograd on gathered rows."""

    def __init__(self, objective: Objective, layout: Layout) -> None:
        self.objective, self.layout = objective, layout

    def accumulate(self, tables: Tables, chunk: Chunk, rule: Rule, into: Gradients) -> tuple[Tensor, Tensor | None]:
        if isinstance(rule, Plain):
            return self._plain(tables, chunk, rule.part, into), None
        return self._clipped(tables, chunk, rule, into)

    def _plain(self, tables: Tables, chunk: Chunk, part: LossPart, into: Gradients) -> Tensor:
        self._check(part)
        losses = tables.entity.new_zeros(len(chunk))
        for index, piece in self._pieces(tables, chunk, copies=False):
            party = int(piece.party[0]) if len(self.layout) > 1 else 0
            leaves = self._gather(tables, piece, copies=False)
            loss = _only(part, *self._losses(piece, leaves))
            gradients = _backward((loss * piece.weight).sum(), leaves)
            losses[index] = loss.detach()
            into.add_entities(piece.head, gradients["head"])
            into.add_entities(piece.tail, gradients["tail"])
            into.add_relations(piece.relation, gradients["relation"])
            if "negative" in gradients:
                candidates = self._candidates(piece).reshape(-1)
                there = candidates >= 0
                values = gradients["negative"].flatten(0, 1)
                into.add_entities(candidates[there], values[there])
            if "everyone" in gradients:
                rows = torch.arange(len(gradients["everyone"]), device=piece.head.device)
                into.add_entities(rows + self.layout.entity_start[party], gradients["everyone"])
            if piece.triples is not None:
                for column, name in enumerate(("free_head", "free_relation", "free_tail")):
                    add = into.add_relations if column == 1 else into.add_entities
                    add(piece.triples[..., column].reshape(-1), gradients[name].flatten(0, 1))
            for which, buffer in enumerate(into.tables.shared):
                buffer[party] += gradients[f"shared.{which}"][0]
        return losses

    def _clipped(self, tables: Tables, chunk: Chunk, rule: Clipped, into: Gradients) -> tuple[Tensor, Tensor]:
        found = row_gradients(self, tables, chunk, rule.part)
        entity, relation = found.entity.values, found.relation.values * rule.relation_scale
        if rule.entities_only:
            relation, plain = torch.zeros_like(relation), relation
        if rule.row_mask is not None:
            entity = torch.where(rule.row_mask[found.entity.row][:, None], entity, 0.0)
        scaled = RowGradients(
            Rows(found.entity.unit, found.entity.row, entity),
            Rows(found.relation.unit, found.relation.row, relation),
            found.shared,
            found.party,
            found.loss,
        )
        norms = scaled.norms()
        factor = torch.where(norms.isfinite(), (rule.clip[found.party] / norms).clamp(max=1.0), 0.0)
        factor = torch.where(norms == 0, 1.0, factor)
        entity = _times(entity, factor[found.entity.unit])
        if rule.row_clip is not None:
            length = torch.linalg.vector_norm(entity, dim=-1)
            entity = _times(entity, torch.where(length > rule.row_clip, rule.row_clip / length, 1.0))
        into.add_entities(found.entity.row, entity)
        if rule.entities_only:
            relation = torch.where(norms.isfinite()[found.relation.unit][:, None] & plain.isfinite(), plain, 0.0)
        else:
            relation = _times(relation, factor[found.relation.unit])
        into.add_relations(found.relation.row, relation)
        for buffer, tensor in zip(into.tables.shared, found.shared, strict=True):
            buffer.index_add_(0, found.party, _times(tensor, factor))
        return found.loss, norms

    def _check(self, part: LossPart) -> None:
        if part != "both" and not self.objective.loss.apart:
            raise TacitError(
                f"the {type(self.objective.loss).__name__} loss has no positive and negative part of its own"
            )

    # -- one piece of a chunk: one side, bounded in size, and if need be one party -------------------------------------

    def _pieces(self, tables: Tables, chunk: Chunk, *, copies: bool) -> Iterator[tuple[Tensor, Chunk]]:
        """The chunk cut up: one side each, one party each where its rows are taken as a whole, about AT_ONCE numbers.

        `copies`: each example has a copy of its own of what examples have in common.
        """
        there = chunk.weight != 0
        by_party = len(self.layout) > 1 and (chunk.everyone or (bool(tables.shared) and not copies))
        parties = chunk.party.unique().tolist() if by_party else [None]
        for side in (False, True):
            for party in parties:
                mask = there & (chunk.asks_head == side)
                index = (mask if party is None else mask & (chunk.party == party)).nonzero()[:, 0]
                for piece in index.split(self._at_once(tables, chunk, copies)) if len(index) else ():
                    yield piece, chunk.select(piece)

    def _at_once(self, tables: Tables, chunk: Chunk, copies: bool) -> int:
        width, candidates, scores = tables.entity.shape[1] + tables.relation.shape[1], 2, 0
        for ids in (chunk.negatives, chunk.pool):
            candidates += 0 if ids is None else ids.shape[1]
        if chunk.triples is not None:
            candidates += 3 * chunk.triples.shape[1]
        if chunk.everyone and not copies and self.objective.scorer.geometry in ("product", "l1", "l2"):
            scores = 8 * max(self.layout.entities)  # no row is gathered; the loss makes several tensors of the scores
        elif chunk.everyone:
            candidates += max(self.layout.entities)
        shared = sum(tensor[0].numel() for tensor in tables.shared)
        return max(1, int(AT_ONCE[tables.entity.device.type] // (candidates * width + scores + shared)))

    def _candidates(self, piece: Chunk) -> Tensor:
        """(b, n) rows of each example's candidates, or ABSENT."""
        if piece.negatives is not None:
            return piece.negatives
        assert piece.pool is not None
        ids = piece.pool[piece.party]
        own = (ids == piece.head[:, None]) | (ids == piece.tail[:, None])
        return ids.masked_fill(own, -1)

    def _stand_ins(self, piece: Chunk) -> Tensor:
        """The candidates with the true answer in place of what is absent: masked, and no row of anyone else's."""
        rows = self._candidates(piece)
        return torch.where(rows >= 0, rows, torch.where(piece.asks_head, piece.head, piece.tail)[:, None])

    def _gather(self, tables: Tables, piece: Chunk, *, copies: bool) -> dict[str, Tensor]:
        """The rows a piece uses, as leaves of a graph. `copies`: also of what examples have in common, one for each."""
        leaves = {
            "head": tables.entity[piece.head],
            "relation": tables.relation[piece.relation],
            "tail": tables.entity[piece.tail],
        }
        if piece.everyone:
            rows = tables.entity[self.layout.rows("entity", int(piece.party[0]))]
            leaves["everyone"] = rows.expand(len(piece), -1, -1).clone() if copies else rows.clone()
        elif piece.triples is not None:
            leaves["free_head"] = tables.entity[piece.triples[..., 0]]
            leaves["free_relation"] = tables.relation[piece.triples[..., 1]]
            leaves["free_tail"] = tables.entity[piece.triples[..., 2]]
        else:
            leaves["negative"] = tables.entity[self._stand_ins(piece)]
        for which, tensor in enumerate(tables.shared):
            leaves[f"shared.{which}"] = tensor[piece.party] if copies else tensor[piece.party[:1]].clone()
        return {name: leaf.detach().requires_grad_() for name, leaf in leaves.items()}

    def _losses(self, piece: Chunk, leaves: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The positive and the negative part of each example's loss."""
        asks_head, prior = bool(piece.asks_head[0]), self.objective.prior
        shared = tuple(leaf for name, leaf in leaves.items() if name.startswith("shared."))
        own = leaves["head"], leaves["relation"], leaves["tail"]
        start = torch.tensor(self.layout.entity_start, device=piece.head.device)[piece.party]
        present, labels, priors = None, None, None
        candidates: tuple[Tensor, ...]
        if piece.triples is not None:
            candidates = leaves["free_head"], leaves["free_relation"], leaves["free_tail"]
            if prior is not None:
                h, r, t = piece.triples.unbind(-1)
                priors = prior.of(h - start[:, None], r, t - start[:, None])
        else:
            candidates = (leaves["everyone"] if piece.everyone else leaves["negative"],)
            if piece.everyone:
                ids = torch.arange(candidates[0].shape[-2], device=start.device).expand(len(piece), -1)
                answer = (piece.head if asks_head else piece.tail) - start
                present = ids != answer[:, None]
            else:
                present, ids = self._candidates(piece) >= 0, self._stand_ins(piece) - start[:, None]
            if prior is not None:
                h, t = (piece.head - start)[:, None], (piece.tail - start)[:, None]
                relations = piece.relation[:, None]
                priors = prior.of(ids, relations, t) if asks_head else prior.of(h, relations, ids)
        if prior is not None:
            priors = prior.of(piece.head - start, piece.relation, piece.tail - start), priors
        if isinstance(self.objective.loss, KVsAll):
            assert piece.answers is not None
            offsets, rows = piece.answers
            example = torch.arange(len(piece), device=start.device).repeat_interleave(offsets[1:] - offsets[:-1])
            labels = torch.zeros(len(piece), candidates[0].shape[-2], dtype=own[0].dtype, device=start.device)
            labels[example, rows - start[example]] = 1.0
        rows = self.dropped(piece, asks_head, *own)
        return self.arithmetic(asks_head, own, rows, candidates, shared, present, priors, labels)

    @staticmethod
    def dropped(
        piece: Chunk, asks_head: bool, head: Tensor, relation: Tensor, tail: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """A piece's rows after dropout, of the query's alone."""
        if piece.drop_relation is not None:
            relation = relation * piece.drop_relation
        if piece.drop_entity is not None:
            head, tail = (head, tail * piece.drop_entity) if asks_head else (head * piece.drop_entity, tail)
        return head, relation, tail

    def arithmetic(
        self, asks_head: bool, own: tuple[Tensor, Tensor, Tensor], rows: tuple[Tensor, Tensor, Tensor],
        candidates: tuple[Tensor, ...], shared: tuple[Tensor, ...], present: Tensor | None,
        priors: tuple[Tensor, Tensor] | None, labels: Tensor | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """From rows to the two parts of the loss: all that autograd, or a compiler, has to see.

        `own` are the rows of the triple, `rows` the same after dropout; candidates are one tensor of rows, or the three
        of triples that stand for themselves.
        """
        objective, scorer, (head, relation, tail) = self.objective, self.objective.scorer, rows
        if len(candidates) == 3:
            negative = scorer.score(*candidates, tuple(tensor[:, None] for tensor in shared))
        elif asks_head:
            negative = scorer.score_heads(relation, tail, candidates[0], shared)
        else:
            negative = scorer.score_tails(head, relation, candidates[0], shared)
        if priors is not None:
            negative = negative + priors[1]
        if present is None:
            present = torch.ones_like(negative, dtype=torch.bool)
        if isinstance(objective.loss, KVsAll):
            parts = torch.zeros_like(negative[:, 0]), objective.loss.of_labels(negative, labels)
        else:
            positive = scorer.score(head, relation, tail, shared)
            if priors is not None:
                positive = positive + priors[0]
            parts = objective.loss(positive, negative, present)
        penalty = self.penalty(asks_head, *own, shared)
        return parts if penalty is None else (parts[0] + penalty, parts[1])

    def penalty(
        self, asks_head: bool, head: Tensor, relation: Tensor, tail: Tensor, shared: tuple[Tensor, ...]
    ) -> Tensor | None:
        """The regulariser of each example: of all three rows, or of a query's own two where it has many answers."""
        regulariser, many = self.objective.regulariser, isinstance(self.objective.loss, KVsAll)
        if not regulariser.weight:
            return None
        known_head, known_tail = (None if many and asks_head else head), (None if many and not asks_head else tail)
        return regulariser.penalty(self.objective.scorer, known_head, relation, known_tail, shared)


def row_gradients(kernel: Reference, tables: Tables, chunk: Chunk, part: LossPart = "both") -> RowGradients:
    """The gradient of every unit, for tests, audits and the clipped rule: repeats of a row in a unit are merged."""
    kernel._check(part)
    there, of = chunk.weight != 0, chunk.unit
    if of is None:
        of = torch.arange(len(chunk), device=chunk.head.device)
        chunk = replace(chunk, unit=of)
    units = int(of[there].max()) + 1 if bool(there.any()) else 0
    party = torch.zeros(units, dtype=torch.int64, device=chunk.head.device)
    party[of[there]] = chunk.party[there]
    loss = tables.entity.new_zeros(len(chunk))
    entity: list[tuple[Tensor, Tensor, Tensor]] = []
    relation: list[tuple[Tensor, Tensor, Tensor]] = []
    shared = tuple(tables.entity.new_zeros(units, *tensor.shape[1:]) for tensor in tables.shared)
    for index, piece in kernel._pieces(tables, chunk, copies=True):
        leaves = kernel._gather(tables, piece, copies=True)
        wanted = _only(part, *kernel._losses(piece, leaves))
        gradients = _backward(wanted.sum(), leaves)
        loss[index] = wanted.detach()
        unit = of[index]
        entity += [(unit, piece.head, gradients["head"]), (unit, piece.tail, gradients["tail"])]
        relation.append((unit, piece.relation, gradients["relation"]))
        if "everyone" in gradients:
            count = gradients["everyone"].shape[1]
            rows = torch.arange(count, device=unit.device) + kernel.layout.entity_start[int(piece.party[0])]
            entity.append((unit.repeat_interleave(count), rows.repeat(len(piece)), gradients["everyone"].flatten(0, 1)))
        if "negative" in gradients:
            candidates = kernel._candidates(piece)
            there = (candidates >= 0).reshape(-1)
            owners = unit.repeat_interleave(candidates.shape[1])
            entity.append((owners[there], candidates.reshape(-1)[there], gradients["negative"].flatten(0, 1)[there]))
        if piece.triples is not None:
            owners = unit.repeat_interleave(piece.triples.shape[1])
            for column, name in enumerate(("free_head", "free_relation", "free_tail")):
                into = relation if column == 1 else entity
                into.append((owners, piece.triples[..., column].reshape(-1), gradients[name].flatten(0, 1)))
        for which, tensor in enumerate(shared):
            tensor.index_add_(0, unit, gradients[f"shared.{which}"])
    return RowGradients(_merged(entity, tables.entity), _merged(relation, tables.relation), shared, party, loss)


def _only(part: LossPart, positive: Tensor, negative: Tensor) -> Tensor:
    """What is wanted of a loss."""
    return {"positive": positive, "negative": negative}.get(part, positive + negative)


def _merged(pieces: list[tuple[Tensor, Tensor, Tensor]], table: Tensor) -> Rows:
    """Gradients of rows with repeats of (unit, row) added up."""
    if not pieces:
        nothing = torch.zeros(0, dtype=torch.int64, device=table.device)
        return Rows(nothing, nothing, table.new_zeros(0, table.shape[1]))
    unit, row, values = (torch.cat(column) for column in zip(*pieces, strict=True))
    keys, where = torch.unique(unit * len(table) + row, return_inverse=True)
    merged = values.new_zeros(len(keys), values.shape[1]).index_add_(0, where, values)
    return Rows(keys // len(table), keys % len(table), merged)


def _backward(total: Tensor, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    found = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    pairs = zip(leaves.items(), found, strict=True)
    return {name: torch.zeros_like(leaf) if gradient is None else gradient for (name, leaf), gradient in pairs}


def _times(values: Tensor, factor: Tensor) -> Tensor:
    """values x factor by rows, where a factor of 0 means nothing at all, even of what is not finite."""
    factor = factor.reshape(-1, *[1] * (values.dim() - 1))
    return torch.where(factor == 0, 0.0, values * factor)
