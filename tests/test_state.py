"""The state pool: who owns a slot, what a snapshot is, what is refused, and what a failed step leaves behind.

The last test drives a pool through random operations against a model that keeps one float64 sequence per slot.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from torch import Tensor

import oracle
from nemotron_mamba2.batch import Batch
from nemotron_mamba2.config import Mamba2Config
from nemotron_mamba2.errors import (
    CapacityError,
    ConfigError,
    NemotronMamba2Error,
    OutOfSlots,
    ShapeError,
    SnapshotMismatch,
    StateError,
)
from nemotron_mamba2.state import Snapshot, StateLayout, StatePool
from oracle import (
    D80,
    ODD,
    S96,
    S256,
    SMALL,
    TINY,
    Rig,
    Sequence64,
    few,
    mixer_error,
    pool_bytes,
    rig,
    same_bits,
    unchanged,
)
from tolerances import BF16, FP16, FP32, tolerance


def exact() -> Rig:
    return rig("SMALL", "bf16", FP32, reproducible=True)


def loaded(
    r: Rig, slots: int = 4, rows: tuple[int, ...] = (20, 33, 5), **settings: object
) -> tuple[StatePool, list[int]]:
    """A pool with a few sequences in it."""
    pool = r.pool(slots=slots, **settings)
    taken = pool.acquire(len(rows))
    for slot, n in zip(taken, rows, strict=True):
        r.prefill(pool, slot, r.hidden(n, slot + 1))
    return pool, taken


# -- slots -------------------------------------------------------------------------------------------------------------


def test_an_acquired_slot_is_zero_in_every_layer_whatever_was_there() -> None:
    pool = StatePool(SMALL, layers=3, slots=2, dtype=FP32)
    for part in range(3):  # the memory of a new pool is NaN here
        assert torch.isnan(pool.layer_state(part).ssm[:2]).all()
    for _ in range(2):
        slots = pool.acquire(2)
        for part in range(3):
            state = pool.layer_state(part)
            for tensor in (state.ssm, state.ring_x, state.ring_B, state.ring_dt, state.ring_conv):
                assert not tensor[slots].any()
                tensor[slots] = float("nan")
        assert [pool.position(s) for s in slots] == [0, 0]
        pool.release(slots)


@few(20)
@given(operations=st.lists(st.one_of(st.integers(1, 4), st.just("release")), max_size=40), data=st.data())
def test_slots_are_never_shared_and_never_lost(operations, data) -> None:
    pool = StatePool(SMALL, layers=1, slots=5)
    live: list[int] = []
    for operation in operations:
        if operation == "release" and live:
            live.remove(slot := data.draw(st.sampled_from(live)))
            pool.release([slot])
        elif operation != "release":
            if operation > 5 - len(live):
                with pytest.raises(OutOfSlots, match=str(operation)):
                    pool.acquire(operation)
            else:
                live += pool.acquire(operation)
        assert len(set(live)) == len(live) and pool.free_slots == 5 - len(live)
        assert pool.pad_slot not in live and all(0 <= slot < 5 for slot in live)


def test_out_of_slots_is_a_capacity_error_and_says_the_numbers() -> None:
    pool = StatePool(SMALL, layers=1, slots=3)
    pool.acquire(2)
    with pytest.raises(CapacityError, match=r"2.*1.*3"):
        pool.acquire(2)
    assert pool.free_slots == 1


def test_release_takes_each_slot_once_and_all_or_nothing() -> None:
    pool = StatePool(SMALL, layers=1, slots=3)
    a, b = pool.acquire(2)
    for wrong in ([a, a], [a, 2], [b, pool.pad_slot], [-1]):
        with pytest.raises(StateError):
            pool.release(wrong)
    assert pool.free_slots == 1 and pool.position(a) == pool.position(b) == 0
    pool.release([b, a])
    assert pool.free_slots == 3
    with pytest.raises(StateError):
        pool.release([a])


def test_a_pool_without_mamba_layers_still_keeps_positions() -> None:
    pool = StatePool(None, layers=0, slots=2)
    (a,) = pool.acquire()
    with pool.step(Batch.prefill([a], [7])):
        pass
    with pool.step(Batch.verify([a], [3])):
        pass
    pool.commit([a], [2])
    assert pool.position(a) == 9 and pool.nbytes == 0


@pytest.mark.parametrize(
    "wrong",
    [{"window_rows": 3}, {"window_rows": 0}, {"state_dtype": torch.float64}, {"slots": 0}, {"draft_rows": 0}],
)
def test_a_pool_that_cannot_be_is_refused(wrong: dict) -> None:
    with pytest.raises(ConfigError):
        StatePool(SMALL, **{"layers": 1, "slots": 2, **wrong})


# -- bytes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config", [TINY, D80, S256, S96, SMALL, ODD], ids=["TINY", "D80", "S256", "S96", "SMALL", "ODD"]
)
@pytest.mark.parametrize("state_dtype", [FP32, BF16, FP16], ids=str)
@pytest.mark.parametrize(("dtype", "window", "draft"), [(BF16, 16, 8), (FP32, 16, 1), (BF16, 1, 1), (BF16, 16, 16)])
def test_bytes_are_known_before_and_are_what_is_allocated(config, state_dtype, dtype, window, draft) -> None:
    settings = {
        "layers": 2,
        "slots": 3,
        "dtype": dtype,
        "state_dtype": state_dtype,
        "window_rows": window,
        "draft_rows": draft,
    }
    pool = StatePool(config, **settings)
    storages = {}
    for layer in range(2):
        state = pool.layer_state(layer)
        for tensor in (state.ssm, state.ring_x, state.ring_B, state.ring_dt, state.ring_conv):
            assert tensor.shape[0] == 4  # three slots and the pad slot
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    assert StatePool.bytes(config, **settings) == pool.nbytes == sum(storages.values())
    state = pool.layer_state(0)
    assert state.ssm.dtype == state_dtype and state.ring_dt.dtype == FP32
    assert state.ring_x.dtype == state.ring_B.dtype == state.ring_conv.dtype == dtype
    assert state.ring_dt.shape[1] >= window - 1 + 2 * draft
    assert state.ring_conv.shape[1] >= config.conv_kernel - 1 + draft
    (slot,) = pool.acquire()
    snapshot = pool.snapshot(slot)
    ssm = prod((2, config.mamba_num_heads, config.mamba_head_dim, config.ssm_state_size)) * state_dtype.itemsize
    conv = 2 * (config.conv_kernel - 1) * config.conv_dim * dtype.itemsize
    assert snapshot.nbytes * 4 == pool.nbytes and snapshot.nbytes >= ssm + conv > 0


def test_rings_of_a_real_width_cost_about_a_fifth_of_the_state() -> None:
    nano = Mamba2Config(hidden_size=2688, mamba_num_heads=64, mamba_head_dim=64, n_groups=8, ssm_state_size=128)
    whole = StatePool.bytes(nano, layers=23, slots=63)
    state = 64 * 23 * 64 * 64 * 128 * 4
    assert 0.1 < whole / state - 1 < 0.3


# -- refusals ----------------------------------------------------------------------------------------------------------


def refused_batches(pool: StatePool, a: int, b: int, waiting: int) -> list[tuple[Batch, type]]:
    free = next(slot for slot in range(pool.slots) if slot not in (a, b, waiting))
    return [
        (Batch.decode([a, free]), StateError),
        (Batch.decode([a, -1]), StateError),
        (Batch.prefill([b, pool.slots + 1], [3, 1]), StateError),
        (Batch.decode([a, b, a]), ShapeError),
        (Batch.join(Batch.prefill([a], [3]), Batch.decode([a])), ShapeError),
        (Batch.verify([b, a], [1, pool.layout.draft_rows + 1]), ShapeError),
        (Batch.decode([a, waiting]), StateError),
        (Batch.prefill([waiting], [2]), StateError),
        (Batch.verify([a, waiting], [2, 2]), StateError),
    ]


def test_check_refuses_before_anything_is_written() -> None:
    r = exact()
    pool, (a, b, waiting) = loaded(r)
    r.layer(r.hidden(4, 3), Batch.verify([waiting], [4]), pool)
    before, positions = pool_bytes(pool), [pool.position(s) for s in (a, b, waiting)]
    for batch, error in refused_batches(pool, a, b, waiting):
        for attempt in (
            lambda batch=batch: pool.check(batch),
            lambda batch=batch: r.layer(r.hidden(batch.total_rows, 1), batch, pool),
        ):
            with pytest.raises(error):
                attempt()
    assert unchanged(pool, before) and [pool.position(s) for s in (a, b, waiting)] == positions
    assert pool.uncommitted_rows(waiting) == 4
    pool.commit([waiting], [1])  # nobody was poisoned by a refusal
    pool.check(Batch.decode([a, b, waiting]))


def test_uncommitted_rows_bar_everything_but_commit_and_release() -> None:
    r = exact()
    pool, (a, b, waiting) = loaded(r)
    r.layer(r.hidden(4, 3), Batch.verify([waiting], [4]), pool)
    before = pool_bytes(pool)
    for attempt in (
        lambda: pool.snapshot(waiting),
        lambda: pool.fork(waiting, a),
        lambda: pool.reorder([a, waiting], [1, 0]),
        lambda: pool.commit([a], [1]),
        lambda: pool.commit([waiting], [5]),
        lambda: pool.commit([waiting], [-1]),
        lambda: pool.commit([waiting, a], [1, 1]),
        lambda: pool.commit([waiting, waiting], [1, 1]),
    ):
        with pytest.raises(StateError):
            attempt()
    for wrong in ([1], [1, 1, 1]):
        with pytest.raises(NemotronMamba2Error):
            pool.commit([waiting, b], wrong)
    assert unchanged(pool, before) and pool.uncommitted_rows(waiting) == 4 and pool.position(waiting) == 5
    pool.release([waiting])
    (again,) = pool.acquire()
    assert again == waiting and pool.uncommitted_rows(again) == 0 and pool.position(again) == 0


def test_commit_reaches_only_the_slots_it_names() -> None:
    r = exact()
    pool, (a, b, c) = loaded(r)
    r.layer(r.hidden(9, 3), Batch.verify([a, b, c], [4, 3, 2]), pool)
    pool.commit([c, a], [0, 4])
    assert [pool.position(s) for s in (a, b, c)] == [24, 33, 5]
    assert [pool.uncommitted_rows(s) for s in (a, b, c)] == [0, 3, 0]


def test_a_verify_step_with_an_empty_sequence_commits_nothing_of_it() -> None:
    """A drafter that has no guess for one sequence gives it no rows; 0 of 0 rows are accepted."""
    r = exact()
    pool, (a, b, _) = loaded(r)
    r.layer(r.hidden(3, 3), Batch.verify([a, b], [3, 0]), pool)
    pool.commit([a, b], [2, 0])
    assert (pool.position(a), pool.position(b)) == (22, 33)


@few(10)
@given(window=st.sampled_from([16, 1]), draft=st.integers(1, 16), state_dtype=st.sampled_from([FP32, BF16, FP16]))
def test_any_draft_rows_a_pool_accepts_are_right(window: int, draft: int, state_dtype: torch.dtype) -> None:
    """Full drafts again and again: the rings of a pool hold exactly as many rows as its longest step needs."""
    r = rig("SMALL", "bf16", FP32, reproducible=True)
    try:
        pool = r.pool(window_rows=window, draft_rows=draft, state_dtype=state_dtype)
    except ConfigError:
        assert draft > window  # the one thing that may be refused
        return
    a, b = pool.acquire(2)
    hidden, done = r.hidden(70, 1), 0
    plain = r.decode(pool, b, hidden)
    while done < 70:
        rows = min(draft, 70 - done)
        found = r.layer(hidden[done : done + rows], Batch.verify([a], [rows]), pool)
        keep = max(rows - done % 3, 1)
        pool.commit([a], [keep])
        assert same_bits(found[:keep], plain[done : done + keep])
        done += keep


# -- a step that fails -------------------------------------------------------------------------------------------------


class Broken(Exception):
    pass


def fail(pool: StatePool, batch: Batch) -> None:
    """A step that dies midway, with garbage written."""
    with pytest.raises(Broken), pool.step(batch) as step:
        for _, rows in step.shares:
            for slot in rows.slots:
                pool.layer_state(0).ssm[slot] = float("nan")
                pool.layer_state(0).ring_x[slot] = float("nan")
        raise Broken


def test_a_failed_step_poisons_its_slots_and_nobody_else() -> None:
    r = exact()
    pool, (a, b, c) = loaded(r)
    other = r.pool(slots=4)
    twin = other.acquire(3)[2]
    other.restore(twin, pool.snapshot(c))
    saved = pool.snapshot(a)
    fail(pool, Batch.decode([a, b, pool.pad_slot]))
    for attempt in (
        lambda: pool.check(Batch.decode([a])),
        lambda: r.layer(r.hidden(2, 1), Batch.decode([c, b]), pool),
        lambda: pool.snapshot(a),
        lambda: pool.fork(a, c),
        lambda: pool.reorder([a, c], [1, 0]),
        lambda: pool.reorder([c, a], [0, 0]),
        lambda: pool.commit([a], [0]),
    ):
        with pytest.raises(StateError):
            attempt()
    after = r.hidden(18, 5)
    assert same_bits(r.decode(pool, c, after), r.decode(other, twin, after))
    # A snapshot heals; so does release and a new owner.
    fresh = r.pool()
    (plain,) = fresh.acquire()
    expected = r.decode(fresh, plain, after)
    pool.release([b])
    (b,) = pool.acquire()
    assert same_bits(r.decode(pool, b, after), expected)
    pool.restore(a, saved)
    other.restore(twin, saved)
    assert same_bits(r.decode(pool, a, after), r.decode(other, twin, after))


@pytest.mark.parametrize("stage", ["project_in", "convolve", "scan", "step", "project_out"])
@pytest.mark.parametrize("cut", [False, True])
def test_a_layer_call_that_fails_poisons_at_once(stage: str, cut: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """At any stage, and in either half of a step that is cut for a snapshot."""
    r = exact()
    pool, (a, b, c) = loaded(r)
    calls = 0

    def broken(*args: object, **kwargs: object) -> None:
        nonlocal calls
        calls += 1
        if not cut or calls == 2:
            raise Broken
        return original(*args, **kwargs)

    original = getattr(type(r.layer), stage).__get__(r.layer)
    batch = Batch.join(Batch.prefill([a], [30], snapshot_at=[40] if cut else None), Batch.decode([b]))
    if cut and stage == "step":
        return  # step rows run in the first half only
    monkeypatch.setattr(r.layer, stage, broken)
    try:
        r.layer(r.hidden(31, 1), batch, pool)
    except Broken:
        for slot in (a, b):  # inside the handler: nothing waits for the garbage collector
            with pytest.raises(StateError):
                pool.check(Batch.decode([slot]))
    else:
        pytest.fail("the stage was not reached")
    pool.check(Batch.decode([c]))
    pool.release([a, b, c])
    assert pool.free_slots == 4


def test_a_step_given_up_by_the_caller_poisons_too() -> None:
    pool, (a, b, _) = loaded(exact())
    with pytest.raises(KeyboardInterrupt), pool.step(Batch.verify([a], [2])):
        raise KeyboardInterrupt
    with pytest.raises(StateError):
        pool.snapshot(a)
    pool.snapshot(b)


def test_slots_come_back_after_every_ending() -> None:
    r = exact()
    pool = r.pool(slots=3)
    for turn in range(60):
        slots = pool.acquire(3)
        r.layer(r.hidden(9, turn), Batch.prefill(slots, [3, 0, 6]), pool)
        r.layer(r.hidden(4, turn), Batch.verify(slots[:2], [1, 3]), pool)  # left uncommitted
        if turn % 3 == 0:
            fail(pool, Batch.decode(slots[2:]))
        with pytest.raises(OutOfSlots):
            pool.acquire()
        pool.release(slots[::-1])
        assert pool.free_slots == 3 and pool.nbytes == StatePool.bytes(r.config, layers=1, slots=3, dtype=FP32)


# -- snapshots ---------------------------------------------------------------------------------------------------------


def test_a_snapshot_stays_what_it_was() -> None:
    r = exact()
    pool, (a, b, c) = loaded(r)
    saved = pool.snapshot(a)
    kept = {name: tensor.clone() for name, tensor in saved.tensors.items()}
    after = r.hidden(40, 2)
    first = r.decode(pool, a, after)
    r.prefill(pool, b, r.hidden(50, 3))
    pool.restore(b, saved)
    assert pool.position(b) == saved.position == 20
    second = r.decode(pool, b, after)
    pool.release([a])
    pool.restore(c, saved)
    assert same_bits(first, second) and same_bits(first, r.decode(pool, c, after))
    assert all(same_bits(saved.tensors[name], kept[name]) for name in kept)
    with pytest.raises(AttributeError):
        saved.position = 3


def test_a_snapshot_travels_to_another_pool_of_the_layout() -> None:
    r = exact()
    pool, (a, *_) = loaded(r)
    other = r.pool(slots=9)
    slot = other.acquire(9)[7]
    other.restore(slot, pool.snapshot(a))
    after = r.hidden(20, 2)
    assert same_bits(r.decode(pool, a, after), r.decode(other, slot, after))


@pytest.mark.parametrize("window", [16, 1])
@pytest.mark.parametrize("rows", range(0, 36, 5))
def test_a_snapshot_is_exact_at_any_position(rows: int, window: int) -> None:
    r = exact()
    pool = r.pool(window_rows=window)
    a, b = pool.acquire(2)
    r.decode(pool, a, r.hidden(rows, 1))
    pool.restore(b, pool.snapshot(a))
    after = r.hidden(20, 2)
    assert same_bits(r.decode(pool, a, after), r.decode(pool, b, after))


OTHER_LAYOUTS = {
    "config": {"config": replace(SMALL, ssm_state_size=32)},
    "config_of_equal_shape": {"config": replace(SMALL, time_step_limit=(0.1, 0.2))},
    "layers": {"layers": 2},
    "dtype": {"dtype": BF16},
    "state_dtype": {"state_dtype": BF16},
    "window_rows": {"window_rows": 8},
    "draft_rows": {"draft_rows": 4},
}


def test_every_field_of_the_layout_is_covered() -> None:
    assert set(StateLayout.__dataclass_fields__) == {name for name in OTHER_LAYOUTS if name != "config_of_equal_shape"}


def refuses(pool: StatePool, slot: int, snapshot: Snapshot, match: str) -> None:
    before, position = pool_bytes(pool), pool.position(slot)
    with pytest.raises(SnapshotMismatch, match=match):
        pool.restore(slot, snapshot)
    assert unchanged(pool, before) and pool.position(slot) == position
    pool.check(Batch.decode([slot]))


@pytest.mark.parametrize("name", OTHER_LAYOUTS)
def test_a_snapshot_of_another_layout_is_refused_by_the_name_of_the_field(name: str) -> None:
    r = exact()
    pool, (a, *_) = loaded(r)
    settings = {"config": SMALL, "layers": 1, "slots": 1, "dtype": FP32, **OTHER_LAYOUTS[name]}
    other = StatePool(settings.pop("config"), **settings)
    refuses(pool, a, other.snapshot(other.acquire()[0]), name.removesuffix("_of_equal_shape"))


@pytest.mark.parametrize("name", ["ssm", "ring_x", "ring_B", "ring_dt", "ring_conv"])
def test_a_snapshot_with_a_missing_or_wrong_part_is_refused(name: str) -> None:
    r = exact()
    pool, (a, *_) = loaded(r)
    whole = pool.snapshot(a)
    part = whole.tensors[name]
    without = {k: v for k, v in whole.tensors.items() if k != name}
    for tensors in (without, {**without, name: part[:, :1]}, {**without, name: part.double()}):
        refuses(pool, a, replace(whole, tensors=tensors), name)


def test_restore_into_a_slot_nobody_has_is_refused() -> None:
    r = exact()
    pool, (a, *_) = loaded(r)
    saved, before = pool.snapshot(a), pool_bytes(pool)
    for slot in (3, -1, pool.pad_slot, 99):
        with pytest.raises(StateError):
            pool.restore(slot, saved)
    assert unchanged(pool, before)


# -- fork and reorder --------------------------------------------------------------------------------------------------


def test_fork_makes_an_equal_that_goes_its_own_way() -> None:
    r = exact()
    pool, (a, b, c) = loaded(r)
    pool.fork(a, b)
    after, away = r.hidden(20, 2), r.hidden(20, 3)
    assert pool.position(b) == 20
    r.decode(pool, b, away)
    pool.fork(a, c)
    assert same_bits(r.decode(pool, a, after), r.decode(pool, c, after))
    for wrong in ((a, 3), (3, a), (a, pool.pad_slot)):
        with pytest.raises(StateError):
            pool.fork(*wrong)


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1], [1, 0, 2], [0, 0, 0], [2, 2, 1]])
def test_reorder_moves_all_at_once(order: list[int]) -> None:
    r = exact()
    pool, slots = loaded(r)
    saved = [pool.snapshot(slot) for slot in slots]
    pool.reorder(slots, order)
    assert [pool.position(s) for s in slots] == [saved[j].position for j in order]
    other, after = r.pool(slots=1), r.hidden(20, 4)
    (alone,) = other.acquire()
    for slot, j in zip(slots, order, strict=True):
        other.restore(alone, saved[j])
        assert same_bits(r.decode(pool, slot, after), r.decode(other, alone, after))


def test_a_bad_reorder_changes_nothing() -> None:
    r = exact()
    pool, slots = loaded(r)
    before = pool_bytes(pool)
    for order in ([0, 1], [0, 1, 3], [0, -1, 2]):
        with pytest.raises(ShapeError):
            pool.reorder(slots, order)
    assert unchanged(pool, before)


# -- stochastic rounding -----------------------------------------------------------------------------------------------


def test_fp16_draws_do_not_know_the_slot_but_know_the_seed() -> None:
    r = exact()
    after = r.hidden(40, 1)
    results = {}
    for seed in (1, 2):
        pool = r.pool(slots=4, state_dtype=FP16, seed=seed)
        first, *_, last = pool.acquire(4)
        results[seed] = [r.decode(pool, slot, after) for slot in (first, last)]
        assert same_bits(*results[seed])
    assert not same_bits(results[1][0], results[2][0])


# -- random operations -------------------------------------------------------------------------------------------------

MACHINE = Mamba2Config(hidden_size=16, mamba_num_heads=4, mamba_head_dim=4, n_groups=2, ssm_state_size=8)
oracle.SHAPES["MACHINE"] = MACHINE


class PoolMachine(RuleBasedStateMachine):
    """A pool of five slots against one `Sequence64` per slot; every output row is compared."""

    saved = Bundle("saved")

    @initialize(window=st.sampled_from([16, 1]), draft=st.sampled_from([8, 3]))
    def start(self, window: int, draft: int) -> None:
        self.rig = rig("MACHINE", "bf16", FP32)
        self.draft = draft
        self.pool = self.rig.pool(slots=5, window_rows=window, draft_rows=draft if window > 1 else 8)
        self.model: dict[int, Sequence64 | None] = {}  # None: poisoned
        self.waiting: dict[int, Tensor] = {}  # uncommitted rows
        self.seed = 0

    def fresh(self, rows: int) -> Tensor:
        self.seed += 1
        return self.rig.hidden(rows, self.seed)

    @property
    def ready(self) -> list[int]:
        return [slot for slot, m in self.model.items() if m is not None and slot not in self.waiting]

    def some_ready(self, data: st.DataObject, most: int = 3) -> list[int]:
        return data.draw(st.lists(st.sampled_from(self.ready), min_size=1, max_size=most, unique=True))

    def compare(self, found: Tensor, slots: list[int], parts: list[Tensor], keep: bool) -> None:
        truth = []
        for slot, part in zip(slots, parts, strict=True):
            sequence = self.model[slot] if keep else self.model[slot].copy()
            truth.append(sequence.feed(part))
        hidden = torch.cat(parts)
        assert mixer_error(found, torch.cat(truth), hidden) <= 2 * tolerance("layer")

    @rule(count=st.integers(1, 3))
    def acquire(self, count: int) -> None:
        if count > 5 - len(self.model):
            with pytest.raises(OutOfSlots):
                self.pool.acquire(count)
            return
        for slot in self.pool.acquire(count):
            assert slot not in self.model
            self.model[slot] = Sequence64(self.rig.truth)

    @precondition(lambda self: self.ready)
    @rule(data=st.data())
    def prefill(self, data: st.DataObject) -> None:
        slots = self.some_ready(data)
        parts = [self.fresh(data.draw(st.integers(0, 70))) for _ in slots]
        found = self.rig.layer(torch.cat(parts), Batch.prefill(slots, [len(p) for p in parts]), self.pool)
        self.compare(found, slots, parts, keep=True)

    @precondition(lambda self: self.ready)
    @rule(data=st.data(), pads=st.integers(0, 2), steps=st.integers(1, 9))
    def decode(self, data: st.DataObject, pads: int, steps: int) -> None:
        slots = self.some_ready(data)
        for _ in range(steps):
            self.advance(slots, pads)

    def advance(self, slots: list[int], pads: int) -> None:
        """One decode step."""
        hidden = self.fresh(len(slots) + pads)
        found = self.rig.layer(hidden, Batch.decode([*slots, *[self.pool.pad_slot] * pads]), self.pool)
        self.compare(found[: len(slots)], slots, list(hidden[: len(slots)].split(1)), keep=True)

    @precondition(lambda self: self.ready)
    @rule(data=st.data())
    def verify(self, data: st.DataObject) -> None:
        slots = self.some_ready(data)
        parts = [self.fresh(data.draw(st.integers(1, self.draft))) for _ in slots]
        found = self.rig.layer(torch.cat(parts), Batch.verify(slots, [len(p) for p in parts]), self.pool)
        self.compare(found, slots, parts, keep=False)
        self.waiting.update(zip(slots, parts, strict=True))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        slots = data.draw(st.lists(st.sampled_from(list(self.waiting)), min_size=1, unique=True))
        counts = [data.draw(st.integers(0, len(self.waiting[slot]))) for slot in slots]
        self.pool.commit(slots, counts)
        for slot, count in zip(slots, counts, strict=True):
            self.model[slot].feed(self.waiting.pop(slot)[:count])

    @precondition(lambda self: self.ready)
    @rule(target=saved, data=st.data())
    def snapshot(self, data: st.DataObject) -> tuple[Snapshot, Sequence64, object]:
        slot = data.draw(st.sampled_from(self.ready))
        return self.pool.snapshot(slot), self.model[slot].copy(), self.pool.layout

    @precondition(lambda self: self.model)
    @rule(one=saved, data=st.data())
    def restore(self, one: tuple[Snapshot, Sequence64, object], data: st.DataObject) -> None:
        """Into any acquired slot: one that waits for its commit, or is poisoned, too."""
        slot = data.draw(st.sampled_from(list(self.model)))
        self.pool.restore(slot, one[0])
        self.model[slot] = one[1].copy()
        self.waiting.pop(slot, None)
        self.advance([slot], 0)

    @rule(one=consumes(saved))
    def forget(self, one: object) -> None:
        pass

    @precondition(lambda self: self.ready)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        src, dst = data.draw(st.sampled_from(self.ready)), data.draw(st.sampled_from(list(self.model)))
        self.pool.fork(src, dst)
        self.model[dst] = self.model[src].copy()
        self.waiting.pop(dst, None)
        self.advance([dst], 0)

    @precondition(lambda self: self.ready)
    @rule(data=st.data())
    def reorder(self, data: st.DataObject) -> None:
        slots = self.some_ready(data, most=5)
        order = data.draw(st.lists(st.integers(0, len(slots) - 1), min_size=len(slots), max_size=len(slots)))
        self.pool.reorder(slots, order)
        moved = [self.model[slots[j]].copy() for j in order]
        self.model.update(zip(slots, moved, strict=True))

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(list(self.model)))
        self.pool.release([slot])
        del self.model[slot]
        self.waiting.pop(slot, None)

    @precondition(lambda self: self.ready)
    @rule(data=st.data(), rows=st.integers(1, 3))
    def failing_step(self, data: st.DataObject, rows: int) -> None:
        slots = self.some_ready(data, most=2)
        fail(self.pool, Batch.verify(slots, [rows] * len(slots)))
        for slot in slots:
            self.model[slot] = None

    @precondition(lambda self: len(self.model) > len(self.ready))
    @rule(data=st.data())
    def barred(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from([s for s in self.model if s not in self.ready]))
        for attempt in (
            lambda: self.rig.layer(self.fresh(1), Batch.decode([slot]), self.pool),
            lambda: self.pool.snapshot(slot),
            lambda: self.pool.fork(slot, slot),
        ):
            with pytest.raises(StateError):
                attempt()

    @invariant()
    def slots_and_positions_agree(self) -> None:
        if not hasattr(self, "pool"):
            return
        assert self.pool.free_slots == 5 - len(self.model)
        for slot, sequence in self.model.items():
            if sequence is not None:
                assert self.pool.position(slot) == sequence.position
                assert self.pool.uncommitted_rows(slot) == len(self.waiting.get(slot, ()))


def test_random_operations_against_the_model() -> None:
    run_state_machine_as_test(PoolMachine, settings=few(50))
