"""What peers leave on disk: the folder of one that meets others over a network, and of a meeting in one process.

    config.json            settings, pairing, who meets, by what they are aligned
    environment.json       versions, device, the graph's fingerprint
    shareable/             privacy.json: what is guaranteed; model, if that is private
    private/               (0700) graph, model.safetensors: the rows that are kept, metrics.json
      journal.jsonl        all that was used up, on the disk before anybody hears what it was used for
      aligned.safetensors  what this peer has in common with whom
      history.jsonl        what it did, and what came of it
      transcript.jsonl     every message that it sent or received; messages/: what these held, if that is kept

A peer that is killed loses what it was just doing, and nothing else: rows that were kept are there, and what was paid
for stays paid.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tacit import __version__
from tacit.errors import BadInput, Problem, TacitError, excerpt
from tacit.federation.messages import Message
from tacit.folders import PRIVATE, new_folder, read_json, seal, sync_folder, write_json
from tacit.graph import Graph
from tacit.models import Tables
from tacit.models.model import Model
from tacit.parties import Parties
from tacit.peers.alignment import Aligned, Alignment, thinned
from tacit.peers.learner import Learner, Pairing, vector_widths
from tacit.peers.meeting import Meeting, scored, statement
from tacit.peers.peer import Peer
from tacit.peers.ppat import PPAT
from tacit.privacy.events import Segment, less
from tacit.privacy.privatizers import Sound
from tacit.privacy.schedule import unrestricted
from tacit.run import CONFIG, SHAREABLE, Run, environment, no_claim
from tacit.settings import Settings, checked_section
from tacit.tensors import load_graph, load_tensors, save_graph, save_tensors

SCHEMA, MEETING = "tacit.peer/1", "tacit.meeting/1"
MODEL = "model.safetensors"
How = Literal["private", "links"]


class Lines:
    """A file that grows by lines of JSON. A last line that was cut off was none yet, and goes."""

    def __init__(self, path: Path):
        self.path, new = path, not path.exists()
        with open(path, "ab") as file:
            file.truncate(path.read_bytes().rfind(b"\n") + 1)
        if new:
            sync_folder(path.parent)

    def add(self, line: Mapping[str, Any], *, sync: bool = True) -> None:
        """A line more; with `sync`, on the disk before this returns."""
        with open(self.path, "ab") as file:
            file.write(json.dumps(line, sort_keys=True).encode() + b"\n")
            file.flush()
            if sync:
                os.fsync(file.fileno())

    def read(self) -> list[dict[str, Any]]:
        found = []
        for number, line in enumerate(self.path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
            try:
                values = json.loads(line)
            except (ValueError, RecursionError):
                values = None
            if not isinstance(values, dict):
                raise BadInput(f"{self.path}: is damaged.", [Problem(str(self.path), number, excerpt(line), "JSON")])
            found.append(values)
        return found


class Journal:
    """What a peer has used up, and the rows that it keeps: in a folder, before anybody hears of it.

    `note` comes after everything that the peer does, and before what it says is sent and what it wants is begun. Lines
    hold what has changed: the counts of `Peer.counts`.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._lines, self._history = Lines(folder / "journal.jsonl"), Lines(folder / "history.jsonl")
        self.counts: Counter[str] = Counter()
        for number, line in enumerate(self._lines.read(), 1):
            if any(type(value) is not int for value in line.values()):
                problem = Problem(str(self._lines.path), number, excerpt(json.dumps(line)), "whole numbers by name")
                raise BadInput(f"{self._lines.path}: is damaged.", [problem])
            self.counts.update({name: value - self.counts[name] for name, value in line.items()})
        self._told = 0
        self._kept: Tables | None = None

    @property
    def begun(self) -> bool:
        """Whether a peer has done anything here."""
        return bool(self.counts["started"])

    def next_life(self, at_least: int) -> int:
        """A number for this process that is above those of all before it."""
        life = max(self.counts["life"] + 1, at_least)
        self._write({"life": life})
        return life

    def start(self, peer: Peer, now: float) -> list[Message]:
        """Let a new peer begin, or go on where an earlier process ended."""
        if not self.begun:
            return peer.begin()
        tables = score = None
        if (self.folder / MODEL).is_file():
            tensors, facts = load_tensors(self.folder / MODEL)
            tables, score = Tables.of(tensors), json.loads(facts["score"])
        peer.learner.restore(self.counts, tables, score)
        self._kept = peer.learner.best
        return peer.resume(self.counts, now)

    def note(self, peer: Peer) -> None:
        """Write down what has changed; on the disk when this returns."""
        learner = peer.learner
        if learner.best is not None and learner.best is not self._kept:
            facts = {"schema": "tacit.peer-model/1", "score": json.dumps(learner.score)}
            save_tensors(self.folder / MODEL, learner.best.tensors(), facts)
            self._kept = learner.best
        if changed := {name: value for name, value in peer.counts().items() if value != self.counts[name]}:
            self._write(changed)
        for note in peer.history[self._told :]:
            self._history.add(note, sync=False)
        self._told = len(peer.history)

    def _write(self, changed: Mapping[str, int]) -> None:
        self._lines.add(changed)
        for name, value in changed.items():
            self.counts[name] = value


