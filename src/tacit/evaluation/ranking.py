"""Link prediction: where the true answer stands among all candidates.

Ranks come from counting, not from sorting: how many candidates score higher than the true answer, and how many the
same. Scores of all pairs are made block by block under a memory budget and forgotten at once. The blocks are made by
the fast way to score (matrix products where the scorer allows), which rounds a little differently; a candidate so close
to the true answer that rounding could decide is settled by scoring that pair alone. So a rank depends neither on the
budget nor on what else was scored, and equal rows are ties, always.

Candidates that are known answers are filtered, in the sense of Bordes et al. (2013): whatever is true in any split, but
for the answer asked for. Ties count half (the realistic rank: the mean of the best and the worst place among equals),
unless asked otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from tacit.errors import BadValue, TacitError
from tacit.graph import Graph, triple_keys
from tacit.kernels.counting import Known, counter_for
from tacit.models.model import Model, Queries
from tacit.models.scorer import matrix_products

Tensor = Any
Sides = Literal["tails", "heads", "both"]
Ties = Literal["realistic", "optimistic", "pessimistic"]
QUERIES = 512
"""At most so many queries are scored at once."""
LISTED = (64, 2048)
"""How many close candidates of a query a kernel lists; then once more for queries that have more. With still more, a
query is counted by blocks."""
SMALLEST = 64
"""Blocks have at least so many candidates, whatever the budget."""


@dataclass(frozen=True)
class Metrics:
    """Summary of some ranks.

    mrr: mean of 1 / rank. mr: mean rank. hits1, hits3, hits10: share of ranks up to that. amri: adjusted mean rank
    index (Berrendorf et al. 2020), 0 for guessing and 1 for perfect, whatever the number of candidates. count: how many
    ranks.
    """

    mrr: float
    mr: float
    hits1: float
    hits3: float
    hits10: float
    amri: float
    count: int

    def json(self) -> dict[str, float | int | None]:
        """By name; of no ranks there are no numbers, as JSON has no NaN."""
        return {name: None if isinstance(value, float) and math.isnan(value) else value
                for name, value in asdict(self).items()}  # fmt: skip

    @staticmethod
    def of(values: Mapping[str, Any]) -> Metrics:
        """What `json` gave."""
        made: dict[str, Any] = {name: math.nan if value is None else value for name, value in values.items()}
        return Metrics(**made)


NO_METRICS = Metrics(math.nan, math.nan, math.nan, math.nan, math.nan, math.nan, 0)
"""Of no ranks at all."""


@dataclass(frozen=True)
class Ranks:
    """Where the true answers stand, one entry per question.

    Attributes
    ----------
    greater, equal
        How many candidates score higher than the true answer, and how many the same (itself not counted).
    candidates
        How many there are, the true answer included.
    relation, asks_head
        What was asked.
    """

    greater: npt.NDArray[np.int64]
    equal: npt.NDArray[np.int64]
    candidates: npt.NDArray[np.int64]
    relation: npt.NDArray[np.int64]
    asks_head: npt.NDArray[np.bool_]

    def of(self, ties: Ties = "realistic") -> npt.NDArray[np.float64]:
        """The ranks, from 1 on."""
        share = {"optimistic": 0.0, "realistic": 0.5, "pessimistic": 1.0}
        if ties not in share:
            raise BadValue(f"ties is one of {', '.join(share)}; not {ties!r}")
        return 1.0 + self.greater + share[ties] * self.equal

    def where(self, mask: npt.NDArray[np.bool_]) -> Ranks:
        return Ranks(*(getattr(self, name)[mask] for name in self.__dataclass_fields__))

    def metrics(self, ties: Ties = "realistic") -> Metrics:
        ranks = self.of(ties)
        if not len(ranks):
            return NO_METRICS
        expected = (self.candidates + 1).mean() / 2
        hits = [float((ranks <= k).mean()) for k in (1, 3, 10)]
        mean = float(ranks.mean())
        amri = 1.0 - (mean - 1.0) / (expected - 1.0) if expected > 1 else 1.0
        return Metrics(float((1.0 / ranks).mean()), mean, hits[0], hits[1], hits[2], float(amri), len(ranks))

    def by_side(self, ties: Ties = "realistic") -> dict[str, Metrics]:
        sides = (("tails", ~self.asks_head), ("heads", self.asks_head))
        return {side: self.where(mask).metrics(ties) for side, mask in sides if mask.any()}

    def by_relation(self, ties: Ties = "realistic") -> dict[int, Metrics]:
        return {int(r): self.where(self.relation == r).metrics(ties) for r in np.unique(self.relation)}


def weighted(parties: Sequence[Metrics]) -> Metrics:
    """The mean over parties, each weighted by how many questions it had: what a federation reports."""
    there = [metrics for metrics in parties if metrics.count]
    total = sum(metrics.count for metrics in there)
    if not total:
        return NO_METRICS
    names = ("mrr", "mr", "hits1", "hits3", "hits10", "amri")
    means = {name: sum(getattr(m, name) * m.count for m in there) / total for name in names}
    return Metrics(**means, count=total)


def typed_candidates(graph: Graph) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Which (relation, tail) and (relation, head) pairs occur in train: candidates that fit the relation's type.

    Krompass, Baier and Tresp: "Type-constrained representation learning in knowledge graphs", ISWC 2015; used by FKGE.
    """
    triples = graph.train.triples.astype(np.int64)
    return np.unique(triples[:, [1, 2]], axis=0), np.unique(triples[:, [1, 0]], axis=0)


