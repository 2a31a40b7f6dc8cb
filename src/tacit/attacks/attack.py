"""`attack`: what attackers would learn from a federation, by a transcript that was kept or by trials of the same kind.

A passive attack on triples that exist looks at what a run kept of its messages (`federation.keep_every`). Everything
else needs trainings of its own: the federation's settings and graphs once more, with canaries, a malicious party, or
shadows; of those nothing is kept but what the attacks found.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tacit.attacks.measures import roc
from tacit.attacks.membership import ATTACKS
from tacit.attacks.seen import kept_rounds
from tacit.attacks.shadows import shadow_attacks
from tacit.attacks.targets import READINGS, Reading, Targets, draw_targets
from tacit.attacks.trial import PLOT, Outcome, Plot, Trial, Views, attacked, begun, finished, named, prepared
from tacit.errors import TacitError
from tacit.federated import FederatedRun
from tacit.folders import PRIVATE, write_json
from tacit.recipes import SHARED
from tacit.training import Event

SHADOWED = ("lira", "trajectory")
NAMES = (*ATTACKS, *SHADOWED)
"""Of membership attacks."""
POINTS = 200
"""Of a ROC curve that is kept."""


def attack(
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
    plot = replace(plot, keep_scores=True)
    outcomes = []
    kept = run.finished and bool(run.transcript.payloads) and run.federation.keep_every is not None
    passive = [name for name in plain if not ATTACKS[name].active]
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
    if run.path is not None:
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


def write_outcome(run: FederatedRun, outcome: Outcome) -> None:
    """Into private/attacks/ of the run's folder: who is a member was looked at."""
    assert run.path is not None
    folder = run.path / PRIVATE / "attacks"
    folder.mkdir(mode=0o700, exist_ok=True)
    name = f"{outcome.attack}-{outcome.role.replace('+', '-')}-{outcome.reading}.json"
    write_json(folder / name, "tacit.attack/1", outcome.json() | {"roc": curves(outcome)})


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
