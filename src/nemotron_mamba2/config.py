"""What the model is, read from config.json, and what we want of it (`Policy`).

Every layer has a config of its own, because Puzzle checkpoints change widths from layer to layer; fields keep
the checkpoint's names. Published files spell the same fact in many ways (`checkpoints.md` of the project lists
them): all spellings are read here, once, and what contradicts itself is a `ConfigError` that names both keys.
This is the only module that reads the process environment.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch

from .errors import ConfigError


@dataclass(frozen=True)
class Mamba2Config:
    """Shape and numerics of one Mamba-2 layer (`M`)."""

    hidden_size: int
    mamba_num_heads: int
    mamba_head_dim: int
    n_groups: int
    ssm_state_size: int
    conv_kernel: int = 4
    chunk_size: int = 128
    layer_norm_epsilon: float = 1e-5
    time_step_limit: tuple[float, float] | None = None  # None: dt is not clamped

    @property
    def d_inner(self) -> int:
        """Width of x, z and y: heads × head dim (`expand` in the files is never used)."""
        return self.mamba_num_heads * self.mamba_head_dim

    @property
    def conv_dim(self) -> int:
        """Channels of the convolution: x, B and C side by side."""
        return self.d_inner + 2 * self.n_groups * self.ssm_state_size

    @property
    def in_proj_rows(self) -> int:
        """Output rows of in_proj: z, x, B, C, dt."""
        return self.d_inner + self.conv_dim + self.mamba_num_heads


@dataclass(frozen=True)
class AttentionConfig:
    """Shape of one attention layer (`*`): grouped queries, causal, no positional encoding, no bias."""

    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    layer_norm_epsilon: float = 1e-5


@dataclass(frozen=True)
class MlpConfig:
    """Shape of one MLP layer (`-`): down(relu(up(x))²)."""

    hidden_size: int
    intermediate_size: int
    layer_norm_epsilon: float = 1e-5


@dataclass(frozen=True)
class MoeConfig:
    """Shape of one mixture-of-experts layer (`E`)."""

    hidden_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    moe_shared_expert_intermediate_size: int  # 0: no shared expert
    moe_latent_size: int | None = None  # None: experts read the hidden width itself
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    n_group: int = 1
    topk_group: int = 1
    layer_norm_epsilon: float = 1e-5

    @property
    def expert_input_size(self) -> int:
        """Width that the routed experts read and write."""
        return self.moe_latent_size or self.hidden_size


LayerConfig: TypeAlias = Mamba2Config | AttentionConfig | MlpConfig | MoeConfig
LETTERS: dict[type, str] = {Mamba2Config: "M", AttentionConfig: "*", MlpConfig: "-", MoeConfig: "E"}


@dataclass(frozen=True)
class ModelConfig:
    """A whole Nemotron-H language model."""

    hidden_size: int
    vocab_size: int
    layers: tuple[LayerConfig, ...]
    mtp_layers: tuple[LayerConfig, ...] = ()  # empty: no multi-token-prediction head
    layer_norm_epsilon: float = 1e-5
    dtype: torch.dtype = torch.bfloat16
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 8192
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    state_dtype: torch.dtype = torch.float32  # mamba_ssm_cache_dtype; fp32 when the file is silent

    @property
    def pattern(self) -> str:
        """The layer plan, one letter per layer."""
        return "".join(LETTERS[type(layer)] for layer in self.layers)

    @property
    def mamba2(self) -> Mamba2Config:
        """The config that all Mamba-2 layers share.

        Raises: ConfigError when there is none, or when two differ (one state pool serves one shape).
        """
        shapes = {layer for layer in self.layers if isinstance(layer, Mamba2Config)}
        if len(shapes) != 1:
            raise ConfigError(f"expected one Mamba-2 shape in layers {self.pattern!r}, found {len(shapes)}")
        return shapes.pop()


Activation: TypeAlias = Literal["checkpoint", "exact", "fp8"]


@dataclass(frozen=True)
class Policy:
    """What may differ from the checkpoint. The default changes nothing.

    prompt, step: activation handling per role. "checkpoint": as the checkpoint was quantised, where the device
        has the units for it (static FP8 and per-channel FP8 quantise the activations of prompt rows; all else and
        all step rows keep bf16 activations). "exact": bf16 activations everywhere. "fp8" (prompt only): prompt
        rows run NVFP4 weights from an FP8 copy made once at load.
    kv: "bf16" (the activation dtype), or "checkpoint": FP8 with the file's k/v scales.
    state_dtype: dtype of the SSM state; None: what the checkpoint says.
    reproducible: a row's bits depend on nothing but its own sequence, also on the CPU and for prompt rows.
    memory_bytes: what weights and their copies may take; None: what the device has free.
    """

    prompt: Activation = "checkpoint"
    step: Literal["checkpoint", "exact"] = "checkpoint"
    kv: Literal["bf16", "checkpoint"] = "bf16"
    state_dtype: torch.dtype | None = None
    reproducible: bool = False
    memory_bytes: int | None = None
