"""A federation and the folder it leaves behind: rounds, validation weighted over parties, early stopping, resuming.

    config.json          settings, recipe and federation, defaults written out; what belongs to the folder
    environment.json     versions, device, threads, each party's fingerprint
    shareable/           privacy.json: what was guaranteed, and who learns what; transcript.jsonl, once it is finished:
                         every message's kind, ends, size
    private/             (0700) parties/, metrics.jsonl, transcript.jsonl with hashes, metrics.json, model,
                         checkpoints/, payloads/, log

In one process one folder holds all parties, so all of it but `shareable/` is for whoever may see all of them: it is a
simulation. A real federation has a folder per party.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from tacit import __version__
from tacit.errors import BadInput, BadValue, TacitError
from tacit.evaluation.ranking import Metrics, weighted
from tacit.federation.aggregation import AGGREGATIONS, Aggregation, Part
from tacit.federation.keys import Identity, Roster, keys_in
from tacit.federation.messages import SERVER
from tacit.federation.secured import Secured
from tacit.federation.star import Star, sampled_number
from tacit.federation.transcript import GIVE, Adversary, Transcript, View, rounds
from tacit.folders import PRIVATE, new_folder, read_json, seal, write_json, write_whole
from tacit.graph import NO_GROUP, Graph, SplitName
from tacit.kept import Kept, locked
from tacit.models import Layout, Tables
from tacit.models.model import Model
from tacit.models.tables import Prior
from tacit.parties import Parties
from tacit.prediction import Prediction
from tacit.privacy.events import joined
from tacit.privacy.plan import again, releases, solved, statement
from tacit.privacy.privatizers import Published, Sound
from tacit.run import CONFIG, SHAREABLE, Run, described, ended, environment, no_claim, note, positions, protected
from tacit.settings import Settings, checked_section, combine, from_flags, parse_assignment, read_settings
from tacit.tensors import load_graph, load_tensors, save_graph, save_tensors
from tacit.training import Event, Fit, chosen_device, evaluated, listed

if TYPE_CHECKING:
    from tacit.recipes import Setup

LOG = logging.getLogger(__name__)
SCHEMA = "tacit.federation/1"
DEFAULTS: dict[str, Any] = {"evaluation": {"every": 5}}
"""What a federation has by default where a training of one party has something else: validation every 5 rounds."""


@dataclass(frozen=True)
class Federation:
    """How parties learn together.

    rounds: at most. local_epochs: epochs of each party in a round. fraction: the share of parties that train in one.
    optimizer_state: what becomes of moments when a party is given rows, "reset" as in FedE's code, or "keep".
    aggregation: mean, weighted, circular. values: float32, or float16 for half the bytes. changed_only: send only rows
    that changed. holders: how many parties hold the same triple at most, or have triples of the same group where groups
    are protected, which all have to know; what is private costs so many times. keep_every: keep the messages' content
    of every so many rounds, what is given after them, and each party's own rows, for attacks. keep_mb: at most so much.

    secure: the server sees sums alone. vocabulary: how names are agreed on, open or private; default: private if secure
    and training is not private, which is of names that all know. bound: the most names that a party may have, where
    they are private. threshold: how many parties have to stay to the end of a round; default: more than two thirds.
    min_contributors: rows that fewer have are not sent; default: so many that two owners are left however many drop
    out. range: the largest number that can be added up. agreement: rounds for which parties agree on keys at once.
    keys: a folder with roster.json and each party's NAME.key (see `tacit keys`); default: keys for this run alone.
    """

    rounds: int = 300
    local_epochs: int = 3
    fraction: float = 1.0
    optimizer_state: Literal["keep", "reset"] = "reset"
    aggregation: str = "mean"
    values: Literal["float32", "float16"] = "float32"
    changed_only: bool = False
    holders: int = 1
    keep_every: int | None = None
    keep_mb: int = 1024
    secure: bool = False
    vocabulary: Literal["open", "private"] | None = None
    bound: int | None = None
    threshold: int | None = None
    min_contributors: int | None = None
    range: float = 64.0
    agreement: int = 8
    keys: str | None = None

    def __post_init__(self) -> None:
        for name in ("rounds", "local_epochs", "holders", "keep_every", "keep_mb", "bound", "threshold", "agreement"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise BadValue(f"{name} is at least 1, not {value}")
        if not 0 < self.fraction <= 1:
            raise BadValue(f"fraction is above 0 and at most 1, not {self.fraction}")
        if self.aggregation not in AGGREGATIONS:
            raise BadValue(f"aggregation is {', '.join(AGGREGATIONS)}; not {self.aggregation!r}")
        if self.vocabulary == "private" and not self.secure:
            raise BadValue("names that the server does not know need sums that it does not see into: set secure = true")

    def hides_names(self, settings: Settings) -> bool:
        """Whether parties agree on names without showing them."""
        usual = "open" if settings.privacy.sound else "private"
        return self.secure and (self.vocabulary or usual) == "private"

    def how(
        self,
        names: Sequence[str],
        part: Part,
        identities: Mapping[int, Identity] | None = None,
        roster: Roster | None = None,
    ) -> Aggregation:
        """The aggregation these settings name, for these parties. `identities`: see `Secured.of`; default: `keys`."""
        plain = AGGREGATIONS[self.aggregation](self.values, self.changed_only)
        if not self.secure:
            return plain
        rounds = self.agreement if self.fraction == 1 else 1
        expected = sampled_number(len(names), self.fraction)
        if identities is None and self.keys is not None:
            found, roster = keys_in(Path(self.keys), names)
            identities = dict(enumerate(found))
        return Secured.of(plain, names, part, limit=self.range, least=self.min_contributors, threshold=self.threshold,
                          expected=expected, rounds=rounds, identities=identities, roster=roster)  # fmt: skip

    def transcript(self) -> Transcript:
        """An empty one that keeps what is asked for."""
        if self.keep_every is None:
            return Transcript()
        return Transcript(rounds(self.keep_every), self.keep_mb << 20)


LOCAL = ("name", "training.device", "training.kernel", "training.products", "evaluation.memory_mb", "federation.keys",
         "federation.keep_every", "federation.keep_mb")  # fmt: skip
"""Settings that are each one's own affair: the others' numbers do not depend on them, or by rounding alone."""


@dataclass(frozen=True)
class Plan:
    """What parties in processes of their own, and their coordinator, have to agree on before they begin."""

    recipe: str
    parties: tuple[str, ...]
    settings: Settings
    federation: Federation

    def __post_init__(self) -> None:
        from tacit.recipes import SHARED

        check_recipe(self.recipe)
        if self.recipe not in SHARED:
            raise TacitError(f"the recipe {self.recipe} has no coordinator: use {', '.join(SHARED)}")
        if isinstance(self.settings.privacy, Published):
            raise TacitError("a mechanism as published is for replication in one process (tacit federate): between "
                             "real parties use a sound one")  # fmt: skip
        if len(set(self.parties)) < len(self.parties) or len(self.parties) < 2:
            raise TacitError(
                f"a federation has two parties or more, each once; not {', '.join(self.parties) or 'none'}"
            )

    @property
    def names_are_private(self) -> bool:
        return self.federation.hides_names(self.settings)

    def check(self, graph: Graph, name: str) -> None:
        """Refuse a graph that cannot take part, before anything is said."""
        from tacit.recipes import Setup

        alone = replace(self.federation, secure=False, vocabulary=None)
        Setup(Parties((name,), (graph,)), self.settings, alone, Transcript()).check(self.recipe)
        if self.federation.vocabulary == "private" and self.settings.privacy.sound:
            raise TacitError('private training is of names that all know: set federation.vocabulary = "open"')

    def json(self) -> dict[str, Any]:
        """By name; without what is each one's own affair."""
        values = self.settings.json() | {"federation": asdict(self.federation)}
        for name in LOCAL:
            *sections, last = name.split(".")
            inner = values
            for section in sections:
                inner[section] = dict(inner[section])
                inner = inner[section]
            inner.pop(last, None)
        return {"recipe": self.recipe, "parties": list(self.parties), "settings": values}

    def differences(self, other: Any) -> list[str]:
        """Where another's `json` is not this one's, in words."""
        mine, theirs = _flat(json.loads(json.dumps(self.json()))), _flat(other)
        return [
            f"{name} is {json.dumps(theirs.get(name))} there, and {json.dumps(mine.get(name))} here"
            for name in sorted(mine.keys() | theirs.keys())
            if mine.get(name) != theirs.get(name)
        ]


