"""The fused kernels against the reference, on fresh inputs: gradients, draws, noise, whole epochs, and counting.

Those for the CPU run as they are. Those for the GPU run on a CPU by Triton's interpreter, on tiny shapes; it has to be
chosen before Triton is loaded, so those checks run in a process of their own: this file, run as a program.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import warnings
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tacit import kernels
from tacit.cohort import Cohort, SecretNoise
from tacit.draws import MASK, Purpose, Secret, chacha, party_normals, party_words, philox
from tacit.errors import TacitError
from tacit.evaluation import rank
from tacit.graph import Graph
from tacit.kernels import Chunk, Clipped, Gradients, Objective, Plain, Reference, kernel_for
from tacit.kernels import rows as plain_rows
from tacit.kernels.rows import First
from tacit.losses import Logistic, Margin, SelfAdversarial, Softmax
from tacit.models import SCORERS, Layout, Prior, Tables
from tacit.models.bilinear import ComplEx, DistMult
from tacit.models.model import Model
from tacit.models.tables import PARTS
from tacit.models.translational import RotatE, TransE
from tacit.negatives import SIDES
from tacit.optimizers import SGD, Adagrad, Adam
from tacit.settings import Settings
from tacit.training import Fit

COVERED = [TransE(), TransE(norm=2), DistMult(), RotatE(), ComplEx()]
LOSSES = [SelfAdversarial(alpha=0.7), Logistic(), Softmax(), Margin(margin=1.5)]
seeds = st.integers(0, 2**32 - 1)


# -- gradients ---------------------------------------------------------------------------------------------------------


def a_case(rng, scorer, loss):
    """Several parties, repeats, self-loops, padding, absent candidates, a pool or not, a prior or not, any dim."""
    parties = int(rng.integers(1, 4))
    entities = tuple(int(n) for n in rng.integers(2, 9, parties))
    layout = Layout(entities, tuple(int(n) for n in rng.integers(1, 4, parties)))
    widths = scorer.widths(int(rng.integers(1, 9)))

    def numbers(*shape):
        return torch.tensor(rng.normal(size=shape), dtype=torch.float32)

    tables = Tables(numbers(sum(entities), widths[0]), numbers(sum(layout.relations), widths[1]) * 0.3)
    batch, count = int(rng.integers(1, 6)), int(rng.integers(1, 8))
    party = rng.integers(0, parties, batch)

    def rows(sizes, starts, of):
        return torch.tensor(np.array(starts)[of] + (rng.random(of.shape) * np.array(sizes)[of]).astype(int))

    # Columns of one tensor, as a step's are: not contiguous.
    triples = torch.stack([
        rows(entities, layout.entity_start, party), rows(layout.relations, layout.relation_start, party),
        rows(entities, layout.entity_start, party)], 1)  # fmt: skip
    head, relation, tail = triples.unbind(1)
    tail.copy_(torch.where(torch.tensor(rng.random(batch) < 0.3), head, tail))
    if rng.random() < 0.3:  # a row that equals the query of nothing: distances of 0
        tables.entity[int(tail[0])] = tables.entity[int(head[0])]
        tables.relation[int(relation[0])] = 0.0
    candidates = {}
    if rng.random() < 0.5:
        pool = np.full((parties, count), -1)
        for p in range(parties):
            some = rng.permutation(entities[p])[:count]
            pool[p, : len(some)] = some + layout.entity_start[p]
        candidates["pool"] = torch.tensor(pool)
    else:
        drawn = rows(entities, layout.entity_start, np.repeat(party[:, None], count, 1))
        candidates["negatives"] = torch.where(torch.tensor(rng.random((batch, count)) < 0.2), -1, drawn)
    weight = np.where(rng.random(batch) < 0.2, 0, rng.random(batch) + 0.5)
    prior = None
    if rng.random() < 0.5:
        prior = Prior(numbers(sum(layout.relations), max(entities)), numbers(sum(layout.relations), max(entities)), 0.5)
    chunk = Chunk(head, relation, tail, torch.tensor(party), torch.tensor(rng.random(batch) < 0.5),
                  torch.tensor(weight, dtype=torch.float32), torch.arange(batch), **candidates)  # fmt: skip
    clip = torch.tensor(rng.random(parties) * 2, dtype=torch.float32)
    part = ["both", "positive", "negative"][int(rng.integers(3))] if loss.apart else "both"
    mask = torch.tensor(rng.random(sum(entities)) < 0.7)
    rules = [Plain(part), Clipped(clip, relation_scale=0.7), Clipped(clip, row_clip=0.3, row_mask=mask, part=part),
             Clipped(clip, row_clip=0.3, part=part, entities_only=True)]  # fmt: skip
    return Objective(scorer, loss, prior=prior), layout, tables, chunk, rules


def found_by(kernel, objective, layout, tables, chunk, rule):
    into = Gradients(tables.like(torch.zeros_like))
    losses, norms = kernel(objective, layout).accumulate(tables, chunk, rule, into)
    units = int(chunk.unit[chunk.weight != 0].max()) + 1 if bool((chunk.weight != 0).any()) else 0
    return [losses, *into.tensors(), *([] if norms is None else [norms[:units]])]


def check_gradients(kernel, rng, scorer, loss):
    objective, layout, tables, chunk, rules = a_case(rng, scorer, loss)
    for rule in rules:
        for chosen in (chunk, chunk.select(torch.arange(0))):
            ours, theirs = (found_by(k, objective, layout, tables, chosen, rule) for k in (kernel, Reference))
            for a, b in zip(ours, theirs, strict=True):
                assert torch.allclose(a, b, rtol=1e-4, atol=2e-5), (scorer, loss, rule, a, b)
    bad = int(chunk.head[0])  # an example that has to do with what is not finite adds nothing, and spoils no other
    tables.entity[bad] = [float("nan"), 3e38][int(rng.integers(2))] if type(scorer) is DistMult else float("nan")
    touched = (chunk.head == bad) | (chunk.tail == bad)
    candidates = chunk.negatives if chunk.pool is None else chunk.pool[chunk.party]
    touched |= (candidates == bad).any(1)
    rest = chunk.select((~touched).nonzero()[:, 0])
    rest = replace(rest, unit=torch.arange(len(rest)))
    for rule in rules[1:2] if bool(tables.entity[bad].isnan().all()) else []:
        ours = found_by(kernel, objective, layout, tables, chunk, rule)[1:3]
        for a, b in zip(ours, found_by(Reference, objective, layout, tables, rest, rule)[1:3], strict=True):
            assert torch.allclose(a, b, rtol=1e-4, atol=2e-5), (scorer, loss, "not finite")
    for rule in rules[1:]:  # what is not clipped may be a sum that is too large
        cut = found_by(kernel, objective, layout, tables, chunk, rule)[1 : 2 if rule.entities_only else 3]
        assert all(bool(g.isfinite().all()) for g in cut)


@pytest.mark.parametrize("scorer", COVERED, ids=lambda s: f"{type(s).__name__}{getattr(s, 'norm', '')}")
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: type(loss).__name__)
@given(seed=seeds)
def test_numba_gradients_equal_the_reference(scorer, loss, seed):
    pytest.importorskip("numba")
    check_gradients(kernel_for("numba", torch.device("cpu")), np.random.default_rng(seed), scorer, loss)


def test_numba_gradients_are_as_exact_as_float32_on_a_real_size():
    """And the same bits on one thread and on three."""
    numba = pytest.importorskip("numba") and kernel_for("numba", torch.device("cpu"))
    rng, layout = np.random.default_rng(5), Layout((900,), (11,))
    for scorer in COVERED:
        widths = scorer.widths(32)
        tables = Tables(*(torch.tensor(rng.normal(size=s), dtype=torch.float32)
                          for s in ((900, widths[0]), (11, widths[1]))))  # fmt: skip
        ids = [torch.tensor(rng.integers(0, high, 512)) for high in (900, 11, 900)]
        chunk = Chunk(*ids, torch.zeros(512, dtype=torch.int64), torch.tensor(rng.random(512) < 0.5), torch.ones(512),
                      torch.arange(512), negatives=torch.tensor(rng.integers(0, 900, (512, 64))))  # fmt: skip
        double = tables.like(torch.Tensor.double)
        exact = found_by(Reference, Objective(scorer, SelfAdversarial()), layout, double,
                         replace(chunk, weight=chunk.weight.double()), Plain())  # fmt: skip
        threads, several = torch.get_num_threads(), []
        try:
            for number in (1, 3):
                torch.set_num_threads(number)
                several.append(found_by(numba, Objective(scorer, SelfAdversarial()), layout, tables, chunk, Plain()))
        finally:
            torch.set_num_threads(threads)
        for one, three, best in zip(*several, exact, strict=True):
            assert torch.equal(one, three), scorer
            assert float((one.double() - best).norm() / best.norm()) < 2e-6, scorer


# -- noise -------------------------------------------------------------------------------------------------------------


def test_chacha20_gives_the_published_block():
    """RFC 8439, section 2.3.2."""
    key = tuple(np.frombuffer(bytes(range(32)), "<u4").tolist())
    nonce = np.frombuffer(bytes.fromhex("000000090000004a00000000"), "<u4").astype(np.int64)
    words = chacha((np.array([1]), *(nonce[i : i + 1] for i in range(3))), key)
    published = """e4e7f110 15593bd1 1fdd0f50 c47120a3 c7f4d1c7 0368c033 9aaa2204 4e6cd4c3
                   466482d2 09aa9f07 05d7c214 a2028bd9 d19c12b5 b94e16de e883d0cb 4e3c50a2"""
    assert [f"{int(word[0]):08x}" for word in words] == published.split()
    assert all(0 <= int(word[0]) <= MASK for word in words)


@pytest.mark.parametrize("count", [1, 7, 16, 50])
def test_secret_draws_of_several_parties_are_those_of_each(count):
    secret, parties, steps = Secret.simulation(3), [0, 5, 9, 4], [2, 0, 2**31, 7]
    for draw in (secret.words, secret.normal):
        found = draw(Purpose.NOISE_GAP, torch.tensor(parties), torch.tensor(steps), count)
        for row, party, step in zip(found, parties, steps, strict=True):
            assert torch.equal(row, draw(Purpose.NOISE_GAP, party, step, count))


def test_secret_noise_is_normal_and_never_the_same():
    one, two = Secret.fresh(), Secret.fresh()
    assert one.key != two.key
    assert "key" not in repr(one)
    draw = one.normal(Purpose.NOISE_ENTITY, 3, 7, 400_001).double()
    assert len(draw) == 400_001
    for power, moment in ((1, 0), (2, 1), (3, 0), (4, 3)):
        assert abs(float(draw.pow(power).mean()) - moment) < 0.06, power
    assert abs(float((draw.abs() < 1).double().mean()) - 0.6827) < 0.004
    assert 4.0 < float(draw.abs().max()) < 7.5
    assert abs(float((draw[:-1] * draw[1:]).mean())) < 0.01
    others = [(Purpose.NOISE_RELATION, 3, 7), (Purpose.NOISE_ENTITY, 4, 7), (Purpose.NOISE_ENTITY, 3, 8)]
    for other in others:
        assert abs(float((one.normal(*other, 400_001).double() * draw).mean())) < 0.01
    assert torch.equal(one.normal(Purpose.NOISE_ENTITY, 3, 7, 100), draw[:100].float())
    assert Secret.simulation(5) == Secret.simulation(5)
    assert Secret.simulation(5).simulated
    assert not one.simulated


# -- whole epochs ------------------------------------------------------------------------------------------------------


def a_graph(seed, entities, count):
    rng = np.random.default_rng(seed)
    rows = zip(*(rng.integers(high, size=count).tolist() for high in (entities, 2, entities)), strict=True)
    return Graph.from_triples([(f"e{h}", f"r{r}", f"e{t}") for h, r, t in rows])


def two_fits(kernel, sides, negatives, training=None, scorer=None):
    wanted = Settings.make({"scorer": {"dim": 3} | (scorer or {}), "training": {"batch": 6} | (training or {}),
                            "negatives": {"count": 6, "sides": sides} | negatives})  # fmt: skip
    graphs = [a_graph(1, 9, 14), a_graph(2, 31, 25)]
    fits = [Fit(wanted, graphs, numbers=[5, 3], kernel=name, device="cpu") for name in ("reference", kernel)]
    fits[1].prepare()
    assert fits[1].epochs is not None
    return fits


def check_same_state(slow, fast, about):
    for name, tensor in slow.cohort.state().items():
        ours, theirs = fast.cohort.state()[name].double(), tensor.double()
        assert torch.allclose(ours, theirs, rtol=1e-3, atol=2e-4 * float(theirs.abs().max())), (*about, name)


def check_epochs(kernel, sides, negatives, training=None, scorer=None):
    """Shuffles, sides, draws, filters, pools and Adam of two unequal parties, one of which then rests."""
    slow, fast = two_fits(kernel, sides, negatives, training, scorer)
    for active in (None, np.array([True, False])):
        ours, theirs = fast.epoch(active), slow.epoch(active)
        assert np.allclose(ours.loss, theirs.loss, rtol=1e-4, equal_nan=True)
        assert (ours.steps, ours.examples) == (theirs.steps, theirs.examples)
    check_same_state(slow, fast, (sides, negatives))


def check_noisy_epochs(kernel, negatives, scorer=None, sides="tails", **limits):
    """Clipped gradients, secret noise on every row, a public divisor: against the reference, step by step.

    Two epochs; in the second one party rests, and the other runs out of steps.
    """
    slow, fast = two_fits(kernel, sides, negatives, scorer=scorer)
    rule = Clipped(torch.tensor([0.3, 0.6]), relation_scale=0.5, **limits)
    noise = SecretNoise(Secret.simulation(9), torch.tensor([0.2, 0.1]))
    fast.epochs = type(fast.epochs)(fast.cohort, fast.examples, fast.kernel, rule=rule, noise=noise, divisor=4.0)
    cohort = slow.cohort
    for wanted, most in ((torch.tensor([True, True]), None), (torch.tensor([False, True]), torch.tensor([99, 7]))):
        fast.epochs.run(wanted, most)
        fast.cohort.epochs += wanted
        for step in slow.examples.epoch(cohort.epochs, cohort.steps, wanted, most):
            slow.kernel.accumulate(cohort.tables, step.chunk, rule, cohort.gradients)
            cohort.finish(torch.full((2,), 4.0), step.active, noise=noise, relation_scale=0.5)
        cohort.epochs += wanted
    check_same_state(slow, fast, (kernel, negatives))


@pytest.fixture(params=[1 << 20, 0], ids=["one thread", "two threads"])
def threads(request, monkeypatch):
    """Small steps take one thread; here also two."""
    cpu = pytest.importorskip("tacit.kernels.cpu", exc_type=ImportError)
    monkeypatch.setattr(cpu, "SMALL", request.param)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
def test_numba_epochs_equal_the_reference():
    for sides in SIDES:
        check_epochs("numba", sides, {"filtered": True})
        check_epochs("numba", sides, {"name": "pool", "count": 5})
    check_epochs("numba", "tails", {"name": "pool", "count": 50})  # more than there are
    for training in ({"reciprocal": True}, {"subsampling": True, "decay": "linear", "epochs": 3}):
        check_epochs("numba", "both", {"filtered": True}, training)
    for name in ("rotate", "complex", "distmult"):
        check_epochs("numba", "random", {"filtered": True}, scorer={"name": name, "dim": 5})


@pytest.mark.usefixtures("threads")
def test_numba_noise_equals_the_reference():
    for scorer in ({}, {"name": "complex", "dim": 5}, {"dim": 37}):
        check_noisy_epochs("numba", {"name": "pool"}, scorer)
        check_noisy_epochs("numba", {}, scorer, sides="random")
    check_noisy_epochs("numba", {}, row_clip=0.05, row_mask=torch.arange(40) % 3 > 0)


def test_noise_without_a_clip_is_refused():
    pytest.importorskip("numba")
    _, fast = two_fits("numba", "tails", {})
    noise = SecretNoise(Secret.fresh(), torch.ones(2))
    for wrong in ({}, {"rule": Clipped(torch.ones(2))}, {"divisor": 4.0}):
        with pytest.raises(TacitError, match="noise needs a clip"):
            type(fast.epochs)(fast.cohort, fast.examples, fast.kernel, noise=noise, **wrong)
    for clip in (-1.0, float("nan"), float("inf")):
        with pytest.raises(TacitError, match="a clip is a number"):
            Clipped(torch.tensor([1.0, clip]))
        with pytest.raises(TacitError, match="deviation"):
            SecretNoise(Secret.fresh(), torch.tensor([clip]))
    rule = Clipped(torch.ones(2))
    with pytest.raises(TacitError, match="divisor"):
        type(fast.epochs)(fast.cohort, fast.examples, fast.kernel, rule=rule, divisor=0.0)


def test_both_sides_of_a_triple_are_not_clipped_one_by_one():
    """They are one unit: whole epochs would let it through with twice the clip."""
    pytest.importorskip("numba")
    _, fast = two_fits("numba", "both", {})
    with pytest.raises(TacitError, match="one unit"):
        type(fast.epochs)(fast.cohort, fast.examples, fast.kernel, rule=Clipped(torch.ones(2)), divisor=6.0)


def test_noise_on_touched_rows_only_is_refused():
    wanted = Settings.make({"scorer": {"dim": 3}, "optimizer": {"name": "sparse-adam"}})
    cohort = Fit(wanted, [a_graph(1, 9, 14)], kernel="reference", device="cpu").cohort
    with pytest.raises(TacitError, match="which rows were touched"):
        cohort.finish(torch.ones(1), torch.ones(1, dtype=torch.bool),
                      noise=SecretNoise(Secret.fresh(), torch.ones(1)))  # fmt: skip


def test_pure_noise_has_no_grid():
    """Angles of pairs are as fine as float32: noise with something added looks no different."""
    z = Secret.fresh().normal(Purpose.NOISE_ENTITY, 0, 0, 200_000).double().reshape(-1, 2)
    for bits in (22, 24, 26):
        place = torch.atan2(z[:, 1], z[:, 0]) / (2 * np.pi) * 2**bits
        apart = (place - place.round()).abs().mean()
        assert abs(float(apart) - 0.25) < 0.01, bits  # of what is spread evenly


# -- counting ----------------------------------------------------------------------------------------------------------


def check_counting(count, rng, name):
    """Ranks with the kernel are the ranks without, ties and raw ranks included."""
    entities, relations, dim = int(rng.integers(1, 40)), int(rng.integers(1, 4)), int(rng.integers(1, 9))
    options = {"gamma": [0.0, 10.0][int(rng.integers(2))]} if hasattr(SCORERS[name], "gamma") else {}
    if name == "transe":
        options["norm"] = int(rng.integers(1, 3))
    scorer = SCORERS[name](**options)
    weights = [torch.tensor(rng.random(relations), dtype=torch.float32)] if scorer.statistics else None
    layout = Layout((entities,), (relations,))
    tables = Tables.begin(scorer, dim, layout, seed=int(rng.integers(2**32)), weights=weights)
    few = rng.integers(0, max(1, entities // 2), entities)
    if rng.random() < 0.2:  # all distances are 0
        tables.entity.zero_()
        tables.relation.zero_()
    if rng.random() < 0.5:  # equal rows tie; so do rows that are all but equal, to the kernel
        tables.entity.copy_(tables.entity[few] * (1 + 1e-7 * torch.tensor(rng.integers(-1, 2, (entities, 1)))))
    if rng.random() < 0.3:  # far from 0, where squares round more than distances do
        tables.entity += torch.tensor(rng.normal(size=tables.entity.shape[1]) * 10.0 ** rng.integers(0, 5))
    if rng.random() < 0.3:  # in two crowds that are far from each other, and each close together
        tables.entity *= 10.0 ** -rng.integers(0, 4)
        tables.entity += torch.tensor(rng.choice([-10.0, 10.0], (entities, 1)))
        tables.relation *= 0.001
    model = Model(scorer, tables)
    facts = np.stack([rng.integers(0, high, 60) for high in (entities, relations, entities)], 1)
    asked = facts[: int(rng.integers(0, 20))]
    known = facts if rng.random() < 0.7 else facts[30:30]
    found = []
    for counter in (count, None):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("tacit.evaluation.ranking.counter_for", lambda device, counter=counter: counter)
            patch.setattr("tacit.evaluation.ranking.LISTED", (2, 8))
            found.append(rank(model, asked, known))
    for field in found[0].__dataclass_fields__:
        assert np.array_equal(*(getattr(ranks, field) for ranks in found)), (name, field)


@pytest.mark.parametrize("name", sorted(SCORERS))
@given(seed=seeds)
def test_ranks_by_the_numba_kernel_are_those_by_blocks(name, seed):
    counting = pytest.importorskip("tacit.kernels.cpu_counting", exc_type=ImportError)
    check_counting(counting.count, np.random.default_rng(seed), name)


@given(seed=seeds)
def test_moves_by_the_numba_kernel_are_those_of_the_optimizers(seed):
    moves = pytest.importorskip("tacit.kernels.cpu_moves", exc_type=ImportError)
    check_moves(moves.move, np.random.default_rng(seed))


# -- compiled by torch -------------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.skipif(shutil.which("c++") is None, reason="torch compiles for a CPU by a C++ compiler, and there is none")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_compiled_reference_equals_the_reference():
    rng = np.random.default_rng(3)
    for name in ("transh", "rescal"):
        scorer, layout = SCORERS[name](), Layout((9, 7), (2, 3))
        tables = Tables.begin(scorer, 4, layout, seed=1)
        party = torch.tensor(rng.integers(0, 2, 12))
        entity, relation = torch.tensor([0, 9])[party], torch.tensor([0, 2])[party]
        ids = [
            base + torch.tensor(rng.integers(0, high, 12)) for base, high in ((entity, 7), (relation, 2), (entity, 7))
        ]
        chunk = Chunk(*ids, party, torch.tensor(rng.random(12) < 0.5), torch.ones(12), torch.arange(12),
                      negatives=entity[:, None] + torch.tensor(rng.integers(0, 7, (12, 5))))  # fmt: skip
        objective = Objective(scorer, SelfAdversarial())
        for rule in (Plain(), Clipped(torch.tensor([0.1, 0.2]))):
            kinds = (kernel_for("compiled", torch.device("cpu")), Reference)
            ours, theirs = (found_by(kind, objective, layout, tables, chunk, rule) for kind in kinds)
            for a, b in zip(ours, theirs, strict=True):
                assert torch.allclose(a, b, rtol=1e-4, atol=1e-6), (name, rule)


# -- what a machine has ------------------------------------------------------------------------------------------------


def test_a_machine_without_numba_says_so_once(monkeypatch, caplog):
    monkeypatch.setattr(kernels, "find_spec", lambda name: None)
    kernels._say_missing.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert [kernel_for("auto", torch.device("cpu")) for _ in range(3)] == [Reference] * 3
    assert [record.getMessage().startswith("numba is not installed") for record in caplog.records] == [True]
    kernels._say_missing.cache_clear()


# -- the GPU's, by Triton's interpreter --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("share", ["some", pytest.param("all", marks=pytest.mark.full)])
def test_triton_kernels_equal_the_reference(share):
    """Every kernel; whole epochs, which the interpreter is slow with, on all sides and with all limits in make full."""
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    seed = str(np.random.SeedSequence().entropy % 2**32)
    done = subprocess.run(
        [sys.executable, __file__, seed, share],
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, f"seed {seed}: {done.stderr[-3000:]}"


def check_draws(rng):
    """Draws of a GPU's kernels against `tacit.draws`: equal bits, normals equal but for rounding."""
    from tacit.kernels import gpu_draws

    for count in (1, 7, 1030):
        words = [torch.tensor(rng.integers(0, 2**32, count)) for _ in range(4)]
        words[2] = words[2][:1]  # they broadcast
        key = tuple(int(x) for x in rng.integers(0, 2**32, 2))
        ours, theirs = gpu_draws.philox(tuple(words), key), philox(tuple(words), key)
        assert all(torch.equal(a, b.expand(count)) for a, b in zip(ours, theirs, strict=True))
        numbers, steps = torch.tensor([3, 70]), torch.tensor(rng.integers(0, 2**32, 2))
        for normal, slow in ((False, party_words), (True, party_normals)):
            given = (torch.tensor(rng.integers(-(2**63), 2**63, 2)), Purpose.NEGATIVES, numbers, steps, count)
            assert torch.allclose(gpu_draws.party_words(*given, normal=normal), slow(*given), rtol=1e-5, atol=1e-6)
        secret, block = Secret.fresh(), torch.tensor(rng.integers(0, 2**40, count))
        step, party = torch.tensor(rng.integers(0, 2**32, count)), torch.tensor(rng.integers(0, 2**20, count))
        whose = party | Purpose.SAMPLE << 20
        assert torch.equal(
            gpu_draws.secret_blocks(secret, whose, step, block), secret.blocks(Purpose.SAMPLE, party, step, block)
        )
        into, at = torch.tensor(rng.normal(size=count), dtype=torch.float32), int(rng.integers(0, 2**32))
        expected = into + 2.5 * secret.normal(Purpose.NOISE_ENTITY, 1, at, count)
        gpu_draws.add_secret_normals(secret, Purpose.NOISE_ENTITY, 1, at, 2.5, into)
        assert torch.allclose(into, expected, rtol=1e-5, atol=1e-5)


