"""The laws of the layer: any way to cut the same rows gives the truth, and the same bits where that is promised.

"Same bits" tests run under `Policy(reproducible=True)`; tolerance tests without it. Every law runs over all formats.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Iterator

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

import oracle
from nemotron_mamba2.batch import Batch
from nemotron_mamba2.errors import ShapeError, StateError
from nemotron_mamba2.layer import NemotronMamba2Layer
from nemotron_mamba2.ops.reference import scan_rows
from nemotron_mamba2.plan import make_plan
from nemotron_mamba2.state import StatePool
from oracle import FORMATS, Rig, Sequence64, error, few, mixer_error, rig, rows_of, same_bits
from tolerances import BF16, FP16, FP32, W8A8, W8A8_AGAINST_STEP, tolerance

NAN = float("nan")
DTYPES = (FP32, BF16)
WINDOWS = (16, 1)
STATE_DTYPES = (FP32, BF16, FP16)
formats = pytest.mark.parametrize("format", FORMATS)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
windows = st.sampled_from(WINDOWS)
state_dtypes = st.sampled_from(STATE_DTYPES)
seeds = st.integers(0, 10_000)


def exact_rig(format: str, dtype: torch.dtype, shape: str = "SMALL", **settings: object) -> Rig:
    """A layer under reproducible; ODD where the format takes its widths."""
    return rig(shape, format, dtype, reproducible=True, **settings)


@st.composite
def cuts(draw: st.DrawFn, most: int = 40) -> list[tuple[str, int, int]]:
    """A sequence as steps: (kind, rows, accepted)."""
    steps: list[tuple[str, int, int]] = []
    for kind in draw(st.lists(st.sampled_from(["prefill", "decode", "verify"]), min_size=2, max_size=9)):
        if kind == "prefill":
            rows = draw(st.integers(0, most))
            steps.append((kind, rows, rows))
        elif kind == "decode":
            rows = draw(st.integers(1, 18))
            steps += [(kind, 1, 1)] * rows
        else:
            rows = draw(st.integers(1, 8))
            steps.append((kind, rows, draw(st.integers(0, rows))))
    return steps


def run_cut(
    r: Rig, pool: StatePool, slot: int, hidden: Tensor, steps: list[tuple[str, int, int]], wrong: Tensor
) -> Tensor:
    """Run hidden through steps, with rejected rows of verify steps from `wrong` → the accepted rows' results."""
    found, done = [hidden[:0]], 0
    for kind, rows, accepted in steps:
        right = hidden[done : done + accepted]
        if kind == "prefill":
            out = r.layer(right, Batch.prefill([slot], [rows]), pool)
        elif kind == "decode":
            out = r.layer(right, Batch.decode([slot]), pool)
        else:
            draft = torch.cat([right, wrong[: rows - accepted]])
            out = r.layer(draft, Batch.verify([slot], [rows]), pool)
            pool.commit([slot], [accepted])
        found.append(out[:accepted])
        done += accepted
    assert pool.position(slot) == done
    return torch.cat(found)


# -- within tolerance --------------------------------------------------------------------------------------------------


@dtypes
@formats
@few(6)
@given(steps=cuts(), window=windows, state_dtype=state_dtypes, seed=seeds)
@example(steps=[("prefill", 300, 300), *[("decode", 1, 1)] * 20], window=16, state_dtype=FP32, seed=1)
def test_any_cut_of_a_sequence_gives_the_truth(format, dtype, steps, window, state_dtype, seed) -> None:
    """Prefill pieces (empty ones too), decode and verify with rejected drafts, in any order."""
    r = rig("SMALL", format, dtype)
    pool = r.pool(state_dtype=state_dtype, window_rows=window)
    (slot,) = pool.acquire()
    hidden = r.hidden(sum(accepted for *_, accepted in steps), seed)
    found = run_cut(r, pool, slot, hidden, steps, r.hidden(8, seed + 1) * 5)
    truth, sequence, done = [], Sequence64(r.truth), 0
    for kind, _, accepted in steps:
        truth.append(sequence.feed(hidden[done : done + accepted], "prompt" if kind == "prefill" else "step"))
        done += accepted
    role = "prompt" if any(kind == "prefill" for kind, *_ in steps) else "step"
    allowed = tolerance("layer", dtype, format=format, role=role, state_dtype=state_dtype)
    assert mixer_error(found, torch.cat(truth), hidden) <= allowed


