"""What can be known of the prompt kernels without a GPU: they compile for every architecture and do not spill."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

from nemotron_mamba2.ops.gpu import nvrtc
from test_gpu_compile import ARCHITECTURES, _own_cache, usage  # noqa: F401  (a fixture)

conv = import_module("nemotron_mamba2.ops.gpu.conv")  # the package names the functions
scan = import_module("nemotron_mamba2.ops.gpu.scan")

CONV = {"H": 64, "P": 64, "G": 8, "N": 128, "W": 16, "R": 31, "KR": 11, "KW": 4, "HAS_BIAS": 1, "HAS_LIMIT": 0}


def scan_image(P: int, N: int, state: int, how: scan.Cut, architecture: str) -> bytes:
    shape = {"H": 64, "P": P, "G": 8, "N": N, "W": 16, "STATE": state, "ROUND": 0}
    return nvrtc.compile_cubin(scan.source(how), [*shape.items(), *how.defines(N)], architecture)


def conv_image(rows: int, architecture: str) -> bytes:
    sizes = {
        "TILE": conv.tile_rows(rows),
        "THREADS": conv.THREADS,
        "BLOCKS": conv.BLOCKS,
        "STEP": conv.STEP,
        "VEC": conv.VEC,
    }
    text = nvrtc.source("common.cuh", "conv.cu")
    return nvrtc.compile_cubin(text, [*CONV.items(), *sizes.items()], architecture)


def cast_image(dynamic: int, architecture: str) -> bytes:
    defines = [("K_", 4096), ("GROUPS", 8), ("NORM", 2), ("DYNAMIC", dynamic)]
    return nvrtc.compile_cubin(nvrtc.source("common.cuh", "norm.cuh", "cast.cu"), defines, architecture)


def values_image(format: int, architecture: str) -> bytes:
    return nvrtc.compile_cubin(nvrtc.source("common.cuh", "dequantize.cu"), [("FORMAT", format)], architecture)


@pytest.mark.parametrize(
    ("P", "N", "how"),
    [
        (64, 128, scan.Cut(32, 4, 3)),
        (64, 128, scan.Cut(64, 3, 2)),
        (80, 128, scan.Cut(80, 2, 2)),
        (64, 128, scan.Cut(32, 3, 0)),
        (64, 256, scan.Cut(64, 2, 0)),
        (64, 96, scan.Cut(64, 3, 0)),
    ],
)
def test_the_scan_does_not_spill(P: int, N: int, how: scan.Cut, tmp_path: Path) -> None:
    used = usage(scan_image(P, N, 0, how, "sm_90a" if how.outputs else "sm_90"), tmp_path)
    assert used["LOCAL"] == 0 and used["STACK"] <= 16, used


@pytest.mark.parametrize("rows", [256, 8192])
def test_the_convolution_does_not_spill(rows: int, tmp_path: Path) -> None:
    used = usage(conv_image(rows, "sm_90"), tmp_path)
    assert used["LOCAL"] == 0 and used["STACK"] <= 16, used


@pytest.mark.parametrize("architecture", [a for a in ARCHITECTURES if a != "sm_90"])
def test_every_prompt_kernel_compiles_for(architecture: str) -> None:
    assert scan_image(64, 128, 2, scan.Cut(32, 2, 0), architecture)
    assert conv_image(256, architecture)
    assert cast_image(1, architecture)
    assert all(values_image(format, architecture) for format in (1, 2, 3, 4))


@pytest.mark.parametrize("columns", [16, 32, 64, 80])
@pytest.mark.parametrize("N", [64, 128])
def test_a_cut_fits_shared_memory(columns: int, N: int) -> None:
    limit = 227 << 10
    fitting = [s for s in (4, 3, 2) if scan.shared_bytes(scan.Cut(columns, s, 2), N) <= limit]
    assert fitting, (columns, N)
