"""A star: a server that holds the shared rows, and parties that train on their own graphs between its rounds.

FedE shares entity rows, FedR relation rows; all other rows stay with their party. `Center` is the server's side and
`Seat` a party's: they meet by messages alone, which come in through inboxes, wherever the two are. A `Star` has all of
them in one process: its parties are one cohort, and train in one go.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tacit.draws import Purpose, Stream
from tacit.errors import BadValue, Refused, TacitError
from tacit.federation.aggregation import Aggregation, Part, Result, Share, Shared, located
from tacit.federation.messages import SERVER, Inbox, Message
from tacit.federation.secured import Secured
from tacit.federation.transcript import GIVE, Transcript
from tacit.federation.transport import InProcess, Talk
from tacit.federation.vocabulary import names_of, open_union, private_union
from tacit.graph import Graph
from tacit.models import Scorer
from tacit.training import Fit

LOG = logging.getLogger(__name__)
Tensor = Any
AGREE = 1
"""The first phase of an aggregation, after `GIVE`. Before round 1: names, places."""
Disguise = Callable[[int, Tensor, Tensor], Tensor]
"""What a party that does not follow the protocol sends: of the round, its rows as they were given, and as they are."""
FEW_SHARED = 0.5
"""Below this share of rows that two parties or more have, there is little to learn from each other."""


@dataclass(frozen=True)
class RoundReport:
    """What a round did: who trained, mean losses (NaN: it rested), steps, bytes that the server gave and was sent.

    beyond: numbers that were beyond the range of secure sums, and were set to its limit. absent: who dropped out.
    """

    number: int
    trained: tuple[int, ...]
    loss: tuple[float, ...]
    steps: int
    examples: int
    given: int
    sent: int
    beyond: int = 0
    absent: tuple[int, ...] = ()


def sampled_number(parties: int, fraction: float) -> int:
    """How many train in a round."""
    return max(1, int(fraction * parties + 0.5))


class Seat:
    """A party's side: its rows of what is shared, and what it was given of them.

    Parameters
    ----------
    rows
        Gives the party's own rows: a look at the table that it trains.
    places, total
        The shared row of each of them, and how many there are.
    blind
        Whether the server does not know who has which rows: it gives all of them to everyone.
    """

    def __init__(
        self,
        party: int,
        part: Part,
        aggregation: Aggregation,
        rows: Callable[[], Tensor],
        places: Tensor,
        total: int,
        blind: bool,
    ):
        self.party, self.part, self.aggregation, self.rows = party, part, aggregation, rows
        self.places, self.total, self.blind = places, total, blind
        self.given: Tensor | None = None
        """Its rows as it was last given them, where that has to be remembered."""
        self.disguise: Disguise | None = None
        """For attacks by a party that sends something else than its rows."""

    def expected(self, number: int) -> Inbox:
        """For the rows that are given for a round."""
        many = self.total if self.blind else len(self.places)
        width = self.rows().shape[1]
        return Inbox("rows", self.part, number, GIVE, self.party, {SERVER: many}, width, self.total)

    def read(self, message: Message) -> Tensor:
        """The party's rows as the server gives them."""
        own = self.rows()
        values = message.arrays["values"].to(own)
        if self.blind:
            values = values[self.places]
        if (named := message.arrays.get("ids")) is not None:
            if self.given is None:
                raise Refused("rows that changed, where none were given before")
            at = located(named, self.places, self.total)
            values, changed = self.given.clone(), values  # what is not named is as it was given
            values[at] = changed
        return values

    def take(self, values: Tensor) -> None:
        """Rows from the server become its own; but for those that are its own affair, as long as no one moves them."""
        own, kept = self.rows(), values
        if (stays := self.aggregation.stays(self.party)) is not None and self.given is not None:
            old = (values == self.given).all(-1)  # what others have made of a row since is taken
            kept = torch.where((stays.to(own.device)[self.places] & old)[:, None], own, values)
        own.copy_(kept)
        if self.aggregation.remembers or self.disguise is not None:
            self.given = values.clone()

    def contribution(self, number: int) -> Talk[None]:
        """What it says of its rows after training, phase by phase."""
        rows = self.rows()
        if self.disguise is not None:
            assert self.given is not None
            rows = self.disguise(number, self.given, rows)
        share = Share(self.party, number, self.part, self.places, rows, self.given, self.total)
        phase, heard, aggregation = AGREE, [], self.aggregation
        if aggregation.is_opened:
            heard = (yield [], aggregation.answered(GIVE, share)).messages()
        while True:
            said = aggregation.respond(phase, share, heard)
            if not said or not aggregation.awaits(share):
                yield said, None
                return
            heard = (yield said, aggregation.answered(phase, share)).messages()
            phase += 1

    def told_counts(self, values: np.ndarray) -> Talk[None]:
        """Once, before the first round: how often each of its rows occurs in its training triples."""
        arrays = {"values": torch.from_numpy(values.astype(np.float32))}
        yield [Message("counts", 0, AGREE, self.party, SERVER, {"part": self.part}, arrays)], None


