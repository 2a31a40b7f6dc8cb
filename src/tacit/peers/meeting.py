"""Peers that meet in one process: a virtual clock, every message recorded, the same seed the same meeting.

Time is virtual: a step of training and a batch of a handshake take so many seconds at each peer's speed, a message so
many on its way. So a slow peer is slow, and one that never answers is one that never answers, on one machine and
without waiting for anybody.

Beside `meet` there are what it is compared with: `independent`, each peer alone; `continued`, each peer alone with as
many further trainings as it had in a meeting, the best kept; `unified`, one model of everything, aligned names being
one.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from tacit.errors import BadValue, TacitError
from tacit.evaluation.classification import classify_triples
from tacit.evaluation.ranking import Questions, rank, typed_candidates
from tacit.federation.messages import Message
from tacit.federation.transcript import Transcript
from tacit.graph import SPLITS, Graph, Split, assemble
from tacit.models import Tables
from tacit.models.model import Model
from tacit.parties import Parties, given
from tacit.peers.alignment import Alignment, by_intersection, by_links, thinned
from tacit.peers.learner import Learner, Pairing, vector_widths
from tacit.peers.peer import Peer
from tacit.privacy.pate import WHY_NONE, LaplaceVotes
from tacit.privacy.plan import NOT_COVERED, WITHOUT_BUDGET
from tacit.privacy.privatizers import Confidential, Sound
from tacit.settings import Settings

STEP, LATENCY = 1e-3, 0.01
"""Seconds of a step of training or of a batch at a peer of speed 1, and of a message on its way."""

NOR_COVERED = (
    "which names two peers have in common",
    "how long a peer takes to answer",
    "a triple that several peers hold: it costs each of them",
)
UNMARKED = "statements that are not marked confidential: everybody may know them"


@dataclass(frozen=True)
class Scores:
    """What a model is worth on a party's test triples: accuracy of telling them from corrupted ones; their ranks.

    typed: ranks among entities that the relation has in training triples on that side, as FKGE counts.
    """

    accuracy: float
    mrr: float
    hits1: float
    hits3: float
    hits10: float
    typed_mrr: float
    typed_hits1: float
    typed_hits3: float
    typed_hits10: float


class Meeting:
    """Peers, a clock, and a record of what they said.

    Parameters
    ----------
    speeds
        Of each peer, 1 by default; 0: it never gets anything done, and never answers.
    lost
        Which messages never arrive; default: none.
    """

    def __init__(
        self,
        peers: Sequence[Peer],
        transcript: Transcript,
        *,
        speeds: Mapping[int, float] | None = None,
        lost: Callable[[Message], bool] = lambda message: False,
    ):
        self.peers, self.transcript, self.lost = tuple(peers), transcript, lost
        self.speeds = {peer.number: 1.0 for peer in peers} | dict(speeds or {})
        if any(not (speed >= 0 and math.isfinite(speed)) for speed in self.speeds.values()):
            raise BadValue("a speed is a number, at least 0")
        self.now, self._begun = 0.0, False
        self._by_number = {peer.number: peer for peer in peers}
        self._events: list[tuple[float, int, Peer, Any]] = []
        self._order = itertools.count()
        self._alarms: dict[int, float] = {}

    def run(self, until: float = math.inf) -> None:
        """Let them meet until nobody has anything left to do, or time is up."""
        for peer in self.peers if not self._begun else ():
            self._after(peer, peer.begin())
        self._begun = True
        while self._events and self._events[0][0] <= until:
            self.now, _, peer, what = heapq.heappop(self._events)
            if what is None:
                self._alarms.pop(peer.number, None)
                said = peer.wake(self.now)
            elif isinstance(what, Message):
                said = peer.receive(what, self.now)
            else:
                said = peer.finish(what.run(), self.now)
            self._after(peer, said)

    def _after(self, peer: Peer, said: Sequence[Message]) -> None:
        """Send what it said, begin what it wants to have done, and set its alarm."""
        speed = self.speeds[peer.number]
        for message in said:
            if not speed:
                continue
            self.transcript.record(message)
            if not self.lost(message):
                work = STEP / speed if message.kind in ("generated", "gradient") else 0.0
                self._at(self.now + LATENCY + work, self._by_number[message.receiver], message)
        if (job := peer.take_job()) is not None and speed:
            self._at(self.now + job.steps * STEP / speed, peer, job)
        if (alarm := peer.alarm) < self._alarms.get(peer.number, math.inf) and speed:
            self._alarms[peer.number] = alarm
            self._at(alarm, peer, None)

    def _at(self, time: float, peer: Peer, what: Any) -> None:
        heapq.heappush(self._events, (max(time, self.now), next(self._order), peer, what))

    @property
    def history(self) -> list[dict[str, Any]]:
        """What all peers did, in the order of time. It tells of validation triples: for their owners."""
        return sorted((note for peer in self.peers for note in peer.history), key=lambda n: (n["time"], n["peer"]))

    def statement(self) -> list[dict[str, Any]]:
        """What is guaranteed to each peer; see `statement`."""
        return [statement(peer.learner) for peer in self.peers]

    def scores(self) -> list[Scores | None]:
        """Of each peer's kept model, on its test triples; None: it has no model, or nothing to test it with."""
        learners = [peer.learner for peer in self.peers]
        return [None if each.best is None else scored(each.model(), each.graph, each.settings) for each in learners]


