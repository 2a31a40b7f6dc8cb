"""What records come to: models, their updates, who builds on whom, what was rejected. A pure function of the records.

Records are taken one after the other in the order of the log, each at a cost that does not depend on how many there
are. What may not stand in the ledger is refused with the reason, and is as if it had never been. A record can only name
records before it, so there are no cycles; one that names what is not there is refused, and so is all that is built on
it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tacit.errors import Refused, TacitError, excerpt
from tacit.federation.keys import fingerprint
from tacit.ledger.cbor import CID
from tacit.ledger.committee import Committee, Outcome
from tacit.ledger.record import Beacon, Genesis, Model, Record, Revocation, Update, Verdict
from tacit.privacy.events import Segment, Spent, joined


@dataclass(slots=True, eq=False)
class Node:
    """An update in its place."""

    cid: CID
    by: bytes
    update: Update
    number: int
    """Among the updates of its model."""
    height: int
    """Longest way down to the model."""
    parents: tuple[Node, ...]
    children: list[Node] = field(default_factory=list)
    live: int = 0
    """Children that are not rejected."""
    rejected: bool = False


@dataclass(eq=False)
class Branch:
    """A model and its updates."""

    cid: CID
    model: Model
    by: bytes
    committee: Committee
    nodes: list[Node] = field(default_factory=list)
    """In the order of the log."""
    open_ends: dict[CID, Node] = field(default_factory=dict)
    owners: dict[CID, bytes] = field(default_factory=dict)
    """Of weights: who named them first."""

    @property
    def tips(self) -> list[Node]:
        """Updates that are not rejected, and that no update builds on which is not: the newest last."""
        return sorted(self.open_ends.values(), key=lambda node: node.number)


class Dag:
    """The state of a ledger. `genesis`: the address of the first record that is taken; None: of any."""

    def __init__(self, genesis: CID | None = None):
        self.expected = genesis
        self.genesis: tuple[CID, Genesis] | None = None
        self.branches: dict[CID, Branch] = {}
        self.names: dict[str, CID] = {}
        self.nodes: dict[CID, Node] = {}
        self.counts: dict[str, int] = {}
        self._known: set[CID] = set()
        self.revoked: set[bytes] = set()
        """Keys whose records are refused from now on; what they signed before stands."""
        self._admitted: dict[bytes, str] = {}
        self._founder = b""

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, cid: CID) -> bool:
        return cid in self._known

    # -- taking a record -----------------------------------------------------------------------------------------------

    def add(self, record: Record | bytes, *, verified: bool = False) -> Record:
        """Take a record, or refuse it with the reason. `verified`: its signature was found right before."""
        record = self.check(record, verified=verified)
        body, by = record.body, record.by
        match body:
            case Genesis():
                self.genesis = (record.cid, body)
                self._admitted, self._founder = {key: name for name, key in body.keys}, by
            case Model():
                self.branches[record.cid] = Branch(record.cid, body, by, Committee(record.cid, body))
                self.names[body.name] = record.cid
            case Update():
                self._grow(record.cid, by, body)
            case Beacon():
                self.branches[body.model].committee.add_beacon(body, by)
            case Verdict():
                for rejected in self.branches[body.model].committee.add_verdict(body, by):
                    self._cut(self.nodes[rejected])
            case Revocation():
                self.revoked.add(body.key)
        self._known.add(record.cid)
        self.counts[body.kind] = self.counts.get(body.kind, 0) + 1
        return record

    def check(self, record: Record | bytes, *, verified: bool = False) -> Record:
        """What `add` would say, without adding it."""
        if not isinstance(record, Record):
            record = Record.decode(record)
        if record.cid in self._known:
            raise Refused("stands in the ledger already")
        if self.genesis is None:
            self._check_first(record)
        else:
            self._check_writer(record, self.genesis)
        if not verified:
            record.verify()
        if self.genesis is not None:
            self._check_next(record, self.genesis)
        return record

    def _check_first(self, record: Record) -> None:
        if not isinstance(record.body, Genesis):
            raise Refused(f"of kind {record.body.kind} comes before the genesis")
        if self.expected is not None and record.cid != self.expected:
            raise Refused(f"is the genesis of another ledger; expected {self.expected}")

    def _check_writer(self, record: Record, genesis: tuple[CID, Genesis]) -> None:
        """What is told by the key alone: whoever may not write gets no work done by those who read."""
        if isinstance(record.body, Genesis):
            raise Refused("is a second genesis: a ledger begins once")
        if (why := self.barred(record.by, genesis[1])) is not None:
            raise Refused(f"is by the key {fingerprint(record.by)}, which {why}")

    def barred(self, key: bytes, genesis: Genesis | None = None) -> str | None:
        """Why nothing that this key signs is added; None: it may write."""
        if genesis is None:
            assert self.genesis is not None
            genesis = self.genesis[1]
        if genesis.admission == "listed" and key not in self._admitted:
            return "is not admitted"
        return "was revoked before" if key in self.revoked else None

    def _check_next(self, record: Record, genesis: tuple[CID, Genesis]) -> None:
        body, by = record.body, record.by
        assert not isinstance(body, Genesis)
        if isinstance(body, Model | Revocation) and body.genesis != genesis[0]:
            raise Refused("is of another ledger")
        if isinstance(body, Revocation):
            self._check_revocation(body, by)
            return
        if isinstance(body, Model):
            if body.name in self.names:
                raise Refused(f"opens a model by the name {excerpt(body.name)}, which there is already")
            return
        branch = self.branches.get(body.model)
        if branch is None:
            raise Refused(f"is about the model {body.model}, which is not in this ledger")
        match body:
            case Update():
                self._check_update(body, branch)
            case Beacon():
                branch.committee.check_beacon(body, by)
            case Verdict():
                branch.committee.check_verdict(body, by)

    def _check_revocation(self, revocation: Revocation, by: bytes) -> None:
        if by not in (revocation.key, self._founder):
            raise Refused(
                f"revokes the key of {self.provider(revocation.key)}: only who began the ledger may, or itself"
            )
        if revocation.key in self.revoked:
            raise Refused("revokes a key that was revoked before")
        if self._admitted and revocation.key not in self._admitted:
            raise Refused("revokes a key that was never admitted")

    def _check_update(self, update: Update, branch: Branch) -> None:
        if len(update.parents) > branch.model.parents:
            raise Refused(f"has {len(update.parents)} parents, where {branch.model.parents} are the most")
        if update.size > branch.model.largest:
            raise Refused(f"has weights of {update.size:,} bytes, where {branch.model.largest:,} are the most")
        for parent in update.parents:
            if parent == branch.cid:
                if len(update.parents) > 1:
                    raise Refused("has the model as a parent beside others: it is that of first updates")
                continue
            node = self.nodes.get(parent)
            if node is None:
                what = "is no update" if parent in self._known else "is not in the ledger before it"
                raise Refused(f"has the parent {parent}, which {what}")
            if node.update.model != branch.cid:
                raise Refused(f"has the parent {parent}, which is of another model")

    def _grow(self, cid: CID, by: bytes, update: Update) -> None:
        branch = self.branches[update.model]
        parents = tuple(self.nodes[parent] for parent in update.parents if parent != branch.cid)
        height = 1 + max((parent.height for parent in parents), default=0)
        node = Node(cid, by, update, len(branch.nodes), height, parents)
        for parent in parents:
            parent.children.append(node)
            parent.live += 1
            branch.open_ends.pop(parent.cid, None)
        branch.nodes.append(node)
        branch.owners.setdefault(update.weights, by)
        branch.open_ends[cid] = self.nodes[cid] = node
        branch.committee.add_update(cid, by)

    def _cut(self, node: Node) -> None:
        """An update is rejected: it is no end any more, and what only it was built on is one again."""
        node.rejected = True
        ends = self.branches[node.update.model].open_ends
        ends.pop(node.cid, None)
        for parent in node.parents:
            parent.live -= 1
            if not parent.live and not parent.rejected:
                ends[parent.cid] = parent

    # -- what there is -------------------------------------------------------------------------------------------------

    @property
    def rules(self) -> Genesis:
        """Who may write."""
        if self.genesis is None:
            raise TacitError("the ledger has not begun: there is no genesis.")
        return self.genesis[1]

    def branch(self, name: str) -> Branch:
        """A model, by its name or its address."""
        if name in self.names:
            return self.branches[self.names[name]]
        for cid, branch in self.branches.items():
            if str(cid) == name:
                return branch
        known = (
            f"There are: {', '.join(self.names)}." if self.names else "There is none yet: tacit ledger init opens one."
        )
        raise TacitError(f"the ledger has no model {excerpt(name)}. {known}")

    def provider(self, key: bytes) -> str:
        """A name for people: as the genesis lists it, or a fingerprint."""
        return self._admitted.get(key) or fingerprint(key)

    def key(self, name: str) -> bytes:
        """A provider's key, by its name in the genesis; or, where everybody is admitted, as 64 hexadecimal digits."""
        for key, known in self._admitted.items():
            if known == name:
                return key
        if not self._admitted and re.fullmatch("[0-9a-f]{64}", name):
            return bytes.fromhex(name)
        known = f"There are: {', '.join(self._admitted.values())}." if self._admitted else "Say its 64 digits."
        raise TacitError(f"the ledger knows no provider {excerpt(name)}. {known}")

    def outcome(self, cid: CID) -> Outcome:
        """What the committee said of an update."""
        return self.branches[self.nodes[cid].update.model].committee.outcome(cid)

    def ancestors(self, cid: CID) -> set[CID]:
        """Every update that an update was made from, at any remove."""
        found, waiting = set[CID](), [self.nodes[cid]]
        while waiting:
            for parent in waiting.pop().parents:
                if parent.cid not in found:
                    found.add(parent.cid)
                    waiting.append(parent)
        return found

    def descends(self, cid: CID, ancestor: CID) -> bool:
        """Whether an update was made from another, at any remove."""
        goal, seen, waiting = self.nodes[ancestor], set[CID](), [self.nodes[cid]]
        while waiting:
            for parent in waiting.pop().parents:
                if parent is goal:
                    return True
                if parent.height > goal.height and parent.cid not in seen:
                    seen.add(parent.cid)
                    waiting.append(parent)
        return False

    def claimed(self, key: bytes) -> dict[str, Spent] | None:
        """All releases that a provider claims, over all of its updates, by what they protect.

        None: some of its updates are not private at all.
        """
        found: dict[str, list[Segment]] = {}
        for node in self.nodes.values():
            if node.by != key:
                continue
            if node.update.privacy is None:
                return None
            found.setdefault(node.update.privacy.unit, []).extend(node.update.privacy.releases)
        return {unit: joined(segments) for unit, segments in found.items()}

    # -- for others ----------------------------------------------------------------------------------------------------

    def json(self, branches: Sequence[Branch] | None = None) -> dict[str, Any]:
        """Everything there is to tell of it, or of some models."""
        told: dict[str, Any] = {"genesis": None, "models": []}
        if self.genesis is not None:
            cid, genesis = self.genesis
            told |= {
                "genesis": str(cid), "name": genesis.name, "admission": genesis.admission,
                "keys": [{"name": name, "fingerprint": fingerprint(key)} for name, key in genesis.keys],
                "revoked": sorted(self.provider(key) for key in self.revoked),
            }  # fmt: skip
        for branch in self.branches.values() if branches is None else branches:
            rules = {name: value for name, value in branch.model.content().items() if name != "genesis"}
            told["models"].append(
                {"model": str(branch.cid), **rules, "by": self.provider(branch.by),
                 "tips": [str(node.cid) for node in branch.tips],
                 "committees": {batch: [self.provider(key) for key in seats]
                                for batch, seats in branch.committee.seats.items()},
                 "updates": [self._told(branch, node) for node in branch.nodes]}
            )  # fmt: skip
        return told

    def _told(self, branch: Branch, node: Node) -> dict[str, Any]:
        claim = None if node.update.privacy is None else node.update.privacy.content()
        if claim is not None:
            claim["holding"] = claim["holding"].hex()
        in_favour, against = branch.committee.votes(node.cid)
        return {
            "update": str(node.cid), "by": self.provider(node.by), "number": node.number,
            "batch": branch.committee.batch_of(node.cid), "height": node.height,
            "parents": [str(parent) for parent in node.update.parents],
            "weights": str(node.update.weights), "size": node.update.size, "claims": claim,
            "outcome": branch.committee.outcome(node.cid), "for": in_favour, "against": against,
        }  # fmt: skip

    def dot(self, branches: Sequence[Branch] | None = None) -> Iterator[str]:
        """Lines of Graphviz's language: an arrow goes from an update to what it was made from."""
        yield "digraph ledger {"
        yield "  rankdir=RL; node [shape=box, fontname=sans];"
        for branch in self.branches.values() if branches is None else branches:
            yield f'  "{branch.cid}" [label={json.dumps(branch.model.name)}, shape=oval];'
            for node in branch.nodes:
                label = json.dumps(f"{node.number}: {self.provider(node.by)}")
                look = ", style=dashed, color=red" if node.rejected else ", style=bold" if not node.live else ""
                yield f'  "{node.cid}" [label={label}{look}];'
                yield from (f'  "{node.cid}" -> "{parent}";' for parent in node.update.parents)
        yield "}"
