"""`tacit peer`: parties that learn from each other in pairs, without a server; over a network, or in one process."""

from __future__ import annotations

import json
import math
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tacit.cli import show
from tacit.cli.keys import open_key
from tacit.cli.network import CaFile, OwnKey, Plain, RosterFile, give_up, looking_after, stops_kindly, warn_plain
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
    Privacy,
    Resume,
    RunOut,
    ScorerName,
    Seed,
    Separator,
    SkipBad,
    one_of,
    read_any,
)
from tacit.errors import BadInput, TacitError
from tacit.folders import check_free
from tacit.graph import Graph
from tacit.parties import Parties

if TYPE_CHECKING:
    from tacit.federation.keys import Roster
    from tacit.peers.kept import PeerRun, Plan
    from tacit.peers.learner import Pairing
    from tacit.settings import Settings

peer = typer.Typer(
    no_args_is_help=True, help="Learn from each other in pairs, without a server: over a network, or in one process."
)
Mode = Annotated[
    str | None, typer.Option(help="sound, or published: as FKGE is described, without a guarantee. (pairing.mode)")
]
Meeting = Annotated[str, typer.Option("--meeting", help="The meeting's name, the same for everybody.")]
Peers = Annotated[
    str | None,
    typer.Option(help="Who meets, comma-separated, in the same order everywhere. Default: all on the roster."),
]
Batch = Annotated[int | None, typer.Option(help="Triples per step. (training.batch)")]
Epochs = Annotated[int | None, typer.Option(help="Of the first training. (training.epochs)")]
FLAGS = ("scorer", "dim", "negatives", "learning_rate", "batch", "epochs", "device", "privacy", "epsilon", "delta",
         "seed")  # fmt: skip


