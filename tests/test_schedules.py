"""Noise that follows a signal: what the signals see, the cap that is never exceeded, interruptions, what is refused."""

from __future__ import annotations

import json
import os
import signal as signals
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tacit.folders
import tacit.privacy.steps
from tacit.clinic import clinic
from tacit.draws import Secret
from tacit.errors import BadInput, BadValue, TacitError
from tacit.evaluation.ranking import Questions, rank
from tacit.graph import Graph, Split, Vocab
from tacit.models import SCORERS, Layout, Tables
from tacit.models.model import Model
from tacit.privacy.accountant import allowed, converted
from tacit.privacy.events import Gaussian, Segment
from tacit.privacy.plan import cap_of, in_words, solved, statement
from tacit.privacy.privatizers import DPSGD, Confidential
from tacit.privacy.schedule import Cap, Ledger, Schedule, cap_for, exact_sum, questions, reciprocal_ranks
from tacit.privacy.steps import public_numbers
from tacit.run import Run, create, main, note, train, write_plan
from tacit.settings import Settings, combine
from tacit.training import Fit

PLAIN = clinic("small")[0]
MARKED = replace(
    PLAIN, **{name: replace(s, confidential=np.arange(len(s)) % 3 == 0) for name, s in PLAIN.splits.items()}
)
GRAPHS = {"public": MARKED, "paid": PLAIN}
BASE = {
    "scorer": {"dim": 4},
    "training": {"batch": 128, "epochs": 8},
    "negatives": {"count": 8},
    "evaluation": {"every": 2},
}


def wanted(follows: str, **changes) -> Settings:
    name = "confidential" if follows == "public" else "dpsgd"
    privacy = {"name": name, "epsilon": 4.0, "noise_follows": follows, "noise_falls": 0.8}
    return Settings.make(combine(BASE, {"privacy": privacy}, changes))


class Killed(BaseException):
    """Not an error: nothing that is caught on the way may go on."""


def cost(order: float, releases) -> float:
    """The divergence of these (rate, sigma) steps, and sigmas that were not sampled, straight from dp-accounting."""
    from dp_accounting import dp_event
    from dp_accounting.rdp import rdp_privacy_accountant

    accountant = rdp_privacy_accountant.RdpAccountant(orders=[order])
    for (rate, sigma), count in Counter(releases).items():
        made = dp_event.GaussianDpEvent(sigma)
        accountant.compose(made if rate == 1 else dp_event.PoissonSampledDpEvent(rate, made), count)
    return float(accountant._rdp[0])


# -- what the signals see ----------------------------------------------------------------------------------------------


@st.composite
def small_graphs(draw):
    """Few names, many triples, some of them confidential, splits that share no triple."""
    entities, relations = draw(st.integers(3, 7)), draw(st.integers(1, 3))
    every = [(h, r, t) for h in range(entities) for r in range(relations) for t in range(entities)]
    chosen = draw(st.lists(st.sampled_from(every), min_size=6, max_size=40, unique=True))
    place = draw(st.lists(st.integers(0, 2), min_size=len(chosen), max_size=len(chosen)))
    marks = draw(st.lists(st.booleans(), min_size=len(chosen), max_size=len(chosen)))
    parts = []
    for which in range(3):
        rows = sorted((triple, mark) for triple, mark, p in zip(chosen, marks, place, strict=True) if p == which)
        triples = np.array([triple for triple, _ in rows], np.int32).reshape(-1, 3)
        parts.append(Split(triples, np.array([mark for _, mark in rows], bool)))
    names = [f"e{i}" for i in range(entities)], [f"r{i}" for i in range(relations)]
    return Graph(Vocab(names[0]), Vocab(names[1]), *parts)


def model_of(graph: Graph, name: str, seed: int) -> Model:
    scorer, layout = SCORERS[name](), Layout((len(graph.entities),), (len(graph.relations),), (0,))
    return Model(scorer, Tables.begin(scorer, 4, layout, seed=seed))


PUBLIC, PAID = (
    Confidential(epsilon=1.0, noise_follows="public", noise_falls=0.5),
    DPSGD(epsilon=1.0, noise_follows="paid", noise_falls=0.5),
)


