"""Captured steps, as far as a CPU shows them: buckets, padding, refusals, and a padded step with the bits of the layer.

On a CPU a `StepGraph` captures nothing and runs the same padded step eagerly; replays are in `test_gpu_graph.py`.
"""

from __future__ import annotations

import gc
import random
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import nemotron_mamba2.graph as graph_module
from nemotron_mamba2.batch import Batch, Rows
from nemotron_mamba2.config import Policy
from nemotron_mamba2.errors import ConfigError, NemotronMamba2Error, ShapeError, StateError
from nemotron_mamba2.graph import StepGraph, buckets, pad
from nemotron_mamba2.layer import NemotronMamba2Layer
from nemotron_mamba2.plan import Capabilities, HostStep, make_plan
from nemotron_mamba2.state import StatePool
from oracle import Rig, few, pool_bytes, rig, same_bits, unchanged

CPU = torch.device("cpu")


def exact() -> Rig:
    return rig("SMALL", "bf16", torch.bfloat16, reproducible=True)


def nan_pool(r: Rig, slots: int = 6) -> StatePool:
    pool = r.pool(slots)
    state = pool.layer_state(0)
    for tensor in (state.ssm, state.ring_x, state.ring_B, state.ring_dt, state.ring_conv):
        tensor[:slots] = float("nan")
    return pool


@given(st.integers(1, 600))
def test_buckets_end_with_the_most_and_pad_little(most: int) -> None:
    sizes = buckets(most)
    assert sizes[-1] == most and list(sizes) == sorted(set(sizes)) and sizes[0] == 1
    for count in range(1, most + 1):
        bucket = next(size for size in sizes if size >= count)
        assert bucket < 2 * count and (count <= 16 or 2 * bucket <= 3 * count)


def test_buckets_are_the_documented_ones() -> None:
    assert buckets(1) == (1,) and buckets(3) == (1, 2, 3)
    assert buckets(100) == (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 100)


@given(st.lists(st.integers(0, 4), max_size=6), st.integers(1, 4), st.integers(0, 9))
def test_padding_keeps_the_live_rows_and_owns_the_others(counts: list[int], free: int, spare: int) -> None:
    slots = tuple(range(len(counts)))
    positions, boundaries = tuple(17 + s for s in slots), tuple(16 for _ in slots)
    rows = Rows(slots, tuple(counts), positions, boundaries, 0, CPU)
    live = [s for s in slots if counts[s]]
    padded = pad(rows, sequences=len(live) + free, total_rows=sum(counts) + spare, pad_slot=99)
    assert padded.slots == (*live, *(99 for _ in range(free)))
    assert padded.rows[: len(live)] == tuple(counts[s] for s in live)
    assert padded.positions == (*(17 + s for s in live), *(0 for _ in range(free)))
    assert padded.total_rows == sum(counts) + spare
    assert len(padded.packed) == 4 * (len(live) + free) + 1 == sum(len(cursor) for cursor in padded.cursors)


@pytest.mark.parametrize(("sequences", "total_rows"), [(1, 4), (3, 1), (2, 3)])
def test_what_cannot_be_padded_is_refused(sequences: int, total_rows: int) -> None:
    rows = Rows((3, 5), (1, 1), (0, 0), (0, 0), 0, CPU)
    with pytest.raises(ShapeError, match=f"padded to {sequences} of {total_rows}"):
        pad(rows, sequences=sequences, total_rows=total_rows, pad_slot=9)


def test_cursors_on_the_device_are_used_as_they_lie() -> None:
    rows = Rows((3, 5), (1, 2), (7, 9), (0, 0), 0, CPU)
    packed = torch.tensor([4, 6, 20, 21, 16, 16, 0, 1, 3])
    slots, positions, boundaries, cu_rows = replace(rows, on_device=packed).cursors
    assert [t.tolist() for t in (slots, positions, boundaries, cu_rows)] == [[4, 6], [20, 21], [16, 16], [0, 1, 3]]
    assert slots.data_ptr() == packed.data_ptr()


@few(20)
@given(st.lists(st.tuples(st.permutations(range(4)), st.integers(0, 4)), min_size=3, max_size=20), st.integers(0, 999))
def test_padded_decode_steps_have_the_bits_of_the_layer(turns: list[tuple[list[int], int]], seed: int) -> None:
    r = exact()
    pools = nan_pool(r), nan_pool(r)
    slots = [pool.acquire(4) for pool in pools]
    assert slots[0] == slots[1]
    graph = StepGraph(r.layer, pools[1], sequences=4)
    for turn, (order, count) in enumerate(turns):
        mine = [slots[0][i] for i in order[:count]]
        hidden = r.hidden(count, seed + turn)
        eager = r.layer(hidden, Batch.decode(mine), pools[0])
        assert same_bits(graph(hidden, Batch.decode(mine)), eager)
    assert [pools[0].position(s) for s in slots[0]] == [pools[1].position(s) for s in slots[0]]


