"""The step kernels of the GPU: against float64, against the reference, and the laws of the same bits.

Needs an NVIDIA GPU (`scripts/test-gpu`). What can be checked without one — that every variant compiles for every
architecture without spilling, and that NVFP4 packing loses nothing — is in `test_gpu_compile.py`.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nemotron_mamba2.batch import Batch
from nemotron_mamba2.bench import records
from nemotron_mamba2.config import Mamba2Config, Policy
from nemotron_mamba2.formats import FORMATS, Plain, dequantize
from nemotron_mamba2.layer import NemotronMamba2Layer
from nemotron_mamba2.ops import Linear, reference
from nemotron_mamba2.plan import make_plan
from nemotron_mamba2.state import StatePool
from nemotron_mamba2.weights import Mamba2Weights

pytestmark = pytest.mark.gpu

SHAPES = records.SHAPES | {
    "state256": Mamba2Config(1024, 32, 64, 8, 256),
    "state96": Mamba2Config(1024, 16, 64, 2, 96),
    "narrow": Mamba2Config(256, 16, 32, 2, 128),  # one warp has a whole row
}
ROWS = (1, 2, 3, 4, 5, 8, 9, 16, 17, 64, 255, 256, 300)
PRODUCT_ERROR = 2.5e-3  # one rounding to bf16 is 1.7e-3
STEP_ERROR = 1e-4  # against the reference: both round x and B to bf16, sums differ in order


def relative(out: Tensor, truth: Tensor) -> float:
    return ((out.double() - truth.double()).norm() / truth.double().norm()).item()


def random_linear(format: str, rows: int, columns: int) -> Linear:
    from nemotron_mamba2.ops import gpu

    values = torch.randn(rows, columns, device="cuda") * 0.02
    weight = Plain(values.bfloat16()) if format == "bf16" else reference.quantize(values, format)
    return Linear(weight, packed=gpu.pack(weight) if format == "nvfp4" else None)


def random_weights(config: Mamba2Config, format: str) -> Mamba2Weights:
    heads, randn = config.mamba_num_heads, lambda *shape: torch.randn(*shape, device="cuda")
    return Mamba2Weights(
        norm=torch.rand(config.hidden_size, device="cuda") + 0.5,
        in_proj=random_linear(format, config.in_proj_rows, config.hidden_size).weight,
        conv1d_weight=randn(config.conv_dim, 4) * 0.4,
        conv1d_bias=randn(config.conv_dim) * 0.1,
        dt_bias=randn(heads) - 2,
        A_log=torch.rand(heads, device="cuda").mul(15).add(1).log(),
        D=randn(heads),
        gated_norm=torch.rand(config.d_inner, device="cuda") + 0.5,
        out_proj=random_linear(format, config.hidden_size, config.d_inner).weight,
    )


def nan_pool(config: Mamba2Config, *, slots: int = 20, state_dtype: torch.dtype = torch.float32) -> StatePool:
    pool = StatePool(config, layers=1, slots=slots, device="cuda", state_dtype=state_dtype)
    state = pool.layer_state(0)
    for tensor in (state.ssm, state.ring_x, state.ring_B, state.ring_dt, state.ring_conv):
        tensor[:slots] = float("nan")
    return pool


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_norm_linear_at_any_row_count(shape: str, format: str) -> None:
    from nemotron_mamba2.ops import gpu

    config = SHAPES[shape]
    linear = random_linear(format, config.in_proj_rows, config.hidden_size)
    hidden = torch.randn(max(ROWS), config.hidden_size + 64, device="cuda").bfloat16()[:, 16 : 16 + config.hidden_size]
    norm = torch.rand(config.hidden_size, device="cuda") + 0.5
    wide = hidden.double()
    normed = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5) * norm.double()).bfloat16()
    truth = normed.double() @ dequantize(linear.weight).double().T
    first = None
    for rows in ROWS:
        out = torch.full((rows, config.in_proj_rows), float("nan"), device="cuda", dtype=torch.bfloat16)
        gpu.norm_linear(hidden[:rows], norm, linear, eps=1e-5, role="step", out=out)
        assert relative(out, truth[:rows]) < PRODUCT_ERROR, rows
        first = out[0].clone() if first is None else first
        assert torch.equal(out[0], first), f"row 0 has other bits among {rows} rows"


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_norm_linear_residual_at_any_row_count(shape: str, format: str) -> None:
    from nemotron_mamba2.ops import gpu

    config = SHAPES[shape]
    linear = random_linear(format, config.hidden_size, config.d_inner)
    y = torch.randn(max(ROWS), config.d_inner, device="cuda").bfloat16()
    z = torch.randn(max(ROWS), config.in_proj_rows, device="cuda").bfloat16()[:, : config.d_inner]
    residual = torch.randn(max(ROWS), config.hidden_size, device="cuda").bfloat16()
    norm = torch.rand(config.d_inner, device="cuda") + 0.5
    gated = (y.double() * z.double() * torch.sigmoid(z.double())).view(len(y), config.n_groups, -1)
    normed = (gated * torch.rsqrt(gated.square().mean(-1, keepdim=True) + 1e-5)).flatten(1) * norm.double()
    truth = normed.bfloat16().double() @ dequantize(linear.weight).double().T + residual.double()
    first = None
    for rows in ROWS:
        out = torch.full((rows, config.hidden_size), float("nan"), device="cuda", dtype=torch.bfloat16)
        gpu.norm_linear_residual(
            y[:rows], z[:rows], norm, linear, residual[:rows],
            groups=config.n_groups, eps=1e-5, role="step", out=out,
        )  # fmt: skip
        assert relative(out, truth[:rows]) < PRODUCT_ERROR, rows
        first = out[0].clone() if first is None else first
        assert torch.equal(out[0], first), f"row 0 has other bits among {rows} rows"


@pytest.mark.parametrize("format", FORMATS)
def test_linear_of_normed_rows_is_norm_linear(format: str) -> None:
    from nemotron_mamba2.ops import gpu

    config = SHAPES["nano30b"]
    linear = random_linear(format, config.in_proj_rows, config.hidden_size)
    hidden = torch.randn(max(ROWS), config.hidden_size, device="cuda").bfloat16()
    norm = torch.rand(config.hidden_size, device="cuda") + 0.5
    normed = gpu.rms_norm(hidden, norm, eps=1e-5)
    for rows in ROWS:
        out = gpu.linear(normed[:rows], linear, "step")
        assert torch.equal(out, gpu.norm_linear(hidden[:rows], norm, linear, eps=1e-5, role="step")), rows


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("limit", [None, (0.01, 0.5)])
def test_step_equals_the_reference(shape: str, state_dtype: torch.dtype, limit: tuple[float, float] | None) -> None:
    from nemotron_mamba2.ops import gpu

    config, weights = SHAPES[shape], random_weights(SHAPES[shape], "bf16")
    results = []
    for ops in (reference, gpu):
        torch.manual_seed(1)
        pool = nan_pool(config, slots=5, state_dtype=state_dtype)
        slots, outs = pool.acquire(4), []
        for turn in range(10):
            projected = torch.randn(17, config.in_proj_rows, device="cuda").bfloat16()
            with pool.step(Batch.verify(slots, [3, 1, 8, 5])) as step:
                out = ops.step(
                    projected[:, config.d_inner : -config.mamba_num_heads],
                    projected[:, -config.mamba_num_heads :],
                    pool.layer_state(0),
                    step.step,
                    conv_weight=weights.conv1d_weight,
                    conv_bias=weights.conv1d_bias,
                    dt_bias=weights.dt_bias,
                    A_log=weights.A_log,
                    D=weights.D,
                    time_step_limit=limit,
                )
            outs.append(out)
            pool.commit(slots, [3, turn % 2, 7, 2])
        results.append((torch.cat(outs), pool.layer_state(0).ssm[slots]))
    (truth, truth_state), (out, state) = results
    assert relative(out, truth) < STEP_ERROR
    assert relative(state, truth_state) < STEP_ERROR


def run_decode(layer: NemotronMamba2Layer, hidden: Tensor) -> Tensor:
    """Token by token in a fresh pool."""
    pool = nan_pool(layer.config)
    [slot] = pool.acquire()
    return torch.cat([layer(row[None], Batch.decode([slot]), pool) for row in hidden])


@pytest.fixture(params=FORMATS)
def layer(request: pytest.FixtureRequest) -> NemotronMamba2Layer:
    config = SHAPES["nano30b"]
    weights = random_weights(config, request.param)
    return NemotronMamba2Layer(config, weights, make_plan(config, weights, Policy(), device="cuda"))


def test_law_verify_then_commit_is_decode(layer: NemotronMamba2Layer) -> None:
    hidden = torch.randn(80, layer.config.hidden_size, device="cuda").bfloat16()
    truth = run_decode(layer, hidden)
    pool = nan_pool(layer.config)
    [slot], place, outs = pool.acquire(), 0, []
    for turn in range(1000):
        rows = min(1 + turn * 5 % 8, len(hidden) - place)
        if not rows:
            break
        accepted = 1 + turn * 3 % rows
        drafted = hidden[place : place + rows].clone()
        drafted[accepted:] = torch.randn_like(drafted[accepted:])
        out = layer(drafted, Batch.verify([slot], [rows]), pool)
        pool.commit([slot], [accepted])
        outs.append(out[:accepted])
        place += accepted
    assert torch.equal(torch.cat(outs), truth)


@pytest.mark.parametrize("size", [2, 3, 8, 17])
def test_law_a_row_alone_is_a_row_of_any_batch(layer: NemotronMamba2Layer, size: int) -> None:
    hidden = torch.randn(40, size, layer.config.hidden_size, device="cuda").bfloat16()
    pool = nan_pool(layer.config)
    slots, place = pool.acquire(size), size // 2
    batch = Batch.join(Batch.decode(slots), Batch.decode([pool.pad_slot, pool.pad_slot]))
    padding = torch.randn(2, layer.config.hidden_size, device="cuda").bfloat16()
    outs = [layer(torch.cat([rows, padding]), batch, pool)[place] for rows in hidden]
    assert torch.equal(torch.stack(outs), run_decode(layer, hidden[:, place]))


def test_law_restored_elsewhere_goes_on_with_the_same_bits(layer: NemotronMamba2Layer) -> None:
    hidden = torch.randn(50, layer.config.hidden_size, device="cuda").bfloat16()
    truth = run_decode(layer, hidden)
    pool = nan_pool(layer.config)
    a, b = pool.acquire(2)
    for row in hidden[:23]:
        layer(row[None], Batch.decode([a]), pool)
    pool.restore(b, pool.snapshot(a))
    outs = [layer(row[None], Batch.decode([b]), pool) for row in hidden[23:]]
    assert torch.equal(torch.cat(outs), truth[23:])


def test_law_a_replayed_graph_is_eager(layer: NemotronMamba2Layer) -> None:
    hidden = torch.randn(1, layer.config.hidden_size, device="cuda").bfloat16()
    pool = nan_pool(layer.config)
    [slot] = pool.acquire()
    for _ in range(5):
        layer(hidden, Batch.decode([slot]), pool)
    saved = pool.snapshot(slot)
    eager = layer(hidden, Batch.decode([slot]), pool)
    pool.restore(slot, saved)
    with pool.step(Batch.decode([slot])) as step:
        assert step.step is not None
        _ = step.step.cursors  # copied before capture: a graph reads them from device memory
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = layer(hidden, step, pool)
        graph.replay()
    assert torch.equal(out, eager)


def test_prefill_then_decode_is_decode_from_the_start(layer: NemotronMamba2Layer) -> None:
    hidden = torch.randn(90, layer.config.hidden_size, device="cuda").bfloat16()
    truth = run_decode(layer, hidden)
    pool = nan_pool(layer.config)
    [slot] = pool.acquire()
    outs = [layer(hidden[:70], Batch.prefill([slot], [70]), pool)]
    outs += [layer(row[None], Batch.decode([slot]), pool) for row in hidden[70:]]
    quantised = layer.plan.linears[0].prompt != "none"  # FP8 activations for prompt rows, as the checkpoint asks
    assert relative(torch.cat(outs), truth) < (5e-2 if quantised else 1e-2)
