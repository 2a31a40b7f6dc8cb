"""Evaluation: every number is compared with a slow loop that says what it means, and link prediction with PyKEEN."""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strategies import graphs, plain_triples
from tacit import Graph, TacitError
from tacit.evaluation import (
    Metrics,
    Ranks,
    classify_entities,
    classify_triples,
    cluster_agreement,
    clusters,
    mutual_information,
    rank,
    typed_candidates,
    weighted,
)
from tacit.evaluation.classification import corrupted, threshold
from tacit.models import SCORERS, Prior, Tables
from tacit.models.bilinear import RESCAL, DistMult
from tacit.models.model import Model
from tacit.models.scorer import compare
from tacit.models.tables import popularity

seeds = st.integers(0, 2**32 - 1)
every_scorer = pytest.mark.parametrize("name", list(SCORERS))
few = settings(max_examples=max(1, settings().max_examples // 4))
TINY = 1e-4
"""A budget that makes the smallest blocks."""


# -- link prediction ---------------------------------------------------------------------------------------------------


def make_model(name, entities, relations, dim, seed, *, whole=True, reciprocal=False, prior=False, **options):
    """A random model with entities of equal rows. `whole`: of values -1, 0 and 1, so that scores are exact and tie."""
    rng = np.random.default_rng(seed)
    scorer = SCORERS[name](**options)
    widths, rows = scorer.widths(dim), relations * (2 if reciprocal else 1)

    def draw(*shape):
        values = rng.integers(-1, 2, shape) if whole else rng.normal(size=shape)
        return torch.from_numpy(values.astype(np.float32))

    entity, relation = draw(entities, widths[0]), draw(rows, widths[1])
    entity = entity[torch.from_numpy(rng.integers(0, entities, entities))]  # about a third are copies of others
    if name == "quate" and whole:  # four equal parts, or one alone: quaternions whose length is a whole number
        alone = torch.zeros(4, rows, dim)
        alone[0] = relation[:, :dim]
        all_four = (1 - 2 * draw(4, rows, dim).abs()) * torch.ones(4, rows, dim)
        relation = torch.where(draw(1, rows, dim) == 0, alone, all_four).permute(1, 0, 2).reshape(rows, -1)
    shared = tuple(draw(1, *shape) for shape in scorer.shared_shapes(dim))
    term = Prior(draw(relations, entities), draw(relations, entities), 0.5) if prior else None
    return Model(scorer, Tables(entity, relation, shared), term, reciprocal)


def score_alone(model, head, relation, tail, asks_head, backwards=False):
    """The score of one triple, of single rows. `backwards`: heads by the scorer's head query, which rounds its way."""
    tables, shared = model.tables, tuple(tensor[0] for tensor in model.tables.shared)
    if asks_head and model.reciprocal:
        rows = tables.entity[tail], tables.relation[relation + model.relations], tables.entity[head]
        score = model.scorer.score(*rows, shared)
    elif asks_head and backwards and model.scorer.geometry is not None:
        query = model.scorer.head_query(tables.relation[relation], tables.entity[tail], shared)
        compared = compare(model.scorer.geometry, query, tables.entity[head])
        score = model.scorer.scaled(compared, tables.relation[relation])
    else:
        score = model.scorer.score(tables.entity[head], tables.relation[relation], tables.entity[tail], shared)
    if model.prior is not None:
        prior = model.prior
        score = score + prior.scale * (prior.tails[relation, tail] + prior.heads[relation, head])
    return score.item()


def others(model, triple, facts, asks_head, typed=None):
    """The candidates beside the true answer, as whole triples."""
    head, relation, tail = triple
    for entity in range(model.entities):
        made = (entity, relation, tail) if asks_head else (head, relation, entity)
        if made == triple or made in facts:
            continue
        if typed is None or (relation, entity) in typed[asks_head]:
            yield made


def slow_ranks(model, triples, facts=(), *, sides="both", typed=None, backwards=False):
    """(greater, equal, candidates, relation, asks_head) of each question, by a loop over everyone."""
    facts = {tuple(row) for row in np.asarray(facts).reshape(-1, 3).tolist()}
    typed = typed and [{tuple(pair) for pair in pairs.tolist()} for pairs in typed]
    answer = []
    for asks_head in [side == "heads" for side in ("tails", "heads") if sides in (side, "both")]:
        for triple in map(tuple, np.asarray(triples).reshape(-1, 3).tolist()):
            true = score_alone(model, *triple, asks_head, backwards)
            made = list(others(model, triple, facts, asks_head, typed))
            scores = [score_alone(model, *other, asks_head, backwards) for other in made]
            greater, equal = sum(score > true for score in scores), sum(score == true for score in scores)
            answer.append((greater, equal, len(made) + 1, triple[1], asks_head))
    return answer


def listed(ranks):
    """The same of `Ranks`."""
    return list(zip(*(getattr(ranks, name).tolist() for name in Ranks.__dataclass_fields__), strict=True))


def questions(graph, seed):
    """The test triples, some of them twice, and triples that are no facts (or facts by chance)."""
    rng = np.random.default_rng(seed)
    sizes = len(graph.entities), len(graph.relations), len(graph.entities)
    guesses = np.stack([rng.integers(0, size, 4) for size in sizes], 1)
    test = graph.test.triples
    return np.concatenate([test, test[:2], guesses, guesses[:1]])


options = st.fixed_dictionaries(
    {"dim": st.integers(1, 4), "seed": seeds, "reciprocal": st.booleans(), "prior": st.booleans()}
)


@every_scorer
@few
@given(graph=graphs(plain_triples), drawn=options, sides=st.sampled_from(["both", "tails", "heads"]))
def test_ranks_are_those_of_a_slow_loop(name, graph, drawn, sides):
    model = make_model(name, len(graph.entities), len(graph.relations), **drawn)
    asked, facts = questions(graph, drawn["seed"]), graph.statements.triples
    backwards = name == "rotate"  # angles are rounded, so that heads are exact only the way they are asked for
    for known in (facts, facts[:0]):
        found = rank(model, asked, known, sides=sides)
        assert listed(found) == slow_ranks(model, asked, known, sides=sides, backwards=backwards)


@every_scorer
@few
@given(graph=graphs(plain_triples), drawn=options)
def test_typed_ranks_are_those_of_a_slow_loop(name, graph, drawn):
    model = make_model(name, len(graph.entities), len(graph.relations), **drawn)
    asked, known, typed = questions(graph, drawn["seed"]), graph.statements.triples, typed_candidates(graph)
    expected = slow_ranks(model, asked, known, typed=typed, backwards=name == "rotate")
    assert listed(rank(model, asked, known, typed=typed)) == expected
    assert listed(rank(model, asked, known, typed=typed, memory_mb=TINY)) == expected


@given(graphs(plain_triples))
def test_typed_candidates_occur_in_train(graph):
    tails, heads = ({tuple(pair) for pair in pairs.tolist()} for pairs in typed_candidates(graph))
    triples = graph.train.triples.tolist()
    assert tails == {(r, t) for _, r, t in triples}
    assert heads == {(r, h) for h, r, _ in triples}


def world(seed, entities=150, relations=3, facts=600, asked=6):
    """More entities than the smallest block has; facts with many answers to a question, and questions among them."""
    rng = np.random.default_rng(seed)
    known = np.stack([rng.integers(0, size, facts) for size in (8, relations, entities)], 1)
    known = np.concatenate([known, np.stack([rng.integers(0, size, facts) for size in (entities, relations, 8)], 1)])
    return known[rng.permutation(len(known))[:asked]], known


@every_scorer
@pytest.mark.parametrize("reciprocal", [False, True])
def test_ranks_of_many_candidates_are_those_of_a_slow_loop(name, reciprocal):
    asked, known = world(5)
    model = make_model(name, 150, 3, 3, 5, reciprocal=reciprocal, prior=reciprocal)
    expected = slow_ranks(model, asked, known, backwards=name == "rotate")
    assert listed(rank(model, asked, known)) == expected
    assert listed(rank(model, asked, known, memory_mb=TINY)) == expected
    assert sum(equal for _, equal, *_ in expected) > 20


@every_scorer
@few
@given(dim=st.integers(1, 40), seed=seeds, prior=st.booleans(), reciprocal=st.booleans(), typed=st.booleans())
def test_ranks_do_not_depend_on_the_budget(name, dim, seed, prior, reciprocal, typed):
    dim = min(dim, 6) if name in ("ntn", "tucker") else dim
    asked, known = world(seed, asked=25)
    model = make_model(name, 150, 3, dim, seed, whole=False, prior=prior, reciprocal=reciprocal)
    pairs = (np.unique(known[:, [1, 2]], axis=0), np.unique(known[:, [1, 0]], axis=0)) if typed else None
    large, medium, tiny = (rank(model, asked, known, memory_mb=m, typed=pairs) for m in (1024, 0.5, TINY))
    assert listed(large) == listed(medium) == listed(tiny)


@every_scorer
@few
@given(dim=st.integers(1, 40), seed=seeds, prior=st.booleans())
def test_equal_rows_are_ties_and_others_are_where_they_belong(name, dim, seed, prior):
    """Scores in double precision, of the whole table at once, say the rank but for what rounding may move."""
    dim = min(dim, 12) if name in ("ntn", "tucker") else dim
    asked, known = world(seed, entities=100, asked=20)
    model = make_model(name, 100, 3, dim, seed, whole=False, prior=prior)
    facts = {tuple(row) for row in known.tolist()}
    found = listed(rank(model, asked, known))
    exact = Tables.like(model.tables, torch.Tensor.double)
    shared, everyone = tuple(tensor[0] for tensor in exact.shared), torch.arange(100)
    for (greater, equal, _, _, asks_head), (h, r, t) in zip(found, [*asked.tolist()] * 2, strict=True):
        target = h if asks_head else t
        head, tail = (everyone, torch.tensor(t)) if asks_head else (torch.tensor(h), everyone)
        rows = (part.expand(100, -1) for part in (exact.entity[head], exact.relation[r], exact.entity[tail]))
        score = model.scorer.score(*rows, shared)
        if prior:
            score = score + 0.5 * (model.prior.tails[r, tail].double() + model.prior.heads[r, head].double())
        there = [o[0 if asks_head else 2] for o in others(model, (h, r, t), facts, asks_head)]
        slack = 1e-4 * (1 + score.abs().max())
        surely, perhaps = (int((score[there] > score[target] + sign * slack).sum()) for sign in (1, -1))
        assert surely <= greater <= greater + equal <= perhaps
        if not prior:
            same = (model.tables.entity[there] == model.tables.entity[target]).all(1)
            assert equal >= int(same.sum())


@pytest.mark.parametrize("norm", [1, 2])
@few
@given(dim=st.integers(1, 40), seed=seeds)
def test_a_question_is_ranked_as_if_it_were_the_only_one(norm, dim, seed):
    asked, known = world(seed, asked=8)
    for name in ("transe", "distmult", "complex", "rotate"):
        model = make_model(name, 150, 3, dim, seed, whole=False, **({"norm": norm} if name == "transe" else {}))
        together = rank(model, asked, known, sides="heads")
        assert listed(together) == [row for q in asked for row in listed(rank(model, q, known, sides="heads"))]
        first = slow_ranks(model, asked[:1], known, sides="heads", backwards=True)
        assert listed(together)[:1] == first


@pytest.mark.parametrize("name", ["transh", "transr", "transd"])
@few
@given(dim=st.integers(1, 24), seed=seeds, norm=st.sampled_from([1, 2]), far=st.integers(0, 3))
def test_where_a_relation_places_rows_far_from_nothing_rounding_decides_no_rank(name, dim, seed, norm, far):
    """Heads and tails are placed apart there; the score is of their difference, of which much less is rounded."""
    asked, known = world(seed, entities=100, asked=5)
    rng, model = np.random.default_rng(seed), make_model(name, 100, 3, dim, seed, whole=False, norm=norm)
    away = torch.from_numpy(rng.normal(size=(1, model.tables.entity.shape[1])))
    model.tables.entity.mul_(0.01).add_(10.0**far * away)
    assert listed(rank(model, asked, known)) == slow_ranks(model, asked, known)


@every_scorer
def test_small_worlds(name):
    model = make_model(name, 1, 1, 2, 0, prior=True)
    none = rank(model, np.zeros((0, 3), np.int64), np.array([[0, 0, 0]]))
    assert listed(none) == []
    assert math.isnan(none.metrics().mrr)
    assert none.metrics().count == 0
    assert none.by_side() == none.by_relation() == {}
    for known in ([], [[0, 0, 0]]):
        only = rank(model, np.array([[0, 0, 0]] * 2), np.array(known), memory_mb=TINY)
        assert listed(only) == [(0, 0, 1, 0, False)] * 2 + [(0, 0, 1, 0, True)] * 2
        assert only.metrics() == Metrics(1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 4)


def test_known_facts_may_come_in_several_arrays():
    asked, known = world(3)
    model = make_model("distmult", 150, 3, 4, 3)
    pieces = [known[:100], known[50:700].astype(np.int32), known[700:]]
    assert listed(rank(model, asked, pieces)) == listed(rank(model, asked, known))
    assert listed(rank(model, asked, [])) == listed(rank(model, asked, known[:0])) == slow_ranks(model, asked)


def test_popularity_ranks_by_counts():
    graph = Graph.from_triples(
        [("a", "r", "x"), ("b", "r", "x"), ("c", "r", "y")], test=[("c", "r", "x"), ("a", "r", "y")]
    )
    found = rank(Model.popular(graph), graph.test.triples, graph.train.triples, sides="tails")
    assert found.of().tolist() == [1.0, 1.0]  # of (a, r, ?) the more popular x is a fact, and filtered
    raw = rank(Model.popular(graph), graph.test.triples, [], sides="tails")
    places = dict(zip(map(tuple, graph.test.triples.tolist()), raw.of().tolist(), strict=True))
    assert {graph.entities[t]: place for (_, _, t), place in places.items()} == {"x": 1.0, "y": 2.0}
    assert popularity(graph).tails.shape == (1, 5)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("table", ["entity", "relation", "shared.0"])
def test_tables_that_are_not_finite_are_refused(table, bad):
    model = make_model("tucker", 5, 2, 3, 0)
    model.tables.tensors()[table].view(-1)[-1] = bad
    with pytest.raises(TacitError, match="not finite"):
        rank(model, np.array([[0, 0, 1]]), [])


@pytest.mark.parametrize("change", [{"sides": "left"}, {"memory_mb": 0}, {"memory_mb": math.nan}])
def test_ranking_refuses_what_makes_no_sense(change):
    with pytest.raises(TacitError, match=f"{next(iter(change))} is"):
        rank(make_model("transe", 5, 2, 3, 0), np.array([[0, 0, 1]]), [], **change)


@pytest.mark.parametrize("name", ["transe", "distmult", "rescal", "transr"])
def test_scores_that_overflow_are_no_good_ranks(name):
    """All entities equal, and so large that scores are infinite: nobody may be said to be the best."""
    model = Model(SCORERS[name](), make_model(name, 6, 1, 2, 0).tables.like(lambda t: torch.full_like(t, 3e38)))
    try:
        found = rank(model, np.array([[0, 0, 1]]), [])
    except TacitError:
        return
    assert found.of("pessimistic").tolist() == [6.0, 6.0]


# -- metrics -----------------------------------------------------------------------------------------------------------


def some_ranks(greater, equal, candidates, relation=None, asks_head=None):
    n = len(greater)
    relation = [0] * n if relation is None else relation
    asks_head = [False] * n if asks_head is None else asks_head
    return Ranks(*(np.array(x) for x in (greater, equal, candidates, relation)), np.array(asks_head, bool))


def test_metrics_by_hand():
    ranks = some_ranks([0, 1, 0, 8, 9], [0, 0, 4, 2, 1], [10, 10, 5, 20, 100])
    assert ranks.of("optimistic").tolist() == [1, 2, 1, 9, 10]
    assert ranks.of("realistic").tolist() == ranks.of().tolist() == [1, 2, 3, 10, 10.5]
    assert ranks.of("pessimistic").tolist() == [1, 2, 5, 11, 11]
    expected = 0.5 * (11 + 11 + 6 + 21 + 101) / 5  # 15
    real, best, worst = (ranks.metrics(t) for t in ("realistic", "optimistic", "pessimistic"))
    assert real.json() == pytest.approx(
        {
            "mrr": (1 + 1 / 2 + 1 / 3 + 1 / 10 + 1 / 10.5) / 5,
            "mr": 26.5 / 5,
            "hits1": 1 / 5,
            "hits3": 3 / 5,
            "hits10": 4 / 5,
            "amri": 1 - (26.5 / 5 - 1) / (expected - 1),
            "count": 5,
        }
    )
    assert best.json() == pytest.approx(
        Metrics((2 + 1 / 2 + 1 / 9 + 1 / 10) / 5, 23 / 5, 2 / 5, 3 / 5, 1.0, 1 - (23 / 5 - 1) / 14, 5).json()
    )
    assert worst.json() == pytest.approx(
        Metrics((1 + 1 / 2 + 1 / 5 + 2 / 11) / 5, 6.0, 1 / 5, 2 / 5, 3 / 5, 1 - 5 / 14, 5).json()
    )
    with pytest.raises(TacitError, match="ties is one of"):
        ranks.of("lucky")


question = st.tuples(st.integers(0, 12), st.integers(0, 12), st.integers(0, 12), st.integers(0, 3), st.booleans())
ways_with_ties = st.sampled_from(["optimistic", "realistic", "pessimistic"])


def slow_metrics(rows, ties):
    """Each sum by its definition; a candidate beside those above and those equal may be below."""
    share = {"optimistic": 0, "realistic": 0.5, "pessimistic": 1}[ties]
    ranks = [1 + g + share * e for g, e, *_ in rows]
    expected = sum((1 + g + e + below + 1) / 2 for g, e, below, *_ in rows) / len(rows)
    n, mean = len(rows), sum(ranks) / len(rows)
    hits = [sum(rank <= k for rank in ranks) / n for k in (1, 3, 10)]
    amri = 1 - (mean - 1) / (expected - 1) if expected > 1 else 1.0
    return Metrics(sum(1 / rank for rank in ranks) / n, mean, *hits, amri, n)


def ranks_of(rows):
    greater, equal, below, relation, asks_head = zip(*rows, strict=True)
    return some_ranks(greater, equal, np.add(greater, equal) + below + 1, relation, asks_head)


def same(one, two):
    return one.json() == pytest.approx(two.json(), nan_ok=True)


@given(st.lists(question, min_size=1, max_size=20), ways_with_ties)
def test_metrics_are_those_of_a_slow_loop(rows, ties):
    ranks = ranks_of(rows)
    assert same(ranks.metrics(ties), slow_metrics(rows, ties))
    sides = {"tails": [row for row in rows if not row[4]], "heads": [row for row in rows if row[4]]}
    expected = {side: slow_metrics(part, ties) for side, part in sides.items() if part}
    assert list(ranks.by_side(ties)) == list(expected)
    assert all(same(ranks.by_side(ties)[side], part) for side, part in expected.items())
    assert sorted(ranks.by_relation(ties)) == sorted({row[3] for row in rows})
    for relation, part in ranks.by_relation(ties).items():
        assert same(part, slow_metrics([row for row in rows if row[3] == relation], ties))


@given(st.lists(st.lists(question, max_size=6), max_size=4), ways_with_ties)
def test_a_federation_reports_the_mean_over_all_questions(parties, ties):
    found = weighted([ranks_of(rows).metrics(ties) if rows else some_ranks([], [], []).metrics() for rows in parties])
    rows = [row for party in parties for row in party]
    assert found.count == len(rows)
    if not rows:
        assert math.isnan(found.mrr)
        return
    whole = slow_metrics(rows, ties)
    for name in ("mrr", "mr", "hits1", "hits3", "hits10"):
        assert getattr(found, name) == pytest.approx(getattr(whole, name))
    amri = sum(slow_metrics(party, ties).amri * len(party) for party in parties if party) / len(rows)
    assert found.amri == pytest.approx(amri)


def test_guessing_has_an_adjusted_index_near_nothing():
    asked, known = world(1, entities=1000, asked=400)
    metrics = rank(make_model("distmult", 1000, 3, 8, 1, whole=False), asked, known).metrics()
    assert abs(metrics.amri) < 0.1
    constant = Model(DistMult(), Tables(torch.zeros(1000, 1), torch.zeros(3, 1)))
    assert rank(constant, asked, known).metrics().amri == pytest.approx(0.0)  # all tied: exactly what guessing gives


# -- the same in PyKEEN ------------------------------------------------------------------------------------------------

IN_PYKEEN = """
import json, sys
import numpy as np, torch
from pykeen.evaluation import RankBasedEvaluator
from pykeen.models import ERModel
from pykeen.nn.modules import ComplExInteraction, DistMultInteraction, RotatEInteraction, TransEInteraction
from pykeen.triples import CoreTriplesFactory

class SumOfModuli(RotatEInteraction):
    def forward(self, h, r, t):
        return -(h * r - t).abs().sum(-1)

given = np.load(sys.argv[1])
splits = {name: torch.from_numpy(given[name].astype(np.int64)) for name in ("train", "valid", "test")}
interaction, kwargs, complex_ = {
    "transe": (TransEInteraction, {"p": 1}, False),
    "distmult": (DistMultInteraction, {}, False),
    "complex": (ComplExInteraction, {}, True),
    "rotate": (SumOfModuli if given["entity"].shape[1] > 1 else RotatEInteraction, {}, True),
}[sys.argv[2]]
entity, relation = given["entity"], given["relation"]
factory = CoreTriplesFactory(splits["train"], num_entities=len(entity), num_relations=len(relation))
parts = {"shape": (entity.shape[1],), "dtype": torch.cdouble if complex_ else torch.double}
model = ERModel(
    triples_factory=factory,
    interaction=interaction,
    interaction_kwargs=kwargs,
    entity_representations_kwargs=dict(parts),
    relation_representations_kwargs=dict(parts),
)
ids = torch.arange(len(entity)), torch.arange(len(relation))
for table, (where,), index in ((entity, model.entity_representations, ids[0]),
                               (relation, model.relation_representations, ids[1])):
    weight, values = where._embeddings.weight, torch.from_numpy(table)
    assert weight.dtype == torch.double
    weight.data.copy_((torch.view_as_real(values) if complex_ else values).reshape(weight.shape))
    assert torch.equal(where(index), values)
model.eval()
result = RankBasedEvaluator(filtered=True).evaluate(
    model, splits["test"], batch_size=7, use_tqdm=False,
    additional_filter_triples=[splits["train"], splits["valid"]],
)
names = {"mr": "arithmetic_mean_rank", "mrr": "inverse_harmonic_mean_rank",
         "amri": "adjusted_arithmetic_mean_rank_index",
         "hits1": "hits_at_1", "hits3": "hits_at_3", "hits10": "hits_at_10"}
print(json.dumps({
    side: {ours: float(result.get_metric(f"{side}.realistic.{theirs}")) for ours, theirs in names.items()}
    for side in ("both", "head", "tail")
}))
"""


def run_script(script, *arguments):
    """The JSON that a script prints as its last line."""
    done = subprocess.run([sys.executable, "-c", script, *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def graph_with_room(seed, entities=40, relations=3):
    rng = np.random.default_rng(seed)
    ids = zip(*(rng.integers(0, size, 400).tolist() for size in (entities, relations, entities)), strict=True)
    rows = [(f"e{h:02}", f"r{r}", f"e{t:02}") for h, r, t in dict.fromkeys(ids)]
    return Graph.from_triples(rows[:250], rows[250:300], rows[300:])


def tables_for_both(name, graph, dim):
    """Tables of doubles for us, and as PyKEEN has them: ties are exact on either side."""
    rng = np.random.default_rng(11)
    sizes, spread = (len(graph.entities), len(graph.relations)), SCORERS[name]().spread(dim)
    copies = rng.integers(0, sizes[0], sizes[0])
    if name == "rotate":  # of rotations only copies of a row tie; of values -1, 0 and 1 many more do
        entity = rng.normal(size=(sizes[0], 2 * dim))[copies]
        angle = rng.uniform(-np.pi, np.pi, (sizes[1], dim))
        theirs = entity[:, :dim] + 1j * entity[:, dim:], np.exp(1j * angle)
        return (entity, angle * spread / np.pi), theirs
    width = SCORERS[name]().widths(dim)
    entity, relation = (rng.integers(-1, 2, (n, w)).astype(float) for n, w in zip(sizes, width, strict=True))
    entity = entity[copies]
    if name == "complex":
        return (entity, relation), tuple(table[:, :dim] + 1j * table[:, dim:] for table in (entity, relation))
    return (entity, relation), (entity, relation)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dim"), [("transe", 6), ("distmult", 6), ("complex", 6), ("rotate", 6), ("rotate", 1)]
)
def test_pykeen_finds_the_same(name, dim, tmp_path):
    """PyKEEN's RotatE takes the L2 norm of the moduli whatever p it is given, and RotatE's authors their sum.

    Of one coordinate these are the same; of more, its evaluator gets the sum.
    """
    if importlib.util.find_spec("pykeen") is None:
        pytest.skip("PyKEEN is not installed (the extra `bench`)")
    graph = graph_with_room(2)
    ours, theirs = tables_for_both(name, graph, dim)
    model = Model(SCORERS[name](), Tables(*map(torch.from_numpy, ours)))
    ranks = rank(model, graph.test.triples, graph.statements.triples)
    assert (ranks.equal > 0).mean() > 0.3
    splits = {split: part.triples for split, part in graph.splits.items()}
    np.savez(tmp_path / "given.npz", entity=theirs[0], relation=theirs[1], **splits)
    found = run_script(IN_PYKEEN, tmp_path / "given.npz", name)
    sides = {"both": ranks.metrics(), "head": ranks.by_side()["heads"], "tail": ranks.by_side()["tails"]}
    for side, metrics in sides.items():
        for key, value in found[side].items():
            assert getattr(metrics, key) == pytest.approx(value, abs=1e-6), (side, key)


# -- memory ------------------------------------------------------------------------------------------------------------

PEAK = """
import json, sys, time
import numpy as np, torch
from tacit.evaluation import rank
from tacit.models import SCORERS, Tables
from tacit.models.model import Model

def peak():
    with open("/proc/self/status") as status:
        return 1024 * int(next(line for line in status if line.startswith("VmHWM")).split()[1])

name, entities, budget = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
torch.manual_seed(0)
widths = SCORERS[name]().widths(64)
tables = Tables(*(torch.empty(rows, width).uniform_(-1, 1) for rows, width in zip((entities, 10), widths)))
rng = np.random.default_rng(0)
triples = np.stack([rng.integers(0, high, 100) for high in (entities, 10, entities)], 1)
few = Tables(tables.entity[:100].clone(), tables.relation)
rank(Model(SCORERS[name](), few), triples % 100 % [100, 10, 100], triples[:0])  # loads and compiles the kernels
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")
before, began = peak(), time.time()
ranks = rank(Model(SCORERS[name](), tables), triples, triples, memory_mb=budget)
seconds = time.time() - began
print(json.dumps({"mib": (peak() - before) / 2**20, "seconds": seconds, "count": len(ranks.greater)}))
"""


def memory_stays_in_the_budget(name, entities, budget):
    """The budget, and beside it: 4 bytes an entity for row norms, per-query arrays, and what libraries load at once."""
    if not sys.platform.startswith("linux"):
        pytest.skip("peak memory is read from /proc")
    found = run_script(PEAK, name, entities, budget)
    print(name, entities, found)
    assert found["count"] == 200
    assert found["mib"] < budget + 64


@pytest.mark.slow
@pytest.mark.parametrize("name", ["transe", "distmult", "transh"])
@pytest.mark.parametrize("budget", [8, 64])
def test_memory_stays_in_a_small_budget(name, budget):
    memory_stays_in_the_budget(name, 200_000, budget)


@pytest.mark.full
@pytest.mark.parametrize("name", ["transe", "distmult"])
def test_memory_stays_in_the_budget_for_millions_of_entities(name):
    memory_stays_in_the_budget(name, 5_000_000, 256)


# -- triple classification ---------------------------------------------------------------------------------------------


def one_number_per_triple(graph, value):
    """A model whose score of (h, r, t) is value(h, r, t): unit rows, and a matrix per relation."""
    n = len(graph.entities)
    matrices = [[value(h, r, t) for h in range(n) for t in range(n)] for r in range(len(graph.relations))]
    return Model(RESCAL(), Tables(torch.eye(n, dtype=torch.float64), torch.tensor(matrices, dtype=torch.float64)))


def falsehoods(graph, triple, facts):
    """Of all ways to replace the head or the tail of a triple, the share that gives no fact."""
    h, r, t = triple
    every = [(e, r, t) for e in range(len(graph.entities))] + [(h, r, e) for e in range(len(graph.entities))]
    return sum(made not in facts for made in every) / len(every)


def try_corrupted(graph, split, facts, **options):
    """Corrupted triples, or None where too few are no facts to be found by 64 draws."""
    try:
        return corrupted(graph, split, **options)
    except TacitError:
        assert min(falsehoods(graph, row, facts) for row in graph.splits[split].triples.tolist()) < 0.3
        return None


@given(graphs(plain_triples), st.sampled_from(["train", "valid", "test"]), st.integers(0, 2**64 - 1))
def test_a_corrupted_triple_is_no_fact_and_differs_in_one_place(graph, split, seed):
    facts = {tuple(row) for row in graph.statements.triples.tolist()}
    false = try_corrupted(graph, split, facts, seed=seed)
    if false is None:
        return
    true = graph.splits[split].triples
    assert false.shape == true.shape
    assert not facts & {tuple(row) for row in false.tolist()}
    assert ((false >= 0) & (false < len(graph.entities))).all()
    changed = false != true
    assert (changed.sum(1) == 1).all()
    assert not changed[:, 1].any()
    assert np.array_equal(false, corrupted(graph, split, seed=seed))


def test_corruption_goes_by_seed_and_side():
    graph = graph_with_room(4)
    made = [corrupted(graph, split, seed=seed) for split in ("train", "test") for seed in (0, 1, 2**64 - 1)]
    assert not any(np.array_equal(one, two) for one, two in itertools.combinations(made, 2))
    heads = (made[0] != graph.train.triples)[:, 0]
    assert 0.35 < heads.mean() < 0.65
    for side, column in (("heads", 0), ("tails", 2)):
        changed = corrupted(graph, "train", sides=side) != graph.train.triples
        assert changed[:, column].all()
        assert changed.sum() == len(graph.train)


def complete(entities, left_out=()):
    """Everything holds, but for a few; one triple is for test."""
    names = [f"e{i:03}" for i in range(entities)]
    every = [(h, "r", t) for h in names for t in names if (h, t) not in left_out]
    return Graph.from_triples(every[1:], test=every[:1])


def test_where_everything_is_true_nothing_can_be_corrupted():
    with pytest.raises(TacitError, match="no corruption"):
        corrupted(complete(4), "test")


def test_a_rare_corruption_is_found():
    """(e000, r, e000) is asked, and of all 200 replacements only (e000, r, e007) is no fact."""
    graph = complete(100, {("e000", "e007")})
    assert corrupted(graph, "test").tolist() == [[0, 0, 7]]


few_scores = st.lists(st.tuples(st.integers(-3, 3), st.booleans()), max_size=15)


def right(cut, scores, truth):
    return sum((score >= cut) == true for score, true in zip(scores, truth, strict=True))


def slow_threshold(scores, truth):
    """The lowest of the best cuts: below all, above all, or midway between two scores."""
    values = sorted(set(scores))
    cuts = [-math.inf, *((one + two) / 2 for one, two in itertools.pairwise(values)), math.inf]
    return max(cuts, key=lambda cut: (right(cut, scores, truth), -cut))


@given(few_scores)
def test_a_threshold_is_right_most_often(rows):
    scores, truth = [float(score) for score, _ in rows], [true for _, true in rows]
    found = threshold(np.array(scores), np.array(truth, bool))
    assert found == slow_threshold(scores, truth)
    assert right(found, scores, truth) == max(right(cut / 2, scores, truth) for cut in range(-9, 10))


@given(graphs(plain_triples), seeds)
def test_accuracy_is_that_of_a_slow_loop(graph, seed):
    rng = np.random.default_rng(seed)
    table = rng.integers(-2, 3, (len(graph.entities), len(graph.relations), len(graph.entities))).astype(float)
    model = one_number_per_triple(graph, lambda h, r, t: table[h, r, t])
    if not len(graph.valid) or not len(graph.test):
        with pytest.raises(TacitError, match="needs validation triples"):
            classify_triples(model, graph)
        return
    facts = {tuple(row) for row in graph.statements.triples.tolist()}
    rows = {}
    for split in ("valid", "test"):
        if (false := try_corrupted(graph, split, facts, seed=seed)) is None:
            return
        labelled = [(graph.splits[split].triples, True), (false, False)]
        rows[split] = [(r, table[h, r, t], truth) for part, truth in labelled for h, r, t in part.tolist()]
    found = classify_triples(model, graph, seed=seed)
    assert found.elsewhere == slow_threshold([s for _, s, _ in rows["valid"]], [truth for *_, truth in rows["valid"]])
    expected = {}
    for r in {r for r, *_ in rows["valid"]}:
        expected[r] = slow_threshold(*zip(*[row[1:] for row in rows["valid"] if row[0] == r], strict=True))
    assert found.thresholds == expected
    told = [(score >= expected.get(r, found.elsewhere)) == truth for r, score, truth in rows["test"]]
    assert found.count == len(told)
    assert found.accuracy == pytest.approx(sum(told) / len(told))


def test_a_model_that_knows_the_facts_tells_them_apart():
    graph = graph_with_room(6)
    facts = {tuple(row) for row in graph.statements.triples.tolist()}
    knowing = classify_triples(one_number_per_triple(graph, lambda *triple: float(triple in facts)), graph)
    assert knowing.accuracy == 1.0
    assert set(knowing.thresholds.values()) == {0.5}
    assert classify_triples(one_number_per_triple(graph, lambda *triple: 0.0), graph).accuracy == 0.5


def test_a_relation_without_validation_uses_the_threshold_of_all():
    train = [(f"e{i}", "s", f"e{i + 1}") for i in range(9)]
    graph = Graph.from_triples(train, valid=[("e0", "r", "e1"), ("e2", "r", "e3")], test=[("e1", "s", "e5")])
    facts = {tuple(row) for row in graph.statements.triples.tolist()}
    found = classify_triples(one_number_per_triple(graph, lambda *triple: 3.0 * (triple in facts)), graph)
    assert set(found.thresholds) == {graph.relations.names.index("r")}
    assert (found.elsewhere, found.accuracy, found.count) == (1.5, 1.0, 2)


# -- clusters ----------------------------------------------------------------------------------------------------------


def blobs(k, each, dim=3, seed=0, apart=100.0):
    rng = np.random.default_rng(seed)
    centres = np.eye(k, max(dim, k)) * apart
    labels = np.repeat(np.arange(k), each)
    order = rng.permutation(len(labels))
    return (centres[labels] + rng.normal(size=(len(labels), centres.shape[1])))[order], labels[order]


def groups(labels):
    """A grouping whatever its numbers: sets of rows."""
    return {frozenset(np.flatnonzero(np.asarray(labels) == which).tolist()) for which in np.unique(labels)}


@given(st.integers(1, 5), st.integers(1, 12), seeds)
def test_well_separated_blobs_are_found(k, each, seed):
    rows, labels = blobs(k, each, seed=seed, apart=1e4)
    assert groups(clusters(rows, k, seed=seed)) == groups(labels)
    assert groups(clusters(torch.from_numpy(rows), k, seed=seed)) == groups(labels)


def cost(rows, which):
    """Squared distances to the mean of the cluster."""
    return sum(((rows[which == c] - rows[which == c].mean(0)) ** 2).sum() for c in np.unique(which))


@given(st.integers(1, 25), st.integers(1, 3), st.data(), seeds)
def test_no_cluster_is_empty_and_no_step_is_for_the_worse(n, dim, data, seed):
    k = data.draw(st.integers(1, n))
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, 4, (n, dim)).astype(float)  # many equal ones
    which = clusters(rows, k, seed=seed)
    assert which.shape == (n,)
    assert set(which.tolist()) == set(range(k))
    assert np.array_equal(which, clusters(rows.copy(), k, seed=seed))
    assert cost(rows, which) <= cost(rows, np.zeros(n)) + 1e-9
    if k == n:
        assert cost(rows, which) == 0


@given(st.integers(2, 30), st.data(), seeds)
def test_the_result_is_no_worse_than_its_start_and_cannot_be_improved(n, data, seed):
    k = data.draw(st.integers(1, n))
    rows = np.random.default_rng(seed).normal(size=(n, 2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tacit.evaluation.clustering.ROUNDS", 1)
        start = clusters(rows, k, seed=seed)
    which = clusters(rows, k, seed=seed)
    assert cost(rows, which) <= cost(rows, start) + 1e-9
    centres = np.stack([rows[which == c].mean(0) for c in range(k)])
    distances = [[((row - centre) ** 2).sum() for centre in centres] for row in rows]
    assert all(line[c] <= min(line) + 1e-9 for line, c in zip(distances, which, strict=True))


def test_clusters_at_the_ends():
    rows = np.random.default_rng(0).normal(size=(7, 2))
    assert clusters(rows, 1).tolist() == [0] * 7
    assert sorted(clusters(rows, 7).tolist()) == list(range(7))
    assert sorted(clusters(np.zeros((5, 2)), 3).tolist()) != [0] * 5
    for k in (0, 8, -1):
        with pytest.raises(TacitError, match="7 rows make 1 to 7 clusters"):
            clusters(rows, k)
    with pytest.raises(TacitError, match="clusters"):
        clusters(rows[:0], 1)


def test_seeds_give_other_starts():
    rows = np.random.default_rng(3).uniform(size=(200, 2))
    assert len({frozenset(groups(clusters(rows, 8, seed=seed))) for seed in range(6)}) > 1


def slow_information(one, two):
    """2 I / (H1 + H2) from counts."""
    n, first, second, both = len(one), Counter(one), Counter(two), Counter(zip(one, two, strict=True))
    shared = sum(c / n * math.log(c * n / (first[a] * second[b])) for (a, b), c in both.items())
    entropy = sum(-c / n * math.log(c / n) for counts in (first, second) for c in counts.values())
    return 1.0 if entropy == 0 else 2 * shared / entropy


labellings = st.integers(1, 25).flatmap(
    lambda n: st.tuples(*[st.lists(st.integers(-2, 4), min_size=n, max_size=n)] * 2)
)


@given(labellings, st.permutations(range(-2, 5)))
def test_mutual_information_is_its_formula(pair, names):
    one, two = pair
    found = mutual_information(one, two)
    assert found == pytest.approx(slow_information(one, two), abs=1e-9)
    assert 0.0 <= found <= 1.0
    assert mutual_information(two, one) == pytest.approx(found, abs=1e-9)
    renamed = [names[label + 2] for label in one]
    assert mutual_information(renamed, two) == pytest.approx(found, abs=1e-9)
    assert mutual_information(one, renamed) == pytest.approx(1.0)
    order = np.random.default_rng(len(one)).permutation(len(one))
    assert mutual_information(np.array(one)[order], np.array(two)[order]) == pytest.approx(found, abs=1e-9)


def test_independent_groupings_say_nothing_of_each_other():
    one, two = zip(*itertools.product(range(3), range(4)), strict=True)
    assert mutual_information(one, two) == pytest.approx(0.0, abs=1e-12)
    assert mutual_information([0, 0, 0], [0, 1, 2]) == pytest.approx(0.0, abs=1e-12)
    assert mutual_information([5, 5], ["a", "a"]) == 1.0
    for bad in (([], []), ([1], [1, 2])):
        with pytest.raises(TacitError, match="same things"):
            mutual_information(*bad)


def test_an_embedding_agrees_with_itself():
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(60, 4))
    assert cluster_agreement(rows, rows) == pytest.approx({2: 1.0, 3: 1.0, 4: 1.0})
    assert cluster_agreement(rows, 3.0 * rows + 1.0, ks=(2, 5), seeds=2) == pytest.approx({2: 1.0, 5: 1.0})
    elsewhere = cluster_agreement(rows, rng.normal(size=(60, 4)), ks=(3,))
    assert elsewhere[3] < 0.3
    one, two = (blobs(3, 20, seed=seed)[0] for seed in (1, 2))
    means = [mutual_information(clusters(one, 3, seed=s), clusters(two, 3, seed=s)) for s in range(4)]
    assert cluster_agreement(one, two, ks=(3,), seeds=4)[3] == pytest.approx(sum(means) / 4)


# -- classes of entities -----------------------------------------------------------------------------------------------


def half(n, seed=0):
    """Which entities to fit on; not the shuffle of `blobs`."""
    return np.random.default_rng([seed, 1]).permutation(n) < n // 2


@pytest.mark.parametrize("k", [2, 3, 5])
def test_separable_classes_are_told_apart(k):
    rows, labels = blobs(k, 40, apart=20.0)
    found = classify_entities(torch.from_numpy(rows).float(), 10 * labels - 7, train=half(len(rows)))
    assert (found.accuracy, found.macro_f1, found.classes, found.count) == (1.0, 1.0, k, 20 * k)
    assert found.majority < 0.7


def test_what_rows_do_not_say_is_not_found():
    rng = np.random.default_rng(1)
    labels = (rng.random(2000) < 0.3).astype(np.int64)
    train = half(2000)
    found = classify_entities(torch.from_numpy(rng.normal(size=(2000, 5))), labels, train=train)
    assert found.majority == pytest.approx((labels[~train] == 0).mean())
    assert abs(found.accuracy - found.majority) < 0.03


@few
@given(st.integers(2, 4), st.integers(6, 40), seeds)
def test_scores_of_the_probe_are_those_of_a_slow_loop(k, n, seed):
    """The rows say one number, and the probe learns it perfectly: so what it says of the others is known."""
    rng = np.random.default_rng(seed)
    said, train = rng.integers(0, k, n), half(n, seed)
    said[np.flatnonzero(train)[:k]] = np.arange(k)[: train.sum()]
    labels = said.copy()
    wrong = ~train & (rng.random(n) < 0.5)
    labels[wrong] = rng.integers(0, k, wrong.sum())
    fitted = set(said[train].tolist())
    rows = torch.eye(k, dtype=torch.float64)[torch.from_numpy(said)]
    found = classify_entities(rows, labels, train=train, penalty=1e-6)
    pairs = [(int(s), int(t)) for s, t in zip(said[~train], labels[~train], strict=True)]
    if not {s for s, _ in pairs} <= fitted:
        return
    f1 = []
    for which in {label for pair in pairs for label in pair}:
        true_positive = sum(s == t == which for s, t in pairs)
        claimed, there = sum(s == which for s, _ in pairs), sum(t == which for _, t in pairs)
        precision, recall = true_positive / claimed if claimed else 0.0, true_positive / there if there else 0.0
        f1.append(2 * precision * recall / (precision + recall) if precision + recall else 0.0)
    commonest = min(fitted, key=lambda c: (-(labels[train] == c).sum(), c))
    assert found.accuracy == pytest.approx(sum(s == t for s, t in pairs) / len(pairs))
    assert found.macro_f1 == pytest.approx(sum(f1) / len(f1))
    assert found.majority == pytest.approx(sum(t == commonest for _, t in pairs) / len(pairs))
    assert (found.count, found.classes) == (len(pairs), len(set(labels.tolist())))


def test_a_column_that_says_nothing_changes_nothing():
    """Constant among the entities fitted on, another number among the rest: it cannot have been learned from."""
    rows, labels = blobs(2, 30, apart=20.0)
    train = half(len(rows))
    for number in (0.0, 0.1, 1 / 3, 1e6 + 0.1):
        still = np.full((len(rows), 1), number)
        still[~train] += np.random.default_rng(0).normal(size=(int((~train).sum()), 1))
        found = classify_entities(torch.from_numpy(np.hstack([rows, still])), labels, train=train)
        assert found.accuracy == 1.0


@pytest.mark.parametrize("everyone", [True, False])
def test_a_probe_needs_both_kinds_of_entities(everyone):
    with pytest.raises(TacitError, match="a probe needs"):
        classify_entities(torch.zeros(4, 2), np.array([0, 1, 0, 1]), train=np.full(4, everyone))
