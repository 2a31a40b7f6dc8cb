"""A federation by way of Flower: letters between the coordinator and the parties travel inside Flower's messages.

A ServerApp runs the coordinator; a ClientApp is a new process for every message, and hands what it brings to the
party's own process, which stays (`tacit join --socket`). Flower carries letters, and is trusted with their delivery and
with nothing else: they are signed from end to end by the keys of the roster.

    ServerApp: Coordinator - Correspondence - GridPost = SuperLink = SuperNode - ClientApp - Door: attend - Participant

Nothing here loads torch before it is needed: a ClientApp has to start quickly.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tacit.door import LARGEST, hand_over
from tacit.errors import TacitError
from tacit.folders import new_folder, seal, write_whole

if TYPE_CHECKING:
    from tacit.federation.keys import Identity
    from tacit.training import Event

LOG = logging.getLogger(__name__)
SCHEMA, MANIFEST = "tacit.flower/1", "flower.json"
QUERY = "letter"
PIECE = 4 << 20
"""Bytes of a letter in one record. Flower sends records one by one: several are faster than one, and each stays far
from its limit of 30 seconds."""
POLL = 0.1
"""Seconds between two looks for answers; Flower's own loop takes three."""
REST = 3.0
"""Seconds in which a party is left alone after a message to it came back with an error."""
SETTLE = 20.0
"""Seconds that the ServerApp waits in the end for goodbyes to arrive."""


def _need_flower() -> None:
    try:
        import flwr  # noqa: F401 - whether it is there
    except ImportError:
        raise TacitError('A federation by Flower needs the package flwr: pip install "tacit-kg[flower]"') from None


def packed(letter: bytes) -> Any:
    """A letter as the content of a Flower message: in pieces, with their number."""
    from flwr.app import ConfigRecord, RecordDict

    cuts = range(0, len(letter), PIECE)
    content = RecordDict({"letter": ConfigRecord({"pieces": len(cuts)})})
    for i, at in enumerate(cuts):
        content[f"piece-{i}"] = ConfigRecord({"bytes": letter[at : at + PIECE]})
    return content


def unpacked(content: Any) -> bytes:
    """The letter in the content of a Flower message."""
    try:
        count = content["letter"]["pieces"]
        if type(count) is not int or not 0 <= count <= LARGEST // PIECE or len(content) != count + 1:
            raise ValueError
        pieces = [content[f"piece-{i}"]["bytes"] for i in range(count)]
        if not all(isinstance(piece, bytes) and 0 < len(piece) <= PIECE for piece in pieces):
            raise ValueError
    except (KeyError, TypeError, ValueError):
        raise TacitError("a Flower message that holds no letter of tacit") from None
    return b"".join(pieces)


# -- at a party --------------------------------------------------------------------------------------------------------


def client_app() -> Any:
    """The ClientApp. What it raises goes to the server in clear words, so it says nothing of the party's own."""
    _need_flower()
    from flwr.clientapp import ClientApp

    app = ClientApp()
    app.query(QUERY)(relayed)
    return app


def relayed(message: Any, context: Any) -> Any:
    """Hand a letter to the party's own process, and bring back its answer."""
    from flwr.app import Message

    where = context.node_config.get("socket")
    if not isinstance(where, str) or not where:
        raise TacitError("this SuperNode's --node-config does not name the party's socket: socket = \"party.sock\"")
    return Message(packed(hand_over(Path(where), unpacked(message.content))), reply_to=message)


# -- at the coordinator ------------------------------------------------------------------------------------------------


