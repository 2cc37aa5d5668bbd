"""The whole model against transformers' own, on random models that transformers made and saved.

transformers 5.24 clamps dt at 0.001 in prefill only, whatever the config says, so its mixers get the limit of the file:
`mixer.time_step_limit = (0, inf)`. Its decode path has no clamp.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from checkpoints import LAYOUTS, config_of, truth, write_checkpoint, write_json, write_shards
from models import relative_error
from nemotron_mamba2.batch import Batch
from nemotron_mamba2.config import Policy
from nemotron_mamba2.generate import Model
from nemotron_mamba2.model import Caches
from nemotron_mamba2.sampling import SamplingParams

transformers = pytest.importorskip("transformers")

PATTERNS = ("M", "*-", "M-M*", "ME*", "M-E*", "MEM*E", "MLE*")  # L: experts behind latent projections
WORDS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe", "L": "moe"}
PROMPT, STEPS, VOCAB = 37, 32, 200
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class Case:
    """What transformers saved, and what it says."""

    path: Path
    tokens: Tensor  # [2, PROMPT + STEPS]
    logits: Tensor  # fp32 [2, PROMPT + STEPS, vocab], of the whole sequences at once


def make_case(path: Path, pattern: str, *, dt_bias: float | None = None, dtype=torch.float32) -> Case:
    config = transformers.NemotronHConfig(
        layers_block_type=[WORDS[letter] for letter in pattern],
        vocab_size=VOCAB,
        hidden_size=96,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=128,
        mamba_num_heads=12,
        mamba_head_dim=16,
        n_groups=2,
        ssm_state_size=32,
        chunk_size=32,
        n_routed_experts=16,
        num_experts_per_tok=3,
        n_group=4,
        topk_group=2,
        moe_intermediate_size=48,
        moe_shared_expert_intermediate_size=64,
        moe_latent_size=32 if "L" in pattern else None,
        routed_scaling_factor=2.5,
        max_position_embeddings=256,
    )
    draw = torch.Generator().manual_seed(len(pattern) + 11)
    model = transformers.NemotronHForCausalLM(config).eval()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        randomise(name, tensor.data, draw, dt_bias=dt_bias, spread=0.1 if dtype == torch.float32 else 2.0)
    gates = {i: layer.mixer.gate for i, layer in enumerate(model.model.layers) if hasattr(layer.mixer, "gate")}
    routers = {i: (gate.weight.data, gate.e_score_correction_bias.data) for i, gate in gates.items()}
    model.to(dtype)
    for layer, router in routers.items():  # published files keep them in fp32
        gate = model.model.layers[layer].mixer.gate
        gate.weight.data, gate.e_score_correction_bias.data = router
    model.save_pretrained(path)
    reloaded = transformers.NemotronHForCausalLM.from_pretrained(path, dtype=dtype).eval()
    for layer in reloaded.model.layers:
        layer.mixer.time_step_limit = (0.0, math.inf)
    tokens = torch.randint(0, VOCAB, (2, PROMPT + STEPS), generator=draw)
    with torch.no_grad():
        logits = reloaded(tokens, use_cache=False).logits.float()
    return Case(path, tokens, logits)


def randomise(name: str, tensor: Tensor, draw: torch.Generator, *, dt_bias: float | None, spread: float) -> None:
    """Values that make every part matter: unit-size activations, decays from slow to fast, distinct norms.

    spread: of the router's bias. Where two experts are nearly tied, rounding to bf16 picks one or the other, in any
    implementation; a wide bias makes such rows rare.
    """
    noise = torch.randn(tensor.shape, generator=draw)
    if name.endswith("A_log"):
        noise = torch.log(1 + 15 * torch.rand(tensor.shape, generator=draw))
    elif name.endswith("dt_bias"):
        noise = noise - 2 if dt_bias is None else 0.5 * noise + dt_bias
    elif "norm" in name:
        noise = 1 + 0.1 * noise
    elif "conv1d" in name:
        noise = 0.5 * noise
    elif name.endswith("e_score_correction_bias"):
        noise = spread * noise
    elif tensor.dim() >= 2 and "embeddings" not in name:
        noise = noise / math.sqrt(tensor.shape[-1])
    tensor.copy_(noise)


@pytest.fixture(scope="module")
def case(request, tmp_path_factory):
    pattern, dt_bias, dtype = request.param
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        return make_case(tmp_path_factory.mktemp("saved"), pattern, dt_bias=dt_bias, dtype=dtype)


def load(case: Case, **how) -> tuple[Model, Caches]:
    model = Model.from_checkpoint(case.path, **how)
    return model, model.caches(slots=4, tokens=400)


def prompts(model: Model, caches: Caches, slots, tokens: Tensor, lengths) -> Tensor:
    """All logits of prompts of these lengths, in one ragged step."""
    flat = torch.cat([row[:n] for row, n in zip(tokens, lengths, strict=True)])
    return model.network.forward(flat, Batch.prefill(slots, lengths), caches, logits_rows="all")


def both(patterns, biases, dtype):
    cases = [(pattern, bias, dtype) for pattern in patterns for bias in biases]
    ids = [f"{pattern}{'' if bias is None else f' dt {bias:+g}'}" for pattern, bias, _ in cases]
    return pytest.mark.parametrize("case", cases, ids=ids, indirect=True)


@both(PATTERNS, (None,), torch.float32)
def test_prefill_in_fp32(case):
    model, caches = load(case)
    found = prompts(model, caches, caches.acquire(2), case.tokens, [PROMPT + STEPS] * 2)
    assert relative_error(found.view(case.logits.shape), case.logits) < TOLERANCE[torch.float32]


@both(("M", "MEM*E"), (-12, 4), torch.float32)
def test_1_dt_far_below_and_far_above_the_clamp_of_others(case):
    """softplus(−12) is 6e-6, softplus(4) is 4: a floor of 0.001 or a ceiling would show in either."""
    model, caches = load(case)
    [slot] = caches.acquire(1)
    found = prompts(model, caches, [slot], case.tokens[:1], [PROMPT])
    steps = [
        model.network.forward(case.tokens[0, t : t + 1], Batch.decode([slot]), caches)
        for t in range(PROMPT, PROMPT + STEPS)
    ]
    assert relative_error(torch.cat((found, *steps)), case.logits[0]) < TOLERANCE[torch.float32]


@both(PATTERNS, (None,), torch.float32)
def test_decode_of_32_steps_in_fp32(case):
    model, caches = load(case)
    slots = caches.acquire(2)
    prompts(model, caches, slots, case.tokens, [PROMPT] * 2)
    steps = [
        model.network.forward(case.tokens[:, t], Batch.decode(slots), caches) for t in range(PROMPT, PROMPT + STEPS)
    ]
    assert relative_error(torch.stack(steps, 1), case.logits[:, PROMPT:]) < TOLERANCE[torch.float32]


@both(("M-M*", "MEM*E"), (None,), torch.float32)
def test_ragged_batch_against_single_runs_of_transformers(case):
    """A row of causal logits needs nothing after it, so single runs are prefixes."""
    model, caches = load(case)
    lengths = [3, 40]
    found = prompts(model, caches, caches.acquire(2), case.tokens, lengths)
    expected = torch.cat([rows[:n] for rows, n in zip(case.logits, lengths, strict=True)])
    assert relative_error(found, expected) < TOLERANCE[torch.float32]


@both(PATTERNS, (None,), torch.bfloat16)
def test_bf16_logits_and_the_same_argmax_where_noise_allows(case):
    model, caches = load(case)
    assert model.config.dtype == torch.bfloat16
    slots = caches.acquire(2)
    prompt = prompts(model, caches, slots, case.tokens, [PROMPT] * 2).view(2, PROMPT, VOCAB)
    steps = [
        model.network.forward(case.tokens[:, t], Batch.decode(slots), caches) for t in range(PROMPT, PROMPT + STEPS)
    ]
    found = torch.cat((prompt, torch.stack(steps, 1)), 1)
    assert relative_error(found, case.logits) < TOLERANCE[torch.bfloat16]
    noise = float((found - case.logits).square().mean().sqrt())
    top = case.logits.topk(2).values
    clear = top[..., 0] - top[..., 1] > 6 * noise
    assert clear.float().mean() > 0.5, "the check needs rows whose winner is clear"
    assert found.argmax(-1)[clear].equal(case.logits.argmax(-1)[clear])


# -- every published layout --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=LAYOUTS)
def layout(request, tmp_path_factory):
    return request.param, write_checkpoint(tmp_path_factory.mktemp("layout"), request.param)


def test_every_published_layout_runs_as_the_values_that_its_weights_stand_for(layout, tmp_path):
    """Activations unquantised, fp32: the logits of a plain checkpoint of the dequantised weights."""
    name, path = layout
    exact = Model.from_checkpoint(path, policy=Policy(prompt="exact"), dtype=torch.float32)
    config = {k: v for k, v in config_of(name).items() if k != "quantization_config"}
    tensors = {n if n.startswith(("lm_head.", "mtp.")) else f"backbone.{n}": v for n, v in truth(name).items()}
    write_shards(tmp_path, tensors)
    write_json(tmp_path / "config.json", config)
    plain = Model.from_checkpoint(tmp_path, policy=Policy(prompt="exact"), dtype=torch.float32)
    tokens = torch.randint(0, exact.config.vocab_size, (30,), generator=torch.Generator().manual_seed(0))
    logits = []
    for model in (exact, plain):
        caches = model.caches(slots=1, tokens=30)
        prompt = Batch.prefill(caches.acquire(1), [30])
        logits.append(model.network.forward(tokens, prompt, caches, logits_rows="all"))
    assert torch.isfinite(logits[0]).all() and logits[0].shape == (30, exact.config.vocab_size)
    assert relative_error(*logits) < 1e-5


def test_every_published_layout_generates_as_the_checkpoint_wants_it(layout):
    """bf16, and W8A8 for prompt rows where the checkpoint says so."""
    model = Model.from_checkpoint(layout[1])
    prompt = [5, 6, 7, 8, 9, 10]
    [completion] = model.generate([prompt], SamplingParams(max_tokens=4, ignore_eos=True))
    assert len(completion.token_ids) == 4 and "lm_head" in model.explain()
    assert all(math.isfinite(x) for x in model.score([prompt])[0])
