"""`tacit audit`: what a training gives away at least, beside what is claimed for it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tacit.cli import show
from tacit.cli.federate import bar as bar_of_rounds
from tacit.cli.federate import warnings_to
from tacit.cli.models import RunPath, bar
from tacit.cli.options import AsJson, Device, Seed
from tacit.errors import TacitError
from tacit.folders import PRIVATE, write_json

if TYPE_CHECKING:
    from tacit.privacy.onerun import OneRun

MEANS = {
    "holds": "Nothing here speaks against the claim. That is no proof: this adversary is one of many, its bound loose.",
    "violated": "More was learned than the claim allows: the mechanism, or its code, has a fault. Publish nothing.",
    "no claim": "This training has no privacy mechanism: so much, at least, its rows give away of single triples.",
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
    from tacit.federated import FederatedRun, is_federation
    from tacit.privacy.onerun import audit_training
    from tacit.run import Run

    whole = is_federation(path)
    run: Any = FederatedRun.open(path) if whole else Run.open(path)
    if (path / PRIVATE / "federation.json").is_file():
        raise TacitError(
            f"{path} is one party's folder of a federation over a network, which trains only with the others: audit a "
            "tacit federate of the same settings, which has all parties in one process."
        )
    settings = run.settings
    if device is not None:
        settings = replace(settings, training=replace(settings.training, device=device))
    options: dict[str, Any] = {"canaries": canaries, "guesses": guesses, "confidence": confidence, "seed": seed}
    options |= {"canary": "dirac"} if dirac else {}
    about: dict[str, Any] = {"run": str(path)}
    if whole:
        names = run.parties.names
        if party is not None and party not in names:
            raise TacitError(f"there is no party {party!r} here. There are: {', '.join(names)}.")
        place = 0 if party is None else names.index(party)
        about["party"] = names[place]
        # That few rows are shared is the canaries' doing, and was said of the run itself.
        with warnings_to([]), bar_of_rounds("audit", run.federation.rounds, as_json) as on_event:
            found = audit_training(settings, run.parties, recipe=run.recipe, federation=run.federation, party=place,
                                   on_event=on_event, **options)  # fmt: skip
    else:
        if party is not None:
            raise TacitError(f"{path} is a training of one graph: there are no parties to choose from.")
        with bar(settings, as_json, "audit") as on_event:
            found = audit_training(settings, run.graph, on_event=on_event, **options)
    facts = about | found.json()
    write_json(path / PRIVATE / "audit.json", "tacit.audit/1", facts)
    if as_json:
        print(json.dumps(facts))
    else:
        _show(found, path, about.get("party"))
    if found.status == "violated":
        raise typer.Exit(1)


def _show(found: OneRun, path: Path, party: str | None) -> None:
    claimed = "none" if found.claimed is None else f"{found.claimed:.3g}{' (simulation)' if found.simulation else ''}"
    rows = [
        (way, claimed, f"{bound:.3g}", f"{found.correct[way]} of {found.guesses}", found.judge(bound))
        for way, bound in found.measured.items()
    ]
    whose = "" if party is None else f" of {party}"
    title = f"epsilon at delta {found.delta:g}, {found.canaries:,} canaries{whose}, confidence {found.confidence:g}"
    show.table("seen by", "claimed", "measured at least", "right guesses", "status", rows=rows, title=title)
    show.say(MEANS[found.status])
    show.say(f"Kept in {path / PRIVATE / 'audit.json'}, for the owner of the triples: to publish it costs a training.")
