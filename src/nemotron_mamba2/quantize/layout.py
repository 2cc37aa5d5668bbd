"""The tensors of the output: names and shapes as ModelOpt writes them, and their places in safetensors files.

Everything here is known before a weight is read, so that a file's header is written first and its data streamed after
it, in any order. Within a file wide dtypes come first, which keeps every tensor aligned to its own size.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from ..checkpoint import TensorEntry
from ..formats import BLOCK, NVFP4_BLOCK
from .choice import Projection

SHARD_BYTES = 5_000_000_000
COPY_BYTES = 16 << 20
_ITEM_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "BF16": 2, "F16": 2, "I16": 2}  # others: 1


@dataclass(frozen=True)
class Output:
    """One tensor of the output: name, dtype as safetensors names it, shape, bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class Job:
    """A tensor of the source, or one matrix of a stack, and what becomes of it.

    projection: None for a tensor that is copied as it is. format: of `formats`. input_scale: static activation scale,
    or None.
    """

    entry: TensorEntry
    outputs: tuple[Output, ...]
    projection: Projection | None = None
    format: str = "bf16"
    input_scale: float | None = None

    @property
    def nbytes(self) -> int:
        """Bytes written."""
        return sum(output.nbytes for output in self.outputs)

    @property
    def source_nbytes(self) -> int:
        """Bytes read: of one matrix, where the tensor is a stack."""
        p = self.projection
        return self.entry.nbytes if p is None or p.expert is None else self.entry.nbytes // self.entry.shape[0]


def copied(entry: TensorEntry) -> Job:
    """A tensor that stays as it is."""
    return Job(entry, (Output(entry.name, entry.dtype, entry.shape, entry.nbytes),))


def quantised(projection: Projection, format: str, *, input_scale: float | None) -> Job:
    """A projection in another format, with the tensors that hold it."""
    rows, columns, name = projection.rows, projection.columns, projection.name

    def output(suffix: str, dtype: str, *shape: int) -> Output:
        return Output(f"{name}.{suffix}", dtype, shape, torch.Size(shape).numel() * _ITEM_BYTES.get(dtype, 1))

    if format == "nvfp4":
        outputs = [
            output("weight", "U8", rows, columns // 2),
            output("weight_scale", "F8_E4M3", rows, columns // NVFP4_BLOCK),
            output("weight_scale_2", "F32"),
        ]
    else:
        scale_shape: dict[str, tuple[int, ...]] = {
            "fp8_tensor": (),
            "fp8_channel": (rows,),
            "fp8_block": (-(-rows // BLOCK), 1, -(-columns // BLOCK), 1),
        }
        outputs = [output("weight", "F8_E4M3", rows, columns), output("weight_scale", "F32", *scale_shape[format])]
    if input_scale is not None:
        outputs.append(output("input_scale", "F32"))
    return Job(projection.entry, tuple(outputs), projection, format, input_scale)


def into_shards(jobs: Sequence[Job], shard_bytes: int) -> list[list[Job]]:
    """Jobs in order, cut into files of at most so many bytes (a job alone may be larger); a projection and its scales
    stay together."""
    shards: list[list[Job]] = [[]]
    held = 0
    for job in jobs:
        if shards[-1] and held + job.nbytes > shard_bytes:
            shards.append([])
            held = 0
        shards[-1].append(job)
        held += job.nbytes
    return shards


class ShardFile:
    """One safetensors file being written: header at once, tensors piece by piece at their places."""

    def __init__(self, path: Path, outputs: Sequence[Output]) -> None:
        ordered = sorted(outputs, key=lambda output: -_ITEM_BYTES.get(output.dtype, 1))
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        self._ends: dict[str, int] = {}
        self._next: dict[str, int] = {}
        end = 0
        for output in ordered:
            self._next[output.name] = end
            end += output.nbytes
            self._ends[output.name] = end
            header[output.name] = {
                "dtype": output.dtype,
                "shape": list(output.shape),
                "data_offsets": [end - output.nbytes, end],
            }
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        self._start = 8 + len(text)
        self._file = path.open("xb", buffering=0)
        self._file.write(struct.pack("<Q", len(text)) + text)

    def append(self, name: str, tensor: Tensor) -> None:
        """The next part of a tensor, from any device."""
        data = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
        self._file.seek(self._start + self._next[name])
        for first in range(0, len(data), COPY_BYTES):
            piece = data[first : first + COPY_BYTES]
            while piece:
                piece = piece[self._file.write(piece) :]
        self._next[name] += len(data)

    def __enter__(self) -> ShardFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._file:
            if kind is None:
                assert self._next == self._ends  # every byte was written
                os.fsync(self._file.fileno())
