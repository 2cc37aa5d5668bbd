"""Mixtures of experts on the GPU: against float64 and the reference, the laws of the same bits, memory.

Needs an NVIDIA GPU (`scripts/test-gpu`). What can be checked without one is in `test_gpu_moe_compile.py`.
"""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module

import pytest
import torch
from torch import Tensor

from nemotron_mamba2.config import MoeConfig, Policy
from nemotron_mamba2.formats import FORMATS, Nvfp4, Plain, dequantize, give_back
from nemotron_mamba2.ops import Linear, Mixture, gpu, reference
from nemotron_mamba2.ops.gpu import prompt
from nemotron_mamba2.plan import plan_loose
from nemotron_mamba2.weights import LooseWeights

pytestmark = pytest.mark.gpu

moe = import_module("nemotron_mamba2.ops.gpu.moe")

NANO = MoeConfig(2688, 16, 6, 1856, 3712, routed_scaling_factor=2.5)  # of Nano-30B, with fewer experts
SUPER = MoeConfig(4096, 32, 22, 2688, 5376, moe_latent_size=1024, routed_scaling_factor=5.0)
CONFIGS = {"nano": NANO, "super": SUPER, "alone": replace(NANO, moe_shared_expert_intermediate_size=0)}
ROWS = (1, 2, 7, 8, 9, 33, 64, 150)
ERROR = 8e-3  # of what a layer adds: bf16 roundings of the normed row, hidden rows, each expert's rows and the sum


def relative(out: Tensor, truth: Tensor) -> float:
    return ((out.double() - truth.double()).norm() / truth.double().norm()).item()


def random_linear(format: str, *shape: int) -> Linear:
    values = torch.randn(*shape, device="cuda") * shape[-1] ** -0.5
    weight = Plain(values.bfloat16()) if format == "bf16" else reference.quantize(values, format)
    return Linear(weight, packed=gpu.pack(weight) if isinstance(weight, Nvfp4) else None)


def random_parts(config: MoeConfig, format: str) -> Mixture:
    hidden, experts, width = config.hidden_size, config.n_routed_experts, config.expert_input_size
    wide, shared = config.moe_intermediate_size, config.moe_shared_expert_intermediate_size
    parts = {"up": random_linear(format, experts, wide, width), "down": random_linear(format, experts, width, wide)}
    if shared:
        parts |= {
            "shared_up": random_linear(format, shared, hidden),
            "shared_down": random_linear(format, hidden, shared),
        }
    if config.moe_latent_size:
        parts |= {"fc1": random_linear(format, width, hidden), "fc2": random_linear(format, hidden, width)}
    gate = Linear(Plain(torch.randn(experts, hidden, device="cuda") * hidden**-0.5), reproducible=True)
    norm, bias = torch.rand(hidden, device="cuda") + 0.5, torch.randn(experts, device="cuda") * 0.1
    return Mixture(norm, gate, bias, **parts)


def values(linear: Linear) -> Tensor:
    return dequantize(linear.weight).double()


def experts64(x: Tensor, chosen: Tensor, weights: Tensor, up: Linear, down: Linear) -> Tensor:
    out = torch.zeros_like(x)
    up_values, down_values = values(up), values(down)
    for e in range(len(up_values)):
        rows, places = (chosen == e).nonzero(as_tuple=True)
        if len(rows):
            found = (x[rows] @ up_values[e].T).relu().square() @ down_values[e].T
            out.index_add_(0, rows, weights[rows, places, None].double() * found)
    return out


def added64(hidden: Tensor, parts: Mixture, config: MoeConfig) -> Tensor:
    """What a layer adds to the residual, in float64, for the experts that the kernel's router chose."""
    x = gpu.rms_norm(hidden, parts.norm, eps=config.layer_norm_epsilon)
    chosen, weights = gpu.route(x, parts.gate, parts.bias, config=config, role="step")
    x = x.double()
    narrow = x if parts.fc1 is None else x @ values(parts.fc1).T
    out = experts64(narrow, chosen, weights, parts.up, parts.down)
    if parts.fc2 is not None:
        out = out @ values(parts.fc2).T
    if parts.shared_up is not None and parts.shared_down is not None:
        out += (x @ values(parts.shared_up).T).relu().square() @ values(parts.shared_down).T
    return out


def draw(rows: int, config: MoeConfig) -> Tensor:
    return torch.randn(rows, config.hidden_size, device="cuda").bfloat16()


# -- router ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [replace(NANO, n_routed_experts=128), replace(SUPER, n_routed_experts=512)])
def test_the_router_is_the_reference(config: MoeConfig) -> None:
    x, experts = draw(300, config), config.n_routed_experts
    gate = Linear(Plain(torch.randn(experts, config.hidden_size, device="cuda") * 0.02), reproducible=True)
    bias = torch.randn(experts, device="cuda") * 0.1
    chosen, weights = gpu.route(x, gate, bias, config=config, role="step")
    scores = torch.sigmoid(x.double() @ gate.weight.weight.double().T)
    order = (scores + bias).sort(descending=True)
    gaps = -order.values.diff()[:, : config.num_experts_per_tok].amin(-1)
    clear = gaps > 1e-5  # else fp32 sums may order two experts otherwise
    assert clear.float().mean() > 0.8
    assert torch.equal(chosen[clear], order.indices[clear, : config.num_experts_per_tok])
    worth = scores.gather(1, chosen)
    assert relative(weights, worth / worth.sum(-1, keepdim=True) * config.routed_scaling_factor) < 1e-6
    for rows in (1, 7, 64):
        alone = gpu.route(x[:rows], gate, bias, config=config, role="step")
        assert torch.equal(alone[0], chosen[:rows]) and torch.equal(alone[1], weights[:rows])


