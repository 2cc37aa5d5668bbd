"""config.json of every published family, all spellings of a fact, and what contradicts itself."""

from __future__ import annotations

import copy
import json
import math
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from checkpoints import small_config, write_json
from nemotron_mamba2.config import AttentionConfig, Mamba2Config, MlpConfig, ModelConfig, MoeConfig, Policy
from nemotron_mamba2.errors import ConfigError, NemotronMamba2Error

CONFIGS = Path(__file__).parent / "data" / "configs"
FAMILIES = sorted(file.stem for file in CONFIGS.glob("*.json"))


def raw(family: str) -> dict:
    return json.loads((CONFIGS / f"{family}.json").read_text())


def read(family: str) -> ModelConfig:
    return ModelConfig.from_checkpoint(CONFIGS / f"{family}.json")


def refused(config, *words: str, generation=None) -> str:
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_dict(config, generation)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message
    return message


# published files --------------------------------------------------------------------------------------------------

# family: (letters M * - E), hidden, d_inner, conv_dim, in_proj rows, norm group, attention heads/kv, FFN widths, chunk
TABLE = {
    "h_4b": ((24, 4, 24, 0), 3072, 7168, 9216, 16496, 896, (32, 8), {12288}, 256),
    "h_8b": ((24, 4, 24, 0), 4096, 8192, 10240, 18560, 1024, (32, 8), {21504}, 128),
    "h_47b": ((45, 5, 48, 0), 8192, 16384, 20480, 37120, 2048, (64, 8), {30720}, 128),
    "h_56b": ((54, 10, 54, 0), 8192, 16384, 20480, 37120, 2048, (64, 8), {32768}, 128),
    "nano_9b_v2": ((27, 4, 25, 0), 4480, 10240, 12288, 22656, 1280, (40, 8), {15680}, 128),
    "nano_12b_v2": ((28, 6, 28, 0), 5120, 10240, 12288, 22656, 1280, (40, 8), {20480}, 128),
    "nano_12b_v2_vl": ((28, 6, 28, 0), 5120, 10240, 12288, 22656, 1280, (40, 8), {20480}, 128),
    "nemotron_3_nano_4b": ((21, 4, 17, 0), 3136, 7680, 9728, 17504, 960, (40, 8), {12544}, 256),
    "nemotron_3_nano_30b": ((23, 6, 0, 23), 2688, 4096, 6144, 10304, 512, (32, 2), {1856}, 128),
    "nemotron_3_5_lightning": ((23, 6, 0, 23), 2688, 4096, 6144, 10304, 512, (32, 2), {1856}, 128),
    "omni_30b": ((23, 6, 0, 23), 2688, 4096, 6144, 10304, 512, (32, 2), {1856}, 128),
    "nemotron_3_super": ((40, 8, 0, 40), 4096, 8192, 10240, 18560, 1024, (32, 2), {2688}, 128),
    "nemotron_3_puzzle": ((40, 8, 0, 40), 4096, 8192, 10240, 18560, 1024, (32, 2), {2688, 2304, 1792, 1280}, 128),
    "nemotron_3_ultra": ((48, 12, 0, 48), 8192, 16384, 18432, 35072, 2048, (64, 2), {5120}, 128),
}


def test_the_table_has_every_family():
    assert sorted(TABLE) == FAMILIES


