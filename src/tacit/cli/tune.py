"""`tacit tune`: a search for good settings, by validation alone."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from tacit.cli import show
from tacit.cli.models import bar, trained_on
from tacit.cli.options import (
    AsJson,
    Assignments,
    Columns,
    Config,
    DataFolder,
    Delta,
    Device,
    Epsilon,
    Force,
    Header,
    PartyName,
    Patience,
    Pooled,
    Privacy,
    Seed,
    Separator,
    SkipBad,
    SplitShares,
    read_any,
    shares,
)
from tacit.errors import TacitError
from tacit.parties import partition

if TYPE_CHECKING:
    from tacit.settings import Settings
    from tacit.training import Event
    from tacit.tuning import Search, Tried

FLAGS = ("epochs", "every", "patience", "device", "seed", "privacy", "epsilon", "delta")
SPACE = ("scorers", "dims", "learning_rates", "margins", "batches", "negatives")


def tune(
    path: Annotated[str | None, typer.Argument(help="What to train on, as tacit train has it.")] = None,
    out_path: Annotated[Path | None, typer.Option("--out", help="Where it is kept. Default: runs/tune.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with the search in this folder.")] = None,
    trials: Annotated[int | None, typer.Option(help="How many; default: 20. With --resume: of all.")] = None,
    minutes: Annotated[float | None, typer.Option(help="No trial begins after so many.")] = None,
    public: Annotated[
        str | None, typer.Option(help="Search on this public graph instead; nothing of PATH is read.")
    ] = None,
    scorers: Annotated[str | None, typer.Option(help="To try: transe,rotate,distmult,complex by default.")] = None,
    dims: Annotated[str | None, typer.Option(help="To try: 32,64,128 by default.")] = None,
    learning_rates: Annotated[str | None, typer.Option(help="The ends of a range: 1e-4,1e-1 by default.")] = None,
    margins: Annotated[
        str | None, typer.Option(help="The ends of a range, of scorer.gamma or loss.margin: 1,24 by default.")
    ] = None,
    batches: Annotated[str | None, typer.Option(help="To try: 128,512,2048 by default.")] = None,
    negatives: Annotated[str | None, typer.Option(help="Numbers of them to try: 16,64,256 by default.")] = None,
    config: Config = None,
    epochs: Annotated[int | None, typer.Option(help="Of a trial, at most. (training.epochs)")] = None,
    every: Annotated[int | None, typer.Option(help="Epochs between validations. (evaluation.every)")] = None,
    patience: Patience = None,
    device: Device = None,
    privacy: Privacy = None,
    epsilon: Epsilon = None,
    delta: Delta = None,
    seed: Seed = None,
    assignments: Assignments = None,
    split: SplitShares = None,
    party: PartyName = None,
    pooled: Pooled = False,
    columns: Columns = None,
    separator: Separator = None,
    header: Header = None,
    skip_bad: SkipBad = False,
    data: DataFolder = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Search for good settings by validation MRR; test triples have no part in it.

    The best is written to best.toml in the folder, for tacit train --config. What --config, --set and flags say is
    taken as it is; the rest is searched: scorer, dim, learning rate, margin, batch, negatives. Under privacy
    (--epsilon) a search is made on a --public graph alone.

    Examples:
      tacit tune hospital.tsv --split 0.8,0.1,0.1 --trials 20 --out runs/search
      tacit tune --resume runs/search --trials 40
    """
    local = locals()
    from tacit.settings import combine, from_flags, parse_assignment, plain_section, read_settings
    from tacit.tuning import Search, begin

    if resume is not None:
        others = ("path", "out_path", "public", "config", "assignments", "split", "party")
        given = [flag for flag in (*others, *SPACE, *FLAGS) if local[flag] is not None]
        given += [flag for flag in ("pooled", "force") if local[flag]]
        if given:
            raise TacitError(f"--resume goes on with a search as it is: {given[0].replace('_', '-')} cannot change it.")
        search = Search.open(resume)
        search.limit(trials, minutes)
        _run(search, as_json)
        return
    written = read_settings(config) if config else {}
    about = plain_section(written.pop("graph", {}), "graph", {"path": str, "party": str, "pool": bool, "split": list})
    written.pop("reproduce", None)
    settings = combine(written, *map(parse_assignment, assignments or ()), from_flags({f: local[f] for f in FLAGS}))
    space = {name: _values(name, local[name]) for name in SPACE if local[name] is not None}
    wanted = shares(split) if split is not None else about.get("split")
    about = {
        "path": path or about.get("path"),
        "party": party or about.get("party"),
        "pool": pooled or about.get("pool") or None,
        "split": None if wanted in (None, "keep") else list(wanted),
    }
    read = public or about["path"]
    if read is None:
        raise TacitError("Say what to search on: a path, or [graph] path in the --config file, or --public PATH.")
    limits: dict[str, Any] = {"trials": trials, "minutes": minutes, "force": force, "public": public is not None}
    with show.busy(f"reading {read}", as_json):
        found = read_any(read, data, columns, separator, header, skip_bad)
        # Of a public graph there is one: --party and --pool are of the graph to train on, unless that is not said.
        mine = public is None or about["path"] is None
        graph = trained_on(found, read, about["party"] if mine else None, bool(about["pool"]) and mine)
        if about["split"] is not None and not (public and len(graph.valid)):
            drawn_by = plain_section({"seed": settings.get("seed", 0)}, "settings", {"seed": int})
            graph = partition(graph, "triples", 1, split=tuple(about["split"]), **drawn_by)[0]
    if about["path"] is None:
        about = {}
    elif public is None and Path(about["path"]).exists():
        about["path"] = str(Path(about["path"]).resolve())
    origin = {key: value for key, value in about.items() if value is not None}
    search = begin(graph, settings=settings, space=space, origin=origin, out=out_path or Path("runs/tune"), **limits)
    _run(search, as_json)


