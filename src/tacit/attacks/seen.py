"""What a view says of rows: who told which names, what a party sent and was given, what it has itself.

Everything here reads messages that the adversary saw, and nothing else. Where there is nothing to read, `Nothing` says
why: that is a result of an attack too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tacit.errors import TacitError
from tacit.federation.messages import SERVER
from tacit.federation.transcript import GIVE, Known, View
from tacit.federation.vocabulary import names_in
from tacit.graph import Graph, Vocab

Tensor = Any


class Nothing(TacitError):
    """The adversary saw nothing that this attack could use."""


@dataclass(frozen=True)
class Candidates:
    """Triples that an attacker asks of whether they are in the victim's training set; by names, in its own order."""

    victim: int
    entities: Vocab
    relations: Vocab
    triples: np.ndarray
    """(n, 3) ids in these vocabularies: head, relation, tail."""

    def __len__(self) -> int:
        return len(self.triples)

    def at(self, entities: Vocab, relations: Vocab | None) -> np.ndarray:
        """(n, 3) ids in other vocabularies, -1: not there. Without relations these are -1."""
        place = self.entities.positions(entities)
        kind = self.relations.positions(relations) if relations is not None else np.full(len(self.relations), -1)
        h, r, t = self.triples.T
        return np.stack([place[h], kind[r], place[t]], 1).astype(np.int64)


def known(view: View) -> Known:
    """What everybody knows of the federation."""
    if view.known is None:
        raise Nothing("nothing is shared here: parties that never meet learn nothing of each other")
    return view.known


def own_graph(view: View) -> Graph:
    """The adversary's own."""
    if view.graph is None:
        raise Nothing("this adversary has no graph of its own")
    return view.graph


def names(view: View, party: int, part: str | None = None) -> Vocab:
    """A party's names, in their order: its own, or as it told the server. `part`: default, of what is shared."""
    part = part or known(view).part
    if party == view.adversary.party:
        graph = own_graph(view)
        return graph.entities if part == "entity" else graph.relations
    for _, message in view.messages(kind="names", sender=party, part=part):
        return names_in(message)
    raise Nothing("the server knows no names: parties agreed on them privately")


def sent(view: View, party: int, number: int) -> Tensor:
    """(rows, width) what a party sent in a round, in the order of its names."""
    for _, message in view.messages(kind="rows", round=number, sender=party):
        return _whole(message.arrays)
    if any(record.sender == party and record.round == number for record in view.records):
        if any(record.kind == "rows" and record.sender == party for record in view.records):
            raise Nothing(f"what was sent in round {number} was not kept: set federation.keep_every")
        raise Nothing("a party's rows travel under masks: who sees them sees random numbers, and sums of all parties")
    raise Nothing(f"this adversary sees nothing that party {party} sends in round {number}")


def given(view: View, party: int, number: int) -> Tensor:
    """(rows, width) what a party was given for a round, in the order of its names."""
    for _, message in view.messages(kind="rows", phase=GIVE, round=number, sender=SERVER, receiver=party):
        rows = _whole(message.arrays)
        if party == view.adversary.party and _names_are_private(view):
            return rows[own(view, last(view, number))["places"]]  # the server gives all rows to everyone
        return rows
    raise Nothing(f"what was given for round {number} was not kept, or there was no such round")


def own(view: View, number: int) -> dict[str, Tensor]:
    """What the adversary has itself and does not send, as it was after its training in a round."""
    if not number:
        raise Nothing("no rows are trained here: what is released is noisy counts alone")
    if number not in view.own:
        raise Nothing(f"the adversary's own rows of round {number} were not kept, or it did not train")
    return dict(view.own[number])


def last(view: View, number: int) -> int:
    """The latest round, not after this one, that the adversary's own rows were kept of."""
    return max((each for each in view.own if each <= number), default=number)


def kept_rounds(view: View) -> list[int]:
    """Rounds after which there is something to attack: what was sent in them was kept."""
    return sorted({record.round for record, _ in view.messages() if record.round and record.phase != GIVE})


def tables(view: View, number: int, shared: Tensor) -> tuple[Tensor, Tensor]:
    """Entity and relation rows: the adversary's own, but for the shared ones, which are these."""
    mine = own(view, number)
    return (shared, mine["relation"]) if known(view).part == "entity" else (mine["entity"], shared)


def scores(view: View, entity: Tensor, relation: Tensor, ids: np.ndarray, weights: dict[str, Tensor]) -> np.ndarray:
    """How plausible candidates are by these rows, larger for what is truer; NaN where there is no row."""
    found = np.full(len(ids), np.nan)
    there = (ids >= 0).all(1)
    h, r, t = torch.from_numpy(ids[there]).unbind(1)
    shared = tuple(weights[name][0] for name in sorted(weights) if name.startswith("shared."))
    rows = (entity[h].double(), relation[r].double(), entity[t].double())
    found[there] = known(view).scorer.score(*rows, tuple(w.double() for w in shared)).numpy()
    return found


def _names_are_private(view: View) -> bool:
    return any(record.kind == "union" and record.part == known(view).part for record in view.records)


def _whole(arrays: Any) -> Tensor:
    if "ids" in arrays:
        raise Nothing("only rows that changed are sent: an attack on those is not there yet")
    return arrays["values"].float()
