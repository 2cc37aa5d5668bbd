"""What the commands share: options, where a model is, tables, sizes, and the bar of progress."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import click

DEMO_MODEL = Path(__file__).parent.parent / "assets" / "demo"
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
    help="Where to run; auto is the GPU where there is one, else the CPU.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")


def directory(model: str | None) -> Path:
    """The checkpoint directory of an argument: a path, a hub id, or None for the demo model."""
    if model is None:
        return DEMO_MODEL
    from ..checkpoint import resolve

    return resolve(model)


def device_name(device: str) -> str:
    """What --device means here. Raises: click.UsageError when there is no GPU and one was asked for."""
    import torch

    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise click.UsageError("--device cuda: torch finds no CUDA device here; take --device cpu")
    return device


@contextlib.contextmanager
def progress_bar(what: str) -> Iterator[Callable[..., None] | None]:
    """A bar of bytes on a terminal, moved by calls with (done, in all, perhaps other words); None elsewhere.

    what: the words before it.
    """
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)

        def show(done: int, total: int, words: str = what) -> None:
            bar.update(task, completed=done, total=total, description=words)

        yield show


def print_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
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
