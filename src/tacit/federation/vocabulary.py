"""Which rows are shared: parties agree on the union of their names, openly or without showing them.

open       every party tells the server its names; the server tells it where they are
private    the server learns pseudonyms of all names, how many parties have each, and neither a name nor who has it

The private way has two steps. Names become pseudonyms under a key that is the product of all parties' own, each list
padded to a public bound and passed round by the server (`sets.Pseudonyms`: parties that follow the protocol, and the
decisional Diffie-Hellman problem in ristretto255; each of n lists, 32 bytes x bound, is sent n times and received n
times). Then each party makes a sketch of its pseudonyms, and a secure sum of the sketches is read as the union
(`sets.Sketch`, `secure`: 44 bytes for each of about 1.4 x n x bound cells, from each party). A party can ask for
pseudonyms of names that it only guesses, at most as many as the bound, and sees from the union that someone has them.
"""

from __future__ import annotations

import hashlib
import secrets
import struct
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from tacit.errors import BadInput, Refused, TacitError
from tacit.federation.aggregation import Part
from tacit.federation.messages import SERVER, Inbox, Message
from tacit.federation.secure import Member, SumFailed, Summing, Words
from tacit.federation.transport import InProcess, Talk
from tacit.graph import Graph, Vocab

Tensor = Any
TELL, PLACE = 0, 1
"""Phases of the open way, before round 1."""
MOST_NAMES, MOST_HIDDEN = 1 << 28, 1 << 24
"""Of all parties, openly; of each, if they are hidden."""
ATTEMPTS = 3
"""A sketch that cannot be read, by bad luck, is made again."""


def names_of(graph: Graph, part: Part) -> Vocab:
    """The names that are agreed on."""
    return graph.entities if part == "entity" else graph.relations


def usual_bound(vocabularies: Sequence[Vocab]) -> int:
    """The smallest power of two that no party's names exceed: it is told to all."""
    return 1 << (max(1, *(len(vocabulary) for vocabulary in vocabularies)) - 1).bit_length()


def open_union(vocabularies: Sequence[Vocab], part: Part, transport: InProcess) -> tuple[int, list[Tensor]]:
    """The open union of names, in one process: how many there are, and for each party the place of each of its own."""
    talks = {party: told_names(vocabulary, part, party) for party, vocabulary in enumerate(vocabularies)}
    (total, _), places = transport.meet(placed_names(len(talks), part), talks)
    return total, [places[party][1] for party in talks]


def told_names(vocabulary: Vocab, part: Part, party: int) -> Talk[tuple[int, Tensor]]:
    """A party's side: it tells the server its names, and is told how many there are and which shared rows its own have.

    The server learns every party's names.
    """
    text = torch.frombuffer(bytearray("\n".join(vocabulary.names).encode() or b"\n"), dtype=torch.uint8)
    says = {"part": part, "count": len(vocabulary)}
    own = yield (
        [Message("names", 0, TELL, party, SERVER, says, {"text": text})],
        Inbox("places", part, 0, PLACE, party, {SERVER: len(vocabulary)}),
    )
    [told] = own.messages()
    if told.says["total"] > MOST_NAMES:
        raise Refused(f"{told.says['total']:,} shared rows: {MOST_NAMES:,} is the most")
    return told.says["total"], told.arrays["ids"]


def placed_names(count: int, part: Part) -> Talk[tuple[int, list[Tensor]]]:
    """The server's side, of so many parties."""
    inbox = yield [], Inbox("names", part, 0, TELL, SERVER, dict.fromkeys(range(count), MOST_NAMES))
    _all_there(inbox)
    told = [names_in(message) for message in inbox.messages()]
    union = Vocab(name for vocabulary in told for name in vocabulary.names)
    places = [torch.from_numpy(vocabulary.positions(union).astype(np.int64)) for vocabulary in told]
    said = [
        Message("places", 0, PLACE, SERVER, party, {"part": part, "total": len(union)}, {"ids": ids})
        for party, ids in enumerate(places)
    ]
    yield said, None
    return len(union), places


