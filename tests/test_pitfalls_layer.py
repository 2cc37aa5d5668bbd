"""Public failures of this field, checked on the layer, its ops and its state. Numbers are those of docs and issues:
each test's name carries the number of the failure that it keeps out.
"""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import oracle
from nemotron_mamba2.batch import Batch, Rows
from nemotron_mamba2.config import Mamba2Config, ModelConfig, Policy
from nemotron_mamba2.errors import (
    ConfigError,
    FormatError,
    NemotronMamba2Error,
    OutOfSlots,
    SnapshotMismatch,
    StateError,
)
from nemotron_mamba2.formats import Fp8Block, Fp8Channel, Fp8Tensor, Nvfp4
from nemotron_mamba2.layer import NemotronMamba2Layer
from nemotron_mamba2.model.caches import Caches
from nemotron_mamba2.ops import reference
from nemotron_mamba2.plan import make_plan
from nemotron_mamba2.state import StatePool
from oracle import SMALL, TINY, Rig, Sequence64, error, mamba2_weights, mixer_error, rig, same_bits, truth_of
from tolerances import BF16, FP16, FP32, STATE, tolerance

CPU = torch.device("cpu")
NAN = float("nan")
INF = float("inf")


def rig_of(config: Mamba2Config, weights, **policy: object) -> Rig:
    plan = make_plan(config, weights, Policy(**policy), device="cpu", dtype=FP32)
    return Rig(config, weights, truth_of(config, weights), NemotronMamba2Layer(config, weights, plan), FP32)


def with_dt_logits(config: Mamba2Config, logits: Tensor) -> Rig:
    """A layer whose dt logits are what is asked, head by head, for any input; y comes out of the state alone."""
    weights = mamba2_weights(config)
    rows = weights.in_proj.weight.clone()
    rows[-config.mamba_num_heads :] = 0
    return rig_of(
        config, replace(weights, in_proj=type(weights.in_proj)(rows), dt_bias=logits, D=torch.zeros_like(weights.D))
    )


def three_ways(r: Rig, hidden: Tensor, **settings: object) -> list[tuple[Tensor, Tensor, int]]:
    """Prefill, prefill and one decode, decode, verify: (output, state at a boundary, boundary) of each."""
    results = []
    last = len(hidden) - 1
    for way in ("prefill", "prefill and decode", "decode", "verify"):
        pool = r.pool(**settings)
        (slot,) = pool.acquire()
        if way == "prefill":
            out = r.prefill(pool, slot, hidden)
        elif way == "prefill and decode":
            out = torch.cat([r.prefill(pool, slot, hidden[:last]), r.decode(pool, slot, hidden[last:])])
        elif way == "decode":
            out = r.decode(pool, slot, hidden)
        else:
            parts = []
            for part in hidden.split(7):
                parts.append(r.layer(part, Batch.verify([slot], [len(part)]), pool))
                pool.commit([slot], [len(part)])
            out = torch.cat(parts)
        snapshot = pool.snapshot(slot)
        results.append((out, snapshot.tensors["ssm"][0], snapshot.boundary))
    return results


# -- A. numerics -------------------------------------------------------------------------------------------------------


def test_pitfall_1_no_floor_under_dt_that_the_config_does_not_ask_for() -> None:
    hidden = oracle.rows_of(SMALL, 64, 1)
    for limit in (None, (0.0, INF)):
        r = with_dt_logits(replace(SMALL, time_step_limit=limit), torch.full((4,), -12.0))
        truth = Sequence64(r.truth)
        expected = truth.feed(hidden)
        for out, state, boundary in three_ways(r, hidden):
            assert mixer_error(out, expected, hidden) <= tolerance("layer")
            assert error(state, truth.kept[boundary]) <= tolerance("state")
        steps = oracle.time_steps(torch.zeros(1, 4), torch.full((4,), -12.0), limit)
        assert torch.allclose(steps, torch.tensor(6.144e-6, dtype=torch.float64), rtol=1e-3)
        floored = with_dt_logits(replace(SMALL, time_step_limit=(0.001, INF)), torch.full((4,), -12.0))
        assert mixer_error(Sequence64(floored.truth).feed(hidden), expected, hidden) > 0.1  # the test can fail


def test_pitfall_1_2_a_limit_bites_at_both_ends_in_prefill_decode_and_verify_alike() -> None:
    config = replace(SMALL, time_step_limit=(0.01, 0.05))
    logits = torch.tensor([-12.0, -3.5, 5.0, 0.0])  # below, inside (0.0297), above, above
    r = with_dt_logits(config, logits)
    steps = oracle.time_steps(torch.zeros(1, 4), logits, config.time_step_limit)[0]
    assert steps[[0, 2, 3]].tolist() == [0.01, 0.05, 0.05] and 0.029 < float(steps[1]) < 0.031
    hidden = oracle.rows_of(SMALL, 64, 2)
    for window in (16, 1):
        truth = Sequence64(r.truth, window_rows=window)
        expected = truth.feed(hidden)
        for out, state, boundary in three_ways(r, hidden, window_rows=window):
            assert mixer_error(out, expected, hidden) <= tolerance("layer")
            assert error(state, truth.kept[boundary]) <= tolerance("state")


