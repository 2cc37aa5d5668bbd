"""The attention kernels without a GPU: right in the interpreter, and compiled for every architecture without spills."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from test_gpu_compile import ARCHITECTURES, SHARED_BYTES, usage

kernels = import_module("nemotron_mamba2.ops.gpu.attention")
HERE = Path(__file__).parent

SHAPES = {"nano": (32, 2, 128), "nano4b": (40, 8, 128), "narrow": (16, 4, 64), "odd": (12, 4, 80)}
LARGEST = {"sm_80": 163 << 10, "sm_89": 99 << 10, "sm_90": SHARED_BYTES, "sm_100": SHARED_BYTES, "sm_120": 99 << 10}


def test_in_the_interpreter():
    """In a process of its own, because Triton reads the variable when it is imported."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", HERE / "interpreted_attention.py"]
    done = subprocess.run(
        command,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        cwd=HERE.parent,
    )
    assert done.returncode == 0, done.stdout[-4000:]


def compiled(function, types: dict[str, str], constants: dict, options: dict, architecture: str):
    """A kernel as it is launched: pointers and strides are multiples of 16 where it lets Triton assume so."""
    signature, attributes = {}, {}
    for i, name in enumerate(function.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        signature[name] = types[name]
        free = name in function.do_not_specialize or name in function.do_not_specialize_on_alignment
        if not free and types[name] != "fp32":
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(
        function, signature, {(function.arg_names.index(name),): value for name, value in constants.items()}, attributes
    )
    return triton.compile(source, target=GPUTarget("cuda", int(architecture[3:]), 32), options=options)


def attend_image(shape: tuple[int, int, int], fp8: bool, architecture: str):
    heads, kv_heads, head_dim = shape
    page = "*u8" if fp8 else "*bf16"
    types = {
        "found": "*fp32", "stats": "*fp32", "q": "*bf16", "keys": page, "values": page, "k_scale": "*fp32",
        "table": "*i32", "row_sequence": "*i32", "row_keys": "*i32", "q_stride": "i32", "table_sequence_stride": "i32",
        "table_page_stride": "i32", "max_splits": "i32", "scale": "fp32",
    }  # fmt: skip
    constants = {
        "HEADS": heads, "KV_HEADS": kv_heads, "D": head_dim, "GROUP_PAD": 16,
        "D_PAD": triton.next_power_of_2(head_dim), "PAGE_TOKENS": 16, "FINE": kernels.FINE_TOKENS,
        "SPLITS": kernels.FINE_SPLITS, "COARSE": kernels.COARSE_TOKENS, "BLOCK": kernels.ATTEND["BLOCK"],
        "FP8": fp8, "DECODE": architecture == "sm_80", "SCALED": fp8,
    }  # fmt: skip
    options = {name: value for name, value in kernels.ATTEND.items() if name != "BLOCK"}
    return compiled(kernels._attend, types, constants, options, architecture)


def combine_image(shape: tuple[int, int, int], fp8: bool, architecture: str):
    heads, _, head_dim = shape
    types = {
        "out": "*bf16", "found": "*fp32", "stats": "*fp32", "v_scale": "*fp32", "row_keys": "*i32", "out_stride": "i32",
        "max_splits": "i32",
    }  # fmt: skip
    constants = {
        "HEADS": heads, "D": head_dim, "D_PAD": triton.next_power_of_2(head_dim), "FINE": kernels.FINE_TOKENS,
        "SPLITS": kernels.FINE_SPLITS, "COARSE": kernels.COARSE_TOKENS, "BLOCK": kernels.COMBINE["BLOCK"],
        "SCALED": fp8,
    }  # fmt: skip
    options = {name: value for name, value in kernels.COMBINE.items() if name != "BLOCK"}
    return compiled(kernels._combine, types, constants, options, architecture)


def store_image(width: int, fp8: bool, architecture: str):
    page = "*u8" if fp8 else "*bf16"
    types = {
        "keys": page, "values": page, "k": "*bf16", "v": "*bf16", "k_scale": "*fp32", "v_scale": "*fp32",
        "places": "*i32", "k_stride": "i32", "v_stride": "i32",
    }  # fmt: skip
    constants = {
        "WIDTH": width, "PAD": triton.next_power_of_2(width), "FP8": fp8, "K_SCALED": fp8, "V_SCALED": fp8,
    }  # fmt: skip
    return compiled(kernels._store, types, constants, {"num_warps": 2}, architecture)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_kernels_do_not_spill(fp8, architecture, tmp_path):
    images = [attend_image(SHAPES["nano"], fp8, architecture), combine_image(SHAPES["nano"], fp8, architecture)]
    if architecture != "sm_80" or not fp8:
        images.append(store_image(256, fp8, architecture))
    for image in images:
        used = usage(image.asm["cubin"], tmp_path)
        assert used["LOCAL"] == 0 and used["STACK"] <= 16, used
        assert image.metadata.shared <= LARGEST[architecture]


@pytest.mark.parametrize("shape", list(SHAPES.values())[1:], ids=list(SHAPES)[1:])
def test_every_shape_compiles(shape, tmp_path):
    for image in (attend_image(shape, False, "sm_90"), attend_image(shape, True, "sm_90")):
        assert usage(image.asm["cubin"], tmp_path)["LOCAL"] == 0


@pytest.mark.parametrize("tokens", [0, 1, 128, 129, 4095, 4096, 4097, 4608, 4609, 131072])
def test_stretches_cover_every_position_once(tokens):
    begins = [i * 128 if i < 32 else 4096 + (i - 32) * 512 for i in range(kernels.split_count(tokens) + 1)]
    assert begins[-1] >= tokens and (not tokens or begins[-2] < tokens)
