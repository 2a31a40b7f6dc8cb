"""One peer as a process of its own: letters to others by way of a broker, a real clock, training beside the talking.

The peer is the one of `tacit.peers.peer`, and does what it does in one process. Here are what carries its messages, and
what a process needs beside that:

    here    every second, to everybody: the key of this process (`Box`), what was agreed on, how much both have in
            common and a tag of what that is, whether it rests, how many messages went each way, and how many rows it
            answered as a host
    tell    one message, sealed for the other's process; nobody has to answer
    bye     it leaves

A process counts as met when it says the key of the one that it writes to: so nothing that was said to an earlier one
is taken for new. Who was started again is met again; what was begun with it is given up by both, and what that cost is
in the books of both (`Peer.told`). Nothing is waited for but by a timer: who is away, slow, or means something else is
left out, and the others go on.

A meeting ends for a peer when it has nothing left to do, and all others rest, have left, or are not heard of.
"""

from __future__ import annotations

import hashlib
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tacit.errors import Refused, TacitError, excerpt
from tacit.federation.keys import Identity, Roster
from tacit.federation.letters import Away, Box, Letter
from tacit.federation.messages import VERSION, Inbox, Message
from tacit.federation.transcript import Transcript
from tacit.federation.transport import Talk, going
from tacit.folders import log_to
from tacit.kept import locked
from tacit.parties import Kind
from tacit.peers.alignment import Aligned, bounds_of, by_rows, by_talk
from tacit.peers.kept import Journal, Lines, PeerRun
from tacit.peers.learner import Learner, Trained, vector_widths
from tacit.peers.peer import MOST, Job, Peer

LOG = logging.getLogger(__name__)
BEAT, CALM, TICK = 1.0, 3.0, 0.05
"""Seconds between two signs of life; of quiet before a meeting ends; between looks at a training that goes on."""
ATTEMPTS = 16
"""Intersections of names with one peer, however often that is started again: each answers what it asks for."""
NAMES = 1 << 20
"""Names that a peer may have for an intersection: each side does two multiplications of points for each."""
NEWS = 8
"""Handshakes whose books change from one sign of life to the next, at most: there is one at a time."""
EARLY = 1024
"""Offers and invitations that are kept for a peer that has not begun."""
SMALL = 1 << 12
"""Bytes of either of these."""
TALK = ("blinded", "passed")
"""What the messages of an intersection are called."""
Row = tuple[str, str, str, str, Kind]
"""A link: a peer, its name for something, another peer, that one's name for it, and of which kind."""


class Post(Protocol):
    """What carries letters; `tacit.federation.nats.Post` does."""

    def send(self, to: str | None, letter: bytes) -> None: ...

    def receive(self, timeout: float) -> tuple[str, bytes] | None: ...


class Alone(TacitError):
    """Nobody else came."""


@dataclass
class Other:
    """What is known of another peer."""

    name: str
    number: int
    public: bytes = b""
    """The key of its process; empty: nothing was heard of it."""
    met: bool = False
    heard: float = -math.inf
    odd: str = ""
    """Why it is left out."""
    other_names: bool = False
    """Whether this process of it means other names by what both have than an earlier one did."""
    vectors: bool = True
    bounds: tuple[int, int] = (0, 0)
    has: list[Any] | None = None
    """How many entities and relations it says that both have, and a tag of these."""
    agreed: bool = False
    """Whether both mean the same by what both have."""
    rests: bool = False
    left: bool = False
    letters: int = 0
    sent: int = 0
    got: int = 0
    their_sent: int = 0
    their_got: int = 0
    last: tuple[int, int] = (0, 0)
    talk: tuple[Talk[Aligned], Inbox] | None = None
    attempts: int = 0
    talks: int = 0
    """Intersections that were begun with it, whichever of its processes; `attempts`: with this one."""
    since: float = -math.inf


class Doing(threading.Thread):
    """Work in a thread of its own: messages are answered meanwhile. `then` takes what it found."""

    def __init__(self, work: Callable[[], Any], then: Callable[[Any], None]):
        super().__init__(name="tacit-peer", daemon=True)
        self.work, self.then = work, then
        self.found: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.found = self.work()
        except BaseException as error:  # noqa: BLE001 - it is raised where it is heard
            self.error = error

    def end(self) -> None:
        if self.error is not None:
            raise self.error
        self.then(self.found)


