"""Reconstruction of a victim's graph from rows: which entity is this row, and what holds between these two?

Zhang, Wang, Wang, Cui and Sun: "Efficient federated learning on knowledge graphs via privacy-preserving relation
embedding aggregation" (FedR), Findings of EMNLP 2022, section 3.1 and Algorithm 2. The server and one party, the
traitor, work together: the traitor gives a share of its names with their rows, and the victim's rows are named after
those that they are most alike. Pairs of rows say what the relation between them would be, which is named likewise.

The paper's server knows no names, so the victim's rows are nameless here, and what the victim told the server of its
names is not looked at. (With an open vocabulary a real server need not attack at all: it was told.)

One definition for every recipe, which the authors' code does not have: ERR = victim entities named right / victim
entities; TRR = victim training triples whose head, relation and tail all come out right / victim training triples,
where every ordered pair of rows is claimed with one relation.

`Held` is what the attacker has, `Claims` what it says, `Rates` how much of that is right: only `measured`, which
makes the last of the second, is shown the truth.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch

from tacit.attacks import seen
from tacit.attacks.membership import is_translation, relation_vectors
from tacit.attacks.seen import Nothing
from tacit.draws import Purpose, Stream
from tacit.errors import BadValue, TacitError
from tacit.federated import FederatedRun
from tacit.federation.transcript import Adversary, Role, Transcript, View
from tacit.graph import Graph, Vocab
from tacit.models import Part, Scorer
from tacit.models.bilinear import ComplEx, DistMult
from tacit.models.translational import RotatE, TransE
from tacit.training import chosen_device

LOG = logging.getLogger(__name__)
Tensor = Any
NAMELESS = "the victim's entity rows without names"
HOW_MANY = "the number of the victim's training triples"
ENTITIES, RELATIONS, SHUFFLED, SAMPLED = 3, 4, 5, 6
"""Steps of the draws for targets: which pairs the traitor gives, the order of nameless rows, pairs that are tried."""
AT_ONCE = {"cpu": 1 << 23, "cuda": 1 << 26}
"""Numbers that are held at once where all pairs would be too many."""
ROUNDING = 1e-6
"""Matrix products of other shapes may round a cosine differently, by no more than that."""
TRIED = 1_000_000
"""Pairs that a threshold is found by on a CPU, where there are more."""


# -- what the attacker has ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Held:
    """What server and traitor put together.

    Attributes
    ----------
    rows
        The victim's entity rows, of which no one knows the names; in whatever order.
    entity, relation
        The traitor's rows, in the order of its names.
    kinds
        The victim's relation rows, nameless too, where those are seen. None: they stay with the victim, and the
        traitor's take their place.
    triples
        How many training triples the victim has, where that was told.
    """

    scorer: Scorer
    rows: Tensor
    entities: Vocab
    entity: Tensor
    relations: Vocab
    relation: Tensor
    kinds: Tensor | None = None
    triples: int | None = None


def held(view: View, victim: int, number: int) -> Held:
    """What a view has of a round: rows as they were sent after training, and the traitor's own."""
    known, me = seen.known(view), view.adversary.party
    if "server" not in view.adversary.role or me is None:
        raise Nothing("a server and a party attack together here: one has the rows, the other names")
    if victim == me or not 0 <= victim < known.parties:
        raise TacitError(f"the victim is another of the {known.parties} parties than the traitor, not {victim}")
    theirs, ours, graph = seen.sent(view, victim, number), seen.sent(view, me, number), seen.own_graph(view)
    mine, triples = seen.own(view, number), view.leaks.get(HOW_MANY)
    if known.part == "entity":
        relation = mine["relation"][: len(graph.relations)]  # inverse relations, if any, come after
        return Held(known.scorer, theirs, graph.entities, ours, graph.relations, relation, triples=triples)
    if NAMELESS not in view.leaks:
        raise Nothing("entity rows do not travel here, and the server was not given any")
    kinds = theirs[: len(theirs) // (2 if known.reciprocal else 1)]
    return Held(known.scorer, view.leaks[NAMELESS], graph.entities, mine["entity"], graph.relations,
                ours[: len(graph.relations)], kinds, triples)  # fmt: skip


def nameless_rows(transcript: Transcript, victim: int, number: int, *, seed: int = 0) -> tuple[Tensor, np.ndarray]:
    """A victim's entity rows in an order of chance: to be declared as a leak, `NAMELESS`.

    And that order, each row's entity: for `measured`, and no one else.
    """
    if (rows := transcript.memories.get((number, victim), {}).get("entity")) is None:
        raise Nothing(f"party {victim}'s own entity rows of round {number} were not kept, or it did not train")
    order = np.asarray(Stream(seed, Purpose.TARGETS, victim, SHUFFLED).permutation(len(rows)))
    return rows[torch.from_numpy(order)], order


# -- what it says ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Inferred:
    """What holds between two of the victim's rows: the relation whose row is most alike what they say it would be."""

    scorer: Scorer
    rows: Tensor
    kinds: Tensor
    """Directions of relation rows, of length 1."""
    ids: np.ndarray
    """Which relation each of them is taken for."""

    def of(self, head: np.ndarray, tail: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The relation of each pair of rows, and how alike it is: a cosine, 0 where a pair says nothing."""
        which, alike = np.empty(len(head), np.int64), np.empty(len(head), np.float32)
        for first in range(0, len(head), self._step):
            part = slice(first, first + self._step)
            found, best = self._best(*(torch.from_numpy(ids[part].astype(np.int64)) for ids in (head, tail)))
            which[part], alike[part] = best.cpu().numpy(), found.cpu().numpy()
        return self.ids[which], alike

    def threshold(self, count: int, *, pairs: int | None = None, seed: int = 0) -> Top:
        """How alike the best `count` of all ordered pairs are at least; `pairs`: by so many drawn at random."""
        many, device = len(self.rows) ** 2, self.rows.device
        if pairs is None and device.type == "cpu":
            pairs = TRIED
        sampled = pairs is not None and pairs < many
        total = int(pairs or 0) if sampled else many
        keep = min(total, max(1, round(count * total / many)))
        top = torch.full((0,), -1.0, device=device)
        draw = Stream(seed, Purpose.TARGETS, 0, SAMPLED)
        for first in range(0, total, self._step):
            size = min(self._step, total - first)
            if sampled:
                which = torch.from_numpy((np.asarray(draw.uniform(size, first)) * many).astype(np.int64)).to(device)
            else:
                which = torch.arange(first, first + size, device=device)
            found = self._best(which // len(self.rows), which % len(self.rows))[0]
            if len(top) == keep:
                found = found[found > top[-1]]
            top = torch.cat([top, found])
            top = top.topk(min(keep, len(top))).values
        return Top(float(top[-1]), min(count, many), total)

    @property
    def _step(self) -> int:
        return max(1, AT_ONCE[str(self.rows.device.type)] // max(int(self.rows.shape[1]), len(self.kinds)))

    def _best(self, head: Tensor, tail: Tensor) -> tuple[Tensor, Tensor]:
        device = self.rows.device
        vectors = inverse(self.scorer, self.rows[head.to(device)], self.rows[tail.to(device)])
        found, best = (_unit(vectors) @ self.kinds.T).max(1)
        return found, best


@dataclass(frozen=True)
class Top:
    """The most alike of all pairs: how alike at least, how many these are, and how many pairs that was found by."""

    alike: float
    claimed: int
    tried: int


@dataclass(frozen=True)
class Claims:
    """What an attack says of the victim's rows, in the order in which it has them.

    Attributes
    ----------
    name
        (rows,) which of `entities` each row is taken for.
    alike
        (rows,) how alike the two rows are: a cosine.
    sure
        (rows,) whether no other row is more alike that name's: the natural threshold, for it needs no number. The
        others would have a name that another row has a better right to.
    relation
        What holds between any two rows.
    top
        A threshold for triples: as many pairs as the victim has training triples, where that was told.
    given_entities, given_relations
        What the traitor gave: no other name can be right.
    """

    entities: Vocab
    relations: Vocab
    name: np.ndarray
    alike: np.ndarray
    sure: np.ndarray
    relation: Inferred
    given_entities: np.ndarray
    given_relations: np.ndarray
    top: Top | None = None


@dataclass(frozen=True)
class Reconstruction:
    """The attack (Zhang et al. 2022, Algorithm 2).

    FedE: the victim's entity rows are seen as they are sent. The relation of a pair is inverted from the score, and
    compared with the relation rows that the traitor gives. FedR: relation rows are seen, and named after the traitor's;
    entity rows stay with the victim, so all of them are *given* to the server without their names, a declared leak.

    leak: the share of its names that the traitor gives with their rows; a larger share has all of a smaller one.
    pairs: by so many pairs, drawn at random, the threshold of triples is found; default: all on a GPU, a million
    elsewhere.
    """

    roles: ClassVar[tuple[Role, ...]] = ("server+party",)
    leaks: ClassVar[tuple[str, ...]] = (NAMELESS, HOW_MANY)
    """Without the first FedR gives it nothing; without the second there is no threshold of triples."""
    leak: float = 1.0
    seed: int = 0
    pairs: int | None = None
    device: str = "cpu"

    def __post_init__(self) -> None:
        if not 0 < self.leak <= 1:
            raise BadValue(f"the traitor gives a share above 0 and at most 1, not {self.leak}")
        if self.pairs is not None and self.pairs < 1:
            raise BadValue(f"pairs is at least 1, not {self.pairs}")
        chosen_device(self.device)

    def claims(self, view: View, victim: int, number: int) -> Claims:
        """From what a view has of a round."""
        return self.of(held(view, victim, number))

    def of(self, what: Held) -> Claims:
        """From what was put together."""
        inverse(what.scorer, what.rows[:0], what.rows[:0])  # or there is nothing to say of relations
        if how_inverted(what.scorer) != "exact":
            LOG.warning("%s cannot be inverted: the relation of two rows is a direction, and may say little",
                        type(what.scorer).__name__)  # fmt: skip
        given, kinds = self._given(len(what.entities), ENTITIES), self._given(len(what.relations), RELATIONS)
        device = chosen_device(self.device)
        rows = what.rows.to(device)
        name, alike, sure = nearest(rows, what.entity[torch.from_numpy(given)].to(device))
        known = directions(what.scorer, what.relation[torch.from_numpy(kinds)].to(device))
        if what.kinds is None:
            relation = Inferred(what.scorer, rows, _unit(known), kinds)
        else:
            theirs = directions(what.scorer, what.kinds.to(device))
            relation = Inferred(what.scorer, rows, _unit(theirs), kinds[nearest(theirs, known)[0]])
        claims = Claims(what.entities, what.relations, given[name], alike, sure, relation, given, kinds)
        if what.triples is None:
            return claims
        return replace(claims, top=relation.threshold(what.triples, pairs=self.pairs, seed=self.seed))

    def _given(self, many: int, step: int) -> np.ndarray:
        """What the traitor gives of so many."""
        order = np.asarray(Stream(self.seed, Purpose.TARGETS, 0, step).permutation(many))
        return np.sort(order[: max(1, int(self.leak * many + 0.5))])


def reconstruct(
    view: View, number: int, *, victim: int, leak: float = 1.0, seed: int = 0, device: str = "cpu"
) -> Claims:
    """What the attack claims of a victim, by what was seen of a round. See `Reconstruction`."""
    return Reconstruction(leak, seed, device=device).claims(view, victim, number)


def nearest(rows: Tensor, known: Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For each row: the known row of the largest cosine, that cosine, and whether no other row has a larger with it."""
    known = _unit(known)
    which, alike, step = [], [], max(1, AT_ONCE[rows.device.type] // len(known))
    best, owner = (torch.full((len(known),), value, device=rows.device) for value in (-torch.inf, -1))
    for first in range(0, len(rows), step):
        cosines = _unit(rows[first : first + step]) @ known.T
        found, place = cosines.max(1)
        which.append(place)
        alike.append(found)
        highest, row = cosines.max(0)
        owner = torch.where(highest > best, row + first, owner)
        best = torch.maximum(best, highest)
    place = torch.cat(which)
    sure = owner[place] == torch.arange(len(rows), device=rows.device)
    return place.cpu().numpy(), torch.cat(alike).cpu().numpy(), sure.cpu().numpy()


def inverse(scorer: Scorer, head: Tensor, tail: Tensor) -> Tensor:
    """What a relation between two entities would be, as `directions` has it: the r that maximises f(h, r, t).

    The difference for TransE, the turn for RotatE. A score that is linear in r has no such r, but a direction in which
    it grows fastest: h t for DistMult, conj(h) t for ComplEx, by numbers. The cosine with that is the score itself, by
    the lengths of both.
    """
    if isinstance(scorer, ComplEx):
        (a, b), (c, d) = head.chunk(2, -1), tail.chunk(2, -1)
        return torch.cat([a * c + b * d, a * d - b * c], -1)
    if isinstance(scorer, DistMult):
        return head * tail
    if isinstance(scorer, (TransE, RotatE)):
        return relation_vectors(scorer, head, tail)
    raise Nothing(f"{type(scorer).__name__} does not say what the relation between two rows would be")


def directions(scorer: Scorer, relation: Tensor) -> Tensor:
    """Relation rows as they are compared: without what is given and not learned; RotatE's as points on circles.

    Angles that differ by a whole turn are the same, which a cosine of the angles would not know.
    """
    if isinstance(scorer, RotatE):
        angle = scorer.angles(relation)
        return torch.cat([angle.cos(), angle.sin()], -1)
    return relation[..., : relation.shape[-1] - scorer.frozen]


def how_inverted(scorer: Scorer) -> str:
    """Whether a pair of rows says what its relation is, or a direction has to do."""
    return "exact" if is_translation(scorer) else "fallback: the direction in which the score grows fastest"


# -- how much of it is right -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Count:
    """How many of the claims are right, how many were made, and how many there was to find."""

    right: int
    claimed: int
    total: int

    @property
    def rate(self) -> float | None:
        """The share of what there was to find; None: there was nothing."""
        return self.right / self.total if self.total else None

    @property
    def precision(self) -> float | None:
        """The share of what was claimed; None: nothing was."""
        return self.right / self.claimed if self.claimed else None

    def json(self) -> dict[str, Any]:
        return self.__dict__ | {"rate": self.rate, "precision": self.precision}


@dataclass(frozen=True)
class Rates:
    """What an attack's claims are worth.

    Attributes
    ----------
    entities, triples
        Their rates are ERR and TRR. Every row is named, and every ordered pair of rows claimed with one relation.
    sure_entities, top_triples
        Of claims beyond a threshold alone; see `Claims`.
    relations
        Pairs of the victim's training triples whose relation comes out right, whatever the names.
    known_entities, known_triples
        How many could be right at all: the traitor gave their names.
    chance
        ERR and TRR of names and relations drawn at random from those the traitor gave; and the share of the commonest
        relation, which a guess has `relations` right by.
    """

    entities: Count
    sure_entities: Count
    triples: Count
    top_triples: Count | None
    relations: Count
    known_entities: int
    known_triples: int
    chance: dict[str, float]

    @property
    def err(self) -> float | None:
        return self.entities.rate

    @property
    def trr(self) -> float | None:
        return self.triples.rate

    @property
    def err_of_known(self) -> float | None:
        """ERR over those entities that the traitor gave the names of."""
        return self.entities.right / self.known_entities if self.known_entities else None

    def json(self) -> dict[str, Any]:
        counts = {name: getattr(self, name) for name in COUNTS}
        return {
            "err": self.err,
            "trr": self.trr,
            "err_of_known": self.err_of_known,
            "known_entities": self.known_entities,
            "known_triples": self.known_triples,
            "chance": dict(self.chance),
        } | {name: None if count is None else count.json() for name, count in counts.items()}


COUNTS = ("entities", "sure_entities", "triples", "top_triples", "relations")


def measured(claims: Claims, truth: Graph, order: np.ndarray | None = None) -> Rates:
    """How much of the claims is right. `order`: each row's entity; default: the order of the names, as rows are sent.

    Of all pairs only those of training triples are looked at: of the others no claim is right.
    """
    rows = len(truth.entities)
    order = np.arange(rows) if order is None else np.asarray(order)
    if len(claims.name) != rows or not np.array_equal(np.sort(order), np.arange(rows)):
        raise BadValue(f"claims of {len(claims.name)} rows for {rows} entities, or an order that is none of these")
    place, kind = claims.entities.positions(truth.entities), claims.relations.positions(truth.relations)
    known = np.zeros(rows, bool)
    known[(there := place[claims.given_entities])[there >= 0]] = True  # by the victim's entities
    right = place[claims.name] == order  # by rows
    row = np.argsort(order)
    h, r, t = truth.train.triples.T
    found, alike = claims.relation.of(row[h], row[t])
    related = kind[found] == r
    whole = right[row[h]] & right[row[t]] & related
    could = known[h] & known[t] & np.isin(r, kind[claims.given_relations])
    top = None
    if claims.top is not None:
        top = Count(int((whole & (alike >= claims.top.alike - ROUNDING)).sum()), claims.top.claimed, len(r))
    names, relations = len(claims.given_entities), len(claims.given_relations)
    guess = could / (relations * np.where(h == t, names, float(names) ** 2))
    chance = {
        "err": float(known.mean()) / names,
        "trr": float(guess.mean()) if len(r) else 0.0,
        "commonest_relation": float(np.bincount(r).max() / len(r)) if len(r) else 0.0,
    }
    return Rates(
        Count(int(right.sum()), rows, rows),
        Count(int((right & claims.sure).sum()), int(claims.sure.sum()), rows),
        Count(int(whole.sum()), rows * rows, len(r)),
        top,
        Count(int(related.sum()), len(r), len(r)),
        int(known.sum()),
        int(could.sum()),
        chance,
    )


# -- a whole federation ------------------------------------------------------------------------------------------------


def attack_reconstruction(
    run: FederatedRun,
    *,
    traitor: int = 0,
    victims: Sequence[int] | None = None,
    leaks: Sequence[float] | None = None,
    number: int | None = None,
    seed: int = 0,
    device: str = "cpu",
    pairs: int | None = None,
) -> list[dict[str, Any]]:
    """Attack a finished federation whose messages were kept (federation.keep_every), for every victim and leak.

    Parameters
    ----------
    leaks
        Shares of the traitor's names with their rows; default: the paper's, 0.3, 0.5 and 1 where entity rows are
        shared, 1 where relation rows are.
    number
        The round; default: the last that was kept.

    Beside each result stands the same attack on first rows, before any training (`control`). In FedE everybody begins
    with the same row of an entity: names follow from that alone, and training only blurs them. Relations do not.
    """
    view = run.view(Adversary("server+party", traitor))
    kept = seen.kept_rounds(view)
    if number is None:
        if not kept and view.known is not None:
            raise TacitError("no round's messages were kept: set federation.keep_every")
        number = max(kept, default=0)
    entities = view.known is None or view.known.part == "entity"
    if leaks is None:
        leaks = (0.3, 0.5, 1.0) if entities else (1.0,)
    if victims is None:
        victims = [party for party in range(len(run.parties)) if party != traitor]
    found: list[dict[str, Any]] = []
    for victim in victims:
        if victim == traitor or not 0 <= victim < len(run.parties):
            raise TacitError(f"the victim is another of the {len(run.parties)} parties than the traitor, not {victim}")
        truth, names = run.parties[victim], run.parties.names
        for leak in leaks:
            how = Reconstruction(leak, seed, pairs, device)
            about = {"attack": "reconstruction", "recipe": run.recipe, "adversary": "server+party", "round": number,
                     "traitor": names[traitor], "victim": names[victim], "leak": leak}  # fmt: skip
            told: dict[str, Any] = {HOW_MANY: len(truth.train)}
            try:
                order = None
                if not entities:
                    told[NAMELESS], order = nameless_rows(run.transcript, victim, number, seed=seed)
                claims = how.claims(replace(view, leaks=told), victim, number)
            except Nothing as nothing:
                found.append(about | {"err": None, "trr": None, "nothing": str(nothing)})
                continue
            assert view.known is not None
            assert claims.top is not None
            begun = measured(how.of(first_rows(run, traitor, victim)), truth)
            control = {"at": "first rows, before any training"} | {
                name: getattr(begun, name) for name in ("err", "trr", "err_of_known")
            }
            about |= {"scorer": type(view.known.scorer).__name__, "inverse": how_inverted(view.known.scorer),
                      "told": sorted(told), "pairs_tried": claims.top.tried, "control": control}  # fmt: skip
            found.append(about | measured(claims, truth, order).json())
    return found


def first_rows(run: FederatedRun, traitor: int, victim: int) -> Held:
    """What server and traitor would hold before any training: to be told from what training gives away."""
    known = run.view(Adversary("server")).known
    assert known is not None
    whole = Vocab(name for graph in run.parties for name in _names(graph, known.part))

    def begin(part: Part, party: int) -> Tensor:
        names = _names(run.parties[party], part)
        if part != known.part:
            return _begin(known.scorer, known.dim, part, len(names), seed=run.settings.seed, party=party)
        shared = _begin(known.scorer, known.dim, part, len(whole), seed=run.settings.seed, party=0)
        return shared[torch.from_numpy(names.positions(whole).astype(np.int64))]

    ours = run.parties[traitor]
    kinds = begin("relation", victim) if known.part == "relation" else None
    return Held(known.scorer, begin("entity", victim), ours.entities, begin("entity", traitor), ours.relations,
                begin("relation", traitor), kinds)  # fmt: skip


def _names(graph: Graph, part: str) -> Vocab:
    """What a party's rows of a part are of."""
    return graph.entities if part == "entity" else graph.relations


def _begin(scorer: Scorer, dim: int, part: Part, rows: int, *, seed: int, party: int) -> Tensor:
    """As `Tables.begin` and the server draw them."""
    which = 0 if part == "entity" else 1
    made = scorer.initial(part, rows, scorer.widths(dim)[which], dim, Stream(seed, Purpose.INIT, party, which))
    return scorer.constrain(part, made)


def _unit(rows: Tensor) -> Tensor:
    return torch.nn.functional.normalize(rows.float(), dim=-1)