def read_plan(path: Path, assignments: Sequence[str] = ()) -> Plan:
    """A plan as it stands in a TOML file: recipe, parties in their order, and settings; `assignments` change it."""
    written = read_settings(path)
    names, recipe = written.pop("parties", None), written.pop("recipe", "fede")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise TacitError(f'{path}: say who takes part, in order: parties = ["a", "b", "c"]')
    layers = [{"name": str(recipe)}, written, *(parse_assignment(text) for text in assignments)]
    settings, federation = split_settings(combine(*layers))
    try:
        return Plan(str(recipe), tuple(names), settings, federation)
    except TacitError as error:
        raise BadInput(f"{path}: {error}") from None


def _flat(values: Any, place: str = "") -> dict[str, Any]:
    if not isinstance(values, dict):
        return {place: values}
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= _flat(value, f"{place}.{name}" if place else str(name))
    return found


@dataclass
class Patience:
    """When to stop: the best validation so far, and how many have not been better since."""

    most: int
    waited: int = 0
    best_round: int = 0
    best_mrr: float = -np.inf

    def judge(self, whole: Metrics, number: int, private: bool) -> bool:
        """Whether a round is the best; of private training the last always is, for which one was best would tell."""
        if not private and whole.count and not whole.mrr > self.best_mrr:
            self.waited += 1
            return False
        self.waited, self.best_round = 0, number
        self.best_mrr = whole.mrr if whole.count else -np.inf
        return True

    @property
    def ended(self) -> bool:
        return self.waited >= self.most

    def state(self) -> dict[str, Any]:
        return {"patience": torch.tensor([self.waited, self.best_round]),
                "patience.mrr": torch.tensor([self.best_mrr], dtype=torch.float64)}  # fmt: skip

    def load(self, state: Mapping[str, Any]) -> None:
        self.waited, self.best_round = (int(value) for value in state["patience"])
        self.best_mrr = float(state["patience.mrr"])


