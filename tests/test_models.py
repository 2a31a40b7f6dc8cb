"""Scorers, tables, losses and optimizers: each against its formula written out by hand, one number at a time."""

from __future__ import annotations

import cmath
import math
import re
from collections import Counter, defaultdict

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from strategies import graphs, plain_triples
from tacit.cohort import Cohort
from tacit.draws import Purpose, Stream
from tacit.errors import TacitError
from tacit.kernels import Chunk, Objective, Reference, row_gradients
from tacit.losses import L2, LOSSES, N3, REGULARISERS, KVsAll, Margin, Regulariser, SelfAdversarial
from tacit.models import SCORERS, Layout, Prior, Tables, scorer
from tacit.models.tables import popularity, relation_weights
from tacit.optimizers import OPTIMIZERS, SGD, Adam, SparseAdam

seeds = st.integers(0, 2**32 - 1)
dims = st.integers(1, 4)
batches = st.integers(0, 3)

# -- formulas by hand: lists of numbers in, one number out -------------------------------------------------------------


def length(numbers, norm):
    return sum(abs(x) for x in numbers) if norm == 1 else math.sqrt(sum(x * x for x in numbers))


def dot(a, b):
    return sum(x * y for x, y in zip(a, b, strict=True))


def paired(row):
    """A row of real parts, then imaginary parts."""
    half = len(row) // 2
    return [complex(row[i], row[half + i]) for i in range(half)]


def quaternions(row):
    """A row of parts 1, i, j, k as 2 x 2 matrices of complex numbers, whose product is the quaternions' product."""
    n = len(row) // 4
    return [matrix(row[i], row[n + i], row[2 * n + i], row[3 * n + i]) for i in range(n)]


def matrix(a, b, c, d):
    return [[complex(a, b), complex(c, d)], [complex(-c, d), complex(a, -b)]]


def transe(s, h, r, t, core):
    return s.gamma - length([h[i] + r[i] - t[i] for i in range(len(h))], s.norm)


def transm(s, h, r, t, core):
    return s.gamma - r[-1] * length([h[i] + r[i] - t[i] for i in range(len(h))], s.norm)


def transh(s, h, r, t, core):
    n = len(h)
    move, w = r[:n], r[n:]
    on_plane = [[e[i] - dot(w, e) * w[i] for i in range(n)] for e in (h, t)]
    return s.gamma - length([on_plane[0][i] + move[i] - on_plane[1][i] for i in range(n)], s.norm)


def transr(s, h, r, t, core):
    n = len(h)
    lines = [r[n + i * n : n + (i + 1) * n] for i in range(n)]
    return s.gamma - length([dot(lines[i], h) + r[i] - dot(lines[i], t) for i in range(n)], s.norm)


def transd(s, h, r, t, core):
    n = len(h) // 2
    projected = [[e[i] + dot(e[n:], e[:n]) * r[n + i] for i in range(n)] for e in (h, t)]
    return s.gamma - length([projected[0][i] + r[i] - projected[1][i] for i in range(n)], s.norm)


def rotate(s, h, r, t, core):
    scale = s.init_scale if s.init_scale is not None else (s.gamma + 2) / len(r)
    turns = [cmath.exp(1j * math.pi * x / scale) for x in r]
    return s.gamma - sum(abs(a * turn - b) for a, turn, b in zip(paired(h), turns, paired(t), strict=True))


def rescal(s, h, r, t, core):
    n = len(h)
    return sum(h[i] * r[i * n + j] * t[j] for i in range(n) for j in range(n))


def distmult(s, h, r, t, core):
    return sum(h[i] * r[i] * t[i] for i in range(len(h)))


def complex_(s, h, r, t, core):
    return sum(a * b * c.conjugate() for a, b, c in zip(paired(h), paired(r), paired(t), strict=True)).real


def quate(s, h, r, t, core):
    n, total = len(h) // 4, 0.0
    for i, (p, q) in enumerate(zip(quaternions(h), quaternions(r), strict=True)):
        size = math.sqrt(abs(q[0][0]) ** 2 + abs(q[0][1]) ** 2)
        one, two = (sum(p[0][k] * q[k][j] for k in range(2)) / size for j in range(2))
        total += one.real * t[i] + one.imag * t[n + i] + two.real * t[2 * n + i] + two.imag * t[3 * n + i]
    return total


def tucker(s, h, r, t, core):
    n = range(len(h))
    return sum(core[i][j][k] * h[i] * r[j] * t[k] for i in n for j in n for k in n)


def ntn(s, h, r, t, core):
    k, n, total = s.slices, len(h), 0.0
    w, v, b, u = r[: k * n * n], r[k * n * n : k * n * (n + 2)], r[k * n * (n + 2) : -k], r[-k:]
    for z in range(k):
        inside = sum(h[i] * w[z * n * n + i * n + j] * t[j] for i in range(n) for j in range(n))
        inside += dot(v[z * 2 * n : z * 2 * n + n], h) + dot(v[z * 2 * n + n : (z + 1) * 2 * n], t) + b[z]
        total += u[z] * math.tanh(inside)
    return total