@settings(max_examples=60)
@given(graph=small_graphs(), name=st.sampled_from(["transe", "distmult", "complex"]), data=st.data())
def test_the_public_signal_does_not_see_protected_triples(graph, name, data):
    """Protected triples of every split are dropped, or others put in their place."""
    kept = {}
    for which, split in graph.splits.items():
        drawn = data.draw(st.lists(st.booleans(), min_size=len(split), max_size=len(split)))
        stays = ~split.confidential | np.array(drawn, bool)
        triples, marks = split.triples[stays].copy(), split.confidential[stays]
        if marks.any():
            triples[marks, 0] = data.draw(st.integers(0, len(graph.entities) - 1))
        kept[which] = Split(triples, marks)
    model, other = model_of(graph, name, 1), replace(graph, **kept)
    here, there = (reciprocal_ranks(model, questions(PUBLIC, g), 64) for g in (graph, other))
    assert here.tobytes() == there.tobytes()


def test_a_signal_filtered_by_all_triples_would_see_them():
    """What the test above would catch."""
    protected, asked = np.array([[0, 0, 1]], np.int32), np.array([[0, 0, 2]], np.int32)
    graph = Graph.from_triples([("a", "r", "b"), ("c", "r", "d")])
    models = [model_of(graph, "distmult", seed) for seed in range(8)]
    assert any(
        reciprocal_ranks(model, Questions(asked, protected), 64) != reciprocal_ranks(model, Questions(asked, ()), 64)
        for model in models
    )


@settings(max_examples=20)
@given(graph=small_graphs(), name=st.sampled_from(["transe", "distmult", "complex"]), data=st.data())
def test_a_triple_moves_the_paid_sum_by_one_at_most(graph, name, data):
    """A validation triple less: its own number goes, and no other changes. A training triple less: nothing does."""
    model = model_of(graph, name, data.draw(st.integers(0, 3)))
    whole = reciprocal_ranks(model, questions(PAID, graph), 64)
    assert ((whole >= 0) & (whole <= 1)).all()
    for row in range(len(graph.valid)):
        less = replace(graph, valid=Split(np.delete(graph.valid.triples, row, axis=0)))
        found = reciprocal_ranks(model, questions(PAID, less), 64)
        assert found.tobytes() == np.delete(whole, row).tobytes()
        assert 0 <= exact_sum(whole) - exact_sum(found) <= 1
    assert exact_sum(whole) == pytest.approx(whole.sum())
    for row in range(min(2, len(graph.train))):
        less = replace(graph, train=Split(np.delete(graph.train.triples, row, axis=0)))
        assert reciprocal_ranks(model, questions(PAID, less), 64).tobytes() == whole.tobytes()
    for place, (h, r, t) in enumerate(graph.valid.triples.tolist()):  # and it is what its name says
        both = []
        for asks_head in (False, True):
            every = torch.arange(len(graph.entities))
            same = torch.full_like(every, t if asks_head else h)
            relation = torch.full_like(every, r)
            scores = model.score(every, relation, same) if asks_head else model.score(same, relation, every)
            true = scores[h if asks_head else t]
            both.append(1 / (1 + int((scores > true).sum()) + (int((scores == true).sum()) - 1) / 2))
        assert whole[place] == pytest.approx(sum(both) / 2)


def test_filtered_ranks_would_move_with_training_triples():
    """Why the paid sum is not filtered: here it would change, by a training triple more."""
    graph = Graph.from_triples([("a", "r", "b")], valid=[("a", "r", "c"), ("a", "r", "d")])
    less = replace(graph, train=Split(graph.train.triples[:0]))
    for seed in range(8):
        model = model_of(graph, "distmult", seed)
        with_it, without = (rank(model, g.valid.triples, g.statements.triples).of() for g in (graph, less))
        if not np.array_equal(with_it, without):
            return
    pytest.fail("no model whose filtered ranks change")


# -- the cap -----------------------------------------------------------------------------------------------------------

RATE, PER_EPOCH = 0.05, 20


