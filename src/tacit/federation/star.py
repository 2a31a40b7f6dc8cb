"""A star: a server that holds the shared rows, and parties that train on their own graphs between its rounds.

FedE shares entity rows, FedR relation rows; all other rows stay with their party. In one process all parties are one
cohort, and train in one go; what passes between a party and the server passes as a recorded message, and comes in
through an inbox, as it would from outside.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tacit.draws import Purpose, Stream
from tacit.errors import BadValue, TacitError
from tacit.federation.aggregation import Aggregation, Part, Result, Share, Shared, located
from tacit.federation.messages import SERVER, Inbox, Message
from tacit.federation.secured import Secured
from tacit.federation.transcript import Transcript
from tacit.federation.transport import InProcess
from tacit.federation.vocabulary import names_of, open_union, private_union
from tacit.training import Fit

LOG = logging.getLogger(__name__)
Tensor = Any
GIVE, AGREE = 0, 1
"""Phases of a round: the server gives its rows, then the phases of the aggregation. Before round 1: names, places."""
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


class Star:
    """The server's rows and what the parties have of them.

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
        scorer, dim = fit.settings.scorer, fit.settings.dim
        aggregation.check(scorer, part)
        aggregation = aggregation.for_scorer(scorer, dim)
        self.fit, self.part, self.aggregation = fit, part, aggregation
        self.transport = InProcess(transcript)
        self.local_epochs, self.fraction, self.optimizer_state = local_epochs, fraction, optimizer_state
        device, parties = fit.device, len(fit.graphs)
        twice = part == "relation" and fit.settings.training.reciprocal
        names = [names_of(graph, part) for graph in fit.graphs]
        self.blind = vocabulary == "private"
        """Whether the server does not know who has which rows."""
        if self.blind:
            if not isinstance(aggregation, Secured):
                raise TacitError("rows of names that the server does not know can only be added up securely")
            found, places, unions = private_union(names, part, self.transport, *aggregation.for_one_sum(), bound)
            for party, union in enumerate(unions):
                aggregation.sides[party].bind(union)
        else:
            found, places = open_union(names, part, self.transport)
        self.total = found * (2 if twice else 1)
        self.places = [(torch.cat([ids, ids + found]) if twice else ids).to(device) for ids in places]
        # The server draws its first rows as a party of number 0 would: alone, that party's own.
        draw = Stream(fit.settings.seed, Purpose.INIT, 0, 0 if part == "entity" else 1)
        width = scorer.widths(dim)[0 if part == "entity" else 1]
        self.table = scorer.constrain(part, scorer.initial(part, self.total, width, dim, draw)).to(device)
        self.rounds = 0
        self.changed = torch.zeros(self.total, dtype=torch.int64, device=device)
        """The round after which each shared row last became another."""
        self.seen = torch.full((parties,), -1, dtype=torch.int64)
        """The round after which each party was last given rows; -1: never."""
        self.given: Tensor | None = None
        """The parties' rows as they were given, where what changed is sent."""
        self.counts: dict[int, Tensor] = {}
        if aggregation.needs_counts:
            self._tell_counts()

    # -- what a party has ----------------------------------------------------------------------------------------------

    def rows(self, party: int) -> Tensor:
        """A party's own rows of what is shared: a look at the cohort's."""
        return getattr(self.fit.cohort.tables, self.part)[self.fit.layout.rows(self.part, party)]

    def shared_by(self, many: int) -> float:
        """The share of shared rows that at least so many parties have."""
        owners = torch.zeros(self.total, device=self.table.device)
        for ids in self.places:
            owners[ids] += 1
        return float((owners >= many).float().mean())

    def _tell_counts(self) -> None:
        """Once, before the first round: how often each row occurs in its party's training triples."""
        rows = {party: len(ids) for party, ids in enumerate(self.places)}
        for party, graph in enumerate(self.fit.graphs):
            columns = [0, 2] if self.part == "entity" else [1]
            many = np.bincount(graph.train.triples[:, columns].reshape(-1), minlength=rows[party])[: rows[party]]
            if self.fit.settings.training.reciprocal and self.part == "relation":
                half = rows[party] // 2
                many = np.concatenate([many[:half], many[:half]])
            values = torch.from_numpy(many.astype(np.float32))
            self.transport.send([Message("counts", 0, AGREE, party, SERVER, {"part": self.part}, {"values": values})])
        inbox = self.transport.receive(Inbox("counts", self.part, 0, AGREE, SERVER, rows))
        self.counts = {m.sender: m.arrays["values"].to(self.table.device) for m in inbox.messages()}

    # -- rounds --------------------------------------------------------------------------------------------------------

    def sampled(self, number: int) -> list[int]:
        """Who trains in a round."""
        parties = len(self.places)
        many = sampled_number(parties, self.fraction)
        if many == parties:
            return list(range(parties))
        order = Stream(self.fit.settings.seed, Purpose.ROUND, 0, number).permutation(parties)
        return sorted(order[:many].tolist())

    def give(self, parties: Sequence[int]) -> int:
        """Bring these parties' rows up to date for the next round, where they are not; how many bytes that took."""
        late = [party for party in parties if int(self.seen[party]) < self.rounds]
        messages = []
        for party in late:
            ids = self.places[party]
            arrays = {"values": self.table if self.blind else self.table[ids]}
            if self.aggregation.changed_only and int(self.seen[party]) >= 0:
                moved = (self.changed[ids] > int(self.seen[party])).nonzero()[:, 0]
                which = ids[moved].sort().values
                arrays = {"ids": which, "values": self.table[which]}
            arrays["values"] = self.aggregation.packed(arrays["values"])
            messages.append(Message("rows", self.rounds + 1, GIVE, SERVER, party, {"part": self.part}, arrays))
        self.transport.send(messages)
        for party in late:
            self._receive(party)
        return sum(message.size for message in messages)

    def _receive(self, party: int) -> None:
        """A party takes the rows that wait for it."""
        ids, own = self.places[party], self.rows(party)
        many = self.total if self.blind else len(ids)
        inbox = Inbox("rows", self.part, self.rounds + 1, GIVE, party, {SERVER: many}, own.shape[1], self.total)
        [message] = self.transport.receive(inbox).messages()
        values = message.arrays["values"].to(own)
        if self.blind:
            values = values[ids]
        if (stays := self.aggregation.stays(party)) is not None and int(self.seen[party]) >= 0:
            old = self.changed[ids] <= int(self.seen[party])  # what others have made of a row since is taken
            values = torch.where((stays.to(own.device)[ids] & old)[:, None], own, values)
        if (named := message.arrays.get("ids")) is not None:
            at = located(named, ids, self.total)
            assert self.given is not None
            own.copy_(self.given[self.fit.layout.rows(self.part, party)])  # what is not named is as it was given
            own[at] = values
        else:
            own.copy_(values)
        self.seen[party] = self.rounds
        if self.aggregation.changed_only:
            if self.given is None:
                self.given = getattr(self.fit.cohort.tables, self.part).clone()
            self.given[self.fit.layout.rows(self.part, party)] = own

    def round(self) -> RoundReport:
        """Give, train, aggregate."""
        number, fit = self.rounds + 1, self.fit
        chosen = self.sampled(number)
        given = self.give(chosen)
        active = np.zeros(len(self.places), bool)
        active[chosen] = True
        if self.optimizer_state == "reset":
            fit.cohort.between_rounds("reset")
        reports = [fit.epoch(active) for _ in range(self.local_epochs)]
        before = self.aggregation.beyond
        sent, absent = self._aggregate(number, chosen)
        if beyond := self.aggregation.beyond - before:
            LOG.warning("%d numbers of round %d were beyond the range of secure sums, and were set to its limit: "
                        "choose a larger federation.range", beyond, number)  # fmt: skip
        if absent:
            LOG.warning("%d parties dropped out of round %d: %s", len(absent), number, ", ".join(map(str, absent)))
        self.rounds = number
        loss = np.mean([report.loss for report in reports], axis=0).tolist()
        steps, examples = (int(sum(getattr(report, name) for report in reports)) for name in ("steps", "examples"))
        return RoundReport(number, tuple(chosen), tuple(loss), steps, examples, given, sent, beyond, absent)

    def _aggregate(self, number: int, trained: Sequence[int]) -> tuple[int, tuple[int, ...]]:
        """All phases of the aggregation; how many bytes the parties sent, and who dropped out."""
        shares = {party: self._share(number, party) for party in trained}
        none = self.places[0][:0]
        owners = {party: none if self.blind else self.places[party] for party in trained}
        shared = Shared(number, self.part, self.table, owners, self.counts)
        inboxes: dict[int, list[Message]] = {party: [] for party in trained}
        phase, sent = AGREE, 0
        if opening := self.aggregation.opening(shared):
            self._answer(opening, GIVE, shares, inboxes)
        asked = bool(opening)
        while True:
            for party in trained:
                if asked and not inboxes[party]:
                    continue  # it has heard nothing: it dropped out
                messages = self.aggregation.respond(phase, shares[party], inboxes[party])
                sent += sum(message.size for message in messages)
                self.transport.send(messages)
            answer = self.aggregation.advance(
                phase, shared, self.transport.receive(self.aggregation.expected(phase, shared))
            )
            if isinstance(answer, Result):
                break
            self._answer(answer, phase, shares, inboxes)
            phase, asked = phase + 1, True
        if answer.absent and not self.aggregation.tolerates_absence:
            raise TacitError(f"{len(answer.absent)} parties sent nothing in round {number}")
        self.changed[(answer.table != self.table).any(-1)] = number
        self.table = answer.table
        return sent, tuple(sorted(answer.absent))

    def _answer(
        self, answer: Sequence[Message], phase: int, shares: Mapping[int, Share], inboxes: dict[int, list[Message]]
    ) -> None:
        """The server says something, and each party hears what was for it."""
        self.transport.send(answer)
        for party, share in shares.items():
            inboxes[party] = self.transport.receive(self.aggregation.answered(phase, share)).messages()

    def _share(self, number: int, party: int) -> Share:
        before = None if self.given is None else self.given[self.fit.layout.rows(self.part, party)]
        return Share(party, number, self.part, self.places[party], self.rows(party), before, self.total)

    # -- saving --------------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """What a resumed federation needs beside the cohort's state."""
        found = {"star.table": self.table, "star.changed": self.changed, "star.seen": self.seen}
        found["star.rounds"] = torch.tensor([self.rounds])
        if self.given is not None:
            found["star.given"] = self.given
        if self.blind:  # an agreement that is made again has other places
            found |= {f"star.places.{party}": ids for party, ids in enumerate(self.places)}
        return found | self.aggregation.state()

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a `state`."""
        self.table = state["star.table"].to(self.table)
        self.changed.copy_(state["star.changed"])
        self.seen.copy_(state["star.seen"])
        self.rounds = int(state["star.rounds"])
        self.given = state["star.given"].to(self.table) if "star.given" in state else None
        if self.blind:
            self.places = [state[f"star.places.{party}"].to(ids) for party, ids in enumerate(self.places)]
        self.aggregation.load(state)
