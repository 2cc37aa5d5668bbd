"""Mixtures of experts on NVIDIA GPUs: router, grouped products over stacks of matrices, the weighted sum; `moe.cu`.

    y_t = Σ_k w_tk · down_e(relu(up_e(x_t))²),  e = chosen_tk        (+ shared expert + residual, in `mixture`)

Nothing waits for the device: rows are sorted by expert there, into groups of at most `tokens` rows of one expert, and
the grid covers the most groups that there may be; blocks past the last one end at once. A group is a matrix product by
the kernels of step rows (`linear.cu`, and `linear_wide.cu` from some rows per expert on), which read every format as it
lies, NVFP4 as packed, with bf16 activations. So the bits of a row depend neither on its group nor on its batch.

Prompt rows take the same kernels; many rows of plain bf16 experts torch's grouped product. Workspace: at most
ROWS_AT_ONCE assignments at a time, each 2 · (width + 2 · intermediate) bytes at the worst; no weight is dequantised.

Bytes: weights of the experts that are hit. Flops: 4 × rows × k × width × intermediate.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ...batch import Role
from ...config import MoeConfig
from ...formats import E4M3, E4M3_MAX, Plain
from .. import Linear, Mixture, reference
from . import nvrtc
from .linear import Groups, Terms, hopper, product, rms_norm, step_linear, step_tiles, unserved
from .nvrtc import argument, expect_rows16, rows16
from .tiles import INPUTS_PER_CHUNK, Defines, Few, Tiles, Wide

SLICES = 4  # of K in products of stacks: there are enough experts to fill the device; part of a result's bits
ROWS_AT_ONCE = 65535  # assignments, a grid holds no more: 0.6 GB for Nano-30B, 0.7 GB for Super-120B
TORCH_ROUTES = 256  # prompt rows from which torch's fp32 product beats reading the gate once per 16 rows
TORCH_GROUPS = 32  # rows per expert from which torch's grouped product runs bf16 prompts
SCORE_ROWS = 16  # rows of a block of `scores`
ONE_BLOCK_ROWS = 32  # rows chosen and grouped by one block
MOST_EXPERTS, MOST_CHOSEN = 1024, 32


def route(x: Tensor, gate: Linear, bias: Tensor, *, config: MoeConfig, role: Role) -> tuple[Tensor, Tensor]:
    """As `ops.reference.route`; x: bf16 [T, hidden]."""
    many = role == "prompt" and not gate.reproducible and len(x) > TORCH_ROUTES
    if many or x.dtype != torch.bfloat16 or _unserved_router(config):
        return reference.route(x, gate, bias, config=config, role=role)
    chosen, worth = _choice(x, config)
    if len(x):
        kernel = _choice_kernel(x.device.index, config, 0)
        scores = _scores(x, gate)
        kernel.launch((-(-len(x) // 8), 1), 0, _choice_arguments(chosen, worth, scores, bias, config))
    return chosen, worth


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
    """As `ops.reference.routed_experts`; x: bf16 [T, w]."""
    if x.dtype != torch.bfloat16 or unserved_experts(up, down):
        return reference.routed_experts(x, chosen, weights, up, down, role=role, out=out)
    rows, per_row = chosen.shape
    out = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
    at_once = max(ROWS_AT_ONCE // per_row, 1)
    for first in range(0, rows, at_once):
        part = slice(first, first + at_once)
        _routed(x[part], chosen[part], weights[part], up, down, role=role, out=out[part])
    return out


def mixture(hidden: Tensor, parts: Mixture, *, config: MoeConfig, out: Tensor | None = None) -> Tensor:
    """A whole layer over step rows: hidden + experts(norm(hidden)) + shared(norm(hidden)), rounded once.

    hidden: bf16 [T, hidden]. parts: what `unserved_mixture` says nothing against. Returns: [T, hidden].
    """
    out = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device) if out is None else out
    rows, per_row = len(hidden), config.num_experts_per_tok
    if not rows:
        return out
    hidden = rows16(hidden)
    if rows == 1:
        x = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device)
        scores = _scores(hidden, parts.gate, norm=parts.norm, normed=x, eps=config.layer_norm_epsilon)
    else:
        x = rms_norm(hidden, parts.norm, eps=config.layer_norm_epsilon)
        scores = _scores(x, parts.gate)
    tokens = _tokens(rows * per_row, parts.up, parts.down, hidden.device.index)
    _, worth, groups = _choose_and_group(scores, parts.bias, config, tokens)
    wide = None if parts.shared_up is None else step_linear(x, parts.shared_up, square=True)
    narrow = x if parts.fc1 is None else step_linear(x, parts.fc1)
    found = _experts(narrow, groups, parts.up, parts.down, per_row)
    terms = Terms(found, per_row, worth)
    if parts.fc2 is not None:
        mixed = _sum(terms, None, None, torch.empty(narrow.shape, dtype=x.dtype, device=x.device))
        if wide is None or parts.shared_down is None:
            return step_linear(mixed, parts.fc2, residual=hidden, out=out)
        return _added(mixed, parts.fc2, Terms(step_linear(wide, parts.shared_down), 1), hidden, out)
    if wide is None or parts.shared_down is None:
        return _sum(terms, None, hidden, out)
    return _added(wide, parts.shared_down, terms, hidden, out)


def unserved_experts(up: Linear, down: Linear) -> str:
    """Why the kernels cannot take two stacks of experts, so that the reference's torch runs them; "" when they can."""
    many = up.weight.shape[0] > MOST_EXPERTS
    return unserved(up.weight) or unserved(down.weight) or (f"more than {MOST_EXPERTS} experts" if many else "")


