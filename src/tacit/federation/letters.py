"""What travels between processes: messages in an envelope that says who writes to whom, signed.

    b"tacit-letter" version:u8  length:u32  header  messages  signature:64

The header is JSON with sorted keys and no blanks. Whoever carries a letter can lose it, keep it back, or bring it once
more; but not change it, and not write one. `run` and `life` tell a letter of another federation, or of a server before
it was started again, from those of this one: what was said once cannot be said again to another end.

Who carries letters reads them. Peers, who have no server that has to, seal what they send to each other (`Box`).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hmac import HMAC
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from tacit.errors import Refused, TacitError
from tacit.federation.keys import Identity, Roster
from tacit.federation.messages import Message

MAGIC, VERSION = b"tacit-letter", 1
LARGEST_HEADER = 1 << 24
LARGEST_NUMBER = 1 << 63
SIGNATURE = 64
KINDS = ("here", "ask", "poke", "answer", "unknown", "bye", "tell")
"""A party knocks (here); a server asks, and reminds of what it asked (poke); a party answers, or says that it does not
know of it (unknown). bye: the server needs nothing more. Peers say that they are there (here), send sealed messages
that nobody has to answer (tell), and leave (bye)."""
FIELDS = {"run": str, "life": int, "number": int, "sender": str, "receiver": str, "kind": str, "says": dict,
          "sizes": list}  # fmt: skip


class Away(TacitError):
    """A letter could not be sent for now: nobody was there to carry it."""


@dataclass(frozen=True)
class Letter:
    """One letter. `says` is what JSON can hold; `messages` are encoded."""

    kind: str
    sender: str
    receiver: str
    run: str = ""
    life: int = 0
    number: int = 0
    says: Mapping[str, Any] = field(default_factory=dict)
    messages: Sequence[bytes] = ()

    def seal(self, identity: Identity) -> bytes:
        """Its bytes, signed by whoever sends it."""
        header = {name: getattr(self, name) for name in FIELDS if name != "sizes"}
        header |= {"says": dict(self.says), "sizes": [len(message) for message in self.messages]}
        text = json.dumps(header, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
        content = b"".join([MAGIC, struct.pack("<BI", VERSION, len(text)), text, *self.messages])
        return content + identity.sign("letter", content)

    @staticmethod
    def open(data: bytes, roster: Roster, receiver: str) -> Letter:
        """The letter that these bytes are, if it is for this receiver and of someone on the roster."""
        begin = len(MAGIC) + 5
        if len(data) < begin + SIGNATURE or data[: len(MAGIC)] != MAGIC:
            raise Refused("not a letter of tacit")
        version, length = struct.unpack_from("<BI", data, len(MAGIC))
        if version != VERSION:
            raise Refused(f"a letter of version {version}; this side writes version {VERSION}")
        if length > LARGEST_HEADER or begin + length + SIGNATURE > len(data):
            raise Refused("a letter that is cut off")
        try:
            header = json.loads(data[begin : begin + length].decode("utf-8"))
        except (ValueError, RecursionError):
            raise Refused("a letter whose header is not JSON") from None
        if not isinstance(header, dict) or header.keys() != FIELDS.keys():
            raise Refused(f"a letter's header has {', '.join(FIELDS)}, and nothing else")
        if any(type(header[name]) is not wanted for name, wanted in FIELDS.items()):
            raise Refused("a letter whose header holds something else than it should")
        if any(not 0 <= header[name] < LARGEST_NUMBER for name in ("life", "number")):
            raise Refused("a letter whose number is none")
        if header["receiver"] != receiver:
            raise Refused("a letter to someone else")
        content, signature = data[:-SIGNATURE], data[-SIGNATURE:]
        roster.check(header["sender"], "letter", content, signature)
        sizes = header.pop("sizes")
        if any(type(size) is not int or size < 0 for size in sizes) or begin + length + sum(sizes) != len(content):
            raise Refused("a letter whose messages have other sizes than it says")
        if header["kind"] not in KINDS:
            raise Refused(f"a letter of kind {header['kind']!r}")
        messages, at = [], begin + length
        for size in sizes:
            messages.append(content[at : at + size])
            at += size
        return Letter(**header, messages=tuple(messages))

    def decoded(self) -> list[Message]:
        """Its messages."""
        return [Message.decode(message) for message in self.messages]


class Box:
    """What one process seals for others, and they for it: by an X25519 key of its own that it forgets at its end.

    Each tells the other its `public` key in a signed letter. A sealed message can be opened by that process alone: not
    by who carries it, not later, and not by the same peer after it was started again, to whom it would be of another
    time.
    """

    def __init__(self, name: str):
        self.name, self._key = name, X25519PrivateKey.generate()
        self.public = self._key.public_key().public_bytes_raw()

    def check(self, public: bytes) -> None:
        """Refuse a key of another process that nothing can be sealed with, before anything has to be."""
        self._cipher(public, self.name, self.name)

    def seal(self, to: str, public: bytes, number: int, message: bytes) -> bytes:
        """A message to who has this public key; `number`: never used twice for the same receiver."""
        return self._cipher(public, self.name, to).encrypt(number.to_bytes(12, "big"), message, None)

    def open(self, sender: str, public: bytes, number: int, sealed: bytes) -> bytes:
        """What `sender` sealed for this process."""
        try:
            return self._cipher(public, sender, self.name).decrypt(number.to_bytes(12, "big"), sealed, None)
        except InvalidTag:
            raise Refused("a message that was not sealed for this process, or was changed") from None

    def tag(self, public: bytes, content: bytes) -> str:
        """What two processes can compare by in the open: nobody else can tell what content has it."""
        code = HMAC(self._derived(public, b"tacit/tag"), hashes.SHA256())
        code.update(content)
        return code.finalize().hex()

    def _cipher(self, public: bytes, sender: str, receiver: str) -> ChaCha20Poly1305:
        return ChaCha20Poly1305(self._derived(public, b"tacit/box", sender.encode(), receiver.encode()))

    def _derived(self, public: bytes, *purpose: bytes) -> bytes:
        """32 bytes for one purpose that this process and the one with this public key have alone."""
        try:
            shared = self._key.exchange(X25519PublicKey.from_public_bytes(public))
        except ValueError:
            raise Refused("a key that nothing can be sealed with") from None
        info = b"\0".join([*purpose, *sorted([public, self.public])])
        return HKDF(hashes.SHA256(), 32, None, info).derive(shared)
