"""norm_linear, linear and norm_linear_residual on NVIDIA GPUs; step rows run `linear.cu` and `linear_many.cu`.

Weights move once per step (bytes: weight + scales + rows × (in + out) × 2; flops: 2 × rows × in × out). bf16 and FP8
are read as they lie in the checkpoint; NVFP4 is repacked once into mma fragment order. Up to FUSED_ROWS the norm runs
inside the product; above, a kernel of its own writes the same bits. How many tiles a warp holds depends on the row
count; the number of slices of K does not, and it alone (with the instruction) decides a row's bits.

Prompt rows run on cuBLAS (`prompt.py`); under `reproducible` on the kernels of step rows.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias

import torch
from torch import Tensor

from ...batch import Role
from ...errors import ShapeError
from ...formats import Nvfp4, Plain, Weight
from .. import Linear, reference
from . import nvrtc, prompt
from .nvrtc import argument, rows16

FORMAT_CODES = {"bf16": 0, "fp8_tensor": 1, "fp8_channel": 2, "fp8_block": 3, "nvfp4": 4}
FUSED_ROWS = 1  # above, norming once beats norming in every block (measured)
STAGES = 4  # chunks of tokens in shared memory, of linear_many
FUSED_SHARED_BYTES = 96 << 10
SHARED_LIMIT_BYTES = 224 << 10
INPUTS_PER_CHUNK = 64
ROWS_PER_TILE = 16


@dataclass(frozen=True)
class Tiles:
    """How one launch cuts the work; names as in linear.cu and linear_many.cu. WN = 0: the few-row kernel."""

    WM: int
    MT: int
    NT: int
    DEPTH: int
    WN: int = 0

    @property
    def rows(self) -> int:
        """Weight rows of one block."""
        return ROWS_PER_TILE * self.MT * self.WM

    @property
    def tokens(self) -> int:
        """Tokens of one block."""
        return 8 * self.NT * max(self.WN, 1)


def slices(rows_out: int, columns: int) -> int:
    """Slices of K: eight where few tiles would leave multiprocessors idle, else four. Part of a result's bits."""
    return 8 if rows_out // ROWS_PER_TILE < 528 or columns >= 4096 else 4


def tiles(format: str, rows_out: int, rows: int) -> Tiles:
    """Tiles for a row count, by measurement on H200. Not part of a result's bits."""
    if rows <= 8:
        return Tiles(1, 1, 1, 2 if format == "bf16" else 4)
    if rows <= 16:
        return Tiles(1, 1, 2, 4) if format == "nvfp4" else Tiles(1, 2, 2, 2)
    wide = rows_out > 8192  # in_proj: enough rows to share tokens between warps
    if format == "bf16":
        if rows <= 64:
            return Tiles(1, 2, 8, 2)
        return Tiles(2, 2, 4, 2, WN=2) if wide else Tiles(4, 1, 8, 2, WN=1)
    return Tiles(4, 1, 8, 2, WN=1) if wide and rows > 64 else Tiles(2, 2, 4, 2)


def norm_linear(
    hidden: Tensor, norm_weight: Tensor, weight: Linear, *, eps: float, role: Role, out: Tensor | None = None
) -> Tensor:
    """As `ops.reference.norm_linear`; hidden: bf16."""
    if unserved(weight.weight):
        return reference.norm_linear(hidden, norm_weight, weight, eps=eps, role=role, out=out)
    if role == "step":
        return _step(hidden, weight, norm=1, norm_weight=norm_weight, eps=eps, out=out)
    return _prompt(hidden, weight, norm_weight=norm_weight, eps=eps, out=out)


def linear(x: Tensor, linear: Linear, role: Role, *, out: Tensor | None = None) -> Tensor:
    """As `ops.reference.linear`; x: bf16, or fp32 for an fp32 result (logits), which the reference gives."""
    if x.dtype == torch.float32 or unserved(linear.weight):
        return reference.linear(x, linear, role, out=out)
    if role == "step":
        return _step(x, linear, norm=0, out=out)
    return _prompt(x, linear, out=out)


def norm_linear_residual(
    y: Tensor,
    z: Tensor,
    norm_weight: Tensor,
    weight: Linear,
    residual: Tensor,
    *,
    groups: int,
    eps: float,
    role: Role,
    out: Tensor | None = None,
) -> Tensor:
    """As `ops.reference.norm_linear_residual`; bf16, one rounding after the residual is added."""
    if unserved(weight.weight):
        return reference.norm_linear_residual(
            y, z, norm_weight, weight, residual, groups=groups, eps=eps, role=role, out=out
        )
    if role == "step":
        return _step(
            y, weight, norm=2, z=z, norm_weight=norm_weight, groups=groups, eps=eps, residual=residual, out=out
        )
    product = _prompt(y, weight, norm_weight=norm_weight, groups=groups, eps=eps, gate=z)
    return torch.add(residual, product, out=out)