def test_pitfall_5_segments_with_a_live_state() -> None:
    r = rig("TINY", "bf16", FP32)
    hidden = r.hidden(256, 1)
    truth = Sequence64(r.truth).feed(hidden)
    for lengths in ([256], [64] * 4, [64, 1, 1, 190], [1, 255], [3, 2, 250, 1]):
        pool = r.pool()
        (slot,) = pool.acquire()
        found = torch.cat([r.prefill(pool, slot, part) for part in hidden.split(lengths)])
        assert mixer_error(found, truth, hidden) <= tolerance("layer"), lengths


def test_pitfall_8_a_comes_from_float32_whatever_dtype_holds_a_log() -> None:
    """bf16 vectors are used as the float32 values they are, or refused; never computed with in bf16."""
    weights = mamba2_weights(SMALL, seed=3)
    names = ("A_log", "D", "dt_bias", "norm", "gated_norm", "conv1d_weight", "conv1d_bias")
    low = replace(weights, **{name: getattr(weights, name).bfloat16() for name in names})
    plan = make_plan(SMALL, weights, Policy(), device="cpu", dtype=FP32)
    hidden = oracle.rows_of(SMALL, 50, 1)
    expected = three_ways(rig_of(SMALL, weights), hidden)
    try:
        layer = NemotronMamba2Layer(SMALL, low, plan)
    except NemotronMamba2Error:
        return
    for mine, plain in zip(three_ways(Rig(SMALL, low, None, layer, FP32), hidden), expected, strict=True):
        assert same_bits(mine[0], plain[0]) and same_bits(mine[1], plain[1])


def test_pitfall_8_the_state_after_four_thousand_steps() -> None:
    r = rig("SMALL", "bf16", FP32, seed=4)
    hidden = r.hidden(4000, 1)
    truth, pool = Sequence64(r.truth), r.pool()
    (slot,) = pool.acquire()
    expected, found = truth.feed(hidden), []
    for part in hidden.split(8):
        found.append(r.layer(part, Batch.verify([slot], [8]), pool))
        pool.commit([slot], [8])
    snapshot = pool.snapshot(slot)
    assert error(snapshot.tensors["ssm"][0], truth.kept[snapshot.boundary]) <= tolerance("state")
    assert mixer_error(torch.cat(found)[-200:], expected[-200:], hidden[-200:]) <= tolerance("layer")


def config_file(**keys: object) -> dict:
    return {
        "model_type": "nemotron_h",
        "hidden_size": 48,
        "vocab_size": 80,
        "hybrid_override_pattern": "MM",
        "num_hidden_layers": 2,
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "ssm_state_size": 16,
        "conv_kernel": 4,
        "chunk_size": 128,
        "layer_norm_epsilon": 1e-5,
        **keys,
    }


def test_pitfall_9_the_state_is_fp32_where_the_config_is_silent() -> None:
    assert ModelConfig.from_dict(config_file()).state_dtype == FP32
    assert ModelConfig.from_dict(config_file(torch_dtype="float16")).state_dtype == FP32
    assert StatePool(SMALL, layers=1, slots=1).layer_state(0).ssm.dtype == FP32


@pytest.mark.parametrize("user", [None, FP16, FP32], ids=str)
@pytest.mark.parametrize("file", [None, "float32", "bfloat16"])
def test_pitfall_10_user_over_config_over_default(file: str | None, user: torch.dtype | None) -> None:
    config = ModelConfig.from_dict(config_file() if file is None else config_file(mamba_ssm_cache_dtype=file))
    caches = Caches.for_model(config, slots=1, pages=1, policy=Policy(state_dtype=user))
    expected = user or {None: FP32, "float32": FP32, "bfloat16": BF16}[file]
    assert caches.state.layer_state(0).ssm.dtype == expected


def test_pitfall_10_auto_is_no_state_dtype() -> None:
    with pytest.raises(ConfigError, match="state_dtype"):
        Policy(state_dtype="auto")


LOUD = replace(SMALL, conv_kernel=2)


def loud_layer() -> SimpleNamespace:
    """conv passes its input through (300 stays 300); one quiet head (fast decay, small steps) and three loud ones."""
    taps = torch.zeros(LOUD.conv_dim, 2)
    taps[:, 1] = 1
    return SimpleNamespace(
        conv_weight=taps,
        conv_bias=None,
        dt_bias=torch.tensor([-7.0, -4.0, 0.0, 1.0]),
        A_log=torch.log(torch.tensor([20.0, 0.1, 0.3, 0.01])),
        D=torch.ones(4),
    )


def run_loud(pool: StatePool, slot: int, raw: Tensor, dt: Tensor) -> Tensor:
    out, w = [], vars(loud_layer())
    for start in range(0, len(raw), 8):
        with pool.step(Batch.verify([slot], [8])) as step:
            here = slice(start, start + 8)
            out.append(reference.step(raw[here], dt[here], pool.layer_state(0), step.step, **w))
        pool.commit([slot], [8])
    return torch.cat(out)


