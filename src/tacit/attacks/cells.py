"""Attacks as cells of tables of published figures (`tacit.reproduction`).

    [attack]
    names = ["cip", "si"]          # or cia, counts, lira, trajectory; or reconstruction alone
    targets = ["existing"]         # existing, canaries, held
    count = 1000                   # targets; of reconstruction nothing
    every = 5                      # attack after every so many rounds; reconstruction: keep rows of every so many
    victim = 0                     # the party whose triples are asked for
    adversary = 1                  # the party that attacks, or helps the server
    shadows = 8
    pairs = 2000000                # of entities, that si clusters; default: all on a GPU, fewer elsewhere
    leaks = [0.3, 0.5, 1.0]        # of reconstruction: shares of the traitor's names with their rows

Each attack, by each adversary and on each kind of targets, is a line; `metrics` are the best F1 over rounds of the
paper's way, and AUC and true positives of the last round; all ways, and the course over rounds, stand beside them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tacit.attacks.attack import SHADOWED, curves
from tacit.attacks.membership import ATTACKS
from tacit.attacks.reconstruction import attack_reconstruction
from tacit.attacks.shadows import shadow_attacks
from tacit.attacks.trial import Outcome, Plot, Trial, prepared
from tacit.errors import BadInput
from tacit.federated import FederatedRun, with_noise
from tacit.graph import Graph
from tacit.parties import Parties
from tacit.privacy.plan import releases, statement
from tacit.privacy.privatizers import Published, Sound
from tacit.reproduction import Cell, divide, line
from tacit.settings import Settings
from tacit.training import Event, chosen_device

Watch = Callable[[Event], None]


def attack_cell(
    cell: Cell, graph: Graph | Parties, *, device: str | None = None, command: str = "", on_event: Watch
) -> list[dict[str, Any]]:
    """The lines of a cell."""
    settings = cell.settings
    if device is not None:
        settings = replace(settings, training=replace(settings.training, device=device))
    parties = graph if isinstance(graph, Parties) else divide(graph, cell)
    names = cell.attack.get("names", ["cip"])
    known = {*ATTACKS, *SHADOWED, "reconstruction"}
    if wrong := [name for name in names if name not in known]:
        raise BadInput(f"found {wrong[0]!r} in attack.names; expected some of {', '.join(sorted(known))}.")
    found = (_reconstructed if "reconstruction" in names else _tried)(cell, parties, settings, names, on_event)
    rows = []
    for number, row in enumerate(found):
        made = line(cell, graph, settings, parts=len(parties), command=command, line=number, lines=len(found),
                    partition=dict(cell.divided), **row)  # fmt: skip
        key = " ".join(str(row[name]) for name in ("attack", "leak", "place") if name in row)
        published = {who: figures[key] for who, figures in cell.published.items() if key in figures}
        rows.append(made | {"published": published})
    return rows


def _tried(cell: Cell, parties: Parties, settings: Settings, names: list[str], on_event: Watch) -> list[dict[str, Any]]:
    assert cell.federation is not None
    assert cell.recipe is not None
    wanted, rows = cell.attack, []
    plot = Plot(victim=wanted.get("victim", 0), adversary=wanted.get("adversary", 1),
                targets=wanted.get("count", 1000), seed=settings.seed, pairs=wanted.get("pairs"),
                keep_scores=True)  # fmt: skip
    readings, every = wanted.get("targets", ["existing"]), wanted.get("every", 5)
    for world, some, targets in prepared(parties, [name for name in names if name in ATTACKS], readings, plot):
        trial = Trial(cell.recipe, world, settings, cell.federation, some, targets, plot=plot, every=every)
        course: dict[int, float | None] = {}

        def told(event: Event, course: dict[int, float | None] = course) -> None:
            if event["event"] == "round" and "published_accounting" in event:
                known = [epsilon for epsilon in event["published_accounting"] if epsilon is not None]
                course[event["round"]] = max(known, default=None)
            on_event(event)

        outcomes = trial.run(told)
        utility = {split: round(metrics.mrr, 6) for split, metrics in trial.metrics.items()}
        cost = _cost(cell, trial.settings, world)
        if isinstance(settings.privacy, Published):
            cost |= {"published_accounting": {"delta": settings.privacy.delta, "by_round": course}}
        rows += [_row(outcome, trial.seconds, trial.rounds, mrr=utility) | cost for outcome in outcomes]
    for reading in readings if any(name in SHADOWED for name in names) else ():
        began = time.perf_counter()
        outcomes = shadow_attacks(cell.recipe, parties, settings, cell.federation, reading, plot=plot, every=every,
                                  shadows=wanted.get("shadows", 8), on_event=on_event)  # fmt: skip
        seconds = time.perf_counter() - began
        rows += [_row(outcome, seconds, None) for outcome in outcomes if outcome.attack in names]
    return rows


def _row(outcome: Outcome, seconds: float, rounds: int | None, **more: Any) -> dict[str, Any]:
    told = outcome.json()
    about = {key: told[key] for key in ("attack", "adversary", "targets", "members", "others", "nothing", "warning",
                                        "told_beyond_its_view")}  # fmt: skip
    metrics: dict[str, Any] = {"f1": None, "auc": None, "auc_low": None, "auc_high": None, "tpr": None}
    if outcome.by_round:
        way = outcome.ways[0]
        (number, best), (_, last) = outcome.best(way), outcome.last(way)
        metrics = {"way": way, "f1": round(best.f1, 6), "round": number, "auc": round(last.auc.value, 6),
                   "auc_low": round(last.auc.low, 6), "auc_high": round(last.auc.high, 6),
                   "tpr": {f"{rate:g}": round(value.value, 6) for rate, value in last.tpr.items()}}  # fmt: skip
    return {"seconds": seconds, "metrics": metrics, "rounds": rounds, "ways": told["ways"], "roc": curves(outcome)} | (
        about | more
    )


def _cost(cell: Cell, settings: Settings, parties: Parties) -> dict[str, Any]:
    """What a private training costs, a simulation's too."""
    privacy = settings.privacy
    if not isinstance(privacy, Sound):
        return {"epsilon": None}
    assert cell.federation is not None
    epochs = cell.federation.rounds * cell.federation.local_epochs
    claim = statement(settings, releases(settings, parties.graphs, epochs=epochs), holders=cell.federation.holders)
    found = claim["epsilon"] if claim["epsilon"] is not None else claim.get("simulated_epsilon")
    simulated = "simulated_epsilon" in claim
    return {"epsilon": found, "delta": claim["delta"], "sigma": privacy.sigma, "simulated": simulated}