@pytest.mark.parametrize("family", FAMILIES)
def test_widths_of_published_models(family):
    counts, hidden, inner, channels, rows, group, heads, ffn, chunk = TABLE[family]
    config = read(family)
    assert tuple(config.pattern.count(letter) for letter in "M*-E") == counts
    mamba = config.mamba2
    assert (config.hidden_size, mamba.d_inner, mamba.conv_dim, mamba.in_proj_rows) == (hidden, inner, channels, rows)
    assert (mamba.d_inner // mamba.n_groups, mamba.chunk_size, mamba.conv_kernel) == (group, chunk, 4)
    assert mamba.time_step_limit is None and mamba.use_conv_bias
    for layer in config.layers:
        if isinstance(layer, AttentionConfig):
            assert (layer.num_attention_heads, layer.num_key_value_heads, layer.head_dim) == (*heads, 128)
    widths = {layer.intermediate_size for layer in config.layers if isinstance(layer, MlpConfig)}
    widths |= {layer.moe_intermediate_size for layer in config.layers if isinstance(layer, MoeConfig)}
    assert widths == ffn
    assert config.vocab_size == 131072 and not config.tie_word_embeddings
    assert config.dtype == torch.bfloat16 and config.state_dtype == torch.float32
    assert {layer.layer_norm_epsilon for layer in config.layers} == {config.layer_norm_epsilon} == {1e-5}


@pytest.mark.parametrize(
    ("family", "attention"),
    [
        ("nemotron_3_nano_4b", [12, 17, 24, 32]),
        ("nemotron_3_nano_30b", [5, 12, 19, 26, 33, 42]),
        ("nemotron_3_super", [7, 16, 25, 36, 47, 58, 69, 78]),
        ("nemotron_3_ultra", [7, 14, 23, 32, 39, 48, 57, 64, 73, 82, 89, 98]),
    ],
)
def test_attention_layers_are_where_they_are(family, attention):
    assert [index for index, letter in enumerate(read(family).pattern) if letter == "*"] == attention


@pytest.mark.parametrize(
    ("family", "facts"),
    [
        ("nemotron_3_nano_30b", (128, 6, 3712, None, 2.5, 0)),
        ("nemotron_3_5_lightning", (128, 6, 3712, None, 2.5, 2)),
        ("nemotron_3_super", (512, 22, 5376, 1024, 5.0, 2)),
        ("nemotron_3_ultra", (512, 22, 10240, 2048, 5.0, 2)),
    ],
)
def test_experts_and_mtp_of_published_models(family, facts):
    config = read(family)
    moe = next(layer for layer in config.layers if isinstance(layer, MoeConfig))
    assert facts == (
        moe.n_routed_experts,
        moe.num_experts_per_tok,
        moe.moe_shared_expert_intermediate_size,
        moe.moe_latent_size,
        moe.routed_scaling_factor,
        len(config.mtp_layers),
    )
    assert moe.norm_topk_prob and (moe.n_group, moe.topk_group) == (1, 1)
    assert moe.expert_input_size == (facts[3] or config.hidden_size)
    if config.mtp_layers:
        assert [type(layer) for layer in config.mtp_layers] == [AttentionConfig, MoeConfig]
        assert config.mtp_layers[1] == moe


def test_puzzle_has_widths_layer_by_layer():
    config = read("nemotron_3_puzzle")
    moe = [layer for layer in config.layers if isinstance(layer, MoeConfig)]
    assert [(m.moe_intermediate_size, m.num_experts_per_tok) for m in moe[:4]] == [
        (2688, 22),
        (2304, 16),
        (1792, 12),
        (1280, 8),
    ]
    assert {m.moe_shared_expert_intermediate_size for m in moe} == {5376}
    head = config.mtp_layers[1]
    assert isinstance(head, MoeConfig) and (head.moe_intermediate_size, head.num_experts_per_tok) == (2688, 22)


def test_nested_language_models():
    assert read("nano_12b_v2_vl") == read("nano_12b_v2")
    omni, plain = read("omni_30b"), read("nemotron_3_nano_30b")
    assert omni.layers == plain.layers
    # Inside goes before outside; the dtype stands outside only.
    assert omni.eos_token_ids == (2,) and omni.dtype == torch.bfloat16
    nested = raw("omni_30b")
    nested["text_config"] = nested.pop("llm_config")
    assert ModelConfig.from_dict(nested) == omni
    nested["llm_config"] = {**nested["text_config"], "hidden_size": 64}
    refused(nested, "llm_config", "text_config")


@pytest.mark.parametrize("family", FAMILIES)
def test_no_published_key_may_hold_nonsense(family):
    """Whatever value a key gets, reading ends in a config or in one line."""
    original = raw(family)
    inner = original.get("llm_config", original)
    for key in inner:
        for value in (None, -1, 0, "x", [], {}, True, math.nan, 1e400):
            changed = copy.deepcopy(original)
            changed.get("llm_config", changed)[key] = value
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    ModelConfig.from_dict(changed)
                except NemotronMamba2Error as error:
                    assert "\n" not in str(error)


# files ------------------------------------------------------------------------------------------------------------


def test_a_directory_and_its_generation_config(tmp_path):
    write_json(tmp_path / "config.json", small_config("M*"))
    assert ModelConfig.from_checkpoint(tmp_path).eos_token_ids == (2,)
    write_json(tmp_path / "generation_config.json", {"eos_token_id": [2, 11, 2], "bos_token_id": None})
    config = ModelConfig.from_checkpoint(str(tmp_path))
    assert (config.bos_token_id, config.eos_token_ids, config.pad_token_id) == (1, (2, 11), 0)
    write_json(tmp_path / "generation_config.json", {"eos_token_id": 11})
    assert ModelConfig.from_checkpoint(tmp_path / "config.json").eos_token_ids == (11,)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "is not JSON"),
        ("{", "is not JSON"),
        ("[]", "expected a JSON object"),
        ('{"a": 1, "a": 2}', "given twice"),
        ("\udcff", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
    ],
    ids=["empty", "cut", "list", "doubled", "not-utf8", "deep"],
)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_files_that_are_not_json_objects(tmp_path, name, text, word):
    write_json(tmp_path / "config.json", small_config("M*"))
    (tmp_path / name).write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match=f"{name}.*{word}") as caught:
        ModelConfig.from_checkpoint(tmp_path)
    assert "\n" not in str(caught.value)


