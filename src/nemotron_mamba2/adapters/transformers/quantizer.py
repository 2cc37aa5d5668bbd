"""The `modelopt` quantiser: `from_pretrained` of quantised Nemotron-H directories, registered by importing the adapter.

Before transformers reads any weight, every matrix that the headers of the checkpoint say is quantised gets a module
that can hold it; transformers then loads what is left, and our loader the rest, in the formats as found. The result is
accelerated. All published layouts are read, also those of compressed-tensors and block FP8, wrapped ones (VL, Omni)
and blocks of different widths: what a directory holds is decided by our loader, and its errors are those of `inspect`.

Source: transformers.quantizers (public registry).
"""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.nemotron_h import modeling_nemotron_h as original
from transformers.quantizers import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from ... import AdapterError, ModelConfig, Plain, Weight, load_model
from .configs import METHOD
from .mixers import accelerate
from .modules import Quantised, QuantisedEmbedding, QuantisedExperts, QuantisedLinear, Roles

_LOG = logging.getLogger(__name__)
# Our names of a layer's matrices → where transformers has them, below the mixer.
_PLACES = {
    "experts_up": "experts.up_proj",
    "experts_down": "experts.down_proj",
    "shared_up": "shared_experts.up_proj",
    "shared_down": "shared_experts.down_proj",
}
# Our names of a layer's vectors → the same, below the layer.
_VECTORS = {
    "norm": "norm.weight",
    "conv1d_weight": "mixer.conv1d.weight",
    "conv1d_bias": "mixer.conv1d.bias",
    "dt_bias": "mixer.dt_bias",
    "A_log": "mixer.A_log",
    "D": "mixer.D",
    "gated_norm": "mixer.norm.weight",
    "gate": "mixer.gate.weight",
    "e_score_correction_bias": "mixer.gate.e_score_correction_bias",
}
_IGNORED = ("_keys_to_ignore_on_load_missing", "_keys_to_ignore_on_load_unexpected")
_WIDTHS = (  # of MLP and MoE layers, called alike in transformers' config and ours
    *("intermediate_size", "moe_intermediate_size", "moe_shared_expert_intermediate_size"),
    *("moe_latent_size", "n_routed_experts", "num_experts_per_tok"),
)
_EXACT = ("dt_bias", "A_log", "D", "gate", "e_score_correction_bias")  # held in fp32, as our layers hold them


class ModelOptConfig(QuantizationConfigMixin):
    """A checkpoint's own quantisation config; kept, but the tensors decide."""

    def __init__(self, quant_method: str = METHOD, **recipe: Any) -> None:
        self.quant_method = quant_method
        for name, value in recipe.items():
            setattr(self, name, value)


class ModelOptQuantizer(HfQuantizer):
    """Loads quantised weights in the formats they have on disk."""

    requires_calibration = False

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        """Raises: AdapterError for what cannot be loaded."""
        places = kwargs.get("device_map")
        if isinstance(places, dict) and "disk" in places.values():
            raise AdapterError("modelopt: device_map sends a part to disk; offloading is not served")
        if not self.pre_quantized:
            raise AdapterError(
                "modelopt: reads checkpoints that are quantised; to make one: nemotron-mamba2 quantize, or "
                "nemotron_mamba2.quantize"
            )

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """dtype: of the activations, and of weights that are not quantised. Raises: AdapterError."""
        if dtype not in (torch.bfloat16, torch.float32):
            raise AdapterError(f"modelopt: dtype must be bfloat16 or float32, found {dtype}; pass dtype=")
        self.dtype = dtype
        return dtype

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        files = kwargs.get("checkpoint_files")
        if not files:
            raise AdapterError("modelopt: expected a checkpoint directory; state dicts are not read")
        if not isinstance(model, original.NemotronHForCausalLM):
            raise AdapterError(f"modelopt: expected a NemotronHForCausalLM, found {type(model).__name__}")
        self.directory = Path(files[0]).parent
        replace_modules(model, self.directory)
        # What transformers does not find, our loader brings; what our loader does not know, it refuses.
        self._ignored = {name: model.__dict__.get(name) for name in _IGNORED}
        for name in _IGNORED:
            model.__dict__[name] = {".*"}
        return model

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        for name, before in self._ignored.items():
            model.__dict__[name] = before
        fill_modules(model, self.directory, self.dtype)
        return accelerate(model)

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        """No: copy the directory instead."""
        return False

    @property
    def is_trainable(self) -> bool:
        return False


def register() -> None:
    """Put both into transformers' registries, where nobody else has."""
    try:
        register_quantization_config(METHOD)(ModelOptConfig)
        register_quantizer(METHOD)(ModelOptQuantizer)
    except ValueError:
        _LOG.warning("transformers has a %r quantiser already; that one is used", METHOD)


