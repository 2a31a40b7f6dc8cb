"""A provider: it looks at a ledger, takes what others published, trains on its own graph, and publishes.

One `step` is one look. The same code runs under a virtual clock (`gathering.py`) and as a process of its own; whatever
a provider has to know when it comes back stands in the ledger.

What a look at others' rows decides is told by the next update, so it may follow from released rows alone: those of
others, and the own ones as they were published. Validation triples are looked at where nothing is claimed, or where
they are public (`Terms.validation`).
"""

from __future__ import annotations

import hashlib
import json
import logging
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from tacit.draws import Purpose, Stream
from tacit.errors import BadInput, BadValue, Refused, TacitError
from tacit.federation.keys import Identity, fingerprint
from tacit.folders import sync_folder, write_whole
from tacit.graph import Graph, Vocab
from tacit.ledger.blobs import Rows, Withheld
from tacit.ledger.cbor import CID
from tacit.ledger.committee import own_number
from tacit.ledger.dag import Branch, Node
from tacit.ledger.defence import FEWEST, Defence, Pile
from tacit.ledger.ledger import Ledger
from tacit.ledger.record import LONGEST_REASON, Beacon, Claim, Record, Verdict
from tacit.models import Scorer, Tables
from tacit.models.tables import PARTS
from tacit.peers.learner import Learner, Pairing, Trained
from tacit.privacy.budget import Holding, Reservation, check_payable
from tacit.privacy.events import Spent, joined, less
from tacit.privacy.plan import NOT_COVERED, WITHOUT_BUDGET
from tacit.privacy.privatizers import Sound
from tacit.settings import Settings
from tacit.tensors import pack_tensors
from tacit.training import chosen_device

LOG = logging.getLogger(__name__)
Tensor = Any
DEFAULT = Defence(checks=("norm", "cosine", "copies"), mean="mean", far=1.3, least=-0.1, odd=0.15)
"""What a provider does if nothing else is said: chosen on validation triples, see docs/ledger.md."""
EACH = 4
"""How many of one provider's updates are looked at: whoever publishes many hides nobody."""
FIRST_WAIT, LONGEST_WAIT = 2.0, 3600.0
"""Seconds until weights that could not be had are asked for again: twice as many each time, up to an hour."""
VOTES = 200
"""In one verdict: with a long reason for each it is still a record."""
PROBES, RELATIONS = 32, 8
"""Heads that are asked for the tails of every relation, and how many relations at once."""
NOT_SHARED = "a provider publishes rows of entities and relations: this scorer has weights beside them"


@dataclass(frozen=True)
class Terms:
    """How a provider takes part.

    Attributes
    ----------
    parents
        Updates that one is made from, at most, the own last one among them; the model's rule may allow fewer.
    recent
        How many of the model's last updates are looked at, of each provider no more than four. Of each other provider
        the newest of them counts.
    defence
        Which of them are left out, and how the rest comes together.
    gate
        better: rows that came together are taken if they are better than the own ones, where validation costs nothing.
        always: they are taken.
    updates, epochs
        How many updates it publishes at most, and the epochs of each after the first. What all of them cost is fixed
        before the first.
    validation
        What decides whether rows are better: own triples, for providers that claim nothing, and their default; public
        ones; or none, the default under privacy.
    noise
        See `tacit.peers.learner.Pairing`.
    serve
        Whether it stands for committees.
    """

    parents: int = 16
    recent: int = 200
    defence: Defence = DEFAULT
    gate: Literal["better", "always"] = "better"
    updates: int = 10
    epochs: int = 10
    validation: Literal["own", "public", "none"] | None = None
    noise: Literal["system", "seeded"] = "system"
    serve: bool = True

    def __post_init__(self) -> None:
        for name in ("parents", "recent", "updates", "epochs"):
            if getattr(self, name) < 1:
                raise BadValue(f"{name} is at least 1, not {getattr(self, name)}")
        if self.gate not in ("better", "always"):
            raise BadValue(f"gate is better or always; not {self.gate!r}")
        if self.validation not in (None, "own", "public", "none"):
            raise BadValue(f"validation is own, public or none; not {self.validation!r}")


@dataclass(frozen=True)
class Look:
    """What came of one look: updates that were taken, those that were not and why, and what was published."""

    taken: tuple[CID, ...] = ()
    left_out: Mapping[CID, str] = field(default_factory=dict)
    update: CID | None = None
    score: float | None = None
    """By what may be looked at; None: nothing was trained."""
    ended: str | None = None
    """Why nothing more will come; None: there may."""