def test_no_file_at_all(tmp_path):
    for path in (tmp_path, tmp_path / "nowhere", tmp_path / "nowhere.json"):
        with pytest.raises(ConfigError, match="cannot be read: No such file"):
            ModelConfig.from_checkpoint(path)


# layer plan -------------------------------------------------------------------------------------------------------

WORDS = {
    "M": ("mamba", "linear_attention", "M"),
    "*": ("attention", "full_attention", "*"),
    "-": ("mlp", "-"),
    "E": ("moe", "E"),
}


def planned(pattern: str, **plan) -> dict:
    return {**small_config(pattern, hybrid_override_pattern=None, num_hidden_layers=None), **plan}


@pytest.mark.parametrize("pattern", ["M-M*", "ME*", "M-E*", "-", "E", "*", "M"])
def test_p86_mlp_layers_alone_and_in_mixtures(pattern):
    config = ModelConfig.from_dict(small_config(pattern))
    assert config.pattern == pattern
    kinds = {"M": Mamba2Config, "*": AttentionConfig, "-": MlpConfig, "E": MoeConfig}
    assert [type(layer) for layer in config.layers] == [kinds[letter] for letter in pattern]


@pytest.mark.parametrize("count", [None, 5, 4, 99, "x"])
@pytest.mark.parametrize(
    "plan",
    [
        {"hybrid_override_pattern": "M-E*M"},
        {"layers_block_type": ["mamba", "mlp", "moe", "attention", "mamba"]},
        {"layer_types": ["linear_attention", "mlp", "moe", "full_attention", "linear_attention"]},
        {"block_configs": [{"block_type": word} for word in ("mamba", "mlp", "moe", "attention", "mamba")]},
    ],
    ids=lambda plan: next(iter(plan)),
)
def test_p87_num_hidden_layers_missing_or_wrong_and_the_list_wins(plan, count):
    config = planned("M-E*M", **plan)
    if count is not None:
        config["num_hidden_layers"] = count
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert ModelConfig.from_dict(config).pattern == "M-E*M"
    assert len(caught) == (count not in (None, 5))
    for warning in caught:
        assert "num_hidden_layers" in str(warning.message) and "5" in str(warning.message)


@given(st.lists(st.sampled_from("M*-E"), min_size=1, max_size=12).flatmap(lambda p: st.tuples(
    st.just("".join(p)), st.tuples(*(st.sampled_from(WORDS[letter]) for letter in p)), st.sampled_from(
        ["hybrid_override_pattern", "layers_block_type", "layer_types"]))))  # fmt: skip
def test_p88_vocabularies_of_layer_names_may_mix(drawn):
    pattern, words, key = drawn
    assert ModelConfig.from_dict(planned("ME-*", **{key: list(words)})).pattern == pattern


@pytest.mark.parametrize("word", ["mamba3", "", "m", "M*", None, 3, ["mamba"], {"block_type": "mamba"}])
def test_p88_an_unknown_word_raises_with_the_word(word):
    refused(planned("M*", layers_block_type=["mamba", word]), "layers_block_type[1]", repr(word))
    refused(planned("M*", block_configs=[{"block_type": word}]), "block_configs[0]", repr(word))


def test_an_unknown_letter_raises_with_the_letter():
    refused(planned("M*", hybrid_override_pattern="M*X"), "hybrid_override_pattern[2]", "'X'")


@pytest.mark.parametrize("plan", ["", [], None, 5, {"a": 1}])
def test_no_plan_at_all(plan):
    refused(planned("M*", hybrid_override_pattern=plan), "layer" if plan is None else "hybrid_override_pattern")


