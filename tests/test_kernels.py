"""The reference kernel against what it stands for: one example at a time, by autograd on whole dense tables."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tacit.errors import TacitError
from tacit.kernels import ABSENT, Chunk, Clipped, Gradients, Objective, Plain, Reference, reference, row_gradients
from tacit.kernels.products import Products
from tacit.losses import LOSSES, REGULARISERS, Dura, KVsAll, Logistic, Margin, SelfAdversarial, Softmax
from tacit.models import SCORERS, Layout, Prior, Tables

DIM = 2
KINDS = ("negatives", "pool", "triples", "everyone", "answers")
seeds = st.integers(0, 2**32 - 1)

# -- one triple's score, by torch so that it can be derived, written anew ----------------------------------------------


def complex_row(row):
    return torch.complex(row[: len(row) // 2], row[len(row) // 2 :])


def transe(h, r, t, core, s):
    return s.gamma - ((h + r - t).abs().sum() if s.norm == 1 else (h + r - t).square().sum().sqrt())


def transm(h, r, t, core, s):
    return s.gamma - r[-1].detach() * (h + r[:-1] - t).abs().sum()


def transh(h, r, t, core, s):
    move, w = r[:DIM], r[DIM:]
    return s.gamma - ((h - (w @ h) * w) + move - (t - (w @ t) * w)).square().sum().sqrt()


def rotate(h, r, t, core, s):
    angle = r * math.pi * DIM / (s.gamma + 2)
    return s.gamma - (complex_row(h) * torch.complex(angle.cos(), angle.sin()) - complex_row(t)).abs().sum()


def distmult(h, r, t, core, s):
    return (h * r * t).sum()


def complex_(h, r, t, core, s):
    return (complex_row(h) * complex_row(r) * complex_row(t).conj()).sum().real


def tucker(h, r, t, core, s):
    return sum(core[i, j, k] * h[i] * r[j] * t[k] for i in range(DIM) for j in range(DIM) for k in range(DIM))


def ntn(h, r, t, core, s):
    w, v, b, u = r[:4], r[4:8], r[8], r[9]
    return u * torch.tanh(h @ w.reshape(DIM, DIM) @ t + v[:DIM] @ h + v[DIM:] @ t + b)


SCORES = {
    "transe": ({"norm": 1}, transe),
    "transe-l2": ({"norm": 2}, transe),
    "transm": ({}, transm),
    "transh": ({}, transh),
    "rotate": ({}, rotate),
    "distmult": ({}, distmult),
    "complex": ({}, complex_),
    "tucker": ({}, tucker),
    "ntn": ({"slices": 1}, ntn),
}


PRODUCTS = ("distmult", "complex", "tucker")
"""Those of them that are a product of a query and a row."""


def sizes(name, row):
    return complex_row(row).abs() if name in ("complex", "rotate") and len(row) == 2 * DIM else row.abs()


# -- one example's loss ------------------------------------------------------------------------------------------------


def log1pexp(x):
    return torch.log(1 + torch.exp(x))


def slow_loss(loss, positive, negative):
    """The two parts, given a number and a list of numbers."""
    nothing = torch.zeros((), dtype=torch.float64)
    if isinstance(loss, Softmax):
        return nothing, torch.log(torch.exp(positive) + sum(torch.exp(x) for x in negative)) - positive
    if isinstance(loss, Margin):
        terms = [loss.margin - positive + x for x in negative]
        return nothing, sum((x for x in terms if x > 0), nothing) / max(len(terms), 1)
    first = log1pexp(-positive)
    if isinstance(loss, SelfAdversarial):
        total = sum(math.exp(loss.alpha * float(x.detach())) for x in negative)
        shares = [math.exp(loss.alpha * float(x.detach())) / total for x in negative]
        return first, sum((p * log1pexp(x) for p, x in zip(shares, negative, strict=True)), nothing)
    assert isinstance(loss, Logistic)
    return first, sum((log1pexp(x) for x in negative), nothing) / max(len(negative), 1)


def slow_k_vs_all(loss, scores, answers):
    n, labels = len(scores), [1.0 if i in answers else 0.0 for i in range(len(scores))]
    if loss.entropy == "softmax":
        labels = [(1 - loss.smoothing) * x / sum(labels) + loss.smoothing / n for x in labels]
        total = torch.log(sum(torch.exp(x) for x in scores))
        return -sum(x * (score - total) for x, score in zip(labels, scores, strict=True))
    labels = [(1 - loss.smoothing) * x + loss.smoothing / n for x in labels]
    return sum(x * log1pexp(-s) + (1 - x) * log1pexp(s) for x, s in zip(labels, scores, strict=True)) / n


@dataclass
class Case:
    """Anything a kernel may be given."""

    name: str
    objective: Objective
    layout: Layout
    tables: Tables
    chunk: Chunk

    @property
    def kernel(self):
        return Reference(self.objective, self.layout)

    def buffers(self):
        return Gradients(self.tables.like(torch.zeros_like))

    def dense(self):
        return self.tables.like(lambda tensor: tensor.clone().requires_grad_())

    def slow(self, i, tables):
        """The two parts of the loss of example i on dense tables."""
        chunk, loss, prior = self.chunk, self.objective.loss, self.objective.prior
        head, relation, tail, party = (int(x[i]) for x in (chunk.head, chunk.relation, chunk.tail, chunk.party))
        asks_head, start = bool(chunk.asks_head[i]), sum(self.layout.entities[:party])
        core = tables.shared[0][party] if tables.shared else None
        known, row = tables.entity[tail if asks_head else head], tables.relation[relation]
        if chunk.drop_entity is not None:
            known, row = known * chunk.drop_entity[i], row * chunk.drop_relation[i]

        def of(h, r, t, rows):
            value = SCORES[self.name][1](*rows, core, self.objective.scorer)
            if prior is not None:
                value = value + prior.scale * (prior.tails[r, t - start] + prior.heads[r, h - start])
            return value

        def with_answer(e):
            if asks_head:
                return of(e, relation, tail, (tables.entity[e], row, known))
            return of(head, relation, e, (known, row, tables.entity[e]))

        everyone = range(start, start + self.layout.entities[party])
        answer, pair = (head, (relation, tail)) if asks_head else (tail, (head, relation))
        penalised = [tables.entity[pair[1] if asks_head else pair[0]], tables.relation[relation]]
        if isinstance(loss, KVsAll):
            offsets, rows = chunk.answers
            answers = {int(x) - start for x in rows[offsets[i] : offsets[i + 1]]}
            parts = 0.0, slow_k_vs_all(loss, [with_answer(e) for e in everyone], answers)
        else:
            penalised.append(tables.entity[answer])
            if chunk.triples is not None:
                negative = [
                    of(h, r, t, (tables.entity[h], tables.relation[r], tables.entity[t]))
                    for h, r, t in chunk.triples[i].tolist()
                ]
            elif chunk.everyone:
                negative = [with_answer(e) for e in everyone if e != answer]
            elif chunk.pool is not None:
                negative = [with_answer(e) for e in chunk.pool[party].tolist() if e not in (ABSENT, head, tail)]
            else:
                negative = [with_answer(e) for e in chunk.negatives[i].tolist() if e != ABSENT]
            parts = slow_loss(loss, with_answer(answer), negative)
        regulariser, power = self.objective.regulariser, {"L2": 2, "N3": 3}
        if isinstance(regulariser, Dura):
            h, r, t = tables.entity[head], tables.relation[relation], tables.entity[tail]
            score, units = SCORES[self.name][1], torch.eye(len(h), dtype=h.dtype)  # of a product, number by number
            compared = [score(h, r, unit, core, self.objective.scorer) for unit in units]
            compared += [score(unit, r, t, core, self.objective.scorer) for unit in units]
            squares = h.square().sum() + t.square().sum() + sum(x * x for x in compared)
            parts = parts[0] + regulariser.weight * squares, parts[1]
        elif regulariser.weight:
            power = power[type(regulariser).__name__]
            penalty = regulariser.weight * sum((sizes(self.name, x) ** power).sum() for x in penalised)
            parts = parts[0] + penalty, parts[1]
        return parts

    def slow_gradient(self, examples, part="both", weights=None):
        """Dense gradients of the sum of these examples' losses, and each loss."""
        tables, total, losses = self.dense(), torch.zeros((), dtype=torch.float64), []
        for i in examples:
            positive, negative = self.slow(i, tables)
            wanted = {"positive": positive, "negative": negative, "both": positive + negative}[part]
            total = total + wanted * (1.0 if weights is None else float(weights[i]))
            losses.append(float(torch.as_tensor(wanted).detach()))
        leaves = list(tables.tensors().values())
        if not total.requires_grad:
            return self.tables.like(torch.zeros_like), losses
        found = torch.autograd.grad(total, leaves, allow_unused=True)
        pairs = zip(tables.tensors(), leaves, found, strict=True)
        return Tables.of({n: torch.zeros_like(x) if g is None else g for n, x, g in pairs}), losses

    def units(self):
        """The examples of each unit that are there."""
        there = self.chunk.unit[self.chunk.weight != 0].tolist()
        found = [[] for _ in range(max(there, default=-1) + 1)]
        for i in range(len(self.chunk)):
            if self.chunk.weight[i] != 0:
                found[int(self.chunk.unit[i])].append(i)
        return found


