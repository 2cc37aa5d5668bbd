"""Small random Nemotron-H models of transformers, quiet and with the clamp of the original lifted."""

from __future__ import annotations

import copy
import inspect
import math
import warnings

import torch
import transformers
from torch import Tensor, nn

WORDS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe", "L": "moe"}
VOCAB = 200
_FORWARD = inspect.signature(transformers.NemotronHForCausalLM.forward).parameters
CACHE = "cache" if "cache" in _FORWARD else "past_key_values"  # renamed on the way from 5.16 to 5.24


def quiet() -> None:
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def small_config(pattern: str, **changes) -> transformers.NemotronHConfig:
    facts = {
        "layers_block_type": [WORDS[letter] for letter in pattern],
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 96,
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "ssm_state_size": 16,
        "chunk_size": 32,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
        "moe_shared_expert_intermediate_size": 32,
        "moe_latent_size": 32 if "L" in pattern else None,
        "routed_scaling_factor": 2.5,
        "max_position_embeddings": 512,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    return transformers.NemotronHConfig(**{**facts, **changes})


def random_model(pattern: str = "M-M*", *, seed: int = 0, dtype: torch.dtype = torch.float32, **changes) -> nn.Module:
    """A model whose every part matters: unit-size activations, decays from slow to fast, distinct norms."""
    quiet()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = transformers.NemotronHForCausalLM(small_config(pattern, **changes)).eval()
    draw = torch.Generator().manual_seed(seed + 17)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        tensor.data.copy_(_values(name, tensor, draw))
    return lift_clamp(model.to(dtype))


def lift_clamp(model: nn.Module) -> nn.Module:
    """Let the original mixers use the limit of every published config, none."""
    for layer in model.model.layers:
        if hasattr(layer.mixer, "time_step_limit"):
            layer.mixer.time_step_limit = (0.0, math.inf)
    return model


def twins(pattern: str = "M-M*", **how) -> tuple[nn.Module, nn.Module]:
    """Two equal models: one to stay as it is, one to accelerate."""
    model = random_model(pattern, **how)
    return model, copy.deepcopy(model)


def tokens(batch: int, length: int, *, seed: int = 0) -> Tensor:
    return torch.randint(1, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed + 100 * length))


def cache_for(model: nn.Module) -> transformers.DynamicCache:
    return transformers.DynamicCache(config=model.config)


@torch.no_grad()
def logits(model: nn.Module, ids: Tensor, cache=None, **how) -> Tensor:
    """fp32 [B, L, vocab]."""
    return model(ids, use_cache=cache is not None, **({CACHE: cache} if cache is not None else {}), **how).logits


def _values(name: str, tensor: Tensor, draw: torch.Generator) -> Tensor:
    noise = torch.randn(tensor.shape, generator=draw)
    if name.endswith("A_log"):
        return torch.log(1 + 15 * torch.rand(tensor.shape, generator=draw))
    if name.endswith("dt_bias"):
        return noise - 2
    if "norm" in name:
        return 1 + 0.1 * noise
    if "conv1d" in name:
        return 0.5 * noise
    if name.endswith("e_score_correction_bias"):
        return 0.1 * noise
    return noise / math.sqrt(tensor.shape[-1]) if tensor.dim() >= 2 and "embeddings" not in name else noise
