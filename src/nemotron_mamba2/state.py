"""StatePool: the recurrent state of every sequence, and the rules that keep it right.

Per slot and Mamba-2 layer the pool holds the SSM state at a boundary and rings of the rows since (`ops.LayerState`).
One cursor per slot serves all layers: *position*, the committed rows, and *boundary*, a multiple of window_rows. Rows
of a verify step wait for `commit`, and rolling back is a smaller count: nothing is copied. A ring row of position t
lies at t mod ring length, and rings are long enough that no step overwrites what the same step still reads.

The pool refuses before anything is written, never aliases two sequences, zeroes a slot when it is acquired, and poisons
the slots of a step that fails midway: they can only be released.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from math import prod

import torch
from torch import Tensor

from .batch import Batch, Role, Rows, Step
from .config import Mamba2Config
from .errors import ConfigError, OutOfSlots, ShapeError, SnapshotMismatch, StateError
from .ops import LayerState

STATE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class StateLayout:
    """Shapes and dtypes of one slot; two pools of one layout can exchange snapshots."""

    config: Mamba2Config | None
    layers: int
    dtype: torch.dtype
    state_dtype: torch.dtype
    window_rows: int
    draft_rows: int

    def tensors(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Name → (shape of one layer of one slot, dtype)."""
        c = self.config
        if c is None:
            return {}
        ring_rows = self.window_rows - 1 + 2 * self.draft_rows
        heads, groups = (c.mamba_num_heads, c.mamba_head_dim), (c.n_groups, c.ssm_state_size)
        return {
            "ssm": ((*heads, c.ssm_state_size), self.state_dtype),
            "ring_x": ((ring_rows, *heads), self.dtype),
            "ring_B": ((ring_rows, *groups), self.dtype),
            "ring_dt": ((ring_rows, c.mamba_num_heads), torch.float32),
            "ring_conv": ((c.conv_kernel - 1 + self.draft_rows, c.conv_dim), self.dtype),
        }

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot over all layers."""
        return self.layers * sum(prod(shape) * dtype.itemsize for shape, dtype in self.tensors().values())


@dataclass(frozen=True, eq=False)
class Snapshot:
    """An immutable copy of one sequence's whole state; restores into any slot of a pool of the same layout.

    Tensors are [layers, …] as in `StateLayout.tensors`; position and boundary are the cursor.
    """

    layout: StateLayout
    position: int
    boundary: int
    tensors: dict[str, Tensor]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors.values())


@dataclass
class _Cursor:
    position: int = 0
    boundary: int = 0
    uncommitted_rows: int = 0
    poisoned: bool = False


class StatePool:
    """Owns the state memory of `slots` sequences over `layers` Mamba-2 layers.

    config: None for a model without Mamba-2 layers (cursors still work). dtype: of activations, and so of the rings.
    window_rows: rows from boundary to boundary (16; 1 is the classic recurrence). draft_rows: most rows of one verify
    step. seed: key of the stochastic rounding of an fp16 state.
    """

    def __init__(
        self,
        config: Mamba2Config | None,
        *,
        layers: int,
        slots: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.bfloat16,
        state_dtype: torch.dtype = torch.float32,
        window_rows: int = 16,
        draft_rows: int = 8,
        seed: int = 0,
    ) -> None:
        if window_rows not in (1, 2, 4, 8, 16, 32, 64):
            raise ConfigError(f"state pool: window_rows must be a power of two from 1 to 64, found {window_rows}")
        if state_dtype not in STATE_DTYPES:
            raise ConfigError(f"state pool: state_dtype must be float32, bfloat16 or float16, found {state_dtype}")
        if slots < 1 or draft_rows < 1:
            raise ConfigError(f"state pool: expected at least one slot and draft row, found {slots}, {draft_rows}")
        self.layout = StateLayout(config, layers, dtype, state_dtype, window_rows, draft_rows)
        self.slots = slots
        self.pad_slot = slots
        self.seed = seed
        self.device = torch.device(device)
        self._tensors = {
            name: torch.empty(layers, slots + 1, *shape, dtype=dtype, device=self.device)
            for name, (shape, dtype) in self.layout.tensors().items()
        }
        self._zero(self.pad_slot)
        self._free = list(range(slots))[::-1]
        self._cursors: dict[int, _Cursor] = {}
        self._taken: dict[int, Snapshot] = {}

    @staticmethod
    def bytes(
        config: Mamba2Config | None,
        *,
        layers: int,
        slots: int,
        dtype: torch.dtype = torch.bfloat16,
        state_dtype: torch.dtype = torch.float32,
        window_rows: int = 16,
        draft_rows: int = 8,
    ) -> int:
        """Exactly what a pool of these sizes allocates, pad slot included."""
        return (slots + 1) * StateLayout(config, layers, dtype, state_dtype, window_rows, draft_rows).slot_bytes

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self._tensors.values())

    @property
    def free_slots(self) -> int:
        return len(self._free)

    # -- life cycle of a slot -----------------------------------------------------------------------------------------

    def acquire(self, count: int = 1) -> list[int]:
        """Hand out zeroed slots at position 0. Raises: OutOfSlots, and then none is taken."""
        if count > len(self._free):
            raise OutOfSlots(f"state pool: {count} slots wanted, {len(self._free)} of {self.slots} are free")
        slots = [self._free.pop() for _ in range(count)]
        for slot in slots:
            self._zero(slot)
            self._cursors[slot] = _Cursor()
        return slots

    def release(self, slots: Sequence[int]) -> None:
        """Give slots back, poisoned ones too."""
        if len(set(slots)) != len(slots):
            raise StateError(f"state pool: a slot is released twice in {list(slots)}")
        for slot in slots:
            self._cursor(slot, poisoned_ok=True)
        for slot in slots:
            del self._cursors[slot]
            self._taken.pop(slot, None)
            self._free.append(slot)

    def position(self, slot: int) -> int:
        """Committed rows of the slot's sequence."""
        return self._cursor(slot).position

    def uncommitted_rows(self, slot: int) -> int:
        """Rows of the last verify step that wait for `commit`."""
        return self._cursor(slot).uncommitted_rows

    # -- steps --------------------------------------------------------------------------------------------------------

    def check(self, batch: Batch) -> None:
        """Raise what a step of this batch would raise, before anything is written: StateError, ShapeError."""
        live = [slot for slot in batch.slots if slot != self.pad_slot]
        if len(set(live)) != len(live):
            raise ShapeError(f"batch: a slot appears twice in {list(batch.slots)}")
        for slot, rows, role in zip(batch.slots, batch.rows, batch.roles, strict=True):
            if slot == self.pad_slot:
                continue
            if not rows:
                self._cursor(slot)
                continue
            self._settled(slot)
            if role == "step" and rows > self.layout.draft_rows:
                raise ShapeError(
                    f"batch: slot {slot} has {rows} step rows, the pool holds draft_rows={self.layout.draft_rows}"
                )

    @contextmanager
    def step(self, batch: Batch) -> Iterator[Step]:
        """Run every layer of one step inside this context; cursors advance when it ends.

        An exception inside poisons the batch's slots: their state is half written. Raises: what `check` raises.
        """
        self.check(batch)
        step = Step(batch, self._rows(batch, "prompt"), self._rows(batch, "step"))
        try:
            yield step
        except BaseException:
            for slot in batch.slots:
                if slot != self.pad_slot:
                    self._cursors[slot].poisoned = True
            raise
        self._advance(step)

    def steps(self, batch: Batch) -> Iterator[tuple[Step, list[int] | slice]]:
        """The step of a batch, cut where `snapshot_at` wants a snapshot: pairs of a step and its rows of the batch.

        Each snapshot is kept for `take_snapshot`.
        """
        self.check(batch)
        pieces = batch.cut([0 if slot == self.pad_slot else self.position(slot) for slot in batch.slots])
        done = [0] * len(batch.slots)
        starts = [sum(batch.rows[:i]) for i in range(len(batch.rows))]
        for piece in pieces:
            index = [s + d + j for s, d, n in zip(starts, done, piece.rows, strict=True) for j in range(n)]
            with self.step(piece) as step:
                yield step, slice(None) if len(pieces) == 1 else index
            done = [d + n for d, n in zip(done, piece.rows, strict=True)]
            for slot, at in zip(batch.slots, batch.snapshot_at, strict=True):
                if at is not None and at == self.position(slot):
                    self._taken[slot] = self.snapshot(slot)

    def take_snapshot(self, slot: int) -> Snapshot:
        """The snapshot that `Batch.prefill(…, snapshot_at=…)` left for this slot; it is handed out once."""
        self._cursor(slot)
        if slot not in self._taken:
            raise StateError(f"state pool: no snapshot was taken of slot {slot}; pass snapshot_at to Batch.prefill")
        return self._taken.pop(slot)

    def commit(self, slots: Sequence[int], accepted: Sequence[int]) -> None:
        """Keep the first accepted[i] rows of the last verify step of slots[i], 0 to all, and forget the rest."""
        if len(slots) != len(accepted):
            raise ShapeError(f"commit: {len(slots)} slots need as many counts, found {list(accepted)}")
        for slot, count in zip(slots, accepted, strict=True):
            rows = self._cursor(slot).uncommitted_rows
            if count and not rows:
                raise StateError(f"commit: slot {slot} has no uncommitted rows; run Batch.verify first")
            if not 0 <= count <= rows:
                raise StateError(f"commit: slot {slot} has {rows} uncommitted rows, {count} were accepted")
        if len(set(slots)) != len(slots):
            raise StateError(f"commit: a slot appears twice in {list(slots)}")
        for slot, count in zip(slots, accepted, strict=True):
            cursor = self._cursors[slot]
            cursor.position += count
            cursor.uncommitted_rows = 0

    def layer_state(self, layer: int) -> LayerState:
        """The memory of one Mamba-2 layer, as its ops see it."""
        views = {name: tensor[layer] for name, tensor in self._tensors.items()}
        return LayerState(
            **views, window_rows=self.layout.window_rows, pad_slot=self.pad_slot, seed=self.seed, layer=layer
        )

    # -- copies -------------------------------------------------------------------------------------------------------

    def snapshot(self, slot: int) -> Snapshot:
        """An immutable copy of a sequence's state at its position. Raises: StateError with uncommitted rows."""
        cursor = self._settled(slot)
        copies = {name: tensor[:, slot].clone() for name, tensor in self._tensors.items()}
        return Snapshot(self.layout, cursor.position, cursor.boundary, copies)

    def restore(self, slot: int, snapshot: Snapshot) -> None:
        """Set a slot to a snapshot, whatever it held. Raises: SnapshotMismatch, and then nothing is written."""
        cursor = self._cursor(slot, poisoned_ok=True)
        for field in fields(StateLayout):
            ours, theirs = getattr(self.layout, field.name), getattr(snapshot.layout, field.name)
            if ours != theirs:
                raise SnapshotMismatch(f"snapshot: {field.name} is {theirs}, this pool has {ours}")
        for name, tensor in self._tensors.items():
            part = snapshot.tensors.get(name)
            if part is None or part.shape != tensor[:, slot].shape or part.dtype != tensor.dtype:
                raise SnapshotMismatch(f"snapshot: part {name!r} is missing or not as the layout says")
        for name, tensor in self._tensors.items():
            tensor[:, slot].copy_(snapshot.tensors[name])
        cursor.position, cursor.boundary = snapshot.position, snapshot.boundary
        cursor.uncommitted_rows, cursor.poisoned = 0, False

    def fork(self, src: int, dst: int) -> None:
        """Make dst an equal of src. Both must be acquired."""
        self._settled(src)
        self._cursor(dst, poisoned_ok=True)
        self._copy([src], [dst])

    def reorder(self, slots: Sequence[int], order: Sequence[int]) -> None:
        """slots[i] takes over what slots[order[i]] held, for all i at once (beams); order may repeat."""
        for slot in slots:
            self._settled(slot)
        if len(order) != len(slots) or not all(0 <= i < len(slots) for i in order):
            raise ShapeError(f"reorder: {len(slots)} slots need {len(slots)} indices below that, found {list(order)}")
        moves = [(slots[j], slot) for slot, j in zip(slots, order, strict=True) if slots[j] != slot]
        self._copy([src for src, _ in moves], [dst for _, dst in moves])

    # -- inside -------------------------------------------------------------------------------------------------------

    def _zero(self, slot: int) -> None:
        for tensor in self._tensors.values():
            tensor[:, slot].zero_()

    def _copy(self, sources: list[int], targets: list[int]) -> None:
        if not sources:
            return
        for tensor in self._tensors.values():
            tensor[:, targets] = tensor[:, sources]
        cursors = [self._cursors[src] for src in sources]
        for cursor, dst in zip([_Cursor(c.position, c.boundary) for c in cursors], targets, strict=True):
            self._cursors[dst] = cursor

    def _cursor(self, slot: int, *, poisoned_ok: bool = False) -> _Cursor:
        cursor = self._cursors.get(slot)
        if cursor is None:
            raise StateError(f"state pool: slot {slot} is not acquired; slots in use: {sorted(self._cursors)}")
        if cursor.poisoned and not poisoned_ok:
            raise StateError(f"state pool: slot {slot} was in a step that failed; release it or restore a snapshot")
        return cursor

    def _settled(self, slot: int) -> _Cursor:
        cursor = self._cursor(slot)
        if cursor.uncommitted_rows:
            raise StateError(
                f"state pool: slot {slot} has {cursor.uncommitted_rows} uncommitted rows; call commit first"
            )
        return cursor

    def _rows(self, batch: Batch, role: Role) -> Rows | None:
        mine = [i for i, r in enumerate(batch.roles) if r == role]
        if not mine:
            return None
        cursors = [self._cursors.get(batch.slots[i], _Cursor()) for i in mine]  # the pad slot has none
        return Rows(
            slots=tuple(batch.slots[i] for i in mine),
            rows=tuple(batch.rows[i] for i in mine),
            positions=tuple(c.position for c in cursors),
            boundaries=tuple(c.boundary for c in cursors),
            first_row=sum(batch.rows[: mine[0]]),
            device=self.device,
        )

    def _advance(self, step: Step) -> None:
        """Move the cursors as the ops moved the state: prompt rows store it, step rows fold what was committed."""
        batch, window = step.batch, self.layout.window_rows
        for slot, rows, role, verify in zip(batch.slots, batch.rows, batch.roles, batch.verifies, strict=True):
            if slot == self.pad_slot or not rows:
                continue
            cursor = self._cursors[slot]
            if role == "prompt":
                cursor.position += rows
                cursor.boundary = cursor.position // window * window
            else:
                cursor.boundary = cursor.position // window * window
                cursor.position += 0 if verify else rows
                cursor.uncommitted_rows = rows if verify else 0
