"""The ops of the layers, and what they work on. A back end is a module.

`reference` (plain PyTorch: the specification, and the CPU back end) offers every op; other back ends offer the same
names with the same signatures, and `backend` picks one.
"""

from __future__ import annotations

from collections.abc import Sequence
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

    weight: as the checkpoint has it, or only its shape and scale where `packed` is all that is kept. copy: its values
    in the activation dtype, made once at load, or None (plain weights, and those dequantised in pieces at every call).
    prompt_weight: another weight that prompt rows use, or None. packed: codes and block scales in the order a kernel
    reads them, instead of the weight's own, or None.
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
class Mixture:
    """A mixture-of-experts layer made ready to run.

    norm: fp32 [hidden]. gate: fp32 [E, hidden]. bias: fp32 [E], only selects. up: [E, intermediate, w]; down: [E, w,
    intermediate]. shared_up, shared_down: the shared expert, both or none. fc1: [w, hidden] and fc2: [hidden, w], where
    the experts' width w is not the hidden one.
    """

    norm: Tensor
    gate: Linear
    bias: Tensor
    up: Linear
    down: Linear
    shared_up: Linear | None = None
    shared_down: Linear | None = None
    fc1: Linear | None = None
    fc2: Linear | None = None


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


@dataclass(frozen=True, eq=False)
class Pages:
    """Where the S sequences and T rows of one role keep their keys and values.

    lists: the page ids of each sequence in the order of its tokens, on the host; none of one that is padding, and no
    lists at all where a captured step reads the rest, which is int32 on the step's device, made by one copy. table:
    [S, width], the same ids, and past a sequence's end the pad page, never read. places: [T], flat rows of the pages
    (page · page_tokens + row of the page) that new rows are written to. row_sequence: [T], which sequence a row is of.
    row_keys: [T], how many keys it sees, its own among them; 0 for padding.
    """

    lists: tuple[Sequence[int], ...]
    table: Tensor
    places: Tensor
    row_sequence: Tensor
    row_keys: Tensor


def backend(device: torch.device) -> ModuleType:
    """The module that serves a device's ops; imported when it is first asked for."""
    return import_module(".gpu" if device.type == "cuda" else ".reference", __name__)
