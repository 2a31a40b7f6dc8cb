"""Critical attacks and neighbouring graphs: slow loops for what is counted, and trainings that do or do not tell."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import expit, logit

from tacit.attacks import critical as module
from tacit.attacks.critical import Change, Interval, apart, chosen, critical, false_tails, neighbours
from tacit.clinic import clinic
from tacit.draws import Purpose, Stream
from tacit.errors import BadValue, TacitError
from tacit.graph import Graph
from tacit.marking import mark, select
from tacit.models import Prior, Tables
from tacit.models.bilinear import DistMult
from tacit.models.model import Model
from tacit.models.translational import TransE
from tacit.parties import pool
from tacit.privacy.steps import public_numbers
from tacit.run import train
from tacit.settings import Settings, combine
from tacit.training import Fit

PLAIN = pool(clinic("small", 3))
CLINIC = mark(PLAIN, select(PLAIN, relations=["has condition", "takes"]))
OVERFIT = {
    "scorer": {"name": "transe", "dim": 16},
    "negatives": {"count": 16},
    "optimizer": {"learning_rate": 0.02},
    "training": {"batch": 256, "epochs": 30, "device": "cpu"},
    "evaluation": {"every": 30},
}
NOISE = {"name": "confidential", "epsilon": 0.5, "noise": "seeded"}


def private(epochs=10, **more):
    return Settings.make(combine(OVERFIT, {"training.epochs": epochs, "privacy": NOISE | more}))


def random_model(graph, seed=0, dim=8, whole=False):
    """`whole`: of values -1, 0 and 1, so that many scores are equal."""
    rng = np.random.default_rng(seed)

    def drawn(rows):
        values = rng.integers(-1, 2, (rows, dim)) if whole else rng.normal(size=(rows, dim))
        return torch.from_numpy(values.astype(np.float32))

    return Model(TransE(), Tables(drawn(len(graph.entities)), drawn(len(graph.relations))))


def marked(triples, confidential, entities=()):
    graph = Graph.from_triples([*triples, *((name, "is", name) for name in entities)])
    return mark(graph, select(graph, triples=confidential))


def rows_of(triples):
    return {tuple(row) for row in triples.tolist()}


# -- telling samples apart ---------------------------------------------------------------------------------------------

samples = st.lists(st.integers(-4, 4), min_size=2, max_size=12)


@given(samples, samples)
def test_u_and_auc_are_counts_of_pairs(one, two):
    """And the interval is that of DeLong's variance, on the scale of logits, by loops."""
    wins = np.array([[(a > b) + (a == b) / 2 for b in two] for a in one], float)
    found = apart(one, two)
    assert found.u == pytest.approx(wins.sum())
    assert found.auc.value == pytest.approx(wins.mean())
    assert found.biserial == pytest.approx(2 * wins.mean() - 1)
    spread = np.sqrt(wins.mean(1).var(ddof=1) / len(one) + wins.mean(0).var(ddof=1) / len(two))
    if spread and 0 < wins.mean() < 1:
        reach, middle = 1.959964 * spread / (wins.mean() * (1 - wins.mean())), logit(wins.mean())
        assert found.auc.low == pytest.approx(expit(middle - reach))
        assert found.auc.high == pytest.approx(expit(middle + reach))
    assert apart(two, one).auc.value == pytest.approx(1 - wins.mean())
    assert 0 <= found.p <= 1


def test_samples_that_are_alike_are_told_apart_as_often_as_said():
    rng = np.random.default_rng(1)
    found = [apart(*rng.normal(size=(2, 40))) for _ in range(1000)]
    assert 0.03 < np.mean([one.p < 0.05 for one in found]) < 0.07
    assert 0.92 < np.mean([one.auc.low <= 0.5 <= one.auc.high for one in found]) < 0.97


