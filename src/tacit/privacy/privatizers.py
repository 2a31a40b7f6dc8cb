"""What protects the triples of a training: which batches are drawn, how sums are clipped, where noise goes, its cost.

A privatizer's fields are public configuration and never data. Every one of them is sound as `docs/privacy.md` says: the
unit is a triple, or a group of triples up to a public bound, and neighbours have one unit more or less. The vocabulary
is public.

    marginals      noisy counts of (relation, role, entity), once; nothing is trained (the default)
    dpsgd          S1: one joint clip of all rows a unit touches, noise on every row (Abadi et al. 2016)
    frozen         S2: rows of few triples, by noisy degrees, stay as they are (DP-FEST, Ghazi et al. 2023)
    adafest        S3: a step moves rows whose noisy count of touches is high (DP-AdaFEST, Ghazi et al. 2023)
    confidential   DPKGE (Han et al. 2022), made sound: steps on confidential statements as dpsgd, others as they are
    repaired-flames  DP-FLames (Hu et al. 2023), made sound: a noisy gap chooses rows; for comparison only

Two more run as the papers print them, for replication, if `mode = "published"` says so. They guarantee nothing:

    dp-flames, dpkge
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from tacit.errors import BadValue
from tacit.privacy.events import Event, Gaussian, Register, Sampled, SampledCurve, Segment, Spent, joined
from tacit.privacy.published import (
    FLAMES_ORDERS,
    GAUSSIAN_ORDERS,
    converted_as_then,
    dpflames_curve,
    sampled_gaussian,
)
from tacit.privacy.selection import Selection


@dataclass(frozen=True)
class Privatizer:
    """Base of the ways to protect triples, and of not doing so."""

    sound: ClassVar[bool] = False
    """Whether an epsilon may be claimed."""
    trains: ClassVar[bool] = True


@dataclass(frozen=True)
class NoPrivacy(Privatizer):
    """Nothing is protected: rows tell of the triples they were trained on."""


@dataclass(frozen=True)
class Sound(Privatizer):
    """What all sound ones have in common.

    Attributes
    ----------
    epsilon, delta
        What all that is released may cost; the noise is solved for it, unless `sigma` is given.
    sigma
        The noise of a step over the clip, or of the counts over their sensitivity.
    clip
        The largest norm of a unit's gradient.
    relation_scale
        What the relation's part of a gradient is multiplied by before it is clipped.
    unit, group
        What is protected: a triple, or a group of at most so many.
    size
        A public number of units; default: the true one, rounded to two digits. Rates and numbers of steps follow it.
    prior_share
        The share of the budget that goes to noisy counts, which are then added to every score.
    prior_sigma
        Their noise; default: solved.
    degree_share
        The share that goes to noisy degrees of protected triples, once: entity rows below a threshold stay as they are
        in private steps, and get no noise.
    degree_sigma, keep
        Their noise, default: solved; the threshold, default: where the signal of so many triples equals the noise.
    noise
        system: from the operating system, and never kept. seeded: a simulation, which protects nothing.
    noise_falls, noise_every
        A fixed schedule: every so many steps the noise is multiplied by this.
    noise_follows
        steps: the fixed schedule. public, paid: the noise is multiplied by `noise_falls` each time a signal has not
        become better, by public triples or by a noisy sum over validation triples (`tacit.privacy.schedule`).
    noise_least
        The share of the first noise below which it does not fall by a signal.
    signal_sigma
        The noise of the paid signal over its sensitivity; default: what the looks at it may cost in all.
    """

    has_public: ClassVar[bool] = False
    """Whether some of the triples are public."""
    sound: ClassVar[bool] = True
    epsilon: float | None = None
    delta: float = 1e-5
    sigma: float | None = None
    clip: float = 1.0
    relation_scale: float = 1.0
    unit: Literal["triple", "group"] = "triple"
    group: int = 1
    size: int | None = None
    prior_share: float = 0.0
    prior_sigma: float | None = None
    degree_share: float = 0.0
    degree_sigma: float | None = None
    keep: float | None = None
    noise: Literal["system", "seeded"] = "system"
    noise_falls: float = 1.0
    noise_every: int = 1000
    noise_follows: Literal["steps", "public", "paid"] = "steps"
    noise_least: float = 0.5
    signal_sigma: float | None = None

    def __post_init__(self) -> None:
        for name in ("epsilon", "sigma", "clip", "relation_scale", "prior_sigma", "signal_sigma"):
            if (value := getattr(self, name)) is not None and not (value > 0 and math.isfinite(value)):
                raise BadValue(f"{name} is a number above 0, not {value}")
        if not 0 < self.delta < 1:
            raise BadValue(f"delta is above 0 and below 1, not {self.delta}")
        if self.group < 1 or (self.size is not None and self.size < 1) or self.noise_every < 1:
            raise BadValue("group, size and noise_every are at least 1")
        if self.unit == "triple" and self.group != 1:
            raise BadValue('a group is for privacy.unit = "group"')
        if self.prior_share < 0 or self.degree_share < 0 or not self.prior_share + self.degree_share < 1:
            raise BadValue("prior_share and degree_share are at least 0, and leave something for the steps")
        if (self.prior_share or self.degree_share) and self.unit == "group":
            raise BadValue("noisy counts and degrees are of triples: leave out their shares, or protect triples")
        if not 0 < self.noise_falls <= 1:
            raise BadValue(f"noise_falls is above 0 and at most 1, not {self.noise_falls}")
        if self.epsilon is None and self.sigma is None:
            raise BadValue("say how much may be spent (privacy.epsilon), or which noise to take (privacy.sigma)")
        if not 0 < self.noise_least <= 1:
            raise BadValue(f"noise_least is above 0 and at most 1, not {self.noise_least}")
        if self.signal_sigma is not None and self.noise_follows != "paid":
            raise BadValue('signal_sigma is for privacy.noise_follows = "paid"')
        if self.adaptive and (reason := self._no_signal()):
            raise BadValue(reason)

    @property
    def adaptive(self) -> bool:
        """Whether the noise follows what was released before."""
        return self.noise_follows != "steps"

    def _no_signal(self) -> str | None:
        """Why the noise cannot follow the signal that is asked for."""
        if not self.trains:
            return 'nothing is trained whose noise could fall: set privacy.noise_follows = "steps"'
        if self.epsilon is None:
            return "a schedule that follows a signal ends where a cap does: set privacy.epsilon"
        if self.noise_falls == 1:
            return "say what the noise is multiplied by when the signal stays: privacy.noise_falls below 1"
        if self.noise_follows == "public" and not self.has_public:
            return (
                "nothing is public here that a schedule could follow: mark statements (tacit data mark) and set "
                'privacy.name = "confidential", or set privacy.noise_follows to "paid" or "steps"'
            )
        if self.noise_follows == "paid" and self.unit == "group":
            return (
                "a group may have triples in training and in validation, and the paid signal is counted by triples: "
                'set privacy.unit = "triple", or privacy.noise_follows = "steps"'
            )
        return None

    # -- what it costs -------------------------------------------------------------------------------------------------

    def shares(self) -> dict[str, float]:
        """Fields of noise multipliers for what is released once before training, and their shares of the budget."""
        found = {"prior_sigma": self.prior_share, "degree_sigma": self.degree_share}
        return {name: share for name, share in found.items() if share}

    def once(self) -> list[Segment]:
        """What is released before training."""
        found = [getattr(self, name) for name in self.shares()]
        if any(sigma is None for sigma in found):
            raise BadValue("the noise of this privatizer has not been solved for yet")
        return [Segment(Gaussian(sigma)) for sigma in found]

    def event(self, rate: float, sigma: float) -> Event:
        """What one step releases."""
        return Sampled(rate, (sigma,))

    def private_steps(self, steps: int) -> int:
        """How many of so many steps look at protected triples."""
        return steps

    def steps_of(self, batches: int) -> int:
        """How many steps an epoch has that goes through so many batches of protected triples."""
        return batches

    def multiplier(self, step: int, falls: int = 0) -> float:
        """The noise of a step, by the fixed schedule, or after it has fallen so many times by a signal."""
        assert self.sigma is not None
        if self.adaptive:
            return self.sigma * max(self.noise_least, self.noise_falls**falls)
        return self.sigma * self.noise_falls ** (step // self.noise_every)

    def segments(self, rate: float, first: int, last: int, falls: int = 0) -> Spent:
        """What steps first to last (not included) release, at a sampling rate."""
        register, step, constant = Register(), first, self.noise_falls == 1 or self.adaptive
        while step < last:
            end = last if constant else min(last, (step // self.noise_every + 1) * self.noise_every)
            event = self.event(rate, self.multiplier(step, falls))
            register.steps(self.private_steps(step), self.private_steps(end), event)
            step = end
        return register.spent

    def whole(self, rate: float, steps: int) -> Spent:
        """All that a training of so many steps releases."""
        return joined([*self.once(), *(self.segments(rate, 0, steps) if self.trains else ())])

    def threshold_of(self, dim: int, rate: float, steps: int) -> float:
        """The least noisy degree of a row that is worth its noise."""
        assert self.sigma is not None
        many = max(1, self.private_steps(steps))
        return self.keep if self.keep is not None else math.sqrt(2 * dim) * self.sigma / (math.sqrt(many) * rate)

    def public_size(self, units: int) -> int:
        """The number of units that rates and steps follow."""
        return self.size if self.size is not None else rounded(units)

    def solved(
        self, rates: Sequence[float], steps: Sequence[int], limits: Sequence[Sequence[float]] = (), holders: int = 1
    ) -> Sound:
        """The same with all noise known: enough for every party. `limits`: what is left of a holding, by orders.

        `holders`: how many parties hold the same triple, or group, at most.
        """
        from tacit.privacy.accountant import Capped, HeldBy, Target, noise_for

        if self.epsilon is None:
            if any(getattr(self, name) is None for name in self.shares()):
                raise BadValue("without privacy.epsilon the noise of every release has to be given")
            return self
        left = tuple((a, b) for a, b in limits)
        target = (Capped if self.adaptive else Target)(self.epsilon, self.delta, limits=left)
        if holders > 1:
            target = HeldBy(self.epsilon, self.delta, limits=left, holders=holders)
        chosen = self
        if missing := {name: share for name, share in self.shares().items() if getattr(self, name) is None}:
            least = noise_for(target, lambda sigma: [Segment(Gaussian(sigma))])
            found = {name: least / math.sqrt(share) for name, share in missing.items()}
            chosen = replace(chosen, **found)  # type: ignore[arg-type]
        if chosen.sigma is not None:
            return chosen

        def release(sigma: float, rate: float, many: int) -> Spent:
            return replace(chosen, sigma=sigma).whole(rate, many)

        needed = {
            (rate, many): noise_for(target, lambda sigma, rate=rate, many=many: release(sigma, rate, many))  # type: ignore[misc]
            for rate, many in set(zip(rates, steps, strict=True))
        }
        return replace(chosen, sigma=max(needed.values()))


@dataclass(frozen=True)
class Marginals(Sound):
    """S4: how often each entity is head and tail of each relation, with noise, released once; nothing is trained.

    One triple moves two counts by 1. The counts, smoothed, are the score: what every private embedding has to beat.
    vectors: make rows of RESCAL of them instead, of the settings' dim.
    """

    trains: ClassVar[bool] = False
    vectors: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prior_share or self.degree_share or self.unit == "group":
            raise BadValue("noisy counts are all that is released, and their unit is the triple")

    def shares(self) -> dict[str, float]:
        return {"sigma": 1.0}


@dataclass(frozen=True)
class DPSGD(Sound):
    """S1: a Poisson batch, one norm over all rows a unit touches in both tables, noise on every row of both."""


@dataclass(frozen=True)
class FrozenRows(DPSGD):
    """S2: before training, noisy degrees decide which entity rows move at all; noise goes to those alone."""

    degree_share: float = 0.02


@dataclass(frozen=True)
class AdaFEST(Sound):
    """S3: of each batch a noisy count of touches is released too, and only rows above a threshold move.

    select_share: of 1 / sigma**2, for the counts. threshold: in deviations of their noise. It makes uploads small; it
    does not make them better (`docs/privacy.md`).
    """

    select_share: float = 0.1
    threshold: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.select_share < 1:
            raise BadValue(f"select_share is above 0 and below 1, not {self.select_share}")
        if self.unit == "group" or self.degree_share:
            raise BadValue("touches are counted by triples, in each batch: use dpsgd for groups, and no degree_share")

    def apart(self, sigma: float) -> tuple[float, float]:
        """The multipliers of the counts' and the sums' noise, which together cost as much as one `sigma`."""
        return sigma / math.sqrt(self.select_share), sigma / math.sqrt(1 - self.select_share)

    def event(self, rate: float, sigma: float) -> Event:
        return Sampled(rate, self.apart(sigma))


@dataclass(frozen=True)
class Confidential(Sound):
    """DPKGE: statements that are marked confidential train by noisy steps, unrestricted ones by plain ones.

    public_ratio: plain steps for each noisy one, in an order that follows nothing but their number. Only confidential
    triples are protected; unrestricted ones are public. optimizers: 2: either kind of steps has one, which remembers
    nothing of the other's, so that noise does not make plain steps small.
    """

    has_public: ClassVar[bool] = True
    public_ratio: float = 1.0
    optimizers: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.optimizers not in (1, 2):
            raise BadValue(f"optimizers is 1 or 2, not {self.optimizers}")
        if not (self.public_ratio >= 0 and math.isfinite(self.public_ratio)):
            raise BadValue(f"public_ratio is at least 0, not {self.public_ratio}")

    def private_steps(self, steps: int) -> int:
        return math.ceil(steps / (1 + self.public_ratio))

    def steps_of(self, batches: int) -> int:
        return math.ceil(batches * (1 + self.public_ratio))

    def is_private(self, step: int) -> bool:
        """Whether a step is one on confidential triples."""
        return self.private_steps(step + 1) > self.private_steps(step)


@dataclass(frozen=True)
class RepairedFLames(Sound):
    """DP-FLames with the noise that its selection takes; kept for comparison.

    Positives alone are protected, and negatives are of random triples. The test passes about as often as it may err, so
    that entity rows learn next to nothing of the positives (`docs/published.md`); relation rows have noise of their own
    in each step.

    row_clip: the most that a triple moves an entity row. sigma_r, sigma_p: noise of the gaps and of the test, in units
    of `sigma`. delta_t: how often a test may be wrong.
    """

    clip: float = 1.2
    row_clip: float = 0.8
    sigma_r: float = 1.0
    sigma_p: float = 1.0
    delta_t: float = 1e-11

    def __post_init__(self) -> None:
        super().__post_init__()
        self.selection(1.0)
        if self.unit == "group" or self.degree_share or self.prior_share or self.adaptive:
            raise BadValue(
                "rows are selected by triples, in each batch: for groups, degree_share, prior_share and noise that "
                "follows a signal use dpsgd"
            )

    def selection(self, sigma: float) -> Selection:
        """How rows are chosen at a step's noise."""
        return Selection(self.row_clip, self.sigma_r * sigma, self.sigma_p * sigma, self.delta_t, repaired=True)

    def event(self, rate: float, sigma: float) -> Event:
        return SampledCurve(rate, self.selection(sigma).divergence + 1 / (2 * sigma**2), self.delta_t)


