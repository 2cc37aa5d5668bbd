"""What the config files say about quantisation: advice, except where only they know.

The tensors themselves say how a weight is stored; exclude lists of published files are known to be wrong. So a recipe
is asked for two things that no tensor shows: whether activations are quantised per row at run time, and whether an
activation scale that lies in the file means nothing (W4A16). All else it says is compared and logged.

Read are ModelOpt's hf_quant_config.json (nested) and `quantization_config` (flat), compressed-tensors, and the block
FP8 config of transformers. Sources: ModelOpt, compressed-tensors and vLLM's readers of both.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..spellings import read_json
from .names import canonical

QUANT_FILE = "hf_quant_config.json"


@dataclass(frozen=True)
class Advice:
    """What a config says of one projection.

    format: its name in `formats`, or None where the algorithm is unknown; dynamic_rows: activations get a scale per
    row at run time; static_input: they have one scale in the file; weight_only: they stay bf16.
    """

    format: str | None
    dynamic_rows: bool = False
    static_input: bool = False
    weight_only: bool = False


UNQUANTISED = Advice("bf16", weight_only=True)
_ALGORITHMS: dict[str, Advice] = {
    "FP8": Advice("fp8_tensor", static_input=True),
    "FP8_PER_CHANNEL_PER_TOKEN": Advice("fp8_channel", dynamic_rows=True),
    "FP8_PB_WO": Advice("fp8_block"),
    "FP8_BLOCK_SCALES": Advice("fp8_block"),
    "NVFP4": Advice("nvfp4", static_input=True),
    "W4A16_NVFP4": Advice("nvfp4", weight_only=True),
}


@dataclass(frozen=True)
class Recipe:
    """A quantisation config. source: the file and key it came from; algorithm: its own word for the whole.

    layers: canonical module → advice (`quantized_layers`); default: what holds for the linear layers that no exclude
    names; groups: (targets, advice) of compressed-tensors; excludes: patterns; kv_fp8: an FP8 KV cache is asked for.
    """

    source: str
    algorithm: str
    layers: Mapping[str, Advice]
    default: Advice
    groups: tuple[tuple[tuple[str, ...], Advice], ...]
    excludes: tuple[str, ...]
    kv_fp8: bool

    def advice(self, module: str) -> Advice:
        """What it says of a projection, by canonical name."""
        parts = module.split(".")
        for end in range(len(parts), 0, -1):  # the module itself, or one that holds it
            if (found := self.layers.get(".".join(parts[:end]))) is not None:
                return found
        if any(_matches(pattern, module) for pattern in self.excludes):
            return UNQUANTISED
        for targets, advice in self.groups:
            if any(_matches(target, module) for target in targets if target != "Linear"):
                return advice
        if module == "embeddings":  # no linear layer, so what holds for those leaves it alone
            return UNQUANTISED
        return next((advice for targets, advice in self.groups if "Linear" in targets), self.default)


def _matches(pattern: str, module: str) -> bool:
    """Whether a canonical pattern names a module: exactly, as a part of its path, by wildcard, or `re:` regex."""
    if pattern.startswith("re:"):
        return any(re.match(pattern[3:], prefix + module) for prefix in ("", "backbone.", "model."))
    if "*" in pattern:
        bare = pattern.removesuffix("*")
        return fnmatchcase(module, pattern) or module == bare or module.startswith(bare.rstrip(".") + ".")
    if not pattern or module == pattern or module.startswith(pattern + "."):
        return bool(pattern)
    return not pattern.startswith("layers.") and f".{pattern}." in f".{module}."


def read_recipe(directory: Path, config: Mapping[str, Any]) -> tuple[Recipe | None, tuple[str, ...]]:
    """The quantisation config of a checkpoint, and what is odd about it in words.

    config: the contents of config.json. Its `quantization_config` goes before hf_quant_config.json.
    Raises: ConfigError when one of them cannot be understood.
    """
    found: list[Recipe] = []
    nested = (config.get(key) for key in ("llm_config", "text_config"))
    for raw in (config, *(entry for entry in nested if isinstance(entry, Mapping))):
        if raw.get("quantization_config") is not None:
            found.append(_recipe(raw["quantization_config"], "config.json: quantization_config"))
    if (file := directory / QUANT_FILE).exists():
        found.append(_recipe(read_json(file), QUANT_FILE))
    if not found:
        return None, ()
    notes = [
        f"{found[0].source} says {found[0].algorithm}, but {other.source} says {other.algorithm}; the first is used"
        for other in found[1:]
        if other.algorithm != found[0].algorithm
    ]
    if found[0].default.format is None:
        notes.append(f"{found[0].source}: unknown algorithm {found[0].algorithm!r}; the tensors decide")
    return found[0], tuple(notes)


def _recipe(raw: Any, source: str) -> Recipe:
    raw = _object(raw, source)
    if "quantization" in raw:
        raw = _object(raw["quantization"], f"{source}: quantization")
    algorithm = raw.get("quant_algo") or ""
    if not algorithm and raw.get("quant_method") == "fp8":
        algorithm = "FP8_PB_WO" if raw.get("weight_block_size") else "FP8"
    if not isinstance(algorithm, str):
        raise ConfigError(f"{source}: quant_algo: expected a name, found {algorithm!r}")
    layers = {
        canonical(name): _algorithm(_object(entry, f"{source}: quantized_layers: {name!r}").get("quant_algo"))
        for name, entry in _object(raw.get("quantized_layers", {}), f"{source}: quantized_layers").items()
    }
    # With an algorithm named, the groups of a ModelOpt file only say the same again, less exactly.
    groups = () if algorithm else _groups(raw.get("config_groups", {}), source)
    excludes = (*_names(raw, "exclude_modules", source), *_names(raw, "ignore", source))
    excludes += _names(raw, "modules_to_not_convert", source)
    kv = raw.get("kv_cache_quant_algo") or raw.get("kv_cache_scheme")
    mixed = algorithm == "MIXED_PRECISION" or bool(groups) or not algorithm
    return Recipe(
        source=source,
        algorithm=algorithm or str(raw.get("format") or raw.get("quant_method") or "no algorithm"),
        layers=layers,
        default=UNQUANTISED if mixed else _algorithm(algorithm),
        groups=groups,
        excludes=excludes,
        kv_fp8=kv == "FP8" or (isinstance(kv, Mapping) and kv.get("num_bits") == 8),
    )


def _algorithm(name: Any) -> Advice:
    if name is None:
        return UNQUANTISED
    return _ALGORITHMS.get(name.upper(), Advice(None)) if isinstance(name, str) else Advice(None)


def _groups(raw: Any, source: str) -> tuple[tuple[tuple[str, ...], Advice], ...]:
    groups = []
    for name, entry in _object(raw, f"{source}: config_groups").items():
        where = f"{source}: config_groups: {name}"
        group = _object(entry, where)
        weights = _object(group.get("weights", {}), f"{where}: weights")
        inputs = group.get("input_activations")
        dynamic = None if inputs is None else _object(inputs, f"{where}: input_activations").get("dynamic", False)
        form: str | None
        match weights.get("type", "int"), weights.get("num_bits"), weights.get("strategy"):
            case "float", 4, _:
                form = "nvfp4"
            case "float", 8, "tensor" | "channel" | "block" as strategy:
                form = f"fp8_{strategy}"
            case _:
                form = None
        advice = Advice(
            form,
            dynamic_rows=dynamic is True and form == "fp8_channel",
            static_input=dynamic is False or (form == "nvfp4" and dynamic is not None),
            weight_only=inputs is None,
        )
        groups.append((_names(group, "targets", where), advice))
    return tuple(groups)


def _names(raw: Mapping[str, Any], key: str, source: str) -> tuple[str, ...]:
    """Patterns of module names, made canonical once: each is compared with thousands of experts."""
    value = raw.get(key) or []
    if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
        raise ConfigError(f"{source}: {key}: expected a list of module names, found {str(value)[:100]!r}")
    for entry in value:
        if entry.startswith("re:"):
            try:
                re.compile(entry[3:])
            except re.error as e:
                raise ConfigError(f"{source}: {key}: {entry!r} is not a regular expression: {e}") from e
    return tuple(entry if entry.startswith("re:") else canonical(entry).rstrip(".") for entry in value)


def _object(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where}: expected a JSON object, found {type(value).__name__}")
    return value
