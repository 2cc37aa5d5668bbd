"""`generate`: a prompt in, text out as it comes."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import click

from ..errors import RequestError
from .shared import device_name, device_option, directory, json_option, progress_bar

if TYPE_CHECKING:
    from ..generate import Completion, Model, TokenEvent


@click.command("generate")
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
def command(
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
    from ..sampling import SamplingParams

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

    from ..generate import Model

    if threads is not None:
        torch.set_num_threads(threads)
    path, where = directory(model), device_name(device)
    with progress_bar(f"loading {path.name}") as progress:
        return Model.from_checkpoint(path, device=where, progress=progress)


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