class Center:
    """The server's side: the shared rows, and what it knows of who has them.

    Parameters
    ----------
    places
        The shared row of each of a party's rows, for every party.
    total
        How many shared rows there are.
    blind
        Whether the server does not know the places; then they are not looked at.
    fraction
        The share of parties that train in a round, at least one; who, is drawn anew each round.
    """

    def __init__(
        self,
        part: Part,
        aggregation: Aggregation,
        places: Sequence[Tensor],
        total: int,
        *,
        scorer: Scorer,
        dim: int,
        seed: int,
        fraction: float = 1.0,
        blind: bool = False,
        device: Any = "cpu",
    ):
        self.part, self.aggregation, self.places, self.total = part, aggregation, list(places), total
        self.seed, self.fraction, self.blind = seed, fraction, blind
        # The server draws its first rows as a party of number 0 would: alone, that party's own.
        draw = Stream(seed, Purpose.INIT, 0, 0 if part == "entity" else 1)
        width = scorer.widths(dim)[0 if part == "entity" else 1]
        self.table = scorer.constrain(part, scorer.initial(part, total, width, dim, draw)).to(device)
        self.rounds = 0
        self.changed = torch.zeros(total, dtype=torch.int64, device=device)
        """The round after which each shared row last became another."""
        self.seen = torch.full((len(places),), -1, dtype=torch.int64)
        """The round after which each party was last given rows; -1: never, or no one knows."""
        self.counts: dict[int, Tensor] = {}

    def sampled(self, number: int) -> list[int]:
        """Who trains in a round."""
        parties = len(self.places)
        many = sampled_number(parties, self.fraction)
        if many == parties:
            return list(range(parties))
        order = Stream(self.seed, Purpose.ROUND, 0, number).permutation(parties)
        return sorted(order[:many].tolist())

    def rows_for(self, parties: Sequence[int]) -> list[Message]:
        """What brings these parties up to date for the next round, for those that are not."""
        messages = []
        for party in parties:
            if (seen := int(self.seen[party])) == self.rounds:
                continue
            arrays = {"values": self.table if self.blind else self.table[self.places[party]]}
            if self.aggregation.changed_only and seen >= 0:
                ids = self.places[party]
                which = ids[(self.changed[ids] > seen).nonzero()[:, 0]].sort().values
                arrays = {"ids": which, "values": self.table[which]}
            arrays["values"] = self.aggregation.packed(arrays["values"])
            messages.append(Message("rows", self.rounds + 1, GIVE, SERVER, party, {"part": self.part}, arrays))
        return messages

    def collection(self, number: int, trained: Sequence[int]) -> Talk[Result]:
        """What it makes of the contributions of those who trained, phase by phase."""
        none = torch.zeros(0, dtype=torch.int64, device=self.table.device)
        owners = {party: none if self.blind else self.places[party] for party in trained}
        shared = Shared(number, self.part, self.table, owners, self.counts)
        said, phase = self.aggregation.opening(shared), AGREE
        while True:
            inbox = yield said, self.aggregation.expected(phase, shared)
            answer = self.aggregation.advance(phase, shared, inbox)
            if isinstance(answer, Result):
                return answer
            said, phase = answer, phase + 1

    def end_round(self, number: int, result: Result) -> None:
        """The shared rows after a round."""
        self.changed[(result.table != self.table).any(-1)] = number
        self.table, self.rounds = result.table, number

    def hear_counts(self) -> Talk[None]:
        """See `Seat.told_counts`."""
        rows = {party: len(ids) for party, ids in enumerate(self.places)}
        inbox = yield [], Inbox("counts", self.part, 0, AGREE, SERVER, rows)
        if inbox.missing:
            raise TacitError(f"{len(inbox.missing)} parties did not tell how often their rows occur")
        self.counts = {m.sender: m.arrays["values"].to(self.table.device) for m in inbox.messages()}

    def state(self) -> dict[str, Tensor]:
        """What it needs to go on."""
        found = {"star.table": self.table, "star.changed": self.changed, "star.seen": self.seen}
        return found | {"star.rounds": torch.tensor([self.rounds])}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a `state`."""
        self.table = state["star.table"].to(self.table)
        self.changed.copy_(state["star.changed"])
        self.seen.copy_(state["star.seen"])
        self.rounds = int(state["star.rounds"])


def row_counts(graph: Graph, part: Part, reciprocal: bool) -> np.ndarray:
    """How many training triples each of a party's rows occurs in."""
    columns, names = ([0, 2], graph.entities) if part == "entity" else ([1], graph.relations)
    many = np.bincount(graph.train.triples[:, columns].reshape(-1), minlength=len(names))
    return np.concatenate([many, many]) if part == "relation" and reciprocal else many