class GridPost:
    """Letters by way of a Flower grid, as `Correspondence` writes them; parties are known by their SuperNodes' names.

    One letter is under way to a party at a time: a SuperNode takes one message after the other, and a reminder would
    only queue up behind what it reminds of. What is to be sent meanwhile is dropped, and so is what is for a SuperNode
    that is not there; `Correspondence` reminds again. An error is no answer. Whether an answer is the party's own is
    not decided here, but by its signature.

    seconds: after which a message is given up of which nothing was heard.
    """

    def __init__(self, grid: Any, parties: Sequence[str], seconds: float):
        _need_flower()
        self.grid, self.parties, self.seconds = grid, tuple(parties), seconds
        self.sent_bytes = self.received_bytes = self.errors = 0
        self._under_way: dict[str, tuple[str, float]] = {}
        self._came: deque[tuple[str, bytes]] = deque()
        self._rests: dict[str, float] = {}
        self._nodes: dict[str, int] = {}
        self._looked = float("-inf")
        self._missing: set[str] = set(self.parties)

    def send(self, to: str | None, letter: bytes) -> None:
        """Send a letter, if nothing is under way to that party and its SuperNode is there."""
        from flwr.app import Message
        from httpx import HTTPError

        from tacit.federation.letters import Away

        now = time.monotonic()
        self._give_up(now)
        busy = {party for party, _ in self._under_way.values()} | {party for party, _ in self._came}
        if to is None or to in busy or now < self._rests.get(to, 0.0):
            return
        try:
            if (node := self._node(to, now)) is None:
                return
            message = Message(packed(letter), dst_node_id=node, message_type=f"query.{QUERY}", ttl=self.seconds)
            [number] = list(self.grid.push_messages([message])) or [None]
        except HTTPError as error:
            raise Away(f"the SuperLink did not take a letter: {type(error).__name__}") from None
        if not number:
            raise Away(f"the SuperLink did not take a letter to {to}")
        self._under_way[number] = (to, now + self.seconds)
        self.sent_bytes += len(letter)

    def receive(self, timeout: float) -> tuple[str, bytes] | None:
        """The next answer, with the party to whose SuperNode the question went; None: there is none in time."""
        end = time.monotonic() + timeout
        while not self._came:
            self._pull()
            left = end - time.monotonic()
            if not self._came and left <= 0:
                return None
            if not self._came:
                time.sleep(min(POLL, left))
        return self._came.popleft()

    def settle(self, seconds: float) -> None:
        """Wait until nothing is under way any more: what was sent last has arrived."""
        end = time.monotonic() + seconds
        while self._under_way and time.monotonic() < end:
            self._pull()
            time.sleep(POLL)

    def _pull(self) -> None:
        from httpx import HTTPError

        self._give_up(time.monotonic())
        if not self._under_way:
            return
        try:
            replies = list(self.grid.pull_messages(list(self._under_way)))
        except HTTPError as error:
            LOG.warning("the SuperLink did not say what came: %s", type(error).__name__)
            return
        for reply in replies:  # an error that the SuperLink made is not of that node: the question tells whose it is
            party, _ = self._under_way.pop(reply.metadata.reply_to_message_id, ("", 0.0))
            if not party:
                continue
            try:
                if reply.has_error():
                    raise TacitError(f"error {reply.error.code}: {str(reply.error.reason)[:500]}")
                letter = unpacked(reply.content)
            except TacitError as error:
                LOG.warning("no answer of %s: %s", party, error)
                self.errors += 1
                letter = b""
            if letter:
                self._came.append((party, letter))
                self.received_bytes += len(letter)
            else:
                self._rests[party] = time.monotonic() + REST

    def _give_up(self, now: float) -> None:
        self._under_way = {number: (party, until) for number, (party, until) in self._under_way.items() if until > now}

    def _node(self, party: str, now: float) -> int | None:
        """The number of the SuperNode that is registered under a party's name, if it is there."""
        if now - self._looked > 1.0:
            there = [node for node in self.grid.get_nodes() if node.status == "online" and node.name in self.parties]
            names = [node.name for node in there]
            self._nodes = {node.name: node.node_id for node in there if names.count(node.name) == 1}
            self._looked = now
            if twice := sorted({name for name in names if names.count(name) > 1}):
                LOG.warning("%s: more than one SuperNode has this name. Unregister the wrong one.", ", ".join(twice))
            if (missing := set(self.parties) - self._nodes.keys()) != self._missing:
                absent = f"not there: {', '.join(sorted(missing))}" if missing else "all there"
                LOG.warning("SuperNodes: %s", absent)
                self._missing = missing
        return self._nodes.get(party)


def server_app() -> Any:
    """The ServerApp."""
    _need_flower()
    from flwr.serverapp import ServerApp

    app = ServerApp()
    app.main()(coordinate)
    return app


def coordinate(grid: Any, context: Any) -> None:
    """Run the coordinator of the plan that the run-config names, to the end; or on from where it was."""
    from tacit.coordinator import Coordinator
    from tacit.correspondence import Correspondence
    from tacit.federated import read_plan
    from tacit.federation.keys import Roster

    told = context.run_config
    paths = {}
    for name in ("plan", "key", "roster", "out"):
        paths[name] = Path(str(told.get(name, "")))
        if not paths[name].is_absolute():
            raise TacitError(f"the run-config has to say {name}, as a whole path; it says {str(told.get(name, ''))!r}")
    plan, roster = read_plan(paths["plan"]), Roster.load(paths["roster"])
    wait, deadline, least = float(told["wait"]), float(told["deadline"]), int(told["least"])
    post = GridPost(grid, plan.parties, max(wait, deadline))
    letters = Correspondence(post, _own_key(paths["key"]), roster, plan.parties, parties_knock=False)
    coordinator = Coordinator(plan, paths["out"], letters, wait=wait, deadline=deadline, least=least or None,
                              on_event=_tell)  # fmt: skip
    said = logging.StreamHandler(sys.stdout)  # of which Flower makes the log of the run
    logging.getLogger("tacit").addHandler(said)
    try:
        coordinator.run()
    finally:
        post.settle(SETTLE)
        logging.getLogger("tacit").removeHandler(said)
        traffic = {"sent": post.sent_bytes, "received": post.received_bytes}
        print(json.dumps({"event": "letters", **traffic, "errors": post.errors}), flush=True)


