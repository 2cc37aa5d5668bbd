"""CUDA C++ at run time: NVRTC to compile, the driver to load and launch, a disk cache between.

Needs no nvcc and no compiler on the machine: both libraries come with a CUDA build of torch. Compiled code is cached
under `config.cache_dir`, keyed by source, options, architecture and compiler version; each entry carries its own
checksum, and one that does not match is built again. Kernels may be launched with programmatic dependent launch: they
start while the kernel before them still runs, and wait for it themselves.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources, util
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...config import cache_dir
from ...errors import NoKernel, ShapeError

NVRTC_NAMES = ("libnvrtc.so.13", "libnvrtc.so.12", "nvrtc64_130_0.dll", "nvrtc64_120_0.dll")
MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
REGISTERS, LOCAL_BYTES = 4, 3  # CU_FUNC_ATTRIBUTE_NUM_REGS, _LOCAL_SIZE_BYTES
BF16_TILES, WHOLE_LINES = 9, 2  # CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, _L2_PROMOTION_L2_128B
PROGRAMMATIC_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


class _Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_int), ("rest", ctypes.c_char * 60)]


class _Launch(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_uint) for name in ("gx", "gy", "gz", "bx", "by", "bz", "shared")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("attribute_count", ctypes.c_uint),
    ]


@dataclass(frozen=True)
class Kernel:
    """A loaded kernel. registers, local_bytes: per thread, as the compiler reports them."""

    handle: ctypes.c_void_p
    threads: int
    registers: int
    local_bytes: int
    programmatic: bool

    def launch(self, grid: tuple[int, int], shared_bytes: int, arguments: Sequence[Any]) -> None:
        """Queue the kernel on torch's current stream. arguments: ctypes values, in the kernel's order."""
        pointers = (ctypes.c_void_p * len(arguments))(
            *(ctypes.cast(ctypes.pointer(value), ctypes.c_void_p) for value in arguments)
        )
        attribute = _Attribute(PROGRAMMATIC_SERIALIZATION, b"", 1)
        config = _Launch(*grid, 1, self.threads, 1, 1, shared_bytes)
        config.stream = torch.cuda.current_stream().cuda_stream
        config.attributes = ctypes.pointer(attribute)
        config.attribute_count = int(self.programmatic)
        _check(_driver().cuLaunchKernelEx(ctypes.byref(config), self.handle, pointers, None), "cuLaunchKernelEx")


def source(*names: str) -> str:
    """The text of CUDA files of this package, one after the other."""
    return "\n".join(resources.files(__package__).joinpath(name).read_text(encoding="utf-8") for name in names)


def compile_cubin(text: str, defines: Sequence[tuple[str, int]], architecture: str) -> bytes:
    """Device code for an architecture such as "sm_90", from the cache or from NVRTC. Needs no GPU.

    Raises: NoKernel with the compiler's own words.
    """
    options = [f"--gpu-architecture={architecture}", "--std=c++17", *(f"-D{name}={value}" for name, value in defines)]
    key = hashlib.sha256("\0".join([text, *options, _version()]).encode()).hexdigest()
    entry = cache_dir() / "cubin" / key
    cached = _read_entry(entry)
    if cached is None:
        cached = _compile(text, options)
        _write_entry(entry, cached)
    return cached


def load(
    text: str, name: str, defines: Sequence[tuple[str, int]], *, threads: int, shared_bytes: int, specific: bool = False
) -> Kernel:
    """Compile for the current device and load. shared_bytes: the most dynamic shared memory of any launch. specific:
    with instructions that only this architecture has, such as wgmma of sm_90a."""
    major, minor = torch.cuda.get_device_capability()
    image = compile_cubin(text, defines, f"sm_{major}{minor}" + "a" * specific)
    driver, module, function = _driver(), ctypes.c_void_p(), ctypes.c_void_p()
    torch.cuda.current_stream()  # the context exists from here on
    _check(driver.cuModuleLoadData(ctypes.byref(module), image), "cuModuleLoadData")
    _check(driver.cuModuleGetFunction(ctypes.byref(function), module, name.encode()), "cuModuleGetFunction")
    if shared_bytes > 32 << 10:  # with what is static it may pass the 48 KB that need no asking
        _check(driver.cuFuncSetAttribute(function, MAX_DYNAMIC_SHARED, shared_bytes), "cuFuncSetAttribute")
    counts = []
    for attribute in (REGISTERS, LOCAL_BYTES):
        value = ctypes.c_int()
        _check(driver.cuFuncGetAttribute(ctypes.byref(value), attribute, function), "cuFuncGetAttribute")
        counts.append(value.value)
    return Kernel(function, threads, counts[0], counts[1], programmatic=major >= 9)


def _compile(text: str, options: Sequence[str]) -> bytes:
    nvrtc, program = _nvrtc(), ctypes.c_void_p()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"kernel.cu", 0, None, None)
    encoded = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    status = nvrtc.nvrtcCompileProgram(program, len(options), encoded)
    if status:
        size = ctypes.c_size_t()
        nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetProgramLog(program, log)
        raise NoKernel(f"NVRTC: {' '.join(options)}: {log.value.decode(errors='replace').strip()}")
    size = ctypes.c_size_t()
    nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
    image = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetCUBIN(program, image)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return image.raw


def _read_entry(entry: Path) -> bytes | None:
    try:
        content = entry.read_bytes()
    except OSError:
        return None
    digest, image = content[:32], content[32:]
    return image if image and hashlib.sha256(image).digest() == digest else None


def _write_entry(entry: Path, image: bytes) -> None:
    """Atomic, so that a killed process leaves no half entry; a read-only cache is no error."""
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=entry.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(hashlib.sha256(image).digest() + image)
        Path(temporary).replace(entry)
    except OSError:
        return


@cache
def _nvrtc() -> ctypes.CDLL:
    places = [Path(p) for p in (util.find_spec("nvidia") or util.find_spec("torch")).submodule_search_locations or []]  # type: ignore[union-attr]
    found = [str(path) for place in places for name in NVRTC_NAMES for path in place.glob(f"**/{name}")]
    for name in (*NVRTC_NAMES, *found):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise NoKernel("NVRTC: no library found; install a CUDA build of torch, or the package nvidia-cuda-nvrtc")


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")


def _version() -> str:
    major, minor = ctypes.c_int(), ctypes.c_int()
    _nvrtc().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return f"{major.value}.{minor.value}"


def _check(status: int, call: str) -> None:
    if status:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(status, ctypes.byref(text))
        raise RuntimeError(f"{call}: {(text.value or b'unknown error').decode()}")


def rows16(x: Tensor) -> Tensor:
    """x with unit inner stride and rows that begin at multiples of 16 bytes."""
    aligned = x.stride(-1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0
    return x if aligned else x.clone(memory_format=torch.contiguous_format)  # a single row counts as contiguous


def expect_rows16(out: Tensor) -> None:
    """Raises ShapeError for an output whose rows do not begin at multiples of 16 bytes: the kernels store so much."""
    if rows16(out) is not out:
        raise ShapeError(
            f"out: expected unit inner stride and rows at multiples of 16 bytes, found strides {list(out.stride())} "
            f"from address {out.data_ptr() % 16} mod 16; pass another one, or none"
        )


def argument(value: Tensor | int | float | None) -> ctypes._SimpleCData[Any]:
    """A kernel argument: a tensor's address, a 64-bit integer, or a float."""
    if isinstance(value, float):
        return ctypes.c_float(value)
    return (
        ctypes.c_longlong(value)
        if isinstance(value, int)
        else ctypes.c_void_p(None if value is None else value.data_ptr())
    )


def tensor_map(x: Tensor, rows: int, columns: int) -> ctypes.Array[Any]:
    """A kernel argument by which the copy engine loads tiles of x, bf16 [T, width]: rows × columns, swizzled over the
    tile's row of 2 · columns = 128, 64 or 32 bytes; what lies outside of x reads as zeros."""
    memory = (ctypes.c_uint8 * 192)()
    offset = -ctypes.addressof(memory) % 64
    found = (ctypes.c_uint8 * 128).from_buffer(memory, offset)
    sizes = (ctypes.c_uint64 * 2)(x.shape[1], x.shape[0])
    strides, box = (ctypes.c_uint64 * 1)(2 * x.stride(0)), (ctypes.c_uint32 * 2)(columns, rows)
    swizzle = {64: 3, 32: 2, 16: 1}[columns]
    encode = _driver().cuTensorMapEncodeTiled
    place, units = ctypes.c_void_p(x.data_ptr()), (ctypes.c_uint32 * 2)(1, 1)
    _check(
        encode(found, BF16_TILES, 2, place, sizes, strides, box, units, 0, swizzle, WHOLE_LINES, 0),
        "cuTensorMapEncodeTiled",
    )
    return found