class Together:
    """Parties that train round by round, with a star between them or with nothing.

    With a star, all stop at once: when the mean of the parties' validation MRR, weighted by their triples, has not
    improved. Without, each stops by itself. What is kept is the best.
    """

    def __init__(self, fit: Fit, wanted: Federation, star: Star | None = None):
        self.fit, self.wanted, self.star = fit, wanted, star
        self.patience = Patience(fit.settings.evaluation.patience)
        self.rounds, self.finished = 0, False
        fit.total_epochs = wanted.rounds * wanted.local_epochs

    def run(self, on_event: Callable[[Event], None], checkpoint: Callable[[], None] | None = None) -> None:
        """Rounds until there are enough of them, or validation has not improved for long enough."""
        fit, evaluation = self.fit, self.fit.settings.evaluation
        on_event({"event": "kernels", "name": fit.kernel_name, "seconds": None})
        on_event({"event": "kernels", "name": fit.kernel_name, "seconds": fit.prepare()})
        while not self.finished:
            began = time.perf_counter()
            about = self._round()
            self.rounds += 1
            seconds = round(time.perf_counter() - began, 4)
            on_event({"event": "round", "round": self.rounds} | about | fit.by_the_paper() | {"seconds": seconds})
            last = self.rounds >= self.wanted.rounds or bool(fit.spent().all())
            if due := self.rounds % evaluation.every == 0 or last:
                fit.check_rows()
                began = time.perf_counter()
                found = self._validate()
                seconds = round(time.perf_counter() - began, 4)
                on_event({"event": "validation", "round": self.rounds} | found | {"seconds": seconds})
            self.finished |= last
            # A secure round that is made again would be of the same rows: with other parties, sums could be subtracted.
            if checkpoint is not None and (due or self.finished or self.wanted.secure):
                checkpoint()

    def _round(self) -> dict[str, Any]:
        if self.star is not None:
            report = self.star.round()
            about = {"trained": list(report.trained), "loss": listed(report.loss), "steps": report.steps,
                     "examples": report.examples, "given": report.given, "sent": report.sent}  # fmt: skip
            secure = {"beyond": report.beyond, "absent": list(report.absent)} if self.wanted.secure else {}
            return about | secure
        active = ~self.fit.finished
        reports = [self.fit.epoch(active) for _ in range(self.wanted.local_epochs)]
        loss = np.mean([report.loss for report in reports], axis=0)
        return {"trained": np.flatnonzero(active).tolist(), "loss": listed(loss), "given": 0, "sent": 0,
                "steps": sum(r.steps for r in reports), "examples": sum(r.examples for r in reports)}  # fmt: skip

    def _validate(self) -> dict[str, Any]:
        fit, given = self.fit, 0
        if self.star is None:
            found = fit.validate()
            self.finished = bool(fit.finished.all())
            fit.best_epoch[:] = np.where(fit.waited == 0, self.rounds, fit.best_epoch)
            # Who has stopped counts with what is kept of it.
            now = np.array([m.mrr if m.count else best for m, best in zip(found, fit.best_mrr, strict=True)])
            many = np.array([len(graph.valid) for graph in fit.graphs])
            mean = float(np.average(now[many > 0], weights=many[many > 0])) if many.any() else np.nan
            return {"mrr": listed([mean])[0], "parties": listed(now), "best": listed(fit.best_mrr),
                    "best_round": fit.best_epoch.tolist(), "given": 0}  # fmt: skip
        given = self.star.give(range(len(fit.graphs)))
        found = fit.evaluate("valid", best=False)
        for party, metrics in enumerate(found):
            fit.heard(party, metrics)
        whole = weighted(found)
        if self.patience.judge(whole, self.rounds, fit.private is not None):
            for name, tensor in fit.best.tensors().items():
                tensor.copy_(fit.cohort.tables.tensors()[name])
        self.finished = self.patience.ended
        return {"mrr": listed([whole.mrr])[0], "hits10": listed([whole.hits10])[0],
                "parties": listed([m.mrr for m in found]), "best": listed([self.patience.best_mrr])[0],
                "best_round": self.best_round, "given": given}  # fmt: skip

    @property
    def best_round(self) -> int:
        return self.patience.best_round

    def state(self) -> dict[str, Any]:
        """Everything a resumed federation needs, but for the transcript."""
        kept = {"together": torch.tensor([self.rounds, int(self.finished)])} | self.patience.state()
        return self.fit.state() | kept | ({} if self.star is None else self.star.state())

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a `state`."""
        self.fit.load(state)
        self.rounds, self.finished = int(state["together"][0]), bool(state["together"][1])
        self.patience.load(state)
        if self.star is not None:
            self.star.load(state)


class FederatedRun:
    """A federation, finished or not. Kept in memory, or in a folder.

    Attributes
    ----------
    metrics
        By split: the mean over parties, weighted by their questions.
    by_party
        By split: each party's own, among its own entities.
    """

    def __init__(
        self, recipe: str, parties: Parties, settings: Settings, federation: Federation, path: Path | None = None
    ):
        self.recipe, self.parties, self.settings, self.federation = recipe, parties, settings, federation
        self.path = path
        self.metrics: dict[str, Metrics] = {}
        self.by_party: dict[str, list[Metrics]] = {}
        self.best_round: int | list[int] = 0
        self._tables: Tables | None = None
        self._transcript: Transcript | None = None
        self._made: Setup | None = None

    def __repr__(self) -> str:
        return f"FederatedRun({self.recipe}, {len(self.parties)} parties, {described(self.settings, self.metrics)})"

    @property
    def transcript(self) -> Transcript:
        """Every message; of a finished run in a folder, read when it is asked for."""
        if self._transcript is None:
            self._transcript = self.federation.transcript()
            if self.finished:
                assert self.path is not None
                self._transcript.load(self._journal, self.path / PRIVATE / "payloads")
        return self._transcript

    @property
    def _journal(self) -> Path:
        assert self.path is not None
        return self.path / PRIVATE / "transcript.jsonl"

    # -- training ------------------------------------------------------------------------------------------------------

    def train(self, on_event: Callable[[Event], None] = lambda event: None) -> FederatedRun:
        """From the beginning or from the last checkpoint, to the end; then rank validation and test by the best."""
        from tacit.recipes import RECIPES

        if self.finished or self._tables is not None:
            raise TacitError(ended(self.path))
        self._transcript = None
        setup = self._setup()
        started = False
        with locked(self.path) if self.path is not None else contextlib.nullcontext():
            if setup.releases_counts:
                if self.path is not None and not setup.has_counts:
                    self._note("start", 0)
                    started = True
                setup.prior(self.recipe)
            if isinstance(self.settings.privacy, Sound) and not self.settings.privacy.trains:
                return self.end_with(setup.zero_tables(self.recipe), 0)
        together = RECIPES[self.recipe](setup)
        if self.path is None:
            together.run(on_event)
            return self._end(together)
        begun, written = len(self.transcript.records), 0

        def resumed() -> None:
            """The agreement on names is done again, and is in the transcript already if there is a checkpoint."""
            nonlocal written
            assert self.path is not None
            if together.rounds:
                self.transcript.load(self._journal, self.path / PRIVATE / "payloads")
                written = len(self.transcript.records)

        with self._kept.training(together, resumed) as (files, save):
            LOG.info("the federation begins, or goes on, with %d messages", begun)
            if isinstance(self.settings.privacy, Sound) and not started:
                self._note("start", together.rounds)

            def told(event: Event) -> None:
                if event["event"] != "kernels":
                    files["metrics"].write(json.dumps(event).encode() + b"\n")
                on_event(event)

            def checkpoint() -> None:
                nonlocal written
                assert self.path is not None
                self.transcript.write_contents(self.path / PRIVATE / "payloads", written)
                for line in self.transcript.lines(written):
                    files["transcript"].write(line.encode() + b"\n")
                written = len(self.transcript.records)
                save(together.rounds)
                if isinstance(self.settings.privacy, Sound):
                    self._note("saved", together.rounds)

            if not together.finished:
                together.run(told, checkpoint)
            LOG.info("the federation ends")
            return self._end(together)

    def _end(self, together: Together) -> FederatedRun:
        fit, alone = together.fit, together.star is None
        return self.end_with(fit.best, fit.best_epoch.tolist() if alone else together.best_round)

    @staticmethod
    def of(recipe: str, setup: Setup) -> FederatedRun:
        """A federation in memory that was set up, and is trained, elsewhere."""
        run = FederatedRun(recipe, setup.parties, setup.settings, setup.federation)
        run._transcript, run._made = setup.transcript, setup
        return run

    def end_with(self, tables: Tables, best_round: int | list[int] = 0) -> FederatedRun:
        """What came of it: the rows, and the ranks that they give."""
        self._tables, self.best_round = tables, best_round
        splits: tuple[SplitName, ...] = ("valid", "test")
        for split in splits:
            found = [evaluated(self.model(i), graph, split, self.settings) for i, graph in enumerate(self.parties)]
            if any(metrics.count for metrics in found):
                self.by_party[split], self.metrics[split] = found, weighted(found)
        if self.path is not None:
            private = self.path / PRIVATE
            lines = "".join(f"{line}\n" for line in self.transcript.lines(hashes=False))
            write_whole(self.path / SHAREABLE / "transcript.jsonl", lines.encode(), mode=0o644)
            if isinstance(self.settings.privacy, Sound):
                told = read_json(self.path / SHAREABLE / "privacy.json", "tacit.privacy/1", {})
                about = {key: told[key] for key in ("recipe", "the_server_learns_of_each_party") if key in told}
                write_json(self.path / SHAREABLE / "privacy.json", "tacit.privacy/1", self.claim | about)
            write_json(private / "metrics.json", "tacit.metrics/1", self.results())
            save_tensors(private / "model.safetensors", tables.tensors(), self._origin("tacit.model/1"))
        return self

    @property
    def claim(self) -> dict[str, Any]:
        """What is guaranteed to every party's triples: computed from what is released."""
        if not isinstance(self.settings.privacy, Sound):
            return no_claim(self.settings)
        graphs, epochs = self._setup().graphs(self.recipe), self.federation.rounds * self.federation.local_epochs
        starts = [] if self.path is None else positions(self.path)
        every = self.settings.evaluation.every * self.federation.local_epochs
        spent = [
            joined([*first, *more])
            for first, more in zip(
                releases(self.settings, graphs, epochs=epochs),
                again(self.settings, graphs, starts, every, epochs=epochs),
                strict=True,
            )
        ]
        return statement(self.settings, spent, holders=self.federation.holders)

    def _note(self, kind: Literal["start", "saved"], rounds: int) -> None:
        assert self.path is not None
        note(self.path, kind, rounds * self.federation.local_epochs)

    @property
    def epsilon(self) -> float | None:
        """Of the guarantee, the largest of all parties', which holds for everyone; None: there is none."""
        found = self.claim["epsilon"]
        return None if found is None else float(found)

    @property
    def epsilons(self) -> dict[str, float | None]:
        """Each party's, with what others who hold the same triple may add to it; None: there is no guarantee."""
        found = self.claim.get("by_party") or [None] * len(self.parties)
        return dict(zip(self.parties.names, found, strict=True))

    def results(self) -> dict[str, Any]:
        """What was measured, as JSON has it."""
        evaluation = self.settings.evaluation
        return {
            "recipe": self.recipe,
            "metrics": {split: metrics.json() for split, metrics in self.metrics.items()},
            "parties": {
                name: {split: found[i].json() for split, found in self.by_party.items()}
                for i, name in enumerate(self.parties.names)
            },
            "ranking": {"sides": evaluation.sides, "ties": evaluation.ties, "filtered": True},
            "best_round": self.best_round,
            "communication": self.communication(),
            "epsilon": self.epsilon,
        }

    # -- what came of it -----------------------------------------------------------------------------------------------

    def model(self, party: int) -> Model:
        """A party's model, as it was when validation was best."""
        if self._tables is None:
            if not self.finished:
                raise TacitError(f"{self.path} is not finished: go on with tacit federate --resume {self.path}")
            assert self.path is not None
            where = self.path / PRIVATE / "model.safetensors"
            tensors, facts = load_tensors(where)
            self._kept.check_origin(where, facts, "tacit.model/1")
            self._tables = Tables.of(tensors)
        graphs = self._setup().graphs(self.recipe)
        twice = 2 if self.settings.training.reciprocal else 1
        layout = Layout(tuple(len(g.entities) for g in graphs), tuple(twice * len(g.relations) for g in graphs))
        whole = len(graphs) == 1
        place = 0 if whole else party
        tables, prior = self._tables.party(layout, place), self._setup().prior(self.recipe)
        if prior is not None:
            rows, columns = layout.rows("relation", place), layout.entities[place]
            prior = Prior(prior.tails[rows, :columns], prior.heads[rows, :columns]).to(tables.entity.device)
        model = Model(self.settings.scorer, tables, prior, self.settings.training.reciprocal)
        return model.seen_by(graphs[0], self.parties[party]) if whole else model

    def place(self, name: str, why: str = "here") -> int:
        """The number of a party, by its name; `why` it is asked for, for the message if there is none."""
        if name not in self.parties.names:
            raise TacitError(f"there is no party {name!r} {why}. There are: {', '.join(self.parties.names)}.")
        return self.parties.names.index(name)

    def of_party(self, name: str) -> Run:
        """One party's model with its graph, to be asked and exported like a training of its own."""
        party = self.place(name)
        found = {split: metrics[party] for split, metrics in self.by_party.items()}
        return Run.of_model(self.settings, self.parties[party], self.model(party), found, self.claim)

    def predict(
        self,
        party: str | None = None,
        *,
        head: str | None = None,
        relation: str | None = None,
        tail: str | None = None,
        top: int = 10,
        known: bool = False,
    ) -> list[Prediction]:
        """The most plausible answers by one party's model, among its own names.

        Parameters
        ----------
        party
            Whose: rows that are not shared are each party's own, and so are its names and what it knows already.
        head, relation, tail
            Two of them, by name: the third is predicted.
        top
            How many answers.
        known
            Also those that the party's graph has already.
        """
        if party is None:
            raise TacitError(
                f"every party has a model of its own: say whose, by `party` ({', '.join(self.parties.names)})"
            )
        return self.of_party(party).predict(head=head, relation=relation, tail=tail, top=top, known=known)

    def _setup(self) -> Setup:
        from tacit.recipes import Setup

        if self._made is None or self._made.transcript is not self.transcript:
            where = None if self.path is None else self.path / PRIVATE / "counts.safetensors"
            self._made = Setup(self.parties, self.settings, self.federation, self.transcript, where)
        return self._made

    def communication(self) -> dict[str, Any]:
        """Bytes by party and direction, and in all."""
        by_party = {name: self.transcript.traffic(i) for i, name in enumerate(self.parties.names)}
        whole = sum(record.size for record in self.transcript.records)
        up = sum(record.size for record in self.transcript.records if record.receiver == SERVER)
        kept = {"kept": len(self.transcript.payloads), "not_kept_for_room": self.transcript.dropped}
        return {"bytes": whole, "to_server": up, "from_server": whole - up, "messages": len(self.transcript.records),
                "parties": by_party} | kept  # fmt: skip

    def cost_of(self, mrr: float, events: list[Event]) -> dict[str, int] | None:
        """Rounds and bytes until validation first reached an MRR, by the events of the training; None: never."""
        for event in events:
            if event["event"] == "validation" and event["mrr"] is not None and event["mrr"] >= mrr:
                upto = event["round"]
                # Before a validation every party is given the rows of the next round.
                spent = sum(
                    r.size for r in self.transcript.records if r.round <= upto or (r.round, r.phase) == (upto + 1, GIVE)
                )
                return {"rounds": upto, "bytes": spent}
        return None

    def events(self) -> list[Event]:
        """What happened, round by round."""
        assert self.path is not None
        return [json.loads(line) for line in (self.path / PRIVATE / "metrics.jsonl").read_text().splitlines()]

    def view(
        self,
        adversary: Adversary,
        *,
        published: Mapping[str, Any] | None = None,
        leaks: Mapping[str, Any] | None = None,
    ) -> View:
        """What an adversary saw of it. `published`: rows that were given to anyone."""
        graphs, known = self.parties.graphs, self._setup().known(self.recipe)
        return self.transcript.view(adversary, graphs=graphs, known=known, published=published, leaks=leaks)

    # -- in a folder ---------------------------------------------------------------------------------------------------

    @property
    def finished(self) -> bool:
        """Whether a folder holds its model: otherwise `train` goes on there."""
        return self.path is not None and (self.path / PRIVATE / "model.safetensors").is_file()

    def _origin(self, schema: str) -> dict[str, str]:
        about = {"recipe": self.recipe, "settings": self.settings.json(), "federation": asdict(self.federation)}
        prints = [graph.fingerprint for graph in self.parties]
        return {"schema": schema, "graphs": json.dumps(prints), "settings": json.dumps(about, sort_keys=True)}

    @property
    def _kept(self) -> Kept:
        assert self.path is not None
        return Kept(
            self.path, self._origin, {"metrics": self.path / PRIVATE / "metrics.jsonl", "transcript": self._journal}
        )

    @staticmethod
    def create(
        recipe: str, parties: Parties, settings: Settings, federation: Federation, path: Path, *, force: bool = False
    ) -> FederatedRun:
        """A folder that is ready to train: whole, or not there."""
        run = FederatedRun(recipe, parties, with_noise(recipe, parties, settings, federation), federation)
        settings = run.settings
        chosen_device(settings.training.device)
        discloses = run._setup().check(recipe)
        with _held(path, force), new_folder(path, CONFIG, force=force) as folder:
            private = folder / PRIVATE
            private.mkdir(mode=0o700)
            for name in ("checkpoints", "parties", "payloads"):
                (private / name).mkdir(mode=0o700)
            (folder / SHAREABLE).mkdir()
            for name, graph in zip(parties.names, parties, strict=True):
                save_graph(private / "parties" / f"{name}.safetensors", graph)
            for journal in ("metrics.jsonl", "transcript.jsonl"):
                (private / journal).touch()
            about = environment(parties[0])
            del about["graph"]
            named = zip(parties.names, parties, strict=True)
            about["graphs"] = {name: environment(graph)["graph"] for name, graph in named}
            write_json(folder / "environment.json", "tacit.environment/1", about)
            told = PROMISED if settings.privacy.sound else no_claim(settings)
            told = told | {"recipe": recipe, "the_server_learns_of_each_party": discloses}
            write_json(folder / SHAREABLE / "privacy.json", "tacit.privacy/1", told)
            seal(folder, CONFIG, SCHEMA, {"recipe": recipe, "parties": list(parties.names), "settings": settings.json(),
                                          "federation": asdict(federation), "origin": dict(parties.origin),
                                          "tacit": __version__})  # fmt: skip
        run.path = path
        return run

    @staticmethod
    def open(path: str | Path) -> FederatedRun:
        """The federation in a folder."""
        path = Path(path)
        if not (path / CONFIG).is_file():
            raise BadInput(f"{path}: is no run: it has no {CONFIG}.")
        wanted = {"settings": dict, "federation": dict, "recipe": str, "parties": list}
        config = read_json(path / CONFIG, SCHEMA, wanted)
        check_recipe(config["recipe"])
        graphs = tuple(load_graph(path / PRIVATE / "parties" / f"{name}.safetensors") for name in config["parties"])
        parties = Parties(tuple(config["parties"]), graphs, None, config.get("origin", {}))
        federation = checked_section(Federation, config["federation"], "federation")
        run = FederatedRun(config["recipe"], parties, Settings.make(config["settings"]), federation, path)
        if run.finished:
            where = path / PRIVATE / "metrics.json"
            found = read_json(where, "tacit.metrics/1", {"metrics": dict, "parties": dict})
            try:
                run.metrics = {split: Metrics.of(values) for split, values in found["metrics"].items()}
                run.by_party = {
                    split: [Metrics.of(found["parties"][name][split]) for name in parties.names]
                    for split in run.metrics
                }
                run.best_round = found["best_round"]
            except (TypeError, LookupError):
                raise BadInput(f"{where}: does not hold what a run measures: the file is damaged.") from None
        return run


