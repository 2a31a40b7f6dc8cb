"""Noise that falls when a signal no longer becomes better, and the cap that keeps account of it.

    public   the signal is the MRR of unrestricted validation triples, filtered by unrestricted triples alone: a
             function of rows that are private already and of what is public, so it costs nothing
    paid     it is the sum of reciprocal ranks of all validation triples, not filtered, with noise: a triple more or
             less moves it by 1 at most, and each look at it costs one Gaussian

How much noise later steps have then follows from what was released before, and adding up afterwards what they have cost
is no guarantee. So a cap is fixed before anything is released (`accountant.Filter`), every epoch and every look is
written down and charged to it before it happens, and what would exceed it does not happen: training ends there. A run
that was interrupted finds what it may have released already charged, and ends earlier for it; the cap stays.

Training and validation triples are charged apart. Steps see only the former, the paid signal sees only the latter and
rows that were released, and no triple is in both: neighbours differ in one or the other, so the cap holds for each.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch

from tacit.draws import Purpose
from tacit.errors import BadInput, Problem, TacitError, excerpt
from tacit.evaluation.ranking import Questions, rank
from tacit.folders import append_line, write_whole
from tacit.graph import Graph, Ids, Split
from tacit.models.model import Model
from tacit.privacy.events import Gaussian, Segment, Spent, joined
from tacit.privacy.privatizers import Sound, rounded
from tacit.privacy.steps import PrivateSteps
from tacit.settings import Settings

SCHEMA = "tacit.spent/1"
What = Literal["counts", "steps", "signal"]
"""What is charged: noisy counts once, the steps of an epoch (the first with noisy degrees), a look at the signal."""
NOT_INSTALLED = (
    "a noise schedule that follows a signal keeps account while it trains, by dp-accounting, which is not installed "
    'here: pip install dp-accounting, or set privacy.noise_follows = "steps"'
)
USED_UP = (
    "the cap of this run does not pay for an epoch, and nothing is trained yet. What interrupted attempts may have "
    "released is paid for too: begin a new run, with smaller batches, more noise or a larger privacy.epsilon"
)


@dataclass(frozen=True)
class Cap:
    """The most that may be released: a Renyi divergence of one order, fixed before anything is."""

    order: float
    divergence: float

    def reserved(self) -> Segment:
        """A release that costs as much at this order, and a trifle more: for a holding of the same order, no other."""
        return Segment(Gaussian(math.sqrt(self.order / (2 * self.divergence * (1 + 1e-10)))))


@dataclass(frozen=True)
class Charge:
    """What may have been released, at which step."""

    what: What
    at: int
    releases: Spent

    def line(self) -> bytes:
        made = {"for": self.what, "at": self.at, "releases": [segment.json() for segment in self.releases]}
        return json.dumps(made, sort_keys=True).encode()

    @staticmethod
    def of(line: str) -> Charge:
        """What `line` wrote; ValueError, LookupError, TypeError or BadInput if it did not."""
        values = json.loads(line)
        what, at = values["for"], values["at"]
        if what not in get_args(What) or type(at) is not int or set(values) != {"for", "at", "releases"}:
            raise ValueError(what)
        return Charge(what, at, tuple(map(Segment.of, values["releases"])))


class Ledger:
    """All charges to a cap: in memory, or in a file that is only added to. Each is on the disk before it is acted on.

    simulated: noise that follows a seed is the same when a step is taken again, and is charged once.
    """

    def __init__(self, cap: Cap, path: Path | None = None, *, simulated: bool = False):
        self.cap, self.path, self.simulated = cap, path, simulated
        self._charges: list[Charge] = []
        self._size = -1

    @staticmethod
    def begin(path: Path, cap: Cap) -> None:
        """An empty one in a file, which names its cap."""
        head = {"schema": SCHEMA, "order": cap.order, "divergence": cap.divergence}
        write_whole(path, json.dumps(head).encode() + b"\n")

    @staticmethod
    def open(path: Path, *, simulated: bool = False) -> Ledger:
        """The one in a file; without it nobody knows what was released."""
        try:
            head = json.loads(path.read_bytes().split(b"\n")[0])
            if head["schema"] != SCHEMA:
                raise ValueError(head["schema"])
            cap = Cap(float(head["order"]), float(head["divergence"]))
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise BadInput(f"{path}: does not say what this run may release: {error}.") from None
        if not (cap.order > 1 and 0 < cap.divergence < math.inf):
            raise BadInput(f"{path}: found a cap of {cap.divergence:g} at the order {cap.order:g}, which is none.")
        return Ledger(cap, path, simulated=simulated)

    def charges(self) -> list[Charge]:
        """All of them, as they are on the disk: another process may have gone on before this one had the lock."""
        if self.path is None or self.path.stat().st_size == self._size:
            return self._charges
        data = self.path.read_bytes()
        _, *lines, _ = data.decode("utf-8", errors="replace").split("\n")  # what was cut off was never acted on
        found = []
        for number, line in enumerate(lines, 2):
            try:
                found.append(Charge.of(line))
            except (ValueError, LookupError, TypeError, BadInput):
                problem = Problem(str(self.path), number, excerpt(line), "what was released, at which step")
                raise BadInput(f"{self.path}: is damaged.", [problem]) from None
        self._charges, self._size = found, len(data)
        return found

    def charge(self, what: What, at: int, releases: Iterable[Segment]) -> bool:
        """Write down that this will be released, if the cap allows; only then may it be."""
        wanted, had = Charge(what, at, joined(releases)), self.charges()
        if self.simulated and wanted in had:
            return True
        try:
            if not self._within([*had, wanted], signal=what == "signal"):
                return False
        except ModuleNotFoundError:
            raise TacitError(NOT_INSTALLED) from None
        if self.path is not None:
            append_line(self.path, wanted.line())
            self._size = self.path.stat().st_size
        self._charges.append(wanted)
        return True

    def spent(self, *, signal: bool = False) -> Spent:
        """All that was released of training triples; `signal`: of validation triples."""
        return _of(self.charges(), signal)

    def epsilon(self, delta: float) -> float:
        """What the cap guarantees; a ledger that is beyond it guarantees nothing, and is refused."""
        from tacit.privacy.accountant import converted

        if not all(self._within(self.charges(), signal=signal) for signal in (False, True)):
            raise BadInput(f"{self.path}: more was released than the cap of this run allows: the file is damaged.")
        return converted(self.cap.order, self.cap.divergence, delta)

    def _within(self, charges: list[Charge], *, signal: bool) -> bool:
        from tacit.privacy.accountant import Filter

        return Filter([(self.cap.order, self.cap.divergence)]).fits(_of(charges, signal))


def _of(charges: Iterable[Charge], signal: bool) -> Spent:
    return joined(s for charge in charges if (charge.what == "signal") == signal for s in charge.releases)


def cap_for(privatizer: Sound, rate: float, limits: Iterable[Iterable[float]] = ()) -> Cap:
    """The cap of a training at that rate, at the order that pays for the most steps with the first noise.

    `limits`: what is left of a holding, whose order it is then.
    """
    from tacit.privacy.accountant import Capped, curve

    if privatizer.sigma is None or privatizer.epsilon is None:
        raise TacitError("the noise of this training has not been solved for yet")
    left = tuple((order, most) for order, most in limits)
    orders, most = zip(*Capped(privatizer.epsilon, privatizer.delta, limits=left).budgets(), strict=True)
    try:
        once = curve(privatizer.once(), orders=orders)
        step = curve([Segment(privatizer.event(rate, privatizer.sigma))], orders=orders)
    except ModuleNotFoundError:
        raise TacitError(NOT_INSTALLED) from None
    room = (np.array(most) - once) / np.maximum(step, 1e-300)
    best = int(np.argmax(room))
    if not room[best] >= 1:
        raise TacitError(
            f"epsilon {privatizer.epsilon:g} does not pay for a single step: take more noise, or ask for more"
        )
    return Cap(float(orders[best]), float(most[best]))


def looks(settings: Settings) -> int:
    """How many times a training looks at its signal, at most, if nothing interrupts it."""
    return (settings.training.epochs - 1) // settings.evaluation.every


def noise_of_looks(settings: Settings, cap: Cap) -> float:
    """The noise multiplier of the paid signal with which all looks together cost what the cap allows."""
    return math.sqrt(looks(settings) * cap.order / (2 * cap.divergence)) * (1 + 1e-9)


# -- the signals -------------------------------------------------------------------------------------------------------


def unrestricted(split: Split) -> Ids:
    """The triples that are not marked confidential."""
    return split.triples if split.confidential is None else split.triples[~split.confidential]


def check_signal(privatizer: Sound, graph: Graph) -> None:
    """Refuse a graph that has no such signal."""
    if privatizer.noise_follows == "public" and not len(unrestricted(graph.valid)):
        raise TacitError(
            "no validation triple is public, so there is nothing to follow: leave some of them unmarked, or set "
            'privacy.noise_follows to "paid" or "steps"'
        )
    if privatizer.noise_follows == "paid":
        if not len(graph.valid):
            raise TacitError("there are no validation triples to look at: split some off, or set "
                             'privacy.noise_follows = "steps"')  # fmt: skip
        if np.isin(graph.keys(graph.valid.triples), graph.keys(graph.train.triples)).any():
            raise TacitError(
                "a triple is in training and in validation, and would cost both the steps and the looks: leave it out "
                'of one of them, or set privacy.noise_follows = "steps"'
            )


def questions(privatizer: Sound, graph: Graph) -> Questions:
    """What the signal asks of the rows, and which answers it leaves out: nothing protected decides that."""
    if privatizer.noise_follows == "public":
        return Questions(unrestricted(graph.valid), unrestricted(graph.statements))
    return Questions(graph.valid.triples, ())


def reciprocal_ranks(model: Model, asked: Questions, memory_mb: float) -> Any:
    """Of each triple one number in [0, 1], which no other triple that is asked for changes: the mean of both sides."""
    found = rank(model, asked, sides="both", memory_mb=memory_mb).of("realistic")
    return (1.0 / found).reshape(2, -1).mean(0)


def exact_sum(numbers: Any) -> float:
    """The sum of numbers in [0, 1], each rounded down to a multiple of 2**-30 so that no sum of them is rounded: one
    more or less moves it by 1 at most, to the last bit.
    """
    return float(np.floor(numbers * 2.0**30).sum() * 2.0**-30)


class Schedule:
    """When the noise of a training falls, and how long its cap lasts.

    Attributes
    ----------
    best
        The signal when it was last better than before.
    paid
        The first step of the epoch that was charged last, and how often the noise had fallen then.
    """

    def __init__(self, private: PrivateSteps, graph: Graph, ledger: Ledger, settings: Settings):
        self.private, self.privatizer, self.ledger, self.settings = private, private.privatizer, ledger, settings
        check_signal(self.privatizer, graph)
        self.asked = questions(self.privatizer, graph)
        self.size = rounded(len(self.asked.triples))
        self.best = -math.inf
        self.paid: tuple[int, int] | None = None

    def pays(self) -> bool:
        """Charge the steps of the next epoch; False: the cap does not allow them, and training ends."""
        private, limit = self.private, self.settings.training.steps
        first = int(private.cohort.steps[0])
        last = min(first + private.per_epoch[0], math.inf if limit is None else limit)
        releases = [*self.privatizer.segments(private.rates[0], first, int(last), private.falls)]
        if self.privatizer.degree_share and private.mask is None:
            assert self.privatizer.degree_sigma is not None
            releases.append(Segment(Gaussian(self.privatizer.degree_sigma)))
        if not self.ledger.charge("steps", first, releases):
            return False
        self.paid = (first, private.falls)
        return True

    def check_paid(self) -> None:
        """Refuse an epoch that was not charged."""
        if self.paid != (int(self.private.cohort.steps[0]), self.private.falls):
            raise TacitError("these steps have not been paid for: where noise follows a signal, use Fit.run")

    def look(self, model: Model) -> dict[str, Any]:
        """Ask for the signal, and let the noise fall if it is not better than ever before; what everybody may know.

        A noisy one is better if it is so by more than the deviation of a difference of two. With no budget left for a
        look the noise stays as it is.
        """
        value, privatizer, private = self.signal(model), self.privatizer, self.private
        paid = privatizer.noise_follows == "paid"
        if value is not None:
            if value > self.best + (math.sqrt(2) * (privatizer.signal_sigma or 0.0) if paid else 0.0):
                self.best = value
            elif privatizer.noise_falls**private.falls > privatizer.noise_least:
                private.falls += 1
        shown = None if value is None else value / self.size if paid else value
        return {"signal": shown, "noise": privatizer.multiplier(0, private.falls)}

    def signal(self, model: Model) -> float | None:
        """The public MRR, or the noisy sum, paid for first; None: it cannot be paid for."""
        privatizer, memory_mb = self.privatizer, self.settings.evaluation.memory_mb
        if privatizer.noise_follows == "public":
            return float(reciprocal_ranks(model, self.asked, memory_mb).mean())
        sigma, step = privatizer.signal_sigma, int(self.private.cohort.steps[0])
        if sigma is None:
            raise TacitError("the noise of this training has not been solved for yet")
        if not self.ledger.charge("signal", step, [Segment(Gaussian(sigma))]):
            return None
        exact = exact_sum(reciprocal_ranks(model, self.asked, memory_mb))
        noise = self.private.secret.normal(Purpose.NOISE_SIGNAL, self.private.layout.numbers[0], step, 1)
        return exact + sigma * float(noise[0])

    def state(self) -> dict[str, Any]:
        return {"schedule": torch.tensor([self.private.falls, self.best], dtype=torch.float64)}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state`; what was paid for since then is not taken back."""
        falls, self.best = state["schedule"].tolist()
        self.private.falls, self.paid = int(falls), None