def numbers(rng, *shape):
    return torch.from_numpy(rng.normal(size=shape))


def make(
    name, loss, kind, seed, *, batch=4, parties=2, prior=False, dropout=False, regulariser=None, padding=True, n=3
):
    """A random case: repeats, self-loops, absent candidates and padding are all likely."""
    rng = np.random.default_rng(seed)
    scorer = SCORERS[name.split("-")[0]](**SCORES[name][0])
    widths = scorer.widths(DIM)
    layout = Layout(tuple(rng.integers(1, 6, parties).tolist()), tuple(rng.integers(1, 3, parties).tolist()))
    tables = Tables(
        numbers(rng, sum(layout.entities), widths[0]),
        numbers(rng, sum(layout.relations), widths[1]),
        tuple(numbers(rng, parties, *shape) for shape in scorer.shared_shapes(DIM)),
    )
    if scorer.frozen:
        tables.relation[:, -scorer.frozen :].abs_()
    first = [np.cumsum([0, *counts]) for counts in (layout.entities, layout.relations)]
    owner = rng.integers(0, parties, batch)
    unit = rng.integers(0, batch, batch) if batch else np.zeros(0, np.int64)
    party = owner[unit]

    def entities(party):
        return first[0][party] + rng.integers(0, np.array(layout.entities)[party])

    def relations(party):
        return first[1][party] + rng.integers(0, np.array(layout.relations)[party])

    head, relation, tail = entities(party), relations(party), entities(party)
    tail = np.where(rng.random(batch) < 0.2, head, tail)
    weight = rng.random(batch) + 0.5
    if padding:
        weight[rng.random(batch) < 0.2] = 0.0
    asks_head = torch.from_numpy(rng.random(batch) < 0.5)
    options = {}
    if kind == "negatives":
        drawn = entities(np.repeat(party[:, None], n, 1))
        options["negatives"] = torch.from_numpy(np.where(rng.random((batch, n)) < 0.25, ABSENT, drawn))
    elif kind == "pool":
        pool = np.full((parties, n), ABSENT)
        for p in range(parties):
            chosen = rng.permutation(layout.entities[p])[: rng.integers(0, n + 1)]
            pool[p, : len(chosen)] = first[0][p] + chosen
        options["pool"] = torch.from_numpy(pool)
    elif kind == "triples":
        owners = np.repeat(party[:, None], n, 1)
        free = np.stack([entities(owners), relations(owners), entities(owners)], -1)
        options["triples"] = torch.from_numpy(free)
    else:
        options["everyone"] = True
    if kind == "answers":
        lists = []
        for i in range(batch):
            others = first[0][party[i]] + rng.permutation(layout.entities[party[i]])[: rng.integers(0, 4)]
            lists.append(sorted({int(head[i] if asks_head[i] else tail[i]), *others.tolist()}))
        ends = torch.tensor([0, *np.cumsum([len(answers) for answers in lists])], dtype=torch.int64)
        rows = [row for answers in lists for row in answers]
        options["answers"] = ends, torch.tensor(rows, dtype=torch.int64)
    if dropout:
        for field, width in zip(("drop_entity", "drop_relation"), widths, strict=True):
            options[field] = torch.from_numpy((rng.random((batch, width)) < 0.7) / 0.7)
    ids = (torch.from_numpy(np.asarray(x, np.int64)) for x in (head, relation, tail, party))
    chunk = Chunk(*ids, asks_head, torch.from_numpy(weight), torch.from_numpy(unit), **options)
    columns = len(tables.relation), max(layout.entities)
    objective = Objective(
        scorer,
        loss,
        regulariser or REGULARISERS["none"](),
        Prior(numbers(rng, *columns), numbers(rng, *columns), 0.5) if prior else None,
    )
    return Case(name, objective, layout, tables, chunk)