def test_plans_that_disagree_name_both_keys():
    same = planned("M*", hybrid_override_pattern="M*", layers_block_type=["mamba", "full_attention"])
    assert ModelConfig.from_dict(same).pattern == "M*"
    for key, value in (
        ("layers_block_type", ["mamba", "mlp"]),
        ("layer_types", ["linear_attention"]),
        ("block_configs", [{"block_type": "mamba"}]),
    ):
        refused(planned("M*", hybrid_override_pattern="M*", **{key: value}), "hybrid_override_pattern", key)


# widths per layer -------------------------------------------------------------------------------------------------


def test_p90_two_mlp_layers_of_different_widths():
    listed = ModelConfig.from_dict(small_config("M-*-", intermediate_size=[96, 160]))
    blocks = [{"block_type": "mamba"}, {"block_type": "mlp", "intermediate_size": 96}]
    blocks += [{"block_type": "attention"}, {"block_type": "mlp", "intermediate_size": 160}]
    blocked = ModelConfig.from_dict(planned("M-*-", block_configs=blocks))
    for config in (listed, blocked):
        assert [x.intermediate_size for x in config.layers if isinstance(x, MlpConfig)] == [96, 160]
    one = ModelConfig.from_dict(small_config("M-*-", intermediate_size=[96]))
    assert [x.intermediate_size for x in one.layers if isinstance(x, MlpConfig)] == [96, 96]
    refused(small_config("M-*-", intermediate_size=[96, 160, 32]), "intermediate_size", "2 MLP layers")
    refused(small_config("M-*-", intermediate_size=[96, "x"]), "intermediate_size", "'x'")


def test_p90_blocks_may_change_any_width_but_the_hidden_one():
    blocks = [{"block_type": "mamba", "mamba_num_heads": 8}, {"block_type": "attention", "attention_head_dim": 16}]
    config = ModelConfig.from_dict(planned("M*", head_dim=None, block_configs=blocks))
    assert config.layers[0].mamba_num_heads == 8 and config.layers[1].head_dim == 16
    blocks[1]["hidden_size"] = 64
    refused(planned("M*", block_configs=blocks), "block_configs[1]", "hidden_size", "128", "64")
    refused(planned("M*", block_configs=["mamba", "attention"]), "block_configs[0]", "object")
    refused(planned("M*", block_configs="M*"), "block_configs")


def test_p90_layers_of_two_mamba_shapes_have_no_common_one():
    blocks = [{"block_type": "mamba"}, {"block_type": "mamba", "mamba_num_heads": 8}]
    with pytest.raises(ConfigError, match="one Mamba-2 shape"):
        _ = ModelConfig.from_dict(planned("MM", block_configs=blocks)).mamba2


# spellings --------------------------------------------------------------------------------------------------------

SPELLINGS = [
    ("layer_norm_epsilon", "rms_norm_eps", 1e-6, 1e-5),
    ("layer_norm_epsilon", "norm_eps", 1e-6, 1e-5),
    ("head_dim", "attention_head_dim", 64, 128),
    ("dtype", "torch_dtype", "float16", "bfloat16"),
    ("n_groups", "mamba_n_groups", 4, 2),
    ("conv_kernel", "mamba_d_conv", 3, 4),
    ("time_step_limit", "mamba_dt_limit", [0.01, 0.1], [0.0, 0.1]),
    ("use_conv_bias", "mamba_conv_bias", False, True),
    ("chunk_size", "mamba_chunk_size", 256, 128),
    ("n_routed_experts", "num_local_experts", 16, 8),
]


@pytest.mark.parametrize(("key", "other", "value", "different"), SPELLINGS, ids=[row[1] for row in SPELLINGS])
def test_other_spellings(key, other, value, different):
    config = small_config("ME*-", **dict.fromkeys(("torch_dtype", key, other)))
    expected = ModelConfig.from_dict({**config, key: value})
    assert ModelConfig.from_dict({**config, other: value}) == expected
    assert ModelConfig.from_dict({**config, key: value, other: value}) == expected
    assert ModelConfig.from_dict({**config, key: different}) != expected
    refused({**config, key: value, other: different}, key, other)


def test_two_other_spellings_that_disagree_are_both_named():
    config = small_config("M", layer_norm_epsilon=None, rms_norm_eps=1e-5, norm_eps=1e-6)
    refused(config, "rms_norm_eps", "norm_eps", "1e-05", "1e-06")


