"""The command line: `generate`, `inspect`, `explain`.

Text goes to stdout as it comes; progress and figures go to stderr, and progress only to a terminal. Whatever the user
got wrong is one line on stderr and exit code 2; Ctrl-C is 130; a reader that closes the pipe is no error. torch and
the rest of the package are imported by the command that needs them, so that `--help` answers at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .errors import NemotronMamba2Error, RequestError

if TYPE_CHECKING:
    from .checkpoint import CheckpointReport, LayerReport, ProjectionReport
    from .generate import Completion, Model, TokenEvent

PROGRAM = "nemotron-mamba2"
EXIT_USAGE, EXIT_INTERRUPTED, EXIT_BROKEN_PIPE = 2, 130, 141
DEMO_MODEL = Path(__file__).parent / "assets" / "demo"
REPORT_PARTS = ("layers", "ends", "mtp", "mtp_ends", "skipped")  # of CheckpointReport: tuples of records
CONTEXTS_TOKENS = (1024, 8192, 65536, 524288)
UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def memory_bytes(context: click.Context, parameter: click.Parameter, value: str | None) -> int | None:
    """Option callback: 80GB, 80GiB or 80e9 as a whole number of bytes."""
    if value is None:
        return None
    found = re.fullmatch(r"\s*(\d+(?:\.\d*)?(?:e\d{1,2})?)\s*([kmgt]?i?)b?\s*", value.lower())
    if not found or found[2] not in UNITS:
        raise click.BadParameter(f"{value!r} is no number of bytes; write it like 80GB, 80GiB or 80000000000")
    return int(float(found[1]) * UNITS[found[2]])


device_option = click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    show_default=True,
    help="Where to run; auto takes the GPU when there is one.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")


@click.group(
    no_args_is_help=False, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]}
)
@click.version_option(package_name="nemotron-mamba2", prog_name=PROGRAM)
@click.pass_context
def commands(context: click.Context) -> None:
    """Run NVIDIA Nemotron-H models: hybrids of Mamba-2, attention, MLP and MoE layers."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@commands.command()
@click.argument("prompt", required=False)
@click.option("--model", metavar="DIR|HUB_ID", help="A checkpoint directory or a hub id.  [default: the demo model]")
@click.option("--chat", is_flag=True, help="Put the prompt into the checkpoint's chat template, as the user's message.")
@click.option("--system", metavar="TEXT", help="The system message; needs --chat.")
@device_option
@click.option("--max-tokens", type=int, metavar="N", help="Most tokens to generate.  [default: 128]")
@click.option("--temperature", type=float, metavar="T", help="0 takes the most likely token.  [default: 0]")
@click.option("--top-k", type=int, metavar="K", help="Draw among the K most likely tokens.")
@click.option("--top-p", type=float, metavar="P", help="Draw among the fewest tokens whose probabilities reach P.")
@click.option("--min-p", type=float, metavar="P", help="Drop tokens below this share of the likeliest's probability.")
@click.option("--repetition-penalty", type=float, metavar="R", help="Above 1, tokens seen before are less likely.")
@click.option("--seed", type=int, metavar="N", help="Same seed, same text.  [default: drawn]")
@click.option("--stop", multiple=True, metavar="TEXT", help="End before this text; may be given several times.")
@click.option("--ignore-eos", is_flag=True, default=None, help="Go on after the model's own end.")
@click.option("--threads", type=click.IntRange(min=1), metavar="N", help="CPU threads.")
@json_option
def generate(
    prompt: str | None,
    *,
    model: str | None,
    chat: bool,
    system: str | None,
    device: str,
    threads: int | None,
    as_json: bool,
    **sampling: Any,
) -> None:
    """Continue PROMPT. Without PROMPT, or with -, it is read from standard input."""
    from .sampling import SamplingParams

    if system is not None and not chat:
        raise click.UsageError("--system needs --chat")
    text = _read_prompt(prompt)
    # Checked before minutes of loading, and seeded here so that --json can report the seed.
    request = SamplingParams(**{name: value for name, value in sampling.items() if value is not None}).seeded()
    loaded = _load(model, device, threads=threads)
    ids: str | list[int] = _chat_prompt(loaded, text, system) if chat else text
    [completion] = loaded.generate([ids], request, on_token=None if as_json else _write_token)
    figures = _figures(completion)
    if as_json:
        record = {"text": completion.text, "token_ids": list(completion.token_ids), **figures, "seed": request.seed}
        click.echo(json.dumps(record, ensure_ascii=False))
    else:
        click.echo("" if completion.text.endswith("\n") else "\n", nl=False)
        click.echo(_figures_line(figures), err=True)


