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
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tacit.errors import BadInput, TacitError
from tacit.federation.aggregation import Part
from tacit.federation.messages import SERVER, Inbox, Message, Refused
from tacit.federation.secure import Member, SumFailed, Summing, Words
from tacit.federation.transport import InProcess
from tacit.graph import Graph, Vocab

if TYPE_CHECKING:
    from tacit.federation.sets import Pseudonyms

Tensor = Any
TELL, PLACE = 0, 1
"""Phases of the open way, before round 1."""
ATTEMPTS = 3
"""A sketch that cannot be read, by bad luck, is made again."""


def names_of(graph: Graph, part: Part) -> Vocab:
    """The names that are agreed on."""
    return graph.entities if part == "entity" else graph.relations


def usual_bound(vocabularies: Sequence[Vocab]) -> int:
    """The smallest power of two that no party's names exceed: it is told to all."""
    return 1 << (max(1, *(len(vocabulary) for vocabulary in vocabularies)) - 1).bit_length()


def open_union(vocabularies: Sequence[Vocab], part: Part, transport: InProcess) -> tuple[int, list[Tensor]]:
    """The open union of names: each party tells the server its names, and is told which shared rows they have.

    The server learns every party's names.

    Returns
    -------
    How many names there are, and for each party the place of each of its own.
    """
    transport.send([
        Message("names", 0, TELL, party, SERVER, {"part": part, "count": len(vocabulary)},
                {"text": torch.frombuffer(bytearray("\n".join(vocabulary.names).encode() or b"\n"), dtype=torch.uint8)})
        for party, vocabulary in enumerate(vocabularies)
    ])  # fmt: skip
    inbox = transport.receive(
        Inbox("names", part, 0, TELL, SERVER, {party: len(v) for party, v in enumerate(vocabularies)})
    )
    told = [_names(message) for message in inbox.messages()]
    union = Vocab(name for vocabulary in told for name in vocabulary.names)
    places = [torch.from_numpy(vocabulary.positions(union).astype(np.int64)) for vocabulary in told]
    transport.send([
        Message("places", 0, PLACE, SERVER, party, {"part": part, "total": len(union)}, {"ids": ids})
        for party, ids in enumerate(places)
    ])  # fmt: skip
    found = []
    for party, ids in enumerate(places):
        own = transport.receive(Inbox("places", part, 0, PLACE, party, {SERVER: len(ids)}))
        found.append(own.messages()[0].arrays["ids"])
    return len(union), found


def _names(message: Message) -> Vocab:
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
    """The private way; as `open_union`, but the server knows no party's places. Also the union as each party was told.

    `members`, `server`: the two sides of secure sums. `bound`: the most names that a party may have; default: the
    `usual_bound`, which tells how many the largest has, to a factor of two.
    """
    from tacit.federation.sets import Pseudonyms, Sketch  # loading its library takes a while

    bound = bound or usual_bound(vocabularies)
    domain = b"tacit/" + part.encode() + secrets.token_bytes(16)  # said by the server; other agreements do not compare
    sides = [Pseudonyms(vocabulary.names, bound, domain) for vocabulary in vocabularies]
    lists = _passed_round(sides, part, transport, members, bound, domain)
    keys = [side.finished(points) for side, points in zip(sides, lists, strict=True)]
    cells = Sketch.cells(bound * len(sides))
    for attempt in range(ATTEMPTS):
        salt = secrets.randbits(63)
        words = {party: Sketch.of(own, cells, salt).reshape(-1) for party, own in enumerate(keys)}
        total = summed(words, part, transport, members, server, 10 * (attempt + 1))
        try:
            union, _ = Sketch.read(total.reshape(cells, -1), salt)
            break
        except TacitError:
            if attempt == ATTEMPTS - 1:
                raise
    shown = torch.from_numpy(union)
    transport.send([Message("union", 0, PLACE, SERVER, party, {"part": part}, {"keys": shown})
                    for party in range(len(sides))])  # fmt: skip
    places, unions = [], []
    for party, own in enumerate(keys):
        inbox = Inbox("union", part, 0, PLACE, party, {SERVER: bound * len(sides)})
        [told] = transport.receive(inbox).messages()
        unions.append(told.arrays["keys"].numpy().tobytes())
        places.append(_places(own, told.arrays["keys"].numpy(), bound * len(sides)))
    return len(union), places, unions


