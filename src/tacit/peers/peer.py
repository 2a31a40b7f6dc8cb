"""A peer of FKGE: events in, messages out.

A peer trains alone, then learns from others in pairs, without a server. It is driven from outside, in one process by a
virtual clock (`tacit.peers.meeting`) or by a network: `receive` a message, `wake` at `alarm`, and `finish` the `job`
that it asks to have done. Each of them gives the messages to send. It never waits, so that nobody waits for it.

    Ready    it may host or serve. With an empty queue and nothing new it trains on by itself
    Busy     it trains, or hosts a handshake; others are told so, and come back later
    Sleep    it has nothing to do; a timer or a request wakes it

Who has become better offers its rows to everybody it has something in common with. Who gets an offer puts it into its
queue, and as a host invites the one that offered, which as a client translates its rows into the host's space
(`tacit.peers.ppat`). In the end both put the refined rows in place of their aligned ones, train, and keep the result if
validation is better than ever before; else they go back to what they had.

In sound mode a client's rows come from private training, and so does everything that is made of them. A host's rows do
too, or they never leave it: then labels from noisy votes of teachers on disjoint triples are all that leaves, such a
host never offers its rows, and nobody learns whether it improved.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch

from tacit.draws import Purpose, Secret, Stream
from tacit.errors import BadValue, TacitError
from tacit.evaluation.classification import told_apart
from tacit.evaluation.ranking import Questions, rank
from tacit.federation.messages import Inbox, Message, Refused
from tacit.graph import Graph, Split, Vocab
from tacit.models import Scorer, Tables
from tacit.models.model import Model
from tacit.models.translational import Translation
from tacit.peers.alignment import Aligned, Parts
from tacit.peers.ppat import (
    PPAT,
    Direct,
    Generator,
    Judge,
    Voted,
    batches,
    divided,
    nearness,
    procrustes,
    scale_of,
)
from tacit.privacy.events import Gaussian, Segment, Spent, joined
from tacit.privacy.pate import GaussianVotes, LaplaceVotes
from tacit.privacy.privatizers import Sound
from tacit.privacy.schedule import exact_sum, reciprocal_ranks, unrestricted
from tacit.privacy.steps import content, count_units, public_numbers
from tacit.settings import Settings
from tacit.training import Diverged, Fit

LOG = logging.getLogger(__name__)
Tensor = Any
State = Literal["ready", "busy", "sleep"]


@dataclass(frozen=True)
class Pairing:
    """How peers learn from each other.

    Attributes
    ----------
    mode
        sound, or published: as FKGE is described, without any guarantee.
    ppat
        How rows are translated.
    retrain, trainings
        Epochs of each training after the first, and how many such trainings a peer has at most: with the first one,
        all that it will ever pay for.
    patience
        Trainings by itself without an improvement, after which a peer does so no more.
    idle
        train: a ready peer with nothing to do trains on by itself. sleep: it waits for others.
    update
        What becomes of a host's aligned rows: replace by the translated ones, or the mean of both.
    share, parts
        Of what is aligned: how much is used; entities, relations, or both.
    virtual
        Neighbours of aligned entities that a host trains with, and forgets afterwards. neighbours: those that the
        client's graph has, which tells of its triples (published mode alone). predicted: that its private model
        predicts. public: from a list of statements that the client names public.
    virtual_most
        Links of these in a handshake, at most.
    validation
        What decides whether rows are kept. own: validation triples as they are (published mode, or a host that tells
        nobody). public: those that are not marked confidential. paid: a noisy sum over all of them. none: the last is
        kept. Default: own when published, paid when sound.
    criterion
        mrr, or accuracy of telling true triples from corrupted ones; own validation alone.
    look_sigma
        The noise of a paid look over its sensitivity; default: what all looks may cost, by privacy.epsilon.
    votes_epsilon, votes_sigma
        For a host whose rows are not private: what all votes may cost, or the noise of each.
    delta
        Of votes, and of the published accounting.
    noise
        Of votes and looks. system: from the operating system. seeded: a simulation, which protects nothing.
    within, retry, tries, rest, linger
        Seconds: that an answer may take; until a busy client is asked again, so many times; of sleep; that a peer stays
        ready for others after it made an offer.
    """

    mode: Literal["sound", "published"] = "sound"
    ppat: PPAT = field(default_factory=PPAT)
    retrain: int = 100
    trainings: int = 8
    patience: int = 2
    idle: Literal["train", "sleep"] = "train"
    update: Literal["replace", "mean"] = "replace"
    share: float = 1.0
    parts: Parts = "both"
    virtual: Literal["none", "neighbours", "predicted", "public"] = "none"
    virtual_most: int = 256
    validation: Literal["own", "public", "paid", "none"] | None = None
    criterion: Literal["mrr", "accuracy"] = "mrr"
    look_sigma: float | None = None
    votes_epsilon: float | None = None
    votes_sigma: float | None = None
    delta: float = 1e-5
    noise: Literal["system", "seeded"] = "system"
    within: float = 60.0
    retry: float = 5.0
    tries: int = 8
    rest: float = 30.0
    linger: float = 2.0

    def __post_init__(self) -> None:
        for name, allowed in (("mode", ("sound", "published")), ("idle", ("train", "sleep")),
                              ("update", ("replace", "mean")), ("noise", ("system", "seeded")),
                              ("virtual", ("none", "neighbours", "predicted", "public")),
                              ("validation", (None, "own", "public", "paid", "none")),
                              ("criterion", ("mrr", "accuracy"))):  # fmt: skip
            if getattr(self, name) not in allowed:
                choice = ", ".join(str(each) for each in allowed if each is not None)
                raise BadValue(f"{name} is one of {choice}; not {getattr(self, name)!r}")
        for name in ("retrain", "virtual_most"):
            if getattr(self, name) < 1:
                raise BadValue(f"{name} is at least 1, not {getattr(self, name)}")
        for name in ("trainings", "patience", "tries", "retry", "rest", "linger"):
            if not getattr(self, name) >= 0:
                raise BadValue(f"{name} is at least 0, not {getattr(self, name)}")
        if not self.within > 0 or not 0 < self.delta < 1:
            raise BadValue("within is above 0, and delta above 0 and below 1")
        if self.mode == "sound" and self.virtual == "neighbours":
            raise BadValue(
                "which entities are neighbours is what the triples say: in sound mode virtual is predicted or public"
            )
        if self.mode == "sound" and self.validation == "own":
            raise BadValue(
                "an offer would tell of validation triples: in sound mode validation is public, paid or none"
            )


def vector_widths(scorer: Scorer, dim: int) -> tuple[int, int | None]:
    """How many of the first numbers of a row are a vector in the space of entities: of an entity's, of a relation's.

    None: the scorer's relations are no such vectors, and are not translated.
    """
    entity, relation = scorer.widths(dim)
    if isinstance(scorer, Translation):
        return dim, dim
    return entity, entity if relation == entity else None


@dataclass
class Job:
    """Something that takes long: `run` it, and give what it returns to `Peer.finish`. steps: how long, in steps."""

    what: Literal["first", "host", "client", "self"]
    steps: int
    run: Callable[[], Trained]


@dataclass(frozen=True)
class Trained:
    """Tables after a training, and how good they are; None: nothing came of it."""

    tables: Tables
    score: float | None


@dataclass(frozen=True)
class Virtual:
    """Neighbours that a host trains with: vectors of further entities and relations, and links.

    A link's entities are aligned ones by their number, then the further ones; so are its relations.
    """

    entity: Tensor
    relation: Tensor
    links: Tensor


@dataclass
class Serving:
    """A client's side of a handshake."""

    handshake: int
    generator: Generator
    order: list[Any]
    at: int
    deadline: float


