"""Damaged checkpoints: each kind of damage, to each kind of tensor or file, ends in one clear line of ours.

Damage to names, dtypes and shapes works on headers alone (see `damage`), since loading checks them before any data.
"""

from __future__ import annotations

import functools
import itertools
import json
import logging
import os
import re
import struct
import tempfile
import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from checkpoints import config_of, small_config, write_checkpoint, write_json, write_model
from damage import BITS, Entry, entries_of, entry, write_header
from nemotron_mamba2.checkpoint import Checkpoint, inspect_checkpoint, load_layer, load_model
from nemotron_mamba2.errors import CheckpointError, ConfigError, FormatError

OURS = (CheckpointError, FormatError, ConfigError)
LAYOUTS = (
    "super_nvfp4",
    "lightning_nvfp4",
    "compressed_nvfp4",
    "compressed_fp8_dynamic",
    "compressed_fp8_block",
    "puzzle_bf16",
)
STATIC_SCALES = re.compile(r"^(?!.*\.experts\.).*\.(input_scale|input_global_scale)$")


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def sparse(tmp_path):
    """layout → its directory with headers in place of the data, and its entries."""

    def make(layout: str) -> tuple[Path, dict[str, Entry]]:
        directory = write_checkpoint(tmp_path / "whole", layout)
        entries = entries_of(directory)
        for file in directory.glob("*.safetensors*"):
            file.unlink()
        return directory, entries

    return make


def one_of_each_kind(entries: dict[str, Entry]) -> list[str]:
    """Of names that differ in numbers only, the last; layers and experts count as numbers."""
    return list({re.sub(r"\d+", "N", name): name for name in entries}.values())


def outcome(directory: Path, entries: dict[str, Entry]) -> str | None:
    """The one line that refuses these entries, or None when they load without a word."""
    write_header(directory / "model.safetensors", entries)
    try:
        with Checkpoint(directory) as checkpoint:
            report = inspect_checkpoint(checkpoint)
    except OURS as error:
        assert "\n" not in str(error)
        return str(error)
    return "; ".join(report.notes) or None


def short(name: str) -> str:
    """A name without prefix and suffix: the module that an error should name."""
    return re.sub(r"\.(weight\w*|input_\w*scale|[kv]_scale|bias)$", "", name.removeprefix("backbone."))


