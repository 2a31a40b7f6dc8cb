"""What other libraries take for the same work, to be timed beside ours in one process.

    python benchmarks/peers.py --graph FOLDER [--device cpu] [--steps 4]

    pykeen_training     seconds per step, and so per epoch, of PyKEEN's training with filtered negatives
    pykeen_ranking      seconds in which PyKEEN ranks the test triples, both sides, filtered
    opacus_step         seconds per step of DP-SGD by Opacus, with gradients per example or with ghost clipping

Each is set to what the peer is fast with, and spared what we do not do either (constraints and regularizers that its
models have by default), so that a ratio flatters us as little as may be. Each imports its peer when it is called, and
says what to install where it is missing. Run by hand, this file does each once, small.

On a CPU much of the time of PyKEEN, and of Opacus with a gradient per example, goes into memory that glibc gives back
after each step and asks for again. It is what users get, but not arithmetic: with the environment variable

    GLIBC_TUNABLES=glibc.malloc.mmap_threshold=4294967296:glibc.malloc.trim_threshold=17179869184

memory is kept, and a step takes a third to a half. Results say which it was (`allocator`); time ours the same way.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import statistics
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import environment, now

from tacit.graph import Graph

Tensor = Any
WARM_UP = 2
"""Steps (for ranking: batches) that are run before those that are timed."""
MARGIN = 10.0
RANKING_BATCH = {"cpu": 64, "cuda": 256}
"""Test triples that PyKEEN ranks at once. On a CPU, with TransE on FB15k-237, 32 to 128 were alike, 16 and 256 slower;
on a GPU it is a guess that fits into its memory, so try others there."""


class PeerMissing(RuntimeError):
    """The library that was to be timed is not installed."""


def peer(module: str, package: str) -> Any:
    """A module of another library; `PeerMissing`, with what to install, if there is none."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != module.partition(".")[0]:
            raise
        raise PeerMissing(f"{package} is not installed, so it cannot be timed: pip install {package}") from error


@contextmanager
def quiet(*libraries: str) -> Iterator[None]:
    """Without warnings, and of the libraries' logs only errors, for as long as they are timed."""
    logs = [logging.getLogger(library) for library in libraries]
    before = [log.level for log in logs]
    for log in logs:
        log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for log, level in zip(logs, before, strict=True):
            log.setLevel(level)


# -- PyKEEN ------------------------------------------------------------------------------------------------------------


def pykeen_factory(graph: Graph, triples: Tensor) -> Any:
    """PyKEEN's form of some triples, with all the entities and relations of the graph."""
    factory = peer("pykeen.triples", "pykeen").CoreTriplesFactory
    return factory(triples, num_entities=len(graph.entities), num_relations=len(graph.relations))


def pykeen_model(scorer: str, factory: Any, dim: int, device: str) -> Any:
    """A model of PyKEEN's with our loss, without the constraint and regularizer that it has by default and ours not.

    RotatE's relations stay constrained to modulus 1, which is what makes them rotations; it costs a step little.
    """
    models, losses = peer("pykeen.models", "pykeen"), peer("pykeen.losses", "pykeen")
    kinds: dict[str, tuple[Any, dict[str, Any]]] = {
        "transe": (models.TransE, {"scoring_fct_norm": 1, "entity_constrainer": None}),
        "rotate": (models.RotatE, {}),
        "distmult": (models.DistMult, {"entity_constrainer": None, "regularizer": None}),
        "complex": (models.ComplEx, {"regularizer": None}),
    }
    if scorer not in kinds:
        raise ValueError(f"PyKEEN is timed with {', '.join(kinds)}; not {scorer!r}")
    make, options = kinds[scorer]
    loss = losses.NSSALoss(margin=MARGIN, adversarial_temperature=1.0)
    return make(triples_factory=factory, embedding_dim=dim, loss=loss, random_seed=0, **options).to(device)