LOSSES_OF_KIND = {
    "answers": [KVsAll(), KVsAll(smoothing=0.2), KVsAll("softmax"), KVsAll("softmax", 0.3)],
    "everyone": [LOSSES["one-vs-all"](), Logistic(), Margin(2.0), SelfAdversarial(0.7)],
}
SAMPLED = [SelfAdversarial(0.7), Margin(2.0), Logistic(), Softmax()]


@st.composite
def cases(draw, names=tuple(SCORES), losses=None, kinds=KINDS, **fixed):
    kind = draw(st.sampled_from(kinds))
    name = draw(st.sampled_from(names))
    loss = draw(st.sampled_from(losses or LOSSES_OF_KIND.get(kind, SAMPLED)))
    # an angle has no modulus: what N3 makes of RotatE's relations is a test of its own
    norms = ["none", "l2"] if name == "rotate" else ["none", "l2", "n3"]
    if name in PRODUCTS and kind != "answers":
        norms.append("dura")
    kind_of_norm = draw(st.sampled_from(norms))
    options = {
        "batch": draw(st.sampled_from([0, 1, 2, 5])),
        "parties": draw(st.integers(1, 3)),
        "prior": draw(st.booleans()),
        "dropout": draw(st.booleans()),
        "regulariser": REGULARISERS[kind_of_norm](0.0 if kind_of_norm == "none" else 0.3),
        "n": draw(st.integers(1, 3)),
    }
    if name == "transm" and kind_of_norm != "none":  # that its weight is frozen is a test of its own
        options["regulariser"] = REGULARISERS["none"]()
    return make(name, loss, kind, draw(seeds), **(options | fixed))


