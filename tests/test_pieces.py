"""Long prompts run in pieces: every row once, in order, from where its sequence stands, and with the same results."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nemotron_mamba2 import batch as batch_module
from nemotron_mamba2.batch import Batch, Rows
from oracle import few, mixer_error, pool_bytes, rig, same_bits
from tolerances import tolerance

CPU = torch.device("cpu")


@given(
    counts=st.lists(st.integers(0, 400), min_size=1, max_size=6),
    positions=st.lists(st.integers(0, 500), min_size=6, max_size=6),
    first_row=st.integers(0, 50),
)
@few(60)
def test_pieces_hold_every_row_once(counts: list[int], positions: list[int], first_row: int) -> None:
    starts = tuple(positions[: len(counts)])
    boundaries = tuple(p // 16 * 16 for p in starts)
    rows = Rows(tuple(range(len(counts))), tuple(counts), starts, boundaries, first_row, CPU)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch_module, "PIECE_ROWS", 128)
        pieces = rows.pieces
    place, at = first_row, dict(enumerate(starts))
    stands = dict(enumerate(boundaries))
    for piece in pieces:
        assert piece.first_row == place and piece.total_rows <= 128
        for slot, count, position, boundary in zip(
            piece.slots, piece.rows, piece.positions, piece.boundaries, strict=True
        ):
            assert (position, boundary) == (at[slot], stands[slot])
            at[slot] += count
            if at[slot] < starts[slot] + counts[slot]:
                assert at[slot] % 64 == 0, "a sequence is cut at chunk borders only"
            if count:
                stands[slot] = at[slot] // 16 * 16
        place += piece.total_rows
    assert place == first_row + sum(counts)
    assert at == {slot: starts[slot] + counts[slot] for slot in at}


@pytest.mark.parametrize("reproducible", [False, True])
def test_a_prompt_in_pieces_is_the_prompt(reproducible: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    found = rig("TINY", reproducible=reproducible)
    hidden = found.hidden(700, seed=3)
    pools, outs = [found.pool() for _ in range(2)], []
    for pool, limit in zip(pools, (8192, 128), strict=True):
        monkeypatch.setattr(batch_module, "PIECE_ROWS", limit)
        slots = pool.acquire(3)
        first = found.layer(hidden[:300], Batch.prefill(slots, [70, 0, 230]), pool)
        outs.append(torch.cat([first, found.layer(hidden[300:], Batch.prefill(slots, [1, 300, 99]), pool)]))
    if reproducible:
        assert same_bits(*outs)
        assert all(a.equal(b) for a, b in zip(*map(pool_bytes, pools), strict=True))
    assert mixer_error(outs[1], outs[0], hidden) < tolerance("layer")
