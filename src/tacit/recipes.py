"""The map: each way for parties to learn, as a composition of the same few parts.

local      each party alone: what it can do without the others
central    all triples in one place: what no one may do, and what federation is to come near
fede       entity rows are shared and averaged (Chen et al. 2021)
fedr       relation rows are shared and averaged; entities never leave (Zhang et al. 2022)

private_fede, private_fedr   the same, of parties whose every step is private
dpkge      each party alone, confidential statements by private steps, others by plain ones (Han et al. 2022)
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tacit.draws import Secret
from tacit.errors import TacitError
from tacit.examples import Examples
from tacit.federated import Federation, Together
from tacit.federation.aggregation import Part
from tacit.federation.secured import Secured
from tacit.federation.star import FEW_SHARED, Disguise, Star
from tacit.federation.transcript import Known, Transcript
from tacit.federation.transport import InProcess
from tacit.graph import Graph
from tacit.models import Prior, Tables
from tacit.negatives import PublicPairs
from tacit.parties import Parties, pool
from tacit.privacy.privatizers import Sound
from tacit.privacy.shared import own_counts, shared_counts, stacked
from tacit.settings import Settings
from tacit.tensors import load_tensors, save_tensors
from tacit.training import Fit

LOG = logging.getLogger(__name__)


@dataclass
class Setup:
    """Who takes part, and what is wanted."""

    parties: Parties
    settings: Settings
    federation: Federation
    transcript: Transcript
    counts: Path | None = None
    """Where the parties' noisy counts are kept, if they release any: once."""
    disguises: Mapping[int, Disguise] = field(default_factory=dict)
    """Parties that do not send what they should: for attacks."""
    _prior: Prior | None = field(default=None, init=False, repr=False)

    @property
    def names_are_private(self) -> bool:
        return self.federation.hides_names(self.settings)

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
        if settings.privacy.sound and recipe == "central":
            raise TacitError("pooled triples are seen by whoever pools them: privacy is for parties that keep theirs")
        if getattr(settings.privacy, "adaptive", False):
            raise TacitError("a noise schedule that follows a signal is kept below its cap for one party's training "
                             '(tacit train): in a federation set privacy.noise_follows = "steps"')  # fmt: skip
        if getattr(settings.privacy, "vectors", False):
            raise TacitError("noisy counts as vectors are one party's: leave out privacy.vectors in a federation")
        if recipe in NEEDS_PRIVACY and not settings.privacy.sound:
            raise TacitError(f"the recipe {recipe} needs privacy.epsilon")
        if part is None:
            if self.federation.secure:
                raise TacitError(f"the recipe {recipe} shares no rows that could be added up: leave out secure")
            return "all of its triples" if recipe == "central" else "nothing"
        if self.federation.vocabulary == "private" and settings.privacy.sound:
            raise TacitError('private training is of names that all know: set federation.vocabulary = "open"')
        how = self.federation.how(self.parties.names, part)
        if settings.privacy.sound and how.needs_counts:
            raise TacitError('exact counts of triples are not private: set federation.aggregation = "mean"')
        how.check(settings.scorer, part)
        if self.names_are_private:
            union = f"pseudonyms of all parties' {part} names together, and how many parties have each"
            return f"that it has no more names than the bound; {union}; {how.discloses()}"
        if not self.releases_counts:
            return f"its {part} names; {how.discloses()}"
        counts = "sums of all parties' noisy counts" if self.federation.secure else "its noisy counts of them"
        rows = f"; {how.discloses()}" if settings.privacy.trains else ""
        return f"its entity and relation names; {counts}{rows}"

    def known(self, recipe: str) -> Known | None:
        """What everybody in such a federation knows of it; None: nothing is shared."""
        if (part := SHARED.get(recipe)) is None:
            return None
        settings = self.settings
        return Known(settings.scorer, settings.dim, part, len(self.parties), settings.training.reciprocal)

    def fit(self, recipe: str) -> Fit:
        return Fit(self.settings, self.graphs(recipe), prior=self.prior(recipe))

    @property
    def releases_counts(self) -> bool:
        privacy = self.settings.privacy
        return isinstance(privacy, Sound) and (not privacy.trains or bool(privacy.prior_share))

    @property
    def has_counts(self) -> bool:
        """Whether they were released before."""
        return self.counts is not None and self.counts.is_file()

    def prior(self, recipe: str) -> Prior | None:
        """What the parties' noisy counts add to every score: released once, and kept; a federation shares the sum."""
        privacy = self.settings.privacy
        if not self.releases_counts:
            return None
        assert isinstance(privacy, Sound)
        if self._prior is None:
            if self.counts is not None and self.has_counts:
                tensors, _ = load_tensors(self.counts)
                made = Prior(tensors["tails"], tensors["heads"])
            else:
                sigma = privacy.prior_sigma if privacy.trains else privacy.sigma
                assert sigma is not None
                secret = Secret.simulation(self.settings.seed) if privacy.noise == "seeded" else Secret.fresh()
                graphs = self.graphs(recipe)
                if recipe in SHARED:
                    how = self.federation.how(self.parties.names, "relation")
                    secured = how if isinstance(how, Secured) else None
                    found = shared_counts(graphs, sigma, secret, InProcess(self.transcript), secured)
                else:
                    found = own_counts(graphs, sigma, secret)
                made = stacked(found, self.settings.training.reciprocal)
                if self.counts is not None:
                    save_tensors(self.counts, {"tails": made.tails, "heads": made.heads}, {"schema": "tacit.counts/1"})
            self._prior = made
        return self._prior

    def zero_tables(self, recipe: str) -> Tables:
        """Rows that say nothing, where noisy counts are all there is."""
        graphs, twice = self.graphs(recipe), 2 if self.settings.training.reciprocal else 1
        entities, relations = sum(len(g.entities) for g in graphs), sum(twice * len(g.relations) for g in graphs)
        return Tables.empty(self.settings.scorer, entities, relations, len(graphs))

    def star(self, recipe: str) -> Together:
        """The parties around a server."""
        fit, wanted, part = self.fit(recipe), self.federation, SHARED[recipe]
        star = Star(fit, part, wanted.how(self.parties.names, part), self.transcript, local_epochs=wanted.local_epochs,
                    fraction=wanted.fraction, optimizer_state=wanted.optimizer_state, bound=wanted.bound,
                    vocabulary="private" if self.names_are_private else "open")  # fmt: skip
        for party, disguise in self.disguises.items():
            star.seats[party].disguise = disguise
        warn_of(wanted, part, star.shared_by(2))
        return Together(fit, wanted, star)