class Questions:
    """Triples whose tails and heads are asked for, and all other true answers of each: made once, ranked many times.

    Parameters
    ----------
    triples
        (n, 3) what is asked.
    known
        (m, 3) all facts, of every split; none: raw ranks.
    """

    def __init__(self, triples: npt.NDArray[Any], known: npt.NDArray[Any] | Iterable[npt.NDArray[Any]]):
        self.triples = np.asarray(triples, np.int64).reshape(-1, 3)
        facts = known if isinstance(known, np.ndarray) else np.concatenate([np.zeros((0, 3), np.int64), *known])
        self.facts = _distinct(np.asarray(facts, np.int64).reshape(-1, 3))
        both = (self.triples, self.facts)
        self.least = [array.min(initial=0) for array in both]
        self.beyond = [array.max(axis=0, initial=-1) + 1 for array in both]
        self._ids: dict[str, Tensor] = {}
        self._known: dict[tuple[tuple[bool, ...], str], Known] = {}

    def ids(self, device: Any) -> Tensor:
        """The triples that are asked for, on a device."""
        if str(device) not in self._ids:
            self._ids[str(device)] = torch.from_numpy(self.triples).to(device)
        return self._ids[str(device)]

    def targets(self, sides: Sequence[bool], device: Any) -> Tensor:
        """The answers that are asked for, of one side after the other; a side says whether heads are."""
        return torch.cat([self.ids(device)[:, 0 if asks_head else 2] for asks_head in sides])

    def known(self, sides: Sequence[bool], device: Any) -> Known:
        """All true answers of each query, the one that is asked for among them, of one side after the other."""
        place = (tuple(sides), str(device))
        if place not in self._known:
            parts, before = [], 0
            for first, last, answers, others in map(self._side, sides):
                parts.append((first + before, last + before, answers, others))
                before += len(answers)
            columns = (np.concatenate(column) for column in zip(*parts, strict=True))
            self._known[place] = Known(*(torch.from_numpy(column).to(device) for column in columns))
        return self._known[place]

    def pairs(self, sides: Sequence[bool], most: int, device: Any) -> Iterator[tuple[Tensor, Tensor]]:
        """(query, entity) for every other true answer of every query, about `most` at a time: a hub has very many."""
        first, last, answers, _ = self.known(sides, device)
        target = self.targets(sides, device)
        many = last - first
        ends, begin = many.cumsum(0), 0
        while begin < len(many):
            before = int(ends[begin - 1]) if begin else 0
            end = max(begin + 1, int(torch.searchsorted(ends, before + most, right=True)))
            some = many[begin:end]
            query = torch.arange(begin, begin + len(some), device=device).repeat_interleave(some)
            place = torch.arange(int(some.sum()), device=device) + before - (ends - many)[query] + first[query]
            answer = answers[place]
            other = answer != target[query]
            yield query[other], answer[other]
            begin = end

    def _side(self, asks_head: bool) -> tuple[Any, Any, Any, Any]:
        column, known_column = (0, 2) if asks_head else (2, 0)
        triples, facts = self.triples, self.facts
        entities = int(max(triples.max(initial=0), facts.max(initial=0))) + 1
        asked = triples[:, 1] * entities + triples[:, known_column]
        there = facts[:, 1] * entities + facts[:, known_column]
        useful = _among(there, np.unique(asked))
        there, answers = there[useful], facts[useful, column]
        order = np.argsort(there, kind="stable")
        there, answers = there[order], answers[order]
        first, last = np.searchsorted(there, asked, "left"), np.searchsorted(there, asked, "right")
        relations = int(max(triples[:, 1].max(initial=0), facts[:, 1].max(initial=0))) + 1
        own = _among(triple_keys(triples, entities, relations), triple_keys(facts, entities, relations))
        return first, last, answers, last - first - own


