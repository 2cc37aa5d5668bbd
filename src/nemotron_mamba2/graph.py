"""CUDA graphs: a step of one or more layers, captured once per bucket of sequences and replayed for any batch.

    graph = StepGraph(layers, pool, sequences=16)
    hidden = graph(hidden, Batch.decode(slots))

A replay gives the bits of the eager step, and between its kernels no host code runs: hidden rows, slots, positions,
boundaries and row counts lie in buffers of fixed place that the kernels read. A batch is padded to its bucket with
sequences of the pool's pad slot, which touch no state; capture and warm-up run on the pad slot alone. Replays allocate
nothing, so what they return is a view that the next replay overwrites.

The trade-off: rows up to the bucket's size are computed and thrown away, at most a third of them past 16 sequences. All
CUDA-graph calls of the package are in this file. On a CPU nothing is captured: the same padded step runs eagerly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from .batch import Batch, Rows, Step
from .errors import ConfigError, ShapeError
from .layer import NemotronMamba2Layer
from .model import host_steps
from .plan import combine
from .state import StatePool

T = TypeVar("T")
Run: TypeAlias = Callable[[Tensor, Step], Tensor]
WARM_UPS = 2  # the first compiles, the second finds every workspace made


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
            result = self._captured[count](hidden, step.step)
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
        most = self.sequences if can.max_sequences is None else can.max_sequences
        wanted = {
            "graph": can.graph,
            "graph_survives": can.graph_survives,
            "verify": can.verify or self.rows == 1,
            "max_sequences": most >= self.sequences,
        }
        for name, served in wanted.items():
            if not served:
                reason = dict(can.why).get(name, "the layer says so")
                raise ConfigError(f"graph: the layers do not allow it: {name}: {reason}; call the layers instead")

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


class CapturedStep:
    """One bucket: a function of a step, captured with inputs and cursors of fixed place.

    run: (inputs, step) → result, both by row; it may read nothing of the step on the host but its row and sequence
    counts. pool: whose pad slot fills what a batch leaves free. inputs: [sequences · rows, …], the buffer that run
    reads. memory: of `torch.cuda.graph_pool_handle`, to share with other captures. `StepGraph` runs layers this way;
    a whole model would pass token ids as inputs, and copy its page tables before it calls.
    """

    def __init__(
        self, run: Run, pool: StatePool, *, sequences: int, rows: int, inputs: Tensor, memory: Any = None
    ) -> None:
        # Batches of fewer rows than the bucket need a sequence that owns the others, however many sequences are live.
        self._sequences = sequences + (rows > 1)
        self._run, self._pool, self._inputs = run, pool, inputs
        self._replay: Callable[[], None] | None = None
        if not captures(pool.device):
            return
        idle = self._pad(Rows((), (), (), (), 0, pool.device))
        self._packed = torch.tensor(idle.packed, dtype=torch.int64, device=pool.device)
        step = _step(Rows(idle.slots, idle.rows, idle.positions, idle.boundaries, 0, pool.device, self._packed))
        self._replay, self._result = capture(lambda: run(inputs, step), memory=memory)

    def __call__(self, inputs: Tensor, rows: Rows) -> Tensor:
        """Run the step of these rows. inputs: [T, …]. Returns: [T, …], a view that the next call overwrites."""
        count = rows.total_rows
        padded = self._pad(rows)
        self._inputs[:count].copy_(inputs)
        self._inputs[count:].zero_()
        if self._replay is None:
            return self._run(self._inputs, _step(padded))[:count]
        # From pageable memory: the driver has read it when the call returns, so the next step may come at once.
        self._packed.copy_(torch.tensor(padded.packed, dtype=torch.int64), non_blocking=True)
        self._replay()
        return self._result[:count]

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
    with torch.cuda.graph(graph, pool=memory):
        result = work()
    return graph.replay, result


def _step(rows: Rows) -> Step:
    """A step of these rows alone; who commits them was settled before."""
    return Step(Batch.verify(rows.slots, rows.rows), None, rows)
