"""What a report tells of a run: from its `shareable/` alone, or, for its owners, from all of its folder.

`Shared` needs nothing but what the owner may hand out, so a folder that came from somebody else is enough. `Inside` is
what was measured with the triples at hand: scores, losses, attacks, audits. It is read only if it is asked for.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tacit.datasets import BENCHMARKS
from tacit.errors import BadInput, Problem, TacitError, excerpt
from tacit.evaluation.ranking import Metrics, rank, weighted
from tacit.federated import FederatedRun, opened
from tacit.federation.messages import SERVER
from tacit.folders import PRIVATE, read_json
from tacit.graph import Graph
from tacit.models import SCORERS
from tacit.models.model import Model
from tacit.privacy.privatizers import Marginals
from tacit.run import SHAREABLE, Run
from tacit.settings import Settings
from tacit.tensors import load_tensors

MOST_POINTS = 1500
"""Of a map: more are not told apart, and make the page heavy."""
MOST_GROUPS = 6


@dataclass(frozen=True)
class Traffic:
    """What crossed the border of each party, by the messages' records."""

    messages: int = 0
    rounds: int = 0
    sent: tuple[int, ...] = ()
    received: tuple[int, ...] = ()
    kinds: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """What was sent to the server: messages and bytes of each kind."""

    @staticmethod
    def of(records: Iterable[Mapping[str, Any]]) -> Traffic:
        sent: dict[int, int] = {}
        received: dict[int, int] = {}
        kinds: dict[str, tuple[int, int]] = {}
        messages = rounds = 0
        for record in records:
            size, sender, receiver = record["size"], record["sender"], record["receiver"]
            sent[sender] = sent.get(sender, 0) + size
            received[receiver] = received.get(receiver, 0) + size
            messages += 1
            if receiver == SERVER:
                rounds = max(rounds, record["round"])
                kind = " ".join(part for part in (record.get("part"), record["kind"]) if part)
                many, whole = kinds.get(kind, (0, 0))
                kinds[kind] = (many + 1, whole + size)
        parties = range(max([*sent, *received], default=-1) + 1)
        return Traffic(
            messages, rounds, tuple(sent.get(p, 0) for p in parties), tuple(received.get(p, 0) for p in parties), kinds
        )


@dataclass(frozen=True)
class Cloud:
    """Entity rows on the plane of their two largest principal components."""

    places: np.ndarray
    group: np.ndarray
    groups: tuple[str, ...]
    shown: float
    """The share of the rows' variance that the plane has."""
    of: int
    """How many rows there are; `places` may be a sample."""
    whose: str | None = None


@dataclass(frozen=True)
class Inside:
    """What only the owners may see."""

    recipe: str | None
    parties: tuple[str, ...]
    settings: Settings
    config: Mapping[str, Any]
    environment: Mapping[str, Any]
    metrics: Mapping[str, Metrics]
    by_party: Mapping[str, Metrics]
    """On the test triples."""
    course: tuple[tuple[int, float], ...]
    """Validation MRR by round, or epoch."""
    by_relation: tuple[tuple[str, Metrics], ...]
    attacks: tuple[Mapping[str, Any], ...]
    found: Mapping[str, Any]
    """By other attacks: reconstruction, critical, neighbours."""
    audit: Mapping[str, Any] | None
    cloud: Cloud | None
    same: tuple[str, ...]
    """The fingerprints of the graphs: runs that have the same can be compared."""
    published: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True)
class Facts:
    """Of one run."""

    name: str
    privacy: Mapping[str, Any]
    traffic: Traffic
    cloud: Cloud | None
    inside: Inside | None = None
    model: bool = False
    """Whether there is one that may be handed out."""

    @property
    def epsilon(self) -> float | None:
        found = self.privacy["epsilon"]
        return None if found is None else float(found)

    @property
    def recipe(self) -> str | None:
        return self.inside.recipe if self.inside is not None else self.privacy.get("recipe")

    def party(self, number: int) -> str:
        """The name of a party, or its number where names are not shared."""
        return self.inside.parties[number] if self.inside is not None else f"party {number + 1}"


def gather(runs: Sequence[str | Path | Run | FederatedRun], *, internal: bool) -> list[Facts]:
    """The facts of each run, in order; runs of one name are numbered."""
    if not runs:
        raise TacitError("there is nothing to report: name one run, or several.")
    found = [_of(run, internal) for run in runs]
    names = [facts.name for facts in found]
    many = {name: names.count(name) for name in names}
    seen: dict[str, int] = {}
    for place, facts in enumerate(found):
        if many[facts.name] > 1:
            seen[facts.name] = seen.get(facts.name, 0) + 1
            found[place] = replace(facts, name=f"{facts.name} ({seen[facts.name]})")
    return found