PROMISED: dict[str, Any] = {
    "guarantee": "none yet",
    "epsilon": None,
    "why": "Training is not finished: what it releases is told when it is.",
    "releases": [],
}


def with_noise(recipe: str, parties: Parties, settings: Settings, federation: Federation) -> Settings:
    """The settings with all noise known, enough for every party."""
    if not isinstance(settings.privacy, Sound):
        return settings
    from tacit.recipes import Setup

    setup = Setup(parties, settings, federation, Transcript())
    setup.check(recipe)
    what, found = most_holders(parties, settings.privacy)
    if found > federation.holders:
        raise TacitError(f"a {what} is held by {found} parties, and costs each of them: set federation.holders")
    epochs = federation.rounds * federation.local_epochs
    return solved(settings, setup.graphs(recipe), epochs=epochs, holders=federation.holders)


def most_holders(parties: Parties, privatizer: Sound) -> tuple[str, int]:
    """What more parties hold than anything else that is protected, in words, and how many parties that is.

    Groups are the same if they have the same name, whatever triples of them a party has.
    """
    seen = {"training triple": Counter[object](each for graph in parties for each in set(graph.named("train")))}
    if privatizer.unit == "group":
        seen["group of training triples"] = Counter(
            graph.groups[number]
            for graph in parties
            if (group := protected(graph, privatizer).train.group) is not None
            for number in np.unique(group[group != NO_GROUP])
        )
    most = {what: max(counts.values(), default=1) for what, counts in seen.items()}
    what = max(most, key=lambda each: most[each])
    return what, most[what]


