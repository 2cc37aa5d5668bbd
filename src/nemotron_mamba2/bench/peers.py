"""The same layer on other people's kernels, as far as they are installed.

| name | projections | convolution | state step, gated norm |
|---|---|---|---|
| `torch` | cuBLAS, weights in bf16 | plain torch | plain torch |
| `mamba_ssm` | cuBLAS, weights in bf16 | causal-conv1d, else plain torch | mamba_ssm's Triton kernels |
| `humming` | humming-kernels, weights as they are | as `mamba_ssm` | as `mamba_ssm`, else plain torch |

Each keeps the classic recurrence: a state that is read and written for every row. Rows of a verify step pass the
projections together and the recurrence one after the other. A peer that is not installed, does not run a format or
disagrees with the reference has no figure.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any, ClassVar, Protocol, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from ..config import Mamba2Config
from ..formats import BLOCK, Fp8Block, Fp8Channel, Fp8Tensor, Nvfp4, Weight, dequantize
from ..weights import Mamba2Weights

Product: TypeAlias = Callable[[Tensor], Tensor]
STATE_UPDATE, GATED_NORM = "mamba_ssm.ops.triton.selective_state_update", "mamba_ssm.ops.triton.layernorm_gated"


class Peer(Protocol):
    """A stack of layers on other kernels."""

    name: ClassVar[str]
    config: Mamba2Config

    def __init__(self, config: Mamba2Config, weights: Sequence[Mamba2Weights]) -> None:
        """Raises ImportError when it is not installed, and whatever it raises when it cannot run the weights."""

    def states(self, sequences: int, dtype: torch.dtype) -> list[Any]:
        """A fresh state for each layer."""

    def step(self, index: int, hidden: Tensor, state: Any, *, rows: int) -> Tensor:
        """One layer over `rows` rows of each sequence, [sequences · rows, hidden]."""


@dataclass(frozen=True, eq=False)
class _State:
    """conv: bf16 [S, conv_dim, width], the last raw inputs. ssm: [S, H, P, N]."""

    conv: Tensor
    ssm: Tensor


@dataclass(frozen=True, eq=False)
class _Weights:
    """One layer's vectors as peers take them."""

    norm: Tensor
    conv: Tensor
    conv_bias: Tensor
    dt_bias: Tensor
    A: Tensor
    D: Tensor
    gated_norm: Tensor


class TorchLayers:
    """cuBLAS products, plain torch around them."""

    name: ClassVar[str] = "torch"

    def __init__(self, config: Mamba2Config, weights: Sequence[Mamba2Weights]) -> None:
        self.config = config
        self._vectors = [_vectors(config, w) for w in weights]
        self._products = [(self._product(w.in_proj), self._product(w.out_proj)) for w in weights]

    def states(self, sequences: int, dtype: torch.dtype) -> list[_State]:
        """A fresh state for each layer."""
        c = self.config
        conv = (sequences, c.conv_dim, c.conv_kernel)
        ssm = (sequences, c.mamba_num_heads, c.mamba_head_dim, c.ssm_state_size)
        return [
            _State(w.norm.new_zeros(conv, dtype=torch.bfloat16), w.norm.new_zeros(ssm, dtype=dtype))
            for w in self._vectors
        ]

    def step(self, index: int, hidden: Tensor, state: _State, *, rows: int) -> Tensor:
        """One layer over `rows` rows of each sequence."""
        c, w = self.config, self._vectors[index]
        project_in, project_out = self._products[index]
        normed = F.rms_norm(hidden, (c.hidden_size,), w.norm, c.layer_norm_epsilon)
        z, xbc, dt = project_in(normed).split([c.d_inner, c.conv_dim, c.mamba_num_heads], -1)
        if rows == 1:
            y = self._recur(w, state, xbc, dt)
        else:
            sequences = len(hidden) // rows
            xs, dts = xbc.view(sequences, rows, -1), dt.view(sequences, rows, -1)
            y = torch.stack([self._recur(w, state, xs[:, j], dts[:, j]) for j in range(rows)], 1).flatten(0, 1)
        return hidden + project_out(self._gated_norm(w, y, z))

    def _recur(self, w: _Weights, state: _State, xbc: Tensor, dt: Tensor) -> Tensor:
        """One row of each sequence → [S, d_inner]."""
        c = self.config
        x, B, C = self._convolve(w, state, xbc).split([c.d_inner, *[c.n_groups * c.ssm_state_size] * 2], -1)
        heads = x.view(len(x), c.mamba_num_heads, c.mamba_head_dim)
        B, C = (t.view(len(x), c.n_groups, c.ssm_state_size) for t in (B, C))
        return self._update(w, state, heads, dt, B, C).reshape(len(x), c.d_inner)

    def _product(self, weight: Weight) -> Product:
        matrix = dequantize(weight, torch.bfloat16)
        return lambda x: F.linear(x, matrix)

    def _convolve(self, w: _Weights, state: _State, xbc: Tensor) -> Tensor:
        state.conv.copy_(torch.cat([state.conv[..., 1:], xbc.unsqueeze(-1)], -1))
        return F.silu((state.conv * w.conv).sum(-1) + w.conv_bias)

    def _update(self, w: _Weights, state: _State, x: Tensor, dt: Tensor, B: Tensor, C: Tensor) -> Tensor:
        per_group = self.config.mamba_num_heads // self.config.n_groups
        B, C = (t.float().repeat_interleave(per_group, 1) for t in (B, C))
        step, wide = F.softplus(dt.float() + w.dt_bias), x.float()
        decayed = state.ssm * (step * w.A).exp()[..., None, None]
        state.ssm.copy_(torch.addcmul(decayed, (step.unsqueeze(-1) * wide).unsqueeze(-1), B.unsqueeze(2)))
        y = torch.matmul(state.ssm.float(), C.unsqueeze(-1)).squeeze(-1) + w.D.unsqueeze(-1) * wide
        return y.to(x.dtype)

    def _gated_norm(self, w: _Weights, y: Tensor, z: Tensor) -> Tensor:
        gated = (y.float() * F.silu(z.float())).unflatten(-1, (self.config.n_groups, -1))
        scale = torch.rsqrt(gated.square().mean(-1, keepdim=True) + self.config.layer_norm_epsilon)
        return (gated * scale).flatten(-2).to(y.dtype) * w.gated_norm


