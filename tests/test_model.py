"""The whole model: the laws hold through every pattern, pools never leak, and nothing waits for a device."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from models import (
    HIDDEN,
    LATENT,
    LAYERS,
    PATTERNS,
    REPRODUCIBLE,
    VOCAB,
    decode,
    make_caches,
    make_config,
    make_model,
    make_weights,
    prefill,
    random_tokens,
    relative_error,
)
from nemotron_mamba2.batch import Batch
from nemotron_mamba2.config import MlpConfig, Policy
from nemotron_mamba2.errors import (
    CheckpointError,
    ConfigError,
    OutOfPages,
    ShapeError,
    SnapshotMismatch,
    StateError,
)
from nemotron_mamba2.formats import FORMATS, Plain, dequantize
from nemotron_mamba2.model import Caches, NemotronH, cache_bytes
from nemotron_mamba2.ops.reference import CHUNK_ROWS, quantize
from nemotron_mamba2.plan import Capabilities, HostStep, plan_model
from nemotron_mamba2.sampling import SamplingParams, sample

BF16 = torch.bfloat16
TOLERANCE = {torch.float32: 5e-6, BF16: 2e-2}


@pytest.fixture(scope="module")
def hybrid():
    """Every kind of layer, bf16, and bits that depend on nothing but the sequence."""
    return make_model("ME*-M*E", dtype=BF16, policy=REPRODUCIBLE, mtp=True)


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_86_prefill_equals_decode_for_every_pattern(pattern, dtype):
    model = make_model(pattern, dtype=dtype)
    caches = make_caches(model)
    tokens = random_tokens(50)
    a, b, c = caches.acquire(3)
    whole = prefill(model, caches, a, tokens)
    assert whole.dtype == torch.float32 and whole.shape == (50, VOCAB)
    mixed = torch.cat((prefill(model, caches, b, tokens[:19]), decode(model, caches, b, tokens[19:])))
    split = prefill(model, caches, c, tokens, splits=[1, 2, 5, 33])
    for found in (mixed, split):
        assert relative_error(found, whole) < TOLERANCE[dtype]


@pytest.mark.parametrize("window_rows", [1, 16])
@settings(max_examples=6)
@given(
    start=st.integers(0, 70),
    steps=st.lists(st.tuples(st.integers(1, 8), st.integers(0, 8)), min_size=1, max_size=4),
)
def test_verify_and_commit_has_the_bits_of_decode(hybrid, window_rows, start, steps):
    caches = make_caches(hybrid, window_rows=window_rows)
    tokens, wrong = random_tokens(130), random_tokens(8, seed=9)
    a, b = caches.acquire(2)
    if start:
        prefill(hybrid, caches, a, tokens[:start])
        caches.fork(a, b)
    at = start
    for rows, accepted in steps:
        accepted = min(accepted, rows)
        drafted = torch.cat((tokens[at : at + accepted], wrong))[:rows]
        found = hybrid.forward(drafted, Batch.verify([b], [rows]), caches, logits_rows="all")
        caches.commit([b], [accepted])
        assert found[:accepted].equal(decode(hybrid, caches, a, tokens[at : at + accepted])[:accepted])
        at += accepted
        assert caches.position(b) == at and len(caches.pages.held(b)) == caches.pages.pages_for(at)


def test_a_sequence_alone_has_the_bits_of_one_in_a_batch(hybrid):
    caches = make_caches(hybrid)
    lengths, slots = [3, 64, 40, 17], caches.acquire(4)
    prompts = [random_tokens(n + 9, seed=n) for n in lengths]
    ragged = Batch.prefill(slots, lengths)
    first = hybrid.forward(torch.cat([p[:n] for p, n in zip(prompts, lengths, strict=True)]), ragged, caches)
    steps = [
        hybrid.forward(
            torch.stack([p[n + t] for p, n in zip(prompts, lengths, strict=True)]), Batch.decode(slots), caches
        )
        for t in range(9)
    ]
    for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        alone = make_caches(hybrid)
        [slot] = alone.acquire(1)
        assert relative_error(first[i], prefill(hybrid, alone, slot, prompt[:length])[-1]) < TOLERANCE[BF16]
        steps_alone = decode(hybrid, alone, slot, prompt[length:])
        assert torch.stack([s[i] for s in steps]).equal(steps_alone)


@settings(max_examples=5)
@given(st.sets(st.integers(1, 4), max_size=4), st.integers(0, 10))
def test_a_prompt_split_at_chunks_has_the_same_bits(hybrid, cuts, extra):
    tokens = random_tokens(4 * CHUNK_ROWS + 1 + extra)
    caches = make_caches(hybrid)
    a, b = caches.acquire(2)
    whole = prefill(hybrid, caches, a, tokens)
    assert prefill(hybrid, caches, b, tokens, splits=[cut * CHUNK_ROWS for cut in sorted(cuts)]).equal(whole)


def test_25_26_ragged_prompts_equal_single_prompts():
    """Prompts of 3 and 40 tokens in one step, without a pad token between them."""
    model = make_model("M*E-M")
    caches = make_caches(model)
    short, long = random_tokens(3, seed=1), random_tokens(40, seed=2)
    a, b, c, d = caches.acquire(4)
    both = model.forward(torch.cat((short, long)), Batch.prefill([a, b], [3, 40]), caches, logits_rows="all")
    singles = torch.cat((prefill(model, caches, c, short), prefill(model, caches, d, long)))
    assert relative_error(both, singles) < TOLERANCE[torch.float32]
    for one, other in ((a, c), (b, d)):
        found, truth = caches.snapshot(one), caches.snapshot(other)
        for name, part in truth.state.tensors.items():
            used = part != 0 if name == "ssm" else torch.isfinite(part)
            assert relative_error(found.state.tensors[name][used], part[used]) < 1e-5 or not used.any()


@pytest.mark.parametrize("rows", [[128, 0, 128], [0, 5], [5, 0], [0, 0]])
def test_29_empty_sequences_in_a_batch(hybrid, rows):
    caches = make_caches(hybrid)
    slots = caches.acquire(len(rows))
    tokens = random_tokens(sum(rows))
    logits = hybrid.forward(tokens, Batch.prefill(slots, rows), caches)
    assert len(logits) == sum(n > 0 for n in rows)
    assert [caches.position(s) for s in slots] == rows
    follow = hybrid.forward(random_tokens(len(rows), seed=3), Batch.decode(slots), caches)
    for i, n in enumerate(rows):
        alone = make_caches(hybrid)
        [slot] = alone.acquire(1)
        prefill(hybrid, alone, slot, tokens[sum(rows[:i]) : sum(rows[:i]) + n]) if n else None
        assert decode(hybrid, alone, slot, random_tokens(len(rows), seed=3)[i : i + 1])[0].equal(follow[i])


def test_31_a_reused_slot_has_the_bits_of_a_fresh_pool(hybrid):
    """Pools begin full of NaN; 40 requests in random order reuse 3 slots and 20 pages."""
    caches = make_caches(hybrid, slots=3, pages=20)
    order = torch.Generator().manual_seed(0)
    live: list[int] = []
    for request in range(40):
        if len(live) == 3:
            caches.release([live.pop(int(torch.randint(3, (), generator=order)))])
        [slot] = caches.acquire(1)
        live.append(slot)
        tokens = random_tokens(1 + request % 7 * 9, seed=request)
        fresh = make_caches(hybrid, slots=1, pages=5)
        [only] = fresh.acquire(1)
        found, truth = (prefill(hybrid, c, s, tokens) for c, s in ((caches, slot), (fresh, only)))
        assert found.equal(truth) and torch.isfinite(found).all()
    caches.release(live)
    assert (caches.free_slots, caches.free_pages) == (3, 20)


def test_32_padding_rows_change_nothing(hybrid):
    caches, padded = make_caches(hybrid), make_caches(hybrid)
    tokens = random_tokens(30)
    [a], [b] = caches.acquire(1), padded.acquire(1)
    prefill(hybrid, caches, a, tokens[:20])
    prefill(hybrid, padded, b, tokens[:20])
    pad = padded.state.pad_slot
    for t in range(20, 30):
        plain = hybrid.forward(tokens[t : t + 1], Batch.decode([a]), caches)
        ids = torch.cat((tokens[t : t + 1], torch.zeros(7, dtype=torch.int64)))
        rows = hybrid.forward(ids, Batch.decode([b] + [pad] * 7), padded)
        assert rows[:1].equal(plain) and torch.isfinite(rows).all()


def test_snapshot_restore_and_preemption_have_the_same_bits(hybrid):
    caches = make_caches(hybrid)
    tokens = random_tokens(80)
    a, b = caches.acquire(2)
    prefill(hybrid, caches, a, tokens[:37])
    decode(hybrid, caches, a, tokens[37:40])
    saved = caches.snapshot(a)
    assert saved.position == 40 and saved.nbytes > 0
    truth = decode(hybrid, caches, a, tokens[40:60])
    prefill(hybrid, caches, b, random_tokens(55, seed=4))
    caches.restore(b, saved)
    assert decode(hybrid, caches, b, tokens[40:60]).equal(truth)
    other = make_caches(hybrid)
    caches.release([a, b])
    [c] = other.acquire(1)
    other.restore(c, saved)
    assert decode(hybrid, other, c, tokens[40:60]).equal(truth), "also in another pool of the same layout"


def test_a_snapshot_taken_on_the_way_is_the_state_of_that_position(hybrid):
    caches = make_caches(hybrid)
    tokens = random_tokens(100)
    a, b, c = caches.acquire(3)
    batch = Batch.prefill([a, b], [70, 30], snapshot_at=[64, None])
    cut = hybrid.forward(tokens, batch, caches)
    saved = caches.take_snapshot(a)
    assert saved.position == 64
    with pytest.raises(StateError, match="no snapshot was taken"):
        caches.take_snapshot(a)
    caches.restore(c, saved)
    assert prefill(hybrid, caches, c, tokens[64:70])[-1].equal(cut[0])


def test_61_beams_by_reorder_equal_brute_force(hybrid):
    """Four beams, 12 tokens: forks and reorders give the scores that running every hypothesis afresh gives."""
    prompt, beams = random_tokens(21), 4
    caches = make_caches(hybrid)
    slots = caches.acquire(beams)
    logits = prefill(hybrid, caches, slots[0], prompt)[-1:]
    for slot in slots[1:]:
        caches.fork(slots[0], slot)
    best = logits.log_softmax(-1)[0].topk(beams)
    scores, hypotheses = best.values, [[int(t)] for t in best.indices]
    for _ in range(12):
        ids = torch.tensor([h[-1] for h in hypotheses])
        logprobs = hybrid.forward(ids, Batch.decode(slots), caches).log_softmax(-1)
        picked = (scores[:, None] + logprobs).flatten().topk(beams)
        parents = [int(i) // VOCAB for i in picked.indices]
        hypotheses = [hypotheses[p] + [int(i) % VOCAB] for p, i in zip(parents, picked.indices, strict=True)]
        scores = picked.values
        caches.reorder(slots, parents)
    for slot, hypothesis, score in zip(slots, hypotheses, scores, strict=True):
        afresh = make_caches(hybrid)
        [only] = afresh.acquire(1)
        ids = torch.tensor(hypothesis)
        rows = torch.cat((prefill(hybrid, afresh, only, prompt)[-1:], decode(hybrid, afresh, only, ids[:-1])))
        assert torch.allclose(rows.log_softmax(-1).gather(1, ids[:, None]).sum(), score, atol=1e-4)
        assert decode(hybrid, caches, slot, ids[-1:]).equal(decode(hybrid, afresh, only, ids[-1:]))


def test_63_prompt_piece_decode_and_verifies_in_one_step(hybrid):
    caches, single = make_caches(hybrid), make_caches(hybrid)
    rows, slots = [64, 1, 3, 1], caches.acquire(4)
    tokens = [random_tokens(128, seed=n) for n in range(4)]
    starts = [64, 20, 13, 5]
    parts = [t[s : s + n] for t, s, n in zip(tokens, starts, rows, strict=True)]
    truths = []
    for slot, ids, start in zip(slots, tokens, starts, strict=True):
        prefill(hybrid, caches, slot, ids[:start])
    for i, part in enumerate(parts):
        [only] = single.acquire(1)
        prefill(hybrid, single, only, tokens[i][: starts[i]])
        truths.append(prefill(hybrid, single, only, part) if i == 0 else decode(hybrid, single, only, part))
    prompt, plain, three, one = slots
    batch = Batch.join(Batch.prefill([prompt], [64]), Batch.decode([plain]), Batch.verify([three, one], [3, 1]))
    found = hybrid.forward(torch.cat(parts), batch, caches, logits_rows="all")
    assert found.equal(torch.cat(truths))
    caches.commit([three, one], [2, 0])
    assert [caches.position(s) for s in slots] == [128, 21, 15, 5]


def test_90_layers_of_one_kind_may_differ_in_width():
    config = make_config("-M-E", layers={"E": LATENT})
    wide = replace(config, layers=(MlpConfig(HIDDEN, 96), config.layers[1], MlpConfig(HIDDEN, 32), config.layers[3]))
    weights = make_weights(wide)
    model = NemotronH(wide, weights, plan_model(wide, weights, Policy(), device="cpu"))
    caches = make_caches(model)
    [slot] = caches.acquire(1)
    assert torch.isfinite(prefill(model, caches, slot, random_tokens(9))).all()
    with pytest.raises(ShapeError, match=r"layer 0: MLP layer, weight up_proj: expected \[96, 64\], found \[32, 64\]"):
        other = replace(weights, layers=(weights.layers[2], *weights.layers[1:]))
        NemotronH(wide, other, plan_model(wide, other, Policy(), device="cpu"))


def test_92_attention_knows_no_positions():
    """Permuting the earlier tokens of an attention-only model leaves the last logits alone."""
    model = make_model("*")
    caches = make_caches(model)
    tokens = random_tokens(40)
    a, b = caches.acquire(2)
    moved = torch.cat((tokens[torch.randperm(39, generator=torch.Generator().manual_seed(0))], tokens[39:]))
    last, other = prefill(model, caches, a, tokens)[-1], prefill(model, caches, b, moved)[-1]
    assert relative_error(other, last) < 5e-6


def test_93_logits_come_from_lm_head_and_not_from_the_embeddings():
    config = make_config("M")
    weights = make_weights(config)
    head = Plain(weights.lm_head.weight * 2)
    caches = [make_caches(make_model("M")) for _ in range(2)]
    logits = []
    for own, cache in zip((weights, replace(weights, lm_head=head)), caches, strict=True):
        model = NemotronH(config, own, plan_model(config, own, Policy(), device="cpu"))
        logits.append(prefill(model, cache, cache.acquire(1)[0], random_tokens(5)))
    assert logits[1].equal(logits[0] * 2)


def test_logits_are_not_rounded_to_bf16():
    model = make_model("-", dtype=BF16)
    hidden = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(0)).to(BF16)
    truth = hidden.double() @ dequantize(model.weights.lm_head).double().T
    assert relative_error(model.logits(hidden), truth) < 1e-6


@pytest.mark.parametrize("format", FORMATS)
def test_every_format_runs_through_the_whole_model(format):
    """Steps keep their activations, so they equal a model of the dequantised weights."""
    model = make_model("ME*-", format=format, mtp=True, layers={"E": LATENT})
    config = model.config
    plain = make_weights(config, format=format)
    weights = replace(
        plain,
        lm_head=Plain(dequantize(plain.lm_head)),
        layers=tuple(
            replace(layer, **{name: Plain(dequantize(w)) for name, w in layer.projections()}) for layer in plain.layers
        ),
        mtp=None,
    )
    truth = NemotronH(config, weights, plan_model(config, weights, Policy(), device="cpu"))
    tokens = random_tokens(20)
    rows = [decode(m, c, c.acquire(1)[0], tokens) for m in (model, truth) for c in [make_caches(m)]]
    assert relative_error(rows[0], rows[1]) < 5e-6


@pytest.mark.parametrize("format", FORMATS)
def test_quantised_embeddings_are_decoded_row_by_row(format):
    config = make_config("-")
    weights = make_weights(config)
    table = quantize(torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(0)), format)
    own = replace(weights, embeddings=table)
    for policy in (Policy(), Policy(memory_bytes=1)):
        model = NemotronH(config, own, plan_model(config, own, policy, device="cpu"))
        ids = torch.tensor([0, 159, 130, 127, 128])
        assert model.embed(ids).equal(dequantize(table)[ids])


def test_fp8_keys_and_values_stay_close():
    model = make_model("*-*", policy=Policy(kv="checkpoint"))
    plain, fp8 = make_caches(model), make_caches(model, policy=Policy(kv="checkpoint"))
    assert fp8.pages.nbytes * 4 == plain.pages.nbytes
    tokens = random_tokens(60)
    found, truth = (
        torch.cat((prefill(model, c, slot, tokens[:50]), decode(model, c, slot, tokens[50:])))
        for c in (fp8, plain)
        for slot in c.acquire(1)
    )
    assert 0 < relative_error(found, truth) < 5e-2


# -- MTP ---------------------------------------------------------------------------------------------------------------


def test_the_mtp_head_reads_the_embedding_half_first():
    model = make_model("M*", mtp=True)
    w, eps = model.weights.mtp, model.config.layer_norm_epsilon

    def norm(x, weight):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight

    caches = make_caches(model)
    tokens, [slot] = random_tokens(13), caches.acquire(1)
    with caches.step(Batch.prefill([slot], [12])) as opened:
        hidden = model.final_norm(model.hidden_states(tokens[:12], opened))
        logits, new = model.draft(hidden, tokens[1:], opened, logits_rows="all")
        x = torch.cat((norm(model.embed(tokens[1:]), w.enorm), norm(hidden, w.hnorm)), -1) @ w.eh_proj.weight.T
        for layer in model.mtp.layers:
            x = layer(x, opened.step, *([opened.table] if layer.capabilities.kind == "*" else []))
    assert relative_error(new, norm(x, w.final_layernorm)) < 1e-6
    assert relative_error(logits, new @ model.weights.lm_head.weight.T) < 1e-6


def test_drafts_that_run_on_their_own_output_equal_a_run_over_all_rows(hybrid):
    """Rows of the head at positions p, p + 1: one by one through `draft_step`, and as one prompt."""
    caches = make_caches(hybrid)
    tokens = random_tokens(32)
    a, b = caches.acquire(2)
    with caches.step(Batch.prefill([a], [20])) as opened:
        hidden = hybrid.final_norm(hybrid.hidden_states(tokens[:20], opened))
        _, new = hybrid.draft(hidden, tokens[1:21], opened)
    with caches.draft_step([a], ahead=0) as opened:
        logits, _ = hybrid.draft(new[-1:], tokens[21:22], opened)
    with caches.step(Batch.prefill([b], [21])) as opened:
        hybrid.hidden_states(tokens[:21], opened)
        joined = torch.cat((hidden, new[-1:]))
        truth, _ = hybrid.draft(joined, tokens[1:22], opened)
    assert relative_error(logits, truth) < TOLERANCE[BF16]
    assert caches.position(a) == 20, "a draft moves no cursor"


def test_a_model_without_a_head_says_so():
    model = make_model("M")
    caches = make_caches(model)
    with caches.draft_step(caches.acquire(1), ahead=0) as opened, pytest.raises(CheckpointError, match="MTP"):
        model.draft(torch.zeros(1, HIDDEN), torch.zeros(1, dtype=torch.int64), opened)


# -- host work, devices, refusals --------------------------------------------------------------------------------------


class Fake:
    """A layer that does nothing but host work, which it writes down."""

    def __init__(self, name: str, log: list[str], *, fails: bool = False) -> None:
        self.capabilities = Capabilities(kind=name, max_sequences=2, why=(("max_sequences", "it is a fake"),))
        self.host_step = HostStep(
            *[lambda step, w=what: log.append(f"{w} {name}") for what in ("before", "undo", "after")]
        )
        self.fails = fails

    def __call__(self, hidden, step):
        if self.fails:
            raise RuntimeError("the layer failed")
        return hidden


def test_host_work_runs_around_every_step_and_is_undone_when_it_fails():
    model, log = make_model("M-"), []
    caches = make_caches(model)
    model.layers.insert(1, Fake("x", log))
    model.layers.append(Fake("y", log))
    slots = caches.acquire(1)
    decode(model, caches, slots[0], random_tokens(1))
    assert log == ["before x", "before y", "after x", "after y"]
    assert model.capabilities.max_sequences == 2
    assert ("max_sequences", "x: it is a fake") in model.capabilities.why
    log.clear()
    model.layers.append(Fake("z", log, fails=True))
    with pytest.raises(RuntimeError):
        decode(model, caches, slots[0], random_tokens(1))
    assert log == ["before x", "before y", "before z", "undo z", "undo y", "undo x"]
    with pytest.raises(StateError, match="failed"):
        decode(model, caches, slots[0], random_tokens(1))
    caches.release(slots)
    assert (caches.free_slots, caches.free_pages) == (6, 60)


def test_host_work_that_fails_to_begin_undoes_what_had_begun():
    model, log = make_model("-"), []
    model.layers += [Fake("x", log), Fake("y", log)]

    def refuse(step):
        raise RuntimeError("no room")

    model.layers[-1].host_step = replace(model.layers[-1].host_step, before=refuse)
    caches = make_caches(model)
    with pytest.raises(RuntimeError, match="no room"):
        decode(model, caches, caches.acquire(1)[0], random_tokens(1))
    assert log == ["before x", "undo x"]


@pytest.mark.parametrize("format", ["bf16", "nvfp4"])
def test_nothing_between_embeddings_and_sampler_reads_a_value_on_the_host(format):
    """Fake tensors have no values: whatever asks for one raises."""
    model = make_model("ME*-", dtype=BF16, format=format)
    caches = make_caches(model)
    a, b, c = caches.acquire(3)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = FakeCopy(mode)
        model, caches = fake(model), fake(caches)
        batch = Batch.join(Batch.prefill([a], [20]), Batch.decode([b]), Batch.verify([c], [3]))
        logits = model.forward(mode.from_tensor(random_tokens(24)), batch, caches)
        drawn = SamplingParams(temperature=0.7, top_k=5, top_p=0.9, seed=1, logprobs=2)
        picked = sample(logits, [drawn, SamplingParams(), drawn], positions=[0, 0, 0])
        assert picked.tokens.shape == (3,) and logits.shape == (3, VOCAB)
        with pytest.raises(torch._subclasses.fake_tensor.DataDependentOutputException):
            picked.tokens.tolist()


class FakeCopy:
    """Replaces every tensor that an object of ours holds, however deep, by a fake one."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self.mode, self.seen = mode, {}

    def __call__(self, thing):
        if isinstance(thing, torch.Tensor):
            return self.seen.setdefault(id(thing), self.mode.from_tensor(thing))
        if isinstance(thing, (list, tuple, dict)):
            return tree_map_only(lambda leaf: not isinstance(leaf, (str, int, float, type(None))), self, thing)
        if type(thing).__module__.startswith("nemotron_mamba2") and id(thing) not in self.seen:
            self.seen[id(thing)] = thing
            for name, value in vars(thing).items():
                if not isinstance(value, (str, int, float, type(None), torch.dtype, torch.device)):
                    object.__setattr__(thing, name, self(value))
        return thing


