"""`tacit audit`: what a training gives away at least, beside what is claimed for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tacit.cli import show
from tacit.cli.federate import bar as bar_of_rounds
from tacit.cli.federate import warnings_to
from tacit.cli.models import RunPath, bar
from tacit.cli.options import AsJson, Device, Seed
from tacit.folders import PRIVATE

if TYPE_CHECKING:
    from tacit.privacy.onerun import OneRun

MEANS = {
    "holds": "Nothing here speaks against the claim. That is no proof: this adversary is one of many, its bound loose.",
    "violated": "More was learned than the claim allows: the mechanism, or its code, has a fault. Publish nothing.",
    "no claim": "Nothing is claimed for this training: so much, at least, its rows give away of single triples.",
}


def audit(
    path: RunPath,
    canaries: Annotated[int, typer.Option(help="Triples on names of their own that are in or out by a coin.")] = 1000,
    guesses: Annotated[int, typer.Option(help="Of how many canaries it is said whether they were in; even.")] = 200,
    confidence: Annotated[float, typer.Option(help="With which the measured epsilon is exceeded.")] = 0.95,
    party: Annotated[
        str | None, typer.Option(help="Of a federation: whose triples canaries are among. Default: the first.")
    ] = None,
    dirac: Annotated[
        bool, typer.Option("--dirac", help="Canaries that weigh as much as the mechanism allows; no black box.")
    ] = False,
    device: Device = None,
    seed: Seed = None,
    as_json: AsJson = False,
) -> None:
    """Train once more as a run does, with canaries, and measure what that gives away.

    RUN is finished or not, and is left as it is. The result is kept in its private/audit.json, for the owner of the
    triples: to publish it costs the epsilon of a training once more. Exit code 1: the claim is violated.

    Example:
      tacit audit runs/private --canaries 1000 --guesses 200
    """
    from tacit.federated import FederatedRun, opened
    from tacit.privacy.onerun import audit as run_audit

    run = opened(path)
    progress = bar(run.settings, as_json, "audit")
    if isinstance(run, FederatedRun):
        progress = bar_of_rounds("audit", run.federation.rounds, as_json)
    chosen: Any = "dirac" if dirac else "triple"
    # That few rows are shared is the canaries' doing, and was said of the run itself.
    with warnings_to([]), progress as on_event:
        found = run_audit(run, canaries=canaries, guesses=guesses, confidence=confidence, party=party,
                          canary=chosen, device=device, seed=seed, on_event=on_event)  # fmt: skip
    if as_json:
        print(json.dumps({"run": str(path)} | found.json()))
    else:
        _show(found, path)
    if found.status == "violated":
        raise typer.Exit(1)


def _show(found: OneRun, path: Path) -> None:
    claimed = "none" if found.claimed is None else f"{found.claimed:.3g}{' (simulation)' if found.simulation else ''}"
    rows = [
        (way, claimed, f"{bound:.3g}", f"{found.correct[way]} of {found.guesses}", found.judge(bound))
        for way, bound in found.measured.items()
    ]
    whose = "" if found.party is None else f" of {found.party}"
    title = f"epsilon at delta {found.delta:g}, {found.canaries:,} canaries{whose}, confidence {found.confidence:g}"
    show.table("seen by", "claimed", "measured at least", "right guesses", "status", rows=rows, title=title)
    show.say(MEANS[found.status])
    show.say(f"Kept in {path / PRIVATE / 'audit.json'}, for the owner of the triples: to publish it costs a training.")
