"""Caches: everything that is kept per sequence, as one thing.

A sequence's recurrent state lies in a `StatePool`, its keys and values in the pages of a `PagePool`. They are only
right together, so they are acquired, stepped, committed, copied and released together, here. The state pool's cursor
says where a sequence stands; pages follow it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch

from ..batch import Batch, Rows, Step
from ..config import AttentionConfig, Mamba2Config, ModelConfig, Policy
from ..errors import StateError
from ..formats import E4M3
from ..state import Snapshot, StatePool
from .pages import PAGE_TOKENS, KvSnapshot, PagePool
from .tables import PageTable


@dataclass(frozen=True, eq=False)
class CacheStep:
    """One step, opened: what every layer of a model needs besides the hidden states.

    fixed: the page table of a captured step; None: one is made when it is first asked for.
    """

    step: Step
    state: StatePool
    pages: PagePool
    fixed: PageTable | None = None

    @cached_property
    def table(self) -> PageTable:
        """Where the rows' keys and values go, and what they read."""
        return self.pages.table(self.step) if self.fixed is None else self.fixed


@dataclass(frozen=True, eq=False)
class CacheSnapshot:
    """An immutable copy of all that a sequence is: recurrent state, keys and values, position."""

    state: Snapshot
    kv: KvSnapshot

    @property
    def position(self) -> int:
        return self.state.position

    @property
    def nbytes(self) -> int:
        return self.state.nbytes + self.kv.nbytes


class Caches:
    """A state pool and a page pool that move together. Both have the same slots."""

    def __init__(self, state: StatePool, pages: PagePool) -> None:
        if state.pad_slot != pages.pad_slot:
            raise StateError(f"caches: the state pool has {state.slots} slots, the page pool {pages.pad_slot}")
        self.state = state
        self.pages = pages
        self._taken: dict[int, CacheSnapshot] = {}

    @classmethod
    def for_model(
        cls,
        config: ModelConfig,
        *,
        slots: int,
        pages: int,
        policy: Policy | None = None,
        device: torch.device | str = "cpu",
        page_tokens: int = PAGE_TOKENS,
        window_rows: int = 16,
        draft_rows: int = 8,
        seed: int = 0,
    ) -> Caches:
        """Pools of the shapes that a model needs. `cache_bytes` knows beforehand what they take."""
        policy = policy or Policy()
        mamba, count = state_layers(config)
        state = StatePool(
            mamba,
            layers=count,
            slots=slots,
            device=device,
            dtype=config.dtype,
            state_dtype=policy.state_dtype or config.state_dtype,
            window_rows=window_rows,
            draft_rows=draft_rows,
            seed=seed,
        )
        kv = PagePool(
            kv_layers(config),
            pages=pages,
            slots=slots,
            page_tokens=page_tokens,
            device=device,
            dtype=kv_dtype(config, policy),
        )
        return cls(state, kv)

    @property
    def nbytes(self) -> int:
        return self.state.nbytes + self.pages.nbytes

    @property
    def free_slots(self) -> int:
        return self.state.free_slots

    @property
    def free_pages(self) -> int:
        return self.pages.free_pages

    def acquire(self, count: int = 1) -> list[int]:
        """Hand out slots at position 0, zeroed and without pages. Raises: OutOfSlots, and then none is taken."""
        return self.state.acquire(count)

    def release(self, slots: Sequence[int]) -> None:
        """Give slots and their pages back, poisoned ones too."""
        self.state.release(slots)
        for slot in slots:
            self.pages.release(slot)
            self._taken.pop(slot, None)

    def position(self, slot: int) -> int:
        """Committed rows of the slot's sequence."""
        return self.state.position(slot)

    @contextmanager
    def step(self, batch: Batch) -> Iterator[CacheStep]:
        """Run every layer of one step inside this context; cursors advance when it ends.

        A step that raises poisons the batch's slots. Raises: StateError, ShapeError, OutOfPages, before anything is
        written.
        """
        self.state.check(batch)
        starts = self._positions(batch)
        self.pages.reserve(batch.slots, starts, [s + n for s, n in zip(starts, batch.rows, strict=True)])
        with self.state.step(batch) as step:
            yield CacheStep(step, self.state, self.pages)

    def pieces(self, batch: Batch) -> list[Batch]:
        """The steps that a batch is run in: more than one when a snapshot is wanted inside its rows."""
        self.state.check(batch)
        return batch.cut(self._positions(batch))

    def keep_snapshots(self, batch: Batch) -> None:
        """Keep a snapshot of every sequence that now stands where `snapshot_at` wants one, for `take_snapshot`."""
        for slot, at in zip(batch.slots, batch.snapshot_at, strict=True):
            if at is not None and at == self.position(slot):
                self._taken[slot] = self.snapshot(slot)

    def take_snapshot(self, slot: int) -> CacheSnapshot:
        """The snapshot that `Batch.prefill(…, snapshot_at=…)` left for this slot; it is handed out once."""
        if slot not in self._taken:
            raise StateError(f"caches: no snapshot was taken of slot {slot}; pass snapshot_at to Batch.prefill")
        return self._taken.pop(slot)

    @contextmanager
    def draft_step(self, slots: Sequence[int], *, ahead: int) -> Iterator[CacheStep]:
        """One step row for each slot, `ahead` rows past its position, for layers that keep nothing but KV (MTP).

        No cursor moves; what is written there is written again when the rows come.
        """
        starts = [self.position(slot) + ahead for slot in slots]
        self.pages.reserve(slots, starts, [start + 1 for start in starts])
        ones, at = (1,) * len(slots), tuple(starts)
        rows = Rows(slots=tuple(slots), rows=ones, positions=at, boundaries=at, first_row=0, device=self.state.device)
        step = Step(Batch.decode(slots), None, rows)
        yield CacheStep(step, self.state, self.pages)

    def commit(self, slots: Sequence[int], accepted: Sequence[int]) -> None:
        """Keep the first accepted[i] rows of the last verify step of slots[i], and forget the rest."""
        self.state.commit(slots, accepted)
        for slot in slots:
            self.pages.trim(slot, self.position(slot))

    def snapshot(self, slot: int) -> CacheSnapshot:
        """An immutable copy of a sequence at its position. Raises: StateError with uncommitted rows."""
        return CacheSnapshot(self.state.snapshot(slot), self.pages.snapshot(slot, self.position(slot)))

    def restore(self, slot: int, snapshot: CacheSnapshot) -> None:
        """Set a slot to a snapshot, whatever it held. Raises: SnapshotMismatch, OutOfPages; nothing is written then."""
        self.pages.check_restore(slot, snapshot.kv)
        self.state.restore(slot, snapshot.state)
        self.pages.restore(slot, snapshot.kv)

    def fork(self, src: int, dst: int) -> None:
        """Make dst an equal of src: the state is copied, pages are shared. Both must be acquired."""
        self.state.fork(src, dst)
        self.pages.fork(src, dst, tokens=self.position(src))

    def reorder(self, slots: Sequence[int], order: Sequence[int]) -> None:
        """slots[i] takes over what slots[order[i]] held, for all i at once (beams); order may repeat."""
        self.state.reorder(slots, order)
        self.pages.reorder(slots, order, tokens=[self.position(slot) for slot in slots])

    def _positions(self, batch: Batch) -> list[int]:
        return [0 if slot == self.state.pad_slot else self.position(slot) for slot in batch.slots]


