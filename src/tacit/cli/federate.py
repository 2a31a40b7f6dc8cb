"""`tacit federate`: several parties learn together, in one process."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, TimeRemainingColumn
from rich.text import Text

from tacit.cli import show
from tacit.cli.options import (
    AsJson,
    Assignments,
    Columns,
    Config,
    Count,
    DataFolder,
    Delta,
    Device,
    Dim,
    Epsilon,
    Force,
    Header,
    LearningRate,
    Patience,
    Privacy,
    Resume,
    RunOut,
    ScorerName,
    Seed,
    Separator,
    SkipBad,
    read_any,
    shares,
)
from tacit.errors import TacitError
from tacit.graph import Graph
from tacit.parties import Parties, partition

if TYPE_CHECKING:
    from tacit.federated import FederatedRun
    from tacit.training import Event

RECIPE_NAMES = ("local", "central", "fede", "fedr", "private_fede", "private_fedr", "dpkge")


def federate(
    path: Annotated[
        str | None,
        typer.Argument(help="A folder of parties, clinic-small or clinic-demo; or one graph, to be divided by --by."),
    ] = None,
    recipe: Annotated[str | None, typer.Option(help=f"{', '.join(RECIPE_NAMES)}. Default: fede.")] = None,
    by: Annotated[str | None, typer.Option(help="Divide one graph by triples, entities or relations.")] = None,
    parts: Annotated[int | None, typer.Option(help="Into so many parties.")] = None,
    split: Annotated[
        str | None, typer.Option(help="Each party's shares of train, valid and test, or keep. Default: as --by has it.")
    ] = None,
    out_path: RunOut = None,
    config: Config = None,
    resume: Resume = None,
    rounds: Annotated[int | None, typer.Option(help="At most. (federation.rounds)")] = None,
    local_epochs: Annotated[int | None, typer.Option(help="Epochs in a round. (federation.local_epochs)")] = None,
    fraction: Annotated[float | None, typer.Option(help="Parties that train in a round. (federation.fraction)")] = None,
    secure: Annotated[
        bool | None, typer.Option("--secure", help="The server sees sums alone, and no names. (federation.secure)")
    ] = None,
    scorer: ScorerName = None,
    dim: Dim = None,
    negatives: Count = None,
    learning_rate: LearningRate = None,
    batch: Annotated[int | None, typer.Option(help="Triples per step and party. (training.batch)")] = None,
    device: Device = None,
    every: Annotated[int | None, typer.Option(help="Rounds between validations. (evaluation.every)")] = None,
    patience: Patience = None,
    privacy: Privacy = None,
    epsilon: Epsilon = None,
    delta: Delta = None,
    seed: Seed = None,
    name: Annotated[str | None, typer.Option(help="The run's name. Default: the recipe's.")] = None,
    assignments: Assignments = None,
    columns: Columns = None,
    separator: Separator = None,
    header: Header = None,
    skip_bad: SkipBad = False,
    data: DataFolder = None,
    transport: Annotated[
        str,
        typer.Option(
            help="in-process; or flower: write what a federation by Flower, on machines of its parties, needs."
        ),
    ] = "in-process",
    key: Annotated[Path | None, typer.Option(help="flower: the coordinator's private key.")] = None,
    roster: Annotated[Path | None, typer.Option(help="flower: whose key is whose (tacit keys).")] = None,
    listen: Annotated[
        str | None, typer.Option(help="flower: where the SuperLink listens. Default: 127.0.0.1:8000.")
    ] = None,
    host: Annotated[
        list[str] | None, typer.Option(help="flower: a name by which parties reach the SuperLink; may be repeated.")
    ] = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Let several parties learn together, in one process: a simulation in which they meet by messages alone.

    PATH is a folder of parties, clinic-small or clinic-demo; or one graph, which --by and --parts divide. With
    --transport flower nothing is trained: --out becomes a folder with a Flower app for the plan in --config, and
    COMMANDS.md.

    Examples:
      tacit federate clinic-demo --recipe fedr --out runs/together
      tacit federate hospital.tsv --by triples --parts 3 --recipe private_fede --epsilon 4
    """
    local = locals()
    if transport == "flower":
        _write_flower(local)
        return
    if transport != "in-process":
        raise TacitError(
            f"--transport is in-process or flower, not {transport!r}. By a broker: tacit serve, tacit join."
        )
    if given := [flag for flag in FLOWER if local[flag] is not None]:
        raise TacitError(f"--{given[0]} is for --transport flower.")
    from tacit.federated import FederatedRun, check_recipe, split_settings
    from tacit.settings import PARTITION, combine, from_flags, parse_assignment, plain_section, read_settings

    flags = ("scorer", "dim", "negatives", "learning_rate", "batch", "device", "every", "patience", "seed", "name",
             "privacy", "epsilon", "delta")  # fmt: skip
    if resume is not None:
        others = ("path", "recipe", "by", "parts", "split", "out_path", "config", "assignments", "rounds", "fraction",
                  "secure")  # fmt: skip
        given = [flag for flag in (*flags, *others, "local_epochs") if local[flag] is not None]
        if given or force:
            wrong = given[0].replace("_", "-") if given else "force"
            raise TacitError(f"--resume goes on with a run as it is: {wrong} cannot change it.")
        _run(FederatedRun.open(resume), as_json)
        return
    written = read_settings(config) if config else {}
    written.pop("reproduce", None)  # what others reached with it, for `tacit reproduce`
    if "grid" in written:
        raise TacitError("a file with a [grid] stands for several runs: tacit reproduce runs them.")
    about = plain_section(written.pop("graph", {}), "graph", {"path": str})
    divided = plain_section(written.pop("partition", {}), "partition", PARTITION)
    chosen = recipe or written.pop("recipe", "fede")
    written.pop("recipe", None)
    check_recipe(str(chosen))
    own = {key: local[key] for key in ("rounds", "local_epochs", "fraction", "secure") if local[key] is not None}
    layers = [{"name": chosen}, written, *(parse_assignment(text) for text in assignments or ())]
    layers += [from_flags({flag: local[flag] for flag in flags}), {"federation": own}]
    settings, federation = split_settings(combine(*layers))
    path = path or about.get("path")
    if path is None:
        raise TacitError("Say who takes part: a path, or [graph] path in the --config file.")
    with show.busy(f"reading {path}", as_json):
        found = read_any(path, data, columns, separator, header, skip_bad)
        divided |= {key: value for key, value in (("by", by), ("parts", parts), ("split", split)) if value is not None}
        parties = _parties(found, path, divided, settings.seed)
    out = out_path or Path("runs") / settings.name
    with show.busy("getting ready", as_json):
        run = FederatedRun.create(str(chosen), parties, settings, federation, out, force=force)
    _run(run, as_json)


