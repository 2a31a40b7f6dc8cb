"""Peers: the parts against slow and obviously right versions, the protocol by what is said and kept."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strategies import graphs, plain_triples
from tacit.draws import Purpose, Secret, Stream
from tacit.errors import BadValue, Refused, TacitError
from tacit.federation.messages import Message
from tacit.federation.transcript import Transcript
from tacit.graph import Graph, Split, Vocab
from tacit.parties import Link, partition
from tacit.parties import given as parties_of
from tacit.peers import PPAT, Learner, Pairing, Peer, continued, independent, meet, unified
from tacit.peers import learner as learning
from tacit.peers.alignment import Aligned, by_intersection, by_links, thinned
from tacit.peers.learner import Trained, vector_widths
from tacit.peers.meeting import UNMARKED, statement, united
from tacit.peers.peer import MOST
from tacit.peers.ppat import Critics, Direct, Generator, Voted, batches, csls, divided, nearness, procrustes, scale_of
from tacit.privacy.accountant import epsilon
from tacit.privacy.audit import audit_step
from tacit.privacy.events import Gaussian, Sampled, Segment
from tacit.privacy.pate import GaussianVotes, LaplaceVotes, by_moments, moment
from tacit.settings import Settings
from tacit.training import Diverged


def stream(step=0, seed=3):
    return Stream(seed, Purpose.TEST, 0, step)


# -- votes, and what they cost -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("votes", "expected", "order"), [(29, 2.72921, 9), (928, 19.6765, 2)])
def test_the_published_moments_are_those_of_the_paper(votes, expected, order):
    found, at = by_moments(votes, 0.05, 1e-5)
    assert found == pytest.approx(expected, abs=1e-4)
    assert at == order


@pytest.mark.parametrize(
    ("votes", "sigma", "expected"), [(1000, 20.0, 7.5113), (1000, 40.0, 3.3414), (10_000, 100.0, 4.3772)]
)
def test_sound_votes_cost_what_gaussians_cost(votes, sigma, expected):
    ballot = GaussianVotes(sigma, votes, Secret.simulation(0))
    assert epsilon(ballot.reserved, 1e-5) == pytest.approx(expected, abs=1e-3)
    assert ballot.spent == ()


@given(st.integers(1, 40), st.floats(0.01, 1.0), st.integers(0, 50))
def test_a_moment_is_the_smaller_of_two_bounds(order, gamma, gap):
    q = (2 + gamma * gap) / (4 * math.exp(gamma * gap))
    always = 2 * gamma**2 * order * (order + 1)
    slow = always
    if q < (math.exp(2 * gamma) - 1) / (math.exp(4 * gamma) - 1):
        logs = [
            math.log(1 - q) + order * math.log((1 - q) / (1 - math.exp(2 * gamma) * q)),
            math.log(q) + 2 * gamma * order,
        ]
        slow = min(always, max(0.0, max(logs) + math.log(sum(math.exp(x - max(logs)) for x in logs))))
    assert moment(order, gamma, gap) == pytest.approx(slow, rel=1e-9, abs=1e-12)
    assert moment(order, gamma) == always


@given(st.lists(st.integers(0, 9), min_size=1, max_size=40), st.integers(9, 12))
def test_votes_without_noise_are_the_majority_and_are_counted(ayes, teachers):
    ballot = LaplaceVotes(0.0, stream())
    labels = ballot.labels(torch.tensor(ayes), teachers)
    assert labels.tolist() == [2 * yes > teachers for yes in ayes]
    ballot.labels(torch.tensor(ayes), teachers)
    assert (ballot.votes, ballot.batches) == (2 * len(ayes), 2)


@pytest.mark.parametrize(("ayes", "right"), [(4, 0.550), (3, 0.526)])
def test_laplace_noise_of_scale_20_all_but_drowns_four_teachers(ayes, right):
    votes = LaplaceVotes(20.0, stream())
    labels = torch.cat([votes.labels(torch.full((2_000,), ayes), 4) for _ in range(100)])
    assert float(labels.double().mean()) == pytest.approx(right, abs=0.004)


def test_gaussian_votes_are_noisy_counts_and_end_where_they_were_to():
    ballot = GaussianVotes(5.0, 100_000, Secret.simulation(1))
    labels = ballot.labels(torch.full((99_990,), 30), 50)
    assert float(labels.double().mean()) == pytest.approx(0.8413, abs=0.005)
    assert ballot.spent == (Segment(Gaussian(5.0), 99_990),)
    with pytest.raises(TacitError, match="no votes are left"):
        ballot.labels(torch.full((11,), 30), 50)
    assert ballot.votes == 99_990


def test_the_published_accounting_is_never_called_an_epsilon():
    ballot = LaplaceVotes(0.05, stream())
    for _ in range(29):
        ballot.labels(torch.ones(32), 4)
    said = ballot.accounting(1e-5)
    assert "epsilon" not in said
    assert said["a batch as one vote, the scale for its inverse"] == pytest.approx(2.72921, abs=1e-4)
    assert said["every vote, the scale for its inverse"] == pytest.approx(19.6765, abs=1e-3)
    assert said["every vote, the noise that was drawn"] == pytest.approx(928 * 40)


# -- translation -------------------------------------------------------------------------------------------------------


def slow_csls(x, y, k):
    def cosine(a, b):
        return float(a @ b / (a.norm() * b.norm()))

    def mean_of_nearest(a, others):
        near = sorted((cosine(a, b) for b in others), reverse=True)[:k]
        return sum(near) / len(near)

    return [[2 * cosine(a, b) - mean_of_nearest(a, y) - mean_of_nearest(b, x) for b in y] for a in x]


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 7), st.integers(1, 7), st.integers(1, 4), st.integers(0, 99))
def test_csls_is_its_definition(n, m, k, seed):
    x = torch.from_numpy(stream(0, seed).normal(3 * n)).reshape(n, 3)
    y = torch.from_numpy(stream(1, seed).normal(3 * m)).reshape(m, 3)
    assert csls(x, y, k).tolist() == [pytest.approx(row) for row in slow_csls(x, y, k)]


def lopsided(n, d):
    """Rows whose distribution looks the same under no rotation but one."""
    x = torch.from_numpy(stream(7).normal(n * d)).reshape(n, d).float() * torch.linspace(0.3, 2.0, d)
    return x + 0.8 * (x**2 - 1).clamp(max=4) + 0.3 * torch.arange(d)


def turned(rows, seed):
    q, _ = torch.linalg.qr(torch.from_numpy(stream(8, seed).normal(rows.shape[1] ** 2)).reshape(rows.shape[1], -1))
    return rows @ q.float()


def translated(judge, x, y, wanted, seed):
    """A handshake without messages, the best kept; how far the rows are from where they should be."""
    generator, best = Generator(x, y.shape[1], scale_of(y), wanted, stream(9, seed)), -math.inf
    if torch.det(generator.weight) * torch.det(procrustes(x, y)) < 0:  # no rotation leads from a mirror image
        generator.weight = generator.weight * torch.tensor([-1.0] + [1.0] * (len(generator.weight) - 1))
    order = batches(len(x), wanted.epochs, wanted.batch, seed)
    every = len(order) // wanted.epochs
    for number, which in enumerate(order, 1):
        generator.learn(which, judge.answer(generator.made(which)))
        if number % every == 0 and (near := nearness(generator.translate(x, generator.weight), y)) > best:
            best = near
            generator.keep()
    return float((generator.translate(x) - y).norm() / (y - y.mean(0)).norm())


@pytest.mark.parametrize("kind", ["direct", "voted"])
def test_the_generator_recovers_a_rotation(kind):
    y, found = lopsided(300, 2), []
    for seed in range(3):
        wanted = PPAT(epochs=40)
        judge = Direct(y, wanted, stream(0, seed)) if kind == "direct" else Voted(
            divided(y, 4, stream(1, seed)), LaplaceVotes(0.05, stream(2, seed)), scale_of(y), wanted, stream(0, seed)
        )  # fmt: skip
        found.append(translated(judge, turned(y, seed), y, wanted, seed))
    assert sorted(found)[1] < 0.15  # most of the time: an adversary may find another way to look alike


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 6), st.integers(0, 99))
def test_procrustes_undoes_any_rotation(d, seed):
    y = torch.from_numpy(stream(3, seed).normal(20 * d)).reshape(20, d).float()
    x = turned(y, seed)
    turn = procrustes(x, y)
    assert torch.allclose(x @ turn.T, y, atol=1e-4)
    assert torch.allclose(turn @ turn.T, torch.eye(d), atol=1e-5)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 99))
def test_a_generator_begins_orthogonal_and_never_as_the_identity(own, width, seed):
    rows = torch.from_numpy(stream(4, seed).normal(5 * own)).reshape(5, own).float()
    generator = Generator(rows, width, 1.0, PPAT(), stream(5, seed))
    weight = generator.weight
    assert weight.shape == (width, own)
    product = weight.T @ weight if width >= own else weight @ weight.T
    assert torch.allclose(product, torch.eye(min(width, own)), atol=1e-5)
    if width == own and own > 1:
        assert not torch.allclose(weight, torch.eye(own), atol=1e-2)
    assert generator.refined(rows).shape == ((5, own))


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 99))
def test_a_generator_s_step_is_as_written(own, width, seed):
    """V <- beta V + G^T X; W <- W - rate V; W <- (1 + pull) W - pull W W^T W, as MUSE."""
    ppat, rows = PPAT(), torch.from_numpy(stream(4, seed).normal(5 * own)).reshape(5, own).float()
    gradient = torch.from_numpy(stream(8, seed).normal(5 * width)).reshape(5, width).float()
    generator = Generator(rows, width, 1.0, ppat, stream(5, seed))
    weight, velocity = generator.weight.double(), torch.zeros(width, own, dtype=torch.float64)
    for _ in range(2):
        velocity = ppat.momentum * velocity + gradient.double().T @ (generator.factor * rows.double())
        weight = weight - ppat.learning_rate * velocity
        weight = (1 + ppat.orthogonal) * weight - ppat.orthogonal * weight @ weight.T @ weight
        generator.learn(torch.arange(5), gradient)
    assert torch.allclose(generator.weight.double(), weight, rtol=1e-3, atol=1e-3)


def test_a_generator_stays_near_orthogonal_whatever_it_is_told():
    rows = torch.from_numpy(stream(6).normal(64 * 4)).reshape(64, 4).float()
    generator = Generator(rows, 4, 1.0, PPAT(), stream())
    for which in batches(64, 30, 32, 0):
        generator.learn(
            which, torch.from_numpy(stream(int(which[0])).normal(len(which) * 4)).reshape(-1, 4).float() / 32
        )
    assert torch.linalg.svdvals(generator.weight).tolist() == pytest.approx([1.0] * 4, abs=0.2)
    generator.learn(which, torch.full((len(which), 4), torch.inf))
    assert bool(generator.weight.isfinite().all())


class Fixed:
    """Labels that follow nothing."""

    def __init__(self):
        self.asked = []

    def labels(self, ayes, teachers):
        self.asked.append((ayes.clone(), teachers))
        return torch.arange(len(ayes)) % 2 == 0


def test_nothing_of_the_teachers_reaches_the_generator_but_votes():
    """With the same labels, whatever the teachers learn from, the client is told the same, to the last bit."""
    generated = torch.from_numpy(stream(1).normal(32 * 6)).reshape(32, 6).float()
    said, votes = [], []
    for scale in (1.0, 1e3, math.nan):
        parts = [scale * torch.from_numpy(stream(part + 2).normal(60)).reshape(10, 6).float() for part in range(4)]
        ballot = Fixed()
        judge = Voted(parts, ballot, 1.0, PPAT(hidden=8), stream(3))
        rows = generated.clone().requires_grad_()
        said.append(torch.cat([judge.answer(rows) for _ in range(5)]))
        assert rows.grad is None
        votes.append(torch.cat([ayes for ayes, _ in ballot.asked]))
    assert torch.equal(said[0], said[1])
    assert torch.equal(said[0], said[2])
    assert not torch.equal(votes[0], votes[1])  # the teachers did see something else


def test_what_the_client_is_told_is_the_student_s_gradient():
    generated = torch.from_numpy(stream(1).normal(32 * 6)).reshape(32, 6).float()
    judge = Voted([generated + 1], Fixed(), 2.0, PPAT(hidden=8), stream(3))
    gradient = judge.answer(generated)
    rows = generated.clone().requires_grad_()
    (1 - torch.sigmoid(judge.student(rows / 2.0)[0])).log().mean().backward()
    assert torch.allclose(gradient, rows.grad, atol=1e-7)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 4), st.integers(1, 7), st.integers(1, 9), st.booleans(), st.integers(0, 99))
def test_critics_learn_as_autograd_and_sgd_would(many, width, rows, shown_to_all, seed):
    """Derivatives are written out; the slow way says what they are."""
    critics = Critics(many, width, PPAT(hidden=5), stream(11, seed), "cpu")
    slow = [weight.detach().clone().requires_grad_() for weight in critics.weights]
    optimizer = torch.optim.SGD(slow, lr=0.02, momentum=0.9)

    def logits(x):
        into, bias, out, last = slow
        return (torch.nn.functional.leaky_relu(x @ into + bias, 0.2) @ out + last)[..., 0]

    shape = (rows, width) if shown_to_all else (many, rows, width)
    loss_of = torch.nn.functional.binary_cross_entropy_with_logits
    for step in range(3):
        x = torch.from_numpy(stream(20 + step, seed).normal(math.prod(shape))).reshape(shape).float()
        labels = torch.from_numpy(stream(40 + step, seed).integers(rows, 2)).float()
        said = logits(x)
        optimizer.zero_grad()
        loss_of(said, labels.expand_as(said), reduction="none").mean(-1).sum().backward()
        optimizer.step()
        critics.learn(x, labels)
    for mine, theirs in zip(critics.weights, slow, strict=True):
        assert torch.allclose(mine, theirs, atol=1e-6)
    x = torch.from_numpy(stream(50, seed).normal(rows * width)).reshape(rows, width).float().requires_grad_()
    for label in (0.0, 1.0):
        (expected,) = torch.autograd.grad(loss_of(logits(x)[0], torch.full((rows,), label)), x)
        assert torch.allclose(critics.wanted(x.detach(), label), expected, atol=1e-6)


@given(st.integers(1, 60), st.integers(1, 9))
def test_teachers_share_out_all_rows(count, many):
    parts = divided(torch.arange(count)[:, None], many, stream())
    assert sorted(torch.cat(parts)[:, 0].tolist()) == list(range(count))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


# -- alignment ---------------------------------------------------------------------------------------------------------


@settings(max_examples=10, deadline=None)
@given(st.lists(graphs(plain_triples), min_size=2, max_size=3))
def test_private_alignment_is_the_plain_intersection(found):
    parties, transcript = parties_of({f"p{i}": graph for i, graph in enumerate(found)}), Transcript(lambda record: True)
    private, plain = by_intersection(parties, transcript), by_links(parties)
    for one, other in itertools.permutations(range(len(found)), 2):
        names = set(found[one].entities) & set(found[other].entities)
        here = private[one].get(other, Aligned(np.zeros(0, np.int32), np.zeros(0, np.int32)))
        assert [found[one].entities[i] for i in here.entity] == sorted(names)
        assert [found[one].relations[i] for i in here.relation] == sorted(
            set(found[one].relations) & set(found[other].relations)
        )
        assert (other in private[one]) == (other in plain[one])
    data = b"".join(message.encode() for message in transcript.payloads.values())
    assert not any(f'"{name}"'.encode() in data for graph in found for name in graph.entities)


def test_links_become_pairs_of_one_with_one():
    one, two = (Graph.from_triples([(f"{x}0", "r", f"{x}1"), (f"{x}1", "r", f"{x}2")]) for x in "ab")
    links = [Link("one", "a1", "two", "b2"), Link("one", "a1", "two", "b0"), Link("two", "b0", "one", "a2"),
             Link("one", "r", "two", "r", "relation")]  # fmt: skip
    found = by_links(parties_of({"one": one, "two": two}, links))
    assert (found[0][1].entity.tolist(), found[1][0].entity.tolist()) == ([1], [0])
    assert (found[0][1].relation.tolist(), found[1][0].relation.tolist()) == ([0], [0])


@pytest.mark.parametrize("share", [0.2, 0.6, 1.0])
def test_a_share_of_an_alignment_is_the_same_on_both_sides(share):
    ids = np.arange(50, dtype=np.int32)
    whole = {0: {1: Aligned(ids, ids[:10])}, 1: {0: Aligned(ids + 100, ids[:10] + 7)}}
    some = thinned(whole, share, "both", 4)
    assert len(some[0][1].entity) == round(50 * share)
    assert (some[0][1].entity + 100).tolist() == some[1][0].entity.tolist()
    assert (some[0][1].relation + 7).tolist() == some[1][0].relation.tolist()
    assert len(thinned(whole, share, "relations", 4)[0][1].entity) == 0
    assert len(thinned(whole, share, "entities", 4)[0][1].relation) == 0


# -- meetings ----------------------------------------------------------------------------------------------------------


def ring(size=24, moves=(1, 5, 7)):
    return Graph.from_triples(
        (f"e{i:02d}", f"r{r}", f"e{(i + move) % size:02d}") for r, move in enumerate(moves) for i in range(size)
    )


def wanted(scorer="transe", dim=8, *, epochs=6, seed=0, private=False, **more):
    values = {
        "seed": seed,
        "scorer": {"name": scorer, "dim": dim},
        "loss": {"name": "margin"},
        "negatives": {"count": 1, "sides": "random"},
        "optimizer": {"name": "sgd", "learning_rate": 0.1},
        "training": {"batch": 32, "epochs": epochs, "device": "cpu", "kernel": "reference"},
    }
    if private:
        values["privacy"] = {"name": "dpsgd", "sigma": 2.0} | more
        values["negatives"] = {"name": "pool", "scope": "vocabulary", "count": 4}
    return Settings.make(values)


PARTIES = partition(ring(), "triples", 3, seed=1)
QUICK = PPAT(epochs=2, hidden=8)
PUBLISHED = Pairing(mode="published", ppat=QUICK, retrain=2, trainings=3)
SOUND = Pairing(ppat=QUICK, retrain=2, trainings=3, noise="seeded", look_sigma=3.0)


def everything(record):
    return True


class Watching(Transcript):
    """Looks for raw rows in every message as it is sent: whether one is a row that its sender had until then."""

    def __init__(self, monkeypatch):
        super().__init__(everything)
        self.had, self.raw = {}, []
        finish = Peer.finish

        def noted(peer, trained, now):
            width = peer.learner.widths[0]
            rows = torch.cat([trained.tables.entity[:, :width], trained.tables.relation[:, :width]])
            self.had.setdefault(peer.number, []).append(torch.nn.functional.normalize(rows, dim=-1))
            return finish(peer, trained, now)

        monkeypatch.setattr(Peer, "finish", noted)

    def record(self, message):
        for name in ("values", "entity", "relation"):
            if (sent := message.arrays.get(name)) is not None and len(sent):
                cosine = torch.nn.functional.normalize(sent, dim=-1) @ torch.cat(self.had[message.sender]).T
                if float(cosine.max()) > 0.9999:  # whatever its length
                    self.raw.append(message)
        return super().record(message)


@pytest.mark.parametrize("mode", ["published", "sound"])
def test_no_raw_row_is_sent(monkeypatch, mode):
    transcript = Watching(monkeypatch)
    pairing = replace(PUBLISHED, virtual="neighbours") if mode == "published" else replace(SOUND, virtual="predicted")
    meet(PARTIES, wanted(private=mode == "sound", noise="seeded"), replace(pairing, share=0.5), transcript=transcript)
    messages = list(transcript.payloads.values())
    assert {"generated", "gradient", "translated"} <= {message.kind for message in messages}
    assert any(len(message.arrays["entity"]) for message in messages if message.kind == "translated")
    assert not transcript.raw
    assert not any(name.encode() in message.encode() for message in messages for name in PARTIES[0].entities)


def test_the_search_for_raw_rows_finds_them(monkeypatch):
    transcript = Watching(monkeypatch)
    monkeypatch.setattr(Generator, "made", lambda self, which: self.rows[which])
    meet(PARTIES, wanted(), PUBLISHED, transcript=transcript)
    assert {message.kind for message in transcript.raw} == {"generated"}


def test_the_same_seed_is_the_same_meeting():
    found = []
    for seed in (0, 0, 1):
        transcript = Transcript(everything)
        meeting = meet(PARTIES, wanted(seed=seed), PUBLISHED, transcript=transcript)
        found.append((list(transcript.lines()), [peer.learner.kept.entity for peer in meeting.peers], meeting.history))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(a, b) for a, b in zip(found[0][1], found[1][1], strict=True))
    assert found[0][2] == found[1][2]
    assert found[0][0] != found[2][0]


def test_the_best_is_kept_and_the_meeting_ends():
    meeting = meet(PARTIES, wanted(), replace(PUBLISHED, trainings=5))
    assert not meeting._events
    for peer in meeting.peers:
        scores = [note for note in peer.history if "kept" in note and note["score"] is not None]
        best = -math.inf
        for note in scores:
            assert note["kept"] == (note["score"] > best)
            best = max(best, note["score"])
        assert peer.learner.score == best == pytest.approx(peer.learner.scored(peer.learner.kept))
        assert 0 < peer.learner.trained <= 5
        assert peer.state == "sleep"
        assert peer.alarm == math.inf
        assert peer.refused == 0


def test_time_may_be_up_and_then_go_on():
    whole, parts = meet(PARTIES, wanted(), PUBLISHED), meet(PARTIES, wanted(), PUBLISHED, until=0.0)
    assert not parts.history
    assert parts.scores() == [None, None, None]
    for until in (0.3, 5.0, math.inf):
        parts.run(until)
        assert parts.now <= until
    assert parts.history == whole.history
    assert parts.scores() == whole.scores()


def test_it_ends_when_nobody_improves(monkeypatch):
    """Scores that never become better: each trains for as long as its patience lasts, or with what it is offered."""
    monkeypatch.setattr(Learner, "scored", lambda self, tables: 1.0)
    meeting = meet(PARTIES, wanted(), replace(PUBLISHED, trainings=100, patience=2))
    offers = [record for record in meeting.transcript.records if record.kind == "offer"]
    assert len(offers) == 6  # after the first training, and never again
    for peer in meeting.peers:
        alone = [note for note in peer.history if note["what"] == "self"]
        assert len(alone) == 2
        assert alone[1]["time"] - alone[0]["time"] >= PUBLISHED.rest  # it slept, and a timer woke it
        assert peer.learner.trained <= 2 + 2 * 2  # two by itself, two as a host, two as a client
    assert all(peer.state == "sleep" for peer in meeting.peers)


def test_who_improves_tells_everybody():
    meeting = meet(PARTIES, wanted(), replace(PUBLISHED, trainings=5))
    for peer in meeting.peers:
        better = sum(note.get("kept", False) for note in peer.history)
        offers = [r for r in meeting.transcript.records if r.kind == "offer" and r.sender == peer.number]
        assert 2 <= len(offers) <= 2 * better


@pytest.mark.parametrize("silent", [0, 2])
def test_a_peer_that_never_answers_stops_nobody(silent):
    meeting = meet(PARTIES, wanted(), PUBLISHED, speeds={silent: 0.0})
    others = [peer for peer in meeting.peers if peer.number != silent]
    assert all(peer.learner.trained > 0 and peer.state == "sleep" for peer in others)
    assert any(note["what"] == "hosts" for peer in others for note in peer.history)
    assert meeting.peers[silent].learner.best is None


@pytest.mark.parametrize("kind", ["answer", "gradient", "generated", "translated", "ended"])
def test_messages_that_are_lost_stop_nobody(kind):
    meeting = meet(PARTIES, wanted(), PUBLISHED, lost=lambda message: message.kind == kind and message.sender == 1)
    assert not meeting._events
    assert all(peer.state == "sleep" and peer.learner.trained > 0 for peer in meeting.peers)
    assert not any(peer._serving or peer._hosting or peer._asking for peer in meeting.peers)


def test_a_slow_peer_does_not_slow_the_others():
    quick, slow = (meet(PARTIES, wanted(), PUBLISHED, speeds=speeds) for speeds in ({}, {2: 1e-4}))
    assert slow.now > 10 * quick.now
    firsts = {note["peer"]: note["time"] for note in slow.history if note["what"] == "first"}
    assert firsts[2] > 100 * firsts[0]
    before = [n for n in slow.history if n["what"] in ("host", "client") and n["time"] < firsts[2]]
    assert {note["peer"] for note in before} == {0, 1}


def test_every_vote_is_counted_and_every_batch_is_small():
    transcript = Transcript(everything)
    meeting = meet(PARTIES, wanted(), PUBLISHED, transcript=transcript)
    sent = {peer.number: 0 for peer in meeting.peers}
    for message in transcript.payloads.values():
        if message.kind == "generated":
            sent[message.receiver] += len(message.arrays["values"])
    assert {peer.number: peer.learner.votes.votes for peer in meeting.peers} == sent
    assert sum(sent.values()) > 0
    rows = torch.zeros(32, 100)
    both = [
        Message("generated", 10**6, 0, 10, 11, {"handshake": 10**6}, {"values": rows}),
        Message("gradient", 10**6, 0, 11, 10, {"handshake": 10**6, "keep": 1}, {"values": rows}),
    ]
    assert 8 * sum(len(message.encode()) for message in both) <= 0.21e6


@pytest.mark.parametrize("count", [1, 31, 32, 33, 100])
def test_batches_grow_with_what_is_aligned(count):
    order = batches(count, 3, 32, 5)
    assert len(order) == 3 * -(-count // 32)
    assert sorted(torch.cat(order[: len(order) // 3]).tolist()) == list(range(count))


@pytest.mark.parametrize(
    ("scorers", "pairing"),
    [
        ((("transe", 8), ("transh", 6), ("transr", 5)), PUBLISHED),
        ((("transd", 6), ("transe", 6), ("transd", 9)), replace(PUBLISHED, virtual="neighbours")),
        (
            (("rotate", 6), ("distmult", 8), ("complex", 5)),
            replace(PUBLISHED, virtual="neighbours", criterion="accuracy"),
        ),
        ((("transe", 8), ("transe", 6), ("transh", 8)), replace(PUBLISHED, ppat=PPAT(translator="procrustes"))),
        ((("transe", 8), ("transe", 8), ("transe", 8)), replace(PUBLISHED, update="mean", idle="sleep", share=0.5)),
    ],
)
def test_models_and_dimensions_may_differ(scorers, pairing):
    meeting = meet(PARTIES, [wanted(*each) for each in scorers], pairing)
    for peer, (_, dim), graph in zip(meeting.peers, scorers, PARTIES, strict=True):
        tables, scorer = peer.learner.kept, peer.learner.settings.scorer
        assert tables.entity.shape == (len(graph.entities), scorer.widths(dim)[0])
        assert tables.relation.shape == (len(graph.relations), scorer.widths(dim)[1])
        assert any(note["what"] == "hosts" for note in peer.history)
        assert peer.refused == 0
    assert all(0 <= found.accuracy <= 1 and 0 <= found.hits1 <= found.hits10 <= 1 for found in meeting.scores())
    assert vector_widths(wanted("rotate").scorer, 8) == (16, None)


def test_virtual_neighbours_are_trained_with_and_forgotten(monkeypatch):
    seen = []
    extended = Learner._extended

    def noted(self, tables, virtual):
        fit = extended(self, tables, virtual)
        seen.append((self, virtual, fit.graphs[0]))
        return fit

    monkeypatch.setattr(Learner, "_extended", noted)
    meeting = meet(PARTIES, wanted(), replace(PUBLISHED, virtual="neighbours", parts="relations", virtual_most=7))
    assert not seen  # nothing is aligned that could have neighbours
    meeting = meet(PARTIES, wanted(), replace(PUBLISHED, virtual="neighbours", share=0.4, virtual_most=7))
    assert seen
    for learner, virtual, wider in seen:
        graph, client = learner.graph, meeting.peers[virtual.client].learner
        assert wider.entities[: len(graph.entities)] == tuple(graph.entities)
        assert len(wider.entities) == len(graph.entities) + len(virtual.entity)
        assert 0 < len(virtual.links) <= 7
        own = {tuple(row) for row in graph.train.triples.tolist()}
        more = {tuple(row) for row in wider.train.triples.tolist()} - own
        # Every link is a triple of the client, by the names that its aligned rows have here and there.
        names = [client.graph.entities[i] for i in client.aligned[learner.number].entity]
        assert names == [graph.entities[i] for i in learner.aligned[virtual.client].entity]
        theirs = {(h, t) for h, _, t in client.graph.named("train")}
        for h, _, t in virtual.links.tolist():
            known = [names[end] if end < len(names) else None for end in (h, t)]
            assert known.count(None) == 1
            assert any((known[0] in (None, a)) and (known[1] in (None, b)) for a, b in theirs)
        assert len(more) <= len(virtual.links)
        assert len(learner.kept.entity) == len(graph.entities)


# -- what is guaranteed ------------------------------------------------------------------------------------------------


def test_published_mode_claims_nothing():
    for said in meet(PARTIES, wanted(), PUBLISHED).statement():
        assert said["guarantee"] == "none"
        assert said["epsilon"] is None
        assert said["why"][0] == "no formal guarantee"
        assert len(said["why"]) > 3


def test_sound_mode_claims_what_was_fixed_in_advance():
    meeting = meet(PARTIES, wanted(private=True), replace(SOUND, noise="system"))
    for peer, said in zip(meeting.peers, meeting.statement(), strict=True):
        learner = peer.learner
        per_epoch = math.ceil(learner.settings.privacy.size / 32)
        reserved = learner.spent(reserved=True)
        assert [s.count for s in reserved["train"]] == [(6 + 3 * 2) * per_epoch]
        assert reserved["valid"] == (Segment(Gaussian(3.0), 4),)
        spent = learner.spent()
        assert [s.count for s in spent["train"]] == [(6 + learner.trained * 2) * per_epoch]
        assert [s.count for s in spent["valid"]] == [1 + learner.trained] == [learner.looks]
        assert said["guarantee"] == "differential privacy"
        assert said["epsilon"] == max(epsilon(each, 1e-5) for each in reserved.values())
        assert int(learner.fit.cohort.steps[0]) == sum(s.count for s in spent["train"])


@pytest.mark.parametrize(
    ("own", "pairing", "marks"),
    [
        ({"name": "dpsgd"}, SOUND, False),
        ({"name": "confidential"}, replace(SOUND, validation="none"), True),
        ({"name": "dpsgd"}, replace(SOUND, validation="none", virtual="public"), True),
        ({"name": "dpsgd"}, replace(SOUND, validation="public"), True),
    ],
)
def test_a_statement_says_which_triples_are_protected(own, pairing, marks):
    graph = marked(PARTIES[0], 0.5)
    said = statement(Learner(0, graph, wanted(private=True, **own), by_links(PARTIES)[0], pairing))
    assert ("confidential" in said["unit"]) == marks
    assert (UNMARKED in said["not_covered"]) == marks


@settings(max_examples=25, deadline=None)
@given(st.floats(0, 4), st.lists(st.booleans(), max_size=8))
def test_what_is_paid_for_is_what_was_taken(ratio, course):
    """Steps on protected triples, counted one by one, of a peer that is killed in some of its trainings."""
    own = wanted(private=True, name="confidential", public_ratio=ratio, noise="seeded", size=40)

    def make():
        return Learner(0, marked(PARTIES[0], 0.5), own, {}, replace(SOUND, validation="none", trainings=8))

    learner, taken, begun = make(), 0, False
    for ends in course:
        learner.begun(first=not begun)
        fit, privacy = learner.fit, learner.settings.privacy
        first, many = int(fit.cohort.steps[0]), (2 if begun else 6) * fit.private.per_epoch[0]
        taken += sum(privacy.is_private(step) for step in range(first, first + many))
        if ends:
            begun = True
            fit.cohort.steps += many
            learner._go_on_from(fit)
        else:
            counts, learner = learner.counts(), make()
            learner.restore(counts, None, None)
    assert sum(segment.count for segment in learner.spent()["train"]) == taken


@pytest.mark.slow
def test_the_steps_that_make_a_clients_rows_stand_the_audit():
    """All that a client sends follows from its rows, and these from the steps of its training."""
    client = meet(PARTIES, wanted(private=True), replace(SOUND, noise="system", trainings=1)).peers[1].learner
    found = audit_step(client.settings.privacy, runs=2_000, kind=type(client.fit.private))
    assert not found.violated, found
    louder = audit_step(replace(client.settings.privacy, sigma=0.5), runs=2_000, kind=type(client.fit.private))
    assert louder.lower_bound > 1, louder  # the adversary is not blind: with less noise it sees the canary
    assert client.spent()["train"][0].event == Sampled(client.fit.private.rates[0], (2.0,))


@pytest.mark.parametrize(("own", "votes"), [("seeded", "system"), ("system", "seeded")])
def test_a_simulation_claims_nothing(own, votes):
    meeting = meet(PARTIES, wanted(private=True, noise=own), replace(SOUND, noise=votes, trainings=1))
    assert all(said["epsilon"] is None and "simulation" in said["guarantee"] for said in meeting.statement())


def test_virtual_rows_change_no_rate():
    """A host's own triples are sampled at the rate that was fixed, whatever is added to them."""
    meeting = meet(PARTIES, wanted(private=True, noise="seeded"),
                   replace(SOUND, virtual="predicted", validation="none", share=0.5))  # fmt: skip
    assert any(note["what"] == "host" for note in meeting.history)
    for peer in meeting.peers:
        learner = peer.learner
        assert int(learner.fit.cohort.steps[0]) == sum(s.count for s in learner.spent()["train"])
        assert peer.refused == 0


