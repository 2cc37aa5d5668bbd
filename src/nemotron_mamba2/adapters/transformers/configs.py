"""What transformers reads from config.json, for every spelling of published Nemotron-H files.

transformers' own config class knows one spelling: no `attention_head_dim`, no VL or Omni wrapper, no blocks of
different widths, and no hf_quant_config.json, which is all that some quantised checkpoints have. Importing the adapter
registers, with `AutoConfig.register`, a subclass that reads a file as `ModelConfig` does and hands over the spelling
that transformers knows. What `ModelConfig` does not understand goes through as it came.
"""

from __future__ import annotations

import json
import math
import warnings
from typing import Any

import transformers
from transformers.utils import cached_file

from ... import ModelConfig, NemotronMamba2Error

METHOD = "modelopt"
_READ_METHODS = (METHOD, "compressed-tensors", "fp8")  # of checkpoints that our loader reads; others stay as they are
_WORDS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
_WRAPPED = ("llm_config", "text_config")
_OTHER_MODEL_TYPES = ("nemotron_h_puzzle", "NemotronH_Nano_VL_V2", "NemotronH_Nano_Omni_Reasoning_V3")
_REPLACED = (  # spellings of what is written anew, and code that is never run
    *("auto_map", "hybrid_override_pattern", "layers_block_type", "layer_types", "num_hidden_layers", "block_configs"),
    *("mtp_block_configs", "attention_head_dim", "rms_norm_eps", "norm_eps"),
)
_LAYER_KEYS = {
    "*": ("head_dim",),
    "-": ("intermediate_size",),
    "E": ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "moe_latent_size"),
}


class NemotronHConfig(transformers.NemotronHConfig):  # the name is how transformers finds the model class
    """transformers' config, from any spelling."""

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """As `PreTrainedConfig.from_dict`."""
        source = kwargs.get("name_or_path") or config_dict.get("_name_or_path") or ""
        return super().from_dict(known_spelling(config_dict, str(source)), **kwargs)


def register() -> None:
    """Make `AutoConfig` read every spelling."""
    transformers.AutoConfig.register("nemotron_h", NemotronHConfig, exist_ok=True)
    for name in _OTHER_MODEL_TYPES:
        # A class of its own for each, because the registry wants the name on the class; what it makes is the one above.
        alias = type(
            "NemotronHAlias",
            (NemotronHConfig,),
            {"model_type": name, "from_dict": NemotronHConfig.from_dict, "__doc__": f"config.json of {name}."},
        )
        transformers.AutoConfig.register(name, alias, exist_ok=True)


def known_spelling(raw: dict[str, Any], source: str) -> dict[str, Any]:
    """The contents of a config.json as transformers' class reads them. source: where it came from, path or hub id."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a wrong layer count is told when the weights are loaded
            config = ModelConfig.from_dict(raw)
    except NemotronMamba2Error:
        return raw
    inner = next((raw[key] for key in _WRAPPED if isinstance(raw.get(key), dict)), raw)
    outer = {key: raw[key] for key in ("torch_dtype", "dtype", "transformers_version") if key in raw}
    found = {key: value for key, value in (outer | inner).items() if key not in _REPLACED}
    found |= {
        "model_type": "nemotron_h",
        "architectures": ["NemotronHForCausalLM"],
        "layers_block_type": [_WORDS[letter] for letter in config.pattern],
        "layer_norm_epsilon": config.layer_norm_epsilon,
        "tie_word_embeddings": config.tie_word_embeddings,
    }
    for letter, names in _LAYER_KEYS.items():  # of the first layer of a kind; layers that differ are made anew later
        if letter in config.pattern:
            layer = config.layers[config.pattern.index(letter)]
            found |= {name: getattr(layer, name) for name in names}
    if "M" in config.pattern:
        found["time_step_limit"] = list(config.mamba2.time_step_limit or (0.0, math.inf))
    method = _quantisation(raw, inner, source)
    if method is None and (inner is not raw or len(set(config.layers)) > len(set(config.pattern))):
        method = {}  # names with a prefix, or blocks of different widths: our loader reads those too
    if method is not None and method.get("quant_method", METHOD) in _READ_METHODS:
        found["quantization_config"] = {**method, "quant_method": METHOD}
    return found


def _quantisation(raw: dict[str, Any], inner: dict[str, Any], source: str) -> dict[str, Any] | None:
    """The quantisation config that a checkpoint comes with, or None."""
    for holder in (raw, inner):
        if isinstance(holder.get("quantization_config"), dict):
            return holder["quantization_config"]
    if not source:
        return None
    # Missing in most checkpoints, and then nothing is said.
    file = cached_file(
        source,
        "hf_quant_config.json",
        revision=raw.get("_commit_hash"),
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_connection_errors=False,
    )
    if file is None:
        return None
    with open(file, encoding="utf-8") as stream:
        found = json.load(stream)
    return found.get("quantization", found) if isinstance(found, dict) else None
