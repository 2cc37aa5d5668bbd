"""The recurrence over ragged prompt rows in one launch: wrapper of `scan.cu`.

Bytes: x, B, C, dt once from memory (B and C again from L2 for every block of their group), y once, the state once per
sequence. Flops per chunk of Q rows and head: 2·Q·N·(10/16·Q + 2·P) + 10/8·Q²·P. How a head's P state rows are cut over
blocks follows the number of heads and sequences; a row's bits do not depend on it.
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from torch import Tensor

from ...batch import Rows
from ...errors import ShapeError
from .. import LayerState
from . import nvrtc
from .nvrtc import argument, rows16
from .step import STATE_CODES, state_key

THREADS = 256
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
    if out.stride(-1) != 1 or out.stride(0) % 2:
        raise ShapeError("scan: out needs a unit inner stride and rows that begin at multiples of 4 bytes")
    columns, stages, blocks = cut(H, P, N, len(rows.slots), xbc.device)
    shape = (("H", H), ("P", P), ("G", state.ring_B.shape[2]), ("N", N), ("W", W))
    flags = (("STATE", STATE_CODES[state.ssm.dtype]), ("ROUND", int(reproducible)))
    tile = (("PT", columns), ("STAGES", stages), ("BLOCKS", blocks))
    _kernel(xbc.device.index, (*shape, *flags, *tile)).launch(
        (H * (P // columns), len(rows.slots)),
        shared_bytes(columns, N, stages),
        [
            *map(argument, (out, state.ssm, xbc, dt, *rows.cursors, A_log, D)),
            *map(argument, (out.stride(0), xbc.stride(0), dt.stride(0))),
            ctypes.c_uint(state_key(state.seed, state.layer)),
        ],
    )
    return out


def cut(H: int, P: int, N: int, sequences: int, device: torch.device) -> tuple[int, int, int]:
    """(state rows per block, chunks in shared memory, blocks per multiprocessor)."""
    properties = torch.cuda.get_device_properties(device)
    limit: int = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]
    columns = P
    if P % 32 == 0 and 2 * H * sequences <= properties.multi_processor_count:
        columns = P // 2
    for stages, blocks in ((3, 1), (2, 1)):
        if shared_bytes(columns, N, stages) * blocks <= limit:
            return columns, stages, blocks
    return 16, 2, 1


def shared_bytes(columns: int, N: int, stages: int) -> int:
    """Dynamic shared memory of a block: struct Shared of `scan.cu`."""
    stage = CHUNK * (2 * 2 * (N + 8) + 2 * (columns + 8) + 4)
    partial = THREADS * columns // 16 * 16
    return stages * stage + 2 * CHUNK * (columns + 8) + 2 * columns * (N + 8) + partial + THREADS // 32 * CHUNK * 4


def scan_cost(state: LayerState, sequences: int, rows: int) -> tuple[int, int]:
    """(bytes, flops) of a scan of `rows` rows over all sequences."""
    _, H, P, N = state.ssm.shape
    width = H * P + 2 * state.ring_B.shape[2] * N
    traffic = rows * (2 * width + 4 * H + 2 * H * P) + 2 * sequences * H * P * N * state.ssm.element_size()
    return traffic, rows * H * (2 * N * (CHUNK * 5 // 8 + 2 * P) + CHUNK * P * 5 // 4)


@cache
def _kernel(device: int, defines: tuple[tuple[str, int], ...]) -> nvrtc.Kernel:
    d = dict(defines)
    return nvrtc.load(
        nvrtc.source("common.cuh", "state.cuh", "scan.cu"),
        "scan",
        defines,
        threads=THREADS,
        shared_bytes=shared_bytes(d["PT"], d["N"], d["STAGES"]),
    )
