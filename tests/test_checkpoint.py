"""Loading every published layout: the weights are the truth bit for bit, in the formats that the files hold."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
import warnings
from dataclasses import fields

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from checkpoints import (
    LAYOUTS,
    config_of,
    small_config,
    truth,
    write_checkpoint,
    write_json,
    write_model,
    write_tokenizer,
)
from damage import entries_of, write_sparse
from layouts import lightning_excludes, nano_30b_excludes
from nemotron_mamba2.checkpoint import Checkpoint, inspect_checkpoint, load_layer, load_model, resolve
from nemotron_mamba2.errors import CheckpointError, FormatError
from nemotron_mamba2.formats import Fp8Block, Fp8Channel, Fp8Tensor, Nvfp4, Plain, dequantize
from nemotron_mamba2.weights import AttentionWeights, Mamba2Weights, MlpWeights, MoeWeights


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """These tensors are so small that threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# Field of a layer → its tensor below `layers.N.`; {} is the expert.
FIELDS = {
    "norm": "norm.weight",
    "in_proj": "mixer.in_proj.weight",
    "conv1d_weight": "mixer.conv1d.weight",
    "conv1d_bias": "mixer.conv1d.bias",
    "dt_bias": "mixer.dt_bias",
    "A_log": "mixer.A_log",
    "D": "mixer.D",
    "gated_norm": "mixer.norm.weight",
    "out_proj": "mixer.out_proj.weight",
    "q_proj": "mixer.q_proj.weight",
    "k_proj": "mixer.k_proj.weight",
    "v_proj": "mixer.v_proj.weight",
    "o_proj": "mixer.o_proj.weight",
    "k_scale": "mixer.k_proj.k_scale",
    "v_scale": "mixer.v_proj.v_scale",
    "up_proj": "mixer.up_proj.weight",
    "down_proj": "mixer.down_proj.weight",
    "gate": "mixer.gate.weight",
    "e_score_correction_bias": "mixer.gate.e_score_correction_bias",
    "experts_up": "mixer.experts.{}.up_proj.weight",
    "experts_down": "mixer.experts.{}.down_proj.weight",
    "shared_up": "mixer.shared_experts.up_proj.weight",
    "shared_down": "mixer.shared_experts.down_proj.weight",
    "fc1_latent_proj": "mixer.fc1_latent_proj.weight",
    "fc2_latent_proj": "mixer.fc2_latent_proj.weight",
}


def values(weight) -> Tensor:
    return weight if isinstance(weight, Tensor) else dequantize(weight)


def layer_values(prefix: str, layer) -> dict[str, Tensor]:
    """float32 values of a layer by tensor name, experts one by one."""
    found = {}
    for field in fields(layer):
        weight, name = getattr(layer, field.name), f"{prefix}.{FIELDS[field.name]}"
        if weight is None:
            continue
        if "{}" in name:
            found |= {name.format(expert): value for expert, value in enumerate(values(weight))}
        else:
            found[name] = values(weight).unsqueeze(1) if field.name == "conv1d_weight" else values(weight)
    return found


def model_values(model) -> dict[str, Tensor]:
    found = {
        "embeddings.weight": values(model.embeddings),
        "norm_f.weight": model.norm_f,
        "lm_head.weight": values(model.lm_head),
    }
    for index, layer in enumerate(model.layers):
        found |= layer_values(f"layers.{index}", layer)
    if model.mtp is not None:
        last = len(model.mtp.layers) - 1
        found["mtp.layers.0.eh_proj.weight"] = values(model.mtp.eh_proj)
        found["mtp.layers.0.enorm.weight"], found["mtp.layers.0.hnorm.weight"] = model.mtp.enorm, model.mtp.hnorm
        found[f"mtp.layers.{last}.final_layernorm.weight"] = model.mtp.final_layernorm
        for index, layer in enumerate(model.mtp.layers):
            found |= layer_values(f"mtp.layers.{index}", layer)
    return found


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert sorted(found) == sorted(expected)
    for name, value in expected.items():
        assert found[name].dtype == torch.float32 and torch.equal(found[name], value), name


def rewrite(directory, change) -> None:
    """Replace the tensors of a checkpoint by change(tensors), in one file without an index."""
    tensors = {}
    for file in sorted(directory.glob("*.safetensors")):
        tensors |= load_file(file)
        file.unlink()
    (directory / "model.safetensors.index.json").unlink(missing_ok=True)
    save_file(change(tensors), directory / "model.safetensors")


