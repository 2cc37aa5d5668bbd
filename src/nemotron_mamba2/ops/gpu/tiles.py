"""How products of step rows are cut into blocks: choice, compile-time constants and source of every variant.

`Few` (linear.cu), `Many` (linear_many.cu) and `Wide` (linear_wide.cu, Hopper's wgmma) give the same bits: only the
number of slices of K, which follows from the shape alone, is part of a result's bits. Choices for Hopper were measured
on an H200 by `bench/tune.py` (`h200.json`, and a rule for other shapes); other devices take defaults.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from functools import cache
from importlib import resources
from typing import TypeAlias

from . import nvrtc
from .wgmma import wgmma

FORMAT_CODES = {"bf16": 0, "fp8_tensor": 1, "fp8_channel": 2, "fp8_block": 3, "nvfp4": 4}
SLOT_BYTES = {"bf16": 2048, "nvfp4": 640}  # of a warp's weights in linear_wide: 16 rows, 64 inputs; FP8: 1024
INPUTS_PER_CHUNK = 64
ROWS_PER_TILE = 16
MANY_STAGES = 4  # chunks of tokens in shared memory, of linear_many

Defines: TypeAlias = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Few:
    """Names as in linear.cu."""

    WM: int
    MT: int
    NT: int
    DEPTH: int
    AHEAD: int = 0

    @property
    def rows(self) -> int:
        """Weight rows of one block."""
        return ROWS_PER_TILE * self.MT * self.WM

    def threads(self, slices: int) -> int:
        """Threads of a block."""
        return 32 * self.WM * slices

    def grid(self, rows_out: int, rows: int) -> tuple[int, int]:
        """Blocks of a launch."""
        return -(-rows_out // self.rows), -(-rows // (8 * self.NT))

    def shared_bytes(self, format: str, slices: int, normed_bytes: int = 0) -> int:
        """Dynamic shared memory of a block."""
        return max(4 * slices * self.rows * (8 * self.NT + 1), normed_bytes)


@dataclass(frozen=True)
class Many:
    """Names as in linear_many.cu."""

    WM: int
    WN: int
    MT: int
    NT: int
    DEPTH: int

    @property
    def rows(self) -> int:
        """Weight rows of one block."""
        return ROWS_PER_TILE * self.MT * self.WM

    @property
    def tokens(self) -> int:
        """Tokens of one block."""
        return 8 * self.NT * self.WN

    def threads(self, slices: int) -> int:
        """Threads of a block."""
        return 32 * self.WM * self.WN

    def grid(self, rows_out: int, rows: int) -> tuple[int, int]:
        """Blocks of a launch."""
        return -(-rows_out // self.rows), -(-rows // self.tokens)

    def shared_bytes(self, format: str, slices: int, normed_bytes: int = 0) -> int:
        """Dynamic shared memory of a block."""
        return max(MANY_STAGES * self.tokens * 2 * INPUTS_PER_CHUNK, 2 * self.tokens * (self.rows + 2))


@dataclass(frozen=True)
class Wide:
    """Names as in linear_wide.cu."""

    WR: int
    WS: int
    CL: int
    NTOK: int
    STAGES: int
    SUM: int = 0
    AHEAD: int = 0

    def threads(self, slices: int) -> int:
        """Threads of a block."""
        return 128 * self.WR * self.WS

    def grid(self, rows_out: int, rows: int) -> tuple[int, int]:
        """Blocks of a launch."""
        return self.CL * -(-rows_out // (64 * self.WR)) * -(-rows // self.NTOK), 1

    def shared_bytes(self, format: str, slices: int, normed_bytes: int = 0) -> int:
        """Dynamic shared memory of a block."""
        ring = self.STAGES * self.WS * (128 * self.NTOK + 4 * self.WR * SLOT_BYTES.get(format, 1024))
        parts = slices // grouped(slices)
        sums = 4 * (1 if self.SUM else parts // self.CL) * self.NTOK * (64 * self.WR + 4)
        over = self.SUM or parts == self.WS * self.CL
        return (max(ring, sums) if over else ring + sums) + 16 * self.STAGES * self.WS


Tiles: TypeAlias = "Few | Many | Wide"


def slices(rows_out: int, columns: int) -> int:
    """Slices of K: eight where few rows would leave multiprocessors idle, else four. Part of a result's bits."""
    if columns < 16 * INPUTS_PER_CHUNK:
        return 1
    return 8 if rows_out // ROWS_PER_TILE < 528 else 4


