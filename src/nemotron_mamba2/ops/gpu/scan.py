"""The recurrence over ragged prompt rows in one launch: wrapper of `scan.cu`.

Bytes: x, B, C, dt once from memory (B and C again from L2 for every block of their group), y once, the state once per
sequence. Flops per chunk of Q rows and head: 2·Q·N·(10/16·Q + 2·P) + 10/8·Q²·P. How a head's P state rows are cut over
blocks follows the number of heads and sequences; a row's bits do not depend on it.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from ...batch import Rows
from ...errors import ShapeError
from .. import LayerState
from . import nvrtc
from .nvrtc import argument, expect_rows16, rows16
from .step import STATE_CODES, state_key
from .wgmma import wgmma

CHUNK = 64


def scan(
    xbc: Tensor,
    dt: Tensor,
    state: LayerState,
    rows: Rows,
    *,
    A_log: Tensor,
    D: Tensor,
    reproducible: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """As `ops.reference.scan`, for bf16 activations. Needs head_dim a multiple of 16, state size a multiple of 32 and
    window_rows a divisor of 64. Raises: ShapeError."""
    _, H, P, N = state.ssm.shape
    W = state.window_rows
    if P % 16 or N % 32 or CHUNK % W or xbc.dtype != torch.bfloat16:
        raise ShapeError(
            "scan: the kernel needs bfloat16 rows, head_dim % 16 = 0, state size % 32 = 0 and window_rows that divide "
            f"{CHUNK}; found {xbc.dtype}, {P}, {N}, {W}"
        )
    if out is None:
        out = xbc.new_empty(rows.total_rows, H * P)
    if not rows.total_rows:
        return out
    xbc = rows16(xbc)
    expect_rows16(out)
    how = cut(H, P, N, len(rows.slots), xbc.device)
    shape = (("H", H), ("P", P), ("G", state.ring_B.shape[2]), ("N", N), ("W", W))
    flags = (("STATE", STATE_CODES[state.ssm.dtype]), ("ROUND", int(reproducible)))
    kernel = _kernel(xbc.device.index, (*shape, *flags), how)
    rest = [*map(argument, (dt, *rows.cursors, A_log, D)), argument(out.stride(0))]
    key = ctypes.c_uint(state_key(state.seed, state.layer))
    if how.outputs:
        panel = next(width for width in (64, 32, 16) if how.columns % width == 0)
        wide = nvrtc.tensor_map(xbc, CHUNK, 64)
        maps = (wide, wide if panel == 64 else nvrtc.tensor_map(xbc, CHUNK, panel))
        arguments = [*map(argument, (out, state.ssm)), *rest, argument(dt.stride(0)), key, *maps]
    else:
        arguments = [*map(argument, (out, state.ssm, xbc)), *rest, *map(argument, (xbc.stride(0), dt.stride(0))), key]
    kernel.launch((H * (P // how.columns), len(rows.slots)), shared_bytes(how, N), arguments)
    return out


def products(columns: int) -> str:
    """The wgmma calls of `scan_hopper.cu` for blocks of that many state rows, as CUDA text."""
    return "\n".join(
        (
            wgmma("wgmma_scores", 64, a="descriptor"),
            wgmma("wgmma_past", columns, a="descriptor", transpose_b=1),
            wgmma("wgmma_values", columns, transpose_b=1),
            wgmma("wgmma_state", columns, a="descriptor", transpose_a=1, transpose_b=1),
        )
    )


def unserved_mixer(head_dim: int, state_size: int) -> str:
    """Why the kernels of the recurrence cannot take a layer's shape; "" when they can."""
    if head_dim % 16 or state_size % 32:
        return f"head_dim must be a multiple of 16 and ssm_state_size of 32, found {head_dim}, {state_size}"
    return ""


@dataclass(frozen=True)
class Cut:
    """How blocks share the work. columns: state rows of a block; stages: chunks in shared memory; outputs: warpgroups
    that compute y, on wgmma, or 0: the kernel for every architecture."""

    columns: int
    stages: int
    outputs: int

    @property
    def threads(self) -> int:
        return 128 * (2 + self.outputs) if self.outputs else 256

    def defines(self, N: int) -> tuple[tuple[str, int], ...]:
        """What a variant is compiled with, beside the layer's shape."""
        sizes = (("PT", self.columns), ("STAGES", self.stages), ("OUTPUTS", self.outputs))
        return (*sizes, ("SHARED_BYTES", shared_bytes(self, N)))


def cut(H: int, P: int, N: int, sequences: int, device: torch.device) -> Cut:
    """The cut for a shape: two blocks per head where heads alone leave multiprocessors idle."""
    properties = torch.cuda.get_device_properties(device)
    limit: int = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]
    hopper = (properties.major, properties.minor) == (9, 0) and N in (64, 128)  # more leaves no registers
    columns = P
    if P % 32 == 0 and 2 * H * sequences <= properties.multi_processor_count:
        columns = P // 2
    for size in (columns, 16):
        for stages in (4, 3, 2):  # no more than warps that prepare
            how = Cut(size, stages, 0 if not hopper else 3 if size <= 32 else 2)
            if shared_bytes(how, N) <= limit:
                return how
    return Cut(16, 2, 0)


def shared_bytes(how: Cut, N: int) -> int:
    """Dynamic shared memory of a block: struct Shared of the kernel."""
    columns = how.columns
    if how.outputs:
        stage, state = 4 * CHUNK * (N + columns) + 24 * CHUNK + 40, 2 * columns * N + 16
        return how.stages * stage + how.outputs * state + 16 * CHUNK
    stage = CHUNK * (2 * 2 * (N + 8) + 2 * (columns + 8) + 4)
    return how.stages * stage + 2 * CHUNK * (columns + 8) + 2 * columns * (N + 8) + 256 * columns + 32 * CHUNK


def scan_cost(state: LayerState, sequences: int, rows: int) -> tuple[int, int]:
    """(bytes, flops) of a scan of `rows` rows over all sequences."""
    _, H, P, N = state.ssm.shape
    width = H * P + 2 * state.ring_B.shape[2] * N
    traffic = rows * (2 * width + 4 * H + 2 * H * P) + 2 * sequences * H * P * N * state.ssm.element_size()
    return traffic, rows * H * (2 * N * (CHUNK * 5 // 8 + 2 * P) + CHUNK * P * 5 // 4)


def source(how: Cut) -> str:
    """The text of a variant."""
    head = nvrtc.source("common.cuh", "state.cuh", "chunk.cuh")
    if not how.outputs:
        return head + "\n" + nvrtc.source("scan.cu")
    return "\n".join((head, nvrtc.source("hopper.cuh"), products(how.columns), nvrtc.source("scan_hopper.cu")))


@cache
def _kernel(device: int, defines: tuple[tuple[str, int], ...], how: Cut) -> nvrtc.Kernel:
    return nvrtc.load(
        source(how),
        "scan",
        (*defines, *how.defines(dict(defines)["N"])),
        threads=how.threads,
        shared_bytes=shared_bytes(how, dict(defines)["N"]),
        specific=how.outputs > 0,
    )