def _reconstructed(
    cell: Cell, parties: Parties, settings: Settings, names: list[str], on_event: Watch
) -> list[dict[str, Any]]:
    assert cell.federation is not None
    assert cell.recipe is not None
    if len(names) > 1:
        raise BadInput("reconstruction has a cell of its own: expected no other name in attack.names.")
    federation = replace(cell.federation, keep_every=cell.attack.get("every", 25), keep_mb=1 << 14)
    run = FederatedRun(cell.recipe, parties, with_noise(cell.recipe, parties, settings, federation), federation)
    began = time.perf_counter()
    run.train(on_event)
    found = attack_reconstruction(run, traitor=cell.attack.get("adversary", 0), leaks=cell.attack.get("leaks"),
                                  seed=settings.seed, device=chosen_device(settings.training.device))  # fmt: skip
    seconds = time.perf_counter() - began
    mrr = {split: round(metrics.mrr, 6) for split, metrics in run.metrics.items()}
    return [
        {"seconds": seconds, "metrics": {"err": row["err"], "trr": row["trr"]}, "attack": row["attack"],
         "victim": row["victim"], "place": f"C{parties.names.index(row['victim']) + 1}", "leak": row["leak"],
         "nothing": row.get("nothing"), "mrr": mrr, "found": row}
        for row in found
    ]  # fmt: skip