@pytest.mark.parametrize("window", [16, 1])
def test_pitfall_11_an_fp16_state_saturates_and_a_reused_slot_knows_nothing_of_it(window: int) -> None:
    draw = torch.Generator().manual_seed(1)
    rows = 2000
    raw = torch.full((rows, LOUD.conv_dim), 300.0)
    raw[:, ::3] = 300 * torch.rand(rows, len(range(0, LOUD.conv_dim, 3)), generator=draw)
    raw[:, -2 * 16 :] = torch.randn(rows, 32, generator=draw)  # C
    dt = torch.randn(rows, 4, generator=draw) * 0.1
    settings = {"layers": 1, "slots": 1, "dtype": FP32, "state_dtype": FP16, "window_rows": window, "seed": 3}
    pool = StatePool(LOUD, **settings)
    (slot,) = pool.acquire()
    found = run_loud(pool, slot, raw, dt)
    w = loud_layer()
    xbc = oracle.convolve(raw, torch.zeros(1, LOUD.conv_dim), w.conv_weight, None)
    x, B, C = oracle.split_xbc(xbc, LOUD)
    steps = oracle.time_steps(dt, w.dt_bias, None)
    start, kept = torch.zeros(4, 16, 16, dtype=torch.float64), {}
    expected, _ = oracle.recurrence(
        start, x, B, C, steps, w.A_log, w.D, window_rows=window, store=oracle.saturating(FP16), kept=kept
    )
    snapshot = pool.snapshot(slot)
    state = snapshot.tensors["ssm"][0].double()
    # At one store per row, thousands of roundings walk; with windows there are sixteen times fewer.
    allowed = STATE[FP16] * (1 if window == 16 else 4)
    assert error(state, kept[snapshot.boundary]) <= allowed
    saturated = (state.abs() == 65504).double().mean((1, 2))
    assert saturated[3] > 0.9 and saturated[0] == 0  # the loud head is at the end of fp16, the quiet one is not
    for head in range(4):
        assert error(found.view(rows, 4, 16)[:, head], expected[:, head]) <= 2 * allowed, head
    pool.release([slot])
    (slot,) = pool.acquire()
    fresh = StatePool(LOUD, **settings)
    (other,) = fresh.acquire()
    quiet = torch.randn(40, LOUD.conv_dim, generator=draw)
    assert same_bits(run_loud(pool, slot, quiet, dt[:40]), run_loud(fresh, other, quiet, dt[:40]))


@pytest.mark.parametrize("role", ["prompt", "step"])
def test_pitfall_14_gate_before_norm_and_norm_per_group(role: str) -> None:
    r = rig("TINY", "bf16", FP32)
    draw = torch.Generator().manual_seed(1)
    y, z, residual = (torch.randn(6, n, generator=draw) for n in (512, 512, 160))
    loud = y.clone()
    loud[:, :256] *= 100
    for rows in (y, loud):
        truth = oracle.project_out(r.truth, rows, z, residual, role)
        assert mixer_error(r.layer.project_out(rows, z, residual, role), truth, residual) <= tolerance("linear")
    # A group's size is its own business: the other group's share of the result stays.
    quiet = r.truth.out_proj.clone()
    quiet[:, :256] = 0
    weights = replace(r.weights, out_proj=type(r.weights.out_proj)(quiet.bfloat16()))
    alone = rig_of(r.config, weights).layer
    assert same_bits(alone.project_out(y, z, residual, role), alone.project_out(loud, z, residual, role))
    # Neither the other order nor one norm over everything would pass.
    gate, eps = oracle.silu(z.double()), r.config.layer_norm_epsilon
    truth = oracle.project_out(r.truth, loud, z, residual, role)
    swapped = oracle.rms_norm(loud.double(), r.truth.gated_norm, eps, 2) * gate
    whole = oracle.rms_norm(loud.double() * gate, r.truth.gated_norm, eps, 1)
    for wrong in (swapped, whole):
        assert mixer_error(residual + wrong @ r.truth.out_proj.T, truth, residual) > 0.1


LOGITS = (-100.0, -30.0, -17.0, -5.0, 0.0, 19.9, 20.0, 20.1, 88.0, 89.0, 1000.0)


