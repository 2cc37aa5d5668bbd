"""Router and routed experts of a mixture-of-experts layer.

    s = sigmoid(x · Wgᵀ) in fp32;  chosen = top k of s + bias;  w = s[chosen] / (Σ + 1e-20) · routed_scaling_factor
    y_t = Σ_k w_tk · down_e(relu(up_e(x_t))²),   e = chosen_tk

The bias only selects: weights are unbiased scores. With groups, each group of experts is worth the sum of its two best
biased scores, and experts outside the best groups are masked with −inf.

Rows are sorted by expert, each expert that is hit runs once over its rows, and every row adds up its experts in the
order of its own choice, in fp32: what a row gets does not depend on the order of the batch. Only experts that are hit
are read or dequantised. How many rows each expert got is a number that the host must know: on a CPU `grouped_linear`
reads it (that waits for nobody), on a device it calls torch's grouped product instead, which never does.

Bytes: weights of the experts that are hit. Flops: 4 × rows × k × width × intermediate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import fields, replace

import torch
from torch import Tensor

from ...batch import Role
from ...config import MoeConfig
from ...formats import E4M3, E4M3_MAX, Fp8Block, Fp8Channel, Fp8Tensor, Nvfp4, Plain, Weight, dequantize
from .. import Linear, Quantization
from .linear import linear

FORMATS: dict[str, Callable[..., Weight]] = {t.format: t for t in (Plain, Fp8Tensor, Fp8Channel, Fp8Block, Nvfp4)}


def route(x: Tensor, gate: Linear, bias: Tensor, *, config: MoeConfig, role: Role) -> tuple[Tensor, Tensor]:
    """Pick the experts of every row and what each is worth.

    x: bf16 or fp32 [T, hidden], normed. gate: fp32 [E, hidden]. bias: fp32 [E]. Returns: chosen int64 [T, k], best
    first, and weights fp32 [T, k].
    """
    logits = linear(x.float(), gate, role)
    # In fp64, because fp32 sigmoids of torch differ in the last bit between vector body and tail, so between batches.
    scores = torch.sigmoid(logits.double()).float()
    choice = scores + bias
    if config.topk_group < config.n_group:
        choice = _mask_groups(choice, config)
    chosen = torch.topk(choice, config.num_experts_per_tok, dim=-1).indices
    weights = scores.gather(-1, chosen)
    if config.norm_topk_prob:
        weights = weights / (_ordered_sum(weights) + 1e-20)
    return chosen, weights * config.routed_scaling_factor


def routed_experts(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    up: Linear,
    down: Linear,
    *,
    role: Role,
    out: Tensor | None = None,
) -> Tensor:
    """The weighted sum of every row's experts.

    x: bf16 or fp32 [T, w]. chosen: int64 [T, k]; weights: fp32 [T, k] (`route`). up: [E, intermediate, w]; down:
    [E, w, intermediate]. Returns: [T, w] in the dtype of x, rounded once from fp32.
    """
    rows, per_row = chosen.shape
    flat = chosen.flatten()
    order = torch.argsort(flat, stable=True)
    counts = torch.zeros(up.weight.shape[0], dtype=torch.int64, device=x.device)
    counts = counts.scatter_add_(0, flat, torch.ones_like(flat))
    hidden = grouped_linear(x[order // per_row], counts, up, role).relu_().square_()
    width = down.weight.shape[1]
    found = grouped_linear(hidden, counts, down, role)[torch.argsort(order)].view(rows, per_row, width)
    total = x.new_zeros(rows, width, dtype=torch.float32)
    for k in range(per_row):
        total.add_(found[:, k].float().mul_(weights[:, k, None]))
    return total.to(x.dtype) if out is None else out.copy_(total)


def grouped_linear(x: Tensor, counts: Tensor, stack: Linear, role: Role) -> Tensor:
    """x · W_eᵀ for rows sorted by expert.

    x: bf16 or fp32 [R, in]. counts: int64 [E], rows of each expert, in order. stack: [E, out, in]. Returns: [R, out] in
    the dtype of x.
    """
    flags = [stack.upcast, stack.reproducible]
    settings = [stack.weight.format, role, _kind(stack, role)]
    return torch.ops.nemotron_mamba2.grouped_linear(x, counts, _tensors(stack.weight), stack.copy, settings, flags)


def _grouped_linear(
    x: Tensor,
    counts: Tensor,
    tensors: Sequence[Tensor],
    copy: Tensor | None,
    settings: Sequence[str],
    flags: Sequence[bool],
) -> Tensor:
    """What `grouped_linear` runs, behind an operator: tracing and fake tensors see its shape, not the counts."""
    format, role, kind = settings
    upcast, reproducible = flags
    stack = Linear(
        FORMATS[format](*tensors),
        copy,
        prompt=kind,  # type: ignore[arg-type]
        step=kind,  # type: ignore[arg-type]
        upcast=upcast,
        reproducible=reproducible,
    )
    if x.device.type != "cpu":
        return product_by_groups(x, counts, stack, role)  # type: ignore[arg-type]
    return product_by_loop(x, counts, stack, role)  # type: ignore[arg-type]


def product_by_loop(x: Tensor, counts: Tensor, stack: Linear, role: Role) -> Tensor:
    """`grouped_linear` as one product per expert that has rows; reads counts on the host."""
    out = x.new_empty(len(x), stack.weight.shape[1])
    first = 0
    for expert, count in enumerate(counts.tolist()):
        if count:
            rows = slice(first, first + count)
            linear(x[rows], _expert(stack, expert), role, out=out[rows])
            first += count
    return out


def product_by_groups(x: Tensor, counts: Tensor, stack: Linear, role: Role) -> Tensor:
    """`grouped_linear` as torch's grouped product, over the copy; never waits for the device."""
    weight = stack.weight
    values = stack.copy if stack.copy is not None else dequantize(weight, x.dtype)
    scale: Tensor | None = None
    kind = _kind(stack, role)
    if kind == "fp8_static" and isinstance(weight, Fp8Tensor) and weight.input_scale is not None:
        scale = weight.input_scale.repeat_interleave(counts, output_size=len(x))[:, None]
    elif kind == "fp8_per_row":
        scale = (x.float().abs().amax(-1, keepdim=True) / E4M3_MAX).clamp(min=torch.finfo(torch.float32).tiny)
    if scale is not None:
        x = (x.float() / scale).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3).to(x.dtype)
    found = torch._grouped_mm(x, values.to(x.dtype).transpose(1, 2), offs=counts.cumsum(0).int())
    return found if scale is None else (found * scale).to(x.dtype)


