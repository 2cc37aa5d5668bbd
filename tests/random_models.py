"""Configs and random weights of small models, in plain torch and without the package."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

WORDS = {"mamba": "M", "attention": "*", "mlp": "-", "moe": "E", "linear_attention": "M", "full_attention": "*"}
VOCAB = 512


# configs ----------------------------------------------------------------------------------------------------------


def small_config(pattern: str = "M-M*", **changes: Any) -> dict[str, Any]:
    """The config.json of a small model with this plan; a change to None removes the key."""
    config: dict[str, Any] = {
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "chunk_size": 128,
        "conv_kernel": 4,
        "eos_token_id": 2,
        "expand": 2,
        "head_dim": 32,
        "hidden_dropout": 0.0,
        "hidden_size": 128,
        "hybrid_override_pattern": pattern,
        "initializer_range": 0.02,
        "intermediate_size": 192,
        "layer_norm_epsilon": 1e-05,
        "mamba_head_dim": 64,
        "mamba_hidden_act": "silu",
        "mamba_num_heads": 4,
        "mamba_proj_bias": False,
        "max_position_embeddings": 8192,
        "mlp_bias": False,
        "mlp_hidden_act": "relu2",
        "n_groups": 2,
        "num_attention_heads": 4,
        "num_hidden_layers": len(pattern),
        "num_key_value_heads": 2,
        "num_logits_to_keep": 1,
        "pad_token_id": 0,
        "rescale_prenorm_residual": True,
        "residual_in_fp32": False,
        "ssm_state_size": 128,
        "tie_word_embeddings": False,
        "time_step_floor": 0.0001,
        "time_step_max": 0.1,
        "time_step_min": 0.001,
        "torch_dtype": "bfloat16",
        "use_bias": False,
        "use_cache": True,
        "use_conv_bias": True,
        "use_mamba_kernels": True,
        "vocab_size": VOCAB,
    }
    if "E" in pattern:
        config |= {
            "moe_intermediate_size": 64,
            "moe_shared_expert_intermediate_size": 96,
            "n_group": 1,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "num_experts_per_tok": 2,
            "routed_scaling_factor": 2.5,
            "topk_group": 1,
        }
    config |= changes
    return {key: value for key, value in config.items() if value is not None}


def letters(config: Mapping[str, Any], *, mtp: bool = False) -> str:
    """The layer plan of a config, or that of its MTP head."""
    names = ("mtp_hybrid_override_pattern", "mtp_layers_block_type", "mtp_block_configs")
    if not mtp:
        names = ("hybrid_override_pattern", "layers_block_type", "block_configs")
    elif not config.get("num_nextn_predict_layers", 0):
        return ""
    plan = next(config[name] for name in names if name in config)
    words = [entry["block_type"] if isinstance(entry, dict) else entry for entry in plan]
    return "".join(WORDS.get(word, word) for word in words)


def _block(config: Mapping[str, Any], index: int, *, mtp: bool) -> dict[str, Any]:
    """The config as one layer sees it."""
    blocks = config.get("mtp_block_configs" if mtp else "block_configs")
    return {**config, **(blocks[index] if blocks else {})}


# random weights ---------------------------------------------------------------------------------------------------


class Draw:
    """Random tensors of the kinds that a model has, all from one seed."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, std: float = 0.05, mean: float = 0.0) -> Tensor:
        return torch.randn(shape, generator=self.generator) * std + mean

    def uniform(self, low: float, high: float, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator) * (high - low) + low


class Shapes(Draw):
    """Tensors without data, where only names and shapes are wanted."""

    def __init__(self) -> None:
        pass

    def normal(self, *shape: int, std: float = 0.05, mean: float = 0.0) -> Tensor:
        return torch.empty(shape, device="meta")

    def uniform(self, low: float, high: float, *shape: int) -> Tensor:
        return torch.empty(shape, device="meta")


def random_tensors(config: Mapping[str, Any], *, seed: int = 0) -> dict[str, Tensor]:
    """float32 tensors of a model by name without prefix, experts one by one."""
    return _tensors(config, Draw(seed))