@pytest.mark.parametrize("more", [1, 2, 3, 70])
def test_prompt_rows_after_rows_that_are_not_folded_yet(more: int) -> None:
    """Decode and verify leave up to a window and a draft behind the position, across the border of a chunk too."""
    r = rig("SMALL", "bf16", FP32)
    hidden = r.hidden(60 + 8 + 8 + more + 2, 5)
    truth = Sequence64(r.truth).feed(hidden)
    for past in (0, 7, 8, 40, 55, 56, 57, 59, 60):
        for accepted in ((8,), (5,), (8, 8), (8, 4)):
            steps = [("prefill", past, past), *(("verify", 8, n) for n in accepted), ("prefill", more, more)]
            steps += [("decode", 1, 1)] * 2
            pool = r.pool()
            (slot,) = pool.acquire()
            rows = hidden[: sum(n for *_, n in steps)]
            found = run_cut(r, pool, slot, rows, steps, hidden[:8] * 5)
            assert mixer_error(found, truth[: len(rows)], rows) <= tolerance("layer"), (past, accepted)


@pytest.mark.parametrize("shape", ["TINY", "D80", "S256", "S96", "ODD"])
@dtypes
def test_every_shape_gives_the_truth(shape: str, dtype: torch.dtype) -> None:
    """130 rows of a prompt, 20 decode steps and four verify steps, with both windows."""
    r = rig(shape, "bf16", dtype)
    hidden, wrong = r.hidden(166, 3), r.hidden(8, 4)
    truth = Sequence64(r.truth).feed(hidden)
    steps = [("prefill", 130, 130), *[("decode", 1, 1)] * 20, ("verify", 8, 8), ("verify", 8, 3), ("verify", 5, 0)]
    for window in WINDOWS:
        pool = r.pool(window_rows=window)
        (slot,) = pool.acquire()
        found = run_cut(r, pool, slot, hidden[:166], [*steps, ("verify", 5, 5)], wrong)
        assert mixer_error(found, truth, hidden) <= tolerance("layer", dtype)


@formats
def test_every_format_gives_the_truth_at_the_tiny_shape(format: str) -> None:
    """The shape whose widths fill several scale blocks: 1,544 × 160 and 160 × 512."""
    for dtype in DTYPES:
        r = rig("TINY", format, dtype)
        hidden = r.hidden(90, 7)
        pool = r.pool()
        a, b = pool.acquire(2)
        found, truth = r.prefill(pool, a, hidden), Sequence64(r.truth).feed(hidden)
        assert mixer_error(found, truth, hidden) <= tolerance("layer", dtype, format=format, role="prompt")
        found, truth = r.decode(pool, b, hidden[:36]), Sequence64(r.truth).feed(hidden[:36], "step")
        assert mixer_error(found, truth, hidden[:36]) <= tolerance("layer", dtype, format=format)


@dtypes
@formats
@few(3)
@given(rows=st.integers(1, 120), more=st.integers(1, 20), window=windows, seed=seeds)
def test_prefill_equals_decode(format, dtype, rows, more, window, seed) -> None:
    """The same weights through both families; W8A8 prompt rows are compared under prompt="exact" and as they are."""
    hidden = rows_of(oracle.SMALL, rows + more, seed, dtype)
    for prompt in ("exact", "checkpoint"):
        r = rig("SMALL", format, dtype, prompt=prompt)
        pool = r.pool(window_rows=window)
        a, b, c = pool.acquire(3)
        decoded = r.decode(pool, b, hidden)
        split = torch.cat([r.prefill(pool, c, hidden[:rows]), r.decode(pool, c, hidden[rows:])])
        allowed = 2 * tolerance("layer", dtype)
        if prompt == "checkpoint" and format in W8A8:
            allowed = W8A8_AGAINST_STEP
        for found in (r.prefill(pool, a, hidden), split):
            assert mixer_error(found, decoded.double(), hidden) <= allowed


@dtypes
@formats
@few(3)
@given(
    counts=st.lists(st.one_of(st.integers(0, 9), st.integers(0, 300)), min_size=1, max_size=4),
    earlier=st.lists(st.integers(0, 40), min_size=4, max_size=4),
    window=windows,
    seed=seeds,
)
def test_a_batch_of_prompts_equals_single_prompts(format, dtype, counts, earlier, window, seed) -> None:
    """Ragged lengths 0..300, over slots that already stand somewhere, in an order of their own."""
    r = rig("SMALL", format, dtype)
    pool = r.pool(slots=9, window_rows=window)
    slots = random.Random(seed).sample(pool.acquire(9), len(counts))
    truths = [Sequence64(r.truth) for _ in counts]
    for i, (slot, n) in enumerate(zip(slots, earlier, strict=False)):
        past = r.hidden(n, seed + i)
        r.prefill(pool, slot, past)
        truths[i].feed(past)
    hidden = r.hidden(sum(counts), seed + 9)
    found = r.layer(hidden, Batch.prefill(slots, counts), pool)
    truth = torch.cat([t.feed(part) for t, part in zip(truths, hidden.split(counts), strict=True)])
    assert mixer_error(found, truth, hidden) <= tolerance("layer", dtype, format=format, role="prompt")
    after = r.hidden(len(slots), seed + 10)
    found = r.layer(after, Batch.decode(slots), pool)
    truth = torch.cat([t.feed(row[None], "step") for t, row in zip(truths, after, strict=True)])
    assert mixer_error(found, truth, after) <= tolerance("layer", dtype, format=format, role="prompt")


