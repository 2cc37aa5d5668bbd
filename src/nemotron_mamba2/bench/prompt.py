"""One Mamba-2 layer over prompt rows: its pieces and the whole, microseconds, checked, beside mamba_ssm's kernels.

Pieces: `conv`, `scan`, `gated_norm`, the three in a row (`conv_scan_norm`), and `layer` in each format. A figure is the
median time of a CUDA graph that runs a piece REPEATS times; it counts only if the layer's kernels, in the same run and
on ragged prompts of the same weights, agree with the reference. Prompts of FP8 weights run W8A8, with a static scale as
calibrated checkpoints have it. Bytes are what a piece must read and write once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import import_module

import torch
from torch import Tensor

from ..batch import Batch, Rows, Step
from ..config import Mamba2Config, Policy
from ..formats import Fp8Tensor, Plain
from ..layer import NemotronMamba2Layer
from ..ops.gpu.conv import conv_cost
from ..ops.gpu.scan import scan_cost
from ..plan import make_plan
from ..state import StatePool
from .layer import Refused, random_layer, worst_row
from .peers import GATED_NORM, mamba_ssm
from .records import SHAPES, Record, Run, record
from .timing import captured, microseconds

REPEATS = 4
CHECKED = ((300, 1, 77), (5, 64, 130))  # prompt rows of three sequences in two steps
CHECKED_ROWS = 333
TOLERANCE = 2e-2  # of a row after conv, scan and norm: three roundings of 1.7e-3, and rows whose sums nearly cancel
INPUT_SCALE = 0.02
CHUNK_SCAN = "mamba_ssm.ops.triton.ssd_combined"
Piece = Callable[[], object]


@dataclass(frozen=True)
class PromptCase:
    """What is measured: so many sequences of so many tokens each. prompt: as in `Policy`."""

    shape: str
    format: str
    tokens: int
    sequences: int = 1
    prompt: str = "checkpoint"

    @property
    def words(self) -> str:
        return f"{self.shape:10} {self.format:11} {self.tokens:6} tokens × {self.sequences}"


def measure(
    cases: Sequence[PromptCase], run: Run, *, peers: bool = False, say: Callable[[str], None]
) -> Iterator[Record | Refused]:
    """Records of each case's layer, and once per shape and size of its pieces. peers: whether to time mamba_ssm too."""
    seen: set[tuple[str, int, int]] = set()
    for case in cases:
        layer = prompt_layer(SHAPES[case.shape], case.format, case.prompt)
        error = max(check(layer), check_products(layer), key=lambda e: (e != e, e))  # NaN is the worst
        if not error < TOLERANCE:
            yield Refused(case, error)
            continue
        work = pieces(layer, case)
        size = (case.shape, case.tokens, case.sequences)
        if size in seen:
            work = {"layer": work["layer"]}
        seen.add(size)
        theirs = peer_pieces(layer, case, say) if peers else {}
        for name, (piece, nbytes) in work.items():
            yield record(
                run,
                shape=case.shape,
                format=case.format,
                rows=0,
                prefill_tokens=case.tokens,
                window_rows=16,
                state_dtype="float32",
                us_per_layer=time_piece(piece),
                nbytes=nbytes,
                peers={"mamba_ssm": time_piece(theirs[name])} if name in theirs else {},
                piece=name,
                sequences=case.sequences,
                prompt=case.prompt,
            )


def time_piece(piece: Piece) -> float:
    """Median µs of a piece."""
    return microseconds(captured(lambda: [piece() for _ in range(REPEATS)])) / REPEATS


def prompt_layer(config: Mamba2Config, format: str, prompt: str, *, device: str = "cuda") -> NemotronMamba2Layer:
    """A layer of random weights; FP8 matrices have a static activation scale."""
    weights = random_layer(config, format, 0, device=device).weights
    scale = torch.tensor(INPUT_SCALE, device=device)
    if isinstance(weights.in_proj, Fp8Tensor) and isinstance(weights.out_proj, Fp8Tensor):
        in_proj, out_proj = (replace(w, input_scale=scale) for w in (weights.in_proj, weights.out_proj))
        weights = replace(weights, in_proj=in_proj, out_proj=out_proj)
    plan = make_plan(config, weights, Policy(prompt=prompt), device=device)  # type: ignore[arg-type]
    return NemotronMamba2Layer(config, weights, plan)


