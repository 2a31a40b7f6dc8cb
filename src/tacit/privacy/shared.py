"""S4 among parties: each releases noisy counts of its own triples, a server adds them up, and all get the sum.

What each sends carries its noise already, so the server and the others learn no more than what that cost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from tacit.draws import Secret
from tacit.federation.messages import SERVER, Inbox, Message
from tacit.federation.star import InProcess, agree
from tacit.graph import Graph
from tacit.models.tables import Prior
from tacit.privacy.marginals import Marginals

Tensor = Any
SEND, GIVE = 2, 3
"""Phases before round 1, after names and places."""


def own_counts(graphs: Sequence[Graph], sigma: float, secret: Secret) -> list[Marginals]:
    """What each party releases of its own triples."""
    return [Marginals.release(graph, sigma, secret, party) for party, graph in enumerate(graphs)]


def shared_counts(graphs: Sequence[Graph], sigma: float, secret: Secret, transport: InProcess) -> list[Marginals]:
    """What each party knows of the sum of all parties' noisy counts: the cells of its own names.

    How many parties have noise in a cell follows from the names, which the server knows.
    """
    entities, relations = (agree(graphs, part, transport, "cpu", False) for part in ("entity", "relation"))
    released = own_counts(graphs, sigma, secret)
    size = (relations[0], entities[0])
    tails, heads, noises = (torch.zeros(size) for _ in range(3))
    for party, mine in enumerate(released):
        values = torch.cat([mine.tails, mine.heads], 1)
        transport.send([Message("marginals", 0, SEND, party, SERVER, {"part": "relation"}, {"values": values})])
        rows = {party: len(values)}
        [message] = transport.receive(Inbox("marginals", "relation", 0, SEND, SERVER, rows, values.shape[1])).messages()
        where = relations[1][party][:, None], entities[1][party][None, :]
        one, two = message.arrays["values"].chunk(2, 1)
        tails.index_put_(where, one, accumulate=True)
        heads.index_put_(where, two, accumulate=True)
        noises.index_put_(where, torch.ones(()), accumulate=True)
    found = []
    for party in range(len(graphs)):
        where = relations[1][party][:, None], entities[1][party][None, :]
        values = torch.cat([tails[where], heads[where]], 1)
        transport.send([Message("marginals", 0, GIVE, SERVER, party, {"part": "relation"}, {"values": values})])
        rows = {SERVER: len(values)}
        [message] = transport.receive(Inbox("marginals", "relation", 0, GIVE, party, rows, values.shape[1])).messages()
        one, two = message.arrays["values"].chunk(2, 1)
        found.append(Marginals(one.contiguous(), two.contiguous(), sigma * math.sqrt(2) * noises[where].sqrt()))
    return found


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
