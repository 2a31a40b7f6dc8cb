"""A coordinator and its parties by letters: signed, asked for again until they are answered, answered once.

A letter may be lost, doubled, late or out of order. The coordinator writes each question once, and reminds a party of
it (poke) until there is an answer; a party that never had it says so, and is sent it again. A party keeps its last
answer, and gives it again to whoever reminds it; what is older is not answered at all.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tacit.coordinator import Answer, Ask
from tacit.errors import Refused, TacitError
from tacit.federation.keys import Identity, Roster
from tacit.federation.letters import Away, Letter
from tacit.federation.secure import SumFailed
from tacit.participant import Declined, Lost, Participant

LOG = logging.getLogger(__name__)
POKE, KNOCK, LINGER = 1.0, 2.0, 10.0
"""Seconds between reminders; between a party's knocks; that a party stays after the end, to say it again."""


class Post(Protocol):
    """What carries letters. A party writes to the coordinator alone: to None."""

    def send(self, to: str | None, letter: bytes) -> None: ...

    def receive(self, timeout: float) -> tuple[str, bytes] | None: ...


class Unheard(TacitError):
    """Nothing was heard of the coordinator for too long."""


@dataclass
class Correspondence:
    """The coordinator's letters.

    life: how often the coordinator was started, with this time; letters of an earlier one are not answered.
    """

    post: Post
    identity: Identity
    roster: Roster
    parties: Sequence[str]
    life: int = 1
    number: int = 0
    refused: int = 0
    """Letters that were none, of no one on the roster, or of another time."""
    between: Callable[[], None] = lambda: None
    """What is done now and then while answers are awaited."""
    _looked: float = 0.0
    _nonces: dict[str, str] = field(default_factory=dict)
    """What each party said when it last knocked: a question that has it was not written before."""
    failed: set[str] = field(default_factory=set)
    """Parties that said that they cannot go on, and were not heard of since."""
    parties_knock: bool = True
    """Whether a party that was started again can say so by itself. If not, one that failed is reminded as well."""

    def ask(self, run: str, asks: Mapping[str, Ask], seconds: float) -> dict[str, Answer]:
        """Answers of those who gave one in time."""
        self.number += 1
        for name, ask in asks.items():
            self._send(name, self._question(name, run, ask))
        found: dict[str, Answer] = {}
        resent: dict[str, float] = {}
        end, poke = time.monotonic() + seconds, time.monotonic() + POKE
        while len(found) < len(asks) and (now := time.monotonic()) < end:
            if now >= self._looked + POKE:
                self._looked = now
                self.between()
            if now >= poke:
                for name in asks.keys() - found.keys() - (self.failed if self.parties_knock else set()):
                    self._send(name, self._letter("poke", name, run))
                poke = now + POKE
            letter = self._next(min(poke, end) - now)
            if letter is None or letter.sender not in asks or letter.sender in found:
                continue
            name = letter.sender
            if letter.kind == "here" or (letter.kind == "unknown" and self._is_now(letter, run)):
                self.failed.discard(name)
                if letter.kind == "here":
                    self._nonces[name] = str(letter.says.get("nonce", ""))[:64]
                if now >= resent.get(name, 0.0) + POKE / 2:
                    resent[name] = now
                    self._send(name, self._question(name, run, asks[name]))
            elif letter.kind == "answer" and self._is_now(letter, run):
                if letter.says.get("failed"):
                    LOG.warning("%s cannot go on: its own log says why. It is waited for.", letter.sender)
                    self.failed.add(letter.sender)
                    continue
                try:
                    found[letter.sender] = _answer(letter)
                except Refused as error:
                    LOG.warning("an answer of %s was refused: %s", letter.sender, error)
                    self.refused += 1
        return found

    def end(self, run: str) -> None:
        """Nothing more will be asked."""
        for name in self.parties:
            self._send(name, self._letter("bye", name, run))

    def _send(self, to: str, letter: bytes) -> None:
        """What cannot be sent now will be asked for again."""
        try:
            self.post.send(to, letter)
        except Away as error:
            LOG.warning("%s", error)

    def _letter(self, kind: str, to: str, run: str, says: Mapping[str, object] | None = None,
                messages: Sequence[bytes] = ()) -> bytes:  # fmt: skip
        return Letter(kind, self.identity.name, to, run, self.life, self.number, says or {}, messages).seal(
            self.identity
        )

    def _question(self, name: str, run: str, ask: Ask) -> bytes:
        says = {"asked": ask.asked, "nonce": self._nonces.get(name, ""), **ask.says}
        return self._letter("ask", name, run, says, [message.encode() for message in ask.messages])

    def _is_now(self, letter: Letter, run: str) -> bool:
        return (letter.run, letter.life, letter.number) == (run, self.life, self.number)

    def _next(self, seconds: float) -> Letter | None:
        """The next letter of a party, if one comes in time that is one."""
        came = self.post.receive(max(seconds, 0.0))
        if came is None:
            return None
        who, data = came
        try:
            letter = Letter.open(data, self.roster, self.identity.name)
            if letter.sender != who or who not in self.parties:
                raise Refused(f"a letter of {letter.sender} that came from {who}")
        except Refused as error:
            LOG.warning("a letter was refused: %s", error)
            self.refused += 1
            return None
        return letter


