"""Training: a cohort is its parties one by one, and a run survives whatever stops it."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tacit
from tacit.clinic import clinic
from tacit.cohort import Cohort
from tacit.draws import Purpose, Stream, below
from tacit.errors import BadInput, BadValue, TacitError
from tacit.examples import Examples, Sampling
from tacit.folders import PRIVATE
from tacit.graph import Graph
from tacit.kept import Kept
from tacit.kernels import Plain, Reference
from tacit.kernels.epochs import Epochs
from tacit.losses import LOSSES
from tacit.models import SCORERS, Layout
from tacit.models.tables import relation_weights
from tacit.negatives import NEGATIVES, SIDES, Everyone, Independent, Pool, PublicPairs, RandomTriples
from tacit.optimizers import OPTIMIZERS
from tacit.parties import partition, pool
from tacit.run import CONFIG, Run, create, train
from tacit.settings import FLAGS, SECTIONS, Settings, Training, combine, parse_assignment
from tacit.tensors import load_graph, load_tensors, save_graph, save_tensors
from tacit.training import Diverged, Fit

SMALL = clinic("small", 3)


def quick(**flags):
    nested = {"training": {"batch": 64, "epochs": 3}, "evaluation": {"every": 2}, "negatives": {"count": 8}}
    return Settings.make(combine(nested, {"scorer": {"dim": 6}}, flags))


def small_graph(seed, entities=9, relations=2, triples=25):
    rng = np.random.default_rng(seed)

    def named(n):
        columns = rng.integers(entities, size=n), rng.integers(relations, size=n), rng.integers(entities, size=n)
        return [(f"e{h}", f"r{r}", f"e{t}") for h, r, t in zip(*columns, strict=True)]

    return Graph.from_triples(named(triples), named(5), named(5))


# -- a cohort ----------------------------------------------------------------------------------------------------------


def in_float64(fit):
    """Rounding aside: the same numbers, to far more than six digits."""
    tables = fit.cohort.tables.like(lambda tensor: tensor.double())
    fit.cohort = Cohort(fit.settings.scorer, tables, fit.layout, fit.settings.optimizer)
    fit.best = tables.like(torch.clone)
    return fit


@pytest.mark.parametrize("scorer", sorted(SCORERS))
@pytest.mark.parametrize("optimizer", ["adam", "sparse-adam"])
def test_a_cohort_is_its_parties_one_by_one(scorer, optimizer):
    """Unequal sizes; party 1 rests in rounds 1 and 2; party 2 runs out of steps."""
    graphs = [small_graph(1), small_graph(2, 14, 3, 70), small_graph(3, 5, 1, 12)]
    wanted = quick(scorer={"name": scorer, "dim": 3}, optimizer={"name": optimizer, "learning_rate": 0.05})
    wanted = replace(wanted, training=replace(wanted.training, batch=8))
    awake = np.array([[1, 1, 1], [1, 0, 1], [1, 0, 1], [1, 1, 1]], bool)
    most = torch.tensor([10**6, 10**6, 3])

    def rounds(fit, columns):
        for row in awake[:, columns]:
            for step in fit.examples.epoch(fit.cohort.epochs, fit.cohort.steps, torch.tensor(row), most[columns]):
                fit.kernel.accumulate(fit.cohort.tables, step.chunk, Plain(), fit.cohort.gradients)
                fit.cohort.finish(step.divisor, step.active)
            fit.cohort.epochs += torch.tensor(row)
        return fit

    together = rounds(in_float64(Fit(wanted, graphs)), [0, 1, 2])
    sizes = [-(-len(graph.train) // 8) for graph in graphs]
    assert together.cohort.steps.tolist() == [4 * sizes[0], 2 * sizes[1], 3]
    for party, graph in enumerate(graphs):
        alone = rounds(in_float64(Fit(wanted, [graph], numbers=[party])), [party])
        ours, theirs = together.cohort.tables.party(together.layout, party).tensors(), alone.cohort.tables.tensors()
        for name, tensor in theirs.items():
            assert torch.allclose(ours[name], tensor, rtol=0, atol=1e-9), (party, name)
        assert together.cohort.steps[party] == alone.cohort.steps[0]


def test_an_inactive_party_does_not_move_at_all():
    fit = Fit(quick(), SMALL.graphs)
    fit.epoch()
    before = {name: tensor.clone() for name, tensor in fit.cohort.state().items()}
    fit.epoch(np.array([True, False, True]))
    for part in ("entity", "relation"):
        rows = fit.layout.rows(part, 1)
        for name in (f"tables.{part}", f"memory.0.{part}", f"memory.1.{part}"):
            now = fit.cohort.state()[name]
            assert torch.equal(now[rows], before[name][rows])
            assert not torch.equal(now, before[name])
    assert (fit.cohort.steps - before["steps"]).tolist()[1] == 0


def test_the_order_of_parties_changes_nothing():
    wanted = quick()
    one = Fit(wanted, SMALL.graphs, numbers=[0, 1, 2])
    two = Fit(wanted, SMALL.graphs[::-1], numbers=[2, 1, 0])
    for fit in (one, two):
        fit.epoch()
    for party in range(3):
        ours = one.cohort.tables.party(one.layout, party).tensors()
        theirs = two.cohort.tables.party(two.layout, 2 - party).tensors()
        assert all(torch.allclose(ours[name], theirs[name], atol=1e-6) for name in ours)


def test_each_party_stops_when_its_own_validation_does():
    wanted = quick(training={"batch": 64, "epochs": 40}, evaluation={"every": 1, "patience": 2},
                   optimizer={"learning_rate": 0.05})  # fmt: skip
    together = Fit(wanted, SMALL.graphs)
    together.run(lambda event: None)
    for party, graph in enumerate(SMALL.graphs):
        alone = Fit(wanted, [graph], numbers=[party])
        alone.run(lambda event: None)
        assert together.best_epoch[party] == alone.best_epoch[0]
        assert together.best_mrr[party] == pytest.approx(alone.best_mrr[0], abs=1e-6)
    assert together.finished.all()


def test_what_is_kept_is_the_best_and_not_the_last():
    wanted = quick(training={"batch": 64, "epochs": 60}, evaluation={"every": 1, "patience": 3},
                   optimizer={"learning_rate": 0.1})  # fmt: skip
    events = []
    run = train(SMALL[0], settings=wanted, on_event=events.append)
    seen = [event["mrr"][0] for event in events if event["event"] == "validation"]
    assert max(seen) == pytest.approx(run.metrics["valid"].mrr, abs=1e-9)
    assert len(seen) == seen.index(max(seen)) + 1 + 3 < 60


def test_the_learning_rate_falls_as_asked():
    done = np.arange(6)
    assert Training(epochs=4, decay="linear").pace(done).tolist() == [1, 0.75, 0.5, 0.25, 0, 0]
    assert Training(epochs=4, decay="cosine").pace(done)[2] == pytest.approx(0.5)
    assert (Training(epochs=4).pace(done) == 1).all()


@pytest.mark.parametrize("kernel", ["reference", "auto"])
@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
def test_a_slower_pace_is_a_lower_learning_rate(optimizer, kernel):
    """Party 1 rests in the first epoch, so that the two have different paces in the second."""
    rates = {"name": optimizer, "learning_rate": 0.05}
    falling = Fit(quick(optimizer=rates, training={"batch": 16, "epochs": 4, "decay": "linear"}), SMALL.graphs[:2],
                  kernel=kernel, device="cpu")  # fmt: skip
    falling.epoch(np.array([True, False]))
    falling.epoch(np.array([True, True]))
    for party, epochs in ((0, [1.0, 0.75]), (1, [1.0])):
        alone = Fit(quick(optimizer=rates, training={"batch": 16}), [SMALL[party]], numbers=[party], kernel="reference",
                    device="cpu")  # fmt: skip
        for pace in epochs:
            alone.cohort.optimizer = replace(alone.settings.optimizer, learning_rate=0.05 * pace)
            alone.epoch()
        ours = falling.cohort.tables.party(falling.layout, party).tensors()
        for name, tensor in alone.cohort.tables.tensors().items():
            assert torch.allclose(ours[name], tensor, rtol=1e-3, atol=1e-5), name


def test_resetting_the_optimizer_forgets_its_memory():
    fit = Fit(quick(), [SMALL[0]])
    fit.epoch()
    fit.cohort.between_rounds("keep")
    assert fit.cohort.moments[0] > 0
    fit.cohort.between_rounds("reset")
    assert fit.cohort.moments[0] == 0
    assert not any(tensor.any() for memory in fit.cohort.memory for tensor in memory.tensors().values())
    assert fit.cohort.steps[0] > 0


# -- examples and negatives --------------------------------------------------------------------------------------------


def asked_for(negatives, graphs, sampling=None, seed=0, **more):
    sampling = sampling or Sampling(batch=7)
    twice = 2 if sampling.reciprocal else 1
    layout = Layout(tuple(len(g.entities) for g in graphs), tuple(twice * len(g.relations) for g in graphs))
    return Examples(graphs, layout, sampling, negatives, seed=seed, widths=(4, 3), **more)


def one_epoch(examples, epoch=0, steps=None):
    parties = len(examples.layout)
    steps = torch.zeros(parties, dtype=torch.int64) if steps is None else steps
    return list(examples.epoch(torch.full((parties,), epoch), steps, torch.ones(parties, dtype=torch.bool)))


@pytest.mark.parametrize("sides", sorted(SIDES))
def test_an_epoch_sees_every_triple_once_and_from_the_sides_asked_for(sides):
    graphs = [small_graph(1), small_graph(2, 20, 3, 60)]
    examples = asked_for(Independent(count=3, sides=sides), graphs)
    seen = [step.chunk for step in one_epoch(examples)]
    rows = torch.cat([torch.stack([c.head, c.relation, c.tail], 1) for c in seen])
    times = 2 if sides == "both" else 1
    expected = examples.triples.repeat(times, 1)
    assert sorted(map(tuple, rows.tolist())) == sorted(map(tuple, expected.tolist()))
    heads = torch.cat([c.asks_head for c in seen])
    share = {"tails": 0.0, "heads": 1.0, "both": 0.5}.get(sides)
    assert share is None or heads.float().mean() == share
    if sides == "alternate":
        assert all(c.asks_head.unique().numel() == 1 for c in seen[:4])
    for step, chunk in zip(one_epoch(examples), seen, strict=True):
        assert torch.equal(step.chunk.negatives, chunk.negatives)  # drawn anew, the same
        assert step.divisor[step.active].sum() * times == len(chunk)
    other = torch.cat([step.chunk.head for step in one_epoch(examples, epoch=1)])
    assert not torch.equal(other, rows[:, 0])


def test_bernoulli_asks_more_often_for_the_side_with_fewer_answers_each():
    """A relation with many tails per head: corrupting the head is likelier, tph / (tph + hpt) of the time."""
    graph = Graph.from_triples([("hub", "r", f"t{i}") for i in range(400)] + [("a", "s", "b")])
    examples = asked_for(Independent(count=1, sides="bernoulli"), [graph], Sampling(batch=401))
    [step] = one_epoch(examples)
    of_r = step.chunk.relation == graph.relations.id("r")
    assert examples.head_share[examples.triples[:, 1] == graph.relations.id("r")][0] == pytest.approx(400 / 401)
    assert step.chunk.asks_head[of_r].float().mean() > 0.97
    assert examples.head_share[examples.triples[:, 1] == graph.relations.id("s")][0] == pytest.approx(0.5)


@given(seed=st.integers(0, 10**6))
def test_negatives_are_the_party_s_own_and_follow_its_number_and_slot_alone(seed):
    graphs = [small_graph(seed), small_graph(seed + 1, 13, 3, 40)]
    examples = asked_for(Independent(count=5, sides="random"), graphs, seed=seed)
    chunk = one_epoch(examples)[0].chunk
    start = np.array(examples.layout.entity_start)
    party = chunk.party.numpy()[:, None]
    ids = chunk.negatives.numpy()
    assert ((ids >= start[party]) & (ids < start[party + 1])).all()
    # By hand, from the stream: slot s of party p has two blocks of four words at its step.
    for row in range(len(chunk)):
        p, slot = int(chunk.party[row]), row - int((chunk.party < chunk.party[row]).sum())
        words = Stream(seed, Purpose.NEGATIVES, p).words(5, start=8 * slot)
        assert ids[row].tolist() == (start[p] + below(words, len(graphs[p].entities))).tolist()


@pytest.mark.slow
@given(seed=st.integers(0, 10**6), sides=st.sampled_from(["tails", "heads", "both", "random"]), flip=st.booleans())
def test_filtered_negatives_are_never_facts(seed, sides, flip):
    graph = small_graph(seed, entities=4, relations=2, triples=30)
    sampling = Sampling(batch=7, reciprocal=flip)
    examples = asked_for(Independent(count=6, sides="both" if flip else sides, filtered=True), [graph], sampling, seed)
    facts = set(map(tuple, graph.train.triples.tolist()))
    half = len(graph.relations)
    for step in one_epoch(examples):
        chunk = step.chunk
        for h, r, t, head, row in zip(chunk.head.tolist(), chunk.relation.tolist(), chunk.tail.tolist(),
                                      chunk.asks_head.tolist(), chunk.negatives.tolist(), strict=True):  # fmt: skip
            for n in row:
                made = (n, r, t) if head else (h, r, n)
                if r >= half:
                    made = (made[2], r - half, made[0])
                assert n == -1 or made not in facts
            answers = {f[0] if head else f[2] for f in facts if f[1] == r and (f[2] == t if head else f[0] == h)}
            if r < half:
                assert (set(row) == {-1}) == (len(answers) == len(graph.entities))


@given(seed=st.integers(0, 10**6), count=st.integers(1, 30))
def test_a_pool_is_distinct_and_of_the_right_size(seed, count):
    graphs = [small_graph(seed, 3, 1, 6), small_graph(seed + 1, 25, 2, 60)]
    examples = asked_for(Pool(count=count), graphs, seed=seed)
    pool_ = one_epoch(examples)[0].chunk.pool
    for party, graph in enumerate(graphs):
        there = pool_[party][pool_[party] >= 0].tolist()
        assert len(there) == len(set(there)) == min(count, len(graph.entities))
        start = examples.layout.entity_start
        assert all(start[party] <= n < start[party + 1] for n in there)
    alone = asked_for(Pool(count=count), graphs[:1], seed=seed)
    assert one_epoch(alone)[0].chunk.pool[0].tolist() == [n for n in pool_[0].tolist() if n >= 0]


@pytest.mark.slow
def test_pools_are_uniform_over_all_pools():
    """Every pair of 5 entities about as often as every other: chi-square of 4,000 ordered pairs."""
    graph = Graph.from_triples([(f"e{i}", "r", f"e{(i + 1) % 5}") for i in range(5)])
    examples = asked_for(Pool(count=2), [graph], Sampling(batch=5))
    counts = np.zeros((5, 5))
    for step in range(4_000):
        one, two = one_epoch(examples, steps=torch.tensor([step]))[0].chunk.pool[0].tolist()
        counts[one, two] += 1
    assert np.trace(counts) == 0
    seen = counts[~np.eye(5, dtype=bool)]
    assert ((seen - 200) ** 2 / 200).sum() < 50  # 19 degrees of freedom: beyond 50 once in 7,000 times


def test_public_pairs_and_random_triples_stay_within_the_party():
    graphs = [small_graph(5), small_graph(6, 12, 3, 40)]
    pairs = [np.array([[0, 0], [2, 1]]), np.array([[3, 2]])]
    public = asked_for(PublicPairs(count=4), graphs, pairs=pairs)
    random = asked_for(RandomTriples(count=4), graphs)
    for examples in (public, random):
        chunk = one_epoch(examples)[0].chunk
        layout, party = examples.layout, chunk.party.numpy()[:, None]
        h, r, t = chunk.triples.numpy().transpose(2, 0, 1)
        for ids, start in ((h, layout.entity_start), (r, layout.relation_start), (t, layout.entity_start)):
            assert ((ids >= np.array(start)[party]) & (ids < np.array(start)[party + 1])).all()
        if examples is public:
            mine = {
                (int(a), int(b)) for a, b in zip(h[party[:, 0] == 0].ravel(), r[party[:, 0] == 0].ravel(), strict=True)
            }
            assert mine <= {(0, 0), (2, 1)}
    with pytest.raises(BadValue, match="public"):
        one_epoch(asked_for(PublicPairs(count=4), graphs))


def test_scope_says_which_entities_negatives_come_from():
    graph = small_graph(5)
    layout = Layout((50,), (len(graph.relations),))
    own = [np.arange(len(graph.entities))]
    for scope, most in (("own", len(graph.entities)), ("vocabulary", 50)):
        made = Examples([graph], layout, Sampling(batch=25), Independent(count=64, scope=scope), seed=1, own=own)
        assert one_epoch(made)[0].chunk.negatives.max() < most
        assert one_epoch(made)[0].chunk.negatives.max() >= 0.8 * most


def test_k_vs_all_sees_every_query_with_all_its_answers():
    graph = small_graph(8, 6, 2, 40)
    for flip in (False, True):
        examples = asked_for(Everyone(sides="both"), [graph], Sampling(batch=5, reciprocal=flip), queries=True)
        seen = {}
        for step in one_epoch(examples):
            chunk = step.chunk
            offsets, answers = chunk.answers
            for i in range(len(chunk)):
                head = bool(chunk.asks_head[i])
                key = (head, int(chunk.tail[i] if head else chunk.head[i]), int(chunk.relation[i]))
                assert key not in seen
                seen[key] = sorted(answers[offsets[i] : offsets[i + 1]].tolist())
                assert int(chunk.head[i] if head else chunk.tail[i]) in seen[key]
        expected = {}
        half = len(graph.relations)
        for h, r, t in graph.train.triples.tolist():
            expected.setdefault((False, h, r), []).append(t)
            expected.setdefault((False, t, r + half) if flip else (True, t, r), []).append(h)
        assert seen == {key: sorted(value) for key, value in expected.items()}


def test_subsampling_weights_are_those_of_the_rotate_authors():
    graph = small_graph(9, 5, 2, 30)
    examples = asked_for(Independent(count=1), [graph], Sampling(batch=4, subsampling=True))
    triples = graph.train.triples.tolist()
    expected = []
    for h, r, t in triples:
        count = sum(a == h and b == r for a, b, _ in triples) + sum(b == r and c == t for _, b, c in triples)
        expected.append((count + 6) ** -0.5)
    mean = sum(expected) / len(expected)
    assert examples.weights.tolist() == pytest.approx([weight / mean for weight in expected], rel=1e-6)
    step = one_epoch(examples)[0]
    assert step.divisor.tolist() == [4]


def test_dropout_sets_a_share_to_zero_and_makes_up_for_it():
    graph = small_graph(9, 30, 2, 400)
    examples = asked_for(Independent(count=1), [graph], Sampling(batch=400, dropout=0.25))
    [step] = one_epoch(examples)
    factors = torch.cat([step.chunk.drop_entity, step.chunk.drop_relation], 1)
    assert factors.shape == (len(graph.train), 7)
    assert factors.unique().tolist() == [0.0, pytest.approx(4 / 3)]
    assert 0.2 < (factors == 0).float().mean() < 0.3


@pytest.mark.parametrize("loss", sorted(LOSSES))
@pytest.mark.parametrize("kind", sorted(NEGATIVES))
def test_every_loss_with_every_kind_of_negatives_learns_or_is_refused(loss, kind):
    needs = LOSSES[loss].needs
    values = {"loss": {"name": loss}, "negatives": {"name": kind, "count": 8, "sides": "both"},
              "scorer": {"name": "distmult", "dim": 8}, "optimizer": {"learning_rate": 0.05},
              "training": {"epochs": 6, "batch": 128}}  # fmt: skip
    if (needs or "other") != ("all" if kind == "all" else "other"):
        with pytest.raises(BadInput, match="all"):
            Settings.make(values)
        return
    wanted = Settings.make(values)
    pairs = [np.array([[0, 0], [1, 1]])] if kind == "public-pairs" else None
    fit = Fit(wanted, [SMALL[0]], pairs=pairs)
    losses = [fit.epoch().loss[0] for _ in range(6)]
    assert losses[-1] < losses[0]


# -- what may be used under privacy ------------------------------------------------------------------------------------


def test_everything_says_whether_privacy_allows_it():
    public = {"negatives": {"scope": "vocabulary"}}
    assert Settings.make(public).refusals() == []
    refused = {
        "own entities": {"negatives": {"scope": "own"}},
        "k-vs-all": {"loss": {"name": "k-vs-all"}, "negatives": {"name": "all"}},
        "other triples": {"negatives": {"filtered": True}},
        "bernoulli": {"negatives": {"sides": "bernoulli"}},
        "weights": {"training": {"subsampling": True}},
        "rows": {"optimizer": {"name": "sparse-adam"}},
        "statistics": {"scorer": {"name": "transm"}},
    }
    for word, values in refused.items():
        [reason] = Settings.make(combine(public, values)).refusals()
        assert word in reason
    allowed = {
        "regulariser": {"name": "n3", "weight": 0.1},
        "training": {"dropout": 0.1, "reciprocal": True},
        "negatives": {"name": "pool", "sides": "both", "scope": "vocabulary"},
    }
    assert Settings.make(allowed).refusals() == []


# -- runs --------------------------------------------------------------------------------------------------------------


def test_a_run_in_memory_is_the_run_in_a_folder(tmp_path):
    kept = train(SMALL[0], settings=quick(), out=tmp_path / "run")
    passed = train(SMALL[0], settings=quick())
    assert kept.metrics == passed.metrics
    opened = Run.open(tmp_path / "run")
    assert opened.metrics == kept.metrics
    assert opened.graph == SMALL[0]
    assert opened.settings == quick()
    assert opened.evaluate("test") == kept.metrics["test"]
    events = list(opened.events())
    assert [event["epoch"] for event in events if event["event"] == "epoch"] == [1, 2, 3]
    assert (tmp_path / "run" / PRIVATE).stat().st_mode & 0o777 == 0o700
    privacy = json.loads((tmp_path / "run" / "shareable" / "privacy.json").read_text())
    assert privacy["epsilon"] is None
    assert privacy["guarantee"] == "none"
    with pytest.raises(TacitError, match="finished already"):
        opened.train()


KILLED = """
import os, signal, sys
from pathlib import Path
import tacit.tensors
from tacit.run import Run
left = [int(sys.argv[2])]