# tensors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_tensor_missing(layout, sparse):
    directory, entries = sparse(layout)
    assert outcome(directory, entries) is None
    for name in one_of_each_kind(entries):
        message = outcome(directory, {n: e for n, e in entries.items() if n != name})
        assert message is not None and short(name) in message, name
        if STATIC_SCALES.match(name):  # a projection may do without: then it is W4A16 or W8A16, and that is said
            assert "static activation scales" in message


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_tensor_twice(layout, sparse):
    directory, entries = sparse(layout)
    for name in one_of_each_kind(entries):
        twin = f"model.{name.removeprefix('backbone.')}"
        message = outcome(directory, {**entries, twin: entries[name]})
        assert message is not None and name in message and "two names" in message, name
    write_header(directory / "model.safetensors", entries)
    for name in one_of_each_kind(entries)[:5]:
        write_header(directory / "more.safetensors", {name: entries[name]})
        with pytest.raises(CheckpointError, match=rf"^{re.escape(name)}: held twice, by model.* and more"):
            Checkpoint(directory)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_tensor_of_a_dtype_that_nothing_has(layout, sparse):
    directory, entries = sparse(layout)
    for name, dtype in zip(one_of_each_kind(entries), itertools.cycle(("I8", "F8_E5M2", "F8_E8M0", "F64", "I32"))):
        message = outcome(directory, {**entries, name: entry(dtype, entries[name][1])})
        assert message is not None and short(name) in message, name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_scale_or_code_of_the_dtype_of_another(layout, sparse):
    """Codes and block scales have one dtype each; plain weights and other scales may be any float."""
    directory, entries = sparse(layout)
    for name in one_of_each_kind(entries):
        if entries[name][0] in ("U8", "F8_E4M3"):
            for dtype in ("BF16", "F32", "U8", "F8_E4M3"):
                if dtype != entries[name][0]:
                    message = outcome(directory, {**entries, name: entry(dtype, entries[name][1])})
                    assert message is not None and short(name) in message, (name, dtype)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_tensor_of_another_shape(layout, sparse):
    directory, entries = sparse(layout)
    for number, name in enumerate(one_of_each_kind(entries)):
        dtype, shape, _ = entries[name]
        changed = [(2 * shape[0], *shape[1:]), (2, *shape)] if shape else [(2,), (1, 1, 1)]
        if shape and shape[0] > 1:
            changed += [(shape[0] // 2, *shape[1:]), (0, *shape[1:])]
        for other in changed[number % 2 :: 2]:
            message = outcome(directory, {**entries, name: entry(dtype, other)})
            assert message is not None and short(name) in message, (name, other)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_scale_under_another_name(layout, sparse):
    directory, entries = sparse(layout)
    scales = [name for name in one_of_each_kind(entries) if name.endswith(("_scale", "_scale_2"))]
    assert scales or layout == "puzzle_bf16"
    for name in scales:
        others = [f"{name}s", name.replace("_scale", "_zero_point")]
        if "block" not in layout:  # there, both names mean the same
            others.append(f"{name}_inv")
        for other in others:
            renamed = {other if n == name else n: e for n, e in entries.items()}
            message = outcome(directory, renamed)
            assert message is not None and short(name) in message, (name, other)


# bytes ------------------------------------------------------------------------------------------------------------


@functools.cache
def small_file() -> bytes:
    with tempfile.TemporaryDirectory() as directory:
        write_model(directory, small_config("M*", hidden_size=32, mamba_head_dim=16, ssm_state_size=16, vocab_size=64))
        return (Path(directory) / "model.safetensors").read_bytes()


def load_bytes(content: bytes) -> str | None:
    """The line that refuses a file with this content, or None."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        write_json(
            directory / "config.json",
            small_config("M*", hidden_size=32, mamba_head_dim=16, ssm_state_size=16, vocab_size=64),
        )
        (directory / "model.safetensors").write_bytes(content)
        try:
            load_model(directory)
        except OURS as error:
            assert "\n" not in str(error)
            return str(error)
    return None


def header_bytes() -> int:
    return 8 + struct.unpack("<Q", small_file()[:8])[0]


def test_the_whole_file_loads():
    assert load_bytes(small_file()) is None


@given(st.data())
@settings(max_examples=60)
def test_a_file_cut_anywhere(data):
    whole = small_file()
    length = data.draw(st.one_of(st.integers(0, 16), st.integers(0, header_bytes()), st.integers(0, len(whole) - 1)))
    message = load_bytes(whole[:length])
    assert message is not None and "model.safetensors" in message


def test_a_file_that_goes_on():
    message = load_bytes(small_file() + b"\0")
    assert message is not None and "longer than its header says" in message


@given(st.integers(0, 10**6), st.integers(1, 255))
@settings(max_examples=150)
def test_a_byte_of_the_header_flipped(place, bits):
    """Ours, in one line, or harmless (a blank, the metadata)."""
    content = bytearray(small_file())
    place %= header_bytes()
    content[place] ^= bits
    load_bytes(bytes(content))


@given(st.binary(max_size=400))
@settings(max_examples=60)
def test_bytes_that_are_no_safetensors_at_all(content):
    assert load_bytes(content) is not None
    assert load_bytes(struct.pack("<Q", len(content)) + content) is not None


def header(**tensors) -> bytes:
    text = json.dumps(tensors).encode()
    return struct.pack("<Q", len(text)) + text


F32 = {"dtype": "F32", "shape": [2]}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (struct.pack("<Q", 1 << 62), "cut short"),
        (struct.pack("<Q", 150_000_000) + b" " * 16, "cut short"),
        (struct.pack("<Q", 2) + b"[]", "expected an object, found list"),
        (struct.pack("<Q", 2) + b"{]", "corrupt header"),
        (struct.pack("<Q", 4) + b"\xff\xfe\xfd\xfc", "corrupt header"),
        (header(a=5), "tensor 'a': expected an object"),
        (header(a={**F32, "data_offsets": [0, 8]}), "cut short: 0 bytes of data, expected 8"),
        (header(a={**F32, "data_offsets": [8, 0]}), "data_offsets"),
        (header(a={**F32, "data_offsets": [0, 8, 9]}), "data_offsets"),
        (header(a={**F32, "data_offsets": [-8, 0]}), "data_offsets"),
        (header(a={**F32, "data_offsets": [0, 1 << 70]}), "data_offsets"),
        (header(a={**F32, "data_offsets": [0.0, 8.0]}), "data_offsets"),
        (header(a={**F32, "shape": [True], "data_offsets": [0, 4]}), "shape"),
        (header(a={**F32, "shape": [-2], "data_offsets": [0, 8]}), "shape"),
        (header(a={**F32, "data_offsets": [0, 4]}) + bytes(4), "takes 8 bytes, but data_offsets span 4"),
        (header(a={"dtype": "F31", "shape": [1], "data_offsets": [0, 4]}) + bytes(4), "unknown dtype 'F31'"),
        (header(a={"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}) + bytes(4), "unknown dtype"),
        (header(**{"a\nb": {**F32, "data_offsets": [0, 8]}}) + bytes(8), "printable name"),
        (header(__metadata__=["x"], a={**F32, "data_offsets": [0, 8]}) + bytes(8), "__metadata__"),
        (header(a={**F32, "data_offsets": [0, 8]}, b={**F32, "data_offsets": [4, 12]}) + bytes(12), "overlaps"),
        (header(a={**F32, "data_offsets": [0, 8]}, b={**F32, "data_offsets": [16, 24]}) + bytes(24), "gap"),
        (struct.pack("<Q", 14) + b'{"a":1, "a":2}', "given twice"),
    ],
)
def test_headers_that_lie(content, words):
    message = load_bytes(content)
    assert message is not None and words in message and "model.safetensors" in message


# index and files --------------------------------------------------------------------------------------------------

INDEX = "model.safetensors.index.json"


def edit_index(directory: Path, change) -> None:
    index = json.loads((directory / INDEX).read_text())
    change(index["weight_map"])
    write_json(directory / INDEX, index)


@pytest.fixture
def sharded(tmp_path):
    return write_checkpoint(tmp_path / "checkpoint", "h_8b_bf16")


def refused(directory: Path, error=CheckpointError) -> str:
    with pytest.raises(error) as caught:
        load_model(directory)
    for alone in (lambda: load_layer(directory, 0), lambda: inspect_checkpoint(directory)):
        with pytest.raises(error, match=re.escape(str(caught.value))):
            alone()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    "target",
    [
        "../x.safetensors",
        "/etc/x.safetensors",
        "a/../../x.safetensors",
        "..\\x.safetensors",
        "x.bin",
        "",
        5,
        None,
        ["x.safetensors"],
        "a\nb.safetensors",
    ],
)
def test_an_index_that_points_elsewhere(sharded, target):
    (sharded.parent / "x.safetensors").write_bytes(small_file())
    edit_index(sharded, lambda files: files.update({"backbone.norm_f.weight": target}))
    message = refused(sharded)
    assert "backbone.norm_f.weight" in message and "expected a safetensors file in this directory" in message


def test_an_index_that_points_nowhere(sharded):
    edit_index(sharded, lambda files: files.update({"backbone.norm_f.weight": "model-9.safetensors"}))
    assert "model-9.safetensors: the index names this file, but it is not there" in refused(sharded)
    (sharded / "model-9.safetensors").mkdir()
    assert "expected a file" in refused(sharded)


def test_a_tensor_of_the_index_that_no_file_holds(sharded):
    edit_index(sharded, lambda files: files.update({"foo": "model-00001-of-00004.safetensors"}))
    assert "'foo': the index says model-00001-of-00004.safetensors, but no file holds it" in refused(sharded)


def test_a_tensor_in_another_file_than_the_index_says(sharded):
    name = "backbone.norm_f.weight"
    edit_index(sharded, lambda files: files.update({name: "model-00001-of-00004.safetensors"}))
    assert f"'{name}': the index says model-00001-of-00004.safetensors, but model-0000" in refused(sharded)


def test_a_tensor_that_the_index_leaves_out(sharded):
    edit_index(sharded, lambda files: files.pop("backbone.norm_f.weight"))
    assert "backbone.norm_f.weight (model-00004-of-00004.safetensors): in the file, but not in the index" in refused(
        sharded
    )


def test_a_file_that_the_index_leaves_out(sharded):
    (sharded / "other.safetensors").write_bytes(small_file())
    assert "other.safetensors: the index does not name this file" in refused(sharded)


@pytest.mark.parametrize(
    "text", ["", "[]", "{", "{}", '{"weight_map": []}', '{"weight_map": {}}', '{"weight_map": {"a": 1, "a": 2}}', "\0"]
)
def test_an_index_that_is_none(sharded, text):
    (sharded / INDEX).write_text(text)
    assert INDEX in refused(sharded)


def test_two_indexes(sharded):
    (sharded / INDEX).rename(sharded / "a.safetensors.index.json")
    load_model(sharded)
    (sharded / "b.safetensors.index.json").write_bytes((sharded / "a.safetensors.index.json").read_bytes())
    assert "2 index files" in refused(sharded)


def test_a_missing_shard_without_an_index(sharded):
    (sharded / INDEX).unlink()
    load_model(sharded)
    (sharded / "model-00002-of-00004.safetensors").unlink()
    assert "missing" in refused_model(sharded)


def refused_model(directory: Path) -> str:
    with pytest.raises(OURS) as caught:
        load_model(directory)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_links_that_leave_the_directory(sharded):
    file = sharded / "model-00002-of-00004.safetensors"
    file.rename(sharded.parent / "away.safetensors")
    file.symlink_to("../away.safetensors")
    assert "outside the checkpoint" in refused(sharded)
    file.unlink()
    file.symlink_to("nowhere")
    assert "it is not there" in refused(sharded)
    file.unlink()
    (sharded.parent / "away.safetensors").rename(sharded / "inside")
    file.symlink_to("inside")
    load_model(sharded)


def test_a_link_to_the_directory_itself_is_fine(sharded):
    link = sharded.parent / "link"
    link.symlink_to(sharded)
    load_model(link)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.gguf", None])
def test_pickle_files_are_never_opened(tmp_path, name):
    write_json(tmp_path / "config.json", small_config("M*"))
    if name is not None:
        (tmp_path / name).write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    message = refused(tmp_path)
    assert "expected safetensors files" in message and (name is None or f"{name} is not read: convert it" in message)


def test_a_model_beside_a_pickle_file_loads(tmp_path):
    (write_model(tmp_path, small_config("M*")) / "training_args.bin").write_bytes(b"x")
    load_model(tmp_path)


def test_no_directory(tmp_path):
    for path in (tmp_path / "nowhere", write_model(tmp_path, small_config("M*")) / "config.json"):
        assert "no such directory" in refused(path)


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read(sharded):
    (sharded / "model-00002-of-00004.safetensors").chmod(0)
    assert "Permission denied" in refused(sharded)


def test_a_file_that_changes_after_it_was_opened(tmp_path):
    write_model(tmp_path, small_config("M*"))
    file = tmp_path / "model.safetensors"
    with Checkpoint(tmp_path) as checkpoint:
        tensors = load_file(file)
        save_file({name: tensor.float() for name, tensor in tensors.items()}, file)
        with pytest.raises(CheckpointError, match="has changed since it was opened"):
            load_model(checkpoint)
    with Checkpoint(tmp_path) as checkpoint:
        file.write_bytes(b"nothing")
        with pytest.raises(CheckpointError, match="cannot be read"):
            load_model(checkpoint)


# configs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        5,
        [],
        {"quantization": []},
        {"quantization": {"quant_algo": 5}},
        {"quantization": {"quant_algo": "MIXED_PRECISION", "quantized_layers": []}},
        {"quantization": {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": "FP8"}}},
        {"quantization": {"quant_algo": "FP8", "exclude_modules": "lm_head"}},
        {"quantization": {"quant_algo": "FP8", "exclude_modules": [5]}},
        {"quantization": {"quant_algo": "FP8", "exclude_modules": ["re:("]}},
        {"quant_method": "compressed-tensors", "config_groups": []},
        {"quant_method": "compressed-tensors", "config_groups": {"a": 5}},
        {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": 5}}},
        {"quant_method": "compressed-tensors", "config_groups": {"a": {"targets": "Linear"}}},
        {"quant_method": "compressed-tensors", "config_groups": {"a": {"input_activations": True}}},
    ],
    ids=lambda value: re.sub(r"\W+", "-", json.dumps(value))[:60],
)
@pytest.mark.parametrize("place", ["hf_quant_config.json", "config.json"])
def test_quantisation_configs_that_are_none(tmp_path, value, place):
    write_model(tmp_path, small_config("M*"))
    if place == "config.json":
        write_json(tmp_path / place, {**small_config("M*"), "quantization_config": value})
    else:
        write_json(tmp_path / place, value)
    assert place in refused(tmp_path, ConfigError)


@pytest.mark.parametrize("layout", ["super_nvfp4", "compressed_nvfp4", "block_scale_inv"])
def test_no_value_of_a_quantisation_config_does_more_than_advise_or_refuse(tmp_path, layout, caplog):
    """Any key of it may hold anything: the weights load, or one line says why not."""
    caplog.set_level(logging.CRITICAL)
    directory, config = write_checkpoint(tmp_path, layout), config_of(layout)
    (directory / "hf_quant_config.json").unlink(missing_ok=True)
    for key in config["quantization_config"]:
        for value in (None, 0, "x", [], ["x"], {}, {"x": {}}, {"x": 5}, True):
            changed = {**config, "quantization_config": {**config["quantization_config"], key: value}}
            write_json(directory / "config.json", changed)
            try:
                inspect_checkpoint(directory)
            except OURS as error:
                assert "\n" not in str(error)


def test_a_config_that_does_not_fit_the_files(tmp_path):
    write_model(tmp_path, small_config("M-M*"))
    for changes, words in (
        (
            {"hybrid_override_pattern": "M-M"},
            r"layers\.3\.\S+ \(model\.safetensors\): .* is read by nothing, and 4 more",
        ),
        ({"hybrid_override_pattern": "M-M*M"}, r"layers\.4\.norm\.weight: missing"),
        ({"hybrid_override_pattern": "MM-*"}, r"layers\.1\.mixer\.in_proj\.weight: missing"),
        ({"vocab_size": 500}, r"embeddings\.weight .*expected \[500, 128\], found \[512, 128\]"),
        ({"head_dim": 64}, r"layers\.3\.mixer\.q_proj\.weight .*expected \[256, 128\], found \[128, 128\]"),
        ({"use_conv_bias": False}, r"layers\.0\.mixer\.conv1d\.bias .* is read by nothing"),
        ({"n_groups": 4}, r"layers\.0\.mixer\.in_proj\.weight .*expected \[1540, 128\], found \[1028, 128\]"),
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # num_hidden_layers
            write_json(tmp_path / "config.json", {**small_config("M-M*"), **changes})
            assert re.search(words, refused_model(tmp_path)), changes


def test_bits_are_those_of_the_package():
    from nemotron_mamba2.checkpoint.files import _DTYPES

    assert all(_DTYPES[name][0] == bits for name, bits in BITS.items())