BY_HAND = {
    "transe": transe,
    "transm": transm,
    "transh": transh,
    "transr": transr,
    "transd": transd,
    "rotate": rotate,
    "rescal": rescal,
    "distmult": distmult,
    "complex": complex_,
    "quate": quate,
    "tucker": tucker,
    "ntn": ntn,
}
VARIANTS = [
    ("transe", {"norm": 2, "gamma": 3.5}),
    ("transe", {"norm": 2, "unit_entities": True}),
    ("transm", {"norm": 2}),
    ("transh", {"norm": 1}),
    ("transr", {"norm": 1}),
    ("transd", {"norm": 1}),
    ("rotate", {"init_scale": 0.7, "gamma": 4.0}),
    ("ntn", {"slices": 1}),
]
CASES = [(name, {}) for name in SCORERS] + VARIANTS
each_scorer = pytest.mark.parametrize("name", list(SCORERS))
each_case = pytest.mark.parametrize(("name", "options"), CASES, ids=lambda value: str(value).replace(" ", ""))


def numbers(rng, *shape):
    return torch.from_numpy(rng.normal(size=shape))


def some_rows(scorer, dim, rng, heads=(), relations=(), tails=()):
    """Random rows of these leading shapes, and the shared weights."""
    entity, relation = scorer.widths(dim)
    rows = numbers(rng, *heads, entity), numbers(rng, *relations, relation), numbers(rng, *tails, entity)
    return *rows, tuple(numbers(rng, *shape) for shape in scorer.shared_shapes(dim))


def by_hand(name, scorer, h, r, t, shared):
    core = shared[0].tolist() if shared else None
    return BY_HAND[name](scorer, h.tolist(), r.tolist(), t.tolist(), core)


def exact(values, *shape):
    return torch.tensor(values, dtype=torch.float64).reshape(shape)


def close(found, expected, tolerance=1e-11):
    expected = torch.as_tensor(expected, dtype=torch.float64)
    assert tuple(found.shape) == tuple(expected.shape)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


# -- the contract of every scorer --------------------------------------------------------------------------------------


def test_every_scorer_has_a_formula_by_hand_and_names_its_paper():
    assert set(BY_HAND) == set(SCORERS)
    for name, made in SCORERS.items():
        assert re.search(r'[A-Z]\w+.*: ".+"', made.__dict__["__doc__"], re.DOTALL), f"{name} names no paper"
        assert re.search(r"\b(19|20)\d\d\b", made.__dict__["__doc__"]), f"{name} names no year"


@each_case
@given(dims, seeds)
def test_a_score_is_its_formula(name, options, dim, seed):
    scorer = SCORERS[name](**options)
    h, r, t, shared = some_rows(scorer, dim, np.random.default_rng(seed))
    close(scorer.score(h, r, t, shared), by_hand(name, scorer, h, r, t, shared))


@each_case
@given(dims, batches, st.integers(0, 3), seeds)
def test_all_ways_of_scoring_agree(name, options, dim, batch, count, seed):
    scorer, rng = SCORERS[name](**options), np.random.default_rng(seed)
    h, r, t, shared = some_rows(scorer, dim, rng, (batch,), (batch,), (batch,))
    common, own = numbers(rng, count, h.shape[-1]), numbers(rng, batch, count, h.shape[-1])
    copies = tuple(core.expand(batch, *core.shape) for core in shared)
    for given_shared in (shared, tuple(core[None] for core in shared), copies):
        close(
            scorer.score(h, r, t, given_shared),
            exact([by_hand(name, scorer, h[i], r[i], t[i], shared) for i in range(batch)], batch),
        )
        for candidates in (common, own):
            tails, heads = torch.zeros(batch, count).double(), torch.zeros(batch, count).double()
            for i in range(batch):
                for j in range(count):
                    candidate = candidates[j] if candidates.dim() == 2 else candidates[i, j]
                    tails[i, j] = by_hand(name, scorer, h[i], r[i], candidate, shared)
                    heads[i, j] = by_hand(name, scorer, candidate, r[i], t[i], shared)
            close(scorer.score_tails(h, r, candidates, given_shared), tails)
            close(scorer.score_heads(r, t, candidates, given_shared), heads)