def _values(name: str, text: str) -> list[Any]:
    """What a list with commas says."""
    kind: Any = {"scorers": str, "learning_rates": float, "margins": float}.get(name, int)
    try:
        return [kind(part.strip()) for part in text.split(",") if part.strip()]
    except ValueError:
        what = "numbers" if kind is float else "whole numbers"
        raise TacitError(f"--{name.replace('_', '-')} is a list of {what} with commas, not {text!r}.") from None


def _run(search: Search, as_json: bool) -> None:
    of = "" if search.trials is None else f"/{search.trials}"
    running, drawn = ExitStack(), [-1]
    progress: list[Any] = [lambda event: None]

    def told(number: int, settings: Settings, event: Event) -> None:
        if drawn[0] != number:
            running.close()
            drawn[0] = number
            progress[0] = running.enter_context(bar(settings, as_json, f"trial {number + 1}{of}"))
        progress[0](event)

    def ended(tried: Tried) -> None:
        running.close()
        if not as_json:
            labels = {"scorer.name": "", "optimizer.learning_rate": "lr ", "negatives.count": "negatives "}
            chosen = ", ".join(f"{labels.get(k, k.split('.')[-1] + ' ')}{v}" for k, v in tried.chosen.items())
            mark = {"complete": "", "pruned": "given up: ", "diverged": "diverged: "}[tried.ending]
            best = " *" if search.best is tried else ""
            show.say(f"{tried.number + 1}{of}: {mark}valid MRR {tried.mrr:.4f}{best}, {tried.seconds:.1f} s; {chosen}")

    if search.tried and not as_json:
        show.say(f"{len(search.tried)} trials were made before.")
    try:
        with running:
            search.run(ended, told)
    except KeyboardInterrupt:
        Console(stderr=True).print(Text(f"\nStopped. Go on with: tacit tune --resume {search.path}"))
        raise typer.Exit(130) from None
    if search.best is None:
        raise TacitError("every trial diverged: try smaller learning rates, such as --learning-rates 1e-5,1e-3.")
    if as_json:
        print(json.dumps(search.json()))
        return
    show.say(f"Best: trial {search.best.number + 1}, validation MRR {search.best.mrr:.4f}.")
    if search.public:
        show.say("Searched on a public graph: nothing else was read, and nothing of privacy is spent.")
    else:
        show.say("Not private: every trial, and the choice, tells of the triples.")
    show.say(f"To train by it: tacit train --config {search.path}/best.toml")
