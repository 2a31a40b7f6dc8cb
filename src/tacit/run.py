"""A training and the folder it leaves behind; also `python -m tacit.run plan.json`, for machines with torch alone.

    config.json          every setting, defaults written out; what belongs to the folder
    environment.json     versions, device, threads, the graph's fingerprint
    shareable/           privacy.json: what was guaranteed to whom; model, if that is private
    private/             (0700) graph, metrics.jsonl, metrics.json, model, checkpoints/, log, prior

Nothing but `shareable/` is meant to leave its owner. Without privacy no embedding is put there: rows trained on private
triples tell of them. `tacit export` writes rows elsewhere, for whoever decides to.
"""

from __future__ import annotations

import contextlib
import json
import logging
import platform
import re
import secrets
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from tacit import __version__
from tacit.draws import Secret
from tacit.errors import BadInput, Problem, TacitError, excerpt
from tacit.evaluation.ranking import Metrics
from tacit.examples import Examples
from tacit.folders import PRIVATE, append_line, new_folder, read_json, seal, write_json
from tacit.graph import SPLITS, Graph, SplitName
from tacit.kept import Kept, locked
from tacit.models import Tables
from tacit.models.model import Model
from tacit.models.tables import Prior
from tacit.negatives import PublicPairs
from tacit.prediction import Embeddings, Format, Prediction, export, predict
from tacit.privacy.events import Gaussian, Segment, Spent, joined, less
from tacit.privacy.marginals import Marginals
from tacit.privacy.plan import Position, again, cap_of, releases, solved, statement
from tacit.privacy.privatizers import Confidential, Published, Sound
from tacit.privacy.schedule import USED_UP, Cap, Ledger, check_signal
from tacit.settings import Settings, combine, from_flags
from tacit.tensors import load_graph, load_tensors, save_graph, save_tensors
from tacit.training import Event, Fit, chosen_device, evaluated

if TYPE_CHECKING:
    from tacit.privacy.budget import Reservation

LOG = logging.getLogger(__name__)
SCHEMA = "tacit.run/1"
CONFIG, SHAREABLE = "config.json", "shareable"
SPENT = "spent.jsonl"
"""In private/: the ledger of a training whose noise follows a signal."""