def test_pitfall_17_softplus_is_exact_for_any_logit() -> None:
    """In conv (prompt rows) and in step, with the logit in dt, in dt_bias, and shared by both."""
    config = replace(SMALL, mamba_num_heads=len(LOGITS) + 1, n_groups=2)
    heads = config.mamba_num_heads
    logits = torch.tensor([*LOGITS, 0.5])
    weights = mamba2_weights(config)
    raw = torch.zeros(1, config.conv_dim)
    expected = oracle.softplus(logits.double())
    smallest = 2 * 2.0**-149  # −100 gives a subnormal in fp32: two units of it
    for dt, bias in ((logits, torch.zeros(heads)), (torch.zeros(heads), logits), (logits / 2, logits / 2)):
        pool = StatePool(config, layers=1, slots=2, dtype=FP32)
        a, b = pool.acquire(2)
        _, steps = reference.conv(
            raw,
            dt[None],
            pool.layer_state(0),
            Rows((a,), (1,), (0,), (0,), 0, CPU),
            weight=weights.conv1d_weight,
            bias=weights.conv1d_bias,
            dt_bias=bias,
        )
        reference.step(
            raw,
            dt[None],
            pool.layer_state(0),
            Rows((b,), (1,), (0,), (0,), 0, CPU),
            conv_weight=weights.conv1d_weight,
            conv_bias=weights.conv1d_bias,
            dt_bias=bias,
            A_log=weights.A_log,
            D=weights.D,
        )
        for found in (steps[0], pool.layer_state(0).ring_dt[b, 0]):
            assert ((found.double() - expected).abs() <= 1e-6 * expected + smallest).all()
            assert (found > 0).all()


# -- B. conv state -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_pitfall_18_a_short_chunk_after_a_prefix_hit_leaves_the_snapshot_alone(rows: int) -> None:
    r = rig("SMALL", "bf16", FP32)
    for prefix in (2, 16, 37):
        pool = r.pool(slots=3)
        (a,) = pool.acquire()
        hidden, truth = r.hidden(prefix + rows + 5, 1), Sequence64(r.truth)
        r.prefill(pool, a, hidden[:prefix])
        saved = pool.snapshot(a)
        kept = {name: tensor.clone() for name, tensor in saved.tensors.items()}
        state = pool.layer_state(0)
        (b,) = pool.acquire()
        for tensor in (state.ssm, state.ring_x, state.ring_B, state.ring_dt, state.ring_conv):
            tensor[b] = NAN
        pool.restore(b, saved)
        found = torch.cat([r.prefill(pool, b, hidden[prefix:-5]), r.decode(pool, b, hidden[-5:])])
        expected = truth.feed(hidden)[prefix:]
        assert mixer_error(found, expected, hidden[prefix:]) <= tolerance("layer")
        assert all(same_bits(saved.tensors[name], kept[name]) for name in kept)
        assert same_bits(pool.snapshot(a).tensors["ring_conv"], kept["ring_conv"])


def poison_what_is_not_live(pool: StatePool, slot: int) -> None:
    """NaN over every ring row that is neither in the window nor among the last conv inputs."""
    cursor, state = pool.snapshot(slot), pool.layer_state(0)
    window = {t % state.ring_dt.shape[1] for t in range(cursor.boundary, cursor.position)}
    tail = {(cursor.position - k) % state.ring_conv.shape[1] for k in range(1, pool.layout.config.conv_kernel)}
    for ring in (state.ring_x, state.ring_B, state.ring_dt):
        ring[slot, [i for i in range(ring.shape[1]) if i not in window]] = NAN
    state.ring_conv[slot, [i for i in range(state.ring_conv.shape[1]) if i not in tail]] = NAN


@pytest.mark.parametrize("draft_rows", [1, 3, 4, 8, 16])
def test_pitfall_20_21_wider_rings_and_what_lies_in_them_change_nothing(draft_rows: int) -> None:
    """Pools made for drafts of any length: prompt and step rows equal the truth, whatever the unused rows hold."""
    r = rig("SMALL", "bf16", FP32)
    hidden = r.hidden(110, 1)
    truth = Sequence64(r.truth).feed(hidden)
    pool = r.pool(draft_rows=draft_rows)
    (slot,) = pool.acquire()
    found, done = [], 0
    for rows in (1, 2, 21, 1, 1, 1, 17, 3, 1, 40, 1, 1, 15, 5):
        poison_what_is_not_live(pool, slot)
        part = hidden[done : done + rows]
        if rows > 1:
            found.append(r.prefill(pool, slot, part))
        else:
            draft = torch.cat([part, torch.full((draft_rows - 1, 48), 1e3)])
            found.append(r.layer(draft, Batch.verify([slot], [draft_rows]), pool)[:1])
            pool.commit([slot], [1])
        done += rows
    assert done == 110
    assert mixer_error(torch.cat(found), truth, hidden) <= tolerance("layer")


def test_pitfall_23_every_awkward_length_with_and_without_a_state() -> None:
    r = rig("SMALL", "bf16", FP32)
    hidden = r.hidden(5 + 1027, 1)
    truth = Sequence64(r.truth).feed(hidden)
    fresh = Sequence64(r.truth).feed(hidden[5:])
    for n in (*range(1, 10), 63, 64, 65, 127, 128, 129, 1023, 1024, 1025, 1026, 1027):
        pool = r.pool(slots=2)
        a, b = pool.acquire(2)
        r.prefill(pool, b, hidden[:5])
        part = hidden[5 : 5 + n]
        assert mixer_error(r.prefill(pool, a, part), fresh[:n], part) <= tolerance("layer"), n
        assert mixer_error(r.prefill(pool, b, part), truth[5 : 5 + n], part) <= tolerance("layer"), n


