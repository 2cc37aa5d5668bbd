"""Values → formats: the inverse of `formats.dequantize`, in plain torch.

    fp8            scale = max|w| / 448, per tensor, output row or 128×128 block
    nvfp4, absmax  global = max|w| / (6·448); block = e4m3(max|w of the block| / (6·global))
    nvfp4, mse     global = max|w| / (6·256); block = e4m3 of that block's maximum put at 6 or at 4, whichever leaves
                   the smaller square error over its 16 weights (equal: 6)
    nvfp4, sweep   global = max|w| / (6·448); block = of the e4m3 values from 4 below to 7 above that of absmax, the one
                   that leaves the smallest square error (equal: the one nearest to absmax)

A block scale lies in [2⁻⁹, 448]; that of a block of zeros means nothing, and is what ModelOpt writes there. With its
maximum at 4 a block's scale is half as large again, hence the smaller divisor 256. The sweep ends before twice the
scale, whose grid is a part of that of the scale itself. Codes round to nearest, ties to even. Every quotient is a true
division of fp32 tensors and every sum has a fixed order, so that a CPU and a GPU write the same bytes.

Sources: NVIDIA ModelOpt's export code; arXiv 2512.02010 (four over six).
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import FormatError
from ...formats import (
    BLOCK,
    E4M3,
    E4M3_MAX,
    NVFP4_BLOCK,
    Fp8Block,
    Fp8Channel,
    Fp8Tensor,
    Nvfp4,
    Plain,
    Weight,
)

Search: TypeAlias = Literal["absmax", "mse", "sweep"]
E2M1_MAX = 6.0
E2M1_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # between neighbouring magnitudes
SMALLEST_BLOCK_SCALE = 2.0**-9
FP32_EXPONENT = 0x7F800000  # its bits
SWEEP_CODES = sorted(range(-4, 8), key=abs)  # e4m3 codes from that of absmax; eight of them double a scale
LARGEST_SCALE_CODE = 126  # of 448; 127 is no number
FOUR_OVER_SIX_MAX = 256.0  # largest block scale of a block whose maximum is put at 6; at 4 it is 384


def quantize(values: Tensor, format: str, *, search: Search = "absmax", largest: Tensor | None = None) -> Weight:
    """The same matrix in a format of `formats.FORMATS`.

    values: [..., out, in], any float dtype. search: how nvfp4 finds its block scales. largest: fp32 [...], the largest
    magnitude of the whole matrix when values are only some of its rows (fp8_block: from a multiple of 128 on); None:
    they are all of it. Raises: FormatError.
    """
    if format == "bf16":
        return Plain(values.to(torch.bfloat16))
    wide = values.float()
    if largest is None and format in ("fp8_tensor", "nvfp4"):
        largest = wide.abs().amax((-2, -1))
    if format == "fp8_tensor" and largest is not None:
        scale = _scale(largest, E4M3_MAX)
        return Fp8Tensor(_e4m3(wide / scale[..., None, None]), scale)
    if format == "fp8_channel":
        scale = _scale(wide.abs().amax(-1), E4M3_MAX)
        return Fp8Channel(_e4m3(wide / scale[..., None]), scale)
    if format == "fp8_block":
        return _fp8_block(wide)
    if format == "nvfp4" and largest is not None:
        if wide.shape[-1] % NVFP4_BLOCK:
            raise FormatError(f"quantize: nvfp4 needs inputs in blocks of {NVFP4_BLOCK}, found {wide.shape[-1]} inputs")
        return _nvfp4(wide, largest, search)
    raise FormatError(f"quantize: expected one of bf16, fp8_tensor, fp8_channel, fp8_block, nvfp4, found {format!r}")


def _fp8_block(wide: Tensor) -> Fp8Block:
    *_, rows, columns = wide.shape
    tiles = F.pad(wide, (0, -columns % BLOCK, 0, -rows % BLOCK)).unflatten(-1, (-1, BLOCK)).unflatten(-3, (-1, BLOCK))
    scale = _scale(tiles.abs().amax((-3, -1)), E4M3_MAX)
    codes = _e4m3(tiles / scale[..., None, :, None]).flatten(-2).flatten(-3, -2)
    return Fp8Block(codes[..., :rows, :columns].contiguous(), scale)


def _nvfp4(wide: Tensor, largest: Tensor, search: Search) -> Nvfp4:
    blocks = wide.unflatten(-1, (-1, NVFP4_BLOCK))
    highest = blocks.abs().amax(-1)
    if search == "mse":
        global_scale = _scale(largest, E2M1_MAX * FOUR_OVER_SIX_MAX)
        scales = _four_and_six(highest, largest[..., None, None])
    elif search in ("absmax", "sweep"):
        global_scale = _scale(largest, E2M1_MAX * E4M3_MAX)
        scales = [_block_scale(_or_one(highest / (E2M1_MAX * global_scale[..., None, None])))]
        if search == "sweep":
            scales = _neighbours(scales[0])
    else:
        raise FormatError(f"quantize: expected search absmax, mse or sweep, found {search!r}")
    spread = global_scale[..., None, None]
    scale = scales[0] if len(scales) == 1 else _best_scale(blocks.abs(), scales, spread)
    codes = e2m1_codes(blocks / (scale.float() * spread).unsqueeze(-1)).flatten(-2)
    return Nvfp4(codes[..., ::2] | (codes[..., 1::2] << 4), scale, global_scale)


def _four_and_six(highest: Tensor, largest: Tensor) -> list[Tensor]:
    """Block scales that put a block's maximum at 6, and at 4: e4m3 of the shape of `highest`."""
    unit = _or_one(_divide(largest, E2M1_MAX))
    # In the order in which ModelOpt computes it: quotients of bf16 maxima often lie at a tie of two e4m3 values.
    return [
        _block_scale(_or_one(_divide(highest * raised, E2M1_MAX)) * FOUR_OVER_SIX_MAX / unit)
        for raised in (1.0, E2M1_MAX / 4)
    ]


