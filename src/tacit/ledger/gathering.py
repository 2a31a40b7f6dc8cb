"""Providers that gather in one process: a ledger in memory, and a virtual clock.

Time is virtual: a step of training takes so many seconds at each provider's speed, and an update so many on its way. A
slow provider is slow, and one that is dead never comes back, without anybody waiting for it.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from tacit.errors import BadValue, Refused
from tacit.federation.keys import Identity
from tacit.ledger.blobs import Withheld
from tacit.ledger.cbor import CID
from tacit.ledger.ledger import Ledger
from tacit.ledger.log import Entry
from tacit.ledger.provider import Begun, Look, Provider
from tacit.ledger.record import Genesis, Record
from tacit.peers.meeting import LATENCY, STEP


class MemoryLog:
    """A log that lasts as long as its process."""

    def __init__(self) -> None:
        self._entries: list[Entry] = []

    def append(self, entries: Sequence[tuple[str, bytes]]) -> int:
        first = len(self._entries)
        self._entries += [Entry(first + at, name, data) for at, (name, data) in enumerate(entries)]
        return first

    def read(self, start: int = 0) -> Iterator[Entry]:
        return iter(self._entries[start:])


class MemoryBlobs:
    """Weights that last as long as their process."""

    def __init__(self) -> None:
        self._data: dict[CID, bytes] = {}

    def address(self, data: bytes) -> CID:
        return CID.of(data)

    def put(self, data: bytes) -> CID:
        cid = self.address(data)
        self._data[cid] = data
        return cid

    def get(self, cid: CID, largest: int) -> bytes:
        data = self._data.get(cid)
        if data is None:
            raise Withheld(f"the weights {cid} are not here: ask their provider for them.")
        if len(data) > largest:
            raise Refused(f"the weights {cid} have more than {largest:,} bytes")
        if CID.of(data) != cid:
            raise Refused(f"the weights {cid} are other bytes: they were changed, or are damaged")
        return data

    def withhold(self, cid: CID) -> None:
        """Give them to nobody any more."""
        self._data.pop(cid, None)


class MemoryLedger(Ledger):
    """A ledger that lasts as long as its process: what was read is remembered by the object alone."""

    def __init__(self, who: Identity, genesis: Genesis):
        record = Record.sign(who, genesis)
        log = MemoryLog()
        log.append([(str(record.cid), record.data)])
        super().__init__(Path("memory"), record.cid, log, MemoryBlobs())
        self.refresh()

    def _seen(self, start: int = 0) -> bytes:
        return b""

    def _note(self, begin: int, notes: bytearray) -> None:
        pass


class Gathering:
    """Providers of one ledger, each at its own speed. `rest`: seconds between a provider's looks.

    A look sees what was published before its training began; the update is there when it ends. Virtual seconds are the
    same as in a meeting of peers: `STEP` for a step of training, `LATENCY` on the way to and from the log.
    """

    def __init__(self, providers: Sequence[Provider], *, speeds: Mapping[int, float] | None = None, rest: float = 0.0):
        self.providers = tuple(providers)
        self.speeds = dict.fromkeys(range(len(providers)), 1.0) | dict(speeds or {})
        if any(not (speed >= 0 and math.isfinite(speed)) for speed in self.speeds.values()) or not rest >= 0:
            raise BadValue("speeds, and the seconds of rest, are numbers from 0 on")
        self.now, self.rest = 0.0, rest
        self.looks: list[tuple[float, int, Look]] = []
        """When each ended, whose it was, and what came of it."""
        self._events: list[tuple[float, int, Begun | None]] = []
        self._begun = False

    def run(self, until: float = math.inf, on_look: Callable[[float, int, Look], None] | None = None) -> None:
        """Let them look, one after the other by the clock, until all have ended or time is up."""
        if not self._begun:
            self._events = [(0.0, number, None) for number, speed in sorted(self.speeds.items()) if speed]
            self._begun = True
        while self._events and self._events[0][0] <= until:
            self.now, number, begun = heapq.heappop(self._events)
            provider = self.providers[number]
            found = provider.begin() if begun is None else provider.end(begun)
            if isinstance(found, Begun):
                heapq.heappush(self._events, (self.now + self._takes(number), number, found))
                continue
            self.looks.append((self.now, number, found))
            if on_look is not None:
                on_look(self.now, number, found)
            if found.ended is None:
                heapq.heappush(self._events, (self.now + self.rest + LATENCY, number, None))

    def _takes(self, number: int) -> float:
        """Seconds until a provider's next update is there."""
        provider = self.providers[number]
        settings = provider.learner.settings
        epochs = provider.terms.epochs if provider.published else settings.training.epochs
        steps = epochs * -(-len(provider.graph.train) // settings.training.batch)
        return steps * STEP / self.speeds[number] + LATENCY
