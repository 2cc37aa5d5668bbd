"""Small random models in memory, and what tests do with them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from nemotron_mamba2.batch import Batch
from nemotron_mamba2.config import AttentionConfig, LayerConfig, Mamba2Config, MlpConfig, ModelConfig, MoeConfig, Policy
from nemotron_mamba2.formats import Plain, Weight
from nemotron_mamba2.model import Caches, NemotronH
from nemotron_mamba2.ops.reference import quantize
from nemotron_mamba2.plan import plan_model
from nemotron_mamba2.weights import (
    AttentionWeights,
    LayerWeights,
    Mamba2Weights,
    MlpWeights,
    ModelWeights,
    MoeWeights,
    MtpWeights,
)

HIDDEN, VOCAB = 64, 160
MOE = MoeConfig(HIDDEN, 8, 3, 48, 32, routed_scaling_factor=2.5)
LATENT = MoeConfig(HIDDEN, 8, 3, 48, 32, moe_latent_size=32, routed_scaling_factor=5.0)
LAYERS: dict[str, LayerConfig] = {
    "M": Mamba2Config(HIDDEN, 8, 16, 2, 16, 4, 16),
    "*": AttentionConfig(HIDDEN, 8, 2, 16),
    "-": MlpConfig(HIDDEN, 96),
    "E": MOE,
}
REPRODUCIBLE = Policy(reproducible=True)
PATTERNS = ("M", "*", "-*", "M-M*", "ME*", "M-E*", "MEM*E")


def make_config(
    pattern: str, *, dtype: torch.dtype = torch.float32, mtp: bool = False, layers: dict[str, LayerConfig] | None = None
) -> ModelConfig:
    kinds = LAYERS | (layers or {})
    return ModelConfig(
        HIDDEN,
        VOCAB,
        tuple(kinds[letter] for letter in pattern),
        tuple(kinds[letter] for letter in ("*E" if mtp else "")),
        dtype=dtype,
        max_position_embeddings=512,
    )


def make_weights(config: ModelConfig, *, seed: int = 0, format: str = "bf16") -> ModelWeights:
    draw = Draw(seed, config.dtype, format)
    h = config.hidden_size
    mtp = None
    if config.mtp_layers:
        layers = tuple(layer_weights(c, draw) for c in config.mtp_layers)
        mtp = MtpWeights(draw.matrix(h, 2 * h), draw.norm(h), draw.norm(h), layers, draw.norm(h))
    return ModelWeights(
        Plain(draw(config.vocab_size, h).to(config.dtype)),
        tuple(layer_weights(c, draw) for c in config.layers),
        draw.norm(h),
        draw.matrix(config.vocab_size, h, scale=0.4),
        mtp,
    )


class Draw:
    """Random tensors of one seed."""

    def __init__(self, seed: int, dtype: torch.dtype, format: str = "bf16") -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype = dtype
        self.format = format

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    def norm(self, size: int) -> Tensor:
        return 1 + 0.1 * self(size)

    def matrix(self, *shape: int, scale: float = 1.0) -> Weight:
        values = self(*shape) * scale / math.sqrt(shape[-1])
        return Plain(values.to(self.dtype)) if self.format == "bf16" else quantize(values, self.format)


def layer_weights(config: LayerConfig, draw: Draw) -> LayerWeights:
    h = config.hidden_size
    if isinstance(config, Mamba2Config):
        heads = config.mamba_num_heads
        return Mamba2Weights(
            norm=draw.norm(h),
            in_proj=draw.matrix(config.in_proj_rows, h),
            conv1d_weight=0.5 * draw(config.conv_dim, config.conv_kernel),
            conv1d_bias=0.1 * draw(config.conv_dim),
            dt_bias=draw(heads) - 2,
            A_log=torch.log(1 + 15 * torch.rand(heads, generator=draw.generator)),
            D=draw(heads),
            gated_norm=draw.norm(config.d_inner),
            out_proj=draw.matrix(h, config.d_inner),
        )
    if isinstance(config, AttentionConfig):
        queries, keys = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
        q, k, v, o = (draw.matrix(*shape) for shape in ((queries, h), (keys, h), (keys, h), (h, queries)))
        return AttentionWeights(draw.norm(h), q, k, v, o)
    if isinstance(config, MlpConfig):
        return MlpWeights(
            draw.norm(h), draw.matrix(config.intermediate_size, h), draw.matrix(h, config.intermediate_size)
        )
    experts, width, wide = config.n_routed_experts, config.expert_input_size, config.moe_intermediate_size
    shared, latent = config.moe_shared_expert_intermediate_size, config.moe_latent_size
    return MoeWeights(
        norm=draw.norm(h),
        gate=draw(experts, h) / math.sqrt(h),
        e_score_correction_bias=0.1 * draw(experts),
        experts_up=draw.matrix(experts, wide, width),
        experts_down=draw.matrix(experts, width, wide),
        shared_up=draw.matrix(shared, h) if shared else None,
        shared_down=draw.matrix(h, shared) if shared else None,
        fc1_latent_proj=draw.matrix(latent, h) if latent else None,
        fc2_latent_proj=draw.matrix(h, latent) if latent else None,
    )


def make_model(
    pattern: str,
    *,
    dtype: torch.dtype = torch.float32,
    policy: Policy | None = None,
    mtp: bool = False,
    seed: int = 0,
    format: str = "bf16",
    layers: dict[str, LayerConfig] | None = None,
) -> NemotronH:
    config = make_config(pattern, dtype=dtype, mtp=mtp, layers=layers)
    weights = make_weights(config, seed=seed, format=format)
    return NemotronH(config, weights, plan_model(config, weights, policy or Policy(), device="cpu"))


def make_caches(model: NemotronH, *, slots: int = 6, pages: int = 60, window_rows: int = 16, **how) -> Caches:
    return Caches.for_model(model.config, slots=slots, pages=pages, window_rows=window_rows, **how)


def random_tokens(count: int, *, seed: int = 0) -> Tensor:
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed))


def prefill(model: NemotronH, caches: Caches, slot: int, tokens: Tensor, *, splits: Sequence[int] = ()) -> Tensor:
    """All logits of a prompt, run in pieces that end at `splits`."""
    places = [0, *splits, len(tokens)]
    found = [
        model.forward(tokens[a:b], Batch.prefill([slot], [b - a]), caches, logits_rows="all")
        for a, b in itertools.pairwise(places)
    ]
    return torch.cat(found)


def decode(model: NemotronH, caches: Caches, slot: int, tokens: Tensor) -> Tensor:
    """All logits of tokens fed one by one."""
    rows = [model.forward(tokens[t : t + 1], Batch.decode([slot]), caches) for t in range(len(tokens))]
    return torch.cat(rows) if rows else torch.empty(0, VOCAB)


def relative_error(found: Tensor, truth: Tensor) -> float:
    return float((found.double() - truth.double()).norm() / truth.double().norm())
