"""Peers as cells of tables of published figures (`tacit.reproduction`).

    [peers]
    setting = "published"             # one of SETTINGS
    names = ["whisky", "tharawat"]    # which of the given parties; default: all of them
    split = [0.9, 0.05, 0.05]         # each peer's triples are dealt anew, by the seed; default: as they are
    rename = true                     # relations have names of each peer's own; the links say which were the same
    scorers = ["transe", "transh"]    # one for each peer, in place of scorer.name

    [pairing]                         # fields of `tacit.peers.Pairing`, but for its mode
    trainings = 8
    patience = 8                      # as many as trainings: whoever is not asked trains on until they are used up

    [pairing.ppat]                    # fields of `tacit.peers.PPAT`, but for its translator
    epochs = 10

With patience as large as trainings, every setting but "independent" has the same number of epochs in all, and so a
meeting is compared with what trained as long. Metrics are plain means over peers; each peer's stand beside them.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from tacit.errors import BadInput, excerpt
from tacit.graph import Graph
from tacit.models import SCORERS
from tacit.parties import Parties, rename_relations, some, split_anew
from tacit.peers.learner import Pairing
from tacit.peers.meeting import Meeting, Scores, continued, independent, meet, unified
from tacit.peers.ppat import PPAT
from tacit.privacy.privatizers import Sound
from tacit.reproduction import Cell, divide, line, of_each_setting, spread
from tacit.settings import Settings, checked_section, plain_section

KEYS = {"setting": str, "names": list, "split": list, "rename": bool, "scorers": list}
SETTINGS = {
    "independent": "each alone, its first training",
    "continued": "each alone, with as many further trainings as in a meeting, the best kept",
    "unified": "one model of all triples, aligned names being one, trained as long",
    "published": "a meeting as FKGE describes it",
    "procrustes": "a meeting in which known pairs give the map, instead of an adversary",
    "sound": "a meeting in sound mode",
    "sound-procrustes": "the same, known pairs giving the map",
}
PRIVATE = ("independent", "continued", "sound", "sound-procrustes")
CONTROL = "continued"
FIGURES = tuple(Scores.__dataclass_fields__)


def check_peers(peers: Any, pairing: Any, settings: Settings) -> tuple[dict[str, Any], dict[str, Any]]:
    """The sections [peers] and [pairing] of a cell, looked at; what is wrong is said before anything is trained."""
    peers = plain_section(peers, "peers", KEYS)
    if peers.get("setting") not in SETTINGS:
        raise BadInput(f"found {excerpt(repr(peers.get('setting')))} as peers.setting; expected one of "
                       f"{', '.join(SETTINGS)}.")  # fmt: skip
    private = isinstance(settings.privacy, Sound)
    if private and peers["setting"] not in PRIVATE:
        raise BadInput(f"{peers['setting']} is not for private training: expected no [privacy].")
    if not private and peers["setting"].startswith("sound"):
        raise BadInput(f"{peers['setting']} needs private training: expected [privacy] with an epsilon.")
    if "split" in peers and len(peers["split"]) != 3:
        raise BadInput(f"found {excerpt(repr(peers['split']))} as peers.split; expected three shares.")
    if wrong := [name for name in peers.get("scorers", ()) if name not in SCORERS]:
        raise BadInput(f"found {excerpt(repr(wrong[0]))} in peers.scorers; expected some of {', '.join(SCORERS)}.")
    if not isinstance(pairing, Mapping):
        raise BadInput("[pairing] is a section with keys of its own.")
    pairing_of(peers["setting"], pairing, settings)
    return peers, {key: dict(value) if isinstance(value, Mapping) else value for key, value in pairing.items()}


def pairing_of(setting: str, given: Mapping[str, Any], settings: Settings) -> Pairing:
    """How peers learn from each other in a setting."""
    for key, section in (("mode", given), ("translator", given.get("ppat", {}))):
        if key in section:
            raise BadInput(f"{key} follows from peers.setting: leave it out.")
    ppat = checked_section(PPAT, given.get("ppat", {}), "pairing.ppat")
    ppat = replace(ppat, translator="procrustes" if setting.endswith("procrustes") else "ppat")
    plain = {key: value for key, value in given.items() if key != "ppat"}
    mode = "sound" if isinstance(settings.privacy, Sound) else "published"
    pairing: Pairing = checked_section(Pairing, {"mode": mode, **plain}, "pairing")
    return replace(pairing, ppat=ppat)


def peers_of(cell: Cell, graph: Graph | Parties) -> Parties:
    """The peers of a cell, by its seed."""
    wanted, parties = cell.peers, graph if isinstance(graph, Parties) else divide(graph, cell)
    if "names" in wanted:
        parties = some(parties, wanted["names"])
    if "split" in wanted:
        one, two, three = wanted["split"]
        parties = split_anew(parties, (one, two, three), seed=cell.settings.seed)
    return rename_relations(parties) if wanted.get("rename") else parties


def peers_cell(cell: Cell, graph: Graph | Parties, *, device: str | None = None, command: str = "") -> dict[str, Any]:
    """Run a cell; its line."""
    setting, base = cell.peers["setting"], cell.settings
    if device is not None:
        base = replace(base, training=replace(base.training, device=device))
    parties, pairing = peers_of(cell, graph), pairing_of(setting, cell.pairing, base)
    each, scorer = [base] * len(parties), cell.scorer
    if "scorers" in cell.peers:
        if len(cell.peers["scorers"]) != len(parties):
            raise BadInput(f"{cell.name}: {len(cell.peers['scorers'])} scorers for {len(parties)} peers.")
        each = [replace(base, scorer=SCORERS[name]()) for name in cell.peers["scorers"]]
        scorer = "+".join(cell.peers["scorers"])
    began, more = time.perf_counter(), {}
    if setting == "unified":
        if len(set(each)) > 1:
            raise BadInput(f"{cell.name}: one model of everything has one scorer.")
        scores = unified(parties, base, pairing=pairing)
    else:
        if setting == "independent":
            meeting = independent(parties, each, pairing)
        elif setting == CONTROL:
            meeting = continued(parties, each, pairing, [pairing.trainings] * len(parties))
        else:
            meeting = meet(parties, each, pairing)
        scores, more = meeting.scores(), _told(meeting, pairing)
    seconds = time.perf_counter() - began
    by_peer = []
    for name, found in zip(parties.names, scores, strict=True):
        if found is None:
            raise BadInput(f"{cell.name}: {name} has no validation or no test triples to be judged by.")
        by_peer.append({"peer": name} | {figure: round(value, 6) for figure, value in asdict(found).items()})
    metrics = {figure: round(statistics.fmean(peer[figure] for peer in by_peer), 6) for figure in FIGURES}
    made = line(cell, graph, base, parts=len(parties), metrics=metrics, seconds=seconds, command=command,
                peers=dict(cell.peers), pairing=dict(cell.pairing), partition=dict(cell.divided), by_peer=by_peer,
                control=control_of(cell, graph), **more)  # fmt: skip
    return made | {"scorer": scorer}


def control_of(cell: Cell, graph: Graph | Parties) -> str:
    """What a cell has in common with the one it is compared with: the peers, and how long each of them trains."""
    peers = {key: value for key, value in cell.peers.items() if key != "setting"}
    usual = asdict(Pairing())
    times = [cell.pairing.get(key, usual[key]) for key in ("trainings", "retrain", "validation", "criterion")]
    whole = [cell.fingerprint(graph, peers=False), peers, times]
    return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()[:16]


def _told(meeting: Meeting, pairing: Pairing) -> dict[str, Any]:
    """What came of trainings, what was sent, and what it costs. A simulation's epsilon is one too here."""
    course: dict[str, dict[str, int]] = {}
    validation = []
    for peer in meeting.peers:
        scores = [note for note in peer.history if "score" in note]
        for note in scores:
            counts = course.setdefault(note["what"], {"trainings": 0, "kept": 0})
            counts["trainings"] += 1
            counts["kept"] += note["kept"]
        first, best = scores[0]["score"], peer.learner.score
        validation.append({"first": first, "best": best})
    batches = [record.size for record in meeting.transcript.records if record.kind in ("generated", "gradient")]
    claims = meeting.statement()
    found: dict[str, Any] = {
        "course": course,
        "validation": validation if pairing.mode == "published" else None,  # under privacy they are noisy sums
        "bytes": sum(record.size for record in meeting.transcript.records),
        "batches": {"count": len(batches) // 2, "bytes": sum(batches)},
        "epsilon": None,
    }
    if pairing.mode == "published":
        return found | {"published_accounting": [claim["published accounting"] for claim in claims]}
    each = [claim["epsilon"] if claim["epsilon"] is not None else claim["simulated_epsilon"] for claim in claims]
    return found | {"epsilon": max(each), "delta": claims[0]["delta"], "simulated": claims[0]["epsilon"] is None}


# -- tables ------------------------------------------------------------------------------------------------------------


def summary(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Lines of one dataset, scorer and setting together: mean and deviation over seeds, and the gain over `continued`.

    A gain is the mean of differences to the control of the same seed; without a control of every seed there is none.
    """
    controls = {row["control"]: row["metrics"] for row in rows if row["peers"]["setting"] == CONTROL}
    found = []
    for own in of_each_setting(rows):
        figures = {name: spread([row["metrics"][name] for row in own]) for name in FIGURES}
        gains = None
        if all(row["control"] in controls for row in own) and own[0]["peers"]["setting"] != CONTROL:
            gains = {name: spread([row["metrics"][name] - controls[row["control"]][name] for row in own])
                     for name in FIGURES}  # fmt: skip
        about = {name: own[0][name] for name in ("table", "dataset", "parts", "scorer", "setting")}
        found.append(about | {"seeds": len(own), "metrics": figures, "gain": gains})
    return found