def kv_layers(config: ModelConfig) -> list[AttentionConfig]:
    """Layers of a page pool: the model's attention layers in order, then those of its MTP head."""
    return [c for c in (*config.layers, *config.mtp_layers) if isinstance(c, AttentionConfig)]


def state_layers(config: ModelConfig) -> tuple[Mamba2Config | None, int]:
    """Shape and number of the Mamba-2 layers; None and 0 when there are none."""
    count = sum(isinstance(c, Mamba2Config) for c in config.layers)
    return (config.mamba2 if count else None), count


def kv_dtype(config: ModelConfig, policy: Policy) -> torch.dtype:
    """Dtype of keys and values: that of the activations, or FP8."""
    return E4M3 if policy.kv == "checkpoint" else config.dtype


def cache_bytes(
    config: ModelConfig,
    *,
    slots: int,
    pages: int,
    policy: Policy | None = None,
    page_tokens: int = PAGE_TOKENS,
    window_rows: int = 16,
    draft_rows: int = 8,
) -> int:
    """Exactly what `Caches.for_model` of these sizes allocates."""
    policy = policy or Policy()
    mamba, count = state_layers(config)
    state = StatePool.bytes(
        mamba,
        layers=count,
        slots=slots,
        dtype=config.dtype,
        state_dtype=policy.state_dtype or config.state_dtype,
        window_rows=window_rows,
        draft_rows=draft_rows,
    )
    kv = PagePool.bytes(kv_layers(config), pages=pages, page_tokens=page_tokens, dtype=kv_dtype(config, policy))
    return state + kv