def is_federation(path: Path) -> bool:
    """Whether a folder holds a federation; what is wrong with one that cannot be read, opening it says."""
    try:
        return bool(json.loads((path / CONFIG).read_text(encoding="utf-8")).get("schema") == SCHEMA)
    except (OSError, ValueError, AttributeError):
        return False


def opened(run: Run | FederatedRun | str | Path) -> Run | FederatedRun:
    """A run as it is, or the one in a folder: of one graph, or of a federation."""
    if isinstance(run, Run | FederatedRun):
        return run
    return FederatedRun.open(run) if is_federation(Path(run)) else Run.open(run)


def peer_run(path: Path, party: str | None) -> Run | None:
    """The kept rows of a peer; None: the folder is none of peers."""
    try:
        kind = str(json.loads((path / CONFIG).read_text(encoding="utf-8"))["schema"]).partition("/")[0]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None
    if kind not in ("tacit.peer", "tacit.meeting"):
        return None
    from tacit.peers.kept import PeerRun, met_run

    if kind == "tacit.meeting":
        return met_run(path, party)
    if party is not None:
        raise TacitError(f"{path} is one peer's: there are no parties to choose from.")
    return PeerRun.open(path).run()


def open_run(path: str | Path, party: str | None = None) -> Run:
    """The run in a folder; of a federation's, or of a meeting's, one party's."""
    path = Path(path)
    if (found := peer_run(path, party)) is not None:
        return found
    if not is_federation(path):
        if party is not None:
            raise TacitError(f"{path} is a training of one graph: there are no parties to choose from.")
        return Run.open(path)
    run = FederatedRun.open(path)
    if party is None:
        names = ", ".join(run.parties.names)
        raise TacitError(f"{path} is a federation: say whose model is meant, by --party ({names}).")
    return run.of_party(party)