def driven(follows: str, ledger: Ledger, values, epochs: int, privatizer) -> list[float]:
    """A training that takes no steps: the noise of each that it would take, with any signal."""
    private = SimpleNamespace(
        privatizer=privatizer, per_epoch=[PER_EPOCH], rates=[RATE], falls=0, mask=None,
        cohort=SimpleNamespace(steps=torch.zeros(1, dtype=torch.int64)), secret=Secret.simulation(0),
        layout=SimpleNamespace(numbers=(0,)),
    )  # fmt: skip
    given = SimpleNamespace(training=SimpleNamespace(steps=None), evaluation=SimpleNamespace(memory_mb=64))
    schedule, taken, left = Schedule(private, GRAPHS[follows], ledger, given), [], iter(values)
    paid_signal = schedule.signal

    def signal(model):
        value = next(left)
        if follows == "public":
            return value
        asked = paid_signal(model)  # charges, as ever
        return None if asked is None else value

    schedule.signal = signal
    model = Fit(Settings.make(BASE), [GRAPHS[follows]], device="cpu").model()
    while len(taken) < epochs * PER_EPOCH and schedule.pays():
        first = int(private.cohort.steps[0])
        for step in range(first, first + PER_EPOCH):
            if not isinstance(privatizer, Confidential) or privatizer.is_private(step):
                taken.append(privatizer.multiplier(step, private.falls))
            else:
                taken.append(0.0)
        private.cohort.steps += PER_EPOCH
        schedule.look(model)
    return taken


@settings(max_examples=25)
@given(
    values=st.lists(st.floats(-100, 100), min_size=12, max_size=12),
    follows=st.sampled_from(["public", "paid"]),
    falls=st.floats(0.3, 0.95), least=st.floats(0.2, 1.0), sigma=st.floats(0.8, 3.0), epsilon=st.floats(1.0, 8.0),
)  # fmt: skip
def test_no_signal_makes_a_training_exceed_its_cap(tmp_path_factory, values, follows, falls, least, sigma, epsilon):
    kind, more = (Confidential, {}) if follows == "public" else (DPSGD, {"signal_sigma": 4.0})
    privatizer = kind(epsilon=epsilon, sigma=sigma, noise_follows=follows, noise_falls=falls, noise_least=least, **more)
    try:
        cap = cap_for(privatizer, RATE)
    except TacitError:
        return  # such an epsilon does not pay for a step
    assert cap.divergence <= allowed(cap.order, epsilon, privatizer.delta)
    path = tmp_path_factory.mktemp("ledger") / "spent.jsonl"
    Ledger.begin(path, cap)
    ledger = Ledger.open(path)
    taken = [noise for noise in driven(follows, ledger, values, 12, privatizer) if noise]
    used = cost(cap.order, [(RATE, noise) for noise in taken])
    assert used <= cap.divergence
    assert converted(cap.order, used, privatizer.delta) <= epsilon
    assert all(noise >= least * sigma for noise in taken)
    again = Ledger.open(path)
    assert again.charges() == ledger.charges()
    assert {s.event.sigma: s.count for s in again.spent()} == pytest.approx(dict(Counter(taken)))
    looked = sum(s.count for s in again.spent(signal=True))
    assert looked / (2 * 4.0**2) * cap.order <= cap.divergence
    assert again.epsilon(privatizer.delta) == ledger.epsilon(privatizer.delta) <= epsilon


@pytest.mark.parametrize("follows", ["public", "paid"])
def test_the_cap_lasts_for_all_epochs_if_nothing_falls_and_not_if_it_does(follows):
    given = solved(wanted(follows, training={"epochs": 12}), [GRAPHS[follows]])
    cap, privatizer = cap_of(given, GRAPHS[follows]), given.privacy
    from tacit.privacy.plan import releases

    [planned] = releases(given, [GRAPHS[follows]])
    [segment] = planned
    used = cost(cap.order, [(segment.event.rate, segment.event.sigma)] * segment.count)
    assert 0.98 * cap.divergence < used <= cap.divergence  # all of it, to a thousandth of noise
    fallen = cost(cap.order, [(segment.event.rate, privatizer.multiplier(0, 1))] * segment.count)
    assert fallen > cap.divergence
    assert privatizer.multiplier(0, 100) == privatizer.sigma * privatizer.noise_least


def test_a_noisy_signal_is_better_by_more_than_its_noise():
    privatizer = DPSGD(epsilon=8.0, sigma=3.0, noise_follows="paid", noise_falls=0.5, noise_least=0.1, signal_sigma=4.0)
    over = 4.0 * 2**0.5
    for values, noise in (
        ([0.0, over + 0.01, 2 * over + 0.02, 0.0], [3.0, 3.0, 3.0, 3.0]),
        ([0.0, over - 0.01, over + 0.01, 0.0], [3.0, 3.0, 1.5, 1.5]),
    ):
        ledger = Ledger(cap_for(privatizer, RATE))
        assert driven("paid", ledger, values, 4, privatizer)[::PER_EPOCH] == noise


