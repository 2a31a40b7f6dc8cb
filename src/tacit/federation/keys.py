"""Who is who in a federation: each party has an Ed25519 key of its own, and a signed roster says whose key is whose.

A private key never leaves the file it was made in. What people compare by telephone is the fingerprint of a public key.
A roster is a list of acts (enrol, rotate, revoke), each a version of its own: linked to the hash of the one before and
signed by the keeper. A new key is signed by the key that it replaces: a keeper can shut a party out, but become it only
by a revocation and an enrolment that everybody sees. Whatever arrives with a name on it goes through `Roster.check`.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import hashlib
import json
import os
import re
import signal
import stat
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from tacit.errors import BadValue, Refused, TacitError, excerpt
from tacit.folders import sync_folder, write_whole
from tacit.parties import PARTY_NAME, RESERVED

SCHEMA = "tacit.roster/1"
NOTHING = "0" * 64
"""What the first version has before it."""
LARGEST = 1 << 26
"""Bytes of a roster that are read at most."""
PUBLIC_LINE = re.compile(r"tacit-ed25519 (\S+) ([A-Za-z0-9+/]{43}=)(?: ([A-Za-z0-9+/]{86}==))?\r?\n?")
PRIVATE_LINE = re.compile(rb"tacit-ed25519-private (\S+)(?: scrypt ([0-9a-f]{32}))?\n")
NONCE = re.compile(r"[A-Za-z0-9_-]{8,64}")
"""What a message broker may have signed at a login: letters of URL-safe base64, and no others."""
Act = Literal["begin", "enrol", "rotate", "revoke"]
ACTS: tuple[Act, ...] = ("begin", "enrol", "rotate", "revoke")


class Locked(TacitError):
    """A key file that only a passphrase opens, and none was given."""


@dataclass(frozen=True, eq=False, repr=False)
class Identity:
    """A private key, and the name of whose it is."""

    name: str
    _key: Ed25519PrivateKey

    def __post_init__(self) -> None:
        _check_name(self.name)

    @classmethod
    def new(cls, name: str) -> Identity:
        return cls(name, Ed25519PrivateKey.generate())

    @property
    def public(self) -> bytes:
        return self._key.public_key().public_bytes_raw()

    def sign(self, purpose: str, content: bytes) -> bytes:
        """64 bytes that hold for this purpose and for no other."""
        return self._key.sign(_meant(purpose, content))

    def answer(self, nonce: str) -> bytes:
        """The signature with which a message broker that knows the public key lets its owner in.

        It is the one signature without a purpose, because the broker's protocol has the bare nonce signed. Whatever
        `sign` signs has a "/" and a NUL byte in it, and no nonce that is answered here has: so a broker that lies about
        its nonce gets no signature that means anything elsewhere.
        """
        if not isinstance(nonce, str) or not NONCE.fullmatch(nonce):
            raise Refused(
                f"A broker asked for a signature over {excerpt(str(nonce))}, which is no nonce of a login. Nothing was "
                "signed. It is not an honest broker, or no broker at all: ask whoever runs it."
            )
        return self._key.sign(nonce.encode())

    def save(self, path: Path, passphrase: str | None = None) -> None:
        """Write the private key for its owner's eyes only; a file that exists is never replaced."""
        head, secret = f"tacit-ed25519-private {self.name}", b""
        if passphrase is not None:
            salt = os.urandom(16)
            head, secret = f"{head} scrypt {salt.hex()}", _stretched(passphrase, salt)
        how = BestAvailableEncryption(secret) if secret else NoEncryption()
        write_new(Path(path), head.encode() + b"\n" + self._key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, how))

    @classmethod
    def load(cls, path: Path, passphrase: str | None = None) -> Identity:
        """Read what `save` wrote. `Locked`: it needs a passphrase."""
        path = Path(path)
        with open(path, "rb") as file:
            mode, data = stat.S_IMODE(os.fstat(file.fileno()).st_mode), file.read(1 << 16)
        head = PRIVATE_LINE.match(data)
        if head is None:
            public = " It is a public one: NAME.key is needed here." if data.startswith(b"tacit-ed25519 ") else ""
            raise TacitError(f"{path}: is no private key of tacit.{public} tacit keys new NAME makes one.")
        if mode & 0o077:
            raise TacitError(
                f"{path}: others may read this private key (mode {mode:04o}), so it may not be yours alone any more. "
                f"If nobody else could get at it: chmod 600 {path}. If somebody could: have it revoked."
            )
        secret = None
        if head[2] is not None:
            if passphrase is None:
                raise Locked(f"{path}: has a passphrase, and none was given. Say it, or set TACIT_PASSPHRASE.")
            secret = _stretched(passphrase, bytes.fromhex(head[2].decode()))
        elif passphrase is not None:
            raise TacitError(f"{path}: has no passphrase, but one was given. Is this the key that you mean?")
        try:
            key = load_pem_private_key(data[head.end() :], secret)
        except (ValueError, TypeError, UnsupportedAlgorithm):
            fault = "the passphrase is wrong, or the file is damaged" if secret else "the file is damaged"
            raise TacitError(
                f"{path}: {fault}. A key that is lost is replaced: tacit keys revoke, new, enrol."
            ) from None
        if not isinstance(key, Ed25519PrivateKey):
            raise TacitError(f"{path}: is a private key of another kind than Ed25519. tacit keys new NAME makes one.")
        return cls(head[1].decode(errors="replace"), key)

    def __repr__(self) -> str:
        return f"Identity({self.name!r}, {fingerprint(self.public)})"


