"""How the rows of several parties become one: state machines that talk in messages.

Each side of an aggregation answers to a phase: a party with messages to the server, the server with messages to the
parties, or with the result. The owner mean has one phase; masks and shares need several. What a server learns on the
way is what the messages hold, and each aggregation says it in a sentence (`discloses`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from tacit.errors import BadValue, Refused, TacitError
from tacit.federation.messages import SERVER, Inbox, Message
from tacit.models import Scorer
from tacit.models.translational import RotatE

Tensor = Any
Part = Literal["entity", "relation"]
NOWHERE = 1e-6
"""A mean of directions that is shorter than this points nowhere."""


@dataclass(frozen=True)
class Share:
    """What a party brings to a round: its rows after training, and what it was given before.

    `ids`: the shared row of each, (n,), in the party's own order. `total`: how many shared rows there are. `before`:
    only where it is needed.
    """

    party: int
    round: int
    part: Part
    ids: Tensor
    now: Tensor
    before: Tensor | None = None
    total: int = 0


@dataclass(frozen=True)
class Shared:
    """What the server holds when a round's rows come in.

    Attributes
    ----------
    table
        (total, width) the shared rows as they are.
    owners
        The shared row of each of a party's rows, for every party that trained; none of them where the server is not to
        know.
    counts
        How much each of these rows counts, where parties told.
    """

    round: int
    part: Part
    table: Tensor
    owners: Mapping[int, Tensor]
    counts: Mapping[int, Tensor]


@dataclass(frozen=True)
class Result:
    """The shared rows after a round, and who of those expected was missing."""

    table: Tensor
    absent: frozenset[int]


def located(ids: Tensor, owned: Tensor, total: int) -> Tensor:
    """Where each of some shared rows stands among a party's own; one that it does not have is refused."""
    place = torch.full((total,), -1, dtype=torch.int64, device=owned.device)
    place[owned] = torch.arange(len(owned), device=owned.device)
    at = place[ids.to(owned.device)]
    if bool((at < 0).any()):
        raise Refused("rows that this party does not have")
    return at


