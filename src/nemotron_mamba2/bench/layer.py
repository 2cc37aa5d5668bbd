"""One Mamba-2 layer in steps of decode or verify: microseconds per layer, checked, beside its peers.

A figure is the median time of a CUDA graph over LAYERS layers with weights of their own (so that none come from L2),
random state, and sequences spread over the places of a window; it counts only if the same kernels, in the same run and
on the same step, agree with the reference. Bytes are what a step must move: weights once, every state once, and once
more per window of rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..batch import Batch, Rows, Step
from ..config import Mamba2Config, Policy
from ..formats import Plain, Weight
from ..layer import NemotronMamba2Layer
from ..ops import reference
from ..plan import make_plan
from ..state import StatePool
from ..weights import Mamba2Weights
from .peers import Peer
from .records import SHAPES, Record, Run, record
from .timing import captured, microseconds

LAYERS = 23
TOLERANCE = 5e-3  # of a row of one kernel; one rounding to bf16 is 1.7e-3
PEER_TOLERANCE = 3e-2  # of a row of the whole layer; peers round norm weights and more values to bf16


class Described(Protocol):
    """What is measured, in words."""

    @property
    def words(self) -> str: ...


@dataclass(frozen=True)
class Case:
    """What is measured: so many sequences, each with `rows` new rows."""

    shape: str
    format: str
    sequences: int
    rows: int = 1
    state_dtype: str = "float32"

    @property
    def words(self) -> str:
        return f"{self.shape:10} {self.format:11} {self.sequences:4} × {self.rows} {self.state_dtype}"


@dataclass(frozen=True)
class Refused:
    """A case without a figure: its kernels were wrong."""

    case: Described
    error: float


def measure(
    cases: Sequence[Case], run: Run, *, peers: Sequence[type[Peer]] = (), say: Callable[[str], None]
) -> Iterator[Record | Refused]:
    """A record for each case whose kernels are right. peers: what to time beside it. say: takes remarks, by line."""
    for pair in dict.fromkeys((case.shape, case.format) for case in cases):
        layers = [random_layer(SHAPES[pair[0]], pair[1], i) for i in range(LAYERS)]
        others = list(_ready(layers, peers, say))
        for case in cases:
            if (case.shape, case.format) == pair:
                yield _measure(layers, case, run, others, say)
        del layers, others
        torch.cuda.empty_cache()


def random_layer(config: Mamba2Config, format: str, index: int, *, device: str = "cuda") -> NemotronMamba2Layer:
    """A layer of random weights. index: of its state in a pool, and its seed."""
    torch.manual_seed(index)
    heads = config.mamba_num_heads

    def matrix(rows: int, columns: int) -> Weight:
        values = torch.randn(rows, columns, device=device) * 0.02
        return Plain(values.bfloat16()) if format == "bf16" else reference.quantize(values, format)

    weights = Mamba2Weights(
        norm=torch.rand(config.hidden_size, device=device) + 0.5,
        in_proj=matrix(config.in_proj_rows, config.hidden_size),
        conv1d_weight=torch.randn(config.conv_dim, config.conv_kernel, device=device) * 0.4,
        conv1d_bias=torch.randn(config.conv_dim, device=device) * 0.1,
        dt_bias=torch.randn(heads, device=device) - 2,
        A_log=torch.rand(heads, device=device).mul(15).add(1).log(),
        D=torch.randn(heads, device=device),
        gated_norm=torch.rand(config.d_inner, device=device) + 0.5,
        out_proj=matrix(config.hidden_size, config.d_inner),
    )
    plan = make_plan(config, weights, Policy(), device=device)
    return NemotronMamba2Layer(config, weights, plan, index=index)


def step_bytes(layer: NemotronMamba2Layer, case: Case, window_rows: int) -> float:
    """Bytes that a step must move, averaged over a window."""
    c = layer.config
    state = c.d_inner * c.ssm_state_size * _dtype(case).itemsize
    weights = layer.weights.in_proj.nbytes + layer.weights.out_proj.nbytes
    return weights + case.sequences * state * (1 + case.rows / window_rows)


def _measure(
    layers: list[NemotronMamba2Layer], case: Case, run: Run, others: Sequence[Peer], say: Callable[[str], None]
) -> Record | Refused:
    error = check(layers[0], case)
    if not error < TOLERANCE:
        return Refused(case, error)
    us, window = time_layers(layers, case)
    times = {}
    for peer in others:
        try:
            times[peer.name] = time_peer(peer, case)
        except Exception as failure:
            say(f"{case.words}: {peer.name} did not run: {_first_line(failure)}")
    more = {"verify": case.rows} if case.rows > 1 else {}
    return record(
        run,
        shape=case.shape,
        format=case.format,
        rows=case.sequences * case.rows,
        prefill_tokens=0,
        window_rows=window,
        state_dtype=case.state_dtype,
        us_per_layer=us,
        nbytes=step_bytes(layers[0], case, window),
        peers=times,
        **more,
    )


# -- the check -------------------------------------------------------------------------------------------------------


def check(layer: NemotronMamba2Layer, case: Case) -> float:
    """How far one step of a layer is from the reference: the worst row of any of its three kernels, or folded state.

    Random states at every place of a window. Each kernel's output buffer holds NaN before, and the reference gets the
    same input as the kernel.
    """
    c, device = layer.config, layer.plan.device
    ours, other = (_pool(c, 1, case, device) for _ in range(2))
    folding = math.ceil(case.sequences * case.rows / ours.layout.window_rows)
    step = _begin(ours, case, folding).step
    assert step is not None
    hidden = torch.randn(step.total_rows, c.hidden_size, device=device).bfloat16()

    def empty(width: int) -> Tensor:
        return hidden.new_full((len(hidden), width), float("nan"))

    z, xbc, dt = layer.project_in(hidden, "step", out=empty(c.in_proj_rows))
    y = layer.step(xbc, dt, step, ours, out=empty(c.d_inner))
    out = layer.project_out(y, z, hidden, "step", out=empty(c.hidden_size))
    plain = layer.reference()
    pairs = [
        (torch.cat([z, xbc, dt], -1), torch.cat(plain.project_in(hidden, "step"), -1)),
        (y, plain.step(xbc, dt, step, other)),
        (out, plain.project_out(y, z, hidden, "step")),
    ]
    folded = list(step.slots[:folding])
    pairs.append((ours.layer_state(0).ssm[folded], other.layer_state(0).ssm[folded]))
    return torch.stack([worst_row(*pair) for pair in pairs]).max().item()  # NaN where one is NaN


def worst_row(out: Tensor, truth: Tensor) -> Tensor:
    """The largest ‖out − truth‖ / ‖truth‖ of a row (first index), in float64."""
    wide, found = (t.flatten(1).double() for t in (truth, out))
    return ((found - wide).norm(dim=1) / wide.norm(dim=1)).max()


# -- the time --------------------------------------------------------------------------------------------------------


def time_layers(layers: list[NemotronMamba2Layer], case: Case) -> tuple[float, int]:
    """(microseconds per layer of one step, window rows), averaged over a window with every row accepted."""
    config = layers[0].config
    pool = _pool(config, len(layers), case, torch.device("cuda"))
    window = pool.layout.window_rows
    hidden = torch.randn(case.sequences * case.rows, config.hidden_size, device="cuda").bfloat16()

    def timed(folding: int) -> float:
        step = _begin(pool, case, folding)

        def work() -> Tensor:
            out = hidden
            for layer in layers:
                out = layer(out, step, pool)
            return out

        return microseconds(captured(work), repeats=15) / len(layers)

    folds, part = divmod(case.sequences * case.rows, window)  # sequences that fold in an average step
    us = timed(folds)
    return (us + part / window * (timed(folds + 1) - us) if part else us), window


def _pool(config: Mamba2Config, layers: int, case: Case, device: torch.device) -> StatePool:
    """A pool whose every slot holds a random sequence; equal arguments make equal pools."""
    pool = StatePool(config, layers=layers, slots=case.sequences, device=device, state_dtype=_dtype(case))
    pool.acquire(case.sequences)
    draw = torch.Generator(device).manual_seed(0)
    for layer in range(layers):
        state = pool.layer_state(layer)
        for tensor in (state.ssm, state.ring_x, state.ring_B, state.ring_conv):
            for slot in range(0, case.sequences, 16):  # a copy of few slots at a time
                part = tensor[slot : min(slot + 16, case.sequences)]
                part.copy_(torch.randn(part.shape, generator=draw, device=device) * 0.5)
        state.ring_dt[: case.sequences].uniform_(0.0, 0.1, generator=draw)
    return pool


def _begin(pool: StatePool, case: Case, folding: int) -> Step:
    """A step of all slots; the first `folding` are about to fold a window, the others are spread over its places."""
    window, count = pool.layout.window_rows, case.sequences
    slots = tuple(range(count))
    others = count - folding
    places = [0] * folding + [1 + (2 * i + 1) * (window - 1) // (2 * others) for i in range(others)]
    rows = Rows(
        slots=slots,
        rows=(case.rows,) * count,
        positions=tuple(2 * window + place for place in places),
        boundaries=(window,) * folding + (2 * window,) * others,
        first_row=0,
        device=pool.device,
    )
    _ = rows.cursors  # on the device before a capture
    return Step(Batch.verify(slots, rows.rows), None, rows)


def _dtype(case: Case) -> torch.dtype:
    found: torch.dtype = getattr(torch, case.state_dtype)
    return found


# -- peers -----------------------------------------------------------------------------------------------------------


def _ready(
    layers: list[NemotronMamba2Layer], peers: Sequence[type[Peer]], say: Callable[[str], None]
) -> Iterator[Peer]:
    """The peers that run these layers and agree with the reference on three steps of four sequences."""
    format = layers[0].weights.in_proj.format
    for kind in peers:
        try:
            peer = kind(layers[0].config, [layer.weights for layer in layers])
            error = check_peer(peer, layers[0])
        except Exception as failure:
            say(f"{kind.name}, {format}: not timed: {_first_line(failure)}")
            continue
        if error < PEER_TOLERANCE:
            yield peer
        else:
            say(f"{kind.name}, {format}: not timed: off the reference by {error:.3g}")


def check_peer(peer: Peer, layer: NemotronMamba2Layer) -> float:
    """How far a peer's first layer is from the reference after three steps."""
    device = layer.plan.device
    pool = StatePool(layer.config, layers=1, slots=4, device=device)
    slots, states = pool.acquire(4), peer.states(4, torch.float32)
    plain = layer.reference()
    for _ in range(3):
        hidden = torch.randn(4, layer.config.hidden_size, device=device).bfloat16()
        truth = plain(hidden, Batch.decode(slots), pool)
        out = peer.step(0, hidden, states[0], rows=1)
    return worst_row(out, truth).item()


def time_peer(peer: Peer, case: Case) -> float:
    """Microseconds per layer of the same step."""
    states = peer.states(case.sequences, _dtype(case))
    hidden = torch.randn(case.sequences * case.rows, peer.config.hidden_size, device="cuda").bfloat16()

    def work() -> Tensor:
        out = hidden
        for index, state in enumerate(states):
            out = peer.step(index, out, state, rows=case.rows)
        return out

    return microseconds(captured(work), repeats=15) / len(states)


def _first_line(failure: Exception) -> str:
    return f"{type(failure).__name__}: {(str(failure).splitlines() or [''])[0]}"
