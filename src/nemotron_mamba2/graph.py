"""CUDA graphs: a step of layers or of a whole model, captured once per bucket and replayed for any batch.

    graph = StepGraph(layers, pool, sequences=16)
    hidden = graph(hidden, Batch.decode(slots))

    graph = ModelGraph(network, caches, sequences=16)
    with caches.step(Batch.decode(slots)) as opened:
        tokens = graph(tokens, opened).tokens

A replay gives the bits of the eager step, and between its kernels no host code runs: hidden rows or tokens, slots,
positions, boundaries, row counts and page tables lie in buffers of fixed place that the kernels read. A batch is padded
to its bucket with sequences of the pool's pad slot, which touch no state; capture and warm-up run on the pad slot
alone. Replays allocate nothing, so what they return is a view that the next replay overwrites.

The trade-off: rows up to the bucket's size are computed and thrown away, at most a third of them past 16 sequences. All
CUDA-graph calls of the package are in this file. On a CPU nothing is captured: the same padded step runs eagerly.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from .batch import Batch, Rows, Step
from .errors import ConfigError, ShapeError
from .layer import NemotronMamba2Layer
from .model import Caches, CacheStep, NemotronH, host_steps
from .plan import Capabilities, combine
from .state import StatePool

T = TypeVar("T")
WARM_UPS = 2  # the first compiles, the second finds every workspace made
LEAST_TOKENS = 1024  # the smallest bucket of context


class StepGraph:
    """Decode and verify steps through one or more Mamba-2 layers, as CUDA graphs.

    layers: in the order in which they run. pool: holds their state. sequences: most sequences of a batch. rows: most
    rows of a sequence (1 is decode). Everything is captured here, one graph for each of `buckets(sequences)`; they
    share their memory. Raises: ConfigError.
    """

    def __init__(
        self,
        layers: NemotronMamba2Layer | Sequence[NemotronMamba2Layer],
        pool: StatePool,
        *,
        sequences: int,
        rows: int = 1,
    ) -> None:
        self.layers = (layers,) if isinstance(layers, NemotronMamba2Layer) else tuple(layers)
        self.pool = pool
        self.sequences = sequences
        self.rows = rows
        self._check_setup()
        self._hooks = [layer.host_step for layer in self.layers if layer.host_step is not None]
        config, dtype = self.layers[0].config, self.layers[0].plan.dtype
        inputs = torch.zeros(sequences * rows, config.hidden_size, dtype=dtype, device=pool.device)
        memory = torch.cuda.graph_pool_handle() if captures(pool.device) else None
        self._captured = {
            count: CapturedStep(
                self._run, pool, sequences=count, rows=rows, inputs=inputs[: count * rows], memory=memory
            )
            for count in reversed(buckets(sequences))  # the largest first: the others fit into its memory
        }

    def __call__(self, hidden: Tensor, batch: Batch | Step, *, out: Tensor | None = None) -> Tensor:
        """Replay one step: every row of the batch through every layer.

        hidden: [T, hidden] in the plan's dtype. batch: a Batch, when these are all layers of the pool (the step is then
        begun and ended here), or a Step, inside `pool.step`. out: where to copy the result, or None. Returns:
        [T, hidden]; a view that the next call overwrites, unless out is given. Raises: ShapeError, StateError, before
        anything is written.
        """
        self._check(hidden, batch.batch if isinstance(batch, Step) else batch)
        if isinstance(batch, Step):
            return self._replay(hidden, batch, out)
        if self.pool.layout.layers != len(self.layers):
            raise ShapeError(
                f"graph: it runs {len(self.layers)} of the pool's {self.pool.layout.layers} layers, and a step serves "
                "them all; use `with pool.step(batch) as step` and pass the step"
            )
        with self.pool.step(batch) as step:
            return self._replay(hidden, step, out)

    def _replay(self, hidden: Tensor, step: Step, out: Tensor | None) -> Tensor:
        if step.step is None or not step.step.total_rows:
            return hidden.clone() if out is None else out.copy_(hidden)
        count = next(size for size in sorted(self._captured) if size >= len(step.batch.slots))
        with host_steps(self._hooks, step):
            result = self._captured[count](hidden, step.step)[: len(hidden)]
        return result if out is None else out.copy_(result)

    def _run(self, hidden: Tensor, step: Step) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden, step, self.pool)
        return hidden

    def _check_setup(self) -> None:
        if not self.layers or self.sequences < 1 or self.rows < 1:
            raise ConfigError(
                f"graph: expected at least one layer, sequence and row, found {len(self.layers)}, {self.sequences}, "
                f"{self.rows}"
            )
        if self.rows > self.pool.layout.draft_rows:
            raise ConfigError(f"graph: rows={self.rows}, but the pool holds draft_rows={self.pool.layout.draft_rows}")
        if len({layer.index for layer in self.layers}) != len(self.layers):
            raise ConfigError(f"graph: two layers share their state: indices {[layer.index for layer in self.layers]}")
        can = combine([layer.capabilities for layer in self.layers])
        why = uncapturable(can, sequences=self.sequences, rows=self.rows)
        if why:
            raise ConfigError(f"graph: the layers do not allow it: {why}; call the layers instead")

    def _check(self, hidden: Tensor, batch: Batch) -> None:
        if "prompt" in batch.roles:
            raise ShapeError("graph: only step rows are captured, the batch has prompt rows; call the layers for them")
        if len(batch.slots) > self.sequences or max(batch.rows, default=0) > self.rows:
            raise ShapeError(
                f"graph: made for {self.sequences} sequences of up to {self.rows} rows, found {len(batch.slots)} of up "
                f"to {max(batch.rows, default=0)}; make it with sequences= and rows=, or call the layers"
            )
        config, dtype = self.layers[0].config, self.layers[0].plan.dtype
        if hidden.shape != (batch.total_rows, config.hidden_size) or hidden.dtype != dtype:
            raise ShapeError(
                f"graph: the batch needs {dtype} hidden [{batch.total_rows}, {config.hidden_size}], "
                f"found {hidden.dtype} {list(hidden.shape)}"
            )


@dataclass(frozen=True, eq=False)
class Decoded:
    """What a decode step gave for each of its sequences: views that the next step overwrites.

    logits: fp32 [S, vocab]. tokens: int64 [S], the likeliest, the lowest id among equals. finite: bool [S], False where
    the logits hold NaN or +inf, or nothing but −inf.
    """

    logits: Tensor
    tokens: Tensor
    finite: Tensor

    def first(self, count: int) -> Decoded:
        """Those of the first sequences."""
        return Decoded(self.logits[:count], self.tokens[:count], self.finite[:count])


class ModelGraph:
    """Decode steps of a whole model as CUDA graphs: token ids in; logits, the likeliest tokens and their check out.

    caches: hold the state of its sequences. sequences: most of a step. A graph serves a bucket of sequences (`buckets`)
    and a bucket of context, LEAST_TOKENS or twice, four times, … as much; it is captured when its first step comes.
    Tokens may lie on the device, so that no step waits for the host to see those of the step before. Raises:
    ConfigError when the layers do not allow it (`uncapturable`).
    """

    def __init__(self, network: NemotronH, caches: Caches, *, sequences: int) -> None:
        why = uncapturable(network.capabilities, sequences=sequences)
        if sequences < 1 or why:
            raise ConfigError(f"graph: {sequences} sequences; {why or 'expected at least one'}; call forward instead")
        self.network = network
        self.caches = caches
        self.sequences = sequences
        self._sizes = buckets(sequences)
        self._hooks = [layer.host_step for layer in network.layers if layer.host_step is not None]
        self._tokens = torch.zeros(sequences, dtype=torch.int64, device=network.device)
        self._memory = torch.cuda.graph_pool_handle() if captures(network.device) else None
        self._captured: dict[tuple[int, int], CapturedStep[Decoded]] = {}

    def __call__(self, tokens: Tensor, opened: CacheStep) -> Decoded:
        """Replay one step of `caches.step(Batch.decode(…))`.

        tokens: int64 [S], of each sequence in the batch's order. Raises: ShapeError before anything is written.
        """
        rows = self._rows(tokens, opened)
        with host_steps(self._hooks, opened.step):
            return self.captured(rows)(tokens, rows).first(rows.total_rows)

    def captured(self, rows: Rows) -> CapturedStep[Decoded]:
        """The graph that serves these rows; captured now if there is none yet."""
        count = next(size for size in self._sizes if size >= len(rows.slots))
        longest, tokens = max(rows.positions) + 1, LEAST_TOKENS
        while tokens < longest:
            tokens *= 2
        if (count, tokens) not in self._captured:
            self._captured[count, tokens] = self._capture(count, tokens)
        return self._captured[count, tokens]

    def _capture(self, count: int, tokens: int) -> CapturedStep[Decoded]:
        pages, state = self.caches.pages, self.caches.state
        table = pages.fixed_table(sequences=count, rows=count, tokens=tokens) if captures(state.device) else None

        def run(tokens: Tensor, step: Step) -> Decoded:
            opened = CacheStep(step, state, pages, fixed=table)
            hidden = self.network.run_layers(self.network.embed(tokens), opened)
            logits = self.network.logits(self.network.final_norm(hidden))
            best = torch.max(logits, -1)
            return Decoded(logits, best.indices, torch.isfinite(best.values))

        return CapturedStep(
            run,
            state,
            sequences=count,
            rows=1,
            inputs=self._tokens[:count],
            memory=self._memory,
            refresh=None if table is None else lambda rows: pages.fill(table, rows),
        )

    def _rows(self, tokens: Tensor, opened: CacheStep) -> Rows:
        rows = opened.step.step
        if rows is None or opened.step.prompt is not None or set(rows.rows) != {1} or len(rows.rows) > self.sequences:
            raise ShapeError(
                f"graph: made for decode steps of up to {self.sequences} sequences, found rows "
                f"{list(opened.step.batch.rows)} as {sorted(set(opened.step.batch.roles))}; call forward for them"
            )
        if tokens.shape != (len(rows.rows),):
            raise ShapeError(f"graph: the batch needs tokens [{len(rows.rows)}], found {list(tokens.shape)}")
        if opened.state is not self.caches.state:
            raise ShapeError("graph: the step is of other caches than the graph; make a graph for each")
        return rows


def uncapturable(can: Capabilities, *, sequences: int, rows: int = 1) -> str:
    """Why steps of these layers cannot be captured, by the field that says so; "" when they can."""
    most = sequences if can.max_sequences is None else can.max_sequences
    wanted = {
        "graph": can.graph,
        "graph_survives": can.graph_survives,
        "verify": can.verify or rows == 1,
        "max_sequences": most >= sequences,
    }
    missing = [name for name, served in wanted.items() if not served]
    return f"{missing[0]}: {dict(can.why).get(missing[0], 'the layer says so')}" if missing else ""


class CapturedStep(Generic[T]):
    """One bucket: a function of a step, captured with inputs and cursors of fixed place.

    run: (inputs, step) → results by row; it may read nothing of the step on the host but its row and sequence counts.
    pool: whose pad slot fills what a batch leaves free. inputs: [sequences · rows, …], the buffer that run reads.
    memory: of `torch.cuda.graph_pool_handle`, to share with other captures. refresh: brings what else run reads up to
    the padded rows, page tables above all.
    """

    def __init__(
        self,
        run: Callable[[Tensor, Step], T],
        pool: StatePool,
        *,
        sequences: int,
        rows: int,
        inputs: Tensor,
        memory: Any = None,
        refresh: Callable[[Rows], None] | None = None,
    ) -> None:
        # Batches of fewer rows than the bucket need a sequence that owns the others, however many sequences are live.
        self._sequences = sequences + (rows > 1)
        self._run, self._pool, self._inputs, self._refresh = run, pool, inputs, refresh
        self._replay: Callable[[], None] | None = None
        if not captures(pool.device):
            return
        idle = self._pad(Rows((), (), (), (), 0, pool.device))
        self._packed = torch.tensor(idle.packed, dtype=torch.int64, device=pool.device)
        step = _step(Rows(idle.slots, idle.rows, idle.positions, idle.boundaries, 0, pool.device, self._packed))
        self._replay, self._result = capture(lambda: run(inputs, step), memory=memory)

    def __call__(self, inputs: Tensor, rows: Rows) -> T:
        """Run the step of these rows. inputs: [T, …]. Returns: results of the whole bucket, the rows' own first; the
        next call overwrites them."""
        return self.ready(inputs, rows)()

    def ready(self, inputs: Tensor, rows: Rows) -> Callable[[], T]:
        """Put everything of these rows in its place. Returns: what runs the step."""
        count = rows.total_rows
        padded = self._pad(rows)
        self._inputs[:count].copy_(inputs)
        if count < len(self._inputs):
            self._inputs[count:].zero_()
        if self._refresh is not None:
            self._refresh(padded)
        if self._replay is None:
            return lambda: self._run(self._inputs, _step(padded))
        # From pageable memory: the driver has read it when the call returns, so the next step may come at once.
        self._packed.copy_(torch.tensor(padded.packed, dtype=torch.int64), non_blocking=True)
        return self._replayed

    def _replayed(self) -> T:
        assert self._replay is not None
        self._replay()
        return self._result

    def _pad(self, rows: Rows) -> Rows:
        return pad(rows, sequences=self._sequences, total_rows=len(self._inputs), pad_slot=self._pool.pad_slot)


def captures(device: torch.device) -> bool:
    """Whether steps on this device are captured; elsewhere they run eagerly."""
    return device.type == "cuda"


def buckets(sequences: int) -> tuple[int, ...]:
    """The sizes that steps of up to `sequences` sequences are padded to: 1, 2, 4, 8, 16, 24, 32, 48, …, sequences."""
    sizes, size = [], 1
    while size < sequences:
        sizes += [size, size * 3 // 2] if size >= 16 else [size]
        size *= 2
    return (*(size for size in sizes if size < sequences), sequences)


def pad(rows: Rows, *, sequences: int, total_rows: int, pad_slot: int) -> Rows:
    """rows, and behind them sequences of the pad slot at position 0: so many sequences and rows in all.

    Sequences without rows are left out. Raises: ShapeError when the rest does not fit, or no sequence is free to own
    the missing rows.
    """
    some = [i for i, count in enumerate(rows.rows) if count]
    slots, counts, positions, boundaries = (
        tuple(values[i] for i in some) for values in (rows.slots, rows.rows, rows.positions, rows.boundaries)
    )
    missing, left = sequences - len(slots), total_rows - rows.total_rows
    if missing < 0 or left < 0 or (left and not missing):
        raise ShapeError(
            f"graph: {len(slots)} sequences of {rows.total_rows} rows cannot be padded to {sequences} of {total_rows}"
        )
    return Rows(
        slots=slots + (pad_slot,) * missing,
        rows=(*counts, *(left // missing + (i < left % missing) for i in range(missing))),
        positions=positions + (0,) * missing,
        boundaries=boundaries + (0,) * missing,
        first_row=0,
        device=rows.device,
    )


def capture(work: Callable[[], T], *, memory: Any = None) -> tuple[Callable[[], None], T]:
    """work as a CUDA graph: what replays it, and its result, whose memory every replay fills anew.

    work runs WARM_UPS times before, so that compilation stays outside. memory: of `torch.cuda.graph_pool_handle`, to
    share with other captures.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UPS):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with _no_collection(), torch.cuda.graph(graph, pool=memory, capture_error_mode="thread_local"):
        result = work()
    return graph.replay, result


@contextmanager
def _no_collection() -> Iterator[None]:
    """An older graph that is collected within a capture frees its memory there, which ends the capture."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _step(rows: Rows) -> Step:
    """A step of these rows alone; who commits them was settled before."""
    return Step(Batch.verify(rows.slots, rows.rows), None, rows)