def edit_json(file, change) -> None:
    value = json.loads(file.read_text())
    change(value)
    write_json(file, value)


# every layout -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_loads_to_the_truth(tmp_path, layout, caplog):
    directory = write_checkpoint(tmp_path, layout)
    report = inspect_checkpoint(directory)
    model = load_model(directory)
    same(model_values(model), truth(layout))
    assert not [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert report.nbytes == sum(layer.nbytes for layer in model.layers) + sum(
        weight.nbytes
        for weight in (model.embeddings, model.lm_head, model.norm_f)
        + (
            ()
            if model.mtp is None
            else (model.mtp.eh_proj, model.mtp.enorm, model.mtp.hnorm, model.mtp.final_layernorm)
        )
    ) + (0 if model.mtp is None else sum(layer.nbytes for layer in model.mtp.layers))
    for described, layer in zip(report.layers, model.layers, strict=True):
        found = [(name, weight.format, weight.shape, weight.nbytes) for name, weight in layer.projections()]
        assert found == [(p.name, p.format, p.shape, p.nbytes) for p in described.projections]
        assert described.nbytes == layer.nbytes


@pytest.mark.parametrize("layout", ["super_nvfp4", "resaved_bf16", "omni_nvfp4", "compressed_fp8_dynamic"])
def test_single_layers_are_those_of_the_model(tmp_path, layout):
    directory = write_checkpoint(tmp_path, layout)
    with Checkpoint(directory) as checkpoint:
        model = load_model(checkpoint)
        for index, layer in enumerate(model.layers):
            for source in (directory, checkpoint):
                alone = load_layer(source, index)
                assert type(alone) is type(layer)
                same(layer_values("x", alone), layer_values("x", layer))
        for index in (-1, len(model.layers)):
            with pytest.raises(CheckpointError, match=f"layer {index}: .* has layers 0 to {len(model.layers) - 1}"):
                load_layer(checkpoint, index)


@pytest.mark.parametrize(
    ("layout", "kinds"),
    [
        ("h_8b_bf16", {"bf16"}),
        ("nano_4b_fp8", {"bf16", "fp8_tensor"}),
        ("nano_9b_v2_nvfp4", {"bf16", "nvfp4"}),
        ("compressed_nvfp4", {"bf16", "nvfp4"}),
        ("compressed_fp8_dynamic", {"bf16", "fp8_channel"}),
        ("compressed_fp8_block", {"bf16", "fp8_block"}),
        ("block_scale_inv", {"bf16", "fp8_block"}),
        ("modelopt_fp8_block", {"bf16", "fp8_block"}),
        ("modelopt_fp8_channel", {"bf16", "fp8_channel"}),
        ("super_nvfp4", {"bf16", "fp8_tensor", "nvfp4"}),
        ("lightning_nvfp4", {"bf16", "fp8_tensor", "nvfp4"}),
    ],
)
def test_formats_of_a_layout(tmp_path, layout, kinds):
    report = inspect_checkpoint(write_checkpoint(tmp_path, layout))
    assert {p.format for layer in report.layers for p in layer.projections} | {p.format for p in report.ends} == kinds


def test_the_same_seed_gives_the_same_bytes(tmp_path):
    for name in ("a", "b"):
        write_checkpoint(tmp_path / name, "super_nvfp4")
    write_checkpoint(tmp_path / "c", "super_nvfp4", seed=1)
    for file in (tmp_path / "a").iterdir():
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes()
        assert file.suffix == ".json" or file.read_bytes() != (tmp_path / "c" / file.name).read_bytes()


def test_real_exclude_lists_have_their_published_lengths():
    plan = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
    excludes = nano_30b_excludes(plan)
    assert len(excludes) == 60 and len(lightning_excludes(plan)) == 72
    assert [i for i in range(52) if f"backbone.layers.{i}.mixer.in_proj" in excludes] == [4, 11, 18, 25, 32, 41]


def test_vectors_are_float32_and_large_weights_are_views_of_the_file(tmp_path):
    model = load_model(write_checkpoint(tmp_path, "nano_30b_bf16"))
    for layer in model.layers:
        for field in fields(layer):
            weight = getattr(layer, field.name)
            if isinstance(weight, Tensor):
                assert weight.dtype == torch.float32, field.name
            elif weight is not None:
                assert weight.weight.dtype == torch.bfloat16, field.name
    assert isinstance(model.layers[0], Mamba2Weights) and model.layers[0].conv1d_weight.shape == (768, 4)
    assert isinstance(model.layers[1], MoeWeights) and model.layers[1].experts_up.shape == (8, 64, 128)


def test_a_float32_model_stays_float32(tmp_path):
    directory = write_model(tmp_path, small_config("ME-*"), dtype=torch.float32)
    model = load_model(directory)
    assert isinstance(model.layers[2], MlpWeights) and model.layers[2].up_proj.weight.dtype == torch.float32
    assert isinstance(model.layers[3], AttentionWeights) and model.layers[3].k_scale is None
    assert inspect_checkpoint(directory).layers[2].projections[0].dtype == "float32"


def test_progress_counts_the_bytes_that_are_read(tmp_path):
    calls: list[tuple[int, int]] = []
    with Checkpoint(write_checkpoint(tmp_path, "omni_nvfp4")) as checkpoint:
        load_model(checkpoint, progress=lambda done, total: calls.append((done, total)))
        read = [e for e in checkpoint.tensors.values() if e.name.startswith("language_model.")]
    assert {total for _, total in calls} == {sum(entry.nbytes for entry in read)}
    done = [done for done, _ in calls]
    assert done == sorted(done) and calls[-1][0] == calls[-1][1] and len(calls) == len(read)


def test_tensors_outlive_their_checkpoint(tmp_path):
    directory = write_checkpoint(tmp_path / "there", "h_8b_bf16")
    with Checkpoint(directory) as checkpoint:
        model = load_model(checkpoint)
    shutil.rmtree(directory)
    same(model_values(model), truth("h_8b_bf16"))


# names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["nano_30b_nvfp4", "super_nvfp4"])
@pytest.mark.parametrize("prefix", ["model.", "backbone.", "language_model.backbone.", "language_model.model."])
@pytest.mark.parametrize("embeddings", ["embeddings", "embed_tokens"])
def test_p94_one_model_under_all_its_names(tmp_path, layout, prefix, embeddings):
    directory = write_checkpoint(tmp_path, layout)
    outer = prefix.split(".")[0] + "." if prefix.startswith("language_model") else ""

    def renamed(name: str) -> str:
        if not name.startswith("backbone."):
            return outer + name
        return prefix + name.removeprefix("backbone.").replace("embeddings", embeddings)

    rewrite(directory, lambda tensors: {renamed(name): tensor for name, tensor in tensors.items()})
    same(model_values(load_model(directory)), truth(layout))


@pytest.mark.parametrize(
    "name", ["backbone.layers.0.mixer.extra", "layers.9.norm.weight", "foo", "backbone.norm.weight"]
)
def test_p94_leftover_tensors_are_an_error(tmp_path, name):
    directory = write_checkpoint(tmp_path, "h_8b_bf16")
    rewrite(directory, lambda tensors: {**tensors, name: torch.zeros(2)})
    with pytest.raises(CheckpointError, match=rf"{name} \(model\.safetensors\): F32 \[2\] is read by nothing"):
        load_model(directory)
    if name.startswith("backbone.layers.0"):
        with pytest.raises(CheckpointError, match=name):
            load_layer(directory, 0)


def test_p94_mtp_is_read_when_used_and_skipped_by_name_when_not(tmp_path):
    directory = write_checkpoint(tmp_path, "puzzle_bf16")
    assert load_model(directory).mtp is not None and len(inspect_checkpoint(directory).mtp) == 2
    for unused in (True, False):
        report = inspect_checkpoint(directory, mtp=not unused)
        (skipped,) = report.skipped
        assert load_model(directory, mtp=not unused).mtp is None and report.mtp == ()
        entries = Checkpoint(directory).tensors.values()
        names = [e for e in entries if e.name.startswith("mtp.")]
        assert (skipped.rule, skipped.tensors, skipped.nbytes) == ("mtp", len(names), sum(e.nbytes for e in names))
        edit_json(directory / "config.json", lambda c: c.update(num_nextn_predict_layers=0))


def test_a_config_that_names_an_mtp_head_the_files_lack(tmp_path, caplog):
    directory = write_checkpoint(tmp_path, "puzzle_bf16")
    (directory / "mtp.safetensors").unlink()
    assert load_model(directory).mtp is None
    assert "multi-token-prediction head, the files have none" in caplog.text


def test_towers_are_skipped_by_named_rules(tmp_path):
    report = inspect_checkpoint(write_checkpoint(tmp_path, "omni_nvfp4"))
    assert {skipped.rule: skipped.tensors for skipped in report.skipped} == {"vision": 2, "projector": 2, "audio": 2}
    assert all(skipped.reason and skipped.nbytes for skipped in report.skipped)


def test_rotary_buffers_are_skipped(tmp_path):
    directory = write_checkpoint(tmp_path, "h_8b_bf16")
    rewrite(directory, lambda t: {**t, "backbone.layers.3.mixer.rotary_emb.inv_freq": torch.ones(16)})
    assert [skipped.rule for skipped in inspect_checkpoint(directory).skipped] == ["rotary"]
    load_layer(directory, 3)


# lm_head ----------------------------------------------------------------------------------------------------------


def test_p93_an_untied_head_is_its_own(tmp_path):
    model = load_model(write_model(tmp_path, small_config("M*")))
    assert not torch.equal(model.lm_head.weight, model.embeddings.weight)
    edit_json(tmp_path / "config.json", lambda c: c.update(tie_word_embeddings=True))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight .* differs from embeddings"):
        load_model(tmp_path)
    rewrite(tmp_path, lambda t: {**t, "lm_head.weight": t["backbone.embeddings.weight"].clone()})
    model = load_model(tmp_path)
    assert model.lm_head is model.embeddings
    assert [skipped.rule for skipped in inspect_checkpoint(tmp_path).skipped] == ["tied-lm-head"]


def test_p93_a_head_may_be_missing_only_when_tied(tmp_path):
    model = load_model(write_model(tmp_path, small_config("M*", tie_word_embeddings=True)))
    assert model.lm_head is model.embeddings and len(inspect_checkpoint(tmp_path).ends) == 1
    edit_json(tmp_path / "config.json", lambda c: c.update(tie_word_embeddings=False))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight: missing, .* tie_word_embeddings"):
        load_model(tmp_path)


@pytest.mark.parametrize("layout", ["lightning_nvfp4", "nano_9b_v2_nvfp4"])
def test_p78_tensors_decide_how_the_head_is_stored_and_a_mismatch_is_logged(tmp_path, layout, caplog):
    """lm_head is W4A16 in one file, bf16 in the other; the config is made to say the opposite."""
    directory = write_checkpoint(tmp_path, layout)
    said = {"quantized_layers": {}} if layout == "lightning_nvfp4" else {"exclude_modules": []}
    edit_json(directory / "hf_quant_config.json", lambda c: c["quantization"].update(said))
    model = load_model(directory)
    assert isinstance(model.lm_head, Nvfp4 if layout == "lightning_nvfp4" else Plain)
    same(model_values(model), truth(layout))
    said, held = ("bf16", "nvfp4") if layout == "lightning_nvfp4" else ("nvfp4", "bf16")
    assert f"the config says {said}, the file holds {held}; the file is used" in caplog.text
    assert any(f"file holds {held}" in note for note in inspect_checkpoint(directory).notes)


# formats ----------------------------------------------------------------------------------------------------------


def test_p74_mixed_precision_layer_by_layer(tmp_path):
    directory = write_checkpoint(tmp_path, "super_nvfp4")
    layers = load_model(directory).layers
    first, moe, second, attention = layers[0], layers[1], layers[2], layers[4]
    assert isinstance(first, Mamba2Weights) and isinstance(second, Mamba2Weights)
    assert isinstance(first.in_proj, Fp8Tensor) and isinstance(first.out_proj, Fp8Tensor)
    assert isinstance(second.in_proj, Plain) and isinstance(second.out_proj, Fp8Tensor)
    assert first.in_proj.input_scale is not None and first.in_proj.input_scale.shape == ()
    assert isinstance(moe, MoeWeights) and isinstance(attention, AttentionWeights)
    assert isinstance(moe.experts_up, Nvfp4) and moe.experts_up.shape == (8, 64, 64)
    assert moe.experts_up.global_scale.shape == moe.experts_up.input_scale.shape == (8,)
    assert isinstance(moe.shared_up, Fp8Tensor) and isinstance(moe.shared_down, Nvfp4)
    assert isinstance(moe.fc1_latent_proj, Fp8Tensor) and isinstance(moe.fc2_latent_proj, Plain)
    assert isinstance(attention.q_proj, Plain) and isinstance(attention.o_proj, Fp8Tensor)
    assert attention.k_scale.shape == attention.v_scale.shape == () and attention.k_scale > 0
    assert [layer.kv_scales for layer in inspect_checkpoint(directory).layers] == [index == 4 for index in range(7)]


@pytest.mark.parametrize("suffix", ["weight_scale", "weight_scale_2", "input_scale", "k_scale", "output_scale"])
def test_p74_a_scale_that_nothing_reads_is_an_error(tmp_path, suffix):
    directory = write_checkpoint(tmp_path, "super_nvfp4")
    name = f"backbone.layers.2.mixer.in_proj.{suffix}"
    rewrite(directory, lambda tensors: {**tensors, name: torch.tensor(0.5)})
    with pytest.raises((CheckpointError, FormatError), match=name):
        load_model(directory)


def test_p75_w4a16_weights_have_no_activation_scale(tmp_path):
    directory = write_checkpoint(tmp_path, "lightning_nvfp4")
    model = load_model(directory)
    assert isinstance(model.lm_head, Nvfp4) and model.lm_head.input_scale is None
    assert isinstance(model.layers[1], MoeWeights) and model.layers[1].experts_up.input_scale is None
    assert not any(skipped.rule == "weight-only-input-scale" for skipped in inspect_checkpoint(directory).skipped)


def test_p75_a_stray_activation_scale_of_w4a16_is_dropped_by_name(tmp_path):
    directory = write_checkpoint(tmp_path, "lightning_nvfp4")
    strays = ["lm_head", *(f"backbone.layers.1.mixer.experts.{expert}.up_proj" for expert in range(8))]
    extra = {f"{name}.input_scale": torch.tensor(0.1) for name in strays}
    rewrite(directory, lambda tensors: {**tensors, **extra})
    model = load_model(directory)
    assert model.lm_head.input_scale is None and model.layers[1].experts_up.input_scale is None
    same(model_values(model), truth("lightning_nvfp4"))
    (skipped,) = inspect_checkpoint(directory).skipped
    assert (skipped.rule, skipped.tensors, skipped.nbytes) == ("weight-only-input-scale", 9, 36)
    # Without a config that says W4A16, the same scale is an activation scale.
    edit_json(
        directory / "hf_quant_config.json",
        lambda c: c["quantization"]["quantized_layers"].update(lm_head={"quant_algo": "NVFP4"}),
    )
    assert load_model(directory).lm_head.input_scale == torch.tensor(0.1)


@pytest.mark.parametrize(
    "excludes",
    [
        ["backbone.layers.0.mixer.conv1d.", "lm_head"],
        ["backbone.layers.0.mixer.conv1d<junk>", "lm_head"],
        ["", ".", "*"],
        ["re:.*conv1d"],
        [],
        None,
    ],
    ids=str,
)
def test_p77_exclude_lists_only_advise(tmp_path, excludes):
    directory = write_checkpoint(tmp_path, "nano_9b_v2_nvfp4")
    edit_json(directory / "hf_quant_config.json", lambda c: c["quantization"].update(exclude_modules=excludes))
    model = load_model(directory)
    assert model.layers[0].conv1d_weight.dtype == torch.float32
    same(model_values(model), truth("nano_9b_v2_nvfp4"))


def test_without_any_quantisation_config(tmp_path, caplog):
    for layout in ("super_nvfp4", "nano_4b_fp8", "modelopt_fp8_channel", "compressed_nvfp4"):
        directory = write_checkpoint(tmp_path / layout, layout)
        (directory / "hf_quant_config.json").unlink(missing_ok=True)
        edit_json(directory / "config.json", lambda c: c.pop("quantization_config", None))
        model = load_model(directory)
        same(model_values(model), truth(layout))
        assert inspect_checkpoint(directory).algorithm is None
    assert not caplog.records


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("norm.weight", lambda t: torch.cat([t, t])),
        ("A_log", lambda t: torch.cat([t, t])),
        ("D", lambda t: torch.cat([t, t])),
        ("dt_bias", lambda t: torch.cat([t, t])),
        ("conv1d.weight", lambda t: torch.cat([t, t])),
        ("conv1d.weight", lambda t: t.squeeze(1)),
        ("conv1d.bias", lambda t: t[: len(t) // 2].clone()),
        ("in_proj.weight", lambda t: torch.cat([t, t])),
        ("out_proj.weight", lambda t: t.T.contiguous()),
    ],
)
def test_p79_doubled_or_cut_halves_are_refused(tmp_path, name, value):
    directory = write_checkpoint(tmp_path, "h_8b_bf16")
    full = f"backbone.layers.2.mixer.{name}"
    rewrite(directory, lambda tensors: {**tensors, full: value(tensors[full])})
    for load in (load_model, lambda path: load_layer(path, 2)):
        with pytest.raises(CheckpointError, match=rf"{full} \(model\.safetensors\): expected .*\[.*found .*\["):
            load(directory)


def test_p83_scale_layouts_are_types(tmp_path):
    block = load_layer(write_checkpoint(tmp_path / "a", "modelopt_fp8_block"), 0)
    assert isinstance(block.in_proj, Fp8Block) and block.in_proj.scale.shape == (9, 2)
    channel = load_layer(write_checkpoint(tmp_path / "b", "modelopt_fp8_channel"), 0)
    assert isinstance(channel.in_proj, Fp8Channel) and channel.in_proj.scale.shape == (1028,)
    name = "backbone.layers.0.mixer.in_proj.weight_scale"
    # One scalar where a block config promises blocks is a per-tensor scale, and typed as one.
    rewrite(tmp_path / "a", lambda tensors: {**tensors, name: torch.tensor(0.01)})
    assert isinstance(load_layer(tmp_path / "a", 0).in_proj, Fp8Tensor)
    for shape in ((3,), (9, 1, 2, 2), (2, 9), (9, 2, 1), (1028, 2)):
        rewrite(tmp_path / "a", lambda tensors, shape=shape: {**tensors, name: torch.ones(shape)})
        with pytest.raises(FormatError, match=r"in_proj\.weight \(model\.safetensors\): fp8_block scale: expected"):
            load_layer(tmp_path / "a", 0)


@pytest.mark.parametrize(
    ("layout", "dynamic"), [("modelopt_fp8_channel", True), ("compressed_fp8_dynamic", True), ("weights_only", False)]
)
def test_only_the_config_says_whether_activations_are_quantised_per_row(tmp_path, layout, dynamic):
    directory = write_checkpoint(tmp_path, "compressed_fp8_dynamic" if layout == "weights_only" else layout)
    if layout == "weights_only":
        edit_json(
            directory / "config.json",
            lambda c: c["quantization_config"]["config_groups"]["group_0"].update(input_activations=None),
        )
    layer = load_layer(directory, 0)
    assert isinstance(layer.in_proj, Fp8Channel) and layer.in_proj.dynamic is dynamic


def test_both_quantisation_files_may_disagree_and_it_is_logged(tmp_path, caplog):
    directory = write_checkpoint(tmp_path, "super_nvfp4")
    edit_json(directory / "hf_quant_config.json", lambda c: c["quantization"].update(quant_algo="FP8"))
    same(model_values(load_model(directory)), truth("super_nvfp4"))
    assert "quantization_config says MIXED_PRECISION, but hf_quant_config.json says FP8" in caplog.text


def test_an_algorithm_nobody_knows_is_logged(tmp_path, caplog):
    directory = write_checkpoint(tmp_path, "nano_4b_fp8")
    edit_json(directory / "hf_quant_config.json", lambda c: c["quantization"].update(quant_algo="FP9"))
    same(model_values(load_model(directory)), truth("nano_4b_fp8"))
    assert "unknown algorithm 'FP9'" in caplog.text


def test_a_missing_static_scale_is_logged(tmp_path, caplog):
    directory = write_checkpoint(tmp_path, "nano_4b_fp8")
    name = "backbone.layers.0.mixer.in_proj.input_scale"
    rewrite(directory, lambda tensors: {key: value for key, value in tensors.items() if key != name})
    assert load_layer(directory, 0).in_proj.input_scale is None
    assert "layers.0.mixer.in_proj: the config says static activation scales" in caplog.text


def test_kv_scales_that_are_promised_but_absent_are_noted(tmp_path, caplog):
    report = inspect_checkpoint(write_checkpoint(tmp_path, "nano_30b_nvfp4"))
    assert any("FP8 KV cache" in note and "layers.5.mixer" in note for note in report.notes)


def test_experts_of_one_layer_share_a_format(tmp_path):
    directory = write_checkpoint(tmp_path, "super_nvfp4")
    name = "backbone.layers.1.mixer.experts.3.up_proj"

    def plain(tensors):
        kept = {key: value for key, value in tensors.items() if not key.startswith(f"{name}.")}
        return {**kept, f"{name}.weight": torch.zeros(64, 64).bfloat16()}

    rewrite(directory, plain)
    with pytest.raises(FormatError, match=r"experts\.0\.up_proj is nvfp4 .*experts\.3\.up_proj is bf16"):
        load_model(directory)


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"weight": torch.zeros(192, 128).to(torch.float8_e5m2)}, "F8_E5M2"),
        ({"weight": torch.zeros(192, 128, dtype=torch.int8)}, "I8"),
        ({"weight_packed": torch.zeros(192, 16, dtype=torch.int32)}, "I32"),
        (
            {
                "weight": torch.zeros(192, 128).to(torch.float8_e4m3fn),
                "weight_scale": torch.zeros(192, 4, dtype=torch.uint8),
            },
            "MXFP8",
        ),
    ],
    ids=["e5m2", "int8", "int4", "mxfp8"],
)
def test_formats_that_are_not_read_name_those_that_are(tmp_path, part, words):
    directory = write_model(tmp_path, small_config("M-"))
    module = "backbone.layers.1.mixer.up_proj"

    def change(tensors):
        kept = {key: value for key, value in tensors.items() if not key.startswith(module)}
        return {**kept, **{f"{module}.{suffix}": tensor for suffix, tensor in part.items()}}

    rewrite(directory, change)
    with pytest.raises(FormatError, match=f"up_proj.*{words}.*supported: bf16, fp8_tensor"):
        load_model(directory)


