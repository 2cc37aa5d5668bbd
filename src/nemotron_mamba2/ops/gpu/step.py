"""Convolution and recurrence of generated and drafted rows, all slots in one launch: wrapper of `step.cu`.

Bytes: the state once (and written once per window), live window rows, new rows. Flops: 4·H·P·N per row for the state
and the fold, and the window's share. How many state rows a warp holds follows the number of sequences; a row's bits do
not depend on it.
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from torch import Tensor

from ...batch import Rows
from ...errors import ShapeError
from .. import LayerState
from . import nvrtc
from .nvrtc import argument

STATE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
FEW_SEQUENCES = 4  # below this, small blocks keep more multiprocessors busy


def tiles(head_dim: int, state_size: int, sequences: int) -> tuple[int, int]:
    """(state rows per warp, warps per block) for a step of that many sequences."""
    wide = 16 if state_size <= 128 else 8
    rows = wide if sequences > FEW_SEQUENCES else 8
    warps = 5 if head_dim % 5 == 0 else 4
    return rows, min(warps, head_dim // rows)


def step(
    xbc: Tensor,
    dt: Tensor,
    state: LayerState,
    rows: Rows,
    *,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    dt_bias: Tensor,
    A_log: Tensor,
    D: Tensor,
    time_step_limit: tuple[float, float] | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """As `ops.reference.step`, for bf16 activations. Needs window_rows 16 or 32, draft rows ≤ window_rows, head_dim a
    multiple of 16, state size a multiple of 32. Raises: ShapeError."""
    _, H, P, N = state.ssm.shape
    R, W = state.ring_dt.shape[1], state.window_rows
    if W not in (16, 32) or R > 3 * W - 1 or P % 16 or N % 32:
        raise ShapeError(
            "step: the kernel needs window_rows 16 or 32, draft_rows ≤ window_rows, head_dim % 16 = 0 and state size "
            f"% 32 = 0; found {W}, {(R - W + 1) // 2}, {P}, {N}"
        )
    if out is None:
        out = torch.empty(rows.total_rows, H * P, dtype=xbc.dtype, device=xbc.device)
    if not rows.total_rows:
        return out
    xbc, dt = (t if t.stride(-1) == 1 else t.contiguous() for t in (xbc, dt))
    G, KR, KW = state.ring_B.shape[2], state.ring_conv.shape[1], conv_weight.shape[1]
    rows_per_warp, warps = tiles(P, N, len(rows.slots))
    shape = (("H", H), ("P", P), ("G", G), ("N", N), ("W", W), ("R", R), ("KR", KR), ("KW", KW))
    flags = (("STATE", STATE_CODES[state.ssm.dtype]), ("HAS_BIAS", int(conv_bias is not None)))
    limits = (("HAS_LIMIT", int(time_step_limit is not None)), ("RPW", rows_per_warp), ("WARPS", warps))
    low, high = time_step_limit or (0.0, 0.0)
    _kernel(xbc.device.index, (*shape, *flags, *limits)).launch(
        (H * P // (rows_per_warp * warps), len(rows.slots)),
        0,
        [
            *map(argument, (out, state.ssm, state.ring_x, state.ring_B, state.ring_dt, state.ring_conv, xbc, dt)),
            *map(argument, (*rows.cursors, conv_weight, conv_bias, dt_bias, A_log, D)),
            *map(argument, (out.stride(0), xbc.stride(0), dt.stride(0), state.pad_slot)),
            ctypes.c_uint(state_key(state.seed, state.layer)),
            *map(argument, (low, high)),
        ],
    )
    return out


def step_cost(state: LayerState, sequences: int, rows: int) -> tuple[int, int]:
    """(bytes, flops) of a step of `rows` new rows for each sequence, averaged over a window."""
    _, H, P, N = state.ssm.shape
    W = state.window_rows
    live = W // 2 * (state.ring_x[0, 0].nbytes + state.ring_B[0, 0].nbytes + state.ring_dt[0, 0].nbytes)
    written = H * P * N * state.ssm.element_size() * rows // W
    traffic = sequences * (H * P * N * state.ssm.element_size() + written + live + rows * 6 * H * P)
    return traffic, sequences * rows * H * (4 * P * N + 2 * W * (P + N))


@cache
def _kernel(device: int, defines: tuple[tuple[str, int], ...]) -> nvrtc.Kernel:
    threads = 32 * dict(defines)["WARPS"]
    return nvrtc.load(
        nvrtc.source("common.cuh", "state.cuh", "step.cu"), "step", defines, threads=threads, shared_bytes=0
    )


def state_key(seed: int, layer: int) -> int:
    """What the kernels mix with a position to draw the bits of stochastic rounding."""
    key = 0
    for word in (seed, layer):
        key ^= word & 0xFFFFFFFF
        for factor in (0x85EBCA6B, 0xC2B2AE35):
            key = ((key ^ (key >> 16)) * factor + 0x9E3779B9) & 0xFFFFFFFF
        key ^= key >> 16
    return key
