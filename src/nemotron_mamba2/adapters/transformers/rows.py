"""From a padded batch of transformers to the ragged rows of our layers, and back.

A forward of [B, L] positions becomes one or two batches. Prompt rows take the prompt family. Rows that `crop` may
take back are step rows of a verify batch: all rows when a sequence goes on with at most draft_rows of them, and the
last draft_rows of any forward when the cache records its past (assisted generation). Padding has no rows at all, on
either side, so a padded sequence equals a single run and its state never sees the padding.

Reading a mask waits for the device, once per forward: all layers share what is made of it here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ... import Batch


@dataclass(frozen=True, eq=False)
class Piece:
    """One batch of a forward. index: int64, where its rows lie among the B · L positions; None: all, in order."""

    batch: Batch
    index: Tensor | None


@dataclass(frozen=True, eq=False)
class Forward:
    """One forward as batches, in order. Slots are 0 … B − 1, in every layer's pool.

    kept: kept[n] is how many rows of each sequence stay when the last n positions are taken back; empty when none can.
    """

    pieces: tuple[Piece, ...]
    kept: tuple[tuple[int, ...], ...]


def plan_forward(
    sequences: int,
    positions: int,
    mask: Tensor | None,
    *,
    started: bool,
    recording: bool,
    draft_rows: int,
    device: torch.device,
) -> Forward:
    """Cut a forward into batches.

    mask: [B, ≥ L], 0 or False is padding, its last L columns count; None: no padding. started: the sequences have a
    state. recording: the cache was asked to record its past. draft_rows: most rows of a verify batch.
    """
    takes_back = recording or (started and positions <= draft_rows)
    last = min(positions, draft_rows) if takes_back else 0
    slots, first = range(sequences), positions - last
    live = None if mask is None else mask[:, -positions:].to(device).bool()
    pieces = []
    if first:
        rows = [first] * sequences if live is None else live[:, :first].sum(1).tolist()
        index = _index(sequences, positions, slice(0, first), live=live, device=device)
        pieces.append(Piece(Batch.prefill(slots, rows), index))
    if not last:
        return Forward(tuple(pieces), ())
    kept = _kept(sequences, last, None if live is None else live[:, first:].tolist())
    index = _index(sequences, positions, slice(first, positions), live=live, device=device)
    pieces.append(Piece(Batch.verify(slots, kept[0]), index))
    return Forward(tuple(pieces), kept)


def _index(
    sequences: int, positions: int, columns: slice, *, live: Tensor | None, device: torch.device
) -> Tensor | None:
    """Places of the live positions of these columns, row by row."""
    if live is None:
        if columns == slice(0, positions):
            return None
        return torch.arange(sequences * positions, device=device).view(sequences, positions)[:, columns].flatten()
    wanted = torch.zeros_like(live)
    wanted[:, columns] = live[:, columns]
    return wanted.flatten().nonzero().squeeze(1)


def _kept(sequences: int, last: int, live: Sequence[Sequence[bool]] | None) -> tuple[tuple[int, ...], ...]:
    if live is None:
        return tuple((last - n,) * sequences for n in range(last + 1))
    return tuple(tuple(sum(row[: last - n]) for row in live) for n in range(last + 1))