@each_case
@given(seeds)
def test_gradients_are_finite_differences_of_the_formula(name, options, seed):
    scorer, step = SCORERS[name](**options), 1e-6
    h, r, t, shared = some_rows(scorer, 2, np.random.default_rng(seed))
    leaves = [tensor.clone().requires_grad_() for tensor in (h, r, t, *shared)]
    found = torch.autograd.grad(scorer.score(*leaves[:3], tuple(leaves[3:])), leaves)
    for which, gradient in enumerate(found):
        for place in np.ndindex(*gradient.shape):
            if scorer.frozen and which == 1 and place[0] >= r.shape[0] - scorer.frozen:
                assert gradient[place] == 0
                continue
            sides = []
            for sign in (1, -1):
                moved = [tensor.clone() for tensor in (h, r, t, *shared)]
                moved[which][place] += sign * step
                sides.append(by_hand(name, scorer, *moved[:3], tuple(moved[3:])))
            slope = (sides[0] - sides[1]) / (2 * step)
            here = by_hand(name, scorer, h, r, t, shared)
            if abs(sides[0] + sides[1] - 2 * here) > 1e-2 * step:
                continue  # a corner of a norm: no slope to compare with
            assert math.isclose(float(gradient[place]), slope, rel_tol=1e-5, abs_tol=1e-6)


@each_case
@given(batches, st.integers(0, 3), seeds)
def test_gradients_of_candidates_are_those_of_single_scores(name, options, batch, count, seed):
    scorer, rng = SCORERS[name](**options), np.random.default_rng(seed)
    h, r, t, shared = some_rows(scorer, 3, rng, (batch,), (batch,), (batch,))
    factors = numbers(rng, batch, count)
    for candidates in (numbers(rng, count, h.shape[-1]), numbers(rng, batch, count, h.shape[-1])):
        for asks_head in (False, True):
            leaves = [tensor.clone().requires_grad_() for tensor in (t if asks_head else h, r, candidates, *shared)]
            known, relation, rows, *core = leaves
            if asks_head:
                scores = scorer.score_heads(relation, known, rows, tuple(core))
            else:
                scores = scorer.score_tails(known, relation, rows, tuple(core))
            found = torch.autograd.grad((scores * factors).sum(), leaves, allow_unused=True)
            total = sum(leaf.sum() * 0 for leaf in leaves)
            for i in range(batch):
                for j in range(count):
                    row = rows[j] if rows.dim() == 2 else rows[i, j]
                    ends = (row, known[i]) if asks_head else (known[i], row)
                    total = total + factors[i, j] * scorer.score(ends[0], relation[i], ends[1], tuple(core))
            for one, other, leaf in zip(found, torch.autograd.grad(total, leaves), leaves, strict=True):
                close(torch.zeros_like(leaf) if one is None else one, other)


@pytest.mark.parametrize("name", ["transe", "transh", "transr", "transd", "transm", "rotate"])
@given(seeds)
def test_where_the_distance_is_nothing_so_is_the_gradient(name, seed):
    scorer, rng = SCORERS[name](**({} if name == "rotate" else {"norm": 2})), np.random.default_rng(seed)
    entity, relation = scorer.widths(2)
    h = torch.from_numpy(rng.integers(-4, 5, (1, entity))).double()
    r = torch.zeros(1, relation).double()
    if name in ("transe", "transm"):
        r = torch.from_numpy(rng.integers(-4, 5, (1, relation))).double()
    t = h + r[:, :entity] if name in ("transe", "transm") else h.clone()
    if name in ("transh", "transr"):
        r[:, 2:] = numbers(rng, 1, relation - 2)
    for way in ("score", "tails", "own tails", "heads", "own heads"):
        a, b, c = (tensor.clone().requires_grad_() for tensor in (h, r, t))
        if way == "score":
            score = scorer.score(a, b, c)
        elif "tails" in way:
            score = scorer.score_tails(a, b, c[None] if "own" in way else c)
        else:
            score = scorer.score_heads(b, c, a[None] if "own" in way else a)
        assert math.isclose(float(score.detach()), scorer.gamma)
        for gradient in torch.autograd.grad(score.sum(), (a, b, c)):
            assert (gradient == 0).all(), way


@given(st.sampled_from([1, 2]), dims, st.integers(1, 3), seeds)
def test_the_weight_of_transm_gets_no_gradient(norm, dim, batch, seed):
    scorer = SCORERS["transm"](norm=norm)
    rng = np.random.default_rng(seed)
    h, r, t, _ = some_rows(scorer, dim, rng, (batch,), (batch,), (batch,))
    r.requires_grad_()
    for score in (scorer.score(h, r, t), scorer.score_tails(h, r, t), scorer.score_heads(r, t, h)):
        gradient = torch.autograd.grad((score * numbers(rng, *score.shape)).sum(), r)[0]
        assert (gradient[:, -1] == 0).all()
        assert (gradient[:, :-1] != 0).any()


@pytest.mark.parametrize("regulariser", [L2(0.5), N3(0.5)])
def test_no_regulariser_moves_the_weight_of_transm(regulariser):
    """The weight is given and not learned, so it has no part in a gradient, nor in the norm that clipping takes."""
    scorer = SCORERS["transm"]()
    objective = Objective(scorer, LOSSES["logistic"](), regulariser)
    one, ids = torch.ones(1), torch.zeros(1, dtype=torch.int64)
    chunk = Chunk(ids, ids, ids + 1, ids, ids.bool(), one, ids, negatives=ids[:, None] + 2)
    tables = Tables(torch.arange(6).reshape(3, 2).double(), exact([0.5, -1.0, 1.4], 1, 3))
    found = row_gradients(Reference(objective, Layout((3,), (1,))), tables, chunk)
    assert found.relation.values[0, -1] == 0