def _own_key(path: Path) -> Identity:
    from tacit.federation.keys import Identity, Locked

    try:
        return Identity.load(path)
    except Locked:
        return Identity.load(path, os.environ.get("TACIT_PASSPHRASE"))


def _tell(event: Event) -> None:
    """How far it is. What is printed can be read at the SuperLink by whoever reaches it, so no number of a party's."""
    open_to_all = {key: event[key] for key in ("event", "what", "round", "seconds") if key in event}
    print(json.dumps({"time": round(time.time(), 2)} | open_to_all), flush=True)


# -- what is written before --------------------------------------------------------------------------------------------


def write_app(
    folder: Path, plan_path: Path, key: Path, roster_path: Path, identity: Identity, *,
    listen: str = "127.0.0.1:8000", hosts: Sequence[str] = (), force: bool = False,
) -> list[str]:  # fmt: skip
    """Write all that a federation by Flower is started with into a new folder; the parties' names.

    app/ is the Flower app; superlink/ has the SuperLink's certificates; parties/NAME is for that party; nodes/ is for
    their public keys; COMMANDS.md says what to do.
    """
    _need_flower()
    from tacit.federated import read_plan
    from tacit.federation.broker import certificates
    from tacit.federation.keys import Roster
    from tacit.settings import to_toml

    plan, roster, folder = read_plan(plan_path), Roster.load(roster_path), folder.resolve()
    if roster.public(identity.name) != identity.public:
        raise TacitError(f"{roster_path}: the roster has another key for {identity.name} than {key}")
    for name in plan.parties:
        roster.public(name)
    host, _, port = listen.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise TacitError(f"--listen is an address and a port, such as 127.0.0.1:8000; not {listen!r}")
    names = dict.fromkeys([*hosts, *([] if host in ("0.0.0.0", "::") else [host]), "127.0.0.1", "localhost"])
    reached = f"{next(iter(names))}:{port}"
    with new_folder(folder, MANIFEST, force=force) as draft:
        for inner in ("app/tacit_flower", "flwr/cli", "flwr/superlink", "nodes", "parties"):
            (draft / inner).mkdir(parents=True)
        certificates(draft / "superlink", list(names))
        plan_bytes = plan_path.read_bytes()
        (draft / "plan.toml").write_bytes(plan_bytes)
        paths = {"plan": folder / "plan.toml", "key": key.resolve(), "roster": roster_path.resolve(),
                 "out": folder / "run"}  # fmt: skip
        (draft / "run-config.toml").write_text(to_toml(RUN_CONFIG | {name: str(path) for name, path in paths.items()}))
        app = draft / "app"
        (app / "pyproject.toml").write_text(PROJECT + to_toml(RUN_CONFIG))
        (app / "tacit_flower" / "__init__.py").touch()
        for side in ("server", "client"):
            (app / "tacit_flower" / f"{side}_app.py").write_text(
                f"from tacit.flower import {side}_app\n\napp = {side}_app()\n"
            )
        link = {"address": f"{host if host not in ('0.0.0.0', '::') else '127.0.0.1'}:{port}",
                "root-certificates": str(folder / "superlink" / "ca.pem")}  # fmt: skip
        (draft / "flwr" / "cli" / "config.toml").write_text(
            '[superlink]\ndefault = "tacit"\n\n[superlink.tacit]\n' + to_toml(link)
        )
        for name in plan.parties:
            (party := draft / "parties" / name).mkdir()
            (party / "plan.toml").write_bytes(plan_bytes)
            shown = (draft / "superlink" / "ca.pem").read_bytes()
            write_whole(party / "ca.pem", shown, mode=0o644)
            (party / "node-config.toml").write_text(
                "# Where tacit join listens; if it does not begin with /, from where flower-supernode is started.\n"
                + to_toml({"socket": "party.sock"})
            )
        (draft / "COMMANDS.md").write_text(_commands(plan.parties, identity.name, host, port, reached))
        seal(draft, MANIFEST, SCHEMA, {"parties": list(plan.parties), "listen": listen})
    return list(plan.parties)


