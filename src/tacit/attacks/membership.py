"""Membership attacks on a federation: is this triple in the victim's training set?

Hu, Liu, Chen, Wang and Zhu: "Quantifying and defending against privacy threats on federated knowledge graph embedding"
(DP-FLames), WWW 2023, section 3. An attack is given a view of what its adversary saw, and candidates; it gives scores,
larger for members, by one or several ways. The first way is the paper's, as far as the paper says it.

si    a curious server clusters what relations could be between the victim's entities (passive)
cip   a curious party looks at what the others make of the rows it shares with them (passive)
cia   a malicious party turns a tail round, and watches who pulls it back (active: it changes the training)

Not the paper's: counts looks at noisy counts, where those are released (S4); blind looks at nothing that was sent, and
says what targets' kind alone gives away.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from tacit.attacks import seen
from tacit.attacks.seen import Candidates, Nothing
from tacit.draws import Purpose, Stream
from tacit.errors import TacitError
from tacit.federation.messages import SERVER
from tacit.federation.transcript import Role, View
from tacit.graph import Graph
from tacit.models import Scorer
from tacit.models.scorer import DistanceScorer
from tacit.models.tables import popularity
from tacit.models.translational import RotatE, Translation

Tensor = Any
Scores = dict[str, np.ndarray]
TINY = 1e-12
REST = "what the victim's other triples add to the cells of each target"
"""A leak."""
FEW = 10
"""Pairs that a cluster has at least if it is concentrated at all: those of one pair are as close as can be."""
ON_A_CPU = 200_000
"""Pairs of entities that are clustered where there is no GPU."""
AT_ONCE = {"cpu": 1 << 18, "cuda": 1 << 22}
"""Pairs of entities whose vectors are made at once."""


@dataclass(frozen=True)
class Attack:
    """Base: who attacks, and what it takes."""

    roles: ClassVar[tuple[Role, ...]]
    """Adversaries that can do it, the paper's first."""
    active: ClassVar[bool] = False
    """Whether the adversary deviates from the protocol, so that a training of its own is needed."""
    leaks: ClassVar[tuple[str, ...]] = ()
    """What it is told beyond its view, if anything."""

    def scores(self, view: View, candidates: Candidates, number: int) -> Scores:
        """By way: a score for each candidate, from what was seen of a round; NaN: it can say nothing of that one."""
        raise NotImplementedError


@dataclass(frozen=True)
class CIP(Attack):
    """Client-initiate passive inference (Hu et al. 2023, section 3.3).

    The party takes its own contribution out of the rows it is given, (N x broadcast - own) / (N - 1), and looks at how
    much more plausible a candidate is by what is left, the others' mean, than by its own rows. Relation rows are its
    own. Rows that no one else has come back as they were sent (or nearly so, where sums are rounded: then it cannot
    tell): of those it can say nothing. N is the number of parties; where fewer have a row, something of its own is left
    in it. Where relation rows are shared (FedR) the same is done with those, and its own entity rows.

    Ways: `ratio` is the paper's, of distances, or of scores where those are products, which has no stable sign and so
    comes last; `difference` of scores; `score` by the others' rows alone. With the server's help the victim's own rows
    take the place of the others' mean, and candidates need not be known to both: `of the victim`.
    """

    roles = ("party", "server+party")

    def scores(self, view: View, candidates: Candidates, number: int) -> Scores:
        known, me = seen.known(view), view.adversary.party
        if me is None:
            raise Nothing("a party attacks here")
        mine, graph = seen.own(view, number), seen.own_graph(view)
        if "server" in view.adversary.role:
            return _of_the_victim(view, candidates, number, mine)
        own = mine[known.part] if known.part in mine else seen.sent(view, me, number)
        back = seen.given(view, me, number + 1)
        others = (known.parties * back.double() - own.double()) / (known.parties - 1)
        there, moved = candidates.at(graph.entities, graph.relations), (back != own).any(1).numpy()
        for column in (0, 2) if known.part == "entity" else (1,):
            place = there[:, column]
            there[:, column] = np.where((place >= 0) & moved[place], place, -1)
        theirs, ours = (
            seen.scores(view, *seen.tables(view, number, rows), there, mine) for rows in (others, own.double())
        )
        found = {"difference": theirs - ours, "score": theirs}
        return _ratio_first(known.scorer, ratio(known.scorer, theirs, ours), found)