@dataclass(frozen=True)
class Public:
    """What a party gives away: its name and its key; after a rotation the old key's signature over the new one too."""

    name: str
    public: bytes
    proof: bytes | None = None

    def save(self, path: Path) -> None:
        """Write one line that can be mailed."""
        words = [self.public] if self.proof is None else [self.public, self.proof]
        line = " ".join(["tacit-ed25519", self.name, *(base64.b64encode(word).decode() for word in words)])
        write_whole(Path(path), line.encode() + b"\n", mode=0o644)

    @classmethod
    def load(cls, path: Path) -> Public:
        with open(path, "rb") as file:
            text = file.read(1 << 16).decode(errors="replace")
        match = PUBLIC_LINE.fullmatch(text)
        if match is None:
            private = " It begins like a private key: that one stays where it is." if "private" in text[:99] else ""
            raise Refused(f"{path}: is no public key; expected one line, tacit-ed25519 NAME KEY.{private}")
        words = [base64.b64decode(word) for word in match.groups()[1:] if word is not None]
        if [base64.b64encode(word).decode() for word in words] != [word for word in match.groups()[1:] if word]:
            raise Refused(f"{path}: the key is not written the one way it can be. Ask for the file again.")
        try:
            _check_name(match[1])
            _check_public(words[0])
        except TacitError as error:
            raise Refused(f"{path}: {error}") from None
        return cls(match[1], *words)


def fingerprint(public: bytes) -> str:
    """What people compare: 32 hexadecimal digits in groups of four, to be read aloud."""
    digits = hashlib.sha256(_meant("fingerprint", public)).hexdigest()[:32]
    return " ".join(digits[at : at + 4] for at in range(0, 32, 4))


def check_fingerprint(public: bytes, heard: str) -> None:
    """Refuse a key whose fingerprint is another than was heard; blanks, dashes, colons and capitals do not matter."""
    digits = re.sub(r"[\s:-]", "", heard).lower()
    if not re.fullmatch("[0-9a-f]{32}", digits):
        raise BadValue(f"a fingerprint is 8 groups of 4 hexadecimal digits, all of them; not {excerpt(heard)}")
    if digits != fingerprint(public).replace(" ", ""):
        raise Refused(
            f"The key has the fingerprint {fingerprint(public)}, which is not the one that was given. It is not the "
            "key that its owner read out: do not use it, and find out where it came from."
        )


def verify(public: bytes, purpose: str, content: bytes, signature: bytes) -> None:
    """Refuse a signature that is not this key's, over this content and for this purpose."""
    if not _is_bytes(public, 32) or not _is_bytes(signature, 64):
        raise Refused("a public key has 32 bytes and a signature 64: these have not")
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, _meant(purpose, content))
    except InvalidSignature:
        raise Refused(f"the signature for {purpose!r} is not of the key {fingerprint(public)}") from None


def _verifies(public: bytes, purpose: str, content: bytes, signature: bytes) -> bool:
    try:
        verify(public, purpose, content, signature)
    except Refused:
        return False
    return True