def test_what_cannot_be_is_refused_before_anything_is_written(hybrid):
    caches = make_caches(hybrid, slots=2, pages=3)
    a, b = caches.acquire(2)
    prefill(hybrid, caches, a, random_tokens(16))
    with pytest.raises(OutOfPages, match="4 pages wanted, 2 of 3"):
        hybrid.forward(random_tokens(34), Batch.prefill([a, b], [1, 33]), caches)
    with pytest.raises(ShapeError, match=r"needs tokens \[2\], found \[3\]"):
        hybrid.forward(random_tokens(3), Batch.prefill([a, b], [1, 1]), caches)
    assert decode(hybrid, caches, a, random_tokens(1)).isfinite().all(), "the sequence still lives"
    saved = caches.snapshot(a)
    prefill(hybrid, caches, b, random_tokens(16))
    with pytest.raises(OutOfPages):
        caches.restore(b, saved)
    assert caches.position(b) == 16
    with pytest.raises(SnapshotMismatch):
        make_caches(make_model("M*")).restore(0, saved)
    with pytest.raises(ConfigError, match="has 7 layers, the weights 6"):
        NemotronH(hybrid.config, replace(hybrid.weights, layers=hybrid.weights.layers[:-1]), hybrid.plan)
    with pytest.raises(StateError, match="slots"):
        Caches(caches.state, make_caches(hybrid, slots=5).pages)


@pytest.mark.parametrize("pattern", ["M", "*", "ME*-M*E"])
@pytest.mark.parametrize("policy", [Policy(), Policy(kv="checkpoint", state_dtype=BF16)])
def test_cache_bytes_are_known_before_allocating(pattern, policy):
    config = make_config(pattern, dtype=BF16, mtp=True)
    caches = Caches.for_model(config, slots=3, pages=5, policy=policy)
    assert caches.nbytes == cache_bytes(config, slots=3, pages=5, policy=policy)


def test_pools_begin_full_of_nan_here():
    caches = make_caches(make_model("M*"))
    assert all(math.isnan(float(t.flatten()[0])) for t in caches.pages.keys)
    assert LAYERS["M"] == caches.state.layout.config