def statement(peer: Learner, budget: str | None = None) -> dict[str, Any]:
    """What is guaranteed to a peer, and what is not. Only sound mode with secret noise has an epsilon.

    In sound mode it is that of everything the peer may ever release in the meeting, fixed before it began. `budget`:
    the holding that keeps account of other meetings and trainings.
    """
    pairing = peer.pairing
    if pairing.mode == "published":
        assert isinstance(peer.votes, LaplaceVotes)
        return {
            "guarantee": "none",
            "epsilon": None,
            "why": ["no formal guarantee", *WHY_NONE],
            "published accounting": peer.votes.accounting(pairing.delta),
        }
    from tacit.privacy.accountant import epsilon

    privacy = peer.settings.privacy
    delta = privacy.delta if isinstance(privacy, Sound) else pairing.delta
    reserved, spent = peer.spent(reserved=True), peer.spent()
    found = max(epsilon(each, delta) for each in reserved.values())
    unit = "one triple"
    if isinstance(privacy, Sound) and privacy.unit == "group":
        unit = f"one group of at most {privacy.group} triples"
    marked = isinstance(privacy, Confidential) or "public" in (pairing.virtual, peer.validation)
    rows = "noisy votes of teachers on disjoint triples" if peer.votes is not None else "nothing"
    if peer.private_rows:
        rows = "its rows, trained privately"
    return {
        "guarantee": "none: a simulation" if peer.simulated else "differential privacy",
        "epsilon": None if peer.simulated else found,
        "simulated_epsilon": found if peer.simulated else None,
        "delta": delta,
        "unit": f"{unit} {'of those marked confidential' if marked else 'of a peer'}",
        "what leaves": rows,
        "validation": {"paid": "paid looks, of validation triples", "public": "public validation triples"}.get(
            peer.validation, "nothing that leaves depends on validation triples"
        ),
        "releases": {name: [segment.json() for segment in each] for name, each in reserved.items()},
        "spent": {name: [segment.json() for segment in each] for name, each in spent.items()},
        "covers": "every message to other peers, and whatever they make of them",
        "not_covered": [
            *NOT_COVERED,
            *NOR_COVERED,
            *([UNMARKED] if marked else []),
            *([] if budget else [WITHOUT_BUDGET]),
        ],
    }


