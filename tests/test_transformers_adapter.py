"""`accelerate` on models of transformers: same numbers, every way to generate, and nothing outside the instance."""

from __future__ import annotations

import copy
import io
import itertools
import math

import pytest
import torch
import transformers
from torch import Tensor, nn

from hf_models import CACHE, VOCAB, cache_for, lift_clamp, logits, quiet, random_model, tokens, twins
from models import relative_error
from nemotron_mamba2 import AdapterError, Model, NemotronMamba2Error, Policy, SamplingParams
from nemotron_mamba2.adapters.transformers import accelerate, restore
from nemotron_mamba2.cli import DEMO_MODEL as DEMO

PATTERNS = ("M*", "M-M*", "*M", "MEM*E", "MLE*")
TOLERANCE = 1e-5


def pair(pattern: str = "M-M*", **how) -> tuple[nn.Module, nn.Module]:
    """(the original, an equal model accelerated)."""
    original, ours = twins(pattern, **how)
    return original, accelerate(ours)


def generate(model: nn.Module, ids: Tensor, count: int = 12, **how) -> Tensor:
    torch.manual_seed(3)
    return model.generate(ids, max_new_tokens=count, **{"do_sample": False, **how})[:, ids.shape[1] :]


@pytest.fixture(scope="module")
def models():
    return pair("M-M*EM")


@pytest.fixture(scope="module")
def demo():
    quiet()
    model = transformers.AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()
    return lift_clamp(model), accelerate(copy.deepcopy(model))


# -- the same numbers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", PATTERNS)
def test_logits_equal_those_of_the_original(pattern):
    original, ours = pair(pattern)
    ids = tokens(2, 70)
    assert relative_error(logits(ours, ids), logits(original, ids)) < TOLERANCE


@pytest.mark.parametrize("cuts", [(64, 128, 192), (64, 65, 66), (1, 2, 3), (200,), (3, 8, 17, 100, 101)])
def test_5_a_sequence_in_segments_with_a_cache_equals_the_whole(models, cuts):
    original, ours = models
    ids = tokens(2, 210)
    cache = cache_for(ours)
    ends = [*cuts, 210]
    parts = [logits(ours, ids[:, a:b], cache) for a, b in zip([0, *cuts], ends, strict=True)]
    assert relative_error(torch.cat(parts, 1), logits(original, ids)) < TOLERANCE
    assert cache.get_seq_length() == 210


def test_bf16_logits_are_as_close_as_bf16_allows():
    original, ours = pair("M-M*", dtype=torch.bfloat16)
    ids = tokens(2, 50)
    assert relative_error(logits(ours, ids).float(), logits(original, ids).float()) < 2e-2


def test_64_greedy_tokens_of_the_demo_model(demo):
    original, ours = demo
    prompt = transformers.AutoTokenizer.from_pretrained(DEMO)(
        "The model reads the prompt once and", return_tensors="pt"
    )
    expected = generate(original, prompt.input_ids, 64)
    assert generate(ours, prompt.input_ids, 64).equal(expected)
    [own] = Model.from_checkpoint(DEMO, dtype=torch.float32).generate(
        [prompt.input_ids[0].tolist()], SamplingParams(max_tokens=64)
    )
    assert list(own.token_ids) == expected[0, : len(own.token_ids)].tolist()


@pytest.mark.parametrize("dt_bias", [-12.0, 4.0])
def test_1_the_limit_of_the_config_is_kept_in_every_path(dt_bias):
    """The original clamps dt at time_step_min whatever the config says, and only in prefill."""
    for limit in ((0.0, math.inf), (0.01, 0.05)):
        model = random_model("M*", time_step_limit=limit)
        expected = copy.deepcopy(model)
        for mixer in (model.model.layers[0].mixer, expected.model.layers[0].mixer):
            mixer.dt_bias.data.add_(dt_bias)
        model.model.layers[0].mixer.time_step_limit = (model.config.time_step_min, math.inf)  # as it is made
        expected.model.layers[0].mixer.time_step_limit = limit
        ids, cache = tokens(1, 40), cache_for(model)
        accelerate(model)
        parts = [logits(model, ids[:, :30], cache), *(logits(model, ids[:, t : t + 1], cache) for t in range(30, 40))]
        assert relative_error(torch.cat(parts, 1), logits(expected, ids)) < TOLERANCE