@pytest.mark.parametrize(
    ("value", "limit"),
    [
        (None, None),
        ([0.0, math.inf], None),
        ([0, 1e308], None),
        ([0.0, "inf"], None),
        (["0.0", "Infinity"], None),
        ([0.0, {"__float__": "Infinity"}], None),
        ([-math.inf, math.inf], None),
        ([-1.0, 1e39], None),
        ([0.0, 0.1], (0.0, 0.1)),
        ([-1, 0.1], (0.0, 0.1)),
        ([0.001, "inf"], (0.001, math.inf)),
        ([0.001, 1e308], (0.001, math.inf)),
    ],
)
def test_p1_time_step_limit_in_all_its_forms(value, limit):
    assert ModelConfig.from_dict(small_config("M", time_step_limit=value)).mamba2.time_step_limit == limit


@pytest.mark.parametrize(
    "value",
    [5, "inf", [], [0.0], [0, 1, 2], [1.0, 0.5], [0, 0], [0, -1], [0, "x"], [math.nan, 1], [True, 1], [0, 10**400],
     [math.inf, math.inf], [0, {"__float__": "x"}], [0, None]],
)  # fmt: skip
def test_time_step_limits_that_are_none(value):
    refused(small_config("M", time_step_limit=value), "time_step_limit")


def test_a_bare_infinity_in_the_file(tmp_path):
    text = json.dumps(small_config("M", time_step_limit=[0.001, math.inf]))
    assert "Infinity" in text
    (tmp_path / "config.json").write_text(text)
    assert ModelConfig.from_checkpoint(tmp_path).mamba2.time_step_limit == (0.001, math.inf)


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (None, torch.float32),
        ("auto", torch.float32),
        ("float32", torch.float32),
        ("torch.bfloat16", torch.bfloat16),
        ("float16", torch.float16),
    ],
)
def test_p9_p10_the_state_is_float32_unless_the_config_says_otherwise(value, dtype):
    assert ModelConfig.from_dict(small_config("M", mamba_ssm_cache_dtype=value)).state_dtype == dtype
    for bad in ("int8", "float64", 32, ["float32"]):
        refused(small_config("M", mamba_ssm_cache_dtype=bad), "mamba_ssm_cache_dtype", repr(bad), "float32")


def test_dtypes():
    for name, dtype in (("torch.float32", torch.float32), ("auto", torch.bfloat16), ("float16", torch.float16)):
        assert ModelConfig.from_dict(small_config("M", torch_dtype=name)).dtype == dtype
    assert ModelConfig.from_dict(small_config("M", torch_dtype=None)).dtype == torch.bfloat16
    refused(small_config("M", torch_dtype="float8"), "dtype", "'float8'")


# multi-token prediction -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "pattern"),
    [
        ({}, ""),
        ({"num_nextn_predict_layers": 0}, ""),
        ({"num_nextn_predict_layers": 0, "mtp_layers_block_type": ["full_attention", "moe"]}, ""),
        ({"num_nextn_predict_layers": 1}, "*E"),
        ({"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*-"}, "*-"),
        ({"num_nextn_predict_layers": 1, "mtp_layers_block_type": ["attention", "moe"]}, "*E"),
        ({"mtp_hybrid_override_pattern": "*E"}, "*E"),
        ({"mtp_hybrid_override_pattern": "*E", "mtp_layers_block_type": ["full_attention", "moe"]}, "*E"),
    ],
)
def test_mtp_plans(keys, pattern):
    config = ModelConfig.from_dict(small_config("ME-", **keys))
    assert replace(config, layers=config.mtp_layers).pattern == pattern


def test_mtp_plans_that_are_refused():
    refused(small_config("ME", num_nextn_predict_layers=2), "num_nextn_predict_layers", "0 or 1", "2")
    both = {"mtp_hybrid_override_pattern": "*E", "mtp_layers_block_type": ["mlp"]}
    refused(small_config("ME", **both), "mtp_hybrid_override_pattern", "mtp_layers_block_type")
    refused(small_config("ME", mtp_layers_block_type=["what"]), "mtp_layers_block_type[0]", "'what'")