@dataclass(frozen=True)
class Begun:
    """A look whose update is not trained yet: rows to train from, who was left out, what was set aside for it."""

    tables: Tables
    left_out: Mapping[CID, str]
    charge: Reservation | None = None


@dataclass(frozen=True)
class Missing:
    """Weights that could not be had: why, when they may be asked for again, and how long was waited until then."""

    error: Withheld | Refused
    again: float
    wait: float


class Shelf:
    """Rows of updates that were read and verified, on a device; several providers of one process may share one.

    Weights that could not be had are asked for again by the `clock`, less and less often: anybody can write records of
    weights that are nowhere, and each question may take as long as a network waits for an answer.
    """

    def __init__(self, ledger: Ledger, device: Any = "cpu", clock: Callable[[], float] = time.monotonic):
        self.ledger, self.device, self.clock = ledger, device, clock
        self._rows: dict[CID, Rows] = {}
        self._missing: dict[CID, Missing] = {}
        """By the address of weights that are withheld, or of an update whose weights are refused."""
        self._answers: dict[CID, dict[tuple[str, str], float]] = {}
        self._names: dict[tuple[str, ...], int] = {}
        self._places: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def rows(self, node: Node) -> Rows:
        """Withheld, or refused with the reason: it may be that of the last time they were asked for."""
        if node.cid not in self._rows:
            if (missing := self.missing(node)) is not None:
                raise missing.error.with_traceback(None)
            try:
                found = self.ledger.rows(node)
            except (Withheld, Refused) as error:
                which = node.update.weights if isinstance(error, Withheld) else node.cid
                last = self._missing.get(which)
                wait = FIRST_WAIT if last is None else min(2 * last.wait, LONGEST_WAIT)
                self._missing[which] = Missing(error, self.clock() + wait, wait)
                raise
            for which in (node.update.weights, node.cid):
                self._missing.pop(which, None)
            moved = {part: getattr(found, part).to(self.device) for part in PARTS}
            self._rows[node.cid] = replace(found, **moved)
        return self._rows[node.cid]

    def missing(self, node: Node) -> Missing | None:
        """Why its weights are not asked for now; None: they are here, or may be asked for."""
        if node.cid in self._rows:
            return None
        found = (self._missing.get(which) for which in (node.update.weights, node.cid))
        return next((each for each in found if each is not None and self.clock() < each.again), None)

    def forget(self, kept: Sequence[Node]) -> None:
        """All but these: memory is finite."""
        cids = {node.cid for node in kept}
        self._rows = {cid: rows for cid, rows in self._rows.items() if cid in cids}
        self._answers = {cid: found for cid, found in self._answers.items() if cid in cids}
        self._names.clear()
        self._places.clear()

    def answers(self, node: Node, scorer: Scorer) -> dict[tuple[str, str], float]:
        """What rows say of heads that nobody chose: of each relation the commonest answers, (relation, tail), with the
        share of these heads that have it. It follows from published rows alone.
        """
        if node.cid not in self._answers:
            rows = self.rows(node)
            order = sorted(range(len(rows.entities)), key=lambda at: _digest(node.update.model, rows.entities[at]))
            heads = torch.tensor(order[:PROBES], device=rows.entity.device)
            found: dict[tuple[str, str], float] = {}
            with torch.no_grad():
                for at in range(0, len(rows.relations), RELATIONS):
                    some = rows.relation[at : at + RELATIONS]
                    head = rows.entity[heads].repeat(len(some), 1)
                    best = scorer.score_tails(head, some.repeat_interleave(len(heads), 0), rows.entity, ()).argmax(1)
                    for relation, tails in enumerate(best.reshape(len(some), -1).tolist(), at):
                        for tail, many in Counter(tails).most_common(3):
                            found[rows.relations[relation], rows.entities[tail]] = many / len(heads)
            self._answers[node.cid] = found
        return self._answers[node.cid]

    def places(self, own: Vocab, theirs: tuple[str, ...]) -> tuple[Tensor, Tensor]:
        """For each own name its place among theirs, and whether it has one."""
        one, two = (self._names.setdefault(names, len(self._names)) for names in (tuple(own.names), theirs))
        if (one, two) not in self._places:
            index = {name: at for at, name in enumerate(theirs)}
            found = np.fromiter((index.get(name, -1) for name in own.names), np.int64, len(own))
            there = torch.from_numpy(found).to(self.device)
            self._places[one, two] = there.clamp(min=0), there >= 0
        return self._places[one, two]