def _passed_round(
    sides: Sequence[Pseudonyms],
    part: Part,
    transport: InProcess,
    members: Mapping[int, Member],
    bound: int,
    domain: bytes,
) -> list[bytes]:
    """Every party's blinded list, after all the others have multiplied it; by way of the server.

    Each party signs what it passes on, for this list and this hop: a server that put in a list of its own could have
    names that it guesses turned into pseudonyms.
    """
    count, lists = len(sides), [side.blinded() for side in sides]
    if count < 2:
        raise TacitError("one party has no one to agree with: use the open way")
    for hop in range(count):
        for owner in range(count):
            here, there = (owner + hop) % count, (owner + hop + 1) % count
            signature = members[here].signer.sign("names", _list_signed(domain, owner, hop, lists[owner]))
            arrays = {
                "points": torch.frombuffer(bytearray(lists[owner]), dtype=torch.uint8).reshape(-1, 32),
                "signature": torch.frombuffer(bytearray(signature), dtype=torch.uint8),
            }
            for sender, receiver in ((here, SERVER), (SERVER, there)):
                transport.send([Message("points", 0, hop, sender, receiver, {"part": part, "owner": owner}, arrays)])
                came = transport.receive(Inbox("points", part, 0, hop, receiver, {sender: bound})).messages()
                if not came:
                    raise SumFailed("a list of names was lost on its way: all parties have to stay while they agree")
                told = came[0]
                arrays = dict(told.arrays)
            if told.says["owner"] != owner:
                raise Refused("another list than the one that is due")
            lists[owner], signature = (told.arrays[name].numpy().tobytes() for name in ("points", "signature"))
            one = members[there]
            one.roster.check(one.terms.names[here], "names", _list_signed(domain, owner, hop, lists[owner]), signature)
            if there != owner:
                lists[owner] = sides[there].passed(lists[owner], bound)
    return lists


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


def summed(
    words: Mapping[int, Words],
    part: Part,
    transport: InProcess,
    members: Mapping[int, Member],
    server: Summing,
    first: int,
) -> Words:
    """One secure sum before the first round, under an agreement of its own."""
    count = len(next(iter(words.values())))

    def told(kind: str, phase: int, messages: Sequence[Message]) -> Inbox:
        transport.send(messages)
        senders = dict.fromkeys((message.sender for message in messages), 0)
        return transport.receive(Inbox(kind, part, 0, phase, SERVER, senders))

    def heard(kind: str, phase: int, messages: Sequence[Message]) -> dict[int, Message]:
        transport.send(messages)
        found = {}
        for message in messages:
            to = message.receiver
            for one in transport.receive(Inbox(kind, part, 0, phase, to, {SERVER: 0})).messages():
                found[to] = one
        return found

    answer = heard("members", first, server.keys(told("keys", first, [members[i].keys(0, first) for i in words])))
    sent = [members[i].shares(message, first + 1) for i, message in answer.items()]
    for i, message in heard("shares", first + 1, server.shares(told("shares", first + 1, sent))).items():
        members[i].keep(message)
    sent = [members[i].masked(words[i], first + 2, 0) for i in server.members]
    answer = heard("heard", first + 2, server.masked(told("masked", first + 2, sent), count))
    sent = [members[i].signed(message, first + 3) for i, message in answer.items()]
    answer = heard("agreed", first + 3, server.signed(told("signed", first + 3, sent)))
    sent = [members[i].opened(message, first + 4) for i, message in answer.items()]
    return server.opened(told("opened", first + 4, sent))