# -- the roster --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Version:
    """One act, as it stands in the file: keys and signatures are hexadecimal."""

    number: int
    previous: str
    """The hash of the version before."""
    act: Act
    name: str
    public: str
    """The key that is enrolled, rotated to or revoked; of `begin`, the keeper's."""
    proof: str = ""
    """Of a rotation: the signature of the key before."""
    signature: str = ""

    def content(self) -> bytes:
        """What the keeper signs."""
        return _canonical(self.json() | {"signature": ""})

    def hash(self) -> str:
        return hashlib.sha256(_canonical(self.json())).hexdigest()

    def json(self) -> dict[str, Any]:
        return dict(self.__dict__)

    @classmethod
    def read(cls, found: Any) -> Version:
        """Of what JSON gave; anything but the fields, each as it should be, is refused."""
        if not isinstance(found, dict) or set(found) != {each.name for each in fields(cls)}:
            raise Refused(f"a version has the fields {', '.join(each.name for each in fields(cls))} and no others")
        if type(found["number"]) is not int:
            raise Refused(f"a version's number is an integer; not {excerpt(repr(found['number']))}")
        if found["act"] not in ACTS:
            raise Refused(f"an act is one of {', '.join(ACTS)}; not {excerpt(repr(found['act']))}")
        lengths = {"previous": 64, "public": 64, "proof": 128 if found["act"] == "rotate" else 0, "signature": 128}
        for name, length in lengths.items():
            if not isinstance(found[name], str) or not re.fullmatch(f"[0-9a-f]{{{length}}}", found[name]):
                raise Refused(
                    f"{name!r} of a version has {length} hexadecimal digits; not {excerpt(repr(found[name]))}"
                )
        _check_name(found["name"])
        return cls(**found)


@dataclass(frozen=True)
class Member:
    """A party, as a roster has it."""

    name: str
    public: bytes
    state: Literal["active", "revoked"]
    since: int
    """The version that brought its key, or revoked it."""
    before: tuple[bytes, ...] = ()
    """Keys that it had earlier, and that are refused now."""

    def json(self) -> dict[str, Any]:
        return {
            "name": self.name, "state": self.state, "since": self.since, "public": self.public.hex(),
            "fingerprint": fingerprint(self.public), "before": [fingerprint(key) for key in self.before],
        }  # fmt: skip


