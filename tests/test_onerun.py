"""The one-run audit: sound trainings hold, planted flaws of a whole one do not; canaries are what they claim to be.

Noise and coins are seeded, so that these tests are the same each time.
"""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from typer.testing import CliRunner

from strategies import graphs, names
from tacit.cli import app
from tacit.clinic import clinic
from tacit.cohort import SecretNoise
from tacit.errors import BadValue, TacitError
from tacit.federated import Federation, federate
from tacit.graph import NO_GROUP, SPLITS, Graph, Split
from tacit.kernels.contract import Clipped, Gradients
from tacit.kernels.reference import row_gradients
from tacit.marking import mark
from tacit.privacy.accountant import epsilon
from tacit.privacy.bounds import epsilon_from_one_run
from tacit.privacy.marginals import Marginals as Counts
from tacit.privacy.onerun import Dirac, OneRun, Witness, audit_training, coins, planted, reserved, right_guesses
from tacit.privacy.plan import cap_of, releases
from tacit.privacy.privatizers import PRIVATIZERS
from tacit.privacy.schedule import Ledger
from tacit.privacy.steps import PrivateSteps
from tacit.run import Run, create
from tacit.settings import Settings, combine
from tacit.training import Fit
from test_cli import tacit
from test_privacy import ClippedApart, TouchedRowsOnly

GRAPH = clinic("small")[0]
PARTIES = clinic("small", 3)
MARKED = mark(GRAPH, GRAPH.statements.triples[:, 1] < 6)
BASE = {"scorer": {"dim": 8}, "training": {"batch": 200, "epochs": 10, "device": "cpu"}, "negatives": {"count": 16},
        "optimizer": {"learning_rate": 0.01}, "evaluation": {"every": 10}}  # fmt: skip
SEEN = {
    "dpsgd": {"sigma": 1.0},
    "frozen": {"sigma": 1.0, "degree_sigma": 2.0, "keep": 0.5},
    "adafest": {"sigma": 1.0, "select_share": 0.5, "threshold": 0.0},
    "confidential": {"sigma": 1.0},
    "marginals": {"sigma": 1.0},
    "repaired-flames": {"sigma": 1.0},
}


def settings_of(name: str | None = "dpsgd", privacy=None, **changes) -> Settings:
    private = {} if name is None else {"privacy": {"name": name, "noise": "seeded"} | (privacy or SEEN[name])}
    if name == "repaired-flames":
        private["negatives"] = {"name": "random-triples"}
    return Settings.make(combine(BASE, private, changes))


def audited(wanted: Settings, graph=GRAPH, **options) -> OneRun:
    return audit_training(wanted, graph, **({"canaries": 400, "guesses": 100, "seed": 1} | options))


# -- what holds --------------------------------------------------------------------------------------------------------


def test_every_sound_privatizer_is_seen():
    assert set(SEEN) == {name for name, kind in PRIVATIZERS.items() if kind.sound}


@pytest.mark.slow
@pytest.mark.parametrize("name", SEEN)
def test_sound_trainings_hold(name):
    found = audited(settings_of(name), MARKED)
    assert found.status == "holds", found
    if name != "repaired-flames":  # which releases next to nothing
        assert found.lower_bound > 0.3, found  # the adversary is not blind
    assert found.simulation
    assert set(found.measured) == ({"cells"} if name == "marginals" else {"white box", "lengths", "black box"})


