"""A search for good settings, by validation MRR alone: trial after trial, each a training in memory.

    config.json          what is searched, with which settings; what belongs to the folder
    best.toml            the best settings so far, as `tacit train --config` takes them
    private/             (0700) graph without its test triples, trials.jsonl, log

A trial is a line in trials.jsonl once it has ended; one that was interrupted is made again. What a trial tries follows
from the seed, its number and the trials before it, so a search that is killed and goes on finds what an uninterrupted
one does. The test triples are taken out of the graph before anything else happens.

A search on private triples tells of them, by every trial and by the choice, and no epsilon covers that. So privacy is
tuned for on a public graph alone, where each trial simulates the noise (`refuse_private` has the reasons).
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from tacit import __version__
from tacit.errors import BadInput, BadValue, Problem, TacitError, excerpt
from tacit.folders import PRIVATE, append_line, log_to, new_folder, read_json, seal, write_whole
from tacit.graph import Graph
from tacit.kept import locked
from tacit.losses import Margin
from tacit.models import SCORERS
from tacit.models.scorer import DistanceScorer
from tacit.privacy.privatizers import Sound
from tacit.run import train
from tacit.settings import Settings, combine, from_flags, to_toml
from tacit.tensors import load_graph, save_graph
from tacit.training import Diverged, Event, chosen_device

LOG = logging.getLogger(__name__)
SCHEMA = "tacit.tuning/1"
CONFIG, BEST, TRIALS = "config.json", "best.toml", "trials.jsonl"
Ending = Literal["complete", "pruned", "diverged"]
UNPRUNED = 5
"""So many trials come to their end before any is given up, and so many have to have a figure to compare with."""


@dataclass(frozen=True)
class Space:
    """What is tried. Lists are choices, pairs are the ends of a range; one value leaves nothing to choose.

    learning_rates and clips are searched by their logarithms. margins: of the margin loss, else gamma of distance
    scorers. clips: under privacy. Empty: not searched.
    """

    scorers: tuple[str, ...] = ("transe", "rotate", "distmult", "complex")
    dims: tuple[int, ...] = (32, 64, 128)
    learning_rates: tuple[float, ...] = (1e-4, 1e-1)
    margins: tuple[float, ...] = (1.0, 24.0)
    batches: tuple[int, ...] = (128, 512, 2048)
    negatives: tuple[int, ...] = (16, 64, 256)
    clips: tuple[float, ...] = (0.1, 10.0)

    def __post_init__(self) -> None:
        for name in self.scorers:
            if name not in SCORERS:
                raise BadValue(f"there is no scorer {excerpt(name)}. There are: {', '.join(SCORERS)}")
        for name in ("dims", "batches", "negatives"):
            if any(value < 1 for value in getattr(self, name)):
                raise BadValue(f"{name} are whole numbers above 0, not {_listed(getattr(self, name))}")
        for name in RANGES:
            ends = getattr(self, name)
            good = len(ends) <= 2 and list(ends) == sorted(ends) and all(0 < end < math.inf for end in ends)
            if not good:
                raise BadValue(f"{name} are one number above 0 or two, the smaller one first; not {_listed(ends)}")
        if not (self.scorers and self.dims):
            raise BadValue("say at least one scorer and one dim to try")

    @staticmethod
    def of(values: Mapping[str, Any]) -> Space:
        """A space from lists by the names of its fields; what is left out has its default."""
        known = [field.name for field in fields(Space)]
        for name, given in values.items():
            wanted = str if name == "scorers" else (int, float) if name in RANGES else int
            if name not in known or not isinstance(given, list | tuple):
                raise BadInput(f"found {excerpt(repr(given))} as {name}; expected a list, of: {', '.join(known)}.")
            if not all(isinstance(each, wanted) and not isinstance(each, bool) for each in given):
                raise BadInput(f"found {excerpt(_listed(given))} as {name}; expected {KINDS[name]}.")
        return Space(**{name: tuple(dict.fromkeys(given)) for name, given in values.items()})

    def suggest(self, trial: Any, base: Settings) -> dict[str, Any]:
        """Settings by their keys, as the sampler has them. `base` has the loss, the negatives and the privacy."""
        chosen: dict[str, Any] = {}
        for key, name in KEYS.items():
            values = getattr(self, name)
            scorer = SCORERS[chosen["scorer.name"]] if chosen else None
            if not values or not _applies(key, scorer, base):
                continue
            if len(values) == 1:
                chosen[key] = values[0]
            elif name in RANGES:
                chosen[key] = float(f"{trial.suggest_float(key, *values, log=name != 'margins'):.4g}")
            else:
                chosen[key] = trial.suggest_categorical(key, values)
        return chosen

    def distribution(self, key: str) -> Any:
        """As the sampler has it."""
        from optuna.distributions import CategoricalDistribution, FloatDistribution

        name = KEYS[key]
        values = getattr(self, name)
        if name in RANGES:
            return FloatDistribution(*values, log=name != "margins")
        return CategoricalDistribution(values)


KEYS = {
    "scorer.name": "scorers",
    "scorer.dim": "dims",
    "optimizer.learning_rate": "learning_rates",
    "scorer.gamma": "margins",
    "loss.margin": "margins",
    "training.batch": "batches",
    "negatives.count": "negatives",
    "privacy.clip": "clips",
}
"""Which setting is searched by which field of the space."""
RANGES = ("learning_rates", "margins", "clips")
KINDS = {name: "numbers" if name in RANGES else "whole numbers" for name in KEYS.values()} | {"scorers": "names"}


def _applies(key: str, scorer: Any, base: Settings) -> bool:
    if key == "scorer.gamma":
        return issubclass(scorer, DistanceScorer) and not isinstance(base.loss, Margin)
    if key == "loss.margin":
        return isinstance(base.loss, Margin)
    if key == "negatives.count":
        return base.loss.needs != "all"
    return key != "privacy.clip" or isinstance(base.privacy, Sound)


def _listed(values: Any) -> str:
    return ", ".join(map(str, values)) or "nothing"


@dataclass(frozen=True)
class Tried:
    """A trial that has ended."""

    number: int
    ending: Ending
    chosen: dict[str, Any]
    """Settings by their keys."""
    drawn: dict[str, Any]
    """The same as the sampler knows them: not rounded, and only what there was a choice of."""
    mrr: float
    """On validation, at the end; diverged: 0."""
    reports: tuple[tuple[int, float], ...]
    """Validations on the way: after how many epochs, and the MRR."""
    seconds: float

    def line(self) -> bytes:
        return json.dumps(asdict(self), sort_keys=True, allow_nan=False).encode()

    @staticmethod
    def of(line: str) -> Tried:
        """What `line` wrote; ValueError, LookupError or TypeError if it did not."""
        values = json.loads(line)
        found = Tried(**values)
        if found.ending not in get_args(Ending) or not isinstance(found.chosen, dict) or not 0 <= found.mrr <= 1:
            raise ValueError(found.ending)
        return replace(found, reports=tuple((int(epoch), float(mrr)) for epoch, mrr in values["reports"]))


class Search:
    """A search, finished or not: in memory, or in a folder.

    Attributes
    ----------
    base
        The settings that are not searched, nested.
    trials, minutes
        It ends after so many trials; no trial begins once all have taken so many minutes.
    origin
        The [graph] section of best.toml: what to train on by it.
    """

    def __init__(
        self,
        graph: Graph,
        space: Space,
        base: Mapping[str, Any],
        *,
        trials: int | None = None,
        minutes: float | None = None,
        public: bool = False,
        origin: Mapping[str, Any] | None = None,
        path: Path | None = None,
    ):
        self.graph, self.space, self.base, self.path = graph, space, dict(base), path
        self.trials: int | None = None
        self.minutes: float | None = None
        self.public, self.origin = public, dict(origin or {})
        self.tried: list[Tried] = []
        self.limit(trials, minutes)
        self._check()

    def _check(self) -> None:
        """Refuse what cannot be searched before anything is written."""
        for name in self.space.scorers:
            try:
                settings = self._made({"scorer.name": name, "scorer.dim": self.space.dims[0]})
            except BadInput as error:
                raise BadInput(f"{name} cannot be tried with these settings: {error}") from None
            if isinstance(settings.privacy, Sound):
                refuse_private(settings, self.public)
        chosen_device(settings.training.device)
        if not len(self.graph.train):
            raise TacitError("there is nothing to train on: the graph has no training triples.")
        if not len(self.graph.valid):
            raise TacitError(
                "the graph has no validation triples, by which settings are chosen: --split 0.8,0.1,0.1 makes some."
            )
        _optuna()

    def limit(self, trials: int | None, minutes: float | None) -> None:
        """End after so many trials, those before included, or minutes of trials; neither: as it was, or 20 trials."""
        if trials is not None and trials < 1:
            raise BadValue(f"trials is at least 1, not {trials}.")
        if minutes is not None and not 0 < minutes < math.inf:
            raise BadValue(f"minutes is a number above 0, not {minutes:g}.")
        if trials is not None or minutes is not None:
            self.trials, self.minutes = trials, minutes
        elif self.minutes is None and self.trials is None:
            self.trials = 20

    def _made(self, chosen: Mapping[str, Any], more: Mapping[str, Any] | None = None) -> Settings:
        return Settings.make(combine(self.base, chosen, more or {}))

    @staticmethod
    def open(path: str | Path) -> Search:
        """The search in a folder."""
        path = Path(path)
        if not (path / CONFIG).is_file():
            raise BadInput(f"{path}: is no search: it has no {CONFIG}.")
        found = read_json(path / CONFIG, SCHEMA, {"space": dict, "base": dict, "origin": dict, "public": bool})
        graph = load_graph(path / PRIVATE / "graph.safetensors")
        limits = {name: found.get(name) for name in ("trials", "minutes")}
        search = Search(graph, Space.of(found["space"]), found["base"], public=found["public"], path=path,
                        origin=found["origin"], **limits)  # fmt: skip
        search.tried = _read(path / PRIVATE / TRIALS)
        return search

    def create(self, path: Path, *, force: bool = False) -> Search:
        """The same in a folder: whole, or not there."""
        held = locked(path) if force and (path / PRIVATE / "lock").is_file() else contextlib.nullcontext()
        with held, new_folder(path, CONFIG, force=force) as folder:
            private = folder / PRIVATE
            private.mkdir(mode=0o700)
            save_graph(private / "graph.safetensors", self.graph)
            seal(folder, CONFIG, SCHEMA, {
                "space": asdict(self.space), "base": self.base, "trials": self.trials, "minutes": self.minutes,
                "public": self.public, "origin": self.origin, "tacit": __version__,
            }, later=(BEST,))  # fmt: skip
        self.path = path
        return self

    # -- searching ----------------------------------------------------------------------------------------------------

    def run(
        self,
        on_trial: Callable[[Tried], None] = lambda tried: None,
        on_event: Callable[[int, Settings, Event], None] = lambda number, settings, event: None,
    ) -> Search:
        """Try until there were enough trials or minutes; what was tried before counts."""
        with self._held():
            study = self._study()
            self._keep_best()
            while not self._enough():
                tried = self._try(study, on_event)
                if self.path is not None:
                    append_line(self.path / PRIVATE / TRIALS, tried.line())
                self.tried.append(tried)
                self._keep_best()
                LOG.info("trial %d: %s", tried.number, tried.ending)
                on_trial(tried)
        return self

    @contextlib.contextmanager
    def _held(self) -> Iterator[None]:
        """One process at a time, which knows all that others did before it."""
        if self.path is None:
            yield
            return
        with locked(self.path), log_to(self.path):
            self.tried = _read(self.path / PRIVATE / TRIALS)
            yield

    def _enough(self) -> bool:
        taken = sum(tried.seconds for tried in self.tried)
        late = self.minutes is not None and taken >= 60 * self.minutes
        return late or (self.trials is not None and len(self.tried) >= self.trials)

    def _study(self) -> Any:
        """The trials so far, as the sampler has them."""
        optuna = _optuna()
        pruner = optuna.pruners.MedianPruner(n_startup_trials=UNPRUNED, n_min_trials=UNPRUNED)
        study = optuna.create_study(direction="maximize", pruner=pruner)
        for tried in self.tried:
            state = optuna.trial.TrialState.PRUNED if tried.ending == "pruned" else optuna.trial.TrialState.COMPLETE
            study.add_trial(optuna.trial.create_trial(
                state=state, value=tried.mrr, params=tried.drawn, intermediate_values=dict(tried.reports),
                distributions={key: self.space.distribution(key) for key in tried.drawn},
            ))  # fmt: skip
        return study

    def _try(self, study: Any, on_event: Callable[[int, Settings, Event], None]) -> Tried:
        optuna, number = _optuna(), len(self.tried)
        base = self._made({"scorer.name": self.space.scorers[0]})
        # Seeded anew for each trial: what is drawn follows from the number and the trials before it, also after a stop.
        seed = int(np.random.SeedSequence([base.seed, number]).generate_state(1)[0])
        study.sampler = optuna.samplers.TPESampler(seed=seed)
        trial = study.ask()
        chosen = self.space.suggest(trial, base)
        drawn, began = dict(trial.params), time.perf_counter()
        more = {"privacy.noise": "seeded"} if isinstance(base.privacy, Sound) else {}
        settings = self._made(chosen, more)
        reports: dict[int, float] = {}

        def told(event: Event) -> None:
            on_event(number, settings, event)
            if event["event"] == "validation" and event["mrr"][0] is not None:
                reports[event["epoch"]] = event["mrr"][0]
                trial.report(event["mrr"][0], event["epoch"])
                if trial.should_prune():
                    raise optuna.TrialPruned

        ending: Ending = "complete"
        try:
            mrr = train(self.graph, settings=settings, on_event=told).metrics["valid"].mrr
            study.tell(trial, mrr)
        except optuna.TrialPruned:
            ending, mrr = "pruned", list(reports.values())[-1]
            study.tell(trial, state=optuna.trial.TrialState.PRUNED)
        except Diverged:
            ending, mrr = "diverged", 0.0
            study.tell(trial, mrr)
        seconds = round(time.perf_counter() - began, 3)
        return Tried(number, ending, chosen, drawn, mrr, tuple(reports.items()), seconds)

    # -- the best -----------------------------------------------------------------------------------------------------

    @property
    def best(self) -> Tried | None:
        """The trial with the highest validation MRR, of those that came to their end; None: there is none yet."""
        return max((t for t in self.tried if t.ending == "complete"), key=lambda t: t.mrr, default=None)

    def settings(self) -> Settings:
        """The best settings, as a training has them."""
        if self.best is None:
            raise TacitError("no trial has come to its end yet: every one diverged, or none was made.")
        return self._made(self.best.chosen)

    def toml(self) -> str:
        """The best settings, every default written out, as `tacit train --config` takes them."""
        best, values = self.best, self.settings().json()
        assert best is not None
        on = "a public graph" if self.public else "the validation triples: the choice tells of them, without privacy"
        noise = "; each trial was a simulation of the noise there" if "privacy" in values else ""
        lines = [
            f"# Validation MRR {best.mrr:.4f}: the best of {len(self.tried)} trials, by {on}{noise}.",
            "# The test triples had no part in it.",
        ]
        graph = {"graph": self.origin} if self.origin else {}
        return "\n".join(lines) + "\n" + to_toml(graph | values)

    def _keep_best(self) -> None:
        if self.path is not None and self.best is not None:
            write_whole(self.path / BEST, self.toml().encode(), mode=None)

    def json(self) -> dict[str, Any]:
        """What was found. There is no test figure: train by the best settings to have one."""
        best, counts = self.best, dict.fromkeys(get_args(Ending), 0)
        for tried in self.tried:
            counts[tried.ending] += 1
        return {
            "out": None if self.path is None else str(self.path),
            "config": None if self.path is None or best is None else str(self.path / BEST),
            "trials": counts,
            "public": self.public,
            "epsilon": None,
            "best": None if best is None else {"trial": best.number, "valid_mrr": best.mrr, "settings": best.chosen},
        }


def refuse_private(settings: Settings, public: bool) -> None:
    """Privacy is tuned for on public triples alone.

    Each trial on private triples would be a release, and the choice among them one more, by validation ranks without
    noise. To pay for both is possible (noise on the ranks, a part of the budget for each trial), but leaves each
    training little of it; until that is done and measured, there is no epsilon that leaves the search out.
    """
    if not settings.privacy.trains:
        raise TacitError(
            "noisy counts (privacy.name = marginals) have nothing to tune. For a private trainer: --privacy dpsgd"
        )
    if not public:
        raise TacitError(
            "a search is not covered by an epsilon: each trial on private triples, and the choice among them by their "
            "validation MRR, tells of them. Search on a graph that is public and alike (--public PATH), which costs "
            "nothing; then train once, with the epsilon, by the config that it writes."
        )


def _read(path: Path) -> list[Tried]:
    """The trials of a journal; a last line that was cut off was none yet."""
    if not path.is_file():
        return []
    *lines, _ = path.read_text(encoding="utf-8", errors="replace").split("\n")
    found = []
    for number, line in enumerate(lines, 1):
        try:
            tried = Tried.of(line)
            if tried.number != number - 1:
                raise ValueError(tried.number)
        except (ValueError, LookupError, TypeError):
            problem = Problem(str(path), number, excerpt(line), f"trial {number - 1}")
            raise BadInput(f"{path}: is damaged.", [problem]) from None
        found.append(tried)
    return found


def _optuna() -> Any:
    try:
        import optuna
    except ModuleNotFoundError:
        raise TacitError("a search needs optuna, which is not installed: pip install 'tacit-kg[tune]'") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def begin(
    graph: Graph,
    *,
    out: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    trials: int | None = None,
    minutes: float | None = None,
    public: bool = False,
    origin: Mapping[str, Any] | None = None,
    force: bool = False,
    space: Mapping[str, Any] | None = None,
    **flags: Any,
) -> Search:
    """A search that has not begun yet: see `tune`."""
    base = combine(settings or {}, from_flags(flags))
    wanted = dict(space or {})
    for key, name in KEYS.items():  # what is said is not searched
        section, field = key.split(".")
        said = base.get(section, {}).get(field) if isinstance(base.get(section), Mapping) else None
        if said is not None:
            if name in wanted:
                raise TacitError(f"{key} is set to {said!r}: leave that out, or the {name} to try.")
            wanted[name] = [said]
    graph = replace(graph, test=graph.test.at(np.zeros(len(graph.test), bool)))
    if "batches" not in wanted and len(graph.train):
        fitting = [batch for batch in Space.batches if batch <= len(graph.train)]
        wanted["batches"] = fitting or [len(graph.train)]
    try:
        made = Space.of(wanted)
    except BadValue as error:
        raise BadInput(f"{error}.") from None
    search = Search(graph, made, base, trials=trials, minutes=minutes, public=public, origin=origin)
    return search if out is None else search.create(Path(out), force=force)


def tune(
    graph: Graph,
    *,
    out: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    trials: int | None = None,
    minutes: float | None = None,
    public: bool = False,
    force: bool = False,
    space: Mapping[str, Any] | None = None,
    on_trial: Callable[[Tried], None] = lambda tried: None,
    **flags: Any,
) -> Search:
    """Search for good settings by validation MRR. The test triples have no part in it.

    Parameters
    ----------
    graph
        What is trained on, with validation triples.
    out
        The folder to keep the search in; `Search.open(out).run()` goes on with it. Default: memory only.
    settings, flags
        What is not searched, as `train` has it: what is said here is taken as it is.
    trials, minutes
        When to end; default: after 20 trials.
    public
        Say that the graph is public. Private settings are searched for on such graphs alone, by simulations.
    force
        Replace an earlier search in `out`.
    space
        What to try, by the names of `Space`: {"scorers": ["transe", "rotate"], "dims": [64], "learning_rates": [1e-3,
        1e-1]}.
    on_trial
        Hears of every trial when it ends.
    """
    search = begin(graph, out=out, settings=settings, trials=trials, minutes=minutes, public=public, force=force,
                   space=space, **flags)  # fmt: skip
    return search.run(on_trial)