@dataclass(frozen=True)
class Roster:
    """The parties of a federation and their keys. It does not change: each act gives the next version."""

    versions: tuple[Version, ...]
    members: Mapping[str, Member] = field(default_factory=dict)
    """By name; in order of enrolment, revoked ones where they were."""

    @classmethod
    def begin(cls, keeper: Identity) -> Roster:
        """A roster without parties, of this keeper for ever."""
        return cls(())._signed(keeper, "begin", keeper.name, keeper.public)

    def enrol(self, keeper: Identity, name: str, public: bytes) -> Roster:
        """With a party more. Compare the fingerprint with its owner first, by another way than the key came."""
        return self._signed(keeper, "enrol", name, public)

    def rotate(self, keeper: Identity, name: str, new_public: bytes, proof: bytes) -> Roster:
        """With another key for a party; `proof`: its old key's signature over the new one, for the purpose "rotate"."""
        return self._signed(keeper, "rotate", name, new_public, proof)

    def revoke(self, keeper: Identity, name: str) -> Roster:
        """Without this party. Its key never comes back; the party may be enrolled again with another."""
        return self._signed(keeper, "revoke", name, self._active(name).public)

    # -- what it says --------------------------------------------------------------------------------------------------

    @property
    def keeper(self) -> bytes:
        """The public key of whoever signs this roster."""
        return bytes.fromhex(self.versions[0].public)

    @property
    def version(self) -> int:
        return len(self.versions)

    @property
    def head(self) -> str:
        """The hash of the last version: it stands for all before it."""
        return self.versions[-1].hash() if self.versions else NOTHING

    @property
    def names(self) -> tuple[str, ...]:
        """Of the active parties, in order of enrolment."""
        return tuple(member.name for member in self.members.values() if member.state == "active")

    def public(self, name: str) -> bytes:
        """The key of an active party; an unknown or revoked one is refused."""
        return self._active(name).public

    def check(self, name: str, purpose: str, content: bytes, signature: bytes) -> None:
        """Refuse what an active party did not sign with the key that it has now, for this purpose."""
        member = self._active(name)
        try:
            verify(member.public, purpose, content, signature)
        except Refused as error:
            if old := next((key for key in member.before if _verifies(key, purpose, content, signature)), None):
                raise Refused(
                    f"{name} signed with a key that it has no longer, {fingerprint(old)}; its key since version "
                    f"{member.since} is {fingerprint(member.public)}."
                ) from None
            raise Refused(f"{name}: {error}.") from None

    def json(self) -> dict[str, Any]:
        """What there is to tell."""
        return {
            "version": self.version, "head": self.head,
            "keeper": {"name": self.versions[0].name, "public": self.keeper.hex(),
                       "fingerprint": fingerprint(self.keeper)},
            "parties": [member.json() for member in self.members.values()],
        }  # fmt: skip

    # -- as a file -----------------------------------------------------------------------------------------------------

    def encode(self) -> bytes:
        """Its one form in bytes."""
        content = {"schema": SCHEMA, "versions": [version.json() for version in self.versions]}
        return json.dumps(content, indent=1, sort_keys=True).encode() + b"\n"

    @classmethod
    def decode(cls, data: bytes, keeper_public: bytes | None = None, at_least: int | None = None) -> Roster:
        """Read what `encode` gave, and verify all of it.

        Parameters
        ----------
        keeper_public
            The key of the keeper who is trusted; a roster of another is refused.
        at_least
            A version that was seen already: an older one has been rolled back, and is refused.
        """
        try:
            found = json.loads(data) if len(data) <= LARGEST else None
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict) or set(found) != {"schema", "versions"} or found["schema"] != SCHEMA:
            raise Refused(f"is no roster: expected JSON with the schema {SCHEMA!r} and versions, and no more")
        if not isinstance(found["versions"], list) or not found["versions"]:
            raise Refused("a roster has a list of versions, at least one")
        roster = cls(())
        for place, each in enumerate(found["versions"], 1):
            try:
                roster = roster._then(Version.read(each))
            except TacitError as error:
                raise Refused(f"version {place}: {str(error).rstrip('.')}") from None
        if roster.encode() != data:
            raise Refused("is not written the one way a roster can be: it was edited, or sent as text and changed")
        if keeper_public is not None and roster.keeper != keeper_public:
            raise Refused(
                f"is kept by {roster.versions[0].name}, {fingerprint(roster.keeper)}; expected the keeper "
                f"{fingerprint(keeper_public)}"
            )
        if at_least is not None and roster.version < at_least:
            raise Refused(
                f"is at version {roster.version}, but version {at_least} was seen already: it was rolled back"
            )
        return roster

    def save(self, path: Path) -> None:
        """Write it whole. A roster that stands there is replaced only by one that continues it."""
        path = Path(path)
        if not path.parent.is_dir():
            raise TacitError(f"{path.parent} is no folder: make it first, or choose another place for the roster.")
        with _locked(path):
            if path.exists():
                there = Roster.load(path)
                if self.versions[: there.version] != there.versions:
                    raise Refused(
                        f"{path}: stands at version {there.version} with the hash {there.head[:16]}..., which this "
                        "roster does not continue. Somebody changed it meanwhile, or it is another: read it again."
                    )
            write_whole(path, self.encode(), mode=None)
            sync_folder(path.parent)

    @classmethod
    def load(cls, path: Path, keeper_public: bytes | None = None, at_least: int | None = None) -> Roster:
        """`decode` a file."""
        with open(path, "rb") as file:
            data = file.read(LARGEST + 1)
        try:
            return cls.decode(data, keeper_public, at_least)
        except Refused as error:
            raise Refused(f"{path}: {error}. Get it again from its keeper, and compare fingerprints.") from None

    # -- the acts ------------------------------------------------------------------------------------------------------

    def _signed(self, keeper: Identity, act: Act, name: str, public: bytes, proof: bytes = b"") -> Roster:
        if self.versions and keeper.public != self.keeper:
            raise Refused(f"{keeper.name}, {fingerprint(keeper.public)}, is not the keeper of this roster.")
        if act == "rotate" and not _is_bytes(proof, 64):
            raise Refused(f"the key of {excerpt(name)} is rotated by a signature of its old one, of 64 bytes")
        _check_name(name)
        _check_public(public)
        version = Version(self.version + 1, self.head, act, name, public.hex(), proof.hex())
        return self._then(replace(version, signature=keeper.sign("roster", version.content()).hex()))

    def _then(self, version: Version) -> Roster:
        """After this version: the one place that decides what may follow on what, for acts and for files."""
        if version.number != self.version + 1 or version.previous != self.head:
            raise Refused("does not follow on the version before")
        if (version.act == "begin") != (not self.versions):
            raise Refused("a roster begins once, with its first version")
        public, name = bytes.fromhex(version.public), version.name
        keeper = self.keeper if self.versions else public
        verify(keeper, "roster", version.content(), bytes.fromhex(version.signature))
        member = self.members.get(name)
        if version.act == "revoke":
            if self._active(name).public != public:
                raise Refused(f"revokes another key of {name} than it has")
            changed = replace(self._active(name), state="revoked", since=version.number)
            return Roster((*self.versions, version), {**self.members, name: changed})
        _check_public(public)
        if version.act == "begin":
            return Roster((version,))
        for other in self.members.values():
            if public == other.public or public in other.before:
                was = "has" if (public, other.state) == (other.public, "active") else "had"
                raise Refused(f"{other.name} {was} the key {fingerprint(public)}: a key is used once. Make a new one")
        if public == keeper:
            raise Refused("the keeper's key signs the roster and nothing else: make another key for the party")
        if version.act == "rotate":
            member = self._active(name)
            if not _verifies(member.public, "rotate", public, bytes.fromhex(version.proof)):
                raise Refused(f"the new key of {name} is not signed by its old one, so it may be anybody's")
            changed = replace(member, public=public, since=version.number, before=(*member.before, member.public))
            return Roster((*self.versions, version), {**self.members, name: changed})
        if member is not None and member.state == "active":
            raise Refused(f"{name} is enrolled already: rotate its key, or revoke it first")
        others = {each: kept for each, kept in self.members.items() if each != name}
        before = () if member is None else (*member.before, member.public)
        return Roster(
            (*self.versions, version), {**others, name: Member(name, public, "active", version.number, before)}
        )

    def _active(self, name: str) -> Member:
        member = self.members.get(name) if isinstance(name, str) else None
        if member is None:
            known = f"There are: {', '.join(self.names)}." if self.names else "There is none yet."
            raise Refused(f"{excerpt(str(name))} is not in the roster of version {self.version}. {known}")
        if member.state != "active":
            raise Refused(f"{name} was revoked in version {member.since}.")
        return member

    def __repr__(self) -> str:
        return f"Roster(version {self.version}, {len(self.names)} active, kept by {fingerprint(self.keeper)})"


