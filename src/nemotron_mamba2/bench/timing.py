"""Timing on a CUDA device: captured graphs, medians, and the ceilings of the machine measured in the same run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

from ..graph import capture

CEILING_BYTES = 2 << 30  # several times any L2
CEILING_SIDE = 8192


@dataclass(frozen=True)
class Ceilings:
    """What a device reaches: a large copy (read + write), a large read, and a large bf16 product."""

    copy_tb_s: float
    read_tb_s: float
    bf16_tflop_s: float


def captured(work: Callable[[], object]) -> Callable[[], None]:
    """work as a CUDA graph, warmed up before, so that compilation stays outside."""
    return capture(work)[0]


def microseconds(work: Callable[[], object], *, repeats: int = 20) -> float:
    """Median device time of one call."""
    for _ in range(3):
        work()
    times = []
    for _ in range(repeats):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e3)
    return median(times)


def ceilings() -> Ceilings:
    """The ceilings of the current CUDA device, now, on random data."""
    source = torch.randn(CEILING_BYTES // 4, device="cuda")
    target, matrix = torch.empty_like(source), source[: CEILING_SIDE**2].view(CEILING_SIDE, -1).bfloat16()
    copy = microseconds(lambda: target.copy_(source), repeats=5)
    read = microseconds(lambda: source.sum(), repeats=5)
    product = microseconds(lambda: matrix @ matrix, repeats=5)
    return Ceilings(2 * source.nbytes / copy / 1e6, source.nbytes / read / 1e6, 2 * CEILING_SIDE**3 / product / 1e6)
