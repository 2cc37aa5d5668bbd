"""What the model is, read from config.json, and what we want of it (`Policy`).

Every layer has a config of its own, because Puzzle checkpoints change widths from layer to layer; fields keep
the checkpoint's names. Published files spell the same fact in many ways: all spellings are read here, once, and
what contradicts itself is a `ConfigError` that names both keys. A number that only the files can know (widths,
counts) has no default; what would compute something else than we do (biases, other activations) is refused.
This is the only module that reads the process environment (`cache_dir`).

Sources: the published config.json files, and the config classes of transformers and vLLM.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import torch

from .errors import ConfigError
from .spellings import Keys, dtype_of, language_model, plan, read_json, time_step_limit, token_id, token_ids


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
    use_conv_bias: bool = True

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

    @classmethod
    def from_checkpoint(cls, path: str | Path) -> ModelConfig:
        """Read config.json, and generation_config.json beside it when there is one.

        path: a checkpoint directory, or a config.json.
        Raises: ConfigError when a file cannot be read, contradicts itself, or describes nothing that we run.
        """
        file = Path(path).expanduser()
        file = file / "config.json" if file.is_dir() else file
        generation = file.with_name("generation_config.json")
        return cls.from_dict(read_json(file), read_json(generation) if generation.exists() else None)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
        """Read the contents of a config.json; generation: those of generation_config.json, whose token ids win.

        Raises: ConfigError naming the key, what was expected and what was found.
        """
        model, shared = language_model(raw)
        _refuse_what_we_do_not_compute(model)
        layers = _layers(model, "hybrid_override_pattern", "layers_block_type", "layer_types", "block_configs")
        count = model.raw.get("num_hidden_layers", len(layers))
        if count != len(layers):
            warnings.warn(
                f"config.json: num_hidden_layers is {count!r}, but the layer plan has {len(layers)}; the plan is used",
                stacklevel=2,
            )
        tokens = shared.over(generation or {}, "generation_config.json")
        return cls(
            hidden_size=model.integer("hidden_size"),
            vocab_size=model.integer("vocab_size"),
            layers=layers,
            mtp_layers=_mtp_layers(model),
            layer_norm_epsilon=model.number("layer_norm_epsilon", cls.layer_norm_epsilon),
            dtype=dtype_of(shared, "dtype", torch.bfloat16),
            tie_word_embeddings=shared.flag("tie_word_embeddings", False),
            max_position_embeddings=model.integer("max_position_embeddings", cls.max_position_embeddings),
            bos_token_id=token_id(tokens, "bos_token_id"),
            eos_token_ids=token_ids(tokens, "eos_token_id"),
            pad_token_id=token_id(tokens, "pad_token_id"),
            state_dtype=dtype_of(model, "mamba_ssm_cache_dtype", torch.float32),
        )

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

    def __post_init__(self) -> None:
        for name, allowed in (
            ("prompt", get_args(Activation)),
            ("step", ("checkpoint", "exact")),
            ("kv", ("bf16", "checkpoint")),
            ("state_dtype", (None, torch.float32, torch.bfloat16, torch.float16)),
            ("reproducible", (True, False)),
        ):
            value = getattr(self, name)
            if not any(value is choice or (isinstance(value, str) and value == choice) for choice in allowed):
                raise ConfigError(f"Policy.{name}: expected {_choices(allowed)}, found {value!r}")
        if self.memory_bytes is not None and (type(self.memory_bytes) is not int or self.memory_bytes <= 0):
            raise ConfigError(f"Policy.memory_bytes: expected None or bytes above 0, found {self.memory_bytes!r}")


def _choices(values: tuple[Any, ...]) -> str:
    return " or ".join(str(value) if isinstance(value, torch.dtype) else repr(value) for value in values)


# reading ----------------------------------------------------------------------------------------------------------


def _refuse_what_we_do_not_compute(model: Keys) -> None:
    for key in ("use_bias", "mlp_bias", "attention_bias", "mamba_proj_bias"):
        if model.flag(key, False):
            raise model.refuse(key, "false (no projection of this family has a bias)", True)
    for key, names in (("mlp_hidden_act", ("relu2",)), ("mamba_hidden_act", ("silu", "swish"))):
        if (found := model.raw.get(key, names[0])) not in names:
            raise model.refuse(key, " or ".join(names), found)
    # With fp32 activations the residual stream is fp32 anyway.
    if model.flag("residual_in_fp32", False) and dtype_of(model, "dtype", torch.bfloat16) != torch.float32:
        raise model.refuse("residual_in_fp32", "false (the residual stream has the activation dtype)", True)


def _layers(model: Keys, *keys: str) -> tuple[LayerConfig, ...]:
    """One config per layer of the plan that these keys give, the last of them by blocks with widths of their own."""
    letters = plan(model, *keys)
    if not letters:
        raise ConfigError(f"{model.where}: the layer plan is missing; expected one of {', '.join(keys)}")
    blocks = model.raw.get(keys[-1])
    mlp_widths = _mlp_widths(model, letters.count("-"))
    layers: list[LayerConfig] = []
    for index, letter in enumerate(letters):
        own = model if blocks is None else model.over(blocks[index], f"{model.where}: {keys[-1]}[{index}]")
        if letter == "-" and mlp_widths and not (blocks and "intermediate_size" in blocks[index]):
            own = own.over({"intermediate_size": mlp_widths[letters[:index].count("-")]}, own.where)
        layer = _READERS[letter](own)
        if layer.hidden_size != (hidden := model.integer("hidden_size")):
            raise own.refuse("hidden_size", f"the model's {hidden}", layer.hidden_size)
        layers.append(layer)
    return tuple(layers)


def _mlp_widths(model: Keys, count: int) -> list[int]:
    """A width per MLP layer where intermediate_size is a list (one entry serves all), else nothing."""
    widths = model.raw.get("intermediate_size")
    if not isinstance(widths, list):
        return []
    if len(widths) not in (1, count):
        raise model.refuse("intermediate_size", f"one width, or one for each of {count} MLP layers", widths)
    return widths * count if len(widths) == 1 else widths


def _mtp_layers(model: Keys) -> tuple[LayerConfig, ...]:
    keys = ("mtp_hybrid_override_pattern", "mtp_layers_block_type", "mtp_block_configs")
    has_plan = any(key in model.raw for key in keys)
    count = model.integer("num_nextn_predict_layers", int(has_plan), least=0)
    if count > 1:
        raise model.refuse("num_nextn_predict_layers", "0 or 1", count)
    if count == 0:  # transformers writes a plan even then
        return ()
    # Every published head is attention, then MoE; a file that counts one head but draws no plan means that.
    return _layers(model if has_plan else model.over({keys[0]: "*E"}, model.where), *keys)


def _mamba2(keys: Keys) -> Mamba2Config:
    heads, groups = keys.integer("mamba_num_heads"), keys.integer("n_groups")
    _divides(keys, "n_groups", groups, "mamba_num_heads", heads)
    limit = keys.raw.get("time_step_limit")
    return Mamba2Config(
        hidden_size=keys.integer("hidden_size"),
        mamba_num_heads=heads,
        mamba_head_dim=keys.integer("mamba_head_dim"),
        n_groups=groups,
        ssm_state_size=keys.integer("ssm_state_size"),
        conv_kernel=keys.integer("conv_kernel", Mamba2Config.conv_kernel, least=2),
        chunk_size=keys.integer("chunk_size", Mamba2Config.chunk_size),
        layer_norm_epsilon=keys.number("layer_norm_epsilon", Mamba2Config.layer_norm_epsilon),
        time_step_limit=None if limit is None else time_step_limit(limit),
        use_conv_bias=keys.flag("use_conv_bias", True),
    )


def _attention(keys: Keys) -> AttentionConfig:
    heads = keys.integer("num_attention_heads")
    kv_heads = keys.integer("num_key_value_heads")
    _divides(keys, "num_key_value_heads", kv_heads, "num_attention_heads", heads)
    return AttentionConfig(
        hidden_size=keys.integer("hidden_size"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        # hidden_size / heads is wrong for most of the family; 128 is right for all of it.
        head_dim=keys.integer("head_dim", 128),
        layer_norm_epsilon=keys.number("layer_norm_epsilon", AttentionConfig.layer_norm_epsilon),
    )


def _mlp(keys: Keys) -> MlpConfig:
    return MlpConfig(
        hidden_size=keys.integer("hidden_size"),
        intermediate_size=keys.integer("intermediate_size"),
        layer_norm_epsilon=keys.number("layer_norm_epsilon", MlpConfig.layer_norm_epsilon),
    )


def _moe(keys: Keys) -> MoeConfig:
    experts, chosen = keys.integer("n_routed_experts"), keys.integer("num_experts_per_tok")
    groups, top_groups = keys.integer("n_group", 1), keys.integer("topk_group", 1)
    _divides(keys, "n_group", groups, "n_routed_experts", experts)
    if top_groups > groups:
        raise keys.refuse("topk_group", f"at most n_group ({groups})", top_groups)
    if chosen > experts // groups * top_groups:
        raise keys.refuse("num_experts_per_tok", f"at most the {experts // groups * top_groups} to choose from", chosen)
    shared = keys.integer("n_shared_experts", 1, least=0)
    if shared > 1:  # vLLM multiplies the width by this count, transformers does not
        raise keys.refuse("n_shared_experts", "0 or 1", shared)
    return MoeConfig(
        hidden_size=keys.integer("hidden_size"),
        n_routed_experts=experts,
        num_experts_per_tok=chosen,
        moe_intermediate_size=keys.integer("moe_intermediate_size"),
        moe_shared_expert_intermediate_size=keys.integer("moe_shared_expert_intermediate_size") if shared else 0,
        moe_latent_size=keys.integer("moe_latent_size") if "moe_latent_size" in keys.raw else None,
        norm_topk_prob=keys.flag("norm_topk_prob", True),
        routed_scaling_factor=keys.number("routed_scaling_factor", MoeConfig.routed_scaling_factor),
        n_group=groups,
        topk_group=top_groups,
        layer_norm_epsilon=keys.number("layer_norm_epsilon", MoeConfig.layer_norm_epsilon),
    )


def _divides(keys: Keys, small_key: str, small: int, large_key: str, large: int) -> None:
    if large % small:
        raise ConfigError(f"{keys.where}: {small_key} ({small}) does not divide {large_key} ({large})")


_READERS: dict[str, Callable[[Keys], LayerConfig]] = {"M": _mamba2, "*": _attention, "-": _mlp, "E": _moe}


def cache_dir() -> Path:
    """Where compiled kernels are kept: $NEMOTRON_MAMBA2_CACHE, else a folder in the user's cache directory."""
    chosen = os.environ.get("NEMOTRON_MAMBA2_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nemotron-mamba2"