class Run:
    """A training, finished or not: its settings, graph, model and metrics. Kept in memory, or in a folder."""

    def __init__(
        self, settings: Settings, graph: Graph, path: Path | None = None, budget: str | None = None, holders: int = 1
    ):
        self.settings, self.graph, self.path, self.budget = settings, graph, path, budget
        self.holders = holders
        """How many parties of a federation hold the same triple, or group, at most: it costs so many times."""
        self.metrics: dict[str, Metrics] = {}
        self.best_epoch: int | None = None
        self._model: Model | None = None
        self._claim: dict[str, Any] | None = None
        self._charged: Ledger | None = None

    @staticmethod
    def open(path: str | Path) -> Run:
        """The run in a folder."""
        path = Path(path)
        if not (path / CONFIG).is_file():
            raise BadInput(f"{path}: is no run: it has no {CONFIG}.")
        config = read_json(path / CONFIG, SCHEMA, {"settings": dict})
        graph, budget = load_graph(path / PRIVATE / "graph.safetensors"), config.get("budget")
        run = Run(Settings.make(config["settings"]), graph, path, budget, config.get("holders", 1))
        if run.finished:
            where = path / PRIVATE / "metrics.json"
            found = read_json(where, "tacit.metrics/1", {"metrics": dict, "best_epoch": int})
            try:
                run.metrics = {split: Metrics.of(values) for split, values in found["metrics"].items()}
            except TypeError:
                raise BadInput(f"{where}: does not hold what a run measures: the file is damaged.") from None
            run.best_epoch = found["best_epoch"]
        return run

    @staticmethod
    def of_model(
        settings: Settings, graph: Graph, model: Model, metrics: Mapping[str, Metrics], claim: dict[str, Any]
    ) -> Run:
        """A run in memory, of a model that was trained elsewhere, with what is guaranteed there."""
        run = Run(settings, graph)
        run._model, run.metrics, run._claim = model, dict(metrics), claim
        return run

    @property
    def model(self) -> Model:
        """The trained model, as it was when validation was best."""
        if self._model is None:
            assert self.path is not None
            where = self.path / PRIVATE / "model.safetensors"
            if not where.is_file():
                raise TacitError(f"{self.path} is not finished: go on with tacit train --resume {self.path}")
            tensors, facts = load_tensors(where)
            self._kept.check_origin(where, facts, "tacit.model/1")
            self._model = self._made(Tables.of(tensors), prior_of(tensors))
        return self._model

    def _made(self, tables: Tables, prior: Prior | None) -> Model:
        return Model(self.settings.scorer, tables, prior, self.settings.training.reciprocal)

    def __repr__(self) -> str:
        return f"Run({described(self.settings, self.metrics)}; {self.graph!r})"

    @property
    def finished(self) -> bool:
        """Whether there is a model: otherwise `train` goes on."""
        on_disk = self.path is not None and (self.path / PRIVATE / "model.safetensors").is_file()
        return self._model is not None or on_disk

    def _origin(self, schema: str) -> dict[str, str]:
        """What ties a file of tensors to this run."""
        settings = json.dumps(self.settings.json(), sort_keys=True)
        return {"schema": schema, "graph": self.graph.fingerprint, "settings": settings}

    @property
    def _kept(self) -> Kept:
        assert self.path is not None
        return Kept(self.path, self._origin, {"metrics": self.path / PRIVATE / "metrics.jsonl"})

    def evaluate(self, split: SplitName = "test") -> Metrics:
        """Link prediction on a split, with the run's own sides and ties."""
        return evaluated(self.model, self.graph, split, self.settings)

    def predict(
        self,
        *,
        head: str | None = None,
        relation: str | None = None,
        tail: str | None = None,
        top: int = 10,
        known: bool = False,
    ) -> list[Prediction]:
        """The most plausible answers, by name, for the part of (head, relation, tail) that is left out.

        Parameters
        ----------
        head, relation, tail
            Two of them, by name: the third is predicted.
        top
            How many answers.
        known
            Also those that the graph has already.
        """
        return predict(self.model, self.graph, head=head, relation=relation, tail=tail, top=top, known=known)

    def export(self, path: str | Path, *, format: Format = "npy", top: int = 100, force: bool = False) -> list[str]:
        """Write the rows or predicted links into a folder; the names of its files.

        Parameters
        ----------
        path
            The folder; it appears whole or not at all.
        format
            npy, tsv, safetensors: the rows with their names. nt: predicted links.
        top
            For nt: links per relation.
        force
            Replace an earlier export there; anything else is never replaced.
        """
        if format == "nt" and self.settings.privacy.sound:
            raise TacitError("links leave out what the graph says already, which no epsilon covers: export the rows.")
        return export(self.model, self.graph, path, format=format, top=top, force=force,
                      fingerprint=not self.settings.privacy.sound)  # fmt: skip

    def embeddings(self) -> Embeddings:
        """The rows as NumPy arrays, with the names of entities and relations.

        Trained without privacy they tell of the triples they were trained on, and are as confidential as those.
        """
        return Embeddings.of(self.model, self.graph)

    def to_pykeen(self) -> Any:
        """A model of PyKEEN with these rows, to be asked, evaluated or trained on there; see `tacit.pykeen`.

        Its ids are those of `graph.entities` and `graph.relations`, and its scores the same as here but for the margin
        gamma, which moves no rank. For TransE, TransH, RotatE, DistMult, ComplEx, RESCAL and NTN; others are refused,
        with the reason. Rows that were trained without privacy are as confidential as the triples they were trained on.
        """
        from tacit.pykeen import to_pykeen

        return to_pykeen(self.model)

    def events(self) -> Iterator[Event]:
        """What happened in training, epoch by epoch."""
        assert self.path is not None
        with open(self.path / PRIVATE / "metrics.jsonl", encoding="utf-8") as lines:
            for line in lines:
                yield json.loads(line)

    # -- training -----------------------------------------------------------------------------------------------------

    def train(self, on_event: Callable[[Event], None] = lambda event: None) -> Run:
        """Train from the beginning or from the last checkpoint, and rank validation and test by the best model."""
        if self.finished:
            raise TacitError(ended(self.path))
        privacy, twice = self.settings.privacy, self.settings.training.reciprocal
        if isinstance(privacy, Sound) and not privacy.trains:
            with locked(self.path) if self.path is not None else contextlib.nullcontext():
                if self.path is not None:
                    self._begin(0)
                if getattr(privacy, "vectors", False):
                    return self._end(self._made(self._counts().vectors(self.settings.dim), None), 0)
                relations = (2 if twice else 1) * len(self.graph.relations)
                nothing = Tables.empty(self.settings.scorer, len(self.graph.entities), relations)
                return self._end(self._made(nothing, self._counts().prior(twice)), 0)
        prior, begun = None, False
        if isinstance(privacy, Sound) and privacy.prior_share:
            with locked(self.path) if self.path is not None else contextlib.nullcontext():
                if self.path is not None and not self._counts_file.is_file():
                    self._begin(0)
                    begun = True
                if self._ledger is not None and (self.path is None or not self._counts_file.is_file()):
                    assert privacy.prior_sigma is not None
                    if not self._ledger.charge("counts", 0, [Segment(Gaussian(privacy.prior_sigma))]):
                        raise TacitError(USED_UP)
                prior = self._counts().prior(twice)
        fit = Fit(self.settings, [self.graph], prior=prior, ledger=self._ledger)
        if self.path is None:
            fit.run(on_event)
            return self._end(fit.model(), int(fit.best_epoch[0]))
        with self._kept.training(fit) as (files, checkpoint):
            LOG.info("training begins, or goes on")
            if isinstance(privacy, Sound) and not begun:
                self._begin(int(fit.cohort.epochs.max()))

            def told(event: Event) -> None:
                if event["event"] != "kernels":  # that is of this process, not of the training
                    files["metrics"].write(json.dumps(event).encode() + b"\n")
                on_event(event)

            def save() -> None:
                assert self.path is not None
                epochs = int(fit.cohort.epochs.max())
                checkpoint(epochs)
                if isinstance(privacy, Sound):
                    note(self.path, "saved", epochs)

            fit.run(told, save)
            LOG.info("training ends")
            return self._end(fit.model(), int(fit.best_epoch[0]))

    def _begin(self, epochs: int) -> None:
        """Before anything is released: take what it may cost from the holding, if there is one, and note the start.

        Killed between the two, a run has paid and not begun, and pays again: never the other way round.
        """
        assert self.path is not None
        starts = positions(self.path)
        if self.budget is not None:
            from tacit.privacy.budget import Holding

            holding, (quotes, tokens) = Holding.load(self.budget), self._quotes()
            for quote in quotes:
                holding.check_quote(quote["number"], quote["head"])
            here: Position = ("start", epochs)
            more = less(self._spent([*starts, here]), self._spent(starts)) if starts and quotes else self._spent([])
            if quotes:
                number, token = quotes[0]["number"], secrets.token_hex(16)
                holding.check_token(number, tokens)
                self._quote(quotes, [*tokens, token])  # before the holding has it: killed in between, one of them holds
                made = holding.resume(number, tokens=tokens, token=token)
                quotes, tokens = self._quote([*quotes, self._quoted(made)], [token])
            if more or not quotes:
                assert isinstance(self.settings.privacy, Sound)
                whose = protected(self.graph, self.settings.privacy)
                made = holding.reserve(more, run=self.settings.name, why="training", graph=whose)
                self._quote([*quotes, self._quoted(made)], tokens or [made.head])
        note(self.path, "start", epochs)

    def _quotes(self) -> tuple[list[dict[str, Any]], list[str]]:
        """Which entries of its holding this run has seen as its last: one for each time that it began or took from it.

        And the tokens of which one is, there, that of the folder which its reservation is with (`Holding.resume`).
        """
        where = None if self.path is None else self.path / PRIVATE / "budget.json"
        if where is None or not where.is_file():
            return [], []
        found = read_json(where, "tacit.quotes/1", {"quotes": list})
        quotes = list(found["quotes"])
        return quotes, list(found.get("tokens") or [quote["head"] for quote in quotes[:1]])

    def _quote(self, quotes: list[dict[str, Any]], tokens: list[str]) -> tuple[list[dict[str, Any]], list[str]]:
        assert self.path is not None
        write_json(self.path / PRIVATE / "budget.json", "tacit.quotes/1", {"quotes": quotes, "tokens": tokens})
        return quotes, tokens

    def _quoted(self, made: Reservation) -> dict[str, Any]:
        return {"name": self.budget, "number": made.number, "head": made.head}

    def _check_paid(self) -> None:
        """Refuse to end a training that another copy of its folder has gone on with, or ended, in the meantime."""
        quotes, tokens = self._quotes()
        if self.budget is not None and quotes:
            from tacit.privacy.budget import Holding

            Holding.load(self.budget).check_token(quotes[0]["number"], tokens)

    def _settle(self) -> None:
        """What was reserved was used."""
        quotes, _ = self._quotes()
        if self.budget is not None and quotes:
            from tacit.privacy.budget import Holding

            Holding.load(self.budget).settle(quotes[0]["number"], self._spent([]))

    @property
    def _ledger(self) -> Ledger | None:
        """What noise that follows a signal is charged to; None: it does not."""
        privacy = self.settings.privacy
        if isinstance(privacy, Sound) and privacy.adaptive and self._charged is None:
            simulated = privacy.noise == "seeded"
            if self.path is None:
                self._charged = Ledger(cap_of(self.settings, self.graph), simulated=simulated)
            else:
                self._charged = Ledger.open(self.path / PRIVATE / SPENT, simulated=simulated)
        return self._charged

    @property
    def _counts_file(self) -> Path:
        assert self.path is not None
        return self.path / PRIVATE / "counts.safetensors"

    def _counts(self) -> Marginals:
        """The noisy counts of this run: released once, and kept, so that a resumed run releases no others."""
        privacy = self.settings.privacy
        assert isinstance(privacy, Sound)
        where = None if self.path is None else self._counts_file
        if where is not None and where.is_file():
            tensors, facts = load_tensors(where)
            self._kept.check_origin(where, facts, "tacit.counts/1")
            return Marginals(tensors["tails"], tensors["heads"], float(tensors["deviation"]))
        sigma = privacy.prior_sigma if privacy.trains else privacy.sigma
        if sigma is None:
            raise TacitError("the noise of this training has not been solved for yet")
        secret = Secret.simulation(self.settings.seed) if privacy.noise == "seeded" else Secret.fresh()
        counts = Marginals.release(self.graph, sigma, secret)
        if where is not None:
            deviation = torch.tensor([counts.deviation], dtype=torch.float64)
            tensors = {"tails": counts.tails, "heads": counts.heads, "deviation": deviation}
            save_tensors(where, tensors, self._origin("tacit.counts/1"))
        return counts

    @property
    def claim(self) -> dict[str, Any]:
        """What is guaranteed: computed from what was released."""
        if self._claim is not None:
            return self._claim
        if not isinstance(self.settings.privacy, Sound):
            return no_claim(self.settings)
        quotes, _ = self._quotes()
        budget = quotes[-1] if quotes else None
        return statement(self.settings, [self.spent], holders=self.holders, budget=budget, ledger=self._ledger)

    @property
    def spent(self) -> Spent:
        """All that this run releases, with what it may have released before it was interrupted.

        Where noise follows a signal: what it may have released so far. Only the cap is a guarantee then.
        """
        if self._ledger is not None:
            return self._ledger.spent()
        return self._spent([] if self.path is None else positions(self.path))

    def _spent(self, starts: Sequence[Position]) -> Spent:
        """What a holding pays for: all that is released after such starts, or the whole cap, once."""
        if self._ledger is not None:
            return (self._ledger.cap.reserved(),)
        training, graphs = self.settings.training, [self.graph]
        every = training.checkpoint_every or self.settings.evaluation.every
        return joined([*releases(self.settings, graphs)[0], *again(self.settings, graphs, starts, every)[0]])

    @property
    def epsilon(self) -> float | None:
        """Of the guarantee; None: there is none."""
        found = self.claim["epsilon"]
        return None if found is None else float(found)

    def _end(self, model: Model, best_epoch: int) -> Run:
        self._model, self.best_epoch = model, best_epoch
        self.metrics = {
            split: evaluated(self._model, self.graph, split, self.settings)
            for split in ("valid", "test")
            if len(self.graph.splits[split])
        }
        if self.path is not None:
            self._check_paid()
            facts = {split: metrics.json() for split, metrics in self.metrics.items()}
            settings = self.settings.evaluation
            about = {"sides": settings.sides, "ties": settings.ties, "filtered": True}
            private = self.path / PRIVATE
            # The model comes last: it is what makes a run finished.
            write_json(private / "metrics.json", "tacit.metrics/1",
                       {"metrics": facts, "ranking": about, "best_epoch": self.best_epoch})  # fmt: skip
            tensors = model.tables.tensors()
            if model.prior is not None:
                tensors |= {"prior.tails": model.prior.tails, "prior.heads": model.prior.heads}
            if isinstance(self.settings.privacy, Sound):
                write_json(self.path / SHAREABLE / "privacy.json", "tacit.privacy/1", self.claim)
                if self.claim["epsilon"] is not None:
                    names = {"entities": "\n".join(self.graph.entities), "relations": "\n".join(self.graph.relations)}
                    save_tensors(
                        self.path / SHAREABLE / "model.safetensors", tensors, {"schema": "tacit.shared/1"} | names
                    )
            save_tensors(private / "model.safetensors", tensors, self._origin("tacit.model/1"))
            self._settle()
        return self