def _tensors(weight: Weight) -> list[Tensor]:
    """Weight and scales, in the order that its type takes them; an absent input scale is the last."""
    parts = [getattr(weight, field.name) for field in fields(weight)]
    return [part for part in parts if isinstance(part, Tensor)]


def _kind(stack: Linear, role: Role) -> Quantization:
    return stack.prompt if role == "prompt" else stack.step


def _expert(stack: Linear, expert: int) -> Linear:
    """One matrix of a stack of them."""
    one = FORMATS[stack.weight.format](*[part[expert] for part in _tensors(stack.weight)])
    return replace(stack, weight=one, copy=None if stack.copy is None else stack.copy[expert])


def _mask_groups(choice: Tensor, config: MoeConfig) -> Tensor:
    """−inf for every expert outside the topk_group best of n_group groups. choice: fp32 [T, E]."""
    groups = choice.unflatten(-1, (config.n_group, -1))
    worth = groups.topk(min(2, groups.shape[-1]), dim=-1).values.sum(-1)
    best = worth.topk(config.topk_group, dim=-1).indices
    kept = torch.zeros_like(worth, dtype=torch.bool).scatter_(-1, best, True)
    return groups.masked_fill(~kept[..., None], -math.inf).flatten(-2)


def _ordered_sum(values: Tensor) -> Tensor:
    """Sum over the last dimension from first to last: fp32 [T, k] → [T, 1]. torch's own order depends on the shape."""
    total = values[:, :1]
    for k in range(1, values.shape[1]):
        total = total + values[:, k : k + 1]
    return total


def _grouped_linear_shape(
    x: Tensor,
    counts: Tensor,
    tensors: Sequence[Tensor],
    copy: Tensor | None,
    settings: Sequence[str],
    flags: Sequence[bool],
) -> Tensor:
    return x.new_empty(len(x), FORMATS[settings[0]](*tensors).shape[1])


# Through the library itself: `torch.library.custom_op` imports torch's compiler at the first call, which takes seconds.
_library = torch.library.Library("nemotron_mamba2", "DEF")
_library.define(
    "grouped_linear(Tensor x, Tensor counts, Tensor[] tensors, Tensor? copy, str[] settings, bool[] flags) -> Tensor"
)
_library.impl("grouped_linear", _grouped_linear, "CompositeExplicitAutograd")
torch.library.register_fake("nemotron_mamba2::grouped_linear", _grouped_linear_shape, lib=_library)
