"""`tacit provider`: take part in a model of a ledger, as a process."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tacit.cli import show
from tacit.cli.keys import open_key
from tacit.cli.ledger import Anchor, Folder, Key, only
from tacit.cli.models import trained_on
from tacit.cli.options import (
    AsJson,
    Assignments,
    Config,
    DataFolder,
    Delta,
    Device,
    Dim,
    Epsilon,
    PartyName,
    Pooled,
    RunOut,
    ScorerName,
    Seed,
    SplitShares,
    read_any,
    shares,
)
from tacit.errors import TacitError
from tacit.parties import partition

if TYPE_CHECKING:
    from tacit.ledger.provider import Look
    from tacit.ledger.record import Model

provider = typer.Typer(no_args_is_help=True, help="Learn with others on a ledger, without a server.")
CHECKS = (
    "norm, distance, cosine, krum, multi-krum, copies, or a mean: mean, trimmed, median, clipped, screened, trusted."
)


@provider.command("start")
def provider_start(
    folder: Folder,
    path: Annotated[str, typer.Argument(metavar="GRAPH", help="What to train on: a file, a folder or a benchmark.")],
    key: Key,
    model: Annotated[str | None, typer.Option(help="The model, by name or address. Default: the only one.")] = None,
    out_path: RunOut = None,
    anchor: Anchor = None,
    updates: Annotated[int, typer.Option(min=1, help="Updates to publish, at most.")] = 10,
    first: Annotated[int, typer.Option(min=1, help="Epochs of the first update.")] = 20,
    epochs: Annotated[int, typer.Option(min=1, help="Epochs of each update after it.")] = 5,
    minutes: Annotated[float | None, typer.Option(min=0, help="End after so many. Default: when it is done.")] = None,
    patience: Annotated[
        float, typer.Option(min=0, help="Seconds to wait for others' updates before training on alone.")
    ] = 60.0,
    parents: Annotated[int, typer.Option(min=1, help="Updates that one is made from, at most.")] = 16,
    defence: Annotated[
        list[str] | None,
        typer.Option(help=f"A check or a mean, may be repeated: {CHECKS} Default: as docs/ledger.md says."),
    ] = None,
    validation: Annotated[
        str | None, typer.Option(help="What decides whether rows are better: own, public, paid or none.")
    ] = None,
    epsilon: Epsilon = None,
    delta: Delta = None,
    budget: Annotated[str | None, typer.Option(help="The holding that pays for it: see tacit budget.")] = None,
    without_privacy: Annotated[
        bool, typer.Option("--without-privacy", help="Publish rows that tell of the triples, for ever.")
    ] = False,
    scorer: ScorerName = None,
    dim: Dim = None,
    device: Device = None,
    seed: Seed = None,
    config: Config = None,
    assignments: Assignments = None,
    split: SplitShares = None,
    party: PartyName = None,
    pooled: Pooled = False,
    data: DataFolder = None,
    as_json: AsJson = False,
) -> None:
    """Take part in a model: look at the ledger, check others' updates, train on your own graph, publish; and again.

    It ends when all updates are published, when the budget does not pay for the next one, or after --minutes. Started
    again with the same words it goes on from what it published: nothing else is needed. It also stands for committees,
    and votes on others' updates by the same checks.

    Example:
      tacit provider start ledger hospital.tsv --key north.key --epsilon 8 --updates 10 --out runs/north
    """
    local = locals()
    from tacit.ledger.ledger import Ledger
    from tacit.ledger.process import CONFIG, provide
    from tacit.ledger.provider import DEFAULT, Provider, Terms
    from tacit.privacy.budget import Holding
    from tacit.settings import Settings, combine, from_flags, parse_assignment, read_settings

    if (epsilon is None) != without_privacy and config is None and not assignments:
        raise TacitError(
            "nothing that is published can be taken back: say how much privacy your updates may cost (--epsilon), or "
            "that the rows may tell everything (--without-privacy)."
        )
    from tacit.ledger.cbor import CID

    opened = Ledger.load(folder, None if anchor is None else CID.parse(anchor))
    branch = only(opened.dag, model)
    who, _ = open_key(key)
    flags = {"epochs": first} | {name: local[name] for name in ("scorer", "dim", "device", "seed", "epsilon", "delta")}
    values = combine(
        {"privacy": {"name": "dpsgd"}} if epsilon is not None else {}, read_settings(config) if config else {},
        *(parse_assignment(text) for text in assignments or ()), from_flags(flags),
    )  # fmt: skip
    if "dim" not in values.get("scorer", {}):
        values = combine(values, {"scorer.dim": _fitting(values, branch.model)})
    settings = Settings.make(values)
    if not settings.privacy.sound and not without_privacy:
        raise TacitError("these settings guarantee nothing: set privacy.epsilon, or say --without-privacy.")
    terms = Terms(parents=parents, defence=_defence(defence, DEFAULT), updates=updates, epochs=epochs,
                  validation=validation)  # type: ignore[arg-type]  # fmt: skip
    out = out_path or Path("runs") / f"{who.name}-{branch.model.name}"
    if out.exists() and not (out / CONFIG).is_file():
        raise TacitError(f"{out} exists already. Choose another --out.")
    with show.busy(f"reading {path}", as_json):
        graph = trained_on(read_any(path, data, None, None, None, False), path, party, pooled)
        wanted = shares(split)
        if wanted not in (None, "keep"):
            graph = partition(graph, "triples", 1, split=tuple(wanted), seed=settings.seed)[0]
    holding = None if budget is None else Holding.load(budget)
    with show.busy("solving for the noise", as_json):
        made = Provider(opened, str(branch.cid), who, graph, settings, terms, holding=holding)
    looks: list[Look] = []

    def on_look(look: Look) -> None:
        looks.append(look)
        if not as_json and look.update is not None:
            out_ = f", {len(look.left_out)} left out" if look.left_out else ""
            show.say(f"Published {look.update}, made from {len(look.taken)}{out_}")

    ended = provide(made, out, minutes=math.inf if minutes is None else minutes, patience=patience, on_look=on_look)
    statement = made.statement()
    if as_json:
        told = {"out": str(out), "model": str(branch.cid), "ended": ended, "published": made.published,
                "updates": [str(look.update) for look in looks if look.update is not None],
                "left_out": [{str(cid): why for cid, why in look.left_out.items()} for look in looks]}  # fmt: skip
        about = {name: statement.get(name) for name in ("guarantee", "epsilon", "delta")}
        print(json.dumps(told | about | {"head": opened.head}))
        return
    show.say(f"{made.published} updates of {branch.model.name} are published. Ended: {ended}.")
    if statement["epsilon"] is None:
        show.say(f"Not private: {'; '.join(statement['why'])}.")
    else:
        shown = f"epsilon {statement['epsilon']:.3g} at delta {statement['delta']:g}"
        show.say(f"Private: {shown} for {statement['unit']}, over all updates under this key.")


def _defence(named: list[str] | None, default: Any) -> Any:
    """Checks and a mean by name; none: the default."""
    if not named:
        return default
    from typing import get_args

    from tacit.ledger.defence import Check, Defence, Mean

    means = [name for name in named if name in get_args(Mean)]
    checks = tuple(name for name in named if name not in means)
    if len(means) > 1:
        raise TacitError(f"--defence takes one mean, and found {', '.join(means)}.")
    for name in checks:
        if name not in get_args(Check):
            raise TacitError(f"--defence is one of {CHECKS} Not {name!r}.")
    return Defence(checks, *means)  # type: ignore[arg-type]


def _fitting(values: dict[str, Any], rule: Model) -> int:
    """The dimension with which the scorer's rows are as wide as the model's."""
    from tacit.settings import Settings

    kind = Settings.make({"scorer": {**values.get("scorer", {}), "dim": 1}}).scorer
    for dim in (rule.entity, rule.entity // 2, rule.entity // 4):
        if dim and kind.widths(dim) == (rule.entity, rule.relation):
            return dim
    raise TacitError(
        f"the model {rule.name} has rows of {rule.entity} and {rule.relation} numbers, which this scorer does not "
        "make: choose another --scorer."
    )
