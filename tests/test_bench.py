"""What `bench` measures with, as far as a CPU shows it: the check refuses, records are whole, peers compute the layer.

Times are never asserted. On a GPU `bench layer` checks itself.
"""

from __future__ import annotations

import json
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nemotron_mamba2 import cli
from nemotron_mamba2.bench import layer as bench
from nemotron_mamba2.bench import peers, records
from nemotron_mamba2.bench.layer import Case, Refused
from nemotron_mamba2.bench.timing import Ceilings
from nemotron_mamba2.cli.bench import FORMATS, SHAPES, STATE_DTYPES
from nemotron_mamba2.config import Mamba2Config

TINY = Mamba2Config(64, 4, 16, 2, 32)
CEILINGS = Ceilings(copy_tb_s=4.0, read_tb_s=4.2, bf16_tflop_s=700.0)
RUN = records.Run(CEILINGS, "a device", "2.11", "3.6", "abc1234")
KEYS = [
    "shape", "format", "rows", "prefill_tokens", "window_rows", "state_dtype", "us_per_layer", "gbytes_per_s",
    "hbm_share", "peers", "device", "torch", "triton", "commit",
]  # fmt: skip


@pytest.fixture
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """`bench layer` of a tiny shape on the CPU, every step taking 50 µs."""
    make = bench.random_layer
    monkeypatch.setitem(records.SHAPES, "nano30b", TINY)
    monkeypatch.setattr(bench, "LAYERS", 2)
    monkeypatch.setattr(bench, "random_layer", lambda config, format, index: make(config, format, index, device="cpu"))
    monkeypatch.setattr(bench, "time_layers", lambda layers, case: (50.0, 16))
    monkeypatch.setattr(bench, "time_peer", lambda peer, case: 75.0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a device")
    monkeypatch.setattr("nemotron_mamba2.bench.timing.ceilings", lambda: CEILINGS)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("state_dtype", STATE_DTYPES)
def test_a_right_layer_passes_the_check(format: str, state_dtype: str) -> None:
    layer = bench.random_layer(TINY, format, 0, device="cpu")
    for sequences, rows in ((1, 1), (3, 4), (33, 1)):
        assert bench.check(layer, Case("nano30b", format, sequences, rows, state_dtype)) < bench.TOLERANCE


@pytest.mark.parametrize("stage", ["project_in", "step", "project_out"])
@pytest.mark.parametrize("wrong", ["off", "unwritten", "state"])
def test_a_wrong_layer_fails_the_check(monkeypatch: pytest.MonkeyPatch, stage: str, wrong: str) -> None:
    layer = bench.random_layer(TINY, "bf16", 0, device="cpu")
    right = getattr(layer, stage)

    def broken(*inputs, out):
        if wrong == "unwritten":
            right(*inputs)
        else:
            right(*inputs, out=out)
        if wrong == "off":
            out[-1, :7] += 1.0
        if wrong == "state" and stage == "step":
            inputs[3].layer_state(0).ssm[0, 0, 0, 0] = float("nan")
        parts = out.split([TINY.d_inner, TINY.conv_dim, TINY.mamba_num_heads], -1) if stage == "project_in" else out
        return parts

    monkeypatch.setattr(layer, stage, broken)
    error = bench.check(layer, Case("nano30b", "bf16", 2))
    assert (error < bench.TOLERANCE) == (wrong == "state" and stage != "step")


def test_a_record_has_the_agreed_keys_and_rates() -> None:
    found = records.record(
        RUN, shape="nano30b", format="nvfp4", rows=4, prefill_tokens=0, window_rows=16, state_dtype="float32",
        us_per_layer=20.0, nbytes=40e6, peers={"torch": 80.123},
    )  # fmt: skip
    assert list(found) == KEYS
    assert (found["gbytes_per_s"], found["hbm_share"], found["peers"]) == (2000.0, 0.5, {"torch": 80.12})


@pytest.mark.parametrize(("sequences", "rows"), [(1, 1), (4, 1), (16, 1), (40, 1), (5, 4), (2, 8)])
def test_a_step_folds_as_many_sequences_as_an_average_one(sequences: int, rows: int) -> None:
    case = Case("nano30b", "bf16", sequences, rows)
    pool = bench._pool(TINY, 1, case, torch.device("cpu"))
    for folding in {sequences * rows // 16, -(-sequences * rows // 16)}:
        step = bench._begin(pool, case, folding).step
        assert step is not None
        ready = [p - b >= 16 for p, b in zip(step.positions, step.boundaries, strict=True)]
        assert sum(ready) == folding and step.rows == (rows,) * sequences
        assert all(0 < p - b <= 16 and b % 16 == 0 for p, b in zip(step.positions, step.boundaries, strict=True))


def test_cases_become_records_and_the_wrong_ones_refusals(on_the_cpu, monkeypatch: pytest.MonkeyPatch) -> None:
    check = bench.check
    monkeypatch.setattr(bench, "check", lambda layer, case: 0.5 if case.sequences == 2 else check(layer, case))
    cases = [Case("nano30b", "bf16", n, rows=3) for n in (1, 2)]
    first, second = bench.measure(cases, RUN, peers=[peers.TorchLayers], say=pytest.fail)
    assert isinstance(first, dict) and list(first) == [*KEYS, "verify"] and first["peers"] == {"torch": 75.0}
    assert (first["rows"], first["verify"], first["us_per_layer"], first["commit"]) == (3, 3, 50.0, "abc1234")
    assert isinstance(second, Refused) and second.case == cases[1] and second.error == 0.5


def test_the_command_writes_records_a_plot_and_one_line_each(on_the_cpu, tmp_path: Path, capsys) -> None:
    pytest.importorskip("matplotlib")
    files = tmp_path / "a.json", tmp_path / "a.png"
    words = ["--shape", "nano30b", "--format", "bf16,nvfp4", "--rows", "1,4", "--commit", "abc"]
    assert cli.main(["bench", "layer", *words, "--json", str(files[0]), "--plot", str(files[1])]) == 0
    written = json.loads(files[0].read_text())
    assert [(r["format"], r["rows"]) for r in written] == [("bf16", 1), ("bf16", 4), ("nvfp4", 1), ("nvfp4", 4)]
    assert all(list(r) == KEYS and r["commit"] == "abc" and r["device"] == "a device" for r in written)
    assert files[1].read_bytes().startswith(b"\x89PNG")
    out = capsys.readouterr().out.splitlines()
    assert len(out) == 5 and "copy 4.00 TB/s" in out[0] and "50.0 µs" in out[1]


def test_the_command_prints_no_figure_for_a_wrong_kernel(on_the_cpu, monkeypatch, tmp_path: Path, capsys) -> None:
    monkeypatch.setattr(bench, "check", lambda layer, case: float("nan"))
    file = tmp_path / "a.json"
    assert cli.main(["bench", "layer", "--format", "bf16", "--rows", "1", "--json", str(file)]) == 1
    captured = capsys.readouterr()
    assert "µs" not in captured.out and "wrong" in captured.err and json.loads(file.read_text()) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--shape", "nano30b,huge"], "'huge' is none of nano30b"),
        (["--format", "int4"], "'int4' is none of bf16"),
        (["--rows", "1,0"], "counts from 1"),
        (["--rows", ""], "counts from 1"),
        (["--verify", "9"], "1<=x<=8"),
        (["--json", "no/such/place.json"], "is no directory"),
    ],
)
def test_wrong_options_are_one_line_and_exit_code_2(on_the_cpu, capsys, words: list[str], said: str) -> None:
    assert cli.main(["bench", "layer", *words]) == 2
    captured = capsys.readouterr()
    assert said in captured.err and len(captured.err.splitlines()) == 1 and not captured.out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_one_line(capsys) -> None:
    assert cli.main(["bench", "layer"]) == 2
    captured = capsys.readouterr()
    assert "no CUDA device" in captured.err and len(captured.err.splitlines()) == 1 and not captured.out