# -- first values and constraints --------------------------------------------------------------------------------------


@each_scorer
@pytest.mark.parametrize("init", ["uniform", "normal"])
@given(st.integers(0, 6), st.integers(0, 6), dims, st.integers(0, 9))
def test_first_rows_do_not_depend_on_how_many_there_are(name, init, few, more, dim, seed):
    made = SCORERS[name](init=init)
    for part, width in zip(("entity", "relation"), made.widths(dim), strict=True):
        draw = Stream(seed, Purpose.INIT, 3)
        short, long = (made.initial(part, rows, width, dim, draw) for rows in (few, few + more))
        assert short.dtype == torch.float32
        assert short.shape == (few, width)
        assert torch.equal(long[:few], short)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(scorer, "PIECE", 8)
            assert torch.equal(made.initial(part, few + more, width, dim, draw), long)


@pytest.mark.parametrize("name", [name for name in SCORERS if name != "transr"])
def test_first_values_have_the_spread_they_should(name):
    width, dim = 50, 20
    for scale in (None, 0.3):
        expected = scale or (12.0 / dim)
        flat, bell = (SCORERS[name](init=init, init_scale=scale) for init in ("uniform", "normal"))
        values = flat.initial("entity", 400, width, dim, Stream(1, Purpose.INIT))
        assert expected * 0.999 < float(values.abs().max()) <= expected
        assert abs(float(values.mean())) < 0.03 * expected
        values = bell.initial("entity", 400, width, dim, Stream(1, Purpose.INIT))
        assert math.isclose(float(values.std()), expected, rel_tol=0.02)
        assert math.isclose(float((values.abs() < expected).double().mean()), 0.6827, abs_tol=0.02)


@pytest.mark.parametrize("init", ["uniform", "normal"])
def test_the_first_core_of_tucker_has_deviation_one_by_dim(init):
    dim = 16
    core = Tables.begin(SCORERS["tucker"](init=init), dim, Layout((1,), (1,)), seed=1).shared[0]
    assert math.isclose(float(core.std()), 1 / dim, rel_tol=0.05)


def test_the_first_matrices_of_transr_are_identities():
    rows = Tables.begin(SCORERS["transr"](), 3, Layout((2,), (4,)), seed=1).relation
    assert torch.equal(rows[:, 3:].reshape(4, 3, 3), torch.eye(3).expand(4, 3, 3))


@each_scorer
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), min_size=1, max_size=3), seeds)
def test_a_party_begins_the_same_alone_and_in_any_cohort(name, sizes, seed):
    scorer, dim = SCORERS[name](), 2
    weights = [torch.rand(relations) for _, relations in sizes] if scorer.statistics else None
    places = list(range(len(sizes)))[::-1]

    def begun(which):
        layout = Layout(*zip(*[sizes[i] for i in which], strict=True), tuple(10 + i for i in which))
        given_weights = [weights[i] for i in which] if weights else None
        return Tables.begin(scorer, dim, layout, seed=seed, weights=given_weights), layout

    whole, layout = begun(places)
    for at, i in enumerate(places):
        alone, one = whole.party(layout, at), begun([i])[0]
        assert alone.tensors().keys() == one.tensors().keys()
        assert all(torch.equal(a, b) for a, b in zip(alone.tensors().values(), one.tensors().values(), strict=True))
        if weights:
            assert torch.equal(alone.relation[:, -1], weights[i])


@each_case
@given(dims, st.integers(0, 4), seeds)
def test_constraints_hold_and_hold_again(name, options, dim, count, seed):
    scorer, rng = SCORERS[name](**options), np.random.default_rng(seed)
    for part, width in zip(("entity", "relation"), scorer.widths(dim), strict=True):
        rows = numbers(rng, count, width)
        once = scorer.constrain(part, rows)
        close(scorer.constrain(part, once), once, 1e-15)
        if part == "entity" and options.get("unit_entities"):
            close(once.square().sum(-1), torch.ones(count))
        elif part == "relation" and name == "transh":
            close(once[:, dim:].square().sum(-1), torch.ones(count))
            assert torch.equal(once[:, :dim], rows[:, :dim])
        else:
            assert once is rows


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("transe", {"norm": 3}, "norm is 1 or 2, not 3"),
        ("transd", {"norm": 0}, "norm is 1 or 2, not 0"),
        ("ntn", {"slices": 0}, "slices is at least 1, not 0"),
        *((name, {"init": "x"}, "uniform or normal, not 'x'") for name in SCORERS),
        *((name, {"init_scale": 0.0}, "init_scale is above 0") for name in SCORERS),
        ("complex", {"init_scale": float("nan")}, "init_scale is above 0"),
    ],
)
def test_bad_options_of_scorers_are_refused(name, options, message):
    with pytest.raises(TacitError, match=message):
        SCORERS[name](**options)


