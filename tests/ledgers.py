"""What tests of ledgers at a broker share: keys, rows, a broker with all rights for its operator, what that may do."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import ssl
import subprocess
import sys
from pathlib import Path

import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from networks import environment, until
from tacit.clinic import clinic
from tacit.federation.broker import inbox, nkey_of
from tacit.federation.keys import Identity, Roster
from tacit.federation.nats import _hang_up
from tacit.ledger.jetstream import LedgerBroker
from tacit.ledger.record import Claim
from tacit.privacy.events import Gaussian, Segment
from tacit.tensors import save_tensors


def known(name):
    """The same key in every process: it shows in the names of cases."""
    return Identity(name, Ed25519PrivateKey.from_private_bytes(hashlib.sha256(name.encode()).digest()))


WHO = [known(f"provider-{n}") for n in range(6)]
KEYS = tuple((who.name, who.public) for who in WHO)
CLAIM = Claim((Segment(Gaussian(4.0)),))
OPERATOR = known("operator")


def roster():
    keeper = known("keeper")
    found = Roster.begin(keeper)
    for each in WHO:
        found = found.enrol(keeper, each.name, each.public)
    return found


def rows(folder, value, width=3, count=2):
    """A file of rows, as bytes."""
    text = {"schema": "tacit.shared/1", "relations": "treats", "entities": "\n".join(f"e{n}" for n in range(count))}
    path = Path(folder) / "rows.safetensors"
    save_tensors(path, {"entity": torch.full((count, width), float(value)), "relation": torch.ones(1, width)}, text)
    return path.read_bytes()


class Providers:
    """Whole providers, each a process of `tacit provider start` in its folder, which has its key and its ledger; each
    trains on a hospital's graph, privately.
    """

    def __init__(self, root, names, updates):
        self.root, self.names, self.updates, self.running = root, names, updates, {}

    def start(self, name):
        hospital = clinic("demo").names[self.names.index(name)]
        words = ("provider", "start", "ledger", "clinic-demo", "--party", hospital, "--key", "own.key", "--epsilon", 2,
                 "--updates", self.updates, "--first", 1, "--epochs", 1, "--patience", 5, "--out", "run", "--json",
                 "--set", "training.batch=512", "--set", "negatives.count=4")  # fmt: skip
        with open(self.root / f"{name}.said", "ab") as said:
            self.running[name] = subprocess.Popen(
                [sys.executable, "-m", "tacit", *map(str, words)], cwd=self.root / name, stdout=said, stderr=said,
                env=environment(),
            )  # fmt: skip

    def kill(self, name):
        process = self.running.pop(name)
        process.kill()
        process.wait()

    def looks(self, name):
        file = self.root / name / "run" / "private" / "looks.jsonl"
        return [json.loads(line) for line in file.read_text().split("\n")[:-1]] if file.exists() else []

    def published(self, name):
        return [look["update"] for look in self.looks(name) if look["update"] is not None]

    def check(self):
        """Nobody ended that had something to do."""
        for name, process in self.running.items():
            said = (self.root / f"{name}.said").read_text()[-3000:]
            assert process.poll() in (None, 0), (name, said)
            assert process.poll() is None or f'"published": {self.updates},' in said, (name, said)

    def goes_on(self, by=1, seconds=240):
        """Everybody publishes so many more, or all there are."""
        wanted = {name: min(len(self.published(name)) + by, self.updates) for name in self.running}

        def went():
            self.check()
            return all(len(self.published(name)) >= many for name, many in wanted.items())

        until(went, seconds)

    def end(self, seconds=300):
        """Everybody ends by itself. Whoever was killed may have published one before it could note it."""
        until(lambda: self.check() or all(process.poll() == 0 for process in self.running.values()), seconds)
        return {name: json.loads((self.root / f"{name}.said").read_text().split("\n")[-2]) for name in self.names}

    def close(self):
        for name in list(self.running):
            self.kill(name)


def tacit(*words, cwd, code=0):
    """What a command says on its standard output."""
    done = subprocess.run([sys.executable, "-m", "tacit", *map(str, words)], cwd=cwd, capture_output=True, text=True,
                          timeout=200, check=False, env=environment())  # fmt: skip
    assert done.returncode == code, (words, done.stdout[-2000:], done.stderr[-2000:])
    return done.stdout


class Operated(LedgerBroker):
    """A broker whose operator means no good: one more key may do everything."""

    def _users(self):
        return [*super()._users(), f"    {{ nkey: {nkey_of(OPERATOR.public)} }}"]


def act(broker, do, who=OPERATOR):
    """What `do` returns that is given a bare client of the operator's, or of somebody else's."""
    from nats.aio.client import Client

    async def run():
        client = Client()
        client._public_nkey = nkey_of(who.public)
        tls = {"tls": ssl.create_default_context(cafile=broker.ca), "tls_handshake_first": True} if broker.ca else {}
        try:
            await client.connect(
                broker.address, allow_reconnect=False, inbox_prefix=inbox(who.name), pending_size=1,
                signature_cb=lambda nonce: base64.b64encode(who.answer(nonce)), **tls,
            )  # fmt: skip
            return await do(client)
        finally:
            await _hang_up(client)

    return asyncio.run(run())


async def api(client, verb, content=None):
    answer = await client.request(
        f"$JS.API.{verb}", b"" if content is None else json.dumps(content).encode(), timeout=5
    )
    found = json.loads(answer.data)
    assert "error" not in found, found
    return found


def rewrite(broker, stream, change):
    """Put other messages into a stream in the place of those that are there, under the same numbers.

    `change` is given number, subject, headers and bytes, and returns headers and bytes; None: there is none any more.
    """

    async def do(client):
        found = await api(client, f"STREAM.INFO.{stream}")
        config, last, old = found["config"], found["state"]["last_seq"], []
        for number in range(1, last + 1):
            answer = await client.request(f"$JS.API.STREAM.MSG.GET.{stream}", json.dumps({"seq": number}).encode())
            there = json.loads(answer.data).get("message", {"subject": config["subjects"][0].replace(">", "x")})
            lines = base64.b64decode(there.get("hdrs", "")).decode().split("\r\n")[1:]
            headers = dict(line.split(": ", 1) for line in lines if ": " in line and not line.startswith("Nats-"))
            old.append((number, there["subject"], headers, base64.b64decode(there.get("data", ""))))
        await api(client, f"STREAM.DELETE.{stream}")
        await api(client, f"STREAM.CREATE.{stream}", config | {"deny_delete": False})
        for number, subject, headers, data in old:
            new = change(number, subject, dict(headers), data)
            kept = (headers, data) if new is None else new
            await client.request(subject, kept[1], headers=kept[0] or None, timeout=5)
            if new is None:
                await api(client, f"STREAM.MSG.DELETE.{stream}", {"seq": number})
        await api(client, f"STREAM.UPDATE.{stream}", config)

    act(broker, do)
