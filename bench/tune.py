"""Measures the cuts of the products of step rows on this GPU in a chain of layers, and writes the table of the best.

    python bench/tune.py [--shape nano30b …] [--format bf16 …] [--rows 1 4 …] [--table src/…/ops/gpu/h200.json]

A cut is timed only if it agrees with float64 and gives row 0 the bits that one row alone has, outputs poisoned
beforehand. The time that counts is that of a whole layer (norm, product, step, norm, product) in a CUDA graph over
LAYERS layers, each with its own weights, so that none comes from L2 unless it was asked for ahead: median microseconds
per layer; above CHAIN_ROWS rows, that of norm and product. Each matrix is tuned while the other keeps its best cut so
far.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import astuple, dataclass, field, replace
from importlib import import_module
from pathlib import Path

import torch
from torch import Tensor

from nemotron_mamba2.batch import Batch, Step
from nemotron_mamba2.bench.records import SHAPES
from nemotron_mamba2.bench.timing import captured, microseconds
from nemotron_mamba2.config import Mamba2Config
from nemotron_mamba2.formats import FORMATS, Nvfp4, Plain, dequantize
from nemotron_mamba2.ops import Linear, gpu, reference
from nemotron_mamba2.ops.gpu import nvrtc, tiles
from nemotron_mamba2.ops.gpu.tiles import Few, Tiles, Wide
from nemotron_mamba2.state import StatePool

linear = import_module("nemotron_mamba2.ops.gpu.linear")  # the package names the functions

LAYERS = 23
TOLERANCE = 2.5e-3  # one rounding to bf16 is 1.7e-3
SHARED_BYTES = 227 << 10
CHAIN_ROWS = 16  # above, the step takes so long that products are timed alone


def candidates(format: str, rows: int) -> Iterator[Tiles]:
    """Cuts worth measuring at a row count."""
    if rows <= 16:
        for wm, mt in ((1, 1), (2, 1), (1, 2)):
            for depth in (2, 3, 4, 6) if rows <= 8 else (2, 4):
                for ahead in (0, 4, 16):
                    if depth * mt <= 6 and (ahead != 4 or rows == 1):
                        yield Few(wm, mt, 1 if rows <= 8 else 2, depth, ahead)
    if rows > 8:
        tokens = 16 if rows <= 16 else 32 if rows <= 32 else 64 if rows <= 64 or format == "fp8_block" else 128
        stages = {16: (4, 8), 32: (4, 6), 64: (3, 4, 6), 128: (3, 4)}[tokens]
        for ws, cl in ((4, 1), (2, 2), (1, 4)):
            for count in stages:
                for wr in (1, 2) if tokens == 128 and ws < 4 else (1,):
                    for ahead in (0, 16) if rows <= 64 else (0,):
                        yield Wide(wr, ws, cl, tokens, count, 0, ahead)
    if rows > 64 and format != "fp8_block":
        yield Wide(2, 1, 1, 128, 6, 1)
        yield Wide(1, 1, 1, 128, 4, 1)


def allowed(tile: Tiles, format: str, slices: int) -> bool:
    """Whether a cut can be built for a matrix."""
    if isinstance(tile, Wide):
        grouped = tiles.grouped(slices)
        threads, sums = tile.threads(slices), tile.NTOK // 2 * (1 + (grouped > 1 or tile.SUM))
        if threads * (sums + 72) > 65536 or (tile.SUM and grouped > 1):
            return False
    elif tile.threads(slices) > 512:
        return False
    return tile.shared_bytes(format, slices) <= SHARED_BYTES


@dataclass
class Matrix:
    """A projection: copies of it, and what is needed to check a product. norm: 1 before in_proj, 2 before out_proj."""

    norm: int
    groups: int
    format: str
    copies: list[Linear]
    truth: Tensor
    slices: int
    cuts: dict[int, Tiles] = field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, int]:
        return self.copies[0].weight.shape

    @property
    def key(self) -> str:
        return f"{self.format} {self.shape[0]}×{self.shape[1]}"


@dataclass
class Case:
    """Layers of one shape in one format. x, z: what norms read; hidden: the residual."""

    config: Mamba2Config
    format: str
    matrices: dict[str, Matrix]
    hidden: Tensor
    y: Tensor
    z: Tensor
    norms: dict[str, Tensor]
    step: dict[str, Tensor]
    pools: dict[int, tuple[StatePool, Step]] = field(default_factory=dict)


def copy_of(weight: Linear) -> Linear:
    """The same values elsewhere."""
    if weight.packed is not None:
        return Linear(weight.weight, packed=(weight.packed[0].clone(), weight.packed[1].clone()))
    inner = weight.weight
    values = {"weight": inner.weight.clone()} | ({} if isinstance(inner, Plain) else {"scale": inner.scale})
    return Linear(type(inner)(**values))


def make_case(shape: str, format: str) -> Case:
    """Random values from a fixed seed."""
    torch.manual_seed(0)
    config = SHAPES[shape]
    heads = config.mamba_num_heads

    def randn(*sizes: int) -> Tensor:
        return torch.randn(*sizes, device="cuda")

    norms = {"in": randn(config.hidden_size).abs() + 0.5, "out": randn(config.d_inner).abs() + 0.5}
    hidden, y, z = (randn(300, n).bfloat16() for n in (config.hidden_size, config.d_inner, config.d_inner))
    matrices = {}
    for name, rows_out, columns in (
        ("in", config.in_proj_rows, config.hidden_size),
        ("out", config.hidden_size, config.d_inner),
    ):
        values = randn(rows_out, columns) * 0.02
        weight = Plain(values.bfloat16()) if format == "bf16" else reference.quantize(values, format)
        first = Linear(weight, packed=gpu.pack(weight) if isinstance(weight, Nvfp4) else None)
        x, groups, gate = (hidden, 1, None) if name == "in" else (y, config.n_groups, z)
        normed = gpu.rms_norm(x, norms[name], eps=1e-5, groups=groups, gate=gate)
        truth = normed.double() @ dequantize(weight).double().T
        truth = truth if name == "in" else truth + hidden.double()
        copies = [first, *(copy_of(first) for _ in range(LAYERS - 1))]
        count = tiles.slices(rows_out, columns)
        matrices[name] = Matrix(1 if name == "in" else 2, groups, format, copies, truth, count)
    step = {
        "conv_weight": randn(config.conv_dim, 4) * 0.4, "conv_bias": randn(config.conv_dim) * 0.1,
        "dt_bias": randn(heads) - 2, "A_log": torch.rand(heads, device="cuda").mul(15).add(1).log(), "D": randn(heads),
    }  # fmt: skip
    return Case(config, format, matrices, hidden, y, z, norms, step)


def use(case: Case, rows: int, changed: dict[str, Tiles]) -> None:
    """From here on, products take the cuts found so far, and `changed`."""
    chosen = {}
    for name, matrix in case.matrices.items():
        default = tiles.choose(case.format, *matrix.shape, rows, hopper=True)
        chosen[matrix.shape] = (changed.get(name) or matrix.cuts.get(rows, default), matrix.slices)
    linear.choose = lambda format, rows_out, columns, rows, hopper: chosen[rows_out, columns][0]
    linear.slices = lambda rows_out, columns: chosen[rows_out, columns][1]


def run_in(case: Case, k: int, hidden: Tensor, out: Tensor | None = None) -> Tensor:
    return gpu.norm_linear(hidden, case.norms["in"], case.matrices["in"].copies[k], eps=1e-5, role="step", out=out)


def run_out(case: Case, k: int, y: Tensor, z: Tensor, residual: Tensor, out: Tensor | None = None) -> Tensor:
    return gpu.norm_linear_residual(
        y, z, case.norms["out"], case.matrices["out"].copies[k], residual,
        groups=case.config.n_groups, eps=1e-5, role="step", out=out,
    )  # fmt: skip


def run_one(case: Case, name: str, k: int, rows: int, out: Tensor | None = None) -> Tensor:
    """One product with its norm."""
    if name == "in":
        return run_in(case, k, case.hidden[:rows], out)
    return run_out(case, k, case.y[:rows], case.z[:rows], case.hidden[:rows], out)


def fault(case: Case, name: str, rows: int, bits: Tensor) -> str:
    """What is wrong with a matrix's product as it is cut now; "" when nothing is."""
    truth = case.matrices[name].truth[:rows]
    out = torch.full(truth.shape, float("nan"), device="cuda", dtype=torch.bfloat16)
    run_one(case, name, 0, rows, out)
    error = ((out.double() - truth).norm() / truth.norm()).item()
    if not error < TOLERANCE:
        return f"error {error:.1e}"
    wrong = int((out[0] != bits).sum())
    return f"{wrong} other bits in row 0" if wrong else ""


