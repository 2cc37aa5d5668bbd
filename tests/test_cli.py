"""The command line in this process, with a model of twenty lines behind it; and once as a program."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import types
from dataclasses import dataclass

import pytest
import tokenizers
import torch
from safetensors.torch import save_file

from nemotron_mamba2 import cli
from nemotron_mamba2.errors import CheckpointError, RequestError

TEXT = " was the wörd 🐍"


@dataclass
class Completion:
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    prompt_tokens: int
    logprobs: None = None
    prompt_seconds: float = 0.5
    decode_seconds: float = 0.25


class FakeTokenizer:
    def render_chat(self, messages):
        return "|".join(f"{m['role']}:{m['content']}" for m in messages) + "|assistant:"

    def encode(self, text, *, add_special_tokens=True):
        assert not add_special_tokens, "the template has its own special tokens"
        return list(text.encode())


class FakeModel:
    """Writes TEXT, a character a token, and remembers what it was asked."""

    calls: list = []  # noqa: RUF012
    fails: Exception | None = None
    tokenizer: FakeTokenizer | None = FakeTokenizer()

    @classmethod
    def from_checkpoint(cls, path, *, device="cpu", progress=None, **_):
        if progress is not None:
            progress(1, 2)
        cls.calls.append(("load", path, device))
        return cls()

    def generate(self, prompts, sampling, *, on_token=None):
        self.calls.append(("generate", prompts, sampling))
        if self.fails is not None:
            raise self.fails
        for character in TEXT if on_token else "":
            on_token(types.SimpleNamespace(index=0, token_id=1, text=character, logprob=None, finish_reason=None))
        return [Completion(tuple(range(len(TEXT))), TEXT, "length", 4)]


@pytest.fixture
def model(monkeypatch):
    """A fresh FakeModel class in place of the real one."""
    fake = type("FakeModel", (FakeModel,), {"calls": []})
    generate = types.ModuleType("nemotron_mamba2.generate")
    generate.Model = fake
    monkeypatch.setitem(sys.modules, "nemotron_mamba2.generate", generate)
    return fake


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def run(capsys, monkeypatch):
    """Run a command; returns (exit code, stdout, stderr). Standard input is empty unless given; None: a terminal."""

    def run(*arguments, stdin=b""):
        monkeypatch.setattr(sys, "stdin", Terminal() if stdin is None else io.TextIOWrapper(io.BytesIO(stdin)))
        code = cli.main(arguments)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def assert_one_line(result, pattern):
    code, out, err = result
    assert code == 2, err
    assert out == ""
    assert err.count("\n") == 1 and err.endswith("\n"), err
    assert err.startswith("nemotron-mamba2: ")
    assert re.search(pattern, err), err


# generate ---------------------------------------------------------------------------------------------------------


def test_text_goes_to_stdout_and_figures_to_stderr(run, model):
    code, out, err = run("generate", "In the beginning")
    assert code == 0
    assert out == TEXT + "\n"
    assert err == (
        f"4 prompt tokens at 8.0 tokens/s · {len(TEXT)} generated tokens at {(len(TEXT) - 1) / 0.25:.1f} tokens/s"
        " · length reached\n"
    )
    assert model.calls[0][1] == cli.DEMO_MODEL


def test_json_is_one_object(run, model):
    code, out, err = run("generate", "In the beginning", "--json", "--temperature", "1", "--seed", "5")
    assert (code, err) == (0, "")
    record = json.loads(out)
    assert record["text"] == TEXT
    assert record["token_ids"] == list(range(len(TEXT)))
    assert record["finish_reason"] == "length"
    assert record["seed"] == 5
    assert record["prompt_tokens_per_second"] == 8.0
    assert record["generated_tokens"] == len(TEXT)


def test_options_reach_the_request(run, model):
    words = "--max-tokens 7 --temperature 0.5 --top-k 9 --top-p 0.8 --min-p 0.1 --repetition-penalty 1.1 --seed 3"
    code, *_ = run("generate", "x", *words.split(), "--stop", "a", "--stop", "b c", "--ignore-eos")
    assert code == 0
    _, prompts, sampling = model.calls[1]
    assert prompts == ["x"]
    assert (sampling.max_tokens, sampling.temperature, sampling.top_k, sampling.top_p) == (7, 0.5, 9, 0.8)
    assert (sampling.min_p, sampling.repetition_penalty, sampling.seed) == (0.1, 1.1, 3)
    assert sampling.stop == ("a", "b c")
    assert sampling.ignore_eos


def test_a_request_without_seed_gets_one_that_is_reported(run, model):
    seeds = {json.loads(run("generate", "x", "--json")[1])["seed"] for _ in range(2)}
    assert len(seeds) == 2
    assert model.calls[1][2].seed in seeds


@pytest.mark.parametrize("arguments", [(), ("-",)])
def test_the_prompt_may_be_piped(run, model, arguments):
    code, *_ = run("generate", *arguments, stdin="Wört\nund\n".encode())
    assert code == 0
    assert model.calls[1][1] == ["Wört\nund"]


def test_chat_goes_through_the_template(run, model):
    code, *_ = run("generate", "--chat", "--system", "be brief", "why?")
    assert code == 0
    assert bytes(model.calls[1][1][0]).decode() == "system:be brief|user:why?|assistant:"
    run("generate", "--chat", "why?")
    assert bytes(model.calls[3][1][0]).decode() == "user:why?|assistant:"


@pytest.mark.parametrize(
    ("arguments", "pattern"),
    [
        (["generate", ""], "prompt"),
        (["generate", "  \n"], "prompt"),
        (["generate"], "prompt"),
        (["generate", "a", "b"], "unexpected extra argument"),
        (["generate", "a", "--max-tokens", "many"], "--max-tokens"),
        (["generate", "a", "--max-tokens", "0"], "max_tokens"),
        (["generate", "a", "--top-p", "2"], "top_p"),
        (["generate", "a", "--temperature", "nan"], "temperature"),
        (["generate", "a", "--stop", ""], "stop"),
        (["generate", "a", "--device", "tpu"], "--device"),
        (["generate", "a", "--threads", "0"], "--threads"),
        (["generate", "a", "--system", "b"], "--chat"),
        (["generate", "a", "--no-such"], "--no-such"),
        (["generate", "a", "--model"], "--model"),
        (["no-such"], "no-such"),
        (["--no-such"], "--no-such"),
    ],
)
def test_a_wrong_call_is_one_line(run, model, arguments, pattern):
    assert_one_line(run(*arguments), pattern)
    assert model.calls == [], "nothing is loaded for a call that cannot work"


def test_bytes_that_are_no_text_are_one_line(run, model):
    assert_one_line(run("generate", stdin=b"a\xff"), "UTF-8.*byte 1")


def test_no_prompt_on_a_terminal_is_one_line(run, model):
    assert_one_line(run("generate", stdin=None), "no prompt")


def test_cuda_without_a_gpu_is_one_line(run, model, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert_one_line(run("generate", "a", "--device", "cuda"), "no CUDA device")


def test_threads_reach_torch(run, model, monkeypatch):
    seen = []
    monkeypatch.setattr("torch.set_num_threads", seen.append)
    assert run("generate", "a", "--threads", "3")[0] == 0
    assert seen == [3]


@pytest.mark.parametrize(
    "error", [RequestError("prompt: 9 tokens,\n at most 8"), CheckpointError("x"), FileNotFoundError(2, "gone", "a")]
)
def test_errors_of_the_package_are_one_line(run, model, error):
    model.fails = error
    assert_one_line(run("generate", "a", "--json"), re.escape(str(error).split("\n")[0]))


def test_other_errors_are_not_hidden(run, model):
    model.fails = ZeroDivisionError()
    with pytest.raises(ZeroDivisionError):
        run("generate", "a")


def test_ctrl_c_is_130(run, model):
    model.fails = KeyboardInterrupt()
    code, _, err = run("generate", "a")
    assert code == 130
    assert err == "\n"


def test_a_model_without_tokenizer_cannot_chat(run, model):
    model.tokenizer = None
    assert_one_line(run("generate", "--chat", "a"), "no tokenizer")


def test_a_bar_shows_on_a_terminal_only(model, monkeypatch, capsys):
    with cli.shared.progress_bar("demo") as progress:
        assert progress is None
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with cli.shared.progress_bar("demo") as progress:
        progress(1, 10)


# a real checkpoint ------------------------------------------------------------------------------------------------

CONFIG = {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "hybrid_override_pattern": "M*M-",
    "num_hidden_layers": 4,
    "hidden_size": 32,
    "vocab_size": 256,
    "mamba_num_heads": 4,
    "mamba_head_dim": 8,
    "n_groups": 2,
    "ssm_state_size": 16,
    "conv_kernel": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "layer_norm_epsilon": 1e-5,
    "max_position_embeddings": 128,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}
STATE_BYTES = 2 * (4 * 8 * 16 * 4 + 31 * (4 * 8 * 2 + 2 * 16 * 2 + 4 * 4) + 11 * (32 + 64) * 2)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A directory with a random model of four layers and a tokenizer of single bytes."""
    path = tmp_path_factory.mktemp("tiny")
    shapes = {"backbone.embeddings.weight": (256, 32), "backbone.norm_f.weight": (32,), "lm_head.weight": (256, 32)}
    for layer, letter in enumerate(CONFIG["hybrid_override_pattern"]):
        parts = {"norm.weight": (32,)}
        if letter == "M":
            parts |= {"mixer.in_proj.weight": (32 + 96 + 4, 32), "mixer.out_proj.weight": (32, 32)}
            parts |= {"mixer.conv1d.weight": (96, 1, 4), "mixer.conv1d.bias": (96,), "mixer.norm.weight": (32,)}
            parts |= {f"mixer.{name}": (4,) for name in ("A_log", "D", "dt_bias")}
        elif letter == "*":
            parts |= {f"mixer.{name}_proj.weight": (16 if name in "kv" else 32, 32) for name in "qkvo"}
        else:
            parts |= {"mixer.up_proj.weight": (48, 32), "mixer.down_proj.weight": (32, 48)}
        shapes |= {f"backbone.layers.{layer}.{name}": shape for name, shape in parts.items()}
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=generator).bfloat16() * 0.2 for name, shape in shapes.items()}
    tensors |= {"vision_model.patch.weight": torch.zeros(3, dtype=torch.bfloat16)}
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    (path / "config.json").write_text(json.dumps(CONFIG))
    characters = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate(sorted(characters))}, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.save(str(path / "tokenizer.json"))
    return path