@dataclass(frozen=True)
class Plan:
    """What a meeting over a network is: its name, who meets in which order, and how this peer trains and pairs."""

    meeting: str
    peers: tuple[str, ...]
    settings: Settings
    pairing: Pairing
    alignment: How = "private"

    def __post_init__(self) -> None:
        if len(self.peers) < 2 or len(set(self.peers)) < len(self.peers):
            raise TacitError("a meeting is of two peers or more, each named once")

    def json(self) -> dict[str, Any]:
        return {"meeting": self.meeting, "peers": list(self.peers), "settings": self.settings.json(),
                "pairing": asdict(self.pairing), "alignment": self.alignment}  # fmt: skip

    def terms(self) -> dict[str, Any]:
        """What all have to agree on."""
        pairing = self.pairing
        return {"peers": list(self.peers), "alignment": self.alignment, "share": pairing.share, "parts": pairing.parts,
                "epochs": pairing.ppat.passes, "batch": pairing.ppat.batch}  # fmt: skip


def pairing_of(values: Any) -> Pairing:
    """What [pairing] in a TOML file says; [pairing.ppat]: how rows are translated."""
    if not isinstance(values, Mapping):
        raise BadInput(f"found {excerpt(repr(values))} as pairing; expected a section with keys of its own.")
    given = dict(values)
    given["ppat"] = checked_section(PPAT, given.get("ppat", {}), "pairing.ppat")
    made = checked_section(Pairing, given, "pairing")
    assert isinstance(made, Pairing)
    return made


def public_triples(graph: Graph, pairing: Pairing) -> np.ndarray | None:
    """The training triples that are not marked confidential, where neighbours are taken from these."""
    if pairing.virtual != "public":
        return None
    if graph.train.confidential is None:
        raise TacitError('virtual = "public" needs marks of what is confidential: tacit data mark')
    found: np.ndarray = unrestricted(graph.train)
    return found


