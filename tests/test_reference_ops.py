"""Every op of the reference back end against float64, with `out=` full of NaN and rings full of NaN."""

from __future__ import annotations

import inspect
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

import oracle
from nemotron_mamba2.batch import Rows
from nemotron_mamba2.errors import FormatError, ShapeError
from nemotron_mamba2.formats import FORMATS as PACKAGE_FORMATS
from nemotron_mamba2.formats import dequantize
from nemotron_mamba2.ops import LayerState, Linear, backend, reference
from nemotron_mamba2.state import StatePool
from oracle import D80, FORMATS, ODD, S96, S256, SMALL, TINY, error, few, same_bits
from tolerances import BF16, FP16, FP32, tolerance

CPU = torch.device("cpu")
NAN = float("nan")
ACTIVATIONS = (FP32, BF16)
SHAPES = {"TINY": TINY, "D80": D80, "S256": S256, "S96": S96, "ODD": ODD}


def randn(*shape: int, seed: int, dtype: torch.dtype = FP32, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def rows_at(slots: list[int], counts: list[int], positions: list[int], boundaries: list[int]) -> Rows:
    return Rows(tuple(slots), tuple(counts), tuple(positions), tuple(boundaries), 0, CPU)


def fresh_state(config, dtype: torch.dtype, **settings) -> LayerState:
    pool = StatePool(config, layers=1, slots=3, dtype=dtype, **settings)
    pool.acquire(3)
    return pool.layer_state(0)


def test_the_back_end_of_a_cpu_is_the_reference() -> None:
    assert backend(CPU) is reference


def test_every_op_takes_out_and_names_its_tensors() -> None:
    for name in ("norm_linear", "norm_linear_residual", "conv", "scan", "step", "linear", "rms_norm"):
        parameters = inspect.signature(getattr(reference, name)).parameters
        assert parameters["out"].default is None and parameters["out"].kind is inspect.Parameter.KEYWORD_ONLY, name
    assert callable(reference.quantize)


# -- formats -----------------------------------------------------------------------------------------------------------


def test_dequantize_of_every_format_equals_decoding_by_hand() -> None:
    assert PACKAGE_FORMATS == FORMATS
    for format in FORMATS:
        weight = oracle.quantized(randn(200, 144, seed=3), format, 4)
        assert weight.format == format and weight.shape == (200, 144)
        truth = oracle.decoded(weight)
        # e2m1 × e4m3 and bf16 are exact in fp32; each fp32 scale rounds once
        assert (dequantize(weight).double() - truth).abs().max() <= 2.0**-23 * truth.abs().max(), format
        assert dequantize(weight, BF16).dtype == BF16


def test_every_code_of_e2m1_and_e4m3_decodes_to_its_value() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(
        oracle.e4m3_values(codes).nan_to_num(7e7), codes.view(torch.float8_e4m3fn).double().nan_to_num(7e7)
    )
    pairs = oracle.e2m1_values(codes).view(-1, 2)
    grid = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
    assert pairs.tolist() == [[grid[c % 16], grid[c // 16]] for c in range(256)]


@pytest.mark.parametrize("format", FORMATS)
def test_quantize_then_decode_is_near(format: str) -> None:
    values = randn(260, 272, seed=9) * torch.logspace(-2, 0, 260)[:, None]
    weight = reference.quantize(values, format)
    assert weight.format == format
    # half a step of the code: 2⁻⁹, 2⁻⁴ for 3 mantissa bits, up to 1/6 of the block's maximum for e2m1
    allowed = {"bf16": 2e-3, "fp8_tensor": 4e-2, "fp8_channel": 4e-2, "fp8_block": 4e-2, "nvfp4": 1.4e-1}[format]
    assert error(oracle.decoded(weight), values.double()) <= allowed


def test_quantize_refuses_an_unknown_format() -> None:
    with pytest.raises(FormatError, match="int3"):
        reference.quantize(randn(16, 16, seed=0), "int3")


def test_nvfp4_quantize_picks_the_nearest_code_and_keeps_zero_rows() -> None:
    values = randn(8, 64, seed=2)
    values[3] = 0
    weight = reference.quantize(values, "nvfp4")
    found = oracle.decoded(weight)
    assert not found[3].any()
    grid = oracle.e2m1_values(torch.arange(16, dtype=torch.uint8))[::2]
    scale = oracle.e4m3_values(weight.scale.view(torch.uint8)) * weight.global_scale.double()
    nearest = (values.double().reshape(8, 4, 16, 1) - grid * scale[..., None, None]).abs().amin(-1)
    assert torch.allclose((values.double() - found).abs().reshape(8, 4, 16), nearest, atol=1e-7)


# -- norms and projections ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("groups", [1, 2, 8])
def test_rms_norm(dtype: torch.dtype, groups: int) -> None:
    x, weight = randn(5, 240, seed=1, dtype=dtype, scale=3), 1 + randn(240, seed=2, scale=0.2)
    x[2] = 0
    truth = oracle.rms_norm(x.double(), weight, 1e-5, groups)
    out = torch.full_like(x, NAN)
    found = reference.rms_norm(x, weight, eps=1e-5, groups=groups, out=out)
    assert found is out and found.dtype == dtype
    assert error(found, truth) <= tolerance("rms_norm", dtype)
    assert same_bits(found, reference.rms_norm(x, weight, eps=1e-5, groups=groups))


def linear_of(weight, dtype: torch.dtype, *, copied: bool, **settings) -> Linear:
    plain = weight.format == "bf16" and dtype == BF16
    return Linear(weight, copy=dequantize(weight, dtype) if copied and not plain else None, **settings)


@pytest.mark.parametrize("copied", [True, False])
@pytest.mark.parametrize("dtype", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("format", FORMATS)
def test_linear_of_every_format(format: str, dtype: torch.dtype, copied: bool) -> None:
    """Few and many rows, output rows over one scratch block and no multiple of anything."""
    weight = oracle.quantized(randn(531, 208, seed=5, scale=0.1), format, 6)
    truth = oracle.decoded(weight)
    for upcast in (True, False):
        for reproducible in (True, False):
            linear = linear_of(weight, dtype, copied=copied, upcast=upcast, reproducible=reproducible)
            for rows, role in ((0, "step"), (1, "step"), (17, "step"), (3, "prompt"), (67, "prompt")):
                x = randn(rows, 208, seed=rows, dtype=dtype)
                out = torch.full((rows, 531), NAN, dtype=dtype)
                found = reference.linear(x, linear, role, out=out)
                assert found is out
                where = (upcast, reproducible, rows, role)
                assert error(found, x.double() @ truth.T) <= tolerance("linear", dtype), where


@pytest.mark.parametrize("dtype", ACTIVATIONS, ids=str)
@pytest.mark.parametrize(("format", "kind"), [("fp8_tensor", "fp8_static"), ("fp8_channel", "fp8_per_row")])
def test_linear_w8a8_multiplies_e4m3_activations(format: str, kind: str, dtype: torch.dtype) -> None:
    weight = oracle.quantized(randn(300, 208, seed=5, scale=0.1), format, 6)
    x = randn(9, 208, seed=8, dtype=dtype)
    x[4] *= 30  # saturates under the static scale
    x[5] = 0
    scale = (
        weight.input_scale.double() if kind == "fp8_static" else (x.float().abs().amax(-1, keepdim=True) / 448).double()
    )
    scale = scale.clamp(min=1e-30)
    truth = (oracle.to_e4m3(x.double() / scale) * scale) @ oracle.decoded(weight).T
    for reproducible in (True, False):
        linear = linear_of(weight, dtype, copied=False, prompt=kind, reproducible=reproducible)
        assert error(reference.linear(x, linear, "prompt"), truth) <= tolerance("linear", dtype)
        plain = x.double() @ oracle.decoded(weight).T  # step rows keep their activations
        assert error(reference.linear(x, linear, "step"), plain) <= tolerance("linear", dtype)


def test_linear_refuses_activations_of_another_width() -> None:
    linear = Linear(oracle.quantized(randn(32, 48, seed=0), "bf16", 0))
    with pytest.raises(ShapeError, match="48"):
        reference.linear(randn(2, 47, seed=0, dtype=BF16), linear, "step")


@pytest.mark.parametrize("dtype", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("role", ["prompt", "step"])
def test_norm_linear_and_its_twin_with_gate_and_residual(role: str, dtype: torch.dtype) -> None:
    config = TINY
    weights = oracle.mamba2_weights(config, "fp8_block", 3)
    truth = oracle.truth_of(config, weights)
    T, eps = 7, config.layer_norm_epsilon
    hidden = randn(T, config.hidden_size, seed=1, dtype=dtype)
    y, z = (randn(T, config.d_inner, seed=s, dtype=dtype) for s in (2, 3))
    out = torch.full((T, config.in_proj_rows), NAN, dtype=dtype)
    found = reference.norm_linear(
        hidden, weights.norm, linear_of(weights.in_proj, dtype, copied=True), eps=eps, role=role, out=out
    )
    assert found is out
    # The norm is rounded to the activation dtype between the two: two roundings.
    assert error(found, torch.cat(oracle.project_in(truth, hidden, role), 1)) <= 2 * tolerance("linear", dtype)
    out = torch.full_like(hidden, NAN)
    linear = linear_of(weights.out_proj, dtype, copied=True)
    found = reference.norm_linear_residual(
        y, z, weights.gated_norm, linear, hidden, groups=config.n_groups, eps=eps, role=role, out=out
    )
    assert found is out
    expected = oracle.project_out(truth, y, z, hidden, role)
    assert error(found, expected) <= 2 * tolerance("linear", dtype)
    assert (expected - hidden).norm() > 0.3 * hidden.norm()  # the residual is not all there is


# -- conv --------------------------------------------------------------------------------------------------------------


def run_conv(config, raw, dt, state, rows, weights, **out):
    return reference.conv(
        raw,
        dt,
        state,
        rows,
        weight=weights.conv1d_weight,
        bias=weights.conv1d_bias,
        dt_bias=weights.dt_bias,
        time_step_limit=config.time_step_limit,
        **out,
    )


@pytest.mark.parametrize("dtype", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@few(5)
@given(counts=st.lists(st.integers(0, 140), min_size=1, max_size=3), seed=st.integers(0, 999), bias=st.booleans())
def test_conv_of_ragged_rows(shape: str, dtype: torch.dtype, counts: list[int], seed: int, bias: bool) -> None:
    config = SHAPES[shape]
    weights = oracle.mamba2_weights(config, seed=1, bias=bias)
    state = fresh_state(config, dtype)
    T = sum(counts)
    raw, dt = (randn(T, n, seed=seed + n, dtype=dtype) for n in (config.conv_dim, config.mamba_num_heads))
    rows = rows_at(list(range(len(counts))), counts, [0] * len(counts), [0] * len(counts))
    out = (torch.full((T, config.conv_dim), NAN, dtype=dtype), torch.full((T, config.mamba_num_heads), NAN))
    found, steps = run_conv(config, raw, dt, state, rows, weights, out=out)
    assert found is out[0] and steps is out[1] and steps.dtype == FP32
    zeros = torch.zeros(3, config.conv_dim)
    parts = [oracle.convolve(r, zeros, weights.conv1d_weight, weights.conv1d_bias) for r in raw.split(counts)]
    assert error(found, torch.cat(parts)) <= tolerance("conv", dtype)
    assert error(steps, oracle.time_steps(dt, weights.dt_bias, None)) <= 1e-6


def test_conv_refuses_out_of_the_wrong_length() -> None:
    weights, state = oracle.mamba2_weights(SMALL), fresh_state(SMALL, FP32)
    raw, dt = randn(4, SMALL.conv_dim, seed=1), randn(4, 4, seed=2)
    with pytest.raises(ShapeError):
        run_conv(SMALL, raw, dt, state, rows_at([0], [4], [0], [0]), weights, out=(raw.clone()[:3], dt.clone()[:3]))


@pytest.mark.parametrize("width", [2, 3, 5])
def test_conv_of_other_widths(width: int) -> None:
    config = replace(SMALL, conv_kernel=width)
    weights, state = oracle.mamba2_weights(config, seed=width), fresh_state(config, FP32)
    raw, dt = randn(9, config.conv_dim, seed=1), randn(9, 4, seed=2)
    found, _ = run_conv(config, raw, dt, state, rows_at([0], [9], [0], [0]), weights)
    truth = oracle.convolve(raw, torch.zeros(width - 1, config.conv_dim), weights.conv1d_weight, weights.conv1d_bias)
    assert error(found, truth) <= tolerance("conv")


# -- scan and step -----------------------------------------------------------------------------------------------------


def scan_truth(config, weights, xbc, dt, start, *, position=0, window_rows=16, kept=None, store=None):
    x, B, C = oracle.split_xbc(xbc.double(), config)
    return oracle.recurrence(
        start,
        x,
        B,
        C,
        dt.double(),
        weights.A_log,
        weights.D,
        position=position,
        window_rows=window_rows,
        kept=kept,
        store=store,
    )


@pytest.mark.parametrize("dtype", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@few(4)
@given(
    counts=st.lists(st.integers(0, 200), min_size=1, max_size=3),
    start=st.integers(0, 20),
    window=st.sampled_from([16, 1]),
    reproducible=st.booleans(),
    seed=st.integers(0, 999),
)
@example(counts=[128, 0, 65], start=4, window=16, reproducible=True, seed=0)
@example(counts=[70, 3, 45], start=1, window=16, reproducible=False, seed=1)
def test_scan_from_a_boundary_state(shape, dtype, counts, start, window, reproducible, seed) -> None:
    """xBC and dt are given, so nothing but the recurrence differs. The boundary state is random, not zero."""
    config = SHAPES[shape]
    H, P, N = config.mamba_num_heads, config.mamba_head_dim, config.ssm_state_size
    weights, state = oracle.mamba2_weights(config, seed=2), fresh_state(config, dtype, window_rows=window)
    position = start * 16
    T = sum(counts)
    xbc = randn(T, config.conv_dim, seed=seed, dtype=dtype)
    dt = randn(T, H, seed=seed + 1).abs() * 0.5
    state.ssm[:3] = randn(3, H, P, N, seed=seed + 2)
    starts = state.ssm.double().clone()
    places = [position] * len(counts)
    rows = rows_at([2, 0, 1][: len(counts)], counts, places, places)
    out = torch.full((T, H * P), NAN, dtype=dtype)
    found = reference.scan(xbc, dt, state, rows, A_log=weights.A_log, D=weights.D, reproducible=reproducible, out=out)
    assert found is out
    expected = []
    for slot, n, part, steps in zip(rows.slots, counts, xbc.split(counts), dt.split(counts), strict=True):
        kept = {position: starts[slot]}
        y, _ = scan_truth(config, weights, part, steps, starts[slot], position=position, window_rows=window, kept=kept)
        expected.append(y.flatten(1))
        last = (position + n) // window * window
        assert error(state.ssm[slot], kept[last]) <= tolerance("state"), (slot, last)
    assert error(found, torch.cat(expected)) <= tolerance("scan", dtype)


def step_args(config, weights) -> dict:
    return {
        "conv_weight": weights.conv1d_weight,
        "conv_bias": weights.conv1d_bias,
        "dt_bias": weights.dt_bias,
        "A_log": weights.A_log,
        "D": weights.D,
        "time_step_limit": config.time_step_limit,
    }


@pytest.mark.parametrize("dtype", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("window", [16, 1])
def test_step_of_several_slots(shape: str, dtype: torch.dtype, window: int) -> None:
    """40 rows in steps of 1 to 8, two live slots and a pad row between them."""
    config = SHAPES[shape]
    weights, pool = (
        oracle.mamba2_weights(config, seed=4),
        StatePool(config, layers=1, slots=2, dtype=dtype, window_rows=window),
    )
    slots = pool.acquire(2)
    state = pool.layer_state(0)
    H = config.mamba_num_heads
    raw = [randn(40, config.conv_dim, seed=s, dtype=dtype) for s in (1, 2)]
    dts = [randn(40, H, seed=s, dtype=dtype) for s in (3, 4)]
    expected = []
    for r, d in zip(raw, dts, strict=True):
        xbc = oracle.convolve(r, torch.zeros(3, config.conv_dim), weights.conv1d_weight, weights.conv1d_bias)
        start = torch.zeros(H, config.mamba_head_dim, config.ssm_state_size, dtype=torch.float64)
        y, _ = scan_truth(config, weights, xbc, oracle.time_steps(d, weights.dt_bias, None), start)
        expected.append(y.flatten(1))
    found: list[list[Tensor]] = [[], []]
    position = boundary = 0
    for n in (1, 8, 3, 4, 8, 8, 1, 7):
        here = slice(position, position + n)
        padding = randn(2, config.conv_dim + H, seed=n, dtype=dtype)
        rows = rows_at([slots[0], pool.pad_slot, slots[1]], [n, 2, n], [position, 0, position], [boundary, 0, boundary])
        out = torch.full((2 * n + 2, config.d_inner), NAN, dtype=dtype)
        y = reference.step(
            torch.cat([raw[0][here], padding[:, H:], raw[1][here]]),
            torch.cat([dts[0][here], padding[:, :H], dts[1][here]]),
            state,
            rows,
            **step_args(config, weights),
            out=out,
        )
        assert y is out and not y[n : n + 2].any()  # pads give zeros
        found[0].append(y[:n])
        found[1].append(y[n + 2 :])
        boundary = position // window * window  # what was folded before these rows
        position += n
    for mine, truth in zip(found, expected, strict=True):
        assert error(torch.cat(mine), truth) <= tolerance("step", dtype)


def test_step_rows_have_the_same_bits_in_any_split() -> None:
    config, weights = ODD, oracle.mamba2_weights(ODD, seed=5)
    raw, dt = randn(45, config.conv_dim, seed=1), randn(45, 6, seed=2)
    results = []
    for sizes in ([1] * 45, [8] * 5 + [5], [3, 8, 7, 1, 2, 8, 8, 8]):
        state, y, position, boundary = fresh_state(config, FP32), [], 0, 0
        for n in sizes:
            here = slice(position, position + n)
            rows = rows_at([1], [n], [position], [boundary])
            y.append(reference.step(raw[here], dt[here], state, rows, **step_args(config, weights)))
            boundary, position = position // 16 * 16, position + n
        results.append(torch.cat(y))
    assert same_bits(results[0], results[1]) and same_bits(results[0], results[2])


# -- the state's dtype -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state_dtype", [BF16, FP16], ids=str)
def test_a_stored_state_is_the_rounded_one(state_dtype: torch.dtype) -> None:
    """bf16: nearest, bit for bit where fp32 agrees with float64. fp16: one of the two neighbours, both of them used."""
    config, weights = TINY, oracle.mamba2_weights(TINY, seed=3)
    xbc, dt = randn(16, config.conv_dim, seed=1), randn(16, 8, seed=2).abs()
    states = {}
    for dtype in (FP32, state_dtype):
        state = fresh_state(config, FP32, state_dtype=dtype)
        reference.scan(xbc, dt, state, rows_at([0], [16], [0], [0]), A_log=weights.A_log, D=weights.D)
        states[dtype] = state.ssm[0].clone()
    exact, stored = states[FP32], states[state_dtype]
    assert stored.dtype == state_dtype
    if state_dtype == BF16:
        assert same_bits(stored, exact.bfloat16())
        return
    nearest = exact.half()
    assert 0.2 < (stored != nearest).float().mean() < 0.3  # a uniform fraction rounds the far way one time in four
    assert ((stored.float() - exact).abs() <= exact.abs() * 2.0**-10 + 2.0**-24).all()
    assert abs(float((stored.double() - exact.double()).mean() / exact.double().abs().mean())) < 2e-5  # no bias


def test_fp16_draws_depend_on_seed_layer_and_position_only() -> None:
    values = randn(4, 16, 16, seed=1)

    def rounded(seed: int, layer: int, position: int) -> Tensor:
        pool = StatePool(SMALL, layers=3, slots=1, state_dtype=FP16, seed=seed)
        return reference.mamba2.round_state(values, pool.layer_state(layer), position)

    base = rounded(7, 1, 32)
    assert same_bits(base, rounded(7, 1, 32))
    for other in (rounded(8, 1, 32), rounded(7, 2, 32), rounded(7, 1, 48)):
        share = float((other != base).float().mean())
        assert 0.2 < share < 0.5, share  # independent draws differ one time in three
    halves = values.half().float()  # what fp16 holds exactly has nothing to round
    pool = StatePool(SMALL, layers=1, slots=1, state_dtype=FP16)
    assert same_bits(reference.mamba2.round_state(halves, pool.layer_state(0), 16), halves.half())


@pytest.mark.parametrize("value", [1e-6, 3e-8, -5.5e-5, 6.05e-5, 0.1, -1 / 3, 1234.5678, 65503.0])
def test_fp16_rounding_has_no_bias_at_any_magnitude(value: float) -> None:
    """Subnormals too: the mean of many draws is the value, within six standard errors."""
    pool = StatePool(SMALL, layers=1, slots=1, state_dtype=FP16)
    values = torch.full((16, 64, 64), value)
    rounded = reference.mamba2.round_state(values, pool.layer_state(0), 16).double()
    spread = rounded.std() / rounded.numel() ** 0.5
    assert abs(rounded.mean() - values.double().mean()) <= 6 * spread + 1e-12
    assert len(rounded.unique()) <= 2


@pytest.mark.parametrize("value", [65504.0, 65520.0, 7e4, 1e9, 3.4e38, float("inf")])
def test_fp16_stores_saturate(value: float) -> None:
    pool = StatePool(SMALL, layers=1, slots=1, state_dtype=FP16)
    for sign in (1, -1):
        rounded = reference.mamba2.round_state(torch.full((4, 16, 16), sign * value), pool.layer_state(0), 16)
        assert (rounded == sign * 65504).all()
