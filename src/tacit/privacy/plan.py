"""What a training will release, solved before it begins: noise, rates, steps; and what that means in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tacit.errors import TacitError
from tacit.graph import Graph
from tacit.privacy.events import Spent, joined
from tacit.privacy.privatizers import Confidential, Sound
from tacit.privacy.schedule import Cap, Ledger, cap_for, noise_of_looks
from tacit.privacy.steps import public_numbers
from tacit.settings import Settings

Position = tuple[str, int]
"""("start" or "saved", after how many epochs)."""
NOT_COVERED = (
    "the names of entities and relations: they are taken to be public, and every name has a row",
    "about how many triples there are, to one or two digits, unless privacy.size is a public number",
    "the choice of settings: trying several on the same triples costs each time",
    "what the owner does with the metrics in private/: they are computed from the triples without noise",
)
CAPPED = (
    "The noise followed a signal, so the epsilon is a cap that was fixed before training: nothing was released that "
    "would have exceeded it, and what was used, which is less, is no guarantee."
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
    settings: Settings,
    graphs: Sequence[Graph],
    *,
    epochs: int | None = None,
    limits: Sequence[Sequence[float]] = (),
    holders: int = 1,
) -> Settings:
    """The same settings with all noise known. `limits`: what is left of a holding. `holders`: see `statement`."""
    privatizer = settings.privacy
    if not isinstance(privatizer, Sound):
        return settings
    rates, steps = steps_of(settings, graphs, epochs) if privatizer.trains else ([1.0], [0])
    settings = replace(settings, privacy=(found := privatizer.solved(rates, steps, limits, holders)))
    if found.noise_follows == "paid" and found.signal_sigma is None:
        sigma = noise_of_looks(settings, cap_of(settings, graphs[0], limits))
        settings = replace(settings, privacy=replace(found, signal_sigma=sigma))
    return settings


def cap_of(settings: Settings, graph: Graph, limits: Sequence[Sequence[float]] = ()) -> Cap:
    """The cap of a training whose noise follows a signal. `limits`: what is left of a holding."""
    assert isinstance(settings.privacy, Sound)
    _, rates, _ = public_numbers(settings.privacy, [graph], settings.training.batch)
    return cap_for(settings.privacy, rates[0], limits)


def releases(settings: Settings, graphs: Sequence[Graph], *, epochs: int | None = None) -> list[Spent]:
    """All that each party will have released in the end."""
    privatizer = settings.privacy
    assert isinstance(privatizer, Sound)
    if not privatizer.trains:
        return [privatizer.whole(1.0, 0)] * len(graphs)
    rates, steps = steps_of(settings, graphs, epochs)
    return [privatizer.whole(rate, many) for rate, many in zip(rates, steps, strict=True)]


def again(
    settings: Settings, graphs: Sequence[Graph], journal: Sequence[Position], every: int, *, epochs: int | None = None
) -> list[Spent]:
    """What each party may have released twice: a resumed training has new noise, and takes steps again.

    `journal`: where training began or went on, and where it was saved, in epochs (`run.note`). One that goes on at some
    point was interrupted not later than `every` epochs after the last point that it was saved at.
    """
    privatizer = settings.privacy
    assert isinstance(privatizer, Sound)
    windows, furthest, begun = [], 0, False
    for kind, at in journal:
        if kind == "saved":
            furthest = max(furthest, at)
            continue
        if begun:
            windows.append((at, max(at, furthest) + every))
        begun, furthest = True, at
    if privatizer.noise == "seeded" or not privatizer.trains or not windows:
        return [()] * len(graphs)
    _, rates, per_epoch = public_numbers(privatizer, graphs, settings.training.batch)
    _, steps = steps_of(settings, graphs, epochs)
    found = []
    for rate, many, each in zip(rates, steps, per_epoch, strict=True):
        twice = [
            segment
            for first, last in windows
            for segment in privatizer.segments(rate, min(many, first * each), min(many, last * each))
        ]
        found.append(joined([*twice, *(privatizer.once() if any(first == 0 for first, _ in windows) else ())]))
    return found


def statement(
    settings: Settings,
    spent: Sequence[Spent],
    *,
    holders: int = 1,
    budget: dict[str, Any] | None = None,
    ledger: Ledger | None = None,
) -> dict[str, Any]:
    """What is guaranteed, as `shareable/privacy.json` has it: computed from the releases, never from what was asked.

    `holders`: how many parties hold the same triple at most, or have triples of the same group where groups are
    protected, as everybody may know. Parties that share none do not add up. `ledger`: of noise that followed a signal;
    what is guaranteed then is its cap, not what was used.
    """
    from tacit.privacy.accountant import held_by

    privatizer = settings.privacy
    assert isinstance(privatizer, Sound)
    if privatizer.adaptive and ledger is None:
        raise TacitError("where noise follows a signal, what was released guarantees nothing without its ledger")
    simulated, missing = privatizer.noise == "seeded", False
    try:
        found = held_by(spent, holders, privatizer.delta) if ledger is None else [ledger.epsilon(privatizer.delta)]
    except ModuleNotFoundError:
        found, missing = [], True
    unit = "one triple" if privatizer.unit == "triple" else f"one group of at most {privatizer.group} triples"
    kind = "triples" if privatizer.unit == "triple" else "groups"
    whose = "of those marked confidential" if isinstance(privatizer, Confidential) else "of a party's training triples"
    if privatizer.noise_follows == "paid":
        whose += (
            ", in training or validation" if isinstance(privatizer, Confidential) else ", or of its validation triples"
        )
    within = "in one of the splits, " if privatizer.noise_follows == "paid" else ""
    claim = {
        "guarantee": "none: a simulation" if simulated else "differential privacy",
        "epsilon": None if simulated or missing else max(found),
        "delta": privatizer.delta,
        "unit": f"{unit} {whose}",
        "neighbours": f"graphs that differ by {unit}, more or less, {within}over the same names",
        "mechanism": settings.json()["privacy"],
        "accountant": "dp-accounting: the smaller of PLD and RDP",
        "by_party": [None if simulated else each for each in found],
        "releases": [[segment.json() for segment in each] for each in spent],
        "composition": f"Parties whose {kind} are disjoint: the largest of their epsilons holds for everyone. "
        f"A {privatizer.unit} that several hold costs each of them; taken here to be {holders} at most, which between "
        "parties over a network nobody can check.",
        "covers": "everything in shareable/, every message to others, and whatever is computed from these",
        "not_covered": [*NOT_COVERED, *([] if budget else [WITHOUT_BUDGET])],
        "budget": budget,
    }
    if ledger is not None:
        order, most = ledger.cap.order, ledger.cap.divergence
        claim["accountant"] = "a filter of Renyi divergences (Feldman and Zrnic 2021), by dp-accounting"
        claim["cap"] = {"order": order, "divergence": most, "why": CAPPED}
        claim["signal"] = [segment.json() for segment in ledger.spent(signal=True)]
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
        f"Private: epsilon {claim['epsilon']:.3g} at delta {claim['delta']:g} for {claim['unit']}"
        f"{', a cap fixed before training by a filter' if 'cap' in claim else ''}. "
        f"Not covered: {'; '.join(claim['not_covered'])}."
    )