@pytest.mark.slow
@pytest.mark.parametrize("changes", [
    {"negatives": {"sides": "both"}, "training": {"reciprocal": True}},
    {"negatives": {"name": "independent"}},
    {"scorer": {"name": "complex"}, "optimizer": {"name": "sgd"}},
    {"privacy": {"relation_scale": 3.0}},
    {"privacy": {"prior_share": 0.2, "prior_sigma": 3.0}},
    {"privacy": {"unit": "group", "group": 3}},
    {"privacy": {"sigma": None, "epsilon": 8.0, "noise_falls": 0.8, "noise_follows": "paid"},
     "evaluation": {"every": 5}},
])  # fmt: skip
def test_other_settings_hold_and_are_seen(changes):
    group = (np.arange(len(GRAPH.train)) // 4).astype(np.int32)
    graph = replace(GRAPH, train=Split(GRAPH.train.triples, None, group))
    found = audited(settings_of(**changes | {"privacy": {"sigma": 1.0} | changes.get("privacy", {})}), graph)
    assert found.status == "holds", found
    assert found.measured["white box"] > 0.2, found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dpsgd", "frozen", "adafest", "confidential"])
def test_dirac_canaries_hold(name):
    found = audited(settings_of(name), MARKED, canary="dirac")
    assert found.status == "holds", found
    assert set(found.measured) == {"white box", "lengths"}
    assert found.lower_bound > 0.4, found


@pytest.mark.slow
@pytest.mark.parametrize("privacy", [{"name": "dpsgd", "sigma": 1.0}, {"name": "marginals", "sigma": 1.0}])
@pytest.mark.parametrize("recipe", ["private_fede", "private_fedr"])
def test_a_private_federation_holds(recipe, privacy):
    wanted, federation = settings_of(privacy=privacy), Federation(rounds=5, local_epochs=2)
    found = audited(wanted, PARTIES, recipe=recipe, federation=federation, party=1)
    assert found.status == "holds", found
    assert found.lower_bound > 0.2, found


@pytest.mark.full
@pytest.mark.parametrize("name", SEEN)
def test_sound_trainings_hold_with_many_canaries_and_secret_noise(name):
    """Not seeded: with a chance of 1 in 1,000 of a false alarm, and some of the claim is seen."""
    wanted = settings_of(name, SEEN[name] | {"noise": "system", "sigma": 2.0}, training={"epochs": 40})
    for canary in ("triple",) if name == "marginals" else ("triple", "dirac"):
        found = audit_training(wanted, MARKED, canaries=4000, guesses=800, canary=canary, confidence=0.999, delta=1e-8)
        assert found.status == "holds", found
        assert not found.simulation
        if name != "repaired-flames":  # which releases next to nothing
            assert found.lower_bound > (0.03 if canary == "dirac" else 0.01) * found.claimed, found


@pytest.mark.full
@pytest.mark.parametrize(("sigma", "claimed", "right"), [(1.0, 6.70, 173), (0.5, 35.1, 196)])
def test_dirac_canaries_measure_what_was_simulated(sigma, claimed, right):
    """A simulation of the mechanism by NumPy alone, of the design: rate 0.05, 400 steps."""
    wanted = settings_of("dpsgd", {"sigma": sigma}, training={"batch": 65, "epochs": 20})
    found = audited(wanted, canaries=1000, guesses=200, canary="dirac")
    assert found.claimed == pytest.approx(claimed, rel=2e-3)
    assert abs(found.correct["white box"] - right) < 12


# -- what does not -----------------------------------------------------------------------------------------------------


class NoiseForgotten(PrivateSteps):
    """A tenth of the noise that is accounted for."""

    def _finish(self, active, rows):
        self.cohort.finish(self.divisor, active, noise=SecretNoise(self.secret, self.privatizer.sigma * self.clip / 10))


class NoNoise(PrivateSteps):
    def _finish(self, active, rows):
        self.cohort.finish(self.divisor, active)


class AllRowsBare(PrivateSteps):
    """What RepairedFLames selects from is released as it is: every row, without noise."""

    def _finish(self, active, rows):
        self.cohort.protect(SecretNoise(self.secret, 0.0 * self.clip), active)
        self.negatives.add(active)
        self.cohort.move(self.divisor, active)


class Unseen(PrivateSteps):
    """Steps that end in a way of their own."""

    def _finish(self, active, rows):
        self.cohort.move(self.divisor, active)


class NotClipped(PrivateSteps):
    def rule(self):
        return replace(super().rule(), clip=torch.full_like(self.clip, 1e9))


class DrawnAlways(PrivateSteps):
    """Amplification by sampling is claimed, and every triple is in every batch."""

    def __init__(self, *given):
        super().__init__(*given)
        self.bounds = torch.full_like(self.bounds, 1 << 32)


FLAWS = [TouchedRowsOnly, NoiseForgotten, NoNoise, NotClipped, ClippedApart, DrawnAlways]


@pytest.mark.slow
@pytest.mark.parametrize("flaw", FLAWS)
def test_planted_flaws_of_a_whole_training_are_caught(flaw):
    """`test_the_claim_is_kept_over_many_audits` has the same settings without a flaw."""
    found = audited(settings_of("dpsgd", {"sigma": 4.0, "clip": 0.1}), kind=flaw)
    assert found.status == "violated", found
    assert max(found.measured["white box"], found.measured["lengths"]) > found.claimed, found


@pytest.mark.parametrize("canary", ["triple", "dirac"])
def test_steps_that_end_in_two_parts_are_seen(canary):
    wanted = settings_of("repaired-flames", {"sigma": 10.0}, scorer={"dim": 4}, training={"epochs": 3})
    found = audited(wanted, canaries=100, guesses=60, canary=canary, kind=AllRowsBare)
    assert found.status == "violated", found
    assert found.correct["white box"] > 55, found


def test_an_audit_that_saw_no_step_is_refused():
    with pytest.raises(TacitError, match="not one private step was seen"):
        audited(settings_of("dpsgd", training={"epochs": 1}), canaries=20, guesses=4, kind=Unseen)


@pytest.mark.slow
@pytest.mark.parametrize("flaw", [NoiseForgotten, NotClipped])
@pytest.mark.parametrize("name", ["confidential", "private_fede"])
def test_flaws_are_caught_elsewhere_too(name, flaw):
    if name == "confidential":
        found = audited(settings_of(name, {"sigma": 4.0, "clip": 0.1}), MARKED, kind=flaw)
    else:
        wanted, federation = settings_of("dpsgd", {"sigma": 4.0, "clip": 0.1}), Federation(rounds=5, local_epochs=2)
        found = audited(wanted, PARTIES, recipe=name, federation=federation, party=2, kind=flaw)
    assert found.status == "violated", found


@pytest.mark.slow
def test_dirac_canaries_catch_what_a_triple_may_not():
    """A quarter of the noise: the clip on one number shows more of it than a triple's gradient on many."""

    class Quarter(PrivateSteps):
        def _finish(self, active, rows):
            deviation = self.privatizer.sigma * self.clip / 4
            self.cohort.finish(self.divisor, active, noise=SecretNoise(self.secret, deviation))

    wanted = settings_of("dpsgd", {"sigma": 5.0, "clip": 0.1})
    triple, dirac = (audited(wanted, kind=Quarter, canary=canary) for canary in ("triple", "dirac"))
    assert dirac.measured["white box"] > triple.measured["white box"]
    assert dirac.status == "violated", dirac


def test_counts_without_enough_noise_are_caught(monkeypatch):
    """S4 whose sensitivity is forgotten: noise as if nothing had to be covered."""
    wanted = settings_of("marginals", {"sigma": 2.0})
    assert audited(wanted).status == "holds"
    monkeypatch.setattr(Counts, "release", staticmethod(_release_with_less(Counts.release)))
    assert audited(wanted).status == "violated"


def _release_with_less(release):
    return lambda graph, sigma, secret, party=0: release(graph, sigma / 8, secret, party)


def test_what_is_not_private_has_no_claim_and_gives_much_away():
    found = audited(settings_of(None, training={"epochs": 60}))
    assert (found.status, found.claimed) == ("no claim", None)
    assert list(found.measured) == ["black box"]
    assert found.lower_bound > 2.5, found


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["local", "central", "fede", "fedr"])
def test_federations_without_privacy_have_no_claim(recipe):
    wanted = settings_of(None)
    found = audited(wanted, PARTIES, recipe=recipe, federation=Federation(rounds=10), party=2)
    assert (found.status, list(found.measured)) == ("no claim", ["black box"])
    assert found.lower_bound > 0.5, found