@dataclass(frozen=True)
class Published(Privatizer):
    """Base of what runs as a paper prints it: for replication, with no formal guarantee.

    mode: "published", or it is refused. sigma, delta: of the paper. Noise follows the seed, so that a run can be
    repeated.
    """

    why: ClassVar[str]
    """Why nothing is guaranteed, in a sentence or two."""
    orders: ClassVar[Sequence[float]]
    """At which the paper's accounting counts."""
    mode: Literal["sound", "published"] = "sound"
    sigma: float = 1.0
    delta: float = 1e-5

    def __post_init__(self) -> None:
        if self.mode != "published":
            raise BadValue(
                f'this mechanism has no formal guarantee ({self.why}). Set privacy.mode = "published" to replicate the '
                'paper with it; to protect anything, use a sound one: privacy.name = "marginals" or "dpsgd"'
            )
        if not (self.sigma > 0 and math.isfinite(self.sigma)):
            raise BadValue(f"sigma is a number above 0, not {self.sigma}")
        if not 0 < self.delta < 1:
            raise BadValue(f"delta is above 0 and below 1, not {self.delta}")

    def cost(self, rate: float, sigma: float, steps: int, released: float) -> Sequence[float]:
        """What the paper says that steps cost at its orders, of which so many released something."""
        raise NotImplementedError

    def accounted(self, curve: Sequence[float]) -> float:
        """The epsilon that the paper makes of it: "published accounting", and no claim."""
        return converted_as_then(self.orders, curve, self.delta)


