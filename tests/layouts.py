"""How each published checkpoint is stored: its config files, names, dtypes, shards and quantised projections.

Widths and layer counts are small. Sources are the headers and config files of the published checkpoints.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from quantised import Quantised, fp8_block, fp8_channel, fp8_tensor, nvfp4, nvfp4_packed
from random_models import letters, small_config, tensor_shapes

Quantiser = Callable[[Tensor], Quantised]


@dataclass
class Layout:
    """How one published checkpoint is stored. quantiser: projection name without prefix → its quantiser, or None."""

    config: dict[str, Any]
    quantiser: Callable[[str], Quantiser | None] = lambda name: None
    quant_file: dict[str, Any] | None = None
    generation: dict[str, Any] = field(
        default_factory=lambda: {
            "_from_model_config": True,
            "bos_token_id": 1,
            "eos_token_id": [2, 11],
            "pad_token_id": 0,
        }
    )
    prefix: str = "backbone."
    head_prefix: str = ""
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)  # ending of a name → dtype on disk; others bf16
    kv_scale_shape: tuple[int, ...] | None = None
    shards: int = 1
    stacked: bool = False  # experts as one tensor
    mtp_apart: bool = False  # mtp.* in a file that the index does not name
    extra: dict[str, Tensor] = field(default_factory=dict)
    wrapper: dict[str, Any] | None = None  # an outer config that holds this one as llm_config


F32_GATE = {".gate.weight": torch.float32}


def attention_projections(plan: str) -> list[str]:
    return [f"layers.{i}.mixer.{p}_proj" for i, kind in enumerate(plan) if kind == "*" for p in "qkvo"]


def nano_30b_excludes(plan: str) -> list[str]:
    """lm_head, all attention, the Mamba layer just before each attention layer, and every convolution."""
    names = ["lm_head"]
    for index, kind in enumerate(plan):
        mixer = f"backbone.layers.{index}.mixer"
        if kind == "M":
            names.append(f"{mixer}.conv1d")
            if plan[index + 1 : index + 2] == "*":
                names += [f"{mixer}.in_proj", f"{mixer}.out_proj"]
    return names + [f"backbone.{name}" for name in attention_projections(plan)]


def lightning_excludes(plan: str) -> list[str]:
    names = ["backbone.embeddings", "mtp*", *(f"backbone.{name}" for name in attention_projections(plan))]
    names += [f"backbone.layers.{i}.mixer.conv1d" for i, kind in enumerate(plan) if kind == "M"]
    return names + [f"backbone.layers.{i}.mixer.gate" for i, kind in enumerate(plan) if kind == "E"]


def _modelopt(algorithm: str, *, version: str, **rest: Any) -> dict[str, Any]:
    return {
        "producer": {"name": "modelopt", "version": version},
        "quantization": {"quant_algo": algorithm, "kv_cache_quant_algo": "FP8", **rest},
    }


def _listed(kinds: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """`quantized_layers` from projection → algorithm."""
    return {
        name if name == "lm_head" else f"backbone.{name}": {"quant_algo": kind}
        | ({} if kind == "FP8" else {"group_size": 16})
        for name, kind in kinds.items()
    }


def projections(config: Mapping[str, Any]) -> list[str]:
    """Names of all projections, embeddings and lm_head included, without `.weight`."""
    norms = ("norm", "conv1d", "gate", "norm_f", "enorm", "hnorm", "final_layernorm")
    names = (n.removesuffix(".weight") for n in tensor_shapes(config) if n.endswith(".weight"))
    return [name for name in names if name.split(".")[-1] not in norms]


AUTO_MAP = {
    "AutoConfig": "configuration_nemotron_h.NemotronHConfig",
    "AutoModelForCausalLM": "modeling_nemotron_h.NemotronHForCausalLM",
}


def _nano_30b(**changes: Any) -> dict[str, Any]:
    facts = {
        "auto_map": AUTO_MAP,
        "mamba_ssm_cache_dtype": "float32",
        "max_position_embeddings": 262144,
        "norm_eps": 1e-05,
        "partial_rotary_factor": 1.0,
        "rope_theta": 10000,
        "transformers_version": "4.53.2",
    }
    return small_config("MEMEM*EME", **{**facts, **changes})


def nano_30b_bf16() -> Layout:
    return Layout(_nano_30b(), dtypes=F32_GATE, shards=2)


def nano_30b_nvfp4() -> Layout:
    config = _nano_30b()
    excludes = nano_30b_excludes(letters(config))

    def quantiser(name: str) -> Quantiser | None:
        return None if name == "embeddings" or name in excludes or f"backbone.{name}" in excludes else nvfp4

    quant = _modelopt("NVFP4", version="0.29.0", group_size=16, exclude_modules=excludes)
    return Layout(config, quantiser, quant, dtypes=F32_GATE, shards=3)


def _super_kinds(config: Mapping[str, Any]) -> dict[str, str]:
    kinds = {}
    for name in projections(config):
        if ".experts." in name or name == "layers.1.mixer.shared_experts.down_proj":
            kinds[name] = "NVFP4"
        elif name in (
            *("layers.0.mixer.in_proj", "layers.0.mixer.out_proj", "layers.2.mixer.out_proj", "layers.4.mixer.o_proj"),
            *("layers.1.mixer.shared_experts.up_proj", "layers.3.mixer.shared_experts.up_proj"),
            *("layers.3.mixer.shared_experts.down_proj", "layers.1.mixer.fc1_latent_proj"),
            "layers.3.mixer.fc2_latent_proj",
        ):
            kinds[name] = "FP8"
    return {name: kind for name, kind in kinds.items() if not name.startswith("mtp.")}


def super_nvfp4() -> Layout:
    config = small_config(
        "MEME*EM",
        torch_dtype=None,
        dtype="bfloat16",
        norm_eps=1e-05,
        mamba_ssm_cache_dtype="float32",
        moe_latent_size=64,
        moe_shared_expert_overlap=False,
        mtp_hybrid_override_pattern="*E",
        num_nextn_predict_layers=1,
        n_routed_experts=8,
        num_experts_per_tok=3,
        routed_scaling_factor=5.0,
        time_step_limit=[0.0, math.inf],
        transformers_version="4.57.1",
    )
    kinds = _super_kinds(config)
    listed = _listed(kinds)
    config["quantization_config"] = {
        "config_groups": {
            "group_0": {
                "input_activations": {"dynamic": False, "num_bits": 8, "type": "float"},
                "weights": {"dynamic": False, "num_bits": 8, "type": "float"},
                "targets": [name for name in listed if listed[name]["quant_algo"] == "FP8"],
            },
            "group_1": {
                "input_activations": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16},
                "weights": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16},
                "targets": [name for name in listed if listed[name]["quant_algo"] == "NVFP4"],
            },
        },
        "ignore": [],
        "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
        "producer": {"name": "modelopt", "version": "0.43.0.dev63+g449e700f9"},
        "quant_algo": "MIXED_PRECISION",
        "quant_method": "modelopt",
        "quantized_layers": listed,
    }
    quant = _modelopt("MIXED_PRECISION", version="0.43.0.dev63+g449e700f9", quantized_layers=listed)
    table = {"FP8": fp8_tensor, "NVFP4": nvfp4}
    return Layout(config, lambda name: table.get(kinds.get(name, "")), quant, kv_scale_shape=(), shards=4)


def lightning_nvfp4() -> Layout:
    config = _nano_30b(
        hybrid_override_pattern=None,
        torch_dtype=None,
        auto_map=None,
        dtype="bfloat16",
        layers_block_type=["mamba", "moe", "mamba", "attention", "moe", "mamba"],
        num_hidden_layers=6,
        moe_latent_size=None,
        moe_shared_expert_overlap=True,
        mtp_layers_block_type=["attention", "moe"],
        num_nextn_predict_layers=1,
        max_position_embeddings=1048576,
    )
    config |= {"transformers_version": "5.8.1", "moe_latent_size": None}
    kinds = {}
    for name in projections(config):
        if "experts" in name or name == "lm_head":
            kinds[name] = "W4A16_NVFP4"
        elif name.endswith((".in_proj", ".out_proj")):
            kinds[name] = "FP8"
    kinds = {name: kind for name, kind in kinds.items() if not name.startswith("mtp.")}
    quant = _modelopt(
        "MIXED_PRECISION",
        version="0.44.0rc5",
        quantized_layers=_listed(kinds),
        exclude_modules=lightning_excludes(letters(config)),
    )
    table: dict[str, Quantiser] = {
        "FP8": functools.partial(fp8_tensor, scalar_shape=(1,)),
        "W4A16_NVFP4": functools.partial(nvfp4, static=False),
    }
    return Layout(
        config,
        lambda name: table.get(kinds.get(name, "")),
        quant,
        # The gate of the MTP head is BF16 even where the others are F32.
        dtypes={"mtp.layers.1.mixer.gate.weight": torch.bfloat16, **F32_GATE},
        kv_scale_shape=(1,),
        shards=6,
    )


def _nano_4b(**changes: Any) -> dict[str, Any]:
    return small_config(
        "M-M*-M-",
        layer_norm_epsilon=None,
        rms_norm_eps=1e-05,
        mamba_head_dim=80,
        mamba_num_heads=6,
        chunk_size=256,
        max_position_embeddings=262144,
        eos_token_id=11,
        mamba_ssm_cache_dtype="float32",
        **changes,
    )


def nano_4b_bf16() -> Layout:
    return Layout(_nano_4b())


def nano_4b_fp8() -> Layout:
    config = _nano_4b()
    excludes = ["lm_head", *(f"backbone.layers.{i}.mixer.conv1d" for i in (0, 2, 5))]
    quant = _modelopt("FP8", version="0.41.0", exclude_modules=excludes)
    return Layout(
        config,
        lambda name: None if name in ("lm_head", "embeddings") else fp8_tensor,
        quant,
        kv_scale_shape=(),
        shards=2,
    )


def _nano_9b_v2(**changes: Any) -> dict[str, Any]:
    return small_config("M-MM-M*-M-", mamba_head_dim=80, rms_norm_eps=1e-05, max_position_embeddings=131072, **changes)


def nano_9b_v2_bf16() -> Layout:
    return Layout(_nano_9b_v2(), shards=2)


def nano_9b_v2_nvfp4() -> Layout:
    config = _nano_9b_v2()
    plan = letters(config)
    excludes = ["lm_head", *(f"backbone.{name}" for name in attention_projections(plan))]
    excludes += [f"backbone.layers.{i}.mixer.conv1d" for i, kind in enumerate(plan) if kind == "M"]
    quant = _modelopt("NVFP4", version="0.35.0", group_size=16, exclude_modules=excludes)
    attention = attention_projections(plan)
    return Layout(
        config, lambda name: None if name in ("lm_head", "embeddings", *attention) else nvfp4, quant, shards=2
    )


def h_8b_bf16() -> Layout:
    config = small_config("M-M*-M-", head_dim=None, attention_head_dim=32, rms_norm_eps=1e-05)
    return Layout(config, shards=4, generation={"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0})


def puzzle_bf16() -> Layout:
    moe = {"block_type": "moe", "n_routed_experts": 8, "moe_latent_size": 64}
    blocks = [
        {"block_type": "mamba"},
        {**moe, "moe_intermediate_size": 64, "num_experts_per_tok": 4},
        {"block_type": "mamba"},
        {"block_type": "attention"},
        {**moe, "moe_intermediate_size": 48, "num_experts_per_tok": 2},
        {"block_type": "mamba"},
        {**moe, "moe_intermediate_size": 32, "num_experts_per_tok": 3},
    ]
    config = small_config(
        "E",
        architectures=["NemotronHPuzzleForCausalLM"],
        model_type="nemotron_h_puzzle",
        auto_map={
            "AutoConfig": "configuration_nemotron_h_puzzle.NemotronHPuzzleConfig",
            "AutoModelForCausalLM": "modeling_nemotron_h_puzzle.NemotronHPuzzleForCausalLM",
        },
        hybrid_override_pattern=None,
        block_configs=blocks,
        num_hidden_layers=len(blocks),
        moe_intermediate_size=None,
        num_experts_per_tok=None,
        n_routed_experts=None,
        mtp_block_configs=[
            {"block_type": "attention"},
            {**moe, "moe_intermediate_size": 64, "num_experts_per_tok": 4},
        ],
        num_nextn_predict_layers=1,
        routed_scaling_factor=5.0,
    )
    return Layout(config, shards=3, mtp_apart=True)


def ultra_bf16() -> Layout:
    config = small_config(
        "MEM*E",
        hybrid_override_pattern=None,
        num_hidden_layers=None,
        torch_dtype=None,
        dtype="bfloat16",
        layers_block_type=["mamba", "moe", "mamba", "attention", "moe"],
        mamba_ssm_cache_dtype="float32",
        moe_latent_size=64,
        mtp_layers_block_type=["attention", "moe"],
        num_nextn_predict_layers=1,
        n_routed_experts=8,
        num_experts_per_tok=3,
        norm_eps=1e-05,
        routed_scaling_factor=5.0,
        time_step_limit=[0.0, 1e308],
        transformers_version="4.57.6",
        _bias_mean=56.98,
    )
    return Layout(config, shards=3)


def _compressed(
    form: str, weights: dict[str, Any], inputs: dict[str, Any] | None, *, ignore: list[str]
) -> dict[str, Any]:
    return {
        "config_groups": {
            "group_0": {"format": form, "input_activations": inputs, "targets": ["Linear"], "weights": weights}
        },
        "format": form,
        "ignore": ignore,
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "version": "0.13.0",
    }


def compressed_nvfp4() -> Layout:
    config = _nano_9b_v2()
    weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "dynamic": False}
    inputs = {**weights, "dynamic": "local"}
    attention = attention_projections(letters(config))
    ignore = ["lm_head", *(f"backbone.{name}" for name in attention), "re:.*conv1d"]
    config["quantization_config"] = _compressed("nvfp4-pack-quantized", weights, inputs, ignore=ignore)
    return Layout(config, lambda name: None if name in ("lm_head", "embeddings", *attention) else nvfp4_packed)


def compressed_fp8_dynamic() -> Layout:
    config = _nano_9b_v2()
    weights = {"num_bits": 8, "type": "float", "strategy": "channel", "dynamic": False}
    inputs = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
    config["quantization_config"] = _compressed("float-quantized", weights, inputs, ignore=["lm_head", "re:.*conv1d"])
    quantiser = functools.partial(fp8_channel, column=True, scale_dtype=torch.bfloat16)
    return Layout(config, lambda name: None if name in ("lm_head", "embeddings") else quantiser)


def compressed_fp8_block() -> Layout:
    config = small_config("ME*EM", hidden_size=256, moe_latent_size=192)
    weights = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128], "dynamic": False}
    inputs = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 128, "dynamic": True}
    config["quantization_config"] = _compressed("float-quantized", weights, inputs, ignore=["lm_head", "re:.*gate"])
    return Layout(config, lambda name: None if name in ("lm_head", "embeddings") else fp8_block)


def block_scale_inv() -> Layout:
    config = small_config("M-*-", hidden_size=256)
    config["quantization_config"] = {
        "activation_scheme": "dynamic",
        "modules_to_not_convert": ["lm_head"],
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    }
    quantiser = functools.partial(fp8_block, suffix="weight_scale_inv")
    return Layout(config, lambda name: None if name in ("lm_head", "embeddings") else quantiser)


def modelopt_fp8_block() -> Layout:
    quant = _modelopt("FP8_PB_WO", version="0.40.0", kv_cache_quant_algo=None, exclude_modules=["lm_head", "*conv1d*"])
    quantiser = functools.partial(fp8_block, four=True)
    return Layout(
        small_config("M-*-", hidden_size=256),
        lambda name: None if name in ("lm_head", "embeddings") else quantiser,
        quant,
    )


def modelopt_fp8_channel() -> Layout:
    quant = _modelopt(
        "FP8_PER_CHANNEL_PER_TOKEN", version="0.40.0", kv_cache_quant_algo=None, exclude_modules=["lm_head"]
    )
    return Layout(small_config("M-*-"), lambda name: None if name in ("lm_head", "embeddings") else fp8_channel, quant)


def resaved_bf16() -> Layout:
    """As transformers ≥ 5.13 holds a model in memory, and as some tools write it: other prefix, stacked experts."""
    config = small_config(
        "ME-*",
        hybrid_override_pattern=None,
        torch_dtype=None,
        dtype="bfloat16",
        layers_block_type=["linear_attention", "moe", "mlp", "full_attention"],
        mtp_layers_block_type=["full_attention", "moe"],
        num_nextn_predict_layers=0,
        time_step_limit=[0.0, {"__float__": "Infinity"}],
        transformers_version="5.24.0",
    )
    return Layout(config, prefix="model.", stacked=True)


def omni_nvfp4() -> Layout:
    inner = nano_30b_nvfp4()
    inner.config |= {"attention_head_dim": inner.config.pop("head_dim")}
    inner.prefix, inner.head_prefix = "language_model.backbone.", "language_model."
    inner.quant_file["quantization"]["exclude_modules"] = [
        *(f"language_model.{name}" for name in inner.quant_file["quantization"]["exclude_modules"]),
        *("vision_model*", "mlp1*", "sound_encoder*", "sound_projection*"),
    ]
    inner.wrapper = {
        "architectures": ["NemotronH_Nano_Omni_Reasoning_V3"],
        "model_type": "NemotronH_Nano_Omni_Reasoning_V3",
        "torch_dtype": "bfloat16",
        "vision_config": {"model_type": "radio"},
        "sound_config": {"model_type": "parakeet"},
    }
    inner.extra = {
        "vision_model.radio_model.model.blocks.0.attn.qkv.weight": torch.ones(24, 8).bfloat16(),
        "vision_model.radio_model.input_conditioner.norm_mean": torch.zeros(3, 1, 1),
        "mlp1.0.weight": torch.ones(16).bfloat16(),
        "mlp1.1.weight": torch.ones(8, 16).bfloat16(),
        "sound_encoder.encoder.layers.0.conv.pointwise_conv1.weight": torch.ones(8, 8, 1).bfloat16(),
        "sound_projection.linear1.weight": torch.ones(8, 8).bfloat16(),
    }
    return inner


MAKERS: tuple[Callable[[], Layout], ...] = (
    h_8b_bf16,
    nano_4b_bf16,
    nano_4b_fp8,
    nano_9b_v2_bf16,
    nano_9b_v2_nvfp4,
    nano_30b_bf16,
    nano_30b_nvfp4,
    lightning_nvfp4,
    super_nvfp4,
    ultra_bf16,
    puzzle_bf16,
    compressed_nvfp4,
    compressed_fp8_dynamic,
    compressed_fp8_block,
    block_scale_inv,
    modelopt_fp8_block,
    modelopt_fp8_channel,
    resaved_bf16,
    omni_nvfp4,
)
LAYOUTS: tuple[str, ...] = tuple(maker.__name__ for maker in MAKERS)
