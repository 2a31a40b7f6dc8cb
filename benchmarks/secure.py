"""What secure sums cost: seconds and bytes, beside the same numbers sent plainly.

    python benchmarks/secure.py [--out benchmarks/results/secure.json]

The first round of an agreement in one process, every message encoded and decoded: keys, shares, ownership, rows. The
floor of time is the masks: each party draws a word of ChaCha20 for each number and each member, the server one for each
number and member. The floor of bytes is the numbers themselves, 4 bytes each. Then the private union of names.
"""

from __future__ import annotations

import argparse
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from measure import row, write

from tacit.federation.aggregation import OwnerMean
from tacit.federation.keys import Identity, Roster
from tacit.federation.messages import SERVER, Inbox, Message
from tacit.federation.secure import Member, Summing, Terms, mask
from tacit.federation.secured import Secured
from tacit.federation.transcript import Transcript
from tacit.federation.transport import InProcess
from tacit.federation.vocabulary import private_union
from tacit.graph import Vocab

CASES = (("FedR, 100 parties", 100, 237, 128), ("FedR, 5 parties", 5, 237, 128), ("FedE, 5 parties", 5, 14_541, 128))


def people(count: int) -> tuple[list[Identity], Roster]:
    """Parties with keys on a roster."""
    identities, keeper = [Identity.new(f"party-{i:03d}") for i in range(count)], Identity.new("keeper")
    roster = Roster.begin(keeper)
    for one in identities:
        roster = roster.enrol(keeper, one.name, one.public)
    return identities, roster


class Clock:
    """Seconds of each side, and bytes that each party sends."""

    def __init__(self, parties: int):
        self.seconds = np.zeros(parties + 1)
        self.sent = np.zeros(parties, np.int64)

    def of(self, who: int, work: Callable[..., Any], *given: Any) -> Any:
        began = time.perf_counter()
        found = work(*given)
        self.seconds[who] += time.perf_counter() - began
        return found

    def told(self, kind: str, phase: int, messages: list[Message]) -> Inbox:
        """To the server, by their bytes."""
        inbox = Inbox(kind, "relation", 1, phase, SERVER, {m.sender: 0 for m in messages})
        for message in messages:
            data = self.of(message.sender, message.encode)
            self.sent[message.sender] += len(data)
            self.of(SERVER, inbox.take, data)
        return inbox

    def heard(self, messages: list[Message]) -> dict[int, Message]:
        """From the server, by their bytes."""
        return {m.receiver: self.of(m.receiver, Message.decode, self.of(SERVER, m.encode)) for m in messages}


def one_round(parties: int, rows: int, width: int) -> dict[str, float]:
    """An agreement, ownership, and rows with ownership beside them: what the first round of an agreement is."""
    identities, roster = people(parties)
    terms = Terms(tuple(one.name for one in identities), parties)
    clock, server = Clock(parties), Summing(terms)
    members = [Member(i, one, roster, terms) for i, one in enumerate(identities)]
    began = time.perf_counter()
    sent = [clock.of(i, member.keys, 1, 1) for i, member in enumerate(members)]
    answer = clock.heard(clock.of(SERVER, server.keys, clock.told("keys", 1, sent)))
    sent = [clock.of(i, members[i].shares, message, 2) for i, message in answer.items()]
    answer = clock.heard(clock.of(SERVER, server.shares, clock.told("shares", 2, sent)))
    for i, message in answer.items():
        clock.of(i, members[i].keep, message)
    for count in (rows, rows * (width + 1)):
        numbers = [np.frombuffer(secrets.token_bytes(4 * count), np.uint32) for _ in members]
        sent = [clock.of(i, member.masked, numbers[i], 3, 1) for i, member in enumerate(members)]
        answer = clock.heard(clock.of(SERVER, server.masked, clock.told("masked", 3, sent), count))
        sent = [clock.of(i, members[i].signed, message, 4) for i, message in answer.items()]
        answer = clock.heard(clock.of(SERVER, server.signed, clock.told("signed", 4, sent)))
        sent = [clock.of(i, members[i].opened, message, 5) for i, message in answer.items()]
        total = clock.of(SERVER, server.opened, clock.told("opened", 5, sent))
        assert np.array_equal(total, np.sum([n.astype(np.uint64) for n in numbers], 0).astype(np.uint32))
    return {
        "seconds": time.perf_counter() - began,
        "party_seconds": float(np.median(clock.seconds[:-1])),
        "server_seconds": float(clock.seconds[-1]),
        "party_bytes": int(clock.sent.max()),
        "plain_bytes": 4 * rows * width,
        "ratio": float(clock.sent.max() / (4 * rows * width)),
    }


def floor(parties: int, rows: int, width: int) -> float:
    """Seconds for the masks alone, of all parties and the server, measured here."""
    count = rows * (width + 1)
    began = time.perf_counter()
    for _ in range(3):
        mask(bytes(32), count)
    return (time.perf_counter() - began) / 3 * parties * (parties + 1)


def union(parties: int, names: int) -> dict[str, float]:
    """The private union of so many names each, half of them everyone's."""
    vocabularies = [
        Vocab([f"name {i}" for i in range(names // 2)] + [f"name {p}/{i}" for i in range(names - names // 2)])
        for p in range(parties)
    ]
    how = Secured.of(OwnerMean(), [f"party-{p}" for p in range(parties)], "entity")
    transcript = Transcript()
    began = time.perf_counter()
    total, places, _ = private_union(vocabularies, "entity", InProcess(transcript), *how.for_one_sum(), names)
    seconds = time.perf_counter() - began
    assert total == names // 2 + parties * (names - names // 2)
    assert all(len(set(ids.tolist())) == names for ids in places)
    sent = sum(r.size for r in transcript.records if r.sender == 0)
    return {"seconds": seconds, "party_seconds": seconds / parties, "party_bytes": sent}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--repeat", type=int, default=3)
    options.add_argument("--out", type=Path, default=None)
    chosen = options.parse_args()
    results = []
    row("", ["s all", "s floor", "s party", "s server", "bytes", "plain", "ratio"])
    for what, parties, rows, width in CASES:
        found = min((one_round(parties, rows, width) for _ in range(chosen.repeat)), key=lambda f: f["seconds"])
        least = floor(parties, rows, width)
        row(what, [found["seconds"], least, found["party_seconds"], found["server_seconds"], found["party_bytes"],
                   found["plain_bytes"], found["ratio"]])  # fmt: skip
        results.append({"what": what, "parties": parties, "rows": rows, "width": width, "floor_s": least, **found})
    for parties, names in ((5, 10_000), (2, 10_000)):
        found = union(parties, names)
        row(
            f"union, {parties} x {names:,}",
            [found["seconds"], None, found["party_seconds"], None, found["party_bytes"]],
        )
        results.append({"what": "private union", "parties": parties, "names": names, **found})
    write(chosen.out, "cpu", results)


if __name__ == "__main__":
    main()