def close(found, expected, tolerance=1e-8):
    torch.testing.assert_close(
        found, torch.as_tensor(expected, dtype=torch.float64), rtol=tolerance, atol=tolerance, check_dtype=True
    )


def same(found, expected, tolerance=1e-8):
    assert found.tensors().keys() == expected.tensors().keys()
    for one, other in zip(found.tensors().values(), expected.tensors().values(), strict=True):
        close(one, other, tolerance)


def summed(case, tables):
    """Dense tables of all units' gradients, each alone."""
    total = case.tables.like(torch.zeros_like)
    for one in tables:
        for into, tensor in zip(total.tensors().values(), one.tensors().values(), strict=True):
            into += tensor
    return total


# -- the plain rule ----------------------------------------------------------------------------------------------------


def check_plain(case, kernel=Reference, part="both"):
    there = [i for i in range(len(case.chunk)) if case.chunk.weight[i] != 0]
    expected, losses = case.slow_gradient(there, part, case.chunk.weight)
    into = case.buffers()
    found, norms = kernel(case.objective, case.layout).accumulate(case.tables, case.chunk, Plain(part), into)
    assert norms is None
    same(into.tables, expected)
    wanted = torch.zeros(len(case.chunk), dtype=torch.float64)
    wanted[there] = torch.tensor(losses, dtype=torch.float64)
    close(found, wanted)
    for rows, table in ((into.entity_rows, expected.entity), (into.relation_rows, expected.relation)):
        written = set(torch.cat(rows).tolist()) if rows else set()
        assert set((table != 0).any(-1).nonzero()[:, 0].tolist()) <= written


@pytest.mark.parametrize("kind", KINDS)
@given(st.data(), st.sampled_from(["positive", "negative", "both"]))
def test_a_plain_gradient_is_the_weighted_sum_over_examples(kind, data, part):
    case = data.draw(cases(kinds=(kind,)))
    check_plain(case, part=part if case.objective.loss.apart else "both")


@given(cases(names=PRODUCTS, kinds=("everyone", "answers"), prior=False))
def test_matrix_products_have_the_same_gradients(case):
    check_plain(case, Products)


@pytest.mark.parametrize("loss", [LOSSES["one-vs-all"](), KVsAll(), KVsAll("softmax", 0.3)])
def test_scores_of_any_size_have_finite_losses(loss):
    case = make("distmult", loss, "answers" if isinstance(loss, KVsAll) else "everyone", 3, padding=False)
    case.tables.entity.mul_(1e4)
    found = [kernel(case.objective, case.layout).accumulate(case.tables, case.chunk, Plain(), case.buffers())[0]
             for kernel in (Reference, Products)]  # fmt: skip
    assert found[1].isfinite().all()
    close(found[1], found[0])


@pytest.mark.parametrize("name", list(SCORES))
@pytest.mark.parametrize("kind", KINDS)
def test_every_scorer_goes_with_every_kind_of_candidates(name, kind):
    for loss in LOSSES_OF_KIND.get(kind, SAMPLED):
        check_plain(make(name, loss, kind, 1, parties=3, prior=True, dropout=True))


@given(cases())
def test_a_second_chunk_is_added_to_the_first(case):
    once, twice = case.buffers(), case.buffers()
    case.kernel.accumulate(case.tables, case.chunk, Plain(), once)
    half = len(case.chunk) // 2
    for part in (torch.arange(half), torch.arange(half, len(case.chunk))):
        case.kernel.accumulate(case.tables, case.chunk.select(part), Plain(), twice)
    same(twice.tables, once.tables)
    once.empty()
    assert all((tensor == 0).all() for tensor in once.tensors())
    assert not once.entity_rows


@given(cases(), st.data())
def test_a_selection_has_the_chosen_examples(case, data):
    places = st.integers(0, max(len(case.chunk) - 1, 0))
    which = data.draw(st.lists(places, max_size=6)) if len(case.chunk) else []
    chosen = case.chunk.select(torch.tensor(which, dtype=torch.int64))
    assert len(chosen) == len(which)
    for at, i in enumerate(which):
        for field in Chunk.BY_EXAMPLE:
            if (whole := getattr(case.chunk, field)) is not None:
                assert torch.equal(getattr(chosen, field)[at], whole[i])
        if case.chunk.answers is not None:
            (ends, rows), (old_ends, old_rows) = chosen.answers, case.chunk.answers
            assert rows[ends[at] : ends[at + 1]].tolist() == old_rows[old_ends[i] : old_ends[i + 1]].tolist()


