"""A whole Mamba-2 layer over step rows. Few rows, on Hopper: one launch (`mixer.cu`) that keeps weights streaming while
its blocks wait for each other. Otherwise, and where a shape does not fit, three: `linear.py`, `step.py`, `linear.py`.

Both ways give the same bits. Bytes: weights once, and those of `step.py`.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from ...batch import Rows
from ...config import Mamba2Config
from .. import LayerState, Mixer
from . import nvrtc
from .linear import hopper, norm_linear, norm_linear_residual, operands, unserved
from .nvrtc import argument, expect_rows16, rows16
from .step import STATE_CODES, served_state, state_key, step
from .tiles import FORMAT_CODES, Defines, slices

SHARED_BYTES = 227 << 10  # of a block
STATIC_BYTES = 12 << 10  # at most what the kernel takes of them by itself
CHUNK_BYTES = {"bf16": 2048, "nvfp4": 576}  # of 16 rows and 64 inputs; FP8: 1024


@dataclass(frozen=True)
class Resident:
    """How the one launch is cut; names as in mixer.cu and step.cuh. MOST: rows that it takes."""

    MOST: int
    WARPS: int
    RPW: int
    DEPTH: int
    AHEAD: int = 0

    def shared_bytes(self, config: Mamba2Config, format: str, window_rows: int) -> int:
        """Dynamic shared memory of a block."""
        pad = 32 if format == "bf16" else 8
        tokens = 2 * self.MOST * (max(config.hidden_size, config.d_inner) + pad)
        rows, inputs = self.RPW * self.WARPS, config.ssm_state_size
        window = 4 * (window_rows * (rows + inputs + 2) + inputs)
        return self.WARPS * self.DEPTH * CHUNK_BYTES.get(format, 1024) + -(-max(tokens, window) // 16) * 16


def mixer(
    hidden: Tensor, parts: Mixer, state: LayerState, rows: Rows, *, config: Mamba2Config, out: Tensor | None = None
) -> Tensor:
    """hidden + out_proj(gated_norm(step(in_proj(norm(hidden))))) of step rows; hidden, out: bf16 [T, hidden]."""
    cut = (
        resident(parts, state, rows, config) if hidden.dtype == torch.bfloat16 and hopper(hidden.device.index) else None
    )
    if cut is not None:
        return _launch(hidden, parts, state, rows, config, cut, out)
    eps = config.layer_norm_epsilon
    projected = norm_linear(hidden, parts.norm, parts.in_proj, eps=eps, role="step")
    z, xbc, dt = projected.split([config.d_inner, config.conv_dim, config.mamba_num_heads], -1)
    y = step(
        xbc, dt, state, rows, conv_weight=parts.conv_weight, conv_bias=parts.conv_bias, dt_bias=parts.dt_bias,
        A_log=parts.A_log, D=parts.D, time_step_limit=config.time_step_limit,
    )  # fmt: skip
    return norm_linear_residual(
        y, z, parts.gated_norm, parts.out_proj, hidden, groups=config.n_groups, eps=eps, role="step", out=out
    )


def resident(parts: Mixer, state: LayerState, rows: Rows, config: Mamba2Config) -> Resident | None:
    """How to cut one launch for these rows, or None for three. Not part of a result's bits."""
    weights = parts.in_proj.weight, parts.out_proj.weight
    format = weights[0].format
    sliced = all(slices(*weight.shape) > 1 for weight in weights)
    if not rows.total_rows or format != weights[1].format or any(map(unserved, weights)) or not sliced:
        return None
    if state.arrivals is None or not served_state(state):
        return None
    cut = choose(format, config, rows.total_rows)
    if cut is None or config.mamba_head_dim % (cut.RPW * cut.WARPS):
        return None
    return cut if cut.shared_bytes(config, format, state.window_rows) <= SHARED_BYTES - STATIC_BYTES else None


def choose(format: str, config: Mamba2Config, rows: int) -> Resident | None:
    """Cuts by measurement on an H200: one launch wins at a single row, where latency is more than bytes."""
    return Resident(1, 8, 8, 6) if rows == 1 and format in ("bf16", "fp8_tensor") else None