def test_looks_that_cannot_be_paid_leave_the_noise_as_it_is():
    privatizer = DPSGD(epsilon=8.0, sigma=3.0, noise_follows="paid", noise_falls=0.5, signal_sigma=2.0)
    ledger = Ledger(cap_for(privatizer, RATE))
    most = int(ledger.cap.divergence / (ledger.cap.order / (2 * 2.0**2)))
    assert most > 1
    taken = driven("paid", ledger, [1e9 * i for i in range(most)] + [-1e9] * 9, most + 9, privatizer)
    assert set(taken) == {3.0}
    assert [s.count for s in ledger.spent(signal=True)] == [most]


# -- trainings ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def noises(monkeypatch):
    """(step, deviation over the clip) of each noisy step that is really taken."""
    found, real = [], tacit.privacy.steps.SecretNoise

    class Watched(real):
        def add(self, gradients, layout, steps, active):
            found.append((int(steps[0]), round(float(self.deviation[0]), 4)))
            super().add(gradients, layout, steps, active)

    monkeypatch.setattr(tacit.privacy.steps, "SecretNoise", Watched)
    return found


def charged(run: Run) -> Counter:
    return Counter({round(s.event.sigma, 4): s.count for s in run.spent if not isinstance(s.event, Gaussian)})


@pytest.mark.parametrize("follows", ["public", "paid"])
def test_a_training_whose_noise_falls(tmp_path, follows, noises, monkeypatch):
    """Signals as they are, but for the first, which nothing is better than."""
    real = Schedule.signal
    monkeypatch.setattr(Schedule, "signal", lambda self, model: real(self, model) + 1e6 * (self.best == -np.inf))
    told = []
    more = {"privacy": {"prior_share": 0.05, "degree_share": 0.05}}
    run = train(GRAPHS[follows], settings=wanted(follows, **more).json(), out=tmp_path / "run", on_event=told.append)
    heard = [event for event in told if event["event"] == "signal"]
    sigma = run.settings.privacy.sigma
    assert [event["noise"] for event in heard[:2]] == pytest.approx([sigma, 0.8 * sigma])
    assert 4 <= run.best_epoch < 8  # it ends earlier for it, with the rows of its last epoch
    assert Counter(noise for _, noise in noises) == charged(run)  # what was charged is what was taken
    assert len(charged(run)) > 1
    assert sum(s.count for s in run.spent if isinstance(s.event, Gaussian)) == 2
    assert 3.99 < run.epsilon <= 4
    claim = json.loads((tmp_path / "run" / "shareable" / "privacy.json").read_text())
    assert claim["epsilon"] == run.epsilon
    assert "cap" in claim["cap"]["why"]
    assert "a cap fixed before training by a filter" in in_words(claim)
    assert len(claim["signal"]) == (follows == "paid")
    assert ("validation" in claim["unit"]) == ("in one of the splits" in claim["neighbours"]) == (follows == "paid")
    assert (tmp_path / "run" / "shareable" / "model.safetensors").is_file()
    opened = Run.open(tmp_path / "run")
    assert (opened.epsilon, opened.spent) == (run.epsilon, run.spent)
    last = Fit(run.settings, [run.graph], device="cpu", ledger=Ledger(Cap(2.0, 1.0)))
    assert not torch.equal(run.model.tables.entity, last.model().tables.entity)


@pytest.mark.parametrize("follows", ["public", "paid"])
def test_a_signal_that_always_improves_is_the_fixed_schedule(follows, monkeypatch):
    ever = iter(range(1, 100))
    monkeypatch.setattr(Schedule, "signal", lambda self, model: 1e6 * next(ever))
    given = wanted(follows, privacy={"noise": "seeded"})
    run = train(GRAPHS[follows], settings=given)
    fixed = {"sigma": run.settings.privacy.sigma, "noise_follows": "steps", "noise_falls": 1.0, "signal_sigma": None}
    other = train(GRAPHS[follows], settings=combine(given.json(), {"privacy": fixed}))
    assert run.spent == other.spent
    assert run.best_epoch == other.best_epoch == 8
    assert torch.equal(run.model.tables.entity, other.model.tables.entity)
    assert run.epsilon is None
    assert run.claim["guarantee"] == "none: a simulation"
    assert 3.99 < run.claim["simulated_epsilon"] <= 4


