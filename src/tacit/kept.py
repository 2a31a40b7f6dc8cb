"""A folder in which a training goes on: one process at a time, journals of what happened, checkpoints to resume from.

A checkpoint is one file that appears whole or not at all. It says how long each journal was when it was written; what a
journal has beyond that belongs to work that is done again, and is cut off.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Protocol

from tacit.errors import BadInput, TacitError
from tacit.folders import PRIVATE, log_to
from tacit.tensors import load_tensors, save_tensors

LOG = logging.getLogger(__name__)
CHECKPOINT = "tacit.checkpoint/1"
KEPT = 2
"""Checkpoints that stay: the last, and the one before it."""
Origin = Callable[[str], dict[str, str]]


class Resumable(Protocol):
    """What can be put back to where it was."""

    def state(self) -> dict[str, Any]: ...

    def load(self, state: dict[str, Any]) -> None: ...


class Kept:
    """The folder of a training.

    Parameters
    ----------
    origin
        What ties a file of tensors to this training, given the file's schema.
    journals
        The files that grow, by name.
    """

    def __init__(self, path: Path, origin: Origin, journals: Mapping[str, Path]):
        self.path, self.origin, self.journals = path, origin, journals

    def check_origin(self, where: Path, facts: Mapping[str, str], schema: str) -> None:
        """Refuse a file of tensors that belongs to another training."""
        for key, wanted in self.origin(schema).items():
            if facts.get(key) != wanted:
                raise BadInput(f"{where}: was made with another {key} than this run has now.")

    @contextlib.contextmanager
    def training(
        self, what: Resumable, resumed: Callable[[], None] = lambda: None
    ) -> Iterator[tuple[dict[str, IO[bytes]], Callable[[int], None]]]:
        """Put `what` back to its last checkpoint; gives the journals, open, and what writes a checkpoint of a number.

        `resumed` is called once the journals are as they were then, and before `what` goes on.
        """
        with locked(self.path) as lock_is_ours, log_to(self.path), contextlib.ExitStack() as open_files:
            self._load(what)
            files: dict[str, IO[bytes]] = {}
            for name, path in self.journals.items():
                files[name] = open_files.enter_context(open(path, "ab"))
                files[name].seek(0, os.SEEK_END)
            resumed()

            def checkpoint(number: int) -> None:
                for file in files.values():
                    file.flush()
                    os.fsync(file.fileno())
                if not lock_is_ours():
                    raise TacitError(f"{self.path} was replaced by another run: this one ends.")
                self._save(what, number, {name: file.tell() for name, file in files.items()})

            yield files, checkpoint

    def _save(self, what: Resumable, number: int, sizes: Mapping[str, int]) -> None:
        """One file; then the oldest goes."""
        folder = self.path / PRIVATE / "checkpoints"
        facts = self.origin(CHECKPOINT) | {"journals": json.dumps(sizes, sort_keys=True), "at": str(number)}
        save_tensors(folder / f"epoch-{number:08d}.safetensors", what.state(), facts)
        for old in sorted(folder.glob("epoch-*.safetensors"))[:-KEPT]:
            old.unlink()

    def _cut(self, sizes: Mapping[str, int]) -> None:
        """What journals have beyond a checkpoint is of work that is done again."""
        for name, path in self.journals.items():
            with open(path, "ab") as file:
                file.truncate(min(sizes.get(name, 0), file.seek(0, os.SEEK_END)))

    def _load(self, what: Resumable) -> None:
        """Go back to the last checkpoint that is whole: first the journals, which `what` may read when it does."""
        folder = self.path / PRIVATE / "checkpoints"
        folder.mkdir(mode=0o700, exist_ok=True)
        failure: BadInput | None = None
        for path in sorted(folder.glob("epoch-*.safetensors"), reverse=True):
            try:
                state, facts = load_tensors(path)
                self.check_origin(path, facts, CHECKPOINT)
                journals = json.loads(facts["journals"]) if "journals" in facts else {"metrics": facts["journal"]}
                self._cut({str(name): int(size) for name, size in journals.items()})
                what.load(state)
            except (BadInput, LookupError, ValueError, AttributeError, TypeError, RuntimeError) as error:
                LOG.warning("a checkpoint is damaged or belongs to another run, and is passed over")
                failure = failure or (error if isinstance(error, BadInput) else BadInput(f"{path}: is damaged."))
                continue
            LOG.info("resumed after %s", facts.get("at"))
            return
        if failure is not None:
            raise failure
        self._cut({})


@contextlib.contextmanager
def locked(path: Path) -> Iterator[Callable[[], bool]]:
    """One process trains a run at a time; gives a way to ask whether the run is still there, and still this one."""
    lock = path / PRIVATE / "lock"
    with open(lock, "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise TacitError(f"{path} is being trained by another process.") from None
        yield lambda: lock.exists() and os.path.samestat(lock.stat(), os.fstat(file.fileno()))
