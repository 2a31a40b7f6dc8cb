"""Who reviews a model's updates, and what came of it: all of it follows from the log, for everybody in the same way.

Updates of a model are counted, and so many of them are a *batch*. For each batch a committee is drawn by lot among
those who stood for it. The lot is made of numbers that they were bound to before and that nobody else knew:

- Whoever wants to serve begins a *chain*: a secret number, hashed over and over; the last hash is published (a beacon
  with batch 0). The chain's number for batch b is the one of which b hashes make that.
- While batch b - 1 is open, each publishes its number for batch b. It can be checked by hashing, and it could not be
  chosen: the chain was begun before batch b - 1 was.
- The lot for batch b is the hash of all these numbers, and cannot be known before the last of them.

The lot can be chosen, within limits. Who sees the others' numbers first can withhold his own: that makes another lot,
but costs the seat, because only those whose numbers went into it are drawn. And anybody may close batch b - 1, by an
update, as soon as he likes the lot of the numbers that are there. Who does it in a hurry, to be alone in the next draw,
gets no committee at all: so many have to stand, or there is none. But those who collude try many lots, and find one
that gives them a quorum if there is any. So safety is in a quorum that they are too few for, and not in the lot:
`safe_seats`. The first two batches have no committee, for no chain can be old enough.

A member votes on each update of its batch once, and not on its own. An update is accepted, or rejected, when a quorum
of votes says so; a quorum is more than half of all seats, so that it cannot be both. Members that are absent only leave
updates undecided: then each provider's own checks are all there is. Fewer liars than a quorum decide nothing.
"""

from __future__ import annotations

import hashlib
from typing import Literal

from tacit.errors import Refused
from tacit.federation.keys import Identity, fingerprint
from tacit.ledger.cbor import CID
from tacit.ledger.record import MOST_BATCHES, MOST_SEATS, Beacon, Model, Verdict

GAP = 1 << 9
"""Numbers that a chain may go on by at once: who was away for longer publishes one on the way for each so many."""
LATE = 16
"""Batches after which a member gives up what it could not judge. A vote counts whenever it comes."""
Outcome = Literal["accepted", "rejected", "undecided"]


def chain(model: CID, start: bytes, steps: int) -> bytes:
    """A number of a chain, so many hashes on."""
    prefix = b"tacit/ledger/chain\0" + model
    for _ in range(steps):
        start = hashlib.sha256(prefix + start).digest()
    return start


def own_number(who: Identity, model: CID, batch: int, length: int = 1 << 14) -> bytes:
    """The number of one's own chain for a batch; with batch 0, what begins it.

    The chain's secret follows from the private key (signatures of Ed25519 do), so there is nothing to keep. It is for
    `length` batches.
    """
    if not 0 <= batch <= length <= MOST_BATCHES:
        raise Refused(f"a chain of {length:,} numbers has none for batch {batch:,}")
    secret = hashlib.sha256(b"tacit/ledger/secret\0" + who.sign("ledger chain", bytes(model))).digest()
    return chain(model, secret, length - batch)


def drawn(model: CID, batch: int, numbers: dict[bytes, bytes], seats: int) -> tuple[bytes, ...]:
    """The committee: of those with a number, as many as there are seats, by lot, whoever published first."""
    lot = hashlib.sha256(b"tacit/ledger/lot\0" + model + batch.to_bytes(8, "big"))
    for key in sorted(numbers):
        lot.update(key + numbers[key])
    seed = lot.digest()
    return tuple(sorted(numbers, key=lambda key: hashlib.sha256(seed + key).digest())[:seats])