def test_equal_experts_are_chosen_from_the_lowest() -> None:
    gate = Linear(Plain(torch.zeros(16, NANO.hidden_size, device="cuda")), reproducible=True)
    chosen, weights = gpu.route(draw(3, NANO), gate, torch.zeros(16, device="cuda"), config=NANO, role="step")
    assert chosen.tolist() == [list(range(6))] * 3
    assert relative(weights, torch.full_like(weights, 2.5 / 6)) < 1e-6


# -- experts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", FORMATS)
def test_a_rows_bits_do_not_depend_on_the_size_of_groups(format: str) -> None:
    """8 and 16 tokens run `linear.cu`, the others wgmma."""
    parts = random_parts(NANO, format)
    x = draw(200, NANO)
    chosen = torch.stack([torch.randperm(16, device="cuda")[:6] for _ in range(200)])
    found = []
    for tokens in (8, 16, 32, 64, 128):
        groups = moe._new_groups(chosen, 16, tokens)
        moe._fill_groups(groups, chosen)
        found.append(moe._experts(x, groups, parts.up, parts.down, 6))
    for tokens, rows in zip((16, 32, 64, 128), found[1:], strict=True):
        assert torch.equal(rows, found[0]), tokens


@pytest.mark.parametrize("format", FORMATS)
def test_prompt_rows_equal_float64(format: str) -> None:
    parts = random_parts(NANO, format)
    x = draw(1500, NANO)
    chosen, weights = gpu.route(x, parts.gate, parts.bias, config=NANO, role="prompt")
    out = gpu.routed_experts(x, chosen, weights, parts.up, parts.down, role="prompt")
    truth = experts64(x.double(), chosen, weights, parts.up, parts.down)
    assert relative(out, truth) < ERROR
    step = gpu.routed_experts(x[:5], chosen[:5], weights[:5], parts.up, parts.down, role="step")
    assert relative(step, truth[:5]) < ERROR


def test_rows_that_want_fp8_activations_get_them() -> None:
    parts = random_parts(NANO, "fp8_channel")
    up, down = (replace(part, prompt="fp8_per_row") for part in (parts.up, parts.down))
    x = draw(100, NANO)
    chosen, weights = gpu.route(x, parts.gate, parts.bias, config=NANO, role="prompt")
    found = gpu.routed_experts(x, chosen, weights, up, down, role="prompt")
    truth = reference.routed_experts(x, chosen, weights, up, down, role="prompt")
    assert relative(found, truth) < 2e-2


def test_long_prompts_in_pieces_are_whole_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = random_parts(NANO, "nvfp4")
    x = draw(500, NANO)
    chosen, weights = gpu.route(x, parts.gate, parts.bias, config=NANO, role="prompt")
    whole = gpu.routed_experts(x, chosen, weights, parts.up, parts.down, role="prompt")
    monkeypatch.setattr(moe, "ROWS_AT_ONCE", 700)
    assert torch.equal(gpu.routed_experts(x, chosen, weights, parts.up, parts.down, role="prompt"), whole)


# -- the whole layer -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("shape", CONFIGS)
def test_the_layer_at_any_row_count(shape: str, format: str) -> None:
    config = CONFIGS[shape]
    parts = random_parts(config, format)
    assert not gpu.unserved_mixture(parts, config)
    hidden = draw(max(ROWS), config)
    added, first = added64(hidden, parts, config), None
    for rows in ROWS:
        out = torch.full_like(hidden[:rows], float("nan"))
        gpu.mixture(hidden[:rows], parts, config=config, out=out)
        residual = hidden[:rows].double()
        noise = (residual + added[:rows]).norm() * 2e-3 / added[:rows].norm()  # the last rounding, of the sum
        assert relative(out.double() - residual, added[:rows]) < ERROR + noise, rows
        first = out if first is None else first
        assert torch.equal(out[0], first[0]), f"row 0 has other bits among {rows} rows"


@pytest.mark.parametrize("rows", [1, 40])
def test_a_replayed_graph_is_eager_and_nothing_waits(rows: int) -> None:
    parts, hidden = random_parts(NANO, "nvfp4"), draw(rows, NANO)
    eager = gpu.mixture(hidden, parts, config=NANO)
    other = draw(rows, NANO)
    truth = gpu.mixture(other, parts, config=NANO)
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = gpu.mixture(hidden, parts, config=NANO)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(again, eager)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = gpu.mixture(hidden, parts, config=NANO)
    graph.replay()
    assert torch.equal(out, eager)
    hidden.copy_(other)  # other experts, other groups
    graph.replay()
    assert torch.equal(out, truth)


# -- memory ----------------------------------------------------------------------------------------------------------


def test_what_is_packed_has_its_values() -> None:
    weight = reference.quantize(torch.randn(48, 192, device="cuda"), "nvfp4")
    assert isinstance(weight, Nvfp4)
    truth, packed = dequantize(weight, torch.bfloat16), gpu.pack(weight)
    give_back(weight)
    assert torch.equal(prompt.values(weight, packed), truth)


def test_a_model_keeps_nvfp4_once() -> None:
    up, down = (random_linear("nvfp4", *shape).weight for shape in ((16, 1856, 2688), (16, 2688, 1856)))
    size = up.nbytes + down.nbytes
    weights = LooseWeights(up, down)
    plan = replace(plan_loose(weights, Policy(), device="cuda", budget_bytes=1 << 40), gives_back=True)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    linears = plan.prepare(weights)
    assert abs(torch.cuda.memory_allocated() - before) < size // 100
    assert linears["up"].packed is not None and up.weight.is_meta and up.nbytes + down.nbytes == size
