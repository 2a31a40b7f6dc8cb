"""What a peer has of its own: tables, a graph to train them on, and what it may let others know of them.

In sound mode a client's rows come from private training, and so does everything that is made of them. A host's rows do
too, or they never leave it: then labels from noisy votes of teachers on disjoint triples are all that leaves, such a
host never offers its rows, and nobody learns whether it improved.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import torch

from tacit.draws import Purpose, Secret, Stream
from tacit.errors import BadValue, TacitError
from tacit.evaluation.classification import told_apart
from tacit.evaluation.ranking import Questions, rank
from tacit.graph import Graph, Split, SplitName, Vocab
from tacit.models import Scorer, Tables
from tacit.models.model import Model
from tacit.models.translational import Translation
from tacit.peers.alignment import Aligned, Parts, check_share
from tacit.peers.ppat import PPAT, Direct, Judge, Voted, divided, scale_of
from tacit.privacy.events import Gaussian, Segment, Spent, joined
from tacit.privacy.pate import GaussianVotes, LaplaceVotes
from tacit.privacy.privatizers import Sound
from tacit.privacy.schedule import exact_sum, reciprocal_ranks, unrestricted
from tacit.privacy.steps import content, count_units, public_numbers
from tacit.settings import Settings
from tacit.training import Diverged, Fit, chosen_device

Tensor = Any
AT_ONCE = 1 << 26
"""Numbers in the tables of teachers that are trained together, at most."""


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
        check_share(self.share, self.parts)
        for name in ("look_sigma", "votes_epsilon", "votes_sigma"):
            value = getattr(self, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise BadValue(f"{name} is above 0, not {value}")
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

    client: int
    entity: Tensor
    relation: Tensor
    links: Tensor


class Use(IntEnum):
    """What a peer's public draws are for."""

    ORDER = 0
    RETRY = 1
    MAP = 2
    JUDGE = 3
    VIRTUAL = 4
    FILL = 5


