"""Secure sums: a server learns the sum of what parties send, and nothing of any one of them.

Bonawitz, Ivanov, Kreuter, Marcedone, McMahan, Patel, Ramage, Segal and Seth: "Practical secure aggregation for
privacy-preserving machine learning", CCS 2017, in the form that withstands a server that lies. An agreement is two
phases, and pays for several sums; each sum is three:

    keys      every member makes an X25519 key for sealing, and for each sum one for masks; signed by its identity
    shares    for each sum, shares of the mask's key and of a seed of its own go to every member, sealed for it alone

    masked    numbers, as whole numbers modulo 2**32, plus masks: one with each other member, which cancel, and its own
    signed    every member signs whom the server says it has heard; nobody goes on without enough signatures on one list
    opened    shares of the own seed of who was heard, or of the mask's key of who was not: never both of one member

Masks are ChaCha20 under a key that HKDF makes of the whole shared secret and of who, for whom, in which agreement and
which sum: no mask is ever used twice. A key for masks serves one sum, since opening it for a member that dropped out
would tell that member's earlier numbers as well.

What holds: up to (members - threshold) may drop out at any moment, and the sum is that of all who were heard; with
fewer than the threshold it fails, and nothing is told. With a threshold above half of the members a server that tells
members different things cannot open both secrets of anyone; with t members who work with it, that takes a threshold
above half of (members + t). What does not hold: the sum itself is told, so a sum of one is that one's numbers, and sums
over different sets of members can be subtracted. It is no differential privacy.
"""

from __future__ import annotations

import hashlib
import secrets
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from tacit.errors import BadValue, Refused, TacitError
from tacit.federation import shamir
from tacit.federation.messages import SERVER, Inbox, Message

Tensor = Any
Words = np.ndarray
"""(n,) uint32, added modulo 2**32."""
KEY, SIGNATURE, TAG = 32, 64, 16


class SumFailed(TacitError):
    """A sum that could not be made: it was told to nobody, and no shared row has moved."""


class Signer(Protocol):
    """Who a member is: signs for a purpose."""

    def sign(self, purpose: str, content: bytes) -> bytes: ...


class Members(Protocol):
    """Whose keys are known: refuses signatures that are not a member's."""

    def check(self, name: str, purpose: str, content: bytes, signature: bytes) -> None: ...


def least_threshold(members: int) -> int:
    """More than half: below it, a server that lies could open both secrets of a member."""
    return members // 2 + 1


def usual_threshold(members: int) -> int:
    """More than two thirds, as the paper advises where members may work with the server; two of two."""
    return 2 * members // 3 + 1


@dataclass(frozen=True)
class FixedPoint:
    """Numbers as whole multiples of a step, modulo 2**32; the sum over all parties fits by construction.

    Attributes
    ----------
    limit
        The largest magnitude; what is beyond is set to it, and counted.
    parties
        How many there are at most in a sum.
    """

    limit: float
    parties: int

    def __post_init__(self) -> None:
        if not 0 < self.limit < float("inf") or self.parties < 1:
            raise BadValue(f"the range of numbers is above 0, not {self.limit}, of 1 party or more, not {self.parties}")
        if self.bits < 1:
            raise BadValue(
                f"{self.parties} parties with numbers up to {self.limit:g} leave no digits of 32 bits: choose a "
                "smaller federation.range"
            )

    @property
    def bits(self) -> int:
        """After the point."""
        return int(np.floor(np.log2((2**31 - 1) / (self.limit * self.parties))))

    @property
    def step(self) -> float:
        return float(2.0**-self.bits)

    def encode(self, numbers: np.ndarray) -> tuple[Words, int]:
        """Words, and how many numbers were beyond the limit."""
        numbers = np.asarray(numbers, np.float64)
        if not np.isfinite(numbers).all():
            raise TacitError("numbers that are not finite cannot be added up")
        beyond = int((np.abs(numbers) > self.limit).sum())
        whole = np.rint(np.clip(numbers, -self.limit, self.limit) * 2.0**self.bits)
        return whole.astype(np.int64).astype(np.uint32), beyond

    def decode(self, words: Words) -> np.ndarray:
        """A sum as numbers."""
        return words.astype(np.uint32).view(np.int32).astype(np.float64) * self.step


