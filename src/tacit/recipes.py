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
from tacit.federated import Federation, Together
from tacit.federation.aggregation import Part
from tacit.federation.star import FEW_SHARED, Star
from tacit.federation.transcript import Transcript
from tacit.graph import Graph
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

    def graphs(self, *, pooled: bool = False) -> tuple[Graph, ...]:
        """What is trained on."""
        if self.parties.links is not None:
            raise TacitError("these parties have an alignment between different names; a server shares rows by equal "
                             "names, and parties with an alignment meet in pairs")  # fmt: skip
        return (pool(self.parties),) if pooled else self.parties.graphs

    def fit(self, *, pooled: bool = False) -> Fit:
        return Fit(self.settings, self.graphs(pooled=pooled))

    def star(self, part: Part) -> Together:
        """The parties around a server that shares these rows."""
        fit, wanted = self.fit(), self.federation
        star = Star(fit, part, wanted.how(), self.transcript, local_epochs=wanted.local_epochs,
                    fraction=wanted.fraction, optimizer_state=wanted.optimizer_state)  # fmt: skip
        if (share := star.shared_by(2)) < FEW_SHARED:
            LOG.warning("only %.0f%% of the %s rows are in two parties or more: little can be learned by sharing them",
                        100 * share, part)  # fmt: skip
        return Together(fit, wanted, star)


def local(setup: Setup) -> Together:
    """Each party alone, with rounds and early stopping of its own."""
    return Together(setup.fit(), setup.federation)


def central(setup: Setup) -> Together:
    """All triples in one place; each party's questions are asked among its own entities."""
    return Together(setup.fit(pooled=True), setup.federation)


def fede(setup: Setup) -> Together:
    """Entity rows averaged over who has them; relations stay with their party."""
    return setup.star("entity")


def fedr(setup: Setup) -> Together:
    """Relation rows averaged over who has them; entities stay with their party."""
    return setup.star("relation")


RECIPES: dict[str, Callable[[Setup], Together]] = {"local": local, "central": central, "fede": fede, "fedr": fedr}