def warn_of(wanted: Federation, part: Part, share: float | None) -> None:
    """What a federation will be disappointed by. `share`: of rows that two parties or more have, where it is known."""
    if wanted.secure and wanted.fraction < 1:
        LOG.warning("sums over different parties can be subtracted: with federation.fraction below 1 a server "
                    "learns who has which row, and comes near to single rows")  # fmt: skip
    if share is not None and share < FEW_SHARED:
        LOG.warning("only %.0f%% of the %s rows are in two parties or more: little can be learned by sharing them",
                    100 * share, part)  # fmt: skip


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


def private_fede(setup: Setup) -> Together:
    """FedE of parties whose every step is private: what leaves costs what the statement says."""
    return setup.star("private_fede")


def private_fedr(setup: Setup) -> Together:
    """FedR of the same: entity rows stay, and are trained by private steps all the same."""
    return setup.star("private_fedr")


def dpkge(setup: Setup) -> Together:
    """Each party alone, with confidential and unrestricted statements: rows that may be published (Han et al. 2022)."""
    return Together(setup.fit("dpkge"), setup.federation)


SHARED: dict[str, Part] = {
    "fede": "entity",
    "fedr": "relation",
    "private_fede": "entity",
    "private_fedr": "relation",
}
"""What a recipe shares by a server."""
NEEDS_PRIVACY = {"private_fede", "private_fedr", "dpkge"}
RECIPES: dict[str, Callable[[Setup], Together]] = {
    "local": local,
    "central": central,
    "fede": fede,
    "fedr": fedr,
    "private_fede": private_fede,
    "private_fedr": private_fedr,
    "dpkge": dpkge,
}