# -- what both sides know ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Terms:
    """What all know of sums before they begin: public settings, of which a server can change nothing.

    expected: how many take part in a sum, if nobody drops out. threshold: how many have to stay to the end; default:
    `usual_threshold` of them. sums: how many one agreement pays for.
    """

    names: tuple[str, ...]
    expected: int
    threshold: int | None = None
    sums: int = 2
    part: str = "relation"

    def __post_init__(self) -> None:
        if self.expected < 2:
            raise BadValue(f"{self.expected} parties in a sum: the sum of one is its numbers")
        if self.threshold is not None and not least_threshold(self.expected) <= self.threshold <= self.expected:
            raise BadValue(
                f"a threshold of {self.threshold} for sums of {self.expected} parties: it is from "
                f"{least_threshold(self.expected)}, more than half of them, to {self.expected}"
            )

    @property
    def needed(self) -> int:
        """How many have to be heard to the end: of those expected, never of those whom a server chooses to name."""
        return usual_threshold(self.expected) if self.threshold is None else self.threshold


@dataclass(frozen=True)
class Agreement:
    """The members of some sums, in order, and their public keys: (members, 1 + sums, 32)."""

    members: tuple[int, ...]
    public: np.ndarray

    @property
    def session(self) -> bytes:
        """The agreement's name: whoever was told of other members or keys has another."""
        order = struct.pack(f"<{len(self.members)}q", *self.members)
        return hashlib.sha256(b"tacit/secure-session\0" + order + self.public.tobytes()).digest()

    def place(self, member: int) -> int:
        return self.members.index(member)


def _keys_signed(round_: int, number: int, public: np.ndarray) -> bytes:
    return struct.pack("<qq", round_, number) + public.tobytes()


def _list_signed(session: bytes, which: int, heard: Sequence[int], told: bytes) -> bytes:
    return session + told + struct.pack(f"<q{len(heard)}q", which, *heard)


def _derived(secret: bytes, session: bytes, purpose: bytes, *numbers: int) -> bytes:
    """32 bytes of a whole shared secret, for one purpose."""
    info = b"tacit/" + purpose + struct.pack(f"<{len(numbers)}q", *numbers)
    return HKDF(hashes.SHA256(), KEY, session, info).derive(secret)


def mask(key: bytes, count: int) -> Words:
    """So many words of ChaCha20's stream."""
    stream = Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor().update(bytes(4 * count))
    return np.frombuffer(stream, np.dtype("<u4"))


def _pair_mask(own: X25519PrivateKey, theirs: bytes, session: bytes, which: int, pair: tuple[int, int]) -> bytes:
    shared = own.exchange(X25519PublicKey.from_public_bytes(theirs))
    return _derived(shared, session, b"secure-mask", which, *sorted(pair))


def _bytes(values: np.ndarray | bytes) -> Tensor:
    array = np.frombuffer(values, np.uint8) if isinstance(values, bytes) else values
    return torch.from_numpy(np.array(array, np.uint8))


def _ids(members: Sequence[int]) -> Tensor:
    return torch.tensor(list(members), dtype=torch.int64)


def shaped(message: Message, name: str, *shape: int) -> np.ndarray:
    """An array of a message, of the shape that it has to have."""
    array = message.arrays[name]
    if tuple(array.shape) != shape:
        raise Refused(f"{name} of shape {tuple(array.shape)}, where {shape} is expected")
    found: np.ndarray = array.cpu().numpy()
    return found


def _listed(message: Message, name: str = "members") -> tuple[int, ...]:
    members = tuple(int(x) for x in message.arrays[name].tolist())
    if list(members) != sorted(set(members)) or (members and members[0] < 0):
        raise Refused("members that are not in order, or named twice")
    return members


# -- a member ----------------------------------------------------------------------------------------------------------