def check_rows(kernel, rng):
    """What a GPU adds to rows, against loops; the noise is that of `party_normals` by its place."""
    for width in (3, 8, 1030):
        table = torch.tensor(rng.normal(size=(9, width)), dtype=torch.float32)
        rows, values = torch.tensor(rng.integers(0, 9, 20)), torch.tensor(rng.normal(size=(20, width)))
        factor, ours, theirs = torch.tensor(rng.random(20)), table.clone(), table.double()
        factor[3], values[3] = 0.0, float("nan")
        kernel.add_times(ours, rows, values.float(), factor.float())
        for i in [i for i in range(20) if i != 3]:
            theirs[rows[i]] += factor[i] * values[i]
        assert torch.allclose(ours.double(), theirs, rtol=1e-4, atol=1e-5)
        there = torch.tensor(rng.random((2, 10)) < 0.7)
        rows = torch.tensor(rng.integers([[0], [5]], [[5], [9]], (2, 10)))
        seeds, numbers, steps = (torch.tensor(rng.integers(0, 2**20, 2)) for _ in range(3))
        deviation, ours, theirs = torch.tensor([0.5, 0.0]), table.clone(), table.clone()
        places, seen = First(9, "cpu"), set()
        once = places.of(rows, there)
        assert torch.equal(places.of(rows, there), once)  # nothing stays behind
        draws = seeds, Purpose.NOISE_ENTITY, numbers, steps
        noise = party_normals(*draws, 10 * width).reshape(2, 10, width)
        for party, place in np.ndindex(2, 10):
            row = int(rows[party, place])
            new = bool(there[party, place]) and row not in seen
            assert bool(once[party, place]) == new
            if new:
                seen.add(row)
                theirs[row] += deviation[party] * noise[party, place]
        kernel.add_noise(ours, rows, once, deviation, *draws)
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-5)


