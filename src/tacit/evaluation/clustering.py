"""Do two embeddings group entities alike? k-means on each, and how much one grouping says of the other (DPKGE)."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tacit.draws import Purpose, Stream
from tacit.errors import BadValue

Floats = npt.NDArray[np.float64]
ROUNDS = 300


def clusters(rows: Any, k: int, *, seed: int = 0) -> npt.NDArray[np.int64]:
    """k-means (Lloyd) from k-means++ starts (Arthur and Vassilvitskii 2007): the cluster of each row.

    A cluster that becomes empty takes over the row that is farthest from its own centre.
    """
    points = np.asarray(rows, np.float64)
    if not 1 <= k <= len(points):
        raise BadValue(f"{len(points)} rows make 1 to {len(points)} clusters, not {k}")
    if not np.isfinite(points).all():
        raise BadValue("rows that are not finite cannot be clustered")
    draws = Stream(seed, Purpose.CLUSTER).uniform(k)
    centres = points[[int(draws[0] * len(points))]]
    nearest = _distances(points, centres)[:, 0]
    for draw in draws[1:]:
        total = np.cumsum(nearest)
        pick = int(np.searchsorted(total, draw * total[-1], "right")) if total[-1] > 0 else 0
        centres = np.concatenate([centres, points[[min(pick, len(points) - 1)]]])
        nearest = np.minimum(nearest, _distances(points, centres[-1:])[:, 0])
    which = np.full(len(points), -1)
    for _ in range(ROUNDS):
        distances = _distances(points, centres)
        after = distances.argmin(1)
        for empty in np.setdiff1d(np.arange(k), after):
            own = distances[np.arange(len(points)), after]
            own[np.bincount(after, minlength=k)[after] == 1] = -1.0  # never empty another one
            after[own.argmax()] = empty
        if np.array_equal(after, which):
            break
        which = after
        sums = np.zeros_like(centres)
        np.add.at(sums, which, points)
        centres = sums / np.bincount(which, minlength=k)[:, None]
    return which


def _distances(points: Floats, centres: Floats) -> Floats:
    """Squared distances, (n, k), one centre at a time."""
    return np.stack([np.square(points - centre).sum(1) for centre in centres], 1)


def mutual_information(one: Any, two: Any) -> float:
    """Normalised mutual information of two groupings: 2 I / (H1 + H2); 1 if both put everything together."""
    first, second = (np.unique(np.asarray(labels), return_inverse=True)[1] for labels in (one, two))
    if len(first) != len(second) or not len(first):
        raise BadValue("two groupings of the same things are compared")
    joint = np.zeros((first.max() + 1, second.max() + 1))
    np.add.at(joint, (first, second), 1.0 / len(first))
    entropies = [_entropy(joint.sum(axis)) for axis in (1, 0)]
    if sum(entropies) == 0:
        return 1.0
    shared = sum(entropies) - _entropy(joint.reshape(-1))
    return float(min(max(2.0 * shared / sum(entropies), 0.0), 1.0))


def _entropy(shares: Floats) -> float:
    shares = shares[shares > 0]
    return float(-(shares * np.log(shares)).sum())


def cluster_agreement(one: Any, two: Any, *, ks: tuple[int, ...] = (2, 3, 4), seeds: int = 5) -> dict[int, float]:
    """For each k, the mean over seeds of how much the k clusters of one embedding say of those of the other."""
    return {
        k: float(
            np.mean([mutual_information(clusters(one, k, seed=s), clusters(two, k, seed=s)) for s in range(seeds)])
        )
        for k in ks
    }