def chain(case: Case, rows: int) -> float:
    """Microseconds of a layer: `rows` sequences, spread over the places of a window."""
    config = case.config
    if rows not in case.pools:
        pool = StatePool(config, layers=LAYERS, slots=rows, device="cuda")
        with pool.step(Batch.decode(pool.acquire(rows))) as step:
            assert step.step is not None
            places = [i % 16 if rows >= 16 else 8 for i in range(rows)]
            at = replace(
                step.step,
                positions=tuple(32 + place for place in places),
                boundaries=tuple(16 if place == 0 else 32 for place in places),
            )
            _ = at.cursors
            case.pools[rows] = (pool, replace(step, step=at))
    pool, step = case.pools[rows]
    assert step.step is not None

    def run() -> None:
        hidden = case.hidden[:rows]
        for k in range(LAYERS):
            z, xbc, dt = run_in(case, k, hidden).split([config.d_inner, config.conv_dim, config.mamba_num_heads], -1)
            y = gpu.step(xbc, dt, pool.layer_state(k), step.step, **case.step)
            hidden = run_out(case, k, y, z, hidden)

    return microseconds(captured(run), repeats=9) / LAYERS


def alone(case: Case, name: str, rows: int) -> float:
    """Microseconds of one product with its norm."""
    return microseconds(captured(lambda: [run_one(case, name, k, rows) for k in range(LAYERS)]), repeats=9) / LAYERS


