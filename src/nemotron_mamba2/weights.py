"""The typed weights of each layer kind: what a layer is made of once its files have been read.

Names are the checkpoint's. Projections come in any format of `formats`; everything else is a plain tensor.
Vectors that enter fp32 arithmetic (norms, A_log, D, dt_bias, router) are held in fp32, whatever the file says: bf16
values survive that exactly, and a router bias near 57 does not survive the other way round.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import TypeAlias

from torch import Tensor

from .formats import Weight


class _Weights:
    """Iteration over the projections, and the bytes held."""

    def projections(self) -> Iterator[tuple[str, Weight]]:
        """(name, weight) of every matrix that has a format."""
        for field in fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if value is not None and not isinstance(value, Tensor):
                yield field.name, value

    @property
    def nbytes(self) -> int:
        tensors = (getattr(self, f.name) for f in fields(self))  # type: ignore[arg-type]
        return sum(t.nbytes for t in tensors if t is not None)


@dataclass(frozen=True, eq=False)
class Mamba2Weights(_Weights):
    """One Mamba-2 layer. d = d_inner, c = conv_dim, H heads.

    norm: fp32 [hidden], the block's RMSNorm; in_proj: [d + c + H, hidden], rows z · x · B · C · dt;
    conv1d_weight: fp32 [c, conv_kernel]; conv1d_bias: fp32 [c], or None; dt_bias, A_log, D: fp32 [H];
    gated_norm: fp32 [d] (`mixer.norm` in the files); out_proj: [hidden, d].
    """

    norm: Tensor
    in_proj: Weight
    conv1d_weight: Tensor
    conv1d_bias: Tensor | None
    dt_bias: Tensor
    A_log: Tensor
    D: Tensor
    gated_norm: Tensor
    out_proj: Weight


@dataclass(frozen=True, eq=False)
class AttentionWeights(_Weights):
    """One attention layer. norm: fp32 [hidden]; q/k/v_proj: [heads·head_dim, hidden]; o_proj: [hidden, heads·head_dim];
    k_scale, v_scale: fp32 scalars of an FP8 KV cache, or None."""

    norm: Tensor
    q_proj: Weight
    k_proj: Weight
    v_proj: Weight
    o_proj: Weight
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None


@dataclass(frozen=True, eq=False)
class MlpWeights(_Weights):
    """One MLP layer. norm: fp32 [hidden]; up_proj: [intermediate, hidden]; down_proj: [hidden, intermediate]."""

    norm: Tensor
    up_proj: Weight
    down_proj: Weight


@dataclass(frozen=True, eq=False)
class MoeWeights(_Weights):
    """One mixture-of-experts layer. w = the experts' input width (latent or hidden), E experts.

    norm: fp32 [hidden]; gate: fp32 [E, hidden]; e_score_correction_bias: fp32 [E]; experts_up: [E, intermediate, w];
    experts_down: [E, w, intermediate]; shared_up/down: the shared expert, or None; fc1_latent_proj: [w, hidden] and
    fc2_latent_proj: [hidden, w], or None.
    """

    norm: Tensor
    gate: Tensor
    e_score_correction_bias: Tensor
    experts_up: Weight
    experts_down: Weight
    shared_up: Weight | None = None
    shared_down: Weight | None = None
    fc1_latent_proj: Weight | None = None
    fc2_latent_proj: Weight | None = None


@dataclass(frozen=True, eq=False)
class LooseWeights(_Weights):
    """Matrices outside of any layer of ours: one, or the two stacks of a layer's experts."""

    up: Weight
    down: Weight | None = None


LayerWeights: TypeAlias = Mamba2Weights | AttentionWeights | MlpWeights | MoeWeights


@dataclass(frozen=True, eq=False)
class MtpWeights:
    """The multi-token-prediction head. eh_proj: [hidden, 2·hidden], embedding half first; enorm, hnorm: fp32 [hidden];
    layers: its attention and MoE layer; final_layernorm: fp32 [hidden]."""

    eh_proj: Weight
    enorm: Tensor
    hnorm: Tensor
    layers: tuple[LayerWeights, ...]
    final_layernorm: Tensor


@dataclass(frozen=True, eq=False)
class ModelWeights:
    """A whole model. embeddings: bf16 [vocab, hidden], or a quantised matrix; lm_head: [vocab, hidden]; norm_f: fp32
    [hidden]; layers in order; mtp: or None."""

    embeddings: Weight
    layers: tuple[LayerWeights, ...]
    norm_f: Tensor
    lm_head: Weight
    mtp: MtpWeights | None = None