def test_generate_runs_a_checkpoint(run, checkpoint):
    arguments = ("generate", "In the", "--model", str(checkpoint), "--max-tokens", "12", "--ignore-eos")
    code, out, err = run(*arguments)
    assert code == 0, err
    assert re.fullmatch(
        r"6 prompt tokens at \S+ tokens/s · 12 generated tokens at \S+ tokens/s · length reached\n", err
    )
    record = json.loads(run(*arguments, "--json")[1])
    assert len(record["token_ids"]) == record["generated_tokens"] == 12
    assert out in (record["text"], record["text"] + "\n")


def test_an_over_long_prompt_is_one_line(run, checkpoint):
    assert_one_line(run("generate", "x" * 128, "--model", str(checkpoint)), "128 tokens.*at most 127")


def test_explain_prints_the_plan(run, checkpoint):
    code, out, err = run("explain", str(checkpoint), "--device", "cpu")
    assert (code, err) == (0, "")
    assert "in_proj" in out and "back end" in out
    plan = json.loads(run("explain", str(checkpoint), "--device", "cpu", "--json")[1])
    assert [linear["name"] for linear in plan["layers"][0]["linears"]] == ["in_proj", "out_proj"]


def test_inspect_says_what_is_there_and_what_fits(run, checkpoint):
    code, out, err = run("inspect", str(checkpoint), "--memory", "1MB")
    assert (code, err) == (0, "")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "layers M*M-" in lines
    assert "0,2 M in_proj bf16 132 × 32 8.45 kB" in lines
    assert "3 - up_proj bf16 48 × 32 3.07 kB" in lines
    assert any(line.startswith("vision 1 6 B") for line in lines)
    assert f"state {cli.size(STATE_BYTES)} per sequence, keys and values 64 B per token" in lines


