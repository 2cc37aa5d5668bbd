"""Timing on a CUDA device: captured graphs, medians, and the ceilings of the machine measured in the same run."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import torch


def captured(work: Callable[[], object]) -> Callable[[], None]:
    """work as a CUDA graph; warmed up first, so that compilation stays outside."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


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


def ceilings() -> dict[str, float]:
    """TB/s of a large copy (read + write) and of a read, on this device now."""
    source = torch.randn(1 << 29, device="cuda")  # 2 GiB
    target = torch.empty_like(source)
    copy = 2 * source.nbytes / microseconds(lambda: target.copy_(source), repeats=5) / 1e6
    read = source.nbytes / microseconds(lambda: source.sum(), repeats=5) / 1e6
    return {"copy_tb_s": copy, "read_tb_s": read}