# -- tables ------------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 4)), min_size=1, max_size=4), seeds)
def test_a_layout_says_whose_rows_are_whose(sizes, seed):
    layout = Layout(tuple(e for e, _ in sizes), tuple(r for _, r in sizes))
    assert layout.numbers == tuple(range(len(sizes)))
    assert len(layout) == len(sizes)
    for which, part in enumerate(("entity", "relation")):
        owners = [party for party, both in enumerate(sizes) for _ in range(both[which])]
        assert layout.owner(part).tolist() == owners
        for party in range(len(sizes)):
            rows = layout.rows(part, party)
            assert list(range(rows.start, rows.stop)) == [i for i, owner in enumerate(owners) if owner == party]
    tables = Tables.begin(SCORERS["tucker"](), 2, layout, seed=seed)
    parties = [tables.party(layout, party) for party in range(len(layout))]
    assert torch.equal(torch.cat([party.entity for party in parties]), tables.entity)
    assert torch.equal(torch.cat([party.relation for party in parties]), tables.relation)
    assert torch.equal(torch.cat([party.shared[0] for party in parties]), tables.shared[0])
    for party in parties:
        for tensor in party.tensors().values():
            tensor.fill_(7.0)
    assert all((tensor == 7.0).all() for tensor in tables.tensors().values())


@pytest.mark.parametrize(
    "bad", [((1, 2), (1,)), ((1,), (1,), (1, 2)), ((1, 2), (1, 2), (4, 4)), ((1, 2), (1, 2), (4, 4, 5))]
)
def test_a_layout_that_does_not_fit_is_refused(bad):
    with pytest.raises(TacitError, match="a number of its own"):
        Layout(*bad)


def test_tables_that_make_no_sense_are_refused():
    with pytest.raises(TacitError, match="dim is at least 1, not 0"):
        Tables.begin(SCORERS["transe"](), 0, Layout((1,), (1,)), seed=0)
    with pytest.raises(TacitError, match="TransM needs the weights"):
        Tables.begin(SCORERS["transm"](), 2, Layout((1,), (1,)), seed=0)


@given(st.integers(0, 12))
def test_tables_are_what_their_tensors_are(count):
    tables = Tables(torch.ones(1, 1), torch.ones(2, 1), tuple(torch.full((1, 1), float(i)) for i in range(count)))
    again = Tables.of(tables.tensors())
    assert torch.equal(again.entity, tables.entity)
    assert torch.equal(again.relation, tables.relation)
    assert [float(tensor) for tensor in again.shared] == list(range(count))


@given(graphs(plain_triples))
def test_relation_weights_are_counted_one_triple_at_a_time(graph):
    tails, heads = defaultdict(set), defaultdict(set)
    for h, r, t in graph.train.triples.tolist():
        tails[r, h].add(t)
        heads[r, t].add(h)
    expected = []
    for relation in range(len(graph.relations)):
        tph = [len(found) for (r, _), found in tails.items() if r == relation]
        hpt = [len(found) for (r, _), found in heads.items() if r == relation]
        both = sum(tph) / len(tph) + sum(hpt) / len(hpt) if tph else 2.0
        expected.append(1 / math.log(both))
    found = relation_weights(graph)
    assert found.dtype == torch.float32
    close(found.double(), expected, 1e-6)


@given(graphs(plain_triples))
def test_popularity_counts_heads_and_tails(graph):
    triples = graph.train.triples.tolist()
    heads, tails = Counter((r, h) for h, r, _ in triples), Counter((r, t) for _, r, t in triples)
    prior = popularity(graph)
    pairs = [(r, e) for r in range(len(graph.relations)) for e in range(len(graph.entities))]
    shape = len(graph.relations), len(graph.entities)
    for found, counts in ((prior.heads, heads), (prior.tails, tails)):
        close(found.double(), exact([math.log(1 + counts[pair]) for pair in pairs], *shape), 1e-6)


@given(batches, st.floats(-2, 2), seeds)
def test_a_prior_adds_one_number_for_the_head_and_one_for_the_tail(batch, scale, seed):
    rng = np.random.default_rng(seed)
    prior = Prior(numbers(rng, 3, 5), numbers(rng, 3, 5), scale)
    h, r, t = (torch.from_numpy(rng.integers(0, high, batch)) for high in (5, 3, 5))
    expected = [
        scale * (prior.tails.tolist()[b][c] + prior.heads.tolist()[b][a])
        for a, b, c in zip(h.tolist(), r.tolist(), t.tolist(), strict=True)
    ]
    close(prior.of(h, r, t), exact(expected, batch))
    table = prior.of(h[:, None], r[:, None], torch.arange(5))
    for i in range(batch):
        for tail in range(5):
            assert math.isclose(
                table[i, tail], scale * (prior.tails[r[i], tail] + prior.heads[r[i], h[i]]), abs_tol=1e-12
            )