def product_alone(case: Case, name: str, rows: int) -> float:
    """Microseconds of one product without its norm."""
    matrix = case.matrices[name]
    tile = matrix.cuts[rows]
    x = case.hidden[:rows] if name == "in" else case.y[:rows]
    x = linear.ordered(x, case.format) if isinstance(tile, Wide) else x
    y = torch.empty(rows, matrix.shape[0], device="cuda", dtype=torch.bfloat16)
    residual = None if name == "in" else case.hidden[:rows]

    def run() -> None:
        for weight in matrix.copies:
            linear.product(y, x, weight, tile, matrix.slices, residual=residual)

    return microseconds(captured(run), repeats=9) / LAYERS


def tune(case: Case, rows: int, show: int) -> None:
    """The best cuts of both matrices at a row count, noted and printed."""
    for name in ("out", "in"):
        matrix = case.matrices[name]
        use(case, 1, {name: Few(1, 1, 1, 2)})
        bits = run_one(case, name, 0, 1)[0]
        found: list[tuple[float, Tiles]] = []
        faults = {}
        for tile in candidates(case.format, rows):
            if not allowed(tile, case.format, matrix.slices):
                continue
            use(case, rows, {name: tile})
            try:
                wrong = fault(case, name, rows, bits)
            except RuntimeError as error:
                wrong = str(error)
            if wrong:
                faults[tile] = wrong
                continue
            found.append((chain(case, rows) if rows <= CHAIN_ROWS else alone(case, name, rows), tile))
        found.sort(key=lambda one: one[0])
        matrix.cuts[rows] = found[0][1]
        best = " | ".join(f"{us:.1f} {type(tile).__name__}{astuple(tile)}" for us, tile in found[:show])
        print(f"{matrix.key} {rows}: {best} … {found[-1][0]:.1f}", flush=True)
        if faults:
            print(f"    {len(faults)} faults, such as {next(iter(faults.items()))}", flush=True)


