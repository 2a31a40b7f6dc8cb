"""A federation that is trained to be attacked, and what attacks found.

An active attack changes the training, and canaries have to be there before it begins: for those a federation is trained
in memory and attacked every so many rounds while it goes on; what was looked at is let go of. An attack gets a view and
nothing else.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from tacit.attacks.measures import Measured, measure
from tacit.attacks.membership import ATTACKS, CIA, REST, SI, Attack, is_translation
from tacit.attacks.seen import Nothing
from tacit.attacks.targets import Reading, Targets, draw_targets, others_add
from tacit.errors import TacitError
from tacit.evaluation.ranking import Metrics
from tacit.federated import FederatedRun, Federation, with_noise
from tacit.federation.transcript import GIVE, Adversary, Record, Role, Transcript, View
from tacit.graph import Graph
from tacit.parties import Parties, pool
from tacit.privacy.privatizers import Sound
from tacit.settings import Settings
from tacit.training import Event, chosen_device

LOG = logging.getLogger(__name__)
Watch = Callable[[Event], None]


@dataclass(frozen=True)
class Outcome:
    """What an attack by one adversary found of one set of targets.

    Attributes
    ----------
    by_round
        For each round that was attacked, by way, how well targets are told apart.
    nothing
        Why there was nothing to attack, if so.
    leaks
        What the attack was told beyond what its adversary saw.
    scores
        By round and way, each target's; for plots, and never of use without the targets.
    """

    attack: str
    role: Role
    reading: Reading
    victim: str
    adversary: str | None
    member: np.ndarray
    by_round: dict[int, dict[str, Measured]] = field(default_factory=dict)
    nothing: str | None = None
    leaks: tuple[str, ...] = ()
    warning: str | None = None
    scores: dict[int, dict[str, np.ndarray]] = field(default_factory=dict)

    @property
    def ways(self) -> tuple[str, ...]:
        """The paper's first."""
        return tuple(dict.fromkeys(way for found in self.by_round.values() for way in found))

    def best(self, way: str | None = None) -> tuple[int, Measured]:
        """The round with the highest F1, as the DP-FLames paper reports it; choosing it flatters the attack."""
        way = way or self.ways[0]
        there = {number: found[way] for number, found in self.by_round.items() if way in found}
        number = max(there, key=lambda each: (there[each].f1, -each))
        return number, there[number]

    def last(self, way: str | None = None) -> tuple[int, Measured]:
        """The last round that was attacked: no choice was made."""
        way = way or self.ways[0]
        number = max(number for number, found in self.by_round.items() if way in found)
        return number, self.by_round[number][way]

    def json(self) -> dict[str, Any]:
        about = {"attack": self.attack, "adversary": self.role, "party": self.adversary, "victim": self.victim,
                 "targets": self.reading, "members": int(self.member.sum()), "others": int((~self.member).sum()),
                 "told_beyond_its_view": list(self.leaks), "warning": self.warning}  # fmt: skip
        about["nothing"] = self.nothing
        if self.nothing is not None:
            return about | {"ways": {}}
        ways = {}
        for way in self.ways:
            (best, at_best), (last, at_last) = self.best(way), self.last(way)
            there = {str(number): found[way] for number, found in sorted(self.by_round.items()) if way in found}
            ways[way] = {"best": {"round": best} | at_best.json(), "last": {"round": last} | at_last.json(),
                         "by_round": {number: {"f1": round(each.f1, 6), "auc": round(each.auc.value, 6)}
                                      for number, each in there.items()}}  # fmt: skip
        return about | {"ways": ways}


@dataclass(frozen=True)
class Plot:
    """Who attacks whom, and on what.

    adversary: the party that attacks, or helps the server. auxiliary: whether a server attack is told the facts of all
    parties but the victim. colluding: also let the server and the party work together. pairs: of entities, that a
    server clusters; default: all on a GPU, a sample elsewhere.
    """

    victim: int = 0
    adversary: int = 1
    targets: int = 1000
    seed: int = 0
    colluding: bool = True
    auxiliary: bool = True
    pairs: int | None = None
    keep_scores: bool = False


PLOT = Plot()


