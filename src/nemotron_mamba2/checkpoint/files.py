"""Which tensors a checkpoint directory holds, known from the headers alone.

The headers of all safetensors files are parsed and checked here before anything is mapped: a file that was cut short,
offsets that overlap or leave gaps, an index that names what is not there. After that a tensor can be read without a
further look. Only safetensors is read: pickle files run code when they are opened.

Source: the safetensors format description (u64 header length, JSON header, data without holes).
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import CheckpointError
from ..spellings import read_json, unique_keys

INDEX = "model.safetensors.index.json"
MTP_FILE = "mtp.safetensors"  # a second file that some indexes leave out
HEADER_LIMIT_BYTES = 100_000_000  # the limit of the format's own reader
_OTHER_FORMATS = (".bin", ".pt", ".pth", ".ckpt", ".gguf", ".npz", ".nemo")

# Names of the format → (bits per element, torch's dtype; None: known, but no weight here has it).
_DTYPES: dict[str, tuple[int, torch.dtype | None]] = {
    "BF16": (16, torch.bfloat16),
    "F16": (16, torch.float16),
    "F32": (32, torch.float32),
    "F64": (64, torch.float64),
    "F8_E4M3": (8, torch.float8_e4m3fn),
    "F8_E5M2": (8, torch.float8_e5m2),
    "F8_E8M0": (8, None),
    "F8_E4M3FNUZ": (8, None),
    "F8_E5M2FNUZ": (8, None),
    "F6_E2M3": (6, None),
    "F6_E3M2": (6, None),
    "F4": (4, None),
    "U8": (8, torch.uint8),
    "I8": (8, torch.int8),
    "I16": (16, torch.int16),
    "U16": (16, None),
    "I32": (32, torch.int32),
    "U32": (32, None),
    "I64": (64, torch.int64),
    "U64": (64, None),
    "C64": (64, None),
    "BOOL": (8, torch.bool),
}


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a file: its name there, the file, dtype as the format names it, shape, bytes."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    nbytes: int

    @property
    def torch_dtype(self) -> torch.dtype | None:
        """None for a dtype that no weight of this family has."""
        return _DTYPES[self.dtype][1]

    def __str__(self) -> str:
        return f"{self.name} ({self.file.name})"


def scan(directory: Path) -> dict[str, TensorEntry]:
    """All tensors of a checkpoint directory by name, from its index and the headers of its files.

    Raises: CheckpointError, in one line that names the file or tensor.
    """
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: no such directory; a checkpoint is a directory with safetensors files")
    index = _index(directory)
    files = _files(directory, index)
    tensors: dict[str, TensorEntry] = {}
    for file in files:
        for entry in read_header(file):
            if entry.name in tensors:
                raise CheckpointError(f"{entry.name}: held twice, by {tensors[entry.name].file.name} and {file.name}")
            tensors[entry.name] = entry
    if index is not None:
        _compare(index, tensors)
    return tensors


def _index(directory: Path) -> dict[str, str] | None:
    """tensor → file, or None when there is no index."""
    found = sorted(directory.glob("*.safetensors.index.json"))
    if not found:
        return None
    file = directory / INDEX if directory / INDEX in found else found[0]
    if len(found) > 1 and file.name != INDEX:
        raise CheckpointError(f"{directory}: {len(found)} index files; expected one, {INDEX}")
    weight_map = read_json(file, CheckpointError).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{file}: expected weight_map, an object of tensor → file, found {_kind(weight_map)}")
    shards: dict[Any, str] = {
        shard if isinstance(shard, str) else repr(shard): name for name, shard in weight_map.items()
    }
    for shard, name in shards.items():
        if isinstance(weight_map[name], str) and _is_plain(shard):
            continue
        raise CheckpointError(
            f"{file}: weight_map sends {name!r} to {weight_map[name]!r}; expected a safetensors file in this directory"
        )
    return weight_map


def _is_plain(shard: str) -> bool:
    path = Path(shard)
    inside = not path.is_absolute() and ".." not in path.parts and "\\" not in shard
    return inside and path.suffix == ".safetensors" and shard.isprintable()


def _files(directory: Path, index: dict[str, str] | None) -> list[Path]:
    present = {file.name for file in directory.glob("*.safetensors")}
    named = present if index is None else set(index.values())
    # A separate MTP file need not be in the index; any other file that is not would be read by nobody.
    if stray := sorted(present - named - {MTP_FILE}):
        raise CheckpointError(f"{directory / stray[0]}: the index does not name this file; move it away or add it")
    if not named:
        other = sorted(file.name for file in directory.iterdir() if file.suffix in _OTHER_FORMATS)
        hint = f"{other[0]} is not read: convert it to safetensors" if other else "there are none"
        raise CheckpointError(f"{directory}: expected safetensors files; {hint}")
    files = [directory / name for name in sorted(named | (present & {MTP_FILE}))]
    for file in files:
        _inside(directory, file)
    return files


def _inside(directory: Path, file: Path) -> None:
    """Refuse links that leave the directory, but for the hub cache, whose snapshots are links into blobs."""
    if not file.exists():
        raise CheckpointError(f"{file}: the index names this file, but it is not there; fetch it again")
    if not file.is_file():
        raise CheckpointError(f"{file}: expected a file")
    root, target = directory.resolve(), file.resolve()
    roots = [root, root.parent.parent / "blobs"] if root.parent.name == "snapshots" else [root]
    if not any(target.is_relative_to(allowed) for allowed in roots):
        raise CheckpointError(f"{file}: links to {target}, outside the checkpoint; copy the file into the directory")


def _compare(index: dict[str, str], tensors: dict[str, TensorEntry]) -> None:
    names = {shard: Path(shard).name for shard in set(index.values())}
    for name, shard in index.items():
        entry = tensors.get(name)
        if entry is None or entry.file.name != names[shard]:
            found = "no file holds it" if entry is None else f"{entry.file.name} holds it"
            raise CheckpointError(f"{name!r}: the index says {shard}, but {found}; fetch both again")
    if len(index) < len(tensors):
        for name, entry in tensors.items():
            if name not in index and entry.file.name != MTP_FILE:
                raise CheckpointError(f"{entry}: in the file, but not in the index; fetch both again")


# headers ----------------------------------------------------------------------------------------------------------


def read_header(file: Path) -> list[TensorEntry]:
    """The tensors of one safetensors file, in the order of their data.

    Raises: CheckpointError when the file is cut short, or its header is not what the format says.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            start = stream.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
            if not 2 <= length <= min(size - 8, HEADER_LIMIT_BYTES):
                raise CheckpointError(
                    f"{file}: not a safetensors file, or cut short: {size} bytes, header {length}; fetch it again"
                )
            text = stream.read(length)
    except OSError as e:
        raise CheckpointError(f"{file}: cannot be read: {e.strerror or e}") from e
    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as e:
        raise CheckpointError(f"{file}: corrupt header: {' '.join(str(e).split())[:200]}; fetch it again") from e
    if not isinstance(header, dict):
        raise CheckpointError(f"{file}: corrupt header: expected an object, found {_kind(header)}; fetch it again")
    notes = header.pop("__metadata__", {})
    if not isinstance(notes, dict) or not all(isinstance(value, str) for value in notes.values()):
        raise CheckpointError(f"{file}: corrupt header: expected __metadata__ of strings; fetch it again")
    placed = sorted((_entry(file, name, value) for name, value in header.items()), key=lambda pair: pair[0])
    _check_cover(file, placed, size - 8 - length)
    return [entry for _, entry in placed]


