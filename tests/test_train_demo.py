"""The training of the demo model: data that keeps its hold-out, a checkpoint that others load, a loss that falls.

The text is made here, in the shape of the real files, so that the tests need nothing beside the repository.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
from safetensors import safe_open

EXAMPLES = Path(__file__).parent.parent / "examples"
sys.path.insert(0, str(EXAMPLES))

import demo_batches  # noqa: E402
import demo_data  # noqa: E402
import demo_model  # noqa: E402
import demo_tokenizer  # noqa: E402
import train_demo  # noqa: E402
from demo_checkpoint import load_checkpoint, save_checkpoint  # noqa: E402
from demo_schedule import Clock, Settings, learning_rate, small  # noqa: E402

WORDS = ("the", "and", "of", "king", "man", "shall", "unto", "lord", "thy", "house", "day", "people", "went", "out")


def sentences(rng: Random, count: int) -> list[str]:
    return [" ".join(rng.choices(WORDS, k=rng.randint(8, 16))).capitalize() + "." for _ in range(count)]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """At these sizes threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The three files, with the marks that separate their documents."""
    folder, rng = tmp_path_factory.mktemp("text"), Random(0)
    chapters = ["\n".join(sentences(rng, 12)) for _ in range(60)]
    plays = [opening + "\n" + "\n".join(sentences(rng, 30)) for opening in demo_data.PLAY_OPENINGS]
    title = "PRESIDENT {}'S MESSAGE TO THE CONGRESS"
    speeches = [title.format("ABCDEFGHIJKLMNOPQRST"[i]) + "\n" + " ".join(sentences(rng, 20)) for i in range(20)]
    (folder / "kjv.txt").write_text("\n\n".join(chapters))
    (folder / "shakespeare.txt").write_text("\n\n".join(plays))
    (folder / "speeches.txt").write_text("\n\n".join([" ".join(sentences(rng, 20)), *speeches]))
    return folder


@pytest.fixture(scope="module")
def lines(text_folder: Path) -> list[str]:
    return demo_data.filler_lines(demo_data.split_text(text_folder)[0])


@pytest.fixture(scope="module")
def tokenizer_folder(text_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    documents, _ = demo_data.split_text(text_folder)
    demo_tokenizer.save_tokenizer(demo_tokenizer.train_tokenizer(documents, vocabulary=1024, facts=3000), folder)
    return folder


@pytest.fixture(scope="module")
def encoder(tokenizer_folder: Path) -> demo_batches.PieceEncoder:
    return demo_batches.PieceEncoder(demo_tokenizer.load_tokenizer(tokenizer_folder))


def test_text_is_split_by_whole_documents(text_folder: Path) -> None:
    train, held_out = demo_data.split_text(text_folder)

    assert (train, held_out) == demo_data.split_text(text_folder)
    assert not set(train) & set(held_out)
    assert held_out[0].startswith(demo_data.PLAY_OPENINGS[-1])
    assert all(demo_data.fraction(document) < demo_data.HELD_OUT_TEXT for document in held_out[1:])
    # 8 plays, 1 for what precedes the first title, and the chapters and speeches that the hash leaves.
    assert len(train) + len(held_out) == 60 + len(demo_data.PLAY_OPENINGS) + 1 + 20


@pytest.mark.parametrize("kind", demo_data.KINDS)
def test_recall_cases_follow_the_seed(kind: str, lines: list[str]) -> None:
    def cases(seed: int) -> list[demo_data.RecallCase]:
        return demo_data.recall_cases(kind, "short", 5, seed=seed, lines=lines, count_tokens=len)

    assert cases(1) == cases(1)
    assert cases(1) != cases(2)
    for case in cases(1):
        assert any(case.answer in message["content"] for message in case.messages)
        assert case.messages[-1]["content"].endswith(("?", "."))
        assert case.is_correct(case.reply)


@pytest.mark.parametrize("distance", [256, 1024])
def test_recall_cases_keep_their_distance(distance: int, lines: list[str], encoder: demo_batches.PieceEncoder) -> None:
    def count(text: str) -> int:
        return len(encoder.encode(text))

    for case in demo_data.recall_cases("pet", distance, 4, seed=0, lines=lines, count_tokens=count):
        text = "\n".join(message["content"] for message in case.messages)
        statement, *_, question = text.split("\n")
        assert distance <= count(text) - count(statement) - count(question) < distance + 200


@pytest.mark.parametrize("kind", demo_data.KINDS)
def test_facts_keep_to_their_side(kind: str, lines: list[str]) -> None:
    rng = Random(0)
    for held_out in (False, True):
        for _ in range(100):
            fact = demo_data.draw_fact(kind, rng, lines, held_out=held_out)
            assert [demo_data.is_held_out(kind, *c) for c in fact.combinations] == [held_out] * len(fact.combinations)


def test_no_held_out_combination_is_trained(
    text_folder: Path, lines: list[str], encoder: demo_batches.PieceEncoder, tokenizer_folder: Path
) -> None:
    """Read back from the tokens of training rows, by patterns that know nothing of how facts are drawn."""
    tokenizer = demo_tokenizer.load_tokenizer(tokenizer_folder)
    source = demo_batches.Source.from_text(tokenizer, demo_data.split_text(text_folder)[0], lines)
    mix = demo_batches.Mix()
    mix.set(text_share=0.0, gap_tokens=300, long_share=0.5)
    batches = iter(demo_batches.Batches(source, mix, rows=8, row_tokens=1024, seed=3))
    text = "\n".join(tokenizer.decode(row) for _ in range(8) for row in next(batches).ids.tolist())

    pets = [("me", *m) for m in re.findall(r"^I have a (\w+) named (\w+)\.", text, re.MULTILINE)]
    pets += re.findall(r"^(\w+) has a (\w+) named (\w+)\.", text, re.MULTILINE)
    pets += re.findall(r"^(\w+)'s (\w+) is named (\w+)\.", text, re.MULTILINE)
    colours = re.findall(r"^The (\w+) in the (\w+) is (\w+)\.", text, re.MULTILINE)
    values = re.findall(r"(\w+) = (\d{4})", text)
    ages = [tuple(sorted(m)) for m in re.findall(r"(\w+) is \d+ years old and (\w+) is \d+", text)]

    for kind, found in (("pet", pets), ("colour", colours), ("value", values), ("age", ages)):
        assert len(found) > 50, kind
        assert not [combination for combination in found if demo_data.is_held_out(kind, *combination)]


def test_pieces_encode_like_the_chat_template(tokenizer_folder: Path, lines: list[str]) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    encoder = demo_batches.PieceEncoder(demo_tokenizer.load_tokenizer(tokenizer_folder))
    rng = Random(0)
    for kind in demo_data.KINDS:
        fact = demo_data.draw_fact(kind, rng, lines)
        query = fact.queries[0]
        said = [fact.statement, rng.choice(lines), query.question]
        out = demo_batches.Transcript(encoder)
        out.special(demo_tokenizer.BEGIN, demo_batches.SILENT)
        out.user([(line, demo_batches.CHAT) for line in said])
        out.turn("assistant", [(text, demo_batches.CHAT) for text in (query.before, query.answer, query.after)])
        messages = [{"role": "user", "content": "\n".join(said)}, {"role": "assistant", "content": query.reply}]
        assert out.ids == tokenizer.apply_chat_template(messages)["input_ids"]


def test_names_are_one_token_and_codes_two(text_folder: Path) -> None:
    documents, _ = demo_data.split_text(text_folder)
    encoder = demo_batches.PieceEncoder(demo_tokenizer.train_tokenizer(documents, facts=6000))
    words = (*map(str, range(10, 100)), *demo_data.PEOPLE, *demo_data.PETS, *demo_data.ITEMS, *demo_data.WORDS)

    assert [word for word in words if len(encoder.encode(f" {word}")) > 1] == []
    assert len(encoder.encode(" 4821")) == 2


def test_scan_is_the_recurrence(generator: torch.Generator) -> None:
    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    x, dt, a = draw(2, 48, 4, 8), draw(2, 48, 4).exp(), -draw(4).exp()
    b, c = draw(2, 48, 2, 16), draw(2, 48, 2, 16)
    got = demo_model.ssd_scan(x, dt, a, b, c, chunk_tokens=16)

    state, expected = torch.zeros(2, 4, 8, 16, dtype=torch.float64), []
    for t in range(48):
        b_t, c_t = (v[:, t].repeat_interleave(2, dim=1) for v in (b, c))
        new = (dt[:, t, :, None] * x[:, t])[..., None] * b_t[:, :, None]
        state = (dt[:, t] * a).exp()[..., None, None] * state + new
        expected.append((state * c_t[:, :, None]).sum(-1))
    torch.testing.assert_close(got, torch.stack(expected, dim=1), rtol=1e-10, atol=1e-10)


def test_correction_bias_selects_and_never_weighs() -> None:
    config = small(Settings()).model
    router = demo_model.MoE(config).gate
    torch.nn.init.normal_(router.weight)
    hidden = torch.randn(1, 64, config.hidden_size)
    with torch.no_grad():
        router.e_score_correction_bias[:2] += 100.0
        weights = router(hidden)[0]
        scores = torch.sigmoid(hidden[0] @ router.weight.T)[:, :2]

    expected = scores / scores.sum(-1, keepdim=True) * config.routed_scaling_factor
    torch.testing.assert_close(weights[:, :2], expected)
    assert weights[:, 2:].count_nonzero() == 0
    router.balance(0.5)  # experts 0 and 1 got everything
    assert router.e_score_correction_bias.tolist() == [99.5, 99.5, 0.5, 0.5]


def test_schedule_follows_the_steps_when_they_are_given() -> None:
    settings = replace(Settings(), steps=1000)
    clock = Clock(settings, started=0.0)
    rates = [learning_rate(settings, step, clock.progress(step)) for step in range(1001)]

    assert rates[0] == settings.learning_rate / settings.warmup_steps
    assert rates[200] == rates[500] == settings.learning_rate
    assert rates[750] == pytest.approx(settings.learning_rate / 2)
    assert rates[1000] == 0.0
    assert clock.steps_left(250) == pytest.approx(750)


@pytest.fixture(scope="module")
def trained(text_folder: Path, tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the command leaves after a few steps."""
    folder = tmp_path_factory.mktemp("demo")
    options = ["--text", text_folder, "--tokenizer", tokenizer_folder, "--out", folder, "--steps", 6, "--small"]
    train_demo.main([*map(str, options), "--device", "cpu"])
    return folder


