"""What a release costs, as data: the few kinds of releases whose cost is known.

The unit is one triple, and neighbours are graphs that differ by one triple more or less (or one group of at most `g` of
them). Whatever is released without such an event is not private.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from tacit.errors import BadInput, BadValue, excerpt


@dataclass(frozen=True)
class Gaussian:
    """A sum over all triples with normal noise; sigma: the noise's deviation over the sum's L2 sensitivity."""

    sigma: float

    def __post_init__(self) -> None:
        _check_positive("sigma", self.sigma)


@dataclass(frozen=True)
class Sampled:
    """All that is released from one Poisson batch: sums with normal noise, of these multipliers each.

    Several sums of one batch are one release, so they stand together here and are amplified once: as one Gaussian of
    (sum of sigma**-2)**-0.5. Adding the cost of each, amplified by itself, would understate it.
    """

    rate: float
    sigmas: tuple[float, ...]

    def __post_init__(self) -> None:
        if not 0 < self.rate <= 1:
            raise BadValue(f"rate is above 0 and at most 1, not {self.rate}")
        if not self.sigmas:
            raise BadValue("a release from a batch has at least one sum with noise")
        for sigma in self.sigmas:
            _check_positive("sigma", sigma)

    @property
    def sigma(self) -> float:
        """Of the one Gaussian that all of them are."""
        return float(sum(s**-2 for s in self.sigmas) ** -0.5)


@dataclass(frozen=True)
class SampledCurve:
    """A release from one Poisson batch that is no Gaussian: its Renyi divergence before sampling is rho x order, with
    probability 1 - delta. Amplified by the general bound (Zhu and Wang 2019), in its conservative form.
    """

    rate: float
    rho: float
    delta: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.rate <= 1:
            raise BadValue(f"rate is above 0 and at most 1, not {self.rate}")
        _check_positive("rho", self.rho)
        if not 0 <= self.delta < 1:
            raise BadValue(f"delta is at least 0 and below 1, not {self.delta}")


SMALLEST, LARGEST = 1e-9, 1 << 48
"""Noise beyond these bounds, or so many releases, is a mistake."""
Event = Gaussian | Sampled | SampledCurve
EVENTS: dict[str, type[Any]] = {"gaussian": Gaussian, "sampled": Sampled, "sampled-curve": SampledCurve}


@dataclass(frozen=True)
class Segment:
    """The same event so many times."""

    event: Event
    count: int = 1

    def __post_init__(self) -> None:
        if type(self.count) is not int or not 0 <= self.count < LARGEST:
            raise BadValue(f"a release happens a whole number of times, 0 or more, not {self.count}")

    def json(self) -> dict[str, Any]:
        """As `Segment.of` reads it."""
        name = next(name for name, kind in EVENTS.items() if type(self.event) is kind)
        return {"event": name} | asdict(self.event) | {"count": self.count}

    @staticmethod
    def of(values: Any) -> Segment:
        """What `json` wrote; an event that nobody knows how to account for is an error that names it."""
        name = values.get("event") if isinstance(values, Mapping) else None
        if not isinstance(name, str) or name not in EVENTS:
            raise BadInput(f"found {excerpt(repr(name))} as an event; the cost of these is known: {', '.join(EVENTS)}.")
        kind, given = EVENTS[name], {key: v for key, v in values.items() if key not in ("event", "count")}
        count = values.get("count")
        if type(count) is not int or given.keys() != kind.__dataclass_fields__.keys():
            raise BadInput(
                f"found {excerpt(repr(dict(values)))}; expected a release of {values['event']} and its count."
            )
        try:
            numbers: dict[str, Any] = {
                key: tuple(map(_number, v)) if isinstance(v, list | tuple) else _number(v) for key, v in given.items()
            }
            return Segment(kind(**numbers), count)
        except (BadValue, TypeError, ValueError, OverflowError) as error:
            raise BadInput(f"found {excerpt(repr(dict(values)))}: {error}.") from None


Spent = tuple[Segment, ...]


def joined(segments: Iterable[Segment]) -> Spent:
    """Equal events together, in a fixed order; nothing that happened 0 times."""
    total: dict[Event, int] = {}
    for segment in segments:
        total[segment.event] = total.get(segment.event, 0) + segment.count
    found = [Segment(event, count) for event, count in total.items() if count]
    return tuple(sorted(found, key=lambda s: (type(s.event).__name__, repr(s.event))))


def less(whole: Iterable[Segment], part: Iterable[Segment]) -> Spent:
    """What is in `whole` beyond `part`."""
    had = {segment.event: segment.count for segment in joined(part)}
    return joined(Segment(s.event, max(0, s.count - had.get(s.event, 0))) for s in joined(whole))


class Register:
    """What a training has released, by the step whose batch it came from.

    A step's batch can be registered once. Two releases from one batch are one event (`Sampled` with two sigmas), and
    two events would be amplified apart, which is no bound.
    """

    def __init__(self) -> None:
        self._segments: list[Segment] = []
        self._upto = 0

    def once(self, event: Event) -> None:
        """A release that is no step's."""
        if isinstance(event, Sampled | SampledCurve):
            raise BadValue("a release from a batch belongs to a step: say which")
        self._segments.append(Segment(event))

    def steps(self, first: int, last: int, event: Event) -> None:
        """Steps first to last (not included) released `event` each."""
        if first < self._upto:
            raise BadValue(
                f"the batch of step {first} has been released from already: all that is released from one batch is one "
                "event, with all of its sigmas"
            )
        if last < first:
            raise BadValue(f"steps {first} to {last} are none")
        self._segments.append(Segment(event, last - first))
        self._upto = last

    @property
    def spent(self) -> Spent:
        return joined(self._segments)


def _check_positive(name: str, value: float) -> None:
    if not (isinstance(value, float | int) and SMALLEST <= value < LARGEST):
        raise BadValue(f"{name} is a number above 0 of a size that can be, not {value}")


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadValue(f"{excerpt(repr(value))} is no number")
    return float(value)