def _launch(
    hidden: Tensor, parts: Mixer, state: LayerState, rows: Rows, config: Mamba2Config, cut: Resident, out: Tensor | None
) -> Tensor:
    hidden = rows16(hidden)
    out = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device) if out is None else out
    expect_rows16(out)
    projected = torch.empty(len(hidden), config.in_proj_rows, dtype=hidden.dtype, device=hidden.device)
    y = torch.empty(len(hidden), config.d_inner, dtype=hidden.dtype, device=hidden.device)
    format = parts.in_proj.weight.format
    shared = cut.shared_bytes(config, format, state.window_rows)
    low, high = config.time_step_limit or (0.0, 0.0)
    kernel = _kernel(
        hidden.device.index, defines(cut, config, format, state, parts.conv_bias is not None), config, shared
    )
    kernel.launch(
        (_multiprocessors(hidden.device.index), 1),
        shared,
        [
            *map(argument, (out, hidden, parts.norm, *operands(parts.in_proj), parts.gated_norm)),
            *map(argument, (*operands(parts.out_proj), projected, y, state.arrivals, state.ssm)),
            *map(argument, (state.ring_x, state.ring_B, state.ring_dt, state.ring_conv, *rows.cursors)),
            *map(argument, (parts.conv_weight, parts.conv_bias, parts.dt_bias, parts.A_log, parts.D)),
            *map(argument, (out.stride(0), hidden.stride(0), state.pad_slot)),
            *map(ctypes.c_int, (len(hidden), len(rows.slots))),
            ctypes.c_uint(state_key(state.seed, state.layer)),
            *map(argument, (low, high, config.layer_norm_epsilon)),
        ],
    )
    return out


def defines(cut: Resident, config: Mamba2Config, format: str, state: LayerState, bias: bool) -> Defines:
    """The compile-time constants of a variant."""
    rings = (("W", state.window_rows), ("R", state.ring_dt.shape[1]), ("KR", state.ring_conv.shape[1]))
    shape = (("H", config.mamba_num_heads), ("P", config.mamba_head_dim), ("G", config.n_groups))
    limited = config.time_step_limit is not None
    return (
        *shape,
        ("N", config.ssm_state_size),
        *rings,
        ("KW", config.conv_kernel),
        ("STATE", STATE_CODES[state.ssm.dtype]),
        ("HAS_BIAS", int(bias)),
        ("HAS_LIMIT", int(limited)),
        ("FORMAT", FORMAT_CODES[format]),
        ("MT", 1),
        ("NT", 1),
        *((name, getattr(cut, name)) for name in ("MOST", "WARPS", "RPW", "DEPTH", "AHEAD")),
    )


def text(config: Mamba2Config) -> str:
    """The source: two products of different shapes are one text in two namespaces."""
    hidden, inner, rows = config.hidden_size, config.d_inner, config.in_proj_rows
    product = nvrtc.source("norm.cuh", "weights.cuh", "stream.cuh")
    shapes = (("in_proj", hidden, 1, rows, inner), ("out_proj", inner, config.n_groups, hidden, 0))
    products = [
        f"namespace {name} {{\n"
        f"constexpr int K_ = {columns}, GROUPS = {groups}, ROWS_OUT = {rows_out}, LATER = {later};\n"
        f"constexpr int S = {slices(rows_out, columns)};\n"
        f"{product}\n}}"
        for name, columns, groups, rows_out, later in shapes
    ]
    return "\n".join((nvrtc.source("common.cuh", "state.cuh", "step.cuh"), *products, nvrtc.source("mixer.cu")))


@cache
def _kernel(device: int, constants: Defines, config: Mamba2Config, shared_bytes: int) -> nvrtc.Kernel:
    threads = 32 * dict(constants)["WARPS"]
    return nvrtc.load(text(config), "mixer", constants, threads=threads, shared_bytes=shared_bytes, cooperative=True)


@cache
def _multiprocessors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
