"""Products of prompt rows: what they read (norm and FP8 cast in one launch, `cast.cu`), then cuBLAS.

bf16 weights: `torch.mm`. FP8 activations on FP8 weights: `torch._scaled_mm`; with one scale for all rows its sums are
fast ones (5 to 9 % less time; error 2.0e-3 to 2.6e-3 instead of 1.7e-3, where the codes alone cost 2.6e-2). All else:
the weight's values in one bf16 scratch (`dequantize.cu`, the bits of `formats.dequantize`), then `torch.mm`; above some
hundred rows the scratch costs less than the product. Bytes of the scratch: 2 per weight, freed after the product.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from ...formats import E4M3, Fp8Channel, Fp8Tensor, Nvfp4, Plain, Weight
from .. import Linear
from . import nvrtc
from .nvrtc import argument, rows16
from .tiles import FORMAT_CODES

CAST_THREADS = 256
PACKED = 5  # FORMAT of dequantize.cu


@dataclass(frozen=True, eq=False)
class Codes:
    """FP8 activations: values e4m3 [T, in]; scale fp32, [] of the checkpoint or [T, 1] of each row."""

    values: Tensor
    scale: Tensor


def cast(
    x: Tensor,
    linear: Linear,
    *,
    norm_weight: Tensor | None = None,
    groups: int = 1,
    eps: float = 0.0,
    gate: Tensor | None = None,
) -> Codes:
    """Rows of x as the FP8 product reads them, normed first when norm_weight is given; x, gate: bf16 [T, in]."""
    x, z = rows16(x), x if gate is None else rows16(gate)
    rows, width = x.shape
    codes = torch.empty(rows, width, dtype=E4M3, device=x.device)
    dynamic = linear.prompt == "fp8_per_row"
    weight = prompt_weight(linear)
    static_scale = weight.input_scale if isinstance(weight, Fp8Tensor) else None
    scale = torch.empty(rows, 1, device=x.device) if dynamic else static_scale
    assert scale is not None  # the plan's promise
    if rows:
        norm = 0 if norm_weight is None else 1 if gate is None else 2
        _cast_kernel(x.device.index, width, groups, norm, dynamic).launch(
            (rows, 1),
            0,
            [
                *map(argument, (codes, scale, x, z, norm_weight, static_scale, x.stride(0), z.stride(0))),
                argument(eps),
            ],
        )
    return Codes(codes, scale)


def product(x: Tensor | Codes, linear: Linear, *, out: Tensor | None = None) -> Tensor:
    """x · Wᵀ in bf16, one rounding."""
    weight = prompt_weight(linear)
    if isinstance(x, Tensor):
        return torch.mm(x, values(weight, linear.packed).T, out=out)
    assert isinstance(weight, (Fp8Tensor, Fp8Channel))
    scale = weight.scale.unsqueeze(0) if isinstance(weight, Fp8Channel) else weight.scale
    y = torch._scaled_mm(
        x.values, weight.weight.T, x.scale, scale, out_dtype=torch.bfloat16, use_fast_accum=x.scale.numel() == 1
    )
    return y if out is None else out.copy_(y)


def prompt_weight(linear: Linear) -> Weight:
    """The weight that prompt rows use."""
    return linear.weight if linear.prompt_weight is None else linear.prompt_weight


def values(weight: Weight, packed: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """The weight in bf16 [out, in]; a plain one as it is. packed: what to read when the weight was given back."""
    if isinstance(weight, Plain):
        return weight.weight
    rows, columns = weight.shape
    scale = weight.global_scale if isinstance(weight, Nvfp4) else weight.scale
    out = torch.empty(rows, columns, dtype=torch.bfloat16, device=scale.device)
    codes, blocks, format = weight.weight, None, FORMAT_CODES[weight.format]
    if isinstance(weight, Nvfp4):
        blocks = weight.scale
        if codes.is_meta:
            assert packed is not None  # the plan's promise
            (codes, blocks), format = packed, PACKED
    kernel = _values_kernel(out.device.index, format)
    kernel.launch(
        (-(-columns // (16 * CAST_THREADS)), rows),
        0,
        [*map(argument, (out, codes, blocks, scale)), *map(argument, (rows, columns))],
    )
    return out


@cache
def _cast_kernel(device: int, width: int, groups: int, norm: int, dynamic: bool) -> nvrtc.Kernel:
    defines = (("K_", width), ("GROUPS", groups), ("NORM", norm), ("DYNAMIC", int(dynamic)))
    text = nvrtc.source("common.cuh", "norm.cuh", "cast.cu")
    return nvrtc.load(text, "cast", defines, threads=CAST_THREADS, shared_bytes=0)


@cache
def _values_kernel(device: int, format: int) -> nvrtc.Kernel:
    text = nvrtc.source("common.cuh", "dequantize.cu")
    return nvrtc.load(text, "dequantize", (("FORMAT", format),), threads=CAST_THREADS, shared_bytes=0)
