"""The map: each way for parties to learn, as a composition of the same few parts.

local      each party alone: what it can do without the others
central    all triples in one place: what no one may do, and what federation is to come near
fede       entity rows are shared and averaged (Chen et al. 2021)
fedr       relation rows are shared and averaged; entities never leave (Zhang et al. 2022)
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from tacit.errors import TacitError
from tacit.examples import Examples
from tacit.federated import Federation, Together
from tacit.federation.aggregation import Part
from tacit.federation.star import FEW_SHARED, Star
from tacit.federation.transcript import Transcript
from tacit.graph import Graph
from tacit.negatives import PublicPairs
from tacit.parties import Parties, pool
from tacit.settings import Settings
from tacit.training import Fit

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Setup:
    """Who takes part, and what is wanted."""

    parties: Parties
    settings: Settings
    federation: Federation
    transcript: Transcript

    def graphs(self, recipe: str) -> tuple[Graph, ...]:
        """What a recipe trains on."""
        return (pool(self.parties),) if recipe == "central" else self.parties.graphs

    def check(self, recipe: str) -> str:
        """Refuse what cannot be done before anything is written or trained; what a server learns of each party."""
        settings, part = self.settings, SHARED.get(recipe)
        for name, graph in zip(self.parties.names, self.parties, strict=True):
            if not len(graph.train):
                raise TacitError(f"{name} has no training triples")
            Examples.check_size(graph, settings.training, settings.negatives)
        if isinstance(settings.negatives, PublicPairs):
            raise TacitError(
                'negatives.name = "public-pairs" needs a list of public pairs, which a run has no place for'
            )
        if settings.training.steps is not None:
            raise TacitError("a federation is bounded by federation.rounds: leave out training.steps")
        if self.parties.links is not None and recipe != "local":
            raise TacitError("these parties have an alignment between different names; rows are shared, and triples "
                             "pooled, by equal names, and parties with an alignment meet in pairs")  # fmt: skip
        if recipe == "central":
            known = set(pool(self.parties).entities)
            if any(not known.issuperset(graph.entities) for graph in self.parties):
                raise TacitError("a party has names that none of its triples has: they cannot be pooled")
        if part is None:
            return "all of its triples" if recipe == "central" else "nothing"
        how = self.federation.how()
        how.check(settings.scorer, part)
        return f"its {part} names; {how.discloses()}"

    def fit(self, recipe: str) -> Fit:
        return Fit(self.settings, self.graphs(recipe))

    def star(self, recipe: str) -> Together:
        """The parties around a server."""
        fit, wanted, part = self.fit(recipe), self.federation, SHARED[recipe]
        star = Star(fit, part, wanted.how(), self.transcript, local_epochs=wanted.local_epochs,
                    fraction=wanted.fraction, optimizer_state=wanted.optimizer_state)  # fmt: skip
        if (share := star.shared_by(2)) < FEW_SHARED:
            LOG.warning("only %.0f%% of the %s rows are in two parties or more: little can be learned by sharing them",
                        100 * share, part)  # fmt: skip
        return Together(fit, wanted, star)


def local(setup: Setup) -> Together:
    """Each party alone, with rounds and early stopping of its own."""
    return Together(setup.fit("local"), setup.federation)


def central(setup: Setup) -> Together:
    """All triples in one place. Each party's questions are asked among its own entities in the end; the validation
    that decides when to stop is among all.
    """
    return Together(setup.fit("central"), setup.federation)


def fede(setup: Setup) -> Together:
    """Entity rows averaged over who has them; relations stay with their party."""
    return setup.star("fede")


def fedr(setup: Setup) -> Together:
    """Relation rows averaged over who has them; entities stay with their party."""
    return setup.star("fedr")


SHARED: dict[str, Part] = {"fede": "entity", "fedr": "relation"}
"""What a recipe shares by a server."""
RECIPES: dict[str, Callable[[Setup], Together]] = {"local": local, "central": central, "fede": fede, "fedr": fedr}