@peer.command()
def start(
    graph_path: Annotated[
        str | None, typer.Argument(metavar="[GRAPH]", help="This peer's own graph; left out with --resume.")
    ] = None,
    *,
    key: OwnKey,
    roster_path: RosterFile,
    broker: Annotated[str, typer.Option(help="The broker's address, such as tls://broker.example.org:4222.")],
    ca: CaFile = None,
    meeting: Annotated[str | None, typer.Option(help="Its name, the same for everybody. Default: meeting.")] = None,
    peers: Peers = None,
    links: Annotated[
        Path | None,
        typer.Option(help="Which names mean the same: peer, name, peer, name[, kind], by tabs. Default: equal names, "
                          "found by a private set intersection."),
    ] = None,
    mode: Mode = None,
    minutes: Annotated[float | None, typer.Option(min=0, help="Begin nothing new after so long.")] = None,
    wait: Annotated[float, typer.Option(min=0, help="Seconds to wait for the others before the first training.")] = 120,
    out_path: RunOut = None,
    resume: Resume = None,
    config: Config = None,
    budget: Annotated[str | None, typer.Option(help="The holding that pays for all that may leave.")] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep what every message held, in private/messages.")] = False,
    scorer: ScorerName = None,
    dim: Dim = None,
    negatives: Count = None,
    learning_rate: LearningRate = None,
    batch: Batch = None,
    epochs: Epochs = None,
    device: Device = None,
    privacy: Privacy = None,
    epsilon: Epsilon = None,
    delta: Delta = None,
    seed: Seed = None,
    assignments: Assignments = None,
    plain: Plain = False,
    columns: Columns = None,
    separator: Separator = None,
    header: Header = None,
    skip_bad: SkipBad = False,
    data: DataFolder = None,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Meet other peers with a graph of one's own. No triple leaves this machine.

    Started again with the same words, or by --resume, it goes on where it was. Exit codes: 0 the meeting has ended, 2 a
    mistake, 3 nobody came.

    Examples:
      tacit peer start graph --key north.key --roster roster.json --broker tls://host:4222 --ca ca.pem
      tacit peer start --resume run --key north.key --roster roster.json --broker tls://host:4222 --ca ca.pem
    """
    local = locals()
    from tacit.federation.keys import Roster
    from tacit.federation.nats import Post
    from tacit.peers.kept import PeerRun, Plan
    from tacit.peers.network import Alone, Guest
    from tacit.run import CONFIG

    identity, roster = open_key(key)[0], Roster.load(roster_path)
    if resume is not None:
        fixed = (*FLAGS, "graph_path", "meeting", "peers", "out_path", "config", "budget", "assignments", "mode",
                 "columns", "separator", "header")  # fmt: skip
        given = [flag for flag in fixed if local[flag] is not None]
        if given:
            raise TacitError(f"--resume goes on with a peer as it is: {given[0].replace('_', '-')} cannot change it.")
        run = PeerRun.open(resume)
    else:
        if graph_path is None:
            raise TacitError("Say what this peer learns: a path to its graph, or --resume FOLDER.")
        settings, pairing, written = _settings(local, {"name": "peer"})
        names = _names(peers, written, roster)
        called = written.pop("meeting", None)
        called = meeting or called or "meeting"
        if written:
            raise BadInput(f"there is no setting {next(iter(written))!r} of a peer.")
        plan = Plan(str(called), names, settings, pairing, "private" if links is None else "links")
        with show.busy(f"reading {graph_path}", as_json):
            graph = one_of(read_any(graph_path, data, columns, separator, header, skip_bad), graph_path)
        run = _kept(out_path or Path("runs") / settings.name, plan, identity.name, graph, budget)
    rows = None if links is None else _rows(links, run.plan)
    warn_plain(plain)

    def on_event(event: dict[str, Any]) -> None:
        if as_json:
            print(json.dumps({"time": round(time.time(), 2)} | event), file=sys.stderr, flush=True)
        elif sys.stderr.isatty():
            show.say_aside(_in_words(event))

    with stops_kindly(f"tacit peer start --resume {run.path} ..."), ExitStack() as running:
        others = [name for name in run.plan.peers if name != identity.name]
        post = running.enter_context(
            Post(broker, identity, run.plan.meeting, peers=others, ca=ca, plain=plain, patience=10.0)
        )
        limit = math.inf if minutes is None else minutes
        guest = Guest(run, post, identity, roster, links=rows, minutes=limit, wait=wait, keep=keep, on_event=on_event)
        if not (run.path / CONFIG).is_file():
            run.fill()
        post.patience = 2.0  # from now on: whoever waits for a letter gives up after a while anyway
        guest.between = looking_after(None, roster_path, roster, guest)
        try:
            found = guest.attend()
        except Alone as error:
            give_up(error)
    found |= {"bytes": {"sent": post.sent_bytes, "received": post.received_bytes}}
    if as_json:
        print(json.dumps(found))
        return
    _say({run.name: found["test"]}, {run.name: found["statement"]})
    show.say(f"Kept in {run.path}: tacit predict, tacit evaluate and tacit export work on it.")


@peer.command()
def broker(
    roster_path: RosterFile,
    meeting: Meeting = "meeting",
    peers: Peers = None,
    listen: Annotated[str, typer.Option(help="Where it listens: address and port.")] = "127.0.0.1:4222",
    host: Annotated[
        list[str] | None, typer.Option("--host", help="A name by which peers reach it; may be repeated.")
    ] = None,
    folder: Annotated[Path, typer.Option(help="Where its certificates and its log are.")] = Path("broker"),
    minutes: Annotated[float | None, typer.Option(min=0, help="Stop after so long. Default: at Ctrl-C.")] = None,
    plain: Plain = False,
    as_json: AsJson = False,
) -> None:
    """Carry the letters of a meeting. It lets in whom the roster names, and can read none of what they send.

    Any machine that all peers reach can do it, a peer's too. It keeps nothing.

    Example:
      tacit peer broker --roster roster.json --listen 0.0.0.0:4222 --host broker.example.org
    """
    from tacit.federation.broker import Broker
    from tacit.federation.keys import Roster

    roster = Roster.load(roster_path)
    names = _names(peers, {}, roster)
    address, _, port = listen.rpartition(":")
    if not address or not port.isdigit():
        raise TacitError(f"--listen is an address and a port, such as 127.0.0.1:4222; not {listen!r}")
    warn_plain(plain)
    end = math.inf if minutes is None else time.monotonic() + 60 * minutes
    made = Broker(folder, roster, None, names, federation=meeting, host=address, port=int(port),
                  hosts=tuple(host or ()), plain=plain)  # fmt: skip
    with stops_kindly("tacit peer broker ..."), made as one:
        needs = "" if one.ca is None else f" --ca {one.ca.name} (give them {one.ca})"
        if as_json:
            print(json.dumps({"address": one.address, "ca": None if one.ca is None else str(one.ca)}), flush=True)
        else:
            show.say(f"Peers meet by: tacit peer start GRAPH --meeting {meeting} --broker {one.address}{needs}")
        look = looking_after(one, roster_path, roster, SimpleNamespace())
        while time.monotonic() < end:
            time.sleep(min(1.0, max(0.0, end - time.monotonic())))
            look()


@peer.command()
def meet(
    path: Annotated[str, typer.Argument(metavar="PARTIES", help="A folder of parties, clinic-small or clinic-demo.")],
    mode: Mode = None,
    private: Annotated[
        bool, typer.Option("--private-names", help="Align by a private set intersection, not by links or equal names.")
    ] = False,
    minutes: Annotated[float | None, typer.Option(min=0, help="Of the virtual clock: stop after so long.")] = None,
    out_path: RunOut = None,
    config: Config = None,
    scorer: ScorerName = None,
    dim: Dim = None,
    negatives: Count = None,
    learning_rate: LearningRate = None,
    batch: Batch = None,
    epochs: Epochs = None,
    device: Device = None,
    privacy: Privacy = None,
    epsilon: Epsilon = None,
    delta: Delta = None,
    seed: Seed = None,
    assignments: Assignments = None,
    columns: Columns = None,
    separator: Separator = None,
    header: Header = None,
    skip_bad: SkipBad = False,
    data: DataFolder = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Let several parties meet in one process, by a virtual clock: a simulation in which messages are all that they
    have of each other.

    Examples:
      tacit peer meet clinic-small --mode published --epochs 50 --out runs/met
      tacit peer meet clinic-small --privacy dpsgd --epsilon 4 --set pairing.trainings=3
    """
    local = locals()
    from tacit.peers.kept import How, keep_meeting, public_triples
    from tacit.peers.meeting import meet as all_meet
    from tacit.run import CONFIG

    settings, pairing, written = _settings(local, {"name": "meeting"})
    if written:
        raise BadInput(f"there is no setting {next(iter(written))!r} of a meeting.")
    out = out_path or Path("runs") / settings.name
    check_free(out, CONFIG, force=force)
    with show.busy(f"reading {path}", as_json):
        parties = read_any(path, data, columns, separator, header, skip_bad)
    if not isinstance(parties, Parties):
        raise TacitError(f"{path} is one graph: divide it first, by tacit data partition.")
    found = {number: public_triples(graph, pairing) for number, graph in enumerate(parties)}
    public = {number: triples for number, triples in found.items() if triples is not None}
    how: How = "private" if private else "links"
    until = math.inf if minutes is None else 60 * minutes
    with show.busy("they meet", as_json):
        results = keep_meeting(
            out, parties, settings, pairing, alignment=how, force=force,
            run=lambda: all_meet(parties, settings, pairing, alignment=how, public=public, until=until),
        )  # fmt: skip
    if as_json:
        print(json.dumps(results))
        return
    _say(results["test"], results["statement"])
    show.say(f"Kept in {out}.")


def _settings(local: dict[str, Any], first: dict[str, Any]) -> tuple[Settings, Pairing, dict[str, Any]]:
    """How a peer trains and pairs, of --config, --set and flags; and what else the file says."""
    from tacit.peers.kept import pairing_of
    from tacit.settings import SECTIONS, Settings, combine, from_flags, parse_assignment, read_settings

    written = read_settings(local["config"]) if local["config"] else {}
    layers = [first, written, *(parse_assignment(text) for text in local["assignments"] or ())]
    whole = combine(*layers, from_flags({flag: local[flag] for flag in FLAGS}))
    pairing = pairing_of(whole.pop("pairing", {}))
    if local["mode"] is not None:
        if local["mode"] not in ("sound", "published"):
            raise TacitError(f"--mode is sound or published, not {local['mode']!r}")
        pairing = replace(pairing, mode=local["mode"])
    if "privacy" in whole and isinstance(whole["privacy"], dict):
        whole["privacy"].setdefault("name", "dpsgd")  # of peers it is rows that leave, and these need private steps
    known = {*SECTIONS, "name", "seed"}
    own = {key: value for key, value in whole.items() if key in known}
    rest = {key: value for key, value in whole.items() if key not in known}
    return Settings.make(own), pairing, rest


def _names(text: str | None, written: dict[str, Any], roster: Roster) -> tuple[str, ...]:
    given = written.pop("peers", None)
    if text is not None:
        given = [name.strip() for name in text.split(",")]
    names = roster.names if given is None else given
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise BadInput("peers are a list of names.")
    for name in names:
        roster.public(name)
    if len(names) < 2 or len(set(names)) < len(names):
        raise TacitError("a meeting is of two peers or more, each named once")
    return tuple(names)


def _rows(path: Path, plan: Plan) -> list[Any]:
    """Links of a file: of this meeting's peers."""
    from tacit.files.parties import link_rows

    return [(link.party, link.name, link.other, link.other_name, link.kind) for link in link_rows(path, plan.peers)]


def _kept(out: Path, plan: Plan, name: str, graph: Graph, budget: str | None) -> PeerRun:
    """The folder of this peer: one that is yet to be made, or that of an earlier process that meant the same."""
    from tacit.peers.kept import PeerRun
    from tacit.run import CONFIG

    if not (out / CONFIG).is_file():
        check_free(out, CONFIG)
        run = PeerRun(out, plan, name, graph, budget)
        run.check()
        return run
    run = PeerRun.open(out)
    if (run.plan, run.name, run.graph, run.budget) != (plan, name, graph, budget):
        raise TacitError(f"{out} holds a peer with other settings, or another graph. Choose another --out; or go on "
                         f"with it as it is: tacit peer start --resume {out}")  # fmt: skip
    return run


def _in_words(event: dict[str, Any]) -> str:
    more = ", ".join(f"{key} {value}" for key, value in event.items() if key not in ("event", "peer"))
    return f"{event['event']}{': ' if more else ''}{more}"


def _say(scores: dict[str, Any], statements: dict[str, Any]) -> None:
    if any(scores.values()):
        rows = [
            (name, *(f"{each[key]:.4f}" for key in ("mrr", "hits1", "hits10", "accuracy")))
            for name, each in scores.items()
            if each is not None
        ]
        show.table("peer", "test MRR", "Hits@1", "Hits@10", "accuracy", rows=rows)
    for name, said in statements.items():
        if said["epsilon"] is not None:
            what = f"private, epsilon {said['epsilon']:.3g} at delta {said['delta']:g} for {said['unit']}"
        elif said.get("simulated_epsilon") is not None:
            what = "a simulation, no guarantee"
        else:
            what = "no formal guarantee: as published, for replication"
        show.say(f"{name}: {what}.")
