"""What tests of ledgers at a broker share: keys, rows, a broker with all rights for its operator, what that may do."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import ssl
from pathlib import Path

import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

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
            await client.connect(broker.address, allow_reconnect=False, inbox_prefix=inbox(who.name), pending_size=1,
                                 **tls, signature_cb=lambda nonce: base64.b64encode(who.answer(nonce)))  # fmt: skip
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