def _of(run: str | Path | Run | FederatedRun, internal: bool) -> Facts:
    if isinstance(run, Run | FederatedRun):
        if run.path is None:
            return _in_memory(run, internal)
        run = run.path
    path = Path(run)
    facts = _shared(path)
    if not internal:
        return facts
    return replace(facts, inside=_inside(opened(path)))


def _shared(path: Path) -> Facts:
    """What stands in shareable/, and nothing else. That folder alone will do."""
    folder = path if (path / "privacy.json").is_file() else path / SHAREABLE
    if not (folder / "privacy.json").is_file():
        raise BadInput(f"{path}: is no run: it has no {SHAREABLE}/privacy.json.")
    privacy = read_json(folder / "privacy.json", "tacit.privacy/1", {"guarantee": str})
    if "epsilon" not in privacy:
        raise BadInput(f"{folder / 'privacy.json'}: says nothing of epsilon: the file is damaged.")
    name = path.resolve().parent.name if folder == path and path.resolve().name == SHAREABLE else path.resolve().name
    journal, model = folder / "transcript.jsonl", folder / "model.safetensors"
    traffic = Traffic.of(_lines(journal)) if journal.is_file() else Traffic()
    cloud = None
    if model.is_file():
        tensors, _ = load_tensors(model)
        if "entity" in tensors and "prior.tails" not in tensors:  # beside noisy counts rows may mean nothing
            cloud = _cloud(tensors["entity"])
    return Facts(name, privacy, traffic, cloud, model=model.is_file())


def _lines(path: Path) -> Iterable[Mapping[str, Any]]:
    wanted = ("size", "sender", "receiver", "round")
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            record = json.loads(line)
            if not all(type(record[key]) is int for key in wanted) or not isinstance(record["kind"], str):
                raise ValueError
        except (ValueError, LookupError, TypeError):
            problem = Problem(str(path), number, excerpt(line), "the record of a message")
            raise BadInput(f"{path}: a line is no record of a message.", [problem]) from None
        yield record


def _in_memory(run: Run | FederatedRun, internal: bool) -> Facts:
    """Of a run that has no folder: what would stand in it."""
    records: Iterable[Mapping[str, Any]] = ()
    if isinstance(run, FederatedRun):
        records = (json.loads(line) for line in run.transcript.lines(hashes=False))
    name = run.recipe if isinstance(run, FederatedRun) else run.settings.name
    return Facts(name, run.claim, Traffic.of(records), None, _inside(run) if internal else None)


# -- for the owners ----------------------------------------------------------------------------------------------------


def _inside(run: Run | FederatedRun) -> Inside:
    federated = isinstance(run, FederatedRun)
    if not run.metrics:
        again = "federate" if federated else "train"
        raise TacitError(f"{run.path} is not finished: go on with tacit {again} --resume {run.path}")
    config = {} if run.path is None else json.loads((run.path / "config.json").read_text(encoding="utf-8"))
    where = None if run.path is None else run.path / "environment.json"
    environment = {} if where is None or not where.is_file() else json.loads(where.read_text(encoding="utf-8"))
    graphs = run.parties.graphs if isinstance(run, FederatedRun) else (run.graph,)
    models = [run.model(place) for place in range(len(graphs))] if isinstance(run, FederatedRun) else [run.model]
    names = run.parties.names if isinstance(run, FederatedRun) else ()
    tests = run.by_party["test"] if isinstance(run, FederatedRun) else ()
    attacks, found = _attacks(run.path)
    audit = None if run.path is None else run.path / PRIVATE / "audit.json"
    return Inside(
        recipe=run.recipe if isinstance(run, FederatedRun) else None,
        parties=tuple(names),
        settings=run.settings,
        config=config,
        environment=environment,
        metrics=run.metrics,
        by_party=dict(zip(names, tests, strict=True)),
        course=_course(run),
        by_relation=_by_relation(models, graphs, run.settings),
        attacks=tuple(attacks),
        found=found,
        audit=None if audit is None or not audit.is_file() else read_json(audit, "tacit.audit/1", {"status": str}),
        cloud=_cloud_of(models[0], graphs[0], run.settings, names[0] if names else None),
        same=tuple(graph.fingerprint for graph in graphs),
        published=tuple(_published(run)),
    )


def _course(run: Run | FederatedRun) -> tuple[tuple[int, float], ...]:
    if run.path is None:
        return ()
    events = [event for event in run.events() if event["event"] == "validation"]
    if isinstance(run, FederatedRun):
        return tuple((event["round"], event["mrr"]) for event in events if event["mrr"] is not None)
    return tuple((event["epoch"], event["mrr"][0]) for event in events if event["mrr"][0] is not None)


