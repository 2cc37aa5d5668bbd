"""Our layer over the tensors that a mixer of transformers holds: shapes, weights, and what counts as plain."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ... import (
    AdapterError,
    Mamba2Config,
    Mamba2Weights,
    NemotronMamba2Layer,
    Plain,
    Policy,
    StatePool,
    Step,
    Weight,
    make_plan,
)
from .modules import QuantisedLinear


def layer_over(
    block: Any, hidden: Tensor, projections: list[Weight | None], *, config: Mamba2Config, policy: Policy
) -> NemotronMamba2Layer:
    """Our layer over a block's tensors, on the device and in the dtype of hidden.

    projections: in_proj and out_proj, or None for those that are called as modules. Raises: AdapterError, NoKernel.
    """
    mixer = block.mixer
    vectors: dict[str, Any] = {
        "norm": block.norm.weight,
        "conv1d_weight": mixer.conv1d.weight.squeeze(1),
        "conv1d_bias": mixer.conv1d.bias,
        "dt_bias": mixer.dt_bias,
        "A_log": mixer.A_log,
        "D": mixer.D,
        "gated_norm": mixer.norm.weight,
    }
    for name, vector in vectors.items():
        if vector is not None:
            if vector.device != hidden.device:
                raise AdapterError(
                    f"accelerated layer {mixer.layer_idx}: {name} is on {vector.device}, the activations on "
                    f"{hidden.device}; offloaded weights are not served"
                )
            vectors[name] = vector.detach().float().contiguous()
    shapes = ((config.in_proj_rows, config.hidden_size), (config.hidden_size, config.d_inner))
    in_proj, out_proj = (
        # A projection that is called as a module has no weight here; its place is held by a shape without data.
        Plain(torch.empty(shape, dtype=hidden.dtype, device="meta")) if weight is None else weight
        for weight, shape in zip(projections, shapes, strict=True)
    )
    weights = Mamba2Weights(in_proj=in_proj, out_proj=out_proj, **vectors)
    budget = sum(getattr(module, "budget_bytes", 0) for module in (mixer.in_proj, mixer.out_proj))
    plan = make_plan(config, weights, policy, device=hidden.device, dtype=hidden.dtype, budget_bytes=budget)
    return NemotronMamba2Layer(config, weights, plan)


def recur(layer: NemotronMamba2Layer, xbc: Tensor, dt: Tensor, *, step: Step, pool: StatePool) -> Tensor:
    """Convolution and recurrence alone: raw x·B·C [T, conv_dim] and dt [T, H] → y [T, d_inner]."""
    y = xbc.new_empty(len(xbc), layer.config.d_inner)
    for role, rows in step.shares:
        for piece in (rows,) if role == "step" else rows.pieces:
            here = piece.slice
            if role == "step":
                y[here] = layer.step(xbc[here], dt[here], piece, pool)
            else:
                y[here] = layer.scan(*layer.convolve(xbc[here], dt[here], piece, pool), piece, pool)
    return y


def settings_of(mixer: Any, policy: Policy) -> tuple[Mamba2Config, torch.dtype]:
    """Shape and state dtype of a mixer. Raises: AdapterError."""
    config = mixer.config
    if mixer.activation not in ("silu", "swish"):
        raise AdapterError(f"accelerate: mamba_hidden_act {mixer.activation!r} is not served, expected 'silu'")
    name = str(getattr(config, "mamba_ssm_cache_dtype", None) or "float32").removeprefix("torch.")
    dtype = policy.state_dtype or getattr(torch, "float32" if name == "auto" else name, None)
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise AdapterError(f"accelerate: mamba_ssm_cache_dtype {name!r} is not served, expected 'float32'")
    # The original ignores the config's limit and clamps at time_step_min; a limit set by hand is meant.
    low, high = tuple(mixer.time_step_limit)
    if (low, high) == (config.time_step_min, float("inf")):
        low, high = tuple(getattr(config, "time_step_limit", None) or (0.0, float("inf")))
    return Mamba2Config(
        hidden_size=mixer.hidden_size,
        mamba_num_heads=mixer.num_heads,
        mamba_head_dim=mixer.head_dim,
        n_groups=mixer.n_groups,
        ssm_state_size=mixer.ssm_state_size,
        conv_kernel=mixer.conv_kernel_size,
        chunk_size=mixer.chunk_size,
        layer_norm_epsilon=mixer.norm.variance_epsilon,
        time_step_limit=None if low <= 0 and high == float("inf") else (low, high),
        use_conv_bias=mixer.conv1d.bias is not None,
    ), dtype


def weight_of(module: Any) -> Weight | None:
    """The weight of a plain projection, or None for one that must be called."""
    if not plain(module):
        return None
    if type(module) is nn.Linear and module.bias is None:
        return Plain(module.weight.detach())
    if type(module) is QuantisedLinear:
        return module.weights()[0]
    return None


def plain(module: Any) -> bool:
    """Whether calling a module is nothing but its class's forward."""
    return "forward" not in module.__dict__ and not hooked(module)


def hooked(module: Any) -> bool:
    """Whether hooks are on a module."""
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)


def identity(tensor: Tensor) -> tuple[int, int]:
    """What changes when a tensor's memory or values change."""
    return tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version