def pykeen_training(
    graph: Graph,
    scorer: str,
    *,
    batch: int,
    dim: int,
    negatives: int,
    steps: int,
    device: str = "cpu",
    workers: int = 0,
) -> dict[str, Any]:
    """Seconds per step and per epoch of PyKEEN: SLCWATrainingLoop, basic sampler, filtered, NSSALoss, torch's Adam.

    To bound the time it trains on some of the training triples, drawn at random, but with all entities and relations
    and with a filter made of all training triples: so a step costs what a step of a whole epoch costs, and an epoch is
    that times its steps. The filter is PyKEEN's default and its fastest, a Bloom filter (error rate 0.001); what it
    finds is left out, not drawn again. A step is timed from the end of one backward pass to the end of the next, so
    that it has drawing, filtering, both passes and the optimizer in it, and nothing that is done once per epoch. The
    median of steps counts; with workers, which hand out batches in bursts, the mean.

    `workers` draw negatives in processes of their own. On two cores 0 was faster than 1 and 2, since torch has
    use for both; where there are more, try some.
    """
    if min(batch, dim, negatives, steps) < 1 or workers < 0:
        raise ValueError("batch, dim, negatives and steps are at least 1, and workers at least 0")
    training, filtering = peer("pykeen.training", "pykeen"), peer("pykeen.sampling.filtering", "pykeen")
    each = max(workers, 1)
    batches = each * math.ceil((steps + 1 + 2 * workers) / each)  # workers are at work until the last one timed is done
    train = torch.from_numpy(graph.train.triples.astype(np.int64))
    if batches * batch > len(train):
        raise ValueError(
            f"{steps} steps of {batch} take {batches * batch:,} training triples; there are {len(train):,}"
        )
    ends: list[float] = []

    class Watch(training.TrainingCallback):  # type: ignore[misc, name-defined]
        def post_batch(self, **_: Any) -> None:
            ends.append(now(device))

    with quiet("pykeen"), tempfile.TemporaryDirectory() as folder:
        some = train[torch.randperm(len(train), generator=torch.Generator().manual_seed(0))]
        short, long = (pykeen_factory(graph, some[: n * batch]) for n in (max(WARM_UP, each), batches))
        model = pykeen_model(scorer, long, dim, device)
        filterer = filtering.BloomFilterer(train)
        sampler = {"num_negs_per_pos": negatives, "filtered": True, "filterer": filterer}
        loop = training.SLCWATrainingLoop(
            model=model,
            triples_factory=long,
            optimizer=torch.optim.Adam(model.get_grad_params()),
            negative_sampler="basic",
            negative_sampler_kwargs=sampler,
            automatic_memory_optimization=False,
        )
        fixed = {"batch_size": batch, "use_tqdm": False, "num_workers": workers, "checkpoint_directory": folder}
        fixed |= {"pin_memory": device.startswith("cuda")}
        began = now(device)
        loop.train(short, num_epochs=1, **fixed)
        warm_up = now(device) - began
        loop.train(long, num_epochs=2, continue_training=True, callbacks=Watch(), **fixed)
    if len(ends) != batches:
        raise RuntimeError(f"PyKEEN {version('pykeen')} made {len(ends)} steps of an epoch of {batches}")
    took = [after - before for before, after in pairwise(ends[: steps + 1])]
    per_step = statistics.fmean(took) if workers else statistics.median(took)
    return {
        "what": f"PyKEEN {version('pykeen')}",
        "scorer": scorer,
        "seconds_per_step": per_step,
        "seconds_per_epoch": per_step * math.ceil(len(train) / batch),
        "best_step": min(took),
        "mean_step": statistics.fmean(took),
        "steps_measured": steps,
        "warm_up_seconds": warm_up,
        "filter": type(filterer).__name__,
        "workers": workers,
        "threads": torch.get_num_threads(),
        "allocator": os.environ.get("GLIBC_TUNABLES"),
        "settings": {"batch": batch, "dim": dim, "negatives": negatives, "device": device},
    }


def ranked_part(graph: Graph, triples: int | None) -> Any:
    """The test triples, or that many of them drawn at random: what `pykeen_ranking` ranks."""
    test = graph.test.triples
    if triples is None or triples >= len(test):
        return test
    if triples < 1:
        raise ValueError(f"at least 1 test triple is ranked, not {triples}")
    return test[np.sort(np.random.default_rng(0).permutation(len(test))[:triples])]


