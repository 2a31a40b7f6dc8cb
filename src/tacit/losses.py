"""Losses: from the scores of one example and its negatives to one number per example, never reduced.

`positive` is (b,), `negative` is (b, n), and `present` says which negatives are there. Each loss gives two numbers per
example, the positive part and the negative part, since some private mechanisms treat them apart; a loss whose parts
cannot be told apart says so (`apart`), and has all of it in the second.

`refused` says why a loss may not be used under privacy; None: it may, because the loss of an example depends on that
example and public draws alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch.nn.functional import logsigmoid

from tacit.errors import BadValue

Tensor = Any


@dataclass(frozen=True)
class Loss:
    """Base of the losses over one true triple and some negatives."""

    refused: ClassVar[str | None] = None
    apart: ClassVar[bool] = True
    needs: ClassVar[str | None] = None
    """The only kind of negatives this loss goes with; None: any."""

    def __call__(self, positive: Tensor, negative: Tensor, present: Tensor) -> tuple[Tensor, Tensor]:
        raise NotImplementedError


@dataclass(frozen=True)
class SelfAdversarial(Loss):
    """-log s(f(pos)) - sum_i p_i log s(-f(neg_i)), p = softmax(alpha f(neg)) without a gradient.

    Sun et al.: "RotatE", ICLR 2019; the default of FedE, FedR and DP-FLames.
    """

    alpha: float = 1.0

    def __call__(self, positive: Tensor, negative: Tensor, present: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            weights = torch.softmax((self.alpha * negative).masked_fill(~present, float("-inf")), -1)
            weights = torch.where(present, weights, 0.0)  # all absent: softmax has nothing to share out
        return -logsigmoid(positive), (-weights * logsigmoid(-negative)).sum(-1)


@dataclass(frozen=True)
class Margin(Loss):
    """The mean over negatives of max(0, margin - f(pos) + f(neg)).

    Bordes et al.: "TransE", NIPS 2013; used by DPKGE and FKGE with one negative.
    """

    apart = False
    margin: float = 1.0

    def __post_init__(self) -> None:
        if self.margin < 0:
            raise BadValue(f"margin is at least 0, not {self.margin}")

    def __call__(self, positive: Tensor, negative: Tensor, present: Tensor) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(positive), _mean(torch.relu(self.margin - positive[:, None] + negative), present)


@dataclass(frozen=True)
class Logistic(Loss):
    """-log s(f(pos)) - the mean over negatives of log s(-f(neg)).

    Trouillon et al.: "ComplEx", ICML 2016.
    """

    def __call__(self, positive: Tensor, negative: Tensor, present: Tensor) -> tuple[Tensor, Tensor]:
        return -logsigmoid(positive), _mean(-logsigmoid(-negative), present)


@dataclass(frozen=True)
class Softmax(Loss):
    """-log of the share of exp f(pos) among itself and the negatives: cross-entropy over what was sampled.

    Over a shared pool this is the sampled softmax of Jean, Cho, Memisevic and Bengio (ACL 2015).
    """

    apart = False

    def __call__(self, positive: Tensor, negative: Tensor, present: Tensor) -> tuple[Tensor, Tensor]:
        among = torch.cat([positive[:, None], negative.masked_fill(~present, float("-inf"))], -1)
        return torch.zeros_like(positive), torch.logsumexp(among, -1) - positive


@dataclass(frozen=True)
class OneVsAll(Softmax):
    """Cross-entropy of the true entity against all entities of its party.

    Lacroix, Usunier and Obozinski: "Canonical tensor decomposition for knowledge base completion", ICML 2018.
    """

    needs = "all"


@dataclass(frozen=True)
class KVsAll(Loss):
    """All true answers of a query against all entities of its party at once, by binary or softmax cross-entropy.

    Dettmers, Minervini, Stenetorp and Riedel: "Convolutional 2D knowledge graph embeddings", AAAI 2018 (binary);
    Ruffinelli, Broscheit and Gemulla: "You CAN teach an old dog new tricks!", ICLR 2020 (softmax). `smoothing` moves
    that share of the labels' weight to all entities alike.
    """

    refused = "an example of k-vs-all is many triples at once, and no clip bounds one: use one-vs-all or softmax"
    apart = False
    needs = "all"
    entropy: Literal["binary", "softmax"] = "binary"
    smoothing: float = 0.0

    def __post_init__(self) -> None:
        if self.entropy not in ("binary", "softmax"):
            raise BadValue(f"entropy is 'binary' or 'softmax', not {self.entropy!r}")
        if not 0 <= self.smoothing < 1:
            raise BadValue(f"smoothing is in [0, 1), not {self.smoothing}")

    def of_labels(self, scores: Tensor, labels: Tensor) -> Tensor:
        """(b, n) scores of all entities and (b, n) labels, 1 for each true answer -> (b,)."""
        entities = scores.shape[-1]
        if self.entropy == "binary":
            labels = (1 - self.smoothing) * labels + self.smoothing / entities
            return (-logsigmoid(-scores) - labels * scores).mean(-1)
        labels = labels / labels.sum(-1, keepdim=True)
        labels = (1 - self.smoothing) * labels + self.smoothing / entities
        return torch.logsumexp(scores, -1) - (labels * scores).sum(-1)


def _mean(values: Tensor, present: Tensor) -> Tensor:
    return torch.where(present, values, 0.0).sum(-1) / present.sum(-1).clamp(min=1)


@dataclass(frozen=True)
class Regulariser:
    """weight x a norm of the rows of an example's own triple, inside its loss: allowed under privacy, and clipped."""

    refused: ClassVar[str | None] = None
    weight: float = 0.0

    def __post_init__(self) -> None:
        if not self.weight >= 0:
            raise BadValue(f"the weight of a regulariser is at least 0, not {self.weight}")

    def of(self, sizes: Tensor) -> Tensor:
        """The penalty of rows whose numbers have these sizes: (b, n) -> (b,)."""
        return torch.zeros_like(sizes[..., 0])

    def penalty(self, scorer: Any, head: Tensor | None, relation: Tensor, tail: Tensor | None, shared: Any) -> Tensor:
        """The penalty of each triple, (b,), given its rows; None: an example that has no such row of its own."""
        named = (("entity", head), ("relation", relation), ("entity", tail))
        return sum(self.of(scorer.magnitudes(part, rows)) for part, rows in named if rows is not None)