# -- losses ------------------------------------------------------------------------------------------------------------


def log_sigmoid(x):
    return -math.log(1 + math.exp(-x)) if x > 0 else x - math.log(1 + math.exp(x))


def self_adversarial(loss, positive, there):
    total = sum(math.exp(loss.alpha * x) for x in there)
    return -log_sigmoid(positive), -sum(math.exp(loss.alpha * x) / total * log_sigmoid(-x) for x in there)


def margin(loss, positive, there):
    return 0.0, sum(max(0.0, loss.margin - positive + x) for x in there) / max(len(there), 1)


def logistic(loss, positive, there):
    return -log_sigmoid(positive), -sum(log_sigmoid(-x) for x in there) / max(len(there), 1)


def softmax(loss, positive, there):
    return 0.0, -math.log(math.exp(positive) / (math.exp(positive) + sum(math.exp(x) for x in there)))


LOSSES_BY_HAND = {
    "self-adversarial": self_adversarial,
    "margin": margin,
    "logistic": logistic,
    "softmax": softmax,
    "one-vs-all": softmax,
}


def test_every_loss_has_a_formula_by_hand():
    assert {*LOSSES_BY_HAND, "k-vs-all"} == set(LOSSES)


@pytest.mark.parametrize("name", list(LOSSES_BY_HAND))
@given(batches, st.integers(0, 4), st.sampled_from([0.0, 0.5, 1.0]), st.floats(0, 3), seeds)
def test_a_loss_is_its_formula(name, batch, count, share, option, seed):
    rng = np.random.default_rng(seed)
    loss = {"self-adversarial": lambda: SelfAdversarial(alpha=option), "margin": lambda: Margin(margin=option)}.get(
        name, LOSSES[name]
    )()
    positive, negative = 3 * numbers(rng, batch), 3 * numbers(rng, batch, count)
    present = torch.from_numpy(rng.random((batch, count)) < share)
    expected = [
        LOSSES_BY_HAND[name](loss, p, [x for x, there in zip(row, mask, strict=True) if there])
        for p, row, mask in zip(positive.tolist(), negative.tolist(), present.tolist(), strict=True)
    ]
    leaves = positive.requires_grad_(), negative.requires_grad_()
    parts = loss(*leaves, present)
    for which in (0, 1):
        close(parts[which].detach(), exact([both[which] for both in expected], batch))
    if not loss.apart:
        assert (parts[0] == 0).all()
    gradients = torch.autograd.grad((parts[0] + parts[1]).sum() + 0 * sum(leaf.sum() for leaf in leaves), leaves)
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert (gradients[1][~present] == 0).all()


@pytest.mark.parametrize("name", list(LOSSES_BY_HAND))
def test_losses_stay_finite_far_out(name):
    for value in (-1e4, 1e4):
        for other in (-1e4, 1e4):
            positive = torch.tensor([value], dtype=torch.float64, requires_grad=True)
            negative = torch.tensor([[other, 0.0]], dtype=torch.float64, requires_grad=True)
            total = sum(LOSSES[name]()(positive, negative, torch.ones(1, 2, dtype=torch.bool)))
            gradients = torch.autograd.grad(total.sum(), (positive, negative))
            assert all(tensor.isfinite().all() for tensor in (total, *gradients))


@given(st.integers(1, 3), st.integers(1, 4), st.floats(0, 3), seeds)
def test_self_adversarial_weights_have_no_gradient(batch, count, alpha, seed):
    rng = np.random.default_rng(seed)
    positive, negative = numbers(rng, batch).requires_grad_(), numbers(rng, batch, count).requires_grad_()
    present = torch.from_numpy(rng.random((batch, count)) < 0.7)
    parts = SelfAdversarial(alpha)(positive, negative, present)
    found = torch.autograd.grad((parts[0] + parts[1]).sum(), (positive, negative))
    trues, falses = positive.tolist(), negative.tolist()
    for i in range(batch):
        assert math.isclose(float(found[0][i]), -1 / (1 + math.exp(trues[i])), rel_tol=1e-10)
        total = sum(math.exp(alpha * falses[i][j]) for j in range(count) if present[i, j])
        for j in range(count):
            value = falses[i][j]
            weight = math.exp(alpha * value) / total if present[i, j] else 0.0
            assert math.isclose(float(found[1][i, j]), weight / (1 + math.exp(-value)), rel_tol=1e-10)