def _by_relation(
    models: Sequence[Model], graphs: Sequence[Graph], settings: Settings
) -> tuple[tuple[str, Metrics], ...]:
    """Of all parties' test triples, each among its own entities; the most frequent first."""
    wanted = settings.evaluation
    found: dict[str, list[Metrics]] = {}
    for model, graph in zip(models, graphs, strict=True):
        if len(graph.test):
            ranks = rank(
                model, graph.test.triples, graph.statements.triples, sides=wanted.sides, memory_mb=wanted.memory_mb
            )
            for relation, metrics in ranks.by_relation(wanted.ties).items():
                found.setdefault(graph.relations[relation], []).append(metrics)
    means = [(name, weighted(several)) for name, several in found.items()]
    return tuple(sorted(means, key=lambda item: (-item[1].count, item[0])))


def _attacks(path: Path | None) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """What was tried for membership, and what else was found."""
    tried: list[dict[str, Any]] = []
    found: dict[str, Any] = {}
    for file in sorted((path / PRIVATE / "attacks").glob("*.json")) if path is not None else ():
        about = read_json(file, "tacit.attack/1", {})
        if "ways" in about:
            tried.append(about)
        else:
            found[file.stem] = about.get("found", about)
    return tried, found


def _cloud(
    rows: torch.Tensor,
    group: np.ndarray | None = None,
    groups: Sequence[str] = (),
    whose: str | None = None,
) -> Cloud | None:
    """Of rows whose numbers are finite, at most so many, evenly taken."""
    if len(rows) < 3:
        return None
    values = rows.detach().cpu().double().reshape(len(rows), -1)
    values = values - values.mean(0)
    _, size, directions = torch.linalg.svd(values, full_matrices=False)
    whole = float((size**2).sum())
    if not np.isfinite(whole) or whole <= 0 or len(size) < 2:
        return None
    kept = np.unique(np.linspace(0, len(rows) - 1, min(len(rows), MOST_POINTS)).astype(int))
    places = (values @ directions[:2].T).numpy()[kept]
    marks = np.zeros(len(kept), int) if group is None else group[kept]
    return Cloud(places, marks, tuple(groups), float((size[:2] ** 2).sum()) / whole, len(rows), whose)


def _cloud_of(model: Model, graph: Graph, settings: Settings, whose: str | None) -> Cloud | None:
    """A party's map, coloured by what an entity mostly is: the head, or the tail, of a relation."""
    if isinstance(settings.privacy, Marginals) and not settings.privacy.vectors:
        return None  # the counts are the score, and rows mean nothing
    triples, relations = graph.train.triples.astype(np.int64), len(graph.relations)
    roles = np.zeros((len(graph.entities), 2 * relations), np.int64)
    np.add.at(roles, (triples[:, 0], triples[:, 1]), 1)
    np.add.at(roles, (triples[:, 2], relations + triples[:, 1]), 1)
    mostly = roles.argmax(1)
    sizes = np.bincount(mostly, minlength=2 * relations)
    often = [role for role in sizes.argsort(kind="stable")[::-1][:MOST_GROUPS].tolist() if sizes[role]]
    group = np.full(len(mostly), len(often))
    for place, role in enumerate(often):
        group[mostly == role] = place
    ends = [f"{'tail' if role >= relations else 'head'} of {graph.relations[role % relations]}" for role in often]
    return _cloud(model.tables.entity, group, [*ends, "others"], whose)


@cache
def published_figures() -> tuple[dict[str, Any], ...]:
    """What papers report, of the settings we can run: paper, dataset, recipe, scorer, parts, sides, mrr."""
    text = resources.files("tacit.reporting").joinpath("published.json").read_text(encoding="utf-8")
    return tuple(json.loads(text))


def _published(run: Run | FederatedRun) -> Iterable[Mapping[str, Any]]:
    """Figures of the same benchmark, recipe, scorer, number of parties and sides."""
    if isinstance(run, FederatedRun):
        whole, recipe, parts = run.parties.origin.get("source"), run.recipe, len(run.parties)
    else:
        whole, recipe, parts = run.graph.fingerprint, "train", 1
    known = {benchmark.fingerprint: name for name, benchmark in BENCHMARKS.items()}
    if whole is None or whole not in known or run.settings.privacy.sound:
        return ()
    scorer = next(name for name, kind in SCORERS.items() if type(run.settings.scorer) is kind)
    same = {"dataset": known[whole], "recipe": recipe, "scorer": scorer, "parts": parts}
    same["sides"] = run.settings.evaluation.sides
    return (figure for figure in published_figures() if all(figure[key] == value for key, value in same.items()))
