"""Checkpoints from headers alone: files as long as they should be, full of zeros that take no disk.

`entries_of` gives name → (dtype, shape, bytes) of a model or a written checkpoint; `write_sparse` writes them.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from checkpoints import write_json
from random_models import tensor_shapes

Entry = tuple[str, tuple[int, ...], int]  # dtype, shape, bytes
BITS = {
    "F64": 64,
    "F32": 32,
    "I32": 32,
    "BF16": 16,
    "F16": 16,
    "I8": 8,
    "U8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
}


def entry(dtype: str, shape: tuple[int, ...]) -> Entry:
    return dtype, shape, math.prod(shape) * BITS[dtype] // 8


def entries_of(source: Mapping[str, Any] | Path) -> dict[str, Entry]:
    """The tensors of a flat config's BF16 model, or of a written checkpoint."""
    if not isinstance(source, Path):
        tensors = tensor_shapes(source)
        names = {name: "F32" if name.endswith("correction_bias") else "BF16" for name in tensors}
        return {
            name if name.startswith(("lm_head.", "mtp.")) else f"backbone.{name}": entry(dtype, tensors[name])
            for name, dtype in names.items()
        }
    found = {}
    for file in sorted(source.glob("*.safetensors")):
        with file.open("rb") as stream:
            header = json.loads(stream.read(struct.unpack("<Q", stream.read(8))[0]))
        header.pop("__metadata__", None)
        found |= {name: entry(value["dtype"], tuple(value["shape"])) for name, value in header.items()}
    return found


def write_sparse(directory: Path, config: Mapping[str, Any], entries: Mapping[str, Entry]) -> Path:
    """config.json and one safetensors file of zeros."""
    write_json(directory / "config.json", config)
    write_header(directory / "model.safetensors", entries)
    return directory


def write_header(file: Path, entries: Mapping[str, Entry]) -> None:
    header, end = {}, 0
    for name, (dtype, shape, nbytes) in entries.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + nbytes]}
        end += nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        stream.truncate(8 + len(text) + end)