@dataclass(frozen=True)
class DPFLames(Published):
    """DP-FLames as printed (Hu et al. 2023), misprints resolved as `docs/published.md` says.

    Attributes
    ----------
    published_epsilon
        Training ends where the paper's own accounting has reached this; default: it does not end it.
    clip, row_clip, sigma_r, sigma_p
        C1, C2, and the noise of the gaps and of the test.
    delta_t
        How often the test may be wrong; the paper has no figure for it.
    test
        False: selected rows are released whatever the test says (the variant `published-no-test`).
    pairs
        Where (head, relation) of negatives are from: validation triples, taken to be public; training triples; or they
        are random.
    follows
        Adp: the noise is multiplied by `falls` whenever a party's validation MRR grew by less than `least`
        (validation), or every `every` epochs (epochs).
    """

    why = (
        "one triple moves a gap by twice what its noise is made for, the relations have no noise at all, and one batch "
        "is amplified as if it were two"
    )
    orders = FLAMES_ORDERS
    published_epsilon: float | None = None
    clip: float = 1.2
    row_clip: float = 0.8
    sigma_r: float = 1.0
    sigma_p: float = 1.0
    delta_t: float = 1e-11
    test: bool = True
    pairs: Literal["validation", "training", "random"] = "validation"
    follows: Literal["nothing", "validation", "epochs"] = "nothing"
    falls: float = 0.95
    least: float = 0.001
    every: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        self.selection()
        if not self.clip > 0:
            raise BadValue(f"clip is a number above 0, not {self.clip}")
        if not 0 < self.falls <= 1 or self.every < 1:
            raise BadValue("falls is above 0 and at most 1, and every at least 1")
        if self.published_epsilon is not None and not self.published_epsilon > 0:
            raise BadValue(f"published_epsilon is a number above 0, not {self.published_epsilon}")

    def selection(self) -> Selection:
        return Selection(self.row_clip, self.sigma_r, self.sigma_p, self.delta_t, tests=self.test)

    def cost(self, rate: float, sigma: float, steps: int, released: float) -> Sequence[float]:
        return dpflames_curve(rate, sigma, steps, released, sigma_r=self.sigma_r, sigma_p=self.sigma_p)

    def accounted(self, curve: Sequence[float]) -> float:
        return converted_as_then(self.orders, curve, self.delta / 2)