def report(case: Case, rows: int) -> None:
    """The layer and its products as they are now."""
    use(case, rows, {})
    parts = [f"{name} {alone(case, name, rows):.1f} ({product_alone(case, name, rows):.1f})" for name in case.matrices]
    print(f"== {case.format} {rows}: layer {chain(case, rows):.1f}, " + ", ".join(parts), flush=True)


def build(job: tuple[Tiles, str, int, int, int, int]) -> None:
    """Compile a variant into the cache."""
    tile, format, columns, slices, norm, groups = job
    text, _ = tiles.source(tile)
    residual, norm = norm == 2, norm if isinstance(tile, Few) and tile.NT == 1 else 0
    for fused in {0, norm}:
        constants = tiles.defines(
            format, columns, slices, tile, fused, groups=groups if fused else 1, residual=residual
        )
        nvrtc.compile_cubin(text, constants, "sm_90a" if isinstance(tile, Wide) else "sm_90")


def build_all(shapes: list[str], formats: list[str], row_counts: list[int], counts: dict[str, int | None]) -> None:
    """Every variant, on all cores."""
    jobs = {}
    for shape in shapes:
        c = SHAPES[shape]
        for name, rows_out, columns, norm, groups in (
            ("in", c.in_proj_rows, c.hidden_size, 1, 1),
            ("out", c.hidden_size, c.d_inner, 2, c.n_groups),
        ):
            slices = counts[name] or tiles.slices(rows_out, columns)
            for format in formats:
                for tile in (Few(1, 1, 1, 2), *(t for rows in row_counts for t in candidates(format, rows))):
                    if allowed(tile, format, slices):
                        jobs[tile, format, columns, slices, norm, groups] = None
    with ProcessPoolExecutor() as pool:
        list(pool.map(build, jobs, chunksize=4))
    print(f"{len(jobs)} variants compiled", flush=True)


def entries(case: Case) -> list[list[object]]:
    """The table's lines: each cut serves up to its row count (of 2 to 8: up to 8), the last one all above."""
    lines: list[list[object]] = []
    for matrix in case.matrices.values():
        cuts: list[list[object]] = []
        for rows, tile in sorted(matrix.cuts.items()):
            most = 1 << 30 if rows == max(matrix.cuts) else 8 if 1 < rows <= 8 else rows
            cuts.append([most, type(tile).__name__.lower(), list(astuple(tile))])
        lines.append([case.format, *matrix.shape, cuts])
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="*", default=["nano30b", "super120b"], choices=SHAPES)
    parser.add_argument("--format", nargs="*", default=["bf16", "fp8_tensor", "nvfp4"], choices=FORMATS)
    parser.add_argument("--rows", nargs="*", type=int, default=[1, 4, 16, 32, 64, 256])
    parser.add_argument("--slices-in", type=int, help="another number of slices of in_proj; the table is then void")
    parser.add_argument("--slices-out", type=int)
    parser.add_argument("--fused-rows", type=int, default=linear.FUSED_ROWS, help="rows up to which norms are fused")
    parser.add_argument("--show", type=int, default=4, help="cuts to print of each case")
    parser.add_argument("--table", type=Path)
    options = parser.parse_args()
    counts = {"in": options.slices_in, "out": options.slices_out}
    linear.FUSED_ROWS = options.fused_rows
    build_all(options.shape, options.format, options.rows, counts)
    lines = []
    for shape in options.shape:
        for format in options.format:
            case = make_case(shape, format)
            for name, count in counts.items():
                case.matrices[name].slices = count or case.matrices[name].slices
            print(f"-- {shape} {format}", flush=True)
            for rows in options.rows:
                tune(case, rows, options.show)
                report(case, rows)
            lines += entries(case)
            del case
            torch.cuda.empty_cache()
    if options.table:
        options.table.write_text("[\n" + ",\n".join(json.dumps(line) for line in lines) + "\n]\n")


if __name__ == "__main__":
    main()
