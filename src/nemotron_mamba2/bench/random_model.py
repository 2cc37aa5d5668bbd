"""Whole models of the published sizes with random weights, made in device memory in the layout of a published file.

Which projection has which format follows NVIDIA's files where they are known: Nano-30B and Super-120B NVFP4, the
Lightning file (`mixed` of nano30b), the recipes for Nano-4B and for Super (`mixed`), the model card of 9B-v2. Where
none is known (FP8), the islands of the NVFP4 file stay BF16. Codes are drawn as codes, so nothing is quantised and
nothing but the weights themselves takes memory.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..config import AttentionConfig, LayerConfig, Mamba2Config, MlpConfig, ModelConfig, MoeConfig
from ..formats import E4M3, E4M3_MAX, NVFP4_BLOCK, Fp8Tensor, Nvfp4, Plain, Weight
from ..weights import AttentionWeights, LayerWeights, Mamba2Weights, MlpWeights, ModelWeights, MoeWeights
from .records import SHAPES

STD = 0.02
DRAWN_AT_ONCE = 1 << 26  # elements of a draw that is narrowed to codes
FP8_STD = 64.0  # of e4m3 codes
NVFP4_STD = 2.926 * 1.25  # of e2m1 codes drawn evenly, times the mean scale of a block

MODEL_FORMATS = ("nvfp4", "fp8", "bf16", "mixed")
_NANO = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
_SUPER = "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME"
_NANO_4B = "M-M-M-MM-M-M*-M-M*-M-M-M*-M-M-MM*-MMM-M-M-"
_9B = "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-"
# (layer plan, query and KV heads, MLP or mixture)
MODELS: dict[str, tuple[str, tuple[int, int], MlpConfig | MoeConfig]] = {
    "nano30b": (_NANO, (32, 2), MoeConfig(2688, 128, 6, 1856, 3712, routed_scaling_factor=2.5)),
    "super120b": (_SUPER, (32, 2), MoeConfig(4096, 512, 22, 2688, 5376, 1024, routed_scaling_factor=5.0)),
    "nano4b": (_NANO_4B, (40, 8), MlpConfig(3136, 12544)),
    "9b-v2": (_9B, (40, 8), MlpConfig(4480, 15680)),
}
VOCAB, CONTEXT = 131072, 262144
_ENDS = ("embeddings", "lm_head")
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_ROUTED = ("experts_up", "experts_down")
_LATENT = ("fc1_latent_proj", "fc2_latent_proj")
_MAMBA = ("in_proj", "out_proj")
_SUPER_IN = {0, 2, 4, 6, 9, 11, 13, 15, 18, 20, 27, 29, 31, 40, 49, 51, 53, 55, 57, 60, 62, 66, 68, 71, 73, 82, 84, 86}
_SUPER_OUT = {0, 2, 4, 9, 11, 13, 18, 38, 40, 42, 44, 49, 51, 53, 55, 57, 60, 62, 64, 66, 68, 71, 73, 75, 77, 80, 82}
_SUPER_FP8: dict[str, set[int]] = {
    "in_proj": _SUPER_IN,
    "out_proj": _SUPER_OUT | {84, 86},
    "shared_up": set(range(88)) - {41},
    "shared_down": set(range(88)) - {1, 8, 76},
    "fc1_latent_proj": {1, 3, 5},
    "fc2_latent_proj": {3},
    "o_proj": {69, 78},
}
_NANO_4B_FP8 = {1, 3, 5, 8, 10, 18, 25, 33, 41}


def model_config(shape: str) -> ModelConfig:
    """The config of one of MODELS."""
    pattern, (heads, kv_heads), other = MODELS[shape]
    mamba = SHAPES[shape]
    attention = AttentionConfig(mamba.hidden_size, heads, kv_heads, 128)
    kinds: dict[str, LayerConfig] = {"M": mamba, "*": attention, "-": other, "E": other}
    layers = tuple(kinds[letter] for letter in pattern)
    return ModelConfig(mamba.hidden_size, VOCAB, layers, max_position_embeddings=CONTEXT)


def format_of(shape: str, format: str, name: str, *, layer: int | None = None) -> str:
    """The weight format of a projection (a name of `weights`) in a published layout. layer: None at the ends."""
    if format == "bf16":
        return "bf16"
    pattern = MODELS[shape][0]
    if shape == "super120b" and format == "nvfp4":
        if name in _ROUTED or (layer, name) == (1, "shared_down"):
            return "nvfp4"
        return "fp8_tensor" if layer in _SUPER_FP8.get(name, ()) else "bf16"
    if shape == "nano4b" and format == "nvfp4":
        return "fp8_tensor" if name == "lm_head" or (name == "down_proj" and layer in _NANO_4B_FP8) else "nvfp4"
    if format == "mixed":
        if name in _MAMBA:
            return "fp8_tensor"
        if name.startswith("shared_"):
            return "fp8_tensor" if shape == "super120b" else "nvfp4"
        quantised = name in _ROUTED or name in ("up_proj", "down_proj") or (shape, name) == ("nano30b", "lm_head")
        return "nvfp4" if quantised else "bf16"
    before_attention = layer is not None and pattern[layer + 1 : layer + 2] == "*" and shape == "nano30b"
    if name in (*_ENDS, *_ATTENTION, *_LATENT) or (name in _MAMBA and before_attention):
        return "bf16"
    return "fp8_tensor" if format == "fp8" else "nvfp4"


def random_weights(
    shape: str, format: str, *, config: ModelConfig, device: torch.device | str, seed: int = 0
) -> ModelWeights:
    """Weights of one of MODELS, or of a smaller config with its layer plan, in the layout of a published file.

    device: "meta" makes none, to count bytes.
    """
    draw = _Draw(torch.device(device), seed)
    layers = []
    for index, layer in enumerate(config.layers):
        formats = {name: format_of(shape, format, name, layer=index) for name in (*_NAMES,)}
        layers.append(_layer(layer, draw, formats))
    ends = [
        draw.matrix(format_of(shape, format, name), config.vocab_size, config.hidden_size, std=std)
        for name, std in (("embeddings", 1.0), ("lm_head", STD))
    ]
    return ModelWeights(ends[0], tuple(layers), draw.norm(config.hidden_size), ends[1])


_NAMES = (*_MAMBA, *_ATTENTION, "up_proj", "down_proj", *_ROUTED, "shared_up", "shared_down", *_LATENT)


class _Draw:
    """Random tensors on a device."""

    def __init__(self, device: torch.device, seed: int) -> None:
        self.device = device
        self._generator = None if device.type == "meta" else torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int, std: float = 1.0, mean: float = 0.0, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device).normal_(mean, std, generator=self._generator)

    def norm(self, size: int) -> Tensor:
        return self.normal(size, std=0.1, mean=1.0)

    def matrix(self, format: str, *shape: int, std: float = STD) -> Weight:
        """A weight [..., out, in] whose values have this standard deviation."""
        if format == "bf16":
            return Plain(self.normal(*shape, std=std, dtype=torch.bfloat16))
        lead = shape[:-2]
        if format == "fp8_tensor":
            codes = torch.empty(shape, dtype=E4M3, device=self.device)
            for part in codes.view(-1).split(DRAWN_AT_ONCE):
                wide = self.normal(len(part), std=FP8_STD, dtype=torch.bfloat16)
                part.copy_(wide.clamp_(-E4M3_MAX, E4M3_MAX))
            scale, input_scale = (torch.full(lead, v, device=self.device) for v in (std / FP8_STD, 8 / E4M3_MAX))
            return Fp8Tensor(codes, scale, input_scale)
        pairs = self._bytes(0, 256, *shape[:-1], shape[-1] // 2)
        scales = self._bytes(0x30, 0x40, *shape[:-1], shape[-1] // NVFP4_BLOCK).view(E4M3)  # from ½ to below 2
        return Nvfp4(pairs, scales, torch.full(lead, std / NVFP4_STD, device=self.device))

    def _bytes(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.uint8, device=self.device).random_(low, high, generator=self._generator)


def _layer(config: LayerConfig, draw: _Draw, formats: dict[str, str]) -> LayerWeights:
    h = config.hidden_size

    def matrix(name: str, *shape: int) -> Weight:
        return draw.matrix(formats[name], *shape)

    if isinstance(config, Mamba2Config):
        heads = config.mamba_num_heads
        return Mamba2Weights(
            norm=draw.norm(h),
            in_proj=matrix("in_proj", config.in_proj_rows, h),
            conv1d_weight=draw.normal(config.conv_dim, config.conv_kernel, std=0.4),
            conv1d_bias=draw.normal(config.conv_dim, std=0.1),
            dt_bias=draw.normal(heads, mean=-2.0),
            A_log=draw.normal(heads, std=0.5, mean=math.log(8)),
            D=draw.normal(heads),
            gated_norm=draw.norm(config.d_inner),
            out_proj=matrix("out_proj", h, config.d_inner),
        )
    if isinstance(config, AttentionConfig):
        queries, keys = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
        q, k, v = (matrix(name, rows, h) for name, rows in zip(_ATTENTION, (queries, keys, keys), strict=False))
        return AttentionWeights(draw.norm(h), q, k, v, matrix("o_proj", h, queries))
    if isinstance(config, MlpConfig):
        wide = config.intermediate_size
        return MlpWeights(draw.norm(h), matrix("up_proj", wide, h), matrix("down_proj", h, wide))
    experts, width, wide = config.n_routed_experts, config.expert_input_size, config.moe_intermediate_size
    shared, latent = config.moe_shared_expert_intermediate_size, config.moe_latent_size
    return MoeWeights(
        norm=draw.norm(h),
        gate=draw.normal(experts, h, std=STD),
        e_score_correction_bias=draw.normal(experts, std=0.01),
        experts_up=matrix("experts_up", experts, wide, width),
        experts_down=matrix("experts_down", experts, width, wide),
        shared_up=matrix("shared_up", shared, h) if shared else None,
        shared_down=matrix("shared_down", h, shared) if shared else None,
        fc1_latent_proj=matrix("fc1_latent_proj", latent, h) if latent else None,
        fc2_latent_proj=matrix("fc2_latent_proj", h, latent) if latent else None,
    )