class MambaSsmLayers(TorchLayers):
    """cuBLAS products, causal-conv1d where it is installed, mamba_ssm's Triton kernels."""

    name: ClassVar[str] = "mamba_ssm"

    def __init__(self, config: Mamba2Config, weights: Sequence[Mamba2Weights]) -> None:
        self._state_update = mamba_ssm(STATE_UPDATE).selective_state_update
        self._rms_norm = mamba_ssm(GATED_NORM).rmsnorm_fn
        try:
            self._conv_update = import_module("causal_conv1d").causal_conv1d_update
        except ImportError:
            self._conv_update = None
        super().__init__(config, weights)

    def _convolve(self, w: _Weights, state: _State, xbc: Tensor) -> Tensor:
        if self._conv_update is None:
            return super()._convolve(w, state, xbc)
        found: Tensor = self._conv_update(xbc, state.conv, w.conv, w.conv_bias, "silu")
        return found

    def _update(self, w: _Weights, state: _State, x: Tensor, dt: Tensor, B: Tensor, C: Tensor) -> Tensor:
        P, N = state.ssm.shape[2:]
        found: Tensor = self._state_update(
            state.ssm,
            x,
            dt.unsqueeze(-1).expand(-1, -1, P),
            w.A[:, None, None].expand(-1, P, N),
            B,
            C,
            D=w.D[:, None].expand(-1, P),
            dt_bias=w.dt_bias[:, None].expand(-1, P),
            dt_softplus=True,
        )
        return found

    def _gated_norm(self, w: _Weights, y: Tensor, z: Tensor) -> Tensor:
        group = self.config.d_inner // self.config.n_groups
        found: Tensor = self._rms_norm(
            y, w.gated_norm, None, z=z, eps=self.config.layer_norm_epsilon, group_size=group, norm_before_gate=False
        )
        return found


class HummingLayers(MambaSsmLayers):
    """humming-kernels for the products of quantised weights, the rest as in MambaSsmLayers."""

    name: ClassVar[str] = "humming"

    def _product(self, weight: Weight) -> Product:
        config, tensors = _humming_tensors(weight)
        rows, columns = weight.shape
        layer = import_module("humming.layer").HummingLayer(
            shape_n=rows, shape_k=columns, weight_config=config, torch_dtype=torch.bfloat16, pad_n_to_multiple=256
        )
        layer = layer.to(weight.device)
        layer.load_from_tensors(tensors)
        layer.transform()
        return lambda x: layer(x)[:, :rows]


PEERS: tuple[type[Peer], ...] = (TorchLayers, MambaSsmLayers, HummingLayers)


def mamba_ssm(name: str) -> ModuleType:
    """A module of mamba_ssm. The package itself imports compiled extensions; where they were not built, its Triton
    modules load without it. Raises: ImportError."""
    try:
        return import_module(name)
    except Exception:
        spec = find_spec("mamba_ssm") if "mamba_ssm" not in sys.modules else None
        if spec is None or spec.submodule_search_locations is None:
            raise ImportError(f"{name} is not installed") from None
    package = ModuleType("mamba_ssm")
    package.__path__ = list(spec.submodule_search_locations)
    sys.modules["mamba_ssm"] = package
    return import_module(name)


def _vectors(config: Mamba2Config, w: Mamba2Weights) -> _Weights:
    bias = w.norm.new_zeros(config.conv_dim) if w.conv1d_bias is None else w.conv1d_bias
    half = [t.bfloat16() for t in (w.norm, w.conv1d_weight, bias, w.gated_norm)]
    return _Weights(
        norm=half[0], conv=half[1], conv_bias=half[2], dt_bias=w.dt_bias, A=-w.A_log.exp(), D=w.D, gated_norm=half[3]
    )


def _humming_tensors(weight: Weight) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(what humming-kernels calls the format, its tensors). Raises: ImportError, ValueError."""
    if isinstance(weight, Nvfp4):
        parts = {"weight": weight.weight, "weight_scale": weight.scale, "weight_scale_2": weight.global_scale.view(1)}
        return {"quant_method": "modelopt", "quant_algo": "NVFP4"}, parts
    if isinstance(weight, Fp8Tensor):
        return {"quant_method": "fp8"}, {"weight": weight.weight, "weight_scale": weight.scale.view(1)}
    if isinstance(weight, Fp8Channel):
        packed, scale = weight.weight.view(torch.int32), weight.scale.view(-1, 1).bfloat16()
        return {"dtype": "float8e4m3", "scale_type": "channel"}, {"weight": packed, "weight_scale": scale}
    if isinstance(weight, Fp8Block):
        config = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
        return config, {"weight": weight.weight, "weight_scale_inv": weight.scale}
    raise ValueError("unquantised weights: the same as mamba_ssm")