def pieces(layer: NemotronMamba2Layer, case: PromptCase) -> dict[str, tuple[Piece, float]]:
    """Name → (a call that runs it again, bytes it must move). Sequences start from an empty state."""
    c, device = layer.config, layer.plan.device
    pool, rows = StatePool(c, layers=1, slots=case.sequences, device=device), case.tokens * case.sequences
    step = _begin(pool, [case.tokens] * case.sequences)
    assert step.prompt is not None
    prompt = step.prompt
    hidden = torch.randn(rows, c.hidden_size, device=device).bfloat16()
    z, xbc, dt = layer.project_in(hidden, "prompt")
    wide, wide_dt = layer.convolve(xbc, dt, prompt, pool)
    y = layer.scan(wide, wide_dt, prompt, pool)
    state = pool.layer_state(0)
    moved = {
        "conv": conv_cost(state, rows)[0],
        "scan": scan_cost(state, case.sequences, rows)[0],
        "gated_norm": rows * 6 * c.d_inner,
    }
    run: dict[str, Piece] = {
        "conv": lambda: layer.convolve(xbc, dt, prompt, pool, out=(wide, wide_dt)),
        "scan": lambda: layer.scan(wide, wide_dt, prompt, pool, out=y),
        "gated_norm": lambda: gated_norm(layer, y, z),
    }
    three = tuple(run.values())
    run["conv_scan_norm"] = lambda: [piece() for piece in three]
    moved["conv_scan_norm"] = sum(moved.values())
    run["layer"] = lambda: layer(hidden, step, pool)
    weights = layer.weights.in_proj.nbytes + layer.weights.out_proj.nbytes
    moved["layer"] = moved["conv_scan_norm"] + weights + 2 * rows * (3 * c.hidden_size + c.in_proj_rows)
    return {name: (piece, float(moved[name])) for name, piece in run.items()}


def gated_norm(layer: NemotronMamba2Layer, y: Tensor, z: Tensor) -> Tensor:
    """The norm before out_proj alone."""
    c = layer.config
    found: Tensor = layer._ops.rms_norm(
        y, layer.weights.gated_norm, eps=c.layer_norm_epsilon, groups=c.n_groups, gate=z
    )
    return found


def check(layer: NemotronMamba2Layer) -> float:
    """How far conv, scan and gated norm are from the reference: the worst row over ragged prompts in two steps."""
    c, device = layer.config, layer.plan.device
    pools = [StatePool(c, layers=1, slots=3, device=device) for _ in range(2)]
    slots = [pool.acquire(3) for pool in pools]
    worst = []
    for counts in CHECKED:
        projected = torch.randn(sum(counts), c.in_proj_rows, device=device).bfloat16()
        z, xbc, dt = projected.split([c.d_inner, c.conv_dim, c.mamba_num_heads], -1)
        found = []
        for one, pool, mine in zip((layer, layer.reference()), pools, slots, strict=True):
            with pool.step(Batch.prefill(mine, counts)) as step:
                assert step.prompt is not None
                found.append(gated_norm(one, _recurrence(one, xbc, dt, step.prompt, pool=pool), z))
        worst.append(worst_row(*found))
    return torch.stack(worst).max().item()  # NaN where one is NaN


def check_products(layer: NemotronMamba2Layer) -> float:
    """How far the products of prompt rows are from the reference: the worse relative error of the two. Where both
    quantise the activations, a value between two codes may fall either way."""
    c, device = layer.config, layer.plan.device
    linears = layer.plan.prepare(layer.weights)
    hidden = torch.randn(CHECKED_ROWS, c.hidden_size, device=device).bfloat16()
    inner = torch.randn(CHECKED_ROWS, c.d_inner, device=device).bfloat16()
    errors = []
    for x, linear in ((hidden, linears["in_proj"]), (inner, linears["out_proj"])):
        ours, other = (found.linear(x, linear, "prompt").double() for found in (layer._ops, layer.reference()._ops))
        errors.append((ours - other).norm() / other.norm())
    return torch.stack(errors).max().item()


def _recurrence(layer: NemotronMamba2Layer, xbc: Tensor, dt: Tensor, rows: Rows, *, pool: StatePool) -> Tensor:
    """conv and scan, into buffers that hold NaN before."""
    c, nan, total = layer.config, float("nan"), layer._ops.scan_rows(rows)
    out = xbc.new_full((total, c.conv_dim), nan), torch.full((total, c.mamba_num_heads), nan, device=xbc.device)
    wide, wide_dt = layer.convolve(xbc, dt, rows, pool, out=out)
    return layer.scan(wide, wide_dt, rows, pool, out=xbc.new_full((rows.total_rows, c.d_inner), nan))


