"""The demo model that ships: it loads whole, agrees with transformers, recalls, drafts and writes words.

Every text that these tests need lies in tests/data/heldout.txt, which the model has not been trained on.
"""

from __future__ import annotations

import math
import re
import socket
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
for folder in ("examples", "bench"):
    sys.path.insert(0, str(ROOT / folder))

import quality  # noqa: E402
from demo_data import KINDS, RecallCase, filler_lines, recall_cases  # noqa: E402

from nemotron_mamba2 import cli  # noqa: E402
from nemotron_mamba2.checkpoint import inspect_checkpoint, load_model  # noqa: E402
from nemotron_mamba2.cli import DEMO_MODEL  # noqa: E402
from nemotron_mamba2.generate import Model  # noqa: E402
from nemotron_mamba2.sampling import SamplingParams  # noqa: E402

MIB = 1 << 20
PROMPTS = (
    "In the beginning was the word of the LORD, which came unto the king and all the people of the house of Israel,",
    "MIRANDA:\nIf by your art, my dearest father, you have put the wild waters in this roar, allay them.\n\nPROSPERO:",
    "My fellow Americans, the state of the Union is strong because our people are strong, and in the year to come we",
    "<|im_start|>user\nAnna has a dog named Rufus.\nWhat is Anna's dog called?<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nIda is 34 years old and Paul is 71 years old.\nWho is older, Ida or Paul?<|im_end|>\n"
    "<|im_start|>assistant\n",
)
PROMPT_TOKENS = 24  # of equal length, so that transformers runs them as one batch without padding
TOKENS = 64


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """At these sizes threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def demo() -> Model:
    """The model as it ships: bf16, with its MTP head."""
    return Model.from_checkpoint(DEMO_MODEL, mtp=True)


@pytest.fixture(scope="module")
def documents() -> list[str]:
    return quality.read_documents(None)


# -- the files ---------------------------------------------------------------------------------------------------------


def test_every_file_is_small_enough_to_ship() -> None:
    sizes = {file.name: file.stat().st_size for file in DEMO_MODEL.rglob("*") if file.is_file()}
    needed = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "README.md"}
    assert needed <= sizes.keys()
    assert max(sizes.values()) < 16 * MIB
    assert sum(sizes.values()) < 18 * MIB


def test_every_tensor_is_read_and_no_rule_skips_any(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        weights = load_model(DEMO_MODEL)  # refuses what it has not read
    assert not caplog.records
    report = inspect_checkpoint(DEMO_MODEL)
    assert report.skipped == () and report.notes == ()
    assert report.files == 2
    assert "".join(layer.letter for layer in report.layers) == "MEM*MEM*M-"
    assert {projection.format for layer in report.layers for projection in layer.projections} == {"bf16"}
    assert "".join(layer.letter for layer in report.mtp) == "*E" and weights.mtp is not None


# -- against transformers ----------------------------------------------------------------------------------------------


def test_greedy_output_is_that_of_transformers() -> None:
    """5 prompts × 64 tokens in float32, both with their own caches."""
    transformers = pytest.importorskip("transformers")
    ours = Model.from_checkpoint(DEMO_MODEL, dtype=torch.float32)
    encoded = [ours.tokenizer.encode(prompt, add_special_tokens=False) for prompt in PROMPTS]
    assert min(map(len, encoded)) >= PROMPT_TOKENS - 1
    prompts = [[ours.tokenizer.bos_token_id, *ids[1 - PROMPT_TOKENS :]] for ids in encoded]
    found = ours.generate(prompts, SamplingParams(max_tokens=TOKENS, ignore_eos=True))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        theirs = transformers.NemotronHForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32).eval()
        for layer in theirs.model.layers:
            layer.mixer.time_step_limit = (0.0, math.inf)
        theirs.generation_config.eos_token_id = None
        ids = torch.tensor(prompts)
        output = theirs.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False)
    assert [list(completion.token_ids) for completion in found] == output[:, PROMPT_TOKENS:].tolist()
    assert output.shape[1] == PROMPT_TOKENS + TOKENS


# -- quality -----------------------------------------------------------------------------------------------------------


def replies_right(demo: Model, distance: str | int, documents: list[str], *, cases: int) -> float:
    """Share of greedy replies that equal the expected one, over all kinds and `cases` of each."""
    tokenizer, lines = demo.tokenizer, filler_lines(documents)

    def count_tokens(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False)) + 1

    drawn: list[RecallCase] = []
    for kind in KINDS:
        drawn += recall_cases(kind, distance, cases, seed=7, lines=lines, count_tokens=count_tokens)
    prompts = [tokenizer.encode(tokenizer.render_chat(case.messages), add_special_tokens=False) for case in drawn]
    if distance != "short":
        assert min(map(len, prompts)) >= int(distance)
    completions = demo.generate(prompts, SamplingParams(max_tokens=32))
    return sum(found.text == case.reply for found, case in zip(completions, drawn, strict=True)) / len(drawn)


def test_recall_of_new_facts_at_once(demo: Model, documents: list[str]) -> None:
    assert replies_right(demo, "short", documents, cases=4) >= 0.9


def test_recall_of_new_facts_a_thousand_tokens_later(demo: Model, documents: list[str]) -> None:
    assert replies_right(demo, 1024, documents, cases=2) >= 0.7


def test_text_it_has_not_seen_and_its_own_drafts(demo: Model, documents: list[str]) -> None:
    """At most 2 bits per byte, and the MTP head says what the model says next for at least 40 % of the tokens."""
    beginnings = [document[:2500] for document in documents]
    bits, acceptance = quality.score_text(demo, [demo.tokenizer.encode(text) for text in beginnings])
    assert bits / sum(len(text.encode()) for text in beginnings) <= 2.0
    assert acceptance >= 0.4


def test_pieces_and_the_whole_give_the_same_bits_per_byte(demo: Model, documents: list[str]) -> None:
    """What the quality bench measures is what `Model.score` says."""
    window = demo.tokenizer.encode(documents[0])[:300]
    bits, _ = quality.score_text(demo, [window])
    assert bits == pytest.approx(-sum(demo.score([window])[0]) / math.log(2), rel=2e-3)


# -- the command -------------------------------------------------------------------------------------------------------


def test_generate_writes_words_without_a_network(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], demo: Model, documents: list[str]
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the network was asked for")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    assert cli.main(["generate", "In the beginning", "--max-tokens", "60", "--threads", "1", "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    assert "\ufffd" not in text
    words = re.findall(r"\b[a-z]+\b", text)  # without names, of which the old books have many
    known = set(re.findall(r"[a-z]+", "\n".join(documents).lower()))
    entries = (demo.tokenizer.decode([token]) for token in range(5, demo.config.vocab_size))
    known |= {entry.strip().lower() for entry in entries if re.fullmatch(r" [A-Za-z]{2,}", entry)}
    assert len(words) >= 20
    assert sum(word in known for word in words) / len(words) >= 0.9
