"""PPAT: a client's rows, translated into a host's space, without the host's rows or the client's being shown.

The client holds a generator G(x) = W x, kept near orthogonal (Conneau et al., "MUSE", ICLR 2018). It sends a batch of
G(x), and is told where these should move; the gradient of W it works out by itself. The host holds what tells G(X) from
its own rows Y (FKGE, Peng et al. 2021):

    Voted     teachers, each with its own part of the host's data, vote with noise on whether a generated row is real. A
              student is trained on generated rows with these labels, and never sees Y. What the client is told comes
              from the student alone, so it is a function of the votes
    Direct    one discriminator that sees Y and G(X): for a host whose rows are private already, where whatever is made
              of them is free

Nothing that a teacher's loss is made of can reach a generator: teachers are given numbers, not a graph of derivatives.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch.nn.functional import leaky_relu, normalize

from tacit.draws import Ahead, Purpose, Stream
from tacit.errors import BadValue

Tensor = Any
NEIGHBOURS = 10
"""Of CSLS."""
WATCHED = 1024
"""Pairs that CSLS looks at, at most: so the time of an epoch grows as the number of pairs does, and no faster."""
SLOPE = 0.2


@dataclass(frozen=True)
class PPAT:
    """How a generator is trained.

    translator: ppat, or procrustes for the orthogonal map that brings known pairs nearest to each other, at once: a
    control, for hosts that may look at pairs. epochs: times that all aligned rows are gone through. batch,
    learning_rate, momentum, teachers: as FKGE. hidden: width of a discriminator. orthogonal: how much W is drawn to an
    orthogonal matrix after each step, as MUSE but more: with its 0.01 W ran away. noise: the scale of the Laplace noise
    of published votes. shards: into how many parts the triples of a host are divided whose votes protect them.
    critic_steps: steps of the discriminators for one of the generator.
    """

    translator: Literal["ppat", "procrustes"] = "ppat"
    epochs: int = 20
    batch: int = 32
    learning_rate: float = 0.02
    momentum: float = 0.9
    teachers: int = 4
    hidden: int = 64
    orthogonal: float = 0.3
    noise: float = 0.05
    shards: int = 50
    critic_steps: int = 1

    def __post_init__(self) -> None:
        if self.translator not in ("ppat", "procrustes"):
            raise BadValue(f"translator is ppat or procrustes, not {self.translator!r}")
        for name in ("epochs", "batch", "teachers", "hidden", "critic_steps"):
            if getattr(self, name) < 1:
                raise BadValue(f"{name} is at least 1, not {getattr(self, name)}")
        if not self.learning_rate > 0 or not 0 <= self.momentum < 1:
            raise BadValue("learning_rate is above 0, and momentum at least 0 and below 1")
        if not 0 <= self.orthogonal < 0.5 or not self.noise >= 0:
            raise BadValue("orthogonal is at least 0 and below 0.5, and noise at least 0")
        if self.shards < 50:
            raise BadValue(f"votes protect triples with 50 shards or more, not {self.shards}: fewer drown in the noise")

    @property
    def passes(self) -> int:
        """Epochs that a handshake has: none where the map is found at once."""
        return self.epochs if self.translator == "ppat" else 0


def batches(count: int, epochs: int, size: int, seed: int, device: Any = "cpu") -> list[Any]:
    """Which of `count` aligned rows are in each batch: public, so that neither side has to say it."""
    if not epochs or not count:
        return []
    orders = np.stack([Stream(seed, Purpose.PAIR, step=epoch).permutation(count) for epoch in range(epochs)])
    return [batch for order in torch.from_numpy(orders).to(device) for batch in order.split(size)]


def scale_of(rows: Tensor) -> float:
    """The root mean square length of rows; 1 of none, or of nothing but zeros."""
    length = math.sqrt(float(rows.double().square().sum(-1).mean())) if len(rows) else 0.0
    return length if length > 0 and math.isfinite(length) else 1.0


# -- the client --------------------------------------------------------------------------------------------------------


class Generator:
    """G(x) = W x, from the client's space into the host's.

    W begins as a random orthogonal matrix, and not as the identity: with that, the first batch would be raw rows. Kept
    near orthogonal, it turns, but never becomes a mirror image of what it was.

    Parameters
    ----------
    rows
        (n, own width) the aligned rows.
    width, scale
        Of the host's rows: how many numbers they have, and how long they are.
    stream
        Draws W.
    """

    def __init__(self, rows: Tensor, width: int, scale: float, settings: PPAT, stream: Stream):
        own = rows.shape[1]
        self.rows, self.settings = rows, settings
        self.factor = scale / scale_of(rows)
        self._scaled = self.factor * rows
        tall = torch.from_numpy(stream.normal(width * own)).reshape(max(width, own), -1)
        turned, corner = torch.linalg.qr(tall)
        turned = turned * corner.diagonal().sign()  # every orthogonal map as likely as any other
        self.weight = (turned if width >= own else turned.T).float().contiguous().to(rows.device)
        self.velocity = torch.zeros_like(self.weight)
        self.best = self.weight.clone()

    def made(self, which: Tensor) -> Tensor:
        """The translated rows of a batch."""
        return self._scaled[which] @ self.weight.T

    def translate(self, rows: Tensor, weight: Tensor | None = None) -> Tensor:
        """Any rows of the client in the host's space, by the best W."""
        return self.factor * rows @ (self.best if weight is None else weight).T

    def learn(self, which: Tensor, gradient: Tensor) -> None:
        """Move W by what the host says of the batch it was sent, and draw it to an orthogonal matrix."""
        rate, beta, pull = self.settings.learning_rate, self.settings.momentum, self.settings.orthogonal
        velocity = torch.addmm(self.velocity, gradient.T, self._scaled[which], beta=beta)
        weight = torch.sub(self.weight, velocity, alpha=rate)
        wide, own = weight.shape  # of W W^T W, the smaller product first
        ends = (weight @ weight.T, weight) if wide <= own else (weight, weight.T @ weight)
        weight = torch.addmm(weight, *ends, beta=1 + pull, alpha=-pull)
        fine = weight.isfinite().all()  # else it ran away: begin again from the best so far. Nobody waits to know
        self.weight = torch.where(fine, weight, self.best)
        self.velocity = torch.where(fine, velocity, 0.0)

    def keep(self) -> None:
        """Hold on to W as it is."""
        self.best = self.weight.clone()

    def follow(self, turn: Tensor) -> None:
        """Take over what the host did to the rows beyond W."""
        self.best = turn @ self.best

    def refined(self, rows: Tensor) -> Tensor:
        """Rows of the client as they come out of the translation: in the host's space if that is as wide, else back in
        the client's own, without what the host's space has no room for."""
        weight = self.best
        if weight.shape[0] == weight.shape[1]:
            return self.translate(rows)
        return rows @ weight.T @ torch.linalg.pinv(weight).T