@given(seed=seeds)
def test_rows_get_their_share_and_their_noise(seed):
    check_rows(pytest.importorskip("tacit.kernels.cpu_rows", exc_type=ImportError), np.random.default_rng(seed))


@given(seed=seeds)
def test_rows_get_the_same_by_torch(seed):
    """Where there are no kernels: other numbers than float32 have none."""
    whole = SimpleNamespace(
        add_times=lambda table, rows, values, factor: by_torch(plain_rows.add_times, table, rows, values, factor),
        add_noise=lambda table, rows, once, deviation, *draws: by_torch(
            plain_rows.add_noise, table, rows, once, deviation, *draws
        ),
    )
    check_rows(whole, np.random.default_rng(seed))


def by_torch(add, table, *given):
    double = table.double()
    add(double, *(each.double() if getattr(each, "dtype", None) == torch.float32 else each for each in given))
    table.copy_(double)


def check_moves(move, rng):
    """The end of a step by one kernel, against the optimizers as they are written."""
    layout = Layout((5, 300), (2, 3))
    for optimizer in (SGD(momentum=0.5), Adagrad(0.1), Adam(0.01)):
        for name in ("transe", "transm"):
            scorer = SCORERS[name]()
            drawn = [
                torch.from_numpy(rng.normal(size=(n, w))).float()
                for n, w in zip((305, 5), scorer.widths(7), strict=True)
            ]
            ours, theirs = (
                Cohort(scorer, Tables(*(tensor.clone() for tensor in drawn)), layout, optimizer, 2) for _ in range(2)
            )
            ours.movers, theirs.movers = (dict.fromkeys(PARTS, each) for each in (move, None))
            for _ in range(3):
                for part in ("entity", "relation"):
                    mine, other = (getattr(each.gradients.tables, part) for each in (ours, theirs))
                    other.copy_(torch.from_numpy(rng.normal(size=other.shape)))
                    other[torch.from_numpy(rng.random(len(other)) < 0.3)] = 0
                    mine.copy_(other)
                divisor, active = torch.tensor([3.0, 7.0]), torch.from_numpy(rng.random(2) < 0.7)
                which = torch.from_numpy(rng.integers(0, 2, 2))
                for each in (ours, theirs):
                    each.which.copy_(which)
                    each.move(divisor, active)
                for name_of, tensor in theirs.state().items():
                    assert torch.allclose(ours.state()[name_of], tensor, rtol=1e-5, atol=1e-6), (optimizer, name_of)
                assert not any(bool(tensor.any()) for tensor in ours.gradients.tensors())


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # the interpreter divides by zero where a GPU's kernel does, and masks it as well
    generator = np.random.default_rng(int(sys.argv[1]))
    from tacit.kernels import gpu_counting, gpu_epochs, gpu_moves, gpu_rows

    gpu_epochs.CHAIN = 3  # fewer than an epoch has: a chain whose steps are all past the end costs as much here
    check_draws(generator)
    check_moves(gpu_moves.move, generator)
    check_rows(gpu_rows, generator)
    whole, shift = sys.argv[2] == "all", int(generator.integers(len(COVERED)))
    for place, each_loss in enumerate(LOSSES):  # some: every loss, each with a scorer that the seed chooses
        for each_scorer in COVERED if whole else [list(COVERED)[(place + shift) % len(COVERED)]]:
            check_gradients(kernel_for("triton", torch.device("cpu")), generator, each_scorer, each_loss)
    gpu_counting.QUERIES, gpu_counting.ROWS, gpu_counting.TILES, gpu_counting.PRODUCTS = 8, 4, 2, 8
    for each_name in ("transe", "distmult", "rotate", "transe"):
        check_counting(gpu_counting.count, generator, each_name)
    for side in SIDES if whole else ("random",):
        check_epochs("triton", side, {"filtered": True})
    check_epochs("triton", "tails", {"name": "pool", "count": 2})
    changed = {"subsampling": True, "decay": "cosine", "epochs": 3}
    for options in ({"reciprocal": True}, changed) if whole else (changed | {"reciprocal": True, "epochs": 2},):
        check_epochs("triton", "both", {"filtered": True}, options)
    check_noisy_epochs("triton", {"name": "pool", "count": 2}, {"dim": 5})
    if whole:
        check_noisy_epochs("triton", {}, sides="random")
        check_noisy_epochs("triton", {}, row_clip=0.05, row_mask=torch.arange(40) % 3 > 0)
