"""Which rows of two peers mean the same thing: by a file of links or equal names, or by a private set intersection.

Each side ends with ids of its own, in an order that both have, so that the i-th row of one is the i-th of the other
without a name being said again.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from tacit.draws import Purpose, Stream
from tacit.errors import BadInput, BadValue, excerpt
from tacit.federation.messages import Inbox, Message
from tacit.federation.transcript import Transcript
from tacit.federation.transport import InProcess
from tacit.graph import Graph, Ids
from tacit.parties import Kind, Parties

KINDS: tuple[Kind, Kind] = ("entity", "relation")
ALIGNMENT = 15
"""What these draws are for; a peer's own are below (`tacit.peers.learner.Use`)."""
Parts = Literal["entities", "relations", "both"]


@dataclass(frozen=True)
class Aligned:
    """One side of what two peers have in common: its own ids of entities and of relations."""

    entity: Ids
    relation: Ids

    def __len__(self) -> int:
        return len(self.entity) + len(self.relation)


Alignment = dict[int, dict[int, Aligned]]
"""By peer, by the other: the peer's own ids. Those without anything in common are left out."""


def by_links(parties: Parties) -> Alignment:
    """By the parties' links, or by equal names where they have none; both sides know these.

    Where a name is linked to several of the other's, the first in the order of both sides' ids counts: a row has one
    place to go to.
    """
    pairs = {}
    for one, other in itertools.combinations(range(len(parties)), 2):
        sides = [_one_to_one(*parties.shared(one, other, kind)) for kind in KINDS]
        pairs[one, other] = tuple(Aligned(sides[0][side], sides[1][side]) for side in (0, 1))
    return _both_ways(pairs)


def by_intersection(parties: Parties, transcript: Transcript, *, domain: bytes = b"tacit.peers") -> Alignment:
    """By equal names that neither side shows: a private set intersection of each pair (`tacit.federation.sets`).

    How many names a side has is known up to the next power of two.
    """
    if parties.links is not None:
        raise BadValue("names that differ cannot be intersected: these parties have links between them")
    pairs, post = {}, InProcess(transcript)
    for one, other in itertools.combinations(range(len(parties)), 2):
        found: tuple[list[Ids], list[Ids]] = ([], [])
        for kind in KINDS:
            names = [
                graph.entities if kind == "entity" else graph.relations for graph in (parties[one], parties[other])
            ]
            bounds = [_bound(len(each)) for each in names]
            asks = asking(names[0], kind, (one, other), (bounds[0], bounds[1]), domain)
            answers = answering(names[1], kind, (one, other), (bounds[0], bounds[1]), domain)
            mine, theirs = post.meet(asks, {other: answers})
            found[0].append(mine)
            found[1].append(theirs[other])
        pairs[one, other] = tuple(Aligned(*ids) for ids in found)
    return _both_ways(pairs)


def by_talk(
    graph: Graph, ends: tuple[int, int], bounds: Sequence[tuple[int, int]], domain: bytes, *, first: bool, attempt: int
) -> Generator[Any, Inbox, Aligned]:
    """One side of an intersection of entities and then of relations; first: that of the lower number, which asks.

    `bounds`: of both sides, for each kind. `attempt` tells messages of this one from those of one that was cut off.
    """
    side, found = asking if first else answering, []
    for kind, bound in zip(KINDS, bounds, strict=True):
        names = graph.entities if kind == "entity" else graph.relations
        found.append((yield from side(names, kind, ends, bound, domain, attempt)))
    return Aligned(*found)


def bounds_of(graph: Graph) -> tuple[int, int]:
    """How many names a graph has, of entities and of relations, as others may know."""
    return _bound(len(graph.entities)), _bound(len(graph.relations))


def by_rows(
    rows: Sequence[tuple[str, str, Kind]], graph: Graph, *, first: bool, where: str = "the alignment"
) -> Aligned:
    """By pairs of names that both sides have a list of: (name of the lower number, of the higher, kind).

    Without the other's graph; the order, and which of several links counts, are those of `by_links`.
    """
    found = []
    for kind in KINDS:
        vocab = graph.entities if kind == "entity" else graph.relations
        pairs = sorted({(one, other) for one, other, of in rows if of == kind})
        taken: tuple[set[str], set[str]] = (set(), set())
        ids = []
        for one, other in pairs:
            if one in taken[0] or other in taken[1]:
                continue
            taken[0].add(one)
            taken[1].add(other)
            own = one if first else other
            if own not in vocab:
                raise BadInput(f"{where}: names {excerpt(own)}, which is no {kind} of this graph.")
            ids.append(vocab.id(own))
        found.append(np.array(ids, np.int32))
    return Aligned(*found)