def scored(model: Model, graph: Graph, settings: Settings) -> Scores | None:
    """A model on a graph's test triples; None: there are none, or no validation triples for thresholds."""
    if not len(graph.test) or not len(graph.valid):
        return None
    wanted, asked = settings.evaluation, Questions(graph.test.triples, graph.statements.triples)
    figures = []
    for typed in (None, typed_candidates(graph)):
        ranks = rank(model, asked, sides=wanted.sides, memory_mb=wanted.memory_mb, typed=typed)
        found = ranks.metrics(wanted.ties)
        figures += [found.mrr, found.hits1, found.hits3, found.hits10]
    return Scores(classify_triples(model, graph, seed=settings.seed).accuracy, *figures)


# -- meetings, and what they are compared with -------------------------------------------------------------------------


def meet(
    parties: Parties,
    settings: Settings | Sequence[Settings],
    pairing: Pairing | None = None,
    *,
    alignment: Literal["links", "private"] = "links",
    transcript: Transcript | None = None,
    public: Mapping[int, np.ndarray] | None = None,
    speeds: Mapping[int, float] | None = None,
    lost: Callable[[Message], bool] = lambda message: False,
    until: float = math.inf,
) -> Meeting:
    """Let the parties learn from each other in pairs, without a server (FKGE, Peng et al. 2021).

    Parameters
    ----------
    settings
        How each party trains, or one for all of them: scorers and dimensions may differ.
    pairing
        How they learn from each other; default: sound mode.
    alignment
        links: by the parties' links, or equal names. private: by a private set intersection of their names.
    transcript
        Records every message; default: sizes alone.
    public
        By party: (n, 3) statements that everybody may know, for virtual = "public".
    speeds, lost, until
        See `Meeting`; the virtual time at which everybody stops.
    """
    meeting = prepared(parties, settings, pairing or Pairing(), alignment=alignment,
                       transcript=Transcript() if transcript is None else transcript, public=public or {},
                       speeds=speeds, lost=lost)  # fmt: skip
    meeting.run(until)
    return meeting


def prepared(
    parties: Parties,
    settings: Settings | Sequence[Settings],
    pairing: Pairing,
    *,
    alignment: Literal["links", "private"],
    transcript: Transcript,
    public: Mapping[int, np.ndarray],
    speeds: Mapping[int, float] | None,
    lost: Callable[[Message], bool],
) -> Meeting:
    """The same before it begins."""
    each = _each(parties, settings)
    if alignment not in ("links", "private"):
        raise BadValue(f"alignment is links or private, not {alignment!r}")
    found = by_links(parties) if alignment == "links" else by_intersection(parties, transcript)
    common = thinned(found, pairing.share, pairing.parts, each[0].seed)
    common = _translatable(common, each)
    peers = [
        Peer(Learner(number, graph, each[number], common.get(number, {}), pairing, public.get(number)))
        for number, graph in enumerate(parties)
    ]
    return Meeting(peers, transcript, speeds=speeds, lost=lost)


def independent(parties: Parties, settings: Settings | Sequence[Settings], pairing: Pairing | None = None) -> Meeting:
    """Each peer alone: its first training, and nothing more."""
    return _alone(parties, settings, pairing or Pairing(), [0] * len(parties))


def continued(
    parties: Parties, settings: Settings | Sequence[Settings], pairing: Pairing, trainings: Sequence[int]
) -> Meeting:
    """Each peer alone, with so many further trainings, of which the best is kept: what a meeting has to beat."""
    return _alone(parties, settings, pairing, trainings)


def _alone(
    parties: Parties, settings: Settings | Sequence[Settings], pairing: Pairing, trainings: Sequence[int]
) -> Meeting:
    peers = []
    for number, (graph, own) in enumerate(zip(parties, _each(parties, settings), strict=True)):
        many = trainings[number]
        wanted = replace(pairing, trainings=many, patience=many, idle="train")
        peers.append(Peer(Learner(number, graph, own, {}, wanted)))
    meeting = Meeting(peers, Transcript())
    meeting.run()
    return meeting


