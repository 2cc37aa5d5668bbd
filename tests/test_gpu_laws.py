"""The laws of the same bits on a GPU, at the size of a layer: any batch, any slot, any count, every state dtype.

Needs an NVIDIA GPU (`scripts/test-gpu`). Laws of single kernels are in `test_gpu_step.py`, of replays in
`test_gpu_graph.py`.
"""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from nemotron_mamba2.batch import Batch
from nemotron_mamba2.errors import ShapeError
from nemotron_mamba2.formats import FORMATS
from nemotron_mamba2.layer import NemotronMamba2Layer
from nemotron_mamba2.state import STATE_DTYPES, StatePool
from oracle import same_bits
from test_gpu_graph import NANO, make_layer, rows
from test_gpu_step import nan_pool

pytestmark = pytest.mark.gpu

# Every format with an fp32 state, and every state dtype with one format.
LAYERS = [(format, torch.float32) for format in FORMATS] + [("bf16", dtype) for dtype in STATE_DTYPES[1:]]


@pytest.fixture(params=LAYERS, ids=lambda pair: f"{pair[0]}-{str(pair[1]).removeprefix('torch.')}")
def case(request: pytest.FixtureRequest) -> tuple[NemotronMamba2Layer, torch.dtype]:
    format, state_dtype = request.param
    return make_layer(format), state_dtype


def decode(layer: NemotronMamba2Layer, hidden: Tensor, pool: StatePool, slot: int) -> Tensor:
    """Token by token."""
    return torch.cat([layer(row[None], Batch.decode([slot]), pool) for row in hidden])


def decode_afresh(layer: NemotronMamba2Layer, hidden: Tensor, state_dtype: torch.dtype) -> Tensor:
    pool = nan_pool(NANO, slots=2, state_dtype=state_dtype)
    return decode(layer, hidden, pool, pool.acquire()[0])