def ended(path: Path | None) -> str:
    """Why a run that is finished is not trained again: a private one would release twice what it claims."""
    where = "this run" if path is None else str(path)
    return f"{where} is finished already: there is nothing to resume. Another training is another run."


def described(settings: Settings, metrics: Mapping[str, Metrics]) -> str:
    """A training in a few words; without what its guarantee is, which takes a while to compute."""
    found = next((f"{split} MRR {metrics[split].mrr:.3f}" for split in ("test", "valid") if split in metrics), None)
    named = settings.json().get("privacy", {}).get("name")
    private = f"privacy {named}" if settings.privacy.sound else f"{named} as published" if named else "not private"
    return f"{type(settings.scorer).__name__}, dim {settings.dim}, {private}, {found or 'nothing measured'}"


def note(path: Path, kind: Literal["start", "saved"], epochs: int) -> None:
    """Write down where a private training begins or goes on, before it takes a step, and where it was saved."""
    append_line(path / PRIVATE / "positions", f"{kind} {epochs}".encode())


def positions(path: Path) -> list[Position]:
    """What `note` wrote."""
    where = path / PRIVATE / "positions"
    if not where.is_file():
        return []
    *lines, _ = where.read_text(encoding="ascii", errors="replace").split("\n")
    found = []
    for number, line in enumerate(lines, 1):
        match = re.fullmatch(r"(start|saved) ([0-9]{1,15})", line)
        if match is None:
            problem = Problem(str(where), number, excerpt(line), "start or saved, and a number of epochs")
            raise BadInput(f"{where}: is damaged.", [problem])
        found.append((match[1], int(match[2])))
    return found