def pykeen_ranking(
    graph: Graph,
    scorer: str,
    entity: Tensor,
    relation: Tensor,
    *,
    device: str = "cpu",
    triples: int | None = None,
    batch: int | None = None,
) -> dict[str, Any]:
    """Seconds in which PyKEEN's RankBasedEvaluator ranks the test split, both sides, filtered by all three splits.

    Tables are in our layout: (n, dim), or for ComplEx (n, 2 * dim), real parts and then imaginary ones. Its RotatE
    takes another norm than ours, so that its ranks are not of the same scores, and is refused. With `triples`, that
    many are ranked (`ranked_part` says which), and the time is scaled up: what it takes to put together the triples to
    filter by, once, and in proportion the rest. The MRR is of those that were ranked, ties at their mean.
    """
    if scorer not in ("transe", "distmult", "complex"):
        raise ValueError(f"PyKEEN's ranking is timed with transe, distmult and complex; not {scorer!r}")
    evaluation = peer("pykeen.evaluation.evaluator", "pykeen")
    ranker = peer("pykeen.evaluation", "pykeen").RankBasedEvaluator
    size = batch or RANKING_BATCH[torch.device(device).type]
    asked = torch.from_numpy(ranked_part(graph, triples).astype(np.int64))
    train, valid, test = (torch.from_numpy(part.triples.astype(np.int64)) for part in graph.splits.values())
    with quiet("pykeen", "torch_max_mem"):
        dim = entity.shape[1] // (2 if scorer == "complex" else 1)
        model = pykeen_model(scorer, pykeen_factory(graph, train), dim, device)
        for table, [rows] in ((entity, model.entity_representations), (relation, model.relation_representations)):
            values = table.detach().to(device, torch.float32)
            if scorer == "complex":
                values = torch.complex(values[:, :dim].contiguous(), values[:, dim:].contiguous())
            weight = rows._embeddings.weight
            weight.data.copy_((torch.view_as_real(values) if scorer == "complex" else values).reshape(weight.shape))
            if not torch.equal(rows(None), values):
                raise RuntimeError(f"PyKEEN {version('pykeen')} does not keep its rows as it was told to")
        known: dict[str, Any] = {"additional_filter_triples": [train, valid, test]}
        fixed = {"batch_size": size, "use_tqdm": False} | known
        ranker(filtered=True).evaluate(model, asked[: WARM_UP * size], **fixed)
        began = now(device)
        evaluation.prepare_filter_triples(mapped_triples=asked, **known)
        once = now(device) - began
        began = now(device)
        found = ranker(filtered=True).evaluate(model, asked, **fixed)
        measured = now(device) - began
    return {
        "what": f"PyKEEN {version('pykeen')}",
        "scorer": scorer,
        "seconds": once + (measured - once) * len(test) / len(asked),
        "seconds_measured": measured,
        "seconds_once": once,
        "triples_ranked": len(asked),
        "triples": len(test),
        "scaled": len(asked) < len(test),
        "mrr": float(found.get_metric("both.realistic.inverse_harmonic_mean_rank")),
        "batch": size,
        "device": device,
        "threads": torch.get_num_threads(),
        "allocator": os.environ.get("GLIBC_TUNABLES"),
    }


# -- Opacus ------------------------------------------------------------------------------------------------------------


class TransE(torch.nn.Module):  # type: ignore[misc]
    """TransE with L1 and the self-adversarial loss, as Opacus wants it: each table is looked up once per pass."""

    def __init__(self, entities: int, relations: int, dim: int) -> None:
        super().__init__()
        self.entity, self.relation = torch.nn.Embedding(entities, dim), torch.nn.Embedding(relations, dim)
        for table in (self.entity, self.relation):
            torch.nn.init.uniform_(table.weight, -MARGIN / dim, MARGIN / dim)

    def forward(self, positives: Tensor, negatives: Tensor) -> Tensor:
        """The loss of each example; the first half of its negatives stand for its tail, the others for its head."""
        rows = self.entity(torch.cat([positives[:, [0, 2]], negatives], 1))
        head, tail, others = rows[:, :1], rows[:, 1:2], rows[:, 2:]
        move = self.relation(positives[:, 1])[:, None]
        half = negatives.shape[1] // 2
        apart = torch.cat([head + move - tail, head + move - others[:, :half], others[:, half:] + move - tail], 1)
        scores = MARGIN - apart.abs().sum(-1)
        true, false = scores[:, 0], scores[:, 1:]
        part = torch.nn.functional.logsigmoid
        return -part(true) - (torch.softmax(false.detach(), 1) * part(-false)).sum(1)


class Mean:
    """The mean of losses, and under ghost clipping, which asks for it by `reduction`, each as it is."""

    reduction = "mean"

    def __call__(self, losses: Tensor) -> Tensor:
        return losses if self.reduction == "none" else losses.mean()