@pytest.mark.parametrize("clipped", [False, True])
@given(cases(), st.sampled_from([1, 40, 100]))
def test_the_size_of_pieces_changes_nothing(clipped, case, at_once):
    rule = Clipped(torch.full((len(case.layout),), 0.3, dtype=torch.float64)) if clipped else Plain()
    whole, pieces = case.buffers(), case.buffers()
    expected = case.kernel.accumulate(case.tables, case.chunk, rule, whole)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(reference.AT_ONCE, "cpu", at_once)
        found = case.kernel.accumulate(case.tables, case.chunk, rule, pieces)
    same(pieces.tables, whole.tables, 1e-10)
    close(found[0], expected[0], 1e-10)
    if clipped:
        close(found[1], expected[1], 1e-10)


# -- gradients of units ------------------------------------------------------------------------------------------------


def spread(case, found, unit):
    """One unit's gradient, out of the rows that `row_gradients` gives, as dense tables."""
    made = case.tables.like(torch.zeros_like)
    for rows, table in ((found.entity, made.entity), (found.relation, made.relation)):
        for u, row, values in zip(rows.unit.tolist(), rows.row.tolist(), rows.values, strict=True):
            if u == unit:
                table[row] += values
    for into, tensor in zip(made.shared, found.shared, strict=True):
        into[int(found.party[unit])] += tensor[unit]
    return made


@given(cases())
def test_a_units_gradient_is_its_own(case):
    found, units = row_gradients(case.kernel, case.tables, case.chunk), case.units()
    assert len(found.party) == len(units)
    for rows in (found.entity, found.relation):
        pairs = list(zip(rows.unit.tolist(), rows.row.tolist(), strict=True))
        assert len(pairs) == len(set(pairs))
    norms = found.norms()
    for unit, examples in enumerate(units):
        expected, losses = case.slow_gradient(examples)
        same(spread(case, found, unit), expected)
        close(found.loss[examples], losses)
        assert math.isclose(
            float(norms[unit]),
            math.sqrt(sum(float(tensor.square().sum()) for tensor in expected.tensors().values())),
            rel_tol=1e-9,
            abs_tol=1e-12,
        )
        if examples:
            assert int(found.party[unit]) == int(case.chunk.party[examples[0]])


@pytest.mark.parametrize("part", ["positive", "negative"])
@given(cases(losses=[SelfAdversarial(), Logistic()], kinds=("negatives", "pool", "triples", "everyone")))
def test_parts_of_a_loss_have_gradients_of_their_own(part, case):
    found = row_gradients(case.kernel, case.tables, case.chunk, part)
    for unit, examples in enumerate(case.units()):
        same(spread(case, found, unit), case.slow_gradient(examples, part)[0])


@pytest.mark.parametrize("loss", [Margin(), Softmax(), LOSSES["one-vs-all"](), KVsAll()])
@pytest.mark.parametrize("part", ["positive", "negative"])
def test_a_part_of_what_has_no_parts_is_refused(loss, part):
    kind = "answers" if isinstance(loss, KVsAll) else "negatives"
    case = make("distmult", loss, kind, 1)
    rule = Clipped(torch.ones(2, dtype=torch.float64), part=part)
    with pytest.raises(TacitError, match="has no positive and negative part"):
        case.kernel.accumulate(case.tables, case.chunk, rule, case.buffers())
    assert case.kernel.accumulate(case.tables, case.chunk, replace(rule, part="both"), case.buffers())[1] is not None


@given(cases(batch=5), st.integers(0, 4))
def test_removing_an_example_changes_no_other_unit(case, removed):
    unit = int(case.chunk.unit[removed])
    rest = torch.tensor([i for i in range(5) if i != removed])
    before = row_gradients(case.kernel, case.tables, case.chunk)
    after = row_gradients(case.kernel, case.tables, case.chunk.select(rest))
    for other in range(len(after.party)):
        if other != unit:
            same(spread(case, after, other), spread(case, before, other), 1e-12)


# -- the clipped rule --------------------------------------------------------------------------------------------------


