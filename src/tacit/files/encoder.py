"""Names to numbers at the speed of Arrow: every distinct string of a file is kept once."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tacit.graph import Ids, name_fault

END = b"\n"
"""Closes every name inside the encoder, so that a block of a file can be handed over as it lies."""


def encode_fields(
    data: npt.NDArray[np.uint8], ends: npt.NDArray[np.intp], keep: npt.NDArray[np.intp] | None = None
) -> pa.DictionaryArray:
    """Values that stand one after the other in `data`, each closed by one `END` byte at the positions `ends`.

    `keep`: which of them to take; None takes all. Releases Python's lock, so that threads can do several at once.
    """
    offsets = np.empty(len(ends) + 1, np.int32)
    offsets[0] = 0
    np.add(ends, 1, out=offsets[1:], casting="unsafe")
    fields = pa.Array.from_buffers(pa.binary(), len(ends), [None, pa.py_buffer(offsets), pa.py_buffer(data)])
    fields = fields if keep is None else fields.take(pa.array(keep))
    return pc.dictionary_encode(fields, memory_pool=pa.system_memory_pool())


class Encoder:
    """Numbers the distinct values it is given, in order of appearance.

    The project's one way from names to ids, for files and databases alike. Values come in batches; each batch is
    dictionary-encoded on its own, and the dictionaries are united whenever the new ones outgrow the known one, so that
    the whole costs time linear in the input and memory linear in what is distinct.
    """

    def __init__(self) -> None:
        self._known = pa.nulls(0, pa.binary())
        self._pending: list[pa.DictionaryArray] = []
        self._pending_names = 0
        self._ids: list[Ids] = []

    def add(self, values: Iterable[str]) -> None:
        """Values as strings; bytes that were not UTF-8 may be held as surrogates."""
        closed = pa.array([value.encode("utf-8", "surrogateescape") + END for value in values], pa.binary())
        self.add_batch(closed.dictionary_encode())

    def add_batch(self, batch: pa.DictionaryArray) -> None:
        """Values as `encode_fields` returns them."""
        self._pending.append(batch)
        self._pending_names += len(batch.dictionary)
        if self._pending_names > max(4 * len(self._known), 1 << 18):
            self._unite()

    def _unite(self) -> None:
        before = pa.DictionaryArray.from_arrays(pa.nulls(0, pa.int32()), self._known)
        united = pa.chunked_array([before, *self._pending]).unify_dictionaries()
        self._known = united.chunk(0).dictionary
        self._ids += [_view(chunk.indices) for chunk in united.chunks[1:]]
        self._pending, self._pending_names = [], 0

    def take(self) -> Ids:
        """The ids of all values since the last taking; they stay what they are, whatever comes later."""
        self._unite()
        ids = np.concatenate([np.empty(0, np.int32), *self._ids])
        self._ids = []
        return ids

    def finish(self, columns: int) -> tuple[pa.Array, dict[int, str], Ids]:
        """The distinct names; what is wrong with some of them, by id; the ids of all values in rows of `columns`."""
        ids = self.take().reshape(-1, columns)
        names = pc.binary_slice(self._known, 0, -1)
        if _plainly_good(self._known):
            return names.cast(pa.string()), {}, ids
        values = [value.decode("utf-8", "surrogateescape") for value in names.to_pylist()]
        faults = {i: fault for i, value in enumerate(values) if (fault := name_fault(value))}
        # The place of a faulty name is held by a text that no name can be.
        return (
            pa.array([f"\0{i}" if i in faults else value for i, value in enumerate(values)], pa.string()),
            faults,
            ids,
        )


def _plainly_good(closed: pa.Array) -> bool:
    """Whether all of these closed values are ASCII names; False may only mean that a closer look is needed."""
    _, offsets, data = closed.buffers()
    if not len(closed) or closed.offset or data is None:
        return False
    starts = np.frombuffer(offsets, np.int32, len(closed) + 1)
    text = np.frombuffer(data, np.uint8, int(starts[-1]))
    ends = np.count_nonzero(text < 0x20)  # one control character a value: its end
    return ends == len(closed) and int(text.max()) < 0x7F and int(text[starts[:-1]].min()) > 0x20


def unite(vocabularies: list[pa.Array]) -> tuple[list[str], Ids, list[Ids]]:
    """The distinct names of several arrays, their ranks in sorted order, and where each array's names went."""
    encoded = pa.concat_arrays(vocabularies).dictionary_encode()
    names = encoded.dictionary
    rank = np.empty(len(names), np.int32)
    rank[_view(pc.sort_indices(names).cast(pa.int32()))] = np.arange(len(names), dtype=np.int32)
    cuts = np.cumsum([len(vocabulary) for vocabulary in vocabularies])[:-1]
    return names.to_pylist(), rank, np.split(_view(encoded.indices), cuts)


def _view(indices: pa.Array) -> Ids:
    """The array's content without a copy (`to_numpy` would import pandas where it is installed)."""
    buffer = indices.buffers()[1]
    return np.frombuffer(buffer, np.int32, len(indices), indices.offset * 4) if buffer else np.empty(0, np.int32)
