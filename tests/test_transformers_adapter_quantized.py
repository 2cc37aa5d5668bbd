"""`from_pretrained` of every published layout: our loader's logits, in our loader's memory."""

from __future__ import annotations

import copy
import json
import subprocess
import sys

import pytest
import torch
import transformers
from torch import nn

from checkpoints import LAYOUTS, config_of, write_checkpoint, write_json
from hf_models import lift_clamp, logits, quiet
from models import relative_error
from nemotron_mamba2 import AdapterError, Model, NemotronMamba2Error, Policy, SamplingParams, dequantize
from nemotron_mamba2.adapters.transformers import ModelOptConfig, accelerate, restore
from nemotron_mamba2.adapters.transformers.configs import NemotronHConfig, known_spelling
from nemotron_mamba2.adapters.transformers.modules import Quantised, QuantisedEmbedding, QuantisedLinear
from nemotron_mamba2.batch import Batch
from nemotron_mamba2.ops.reference import quantize

QUANTISED = tuple(name for name in LAYOUTS if not name.endswith("_bf16"))
W8A8 = ("nano_4b_fp8", "lightning_nvfp4", "super_nvfp4", "compressed_fp8_dynamic", "modelopt_fp8_channel")


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    made = {}

    def write(layout: str):
        if layout not in made:
            made[layout] = write_checkpoint(tmp_path_factory.mktemp(layout), layout)
        return made[layout]

    return write


def load(path, dtype=torch.float32, policy: Policy | None = None, **how) -> nn.Module:
    quiet()
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **how)
    return accelerate(model, policy)


def prompt(vocab: int, length: int = 30) -> torch.Tensor:
    return torch.randint(3, vocab, (1, length), generator=torch.Generator().manual_seed(5))


def loaders_logits(path, ids, **how):
    model = Model.from_checkpoint(path, **how)
    caches = model.caches(slots=1, tokens=ids.shape[1])
    batch = Batch.prefill(caches.acquire(1), [ids.shape[1]])
    return model.network.forward(ids[0], batch, caches, logits_rows="all")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_loads_and_gives_our_loaders_logits(directory, layout):
    path, exact = directory(layout), Policy(prompt="exact")
    model = load(path, policy=exact)
    ids = prompt(model.config.vocab_size)
    expected = loaders_logits(path, ids, policy=exact, dtype=torch.float32)
    assert relative_error(logits(model, ids)[0], expected) < 1e-5
    assert type(model) is transformers.NemotronHForCausalLM


@pytest.mark.parametrize("layout", W8A8)
def test_prompt_rows_run_as_the_checkpoint_wants_them(directory, layout):
    """W8A8: a value at the border of two codes falls either way, and a flipped code is 6 % of its element."""
    path = directory(layout)
    model = load(path)
    ids = prompt(model.config.vocab_size)
    found = logits(model, ids)[0]
    assert relative_error(found, loaders_logits(path, ids, dtype=torch.float32)) < 2e-2
    exact = logits(accelerate(model, Policy(prompt="exact")), ids)[0]
    assert relative_error(found, exact) > 2e-3, "the policy reaches all quantised modules"


@pytest.mark.parametrize("layout", QUANTISED)
def test_greedy_tokens_are_those_of_our_loader(directory, layout):
    path, exact = directory(layout), Policy(prompt="exact")
    model, own = load(path, policy=exact), Model.from_checkpoint(path, policy=exact, dtype=torch.float32)
    ids = prompt(model.config.vocab_size, 12)
    found = model.generate(ids, max_new_tokens=10, do_sample=False, eos_token_id=None)[0, 12:]
    [expected] = own.generate([ids[0].tolist()], SamplingParams(max_tokens=10, ignore_eos=True))
    assert found.tolist() == list(expected.token_ids)


