"""`attack`: what others would learn from a run. Of a federation by a transcript that was kept, or by trials of the same
kind (`attack_federation`); of one graph, what its model gives away of confidential statements (`attack_training`).

A passive attack on triples that exist looks at what a run kept of its messages (`federation.keep_every`). Everything
else needs trainings of its own: the federation's settings and graphs once more, with canaries, a malicious party, or
shadows; of those nothing is kept but what the attacks found.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from tacit.attacks.critical import critical, neighbours
from tacit.attacks.measures import RATES, Interval, Measured, roc
from tacit.attacks.membership import ATTACKS
from tacit.attacks.reconstruction import attack_reconstruction
from tacit.attacks.seen import kept_rounds
from tacit.attacks.shadows import shadow_attacks
from tacit.attacks.targets import READINGS, Reading, Targets, draw_targets
from tacit.attacks.trial import PLOT, Outcome, Plot, Trial, Views, attacked, begun, finished, named, prepared
from tacit.errors import TacitError
from tacit.federated import FederatedRun, opened
from tacit.folders import PRIVATE, write_json
from tacit.privacy.privatizers import NoPrivacy
from tacit.recipes import SHARED
from tacit.run import Run, train
from tacit.training import Event

SHADOWED = ("lira", "trajectory")
NAMES = (*ATTACKS, *SHADOWED)
"""Of membership attacks."""
OF_STATEMENTS = ("critical", "neighbours")
"""Of attacks on one model, trained on a graph with confidential statements."""
POINTS = 200
"""Of a ROC curve that is kept."""


@dataclass(frozen=True, eq=False)
class Findings:
    """What attacks on a run found.

    `auc`, `tpr` and `f1` are of the `strongest` that was tried, in the last round attacked. It is chosen after the
    fact, so its limits are a little too narrow; `outcomes` have every attack, adversary, kind of targets and way.

    Attributes
    ----------
    epsilon
        What the run claims; None: nothing.
    outcomes
        Of membership attacks on a federation, one for each attack, adversary and kind of targets.
    reconstruction
        Of attacks that name rows, by share of names that were leaked: as JSON has it.
    statements
        Of attacks on one model with confidential statements, by attack: as JSON has it.
    """

    epsilon: float | None
    outcomes: tuple[Outcome, ...] = ()
    reconstruction: tuple[dict[str, Any], ...] = ()
    statements: Mapping[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def strongest(self) -> tuple[Outcome, str] | None:
        """The outcome and the way with the largest AUC; None: there was nothing to attack.

        What looks at nothing that was sent ("blind") counts only where nothing else does; and so do targets against
        triples that no one holds ("existing"), which are mostly told apart by what is plausible.
        """
        tried = [(outcome, way) for outcome in self.outcomes for way in outcome.ways]
        tried = [each for each in tried if each[0].attack != "blind"] or tried
        tried = [each for each in tried if each[0].reading != "existing"] or tried
        return max(tried, key=lambda each: each[0].last(each[1])[1].auc.value, default=None)

    @property
    def measured(self) -> Measured | None:
        """All that was measured of the strongest."""
        found = self.strongest
        return None if found is None else found[0].last(found[1])[1]

    @property
    def auc(self) -> Interval | None:
        """The chance that a member's score is above another's, with 95% limits: 0.5 is a coin's."""
        return None if self.measured is None else self.measured.auc

    @property
    def tpr(self) -> dict[float, Interval]:
        """Members found, by the share of others accused wrongly."""
        return {} if self.measured is None else self.measured.tpr

    @property
    def f1(self) -> float | None:
        """At the best threshold, chosen with the truth at hand: always saying yes has 0.667 already."""
        return None if self.measured is None else self.measured.f1

    @property
    def nothing(self) -> tuple[str, ...]:
        """Why some had nothing to attack."""
        silent = [f"{each.attack} by {each.role}: {each.nothing}" for each in self.outcomes if each.nothing is not None]
        silent += [f"reconstruction: {row['nothing']}" for row in self.reconstruction if row.get("nothing")]
        return tuple(dict.fromkeys(silent))

    def json(self) -> dict[str, Any]:
        """All of it, as `tacit attack --json` prints it."""
        attacks = [outcome.json() for outcome in self.outcomes]
        return {"epsilon": self.epsilon, "attacks": attacks, "reconstruction": list(self.reconstruction)} | dict(
            self.statements
        )

    def __repr__(self) -> str:
        parts = []
        if (found := self.strongest) is not None:
            (outcome, way), rate = found, RATES[0]
            numbers = f"AUC {self.auc}, true positives {self.tpr[rate].value:.3f} at {rate:.0%}, F1 {self.f1:.3f}"
            parts.append(f"{outcome.attack} by {outcome.role}, {way}: {numbers}; {outcome.reading}, {outcome.victim}")
        named_rows = [row for row in self.reconstruction if row["err"] is not None]
        parts += [f"reconstruction by {row['leak']:.0%}: {row['err']:.3f} of entities, {row['trr']:.3f} of triples"
                  for row in named_rows]  # fmt: skip
        parts += [f"{name}: {_in_words(about)}" for name, about in self.statements.items()]
        parts += [f"nothing to attack for {why}" for why in self.nothing]
        return f"Findings({'; '.join(parts)})"


