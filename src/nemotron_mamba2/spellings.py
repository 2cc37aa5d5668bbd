"""Config files as they are found: one fact under several names, one value in several forms.

`Keys` looks a name up with its type checked, after all its spellings were made one; two that are present and
disagree are refused. Nothing here knows what a layer is; `config` does. Every error is one line that names the file,
the key, what was expected and what was found.

Sources: published config.json files; transformers' aliases for older versions of its own class.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from .errors import ConfigError, NemotronMamba2Error

# The left name is used from here on.
_SPELLINGS: dict[str, tuple[str, ...]] = {
    "layer_norm_epsilon": ("rms_norm_eps", "norm_eps"),
    "head_dim": ("attention_head_dim",),
    "dtype": ("torch_dtype",),
    "n_groups": ("mamba_n_groups",),
    "conv_kernel": ("mamba_d_conv",),
    "time_step_limit": ("mamba_dt_limit",),
    "use_conv_bias": ("mamba_conv_bias",),
    "chunk_size": ("mamba_chunk_size",),
    "n_routed_experts": ("num_local_experts",),
}
_LETTERS = {
    "mamba": "M",
    "attention": "*",
    "mlp": "-",
    "moe": "E",
    "linear_attention": "M",  # transformers ≥ 5.13
    "full_attention": "*",
    **{letter: letter for letter in "M*-E"},
}
_MODEL_TYPES = ("nemotron_h", "nemotron_h_puzzle")
_NESTED = ("llm_config", "text_config")  # where VL and Omni configs keep the language model
_OF_THE_WHOLE = ("dtype", "tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def read_json(file: Path, error: type[NemotronMamba2Error] = ConfigError) -> dict[str, Any]:
    """The JSON object in a file, a bare `Infinity` allowed, a key given twice refused.

    Raises: error, naming the file.
    """
    try:
        value = json.loads(file.read_text(encoding="utf-8"), object_pairs_hook=unique_keys)
    except OSError as e:
        raise error(f"{file}: cannot be read: {e.strerror or e}") from e
    except (ValueError, RecursionError) as e:
        raise error(f"{file}: is not JSON: {' '.join(str(e).split())[:200]}") from e
    if not isinstance(value, dict):
        raise error(f"{file}: expected a JSON object, found {type(value).__name__}")
    return value


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """`object_pairs_hook` that refuses a key given twice, where `json` would keep the last. Raises: ValueError."""
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"key {next(name for name in found if names.count(name) > 1)!r} is given twice")
    return found


class Keys:
    """Typed look-up in one JSON object. `raw` holds its values under the names used here, nulls left out."""

    def __init__(self, raw: Any, where: str = "config.json") -> None:
        if not isinstance(raw, Mapping):
            raise ConfigError(f"{where}: expected a JSON object, found {type(raw).__name__}")
        self.where = where
        self.raw = {key: value for key, value in raw.items() if value is not None}
        for key, others in _SPELLINGS.items():
            first = key
            for other in (name for name in others if name in self.raw):
                value = self.raw[other]
                if key not in self.raw:
                    self.raw[key], first = value, other
                elif _comparable(key, self.raw[key]) != _comparable(key, value):
                    raise ConfigError(f"{where}: {first} is {self.raw[key]!r}, but {other} is {value!r}; keep one")

    def over(self, front: Any, where: str) -> Keys:
        """These keys with others in front: a layer's own widths, or token ids of another file."""
        keys = Keys(front, where)
        keys.raw = {**self.raw, **keys.raw}
        return keys

    def refuse(self, key: str, expected: str, found: Any) -> ConfigError:
        """The error to raise for a value."""
        return ConfigError(f"{self.where}: {key}: expected {expected}, found {found!r}")

    def _get(self, key: str, default: Any, expected: str) -> Any:
        value = self.raw.get(key, default)
        if value is None:
            raise ConfigError(f"{self.where}: {key} is missing; expected {expected}")
        return value

    def integer(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """An integer; default None: it has to be there. Raises: ConfigError."""
        expected = f"an integer of at least {least}"
        value = self._get(key, default, expected)
        if type(value) is not int or value < least:
            raise self.refuse(key, expected, value)
        return value

    def number(self, key: str, default: float) -> float:
        """A finite number above 0. Raises: ConfigError."""
        value = self._get(key, default, "a number above 0")
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise self.refuse(key, "a number above 0", value)
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """A truth value. Raises: ConfigError."""
        value = self._get(key, default, "true or false")
        if type(value) is not bool:
            raise self.refuse(key, "true or false", value)
        return value


def _comparable(key: str, value: Any) -> Any:
    if key == "time_step_limit":
        return time_step_limit(value)
    return value.removeprefix("torch.") if isinstance(value, str) else value


def language_model(raw: Any) -> tuple[Keys, Keys]:
    """(the language model's keys, the same with what the whole file says of dtype and tokens behind them).

    They differ for VL and Omni configs, which keep the language model in a nested object.
    Raises: ConfigError when it is no model of this family.
    """
    outer = Keys(raw)
    nested = [key for key in _NESTED if key in outer.raw]
    if len(nested) == 2 and outer.raw[nested[0]] != outer.raw[nested[1]]:
        raise ConfigError(f"config.json: {nested[0]} and {nested[1]} both describe a language model, differently")
    model = Keys(outer.raw[nested[0]], f"config.json: {nested[0]}") if nested else outer
    if (found := model.raw.get("model_type", _MODEL_TYPES[0])) not in _MODEL_TYPES:
        raise model.refuse("model_type", " or ".join(_MODEL_TYPES), found)
    whole = Keys({key: outer.raw[key] for key in _OF_THE_WHOLE if key in outer.raw})
    return model, whole.over(model.raw, model.where)


def plan(keys: Keys, *names: str) -> str:
    """The layer plan, one letter per layer, that any of these keys spell; "" when none is there.

    names: of a string of letters, or of a list of words or letters; the last: of a list of blocks with `block_type`.
    Raises: ConfigError for an unknown word, and naming both keys when two plans differ.
    """
    found: dict[str, str] = {}
    for name in names:
        entries = keys.raw.get(name)
        if entries is None:
            continue
        if not isinstance(entries, str | list) or (isinstance(entries, str) and name == names[-1]) or not entries:
            raise keys.refuse(name, "one entry per layer", entries)
        if name == names[-1]:
            entries = [Keys(b, f"{keys.where}: {name}[{i}]").raw.get("block_type") for i, b in enumerate(entries)]
        found[name] = "".join(_letter(keys, name, index, entry) for index, entry in enumerate(entries))
    for name, letters in found.items():
        first = next(iter(found))
        if letters != found[first]:
            raise ConfigError(f"{keys.where}: {first} and {name} describe two plans, {found[first]!r} and {letters!r}")
    return next(iter(found.values()), "")


def _letter(keys: Keys, name: str, index: int, word: Any) -> str:
    if not isinstance(word, str) or word not in _LETTERS:
        raise keys.refuse(f"{name}[{index}]", f"a layer kind ({', '.join(_LETTERS)})", word)
    return _LETTERS[word]


def dtype_of(keys: Keys, key: str, default: torch.dtype) -> torch.dtype:
    """The dtype that a key names. "auto" leaves the choice to the reader, so it means the default."""
    value = keys.raw.get(key, "auto")
    name = value.removeprefix("torch.") if isinstance(value, str) else value
    if name == "auto":
        return default
    if not isinstance(name, str) or name not in _DTYPES:
        raise keys.refuse(key, f"{', '.join(_DTYPES)} or auto", value)
    return _DTYPES[name]


def time_step_limit(value: Any) -> tuple[float, float] | None:
    """(low, high), or None where they clamp nothing: dt is a softplus, so it is above 0 anyway.

    value: [low, high] as JSON holds them: numbers, a bare Infinity, "inf", 1e308, {"__float__": "Infinity"}.
    Raises: ConfigError.
    """
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise ConfigError(f"config.json: time_step_limit: expected [low, high], found {value!r}")
    low, high = (_as_float(entry) for entry in value)
    if not (low <= high and high > 0 and low < math.inf):
        raise ConfigError(f"config.json: time_step_limit: expected low ≤ high and high above 0, found {value!r}")
    # 1e308 stands for infinity in some files: dt is fp32, where it is infinite.
    high = math.inf if high > torch.finfo(torch.float32).max else high
    return None if low <= 0 and high == math.inf else (max(low, 0.0), high)


def _as_float(entry: Any) -> float:
    found = entry["__float__"] if isinstance(entry, Mapping) and set(entry) == {"__float__"} else entry
    try:
        value = float(found) if isinstance(found, str | float) or type(found) is int else math.nan
    except (ValueError, OverflowError):
        value = math.nan
    if math.isnan(value):
        raise ConfigError(f"config.json: time_step_limit: expected numbers or 'Infinity', found {entry!r}")
    return value


def token_ids(keys: Keys, key: str) -> tuple[int, ...]:
    """The token ids under a key that holds one, a list, or nothing. Raises: ConfigError."""
    value = keys.raw.get(key, [])
    ids = value if isinstance(value, list) else [value]
    if not all(type(entry) is int and entry >= 0 for entry in ids):
        raise keys.refuse(key, "a token id or a list of them", value)
    return tuple(dict.fromkeys(ids))


def token_id(keys: Keys, key: str) -> int | None:
    """The one token id under a key, or None. Raises: ConfigError."""
    ids = token_ids(keys, key)
    if len(ids) > 1:
        raise keys.refuse(key, "one token id", list(ids))
    return ids[0] if ids else None