def test_the_command_offers_what_there_is() -> None:
    from nemotron_mamba2.formats import FORMATS as KNOWN

    assert set(SHAPES) == set(records.SHAPES) and set(FORMATS) == set(KNOWN)


@pytest.mark.parametrize("format", FORMATS)
def test_the_torch_peer_computes_the_layer(format: str) -> None:
    layer = bench.random_layer(TINY, format, 0, device="cpu")
    peer = peers.TorchLayers(TINY, [layer.weights])
    assert bench.check_peer(peer, layer) < bench.PEER_TOLERANCE


def test_a_peer_takes_verify_rows_one_after_the_other() -> None:
    layer = bench.random_layer(TINY, "bf16", 0, device="cpu")
    peer = peers.TorchLayers(TINY, [layer.weights])
    hidden = torch.randn(2, 3, 64).bfloat16()
    [one], [three] = (peer.states(2, torch.float32) for _ in range(2))
    singles = torch.stack([peer.step(0, hidden[:, j], one, rows=1) for j in range(3)], 1)
    together = peer.step(0, hidden.flatten(0, 1), three, rows=3).view(2, 3, -1)
    assert bench.worst_row(together, singles) < 1e-2 and bench.worst_row(three.ssm, one.ssm) < 1e-2


def test_peers_that_are_missing_or_wrong_are_named_and_left_out() -> None:
    layer = bench.random_layer(TINY, "bf16", 0, device="cpu")

    class Wrong(peers.TorchLayers):
        name = "wrong"

        def step(self, index, hidden, state, *, rows):
            return super().step(index, hidden, state, rows=rows) * 1.1

    class Missing(peers.TorchLayers):
        name = "missing"

        def __init__(self, config, weights):
            raise ImportError("no such\npackage")

    said: list[str] = []
    found = list(bench._ready([layer], [Wrong, Missing, peers.TorchLayers], said.append))
    assert [peer.name for peer in found] == ["torch"]
    assert "wrong, bf16: not timed: off the reference" in said[0]
    assert said[1] == "missing, bf16: not timed: ImportError: no such"