def unserved_mixture(parts: Mixture, config: MoeConfig) -> str:
    """Why `mixture` cannot take a layer, so that it runs op by op; "" when it can."""
    others = [part for part in (parts.shared_up, parts.shared_down, parts.fc1, parts.fc2) if part is not None]
    found = [unserved_experts(parts.up, parts.down), _unserved_router(config), *(unserved(o.weight) for o in others)]
    return next(filter(None, found), "")


def moe_cost(up: Linear, down: Linear, rows: int, per_row: int) -> tuple[int, int]:
    """(bytes, flops) of the routed experts when no two rows choose the same."""
    experts, intermediate, width = up.weight.shape
    hit = min(experts, rows * per_row)
    weights = (up.weight.nbytes + down.weight.nbytes) * hit // experts
    return weights + 4 * rows * per_row * (width + intermediate), 4 * rows * per_row * width * intermediate


# -- router ----------------------------------------------------------------------------------------------------------


def _unserved_router(config: MoeConfig) -> str:
    if config.topk_group < config.n_group:
        return "no kernel for groups of experts in the router: plain torch"
    if config.n_routed_experts > MOST_EXPERTS or config.num_experts_per_tok > MOST_CHOSEN:
        return f"no router kernel for more than {MOST_EXPERTS} experts, {MOST_CHOSEN} chosen: plain torch"
    if config.hidden_size % INPUTS_PER_CHUNK:
        return f"no router kernel for {config.hidden_size} inputs (% {INPUTS_PER_CHUNK}): plain torch"
    return ""