@pytest.mark.parametrize("state_dtype", STATE_DTYPES, ids=str)
@pytest.mark.parametrize("window", WINDOWS)
def test_the_state_in_memory_is_the_one_at_its_boundary(window: int, state_dtype: torch.dtype) -> None:
    """A multiple of window_rows at most one window and one draft behind the position, rounded to the state's dtype."""
    r = rig("TINY", "bf16", FP32)
    pool = r.pool(window_rows=window, state_dtype=state_dtype)
    (slot,) = pool.acquire()
    hidden = r.hidden(80, 5)
    truth = Sequence64(r.truth, window_rows=window)
    truth.feed(hidden)
    done = 0
    for rows, how in ((21, r.prefill), (1, r.decode), (14, r.decode), (10, r.prefill), (34, r.decode)):
        how(pool, slot, hidden[done : done + rows])
        done += rows
        snapshot = pool.snapshot(slot)
        assert snapshot.position == done and snapshot.boundary % window == 0
        assert 0 <= done - snapshot.boundary <= window
        assert snapshot.tensors["ssm"].dtype == state_dtype
        found = snapshot.tensors["ssm"][0]
        allowed = tolerance("state", FP32, state_dtype=state_dtype)
        assert error(found, truth.kept[snapshot.boundary]) <= allowed, (done, how)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("limit", [None, (0.0, float("inf")), (0.05, 0.4)])
def test_optional_parts_of_the_config(limit: tuple[float, float] | None, bias: bool) -> None:
    r = rig("SMALL", "bf16", FP32, time_step_limit=limit, bias=bias)
    pool, hidden = r.pool(), r.hidden(50, 2)
    a, b = pool.acquire(2)
    truth = Sequence64(r.truth).feed(hidden)
    assert mixer_error(r.prefill(pool, a, hidden), truth, hidden) <= tolerance("layer")
    assert mixer_error(r.decode(pool, b, hidden), truth, hidden) <= tolerance("layer")
    if limit == (0.05, 0.4):
        free = Sequence64(rig("SMALL", "bf16", FP32, bias=bias).truth).feed(hidden)
        assert mixer_error(free, truth, hidden) > 0.01  # the limit bites


def test_the_input_is_not_changed_and_may_be_strided() -> None:
    r = rig("SMALL", "bf16", FP32)
    pool = r.pool()
    a, b = pool.acquire(2)
    wide = r.hidden(30, 3).repeat(1, 2)
    view, copy = wide[:, 7 : 7 + 48], wide[:, 7 : 7 + 48].contiguous()
    kept = wide.clone()
    batch = [Batch.join(Batch.prefill([s], [26]), Batch.verify([pool.pad_slot], [4])) for s in (a, b)]
    assert error(r.layer(view, batch[0], pool), r.layer(copy, batch[1], pool).double()) <= 1e-6
    assert torch.equal(wide, kept)


# -- the same bits -----------------------------------------------------------------------------------------------------

exact_shapes = pytest.mark.parametrize("shape", ["SMALL", "ODD"])


@st.composite
def drafts(draw: st.DrawFn) -> list[tuple[int, int]]:
    """(rows, accepted) of verify steps that accept at least 20 rows in all, so that windows are crossed."""
    steps, total = [], 0
    while total < 20:
        rows = draw(st.integers(1, 8))
        accepted = draw(st.integers(0 if len(steps) < 12 else rows, rows))
        steps.append((rows, accepted))
        total += accepted
    return steps


def shape_for(format: str, seed: int) -> str:
    return "ODD" if format in ("bf16", "fp8_channel") and seed % 2 else "SMALL"


@dtypes
@formats
@few(4)
@given(prompt=st.integers(0, 40), steps=drafts(), window=windows, state_dtype=state_dtypes, seed=seeds)
@example(prompt=15, steps=[(8, 8), (8, 0), (8, 3), (8, 8), (1, 1)], window=16, state_dtype=BF16, seed=1)
def test_decode_equals_verify_then_commit_in_bits(format, dtype, prompt, steps, window, state_dtype, seed) -> None:
    r = exact_rig(format, dtype, shape_for(format, seed))
    pool = r.pool(window_rows=window, state_dtype=state_dtype)
    a, b = pool.acquire(2)
    past, rest = r.hidden(prompt, seed), r.hidden(sum(n for _, n in steps) + 18, seed + 1)
    for slot in (a, b):
        r.prefill(pool, slot, past)
    plain = r.decode(pool, a, rest)
    cut = [("verify", rows, accepted) for rows, accepted in steps] + [("decode", 1, 1)] * 18
    # run_cut counts from the prompt on
    found = run_cut_after(r, pool, b, rest, cut, r.hidden(8, seed + 2) * 40)
    assert same_bits(found, plain)


