"""What a training will release, solved before it begins: noise, rates, steps; and what that means in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tacit.graph import Graph
from tacit.privacy.events import Spent, joined, times
from tacit.privacy.privatizers import Confidential, Sound
from tacit.privacy.steps import public_numbers
from tacit.settings import Settings

NOT_COVERED = (
    "the names of entities and relations: they are taken to be public, and every name has a row",
    "how many triples there are, to two digits, unless privacy.size says a public number",
    "the choice of settings: trying several on the same triples costs each time",
    "what the owner does with the metrics in private/: they are computed from the triples without noise",
)
WITHOUT_BUDGET = "other trainings on the same triples: no holding keeps account of them (tacit budget open)"


def steps_of(settings: Settings, graphs: Sequence[Graph], epochs: int | None = None) -> tuple[list[float], list[int]]:
    """Each party's sampling rate and number of steps, as far as everybody may know them."""
    privatizer = settings.privacy
    assert isinstance(privatizer, Sound)
    _, rates, per_epoch = public_numbers(privatizer, graphs, settings.training.batch)
    steps = [(epochs or settings.training.epochs) * each for each in per_epoch]
    if settings.training.steps is not None:
        steps = [min(many, settings.training.steps) for many in steps]
    return rates, steps


def solved(
    settings: Settings, graphs: Sequence[Graph], *, epochs: int | None = None, limits: Sequence[Sequence[float]] = ()
) -> Settings:
    """The same settings with all noise known. `limits`: what is left of a holding."""
    privatizer = settings.privacy
    if not isinstance(privatizer, Sound):
        return settings
    rates, steps = steps_of(settings, graphs, epochs) if privatizer.trains else ([1.0], [0])
    return replace(settings, privacy=privatizer.solved(rates, steps, limits))


def releases(settings: Settings, graphs: Sequence[Graph], *, epochs: int | None = None) -> list[Spent]:
    """All that each party will have released in the end."""
    privatizer = settings.privacy
    assert isinstance(privatizer, Sound)
    if not privatizer.trains:
        return [privatizer.whole(1.0, 0)] * len(graphs)
    rates, steps = steps_of(settings, graphs, epochs)
    return [privatizer.whole(rate, many) for rate, many in zip(rates, steps, strict=True)]


def again(
    settings: Settings, graphs: Sequence[Graph], starts: Sequence[int], every: int, *, epochs: int | None = None
) -> list[Spent]:
    """What each party may have released twice: a resumed training has new noise, and takes steps again.

    `starts`: the epochs (of each start) after which training began or went on. Between one start and the next, no more
    can have been lost than what lies between two checkpoints, `every` so many epochs.
    """
    privatizer = settings.privacy
    assert isinstance(privatizer, Sound)
    if privatizer.noise == "seeded" or not privatizer.trains or len(starts) < 2:
        return [()] * len(graphs)
    rates, steps = steps_of(settings, graphs, epochs)
    each = [many // (epochs or settings.training.epochs) for many in steps]
    found = []
    for rate, many, per_epoch in zip(rates, steps, each, strict=True):
        twice = [
            segment
            for first in starts[1:]
            for segment in privatizer.segments(
                rate, min(many, first * per_epoch), min(many, (first + every) * per_epoch)
            )
        ]
        found.append(joined([*twice, *(privatizer.once() if 0 in starts[1:] else ())]))
    return found


def statement(
    settings: Settings, spent: Sequence[Spent], *, holders: int = 1, budget: dict[str, Any] | None = None
) -> dict[str, Any]:
    """What is guaranteed, as `shareable/privacy.json` has it: computed from the releases, never from what was asked.

    `holders`: how many parties may hold the same triple. Parties whose triples are disjoint do not add up.
    """
    from tacit.privacy.accountant import epsilon

    privatizer = settings.privacy
    assert isinstance(privatizer, Sound)
    simulated, missing = privatizer.noise == "seeded", False
    try:
        found = [epsilon(times(each, holders), privatizer.delta) for each in spent]
    except ModuleNotFoundError:
        found, missing = [], True
    unit = "one triple" if privatizer.unit == "triple" else f"one group of at most {privatizer.group} triples"
    whose = "of those marked confidential" if isinstance(privatizer, Confidential) else "of a party's training triples"
    claim = {
        "guarantee": "none: a simulation" if simulated else "differential privacy",
        "epsilon": None if simulated or missing else max(found),
        "delta": privatizer.delta,
        "unit": f"{unit} {whose}",
        "neighbours": f"graphs that differ by {unit}, more or less, over the same names",
        "mechanism": settings.json()["privacy"],
        "accountant": "dp-accounting: the smaller of PLD and RDP",
        "by_party": [None if simulated else each for each in found],
        "releases": [[segment.json() for segment in each] for each in spent],
        "composition": "Parties whose triples are disjoint: the largest of their epsilons holds for everyone. "
        f"A triple that several hold costs each of them; counted here: {holders}.",
        "covers": "everything in shareable/, every message to others, and whatever is computed from these",
        "not_covered": [*NOT_COVERED, *([] if budget else [WITHOUT_BUDGET])],
        "budget": budget,
    }
    if missing:
        claim["why"] = "dp-accounting is not installed here; where it is, opening the run says what it costs."
    elif simulated:
        claim["why"] = "The noise follows a seed: whoever knows it can take the noise away."
        claim["simulated_epsilon"] = max(found)
    return claim


def in_words(claim: dict[str, Any]) -> str:
    """The statement in two sentences."""
    if claim["epsilon"] is None and "simulated_epsilon" not in claim:
        return f"Its cost is not known here: {claim['why']}"
    if claim["epsilon"] is None:
        shown = claim.get("simulated_epsilon")
        return f"A simulation: no guarantee. With secret noise: epsilon {shown:.3g} at delta {claim['delta']:g}."
    return (
        f"Private: epsilon {claim['epsilon']:.3g} at delta {claim['delta']:g} for {claim['unit']}. "
        f"Not covered: {'; '.join(claim['not_covered'])}."
    )