def test_a_change_counts_ranks_scores_and_ties():
    earlier = np.array([[1, 0.5], [4, 0.5], [2, 0.5], [8, 0.5]])
    later = np.array([[2, 0.4], [4, 0.5], [1, 0.6], [16, 0.1]])
    change = Change.between(earlier, later)
    assert (change.worse, change.same, change.better) == (0.5, 0.25, 0.25)
    assert change.quantiles["50"] == 0.5
    assert change.log_ratio.value == pytest.approx(np.log(2) / 4)
    assert change.auc.value == 2.5 / 4
    assert change.auc.low < 2 / 4 < 3 / 4 < change.auc.high


# -- critical attacks --------------------------------------------------------------------------------------------------


def test_chosen_statements_are_confidential_distinct_and_follow_the_seed():
    found = chosen(CLINIC, statements=1000, seed=4)
    assert rows_of(found) <= rows_of(CLINIC.train.triples[CLINIC.train.confidential])
    assert len(np.unique(found[:, :2], axis=0)) == len(found)
    assert len(found) == len(np.unique(CLINIC.train.triples[CLINIC.train.confidential][:, :2], axis=0))
    assert np.array_equal(found[:30], chosen(CLINIC, statements=30, seed=4))
    assert not np.array_equal(found[:30], chosen(CLINIC, statements=30, seed=5))


def test_a_head_with_many_tails_is_chosen_no_more_often_and_all_of_its_tails_are():
    many = [("hub", "knows", f"t{i}") for i in range(30)]
    graph = marked([*many, *((f"h{i}", "knows", "x") for i in range(19))], [], ["hub"])
    graph = mark(graph, select(graph, relations=["knows"]))
    hub, tails = graph.entities.id("hub"), []
    for seed in range(400):
        found = chosen(graph, statements=2, seed=seed)
        tails += found[found[:, 0] == hub, 2].tolist()
    assert 20 < len(tails) < 64  # 2 of 20 heads and relations: 40 of 400 times
    assert len(set(tails)) > 15


def test_false_tails_are_all_that_no_split_says_and_nothing_else():
    graph = Graph.from_triples([("a", "r", "b"), ("a", "r", "c"), ("d", "r", "e"), ("b", "s", "a")], [("a", "r", "e")],
                               [("f", "s", "f")])  # fmt: skip
    asked = graph.train.triples[:3].astype(np.int64)  # (a, r, b), (a, r, c), (b, s, a)
    for typed, expected in ((False, ["adf", "adf", "bcdef"]), (True, ["", "", ""])):
        seen = [set(), set(), set()]
        for seed in range(200):
            found = false_tails(graph, asked, seed=seed, typed=typed)
            assert not len(found) or (found[:, :2] == asked[:, :2]).all()
            for row, tail in enumerate(found[:, 2].tolist()):
                seen[row].add(graph.entities[tail])
        assert seen == [set(names) for names in expected]
    found = false_tails(CLINIC, chosen(CLINIC, statements=1000), seed=2, typed=True)
    assert not rows_of(found) & rows_of(CLINIC.statements.triples)
    assert {(r, t) for _, r, t in rows_of(found)} <= {(r, t) for _, r, t in rows_of(CLINIC.train.triples)}


@pytest.mark.parametrize("filtered", [False, True])
def test_ranks_are_those_of_a_slow_loop(filtered):
    models = random_model(CLINIC, 1, whole=True), random_model(CLINIC, 2, whole=True)
    found = critical(*models, CLINIC, statements=25, filtered=filtered)
    facts = rows_of(CLINIC.statements.triples)
    for model, exposed in zip(models, (found.private, found.plain), strict=True):
        entity, relation = model.tables.entity, model.tables.relation
        for (h, r, t), one in zip(found.statements.tolist(), exposed.ranks, strict=True):
            scores = model.scorer.score(entity[[h]], relation[[r]], entity)
            others = [e for e in range(len(entity)) if e != t and not (filtered and (h, r, e) in facts)]
            greater, equal = (scores[others] > scores[t]).sum(), (scores[others] == scores[t]).sum()
            assert one == 1 + int(greater) + int(equal) / 2
    ratios = np.log(found.private.ranks / found.plain.ranks)
    assert found.log_ratio == Interval.of_mean(ratios)
    assert found.median_log_ratio == np.median(ratios)
    assert found.private.top(10) == (found.private.ranks <= 10).mean()
    assert found.larger == apart(found.private.ranks, found.plain.ranks)


