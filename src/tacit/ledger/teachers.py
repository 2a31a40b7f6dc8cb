"""A provider whose triples teach, and are never trained into what it publishes (PATE, Papernot et al. 2017, 2018).

    teachers    each is trained, without noise, on a shard of the private triples. Which triple is in which shard
                follows from the triple, so one more or less changes one teacher
    questions   triples of a public graph's names, drawn from that graph or given. Which, and how many, is fixed before
                anything private is looked at
    votes       each question is asked once: how many teachers say yes, with normal noise. One triple changes one
                teacher, and so each count by 1 at most: a question is one `Gaussian` release
    student     is trained on the public graph and the questions that were answered yes; its rows are what is published

So what leaves follows from the public graph and the noisy counts, however teachers and student are trained.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from tacit.draws import Purpose, Secret, Stream, below
from tacit.errors import BadValue, TacitError
from tacit.evaluation.classification import threshold
from tacit.federation.keys import Identity
from tacit.graph import Graph, Split, UnknownName, Vocab
from tacit.ledger.cbor import CID
from tacit.ledger.ledger import Ledger
from tacit.ledger.provider import Provider, Shelf, Terms, first_tables
from tacit.ledger.record import Claim
from tacit.models import Tables
from tacit.models.model import Model
from tacit.peers.learner import Trained, noise_of, only, shards, taught
from tacit.privacy.budget import Holding
from tacit.privacy.events import Gaussian, Segment, Spent, joined
from tacit.privacy.pate import GaussianVotes
from tacit.privacy.privatizers import NoPrivacy
from tacit.settings import Settings
from tacit.tensors import parse_tensors
from tacit.training import Fit, chosen_device

Tensor = Any
ATTEMPTS = 64
"""Times that questions are drawn before there are too few of them."""
HELD, FALSE, FEW = 5, 2, 8
"""One in so many of a teacher's triples is held out for its thresholds, beside so many for each that are likely false;
and a relation with so many has its own threshold."""
PUBLIC_LIST = "the public graph and the candidates: they are taken to owe nothing to the triples"


MOST_TEACHERS = 10_000
"""Each has rows of its own for every public name."""


@dataclass(frozen=True)
class Pate:
    """How a provider's triples vote.

    Attributes
    ----------
    teachers
        Among how many the triples are divided. More of them hear less noise, and have fewer triples each.
    votes
        Questions that are asked for each update.
    epsilon, sigma, delta
        What the questions of all updates may cost, or the deviation of the noise of each.
    agree
        The share of the teachers that a noisy count has to be above for a yes. It costs nothing.
    """

    teachers: int = 100
    votes: int = 100
    epsilon: float | None = None
    sigma: float | None = None
    delta: float = 1e-5
    agree: float = 0.5

    def __post_init__(self) -> None:
        for name, least in (("teachers", 2), ("votes", 1)):
            if getattr(self, name) < least:
                raise BadValue(f"{name} is at least {least}, not {getattr(self, name)}")
        if self.teachers > MOST_TEACHERS:
            raise BadValue(f"teachers are at most {MOST_TEACHERS:,}, not {self.teachers:,}")
        if (self.epsilon is None) == (self.sigma is None):
            raise BadValue("say what all votes may cost (epsilon) or the noise of each (sigma), and not both")
        if not 0 < self.delta < 1 or not 0 < self.agree < 1:
            raise BadValue("delta, and the share of teachers that have to agree, are above 0 and below 1")

    def noise(self, updates: int) -> float:
        """The deviation with which the votes of so many updates cost what they may."""
        if self.sigma is not None:
            return self.sigma
        assert self.epsilon is not None
        return noise_of(self.epsilon, self.delta, updates * self.votes)


# -- what is asked -----------------------------------------------------------------------------------------------------


def questions(public: Graph, count: int, seed: int, number: int = 0, candidates: Graph | None = None) -> np.ndarray:
    """(count, 3) triples of the public graph's names that it does not say itself, in the order they are asked in.

    They are drawn from it: a statement whose head or tail is that of another one of the same relation. Or they are
    those of `candidates`, in an order that is drawn.
    """
    stream, known = Stream(seed, Purpose.QUESTION, number), public.keys(public.statements.triples)
    if candidates is not None:
        try:
            found = renamed(candidates.statements.triples, candidates, public)
        except UnknownName as error:
            raise TacitError(f"a candidate has a name that the public graph does not have: {error}") from None
        found = _new(found, known, public)
        found = found[stream.permutation(len(found))]
    else:
        facts, found = public.train.triples.astype(np.int64), np.zeros((0, 3), np.int64)
        for attempt in range(ATTEMPTS):
            had = len(found)
            drawn = facts[stream.at(step=2 * attempt).integers(count, len(facts))]
            found = _new(np.concatenate([found, alike(drawn, facts, stream.at(step=2 * attempt + 1))]), known, public)
            if len(found) >= count or (attempt and len(found) == had):  # there are enough, or no more
                break
    if len(found) < count:
        where = "there are" if candidates is not None else "the public graph has room for"
        raise TacitError(
            f"{where} {len(found):,} questions that the public graph does not answer itself, and all updates ask "
            f"{count:,}: ask fewer (--votes, --updates), or give more"
        )
    return found[:count]


def alike(triples: np.ndarray, facts: np.ndarray, stream: Stream) -> np.ndarray:
    """Each triple with the head, or the tail, of a fact of the same relation in place of its own."""
    facts = facts[np.argsort(facts[:, 1], kind="stable")]
    first, last = (np.searchsorted(facts[:, 1], triples[:, 1], side) for side in ("left", "right"))
    words = stream.words(2 * len(triples)).reshape(-1, 2)
    other = facts[first + below(words[:, 0], last - first)]
    made, tails = triples.copy(), words[:, 1] & 1 == 1
    made[tails, 2], made[~tails, 0] = other[tails, 2], other[~tails, 0]
    return made


def _new(triples: np.ndarray, known: np.ndarray, graph: Graph) -> np.ndarray:
    """Each triple once, where it first stood, and none that is known."""
    keys = graph.keys(triples)
    first = np.sort(np.unique(keys, return_index=True)[1])
    return triples[first[~np.isin(keys[first], known)]]


def renamed(triples: np.ndarray, of: Graph, into: Graph) -> np.ndarray:
    """Triples of one graph by the ids of another; `UnknownName` if that lacks a name."""
    found = np.empty((len(triples), 3), np.int64)
    both = (of.entities, into.entities), (of.relations, into.relations)
    for column, (theirs, ours) in enumerate((*both, both[0])):
        found[:, column] = theirs.positions(ours)[triples[:, column]]
        if (missing := np.flatnonzero(found[:, column] < 0)).size:
            raise UnknownName(theirs[int(triples[missing[0], column])], ours.names)
    return found


# -- who answers -------------------------------------------------------------------------------------------------------


class Teachers:
    """Models of disjoint shards of a graph's training triples, each from the same beginning: rows of public facts.

    Parameters
    ----------
    graph, public
        The private one, and the one that questions are about.
    model
        The address that first rows follow from.
    """

    def __init__(self, graph: Graph, public: Graph, settings: Settings, model: CID, pate: Pate, number: int = 0):
        self.public, self.settings, self.model, self.number, self.many = public, settings, model, number, pate.teachers
        nothing = Split(np.zeros((0, 3), np.int32))
        names = Graph(Vocab([*public.entities, *graph.entities]), Vocab([*public.relations, *graph.relations]),
                      nothing, nothing, nothing)  # fmt: skip
        # Names are sorted in every graph, so that triples stay in their order.
        self.facts = renamed(public.train.triples, public, names)
        self.graph = replace(names, train=Split(renamed(graph.train.triples, graph, names).astype(np.int32)))
        self.shard, own = shards(self.graph.train.triples, self.many, settings.seed, number)
        self.held = own % HELD == 0

    def ayes(self, asked: np.ndarray) -> Tensor:
        """(n,) how many teachers say yes to each question, by the public graph's ids."""
        return self.answers(asked).sum(0)

    def answers(self, asked: np.ndarray) -> Tensor:
        """(teachers, n) bool. A teacher without triples, or whose training diverged, says no."""
        asked = renamed(asked, self.public, self.graph)
        learnt = {each: only(self.graph, (self.shard == each) & ~self.held) for each in range(self.many)}
        begin = self._begin()
        tables = taught(self.settings, {each: own for each, own in learnt.items() if len(own.train)}, begin)
        said = torch.zeros(self.many, len(asked), dtype=torch.bool)
        for each, own in learnt.items():
            held = self.graph.train.triples[(self.shard == each) & self.held].astype(np.int64)
            if each in tables or not len(own.train):
                said[each] = torch.from_numpy(self._answer(each, tables.get(each, begin), own, held, asked))
        return said

    def _begin(self) -> Tables:
        """Rows that follow from names and public facts."""
        settings, device = self.settings, chosen_device(self.settings.training.device)
        first = first_tables(settings.scorer, settings.dim, self.model, self.graph)
        fit = Fit(settings, [replace(self.graph, train=Split(self.facts.astype(np.int32)))], numbers=[self.number],
                  tables=first.like(lambda tensor: tensor.to(device)))  # fmt: skip
        for _ in range(settings.training.epochs):
            fit.epoch()
        fit.check_rows()
        return fit.cohort.tables

    def _answer(self, each: int, tables: Tables, own: Graph, held: np.ndarray, asked: np.ndarray) -> np.ndarray:
        """Whether the score of a question is above what tells this teacher's triples from others that look alike.

        Thresholds are of triples that it was not trained on, and of others, mostly false, that are made as questions
        are. All of it is of this shard, and of what is public.
        """
        model = Model(self.settings.scorer, tables)
        held = held[np.isin(held[:, 1], self.facts[:, 1])]  # of what relations is asked
        stream = Stream(self.settings.seed, Purpose.QUESTION, self.number, (1 << 31) + each)
        known = np.concatenate([self.facts, own.train.triples, held])
        false = alike(np.repeat(held, FALSE, 0), self.facts, stream)
        false = false[~np.isin(self.graph.keys(false), self.graph.keys(known))]
        rows = np.concatenate([held, false])
        scores, truth = self._scores(model, rows), np.arange(len(rows)) < len(held)
        elsewhere = threshold(scores, truth) if truth.any() and not truth.all() else np.inf
        bars = np.full(len(self.graph.relations), elsewhere)
        for relation in np.unique(held[:, 1]).tolist():
            here = rows[:, 1] == relation
            if truth[here].sum() >= FEW and not truth[here].all():
                bars[relation] = threshold(scores[here], truth[here])
        found: np.ndarray = self._scores(model, asked) >= bars[asked[:, 1]]
        return found

    def _scores(self, model: Model, triples: np.ndarray) -> np.ndarray:
        ids = torch.from_numpy(triples).to(model.tables.entity.device)
        with torch.no_grad():
            found: np.ndarray = model.score(*ids.unbind(1)).double().cpu().numpy()
        return found


