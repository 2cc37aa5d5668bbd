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

from nemotron_mamba2.formats import FORMATS, Nvfp4, dequantize
from nemotron_mamba2.ops import gpu, reference
from nemotron_mamba2.ops.gpu import nvrtc, tiles
from nemotron_mamba2.ops.gpu.tiles import Tiles, Wide

linear = import_module("nemotron_mamba2.ops.gpu.linear")  # the package names the functions
step = import_module("nemotron_mamba2.ops.gpu.step")

SHARED_BYTES = 227 << 10  # of a block on Hopper
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


def product_image(tile: Tiles, format: str, rows_out: int, columns: int, architecture: str, *, norm: int = 0) -> bytes:
    constants = tiles.defines(format, columns, tiles.slices(rows_out, columns), tile, norm, residual=norm == 0)
    return nvrtc.compile_cubin(tiles.source(tile)[0], constants, architecture + "a" * isinstance(tile, Wide))


def linear_image(format: str, rows_out: int, columns: int, rows: int, architecture: str) -> bytes:
    tile = tiles.choose(format, rows_out, columns, rows, hopper=architecture == "sm_90")
    norm = int(rows <= linear.FUSED_ROWS)
    return product_image(tile, format, rows_out, columns, architecture, norm=norm)


def step_image(state: int, sequences: int, architecture: str) -> bytes:
    rows, warps = step.tiles(64, 128, sequences)
    defines = [*NANO.items(), ("STATE", state), ("RPW", rows), ("WARPS", warps)]
    return nvrtc.compile_cubin(nvrtc.source("common.cuh", "state.cuh", "step.cu"), defines, architecture)


def norm_image(architecture: str, order: int = 0) -> bytes:
    defines = [("K_", 4096), ("GROUPS", 8), ("GATED_", 1), ("ORDER", order)]
    return nvrtc.compile_cubin(linear.norm_source(), defines, architecture)


def unspilt(used: dict[str, int]) -> bool:
    return used["REG"] <= 255 and used["LOCAL"] == 0 and used["STACK"] <= 16


@pytest.mark.parametrize("rows", [1, 16, 64, 256])
@pytest.mark.parametrize("format", ["bf16", "fp8_block", "nvfp4"])
@pytest.mark.parametrize(("rows_out", "columns"), [(10304, 2688), (2688, 4096)])
def test_products_do_not_spill(format: str, rows_out: int, columns: int, rows: int, tmp_path: Path) -> None:
    used = usage(linear_image(format, rows_out, columns, rows, "sm_90"), tmp_path)
    assert unspilt(used), used


@pytest.mark.parametrize("rows", [1, 16, 64])
@pytest.mark.parametrize("format", ["bf16", "nvfp4"])
def test_products_with_fp32_results_do_not_spill(format: str, rows: int, tmp_path: Path) -> None:
    tile, count = tiles.choose(format, 131072, 2688, rows, hopper=True), tiles.slices(131072, 2688)
    for cut in {tile, tiles.Many(2, 2, 2, 4, 2)}:
        constants = tiles.defines(format, 2688, count, cut, out32=True)
        image = nvrtc.compile_cubin(tiles.source(cut)[0], constants, "sm_90" + "a" * isinstance(cut, Wide))
        assert unspilt(usage(image, tmp_path))


MEASURED = [
    (format, rows_out, columns, tile)
    for (format, rows_out, columns), cuts in tiles._measured().items()
    for _, tile in cuts
]


@pytest.mark.slow
@pytest.mark.parametrize(("format", "rows_out", "columns", "tile"), MEASURED)
def test_no_measured_cut_spills(format: str, rows_out: int, columns: int, tile: Tiles, tmp_path: Path) -> None:
    used = usage(product_image(tile, format, rows_out, columns, "sm_90"), tmp_path)
    assert unspilt(used), used


@pytest.mark.parametrize(("format", "rows_out", "columns", "tile"), MEASURED)
def test_measured_cuts_can_be_launched(format: str, rows_out: int, columns: int, tile: Tiles) -> None:
    count = tiles.slices(rows_out, columns)
    assert tile.shared_bytes(format, count) <= SHARED_BYTES
    assert tile.threads(count) <= 1024
    if isinstance(tile, Wide):
        assert count % (tile.WS * tile.CL * tiles.grouped(count)) == 0
        assert not tile.SUM or (tile.WS * tile.CL == 1 and tiles.grouped(count) == 1)


@pytest.mark.parametrize("rows", [1, 2, 8, 9, 16, 17, 32, 33, 64, 65, 256, 300, 4096])
@pytest.mark.parametrize(("rows_out", "columns"), [(10304, 2688), (2688, 4096), (17504, 3136), (3136, 7680), (64, 128)])
@pytest.mark.parametrize("hopper", [True, False])
def test_every_row_count_has_a_cut(rows: int, rows_out: int, columns: int, hopper: bool) -> None:
    for format in FORMATS:
        tile = tiles.choose(format, rows_out, columns, rows, hopper=hopper)
        blocks, token_blocks = tile.grid(rows_out, rows)
        assert blocks * token_blocks > 0
        assert tile.shared_bytes(format, tiles.slices(rows_out, columns)) <= (SHARED_BYTES if hopper else 96 << 10)


@pytest.mark.parametrize(("state", "sequences"), [(0, 1), (0, 64), (2, 64)])
def test_the_step_does_not_spill(state: int, sequences: int, tmp_path: Path) -> None:
    used = usage(step_image(state, sequences, "sm_90"), tmp_path)
    assert used["LOCAL"] == 0 and used["STACK"] <= 16, used


@pytest.mark.parametrize("architecture", [a for a in ARCHITECTURES if a != "sm_90"])
def test_every_kernel_compiles_for(architecture: str) -> None:
    for format, rows in (("fp8_tensor", 1), ("nvfp4", 1), ("nvfp4", 256)):
        assert linear_image(format, 10304, 2688, rows, architecture)
    assert step_image(2, 1, architecture)
    assert norm_image(architecture)


@pytest.mark.parametrize("order", [1, 2])
def test_norms_that_order_rows_compile(order: int, tmp_path: Path) -> None:
    assert unspilt(usage(norm_image("sm_90", order), tmp_path))


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
