"""`bench layer --prefill`, as far as a CPU shows it: the check refuses, records are whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from nemotron_mamba2 import cli
from nemotron_mamba2.bench import prompt as bench
from nemotron_mamba2.bench import records
from nemotron_mamba2.bench.layer import Refused
from nemotron_mamba2.bench.prompt import PromptCase
from nemotron_mamba2.cli.bench import FORMATS
from test_bench import CEILINGS, KEYS, RUN, TINY

PIECES = ["conv", "scan", "gated_norm", "conv_scan_norm", "layer"]


@pytest.fixture
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny shape on the CPU, every piece taking 50 µs once it has run."""
    make = bench.prompt_layer

    def time_piece(piece: bench.Piece) -> float:
        piece()
        return 50.0

    monkeypatch.setitem(records.SHAPES, "nano30b", TINY)
    monkeypatch.setattr(
        bench, "prompt_layer", lambda config, format, prompt: make(config, format, prompt, device="cpu")
    )
    monkeypatch.setattr(bench, "time_piece", time_piece)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a device")
    monkeypatch.setattr("nemotron_mamba2.bench.timing.ceilings", lambda: CEILINGS)


@pytest.mark.parametrize("prompt", ["checkpoint", "exact", "fp8"])
@pytest.mark.parametrize("format", FORMATS)
def test_a_right_layer_passes_both_checks(format: str, prompt: str) -> None:
    layer = bench.prompt_layer(TINY, format, prompt, device="cpu")
    assert bench.check(layer) < bench.TOLERANCE
    assert bench.check_products(layer) < bench.TOLERANCE


def test_fp8_prompts_quantise_their_activations() -> None:
    for prompt, kind in (("checkpoint", "fp8_static"), ("exact", "none")):
        layer = bench.prompt_layer(TINY, "fp8_tensor", prompt, device="cpu")
        assert [linear.prompt for linear in layer.plan.linears] == [kind, kind]


@pytest.mark.parametrize("name", ["conv", "scan", "rms_norm", "linear"])
def test_a_wrong_kernel_gets_no_figure(on_the_cpu: None, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    from nemotron_mamba2.ops import reference

    right = getattr(reference, name)

    class Wrong:
        def __getattr__(self, other: str) -> object:
            return wrong if other == name else getattr(reference, other)

    def wrong(*inputs: object, **settings: object) -> object:
        found = right(*inputs, **settings)
        first = found[0] if isinstance(found, tuple) else found
        first[-1] += 1.0
        return found

    make = bench.prompt_layer

    def with_wrong_kernel(config, format, prompt):
        layer = make(config, format, prompt)
        layer._ops = Wrong()
        return layer

    monkeypatch.setattr(bench, "prompt_layer", with_wrong_kernel)
    [refused] = bench.measure([PromptCase("nano30b", "bf16", 40)], RUN, say=lambda line: None)
    assert isinstance(refused, Refused)
    assert refused.error > bench.TOLERANCE


def test_pieces_are_measured_once_and_the_layer_in_every_format(on_the_cpu: None) -> None:
    cases = [PromptCase("nano30b", format, tokens) for format in ("bf16", "nvfp4") for tokens in (40, 70)]
    found = list(bench.measure(cases, RUN, say=lambda line: None))
    assert [(r["format"], r["prefill_tokens"], r["piece"]) for r in found] == [
        *(("bf16", tokens, piece) for tokens in (40, 70) for piece in PIECES),
        ("nvfp4", 40, "layer"),
        ("nvfp4", 70, "layer"),
    ]
    for record in found:
        assert list(record) == [*KEYS, "piece", "sequences", "prompt"]
        assert record["rows"] == 0 and record["us_per_layer"] == 50.0 and record["gbytes_per_s"] > 0


def test_the_command_writes_what_it_prints(
    on_the_cpu: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "out.json"
    command = ["bench", "layer", "--format", "bf16", "--prefill", "40,70", "--sequences", "2", "--json", str(file)]
    assert cli.main(command) == 0
    written = json.loads(file.read_text())
    assert [r["piece"] for r in written] == PIECES * 2
    assert {r["sequences"] for r in written} == {2}
    printed = capsys.readouterr().out
    assert all(piece in printed for piece in PIECES)
    assert cli.main(["bench", "layer", "--prefill", "0"]) == 2