def slow_clipped(case, rule):
    """Dense, one unit after the other: what is added, and the norms."""
    added, norms = [], []
    for examples in case.units():
        gradient, _ = case.slow_gradient(examples, rule.part)
        if rule.row_mask is not None:
            gradient.entity[~rule.row_mask] = 0.0
        gradient.relation *= rule.relation_scale
        plain = gradient.relation.clone()
        if rule.entities_only:
            gradient.relation *= 0.0
        norm = math.sqrt(sum(float(x) ** 2 for tensor in gradient.tensors().values() for x in tensor.flatten()))
        norms.append(norm)
        if not math.isfinite(norm):
            continue
        party = int(case.chunk.party[examples[0]]) if examples else 0
        factor = min(1.0, float(rule.clip[party]) / norm) if norm else 1.0
        gradient = gradient.like(lambda tensor, factor=factor: tensor * factor)
        if rule.row_clip is not None:
            for row in gradient.entity:
                if (long := math.sqrt(sum(float(x) ** 2 for x in row))) > rule.row_clip:
                    row *= rule.row_clip / long
        if rule.entities_only:
            gradient.relation.copy_(plain)
        added.append(gradient)
    return summed(case, added), norms


@given(
    cases(),
    st.sampled_from([None, 0.05, 0.5]),
    st.booleans(),
    st.sampled_from([1.0, 0.3, 2.0]),
    st.sampled_from(["positive", "negative", "both"]),
    st.booleans(),
    seeds,
)
def test_clipping_is_clipping_one_unit_at_a_time(case, row_clip, masked, relation_scale, part, only, seed):
    rng = np.random.default_rng(seed)
    if not case.objective.loss.apart:
        part = "both"
    mask = torch.from_numpy(rng.random(len(case.tables.entity)) < 0.6) if masked else None
    clip = torch.from_numpy(rng.choice([0.1, 1.0, 10.0], len(case.layout)))
    rule = Clipped(clip, row_clip, mask, relation_scale, part, only)
    expected, norms = slow_clipped(case, rule)
    into = case.buffers()
    losses, found = case.kernel.accumulate(case.tables, case.chunk, rule, into)
    close(found, norms)
    same(into.tables, expected)
    for i in range(len(case.chunk)):
        wanted = case.slow_gradient([i], part)[1][0] if case.chunk.weight[i] != 0 else 0.0
        assert math.isclose(float(losses[i]), wanted, rel_tol=1e-9, abs_tol=1e-12)


@given(cases(padding=False, batch=5), st.floats(0.01, 2.0))
def test_nothing_added_is_longer_than_the_clip(case, clip):
    alone = case.chunk.select(torch.arange(1))
    alone = replace(alone, unit=torch.zeros(1, dtype=torch.int64))
    into = case.buffers()
    case.kernel.accumulate(
        case.tables, alone, Clipped(torch.full((len(case.layout),), clip, dtype=torch.float64)), into
    )
    total = math.sqrt(sum(float(tensor.square().sum()) for tensor in into.tensors()))
    assert total <= clip * (1 + 1e-12)


@pytest.mark.parametrize("name", ["transe", "transe-l2", "distmult", "rotate", "tucker"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e300])
@pytest.mark.parametrize("row_clip", [None, 0.1])
def test_a_unit_that_is_not_finite_adds_nothing(name, bad, row_clip):
    """Entities 0 and 1 are the good unit's, 2 and 3 the bad one's."""
    scorer = SCORERS[name.split("-")[0]](**SCORES[name][0])
    rng, widths = np.random.default_rng(5), scorer.widths(DIM)
    shared = tuple(numbers(rng, 1, *shape) for shape in scorer.shared_shapes(DIM))
    tables = Tables(numbers(rng, 4, widths[0]), numbers(rng, 1, widths[1]), shared)
    tables.entity[3] = bad
    ids = [torch.tensor(x) for x in ([0, 2], [0, 0], [1, 3], [0, 0])]
    negatives = torch.tensor([[0, 1], [2, 3]])
    chunk = Chunk(*ids, torch.zeros(2).bool(), torch.ones(2).double(), torch.arange(2), negatives=negatives)
    case = Case(name, Objective(scorer, Logistic()), Layout((4,), (1,)), tables, chunk)
    rule = Clipped(torch.tensor([0.2], dtype=torch.float64), row_clip)
    both, good = case.buffers(), case.buffers()
    _, norms = case.kernel.accumulate(tables, chunk, rule, both)
    case.kernel.accumulate(tables, chunk.select(torch.arange(1)), rule, good)
    assert all(tensor.isfinite().all() for tensor in both.tensors())
    assert norms[0].isfinite()
    if not norms[1].isfinite():
        same(both.tables, good.tables, 1e-14)
    else:  # a sign, or a direction, of what is infinite is still finite
        assert not math.isnan(bad)
        assert float(both.tables.entity[2:].square().sum().sqrt()) <= 0.2 + 1e-12


def test_a_unit_without_a_gradient_changes_nothing():
    case = make("distmult", Margin(0.0), "negatives", 3, padding=False)
    chunk = replace(case.chunk, negatives=torch.full((4, 3), ABSENT))
    into = case.buffers()
    losses, norms = case.kernel.accumulate(case.tables, chunk, Clipped(torch.ones(2).double()), into)
    assert (losses == 0).all()
    assert (norms == 0).all()
    assert all((tensor == 0).all() for tensor in into.tensors())