def _all_there(inbox: Inbox) -> None:
    if inbox.missing:
        raise SumFailed(f"{len(inbox.missing)} parties have gone: all have to stay while they agree on names")


def names_in(message: Message) -> Vocab:
    """The names a party told, checked as any other."""
    try:
        text = message.arrays["text"].numpy().tobytes().decode("utf-8")
        vocabulary = Vocab(text.split("\n") if message.says["count"] else ())
    except (UnicodeDecodeError, BadInput) as error:
        raise Refused(f"names that cannot be names: {error}") from None
    if len(vocabulary) != message.says["count"]:
        raise Refused(f"{len(vocabulary):,} distinct names, where {message.says['count']:,} were announced")
    return vocabulary


def private_union(
    vocabularies: Sequence[Vocab],
    part: Part,
    transport: InProcess,
    members: Mapping[int, Member],
    server: Summing,
    bound: int | None = None,
) -> tuple[int, list[Tensor], list[bytes]]:
    """The private way, in one process; as `open_union`, and the union as each party was told.

    `members`, `server`: the two sides of secure sums. `bound`: the most names that a party may have; default: the
    `usual_bound`, which tells how many the largest has, to a factor of two.
    """
    bound = bound or usual_bound(vocabularies)
    talks = {party: hidden_names(names, part, members[party]) for party, names in enumerate(vocabularies)}
    total, found = transport.meet(joined_names(len(vocabularies), part, server, bound), talks)
    return total, [found[party][0] for party in talks], [found[party][1] for party in talks]


def hidden_names(vocabulary: Vocab, part: Part, member: Member) -> Talk[tuple[Tensor, bytes]]:
    """A party's side: the places of its names, and the union as it was told.

    Every party signs what it passes on, for this list and this hop: a server that put in a list of its own could have
    names that it guesses turned into pseudonyms.
    """
    from tacit.federation.sets import Pseudonyms, Sketch  # loading its library takes a while

    here, names = member.number, member.terms.names
    count, before = len(names), names[(here - 1) % len(names)]
    [told] = (yield [], Inbox("naming", part, 0, TELL, here, {SERVER: 0})).messages()
    bound, salt, domain = told.says["bound"], told.says["salt"], told.arrays["domain"].numpy().tobytes()
    if bound > MOST_HIDDEN:
        raise Refused(f"a bound of {bound:,} names: {MOST_HIDDEN:,} is the most")
    side = Pseudonyms(vocabulary.names, bound, domain)
    points = side.blinded()
    for hop in range(count):
        signature = member.signer.sign("names", _list_signed(domain, (here - hop) % count, hop, points))
        arrays = {"points": _octets(points).reshape(-1, 32), "signature": _octets(signature)}
        says = {"part": part, "owner": (here - hop) % count}
        came = yield (
            [Message("points", 0, hop, here, SERVER, says, arrays)],
            Inbox("points", part, 0, hop, here, {SERVER: bound}),
        )
        [passed] = came.messages()
        owner = (here - 1 - hop) % count
        if passed.says["owner"] != owner:
            raise Refused("another list than the one that is due")
        points, signature = (passed.arrays[name].numpy().tobytes() for name in ("points", "signature"))
        member.roster.check(before, "names", _list_signed(domain, owner, hop, points), signature)
        if owner != here:
            points = side.passed(points, bound)
    keys, cells = side.finished(points), Sketch.cells(bound * count)
    for attempt in range(ATTEMPTS):
        yield from added(Sketch.of(keys, cells, salt).reshape(-1), part, member, 10 * (attempt + 1))
        [told] = (yield [], Inbox("union", part, 0, PLACE + attempt, here, {SERVER: bound * count})).messages()
        if len(union := told.arrays["keys"].numpy()):
            return _places(keys, union, bound * count), union.tobytes()
        salt = told.says["salt"]
    raise SumFailed("the union of names could not be read")


