"""`Model.generate` and `Model.score`: the right tokens for many prompts at once, and nothing kept afterwards."""

from __future__ import annotations

import ast
import importlib
import math
import re
from pathlib import Path

import pytest
import torch

from checkpoints import small_config, write_checkpoint, write_model, write_tokenizer
from nemotron_mamba2 import decoding
from nemotron_mamba2.batch import Batch
from nemotron_mamba2.config import Policy
from nemotron_mamba2.errors import CheckpointError, NemotronMamba2Error, OutOfPages, RequestError
from nemotron_mamba2.generate import Model
from nemotron_mamba2.sampling import SamplingParams

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Every kind of layer, with a tokenizer, and bits that depend on nothing but the sequence."""
    path = write_model(tmp_path_factory.mktemp("model"), small_config("ME*-M", max_position_embeddings=1024))
    write_tokenizer(path)
    return Model.from_checkpoint(path, policy=Policy(reproducible=True))


def greedy(model: Model, prompt: list[int], count: int) -> list[int]:
    """The tokens of the plainest loop: the whole sequence afresh for every one."""
    ids = list(prompt)
    for _ in range(count):
        caches = model.caches(slots=1, tokens=len(ids))
        batch = Batch.prefill(caches.acquire(1), [len(ids)])
        ids.append(int(model.network.forward(torch.tensor(ids), batch, caches).argmax()))
    return ids[len(prompt) :]


def ids_of(*lengths: int) -> list[list[int]]:
    draw = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(5, 500, (n,), generator=draw).tolist() for n in lengths]


def test_greedy_tokens_equal_the_plainest_loop(model):
    prompts = ids_of(1, 17, 40)
    done = model.generate(prompts, SamplingParams(max_tokens=6, ignore_eos=True))
    for prompt, completion in zip(prompts, done, strict=True):
        assert list(completion.token_ids) == greedy(model, prompt, 6)
        assert (completion.finish_reason, completion.prompt_tokens) == ("length", len(prompt))
        assert completion.prompt_seconds > 0 and completion.decode_seconds > 0


def test_a_prompt_of_several_pieces_equals_one_piece(model, monkeypatch):
    [long, short] = ids_of(700, 9)
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    whole = [model.generate([prompt], params)[0].token_ids for prompt in (short, long)]
    monkeypatch.setattr(decoding, "PROMPT_ROWS", 300)  # pieces of 256 beside the short prompts
    together = model.generate([short, long, short], params)
    assert [done.token_ids for done in together] == [whole[0], whole[1], whole[0]]


def test_a_seeded_request_does_not_depend_on_its_batch(model):
    prompts = ids_of(5, 30, 12, 3)
    params = [SamplingParams(max_tokens=4 + i, temperature=1.2, top_p=0.9, seed=i, ignore_eos=True) for i in range(4)]
    together = model.generate(prompts, params)
    for prompt, request, completion in zip(prompts, params, together, strict=True):
        assert model.generate([prompt], request)[0].token_ids == completion.token_ids


def test_sequences_wait_when_slots_or_pages_are_few(model):
    prompts = ids_of(20, 3, 33, 8, 15)
    params = [SamplingParams(max_tokens=2 + 3 * (i % 3), ignore_eos=True) for i in range(5)]
    free = model.generate(prompts, params)
    for slots, tokens in ((2, 100), (5, 48)):
        caches = model.caches(slots=slots, tokens=tokens)
        before = (caches.free_slots, caches.free_pages)
        tight = model.generate(prompts, params, caches=caches)
        assert [c.token_ids for c in tight] == [c.token_ids for c in free]
        assert (caches.free_slots, caches.free_pages) == before
    with pytest.raises(OutOfPages, match="prompt 2 may come to 40 rows"):
        model.generate(prompts, params, caches=model.caches(slots=1, tokens=16))


def test_streaming_gives_every_token_and_the_same_text(model):
    events: list = []
    prompts = ["the first prompt", "and another, longer one"]
    done = model.generate(prompts, SamplingParams(max_tokens=9, temperature=1.5, seed=3), on_token=events.append)
    for i, completion in enumerate(done):
        mine = [e for e in events if e.index == i]
        assert tuple(e.token_id for e in mine) == completion.token_ids
        assert "".join(e.text for e in mine) == completion.text
        assert [e.finish_reason for e in mine] == [None] * (len(mine) - 1) + [completion.finish_reason]


def test_end_tokens_end_and_stay_out_of_the_text(model):
    [prompt] = ids_of(11)
    free = model.generate([prompt], SamplingParams(max_tokens=8, ignore_eos=True))[0]
    end = free.token_ids[3]
    first = free.token_ids.index(end)
    stopped = model.generate([prompt], SamplingParams(max_tokens=8, stop_token_ids=(end,), ignore_eos=True))[0]
    assert (stopped.token_ids, stopped.finish_reason) == (free.token_ids[: first + 1], "stop")
    assert stopped.text == model.tokenizer.decode(free.token_ids[:first])
    eos = model.config.eos_token_ids
    object.__setattr__(model.config, "eos_token_ids", (end,))
    try:
        assert model.generate([prompt], SamplingParams(max_tokens=8))[0].token_ids == stopped.token_ids
    finally:
        object.__setattr__(model.config, "eos_token_ids", eos)


def test_a_stop_string_ends_the_text_before_it(model):
    params = SamplingParams(max_tokens=24, temperature=1.0, seed=5, ignore_eos=True)
    free = model.generate(["abc"], params)[0]
    stop = free.text[len(free.text) // 2 :][:2]
    cut = model.generate(
        ["abc"], SamplingParams(max_tokens=24, temperature=1.0, seed=5, ignore_eos=True, stop=(stop,))
    )[0]
    assert stop and cut.text == free.text[: free.text.index(stop)]
    assert cut.finish_reason == "stop" and len(cut.token_ids) < 24


def test_logprobs_are_those_of_score(model):
    [prompt] = ids_of(19)
    done = model.generate([prompt], SamplingParams(max_tokens=5, logprobs=3, ignore_eos=True))[0]
    assert done.logprobs is not None and done.top_logprobs is not None
    [scores] = model.score([prompt + list(done.token_ids)])
    assert len(scores) == len(prompt) + 5 - 1
    assert done.logprobs == pytest.approx(scores[len(prompt) - 1 :], abs=0.03), "bf16 prefill against bf16 decode"
    for token, logprob, top in zip(done.token_ids, done.logprobs, done.top_logprobs, strict=True):
        assert len(top) == 3 and top[0] == (token, pytest.approx(logprob))
    assert model.generate([prompt], SamplingParams(max_tokens=1))[0].logprobs is None


def test_scores_are_the_log_probabilities_of_the_whole_sequence(model):
    [prompt] = ids_of(600)
    caches = model.caches(slots=1, tokens=600)
    batch = Batch.prefill(caches.acquire(1), [600])
    logits = model.network.forward(torch.tensor(prompt), batch, caches, logits_rows="all")
    truth = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(prompt[1:])[:, None]).flatten().tolist()
    assert model.score([prompt, prompt[:1]]) == [pytest.approx(truth, abs=1e-5), []]
    assert model.score([]) == [] and model.generate([]) == []


@pytest.mark.parametrize("stop", [RuntimeError("callback"), KeyboardInterrupt()])
@pytest.mark.parametrize("after", [1, 4])
def test_33_slots_and_pages_come_back_when_the_callback_raises(model, stop, after):
    caches, seen = model.caches(slots=3, tokens=150), []

    def callback(event):
        seen.append(event)
        if len(seen) == after:
            raise stop

    before = (caches.free_slots, caches.free_pages)
    with pytest.raises(type(stop)):
        model.generate(ids_of(3, 30, 20, 5), SamplingParams(max_tokens=5), on_token=callback, caches=caches)
    assert (caches.free_slots, caches.free_pages) == before


def test_33_slots_and_pages_come_back_when_a_step_fails(model, monkeypatch):
    caches = model.caches(slots=3, tokens=150)
    before, calls = (caches.free_slots, caches.free_pages), []

    def failing(hidden):
        calls.append(hidden)
        if len(calls) == 3:
            raise RuntimeError("device")
        return head(hidden)

    head = model.network.logits
    monkeypatch.setattr(model.network, "logits", failing)
    with pytest.raises(RuntimeError, match="device"):
        model.generate(ids_of(3, 30), SamplingParams(max_tokens=5, ignore_eos=True), caches=caches)
    monkeypatch.setattr(model.network, "logits", lambda hidden: head(hidden) * math.nan)
    with pytest.raises(NemotronMamba2Error, match="expected finite values"):
        model.generate(ids_of(3, 30), SamplingParams(max_tokens=5), caches=caches)
    assert (caches.free_slots, caches.free_pages) == before


def test_34_a_thousand_tokens_in_many_calls_keep_nothing(model):
    caches = model.caches(slots=2, tokens=64)
    before = (caches.free_slots, caches.free_pages)
    for call in range(30):
        model.generate(ids_of(1 + call % 20, 7), SamplingParams(max_tokens=1 + call % 4), caches=caches)
        assert (caches.free_slots, caches.free_pages) == before


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "prompt 1: expected at least one token"),
        ([3, 512], "token ids go from 0 to 511, came 512"),
        ([-1], "came -1"),
        ([1.5], r"came 1\.5"),
        ([3] * 1024, r"1024 tokens, expected at most 1023 \(max_position_embeddings 1024\)"),
    ],
)
def test_bad_prompts_are_refused_by_name(model, prompt, message):
    with pytest.raises(RequestError, match=message):
        model.generate([[5], prompt])


def test_generation_ends_where_the_model_ends(model):
    [done] = model.generate([[7] * 1021], SamplingParams(max_tokens=50, ignore_eos=True))
    assert (len(done.token_ids), done.finish_reason) == (3, "length")


def test_without_a_tokenizer_prompts_are_token_ids(tmp_path):
    bare = Model.from_checkpoint(write_model(tmp_path / "bare", small_config("M*")))
    assert bare.tokenizer is None
    [done] = bare.generate([[5, 6]], SamplingParams(max_tokens=3, ignore_eos=True))
    assert done.text == "" and len(done.token_ids) == 3
    with pytest.raises(RequestError, match="no tokenizer; pass token ids"):
        bare.generate(["text"])
    with pytest.raises(RequestError, match="stop strings need a tokenizer"):
        bare.generate([[5]], SamplingParams(stop=("x",)))
    with pytest.raises(RequestError, match="expected one for each of 2 prompts"):
        bare.generate([[5], [6]], [SamplingParams()])


def test_the_mtp_head_is_loaded_when_asked_for(tmp_path):
    path = write_checkpoint(tmp_path, "super_nvfp4")
    assert Model.from_checkpoint(path).network.mtp is None
    loaded = Model.from_checkpoint(path, mtp=True)
    assert loaded.network.mtp is not None and "eh_proj" in loaded.explain()
    bare = write_model(tmp_path / "bare", small_config("M"))
    with pytest.raises(CheckpointError, match="an MTP head is wanted"):
        Model.from_checkpoint(bare, mtp=True)


# -- the document of a token's way -------------------------------------------------------------------------------------


def test_every_function_that_the_way_of_a_token_names_exists():
    """`path/file.py: name, Class.name` in a hop; and the hops follow the import order downwards or stay."""
    text = (ROOT / "docs" / "token.md").read_text(encoding="utf-8")
    named = re.findall(r"`([\w/]+\.py)`: ((?:`[\w.]+`(?:, )?)+)", text)
    assert len(named) > 10
    missing = []
    for file, names in named:
        source = ROOT / "src" / "nemotron_mamba2" / file
        if not source.is_file():
            missing.append(file)
            continue
        module = importlib.import_module("nemotron_mamba2." + file.removesuffix(".py").replace("/", "."))
        for name in re.findall(r"`([\w.]+)`", names):
            thing = module
            for part in name.split("."):
                thing = getattr(thing, part, None)
            if thing is None:
                missing.append(f"{file}: {name}")
        ast.parse(source.read_text(encoding="utf-8"))
    assert not missing, f"docs/token.md names what is not there: {missing}"
