"""Small checkpoints with the names, dtypes, shards and config files of the published ones.

`write_checkpoint` writes one of LAYOUTS; `truth` gives the float32 values that its weights stand for, by name without
prefix, computed here and not by the package. `write_model` writes plain random weights for any config; `small_config`
is a start for one; `write_tokenizer` adds a tokenizer. Widths are small, everything else is as in the real files.
The same arguments always give the same bytes.
"""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
import torch
from safetensors.torch import save_file
from torch import Tensor

from layouts import LAYOUTS, MAKERS, Layout, projections
from random_models import letters, random_tensors, small_config

__all__ = [
    "LAYOUTS",
    "config_of",
    "letters",
    "small_config",
    "truth",
    "write_checkpoint",
    "write_json",
    "write_model",
    "write_shards",
    "write_tokenizer",
]
MTP_SHARD = "mtp.safetensors"

# writing ----------------------------------------------------------------------------------------------------------


@functools.cache
def _made(layout: str, seed: int) -> tuple[Layout, dict[str, Tensor], dict[str, Tensor]]:
    """(layout, tensors as stored by name without prefix, the float32 values they stand for)."""
    made = next(maker for maker in MAKERS if maker.__name__ == layout)()
    stored: dict[str, Tensor] = {}
    truth: dict[str, Tensor] = {}
    quantisable = set(projections(made.config))
    for name, tensor in random_tensors(made.config, seed=seed).items():
        module = name.removesuffix(".weight")
        quantiser = made.quantiser(module) if module in quantisable else None
        if module.startswith("mtp."):
            quantiser = None
        if quantiser is None:
            stored[name] = tensor.to(_stored_dtype(made, name))
            truth[name] = stored[name].float()
        else:
            parts, truth[name] = quantiser(tensor)
            stored |= {f"{module}.{suffix}": part for suffix, part in parts.items()}
    if made.kv_scale_shape is not None:
        for name in [n for n in truth if n.endswith(("k_proj.weight", "v_proj.weight")) and not n.startswith("mtp.")]:
            key = f"{name.removesuffix('.weight')}.{name.split('.')[-2][0]}_scale"
            stored[key] = torch.tensor(0.02 + 0.001 * len(key)).reshape(made.kv_scale_shape)
            truth[key] = stored[key].reshape(())
    made.config.pop("_bias_mean", None)
    return made, stored, truth


def _stored_dtype(layout: Layout, name: str) -> torch.dtype:
    if name.endswith("e_score_correction_bias"):
        return torch.float32
    return next((dtype for ending, dtype in layout.dtypes.items() if name.endswith(ending)), torch.bfloat16)


def truth(layout: str, *, seed: int = 0) -> dict[str, Tensor]:
    """float32 values of a layout's tensors, by name without prefix; experts one by one."""
    return _made(layout, seed)[2]


def config_of(layout: str) -> dict[str, Any]:
    """The config.json of a layout."""
    made = _made(layout, 0)[0]
    config = copy.deepcopy(made.config)
    return config if made.wrapper is None else {**made.wrapper, "llm_config": config}


def write_checkpoint(directory: str | Path, layout: str, *, seed: int = 0) -> Path:
    """Write one of LAYOUTS; returns the directory."""
    directory = Path(directory)
    made, stored, _ = _made(layout, seed)
    tensors = _stack(stored) if made.stacked else stored
    named = {_full_name(made, name): tensor for name, tensor in tensors.items()}
    apart = {name: tensor for name, tensor in named.items() if made.mtp_apart and name.startswith("mtp.")}
    write_shards(directory, {n: t for n, t in named.items() if n not in apart} | made.extra, shards=made.shards)
    if apart:
        save_file(apart, directory / MTP_SHARD, metadata={"format": "pt"})
    write_json(directory / "config.json", config_of(layout))
    write_json(directory / "generation_config.json", made.generation)
    if made.quant_file is not None:
        write_json(directory / "hf_quant_config.json", made.quant_file)
    return directory


def write_model(
    directory: str | Path, config: Mapping[str, Any], *, seed: int = 0, dtype: torch.dtype = torch.bfloat16
) -> Path:
    """Write plain random weights for a flat config (see `small_config`) as one file; returns the directory."""
    directory = Path(directory)
    name = str(dtype).removeprefix("torch.")
    config = {key: value for key, value in config.items() if key not in ("dtype", "torch_dtype")} | {
        "torch_dtype": name
    }
    tensors = {
        f"{'' if key.startswith(('lm_head.', 'mtp.')) else 'backbone.'}{key}": value.to(
            torch.float32 if key.endswith("e_score_correction_bias") else dtype
        )
        for key, value in random_tensors(config, seed=seed).items()
    }
    write_shards(directory, tensors)
    write_json(directory / "config.json", config)
    return directory


def write_shards(directory: Path, tensors: Mapping[str, Tensor], *, shards: int = 1) -> None:
    """model.safetensors, or that many shards in order of the tensors, with an index."""
    directory.mkdir(parents=True, exist_ok=True)
    if shards == 1:
        save_file(dict(tensors), directory / "model.safetensors", metadata={"format": "pt"})
        return
    names, weight_map = list(tensors), {}
    for shard in range(shards):
        part = names[len(names) * shard // shards : len(names) * (shard + 1) // shards]
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        save_file({name: tensors[name] for name in part}, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    write_json(directory / "model.safetensors.index.json", index)


def write_json(file: Path, value: Any) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(value, indent=2), encoding="utf-8")


def _full_name(layout: Layout, name: str) -> str:
    return (
        name
        if name.startswith("mtp.")
        else (layout.head_prefix if name.startswith("lm_head.") else layout.prefix) + name
    )


def _stack(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`experts.3.up_proj.weight` and its like become `experts.up_proj`."""
    out: dict[str, Tensor] = {}
    groups: dict[str, list[Tensor]] = {}
    for name, tensor in stored.items():
        if ".experts." in name:
            mixer, rest = name.split(".experts.")
            groups.setdefault(f"{mixer}.experts.{rest.split('.')[1]}", []).append(tensor)
        else:
            out[name] = tensor
    return out | {name: torch.stack(parts) for name, parts in groups.items()}


# tokenizer --------------------------------------------------------------------------------------------------------

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SPECIAL = ("<unk>", "<s>", "</s>", *(f"<SPECIAL_{i}>" for i in range(3, 10)), "<|im_start|>", "<|im_end|>")


def write_tokenizer(directory: str | Path) -> Path:
    """A byte-level BPE tokenizer of fewer than 300 ids, with special ids as in the real files (eos 2, im_end 11)."""
    directory = Path(directory)
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("a", "n"), ("an", "d"), ("Ġ", "and"), ("i", "n"), ("e", "r")]
    words = [*_SPECIAL, *alphabet, *(left + right for left, right in merges)]
    vocab = {word: index for index, word in enumerate(dict.fromkeys(words))}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens([tokenizers.AddedToken(word, special=True) for word in _SPECIAL])
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    write_json(
        directory / "tokenizer_config.json",
        {
            "add_bos_token": False,
            "bos_token": "<s>",
            "chat_template": CHAT_TEMPLATE,
            "eos_token": "<|im_end|>",
            "tokenizer_class": "PreTrainedTokenizerFast",
            "unk_token": "<unk>",
        },
    )
    return directory
