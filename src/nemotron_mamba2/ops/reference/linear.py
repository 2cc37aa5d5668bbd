"""RMSNorm and matrix products over weights of any format.

    norm_linear            rms_norm(hidden) · Wᵀ
    norm_linear_residual   rms_norm over groups of (y · silu(z)), · Wᵀ, + residual        (gate first, then norm)

Norms run in fp32 with the weight in fp32 and one cast at the end. A product with many rows takes the weight in blocks
of output rows, upcast (and dequantised) into one fp32 scratch that stays in cache, and multiplies there: exact weights,
fp32 accumulation, one rounding, no copy of the weight; on CPUs without bf16 units this also is 5 times faster than a
bf16 product. A product with few rows reads the bf16 copy once. Under `tile_rows` every product has the same row count
(the last tile is padded), which makes a row's bits independent of its batch.

Bytes of a product: weight bytes + rows × (in + out) × 2. Flops: 2 × rows × in × out.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ...batch import Role
from ...errors import ShapeError
from ...formats import BLOCK, E4M3, E4M3_MAX, Fp8Block, Fp8Channel, Fp8Tensor, Nvfp4, Plain, Weight, dequantize
from .. import Linear, Quantization

BLOCK_ROWS = 256  # output rows per scratch block: 256 × 4096 fp32 is 4 MB; a multiple of 128 for fp8_block
FEW_ROWS = 16  # up to here one pass over the copy beats upcasting the weight (measured on AVX2)
TILE_ROWS: dict[Role, int] = {"prompt": 64, "step": 1}  # rows of every product under reproducible


def rms_norm(
    x: Tensor, weight: Tensor, *, eps: float, groups: int = 1, gate: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight, over each of `groups` equal parts of the last dimension.

    x: bf16 or fp32 [T, d]. weight: fp32 [d]. gate: [T, d]; x · silu(gate) takes the place of x. Returns: [T, d] in the
    dtype of x, rounded once from fp32.
    """
    wide = x.float() if gate is None else x.float() * silu(gate.float())
    parts = wide.unflatten(-1, (groups, -1))
    scale = torch.rsqrt(parts.square().mean(-1, keepdim=True) + eps)
    return _store((parts * scale).flatten(-2) * weight, x.dtype, out)


