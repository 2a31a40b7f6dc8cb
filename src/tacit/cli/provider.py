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
from tacit.cli.network import stops_kindly
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
    one_of,
    read_any,
    shares,
    split_anew,
)
from tacit.errors import TacitError

if TYPE_CHECKING:
    from tacit.federation.keys import Identity
    from tacit.federation.letters import Away
    from tacit.ledger.dag import Branch
    from tacit.ledger.ledger import Ledger
    from tacit.ledger.provider import Look, Provider, Terms
    from tacit.ledger.record import Model
    from tacit.settings import Settings

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
        typer.Option(help=f"A check or a mean, may be repeated: {CHECKS} Default: see docs/ledger.md."),
    ] = None,
    validation: Annotated[
        str | None, typer.Option(help="What decides whether rows are better: own, public or none.")
    ] = None,
    trainer: Annotated[
        str,
        typer.Option(
            help="own: train on the graph itself. pate: its triples are teachers, whose noisy votes label what is "
            "asked of a public graph, and a student of that is published."
        ),
    ] = "own",
    public: Annotated[
        str | None, typer.Option(metavar="GRAPH", help="For pate: a graph that everybody may know.")
    ] = None,
    candidates: Annotated[
        str | None,
        typer.Option(metavar="GRAPH", help="For pate: what is asked, in names of --public. Default: drawn from it."),
    ] = None,
    teachers: Annotated[
        int | None, typer.Option(min=2, help="For pate: shards of the triples. [default: 100]", show_default=False)
    ] = None,
    votes: Annotated[
        int | None, typer.Option(min=1, help="For pate: questions for each update. [default: 100]", show_default=False)
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

    Examples:
      tacit provider start ledger hospital.tsv --key north.key --epsilon 8 --updates 10 --out runs/north
      tacit provider start ledger hospital.tsv --key north.key --trainer pate --public drugs.tsv --epsilon 8
    """
    local = locals()
    from tacit.ledger.cbor import CID
    from tacit.ledger.ledger import Ledger, read_manifest
    from tacit.ledger.process import CONFIG, provide
    from tacit.ledger.provider import DEFAULT, Terms

    if (epsilon is None) != without_privacy and config is None and not assignments:
        raise TacitError(
            "nothing that is published can be taken back: say how much privacy your updates may cost (--epsilon), or "
            "that the rows may tell everything (--without-privacy)."
        )
    _check_trainer(local)
    read_manifest(folder)
    who, _ = open_key(key)
    with Ledger.load(folder, None if anchor is None else CID.parse(anchor), who=who) as opened:
        branch = only(opened.dag, model)
        if without_privacy and opened.public:
            raise TacitError(
                f"{folder} is on a public network, where anybody can read what is published, for ever. Say how much "
                "privacy your updates may cost (--epsilon)."
            )
        settings = _settings(local, branch.model)
        terms = Terms(parents=parents, defence=_defence(defence, DEFAULT), updates=updates, epochs=epochs,
                      validation=validation)  # type: ignore[arg-type]  # fmt: skip
        out = out_path or Path("runs") / f"{who.name}-{branch.model.name}"
        if out.exists() and not (out / CONFIG).is_file():
            raise TacitError(f"{out} exists already. Choose another --out.")
        made = _made(local, opened, branch, who, settings, terms)
        looks: list[Look] = []

        def on_look(look: Look) -> None:
            looks.append(look)
            if not as_json and look.update is not None:
                out_ = f", {len(look.left_out)} left out" if look.left_out else ""
                show.say(f"Published {look.update}, made from {len(look.taken)}{out_}")

        def on_away(error: Away) -> None:
            show.warn_aside(f"{error} It is tried again.")

        with stops_kindly(f"tacit provider start {folder} ..."):
            ended = provide(made, out, minutes=math.inf if minutes is None else minutes, patience=patience,
                            on_look=on_look, on_away=on_away)  # fmt: skip
        if not as_json:
            _say(made, ended)
            return
        told = {"out": str(out), "model": str(branch.cid), "ended": ended, "published": made.published,
                "updates": [str(look.update) for look in looks if look.update is not None],
                "left_out": [{str(cid): why for cid, why in look.left_out.items()} for look in looks]}  # fmt: skip
        statement = made.statement()
        about = {name: statement.get(name) for name in ("guarantee", "epsilon", "delta")}
        print(json.dumps(told | about | {"head": opened.head}))


def _settings(given: dict[str, Any], rule: Model) -> Settings:
    """How it trains, by the file, the assignments and the options; the dimension is the model's."""
    from tacit.settings import Settings, combine, from_flags, parse_assignment, read_settings

    voted = given["trainer"] == "pate"
    named = ("scorer", "dim", "device", "seed") if voted else ("scorer", "dim", "device", "seed", "epsilon", "delta")
    values = combine(
        {} if given["epsilon"] is None or voted else {"privacy": {"name": "dpsgd"}},
        read_settings(given["config"]) if given["config"] else {},
        *(parse_assignment(text) for text in given["assignments"] or ()),
        from_flags({"epochs": given["first"]} | {name: given[name] for name in named}),
    )
    if "dim" not in values.get("scorer", {}):
        values = combine(values, {"scorer.dim": _fitting(values, rule)})
    if voted and values.get("privacy"):
        raise TacitError("--trainer pate is private by its votes: leave out settings of privacy, and say --epsilon.")
    settings = Settings.make(values)
    claims = voted or (settings.privacy.sound and getattr(settings.privacy, "noise", "system") != "seeded")
    if not claims and not given["without_privacy"]:
        raise TacitError(
            "these settings guarantee nothing: set privacy.epsilon, without seeded noise, or say --without-privacy."
        )
    if claims and given["without_privacy"]:
        raise TacitError("these settings train privately: leave out --without-privacy, or what they say of privacy.")
    return settings


def _made(given: dict[str, Any], opened: Ledger, branch: Branch, who: Identity, settings: Settings, terms: Terms) -> (
        Provider):  # fmt: skip
    """The provider, with the graphs that it needs."""
    from tacit.ledger.provider import Provider
    from tacit.ledger.teachers import Pate, PateProvider
    from tacit.privacy.budget import Holding

    def read(name: str) -> Any:
        return read_any(given[name], given["data"], None, None, None, False)

    with show.busy(f"reading {given['path']}", given["as_json"]):
        graph = trained_on(read("path"), given["path"], given["party"], given["pooled"])
        wanted = shares(given["split"])
        if wanted not in (None, "keep"):
            graph = split_anew(
                graph, wanted, settings.seed, private=settings.privacy.sound or given["trainer"] == "pate"
            )
        known = {name: one_of(read(name), given[name]) for name in ("public", "candidates") if given[name] is not None}
    holding = None if given["budget"] is None else Holding.load(given["budget"])
    with show.busy("solving for the noise", given["as_json"]):
        if given["trainer"] == "own":
            return Provider(opened, str(branch.cid), who, graph, settings, terms, holding=holding)
        said = {name: given[name] for name in ("teachers", "votes", "delta", "epsilon") if given[name] is not None}
        return PateProvider(
            opened, str(branch.cid), who, graph, known["public"], settings, Pate(**said), terms,
            candidates=known.get("candidates"), holding=holding,
        )  # fmt: skip


def _say(made: Provider, ended: str) -> None:
    statement = made.statement()
    show.say(f"Updates of {made.branch.model.name} under this key: {made.published}. Ended: {ended}.")
    if statement["epsilon"] is None:
        show.say(f"Not private: {'; '.join(statement['why'])}.")
    else:
        shown = f"epsilon {statement['epsilon']:.3g} at delta {statement['delta']:g}"
        show.say(f"Private: {shown} for {statement['unit']}, over all updates under this key.")


def _check_trainer(given: dict[str, Any]) -> None:
    """What --trainer is, and that nothing is said which it does not listen to."""
    if given["trainer"] not in ("own", "pate"):
        raise TacitError(f"--trainer is own or pate, not {given['trainer']!r}.")
    if given["trainer"] == "own":
        for name in ("public", "candidates", "teachers", "votes"):
            if given[name] is not None:
                raise TacitError(f"--{name} is for votes: say --trainer pate, or leave it out.")
        return
    if given["public"] is None:
        raise TacitError("--trainer pate publishes what a student learns from a public graph: name it by --public.")
    if given["epsilon"] is None or given["without_privacy"]:
        raise TacitError("--trainer pate is private by its votes: say what they may cost (--epsilon).")
    for name in ("public", "candidates"):
        if given[name] is not None and Path(given[name]).resolve() == Path(given["path"]).resolve():
            raise TacitError(f"--{name} is the private graph itself: name one that everybody may know.")


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