def test_p84_a_bf16_correction_bias_loads_with_a_warning(tmp_path):
    directory = write_checkpoint(tmp_path, "ultra_bf16")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        exact = load_model(directory).layers[1]
    assert exact.gate.dtype == exact.e_score_correction_bias.dtype == torch.float32
    assert (exact.e_score_correction_bias - 56.98).abs().max() < 0.5
    rewrite(
        directory, lambda tensors: {n: t.bfloat16() if n.endswith("correction_bias") else t for n, t in tensors.items()}
    )
    with pytest.warns(
        UserWarning, match=r"layers\.1\.mixer\.gate\.e_score_correction_bias.*correction bias is not F32"
    ):
        rounded = load_model(directory).layers[1]
    assert rounded.e_score_correction_bias.dtype == torch.float32
    assert not torch.equal(rounded.e_score_correction_bias, exact.e_score_correction_bias)


def test_kv_scales_of_compressed_tensors_hang_on_the_mixer(tmp_path):
    directory = write_checkpoint(tmp_path, "compressed_nvfp4")
    mixer = "backbone.layers.6.mixer"
    scales = {f"{mixer}.{which}_scale": torch.tensor([value]).bfloat16() for which, value in (("k", 0.5), ("v", 0.25))}
    rewrite(directory, lambda tensors: {**tensors, **scales})
    layer = load_layer(directory, 6)
    assert (layer.k_scale.item(), layer.v_scale.item()) == (0.5, 0.25) and layer.k_scale.dtype == torch.float32
    rewrite(directory, lambda tensors: {n: t for n, t in tensors.items() if n != f"{mixer}.v_scale"})
    with pytest.raises(CheckpointError, match=r"layers\.6\.mixer\.v_scale: missing"):
        load_layer(directory, 6)