@dataclass
class Hosting:
    """A host's side of a handshake."""

    client: int
    handshake: int
    order: list[Any]
    deadline: float
    judge: Judge | None = None
    real: Tensor | None = None
    """Its aligned rows, where it may compare with them."""
    at: int = 0
    seen: list[Tensor] = field(default_factory=list)
    best: float = -math.inf


class Peer:
    """One peer.

    Parameters
    ----------
    number
        Its number, in messages and draws.
    settings
        How it trains: its own scorer and dimension; epochs are those of the first training.
    aligned
        By other peer: this one's ids of what both have, in an order that both know.
    public
        (n, 3) triples of this peer, by its ids, that everybody may know: for virtual = "public".

    Attributes
    ----------
    best, score
        The tables that are kept, and how good they are.
    job
        What it wants to have done; whoever drives it takes it (`take_job`).
    history
        What it did, and what came of it. Of the owner's alone.
    """

    def __init__(
        self,
        number: int,
        graph: Graph,
        settings: Settings,
        aligned: Mapping[int, Aligned],
        pairing: Pairing,
        *,
        public: np.ndarray | None = None,
    ):
        self.number, self.graph, self.pairing, self.aligned = number, graph, pairing, dict(aligned)
        self.public = np.zeros((0, 3), np.int64) if public is None else np.asarray(public, np.int64).reshape(-1, 3)
        self.private_rows = isinstance(settings.privacy, Sound)
        self.settings = self._solved(settings)
        self.widths = vector_widths(settings.scorer, settings.dim)
        self.trained = 0
        self.looks = 0
        self.fruitless = 0
        self.refused = 0
        self.improved = False
        self.best: Tables | None = None
        self.score: float | None = None
        self.history: list[dict[str, Any]] = []
        self.job: Job | None = None
        self._what: str | None = None
        self._started = self._working = self._asleep = False
        self._asking: tuple[int, int, int, float] | None = None  # client, handshake, tries, deadline
        self._hosting: Hosting | None = None
        self._serving: dict[int, Serving] = {}
        self._queue: deque[tuple[int, int]] = deque()  # client, tries
        self._later: list[tuple[float, int, int]] = []  # due, client, tries
        self._updates: list[tuple[int, Generator]] = []
        self._handshakes = 0
        self._idle_from = 0.0
        seeded = pairing.noise == "seeded"
        self._secret = Secret.simulation(settings.seed) if seeded else Secret.fresh()
        self._shards: list[Tensor] | None = None
        self._questions: Questions | None = None
        self._fit: Fit | None = None
        self.validation = self._checked_validation()
        self.votes = self._votes()

    # -- what is allowed -----------------------------------------------------------------------------------------------

    @property
    def leaves(self) -> bool:
        """Whether its rows may leave it, translated: whether it may be a client, and make offers."""
        return self.private_rows or self.pairing.mode == "published"

    @property
    def simulated(self) -> bool:
        """Whether noise follows a seed."""
        return self.pairing.noise == "seeded" or getattr(self.settings.privacy, "noise", "system") == "seeded"

    @property
    def epochs(self) -> int:
        """All epochs that it may ever train."""
        return self.settings.training.epochs + self.pairing.trainings * self.pairing.retrain

    def _solved(self, settings: Settings) -> Settings:
        """Noise for all trainings that there may be; the size that rates follow stays, whatever a host adds to it."""
        if settings.training.reciprocal or settings.training.steps is not None:
            raise TacitError("peers train whole epochs, and relations without inverses: leave out training.steps and "
                             "training.reciprocal")  # fmt: skip
        if not settings.scorer.separable or settings.scorer.statistics:
            raise TacitError("peers put other rows in place of theirs: this scorer's rows do not stand by themselves")
        privacy = settings.privacy
        if not isinstance(privacy, Sound):
            return settings
        if not privacy.trains or privacy.shares() or privacy.adaptive:
            raise TacitError("peers are private by the noise of their steps alone: use dpsgd, adafest or confidential, "
                             "without prior_share, degree_share or noise that follows a signal")  # fmt: skip
        from tacit.privacy.plan import solved

        size = privacy.public_size(count_units(privacy, self.graph))
        fixed = replace(settings, privacy=replace(privacy, size=size))
        return solved(fixed, [self.graph], epochs=self.epochs)

    def _checked_validation(self) -> str:
        """What decides whether rows are kept."""
        pairing, graph = self.pairing, self.graph
        if not self.leaves:
            return "none" if pairing.validation == "none" else "own"
        wanted = pairing.validation or ("own" if pairing.mode == "published" else "paid")
        if wanted != "none" and not len(graph.valid):
            raise TacitError('there are no validation triples to keep the best by: set validation = "none"')
        if wanted == "public" and (graph.valid.confidential is None or graph.valid.confidential.all()):
            raise TacitError("some validation triples have to be marked, and others not, so that these are public "
                             "(tacit data mark): or set validation to paid or none")  # fmt: skip
        if wanted == "paid":
            if not self.private_rows:
                raise TacitError("a paid look is for peers that train privately: set validation = own")
            if self.settings.privacy.unit == "group":  # type: ignore[attr-defined]
                raise TacitError("a paid look is counted by triples, and groups are protected: set validation = none")
            if np.isin(graph.keys(graph.valid.triples), graph.keys(graph.train.triples)).any():
                raise TacitError("a triple is in training and in validation, and a paid look would cost it twice: "
                                 "leave it out of one of them, or set validation = none")  # fmt: skip
            self.look_sigma = self._look_noise()
        return wanted

    def _look_noise(self) -> float:
        """Of a paid look: all of them cost as much as the training of other triples does."""
        if self.pairing.look_sigma is not None:
            return self.pairing.look_sigma
        from tacit.privacy.accountant import Target, noise_for

        privacy = self.settings.privacy
        assert isinstance(privacy, Sound)
        if privacy.epsilon is None:
            raise TacitError("say what paid looks may cost (privacy.epsilon), or their noise (look_sigma)")
        looks = self.pairing.trainings + 1
        return noise_for(Target(privacy.epsilon, privacy.delta), lambda sigma: [Segment(Gaussian(sigma), looks)])

    def _votes(self) -> LaplaceVotes | GaussianVotes | None:
        """What makes labels as a host; None: nothing has to be voted on."""
        pairing = self.pairing
        stream = Stream(self.settings.seed, Purpose.NOISE_VOTE, self.number)
        if pairing.mode == "published":
            return LaplaceVotes(pairing.ppat.noise, stream)
        if self.private_rows:
            return None
        if pairing.ppat.translator != "ppat":
            raise TacitError("a map by known pairs looks at the host's rows: train these privately, or vote (ppat)")
        most = pairing.trainings * max((pairing.ppat.epochs * len(a) for a in self.aligned.values()), default=0)
        sigma = pairing.votes_sigma
        if sigma is None:
            if pairing.votes_epsilon is None:
                raise TacitError("this peer's rows are not private: set privacy.epsilon, or say what votes on them may "
                                 "cost (votes_epsilon), or their noise (votes_sigma)")  # fmt: skip
            from tacit.privacy.accountant import Target, noise_for

            target = Target(pairing.votes_epsilon, pairing.delta)
            sigma = noise_for(target, lambda s: [Segment(Gaussian(s), max(most, 1))])
        return GaussianVotes(sigma, most, self._secret, self.number)

    # -- what was released ---------------------------------------------------------------------------------------------

    def spent(self, *, reserved: bool = False) -> dict[str, Spent]:
        """What was released of training triples, and of validation triples; `reserved`: all that may be.

        The two are different triples, so that the larger cost is the cost.
        """
        train: list[Segment] = []
        privacy = self.settings.privacy
        if isinstance(privacy, Sound):
            _, rates, per_epoch = public_numbers(privacy, [self.graph], self.settings.training.batch)
            first, more = self.settings.training.epochs, self.pairing.retrain
            epochs = self.epochs if reserved else first * self._started + more * self.trained
            train += privacy.segments(rates[0], 0, epochs * per_epoch[0])
        if isinstance(self.votes, GaussianVotes):
            train += self.votes.reserved if reserved else self.votes.spent
        valid: list[Segment] = []
        if self.validation == "paid":
            looks = self.pairing.trainings + 1 if reserved else self.looks
            valid.append(Segment(Gaussian(self.look_sigma), looks))
        return {"train": joined(train), "valid": joined(valid)}

    # -- driven from outside -------------------------------------------------------------------------------------------

    @property
    def state(self) -> State:
        if self._working or self.job is not None or self._hosting is not None:
            return "busy"
        return "sleep" if self._asleep else "ready"

    @property
    def alarm(self) -> float:
        """When it wants to be woken; infinite: never."""
        due = [serving.deadline for serving in self._serving.values()]
        if self._asking is not None:
            due.append(self._asking[3])
        if self._hosting is not None:
            due.append(self._hosting.deadline)
        if self.state != "busy":
            due += [at for at, _, _ in self._later]
            if self._asking is None:
                due.append(self._idle_from)
        return min(due, default=math.inf)

    def begin(self, now: float) -> list[Message]:
        """Train alone first."""
        self._start("first", self._begun(), self.settings.training.epochs)
        return []

    def take_job(self) -> Job | None:
        """What is to be done, if there is something new."""
        job, self.job = self.job, None
        self._working = self._working or job is not None
        return job

    def wake(self, now: float) -> list[Message]:
        """Look at what is due."""
        for host in [host for host, serving in self._serving.items() if serving.deadline <= now]:
            del self._serving[host]
        if self._asking is not None and self._asking[3] <= now:
            self._note(now, "no answer", other=self._asking[0])
            self._asking = None
        if self._hosting is not None and self._hosting.deadline <= now:
            self._note(now, "left alone", other=self._hosting.client)
            self._hosting = None
        return self._next(now)

    def finish(self, trained: Trained, now: float) -> list[Message]:
        """What became of a job: keep it if it is better than ever before, else go back."""
        self._working = False
        what, self._what = self._what, None
        score, before = trained.score, self.score
        better = score is not None and (before is None or score > before + self._margin())
        if what == "first" and score is None:
            raise TacitError(f"the first training of peer {self.number} diverged: lower its learning rate")
        if better:
            self.best, self.score = trained.tables, score
            self.improved, self.fruitless = self.leaves, 0
        elif what == "self":
            self.fruitless += 1
            if self.fruitless < self.pairing.patience:
                self._asleep, self._idle_from = True, now + self.pairing.rest
        self._note(now, what or "", score=score, kept=better)
        return self._next(now)

    def receive(self, message: Message, now: float) -> list[Message]:
        """Take a message, or leave it: nothing that another peer sends can stop this one."""
        try:
            if message.receiver != self.number or message.sender not in self.aligned:
                raise Refused("of someone with whom there is nothing in common, or for someone else")
            handler = getattr(self, f"_on_{message.kind}", None)
            if handler is None:
                raise Refused(f"of kind {message.kind}, which peers do not send")
            said: list[Message] = handler(message, now)
            return said
        except Refused as error:
            self.refused += 1
            LOG.debug("peer %d refused a message: %s", self.number, error)
            return []

    # -- what to do next -----------------------------------------------------------------------------------------------

    def _next(self, now: float) -> list[Message]:
        if self.state == "busy" or self.best is None:
            return []
        due = sorted(entry for entry in self._later if entry[0] <= now)
        self._later = [entry for entry in self._later if entry[0] > now]
        for _, client, tries in due:
            self._enqueue(client, tries)
        if self.trained >= self.pairing.trainings:
            self._queue.clear()
            self._updates.clear()
            self._later.clear()
        if self._asking is not None:
            return []
        if self._updates:
            self._asleep = False
            self._start_client()
            return []
        said: list[Message] = []
        if self.improved and not self._queue:
            self.improved, self._asleep = False, False
            said += [self._message("offer", other) for other in sorted(self.aligned)]
            self._idle_from = now + self.pairing.linger
        if self._queue:
            self._asleep = False
            return said + self._ask(*self._queue.popleft(), now)
        if self._idle_from <= now:
            self._idle(now)
        return said

    def _idle(self, now: float) -> None:
        """Train on alone, or sleep until someone asks."""
        pairing = self.pairing
        if pairing.idle == "train" and self.fruitless < pairing.patience and self.trained < pairing.trainings:
            assert self.best is not None
            self._asleep = False
            self._start("self", self.best, pairing.retrain)
        else:
            self._asleep, self._idle_from = True, math.inf

    def _enqueue(self, client: int, tries: int = 0) -> None:
        waiting = {other for other, _ in self._queue} | {other for _, other, _ in self._later}
        if client not in waiting and not (self._asking is not None and self._asking[0] == client):
            self._queue.append((client, tries))

    # -- training ------------------------------------------------------------------------------------------------------

    def _start(self, what: Any, tables: Tables, epochs: int, virtual: Virtual | None = None, client: int = -1) -> None:
        """Ask to have these tables trained; a training is paid for when it begins."""
        if what == "first":
            self._started = True
        else:
            self.trained += 1
        self._what = what
        copy = tables.like(torch.clone)
        size = len(self.graph.train) + (0 if virtual is None else len(virtual.links))
        steps = epochs * -(-size // self.settings.training.batch)
        self.job = Job(what, steps, lambda: self._train(copy, epochs, virtual, client))

    def _begun(self) -> Tables:
        """Tables as they begin."""
        if self._fit is None:
            self._fit = Fit(self.settings, [self.graph], numbers=[self.number])
            self._fit.total_epochs = self.epochs
        return self._fit.cohort.tables

    def _train(self, tables: Tables, epochs: int, virtual: Virtual | None, client: int) -> Trained:
        assert self._fit is not None
        own, fit = self._fit, self._fit
        if virtual is not None and len(virtual.links):
            fit = self._extended(tables, virtual, client)
        else:
            for name, tensor in fit.cohort.tables.tensors().items():
                tensor.copy_(tables.tensors()[name])
        fit.cohort.between_rounds("reset")
        active = np.ones(1, bool)
        try:
            for _ in range(epochs):
                fit.epoch(active)
            fit.check_rows()
        except Diverged:
            self._fit = None
            self._begun()
            self._go_on_from(fit)
            return Trained(tables, None)
        if fit is not own:  # its steps are taken, its further rows forgotten
            self._go_on_from(fit)
        entities, relations = len(self.graph.entities), len(self.graph.relations)
        now = fit.cohort.tables
        tables = Tables(now.entity[:entities].clone(), now.relation[:relations].clone(),
                        tuple(shared.clone() for shared in now.shared))  # fmt: skip
        return Trained(tables, self._scored(tables))

    def _go_on_from(self, fit: Fit) -> None:
        """No draw is made twice: steps and epochs count on, whichever rows they were taken with."""
        assert self._fit is not None
        self._fit.cohort.steps.copy_(fit.cohort.steps)
        self._fit.cohort.epochs.copy_(fit.cohort.epochs)

    def _extended(self, tables: Tables, virtual: Virtual, client: int) -> Fit:
        """A training of the same peer with further entities and relations, which come after its own."""
        graph, settings, aligned = self.graph, self.settings, self.aligned[client]
        entity = np.concatenate([aligned.entity, len(graph.entities) + np.arange(len(virtual.entity))])
        relation = np.concatenate([aligned.relation, len(graph.relations) + np.arange(len(virtual.relation))])
        h, r, t = virtual.links.cpu().numpy().T
        links = np.unique(np.stack([entity[h], relation[r], entity[t]], 1), axis=0).astype(np.int32)
        there = np.isin(_row_keys(links), _row_keys(graph.train.triples))
        wider = Graph(
            _more_names(graph.entities, len(virtual.entity)), _more_names(graph.relations, len(virtual.relation)),
            graph.train.plus(links[~there]), graph.valid, Split(np.zeros((0, 3), np.int32)),
            groups=graph.groups,
        )  # fmt: skip
        made = []
        for step, (part, rows, vectors) in enumerate((("entity", tables.entity, virtual.entity),
                                                      ("relation", tables.relation, virtual.relation))):  # fmt: skip
            draw = Stream(settings.seed, Purpose.PAIR, self.number, 2 * self._handshakes + step)
            width = rows.shape[1]
            first = settings.scorer.initial(part, len(vectors), width, settings.dim, draw).to(rows.device)  # type: ignore[arg-type]
            first[:, : vectors.shape[1]] = vectors
            made.append(torch.cat([rows, first]))
        whole = Tables(made[0], made[1], tables.shared)
        whole.constrain(settings.scorer)
        fit = Fit(settings, [wider], numbers=[self.number], tables=whole)
        fit.total_epochs = self.epochs
        assert self._fit is not None
        fit.cohort.steps.copy_(self._fit.cohort.steps)
        fit.cohort.epochs.copy_(self._fit.cohort.epochs)
        return fit

    # -- validation ----------------------------------------------------------------------------------------------------

    def model(self, tables: Tables | None = None) -> Model:
        """The model that is kept, or of other tables."""
        chosen = tables or self.best
        if chosen is None:
            raise TacitError(f"peer {self.number} has not trained yet")
        return Model(self.settings.scorer, chosen)

    def _scored(self, tables: Tables) -> float:
        """How good tables are, by what may be looked at."""
        graph, model, memory = self.graph, self.model(tables), self.settings.evaluation.memory_mb
        if self.validation == "none" or not len(graph.valid):
            return float(self.trained)
        if self.validation == "own" and self.pairing.criterion == "accuracy":
            return told_apart(model, graph, "valid", seed=self.settings.seed)
        if self._questions is None:
            found: dict[str, tuple[Any, Any]] = {
                "own": (graph.valid.triples, graph.statements.triples),
                "public": (unrestricted(graph.valid), unrestricted(graph.statements)),
                "paid": (graph.valid.triples, np.zeros((0, 3), np.int64)),
            }
            self._questions = Questions(*found[self.validation])
        if self.validation == "own":
            wanted = self.settings.evaluation
            return rank(model, self._questions, sides=wanted.sides, memory_mb=memory).metrics(wanted.ties).mrr
        ranks = reciprocal_ranks(model, self._questions, memory)
        if self.validation == "public":
            return float(ranks.mean())
        if self.looks > self.pairing.trainings:
            raise TacitError("no looks at validation triples are left")
        self.looks += 1
        noise = self._secret.normal(Purpose.NOISE_SIGNAL, self.number, self.looks, 1)
        return exact_sum(ranks) + self.look_sigma * float(noise[0])

    def _margin(self) -> float:
        """By how much a score has to be better: a noisy one by more than the deviation of a difference of two."""
        return math.sqrt(2) * self.look_sigma if self.validation == "paid" else 0.0

    # -- rows ----------------------------------------------------------------------------------------------------------

    def vectors(self, other: int, tables: Tables | None = None) -> Tensor:
        """(n, width) what is translated of the rows that are aligned with another peer: entities, then relations."""
        chosen = tables or self.best
        assert chosen is not None
        entity, relation = self._ids(other)
        rows = [chosen.entity[entity][:, : self.widths[0]]]
        if len(relation):
            rows.append(chosen.relation[relation][:, : self.widths[0]])
        return torch.cat(rows)

    def _ids(self, other: int) -> tuple[Tensor, Tensor]:
        aligned = self.aligned[other]
        if len(aligned.relation) and self.widths[1] is None:
            raise TacitError(f"relations of {type(self.settings.scorer).__name__} are no vectors that can be "
                             'translated: set parts = "entities"')  # fmt: skip
        assert self._fit is not None
        device = self._fit.device
        return tuple(torch.from_numpy(x.astype(np.int64)).to(device) for x in (aligned.entity, aligned.relation))

    def _placed(self, other: int, vectors: Tensor, tables: Tables) -> Tables:
        """Tables in which aligned rows begin with these vectors."""
        entity, relation = self._ids(other)
        made = tables.like(torch.clone)
        made.entity[entity, : self.widths[0]] = vectors[: len(entity)].to(made.entity.dtype)
        if len(relation):
            made.relation[relation, : self.widths[0]] = vectors[len(entity) :].to(made.relation.dtype)
        made.constrain(self.settings.scorer)
        return made

    def _start_client(self) -> None:
        """Put refined rows in place of the own ones, of all handshakes that ended, and train."""
        assert self.best is not None
        tables = self.best
        for host, generator in self._updates:
            refined = generator.refined(self.vectors(host, tables))
            if bool(refined.isfinite().all()):
                tables = self._placed(host, refined, tables)
        self._updates.clear()
        self._start("client", tables, self.pairing.retrain)

    # -- as a host -----------------------------------------------------------------------------------------------------

    def _on_offer(self, message: Message, now: float) -> list[Message]:
        if self.trained >= self.pairing.trainings:
            return []
        self._enqueue(message.sender)
        return self._next(now)

    def _ask(self, client: int, tries: int, now: float) -> list[Message]:
        """Invite a client."""
        self._handshakes += 1
        self._asking = (client, self._handshakes, tries, now + self.pairing.within)
        ppat = self.pairing.ppat
        scale = torch.tensor([self._scale(client)], dtype=torch.float64)
        return [self._message("invite", client, {"scale": scale}, handshake=self._handshakes,
                              count=len(self.aligned[client]), width=self.widths[0], epochs=ppat.passes,
                              batch=ppat.batch, seed=self._order_seed(self._handshakes))]  # fmt: skip

    def _scale(self, client: int) -> float:
        """How long its rows are; of a host whose rows may not leave, how long those of its teachers began."""
        return scale_of(self.vectors(client)) if self.leaves else scale_of(self.vectors(client, self._first_tables()))

    def _first_tables(self) -> Tables:
        """Rows before any training: they follow from settings and names."""
        fit, settings = self._fit, self.settings
        assert fit is not None
        return Tables.begin(settings.scorer, settings.dim, fit.layout, seed=settings.seed).like(
            lambda tensor: tensor.to(fit.device)
        )

    def _order_seed(self, handshake: int) -> int:
        return int(Stream(self.settings.seed, Purpose.PAIR, self.number, handshake).words(1)[0])

    def _on_answer(self, message: Message, now: float) -> list[Message]:
        asking = self._asking
        if asking is None or asking[:2] != (message.sender, message.says["handshake"]):
            raise Refused("an answer to nothing that was asked")
        self._asking = None
        client, handshake, tries, _ = asking
        answer = message.says["answer"]
        if answer == "busy" and tries < self.pairing.tries:
            draw = Stream(self.settings.seed, Purpose.PAIR, self.number, (1 << 31) + handshake).uniform(1)[0]
            self._later.append((now + self.pairing.retry * (1 + float(draw)), client, tries + 1))
        if answer != "yes" or self.state == "busy" or self.trained >= self.pairing.trainings:
            return self._next(now)
        self._hosting = self._opened(client, handshake, now)
        self._note(now, "hosts", other=client)
        return []

    def _opened(self, client: int, handshake: int, now: float) -> Hosting:
        ppat, rows = self.pairing.ppat, self.vectors(client)
        order = batches(len(rows), ppat.passes, ppat.batch, self._order_seed(handshake))
        hosting = Hosting(client, handshake, order, now + self.pairing.within, real=rows if self.leaves else None)
        if not order:
            return hosting
        stream = Stream(self.settings.seed + handshake, Purpose.PAIR, self.number)
        if isinstance(self.votes, GaussianVotes):
            hosting.judge = Voted(self._teachers_rows(client), self.votes, self._scale(client), ppat, stream)
        elif self.votes is not None:
            parts = divided(rows, min(ppat.teachers, len(rows)), stream.at(step=(1 << 32) - 1))
            hosting.judge = Voted(parts, self.votes, scale_of(rows), ppat, stream)
        else:
            hosting.judge = Direct(rows, ppat, stream)
        return hosting

    def _teachers_rows(self, client: int) -> list[Tensor]:
        """The aligned rows of each teacher: tables trained on its own triples, from the same beginning as all others.

        Which triple is in which shard follows from the triple alone, so one more or less changes one teacher.
        """
        entity, relation = self._ids(client)
        width = self.widths[0]
        found = []
        for entities, relations in self._shard_tables():
            found.append(torch.cat([entities[entity][:, :width], relations[relation][:, :width]]))
        return found

    def _shard_tables(self) -> list[Any]:
        if self._shards is None:
            graph, many, first = self.graph, self.pairing.ppat.shards, self._first_tables()
            shard = content(graph.train.triples, self.settings.seed, self.number) % many
            graphs = [replace(graph, train=graph.train.at(np.flatnonzero(shard == each))) for each in range(many)]
            taught = [each for each in range(many) if len(graphs[each].train)]
            stacked = Tables(
                torch.cat([first.entity] * len(taught)), torch.cat([first.relation] * len(taught)),
                tuple(torch.cat([shared] * len(taught)) for shared in first.shared),
            )  # fmt: skip
            fit = Fit(self.settings, [graphs[each] for each in taught], numbers=taught, tables=stacked)
            for _ in range(self.settings.training.epochs):
                fit.epoch(np.ones(len(taught), bool))
            tables: list[Any] = [(first.entity, first.relation)] * many
            for place, each in enumerate(taught):
                own = fit.cohort.tables.party(fit.layout, place)
                tables[each] = (own.entity.nan_to_num(), own.relation.nan_to_num())
            self._shards = tables
        return self._shards

    def _on_generated(self, message: Message, now: float) -> list[Message]:
        hosting = self._hosted(message)
        if hosting.at >= len(hosting.order):
            raise Refused("a batch, where none is expected any more")
        which = hosting.order[hosting.at]
        values = self._values(message, len(which), hosting.at)
        assert hosting.judge is not None
        gradient = hosting.judge.answer(values)
        hosting.at += 1
        hosting.deadline = now + self.pairing.within
        keep = 1
        if hosting.real is not None:
            hosting.seen.append(values)
            keep = 0
        if ends := self._epoch_ends(hosting):
            keep = self._better(hosting)
        arrays = {"values": gradient.float().contiguous()}
        return [self._message("gradient", hosting.client, arrays, round=hosting.at - 1, handshake=hosting.handshake,
                              keep=keep if ends else 0)]  # fmt: skip

    def _epoch_ends(self, hosting: Hosting) -> bool:
        return hosting.at % (len(hosting.order) // self.pairing.ppat.passes) == 0

    def _better(self, hosting: Hosting) -> int:
        """Whether this epoch's rows are nearer to the host's than any before; who may not look keeps the last."""
        if hosting.real is None:
            return 1
        which = torch.cat(hosting.order[hosting.at - len(hosting.seen) : hosting.at]).to(hosting.real.device)
        near = nearness(torch.cat(hosting.seen), hosting.real[which])
        hosting.seen.clear()
        if near > hosting.best:
            hosting.best = near
            return 1
        return 0

    def _on_translated(self, message: Message, now: float) -> list[Message]:
        hosting = self._hosted(message)
        if hosting.at < len(hosting.order):
            raise Refused("all rows, before all batches were seen")
        client = hosting.client
        values = self._values(message, len(self.aligned[client]), len(hosting.order))
        virtual = self._virtual(message)
        arrays = {}
        if self.pairing.ppat.translator == "procrustes":
            assert hosting.real is not None
            turn = procrustes(values, hosting.real).to(values.device)
            values, arrays["map"] = values @ turn.T, turn
            if virtual is not None:
                virtual = Virtual(virtual.entity @ turn.T, virtual.relation @ turn.T, virtual.links)
        assert self.best is not None
        if self.pairing.update == "mean":
            values = (values + self.vectors(client)) / 2
        self._hosting = None
        self._start("host", self._placed(client, values, self.best), self.pairing.retrain, virtual, client)
        return [self._message("ended", client, arrays, handshake=hosting.handshake)]

    def _hosted(self, message: Message) -> Hosting:
        hosting = self._hosting
        if hosting is None or (hosting.client, hosting.handshake) != (message.sender, message.says["handshake"]):
            raise Refused("of a handshake that there is not")
        return hosting

    def _values(self, message: Message, rows: int, number: int) -> Tensor:
        """The rows of a message, looked at."""
        inbox = Inbox(message.kind, None, number, 0, self.number, {message.sender: rows}, self.widths[0])
        assert self._fit is not None
        return inbox.take(message).arrays["values"].to(self._fit.device)

    def _virtual(self, message: Message) -> Virtual | None:
        """Neighbours that came with the rows, looked at; None: none are wanted, or none came."""
        if self.pairing.virtual == "none" or not {"entity", "relation", "links"} <= message.arrays.keys():
            return None
        assert self._fit is not None
        device, aligned = self._fit.device, self.aligned[message.sender]
        made = Virtual(*(message.arrays[name].to(device) for name in ("entity", "relation", "links")))
        for rows in (made.entity, made.relation):
            if rows.shape[1] != self.widths[0] or not bool(rows.isfinite().all()):
                raise Refused("neighbours whose rows are not as wide as these, or not finite")
        links, most = made.links, self.pairing.virtual_most
        if links.shape[1] != 3 or len(links) > most or len(made.entity) > most or len(made.relation) > most:
            raise Refused(f"links that are none, or more than {most:,}")
        entities, relations = len(aligned.entity) + len(made.entity), len(aligned.relation) + len(made.relation)
        limit = torch.tensor([entities, relations, entities], device=device)
        if len(links) and not bool(((links >= 0) & (links < limit)).all()):
            raise Refused("links to entities or relations that there are not")
        if len(made.relation) and self.widths[1] is None:
            raise Refused("relations, which are no vectors here")
        return made

    # -- as a client ---------------------------------------------------------------------------------------------------

    def _on_invite(self, message: Message, now: float) -> list[Message]:
        says, host, scale = message.says, message.sender, message.arrays["scale"]
        handshake = says["handshake"]
        if tuple(scale.shape) != (1,) or not bool((scale.isfinite() & (scale > 0)).all()):
            raise Refused("a scale is one number above 0")
        fits = says["count"] == len(self.aligned[host]) and min(says["width"], says["batch"]) >= 1
        if not self.leaves or not fits:
            return [self._message("answer", host, handshake=handshake, answer="no")]
        if self.state == "busy" or self.best is None:
            return [self._message("answer", host, handshake=handshake, answer="busy")]
        if self._asleep:
            self._asleep, self._idle_from = False, now + self.pairing.linger
        rows = self.vectors(host)
        stream = Stream(self.settings.seed, Purpose.PAIR, self.number, (1 << 30) + 1024 * handshake + host)
        generator = Generator(rows, says["width"], float(scale[0]), self.pairing.ppat, stream)
        order = batches(len(rows), says["epochs"], says["batch"], says["seed"])
        self._serving[host] = Serving(handshake, generator, order, 0, now + self.pairing.within)
        self._note(now, "serves", other=host)
        return [self._message("answer", host, handshake=handshake, answer="yes"), self._sent(host)]

    def _sent(self, host: int) -> Message:
        """The next batch, or all rows after the last."""
        serving = self._serving[host]
        if serving.at < len(serving.order):
            values = serving.generator.made(serving.order[serving.at])
            return self._message("generated", host, {"values": values.float()}, round=serving.at,
                                 handshake=serving.handshake)  # fmt: skip
        arrays = {"values": serving.generator.translate(serving.generator.rows).float()}
        if self.pairing.virtual != "none":
            entity, relation, links = self._neighbours(host)
            assert self.best is not None
            width = self.widths[0]
            arrays["entity"] = serving.generator.translate(self.best.entity[entity][:, :width]).float()
            arrays["relation"] = serving.generator.translate(self.best.relation[relation][:, :width]).float()
            arrays["links"] = links
        return self._message("translated", host, arrays, round=len(serving.order), handshake=serving.handshake)

    def _on_gradient(self, message: Message, now: float) -> list[Message]:
        serving = self._serving.get(message.sender)
        if serving is None or serving.handshake != message.says["handshake"] or serving.at >= len(serving.order):
            raise Refused("of a handshake that there is not")
        which, generator = serving.order[serving.at], serving.generator
        width = generator.weight.shape[0]
        inbox = Inbox("gradient", None, serving.at, 0, self.number, {message.sender: len(which)}, width)
        generator.learn(which, inbox.take(message).arrays["values"].to(generator.weight.device))
        if message.says["keep"]:
            generator.keep()
        serving.at += 1
        serving.deadline = now + self.pairing.within
        return [self._sent(message.sender)]

    def _on_ended(self, message: Message, now: float) -> list[Message]:
        serving = self._serving.get(message.sender)
        if serving is None or serving.handshake != message.says["handshake"] or serving.at < len(serving.order):
            raise Refused("of a handshake that there is not")
        generator = serving.generator
        if (turn := message.arrays.get("map")) is not None:
            width = generator.weight.shape[0]
            if tuple(turn.shape) != (width, width) or not bool(turn.isfinite().all()):
                raise Refused("a map that does not fit the rows, or is not finite")
            generator.follow(turn.to(generator.weight.device))
        del self._serving[message.sender]
        self._updates.append((message.sender, generator))
        return self._next(now)

    def _neighbours(self, host: int) -> tuple[Tensor, Tensor, Tensor]:
        """Own ids of further entities and of further relations, and links between these and the aligned ones."""
        aligned, graph, kind = self.aligned[host], self.graph, self.pairing.virtual
        stream = Stream(self.settings.seed, Purpose.PAIR, self.number, (1 << 31) + (1 << 30) + self._handshakes)
        known = np.zeros(len(graph.entities), bool)
        known[aligned.entity] = True
        if kind == "predicted":
            triples = self._predicted(aligned, known, stream)
        else:
            triples = self.public if kind == "public" else graph.train.triples.astype(np.int64)
            triples = triples[known[triples[:, 0]] ^ known[triples[:, 2]]]
            chosen = np.sort(stream.permutation(len(triples))[: self.pairing.virtual_most])
            triples = triples[chosen]
        if self.widths[1] is None:  # only relations that both have anyway
            triples = triples[np.isin(triples[:, 1], aligned.relation)]
        places = []
        for ids, size, columns in ((aligned.entity, len(graph.entities), (0, 2)),
                                   (aligned.relation, len(graph.relations), (1,))):  # fmt: skip
            further = np.setdiff1d(triples[:, list(columns)].ravel(), ids)
            place = np.full(size, -1, np.int64)
            place[ids] = np.arange(len(ids))
            place[further] = len(ids) + np.arange(len(further))
            places.append((further, place))
        (entity, at), (relation, by) = places
        links = np.stack([at[triples[:, 0]], by[triples[:, 1]], at[triples[:, 2]]], 1)
        assert self._fit is not None
        device = self._fit.device
        return tuple(torch.from_numpy(np.ascontiguousarray(x, np.int64)).to(device) for x in (entity, relation, links))

    def _predicted(self, aligned: Aligned, known: np.ndarray, stream: Stream) -> np.ndarray:
        """Links that the model finds likeliest, from aligned entities to others: made of the rows and nothing else."""
        if not len(aligned.entity) or known.all():
            return np.zeros((0, 3), np.int64)
        assert self.best is not None
        many = min(self.pairing.virtual_most, 4 * len(aligned.entity))
        words = stream.integers(2 * many, 1 << 30)
        heads = aligned.entity[words[:many] % len(aligned.entity)].astype(np.int64)
        relations = words[many:] % len(self.graph.relations)
        scorer, tables, found = self.settings.scorer, self.best, []
        shared = tuple(tensor[0] for tensor in tables.shared)
        others = torch.from_numpy(np.flatnonzero(~known)).to(tables.entity.device)
        with torch.no_grad():
            for h, r in zip(torch.from_numpy(heads).split(32), torch.from_numpy(relations).split(32), strict=True):
                here = (tables.entity[h.to(others.device)], tables.relation[r.to(others.device)])
                found.append(others[scorer.score_tails(*here, tables.entity[others], shared).argmax(1)].cpu())
        return np.unique(np.stack([heads, relations, torch.cat(found).numpy()], 1), axis=0)

    # -- words ---------------------------------------------------------------------------------------------------------

    def _message(
        self, kind: str, other: int, arrays: Mapping[str, Tensor] | None = None, *, round: int = 0, **says: Any
    ) -> Message:
        return Message(kind, round, 0, self.number, other, says, dict(arrays or {}))

    def _note(self, now: float, what: str, **more: Any) -> None:
        self.history.append({"time": now, "peer": self.number, "what": what} | more)


def _more_names(vocab: Vocab, many: int) -> Vocab:
    """Names that come after all others, so that no id changes."""
    last = vocab[len(vocab) - 1] if len(vocab) else ""
    return Vocab.trusted([*vocab, *(f"{last}~{number:09d}" for number in range(many))])


def _row_keys(triples: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(triples.astype(">i4")).view("V12").reshape(-1)
