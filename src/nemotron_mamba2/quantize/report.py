"""What was written, and how far it is from the source."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class TensorReport:
    """One quantised matrix.

    name: of the module in the output; format; shape: [out, in]; bytes_before, bytes_after: with all scales;
    relative_error: ‖dequantised − source‖ / ‖source‖ over all weights; parts: the same for the row ranges of an
    in_proj (z, x, B, C, dt), else empty; input_scale: static activation scale, or None.
    """

    name: str
    format: str
    shape: tuple[int, int]
    bytes_before: int
    bytes_after: int
    relative_error: float
    parts: dict[str, float]
    input_scale: float | None


@dataclass(frozen=True)
class QuantizationReport:
    """A whole run. algorithm: as the config files name it; search: of NVFP4 block scales, None where there are none;
    bytes_before, bytes_after: of all tensors; files: safetensors files written; kept: projections left as they were;
    notes: what a user should know, one line each."""

    source: str
    destination: str
    format: str
    algorithm: str
    search: str | None
    tensors: tuple[TensorReport, ...]
    kept: tuple[str, ...]
    bytes_before: int
    bytes_after: int
    files: int
    notes: tuple[str, ...]

    def worst(self, count: int = 10) -> list[TensorReport]:
        """The tensors with the largest relative error, worst first."""
        return sorted(self.tensors, key=lambda tensor: -tensor.relative_error)[:count]

    def record(self) -> dict[str, Any]:
        """All of it as plain values, for JSON."""
        return asdict(self)
