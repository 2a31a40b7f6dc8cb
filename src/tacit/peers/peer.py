"""A peer of FKGE: events in, messages out.

A peer trains alone, then learns from others in pairs, without a server. It is driven from outside, in one process by a
virtual clock (`tacit.peers.meeting`) or by a network: `receive` a message, `wake` at `alarm`, and `finish` the job that
it asks to have done. Each of them gives the messages to send. It never waits, so that nobody waits for it.

    Ready    it may host or serve. With an empty queue and nothing new it trains on by itself
    Busy     it trains, or hosts a handshake; others are told so, and come back later
    Sleep    it has nothing to do; a timer or a request wakes it

Who has become better offers its rows to everybody it has something in common with. Who gets an offer puts it into its
queue, and as a host invites the one that offered, which as a client translates its rows into the host's space
(`tacit.peers.ppat`). In the end both put the refined rows in place of their aligned ones, train, and keep the result if
validation is better than ever before; else they go back to what they had. A client answers from the rows it had when
the handshake began, and so may serve several hosts at once, and host or train meanwhile.
"""

from __future__ import annotations

import logging
import math
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from tacit.errors import Refused, TacitError
from tacit.federation.messages import Inbox, Message
from tacit.models import Tables
from tacit.models.tables import LARGEST_VALUE
from tacit.peers.learner import Learner, Trained, Use, Virtual
from tacit.peers.ppat import Generator, Judge, batches, nearness, procrustes

LOG = logging.getLogger(__name__)
Tensor = Any
State = Literal["ready", "busy", "sleep"]
WIDEST, MOST_NUMBERS = 1 << 12, 1 << 27
"""Numbers of a row that a client translates into, at most: the matrix is as wide. And of all rows together."""
MOST = 4096
"""Handshakes with one host, as many as are kept account of."""
ROUNDED = 1e-3
"""How far from orthogonal a map may be that comes from outside."""
BOOKS = ("answered", "taught", "told")
What = Literal["first", "host", "client", "self"]


@dataclass(frozen=True)
class Job:
    """Something that takes long: `run` it, and give what it returns to `Peer.finish`. steps: how long, in steps."""

    what: What
    steps: int
    run: Callable[[], Trained]


@dataclass(frozen=True)
class Asking:
    """An invitation that is not answered yet. tries: how often this client was busy."""

    client: int
    handshake: int
    seed: int
    tries: int
    deadline: float


@dataclass
class Hosting:
    """A host's side of a handshake. `real`: its aligned rows, where it may compare with them."""

    client: int
    handshake: int
    order: list[Any]
    judge: Judge | None
    real: Tensor | None
    deadline: float
    at: int = 0
    seen: list[Tensor] = field(default_factory=list)
    best: float = -math.inf
    last: tuple[Tensor, Message] | None = None
    """The batch that was answered last, and the answer: the same batch once more has the same answer."""


@dataclass
class Serving:
    """A client's side of a handshake."""

    handshake: int
    order: list[Any]
    generator: Generator
    deadline: float
    at: int = 0


