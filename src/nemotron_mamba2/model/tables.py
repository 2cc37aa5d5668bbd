"""PageTable: which pages the rows of one step write and read, as integers on the device.

`PagePool` makes it and fills it; the index arithmetic is here, over whole arrays on the host, because a prompt has many
rows and a step has little time.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..batch import Role, Rows
from ..errors import ShapeError
from ..ops import Pages


@dataclass(frozen=True, eq=False)
class PageTable:
    """Where one step writes its keys and values, and what it reads.

    keys, values: one tensor per attention layer, [pages + 1, page_tokens, kv_heads, head_dim]. prompt, step: places
    and tables of each role's rows, on the device; None where the step has no such rows. packed: the int32 buffer that
    they are views of.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    prompt: Pages | None
    step: Pages | None
    packed: Tensor

    def pages(self, role: Role) -> Pages:
        """Those of the rows of one role. Raises: ShapeError when the step has none."""
        found = self.prompt if role == "prompt" else self.step
        if found is None:
            raise ShapeError(f"page table: the step has no {role} rows")
        return found


@dataclass(frozen=True)
class TableSizes:
    """How a role's `Pages` lie in one buffer: places, row_sequence, row_keys, then the table, a column per sequence.

    Columns make the part that a step fills a prefix of the buffer, whatever width was set aside. Places stay below 2³¹.
    """

    rows: int
    sequences: int
    width: int

    @property
    def ints(self) -> int:
        return 3 * self.rows + self.sequences * self.width

    def split(self, packed: NDArray[np.int32]) -> tuple[NDArray[np.int32], ...]:
        """places, row_sequence, row_keys [rows], columns [width, sequences]."""
        parts = np.split(packed[: self.ints], [self.rows, 2 * self.rows, 3 * self.rows])
        return *parts[:3], parts[3].reshape(self.width, self.sequences)

    def views(self, lists: Sequence[array[int]], packed: Tensor) -> Pages:
        """The same parts of a buffer on the device, with the lists of the host."""
        *parts, columns = packed[: self.ints].split([self.rows] * 3 + [self.sequences * self.width])
        return Pages(tuple(lists), columns.view(self.width, self.sequences).T, *parts)

    def write(
        self,
        packed: NDArray[np.int32],
        rows: Rows,
        lists: Sequence[array[int]],
        *,
        page_tokens: int,
        pad_page: int,
    ) -> None:
        """Lay out what the rows need. lists: page ids of their sequences; none of one that is padding, and rows and
        sequences past those given are padding too."""
        places, row_sequence, row_keys, columns = self.split(packed)
        columns.fill(pad_page)
        live = np.zeros(self.sequences, dtype=bool)
        for i, ids in enumerate(lists):
            if len(ids):
                columns[: len(ids), i] = np.frombuffer(ids, dtype=np.int32)
                live[i] = True
        counts, total = np.array(rows.rows, dtype=np.int32), rows.total_rows
        positions = np.arange(self.rows, dtype=np.int32)
        shift = np.array(rows.positions, dtype=np.int32) - np.array(rows.cu_rows[:-1], dtype=np.int32)
        positions[:total] += np.repeat(shift, counts)
        row_sequence[:] = 0
        row_sequence[:total] = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        is_live = live[row_sequence]
        is_live[total:] = False
        own = columns[np.where(is_live, positions // page_tokens, 0), row_sequence]
        places[:] = np.where(is_live, own, pad_page) * page_tokens + positions % page_tokens
        row_keys[:] = np.where(is_live, positions + 1, 0)


def host_buffer(ints: int, device: torch.device) -> tuple[Tensor, NDArray[np.int32]]:
    """Memory to lay integers out in before they go to a device, as a tensor and as an array; pinned for a GPU."""
    if device.type == "cuda":
        tensor = torch.empty(ints, dtype=torch.int32, pin_memory=True)
        return tensor, tensor.numpy()
    integers = np.empty(ints, dtype=np.int32)
    return torch.from_numpy(integers), integers
