"""Attacks that learn from federations of their own: what a target's score looks like with it, and without.

lira         the likelihood ratio of a target's score, by scores of shadow federations that had it and that had not
             (Carlini, Chien, Nasr, Song, Terzis and Tramer: "Membership inference attacks from first principles", 2022)
trajectory   the course of a target's score over the rounds, judged by a logistic regression that shadow federations
             taught (after Liu, Zhao, Backes and Zhang: "Membership inference attacks by exploiting loss trajectory",
             2022)

The attacker is a party. It is told the facts of all parties but the victim (a declared leak, as the DP-FLames paper's
server is), and of those makes a victim of its own: a random share of them, as many as it has itself, and targets by
the toss of a coin. The regression learns from other targets than those it is tried on; no threshold is chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from tacit.attacks.measures import measure
from tacit.attacks.seen import Nothing
from tacit.attacks.targets import (
    Names,
    Reading,
    Targets,
    draw_targets,
    named_targets,
    targets_of,
    with_triples,
    without,
)
from tacit.attacks.trial import PLOT, Outcome, Plot, Trial, others_of
from tacit.draws import Purpose, Stream
from tacit.errors import BadValue, TacitError
from tacit.federated import Federation, with_noise
from tacit.graph import Graph, Split
from tacit.parties import Parties, pool
from tacit.settings import Settings
from tacit.training import Event

WAY = "score"
"""Of CIP: what a party sees of a candidate in the others' rows."""
LEAK = "the facts of all parties but the victim"
LEAST = 1e-6
RIDGE = 1.0


def shadow_attacks(
    recipe: str,
    parties: Parties,
    settings: Settings,
    federation: Federation,
    reading: Reading,
    *,
    shadows: int = 8,
    plot: Plot = PLOT,
    every: int = 5,
    on_event: Callable[[Event], None] = lambda event: None,
) -> list[Outcome]:
    """Both attacks on one training, by the same shadow federations."""
    if shadows < 4:
        raise BadValue(f"there are at least 4 shadow federations, not {shadows}")
    changed, targets = draw_targets(parties, reading, victim=plot.victim, adversary=plot.adversary, count=plot.targets,
                                    seed=plot.seed)  # fmt: skip
    # Shadow victims hold what others hold: that is no one's privacy, and their noise is that of the true federation.
    settings, shadowy = with_noise(recipe, changed, settings, federation), replace(federation, holders=len(parties))
    facts = pool(others_of(parties, plot.victim))
    lessons = _lessons(parties, targets, facts, plot)
    every_target = [*named_targets(targets.candidates), *lessons]
    # In the true federation too the lessons are asked about: none of them is the victim's.
    asked = _asked(every_target, plot.victim, reading)
    about = Outcome("lira", "party", reading, parties.names[plot.victim], parties.names[plot.adversary],
                    targets.member, leaks=(LEAK,))  # fmt: skip
    try:
        seen = _course(Trial(recipe, changed, settings, federation, ["cip"], {reading: asked}, plot=_keeping(plot),
                             every=every), on_event)  # fmt: skip
    except Nothing as why:
        return [replace(about, attack=name, nothing=str(why), leaks=()) for name in ("lira", "trajectory")]
    courses, coins = [], []
    for number in range(shadows):
        coin = np.asarray(Stream(plot.seed, Purpose.TARGETS, 2, number).uniform(len(every_target))) < 0.5
        graphs = list(parties.graphs)
        graphs[plot.victim] = _shadow(facts, parties, plot, asked, coin, number)
        world = replace(settings, seed=settings.seed + 1 + number)
        trial = Trial(recipe, replace(parties, graphs=tuple(graphs)), world, shadowy, ["cip"], {reading: asked},
                      plot=_keeping(plot), every=every)  # fmt: skip
        courses.append(_course(trial, on_event))
        coins.append(coin)
    rounds = sorted(set(seen).intersection(*courses))
    if not rounds:
        silence = "no round was attacked in all trainings: train longer, or attack more often (every)"
        return [replace(about, attack=name, nothing=silence) for name in ("lira", "trajectory")]
    many, inside = len(targets), np.stack(coins)
    whole = np.stack([[course[number] for number in rounds] for course in courses])  # (shadows, rounds, targets)
    true = np.stack([seen[number] for number in rounds])
    ratio = likelihood_ratio(true[-1, :many], whole[:, -1, :many], inside[:, :many])
    lesson = whole[:, :, many:].transpose(0, 2, 1).reshape(-1, len(rounds))
    taught = taught_scores(lesson, inside[:, many:].reshape(-1), true[:, :many].T)
    found = {"lira": {"likelihood ratio": ratio}, "trajectory": {"logistic regression": taught}}
    return [
        replace(about, attack=name, by_round={rounds[-1]: {way: measure(scores, targets.member)}},
                scores={rounds[-1]: ways} if plot.keep_scores else {})
        for name, ways in found.items()
        for way, scores in ways.items()
    ]  # fmt: skip