# -- who publishes -----------------------------------------------------------------------------------------------------


class PateProvider(Provider):
    """A provider that publishes a student's rows, of the names of a public graph.

    What was answered, with noise, stands in the ledger beside the rows: a provider that comes back goes on with these
    labels, and asks nothing twice.

    Parameters
    ----------
    graph
        What teaches: its training triples. Nothing else of it is looked at.
    public
        What the student is trained on, and judged by if it has validation triples.
    settings
        Of teachers and student alike; without privacy, because votes are what protects.
    candidates
        Triples to ask; default: drawn from the public graph.
    """

    def __init__(
        self,
        ledger: Ledger,
        model: str,
        who: Identity,
        graph: Graph,
        public: Graph,
        settings: Settings,
        pate: Pate,
        terms: Terms | None = None,
        *,
        candidates: Graph | None = None,
        number: int = 0,
        holding: Holding | None = None,
        shelf: Shelf | None = None,
        first: Tables | None = None,
    ):
        terms = terms or Terms()
        if not isinstance(settings.privacy, NoPrivacy):
            raise TacitError("votes are what protects here, and teachers train without noise: leave out privacy.name")
        if terms.validation not in (None, "public", "none"):
            raise TacitError("a student is judged by public triples: validation is public or none")
        if not len(public.train):
            raise TacitError("the public graph has no training triples, and a student begins with these")
        if terms.validation == "public" and not len(public.valid):
            raise TacitError("the public graph has no validation triples: set validation = none")
        for name, each in (("public graph", public), ("graph of candidates", candidates)):
            if each is not None and each.statements.confidential is not None and each.statements.confidential.any():
                raise TacitError(f"the {name} has statements that are marked confidential: leave them out")
        self.private_graph, self.public, self.pate = graph, public, pate
        most = pate.votes * terms.updates
        self.asked = questions(public, most, settings.seed, number, candidates)
        self.sigma = pate.noise(terms.updates)
        secret = Secret.simulation(settings.seed) if terms.noise == "seeded" else Secret.fresh()
        self.ballot = GaussianVotes(self.sigma, most, secret, number, pate.agree)
        self.labels = np.zeros(0, bool)
        """What was answered so far, in the order of the questions."""
        super().__init__(
            ledger, model, who, public, settings, terms, number=number, holding=holding, shelf=shelf, first=first
        )

    @property
    def protected(self) -> Graph:
        return self.private_graph

    @property
    def private(self) -> bool:
        return True

    @property
    def delta(self) -> float:
        return self.pate.delta

    @cached_property
    def teachers(self) -> Teachers:
        learner = self.learner
        return Teachers(self.private_graph, self.public, learner.settings, self.model, self.pate, learner.number)

    @cached_property
    def ayes(self) -> Tensor:
        """How many teachers say yes to each question: never shown to anybody."""
        return self.teachers.ayes(self.asked)

    @cached_property
    def _about_questions(self) -> str:
        digest = hashlib.sha256(self.public.fingerprint.encode())
        digest.update(self.asked.astype("<i8").tobytes())
        return digest.hexdigest()

    def _come_back(self) -> None:
        super()._come_back()
        votes, epochs, steps = self.pate.votes, 0, 0
        self.labels = np.zeros(0, bool)  # what stands in the ledger is all there is: a process may come back twice
        for number, node in enumerate(node for node in self.branch.nodes if node.by == self.who.public):
            _, words = parse_tensors(self.ledger.blobs.get(node.update.weights, node.update.size))
            labels = str(words.get("labels", ""))
            if words.get("questions") != self._about_questions or len(labels) != votes or set(labels) - set("01"):
                raise TacitError(
                    "earlier updates under this key were not made of votes on these questions: go on with the same "
                    "public graph, candidates, seed and numbers of votes and updates, or with another key"
                )
            self.labels = np.concatenate([self.labels, np.array(list(labels)) == "1"])
            more = self.terms.epochs if number else self.learner.settings.training.epochs
            batch = self.learner.settings.training.batch
            epochs, steps = epochs + more, steps + more * -(-len(self._taught_graph().train) // batch)
        self.ballot.votes, self.ballot.batches = len(self.labels), self.published
        if self.published:
            self.learner.learn_from(self._taught_graph(), (steps, epochs))

    def _taught_graph(self) -> Graph:
        """What a student is trained on: public facts, and questions that were answered yes."""
        return replace(self.public, train=self.public.train.plus(self.asked[: len(self.labels)][self.labels]))

    def train(self, tables: Tables) -> Trained:
        """Ask the next questions, and train the student; of what was asked and not published nobody knows."""
        first, votes = self.published * self.pate.votes, self.pate.votes
        if len(self.labels) == first:
            labels = self.ballot.labels(self.ayes[first : first + votes], self.pate.teachers)
            self.labels = np.concatenate([self.labels, labels.cpu().numpy()])
        said = "".join("01"[int(label)] for label in self.labels[first:])
        self.notes = {"questions": self._about_questions, "labels": said}
        self.learner.learn_from(self._taught_graph())
        return super().train(tables)

    def released(self, updates: int) -> Spent:
        return joined([Segment(Gaussian(self.sigma), updates * self.pate.votes)])

    def claim(self, holding: bytes = b"") -> Claim | None:
        return None if self.learner.simulated else Claim(self.costs(), holding=holding)

    def about(self) -> dict[str, Any]:
        mine = {"graph": self.private_graph.fingerprint, "public": self.public.fingerprint}
        return super().about() | mine | {"questions": self._about_questions, "pate": asdict(self.pate)}

    def statement(self) -> dict[str, Any]:
        found = super().statement()
        if "not_covered" in found:
            found["not_covered"].append(PUBLIC_LIST)
        return found
