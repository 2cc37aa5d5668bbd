"""norm_linear, linear and norm_linear_residual on NVIDIA GPUs; step rows run `linear.cu`, `linear_many.cu` and, on
Hopper, `linear_wide.cu`.

Weights move once per step (bytes: weight + scales + rows × (in + out) × 2; flops: 2 × rows × in × out). bf16 and FP8
are read as they lie in the checkpoint; NVFP4 is repacked once into mma fragment order. Up to FUSED_ROWS the norm runs
inside the product; above, a kernel of its own writes the same bits. How a launch is cut depends on the row count
(`tiles.py`); the number of slices of K does not, and it alone (with the instruction) decides a row's bits.

Prompt rows run on cuBLAS (`prompt.py`); under `reproducible` on the kernels of step rows.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from ...batch import Role
from ...errors import ShapeError
from ...formats import Nvfp4, Plain, Weight
from .. import Linear, reference
from . import nvrtc, prompt
from .nvrtc import argument, expect_rows16, rows16
from .tiles import INPUTS_PER_CHUNK, ROWS_PER_TILE, Defines, Few, Tiles, Wide, choose, defines, slices, source

FUSED_ROWS = 1  # above, norming once beats norming in every block (measured)
FUSED_SHARED_BYTES = 96 << 10
PACKED_AT_ONCE = 8 << 20  # weights: some 40 bytes each on the way


@dataclass(frozen=True, eq=False)
class Groups:
    """Rows that share a matrix of a stack, so many at most in a group.

    table: int32 [most + 1, 4]; first how many groups there are, then matrix, first place and count of each. order:
    int32 [rows], the row of y at every place. most: groups that there may be. tokens: rows of a group at most, as many
    as a tile takes.
    """

    table: Tensor
    order: Tensor
    most: int
    tokens: int


@dataclass(frozen=True, eq=False)
class Terms:
    """Rows to add to a product: found bf16 [rows · count, out], worth fp32 [rows, count] or None (all 1)."""

    found: Tensor
    count: int
    worth: Tensor | None = None


def norm_linear(
    hidden: Tensor, norm_weight: Tensor, weight: Linear, *, eps: float, role: Role, out: Tensor | None = None
) -> Tensor:
    """As `ops.reference.norm_linear`; hidden: bf16."""
    if unserved(weight.weight):
        return reference.norm_linear(hidden, norm_weight, weight, eps=eps, role=role, out=out)
    if role == "step":
        return step_linear(hidden, weight, norm=1, norm_weight=norm_weight, eps=eps, out=out)
    return _prompt(hidden, weight, norm_weight=norm_weight, eps=eps, out=out)


def linear(
    x: Tensor, linear: Linear, role: Role, *, residual: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """As `ops.reference.linear`; x: bf16, or fp32 for an fp32 product, which the reference gives. Step rows round
    once, after the residual is added, or not at all into an fp32 `out`."""
    if x.dtype == torch.float32 or unserved(linear.weight):
        return reference.linear(x, linear, role, residual=residual, out=out)
    if role == "step":
        return step_linear(x, linear, norm=0, residual=residual, out=out)
    if residual is None:
        return _prompt(x, linear, out=out)
    return torch.add(residual, _prompt(x, linear), out=out)


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
        return step_linear(
            y, weight, norm=2, z=z, norm_weight=norm_weight, groups=groups, eps=eps, residual=residual, out=out
        )
    product = _prompt(y, weight, norm_weight=norm_weight, groups=groups, eps=eps, gate=z)
    return torch.add(residual, product, out=out)


def rms_norm(
    x: Tensor, weight: Tensor, *, eps: float, groups: int = 1, gate: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """RMSNorm of x, or of x · silu(gate), over each of `groups` parts of a row; x: bf16 [T, d]. Returns: the same."""
    return _norm(x, weight, eps=eps, groups=groups, gate=gate, order=0, out=out)


def _norm(
    x: Tensor, weight: Tensor, *, eps: float, groups: int, gate: Tensor | None, order: int, out: Tensor | None = None
) -> Tensor:
    x, gate = rows16(x), None if gate is None else rows16(gate)
    rows, width = x.shape
    if out is None:
        out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    expect_rows16(out)
    if not rows:
        return out
    kernel = _norm_kernel(x.device.index, width, groups, gate is not None, order)
    z = x if gate is None else gate
    strides = (out.stride(0), x.stride(0), z.stride(0))
    kernel.launch((rows, 1), 0, [*map(argument, (out, x, z, weight)), *map(argument, strides), argument(eps)])
    return out


def pack(weight: Nvfp4) -> tuple[Tensor, Tensor]:
    """Codes and block scales of a matrix, or of a stack of them, in the order that linear.cu reads them.

    Per tile of 16 rows, chunk of 64 inputs and lane (g, t): 16 bytes with rows g and g + 8, inputs 16t..16t+15, placed
    so that a mask or a shift and a mask gives a bf16 pair; and two scale codes, (exponent + 9) · 8 + mantissa. A block
    whose scale is zero gets zero codes. Returns: int32 [out · in / 8], uint8 [out · in / 16]; a stack's matrices follow
    each other.
    """
    columns = weight.shape[-1]
    codes, scales = weight.weight.flatten(0, -2), weight.scale.flatten(0, -2)
    words = torch.empty(codes.numel() // 4, dtype=torch.int32, device=codes.device)
    places = torch.empty(scales.numel(), dtype=torch.uint8, device=codes.device)
    slab = max(PACKED_AT_ONCE // columns // ROWS_PER_TILE, 1) * ROWS_PER_TILE
    for first in range(0, len(codes), slab):
        rows = slice(first, first + slab)
        found = _pack(codes[rows], scales[rows].float())
        for out, part in zip((words, places), found, strict=True):
            at = first * (len(out) // len(codes))
            out[at : at + len(part)] = part
    return words, places


def _pack(weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    rows, columns = len(weight), 2 * weight.shape[1]
    tiles_, chunks = rows // ROWS_PER_TILE, columns // INPUTS_PER_CHUNK
    codes = torch.stack((weight & 15, weight >> 4), -1).view(rows, columns // 16, 16)
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
    rows, columns = weight.shape[-2:]
    if rows % ROWS_PER_TILE or columns % INPUTS_PER_CHUNK:
        return f"no kernel for [{rows}, {columns}] (out % 16, in % 64): plain torch"
    if isinstance(weight, Plain) and weight.weight.dtype != torch.bfloat16:
        return f"no kernel for plain {str(weight.weight.dtype).removeprefix('torch.')} weights: plain torch"
    return ""


def linear_cost(weight: Weight, rows: int) -> tuple[int, int]:
    """(bytes, flops) of one product."""
    rows_out, columns = weight.shape
    return weight.nbytes + 2 * rows * (rows_out + columns), 2 * rows * rows_out * columns


def step_linear(
    x: Tensor,
    linear: Linear,
    *,
    norm: int = 0,
    z: Tensor | None = None,
    norm_weight: Tensor | None = None,
    residual: Tensor | None = None,
    groups: int = 1,
    eps: float = 0.0,
    square: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """A product of step rows, cut for their number: norm(x) · Wᵀ (+ residual), or relu(norm(x) · Wᵀ)² (square)."""
    rows_out, columns = linear.weight.shape
    rows = len(x)
    if x.shape != (rows, columns) or x.dtype != torch.bfloat16:
        raise ShapeError(f"linear: expected bfloat16 x [rows, {columns}], found {x.dtype} {list(x.shape)}")
    y = torch.empty(rows, rows_out, dtype=x.dtype, device=x.device) if out is None else out
    if not rows:
        return y
    expect_rows16(y)
    x = rows16(x)
    format = linear.weight.format
    tile, slice_count = step_tiles(linear, rows, x.device.index)
    if isinstance(tile, Wide):
        x = ordered(x, format, norm=norm, norm_weight=norm_weight, groups=groups, eps=eps, z=z)
        norm = 0
    elif norm and (rows > FUSED_ROWS or rows * (columns + 32) * 2 > FUSED_SHARED_BYTES):
        x = rms_norm(x, norm_weight, eps=eps, groups=groups, gate=z)  # type: ignore[arg-type]
        norm = 0
    product(
        y, x, linear, tile, slice_count,
        residual=residual, norm=norm, z=z, norm_weight=norm_weight, groups=groups, eps=eps, square=square,
    )  # fmt: skip
    return y


def step_tiles(linear: Linear, rows: int, device: int) -> tuple[Tiles, int]:
    """How a product of so many step rows is cut, and the slices of K that it always has."""
    rows_out, columns = linear.weight.shape
    return choose(linear.weight.format, rows_out, columns, rows, hopper=hopper(device)), slices(rows_out, columns)


def ordered(
    x: Tensor,
    format: str,
    *,
    norm: int = 0,
    norm_weight: Tensor | None = None,
    groups: int = 1,
    eps: float = 0.0,
    z: Tensor | None = None,
) -> Tensor:
    """Rows as linear_wide.cu reads them, normed first if `norm` says so; x: bf16 [T, in]. Returns: the same."""
    order = 1 if format == "bf16" else 2
    if norm:
        assert norm_weight is not None
        return _norm(x, norm_weight, eps=eps, groups=groups, gate=z, order=order)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _order_kernel(x.device.index, x.shape[1], order).launch(
        (len(x), 1), 0, [*map(argument, (out, x)), *map(argument, (out.stride(0), x.stride(0)))]
    )
    return out


def product(
    y: Tensor,
    x: Tensor,
    linear: Linear,
    tile: Tiles,
    slice_count: int,
    *,
    residual: Tensor | None = None,
    norm: int = 0,
    z: Tensor | None = None,
    norm_weight: Tensor | None = None,
    groups: int = 1,
    eps: float = 0.0,
    square: bool = False,
    stack: Groups | None = None,
    per_row: int = 1,
    terms: Terms | None = None,
) -> None:
    """One launch of y = norm(x) · Wᵀ (+ residual), cut as `tile` says; x of a `Wide` one: `ordered`.

    square: y = relu(x · Wᵀ)². stack: the weight is a stack of matrices, and which row takes which; `Few` tiles read row
    order[place] / per_row of x, `Wide` ones row place. terms: rows to add to the product before the residual (`Few`
    tiles only).
    """
    rows_out, columns = linear.weight.shape[-2:]
    rows, format = len(x), linear.weight.format
    z = x if z is None or not norm else rows16(z)
    r = x if residual is None else rows16(residual)
    shared = tile.shared_bytes(format, slice_count, rows * (columns + 32) * 2 if norm else 0)
    kernel = _kernel(
        x.device.index,
        tile,
        defines(
            format,
            columns,
            slice_count,
            tile,
            norm,
            groups=groups if norm else 1,
            residual=residual is not None,
            out32=y.dtype == torch.float32,
        )
        + _extras(tile, square, None if stack is None else per_row, terms),
        shared,
    )
    codes, block_scales, scale = _operands(linear)
    table, order = (None, None) if stack is None else (stack.table, stack.order)
    found, worth, found_pitch = (None, None, 0) if terms is None else (terms.found, terms.worth, terms.found.stride(0))
    if isinstance(tile, Wide):
        arguments = [
            *map(argument, (y, codes, block_scales, scale, r, y.stride(0), r.stride(0))),
            *map(ctypes.c_int, (rows_out, rows)),
            nvrtc.tensor_map(x, tile.NTOK, INPUTS_PER_CHUNK),
            *map(argument, (table, order)),
        ]
    else:
        arguments = [
            *map(argument, (y, codes, block_scales, scale, x, z, norm_weight, r)),
            *(argument(t.stride(0)) for t in (y, x, z, r)),
            *map(ctypes.c_int, (rows_out, rows)),
            argument(eps),
            *map(argument, (table, order, found, worth, found_pitch)),
        ]
    grid = tile.grid(rows_out, rows) if stack is None else (tile.grid(rows_out, 1)[0], stack.most)
    kernel.launch(grid, shared, arguments)


def _extras(tile: Tiles, square: bool, per_row: int | None, terms: Terms | None) -> Defines:
    """Constants of what few products have; none of them changes a product without."""
    found = [("SQUARE", 1)] if square else []
    if per_row is not None:
        assert isinstance(tile, Few | Wide)
        found.append(("STACK", per_row if isinstance(tile, Few) else 1))
    if terms is not None:
        assert isinstance(tile, Few)
        found += [("TERMS", terms.count), ("WEIGHED", int(terms.worth is not None))]
    return tuple(found)


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
        y = step_linear(codes.values.to(x.dtype), Linear(prompt.prompt_weight(linear)), norm=0)
        y = (y * codes.scale).to(x.dtype)
        return y if out is None else out.copy_(y)
    if norm_weight is not None:
        x = rms_norm(x, norm_weight, eps=eps, groups=groups, gate=gate)
    return step_linear(x, linear, norm=0, out=out) if linear.reproducible else prompt.product(x, linear, out=out)


@cache
def hopper(device: int) -> bool:
    """Whether a device has the instructions of sm_90a."""
    return torch.cuda.get_device_capability(device) == (9, 0)


@cache
def _kernel(device: int, tile: Tiles, constants: Defines, shared_bytes: int) -> nvrtc.Kernel:
    text, name = source(tile)
    threads, specific = tile.threads(dict(constants)["S"]), isinstance(tile, Wide)
    return nvrtc.load(text, name, constants, threads=threads, shared_bytes=shared_bytes, specific=specific)


@cache
def _norm_kernel(device: int, width: int, groups: int, gated: bool, order: int) -> nvrtc.Kernel:
    constants = (("K_", width), ("GROUPS", groups), ("GATED_", int(gated)), ("ORDER", order))
    return nvrtc.load(norm_source(), "norm_rows", constants, threads=256, shared_bytes=0)


@cache
def _order_kernel(device: int, width: int, order: int) -> nvrtc.Kernel:
    constants = (("K_", width), ("GROUPS", 1), ("GATED_", 0), ("ORDER", order))
    return nvrtc.load(norm_source(), "order_rows", constants, threads=256, shared_bytes=0)


def norm_source() -> str:
    """The text of the norm and the ordering of rows."""
    return nvrtc.source("common.cuh", "norm.cuh", "norm.cu")