class Learner:
    """One peer's tables: how they are trained, judged, translated, and what that costs.

    Parameters
    ----------
    number
        The peer's, in messages and draws.
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
    epochs
        All epochs that it may ever train.
    trained, looks, again
        How many trainings after the first were begun, how often validation was paid for, and how often the first
        training was begun again, after its process was killed.
    """

    def __init__(
        self,
        number: int,
        graph: Graph,
        settings: Settings,
        aligned: Mapping[int, Aligned],
        pairing: Pairing,
        public: np.ndarray | None = None,
    ):
        self.number, self.graph, self.pairing, self.aligned = number, graph, pairing, dict(aligned)
        self.public = np.zeros((0, 3), np.int64) if public is None else np.asarray(public, np.int64).reshape(-1, 3)
        self.private_rows = isinstance(settings.privacy, Sound)
        self.epochs = settings.training.epochs + pairing.trainings * pairing.retrain
        self.settings = self._solved(settings)
        self.widths = vector_widths(settings.scorer, settings.dim)
        self.device = torch.device(chosen_device(settings.training.device))
        self.trained = self.looks = self.again = 0
        self._taken = (0, 0)
        self.best: Tables | None = None
        self.score: float | None = None
        self._started = False
        self._drawn = dict.fromkeys(Use, 0)
        self._secret = Secret.simulation(settings.seed) if pairing.noise == "seeded" else Secret.fresh()
        self._shards: list[Any] | None = None
        self._questions: Questions | None = None
        self._fit: Fit | None = None
        self.validation = self._checked_validation()
        self.votes = self._votes()

    @property
    def fit(self) -> Fit:
        """The training of its own graph, which goes on from where it was."""
        if self._fit is None:
            self._fit = Fit(self.settings, [self.graph], numbers=[self.number])
            self._fit.total_epochs = self._all_epochs
        return self._fit

    @property
    def _all_epochs(self) -> int:
        """All that it may ever train, first trainings that were cut off among them."""
        return self.epochs + self.again * self.settings.training.epochs

    def stream(self, use: Use) -> Stream:
        """Public draws, of their own each time."""
        self._drawn[use] += 1
        return Stream(self.settings.seed, Purpose.PAIR, self.number, use << 28 | self._drawn[use])

    def seed(self, use: Use) -> int:
        """A seed, of its own each time."""
        upper, lower = self.stream(use).words(2).tolist()
        return int(upper << 31 | lower >> 1)

    def join(self, other: int, aligned: Aligned) -> bool:
        """Someone comes later; False: what votes may cost was fixed without it, so there are none for it."""
        if not self.leaves and not isinstance(self.votes, GaussianVotes):
            return False
        self.aligned[other] = aligned
        return True

    def ready(self) -> None:
        """Do what a first handshake would take long for: train the teachers, if there are any."""
        torch.optim.SGD([torch.zeros(1, requires_grad=True)])  # the first optimizer of a process takes seconds
        if isinstance(self.votes, GaussianVotes):
            self._shard_tables()

    # -- what outlives a process ---------------------------------------------------------------------------------------

    def counts(self) -> dict[str, int]:
        """What was used up: trainings, votes, draws."""
        votes = self.votes
        found = {"started": int(self._started), "again": self.again, "trained": self.trained}
        found |= {"steps": self._taken[0], "epochs": self._taken[1]}
        found |= {"votes": votes.votes if votes else 0, "batches": votes.batches if votes else 0}
        return found | {f"drawn.{use}": drawn for use, drawn in self._drawn.items()}

    def restore(self, counts: Mapping[str, int], tables: Tables | None, score: float | None) -> None:
        """Go on after a process was killed. A training that it had begun is paid for, with its look at validation.

        Its steps are none of a later one's: which steps look at protected triples follows from their numbers, and so
        what was paid for is what was taken.
        """
        self._started, self.again, self.trained = bool(counts["started"]), counts["again"], counts["trained"]
        self.looks = counts["started"] + self.again + self.trained
        if self.votes is not None:
            self.votes.votes, self.votes.batches = counts["votes"], counts["batches"]
        self._drawn = {use: counts[f"drawn.{use}"] for use in Use}
        epochs = self.settings.training.epochs * (counts["started"] + self.again)
        steps, epochs = self._steps_and_epochs(epochs + self.trained * self.pairing.retrain)
        self._taken = (max(steps, counts["steps"]), max(epochs, counts["epochs"]))
        self.fit.cohort.steps.fill_(self._taken[0])
        self.fit.cohort.epochs.fill_(self._taken[1])
        self.fit.total_epochs = self._all_epochs
        self.best, self.score = None if tables is None else tables.like(lambda tensor: tensor.to(self.device)), score

    @property
    def can_train(self) -> bool:
        return self.trained < self.pairing.trainings

    def can_host(self, client: int) -> bool:
        """Whether a training is left for what a handshake brings, and as many votes as it may need."""
        if not self.can_train or not isinstance(self.votes, GaussianVotes):
            return self.can_train
        return self.votes.votes + self.pairing.ppat.epochs * len(self.aligned[client]) <= self.votes.most

    @property
    def kept(self) -> Tables:
        """The tables that are kept."""
        if self.best is None:
            raise TacitError(f"peer {self.number} has not trained yet")
        return self.best

    # -- what is allowed -----------------------------------------------------------------------------------------------

    @property
    def leaves(self) -> bool:
        """Whether its rows may leave it, translated: whether it may be a client, and make offers."""
        return self.private_rows or self.pairing.mode == "published"

    @property
    def simulated(self) -> bool:
        """Whether noise follows a seed."""
        return self.pairing.noise == "seeded" or getattr(self.settings.privacy, "noise", "system") == "seeded"

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
        if privacy.unit == "group" and self.pairing.virtual != "none":
            raise TacitError("a link of another peer is a unit of its own until a group has it, so that a group would "
                             'count more than once: with groups, set virtual = "none"')  # fmt: skip
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
        if wanted == "public" and not (
            _has_marks(graph.valid) and _has_marks(graph.test) and len(unrestricted(graph.valid))
        ):
            raise TacitError("marks have to say which validation and test triples are confidential, and leave some of "
                             "the former public (tacit data mark): or set validation to paid or none")  # fmt: skip
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
        privacy = self.settings.privacy
        assert isinstance(privacy, Sound)
        if privacy.epsilon is None:
            raise TacitError("say what paid looks may cost (privacy.epsilon), or their noise (look_sigma)")
        return noise_of(privacy.epsilon, privacy.delta, self.pairing.trainings + 1)

    def _votes(self) -> LaplaceVotes | GaussianVotes | None:
        """What makes labels as a host; None: nothing has to be voted on."""
        pairing = self.pairing
        stream = Stream(self.settings.seed, Purpose.NOISE_VOTE, self.number)
        if pairing.mode == "published":
            return LaplaceVotes(pairing.ppat.noise, stream)
        if self.private_rows or not self.aligned:
            return None
        if pairing.ppat.translator != "ppat":
            raise TacitError("a map by known pairs looks at the host's rows: train these privately, or vote (ppat)")
        most = pairing.trainings * max((pairing.ppat.epochs * len(a) for a in self.aligned.values()), default=0)
        sigma = pairing.votes_sigma
        if sigma is None:
            if pairing.votes_epsilon is None:
                raise TacitError("this peer's rows are not private: set privacy.epsilon, or say what votes on them may "
                                 "cost (votes_epsilon), or their noise (votes_sigma)")  # fmt: skip
            sigma = noise_of(pairing.votes_epsilon, pairing.delta, max(most, 1))
        return GaussianVotes(sigma, most, self._secret, self.number)

    # -- what was released ---------------------------------------------------------------------------------------------

    def spent(self, *, reserved: bool = False) -> dict[str, Spent]:
        """What was released of training triples, and of validation triples; `reserved`: all that may be.

        The two are different triples, so that the larger cost is the cost.
        """
        found = self.spent_by(self.pairing.trainings + 1 if reserved else self._started + self.trained)
        if isinstance(self.votes, GaussianVotes):
            found["train"] = joined([*found["train"], *(self.votes.reserved if reserved else self.votes.spent)])
        if self.validation == "paid" and not reserved:
            found["valid"] = joined([Segment(Gaussian(self.look_sigma), self.looks)])
        return found

    def spent_by(self, trainings: int) -> dict[str, Spent]:
        """What so many trainings with a look after each release: the first one, and those after it."""
        train: list[Segment] = []
        privacy = self.settings.privacy
        if isinstance(privacy, Sound):
            _, rates, per_epoch = public_numbers(privacy, [self.graph], self.settings.training.batch)
            first, more = self.settings.training.epochs, self.pairing.retrain
            epochs = (first + more * (trainings - 1)) if trainings else 0
            train += privacy.segments(rates[0], 0, (epochs + first * self.again) * per_epoch[0])
        looks = trainings + self.again if self.validation == "paid" and trainings else 0
        valid = [Segment(Gaussian(self.look_sigma), looks)] if looks else []
        return {"train": joined(train), "valid": joined(valid)}

    # -- training ------------------------------------------------------------------------------------------------------

    def begun(self, *, first: bool, triples: int = 0) -> int:
        """Note that a training begins, which pays for it; how many steps it has, with so many further triples."""
        if first:
            self.again += self._started
            self._started = True
            self.fit.total_epochs = self._all_epochs
        else:
            self.trained += 1
        epochs = self.settings.training.epochs if first else self.pairing.retrain
        return epochs * -(-(len(self.graph.train) + triples) // self.settings.training.batch)

    def resume(self, tables: Tables, trained: int) -> None:
        """Go on from tables of an earlier process, which had so many trainings after the first; no draw is made twice.

        Looks count as paid for; how good the tables are is not known any more.
        """
        self.restore(self.counts() | {"started": 1, "trained": trained}, tables, None)

    def _steps_and_epochs(self, epochs: int) -> tuple[int, int]:
        """How many steps so many epochs have."""
        private, each = self.fit.private, -(-len(self.graph.train) // self.settings.training.batch)
        return epochs * (each if private is None else private.per_epoch[0]), epochs

    def learn_from(self, graph: Graph, taken: tuple[int, int] | None = None) -> None:
        """Train on other triples of the same names from now on; steps and epochs count on, or from what was taken."""
        steps, epochs = self._taken = self._taken if taken is None else taken
        self.graph, self._fit, self._questions = graph, None, None
        self.fit.cohort.steps.fill_(steps)
        self.fit.cohort.epochs.fill_(epochs)

    def train(self, tables: Tables, epochs: int, virtual: Virtual | None) -> Trained:
        own = fit = self.fit
        if virtual is not None and len(virtual.links):
            fit = self._extended(tables, virtual)
        else:
            for name, tensor in fit.cohort.tables.tensors().items():
                tensor.copy_(tables.tensors()[name])
        fit.cohort.between_rounds("reset")
        active = np.ones(1, bool)
        try:
            for _ in range(epochs):
                fit.epoch(active)
            fit.check_rows()
            if not fit.cohort.tables.fine:  # before validation triples are looked at: what overflows would tell of them
                raise Diverged("rows are too large", self._taken[0], self._taken[1], self.settings)
        except Diverged:
            self._fit = None
            self._go_on_from(fit)
            return Trained(tables, None)
        if fit is not own:  # its steps are taken, its further rows forgotten
            self._go_on_from(fit)
        entities, relations = len(self.graph.entities), len(self.graph.relations)
        self._taken = (int(fit.cohort.steps.max()), int(fit.cohort.epochs.max()))
        now = fit.cohort.tables
        tables = Tables(now.entity[:entities].clone(), now.relation[:relations].clone(),
                        tuple(shared.clone() for shared in now.shared))  # fmt: skip
        return Trained(tables, self.scored(tables))

    def _go_on_from(self, fit: Fit) -> None:
        """No draw is made twice: steps and epochs count on, whichever rows they were taken with."""
        self.fit.cohort.steps.copy_(fit.cohort.steps)
        self.fit.cohort.epochs.copy_(fit.cohort.epochs)
        self._taken = (int(fit.cohort.steps.max()), int(fit.cohort.epochs.max()))

    def _extended(self, tables: Tables, virtual: Virtual) -> Fit:
        """A training of the same peer with further entities and relations, which come after its own."""
        graph, settings, aligned = self.graph, self.settings, self.aligned[virtual.client]
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
        for part, rows, vectors in ((("entity", tables.entity, virtual.entity),
                                                      ("relation", tables.relation, virtual.relation))):  # fmt: skip
            draw = self.stream(Use.FILL)
            width = rows.shape[1]
            first = settings.scorer.initial(part, len(vectors), width, settings.dim, draw).to(rows.device)  # type: ignore[arg-type]
            first[:, : vectors.shape[1]] = vectors
            made.append(torch.cat([rows, first]))
        whole = Tables(made[0], made[1], tables.shared)
        whole.constrain(settings.scorer)
        fit = Fit(settings, [wider], numbers=[self.number], tables=whole)
        fit.total_epochs = self._all_epochs
        fit.cohort.steps.copy_(self.fit.cohort.steps)
        fit.cohort.epochs.copy_(self.fit.cohort.epochs)
        return fit

    # -- validation ----------------------------------------------------------------------------------------------------

    def model(self, tables: Tables | None = None) -> Model:
        """The model that is kept, or of other tables."""
        return Model(self.settings.scorer, tables or self.kept)

    def scored(self, tables: Tables) -> float:
        """How good tables are, by what may be looked at."""
        graph, model, memory = self.graph, self.model(tables), self.settings.evaluation.memory_mb
        if self.validation == "none" or not len(graph.valid):
            return float(self.trained)
        if self.validation == "own" and self.pairing.criterion == "accuracy":
            return told_apart(model, graph, "valid", seed=self.settings.seed)
        if self._questions is None:
            found: dict[str, tuple[Any, Any]] = {
                "own": (graph.valid.triples, graph.statements.triples),
                "public": (unrestricted(graph.valid), self._public_facts()),
                "paid": (graph.valid.triples, np.zeros((0, 3), np.int64)),
            }
            self._questions = Questions(*found[self.validation])
        if self.validation == "own":
            wanted = self.settings.evaluation
            return rank(model, self._questions, sides=wanted.sides, memory_mb=memory).metrics(wanted.ties).mrr
        ranks = reciprocal_ranks(model, self._questions, memory)
        if self.validation == "public":
            return float(ranks.mean())
        if self.looks > self.pairing.trainings + self.again:
            raise TacitError("no looks at validation triples are left")
        self.looks += 1
        noise = self._secret.normal(Purpose.NOISE_SIGNAL, self.number, self.looks, 1)
        return exact_sum(ranks) + self.look_sigma * float(noise[0])

    @property
    def protected(self) -> Graph:
        """The statements that a guarantee is of: not those that are in the open by their marks."""
        every = getattr(self.settings.privacy, "has_public", False)
        train: tuple[SplitName, ...] = ("train",) if every or self.pairing.virtual == "public" else ()
        others: tuple[SplitName, ...] = ("valid", "test") if every or self.validation == "public" else ()
        return self.graph.marked(train + others)

    def _public_facts(self) -> Any:
        """What public validation leaves out of the ranks: training triples only where some of them are public."""
        splits = [self.graph.valid, self.graph.test]
        if getattr(self.settings.privacy, "has_public", True):
            splits.append(self.graph.train)
        return np.concatenate([unrestricted(split) for split in splits])

    def improves(self, trained: Trained) -> bool:
        """Keep tables that are better than ever before: a noisy score by more than the deviation of a difference."""
        if trained.score is None:
            return False
        margin = math.sqrt(2) * self.look_sigma if self.validation == "paid" else 0.0
        if self.score is not None and not trained.score > self.score + margin:
            return False
        self.best, self.score = trained.tables, trained.score
        return True

    # -- rows ----------------------------------------------------------------------------------------------------------

    def vectors(self, other: int, tables: Tables | None = None) -> Tensor:
        """(n, width) what is translated of the rows that are aligned with another peer: entities, then relations."""
        chosen = tables or self.kept
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
        return tuple(torch.from_numpy(x.astype(np.int64)).to(self.device) for x in (aligned.entity, aligned.relation))

    def placed(self, other: int, vectors: Tensor, tables: Tables) -> Tables:
        """Tables in which aligned rows begin with these vectors."""
        entity, relation = self._ids(other)
        made = tables.like(torch.clone)
        made.entity[entity, : self.widths[0]] = vectors[: len(entity)].to(made.entity.dtype)
        if len(relation):
            made.relation[relation, : self.widths[0]] = vectors[len(entity) :].to(made.relation.dtype)
        made.constrain(self.settings.scorer)
        return made

    # -- as a host -----------------------------------------------------------------------------------------------------

    def scale(self, client: int) -> float:
        """How long its rows are; of a host whose rows may not leave, how long those of its teachers began."""
        return scale_of(self.vectors(client)) if self.leaves else scale_of(self.vectors(client, self._first_tables()))

    def _first_tables(self) -> Tables:
        """Rows before any training: they follow from settings and names."""
        fit, settings = self.fit, self.settings
        assert fit is not None
        return Tables.begin(settings.scorer, settings.dim, fit.layout, seed=settings.seed).like(
            lambda tensor: tensor.to(fit.device)
        )

    def judge(self, other: int) -> Judge:
        """What tells a client's translated rows from its own, and may say so."""
        ppat, rows = self.pairing.ppat, self.vectors(other)
        stream = Stream(self.seed(Use.JUDGE), Purpose.PAIR, self.number)
        if isinstance(self.votes, GaussianVotes):
            return Voted(self._teachers_rows(other), self.votes, self.scale(other), ppat, stream)
        if self.votes is not None:
            parts = divided(rows, min(ppat.teachers, len(rows)), stream.at(step=(1 << 32) - 1))
            return Voted(parts, self.votes, scale_of(rows), ppat, stream)
        return Direct(rows, ppat, stream)

    def _teachers_rows(self, client: int) -> list[Tensor]:
        """The aligned rows of each teacher: tables trained on its own triples, from the same beginning as all others.

        Which triple is in which shard follows from the triple alone, so one more or less changes one teacher.
        """
        return [self.vectors(client, Tables(*tables)) for tables in self._shard_tables()]

    def _shard_tables(self) -> list[Any]:
        if self._shards is None:
            graph, many = self.graph, self.pairing.ppat.shards
            shard, _ = shards(graph.train.triples, many, self.settings.seed, self.number)
            graphs = {each: only(graph, shard == each) for each in np.unique(shard).tolist()}
            first = self._first_tables()
            found = taught(self.settings, graphs, first)
            tables = [found.get(each, first) for each in range(many)]
            self._shards = [(own.entity, own.relation) for own in tables]
        return self._shards

    # -- as a client ---------------------------------------------------------------------------------------------------

    def neighbours(self, host: int) -> tuple[Tensor, Tensor, Tensor]:
        """Own ids of further entities and of further relations, and links between these and the aligned ones."""
        aligned, graph, kind = self.aligned[host], self.graph, self.pairing.virtual
        stream = self.stream(Use.VIRTUAL)
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
        found = (torch.from_numpy(np.ascontiguousarray(x, np.int64)) for x in (entity, relation, links))
        return tuple(each.to(self.device) for each in found)

    def _predicted(self, aligned: Aligned, known: np.ndarray, stream: Stream) -> np.ndarray:
        """Links that the model finds likeliest, from aligned entities to others: made of the rows and nothing else."""
        if not len(aligned.entity) or known.all():
            return np.zeros((0, 3), np.int64)
        many = min(self.pairing.virtual_most, 4 * len(aligned.entity))
        words = stream.integers(2 * many, 1 << 30)
        heads = aligned.entity[words[:many] % len(aligned.entity)].astype(np.int64)
        relations = words[many:] % len(self.graph.relations)
        scorer, tables, found = self.settings.scorer, self.kept, []
        shared = tuple(tensor[0] for tensor in tables.shared)
        others = torch.from_numpy(np.flatnonzero(~known)).to(tables.entity.device)
        with torch.no_grad():
            for h, r in zip(torch.from_numpy(heads).split(32), torch.from_numpy(relations).split(32), strict=True):
                here = (tables.entity[h.to(others.device)], tables.relation[r.to(others.device)])
                found.append(others[scorer.score_tails(*here, tables.entity[others], shared).argmax(1)].cpu())
        return np.unique(np.stack([heads, relations, torch.cat(found).numpy()], 1), axis=0)


# -- teachers ----------------------------------------------------------------------------------------------------------


def shards(triples: np.ndarray, many: int, seed: int, number: int) -> tuple[np.ndarray, np.ndarray]:
    """Each triple's shard, and a further number of its own; both follow from the triple and nothing else."""
    drawn = content(triples, seed, number)
    return drawn % many, drawn // many


def only(graph: Graph, rows: np.ndarray) -> Graph:
    """Some training triples of a graph under all of its names, and nothing else."""
    nothing = Split(np.zeros((0, 3), np.int32))
    return replace(graph, train=graph.train.at(np.flatnonzero(rows)), valid=nothing, test=nothing)


def taught(settings: Settings, graphs: Mapping[int, Graph], first: Tables) -> dict[int, Tables]:
    """Tables of each shard, trained on its triples alone, all from the same beginning; one that diverges has none."""
    each = sum(tensor.numel() for tensor in first.tensors().values())
    numbers, many = list(graphs), max(1, AT_ONCE // max(each, 1))
    found: dict[int, Tables] = {}
    for at in range(0, len(numbers), many):
        some = {number: graphs[number] for number in numbers[at : at + many]}
        try:
            found |= _taught(settings, some, first)
        except Diverged:  # one shard's triples may not change another's teacher: each alone, then
            for number, own in some.items():
                with suppress(Diverged):
                    found |= _taught(settings, {number: own}, first)
    return found


def _taught(settings: Settings, graphs: Mapping[int, Graph], first: Tables) -> dict[int, Tables]:
    many = len(graphs)
    stacked = Tables(
        torch.cat([first.entity] * many),
        torch.cat([first.relation] * many),
        tuple(torch.cat([shared] * many) for shared in first.shared),
    )
    fit = Fit(settings, list(graphs.values()), numbers=list(graphs), tables=stacked)
    for _ in range(settings.training.epochs):
        fit.epoch(np.ones(many, bool))
    fit.check_rows()
    return {number: fit.cohort.tables.party(fit.layout, place) for place, number in enumerate(graphs)}


@lru_cache
def noise_of(epsilon: float, delta: float, many: int) -> float:
    """The deviation at which so many Gaussian releases cost this; it takes seconds, and peers ask alike."""
    from tacit.privacy.accountant import Target, noise_for

    return noise_for(Target(epsilon, delta), lambda sigma: [Segment(Gaussian(sigma), many)])


def _more_names(vocab: Vocab, many: int) -> Vocab:
    """Names that come after all others, so that no id changes."""
    last = vocab[len(vocab) - 1] if len(vocab) else ""
    return Vocab.trusted([*vocab, *(f"{last}~{number:09d}" for number in range(many))])


def _row_keys(triples: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(triples.astype(">i4")).view("V12").reshape(-1)


def _has_marks(split: Split) -> bool:
    return split.confidential is not None or not len(split)
