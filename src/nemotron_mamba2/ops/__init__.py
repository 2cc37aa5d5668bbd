"""The ops of the layers, and what they work on. A back end is a module.

`reference` (plain PyTorch: the specification, and the CPU back end) offers every op; other back ends offer the same
names with the same signatures, and `backend` picks one.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from ..formats import Weight

Quantization: TypeAlias = Literal["none", "fp8_static", "fp8_per_row"]


@dataclass(frozen=True, eq=False)
class Linear:
    """A projection made ready to run: the weight as found, and what the plan decided about it.

    weight: as the checkpoint has it. copy: its values in the activation dtype, made once at load, or None (the weight
    is plain, or is dequantised in pieces at every call). prompt_weight: another weight that prompt rows use, or None.
    packed: codes and block scales in the order a kernel reads them, instead of the weight's own, or None.
    prompt, step: what happens to the activations of each role. upcast: products of many rows run in fp32, on blocks
    of the weight. reproducible: every product has the same row count, so a row's bits do not depend on its batch.
    """

    weight: Weight
    copy: Tensor | None = None
    prompt_weight: Weight | None = None
    packed: tuple[Tensor, Tensor] | None = None
    prompt: Quantization = "none"
    step: Quantization = "none"
    upcast: bool = True
    reproducible: bool = False


@dataclass(frozen=True, eq=False)
class LayerState:
    """One layer's share of a state pool, over all its slots.

    ssm: state_dtype [slots, H, P, N], the state at each slot's boundary. ring_x: [slots, R, H, P], ring_B:
    [slots, R, G, N], both post-conv in the activation dtype; ring_dt: fp32 [slots, R, H], after softplus; a row of
    position t lies at t mod R. ring_conv: [slots, K, conv_dim], raw conv inputs, at t mod K. window_rows: rows from
    one boundary to the next. seed, layer: key of the stochastic rounding of an fp16 state. pad_slot: the slot whose
    rows are padding.
    """

    ssm: Tensor
    ring_x: Tensor
    ring_B: Tensor
    ring_dt: Tensor
    ring_conv: Tensor
    window_rows: int
    pad_slot: int
    seed: int
    layer: int


def backend(device: torch.device) -> ModuleType:
    """The module that serves a device's ops; imported when it is first asked for."""
    return import_module(".gpu" if device.type == "cuda" else ".reference", __name__)