def prepared(
    parties: Parties, names: Sequence[str], readings: Sequence[Reading], plot: Plot
) -> Iterator[tuple[Parties, list[str], dict[Reading, Targets]]]:
    """The trainings that attacks need: the parties with canaries put in, the attacks, and their targets.

    Passive attacks on triples that exist share one; canaries, and each active attack, have trainings of their own.
    """
    passive = [name for name in names if not ATTACKS[name].active]

    def drawn(reading: Reading, apart: bool) -> tuple[Parties, Targets]:
        return draw_targets(parties, reading, victim=plot.victim, adversary=plot.adversary, count=plot.targets,
                            seed=plot.seed, apart=apart)  # fmt: skip

    still = [reading for reading in readings if reading != "canaries"]
    if passive and still:
        yield parties, passive, {reading: drawn(reading, False)[1] for reading in still}
    if passive and "canaries" in readings:
        changed, targets = drawn("canaries", False)
        yield changed, passive, {"canaries": targets}
    for name in names:
        if name not in passive:
            for reading in readings:
                changed, targets = drawn(reading, True)
                yield changed, [name], {reading: targets}


class Trial:
    """A federation that is trained to be attacked.

    Parameters
    ----------
    targets
        Of one kind or several, already put into the parties' graphs where that is wanted (`prepared`).
    names
        Of the attacks: passive ones all look at the same training; an active one needs a training of its own.
    every
        Attack after every so many rounds.
    """

    def __init__(
        self,
        recipe: str,
        parties: Parties,
        settings: Settings,
        federation: Federation,
        names: Sequence[str],
        targets: Mapping[Reading, Targets],
        *,
        plot: Plot = PLOT,
        every: int = 5,
    ):
        if every < 1:
            raise TacitError(f"every is at least 1, not {every}")
        self.attacks = {name: named(name, plot, settings, every) for name in names}
        active = [name for name, attack in self.attacks.items() if attack.active]
        if active and (len(names) > 1 or len(targets) > 1):
            raise TacitError(
                f"the attack {active[0]} changes the training: it has one of its own, and targets of one kind"
            )
        self.recipe, self.parties, self.targets, self.plot, self.every = recipe, parties, targets, plot, every
        self.settings = with_noise(recipe, parties, settings, federation)
        self.federation = replace(federation, keep_every=None)
        self.later = 2 if active else 1
        """Rounds that have to pass before the attack on a round has seen all that it needs."""
        self.metrics: dict[str, Metrics] = {}
        self.rounds = 0
        self.seconds = 0.0

    def run(self, on_event: Watch = lambda event: None) -> list[Outcome]:
        """Train, and attack on the way."""
        from tacit.recipes import RECIPES, SHARED, Setup

        began = time.perf_counter()
        transcript = Transcript(self._kept, cap=1 << 36)
        setup = Setup(self.parties, self.settings, self.federation, transcript)
        setup.check(self.recipe)
        for name, attack in self.attacks.items():
            if isinstance(attack, CIA) and SHARED[self.recipe] == "entity":  # else there are no tails that travel
                [targets] = self.targets.values()
                graph = self.parties[self.plot.adversary]
                tails = targets.candidates.at(graph.entities, None)[:, 2]
                setup.disguises = {self.plot.adversary: attack.disguise(tails, len(self.parties))}
                LOG.info("%s: %d tails are turned round every %d rounds", name, len(tails), self.every)
        outcomes = begun(self.attacks, self.targets, self.parties, self.settings, self.plot)
        views = Views(transcript, self.parties, setup, self.recipe, self.plot)
        pending: list[int] = []

        def look(upto: int) -> None:
            while pending and pending[0] + self.later <= upto:
                self._attack(views, outcomes, pending.pop(0))
            transcript.forget(pending[0] if pending else upto)

        def told(event: Event) -> None:
            if event["event"] == "round":
                self.rounds = number = event["round"]
                if number % self.every == 0:
                    pending.append(number)
                look(number)
            on_event(event)

        privacy = self.settings.privacy
        if isinstance(privacy, Sound) and not privacy.trains:
            setup.prior(self.recipe)
            self._attack(views, outcomes, 0)
            tables = setup.zero_tables(self.recipe)
        else:
            together = RECIPES[self.recipe](setup)
            together.run(told)
            for number in pending if self.later == 1 else []:  # the last rows were given to be validated
                self._attack(views, outcomes, number)
            tables = together.fit.best
        self.metrics = FederatedRun.of(self.recipe, setup).end_with(tables).metrics
        self.seconds = time.perf_counter() - began
        return [finished(outcome) for outcome in outcomes]

    def _kept(self, record: Record) -> bool:
        after = record.round % self.every
        given = record.kind == "rows" and record.phase == GIVE and 0 < after <= self.later and record.round > self.every
        own = record.kind == "rows" and 0 < after < self.later and record.round > self.every
        return after == 0 or given or own

    def _attack(self, views: Views, outcomes: list[Outcome], number: int) -> None:
        """Attack a round, and note what came of it."""
        for place, outcome in enumerate(outcomes):
            attack, targets = self.attacks[outcome.attack], self.targets[outcome.reading]
            view = views.of(outcome.role, attack, targets)
            outcomes[place] = attacked(outcome, attack, view, targets, number, self.plot.keep_scores)