@dataclass(frozen=True)
class NoRegulariser(Regulariser):
    """Nothing."""


@dataclass(frozen=True)
class L2(Regulariser):
    """weight x sum of squares of the head's, relation's and tail's numbers."""

    def of(self, sizes: Tensor) -> Tensor:
        return self.weight * sizes.square().sum(-1)


@dataclass(frozen=True)
class N3(Regulariser):
    """weight x sum of cubes of moduli, the nuclear 3-norm of Lacroix, Usunier and Obozinski (ICML 2018)."""

    def of(self, sizes: Tensor) -> Tensor:
        return self.weight * sizes.pow(3).sum(-1)


@dataclass(frozen=True)
class Dura(Regulariser):
    """weight x sum of squares of head, tail, and what each is compared with: a distance model dual to the products.

    Zhang, Cai and Wang: "Duality-induced regularizer for tensor factorization based knowledge graph completion",
    NeurIPS 2020. For scorers by products, and losses over triples.
    """

    def penalty(self, scorer: Any, head: Tensor | None, relation: Tensor, tail: Tensor | None, shared: Any) -> Tensor:
        if head is None or tail is None:
            raise TypeError("dura needs triples")
        rows = head, tail, scorer.tail_query(head, relation, shared), scorer.head_query(relation, tail, shared)
        return self.weight * sum(row.square().sum(-1) for row in rows)


LOSSES: dict[str, type[Loss]] = {
    "self-adversarial": SelfAdversarial,
    "margin": Margin,
    "logistic": Logistic,
    "softmax": Softmax,
    "one-vs-all": OneVsAll,
    "k-vs-all": KVsAll,
}
REGULARISERS: dict[str, type[Regulariser]] = {"none": NoRegulariser, "l2": L2, "n3": N3, "dura": Dura}