def _in_words(about: Mapping[str, Any]) -> str:
    """An attack on statements, by its one number."""
    if "larger" in about:
        return f"private ranks larger with a chance of {about['larger']['auc']['value']:.3f}"
    falls = (f"{name} {found['removed']['auc']['value']:.3f}" for name, found in about.items())
    return f"scores fall without it: {', '.join(falls)}"


def attack(
    run: Run | FederatedRun | str | Path,
    attack: str | Sequence[str] | None = None,
    *,
    targets: Reading | Sequence[Reading] = "existing",
    count: int = 1000,
    victim: str | None = None,
    adversary: str | None = None,
    every: int = 5,
    shadows: int = 8,
    seed: int = 0,
    on_event: Callable[[Event], None] = lambda event: None,
) -> Findings:
    """Try what an attacker could: which triples are a party's, whose row is which, what confidential statements say.

    Passive attacks (si, cip, counts) on triples that exist, and reconstruction, use what a run kept of its messages
    (federation.keep_every); everything else trains federations of the same settings for it, in memory. What is found
    is kept in private/attacks/ of the run's folder, if it has one.

    Parameters
    ----------
    run
        A run, or its folder.
    attack
        One or several. Of a federation: si, cip, cia, counts, lira, trajectory, reconstruction; default: cip. Of one
        graph: critical, neighbours; default: critical.
    targets
        Of membership attacks: existing, canaries, held; one or several (`tacit.attacks.targets`).
    count
        Targets, half of them members; or confidential statements.
    victim
        Whose triples are asked for; default: the first party.
    adversary
        The party that attacks, or helps the server; default: another.
    every
        Attack after every so many rounds of a training that is made for it. A transcript has the rounds it kept.
    shadows
        How many federations lira and trajectory learn from.
    seed
        Of the targets.
    on_event
        Told of every round of trainings that are made for it.

    >>> from tacit.clinic import clinic
    >>> from tacit.federated import federate
    >>> run = federate(clinic("small"), "fede", dim=8, negatives=4, rounds=2, every=1)
    >>> found = attack(run, "cip", targets="canaries", count=40, every=1)
    >>> found.auc.low < found.auc.value < found.auc.high, found.epsilon
    (True, None)
    """
    run = opened(run)
    names = _listed(attack if attack is not None else "cip" if isinstance(run, FederatedRun) else "critical")
    if not names:
        raise TacitError("say which attack: the list of them is empty.")
    if isinstance(run, Run):
        if victim is not None or adversary is not None:
            raise TacitError("this is a training of one graph: there are no parties to be victim or adversary.")
        return Findings(run.epsilon, statements=attack_training(run, names, statements=count, seed=seed))
    first = 0 if victim is None else run.place(victim, "to be the victim")
    second = int(first == 0) if adversary is None else run.place(adversary, "to be the adversary")
    outcomes: list[Outcome] = []
    rates: list[dict[str, Any]] = []
    if others := [name for name in names if name != "reconstruction"]:
        plot = Plot(victim=first, adversary=second, targets=count, seed=seed)
        outcomes = attack_federation(run, others, _listed(targets), plot=plot, every=every, shadows=shadows,
                                     on_event=on_event)  # fmt: skip
    if len(others) < len(names):
        rates = attack_reconstruction(run, traitor=second, victims=[first], seed=seed)
        write_found(run, "reconstruction", {"found": rates})
    return Findings(run.epsilon, tuple(outcomes), tuple(rates))


def _listed(given: Any) -> list[Any]:
    return [given] if isinstance(given, str) else list(given)


def attack_federation(
    run: FederatedRun,
    names: Sequence[str] = ("cip",),
    readings: Sequence[Reading] = ("existing",),
    *,
    plot: Plot = PLOT,
    every: int = 5,
    shadows: int = 8,
    on_event: Callable[[Event], None] = lambda event: None,
) -> list[Outcome]:
    """Membership attacks of these names on a federation; in its folder, if it has one, what they found.

    Parameters
    ----------
    readings
        Which targets: existing, canaries, held (`tacit.attacks.targets`).
    every
        Attack after every so many rounds of a training that is made for it. A transcript has the rounds it kept.
    shadows
        How many federations an attack that learns from its own trains for that.
    """
    for name in names:
        if name not in NAMES:
            raise TacitError(f"the attack is one of {', '.join(NAMES)}; not {name!r}")
    if wrong := [reading for reading in readings if reading not in READINGS]:
        raise TacitError(f"targets are {', '.join(READINGS)}; not {wrong[0]!r}")
    if run.recipe not in SHARED:
        raise TacitError(f"nothing is shared by the recipe {run.recipe}: there is nothing for others to attack")
    plain = [name for name in dict.fromkeys(names) if name in ATTACKS]
    passive = [name for name in plain if not ATTACKS[name].active]
    if passive and set(readings) - {"canaries"} and "blind" not in plain:
        plain.append("blind")  # what such targets' kind alone gives away
        passive.append("blind")
    plot = replace(plot, keep_scores=True)
    outcomes = []
    kept = run.finished and bool(run.transcript.payloads) and run.federation.keep_every is not None
    still: list[Reading] = [reading for reading in readings if reading != "canaries"]
    if kept and passive and still:
        outcomes += from_transcript(run, passive, still, plot=plot)
    else:
        passive, still = [], []  # nothing is done yet
    for parties, some, targets in prepared(run.parties, plain, readings, plot):
        if set(some) <= set(passive) and set(targets) <= set(still):
            continue
        trial = Trial(run.recipe, parties, run.settings, run.federation, some, targets, plot=plot, every=every)
        outcomes += trial.run(on_event)
    for reading in readings if any(name in SHADOWED for name in names) else ():
        found = shadow_attacks(run.recipe, run.parties, run.settings, run.federation, reading, shadows=shadows,
                               plot=plot, every=every, on_event=on_event)  # fmt: skip
        outcomes += [outcome for outcome in found if outcome.attack in names]
    for outcome in outcomes:
        write_outcome(run, outcome)
    return outcomes