def run_cut_after(r: Rig, pool: StatePool, slot: int, hidden: Tensor, steps, wrong: Tensor) -> Tensor:
    found, done = [], 0
    for kind, rows, accepted in steps:
        right = hidden[done : done + accepted]
        if kind == "decode":
            found.append(r.layer(right, Batch.decode([slot]), pool))
        else:
            found.append(
                r.layer(torch.cat([right, wrong[: rows - accepted]]), Batch.verify([slot], [rows]), pool)[:accepted]
            )
            pool.commit([slot], [accepted])
        done += accepted
    return torch.cat(found)


@dtypes
@formats
@few(4)
@given(
    pasts=st.lists(st.integers(0, 40), min_size=1, max_size=6),
    pads=st.integers(0, 4),
    window=windows,
    state_dtype=state_dtypes,
    seed=seeds,
)
def test_a_step_row_has_the_same_bits_in_any_batch(format, dtype, pasts, pads, window, state_dtype, seed) -> None:
    """Alone, and among other sequences in any slots and order, with pads between, decode and verify rows mixed."""
    r = exact_rig(format, dtype, shape_for(format, seed))
    order = random.Random(seed)
    settings = {"window_rows": window, "state_dtype": state_dtype, "seed": seed}
    crowd, alone = r.pool(slots=8, **settings), r.pool(slots=1, **settings)
    slots = order.sample(crowd.acquire(8), len(pasts))
    for i, (slot, n) in enumerate(zip(slots, pasts, strict=True)):
        r.prefill(crowd, slot, r.hidden(n, seed + i))
    expected: list[list[Tensor]] = []
    counts = [[order.randint(1, 8) for _ in pasts] for _ in range(4)]
    for i, n in enumerate(pasts):
        (slot,) = alone.acquire()
        r.prefill(alone, slot, r.hidden(n, seed + i))
        expected.append([])
        for t, rows in enumerate(counts):
            part = r.hidden(rows[i], seed + 100 * t + i + 50)
            out = r.layer(part, Batch.verify([slot], [rows[i]]), alone)
            alone.commit([slot], [rows[i]])
            expected[-1].append(out)
        alone.release([slot])
    for t, rows in enumerate(counts):
        members = list(range(len(pasts))) + [None] * pads
        order.shuffle(members)
        parts = [r.hidden(2, 7) if i is None else r.hidden(rows[i], seed + 100 * t + i + 50) for i in members]
        batch = Batch.verify(
            [crowd.pad_slot if i is None else slots[i] for i in members], [len(part) for part in parts]
        )
        out = r.layer(torch.cat(parts), batch, crowd).split(list(batch.rows))
        crowd.commit(slots, [rows[i] for i in range(len(pasts))])
        for i, mine in zip(members, out, strict=True):
            assert i is None or same_bits(mine, expected[i][t])


@dtypes
@formats
@few(3)
@given(
    counts=st.lists(st.integers(0, 140), min_size=2, max_size=4), window=windows, state_dtype=state_dtypes, seed=seeds
)
def test_a_prompt_has_the_same_bits_in_any_batch(format, dtype, counts, window, state_dtype, seed) -> None:
    """Under reproducible a row's bits depend on its own sequence only, prompt rows included."""
    r = exact_rig(format, dtype, shape_for(format, seed))
    settings = {"window_rows": window, "state_dtype": state_dtype}
    together, alone = r.pool(slots=6, **settings), r.pool(slots=6, **settings)
    slots, others = together.acquire(6)[: len(counts)][::-1], alone.acquire(6)
    hidden = r.hidden(sum(counts), seed)
    found = r.layer(hidden, Batch.prefill(slots, counts), together).split(counts)
    for mine, slot, other, part in zip(found, slots, others, hidden.split(counts), strict=False):
        assert same_bits(mine, r.prefill(alone, other, part))
        after = r.hidden(18, seed + 1)
        assert same_bits(r.decode(together, slot, after), r.decode(alone, other, after))