def test_inspect_as_json_has_the_same_facts(run, checkpoint):
    record = json.loads(run("inspect", str(checkpoint), "--memory", "1MB", "--json")[1])
    assert record["pattern"] == "M*M-"
    assert [layer["letter"] for layer in record["layers"]] == list("M*M-")
    assert record["layers"][1]["projections"][0]["shape"] == [32, 32]
    assert record["skipped"][0]["rule"] == "vision"
    assert record["state_bytes_per_sequence"] == STATE_BYTES
    assert record["kv_bytes_per_token"] == 2 * 2 * 8 * 2
    assert record["weights_fit"] and record["free_bytes"] < 10**6 - record["nbytes"]
    [fit] = record["fits"]
    assert fit["context_tokens"] == 128
    assert fit["sequences"] == record["free_bytes"] // (STATE_BYTES + 128 * 64)


def test_inspect_says_when_the_weights_do_not_fit(run, checkpoint):
    out = run("inspect", str(checkpoint), "--memory", "1kB")[1]
    assert re.search(r"of 1 kB, .* lack", out)
    assert out.split()[-1] == "0"


def test_inspect_draws_tables_on_a_terminal(checkpoint, monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert cli.main(["inspect", str(checkpoint)]) == 0
    assert "in_proj" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["inspect", "explain", "generate"])