def rank(
    model: Model,
    triples: npt.NDArray[Any] | Questions,
    known: npt.NDArray[Any] | Iterable[npt.NDArray[Any]] = (),
    *,
    sides: Sides = "both",
    memory_mb: float = 1024,
    typed: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]] | None = None,
) -> Ranks:
    """Rank the true tail and the true head of each triple among all entities.

    Parameters
    ----------
    triples
        (n, 3) what is asked; or `Questions`, which know the facts already.
    known
        (m, 3) all facts, of every split; none: raw ranks.
    memory_mb
        About how much memory the blocks of scores may take, beside the tables.
    typed
        From `typed_candidates`: only these, and the true answer, are candidates.
    """
    if sides not in ("tails", "heads", "both"):
        raise BadValue(f"sides is tails, heads or both; not {sides!r}")
    if not memory_mb > 0:
        raise BadValue(f"memory_mb is above 0, not {memory_mb}")
    tables = {name: tensor for name, tensor in model.tables.tensors().items() if tensor.numel()}
    # NaN is the least and the greatest of all; no copy of a large table
    finite = torch.stack([sum(tensor.aminmax()).isfinite() for tensor in tables.values()]).tolist() if tables else []
    for name, whole in zip(tables, finite, strict=True):
        if not whole:
            raise TacitError(f"the {name} table holds values that are not finite, and cannot be ranked by")
    asked = triples if isinstance(triples, Questions) else Questions(triples, known)
    limits = np.array([model.entities, model.relations, model.entities])
    if asked.least[0] < 0 or (asked.beyond[0] > limits).any():
        raise BadValue("a triple that is asked for has an entity or a relation that the model has no row for")
    if asked.least[1] < 0 or (asked.beyond[1] > limits).any():
        raise BadValue("a known fact has an entity or a relation that the model has no row for")
    wanted = [side == "heads" for side in ("tails", "heads") if sides in (side, "both")]
    with torch.no_grad(), matrix_products("float32"):  # what rounds more is not allowed for
        relation, queries = asked.ids(model.tables.entity.device)[:, 1], []
        for asks_head in wanted:
            given = asked.targets([not asks_head], relation.device)
            queries.append(Queries(model, relation, given, asks_head=asks_head))
        together = Queries.together(queries) if typed is None else None
        if together is not None:
            found = [_ranked(model, asked, together, wanted, memory_mb, None)]
        else:
            found = [
                _ranked(model, asked, one, [side], memory_mb, None if typed is None else typed[int(side)])
                for one, side in zip(queries, wanted, strict=True)
            ]
    return Ranks(*(np.concatenate([getattr(r, name) for r in found]) for name in Ranks.__dataclass_fields__))