def test_steps_that_were_not_charged_are_refused():
    given = solved(wanted("paid"), [PLAIN])
    ledger = Ledger(cap_of(given, PLAIN))
    with pytest.raises(TacitError, match="ledger"):
        Fit(given, [PLAIN], device="cpu")
    with pytest.raises(TacitError, match="ledger"):
        statement(given, [()])
    with pytest.raises(TacitError, match="one party"):
        Fit(given, [PLAIN, PLAIN], device="cpu", ledger=ledger)
    fit = Fit(given, [PLAIN], device="cpu", ledger=ledger)
    with pytest.raises(TacitError, match="paid for"):
        fit.epoch()
    assert fit.schedule.pays()
    fit.private.falls += 1
    with pytest.raises(TacitError, match="paid for"):
        fit.epoch()
    fit.private.falls -= 1
    fit.epoch()
    with pytest.raises(TacitError, match="paid for"):
        fit.epoch()


# -- interruptions -----------------------------------------------------------------------------------------------------


def dies_at(monkeypatch, point: int, where: list) -> None:
    """The process ends at the n-th moment: before or after a line is on the disk, or before or after a step."""
    left = [point]

    def moment(name: str) -> None:
        left[0] -= 1
        if left[0] == 0:
            where.append(name)
            raise Killed

    sync, finish = os.fsync, tacit.privacy.steps.PrivateSteps._finish

    def deadly_sync(descriptor):
        moment("before fsync")
        sync(descriptor)
        moment("after fsync")

    def deadly_finish(self, active, rows):
        moment("before a step")
        finish(self, active, rows)
        moment("after a step")

    monkeypatch.setattr(tacit.folders, "os", SimpleNamespace(**{**vars(os), "fsync": deadly_sync}))
    monkeypatch.setattr(tacit.privacy.steps.PrivateSteps, "_finish", deadly_finish)


@pytest.mark.slow
@pytest.mark.parametrize("follows", ["public", "paid"])
def test_what_was_interrupted_anywhere_is_charged_and_stays_below_the_cap(tmp_path, follows, noises):
    """Killed again and again at ever later moments: every step that was taken stands in the ledger, as it was taken."""
    given = wanted(
        follows,
        training={"epochs": 60, "batch": 512, "checkpoint_every": 1},
        privacy={"degree_share": 0.02, "prior_share": 0.02},
    )
    where, point, ended = [], 1, False
    create(GRAPHS[follows], given, tmp_path / "run")
    while not ended:
        run = Run.open(tmp_path / "run")
        with pytest.MonkeyPatch.context() as patched:
            dies_at(patched, point, where)
            try:
                run.train()
                ended = True
            except Killed:
                point += 1 + (len(where) > 16) * (len(where) % 3)
        charges = Counter()
        for charge in Ledger.open(tmp_path / "run" / "private" / "spent.jsonl").charges():
            for segment in charge.releases:
                if charge.what == "steps" and not isinstance(segment.event, Gaussian):
                    charges[round(segment.event.sigma, 4)] += segment.count
        taken = Counter(noise for _, noise in noises)
        assert all(charges[noise] >= many for noise, many in taken.items()), (taken, charges)
        assert run.epsilon <= 4
    assert {"before fsync", "after fsync", "before a step", "after a step"} <= set(where), where
    assert max(Counter(step for step, _ in noises).values()) > 1  # some steps were taken twice, and paid for twice
    ledger = Run.open(tmp_path / "run")._ledger
    [rate] = public_numbers(run.settings.privacy, [run.graph], run.settings.training.batch)[1]
    steps = [(rate, noise) for _, noise in noises]
    assert cost(ledger.cap.order, steps) <= ledger.cap.divergence * 1.001  # noise was rounded above