@pytest.fixture(scope="module")
def overfit():
    return train(CLINIC, settings=OVERFIT).model


@pytest.mark.slow
def test_a_plain_model_tells_what_noise_does_not(overfit):
    found = critical(random_model(CLINIC), overfit, CLINIC)
    assert np.median(found.plain.ranks) < 5 < 80 < np.median(found.private.ranks)
    assert found.larger.p < 1e-6
    assert found.larger.auc.low > 0.9
    assert found.plain.any_tail.auc.low > 0.95
    assert found.plain.fitting_tail.auc.low > 0.9
    assert found.private.any_tail.auc.low < 0.5 < found.private.any_tail.auc.high
    alike = critical(overfit, overfit, CLINIC)
    assert alike.larger.auc.value == pytest.approx(0.5)
    assert alike.log_ratio == Interval(0.0, 0.0, 0.0)


def test_what_is_reported_is_json_and_names_no_statement():
    found = critical(random_model(CLINIC, 1), random_model(CLINIC, 2), CLINIC, statements=20)
    told = found.json()
    assert json.loads(json.dumps(told)) == told
    assert told["statements"] == 20
    assert set(told["private"]) == {"median", "mean", "top1", "top10", "quantiles", "any_tail", "fitting_tail"}


def test_a_relation_all_of_whose_tails_are_true_has_no_false_ones_that_fit():
    triples = [("a", "r", "x"), ("b", "r", "x"), ("c", "s", "y")]
    graph = marked(triples, triples[:2])
    found = critical(random_model(graph, 1), random_model(graph, 2), graph)
    assert found.plain.fitting_tail is None
    assert found.plain.any_tail is not None
    assert found.json()["plain"]["fitting_tail"] is None


def test_errors_of_critical_attacks():
    model = random_model(CLINIC)
    with pytest.raises(TacitError, match="nothing in the training triples is marked"):
        critical(model, model, PLAIN)
    with pytest.raises(BadValue, match="of another one"):
        critical(model, random_model(clinic("small", 3)[0]), CLINIC)
    with pytest.raises(BadValue, match="two statements"):
        critical(model, model, CLINIC, statements=1)
    one = marked([("a", "r", "b"), ("a", "r", "c")], [("a", "r", "b"), ("a", "r", "c")])
    with pytest.raises(TacitError, match="only one head and relation"):
        critical(random_model(one), random_model(one), one)
    with pytest.raises(BadValue, match="two numbers"):
        apart([1.0], [1.0, 2.0])
    with pytest.raises(BadValue, match="not finite"):
        apart([1.0, np.nan], [1.0, 2.0])


# -- neighbouring graphs -----------------------------------------------------------------------------------------------


def test_a_neighbour_has_the_same_names_and_one_statement_less():
    statement = chosen(CLINIC, statements=2)[0]
    twice = replace(CLINIC, valid=replace(CLINIC.train))
    less = module._without(twice, statement)
    assert (less.entities, less.relations) == (CLINIC.entities, CLINIC.relations)
    for split in (less.train, less.valid):
        assert rows_of(CLINIC.train.triples) - rows_of(split.triples) == {tuple(statement.tolist())}
        assert split.confidential.sum() == CLINIC.train.confidential.sum() - 1
    assert len(less.test) == len(CLINIC.test)