# -- padding, and candidates that are not there ------------------------------------------------------------------------


@pytest.mark.parametrize("rule", [Plain(), Clipped(torch.tensor([0.1, 5.0], dtype=torch.float64))])
@pytest.mark.parametrize("name", ["distmult", "tucker"])
def test_padding_changes_nothing_whatever_stands_in_it(name, rule):
    """Padding that is all zeros is of party 0 and of unit 0, whoever's that unit is."""
    case = make(name, Logistic(), "negatives", 11, batch=0)
    rng, widths = np.random.default_rng(11), case.objective.scorer.widths(DIM)
    case.layout = Layout((3, 4), (1, 2))
    case.tables = Tables(numbers(rng, 7, widths[0]), numbers(rng, 3, widths[1]), case.tables.shared)
    ids = [torch.tensor(x) for x in ([3, 4, 6], [1, 1, 2], [5, 6, 3], [1, 1, 1])]
    asks_head, unit = torch.tensor([False, True, False]), torch.tensor([0, 1, 1])
    negatives = torch.tensor([[3, 4], [4, 5], [6, 6]])
    chunk = Chunk(*ids, asks_head, torch.ones(3).double(), unit, negatives=negatives)
    nothing = torch.zeros(4, dtype=torch.int64)
    n = chunk.negatives.shape[1]
    padded = Chunk(
        *(
            torch.cat([getattr(chunk, field), nothing.to(getattr(chunk, field).dtype)])
            for field in ("head", "relation", "tail", "party", "asks_head", "weight", "unit")
        ),
        negatives=torch.cat([chunk.negatives, torch.zeros(4, n, dtype=torch.int64)]),
    )
    one, two = case.buffers(), case.buffers()
    losses, norms = case.kernel.accumulate(case.tables, chunk, rule, one)
    padded_losses, padded_norms = case.kernel.accumulate(case.tables, padded, rule, two)
    same(two.tables, one.tables)
    close(padded_losses[:3], losses)
    assert (padded_losses[3:] == 0).all()
    if norms is not None:
        close(padded_norms, norms)


@pytest.mark.parametrize("kind", ["negatives", "pool"])
@pytest.mark.parametrize("loss", SAMPLED, ids=lambda loss: type(loss).__name__)
@pytest.mark.parametrize("name", ["distmult", "transe-l2"])
def test_an_absent_candidate_has_nothing_to_do_with_any_row(name, loss, kind):
    """Party 0 has diverged; party 1, whose examples touch no row of it, has not."""
    scorer = SCORERS[name.split("-")[0]](**SCORES[name][0])
    rng, layout = np.random.default_rng(7), Layout((2, 3), (1, 1))
    tables = Tables(numbers(rng, 5, DIM), numbers(rng, 2, DIM))
    tables.entity[:2] = float("nan")
    ids = [torch.tensor([x]) for x in (2, 1, 3, 1)]
    rows = {"pool": torch.tensor([[0, 1], [3, 4]])} if kind == "pool" else {"negatives": torch.tensor([[ABSENT, 4]])}
    chunk = Chunk(*ids, torch.zeros(1).bool(), torch.ones(1).double(), torch.zeros(1, dtype=torch.int64), **rows)
    into = Gradients(tables.like(torch.zeros_like))
    losses, _ = Reference(Objective(scorer, loss), layout).accumulate(tables, chunk, Plain(), into)
    assert losses.isfinite().all()
    assert all(tensor.isfinite().all() for tensor in into.tensors())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", [Plain(), Clipped(torch.ones(2, dtype=torch.float64))])
def test_no_examples_give_no_gradient(kind, rule):
    loss = KVsAll() if kind == "answers" else Logistic() if kind != "everyone" else LOSSES["one-vs-all"]()
    case = make("tucker", loss, kind, 1, batch=0)
    into = case.buffers()
    losses, norms = case.kernel.accumulate(case.tables, case.chunk, rule, into)
    assert len(losses) == 0
    assert norms is None or len(norms) == 0
    assert all((tensor == 0).all() for tensor in into.tensors())


# -- regularisers of rows that are not what the entities' are ----------------------------------------------------------