KILLED = """
import os, signal, sys
from pathlib import Path
import tacit.folders
import tacit.privacy.steps as steps
from tacit.privacy.schedule import Schedule
from tacit.run import Run
left, log = [int(sys.argv[2])], os.open(sys.argv[3], os.O_WRONLY | os.O_APPEND | os.O_CREAT)

def moment():
    left[0] -= 1
    if left[0] == 0:
        os.kill(os.getpid(), signal.SIGKILL)

real_sync, real_finish, real_normal = os.fsync, steps.PrivateSteps._finish, Schedule.signal

def sync(descriptor):
    moment(); real_sync(descriptor); moment()

def finish(self, active, rows):
    moment()
    os.write(log, b"step %a\\n" % round(self.privatizer.multiplier(0, self.falls), 6))
    real_finish(self, active, rows)
    moment()

def asked(self, model):
    found = real_normal(self, model)
    if found is not None:
        os.write(log, b"look\\n")
    moment()
    return found

class Os:
    fsync = staticmethod(sync)
    def __getattr__(self, name): return getattr(os, name)

tacit.folders.os, steps.PrivateSteps._finish, Schedule.signal = Os(), finish, asked
Run.open(Path(sys.argv[1])).train()
"""


@pytest.mark.slow
def test_a_run_that_was_killed_pays_for_every_step_and_look(tmp_path):
    """SIGKILL: nothing is flushed that was not written. What another file heard of is charged."""
    given = wanted("paid", training={"epochs": 9, "batch": 512}, evaluation={"every": 1})
    run = create(PLAIN, given, tmp_path / "run")
    log = tmp_path / "log"
    done, deaths = None, 0
    for point in (2, 9, 14, 21, 10_000):
        done = subprocess.run([sys.executable, "-c", KILLED, run.path, str(point), log], capture_output=True, text=True,
                              timeout=120, check=False)  # fmt: skip
        assert done.returncode in (0, -signals.SIGKILL), done.stderr
        deaths += done.returncode != 0
        heard = Counter(log.read_text().split("\n")[:-1]) if log.exists() else Counter()
        ledger = Ledger.open(run.path / "private" / "spent.jsonl")
        charges = {f"step {round(s.event.sigma, 6)!r}": s.count for s in ledger.spent()}
        charges["look"] = sum(s.count for s in ledger.spent(signal=True))
        assert all(charges.get(what, 0) >= many for what, many in heard.items()), (heard, charges)
        assert ledger.epsilon(1e-5) <= 4
    assert done.returncode == 0
    assert deaths == 4
    assert heard["look"] > 1
    assert Run.open(run.path).epsilon <= 4


@pytest.mark.parametrize("every", [1, 2, 3])
def test_a_simulation_that_was_interrupted_ends_as_one_that_was_not(tmp_path, every):
    given = wanted("paid", privacy={"noise": "seeded", "prior_share": 0.1}, training={"checkpoint_every": every})
    whole = train(PLAIN, settings=given, out=tmp_path / "whole")
    run = create(PLAIN, given, tmp_path / "run")

    def dies(event):
        if event["event"] == "epoch" and event["epoch"] == 5:
            raise Killed

    with pytest.raises(Killed):
        run.train(dies)
    again = Run.open(tmp_path / "run").train()
    assert torch.equal(again.model.tables.entity, whole.model.tables.entity)
    assert again.spent == whole.spent
    assert again.epsilon is None


def test_an_interrupted_training_ends_earlier_and_claims_no_more(tmp_path):
    given = wanted("paid", training={"checkpoint_every": 3})
    run = create(PLAIN, given, tmp_path / "run")
    seen = []

    def dies(event):
        seen.append(event)
        if event["event"] == "epoch" and event["epoch"] in (4, 5):
            raise Killed

    for _ in range(2):
        with pytest.raises(Killed):
            Run.open(tmp_path / "run").train(dies)
    before = sum(s.count for s in Run.open(tmp_path / "run").spent)
    ended = Run.open(tmp_path / "run").train()
    assert ended.best_epoch < 8
    assert sum(s.count for s in ended.spent) >= before
    assert ended.epsilon == run.epsilon <= 4


