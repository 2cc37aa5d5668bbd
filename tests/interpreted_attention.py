"""The attention kernels against the reference, on the CPU: `test_attention_kernels.py` runs this file with
TRITON_INTERPRET=1. In fp32, since the interpreter miscomputes bf16 products."""

from __future__ import annotations

import math
from importlib import import_module

import pytest
import torch
from triton.runtime import interpreter

from models import relative_error
from nemotron_mamba2.batch import Batch, Rows, Step
from nemotron_mamba2.config import AttentionConfig
from nemotron_mamba2.formats import E4M3
from nemotron_mamba2.model import PagePool
from nemotron_mamba2.ops import reference

kernels = import_module("nemotron_mamba2.ops.gpu.attention")

SHAPES = {"nano4b": (10, 2, 16), "odd": (3, 1, 20), "wide": (20, 1, 16)}  # heads, kv_heads, head_dim
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _numbers_of_one_element(monkeypatch: pytest.MonkeyPatch) -> None:
    """NumPy from 2.4 on makes no number of an array of one element, which the interpreter asks for in `range`."""
    patch = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)


@pytest.fixture(autouse=True)
def _small_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stretches so short that few keys make many of them."""
    for name, value in {"FINE_TOKENS": 16, "FINE_SPLITS": 2, "COARSE_TOKENS": 48, "PROGRAMS": 8}.items():
        monkeypatch.setattr(kernels, name, value)
    monkeypatch.setattr(kernels, "ATTEND", {"BLOCK": 16})
    monkeypatch.setattr(kernels, "COMBINE", {"BLOCK": 2})


def make_pool(shape: tuple[int, int, int], *, dtype=torch.float32, slots: int = 4) -> PagePool:
    heads, kv_heads, head_dim = shape
    pool = PagePool([AttentionConfig(64, heads, kv_heads, head_dim)], pages=60, slots=slots, dtype=dtype)
    for tensor in (*pool.keys, *pool.values):
        tensor[:-1].view(torch.uint8).fill_(0xFF)  # NaN in every dtype
    return pool


def fill(pool: PagePool, positions: list[int], counts: list[int], *, scales=None) -> Rows:
    """Sequences of random keys and values, interleaved so that pages lie scattered; their next rows are reserved."""
    ends = [p + n for p, n in zip(positions, counts, strict=True)]
    slots = range(len(positions))
    for end in range(16, max(ends) + 16, 16):
        for slot in slots:
            pool.reserve([slot], [0], [min(end, ends[slot])])
    everything = rows_of(ends, [0] * len(ends))
    where = pool.table(Step(Batch.prefill(slots, ends), everything, None)).pages("prompt")
    k, v = (torch.randn(sum(ends), *pool.keys[0].shape[2:]) for _ in range(2))
    reference.store_kv(k, v, pool.keys[0], pool.values[0], where.places, **(scales or {}))
    return rows_of(counts, positions)


def rows_of(counts: list[int], positions: list[int]) -> Rows:
    return Rows(tuple(range(len(counts))), tuple(counts), tuple(positions), (0,) * len(counts), 0, CPU)


def table_of(pool: PagePool, rows: Rows):
    return pool.table(Step(Batch.verify(rows.slots, rows.rows), None, rows)).pages("step")


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_step_rows_are_those_of_the_reference(shape):
    pool = make_pool(shape)
    rows = fill(pool, [0, 15, 130, 31], [1, 2, 3, 1])
    q = torch.randn(rows.total_rows, shape[0], shape[2])
    where = table_of(pool, rows)
    truth = reference.attention(q, pool.keys[0], pool.values[0], rows, "step", pages=where)
    found = kernels.attention(q, pool.keys[0], pool.values[0], rows, "step", pages=where)
    assert relative_error(found, truth) < 5e-7
    wide = torch.randn(rows.total_rows, 2 * shape[0], shape[2])
    wide[:, : shape[0]] = q
    assert kernels.attention(
        wide[:, : shape[0]], pool.keys[0], pool.values[0], rows, "step", pages=where, out=torch.empty_like(q)
    ).equal(found), "rows at a stride"


@pytest.mark.parametrize("decode", [False, True], ids=["converted", "by bits"])
def test_fp8_pages(decode, monkeypatch):
    monkeypatch.setattr(kernels, "_without_e4m3", lambda device: decode)
    pool = make_pool((4, 2, 16), dtype=E4M3)
    scales = {"k_scale": torch.tensor(0.02), "v_scale": torch.tensor(0.03)}
    rows = fill(pool, [70, 3], [1, 2], scales=scales)
    q, where = torch.randn(3, 4, 16), table_of(pool, rows)
    truth = reference.attention(q, pool.keys[0], pool.values[0], rows, "step", pages=where, **scales)
    found = kernels.attention(q, pool.keys[0], pool.values[0], rows, "step", pages=where, **scales)
    assert relative_error(found, truth) < 5e-7


def test_a_row_has_the_same_bits_alone_and_in_a_wider_table():
    pool = make_pool((4, 2, 16))
    rows = fill(pool, [100, 15, 130, 31], [1, 2, 3, 1])
    q = torch.randn(7, 4, 16)
    args = (pool.keys[0], pool.values[0])
    together = kernels.attention(q, *args, rows, "step", pages=table_of(pool, rows))
    fixed = pool.fixed_table(sequences=5, rows=9, tokens=400)
    padded = torch.cat((q, torch.full((2, 4, 16), math.nan)))
    for _ in range(2):
        pool.fill(fixed, rows)
        replayed = kernels.attention(padded, *args, rows, "step", pages=fixed.pages("step"))
        assert replayed[:7].equal(together) and not replayed[7:].any(), "padding gives zeros"
        pool.fill(fixed, rows_of([1, 0, 0, 0], [100, 15, 130, 31]))
        one = kernels.attention(padded, *args, rows, "step", pages=fixed.pages("step"))
        assert one[:1].equal(together[:1]) and not one[1:].any()
    for i, (slot, at) in enumerate([(0, 100), (1, 15), (1, 16), (2, 130), (2, 131), (2, 132), (3, 31)]):
        alone = Rows((slot,), (1,), (at,), (0,), 0, CPU)
        assert kernels.attention(q[i : i + 1], *args, alone, "step", pages=table_of(pool, alone)).equal(
            together[i : i + 1]
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, E4M3])
@pytest.mark.parametrize("scaled", [False, True])
def test_stored_rows_have_the_bits_of_the_reference(dtype, scaled):
    """Of values that pages can hold, since the interpreter does not round as devices do; what saturates too."""
    draw = torch.randn(9, 2, 3, 20).to(E4M3).float()
    draw[1, 1, 0, 0], draw[2, 0, 1, 0] = 1e9, -1e9
    if dtype != torch.float32:
        draw = draw.bfloat16()
    k, v = draw.unbind(1)
    places = torch.tensor([40, 3, 16, 17, 0, 99, 98, 55, 54], dtype=torch.int32)
    scales = {"k_scale": torch.tensor(0.5), "v_scale": torch.tensor(0.25)} if scaled else {}
    pools = [[torch.zeros(7, 16, 3, 20, dtype=dtype) for _ in range(2)] for _ in range(2)]
    reference.store_kv(k, v, *pools[0], places, **scales)
    kernels.store_kv(k, v, *pools[1], places, **scales)
    for theirs, ours in zip(*pools, strict=True):
        assert ours.float().equal(theirs.float())


@pytest.mark.parametrize("reproducible", [False, True])
def test_prompt_rows_are_those_of_the_reference(reproducible):
    pool = make_pool((4, 2, 16))
    rows = fill(pool, [0, 40, 9, 0], [33, 70, 0, 1])
    pages = pool.table(Step(Batch.prefill(rows.slots, rows.rows), rows, None)).pages("prompt")
    q = torch.randn(rows.total_rows, 4, 16)
    how = {"pages": pages, "reproducible": reproducible}
    truth = reference.attention(q, pool.keys[0], pool.values[0], rows, "prompt", **how)
    found = kernels.attention(q, pool.keys[0], pool.values[0], rows, "prompt", **how)
    assert relative_error(found, truth) < 5e-7
