"""PagePool: keys and values of every sequence, in pages that sequences may share.

Each attention layer keeps two tensors [pages + 1, page_tokens, kv_heads, head_dim]; a page id means the same place in
all of them, so one block table per slot serves all layers. A page is counted once for every slot that holds it. A
shared page is never written: `reserve` copies it first for the slot that is about to write (copy on write), so `fork`
and `reorder` move no bytes and always have room.

Tables live on the host and travel with the step: `table(step)` makes the `PageTable` of a step by one copy. A captured
step keeps its own, at a fixed place and of a fixed size: `fixed_table(sequences=, rows=, tokens=)` makes it full of
padding, and before each replay `fill(table, rows)` makes it that of the step's rows, again by one copy, which follows
the longest sequence and not the table's width. Rows of the pad slot, and those that a step leaves free in a fixed
table, are padding: their keys and values go to the pad page, they see no keys, and attention gives zeros for them.

The pool knows nothing of positions: callers name the rows they mean, and `Caches` keeps the two pools in step. It
refuses before anything is written. The last page of each tensor takes the rows of the pad slot and is never read by
anybody else. The layout is the one that paged attention kernels read.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..batch import Role, Rows, Step
from ..config import AttentionConfig
from ..errors import ConfigError, OutOfPages, ShapeError, SnapshotMismatch, StateError
from ..ops import Pages
from .tables import PageTable, TableSizes, host_buffer

PAGE_TOKENS = 16  # a multiple of the state's window, so that a prefix that ends a page also ends a window


@dataclass(frozen=True, eq=False)
class KvSnapshot:
    """An immutable copy of a sequence's first `tokens` keys and values, [tokens, kv_heads, head_dim] per layer."""

    tokens: int
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (*self.keys, *self.values))