class PeerRun:
    """The folder of one peer: what it goes on with, and what it leaves. See the module's page."""

    def __init__(self, path: Path, plan: Plan, name: str, graph: Graph, budget: str | None):
        self.path, self.plan, self.name, self.graph, self.budget = path, plan, name, graph, budget
        self.aligned: dict[str, Aligned] = {}
        """By peer: all that both have."""
        self.used: dict[str, Aligned] = {}
        """By peer: what of it is used; see `use`."""
        self.began: list[str] | None = None
        """Whom it had something in common with when it began: what votes may cost was fixed then."""
        self._solved: tuple[Settings, Pairing] | None = None
        """The same settings with all noise known, which takes a while to find."""

    @property
    def number(self) -> int:
        return self.plan.peers.index(self.name)

    @property
    def private(self) -> Path:
        return self.path / PRIVATE

    @staticmethod
    def create(path: Path, plan: Plan, name: str, graph: Graph, *, budget: str | None = None) -> PeerRun:
        """A folder that is ready to meet: whole, or not there."""
        run = PeerRun(path, plan, name, graph, budget)
        run.fill()
        return run

    def fill(self) -> None:
        """Make the folder."""
        settings, pairing = self.check()
        with new_folder(self.path, CONFIG) as folder:
            (folder / PRIVATE).mkdir(mode=0o700)
            (folder / SHAREABLE).mkdir()
            save_graph(folder / PRIVATE / "graph.safetensors", self.graph)
            write_json(folder / "environment.json", "tacit.environment/1", environment(self.graph))
            about: dict[str, Any] = {"name": self.name, "budget": self.budget, "tacit": __version__}
            about["solved"] = {"settings": settings.json(), "pairing": asdict(pairing)}
            seal(folder, CONFIG, SCHEMA, self.plan.json() | about)

    def check(self) -> tuple[Settings, Pairing]:
        """Refuse what could not meet anybody, as far as that can be said before; the settings with all noise known."""
        if self._solved is not None:
            return self._solved
        if self.name not in self.plan.peers:
            raise TacitError(f"{self.name} is none of the peers: {', '.join(self.plan.peers)}")
        if self.budget is not None:
            _check_budget(self.plan, self.budget)
        other = next(name for name in self.plan.peers if name != self.name)
        one = self.learner({other: Aligned(np.zeros(1, np.int32), np.zeros(0, np.int32))})  # as if one name were shared
        looks = one.look_sigma if one.validation == "paid" else self.plan.pairing.look_sigma
        self._solved = one.settings, replace(self.plan.pairing, look_sigma=looks)
        return self._solved

    @staticmethod
    def open(path: Path) -> PeerRun:
        """The peer in a folder."""
        if not (path / CONFIG).is_file():
            raise BadInput(f"{path}: is no peer's folder: it has no {CONFIG}.")
        kinds = {"meeting": str, "peers": list, "settings": dict, "pairing": dict, "alignment": str, "name": str,
                 "solved": dict}  # fmt: skip
        found = read_json(path / CONFIG, SCHEMA, kinds)
        plan = Plan(found["meeting"], tuple(found["peers"]), Settings.make(found["settings"]),
                    pairing_of(found["pairing"]), found["alignment"])  # fmt: skip
        graph = load_graph(path / PRIVATE / "graph.safetensors")
        run = PeerRun(path, plan, found["name"], graph, found.get("budget"))
        solved = found["solved"]
        run._solved = Settings.make(solved["settings"]), pairing_of(solved["pairing"])
        if run._aligned_file.is_file():
            tensors, facts = load_tensors(run._aligned_file)
            run.began = json.loads(facts["began"])
            for name in plan.peers:
                for kept, before in ((run.aligned, "all"), (run.used, "used")):
                    if f"{before}.{name}.entity" in tensors:
                        parts = (tensors[f"{before}.{name}.{part}"].numpy() for part in ("entity", "relation"))
                        kept[name] = Aligned(*parts)
        return run

    # -- what it has in common with others -----------------------------------------------------------------------------

    @property
    def _aligned_file(self) -> Path:
        return self.private / "aligned.safetensors"

    def save_aligned(self) -> None:
        tensors = {
            f"{before}.{name}.{part}": getattr(aligned, part)
            for before, kept in (("all", self.aligned), ("used", self.used))
            for name, aligned in kept.items()
            for part in ("entity", "relation")
        }
        facts = {"schema": "tacit.aligned/1", "began": json.dumps(self.began)}
        save_tensors(self._aligned_file, tensors, facts)

    def use(self, other: str, vectors: bool) -> None:
        """Choose the share that is used of what both have; vectors: whether the other's relations are vectors."""
        one, number = self.number, self.plan.peers.index(other)
        seed = int.from_bytes(self.plan.meeting.encode()[:7].ljust(7, b"\0"), "big")
        whole: Alignment = {one: {number: self.aligned[other]}}
        some = thinned(whole, self.plan.pairing.share, self.plan.pairing.parts, seed)[one].get(number)
        if some is None:
            some = Aligned(np.zeros(0, np.int32), np.zeros(0, np.int32))
        own = vector_widths(self.plan.settings.scorer, self.plan.settings.dim)[1] is not None
        self.used[other] = some if own and vectors else replace(some, relation=some.relation[:0])
        self.save_aligned()

    def learner(self, used: Mapping[str, Aligned]) -> Learner:
        """What trains, with these in common."""
        plan = self.plan
        by_number = {plan.peers.index(name): aligned for name, aligned in used.items() if len(aligned)}
        public = public_triples(self.graph, plan.pairing)
        settings, pairing = self._solved or (plan.settings, plan.pairing)
        return Learner(self.number, self.graph, settings, by_number, pairing, public)

    # -- what it costs, and what comes of it ---------------------------------------------------------------------------

    def pay(self, learner: Learner) -> None:
        """Before anything leaves: take from the holding all that this meeting may ever cost, beyond what was taken.

        Training and validation triples are different ones: the larger cost is the cost of both. Killed in between, a
        peer has paid and not begun, and pays again: never the other way round.
        """
        if self.budget is None:
            return
        from tacit.privacy.budget import Holding, cost

        holding, where = Holding.load(self.budget), self.private / "budget.json"
        quotes = list(read_json(where, "tacit.quotes/1", {"quotes": list})["quotes"]) if where.is_file() else []
        for quote in quotes:
            holding.check_quote(quote["number"], quote["head"])
        had = [Segment.of(each) for quote in quotes for each in quote["segments"]]
        most = max(learner.spent(reserved=True).values(), key=lambda each: cost(holding.order, each))
        if more := less(most, had):
            made = holding.reserve(
                more, run=self.plan.settings.name, why="peers", party=self.name, graph=learner.protected
            )
            quotes.append({"name": self.budget, "number": made.number, "head": made.head,
                           "segments": [segment.json() for segment in more]})  # fmt: skip
            write_json(where, "tacit.quotes/1", {"quotes": quotes})

    def state(self, learner: Learner) -> dict[str, Any]:
        """Say what is guaranteed: fixed before anything leaves."""
        said = statement(learner, self.budget)
        write_json(self.path / SHAREABLE / "privacy.json", "tacit.privacy/1", said)
        return said

    def finish(self, learner: Learner) -> dict[str, Any]:
        """The meeting has ended: what the kept rows are worth, what is guaranteed, and rows for others if it is."""
        found = scored(learner.model(), self.graph, learner.settings) if learner.best is not None else None
        scores = None if found is None else asdict(found)
        write_json(self.private / "metrics.json", "tacit.peer-metrics/1", {"test": scores, "valid": learner.score})
        said = self.state(learner)
        share_rows(self.path / SHAREABLE, learner, said)
        return {"out": str(self.path), "test": scores, "trained": learner.trained, "statement": said}

    def run(self) -> Run:
        """The kept rows as a run in memory, to be asked and exported."""
        where = self.private / MODEL
        if not where.is_file():
            raise TacitError(f"{self.path} has no rows yet: go on with tacit peer start --resume {self.path}")
        tensors, _ = load_tensors(where)
        claim = read_json(self.path / SHAREABLE / "privacy.json", "tacit.privacy/1", {"guarantee": str})
        model = Model(self.plan.settings.scorer, Tables.of(tensors))
        return Run.of_model(self.plan.settings, self.graph, model, {}, claim_of_rows(claim, self.plan.settings))