def protected(graph: Graph, privatizer: Sound) -> Graph:
    """The statements that a privatizer protects, over the same names."""
    return graph.marked(SPLITS) if isinstance(privatizer, Confidential) else graph


def prior_of(tensors: Mapping[str, Any]) -> Prior | None:
    """What is added to every score, if a model's file has it."""
    return Prior(tensors["prior.tails"], tensors["prior.heads"]) if "prior.tails" in tensors else None


def create(
    graph: Graph,
    settings: Settings,
    path: Path,
    *,
    force: bool = False,
    budget: str | None = None,
    holders: int = 1,
    federation: Mapping[str, Any] | None = None,
) -> Run:
    """A run folder that is ready to train: whole, or not there. `budget`: the holding that pays for a private one.

    `holders`: how many parties of a federation hold the same triple, or group, at most. `federation`: which one this is
    a party's run of, if it is (`tacit.participant`).
    """
    chosen_device(settings.training.device)
    _check(graph, settings)
    limits, given = _limits(settings, budget), settings.privacy
    settings = solved(settings, [graph], limits=limits)
    adaptive = isinstance(settings.privacy, Sound) and settings.privacy.adaptive
    cap = cap_of(settings, graph, limits) if adaptive else None
    if budget is not None and (settings.privacy != given or cap is not None):
        check_enough(settings, graph, budget, cap=cap)
    held = locked(path) if force and (path / PRIVATE / "lock").is_file() else contextlib.nullcontext()
    with held, new_folder(path, CONFIG, force=force) as folder:
        private = folder / PRIVATE
        private.mkdir(mode=0o700)
        (private / "checkpoints").mkdir(mode=0o700)
        (folder / SHAREABLE).mkdir()
        save_graph(private / "graph.safetensors", graph)
        (private / "metrics.jsonl").touch()
        if federation is not None:
            write_json(private / "federation.json", "tacit.participant/1", federation)
        if cap is not None:
            Ledger.begin(private / SPENT, cap)
        write_json(folder / "environment.json", "tacit.environment/1", environment(graph))
        write_json(folder / SHAREABLE / "privacy.json", "tacit.privacy/1", no_claim(settings))
        seal(folder, CONFIG, SCHEMA, {"settings": settings.json(), "budget": budget, "holders": holders,
                                      "tacit": __version__})  # fmt: skip
    return Run(settings, graph, path, budget, holders)