# -- modules ---------------------------------------------------------------------------------------------------------


def replace_modules(model: Any, directory: Path) -> None:
    """Give every quantised matrix a module that can hold it. Only headers are read."""
    config = ModelConfig.from_checkpoint(directory)
    weights = load_model(directory, device="meta", mtp=False)
    roles = Roles()
    model.model.register_forward_pre_hook(roles.observe, with_kwargs=True)
    for block, layer_config, layer in zip(model.model.layers, config.layers, weights.layers, strict=True):
        if block.block_type in ("moe", "mlp"):
            fit_widths(block, layer_config)
        for name, weight in layer.projections():
            if isinstance(weight, Plain):
                continue
            if len(weight.shape) == 3:
                block.mixer.experts = QuantisedExperts(roles)
            else:
                _put(block.mixer, _PLACES.get(name, name), QuantisedLinear(weight.shape[1], weight.shape[0], roles))
    rows, columns = config.vocab_size, config.hidden_size
    if not isinstance(weights.embeddings, Plain):
        model.model.embeddings = QuantisedEmbedding(rows, columns, model.dtype)
    if not isinstance(weights.lm_head, Plain):
        model.lm_head = QuantisedLinear(columns, rows, None)


def fit_widths(block: Any, layer: Any) -> None:
    """Make a layer anew whose widths differ from the config's (blocks of a Puzzle model)."""
    wanted = {name: getattr(layer, name) for name in _WIDTHS if hasattr(layer, name)}
    if all(getattr(block.config, name) == value for name, value in wanted.items()):
        return
    config = copy.deepcopy(block.config)
    for name, value in wanted.items():
        setattr(config, name, value)
    block.mixer = original.MIXER_TYPES[block.block_type](config, layer_idx=block.layer_idx)


def fill_modules(model: Any, directory: Path, dtype: torch.dtype) -> None:
    """Bring every weight of a checkpoint to its place, on the device where its layer is. dtype: of plain weights."""
    weights = load_model(directory, device="cpu", mtp=False)
    ends = ((model.model, "embeddings", weights.embeddings), (model, "lm_head", weights.lm_head))
    for owner, name, weight in ends:
        _fill_matrix(owner, name, weight, dtype=dtype, device=model.model.norm_f.weight.device)
    _fill_vector(model.model, "norm_f.weight", weights.norm_f, dtype=dtype)
    for block, layer in zip(model.model.layers, weights.layers, strict=True):
        device = block.norm.weight.device
        matrices = dict(layer.projections())
        if isinstance(getattr(block.mixer, "experts", None), QuantisedExperts):
            up, down = (_moved(matrices.pop(name), device) for name in ("experts_up", "experts_down"))
            block.mixer.experts.hold(up, down)
        for name, weight in matrices.items():
            _fill_matrix(block.mixer, _PLACES.get(name, name), weight, dtype=dtype, device=device)
        for ours, theirs in _VECTORS.items():
            value = getattr(layer, ours, None)
            if value is not None:
                _fill_vector(block, theirs, value, dtype=torch.float32 if ours in _EXACT else dtype)


def _fill_matrix(owner: Any, name: str, weight: Weight, *, dtype: torch.dtype, device: torch.device) -> None:
    path, _, last = name.rpartition(".")
    module = getattr(owner.get_submodule(path), last)
    if isinstance(module, Quantised):
        module.hold(_moved(weight, device))
    else:
        assert isinstance(weight, Plain)  # only quantised matrices got other modules
        _fill(module if isinstance(module, Tensor) else module.weight, weight.weight, dtype)


def _fill_vector(owner: Any, name: str, value: Tensor, *, dtype: torch.dtype) -> None:
    path, _, last = name.rpartition(".")
    _fill(getattr(owner.get_submodule(path), last), value, dtype)


def _fill(target: Tensor, value: Tensor, dtype: torch.dtype) -> None:
    """Let target hold value in this dtype; on the CPU as the view of the file that it is, where nothing must change.

    Some versions load a parameter in the dtype of the file, whatever was asked for.
    """
    value = value.view(target.shape)
    target.data = value if value.device == target.device and value.dtype == dtype else value.to(target.device, dtype)


def _moved(weight: Weight, device: torch.device) -> Weight:
    parts: dict[str, Any] = {n: p.to(device) if isinstance(p, Tensor) else p for n, p in vars(weight).items()}
    return type(weight)(**parts)


def _put(mixer: Any, name: str, module: nn.Module) -> None:
    path, _, last = name.rpartition(".")
    setattr(mixer.get_submodule(path), last, module)
