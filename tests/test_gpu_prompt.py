"""The prompt kernels of the GPU: against float64 and the reference, at every length, ragged and split.

Needs an NVIDIA GPU (`scripts/test-gpu`); that every variant compiles without spilling is in `test_gpu_compile.py`.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from nemotron_mamba2.batch import Batch
from nemotron_mamba2.config import Mamba2Config, Policy
from nemotron_mamba2.formats import FORMATS, Fp8Channel, Fp8Tensor, dequantize
from nemotron_mamba2.layer import NemotronMamba2Layer
from nemotron_mamba2.ops import Linear, reference
from nemotron_mamba2.plan import make_plan
from nemotron_mamba2.state import StatePool
from test_gpu_step import SHAPES, nan_pool, random_weights, relative
from tolerances import tolerance

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
LENGTHS = [*range(1, 10), 63, 64, 65, 127, 128, 129, 1023, 1024, 1025, 1026, 1027, 8191, 8192, 8193]
STATE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def prompt(ops, config: Mamba2Config, weights, pool: StatePool, slots, counts, projected: Tensor, **scan) -> Tensor:
    """conv and scan of one batch of prompts; outputs poisoned beforehand."""
    with pool.step(Batch.prefill(slots, counts)) as step:
        rows, state = step.prompt, pool.layer_state(0)
        wide = ops.scan_rows(rows)
        out = (
            projected.new_full((wide, config.conv_dim), float("nan")),
            torch.full((wide, config.mamba_num_heads), float("nan"), device="cuda"),
        )
        xbc, dt = ops.conv(
            projected[:, config.d_inner : -config.mamba_num_heads],
            projected[:, -config.mamba_num_heads :],
            state,
            rows,
            weight=weights.conv1d_weight,
            bias=weights.conv1d_bias,
            dt_bias=weights.dt_bias,
            out=out,
        )
        y = projected.new_full((rows.total_rows, config.d_inner), float("nan"))
        return ops.scan(xbc, dt, state, rows, A_log=weights.A_log, D=weights.D, out=y, **scan)


def split64(xbc: Tensor, config: Mamba2Config) -> tuple[Tensor, Tensor, Tensor]:
    """x [T, H, P], B and C [T, H, N] in float64."""
    H, P, G, N = config.mamba_num_heads, config.mamba_head_dim, config.n_groups, config.ssm_state_size
    x, B, C = xbc.double().split([H * P, G * N, G * N], -1)
    B, C = (part.unflatten(-1, (G, N)).repeat_interleave(H // G, 1) for part in (B, C))
    return x.unflatten(-1, (H, P)), B, C


def random_rows(config: Mamba2Config, rows: int) -> Tensor:
    return torch.randn(rows, config.in_proj_rows, device="cuda").bfloat16()


def states_close(config: Mamba2Config, ours: StatePool, theirs: StatePool, slots: list[int]) -> None:
    """The states, the live rows of the window rings, and the raw rows that the next convolution reads."""
    a, b = ours.layer_state(0), theirs.layer_state(0)
    assert (a.ssm[slots].float() - b.ssm[slots].float()).norm() <= tolerance(
        "state", BF16, state_dtype=a.ssm.dtype
    ) * b.ssm[slots].float().norm()
    for slot in slots:
        position = theirs.position(slot)
        window = [t % a.ring_dt.shape[1] for t in range(position // 16 * 16, position)]
        raw = [t % a.ring_conv.shape[1] for t in range(max(position - 3, 0), position)]
        for name, places in (("ring_x", window), ("ring_B", window), ("ring_dt", window), ("ring_conv", raw)):
            if places:
                assert relative(getattr(a, name)[slot, places], getattr(b, name)[slot, places]) < 5e-3, (name, position)


@pytest.mark.parametrize("state_dtype", STATE_DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_conv_and_scan_equal_the_reference(shape: str, state_dtype: torch.dtype) -> None:
    from nemotron_mamba2.ops import gpu

    config, weights = SHAPES[shape], random_weights(SHAPES[shape], "bf16")
    turns = [[130, 0, 5, 64, 1], [3, 17, 64, 1, 700], [1, 1, 0, 63, 12], [65, 200, 1, 15, 16]]
    pools, outs = [], []
    for ops in (reference, gpu):
        torch.manual_seed(1)
        pool = nan_pool(config, slots=7, state_dtype=state_dtype)
        slots = pool.acquire(5)
        outs.append(
            [prompt(ops, config, weights, pool, slots, counts, random_rows(config, sum(counts))) for counts in turns]
        )
        pools.append(pool)
    for theirs, ours in zip(*outs, strict=True):
        assert relative(ours, theirs) < tolerance("scan", BF16, state_dtype=state_dtype)
    states_close(config, pools[1], pools[0], slots)


@pytest.mark.parametrize("shape", ["nano30b", "nano4b", "state96"])
def test_every_length(shape: str) -> None:
    from nemotron_mamba2.ops import gpu

    config, weights = SHAPES[shape], random_weights(SHAPES[shape], "bf16")
    for length in LENGTHS:
        projected = random_rows(config, length)
        pools = [nan_pool(config, slots=3) for _ in range(2)]
        slots, _ = (pool.acquire() for pool in pools)
        theirs, ours = (
            prompt(ops, config, weights, pool, slots, [length], projected)
            for ops, pool in zip((reference, gpu), pools, strict=True)
        )
        assert relative(ours, theirs) < tolerance("scan", BF16), length
        states_close(config, pools[1], pools[0], slots)


def test_the_scan_against_float64() -> None:
    """Token by token in float64 over the very rows that the scan reads."""
    from nemotron_mamba2.ops import gpu

    config, weights = SHAPES["nano30b"], random_weights(SHAPES["nano30b"], "bf16")
    H, P, N = config.mamba_num_heads, config.mamba_head_dim, config.ssm_state_size
    pool = nan_pool(config, slots=3)
    slots, length = pool.acquire(), 300
    with pool.step(Batch.prefill(slots, [length])) as step:
        xbc = torch.randn(length, config.conv_dim, device="cuda").bfloat16()
        dt = torch.rand(length, H, device="cuda") * 0.2
        y = gpu.scan(xbc, dt, pool.layer_state(0), step.prompt, A_log=weights.A_log, D=weights.D)
    x, B, C = split64(xbc, config)
    state, truth = torch.zeros(H, P, N, device="cuda", dtype=torch.float64), []
    A, steps = -weights.A_log.double().exp(), dt.double()
    for t in range(length):
        state = state * (steps[t] * A).exp()[:, None, None]
        state += (steps[t][:, None] * x[t]).unsqueeze(-1) * B[t].unsqueeze(1)
        truth.append(torch.einsum("hpn,hn->hp", state, C[t]) + weights.D.double()[:, None] * x[t])
        if t + 1 == length // 16 * 16:
            kept = state.clone()
    assert relative(y, torch.stack(truth).flatten(1)) < tolerance("scan", BF16)
    assert relative(pool.layer_state(0).ssm[slots[0]], kept) < tolerance("state", BF16)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("sequences", [1, 3])
def test_no_configuration_ever_gives_nan(shape: str, sequences: int) -> None:
    """A down to −1e4, dt up to 100, 200 draws."""
    from nemotron_mamba2.ops import gpu

    config, weights = SHAPES[shape], random_weights(SHAPES[shape], "bf16")
    heads = config.mamba_num_heads
    for draw in range(200):
        torch.manual_seed(draw)
        pool = nan_pool(config, slots=4)
        slots = pool.acquire(sequences)
        with pool.step(Batch.prefill(slots, [190] * sequences)) as step:
            xbc = torch.randn(190 * sequences, config.conv_dim, device="cuda").bfloat16()
            dt = torch.rand(190 * sequences, heads, device="cuda").pow(4) * 100
            A_log = torch.rand(heads, device="cuda") * 9.21
            y = gpu.scan(xbc, dt, pool.layer_state(0), step.prompt, A_log=A_log, D=weights.D)
        assert y.isfinite().all() and pool.layer_state(0).ssm[slots].isfinite().all(), draw


def test_decays_that_wipe_the_state_lose_nothing_after_them() -> None:
    """Rows of huge dt·A between rows of small ones: the small ones keep their decays."""
    from nemotron_mamba2.ops import gpu

    config, weights = SHAPES["state96"], random_weights(SHAPES["state96"], "bf16")
    H = config.mamba_num_heads
    pool = nan_pool(config, slots=3)
    slots, length = pool.acquire(), 64
    xbc = torch.randn(length, config.conv_dim, device="cuda").bfloat16()
    dt = torch.full((length, H), 1e-3, device="cuda")
    dt[::4] = 100.0
    A_log = torch.full((H,), 9.21, device="cuda")
    with pool.step(Batch.prefill(slots, [length])) as step:
        y = gpu.scan(xbc, dt, pool.layer_state(0), step.prompt, A_log=A_log, D=weights.D)
    x, B, C = split64(xbc, config)
    log = (dt.double() * -A_log.double().exp()).cumsum(0)
    weight = (log[:, None] - log[None]).clamp(max=0).exp()
    weight = weight * torch.ones(length, length, device="cuda", dtype=torch.float64).tril().unsqueeze(-1) * dt.double()
    y64 = torch.einsum("ijh,ihn,jhn,jhp->ihp", weight, C, B, x) + weights.D.double()[:, None] * x
    assert relative(y, y64.flatten(1)) < tolerance("scan", BF16)


def test_a_row_pitch_that_overflows_32_bits() -> None:
    """62,000 rows of 35,072 columns: the last rows lie past 2^31 elements."""
    from nemotron_mamba2.ops import gpu

    config = SHAPES["ultra550b"]
    weights, length = random_weights(config, "bf16"), 62_000
    projected = torch.empty(length, config.in_proj_rows, device="cuda", dtype=BF16)
    for part in projected.split(4096):
        part.normal_()
    pool, short = nan_pool(config, slots=2), nan_pool(config, slots=2)
    y = prompt(gpu, config, weights, pool, pool.acquire(), [length], projected)
    # Decay forgets: the last rows alone, after 4,096 rows before them, give nearly the same.
    tail = prompt(gpu, config, weights, short, short.acquire(), [4096 + 304], projected[-4400:])
    assert y.isfinite().all()
    assert relative(y[-300:], tail[-300:]) < 1e-2


def test_seventy_thousand_rows() -> None:
    from nemotron_mamba2.ops import gpu

    config, weights = SHAPES["nano30b"], random_weights(SHAPES["nano30b"], "bf16")
    projected = random_rows(config, 70_000)
    pools = [nan_pool(config, slots=2) for _ in range(2)]
    slots, _ = (pool.acquire() for pool in pools)
    whole = prompt(gpu, config, weights, pools[0], slots, [70_000], projected)
    parts = [prompt(gpu, config, weights, pools[1], slots, [len(part)], part) for part in projected.split(30_011)]
    assert relative(torch.cat(parts), whole) < tolerance("scan", BF16)
    states_close(config, pools[1], pools[0], slots)


# -- whole layers ------------------------------------------------------------------------------------------------------


def make_layer(shape: str, format: str, policy: Policy = Policy()) -> NemotronMamba2Layer:  # noqa: B008
    weights = random_weights(SHAPES[shape], format)
    return NemotronMamba2Layer(SHAPES[shape], weights, make_plan(SHAPES[shape], weights, policy, device="cuda"))


def prefill(layer: NemotronMamba2Layer, hidden: Tensor, cuts: list[int], pool: StatePool | None = None) -> Tensor:
    pool = pool or nan_pool(layer.config)
    [slot] = pool.acquire()
    places = [0, *cuts, len(hidden)]
    return torch.cat([layer(hidden[a:b], Batch.prefill([slot], [b - a]), pool) for a, b in pairwise(places)])


def mixer(out: Tensor, hidden: Tensor) -> Tensor:
    return out.float() - hidden.float()


@pytest.mark.parametrize("policy", [Policy(), Policy(prompt="exact"), Policy(prompt="fp8"), Policy(reproducible=True)])
@pytest.mark.parametrize("format", FORMATS)
def test_products_of_prompt_rows(format: str, policy: Policy) -> None:
    from nemotron_mamba2.ops import gpu

    layer = make_layer("nano30b", format, policy)
    linear: Linear = layer._in_proj
    hidden, norm = torch.randn(333, 2688, device="cuda").bfloat16(), layer.weights.norm
    wide = hidden.double()
    normed = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5) * norm.double()).bfloat16()
    weight = linear.prompt_weight or linear.weight
    if linear.prompt != "none":  # the codes that the reference multiplies
        codes, scale = reference.linear.__globals__["_quantize_activations"](normed, weight, linear.prompt)
        truth = codes.double() @ weight.weight.double().T * scale.double()
        truth = truth * (weight.scale.double() if isinstance(weight, (Fp8Tensor, Fp8Channel)) else 1)
    else:
        truth = normed.double() @ dequantize(weight).double().T
    out = torch.full((333, layer.config.in_proj_rows), float("nan"), device="cuda", dtype=BF16)
    gpu.norm_linear(hidden, norm, linear, eps=1e-5, role="prompt", out=out)
    # A value between two e4m3 codes falls either way when the norm's last bit differs.
    assert relative(out, truth) < (1e-2 if linear.prompt != "none" else tolerance("linear", BF16))


@pytest.mark.parametrize("format", FORMATS)
def test_prefill_split_anywhere_is_unsplit(format: str) -> None:
    layer = make_layer("nano30b", format)
    hidden = torch.randn(1500, 2688, device="cuda").bfloat16()
    whole = mixer(prefill(layer, hidden, []), hidden)
    for cuts in ([1], [64, 700], [63, 64, 65, 1499], [500, 516, 1013]):
        assert relative(mixer(prefill(layer, hidden, cuts), hidden), whole) < tolerance("layer", BF16), cuts


@pytest.mark.parametrize("state_dtype", STATE_DTYPES)
@pytest.mark.parametrize("format", FORMATS)
def test_law_reproducible_prefill_split_at_chunks_has_the_same_bits(format: str, state_dtype: torch.dtype) -> None:
    layer = make_layer("nano30b", format, Policy(reproducible=True))
    hidden = torch.randn(700, 2688, device="cuda").bfloat16()
    pools = [nan_pool(layer.config, state_dtype=state_dtype) for _ in range(3)]
    whole = prefill(layer, hidden, [], pools[0])
    for cuts, pool in zip(([64], [128, 192, 640]), pools[1:], strict=True):
        assert torch.equal(prefill(layer, hidden, cuts, pool), whole), cuts
        assert torch.equal(*(p.layer_state(0).ssm.nan_to_num() for p in (pool, pools[0])))


@pytest.mark.parametrize("format", FORMATS)
def test_a_ragged_batch_is_single_runs(format: str) -> None:
    layer = make_layer("nano30b", format)
    counts = [1, 0, 333, 64, 17, 128, 5, 900]
    hidden = torch.randn(sum(counts), 2688, device="cuda").bfloat16()
    pool = nan_pool(layer.config)
    slots = pool.acquire(len(counts))
    batch = mixer(layer(hidden, Batch.prefill(slots, counts), pool), hidden)
    again = mixer(layer(hidden, Batch.prefill(slots, counts), pool), hidden)  # now with live window rows
    place = 0
    for count in counts:
        if count:
            mine = hidden[place : place + count]
            alone = mixer(prefill(layer, torch.cat([mine, mine]), [count]), torch.cat([mine, mine]))
            assert relative(batch[place : place + count], alone[:count]) < tolerance("layer", BF16), count
            assert relative(again[place : place + count], alone[count:]) < tolerance("layer", BF16), count
        place += count


def test_sixty_four_short_prompts() -> None:
    layer = make_layer("nano30b", "bf16")
    counts = [(7 * i) % 97 + 1 for i in range(64)]
    hidden = torch.randn(sum(counts), 2688, device="cuda").bfloat16()
    pool = nan_pool(layer.config, slots=70)
    out = mixer(layer(hidden, Batch.prefill(pool.acquire(64), counts), pool), hidden)
    place = 0
    for i, count in enumerate(counts):
        if i % 9 == 0:
            mine = hidden[place : place + count]
            alone = mixer(prefill(layer, mine, []), mine)
            assert relative(out[place : place + count], alone) < tolerance("layer", BF16), i
        place += count


def test_workspace_of_a_long_prompt() -> None:
    """32,768 tokens: beside input and output, no more than 1.2 times the in_proj output."""
    layer = make_layer("nano30b", "fp8_tensor")
    hidden = torch.randn(32_768, 2688, device="cuda").bfloat16()
    pool = nan_pool(layer.config)
    prefill(layer, hidden[:64], [], pool)  # compiles and loads
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = prefill(layer, hidden, [], pool)
    used = torch.cuda.max_memory_allocated() - before - out.nbytes
    assert used <= 1.2 * 32_768 * layer.config.in_proj_rows * 2, used