@pytest.mark.parametrize("value", [0.0, float("nan")])
def test_a_reciprocal_that_is_no_number(tmp_path, value):
    directory = write_checkpoint(tmp_path, "compressed_nvfp4")
    name = "backbone.layers.0.mixer.in_proj.weight_global_scale"
    rewrite(directory, lambda tensors: {**tensors, name: torch.tensor([value])})
    with pytest.raises(FormatError, match=name):
        load_model(directory)


# memory -----------------------------------------------------------------------------------------------------------

MEASURE = """
import re, sys
import torch
from nemotron_mamba2.checkpoint import load_model
torch.set_num_threads(1)
def anonymous():
    return int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
start = peak = anonymous()
def progress(done, total):
    global peak
    peak = max(peak, anonymous())
model = load_model(sys.argv[1], progress=progress)
touched = sum(float(w.weight.flatten()[::1024].sum()) for layer in model.layers for _, w in layer.projections())
print(max(peak, anonymous()) - start)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(("pattern", "stacked"), [("MEME", True), ("M-M-*", False)])
def test_host_memory_while_loading(tmp_path, pattern, stacked):
    """Experts are stacked once, into their own place; all else on the CPU stays in the file."""
    wide = {"hidden_size": 1024, "mamba_num_heads": 32, "moe_intermediate_size": 2048, "intermediate_size": 32768}
    config = small_config(pattern, n_routed_experts=32 if stacked else None, vocab_size=4096, **wide)
    entries = entries_of(config)
    write_sparse(tmp_path, config, entries)
    size = (tmp_path / "model.safetensors").stat().st_size
    assert 200e6 < size < 700e6
    done = subprocess.run([sys.executable, "-c", MEASURE, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    experts = sum(nbytes for name, (_, _, nbytes) in entries.items() if ".experts." in name)
    assert int(done.stdout) <= experts + 60e6, (int(done.stdout), experts, size)


# paths and hub ids ------------------------------------------------------------------------------------------------


def test_resolve_takes_directories(tmp_path):
    write_tokenizer(write_checkpoint(tmp_path / "a", "h_8b_bf16"))
    assert resolve(tmp_path / "a") == resolve(str(tmp_path / "a")) == tmp_path / "a"
    for bad, words in (
        (tmp_path / "b", "no such directory"),
        (tmp_path / "a" / "config.json", "found a file"),
        ("../x/y/z", "no such directory"),
        ("", "found|no such"),
    ):
        with pytest.raises(CheckpointError, match=words) as caught:
            resolve(bad if bad else tmp_path / "nothing")
        assert "\n" not in str(caught.value)


class Hub:
    """Stands in for huggingface_hub."""

    def __init__(self, answer):
        self.answer, self.asked = answer, None

    def snapshot_download(self, name, *, allow_patterns):
        self.asked = name, allow_patterns
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def test_resolve_fetches_hub_ids_without_code(tmp_path, monkeypatch):
    hub = Hub(str(tmp_path))
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    assert resolve("nvidia/NVIDIA-Nemotron-Nano-9B-v2") == tmp_path
    name, patterns = hub.asked
    assert name == "nvidia/NVIDIA-Nemotron-Nano-9B-v2"
    assert "*.safetensors" in patterns and not any(".py" in p or ".bin" in p or p == "*" for p in patterns)


def test_resolve_says_what_went_wrong_with_a_hub_id(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", Hub(ConnectionError("no\nroute")))
    with pytest.raises(CheckpointError, match=r"^org/name: no such directory, and the hub does not give it: no route$"):
        resolve("org/name")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(CheckpointError, match=r"^org/name: .* pip install 'nemotron-mamba2\[hub\]'$"):
        resolve("org/name")


def test_the_hub_cache_is_read_through_its_links(tmp_path):
    """snapshots/<revision>/file → ../../blobs/<hash>, as huggingface_hub lays it out."""
    snapshot = tmp_path / "models--org--name" / "snapshots" / "abc"
    blobs = tmp_path / "models--org--name" / "blobs"
    write_checkpoint(snapshot, "h_8b_bf16")
    blobs.mkdir()
    for number, file in enumerate(sorted(snapshot.iterdir())):
        file.rename(blobs / str(number))
        file.symlink_to(f"../../blobs/{number}")
    same(model_values(load_model(snapshot)), truth("h_8b_bf16"))


def test_checkpoint_shows_what_it_holds(tmp_path):
    with Checkpoint(write_checkpoint(tmp_path, "nano_30b_nvfp4")) as checkpoint:
        entry = checkpoint.tensors["backbone.layers.0.mixer.in_proj.weight"]
        assert (entry.dtype, entry.shape, entry.nbytes) == ("U8", (1028, 64), 1028 * 64)
        assert checkpoint.config.pattern == "MEMEM*EME"
        assert torch.equal(checkpoint.read(entry), load_file(entry.file)[entry.name])
    assert config_of("nano_30b_nvfp4")["hybrid_override_pattern"] == "MEMEM*EME"
    with safe_open(tmp_path / "model-00001-of-00003.safetensors", "pt") as file:
        assert "backbone.embeddings.weight" in file.keys()  # noqa: SIM118