def unified(parties: Parties, settings: Settings, *, pairing: Pairing | None = None) -> list[Scores | None]:
    """One model of all triples, aligned names being one thing; what it is worth to each party, among its own entities.

    It has a first training alone; by a pairing all further ones too, of which the best is kept. Nobody may do this: all
    triples are in one place.
    """
    if settings.privacy.sound:
        raise TacitError("pooled triples are seen by whoever pools them: privacy is for parties that keep theirs")
    whole, entity, relation = united(parties)
    wanted = pairing or Pairing(mode="published", trainings=0)
    meeting = continued(given({"all": whole}), settings, wanted, [wanted.trainings])
    tables, found = meeting.peers[0].learner.kept, []
    for party, graph in enumerate(parties):
        rows = Tables(tables.entity[entity[party]], tables.relation[relation[party]], tables.shared)
        found.append(scored(Model(settings.scorer, rows), graph, settings))
    return found


def united(parties: Parties) -> tuple[Graph, list[np.ndarray], list[np.ndarray]]:
    """All triples in one graph, and the ids there of each party's entities and relations.

    A test triple of one party may be a training triple of another: such are left out of the training triples.
    """
    entity, entities = _classes(parties, "entity")
    relation, relations = _classes(parties, "relation")
    names = [f"e{number:09d}" for number in range(entities)] + [f"r{number:09d}" for number in range(relations)]
    splits: dict[Any, Split] = {}
    for split in SPLITS:
        rows = []
        for party, graph in enumerate(parties):
            h, r, t = graph.splits[split].triples.T
            rows.append(np.stack([entity[party][h], entities + relation[party][r], entity[party][t]], 1))
        splits[split] = Split(np.unique(np.concatenate(rows).astype(np.int32), axis=0))
    held = np.concatenate([splits["valid"].triples, splits["test"].triples])
    train, others = (np.ascontiguousarray(rows).view("V12").reshape(-1) for rows in (splits["train"].triples, held))
    splits["train"] = Split(splits["train"].triples[~np.isin(train, others)])
    everything = np.arange(entities, dtype=np.int32), entities + np.arange(relations, dtype=np.int32)
    graph = assemble(names, splits, entities=everything[0], relations=everything[1], checked=True)[0]
    return graph, entity, relation


def _classes(parties: Parties, kind: Literal["entity", "relation"]) -> tuple[list[np.ndarray], int]:
    """For each party the number of the thing that each of its names means, and how many things there are."""
    sizes = [len(graph.entities if kind == "entity" else graph.relations) for graph in parties]
    start = np.cumsum([0, *sizes])
    root = np.arange(start[-1])
    pairs = []
    for one, other in itertools.combinations(range(len(parties)), 2):
        here, there = parties.shared(one, other, kind)
        pairs.append(np.stack([start[one] + here, start[other] + there], 1))
    edges = np.concatenate(pairs) if pairs else np.zeros((0, 2), np.int64)
    while True:  # the least number of everything that is linked, step by step
        before = root.copy()
        least = np.minimum(root[edges[:, 0]], root[edges[:, 1]])
        for end in (0, 1):
            np.minimum.at(root, edges[:, end], least)
        root = root[root]
        if (root == before).all():
            break
    _, which = np.unique(root, return_inverse=True)
    return [which[start[i] : start[i + 1]] for i in range(len(parties))], int(which.max(initial=-1)) + 1


def _each(parties: Parties, settings: Settings | Sequence[Settings]) -> list[Settings]:
    found = [settings] * len(parties) if isinstance(settings, Settings) else list(settings)
    if len(found) != len(parties):
        raise BadValue(f"{len(found)} settings for {len(parties)} parties: one for all, or one for each")
    return found


def _translatable(common: Alignment, settings: Sequence[Settings]) -> Alignment:
    """Without relations, where those of one side are no vectors in the space of its entities."""
    has = [vector_widths(each.scorer, each.dim)[1] is not None for each in settings]
    made: Alignment = {}
    for one, own in common.items():
        kept = {o: a if has[one] and has[o] else replace(a, relation=a.relation[:0]) for o, a in own.items()}
        made[one] = {other: aligned for other, aligned in kept.items() if len(aligned)}
    return made