@pytest.mark.parametrize("layout", QUANTISED)
def test_weights_stay_quantised_within_5_percent_of_the_files(directory, layout):
    path = directory(layout)
    model = load(path, dtype=torch.bfloat16)
    files = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    model.generate(prompt(model.config.vocab_size, 12), max_new_tokens=3, do_sample=False)
    assert model.get_memory_footprint() <= 1.05 * files
    modules = [module for module in model.modules() if isinstance(module, Quantised)]
    assert modules and model.is_quantized and model.quantization_method == "modelopt"
    for module in modules:
        for weight in module.weights():
            assert weight.weight.dtype in (torch.uint8, torch.float8_e4m3fn)
        if "run" in module._made:
            assert not module._made["run"].plan.copy_bytes
    for layer in model.model.layers:
        if isinstance(getattr(layer.mixer, "in_proj", None), QuantisedLinear):
            made = layer.forward.__self__._layers[True][1]
            assert made.weights.in_proj.weight.data_ptr() == layer.mixer.in_proj.weight.data_ptr()
            assert made.plan.copy_bytes == 0


def test_memory_of_the_policy_goes_to_copies_of_what_fits(directory):
    path, ids = directory("nano_9b_v2_nvfp4"), torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12, 13]])
    model = load(path, policy=Policy(prompt="exact"))
    expected, held = logits(model, ids), model.get_memory_footprint()

    def copies() -> int:
        layers = [layer.forward.__self__._layers[True][1] for layer in model.model.layers if layer.block_type[0] == "l"]
        runs = [module._made["run"] for module in model.modules() if "run" in getattr(module, "_made", {})]
        return sum(made.plan.copy_bytes for made in (*layers, *runs))

    assert copies() == 0
    for extra, low, high in ((0, 0, 0), (600_000, 300_000, 600_000), (1 << 30, 2_000_000, 1 << 30)):
        accelerate(model, Policy(prompt="exact", memory_bytes=held + extra))
        assert relative_error(logits(model, ids), expected) < 1e-5
        assert low <= copies() <= high


def test_default_dtype_is_that_of_the_file_and_the_router_stays_fp32(directory):
    model = transformers.AutoModelForCausalLM.from_pretrained(directory("nano_30b_nvfp4"))
    assert model.dtype == torch.bfloat16
    layer = next(layer for layer in model.model.layers if layer.block_type == "moe")
    assert layer.mixer.gate.weight.dtype == layer.mixer.gate.e_score_correction_bias.dtype == torch.float32
    assert model.model.layers[0].mixer.A_log.dtype == torch.float32, "bf16 would round an F32 file"


def test_a_class_that_is_named_loads_where_config_json_says_how(directory):
    """Without Auto, transformers' own config class reads the file."""
    path = directory("super_nvfp4")
    model = transformers.NemotronHForCausalLM.from_pretrained(path, dtype=torch.float32)
    ids = prompt(model.config.vocab_size)
    expected = loaders_logits(path, ids, policy=Policy(prompt="exact"), dtype=torch.float32)
    assert relative_error(logits(accelerate(model, Policy(prompt="exact")), ids)[0], expected) < 1e-5


# -- life of a quantised model -----------------------------------------------------------------------------------------


@pytest.fixture
def model(directory):
    return load(directory("lightning_nvfp4"), policy=Policy(prompt="exact"))


def test_copies_dtypes_and_restore(model):
    ids = prompt(model.config.vocab_size)
    expected = logits(model, ids)
    twin = copy.deepcopy(model)
    assert logits(twin, ids).equal(expected)
    twin.to(torch.bfloat16)
    kept = [w.weight.dtype for m in twin.modules() if isinstance(m, Quantised) for w in m.weights()]
    assert set(kept) == {torch.uint8, torch.float8_e4m3fn}
    assert relative_error(logits(twin, ids).float(), expected) < 0.2
    restore(model)
    assert relative_error(logits(lift_clamp(model), ids), expected) < 1e-5
    model.train()
    with torch.no_grad():
        assert relative_error(model(ids, use_cache=False).logits, expected) < 1e-5