ENOUGH = 0.75
"""The share of an epsilon that a holding has to pay: its record is kept by a coarser bound than a run's own."""


def check_enough(
    settings: Settings,
    graph: Graph,
    budget: str,
    *,
    cap: Cap | None = None,
    epochs: int | None = None,
    holders: int = 1,
) -> None:
    """Refuse a run that would get far less than it asks for, and be full of noise for it.

    For whoever solved the noise by what is left of a holding: noise that others need more of is no fault of it.
    """
    from tacit.privacy.accountant import converted, held_by

    privacy = settings.privacy
    assert isinstance(privacy, Sound)
    if privacy.epsilon is None:
        return
    if cap is not None:
        found = converted(cap.order, cap.divergence, privacy.delta)
    else:
        [found] = held_by(releases(settings, [graph], epochs=epochs), holders, privacy.delta)
    if found < ENOUGH * privacy.epsilon:
        raise TacitError(
            f"the holding {budget!r} has too little left for epsilon {privacy.epsilon:g}: what is left pays for "
            f"epsilon {found:.3g}. Ask for that, or for less (--epsilon)."
        )


def _limits(settings: Settings, budget: str | None) -> Sequence[Sequence[float]]:
    """What is left of a holding."""
    if budget is None:
        return ()
    if not settings.privacy.sound:
        raise TacitError("a holding pays for private training: say how much, by --epsilon")
    from tacit.privacy.budget import Holding, check_payable

    check_payable(settings.privacy)
    return Holding.load(budget).limits()