@few(20)
@given(
    st.lists(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=3), min_size=4, max_size=12)
)
def test_padded_verify_steps_of_any_row_counts_have_the_bits_of_the_layer(turns: list[list[tuple[int, int]]]) -> None:
    r = exact()
    pools = nan_pool(r), nan_pool(r)
    slots = pools[0].acquire(3)
    assert pools[1].acquire(3) == slots
    graph = StepGraph([r.layer], pools[1], sequences=3, rows=3)
    for turn, pairs in enumerate(turns):
        mine, counts = slots[: len(pairs)], [rows for rows, _ in pairs]
        hidden = r.hidden(sum(counts), turn)
        outs = [r.layer(hidden, Batch.verify(mine, counts), pools[0])]
        outs.append(graph(hidden, Batch.verify(mine, counts)))
        assert same_bits(outs[0], outs[1])
        for pool in pools:
            pool.commit(mine, [min(rows, accepted) for rows, accepted in pairs])


class CursorOps:
    """The reference, except that a step's cursors come from device memory, as kernels read them."""

    def __init__(self, ops) -> None:
        self._ops = ops

    def __getattr__(self, name: str):
        return getattr(self._ops, name)

    def step(self, xbc, dt, state, rows: Rows, **how):
        slots, positions, boundaries, cu_rows = (tuple(cursor.tolist()) for cursor in rows.cursors)
        counts = tuple(b - a for a, b in pairwise(cu_rows))
        assert len(slots) == len(rows.slots) and sum(counts) == rows.total_rows == len(xbc)
        return self._ops.step(xbc, dt, state, Rows(slots, counts, positions, boundaries, 0, CPU), **how)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Captures that record a function and replays that run it again into the same result. Returns: what happened."""
    events: list[str] = []

    def capture(work, *, memory=None):
        work()
        result = work()
        events.append("capture")

        def replay() -> None:
            events.append("replay")
            result.copy_(work())

        return replay, result

    monkeypatch.setattr(graph_module, "captures", lambda device: True)
    monkeypatch.setattr(graph_module, "capture", capture)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    return events


def test_replays_find_everything_that_changes_in_device_memory(recorded: list[str]) -> None:
    r = exact()
    layer = NemotronMamba2Layer(r.config, r.weights, r.layer.plan)
    layer._ops = CursorOps(layer._ops)
    pools = nan_pool(r), nan_pool(r)
    slots, parked = pools[0].acquire(4), pools[1].acquire(4)
    before = pool_bytes(pools[1])
    graph = StepGraph(layer, pools[1], sequences=3, rows=2)
    assert recorded == ["capture"] * 3 and unchanged(pools[1], before) and slots == parked
    draw = random.Random(3)
    for turn in range(60):
        mine = draw.sample(slots, 1 + turn % 3)
        counts = [draw.randint(0, 2) for _ in mine]
        hidden, batch = r.hidden(sum(counts), turn), Batch.verify(mine, counts)
        eager = r.layer(hidden, batch, pools[0])
        assert same_bits(graph(hidden, batch), eager), turn
        for pool in pools:
            pool.commit(mine, [min(count, 1 + turn % 2) for count in counts])
    assert "replay" in recorded and recorded.count("capture") == 3
    assert all(same_bits(a, b) for a, b in zip(pool_bytes(pools[0]), pool_bytes(pools[1]), strict=True))


def test_results_are_views_that_the_next_replay_overwrites(recorded: list[str]) -> None:
    r = exact()
    layer = NemotronMamba2Layer(r.config, r.weights, r.layer.plan)
    layer._ops = CursorOps(layer._ops)
    pool = r.pool(2)
    graph, slots = StepGraph(layer, pool, sequences=2), pool.acquire(2)
    first = graph(r.hidden(2, 1), Batch.decode(slots))
    second = graph(r.hidden(2, 2), Batch.decode(slots))
    assert first.data_ptr() == second.data_ptr()


def test_pads_touch_no_slot_that_is_not_in_the_batch() -> None:
    r = exact()
    pool = nan_pool(r, 5)
    parked, live = pool.acquire(2)
    graph = StepGraph(r.layer, pool, sequences=4, rows=2)
    before = pool.snapshot(parked)
    for turn in range(20):
        graph(r.hidden(1, turn), Batch.decode([live]))
    after = pool.snapshot(parked)
    assert all(same_bits(after.tensors[name], part) for name, part in before.tensors.items())


def two_layers() -> tuple[list[NemotronMamba2Layer], StatePool]:
    r = exact()
    plan = make_plan(r.config, r.weights, Policy(reproducible=True), device="cpu")
    layers = [NemotronMamba2Layer(r.config, r.weights, plan, index=i) for i in range(2)]
    return layers, StatePool(r.config, layers=2, slots=3)


def test_layers_run_in_order_in_one_step() -> None:
    layers, pool = two_layers()
    hidden = exact().hidden(2, 1)
    slots = pool.acquire(2)
    with pool.step(Batch.decode(slots)) as step:
        eager = layers[1](layers[0](hidden, step, pool), step, pool)
    graph_pool = StatePool(pool.layout.config, layers=2, slots=3)
    graph = StepGraph(layers, graph_pool, sequences=3)
    assert same_bits(graph(hidden, Batch.decode(graph_pool.acquire(2))), eager)


def test_some_layers_of_a_pool_want_a_step_of_the_caller() -> None:
    layers, pool = two_layers()
    hidden, slots = exact().hidden(1, 1), pool.acquire(1)
    first, second = (StepGraph(layer, pool, sequences=2) for layer in layers)
    with pytest.raises(ShapeError, match="1 of the pool's 2 layers"):
        first(hidden, Batch.decode(slots))
    with pool.step(Batch.decode(slots)) as step:
        out = second(first(hidden, step), step)
    assert pool.position(slots[0]) == 1 and torch.isfinite(out).all()


def test_out_takes_the_result() -> None:
    r = exact()
    pool = nan_pool(r)
    graph, hidden, slots = StepGraph(r.layer, pool, sequences=2), r.hidden(2, 3), pool.acquire(2)
    out = torch.full_like(hidden, float("nan"))
    assert graph(hidden, Batch.decode(slots), out=out) is out and torch.isfinite(out).all()
    empty = graph(hidden[:0], Batch.decode([]))
    assert empty.shape == (0, r.config.hidden_size)


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        (lambda s: Batch.prefill(s[:1], [1]), "prompt rows"),
        (lambda s: Batch.decode(s[:3]), "found 3 of up to 1"),
        (lambda s: Batch.verify(s[:1], [3]), "found 1 of up to 3"),
        (lambda s: Batch.decode(s[:2]), r"needs torch.bfloat16 hidden \[2, "),
    ],
)
def test_batches_that_do_not_fit_are_refused_before_anything_is_written(batch, words: str) -> None:
    r = exact()
    pool = r.pool(4)
    slots, graph = pool.acquire(4), StepGraph(r.layer, pool, sequences=2, rows=2)
    mine = batch(slots)
    hidden = r.hidden(1 if "hidden" in words else mine.total_rows, 0)
    with pytest.raises(ShapeError, match=words):
        graph(hidden, mine)
    assert [pool.position(slot) for slot in slots] == [0] * 4  # not poisoned


def test_a_failure_inside_a_step_poisons_its_slots_and_no_other() -> None:
    r = exact()
    pool = r.pool(4)
    layer = NemotronMamba2Layer(r.config, r.weights, r.layer.plan)
    slots, calls = pool.acquire(3), []

    def fail(step) -> None:
        raise RuntimeError("the device is gone")

    layer.host_step = HostStep(calls.append, calls.append, fail)
    graph = StepGraph(layer, pool, sequences=2)
    with pytest.raises(RuntimeError, match="gone"):
        graph(r.hidden(2, 0), Batch.decode(slots[:2]))
    assert len(calls) == 1 and pool.position(slots[2]) == 0
    for slot in slots[:2]:
        with pytest.raises(StateError, match="failed"):
            pool.position(slot)


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"graph": False, "why": (("graph", "it counts on the host"),)}, "graph: M: it counts on the host"),
        ({"graph_survives": False}, "graph_survives"),
        ({"max_sequences": 1}, "max_sequences"),
        ({"verify": False}, "verify"),
    ],
)
def test_layers_that_cannot_be_captured_are_refused(limits: dict[str, object], words: str) -> None:
    r = exact()
    layer = NemotronMamba2Layer(r.config, r.weights, r.layer.plan)
    layer.capabilities = replace(Capabilities(kind="M", state=True), **limits)
    with pytest.raises(ConfigError, match=words):
        StepGraph(layer, r.pool(4), sequences=2, rows=2)


@pytest.mark.parametrize("wrong", [{"sequences": 0}, {"rows": 0}, {"rows": 9}, {"layers": []}, {"layers": "twice"}])
def test_sizes_that_make_no_sense_are_refused(wrong: dict[str, object]) -> None:
    r = exact()
    how = SimpleNamespace(**({"layers": r.layer, "sequences": 2, "rows": 1} | wrong))
    layers = [r.layer, r.layer] if how.layers == "twice" else how.layers
    with pytest.raises(NemotronMamba2Error, match="graph"):
        StepGraph(layers, r.pool(4), sequences=how.sequences, rows=how.rows)


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_nothing_is_collected_within_a_capture(enabled: bool, fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    stream, seen = SimpleNamespace(wait_stream=lambda other: None), []
    for name, stand_in in {
        "Stream": lambda: stream,
        "current_stream": lambda: stream,
        "stream": nullcontext,
        "CUDAGraph": lambda: SimpleNamespace(replay=lambda: None),
        "graph": lambda graph, **how: nullcontext(),
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)

    def work() -> int:
        seen.append(gc.isenabled())
        if fails and len(seen) > graph_module.WARM_UPS:
            raise ValueError("within the capture")
        return 7

    was = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        if fails:
            with pytest.raises(ValueError, match="within"):
                graph_module.capture(work)
        else:
            assert graph_module.capture(work)[1] == 7
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if was else gc.disable)()
    assert seen == [enabled] * graph_module.WARM_UPS + [False]
