"""A provider as a process: its folder, and when it looks at the ledger.

    config.json              what it takes part in, and how: the same words go on with it, others are refused
    private/looks.jsonl      what came of each look: who was taken, who was left out and why, scores
    private/update           an update that was trained, until its record stands: a process that is killed then goes on
                             with it, and does not train it again
    shareable/privacy.json   what is guaranteed, where something is

Nothing else has to be kept: what it published stands in the ledger, and it goes on from there.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tacit.errors import TacitError
from tacit.federation.letters import Away
from tacit.folders import PRIVATE, append_line, log_to, new_folder, read_json, seal, write_json
from tacit.kept import locked
from tacit.ledger.provider import Look, Provider

LOG = logging.getLogger(__name__)
SCHEMA, CONFIG, SHAREABLE, LOOKS = "tacit.provider/1", "config.json", "shareable", "looks.jsonl"
PENDING = "update"
REST, PATIENCE = 2.0, 60.0
"""Seconds between two looks where nothing is new; and how long a provider waits for others before it trains on."""


def provide(
    provider: Provider,
    folder: Path,
    *,
    minutes: float = math.inf,
    rest: float = REST,
    patience: float = PATIENCE,
    on_look: Callable[[Look], None] = lambda look: None,
    on_away: Callable[[Away], None] = lambda error: None,
) -> str:
    """Look until all updates are published, the budget is spent or time is up; says which.

    A provider trains when another published something since its own last update, or when nobody did for `patience`
    seconds: to train alone is paid for too. A broker or a chain that goes away is awaited as long as there is time; an
    update that was trained when it did is published when it is back.
    """
    about = provider.about()
    if not (folder / CONFIG).exists():
        with new_folder(folder, CONFIG) as draft:
            (draft / PRIVATE).mkdir(mode=0o700)
            (draft / SHAREABLE).mkdir()
            seal(draft, CONFIG, SCHEMA, about)
    found = read_json(folder / CONFIG, SCHEMA, {name: type(value) for name, value in about.items()})
    for name, value in about.items():
        if found[name] != json.loads(json.dumps(value)):
            raise TacitError(
                f"{folder} is of a provider with another {name}: go on with that, or choose another --out."
            )
    began = waited = time.monotonic()
    with locked(folder), log_to(folder):
        provider.pending = folder / PRIVATE / PENDING
        _tell(provider, folder)
        away = False
        while True:
            left = 60 * minutes - (time.monotonic() - began)
            if left <= 0:
                return f"{minutes:g} minutes are over"
            try:
                look = provider.publish_pending()
                if look is None and (provider.news() or time.monotonic() - waited >= patience):
                    look = provider.step()
                away = False
            except Away as error:
                if not away:
                    LOG.warning("%s", error)
                    on_away(error)
                look, away = None, True
            if look is None:
                time.sleep(min(rest, left))
                continue
            waited = time.monotonic()
            provider.shelf.forget([provider.ledger.dag.nodes[cid] for cid in look.taken])
            _note(look, folder)
            _tell(provider, folder)
            on_look(look)
            if look.ended is not None:
                return look.ended


def _note(look: Look, folder: Path) -> None:
    line = {
        "update": None if look.update is None else str(look.update), "taken": [str(cid) for cid in look.taken],
        "left_out": {str(cid): why for cid, why in look.left_out.items()}, "score": look.score, "ended": look.ended,
    }  # fmt: skip
    append_line(folder / PRIVATE / LOOKS, json.dumps(line).encode())


def _tell(provider: Provider, folder: Path) -> None:
    statement: dict[str, Any] = provider.statement()
    write_json(folder / SHAREABLE / "privacy.json", "tacit.privacy/1", statement)
