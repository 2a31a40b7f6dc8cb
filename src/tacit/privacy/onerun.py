"""The one-run audit: what a whole private training lets somebody learn at least, beside what is claimed for it.

Many triples on names that nothing else has, the canaries, are each in the training or not by a fair coin. The training
is the run's own: the same code, settings and noise. Whoever sees what it releases scores every canary, says "in" of the
highest and "out" of the lowest, and abstains from the others; so many right guesses show that epsilon is at least so
much (Steinke, Nasr and Jagielski 2023, by `tacit.privacy.bounds`). Ways of scoring:

    white box   all released sums along the canary's own clipped gradient, on the two rows that only it has
    lengths     how long these two rows are in the released sums: rows that are touched, chosen or left out differ
    black box   the score of the canary by the final model less that by the first rows. A score, and no loss: it is what
                the model gives away by being asked, needs no negatives, and has the same meaning for every loss
    cells       noisy counts: the sum of the canary's two

Where noisy counts are a prior of a training, white box and lengths look at its steps alone; the black box sees both.

A pass proves nothing: this is one adversary, and its bound is loose. A bound above the claim is a fault of the
mechanism or its code; by chance that happens with probability 1 - confidence at most. The audit is one more private
training on the same triples: to publish what it finds costs the epsilon of that training once more. It is for the owner
of the triples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from tacit.cohort import Cohort, SecretNoise
from tacit.draws import Purpose, Secret
from tacit.errors import BadValue, TacitError
from tacit.examples import Examples
from tacit.federated import FederatedRun, Federation, opened, with_noise
from tacit.federation.transcript import Transcript
from tacit.folders import PRIVATE, write_json
from tacit.graph import Graph, Ids, Mask, Split, Vocab
from tacit.kernels.contract import Chunk, Clipped, Gradients, Kernel, Rule
from tacit.models import Layout, Tables
from tacit.models.model import Model
from tacit.parties import Parties, pool
from tacit.privacy.accountant import epsilon
from tacit.privacy.bounds import epsilon_from_one_run
from tacit.privacy.events import Gaussian, Segment
from tacit.privacy.plan import releases, solved
from tacit.privacy.privatizers import Confidential, Sound
from tacit.privacy.schedule import USED_UP
from tacit.privacy.steps import AT_ONCE, PrivateSteps, content, count_units
from tacit.recipes import RECIPES, Setup
from tacit.run import Run
from tacit.settings import Settings
from tacit.training import Event, Fit

Tensor = Any
Scores = dict[str, np.ndarray]
Status = Literal["holds", "violated", "no claim"]
WHITE, LENGTHS, BLACK, CELLS = "white box", "lengths", "black box", "cells"
DELTA = 1e-5
"""Of a training that claims nothing."""


@dataclass(frozen=True, repr=False)
class OneRun:
    """What was claimed for the audited training, and what each way of looking proves at least.

    Attributes
    ----------
    claimed
        The epsilon of what it released, at `delta`; None: nothing is claimed for it. It is not the run's own, but
        near it: rates follow the public number of triples, which canaries are among.
    simulation
        The noise followed a seed, and protects nothing: `claimed` is what secret noise would have guaranteed.
    measured, correct
        By way of scoring: the lower bound of epsilon, and how many guesses were right. All bounds hold at once.
    party
        Of a federation: whose triples the canaries were among.
    """

    claimed: float | None
    simulation: bool
    measured: dict[str, float]
    correct: dict[str, int]
    canaries: int
    guesses: int
    delta: float
    confidence: float
    party: str | None = None

    @property
    def lower_bound(self) -> float:
        """What epsilon is at least, by the best way of scoring."""
        return max(self.measured.values())

    @property
    def status(self) -> Status:
        """holds: nothing speaks against the claim, which is no proof of it. violated: more was learned than it allows.
        no claim: there is no privacy mechanism."""
        return self.judge(self.lower_bound)

    def judge(self, bound: float) -> Status:
        """What a measured bound says of the claim."""
        if self.claimed is None:
            return "no claim"
        return "violated" if bound > self.claimed else "holds"

    def json(self) -> dict[str, Any]:
        """All of it, as private/audit.json has it."""
        return asdict(self) | {"lower_bound": self.lower_bound, "status": self.status}

    @staticmethod
    def of(values: Mapping[str, Any]) -> OneRun:
        """What `json` gave, or private/audit.json of a run."""
        return OneRun(**{each.name: values[each.name] for each in fields(OneRun) if each.name in values})

    def __repr__(self) -> str:
        claimed = "none" if self.claimed is None else f"{self.claimed:.3g}{' (simulation)' if self.simulation else ''}"
        ways = ", ".join(f"{way} {bound:.3g}" for way, bound in self.measured.items())
        whose = "" if self.party is None else f" of {self.party}"
        return (
            f"OneRun({self.status}: epsilon claimed {claimed}, measured at least {self.lower_bound:.3g} ({ways}) at "
            f"delta {self.delta:g}; {self.canaries:,} canaries{whose}, confidence {self.confidence:g})"
        )


def audit(
    run: Run | FederatedRun | str | Path,
    *,
    canaries: int = 1000,
    guesses: int = 200,
    confidence: float = 0.95,
    party: str | None = None,
    canary: Literal["triple", "dirac"] = "triple",
    device: str | None = None,
    seed: int | None = None,
    on_event: Callable[[Event], None] = lambda event: None,
) -> OneRun:
    """Train once more as a run does, with canaries, and measure what that gives away, beside what is claimed.

    The run may be finished or not, and is left as it is. What is found is kept in private/audit.json of its folder, if
    it has one, for the owner of the triples: to publish it costs the epsilon of a training once more. A pass is no
    proof: this adversary is one of many, its bound loose.

    Parameters
    ----------
    run
        A run, or its folder.
    canaries
        Triples on names of their own that are in or out by a coin.
    guesses
        Of how many canaries it is said whether they were in; even.
    confidence
        With which the measured epsilon is exceeded.
    party
        Of a federation: whose triples canaries are among; default: the first.
    canary
        dirac: canaries that weigh as much as the mechanism allows; no black box.
    device
        Where to train; default: as the run says.
    seed
        Of the coins, for experiments that others shall repeat; default: a secret of the operating system.
    on_event
        Told of every epoch or round.

    >>> from tacit.run import train
    >>> graph = Graph.from_triples([(f"a{i}", "knows", f"b{i}") for i in range(50)])
    >>> run = train(graph, epsilon=1.0, settings={"privacy": {"noise": "seeded"}})
    >>> found = audit(run, canaries=100, guesses=20, seed=0)
    >>> found.status, found.simulation
    ('holds', True)
    """
    run = opened(run)
    if run.path is not None and (run.path / PRIVATE / "federation.json").is_file():
        raise TacitError(
            f"{run.path} is one party's folder of a federation over a network, which trains only with the others: "
            "audit a tacit federate of the same settings, which has all parties in one process."
        )
    settings = run.settings
    if device is not None:
        settings = replace(settings, training=replace(settings.training, device=device))
    options: dict[str, Any] = {"canaries": canaries, "guesses": guesses, "canary": canary, "confidence": confidence,
                               "seed": seed, "on_event": on_event}  # fmt: skip
    if isinstance(run, FederatedRun):
        place = 0 if party is None else run.place(party)
        found = audit_training(settings, run.parties, recipe=run.recipe, federation=run.federation, party=place,
                               **options)  # fmt: skip
        found = replace(found, party=run.parties.names[place])
    else:
        if party is not None:
            raise TacitError("this is a training of one graph: there are no parties to choose from.")
        found = audit_training(settings, run.graph, **options)
    if run.path is not None:
        write_json(run.path / PRIVATE / "audit.json", "tacit.audit/1", {"run": str(run.path)} | found.json())
    return found


def audit_training(
    settings: Settings,
    graphs: Graph | Parties,
    *,
    recipe: str = "local",
    federation: Federation | None = None,
    party: int = 0,
    canaries: int = 1000,
    guesses: int = 200,
    canary: Literal["triple", "dirac"] = "triple",
    delta: float | None = None,
    confidence: float = 0.95,
    seed: int | None = None,
    kind: Callable[..., PrivateSteps] = PrivateSteps,
    on_event: Callable[[Event], None] = lambda event: None,
) -> OneRun:
    """Train once, with canaries, and say what that gives away.

    Parameters
    ----------
    settings
        Of the run; its noise is taken as it was solved, or is solved for the graph with canaries.
    graphs
        One graph, or the parties of a federation, which trains by `recipe` and `federation`.
    party
        Whose triples the canaries are among.
    canaries
        How many. More are not always better: each adds twice delta to the chance of a false alarm that is reckoned
        with, so that canaries times delta has to stay well below 1 - confidence.
    guesses
        For how many canaries it is said whether they were in, half of them "in". Fixed before anything is seen.
    canary
        dirac: instead of its gradient, a canary that is drawn adds the whole clip to one number of its own row (or the
        rows' own clip, if that is less): what no triple does, and the most that the mechanism allows. For private
        trainings; it has no black box.
    delta
        Default: the run's.
    seed
        Of the coins, for experiments that others shall repeat; default: a secret of the operating system.
    kind
        The code of private steps that is looked at.

    >>> graph = Graph.from_triples([(f"a{i}", "knows", f"b{i}") for i in range(50)])
    >>> wanted = Settings.make({"privacy": {"epsilon": 1.0, "noise": "seeded"}})
    >>> found = audit_training(wanted, graph, canaries=100, guesses=20, seed=0)
    >>> found.status, list(found.measured)
    ('holds', ['cells'])
    """
    privacy = settings.privacy
    delta = delta if delta is not None else getattr(privacy, "delta", DELTA)
    _check(canaries, guesses, delta, confidence)
    if canary not in ("triple", "dirac"):
        raise BadValue(f"a canary is a triple or dirac, not {canary!r}")
    if canary == "dirac" and not (isinstance(privacy, Sound) and privacy.trains):
        raise BadValue("a dirac canary stands in for a gradient of private steps, and here are none")
    inside = coins(canaries, seed)
    audit = _Audit(settings, inside, party, canary == "dirac", delta, kind, on_event)
    claimed, scores = (
        audit.one(graphs) if isinstance(graphs, Graph) else audit.together(graphs, recipe, federation or Federation())
    )
    correct = {way: right_guesses(found, inside, guesses) for way, found in scores.items()}
    each = 1 - (1 - confidence) / len(scores)
    measured = {
        way: epsilon_from_one_run(canaries, guesses, right, delta=delta, confidence=each)
        for way, right in correct.items()
    }
    simulation = getattr(privacy, "noise", "system") == "seeded"
    claimed = None if claimed is None else float(claimed)
    return OneRun(claimed, simulation, measured, correct, canaries, guesses, delta, confidence)


def _check(canaries: int, guesses: int, delta: float, confidence: float) -> None:
    if not 2 <= canaries <= 1 << 20:
        raise BadValue(f"canaries are at least 2 and at most {1 << 20:,}, not {canaries}")
    if guesses % 2 or not 2 <= guesses <= canaries:
        raise BadValue(f"guesses are an even number, at least 2 and at most all {canaries} canaries, not {guesses}")
    for name, value in (("delta", delta), ("confidence", confidence)):
        if not 0 < value < 1:
            raise BadValue(f"{name} is above 0 and below 1, not {value}")


def coins(count: int, seed: int | None = None) -> Mask:
    """(count,) bool: a fair coin for each canary, which nobody knows; `seed`: which whoever has it knows."""
    secret = Secret.fresh() if seed is None else Secret.simulation(seed)
    thrown: Mask = (secret.words(Purpose.COIN, 0, 0, count) & 1).bool().numpy()
    return thrown


def right_guesses(scores: np.ndarray, inside: Mask, guesses: int) -> int:
    """How many are right if the highest are said to be in, the lowest to be out, half of the guesses each."""
    order, half = np.argsort(np.nan_to_num(scores), kind="stable"), guesses // 2
    return int(inside[order[-half:]].sum() + (~inside[order[:half]]).sum())


def reserved(taken: Iterable[str], count: int) -> tuple[list[str], list[str]]:
    """Names of the heads and tails of so many canaries, none of which is among those that are taken."""
    known, prefix = set(taken), "canary"
    while any(name.startswith(prefix) for name in known):
        prefix += "-"
    heads, tails = ([f"{prefix}{number}:{side}" for number in range(count)] for side in ("head", "tail"))
    return heads, tails


def planted(graph: Graph, inside: Mask, taken: Iterable[str] = ()) -> tuple[Graph, Ids]:
    """The graph with those canaries in train that are `inside`, and (canaries, 3) the ids of all of them in it.

    Every reserved name is in the vocabulary whatever the coins say, for names are public. Relations are the graph's, in
    turn. Canaries are confidential where something is, and each is a group by itself. `taken`: names of others.
    """
    count, many = len(inside), len(graph.relations)
    heads, tails = reserved([*taken, *graph.entities, *graph.relations, *graph.groups], count)
    entities = Vocab([*graph.entities, *heads, *tails])
    new = graph.entities.positions(entities)
    which = np.arange(count, dtype=np.int32) % many
    own = np.stack([Vocab.trusted(heads).positions(entities), which, Vocab.trusted(tails).positions(entities)], 1)

    def moved(split: Split) -> Split:
        triples = np.stack([new[split.triples[:, 0]], split.triples[:, 1], new[split.triples[:, 2]]], 1)
        return replace(split, triples=triples.astype(np.int32))

    train, valid, test = (moved(split) for split in graph.splits.values())
    made = replace(graph, entities=entities, train=train.plus(own[inside]), valid=valid.plus(own[:0]),
                   test=test.plus(own[:0]))  # fmt: skip
    return made, own


@dataclass(frozen=True)
class _Audit:
    """One training with canaries: its claim, and the canaries' scores."""

    settings: Settings
    inside: Mask
    party: int
    dirac: bool
    delta: float
    kind: Callable[..., PrivateSteps]
    on_event: Callable[[Event], None]

    def one(self, graph: Graph) -> tuple[float | None, Scores]:
        """Of one graph, as `Run.train` does it. Rates follow a number of triples that the coins do not change."""
        if self.party:
            raise BadValue(f"there is one graph, and no party {self.party}")
        audited, own = planted(graph, self.inside)
        settings, privacy = self.settings, self.settings.privacy
        if isinstance(privacy, Sound):
            size = privacy.public_size(count_units(privacy, graph)) + len(own) // 2
            settings = solved(replace(settings, privacy=replace(privacy, size=size)), [audited])
            privacy = settings.privacy
        run, prior, claimed = Run(settings, audited), None, None
        ledger = run._ledger
        if isinstance(privacy, Sound):
            claimed = epsilon(run.spent, self.delta) if ledger is None else ledger.epsilon(self.delta)
            if not privacy.trains:
                counts = run._counts()
                return claimed, {CELLS: _cells(counts.tails, counts.heads, own)}
            if privacy.prior_share:
                if ledger is not None:
                    assert privacy.prior_sigma is not None
                    if not ledger.charge("counts", 0, [Segment(Gaussian(privacy.prior_sigma))]):
                        raise TacitError(USED_UP)
                prior = run._counts().prior(settings.training.reciprocal)
        fit = Fit(settings, [audited], prior=prior, ledger=ledger)
        return claimed, self._scores(fit, own, lambda: fit.run(self.on_event))

    def together(self, parties: Parties, recipe: str, federation: Federation) -> tuple[float | None, Scores]:
        """Of a federation, as `FederatedRun.train` does it; the claim is the audited party's own.

        Its rates follow its rounded number of triples, as always there: the coins may move that by one digit.
        """
        if not 0 <= self.party < len(parties):
            raise BadValue(f"a party is one of {len(parties)}, from 0 on, not {self.party}")
        if recipe == "central":  # pooled triples are one party that trains alone
            parties, recipe = Parties(("all",), (pool(parties),)), "local"
        number = min(self.party, len(parties) - 1)
        names = {name for graph in parties for vocab in (graph.entities, graph.relations) for name in vocab}
        audited, own = planted(parties[number], self.inside, names)
        graphs = tuple(audited if i == number else graph for i, graph in enumerate(parties))
        parties = Parties(parties.names, graphs, None, parties.origin)
        settings = with_noise(recipe, parties, self.settings, federation)
        setup, claimed, privacy = Setup(parties, settings, federation, Transcript()), None, settings.privacy
        setup.check(recipe)
        if isinstance(privacy, Sound):
            epochs = federation.rounds * federation.local_epochs
            claimed = epsilon(releases(settings, graphs, epochs=epochs)[number], self.delta)
            if not privacy.trains:
                # Nobody else has a canary's cells: the sum of all parties' counts is this party's own there.
                prior, twice = setup.prior(recipe), 2 if settings.training.reciprocal else 1
                assert prior is not None
                start = twice * sum(len(graph.relations) for graph in graphs[:number])
                return claimed, {CELLS: _cells(prior.tails[start:], prior.heads[start:], own)}
        together = RECIPES[recipe](setup)
        if together.star is not None:
            together.star.give(range(len(graphs)))  # what round 1 would begin with
        return claimed, self._scores(together.fit, own, lambda: together.run(self.on_event), number)

    def _scores(self, fit: Fit, own: Ids, train: Callable[[], None], number: int = 0) -> Scores:
        first = _by_model(fit.model(number, best=False), own, prior=False)
        witness = None
        if isinstance(self.settings.privacy, Sound):
            witness = Witness(fit, own, party=number, dirac=self.dirac, kind=self.kind)
        train()
        if witness is not None and not witness.steps:
            raise TacitError(
                "not one private step was seen to end, so the audit could say nothing: the training took none, or ends "
                "its steps in a way that the audit does not know."
            )
        found = {} if witness is None else witness.scores()
        if not self.dirac:
            found[BLACK] = _by_model(fit.model(number), own) - first
        return found


def _by_model(model: Model, own: Ids, *, prior: bool = True) -> np.ndarray:
    h, r, t = torch.from_numpy(own.astype(np.int64)).to(model.tables.entity.device).unbind(1)
    found: np.ndarray = (model if prior else replace(model, prior=None)).score(h, r, t).double().cpu().numpy()
    return found


def _cells(tails: Tensor, heads: Tensor, own: Ids) -> np.ndarray:
    h, r, t = torch.from_numpy(own.astype(np.int64)).unbind(1)
    found: np.ndarray = (tails[r, t] + heads[r, h]).double().numpy()
    return found


class Witness:
    """Sees every sum that a party's private steps release, before the optimizer does, and scores canaries by it.

    What a canary would add is asked of the mechanism's own kernel, for all canaries at once: on its own two rows their
    sum is its part alone, wherever negatives come from one pool, whose rows are left out of that step. The other rows
    that a canary touches, its relation's and the pool's, are many triples' and are not looked at.
    """

    def __init__(self, fit: Fit, own: Ids, *, party: int, dirac: bool, kind: Callable[..., PrivateSteps]):
        """Takes the place of the training's own private steps, made by `kind`, with eyes in the cohort."""
        settings, layout, device = fit.settings, fit.layout, fit.device
        self.cohort, self.party = fit.cohort, party
        none = Split(own[:0])
        graphs = [replace(g, train=Split(own) if i == party else none) for i, g in enumerate(fit.graphs)]
        self.examples = Examples(graphs, layout, settings.training, settings.negatives, seed=settings.seed,
                                 widths=settings.scorer.widths(settings.dim), device=device)  # fmt: skip
        self.head, _, self.tail = self.examples.triples.unbind(1)
        self.slot = torch.from_numpy(content(own, settings.seed, layout.numbers[party])).to(device)
        self.into = Gradients(fit.cohort.tables.like(torch.zeros_like))
        self.along, self.length = torch.zeros(2, len(own), dtype=torch.float64, device=device)
        self.steps = 0
        kernel: Kernel = Dirac(fit.kernel, torch.cat([self.head, self.tail])) if dirac else fit.kernel
        cohort: Any = Watched(fit.cohort, self._finishes)
        self.private = fit.private = kind(settings.privacy, cohort, kernel, fit.examples, fit.graphs)
        if fit.schedule is not None:
            fit.schedule.private = fit.private

    def scores(self) -> Scores:
        return {WHITE: self.along.cpu().numpy(), LENGTHS: self.length.cpu().numpy()}

    def _finishes(self, active: Tensor, noise: SecretNoise | None) -> Any:
        """A step ends: noise that is looked at once it was added."""
        privacy, here = self.private.privatizer, bool(active[self.party])
        if not here or (
            isinstance(privacy, Confidential) and not privacy.is_private(int(self.cohort.steps[self.party]))
        ):
            return noise
        if noise is None:
            self.see(self.cohort.gradients.tables)
            return None
        return Seen(noise, self.see)

    def see(self, released: Tables) -> None:
        """Score by the sums of one step; rows and counts of steps are still those that the sums were made at."""
        self.steps += 1
        into, private, rows_of = self.into, self.private, torch.arange(len(self.slot), device=self.slot.device)
        into.empty()
        free = torch.ones(len(released.entity), dtype=torch.bool, device=self.slot.device)
        for rows in rows_of.split(AT_ONCE[self.slot.device.type]):
            party = torch.full_like(rows, self.party)
            chunk = self.examples.step(rows, party, self.slot[rows], self.cohort.steps).chunk
            private.kernel.accumulate(self.cohort.tables, chunk, private.rule(), into)
            if chunk.pool is not None:
                drawn = chunk.pool[self.party]
                free[drawn[drawn >= 0]] = False
        for own in (self.head, self.tail):
            there, wanted = released.entity[own].double() * free[own][:, None], into.tables.entity[own].double()
            self.along += (there * wanted).sum(1)
            self.length += there.square().sum(1)


class Watched:
    """A cohort whose steps are seen as they end: all at once by `finish`, or by `protect` and what comes after it."""

    def __init__(self, cohort: Cohort, finishes: Callable[[Tensor, SecretNoise | None], Any]):
        self._cohort, self._finishes = cohort, finishes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cohort, name)

    def finish(
        self, divisor: Tensor, active: Tensor, *, noise: SecretNoise | None = None, relation_scale: float = 1.0
    ) -> None:
        noise = self._finishes(active, noise)
        self._cohort.finish(divisor, active, noise=noise, relation_scale=relation_scale)

    def protect(self, noise: SecretNoise, active: Tensor) -> None:
        self._cohort.protect(self._finishes(active, noise), active)


