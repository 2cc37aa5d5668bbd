"""Whole models of the published sizes in steps of decode, and the time to a first token: checked, beside their floors.

A step is timed as `generate` runs it, one CUDA graph from token ids to the likeliest tokens, at every place of a
window, each in turn with its sequences one row further on; a figure counts only if, in the same run, the graph gave the
logits of the eager step bit for bit, and finite ones. Graphs of the layers of one kind alone give each kind's share.

Floor: what must be read once (weights, the experts that even routing hits, keys and values, states, and a window's
share of writing them back) over the read ceiling of the same run.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import mean, median

import torch
from torch import Tensor

from ..batch import Batch
from ..config import LETTERS, MoeConfig, Policy
from ..formats import E4M3
from ..generate import Model
from ..graph import ModelGraph
from ..layer import NemotronMamba2Layer
from ..model import AttentionLayer, Caches, CacheSnapshot, CacheStep, KvSnapshot, NemotronH, PagePool, cache_bytes
from ..plan import plan_model
from ..sampling import SamplingParams
from ..state import Snapshot
from ..weights import LayerWeights, ModelWeights, MoeWeights
from .random_model import model_config, random_weights
from .records import Record, Run, model_record
from .timing import captured, microseconds

WINDOW = 16  # rows from fold to fold of the state
ROUNDS = 3  # of a window
STEPS_AHEAD = 64  # steps in a row for the rate with the host in it
SPARE_TOKENS = 2 * WINDOW * ROUNDS + STEPS_AHEAD + 64  # rows that a sequence gets beyond its context
ENDS = "ends"  # embedding, last norm, lm_head, the likeliest token
SPARE_BYTES = 4 << 30  # workspace and logits, when it is asked whether a model fits


@dataclass(frozen=True)
class ModelCase:
    """What is measured: so many sequences that each hold `context` tokens; prompts of `prefill` tokens beside."""

    shape: str
    format: str
    batch: int
    context: int
    prefill: tuple[int, ...] = ()

    @property
    def words(self) -> str:
        return f"{self.shape:10}{self.format:7}{self.batch:4} × {self.context:6}"


@dataclass(frozen=True)
class RefusedModel:
    """A case without figures, and why."""

    case: ModelCase
    why: str


@dataclass(frozen=True, eq=False)
class Made:
    """A model on the device. by_kind: bytes of the weights that one step of any size reads; expert: of one expert of
    all layers together; resident_bytes: what the model holds."""

    network: NemotronH
    policy: Policy
    by_kind: dict[str, int]
    expert_bytes: int
    resident_bytes: int


@torch.inference_mode()
def measure(cases: Sequence[ModelCase], run: Run, *, say: Callable[[str], None]) -> Iterator[Record | RefusedModel]:
    """A record for each case; one model at a time is in memory. say: takes remarks, by line."""
    for pair in dict.fromkeys((case.shape, case.format) for case in cases):
        mine = [case for case in cases if (case.shape, case.format) == pair]
        why = _too_large(mine[0])
        if why:
            yield from (RefusedModel(case, why) for case in mine)
            continue
        made = make(*pair)
        say(f"{pair[0]} {pair[1]}: {made.resident_bytes / 1e9:.2f} GB on the device")
        for case in mine:
            yield _measure(made, case, run)
            torch.cuda.empty_cache()
        del made
        gc.collect()
        torch.cuda.empty_cache()


def policy_of(format: str) -> Policy:
    """The quantised files keep keys and values in FP8."""
    return Policy(kv="bf16" if format == "bf16" else "checkpoint")


def make(shape: str, format: str, *, device: str = "cuda") -> Made:
    """One of the models, random, on the device."""
    config, policy = model_config(shape), policy_of(format)
    before = _allocated(device)
    weights = random_weights(shape, format, config=config, device=device)
    by_kind, expert_bytes = weight_bytes(weights)
    network = NemotronH(config, weights, plan_model(config, weights, policy, device=device))
    return Made(network, policy, by_kind, expert_bytes, _allocated(device) - before)


def weight_bytes(weights: ModelWeights) -> tuple[dict[str, int], int]:
    """(bytes that every step reads, by kind of layer; bytes of one routed expert of all layers together)."""
    found = {ENDS: weights.lm_head.nbytes + weights.norm_f.nbytes}
    expert = 0
    for layer in weights.layers:
        routed = layer.experts_up.nbytes + layer.experts_down.nbytes if isinstance(layer, MoeWeights) else 0
        expert += routed // layer.experts_up.shape[0] if isinstance(layer, MoeWeights) else 0
        kind = _kind_of(layer)
        found[kind] = found.get(kind, 0) + layer.nbytes - routed
    return found, expert


def step_bytes(made: Made, case: ModelCase) -> dict[str, float]:
    """Bytes that a step must move, by kind of layer, averaged over a window."""
    config, found = made.network.config, dict[str, float](made.by_kind)
    found[ENDS] += case.batch * config.hidden_size * config.dtype.itemsize
    mixture = next((layer for layer in config.layers if isinstance(layer, MoeConfig)), None)
    if mixture is not None:
        experts, chosen = mixture.n_routed_experts, mixture.num_experts_per_tok
        found["E"] += made.expert_bytes * experts * (1 - (1 - chosen / experts) ** case.batch)
    letters = config.pattern
    if "M" in letters:
        c, dtype = config.mamba2, made.policy.state_dtype or config.state_dtype
        state = c.d_inner * c.ssm_state_size * dtype.itemsize
        found["M"] += letters.count("M") * case.batch * state * (1 + 1 / WINDOW)
    if "*" in letters:
        attention = [layer for layer in made.network.layers if isinstance(layer, AttentionLayer)]
        dtype = E4M3 if made.policy.kv == "checkpoint" else config.dtype
        per_token = PagePool.bytes_per_token([layer.config for layer in attention], dtype=dtype)
        found["*"] += case.batch * case.context * per_token
    return found


def _measure(made: Made, case: ModelCase, run: Run) -> Record | RefusedModel:
    network, device = made.network, made.network.device
    torch.cuda.reset_peak_memory_stats()
    base = _allocated("cuda")
    caches = make_caches(made, case)
    pools = _allocated("cuda") - base
    slots = caches.acquire(case.batch)
    saved = random_snapshot(caches, case.context)
    graph = ModelGraph(network, caches, sequences=case.batch)
    tokens = torch.randint(network.config.vocab_size, (case.batch,), device=device)
    why = check(graph, slots, saved, tokens=tokens, context=case.context)
    if why:
        return RefusedModel(case, why)
    spread(caches, slots, saved, context=case.context)
    step_us = time_steps(graph, slots, tokens)
    with_host = time_in_a_row(graph, slots, tokens)
    graph_bytes = _allocated("cuda") - base - pools
    peak = torch.cuda.max_memory_allocated()
    kinds = {
        kind: time_kind(made, caches, kind, slots=slots, saved=saved, context=case.context) for kind in made.by_kind
    }
    nbytes = step_bytes(made, case)
    del graph, saved
    prompts = {str(count): time_prompt(made, count) for count in case.prefill}
    return model_record(
        run,
        shape=case.shape,
        format=case.format,
        batch=case.batch,
        context=case.context,
        step_us=step_us,
        step_with_host_us=with_host,
        kinds_us=kinds,
        kinds_bytes=nbytes,
        layers={kind: network.config.pattern.count(kind) for kind in made.by_kind if kind != ENDS},
        first_token_ms={tokens: ms for tokens, (ms, _) in prompts.items()},
        memory={
            "weights": made.resident_bytes,
            "pools": caches.nbytes,
            "graphs": graph_bytes,
            "peak": peak,
            "beyond": peak - base - caches.nbytes,
        }
        | ({"beyond_prompts": max(beyond for _, beyond in prompts.values())} if prompts else {}),
    )


# -- what the sequences hold -----------------------------------------------------------------------------------------


def make_caches(made: Made, case: ModelCase) -> Caches:
    """Pools for the case's sequences and what the measurement adds to them."""
    tokens = case.context + SPARE_TOKENS
    return Caches.for_model(
        made.network.config,
        slots=case.batch,
        pages=case.batch * -(-tokens // 16),
        policy=made.policy,
        device=made.network.device,
    )


def random_snapshot(caches: Caches, context: int) -> CacheSnapshot:
    """A sequence of `context` tokens that never was: random state, keys and values."""
    layout, device = caches.state.layout, caches.state.device
    draw = torch.Generator(device).manual_seed(0)

    def normal(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        wide = torch.empty(tuple(shape), dtype=torch.float32, device=device)
        return wide.normal_(0, 0.5, generator=draw).to(dtype)

    tensors = {name: normal((layout.layers, *shape), dtype) for name, (shape, dtype) in layout.tensors().items()}
    if "ring_dt" in tensors:  # positive, as softplus leaves it
        tensors["ring_dt"].abs_().mul_(0.1)
    keys, values = (
        tuple(normal((context, *t.shape[2:]), t.dtype) for t in pool)
        for pool in (caches.pages.keys, caches.pages.values)
    )
    return CacheSnapshot(Snapshot(layout, context, _boundary(context), tensors), KvSnapshot(context, keys, values))


def spread(caches: Caches, slots: Sequence[int], saved: CacheSnapshot, *, context: int, turn: int = 0) -> None:
    """Set every slot to the snapshot, cut so that the slots stand at different places of a window."""
    for i, slot in enumerate(slots):
        at = context - (i + turn) % WINDOW
        state = Snapshot(saved.state.layout, at, _boundary(at), saved.state.tensors)
        kv = KvSnapshot(at, *(tuple(t[:at] for t in parts) for parts in (saved.kv.keys, saved.kv.values)))
        caches.restore(slot, CacheSnapshot(state, kv))


def _boundary(position: int) -> int:
    return max(position - 1, 0) // WINDOW * WINDOW


# -- the check -------------------------------------------------------------------------------------------------------


def check(graph: ModelGraph, slots: list[int], saved: CacheSnapshot, *, tokens: Tensor, context: int) -> str:
    """Why no figure may be given: the graph's logits are not those of the eager step, or not finite; "" if none.

    Three steps from the same sequences, each on the tokens of the step before.
    """
    caches, network = graph.caches, graph.network
    found: list[list[Tensor]] = []
    for eager in (True, False):
        spread(caches, slots, saved, context=context)
        steps, ids = [], tokens
        for _ in range(3):
            if eager:
                logits = network.forward(ids, Batch.decode(slots), caches)
            else:
                with caches.step(Batch.decode(slots)) as opened:
                    logits = graph(ids, opened).logits.clone()
            steps.append(logits)
            ids = logits.argmax(-1)
        found.append(steps)
    if not all(torch.isfinite(logits).all() for logits in found[0]):
        return "logits of the eager step are not finite"
    for turn, (eager_logits, graph_logits) in enumerate(zip(*found, strict=True)):
        if not torch.equal(eager_logits.view(torch.int32), graph_logits.view(torch.int32)):
            off = (graph_logits - eager_logits).norm() / eager_logits.norm()
            return f"step {turn} of the graph is off the eager one by {off.item():.3g}"
    return ""


# -- the time --------------------------------------------------------------------------------------------------------


def time_steps(graph: ModelGraph, slots: list[int], tokens: Tensor) -> float:
    """Microseconds of one replay: at each place of a window the median of ROUNDS, and the mean of those."""
    times: list[list[float]] = [[] for _ in range(WINDOW)]
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for turn in range(ROUNDS * WINDOW):
        with graph.caches.step(Batch.decode(slots)) as opened:
            rows = opened.step.step
            assert rows is not None
            go = graph.captured(rows).ready(tokens, rows)
            torch.cuda._sleep(400_000)  # the launch is queued before the clock starts
            start.record()
            go()
            stop.record()
        stop.synchronize()
        times[turn % WINDOW].append(start.elapsed_time(stop) * 1e3)
    return mean(median(place) for place in times)


def time_in_a_row(graph: ModelGraph, slots: list[int], tokens: Tensor) -> float:
    """Microseconds per step of STEPS_AHEAD steps that feed each other on the device, host work included: the better of
    two rows, since the first may come to a bucket of context that has no graph yet."""
    rows = []
    for _ in range(2):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(STEPS_AHEAD):
            with graph.caches.step(Batch.decode(slots)) as opened:
                tokens = graph(tokens, opened).tokens
        torch.cuda.synchronize()
        rows.append((time.perf_counter() - begin) / STEPS_AHEAD * 1e6)
    return min(rows)


def time_kind(made: Made, caches: Caches, kind: str, *, slots: list[int], saved: CacheSnapshot, context: int) -> float:
    """Microseconds of the layers of one kind alone, one after the other, averaged over a window."""

    def timed(turn: int) -> float:
        spread(caches, slots, saved, context=context, turn=turn)
        with caches.step(Batch.decode(slots)) as opened:
            return microseconds(captured(_work(made.network, opened, kind, batch=len(slots))), repeats=10)

    if kind != "M" or len(slots) >= WINDOW:
        return timed(0)
    folding = len(slots) / WINDOW  # of all places of a window, those where a sequence folds
    return folding * timed(0) + (1 - folding) * timed(1)


def _work(network: NemotronH, opened: CacheStep, kind: str, *, batch: int) -> Callable[[], object]:
    assert opened.step.step is not None
    _ = opened.step.step.cursors, opened.table  # on the device before a capture
    hidden = torch.randn(batch, network.config.hidden_size, device=network.device).to(network.dtype)
    tokens = torch.randint(network.config.vocab_size, (batch,), device=network.device)
    layers = [
        layer for layer, config in zip(network.layers, network.config.layers, strict=True)
        if LETTERS[type(config)] == kind
    ]  # fmt: skip

    def ends() -> Tensor:
        normed = network.final_norm(network.embed(tokens))
        return torch.max(network.logits(normed), -1).indices

    def run() -> Tensor:
        out = hidden
        for layer in layers:
            if isinstance(layer, NemotronMamba2Layer):
                out = layer(out, opened.step, opened.state)
            elif isinstance(layer, AttentionLayer):
                out = layer(out, opened.step, opened.table)
            else:
                out = layer(out, opened.step)
        return out

    return ends if kind == ENDS else run


def time_prompt(made: Made, tokens: int) -> tuple[float, int]:
    """A prompt of so many tokens to its first token, as `generate` runs it: milliseconds, the median of three, and the
    peak of memory beyond the pools and what was there before."""
    base = _allocated("cuda")
    torch.cuda.reset_peak_memory_stats()
    model = Model(made.network, policy=made.policy)
    caches = model.caches(slots=1, tokens=tokens + 16)
    draw = torch.Generator().manual_seed(0)
    prompt = torch.randint(3, made.network.config.vocab_size, (tokens,), generator=draw).tolist()
    request = SamplingParams(max_tokens=1, ignore_eos=True)
    times = [model.generate([prompt], request, caches=caches)[0].prompt_seconds for _ in range(4)]
    return median(times[1:]) * 1e3, torch.cuda.max_memory_allocated() - base - caches.nbytes


# -- memory ----------------------------------------------------------------------------------------------------------


def _too_large(case: ModelCase) -> str:
    """Why the device cannot hold a model; "" when it can."""
    config = model_config(case.shape)
    weights = random_weights(case.shape, case.format, config=config, device="meta")
    nbytes = sum(w.nbytes for w in (*weights.layers, weights.lm_head, weights.embeddings))
    pools = cache_bytes(config, slots=1, pages=case.context // 16 + 1, policy=policy_of(case.format))
    free = torch.cuda.mem_get_info()[0]
    if nbytes + pools + SPARE_BYTES <= free:
        return ""
    return f"{nbytes / 1e9:.1f} GB of weights do not fit: {free / 1e9:.1f} GB are free"


def _allocated(device: str) -> int:
    return torch.cuda.memory_allocated() if device == "cuda" else 0


def _kind_of(weights: LayerWeights) -> str:
    names = {"Mamba2Weights": "M", "AttentionWeights": "*", "MlpWeights": "-", "MoeWeights": "E"}
    return names[type(weights).__name__]
