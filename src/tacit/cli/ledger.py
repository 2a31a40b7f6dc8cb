"""`tacit ledger`: updates that everybody can verify, without a server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tacit.cli import show
from tacit.cli.keys import open_key
from tacit.cli.options import AsJson
from tacit.errors import TacitError
from tacit.folders import read_json

if TYPE_CHECKING:
    from tacit.ledger.dag import Branch, Dag
    from tacit.ledger.ledger import Ledger

ledger = typer.Typer(no_args_is_help=True, help="Publish and verify updates of models, without a server.")
Folder = Annotated[Path, typer.Argument(metavar="LEDGER", help="The ledger's folder.")]
Key = Annotated[Path, typer.Option("--key", help="Your private key, NAME.key: it signs what you add.")]
Anchor = Annotated[
    str | None, typer.Option("--genesis", help="The ledger's address, as you were told it: it must be this one.")
]

# The library loads torch: the commands that need it do.


@ledger.command("init")
def ledger_init(
    folder: Folder,
    key: Key,
    model: Annotated[str, typer.Option(help="A name for the model that is learnt.")],
    entity: Annotated[int, typer.Option(min=1, help="Numbers in an entity's row.")],
    relation: Annotated[int | None, typer.Option(min=1, help="In a relation's row. Default: the same.")] = None,
    task: Annotated[str, typer.Option(help="link prediction or entity classification.")] = "link prediction",
    roster: Annotated[
        Path | None, typer.Option(help="Of a new ledger: who may write in it, by the roster's file.")
    ] = None,
    anyone: Annotated[bool, typer.Option("--open", help="Of a new ledger: whoever has a key may write in it.")] = False,
    parents: Annotated[int, typer.Option(help="Updates that one may be made from, at most.")] = 2,
    committee: Annotated[int, typer.Option(help="Seats of the committee that reviews updates; 0: none.")] = 5,
    quorum: Annotated[int | None, typer.Option(help="Votes that decide. Default: more than half of the seats.")] = None,
    standing: Annotated[
        int | None,
        typer.Option(help="How many have to stand for a committee. Default: more than half of those admitted."),
    ] = None,
    batch: Annotated[int, typer.Option(help="Updates between two elections.")] = 10,
    as_json: AsJson = False,
) -> None:
    """Begin a ledger with a model; or open another model on a ledger that is there.

    Examples:
      tacit ledger init ledger --key north.key --roster roster.json --model drugs --entity 64
      tacit ledger init ledger --key north.key --model genes --entity 128 --committee 7
    """
    from tacit.federation.keys import Roster
    from tacit.ledger.cbor import CID, DAG_CBOR
    from tacit.ledger.ledger import MANIFEST, Ledger
    from tacit.ledger.record import Genesis, Model

    who, _ = open_key(key)
    new = not (folder / MANIFEST).is_file()
    if new and (roster is None) != anyone:
        raise TacitError("a new ledger says who may write in it: by --roster, or everybody by --open.")
    if not new and (roster is not None or anyone):
        raise TacitError(f"{folder} is a ledger already: who may write in it was said when it began.")
    if new:
        known = None if roster is None else Roster.load(roster)
        listed = () if known is None else tuple((name, known.public(name)) for name in known.names)
        genesis = Genesis(folder.resolve().name, "open" if anyone else "listed", listed)
    else:
        opened = Ledger.load(folder)
        genesis = opened.dag.rules
    decide = committee // 2 + 1 if quorum is None else quorum
    stand = max(decide, len(genesis.keys) // 2 + 1 if genesis.keys else committee) if standing is None else standing
    rules: dict[str, Any] = {
        "name": model, "entity": entity, "relation": relation or entity, "task": task, "parents": parents,
        "committee": committee, "quorum": decide, "standing": stand, "batch": batch,
    }  # fmt: skip
    Model(CID.of(b"", DAG_CBOR), **rules)  # what is wrong with it is said before anything is made
    if new:
        opened = Ledger.begin(folder, who, genesis)
    branch = opened.open_model(who, Model(opened.genesis, **rules))
    if as_json:
        print(json.dumps({"ledger": str(folder), "genesis": str(opened.genesis), "model": str(branch.cid)}))
        return
    if new:
        show.say(f"{folder} is the ledger {opened.genesis}")
        show.say("Read that address out to whoever joins: it stands for who may write.")
    show.say(f"The model {model} is {branch.cid}")


@ledger.command("publish")
def ledger_publish(
    folder: Folder,
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run that was trained privately.")],
    key: Key,
    model: Annotated[str | None, typer.Option(help="The model, by name or address. Default: the only one.")] = None,
    parent: Annotated[
        list[str] | None, typer.Option(help="An update that it was made from; may be repeated. Default: none.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Publish what a private run shares, as an update that claims what the run cost.

    Only what is in the run's shareable/ is published, and only if the run guarantees privacy: nothing that was
    published can be taken back.

    Example:
      tacit ledger publish ledger runs/mine --key north.key --model drugs
    """
    from tacit.ledger.cbor import CID
    from tacit.ledger.ledger import Ledger, claim_of

    opened = Ledger.load(folder)
    branch = only(opened.dag, model)
    parents = [CID.parse(each) for each in parent or ()]
    who, _ = open_key(key)
    shared = run / "shareable"
    if not (shared / "privacy.json").is_file():
        raise TacitError(f"{run}: is no run: it has no shareable/privacy.json. tacit train makes one.")
    try:
        claim = claim_of(read_json(shared / "privacy.json", "tacit.privacy/1", {"guarantee": str}))
    except TacitError as error:
        raise TacitError(f"{run}: {error}") from None
    weights = shared / "model.safetensors"
    if not weights.is_file():
        raise TacitError(f"{run}: shares no model: it is not finished. tacit train --resume {run} goes on with it.")
    record = opened.publish_rows(who, str(branch.cid), weights.read_bytes(), claim, parents)
    node = opened.dag.nodes[record.cid]
    if as_json:
        told = {"update": str(record.cid), "weights": str(node.update.weights), "number": node.number}
        print(json.dumps(told | {"parents": [str(each) for each in node.update.parents], "head": opened.head}))
        return
    show.say(f"Published {record.cid}")
    show.say(f"It is update {node.number} of {branch.model.name}, made from {len(node.parents)} others.")