FLOWER = ("key", "roster", "listen", "host")


def _write_flower(given: dict[str, Any]) -> None:
    from tacit.cli.keys import open_key
    from tacit.flower import write_app

    known = {*FLOWER, "config", "out_path", "transport", "data", "force", "as_json"}
    if wrong := [flag for flag, value in given.items() if flag not in known and value not in (None, False)]:
        raise TacitError(f"--transport flower takes all settings from the --config file, which all parties have: "
                         f"{wrong[0].replace('_', '-')} belongs there.")  # fmt: skip
    if missing := [flag for flag in ("config", "key", "roster", "out_path") if given[flag] is None]:
        raise TacitError(f"--transport flower needs --{missing[0].removesuffix('_path')}.")
    out, key = given["out_path"], given["key"]
    parties = write_app(out, given["config"], key, given["roster"], open_key(key)[0], hosts=given["host"] or (),
                        listen=given["listen"] or "127.0.0.1:8000", force=given["force"])  # fmt: skip
    if given["as_json"]:
        print(json.dumps({"out": str(out), "parties": parties, "commands": str(out / "COMMANDS.md")}))
        return
    show.say(f"{out / 'COMMANDS.md'} says how to start it. Each party gets its folder in {out / 'parties'}.")


def _parties(found: Graph | Parties, path: str, divided: dict[str, Any], seed: int) -> Parties:
    if isinstance(found, Parties):
        if divided:
            raise TacitError(f"{path} holds {len(found)} parties already: leave out --{next(iter(divided))}.")
        return found
    if "by" not in divided or "parts" not in divided:
        raise TacitError(f"{path} is one graph: say how to divide it, by --by triples --parts 5.")
    wanted = divided.get("split")
    options: dict[str, Any] = (
        {"split": shares(wanted) if isinstance(wanted, str) else tuple(wanted)} if wanted is not None else {}
    )
    options |= {key: divided[key] for key in ("share", "known") if key in divided}
    return partition(found, divided["by"], divided["parts"], seed=seed, **options)


