"""`bench`: measure what the package runs on the GPU at hand, each figure with the check of its kernels beside it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .shared import size

if TYPE_CHECKING:
    from ..bench.records import Record, Run

SHAPES = ("nano30b", "super120b", "nano4b", "9b-v2", "ultra550b")
FORMATS = ("bf16", "fp8_tensor", "fp8_channel", "fp8_block", "nvfp4")
STATE_DTYPES = ("float32", "bfloat16", "float16")
PROMPTS = ("checkpoint", "exact", "fp8")
MODELS = ("nano30b", "super120b", "nano4b", "9b-v2")
MODEL_FORMATS = ("nvfp4", "fp8", "bf16", "mixed")
MOST_ROWS, MOST_VERIFY, MOST_TOKENS = 4096, 8, 1 << 20


def listed(choices: Sequence[str]) -> Callable[[click.Context, click.Parameter, str], tuple[str, ...]]:
    """Option callback: a comma-separated list of these words."""

    def read(context: click.Context, parameter: click.Parameter, value: str) -> tuple[str, ...]:
        words = tuple(dict.fromkeys(word.strip() for word in value.split(",")))
        for word in words:
            if word not in choices:
                raise click.BadParameter(f"{word!r} is none of {', '.join(choices)}")
        return words

    return read


def counts(most: int) -> Callable[[click.Context, click.Parameter, str | None], tuple[int, ...]]:
    """Option callback: a comma-separated list of counts from 1 to `most`; nothing is an empty one."""

    def read(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[int, ...]:
        words = [] if value is None else [word.strip() for word in value.split(",")]
        if not all(word.isascii() and word.isdigit() and 1 <= int(word) <= most for word in words):
            raise click.BadParameter(f"{value!r} is no list of counts from 1 to {most}; write it like 1,4,16")
        return tuple(dict.fromkeys(int(word) for word in words))

    return read


@click.group("bench")
def command() -> None:
    """Measure what the package runs on the GPU at hand."""


@command.command("layer")
@click.option(
    "--shape", "shapes", callback=listed(SHAPES), default="nano30b", show_default=True, help=f"Of {', '.join(SHAPES)}."
)
@click.option(
    "--format", "formats", callback=listed(FORMATS), default="bf16,fp8_tensor,nvfp4", show_default=True,
    help=f"Of {', '.join(FORMATS)}.",
)  # fmt: skip
@click.option(
    "--rows", callback=counts(MOST_ROWS), default="1,4,16,64,256", show_default=True, help="Sequences of a step."
)
@click.option(
    "--verify", type=click.IntRange(1, MOST_VERIFY), default=1, metavar="K", help="Rows of each sequence.  [default: 1]"
)
@click.option(
    "--prefill", callback=counts(MOST_TOKENS), metavar="T[,T…]", help="Prompts of so many tokens instead of steps."
)
@click.option(
    "--sequences", type=click.IntRange(1, MOST_ROWS), default=1, metavar="S", help="Prompts at once.  [default: 1]"
)
@click.option("--prompt", type=click.Choice(PROMPTS), default="checkpoint", show_default=True, help="As in Policy.")
@click.option("--state-dtype", type=click.Choice(STATE_DTYPES), default="float32", show_default=True)
@click.option("--peers", is_flag=True, help="Time the same layer on torch, mamba_ssm and humming-kernels too.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write the records there.")
@click.option("--plot", "plot_file", type=click.Path(dir_okay=False, path_type=Path), help="Draw a roofline there.")
@click.option("--commit", help="What to record as the source's commit.  [default: what git says]")
def layer_command(
    shapes: tuple[str, ...],
    formats: tuple[str, ...],
    *,
    rows: tuple[int, ...],
    verify: int,
    prefill: tuple[int, ...],
    sequences: int,
    prompt: str,
    state_dtype: str,
    peers: bool,
    json_file: Path | None,
    plot_file: Path | None,
    commit: str | None,
) -> None:
    """One Mamba-2 layer: microseconds, GB/s, share of the memory ceiling.

    Steps of decode (or verify), or with --prefill prompts: conv, scan, gated norm, the three in a row, and the layer.
    Lists are separated by commas. A time is the median of a CUDA graph over 23 layers with random weights of their own
    (prompts: one layer, or one piece of it, four times). A kernel that disagrees with the reference gets no figure, and
    the exit code is 1.
    """
    run = _begin(json_file, plot_file, commit)
    from ..bench import layer
    from ..bench import prompt as prompts
    from ..bench.peers import PEERS

    def say(line: str) -> None:
        click.echo(line, err=True)

    if prefill:
        sizes = [(shape, format, tokens) for shape in shapes for format in formats for tokens in prefill]
        cases = [prompts.PromptCase(*size, sequences=sequences, prompt=prompt) for size in sizes]
        results = prompts.measure(cases, run, peers=peers, say=say)
    else:
        steps = [
            layer.Case(s, f, n, rows=verify, state_dtype=state_dtype) for s in shapes for f in formats for n in rows
        ]
        results = layer.measure(steps, run, peers=PEERS if peers else (), say=say)
    records: list[Record] = []
    refused = 0
    for found in results:
        if isinstance(found, layer.Refused):
            refused += 1
            say(f"{found.case.words}: wrong, off the reference by {found.error:.3g}: no figure")
            continue
        records.append(found)
        click.echo(line_of(found))
    _write(records, run, json_file, plot_file)
    if refused:
        raise click.exceptions.Exit(1)


@command.command("model")
@click.option(
    "--shape", "shapes", callback=listed(MODELS), default="nano30b", show_default=True, help=f"Of {', '.join(MODELS)}."
)
@click.option(
    "--format", "formats", callback=listed(MODEL_FORMATS), default="nvfp4", show_default=True,
    help=f"Of {', '.join(MODEL_FORMATS)}: the layout of the published file.",
)  # fmt: skip
@click.option("--batch", callback=counts(1024), default="1,16,64", show_default=True, help="Sequences of a step.")
@click.option(
    "--context", type=click.IntRange(32, MOST_TOKENS), default=1024, show_default=True, help="Tokens that each holds."
)
@click.option("--prefill", callback=counts(MOST_TOKENS), metavar="T[,T…]", help="Also time prompts of so many tokens.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write the records there.")
@click.option("--plot", "plot_file", type=click.Path(dir_okay=False, path_type=Path), help="Draw the steps there.")
@click.option("--commit", help="What to record as the source's commit.  [default: what git says]")
def model_command(
    shapes: tuple[str, ...],
    formats: tuple[str, ...],
    *,
    batch: tuple[int, ...],
    context: int,
    prefill: tuple[int, ...],
    json_file: Path | None,
    plot_file: Path | None,
    commit: str | None,
) -> None:
    """A whole model: tokens per second, its floor, the share of each kind of layer, memory.

    The model has random weights in the layout of a published file, made in device memory. A step of decode is one CUDA
    graph; its logits must be those of the eager step, bit for bit, or there is no figure and the exit code is 1.
    """
    run = _begin(json_file, plot_file, commit)
    from ..bench import model

    cases = [
        model.ModelCase(s, f, b, context, prefill if b == batch[0] else ())
        for s in shapes
        for f in formats
        for b in batch
    ]
    records: list[Record] = []
    refused = 0
    for found in model.measure(cases, run, say=lambda line: click.echo(line, err=True)):
        if isinstance(found, model.RefusedModel):
            refused += 1
            click.echo(f"{found.case.words}: no figure: {found.why}", err=True)
            continue
        records.append(found)
        for line in lines_of(found):
            click.echo(line)
    if json_file is not None:
        json_file.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
    if plot_file is not None:
        from ..bench.plot import bars

        bars(records, plot_file)
    if refused:
        raise click.exceptions.Exit(1)


def lines_of(record: Record) -> Iterator[str]:
    """One model record for people."""
    yield (
        f"{record['model']:10}{record['format']:7}{record['batch']:4} × {record['context']:<7}"
        f"{record['step_us']:9.1f} µs {record['tokens_per_s']:8.0f} tokens/s  floor {record['floor_us']:.1f} µs "
        f"({100 * record['floor_share']:.0f} %)  in a row {record['step_with_host_us']:.1f} µs"
    )
    for kind, part in record["kinds"].items():
        many = f"{part['layers']:3} ×" if part["layers"] else "     "
        share = 100 * part["share"]
        yield f"    {kind:5}{many}{part['us']:9.1f} µs{share:5.0f} %  floor {part['floor_us']:.1f} µs"
    for tokens, ms in record["first_token_ms"].items():
        yield f"    first token after a prompt of {tokens}: {ms:.1f} ms"
    parts = "  ".join(f"{name} {size(count)}" for name, count in record["memory"].items())
    yield f"    {parts}"


def line_of(record: Record) -> str:
    """One record for people."""
    if record["prefill_tokens"]:
        what = f"{record['prefill_tokens']:6} × {record['sequences']} {record['piece']:15}"
    else:
        verify = record.get("verify", 1)
        what = f"{record['state_dtype']:9}{record['rows'] // verify:4} × {verify}"
    peers = "".join(f"  {name} {us:.1f}" for name, us in record["peers"].items())
    return (
        f"{record['shape']:10}{record['format']:12}{what}"
        f"{record['us_per_layer']:9.1f} µs{record['gbytes_per_s']:7.0f} GB/s{100 * record['hbm_share']:5.0f} %{peers}"
    )


def _begin(json_file: Path | None, plot_file: Path | None, commit: str | None) -> Run:
    """The run, after all that can be refused was. Raises: click.UsageError, ConfigError."""
    import torch

    if not torch.cuda.is_available():
        raise click.UsageError("torch finds no CUDA device here, and bench measures GPU kernels")
    from ..bench.plot import figure_class
    from ..bench.records import describe_run
    from ..bench.timing import ceilings

    if plot_file is not None:
        figure_class()
    for file in (json_file, plot_file):
        if file is not None and not file.parent.is_dir():
            raise click.UsageError(f"{file.parent} is no directory")
    run = describe_run(ceilings(), commit)
    top = run.ceilings
    click.echo(
        f"{run.device}, torch {run.torch}: copy {top.copy_tb_s:.2f} TB/s, read {top.read_tb_s:.2f} TB/s, "
        f"bf16 {top.bf16_tflop_s:.0f} TFLOP/s"
    )
    return run


def _write(records: Sequence[dict[str, Any]], run: Run, json_file: Path | None, plot_file: Path | None) -> None:
    if json_file is not None:
        json_file.write_text(json.dumps(list(records), indent=1) + "\n", encoding="utf-8")
    if plot_file is not None:
        from ..bench.plot import roofline

        roofline(records, run.ceilings, plot_file)