@pytest.mark.parametrize("place", ["nowhere", "empty", "file"])
def test_a_bad_path_is_one_line(run, tmp_path, command, place):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    words = ["generate", "x", "--model"] if command == "generate" else [command]
    assert_one_line(run(*words, str(tmp_path / place)), place)


def test_a_size_that_is_none_is_one_line(run, checkpoint):
    for wrong in ("lots", "-1GB", "1XB", "", "1e999", "nan"):
        assert_one_line(run("inspect", str(checkpoint), "--memory", wrong), "number of bytes")


@pytest.mark.parametrize(
    ("text", "expected"),
    [("80GB", 80 * 10**9), ("80 gib", 80 * 2**30), ("1.5k", 1500), ("80e9", 80 * 10**9), ("7", 7), ("2MiB", 2**21)],
)
def test_memory_sizes(text, expected):
    assert cli.memory_bytes(None, None, text) == expected


# the program ------------------------------------------------------------------------------------------------------


def program(*arguments, **options):
    command = [sys.executable, "-c", "import sys; from nemotron_mamba2.cli import main; sys.exit(main())", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, **options)


def test_help_names_every_command():
    done = program("--help")
    assert done.returncode == 0
    for name in ("generate", "inspect", "explain"):
        assert re.search(rf"^  {name} ", done.stdout, re.MULTILINE)
    assert program().stdout == done.stdout
    assert re.fullmatch(r"nemotron-mamba2, version \S+\n", program("--version").stdout)


def test_help_does_not_import_torch():
    code = (
        "import sys\n"
        "from nemotron_mamba2.cli import main\n"
        "main(['generate', '--help'])\n"
        "sys.exit('torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_closed_pipe_is_quiet():
    code = (
        "import sys\n"
        "from nemotron_mamba2 import cli\n"
        "@cli.commands.command('flood')\n"
        "def flood():\n"
        "    while True:\n"
        "        cli.click.echo('x' * 1000)\n"
        "sys.exit(cli.main(['flood']))\n"
    )
    done = subprocess.run(
        ["bash", "-c", 'set -o pipefail; "$0" -c "$1" | head -c 10', sys.executable, code],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == "xxxxxxxxxx"
    assert done.stderr == ""
    assert done.returncode == 141
