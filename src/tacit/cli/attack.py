"""`tacit attack`: what others would learn from a federation."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from tacit.cli import show
from tacit.cli.federate import bar
from tacit.cli.options import AsJson
from tacit.errors import TacitError

if TYPE_CHECKING:
    from tacit.attacks.trial import Outcome
    from tacit.federated import FederatedRun

ALWAYS = 2 / 3


def attack(
    path: Annotated[Path, typer.Argument(help="The folder of a federation.")],
    attacks: Annotated[
        str, typer.Option("--attack", help="si, cip, cia, counts, lira, trajectory; several with commas.")
    ] = "cip",
    kinds: Annotated[
        str, typer.Option("--targets", help="existing, canaries, held; several with commas.")
    ] = "existing",
    count: Annotated[int, typer.Option(help="Targets, half of them members.")] = 1000,
    victim: Annotated[str | None, typer.Option(help="Whose triples are asked for. Default: the first party.")] = None,
    adversary: Annotated[
        str | None, typer.Option(help="The party that attacks, or helps the server. Default: another.")
    ] = None,
    every: Annotated[int, typer.Option(help="Attack after every so many rounds, where a training is made for it.")] = 5,
    shadows: Annotated[int, typer.Option(help="Federations that lira and trajectory learn from.")] = 8,
    seed: Annotated[int, typer.Option(min=0, help="Of the targets.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Try to tell which triples are in a party's training set, as others in the federation could.

    Passive attacks (si, cip, counts) on triples that exist use what the run kept of its messages
    (federation.keep_every); everything else trains federations of the same settings for it, in memory. What is found
    is kept in private/attacks/ of the run.
    """
    from tacit.attacks.attack import attack as run_attacks
    from tacit.attacks.trial import Plot
    from tacit.federated import FederatedRun, is_federation

    if (path / "config.json").is_file() and not is_federation(path):
        raise TacitError(f"{path} is a training of one graph: no one else was there to attack it. Try: tacit audit")
    run = FederatedRun.open(path)
    first = _place(run, victim, "victim") if victim is not None else 0
    second = _place(run, adversary, "adversary") if adversary is not None else int(first == 0)
    plot = Plot(victim=first, adversary=second, targets=count, seed=seed)
    began = time.perf_counter()
    with bar(f"attacks on {run.recipe}", run.federation.rounds, as_json) as on_event:
        found = run_attacks(run, _list(attacks), cast(Any, _list(kinds)), plot=plot, every=every, shadows=shadows,
                            on_event=on_event)  # fmt: skip
    seconds = round(time.perf_counter() - began, 2)
    if as_json:
        about = {"out": str(path / "private" / "attacks"), "seconds": seconds, "epsilon": run.epsilon}
        print(json.dumps(about | {"attacks": [outcome.json() for outcome in found]}))
        return
    _show(run, found, seconds)


def _list(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _place(run: FederatedRun, name: str, what: str) -> int:
    if name not in run.parties.names:
        raise TacitError(f"there is no party {name!r} to be the {what}. There are: {', '.join(run.parties.names)}.")
    return run.parties.names.index(name)


def _show(run: FederatedRun, found: list[Outcome], seconds: float) -> None:
    helper = next((outcome.adversary for outcome in found if outcome.adversary), None)
    by = f" The party is {helper}." if helper else ""
    rounds = set()
    for kind in dict.fromkeys(outcome.reading for outcome in found if outcome.nothing is None):
        rows = []
        for outcome in found:
            for way in outcome.ways if outcome.reading == kind else ():
                (_, best), (number, last) = outcome.best(way), outcome.last(way)
                numbers = (best.f1, last.auc.value, last.auc.low, last.auc.high, last.tpr[0.01].value)
                rows.append((outcome.attack, way, *(f"{x:.3f}" for x in numbers)))
                rounds.add(number)
        title = f"{run.recipe}: is this triple in the training set of {found[0].victim}? Targets: {kind}.{by}"
        show.table("attack", "way", "F1", "AUC", "from", "to", "TPR at 1%", rows=rows, title=title)
    if rounds:
        when = " and ".join(map(str, sorted(rounds)))
        show.say(
            f"An F1 of {ALWAYS:.3f} is that of always saying yes, an AUC of 0.5 that of a coin. F1 is the best over "
            "rounds and thresholds, as the papers have it; AUC, its 95% limits, and true positives at 1% false ones "
            f"are of the last round attacked ({when})."
        )
    silent = [f"{outcome.attack} by {outcome.role}: nothing to attack: {outcome.nothing}." for outcome in found
              if outcome.nothing is not None]  # fmt: skip
    for line in dict.fromkeys(silent):
        show.say(line)
    show.warn(dict.fromkeys(outcome.warning for outcome in found if outcome.warning))
    if told := sorted({leak for outcome in found for leak in outcome.leaks}):
        show.say(f"Told beyond what the adversary saw: {'; '.join(told)}.")
    show.say(f"{seconds:.1f} s. Kept in {run.path}/private/attacks.")
