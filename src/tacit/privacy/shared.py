"""S4 among parties: each releases noisy counts of its own triples, a server adds them up, and all get the sum.

What each sends carries its noise already, so the server and the others learn no more than what that cost.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from tacit.draws import Secret
from tacit.federation.aggregation import Part
from tacit.federation.messages import SERVER, Inbox, Message
from tacit.federation.secure import FixedPoint
from tacit.federation.secured import Secured
from tacit.federation.transport import InProcess
from tacit.federation.vocabulary import names_of, open_union, summed
from tacit.graph import Graph
from tacit.models.tables import Prior
from tacit.privacy.marginals import Marginals

Tensor = Any
SEND, GIVE = 2, 3
"""Phases before round 1, after names and places."""
LARGEST_COUNT = float(1 << 16)
"""The largest noisy count that can be added up securely."""
LOG = logging.getLogger(__name__)


def own_counts(graphs: Sequence[Graph], sigma: float, secret: Secret) -> list[Marginals]:
    """What each party releases of its own triples."""
    return [Marginals.release(graph, sigma, secret, party) for party, graph in enumerate(graphs)]


def shared_counts(
    graphs: Sequence[Graph], sigma: float, secret: Secret, transport: InProcess, secured: Secured | None = None
) -> list[Marginals]:
    """What each party knows of the sum of all parties' noisy counts: the cells of its own names.

    How many parties have noise in a cell follows from the names, which the server knows. `secured`: the server sees the
    sum alone, of whole multiples of a step that is small beside the noise.
    """
    parts: tuple[Part, Part] = ("entity", "relation")
    entities, relations = (open_union([names_of(g, part) for g in graphs], part, transport) for part in parts)
    released = own_counts(graphs, sigma, secret)
    size = (relations[0], entities[0])
    tails, heads, noises = (torch.zeros(size) for _ in range(3))
    if secured is not None:
        found = _secure_total(released, size, relations[1], entities[1], transport, secured)
        tails, heads = found[0], found[1]
    for party, mine in enumerate(released):
        where = relations[1][party][:, None], entities[1][party][None, :]
        noises.index_put_(where, torch.ones(()), accumulate=True)
        if secured is not None:
            continue
        values = torch.cat([mine.tails, mine.heads], 1)
        transport.send([Message("marginals", 0, SEND, party, SERVER, {"part": "relation"}, {"values": values})])
        rows = {party: len(values)}
        [message] = transport.receive(Inbox("marginals", "relation", 0, SEND, SERVER, rows, values.shape[1])).messages()
        one, two = message.arrays["values"].chunk(2, 1)
        tails.index_put_(where, one, accumulate=True)
        heads.index_put_(where, two, accumulate=True)
    known = []
    for party in range(len(graphs)):
        where = relations[1][party][:, None], entities[1][party][None, :]
        values = torch.cat([tails[where], heads[where]], 1)
        transport.send([Message("marginals", 0, GIVE, SERVER, party, {"part": "relation"}, {"values": values})])
        rows = {SERVER: len(values)}
        [message] = transport.receive(Inbox("marginals", "relation", 0, GIVE, party, rows, values.shape[1])).messages()
        one, two = message.arrays["values"].chunk(2, 1)
        known.append(Marginals(one.contiguous(), two.contiguous(), sigma * math.sqrt(2) * noises[where].sqrt()))
    return known


def _secure_total(
    released: Sequence[Marginals],
    size: tuple[int, int],
    relations: Sequence[Tensor],
    entities: Sequence[Tensor],
    transport: InProcess,
    secured: Secured,
) -> Tensor:
    """(2, relations, entities): the parties' noisy counts, added up so that the server sees the sum alone."""
    fixed, words = FixedPoint(LARGEST_COUNT, len(released)), {}
    for party, mine in enumerate(released):
        whole = np.zeros((2, *size))
        where = np.ix_(relations[party].numpy(), entities[party].numpy())
        for side, counts in enumerate((mine.tails, mine.heads)):
            whole[side][where] = counts.numpy()
        words[party], beyond = fixed.encode(whole.reshape(-1))
        if beyond:
            LOG.warning("%d noisy counts were beyond %g, and count as that", beyond, LARGEST_COUNT)
    members, server = secured.for_one_sum()
    total = fixed.decode(summed(words, "relation", transport, members, server, SEND))
    return torch.from_numpy(total.reshape(2, *size)).float()


def stacked(counts: Sequence[Marginals], twice: bool = False) -> Prior:
    """The priors of several parties as the cohort has them: relations one party after the other, as many columns as the
    largest needs. `twice`: see `Marginals.prior`.
    """
    widest = max(each.tails.shape[1] for each in counts)
    made: list[list[Tensor]] = [[], []]
    for each in counts:
        prior = each.prior(twice)
        for tables, table in zip(made, (prior.tails, prior.heads), strict=True):
            tables.append(torch.nn.functional.pad(table, (0, widest - table.shape[1])))
    return Prior(torch.cat(made[0]), torch.cat(made[1]))