def test_a_limit_set_on_the_mixer_by_hand_is_kept():
    model = random_model("M*")
    model.model.layers[0].mixer.time_step_limit = (0.02, 0.03)
    ids = tokens(1, 30)
    expected = logits(model, ids)
    assert relative_error(logits(accelerate(model), ids), expected) < TOLERANCE


# -- generate ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"do_sample": True, "temperature": 0.9, "top_k": 20},
        {"num_beams": 4},
        {"num_beams": 3, "do_sample": True},
        {"num_beams": 4, "num_return_sequences": 3},
        {"do_sample": True, "num_return_sequences": 3},
        {"prefill_chunk_size": 7},
        {"cache_implementation": "static"},
        {"use_cache": False},
    ],
    ids=lambda how: " ".join(f"{k}={v}" for k, v in how.items()) or "greedy",
)
def test_generate_gives_the_tokens_of_the_original(models, how):
    original, ours = models
    ids = tokens(2, 19)
    assert generate(ours, ids, **how).equal(generate(original, ids, **how))


def test_61_beams_equal_a_search_without_any_cache(models):
    original, ours = models
    ids, count, width = tokens(1, 9), 16, 4
    beams, scores = ids, torch.zeros(1)
    for _ in range(count):
        logs = logits(original, beams)[:, -1].log_softmax(-1)
        scores, best = (scores[:, None] + logs).flatten().topk(width)
        beams = torch.cat((beams[best // VOCAB], (best % VOCAB)[:, None]), 1)
    found = generate(ours, ids, count, num_beams=width, num_return_sequences=width)
    assert found.equal(beams[:, ids.shape[1] :])


def test_61_wide_beams_equal_brute_force():
    """As many beams as there are prefixes lose nothing, so the best of all sequences must come out."""
    original, ours = pair("M-M*", vocab_size=5)
    ids = 1 + tokens(1, 6) % 4  # 0 is padding
    every = torch.tensor(list(itertools.product(range(5), repeat=3)))
    logs = logits(original, torch.cat((ids.expand(len(every), -1), every), 1))[:, 5:-1].log_softmax(-1)
    scores = logs.gather(-1, every[..., None]).squeeze(-1).sum(-1)
    best = every[scores.topk(4).indices]
    assert generate(ours, ids, 3, num_beams=25, num_return_sequences=4).equal(best)


# -- padding -----------------------------------------------------------------------------------------------------------


def padded(lengths, side: str) -> tuple[list[Tensor], Tensor, Tensor]:
    """(single prompts, the batch, its mask). The embedding of the padding is large."""
    singles, width = [tokens(1, n, seed=n) for n in lengths], max(lengths)
    ids, mask = torch.zeros(len(lengths), width, dtype=torch.long), torch.zeros(len(lengths), width, dtype=torch.long)
    for i, single in enumerate(singles):
        here = slice(width - lengths[i], width) if side == "left" else slice(0, lengths[i])
        ids[i, here], mask[i, here] = single[0], 1
    return singles, ids, mask


@pytest.mark.parametrize("side", ["left", "right"])
def test_25_26_ragged_prompts_in_a_batch_equal_single_runs(models, side):
    original, ours = models
    singles, ids, mask = padded([3, 40, 17], side)
    found = logits(ours, ids, attention_mask=mask)
    for i, single in enumerate(singles):
        live = found[i][mask[i].bool()]
        assert relative_error(live, logits(original, single)[0]) < TOLERANCE
        assert relative_error(live, logits(ours, single)[0]) < TOLERANCE


def test_25_a_left_padded_batch_generates_what_single_runs_do(models):
    _, ours = models
    singles, ids, mask = padded([3, 40, 17], "left")
    batch = generate(ours, ids, attention_mask=mask)
    for row, single in zip(batch, singles, strict=True):
        assert row.equal(generate(ours, single)[0])
    assert generate(ours, ids, attention_mask=mask, prefill_chunk_size=6).equal(batch)


def test_27_padding_counts_in_a_batch_of_one_and_in_cached_steps(models):
    original, ours = models
    [single], ids, mask = padded([12], "left")
    ids, mask = (
        torch.cat((torch.zeros(1, 7, dtype=torch.long), ids), 1),
        torch.cat((torch.zeros_like(mask[:, :7]), mask), 1),
    )
    cache = cache_for(ours)
    more = tokens(1, 3)
    first = logits(ours, ids, cache, attention_mask=mask)
    # Three rows with the mask of the whole sequence, its padding included.
    second = logits(ours, more, cache, attention_mask=torch.cat((mask, torch.ones_like(more)), 1))
    expected = logits(original, torch.cat((single, more), 1))
    assert relative_error(torch.cat((first[:, 7:], second), 1), expected) < TOLERANCE


def test_a_right_padded_batch_goes_on_as_single_runs(models):
    """The original decays its state over the padding; ours never sees it."""
    _, ours = models
    singles, ids, mask = padded([5, 30], "right")
    cache, more = cache_for(ours), tokens(2, 4)
    logits(ours, ids, cache, attention_mask=mask)
    found = logits(ours, more, cache, attention_mask=torch.cat((mask, torch.ones_like(more)), 1))
    for i, single in enumerate(singles):
        expected = logits(ours, torch.cat((single, more[i : i + 1]), 1))[:, -4:]
        assert relative_error(found[i : i + 1], expected) < TOLERANCE


def test_padding_inside_a_cached_segment_has_no_rows(models):
    """Rows of one sequence may be padding while another goes on."""
    _, ours = models
    ids, more = tokens(2, 20), tokens(2, 5)
    cache, mask = cache_for(ours), torch.ones(2, 25, dtype=torch.long)
    mask[0, 20:23] = 0
    logits(ours, ids, cache)
    found = logits(ours, more, cache, attention_mask=mask)
    expected = logits(ours, torch.cat((ids[:1], more[:1, 3:]), 1))[:, -2:]
    assert relative_error(found[:1, 3:], expected) < TOLERANCE


# -- the cache's contract ----------------------------------------------------------------------------------------------


def filled(model: nn.Module, ids: Tensor, *, recording: bool = False):
    cache = cache_for(model)
    if recording:
        cache.activate_past_recording()
    logits(model, ids, cache)
    return cache


def continues(model: nn.Module, cache, *rows: Tensor) -> None:
    """The cache is that of these sequences, each [length]."""
    more = tokens(len(rows), 4, seed=9)
    found = logits(model, more, cache)
    for i, row in enumerate(rows):
        expected = logits(model, torch.cat((row, more[i]))[None])[0, -4:]
        assert relative_error(found[i], expected) < TOLERANCE


def test_95_reorder_moves_every_state(models):
    _, ours = models
    ids = tokens(3, 21)
    cache = filled(ours, ids)
    cache.reorder_cache(torch.tensor([2, 0, 0]))
    assert cache.get_seq_length() == 21
    continues(ours, cache, ids[2], ids[0], ids[0])


def test_95_repeat_and_select_change_the_batch(models):
    _, ours = models
    ids = tokens(2, 21)
    mamba = [0, 2, 5]
    cache = filled(ours, ids)
    layers = [cache.layers[i] for i in mamba]
    for layer in layers:
        layer.batch_repeat_interleave(2)
        assert layer.pool.slots == 4
        layer.batch_select_indices(torch.tensor([3, 0, 1]))
        assert layer.pool.slots == 3
    attention = cache.layers[3]
    attention.batch_repeat_interleave(2)
    attention.batch_select_indices(torch.tensor([3, 0, 1]))
    continues(ours, cache, ids[1], ids[0], ids[0])


@pytest.mark.parametrize("back", range(9))
def test_95_crop_within_the_last_forward_is_exact(models, back):
    _, ours = models
    ids = tokens(2, 29)
    cache = filled(ours, ids[:, :21])
    logits(ours, ids[:, 21:], cache)
    cache.crop(-back)
    assert cache.get_seq_length() == 29 - back
    continues(ours, cache, *ids[:, : 29 - back])


@pytest.mark.parametrize("length", [1, 5, 33, 60])
@pytest.mark.parametrize("back", [0, 1, 20, 32])
def test_95_a_recording_cache_takes_back_the_end_of_any_forward(models, length, back):
    _, ours = models
    if back > length:
        return
    ids = tokens(2, length)
    cache = filled(ours, ids, recording=True)
    cache.crop(-back)
    continues(ours, cache, *ids[:, : length - back])


def test_crop_after_single_steps_takes_back_the_last(models):
    _, ours = models
    ids = tokens(1, 30)
    cache = filled(ours, ids[:, :20])
    for t in range(20, 30):
        logits(ours, ids[:, t : t + 1], cache)
    cache.crop(-1)
    continues(ours, cache, ids[0, :29])


def test_crop_counts_positions_of_padded_rows(models):
    _, ours = models
    ids = tokens(2, 26)
    mask = torch.ones(2, 26, dtype=torch.long)
    mask[0, 22] = 0  # a hole, as a padded segment makes it
    cache = filled(ours, ids[:, :20])
    logits(ours, ids[:, 20:], cache, attention_mask=mask)
    cache.crop(-2)
    mamba = cache.layers[0].pool
    assert [mamba.position(slot) for slot in range(2)] == [23, 24]


def test_95_reset_starts_anew_and_takes_another_batch(models):
    _, ours = models
    cache = filled(ours, tokens(3, 12))
    cache.reset()
    cache.layers[3] = cache_for(ours).layers[3]  # old versions only zero the keys, and keep their batch
    ids = tokens(2, 12)
    fresh = filled(ours, ids)
    assert logits(ours, ids, cache).equal(logits(ours, ids, cache_for(ours)))
    more = tokens(2, 2)
    assert logits(ours, more, cache).equal(logits(ours, more, fresh))


def test_95_a_deep_copy_goes_its_own_way(models):
    _, ours = models
    ids = tokens(1, 20)
    cache = filled(ours, ids)
    twin = copy.deepcopy(cache)
    logits(ours, tokens(1, 6), cache)
    continues(ours, twin, ids[0])


def test_rows_are_the_same_bits_in_any_batch():
    """Blocks alone: attention and the products of the other layers depend on the batch."""
    model = accelerate(random_model("M"), Policy(reproducible=True))
    block, together, alone = model.model.layers[0], cache_for(model), cache_for(model)
    hidden = torch.randn(3, 11, 64)
    for rows in (slice(0, 9), slice(9, 10), slice(10, 11)):
        with torch.no_grad():
            batch = block(hidden[:, rows], **{CACHE: together})
            assert block(hidden[1:2, rows], **{CACHE: alone}).equal(batch[1:2])


@pytest.mark.parametrize("how", [{"prompt_lookup_num_tokens": 6}, {"prompt_lookup_num_tokens": 20}])
def test_assisted_generation_gives_the_greedy_tokens(models, how):
    _, ours = models
    ids = tokens(1, 6).repeat(1, 5)
    assert generate(ours, ids, 40, **how).equal(generate(ours, ids, 40))


def test_an_assistant_model_gives_the_greedy_tokens(models):
    _, ours = models
    quiet()
    assistant = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=VOCAB, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
        )
    ).eval()
    ids = tokens(1, 15)
    assert generate(ours, ids, 30, assistant_model=assistant).equal(generate(ours, ids, 30))


# -- gradients, modules, weights ---------------------------------------------------------------------------------------


def test_training_mode_is_the_original(models):
    original, ours = twins("M-M*")
    accelerate(ours)
    ids = tokens(2, 20)
    for model in (original, ours):
        model.train()
        model(ids, labels=ids, use_cache=False).loss.backward()
    for (name, theirs), mine in zip(original.named_parameters(), ours.parameters(), strict=True):
        assert theirs.grad is not None and mine.grad.equal(theirs.grad), name


def test_a_backward_pass_in_eval_mode_raises():
    _, ours = pair("M*")
    with pytest.raises(AdapterError, match="no gradient in eval mode"):
        ours(tokens(1, 8), labels=tokens(1, 8), use_cache=False).loss.backward()


class Lora(nn.Module):
    """base(x) + b(a(x)), as adapter libraries wrap a projection."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base
        self.a, self.b = nn.Linear(base.in_features, rank, bias=False), nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x))


@pytest.mark.parametrize("names", [("in_proj",), ("out_proj",), ("in_proj", "out_proj")], ids=" ".join)
@pytest.mark.parametrize("late", [False, True])
def test_106_adapters_on_projections_are_called_and_equal_merged_weights(names, late):
    merged, ours = twins("M-M*")
    if late:
        accelerate(ours)
    for plain, layer in zip(merged.model.layers, ours.model.layers, strict=True):
        for name in names if hasattr(layer.mixer, "in_proj") else ():
            lora = Lora(getattr(layer.mixer, name))
            setattr(layer.mixer, name, lora)
            getattr(plain.mixer, name).weight.data.add_(lora.b.weight.data @ lora.a.weight.data)
    if not late:
        accelerate(ours)
    singles, ids, mask = padded([4, 30], "left")
    assert relative_error(logits(ours, ids, attention_mask=mask)[1], logits(merged, singles[1])[0]) < TOLERANCE
    assert generate(ours, ids, attention_mask=mask)[0].equal(generate(accelerate(merged), singles[0])[0])
    assert generate(ours, singles[1], num_beams=3).equal(generate(merged, singles[1], num_beams=3))


def test_hooks_and_biases_are_called():
    original, ours = pair("M*")
    calls = []
    layer = ours.model.layers[0]
    handles = [
        module.register_forward_hook(lambda module, args, out: calls.append(type(module).__name__))
        for module in (layer.norm, layer.mixer, layer.mixer.in_proj, layer.mixer.norm, layer.mixer.out_proj)
    ]
    ids = tokens(1, 11)
    assert relative_error(logits(ours, ids), logits(original, ids)) < TOLERANCE
    assert len(calls) == 5
    for handle in handles:
        handle.remove()
    logits(ours, ids)
    assert len(calls) == 5, "without hooks the block runs whole again"
    for model in (original, ours):
        mixer = model.model.layers[0].mixer
        mixer.in_proj.bias = nn.Parameter(torch.linspace(-1, 1, mixer.in_proj.out_features))
        mixer.out_proj.bias = nn.Parameter(torch.linspace(-1, 1, 64))
    assert relative_error(logits(ours, ids), logits(original, ids)) < TOLERANCE


def test_the_weights_are_the_models_own_and_changes_are_seen():
    original, ours = pair("M-M*")
    ids = tokens(1, 12)
    logits(ours, ids)
    for layer in (ours.model.layers[0], ours.model.layers[2]):
        made = layer.forward.__self__._layers[True][1]
        assert made.weights.in_proj.weight.data_ptr() == layer.mixer.in_proj.weight.data_ptr()
        assert made.weights.out_proj.weight.data_ptr() == layer.mixer.out_proj.weight.data_ptr()
        assert made.weights.A_log.data_ptr() == layer.mixer.A_log.data_ptr()
        assert not made.plan.copy_bytes
    state = {name: tensor * 1.1 for name, tensor in original.state_dict().items()}
    for model in (original, ours):
        model.load_state_dict(state)
    assert relative_error(logits(ours, ids), logits(original, ids)) < TOLERANCE
    for model in (original, ours):
        mixer = model.model.layers[0].mixer
        mixer.D = nn.Parameter(mixer.D.detach() + 1)
        mixer.in_proj.weight.data = mixer.in_proj.weight.data.flip(0)
    assert relative_error(logits(ours, ids), logits(original, ids)) < TOLERANCE
    assert ours.to(torch.bfloat16).generate(ids, max_new_tokens=2, do_sample=False).shape == (1, 14)


def test_copies_and_files_of_an_accelerated_model(tmp_path):
    original, ours = pair("M-M*")
    ids = tokens(1, 12)
    expected = logits(ours, ids)
    twin = copy.deepcopy(ours)
    ours.model.layers[0].mixer.D.data.add_(5)
    assert logits(twin, ids).equal(expected) and not logits(ours, ids).equal(expected)
    assert list(ours.state_dict()) == list(original.state_dict())
    twin.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert relative_error(logits(lift_clamp(loaded), ids), expected) < TOLERANCE
    restore(twin)
    assert (
        relative_error(logits(twin, ids), expected) < TOLERANCE and twin.model.layers[0].__dict__.get("forward") is None
    )


def test_a_conversation_goes_on_with_its_cache(models):
    original, ours = models
    first, more, cache = tokens(2, 20), tokens(2, 11), cache_for(ours)
    torch.manual_seed(0)
    answer = ours.generate(first, max_new_tokens=6, do_sample=False, **{CACHE: cache})
    ids = torch.cat((answer, more), 1)
    assert generate(ours, ids, 6, **{CACHE: cache}).equal(generate(original, ids, 6))


def test_compiled_and_pickled():
    original, ours = pair("M-M*")
    ids = tokens(1, 20)
    expected = logits(original, ids)
    assert relative_error(logits(torch.compile(ours, backend="eager"), ids), expected) < TOLERANCE
    file = io.BytesIO()
    torch.save(ours, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert loaded.model.layers[0].forward.__self__.block is loaded.model.layers[0]
    assert relative_error(logits(loaded, ids), expected) < TOLERANCE


def test_device_hooks_around_a_block_stay_outermost():
    """As libraries that move inputs between devices put them: forward wraps what `_old_forward` keeps."""
    original, ours = twins("M-M*")
    calls = []
    for block in ours.model.layers:
        block._old_forward = block.forward

        def wrapped(*args, block=block, **kwargs):
            calls.append(block.layer_idx)
            return block._old_forward(*args, **kwargs)

        block.forward = wrapped
    accelerate(ours)
    ids = tokens(1, 20)
    assert relative_error(logits(ours, ids), logits(original, ids)) < TOLERANCE and calls == [0, 1, 2, 3]
    assert ours.model.layers[0]._old_forward.__self__.shared.seen_positions == 0
    restore(ours)
    assert logits(ours, ids).equal(logits(original, ids)) and len(calls) == 8


def test_hidden_states_and_other_outputs_come_as_before(models):
    ids = tokens(2, 14)
    with torch.no_grad():
        theirs, mine = (model(ids, output_hidden_states=True, use_cache=False) for model in models)
    assert len(mine.hidden_states) == len(theirs.hidden_states)
    for a, b in zip(mine.hidden_states, theirs.hidden_states, strict=True):
        assert relative_error(a, b) < TOLERANCE


def test_under_inference_mode_and_without_any_context(models):
    _, ours = models
    ids = tokens(1, 20)
    expected, cache = logits(ours, ids), cache_for(ours)
    with torch.inference_mode():
        first = logits(ours, ids[:, :12], cache)
    second = ours(ids[:, 12:], use_cache=True, **{CACHE: cache}).logits  # gradients are on
    assert relative_error(torch.cat((first, second.detach()), 1), expected) < TOLERANCE


# -- nothing else ------------------------------------------------------------------------------------------------------


def test_only_this_instance_changes_and_restore_undoes_everything():
    from transformers.models.nemotron_h import modeling_nemotron_h as module

    classes = (module.NemotronHBlock, module.NemotronHMamba2Mixer, module.NemotronHForCausalLM)
    before = [dict(vars(cls)) for cls in classes]
    original, ours = twins("M-M*")
    held = {name: set(vars(part)) for name, part in ours.named_modules()}
    accelerate(ours)
    assert [dict(vars(cls)) for cls in classes] == before
    assert all("forward" not in vars(part) for part in original.modules())
    assert accelerate(ours, Policy(reproducible=True)) is ours
    assert not ours._is_stateful and original._is_stateful
    assert restore(ours) is ours
    assert {name: set(vars(part)) for name, part in ours.named_modules()} == held
    ids = tokens(1, 20)
    assert logits(ours, ids).equal(logits(original, ids)) and ours._is_stateful
    restore(ours)


def test_a_part_of_a_model_and_a_model_without_head():
    original, ours = twins("M-M*")
    accelerate(ours.model)
    ids = tokens(1, 20)
    assert relative_error(logits(ours, ids), logits(original, ids)) < TOLERANCE
    restore(ours)
    assert logits(ours, ids).equal(logits(original, ids))


# -- refusals, by name -------------------------------------------------------------------------------------------------


def test_refused_at_once():
    model = random_model("M*")
    with pytest.raises(AdapterError, match="no Mamba-2 layer"):
        accelerate(nn.Linear(2, 2))
    with pytest.raises(AdapterError, match="kv='checkpoint'"):
        accelerate(model, Policy(kv="checkpoint"))
    with pytest.raises(AdapterError, match="draft_rows"):
        accelerate(model, draft_rows=33)
    with pytest.raises(NemotronMamba2Error, match="float16"):
        accelerate(random_model("M*", dtype=torch.float16))
    with torch.device("meta"):
        offloaded = transformers.NemotronHForCausalLM(model.config)
    with pytest.raises(AdapterError, match="meta"):
        accelerate(offloaded)
    assert all("forward" not in vars(part) for part in (*offloaded.modules(), *model.modules()))


def test_refused_when_used(models):
    original, ours = models
    ids = tokens(1, 20)
    theirs = filled(original, ids)
    with pytest.raises(AdapterError, match="filled without acceleration"):
        logits(ours, ids, theirs)
    mine = filled(ours, ids)
    with pytest.raises(AdapterError, match="state of an accelerated model"):
        logits(original, ids[:, :1], mine)
    with pytest.raises(AdapterError, match="state of an accelerated model"):
        logits(original, ids[:, :3], filled(ours, ids))
    with pytest.raises(AdapterError, match="1 sequences, this forward has 2"):
        logits(ours, tokens(2, 3), filled(ours, ids))
    with pytest.raises(AdapterError, match="can go back 0"):
        filled(ours, ids).crop(-3)
    with pytest.raises(AdapterError, match="can go back 32"):
        filled(ours, tokens(1, 50), recording=True).crop(-33)
    with pytest.raises(AdapterError, match="another model"):
        logits(accelerate(random_model("M-M*EM", ssm_state_size=32)), ids, filled(ours, ids))
    with pytest.raises(AdapterError, match="DynamicCache"):
        ours.model.layers[0](torch.randn(1, 3, 64), **{CACHE: transformers.DynamicCache()})
    with pytest.raises(AdapterError, match="seq_idx"):
        ours.model.layers[0](torch.randn(1, 3, 64), seq_idx=torch.zeros(1, 3))


def test_a_forward_that_ended_midway_spoils_the_cache(models):
    _, ours = models
    ids = tokens(1, 20)
    cache = filled(ours, ids)
    mlp = ours.model.layers[1].mixer
    mlp.forward = lambda x: (_ for _ in ()).throw(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        logits(ours, ids[:, :4], cache)
    del mlp.forward
    with pytest.raises(AdapterError, match="ended midway"):
        logits(ours, ids[:, :4], cache)


def test_a_cache_of_eval_mode_is_refused_in_training_mode():
    _, ours = pair("M*")
    cache = filled(ours, tokens(1, 9))
    with pytest.raises(AdapterError, match="training mode"):
        logits(ours.train(), tokens(1, 2), cache)