class Guest:
    """A peer in a meeting over a network, from the first letter to the last.

    Parameters
    ----------
    links
        Which names mean the same, where that is not found out by a private set intersection.
    minutes
        After so long nothing new is begun; a training that goes on is waited for, and counts.
    wait
        Seconds to wait for all others before the first training. Who comes later takes part as far as it can.
    keep
        Keep what every message held, beside its size.
    """

    def __init__(
        self,
        run: PeerRun,
        post: Post,
        identity: Identity,
        roster: Roster,
        *,
        links: Sequence[Row] | None = None,
        minutes: float = math.inf,
        wait: float = 120.0,
        keep: bool = False,
        on_event: Callable[[dict[str, Any]], None] = lambda event: None,
    ):
        if identity.name != run.name:
            raise TacitError(f"this folder is {run.name}'s, and the key is {identity.name}'s")
        if roster.public(run.name) != identity.public:
            raise Refused(f"the key of {run.name} is not the one that the roster has")
        for name in run.plan.peers:
            roster.public(name)
        if (links is None) == (run.plan.alignment == "links"):
            raise TacitError("what is aligned comes from a file of links, or from names: one of the two")
        self.run, self.plan, self.post, self.identity, self.roster = run, run.plan, post, identity, roster
        self.minutes, self.wait, self.on_event = minutes, wait, on_event
        self.number, self.within = run.number, run.plan.pairing.within
        self.others = {
            name: Other(name, number) for number, name in enumerate(self.plan.peers) if number != self.number
        }
        self._by_number = {other.number: other for other in self.others.values()}
        self.links = {name: self._links_with(other, links or ()) for name, other in self.others.items()}
        for other in self.others.values():
            self._by_links(other)  # a name that is not here is found now, and not when the other comes
        if links is None and max(bounds_of(run.graph)) > NAMES:
            raise TacitError(f"an intersection is of {NAMES:,} names at most, and this graph has more: give a file of "
                             "links")  # fmt: skip
        self.box = Box(run.name)
        self.peer: Peer | None = None
        self.refused = 0
        self.between: Callable[[], None] = lambda: None
        """What is done every second."""
        self.transcript = Transcript(lambda record: keep)
        self._early: list[Message] = []
        self._digests: dict[str, bytes] = {}
        self._doing: Doing | None = None
        self._calm: float | None = None
        self._told = 0
        self._started, self._until = 0.0, math.inf
        self._clock = time.time() - time.monotonic()

    # -- from the beginning to the end ---------------------------------------------------------------------------------

    def attend(self) -> dict[str, Any]:
        """Meet the others until there is nothing left to do; what came of it."""
        run = self.run
        with locked(run.path), log_to(run.path):
            self.journal = Journal(run.private)
            self._open_transcript()
            self.life = self.journal.next_life(int(time.time() * 1000))
            self._started, beat = self.now, -math.inf
            self._until = self._started + 60 * self.minutes
            if run.began is not None:
                self._begin()
            while not (self._over() or (self._doing is None and self.now >= self._until)):
                if self.now >= beat + BEAT:
                    beat = self.now
                    self._beat()
                if self.peer is None and self._doing is None and self._all_here(self.now - self._started):
                    self._begin()
                self._look_after()
                came = self.post.receive(self._pause(beat))
                if came is not None:
                    self._take(*came)
            for other in self.others.values():
                if other.met:
                    self._write("bye", other, {})
            if self.peer is None:
                raise Alone(
                    f"Time was up before anybody came to {self.plan.meeting}. Start it again when they are there."
                )
            self._tell("ends")
            return run.finish(self.peer.learner) | {"refused": self.refused}

    @property
    def now(self) -> float:
        """Seconds, as a clock on the wall shows them; but it never goes back."""
        return self._clock + time.monotonic()

    def _pause(self, beat: float) -> float:
        due = [beat + BEAT]
        if self._doing is not None:
            due.append(self.now + TICK)
        elif self.peer is not None:
            due.append(self.peer.alarm)
        return max(0.0, min(due) - self.now)

    def _all_here(self, waited: float) -> bool:
        """Whether to begin: with everybody, or with those who came in time."""
        wanted = [other for other in self.others.values() if not other.odd]
        there = [other for other in wanted if other.agreed]
        if len(there) == len(wanted) and there:
            return True
        if waited < self.wait:
            return False
        if not there:
            odd = "".join(f" {other.name} {other.odd}." for other in self.others.values() if other.odd)
            raise Alone(f"Nobody came to {self.plan.meeting} within {self.wait:g} s.{odd} Start it again when they are "
                        "there; the names of the peers and of the meeting are the same everywhere.")  # fmt: skip
        return True

    def _begin(self) -> None:
        """Train, or go on where an earlier process of this peer was."""
        run = self.run
        agreed = sorted(name for name, other in self.others.items() if other.agreed)
        names = agreed if run.began is None else run.began
        learner = run.learner({name: run.used[name] for name in names})
        if not learner.aligned:
            raise TacitError("none of the peers that came has a name in common with this graph. Are the names written "
                             "the same way everywhere? If not, give a file of links.")  # fmt: skip
        if run.began is None:
            run.began = names
            run.save_aligned()
        if self.journal.begun:
            self._do(learner.ready, lambda found: self._go(learner))
        else:
            self._go(learner)

    def _go(self, learner: Learner) -> None:
        run = self.run
        assert run.began is not None
        for name, aligned in run.used.items():
            if name not in run.began and len(aligned):
                learner.join(self.others[name].number, aligned)
        self.peer = Peer(learner)
        said = self.journal.start(self.peer, self.now)
        run.pay(learner)
        run.state(learner)
        self._after(said)
        early, self._early = self._early, []
        for message in early:
            self._after(self.peer.receive(message, self.now))

    def _look_after(self) -> None:
        """What is due: a training that has ended, a timer."""
        doing = self._doing
        if doing is not None and not doing.is_alive():
            self._doing = None
            doing.end()
        if self.peer is not None and self.peer.alarm <= self.now:
            self._after(self.peer.wake(self.now))

    def _do(self, work: Callable[[], Any], then: Callable[[Any], None]) -> None:
        self._doing = Doing(work, then)
        self._doing.start()

    def _after(self, said: Sequence[Message]) -> None:
        """Write down what was used up; then send what the peer says, and begin what it wants, while there is time."""
        peer = self.peer
        assert peer is not None
        self.journal.note(peer)
        for note in peer.history[self._told :]:
            self._tell(note["what"], **{key: value for key, value in note.items() if key not in ("what", "time")})
        self._told = len(peer.history)
        for message in said:
            self._send(message)
        if (job := peer.take_job()) is not None and self.now < self._until:
            self._tell("trains", why=job.what)
            self._do(lambda: _done(job, peer.learner), lambda trained: self._after(peer.finish(trained, self.now)))

    def _over(self) -> bool:
        """Whether nobody has anything left, for a while."""
        peer, now = self.peer, self.now
        quiet = peer is not None and self._doing is None and peer.alarm == math.inf
        if quiet and all(self._needs_nothing(other, now) for other in self.others.values()):
            self._calm = now if self._calm is None else self._calm
            return now - self._calm >= CALM
        self._calm = None
        return False

    def _needs_nothing(self, other: Other, now: float) -> bool:
        if other.odd or other.left or now - max(other.heard, other.since, self._started) > self.within:
            return True
        on_its_way = (other.their_sent, other.their_got) != (other.got, other.sent)
        return other.met and other.rests and not (on_its_way and now - other.since <= self.within)

    # -- letters -------------------------------------------------------------------------------------------------------

    def _beat(self) -> None:
        self.between()
        for other in self.others.values():
            self._greet(other)

    def _greet(self, other: Other) -> None:
        peer = self.peer
        plan, scorer = self.plan, self.plan.settings.scorer
        books = {} if peer is None else {str(number): rows for (who, number), rows in peer.answered.items()
                                         if who == other.number}  # fmt: skip
        self._write("here", other, {
            "box": self.box.public.hex(), "yours": other.public.hex(), "version": VERSION, "terms": plan.terms(),
            "links": _digest(self.links[other.name]), "bounds": list(bounds_of(self.run.graph)),
            "vectors": vector_widths(scorer, plan.settings.dim)[1] is not None,
            "aligned": self._common(other),
            "rests": peer is not None and peer.resting, "sent": other.sent, "got": other.got, "answered": books,
        })  # fmt: skip

    def _write(self, kind: str, other: Other, says: Mapping[str, Any], messages: Sequence[bytes] = ()) -> None:
        other.letters += 1
        letter = Letter(kind, self.run.name, other.name, self.plan.meeting, self.life, other.letters, says, messages)
        try:
            self.post.send(other.name, letter.seal(self.identity))
        except Away as error:  # whoever waits for it gives up after a while
            LOG.warning("%s", error)

    def _send(self, message: Message) -> None:
        """One message, sealed. Whoever was not met, or means other rows, would not know what to do with it."""
        other = self._by_number[message.receiver]
        if not other.met or not (other.agreed or message.kind in TALK):
            return
        self._record(message)
        other.sent += 1
        other.since = self.now
        sealed = self.box.seal(other.name, other.public, other.letters + 1, message.encode())
        self._write("tell", other, {}, [sealed])

    def _take(self, who: str, data: bytes) -> None:
        """A letter, if it is one: nothing that another peer sends can stop this one."""
        try:
            letter, other = Letter.open(data, self.roster, self.run.name), self.others.get(who)
            if other is None or letter.sender != who or letter.run != self.plan.meeting:
                raise Refused("of somebody else than it came from, or of another meeting")
            if (letter.life, letter.number) <= other.last:
                raise Refused("a letter that came before, or too late")
            other.last = (letter.life, letter.number)
            if letter.kind == "here":
                self._greeted(other, letter.says)
            elif letter.kind == "tell":
                self._told_by(other, letter)
            elif letter.kind == "bye" and other.met:
                other.left = True
                if self.peer is not None:
                    self.peer.left(other.number, self.now)
                    self._after(self.peer.wake(self.now))
        except Refused as error:
            self.refused += 1
            LOG.info("a letter was refused: %s", error)

    def _greeted(self, other: Other, says: Mapping[str, Any]) -> None:
        """A sign of life: of a process that is new, or of one that was met."""
        public = _checked(says)
        self.box.check(public)
        new, other.heard = public != other.public, self.now
        if new:
            other.public, other.met, other.talk, other.attempts = public, False, None, 0
            other.agreed = other.other_names = False
            other.sent = other.got = other.their_sent = other.their_got = 0
            other.left = other.rests = False
        fresh = says["yours"] == self.box.public.hex()
        if new or not fresh:
            self._greet(other)
        if not fresh:
            return
        if odd := self._difference(other, says):
            if odd != other.odd:
                LOG.warning("%s is left out: it %s", other.name, odd)
                self._tell("left out", other=other.name, why=odd)
            other.odd = odd
            return
        other.odd, other.vectors, other.rests = "", says["vectors"], says["rests"]
        other.bounds, other.has = (says["bounds"][0], says["bounds"][1]), says["aligned"]
        other.their_sent, other.their_got = says["sent"], says["got"]
        first = not other.met
        other.met = True
        if first:
            other.since = self.now
            self._tell("met", other=other.name)
        self._align(other)
        before, other.agreed = other.agreed, other.has is not None and other.has == self._common(other)
        news = other.agreed and not before
        if news:
            self._greet(other)  # so that it knows, too, before it hears of rows
        if self.peer is not None:
            self._books(other, says["answered"])
            self._after(self.peer.met(other.number, self.now) if news else ())

    def _books(self, other: Other, answered: Mapping[str, int]) -> None:
        """How many rows the other says that it answered: of so many handshakes, of rows that these may have."""
        assert self.peer is not None
        told, most = self.peer.told, self.plan.pairing.ppat.passes * len(self.run.used.get(other.name, ()))
        room, news = MOST - sum(who == other.number for who, _ in told), 0
        for text, rows in answered.items():
            place = (other.number, int(text))
            if news < NEWS and told[place] < rows <= most and (place in told or room > 0):
                room -= place not in told
                news += 1
                told[place] = rows

    def _difference(self, other: Other, says: Mapping[str, Any]) -> str:
        """What the other means that is not meant here, in words; empty: nothing."""
        if other.other_names:
            return "has other names than it had before"
        if says["version"] != VERSION:
            return f"speaks version {says['version']}, and this side version {VERSION}"
        for name, here in self.plan.terms().items():
            if (there := says["terms"].get(name)) != here:
                return f"means another meeting: {name} is {excerpt(str(there))} there, and {excerpt(str(here))} here"
        if says["links"] != _digest(self.links[other.name]):
            return "has other links than there are here"
        if self.plan.alignment == "private" and max(says["bounds"]) > NAMES:
            return f"has more names than the {NAMES:,} that an intersection is of: give a file of links"
        return ""

    def _told_by(self, other: Other, letter: Letter) -> None:
        if not other.met or other.odd:
            raise Refused("of a process that was not met, or means something else")
        if len(letter.messages) != 1:
            raise Refused("a letter of a peer holds one message")
        message = Message.decode(self.box.open(other.name, other.public, letter.number, letter.messages[0]))
        if (message.sender, message.receiver) != (other.number, self.number):
            raise Refused("a message of somebody else, or for somebody else")
        other.heard = other.since = self.now
        other.got += 1
        self._record(message)
        if message.kind in TALK:
            self._talked(other, message)
        elif not other.agreed:
            raise Refused("of somebody who means other rows, or has not said yet which")
        elif self.peer is not None:
            self._after(self.peer.receive(message, self.now))
        elif message.kind in ("offer", "invite") and message.size < SMALL and len(self._early) < EARLY:
            self._early.append(message)

    # -- what two have in common ---------------------------------------------------------------------------------------

    def _links_with(self, other: Other, links: Sequence[Row]) -> list[tuple[str, str, Kind]]:
        """The links between this peer and another: names of the lower number first."""
        low, high = sorted((self.number, other.number))
        ends = self.plan.peers[low], self.plan.peers[high]
        found = {(name, its, kind) for one, name, two, its, kind in links if (one, two) == ends}
        found |= {(its, name, kind) for one, name, two, its, kind in links if (two, one) == ends}
        return sorted(found)

    def _align(self, other: Other) -> None:
        """Find out what both have, if one of them does not know it, or the two do not mean the same."""
        run, first = self.run, self.number < other.number
        if other.name not in run.aligned and self.plan.alignment == "links":
            self._aligned(other, self._by_links(other))
        known = run.aligned.get(other.name)
        if known is not None and other.name not in run.used:
            self._aligned(other, known)
        if self.plan.alignment == "links" or (known is not None and other.has == self._common(other)):
            return
        late = self.now - other.since > self.within
        if known is not None and other.has is not None and late:
            other.other_names = True
        elif first and other.talks < ATTEMPTS and (late or (other.talk is None and not (known and other.attempts))):
            other.since = self.now
            self._open_talk(other, other.attempts + 1)

    def _by_links(self, other: Other) -> Aligned:
        return by_rows(self.links[other.name], self.run.graph, first=self.number < other.number, where="--links")

    def _common(self, other: Other) -> list[Any] | None:
        """What is said of what both have: how much, and a tag by which the other sees whether it means the same."""
        aligned, graph = self.run.aligned.get(other.name), self.run.graph
        if aligned is None or not other.public:
            return None
        if (digest := self._digests.get(other.name)) is None:
            names = [graph.entities[n] for n in aligned.entity] + [graph.relations[n] for n in aligned.relation]
            same = _digest(self.links[other.name]) if self.plan.alignment == "links" else "\n".join(map(repr, names))
            digest = self._digests[other.name] = hashlib.sha256(same.encode(errors="surrogatepass")).digest()
        return [len(aligned.entity), len(aligned.relation), self.box.tag(other.public, digest)]

    def _open_talk(self, other: Other, attempt: int) -> None:
        first = self.number < other.number
        ends = (min(self.number, other.number), max(self.number, other.number))
        here, there = bounds_of(self.run.graph), other.bounds
        pairs = list(zip(here, there, strict=True) if first else zip(there, here, strict=True))
        other.attempts, other.talks = attempt, other.talks + 1
        domain = f"tacit.peers {self.plan.meeting} {ends[0]} {ends[1]} ".encode()
        self._go_on(other, by_talk(self.run.graph, ends, pairs, domain, first=first, attempt=attempt), None)

    def _talked(self, other: Other, message: Message) -> None:
        """A message of an intersection. One that begins anew is begun anew."""
        opens = message.kind == "blinded" and message.says["part"] == "entity"
        if opens and self.number > other.number:
            if not other.attempts < message.round <= ATTEMPTS or other.talks >= ATTEMPTS:
                raise Refused("one more intersection than there may be")
            self._open_talk(other, message.round)
        if other.talk is None:
            raise Refused("of an intersection that is not going on")
        talk, inbox = other.talk
        inbox.take(message)
        self._go_on(other, talk, inbox)

    def _go_on(self, other: Other, talk: Talk[Aligned], came: Inbox | None) -> None:
        said, expects, found = going(talk, came)
        other.talk = None if expects is None else (talk, expects)
        for message in said:
            self._send(message)
        if expects is None:
            self._aligned(other, found)

    def _aligned(self, other: Other, found: Aligned) -> None:
        """What both have is known, and kept; what a meeting began with stays as it was."""
        run = self.run
        before = run.aligned.get(other.name)
        if before is not None and other.name in run.used:
            if (before.entity.tolist(), before.relation.tolist()) != (found.entity.tolist(), found.relation.tolist()):
                other.other_names = True
            return
        run.aligned[other.name] = found
        run.use(other.name, other.vectors)
        self._tell("aligned", other=other.name, entities=len(found.entity), relations=len(found.relation))
        used = run.used[other.name]
        if self.peer is not None and len(used):
            self.peer.learner.join(other.number, used)
        self._greet(other)

    # -- what is written down ------------------------------------------------------------------------------------------

    def _open_transcript(self) -> None:
        where, folder = self.run.private / "transcript.jsonl", self.run.private / "messages"
        folder.mkdir(mode=0o700, exist_ok=True)
        self._lines = Lines(where)
        self.transcript.load(where, folder)

    def _record(self, message: Message) -> None:
        record = self.transcript.record(message)
        self.transcript.write_contents(self.run.private / "messages", record.number)
        self.transcript.payloads.clear()
        self.transcript.kept = 0
        self._lines.add(record.json(), sync=False)

    def _tell(self, what: str, **more: Any) -> None:
        self.on_event({"event": what} | more)