def grouped(slice_count: int) -> int:
    """Slices that are added up before their sum is added to others: at most four sums. Part of a result's bits."""
    return max(1, slice_count // 4)


def choose(format: str, rows_out: int, columns: int, rows: int, *, hopper: bool) -> Tiles:
    """Tiles for a row count. Not part of a result's bits."""
    if not hopper or slices(rows_out, columns) == 1:
        return _anywhere(format, rows_out, rows)
    family = "fp8_tensor" if format == "fp8_channel" else format
    measured = _measured().get((family, rows_out, columns), ())
    return next((tile for most, tile in measured if rows <= most), None) or _on_hopper(format, rows_out, columns, rows)


def _on_hopper(format: str, rows_out: int, columns: int, rows: int) -> Tiles:
    """What was best for most of the measured shapes."""
    tall = slices(rows_out, columns) == 4
    if rows <= 8:
        return Few(1, 2, 1, 3) if format == "bf16" else Few(1, 1, 1, 6)
    if rows <= 16:
        return Wide(1, 2, 2, 16, 8) if format == "bf16" else Few(1, 1, 2, 2)
    if rows <= 64 or format == "fp8_block":
        tokens = 32 if rows <= 32 else 64
        return Wide(1, 1, 4, tokens, 4) if tall else Wide(1, 2, 2, tokens, 4)
    if not tall:
        return Wide(1, 2, 2, 128, 4)
    return Wide(1, 1, 1, 128, 4, 1) if format == "bf16" else Wide(2, 1, 4, 128, 4)


def _anywhere(format: str, rows_out: int, rows: int) -> Tiles:
    if rows <= 8:
        return Few(1, 1, 1, 2 if format == "bf16" else 4)
    if rows <= 16:
        return Few(1, 1, 2, 4) if format == "nvfp4" else Few(1, 2, 2, 2)
    wide = rows_out > 8192  # enough rows to share tokens between warps
    if format == "bf16":
        if rows <= 64:
            return Few(1, 2, 8, 2)
        return Many(2, 2, 2, 4, 2) if wide else Many(4, 1, 1, 8, 2)
    return Many(4, 1, 1, 8, 2) if wide and rows > 64 else Few(2, 2, 4, 2)


@cache
def _measured() -> dict[tuple[str, int, int], tuple[tuple[int, Tiles], ...]]:
    """(format, rows out, columns) → (most rows, tiles), by rows."""
    kinds = {"few": Few, "wide": Wide}
    text = resources.files(__package__).joinpath("h200.json").read_text(encoding="utf-8")
    found: dict[tuple[str, int, int], tuple[tuple[int, Tiles], ...]] = {}
    for format, rows_out, columns, cuts in json.loads(text):
        found[format, rows_out, columns] = tuple((most, kinds[kind](*sizes)) for most, kind, sizes in cuts)
    return found


def defines(
    format: str,
    columns: int,
    slice_count: int,
    tile: Tiles,
    norm: int = 0,
    *,
    groups: int = 1,
    residual: bool = False,
    out32: bool = False,
) -> Defines:
    """The compile-time constants of a variant. out32: the result is fp32."""
    sizes = {field.name: getattr(tile, field.name) for field in fields(tile)}
    if isinstance(tile, Wide):
        sizes |= {"MT": 1, "NT": 1}
    elif isinstance(tile, Many):
        sizes["STAGES"] = MANY_STAGES
    else:
        sizes |= {"NORM": norm, "GROUPS": groups}
    return (
        ("FORMAT", FORMAT_CODES[format]),
        ("K_", columns),
        ("S", slice_count),
        ("GROUP", grouped(slice_count)),
        *sizes.items(),
        ("RESIDUAL", int(residual)),
        ("OUT32", int(out32)),
    )


def source(tile: Tiles) -> tuple[str, str]:
    """(text, kernel name) of a variant."""
    if isinstance(tile, Few):
        return nvrtc.source("common.cuh", "norm.cuh", "weights.cuh", "linear.cu"), "linear"
    if isinstance(tile, Many):
        return nvrtc.source("common.cuh", "weights.cuh", "linear_many.cu"), "linear_many"
    head, body = nvrtc.source("common.cuh", "weights.cuh", "hopper.cuh"), nvrtc.source("linear_wide.cu")
    return "\n".join((head, wgmma("wgmma", tile.NTOK), body)), "linear_wide"