@dataclass(frozen=True)
class Aggregation:
    """Base: parties send their rows, the server takes the mean over those that trained. A row no one sent stays.

    Chen, Zhang, Yuan, Jia and Chen: "FedE: Embedding knowledge graphs in federated setting", IJCKG 2021; the same over
    relations: Zhang et al., "Efficient federated learning on knowledge graphs via privacy-preserving relation
    embedding aggregation" (FedR), EMNLP Findings 2022.

    Attributes
    ----------
    values
        float32, or float16 for half the bytes.
    changed_only
        Send only rows that differ from what was received, with their ids. Which rows a party's training moved is then
        told, and with it which of them its triples touch.
    """

    needs_counts: ClassVar[bool] = False
    tolerates_absence: ClassVar[bool] = False
    """Whether a round counts in which someone dropped out."""
    is_opened: ClassVar[bool] = False
    """Whether the server says something before the first phase."""
    values: Literal["float32", "float16"] = "float32"
    changed_only: bool = False

    def __post_init__(self) -> None:
        if self.values not in ("float32", "float16"):
            raise BadValue(f"values is float32 or float16, not {self.values!r}")

    def check(self, scorer: Scorer, part: Part) -> None:
        """Refuse what cannot be aggregated so."""
        if part == "relation" and scorer.frozen:
            raise TacitError(f"{type(scorer).__name__}'s relation rows hold statistics of each party's own, and cannot "
                             "be averaged")  # fmt: skip

    def for_scorer(self, scorer: Scorer, dim: int) -> Aggregation:
        """With what this scorer's rows mean, where that matters."""
        return self

    def discloses(self) -> str:
        """What the server learns of a party."""
        moved = ", and which of them its training moved" if self.changed_only else ""
        return f"its rows, and which rows it has{moved}"

    def packed(self, rows: Tensor) -> Tensor:
        """Rows as they travel."""
        if self.values == "float32":
            return rows.float()
        packed = rows.half()
        if not bool(packed.isfinite().all()):
            raise TacitError("rows are too large for 16 bits: send float32")
        return packed

    # -- the party's side ----------------------------------------------------------------------------------------------

    def respond(self, phase: int, share: Share, inbox: Sequence[Message]) -> list[Message]:
        """What a party sends in this phase, given what the server sent in the last."""
        arrays = {"values": share.now}
        if self.changed_only:
            assert share.before is not None
            moved = (share.now != share.before).any(-1).nonzero()[:, 0]
            order = share.ids[moved].argsort()
            arrays = {"ids": share.ids[moved][order], "values": share.now[moved][order]}
        arrays["values"] = self.packed(arrays["values"])
        return [Message("rows", share.round, phase, share.party, SERVER, {"part": share.part}, arrays)]

    def awaits(self, share: Share) -> bool:
        """Whether a party expects an answer to what it said last."""
        return False

    def answered(self, phase: int, share: Share) -> Inbox:
        """What a party takes from the server after this phase, where there is another."""
        raise NotImplementedError

    @property
    def remembers(self) -> bool:
        """Whether a party has to know what it was given last."""
        return self.changed_only

    @property
    def beyond(self) -> int:
        """Numbers so far that could not be sent as they are."""
        return 0

    def state(self) -> dict[str, Tensor]:
        """What parties and server have to remember from round to round."""
        return {}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a `state`."""

    def stays(self, party: int) -> Tensor | None:
        """(total,) which shared rows a party does not take from the server, but keeps as they are; None: none."""
        return None

    # -- the server's side ---------------------------------------------------------------------------------------------

    def opening(self, shared: Shared) -> list[Message]:
        """What the server says before the first phase, to everyone who trained."""
        return []

    def expected(self, phase: int, shared: Shared) -> Inbox:
        """What the server takes in this phase."""
        rows = {party: len(ids) for party, ids in shared.owners.items()}
        width, total = shared.table.shape[1], len(shared.table) if self.changed_only else None
        return Inbox("rows", shared.part, shared.round, phase, SERVER, rows, width, total)

    def advance(self, phase: int, shared: Shared, inbox: Inbox) -> list[Message] | Result:
        """What the server sends after this phase, or the result."""
        table = shared.table
        # In float64 no sum of finite rows overflows.
        total, weight = torch.zeros_like(self.lifted(table).double()), table.new_zeros(len(table)).double()
        for message in inbox.messages():
            owned = shared.owners[message.sender]
            rows = message.arrays["values"].to(table)
            if "ids" in message.arrays:  # what it did not send is as it was given
                whole = self.packed(table[owned]).to(table)
                whole[located(message.arrays["ids"], owned, len(table))] = rows
                rows = whole
            each = shared.counts.get(message.sender)
            each = torch.ones_like(weight[: len(owned)]) if each is None else each.to(weight)
            total.index_add_(0, owned, self.lifted(rows).double() * each[:, None])
            weight.index_add_(0, owned, each)
        mean = self.lowered(total / weight.clamp(min=1e-30)[:, None], table).to(table)
        return Result(torch.where(weight[:, None] > 0, mean, table), frozenset(inbox.missing))

    def lifted(self, rows: Tensor) -> Tensor:
        """What is averaged in place of the rows."""
        return rows

    def lowered(self, mean: Tensor, before: Tensor) -> Tensor:
        """Rows again."""
        return mean


@dataclass(frozen=True)
class OwnerMean(Aggregation):
    """The mean over the parties that have the row, and trained: FedE's and FedR's aggregation."""


@dataclass(frozen=True)
class WeightedMean(Aggregation):
    """As the owner mean, each party's row weighted by how many of its training triples the row occurs in.

    Weighting clients by their data is FedAvg's (McMahan et al., AISTATS 2017); here it is row by row.
    """

    needs_counts = True

    def discloses(self) -> str:
        return super().discloses() + "; and in how many of its training triples each of them occurs"


@dataclass(frozen=True)
class CircularMean(Aggregation):
    """The mean direction of RotatE's angles, which are the same a full turn further: for relation rows of RotatE.

    Opposite angles have none, and the row stays as it was.

    Mardia and Jupp: "Directional statistics", 2000, section 2.2.
    """

    radians: float = 1.0
    """Radians per unit of a relation's row; `for_scorer` sets it."""

    def check(self, scorer: Scorer, part: Part) -> None:
        super().check(scorer, part)
        if part != "relation" or not isinstance(scorer, RotatE):
            raise TacitError("a circular mean is for angles: RotatE's relation rows")

    def lifted(self, rows: Tensor) -> Tensor:
        angle = rows * self.radians
        return torch.cat([angle.cos(), angle.sin()], -1)

    def lowered(self, mean: Tensor, before: Tensor) -> Tensor:
        cos, sin = mean.chunk(2, -1)
        nowhere = torch.hypot(cos, sin) < NOWHERE
        return torch.where(nowhere, before.to(mean), torch.atan2(sin, cos) / self.radians)

    def for_scorer(self, scorer: Scorer, dim: int) -> CircularMean:
        assert isinstance(scorer, RotatE)
        spread = scorer.init_scale or scorer.spread(dim)
        return CircularMean(self.values, self.changed_only, math.pi / spread)


AGGREGATIONS: dict[str, type[Aggregation]] = {"mean": OwnerMean, "weighted": WeightedMean, "circular": CircularMean}