@commands.command()
@click.argument("model", metavar="[DIR|HUB_ID]", required=False)
@click.option("--memory", callback=memory_bytes, metavar="SIZE", help="Say what fits into this, like 80GB.")
@click.option("--mtp", is_flag=True, help="Count the multi-token-prediction head too, which generate does not use.")
@json_option
def inspect(model: str | None, memory: int | None, mtp: bool, as_json: bool) -> None:
    """Say what a checkpoint holds: layers, formats, bytes, what is skipped, and what a sequence costs."""
    from .checkpoint import inspect_checkpoint

    report = inspect_checkpoint(_directory(model), mtp=mtp)
    costs = _costs(report, memory, mtp=mtp)
    if not as_json:
        _print_report(report, costs)
        return
    record = {name: value for name, value in vars(report).items() if name != "config"}
    record |= {part: [dataclasses.asdict(item) for item in record[part]] for part in REPORT_PARTS}
    record = {**record, "directory": str(report.directory), "pattern": report.config.pattern, **costs}
    click.echo(json.dumps(record, ensure_ascii=False))


@commands.command()
@click.argument("model", metavar="[DIR|HUB_ID]", required=False)
@device_option
@json_option
def explain(model: str | None, device: str, as_json: bool) -> None:
    """Say how a checkpoint would run here: kernels, weight copies, memory, and the reasons. No weight is read."""
    from .checkpoint import load_model
    from .config import ModelConfig, Policy
    from .plan import plan_model

    path = _directory(model)
    config = dataclasses.replace(ModelConfig.from_checkpoint(path), mtp_layers=())
    plan = plan_model(config, load_model(path, device="meta", mtp=False), Policy(), device=_device(device))
    click.echo(json.dumps(dataclasses.asdict(plan), default=str) if as_json else plan.explain())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns: the exit code."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a character shows another
    try:
        words = list(sys.argv[1:] if arguments is None else arguments)
        with warnings.catch_warnings(), commands.make_context(PROGRAM, words) as context:
            warnings.showwarning = _show_warning
            commands.invoke(context)
        sys.stdout.flush()
    except click.exceptions.Exit as leave:
        return leave.exit_code
    except click.UsageError as error:
        where = error.ctx.command_path if error.ctx else PROGRAM
        return _fail(f"{error.format_message()} (see {where} --help)")
    except BrokenPipeError:
        # Python flushes stdout once more when it ends, and must not meet the closed pipe again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except (click.ClickException, NemotronMamba2Error, OSError) as error:
        return _fail(error.format_message() if isinstance(error, click.ClickException) else str(error))
    except (KeyboardInterrupt, click.Abort):
        click.echo(err=True)
        return EXIT_INTERRUPTED
    return 0


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    click.echo(f"{PROGRAM}: warning: {' '.join(str(message).split())}", err=True)


def _fail(message: str) -> int:
    """One line, whatever the message looks like."""
    click.echo(f"{PROGRAM}: {' '.join(message.split())}", err=True)
    return EXIT_USAGE


def _read_prompt(prompt: str | None) -> str:
    if prompt is None or prompt == "-":
        if sys.stdin is None or (prompt is None and sys.stdin.isatty()):
            raise click.UsageError('no prompt: give one, as in generate "In the beginning", or pipe it in')
        try:
            prompt = sys.stdin.buffer.read().decode("utf-8").removesuffix("\n")
        except UnicodeDecodeError as error:
            where = f"{error.reason} at byte {error.start}"
            raise RequestError(f"prompt: expected UTF-8 on standard input, {where}") from None
    if not prompt.strip():
        raise RequestError("prompt: expected text to continue, came none")
    return prompt


def _chat_prompt(model: Model, text: str, system: str | None) -> list[int]:
    if model.tokenizer is None:
        raise RequestError("--chat: the checkpoint has no tokenizer")
    messages = [] if system is None else [{"role": "system", "content": system}]
    rendered = model.tokenizer.render_chat([*messages, {"role": "user", "content": text}])
    return model.tokenizer.encode(rendered, add_special_tokens=False)


def _load(model: str | None, device: str, *, threads: int | None = None) -> Model:
    import torch

    from .generate import Model

    if threads is not None:
        torch.set_num_threads(threads)
    path, where = _directory(model), _device(device)
    with _progress(path.name) as progress:
        return Model.from_checkpoint(path, device=where, progress=progress)


def _device(device: str) -> str:
    import torch

    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise click.UsageError("--device cuda: torch finds no CUDA device here; take --device cpu")
    return device


def _write_token(event: TokenEvent) -> None:
    sys.stdout.write(event.text)
    sys.stdout.flush()


def _figures(completion: Completion) -> dict[str, Any]:
    """Counts and speeds. The prompt's step makes the first token, so decoding makes one less than there are."""
    generated = len(completion.token_ids)
    return {
        "finish_reason": completion.finish_reason,
        "prompt_tokens": completion.prompt_tokens,
        "generated_tokens": generated,
        "prompt_seconds": completion.prompt_seconds,
        "decode_seconds": completion.decode_seconds,
        "prompt_tokens_per_second": _rate(completion.prompt_tokens, completion.prompt_seconds),
        "generated_tokens_per_second": _rate(generated - 1, completion.decode_seconds),
    }


def _rate(tokens: int, seconds: float) -> float | None:
    return tokens / seconds if tokens > 0 and seconds > 0 else None


def _figures_line(figures: dict[str, Any]) -> str:
    parts = []
    for what in ("prompt", "generated"):
        rate = figures[f"{what}_tokens_per_second"]
        speed = "" if rate is None else f" at {rate:.1f} tokens/s"
        parts.append(f"{figures[f'{what}_tokens']} {what} tokens{speed}")
    parts.append({"stop": "stopped", "length": "length reached"}[figures["finish_reason"]])
    return " · ".join(parts)