@dtypes
@formats
@few(3)
@given(
    total=st.integers(1, 290),
    marks=st.sets(st.sampled_from([64, 128, 192, 256]), min_size=1),
    window=windows,
    state_dtype=state_dtypes,
    seed=seeds,
)
@example(total=290, marks={128}, window=16, state_dtype=FP16, seed=1)
@example(total=130, marks={64, 128}, window=1, state_dtype=BF16, seed=2)
def test_a_prompt_split_at_chunks_has_the_same_bits(format, dtype, total, marks, window, state_dtype, seed) -> None:
    r = exact_rig(format, dtype, shape_for(format, seed))
    pool = r.pool(window_rows=window, state_dtype=state_dtype)
    a, b = pool.acquire(2)
    hidden = r.hidden(total, seed)
    whole = r.prefill(pool, a, hidden)
    places = [0, *sorted(m for m in marks if m < total), total]
    parts = [r.prefill(pool, b, hidden[i:j]) for i, j in itertools.pairwise(places)]
    assert same_bits(torch.cat(parts), whole)
    after = r.hidden(20, seed + 1)
    assert same_bits(r.decode(pool, b, after), r.decode(pool, a, after))


@dtypes
@formats
@few(3)
@given(prompt=st.integers(0, 60), steps=st.integers(0, 20), window=windows, state_dtype=state_dtypes, seed=seeds)
def test_restored_and_preempted_sequences_have_the_same_bits(
    format, dtype, prompt, steps, window, state_dtype, seed
) -> None:
    """Into another slot that others used meanwhile; prefill, decode and verify go on as if nothing had been."""
    r = exact_rig(format, dtype, shape_for(format, seed))
    pool = r.pool(slots=3, window_rows=window, state_dtype=state_dtype)
    a, b, c = pool.acquire(3)
    start = r.hidden(prompt + steps, seed)
    for slot in (a, b):
        r.prefill(pool, slot, start[:prompt])
        r.decode(pool, slot, start[prompt:])
    saved = pool.snapshot(b)
    pool.release([b])
    (b,) = pool.acquire()
    r.prefill(pool, b, r.hidden(37, seed + 1) * 9)
    r.prefill(pool, c, r.hidden(21, seed + 2) * 9)
    pool.restore(c, saved)
    rest = r.hidden(18 + 8 + 90 + 18, seed + 3)
    results = []
    for slot in (a, c):
        first = r.decode(pool, slot, rest[:18])
        drafted = r.layer(rest[18:26], Batch.verify([slot], [8]), pool)
        pool.commit([slot], [5])
        prompted = r.prefill(pool, slot, rest[26:116])
        results.append(torch.cat([first, drafted, prompted, r.decode(pool, slot, rest[116:])]))
    assert same_bits(results[0], results[1])


@dtypes
def test_pads_and_parked_sequences_change_nothing(dtype: torch.dtype) -> None:
    r = exact_rig("bf16", dtype)
    pool = r.pool(slots=5)
    live, parked, *_ = pool.acquire(5)
    for slot in (live, parked):
        r.prefill(pool, slot, r.hidden(19, slot))
    kept = pool.snapshot(parked)
    saved, row = pool.snapshot(live), r.hidden(8, 77)
    plain = r.layer(row[3:4], Batch.decode([live]), pool)
    pool.restore(live, saved)
    pads = [pool.pad_slot] * 3
    padded = r.layer(row, Batch.decode([*pads, live, *pads, pool.pad_slot]), pool)
    assert same_bits(padded[3:4], plain)
    assert bool(torch.isfinite(padded).all())
    now = pool.snapshot(parked)
    assert all(same_bits(now.tensors[name], kept.tensors[name]) for name in kept.tensors)
    before = oracle.pool_bytes(pool)
    r.layer(row, Batch.decode([pool.pad_slot] * 8), pool)
    assert oracle.unchanged(pool, before)


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def test_bits_hold_when_threads_share_the_rows() -> None:
    """Three threads cut the elements of a large batch at places that are no multiple of a vector."""
    r = rig("TINY", "bf16", FP32, reproducible=True)
    pool = r.pool(slots=2)
    a, b = pool.acquire(2)
    hidden = r.hidden(130, 1)
    with threads(3):
        whole = r.prefill(pool, a, hidden)
        parts = torch.cat([r.prefill(pool, b, hidden[:64]), r.prefill(pool, b, hidden[64:])])
    assert same_bits(whole, parts)


# -- batches of several kinds ------------------------------------------------------------------------------------------


