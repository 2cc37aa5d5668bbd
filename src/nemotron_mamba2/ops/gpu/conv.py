"""Convolution of prompt rows and softplus of dt, rings filled, in one launch: wrapper of `conv.cu`.

Bytes: rows × (2 · conv_dim · 2 + H · 6) and the rings. Flops: rows × conv_dim × 2 · W. Bound by memory.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from ...batch import Rows
from ...errors import ShapeError
from .. import LayerState
from ..reference import scan_rows
from . import nvrtc
from .nvrtc import argument, expect_rows16, rows16

THREADS, BLOCKS, STEP = 128, 4, 8  # threads of a block, blocks of a multiprocessor, rows in flight (measured)
VEC = 4  # channels of a thread: with 8, taps and window alone take 100 registers


def tile_rows(total_rows: int) -> int:
    """Rows of one thread: few keep all multiprocessors busy, many spare the start of a block (measured)."""
    return 8 if total_rows <= 512 else 32


def conv(
    xbc: Tensor,
    dt: Tensor,
    state: LayerState,
    rows: Rows,
    *,
    weight: Tensor,
    bias: Tensor | None,
    dt_bias: Tensor,
    time_step_limit: tuple[float, float] | None = None,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """As `ops.reference.conv`, for bf16 activations. Raises: ShapeError."""
    _, H, P, N = state.ssm.shape
    total, width = scan_rows(rows), xbc.shape[1]
    if out is None:
        out = (xbc.new_empty(total, width), torch.empty(total, H, device=dt.device))
    wide, wide_dt = out
    if len(wide) != total or len(wide_dt) != total:
        raise ShapeError(f"conv: out needs {total} rows (window rows included), found {len(wide)}, {len(wide_dt)}")
    if xbc.dtype != torch.bfloat16 or wide.dtype != torch.bfloat16:
        raise ShapeError(f"conv: expected bfloat16 rows, found {xbc.dtype} in, {wide.dtype} out")
    if not rows.total_rows:
        return out
    xbc = rows16(xbc)
    expect_rows16(wide)
    if wide_dt.stride(-1) != 1:
        raise ShapeError("conv: out's dt needs a unit inner stride")
    dt = dt if dt.stride(-1) == 1 else dt.contiguous()
    shape = (("H", H), ("P", P), ("G", state.ring_B.shape[2]), ("N", N), ("W", state.window_rows))
    rings = (("R", state.ring_dt.shape[1]), ("KR", state.ring_conv.shape[1]), ("KW", weight.shape[1]))
    flags = (("HAS_BIAS", int(bias is not None)), ("HAS_LIMIT", int(time_step_limit is not None)))
    low, high = time_step_limit or (0.0, 0.0)
    tile = tile_rows(rows.total_rows)
    tiles = sum(-(-count // tile) for count in rows.rows)
    blocks = -(-width // (VEC * THREADS)) + -(-H // THREADS)
    _kernel(xbc.device.index, (*shape, *rings, *flags, ("TILE", tile))).launch(
        (blocks, tiles),
        0,
        [
            *map(argument, (wide, wide_dt, state.ring_x, state.ring_B, state.ring_dt, state.ring_conv, xbc, dt)),
            *map(argument, (*rows.cursors, weight, bias, dt_bias)),
            *map(argument, (wide.stride(0), wide_dt.stride(0), xbc.stride(0), dt.stride(0), len(rows.slots))),
            *map(argument, (low, high)),
        ],
    )
    return out


def conv_cost(state: LayerState, rows: int, taps: int = 4) -> tuple[int, int]:
    """(bytes, flops) of the convolution of `rows` new rows."""
    H, width = state.ssm.shape[1], state.ring_conv.shape[2]
    return rows * (4 * width + 6 * H), rows * width * 2 * taps


@cache
def _kernel(device: int, defines: tuple[tuple[str, int], ...]) -> nvrtc.Kernel:
    defines = (*defines, ("THREADS", THREADS), ("BLOCKS", BLOCKS), ("STEP", STEP), ("VEC", VEC))
    return nvrtc.load(nvrtc.source("common.cuh", "conv.cu"), "conv", defines, threads=THREADS, shared_bytes=0)
