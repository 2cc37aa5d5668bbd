"""Replayed steps on a GPU: the bits of the eager step, for any slots and counts, without an allocation or a wait.

Needs an NVIDIA GPU (`scripts/test-gpu`). Buckets, padding and refusals are in `test_graph.py`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from nemotron_mamba2.batch import Batch
from nemotron_mamba2.config import Policy
from nemotron_mamba2.formats import FORMATS
from nemotron_mamba2.graph import WARM_UPS, StepGraph, capture
from nemotron_mamba2.layer import NemotronMamba2Layer
from nemotron_mamba2.plan import make_plan
from nemotron_mamba2.state import STATE_DTYPES, StatePool
from oracle import pool_bytes, same_bits
from test_gpu_step import SHAPES, nan_pool, random_weights

pytestmark = pytest.mark.gpu

NANO = SHAPES["nano30b"]


def make_layer(format: str, *, index: int = 0) -> NemotronMamba2Layer:
    weights = random_weights(NANO, format)
    return NemotronMamba2Layer(NANO, weights, make_plan(NANO, weights, Policy(), device="cuda"), index=index)


@pytest.fixture(params=FORMATS)
def layer(request: pytest.FixtureRequest) -> NemotronMamba2Layer:
    return make_layer(request.param)


def rows(count: int) -> Tensor:
    return torch.randn(count, NANO.hidden_size, device="cuda").bfloat16()


@contextmanager
def no_waiting() -> Iterator[None]:
    """Any call of torch that waits for the device raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def same_pools(a: StatePool, b: StatePool) -> bool:
    return all(same_bits(mine, other) for mine, other in zip(pool_bytes(a), pool_bytes(b), strict=True))


def decode_both(layer: NemotronMamba2Layer, pools: tuple[StatePool, StatePool], graph: StepGraph, turns: int) -> None:
    """Decode steps of changing slots, order and number through the layer and its graph, compared in bits."""
    draw = random.Random(5)
    slots = pools[0].acquire(16)
    assert pools[1].acquire(16) == slots
    for turn in range(turns):
        mine = draw.sample(slots, (16, 1, 3, 9, 2, 12)[turn % 6])
        hidden = rows(len(mine))
        eager = layer(hidden, Batch.decode(mine), pools[0])
        assert same_bits(graph(hidden, Batch.decode(mine)), eager), f"turn {turn}, {len(mine)} sequences"
    assert same_pools(*pools)


def test_law_a_replayed_decode_step_is_eager(layer: NemotronMamba2Layer) -> None:
    pools = nan_pool(NANO), nan_pool(NANO)
    decode_both(
        layer, pools, StepGraph(layer, pools[1], sequences=16), turns=60
    )  # sequences cross two or three windows


@pytest.mark.parametrize("state_dtype", STATE_DTYPES)
def test_law_a_replayed_decode_step_is_eager_in_every_state_dtype(state_dtype: torch.dtype) -> None:
    layer, pools = make_layer("bf16"), tuple(nan_pool(NANO, state_dtype=state_dtype) for _ in range(2))
    decode_both(layer, pools, StepGraph(layer, pools[1], sequences=16), turns=60)


def test_law_a_replayed_verify_step_is_eager(layer: NemotronMamba2Layer) -> None:
    draw, pools = random.Random(7), (nan_pool(NANO), nan_pool(NANO))
    slots = pools[0].acquire(6)
    assert pools[1].acquire(6) == slots
    graph = StepGraph(layer, pools[1], sequences=6, rows=4)
    for turn in range(30):
        mine = draw.sample(slots, 1 + turn % 6)
        counts = [draw.randint(0 if turn % 3 else 4, 4) for _ in mine]
        accepted = [draw.randint(0, count) for count in counts]
        hidden = rows(sum(counts))
        eager = layer(hidden, Batch.verify(mine, counts), pools[0])
        assert same_bits(graph(hidden, Batch.verify(mine, counts)), eager), f"turn {turn}, rows {counts}"
        for pool in pools:
            pool.commit(mine, accepted)
    assert same_pools(*pools)


