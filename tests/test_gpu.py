"""The same on a GPU as on a CPU. Run where there is one; `python tests/test_gpu.py` needs torch and NumPy alone."""

from __future__ import annotations

import contextlib

import numpy as np
import torch

with contextlib.suppress(ImportError):  # a GPU box may have no pytest
    import pytest

    pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")

from tacit.clinic import clinic
from tacit.evaluation import rank, typed_candidates
from tacit.federation.aggregation import OwnerMean
from tacit.federation.star import Star
from tacit.federation.transcript import Transcript
from tacit.marking import mark
from tacit.models import SCORERS
from tacit.negatives import NEGATIVES, SIDES
from tacit.settings import Settings, combine
from tacit.training import Fit

SMALL = clinic("small", 3)
BASE = {"scorer": {"dim": 6}, "training": {"batch": 64, "epochs": 2}, "negatives": {"count": 8}}


def fitted(device, kernel="auto", graphs=SMALL.graphs, **changes):
    wanted = Settings.make(combine(BASE, changes))
    pairs = [np.array([[0, 0], [1, 1]])] * 3 if changes.get("negatives", {}).get("name") == "public-pairs" else None
    fit = Fit(wanted, graphs, device=device, pairs=pairs, kernel=kernel)
    losses = [fit.epoch().loss for _ in range(2)]
    return fit, losses


def check_same(kernel="auto", **changes):
    here, ours = fitted("cpu", **changes)
    there, theirs = fitted("cuda", kernel, **changes)
    assert np.allclose(ours, theirs, rtol=1e-4, equal_nan=True), changes
    for name, tensor in here.cohort.tables.tensors().items():
        other = there.cohort.tables.tensors()[name].cpu()
        # One sign of a gradient near 0 that rounds the other way moves a number by twice the learning rate.
        apart = (tensor - other).abs()
        assert apart.median() < 1e-5, (changes, name, apart.median())
        assert (apart > 1e-3).float().mean() < 0.02, (changes, name)
    return here, there


def test_every_scorer_trains_the_same():
    for scorer in SCORERS:
        check_same(scorer={"name": scorer, "dim": 6})


def test_all_negatives_and_options_train_the_same():
    for kind in NEGATIVES:
        loss = {"name": "one-vs-all" if kind == "all" else "self-adversarial"}
        check_same(negatives={"name": kind, "count": 8, "sides": "both"}, loss=loss, scorer={"name": "complex"})
    check_same(loss={"name": "k-vs-all"}, negatives={"name": "all", "sides": "both"}, scorer={"name": "distmult"})
    everyone = {"name": "all", "sides": "both"}
    check_same(loss={"name": "one-vs-all"}, negatives=everyone, scorer={"name": "rescal", "dim": 6},
               regulariser={"name": "dura", "weight": 0.1}, training={"reciprocal": True})  # fmt: skip
    options = {"reciprocal": True, "subsampling": True, "dropout": 0.2}
    check_same(
        training=options, negatives={"sides": "both", "filtered": True}, regulariser={"name": "n3", "weight": 0.1}
    )
    for optimizer in ("adagrad", "sgd", "sparse-adam"):
        check_same(optimizer={"name": optimizer})


def test_whole_epochs_on_the_gpu_train_the_same():
    """Draws, sides, filters, pools and Adam in kernels, against the reference on a CPU."""
    kinds = ({"filtered": True}, {"count": 5}, {"name": "pool", "count": 7})
    several = [({"name": "transe"}, sides, more) for sides in SIDES for more in kinds]
    several += [({"name": name}, "random", {"filtered": True}) for name in ("rotate", "distmult", "complex")]
    several += [({"name": "transe", "norm": 2}, "random", {}), ({"name": "rotate", "dim": 8}, "tails", {})]
    for number, (scorer, sides, more) in enumerate(several):
        negatives = {"count": 6, "sides": sides} | more
        training = {"subsampling": True, "decay": "cosine"} if number % 2 else {}
        here, there = check_same("triton", scorer={"dim": 5} | scorer, negatives=negatives, training=training)
        assert there.epochs is not None
        assert here.cohort.steps.tolist() == there.cohort.steps.tolist()
    check_same("triton", training={"reciprocal": True}, negatives={"sides": "both", "filtered": True})
    check_same("triton", training={"steps": 5})
    for loss in ("logistic", "softmax", "margin"):
        check_same("triton", loss={"name": loss})