def _answer(letter: Letter) -> Answer:
    says = dict(letter.says)
    declined, lost = says.pop("declined", None), bool(says.pop("lost", False))
    if declined is not None and not isinstance(declined, str):
        raise Refused("a reason that is no words")
    if declined is not None:
        declined = "".join(sign for sign in declined[:2000] if sign.isprintable())
    return Answer(says, letter.decoded(), declined, lost)


def attend(
    participant: Participant, post: Post, identity: Identity, roster: Roster, coordinator: str, *, patience: float,
    linger: float | None = None, knocks: bool = True,
) -> None:  # fmt: skip
    """A party's letters: answer what the coordinator asks, until it says goodbye.

    patience: seconds without a word of the coordinator after which the party gives up. linger: seconds that it stays
    after the end, if nobody says goodbye. knocks: it says by itself that it is there; not where it can only answer.
    """
    last, kept, run = participant.last_letter, b"", participant.run_id
    nonce = secrets.token_hex(16)
    heard, knocked, ended = time.monotonic(), 0.0, 0.0

    def send(letter: bytes) -> bytes:
        try:
            post.send(None, letter)
        except Away as error:  # the coordinator will ask for it again
            LOG.warning("%s", error)
        return letter

    def write(kind: str, key: tuple[int, int] = (0, 0), says: Mapping[str, object] | None = None,
              messages: Sequence[bytes] = ()) -> bytes:  # fmt: skip
        return send(Letter(kind, identity.name, coordinator, run, *key, says or {}, messages).seal(identity))

    while True:
        now = time.monotonic()
        if ended and now - ended > (LINGER if linger is None else linger):
            return
        if now - heard > patience:
            raise Unheard(f"nothing was heard of {coordinator} for {patience:g} s. What there is is kept: start "
                             "this again, and it goes on.")  # fmt: skip
        if knocks and (now - max(heard, knocked) >= KNOCK or not knocked):
            write("here", says={"nonce": nonce})
            knocked = now
        came = post.receive(KNOCK)
        if came is None:
            continue
        try:
            letter = Letter.open(came[1], roster, identity.name)
            if letter.sender != coordinator or (run and letter.run != run):
                raise Refused(f"a letter of {letter.sender}, or of another federation")
        except Refused as error:
            LOG.warning("a letter was refused: %s", error)
            continue
        key, heard = (letter.life, letter.number), time.monotonic()
        if letter.kind == "bye" and run and ended:
            return
        if letter.kind not in ("ask", "poke") or key < last:
            continue
        if key == last and kept:
            send(kept)
            continue
        if letter.kind == "poke":
            send(Letter("unknown", identity.name, coordinator, letter.run, *key).seal(identity))
            continue
        if knocks and not run and letter.says.get("nonce") != nonce:
            continue  # of another time: whoever writes now has heard this party knock
        last, run = key, letter.run
        participant.remember(*key)
        asked, says = str(letter.says.get("asked")), dict(letter.says)
        stop: Exception | None = None
        try:
            answer, messages = participant.answer(asked, says, letter.decoded())
        except (Lost, Refused, SumFailed) as error:  # of a talk in which someone else may be wrong
            LOG.warning("what was asked could not be done: %s", error)
            answer, messages = {"lost": True}, []
        except Declined as error:
            answer, messages, stop = {"declined": str(error)}, [], error
        except (TacitError, OSError) as error:  # its words may tell of the data, and stay here
            answer, messages, stop = {"failed": True}, [], error
        kept = write("answer", key, answer, [message.encode() for message in messages])
        if stop is not None:
            raise stop
        heard = time.monotonic()
        if asked == "end":
            ended = heard