# -- the host ----------------------------------------------------------------------------------------------------------


class Critics:
    """Several discriminators at once: perceptrons with one hidden layer, which say how real a row looks.

    Their derivatives are written out, and all their numbers lie in one tensor: a batch is small, and what it costs is
    how many operations are begun.
    """

    def __init__(self, many: int, width: int, settings: PPAT, stream: Stream, device: Any):
        self.rate, self.momentum, hidden = settings.learning_rate, settings.momentum, settings.hidden
        sizes = [(many, width, hidden), (many, 1, hidden), (many, hidden, 1), (many, 1, 1)]
        numbers = [math.prod(size) for size in sizes]
        spread = (width**-0.5, 0.0, hidden**-0.5, 0.0)
        by = torch.cat([torch.full((number,), scale) for number, scale in zip(numbers, spread, strict=True)])
        self._all = (torch.from_numpy(stream.normal(sum(numbers))).float() * by).to(device)
        self._velocity, self._gradient = torch.zeros(2, len(self._all), device=device)
        self.weights, self._into = (
            [part.reshape(size) for part, size in zip(whole.split(numbers), sizes, strict=True)]
            for whole in (self._all, self._gradient)
        )

    def _layers(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The hidden layer before and after its bend, and (critics, b, 1) logits."""
        into, bias, out, last = self.weights
        before = torch.baddbmm(bias, rows, into)
        after = leaky_relu(before, SLOPE)
        return before, after, torch.baddbmm(last, after, out)

    def _shown(self, rows: Tensor) -> Tensor:
        return rows if rows.dim() == 3 else rows.expand(len(self.weights[0]), -1, -1)

    def __call__(self, rows: Tensor) -> Tensor:
        """(critics, b): logits of (critics, b, width) rows, or of (b, width) rows that all are shown."""
        return self._layers(self._shown(rows))[2][..., 0]

    def learn(self, rows: Tensor, labels: Tensor) -> None:
        """One step of the mean cross-entropy of rows with (b,) labels, each critic on its own."""
        rows = self._shown(rows)
        before, after, logits = self._layers(rows)
        error = (logits.sigmoid() - labels[:, None]) / len(labels)
        back = self._back(before, error)
        into, bias, out, last = self._into
        torch.bmm(rows.mT, back, out=into)
        torch.sum(back, 1, keepdim=True, out=bias)
        torch.bmm(after.mT, error, out=out)
        torch.sum(error, 1, keepdim=True, out=last)
        self._velocity.mul_(self.momentum).add_(self._gradient)
        self._all.sub_(self._velocity, alpha=self.rate)

    def wanted(self, rows: Tensor, label: float) -> Tensor:
        """(b, width): by the first critic, the gradient of the mean cross-entropy of these rows with one label."""
        before, _, logits = self._layers(self._shown(rows))
        error = (logits.sigmoid() - label) / len(rows)
        return (self._back(before, error) @ self.weights[0].mT)[0]

    def _back(self, before: Tensor, error: Tensor) -> Tensor:
        """What an error of the logits is before the hidden layer's bend."""
        return torch.ops.aten.leaky_relu_backward(error @ self.weights[2].mT, before, SLOPE, False)


class Votes(Protocol):
    """What makes a label of a count (`tacit.privacy.pate`)."""

    def labels(self, ayes: Tensor, teachers: int) -> Tensor: ...


class Judge(Protocol):
    """What a host has."""

    def answer(self, generated: Tensor) -> Tensor:
        """Where each generated row should move: a gradient of its shape."""


class Direct:
    """One discriminator, which sees the host's rows; generated rows should look real to it, as MUSE asks."""

    def __init__(self, rows: Tensor, settings: PPAT, stream: Stream):
        self.settings, self.count = settings, 0
        self.scale = scale_of(rows)
        self.rows = rows.detach().float() / self.scale
        self.critics = Critics(1, rows.shape[1], settings, stream.at(step=0), rows.device)
        self._draws = Ahead(stream, rows.device)
        self._labels = _half(settings.batch, rows.device)

    def answer(self, generated: Tensor) -> Tensor:
        fake, many = generated.detach() / self.scale, len(generated)
        for _ in range(self.settings.critic_steps):
            self.count += 1
            real = self.rows[(self._draws.uniform(self.count, many) * len(self.rows)).long()]
            self.critics.learn(torch.cat([real, fake]), self._labels(many))
        return self.critics.wanted(fake, 1.0) / self.scale


class Voted:
    """Teachers, noisy votes, a student.

    Parameters
    ----------
    parts
        Each teacher's real rows.
    votes
        Makes labels of the teachers' counts; everything that leaves follows from these.
    scale
        How long the host's rows are, as far as the client may know.
    """

    def __init__(self, parts: Sequence[Tensor], votes: Votes, scale: float, settings: PPAT, stream: Stream):
        parts = [part for part in parts if len(part)]
        if not parts:
            raise BadValue("no teacher has a row to learn from")
        self.settings, self.votes, self.count, self.scale = settings, votes, 0, scale
        self.rows = torch.cat([part.detach().float() for part in parts]) / scale
        width, device = self.rows.shape[1], self.rows.device
        sizes = np.array([len(part) for part in parts])
        self._sizes, self._first = (torch.from_numpy(x).to(device)[:, None] for x in (sizes, np.cumsum(sizes) - sizes))
        self.teachers = Critics(len(parts), width, settings, stream.at(step=0), device)
        self.student = Critics(1, width, settings, stream.at(party=stream.party, step=1), device)
        self._draws = Ahead(stream, device)
        self._labels = _half(settings.batch, device)

    def answer(self, generated: Tensor) -> Tensor:
        fake = generated.detach() / self.scale
        for _ in range(self.settings.critic_steps):
            self._teach(fake)
        ayes = (self.teachers(fake) > 0).sum(0)
        labels = self.votes.labels(ayes, len(self._sizes)).float()
        self.student.learn(fake, labels)
        return self.student.wanted(fake, 0.0).neg() / self.scale

    def _teach(self, fake: Tensor) -> None:
        """Each teacher: as many of its own rows as there are generated ones, and these."""
        self.count += 1
        many, teachers = len(fake), len(self._sizes)
        drawn = self._draws.uniform(1 + self.count, teachers * many).reshape(-1, many)
        real = self.rows[(drawn * self._sizes).long() + self._first]
        self.teachers.learn(torch.cat([real, fake.expand(teachers, -1, -1)], 1), self._labels(many))


def _half(batch: int, device: Any) -> Any:
    """Makes labels: so many real ones, and as many generated ones."""
    most = torch.cat([torch.ones(batch), torch.zeros(batch)]).to(device)
    return lambda many: most[batch - many : batch + many]


def divided(rows: Tensor, many: int, stream: Stream) -> list[Tensor]:
    """Rows dealt out to teachers: disjoint, all of them, sizes that differ by one at most."""
    order = torch.from_numpy(stream.permutation(len(rows)).copy()).to(rows.device)
    return [rows[order[at::many]] for at in range(many)]


# -- how near two spaces are -------------------------------------------------------------------------------------------


def csls(ones: Tensor, others: Tensor, neighbours: int = NEIGHBOURS) -> Tensor:
    """(n, m) cross-domain similarity local scaling: 2 cos(x, y) - r(x) - r(y), r the mean cosine of the nearest ones.

    Conneau et al., "Word translation without parallel data", ICLR 2018.
    """
    cosine = normalize(ones, dim=-1) @ normalize(others, dim=-1).T
    here = cosine.topk(min(neighbours, cosine.shape[1]), 1).values.mean(1)
    there = cosine.topk(min(neighbours, cosine.shape[0]), 0).values.mean(0)
    return 2 * cosine - here[:, None] - there[None]


def nearness(generated: Tensor, real: Tensor) -> float:
    """The mean CSLS of pairs, (n, width) each: what a host that may look keeps the best translation by."""
    return float(csls(generated[:WATCHED], real[:WATCHED]).diagonal().mean())


def procrustes(ones: Tensor, others: Tensor) -> Tensor:
    """The orthogonal R with the smallest sum of |R x - y|^2 over pairs (Schoenemann 1966)."""
    left, _, right = torch.linalg.svd(others.double().T @ ones.double())
    return (left @ right).float()