def test_a_star_on_the_gpu_is_the_same():
    """Entities and relations shared, all options of messages; one party rests in some rounds."""
    wanted = Settings.make(BASE)
    for part, how in (
        ("entity", OwnerMean()),
        ("relation", OwnerMean("float16")),
        ("entity", OwnerMean(changed_only=True)),
    ):
        stars = [
            Star(Fit(wanted, SMALL.graphs, device=device), part, how, Transcript(), local_epochs=1, fraction=0.7)
            for device in ("cpu", "cuda")
        ]
        for _ in range(3):
            reports = [star.round() for star in stars]
            assert reports[0].trained == reports[1].trained
            assert reports[0].given == reports[1].given or how.changed_only
        apart = (stars[0].table - stars[1].table.cpu()).abs()
        assert apart.median() < 1e-4, (part, how)


def test_private_steps_are_the_same():
    """The same samples, public draws and noise, from the same simulated key."""
    falling = {"noise_falls": 0.5, "noise_every": 2}
    several = [("dpsgd", {}), ("dpsgd", falling), ("frozen", {"degree_sigma": 1.0}), ("adafest", {"threshold": 0.5})]
    for name, more in several:
        for scorer in ("transe", "complex"):
            privacy = {"name": name, "sigma": 0.7, "noise": "seeded"} | more
            check_same(privacy=privacy, scorer={"name": scorer, "dim": 6}, negatives={"name": "pool", "count": 8})


def test_published_steps_are_the_same():
    """Steps as a CUDA graph, against the same steps one by one on a CPU; the seventeenth step begins a second graph."""
    marked = [mark(graph, np.arange(len(graph.statements)) % 5 < 2) for graph in SMALL.graphs]
    shared = {"mode": "published", "sigma": 0.7}
    flames = ({"test": False}, {"test": True}, {"test": False, "pairs": "random", "follows": "epochs", "every": 1})
    for scorer in ("distmult", "complex"):
        for more in flames:  # clips that cut nothing: rows of one norm, but for rounding, come in any order
            privacy = {"name": "dp-flames", "clip": 50.0, "row_clip": 50.0} | shared | more
            check_same(privacy=privacy, scorer={"name": scorer, "dim": 6}, training={"batch": 16})
        for more in ({}, {"clip": 0.5}, {"clip": 0.5, "optimizers": 2}):
            privacy = {"name": "dpkge"} | shared | more
            optimizer = {"name": "adagrad" if more else "adam"}
            here, there = check_same(graphs=marked, privacy=privacy, scorer={"name": scorer, "dim": 6},
                                     loss={"name": "margin"}, negatives={"count": 1, "sides": "random"},
                                     optimizer=optimizer, training={"batch": 16})  # fmt: skip
            assert max(here.published.per_epoch) > 17
            assert here.published.released.tolist() == there.published.released.tolist()


def test_ranks_are_the_same():
    for scorer in SCORERS:
        fit, _ = fitted("cpu", scorer={"name": scorer, "dim": 6})
        graph, model = SMALL[0], fit.model(0, best=False)
        for typed in (None, typed_candidates(graph)):
            moved = model.tables.like(lambda tensor: tensor.cuda())
            found = [
                rank(type(model)(model.scorer, tables), graph.test.triples, graph.statements.triples, typed=typed)
                for tables in (model.tables, moved)
            ]
            apart = np.abs(found[0].of() - found[1].of())
            # Rounding may decide between two that are all but equal; of NTN, whose tanh saturates, many are.
            assert (apart > 0).mean() < (0.2 if scorer == "ntn" else 0.01), scorer
            assert abs(found[0].metrics().mrr - found[1].metrics().mrr) < 1e-3


if __name__ == "__main__":
    for name, test in list(globals().items()):
        if name.startswith("test_"):
            test()
            print(name, "passes on", torch.cuda.get_device_name())
