"""Whole models on a GPU: the logits and tokens of the CPU, and in decode the same bits for any batch, slot and graph.

Needs an NVIDIA GPU (`scripts/test-gpu`).
"""

from __future__ import annotations

from collections import deque
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from checkpoints import LAYOUTS, write_checkpoint
from nemotron_mamba2.batch import Batch
from nemotron_mamba2.bench.random_model import MODEL_FORMATS, random_weights
from nemotron_mamba2.cli import DEMO_MODEL
from nemotron_mamba2.config import AttentionConfig, Mamba2Config, ModelConfig, MoeConfig, Policy
from nemotron_mamba2.decoding import Loop
from nemotron_mamba2.formats import Nvfp4, Plain, dequantize
from nemotron_mamba2.generate import Model
from nemotron_mamba2.graph import ModelGraph
from nemotron_mamba2.model import Caches, NemotronH
from nemotron_mamba2.ops import Linear, gpu, reference
from nemotron_mamba2.plan import plan_model
from nemotron_mamba2.sampling import SamplingParams
from oracle import same_bits

pytestmark = pytest.mark.gpu

EXACT = Policy(prompt="exact")  # activations of prompt rows stay bf16: no code can flip
ROW_ERROR = 4e-2  # of a row of logits: some twenty roundings to bf16 on the way
PROMPTS = (
    "In the beginning was the word of the LORD, which came unto the king and all the people",
    "MIRANDA:\nIf by your art, my dearest father, you have put the wild waters in this roar,",
    "My fellow Americans, the state of the Union is strong because our people are strong,",
    "<|im_start|>user\nAnna has a dog named Rufus.\nWhat is Anna's dog called?<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nIda is 34 years old and Paul is 71 years old.\nWho is older, Ida or Paul?<|im_end|>\n",
)


def row_errors(found: Tensor, truth: Tensor) -> Tensor:
    found, truth = found.double().cpu(), truth.double().cpu()
    return (found - truth).norm(dim=-1) / truth.norm(dim=-1)


def logits_of(model: Model, prompt: list[int], rest: list[int]) -> Tensor:
    """All logits of a prompt, and of tokens fed one by one after it."""
    device = model.network.device
    caches = model.caches(slots=1, tokens=len(prompt) + len(rest))
    slots = caches.acquire(1)
    ids = torch.tensor(prompt, device=device)
    found = [model.network.forward(ids, Batch.prefill(slots, [len(prompt)]), caches, logits_rows="all")]
    for token in rest:
        found.append(model.network.forward(torch.tensor([token], device=device), Batch.decode(slots), caches))
    return torch.cat(found)


# -- logits ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["bf16", "fp8_tensor", "fp8_channel", "fp8_block", "nvfp4"])
def test_products_with_fp32_results_are_never_rounded(format: str) -> None:
    values = torch.randn(4096, 2688, device="cuda") * 0.02
    weight = Plain(values.bfloat16()) if format == "bf16" else reference.quantize(values, format)
    linear = Linear(weight, packed=gpu.pack(weight) if isinstance(weight, Nvfp4) else None)
    x = torch.randn(300, 2688, device="cuda").bfloat16()
    truth = x.double() @ dequantize(weight).double().T
    first = None
    for rows in (1, 5, 16, 33, 64, 300):
        out = torch.full((rows, 4096), float("nan"), device="cuda")
        gpu.linear(x[:rows], linear, "step", out=out)
        assert row_errors(out, truth[:rows]).max() < 5e-6, rows
        rounded = gpu.linear(x[:rows], linear, "step")
        assert same_bits(out.bfloat16(), rounded)
        first = out[0] if first is None else first
        assert same_bits(out[0], first), rows


@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_of_every_layout_are_those_of_the_cpu(layout: str, tmp_path) -> None:
    path = write_checkpoint(tmp_path, layout)
    cpu, device = (Model.from_checkpoint(path, device=where, policy=EXACT) for where in ("cpu", "cuda"))
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(3, cpu.config.vocab_size, (27,), generator=draw).tolist()
    errors = row_errors(logits_of(device, ids[:20], ids[20:]), logits_of(cpu, ids[:20], ids[20:]))
    assert torch.isfinite(errors).all()
    # Two experts of nearly equal score may change places, which moves a row by more than rounding does.
    allowed = len(errors) // 8 if "E" in cpu.config.pattern else 0
    assert errors.median() < ROW_ERROR / 2 and (errors > ROW_ERROR).sum() <= allowed, errors


def test_the_demo_model_gives_the_tokens_of_the_cpu_where_they_are_not_a_tie() -> None:
    cpu, device = (Model.from_checkpoint(DEMO_MODEL, device=where) for where in ("cpu", "cuda"))
    done = device.generate(PROMPTS, SamplingParams(max_tokens=64, ignore_eos=True))
    assert cpu.tokenizer is not None
    compared = 0
    for text, completion in zip(PROMPTS, done, strict=True):
        prompt, made = cpu.tokenizer.encode(text), list(completion.token_ids)
        assert len(made) == 64
        truth, found = (logits_of(model, prompt, made[:-1]).cpu()[len(prompt) - 1 :] for model in (cpu, device))
        noise = (found - truth).abs().max()
        assert row_errors(found, truth).max() < ROW_ERROR
        top = truth.topk(2, dim=-1)
        sure = top.values[:, 0] - top.values[:, 1] > 2 * noise
        assert torch.equal(top.indices[:, 0][sure], torch.tensor(made)[sure])
        compared += int(sure.sum())
    assert compared > 100


