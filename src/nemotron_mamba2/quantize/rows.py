"""One matrix into its format, some rows at a time: the largest magnitude first, then codes, scales and errors.

Memory is a few times the rows in hand, whatever the matrix. A matrix made in pieces has the bits of one made at once:
what all rows share is found before the first is quantised. The same code runs on a CPU and, by moving the rows, a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..config import Mamba2Config
from ..errors import CheckpointError
from ..formats import BLOCK, Fp8Block, Fp8Channel, Fp8Tensor, Nvfp4, Weight, dequantize
from .layout import Job, ShardFile

PIECE_ELEMENTS = 1 << 20  # fp32 4 MB: the dozen temporaries of a search stay near the cache

# Most that B, C or dt may lose before a preset leaves their in_proj alone. Codes in range lose 2.7 % (e4m3) and 9 %
# (e2m1) of a normal distribution.
PART_LIMITS = {"fp8_tensor": 0.05, "fp8_channel": 0.05, "fp8_block": 0.05, "nvfp4": 0.2}


@dataclass(frozen=True)
class Means:
    """What quantising needs besides the matrix. ops: a back end; device: where it runs; search: of block scales."""

    ops: Any
    device: torch.device
    search: str


def in_proj_parts(config: Mamba2Config) -> dict[str, slice]:
    """The rows of an in_proj: z · x · B · C · dt."""
    groups = config.n_groups * config.ssm_state_size
    widths = {"z": config.d_inner, "x": config.d_inner, "B": groups, "C": groups, "dt": config.mamba_num_heads}
    parts, start = {}, 0
    for name, width in widths.items():
        parts[name] = slice(start, start + width)
        start += width
    return parts


def largest_magnitude(matrix: Tensor, name: str, device: torch.device) -> Tensor:
    """fp32 [] on the device. matrix: [out, in]. Raises: CheckpointError when a value is not finite."""
    largest = torch.zeros((), device=device)
    for rows in _pieces(matrix):
        low, high = torch.aminmax(rows.to(device))
        largest = torch.maximum(largest, torch.maximum(-low, high).float())
    if not torch.isfinite(largest):
        raise CheckpointError(f"{name}: holds values that are not finite; mend the source first")
    return largest


def write_quantised(job: Job, matrix: Tensor, file: ShardFile, *, means: Means) -> tuple[Tensor, Tensor]:
    """Quantise a matrix into an open file.

    matrix: [out, in]. Returns: fp64 [out] each: square error, and square of the source, of every row.
    """
    assert job.projection is not None
    name = job.projection.name
    largest = largest_magnitude(matrix, job.entry.name, means.device)
    scales: list[Tensor] = []
    errors: list[tuple[Tensor, Tensor]] = []
    weight: Weight | None = None
    for rows in _pieces(matrix):
        weight, *error = _quantise(rows, job.format, largest=largest, means=means)
        file.append(f"{name}.weight", weight.weight)
        if isinstance(weight, Fp8Channel | Fp8Block | Nvfp4):
            scales.append(weight.scale.cpu())
        errors.append((error[0].cpu(), error[1].cpu()))
    if isinstance(weight, Fp8Tensor):
        scales.append(weight.scale)
    for scale in scales:
        file.append(f"{name}.weight_scale", scale)
    if isinstance(weight, Nvfp4):
        file.append(f"{name}.weight_scale_2", weight.global_scale)
    if job.input_scale is not None:
        file.append(f"{name}.input_scale", torch.tensor(job.input_scale, dtype=torch.float32))
    return torch.cat([e for e, _ in errors]), torch.cat([s for _, s in errors])


def lost_parts(matrix: Tensor, config: Mamba2Config, format: str, *, means: Means) -> dict[str, float]:
    """Relative errors of B, C and dt that are above the limit. matrix: an in_proj [in_proj_rows, hidden]."""
    parts = in_proj_parts(config)
    first = parts["B"].start // BLOCK * BLOCK  # a whole tile of fp8_block
    largest = largest_magnitude(matrix, "in_proj", means.device)
    pairs = [_quantise(rows, format, largest=largest, means=means)[1:] for rows in _pieces(matrix[first:])]
    wrong, power = (torch.cat(column).cpu() for column in zip(*pairs, strict=True))
    shares = {name: slice(parts[name].start - first, parts[name].stop - first) for name in ("B", "C", "dt")}
    return {name: value for name, value in relative_errors(wrong, power, shares).items() if value > PART_LIMITS[format]}


def relative_errors(wrong: Tensor, power: Tensor, parts: Mapping[str, slice]) -> dict[str, float]:
    """√(Σ square error / Σ square) over each range of rows; 0 where the source is 0. wrong, power: fp64 [out]."""
    found = {}
    for name, rows in parts.items():
        whole = power[rows].sum().item()
        found[name] = (wrong[rows].sum().item() / whole) ** 0.5 if whole > 0 else 0.0
    return found


def _quantise(rows: Tensor, format: str, *, largest: Tensor, means: Means) -> tuple[Weight, Tensor, Tensor]:
    """The weight, and fp64 [rows] each: square error and square of the source."""
    values = rows.to(means.device).float()
    weight = means.ops.quantize(values, format, search=means.search, largest=largest)
    wrong = dequantize(weight).sub_(values).square_().sum(-1)
    return weight, wrong.double(), values.square().sum(-1).double()


def _pieces(matrix: Tensor) -> Iterator[Tensor]:
    """Rows of a matrix in order, at multiples of 128."""
    count = max(1, PIECE_ELEMENTS // (BLOCK * max(1, matrix.shape[1]))) * BLOCK
    for first in range(0, len(matrix), count):
        yield matrix[first : first + count]