def _ranked(
    model: Model, asked: Questions, queries: Queries, sides: Sequence[bool], memory_mb: float, allowed: Any
) -> Ranks:
    """The ranks of these sides' queries, one side after the other."""
    device = model.tables.entity.device
    counting = _Counting(model, queries, asked.targets(sides, device), memory_mb, allowed)
    left = counting.by_kernel(asked.known(sides, device))
    if len(left):
        counting.everyone(left)
        for query, candidate in asked.pairs(sides, counting.at_once(), device):
            counting.leave_out(query, candidate, left)
    greater, equal, candidates = torch.stack([counting.greater, counting.equal, counting.candidates]).cpu().numpy()
    relation, heads = np.tile(asked.triples[:, 1], len(sides)), np.repeat(sides, len(asked.triples))
    return Ranks(greater, equal, candidates, relation, heads)


TOO_LARGE = (
    "scores overflow: the rows hold values that are too large to rank by, as a training that diverged leaves them"
)


class _Counting:
    """How many candidates of each query score higher than its true answer, and how many the same."""

    def __init__(self, model: Model, queries: Queries, target: Tensor, memory_mb: float, allowed: Any):
        self.queries, self.target, self.relation = queries, target, queries.prior_relation
        self.entities = model.entities
        self.budget = memory_mb * 2**20
        every = torch.arange(len(target), device=target.device)
        self.target_score = torch.cat([self._score(index, target[index]) for index in every.split(self.at_once())] or [
            model.tables.entity.new_zeros(0)
        ])  # fmt: skip
        if not bool(self.target_score.isfinite().all()):
            raise TacitError(TOO_LARGE)
        self.greater = torch.zeros(len(target), dtype=torch.int64, device=target.device)
        self.equal = torch.zeros_like(self.greater)
        self.candidates = torch.full_like(self.greater, model.entities)
        self.allowed = None
        if allowed is not None:
            pairs = torch.from_numpy(allowed).to(target.device)
            self.allowed = pairs[pairs[:, 1].argsort(stable=True)]  # by entity: a block of entities is a slice
            self.allowed_keys = (pairs[:, 0] * model.entities + pairs[:, 1]).sort().values
            self.candidates = torch.bincount(pairs[:, 0], minlength=model.relations)[self.relation]
            self.candidates += ~self._is_allowed(self.relation, target)

    def at_once(self) -> int:
        """How many single pairs may be scored at once."""
        width = self.queries.entity.shape[1] + self.queries.model.tables.relation.shape[1]
        return max(SMALLEST, int(self.budget / (8 * self.queries.entity.element_size() * width)))

    def _score(self, index: Tensor, candidate: Tensor) -> Tensor:
        return self.queries.pairs(index, candidate)

    def _is_allowed(self, relation: Tensor, entity: Tensor) -> Tensor:
        keys = relation * self.entities + entity
        place = torch.searchsorted(self.allowed_keys, keys).clamp(max=max(len(self.allowed_keys) - 1, 0))
        return self.allowed_keys[place] == keys if len(self.allowed_keys) else torch.zeros_like(keys, dtype=torch.bool)

    def by_kernel(self, known: Known) -> Tensor:
        """Count by a fused kernel where there is one; the queries that are left over."""
        queries, left = self.queries, torch.arange(len(self.target), device=self.target.device)
        counter, slack = counter_for(left.device.type), self.queries.close(self.target_score)
        if counter is None or slack is None or self.allowed is not None:
            return left
        assert queries.query is not None
        self.candidates -= known.others
        value = torch.cat([queries.compared(i, self.target[i]) for i in left.split(self.at_once())])
        query, target, own = queries.query, self.target, known
        for listed in LISTED:
            counts = counter(str(queries.scorer.geometry), query, queries.entity, target, value, slack, own, listed,
                             self.budget / 2)  # fmt: skip
            enough = counts.close <= listed
            self.greater[left] += counts.better * enough
            place = torch.arange(listed, device=left.device)
            which_query, column = ((place < counts.close[:, None]) & enough[:, None]).nonzero(as_tuple=True)
            which = counts.which[which_query, column]
            self._settle(left[which_query], torch.where(which < 0, -1 - which, which), torch.where(which < 0, -1, 1))
            rest = (~enough).nonzero()[:, 0]
            left = left[rest]
            if not len(left):
                break
            query, target, value, slack = (tensor[rest] for tensor in (query, target, value, slack))
            own = Known(own.first[rest], own.last[rest], own.answers, own.others[rest])
        self.candidates[left] = self.entities  # they are counted from the beginning
        return left

    def everyone(self, index: Tensor) -> None:
        """Count all candidates of these queries by blocks of scores, those of one relation together."""
        index = index[self.queries.relation[index].argsort(stable=True)]
        each = self.queries.bytes_per_pair() + 32  # the scores, and what comparing them takes
        several = max(1, min(QUERIES, len(index), int(self.budget / (each * SMALLEST))))
        width = max(SMALLEST, int(self.budget / (each * several + self.queries.bytes_per_candidate())))
        for some in index.split(several):
            for begin in range(0, self.entities, width):
                self._block(some, slice(begin, min(begin + width, self.entities)))

    def _block(self, index: Tensor, candidates: slice) -> None:
        score, slack = self.queries.block(index, candidates)
        low, high = score.aminmax()
        if not bool((high - low).isfinite()):
            raise TacitError(TOO_LARGE)
        score -= self.target_score[index][:, None]
        near = score.abs() <= slack
        above = score > slack
        exact = slack == 0  # nothing was rounded differently: no pair has to be looked at again
        if self.allowed is not None:
            fits = self._fitting(index, candidates)
            near &= fits
            above &= fits
        target = self.target[index]
        itself = ((target >= candidates.start) & (target < candidates.stop)).nonzero()[:, 0]
        near[itself, target[itself] - candidates.start] = above[itself, target[itself] - candidates.start] = False
        self.greater[index] += above.sum(1)
        self.equal[index] += (near & exact).sum(1)
        near &= ~exact
        del score, above
        query, candidate = near.nonzero(as_tuple=True)
        self._settle(index[query], candidate + candidates.start)

    def _settle(self, query: Tensor, candidate: Tensor, sign: Tensor | None = None) -> None:
        """Score each pair that rounding could decide by itself, and count it (or, by its sign, take it back)."""
        sign = torch.ones_like(query) if sign is None else sign
        for q, c, s in zip(*(tensor.split(self.at_once()) for tensor in (query, candidate, sign)), strict=True):
            score, target = self._score(q, c), self.target_score[q]
            self.greater.index_add_(0, q, s * (score > target))
            self.equal.index_add_(0, q, s * (score == target))

    def _fitting(self, index: Tensor, candidates: slice) -> Tensor:
        """(q, c): which of these candidates fit the type."""
        assert self.allowed is not None
        entity = self.allowed[:, 1].contiguous()
        bounds = torch.tensor([candidates.start, candidates.stop], device=entity.device)
        first, last = torch.searchsorted(entity, bounds).tolist()
        pairs = self.allowed[first:last]
        width = candidates.stop - candidates.start
        relations, place = self.relation[index].unique(return_inverse=True)
        row = torch.searchsorted(relations, pairs[:, 0].contiguous()).clamp(max=len(relations) - 1)
        wanted = relations[row] == pairs[:, 0]
        fits = torch.zeros(len(relations), width, dtype=torch.bool, device=entity.device)
        fits[row[wanted], pairs[wanted, 1] - candidates.start] = True
        return fits[place]

    def leave_out(self, query: Tensor, candidate: Tensor, left: Tensor) -> None:
        """Take back what was counted of those queries for candidates that are true answers themselves."""
        if len(left) < len(self.target):
            of_them = torch.isin(query, left)
            query, candidate = query[of_them], candidate[of_them]
        if self.allowed is not None:
            fits = self._is_allowed(self.relation[query], candidate)
            query, candidate = query[fits], candidate[fits]
        self.candidates -= torch.bincount(query, minlength=len(self.target))
        self._settle(query, candidate, -torch.ones_like(query))


def _among(values: Any, known: Any) -> Any:
    """Which values are among those known, which are sorted: np.isin would sort all of either."""
    place = np.searchsorted(known, values)
    return known[np.minimum(place, len(known) - 1)] == values if len(known) else np.zeros(len(values), bool)


def _distinct(facts: Any) -> Any:
    """Each fact once, sorted."""
    entities, relations = (int(facts[:, columns].max(initial=0)) + 1 for columns in ([0, 2], [1]))
    return facts[np.unique(triple_keys(facts, entities, relations), return_index=True)[1]]