RUN_CONFIG = {"plan": "", "key": "", "roster": "", "out": "", "wait": 600.0, "deadline": 600.0, "least": 0}
"""What a run can be told, as `tacit serve` has it; least 0: all."""
PROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "tacit-flower"
version = "0.1.0"
description = "The coordinator and the parties of a tacit federation, by way of Flower"
license = "Apache-2.0"
dependencies = []

[tool.hatch.build.targets.wheel]
packages = ["."]

[tool.flwr.app]
publisher = "tacit"

[tool.flwr.app.components]
serverapp = "tacit_flower.server_app:app"
clientapp = "tacit_flower.client_app:app"

# run-config.toml has what holds for this federation.
[tool.flwr.app.config]
"""


def _commands(parties: Sequence[str], coordinator: str, host: str, port: str, reached: str) -> str:
    """COMMANDS.md."""
    told = shlex.quote(coordinator)
    begin = BEGIN.format(host=host, port=port, registered="\n".join(
        f"flwr supernode register nodes/{name}.pub tacit --name {name}" for name in parties
    ))  # fmt: skip
    each = "\n".join(
        PARTY.format(name=name, coordinator=told, reached=reached, port=9094 + i) for i, name in enumerate(parties)
    )
    return begin + each + NOTES


BEGIN = """\
# Commands of this federation

Everybody needs `pip install "tacit-kg[flower]"`, and that environment's `bin` first in `PATH`: Flower looks there for
its own programs. In every terminal:

```sh
export FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1
export FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1 FLWR_SUPEREXEC_TASK_POLL_INTERVAL=0.1
```

## Coordinator

In this folder. Give each party its folder `parties/NAME` and the roster; get from it `node_key.pub`, by a way that can
be trusted, and keep it as `nodes/NAME.pub`. If the coordinator's key has a passphrase, set `TACIT_PASSPHRASE` for the
SuperLink. It runs until it is stopped:

```sh
FLWR_HOME="$PWD/flwr/superlink" flower-superlink --host {host} --port {port} \\
  --ssl-ca-certfile superlink/ca.pem --ssl-certfile superlink/server.pem --ssl-keyfile superlink/server.key \\
  --enable-supernode-auth --isolation subprocess --disable-runtime-dependency-installation
```

In another terminal, once:

```sh
export FLWR_HOME="$PWD/flwr/cli"
{registered}
```

When the parties are there, or before:

```sh
export FLWR_HOME="$PWD/flwr/cli"
flwr run app tacit --run-config run-config.toml --stream
```

It is over when `run/private/metrics.json` is there; `flwr list tacit` says how a run ended, and why. What was
interrupted goes on with the same `flwr run`. How long parties are waited for stands in `run-config.toml`.

"""
PARTY = """\
## {name}

In the folder that you were given, with your own `{name}.key`, `roster.json` and `graph` in it. Once, and send
`node_key.pub` to the coordinator:

```sh
ssh-keygen -q -t ecdsa -b 384 -N "" -C "" -f node_key
```

Your own process, which has the graph and the model:

```sh
tacit join plan.toml graph --key {name}.key --roster roster.json --coordinator {coordinator} \\
  --socket party.sock --out run
```

And what brings it letters, in another terminal in the same folder, when the key is registered:

```sh
FLWR_HOME="$PWD/flwr" flower-supernode --superlink {reached} --root-certificates ca.pem \\
  --auth-supernode-private-key node_key --node-config node-config.toml --isolation subprocess \\
  --host 127.0.0.1 --port {port}
```
"""
NOTES = """\

## What to know before this leaves one machine

- **The SuperLink's port has no login for commands.** Whoever reaches it can register SuperNodes, and start programs of
  their own on every SuperNode. Keep it behind a firewall or a tunnel that admits the parties alone. Registered keys
  keep strangers from being a SuperNode; they do not keep anyone from giving orders. And SuperNodes use the same port:
  **each party can start programs at the others**, unless something in front of it lets only `/v1/fleet/` through from
  outside (which we have not tried).
- **A SuperNode runs what the SuperLink sends it**, as the user who started it; and this user has to be the one who runs
  `tacit join`, for `party.sock` is its owner's alone. So what runs there can read what that user can. Where that is too
  much, run `flower-supernode` in a container, with the same user id, that has `party.sock`, `node_key`, `ca.pem` and
  `node-config.toml`, and neither the graph nor `NAME.key`.
- **TLS ends at the SuperLink**, which sees every letter. It cannot change or invent one: parties and coordinator sign
  them. What is in them is what a server sees in any case: with `federation.secure` sums, without it each party's rows.
- **No `--database`.** With it, letters are kept on the SuperLink's disk, in the clear, and parts of them stay there
  after the end.
- The words of an error in a ClientApp go to the server, and those of one in the ServerApp to whoever asks `flwr list`.
- A SuperNode that was killed can come back after a minute, not before.
"""
