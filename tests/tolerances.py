"""How far a result may be from the float64 truth: ‖out − ref‖ / ‖ref‖, one number per op, format and dtype.

Each is about three times what was measured over the shapes of `oracle.SHAPES`. Layer errors are those of the mixer
alone (`oracle.mixer_error`), because the residual would hide them.
"""

from __future__ import annotations

import torch

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
W8A8 = ("fp8_tensor", "fp8_channel")  # as made by `oracle.quantized`: prompt rows quantise their activations

# (op, activation dtype) → relative error, for a state held in fp32
OPS: dict[tuple[str, torch.dtype], float] = {
    ("rms_norm", FP32): 5e-7,  # fp32 sums of at most 2,000 squares
    ("rms_norm", BF16): 4e-3,  # one rounding to 8 bits: 2⁻⁹ at worst, 1.7e-3 on average
    ("linear", FP32): 2e-6,  # fp32 accumulation over at most 2,000 inputs
    ("linear", BF16): 6e-3,  # one rounding of the result; a bf16 copy rounds quantised weights once more
    ("conv", FP32): 1e-6,  # four products, one exp
    ("conv", BF16): 5e-3,  # one rounding of the result
    ("scan", FP32): 3e-6,  # exp of differences of a cumulative sum: errors grow with the decay over a chunk
    ("scan", BF16): 5e-3,  # one rounding of y; x, B and C are given
    ("step", FP32): 2e-6,  # as scan, over at most one window
    ("step", BF16): 9e-3,  # the conv is part of the op: x, B, C and then y are rounded
    ("state", FP32): 2e-6,  # the state in memory at a boundary
    ("state", BF16): 1.5e-2,  # made of rounded x and B
    ("layer", FP32): 2.5e-6,  # measured 7e-7
    ("layer", BF16): 2.2e-2,  # six roundings to bf16 on the way; measured 7e-3
}

# prompt rows that run W8A8: the truth quantises too, but a value at a border of two e4m3 codes falls either way
W8A8_LAYER: dict[torch.dtype, float] = {
    FP32: 2e-3,  # a few flipped codes of 3 bits, one flip is 6 % of its element; measured 4e-4 at worst
    BF16: 1.1e-1,  # the norm's bf16 rounding flips one code in sixteen; measured 3.6e-2
}

# prompt rows in W8A8 against step rows of the same weights, which keep their activations: e4m3 noise twice per layer
W8A8_AGAINST_STEP = 1.8e-1  # measured 5.5e-2

# what storing the state in fewer bits adds to y (every window; every row at window_rows = 1), and to the state
STATE: dict[torch.dtype, float] = {
    FP32: 0.0,
    BF16: 1.2e-2,  # 2⁻⁹ of the state per store, decaying; measured 4e-3
    FP16: 2.5e-3,  # stochastic: 2⁻¹¹ per store; measured 7e-4
}


def tolerance(
    op: str,
    dtype: torch.dtype = FP32,
    *,
    format: str = "bf16",
    role: str = "step",
    state_dtype: torch.dtype = FP32,
) -> float:
    """The table's number for an op. role: "prompt" when any of the rows took the prompt family."""
    base = W8A8_LAYER[dtype] if op == "layer" and role == "prompt" and format in W8A8 else OPS[op, dtype]
    return base + (STATE[state_dtype] if op in ("layer", "state", "scan", "step") else 0.0)