def test_a_cap_that_is_used_up_ends_where_it_was_saved(tmp_path):
    """The rows of the last checkpoint, also if that lies between two validations."""
    given = wanted("paid", training={"checkpoint_every": 3}, evaluation={"every": 5})
    run = create(PLAIN, given, tmp_path / "run")

    def dies(event):
        if event["event"] == "epoch" and event["epoch"] == 4:
            raise Killed

    with pytest.raises(Killed):
        run.train(dies)
    ledger, n = Run.open(tmp_path / "run")._ledger, 0
    [segment] = ledger.spent()
    while ledger.charge("steps", 0, [Segment(segment.event, 1)]):
        n += 1
    assert n
    ended = Run.open(tmp_path / "run").train()
    assert ended.best_epoch == 3
    from tacit.tensors import load_tensors

    state, _ = load_tensors(tmp_path / "run" / "private" / "checkpoints" / "epoch-00000003.safetensors")
    assert torch.equal(state["tables.entity"], ended.model.tables.entity)
    fresh = create(PLAIN, given, tmp_path / "other")
    while fresh._ledger.charge("steps", 0, [Segment(segment.event, 1)]):
        pass
    with pytest.raises(TacitError, match="nothing is trained yet"):
        Run.open(tmp_path / "other").train()


def test_a_ledger_that_is_damaged_or_lost_claims_nothing(tmp_path):
    run = create(PLAIN, wanted("paid"), tmp_path / "run")
    where = run.path / "private" / "spent.jsonl"
    head = where.read_bytes()
    assert run._ledger.charge("steps", 0, [Segment(Gaussian(50.0))])
    with open(where, "ab") as file:
        file.write(b'{"at": 3')  # cut off: it was never acted on
    assert len(Ledger.open(where).charges()) == 1
    assert Ledger.open(where).charge("steps", 5, [Segment(Gaussian(50.0))])
    assert [charge.at for charge in Ledger.open(where).charges()] == [0, 5]
    for line, reason in (
        (b'{"at": 3}\n', "damaged"),
        (b'{"for": "steps", "at": 3, "releases": [{"event": "x", "count": 1}]}\n', "damaged"),
        (b'{"for": "other", "at": 3, "releases": []}\n', "damaged"),
        (b'{"for": "steps", "at": 3, "releases": [{"event": "gaussian", "sigma": 0.1, "count": 9}]}\n', "more was"),
    ):
        where.write_bytes(head + line)
        with pytest.raises(BadInput, match=reason):
            _ = Run.open(run.path).claim
    for content in (b"", b"{}\n", head.replace(b"divergence", b"other"), head.replace(b'"order": ', b'"order": -')):
        where.write_bytes(content)
        with pytest.raises(BadInput):
            _ = Run.open(run.path).claim
    where.unlink()
    with pytest.raises(BadInput, match="does not say"):
        Run.open(run.path).train()


# -- holdings ----------------------------------------------------------------------------------------------------------


def test_a_holding_pays_the_whole_cap_once(tmp_path, monkeypatch):
    from tacit.privacy.budget import Holding
    from tacit.privacy.budget import cost as costs

    monkeypatch.setenv("TACIT_HOME", str(tmp_path / "home"))
    Holding.begin("clinic", epsilon=4.0, delta=1e-5)
    given = wanted("paid", privacy={"epsilon": 3.0})
    run = create(PLAIN, given, tmp_path / "run", budget="clinic")

    def dies(event):
        if event["event"] == "epoch" and event["epoch"] == 3:
            raise Killed

    with pytest.raises(Killed):
        run.train(dies)
    holding = Holding.load("clinic")
    assert run._ledger.cap.order == holding.order
    used = costs(holding.order, holding.spent)
    assert run._ledger.cap.divergence <= used <= allowed(holding.order, 3.0, 1e-5)
    again = Run.open(tmp_path / "run").train()  # an interruption is paid by the cap, not by the holding
    assert costs(holding.order, Holding.load("clinic").spent) == used
    assert again.epsilon <= 3
    assert again.claim["budget"]["name"] == "clinic"
    with pytest.raises(TacitError, match="too little left"):
        create(PLAIN, wanted("paid", privacy={"epsilon": 3.8}), tmp_path / "two", budget="clinic")
    Holding.load("clinic").reserve([Segment(Gaussian((holding.order / (2 * holding.left()) / (1 - 1e-12)) ** 0.5))],
                                   run="rest")  # fmt: skip
    with pytest.raises(TacitError, match="left"):
        create(PLAIN, given, tmp_path / "three", budget="clinic")


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("privacy", "reason"),
    [
        ({"name": "dpsgd", "noise_follows": "public"}, "tacit data mark"),
        ({"name": "frozen", "noise_follows": "public"}, "confidential"),
        ({"name": "adafest", "noise_follows": "public"}, '"paid" or "steps"'),
        ({"name": "marginals", "noise_follows": "paid"}, "nothing is trained"),
        ({"name": "dpsgd", "noise_follows": "paid", "unit": "group", "group": 3}, "group"),
        ({"name": "dpsgd", "noise_follows": "paid", "noise_falls": 1.0}, "noise_falls"),
        ({"name": "dpsgd", "noise_follows": "paid", "epsilon": None, "sigma": 1.0}, "privacy.epsilon"),
        ({"name": "dpsgd", "noise_follows": "paid", "noise_least": 0.0}, "noise_least"),
        ({"name": "dpsgd", "noise_follows": "paid", "signal_sigma": -1.0}, "signal_sigma"),
        ({"name": "dpsgd", "signal_sigma": 1.0}, "paid"),
        ({"name": "dpsgd", "noise_follows": "loss"}, "expected one of"),
    ],
)
def test_what_has_no_signal_is_refused(privacy, reason):
    with pytest.raises((BadInput, BadValue), match=reason):
        Settings.make(combine(BASE, {"privacy": {"epsilon": 4.0, "noise_falls": 0.5} | privacy}))