def linear(
    x: Tensor, linear: Linear, role: Role, *, residual: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """x · Wᵀ (+ residual) for a weight of any format.

    x: bf16 or fp32 [T, in]. residual: [T, out]. out: in the dtype of x, or fp32 to keep the sums unrounded. Returns:
    [T, out] in the dtype of x, or out. Raises: ShapeError.
    """
    if out is not None and out.dtype == torch.float32:
        x = x.float()
    rows_out, columns = linear.weight.shape
    if x.dim() != 2 or x.shape[1] != columns:
        raise ShapeError(f"linear: weight [{rows_out}, {columns}] needs x [rows, {columns}], found {list(x.shape)}")
    weight, copy, kind = linear.weight, linear.copy, linear.step
    if role == "prompt":
        kind = linear.prompt
        if linear.prompt_weight is not None:
            weight, copy = linear.prompt_weight, None
    run = partial(_product, weight=weight, copy=copy, upcast=linear.upcast)
    if kind != "none":
        codes, scale = _quantize_activations(x, weight, kind)
        run = partial(_upcast_product, weight=weight, copy=copy)
        y = _tiled(run, codes, role, linear.reproducible).mul_(scale)
    else:
        y = _tiled(run, x, role, linear.reproducible)
    if residual is not None:
        y = residual.float() + y.to(x.dtype).float()
    return _store(y, x.dtype, out)


def norm_linear(
    hidden: Tensor, norm_weight: Tensor, weight: Linear, *, eps: float, role: Role, out: Tensor | None = None
) -> Tensor:
    """rms_norm(hidden) · Wᵀ.

    hidden: bf16 or fp32 [T, in]. norm_weight: fp32 [in]. Returns: [T, out] in the dtype of hidden.
    """
    return linear(rms_norm(hidden, norm_weight, eps=eps), weight, role, out=out)


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
    """residual + rms_norm(y · silu(z)) · Wᵀ, normed over each group (arXiv 2405.21060 §7; gate before norm).

    y, z: [T, d_inner]. norm_weight: fp32 [d_inner]. residual: [T, hidden]. Returns: [T, hidden] in residual's dtype.
    """
    normed = rms_norm(y, norm_weight, eps=eps, groups=groups, gate=z)
    return linear(normed, weight, role, residual=residual, out=out)


def silu(x: Tensor) -> Tensor:
    """x · sigmoid(x) in fp32, element by element: torch's own rounds otherwise in the tail of a vector, so that a row's
    bits would depend on where it lies."""
    return x / (1 + torch.exp(-x))


def _store(value: Tensor, dtype: torch.dtype, out: Tensor | None) -> Tensor:
    return value.to(dtype) if out is None else out.copy_(value)


def _tiled(run: Callable[[Tensor], Tensor], x: Tensor, role: Role, reproducible: bool) -> Tensor:
    """run(x), in tiles of a fixed row count (the last one padded) when that is asked for."""
    if not reproducible:
        return run(x)
    tile = TILE_ROWS[role]
    parts = F.pad(x, (0, 0, 0, -len(x) % tile)).split(tile)
    # A part of its own memory: the product of one row depends on how its first byte is aligned.
    return torch.cat([run(part.clone()) for part in parts])[: len(x)]


def _quantize_activations(x: Tensor, weight: Weight, kind: Quantization) -> tuple[Tensor, Tensor]:
    """The e4m3 values a W8A8 kernel would multiply, as fp32 [T, in], and the fp32 scale of its result, [] or [T, 1]."""
    wide = x.float()
    if kind == "fp8_static":
        assert isinstance(weight, Fp8Tensor) and weight.input_scale is not None  # the plan's promise
        scale = weight.input_scale
    else:
        scale = (wide.abs().amax(-1, keepdim=True) / E4M3_MAX).clamp(min=torch.finfo(torch.float32).tiny)
    return (wide / scale).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3).float(), scale


def _product(x: Tensor, *, weight: Weight, copy: Tensor | None, upcast: bool) -> Tensor:
    """x · Wᵀ accumulated in fp32: [T, out] in the dtype of x, or in fp32 still to be rounded."""
    values = weight.weight if isinstance(weight, Plain) else copy
    if values is not None and values.dtype == x.dtype and (len(x) <= FEW_ROWS or not upcast):
        return F.linear(x, values)
    return _upcast_product(x, weight=weight, copy=copy)


def _upcast_product(x: Tensor, *, weight: Weight, copy: Tensor | None) -> Tensor:
    """x · Wᵀ in fp32, over blocks of output rows. x: bf16 or fp32 [T, in]. Returns: fp32 [T, out]."""
    x = x.float()
    y = x.new_empty(len(x), weight.shape[0])
    for start in range(0, y.shape[1], BLOCK_ROWS):
        rows = slice(start, start + BLOCK_ROWS)
        block = copy[rows].float() if copy is not None else dequantize(_rows_of(weight, rows))
        y[:, rows] = x @ block.T
    return y


def _rows_of(weight: Weight, rows: slice) -> Weight:
    """Some output rows of a weight, as a weight of the same format. rows begins at a multiple of 128."""
    if isinstance(weight, Plain):
        return Plain(weight.weight[rows])
    if isinstance(weight, Fp8Tensor):
        return Fp8Tensor(weight.weight[rows], weight.scale)
    if isinstance(weight, Fp8Channel):
        return Fp8Channel(weight.weight[rows], weight.scale[rows])
    if isinstance(weight, Fp8Block):
        scale_rows = slice(rows.start // BLOCK, -(-rows.stop // BLOCK))
        return Fp8Block(weight.weight[rows], weight.scale[scale_rows])
    return Nvfp4(weight.weight[rows], weight.scale[rows], weight.global_scale)
