"""Several parties as one block-diagonal model: stacked tables, one step for all of them.

Every quantity of a party is an entry of a vector over parties. A party that is inactive does not move: not its rows,
not its optimizer's memory, not its count of steps. A real party is a cohort of one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from tacit.draws import Purpose, Secret
from tacit.errors import TacitError
from tacit.kernels.contract import Gradients
from tacit.kernels.moves import Mover, corrections, mover_for
from tacit.models import Layout, Part, Scorer, Tables
from tacit.models.tables import PARTS
from tacit.optimizers import Optimizer

Tensor = Any


@dataclass(frozen=True)
class SecretNoise:
    """Normal noise on every number of every row, touched or not, of all tables of the active parties.

    It follows the key, the party's number and its count of steps: two cohorts may never share a key.

    Attributes
    ----------
    deviation
        (parties,): of each number of a sum of clipped gradients; the clip times the noise multiplier.
    kept
        (entity rows,) bool: the entity rows that are released at all, which has to be known to all; default: every one.
    """

    secret: Secret
    deviation: Tensor
    kept: Tensor | None = None

    def __post_init__(self) -> None:
        if not bool((self.deviation.isfinite() & (self.deviation >= 0)).all()):
            raise TacitError("the deviation of noise is a number, at least 0")

    def add(self, gradients: Gradients, layout: Layout, steps: Tensor, active: Tensor) -> None:
        """Party by party, from its own stream at its own count of steps: what fused kernels are held against."""
        tables, device = gradients.tables, steps.device
        for party in active.nonzero()[:, 0].tolist():
            own = {
                Purpose.NOISE_ENTITY: [tables.entity[layout.rows("entity", party)]],
                Purpose.NOISE_RELATION: [tables.relation[layout.rows("relation", party)]],
                Purpose.NOISE_SHARED: [tensor[party] for tensor in tables.shared],
            }
            for purpose, tensors in own.items():
                size, number, step = sum(t.numel() for t in tensors), layout.numbers[party], int(steps[party])
                if not size:
                    continue
                if len(tensors) == 1:
                    self.secret.add_normals(purpose, number, step, float(self.deviation[party]), tensors[0])
                    continue
                noise = self.secret.normal(purpose, number, step, size, device) * self.deviation[party]
                for tensor, values in zip(tensors, noise.split([t.numel() for t in tensors]), strict=True):
                    tensor += values.to(tensor.dtype).reshape(tensor.shape)
        if self.kept is not None:
            tables.entity.mul_(self.kept[:, None])


class Cohort:
    """Tables, gradients and optimizer state of the parties of a layout.

    Attributes
    ----------
    steps
        (parties,) int64: how many steps each party has taken. Draws of negatives follow it.
    epochs
        (parties,) int64: how many times each party has gone through its triples. Shuffles follow it.
    moments
        (parties,) int64: steps since the optimizer's memory was last reset; of several memories (memories, parties).
    pace
        (parties,): what the learning rate is multiplied by; whoever drives the cohort sets it.
    which
        (parties,) int64: which of the optimizer's memories a step reads and writes, if there are several (`memories`):
        each stands after the one before, in tables of so many times the rows.
    """

    def __init__(self, scorer: Scorer, tables: Tables, layout: Layout, optimizer: Optimizer, memories: int = 1):
        self.scorer, self.tables, self.layout, self.optimizer = scorer, tables, layout, optimizer
        device = tables.entity.device
        self.gradients = Gradients(tables.like(torch.zeros_like))
        self.memory = [
            tables.like(lambda tensor: torch.zeros_like(tensor).repeat(memories, *[1] * (tensor.dim() - 1)))
            for _ in range(optimizer.memory)
        ]
        self.steps, self.epochs, self.moments, self.which = (
            torch.zeros(len(layout), dtype=torch.int64, device=device) for _ in range(4)
        )
        self.memories = memories
        if memories > 1:
            self.moments = self.moments.repeat(memories, 1)
        self.pace = torch.ones(len(layout), dtype=tables.entity.dtype, device=device)
        self.owner = {part: layout.owner(part, device) for part in PARTS}
        self.movers = {part: self._mover(part) for part in PARTS}

    def finish(
        self, divisor: Tensor, active: Tensor, *, noise: SecretNoise | None = None, relation_scale: float = 1.0
    ) -> None:
        """End a step: noise, the mean over `divisor` (parties,), the optimizer, the constraints; buffers become empty.

        This also runs when no example was drawn: noise is due all the same.
        """
        if noise is not None:
            self.protect(noise, active)
        if relation_scale != 1.0:
            self.gradients.tables.relation.div_(relation_scale)
        self.move(divisor, active, whole=bool(active.all()))

    def protect(self, noise: SecretNoise, active: Tensor) -> None:
        """Add noise to what was added up."""
        if self.optimizer.touched_only:
            raise TacitError("an optimizer that moves only touched rows would tell which rows were touched")
        noise.add(self.gradients, self.layout, self.steps, active)

    def move(self, divisor: Tensor, active: Tensor, *, whole: bool = False) -> None:
        """The mean, the optimizer, the constraints; buffers become empty. `whole`: every party is known to be active.

        Nothing here waits for a GPU.
        """
        gradients = self.gradients
        self.steps += active
        if self.memories == 1:
            self.moments += active
            moments = self.moments
        else:
            self.moments.scatter_add_(0, self.which[None], active.to(torch.int64)[None])
            moments = self.moments.gather(0, self.which[None])[0]
        corrected = corrections(self.optimizer, moments, self.pace)
        for part in PARTS:
            gradient, mover = getattr(gradients.tables, part), self.movers[part]
            if mover is None:
                self._move(part, divisor, moments, None if whole else active)
                continue
            mover(
                self.optimizer, getattr(self.tables, part), gradient, [getattr(memory, part) for memory in self.memory],
                self.owner[part], divisor.float(), active, corrected, self.which,
                self.scorer.frozen if part == "relation" else 0,
            )  # fmt: skip
        parties = len(self.layout)
        for place, table in enumerate(self.tables.shared):
            shape = (-1, *[1] * (table.dim() - 1))
            memory, own = [tables.shared[place] for tables in self.memory], None
            if self.memories > 1:
                own = self.which * parties + torch.arange(parties, device=table.device)
                memory = [tensor[own] for tensor in memory]
            update = self.optimizer.moved(
                table,
                gradients.tables.shared[place] / divisor.reshape(shape),
                tuple(memory),
                moments.reshape(shape).clamp(min=1),
                self.pace.reshape(shape),
            )
            _keep(table, memory, update, None if whole else active.reshape(shape))
            if own is not None:
                for tables, kept in zip(self.memory, memory, strict=True):
                    tables.shared[place][own] = kept
        self._empty()

    def _mover(self, part: Part) -> Mover | None:
        """The kernel that moves a whole table, if there is one and no row is constrained."""
        table = getattr(self.tables, part)
        row = table[:1]
        if self.scorer.constrain(part, row) is not row:
            return None
        return mover_for(table.device.type, self.optimizer, table.dtype)

    def _move(self, part: Part, divisor: Tensor, moments: Tensor, active: Tensor | None) -> None:
        table, gradient = getattr(self.tables, part), getattr(self.gradients.tables, part)
        memory, owner = [getattr(tables, part) for tables in self.memory], self.owner[part]
        rows, places = None, None
        if self.optimizer.touched_only:
            rows = places = self._touched(part)
            table, gradient, owner = table[rows], gradient[rows], owner[rows]
        if self.memories > 1:
            every = torch.arange(len(self.owner[part]), device=owner.device) if rows is None else rows
            places = every + self.which[owner] * len(self.owner[part])
        if places is not None:
            memory = [tensor[places] for tensor in memory]
        # A scalar instead of a column: no pass over memory for it. By a number: a tensor would be waited for.
        party: Any = 0 if len(self.layout) == 1 else owner[:, None]
        gradient = gradient / divisor.to(table.dtype)[party]
        moved, remembered = self.optimizer.moved(
            table, gradient, tuple(memory), moments[party].clamp(min=1), self.pace[party]
        )
        if part == "relation" and self.scorer.frozen:
            moved[:, -self.scorer.frozen :] = table[:, -self.scorer.frozen :]
        moved = self.scorer.constrain(part, moved)
        _keep(table, memory, (moved, remembered), None if active is None else active[party])
        if rows is not None:
            getattr(self.tables, part)[rows] = table
        if places is not None:
            for whole, tensor in zip(self.memory, memory, strict=True):
                getattr(whole, part)[places] = tensor

    def _touched(self, part: Part) -> Tensor:
        lists = self.gradients.entity_rows if part == "entity" else self.gradients.relation_rows
        if not lists:
            return torch.zeros(0, dtype=torch.int64, device=self.steps.device)
        rows = torch.cat([rows.reshape(-1) for rows in lists]).unique()
        return rows[rows >= 0]  # what is absent is no row

    def _empty(self) -> None:
        """Empty the buffers. What a kernel moved is empty already; where only some rows are moved, others are."""
        for part in PARTS:
            if self.optimizer.touched_only:
                getattr(self.gradients.tables, part)[self._touched(part)] = 0.0
            elif self.movers[part] is None:
                getattr(self.gradients.tables, part).zero_()
        for tensor in self.gradients.tables.shared:
            tensor.zero_()
        self.gradients.forget()

    def between_rounds(self, optimizer_state: Literal["keep", "reset"]) -> None:
        """What becomes of the optimizer's memory between rounds of a federation."""
        if optimizer_state == "reset":
            self.moments.zero_()
            for tables in self.memory:
                for tensor in tables.tensors().values():
                    tensor.zero_()

    def state(self) -> dict[str, Tensor]:
        """Everything that a resumed run needs, by name."""
        found = {f"tables.{name}": tensor for name, tensor in self.tables.tensors().items()}
        for which, memory in enumerate(self.memory):
            found |= {f"memory.{which}.{name}": tensor for name, tensor in memory.tensors().items()}
        return found | {"steps": self.steps, "epochs": self.epochs, "moments": self.moments}

    def load(self, state: dict[str, Tensor]) -> None:
        """Take over a `state`, in place."""
        for name, tensor in self.state().items():
            tensor.copy_(state[name])


def _keep(table: Tensor, memory: list[Tensor], after: tuple[Tensor, tuple[Tensor, ...]], active: Tensor | None) -> None:
    """Write what the optimizer made of rows and memory, where the party is active."""
    for old, new in zip((table, *memory), (after[0], *after[1]), strict=True):
        old.copy_(new if active is None else torch.where(active, new, old))