@pytest.mark.parametrize("dim", [1, 2, 3, 5])
@pytest.mark.parametrize("regulariser", ["l2", "n3"])
def test_the_penalty_of_rotates_angles_is_of_real_numbers(dim, regulariser):
    """An entity's row is complex numbers; a relation's is angles, one for each."""
    scorer, made = SCORERS["rotate"](), REGULARISERS[regulariser](0.5)
    rng, power = np.random.default_rng(dim), {"l2": 2, "n3": 3}[regulariser]
    tables = Tables(numbers(rng, 3, 2 * dim), numbers(rng, 1, dim))
    ids = [torch.tensor([x]) for x in (0, 0, 1, 0)]
    rest = torch.zeros(1).bool(), torch.ones(1).double(), torch.zeros(1, dtype=torch.int64)
    chunk = Chunk(*ids, *rest, negatives=torch.tensor([[2]]))
    losses = [
        Reference(Objective(scorer, Logistic(), some), Layout((3,), (1,))).accumulate(
            tables, chunk, Plain(), Gradients(tables.like(torch.zeros_like))
        )[0]
        for some in (made, REGULARISERS["none"]())
    ]
    entities = [math.hypot(row[i], row[dim + i]) ** power for row in tables.entity[:2].tolist() for i in range(dim)]
    expected = 0.5 * (sum(entities) + sum(abs(x) ** power for x in tables.relation[0].tolist()))
    assert math.isclose(float(losses[0] - losses[1]), expected, rel_tol=1e-9)


# -- the norm of an example over a pool, in closed form ----------------------------------------------------------------


def slopes(loss, positive, negative):
    """The derivatives of the loss with respect to each score."""

    def sigmoid(x):
        return 1 / (1 + math.exp(-x))

    if isinstance(loss, Softmax):
        shares = np.exp([positive, *negative]) / np.exp([positive, *negative]).sum()
        return shares[0] - 1, list(shares[1:])
    if isinstance(loss, Margin):
        active = [float(loss.margin - positive + x > 0) / len(negative) for x in negative]
        return -sum(active), active
    if isinstance(loss, SelfAdversarial):
        shares = np.exp(loss.alpha * np.array(negative))
        shares = shares / shares.sum()
    else:
        shares = np.full(len(negative), 1 / max(len(negative), 1))
    return -sigmoid(-positive), [p * sigmoid(x) for p, x in zip(shares, negative, strict=True)]


@pytest.mark.parametrize("name", ["transe-l2", "distmult"])
@given(st.sampled_from(SAMPLED), st.booleans(), st.booleans(), st.integers(1, 4), seeds)
def test_the_norm_over_a_pool_is_the_closed_form(name, loss, asks_head, loop, n, seed):
    """Rows of an example: head, tail, relation, and each of the pool once; of a self-loop head and tail are one."""
    rng = np.random.default_rng(seed)
    entity, relation = rng.normal(size=(6, 3)), rng.normal(size=(1, 3))
    head, tail = 0, 0 if loop else 1
    pool = rng.permutation(6)[:n]
    candidates = [int(e) for e in pool if e not in (head, tail)]
    r, known = relation[0], entity[tail if asks_head else head]
    answers = [head if asks_head else tail, *candidates]
    if name == "distmult":
        scores = [float((known * r * entity[e]).sum()) for e in answers]
        by_known = [r * entity[e] for e in answers]
        by_answer = [known * r for e in answers]
        by_relation = [known * entity[e] for e in answers]
    else:
        apart = [entity[e] + r - known if asks_head else known + r - entity[e] for e in answers]
        scores = [10.0 - float(np.sqrt((x**2).sum())) for x in apart]
        units = [x / np.sqrt((x**2).sum()) for x in apart]
        by_known = [x if asks_head else -x for x in units]
        by_answer = [-x if asks_head else x for x in units]
        by_relation = [-x for x in units]
    first, others = slopes(loss, scores[0], scores[1:])
    factors = [first, *others]
    known_row, relation_row = (sum(g * x for g, x in zip(factors, by, strict=True)) for by in (by_known, by_relation))
    squares = float((relation_row**2).sum())
    squares += sum(float(((g * x) ** 2).sum()) for g, x in zip(others, by_answer[1:], strict=True))
    answer_row = first * by_answer[0]
    if loop:
        squares += float(((known_row + answer_row) ** 2).sum())
    else:
        squares += float((known_row**2).sum() + (answer_row**2).sum())
    scorer = SCORERS[name.split("-")[0]](**SCORES[name][0])
    tables = Tables(torch.from_numpy(entity), torch.from_numpy(relation))
    ids = [torch.tensor([x]) for x in (head, 0, tail, 0)]
    rest = torch.tensor([asks_head]), torch.ones(1).double(), torch.zeros(1, dtype=torch.int64)
    chunk = Chunk(*ids, *rest, pool=torch.from_numpy(pool)[None])
    into = Gradients(tables.like(torch.zeros_like))
    kernel = Reference(Objective(scorer, loss), Layout((6,), (1,)))
    _, norms = kernel.accumulate(tables, chunk, Clipped(torch.ones(1).double()), into)
    assert math.isclose(float(norms[0]), math.sqrt(squares), rel_tol=1e-9, abs_tol=1e-12)