# -- files that are made together --------------------------------------------------------------------------------------


def make(name: str, folder: Path, passphrase: str | None = None) -> tuple[Identity, Path, Path]:
    """A new identity with its two files, NAME.key and NAME.pub: both, or none."""
    identity = Identity.new(name)
    key, pub = folder / f"{name}.key", folder / f"{name}.pub"
    if pub.exists():
        raise TacitError(f"{pub} exists already. Choose another --out, or rotate the key that it belongs to.")
    folder.mkdir(parents=True, exist_ok=True)
    with _uninterrupted():
        identity.save(key, passphrase)
        try:
            Public(name, identity.public).save(pub)
        except BaseException:
            key.unlink()
            raise
    return identity, key, pub


def keys_in(folder: Path, names: Sequence[str]) -> tuple[list[Identity], Roster]:
    """The parties' keys and the roster in a folder: roster.json and, for each name, NAME.key. Each has to be on it."""
    roster = Roster.load(folder / "roster.json")
    found = []
    for name in names:
        where = folder / f"{name}.key"
        if not where.is_file():
            raise TacitError(f"{where}: there is no key for {name}. tacit keys new {name} --out {folder} makes one.")
        one = Identity.load(where, os.environ.get("TACIT_PASSPHRASE"))
        if roster.public(name) != one.public:
            raise Refused(f"{where} is not the key that the roster has for {name}")
        found.append(one)
    return found, roster