def _entry(file: Path, name: str, value: Any) -> tuple[tuple[int, int], TensorEntry]:
    where = f"{file}: corrupt header: tensor {name!r}"
    if not name or not name.isprintable():
        raise CheckpointError(f"{where}: expected a printable name")
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: expected an object, found {_kind(value)}")
    dtype: Any = value.get("dtype")
    shape: Any = value.get("shape")
    offsets: Any = value.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise CheckpointError(f"{where}: unknown dtype {dtype!r}")
    if not _whole_numbers(shape) or not _whole_numbers(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(f"{where}: bad shape {shape!r} or data_offsets {offsets!r}"[:400])
    bits = _DTYPES[dtype][0]
    for extent in shape:
        bits *= extent
    nbytes = offsets[1] - offsets[0]
    if bits != 8 * nbytes:
        raise CheckpointError(f"{where}: {dtype} {shape} takes {bits // 8} bytes, but data_offsets span {nbytes}")
    return (offsets[0], offsets[1]), TensorEntry(name, file, dtype, tuple(shape), nbytes)


def _check_cover(file: Path, placed: list[tuple[tuple[int, int], TensorEntry]], data_bytes: int) -> None:
    end = 0
    for (start, stop), entry in placed:
        if start != end:
            fault = "overlaps the tensor before it" if start < end else "leaves a gap before it"
            raise CheckpointError(f"{file}: corrupt header: tensor {entry.name!r} {fault} (byte {start}, not {end})")
        end = stop
    if end != data_bytes:
        fault = "cut short" if data_bytes < end else "longer than its header says"
        raise CheckpointError(f"{file}: {fault}: {data_bytes} bytes of data, expected {end}; fetch it again")


def _whole_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(type(entry) is int and 0 <= entry < 1 << 63 for entry in value)


def _kind(value: Any) -> str:
    return "nothing" if value is None else type(value).__name__