def _neighbours(scale: Tensor) -> list[Tensor]:
    """The e4m3 values around a scale, itself first: their codes follow one another."""
    code = scale.view(torch.uint8).to(torch.int16)
    return [(code + step).clamp(1, LARGEST_SCALE_CODE).to(torch.uint8).view(E4M3) for step in SWEEP_CODES]


def _best_scale(magnitudes: Tensor, scales: list[Tensor], spread: Tensor) -> Tensor:
    """For every block the scale with the smallest square error, the first of equals. magnitudes: fp32 [..., n, 16]."""
    best, least = scales[0].view(torch.uint8), None
    for scale in scales:
        step = (scale.float() * spread).unsqueeze(-1)
        wrong = _sum_of_block(_e2m1_rounded(magnitudes / step).mul_(step).sub_(magnitudes).square_())
        if least is None:
            least = wrong
            continue
        best = torch.where(wrong < least, scale.view(torch.uint8), best)
        least = torch.minimum(wrong, least)
    return best.view(E4M3)


def _block_scale(wanted: Tensor) -> Tensor:
    return wanted.clamp(SMALLEST_BLOCK_SCALE, E4M3_MAX).to(E4M3)


def _or_one(values: Tensor) -> Tensor:
    return torch.where(values > 0, values, torch.ones_like(values))


def e2m1_codes(values: Tensor) -> Tensor:
    """Nearest e2m1 code of each value (ties to the even code), uint8 in 0..15; what rounds to −0 keeps its sign."""
    magnitude = values.abs()
    code = (values < 0).to(torch.uint8).mul_(8)
    for lower, midpoint in enumerate(E2M1_MIDPOINTS):
        # A tie goes up exactly when the lower of the two codes is odd.
        code.add_(magnitude >= midpoint if lower % 2 else magnitude > midpoint)
    return code


def _e2m1_rounded(magnitudes: Tensor) -> Tensor:
    """Nearest e2m1 magnitude, as `e2m1_codes` picks it, in the memory of the argument (fp32, none negative)."""
    m = magnitudes.clamp_(max=E2M1_MAX)
    # The step is ½ below 2, 1 below 4, 2 above: half the power of two below m, and at least ½. Adding a number whose
    # last bit is worth the step, and taking it away, rounds to the step, ties to even.
    power = m.clamp(min=1).view(torch.int32).bitwise_and_(FP32_EXPONENT).view(torch.float32)
    pad = power.mul_(1.5 * 2.0**22)
    return m.add_(pad).sub_(pad)


def _sum_of_block(values: Tensor) -> Tensor:
    """[..., 16] → [...], added pairwise in one fixed order."""
    while values.shape[-1] > 1:
        half = values.shape[-1] // 2
        values = values[..., :half] + values[..., half:]
    return values.squeeze(-1)


def _divide(values: Tensor, number: float) -> Tensor:
    """values / number. By a tensor: on a GPU, torch multiplies by the reciprocal of a Python number instead."""
    return values / torch.full((), number, dtype=values.dtype, device=values.device)


def _scale(largest: Tensor, code_max: float) -> Tensor:
    smallest = torch.finfo(torch.float32).tiny
    return torch.where(largest > 0, _divide(largest, code_max).clamp(min=smallest), torch.ones_like(largest))


def _e4m3(values: Tensor) -> Tensor:
    return values.clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)
