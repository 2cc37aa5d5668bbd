"""Captured decode steps of a whole model, as far as a CPU shows them, and the loop that runs ahead of what it has seen.

On a CPU a `ModelGraph` captures nothing and runs the same padded step eagerly; replays are in `test_gpu_model.py`.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import replace

import pytest
import torch

import nemotron_mamba2.graph as graph_module
from checkpoints import small_config, write_model, write_tokenizer
from models import PATTERNS, REPRODUCIBLE, make_caches, make_model, prefill, random_tokens
from nemotron_mamba2.batch import Batch, Rows
from nemotron_mamba2.decoding import Loop
from nemotron_mamba2.errors import ConfigError, ShapeError
from nemotron_mamba2.generate import Model
from nemotron_mamba2.graph import Decoded, ModelGraph
from nemotron_mamba2.sampling import SamplingParams
from oracle import same_bits


def twins(pattern: str, *, sequences: int = 4):
    """A model, two caches whose sequences hold the same prompts, and a graph over the second."""
    model = make_model(pattern, policy=REPRODUCIBLE, dtype=torch.bfloat16)
    both = [make_caches(model) for _ in range(2)]
    for caches in both:
        for i, slot in enumerate(caches.acquire(4)):
            prefill(model, caches, slot, random_tokens(5 + 9 * i, seed=i))
    return model, both, ModelGraph(model, both[1], sequences=sequences)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_padded_steps_have_the_bits_of_the_model(pattern: str) -> None:
    model, (plain, other), graph = twins(pattern)
    draw = random.Random(1)
    for turn in range(20):
        mine = draw.sample(range(4), 1 + turn % 4)
        tokens = random_tokens(len(mine), seed=turn)
        eager = model.forward(tokens, Batch.decode(mine), plain)
        with other.step(Batch.decode(mine)) as opened:
            found = graph(tokens, opened)
        assert same_bits(found.logits, eager) and found.finite.tolist() == [True] * len(mine)
        assert found.tokens.tolist() == eager.argmax(-1).tolist()
    assert [plain.position(slot) for slot in range(4)] == [other.position(slot) for slot in range(4)]


def test_a_graph_serves_a_bucket_of_sequences_and_of_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_module, "LEAST_TOKENS", 16)
    _, (_, caches), graph = twins("M*")  # at 5, 14, 23 and 32 tokens
    for mine in ([0], [1], [0, 1], [2, 0, 1], [3], [3, 0]):
        with caches.step(Batch.decode(mine)) as opened:
            graph(random_tokens(len(mine)), opened)
    assert sorted(graph._captured) == [(1, 16), (1, 64), (2, 16), (2, 64), (4, 32)]


class TableOps:
    """The reference, except that attention reads places, tables and counts where kernels do."""

    def __init__(self, ops) -> None:
        self._ops = ops

    def __getattr__(self, name: str):
        return getattr(self._ops, name)

    def attention(self, q, keys, values, rows: Rows, role, *, pages, **how):
        seen = pages.row_keys.tolist()
        tables = pages.table[pages.row_sequence.long()]
        lists = tuple(tuple(table) if n else () for table, n in zip(tables.tolist(), seen, strict=True))
        starts = tuple(max(n - 1, 0) for n in seen)
        alone = Rows((0,) * len(seen), (1,) * len(seen), starts, starts, 0, q.device)
        found = replace(pages, lists=lists, table=tables)
        return self._ops.attention(q, keys, values, alone, role, pages=found, **how)


def test_replays_find_everything_that_changes_in_fixed_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The captured function runs again on the very buffers it was captured with, and on nothing else."""
    captures = []

    def capture(work, *, memory=None):
        result = work()
        captures.append(result)

        def replay() -> None:
            now = work()
            for name in ("logits", "tokens", "finite"):
                getattr(result, name).copy_(getattr(now, name))

        return replay, result

    monkeypatch.setattr(graph_module, "captures", lambda device: True)
    monkeypatch.setattr(graph_module, "capture", capture)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    # Attention alone reads everything but its counts from the table; steps of Mamba-2 layers are in test_graph.py.
    model, (plain, other), graph = twins("-*")
    model.layers[1]._ops = TableOps(model.layers[1]._ops)
    before = [t.clone() for t in (*other.pages.keys, *other.pages.values)]
    graph.captured(Rows((0,), (1,), (5,), (0,), 0, torch.device("cpu")))
    after = (*other.pages.keys, *other.pages.values)
    assert all(same_bits(a[:-1], b[:-1]) for a, b in zip(before, after, strict=True)), "capture wrote to live pages"
    for turn in range(12):
        mine = [(turn + i) % 4 for i in range(1 + turn % 3)]
        tokens = random_tokens(len(mine), seed=turn)
        eager = model.forward(tokens, Batch.decode(mine), plain)
        with other.step(Batch.decode(mine)) as opened:
            assert same_bits(graph(tokens, opened).logits, eager), turn
    assert len(captures) == 3 and all(isinstance(found, Decoded) for found in captures)