class Seen:
    """Noise that shows what came of it."""

    def __init__(self, noise: SecretNoise, see: Callable[[Tables], None]):
        self.noise, self.see = noise, see

    def add(self, gradients: Gradients, layout: Layout, steps: Tensor, active: Tensor) -> None:
        self.noise.add(gradients, layout, steps, active)
        self.see(gradients.tables)


class Dirac:
    """A kernel for which a canary's gradient is the whole clip on one number of its own row; others' as they are.

    Where rows have a clip of their own it is that one, if it is less.
    """

    def __init__(self, kernel: Kernel, rows: Tensor):
        self.kernel, self.rows, self.objective = kernel, rows, kernel.objective

    def accumulate(self, tables: Tables, chunk: Chunk, rule: Rule, into: Gradients) -> tuple[Tensor, Tensor | None]:
        if not isinstance(rule, Clipped):
            return self.kernel.accumulate(tables, chunk, rule, into)
        ours = torch.isin(chunk.head, self.rows) & (chunk.weight != 0)
        rest = replace(chunk, weight=torch.where(ours, torch.zeros_like(chunk.weight), chunk.weight))
        found = self.kernel.accumulate(tables, rest, rule, into)
        assert chunk.unit is not None
        unit = chunk.unit[ours]  # of two examples of a triple each adds a half
        row = torch.minimum(chunk.head[ours], chunk.tail[ours])
        values = tables.entity.new_zeros(len(row), tables.entity.shape[1])
        most = rule.clip if rule.row_clip is None else rule.clip.clamp(max=rule.row_clip)
        values[:, 0] = most[chunk.party[ours]] / torch.bincount(unit)[unit]
        if rule.row_mask is not None:
            values *= rule.row_mask[row][:, None]
        into.add_entities(row, values)
        return found