def shared_by(places: Sequence[Tensor], total: int, many: int) -> float:
    """The share of so many rows that at least `many` parties have, by the places of each."""
    owners = torch.zeros(total, device=places[0].device)
    for ids in places:
        owners[ids] += 1
    return float((owners >= many).float().mean())


def both_ways(places: Tensor, found: int, part: Part, reciprocal: bool) -> tuple[Tensor, int]:
    """Places and their number, with those of the inverse relations where a relation has two rows."""
    if part == "relation" and reciprocal:
        return torch.cat([places, places + found]), 2 * found
    return places, found


def checked(aggregation: Aggregation, scorer: Scorer, dim: int, part: Part, blind: bool) -> Aggregation:
    """The aggregation for this scorer's rows, if it can be."""
    aggregation.check(scorer, part)
    if blind and not isinstance(aggregation, Secured):
        raise TacitError("rows of names that the server does not know can only be added up securely")
    return aggregation.for_scorer(scorer, dim)


class Star:
    """A server and its parties in one process.

    Parameters
    ----------
    fit
        The parties' cohort.
    part
        What is shared: entity rows (FedE) or relation rows (FedR).
    fraction
        The share of parties that train in a round, at least one; who, is drawn anew each round.
    optimizer_state
        What becomes of a party's moments when it is given rows: "reset" as in FedE's code, or "keep".
    vocabulary
        How parties agree on names: "open", or "private", with which the server knows no party's names: it then gives
        all rows to everyone, and takes sums alone.
    bound
        The most names that a party may have, if that is private.
    """

    def __init__(
        self,
        fit: Fit,
        part: Part,
        aggregation: Aggregation,
        transcript: Transcript,
        *,
        local_epochs: int = 3,
        fraction: float = 1.0,
        optimizer_state: str = "reset",
        vocabulary: str = "open",
        bound: int | None = None,
    ):
        if not 0 < fraction <= 1:
            raise BadValue(f"fraction is above 0 and at most 1, not {fraction}")
        if local_epochs < 1:
            raise BadValue(f"local_epochs is at least 1, not {local_epochs}")
        if optimizer_state not in ("keep", "reset"):
            raise BadValue(f"optimizer_state is keep or reset, not {optimizer_state!r}")
        blind, scorer, dim = vocabulary == "private", fit.settings.scorer, fit.settings.dim
        self.fit, self.part = fit, part
        self.aggregation = checked(aggregation, scorer, dim, part, blind)
        self.transport = InProcess(transcript)
        self.local_epochs, self.optimizer_state = local_epochs, optimizer_state
        twice = fit.settings.training.reciprocal
        names = [names_of(graph, part) for graph in fit.graphs]
        if isinstance(self.aggregation, Secured) and blind:
            sums = self.aggregation.for_one_sum()
            found, places, unions = private_union(names, part, self.transport, *sums, bound)
            for party, union in enumerate(unions):
                self.aggregation.sides[party].bind(union)
        else:
            found, places = open_union(names, part, self.transport)
        where = [both_ways(ids, found, part, twice)[0].to(fit.device) for ids in places]
        total = both_ways(places[0], found, part, twice)[1]
        self.center = Center(part, self.aggregation, where, total, scorer=scorer, dim=dim, seed=fit.settings.seed,
                             fraction=fraction, blind=blind, device=fit.device)  # fmt: skip
        self.seats = [
            Seat(party, part, self.aggregation, self._look_at(party), ids, total, blind)
            for party, ids in enumerate(where)
        ]
        if self.aggregation.needs_counts:
            counts = [row_counts(graph, part, twice) for graph in fit.graphs]
            talks = {seat.party: seat.told_counts(counts[seat.party]) for seat in self.seats}
            self.transport.meet(self.center.hear_counts(), talks)

    def _look_at(self, party: int) -> Callable[[], Tensor]:
        return lambda: getattr(self.fit.cohort.tables, self.part)[self.fit.layout.rows(self.part, party)]

    # -- what there is -------------------------------------------------------------------------------------------------

    @property
    def table(self) -> Tensor:
        """The shared rows, as the server has them."""
        return self.center.table

    @property
    def total(self) -> int:
        return self.center.total

    @property
    def rounds(self) -> int:
        return self.center.rounds

    @property
    def places(self) -> list[Tensor]:
        """The shared row of each of a party's rows, as the parties know them."""
        return [seat.places for seat in self.seats]

    def rows(self, party: int) -> Tensor:
        """A party's own rows of what is shared: a look at the cohort's."""
        return self.seats[party].rows()

    def shared_by(self, many: int) -> float:
        """The share of shared rows that at least so many parties have."""
        return shared_by(self.places, self.total, many)

    # -- rounds --------------------------------------------------------------------------------------------------------

    def give(self, parties: Sequence[int]) -> int:
        """Bring these parties' rows up to date for the next round, where they are not; how many bytes that took."""
        messages = self.center.rows_for(parties)
        self.transport.send(messages)
        for message in messages:
            seat = self.seats[message.receiver]
            [came] = self.transport.receive(seat.expected(self.rounds + 1)).messages()
            seat.take(seat.read(came))
            self.center.seen[seat.party] = self.rounds
        return sum(message.size for message in messages)

    def round(self) -> RoundReport:
        """Give, train, aggregate."""
        number, fit = self.rounds + 1, self.fit
        chosen = self.center.sampled(number)
        given = self.give(chosen)
        active = np.zeros(len(self.seats), bool)
        active[chosen] = True
        if self.optimizer_state == "reset":
            fit.cohort.between_rounds("reset")
        reports = [fit.epoch(active) for _ in range(self.local_epochs)]
        for party in chosen:
            self._remember(number, party)
        before = self.aggregation.beyond
        sent, absent = self._aggregate(number, chosen)
        warn_beyond(self.aggregation.beyond - before, number)
        if absent:
            LOG.warning("%d parties dropped out of round %d: %s", len(absent), number, ", ".join(map(str, absent)))
        loss = np.mean([report.loss for report in reports], axis=0).tolist()
        steps, examples = (int(sum(getattr(report, name) for report in reports)) for name in ("steps", "examples"))
        beyond = self.aggregation.beyond - before
        return RoundReport(number, tuple(chosen), tuple(loss), steps, examples, given, sent, beyond, absent)

    def _remember(self, number: int, party: int) -> None:
        """For the party's own view: what it knows of itself, beside what it sends."""
        tables = self.fit.cohort.tables.party(self.fit.layout, party).tensors()
        masked = isinstance(self.aggregation, Secured)
        own = {name: tensor for name, tensor in tables.items() if masked or name != self.part}
        self.transport.transcript.remember(number, party, own | {"places": self.seats[party].places})

    def _aggregate(self, number: int, trained: Sequence[int]) -> tuple[int, tuple[int, ...]]:
        """All phases of the aggregation; how many bytes the parties sent, and who dropped out."""
        first = len(self.transport.transcript.records)
        talks = {party: self.seats[party].contribution(number) for party in trained}
        result, _ = self.transport.meet(self.center.collection(number, trained), talks)
        if result.absent and not self.aggregation.tolerates_absence:
            raise TacitError(f"{len(result.absent)} parties sent nothing in round {number}")
        self.center.end_round(number, result)
        sent = sum(record.size for record in self.transport.transcript.records[first:] if record.receiver == SERVER)
        return sent, tuple(sorted(result.absent))

    # -- saving --------------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """What a resumed federation needs beside the cohort's state."""
        found = self.center.state()
        for seat in self.seats:
            if seat.given is not None:
                found[f"star.given.{seat.party}"] = seat.given
            if seat.blind:  # an agreement that is made again has other places
                found[f"star.places.{seat.party}"] = seat.places
        return found | self.aggregation.state()

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a `state`."""
        self.center.load(state)
        for seat in self.seats:
            given = state.get(f"star.given.{seat.party}")
            seat.given = None if given is None else given.to(self.table)
            if seat.blind:
                seat.places = state[f"star.places.{seat.party}"].to(seat.places)
        self.aggregation.load(state)


def warn_beyond(beyond: int, number: int) -> None:
    """Say that numbers were cut."""
    if beyond:
        LOG.warning("%d numbers of round %d were beyond the range of secure sums, and were set to its limit: "
                    "choose a larger federation.range", beyond, number)  # fmt: skip