@dtypes
@formats
def test_a_mixed_batch_equals_separate_steps(format: str, dtype: torch.dtype) -> None:
    r = exact_rig(format, dtype)
    together, apart = r.pool(slots=5), r.pool(slots=5)
    pasts = [17, 0, 31, 5, 40]
    for pool in (together, apart):
        for slot, n in zip(pool.acquire(5), pasts, strict=True):
            r.prefill(pool, slot, r.hidden(n, slot + 1))
    a, b, c, d, e = 4, 2, 0, 1, 3
    batches = [Batch.prefill([a, b], [21, 70]), Batch.decode([c]), Batch.verify([d, e], [3, 1])]
    mixed = Batch.join(*batches)
    hidden = r.hidden(mixed.total_rows, 9)
    found = r.layer(hidden, mixed, together)
    parts = hidden.split([batch.total_rows for batch in batches])
    plain = torch.cat([r.layer(part, batch, apart) for part, batch in zip(parts, batches, strict=True)])
    assert same_bits(found, plain)
    for pool in (together, apart):
        pool.commit([d, e], [2, 1])
    after = r.hidden(18, 10)
    for slot in (a, b, c, d, e):
        assert same_bits(r.decode(together, slot, after), r.decode(apart, slot, after))


def test_two_phase_prefill_by_stages_equals_the_plain_call() -> None:
    """`project_in` over slices of one long buffer, `convolve` and `scan` once, `project_out` over slices."""
    for format in FORMATS:
        r = exact_rig(format, FP32)
        config, layer = r.config, r.layer
        pool = r.pool(slots=6)
        staged, plain = pool.acquire(3), pool.acquire(3)
        for slots in (staged, plain):
            r.layer(r.hidden(25, 1), Batch.prefill(slots, [3, 22, 0]), pool)
        counts = [70, 0, 33]
        hidden = r.hidden(103, 2)
        expected = layer(hidden, Batch.prefill(plain, counts), pool)
        with pool.step(Batch.prefill(staged, counts)) as step:
            rows = step.prompt
            projected = torch.full((103, config.in_proj_rows), NAN)
            for part in (slice(0, 64), slice(64, 103)):
                views = layer.project_in(hidden[part], "prompt", out=projected[part])
                assert views[1].data_ptr() == projected[part.start :, config.d_inner :].data_ptr()
            z, xbc, dt = projected.split([config.d_inner, config.conv_dim, config.mamba_num_heads], -1)
            wide = scan_rows(rows)
            assert wide == 103 + 3 + 6  # live rows: 3 of 3 and 6 of 22
            out = (torch.full((wide, config.conv_dim), NAN), torch.full((wide, config.mamba_num_heads), NAN))
            layer.convolve(xbc, dt, rows, pool, out=out)
            y = layer.scan(*out, rows, pool, out=torch.full((103, config.d_inner), NAN))
            found = torch.full_like(hidden, NAN)
            for part in (slice(0, 10), slice(10, 103)):
                layer.project_out(y[part], z[part], hidden[part], "prompt", out=found[part])
        assert same_bits(found, expected), format
        after = r.hidden(18, 3)
        for mine, other in zip(staged, plain, strict=True):
            assert same_bits(r.decode(pool, mine, after), r.decode(pool, other, after))


@few(6)
@given(counts=st.lists(st.integers(0, 80), min_size=1, max_size=3), past=st.integers(0, 20), data=st.data(), seed=seeds)
def test_snapshot_at_cuts_where_a_snapshot_is_wanted(counts, past, data, seed) -> None:
    """The snapshot is that of a prompt of this length, and the outputs are those of the uncut prompt."""
    r = rig("SMALL", "bf16", FP32)
    pool = r.pool(slots=7)
    slots = pool.acquire(len(counts))
    earlier = r.hidden(past, seed)
    for slot in slots:
        r.prefill(pool, slot, earlier)
    wanted = [data.draw(st.one_of(st.none(), st.integers(past, past + n))) for n in counts]
    hidden = r.hidden(sum(counts), seed + 1)
    found = r.layer(hidden, Batch.prefill(slots, counts, snapshot_at=wanted), pool)
    truths = [Sequence64(r.truth) for _ in counts]
    for truth in truths:
        truth.feed(earlier)
    expected = torch.cat([t.copy().feed(part) for t, part in zip(truths, hidden.split(counts), strict=True)])
    assert mixer_error(found, expected, hidden) <= tolerance("layer")
    (other,) = pool.acquire()
    after = r.hidden(18, seed + 2)
    for slot, at, truth, part in zip(slots, wanted, truths, hidden.split(counts), strict=True):
        if at is None:
            with pytest.raises(StateError):
                pool.take_snapshot(slot)
            continue
        snapshot = pool.take_snapshot(slot)
        assert snapshot.position == at
        pool.restore(other, snapshot)
        truth.feed(part[: at - past])
        assert mixer_error(r.decode(pool, other, after), truth.feed(after), after) <= tolerance("layer")
        with pytest.raises(StateError):
            pool.take_snapshot(slot)  # handed out once


