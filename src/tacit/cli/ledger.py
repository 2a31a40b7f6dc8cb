"""`tacit ledger`: updates that everybody can verify, without a server."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tacit.cli import show
from tacit.cli.keys import open_key
from tacit.cli.network import CaFile, Hosts, Listen, Plain, looking_after, split_listen, stops_kindly, warn_plain
from tacit.cli.options import AsJson
from tacit.errors import TacitError
from tacit.folders import check_free, read_json

if TYPE_CHECKING:
    from tacit.ledger.cbor import CID
    from tacit.ledger.dag import Branch, Dag
    from tacit.ledger.ledger import Ledger, News

ledger = typer.Typer(no_args_is_help=True, help="Publish and verify updates of models, without a server.")
Folder = Annotated[Path, typer.Argument(metavar="LEDGER", help="The ledger's folder.")]
Key = Annotated[Path, typer.Option("--key", help="Your private key, NAME.key: it signs what you add.")]
Login = Annotated[
    Path | None,
    typer.Option("--key", help="Of a ledger at a broker: your private key. Default: the one that was used at first."),
]
Address = Annotated[
    str | None,
    typer.Option(
        "--log",
        help="Keep it at a broker, such as tls://broker:4222/drugs; or on a chain, by a node of it, such as "
        "evm:https://rpc.example.org.",
    ),
]
Peers = Annotated[
    str | None,
    typer.Option(
        "--blobs",
        help="Keep weights at peers of IPFS: ipfs: and their addresses, with commas between. Default: in the folder, "
        "or at the broker.",
    ),
]
Pays = Annotated[
    Path | None,
    typer.Option("--account", help="On a chain: the account that pays for what you add (tacit ledger account)."),
]
Depth = Annotated[
    int, typer.Option("--confirmations", min=0, max=10_000, help="On a chain: blocks on top of a record that counts.")
]
Fee = Annotated[float, typer.Option("--most-fee", help="On a chain: gwei that you pay for a unit of gas, at most.")]
PAUSE = 0.5
"""Seconds between two looks for something new."""
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
    committee: Annotated[
        int | None,
        typer.Option(
            help="Seats of the committee that reviews updates; 0: none. Default: so many that a third of those "
            "admitted is never a quorum; 5 where everybody is."
        ),
    ] = None,
    quorum: Annotated[int | None, typer.Option(help="Votes that decide. Default: more than half of the seats.")] = None,
    standing: Annotated[
        int | None,
        typer.Option(help="How many have to stand for a committee. Default: more than half of those admitted."),
    ] = None,
    batch: Annotated[int, typer.Option(help="Updates between two elections.")] = 10,
    log: Address = None,
    blobs: Peers = None,
    account: Pays = None,
    confirmations: Depth = 12,
    most_fee: Fee = 200.0,
    ca: CaFile = None,
    plain: Plain = False,
    replicas: Annotated[int, typer.Option(min=1, max=5, help="Servers of the broker that keep a new ledger.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Begin a ledger with a model; or open another model on a ledger that is there.

    A ledger is in its folder; or with --log at a broker (tacit ledger serve) or on a chain, and in the folder is what
    you have read of it. With --blobs weights are at peers. Every other command takes the folder, wherever a ledger is.

    Examples:
      tacit ledger init ledger --key north.key --roster roster.json --model drugs --entity 64
      tacit ledger init mine --key north.key --open --model m --entity 64 --log tls://hub:4222/x --ca ca.pem
      tacit ledger init ours --key north.key --open --model m --entity 64 --log evm:https://rpc --account a
      tacit ledger init ledger --key north.key --model genes --entity 128 --committee 7
    """
    from tacit.federation.keys import Roster
    from tacit.ledger.cbor import CID, DAG_CBOR
    from tacit.ledger.committee import safe_seats
    from tacit.ledger.evm import SCHEME, split_place
    from tacit.ledger.jetstream import split_address
    from tacit.ledger.ledger import MANIFEST, Ledger
    from tacit.ledger.public import reach
    from tacit.ledger.record import Genesis, Model

    who, _ = open_key(key)
    with ExitStack() as running:
        new = not (folder / MANIFEST).is_file()
        if new and (roster is None) != anyone:
            raise TacitError("a new ledger says who may write in it: by --roster, or everybody by --open.")
        if not new and (roster is not None or anyone or log is not None or blobs is not None):
            what = "who may write in it" if log is None and blobs is None else "where it is"
            raise TacitError(f"{folder} is a ledger already: {what} was said when it began.")
        if new:
            known = None if roster is None else Roster.load(roster)
            listed = () if known is None else tuple((name, known.public(name)) for name in known.names)
            named = log is not None and not log.startswith(SCHEME)
            name = split_address(str(log))[1] if named else folder.resolve().name
            genesis = Genesis(name, "open" if anyone else "listed", listed)
        else:
            opened = running.enter_context(Ledger.load(folder, who=who))
            genesis = opened.dag.rules
        if committee is None:
            committee = safe_seats(len(genesis.keys)) if genesis.keys else 5
        decide = committee // 2 + 1 if quorum is None else quorum
        stand = max(decide, len(genesis.keys) // 2 + 1 if genesis.keys else committee) if standing is None else standing
        rules: dict[str, Any] = {
            "name": model, "entity": entity, "relation": relation or entity, "task": task, "parents": parents,
            "committee": committee, "quorum": decide, "standing": stand, "batch": batch,
        }  # fmt: skip
        Model(CID.of(b"", DAG_CBOR), **rules)  # what is wrong with it is said before anything is made
        if new:
            if log is not None and not named and split_place(log, plain=plain) and account is None:
                raise TacitError("beginning a ledger on a chain costs gas: say which account pays, by --account.")
            check_free(folder, MANIFEST)
            warn_plain(plain)
            remote = reach(
                log, blobs, who=lambda: who, ca=ca, plain=plain, account=account, confirmations=confirmations,
                most_fee=most_fee,
            )  # fmt: skip
            if remote is not None:
                running.callback(remote.close)
            opened = Ledger.begin(folder, who, genesis, remote, replicas=replicas, key=key)
        branch = opened.open_model(who, Model(opened.genesis, **rules))
        if as_json:
            told = {"ledger": str(folder), "genesis": str(opened.genesis), "model": str(branch.cid)}
            print(json.dumps(told | ({"log": opened.place} if opened.place else {})))
            return
        if new:
            show.say(f"{folder} is the ledger {opened.genesis}")
            show.say("Read that address out to whoever joins: it stands for who may write.")
            if opened.public and opened.place:
                node, _, block = opened.place.rpartition("#")
                if node.startswith(SCHEME):
                    show.say(f"It is joined with --log '{SCHEME}NODE#{block}', where NODE is the address of a node of "
                             f"this chain. Yours is at {node.removeprefix(SCHEME)}; keep the rest of its address to "
                             "yourself if there is a secret in it.")  # fmt: skip
                else:
                    show.say(f"It is joined with --log {opened.place}")
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
    reveal: Annotated[
        bool,
        typer.Option(
            "--reveal-for-ever",
            help="Publish a run that guarantees no privacy: whoever reads the ledger, now or ever, may learn the "
            "triples that it was trained on.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Publish what a private run shares, as an update that claims what the run cost.

    Only what is in the run's shareable/ is published, and only if the run guarantees privacy: nothing that was
    published can be taken back. With --reveal-for-ever the rows of a run without privacy are published, too; the update
    says that it is not private.

    Example:
      tacit ledger publish ledger runs/mine --key north.key --model drugs
    """
    from tacit.ledger.cbor import CID
    from tacit.ledger.ledger import Ledger, claim_of, read_manifest

    read_manifest(folder)
    who, _ = open_key(key)
    with Ledger.load(folder, who=who) as opened:
        branch = only(opened.dag, model)
        parents = [CID.parse(each) for each in parent or ()]
        shared = run / "shareable"
        if not (shared / "privacy.json").is_file():
            raise TacitError(f"{run}: is no run: it has no shareable/privacy.json. tacit train makes one.")
        statement = read_json(shared / "privacy.json", "tacit.privacy/1", {"guarantee": str})
        weights, claim = shared / "model.safetensors", None
        if reveal and statement["guarantee"] != "differential privacy":
            data = _revealed(run)
        else:
            try:
                claim = claim_of(statement)
            except TacitError as error:
                raise TacitError(f"{run}: {error}") from None
            if not weights.is_file():
                raise TacitError(
                    f"{run}: shares no model: it is not finished. tacit train --resume {run} goes on with it."
                )
            data = weights.read_bytes()
        record = opened.publish_rows(who, str(branch.cid), data, claim, parents, reveal=reveal)
    node = opened.dag.nodes[record.cid]
    if as_json:
        told = {"update": str(record.cid), "weights": str(node.update.weights), "number": node.number}
        print(json.dumps(told | {"parents": [str(each) for each in node.update.parents], "head": opened.head}))
        return
    show.say(f"Published {record.cid}")
    show.say(f"It is update {node.number} of {branch.model.name}, made from {len(node.parents)} others.")


@ledger.command("verify")
def ledger_verify(folder: Folder, anchor: Anchor = None, key: Login = None, as_json: AsJson = False) -> None:
    """Verify everything again: each signature, each record, each file of weights. Exit code 2 if something is wrong.

    What is wrong is named, and ignored by everyone: whoever reads the same log comes to the same result. Compare the
    head with another reader's.

    Example:
      tacit ledger verify ledger
    """
    from tacit.ledger.cbor import CID

    with _open(folder, key, None if anchor is None else CID.parse(anchor)) as opened, show.busy("verifying", as_json):
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
    key: Login = None,
    as_json: AsJson = False,
) -> None:
    """Show what stands in a ledger: models, their newest updates, who reviews them, what providers claim.

    Examples:
      tacit ledger show ledger
      tacit ledger show ledger --model drugs --dot
    """
    with _open(folder, key) as opened:
        pass  # all that is shown was read
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


@ledger.command("follow")
def ledger_follow(
    folder: Folder,
    new: Annotated[
        bool, typer.Option("--new", help="Only what comes from now on. Default: from the beginning.")
    ] = False,
    until: Annotated[int | None, typer.Option(min=1, help="End when so many were shown.")] = None,
    minutes: Annotated[float | None, typer.Option(min=0, help="End after so many minutes.")] = None,
    weights: Annotated[
        bool, typer.Option("--weights", help="Fetch and verify the weights of each update too.")
    ] = False,
    key: Login = None,
    as_json: AsJson = False,
) -> None:
    """Show records as they come, each verified; what is wrong is named. Ends with --until, --minutes or Ctrl-C.

    If history was rewritten, it says so and ends. Exit code 2 if anything was wrong. With --json each record, or fault,
    is one line.

    Examples:
      tacit ledger follow ledger
      tacit ledger follow ledger --new --until 10 --json
    """
    from tacit.federation.letters import Away
    from tacit.ledger.ledger import Fault, News

    waiting: list[News] = []
    with _open(folder, key, tell=None if new else waiting.append) as opened:
        opened.tell(waiting.append)
        shown = faults = 0
        end = None if minutes is None else time.monotonic() + 60 * minutes
        away = False

        def tell(news: News) -> None:
            nonlocal shown, faults
            shown, faults = shown + 1, faults + isinstance(news.found, Fault)
            _tell(opened, news, as_json)

        with suppress(KeyboardInterrupt):  # which is how one ends it
            while True:
                for news in waiting:
                    if shown == until:
                        break
                    tell(news)
                    if not weights or isinstance(news.found, Fault) or news.found.cid not in opened.dag.nodes:
                        continue
                    if fault := opened.fault_of(news.found.cid):
                        tell(News(news.position, fault))
                waiting.clear()
                if shown == until or opened.rewritten or (end is not None and time.monotonic() >= end):
                    break
                time.sleep(PAUSE)
                try:
                    opened.refresh()
                    away = False
                except Away as error:
                    if not away:
                        show.warn_aside(f"{error} It is tried again.")
                    away = True
    if faults:
        raise typer.Exit(2)


@ledger.command("join")
def ledger_join(
    folder: Folder,
    log: Annotated[
        str,
        typer.Option(help="Where the ledger is, such as tls://broker:4222/drugs or evm:https://rpc.example.org#1200."),
    ],
    genesis: Annotated[str, typer.Option(help="The ledger's address, as whoever began it read it out.")],
    key: Login = None,
    blobs: Peers = None,
    account: Pays = None,
    confirmations: Depth = 12,
    most_fee: Fee = 200.0,
    ca: CaFile = None,
    plain: Plain = False,
    as_json: AsJson = False,
) -> None:
    """Take part in a ledger at a broker or on a chain: make a folder for what you read of it, and read all of it.

    A broker has to be logged in to, by --key. A chain may be read by everybody, without a key and without an account.

    Examples:
      tacit ledger join ledger --log tls://broker:4222/drugs --genesis bafy... --key south.key --ca ca.pem
      tacit ledger join ledger --log evm:https://rpc#1200 --genesis bafy... --blobs ipfs:PEER,PEER
    """
    from tacit.federation.keys import Identity
    from tacit.ledger.cbor import CID
    from tacit.ledger.ledger import MANIFEST, Ledger
    from tacit.ledger.public import reach

    told = CID.parse(genesis)
    mine = None if key is None else open_key(key)[0]

    def who() -> Identity:
        if mine is None:
            raise TacitError("a broker has to be logged in to: say your private key, by --key.")
        return mine

    check_free(folder, MANIFEST)
    warn_plain(plain)
    remote = reach(log, blobs, who=who, genesis=told, ca=ca, plain=plain, account=account, confirmations=confirmations,
                   most_fee=most_fee)  # fmt: skip
    if remote is None:
        raise TacitError("a ledger in a folder is not joined: share the folder.")
    with closing(remote), show.busy("reading", as_json):
        opened = Ledger.join(folder, remote, told, key=key)
    if as_json:
        print(json.dumps({"ledger": str(folder), "genesis": genesis, "head": opened.head, "places": len(opened),
                          "faults": [each.json() for each in opened.faults]}))  # fmt: skip
        return
    show.say(f"{folder} is for the ledger {opened.genesis}: {len(opened):,} records, head {opened.head}")
    show.say("Compare the head with somebody else's (tacit ledger show).")
    show.warn(str(fault) for fault in opened.faults[: show.SHOWN])


@ledger.command("revoke")
def ledger_revoke(
    folder: Folder,
    key: Key,
    name: Annotated[
        str | None,
        typer.Argument(
            help="Whose key, by the name in the genesis; of an open ledger its 64 digits. Default: your own."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Refuse a key from now on, for ever: your own, or as whoever began the ledger another's.

    What it signed before stands. It cannot be taken back, and a ledger admits no new keys.

    Example:
      tacit ledger revoke ledger south --key north.key
    """
    from tacit.ledger.ledger import Ledger, read_manifest
    from tacit.ledger.record import Revocation

    read_manifest(folder)
    who, _ = open_key(key)
    with Ledger.load(folder, who=who) as opened:
        lost = who.public if name is None else opened.dag.key(name)
        record = opened.publish(who, Revocation(opened.genesis, lost))
    if as_json:
        print(json.dumps({"record": str(record.cid), "revoked": opened.dag.provider(lost), "head": opened.head}))
        return
    show.say(f"Revoked the key of {opened.dag.provider(lost)}: what it signs is refused from record {len(opened)} on.")


@ledger.command("serve")
def ledger_serve(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where the broker keeps everything.")],
    name: Annotated[str, typer.Argument(help="The ledger's name.")],
    roster_path: Annotated[Path, typer.Option("--roster", help="Who may log in (tacit keys).")],
    listen: Listen = "127.0.0.1:4222",
    host: Hosts = None,
    room: Annotated[
        float | None, typer.Option(help="GB on the disk, at most. Default: three quarters of what is free.")
    ] = None,
    plain: Plain = False,
    as_json: AsJson = False,
) -> None:
    """Run a broker that keeps a ledger for all on a roster, until it is stopped. A roster that changes is taken.

    It keeps bytes, and is believed nothing: whoever reads verifies. Started again it has what it had.

    Example:
      tacit ledger serve broker drugs --roster roster.json --listen 0.0.0.0:4222 --host broker.example.org
    """
    from tacit.federation.keys import Roster
    from tacit.ledger.jetstream import LedgerBroker

    address, port = split_listen(listen)
    roster = Roster.load(roster_path)
    if room is not None and not 0 < room < 1e9:
        raise TacitError(f"--room is a number of GB above 0; not {room:g}")
    broker = LedgerBroker(folder, roster, name, room=None if room is None else int(room * 1e9), host=address, port=port,
                          hosts=tuple(host or ()), plain=plain)  # fmt: skip
    warn_plain(plain)
    with stops_kindly(f"tacit ledger serve {folder} {name} ..."), broker:
        look = looking_after(broker, roster_path, roster)
        if as_json:
            print(json.dumps({"log": broker.place, "ca": None if broker.ca is None else str(broker.ca)}), flush=True)
        else:
            needs = "" if broker.ca is None else f" --ca {broker.ca.name} (give them {broker.ca})"
            show.say(f"The ledger is begun, and joined, with --log {broker.place}{needs}")
        while True:
            time.sleep(1)
            look()


@ledger.command("share")
def ledger_share(
    folder: Folder,
    listen: Annotated[str, typer.Option(help="Where this peer listens: address and port.")] = "127.0.0.1:4001",
    host: Annotated[
        list[str] | None, typer.Option("--host", help="A name by which others reach it; may be repeated.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Give the weights in a ledger's folder to whoever asks, by IPFS's protocol, until it is stopped.

    It is for a ledger with --blobs ipfs:. What others publish is not fetched by this: follow --weights does. Whoever
    knows the address of some weights gets them: they are public.

    Example:
      tacit ledger share ledger --listen 0.0.0.0:4001 --host north.example.org
    """
    from tacit.ledger.ipfs import Swarm
    from tacit.ledger.ledger import read_manifest

    address, port = split_listen(listen)
    if "blobs" not in read_manifest(folder):
        raise TacitError(f"{folder}: its weights are not at peers: a ledger begun with --blobs ipfs: has them there.")
    swarm = Swarm()
    swarm.keep(folder)
    with stops_kindly(f"tacit ledger share {folder} --listen {listen}"), closing(swarm):
        found = swarm.listen(address, port, host or ())
        if as_json:
            print(json.dumps({"addresses": found}), flush=True)
        else:
            for each in found:
                show.say(f"Others reach this peer with --blobs ipfs:{each}")
            show.say("They may write that address into the file peers of their folders as well.")
        while True:
            time.sleep(1)


@ledger.command("account")
def ledger_account(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="The account's file: its private key, for you alone.")],
    as_json: AsJson = False,
) -> None:
    """Make an account that pays on a chain, or show the address of one that is there. Put coins of the chain on it.

    It is another key than the one that signs records: who pays says nothing about who wrote.

    Example:
      tacit ledger account north.account
    """
    from tacit.ledger.evm import Account

    new = not path.exists()
    found = Account.new(path) if new else Account(path)
    if as_json:
        print(json.dumps({"account": str(path), "address": found.address, "new": new}))
        return
    show.say(f"{path} is the account {found.address}")


def _revealed(run: Path) -> bytes:
    """The rows of a run that guarantees nothing, in the form in which private runs share theirs."""
    from tacit.run import Run
    from tacit.tensors import save_tensors

    found = Run.open(run)
    names = {"entities": "\n".join(found.graph.entities), "relations": "\n".join(found.graph.relations)}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        save_tensors(path, found.model.tables.tensors(), {"schema": "tacit.shared/1"} | names)
        return path.read_bytes()


def _open(folder: Path, key: Path | None, anchor: CID | None = None, **more: Any) -> Ledger:
    """A ledger, with the key that logs in where it is at a broker."""
    from tacit.ledger.evm import SCHEME
    from tacit.ledger.ledger import Ledger, login, read_manifest

    if str(read_manifest(folder).get("log", SCHEME)).startswith(SCHEME):
        return Ledger.load(folder, anchor, **more)
    who, _ = open_key(key or login(folder))
    return Ledger.load(folder, anchor, who=who, **more)


def _tell(opened: Ledger, news: News, as_json: bool) -> None:
    """One record or fault, at once."""
    from tacit.ledger.ledger import Fault

    found = news.found
    if as_json:
        told: dict[str, Any] = {"position": news.position}
        if isinstance(found, Fault):
            told["fault"] = found.json()
        else:
            told |= {"record": str(found.cid), "kind": found.body.kind, "by": opened.dag.provider(found.by)}
            told |= _plain(found.body.content())
        print(json.dumps(told), flush=True)
    elif isinstance(found, Fault):
        show.say(f"! {found}", "yellow")
    else:
        about = getattr(found.body, "model", None)
        model = f" of {opened.dag.branches[about].model.name}" if about is not None else ""
        show.say(f"{news.position} {found.body.kind}{model} by {opened.dag.provider(found.by)}: {found.cid}")


def _plain(value: Any) -> Any:
    """What a record says, as JSON has it: addresses as text, bytes in hexadecimal."""
    from tacit.ledger.cbor import CID

    if isinstance(value, CID):
        return str(value)
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value


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
    if dag.revoked:
        show.say(f"Revoked: {', '.join(sorted(map(dag.provider, dag.revoked)))}")
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
