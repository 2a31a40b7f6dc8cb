"""What a mechanism adds to some rows of a table: gradients with a factor each, and noise where a batch was.

Nothing here waits for a GPU, and there each is one launch; by torch it is written out, with noise for every row.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch

from tacit.draws import Purpose, party_normals

Tensor = Any


def add_times(table: Tensor, rows: Tensor, values: Tensor, factor: Tensor) -> None:
    """Add (n, width) values, each times its factor, (n,), to rows; a factor of 0 means nothing, even of what is NaN."""
    if (kernels := _kernels(table)) is not None:
        kernels.add_times(table, rows.contiguous(), values.contiguous(), factor.contiguous())
        return
    table.index_add_(0, rows, torch.where(factor[:, None] == 0, 0.0, values * factor[:, None]))


def add_noise(
    table: Tensor, rows: Tensor, once: Tensor, deviation: Tensor, seeds: Tensor, purpose: Purpose, numbers: Tensor,
    steps: Tensor,
) -> None:  # fmt: skip
    """Add normals of each party's deviation, (parties,), to its (parties, n) rows, at those places that are `once`.

    They are `party_normals`, n x width of each party: simulated noise, whatever places get theirs.
    """
    width = table.shape[1]
    if (kernels := _kernels(table)) is not None:
        kernels.add_noise(table, rows.contiguous(), once, deviation, seeds, purpose, numbers, steps)
        return
    noise = party_normals(seeds, purpose, numbers, steps, rows.shape[1] * width).unflatten(1, (-1, width))
    noise = torch.where(once[..., None], noise * deviation[:, None, None], 0.0)
    table.index_add_(0, rows.reshape(-1), noise.flatten(0, 1).to(table.dtype))


class First:
    """Tells of each row of a table the first of all places where it stands."""

    def __init__(self, rows: int, device: Any):
        self._place = torch.full((rows + 1,), _LAST, dtype=torch.int64, device=device)

    def of(self, rows: Tensor, there: Tensor) -> Tensor:
        """(parties, n), of rows that are there: whether the row stands here first. No two parties have a row."""
        at = torch.where(there, rows, len(self._place) - 1).reshape(-1)
        place = torch.arange(rows.shape[1], device=rows.device).expand_as(rows).reshape(-1)
        self._place.scatter_reduce_(0, at, place, "amin")
        found = self._place[at] == place
        self._place.index_fill_(0, at, _LAST)
        return found.reshape(rows.shape) & there


_LAST = torch.iinfo(torch.int64).max


def _kernels(table: Tensor) -> Any:
    """Those of the device where this table is, if there are any."""
    if table.dtype != torch.float32:
        return None
    if table.device.type == "cuda" and find_spec("triton") is not None:
        from tacit.kernels import gpu_rows

        return gpu_rows
    if table.device.type == "cpu" and find_spec("numba") is not None:
        from tacit.kernels import cpu_rows

        return cpu_rows
    return None