def likelihood_ratio(true: np.ndarray, shadows: np.ndarray, inside: np.ndarray) -> np.ndarray:
    """log p(score | in) - log p(score | out), normal distributions: means by target, one deviation for all targets.

    `true`: (targets,); `shadows`, `inside`: (shadows, targets). NaN where a target was always in, or never.
    """
    there = ~np.isnan(shadows)
    means, deviations = [], []
    for side in (inside & there, ~inside & there):
        count = side.sum(0)
        mean = np.where(count > 0, np.where(side, shadows, 0.0).sum(0) / np.maximum(count, 1), np.nan)
        rest = np.where(side, shadows - mean, 0.0)
        free = np.maximum((count - 1).clip(min=0).sum(), 1)
        means.append(mean)
        deviations.append(max(float(np.sqrt(np.square(rest).sum() / free)), LEAST))
    terms = [-np.log(d) - 0.5 * np.square((true - m) / d) for m, d in zip(means, deviations, strict=True)]
    found: np.ndarray = terms[0] - terms[1]
    return found


def taught_scores(lessons: np.ndarray, member: np.ndarray, asked: np.ndarray) -> np.ndarray:
    """A logistic regression with a ridge, of (lessons, features) and their truth, applied to (asked, features)."""
    there = ~np.isnan(lessons).any(1)
    if member[there].all() or not member[there].any():
        raise TacitError("the lessons have no members, or nothing else")
    middle, spread = lessons[there].mean(0), np.maximum(lessons[there].std(0), LEAST)
    known = np.column_stack([np.ones(there.sum()), (lessons[there] - middle) / spread])
    weights, truth = np.zeros(known.shape[1]), member[there].astype(np.float64)
    for _ in range(30):  # Newton's steps
        chance = 1 / (1 + np.exp(-known @ weights))
        penalty = RIDGE * np.r_[0.0, np.ones(len(weights) - 1)]
        slope = known.T @ (truth - chance) - penalty * weights
        bend = (known * (chance * (1 - chance))[:, None]).T @ known + np.diag(penalty + LEAST)
        weights = weights + np.linalg.solve(bend, slope)
    found: np.ndarray = np.column_stack([np.ones(len(asked)), (asked - middle) / spread]) @ weights
    return found


def _keeping(plot: Plot) -> Plot:
    return replace(plot, keep_scores=True, colluding=False)


def _course(trial: Trial, on_event: Callable[[Event], None]) -> dict[int, np.ndarray]:
    """By round: what the party sees of each target."""
    [outcome] = trial.run(on_event)
    if outcome.nothing is not None:
        raise Nothing(outcome.nothing)
    return {number: scores[WAY] for number, scores in outcome.scores.items()}


def _lessons(parties: Parties, targets: Targets, facts: Graph, plot: Plot) -> list[Names]:
    """Other targets of the same kind, that the regression learns from: of facts that the attacker knows, or random."""
    known = set(named_targets(targets.candidates))
    kind: Reading = "canaries" if targets.reading == "canaries" else "existing"
    helper = next((i for i in range(len(parties)) if i not in (plot.victim, plot.adversary)), None)
    if kind == "existing" and helper is None:
        raise TacitError("shadows of triples that exist need a third party, whose triples teach")
    whose = plot.victim if kind == "canaries" else helper
    assert whose is not None
    _, drawn = draw_targets(parties, kind, victim=whose, adversary=plot.adversary, count=plot.targets,
                            seed=plot.seed + 1)  # fmt: skip
    found = [each for each in named_targets(drawn.candidates) if each not in known]
    return [(h, r, t) for h, r, t in found if h in facts.entities and t in facts.entities and r in facts.relations]


def _shadow(facts: Graph, parties: Parties, plot: Plot, asked: Targets, coin: np.ndarray, number: int) -> Graph:
    """A victim of the attacker's own: a share of the facts it knows, as many as it has; of what is asked, what its coin
    says, and nothing else.
    """
    many = min(len(facts.train), len(parties[plot.adversary].train))
    chosen = Stream(plot.seed, Purpose.TARGETS, 3, number).permutation(len(facts.train))[:many]
    none = Split(np.zeros((0, 3), np.int32))
    share = replace(facts, train=facts.train.at(np.sort(chosen)), valid=none, test=none)
    names = named_targets(asked.candidates)
    return with_triples(without(share, asked), [names[i] for i in np.flatnonzero(coin)])


def _asked(triples: list[Names], victim: int, reading: Reading) -> Targets:
    """Targets whose truth is made up: they are only asked about."""
    return targets_of(triples, np.arange(len(triples)) % 2 == 0, reading, victim)