def _done(job: Job, learner: Learner) -> Trained:
    """A training; after the first one, what a first handshake would take long for."""
    trained = job.run()
    if job.what == "first":
        learner.ready()
    return trained


def _digest(links: Sequence[tuple[str, str, Kind]]) -> str:
    return hashlib.sha256("\n".join("\t".join(row) for row in links).encode()).hexdigest() if links else ""


def _checked(says: Mapping[str, Any]) -> bytes:
    """The key of a process, of what it says of itself; all else is as it should be."""
    kinds: dict[str, Any] = {"box": str, "yours": str, "version": int, "terms": dict, "links": str, "bounds": list,
             "vectors": bool, "aligned": (list, type(None)), "rests": bool, "sent": int, "got": int,
             "answered": dict}  # fmt: skip
    if says.keys() != kinds.keys() or any(not isinstance(says[name], kind) for name, kind in kinds.items()):
        raise Refused("a sign of life that does not say what it should")
    *common, tag = says["aligned"] or [0, 0, ""]
    for numbers in (says["bounds"], common):
        if len(numbers) != 2 or any(type(number) is not int or not 0 <= number < 1 << 40 for number in numbers):
            raise Refused("a sign of life with numbers that are none")
    if not isinstance(tag, str):
        raise Refused("a tag that is none")
    if len(says["answered"]) > MOST:
        raise Refused("books of more handshakes than there can be")
    for name, rows in says["answered"].items():
        if not name.isdecimal() or len(name) > 12 or type(rows) is not int or rows < 0:
            raise Refused("books that are none")
    try:
        public = bytes.fromhex(says["box"])
    except ValueError:
        public = b""
    if len(public) != 32:
        raise Refused("a key that is none")
    return public