class Member:
    """A party's side: its secrets of an agreement, and one answer to each phase. What does not fit is refused.

    told: a hash of all that this member was told beside sums and acts upon. It is signed with the list of who was
    heard, so that members who were told different things open nothing.
    """

    def __init__(self, number: int, signer: Signer, roster: Members, terms: Terms):
        self.number, self.signer, self.roster, self.terms = number, signer, roster, terms
        self.told = bytes(32)
        self.forget()

    def forget(self) -> None:
        """An agreement ends; its secrets are gone."""
        self.agreement: Agreement | None = None
        self._sealing: X25519PrivateKey | None = None
        self._masking: list[X25519PrivateKey] = []
        self._seeds: list[bytes] = []
        self._shares: dict[int, np.ndarray] = {}
        """By member: (sums, 2, 33), its shares of the mask's key and of the seed."""
        self.round = 0
        self.members: tuple[int, ...] = ()
        self.next_sum = 0
        self.heard: tuple[int, ...] | None = None

    def ready(self, sums: int) -> bool:
        """Whether the agreement pays for so many more, all of its members are there, and the last sum was ended."""
        if self.agreement is None or self.agreement.members != self.members or len(self._shares) < len(self.members):
            return False
        return self.next_sum + sums <= self.terms.sums and (self.next_sum == 0 or self.heard == ())

    def _said(self, kind: str, phase: int, arrays: Mapping[str, Tensor], round_: int) -> Message:
        return Message(kind, round_, phase, self.number, SERVER, {"part": self.terms.part}, arrays)

    def keys(self, round_: int, phase: int) -> Message:
        """New keys, signed."""
        self.forget()
        self.round = round_
        self._sealing = X25519PrivateKey.generate()
        self._masking = [X25519PrivateKey.generate() for _ in range(self.terms.sums)]
        self._seeds = [secrets.token_bytes(KEY) for _ in range(self.terms.sums)]
        public = np.frombuffer(
            b"".join(key.public_key().public_bytes_raw() for key in (self._sealing, *self._masking)), np.uint8
        ).reshape(-1, KEY)
        signature = self.signer.sign("secure-keys", _keys_signed(round_, self.number, public))
        self._public = public
        return self._said("keys", phase, {"public": _bytes(public), "signature": _bytes(signature)}, round_)

    def shares(self, told: Message, phase: int) -> Message:
        """Shares of the secrets for every member, sealed; the server has said who they are."""
        members, terms = _listed(told), self.terms
        if self.number not in members or members[-1] >= len(terms.names):
            raise Refused("a list of members without this one, or with one that nobody knows")
        needed, each = terms.needed, 1 + terms.sums
        if len(members) < needed:
            raise SumFailed(f"{len(members)} members are named, and {needed} are needed")
        public = shaped(told, "public", len(members) * each, KEY).reshape(len(members), each, KEY)
        signatures = shaped(told, "signatures", len(members), SIGNATURE)
        for place, member in enumerate(members):
            content = _keys_signed(self.round, member, public[place])
            self.roster.check(terms.names[member], "secure-keys", content, signatures[place].tobytes())
        agreement = Agreement(members, public)
        if not np.array_equal(public[agreement.place(self.number)], self._public):
            raise Refused("keys that are not this member's own")
        if len({key.tobytes() for key in public.reshape(-1, KEY)}) != public.size // KEY:
            raise Refused("one key that stands twice")
        self.agreement, self.members = agreement, members
        secret = [
            [shamir.split(key.private_bytes_raw(), needed, members), shamir.split(seed, needed, members)]
            for key, seed in zip(self._masking, self._seeds, strict=True)
        ]
        sealed = np.zeros((len(members), self._length), np.uint8)
        for place, member in enumerate(members):
            content = b"".join(share for of_sum in secret for kind in of_sum for share in [kind[place]])
            if member == self.number:
                self._shares = {member: _opened_shares(content, terms.sums)}
                continue
            box, about = self._box(member, self.number, member)
            sealed[place] = np.frombuffer(box.encrypt(bytes(12), content, about), np.uint8)
        return self._said("shares", phase, {"members": _ids(members), "sealed": _bytes(sealed)}, self.round)

    @property
    def _length(self) -> int:
        return self.terms.sums * 2 * shamir.SHARE + TAG

    def _box(self, other: int, sender: int, receiver: int) -> tuple[ChaCha20Poly1305, bytes]:
        """What seals from one member to another: each direction has its own key, so that a fixed nonce is used once."""
        assert self.agreement is not None
        assert self._sealing is not None
        theirs = self.agreement.public[self.agreement.place(other), 0].tobytes()
        shared = self._sealing.exchange(X25519PublicKey.from_public_bytes(theirs))
        key = _derived(shared, self.agreement.session, b"secure-box", sender, receiver)
        return ChaCha20Poly1305(key), self.agreement.session + struct.pack("<qq", sender, receiver)

    def keep(self, told: Message) -> None:
        """The others' shares, of those who sent any: they are the members of the sums."""
        assert self.agreement is not None
        members = _listed(told)
        if self.number not in members or not set(members) <= set(self.agreement.members):
            raise Refused("shares of someone who is no member, or none of this one")
        if len(members) < self.terms.needed:
            raise SumFailed(f"{len(members)} members sent shares, and {self.terms.needed} are needed")
        sealed = shaped(told, "sealed", len(members), self._length)
        for place, member in enumerate(members):
            if member != self.number:
                box, about = self._box(member, member, self.number)
                try:
                    content = box.decrypt(bytes(12), sealed[place].tobytes(), about)
                except InvalidTag:
                    name = self.terms.names[member]
                    raise Refused(f"shares of {name} that were not sealed for this member") from None
                self._shares[member] = _opened_shares(content, self.terms.sums)
        self.members = members

    def masked(self, words: Words, phase: int, round_: int) -> Message:
        """Numbers under all their masks."""
        if self.agreement is None or len(self._shares) < len(self.members) or self.next_sum >= self.terms.sums:
            raise SumFailed("there is no agreement for this sum")
        if self.next_sum and self.heard != ():
            raise SumFailed("the sum before has not ended")
        which, session = self.next_sum, self.agreement.session
        total = words + mask(_derived(self._seeds[which], session, b"secure-own", which, self.number), len(words))
        for member in self.members:
            if member != self.number:
                theirs = self.agreement.public[self.agreement.place(member), 1 + which].tobytes()
                pair = (self.number, member)
                hidden = mask(_pair_mask(self._masking[which], theirs, session, which, pair), len(words))
                total = total + hidden if self.number < member else total - hidden
        self.next_sum, self.heard, self.round = which + 1, None, round_
        return self._said("masked", phase, {"words": torch.from_numpy(total)}, round_)

    def signed(self, told: Message, phase: int) -> Message:
        """A signature on who was heard. One list for each sum: a second is refused."""
        heard = _listed(told)
        if self.heard is not None or not self.next_sum:
            raise Refused("a second list of who was heard in this sum, or one of a sum that has not begun")
        if self.number not in heard or not set(heard) <= set(self.members):
            raise Refused("a list of who was heard without this member, or with one that is none")
        if len(heard) < self.terms.needed:
            raise SumFailed(f"{len(heard)} members were heard, and {self.terms.needed} are needed")
        assert self.agreement is not None
        self.heard = heard
        content = _list_signed(self.agreement.session, self.next_sum - 1, heard, self.told)
        return self._said("signed", phase, {"signature": _bytes(self.signer.sign("secure-list", content))}, self.round)

    def opened(self, told: Message, phase: int) -> Message:
        """Shares of one secret of each member, if enough members signed the very list that this one did."""
        signers = _listed(told)
        if self.heard is None or not set(signers) <= set(self.heard):
            raise Refused("signatures of members that were not heard")
        if len(signers) < self.terms.needed:
            raise SumFailed(f"{len(signers)} members signed, and {self.terms.needed} are needed")
        assert self.agreement is not None
        which = self.next_sum - 1
        content = _list_signed(self.agreement.session, which, self.heard, self.told)
        signatures = shaped(told, "signatures", len(signers), SIGNATURE)
        for place, member in enumerate(signers):
            self.roster.check(self.terms.names[member], "secure-list", content, signatures[place].tobytes())
        found = np.stack([self._shares[m][which, 1 if m in self.heard else 0] for m in self.members])
        for member in self.members:
            self._shares[member][which] = 0  # told once, and gone
        answer = self._said("opened", phase, {"members": _ids(self.members), "shares": _bytes(found)}, self.round)
        self.members, self.heard = self.heard, ()
        return answer


