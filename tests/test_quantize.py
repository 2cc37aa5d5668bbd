"""The quantiser: what it writes is read from the files themselves and decoded here, by the facts alone."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from fnmatch import fnmatch
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from checkpoints import letters, small_config, write_checkpoint, write_model, write_tokenizer
from nemotron_mamba2 import Model, cli, dequantize, load_model
from nemotron_mamba2.checkpoint import Checkpoint, inspect_checkpoint
from nemotron_mamba2.config import ModelConfig
from nemotron_mamba2.errors import CheckpointError, ConfigError, FormatError, NemotronMamba2Error
from nemotron_mamba2.formats import Nvfp4
from nemotron_mamba2.ops.reference import quantize
from nemotron_mamba2.quantize import PRESETS, quantize_checkpoint, read_recipe, rows
from nemotron_mamba2.weights import MoeWeights

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
SCALES = ("weight_scale", "weight_scale_2", "input_scale")
MAMBA_MLP = ("in_proj", "out_proj", "up_proj", "down_proj")
TEXT = "In the beginning was the Word, and the Word was with God, and the Word was God. " * 8


# reading what was written -----------------------------------------------------------------------------------------


def tensors_of(directory):
    """Every tensor of a directory's safetensors files, by name."""
    found = {}
    for file in sorted(Path(directory).glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118, it is no dictionary
                assert name not in found
                found[name] = opened.get_tensor(name)
    return found


def decoded(directory):
    """Module → float32 values of every quantised matrix, multiplied out by hand; and the names of all other tensors."""
    tensors = tensors_of(directory)
    values, plain = {}, set()
    for name, tensor in tensors.items():
        module, _, suffix = name.rpartition(".")
        if suffix in SCALES:
            continue
        scale = tensors.get(f"{module}.weight_scale")
        if suffix != "weight" or scale is None:
            plain.add(name)
        elif tensor.dtype == torch.uint8:
            low, high = tensor & 15, tensor >> 4
            codes = torch.stack((low, high), -1).flatten(1).int()
            magnitude = E2M1[codes & 7] * torch.where(codes >= 8, -1.0, 1.0)
            block = scale.float().repeat_interleave(16, 1)
            values[module] = magnitude * block * tensors[f"{module}.weight_scale_2"]
        elif scale.dim() == 4:
            rows_, columns = tensor.shape
            spread = scale[:, 0, :, 0].repeat_interleave(128, 0)[:rows_].repeat_interleave(128, 1)[:, :columns]
            values[module] = tensor.float() * spread
        else:
            values[module] = tensor.float() * (scale[:, None] if scale.dim() == 1 else scale)
    return values, plain


def loaded(directory):
    """Canonical module → float32 values of every projection that the package's own loader gives; experts one by one."""
    weights = load_model(directory)
    found = {"embeddings": weights.embeddings, "lm_head": weights.lm_head}
    groups = [(f"layers.{i}", layer) for i, layer in enumerate(weights.layers)]
    if weights.mtp is not None:
        found["mtp.layers.0.eh_proj"] = weights.mtp.eh_proj
        groups += [(f"mtp.layers.{i}", layer) for i, layer in enumerate(weights.mtp.layers)]
    names = {"shared_up": "shared_experts.up_proj", "shared_down": "shared_experts.down_proj"}
    out = {name: dequantize(weight) for name, weight in found.items()}
    for prefix, layer in groups:
        for name, weight in layer.projections():
            values = dequantize(weight)
            if isinstance(layer, MoeWeights) and name.startswith("experts_"):
                projection = name.replace("experts_", "") + "_proj"
                out |= {f"{prefix}.mixer.experts.{e}.{projection}": matrix for e, matrix in enumerate(values)}
            else:
                out[f"{prefix}.mixer.{names.get(name, name)}"] = values
    return out


def canonical(name):
    return re.sub(r"^(?:language_model\.)?(?:backbone\.|model\.)?", "", name)


def digests(directory):
    files = sorted(file for file in Path(directory).rglob("*") if file.is_file())
    return {str(file.relative_to(directory)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


# fixtures ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """layout → its checkpoint with a tokenizer, made once; "demo" is the model that ships with the package."""
    root, made = tmp_path_factory.mktemp("sources"), {}

    def source(layout):
        if layout == "demo":
            if not (cli.DEMO_MODEL / "config.json").is_file():
                pytest.skip("the demo model has not landed")
            return cli.DEMO_MODEL
        if layout not in made:
            made[layout] = write_checkpoint(root / layout, layout)
            write_tokenizer(made[layout])
        return made[layout]

    return source


@pytest.fixture
def run(capsys):
    def run(*arguments):
        code = cli.main([str(a) for a in arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def assert_one_line(result, pattern):
    code, out, err = result
    assert (code, out) == (2, ""), err
    assert err.count("\n") == 1 and err.startswith("nemotron-mamba2: "), err
    assert re.search(pattern, err), err


# round trip -------------------------------------------------------------------------------------------------------

LIMITS = {"fp8_tensor": 0.03, "fp8_block": 0.03, "fp8_channel": 0.03, "nvfp4": 0.1}
CASES = [(layout, preset) for layout in ("nano_4b_bf16", "nano_30b_bf16", "demo") for preset in PRESETS]
CASES += [(layout, "mixed") for layout in ("h_8b_bf16", "ultra_bf16", "puzzle_bf16", "resaved_bf16")]
CASES = [(*case, None) for case in CASES] + [("demo", "nvfp4", search) for search in ("absmax", "sweep")]


@pytest.mark.parametrize(("layout", "preset", "search"), CASES)
def test_loader_and_decoding_by_hand_agree_bit_for_bit(sources, tmp_path, layout, preset, search):
    source, target = sources(layout), tmp_path / "out"
    report = quantize_checkpoint(source, target, preset, search=search)
    by_hand, plain = decoded(target)
    by_loader, before = loaded(target), loaded(source)
    assert by_hand.keys() == {tensor.name for tensor in report.tensors}
    for name, values in by_hand.items():
        assert torch.equal(values, by_loader[canonical(name)]), name
    for tensor in report.tensors:
        truth = before[canonical(tensor.name)].double()
        error = ((by_hand[tensor.name].double() - truth).norm() / truth.norm()).item()
        assert error == pytest.approx(tensor.relative_error, rel=1e-3)
        assert error < LIMITS[tensor.format], tensor
    untouched = tensors_of(source)
    for name, tensor in tensors_of(target).items():
        if name in plain:
            assert torch.equal(tensor, untouched[name]) and tensor.dtype == untouched[name].dtype, name
    assert sum(t.nbytes for t in tensors_of(target).values()) == report.bytes_after
    assert sum(t.nbytes for t in untouched.values()) == report.bytes_before


@pytest.mark.parametrize("layout", ["nano_4b_bf16", "ultra_bf16", "resaved_bf16"])
def test_what_the_recipes_of_the_family_leave_is_left(sources, tmp_path, layout):
    quantize_checkpoint(sources(layout), tmp_path / "out", "nvfp4")
    names = {canonical(name) for name in decoded(tmp_path / "out")[0]}
    pattern = letters(json.loads((sources(layout) / "config.json").read_text()))
    for name in names:
        kind = pattern[int(name.split(".")[1])]
        assert name.startswith("layers.") and kind in "M-E", name
        assert name.split(".")[-1] in MAMBA_MLP, name
    for index, kind in enumerate(pattern):
        wanted = {"M": "in_proj", "-": "up_proj", "E": "shared_experts.up_proj"}.get(kind)
        assert wanted is None or f"layers.{index}.mixer.{wanted}" in names


def test_mixed_is_fp8_mixers_and_nvfp4_experts(sources, tmp_path):
    report = quantize_checkpoint(sources("nano_30b_bf16"), tmp_path / "out", "mixed")
    for tensor in report.tensors:
        wide = tensor.name.endswith(("in_proj", "out_proj")) or "shared_experts" in tensor.name
        assert tensor.format == ("fp8_tensor" if wide else "nvfp4"), tensor.name


def test_mixed_spares_the_mlps_that_the_recipe_of_nano_4b_spares():
    pattern = "M-M-M-MM-M-M*-M-M*-M-M-M*-M-M-MM*-MMM-M-M-"
    from nemotron_mamba2.quantize.choice import _tender_mlps

    config = ModelConfig.from_dict(small_config(pattern))
    assert _tender_mlps(config) == {1, 3, 5, 8, 10, 18, 25, 33, 41}


def test_other_files_come_along_and_weights_do_not(sources, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(sources("nano_30b_bf16"), source)
    (source / "modeling_x.py").write_text("x = 1\n")
    (source / "extra").mkdir()
    (source / "extra" / "template.jinja").write_text("{{ a }}")
    (source / "pytorch_model.bin").write_bytes(b"weights")
    (source / ".hidden").write_text("no")
    quantize_checkpoint(source, tmp_path / "out", "fp8")
    names = set(digests(tmp_path / "out"))
    assert names == {
        *("config.json", "generation_config.json", "hf_quant_config.json", "tokenizer.json", "tokenizer_config.json"),
        *("modeling_x.py", "extra/template.jinja", "model.safetensors"),
    }
    before, after = (json.loads((d / "config.json").read_text()) for d in (source, tmp_path / "out"))
    assert after.pop("quantization_config") and after == before


def test_shards_and_index(sources, tmp_path):
    source = sources("nano_30b_bf16")
    quantize_checkpoint(source, tmp_path / "one", "mixed")
    report = quantize_checkpoint(source, tmp_path / "many", "mixed", shard_bytes=200_000)
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    files = sorted(file.name for file in (tmp_path / "many").glob("*.safetensors"))
    assert len(files) == report.files > 3 and files[0] == f"model-00001-of-{len(files):05}.safetensors"
    one, many = tensors_of(tmp_path / "one"), tensors_of(tmp_path / "many")
    assert one.keys() == many.keys() == index["weight_map"].keys()
    assert all(torch.equal(one[n].view(torch.uint8), many[n].view(torch.uint8)) for n in one if one[n].dim())
    assert index["metadata"]["total_size"] == report.bytes_after
    assert all(size < 300_000 for size in ((tmp_path / "many" / f).stat().st_size for f in files))


def test_same_source_and_options_give_the_same_bytes(sources, tmp_path):
    for name in ("a", "b"):
        threads = torch.get_num_threads()
        torch.set_num_threads(1 if name == "a" else 3)
        quantize_checkpoint(sources("ultra_bf16"), tmp_path / name, "mixed", calibration_text=TEXT, shard_bytes=10**6)
        torch.set_num_threads(threads)
    assert digests(tmp_path / "a") == digests(tmp_path / "b")


@pytest.mark.parametrize("preset", PRESETS)
def test_pieces_give_the_bytes_of_the_whole(sources, tmp_path, monkeypatch, preset):
    quantize_checkpoint(sources("nano_4b_bf16"), tmp_path / "whole", preset)
    monkeypatch.setattr(rows, "PIECE_ELEMENTS", 1)
    quantize_checkpoint(sources("nano_4b_bf16"), tmp_path / "pieces", preset)
    assert digests(tmp_path / "whole") == digests(tmp_path / "pieces")


@pytest.mark.gpu
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("search", ["absmax", "mse", "sweep"])
def test_a_gpu_writes_the_same_bytes(sources, tmp_path, preset, search):
    search = search if preset in ("nvfp4", "mixed") else None
    for device in ("cpu", "cuda"):
        quantize_checkpoint(sources("nano_30b_bf16"), tmp_path / device, preset, search=search, device=device)
    assert digests(tmp_path / "cpu") == digests(tmp_path / "cuda")


# config files -----------------------------------------------------------------------------------------------------


def test_one_algorithm_is_written_as_modelopt_writes_it(sources, tmp_path):
    quantize_checkpoint(sources("nano_4b_bf16"), tmp_path / "out", "nvfp4")
    quant = json.loads((tmp_path / "out" / "hf_quant_config.json").read_text())
    assert quant["producer"]["name"] == "modelopt"
    said = quant["quantization"]
    assert list(said) == ["quant_algo", "kv_cache_quant_algo", "group_size", "exclude_modules"]
    assert (said["quant_algo"], said["kv_cache_quant_algo"], said["group_size"]) == ("W4A16_NVFP4", None, 16)
    attention = [f"backbone.layers.3.mixer.{p}_proj" for p in "koqv"]
    convolutions = [f"backbone.layers.{i}.mixer.conv1d" for i in (0, 2, 5)]
    assert said["exclude_modules"] == sorted(["backbone.embeddings", "lm_head", *attention, *convolutions])
    flat = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    weights = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    assert flat == {
        "config_groups": {"group_0": {"weights": weights, "targets": ["Linear"]}},
        "ignore": said["exclude_modules"],
        "quant_algo": "W4A16_NVFP4",
        "producer": quant["producer"],
        "quant_method": "modelopt",
    }


def test_several_algorithms_name_every_layer(sources, tmp_path):
    quantize_checkpoint(sources("ultra_bf16"), tmp_path / "out", "mixed", calibration_text=TEXT)
    said = json.loads((tmp_path / "out" / "hf_quant_config.json").read_text())["quantization"]
    assert said["quant_algo"] == "MIXED_PRECISION"
    assert said["quantized_layers"]["backbone.layers.0.mixer.in_proj"] == {"quant_algo": "FP8"}
    nvfp4 = {"quant_algo": "NVFP4", "group_size": 16}
    assert said["quantized_layers"]["backbone.layers.1.mixer.experts.7.down_proj"] == nvfp4
    assert said["quantized_layers"].keys() == decoded(tmp_path / "out")[0].keys()
    assert "mtp*" in said["exclude_modules"] and "backbone.layers.1.mixer.gate" in said["exclude_modules"]
    flat = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert flat["quantized_layers"] == said["quantized_layers"]
    targets = [name for group in flat["config_groups"].values() for name in group["targets"]]
    assert sorted(targets) == sorted(said["quantized_layers"])


def algorithm_by_vllm(said, module):
    """What vLLM's ModelOpt reader would take a module to be: excluded by name, part of a name, or wildcard; else listed
    by its own name or by a name below it; else, with one algorithm for all, that one."""
    for entry in said["exclude_modules"]:
        patterns = [entry[:-1], entry[:-1] + ".*"] if entry.endswith("*") and not entry.endswith(".*") else [entry]
        if any(module == p or p in module or fnmatch(module, p) for p in patterns):
            return None
    if said["quant_algo"] != "MIXED_PRECISION":
        return said["quant_algo"]
    layers = said["quantized_layers"]
    below = (words for name, words in layers.items() if name.startswith(f"{module}."))
    words = layers.get(module) or next(below, None)
    if words is None and module.endswith(".experts"):
        parent = module.removesuffix("experts")
        words = next((words for name, words in layers.items() if name.startswith(parent)), None)
    return None if words is None else words["quant_algo"]


RECIPES = [
    None,
    {"*.experts.*": "bf16"},
    {"layers.*.o_proj": "fp8", "lm_head": "nvfp4", "layers.1.*experts.*.up_proj": "bf16"},
]


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("recipe", RECIPES, ids=["plain", "experts", "odd"])
@pytest.mark.parametrize("text", [None, TEXT], ids=["weights", "static"])
def test_config_and_tensors_say_the_same(sources, tmp_path, preset, recipe, text):
    source, target = sources("ultra_bf16"), tmp_path / "out"
    quantize_checkpoint(source, target, preset, recipe=recipe, calibration_text=text)
    said = json.loads((target / "hf_quant_config.json").read_text())["quantization"]
    tensors = tensors_of(target)
    dtypes = {"FP8": torch.float8_e4m3fn, "FP8_PB_WO": torch.float8_e4m3fn, None: torch.bfloat16}
    for name, tensor in tensors.items():
        module, _, suffix = name.rpartition(".")
        if suffix != "weight" or tensor.dim() != 2 or module.endswith((".gate", "embeddings")):
            continue
        if module.startswith("backbone.") and ".experts." in module:
            experts = module[: module.index(".experts.") + len(".experts")]
            halves = {tensors[f"{experts}.0.{p}_proj.weight"].dtype for p in ("up", "down")}
            if len(halves) == 1:  # vLLM has one algorithm for both
                assert dtypes.get(algorithm_by_vllm(said, experts), torch.uint8) == tensor.dtype, module
            continue
        found = algorithm_by_vllm(said, module)
        assert dtypes.get(found, torch.uint8) == tensor.dtype, (module, found)
        static = f"{module}.input_scale" in tensors
        assert static == (found == "NVFP4" or (found == "FP8" and text is not None)), (module, found)
    odd = [note for note in inspect_checkpoint(target).notes if "static activation scales" not in note or text]
    assert not odd


# recipes ----------------------------------------------------------------------------------------------------------


def test_a_recipe_names_any_projection_and_its_last_word_counts(sources, tmp_path):
    recipe = {
        "*": "bf16",
        "backbone.layers.*.mixer.in_proj.weight": "fp8_channel",
        "layers.2.mixer.in_proj": "nvfp4",
        "embeddings": "nvfp4",
        "lm_head": "fp8",
    }
    (tmp_path / "recipe.json").write_text(json.dumps(recipe))
    report = quantize_checkpoint(
        sources("nano_4b_bf16"), tmp_path / "out", "fp8", recipe=read_recipe(tmp_path / "recipe.json")
    )
    assert {tensor.name: tensor.format for tensor in report.tensors} == {
        "backbone.embeddings": "nvfp4",
        "backbone.layers.0.mixer.in_proj": "fp8_channel",
        "backbone.layers.2.mixer.in_proj": "nvfp4",
        "backbone.layers.5.mixer.in_proj": "fp8_channel",
        "lm_head": "fp8_tensor",
    }
    by_hand, _ = decoded(tmp_path / "out")
    by_loader = loaded(tmp_path / "out")
    assert all(torch.equal(values, by_loader[canonical(name)]) for name, values in by_hand.items())


@pytest.mark.parametrize(
    ("recipe", "pattern"),
    [
        ({"*.mixer.qkv": "fp8"}, "'\\*.mixer.qkv' matches no projection"),
        ({"*.conv1d": "fp8"}, "matches no projection"),
        ({"*.experts.3.up_proj": "bf16"}, "must share a format"),
        ({"*": "bf16"}, "nothing would be quantised"),
    ],
)
def test_a_recipe_that_cannot_be_kept_is_refused(sources, tmp_path, recipe, pattern):
    with pytest.raises(NemotronMamba2Error, match=pattern):
        quantize_checkpoint(sources("nano_30b_bf16"), tmp_path / "out", "fp8", recipe=recipe)
    assert not list(tmp_path.iterdir())


def test_inputs_that_are_no_multiple_of_16_stay_or_are_refused_by_name(tmp_path):
    source = write_model(tmp_path / "source", small_config("M-", intermediate_size=200))
    report = quantize_checkpoint(source, tmp_path / "out", "nvfp4")
    assert "backbone.layers.1.mixer.down_proj" in report.kept
    with pytest.raises(ConfigError, match="down_proj has 200 inputs"):
        quantize_checkpoint(source, tmp_path / "forced", "nvfp4", recipe={"*.down_proj": "nvfp4"})


# numbers ----------------------------------------------------------------------------------------------------------


def test_four_over_six_by_hand():
    # Largest 6, so the global scale is 6 / (6·256). Block 0 is exact with its maximum at 6; block 1 with it at 4.
    first = [6.0, -4.0, 3.0, 2.0, 1.5, 1.0, -0.5, 0.0] * 2
    second = [4.0, -3.0, 2.0, 1.5, 1.0, -0.5, 0.5, 0.0] * 2
    weight = quantize(torch.tensor([first + second]), "nvfp4", search="mse")
    assert isinstance(weight, Nvfp4)
    assert weight.global_scale.item() == 6 / (6 * 256)
    assert weight.scale.float().tolist() == [[256.0, 256.0]]
    assert torch.equal(dequantize(weight), torch.tensor([first + second]))
    plain = quantize(torch.tensor([first + second]), "nvfp4")
    assert plain.global_scale.item() == pytest.approx(6 / (6 * 448)) and plain.scale.float()[0, 0] == 448


def test_the_search_picks_the_better_of_both_in_every_block():
    values = torch.randn(96, 512) * torch.exp(torch.randn(96, 1))
    weight = quantize(values, "nvfp4", search="mse")
    found = (dequantize(weight) - values).square().unflatten(1, (-1, 16)).sum(-1)
    blocks = values.unflatten(1, (-1, 16)).double()
    step = weight.global_scale.double()
    grid = torch.cat((-E2M1.flip(0), E2M1)).double()
    best = []
    for at in (6, 4):
        scale = (blocks.abs().amax(-1) / at / step).float().to(torch.float8_e4m3fn).double() * step
        wrong = (blocks[..., None] - grid * scale[..., None, None]).abs().amin(-1).square().sum(-1)
        best.append(wrong)
    assert torch.allclose(found.double(), torch.minimum(*best), rtol=1e-4)
    absmax = (dequantize(quantize(values, "nvfp4")) - values).square().sum()
    assert found.sum() < 0.95 * absmax


def test_the_sweep_finds_the_best_of_all_scales():
    values = torch.randn(32, 128) * torch.exp(torch.randn(32, 1))
    values[0, :16] *= 1e-6  # a block at the smallest scales
    weight = quantize(values, "nvfp4", search="sweep")
    assert weight.global_scale == quantize(values, "nvfp4").global_scale
    found = (dequantize(weight) - values).double().square().unflatten(1, (-1, 16)).sum(-1)
    blocks = values.unflatten(1, (-1, 16)).double()
    grid = torch.cat((-E2M1.flip(0), E2M1)).double()
    best = torch.full_like(found, torch.inf)
    for code in range(1, 127):
        scale = (
            torch.tensor([code], dtype=torch.uint8).view(torch.float8_e4m3fn).double() * weight.global_scale.double()
        )
        best = torch.minimum(best, (blocks[..., None] - grid * scale).abs().amin(-1).square().sum(-1))
    assert torch.allclose(found, best, rtol=1e-4)
    assert found.sum() < (dequantize(quantize(values, "nvfp4", search="mse")) - values).square().sum()


def test_rows_with_the_largest_of_the_whole_are_rows_of_the_whole():
    values = torch.randn(384, 64).bfloat16()
    largest = values.float().abs().amax()
    for search in ("absmax", "mse", "sweep"):
        whole = quantize(values, "nvfp4", search=search)
        part = quantize(values[128:256], "nvfp4", search=search, largest=largest)
        assert torch.equal(part.weight, whole.weight[128:256])
        assert torch.equal(part.scale.view(torch.uint8), whole.scale[128:256].view(torch.uint8))


def test_zeros_and_the_smallest_numbers_survive():
    tiny = torch.full((16, 32), 1e-39)
    for values in (torch.zeros(16, 32), tiny, -tiny):
        for format in ("fp8_tensor", "fp8_channel", "fp8_block", "nvfp4"):
            assert torch.isfinite(dequantize(quantize(values, format))).all()
    for search in ("absmax", "mse", "sweep"):
        assert not dequantize(quantize(torch.zeros(16, 32), "nvfp4", search=search)).any()


def test_wrong_words_are_refused():
    with pytest.raises(FormatError, match="search absmax, mse or sweep"):
        quantize(torch.ones(16, 16), "nvfp4", search="best")
    with pytest.raises(FormatError, match="blocks of 16"):
        quantize(torch.ones(16, 24), "nvfp4")


# small rows of in_proj --------------------------------------------------------------------------------------------


def with_small_dt(directory, factor):
    """A model whose dt rows of every in_proj are that much smaller; returns the directory and the dt rows."""
    config = small_config("M-M*")
    write_model(directory, config)
    from safetensors.torch import save_file

    tensors = tensors_of(directory)
    for name in [name for name in tensors if name.endswith("in_proj.weight")]:
        tensors[name][-config["mamba_num_heads"] :] *= factor
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory, slice(-config["mamba_num_heads"], None)


@pytest.mark.parametrize("preset", ["fp8", "fp8_block", "mixed"])
@pytest.mark.parametrize("factor", [1e-3, 1e-4, 1e-6])
def test_dt_rows_far_below_the_others_keep_their_digits(tmp_path, preset, factor):
    source, dt = with_small_dt(tmp_path / "source", factor)
    report = quantize_checkpoint(source, tmp_path / "out", preset)
    before, after = loaded(source), loaded(tmp_path / "out")
    for index in (0, 2):
        truth, found = (values[f"layers.{index}.mixer.in_proj"][dt].double() for values in (before, after))
        assert (found - truth).norm() / truth.norm() < 0.05
    # e4m3 has all its digits down to 1/28672 of the largest weight: at a thousandth, one scale is enough. With a scale
    # per 128 rows, dt has one of its own in this model.
    spared = [note for note in report.notes if "in_proj: stays as it is" in note]
    assert len(spared) == (0 if factor == 1e-3 or preset == "fp8_block" else 2)
    assert ("backbone.layers.0.mixer.in_proj" in report.kept) == bool(spared)


def test_an_outlier_makes_small_rows_smaller(tmp_path):
    from safetensors.torch import save_file

    source, _ = with_small_dt(tmp_path / "source", 1e-3)
    tensors = tensors_of(source)
    tensors["backbone.layers.2.mixer.in_proj.weight"][7, 5] = 10.0
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    report = quantize_checkpoint(source, tmp_path / "out", "fp8")
    assert "backbone.layers.2.mixer.in_proj" in report.kept
    assert "backbone.layers.0.mixer.in_proj" not in report.kept
    [note] = [note for note in report.notes if "stays as it is" in note]
    assert re.search(r"layers\.2\.mixer\.in_proj.*dt \d+%", note)


def test_a_recipe_may_insist(tmp_path):
    source, _ = with_small_dt(tmp_path / "source", 1e-6)
    report = quantize_checkpoint(source, tmp_path / "out", "fp8", recipe={"*.in_proj": "fp8"})
    assert [t.parts["dt"] for t in report.tensors if t.parts] == [1.0, 1.0]
    report = quantize_checkpoint(source, tmp_path / "rows", "fp8", recipe={"*.in_proj": "fp8_channel"})
    assert all(t.parts["dt"] < 0.03 for t in report.tensors if t.parts)


# calibration ------------------------------------------------------------------------------------------------------


def test_input_scales_are_the_largest_inputs(sources, tmp_path):
    source, target = sources("nano_4b_bf16"), tmp_path / "out"
    recipe = {"*.mixer.?_proj": "fp8", "lm_head": "nvfp4"}
    report = quantize_checkpoint(source, target, "mixed", recipe=recipe, calibration_text=TEXT)
    scales = {canonical(t.name): t.input_scale * {"nvfp4": 2688, "fp8_tensor": 448}[t.format] for t in report.tensors}
    model = Model.from_checkpoint(source)
    ids = torch.tensor(model.tokenizer.encode(TEXT))
    weights, eps = model.network.weights, 1e-5

    def normed(x, weight):
        x = x.float()
        return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight).bfloat16()

    hidden = model.network.embed(ids)
    caches = model.caches(slots=1, tokens=len(ids))
    [slot] = caches.acquire(1)
    from nemotron_mamba2 import Batch

    with caches.step(Batch.prefill([slot], [len(ids)])) as opened:
        for index, (layer, kind) in enumerate(zip(model.network.layers, model.config.pattern, strict=True)):
            x = normed(hidden, weights.layers[index].norm)
            first = {"M": "in_proj", "*": "k_proj", "-": "up_proj"}[kind]
            name = f"layers.{index}.mixer.{first}"
            assert scales[name] == pytest.approx(x.abs().max().item(), rel=1e-6), name
            if kind == "-":
                up = x.float() @ dequantize(weights.layers[index].up_proj).T
                wide = up.relu().square().max().item()
                assert scales[f"layers.{index}.mixer.down_proj"] == pytest.approx(wide, rel=2e-2)
            hidden = layer(hidden, opened.step, *{"M": (opened.state,), "*": (opened.table,), "-": ()}[kind])
    assert scales["lm_head"] == pytest.approx(normed(hidden, weights.norm_f).abs().max().item(), rel=1e-6)
    assert {name for name in scales if name.endswith(("out_proj", "o_proj"))} >= {"layers.0.mixer.out_proj"}
    stored = tensors_of(target)
    for tensor in report.tensors:
        assert stored[f"{tensor.name}.input_scale"].item() == tensor.input_scale


def test_experts_of_a_layer_share_their_input_scale(sources, tmp_path):
    report = quantize_checkpoint(sources("ultra_bf16"), tmp_path / "out", "nvfp4", calibration_text="the")
    assert report.algorithm == "NVFP4" and not report.notes
    for projection in ("up_proj", "down_proj"):
        scales = {
            t.input_scale for t in report.tensors if re.search(rf"layers\.1\..*experts\.\d+\.{projection}", t.name)
        }
        assert len(scales) == 1 and None not in scales
    up = load_model(tmp_path / "out").layers[1].experts_up
    assert up.input_scale.shape == up.shape[:1]


def test_calibration_changes_scales_of_inputs_alone(sources, tmp_path):
    quantize_checkpoint(sources("nano_30b_bf16"), tmp_path / "plain", "mixed")
    quantize_checkpoint(sources("nano_30b_bf16"), tmp_path / "static", "mixed", calibration_text=TEXT)
    plain, static = tensors_of(tmp_path / "plain"), tensors_of(tmp_path / "static")
    assert {n for n in static.keys() - plain.keys() if not n.endswith(".input_scale")} == set()
    assert all(torch.equal(plain[n].view(torch.uint8), static[n].view(torch.uint8)) for n in plain if plain[n].dim())


def test_without_calibration_a_note_says_what_is_missing(sources, tmp_path):
    report = quantize_checkpoint(sources("nano_4b_bf16"), tmp_path / "out", "fp8")
    assert any("no input_scale" in note for note in report.notes)
    assert not any(name.endswith("input_scale") for name in tensors_of(tmp_path / "out"))
    assert not quantize_checkpoint(sources("nano_4b_bf16"), tmp_path / "four", "nvfp4").notes


def test_what_a_text_does_not_reach_gets_no_input_scale(sources, tmp_path):
    recipe = {"embeddings": "fp8", "mtp.*.q_proj": "fp8", "mtp.*.experts.*": "nvfp4"}
    report = quantize_checkpoint(sources("ultra_bf16"), tmp_path / "out", "fp8", recipe=recipe, calibration_text=TEXT)
    without = {canonical(tensor.name) for tensor in report.tensors if tensor.input_scale is None}
    assert {name for name in without if ".experts." not in name} == {"embeddings", "mtp.layers.0.mixer.q_proj"}
    assert all(name.startswith(("embeddings", "mtp.")) for name in without)
    assert any("embeddings and 1 more: no input_scale" in note for note in report.notes)
    said = json.loads((tmp_path / "out" / "hf_quant_config.json").read_text())["quantization"]["quantized_layers"]
    assert said["mtp.layers.1.mixer.experts.0.up_proj"]["quant_algo"] == "W4A16_NVFP4"


@pytest.mark.parametrize("preset", PRESETS)
def test_what_was_written_generates(sources, tmp_path, preset):
    text = TEXT if preset in ("fp8", "mixed") else None
    quantize_checkpoint(sources("nano_30b_bf16"), tmp_path / "out", preset, calibration_text=text)
    [completion] = Model.from_checkpoint(tmp_path / "out").generate(["the"])
    assert completion.token_ids


# refusals, interruptions ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["nano_30b_nvfp4", "nano_4b_fp8", "compressed_nvfp4", "modelopt_fp8_block"])
def test_a_quantised_source_is_refused(sources, tmp_path, run, layout):
    assert_one_line(run("quantize", sources(layout), tmp_path / "out", "--format", "fp8"), "is quantised already")
    assert not list(tmp_path.iterdir())


def test_a_quantised_source_without_its_config_is_refused(sources, tmp_path):
    shutil.copytree(sources("nano_4b_fp8"), tmp_path / "source")
    (tmp_path / "source" / "hf_quant_config.json").unlink()
    with pytest.raises(CheckpointError, match=r"quantised already.*fp8_tensor"):
        quantize_checkpoint(tmp_path / "source", tmp_path / "out", "nvfp4")


def test_what_was_written_is_refused_as_a_source(sources, tmp_path):
    quantize_checkpoint(sources("nano_4b_bf16"), tmp_path / "out", "fp8")
    with pytest.raises(CheckpointError, match="quantised already"):
        quantize_checkpoint(tmp_path / "out", tmp_path / "again", "nvfp4")


@pytest.mark.parametrize(
    ("arguments", "pattern"),
    [
        (["SRC", "DST"], "--format"),
        (["SRC", "DST", "--format", "int4"], "int4"),
        (["SRC", "DST", "--format", "fp8", "--search", "best"], "best"),
        (["SRC", "DST", "--format", "fp8", "--search", "mse"], "search mse"),
        (["SRC", "DST", "--format", "fp8", "--search", "sweep"], "search sweep"),
        (["SRC", "DST", "--format", "fp8", "--recipe", "nowhere.json"], "nowhere.json"),
        (["SRC", "DST", "--format", "fp8", "--calibrate", "nowhere.txt"], "nowhere.txt"),
        (["SRC", "DST", "--format", "fp8", "--calibrate", "LATIN"], "UTF-8"),
        (["SRC", "DST", "--format", "fp8", "--calibrate", "EMPTY"], "at least one token"),
        (["SRC", "DST", "--format", "fp8", "--shard-size", "lots"], "number of bytes"),
        (["SRC", "DST", "--format", "fp8", "--plot", "no/where.png"], "--plot: no is no directory"),
        (["nowhere", "DST", "--format", "fp8"], "no such directory"),
        (["SRC", "SRC", "--format", "fp8"], "is there already"),
        (["SRC", "HERE", "--format", "fp8"], "is there already"),
        (["SRC", "SRC/inside", "--format", "fp8"], "inside the source"),
        (["SRC", "HERE/no/way", "--format", "fp8"], "no such directory"),
        (["SRC"], "Missing argument"),
    ],
)
def test_a_call_that_cannot_work_is_one_line(sources, tmp_path, run, arguments, pattern):
    (tmp_path / "here").mkdir()
    (tmp_path / "latin").write_bytes(b"\xff\xfe caf\xe9")
    (tmp_path / "empty").write_text("")
    names = {"SRC": sources("nano_4b_bf16"), "DST": tmp_path / "out", "HERE": tmp_path / "here"}
    names |= {"LATIN": tmp_path / "latin", "EMPTY": tmp_path / "empty"}
    words = [re.sub("^(SRC|DST|HERE|LATIN|EMPTY)", lambda m: str(names[m[1]]), a) for a in arguments]
    assert_one_line(run("quantize", *words), pattern)
    assert {path.name for path in tmp_path.iterdir()} == {"here", "latin", "empty"}
    assert not list((tmp_path / "here").iterdir())


def test_wrong_words_of_the_function_are_refused(sources, tmp_path):
    for wrong in ({"format": "int4"}, {"format": "nvfp4", "search": "best"}):
        with pytest.raises(ConfigError, match="expected one of"):
            quantize_checkpoint(sources("nano_4b_bf16"), tmp_path / "out", **wrong)
    (tmp_path / "recipe.json").write_text('{"*": "int4"}')
    with pytest.raises(ConfigError, match="'\\*': expected one of bf16"):
        read_recipe(tmp_path / "recipe.json")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_refused(tmp_path, value):
    from safetensors.torch import save_file

    source = write_model(tmp_path / "source", small_config("M-"))
    tensors = tensors_of(source)
    tensors["backbone.layers.1.mixer.up_proj.weight"][3, 5] = value
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"up_proj\.weight: holds values that are not finite"):
        quantize_checkpoint(source, tmp_path / "out", "nvfp4")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_an_error_midway_leaves_nothing(sources, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("nemotron_mamba2.quantize.convert._write_index", full)
    with pytest.raises(OSError, match="No space"):
        quantize_checkpoint(sources("nano_4b_bf16"), tmp_path / "out", "fp8")
    assert not list(tmp_path.iterdir())


def test_a_killed_run_leaves_nothing_that_loads(sources, tmp_path, run):
    source, target = sources("nano_30b_bf16"), tmp_path / "out"
    program = (
        "import os, sys, time\n"
        "from nemotron_mamba2.quantize import quantize_checkpoint\n"
        "def slowly(what, done, total):\n"
        "    print(done, flush=True)\n"
        "    time.sleep(0.05)\n"
        "quantize_checkpoint(sys.argv[1], sys.argv[2], 'mixed', shard_bytes=500_000, progress=slowly)\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program, str(source), str(target)], stdout=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 60
    while int(child.stdout.readline() or -1) < 1_500_000:  # some files are complete by then
        assert child.poll() is None and time.monotonic() < deadline
    os.kill(child.pid, signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    child.stdout.close()
    assert not target.exists()
    [left] = tmp_path.iterdir()
    assert len(list(left.glob("*.safetensors"))) > 1
    with pytest.raises(NemotronMamba2Error):
        Checkpoint(left)
    assert_one_line(run("quantize", source, target, "--format", "mixed"), r"\.out\.partial: left by a run")
    shutil.rmtree(left)
    assert run("quantize", source, target, "--format", "mixed")[0] == 0


# the command ------------------------------------------------------------------------------------------------------


def test_the_report_of_the_command(sources, tmp_path, run):
    code, out, err = run("quantize", sources("nano_30b_bf16"), tmp_path / "out", "--format", "mixed")
    assert (code, err) == (0, "")
    assert re.search(
        r"out: MIXED_PRECISION, 80 matrices quantised, 6 left, 1 files\n2.97 MB before, 1.46 MB after", out
    )
    assert re.search(r"nvfp4 \(mse\): median relative error 8\.\d\d%", out)
    assert len(re.findall(r"^backbone\.layers.*%", out, re.MULTILINE)) == 10
    assert re.search("note: .*because there was no calibration text", out)


def test_the_report_as_json_and_as_a_plot(sources, tmp_path, run):
    words = ("--format", "fp8", "--json", "--plot", tmp_path / "plot.png", "--device", "cpu")
    code, out, err = run("quantize", sources("nano_4b_bf16"), tmp_path / "out", *words)
    assert (code, err) == (0, "")
    record = json.loads(out)
    assert record["algorithm"] == "FP8" and record["search"] is None
    assert record["bytes_after"] < 0.6 * record["bytes_before"]
    in_proj = next(t for t in record["tensors"] if t["name"].endswith("0.mixer.in_proj"))
    assert set(in_proj["parts"]) == {"z", "x", "B", "C", "dt"} and in_proj["relative_error"] < 0.03
    assert "lm_head" in record["kept"]
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_a_plot_without_matplotlib_is_refused_first(sources, tmp_path, run, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    words = ("--format", "fp8", "--plot", tmp_path / "plot.png")
    assert_one_line(run("quantize", sources("nano_4b_bf16"), tmp_path / "out", *words), "needs matplotlib")
    assert not (tmp_path / "out").exists()


def test_progress_counts_all_bytes(sources, tmp_path):
    seen = []
    quantize_checkpoint(
        sources("nano_4b_bf16"), tmp_path / "out", "nvfp4", calibration_text=TEXT, progress=lambda *a: seen.append(a)
    )
    assert [what for what, *_ in seen] == sorted(what for what, *_ in seen)
    total = sum(t.nbytes for t in tensors_of(sources("nano_4b_bf16")).values())
    assert seen[-1] == ("quantising", total, total)
    assert all(0 <= done <= whole for _, done, whole in seen)


# memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_two_gigabytes_take_little_memory(tmp_path):
    widths = {
        "hidden_size": 3136,
        "mamba_num_heads": 96,
        "mamba_head_dim": 80,
        "n_groups": 8,
        "intermediate_size": 12544,
    }
    source = write_model(tmp_path / "source", small_config("M-" * 6, vocab_size=16384, **widths))
    assert (source / "model.safetensors").stat().st_size > 2e9
    program = (
        "import sys, threading, time\n"
        "import torch\n"
        "from nemotron_mamba2.quantize import quantize_checkpoint\n"
        "torch.set_num_threads(2)\n"
        "peak = 0\n"
        "def watch():\n"
        "    global peak\n"
        "    while True:\n"
        "        [line] = [l for l in open('/proc/self/status') if l.startswith('RssAnon')]\n"
        "        peak = max(peak, int(line.split()[1]) * 1024)\n"
        "        time.sleep(0.02)\n"
        "threading.Thread(target=watch, daemon=True).start()\n"
        "quantize_checkpoint(sys.argv[1], sys.argv[2], 'nvfp4')\n"
        "print(peak)\n"
    )
    command = [sys.executable, "-c", program, str(source), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 1.5e9