def test_snapshot_at_in_a_batch_with_decode_and_verify_rows() -> None:
    """The cut must not trip over rows that wait for their commit."""
    r = rig("SMALL", "bf16", FP32)
    pool = r.pool()
    a, b, c = pool.acquire(3)
    pasts = {s: r.hidden(20, s) for s in (b, c)}
    for slot, past in pasts.items():
        r.prefill(pool, slot, past)
    batch = Batch.join(Batch.prefill([a], [40], snapshot_at=[32]), Batch.decode([b]), Batch.verify([c], [4]))
    hidden = r.hidden(45, 9)
    found = r.layer(hidden, batch, pool)
    truth = [Sequence64(r.truth).feed(hidden[:40])]
    for slot, part in ((b, hidden[40:41]), (c, hidden[41:])):
        sequence = Sequence64(r.truth)
        sequence.feed(pasts[slot])
        truth.append(sequence.feed(part))
    assert mixer_error(found, torch.cat(truth), hidden) <= tolerance("layer")
    assert pool.take_snapshot(a).position == 32
    assert (pool.position(a), pool.position(b), pool.uncommitted_rows(c)) == (40, 21, 4)
    pool.commit([c], [2])
    assert pool.position(c) == 22


def test_snapshot_at_outside_the_rows_is_refused_before_anything_is_written() -> None:
    r = rig("SMALL", "bf16", FP32)
    pool = r.pool()
    (a,) = pool.acquire()
    r.prefill(pool, a, r.hidden(20, 1))
    before = oracle.pool_bytes(pool)
    for at in (19, 31):
        with pytest.raises(ShapeError, match=str(at)):
            r.layer(r.hidden(10, 2), Batch.prefill([a], [10], snapshot_at=[at]), pool)
    assert oracle.unchanged(pool, before) and pool.position(a) == 20


# -- several layers, one step ------------------------------------------------------------------------------------------


def test_layers_of_one_pool_share_a_step_and_keep_their_states_apart() -> None:
    rigs = [rig("SMALL", "bf16", FP32, seed=s) for s in (0, 1, 2)]
    config = rigs[0].config
    layers = [NemotronMamba2Layer(config, r.weights, r.layer.plan, index=i) for i, r in enumerate(rigs)]
    pool = StatePool(config, layers=3, slots=3, dtype=FP32)
    a, b = pool.acquire(2)
    truths = {slot: [Sequence64(r.truth) for r in rigs] for slot in (a, b)}

    def run(hidden: Tensor, batch: Batch) -> Tensor:
        with pool.step(batch) as step:
            for layer in layers:
                hidden = layer(hidden, step, pool)
        return hidden

    def truth(slot: int, hidden: Tensor) -> Tensor:
        hidden = hidden.double()
        for sequence in truths[slot]:
            hidden = sequence.feed(hidden)
        return hidden

    for batch in (Batch.prefill([b, a], [23, 40]), *[Batch.decode([a, b])] * 20, Batch.verify([b], [6])):
        hidden = rows_of(config, batch.total_rows, batch.total_rows)
        found = run(hidden, batch)
        parts = zip(batch.slots, hidden.split(list(batch.rows)), strict=True)
        expected = torch.cat([truth(slot, part) for slot, part in parts])
        assert error(found, expected) <= 3 * tolerance("layer")
    with pytest.raises(StateError):
        run(rows_of(config, 1, 0), Batch.decode([b]))  # not committed
    pool.commit([b], [6])


def test_a_pool_of_several_layers_wants_a_step() -> None:
    r = rig("SMALL", "bf16", FP32)
    pool = StatePool(r.config, layers=2, slots=1, dtype=FP32)
    (a,) = pool.acquire()
    before = oracle.pool_bytes(pool)
    with pytest.raises(ShapeError, match="step"):
        r.layer(r.hidden(1, 0), Batch.decode([a]), pool)
    assert oracle.unchanged(pool, before) and pool.position(a) == 0


# -- what does not fit is refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["norm", "conv1d_weight", "conv1d_bias", "dt_bias", "A_log", "D", "gated_norm"])
def test_a_vector_of_the_wrong_shape_is_refused_by_name(name: str) -> None:
    r = rig("SMALL", "bf16", FP32)
    value = getattr(r.weights, name)
    wrong = type(r.weights)(**{**vars(r.weights), name: torch.cat([value, value])})
    with pytest.raises(ShapeError, match=name):
        NemotronMamba2Layer(r.config, wrong, r.layer.plan)


@pytest.mark.parametrize("name", ["in_proj", "out_proj"])
def test_a_projection_of_the_wrong_shape_is_refused_by_name(name: str) -> None:
    r = rig("SMALL", "bf16", FP32)
    rows, columns = getattr(r.weights, name).shape
    wrong = type(r.weights)(**{**vars(r.weights), name: oracle.quantized(torch.ones(rows + 1, columns), "bf16", 0)})
    with pytest.raises(ShapeError, match=name):
        NemotronMamba2Layer(r.config, wrong, make_plan(r.config, wrong, oracle.Policy(), device="cpu", dtype=FP32))


