"""PagePool against a dict of lists: random operations, and after each the same contents, holders and free pages."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nemotron_mamba2.batch import Batch, Rows, Step
from nemotron_mamba2.config import AttentionConfig
from nemotron_mamba2.errors import ConfigError, OutOfPages, ShapeError, SnapshotMismatch, StateError
from nemotron_mamba2.model import PagePool
from nemotron_mamba2.ops.reference import store_kv

LAYERS = [AttentionConfig(8, 2, 1, 2), AttentionConfig(8, 4, 2, 4)]  # two widths: a page id serves both
SLOTS, PAGES, PAGE_TOKENS = 4, 9, 16


def make_pool(pages: int = PAGES, *, layers=LAYERS, dtype=torch.float32) -> PagePool:
    return PagePool(layers, pages=pages, slots=SLOTS, page_tokens=PAGE_TOKENS, dtype=dtype)


def step_of(pool: PagePool, slot: int, start: int, count: int) -> Step:
    rows = Rows((slot,), (count,), (start,), (0,), 0, pool.device)
    return Step(Batch.prefill([slot], [count]), rows, None)


def write(pool: PagePool, slot: int, start: int, values: list[float]) -> None:
    pool.reserve([slot], [start], [start + len(values)])
    table = pool.table(step_of(pool, slot, start, len(values)))
    for keys, vals in zip(table.keys, table.values, strict=True):
        rows = torch.tensor(values)[:, None, None].expand(-1, *keys.shape[2:])
        store_kv(rows, -rows, keys, vals, table.pages("prompt").places)


def read(pool: PagePool, slot: int, tokens: int) -> list[list[float]]:
    """What every layer holds, all heads and both of keys and values: one list per place, each the same value."""
    index = list(pool.held(slot))
    found = []
    for keys, values in zip(pool.keys, pool.values, strict=True):
        k, v = (t[index].flatten(0, 1)[:tokens].flatten(1) for t in (keys, -values))
        both = torch.cat((k, v), 1)
        assert bool((both == both[:, :1]).all()), "heads, or keys and values, of one token disagree"
        found.append(both[:, 0].tolist())
    return found


def check(pool: PagePool, model: dict[int, list[float]], saved: list) -> None:
    holders = Counter(page for slot in range(SLOTS) for page in pool.held(slot))
    assert pool.free_pages == pool.pages - len(holders), "pages are lost or counted twice"
    for slot, tokens in model.items():
        assert len(set(pool.held(slot))) == len(pool.held(slot))
        for layer in read(pool, slot, len(tokens)):
            assert layer == tokens
    for tokens, snapshot in saved:
        assert all(k[:, 0, 0].tolist() == tokens for k in snapshot.keys), "a snapshot changed"


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["append", "append", "append", "fork", "reorder", "trim", "release", "snapshot", "restore"]),
        st.integers(0, SLOTS - 1),
        st.integers(0, SLOTS - 1),
        st.integers(0, 60),
    ),
    max_size=40,
)


@given(OPERATIONS)
def test_random_operations_equal_a_dict_of_lists(operations):
    pool = make_pool()
    model: dict[int, list[float]] = {slot: [] for slot in range(SLOTS)}
    saved: list = []
    fresh = iter(range(1, 10**6))
    for name, slot, other, n in operations:
        before = (pool.free_pages, [pool.held(s) for s in range(SLOTS)])
        try:
            if name == "append":
                values = [float(next(fresh)) for _ in range(n)]
                write(pool, slot, len(model[slot]), values)
                model[slot] = model[slot] + values
            elif name == "fork":
                pool.fork(slot, other, tokens=len(model[slot]))
                model[other] = list(model[slot])
            elif name == "reorder":
                order = [(s * (n + 1) + other) % SLOTS for s in range(SLOTS)]
                pool.reorder(range(SLOTS), order, tokens=[len(model[i]) for i in order])
                model = {s: list(model[i]) for s, i in enumerate(order)}
            elif name == "trim":
                model[slot] = model[slot][: n % (len(model[slot]) + 1)]
                pool.trim(slot, len(model[slot]))
            elif name == "release":
                pool.release(slot)
                model[slot] = []
            elif name == "snapshot":
                tokens = n % (len(model[slot]) + 1)
                saved.append((model[slot][:tokens], pool.snapshot(slot, tokens)))
            elif saved:
                tokens, snapshot = saved[n % len(saved)]
                pool.restore(slot, snapshot)
                model[slot] = list(tokens)
        except OutOfPages:
            assert before == (pool.free_pages, [pool.held(s) for s in range(SLOTS)]), "a refusal changed something"
        check(pool, model, saved)
    for slot in range(SLOTS):
        pool.release(slot)
    assert pool.free_pages == PAGES


def test_out_of_pages_refuses_all_sequences_of_a_step():
    pool = make_pool(pages=3)
    write(pool, 0, 0, [1.0] * 16)
    with pytest.raises(OutOfPages, match="3 pages wanted, 2 of 3 are free"):
        pool.reserve([0, 1], [16, 0], [17, 32])
    assert (pool.held(0), pool.held(1), pool.free_pages) == ((0,), (), 2)


def test_shared_pages_are_copied_by_the_writer_only():
    pool = make_pool()
    write(pool, 0, 0, [float(t) for t in range(20)])
    pool.fork(0, 1, tokens=20)
    full, partial = pool.held(0)
    assert pool.held(1) == (full, partial) and pool.free_pages == PAGES - 2
    write(pool, 1, 20, [99.0])
    assert pool.held(0) == (full, partial), "the one that did not write keeps its page"
    assert pool.held(1)[0] == full and pool.held(1)[1] != partial
    write(pool, 0, 20, [77.0])
    assert pool.held(0) == (full, partial), "the last holder writes in place"
    assert [layer[20] for layer in read(pool, 0, 21)] == [77.0, 77.0]
    assert [layer[20] for layer in read(pool, 1, 21)] == [99.0, 99.0]


def test_two_holders_that_write_in_one_step_need_one_copy():
    pool = make_pool(pages=2)
    write(pool, 0, 0, [1.0] * 5)
    pool.fork(0, 1, tokens=5)
    pool.reserve([0, 1], [5, 5], [6, 6])  # one page is free, and one is enough
    assert pool.free_pages == 0 and set(pool.held(0)) | set(pool.held(1)) == {0, 1}


def test_a_slot_that_grows_alone_lies_in_a_row():
    pool = make_pool()
    for t in range(70):
        write(pool, 2, t, [float(t)])
    assert list(pool.held(2)) == list(range(pool.held(2)[0], pool.held(2)[0] + 5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("pages", [0, 1, 7])
def test_bytes_are_known_before_allocating(pages, dtype):
    pool = make_pool(pages, dtype=dtype)
    assert pool.nbytes == PagePool.bytes(LAYERS, pages=pages, dtype=dtype)
    assert PagePool.bytes_per_token(LAYERS, dtype=dtype) == 2 * (1 * 2 + 2 * 4) * dtype.itemsize


def test_fp8_pages_snapshot_and_restore():
    pool = make_pool(dtype=torch.float8_e4m3fn)
    write(pool, 0, 0, [float(t % 8) for t in range(20)])
    snapshot = pool.snapshot(0, 19)
    pool.restore(3, snapshot)
    places = pool._places(3, 19)
    assert pool.keys[1].view(torch.uint8).flatten(0, 1)[places].equal(snapshot.keys[1].view(torch.uint8))


def test_a_model_without_attention_needs_no_pages():
    pool = make_pool(0, layers=[])
    pool.reserve([0], [0], [10_000])
    table = pool.table(step_of(pool, 0, 0, 3))
    assert (pool.nbytes, table.keys, pool.pages_for(10_000)) == (0, (), 0)
    assert table.pages("prompt").row_keys.tolist() == [0, 0, 0]
    pool.restore(1, pool.snapshot(0, 5))
    pool.release(0)


def test_64_the_pad_slot_writes_to_its_own_page():
    pool = make_pool()
    write(pool, 0, 0, [1.0] * 16 * 3)
    before = [t[:PAGES].clone() for t in pool.keys]
    pool.reserve([SLOTS], [0], [40])
    table = pool.table(step_of(pool, SLOTS, 0, 40))
    where = table.pages("prompt")
    assert not where.lists[0] and where.places.tolist() == [PAGES * 16 + t % 16 for t in range(40)]
    assert where.row_keys.tolist() == [0] * 40
    store_kv(*[torch.full((40, 1, 2), math.nan)] * 2, table.keys[0], table.values[0], where.places)
    assert all(t[:PAGES].nan_to_num(-1).equal(b.nan_to_num(-1)) for t, b in zip(pool.keys, before, strict=True))
    assert pool.free_pages == PAGES - 3


def test_what_cannot_be_is_refused():
    pool = make_pool()
    with pytest.raises(ConfigError, match="page_tokens"):
        PagePool(LAYERS, pages=1, slots=1, page_tokens=10)
    with pytest.raises(StateError, match="no slot 9"):
        pool.reserve([9], [0], [1])
    with pytest.raises(ShapeError, match="reorder"):
        pool.reorder([0, 1], [0, 2], tokens=[0, 0])
    with pytest.raises(StateError, match="its step needs 1"):
        pool.table(step_of(pool, 0, 0, 1))
    with pytest.raises(StateError, match="3 tokens need more"):
        pool.snapshot(0, 3)
    other = make_pool(layers=LAYERS[:1])
    with pytest.raises(SnapshotMismatch, match="1 layers"):
        pool.restore(0, other.snapshot(0, 0))


def step_rows(slots: list[int], counts: list[int], positions: list[int]) -> Rows:
    return Rows(tuple(slots), tuple(counts), tuple(positions), (0,) * len(slots), 0, torch.device("cpu"))


def test_a_fixed_table_holds_the_rows_of_each_step_and_padding():
    pool = make_pool()
    for slot, tokens in ((2, 40), (0, 20), (1, 5)):
        pool.reserve([slot], [0], [tokens])
    fixed = pool.fixed_table(sequences=4, rows=6, tokens=16 * 5)
    where, places = fixed.pages("step"), [t.data_ptr() for t in (fixed.packed, fixed.pages("step").table)]
    assert where.table.tolist() == [[PAGES] * 5] * 4 and where.row_keys.tolist() == [0] * 6
    for rows in (
        step_rows([2, 0], [1, 3], [39, 15]),
        step_rows([1, SLOTS], [2, 4], [3, 0]),
        step_rows([2, 0, 1, SLOTS], [2, 1, 1, 2], [16, 0, 4, 0]),
        step_rows([], [], []),
    ):
        pool.fill(fixed, rows)
        made = pool.table(Step(Batch.verify(rows.slots, rows.rows), None, rows)).pages("step")
        total, (sequences, width) = rows.total_rows, made.table.shape
        assert where.table[:sequences, :width].equal(made.table)
        for ours, theirs in zip(
            (where.places, where.row_sequence, where.row_keys),
            (made.places, made.row_sequence, made.row_keys),
            strict=True,
        ):
            assert ours[:total].equal(theirs)
        for i in range(total):
            sequence, seen = int(made.row_sequence[i]), int(made.row_keys[i])
            position = rows.positions[sequence] + i - rows.cu_rows[sequence]
            if rows.slots[sequence] == SLOTS:
                assert seen == 0 and int(made.places[i]) // 16 == PAGES
            else:
                held = pool.held(rows.slots[sequence])
                assert seen == position + 1
                assert int(made.places[i]) == held[position // 16] * 16 + position % 16
        assert not where.row_keys[total:].any() and bool((where.places[total:] // 16 == PAGES).all())
        assert places == [t.data_ptr() for t in (fixed.packed, where.table)]
    with pytest.raises(ShapeError, match="made for 4 sequences of 5 pages and 6 rows"):
        pool.fill(fixed, step_rows([2], [7], [0]))
    narrow = pool.fixed_table(sequences=1, rows=1, tokens=16)
    with pytest.raises(ShapeError, match="of up to 3"):
        pool.fill(narrow, step_rows([2], [1], [39]))
    with pytest.raises(ShapeError, match="no prompt rows"):
        fixed.pages("prompt")
