"""`tacit serve` and `tacit join`: a federation whose coordinator and parties are processes of their own."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from tacit.cli import show
from tacit.cli.federate import bar
from tacit.cli.keys import open_key
from tacit.cli.options import (
    AsJson,
    Assignments,
    Columns,
    DataFolder,
    Header,
    RunOut,
    Separator,
    SkipBad,
    one_of,
    read_any,
)
from tacit.errors import TacitError
from tacit.folders import check_free

if TYPE_CHECKING:
    from tacit.federated import Plan
    from tacit.federation.broker import Broker
    from tacit.federation.keys import Roster

TRY_AGAIN = 3
"""The exit code of what could not go on for now, and does when it is started again."""
STAYS = 120.0
"""Seconds that a party at a socket stays after the end: Flower takes a minute to say that an answer was lost."""
PlanFile = Annotated[
    Path, typer.Argument(metavar="PLAN", help="A TOML file that all have: recipe, parties, and settings.")
]
RosterFile = Annotated[Path, typer.Option("--roster", help="Whose key is whose (tacit keys).")]
OwnKey = Annotated[Path, typer.Option("--key", help="The private key of whoever runs this.")]
CaFile = Annotated[Path | None, typer.Option("--ca", help="The broker's ca.pem. Needed for tls:// addresses.")]
Listen = Annotated[str, typer.Option(help="Where the broker listens: address and port.")]
Hosts = Annotated[list[str] | None, typer.Option("--host", help="A name by which parties reach it; may be repeated.")]
Plain = Annotated[
    bool,
    typer.Option(
        "--plain",
        help="Without TLS: whoever sees the network reads all that is sent. For a trial on one machine, or where the "
        "network itself is encrypted.",
    ),
]


def serve(
    plan_path: PlanFile,
    key: OwnKey,
    roster_path: RosterFile,
    out_path: RunOut = None,
    listen: Listen = "127.0.0.1:4222",
    host: Hosts = None,
    broker_address: Annotated[
        str | None, typer.Option("--broker", help="Use a broker that runs already, such as tls://broker:4222.")
    ] = None,
    broker_folder: Annotated[
        Path | None, typer.Option(help="Where the broker's certificates are. Default: beside --out.")
    ] = None,
    ca: CaFile = None,
    plain: Plain = False,
    wait: Annotated[float, typer.Option(min=0, help="Seconds to wait for all parties before round 1.")] = 600.0,
    deadline: Annotated[float, typer.Option(min=0, help="Seconds that a party has for an answer.")] = 600.0,
    least: Annotated[
        int | None,
        typer.Option(min=1, help="Let a round count with so many parties, if others are late. Default: all."),
    ] = None,
    assignments: Assignments = None,
    as_json: AsJson = False,
) -> None:
    """Coordinate a federation: hold the shared rows, ask the parties, average what they send; and run the broker.

    Started again with the same words it goes on where it was. Exit codes: 0 finished, 2 a mistake, 3 it could not go on
    for now.

    Example:
      tacit serve plan.toml --key coordinator.key --roster roster.json --listen 0.0.0.0:4222 --host broker
    """
    from tacit.coordinator import Coordinator, Stopped
    from tacit.correspondence import Correspondence
    from tacit.federated import read_plan
    from tacit.federation.broker import Broker
    from tacit.federation.nats import Post
    from tacit.run import CONFIG

    plan, identity, roster = read_plan(plan_path, assignments or ()), open_key(key)[0], _roster(roster_path)
    out = out_path or Path("runs") / plan.settings.name
    if not (out / CONFIG).is_file():  # a place that is taken is refused before a broker is started beside it
        check_free(out, CONFIG)
    warn_plain(plain)
    with stops_kindly(f"tacit serve {plan_path} ..."), ExitStack() as running:
        broker: Broker | None = None
        if broker_address is None:
            address, port = split_listen(listen)
            folder = broker_folder or out.with_name(out.name + "-broker")
            broker = running.enter_context(Broker(
                folder, roster, identity.name, plan.parties, federation=plan.settings.name, host=address,
                port=port, hosts=tuple(host or ()), plain=plain,
            ))  # fmt: skip
            broker_address, ca = broker.address, broker.ca
            if not as_json:
                needs = "" if ca is None else f" --ca {ca.name} (give them {ca})"
                show.say(f"Parties join by: tacit join {plan_path} GRAPH --broker {broker_address}{needs}")
        post = running.enter_context(
            Post(broker_address, identity, plan.settings.name, to=plan.parties, ca=ca, plain=plain)
        )
        letters = Correspondence(post, identity, roster, plan.parties)
        letters.between = looking_after(broker, roster_path, roster, letters)
        on_event = running.enter_context(_events(plan, as_json))
        coordinator = Coordinator(plan, out, letters, wait=wait, deadline=deadline, least=least, on_event=on_event)
        try:
            coordinator.run()
        except Stopped as error:
            give_up(error)
    whole = {split: metrics.json() for split, metrics in coordinator.metrics.items()}
    if as_json:
        print(json.dumps({"out": str(out), "metrics": whole, "best_round": coordinator.patience.best_round,
                          "bytes": {"sent": post.sent_bytes, "received": post.received_bytes}}))  # fmt: skip
        return
    if "test" in coordinator.metrics:
        found = coordinator.metrics["test"]
        show.say(f"Test MRR {found.mrr:.4f}, Hits@10 {found.hits10:.4f}: the mean of what parties tell of their own.")
    show.say(f"Kept in {out}.")


def join(
    plan_path: PlanFile,
    graph_path: Annotated[str, typer.Argument(metavar="GRAPH", help="This party's own graph.")],
    key: OwnKey,
    roster_path: RosterFile,
    broker: Annotated[
        str | None, typer.Option(help="The broker's address, such as tls://broker.example.org:4222.")
    ] = None,
    door: Annotated[
        Path | None,
        typer.Option("--socket", help="Instead of a broker: a Unix socket at which a Flower ClientApp brings letters."),
    ] = None,
    ca: CaFile = None,
    coordinator: Annotated[str, typer.Option(help="The coordinator's name on the roster.")] = "coordinator",
    out_path: RunOut = None,
    budget: Annotated[str | None, typer.Option(help="The holding that pays, if training is private.")] = None,
    plain: Plain = False,
    patience: Annotated[
        float, typer.Option(min=0, help="Seconds without a word of the coordinator, at most.")
    ] = 3600.0,
    assignments: Assignments = None,
    columns: Columns = None,
    separator: Separator = None,
    header: Header = None,
    skip_bad: SkipBad = False,
    data: DataFolder = None,
    as_json: AsJson = False,
) -> None:
    """Take part in a federation with a graph of one's own. No triple leaves this machine.

    Started again with the same words it goes on where it was. Exit codes: 0 finished, 2 a mistake, or something that
    the parties do not agree on, 3 it could not go on for now.

    Example:
      tacit join plan.toml graph --key north.key --roster roster.json --ca ca.pem --broker tls://broker:4222
    """
    from tacit.correspondence import Unheard, attend
    from tacit.door import Door
    from tacit.federated import read_plan
    from tacit.federation.nats import Post
    from tacit.participant import Finished, Participant

    if (broker is None) == (door is None):
        raise TacitError("Say how the coordinator's letters come: by --broker, or at --socket; one of the two.")
    plan, identity, roster = read_plan(plan_path, assignments or ()), open_key(key)[0], _roster(roster_path)
    out = out_path or Path("runs") / plan.settings.name
    with show.busy(f"reading {graph_path}", as_json):
        graph = one_of(read_any(graph_path, data, columns, separator, header, skip_bad), graph_path)
    warn_plain(plain)
    roster.public(coordinator)
    with stops_kindly(f"tacit join {plan_path} ..."), ExitStack() as running:
        on_event = running.enter_context(_events(plan, as_json))
        with show.busy("getting ready", as_json):
            try:
                one = Participant(plan, graph, identity, roster, out, budget=budget, on_event=on_event)
            except Finished as error:
                show.warn_aside(str(error))
                raise typer.Exit(0) from None
        running.callback(one.close)
        post: Post | Door
        if broker is not None:
            post = running.enter_context(Post(broker, identity, plan.settings.name, to=None, ca=ca, plain=plain))
        else:
            assert door is not None
            post = running.enter_context(Door(door))
        on_event({"event": "doing", "what": "ready, and waits for the coordinator"})
        try:
            attend(one, post, identity, roster, coordinator, patience=patience, linger=STAYS if door else None,
                   knocks=door is None)  # fmt: skip
        except Unheard as error:
            give_up(error)
    assert one.run is not None
    found = {split: metrics.json() for split, metrics in one.run.metrics.items()}
    if as_json:
        print(json.dumps({"out": str(out), "metrics": found, "epsilon": one.run.epsilon,
                          "bytes": {"sent": post.sent_bytes, "received": post.received_bytes}}))  # fmt: skip
        return
    from tacit.privacy.plan import in_words

    if "test" in one.run.metrics:
        show.say(f"Test MRR {one.run.metrics['test'].mrr:.4f}, on this party's own questions.")
    if plan.settings.privacy.sound:
        show.say(in_words(one.run.claim))
    else:
        show.say("Not private: whoever sees rows learns of the triples.")
    show.say(f"Kept in {out}: tacit predict, tacit evaluate and tacit export work on it.")


def split_listen(listen: str) -> tuple[str, int]:
    """Where a broker listens, as an address and a port."""
    address, _, port = listen.rpartition(":")
    if not address or not port.isdigit():
        raise TacitError(f"--listen is an address and a port, such as 127.0.0.1:4222; not {listen!r}")
    return address, int(port)


def _roster(path: Path) -> Roster:
    from tacit.federation.keys import Roster

    return Roster.load(path)


def warn_plain(plain: bool) -> None:
    if plain:
        show.warn_aside("without TLS: whoever sees the network reads all that is sent.")


def looking_after(broker: Broker | None, path: Path, roster: Roster, letters: Any = None) -> Callable[[], None]:
    """What whoever runs a broker does now and then: start it if it has ended, and take a newer roster.

    A roster that is older, or of another keeper, is not taken.
    """
    from tacit.federation.keys import Roster

    seen = path.stat().st_mtime_ns

    def look() -> None:
        nonlocal seen, roster
        if broker is not None:
            broker.revive()
        try:
            if (now := path.stat().st_mtime_ns) == seen:
                return
            seen, roster = now, Roster.load(path, roster.keeper, roster.version)
        except (TacitError, OSError) as error:
            show.warn_aside(f"the roster was not taken: {error}")
        else:
            if letters is not None:
                letters.roster = roster
            if broker is not None:
                broker.reload(roster)

    return look


def give_up(error: TacitError) -> None:
    Console(stderr=True).print(Text.assemble(("stopped: ", "bold yellow"), str(error)), soft_wrap=True)
    raise typer.Exit(TRY_AGAIN)


WORKING = "tacit-peer"
"""The thread in which a peer trains (`tacit.peers.network.Doing`)."""


@contextmanager
def stops_kindly(again: str) -> Iterator[None]:
    """Ctrl-C and SIGTERM end it at once, with everything closed; what was saved is whole at any time."""

    def stop(number: int, frame: object) -> None:
        raise KeyboardInterrupt(number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except KeyboardInterrupt as error:
        Console(stderr=True).print(Text(f"Stopped. It goes on with the same command: {again}"), soft_wrap=True)
        code = 143 if error.args else 130
        if any(thread.name == WORKING for thread in threading.enumerate()):
            sys.stdout.flush()
            os._exit(code)  # the interpreter would wait for no thread that computes, and be ended by it
        raise typer.Exit(code) from None
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _events(plan: Plan, as_json: bool) -> Iterator[Any]:
    """Progress on a terminal; with --json, a line for each event on standard error."""
    if as_json:
        yield lambda event: print(json.dumps({"time": round(time.time(), 2)} | event), file=sys.stderr, flush=True)
        return
    with bar(plan.recipe, plan.federation.rounds, False) as on_event:
        yield on_event
