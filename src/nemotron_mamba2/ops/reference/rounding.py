"""Rounding of the fp32 state to the dtype it is stored in.

bf16 rounds to nearest. fp16 rounds stochastically: 13 random bits, drawn from a counter-based hash of (pool seed,
layer, absolute position of the boundary, element), are added below the kept mantissa before truncation, so a draw
depends on where a state stands in its sequence and never on the slot that holds it. Stores saturate at ±65504.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import LayerState

FP16_MAX = 65504.0
DROPPED_BITS = 13  # mantissa bits of fp32 that fp16 does not have
SMALLEST_NORMAL = 2.0**-14


def round_state(values: Tensor, state: LayerState, position: int) -> Tensor:
    """values: fp32 [H, P, N], the state at an absolute position. Returns: the same shape in the state's dtype."""
    if state.ssm.dtype != torch.float16:
        return values.to(state.ssm.dtype)
    draws = random_bits(values.numel(), state.seed, state.layer, position, values.device).view(values.shape)
    return round_fp16_stochastically(values, draws)


def round_fp16_stochastically(values: Tensor, draws: Tensor) -> Tensor:
    """fp32 → fp16, up with the probability of the dropped fraction. draws: int32, the low 13 bits are used."""
    bits = values.contiguous().view(torch.int32) + (draws & ((1 << DROPPED_BITS) - 1))
    kept = ((bits >> DROPPED_BITS) << DROPPED_BITS).view(torch.float32)
    # Below fp16's normal range the spacing is fixed at 2⁻²⁴: dither in units of it instead.
    spacing = SMALLEST_NORMAL * 2.0**-10
    fraction = (draws & ((1 << DROPPED_BITS) - 1)).float() / (1 << DROPPED_BITS)
    small = torch.floor(values / spacing + fraction) * spacing
    rounded = torch.where(values.abs() < SMALLEST_NORMAL, small, kept)
    return rounded.clamp(-FP16_MAX, FP16_MAX).to(torch.float16)


def random_bits(n: int, seed: int, layer: int, position: int, device: torch.device) -> Tensor:
    """n hashed 32-bit integers as int32 [n]; the key is mixed on the host, each element by two rounds of murmur3's
    finaliser."""
    key = 0
    for word in (seed, layer, position):
        key = _mix_host(key ^ (word & 0xFFFFFFFF))
    h = torch.arange(n, dtype=torch.int64, device=device) ^ key
    for factor in (0x85EBCA6B, 0xC2B2AE35):
        h = ((h ^ (h >> 16)) * factor) & 0xFFFFFFFF
    h = h ^ (h >> 16)
    return (h - ((h >> 31) << 32)).to(torch.int32)


def _mix_host(h: int) -> int:
    for factor in (0x85EBCA6B, 0xC2B2AE35):
        h = ((h ^ (h >> 16)) * factor + 0x9E3779B9) & 0xFFFFFFFF
    return h ^ (h >> 16)
