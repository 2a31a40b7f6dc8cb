"""Weights by their address: what is given out under an address is what has it, or nothing.

Weights are a file of tensors as a private run shares them: entity and relation rows, and the names of both.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tacit.errors import BadInput, Refused, TacitError
from tacit.folders import sync_folder, write_whole
from tacit.graph import name_fault
from tacit.ledger.cbor import CID, RAW
from tacit.ledger.record import Model
from tacit.models.tables import LARGEST_VALUE
from tacit.tensors import parse_tensors

Tensor = Any


class Withheld(TacitError):
    """Weights that nobody gives."""


class Blobs(Protocol):
    """Where weights are."""

    def address(self, data: bytes) -> CID:
        """The address that these bytes have here."""
        ...

    def put(self, data: bytes) -> CID:
        """Keep bytes; they are kept when this returns."""
        ...

    def get(self, cid: CID, largest: int) -> bytes:
        """The bytes of this address; `Withheld`, or refused if there are others in its place, or more."""
        ...


class BlobFolder:
    """A file for each address. A file appears whole or not at all, and is verified whenever it is read."""

    def __init__(self, folder: Path):
        self.folder = Path(folder)

    def _path(self, cid: CID) -> Path:
        text = str(cid)
        return self.folder / text[-2:] / text

    def address(self, data: bytes) -> CID:
        return CID.of(data, RAW)

    def put(self, data: bytes, codec: int = RAW) -> CID:
        cid = CID.of(data, codec)
        path = self._path(cid)
        with suppress(TacitError):  # it is not there, or damaged: then it is written anew
            if self.get(cid, len(data)) == data:
                return cid
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f"{path.name}.{os.getpid()}")
        write_whole(draft, data, mode=0o644)
        os.replace(draft, path)
        sync_folder(path.parent)
        return cid

    def get(self, cid: CID, largest: int) -> bytes:
        try:
            with open(self._path(cid), "rb") as file:
                data = file.read(largest + 1)
        except FileNotFoundError:
            raise Withheld(f"the weights {cid} are not here: ask their provider for them.") from None
        if len(data) > largest:
            raise Refused(f"the weights {cid} have more than {largest:,} bytes")
        if CID.of(data, cid.codec) != cid:
            raise Refused(f"the file of the weights {cid} holds other bytes: it was changed, or is damaged")
        return data

    def __iter__(self) -> Iterator[str]:
        """The names of all files."""
        return (path.name for path in sorted(self.folder.glob("??/*")))


@dataclass(frozen=True)
class Rows:
    """Weights, read and checked: (names, width) entity and relation rows with their names."""

    entity: Tensor
    relation: Tensor
    entities: tuple[str, ...]
    relations: tuple[str, ...]

    @classmethod
    def of(cls, data: bytes, model: Model) -> Rows:
        """Refused: what is no such file, or rows that are not this model's."""
        try:
            tensors, words = parse_tensors(data)
        except BadInput as error:
            raise Refused(f"are no rows: {error}") from None
        if words.get("schema") != "tacit.shared/1":
            raise Refused(f"are no rows: expected the schema 'tacit.shared/1', not {words.get('schema')!r}")
        found: dict[str, Any] = {}
        for part, plural in (("entity", "entities"), ("relation", "relations")):
            rows, width = tensors.get(part), getattr(model, part)
            text = words.get(plural, "")
            if rows is None or rows.ndim != 2 or rows.dtype.itemsize < 2 or not rows.is_floating_point():
                raise Refused(f"have no {part} rows")
            if rows.shape[1] != width:
                raise Refused(f"have {part} rows of {rows.shape[1]:,} numbers, where the model has {width:,}")
            fits = text.count("\n") + 1 == len(rows)  # before there are as many names as a file has bytes
            names = tuple(text.split("\n")) if fits else ()
            if not fits or len(set(names)) != len(names) or any(map(name_fault, names)):
                raise Refused(f"have {len(rows):,} {part} rows, and not a name for each")
            rows = rows.float()  # before it is looked at: a number of 64 bits may be too large for 32
            if not bool((rows.abs() <= LARGEST_VALUE).all()):  # nor if it is NaN
                raise Refused(f"have {part} rows with numbers that are not finite, or above {LARGEST_VALUE:,.0f}")
            found |= {part: rows, plural: names}
        return cls(**found)