@ledger.command("verify")
def ledger_verify(folder: Folder, anchor: Anchor = None, as_json: AsJson = False) -> None:
    """Verify everything again: each signature, each record, each file of weights. Exit code 2 if something is wrong.

    What is wrong is named, and ignored by everyone: whoever reads the same log comes to the same result. Compare the
    head with another reader's.

    Example:
      tacit ledger verify ledger
    """
    from tacit.ledger.cbor import CID
    from tacit.ledger.ledger import Ledger

    opened = Ledger.load(folder, None if anchor is None else CID.parse(anchor))
    with show.busy("verifying", as_json):
        found = opened.verify()
    counts = dict(found.dag.counts)
    if as_json:
        told = {"genesis": str(opened.genesis), "head": found.head.hex(), "places": found.end, "records": counts}
        print(json.dumps(told | {"rewritten": found.rewritten, "faults": [each.json() for each in found.faults]}))
    else:
        show.say(f"{folder}: the ledger {opened.genesis}")
        show.table("records", "right", rows=list(counts.items()))
        show.say(f"head {found.head.hex()}")
        for fault in found.faults[: show.SHOWN]:
            show.say(f"! {fault}", "yellow")
        if len(found.faults) > show.SHOWN:
            show.say(f"... and {len(found.faults) - show.SHOWN:,} more (--json shows all)", "dim")
        show.say(f"{len(found.faults):,} faults, each ignored" if found.faults else "Nothing is wrong with it.")
    if found.faults:
        raise typer.Exit(2)


@ledger.command("show")
def ledger_show(
    folder: Folder,
    model: Annotated[str | None, typer.Option(help="This model alone, by name or address.")] = None,
    dot: Annotated[bool, typer.Option("--dot", help="Print the graph in Graphviz's language.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show what stands in a ledger: models, their newest updates, who reviews them, what providers claim.

    Examples:
      tacit ledger show ledger
      tacit ledger show ledger --model drugs --dot
    """
    from tacit.ledger.ledger import Ledger

    opened = Ledger.load(folder)
    branches = list(opened.dag.branches.values()) if model is None else [opened.dag.branch(model)]
    if dot:
        print("\n".join(opened.dag.dot(branches)))
        return
    if as_json:
        told = {"head": opened.head, "places": len(opened), "faults": [each.json() for each in opened.faults]}
        print(json.dumps(told | opened.dag.json(branches)))
        return
    show.say(f"{folder}: the ledger {opened.genesis}, {len(opened):,} records, head {opened.head[:16]}...", "bold")
    _show(opened, branches)


def _show(opened: Ledger, branches: list[Branch]) -> None:
    dag = opened.dag
    rows: list[tuple[Any, ...]] = [
        (branch.model.name, branch.model.task, len(branch.nodes), len(branch.open_ends),
         sum(node.rejected for node in branch.nodes)) for branch in branches
    ]  # fmt: skip
    show.table("model", "task", "updates", "tips", "rejected", rows=rows)
    for branch in branches:
        newest = branch.nodes[-show.SHOWN :]
        if not newest:
            continue
        rows = [
            (node.number, str(node.cid), dag.provider(node.by), _claims(node.update.privacy), dag.outcome(node.cid),
             "tip" if node.cid in branch.open_ends else "") for node in newest
        ]  # fmt: skip
        show.table("", "update", "by", "claims", "committee", "", rows=rows, title=f"Newest of {branch.model.name}")
        seats = branch.committee.seats.get(branch.committee.batch, ())
        if seats:
            show.say(f"Batch {branch.committee.batch} is reviewed by {', '.join(map(dag.provider, seats))}")
    show.say("What providers claim of privacy is their word: nobody can verify it from weights.", "dim")
    show.warn(str(fault) for fault in opened.faults[: show.SHOWN])


def _claims(claim: Any) -> str:
    if claim is None:
        return "not private"
    count = sum(segment.count for segment in claim.releases)
    return f"{count:,} release{'' if count == 1 else 's'}; protects {claim.unit}"


def only(dag: Dag, model: str | None) -> Branch:
    """The model that is meant, by name or address; not said: the only one."""
    if model is not None:
        return dag.branch(model)
    if len(dag.branches) != 1:
        raise TacitError(f"the ledger has {len(dag.branches)} models: say --model, one of {', '.join(dag.names)}.")
    return next(iter(dag.branches.values()))
