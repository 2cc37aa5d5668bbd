"""What can be known of the GPU kernels without a GPU: they compile for every architecture, they do not spill, and NVFP4
packing puts every code and scale where the kernel looks for it."""

from __future__ import annotations

import re
import subprocess
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from pathlib import Path

import pytest
import torch

from nemotron_mamba2.formats import Nvfp4, dequantize
from nemotron_mamba2.ops import gpu, reference
from nemotron_mamba2.ops.gpu import nvrtc

linear = import_module("nemotron_mamba2.ops.gpu.linear")  # the package names the functions
step = import_module("nemotron_mamba2.ops.gpu.step")

ARCHITECTURES = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120")
NANO = {"H": 64, "P": 64, "G": 8, "N": 128, "W": 16, "R": 31, "KR": 11, "KW": 4, "HAS_BIAS": 1, "HAS_LIMIT": 0}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEMOTRON_MAMBA2_CACHE", str(tmp_path))


def usage(image: bytes, folder: Path) -> dict[str, int]:
    """Registers, stack and local bytes per thread, as the compiler reports them."""
    spec = find_spec("triton")
    assert spec is not None and spec.origin is not None, "triton is missing: run scripts/install dev"
    (folder / "kernel.cubin").write_bytes(image)
    tool = Path(spec.origin).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    text = subprocess.run(
        [tool, "-res-usage", folder / "kernel.cubin"], capture_output=True, text=True, check=True
    ).stdout
    return {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}


def linear_image(format: str, rows_out: int, columns: int, rows: int, architecture: str) -> bytes:
    tile = linear.tiles(format, rows_out, rows)
    norm = int(rows <= linear.FUSED_ROWS)
    count = linear.slices(rows_out, columns)
    defines = linear.step_defines(format, columns, count, tile, norm, groups=1, residual=False)
    return nvrtc.compile_cubin(linear.step_source(defines)[0], defines, architecture)


def step_image(state: int, sequences: int, architecture: str) -> bytes:
    rows, warps = step.tiles(64, 128, sequences)
    defines = [*NANO.items(), ("STATE", state), ("RPW", rows), ("WARPS", warps)]
    return nvrtc.compile_cubin(nvrtc.source("common.cuh", "state.cuh", "step.cu"), defines, architecture)


def norm_image(architecture: str) -> bytes:
    defines = [("K_", 4096), ("GROUPS", 8), ("GATED_", 1)]
    return nvrtc.compile_cubin(nvrtc.source("common.cuh", "norm.cuh", "norm.cu"), defines, architecture)


@pytest.mark.parametrize("rows", [1, 64, 256])
@pytest.mark.parametrize("format", ["bf16", "fp8_block", "nvfp4"])
def test_products_do_not_spill(format: str, rows: int, tmp_path: Path) -> None:
    used = usage(linear_image(format, 10304, 2688, rows, "sm_90"), tmp_path)
    assert used["REG"] <= 255 and used["LOCAL"] == 0 and used["STACK"] <= 16, used


@pytest.mark.parametrize(("state", "sequences"), [(0, 1), (0, 64), (2, 64)])
def test_the_step_does_not_spill(state: int, sequences: int, tmp_path: Path) -> None:
    used = usage(step_image(state, sequences, "sm_90"), tmp_path)
    assert used["LOCAL"] == 0 and used["STACK"] <= 16, used


@pytest.mark.parametrize("architecture", [a for a in ARCHITECTURES if a != "sm_90"])
def test_every_kernel_compiles_for(architecture: str) -> None:
    for format in ("fp8_tensor", "nvfp4"):
        assert linear_image(format, 10304, 2688, 1, architecture)
    assert step_image(2, 1, architecture)
    assert norm_image(architecture)


def test_a_damaged_cache_entry_is_built_again(tmp_path: Path) -> None:
    image = norm_image("sm_90")
    [entry] = (tmp_path / "cubin").iterdir()
    entry.write_bytes(entry.read_bytes()[:-100])
    assert norm_image("sm_90") == image
    entry.write_bytes(b"")
    assert norm_image("sm_90") == image


def unpack(weight: Nvfp4) -> torch.Tensor:
    """The values that linear.cu sees: fp32 [out, in], from the packed words and scale codes alone."""
    words, codes = linear.pack(weight)
    rows, columns = weight.shape
    words = words.view(rows // 16, columns // 64, 8, 4, 4)  # tile, chunk, g, t, k16 step
    codes = codes.view(rows // 16, columns // 64, 8, 4, 2)  # tile, chunk, g, t, half
    e2m1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    out = torch.empty(rows // 16, 2, 8, columns // 64, 4, 4, 2, 2)  # tile, half, g, chunk, t, step, pair, element
    for element in range(2):
        lane = (words >> (16 * element)) & 0xFFFF
        for place, (magnitude, sign) in enumerate(
            (
                (lane >> 6 & 7, lane >> 15 & 1),
                (lane >> 3 & 7, lane >> 12 & 1),
                (lane & 7, lane >> 9 & 1),
                ((lane >> 13 & 3) << 1 | lane >> 10 & 1, lane >> 11 & 1),
            )
        ):
            pair, half = place // 2, place % 2
            exponent, fraction = codes[..., half].int() >> 3, codes[..., half].int() & 7
            scale = torch.ldexp(1 + fraction / 8, exponent - 9).unsqueeze(-1)
            value = e2m1[magnitude.long()] * (1 - 2 * sign) * scale
            out[:, half, :, :, :, :, pair, element] = value.permute(0, 2, 1, 3, 4)
    return out.reshape(rows, columns) * weight.global_scale


@pytest.mark.parametrize("name", reference.__all__)
def test_both_back_ends_have_the_same_signature(name: str) -> None:
    ours, theirs = getattr(reference, name), getattr(gpu, name)
    if callable(ours):
        assert list(signature(theirs).parameters) == list(signature(ours).parameters)


def test_packing_keeps_every_value() -> None:
    weight = reference.quantize(torch.randn(48, 192) * torch.rand(48, 1).mul(6).exp(), "nvfp4")
    assert isinstance(weight, Nvfp4)
    scale = weight.scale.float()
    scale[3, 2], scale[4, 1], scale[5, 0] = 0.0, 2.0**-9, 448.0  # zero, smallest and largest e4m3 scales
    weight = Nvfp4(weight.weight, scale.to(torch.float8_e4m3fn), weight.global_scale)
    torch.testing.assert_close(unpack(weight), dequantize(weight), rtol=1e-6, atol=0)