@pytest.mark.parametrize("size", [2, 3, 8, 17, 64, 256, 300])
def test_a_row_alone_is_a_row_of_any_batch(case: tuple[NemotronMamba2Layer, torch.dtype], size: int) -> None:
    layer, state_dtype = case
    hidden = rows(20 * size).view(20, size, -1)
    pool = nan_pool(NANO, slots=size, state_dtype=state_dtype)
    slots, places = pool.acquire(size), (0, size // 2, size - 1)
    outs = torch.stack([layer(step, Batch.decode(slots), pool) for step in hidden])
    for place in places:
        assert same_bits(outs[:, place], decode_afresh(layer, hidden[:, place], state_dtype)), place


def test_verify_then_any_commit_is_decode(case: tuple[NemotronMamba2Layer, torch.dtype]) -> None:
    layer, state_dtype = case
    hidden = rows(40)
    truth = decode_afresh(layer, hidden, state_dtype)
    pool = nan_pool(NANO, state_dtype=state_dtype)
    a, b = pool.acquire(2)
    for start in (0, 9, 13, 15, 16, 25):
        for row in hidden[pool.position(a) : start]:
            layer(row[None], Batch.decode([a]), pool)
        saved = pool.snapshot(a)
        for count in (1, 2, 3, 5, 8):
            for accepted in range(count + 1):
                pool.restore(b, saved)
                drafted = hidden[start : start + count].clone()
                drafted[accepted:] = torch.randn_like(drafted[accepted:])
                out = layer(drafted, Batch.verify([b], [count]), pool)
                pool.commit([b], [accepted])
                here = start + accepted
                again = layer(hidden[here : here + 4], Batch.verify([b], [4]), pool)
                pool.commit([b], [2])
                rest = decode(layer, hidden[here + 2 : here + 5], pool, b)
                found = torch.cat([out[:accepted], again, rest[2:]])
                assert same_bits(found, truth[start : here + 5]), (start, count, accepted)
                assert same_bits(rest[:2], again[2:])


def test_restored_into_another_slot_a_sequence_goes_on(case: tuple[NemotronMamba2Layer, torch.dtype]) -> None:
    layer, state_dtype = case
    hidden = rows(60)
    truth = decode_afresh(layer, hidden, state_dtype)
    pool = nan_pool(NANO, state_dtype=state_dtype)
    slots = pool.acquire(12)
    saved = pool.snapshot(slots[-1])
    for slot, position in zip(slots, range(0, 60, 5), strict=True):  # at many places of a window, moving on each time
        pool.restore(slot, saved)
        assert same_bits(decode(layer, hidden[position : position + 5], pool, slot), truth[position : position + 5])
        saved = pool.snapshot(slot)


def test_two_hundred_requests_through_reused_slots_are_requests_in_fresh_pools(
    case: tuple[NemotronMamba2Layer, torch.dtype],
) -> None:
    layer, state_dtype = case
    draw, pool = random.Random(11), nan_pool(NANO, slots=3, state_dtype=state_dtype)
    waiting = [(draw.randint(0, 20), draw.randint(1, 24)) for _ in range(200)]
    running: dict[int, tuple[Tensor, list[Tensor], int]] = {}  # slot → hidden rows, outputs, prompt rows
    finished = 0
    while waiting or running:
        while waiting and pool.free_slots:
            prompt, steps = waiting.pop()
            hidden, [slot] = rows(prompt + steps), pool.acquire()
            outs = [layer(hidden[:prompt], Batch.prefill([slot], [prompt]), pool)] if prompt else []
            running[slot] = hidden, outs, prompt
        slots = list(running)
        new = torch.stack([running[slot][0][pool.position(slot)] for slot in slots])
        out = layer(new, Batch.decode(slots), pool)
        for slot, row in zip(slots, out, strict=True):
            hidden, outs, prompt = running[slot]
            outs.append(row[None])
            if pool.position(slot) == len(hidden):
                fresh = nan_pool(NANO, slots=1, state_dtype=state_dtype)
                [own] = fresh.acquire()
                truth = [layer(hidden[:prompt], Batch.prefill([own], [prompt]), fresh)] if prompt else []
                truth.append(decode(layer, hidden[prompt:], fresh, own))
                assert same_bits(torch.cat(outs), torch.cat(truth)), f"request {finished}"
                finished += 1
                del running[slot]
                pool.release([slot])
    assert finished == 200 and pool.free_slots == 3


def test_slots_at_the_end_of_a_pool_of_more_than_8_gib() -> None:
    layer = make_layer("nvfp4")
    pool, small = (StatePool(NANO, layers=1, slots=slots, device="cuda") for slots in (4150, 3))
    ssm = pool.layer_state(0).ssm
    assert ssm[:-1].numel() > 2**31 and ssm.nbytes > 8 << 30
    slots = pool.acquire(4150)
    far, near = [slots[-1], slots[0], slots[-2]], small.acquire(3)
    for turn in range(50):
        hidden = rows(90 if turn == 20 else 3)
        outs = []
        for mine, own in ((far, pool), (near, small)):
            if turn == 20:
                outs.append(layer(hidden, Batch.prefill(mine, [40, 33, 17]), own))
            else:
                outs.append(layer(hidden, Batch.decode(mine), own))
        assert same_bits(*outs), turn
    for part in ("ssm", "ring_x", "ring_B", "ring_dt", "ring_conv"):
        assert same_bits(getattr(pool.layer_state(0), part)[far], getattr(small.layer_state(0), part)[near]), part


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("count", [1, 5, 40])
def test_strided_inputs_give_the_bits_of_contiguous_ones(format: str, count: int) -> None:
    layer, width = make_layer(format), NANO.hidden_size
    plain = rows(count)
    wide = torch.full((count, width + 24), float("nan"), device="cuda", dtype=torch.bfloat16)
    wide[:, 5 : 5 + width] = plain
    skipping = torch.full((2 * count, width), float("nan"), device="cuda", dtype=torch.bfloat16)
    skipping[::2] = plain
    for role in ("step", "prompt"):
        outs = []
        for hidden in (plain, wide[:, 5 : 5 + width], skipping[::2], plain.T.contiguous().T):
            pool = nan_pool(NANO, slots=count)
            slots = pool.acquire(count)
            batch = Batch.decode(slots) if role == "step" else Batch.prefill(slots[:1], [count])
            outs.append(layer(hidden, batch, pool))
        assert all(same_bits(out, outs[0]) for out in outs[1:]), role


@pytest.mark.parametrize("count", [1, 5, 40])
def test_step_outputs_at_odd_addresses_are_refused(count: int) -> None:
    layer, hidden = make_layer("bf16"), rows(count)
    wide = torch.empty(count, NANO.in_proj_rows + 8, device="cuda", dtype=torch.bfloat16)
    with pytest.raises(ShapeError, match="out"):
        layer.project_in(hidden, "step", out=wide[:, 3 : 3 + NANO.in_proj_rows])