def _check(graph: Graph, settings: Settings) -> None:
    """Refuse what cannot be trained before anything is written."""
    if not len(graph.train):
        raise TacitError("there is nothing to train on: the graph has no training triples")
    if isinstance(settings.negatives, PublicPairs):
        raise TacitError(
            'negatives.name = "public-pairs" needs a list of public pairs, which a run has no place for yet'
        )
    Examples.check_size(graph, settings.training, settings.negatives)
    if isinstance(settings.privacy, Sound):
        check_signal(settings.privacy, graph)


NOT_PRIVATE: dict[str, Any] = {
    "guarantee": "none",
    "epsilon": None,
    "why": "Trained without a privacy mechanism: the rows tell of the triples they were trained on.",
    "releases": [],
}


def no_claim(settings: Settings) -> dict[str, Any]:
    """What is said where nothing is guaranteed: without a mechanism, or with one as its paper prints it."""
    if not isinstance(settings.privacy, Published):
        return NOT_PRIVATE
    name = settings.json()["privacy"]["name"]
    why = f"No formal guarantee: {name} was run as published, for replication. As printed {settings.privacy.why}."
    return NOT_PRIVATE | {"why": why, "mode": "published", "mechanism": settings.json()["privacy"]}


def by_the_paper(settings: Settings, events: Iterable[Event]) -> str:
    """What a paper's own accounting says that a training cost, in words that cannot be taken for a claim."""
    found = [event["published_accounting"] for event in events if event.get("published_accounting")]
    if not found or not isinstance(settings.privacy, Published):
        return ""
    known = [each for each in found[-1] if each is not None]
    most = (
        f"epsilon {max(known):.3g} at delta {settings.privacy.delta:g}"
        if known
        else "no epsilon at this rate and noise"
    )
    return f" Published accounting, which is no claim: {most}."