# -- C. empty sequences ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("earlier", [0, 21])
@pytest.mark.parametrize("counts", [[128, 0, 128], [0, 5], [5, 0], [0, 0], [0], []])
def test_pitfall_29_empty_sequences_in_a_packed_batch(counts: list[int], earlier: int) -> None:
    r = rig("SMALL", "bf16", FP32)
    for reproducible in (False, True):
        r = rig("SMALL", "bf16", FP32, reproducible=reproducible)
        pool = r.pool(slots=3)
        slots = pool.acquire(len(counts))
        truths = [Sequence64(r.truth) for _ in counts]
        for slot, truth in zip(slots, truths, strict=True):
            r.prefill(pool, slot, r.hidden(earlier, slot))
            truth.feed(r.hidden(earlier, slot))
        before = {slot: pool.snapshot(slot) for slot in slots}
        hidden = r.hidden(sum(counts), 9)
        found = r.layer(hidden, Batch.prefill(slots, counts), pool)
        assert found.shape == hidden.shape
        parts = zip(
            slots,
            counts,
            truths,
            hidden.split(counts) if counts else (),
            found.split(counts) if counts else (),
            strict=True,
        )
        for slot, n, truth, part, mine in parts:
            assert pool.position(slot) == earlier + n
            assert mixer_error(mine, truth.feed(part), part) <= tolerance("layer")
            if not n:
                after = pool.snapshot(slot)
                assert after.boundary == before[slot].boundary
                assert all(same_bits(after.tensors[k], before[slot].tensors[k]) for k in after.tensors)
            row = r.hidden(1, 7)
            assert mixer_error(r.decode(pool, slot, row), truth.feed(row), row) <= tolerance("layer")


def test_pitfall_29_empty_sequences_among_verify_rows() -> None:
    r = rig("SMALL", "bf16", FP32)
    pool = r.pool()
    slots = pool.acquire(3)
    before = oracle.pool_bytes(pool)
    assert r.layer(r.hidden(0, 1), Batch.verify(slots, [0, 0, 0]), pool).shape == (0, 48)
    assert oracle.unchanged(pool, before)
    hidden = r.hidden(3, 2)
    found = r.layer(hidden, Batch.verify(slots, [0, 3, 0]), pool)
    assert mixer_error(found, Sequence64(r.truth).feed(hidden), hidden) <= tolerance("layer")
    pool.check(Batch.decode([slots[0], slots[2]]))


# -- D. slots, pools, leaks --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state_dtype", [FP32, FP16], ids=str)
def test_pitfall_31_two_hundred_requests_over_reused_slots(state_dtype: torch.dtype) -> None:
    """In random order, interleaved, over memory full of NaN: each has the bits of a run in a fresh pool."""
    r = rig("SMALL", "bf16", FP32, reproducible=True)
    order = random.Random(31)
    pool = r.pool(slots=4, state_dtype=state_dtype)
    lengths = [0, 1, 3, 15, 16, 17, 40]
    expected: dict[int, Tensor] = {}

    def begin(p: StatePool, slot: int, n: int) -> Tensor:
        return r.prefill(p, slot, r.hidden(n, n))

    def end(p: StatePool, slot: int, n: int) -> Tensor:
        out = r.layer(r.hidden(5, n + 1), Batch.verify([slot], [5]), p)
        p.commit([slot], [n % 6])
        return torch.cat([out, r.decode(p, slot, r.hidden(2, n + 2))])

    for n in lengths:
        fresh = r.pool(slots=1, state_dtype=state_dtype)
        (slot,) = fresh.acquire()
        expected[n] = torch.cat([begin(fresh, slot, n), end(fresh, slot, n)])
    running: dict[int, tuple[int, Tensor]] = {}
    started = finished = 0
    while finished < 200:
        if started < 200 and pool.free_slots and (not running or order.random() < 0.6):
            (slot,) = pool.acquire()
            n = order.choice(lengths)
            running[slot] = (n, begin(pool, slot, n))
            started += 1
            continue
        slot = order.choice(list(running))
        n, first = running.pop(slot)
        assert same_bits(torch.cat([first, end(pool, slot, n)]), expected[n]), (finished, slot, n)
        pool.release([slot])
        state = pool.layer_state(0)
        for tensor in (state.ssm, state.ring_x, state.ring_B, state.ring_dt, state.ring_conv):
            tensor[slot] = NAN
        finished += 1
    assert pool.free_slots == 4


def test_pitfall_32_one_real_row_and_seven_pads_over_memory_full_of_nan() -> None:
    r = rig("SMALL", "bf16", FP32)
    pool = r.pool(slots=8)
    (slot,) = pool.acquire()
    assert torch.isnan(pool.layer_state(0).ssm).any()  # slots nobody has acquired
    pads = [pool.pad_slot] * 7
    hidden = r.hidden(8, 1)
    for batch in (Batch.decode([*pads[:3], slot, *pads[3:]]), Batch.verify([*pads[:3], slot, *pads[3:]], [1] * 8)):
        found = r.layer(hidden, batch, pool)
        assert bool(torch.isfinite(found).all())
        if batch.verifies[0]:
            pool.commit([slot], [1])
        else:
            assert mixer_error(found[3:4], Sequence64(r.truth).feed(hidden[3:4]), hidden[3:4]) <= tolerance("layer")