def share_rows(folder: Path, learner: Learner, said: Mapping[str, Any]) -> None:
    """Rows for others, if these were trained privately and the guarantee holds; else none."""
    where = folder / MODEL
    if said["epsilon"] is None or not learner.private_rows or learner.best is None:
        where.unlink(missing_ok=True)
        return
    names = {"entities": "\n".join(learner.graph.entities), "relations": "\n".join(learner.graph.relations)}
    save_tensors(where, learner.best.tensors(), {"schema": "tacit.shared/1"} | names)


def claim_of_rows(claim: dict[str, Any], settings: Settings) -> dict[str, Any]:
    """What is guaranteed of a peer's own rows: of a host that votes its votes are private, and its rows are not."""
    return claim if isinstance(settings.privacy, Sound) or claim["epsilon"] is None else no_claim(settings)


def _check_budget(plan: Plan, budget: str) -> None:
    from tacit.privacy.budget import Holding, check_payable

    if plan.pairing.mode != "sound":
        raise TacitError("a holding pays for what is guaranteed, and published mode guarantees nothing: leave out the "
                         "budget, or the mode")  # fmt: skip
    if plan.pairing.noise == "seeded":
        raise TacitError("a simulation costs nothing and protects nothing: leave out the budget, or pairing.noise")
    check_payable(plan.settings.privacy)
    Holding.load(budget)