def _scores(
    x: Tensor,
    gate: Linear,
    *,
    norm: Tensor | None = None,
    normed: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """sigmoid(x · gateᵀ), fp32 [T, E]. norm: of the one row x; the normed row is written to `normed` too."""
    weight, x = gate.weight.weight, rows16(x)
    experts, columns = weight.shape
    scores = torch.empty(len(x), experts, dtype=torch.float32, device=x.device)
    kernel = _scores_kernel(x.device.index, experts, columns, norm is not None)
    kernel.launch(
        (-(-experts // 2), -(-len(x) // SCORE_ROWS)),
        0,
        [
            *map(argument, (scores, normed, x, norm, weight, scores.stride(0), x.stride(0))),
            ctypes.c_int(len(x)),
            argument(eps),
        ],
    )
    return scores


def _choice(x: Tensor, config: MoeConfig) -> tuple[Tensor, Tensor]:
    shape = len(x), config.num_experts_per_tok
    return (
        torch.empty(shape, dtype=torch.int64, device=x.device),
        torch.empty(shape, dtype=torch.float32, device=x.device),
    )


def _choice_arguments(chosen: Tensor, worth: Tensor, scores: Tensor, bias: Tensor, config: MoeConfig) -> list[Any]:
    factor = float(config.routed_scaling_factor)
    tensors = map(argument, (chosen, worth, scores, bias))
    return [*tensors, argument(scores.stride(0)), ctypes.c_int(len(scores)), argument(factor)]


def _choose_and_group(scores: Tensor, bias: Tensor, config: MoeConfig, tokens: int) -> tuple[Tensor, Tensor, Groups]:
    """Chosen experts, weights, and the groups that they make."""
    chosen, worth = _choice(scores, config)
    rows, device = len(scores), scores.device.index
    groups = _new_groups(chosen, config.n_routed_experts, tokens)
    arguments = _choice_arguments(chosen, worth, scores, bias, config)
    if rows <= ONE_BLOCK_ROWS:
        kernel = _choice_kernel(device, config, tokens)
        kernel.launch((1, 1), 0, [*arguments, *map(argument, (groups.table, groups.order))])
    else:
        _choice_kernel(device, config, 0).launch((-(-rows // 8), 1), 0, arguments)
        _fill_groups(groups, chosen)
    return chosen, worth, groups


# -- experts ---------------------------------------------------------------------------------------------------------


def _routed(x: Tensor, chosen: Tensor, weights: Tensor, up: Linear, down: Linear, *, role: Role, out: Tensor) -> None:
    rows, per_row = chosen.shape
    plain = isinstance(up.weight, Plain) and isinstance(down.weight, Plain) and not up.reproducible
    if role == "prompt" and plain and rows * per_row > TORCH_GROUPS * up.weight.shape[0]:
        reference.routed_experts(x, chosen, weights, up, down, role=role, out=out)
        return
    if not rows:
        return
    tokens = _tokens(rows * per_row, up, down, x.device.index)
    groups = _new_groups(chosen, up.weight.shape[0], tokens)
    _fill_groups(groups, chosen.contiguous())
    if role == "prompt" and "fp8_per_row" in (up.prompt, down.prompt):
        found = _experts_fp8(rows16(x), groups, up, down, per_row)
    else:
        found = _experts(rows16(x), groups, up, down, per_row)
    _sum(Terms(found, per_row, weights.contiguous()), None, None, out)


def _experts(x: Tensor, groups: Groups, up: Linear, down: Linear, per_row: int) -> Tensor:
    """What every row gets of each of its experts: bf16 [T · k, w]."""
    return _grouped(_grouped(x, groups, up, per_row, square=True), groups, down, 1)


def _experts_fp8(x: Tensor, groups: Groups, up: Linear, down: Linear, per_row: int) -> Tensor:
    """As `_experts`, on activations quantised per row: e4m3 values are bf16 values, so the kernels are the same."""
    codes, scale = _rounded(x, up)
    hidden = _grouped(codes, groups, up, per_row)
    hidden = (hidden * scale.repeat_interleave(per_row, 0)).to(x.dtype).relu_().square_()
    codes, scale = _rounded(hidden, down)
    return (_grouped(codes, groups, down, 1) * scale).to(x.dtype)


def _rounded(x: Tensor, stack: Linear) -> tuple[Tensor, Tensor]:
    """Rows as e4m3 would have them, in bf16, and the fp32 scale of each, [T, 1]."""
    if stack.prompt != "fp8_per_row":
        return x, torch.ones(len(x), 1, device=x.device)
    scale = (x.float().abs().amax(-1, keepdim=True) / E4M3_MAX).clamp(min=torch.finfo(torch.float32).tiny)
    return (x.float() / scale).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3).to(x.dtype), scale


def _grouped(x: Tensor, groups: Groups, stack: Linear, per_row: int, *, square: bool = False) -> Tensor:
    """Row a of the result is row a / per_row of x times the matrix that its group names: bf16 [assignments, out]."""
    rows_out, columns = stack.weight.shape[1:]
    tile = stack_tile(stack.weight.format, columns, groups.tokens, hopper=hopper(x.device.index))
    if isinstance(tile, Wide):
        picked = torch.empty(len(groups.order), columns, dtype=x.dtype, device=x.device)
        kernel = _pick_kernel(x.device.index, columns, 1 if stack.weight.format == "bf16" else 2, per_row)
        strides = (picked.stride(0), x.stride(0))
        kernel.launch((len(picked), 1), 0, [*map(argument, (picked, x, groups.order)), *map(argument, strides)])
        x = picked
    y = torch.empty(len(groups.order), rows_out, dtype=x.dtype, device=x.device)
    product(y, x, stack, tile, slices_of_stack(columns), square=square, stack=groups, per_row=per_row)
    return y


def slices_of_stack(columns: int) -> int:
    """Slices of K of products of stacks."""
    return SLICES if columns >= 16 * INPUTS_PER_CHUNK else 1


def _tokens(assignments: int, up: Linear, down: Linear, device: int) -> int:
    """Rows of a group at most: about what an expert gets. Not part of a result's bits."""
    average = assignments / up.weight.shape[0]
    if average <= 4:
        return 8
    if average <= 10:
        return 16
    if not hopper(device) or min(slices_of_stack(s.weight.shape[2]) for s in (up, down)) == 1:
        return 32
    return 32 if average <= 24 else 64 if average <= 96 else 128


def stack_tile(format: str, columns: int, tokens: int, *, hopper: bool) -> Tiles:
    """How products of groups of so many tokens are cut. Not part of a result's bits."""
    bf16 = format == "bf16"
    if tokens <= 16 or not hopper or slices_of_stack(columns) == 1:
        return Few(1, 1, tokens // 8, (4 if bf16 else 6) if tokens == 8 else 3 if bf16 else 4)
    if tokens == 128:
        return Wide(1, 1, 1, 128, 4, 1) if bf16 else Wide(2, 1, 4, 128, 4)
    return Wide(1, 1, 1, tokens, 4, 1)


def _new_groups(chosen: Tensor, experts: int, tokens: int) -> Groups:
    count = chosen.numel()
    most = min(count, experts + count // tokens)
    table = torch.empty(most + 1, 4, dtype=torch.int32, device=chosen.device)
    return Groups(table, torch.empty(count, dtype=torch.int32, device=chosen.device), most, tokens)


def _fill_groups(groups: Groups, chosen: Tensor) -> None:
    arguments = map(argument, (groups.table, groups.order, chosen))
    kernel = _groups_kernel(chosen.device.index, groups.tokens)
    kernel.launch((1, 1), 0, [*arguments, ctypes.c_int(chosen.numel())])


# -- sums ------------------------------------------------------------------------------------------------------------


def _added(x: Tensor, linear: Linear, terms: Terms, residual: Tensor, out: Tensor) -> Tensor:
    """residual + (Σ terms + x · Wᵀ), the product rounded to bf16 before it is added."""
    tile, slice_count = step_tiles(linear, len(x), x.device.index)
    if isinstance(tile, Few):
        product(out, rows16(x), linear, tile, slice_count, residual=residual, terms=terms)
        return out
    return _sum(terms, step_linear(x, linear), residual, out)


def _sum(terms: Terms, other: Tensor | None, residual: Tensor | None, out: Tensor) -> Tensor:
    """residual + (Σ terms + other), rounded once."""
    found, rows, width = terms.found, len(out), out.shape[1]
    expect_rows16(out)
    residual = None if residual is None else rows16(residual)
    defines = (
        ("SUM", 1),
        ("TERMS", terms.count),
        ("WEIGHED", int(terms.worth is not None)),
        ("ADDS", int(other is not None)),
        ("RESIDUAL", int(residual is not None)),
    )
    strides = (out.stride(0), found.stride(0), *(0 if t is None else t.stride(0) for t in (other, residual)))
    _sum_kernel(out.device.index, defines).launch(
        (-(-width // 1024), rows),
        0,
        [
            *map(argument, (out, found, terms.worth, other, residual)),
            *map(argument, strides),
            ctypes.c_int(width),
        ],
    )
    return out


# -- kernels ---------------------------------------------------------------------------------------------------------


def scores_defines(experts: int, columns: int, fused: bool) -> Defines:
    """Constants of `scores`."""
    return (
        ("SCORES", 1),
        ("K_", columns),
        ("E", experts),
        ("BATCH", 1 if fused else SCORE_ROWS),
        ("NORM", int(fused)),
        ("GROUPS", 1),
    )


def choice_defines(config: MoeConfig, tokens: int) -> Defines:
    """Constants of `choose_rows` (tokens 0) and `choose_and_group`."""
    experts = config.n_routed_experts
    return (
        ("CHOICE", 1),
        ("E", experts),
        ("TOP", config.num_experts_per_tok),
        ("VALUES", -(-experts // 32)),
        ("NORMED", int(config.norm_topk_prob)),
        ("GROUPS_OF", tokens) if tokens else ("CHOICE_ROWS", 1),
    )


def pick_defines(columns: int, order: int, per_row: int) -> Defines:
    """Constants of `pick_rows`."""
    return (("PICK", 1), ("K_", columns), ("GROUPS", 1), ("ORDER", order), ("PER_ROW", per_row))


def text(*, norms: bool = False) -> str:
    """The source; norms: with what `scores` and `pick_rows` need."""
    return nvrtc.source("common.cuh", *(["norm.cuh"] if norms else []), "moe.cu")


@cache
def _scores_kernel(device: int, experts: int, columns: int, fused: bool) -> nvrtc.Kernel:
    return nvrtc.load(text(norms=True), "scores", scores_defines(experts, columns, fused), threads=256, shared_bytes=0)


@cache
def _choice_kernel(device: int, config: MoeConfig, tokens: int) -> nvrtc.Kernel:
    name, threads = ("choose_and_group", 1024) if tokens else ("choose_rows", 256)
    return nvrtc.load(text(), name, choice_defines(config, tokens), threads=threads, shared_bytes=0)


@cache
def _groups_kernel(device: int, tokens: int) -> nvrtc.Kernel:
    return nvrtc.load(text(), "group_rows", (("GROUPS_OF", tokens),), threads=1024, shared_bytes=0)


@cache
def _pick_kernel(device: int, columns: int, order: int, per_row: int) -> nvrtc.Kernel:
    defines = pick_defines(columns, order, per_row)
    return nvrtc.load(text(norms=True), "pick_rows", defines, threads=256, shared_bytes=0)


@cache
def _sum_kernel(device: int, defines: Defines) -> nvrtc.Kernel:
    return nvrtc.load(text(), "sum_rows", defines, threads=128, shared_bytes=0)