def _run(run: FederatedRun, as_json: bool) -> None:
    from tacit.privacy.plan import in_words
    from tacit.run import by_the_paper

    began = time.perf_counter()
    warnings: list[str] = []
    with warnings_to(warnings):
        try:
            with bar(f"{run.recipe}, {len(run.parties)} parties", run.federation.rounds, as_json) as on_event:
                run.train(on_event)
        except KeyboardInterrupt:
            Console(stderr=True).print(Text(f"\nStopped. Go on with: tacit federate --resume {run.path}"))
            raise typer.Exit(130) from None
    seconds = time.perf_counter() - began
    if as_json:
        print(json.dumps({"out": str(run.path), "seconds": round(seconds, 2), "warnings": warnings} | run.results()))
        return
    show.warn(warnings)
    settings = run.settings.evaluation
    title = f"{run.recipe}: filtered ranks, sides: {settings.sides}, ties: {settings.ties}, each among its own entities"
    if "test" in run.metrics:
        rows = [(name, *_numbers(run, i)) for i, name in enumerate(run.parties.names)]
        rows.append(("all", *_cells(run.metrics["test"]), megabytes(run.communication()["bytes"])))
        show.table("party", "test MRR", "Hits@1", "Hits@10", "sent and received", rows=rows, title=title)
    best = run.best_round if isinstance(run.best_round, int) else max(run.best_round)
    if run.settings.privacy.sound:
        show.say(f"{seconds:.1f} s. {in_words(run.claim)}")
    else:
        paper = by_the_paper(run.settings, run.events())
        told = run.claim["why"] + paper if paper else "Not private: whoever sees rows learns of the triples."
        show.say(f"Best at round {best}; {seconds:.1f} s. {told}")
    show.say(f"Kept in {run.path}.")


def _numbers(run: FederatedRun, party: int) -> tuple[str, ...]:
    traffic = run.transcript.traffic(party)
    return (*_cells(run.by_party["test"][party]), megabytes(traffic["sent"] + traffic["received"]))


def _cells(metrics: Any) -> tuple[str, ...]:
    return tuple(f"{getattr(metrics, name):.4f}" for name in ("mrr", "hits1", "hits10"))


def megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"


@contextmanager
def warnings_to(found: list[str]) -> Iterator[None]:
    """What the library warns of, to be said once the bar is gone."""

    class Keeper(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    keeper = Keeper(logging.WARNING)
    logger = logging.getLogger("tacit.recipes")
    logger.addHandler(keeper)
    try:
        yield
    finally:
        logger.removeHandler(keeper)


@contextmanager
def bar(doing: str, rounds: int, quiet: bool) -> Iterator[Any]:
    """A progress bar on a terminal; nothing anywhere else."""
    if quiet or not sys.stderr.isatty():
        yield lambda event: None
        return
    columns = ("{task.description}: round {task.completed}/{task.total}", BarColumn(), "loss {task.fields[loss]}",
               "valid MRR {task.fields[mrr]}", TimeRemainingColumn())  # fmt: skip
    with show.progress(*columns) as drawn:
        task = drawn.add_task(doing, total=rounds, loss="-", mrr="-")

        def on_event(event: Event) -> None:
            if event["event"] == "round":
                there = [loss for loss in event["loss"] if loss is not None]
                loss = f"{sum(there) / len(there):.4f}" if there else "-"
                drawn.update(task, completed=event["round"], loss=loss)
            elif event["event"] == "validation" and event["mrr"] is not None:
                drawn.update(task, mrr=f"{event['mrr']:.4f}")

        yield on_event