def test_pitfall_33_34_a_thousand_openings_and_closings() -> None:
    r = rig("SMALL", "bf16", FP32)
    pool = r.pool(slots=3)
    taken = pool.acquire(2)
    for turn in range(1000):
        (slot,) = pool.acquire()
        assert slot not in taken
        if turn % 50 == 0:  # finished, cancelled in a prompt, between verify and commit, or failed
            r.layer(r.hidden(4, turn), Batch.prefill([slot], [4], snapshot_at=[2]), pool)
            r.layer(r.hidden(2, turn), Batch.verify([slot], [2]), pool)
        if turn % 50 == 25:
            with pytest.raises(ZeroDivisionError), pool.step(Batch.decode([slot])):
                raise ZeroDivisionError
        with pytest.raises(OutOfSlots):  # never an alias of a live slot
            pool.acquire()
        pool.release([slot])
        assert pool.free_slots == 1
    with pytest.raises(StateError):
        pool.take_snapshot(pool.acquire()[0])  # nothing of an earlier owner is left


def test_pitfall_37_the_largest_batch_with_drafts_and_pads() -> None:
    r = rig("SMALL", "bf16", FP32)
    pool = r.pool(slots=6, draft_rows=4)
    slots = pool.acquire(6)
    for turn in range(5):
        batch = Batch.verify([*slots, *[pool.pad_slot] * 2], [4] * 8)
        found = r.layer(r.hidden(32, turn), batch, pool)
        assert bool(torch.isfinite(found).all())
        pool.commit(slots, [0, 1, 2, 3, 4, turn % 5])
    assert pool.free_slots == 0 and pool.pad_slot not in slots


@pytest.mark.parametrize("layers", [1, 3])
def test_pitfall_40_56_predicted_bytes_and_what_a_rollback_keeps(layers: int) -> None:
    """Bytes come from this layer's own fields and are never zero; any accepted count leaves the right state."""
    for config in (TINY, oracle.D80, SMALL):
        pool = StatePool(config, layers=layers, slots=2)
        assert pool.nbytes == StatePool.bytes(config, layers=layers, slots=2)
        saved = pool.snapshot(pool.acquire()[0])
        c = config
        state = layers * c.mamba_num_heads * c.mamba_head_dim * c.ssm_state_size * 4
        assert saved.tensors["ssm"].nbytes == state > 0
        assert saved.tensors["ring_conv"].nbytes >= layers * 3 * c.conv_dim * 2 > 0
    r = rig("SMALL", "bf16", FP32, reproducible=True)
    past, draft, after = r.hidden(13, 1), r.hidden(6, 2), r.hidden(20, 3)
    for accepted in range(7):
        pool = r.pool()
        a, b = pool.acquire(2)
        for slot in (a, b):
            r.prefill(pool, slot, past)
        r.layer(draft, Batch.verify([a], [6]), pool)
        pool.commit([a], [accepted])
        r.decode(pool, b, draft[:accepted])
        assert same_bits(r.decode(pool, a, after), r.decode(pool, b, after)), accepted


# -- E. snapshots ------------------------------------------------------------------------------------------------------