class PagePool:
    """Owns the KV memory of `pages` pages, and the block table of each of `slots` slots.

    layers: the attention layers, one config each; none is legal, and then no page is ever needed. dtype: of the
    activations, or float8_e4m3fn.
    """

    def __init__(
        self,
        layers: Sequence[AttentionConfig],
        *,
        pages: int,
        slots: int,
        page_tokens: int = PAGE_TOKENS,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        if page_tokens not in (16, 32, 64):
            raise ConfigError(f"page pool: page_tokens must be 16, 32 or 64, found {page_tokens}")
        if pages < 0 or slots < 1:
            raise ConfigError(f"page pool: expected pages ≥ 0 and slots ≥ 1, found {pages} and {slots}")
        self.layers = tuple(layers)
        self.pages = pages
        self.page_tokens = page_tokens
        self.pad_slot = slots
        self.device = torch.device(device)
        shapes = [(pages + 1, page_tokens, c.num_key_value_heads, c.head_dim) for c in self.layers]
        self.keys = tuple(torch.empty(shape, dtype=dtype, device=self.device) for shape in shapes)
        self.values = tuple(torch.empty(shape, dtype=dtype, device=self.device) for shape in shapes)
        for tensor in (*self.keys, *self.values):
            tensor[pages].zero_()
        self._free = dict.fromkeys(range(pages))  # ordered, and cheap to ask for one page
        self._holders = [0] * pages
        self._tables: dict[int, array[int]] = {slot: array("i") for slot in range(slots)}

    @staticmethod
    def bytes(
        layers: Sequence[AttentionConfig],
        *,
        pages: int,
        page_tokens: int = PAGE_TOKENS,
        dtype: torch.dtype = torch.bfloat16,
    ) -> int:
        """Exactly what a pool of these sizes allocates, pad page included."""
        return (pages + 1) * page_tokens * PagePool.bytes_per_token(layers, dtype=dtype)

    @staticmethod
    def bytes_per_token(layers: Sequence[AttentionConfig], *, dtype: torch.dtype = torch.bfloat16) -> int:
        """Bytes of the keys and values of one token over all layers."""
        return sum(2 * c.num_key_value_heads * c.head_dim for c in layers) * dtype.itemsize

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (*self.keys, *self.values))

    @property
    def dtype(self) -> torch.dtype | None:
        return self.keys[0].dtype if self.keys else None

    @property
    def free_pages(self) -> int:
        return len(self._free)

    def pages_for(self, tokens: int) -> int:
        """Pages that hold so many tokens of one sequence."""
        return -(-tokens // self.page_tokens) if self.layers else 0

    def held(self, slot: int) -> tuple[int, ...]:
        """Pages of a slot, in the order of its tokens."""
        return tuple(self._table(slot))

    # -- before and after a step --------------------------------------------------------------------------------------

    def reserve(self, slots: Sequence[int], starts: Sequence[int], ends: Sequence[int]) -> None:
        """Make rows starts[i]..ends[i] of slots[i] writable: pages exist and no other slot holds them.

        Raises: OutOfPages, and then nothing has changed.
        """
        wanted = [
            (slot, s, e) for slot, s, e in zip(slots, starts, ends, strict=True) if slot != self.pad_slot and e > s
        ]
        if not self.layers or not wanted:
            return
        shared = [(slot, i) for slot, s, e in wanted for i in self._touched(slot, s, e)]
        copied = self._to_copy(shared)
        missing = sum(max(0, self.pages_for(e) - len(self._table(slot))) for slot, _, e in wanted)
        needed = missing + len(copied)
        if needed > len(self._free):
            raise OutOfPages(
                f"page pool: {needed} pages wanted, {len(self._free)} of {self.pages} are free; "
                "release sequences, or make the pool larger"
            )
        for slot, i in copied:
            self._copy_on_write(slot, i)
        for slot, _, end in wanted:
            self._grow(slot, self.pages_for(end))

    def table(self, step: Step) -> PageTable:
        """Where the rows of a step go and what they read, by one copy. The rows must have been reserved."""
        shares = [(role, rows, self._sizes(rows)) for role, rows in step.shares]
        host, integers = host_buffer(sum(size.ints for _, _, size in shares), self.device)
        packed = host if self.device.type == "cpu" else torch.empty_like(host, device=self.device)
        found: dict[Role, Pages] = {}
        start = 0
        for role, rows, size in shares:
            lists = self._write(integers[start:], rows, size)
            found[role] = size.views(lists, packed[start:])
            start += size.ints
        if packed is not host:
            packed.copy_(host, non_blocking=True)
        return PageTable(self.keys, self.values, found.get("prompt"), found.get("step"), packed)

    def fixed_table(self, *, sequences: int, rows: int, tokens: int) -> PageTable:
        """A table of step rows whose place in memory stays, for a captured step: full of padding until `fill`.

        sequences, rows: of every step. tokens: the longest that a sequence may get.
        """
        size = TableSizes(rows, sequences, max(1, self.pages_for(tokens)))
        packed = torch.full((size.ints,), self.pages, dtype=torch.int32, device=self.device)
        table = PageTable(self.keys, self.values, None, size.views((), packed), packed)
        self.fill(table, Rows((), (), (), (), 0, self.device))
        return table

    def fill(self, table: PageTable, rows: Rows) -> None:
        """Make a fixed table that of other step rows, by one copy; they must have been reserved.

        Sequences and rows that they leave free become padding. Raises: ShapeError when they do not fit.
        """
        fixed = table.pages("step")
        sequences, width = fixed.table.shape
        used = self._sizes(rows).width
        if rows.total_rows > len(fixed.places) or len(rows.slots) > sequences or used > width:
            raise ShapeError(
                f"page table: made for {sequences} sequences of {width} pages and {len(fixed.places)} rows, "
                f"found {len(rows.slots)} of up to {used} and {rows.total_rows}"
            )
        size = TableSizes(len(fixed.places), sequences, used)  # what lies behind these columns is never read
        host, integers = host_buffer(size.ints, self.device)
        self._write(integers, rows, size)
        table.packed[: size.ints].copy_(host, non_blocking=True)

    def trim(self, slot: int, tokens: int) -> None:
        """Give back the pages of a slot past its first `tokens` tokens."""
        table = self._table(slot)
        keep = self.pages_for(tokens)
        self._drop(table[keep:])
        del table[keep:]

    def release(self, slot: int) -> None:
        """Give back all pages of a slot."""
        self.trim(slot, 0)

    # -- sharing ------------------------------------------------------------------------------------------------------

    def fork(self, src: int, dst: int, *, tokens: int) -> None:
        """dst holds the pages of src's first `tokens` tokens, and nothing else. No bytes move."""
        self.reorder([src, dst], [0, 0], tokens=[tokens, tokens])

    def reorder(self, slots: Sequence[int], order: Sequence[int], *, tokens: Sequence[int]) -> None:
        """slots[i] takes over the first tokens[i] tokens' pages of slots[order[i]], for all i at once (beams)."""
        if len(order) != len(slots) or not all(0 <= i < len(slots) for i in order):
            raise ShapeError(f"reorder: {len(slots)} slots need {len(slots)} indices below that, found {list(order)}")
        old = [self._table(slot) for slot in slots]
        new = [old[i][: self.pages_for(count)] for i, count in zip(order, tokens, strict=True)]
        for table in new:
            for page in table:
                self._holders[page] += 1
        for slot, table in zip(slots, new, strict=True):
            self._drop(self._tables[slot])
            self._tables[slot] = table[:]

    # -- copies -------------------------------------------------------------------------------------------------------

    def snapshot(self, slot: int, tokens: int) -> KvSnapshot:
        """An immutable copy of the first `tokens` keys and values of a slot."""
        if self.layers and len(self._table(slot)) < self.pages_for(tokens):
            raise StateError(f"page pool: slot {slot} holds {len(self._table(slot))} pages, {tokens} tokens need more")
        places = self._places(slot, tokens)
        return KvSnapshot(
            tokens,
            tuple(_bytes(t).flatten(0, 1)[places].view(t.dtype) for t in self.keys),
            tuple(_bytes(t).flatten(0, 1)[places].view(t.dtype) for t in self.values),
        )

    def check_restore(self, slot: int, snapshot: KvSnapshot) -> None:
        """Raise what `restore` would raise: SnapshotMismatch, OutOfPages."""
        pairs = ((self.keys, snapshot.keys), (self.values, snapshot.values))
        for ours, theirs in pairs:
            if [(t.dtype, t.shape[2:]) for t in ours] != [(t.dtype, t.shape[1:]) for t in theirs]:
                raise SnapshotMismatch(
                    f"snapshot: keys and values are {_describe(theirs)}, this pool has {_describe(ours)}"
                )
            if any(len(t) != snapshot.tokens for t in theirs):
                raise SnapshotMismatch(f"snapshot: {snapshot.tokens} tokens, but a part holds another number")
        own = sum(self._holders[page] == 1 for page in self._table(slot))
        if self.pages_for(snapshot.tokens) > len(self._free) + own:
            raise OutOfPages(
                f"page pool: a snapshot of {snapshot.tokens} tokens wants {self.pages_for(snapshot.tokens)} pages, "
                f"{len(self._free) + own} of {self.pages} can be had"
            )

    def restore(self, slot: int, snapshot: KvSnapshot) -> None:
        """Set a slot to a snapshot, whatever it held. Raises: what `check_restore` raises; nothing is written then."""
        self.check_restore(slot, snapshot)
        self.release(slot)
        self._grow(slot, self.pages_for(snapshot.tokens))
        places = self._places(slot, snapshot.tokens)
        for pool, saved in zip((*self.keys, *self.values), (*snapshot.keys, *snapshot.values), strict=True):
            _bytes(pool).flatten(0, 1)[places] = _bytes(saved)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _table(self, slot: int) -> array[int]:
        table = self._tables.get(slot)
        if table is None:
            raise StateError(f"page pool: there is no slot {slot}; slots are 0 to {self.pad_slot - 1}")
        return table

    def _sizes(self, rows: Rows) -> TableSizes:
        live = [i for i, slot in enumerate(rows.slots) if slot != self.pad_slot]
        longest = max((rows.positions[i] + rows.rows[i] for i in live), default=0)
        return TableSizes(rows.total_rows, len(rows.slots), max(1, self.pages_for(longest)))

    def _write(self, integers: NDArray[np.int32], rows: Rows, size: TableSizes) -> tuple[array[int], ...]:
        """Lay out a role's table, and give the page ids of each of its sequences."""
        lists = tuple(self._pages_of(rows, i) for i in range(len(rows.slots)))
        size.write(integers, rows, lists, page_tokens=self.page_tokens, pad_page=self.pages)
        return lists

    def _pages_of(self, rows: Rows, index: int) -> array[int]:
        if rows.slots[index] == self.pad_slot:
            return array("i")
        table, count = self._table(rows.slots[index]), self.pages_for(rows.positions[index] + rows.rows[index])
        if len(table) < count:
            raise StateError(f"page pool: slot {rows.slots[index]} has {len(table)} pages, its step needs {count}")
        return table[:count]

    def _places(self, slot: int, tokens: int) -> Tensor:
        pages = torch.tensor(self._table(slot)[: self.pages_for(tokens)], dtype=torch.int64, device=self.device)
        within = torch.arange(self.page_tokens, device=self.device)
        return (pages[:, None] * self.page_tokens + within).flatten()[:tokens]

    def _touched(self, slot: int, start: int, end: int) -> Iterable[int]:
        """Places in the slot's table that rows start..end fall on and that exist."""
        return range(start // self.page_tokens, min(self.pages_for(end), len(self._table(slot))))

    def _to_copy(self, touched: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Of (slot, place in its table), those whose page has other holders; the last holder writes in place."""
        holders: dict[int, int] = {}
        copied = []
        for slot, i in touched:
            page = self._tables[slot][i]
            left = holders.setdefault(page, self._holders[page])
            if left > 1:
                holders[page] = left - 1
                copied.append((slot, i))
        return copied

    def _copy_on_write(self, slot: int, i: int) -> None:
        table = self._tables[slot]
        page = self._take(after=table[i - 1] if i else None)
        for tensor in (*self.keys, *self.values):
            tensor[page].copy_(tensor[table[i]])
        self._drop([table[i]])
        table[i] = page

    def _grow(self, slot: int, pages: int) -> None:
        table = self._tables[slot]
        while len(table) < pages:
            table.append(self._take(after=table[-1] if table else None))

    def _take(self, *, after: int | None) -> int:
        """A free page; the next in memory when it is free, because runs of pages are read without a copy."""
        page = next(iter(self._free)) if after is None or after + 1 not in self._free else after + 1
        del self._free[page]
        self._holders[page] = 1
        return page

    def _drop(self, pages: Sequence[int]) -> None:
        for page in pages:
            self._holders[page] -= 1
            if not self._holders[page]:
                self._free[page] = None


def _bytes(tensor: Tensor) -> Tensor:
    """FP8 as bytes: torch indexes few ops over FP8."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor


def _describe(tensors: Sequence[Tensor]) -> str:
    kinds = dict.fromkeys(f"{str(t.dtype).removeprefix('torch.')} {list(t.shape[-2:])}" for t in tensors)
    return f"{len(tensors)} layers of {', '.join(kinds) or 'nothing'}"