def _held(path: Path, force: bool) -> Any:
    """The lock of what is to be replaced, so that no process trains in it."""
    return locked(path) if force and (path / PRIVATE / "lock").is_file() else contextlib.nullcontext()


def federate(
    parties: Parties,
    recipe: str = "fede",
    *,
    out: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    force: bool = False,
    on_event: Callable[[Event], None] = lambda event: None,
    **flags: Any,
) -> FederatedRun:
    """Let parties learn together.

    Parameters
    ----------
    parties
        Each with its own graph; they meet by messages alone.
    recipe
        local, central, fede, fedr, private_fede, private_fedr or dpkge: see `tacit.recipes`.
    out
        The folder to keep the run in; default: memory only.
    settings
        All settings, nested as in a TOML file, with a section "federation".
    force
        Replace an earlier run in that folder; anything else is never replaced.
    on_event
        Told of every round and validation.
    flags
        The common ones by their short names, which win: those of `train`, and rounds, local_epochs, fraction, secure
        and the others of `tacit.federated.Federation`.

    Examples
    --------
    >>> from tacit.clinic import clinic
    >>> run = federate(clinic("small"), "fede", dim=8, negatives=4, rounds=2, every=1)
    >>> run.communication()["to_server"] > 0
    True
    """
    wanted, chosen = split_settings(combine(dict(settings or {}), _sections(flags)))
    check_recipe(recipe)
    if out is None:
        run = FederatedRun(recipe, parties, with_noise(recipe, parties, wanted, chosen), chosen)
        run._setup().check(recipe)
        return run.train(on_event)
    return FederatedRun.create(recipe, parties, wanted, chosen, Path(out), force=force).train(on_event)


def check_recipe(recipe: str) -> None:
    """Refuse a recipe that there is none of."""
    from tacit.recipes import RECIPES

    if not isinstance(recipe, str) or recipe not in RECIPES:
        raise TacitError(f"the recipe is {', '.join(RECIPES)}; not {recipe!r}.")


def split_settings(values: Mapping[str, Any]) -> tuple[Settings, Federation]:
    """Settings of training and of the federation, from nested values with a section "federation"."""
    values = combine(DEFAULTS, values)
    federation = checked_section(Federation, values.pop("federation", {}), "federation")
    return Settings.make(values), federation


def _sections(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Flags as sections: what belongs to the federation, and the rest."""
    own = {f.name for f in fields(Federation)}
    mine = {name: value for name, value in flags.items() if name in own and value is not None}
    rest = from_flags({name: value for name, value in flags.items() if name not in own})
    return combine(rest, {"federation": mine} if mine else {})
