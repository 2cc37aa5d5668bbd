"""The plan: what is decided at load, what it costs, what it says, and that the cheap way gives the same numbers."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace

import pytest
import torch
from torch import Tensor

import oracle
from nemotron_mamba2.batch import Batch
from nemotron_mamba2.config import AttentionConfig, MlpConfig, ModelConfig, Policy
from nemotron_mamba2.errors import ConfigError, NoKernel
from nemotron_mamba2.formats import Nvfp4
from nemotron_mamba2.layer import NemotronMamba2Layer
from nemotron_mamba2.plan import Capabilities, HostStep, ModelPlan, Plan, combine, make_plan, plan_model
from nemotron_mamba2.weights import AttentionWeights, MlpWeights, ModelWeights
from oracle import FORMATS, SMALL, Sequence64, mamba2_weights, mixer_error, quantized, rig, same_bits, truth_of
from tolerances import BF16, FP32, W8A8, W8A8_AGAINST_STEP, tolerance

HIDDEN = SMALL.hidden_size


def plan_of(format: str, policy: Policy | None = None, *, dtype: torch.dtype = BF16, **settings: object) -> Plan:
    return make_plan(SMALL, mamba2_weights(SMALL, format), policy or Policy(), device="cpu", dtype=dtype, **settings)


def plain(rows: int, columns: int, format: str = "bf16", seed: int = 0):
    draw = torch.Generator().manual_seed(seed)
    return quantized(torch.randn(rows, columns, generator=draw) * columns**-0.5, format, seed)


def small_model(*formats: str) -> tuple[ModelConfig, ModelWeights]:
    """`M` layers of the given formats, then `*` and `-` in bf16."""
    attention = AttentionConfig(HIDDEN, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    layers = (*[SMALL] * len(formats), attention, MlpConfig(HIDDEN, intermediate_size=64))
    norm = torch.ones(HIDDEN)
    weights = [mamba2_weights(SMALL, format, seed) for seed, format in enumerate(formats)]
    q, kv, o = plain(64, HIDDEN), plain(32, HIDDEN), plain(HIDDEN, 64)
    weights.append(AttentionWeights(norm, q_proj=q, k_proj=kv, v_proj=kv, o_proj=o))
    weights.append(MlpWeights(norm, up_proj=plain(64, HIDDEN), down_proj=plain(HIDDEN, 64)))
    config = ModelConfig(HIDDEN, vocab_size=80, layers=layers)
    return config, ModelWeights(plain(80, HIDDEN), tuple(weights), norm, lm_head=plain(80, HIDDEN))


# -- choices -----------------------------------------------------------------------------------------------------------


def test_a_plan_is_frozen_and_repeats_itself() -> None:
    plan = plan_of("nvfp4")
    assert plan == plan_of("nvfp4") and plan.kind == "M" and plan.dtype == BF16 and plan.device.type == "cpu"
    assert [linear.name for linear in plan.linears] == ["in_proj", "out_proj"]
    with pytest.raises(FrozenInstanceError):
        plan.reproducible = True


def test_bf16_weights_are_used_as_they_lie_in_the_file() -> None:
    plan = plan_of("bf16")
    assert plan.copy_bytes == 0 and all(linear.copy == "none" for linear in plan.linears)
    weights = mamba2_weights(SMALL, "bf16")
    assert all(
        linear.copy is None and linear.weight is w
        for linear, (_, w) in zip(plan.prepare(weights).values(), weights.projections(), strict=True)
    )


@pytest.mark.parametrize("format", FORMATS)
def test_activations_of_each_role_are_as_the_checkpoint_was_quantised(format: str) -> None:
    kinds = {"fp8_tensor": "fp8_static", "fp8_channel": "fp8_per_row"}
    for policy, prompt in (
        (Policy(), kinds.get(format, "none")),
        (Policy(prompt="exact"), "none"),
        (Policy(step="exact"), kinds.get(format, "none")),
    ):
        for linear in plan_of(format, policy).linears:
            assert (linear.prompt, linear.step) == (prompt, "none"), policy
            assert linear.format == format
            assert (prompt == "none") or "W8A8" in linear.why


def test_formats_without_activation_scales_keep_their_activations() -> None:
    for format in W8A8:
        weights = mamba2_weights(SMALL, format, static=False)
        plan = make_plan(SMALL, weights, Policy(), device="cpu")
        assert [linear.prompt for linear in plan.linears] == ["none", "none"], format


def test_w4a4_keeps_bf16_activations_here_and_says_so() -> None:
    weights = mamba2_weights(SMALL, "nvfp4")
    one = weights.in_proj
    w4a4 = replace(weights, in_proj=Nvfp4(one.weight, one.scale, one.global_scale, torch.tensor(0.5)))
    plan = make_plan(SMALL, w4a4, Policy(), device="cpu", dtype=FP32)
    assert plan.linears[0].prompt == "none" and "FP4" in plan.linears[0].why and "FP4" not in plan.linears[1].why
    layer, twin = NemotronMamba2Layer(SMALL, w4a4, plan), rig("SMALL", "nvfp4", FP32).layer
    hidden = oracle.rows_of(SMALL, 40, 3)
    found = []
    for each in (layer, twin):
        pool = rig("SMALL", "nvfp4", FP32).pool()
        found.append(each(hidden, Batch.prefill(pool.acquire(), [40]), pool))
    assert same_bits(*found)  # an activation scale of a format that is not in use changes nothing


def test_the_fp8_copy_of_nvfp4_serves_prompt_rows_only_and_is_counted() -> None:
    r = rig("SMALL", "nvfp4", FP32, prompt="fp8")
    plan, base = r.layer.plan, plan_of("nvfp4", dtype=FP32)
    weights = [linear.shape[0] * linear.shape[1] for linear in plan.linears]
    assert plan.copy_bytes - base.copy_bytes >= sum(weights)  # one byte per weight more
    assert all(linear.prompt == "fp8_per_row" and "fp8" in linear.why for linear in plan.linears)
    hidden, pool = r.hidden(60, 1), r.pool()
    a, b = pool.acquire(2)
    truth = Sequence64(truth_of(r.config, r.weights)).feed(hidden)
    assert mixer_error(r.decode(pool, a, hidden), truth, hidden) <= tolerance("layer")  # step rows: the weight itself
    found = mixer_error(r.prefill(pool, b, hidden), truth, hidden)
    assert tolerance("layer") < found <= W8A8_AGAINST_STEP  # prompt rows: FP8 noise, and no more
    for format in ("bf16", "fp8_block"):  # nothing else is requantised by that name
        assert plan_of(format, Policy(prompt="fp8")) == plan_of(format)


def test_roles_can_be_bisected_apart() -> None:
    """prompt="exact" changes prompt rows of a W8A8 checkpoint, and not one bit of its step rows."""
    for format in W8A8:
        runs = []
        for prompt in ("checkpoint", "exact"):
            r = rig("SMALL", format, FP32, prompt=prompt, reproducible=True)
            pool, hidden = r.pool(), r.hidden(30, 1)
            a, b = pool.acquire(2)
            runs.append((r.prefill(pool, a, hidden), r.decode(pool, b, hidden)))
        assert same_bits(runs[0][1], runs[1][1]) and not same_bits(runs[0][0], runs[1][0])
        truth = Sequence64(truth_of(r.config, r.weights, exact=True)).feed(hidden)
        assert mixer_error(runs[1][0], truth, hidden) <= tolerance("layer")


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, torch.float16])
def test_activations_that_nothing_serves_are_refused_while_planning(dtype: torch.dtype) -> None:
    with pytest.raises(NoKernel, match=str(dtype).removeprefix("torch.")):
        plan_of("bf16", dtype=dtype)


@pytest.mark.parametrize(("field", "size"), [("mamba_head_dim", 24), ("ssm_state_size", 48)])
def test_a_mixer_that_no_gpu_kernel_takes_is_refused_while_planning(field: str, size: int) -> None:
    config = replace(SMALL, **{field: size})
    weights = mamba2_weights(config, "bf16", 0)
    with pytest.raises(NoKernel, match=f"{size}.*device='cpu'"):
        make_plan(config, weights, Policy(memory_bytes=1 << 30), device="cuda")


@pytest.mark.parametrize(
    "wrong",
    [{"prompt": "fp4"}, {"step": "fp8"}, {"kv": "int8"}, {"state_dtype": "auto"}, {"state_dtype": torch.float64}],
)
def test_a_policy_that_means_nothing_is_refused_by_name(wrong: dict) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Policy(**wrong)


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", ["checkpoint", "fp8"])
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("format", FORMATS)
def test_copy_bytes_are_what_is_copied(format: str, dtype: torch.dtype, prompt: str) -> None:
    """With memory for all copies, for one, and for none."""
    weights = mamba2_weights(SMALL, format)
    wanted = make_plan(
        SMALL, weights, Policy(prompt=prompt), device="cpu", dtype=dtype, budget_bytes=1 << 30
    ).copy_bytes
    for budget in (1 << 30, wanted, max(wanted - 1, 0), wanted // 2, 0):
        plan = make_plan(SMALL, weights, Policy(prompt=prompt), device="cpu", dtype=dtype, budget_bytes=budget)
        made = 0
        for linear in plan.prepare(weights).values():
            made += 0 if linear.copy is None else linear.copy.nbytes
            made += 0 if linear.prompt_weight is None else linear.prompt_weight.nbytes
            made += sum(t.nbytes for t in linear.packed or ())
        scales = 4 * sum(linear.shape[0] for linear in plan.linears)  # of an FP8 copy, not counted to the byte
        assert abs(made - plan.copy_bytes) <= (scales if prompt == "fp8" else 0), budget
        assert plan.copy_bytes <= budget, budget


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("format", FORMATS)
def test_results_are_the_same_without_memory_for_copies(format: str, dtype: torch.dtype) -> None:
    """bf16 copies round a quantised weight once; without them it is dequantised exactly."""
    rich, poor = rig("SMALL", format, dtype), rig("SMALL", format, dtype, memory_bytes=1)
    assert poor.layer.plan.copy_bytes == 0
    hidden = rich.hidden(70, 1)
    for r in (rich, poor):
        pool = r.pool()
        a, b = pool.acquire(2)
        allowed = tolerance("layer", dtype, format=format, role="prompt")
        assert mixer_error(r.prefill(pool, a, hidden), Sequence64(r.truth).feed(hidden), hidden) <= allowed
        truth = Sequence64(r.truth).feed(hidden[:30], "step")
        assert mixer_error(r.decode(pool, b, hidden[:30]), truth, hidden[:30]) <= tolerance("layer", dtype)


def test_no_memory_is_said_where_a_copy_is_missing_and_only_there() -> None:
    poor = Policy(memory_bytes=1)
    assert all("no memory" in linear.why for linear in plan_of("nvfp4", poor).linears)
    assert all("no memory" not in linear.why for linear in plan_of("nvfp4").linears)
    for linear in plan_of("bf16", poor).linears:  # needs no copy, so nothing is missing
        assert "no memory" not in linear.why and "every call" not in linear.why


def test_the_budget_of_a_model_goes_to_its_layers_in_order() -> None:
    config, weights = small_model("nvfp4", "nvfp4", "nvfp4")
    free = plan_model(config, weights, Policy(), device="cpu")
    per_layer = free.layers[0].copy_bytes
    assert per_layer > 0 and free.copy_bytes == 3 * per_layer
    assert free.weight_bytes == sum(w.nbytes for w in (*weights.layers, weights.embeddings, weights.lm_head))
    tight = plan_model(config, weights, Policy(memory_bytes=free.weight_bytes + per_layer + 1), device="cpu")
    assert [plan.copy_bytes for plan in tight.layers[:3]] == [per_layer, 0, 0]
    assert tight.weight_bytes + tight.copy_bytes <= tight.budget_bytes == free.weight_bytes + per_layer + 1


# -- explain -----------------------------------------------------------------------------------------------------------


def test_explain_names_every_projection_its_format_its_bytes_and_the_reason() -> None:
    config, weights = small_model("fp8_tensor", "nvfp4", "nvfp4", "bf16")
    plan = plan_model(config, weights, Policy(reproducible=True), device="cpu")
    assert isinstance(plan, ModelPlan)
    text = plan.explain()
    lines = text.splitlines()
    assert "reference" in lines[0] and "cpu" in lines[0] and "bfloat16" in lines[0] and "reproducible" in lines[0]
    for format, count in (("bf16", 10), ("fp8_tensor", 2), ("nvfp4", 4)):  # 2 + 4 + 2 + 2 in bf16
        row = next(line for line in lines if line.split()[:2] == [format, str(count)])
        held = sum(p.nbytes for w in weights.layers for _, p in w.projections() if p.format == format)
        held += weights.embeddings.nbytes + weights.lm_head.nbytes if format == "bf16" else 0
        number, unit = row.split()[-2:]
        scale = {"B": 1, "kB": 1e3, "MB": 1e6}[unit]
        assert abs(float(number) * scale - held) <= 0.01 * held, row
    for name in ("in_proj", "out_proj", "q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj", "lm_head"):
        assert any(name in line for line in lines), name
    assert any(line.startswith("M 1–2") and "nvfp4" in line and "bfloat16 copy" in line for line in lines)
    assert any(line.startswith("M 0") and "W8A8" in line and "fp8_static" in line for line in lines)
    assert "no memory" not in text
    poor = plan_model(config, weights, Policy(memory_bytes=1), device="cpu").explain()
    assert "no memory for a copy" in poor and "copies 0 B" in poor
    assert "FP8 copy" in plan_model(config, weights, Policy(prompt="fp8"), device="cpu").explain()


# -- abilities ---------------------------------------------------------------------------------------------------------


def test_the_mamba_layer_can_do_everything() -> None:
    can = NemotronMamba2Layer.capabilities
    assert can == rig("SMALL").layer.capabilities
    assert (can.kind, can.state, can.kv, can.max_sequences, can.why) == ("M", True, False, None, ())
    assert can.verify and can.resume and can.graph and can.graph_survives
    assert NemotronMamba2Layer.host_step is None


def test_combine_keeps_what_all_can_do_and_every_reason() -> None:
    mamba = Capabilities("M", state=True)
    attention = Capabilities("*", kv=True, max_sequences=64, graph=False, why=(("graph", "scales not frozen"),))
    odd = Capabilities(
        "E", max_sequences=8, verify=False, resume=False, graph_survives=False, why=(("verify", "no rollback"),)
    )
    whole = combine([mamba, attention, mamba, odd, attention])
    assert whole.kind == "M*ME*" and whole.state and whole.kv and whole.max_sequences == 8
    assert (whole.verify, whole.resume, whole.graph, whole.graph_survives) == (False,) * 4
    assert whole.why == (("graph", "*: scales not frozen"), ("verify", "E: no rollback"))  # each reason once
    assert combine([mamba, mamba]) == Capabilities("MM", state=True)
    nothing = combine([])
    assert not nothing.state and not nothing.kv and nothing.max_sequences is None and nothing.verify
    for i, first in enumerate((mamba, attention, odd)):
        for second in (mamba, attention, odd)[i:]:
            a, b = combine([first, second]), combine([second, first])
            assert replace(a, kind="", why=()) == replace(b, kind="", why=()) and set(a.why) == set(b.why)


def test_a_host_step_is_three_calls() -> None:
    seen: list[str] = []
    hook = HostStep(*(lambda step, name=name: seen.append(name) for name in ("before", "undo", "after")))
    for call in (hook.before, hook.after, hook.undo):
        call(None)
    assert seen == ["before", "after", "undo"]


def test_layer_weights_are_the_ones_given() -> None:
    weights = mamba2_weights(SMALL, "fp8_block")
    layer = NemotronMamba2Layer(SMALL, weights, make_plan(SMALL, weights, Policy(), device="cpu"))
    assert layer.weights is weights and weights.nbytes == sum(
        t.nbytes for t in vars(weights).values() if isinstance(t, Tensor)
    ) + sum(w.nbytes for _, w in weights.projections())


def test_mixed_checkpoints_stay_mixed() -> None:
    """in_proj in one format, out_proj in another, every pair: the truth."""
    hidden = oracle.rows_of(SMALL, 40, 1)
    for first in FORMATS:
        for second in FORMATS:
            weights = replace(mamba2_weights(SMALL, first), out_proj=mamba2_weights(SMALL, second).out_proj)
            layer = NemotronMamba2Layer(SMALL, weights, make_plan(SMALL, weights, Policy(), device="cpu", dtype=FP32))
            pool = rig("SMALL").pool()
            found = layer(hidden, Batch.prefill(pool.acquire(), [40]), pool)
            role = "prompt" if {first, second} & set(W8A8) else "step"
            allowed = tolerance("layer", format="fp8_tensor", role=role)
            assert mixer_error(found, Sequence64(truth_of(SMALL, weights)).feed(hidden), hidden) <= allowed
