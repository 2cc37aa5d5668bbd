"""The transformers adapter on an NVIDIA GPU: the same ops through the same calls, so only what differs there.

Needs an NVIDIA GPU (`scripts/test-gpu`) and transformers.
"""

from __future__ import annotations

import itertools

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.gpu

SHAPE = {"hidden_size": 256, "mamba_num_heads": 8, "mamba_head_dim": 64, "n_groups": 2, "ssm_state_size": 128}
TOLERANCE = 2e-2  # bf16 on both sides


@pytest.fixture(scope="module")
def models():
    from hf_models import twins
    from nemotron_mamba2.adapters.transformers import accelerate

    original, ours = twins("M-M*", dtype=torch.bfloat16, **SHAPE)
    return original.cuda(), accelerate(ours.cuda())


def test_logits_chunks_and_padding(models):
    from hf_models import cache_for, logits, tokens
    from models import relative_error

    original, ours = models
    ids = tokens(2, 300).cuda()
    expected = logits(original, ids)
    assert relative_error(logits(ours, ids), expected) < TOLERANCE
    cache = cache_for(ours)
    ends = (0, 200, 201, 202, 207, 300)
    parts = [logits(ours, ids[:, a:b], cache) for a, b in itertools.pairwise(ends)]
    assert relative_error(torch.cat(parts, 1), expected) < TOLERANCE
    mask = torch.ones_like(ids)
    mask[0, :170] = 0
    found = logits(ours, ids, attention_mask=mask)
    assert relative_error(found[0, 170:], logits(original, ids[:1, 170:])[0]) < TOLERANCE


@pytest.mark.parametrize("how", [{}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 20}, {"do_sample": True}])
def test_every_way_to_generate(models, how):
    from hf_models import tokens

    ids = tokens(1, 40).cuda()
    assert models[1].generate(ids, max_new_tokens=20, **{"do_sample": False, **how}).shape == (1, 60)


def test_crop_takes_back_drafted_tokens(models):
    from hf_models import cache_for, logits, tokens
    from models import relative_error

    _, ours = models
    ids, cache, plain = tokens(1, 60).cuda(), cache_for(ours), cache_for(ours)
    for held in (cache, plain):
        logits(ours, ids[:, :50], held)
    logits(ours, ids[:, 50:57], cache)
    cache.crop(-7)
    for t in range(50, 60):
        one = ids[:, t : t + 1]
        found, expected = logits(ours, one, cache), logits(ours, one, plain)
        # The recurrence gives the same bits; attention over cropped keys may choose another kernel.
        assert relative_error(found, expected) < TOLERANCE


@pytest.mark.parametrize("layout", ["nano_4b_fp8", "nano_9b_v2_nvfp4", "lightning_nvfp4", "super_nvfp4"])
def test_quantised_layouts_load_and_agree_with_the_cpu(layout, tmp_path):
    from checkpoints import write_checkpoint
    from hf_models import logits, quiet, tokens
    from models import relative_error
    from nemotron_mamba2 import Policy
    from nemotron_mamba2.adapters.transformers import accelerate

    quiet()
    path = write_checkpoint(tmp_path, layout)
    load = transformers.AutoModelForCausalLM.from_pretrained
    ids, exact = tokens(1, 40), Policy(prompt="exact")
    expected = logits(accelerate(load(path), exact), ids)
    model = accelerate(load(path).cuda(), exact)
    # Two experts that are nearly tied may fall either way in bf16.
    assert relative_error(logits(model, ids.cuda()).cpu(), expected) < 0.1
    assert model.generate(ids.cuda(), max_new_tokens=4, do_sample=False, eos_token_id=None).shape == (1, 44)