@dataclass(frozen=True)
class CIA(Attack):
    """Client-initiate active inference (Hu et al. 2023, section 3.4).

    In a round of attack the party sends the tails of all its targets turned round (`disguise`), and in the next, in
    which the victim trains on what that made of them, sends them as it was given them. If the triple is the victim's,
    its training pulls the tail back: the score is much better afterwards. Targets have tails of their own, so that none
    disturbs another.

    Ways: `ratio` is the paper's, s1 / s2, of distances before and after; `difference` of scores. With the server's help
    the score afterwards is by the victim's own rows: `of the victim`.
    """

    roles = ("party", "server+party")
    active = True
    every: int = 5
    boost: bool = False
    """Whether what is sent makes the mean of N parties the tail turned round, and not the paper's own row alone."""

    def turns(self, number: int) -> bool:
        """Whether tails are turned round in a round."""
        return number > 0 and number % self.every == 0

    def disguise(self, tails: np.ndarray, parties: int) -> Any:
        """What the party sends instead of its rows; `tails`: its ids of the targets' tails."""
        if self.every < 2:
            raise TacitError("an active attack takes two rounds: every is at least 2")
        rows = torch.from_numpy(np.unique(tails[tails >= 0]))

        def shown(number: int, given: Tensor, now: Tensor) -> Tensor:
            if not self.turns(number) and not self.turns(number - 1):
                return now
            changed, place = now.clone(), rows.to(now.device)
            factor = -(2.0 * parties - 1.0) if self.boost else -1.0
            changed[place] = given[place] * (factor if self.turns(number) else 1.0)
            return changed

        return shown

    def scores(self, view: View, candidates: Candidates, number: int) -> Scores:
        known, me = seen.known(view), view.adversary.party
        if known.part != "entity":
            raise Nothing("entity rows do not travel here: there is no tail to turn round")
        if me is None:
            raise Nothing("a party attacks here")
        mine, graph = seen.own(view, number), seen.own_graph(view)
        ids = candidates.at(graph.entities, graph.relations)
        before, after = (seen.given(view, me, number + later) for later in (1, 2))
        one, two = (seen.scores(view, rows, mine["relation"], ids, mine) for rows in (before, after))
        if "server" in view.adversary.role:
            pulled = _of_the_victim(view, candidates, number + 1, mine)["of the victim"]
            return {"of the victim": pulled - one}
        return _ratio_first(known.scorer, ratio(known.scorer, two, one), {"difference": two - one})


@dataclass(frozen=True)
class SI(Attack):
    """Server-initiate inference (Hu et al. 2023, section 3.2).

    From the victim's entity rows the server makes what the relation of each pair of entities would be (t - h for
    translations and, for want of better, for products; the turn from h to t for RotatE), and clusters all pairs into
    twice as many clusters as there are relations. True relations lie close together: a candidate in a cluster that is
    concentrated is taken for a member. The paper finds that this fails for bilinear models, and so does common sense.

    Ways: `concentrated`, how close together its cluster is; `near`, how close to its centre the candidate is itself;
    `with auxiliary facts`: the first, only where other facts that the server knows have such heads and such tails with
    that relation. With a party's help, who has rows of the relations, there is no need for clusters: that is what CIP
    does with the server's help, and it is done there.
    """

    roles = ("server",)
    leaks = ("number of relations", "auxiliary graph")
    pairs: int | None = None
    """Cluster so many pairs, drawn at random; default: all on a GPU, `ON_A_CPU` elsewhere."""
    rounds: int = 10
    seed: int = 0
    device: str = "cpu"

    def scores(self, view: View, candidates: Candidates, number: int) -> Scores:
        known, victim = seen.known(view), candidates.victim
        if known.part != "entity":
            raise Nothing("entity rows do not travel here: the server sees relation rows alone, and no entity")
        rows, names = seen.sent(view, victim, number), seen.names(view, victim)
        auxiliary: Graph | None = view.leaks.get("auxiliary graph")
        relations = view.leaks.get("number of relations") or (len(auxiliary.relations) if auxiliary else None)
        if relations is None:
            raise Nothing("the server does not know how many relations there are, and was not told")
        ids = candidates.at(names, None)
        there = (ids[:, [0, 2]] >= 0).all(1)
        made = Concentrations.of(rows.to(self.device), known.scorer, 2 * relations, pairs=self.pairs,
                                 rounds=self.rounds, seed=self.seed)  # fmt: skip
        place = torch.from_numpy(np.maximum(ids, 0)).to(self.device)
        spread, distance = made.of_pairs(place[:, 0], place[:, 2])
        found = {"concentrated": np.where(there, -spread.cpu().double().numpy(), np.nan),
                 "near": np.where(there, -distance.cpu().double().numpy(), np.nan)}  # fmt: skip
        if auxiliary is not None:
            likely = _known_kinds(auxiliary, candidates)
            least = np.min(found["concentrated"], initial=0.0, where=there) - 1.0
            found["with auxiliary facts"] = np.where(likely | ~there, found["concentrated"], least)
        return found