@pytest.fixture
def fake_mamba_ssm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A source tree whose package needs what was not built, and whose parts do not."""
    triton = tmp_path / "mamba_ssm" / "ops" / "triton"
    triton.mkdir(parents=True)
    (tmp_path / "mamba_ssm" / "__init__.py").write_text("import selective_scan_cuda\n")
    for folder in (triton.parent, triton):
        (folder / "__init__.py").write_text("")
    (triton / "selective_state_update.py").write_text("from mamba_ssm.ops.triton.softplus import found\n")
    (triton / "softplus.py").write_text("found = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.split(".")[0] == "mamba_ssm"]:
        monkeypatch.delitem(sys.modules, name)


def test_modules_of_mamba_ssm_load_from_its_source(fake_mamba_ssm) -> None:
    try:
        assert peers.mamba_ssm(peers.STATE_UPDATE).found == 1
        with pytest.raises(ImportError):
            peers.mamba_ssm(peers.GATED_NORM)
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "mamba_ssm"]:
            del sys.modules[name]


def test_without_mamba_ssm_the_peer_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mamba_ssm", types.ModuleType("mamba_ssm"))
    with pytest.raises(ImportError, match="is not installed"):
        peers.MambaSsmLayers(TINY, [])


def test_a_state_dtype_counts_in_the_bytes() -> None:
    layer = bench.random_layer(TINY, "bf16", 0, device="cpu")
    case = Case("nano30b", "bf16", 4, rows=2)
    weights = layer.weights.in_proj.nbytes + layer.weights.out_proj.nbytes
    assert bench.step_bytes(layer, case, 16) == weights + 4 * 64 * 32 * 4 * (1 + 2 / 16)
    assert bench.step_bytes(layer, replace(case, state_dtype="float16"), 16) == weights + 4 * 64 * 32 * 2 * (1 + 2 / 16)
