"""S4 among parties: each releases noisy counts of its own triples, a server adds them up, and all get the sum.

What each sends carries its noise already, so the server and the others learn no more than what that cost.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from tacit.draws import Secret
from tacit.errors import Refused, TacitError
from tacit.federation.messages import SERVER, Inbox, Message
from tacit.federation.secure import FixedPoint, Member, Summing
from tacit.federation.secured import Secured
from tacit.federation.transport import InProcess, Talk
from tacit.federation.vocabulary import added, added_up, placed_names, told_names
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
    """In one process: what each party knows of the sum of all parties' noisy counts."""
    released = own_counts(graphs, sigma, secret)
    members, server = secured.for_one_sum() if secured is not None else ({}, None)
    talks = {i: told_counts(graph, released[i], i, members.get(i)) for i, graph in enumerate(graphs)}
    _, known = transport.meet(added_counts(len(graphs), server), talks)
    return [known[i] for i in talks]


def told_counts(graph: Graph, own: Marginals, party: int, member: Member | None) -> Talk[Marginals]:
    """A party's side: it sends its noisy counts, and is told the sum, the cells of its own names.

    `member`: of a secure sum, of whole multiples of a step that is small beside the noise; None: the server sees its
    counts. How many parties have noise in a cell follows from the names, which the server knows.
    """
    entities = yield from told_names(graph.entities, "entity", party)
    relations = yield from told_names(graph.relations, "relation", party)
    values = torch.cat([own.tails, own.heads], 1)
    if member is None:
        said = [Message("marginals", 0, SEND, party, SERVER, {"part": "relation"}, {"values": values})]
    else:
        whole, said = np.zeros((2, relations[0], entities[0])), []
        where = np.ix_(relations[1].numpy(), entities[1].numpy())
        whole[0][where], whole[1][where] = own.tails.numpy(), own.heads.numpy()
        words, beyond = FixedPoint(LARGEST_COUNT, len(member.terms.names)).encode(whole.reshape(-1))
        if beyond:
            LOG.warning("%d noisy counts were beyond %g, and count as that", beyond, LARGEST_COUNT)
        yield from added(words, "relation", member, SEND)
    # Tails, heads, and how many parties' noise is in each.
    inbox = Inbox("marginals", "relation", 0, GIVE, party, {SERVER: len(values)}, 3 * len(graph.entities))
    [told] = (yield said, inbox).messages()
    tails, heads, noises = (part.contiguous() for part in told.arrays["values"].chunk(3, 1))
    if bool((noises < 1).any()):
        raise Refused("counts without this party's own noise")
    return Marginals(tails, heads, own.deviation * noises.sqrt())


def added_counts(count: int, server: Summing | None) -> Talk[None]:
    """The server's side, of so many parties. `server`: of a secure sum."""
    entities = yield from placed_names(count, "entity")
    relations = yield from placed_names(count, "relation")
    size, parties = (relations[0], entities[0]), range(len(entities[1]))
    where = [(relations[1][party][:, None], entities[1][party][None, :]) for party in parties]
    total, noises = torch.zeros(2, *size), torch.zeros(size)
    for cells in where:
        noises.index_put_(cells, torch.ones(()), accumulate=True)
    if server is not None:
        words = yield from added_up(2 * size[0] * size[1], "relation", server, SEND)
        total = torch.from_numpy(FixedPoint(LARGEST_COUNT, len(parties)).decode(words).reshape(2, *size)).float()
    else:
        rows, widths = ({party: length * len(union[1][party]) for party in parties}
                        for length, union in ((1, relations), (2, entities)))  # fmt: skip
        inbox = yield [], Inbox("marginals", "relation", 0, SEND, SERVER, rows, widths)
        if inbox.missing:
            raise TacitError(f"{len(inbox.missing)} parties did not send their noisy counts")
        for message in inbox.messages():
            for side, values in enumerate(message.arrays["values"].chunk(2, 1)):
                total[side].index_put_(where[message.sender], values, accumulate=True)
    said = [
        Message("marginals", 0, GIVE, SERVER, party, {"part": "relation"},
                {"values": torch.cat([total[0][cells], total[1][cells], noises[cells]], 1)})
        for party, cells in zip(parties, where, strict=True)
    ]  # fmt: skip
    yield said, None


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