@dataclass
class Concentrations:
    """Clusters of what relations between all pairs of entities could be: k-means, pairs made as they are needed.

    Vectors of pairs are never kept: n entities have n (n - 1) of them, 108 GB for FB15k-237 with 128 numbers each. An
    entity and itself are no pair, as in the paper: they would be a cluster of zeros, the most concentrated of all.
    `error`: the standard error of the mean squared distance, where pairs are a sample.
    """

    entity: Tensor
    scorer: Scorer
    centres: Tensor
    spread: Tensor
    """Of each cluster: the mean squared distance of its pairs to its centre; infinite where it has few."""
    inertia: float = 0.0
    error: float = 0.0

    @staticmethod
    def of(
        entity: Tensor, scorer: Scorer, clusters: int, *, pairs: int | None = None, rounds: int = 10, seed: int = 0
    ) -> Concentrations:
        """Lloyd's rounds over all pairs, or over a sample of them, from centres that are pairs drawn at random."""
        many = len(entity)
        if many < 2:
            raise Nothing("there are no pairs of entities")
        if pairs is None and entity.device.type == "cpu":
            pairs = ON_A_CPU
        every = many * (many - 1)
        sampled = pairs is not None and pairs < every
        draw = Stream(seed, Purpose.CLUSTER, 0, 1)
        total = int(pairs or 0) if sampled else every
        chosen = torch.from_numpy((np.asarray(draw.uniform(total)) * every).astype(np.int64)) if sampled else None
        first = torch.from_numpy((np.asarray(draw.at(step=2).uniform(clusters)) * every).astype(np.int64))
        made = Concentrations(entity, scorer, entity[:0], torch.zeros(clusters, device=entity.device))
        made.centres = made._vectors(first.to(entity.device))
        for number in range(rounds + 1):
            sums, count, squares, fourth = made._pass(chosen, total)
            made.spread = torch.where(count >= FEW, squares / count.clamp(min=1), torch.inf).to(entity)
            made.inertia = float(squares.sum()) / total
            made.error = (max(fourth / total - made.inertia**2, 0.0) / total) ** 0.5 if sampled else 0.0
            if number < rounds:
                mean = (sums / count.clamp(min=1)[:, None]).to(entity)
                made.centres = torch.where((count > 0)[:, None], mean, made.centres)
        return made

    def _pass(self, chosen: Tensor | None, total: int) -> tuple[Tensor, Tensor, Tensor, float]:
        """Once through the pairs: by cluster sums of vectors, counts, squared distances; and the sum of their squares.

        Sums by cluster are matrix products with rows of a single one: a GPU does those fastest.
        """
        clusters, device = len(self.centres), self.entity.device
        sums = torch.zeros_like(self.centres, dtype=torch.float64)
        count, squares = (torch.zeros(clusters, device=device, dtype=torch.float64) for _ in range(2))
        fourth = torch.zeros((), device=device, dtype=torch.float64)
        step = max(1, AT_ONCE[device.type] * 128 // max(self.centres.shape[1], clusters))
        for start in range(0, total, step):
            stop = min(start + step, total)
            which = torch.arange(start, stop, device=device) if chosen is None else chosen[start:stop].to(device)
            vectors = self._vectors(which)
            distance, nearest = self._nearest(vectors)
            member = vectors.new_zeros(len(which), clusters).scatter_(1, nearest[:, None], 1.0)
            sums += (member.T @ vectors).double()
            count += member.sum(0).double()
            squares += (distance @ member).double()
            fourth += distance.double().square().sum()
        return sums, count, squares, float(fourth)

    def _vectors(self, which: Tensor) -> Tensor:
        """Of pairs by number: the first entity with each other one, then the second, and so on."""
        head, place = which // (len(self.entity) - 1), which % (len(self.entity) - 1)
        return relation_vectors(self.scorer, self.entity[head], self.entity[place + (place >= head)])

    def _nearest(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """The squared distance to the nearest centre, and which it is."""
        products = torch.addmm(self.centres.square().sum(1), vectors, self.centres.T, alpha=-2.0)
        found, nearest = products.min(1)
        return (found + vectors.square().sum(1)).clamp(min=0.0), nearest

    def of_pairs(self, head: Tensor, tail: Tensor) -> tuple[Tensor, Tensor]:
        """Of each pair: its cluster's spread, and its own squared distance to the centre."""
        distance, nearest = self._nearest(relation_vectors(self.scorer, self.entity[head], self.entity[tail]))
        return self.spread[nearest], distance


@dataclass(frozen=True)
class Counts(Attack):
    """On noisy counts, where parties release them (S4): a triple adds one to two cells, (relation, head) and (relation,
    tail).

    The server has each party's own noisy counts, unless they are added up securely; a party has the sum of all.

    Ways: `cells` of the victim, or `cells of the sum`: the two added; `all but this one`, less what all other triples
    of the victim add to these two, which the attacker is told of each target: that is the adversary of the definition,
    and it finds what epsilon allows, and no more.
    """

    roles = ("server", "party")
    leaks = (REST,)

    def scores(self, view: View, candidates: Candidates, number: int) -> Scores:
        me, victim = view.adversary.party, candidates.victim
        asked = {"sender": victim} if me is None else {"sender": SERVER, "receiver": me}
        noisy = next((message for _, message in view.messages(kind="marginals", **asked)), None)
        if noisy is None:
            if any(record.kind == "marginals" for record in view.records):
                raise Nothing("noisy counts travel under masks: the server sees their sum alone")
            raise Nothing("no noisy counts are released here")
        entities, relations = (seen.names(view, victim if me is None else me, part) for part in ("entity", "relation"))
        tails, heads = noisy.arrays["values"].double().split(len(entities), 1)[:2]
        ids = candidates.at(entities, relations)
        found = {"cells" if me is None else "cells of the sum": _cells(ids, tails.numpy(), heads.numpy())}
        if (rest := view.leaks.get(REST)) is not None and me is None:
            found["all but this one"] = found["cells"] - rest
        return found


@dataclass(frozen=True)
class Blind(Attack):
    """No attack: how plausible a candidate is by the party's own graph, in which it looks nothing up that was sent.

    What another attack finds that this one finds too is no leak of the federation: the targets differ in kind. Popular
    heads and tails of the relation score high, by how often they are that in the party's own triples.
    """

    roles = ("party",)

    def scores(self, view: View, candidates: Candidates, number: int) -> Scores:
        graph = seen.own_graph(view)
        counts = popularity(graph)
        return {"own counts": _cells(candidates.at(graph.entities, graph.relations), counts.tails.double().numpy(),
                                     counts.heads.double().numpy())}  # fmt: skip


ATTACKS: dict[str, type[Attack]] = {"si": SI, "cip": CIP, "cia": CIA, "counts": Counts, "blind": Blind}


def relation_vectors(scorer: Scorer, head: Tensor, tail: Tensor) -> Tensor:
    """What the relation between two entities would be, by their rows: the turn for RotatE, the difference elsewhere."""
    if isinstance(scorer, RotatE):
        (a, b), (c, d) = head.chunk(2, -1), tail.chunk(2, -1)
        real, imaginary = a * c + b * d, a * d - b * c  # tail x conjugate of head
        length = torch.hypot(real, imaginary).clamp(min=TINY)
        return torch.cat([real / length, imaginary / length], -1)
    return tail - head


def is_translation(scorer: Scorer) -> bool:
    """Whether a pair of entity rows says what the relation between them would be."""
    return isinstance(scorer, (Translation, RotatE))


def ratio(scorer: Scorer, better: np.ndarray, worse: np.ndarray) -> np.ndarray:
    """How many times nearer: of distances where the scorer has any; else of scores, whose sign is what it is."""
    if isinstance(scorer, DistanceScorer):
        return (scorer.gamma - worse) / np.maximum(scorer.gamma - better, TINY)
    return better / np.where(np.abs(worse) < TINY, np.copysign(TINY, worse), worse)


def _ratio_first(scorer: Scorer, found: np.ndarray, others: Scores) -> Scores:
    """The paper's way before the others, where it means something: a ratio of products has no stable sign."""
    if isinstance(scorer, DistanceScorer):
        return {"ratio": found} | others
    return others | {"ratio": found}


def _of_the_victim(view: View, candidates: Candidates, number: int, mine: dict[str, Tensor]) -> Scores:
    """By the victim's own entity rows, which the server has, and the party's relation rows (`mine`)."""
    if seen.known(view).part != "entity":
        raise Nothing("entity rows do not travel here: server and party together see no more than the party")
    rows, names = seen.sent(view, candidates.victim, number), seen.names(view, candidates.victim)
    ids = candidates.at(names, seen.own_graph(view).relations)
    return {"of the victim": seen.scores(view, rows, mine["relation"], ids, mine)}


def _cells(ids: np.ndarray, tails: np.ndarray, heads: np.ndarray) -> np.ndarray:
    """The sum of each candidate's two cells."""
    there, (h, r, t) = (ids >= 0).all(1), np.maximum(ids, 0).T
    return np.where(there, tails[r, t] + heads[r, h], np.nan)


def _known_kinds(auxiliary: Graph, candidates: Candidates) -> np.ndarray:
    """Whether facts that the server knows have the candidate's head and tail as head and tail of its relation."""
    ids = candidates.at(auxiliary.entities, auxiliary.relations)
    facts, many = auxiliary.train.triples.astype(np.int64), len(auxiliary.entities)
    there: np.ndarray = np.all(ids >= 0, axis=1)
    for column in (0, 2):
        known = np.unique(facts[:, 1] * many + facts[:, column])
        there = there & np.isin(ids[:, 1] * many + ids[:, column], known)
    return there