def asking(
    names: Sequence[str],
    kind: Kind,
    ends: tuple[int, int],
    bounds: tuple[int, int],
    domain: bytes,
    attempt: int = 0,
) -> Generator[Any, Inbox, Ids]:
    """The side of the peer with the lower number; ends with the ids of its names that the other has."""
    from tacit.federation.sets import Intersection

    one, other = ends
    own = Intersection(names, bounds[0], bounds[1], domain + kind.encode())
    blinded = Message("blinded", attempt, 0, one, other, {"part": kind}, {"points": _points(own.blinded())})
    came = yield [blinded], Inbox("passed", kind, attempt, 1, one, {other: bounds[0]})
    arrays = came.taken[other].arrays
    passed = own.passed(_bytes(arrays["own"])) if "own" in arrays else b""
    yield [Message("passed", attempt, 2, one, other, {"part": kind}, {"points": _points(passed)})], None
    return _ids(own.finished(_bytes(arrays["points"]), passed))


def answering(
    names: Sequence[str],
    kind: Kind,
    ends: tuple[int, int],
    bounds: tuple[int, int],
    domain: bytes,
    attempt: int = 0,
) -> Generator[Any, Inbox, Ids]:
    """The other side; ends as well with the ids of its names that the first has."""
    from tacit.federation.sets import Intersection

    one, other = ends
    own = Intersection(names, bounds[1], bounds[0], domain + kind.encode())
    came = yield [], Inbox("blinded", kind, attempt, 0, other, {one: bounds[0]})
    theirs = own.passed(_bytes(came.taken[one].arrays["points"]))
    both = {"points": _points(theirs), "own": _points(own.blinded())}
    said = [Message("passed", attempt, 1, other, one, {"part": kind}, both)]
    came = yield said, Inbox("passed", kind, attempt, 2, other, {one: bounds[1]})
    return _ids(own.finished(_bytes(came.taken[one].arrays["points"]), theirs))


def check_share(share: float, parts: Parts) -> None:
    """Refuse what is no share of what is aligned."""
    if not 0 < share <= 1:
        raise BadValue(f"the share of what is aligned is above 0 and at most 1, not {share}")
    if parts not in ("entities", "relations", "both"):
        raise BadValue(f"parts is entities, relations or both, not {parts!r}")


def thinned(alignment: Alignment, share: float, parts: Parts, seed: int) -> Alignment:
    """A share of what is aligned, drawn for each pair from a public seed; of entities, of relations, or of both."""
    check_share(share, parts)

    def some(ids: Ids, one: int, other: int, kind: Kind) -> Ids:
        if parts not in ("both", "entities" if kind == "entity" else "relations"):
            return ids[:0]
        low, high = sorted((one, other))
        stream = Stream(seed, Purpose.PAIR, low, ALIGNMENT << 28 | 2 * high + (kind == "relation"))
        chosen: Ids = ids[np.sort(stream.permutation(len(ids))[: round(share * len(ids))])]
        return chosen

    made = {
        one: {
            o: Aligned(some(a.entity, one, o, "entity"), some(a.relation, one, o, "relation")) for o, a in own.items()
        }
        for one, own in alignment.items()
    }
    return {one: {other: aligned for other, aligned in own.items() if len(aligned)} for one, own in made.items()}


def _one_to_one(here: Ids, there: Ids) -> tuple[Ids, Ids]:
    taken: tuple[set[int], set[int]] = (set(), set())
    kept = []
    for one, other in sorted(zip(here.tolist(), there.tolist(), strict=True)):
        if one not in taken[0] and other not in taken[1]:
            taken[0].add(one)
            taken[1].add(other)
            kept.append((one, other))
    ids = np.array(kept, np.int32).reshape(-1, 2)
    return ids[:, 0], ids[:, 1]


def _both_ways(pairs: dict[tuple[int, int], tuple[Aligned, ...]]) -> Alignment:
    found: Alignment = {}
    for (one, other), (here, there) in pairs.items():
        for peer, them, aligned in ((one, other, here), (other, one, there)):
            own = found.setdefault(peer, {})
            if len(aligned):
                own[them] = aligned
    return found


def _bound(names: int) -> int:
    return 1 << max(names - 1, 0).bit_length()


def _points(data: bytes) -> Any:
    return torch.from_numpy(np.frombuffer(data, np.uint8).reshape(-1, 32).copy())


def _bytes(points: Any) -> bytes:
    found: bytes = points.numpy().tobytes()
    return found


def _ids(mask: Any) -> Ids:
    found: Ids = np.flatnonzero(mask).astype(np.int32)
    return found