# -- meetings in one process -------------------------------------------------------------------------------------------


def keep_meeting(
    path: Path,
    parties: Parties,
    settings: Settings,
    pairing: Pairing,
    run: Callable[[], Meeting],
    *,
    alignment: How,
    force: bool = False,
) -> dict[str, Any]:
    """Let parties meet in one process, and write what came of it into a folder; it appears whole or not at all."""
    with new_folder(path, CONFIG, force=force) as folder:
        private = folder / PRIVATE
        private.mkdir(mode=0o700)
        (folder / SHAREABLE).mkdir()
        meeting = run()
        scores = [None if each is None else asdict(each) for each in meeting.scores()]
        traffic = [meeting.transcript.traffic(number) for number in range(len(parties))]
        found: Sequence[Any] = meeting.statement()
        history = Lines(private / "history.jsonl")
        for note in meeting.history:
            history.add(note, sync=False)
        claims = {}
        for name, peer, claim in zip(parties.names, meeting.peers, found, strict=True):
            (private / name).mkdir()
            (folder / SHAREABLE / name).mkdir()
            save_graph(private / name / "graph.safetensors", peer.learner.graph)
            facts = {"schema": "tacit.peer-model/1", "score": json.dumps(peer.learner.score)}
            save_tensors(private / name / MODEL, peer.learner.kept.tensors(), facts)
            share_rows(folder / SHAREABLE / name, peer.learner, claim)
            claims[name] = claim
        results = {"time": meeting.now, "test": dict(zip(parties.names, scores, strict=True)),
                   "bytes": dict(zip(parties.names, traffic, strict=True))}  # fmt: skip
        write_json(private / "metrics.json", "tacit.meeting-metrics/1", results)
        write_json(folder / SHAREABLE / "privacy.json", "tacit.meeting-privacy/1", {"peers": claims})
        about = {"settings": settings.json(), "pairing": asdict(pairing), "alignment": alignment}
        seal(folder, CONFIG, MEETING, about | {"peers": list(parties.names), "tacit": __version__})
    return {"out": str(path), "statement": claims} | results


def met_run(path: Path, party: str | None) -> Run:
    """The rows that one party of a meeting kept, as a run in memory."""
    found = read_json(path / CONFIG, MEETING, {"peers": list, "settings": dict})
    if party not in found["peers"]:
        raise TacitError(f"{path} is a meeting: say whose model is meant, by --party ({', '.join(found['peers'])}).")
    where, settings = path / PRIVATE / str(party), Settings.make(found["settings"])
    tensors, _ = load_tensors(where / MODEL)
    claims = read_json(path / SHAREABLE / "privacy.json", "tacit.meeting-privacy/1", {"peers": dict})["peers"]
    graph = load_graph(where / "graph.safetensors")
    claim = claim_of_rows(claims[party], settings)
    return Run.of_model(settings, graph, Model(settings.scorer, Tables.of(tensors)), {}, claim)
