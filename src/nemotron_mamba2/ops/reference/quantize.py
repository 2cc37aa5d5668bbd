"""Values → formats, by absmax: the inverse of `formats.dequantize`, in plain torch.

    fp8      scale = max|w| / 448, per tensor, output row or 128×128 block
    nvfp4    global scale = max|w| / (6·448); block scale = e4m3(max|w| of the block / (6 · global scale)) in [2⁻⁹, 448]

Codes round to nearest, ties to even. Source: NVIDIA ModelOpt's export conventions.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import FormatError
from ...formats import BLOCK, E4M3, E4M3_MAX, NVFP4_BLOCK, Fp8Block, Fp8Channel, Fp8Tensor, Nvfp4, Plain, Weight

E2M1_MAX = 6.0
SMALLEST_BLOCK_SCALE = 2.0**-9
E2M1_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # between neighbouring magnitudes


def quantize(values: Tensor, format: str) -> Weight:
    """values: [..., out, in], any float dtype → the same matrix in a format of `formats.FORMATS`."""
    if format == "bf16":
        return Plain(values.to(torch.bfloat16))
    wide = values.float()
    if format == "fp8_tensor":
        scale = _scale(wide.abs().amax((-2, -1)), E4M3_MAX)
        return Fp8Tensor(_e4m3(wide / scale[..., None, None]), scale)
    if format == "fp8_channel":
        scale = _scale(wide.abs().amax(-1), E4M3_MAX)
        return Fp8Channel(_e4m3(wide / scale[..., None]), scale)
    if format == "fp8_block":
        return _fp8_block(wide)
    if format == "nvfp4":
        return _nvfp4(wide)
    raise FormatError(f"quantize: expected one of bf16, fp8_tensor, fp8_channel, fp8_block, nvfp4, found {format!r}")


def _fp8_block(wide: Tensor) -> Fp8Block:
    *_, rows, columns = wide.shape
    tiles = F.pad(wide, (0, -columns % BLOCK, 0, -rows % BLOCK)).unflatten(-1, (-1, BLOCK)).unflatten(-3, (-1, BLOCK))
    scale = _scale(tiles.abs().amax((-3, -1)), E4M3_MAX)
    codes = _e4m3(tiles / scale[..., None, :, None]).flatten(-2).flatten(-3, -2)
    return Fp8Block(codes[..., :rows, :columns].contiguous(), scale)


def _nvfp4(wide: Tensor) -> Nvfp4:
    global_scale = _scale(wide.abs().amax((-2, -1)), E2M1_MAX * E4M3_MAX)
    blocks = wide.unflatten(-1, (-1, NVFP4_BLOCK))
    wanted = blocks.abs().amax(-1) / (E2M1_MAX * global_scale[..., None, None])
    scale = wanted.clamp(SMALLEST_BLOCK_SCALE, E4M3_MAX).to(E4M3)
    codes = e2m1_codes(blocks / (scale.float() * global_scale[..., None, None]).unsqueeze(-1)).flatten(-2)
    return Nvfp4(codes[..., ::2] | (codes[..., 1::2] << 4), scale, global_scale)


def e2m1_codes(values: Tensor) -> Tensor:
    """Nearest e2m1 code of each value (ties to the even code), uint8 in 0..15."""
    midpoints = torch.tensor(E2M1_MIDPOINTS, device=values.device)
    magnitude = values.abs().contiguous()
    below, above = torch.bucketize(magnitude, midpoints), torch.bucketize(magnitude, midpoints, right=True)
    code = torch.where((below != above) & (below % 2 == 1), above, below)
    return (code + 8 * torch.signbit(values)).to(torch.uint8)


def _scale(largest: Tensor, code_max: float) -> Tensor:
    return torch.where(largest > 0, largest / code_max, torch.ones_like(largest))


def _e4m3(values: Tensor) -> Tensor:
    return values.clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)