@pytest.mark.parametrize(
    ("batch", "tokens", "words"),
    [
        (Batch.decode([0, 1, 2]), 3, "up to 2 sequences"),
        (Batch.verify([0], [2]), 2, "decode steps"),
        (Batch.prefill([0], [2]), 2, "decode steps"),
        (Batch.decode([3]), 2, r"tokens \[1\]"),
        (None, 1, "other caches"),
    ],
)
def test_what_does_not_fit_is_refused(batch: Batch | None, tokens: int, words: str) -> None:
    _, (plain, other), graph = twins("M*", sequences=2)
    caches, batch = (plain, Batch.decode([0])) if batch is None else (other, batch)
    with pytest.raises(ShapeError, match=words), caches.step(batch) as opened:
        graph(random_tokens(tokens), opened)


def test_models_that_cannot_be_captured_are_refused() -> None:
    model, (_, caches), _ = twins("M*")
    with pytest.raises(ConfigError, match="0 sequences"):
        ModelGraph(model, caches, sequences=0)
    layer = model.layers[0]
    layer.capabilities = replace(layer.capabilities, graph=False, why=(("graph", "it counts on the host"),))
    with pytest.raises(ConfigError, match="graph: M: it counts on the host"):
        ModelGraph(model, caches, sequences=2)


# -- the loop --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Model:
    path = write_model(tmp_path_factory.mktemp("model"), small_config("ME*-M", max_position_embeddings=1024))
    write_tokenizer(path)
    return Model.from_checkpoint(path, device="cpu", policy=REPRODUCIBLE)


REQUESTS = [
    SamplingParams(max_tokens=9, ignore_eos=True),
    SamplingParams(max_tokens=1, ignore_eos=True),
    SamplingParams(max_tokens=14, temperature=1.1, top_p=0.9, seed=4, ignore_eos=True),
    SamplingParams(max_tokens=6, logprobs=2, ignore_eos=True),
    SamplingParams(max_tokens=11, ignore_eos=True),
    SamplingParams(max_tokens=7, repetition_penalty=1.4, ignore_eos=True),
]


@pytest.mark.parametrize("graphed", [False, True])
@pytest.mark.parametrize("penalty", [False, True])
@pytest.mark.parametrize("slots", [2, 6])
def test_a_loop_that_runs_ahead_gives_the_same(model: Model, graphed: bool, penalty: bool, slots: int) -> None:
    requests = REQUESTS if penalty else REQUESTS[:5]
    prompts = [random_tokens(3 + 11 * i, seed=i).clamp_(min=5).tolist() for i in range(len(requests))]
    plain = model.generate(prompts, requests)
    # One ends by a token that the loop sees only after the next step has begun.
    end = plain[4].token_ids[4]
    requests = [*requests[:4], replace(requests[4], stop_token_ids=(end,)), *requests[5:]]
    plain = model.generate(prompts, requests)
    assert plain[4].finish_reason == "stop"
    caches, events = model.caches(slots=slots, tokens=400), []
    before = caches.free_slots, caches.free_pages
    sequences = [
        model._sequence(i, prompt, request) for i, (prompt, request) in enumerate(zip(prompts, requests, strict=True))
    ]
    graph = ModelGraph(model.network, caches, sequences=slots) if graphed else None
    with torch.inference_mode():
        Loop(model.network, caches, deque(sequences), events.append, graph, ahead=True).run()
    for mine, truth in zip(sequences, plain, strict=True):
        found = mine.completion()
        assert (found.token_ids, found.text, found.finish_reason) == (truth.token_ids, truth.text, truth.finish_reason)
        assert found.logprobs == truth.logprobs
        assert [e.token_id for e in events if e.index == mine.index] == list(truth.token_ids)
    assert (caches.free_slots, caches.free_pages) == before


def test_a_loop_that_runs_ahead_gives_everything_back_when_the_callback_raises(model: Model) -> None:
    for after in (1, 3, 6):
        caches, seen = model.caches(slots=2, tokens=200), []
        before = caches.free_slots, caches.free_pages

        def callback(event, seen=seen, after=after) -> None:
            seen.append(event)
            if len(seen) == after:
                raise RuntimeError("callback")

        sequences = [model._sequence(i, [7, 8, 9 + i], REQUESTS[0]) for i in range(3)]
        with torch.inference_mode(), pytest.raises(RuntimeError, match="callback"):
            Loop(model.network, caches, deque(sequences), callback, ahead=True).run()
        assert (caches.free_slots, caches.free_pages) == before
