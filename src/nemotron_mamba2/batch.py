"""Batch: the ragged rows of one step, as plain data.

A step runs any number of sequences at once. Each contributes some rows (token positions), and all rows of a sequence
have one role: *prompt* rows (a prompt, or a piece of one) or *step* rows (generated or drafted tokens). The role
alone picks the kernel family. Rows of a sequence are consecutive, and prompt sequences come before step sequences,
so each role's rows are one slice of the hidden states.

A `Batch` says which rows; a `Step` adds where the sequences stand (their cursors). Cursors live on the host and
travel with the step; kernels read them and never write them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from .errors import ShapeError

PIECE_ROWS = 8192  # most prompt rows that a layer runs at once: bounds its workspace
PIECE_UNIT = 64  # pieces end at multiples of this position: at chunk borders, where a split changes no bits

Role: TypeAlias = Literal["prompt", "step"]


@dataclass(frozen=True)
class Batch:
    """Which rows one step runs; build it with `prefill`, `decode`, `verify` or `join`.

    slots: the state slot of each sequence. rows: how many rows each contributes (0 is legal). roles: each one's role.
    verify: whether its rows wait for `StatePool.commit`. snapshot_at: per sequence the absolute position at which
    the step is cut and a snapshot taken, or None.
    """

    slots: tuple[int, ...]
    rows: tuple[int, ...]
    roles: tuple[Role, ...]
    verifies: tuple[bool, ...]
    snapshot_at: tuple[int | None, ...] = ()

    def __post_init__(self) -> None:
        if not self.snapshot_at:
            object.__setattr__(self, "snapshot_at", (None,) * len(self.slots))
        lengths = {len(self.slots), len(self.rows), len(self.roles), len(self.verifies), len(self.snapshot_at)}
        if len(lengths) != 1:
            raise ShapeError(f"batch: {len(self.slots)} slots need as many row counts, found {list(self.rows)}")
        if any(rows < 0 for rows in self.rows):
            raise ShapeError(f"batch: row counts must not be negative, found {list(self.rows)}")
        if sorted(self.roles) != list(self.roles):
            raise ShapeError("batch: prompt sequences must come before step sequences; join them in that order")

    @classmethod
    def prefill(
        cls, slots: Sequence[int], rows: Sequence[int], *, snapshot_at: Sequence[int | None] | None = None
    ) -> Batch:
        """Prompt rows: rows[i] tokens for slots[i], from wherever that sequence stands.

        snapshot_at: absolute positions (or None) at which to take a snapshot on the way.
        """
        return cls(*_sequences(slots, rows, "prompt", verify=False), tuple(snapshot_at or ()))

    @classmethod
    def decode(cls, slots: Sequence[int]) -> Batch:
        """One generated token for each slot."""
        return cls(*_sequences(slots, [1] * len(slots), "step", verify=False))

    @classmethod
    def verify(cls, slots: Sequence[int], rows: Sequence[int]) -> Batch:
        """rows[i] drafted tokens for slots[i]; they wait for `StatePool.commit`."""
        return cls(*_sequences(slots, rows, "step", verify=True))

    @classmethod
    def join(cls, *batches: Batch) -> Batch:
        """One batch of several: all rows in one step. Prompt batches come first."""
        return cls(
            tuple(s for b in batches for s in b.slots),
            tuple(r for b in batches for r in b.rows),
            tuple(r for b in batches for r in b.roles),
            tuple(v for b in batches for v in b.verifies),
            tuple(s for b in batches for s in b.snapshot_at),
        )

    @property
    def total_rows(self) -> int:
        return sum(self.rows)

    def cut(self, positions: Sequence[int]) -> list[Batch]:
        """The batch as consecutive pieces, so that each wanted snapshot falls on the end of a piece.

        positions: where each sequence stands now. Returns: one batch when no snapshot is wanted inside the rows; the
        pieces hold the same sequences in the same order (some with no rows). Raises: ShapeError for a place outside
        the rows.
        """
        cuts = [
            rows if at is None else at - start
            for rows, at, start in zip(self.rows, self.snapshot_at, positions, strict=True)
        ]
        for at, cut, rows in zip(self.snapshot_at, cuts, self.rows, strict=True):
            if not 0 <= cut <= rows:
                raise ShapeError(f"batch: snapshot_at {at} lies outside the {rows} rows of its sequence")
        plain = replace(self, snapshot_at=())
        if list(self.rows) == cuts:
            return [plain]
        rest = tuple(rows - cut for rows, cut in zip(self.rows, cuts, strict=True))
        return [replace(plain, rows=tuple(cuts)), replace(plain, rows=rest)]


def _sequences(
    slots: Sequence[int], rows: Sequence[int], role: Role, *, verify: bool
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[Role, ...], tuple[bool, ...]]:
    return tuple(slots), tuple(rows), tuple(role for _ in slots), tuple(verify for _ in slots)


@dataclass(frozen=True, eq=False)
class Rows:
    """One role's share of a step: S sequences, T rows, and where each sequence stands.

    slots, positions, boundaries, rows: host integers, one per sequence. position counts the committed rows before
    this step; the state in memory is that of boundary, a multiple of window_rows ≤ position. Uncommitted and
    committed rows since the boundary sit in the rings. first_row: where this share begins in the hidden states.
    on_device: int64 [4·S + 1], the `packed` integers where a captured step reads them; None: copied when asked for.
    """

    slots: tuple[int, ...]
    rows: tuple[int, ...]
    positions: tuple[int, ...]
    boundaries: tuple[int, ...]
    first_row: int
    device: torch.device
    on_device: Tensor | None = None
    cu_rows: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "cu_rows", (0, *accumulate(self.rows)))

    @property
    def total_rows(self) -> int:
        return self.cu_rows[-1]

    @property
    def slice(self) -> slice:
        """Where this share lies in the hidden states."""
        return slice(self.first_row, self.first_row + self.total_rows)

    @property
    def packed(self) -> tuple[int, ...]:
        """slots, positions, boundaries and cu_rows in one row of integers."""
        return (*self.slots, *self.positions, *self.boundaries, *self.cu_rows)

    @cached_property
    def pieces(self) -> tuple[Rows, ...]:
        """Prompt rows as consecutive pieces of at most PIECE_ROWS rows, to be run one after the other.

        A sequence that is cut goes on where its piece ended; its boundary is then the last multiple of PIECE_UNIT,
        which is one of window_rows.
        """
        if self.total_rows <= PIECE_ROWS:
            return (self,)
        pieces: list[Rows] = []
        parts: list[tuple[int, int, int, int]] = []  # slot, rows, position, boundary

        def close() -> None:
            first = pieces[-1].slice.stop if pieces else self.first_row
            slots, rows, positions, boundaries = zip(*parts, strict=True)
            pieces.append(Rows(slots, rows, positions, boundaries, first, self.device))
            parts.clear()

        for slot, count, position, boundary in zip(self.slots, self.rows, self.positions, self.boundaries, strict=True):
            end = position + count
            while end - position > PIECE_ROWS - sum(part[1] for part in parts):
                room = PIECE_ROWS - sum(part[1] for part in parts)
                cut = (position + room) // PIECE_UNIT * PIECE_UNIT
                if cut > position:
                    parts.append((slot, cut - position, position, boundary))
                    position = boundary = cut
                close()
            parts.append((slot, end - position, position, boundary))
        close()
        return tuple(pieces)

    @cached_property
    def cursors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """slots, positions, boundaries: int64 [S], and cu_rows: int64 [S + 1], on the step's device.

        One copy per step serves all layers.
        """
        packed = self.on_device
        if packed is None:
            packed = torch.tensor(self.packed, dtype=torch.int64).to(self.device, non_blocking=True)
        count = len(self.slots)
        slots, positions, boundaries, cu_rows = packed.split([count] * 3 + [count + 1])
        return slots, positions, boundaries, cu_rows


@dataclass(frozen=True, eq=False)
class Step:
    """A batch together with the cursors of its sequences: what every layer of one step reads.

    prompt, step: the rows of each role, or None when the batch has none.
    """

    batch: Batch
    prompt: Rows | None
    step: Rows | None

    @property
    def shares(self) -> tuple[tuple[Role, Rows], ...]:
        """The roles present, in row order."""
        pairs: tuple[tuple[Role, Rows | None], ...] = (("prompt", self.prompt), ("step", self.step))
        return tuple((role, rows) for role, rows in pairs if rows is not None)