class Peer:
    """One peer: what it says, and when.

    Attributes
    ----------
    learner
        Its tables and its graph.
    fruitless
        Trainings by itself since it last improved.
    refused
        How many messages it did not take.
    answered, taught, told
        Its books: rows that it said where to move as a host, by client and handshake; rows that it was told so of as a
        client, by host and handshake; and how many the host says that it answered, where the two may differ because
        one of them was killed.
    history
        What it did, and what came of it: for its owner alone.
    """

    def __init__(self, learner: Learner):
        self.learner, self.pairing, self.number = learner, learner.pairing, learner.number
        self.fruitless = self.refused = 0
        self.history: list[dict[str, Any]] = []
        self.answered: Counter[tuple[int, int]] = Counter()
        self.taught: Counter[tuple[int, int]] = Counter()
        self.told: Counter[tuple[int, int]] = Counter()
        self._job: Job | None = None
        self._doing: What | None = None
        self._improved = self._asleep = False
        self._asking: Asking | None = None
        self._hosting: Hosting | None = None
        self._serving: dict[int, Serving] = {}
        self._queue: deque[tuple[int, int]] = deque()  # client, tries
        self._later: list[tuple[float, int, int]] = []  # when to ask again, client, tries
        self._updates: list[tuple[int, Generator]] = []  # by which host, and what was learned there
        self._handshakes = 0
        self._idle_from = 0.0

    # -- driven from outside -------------------------------------------------------------------------------------------

    @property
    def state(self) -> State:
        """Busy: it trains, or hosts."""
        if self._doing is not None or self._hosting is not None:
            return "busy"
        return "sleep" if self._asleep else "ready"

    @property
    def alarm(self) -> float:
        """When it wants to be woken; infinite: never."""
        due = [serving.deadline for serving in self._serving.values()]
        due += [each.deadline for each in (self._asking, self._hosting) if each is not None]
        if self.state != "busy" and self._asking is None:
            due += [at for at, _, _ in self._later] or [self._idle_from]
        return min(due, default=math.inf)

    @property
    def resting(self) -> bool:
        """Whether it wants nothing of others, as it may tell them.

        A peer whose rows may not leave rests while it trains by itself: that is of no use to anybody else.
        """
        if self._hosting or self._asking or self._serving or self._queue or self._later or self._updates:
            return False
        if not self.learner.leaves:
            return self._doing in (None, "self")
        return self._doing is None and self._asleep and self._idle_from == math.inf

    def begin(self) -> list[Message]:
        """Train alone first."""
        self._start("first", self.learner.fit.cohort.tables)
        return []

    def counts(self) -> dict[str, int]:
        """What has to outlive its process: all that was used up, and its books."""
        found = self.learner.counts() | {"handshakes": self._handshakes, "fruitless": self.fruitless}
        for name in BOOKS:
            found |= {f"{name}.{one}.{number}": rows for (one, number), rows in getattr(self, name).items()}
        return found

    def resume(self, counts: Mapping[str, int], now: float) -> list[Message]:
        """Go on after its process was killed: whatever was going on is given up, and what it cost stays paid.

        The learner has been put back already. Others may have missed its offers, so that it makes one again.
        """
        self._handshakes, self.fruitless = counts["handshakes"], counts["fruitless"]
        for name, rows in counts.items():
            book, *place = name.split(".")
            if book in BOOKS:
                getattr(self, book)[int(place[0]), int(place[1])] = rows
        self._note(now, "resumed")
        if self.learner.best is None:
            return self.begin()
        self._improved, self._idle_from = self.learner.leaves, now + self.pairing.linger
        return self._next(now)

    def met(self, other: int, now: float) -> list[Message]:
        """Someone came, or came back: what was begun with it is given up, and it hears that rows are there."""
        self.left(other, now)
        said = self._next(now)
        if self.learner.best is not None and self.learner.leaves:
            said.append(self._message("offer", other))
        return said

    def left(self, other: int, now: float) -> None:
        """Someone went away: what was begun with it is given up. Votes that it had stay counted."""
        self._queue = deque(entry for entry in self._queue if entry[0] != other)
        self._later = [entry for entry in self._later if entry[1] != other]
        begun = self._serving.pop(other, None) is not None
        if self._asking is not None and self._asking.client == other:
            self._asking, begun = None, True
        if self._hosting is not None and self._hosting.client == other:
            self._hosting, begun = None, True
        if begun:
            self._note(now, "given up", other=other)

    def take_job(self) -> Job | None:
        """What is to be done, if there is something new."""
        job, self._job = self._job, None
        return job

    def wake(self, now: float) -> list[Message]:
        """Look at what is due."""
        for host in [host for host, serving in self._serving.items() if serving.deadline <= now]:
            del self._serving[host]
        if self._asking is not None and self._asking.deadline <= now:
            self._note(now, "no answer", other=self._asking.client)
            self._asking = None
        if self._hosting is not None and self._hosting.deadline <= now:
            self._note(now, "left alone", other=self._hosting.client)
            self._hosting = None
        return self._next(now)

    def finish(self, trained: Trained, now: float) -> list[Message]:
        """What became of a job: it is kept if it is better than ever before."""
        what, self._doing = self._doing, None
        better, leaves = self.learner.improves(trained), self.learner.leaves
        if what == "first" and trained.score is None:
            if leaves:
                raise TacitError(f"the first training of peer {self.number} diverged: lower its learning rate")
            self.learner.best = trained.tables  # others would see that it ends: it votes, with rows worth nothing
        # Whether a host improved whose rows may not leave is nobody's business: what it does next does not follow it,
        # for others see how many trainings it had left to invite them.
        if better if leaves else what != "self":
            self._improved, self.fruitless = leaves, 0
        elif what == "self":
            self.fruitless += 1
            if self.fruitless < self.pairing.patience:
                self._asleep, self._idle_from = True, now + self.pairing.rest
        if what == "first":
            self._idle_from = now + self.pairing.linger
        self._note(now, what or "", score=trained.score, kept=better)
        return self._next(now)

    def receive(self, message: Message, now: float) -> list[Message]:
        """Take a message, or leave it: nothing that another peer sends can stop this one."""
        handlers: dict[str, Callable[[Message, float], list[Message]]] = {
            "offer": self._offered,
            "invite": self._invited,
            "answer": self._answered,
            "generated": self._judged,
            "gradient": self._taught,
            "translated": self._given,
            "ended": self._thanked,
        }
        try:
            if message.receiver != self.number or message.sender not in self.learner.aligned:
                raise Refused("of someone with whom there is nothing in common, or for someone else")
            if message.kind not in handlers:
                raise Refused(f"of kind {message.kind}, which peers do not send")
            return handlers[message.kind](message, now)
        except Refused as error:
            self.refused += 1
            LOG.debug("peer %d refused a message: %s", self.number, error)
            return []

    # -- what to do next -----------------------------------------------------------------------------------------------

    def _next(self, now: float) -> list[Message]:
        """Whoever is not busy: train with what it was given, tell others, ask the next one, train on, or sleep."""
        if self.state == "busy" or self._asking is not None or self.learner.best is None:
            return []
        due = sorted(entry for entry in self._later if entry[0] <= now)
        self._later = [entry for entry in self._later if entry[0] > now]
        for _, client, tries in due:
            self._enqueue(client, tries)
        self._queue = deque(entry for entry in self._queue if self.learner.can_host(entry[0]))
        if not self.learner.can_train:
            self._updates.clear()
            self._later.clear()
        if self._updates:
            self._start_client()
            return []
        said: list[Message] = []
        if self._improved and not self._queue:
            self._improved = self._asleep = False
            said += [self._message("offer", other) for other in sorted(self.learner.aligned)]
            self._idle_from = now + self.pairing.linger
        if self._queue:
            self._asleep = False
            return said + self._ask(*self._queue.popleft(), now)
        if self._idle_from <= now and not self._later:
            if self.pairing.idle == "train" and self.fruitless < self.pairing.patience and self.learner.can_train:
                self._start("self", self.learner.kept)
            else:
                self._asleep, self._idle_from = True, math.inf
        return said

    def _enqueue(self, client: int, tries: int = 0) -> None:
        waiting = {other for other, _ in self._queue} | {other for _, other, _ in self._later}
        if client not in waiting and not (self._asking is not None and self._asking.client == client):
            self._queue.append((client, tries))

    def _start(self, what: What, tables: Tables, virtual: Virtual | None = None) -> None:
        """Ask to have these tables trained."""
        learner, copy = self.learner, tables.like(torch.clone)
        self._asleep, self._doing = False, what
        steps = learner.begun(first=what == "first", triples=0 if virtual is None else len(virtual.links))
        epochs = learner.settings.training.epochs if what == "first" else self.pairing.retrain
        self._job = Job(what, steps, lambda: learner.train(copy, epochs, virtual))

    def _start_client(self) -> None:
        """Put refined rows in place of the own ones, of all handshakes that ended, and train."""
        learner, tables = self.learner, self.learner.kept
        for host, generator in self._updates:  # where two refined one row, the later one counts
            refined = generator.refined(learner.vectors(host))
            if bool(refined.isfinite().all()):
                tables = learner.placed(host, refined, tables)
        self._updates.clear()
        self._start("client", tables)

    # -- as a host -----------------------------------------------------------------------------------------------------

    def _offered(self, message: Message, now: float) -> list[Message]:
        self._enqueue(message.sender)
        return self._next(now)

    def _ask(self, client: int, tries: int, now: float) -> list[Message]:
        """Invite a client."""
        self._handshakes += 1
        learner, ppat, seed = self.learner, self.pairing.ppat, self.learner.seed(Use.ORDER)
        self._asking = Asking(client, self._handshakes, seed, tries, now + self.pairing.within)
        scale = torch.tensor([learner.scale(client)], dtype=torch.float64)
        return [self._message("invite", client, {"scale": scale}, handshake=self._handshakes,
                              count=len(learner.aligned[client]), width=learner.widths[0], epochs=ppat.passes,
                              batch=ppat.batch, seed=seed)]  # fmt: skip

    def _answered(self, message: Message, now: float) -> list[Message]:
        asking, answer = self._asking, message.says["answer"]
        if asking is None or (asking.client, asking.handshake) != (message.sender, message.says["handshake"]):
            raise Refused("an answer to nothing that was asked")
        self._asking = None
        if answer == "busy" and asking.tries < self.pairing.tries:
            wait = self.pairing.retry * (1 + float(self.learner.stream(Use.RETRY).uniform(1)[0]))
            self._later.append((now + wait, asking.client, asking.tries + 1))
        if answer != "yes":
            return self._next(now)
        learner, ppat = self.learner, self.pairing.ppat
        order = batches(len(learner.aligned[asking.client]), ppat.passes, ppat.batch, asking.seed, learner.fit.device)
        self._hosting = Hosting(
            asking.client, asking.handshake, order,
            judge=learner.judge(asking.client) if order else None,
            real=learner.vectors(asking.client) if learner.leaves else None,
            deadline=now + self.pairing.within,
        )  # fmt: skip
        self._note(now, "hosts", other=asking.client)
        return []

    def _judged(self, message: Message, now: float) -> list[Message]:
        """A batch of generated rows: say where they should move."""
        hosting = self._hosted(message)
        if hosting.last is not None and message.round == hosting.at - 1:
            before, answer = hosting.last
            if not torch.equal(self._values(message, len(before), message.round), before):
                raise Refused("another batch in the place of one that was answered")
            return [answer]
        if hosting.at >= len(hosting.order):
            raise Refused("a batch, where none is expected any more")
        values = self._values(message, len(hosting.order[hosting.at]), hosting.at)
        assert hosting.judge is not None
        gradient = hosting.judge.answer(values)
        hosting.at += 1
        hosting.seen.append(values)
        hosting.deadline = now + self.pairing.within
        ends = hosting.at % (len(hosting.order) // self.pairing.ppat.passes) == 0
        arrays = {"values": gradient.float().contiguous()}
        answer = self._message("gradient", hosting.client, arrays, round=message.round, handshake=hosting.handshake,
                               keep=int(ends and self._nearer(hosting)))  # fmt: skip
        hosting.last = (values, answer)
        self.answered[hosting.client, hosting.handshake] += len(values)
        return [answer]

    def _nearer(self, hosting: Hosting) -> bool:
        """Whether this epoch's rows are nearer to the host's than any before; who may not look keeps the last."""
        seen, hosting.seen = hosting.seen, []
        if hosting.real is None:
            return True
        which = torch.cat(hosting.order[hosting.at - len(seen) : hosting.at])
        near = nearness(torch.cat(seen), hosting.real[which])
        better, hosting.best = near > hosting.best, max(near, hosting.best)
        return better

    def _given(self, message: Message, now: float) -> list[Message]:
        """All rows of a client, translated: put them in place of the own ones, and train."""
        hosting, learner = self._hosted(message), self.learner
        if hosting.at < len(hosting.order):
            raise Refused("all rows, before all batches were seen")
        client, arrays = hosting.client, {}
        values = self._values(message, len(learner.aligned[client]), len(hosting.order))
        virtual = self._virtual(message)
        if self.pairing.ppat.translator == "procrustes":
            assert hosting.real is not None
            turn = arrays["map"] = procrustes(values, hosting.real).to(values.device)
            values = values @ turn.T
            if virtual is not None:
                virtual = Virtual(client, virtual.entity @ turn.T, virtual.relation @ turn.T, virtual.links)
        if self.pairing.update == "mean":
            values = (values + learner.vectors(client)) / 2
        self._hosting = None
        self._start("host", learner.placed(client, values, learner.kept), virtual)
        return [self._message("ended", client, arrays, handshake=hosting.handshake)]

    def _hosted(self, message: Message) -> Hosting:
        hosting = self._hosting
        if hosting is None or (hosting.client, hosting.handshake) != (message.sender, message.says["handshake"]):
            raise Refused("of a handshake that there is not")
        return hosting

    def _values(self, message: Message, rows: int, number: int) -> Tensor:
        """The rows of a message, looked at."""
        width = self.learner.widths[0]
        inbox = Inbox(message.kind, None, number, 0, self.number, {message.sender: rows}, width)
        values = inbox.take(message).arrays["values"].to(self.learner.device)
        if bool((values.abs() > LARGEST_VALUE).any()):
            raise Refused("rows with numbers that are too large")
        return values

    def _virtual(self, message: Message) -> Virtual | None:
        """Neighbours that came with the rows, looked at; None: none are wanted, or none came."""
        if self.pairing.virtual == "none" or not {"entity", "relation", "links"} <= message.arrays.keys():
            return None
        learner, most = self.learner, self.pairing.virtual_most
        entity, relation, links = (message.arrays[name].to(learner.device) for name in ("entity", "relation", "links"))
        for rows in (entity, relation):
            if rows.shape[1] != learner.widths[0] or not bool((rows.abs() <= LARGEST_VALUE).all()):
                raise Refused("neighbours whose rows are not as wide as these, or too large, or not finite")
        if links.shape[1] != 3 or max(len(links), len(entity), len(relation)) > most:
            raise Refused(f"links that are none, or more than {most:,}")
        aligned = learner.aligned[message.sender]
        entities, relations = len(aligned.entity) + len(entity), len(aligned.relation) + len(relation)
        limit = torch.tensor([entities, relations, entities], device=links.device)
        if not bool(((links >= 0) & (links < limit)).all()):
            raise Refused("links to entities or relations that there are not")
        if learner.widths[1] is None:  # relations are no vectors here
            relation, links = relation[:0], links[links[:, 1] < len(aligned.relation)]
        return Virtual(message.sender, entity, relation, links)

    # -- as a client ---------------------------------------------------------------------------------------------------

    def _invited(self, message: Message, now: float) -> list[Message]:
        says, host, scale, learner = message.says, message.sender, message.arrays["scale"], self.learner
        handshake = says["handshake"]
        if tuple(scale.shape) != (1,) or not 0 < float(scale[0]) <= LARGEST_VALUE:
            raise Refused("a scale is one number above 0, as long as a row may be")
        ppat = self.pairing.ppat
        agreed = {"count": len(learner.aligned[host]), "epochs": ppat.passes, "batch": ppat.batch}
        width = says["width"]
        fits = agreed.items() <= says.items() and 1 <= width <= WIDEST and width * says["count"] <= MOST_NUMBERS
        if not learner.leaves or not fits or sum(who == host for who, _ in self.taught) >= MOST:
            return [self._message("answer", host, handshake=handshake, answer="no")]
        if self.state == "busy" or learner.best is None:
            return [self._message("answer", host, handshake=handshake, answer="busy")]
        if self._asleep:
            self._asleep, self._idle_from = False, now + self.pairing.linger
        rows = learner.vectors(host)
        generator = Generator(rows, width, float(scale[0]), self.pairing.ppat, learner.stream(Use.MAP))
        order = batches(len(rows), says["epochs"], says["batch"], says["seed"], rows.device)
        self._serving[host] = Serving(handshake, order, generator, now + self.pairing.within)
        self._note(now, "serves", other=host)
        return [self._message("answer", host, handshake=handshake, answer="yes"), self._sent(host)]

    def _sent(self, host: int) -> Message:
        """The next batch, or all rows after the last."""
        serving, learner = self._serving[host], self.learner
        generator = serving.generator
        if serving.at < len(serving.order):
            values = generator.made(serving.order[serving.at]).float()
            return self._message("generated", host, {"values": values}, round=serving.at, handshake=serving.handshake)
        arrays = {"values": generator.translate(generator.rows).float()}
        if self.pairing.virtual != "none":
            entity, relation, arrays["links"] = learner.neighbours(host)
            for part, table, ids in (
                ("entity", learner.kept.entity, entity),
                ("relation", learner.kept.relation, relation),
            ):
                rows = table[ids][:, : learner.widths[0]] if len(ids) else table.new_zeros(0, learner.widths[0])
                arrays[part] = generator.translate(rows).float()
        return self._message("translated", host, arrays, round=len(serving.order), handshake=serving.handshake)

    def _taught(self, message: Message, now: float) -> list[Message]:
        """Where a batch should move: learn, and send the next."""
        serving = self._served(message)
        if serving.at >= len(serving.order):
            raise Refused("a gradient, where none is expected any more")
        which, generator = serving.order[serving.at], serving.generator
        inbox = Inbox("gradient", None, serving.at, 0, self.number, {message.sender: len(which)}, len(generator.weight))
        generator.learn(which, inbox.take(message).arrays["values"].to(generator.weight.device))
        if message.says["keep"]:
            generator.keep()
        self.taught[message.sender, serving.handshake] += len(which)
        serving.at += 1
        serving.deadline = now + self.pairing.within
        return [self._sent(message.sender)]

    def _thanked(self, message: Message, now: float) -> list[Message]:
        """The end of a handshake: refine the own rows when there is time for it."""
        serving = self._served(message)
        if serving.at < len(serving.order):
            raise Refused("an end, before all batches were sent")
        generator = serving.generator
        if (turn := message.arrays.get("map")) is not None:
            width = len(generator.weight)
            if tuple(turn.shape) != (width, width):
                raise Refused("a map that does not fit the rows")
            away = (turn @ turn.T - torch.eye(width, device=turn.device)).abs()
            if not bool((away < ROUNDED).all()):  # nor if one is NaN
                raise Refused("a map that is no rotation")
            generator.follow(turn.to(generator.weight.device))
        del self._serving[message.sender]
        self._updates.append((message.sender, generator))
        return self._next(now)

    def _served(self, message: Message) -> Serving:
        serving = self._serving.get(message.sender)
        if serving is None or serving.handshake != message.says["handshake"]:
            raise Refused("of a handshake that there is not")
        return serving

    # -- words ---------------------------------------------------------------------------------------------------------

    def _message(
        self, kind: str, other: int, arrays: Mapping[str, Tensor] | None = None, *, round: int = 0, **says: Any
    ) -> Message:
        return Message(kind, round, 0, self.number, other, says, dict(arrays or {}))

    def _note(self, now: float, what: str, **more: Any) -> None:
        self.history.append({"time": now, "peer": self.number, "what": what} | more)