# -- what is claimed ---------------------------------------------------------------------------------------------------


def test_the_claim_is_of_the_audited_training():
    wanted = settings_of("dpsgd")
    found = audited(wanted)
    size = wanted.privacy.public_size(len(GRAPH.train)) + 200
    rate, steps = int(200 / size * 2**32) / 2**32, 10 * -(-size // 200)
    assert found.claimed == pytest.approx(epsilon(wanted.privacy.whole(rate, steps), 1e-5))
    assert audited(wanted, delta=1e-3).claimed < found.claimed


@pytest.mark.slow
def test_noise_that_is_not_known_yet_is_solved_for_the_audited_training():
    assert audited(settings_of("marginals", {"epsilon": 4.0})).claimed == pytest.approx(4.0, rel=0.02)


@pytest.mark.slow
def test_the_claim_of_a_federation_is_the_partys_own():
    wanted, federation = settings_of("dpsgd"), Federation(rounds=2, local_epochs=1)
    found = audited(wanted, PARTIES, recipe="private_fede", federation=federation, canaries=20, guesses=10)
    graph, _ = planted(PARTIES[0], coins(20, 1))
    [spent] = releases(wanted, [graph], epochs=2)
    assert found.claimed == pytest.approx(epsilon(spent, 1e-5))


def test_a_run_says_what_it_found():
    found = OneRun(
        1.0, False, {"white box": 0.5, "black box": 1.5}, {"white box": 7, "black box": 9}, 40, 10, 1e-5, 0.9
    )
    assert (found.lower_bound, found.status) == (1.5, "violated")
    assert replace(found, claimed=1.5).status == "holds"
    assert replace(found, claimed=None).status == "no claim"
    told = json.loads(json.dumps(found.json()))
    assert (told["status"], told["lower_bound"], told["correct"]["black box"]) == ("violated", 1.5, 9)


def test_bounds_hold_for_all_ways_at_once():
    found = audited(settings_of("dpsgd"))
    assert len(found.measured) == 3
    for way, right in found.correct.items():
        wanted = epsilon_from_one_run(400, 100, right, delta=1e-5, confidence=1 - 0.05 / 3)
        assert found.measured[way] == pytest.approx(wanted)
    surer = audited(settings_of("dpsgd"), confidence=0.999)
    assert surer.correct == found.correct
    assert surer.lower_bound < found.lower_bound


# -- canaries ----------------------------------------------------------------------------------------------------------


@given(st.lists(names | st.sampled_from(["canary", "canary0:head", "canary-", "canary-1:tail", "canary--"])),
       st.integers(1, 20))  # fmt: skip
def test_reserved_names_are_nobody_elses(taken, count):
    heads, tails = reserved(taken, count)
    assert len({*heads, *tails}) == 2 * count
    assert not {*heads, *tails} & set(taken)


@given(graph=graphs(), thrown=st.lists(st.booleans(), min_size=1, max_size=12))
def test_canaries_are_in_as_the_coins_say_and_nothing_else_changes(graph, thrown):
    inside = np.array(thrown)
    made, own = planted(graph, inside)
    here = {tuple(triple) for triple in made.train.triples.tolist()}
    assert [tuple(triple) in here for triple in own.tolist()] == thrown
    entities = own[:, [0, 2]].reshape(-1).tolist()
    assert len(set(entities)) == 2 * len(thrown)
    reserved_names = {made.entities[i] for i in entities}
    assert not reserved_names & {*graph.entities, *graph.relations}
    assert set(made.entities) == {*graph.entities, *reserved_names}  # whatever the coins say
    for split in SPLITS:
        rest = [t for t in made.named(split) if not {t[0], t[2]} & reserved_names]
        assert rest == list(graph.named(split))
        assert len(made.splits[split]) == len(rest) + (sum(thrown) if split == "train" else 0)
    keys = made.keys(made.train.triples)
    assert (keys[1:] > keys[:-1]).all()  # in canonical form
    without = made.carve({s: np.flatnonzero(_old(made, s, reserved_names)) + o for s, o in _offsets(made).items()})
    assert without == graph


def _offsets(graph: Graph) -> dict[str, int]:
    sizes = [len(graph.splits[split]) for split in SPLITS]
    return dict(zip(SPLITS, np.cumsum([0, *sizes])[:-1].tolist(), strict=True))


def _old(graph: Graph, split: str, new: set[str]) -> list[bool]:
    return [not {h, t} & new for h, _, t in graph.named(split)]


def test_canaries_are_confidential_and_groups_of_their_own():
    group = (np.arange(len(MARKED.train)) // 4).astype(np.int32)
    graph = replace(MARKED, train=Split(MARKED.train.triples, MARKED.train.confidential, group))
    made, own = planted(graph, np.ones(30, bool))
    ours = np.isin(made.train.triples[:, 0], own[:, 0])
    assert made.train.confidential[ours].all()
    assert (made.train.group[ours] == NO_GROUP).all()
    assert np.array_equal(made.train.confidential[~ours], graph.train.confidential)
    assert np.array_equal(made.train.group[~ours], group)


def test_names_of_other_parties_are_not_reserved():
    made, own = planted(GRAPH, np.ones(2, bool), taken=["canary0:head"])
    assert "canary0:head" not in made.entities.names
    assert len(own) == 2


def test_coins_are_fair_secret_and_repeatable():
    many = 20_000
    for thrown in (coins(many), coins(many, 3)):
        assert stats.binomtest(int(thrown.sum()), many).pvalue > 1e-6
        runs = int((thrown[1:] != thrown[:-1]).sum())
        assert stats.binomtest(runs, many - 1).pvalue > 1e-6
    assert not np.array_equal(coins(many), coins(many))
    assert np.array_equal(coins(many, 3), coins(many, 3))
    assert not np.array_equal(coins(many, 3), coins(many, 4))


@given(st.data())
def test_guesses_are_the_highest_and_the_lowest(data):
    inside = np.array(data.draw(st.lists(st.booleans(), min_size=2, max_size=30)))
    guesses = 2 * data.draw(st.integers(1, len(inside) // 2))
    assert right_guesses(np.where(inside, 1.0, 0.0) + np.arange(len(inside)) * 1e-3, inside, guesses) == min(
        guesses // 2, int(inside.sum())
    ) + min(guesses // 2, int((~inside).sum()))
    scores = np.random.default_rng(data.draw(st.integers(0, 99))).permutation(len(inside)).astype(float)
    place = {int(score): i for i, score in enumerate(scores)}
    slow = sum(bool(inside[place[len(inside) - 1 - i]]) + (not inside[place[i]]) for i in range(guesses // 2))
    assert right_guesses(scores, inside, guesses) == slow


def test_guessing_without_looking_is_right_half_of_the_time():
    """Scores of another throw of the coins: what has not seen the training measures nothing."""
    rng, inside = np.random.default_rng(0), coins(2000, 5)
    right = [right_guesses(rng.normal(size=2000), inside, 400) for _ in range(50)]
    assert abs(np.mean(right) - 200) < 10


@pytest.mark.slow
def test_the_claim_is_kept_over_many_audits():
    """With much noise guesses are right more often than by chance, and no bound comes near the claim."""
    found = [audited(settings_of("dpsgd", {"sigma": 4.0, "clip": 0.1}, seed=seed), seed=seed) for seed in range(4)]
    assert all(each.lower_bound < 0.5 * each.claimed for each in found)
    right = sum(each.correct["white box"] for each in found)
    assert stats.binomtest(right, 400, alternative="greater").pvalue < 1e-3


# -- the witness -------------------------------------------------------------------------------------------------------


def witness_of(wanted: Settings, count: int = 12, dirac: bool = False) -> tuple[Fit, Witness]:
    made, own = planted(GRAPH, coins(count, 2))
    fit = Fit(wanted, [made], device="cpu")
    return fit, Witness(fit, own, party=0, dirac=dirac, kind=PrivateSteps)


@pytest.mark.parametrize("changes", [{}, {"negatives": {"sides": "both"}}, {"scorer": {"name": "distmult"}}])
def test_the_witness_sees_each_canarys_own_gradient(changes):
    """Against gradients one by one from the reference, of every canary, in the training or not."""
    fit, witness = witness_of(settings_of("dpsgd", {"sigma": 1.0, "clip": 0.3}, **changes))
    generator = torch.Generator().manual_seed(0)
    released = fit.cohort.tables.like(lambda table: torch.randn(table.shape, generator=generator))
    witness.see(released)
    rows = torch.arange(12)
    chunk = witness.examples.step(rows, rows * 0, witness.slot, fit.cohort.steps).chunk
    found = row_gradients(fit.kernel.others, fit.cohort.tables, chunk)
    factor = (0.3 / found.norms()).clamp(max=1.0)
    drawn = set(chunk.pool[0].tolist())
    for i in range(12):
        own = {int(witness.head[i]), int(witness.tail[i])} - drawn
        along = sum(
            float(factor[i] * found.entity.values[k] @ released.entity[found.entity.row[k]])
            for k in range(len(found.entity.row))
            if int(found.entity.unit[k]) == i and int(found.entity.row[k]) in own
        )
        assert float(witness.along[i]) == pytest.approx(along, abs=1e-5)
        length = sum(float(released.entity[row].square().sum()) for row in own)
        assert float(witness.length[i]) == pytest.approx(length, rel=1e-5, abs=1e-9)


def test_steps_in_which_the_party_rests_are_not_looked_at():
    made, own = planted(GRAPH, coins(12, 2))
    fit = Fit(settings_of("dpsgd"), [GRAPH, made], device="cpu")
    witness = Witness(fit, own, party=1, dirac=False, kind=PrivateSteps)
    fit.private.step(np.array([True, False]))
    assert not witness.along.any()
    fit.private.step(np.array([False, True]))
    assert witness.along.all()
    assert (witness.length > 0).all()


def test_noise_that_follows_a_signal_is_that_of_the_watched_steps():
    follows = {"epsilon": 8.0, "sigma": 1.0, "noise_falls": 0.8, "noise_follows": "paid", "signal_sigma": 1.0}
    wanted = settings_of("dpsgd", follows, evaluation={"every": 5})
    made, own = planted(GRAPH, coins(12, 2))
    fit = Fit(wanted, [made], device="cpu", ledger=Ledger(cap_of(wanted, made), simulated=True))
    Witness(fit, own, party=0, dirac=False, kind=NoNoise)
    assert isinstance(fit.private, NoNoise)
    assert fit.schedule.private is fit.private


@pytest.mark.parametrize("dirac", [False, True])
def test_being_watched_changes_nothing_but_dirac_canaries(dirac):
    wanted = settings_of("dpsgd", {"sigma": 1.0}, training={"epochs": 2})
    fit, _ = witness_of(wanted, dirac=dirac)
    fit.run(lambda event: None)
    alone = Fit(wanted, fit.graphs, device="cpu")
    alone.run(lambda event: None)
    assert torch.equal(fit.cohort.tables.entity, alone.cohort.tables.entity) == (not dirac)
    assert int(fit.cohort.steps[0]) == int(alone.cohort.steps[0])


@pytest.mark.parametrize("sides", ["tails", "both"])
@pytest.mark.parametrize("reciprocal", [False, True])
def test_a_dirac_canary_weighs_the_clip_on_one_number(sides, reciprocal):
    if reciprocal and sides != "both":
        return
    changes = {"negatives": {"sides": sides}, "training": {"reciprocal": reciprocal}}
    fit, witness = witness_of(settings_of("dpsgd", {"sigma": 1.0, "clip": 0.3}, **changes), dirac=True)
    rows = torch.arange(12)
    chunk = witness.examples.step(rows, rows * 0, witness.slot, fit.cohort.steps).chunk
    into = Gradients(fit.cohort.tables.like(torch.zeros_like))
    witness.private.kernel.accumulate(fit.cohort.tables, chunk, Clipped(torch.tensor([0.3])), into)
    wanted = torch.zeros_like(into.tables.entity)
    wanted[torch.minimum(witness.head, witness.tail), 0] = 0.3
    assert torch.allclose(into.tables.entity, wanted)
    assert not into.tables.relation.any()
    into.empty()
    frozen = torch.zeros(len(wanted), dtype=torch.bool)
    witness.private.kernel.accumulate(fit.cohort.tables, chunk, Clipped(torch.tensor([0.3]), row_mask=frozen), into)
    assert not into.tables.entity.any()
    kernel, plain = Dirac(fit.kernel, witness.head), Gradients(fit.cohort.tables.like(torch.zeros_like))
    others = fit.examples.step(torch.arange(40), torch.zeros(40).long(), torch.arange(40), fit.cohort.steps).chunk
    into.empty()
    ours = torch.isin(others.head, witness.head)
    for target, which in ((kernel, into), (fit.kernel, plain)):
        target.accumulate(
            fit.cohort.tables, others.select((~ours).nonzero()[:, 0]), Clipped(torch.tensor([0.3])), which
        )
    assert torch.equal(into.tables.entity, plain.tables.entity)


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("options", "message"), [
    ({"canaries": 1}, "canaries are at least 2"),
    ({"guesses": 3}, "even number"),
    ({"guesses": 0}, "even number"),
    ({"canaries": 10, "guesses": 20}, "at most all 10"),
    ({"delta": 0.0}, "delta is above 0"),
    ({"delta": 1.5}, "delta is above 0"),
    ({"confidence": 1.0}, "confidence is above 0"),
    ({"canary": "bird"}, "triple or dirac"),
    ({"party": 1}, "one graph"),
])  # fmt: skip
def test_arguments_out_of_range_are_refused(options, message):
    with pytest.raises(BadValue, match=message):
        audited(settings_of("dpsgd"), **options)


def test_dirac_canaries_need_private_steps():
    for name in (None, "marginals"):
        with pytest.raises(BadValue, match="dirac"):
            audited(settings_of(name), canary="dirac")
    with pytest.raises(BadValue, match="one of 3"):
        audited(settings_of("dpsgd"), PARTIES, recipe="private_fede", party=3)
    with pytest.raises(TacitError, match="confidential"):
        audited(settings_of("confidential"))


def test_coins_do_not_change_rates():
    """What the number of canaries that are in would tell is told by nothing."""
    wanted = settings_of("dpsgd", training={"epochs": 1})
    claims = {audited(wanted, guesses=2, seed=seed).claimed for seed in range(3)}
    assert len(claims) == 1


# -- the command -------------------------------------------------------------------------------------------------------

FEW = ("--canaries", 200, "--guesses", 50, "--seed", 1)


def invoked(*arguments):
    """The command in this process; what is wrong with the input is its exception."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.mark.slow
def test_the_command_audits_a_run_and_keeps_what_it_found(tmp_path):
    create(GRAPH, settings_of("marginals"), tmp_path / "run")  # not finished
    shown = tacit("audit", tmp_path / "run", *FEW)
    assert "measured at least" in shown.stdout
    assert "no proof" in shown.stdout
    assert "(simulation)" in shown.stdout
    assert shown.stderr == ""
    kept = json.loads((tmp_path / "run" / "private" / "audit.json").read_text())
    told = json.loads(invoked("audit", tmp_path / "run", *FEW, "--json").stdout)
    assert kept == {"schema": "tacit.audit/1"} | told  # noise and coins are seeded
    assert (told["status"], list(told["measured"]), told["canaries"], told["guesses"]) == ("holds", ["cells"], 200, 50)
    for more, message in (("--guesses", 7), "even number"), (("--party", "x"), "no parties"), (("--dirac",), "dirac"):
        assert message in str(invoked("audit", tmp_path / "run", *more).exception)
    assert "is no run" in str(invoked("audit", tmp_path).exception)
    assert not Run.open(tmp_path / "run").finished  # the run is left as it is


@pytest.mark.slow
def test_the_command_audits_federations(tmp_path):
    given = combine(BASE, {"federation": {"rounds": 2, "local_epochs": 1}})
    federate(PARTIES, "fede", settings=given, out=tmp_path / "run")
    name = PARTIES.names[1]
    told = json.loads(invoked("audit", tmp_path / "run", *FEW, "--party", name, "--json").stdout)
    assert (told["status"], told["party"], told["claimed"]) == ("no claim", name, None)
    shown = tacit("audit", tmp_path / "run", *FEW)
    assert PARTIES.names[0] in shown.stdout
    assert shown.stderr == ""
    assert "There are" in str(invoked("audit", tmp_path / "run", "--party", "nobody").exception)


def test_a_violated_claim_is_an_exit_code(tmp_path, monkeypatch):
    create(GRAPH, settings_of("marginals", {"sigma": 2.0}), tmp_path / "run")
    monkeypatch.setattr(Counts, "release", staticmethod(_release_with_less(Counts.release)))
    done = invoked("audit", tmp_path / "run", *FEW)
    assert done.exit_code == 1
    assert "Publish nothing" in done.stdout


def test_a_partys_folder_of_a_network_is_refused(tmp_path):
    create(GRAPH, settings_of("marginals"), tmp_path / "run", federation={"plan": {}})
    assert "over a network" in str(invoked("audit", tmp_path / "run").exception)