def peer_pieces(layer: NemotronMamba2Layer, case: PromptCase, say: Callable[[str], None]) -> dict[str, Piece]:
    """mamba_ssm's chunk scan and gated norm, causal-conv1d where it is installed and, for bf16 weights, a layer of them
    and cuBLAS, without causal-conv1d *without* a convolution; {} when mamba_ssm is not installed."""
    try:
        chunk_scan, norm = mamba_ssm(CHUNK_SCAN).mamba_chunk_scan_combined, mamba_ssm(GATED_NORM).rmsnorm_fn
    except ImportError as failure:
        say(f"{case.words}: mamba_ssm did not run: {failure}")
        return {}
    try:
        convolve = import_module("causal_conv1d").causal_conv1d_fn
    except ImportError:
        convolve = None
        say(f"{case.words}: mamba_ssm runs without a convolution: causal-conv1d is not installed")
    c, w, rows = layer.config, layer.weights, case.tokens * case.sequences
    H, P, G, N = c.mamba_num_heads, c.mamba_head_dim, c.n_groups, c.ssm_state_size
    hidden = torch.randn(rows, c.hidden_size, device=layer.plan.device).bfloat16()
    projected = torch.randn(rows, c.in_proj_rows, device=hidden.device).bfloat16()
    A, gain, norm_weight = -w.A_log.exp(), w.gated_norm.bfloat16(), w.norm.bfloat16()
    taps, conv_bias = w.conv1d_weight.bfloat16(), None if w.conv1d_bias is None else w.conv1d_bias.bfloat16()

    def conv(projected: Tensor) -> Tensor:
        raw = projected[:, c.d_inner : c.d_inner + c.conv_dim].view(case.sequences, case.tokens, -1)
        if convolve is None:
            return raw
        found: Tensor = convolve(raw.transpose(1, 2), taps, conv_bias, activation="silu")
        return found.transpose(1, 2)

    def scan(xbc: Tensor, projected: Tensor) -> Tensor:
        x, B, C = xbc.split([H * P, G * N, G * N], -1)
        dt = projected[:, -H:].view(case.sequences, case.tokens, H)
        x, B, C = x.unflatten(-1, (H, P)), B.unflatten(-1, (G, N)), C.unflatten(-1, (G, N))
        found: Tensor = chunk_scan(x, dt, A, B, C, 256, D=w.D, dt_bias=w.dt_bias, dt_softplus=True)
        return found.view(rows, c.d_inner)

    def gated(y: Tensor, z: Tensor) -> Tensor:
        size = c.d_inner // G
        found: Tensor = norm(y, gain, None, z=z, eps=c.layer_norm_epsilon, group_size=size, norm_before_gate=False)
        return found

    def whole(in_proj: Tensor, out_proj: Tensor) -> Tensor:
        normed = torch.nn.functional.rms_norm(hidden, (c.hidden_size,), norm_weight, c.layer_norm_epsilon)
        projected = normed @ in_proj.T
        return torch.addmm(hidden, gated(scan(conv(projected), projected), projected[:, : c.d_inner]), out_proj.T)

    xbc, z = conv(projected), projected[:, : c.d_inner]
    y = scan(xbc, projected)
    found: dict[str, Piece] = {"scan": lambda: scan(xbc, projected), "gated_norm": lambda: gated(y, z)}
    if convolve is not None:
        found["conv"] = lambda: conv(projected)
        found["conv_scan_norm"] = lambda: gated(scan(conv(projected), projected), z)
    matrices = (w.in_proj, w.out_proj)
    if all(isinstance(matrix, Plain) for matrix in matrices):
        found["layer"] = lambda: whole(*(matrix.weight for matrix in matrices if isinstance(matrix, Plain)))
    return found


def _begin(pool: StatePool, counts: Sequence[int]) -> Step:
    """A step of fresh prompts whose cursors, of every piece, lie on the device."""
    with pool.step(Batch.prefill(pool.acquire(len(counts)), counts)) as step:
        assert step.prompt is not None
        for piece in step.prompt.pieces:
            _ = piece.cursors
    return step