def safe_seats(admitted: int) -> int:
    """Seats of a committee in which a third of those admitted, or fewer, is no quorum, whoever chooses the lot; while a
    quorum of honest members is in every one that is full.
    """
    return min(2 * (admitted // 3) + 1, MOST_SEATS)


class Committee:
    """The committees of one model, as the records so far make them. A step costs the same however many there are."""

    def __init__(self, model: CID, rule: Model):
        self.model, self.rule = model, rule
        self.updates = 0
        self.seats: dict[int, tuple[bytes, ...]] = {}
        """By batch, once it is open."""
        self._chains: dict[bytes, tuple[int, int, bytes]] = {}
        """Of each key: the batch in which its chain began, and its last number with the batch that was for."""
        self._numbers: dict[bytes, bytes] = {}
        """For the batch after this."""
        self._placed: dict[CID, tuple[int, bytes]] = {}
        """Of each update: its batch, and whose it is."""
        self._votes: dict[CID, dict[bytes, bool]] = {}

    @property
    def batch(self) -> int:
        """The one that the next update goes into."""
        return self.updates // self.rule.batch

    # -- what records do: each first checks and then changes, so that what is refused leaves no trace ------------------

    def add_update(self, cid: CID, by: bytes) -> None:
        self._placed[cid] = (self.batch, by)
        before = self.batch
        self.updates += 1
        if self.batch != before and self.rule.committee:
            stood = self._numbers if len(self._numbers) >= self.rule.standing else {}
            self.seats[self.batch] = drawn(self.model, self.batch, stood, self.rule.committee)
            self._numbers = {}

    def check_beacon(self, beacon: Beacon, by: bytes) -> None:
        if not self.rule.committee:
            raise Refused("is for a committee, and this model has none")
        known = self._chains.get(by)
        if beacon.batch == 0:
            if known is not None:
                raise Refused("begins a chain, but this key has one already")
            return
        if known is None:
            raise Refused("is a number of a chain that was never begun")
        began, last, value = known
        on_the_way = beacon.batch == last + GAP <= self.batch
        if beacon.batch != self.batch + 1 and not on_the_way:
            raise Refused(f"is a number for batch {beacon.batch:,}; it is time for those of batch {self.batch + 1:,}")
        if began > beacon.batch - 2:
            raise Refused(f"is of a chain that began in batch {began:,}: it is bound from batch {began + 2:,} on")
        if beacon.batch <= last:
            raise Refused(f"is a second number for batch {beacon.batch:,}")
        if beacon.batch - last > GAP:
            raise Refused(
                f"is {beacon.batch - last:,} numbers on in its chain: that of batch {last + GAP:,} comes first"
            )
        if chain(self.model, beacon.value, beacon.batch - last) != value:
            raise Refused("is not the number of this key's chain: it was made up")

    def add_beacon(self, beacon: Beacon, by: bytes) -> None:
        if beacon.batch == 0:
            self._chains[by] = (self.batch, 0, beacon.value)
            return
        self._chains[by] = (self._chains[by][0], beacon.batch, beacon.value)
        if beacon.batch == self.batch + 1:
            self._numbers[by] = beacon.value

    def to_stand(self, by: bytes) -> tuple[int, ...]:
        """The batches whose numbers a key has to publish, in this order, to stand for the next committee."""
        if by not in self._chains:
            return (0,)
        _, last, _ = self._chains[by]
        return (*range(last + GAP, self.batch + 1, GAP), self.batch + 1)

    def check_verdict(self, verdict: Verdict, by: bytes) -> None:
        if by not in self.seats.get(verdict.batch, ()):
            raise Refused(f"is by {fingerprint(by)}, who has no seat in the committee of batch {verdict.batch:,}")
        for update in (*verdict.accepted, *(each for each, _ in verdict.rejected)):
            batch, whose = self._placed.get(update, (None, b""))
            if batch != verdict.batch:
                raise Refused(f"is on {update}, which is no update of batch {verdict.batch:,} of this model")
            if whose == by:
                raise Refused(f"is on {update}, which is the member's own")
            if by in self._votes.get(update, {}):
                raise Refused(f"is on {update}, on which this member has voted before")

    def add_verdict(self, verdict: Verdict, by: bytes) -> tuple[CID, ...]:
        """Count the votes. Returns what is rejected by them, and was not before."""
        before = {update: self.outcome(update) for update, _ in verdict.rejected}
        for update in verdict.accepted:
            self._votes.setdefault(update, {})[by] = True
        for update, _ in verdict.rejected:
            self._votes.setdefault(update, {})[by] = False
        return tuple(each for each, was in before.items() if was != "rejected" and self.outcome(each) == "rejected")

    # -- what they come to ---------------------------------------------------------------------------------------------

    def votes(self, update: CID) -> tuple[int, int]:
        """For and against."""
        found = self._votes.get(update, {})
        in_favour = sum(found.values())
        return in_favour, len(found) - in_favour

    def outcome(self, update: CID) -> Outcome:
        in_favour, against = self.votes(update)
        if not self.rule.committee:
            return "undecided"
        return (
            "rejected" if against >= self.rule.quorum
            else "accepted" if in_favour >= self.rule.quorum
            else "undecided"
        )  # fmt: skip

    def batch_of(self, update: CID) -> int:
        return self._placed[update][0]

    def due(self, by: bytes) -> tuple[CID, ...]:
        """The updates that a member has yet to vote on, of this batch and the last ones before it."""
        found = []
        for update, (batch, whose) in reversed(self._placed.items()):
            if batch < self.batch - LATE:
                break
            if by in self.seats.get(batch, ()) and whose != by and by not in self._votes.get(update, {}):
                found.append(update)
        return tuple(reversed(found))