def test_hidden_states_that_do_not_fit_the_batch_are_refused_before_anything_is_written() -> None:
    r = rig("SMALL", "bf16", FP32)
    pool = r.pool()
    a, b = pool.acquire(2)
    r.prefill(pool, a, r.hidden(20, 1))
    before = oracle.pool_bytes(pool)
    wrong = [r.hidden(4, 1), r.hidden(6, 1), r.hidden(5, 1)[:, :47], r.hidden(5, 1)[None], r.hidden(1, 1)]
    for hidden in wrong:
        for batch in (Batch.prefill([a, b], [3, 2]), Batch.join(Batch.prefill([b], [1]), Batch.verify([a], [4]))):
            with pytest.raises(ShapeError):
                r.layer(hidden, batch, pool)
    assert oracle.unchanged(pool, before) and (pool.position(a), pool.position(b)) == (20, 0)


@pytest.mark.parametrize("rows", [1, 3, 6])
def test_hidden_states_that_do_not_fit_a_step_are_refused(rows: int) -> None:
    """One row must never be spread over the four rows of a step."""
    r = rig("SMALL", "bf16", FP32)
    for batch in (Batch.prefill, Batch.verify):
        pool = r.pool()
        (a,) = pool.acquire()
        with pytest.raises(ShapeError), pool.step(batch([a], [4])) as step:
            r.layer(r.hidden(rows, 1), step, pool)


@pytest.mark.parametrize(("layer_dtype", "given"), [(FP32, BF16), (BF16, FP32), (BF16, FP16), (FP32, torch.float64)])
def test_hidden_states_of_another_dtype_are_refused(layer_dtype: torch.dtype, given: torch.dtype) -> None:
    """x and B are rounded to the activation dtype before any use; with two dtypes prefill and decode differ."""
    r = rig("SMALL", "bf16", layer_dtype)
    pool = r.pool()
    (a,) = pool.acquire()
    before = oracle.pool_bytes(pool)
    with pytest.raises(ShapeError, match="float"):
        r.layer(r.hidden(3, 1).to(given), Batch.prefill([a], [3]), pool)
    assert oracle.unchanged(pool, before) and pool.position(a) == 0


def test_a_pool_of_another_dtype_or_shape_is_refused() -> None:
    r = rig("SMALL", "bf16", FP32)
    for pool in (r.pool().__class__(r.config, layers=1, slots=1, dtype=BF16), rig("ODD", "bf16", FP32).pool()):
        (a,) = pool.acquire()
        before = oracle.pool_bytes(pool)
        with pytest.raises(ShapeError):
            r.layer(r.hidden(3, 1), Batch.prefill([a], [3]), pool)
        assert oracle.unchanged(pool, before)


def test_batches_say_what_they_are() -> None:
    batch = Batch.join(Batch.prefill([3, 1], [5, 0], snapshot_at=[None, 0]), Batch.decode([2]), Batch.verify([0], [4]))
    assert batch.slots == (3, 1, 2, 0) and batch.rows == (5, 0, 1, 4) and batch.total_rows == 10
    assert batch.roles == ("prompt", "prompt", "step", "step") and batch.verifies == (False, False, False, True)
    assert batch.snapshot_at == (None, 0, None, None)
    for wrong in (
        lambda: Batch.prefill([1, 2], [3]),
        lambda: Batch.verify([1], [-1]),
        lambda: Batch.prefill([1, 2], [3, 4], snapshot_at=[1]),
        lambda: Batch.join(Batch.decode([0]), Batch.prefill([1], [2])),
    ):
        with pytest.raises(ShapeError):
            wrong()


@pytest.mark.parametrize("format", FORMATS)
def test_the_reference_of_a_layer_is_plain_torch_over_the_same_weights(format: str) -> None:
    found = rig("TINY", format, prompt="exact")
    plain, pools = found.layer.reference(), [found.pool() for _ in range(2)]
    assert plain.weights is found.layer.weights and plain._in_proj.copy is None
    hidden = found.hidden(90, seed=5)
    outs = []
    for layer, pool in zip((found.layer, plain), pools, strict=True):
        slots = pool.acquire(2)
        first = layer(hidden[:80], Batch.prefill(slots, [30, 50]), pool)
        outs.append(
            torch.cat([first, *(layer(hidden[i : i + 2], Batch.decode(slots), pool) for i in range(80, 90, 2))])
        )
    assert mixer_error(outs[1], outs[0], hidden) < tolerance("layer", format=format)
