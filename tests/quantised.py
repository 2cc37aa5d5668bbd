"""Weights quantised by hand, in plain torch and without the package: what the files of each format hold.

Each function takes float32 [out, in] and gives (tensors by suffix, the float32 values that they stand for).
"""

from __future__ import annotations

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn

Quantised = tuple[dict[str, Tensor], Tensor]


def fp8_tensor(weight: Tensor, *, scalar_shape: tuple[int, ...] = (), static: bool = True) -> Quantised:
    scale = weight.abs().amax() / 448
    codes = (weight / scale).to(E4M3)
    parts = {"weight": codes, "weight_scale": scale.reshape(scalar_shape)}
    if static:
        parts["input_scale"] = torch.tensor(0.0125).reshape(scalar_shape)
    return parts, codes.float() * scale


def fp8_channel(weight: Tensor, *, column: bool = False, scale_dtype: torch.dtype = torch.float32) -> Quantised:
    scale = (weight.abs().amax(1) / 448).to(scale_dtype)
    codes = (weight / scale.float()[:, None]).clamp(-448, 448).to(E4M3)
    parts = {"weight": codes, "weight_scale": scale[:, None].contiguous() if column else scale}
    return parts, codes.float() * scale.float()[:, None]


def fp8_block(weight: Tensor, *, suffix: str = "weight_scale", four: bool = False) -> Quantised:
    rows, columns = weight.shape
    scale = torch.empty(-(-rows // 128), -(-columns // 128))
    codes, values = torch.empty(weight.shape, dtype=E4M3), torch.empty(weight.shape)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            tile = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
            scale[i, j] = weight[tile].abs().amax() / 448
            codes[tile] = (weight[tile] / scale[i, j]).to(E4M3)
            values[tile] = codes[tile].float() * scale[i, j]
    return {"weight": codes, suffix: scale[:, None, :, None].contiguous() if four else scale}, values


def nvfp4(weight: Tensor, *, static: bool = True) -> Quantised:
    codes, values, scale, largest = _nvfp4(weight)
    multiplier = largest / (6 * 448)
    parts = {"weight": codes, "weight_scale": scale, "weight_scale_2": multiplier}
    if static:
        parts["input_scale"] = torch.tensor(0.004)
    return parts, values * multiplier


def nvfp4_packed(weight: Tensor) -> Quantised:
    """As compressed-tensors stores it: the global scales are reciprocals."""
    codes, values, scale, largest = _nvfp4(weight)
    divisor = (6 * 448) / largest
    parts = {"weight_packed": codes, "weight_scale": scale, "weight_global_scale": divisor.reshape(1)}
    parts["input_global_scale"] = torch.tensor([250.0])
    return parts, values * (1 / divisor)


def _nvfp4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(codes uint8 [out, in/2], values before the global scale, block scales, largest magnitude)."""
    rows, columns = weight.shape
    largest = weight.abs().amax()
    blocks = (weight / (largest / (6 * 448))).reshape(rows, columns // 16, 16)
    scale = (blocks.abs().amax(-1) / 6).clamp(2**-9, 448).to(E4M3)
    steps = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    scaled = blocks / scale.float()[..., None]
    nearest = torch.bucketize(scaled.abs(), (steps[1:] + steps[:-1]) / 2)
    values = steps[nearest] * torch.where(scaled < 0, -1.0, 1.0) * scale.float()[..., None]
    codes = (nearest + 8 * (scaled < 0)).reshape(rows, columns).to(torch.uint8)
    return codes[:, 0::2] + 16 * codes[:, 1::2], values.reshape(rows, columns), scale, largest