def renew(
    path: Path, roster: Path, keeper: Identity | None = None, passphrase: str | None = None
) -> tuple[Public, Path, Path]:
    """Put a new key in the place of the private key at `path`; the old one is kept beside it.

    With the `keeper` the roster gets the new key too. Without, the public file holds what the keeper needs for that.
    The new key is on the disk before anything speaks of it. Returns what is public, its file, and that of the old key.
    """
    old = Identity.load(path, passphrase)
    known = Roster.load(roster, keeper_public=None if keeper is None else keeper.public)
    pub, coming = path.with_name(f"{old.name}.pub"), path.with_name(f"{path.name}.next")
    if (there := known.public(old.name)) != old.public:
        cut = (
            f" A rotation was cut short: {coming} may be the one, and belongs in its place." if coming.exists() else ""
        )
        raise Refused(f"{path}: is not the key that {roster} has for {old.name}: {fingerprint(there)}.{cut}")
    if coming.exists():
        raise TacitError(
            f"{coming} exists: a rotation was cut short before the roster had it. Delete it and try again."
        )
    new = Identity.new(old.name)
    proof = old.sign("rotate", new.public)
    public = Public(old.name, new.public, proof)
    changed = None if keeper is None else known.rotate(keeper, old.name, new.public, proof)
    number = 1
    while (kept := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    with _uninterrupted(), contextlib.ExitStack() as undo:
        new.save(coming, passphrase)
        undo.callback(coming.unlink)
        os.link(path, kept)
        undo.callback(kept.unlink)
        if changed is None:
            public.save(pub)
        else:
            try:
                changed.save(roster)
            finally:
                if roster.read_bytes() == changed.encode():  # from here on the new key may not get lost
                    undo.pop_all()
        os.replace(coming, path)
        undo.pop_all()
        sync_folder(path.parent)
        if changed is not None:
            public.save(pub)
    return public, pub, kept


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Several files, and nobody's Ctrl-C in between: it counts when they are written."""
    if threading.current_thread() is not threading.main_thread():
        yield  # it is the main thread that gets signals
        return
    came: list[int] = []
    before = {
        each: signal.signal(each, lambda number, _: came.append(number)) for each in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    for number in came[:1]:
        signal.raise_signal(number)


def write_new(path: Path, data: bytes) -> None:
    """Write a file that only its owner can read, whole or not at all, and never in place of another."""
    file, draft = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # 0600, and nobody else's
    try:
        with open(file, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        os.link(draft, path)
    except FileExistsError:
        raise TacitError(f"{path} exists already, and a key is never replaced. Choose another place.") from None
    finally:
        os.unlink(draft)
    sync_folder(path.parent)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Alone with this roster. The lock's file goes with it, so whoever waited has to look whether it is still there."""
    beside = path.with_name(f".{path.name}.lock")
    while True:
        lock = os.open(beside, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if _is_still(lock, beside):
                try:
                    yield
                finally:
                    beside.unlink()
                return
        finally:
            os.close(lock)


def _is_still(lock: int, path: Path) -> bool:
    """Whether an open file is the one that stands under a name, at this moment."""
    try:
        return os.path.samestat(os.fstat(lock), path.stat())
    except FileNotFoundError:
        return False


# -- what keys, names and purposes may be ------------------------------------------------------------------------------


def _meant(purpose: str, content: bytes) -> bytes:
    """What is signed: no signature for one purpose is one for another."""
    if not purpose or "\0" in purpose:
        raise BadValue(f"a purpose is a word or more; not {purpose!r}")
    return b"tacit/" + purpose.encode() + b"\0" + content


def _check_name(name: Any) -> None:
    if not isinstance(name, str) or not PARTY_NAME.fullmatch(name) or name in RESERVED:
        raise BadValue(
            f"{excerpt(str(name))} cannot be the name of a party: use letters, digits, dots, dashes and underscores, "
            f"100 at most, a letter or digit first; and none of {', '.join(sorted(RESERVED))}"
        )


def _check_public(public: bytes) -> None:
    """Refuse what is no point of the curve, and the few points for which anybody could sign."""
    if not _is_bytes(public, 32):
        raise Refused("a public key has 32 bytes")
    p = 2**255 - 19
    d = -121665 * pow(121666, -1, p)
    y = int.from_bytes(public, "little") % 2**255
    numerator, denominator = y * y - 1, d * y * y + 1  # of x squared
    small = y * numerator * (d * y**4 + 2 * y * y - 1) % p == 0  # of order 4, of 1 or 2, of 8
    if y >= p or small or pow(numerator * denominator, (p - 1) // 2, p) != 1:
        raise Refused("is not a public key of Ed25519, or is one that anybody could sign for")


def _stretched(passphrase: str, salt: bytes) -> bytes:
    """The passphrase made slow to guess: PKCS8 alone counts to 2,048, which a thief does millions of times a second."""
    if not passphrase:
        raise BadValue("a passphrase is not empty")
    return hashlib.scrypt(passphrase.encode(), salt=salt, n=1 << 15, r=8, p=1, maxmem=1 << 26, dklen=32).hex().encode()


def _is_bytes(found: Any, length: int) -> bool:
    return isinstance(found, bytes) and len(found) == length


def _canonical(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
