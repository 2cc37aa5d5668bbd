"""Attention on a GPU: equal to the reference, and a step row's bits depend on nothing but its own keys.

Needs an NVIDIA GPU (`scripts/test-gpu`). Without one, `test_attention_kernels.py` runs the kernels in the interpreter.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from models import relative_error
from nemotron_mamba2.batch import Batch, Rows, Step
from nemotron_mamba2.config import AttentionConfig
from nemotron_mamba2.formats import E4M3
from nemotron_mamba2.graph import capture
from nemotron_mamba2.model import PagePool
from nemotron_mamba2.ops import reference
from nemotron_mamba2.ops.gpu import attention, store_kv
from oracle import same_bits

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
SHAPES = {"nano": (32, 2, 128), "nano4b": (40, 8, 128), "narrow": (16, 4, 64), "odd": (12, 4, 80), "wide": (32, 1, 96)}
NANO = SHAPES["nano"]
KINDS = {"bf16": torch.bfloat16, "fp8": E4M3}


def make_pool(shape: tuple[int, int, int] = NANO, *, dtype=torch.bfloat16, slots: int = 64, pages: int = 1200):
    heads, kv_heads, head_dim = shape
    config = AttentionConfig(64, heads, kv_heads, head_dim)
    pool = PagePool([config], pages=pages, slots=slots, dtype=dtype, device=CUDA)
    for tensor in (*pool.keys, *pool.values):
        tensor[:-1].view(torch.uint8).fill_(0xFF)  # NaN in every dtype
    return pool


def scales_of(dtype: torch.dtype) -> dict[str, Tensor]:
    pair = {"k_scale": torch.tensor(0.02, device=CUDA), "v_scale": torch.tensor(0.03, device=CUDA)}
    return pair if dtype == E4M3 else {}


def rows_of(counts, positions, slots=None) -> Rows:
    return Rows(tuple(slots or range(len(counts))), tuple(counts), tuple(positions), (0,) * len(counts), 0, CUDA)


def pages_of(pool: PagePool, rows: Rows, role: str = "step"):
    if role == "prompt":
        return pool.table(Step(Batch.prefill(rows.slots, rows.rows), rows, None)).pages("prompt")
    return pool.table(Step(Batch.verify(rows.slots, rows.rows), None, rows)).pages("step")


def fill(pool: PagePool, positions: list[int], counts: list[int]) -> Rows:
    """Random keys and values for every place, with pages that lie scattered."""
    ends = [p + n for p, n in zip(positions, counts, strict=True)]
    for end in range(64, max(ends) + 64, 64):
        for slot in range(len(ends)):
            pool.reserve([slot], [0], [min(end, ends[slot])])
    where = pages_of(pool, rows_of(ends, [0] * len(ends)), "prompt")
    k, v = (torch.randn(sum(ends), *pool.keys[0].shape[2:], device=CUDA).bfloat16() for _ in range(2))
    reference.store_kv(k, v, pool.keys[0], pool.values[0], where.places, **scales_of(pool.keys[0].dtype))
    return rows_of(counts, positions)


def queries(rows: int, shape: tuple[int, int, int] = NANO) -> Tensor:
    return torch.randn(rows, shape[0], shape[2], device=CUDA).bfloat16()


@pytest.mark.parametrize("dtype", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("role", ["step", "prompt"])
def test_rows_are_those_of_the_reference(role: str, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    pool = make_pool(shape, dtype=dtype)
    counts = [1, 4, 3, 0, 2] if role == "step" else [130, 1, 200, 0, 70]
    rows = fill(pool, [0, 127, 5000, 7, 1000], counts)
    q, pages = queries(rows.total_rows, shape), pages_of(pool, rows, role)
    args, how = (q, pool.keys[0], pool.values[0], rows, role), {"pages": pages, **scales_of(dtype)}
    truth = reference.attention(q.float(), *args[1:], **how)
    out = torch.full_like(q, math.nan)
    assert relative_error(attention(*args, **how, out=out), truth) < 6e-3
    assert same_bits(attention(*args, **how), out)


@pytest.mark.parametrize("dtype", KINDS.values(), ids=KINDS)
def test_a_row_alone_is_a_row_of_any_batch_and_table(dtype: torch.dtype) -> None:
    pool = make_pool(dtype=dtype)
    positions = [(37 * i * i) % 300 for i in range(40)] + [4090, 4600]
    counts = [1 + i % 4 for i in range(42)]
    rows = fill(pool, positions, counts)
    q, kv, scales = queries(rows.total_rows), (pool.keys[0], pool.values[0]), scales_of(dtype)
    together = attention(q, *kv, rows, "step", pages=pages_of(pool, rows), **scales)
    fixed = pool.fixed_table(sequences=48, rows=160, tokens=32768)
    pool.fill(fixed, rows)
    padded = torch.cat((q, torch.full((160 - len(q), *q.shape[1:]), math.nan, device=CUDA, dtype=q.dtype)))
    wide = attention(padded, *kv, rows, "step", pages=fixed.pages("step"), **scales)
    assert same_bits(wide[: len(q)], together) and not wide[len(q) :].any()
    for i in (0, 7, 40, 41):
        for j in range(counts[i]):
            alone = rows_of([1], [positions[i] + j], [i])
            place = rows.cu_rows[i] + j
            row = attention(q[place][None], *kv, alone, "step", pages=pages_of(pool, alone), **scales)
            assert same_bits(row[0], together[place]), (i, j)


def test_a_captured_step_serves_other_rows() -> None:
    pool = make_pool()
    rows = fill(pool, [300, 17, 2000], [1, 4, 2])
    fixed = pool.fixed_table(sequences=4, rows=8, tokens=4096)
    where, idle = fixed.pages("step"), rows_of([8], [0], [pool.pad_slot])
    q, k, v = queries(8), *(torch.randn(8, 2, 128, device=CUDA).bfloat16() for _ in range(2))
    keys, values = pool.keys[0], pool.values[0]

    def work() -> Tensor:
        store_kv(k, v, keys, values, where.places)
        return attention(q, keys, values, idle, "step", pages=where)

    before = keys[:-1].clone()
    replay, found = capture(work)
    assert same_bits(keys[:-1].view(torch.int16), before.view(torch.int16)), "padding writes to the pad page alone"
    for step in (rows, rows_of([2, 1], [2000, 300], [2, 0]), rows):
        torch.cuda.set_sync_debug_mode("error")
        try:
            pool.fill(fixed, step)
            replay()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        count, pages = step.total_rows, pages_of(pool, step)
        eager = attention(q[:count].clone(), keys, values, step, "step", pages=pages)
        assert same_bits(found[:count], eager) and not found[count:].any()
        assert (
            relative_error(eager, reference.attention(q[:count].float(), keys, values, step, "step", pages=pages))
            < 6e-3
        )
        assert same_bits(keys.flatten(0, 1)[pages.places.long()], k[:count])


@pytest.mark.parametrize("dtype", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("scaled", [False, True])
def test_stored_rows_have_the_bits_of_the_reference(dtype: torch.dtype, scaled: bool) -> None:
    draw = torch.randn(700, 2, 3, 80, device=CUDA) * torch.logspace(-8, 4, 700, device=CUDA)[:, None, None, None]
    draw[0, 0, 0, 0], draw[1, 1, 0, 0], draw[2, 0, 1, 0] = math.nan, 1e9, -1e9
    k, v = draw.bfloat16().unbind(1)
    places = torch.randperm(60 * 16, device=CUDA)[:700].int()
    scales = scales_of(E4M3) if scaled else {}
    pools = [[torch.zeros(60, 16, 3, 80, dtype=dtype, device=CUDA) for _ in range(2)] for _ in range(2)]
    reference.store_kv(k, v, *pools[0], places, **scales)
    store_kv(k, v, *pools[1], places, **scales)
    for theirs, ours in zip(*pools, strict=True):
        assert ours.view(torch.uint8).equal(theirs.view(torch.uint8))


def test_a_split_prompt_has_the_same_bits_when_reproducible() -> None:
    pool = make_pool()
    fill(pool, [0], [700])
    q, kv = queries(700), (pool.keys[0], pool.values[0])
    cuts = [(0, 700), (0, 100), (100, 357), (357, 358), (358, 700)]
    whole, *parts = (
        attention(q[a:b], *kv, rows, "prompt", pages=pages_of(pool, rows, "prompt"), reproducible=True)
        for a, b in cuts
        for rows in [rows_of([b - a], [a])]
    )
    assert same_bits(torch.cat(parts), whole)


def test_nothing_waits_for_the_device() -> None:
    pool = make_pool()
    rows, more = fill(pool, [300, 17, 2000], [1, 4, 2]), rows_of([30, 1, 0], [100, 17, 0])
    q, kv = queries(31), (pool.keys[0], pool.values[0])

    def run() -> None:
        attention(q[:7], *kv, rows, "step", pages=pages_of(pool, rows))
        for reproducible in (False, True):
            attention(q, *kv, more, "prompt", pages=pages_of(pool, more, "prompt"), reproducible=reproducible)

    run()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