def test_training_lowers_the_loss(trained: Path) -> None:
    steps = json.loads((trained / "loss.json").read_text())["steps"]

    assert len(steps) == 6
    assert all(math.isfinite(value) for entry in steps for value in entry.values())
    for name in ("chat", "text", "mtp_text"):
        losses = [entry[name] for entry in steps if entry[name]]  # 0 where a batch has no such tokens
        assert losses[-1] < losses[0]


def test_checkpoint_has_the_published_names(trained: Path) -> None:
    config = json.loads((trained / "config.json").read_text())
    index = json.loads((trained / "model.safetensors.index.json").read_text())
    shapes, dtypes = {}, {}
    for shard in set(index["weight_map"].values()):
        with safe_open(trained / shard, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                assert index["weight_map"][name] == shard
                shapes[name], dtypes[name] = tuple(file.get_tensor(name).shape), file.get_tensor(name).dtype

    assert config["architectures"] == ["NemotronHForCausalLM"]
    assert len(set(index["weight_map"].values())) >= 2
    assert shapes.keys() == index["weight_map"].keys()
    width = config["hidden_size"]
    conv = config["mamba_num_heads"] * config["mamba_head_dim"] + 2 * config["n_groups"] * config["ssm_state_size"]
    rows = 2 * config["mamba_num_heads"] * config["mamba_head_dim"] + 2 * config["n_groups"] * config["ssm_state_size"]
    expected = {
        "backbone.embeddings.weight": (config["vocab_size"], width),
        "backbone.layers.0.norm.weight": (width,),
        "backbone.layers.0.mixer.in_proj.weight": (rows + config["mamba_num_heads"], width),
        "backbone.layers.0.mixer.conv1d.weight": (conv, 1, config["conv_kernel"]),
        "backbone.layers.0.mixer.conv1d.bias": (conv,),
        "backbone.layers.0.mixer.A_log": (config["mamba_num_heads"],),
        "backbone.layers.1.mixer.experts.3.up_proj.weight": (config["moe_intermediate_size"], width),
        "backbone.layers.1.mixer.shared_experts.down_proj.weight": (
            width,
            config["moe_shared_expert_intermediate_size"],
        ),
        "backbone.layers.2.mixer.k_proj.weight": (config["num_key_value_heads"] * config["head_dim"], width),
        "backbone.layers.3.mixer.down_proj.weight": (width, config["intermediate_size"]),
        "backbone.norm_f.weight": (width,),
        "lm_head.weight": (config["vocab_size"], width),
        "mtp.layers.0.eh_proj.weight": (width, 2 * width),
        "mtp.layers.0.enorm.weight": (width,),
        "mtp.layers.1.final_layernorm.weight": (width,),
        "mtp.layers.1.mixer.gate.e_score_correction_bias": (config["n_routed_experts"],),
    }
    assert {name: shapes.get(name) for name in expected} == expected
    for name, dtype in dtypes.items():
        wide = name.endswith(("gate.weight", "e_score_correction_bias"))
        assert dtype == (torch.float32 if wide else torch.bfloat16), name


def test_checkpoint_loads_in_transformers(tmp_path: Path) -> None:
    """With weights far from their start, so that every tensor matters to the logits."""
    from transformers import NemotronHForCausalLM

    config = replace(small(Settings()).model, hybrid_override_pattern="MEM*-")
    model = demo_model.DemoModel(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * parameter.std(correction=0).clamp(min=0.1) * torch.randn_like(parameter)
        model.lm_head.weight.mul_(10)
        for router in model.routers():
            router.e_score_correction_bias.normal_(std=0.2)
    save_checkpoint(model, tmp_path)
    model = load_checkpoint(tmp_path).eval()
    theirs = NemotronHForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    for module in theirs.modules():
        if hasattr(module, "time_step_limit"):
            module.time_step_limit = (0.0, math.inf)  # its own lower bound of 0.001 acts in prefill only

    ids = torch.randint(config.vocab_size, (2, 2 * config.chunk_size))
    with torch.no_grad():
        got, expected = model(ids), theirs(ids).logits
    assert expected.std() > 0.5
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)


def test_everything_a_directory_needs_is_written(trained: Path) -> None:
    generation = json.loads((trained / "generation_config.json").read_text())
    record = json.loads((trained / "loss.json").read_text())

    assert generation["eos_token_id"] == [demo_tokenizer.END, demo_tokenizer.TURN_END]
    assert {"tokenizer.json", "tokenizer_config.json", "README.md"} <= {path.name for path in trained.iterdir()}
    assert f"{record['scores']['bits_per_byte']:.3f}" in (trained / "README.md").read_text()
    assert all(path.stat().st_size <= 16 * 2**20 for path in trained.iterdir())
