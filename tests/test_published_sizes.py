"""The published checkpoints at their real widths, from headers alone: names, counts and bytes agree with the files.

Config files are those of `data/configs`. Which projection has which format is written down here from the headers of
the published files; the totals (tensors, matrices by format, bytes) are theirs too. The data would be zeros.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from damage import Entry, entry, write_sparse
from layouts import nano_30b_excludes, projections
from nemotron_mamba2.checkpoint import inspect_checkpoint
from random_models import letters, tensor_shapes

CONFIGS = Path(__file__).parent / "data" / "configs"
FAMILIES = sorted(file.stem for file in CONFIGS.glob("*.json"))
LARGE = {"nemotron_3_super", "nemotron_3_ultra", "nemotron_3_puzzle"}  # 40,000 tensors and more

SUPER_IN = {0, 2, 4, 6, 9, 11, 13, 15, 18, 20, 27, 29, 31, 40, 49, 51, 53, 55, 57, 60, 62, 66, 68, 71, 73, 82, 84, 86}
SUPER_OUT = {0, 2, 4, 9, 11, 13, 18, 38, 40, 42, 44, 49, 51, 53, 55, 57, 60, 62, 64, 66, 68, 71, 73, 75, 77, 80, 82}
SUPER_OUT |= {84, 86}
SUPER_FP8 = {
    "in_proj": SUPER_IN,
    "out_proj": SUPER_OUT,
    "shared_experts.up_proj": set(range(88)) - {41},
    "shared_experts.down_proj": set(range(88)) - {1, 8, 76},
    "fc1_latent_proj": {1, 3, 5},
    "fc2_latent_proj": {3},
    "o_proj": {69, 78},
}


def raw(family: str) -> dict:
    return json.loads((CONFIGS / f"{family}.json").read_text())


NANO_30B_EXCLUDES = frozenset(nano_30b_excludes(letters(raw("nemotron_3_nano_30b"))))


def nano_30b(module: str) -> str | None:
    return None if module in ("embeddings", "lm_head") or f"backbone.{module}" in NANO_30B_EXCLUDES else "NVFP4"


def super_120b(module: str) -> str | None:
    if module in ("embeddings", "lm_head"):
        return None
    layer, projection = int(module.split(".")[1]), module.split("mixer.")[1]
    if projection.startswith("experts.") or (layer, projection) == (1, "shared_experts.down_proj"):
        return "NVFP4"
    return "FP8" if layer in SUPER_FP8.get(projection, ()) else None


def lightning(module: str) -> str | None:
    if module == "lm_head" or "experts" in module:
        return "W4A16_NVFP4"
    return "FP8" if module.endswith((".in_proj", ".out_proj")) else None


def stored(
    config: dict,
    kind: Callable[[str], str | None] = lambda module: None,
    *,
    gate: str = "BF16",
    scalar: tuple[int, ...] = (),
    kv: bool = False,
) -> dict[str, Entry]:
    """Headers of a checkpoint by name. kind: projection → algorithm; gate: dtype of the routers."""
    entries: dict[str, Entry] = {}
    quantisable = set(projections(config))
    for name, shape in tensor_shapes(config).items():
        module, own = name.removesuffix(".weight"), name.startswith("mtp.")
        full = name if own or name.startswith("lm_head") else f"backbone.{name}"
        algorithm = kind(module) if module in quantisable and not own else None
        if algorithm is None:
            small = name.endswith("correction_bias")
            entries[full] = entry(
                "F32" if small else gate if name.endswith("gate.weight") and not own else "BF16", shape
            )
        else:
            entries |= _quantised(full.removesuffix(".weight"), algorithm, shape, scalar=scalar)
        if kv and not own and name.endswith(("k_proj.weight", "v_proj.weight")):
            entries[f"backbone.{module}.{module[-6]}_scale"] = entry("F32", scalar)
    return entries


def _quantised(module: str, algorithm: str, shape: tuple[int, ...], *, scalar: tuple[int, ...]) -> dict[str, Entry]:
    if algorithm == "FP8":
        parts = {"weight": entry("F8_E4M3", shape), "weight_scale": entry("F32", scalar)}
    else:
        rows, columns = shape
        parts = {"weight": entry("U8", (rows, columns // 2)), "weight_scale": entry("F8_E4M3", (rows, columns // 16))}
        parts["weight_scale_2"] = entry("F32", ())
    if algorithm != "W4A16_NVFP4":
        parts["input_scale"] = entry("F32", scalar)
    return {f"{module}.{suffix}": part for suffix, part in parts.items()}


def matrices(report) -> dict[str, int]:
    """Quantised matrices by format, experts counted one by one."""
    found = {"nvfp4": 0, "fp8_tensor": 0}
    for projection in (*report.ends, *(p for layer in report.layers for p in layer.projections)):
        if projection.format in found:
            found[projection.format] += projection.shape[0] if len(projection.shape) == 3 else 1
    return found


@pytest.mark.parametrize(
    ("family", "options", "tensors", "nbytes", "counts"),
    [
        ("nemotron_3_nano_30b", {"kind": nano_30b, "gate": "F32"}, 24_147, 19_339_781_632, (5_968, 0)),
        (
            "nemotron_3_5_lightning",
            {"kind": lightning, "gate": "F32", "scalar": (1,), "kv": True},
            18_487,
            18_888_937_436,
            (5_935, 46),
        ),
        pytest.param(
            "nemotron_3_super",
            {"kind": super_120b, "kv": True},
            165_860,
            80_297_329_824,
            (40_961, 139),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_p76_totals_of_the_published_nvfp4_files(tmp_path, family, options, tensors, nbytes, counts):
    entries = stored(raw(family), **options)
    assert len(entries) == tensors
    # Lightning's total is known without its MTP head.
    counted = (
        entries.items() if family != "nemotron_3_5_lightning" else [e for e in entries.items() if e[0][:4] != "mtp."]
    )
    assert sum(size for _, (_, _, size) in counted) == nbytes
    report = inspect_checkpoint(write_sparse(tmp_path, raw(family), entries))
    assert tuple(matrices(report).values()) == counts
    assert report.tensors == tensors and not report.notes and not report.skipped
    assert bool(report.mtp) is (family != "nemotron_3_nano_30b")
    assert sum(layer.kv_scales for layer in report.layers) == options.get("kv", 0) * report.config.pattern.count("*")
    (tmp_path / "model.safetensors").unlink()


@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=pytest.mark.slow) if f in LARGE else f for f in FAMILIES if "vl" not in f]
)
def test_p76_every_family_at_its_real_widths(tmp_path, family):
    config = raw(family)
    inner = config.get("llm_config", config)
    entries = stored(inner)
    if inner is not config:
        entries = {f"language_model.{name}": value for name, value in entries.items()}
    report = inspect_checkpoint(write_sparse(tmp_path, config, entries))
    assert report.tensors == len(entries) and not report.notes and not report.skipped
    total = sum(size for _, _, size in entries.values())
    if family == "nemotron_3_ultra":  # as its index says
        assert total == 1_121_049_257_984
    if family == "nemotron_3_nano_4b":
        assert len(entries) == 263
    (tmp_path / "model.safetensors").unlink()
