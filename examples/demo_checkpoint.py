"""The demo model as a checkpoint directory, and back.

Tensors have the names, dtypes and shapes of the published Nemotron-3 files: bf16, with the router's weight
and its correction bias in float32 and one tensor for each expert. Shards are cut by a size limit and listed
in an index. Reading a checkpoint back gives the rounded weights, so what is evaluated is what ships.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from demo_model import DemoConfig, DemoModel
from demo_tokenizer import BEGIN, END, TURN_END, UNKNOWN
from safetensors.torch import load_file, save_file
from torch import Tensor

SHARD_BYTES = 8 * 2**20
INDEX = "model.safetensors.index.json"
FLOAT32 = ("gate.weight", "e_score_correction_bias")


def config_json(config: DemoConfig) -> dict[str, Any]:
    """What config.json says: the keys of the published Nemotron-3 files."""
    return {
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        "dtype": "bfloat16",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": BEGIN,
        "chunk_size": config.chunk_size,
        "conv_kernel": config.conv_kernel,
        "eos_token_id": END,
        "expand": config.mamba_width // config.hidden_size,
        "head_dim": config.head_dim,
        "hidden_dropout": 0.0,
        "hidden_size": config.hidden_size,
        "hybrid_override_pattern": config.hybrid_override_pattern,
        "initializer_range": 0.02,
        "intermediate_size": config.intermediate_size,
        "layer_norm_epsilon": config.layer_norm_epsilon,
        "mamba_head_dim": config.mamba_head_dim,
        "mamba_hidden_act": "silu",
        "mamba_num_heads": config.mamba_num_heads,
        "mamba_proj_bias": False,
        "mamba_ssm_cache_dtype": "float32",
        "max_position_embeddings": config.max_position_embeddings,
        "mlp_bias": False,
        "mlp_hidden_act": "relu2",
        "moe_intermediate_size": config.moe_intermediate_size,
        "moe_latent_size": None,
        "moe_shared_expert_intermediate_size": config.moe_shared_expert_intermediate_size,
        "moe_shared_expert_overlap": False,
        "mtp_hybrid_override_pattern": "*E",
        "n_group": 1,
        "n_groups": config.n_groups,
        "n_routed_experts": config.n_routed_experts,
        "n_shared_experts": 1,
        "norm_eps": config.layer_norm_epsilon,
        "norm_topk_prob": True,
        "num_attention_heads": config.num_attention_heads,
        "num_experts_per_tok": config.num_experts_per_tok,
        "num_hidden_layers": len(config.hybrid_override_pattern),
        "num_key_value_heads": config.num_key_value_heads,
        "num_logits_to_keep": 1,
        "num_nextn_predict_layers": 1,
        "pad_token_id": UNKNOWN,
        "partial_rotary_factor": 1.0,
        "rescale_prenorm_residual": True,
        "residual_in_fp32": False,
        "rope_theta": 10000,
        "routed_scaling_factor": config.routed_scaling_factor,
        "sliding_window": None,
        "ssm_state_size": config.ssm_state_size,
        "tie_word_embeddings": False,
        "time_step_floor": 0.0001,
        "time_step_max": 0.1,
        "time_step_min": 0.001,
        "topk_group": 1,
        "use_bias": False,
        "use_cache": True,
        "use_conv_bias": True,
        "use_mamba_kernels": True,
        "vocab_size": config.vocab_size,
    }


def checkpoint_tensors(model: DemoModel) -> dict[str, Tensor]:
    """Every tensor under its name in the files, on the CPU and in the dtype of the files."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        tensor = tensor.detach().cpu().to(torch.float32 if name.endswith(FLOAT32) else torch.bfloat16)
        stem, _, kind = name.rpartition(".experts.")
        if stem:
            tensors |= {f"{stem}.experts.{e}.{kind}.weight": t.clone() for e, t in enumerate(tensor)}
        else:
            tensors[name] = tensor.contiguous()
    return tensors


def save_checkpoint(model: DemoModel, folder: str | Path, *, shard_bytes: int = SHARD_BYTES) -> None:
    """Write config.json, generation_config.json, the shards and their index."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    generation = {"bos_token_id": BEGIN, "eos_token_id": [END, TURN_END], "pad_token_id": UNKNOWN, "do_sample": False}
    _write_json(folder / "config.json", config_json(model.config))
    _write_json(folder / "generation_config.json", generation)
    tensors = checkpoint_tensors(model)
    shards = _cut(tensors, shard_bytes)
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file({name: tensors[name] for name in names}, folder / file, metadata={"format": "pt"})
        (folder / file).chmod(0o644)  # it is written for its owner alone
        weight_map |= dict.fromkeys(names, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def load_checkpoint(folder: str | Path) -> DemoModel:
    """The model of a directory that `save_checkpoint` wrote, with its rounded weights, in float32."""
    folder = Path(folder)
    written = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    model = DemoModel(DemoConfig(**{name: written[name] for name in DemoConfig.__dataclass_fields__}))
    tensors: dict[str, Tensor] = {}
    for file in sorted(set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values())):
        tensors |= load_file(folder / file)
    state = {}
    for name in model.state_dict():
        stem, _, kind = name.rpartition(".experts.")
        if stem:
            experts = [tensors[f"{stem}.experts.{e}.{kind}.weight"] for e in range(model.config.n_routed_experts)]
            state[name] = torch.stack(experts)
        else:
            state[name] = tensors[name]
    model.load_state_dict(state)
    return model


def _cut(tensors: dict[str, Tensor], shard_bytes: int) -> list[list[str]]:
    """Names of each shard, in order: at least two shards, of about the same size."""
    total = sum(tensor.nbytes for tensor in tensors.values())
    shards: list[list[str]] = [[] for _ in range(max(2, -(-total // shard_bytes)))]
    used = 0
    for name, tensor in tensors.items():
        shards[used * len(shards) // total].append(name)
        used += tensor.nbytes
    return shards


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