# -- bits --------------------------------------------------------------------------------------------------------------


def make_network(format: str, *, policy: Policy | None = None) -> NemotronH:
    """Nano-30B's first layers, narrower, in one of its published layouts."""
    kinds = {
        "M": Mamba2Config(1024, 16, 64, 8, 128),
        "*": AttentionConfig(1024, 16, 2, 128),
        "E": MoeConfig(1024, 16, 4, 512, 512, routed_scaling_factor=2.5),
    }
    config = ModelConfig(1024, 2048, tuple(kinds[letter] for letter in "MEMEM*E"), max_position_embeddings=8192)
    weights = random_weights("nano30b", format, config=config, device="cuda")
    policy = policy or Policy(kv="bf16" if format == "bf16" else "checkpoint")
    return NemotronH(config, weights, plan_model(config, weights, policy, device="cuda"))


def make_caches(network: NemotronH, slots: int, *, kv: str = "checkpoint") -> Caches:
    policy = Policy(kv=kv)  # type: ignore[arg-type]
    return Caches.for_model(network.config, slots=slots, pages=slots * 12, policy=policy, device="cuda")


@pytest.fixture(scope="module", params=MODEL_FORMATS)
def network(request: pytest.FixtureRequest) -> NemotronH:
    return make_network(request.param)


def begun(network: NemotronH, count: int) -> Caches:
    """Caches of `count` sequences of different lengths in slots 0, 1, …; equal arguments give equal caches."""
    caches = make_caches(network, count)
    draw = torch.Generator().manual_seed(3)
    for i, slot in enumerate(sorted(caches.acquire(count))):
        ids = torch.randint(2048, (7 + 5 * i,), generator=draw).cuda()
        network.forward(ids, Batch.prefill([slot], [len(ids)]), caches)
    return caches


@contextmanager
def no_waiting():
    """Any call of torch that waits for the device raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@torch.inference_mode()
def test_law_a_replayed_step_is_eager_and_waits_for_nobody(network: NemotronH) -> None:
    eager, replayed = begun(network, 16), begun(network, 16)
    graph = ModelGraph(network, replayed, sequences=16)
    for turn, count in enumerate((16, 16, 1, 3, 16, 9, 1, 16, 2, 5) * 2):
        mine = [(turn * 5 + i * 3) % 16 for i in range(count)]
        tokens = torch.randint(2048, (count,), device="cuda")
        truth = network.forward(tokens, Batch.decode(mine), eager)
        if turn < 10:  # captures wait
            with replayed.step(Batch.decode(mine)) as opened:
                found = graph(tokens, opened)
        else:
            with no_waiting(), replayed.step(Batch.decode(mine)) as opened:
                found = graph(tokens, opened)
        assert torch.isfinite(truth).all() and same_bits(found.logits, truth), f"turn {turn}, {count} sequences"
        assert torch.equal(found.tokens, truth.argmax(-1)) and found.finite.all()


@torch.inference_mode()
def test_law_a_sequence_alone_has_the_bits_of_a_row_of_sixteen(network: NemotronH) -> None:
    together, alone = begun(network, 16), begun(network, 16)
    for turn in range(18):
        tokens = torch.randint(2048, (16,), device="cuda")
        order = [(turn + 7 * i) % 16 for i in range(16)]
        rows = network.forward(tokens[order], Batch.decode(order), together)
        for i in (0, 5, 15):
            slot = order[i]
            single = network.forward(tokens[slot : slot + 1], Batch.decode([slot]), alone)
            assert same_bits(single[0], rows[i]), f"turn {turn}, slot {slot}"
        others = [slot for slot in order if slot not in (order[0], order[5], order[15])]
        network.forward(tokens[others], Batch.decode(others), alone)


# -- the loop, memory --------------------------------------------------------------------------------------------------


def test_generate_gives_the_tokens_of_the_eager_loop_and_keeps_its_graphs() -> None:
    network = make_network("nvfp4")
    model = Model(network, policy=Policy(kv="checkpoint"))
    draw = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, 2048, (n,), generator=draw).tolist() for n in (5, 300, 41)]
    requests = [
        SamplingParams(max_tokens=40, ignore_eos=True),
        SamplingParams(max_tokens=21, temperature=1.0, top_p=0.9, seed=7, ignore_eos=True),
        SamplingParams(max_tokens=33, ignore_eos=True, logprobs=2),
    ]
    done = model.generate(prompts, requests)
    caches = model.caches(slots=3, tokens=600)
    sequences = [model._sequence(i, *pair) for i, pair in enumerate(zip(prompts, requests, strict=True))]
    with torch.inference_mode():
        Loop(network, caches, deque(sequences)).run()
    assert [s.completion().token_ids for s in sequences] == [c.token_ids for c in done]
    kept = model._graph
    again = model.generate(prompts, requests)
    assert model._graph is kept and [c.token_ids for c in again] == [c.token_ids for c in done]


def test_decoding_takes_little_beside_weights_and_pools() -> None:
    network = make_network("nvfp4")
    base = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    caches = begun(network, 16)
    graph = ModelGraph(network, caches, sequences=16)
    with torch.inference_mode(), caches.step(Batch.decode(list(range(16)))) as opened:
        graph(torch.zeros(16, dtype=torch.int64, device="cuda"), opened)
    assert torch.cuda.max_memory_allocated() - base - caches.nbytes < 256 << 20