@pytest.mark.parametrize("entropy", ["binary", "softmax"])
@given(batches, st.integers(1, 5), st.floats(0, 0.9), seeds)
def test_k_vs_all_is_its_formula(entropy, batch, count, smoothing, seed):
    rng = np.random.default_rng(seed)
    scores, labels = 3 * numbers(rng, batch, count), rng.integers(0, 2, (batch, count))
    labels[:, 0] = 1  # a query has at least one answer
    expected = []
    for row, marks in zip(scores.tolist(), labels.tolist(), strict=True):
        if entropy == "binary":
            wanted = [(1 - smoothing) * mark + smoothing / count for mark in marks]
            terms = [w * log_sigmoid(x) + (1 - w) * log_sigmoid(-x) for w, x in zip(wanted, row, strict=True)]
            expected.append(-sum(terms) / count)
        else:
            wanted = [(1 - smoothing) * mark / sum(marks) + smoothing / count for mark in marks]
            total = sum(math.exp(x) for x in row)
            expected.append(-sum(w * math.log(math.exp(x) / total) for w, x in zip(wanted, row, strict=True)))
    found = KVsAll(entropy, smoothing).of_labels(scores, torch.from_numpy(labels).double())
    close(found, exact(expected, batch), 1e-10)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Margin(margin=-1.0), "margin is at least 0"),
        (lambda: KVsAll(entropy="x"), "entropy is 'binary' or 'softmax', not 'x'"),
        (lambda: KVsAll(smoothing=1.0), "smoothing is in"),
        (lambda: L2(-1.0), "weight of a regulariser"),
        (lambda: N3(float("nan")), "weight of a regulariser"),
        (lambda: SGD(learning_rate=0.0), "learning_rate is above 0"),
        (lambda: SGD(momentum=1.0), "momentum is in"),
        (lambda: Adam(beta1=1.0), "beta1 and beta2"),
    ],
)
def test_bad_options_of_losses_and_optimizers_are_refused(make, message):
    with pytest.raises(TacitError, match=message):
        make()


@pytest.mark.parametrize("name", ["none", "l2", "n3"])
@given(batches, st.integers(1, 5), st.floats(0, 2), seeds)
def test_a_regulariser_is_its_formula(name, batch, width, weight, seed):
    sizes = numbers(np.random.default_rng(seed), batch, width).abs()
    power = {"l2": 2, "n3": 3}.get(name)
    expected = [weight * sum(x**power for x in row) if power else 0.0 for row in sizes.tolist()]
    made = REGULARISERS[name](weight)
    assert isinstance(made, Regulariser)
    close(made.of(sizes), exact(expected, batch))


@each_scorer
@given(dims, batches, seeds)
def test_sizes_are_moduli_where_numbers_are_complex(name, dim, batch, seed):
    scorer = SCORERS[name]()
    rows = numbers(np.random.default_rng(seed), batch, scorer.widths(dim)[0])
    expected = []
    for row in rows.tolist():
        if name in ("complex", "rotate"):
            expected.append([abs(z) for z in paired(row)])
        elif name == "quate":
            expected.append([math.sqrt(abs(q[0][0]) ** 2 + abs(q[0][1]) ** 2) for q in quaternions(row)])
        else:
            expected.append([abs(x) for x in row])
    sizes = scorer.magnitudes("entity", rows)
    close(sizes, exact(expected, batch, len(expected[0]) if batch else sizes.shape[-1]))
    close(N3(0.5).of(sizes), exact([0.5 * sum(x**3 for x in row) for row in expected], batch))


@pytest.mark.parametrize("name", ["complex", "rotate", "quate"])
def test_sizes_of_nothing_have_no_gradient(name):
    scorer = SCORERS[name]()
    rows = torch.zeros(1, scorer.widths(2)[0], dtype=torch.float64, requires_grad=True)
    for regulariser in (L2(1.0), N3(1.0)):
        gradient = torch.autograd.grad(regulariser.of(scorer.magnitudes("entity", rows)).sum(), rows)[0]
        assert (gradient == 0).all()


# -- optimizers --------------------------------------------------------------------------------------------------------

THEIRS = {
    "sgd": (SGD(0.1, momentum=0.9), lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)),
    "sgd-plain": (SGD(0.1), lambda p: torch.optim.SGD(p, 0.1)),
    "adagrad": (OPTIMIZERS["adagrad"](0.1), lambda p: torch.optim.Adagrad(p, 0.1)),
    "adam": (Adam(0.05), lambda p: torch.optim.Adam(p, 0.05)),
    "adam-slow": (Adam(1e-3, beta1=0.5, beta2=0.99), lambda p: torch.optim.Adam(p, 1e-3, (0.5, 0.99))),
}


@pytest.mark.parametrize("name", list(THEIRS))
@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 2)), min_size=1, max_size=3), st.integers(1, 6),
       st.integers(1, 2), seeds)  # fmt: skip