@pytest.mark.parametrize(("statements", "together"), [(5, 2), (6, 3), (4, 100), (7, 1)])
@pytest.mark.parametrize("secret", [False, True])
def test_every_statement_is_compared_with_its_own_neighbour_and_with_another_of_the_same_draws(
    monkeypatch, statements, together, secret
):
    """A model here follows from its graph, its number and, under privacy, its cohort, and from nothing else."""
    asked, calls = chosen(CLINIC, statements=statements), []

    def model_of(graph, number, cohort):
        drawn = Stream(int(graph.fingerprint[:8], 16), Purpose.TEST, number, cohort if secret else 0)
        sizes = len(CLINIC.relations), len(CLINIC.entities)
        prior = torch.from_numpy(drawn.uniform(sizes[0] * sizes[1]).reshape(sizes))
        return Model(DistMult(), Tables(torch.zeros(sizes[1], 1), torch.zeros(sizes[0], 1)), Prior(prior, 0 * prior))

    def trained(settings, graphs, cohort):
        calls.append((len(graphs), cohort))
        return [model_of(graph, number, cohort) for number, graph in enumerate(graphs)]

    monkeypatch.setattr(module, "_trained", trained)
    settings = private(epsilon=None, sigma=5.0) if secret else Settings.make(OVERFIT)
    found = neighbours(CLINIC, settings, statements=statements, together=together)
    width = min(together, statements // 2)
    batches = -(-statements // width)
    assert sum(many for many, _ in calls) == (2 * statements if secret else statements + width)
    assert len({cohort for _, cohort in calls}) == len(calls) == (2 * batches if secret else batches + 1)
    graph = replace(CLINIC, valid=module.Split(CLINIC.valid.triples[:0])) if secret else CLINIC

    def score(model, which):
        _, r, t = asked[which].tolist()
        return float(model.prior.tails[r, t])

    for which in range(statements):
        number, batch = which % width, which // width
        same = list(range(number, statements, width))
        other = same[(same.index(which) + 1) % len(same)]
        assert other != which
        whole, less = (2 * batch, 2 * batch + 1)
        assert found.whole[which, 1] == score(model_of(graph, number, whole), which)
        assert found.without[which, 1] == score(model_of(module._without(graph, asked[which]), number, less), which)
        after = 2 * (other // width) + 1
        assert found.control[which, 1] == score(model_of(module._without(graph, asked[other]), number, after), which)


def test_a_cohort_of_neighbours_is_each_of_them_trained_alone():
    settings = Settings.make(combine(OVERFIT, {"training.epochs": 4, "evaluation.every": 2}))
    graphs = [module._without(CLINIC, statement) for statement in chosen(CLINIC, statements=4)]
    for number, (graph, model) in enumerate(zip(graphs, module._trained(settings, graphs, 7), strict=True)):
        alone = Fit(settings, [graph], numbers=[number])
        alone.run(lambda event: None)
        for name, tensor in alone.model().tables.tensors().items():
            assert torch.allclose(model.tables.tensors()[name], tensor, rtol=0, atol=1e-6)


def test_cohorts_share_public_draws_and_no_noise():
    """The same seed and numbers: two cohorts would have the same noise, and a private model would tell everything."""
    settings = module._solved(private(), CLINIC)
    settings = replace(settings, training=replace(settings.training, epochs=1))
    again = Fit(settings, [CLINIC, CLINIC])
    begun = [again.cohort.tables.party(again.layout, party).entity.clone() for party in range(2)]
    again.run(lambda event: None)
    shared = Fit(settings, [CLINIC, CLINIC])
    shared.run(lambda event: None)
    assert torch.equal(shared.model(0).tables.entity, again.model(0).tables.entity)
    models = [model for cohort in range(3) for model in module._trained(settings, [CLINIC, CLINIC], cohort)]
    for i, one in enumerate(models):
        steps = [model.tables.entity - begun[j % 2] for j, model in enumerate(models[:i])]
        for step in steps:
            both = torch.stack([one.tables.entity - begun[i % 2], step]).flatten(1)
            assert abs(float(torch.corrcoef(both)[0, 1])) < 0.5
    repeated = module._trained(settings, [CLINIC, CLINIC], 2)
    assert torch.equal(repeated[1].tables.entity, models[5].tables.entity)
    fresh = replace(settings, privacy=replace(settings.privacy, noise="system"))
    one, two = (module._trained(fresh, [CLINIC], 0)[0].tables.entity for _ in range(2))
    assert not torch.equal(one, two)


def test_neighbours_have_the_same_public_numbers():
    """15 confidential statements round to 20, 14 to 10: steps and noise would tell how many there were."""
    triples = [(f"h{i}", "r", f"t{i}") for i in range(15)]
    graph = marked([*triples, ("x", "s", "y")], triples)
    settings = private()
    solved = module._solved(settings, graph)
    less = module._without(graph, chosen(graph, statements=2)[0])
    one, two = (public_numbers(settings.privacy, [each], 4)[2] for each in (graph, less))
    assert one != two
    assert public_numbers(solved.privacy, [graph], 4) == public_numbers(solved.privacy, [less], 4)
    assert solved.privacy.sigma is not None


@pytest.mark.slow
def test_without_privacy_a_removed_statement_ranks_worse():
    found = neighbours(CLINIC, Settings.make(OVERFIT), statements=40, together=10)
    assert not found.private
    assert found.removed.worse > 0.8
    assert found.removed.auc.low > 0.7
    assert found.own.auc.low > 0.7
    assert found.own.log_ratio.low > 0.5
    assert abs(found.shuffled.log_ratio.value) < 0.3
    told = found.json()
    assert json.loads(json.dumps(told)) == told


@pytest.mark.slow
@pytest.mark.parametrize(("name", "epochs"), [("confidential", 10), ("dpsgd", 4)])
def test_under_strong_privacy_it_does_not(name, epochs):
    found = neighbours(CLINIC, private(epochs, name=name, epsilon=0.1), statements=24, together=12)
    assert found.private
    for change in (found.removed, found.own, found.shuffled):
        assert change.auc.low < 0.5 < change.auc.high
        assert change.log_ratio.low < 0 < change.log_ratio.high


@pytest.mark.slow
def test_private_steps_with_hardly_any_noise_tell_as_plain_ones_do():
    """What the test before finds is the noise, and not a study that finds nothing."""
    settings = private(epsilon=None, sigma=1e-3, clip=10.0, public_ratio=3.0)
    found = neighbours(CLINIC, settings, statements=16, together=8)
    assert found.removed.auc.low > 0.5
    assert found.own.auc.low > 0.5
    assert found.own.log_ratio.low > 0.5


@pytest.mark.full
def test_a_hundred_statements_tell_plain_training_from_private():
    plain = neighbours(CLINIC, Settings.make(OVERFIT), statements=100, together=20)
    noisy = neighbours(CLINIC, private(epsilon=1.0), statements=100, together=20)
    assert np.array_equal(plain.statements, noisy.statements)
    assert plain.own.auc.low > 0.8
    assert noisy.own.auc.value < 0.65


def test_errors_of_neighbours():
    with pytest.raises(TacitError, match="nothing in the training triples is marked"):
        neighbours(PLAIN, Settings.make(OVERFIT))
    with pytest.raises(BadValue, match="together is at least 1"):
        neighbours(CLINIC, Settings.make(OVERFIT), together=0)
    with pytest.raises(BadValue, match="two statements"):
        neighbours(CLINIC, Settings.make(OVERFIT), statements=1)
    for settings in (private(prior_share=0.1), Settings.make({"privacy": {"name": "marginals", "epsilon": 1.0}})):
        with pytest.raises(TacitError, match="private steps alone"):
            neighbours(CLINIC, settings)