def joined_names(count: int, part: Part, server: Summing, bound: int) -> Talk[int]:
    """The server's side: how many names there are."""
    from tacit.federation.sets import Sketch

    if count < 2:
        raise TacitError("one party has no one to agree with: use the open way")
    domain = b"tacit/" + part.encode() + secrets.token_bytes(16)  # other agreements do not compare
    salt, everyone = _salt(), dict.fromkeys(range(count), bound)
    says = {"part": part, "bound": bound, "salt": salt}
    said = [Message("naming", 0, TELL, SERVER, party, says, {"domain": _octets(domain)}) for party in everyone]
    for hop in range(count):
        came = yield said, Inbox("points", part, 0, hop, SERVER, everyone)
        _all_there(came)
        said = [replace(one, sender=SERVER, receiver=(one.sender + 1) % count) for one in came.messages()]
    cells = Sketch.cells(bound * count)
    for attempt in range(ATTEMPTS):
        total = yield from added_up(cells * Sketch.WIDTH, part, server, 10 * (attempt + 1), said)
        try:
            union, _ = Sketch.read(total.reshape(cells, -1), salt)
        except TacitError:
            if attempt == ATTEMPTS - 1:
                raise
            union, salt = np.zeros((0, 16), np.uint8), _salt()
        shown, says = torch.from_numpy(union), {"part": part, "salt": salt}
        said = [Message("union", 0, PLACE + attempt, SERVER, party, says, {"keys": shown}) for party in everyone]
        if len(union):
            break
    yield said, None
    return len(union)


def _salt() -> int:
    """Below 2**63, and always of 19 digits: messages have one size."""
    return 10**18 + secrets.randbelow(2**63 - 10**18)


def _octets(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _list_signed(domain: bytes, owner: int, hop: int, points: bytes) -> bytes:
    return struct.pack("<qqq", len(domain), owner, hop) + domain + hashlib.sha256(points).digest()


def _places(own: np.ndarray, union: np.ndarray, most: int) -> Tensor:
    """Where a party's pseudonyms stand in the union."""
    if union.ndim != 2 or union.shape[1] != own.shape[1] or len(union) > most:
        raise Refused("a union that is none")
    kind = np.dtype((np.void, own.shape[1]))
    every, mine = (np.ascontiguousarray(keys).view(kind).reshape(-1) for keys in (union, own))
    place = {key.tobytes(): number for number, key in enumerate(every)}
    try:
        found = [place[key.tobytes()] for key in mine]
    except KeyError:
        raise Refused("a union without a name that this party has") from None
    return torch.tensor(found, dtype=torch.int64)


def added(words: Words, part: Part, member: Member, first: int) -> Talk[None]:
    """A party's side of one secure sum before the first round, under an agreement of its own."""

    def told(kind: str, phase: int) -> Inbox:
        return Inbox(kind, part, 0, phase, member.number, {SERVER: 0})

    [members] = (yield [member.keys(0, first)], told("members", first)).messages()
    [shares] = (yield [member.shares(members, first + 1)], told("shares", first + 1)).messages()
    member.keep(shares)
    [heard] = (yield [member.masked(words, first + 2, 0)], told("heard", first + 2)).messages()
    signed = member.signed(heard, first + 3)
    if member.heard != tuple(range(len(member.terms.names))):
        # It may be made again, of the same numbers: two sums over different parties could be subtracted.
        raise SumFailed("not all parties were heard: they have to stay while they agree")
    [agreed] = (yield [signed], told("agreed", first + 3)).messages()
    yield [member.opened(agreed, first + 4)], None


def added_up(count: int, part: Part, server: Summing, first: int, said: Sequence[Message] = ()) -> Talk[Words]:
    """The server's side: the sum of so many words of each. `said`: what it has to say before."""

    def told(kind: str, phase: int, who: Sequence[int]) -> Inbox:
        return Inbox(kind, part, 0, phase, SERVER, dict.fromkeys(who, 0))

    everyone = range(len(server.terms.names))
    said = server.keys((yield said, told("keys", first, everyone)))
    said = server.shares((yield said, told("shares", first + 1, server.members)))
    said = server.masked((yield said, told("masked", first + 2, server.members)), count)
    said = server.signed((yield said, told("signed", first + 3, server.heard)))
    return server.opened((yield said, told("opened", first + 4, server.heard)))