def opacus_step(
    entities: int,
    relations: int,
    *,
    dim: int,
    batch: int,
    negatives: int,
    mode: str,
    steps: int,
    device: str = "cpu",
) -> dict[str, Any]:
    """The median of seconds per step of DP-SGD by Opacus: TransE with L1, self-adversarial loss, torch's dense Adam.

    Each example's gradient is clipped to norm 1, and Gaussian noise of standard deviation 1 is added to every row of
    both tables. `mode` is "flat", where hooks keep a gradient per example, a whole table each; or "ghost", where norms
    are found without those and a second backward pass has the clipped sum. Batches are of one size (no Poisson
    sampling), of random triples and negatives, drawn anew for every step and outside its time; nothing is filtered.
    The noise is torch's, not from a secure generator (secure_mode is off).
    """
    modes = {"flat": "hooks", "ghost": "ghost"}
    if mode not in modes:
        raise ValueError(f"mode is flat or ghost, not {mode!r}")
    if min(entities, relations, dim, batch, negatives, steps) < 1:
        raise ValueError("entities, relations, dim, batch, negatives and steps are at least 1")
    opacus = peer("opacus", "opacus")
    draws = torch.Generator().manual_seed(0)

    def example() -> tuple[Tensor, Tensor]:
        sizes = ((entities, 1), (relations, 1), (entities, 1), (entities, negatives))
        drawn = [torch.randint(high, (batch, many), generator=draws) for high, many in sizes]
        return torch.cat(drawn[:3], 1).to(device), drawn[3].to(device)

    with quiet("opacus"):
        torch.manual_seed(0)
        module = TransE(entities, relations, dim).to(device)
        private = opacus.PrivacyEngine(secure_mode=False).make_private(
            module=module,
            optimizer=torch.optim.Adam(module.parameters()),
            criterion=Mean(),
            data_loader=torch.utils.data.DataLoader(range(100 * batch), batch_size=batch),  # for its sizes alone
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            poisson_sampling=False,
            clipping="flat",
            grad_sample_mode=modes[mode],
        )
        model, optimizer = private[:2]
        criterion = private[2] if mode == "ghost" else Mean()
        took: list[float] = []
        for _ in range(WARM_UP + steps):
            positives, others = example()
            before = module.entity.weight.detach().clone() if not took else None
            began = now(device)
            optimizer.zero_grad(set_to_none=True)
            criterion(model(positives, others)).backward()
            optimizer.step()
            took.append(now(device) - began)
            if before is not None and bool((module.entity.weight == before).all(1).any()):
                raise RuntimeError(f"Opacus {version('opacus')} left rows of the table without noise")
    return {
        "what": f"Opacus {version('opacus')}",
        "mode": mode,
        "seconds_per_step": statistics.median(took[WARM_UP:]),
        "best_step": min(took[WARM_UP:]),
        "steps_measured": steps,
        "secure_noise": False,
        "threads": torch.get_num_threads(),
        "allocator": os.environ.get("GLIBC_TUNABLES"),
        "settings": {"entities": entities, "relations": relations, "dim": dim, "batch": batch}
        | {"negatives": negatives, "device": device},
    }


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--graph", type=Path, required=True)
    options.add_argument("--device", default="cpu")
    options.add_argument("--dim", type=int, default=128)
    options.add_argument("--negatives", type=int, default=256)
    options.add_argument("--steps", type=int, default=4)
    options.add_argument("--triples", type=int, default=256, help="test triples to rank")
    options.add_argument("--workers", type=int, default=0, help="processes that draw PyKEEN's negatives")
    chosen = options.parse_args()
    from tacit.files import read_graph

    graph = read_graph(chosen.graph)
    entities, relations = len(graph.entities), len(graph.relations)
    same: dict[str, Any] = {"dim": chosen.dim, "negatives": chosen.negatives, "steps": chosen.steps}
    same |= {"device": chosen.device}
    print(", ".join(f"{name} {found}" for name, found in environment()["versions"].items()))
    print(f"{'':44}{'s/step':>10}{'best':>10}{'s/epoch':>10}")
    for scorer in ("transe", "rotate", "distmult", "complex"):
        row = pykeen_training(graph, scorer, batch=512, workers=chosen.workers, **same)
        numbers = [row["seconds_per_step"], row["best_step"], row["seconds_per_epoch"]]
        print(f"{row['what'] + ' ' + scorer + ', batch 512':44}" + "".join(f"{n:10.4f}" for n in numbers), flush=True)
    for mode in ("flat", "ghost"):
        row = opacus_step(entities, relations, batch=64, mode=mode, **same)
        numbers = [row["seconds_per_step"], row["best_step"]]
        print(f"{row['what'] + ' ' + mode + ', batch 64':44}" + "".join(f"{n:10.4f}" for n in numbers), flush=True)
    print(f"{'':44}{'seconds':>10}{'of':>10}{'scaled':>10}{'MRR':>10}")
    for scorer, width in (("transe", chosen.dim), ("distmult", chosen.dim), ("complex", 2 * chosen.dim)):
        draws = torch.Generator().manual_seed(0)
        tables = (torch.rand(n, width, generator=draws) - 0.5 for n in (entities, relations))
        row = pykeen_ranking(graph, scorer, *tables, device=chosen.device, triples=chosen.triples)
        line = f"{row['seconds_measured']:10.4f}{row['triples_ranked']:>10,}{row['seconds']:10.2f}{row['mrr']:10.5f}"
        print(f"{row['what'] + ' ' + scorer + ', ranking':44}{line}", flush=True)


if __name__ == "__main__":
    main()