@pytest.mark.parametrize("sequences", [64, 255, 300])
def test_law_a_replayed_step_of_many_sequences_is_eager(sequences: int) -> None:
    layer = make_layer("nvfp4")
    pools = nan_pool(NANO, slots=sequences), nan_pool(NANO, slots=sequences)
    slots = pools[0].acquire(sequences)
    assert pools[1].acquire(sequences) == slots
    graph = StepGraph(layer, pools[1], sequences=sequences)
    for count in (sequences, sequences - 1, sequences // 2 + 1, 17, sequences):
        hidden = rows(count)
        eager = layer(hidden, Batch.decode(slots[:count]), pools[0])
        assert same_bits(graph(hidden, Batch.decode(slots[:count])), eager), count


def test_layers_of_one_pool_replay_together() -> None:
    layers = [make_layer(format, index=i) for i, format in enumerate(("bf16", "nvfp4", "fp8_tensor"))]
    pools = [StatePool(NANO, layers=3, slots=4, device="cuda") for _ in range(2)]
    graph = StepGraph(layers, pools[1], sequences=4)
    slots = pools[0].acquire(3)
    assert pools[1].acquire(3) == slots
    for turn in range(40):
        hidden = out = rows(1 + turn % 3)
        batch = Batch.decode(slots[: len(hidden)])
        with pools[0].step(batch) as step:
            for layer in layers:
                out = layer(out, step, pools[0])
        assert same_bits(graph(hidden, batch), out), turn


def test_capture_and_pads_touch_no_slot_outside_the_batch(layer: NemotronMamba2Layer) -> None:
    pool = nan_pool(NANO, slots=5)
    parked, live = pool.acquire(2)
    for _ in range(17):
        layer(rows(1), Batch.decode([parked]), pool)
    others = [slot for slot in range(5) if slot != live]

    def held() -> list[Tensor]:
        state = pool.layer_state(0)
        parts = (state.ssm, state.ring_x, state.ring_B, state.ring_dt, state.ring_conv)
        return [part[others].view(torch.uint8).clone() for part in parts]

    before = held()
    graph = StepGraph(layer, pool, sequences=4, rows=2)
    for turn in range(20):
        graph(rows(1 + turn % 2), Batch.verify([live], [1 + turn % 2]))
        pool.commit([live], [1 + turn % 2])
    assert all(torch.equal(now, then) for now, then in zip(held(), before, strict=True))


def test_nan_in_a_row_that_a_pad_takes_over_goes_nowhere(layer: NemotronMamba2Layer) -> None:
    pools = nan_pool(NANO), nan_pool(NANO)
    graph = StepGraph(layer, pools[1], sequences=4)
    slots = pools[1].acquire(4)
    graph(torch.full_like(rows(4), float("nan")), Batch.decode(slots))
    pools[1].release(slots)
    hidden, batches = rows(3), [Batch.decode(pool.acquire(3)) for pool in pools]
    assert same_bits(graph(hidden, batches[1]), layer(hidden, batches[0], pools[0]))


def test_a_replay_allocates_nothing_and_waits_for_nothing(layer: NemotronMamba2Layer) -> None:
    pool = nan_pool(NANO)
    slots, hidden, out = pool.acquire(8), rows(24), torch.empty(24, NANO.hidden_size, device="cuda").bfloat16()
    graph = StepGraph(layer, pool, sequences=8, rows=3)
    graph(hidden[:8], Batch.decode(slots), out=out[:8])
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()
    with no_waiting():
        for count in (8, 3, 1, 7):
            graph(hidden[:count], Batch.decode(slots[:count]), out=out[:count])
            graph(hidden[: 3 * count], Batch.verify(slots[:count], [3] * count), out=out[: 3 * count])
            pool.commit(slots[:count], [2] * count)
    after = torch.cuda.memory_stats()
    for counter in ("allocation.all.allocated", "segment.all.allocated", "reserved_bytes.all.current"):
        assert after[counter] == before[counter], counter


def test_garbage_that_holds_graphs_does_not_end_a_capture() -> None:
    layer, pool, x = make_layer("bf16"), nan_pool(NANO), rows(4)
    ring: list[object] = [StepGraph(layer, pool, sequences=2)]
    ring.append(ring)
    held, calls = [ring], []
    del ring

    def work() -> Tensor:
        calls.append(1)
        if len(calls) > WARM_UPS:  # within the capture the older graphs become garbage, and much is allocated
            held.clear()
            calls.extend([[] for _ in range(100_000)])  # type: ignore[misc]
        return x * 2

    replay, result = capture(work)
    replay()
    assert same_bits(result, x * 2)


def test_an_eager_layer_waits_for_nothing(layer: NemotronMamba2Layer) -> None:
    pool = nan_pool(NANO)
    slots, hidden = pool.acquire(4), rows(300)
    calls = (
        Batch.prefill(slots, [70, 1, 0, 33]),
        Batch.decode(slots),
        Batch.verify(slots, [4, 1, 0, 3]),
        Batch.join(Batch.prefill(slots[:1], [20]), Batch.decode(slots[1:])),
    )

    def run() -> None:
        for batch in calls:
            layer(hidden[: batch.total_rows], batch, pool)
            verified = [slot for slot in slots if pool.uncommitted_rows(slot)]
            pool.commit(verified, [1] * len(verified))

    run()  # compiles, and makes cuBLAS its workspace
    torch.cuda.synchronize()
    with no_waiting():
        run()


def test_an_eager_prompt_cut_for_a_snapshot_waits_for_nothing() -> None:
    layer, pool, hidden = make_layer("bf16"), nan_pool(NANO), rows(130)
    slots = pool.acquire(4)
    layer(hidden[:130], Batch.prefill(slots[:2], [70, 60], snapshot_at=[32, None]), pool)
    torch.cuda.synchronize()
    with no_waiting():
        layer(hidden[:130], Batch.prefill(slots[2:], [70, 60], snapshot_at=[32, None]), pool)
    assert pool.take_snapshot(slots[2]).position == 32