# what we do not run -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"use_bias": True}, ["use_bias", "bias"]),
        ({"mlp_bias": True}, ["mlp_bias"]),
        ({"attention_bias": True}, ["attention_bias"]),
        ({"mamba_proj_bias": True}, ["mamba_proj_bias"]),
        ({"mlp_hidden_act": "gelu"}, ["mlp_hidden_act", "relu2", "gelu"]),
        ({"mamba_hidden_act": "relu"}, ["mamba_hidden_act", "silu", "relu"]),
        ({"residual_in_fp32": True}, ["residual_in_fp32"]),
        ({"model_type": "llama"}, ["model_type", "nemotron_h", "llama"]),
        ({"n_groups": 3}, ["n_groups (3)", "mamba_num_heads (4)"]),
        ({"num_key_value_heads": 3}, ["num_key_value_heads (3)", "num_attention_heads (4)"]),
        ({"n_group": 3}, ["n_group (3)", "n_routed_experts (8)"]),
        ({"n_group": 2, "topk_group": 3}, ["topk_group", "2", "3"]),
        ({"n_group": 4, "topk_group": 1, "num_experts_per_tok": 3}, ["num_experts_per_tok", "2", "3"]),
        ({"num_experts_per_tok": 9}, ["num_experts_per_tok", "8", "9"]),
        ({"n_shared_experts": 2}, ["n_shared_experts", "2"]),
        ({"conv_kernel": 1}, ["conv_kernel", "1"]),
        ({"eos_token_id": -1}, ["eos_token_id", "-1"]),
        ({"eos_token_id": "</s>"}, ["eos_token_id", "'</s>'"]),
        ({"bos_token_id": [1, 2]}, ["bos_token_id"]),
        ({"layer_norm_epsilon": 0}, ["layer_norm_epsilon"]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_would_compute_something_else_is_refused(changes, words):
    refused(small_config("ME*-", **changes), *words)


def test_what_may_be_otherwise():
    grouped = ModelConfig.from_dict(small_config("ME", n_group=2, topk_group=1)).layers[1]
    assert isinstance(grouped, MoeConfig) and (grouped.n_group, grouped.topk_group) == (2, 1)
    alone = ModelConfig.from_dict(small_config("ME", n_shared_experts=0, moe_shared_expert_intermediate_size=None))
    assert alone.layers[1].moe_shared_expert_intermediate_size == 0
    assert ModelConfig.from_dict(small_config("M", tie_word_embeddings=True)).tie_word_embeddings
    assert ModelConfig.from_dict(small_config("M", mamba_hidden_act="swish"))
    # fp32 activations: the residual stream is fp32 with or without the flag
    assert ModelConfig.from_dict(small_config("M", residual_in_fp32=True, torch_dtype="float32"))
    assert ModelConfig.from_dict(small_config("*", head_dim=None)).layers[0].head_dim == 128


@pytest.mark.parametrize(
    ("pattern", "keys"),
    [
        ("M", ["hidden_size", "vocab_size", "mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size"]),
        ("*", ["num_attention_heads", "num_key_value_heads"]),
        ("-", ["intermediate_size"]),
        ("E", ["n_routed_experts", "num_experts_per_tok", "moe_intermediate_size"]),
        ("E", ["moe_shared_expert_intermediate_size"]),
    ],
)  # fmt: skip
def test_missing_widths_are_named(pattern, keys):
    for key in keys:
        config = small_config(pattern)
        del config[key]
        refused(config, key, "missing")
        for bad in (0, -4, 1.5, "8", True):
            refused({**config, key: bad}, key, repr(bad))


@pytest.mark.parametrize("value", [None, [], "config", 5])
def test_not_an_object(value):
    refused(value, "object")
    refused({"model_type": "x", "llm_config": value or "x"}, "object")


# policy -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("prompt", "fast", "'fp8'"),
        ("prompt", None, "'checkpoint'"),
        ("step", "fp8", "'exact'"),
        ("kv", "fp8", "'bf16'"),
        ("state_dtype", torch.int8, "torch.float32"),
        ("state_dtype", "float32", "torch.float32"),
        ("reproducible", 1, "True"),
        ("memory_bytes", 0, "above 0"),
        ("memory_bytes", 1.5, "above 0"),
        ("memory_bytes", True, "above 0"),
    ],
)
def test_policy_checks_its_values(field, value, allowed):
    with pytest.raises(ConfigError) as caught:
        Policy(**{field: value})
    message = str(caught.value)
    assert f"Policy.{field}" in message and allowed in message and repr(value) in message and "\n" not in message


def test_policies_that_are_fine():
    assert Policy() == Policy("checkpoint", "checkpoint", "bf16", None, False, None)
    Policy(prompt="fp8", step="exact", kv="checkpoint", state_dtype=torch.float16, reproducible=True, memory_bytes=1)
