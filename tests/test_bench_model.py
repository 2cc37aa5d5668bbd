"""What `bench model` measures with, as far as a CPU shows it: layouts and bytes of the published files, the state that
it starts from, the check, records and plot. Times are never asserted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nemotron_mamba2 import cli
from nemotron_mamba2.batch import Batch
from nemotron_mamba2.bench import model as bench
from nemotron_mamba2.bench import random_model, records
from nemotron_mamba2.bench.model import ModelCase, RefusedModel
from nemotron_mamba2.bench.timing import Ceilings
from nemotron_mamba2.cli.bench import MODEL_FORMATS, MODELS
from nemotron_mamba2.config import AttentionConfig, Mamba2Config, MlpConfig, ModelConfig, MoeConfig
from nemotron_mamba2.graph import Decoded, ModelGraph
from nemotron_mamba2.weights import MoeWeights

TINY = {
    "M": Mamba2Config(64, 4, 16, 2, 32),
    "*": AttentionConfig(64, 4, 2, 16),
    "E": MoeConfig(64, 8, 2, 64, 64),
    "-": MlpConfig(64, 128),
}
CEILINGS = Ceilings(copy_tb_s=4.0, read_tb_s=4.2, bf16_tflop_s=700.0)
RUN = records.Run(CEILINGS, "a device", "2.11", "3.6", "abc1234")


def tiny_config(shape: str) -> ModelConfig:
    """The first layers of a published plan, small."""
    pattern = random_model.MODELS[shape][0][:13]
    return ModelConfig(64, 160, tuple(TINY[letter] for letter in pattern), max_position_embeddings=4096)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """`bench model` of tiny models on the CPU, every part taking 50 µs and every step 100."""
    make = bench.make
    monkeypatch.setattr(bench, "model_config", tiny_config)
    monkeypatch.setattr(bench, "make", lambda shape, format: make(shape, format, device="cpu"))
    monkeypatch.setattr(bench, "_too_large", lambda case: "")
    monkeypatch.setattr(bench, "_allocated", lambda device: 0)
    monkeypatch.setattr(bench, "time_steps", lambda graph, slots, tokens: 100.0)
    monkeypatch.setattr(bench, "microseconds", lambda work, repeats: 50.0 if work() is None else 0.0)
    monkeypatch.setattr(bench, "captured", lambda work: lambda: work() is None or None)
    for name in ("is_available", "empty_cache", "reset_peak_memory_stats", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a device")
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 0)
    monkeypatch.setattr("nemotron_mamba2.bench.timing.ceilings", lambda: CEILINGS)


@pytest.mark.parametrize(
    ("shape", "format", "gigabytes", "stored"),
    [
        # of the published files: 19,339,781,632 and, without the MTP head, 80.3 GB in all
        ("nano30b", "nvfp4", 19.34, 0.002),
        ("nano30b", "bf16", 63.2, 0.01),
        ("super120b", "nvfp4", 75.0, 0.04),
        ("nano4b", "bf16", 7.9, 0.03),
        ("9b-v2", "bf16", 17.8, 0.03),
    ],
)
def test_bytes_are_those_of_the_published_files(shape: str, format: str, gigabytes: float, stored: float) -> None:
    config = random_model.model_config(shape)
    weights = random_model.random_weights(shape, format, config=config, device="meta")
    nbytes = sum(w.nbytes for w in (*weights.layers, weights.embeddings, weights.lm_head, weights.norm_f))
    assert nbytes / 1e9 == pytest.approx(gigabytes, rel=stored)


def test_configs_are_the_published_ones() -> None:
    folder = Path(__file__).parent / "data" / "configs"
    for shape, family in (("nano30b", "nemotron_3_nano_30b"), ("super120b", "nemotron_3_super")):
        truth = ModelConfig.from_checkpoint(folder / f"{family}.json")
        ours = random_model.model_config(shape)
        assert (ours.pattern, ours.hidden_size, ours.vocab_size) == (truth.pattern, truth.hidden_size, truth.vocab_size)
        for mine, other in zip(ours.layers, truth.layers, strict=True):
            same = {"time_step_limit": None, "chunk_size": 128} if isinstance(mine, Mamba2Config) else {}
            assert replace(mine, **same) == replace(other, **same)


@pytest.mark.parametrize("format", MODEL_FORMATS)
@pytest.mark.parametrize("shape", MODELS)
def test_every_layout_makes_a_model_whose_logits_are_finite(shape: str, format: str, tiny) -> None:
    made = bench.make(shape, format)
    caches = bench.make_caches(made, ModelCase(shape, format, 3, 48))
    slots, saved = caches.acquire(3), bench.random_snapshot(caches, 48)
    bench.spread(caches, slots, saved, context=48)
    assert [caches.position(slot) for slot in slots] == [48, 47, 46]
    logits = made.network.forward(torch.tensor([1, 2, 3]), Batch.decode(slots), caches)
    assert torch.isfinite(logits).all() and logits.std() > 0.01


def test_a_step_reads_every_expert_that_it_hits_and_every_state(tiny) -> None:
    made = bench.make("nano30b", "nvfp4")
    config, case = made.network.config, ModelCase("nano30b", "nvfp4", 1, 1000)
    one, many = (bench.step_bytes(made, replace(case, batch=batch)) for batch in (1, 64))
    mixtures = [w for w in made.network.weights.layers if isinstance(w, MoeWeights)]
    routed = sum(w.experts_up.nbytes + w.experts_down.nbytes for w in mixtures)
    assert one["E"] - made.by_kind["E"] == pytest.approx(routed * 2 / 8, rel=1e-3)
    assert many["E"] - made.by_kind["E"] == pytest.approx(routed, rel=1e-3)
    state = config.pattern.count("M") * 64 * 32 * 4 * (1 + 1 / 16)
    assert many["M"] - one["M"] == pytest.approx(63 * state)
    assert one["*"] - made.by_kind["*"] == config.pattern.count("*") * 1000 * 2 * 2 * 16  # FP8
    assert sum(made.by_kind.values()) < sum(one.values()) < sum(many.values())


def test_cases_become_records_and_models_that_do_not_fit_refusals(tiny, monkeypatch) -> None:
    monkeypatch.setattr(bench, "_too_large", lambda case: "too large" if case.shape == "super120b" else "")
    cases = [ModelCase("nano30b", "nvfp4", 2, 64, (40,)), ModelCase("super120b", "bf16", 1, 64)]
    found, refused = bench.measure(cases, RUN, say=lambda line: None)
    assert refused == RefusedModel(cases[1], "too large")
    assert isinstance(found, dict) and (found["step_us"], found["tokens_per_s"]) == (100.0, 20000.0)
    assert set(found["kinds"]) == {"ends", "M", "E", "*"} and found["kinds"]["M"]["layers"] == 6
    assert list(found["first_token_ms"]) == ["40"] and found["commit"] == "abc1234"
    assert list(found["memory"]) == ["weights", "pools", "graphs", "peak", "beyond", "beyond_prompts"]
    assert found["bytes_per_token"] * 2 == pytest.approx(found["floor_us"] * 4.2e6, rel=0.2)


@pytest.mark.parametrize("wrong", ["off", "nan"])
def test_a_wrong_graph_gets_no_figure(tiny, monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    right = ModelGraph.__call__

    def broken(self, tokens, opened):
        found = right(self, tokens, opened)
        return Decoded(found.logits + (1e-3 if wrong == "off" else float("nan")), found.tokens, found.finite)

    monkeypatch.setattr(ModelGraph, "__call__", broken)
    [refused] = bench.measure([ModelCase("nano30b", "bf16", 2, 64)], RUN, say=lambda line: None)
    assert isinstance(refused, RefusedModel) and "step 0 of the graph is off" in refused.why


def test_the_command_writes_records_a_plot_and_lines(tiny, tmp_path: Path, capsys) -> None:
    pytest.importorskip("matplotlib")
    files = tmp_path / "a.json", tmp_path / "a.png"
    words = ["--shape", "nano30b,9b-v2", "--format", "nvfp4", "--batch", "1,2", "--context", "64", "--commit", "abc"]
    assert cli.main(["bench", "model", *words, "--json", str(files[0]), "--plot", str(files[1])]) == 0
    written = json.loads(files[0].read_text())
    assert [(r["model"], r["batch"]) for r in written] == [(m, b) for m in ("nano30b", "9b-v2") for b in (1, 2)]
    assert files[1].read_bytes().startswith(b"\x89PNG")
    out = capsys.readouterr().out
    assert out.count("tokens/s") == 4 and "weights 0 B" in out


def test_the_command_offers_what_there_is() -> None:
    assert set(MODELS) == set(random_model.MODELS) and set(MODEL_FORMATS) == set(random_model.MODEL_FORMATS)
