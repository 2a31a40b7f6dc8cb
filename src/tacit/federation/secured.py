"""Rows under secure sums: the mean of FedE or FedR, of which a server sees sums alone.

Every party sends a row for each shared row, zeros where it has none, with its 0 or 1 of ownership beside it; the
server adds up and divides. Nothing tells who has which row: all messages of a phase have one size. Before, ownership
alone is added up, and every party leaves out rows that fewer than `least` have: a sum of one is that party's row. Such
rows stay with their party.

What the server learns: each row's sum, and how many of this round's parties have it. What it can still do: with other
parties in another round, or in one that is made again after a crash, subtract; tell all parties alike that more of them
have a row than do, and be given the sum of those who really do. It cannot tell parties different things: what they were
told is signed with the list of who was heard. Whom it leaves out of that list it can choose, up to the threshold; by
default `least` is so high that two owners of a row remain.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from tacit.errors import BadValue, Refused, TacitError
from tacit.federation.aggregation import Aggregation, Part, Result, Share, Shared
from tacit.federation.keys import Identity, Roster
from tacit.federation.messages import SERVER, Inbox, Message
from tacit.federation.secure import FixedPoint, Member, Summing, Terms, shaped
from tacit.models import Scorer

Tensor = Any
OWNERS, ROWS = "owners", "rows"
ANSWERS = {"keys": "members", "shares": "shares", "masked": "heard", "signed": "agreed", "opened": "owners"}
"""What a member hears next after each thing that it sends."""


@dataclass
class Side:
    """Where a party stands in a round."""

    member: Member
    sent: str = "opened"
    of: str = OWNERS
    owners: np.ndarray | None = None
    """How many have each shared row, as it was last told."""
    counted: bool = False
    """Whether that was in the agreement that holds."""
    told: bytes = b""
    """What it was told of names."""
    beyond: int = 0
    """Numbers that were beyond the range, and were set to its limit."""

    def bind(self, told: bytes) -> None:
        """Open nothing together with parties that were told something else of names."""
        self.told = told
        self.member.told = hashlib.sha256(told).digest()

    def count(self, owners: np.ndarray, members: int) -> None:
        """Act on how many have each row; open nothing together with parties that were told something else."""
        if int(owners.max(initial=0)) > members:
            raise Refused("a row that more parties have than there are")
        self.owners, self.counted = owners, True
        self.member.told = hashlib.sha256(self.told + b"owners" + owners.astype("<u4").tobytes()).digest()


@dataclass
class Course:
    """Where the server stands in a round."""

    expects: str = ""
    of: str = OWNERS
    counted: tuple[int, ...] = ()
    """The members whose ownership was added up."""
    trained: tuple[int, ...] = ()


@dataclass(frozen=True)
class Secured(Aggregation):
    """Another aggregation's mean, of which the server sees sums alone."""

    tolerates_absence = True
    is_opened = True
    inner: Aggregation = field(default_factory=Aggregation)
    server: Summing = field(default_factory=lambda: Summing(Terms((), 2)))
    sides: Mapping[int, Side] = field(default_factory=dict)
    fixed: FixedPoint = field(default_factory=lambda: FixedPoint(1.0, 1))
    least: int = 2
    course: Course = field(default_factory=Course)

    @staticmethod
    def of(
        inner: Aggregation,
        names: Sequence[str],
        part: Part,
        *,
        limit: float = 64.0,
        least: int | None = None,
        threshold: int | None = None,
        expected: int | None = None,
        rounds: int = 8,
        identities: Mapping[int, Identity] | None = None,
        roster: Roster | None = None,
    ) -> Secured:
        """For these parties. Without keys of their own they get some that live as long as this process.

        `identities`: of the parties whose sides this is; none of them: the server's.

        Parameters
        ----------
        limit, threshold, expected
            The largest magnitude of a number; the fewest parties that have to stay to the end; how many take part in a
            round, default: all.
        least
            The fewest owners of a row that is sent. Default: so many that two are left however many drop out, or are
            said to have.
        rounds
            Of one agreement on keys, while the same parties take part and nobody drops out.
        """
        if inner.changed_only or inner.values != "float32" or inner.needs_counts:
            raise TacitError("secure sums are of all rows, in fixed point, each party counting once: leave out "
                             "changed_only, values and weighted aggregation")  # fmt: skip
        expected = expected or len(names)
        terms = Terms(tuple(names), expected, threshold, 1 + rounds, part)
        least = expected - terms.needed + 2 if least is None else least
        if not 2 <= least <= expected:
            raise BadValue(f"min_contributors is from 2 to the number of parties in a round, {expected}; not {least}")
        if identities is None:
            identities = {number: Identity.new(name) for number, name in enumerate(names)}
            keeper = Identity.new("keeper")
            roster = Roster.begin(keeper)
            for identity in identities.values():
                roster = roster.enrol(keeper, identity.name, identity.public)
        sides = {}
        for number, one in identities.items():
            if roster is None:
                raise TacitError("parties that have keys need the roster that says whose they are")
            sides[number] = Side(Member(number, one, roster, terms))
        return Secured(
            inner=inner, server=Summing(terms), sides=sides, fixed=FixedPoint(limit, len(names)), least=least
        )

    def check(self, scorer: Scorer, part: Part) -> None:
        self.inner.check(scorer, part)

    def for_scorer(self, scorer: Scorer, dim: int) -> Secured:
        return replace(self, inner=self.inner.for_scorer(scorer, dim))

    def discloses(self) -> str:
        return (
            f"sums over the parties of a round: of each row that {self.least} or more of them have, and how many have "
            "it; where other parties take part in another round, sums can be subtracted"
        )

    def for_one_sum(self) -> tuple[dict[int, Member], Summing]:
        """The two sides of one secure sum of all parties before the first round, by the same identities."""
        names = self.server.terms.names
        terms = Terms(names, len(names), None, 1, self.server.terms.part)
        members = {
            party: Member(party, side.member.signer, side.member.roster, terms) for party, side in self.sides.items()
        }
        return members, Summing(terms)

    @property
    def beyond(self) -> int:
        """Numbers of all parties so far that were beyond the range."""
        return sum(side.beyond for side in self.sides.values())

    # -- the party's side ----------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """How many have each row, as each party was told. Keys are not kept: who goes on makes new ones."""
        return {
            f"secured.{party}": torch.from_numpy(side.owners.astype(np.int64))
            for party, side in self.sides.items()
            if side.owners is not None
        }

    def load(self, state: Mapping[str, Tensor]) -> None:
        for party, side in self.sides.items():
            if (owners := state.get(f"secured.{party}")) is not None:
                side.owners, side.counted = owners.cpu().numpy(), False

    def stays(self, party: int) -> Tensor | None:
        """Which shared rows are a party's own affair: too few have them. None: not known yet."""
        owners = self.sides[party].owners
        return None if owners is None else torch.from_numpy(owners < self.least)

    def respond(self, phase: int, share: Share, inbox: Sequence[Message]) -> list[Message]:
        [told] = inbox
        side = self.sides[share.party]
        member = side.member
        if told.kind == "begin":
            if told.says["fresh"]:
                side.sent, side.counted = "keys", False
                side.bind(side.told)
                return [member.keys(share.round, phase)]
            if not member.ready(1) or not side.counted:
                member.forget()
                return []  # something was missed: absent in this round, and new keys in the next
            return [self._masked(side, ROWS, share, phase)]
        if told.kind == "members":
            side.sent = "shares"
            return [member.shares(told, phase)]
        if told.kind == "shares":
            member.keep(told)
            return [self._masked(side, OWNERS, share, phase)]
        if told.kind == "heard":
            side.sent = "signed"
            return [member.signed(told, phase)]
        if told.kind == "agreed":
            side.sent = "opened"
            return [member.opened(told, phase)]
        if told.kind == "owners":
            if side.of != OWNERS:
                raise Refused("owners, when they were told already")
            side.count(shaped(told, "words", share.total), len(member.members))
            return [self._masked(side, ROWS, share, phase)]
        raise Refused(f"a message of kind {told.kind} in a secure sum")

    def awaits(self, share: Share) -> bool:
        side = self.sides[share.party]
        return side.sent != "opened" or side.of == OWNERS

    @property
    def remembers(self) -> bool:
        """To tell whether a row that is its own affair was moved by others."""
        return True

    def _masked(self, side: Side, of: str, share: Share, phase: int) -> Message:
        side.sent, side.of = "masked", of
        if of == OWNERS:
            words = np.zeros(share.total, np.uint32)
            words[share.ids.cpu().numpy()] = 1
        else:
            assert side.owners is not None
            own = share.ids.cpu().numpy()
            sent = side.owners[own] >= self.least
            rows = self.inner.lifted(share.now).double().cpu().numpy()
            encoded, beyond = self.fixed.encode(rows[sent])
            side.beyond += beyond
            whole = np.zeros((len(side.owners), rows.shape[1] + 1), np.uint32)
            whole[own[sent], :-1], whole[own[sent], -1] = encoded, 1
            words = whole.reshape(-1)
        return side.member.masked(words, phase, share.round)

    def answered(self, phase: int, share: Share) -> Inbox:
        side = self.sides[share.party]
        kind = ANSWERS[side.sent] if phase else "begin"
        return Inbox(kind, share.part, share.round, phase, share.party, {SERVER: share.total})

    # -- the server's side ---------------------------------------------------------------------------------------------

    def opening(self, shared: Shared) -> list[Message]:
        course, server = self.course, self.server
        course.trained = tuple(sorted(shared.owners))
        fresh = course.counted != course.trained or not server.ready(1, course.trained)
        course.expects, course.of = ("keys", OWNERS) if fresh else ("masked", ROWS)
        return [
            Message("begin", shared.round, 0, SERVER, party, {"part": shared.part, "fresh": int(fresh)}, {})
            for party in course.trained
        ]

    def expected(self, phase: int, shared: Shared) -> Inbox:
        course, server = self.course, self.server
        who: Sequence[int] = server.members
        if course.expects == "keys":
            who = course.trained
        elif course.expects in ("signed", "opened"):
            who = server.heard
        return Inbox(course.expects, shared.part, shared.round, phase, SERVER, dict.fromkeys(who, len(shared.table)))

    def advance(self, phase: int, shared: Shared, inbox: Inbox) -> list[Message] | Result:
        course, server, table = self.course, self.server, shared.table
        width = 1 if course.of == OWNERS else self.inner.lifted(table[:1]).shape[1] + 1
        if course.expects == "keys":
            course.expects = "shares"
            return server.keys(inbox)
        if course.expects == "shares":
            course.expects = "masked"
            return server.shares(inbox)
        if course.expects == "masked":
            course.expects = "signed"
            return server.masked(inbox, len(table) * width)
        if course.expects == "signed":
            course.expects = "opened"
            return server.signed(inbox)
        words = server.opened(inbox)
        absent = frozenset(course.trained) - set(server.heard)
        if course.of == OWNERS:
            course.counted, course.expects, course.of = server.heard, "masked", ROWS
            arrays = {"words": torch.from_numpy(words)}
            return [
                Message("owners", shared.round, phase, SERVER, party, {"part": shared.part}, arrays)
                for party in sorted(inbox.taken)
            ]
        return Result(self._mean(table, words.reshape(len(table), width)), absent)

    def _mean(self, table: Tensor, words: np.ndarray) -> Tensor:
        many = torch.from_numpy(words[:, -1].astype(np.float64)).to(table.device)
        total = torch.from_numpy(self.fixed.decode(np.ascontiguousarray(words[:, :-1]))).to(table.device)
        mean = self.inner.lowered(total / many.clamp(min=1)[:, None], table).to(table)
        return torch.where(many[:, None] > 0, mean, table)
