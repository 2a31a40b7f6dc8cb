"""`tacit attack`: what others would learn from a federation, or from a model that is published."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from tacit.cli import show
from tacit.cli.federate import bar
from tacit.cli.options import AsJson
from tacit.folders import PRIVATE

if TYPE_CHECKING:
    from tacit.attacks.trial import Outcome
    from tacit.federated import FederatedRun

ALWAYS = 2 / 3


def attack(
    path: Annotated[Path, typer.Argument(help="The folder of a run.")],
    attacks: Annotated[
        str | None,
        typer.Option(
            "--attack",
            help="Of a federation: si, cip, cia, counts, lira, trajectory, reconstruction. Of one graph: critical, "
            "neighbours. Several with commas. Default: cip, or critical.",
        ),
    ] = None,
    kinds: Annotated[
        str, typer.Option("--targets", help="existing, canaries, held; several with commas.")
    ] = "existing",
    count: Annotated[int, typer.Option(help="Targets, half of them members; or confidential statements.")] = 1000,
    victim: Annotated[str | None, typer.Option(help="Whose triples are asked for. Default: the first party.")] = None,
    adversary: Annotated[
        str | None, typer.Option(help="The party that attacks, or helps the server. Default: another.")
    ] = None,
    every: Annotated[int, typer.Option(help="Attack after every so many rounds, where a training is made for it.")] = 5,
    shadows: Annotated[int, typer.Option(help="Federations that lira and trajectory learn from.")] = 8,
    seed: Annotated[int, typer.Option(min=0, help="Of the targets.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Try what an attacker could: which triples are a party's, whose row is which, what confidential statements say.

    Passive attacks (si, cip, counts) on triples that exist, and reconstruction, use what the run kept of its messages
    (federation.keep_every); everything else trains federations of the same settings for it, in memory. What is found
    is kept in private/attacks/ of the run.

    Example:
      tacit attack runs/together --attack cip,counts --victim riverside
    """
    from tacit.attacks.attack import attack as run_attacks
    from tacit.federated import FederatedRun, opened

    began, run = time.perf_counter(), opened(path)
    progress: Any = show.busy("training models to compare with", as_json)
    if isinstance(run, FederatedRun):
        progress = bar(f"attacks on {run.recipe}", run.federation.rounds, as_json)
    with progress as on_event:
        found = run_attacks(run, _list(attacks) if attacks else None, targets=cast(Any, _list(kinds)),
                            count=count, victim=victim, adversary=adversary, every=every, shadows=shadows, seed=seed,
                            on_event=on_event or (lambda event: None))  # fmt: skip
    seconds = round(time.perf_counter() - began, 2)
    if as_json:
        print(json.dumps({"out": str(path / PRIVATE / "attacks"), "seconds": seconds} | found.json()))
        return
    if isinstance(run, FederatedRun):
        _show(run, list(found.outcomes))
    _show_rates(list(found.reconstruction))
    _show_statements(found.statements)
    show.say(f"{seconds:.1f} s. Kept in {path / PRIVATE / 'attacks'}.")


def _show_statements(found: Mapping[str, dict[str, Any]]) -> None:
    """Of one model with confidential statements."""
    if "critical" in found:
        about = found["critical"]
        rows = []
        for name in ("private", "plain"):
            each, fitting = about[name], about[name]["fitting_tail"]
            told = "" if fitting is None else f"{fitting['auc']['value']:.3f}"
            rows.append((name, f"{about['test_mrr'].get(name, float('nan')):.3f}", f"{each['median']:g}",
                         f"{each['top10']:.0%}", told))  # fmt: skip
        show.table("model", "test MRR", "median rank", "in the top 10", "told from false: AUC", rows=rows,
                   title=f"Ranks of {about['statements']} confidential statements")  # fmt: skip
        larger = about["larger"]
        show.say(f"Private ranks are larger with a chance of {larger['auc']['value']:.3f} (Mann and Whitney: p = "
                 f"{larger['p']:.2g}).")  # fmt: skip
    if "neighbours" in found:
        falls: list[tuple[str, ...]] = [
            (name, *(f"{about[which]['auc']['value']:.3f}" for which in ("removed", "own", "shuffled")))
            for name, about in found["neighbours"].items()
        ]
        show.table("training", "falls without it", "beside another removed", "of that other alone", rows=falls,
                   title="How often a confidential statement's score falls when it is left out")  # fmt: skip


def _show_rates(rates: list[dict[str, Any]]) -> None:
    """Of reconstruction."""
    rows = [(f"{row['leak']:g}", f"{row['err']:.3f}", f"{row['trr']:.3f}", f"{row['control']['err']:.3f}",
             f"{row['control']['trr']:.3f}") for row in rates if row["err"] is not None]  # fmt: skip
    if rows:
        title = f"Reconstruction of {rates[0]['victim']} by the server and {rates[0]['traitor']}"
        show.table("leak", "entities named", "triples found", "... before training", "... and triples", rows=rows,
                   title=title)  # fmt: skip
    for reason in dict.fromkeys(row["nothing"] for row in rates if row.get("nothing")):
        show.say(f"reconstruction: nothing to attack: {reason}.")


def _list(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _show(run: FederatedRun, found: list[Outcome]) -> None:
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