def _directory(model: str | None) -> Path:
    if model is None:
        return DEMO_MODEL
    from .checkpoint import resolve

    return resolve(model)


@contextlib.contextmanager
def _progress(name: str) -> Iterator[Callable[[int, int], None] | None]:
    """A bar of the bytes loaded, on a terminal; nothing elsewhere."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(f"loading {name}", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _costs(report: CheckpointReport, memory: int | None, *, mtp: bool) -> dict[str, Any]:
    """What a sequence takes beside the weights, and how many fit. Activations are not counted."""
    from .model import PAGE_TOKENS, cache_bytes

    config = report.config if mtp else dataclasses.replace(report.config, mtp_layers=())
    pools = cache_bytes(config, slots=1, pages=1)
    state = pools - cache_bytes(config, slots=0, pages=1)
    page = pools - cache_bytes(config, slots=1, pages=0)
    costs: dict[str, Any] = {"state_bytes_per_sequence": state, "kv_bytes_per_token": page // PAGE_TOKENS}
    if memory is None:
        return costs
    free = memory - report.nbytes - cache_bytes(config, slots=0, pages=0)
    longest = config.max_position_embeddings
    contexts = sorted({*(tokens for tokens in CONTEXTS_TOKENS if tokens < longest), longest})
    fits = {tokens: max(0, free // (state + -(-tokens // PAGE_TOKENS) * page or 1)) for tokens in contexts}
    costs |= {"memory_bytes": memory, "free_bytes": free, "weights_fit": free >= 0}
    return {**costs, "fits": [{"context_tokens": tokens, "sequences": count} for tokens, count in fits.items()]}


def _print_report(report: CheckpointReport, costs: dict[str, Any]) -> None:
    config = report.config
    click.echo(
        f"{report.directory}: {report.tensors} tensors in {report.files} files, {size(report.nbytes)} of weights"
    )
    click.echo(f"layers {config.pattern}")
    click.echo(f"hidden size {config.hidden_size}, vocabulary {config.vocab_size}", nl=False)
    click.echo("" if report.algorithm is None else f", quantised as {report.algorithm}")
    _print_table(("layers", "kind", "projection", "format", "shape", "bytes each"), list(_projection_rows(report)))
    if report.skipped:
        rows = [(s.rule, str(s.tensors), size(s.nbytes), s.reason) for s in report.skipped]
        _print_table(("skip rule", "tensors", "bytes", "why"), rows)
    for note in report.notes:
        click.echo(f"note: {note}")
    click.echo(f"state {size(costs['state_bytes_per_sequence'])} per sequence", nl=False)
    click.echo(f", keys and values {size(costs['kv_bytes_per_token'])} per token")
    if "memory_bytes" in costs:
        left = size(abs(costs["free_bytes"]))
        click.echo(
            f"of {size(costs['memory_bytes'])}, " + (f"{left} are left" if costs["weights_fit"] else f"{left} lack")
        )
        fits = [(str(fit["context_tokens"]), str(fit["sequences"])) for fit in costs["fits"]]
        _print_table(("tokens each", "sequences that fit"), fits)


def _projection_rows(report: CheckpointReport) -> Iterator[tuple[str, ...]]:
    """One row per projection; layers that are alike share theirs."""
    parts = [("", "model", report.ends), ("", "mtp", report.mtp_ends)]
    for prefix, layers in (("", report.layers), ("mtp ", report.mtp)):
        alike: dict[tuple[str, tuple[ProjectionReport, ...]], list[LayerReport]] = {}
        for layer in layers:
            alike.setdefault((layer.letter, layer.projections), []).append(layer)
        parts += [(prefix + _ranges(same), letter, projections) for (letter, projections), same in alike.items()]
    for layers_text, kind, projections in parts:
        for p in projections:
            form = p.format if p.dtype in (None, "bfloat16") else str(p.dtype)
            form += " + input scale" if p.input_scale else ""
            yield layers_text, kind, p.name, form, " × ".join(map(str, p.shape)), size(p.nbytes)


def _ranges(layers: Sequence[LayerReport]) -> str:
    """Indices 0, 1, 2, 5 as "0–2,5"."""
    runs: list[list[int]] = []
    for index in (layer.index for layer in layers):
        if runs and index == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], index]
        else:
            runs.append([index])
    return ",".join("–".join(map(str, run)) for run in runs)


def _print_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table on a terminal, aligned columns elsewhere."""
    if sys.stdout.isatty():
        from rich.box import SIMPLE
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(*headers, box=SIMPLE)
        for row in rows:
            table.add_row(*map(Text, row))
        Console().print(table)
        return
    widths = [max(map(len, column)) for column in zip(headers, *rows, strict=True)]
    for row in (headers, *rows):
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def size(count: float) -> str:
    """Bytes in the unit that suits them: 1.5 GB."""
    for unit in ("B", "kB", "MB"):
        if abs(count) < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.4g} GB"