@dataclass(frozen=True)
class DPKGE(Published):
    """DPKGE as printed (Han et al. 2022): `confidential` is what is sound of it.

    Attributes
    ----------
    percentile
        The clip is that percentile of the batch's norms, unless `clip` gives one.
    delta
        The paper has 1 / the number of training triples.
    optimizers
        2: confidential and unrestricted batches have an optimizer each, which remembers nothing of the other's
        gradients. The paper has one, and its figures look like two (`docs/papers/dpkge.md`).
    """

    why = (
        "noise goes only to rows that the batch touched, so that rows that move tell of it; a triple and its negative "
        "are clipped apart, and the clip and the order of batches follow the data"
    )
    orders = GAUSSIAN_ORDERS
    percentile: float = 20.0
    clip: float | None = None
    optimizers: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.optimizers not in (1, 2):
            raise BadValue(f"optimizers is 1 or 2, not {self.optimizers}")
        if not 0 < self.percentile <= 100:
            raise BadValue(f"percentile is above 0 and at most 100, not {self.percentile}")
        if self.clip is not None and not self.clip > 0:
            raise BadValue(f"clip is a number above 0, not {self.clip}")

    def cost(self, rate: float, sigma: float, steps: int, released: float) -> Sequence[float]:
        return [released * each for each in sampled_gaussian(rate, sigma)]


def rounded(units: int) -> int:
    """To two digits, below 1,000 to one; at least 10."""
    digits = max(1, len(str(max(units, 1))) - (2 if units >= 1000 else 1))
    return max(10, int(round(units / 10**digits) * 10**digits))


PRIVATIZERS: dict[str, type[Privatizer]] = {
    "none": NoPrivacy,
    "marginals": Marginals,
    "dpsgd": DPSGD,
    "frozen": FrozenRows,
    "adafest": AdaFEST,
    "confidential": Confidential,
    "repaired-flames": RepairedFLames,
    "dp-flames": DPFLames,
    "dpkge": DPKGE,
}
DEFAULT = "marginals"
"""What an epsilon without a name means: none of the others is known to be better at the same epsilon."""