def _opened_shares(content: bytes, sums: int) -> np.ndarray:
    if len(content) != sums * 2 * shamir.SHARE:
        raise Refused("shares of another length")
    return np.frombuffer(content, np.uint8).reshape(sums, 2, shamir.SHARE).copy()


# -- the server --------------------------------------------------------------------------------------------------------


@dataclass
class Summing:
    """The server's side: passes on what members say to each other, adds up, and takes off the masks that are left."""

    terms: Terms
    agreement: Agreement | None = None
    members: tuple[int, ...] = ()
    next_sum: int = 0
    heard: tuple[int, ...] = ()
    _total: Words = field(default_factory=lambda: np.zeros(0, np.uint32), repr=False)
    _signatures: np.ndarray = field(default_factory=lambda: np.zeros((0, KEY, KEY), np.uint8), repr=False)

    def ready(self, sums: int, members: Sequence[int]) -> bool:
        """Whether the agreement is these members', and pays for so many more."""
        return (
            self.agreement is not None
            and tuple(members) == self.members == self.agreement.members
            and self.next_sum + sums <= self.terms.sums
        )

    def _enough(self, count: int, of: int, what: str) -> None:
        if count < (needed := self.terms.needed):
            self.agreement, self.members = None, ()
            raise SumFailed(f"{count} of {of} members {what}, and {needed} are needed: the sum is not made")

    def _told(self, kind: str, round_: int, phase: int, receiver: int, arrays: Mapping[str, Tensor]) -> Message:
        return Message(kind, round_, phase, SERVER, receiver, {"part": self.terms.part}, arrays)

    def keys(self, inbox: Inbox) -> list[Message]:
        """Everyone's keys to everyone."""
        sent, each = inbox.messages(), 1 + self.terms.sums
        self._enough(len(sent), len(inbox.rows), "sent keys")
        public = np.stack([shaped(message, "public", each, KEY) for message in sent])
        signatures = np.stack([shaped(message, "signature", SIGNATURE) for message in sent])
        self.members = tuple(message.sender for message in sent)
        self.agreement, self.next_sum = Agreement(self.members, public), 0
        arrays = {"members": _ids(self.members), "public": _bytes(public.reshape(-1, KEY)),
                  "signatures": _bytes(signatures)}  # fmt: skip
        return [self._told("members", inbox.round, inbox.phase, member, arrays) for member in self.members]

    def shares(self, inbox: Inbox) -> list[Message]:
        """Each member's sealed shares to whom they are for."""
        sent = inbox.messages()
        assert self.agreement is not None
        everyone = self.agreement.members
        self._enough(len(sent), len(everyone), "sent shares")
        length = self.terms.sums * 2 * shamir.SHARE + TAG
        sealed = np.stack([shaped(message, "sealed", len(everyone), length) for message in sent])
        self.members = tuple(message.sender for message in sent)
        return [
            self._told("shares", inbox.round, inbox.phase, member,
                       {"members": _ids(self.members), "sealed": _bytes(sealed[:, everyone.index(member)])})
            for member in self.members
        ]  # fmt: skip

    def masked(self, inbox: Inbox, count: int) -> list[Message]:
        """Add up; tell those who were heard who they are."""
        sent = inbox.messages()
        assert self.agreement is not None
        self._enough(len(sent), len(self.agreement.members), "sent numbers")
        self._total = np.zeros(count, np.uint32)
        for message in sent:
            self._total += shaped(message, "words", count)
        self.heard = tuple(message.sender for message in sent)
        arrays = {"members": _ids(self.heard)}
        return [self._told("heard", inbox.round, inbox.phase, member, arrays) for member in self.heard]

    def signed(self, inbox: Inbox) -> list[Message]:
        """Everyone's signatures to everyone."""
        sent = inbox.messages()
        assert self.agreement is not None
        self._enough(len(sent), len(self.agreement.members), "signed")
        signatures = np.stack([shaped(message, "signature", SIGNATURE) for message in sent])
        signers = tuple(message.sender for message in sent)
        arrays = {"members": _ids(signers), "signatures": _bytes(signatures)}
        return [self._told("agreed", inbox.round, inbox.phase, member, arrays) for member in signers]

    def opened(self, inbox: Inbox) -> Words:
        """The sum of all who were heard."""
        sent = inbox.messages()
        assert self.agreement is not None
        session, which, public = self.agreement.session, self.next_sum, self.agreement.public
        self._enough(len(sent), len(self.agreement.members), "opened shares")
        shares: dict[int, dict[int, bytes]] = {member: {} for member in self.members}
        for message in sent:
            if _listed(message) != self.members:
                raise Refused("shares of others than the members")
            for member, share in zip(
                self.members, shaped(message, "shares", len(self.members), shamir.SHARE), strict=True
            ):
                shares[member][message.sender] = share.tobytes()
        total, count = self._total, len(self._total)
        for member in self.members:
            secret = shamir.join(shares[member], self.terms.needed)
            if member in self.heard:
                total -= mask(_derived(secret, session, b"secure-own", which, member), count)
                continue
            key = X25519PrivateKey.from_private_bytes(secret)
            if key.public_key().public_bytes_raw() != public[self.agreement.place(member), 1 + which].tobytes():
                raise SumFailed(f"the shares of {self.terms.names[member]}'s key make another key")
            for other in self.heard:
                theirs = public[self.agreement.place(other), 1 + which].tobytes()
                hidden = mask(_pair_mask(key, theirs, session, which, (member, other)), count)
                # The one who was heard added it if its number is the lower, and took it off otherwise.
                total = total - hidden if other < member else total + hidden
        self.members, self.next_sum = self.heard, which + 1
        self._total = np.zeros(0, np.uint32)
        return total
