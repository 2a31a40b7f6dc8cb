"""The GPU's kernels on a CPU, by Triton's interpreter, on tiny shapes: equal to the reference on fresh inputs.

The interpreter has to be chosen before Triton is loaded, so the checks run in a process of their own: this file, run as
a program.
"""

from __future__ import annotations

import os
import subprocess
import sys
import warnings

import numpy as np
import torch

from tacit.graph import Graph
from tacit.kernels import Chunk, Clipped, Gradients, Objective, Plain, Reference
from tacit.losses import Logistic, Margin, SelfAdversarial, Softmax
from tacit.models import Layout, Prior, Tables
from tacit.models.bilinear import ComplEx, DistMult
from tacit.models.translational import RotatE, TransE
from tacit.settings import Settings
from tacit.training import Fit

SCORERS = [TransE(), TransE(norm=2), DistMult(), RotatE(), ComplEx()]
LOSSES = [SelfAdversarial(alpha=0.7), Logistic(), Softmax(), Margin(margin=1.5)]


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

    head, tail = (rows(entities, layout.entity_start, party) for _ in range(2))
    tail = torch.where(torch.tensor(rng.random(batch) < 0.3), head, tail)
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
    chunk = Chunk(head, rows(layout.relations, layout.relation_start, party), tail, torch.tensor(party),
                  torch.tensor(rng.random(batch) < 0.5), torch.tensor(weight, dtype=torch.float32),
                  torch.arange(batch), **candidates)  # fmt: skip
    clip = torch.tensor(rng.random(parties) * 2, dtype=torch.float32)
    part = ["both", "positive", "negative"][int(rng.integers(3))] if loss.apart else "both"
    mask = torch.tensor(rng.random(sum(entities)) < 0.7)
    rules = [Plain(), Clipped(clip, relation_scale=0.7), Clipped(clip, row_clip=0.3, row_mask=mask, part=part)]
    return Objective(scorer, loss, prior=prior), layout, tables, chunk, rules


def check_gradients(rng, scorer, loss):
    from tacit.kernels.gpu import Triton

    objective, layout, tables, chunk, rules = a_case(rng, scorer, loss)
    for rule in rules:
        found = []
        for kernel in (Triton, Reference):
            into = Gradients(tables.like(torch.zeros_like))
            losses, norms = kernel(objective, layout).accumulate(tables, chunk, rule, into)
            kept = [] if norms is None else [norms * (chunk.weight != 0) if kernel is Triton else norms]
            found.append([losses, *into.tensors(), *kept])
        for ours, theirs in zip(*found, strict=True):
            ours = ours[: len(theirs)]
            assert torch.allclose(ours, theirs, rtol=1e-4, atol=2e-5), (scorer, loss, rule, ours, theirs)


def check_epochs(sides, negatives, reciprocal=False):
    """Shuffles, sides, draws, filters, pools and Adam of two unequal parties, one of which then rests."""
    from tacit.kernels.gpu_epochs import GpuEpochs

    def graph(seed, entities, count):
        rng = np.random.default_rng(seed)
        rows = zip(
            rng.integers(entities, size=count),
            rng.integers(2, size=count),
            rng.integers(entities, size=count),
            strict=True,
        )
        return Graph.from_triples([(f"e{h}", f"r{r}", f"e{t}") for h, r, t in rows])

    wanted = Settings.make({"scorer": {"dim": 3}, "training": {"batch": 6, "reciprocal": reciprocal},
                            "negatives": {"count": 6, "sides": sides} | negatives})  # fmt: skip
    graphs = [graph(1, 9, 14), graph(2, 31, 25)]
    slow, fast = (Fit(wanted, graphs, numbers=[5, 3], kernel=name, device="cpu") for name in ("reference", "triton"))
    assert GpuEpochs.fits(fast.cohort, fast.examples, fast.kernel)
    fast.prepare()
    for active in (None, np.array([True, False])):
        ours, theirs = fast.epoch(active), slow.epoch(active)
        assert np.allclose(ours.loss, theirs.loss, rtol=1e-4, equal_nan=True)
        assert (ours.steps, ours.examples) == (theirs.steps, theirs.examples)
    for name, tensor in slow.cohort.state().items():
        assert torch.allclose(tensor.double(), fast.cohort.state()[name].double(), atol=2e-4), (sides, negatives, name)


def test_triton_kernels_equal_the_reference():
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    seed = str(np.random.SeedSequence().entropy % 2**32)
    done = subprocess.run(
        [sys.executable, __file__, seed], env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    if "No module named 'triton'" in done.stderr:
        import pytest

        pytest.skip("triton is not installed")
    assert done.returncode == 0, f"seed {seed}: {done.stderr[-3000:]}"


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # the interpreter divides by zero where a GPU's kernel does, and masks it as well
    generator = np.random.default_rng(int(sys.argv[1]))
    for each_loss in LOSSES:
        for each_scorer in SCORERS:
            check_gradients(generator, each_scorer, each_loss)
    for side in ("tails", "heads", "both", "alternate", "random", "bernoulli"):
        check_epochs(side, {"filtered": True})
    check_epochs("tails", {"name": "pool", "count": 2})
    check_epochs("both", {"filtered": True}, reciprocal=True)