def test_steps_are_those_of_torch(name, sizes, steps, memories, seed):
    """Each party against an optimizer of its own, or several, one of which takes a step only if the party does."""
    rng, (ours, theirs) = np.random.default_rng(seed), THEIRS[name]
    scorer, layout = SCORERS["tucker"](), Layout(*zip(*sizes, strict=True))
    tables = Tables.begin(scorer, 2, layout, seed=seed).like(lambda tensor: tensor.double())
    alone = [
        [torch.nn.Parameter(tensor.clone()) for tensor in tables.party(layout, party).tensors().values()]
        for party in range(len(layout))
    ]
    optimizers = [[theirs(parameters) for _ in range(memories)] for parameters in alone]
    cohort, taken = Cohort(scorer, tables, layout, ours, memories), [0] * len(layout)
    for _ in range(steps):
        active, divisor = torch.from_numpy(rng.random(len(layout)) < 0.8), torch.from_numpy(rng.random(len(layout)) + 1)
        cohort.which.copy_(torch.from_numpy(rng.integers(0, memories, len(layout))))
        gradients = cohort.gradients
        gradients.add_entities(torch.arange(len(tables.entity)), numbers(rng, *tables.entity.shape))
        gradients.add_relations(torch.arange(len(tables.relation)), numbers(rng, *tables.relation.shape))
        gradients.tables.shared[0].add_(numbers(rng, *tables.shared[0].shape))
        for party in active.nonzero()[:, 0].tolist():
            taken[party] += 1
            rows = gradients.tables.party(layout, party).tensors().values()
            for parameter, gradient in zip(alone[party], rows, strict=True):
                parameter.grad = (gradient / divisor[party]).clone()
            optimizers[party][int(cohort.which[party])].step()
        cohort.finish(divisor, active)
        assert all((tensor == 0).all() for tensor in gradients.tensors())
    assert cohort.steps.tolist() == taken
    for party, parameters in enumerate(alone):
        for found, expected in zip(tables.party(layout, party).tensors().values(), parameters, strict=True):
            close(found, expected.detach(), 1e-12)


@given(st.integers(1, 6), st.integers(1, 6), seeds)
def test_sparse_steps_are_those_of_torch(rows, steps, seed):
    """torch adds eps before it corrects the second moment; next to nothing of it makes the two the same."""
    rng, layout = np.random.default_rng(seed), Layout((rows,), (2,))
    tables = Tables.begin(SCORERS["distmult"](), 3, layout, seed=seed).like(lambda tensor: tensor.double())
    theirs = torch.nn.Parameter(tables.entity.clone())
    optimizer = torch.optim.SparseAdam([theirs], 0.05, eps=1e-20)
    relation = tables.relation.clone()
    cohort = Cohort(SCORERS["distmult"](), tables, layout, SparseAdam(0.05, eps=1e-20))
    for _ in range(steps):
        touched = torch.from_numpy(rng.integers(0, rows, rng.integers(0, 5)))
        values = numbers(rng, len(touched), 3)
        cohort.gradients.add_entities(touched, values)
        theirs.grad = torch.sparse_coo_tensor(touched[None], values, theirs.shape, check_invariants=True)
        optimizer.step()
        cohort.finish(torch.ones(1), torch.ones(1, dtype=torch.bool))
        assert all((tensor == 0).all() for tensor in cohort.gradients.tensors())
    close(tables.entity, theirs.detach(), 1e-12)
    assert torch.equal(tables.relation, relation)


def test_the_first_step_of_adam_is_the_learning_rate():
    """Also in float32: a correction of the second moment that is off shows here first."""
    tables = Tables(torch.zeros(1, 1), torch.zeros(1, 1))
    cohort = Cohort(SCORERS["distmult"](), tables, Layout((1,), (1,)), Adam(1.0, eps=0.0))
    cohort.gradients.add_entities(torch.zeros(1, dtype=torch.int64), torch.ones(1, 1))
    cohort.gradients.add_relations(torch.zeros(1, dtype=torch.int64), torch.ones(1, 1))
    cohort.finish(torch.ones(1), torch.ones(1, dtype=torch.bool))
    assert abs(float(tables.entity) + 1) < 1e-6


@given(seeds)
def test_a_step_keeps_constraints_and_what_is_frozen(seed):
    rng, layout = np.random.default_rng(seed), Layout((3,), (2,))
    for name, options in (("transm", {"unit_entities": True}), ("transh", {})):
        scorer = SCORERS[name](**options)
        weights = [torch.tensor([0.5, 1.5])] if scorer.statistics else None
        tables = Tables.begin(scorer, 2, layout, seed=seed, weights=weights).like(lambda tensor: tensor.double())
        cohort = Cohort(scorer, tables, layout, Adam(0.1))
        for _ in range(3):
            cohort.gradients.add_entities(torch.arange(3), numbers(rng, *tables.entity.shape))
            cohort.gradients.add_relations(torch.arange(2), numbers(rng, *tables.relation.shape))
            cohort.finish(torch.ones(1), torch.ones(1, dtype=torch.bool))
        if name == "transm":
            assert tables.relation[:, -1].tolist() == [0.5, 1.5]
            close(tables.entity.square().sum(-1), torch.ones(3))
        else:
            close(tables.relation[:, 2:].square().sum(-1), torch.ones(2))