def tensor_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The shapes of `random_tensors`."""
    return {name: tuple(tensor.shape) for name, tensor in _tensors(config, Shapes()).items()}


def _tensors(config: Mapping[str, Any], draw: Draw) -> dict[str, Tensor]:
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    tensors = {"embeddings.weight": draw.normal(vocab, hidden)}
    for index, letter in enumerate(letters(config)):
        tensors |= _layer(f"layers.{index}", letter, _block(config, index, mtp=False), draw=draw)
    tensors["norm_f.weight"] = draw.normal(hidden, mean=1.0)
    if not config.get("tie_word_embeddings"):
        tensors["lm_head.weight"] = draw.normal(vocab, hidden)
    head = letters(config, mtp=True)
    for index, letter in enumerate(head):
        tensors |= _layer(f"mtp.layers.{index}", letter, _block(config, index, mtp=True), draw=draw)
    if head:
        tensors["mtp.layers.0.eh_proj.weight"] = draw.normal(hidden, 2 * hidden)
        for name in ("layers.0.enorm", "layers.0.hnorm", f"layers.{len(head) - 1}.final_layernorm"):
            tensors[f"mtp.{name}.weight"] = draw.normal(hidden, mean=1.0)
    return tensors


def _layer(prefix: str, letter: str, config: Mapping[str, Any], *, draw: Draw) -> dict[str, Tensor]:
    hidden = config["hidden_size"]
    mixer = {"M": _mamba, "*": _attention, "-": _mlp, "E": _moe}[letter](config, draw)
    return {
        f"{prefix}.norm.weight": draw.normal(hidden, mean=1.0),
        **{f"{prefix}.mixer.{name}": value for name, value in mixer.items()},
    }


def _mamba(config: Mapping[str, Any], draw: Draw) -> dict[str, Tensor]:
    hidden, heads, width = config["hidden_size"], config["mamba_num_heads"], config["conv_kernel"]
    inner = heads * config["mamba_head_dim"]
    channels = inner + 2 * config["n_groups"] * config["ssm_state_size"]
    dt = torch.exp(draw.uniform(math.log(0.001), math.log(0.1), heads))
    tensors = {
        "in_proj.weight": draw.normal(inner + channels + heads, hidden),
        "conv1d.weight": draw.uniform(-0.5, 0.5, channels, 1, width),
        "conv1d.bias": draw.normal(channels),
        "dt_bias": dt + torch.log(-torch.expm1(-dt)),  # softplus of this is dt
        "A_log": torch.log(draw.uniform(1.0, 16.0, heads)),
        "D": draw.normal(heads, mean=1.0),
        "norm.weight": draw.normal(inner, mean=1.0),
        "out_proj.weight": draw.normal(hidden, inner),
    }
    if not config.get("use_conv_bias", True):
        del tensors["conv1d.bias"]
    return tensors


def _attention(config: Mapping[str, Any], draw: Draw) -> dict[str, Tensor]:
    hidden, width = config["hidden_size"], config.get("head_dim", config.get("attention_head_dim"))
    queries, keys = config["num_attention_heads"] * width, config["num_key_value_heads"] * width
    return {
        "q_proj.weight": draw.normal(queries, hidden),
        "k_proj.weight": draw.normal(keys, hidden),
        "v_proj.weight": draw.normal(keys, hidden),
        "o_proj.weight": draw.normal(hidden, queries),
    }


def _mlp(config: Mapping[str, Any], draw: Draw) -> dict[str, Tensor]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    return {"up_proj.weight": draw.normal(inner, hidden), "down_proj.weight": draw.normal(hidden, inner)}


def _moe(config: Mapping[str, Any], draw: Draw) -> dict[str, Tensor]:
    hidden, experts, latent = config["hidden_size"], config["n_routed_experts"], config.get("moe_latent_size")
    inner, shared = config["moe_intermediate_size"], config["moe_shared_expert_intermediate_size"]
    tensors = {
        "gate.weight": draw.normal(experts, hidden),
        "gate.e_score_correction_bias": draw.normal(experts, mean=config.get("_bias_mean", 0.0)),
    }
    for expert in range(experts):
        tensors[f"experts.{expert}.up_proj.weight"] = draw.normal(inner, latent or hidden)
        tensors[f"experts.{expert}.down_proj.weight"] = draw.normal(latent or hidden, inner)
    if config.get("n_shared_experts", 1):
        tensors["shared_experts.up_proj.weight"] = draw.normal(shared, hidden)
        tensors["shared_experts.down_proj.weight"] = draw.normal(hidden, shared)
    if latent:
        tensors["fc1_latent_proj.weight"] = draw.normal(latent, hidden)
        tensors["fc2_latent_proj.weight"] = draw.normal(hidden, latent)
    return tensors