def rms_norm(
    x: Tensor, weight: Tensor, *, eps: float, groups: int = 1, gate: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """RMSNorm of x, or of x · silu(gate), over each of `groups` parts of a row; x: bf16 [T, d]. Returns: the same."""
    x, gate = rows16(x), None if gate is None else rows16(gate)
    rows, width = x.shape
    out = torch.empty(rows, width, dtype=x.dtype, device=x.device) if out is None else out
    if not rows:
        return out
    kernel = _norm_kernel(x.device.index, width, groups, gate is not None)
    z = x if gate is None else gate
    strides = (out.stride(0), x.stride(0), z.stride(0))
    kernel.launch((rows, 1), 0, [*map(argument, (out, x, z, weight)), *map(argument, strides), argument(eps)])
    return out


def pack(weight: Nvfp4) -> tuple[Tensor, Tensor]:
    """Codes and block scales in the order that linear.cu reads them.

    Per tile of 16 rows, chunk of 64 inputs and lane (g, t): 16 bytes with rows g and g + 8, inputs 16t..16t+15, placed
    so that a mask or a shift and a mask gives a bf16 pair; and two scale codes, (exponent + 9) · 8 + mantissa. A block
    whose scale is zero gets zero codes. Returns: int32 [out · in / 8], uint8 [out · in / 16].
    """
    rows, columns = weight.shape
    tiles_, chunks = rows // ROWS_PER_TILE, columns // INPUTS_PER_CHUNK
    scale = weight.scale.float()
    codes = torch.stack((weight.weight & 15, weight.weight >> 4), -1).view(rows, columns // 16, 16)
    codes = codes.where((scale != 0).unsqueeze(-1), torch.zeros_like(codes)).int()
    # tile, half (g or g + 8), g, chunk, t, j (k16 step), pair, element → tile, chunk, g, t, j, pair, half, element
    c = codes.view(tiles_, 2, 8, chunks, 4, 4, 2, 2).permute(0, 3, 2, 4, 5, 6, 1, 7)
    magnitude, sign = c & 7, c >> 3
    m = [magnitude[..., p, h, :] for p, h in ((0, 0), (0, 1), (1, 0), (1, 1))]
    s = [sign[..., p, h, :] for p, h in ((0, 0), (0, 1), (1, 0), (1, 1))]
    lanes = (s[0] << 15) | (m[0] << 6) | (s[1] << 12) | (m[1] << 3) | (s[2] << 9) | m[2]
    lanes |= (s[3] << 11) | ((m[3] >> 1) << 13) | ((m[3] & 1) << 10)
    words = lanes[..., 0] | (lanes[..., 1] << 16)
    fraction, exponent = torch.frexp(scale)  # scale = fraction · 2^exponent, fraction in [½, 1)
    code = ((exponent - 1 + 9) << 3) + ((2 * fraction - 1) * 8).int()
    code = code.where(scale != 0, torch.zeros_like(code)).to(torch.uint8)
    code = code.view(tiles_, 2, 8, chunks, 4).permute(0, 3, 2, 4, 1)  # tile, chunk, g, t, half
    return words.contiguous().flatten(), code.contiguous().flatten()


def unserved(weight: Weight) -> str:
    """Why the kernels cannot take a matrix, so that the reference's torch runs it; "" when they can."""
    rows, columns = weight.shape
    if rows % ROWS_PER_TILE or columns % INPUTS_PER_CHUNK:
        return f"no kernel for [{rows}, {columns}] (out % 16, in % 64): plain torch"
    if isinstance(weight, Plain) and weight.weight.dtype != torch.bfloat16:
        return f"no kernel for plain {str(weight.weight.dtype).removeprefix('torch.')} weights: plain torch"
    return ""


def linear_cost(weight: Weight, rows: int) -> tuple[int, int]:
    """(bytes, flops) of one product."""
    rows_out, columns = weight.shape
    return weight.nbytes + 2 * rows * (rows_out + columns), 2 * rows * rows_out * columns


def _step(
    x: Tensor,
    linear: Linear,
    *,
    norm: int,
    z: Tensor | None = None,
    norm_weight: Tensor | None = None,
    residual: Tensor | None = None,
    groups: int = 1,
    eps: float = 0.0,
    out: Tensor | None = None,
) -> Tensor:
    rows_out, columns = linear.weight.shape
    rows = len(x)
    if x.shape != (rows, columns) or x.dtype != torch.bfloat16:
        raise ShapeError(f"linear: expected bfloat16 x [rows, {columns}], found {x.dtype} {list(x.shape)}")
    y = torch.empty(rows, rows_out, dtype=x.dtype, device=x.device) if out is None else out
    if not rows:
        return y
    x = rows16(x)
    fused_bytes = rows * (columns + 32) * 2
    if norm and (rows > FUSED_ROWS or fused_bytes > FUSED_SHARED_BYTES):
        x = rms_norm(x, norm_weight, eps=eps, groups=groups, gate=z)  # type: ignore[arg-type]
        norm, fused_bytes = 0, 0
    z = x if z is None or not norm else rows16(z)
    residual_rows = None if residual is None else rows16(residual)
    count, tile = slices(rows_out, columns), tiles(linear.weight.format, rows_out, rows)
    kernel = _kernel(
        x.device.index,
        step_defines(
            linear.weight.format,
            columns,
            count,
            tile,
            norm,
            groups=groups if norm else 1,
            residual=residual is not None,
        ),
    )
    shared = shared_bytes(count, tile, normed_bytes=fused_bytes if norm else 0)
    codes, block_scales, scale = _operands(linear)
    r = x if residual_rows is None else residual_rows
    kernel.launch(
        (-(-rows_out // tile.rows), -(-rows // tile.tokens)),
        shared,
        [
            *map(argument, (y, codes, block_scales, scale, x, z, norm_weight, r)),
            *(argument(t.stride(0)) for t in (y, x, z, r)),
            *map(ctypes.c_int, (rows_out, rows)),
            argument(eps),
        ],
    )
    return y


def _operands(linear: Linear) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Weight codes, block scales and the scale of the sums."""
    weight = linear.weight
    if isinstance(weight, Nvfp4):
        assert linear.packed is not None  # the plan's promise
        return *linear.packed, weight.global_scale
    return weight.weight, None, None if isinstance(weight, Plain) else weight.scale


def _prompt(
    x: Tensor,
    linear: Linear,
    *,
    norm_weight: Tensor | None = None,
    groups: int = 1,
    eps: float = 0.0,
    gate: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Prompt rows on cuBLAS or, so that a row's bits depend on nothing else, on the kernels of step rows."""
    if linear.prompt != "none":
        codes = prompt.cast(x, linear, norm_weight=norm_weight, groups=groups, eps=eps, gate=gate)
        if not linear.reproducible:
            return prompt.product(codes, linear, out=out)
        y = _step(codes.values.to(x.dtype), Linear(prompt.prompt_weight(linear)), norm=0)
        y = (y * codes.scale).to(x.dtype)
        return y if out is None else out.copy_(y)
    if norm_weight is not None:
        x = rms_norm(x, norm_weight, eps=eps, groups=groups, gate=gate)
    return _step(x, linear, norm=0, out=out) if linear.reproducible else prompt.product(x, linear, out=out)


def shared_bytes(slice_count: int, tile: Tiles, *, normed_bytes: int) -> int:
    """Dynamic shared memory of one launch."""
    if tile.WN:
        return max(STAGES * tile.tokens * 2 * INPUTS_PER_CHUNK, 2 * tile.tokens * (tile.rows + 2))
    return max(4 * slice_count * tile.rows * (tile.tokens + 1), normed_bytes)


Defines: TypeAlias = tuple[tuple[str, int], ...]


def step_defines(
    format: str, columns: int, slice_count: int, tile: Tiles, norm: int, *, groups: int, residual: bool
) -> Defines:
    """The compile-time constants of one variant of linear.cu or linear_many.cu."""
    return (
        ("FORMAT", FORMAT_CODES[format]),
        ("K_", columns),
        ("S", slice_count),
        *((name, getattr(tile, name)) for name in ("WM", "MT", "NT", "DEPTH", "WN")),
        ("STAGES", STAGES),
        ("NORM", norm),
        ("GROUPS", groups),
        ("RESIDUAL", int(residual)),
    )


def step_source(defines: Defines) -> tuple[str, str, int]:
    """(source, kernel name, threads of a block) of a variant."""
    d = dict(defines)
    if d["WN"]:
        return nvrtc.source("common.cuh", "weights.cuh", "linear_many.cu"), "linear_many", 32 * d["WM"] * d["WN"]
    return nvrtc.source("common.cuh", "norm.cuh", "weights.cuh", "linear.cu"), "linear", 32 * d["WM"] * d["S"]


@cache
def _kernel(device: int, defines: Defines) -> nvrtc.Kernel:
    text, name, threads = step_source(defines)
    return nvrtc.load(text, name, defines, threads=threads, shared_bytes=SHARED_LIMIT_BYTES)


@cache
def _norm_kernel(device: int, width: int, groups: int, gated: bool) -> nvrtc.Kernel:
    defines = (("K_", width), ("GROUPS", groups), ("GATED_", int(gated)))
    return nvrtc.load(
        nvrtc.source("common.cuh", "norm.cuh", "norm.cu"), "norm_rows", defines, threads=256, shared_bytes=0
    )