def test_a_host_may_vote_and_then_says_nothing_else():
    transcript = Transcript(everything)
    some = [wanted(), wanted(private=True, noise="seeded"), wanted(private=True, noise="seeded")]
    pairing = replace(SOUND, votes_sigma=10.0, ppat=replace(QUICK, batch=8))
    meeting = meet(PARTIES, some, pairing, transcript=transcript)
    voter = meeting.peers[0]
    said = {message.kind for message in transcript.payloads.values() if message.sender == 0}
    assert said <= {"invite", "gradient", "answer", "ended"}
    assert not any("map" in message.arrays for message in transcript.payloads.values())
    assert all(m.says["answer"] == "no" for m in transcript.payloads.values() if m.kind == "answer" and m.sender == 0)
    told = [m for m in transcript.payloads.values() if m.kind == "gradient" and m.sender == 0]
    per_epoch = {other: -(-len(aligned) // 8) for other, aligned in voter.learner.aligned.items()}
    assert all(m.says["keep"] == ((m.round + 1) % per_epoch[m.receiver] == 0) for m in told)  # the last, whatever it is
    heard = sum(
        len(m.arrays["values"]) for m in transcript.payloads.values() if m.kind == "generated" and m.receiver == 0
    )
    assert voter.learner.votes.votes == heard > 0
    assert voter.learner.spent()["train"] == (Segment(Gaussian(10.0), heard),)
    reserved = voter.learner.spent(reserved=True)["train"]
    assert reserved[0].count >= heard
    claim = meeting.statement()[0]
    assert claim["simulated_epsilon"] == epsilon(reserved, 1e-5)
    scales = {m.arrays["scale"].item() for m in transcript.payloads.values() if m.kind == "invite" and m.sender == 0}
    first = voter.learner._first_tables()
    assert scales <= {scale_of(voter.learner.vectors(client, first)) for client in (1, 2)}


def test_a_host_may_vote_whose_relations_are_no_vectors():
    aligned = {1: Aligned(np.arange(5, dtype=np.int32), np.zeros(0, np.int32))}
    learner = Learner(0, PARTIES[0], wanted("rotate"), aligned, replace(SOUND, votes_sigma=10.0))
    learner.best = learner.fit.cohort.tables
    assert learner.judge(1).answer(torch.zeros(5, 16)).shape == (5, 16)


def test_one_triple_changes_one_teacher():
    graph = PARTIES[0]
    aligned = {1: Aligned(np.arange(len(graph.entities), dtype=np.int32), np.zeros(0, np.int32))}
    pairing = replace(SOUND, votes_sigma=10.0)
    whole = Learner(0, graph, wanted(), aligned, pairing)._teachers_rows(1)
    rows = np.ones(len(graph.train), bool)
    rows[5] = False
    less = Learner(0, replace(graph, train=graph.train.at(rows)), wanted(), aligned, pairing)._teachers_rows(1)
    assert len(whole) == len(less) == 50
    assert sum(not torch.equal(a, b) for a, b in zip(whole, less, strict=True)) == 1


def marked(graph, share):
    marks = [np.arange(len(split)) >= share * len(split) for split in graph.splits.values()]
    splits = (replace(split, confidential=mark) for split, mark in zip(graph.splits.values(), marks, strict=True))
    return Graph(graph.entities, graph.relations, *splits)


def test_public_validation_looks_at_public_triples_alone():
    graph = marked(PARTIES[0], 0.5)
    learner = Learner(0, graph, wanted(private=True), {}, replace(SOUND, validation="public"))
    tables = learner.fit.cohort.tables
    score = learner.scored(tables)
    keep = np.flatnonzero(~graph.valid.confidential)
    fewer = replace(graph, valid=graph.valid.at(keep), train=graph.train.at(np.flatnonzero(~graph.train.confidential)),
                    test=graph.test.at(np.flatnonzero(~graph.test.confidential)))  # fmt: skip
    fewer = replace(fewer, valid=replace(fewer.valid, confidential=np.arange(len(keep)) < 0))
    other = Learner(0, fewer, wanted(private=True), {}, replace(SOUND, validation="public"))
    assert other.scored(tables) == score
    # Where all training triples are protected, not even unmarked ones are looked at.
    none = replace(fewer, train=fewer.train.at(np.arange(1)))
    assert Learner(0, none, wanted(private=True), {}, replace(SOUND, validation="public")).scored(tables) == score
    assert learner.looks == 0


def test_a_shard_that_diverges_changes_no_other_teacher(monkeypatch):
    graph = PARTIES[0]
    aligned = {1: Aligned(np.arange(len(graph.entities), dtype=np.int32), np.zeros(0, np.int32))}
    whole = Learner(0, graph, wanted(), aligned, replace(SOUND, votes_sigma=10.0))
    before, taught = whole._teachers_rows(1), learning._taught
    spoilt = next(each for each in range(50) if not torch.equal(before[each], whole.vectors(1, whole._first_tables())))

    def diverging(settings, graphs, first):
        if spoilt in graphs:
            raise Diverged("the loss is not finite", 1, 1, settings)
        return taught(settings, graphs, first)

    monkeypatch.setattr(learning, "_taught", diverging)
    after = Learner(0, graph, wanted(), aligned, replace(SOUND, votes_sigma=10.0))._teachers_rows(1)
    assert [each for each in range(50) if not torch.equal(before[each], after[each])] == [spoilt]


def test_a_host_without_votes_for_a_whole_handshake_begins_none():
    some = [wanted(), wanted(private=True, noise="seeded"), wanted(private=True, noise="seeded")]
    meeting = meet(PARTIES, some, replace(SOUND, votes_sigma=10.0, retrain=1),
                   lost=lambda message: message.kind == "translated" and message.receiver == 0)  # fmt: skip
    voter = meeting.peers[0]
    assert any(note["what"] == "left alone" for note in voter.history)
    assert 0 < voter.learner.votes.votes <= voter.learner.votes.most
    voter.learner.trained = 0
    voter.learner.votes.votes = voter.learner.votes.most - 2 * len(voter.learner.aligned[1])
    assert voter.learner.can_host(1)
    voter.learner.votes.votes += 1
    assert not voter.learner.can_host(1)


def test_what_makes_no_sense_is_refused():
    with pytest.raises(BadValue, match="neighbours is what the triples say"):
        Pairing(virtual="neighbours")
    with pytest.raises(BadValue, match="tell of validation"):
        Pairing(validation="own")
    for wrong in ({"share": 0.0}, {"share": 2.0}, {"parts": "some"}, {"look_sigma": 0.0}, {"votes_sigma": -1.0},
                  {"votes_epsilon": float("nan")}):  # fmt: skip
        with pytest.raises(BadValue, match=next(iter(wrong))):
            Pairing(**wrong)
    with pytest.raises(BadValue, match="50 shards"):
        PPAT(shards=49)
    with pytest.raises(BadValue, match="mode is one of"):
        Pairing(mode="private")  # type: ignore[arg-type]
    with pytest.raises(TacitError, match="votes_epsilon"):
        meet(PARTIES, wanted(), SOUND)
    with pytest.raises(TacitError, match="known pairs"):
        meet(PARTIES, wanted(), replace(SOUND, ppat=PPAT(translator="procrustes"), votes_sigma=1.0))
    with pytest.raises(TacitError, match="noise of their steps"):
        meet(PARTIES, wanted(private=True, degree_share=0.1, degree_sigma=1.0), SOUND)
    with pytest.raises(TacitError, match="marks have to say"):
        meet(PARTIES, wanted(private=True), replace(SOUND, validation="public"))
    with pytest.raises(BadValue, match="2 settings for 3 parties"):
        meet(PARTIES, [wanted(), wanted()], PUBLISHED)
    with pytest.raises(TacitError, match="has not trained"):
        Learner(0, PARTIES[0], wanted(), {}, PUBLISHED).model()


# -- the protocol, message by message ----------------------------------------------------------------------------------


def pair():
    """Two peers that have trained, and what they have in common."""
    aligned = by_links(PARTIES)
    peers = [Peer(Learner(n, PARTIES[n], wanted(), {1 - n: aligned[n][1 - n]}, PUBLISHED)) for n in (0, 1)]
    for peer in peers:
        peer.begin()
    return peers


def done(peer, now):
    return peer.finish(peer.take_job().run(), now)


def kinds(messages):
    return [message.kind for message in messages]


def test_a_handshake_from_offer_to_end():
    host, client = pair()
    assert host.state == client.state == "busy"
    (offer,) = done(client, 1.0)
    assert (offer.kind, offer.receiver, client.state) == ("offer", 0, "ready")
    assert host.receive(offer, 1.0) == []  # busy: the offer waits in its queue
    (invite,) = done(host, 2.0)
    assert (invite.kind, host.state) == ("invite", "ready")
    answer, batch = client.receive(invite, 2.0)
    assert (answer.says["answer"], batch.kind, client.state) == ("yes", "generated", "ready")
    assert host.receive(answer, 2.0) == []
    assert host.state == "busy"
    said, steps = [batch], 0
    while said[0].kind == "generated":
        steps += 1
        said = client.receive(*host.receive(said[0], 2.0), 2.0)
    assert steps == 2 * -(-len(host.learner.aligned[1]) // 32)
    assert kinds(said) == ["translated"]
    (ended,) = host.receive(said[0], 3.0)
    assert (ended.kind, host.state, host.take_job().what) == ("ended", "busy", "host")
    assert client.receive(ended, 3.0) == []
    assert (client.state, client.take_job().what) == ("busy", "client")
    assert host.refused == client.refused == 0


def test_a_client_of_two_hosts_puts_in_what_it_sent():
    """Where two handshakes ended meanwhile, rows are translated once each, and not one after the other."""
    common = by_links(PARTIES)
    client = Peer(Learner(2, PARTIES[2], wanted(), common[2], replace(PUBLISHED, validation="none")))
    client.begin()
    done(client, 1.0)
    sent = {}
    for host in (0, 1):
        says = {"handshake": 1, "count": len(common[2][host]), "width": 8, "epochs": 2, "batch": 32, "seed": host}
        scale = {"scale": torch.tensor([1.0], dtype=torch.float64)}
        said = client.receive(Message("invite", 0, 0, host, 2, says, scale), 1.0)
        while said[-1].kind != "translated":
            still = {"values": torch.zeros(len(said[-1].arrays["values"]), 8)}
            answer = Message("gradient", said[-1].round, 0, host, 2, {"handshake": 1, "keep": 1}, still)
            said = client.receive(answer, 1.0)
        sent[host] = said[-1].arrays["values"]
    client._doing = "self"  # both end while it trains
    for host in (0, 1):
        assert client.receive(Message("ended", 0, 0, host, 2, {"handshake": 1}, {}), 1.0) == []
    client._doing, given = None, []
    client.learner.train = lambda tables, epochs, virtual: given.append(tables)
    client._next(2.0)
    client.take_job().run()
    expected = client.learner.placed(1, sent[1], client.learner.placed(0, sent[0], client.learner.kept))
    assert torch.allclose(given[0].entity, expected.entity, atol=1e-5)
    assert torch.allclose(given[0].relation, expected.relation, atol=1e-5)


def test_who_is_gone_is_not_asked():
    host, _ = pair()
    done(host, 1.0)
    host._enqueue(1)
    host._later.append((9.0, 1, 2))
    host.left(1, 1.0)
    assert (list(host._queue), host._later) == ([], [])


def test_a_voting_host_whose_first_training_diverges_goes_on():
    aligned = {1: by_links(PARTIES)[0][1]}
    voter = Peer(Learner(0, PARTIES[0], wanted(), aligned, replace(SOUND, votes_sigma=10.0)))
    voter.begin()
    voter.take_job()
    voter.finish(Trained(voter.learner.fit.cohort.tables, None), 1.0)
    assert voter.learner.best is not None
    other, _ = pair()
    other.take_job()
    with pytest.raises(TacitError, match="diverged"):
        other.finish(Trained(other.learner.fit.cohort.tables, None), 1.0)


def test_handshakes_with_one_host_are_bounded():
    host, client = pair()
    done(client, 1.0)
    done(host, 1.0)
    (invite,) = host._ask(1, 0, 1.0)
    client.taught.update({(0, number): 1 for number in range(MOST)})
    (answer,) = client.receive(invite, 2.0)
    assert answer.says["answer"] == "no"


def test_a_busy_client_is_asked_again_and_a_silent_one_is_given_up():
    host, client = pair()
    offer = client._message("offer", 0)
    done(host, 1.0)
    (invite,) = host.receive(offer, 1.0)
    (answer,) = client.receive(invite, 1.0)
    assert answer.says["answer"] == "busy"
    assert host.receive(answer, 1.0) == []
    assert PUBLISHED.retry <= host.alarm - 1.0 <= 2 * PUBLISHED.retry
    now = host.alarm
    (again,) = host.wake(now)
    assert again.kind == "invite"
    assert again.says["handshake"] > invite.says["handshake"]
    assert host.alarm == now + PUBLISHED.within
    assert host.wake(host.alarm) == []
    assert host.history[-1]["what"] == "no answer"
    assert host.take_job().what == "self"  # nobody is left to ask: it trains on by itself


def test_both_may_host_each_other_at_once():
    one, two = pair()
    offers = done(one, 1.0), done(two, 1.0)
    invites = one.receive(offers[1][0], 1.0), two.receive(offers[0][0], 1.0)
    answers = one.receive(invites[1][0], 1.0), two.receive(invites[0][0], 1.0)
    assert [each[0].says["answer"] for each in answers] == ["yes", "yes"]
    one.receive(answers[1][0], 1.0)
    two.receive(answers[0][0], 1.0)
    assert one.state == two.state == "busy"
    assert kinds(one.receive(answers[1][1], 1.0)) == kinds(two.receive(answers[0][1], 1.0)) == ["gradient"]


def test_a_sleeping_peer_wakes_by_a_request():
    host, client = pair()
    done(client, 1.0)
    host.pairing = replace(PUBLISHED, idle="sleep")
    done(host, 1.0)
    host.wake(host.alarm)
    assert (host.state, host.alarm) == ("sleep", math.inf)
    (invite,) = host.receive(client._message("offer", 0), 9.0)
    assert (invite.kind, host.state) == ("invite", "ready")
    host.receive(host._message("offer", 1), 9.0)
    assert host.refused == 1  # addressed to someone else


@pytest.mark.parametrize("spoil", ["shape", "nan", "round", "handshake", "sender", "kind", "early"])
def test_what_should_not_be_sent_changes_nothing(spoil):
    host, client = pair()
    offer = done(client, 1.0)[0]
    done(host, 1.0)
    answer, batch = client.receive(host.receive(offer, 1.0)[0], 1.0)
    host.receive(answer, 1.0)
    values = batch.arrays["values"]
    bad = {
        "shape": lambda: replace(batch, arrays={"values": values[:, 1:]}),
        "nan": lambda: replace(batch, arrays={"values": values * math.nan}),
        "round": lambda: replace(batch, round=1),
        "handshake": lambda: replace(batch, says={"handshake": 77}),
        "sender": lambda: replace(batch, sender=5),
        "kind": lambda: Message("counts", 0, 0, 1, 0, {"part": "entity"}, {"values": values[:, 0].contiguous()}),
        "early": lambda: Message("translated", 0, 0, 1, 0, batch.says, {"values": values}),
    }[spoil]()
    before = host.learner.kept.entity.clone()
    assert host.receive(bad, 1.0) == []
    assert (host.refused, host.learner.votes.votes) == (1, 0)
    assert torch.equal(host.learner.kept.entity, before)
    assert kinds(host.receive(batch, 1.0)) == ["gradient"]  # the handshake goes on


@pytest.mark.parametrize("odd", [{"count": 3}, {"epochs": 10**6}, {"batch": 1}, {"width": 0}, {"width": 10**6}])
def test_a_client_serves_what_was_agreed_and_nothing_else(odd):
    host, client = pair()
    offer = done(client, 1.0)[0]
    done(host, 1.0)
    (invite,) = host.receive(offer, 1.0)
    (answer,) = client.receive(replace(invite, says=dict(invite.says) | odd), 1.0)
    assert answer.says["answer"] == "no"
    assert not client._serving


@pytest.mark.parametrize("factor", [3e38, 0.0, 2.0])
def test_a_map_that_is_no_rotation_is_refused(factor):
    """One that makes numbers too large would end the client's process, where widths differ: no inverse is found."""
    aligned = by_links(PARTIES)
    pairing = replace(PUBLISHED, ppat=replace(QUICK, translator="procrustes"))
    host, client = (
        Peer(Learner(n, PARTIES[n], wanted(dim=8 - 2 * n), {1 - n: aligned[n][1 - n]}, pairing)) for n in (0, 1)
    )
    for peer in (host, client):
        peer.begin()
    offer = done(client, 1.0)[0]
    done(host, 1.0)
    answer, rows = client.receive(host.receive(offer, 1.0)[0], 1.0)
    host.receive(answer, 1.0)
    (ended,) = host.receive(rows, 1.0)
    assert client.receive(replace(ended, arrays={"map": factor * torch.ones(8, 8)}), 1.0) == []
    assert (client.refused, client.take_job()) == (1, None)
    client.receive(ended, 1.0)
    assert (client.refused, client.take_job().what) == (1, "client")


def test_an_invitation_to_translate_into_too_much_is_declined(monkeypatch):
    """Whatever width a host names, a client makes a matrix of it, and then all its rows."""
    host, client = pair()
    offer = done(client, 1.0)[0]
    done(host, 1.0)
    (invite,) = host.receive(offer, 1.0)
    wide = replace(invite, says=dict(invite.says) | {"width": 1 << 13})
    assert client.receive(wide, 1.0)[0].says["answer"] == "no"
    monkeypatch.setattr("tacit.peers.peer.MOST_NUMBERS", len(client.learner.aligned[0]) * 8 - 1)
    assert client.receive(invite, 1.0)[0].says["answer"] == "no"


@pytest.mark.parametrize("better", [True, False])
def test_a_host_that_votes_trains_as_often_whether_it_improves_or_not(monkeypatch, better):
    """How many trainings are left decides whether it invites anybody: validation may not decide that."""
    aligned = by_links(PARTIES)
    pairing = replace(SOUND, votes_sigma=10.0, trainings=5, patience=2)
    host = Peer(Learner(0, PARTIES[0], wanted(), {1: aligned[0][1]}, pairing))
    host.learner.best = host.learner.fit.cohort.tables
    monkeypatch.setattr(host.learner, "improves", lambda trained: better)
    host.begin()
    now, trained = 0.0, []
    while (job := host.take_job()) is not None or host.alarm < math.inf:
        if job is None:
            now = host.alarm
            host.wake(now)
            continue
        trained.append(job.what)
        host.finish(job.run(), now)
    assert trained == ["first", "self", "self"]
    assert kinds(host.receive(Message("offer", 0, 0, 1, 0, {}, {}), now)) == ["invite"]


def test_groups_and_neighbours_of_others_do_not_go_together():
    """A link that a client guesses is a unit of its own, until a group has it: a group would count more than once."""
    graph = PARTIES[0]
    group = np.arange(len(graph.train), dtype=np.int32) // 2
    names = Vocab([f"g{n:03d}" for n in range(group.max() + 1)])
    grouped = replace(graph, train=Split(graph.train.triples, None, group), groups=names)
    own = wanted(private=True, unit="group", group=2, noise="seeded")
    fine = replace(SOUND, validation="none")
    Learner(0, grouped, own, by_links(PARTIES)[0], fine)
    with pytest.raises(TacitError, match="groups"):
        Learner(0, grouped, own, by_links(PARTIES)[0], replace(fine, virtual="predicted"))


@pytest.mark.parametrize("large", [2e4, 3e38, -3e38])
@pytest.mark.parametrize("what", ["batch", "rows", "scale"])
def test_numbers_that_are_too_large_are_refused(what, large):
    host, client = pair()
    offer = done(client, 1.0)[0]
    done(host, 1.0)
    (invite,) = host.receive(offer, 1.0)
    if what == "scale":
        assert client.receive(replace(invite, arrays={"scale": torch.tensor([large], dtype=torch.float64)}), 1.0) == []
        assert client.refused == 1
        return
    answer, message = client.receive(invite, 1.0)
    host.receive(answer, 1.0)
    while what == "rows" and message.kind == "generated":
        (message,) = client.receive(*host.receive(message, 1.0), 1.0)
    values = message.arrays["values"].clone()
    values[0, 0] = large
    assert host.receive(replace(message, arrays={"values": values}), 1.0) == []
    assert host.refused == 1
    assert host.receive(message, 1.0)


def test_rows_that_ran_away_are_not_judged(monkeypatch):
    """Which scores overflow depends on the triples that are asked for, and an error that says so would tell of them."""
    own = wanted(private=True, noise="seeded")
    learner = Learner(0, PARTIES[0], own, by_links(PARTIES)[0], SOUND)
    tables = learner.fit.cohort.tables.like(torch.clone)
    tables.relation[0] = 1e19
    monkeypatch.setattr(learner, "scored", lambda tables: pytest.fail("validation triples were looked at"))
    learner.begun(first=True)
    assert learner.train(tables, 1, None).score is None


def test_links_from_outside_are_looked_at():
    host, client = pair()
    for peer in (host, client):
        peer.pairing = peer.learner.pairing = replace(PUBLISHED, virtual="neighbours")
    done(client, 1.0)
    done(host, 1.0)
    rows, aligned = torch.zeros(1, 8), host.learner.aligned[1]
    for links in ([[0, 0, len(aligned.entity) + 1]], [[-1, 0, 0]], [[0, 99, 0]]):
        message = Message("translated", 0, 0, 1, 0, {"handshake": 1}, {
            "values": torch.zeros(len(aligned), 8), "entity": rows, "relation": rows[:0], "links": torch.tensor(links)
        })  # fmt: skip
        with pytest.raises(Refused, match="there are not"):
            host._virtual(message)


# -- what a meeting is compared with -----------------------------------------------------------------------------------


def test_the_controls():
    alone = independent(PARTIES, wanted(), PUBLISHED)
    assert [peer.learner.trained for peer in alone.peers] == [0, 0, 0]
    further = continued(PARTIES, wanted(), PUBLISHED, [2, 0, 3])
    assert [peer.learner.trained for peer in further.peers] == [2, 0, 3]
    assert not further.transcript.records
    for one, two in zip(alone.peers, further.peers, strict=True):
        assert two.learner.score >= one.learner.score
    assert torch.equal(alone.peers[1].learner.kept.entity, further.peers[1].learner.kept.entity)
    assert len(unified(PARTIES, wanted())) == 3
    with pytest.raises(TacitError, match="whoever pools"):
        unified(PARTIES, wanted(private=True))


@settings(max_examples=20, deadline=None)
@given(st.lists(graphs(plain_triples), min_size=2, max_size=3), st.data())
def test_a_united_graph_has_what_is_linked_once(found, data):
    names = [f"p{i}" for i in range(len(found))]
    ends = st.tuples(st.sampled_from(range(len(found))), st.sampled_from(range(len(found)))).filter(
        lambda x: x[0] != x[1]
    )
    links = []
    for one, other in data.draw(st.lists(ends, max_size=5)):
        here, there = (data.draw(st.sampled_from(list(found[i].entities))) for i in (one, other))
        links.append(Link(names[one], here, names[other], there))
    parties = parties_of(dict(zip(names, found, strict=True)), links)
    whole, entity, relation = united(parties)
    # Slowly: sets that grow together.
    groups = [{(i, name)} for i, graph in enumerate(found) for name in graph.entities]
    for link in links:
        ends = {(names.index(link.party), link.name), (names.index(link.other), link.other_name)}
        met = [group for group in groups if group & ends]
        groups = [group for group in groups if not group & ends] + [set().union(*met)]
    assert len(whole.entities) == len(groups)
    for group in groups:
        assert len({int(entity[i][found[i].entities.id(name)]) for i, name in group}) == 1
    held = {tuple(row) for split in (whole.valid, whole.test) for row in split.triples.tolist()}
    for i, graph in enumerate(found):
        for h, r, t in graph.train.triples.tolist():
            row = (int(entity[i][h]), int(relation[i][r]), int(entity[i][t]))
            assert (row in {tuple(x) for x in whole.train.triples.tolist()}) == (row not in held)
