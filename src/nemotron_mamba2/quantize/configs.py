"""hf_quant_config.json and `quantization_config`, in ModelOpt's words.

One algorithm: `exclude_modules` lists what is not quantised, and readers take all other linear layers to be. Several:
MIXED_PRECISION, and `quantized_layers` names each. The flat form of config.json says the same in the words of
compressed-tensors. Without calibration NVFP4 is W4A16_NVFP4, weight-only; FP8 has no such name, so it stays FP8 and its
`input_scale` is absent.

Excluded experts are one pattern (`…mixer.experts*`), not a name each: vLLM asks for the container, and takes the
algorithm of any sibling when it does not find that one. Source: ModelOpt's export code, vLLM's reader.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..checkpoint import TensorEntry
from ..checkpoint.names import canonical
from ..formats import NVFP4_BLOCK
from .layout import Job

LAYOUT_VERSION = "0.47.0"  # of ModelOpt, whose layout this is
_LINEAR = (
    *("embeddings", "lm_head", "conv1d", "gate", "in_proj", "out_proj", "q_proj", "k_proj", "v_proj", "o_proj"),
    *("up_proj", "down_proj", "fc1_latent_proj", "fc2_latent_proj", "eh_proj"),
)
_OURS = ("layers", "embeddings", "norm_f", "lm_head", "mtp")


def algorithm(job: Job) -> dict[str, Any]:
    """ModelOpt's words for one projection."""
    if job.format == "nvfp4":
        return {"quant_algo": "W4A16_NVFP4" if job.input_scale is None else "NVFP4", "group_size": NVFP4_BLOCK}
    names = {"fp8_tensor": "FP8", "fp8_channel": "FP8_PER_CHANNEL_PER_TOKEN", "fp8_block": "FP8_PB_WO"}
    return {"quant_algo": names[job.format]}


def quant_file(jobs: Sequence[Job], entries: Iterable[TensorEntry], version: str) -> dict[str, Any]:
    """The contents of hf_quant_config.json. version: of this package, kept as a local part of ModelOpt's."""
    sources = {job.projection.name: job.entry for job in jobs if job.projection is not None}
    layers = {job.projection.name: algorithm(job) for job in jobs if job.projection is not None}
    kinds = [dict(pairs) for pairs in dict.fromkeys(tuple(words.items()) for words in layers.values())]
    quantization: dict[str, Any] = {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": None}
    if len(kinds) == 1:
        quantization |= kinds[0]
    else:
        quantization["quantized_layers"] = layers
    quantization["exclude_modules"] = sorted(_excludes(sources, entries))
    producer = {"name": "modelopt", "version": f"{LAYOUT_VERSION}+nemotron.mamba2.{version}"}
    return {"producer": producer, "quantization": quantization}


def flat_config(quant: dict[str, Any]) -> dict[str, Any]:
    """`quantization_config` of config.json, from the contents of hf_quant_config.json."""
    quantization = quant["quantization"]
    found: dict[str, Any] = {}
    if "quantized_layers" in quantization:
        by_kind: dict[tuple[tuple[str, Any], ...], list[str]] = {}
        for name, words in quantization["quantized_layers"].items():
            by_kind.setdefault(tuple(sorted(words.items())), []).append(name)
        found["config_groups"] = {
            f"group_{index}": {**_group(dict(kind)["quant_algo"]), "targets": sorted(names)}
            for index, (kind, names) in enumerate(by_kind.items())
        }
        found["quantized_layers"] = quantization["quantized_layers"]
    elif group := _group(quantization["quant_algo"]):
        found["config_groups"] = {"group_0": {**group, "targets": ["Linear"]}}
    found["ignore"] = quantization["exclude_modules"]
    found["quant_algo"] = quantization["quant_algo"]
    return {**found, "producer": quant["producer"], "quant_method": "modelopt"}


def _group(algorithm: str) -> dict[str, Any]:
    """One entry of `config_groups`, less its targets; empty for what ModelOpt has no words for."""
    fp8 = {"dynamic": False, "num_bits": 8, "type": "float"}
    fp4 = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": NVFP4_BLOCK}
    groups: dict[str, dict[str, Any]] = {
        "FP8": {"input_activations": fp8, "weights": fp8},
        "FP8_PER_CHANNEL_PER_TOKEN": {"input_activations": fp8, "weights": {**fp8, "strategy": "channel"}},
        "NVFP4": {"input_activations": fp4, "weights": fp4},
        "W4A16_NVFP4": {"weights": fp4},
    }
    return groups.get(algorithm, {})


def _excludes(quantised: Mapping[str, TensorEntry], entries: Iterable[TensorEntry]) -> set[str]:
    """Modules with a matrix that is not quantised, by the names of the files; wildcards where a whole tree is left.

    quantised: module → the source's tensor, which may be a stack of experts.
    """
    found: set[str] = set()
    taken = {entry.name for entry in quantised.values()}
    containers = {_container(name) for name in quantised}
    mtp_quantised = any(canonical(name).startswith("mtp.") for name in quantised)
    has_head = False
    for entry in entries:
        name = entry.name.removesuffix(".weight")
        parts = canonical(name).split(".")
        container = _container(name)
        has_head |= parts[0] == "lm_head"
        if parts[0] not in _OURS:  # towers and projectors of VL and Omni files
            tower = name.removeprefix("model.").split(".")[0]
            found.add(f"{name[: name.index(tower)]}{tower}*")
        elif parts[0] == "mtp" and not mtp_quantised:
            found.add("mtp*")
        elif container is not None and container not in containers:
            found.add(f"{container}*")
        elif parts[-1] in _LINEAR and entry.name not in taken:
            found.add(name)
    return found if has_head else found | {"lm_head"}


def _container(name: str) -> str | None:
    """The module that holds the routed experts that a name belongs to."""
    head, found, _ = name.partition(".experts.")
    return f"{head}.experts" if found else None