@dataclass
class Views:
    """What each adversary saw so far."""

    transcript: Transcript
    parties: Parties
    setup: Any
    recipe: str
    plot: Plot

    def of(self, role: Role, attack: Attack, targets: Targets) -> View:
        party = self.plot.adversary if "party" in role else None
        leaks: dict[str, Any] = {}
        if role == "server":
            if "number of relations" in attack.leaks:
                leaks["number of relations"] = len(self.parties[self.plot.victim].relations)
            if "auxiliary graph" in attack.leaks and self.plot.auxiliary:
                leaks["auxiliary graph"] = self._auxiliary
            if REST in attack.leaks:
                leaks[REST] = others_add(self.parties[self.plot.victim], targets)
        return self.transcript.view(Adversary(role, party), graphs=self.parties.graphs,
                                    known=self.setup.known(self.recipe), leaks=leaks)  # fmt: skip

    @cached_property
    def _auxiliary(self) -> Graph:
        """The facts of all parties but the victim."""
        return pool(others_of(self.parties, self.plot.victim))


def others_of(parties: Parties, victim: int) -> Parties:
    """All but one."""
    places = [i for i in range(len(parties)) if i != victim]
    return Parties(tuple(parties.names[i] for i in places), tuple(parties[i] for i in places))


def begun(
    attacks: Mapping[str, Attack],
    targets: Mapping[Reading, Targets],
    parties: Parties,
    settings: Settings,
    plot: Plot,
) -> list[Outcome]:
    """An outcome without rounds for every attack, kind of targets and adversary."""
    found, names = [], parties.names
    for name, attack in attacks.items():
        warning = None
        if isinstance(attack, SI) and not is_translation(settings.scorer):
            warning = "differences of rows do not tell the relation of this scorer: a fallback"
        for reading, each in targets.items():
            for role in attack.roles if plot.colluding else attack.roles[:1]:
                helper = names[plot.adversary] if "party" in role else None
                found.append(Outcome(name, role, reading, names[plot.victim], helper, each.member, warning=warning))
    return found


def attacked(
    outcome: Outcome, attack: Attack, view: View, targets: Targets, number: int, keep_scores: bool = False
) -> Outcome:
    """The outcome with one more round; or why there was nothing to attack in it."""
    try:
        found = attack.scores(view, targets.candidates, number)
    except Nothing as why:
        return replace(outcome, nothing=str(why)) if not outcome.by_round else outcome
    measured = {way: measure(scores, targets.member) for way, scores in found.items() if _both(scores, targets.member)}
    if not measured:
        return (
            replace(outcome, nothing="no target is within the adversary's reach") if not outcome.by_round else outcome
        )
    kept = outcome.scores | ({number: found} if keep_scores else {})
    return replace(outcome, by_round=outcome.by_round | {number: measured}, nothing=None, leaks=tuple(view.leaks),
                   scores=kept)  # fmt: skip


def named(name: str, plot: Plot, settings: Settings, every: int) -> Attack:
    """The attack of that name, for these settings."""
    if name not in ATTACKS:
        raise TacitError(f"the attack is {', '.join(ATTACKS)}; not {name!r}")
    kind = ATTACKS[name]
    if kind is CIA:
        return CIA(every=every)
    if kind is SI:
        return SI(pairs=plot.pairs, seed=plot.seed, device=chosen_device(settings.training.device))
    return kind()


def _both(scores: np.ndarray, member: np.ndarray) -> bool:
    """Whether it says something of members and of others."""
    there = ~np.isnan(scores)
    return bool((there & member).any() and (there & ~member).any())


def finished(outcome: Outcome) -> Outcome:
    """An outcome that says why, where nothing was attacked."""
    if outcome.by_round or outcome.nothing is not None:
        return outcome
    return replace(outcome, nothing="no round was attacked: train longer, or attack more often (every)")
