"""Typed layers from tensors, in the order of the model: which tensor is which field, and the shape it must have.

Shapes come from the config, so a file whose halves were written twice, or cut, is refused by name. Whatever is left
over when the last layer has been read must match a skip rule.

Source: the headers of published files.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..config import AttentionConfig, LayerConfig, Mamba2Config, MlpConfig, ModelConfig, MoeConfig
from ..errors import CheckpointError
from ..formats import Plain, Weight
from ..weights import (
    AttentionWeights,
    LayerWeights,
    Mamba2Weights,
    MlpWeights,
    ModelWeights,
    MoeWeights,
    MtpWeights,
)
from .names import MTP_UNUSED, TIED_HEAD
from .reader import CORRECTION_BIAS, KV_UNSCALED, Reader


def read_layer(reader: Reader, prefix: str, config: LayerConfig) -> LayerWeights:
    """One layer. prefix: "layers.7" or "mtp.layers.0"."""
    norm = reader.vector(f"{prefix}.norm.weight", config.hidden_size)
    mixer = f"{prefix}.mixer"
    if isinstance(config, Mamba2Config):
        return _mamba2(reader, mixer, config, norm=norm)
    if isinstance(config, AttentionConfig):
        return _attention(reader, mixer, config, norm=norm)
    if isinstance(config, MlpConfig):
        return MlpWeights(
            norm=norm,
            up_proj=reader.projection(f"{mixer}.up_proj", config.intermediate_size, config.hidden_size),
            down_proj=reader.projection(f"{mixer}.down_proj", config.hidden_size, config.intermediate_size),
        )
    return _moe(reader, mixer, config, norm=norm)


def _mamba2(reader: Reader, mixer: str, config: Mamba2Config, *, norm: Tensor) -> Mamba2Weights:
    heads, channels = config.mamba_num_heads, config.conv_dim
    return Mamba2Weights(
        norm=norm,
        in_proj=reader.projection(f"{mixer}.in_proj", config.in_proj_rows, config.hidden_size),
        conv1d_weight=reader.vector(f"{mixer}.conv1d.weight", channels, 1, config.conv_kernel).squeeze(1),
        conv1d_bias=reader.vector(f"{mixer}.conv1d.bias", channels) if config.use_conv_bias else None,
        dt_bias=reader.vector(f"{mixer}.dt_bias", heads),
        A_log=reader.vector(f"{mixer}.A_log", heads),
        D=reader.vector(f"{mixer}.D", heads),
        gated_norm=reader.vector(f"{mixer}.norm.weight", config.d_inner),
        out_proj=reader.projection(f"{mixer}.out_proj", config.hidden_size, config.d_inner),
    )


def _attention(reader: Reader, mixer: str, config: AttentionConfig, *, norm: Tensor) -> AttentionWeights:
    hidden = config.hidden_size
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    scales = _kv_scales(reader, mixer)
    if scales["k_scale"] is None and reader.recipe is not None and reader.recipe.kv_fp8 and mixer.startswith("layers."):
        reader.surprises[KV_UNSCALED].append(mixer)
    return AttentionWeights(
        norm=norm,
        q_proj=reader.projection(f"{mixer}.q_proj", queries, hidden),
        k_proj=reader.projection(f"{mixer}.k_proj", keys, hidden),
        v_proj=reader.projection(f"{mixer}.v_proj", keys, hidden),
        o_proj=reader.projection(f"{mixer}.o_proj", hidden, queries),
        **scales,
    )


def _kv_scales(reader: Reader, mixer: str) -> dict[str, Tensor | None]:
    """The scales of an FP8 KV cache; ModelOpt hangs them on the projections, compressed-tensors on the mixer."""
    scales: dict[str, Tensor | None] = {"k_scale": None, "v_scale": None}
    for k, v in ((f"{mixer}.k_proj.k_scale", f"{mixer}.v_proj.v_scale"), (f"{mixer}.k_scale", f"{mixer}.v_scale")):
        if k in reader.unread or v in reader.unread:
            scales = {"k_scale": reader.scalar(k), "v_scale": reader.scalar(v)}
            break
    return scales


def _moe(reader: Reader, mixer: str, config: MoeConfig, *, norm: Tensor) -> MoeWeights:
    hidden, experts, width = config.hidden_size, config.n_routed_experts, config.expert_input_size
    inner, shared = config.moe_intermediate_size, config.moe_shared_expert_intermediate_size
    bias = f"{mixer}.gate.e_score_correction_bias"
    if bias in reader.tensors and reader.tensors[bias].dtype in ("BF16", "F16"):
        reader.surprises[CORRECTION_BIAS].append(bias)
    latent = config.moe_latent_size
    return MoeWeights(
        norm=norm,
        gate=reader.vector(f"{mixer}.gate.weight", experts, hidden),
        e_score_correction_bias=reader.vector(bias, experts),
        experts_up=reader.experts(f"{mixer}.experts", "up_proj", (experts, inner, width)),
        experts_down=reader.experts(f"{mixer}.experts", "down_proj", (experts, width, inner)),
        shared_up=reader.projection(f"{mixer}.shared_experts.up_proj", shared, hidden) if shared else None,
        shared_down=reader.projection(f"{mixer}.shared_experts.down_proj", hidden, shared) if shared else None,
        fc1_latent_proj=reader.projection(f"{mixer}.fc1_latent_proj", latent, hidden) if latent else None,
        fc2_latent_proj=reader.projection(f"{mixer}.fc2_latent_proj", hidden, latent) if latent else None,
    )


# model ------------------------------------------------------------------------------------------------------------


def read_model(reader: Reader, config: ModelConfig, *, mtp: bool) -> ModelWeights:
    """The whole model, and nothing left over. mtp: read the multi-token-prediction head where there is one."""
    embeddings = reader.projection("embeddings", config.vocab_size, config.hidden_size)
    layers = tuple(read_layer(reader, f"layers.{index}", layer) for index, layer in enumerate(config.layers))
    weights = ModelWeights(
        embeddings=embeddings,
        layers=layers,
        norm_f=reader.vector("norm_f.weight", config.hidden_size),
        lm_head=_lm_head(reader, config, embeddings),
        mtp=_mtp(reader, config) if mtp else None,
    )
    for name in [name for name in reader.unread if weights.mtp is None and MTP_UNUSED.pattern.match(name)]:
        reader.skip(name, MTP_UNUSED)
    reader.finish()
    return weights


def _lm_head(reader: Reader, config: ModelConfig, embeddings: Weight) -> Weight:
    own = any(name.startswith("lm_head.") for name in reader.unread)
    if not own and not config.tie_word_embeddings:
        raise CheckpointError("lm_head.weight: missing, and config.json does not set tie_word_embeddings")
    if not own:
        return embeddings
    if not config.tie_word_embeddings:
        return reader.projection("lm_head", config.vocab_size, config.hidden_size)
    return _tied_head(reader, config, embeddings)


def _tied_head(reader: Reader, config: ModelConfig, embeddings: Weight) -> Weight:
    """The embeddings, after a look whether the lm_head that the file holds all the same is equal to them."""
    name = "lm_head.weight"
    head = reader.projection("lm_head", config.vocab_size, config.hidden_size)
    both_plain = isinstance(head, Plain) and isinstance(embeddings, Plain)
    same = both_plain and head.weight.dtype == embeddings.weight.dtype
    same = same and (head.device.type == "meta" or torch.equal(head.weight, embeddings.weight))
    if not same:
        raise CheckpointError(
            f"{reader.tensors[name]}: differs from embeddings.weight, but tie_word_embeddings is true"
        )
    reader.skip(name, TIED_HEAD)
    return embeddings


def _mtp(reader: Reader, config: ModelConfig) -> MtpWeights | None:
    hidden, layers = config.hidden_size, config.mtp_layers
    if not layers:
        return None
    if not any(name.startswith("mtp.") for name in reader.unread):
        reader.surprises["the config names a multi-token-prediction head, the files have none"].append("mtp")
        return None
    first, last = "mtp.layers.0", f"mtp.layers.{len(layers) - 1}"
    return MtpWeights(
        eh_proj=reader.projection(f"{first}.eh_proj", hidden, 2 * hidden),
        enorm=reader.vector(f"{first}.enorm.weight", hidden),
        hnorm=reader.vector(f"{first}.hnorm.weight", hidden),
        layers=tuple(read_layer(reader, f"mtp.layers.{index}", layer) for index, layer in enumerate(layers)),
        final_layernorm=reader.vector(f"{last}.final_layernorm.weight", hidden),
    )