def environment(graph: Graph) -> dict[str, Any]:
    """What the numbers of a run depend on beside its settings."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "tacit": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "machine": platform.machine(),
        "gpu": gpu,
        "threads": torch.get_num_threads(),
        "graph": {
            "fingerprint": graph.fingerprint,
            "entities": len(graph.entities),
            "relations": len(graph.relations),
            "triples": {name: len(split) for name, split in graph.splits.items()},
        },
    }


def train(
    graph: Graph,
    *,
    out: str | Path | None = None,
    settings: Mapping[str, Any] | Settings | None = None,
    force: bool = False,
    budget: str | None = None,
    on_event: Callable[[Event], None] = lambda event: None,
    **flags: Any,
) -> Run:
    """Train a model of one graph.

    Parameters
    ----------
    graph
        What to learn; validation and test triples, if it has any, decide when to stop and what it is worth.
    out
        The folder to keep the run in; default: memory only.
    settings
        All settings, nested as in a TOML file: {"scorer": {"name": "rotate", "dim": 64}, "training": {"epochs": 50}}.
    force
        Replace an earlier run in that folder; anything else is never replaced.
    budget
        The holding that pays for private training (`tacit budget open`); it needs a folder to keep the run in.
    on_event
        Told of every epoch and validation.
    flags
        The common ones by their short names, which win: scorer, dim, loss, negatives, optimizer, learning_rate, batch,
        epochs, steps, device, every, patience, memory_mb, name, seed, privacy, epsilon, delta.

    Examples
    --------
    >>> graph = Graph.from_triples([("a", "knows", "b"), ("b", "knows", "c")], test=[("c", "knows", "a")])
    >>> run = train(graph, scorer="distmult", dim=8, epochs=5)
    >>> run.metrics["test"].count
    2
    """
    given = settings.json() if isinstance(settings, Settings) else settings or {}
    wanted = Settings.make(combine(given, from_flags(flags)))
    if out is None and budget is not None:
        raise TacitError("a run that a holding pays for is kept in a folder: say where, by `out`")
    if out is None:
        run = Run(solved(wanted, [graph]), graph)
    else:
        run = create(graph, wanted, Path(out), force=force, budget=budget)
    return run.train(on_event)


def write_plan(graph: Graph, settings: Settings, folder: Path, *, force: bool = False) -> None:
    """What another machine needs to train: `python -m tacit.run plan.json` there, with torch and NumPy alone."""
    _check(graph, settings)
    settings = solved(settings, [graph])
    with new_folder(folder, "plan.json", force=force) as draft:
        draft.chmod(0o700)  # it holds the graph
        save_graph(draft / "graph.safetensors", graph)
        seal(draft, "plan.json", "tacit.plan/1", {"graph": "graph.safetensors", "settings": settings.json()})


def main(arguments: list[str]) -> int:
    """`python -m tacit.run plan.json [--out FOLDER]`: train by a plan, or go on with it."""
    try:
        if len(arguments) not in (1, 3) or (len(arguments) == 3 and arguments[1] != "--out"):
            raise TacitError("usage: python -m tacit.run PLAN.json [--out FOLDER]")
        plan = Path(arguments[0])
        content = read_json(plan, "tacit.plan/1", {"graph": str, "settings": dict})
        settings, out = Settings.make(content["settings"]), plan.parent / "run"
        graph = load_graph(plan.parent / content["graph"])
        if len(arguments) == 3:
            out = Path(arguments[2])
        if (out / CONFIG).is_file():
            run = Run.open(out)
            if run.settings != settings or run.graph != graph:
                raise TacitError(f"{out} holds a run of another plan; choose another --out.")
        else:
            run = create(graph, settings, out)
        logging.getLogger("tacit").setLevel(logging.INFO)
        run.train(lambda event: print(json.dumps(event), file=sys.stderr, flush=True))
        print(json.dumps({"out": str(out)} | {split: m.json() for split, m in run.metrics.items()}))
    except (TacitError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