def test_a_schedule_that_never_looks_is_refused():
    with pytest.raises(BadInput, match=r"evaluation\.every"):
        wanted("paid", evaluation={"every": 8})


@pytest.mark.parametrize("memory", [True, False])
def test_graphs_without_a_signal_are_refused(tmp_path, memory):
    def trained(graph, follows):
        return train(graph, settings=wanted(follows), out=None if memory else tmp_path / "run")

    secret = replace(MARKED, valid=replace(MARKED.valid, confidential=np.ones(len(MARKED.valid), bool)))
    with pytest.raises(TacitError, match="no validation triple is public"):
        trained(secret, "public")
    none = replace(PLAIN, valid=Split(PLAIN.valid.triples[:0]))
    with pytest.raises(TacitError, match="no validation triples"):
        trained(none, "paid")
    both = np.unique(np.concatenate([PLAIN.valid.triples, PLAIN.train.triples[:1]]), axis=0)
    with pytest.raises(TacitError, match="in training and in validation"):
        trained(replace(PLAIN, valid=Split(both)), "paid")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("recipe", ["local", "private_fede", "dpkge"])
def test_federations_refuse_to_follow_signals(recipe):
    from tacit.federated import federate

    given = combine(wanted("paid").json(), {"federation": {"rounds": 2}})
    with pytest.raises(TacitError, match=r"one party's training.*noise_follows"):
        federate(clinic("small", 3), recipe, settings=given)


def test_without_dp_accounting_a_plan_is_refused_in_words(tmp_path, monkeypatch, capsys):
    from tacit.privacy import accountant

    write_plan(PLAIN, wanted("paid"), tmp_path / "plan")
    monkeypatch.setattr(accountant, "_one_curve", accountant._one_curve.__wrapped__)
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    monkeypatch.setitem(sys.modules, "dp_accounting.rdp", None)
    assert main([str(tmp_path / "plan" / "plan.json")]) == 2
    assert "dp-accounting, which is not installed" in capsys.readouterr().err
    assert not (tmp_path / "plan" / "run").exists()
    monkeypatch.undo()
    assert main([str(tmp_path / "plan" / "plan.json")]) == 0
    run = Run.open(tmp_path / "plan" / "run")
    assert run.epsilon <= 4
    monkeypatch.setattr(accountant, "_one_curve", accountant._one_curve.__wrapped__)
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    monkeypatch.setitem(sys.modules, "dp_accounting.rdp", None)
    assert Run.open(tmp_path / "plan" / "run").epsilon is None
    assert "not installed" in in_words(Run.open(tmp_path / "plan" / "run").claim)


def test_starts_that_were_noted_cost_nothing_where_a_cap_does(tmp_path):
    run = create(PLAIN, wanted("paid"), tmp_path / "run")
    before = run.epsilon
    for _ in range(3):
        note(run.path, "start", 0)
    assert Run.open(run.path).epsilon == before
    assert Run.open(run.path).spent == ()