def _digest(model: CID, name: str) -> bytes:
    return hashlib.sha256(model + name.encode()).digest()


def first_tables(scorer: Scorer, dim: int, model: CID, graph: Graph) -> Tables:
    """Rows before any training: each follows from the model's address and its name, so that all begin in one space."""
    if scorer.shared_shapes(dim):
        raise TacitError(NOT_SHARED)
    seed = int.from_bytes(model[-8:], "big")
    made = []
    for part, names, width in zip(PARTS, (graph.entities, graph.relations), scorer.widths(dim), strict=True):
        rows = []
        for name in names:
            digest = hashlib.sha256(f"{part}\0{name}".encode()).digest()
            place = Stream(seed, Purpose.INIT, int.from_bytes(digest[:2], "big"), int.from_bytes(digest[2:6], "big"))
            rows.append(scorer.initial(part, 1, width, dim, place))
        made.append(torch.cat(rows))
    tables = Tables(made[0], made[1])
    tables.constrain(scorer)
    return tables


class Provider:
    """One who takes part in a model of a ledger.

    Parameters
    ----------
    ledger, model, who
        Where, in what by its name or address, and as whom.
    graph, settings
        What it trains on, and how: `settings.training.epochs` are those of its first update.
    number
        Its number in draws.
    holding
        The budget that every training is charged to before it begins; a training that it does not pay for is the end.
    shelf, first
        Rows that were read, if several providers share them; rows before any training, if they are known.
    """

    def __init__(
        self,
        ledger: Ledger,
        model: str,
        who: Identity,
        graph: Graph,
        settings: Settings,
        terms: Terms | None = None,
        *,
        number: int = 0,
        holding: Holding | None = None,
        shelf: Shelf | None = None,
        first: Tables | None = None,
    ):
        if holding is not None:
            check_payable(settings.privacy)
        self.ledger, self.who, self.graph, self.holding = ledger, who, graph, holding
        self.terms = terms or Terms()
        self.model = ledger.dag.branch(model).cid
        rule = self.branch.model
        if settings.scorer.shared_shapes(settings.dim):
            raise TacitError(NOT_SHARED)
        if settings.scorer.widths(settings.dim) != (rule.entity, rule.relation):
            entity, relation = settings.scorer.widths(settings.dim)
            raise TacitError(
                f"the model {rule.name} has rows of {rule.entity} and {rule.relation} numbers, and these settings make "
                f"{entity} and {relation}: set scorer.name and scorer.dim to what the model was opened for"
            )
        looks = self.terms.validation
        if settings.privacy.sound:
            if looks == "own":
                raise BadValue("updates would tell of validation triples: under privacy validation is public or none")
            looks = looks or "none"
        elif looks == "own":
            looks = None  # nothing is claimed, and nothing said of what leaves: one's own triples decide
        pairing = Pairing(
            retrain=self.terms.epochs, trainings=self.terms.updates - 1, validation=looks, noise=self.terms.noise
        )
        self.learner = Learner(number, graph, settings, {}, pairing)
        self.shelf = shelf or Shelf(ledger, chosen_device(settings.training.device))
        self.own: Tables | None = None
        """The rows that were published last."""
        self.base: Tables | None = None
        """The rows that their training began with."""
        self.notes: dict[str, str] = {}
        """What the next update says beside its rows."""
        self.pending: Path | None = None
        """Where an update is kept from before its weights are shown until its record stands; None: in memory alone."""
        self._unpublished: bytes | None = None
        self._first = first
        self._parents: tuple[CID, ...] = ()
        self._last: CID | None = None
        self._check_key()
        self._come_back()

    @property
    def protected(self) -> Graph:
        """The statements that privacy is claimed for, and that a holding pays for."""
        return self.learner.protected

    @property
    def private(self) -> bool:
        """Whether all that it publishes follows from releases with a known cost."""
        return isinstance(self.learner.settings.privacy, Sound)

    @property
    def delta(self) -> float:
        privacy: Any = self.learner.settings.privacy
        return float(privacy.delta)

    @property
    def branch(self) -> Branch:
        return self.ledger.dag.branches[self.model]

    @cached_property
    def first(self) -> Tables:
        """Rows before any training, on the device where it will be."""
        settings, device = self.learner.settings, self.shelf.device
        made = self._first or first_tables(settings.scorer, settings.dim, self.model, self.graph)
        return made.like(lambda tensor: tensor.to(device))

    def _check_key(self) -> None:
        """Before anything is trained, and paid for, that nobody would take."""
        if (why := self.ledger.dag.barred(self.who.public)) is not None:
            key = fingerprint(self.who.public)
            raise TacitError(f"{self.ledger.folder}: the key {key} can publish nothing here: it {why}.")

    def _come_back(self) -> None:
        """Go on from what was published under this key before."""
        mine = [node for node in self.branch.nodes if node.by == self.who.public]
        self.published = len(mine)
        if not mine:
            return
        self._last = mine[-1].cid
        rows = self.shelf.rows(mine[-1])
        if rows.entities != tuple(self.graph.entities) or rows.relations != tuple(self.graph.relations):
            raise TacitError("the last update under this key is of a graph with other names: go on with that graph, or "
                             "with another key")  # fmt: skip
        self._check_earlier([node.update.privacy for node in mine if node.update.privacy is not None], len(mine))
        self.own = self.base = Tables(rows.entity, rows.relation)
        self.learner.resume(self.own, min(len(mine), self.terms.updates) - 1)

    def _check_earlier(self, claims: Sequence[Claim], updates: int) -> None:
        """What was claimed before is accounted for, and of the same unit: else no epsilon holds for all of it."""
        if not claims:
            return
        if self.holding is not None:
            paid = {self.holding.entries[each.number].hash: each.spent for each in self.holding.charges}
            unpaid = sum(paid.get(each.holding.hex()) != joined(each.releases) for each in claims)
            if unpaid:
                raise TacitError(
                    f"the holding {self.holding.name!r} did not pay for {unpaid:,} of the earlier updates under this "
                    "key: go on with the holding that did, or with none and with those settings, or with another key"
                )
        elif joined(segment for each in claims for segment in each.releases) != self.released(updates):
            raise TacitError(
                "earlier updates under this key were trained with other settings, and no budget keeps account of "
                "both: go on with those settings, or with the holding that paid for them, or with another key"
            )
        now = self.claim()
        for each in claims:
            if now is None or (each.unit, each.neighbours) != (now.unit, now.neighbours):
                protects = "claim nothing" if now is None else f"protect {now.unit} ({now.neighbours})"
                raise TacitError(
                    f"earlier updates under this key protect {each.unit} ({each.neighbours}), and these settings "
                    f"{protects}: what they cost does not add up. Go on with those settings, or with another key"
                )

    # -- one look ------------------------------------------------------------------------------------------------------

    def step(self) -> Look:
        """Look at the ledger once: serve, take, train, publish."""
        begun = self.begin()
        return begun if isinstance(begun, Look) else self.end(begun)

    def begin(self) -> Begun | Look:
        """Serve; set aside what the next update will cost, and take rows to train from.

        A look: there is no next one, or one that was trained before and did not come to stand was published.
        """
        if (look := self.publish_pending()) is not None:
            return look
        self.ledger.refresh()
        self.serve()
        if self.published >= self.terms.updates:
            return Look(ended=f"all {self.terms.updates} updates are published")
        self._check_key()
        charge = None
        if self.holding is not None:
            name = self.branch.model.name
            try:
                charge = self.holding.reserve(
                    self.costs(), run=name, why=f"update {self.published + 1}", graph=self.protected
                )
            except TacitError as error:
                return Look(ended=str(error))
        try:
            return Begun(*self.take(), charge)
        except TacitError:  # nothing was trained: a broker went away, say
            if charge is not None and self.holding is not None:
                self.holding.settle(charge.number, ())
            raise

    def end(self, begun: Begun, trained: Trained | None = None) -> Look:
        """Train and publish; `trained`: it was done by someone else."""
        trained = trained or self.train(begun.tables)
        charge, costs = begun.charge, self.costs()
        record = self.give(trained.tables, b"" if charge is None else bytes.fromhex(charge.head))
        if charge is not None and self.holding is not None:
            self.holding.settle(charge.number, costs)
        return Look(self._parents, begun.left_out, record.cid, trained.score)

    def take(self) -> tuple[Tables, dict[CID, str]]:
        """Rows to train from, of the own ones and those of others that stand the checks; and who does not, and why."""
        nodes, left_out = self.candidates()
        before = self.own or self.first
        piles, nodes = self.piles(nodes, left_out)
        reasons = self.terms.defence.judge(piles) if nodes else []
        left_out |= {node.cid: why for node, why in zip(nodes, reasons, strict=True) if why is not None}
        kept = [at for at, why in enumerate(reasons) if why is None]
        self._parents = () if self._last is None else (self._last,)
        tables = before
        if kept:
            self._doubt([nodes[at] for at in kept], piles := [pile.only(kept) for pile in piles])
            rows = self.terms.defence.combine(piles)
            tables = Tables(rows[0], rows[1])
            tables.constrain(self.learner.settings.scorer)
            if self._worse(tables):
                left_out |= dict.fromkeys(
                    (nodes[at].cid for at in kept), "what came together is worse than the own rows"
                )
                tables = before
            else:
                self._parents += tuple(nodes[at].cid for at in kept)
        self.base = tables
        return tables, left_out

    def _doubt(self, nodes: Sequence[Node], piles: Sequence[Pile]) -> None:
        """Leave out rows of updates that answer what hardly anybody else does: that relation's, and that tail's."""
        odd = self.terms.defence.odd
        if odd is None or len(nodes) < FEWEST:
            return
        scorer = self.learner.settings.scorer
        said = [self.shelf.answers(node, scorer) for node in nodes]
        for at, answers in enumerate(said):
            for (relation, tail), share in answers.items():
                if share > odd and share - statistics.median(each.get((relation, tail), 0.0) for each in said) > odd:
                    LOG.debug("an update is doubted in one relation and one tail")
                    for pile, vocab, name in zip(piles, (self.graph.entities, self.graph.relations), (tail, relation),
                                                 strict=True):  # fmt: skip
                        if name in vocab:
                            pile.present[at, vocab.id(name)] = False

    def _worse(self, tables: Tables) -> bool:
        """Whether validation says so, where that costs nothing and there are rows of one's own."""
        if self.own is None or self.terms.gate == "always" or self.learner.validation not in ("own", "public"):
            return False
        if not len(self.graph.valid):
            return False
        return not self.learner.scored(tables) > self.learner.scored(self.own)

    def candidates(self) -> tuple[list[Node], dict[CID, str]]:
        """The newest update of each other provider that is not rejected, in the order of the log, as many as may be
        parents; and those that are left out because of what the ledger says of them.
        """
        newest, left_out = self._others()
        room = min(self.terms.parents, self.branch.model.parents) - (self._last is not None)
        return newest[-room:] if room else [], left_out

    def _others(self) -> tuple[list[Node], dict[CID, str]]:
        newest, counted, left_out = dict[bytes, Node](), Counter[bytes](), dict[CID, str]()
        for node in reversed(self.branch.nodes):
            if counted[node.by] == EACH:
                continue
            counted[node.by] += 1
            if node.rejected:
                left_out[node.cid] = "was rejected by the committee"
            elif self.branch.owners[node.update.weights] != node.by:
                left_out[node.cid] = "has the very weights of another's update"
            elif node.by != self.who.public:
                newest.setdefault(node.by, node)
            if counted.total() == self.terms.recent:
                break
        return sorted(newest.values(), key=lambda node: node.number), left_out

    def piles(self, nodes: Sequence[Node], left_out: dict[CID, str]) -> tuple[list[Pile], list[Node]]:
        """The rows of updates in the own order; those whose rows cannot be had are named."""
        found, had = [], []
        for node in nodes:
            try:
                found.append(self.shelf.rows(node))
                had.append(node)
            except (Withheld, Refused) as error:
                left_out[node.cid] = str(error)
        own = self.own or self.first
        base = self.base or own
        made = []
        for part, vocab in zip(PARTS, (self.graph.entities, self.graph.relations), strict=True):
            mine, start = getattr(own, part), getattr(base, part)
            others = mine.new_zeros((len(found), *mine.shape))
            present = torch.zeros(len(found), len(mine), dtype=torch.bool, device=mine.device)
            for at, rows in enumerate(found):
                place, has = self.shelf.places(vocab, rows.entities if part == "entity" else rows.relations)
                others[at] = getattr(rows, part)[place]
                present[at] = has
            made.append(Pile(start, mine, others, present))
        return made, had

    def train(self, tables: Tables) -> Trained:
        """Train from these rows; a training that diverges leaves them as they are, and is paid for."""
        learner, first = self.learner, self.learner.best is None
        learner.begun(first=first)
        trained = learner.train(tables, learner.settings.training.epochs if first else self.terms.epochs, None)
        learner.best = trained.tables
        return trained

    def news(self) -> bool:
        """Whether there is something to do: the first update, one of another since the own last one, or none any more.

        Another's counts if it could be taken: whoever publishes copies, or records of weights that are nowhere, does
        not set the pace at which budgets are spent. On the way it serves.
        """
        self.ledger.refresh()
        self.serve()
        if self._last is None or self.published >= self.terms.updates:
            return True
        last = self.ledger.dag.nodes[self._last].number
        return any(node.number > last and self._had(node) for node in self._others()[0])

    def _had(self, node: Node) -> bool:
        try:
            self.shelf.rows(node)
        except (Withheld, Refused):
            return False
        return True

    # -- what it publishes ---------------------------------------------------------------------------------------------

    def costs(self) -> Spent:
        """What the next update releases: the steps of its training."""
        return self._costs(self.published, self.published + 1)

    def _costs(self, first: int, last: int) -> Spent:
        before, after = (self.released(min(many, self.terms.updates)) for many in (first, last))
        return less(after, before)

    def released(self, updates: int) -> Spent:
        """What so many updates release, from the first on."""
        return self.learner.spent_by(updates)["train"]

    def claim(self, holding: bytes = b"") -> Claim | None:
        """What the next update may claim; None: it is not private."""
        if not self.private or self.learner.simulated:
            return None
        privacy: Any = self.learner.settings.privacy
        unit = "one triple" if privacy.unit == "triple" else f"one group of at most {privacy.group} triples"
        whose = "of a party's training triples"
        if privacy.has_public:
            whose = "of those marked confidential"
        neighbours = f"graphs that differ by {unit}, more or less, over the same names"
        return Claim(self.costs(), f"{unit} {whose}", neighbours, holding)

    def about(self) -> dict[str, Any]:
        """What it takes part in, and how, as JSON has it."""
        terms = asdict(self.terms)
        return {
            "genesis": str(self.ledger.genesis), "model": str(self.model), "key": self.who.public.hex(),
            "graph": self.graph.fingerprint, "settings": self.learner.settings.json(), "terms": terms,
            "budget": "" if self.holding is None else self.holding.name,
        }  # fmt: skip

    def statement(self) -> dict[str, Any]:
        """What is guaranteed of all updates of this model under this key, those that are to come among them.

        Only private training with secret noise has an epsilon. It is that of what was claimed before and of all that
        may yet be released.
        """
        claim = self.claim()
        mine = [node.update.privacy for node in self.branch.nodes if node.by == self.who.public]
        if claim is None or not self.private or any(each is None for each in mine):
            why = "the rows were trained without privacy, and tell of the triples"
            if self.learner.simulated:
                why = "the noise follows a seed: whoever knows it can take the noise away"
            return {"guarantee": "none", "epsilon": None, "why": [why]}
        if any((each.unit, each.neighbours) != (claim.unit, claim.neighbours) for each in mine if each is not None):
            return {"guarantee": "none", "epsilon": None, "why": ["updates under this key protect different units"]}
        from tacit.privacy.accountant import epsilon

        parts = [segment for each in mine if each is not None for segment in each.releases]
        releases = joined([*parts, *self._costs(self.published, self.terms.updates)])
        budget = None
        if self.holding is not None:
            budget = {"name": self.holding.name, "head": self.holding.head}
        return {
            "guarantee": "differential privacy", "epsilon": epsilon(releases, self.delta), "delta": self.delta,
            "unit": claim.unit, "neighbours": claim.neighbours, "releases": [[s.json() for s in releases]],
            "covers": "every update of this model under this key, verdicts, and whatever is computed from these",
            "not_covered": [*NOT_COVERED, *([] if budget else [WITHOUT_BUDGET])], "budget": budget,
        }  # fmt: skip

    def give(self, tables: Tables, holding: bytes = b"") -> Record:
        """Publish rows as an update made from what was taken last."""
        record = self.publish(tables, holding)
        self.own = tables.like(torch.clone)
        self.published, self._last = self.published + 1, record.cid
        return record

    def publish(self, tables: Tables, holding: bytes = b"", graph: Graph | None = None) -> Record:
        """Add an update with these rows to the ledger; by the names of the own graph, or of another."""
        named = graph or self.graph
        words = {"schema": "tacit.shared/1", "entities": "\n".join(named.entities),
                 "relations": "\n".join(named.relations), **self.notes}  # fmt: skip
        data = pack_tensors({"entity": tables.entity, "relation": tables.relation}, words)
        claim = self.claim(holding)
        told = None if claim is None else claim.content() | {"holding": claim.holding.hex()}
        about = json.dumps({"parents": [str(cid) for cid in self._parents], "claim": told})
        self._keep(about.encode() + b"\n" + data)
        record = self.ledger.publish_rows(self.who, str(self.model), data, claim, self._parents)
        self._keep(None)
        return record

    def _keep(self, update: bytes | None) -> None:
        """Until its record stands; None: it does."""
        self._unpublished = update
        if self.pending is None:
            return
        if update is None:
            self.pending.unlink(missing_ok=True)
        else:
            write_whole(self.pending, update)
            sync_folder(self.pending.parent)

    def publish_pending(self) -> Look | None:
        """Publish what was trained and did not come to stand, as it is: an earlier process was killed with it, or a
        broker went away. Its weights may have been seen: to train the same update again would be a release that nobody
        pays for.
        """
        kept = self._unpublished
        if self.pending is not None and self.pending.is_file():
            kept = self.pending.read_bytes()
        if kept is None:
            return None
        about, _, data = kept.partition(b"\n")
        try:
            told = json.loads(about)
            parents, claim = tuple(map(CID.parse, told["parents"])), told["claim"]
            if claim is not None:
                claim = Claim.of(claim | {"holding": bytes.fromhex(claim["holding"])})
        except (ValueError, LookupError, TypeError):
            raise BadInput(f"{self.pending}: is damaged: it should hold an update that was not published yet. Only if "
                           "you are sure that nobody has seen its weights, delete it.") from None  # fmt: skip
        self.ledger.refresh()
        weights, look = self.ledger.blobs.address(data), None
        if not any(node.by == self.who.public and node.update.weights == weights for node in self.branch.nodes):
            record = self.ledger.publish_rows(self.who, str(self.model), data, claim, parents)
            look = Look(parents, update=record.cid)
        self._come_back()
        self._keep(None)
        return look

    # -- the committee -------------------------------------------------------------------------------------------------

    def serve(self) -> None:
        """Stand for the next committee, and vote as a member of those of before.

        Another's record may come first and make a number or a vote late; then the next look does what is due.
        """
        committee = self.branch.committee
        if not self.terms.serve or not committee.rule.committee:
            return
        for batch in committee.to_stand(self.who.public):
            with suppress(Refused):
                beacon = Beacon(self.model, batch, own_number(self.who, self.model, batch))
                committee.check_beacon(beacon, self.who.public)
                self.ledger.publish(self.who, beacon)
        if self.own is not None:
            for verdict in self.verdicts():
                with suppress(Refused):
                    self.ledger.publish(self.who, verdict)

    def verdicts(self) -> list[Verdict]:
        """Votes by the own checks on all updates that are due: of each provider one at a time, as a look sees them.

        Of weights that are withheld there is nothing to say; of whom some are, no others are asked for at this look.
        """
        dag, votes = self.ledger.dag, dict[int, dict[CID, str | None]]()
        due = [dag.nodes[cid] for cid in self.branch.committee.due(self.who.public)]
        due = [node for node in due if self.shelf.missing(node) is None]
        while due:
            now: dict[bytes, Node] = {}
            for node in due:
                now.setdefault(node.by, node)
            missing: dict[CID, str] = {}
            piles, nodes = self.piles(list(now.values()), missing)
            due = [node for node in due if now[node.by] is not node and now[node.by].cid not in missing]
            for node, why in zip(nodes, self.terms.defence.judge(piles) if nodes else (), strict=True):
                votes.setdefault(self.branch.committee.batch_of(node.cid), {})[node.cid] = why
        made = []
        for batch, found in sorted(votes.items()):
            several = sorted(found.items())
            for first in range(0, len(several), VOTES):
                some = several[first : first + VOTES]
                against = tuple((cid, why[:LONGEST_REASON]) for cid, why in some if why is not None)
                made.append(Verdict(self.model, batch, tuple(cid for cid, why in some if why is None), against))
        return made