def deadly(function):
    def wrapped(*arguments, **named):
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        result = function(*arguments, **named)
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return result
    return wrapped

class Deadly:
    def __getattr__(self, name):
        found = getattr(os, name)
        return deadly(found) if name in ("fsync", "replace") else found

def opened(path, mode="r", **named):
    file = open(path, mode, **named)
    return file if "b" not in mode or "r" in mode else Slow(file)

class Slow:
    def __init__(self, file): self.file = file
    def __enter__(self): return self
    def __exit__(self, *error): return self.file.__exit__(*error)
    def writelines(self, pieces):
        for piece in pieces:
            self.write(piece)
    def __getattr__(self, name):
        return deadly(getattr(self.file, name)) if name in ("write", "flush") else getattr(self.file, name)

tacit.tensors.os = Deadly()
tacit.tensors.open = opened
Run.open(Path(sys.argv[1])).train()
print("ended by itself, with", left[0], "to go")
"""


@pytest.mark.slow
@pytest.mark.parametrize("stride", [5, pytest.param(1, marks=pytest.mark.full)])
def test_a_run_killed_anywhere_in_a_checkpoint_ends_as_one_that_was_not(tmp_path, stride):
    """SIGKILL before and after every write, flush, fsync and rename that a checkpoint makes; or every fifth."""
    wanted = quick(training={"batch": 256, "epochs": 4}, evaluation={"every": 2})
    whole = train(SMALL[0], settings=wanted, out=tmp_path / "whole")
    expected = (tmp_path / "whole" / PRIVATE / "model.safetensors").read_bytes()
    ended, deaths = False, 0
    folder = tmp_path / "killed"
    create(SMALL[0], wanted, folder)
    point = 0
    while not ended:
        point += stride
        assert point < 400
        done = subprocess.run([sys.executable, "-c", KILLED, folder, str(point)], capture_output=True, text=True,
                              timeout=120, check=False)  # fmt: skip
        ended = done.returncode == 0
        assert ended or done.returncode == -signal.SIGKILL, done.stderr
        deaths += not ended
        for file in (folder / PRIVATE / "checkpoints").glob("epoch-*"):
            load_tensors(file)  # whatever has its name is whole
    assert deaths >= 12 // stride
    assert (folder / PRIVATE / "model.safetensors").read_bytes() == expected
    untimed = [
        [{k: v for k, v in event.items() if k != "seconds"} for event in Run.open(path).events()]
        for path in (folder, tmp_path / "whole")
    ]
    assert untimed[0] == untimed[1]
    assert Run.open(folder).metrics == whole.metrics


@pytest.mark.slow
@pytest.mark.parametrize("scorer", ["tucker", "rotate"])
def test_a_run_killed_by_the_clock_ends_as_one_that_was_not(tmp_path, scorer):
    wanted = quick(scorer={"name": scorer, "dim": 8}, training={"batch": 64, "epochs": 30, "dropout": 0.1},
                   evaluation={"every": 5, "patience": 50}, negatives={"sides": "both", "filtered": True})  # fmt: skip
    whole = train(SMALL[0], settings=wanted, out=tmp_path / "whole")
    create(SMALL[0], wanted, tmp_path / "killed")
    code = "import sys; from tacit.run import Run; Run.open(sys.argv[1]).train(lambda e: print(e['epoch'], flush=True))"
    for lines in (7, 9, 12):
        with subprocess.Popen([sys.executable, "-c", code, tmp_path / "killed"], stdout=subprocess.PIPE) as process:
            for _ in range(lines):
                process.stdout.readline()
            process.kill()
    resumed = Run.open(tmp_path / "killed").train()
    ours, theirs = ((tmp_path / name / PRIVATE / "model.safetensors").read_bytes() for name in ("killed", "whole"))
    assert ours == theirs
    assert resumed.metrics == whole.metrics


def test_a_full_disk_keeps_the_old_checkpoint(tmp_path, monkeypatch):
    run = create(SMALL[0], quick(training={"batch": 64, "epochs": 6}), tmp_path / "run")
    real, calls = os.fsync, [0]

    def full(descriptor):
        calls[0] += 1
        if calls[0] > 3:  # the journal, the first checkpoint, its folder; then no space is left
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor)

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        run.train()
    monkeypatch.undo()
    [kept] = (tmp_path / "run" / PRIVATE / "checkpoints").iterdir()
    assert kept.name == "epoch-00000002.safetensors"
    resumed = Run.open(tmp_path / "run").train()
    assert resumed.metrics == train(SMALL[0], settings=run.settings).metrics


def test_a_full_disk_for_real(tmp_path):
    """A file system with room for one checkpoint and a half; needs the right to mount one."""
    wanted = quick(scorer={"name": "transe", "dim": 64}, training={"batch": 64, "epochs": 6})
    room = 200_000 + int(1.5 * sum(tensor.nbytes for tensor in Fit(wanted, [SMALL[0]]).state().values()))
    target = tmp_path / "small"
    target.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={room}", "tmpfs", target]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("no right to mount a file system here")
    try:
        run = create(SMALL[0], wanted, target / "run")
        with pytest.raises(OSError, match="No space"):
            run.train()
        kept = sorted((target / "run" / PRIVATE / "checkpoints").iterdir())
        assert [path.name for path in kept] == [f"epoch-{2 * i:08d}.safetensors" for i in range(1, len(kept) + 1)] != []
        for path in kept:
            load_tensors(path)
    finally:
        subprocess.run(["umount", target], check=True)


@pytest.mark.parametrize("fused", [False, True])
def test_a_loss_that_is_not_a_number_stops_with_the_step_and_keeps_the_last_checkpoint(tmp_path, monkeypatch, fused):
    wanted = quick(training={"batch": 64, "epochs": 9}, evaluation={"every": 2})
    run = create(SMALL[0], wanted, tmp_path / "run")
    steps = Fit(wanted, [SMALL[0]]).examples.steps_per_epoch()[0]
    accumulate, calls = Reference.accumulate, [0]

    def poisoned(self, *arguments):
        calls[0] += 1
        loss, norms = accumulate(self, *arguments)
        return (loss * float("nan") if calls[0] == 5 * steps + 2 else loss), norms

    def poisoned_epoch(self, *arguments):
        calls[0] += 1
        sums, *rest = run_epoch(self, *arguments)
        sums[1] *= float("nan") if calls[0] == 6 else 1.0
        return sums, *rest

    if fused:
        pytest.importorskip("numba")
        run_epoch = Epochs.run
        monkeypatch.setattr(Epochs, "run", poisoned_epoch)
    else:
        monkeypatch.setattr("tacit.training.kernel_for", lambda name, device: Reference)
        monkeypatch.setattr(Reference, "accumulate", poisoned)
    with pytest.raises(Diverged, match="learning rate") as caught:
        run.train()
    assert caught.value.step == 5 * steps + 2
    assert caught.value.epoch == 6
    names = sorted(path.name for path in (tmp_path / "run" / PRIVATE / "checkpoints").iterdir())
    assert names[-1] == "epoch-00000004.safetensors"


def test_a_learning_rate_that_is_too_high_is_found_out(tmp_path):
    wanted = quick(scorer={"name": "rescal", "dim": 8}, optimizer={"name": "sgd", "learning_rate": 1e6},
                   training={"batch": 64, "epochs": 9})  # fmt: skip
    with pytest.raises(Diverged, match="try 100000"):
        train(SMALL[0], settings=wanted)


def test_two_processes_do_not_train_one_run(tmp_path):
    run = create(SMALL[0], quick(), tmp_path / "run")
    seen = []

    def second(event):
        if not seen:
            seen.append(event)
            with pytest.raises(TacitError, match="another process"):
                Run.open(tmp_path / "run").train()

    run.train(second)
    assert seen


def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(tmp_path):
    wanted = quick(training={"batch": 64, "epochs": 6}, evaluation={"every": 2})
    whole = create(SMALL[0], wanted, tmp_path / "run").train()
    private = tmp_path / "run" / PRIVATE
    expected = (private / "model.safetensors").read_bytes()
    (private / "model.safetensors").unlink()
    last = max((private / "checkpoints").iterdir())
    last.write_bytes(last.read_bytes()[:500])
    assert Run.open(tmp_path / "run").train().metrics == whole.metrics
    assert (private / "model.safetensors").read_bytes() == expected
    events = [event["epoch"] for event in Run.open(tmp_path / "run").events() if event["event"] == "epoch"]
    assert events == [1, 2, 3, 4, 5, 6]


def test_what_was_made_elsewhere_is_no_part_of_a_run(tmp_path):
    """Another graph of the same size, another model, damaged metrics: each is one message."""
    mine, other = (
        create(graph, quick(), tmp_path / name).train() for graph, name in ((SMALL[0], "a"), (SMALL[1], "b"))
    )
    model = mine.path / PRIVATE / "model.safetensors"
    kept = model.read_bytes()
    model.write_bytes((other.path / PRIVATE / "model.safetensors").read_bytes())
    with pytest.raises(BadInput, match="another graph"):
        Run.open(mine.path).evaluate()
    model.write_bytes(kept)
    graph = mine.path / PRIVATE / "graph.safetensors"
    graph.write_bytes((other.path / PRIVATE / "graph.safetensors").read_bytes())
    model.unlink()
    with pytest.raises(BadInput, match="another graph"):
        Run.open(mine.path).train()
    (other.path / PRIVATE / "metrics.json").write_text(
        '{"schema": "tacit.metrics/1", "best_epoch": 1, "metrics": {"x": {}}}'
    )
    with pytest.raises(BadInput, match="damaged"):
        Run.open(other.path)


def test_a_run_in_training_is_not_replaced_and_a_replaced_one_ends(tmp_path):
    run = create(SMALL[0], quick(), tmp_path / "run")
    tried = []

    def meanwhile(event):
        if not tried:
            tried.append(event)
            with pytest.raises(TacitError, match="another process"):
                create(SMALL[0], quick(), tmp_path / "run", force=True)
            (tmp_path / "run").rename(tmp_path / "moved")  # as if by hand
            create(SMALL[0], quick(), tmp_path / "run")

    with pytest.raises(TacitError, match="replaced"):
        run.train(meanwhile)
    assert list((tmp_path / "run" / PRIVATE / "checkpoints").iterdir()) == []


def test_what_is_private_is_readable_by_its_owner_alone(tmp_path):
    from tacit.run import write_plan

    create(SMALL[0], quick(), tmp_path / "run").train()
    write_plan(SMALL[0], quick(), tmp_path / "plan")
    private = tmp_path / "run" / PRIVATE
    for path in (private, private / "checkpoints", tmp_path / "plan"):
        assert path.stat().st_mode & 0o777 == 0o700
    for path in [*private.rglob("*.safetensors"), tmp_path / "plan" / "graph.safetensors"]:
        assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("limits", [{"steps": 30}, {"epochs": 7}])
def test_a_party_that_ends_early_is_validated_when_it_ends(limits):
    graphs = [small_graph(1, 9, 2, 60), small_graph(2, 30, 3, 400), Graph.from_triples(small_graph(3).named("train"))]
    wanted = quick(training={"batch": 16, "epochs": 500} | limits, evaluation={"every": 5, "patience": 1},
                   optimizer={"learning_rate": 0.05})  # fmt: skip
    together = Fit(wanted, graphs)
    together.run(lambda event: None)
    for party, graph in enumerate(graphs):
        alone = Fit(wanted, [graph], numbers=[party])
        alone.run(lambda event: None)
        assert together.best_epoch[party] == alone.best_epoch[0] > 0
        ours, theirs = together.best.party(together.layout, party).tensors(), alone.best.tensors()
        assert all(torch.allclose(ours[name], theirs[name], atol=1e-5) for name in ours)


def test_a_batch_may_be_larger_than_anything():
    fit = Fit(quick(training={"batch": 10**9, "epochs": 2}), SMALL.graphs)
    assert fit.epoch().steps == 1


def test_a_checkpoint_of_other_settings_is_refused(tmp_path):
    create(SMALL[0], quick(), tmp_path / "run").train()
    (tmp_path / "run" / PRIVATE / "model.safetensors").unlink()
    config = json.loads((tmp_path / "run" / CONFIG).read_text())
    config["settings"]["seed"] = 5
    (tmp_path / "run" / CONFIG).write_text(json.dumps(config))
    with pytest.raises(BadInput, match="other settings"):
        Run.open(tmp_path / "run").train()


@pytest.mark.slow
def test_a_plan_trains_elsewhere_with_torch_and_numpy_alone(tmp_path):
    from tacit.run import write_plan

    write_plan(SMALL[0], quick(), tmp_path / "plan")
    blocked = ["pyarrow", "pyoxigraph", "duckdb", "typer", "rich", "backports", "pandas", "safetensors", "pydantic"]
    code = f"import sys, runpy\nfor name in {blocked}: sys.modules[name] = None\n"
    code += "sys.argv = ['tacit.run', sys.argv[1]]\nrunpy.run_module('tacit.run', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "plan" / "plan.json"], capture_output=True, text=True,
                          timeout=120, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    here = train(SMALL[0], settings=quick())
    assert json.loads(done.stdout)["test"] == here.metrics["test"].json()
    assert Run.open(tmp_path / "plan" / "run").metrics == here.metrics


def test_unseen_entities_are_ranked_like_any_other():
    graph = Graph.from_triples([("a", "r", "b"), ("b", "r", "c")], test=[("new", "r", "a")])
    assert train(graph, settings=quick()).metrics["test"].count == 2


# -- settings ----------------------------------------------------------------------------------------------------------


def test_settings_survive_json_and_toml():
    for section in SECTIONS:
        assert (section in quick().json()) == (section != "privacy")
    wanted = Settings.make(
        {"scorer": {"name": "rotate", "dim": 3, "gamma": 2}, "loss": {"name": "margin", "margin": 2},
         "privacy": {"name": "dpsgd", "epsilon": 2}}
    )  # fmt: skip
    assert Settings.make(json.loads(json.dumps(wanted.json()))) == wanted
    assert wanted.scorer.gamma == 2.0
    assert set(FLAGS.values()) <= {"name", "seed"} | {f"{s}.{k}" for s in SECTIONS for k in wanted.json()[s]}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"scorer": {"nam": "transe"}}, "Did you mean 'scorer.name'"),
        ({"scorer": {"name": "transee"}}, "Did you mean 'transe'"),
        ({"scorer": {"name": "rotate", "norm": 2}}, "no setting 'scorer.norm'"),
        ({"trainig": {}}, "Did you mean 'training'"),
        ({"training": 5}, "expected a section"),
        ({"training": {"batch": 0}}, "training: batch is at least 1"),
        ({"training": {"batch": 1.5}}, "a whole number"),
        ({"training": {"batch": True}}, "a whole number"),
        ({"training": {"reciprocal": 1}}, "true or false"),
        ({"training": {"reciprocal": True}}, "both sides"),
        ({"optimizer": {"learning_rate": float("nan")}}, "that can be"),
        ({"optimizer": {"learning_rate": float("inf")}}, "that can be"),
        ({"optimizer": {"learning_rate": -1}}, "above 0"),
        ({"optimizer": {"eps": -1.0}}, "at least 0"),
        ({"training": {"steps": 10**30}}, "that can be"),
        ({"scorer": {"name": []}}, "there is no scorer"),
        ({"name": "../x"}, "letters, digits"),
        ({"name": ""}, "letters, digits"),
        ({"loss": {"name": "k-vs-all"}, "negatives": {"name": "all", "sides": "random"}}, "k-vs-all asks"),
        ({"evaluation": {"ties": "best"}}, "one of 'realistic'"),
        ({"scorer": {"norm": 3}}, "one of 1, 2"),
        ({"scorer": {"dim": 0}}, "dim is at least 1"),
        ({"seed": -1}, "seed"),
        ({"loss": {"name": "one-vs-all"}}, 'negatives.name = "all"'),
        ({"negatives": {"name": "all"}}, "one-vs-all"),
        ({"negatives": {"sides": "left"}}, "one of 'tails'"),
    ],
)
def test_wrong_settings_say_what_is_wrong(values, message):
    with pytest.raises(BadInput, match=message):
        Settings.make(values)


def test_later_layers_win_and_dots_are_levels():
    made = combine({"scorer": {"name": "rotate", "dim": 8}}, {"scorer.dim": 9}, parse_assignment("scorer.gamma=3"))
    assert made == {"scorer": {"name": "rotate", "dim": 9, "gamma": 3}}
    assert parse_assignment("loss.name=margin") == {"loss": {"name": "margin"}}
    with pytest.raises(TacitError, match="key=value"):
        parse_assignment("scorer.dim")
    with pytest.raises(BadInput, match="no keys of its own"):
        combine({"seed": 1}, {"seed.x": 2})


def test_train_takes_the_common_settings_by_their_short_names():
    run = train(SMALL[0], scorer="distmult", dim=4, epochs=1, negatives=2, settings={"scorer": {"name": "rotate"}})
    assert type(run.settings.scorer).__name__ == "DistMult"
    with pytest.raises(BadInput, match="Did you mean 'epochs'"):
        train(SMALL[0], epoch=3)


def test_asking_for_a_gpu_that_is_not_there_is_an_error(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(TacitError, match="no GPU"):
        train(SMALL[0], device="cuda", epochs=1)
    with pytest.raises(TacitError, match="or auto, not"):
        train(SMALL[0], device="tpu", epochs=1)


# -- files of tensors --------------------------------------------------------------------------------------------------


def test_tensor_files_are_safetensors(tmp_path):
    official = pytest.importorskip("safetensors.torch", reason="the safetensors package is not installed")
    tensors = {"b": torch.ones(3, 4), "a": torch.arange(5), "empty": torch.zeros(0, 2)}
    tensors |= {"one": torch.tensor(2.5).double(), "flag": torch.tensor([True, False])}
    save_tensors(tmp_path / "ours", tensors, {"note": "né"})
    theirs = official.load_file(tmp_path / "ours")
    official.save_file(tensors, tmp_path / "theirs", {"note": "né"})
    for found in (theirs, load_tensors(tmp_path / "theirs")[0], load_tensors(tmp_path / "ours")[0]):
        assert found.keys() == tensors.keys()
        assert all(
            torch.equal(found[name], tensors[name]) and found[name].dtype == tensors[name].dtype for name in found
        )
    assert load_tensors(tmp_path / "theirs")[1] == {"note": "né"}


@given(data=st.binary(max_size=200), cut=st.integers(0, 400), at=st.integers(0, 400), byte=st.integers(0, 255))
@settings(max_examples=200)
def test_damaged_tensor_files_are_refused_and_nothing_else(tmp_path_factory, data, cut, at, byte):
    folder = tmp_path_factory.mktemp("damaged")
    save_tensors(folder / "whole", {"x": torch.arange(6).reshape(2, 3), "y": torch.ones(2)}, {"k": "v"})
    whole = bytearray((folder / "whole").read_bytes())
    changed = bytearray(whole)
    changed[at % len(changed)] = byte
    for damaged in (data, bytes(whole[: cut % len(whole)]), bytes(changed), bytes(whole) + data[:3] + b"x"):
        (folder / "damaged").write_bytes(damaged)
        if len(damaged) != len(whole):
            with pytest.raises(BadInput, match="safetensors"):
                load_tensors(folder / "damaged")
            continue
        with contextlib.suppress(BadInput):  # one other byte may still be a file
            assert all(tensor.numel() < 100 for tensor in load_tensors(folder / "damaged")[0].values())


def test_graphs_survive_tensor_files_and_damage_is_noticed(tmp_path):
    marked = tacit.mark(SMALL[0], np.arange(len(SMALL[0].statements)) % 3 == 0)
    for graph in (SMALL[0], marked, pool(SMALL), Graph.from_triples([("a", "r", "b")])):
        save_graph(tmp_path / "graph", graph)
        assert load_graph(tmp_path / "graph") == graph
        assert load_graph(tmp_path / "graph").prefixes == graph.prefixes
    data = bytearray((tmp_path / "graph").read_bytes())
    data[-1] ^= 1
    (tmp_path / "graph").write_bytes(data)
    with pytest.raises(BadInput):
        load_graph(tmp_path / "graph")
    save_tensors(tmp_path / "other", {"x": torch.ones(1)})
    with pytest.raises(BadInput, match="schema"):
        load_graph(tmp_path / "other")


# -- quality -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_engine_learns_far_more_than_popularity():
    """The embedded federation pooled, the settings that the README shows."""
    from tacit.models.model import Model
    from tacit.training import evaluated

    graph = pool(clinic("demo"))
    run = train(graph, dim=32, batch=256, negatives=32, learning_rate=0.01, epochs=60)
    popular = evaluated(Model.popular(graph), graph, "test", run.settings)
    assert run.metrics["test"].mrr > 4 * popular.mrr
    assert run.metrics["test"].mrr > 0.2


def test_relation_weights_reach_the_table_and_stay():
    graph = small_graph(4)
    wanted = quick(scorer={"name": "transm", "dim": 4})
    fit = Fit(wanted, [graph])
    fit.epoch()
    assert torch.equal(fit.cohort.tables.relation[:, -1], relation_weights(graph))


def test_every_registry_entry_says_what_it_is():
    for registry in (SCORERS, LOSSES, NEGATIVES, OPTIMIZERS):
        for kind in registry.values():
            assert kind.__doc__
            assert not kind.__doc__.startswith(f"{kind.__name__}(")


def test_line_order_changes_no_bit(tmp_path):
    rows = ["\t".join(triple) for triple in SMALL[0].named("train")]
    models = []
    for order in (rows, rows[::-1]):
        (tmp_path / "g.tsv").write_text("\n".join(order))
        models.append(train(tacit.read_graph(tmp_path / "g.tsv"), settings=quick()).model.tables.tensors())
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])


def test_one_party_of_a_partition_trains_the_same_alone():
    parties = partition(pool(SMALL), "relations", 3, seed=1)
    fit = Fit(quick(), parties.graphs)
    fit.epoch()
    alone = Fit(quick(), parties.graphs[2:], numbers=[2])
    alone.epoch()
    ours = fit.cohort.tables.party(fit.layout, 2).tensors()
    assert all(torch.allclose(ours[name], tensor, atol=1e-6) for name, tensor in alone.cohort.tables.tensors().items())


def test_a_journal_is_cut_before_whoever_goes_on_reads_it(tmp_path):
    """Killed between a journal and its checkpoint: what the journal has beyond that is done again, and is not read."""
    journal = tmp_path / "journal"
    (tmp_path / PRIVATE).mkdir()

    class Reader:
        read = b""

        def state(self):
            return {"number": torch.zeros(1)}

        def load(self, state):
            self.read = journal.read_bytes()

    kept = Kept(tmp_path, lambda schema: {"schema": schema}, {"journal": journal})
    with kept.training(Reader()) as (files, checkpoint):
        files["journal"].write(b"one\n")
        checkpoint(1)
        files["journal"].write(b"two\n")
    again = Reader()
    with kept.training(again) as (files, _):
        files["journal"].write(b"three\n")
    assert again.read == b"one\n"
    assert journal.read_bytes() == b"one\nthree\n"