def from_transcript(
    run: FederatedRun, names: Sequence[str], readings: Sequence[Reading], *, plot: Plot = PLOT
) -> list[Outcome]:
    """Passive attacks on what a finished federation kept of its messages (`federation.keep_every`)."""
    if wrong := [name for name in names if ATTACKS[name].active]:
        raise TacitError(f"the attack {wrong[0]} changes the training: a transcript is too late for it")
    if "canaries" in readings:
        raise TacitError("canaries have to be put in before training: a transcript is too late for them")
    targets: Mapping[Reading, Targets] = {
        reading: draw_targets(run.parties, reading, victim=plot.victim, adversary=plot.adversary, count=plot.targets,
                              seed=plot.seed)[1]
        for reading in readings
    }  # fmt: skip
    attacks = {name: named(name, plot, run.settings, 1) for name in names}
    views = Views(run.transcript, run.parties, run._setup(), run.recipe, plot)
    outcomes = begun(attacks, targets, run.parties, run.settings, plot)
    for place, outcome in enumerate(outcomes):
        how, asked = attacks[outcome.attack], targets[outcome.reading]
        view = views.of(outcome.role, how, asked)
        for number in kept_rounds(view) or [0]:
            outcomes[place] = attacked(outcomes[place], how, view, asked, number, plot.keep_scores)
    return [finished(outcome) for outcome in outcomes]


def attack_training(
    run: Run, names: Sequence[str] = ("critical",), *, statements: int = 1000, seed: int = 0
) -> dict[str, dict[str, Any]]:
    """What a model of one graph gives away of its confidential statements (Han et al. 2022), by attack.

    critical: their ranks by this model, and by one that is trained the same without privacy. neighbours: their ranks in
    trainings with and without each, with privacy and without; of at most 100 of them, for each takes two trainings.
    """
    if wrong := [name for name in names if name not in OF_STATEMENTS]:
        raise TacitError(f"an attack on one model is one of {', '.join(OF_STATEMENTS)}; not {wrong[0]!r}")
    if not run.settings.privacy.sound:
        raise TacitError("a private model is compared with a plain one, and this one is plain: train with --epsilon")
    plain, found = replace(run.settings, privacy=NoPrivacy()), {}
    if "critical" in names:
        other = train(run.graph, settings=plain)
        about = critical(run.model, other.model, run.graph, statements=statements, seed=seed).json()
        ranks = {name: each.metrics["test"].mrr for name, each in (("private", run), ("plain", other))
                 if "test" in each.metrics}  # fmt: skip
        found["critical"] = about | {"test_mrr": ranks}
    if "neighbours" in names:
        found["neighbours"] = {
            name: neighbours(run.graph, settings, statements=min(statements, 100), seed=seed).json()
            for name, settings in (("private", run.settings), ("plain", plain))
        }
    for name, about in found.items():
        write_found(run, name, about)
    return found


def write_outcome(run: FederatedRun, outcome: Outcome) -> None:
    """What was found of some targets."""
    name = f"{outcome.attack}-{outcome.role.replace('+', '-')}-{outcome.reading}"
    write_found(run, name, outcome.json() | {"roc": curves(outcome)})


def write_found(run: FederatedRun | Run, name: str, found: Mapping[str, Any]) -> None:
    """Into private/attacks/ of the run's folder, if it has one: the truth was looked at."""
    if run.path is None:
        return
    folder = run.path / PRIVATE / "attacks"
    folder.mkdir(mode=0o700, exist_ok=True)
    write_json(folder / f"{name}.json", "tacit.attack/1", dict(found))


def curves(outcome: Outcome) -> dict[str, Any]:
    """By way: false and true positive rates of the last round that was attacked, in a few points."""
    if not outcome.scores:
        return {}
    found = {}
    for way, scores in outcome.scores[max(outcome.scores)].items():
        if np.isnan(scores).all():
            continue
        false, true = roc(scores, outcome.member)
        some = np.unique(np.linspace(0, len(false) - 1, POINTS).astype(int))
        found[way] = [[round(float(x), 5) for x in side[some]] for side in (false, true)]
    return found