def test_pitfall_43_snapshots_in_a_packed_prefill() -> None:
    r = rig("TINY", "bf16", FP32, reproducible=True)
    lengths = [300, 517, 129]
    wanted = [n // 128 * 128 for n in lengths]
    pool, alone = r.pool(slots=4), r.pool(slots=2)
    slots = pool.acquire(3)
    hidden = r.hidden(sum(lengths), 1)
    found = r.layer(hidden, Batch.prefill(slots, lengths, snapshot_at=wanted), pool).split(lengths)
    own, (other,) = alone.acquire(), pool.acquire()
    after = r.hidden(20, 2)
    for slot, at, part, mine in zip(slots, wanted, hidden.split(lengths), found, strict=True):
        saved = pool.take_snapshot(slot)
        assert saved.position == saved.boundary == at
        alone.release(own)
        own = alone.acquire()
        assert same_bits(mine[:at], r.prefill(alone, own[0], part[:at]))
        assert same_bits(saved.tensors["ssm"], alone.snapshot(own[0]).tensors["ssm"])
        pool.restore(other, saved)
        assert same_bits(r.decode(pool, other, after), r.decode(alone, own[0], after))


def test_pitfall_47_a_snapshot_of_something_else_is_refused() -> None:
    pool = StatePool(SMALL, layers=2, slots=1)
    (slot,) = pool.acquire()
    saved = pool.snapshot(slot)
    for field, wrong in (
        ("layers", StatePool(SMALL, layers=1, slots=1)),
        ("config", StatePool(TINY, layers=2, slots=1)),
        ("state_dtype", StatePool(SMALL, layers=2, slots=1, state_dtype=BF16)),
    ):
        with pytest.raises(SnapshotMismatch, match=field):
            wrong.restore(wrong.acquire()[0], saved)
    with pytest.raises(SnapshotMismatch, match="ring_conv"):
        pool.restore(slot, replace(saved, tensors={k: v for k, v in saved.tensors.items() if k != "ring_conv"}))


# -- F. verify and rollback --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("garbage", [NAN, INF, 1e30])
@pytest.mark.parametrize("past", [0, 9, 14, 15, 16, 63])
def test_pitfall_55_a_wholly_wrong_draft_leaves_one_plain_decode_step(past: int, garbage: float) -> None:
    """Nothing written for rejected rows is ever read: not their window rows, not their conv inputs."""
    r = rig("SMALL", "bf16", FP32, reproducible=True)
    pool = r.pool()
    a, b = pool.acquire(2)
    for slot in (a, b):
        r.prefill(pool, slot, r.hidden(past, 1))
    rest = r.hidden(24, 2)
    plain = r.decode(pool, b, rest)
    for start in range(4):
        draft = torch.cat([rest[start : start + 1], torch.full((7, 48), garbage)])
        found = r.layer(draft, Batch.verify([a], [8]), pool)
        pool.commit([a], [1])
        assert same_bits(found[:1], plain[start : start + 1])
    r.layer(torch.full((8, 48), garbage), Batch.verify([a], [8]), pool)
    pool.commit([a], [0])
    assert same_bits(r.decode(pool, a, rest[4:]), plain[4:])
    r.layer(torch.full((8, 48), garbage), Batch.verify([a], [8]), pool)
    pool.commit([a], [0])
    more = r.hidden(30, 3)
    assert same_bits(r.prefill(pool, a, more), r.prefill(pool, b, more))


def test_pitfall_63_prompt_decode_and_verify_rows_in_one_batch() -> None:
    r = rig("TINY", "bf16", FP32)
    pool = r.pool(slots=4)
    slots = pool.acquire(4)
    truths = {slot: Sequence64(r.truth) for slot in slots}
    for slot, n in zip(slots, (30, 17, 16, 15), strict=True):
        r.prefill(pool, slot, r.hidden(n, slot))
        truths[slot].feed(r.hidden(n, slot))
    a, b, c, d = slots
    batch = Batch.join(Batch.prefill([a], [37]), Batch.decode([b]), Batch.verify([c, d], [3, 1]))
    hidden = r.hidden(batch.total_rows, 9)
    found = r.layer(hidden, batch, pool)
    parts = zip(batch.slots, hidden.split(list(batch.rows)), strict=True)
    truth = torch.cat([truths[slot].feed(part) for slot, part in parts])
    assert mixer_error(found, truth, hidden) <= tolerance("layer")


@pytest.mark.parametrize("batch_size", [8])
def test_pitfall_64_66_pads_never_touch_slot_zero_or_a_parked_request(batch_size: int) -> None:
    r = rig("SMALL", "bf16", FP32)
    pool = r.pool(slots=4)
    slots = pool.acquire(4)
    assert sorted(slots) == [0, 1, 2, 3] and pool.pad_slot not in slots
    for slot in slots:
        r.prefill(pool, slot, r.hidden(20, slot))
    kept = {slot: pool.snapshot(slot) for slot in slots}
    live = [1, 3, 2]
    pads = [pool.pad_slot] * (batch_size - len(live))
    for turn in range(20):
        r.layer(r.hidden(batch_size, turn), Batch.verify([*live, *pads], [1] * batch_size), pool)
        pool.commit(live, [1, 0, 1])
    now = pool.snapshot(0)
    assert all(same_bits(now.tensors[k], kept[0].tensors[k]) for k in now.tensors)


# -- H. formats --------------------------------------------------------------------------------------------------------

E4M3 = torch.float8_e4m3fn


@pytest.mark.parametrize("shape", [(), (1,), (256,), (2,), (1, 3), (2, 3, 1), (3, 2)])
def test_pitfall_83_a_scale_of_another_layout_never_reaches_a_block_format(shape: tuple[int, ...]) -> None:
    codes = torch.zeros(256, 384, dtype=torch.uint8).view(E4M3)
    with pytest.raises(FormatError, match=r"fp8_block scale.*\[2, 3\]"):
        Fp8Block(codes, torch.ones(shape))


def test_pitfall_83_every_format_knows_its_own_scale() -> None:
    codes, packed = torch.zeros(256, 384, dtype=torch.uint8).view(E4M3), torch.zeros(256, 192, dtype=torch.uint8)
    blocks = torch.ones(256, 24).to(E4M3)
    one = torch.tensor(1.0)
    for wrong in (
        lambda: Fp8Tensor(codes, torch.ones(1)),
        lambda: Fp8Tensor(codes, torch.ones(2, 3)),
        lambda: Fp8Tensor(codes, one.double()),
        lambda: Fp8Tensor(codes, one, torch.ones(384)),
        lambda: Fp8Channel(codes, one),
        lambda: Fp8Channel(codes, torch.ones(384)),
        lambda: Fp8Channel(codes, torch.ones(256, 1)),
        lambda: Fp8Block(packed, torch.ones(2, 2)),
        lambda: Nvfp4(packed, blocks.float(), one),
        lambda: Nvfp4(packed, blocks[:, :12], one),
        lambda: Nvfp4(packed, blocks, torch.ones(256)),
        lambda: Nvfp4(codes, blocks, one),
        lambda: Nvfp4(packed[:, :188], blocks, one),
    ):
        with pytest.raises(FormatError):
            wrong()
    (
        Fp8Tensor(codes, one),
        Fp8Channel(codes, torch.ones(256)),
        Fp8Block(codes, torch.ones(2, 3)),
        Nvfp4(packed, blocks, one),
    )


# -- J. long and wide --------------------------------------------------------------------------------------------------

ULTRA_ROWS = 35072  # in_proj rows of the widest model: the row pitch of x, B, C and dt as views of its output


def conv_of(config: Mamba2Config, weights, raw: Tensor, dt: Tensor) -> tuple[Tensor, Tensor, StatePool]:
    pool = StatePool(config, layers=1, slots=1, dtype=raw.dtype)
    with pool.step(Batch.prefill(pool.acquire(), [len(raw)])) as step:
        out = reference.conv(
            raw,
            dt,
            pool.layer_state(0),
            step.prompt,
            weight=weights.conv1d_weight,
            bias=weights.conv1d_bias,
            dt_bias=weights.dt_bias,
        )
    return *out, pool


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_pitfall_96_97_views_with_the_widest_row_pitch(dtype: torch.dtype) -> None:
    """conv and step of views into a [T, 35072] buffer equal those of contiguous copies, bit for bit."""
    weights = mamba2_weights(TINY, seed=2)
    heads, width = TINY.mamba_num_heads, TINY.conv_dim
    wide = torch.full((200, ULTRA_ROWS), NAN, dtype=dtype)
    draw = torch.Generator().manual_seed(1)
    xbc, dt = wide[:, 16384 : 16384 + width], wide[:, ULTRA_ROWS - heads :]
    xbc.copy_(torch.randn(200, width, generator=draw))
    dt.copy_(torch.randn(200, heads, generator=draw))
    assert xbc.stride(0) == dt.stride(0) == ULTRA_ROWS
    results = []
    for raw, steps in ((xbc, dt), (xbc.contiguous(), dt.contiguous())):
        out, wide_dt, pool = conv_of(TINY, weights, raw, steps)
        state = pool.layer_state(0)
        rows = Rows((0,), (8,), (200,), (192,), 0, CPU)
        y = reference.step(
            raw[:8],
            steps[:8],
            state,
            rows,
            conv_weight=weights.conv1d_weight,
            conv_bias=weights.conv1d_bias,
            dt_bias=weights.dt_bias,
            A_log=weights.A_log,
            D=weights.D,
        )
        scanned = reference.scan(
            out, wide_dt, state, Rows((0,), (200,), (0,), (0,), 0, CPU), A_log=weights.A_log, D=weights.D
        )
        results.append((out, wide_dt, y, scanned, state.ring_conv[0]))
    assert all(same_bits(a, b) for a, b in zip(*results, strict=True))


def test_pitfall_96_97_rows_beyond_the_reach_of_32_bits() -> None:
    """2³¹ elements lie between the first and the last row of the view. Only the pages that are read exist."""
    config = replace(SMALL, conv_kernel=4)
    weights = mamba2_weights(config, seed=2)
    rows, width, heads = 61_400, config.conv_dim, config.mamba_num_heads
    assert (rows - 100) * ULTRA_ROWS > 2**31
    try:
        wide = torch.empty(rows, ULTRA_ROWS, dtype=BF16)
    except RuntimeError:
        pytest.skip("this machine does not give out 4.3 GB of address space")
    draw = torch.Generator().manual_seed(1)
    xbc, dt = wide[:, 256 : 256 + width], wide[:, 256 + width : 256 + width + heads]
    xbc.copy_(torch.randn(rows, width, generator=draw))
    dt.copy_(torch.randn(rows, heads, generator=draw))
    found, steps, pool = conv_of(config, weights, xbc, dt)
    plain, plain_steps, other = conv_of(config, weights, xbc.contiguous(), dt.contiguous())
    assert same_bits(found, plain) and same_bits(steps, plain_steps)
    assert same_bits(pool.layer_state(0).ring_conv[0], other.layer_state(0).ring_conv[0])
    truth = oracle.convolve(xbc[-50:], xbc[-53:-50], weights.conv1d_weight, weights.conv1d_bias)
    assert error(found[-50:], truth) <= tolerance("conv", BF16)
    assert pool.position(0) == rows


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_pitfall_100_head_dim_80_with_twelve_heads_per_group(dtype: torch.dtype) -> None:
    r = rig("D80", "bf16", dtype)
    hidden = r.hidden(210, 5)
    truth = Sequence64(r.truth).feed(hidden)
    pool = r.pool()
    (slot,) = pool.acquire()
    found = torch.cat([r.prefill(pool, slot, hidden[:150]), r.prefill(pool, slot, hidden[150:])])
    assert mixer_error(found, truth, hidden) <= tolerance("layer", dtype)