def test_what_cannot_be_done_is_refused_by_name(model, directory, tmp_path):
    with pytest.raises(ValueError, match="modelopt"):
        model.save_pretrained(tmp_path / "saved")
    with pytest.raises(AdapterError, match="a quantised layer never"):
        model(prompt(model.config.vocab_size), use_cache=False).logits.sum().backward()
    with pytest.raises(AdapterError, match="float16"):
        load(directory("nano_4b_fp8"), dtype=torch.float16)
    with pytest.raises(AdapterError, match="reads checkpoints that are quantised"):
        load(directory("nano_4b_bf16"), quantization_config=ModelOptConfig())


def test_a_damaged_checkpoint_is_refused_as_our_loader_refuses_it(tmp_path):
    path = write_checkpoint(tmp_path, "nano_9b_v2_nvfp4")
    index = json.loads((path / "model.safetensors.index.json").read_text())
    name = next(name for name in index["weight_map"] if name.endswith("in_proj.weight_scale_2"))
    from safetensors.torch import load_file, save_file

    shard = path / index["weight_map"].pop(name)
    tensors = load_file(shard)
    del tensors[name]
    save_file(tensors, shard, metadata={"format": "pt"})
    write_json(path / "model.safetensors.index.json", index)
    with pytest.raises(NemotronMamba2Error, match="weight_scale_2, which is missing"):
        load(path)


def test_an_adapter_on_a_quantised_projection_is_called(model):
    ids = prompt(model.config.vocab_size)
    before = logits(model, ids)

    class Shifted(nn.Module):
        def __init__(self, base: nn.Module) -> None:
            super().__init__()
            self.base = base

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 1.5 * self.base(x)

    mixer = model.model.layers[0].mixer
    mixer.out_proj = Shifted(mixer.out_proj)
    assert not logits(model, ids).equal(before)
    mixer.out_proj = mixer.out_proj.base
    assert logits(model, ids).equal(before)


@pytest.mark.parametrize("format", ["fp8_tensor", "fp8_channel", "fp8_block", "nvfp4"])
def test_embeddings_in_any_format(format):
    weight = quantize(torch.randn(300, 256), format)
    module = QuantisedEmbedding(300, 256, torch.float32)
    module.hold(weight)
    ids = torch.tensor([[0, 1, 299], [130, 7, 7]])
    assert module(ids).equal(dequantize(weight)[ids])
    assert format in repr(module)


# -- registries --------------------------------------------------------------------------------------------------------


def test_importing_the_adapter_registers_once_and_changes_no_class():
    program = """
import transformers
from transformers.models.nemotron_h import modeling_nemotron_h as m, configuration_nemotron_h as c
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING as table
classes = (m.NemotronHBlock, m.NemotronHMamba2Mixer, m.NemotronHForCausalLM, c.NemotronHConfig)
before = [dict(vars(k)) for k in classes]
assert "modelopt" not in table
import nemotron_mamba2.adapters.transformers as adapter, importlib
assert table["modelopt"].__module__.startswith("nemotron_mamba2")
assert [dict(vars(k)) for k in classes] == before
importlib.reload(adapter)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_a_config_that_we_do_not_understand_goes_through_as_it_came():
    raw = {"model_type": "nemotron_h", "use_bias": True, "hidden_size": 64}
    assert known_spelling(raw, "") is raw


def test_quantisers_of_others_keep_their_checkpoints():
    theirs = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    found = known_spelling({**config_of("nano_30b_bf16"), "quantization_config": theirs}, "")
    assert found["quantization_config"] == theirs


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_spelling_becomes_the_one_that_transformers_knows(directory, layout):
    config = transformers.AutoConfig.from_pretrained(directory(layout))
    raw = config_of(layout)
    raw = raw.get("llm_config", raw)
    assert type(config) is NemotronHConfig and config.model_type == "nemotron_h"
    assert config.head_dim == raw.get("head_dim", raw.get("attention_head_dim"))
    assert config.hidden_size == raw["hidden_size"] and not hasattr(config, "auto_map")
    again = transformers.AutoConfig.for_model(**config.to_dict()) if config.to_dict().get("model_type") else config
    assert again.layers_block_type == config.layers_block_type
    assert (getattr(config, "quantization_config", None) is not None) == (layout in (*QUANTISED, "puzzle_bf16"))
