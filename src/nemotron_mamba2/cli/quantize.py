"""`quantize`: a BF16 checkpoint in, one in ModelOpt's layout out, and a report of what it cost."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..errors import NemotronMamba2Error, RequestError
from .shared import device_name, device_option, json_option, memory_bytes, print_table, progress_bar, size

if TYPE_CHECKING:
    from ..quantize import QuantizationReport, TensorReport

FORMATS = ("fp8", "fp8_block", "nvfp4", "mixed")
WORST = 10


@click.command("quantize", short_help="A BF16 checkpoint in FP8, NVFP4 or a mix.")
@click.argument("source", metavar="SRC")
@click.argument("destination", metavar="DST")
@click.option(
    "--format", "preset", type=click.Choice(FORMATS), required=True, help="What Mamba, MLP and experts become."
)
@click.option("--recipe", metavar="FILE", help="JSON object of name patterns to formats, which overrules --format.")
@click.option(
    "--search", type=click.Choice(["absmax", "mse", "sweep"]), help="How NVFP4 finds block scales.  [default: mse]"
)
@click.option("--calibrate", metavar="TEXTFILE", help="Run this text to find static activation scales.")
@click.option(
    "--shard-size",
    callback=memory_bytes,
    metavar="SIZE",
    default="5GB",
    show_default=True,
    help="Most bytes of a file.",
)
@click.option("--plot", metavar="FILE", help="Draw the relative errors into a PNG; needs matplotlib.")
@device_option
@json_option
def command(
    source: str,
    destination: str,
    *,
    preset: str,
    recipe: str | None,
    search: str | None,
    calibrate: str | None,
    shard_size: int,
    plot: str | None,
    device: str,
    as_json: bool,
) -> None:
    """Write a quantised copy of the BF16 checkpoint SRC as the new directory DST, in ModelOpt's layout."""
    from ..quantize import quantize_checkpoint, read_recipe

    if plot is not None:  # before minutes of work
        _figure_class()
        if not Path(plot).parent.is_dir():
            raise click.UsageError(f"--plot: {Path(plot).parent} is no directory")
    patterns = None if recipe is None else read_recipe(recipe)
    text = None if calibrate is None else _read_text(Path(calibrate))
    where = device_name(device)
    with progress_bar("quantising") as bar:
        report = quantize_checkpoint(
            source,
            destination,
            preset,
            recipe=patterns,
            search=search,
            calibration_text=text,
            device=where,
            shard_bytes=shard_size,
            progress=lambda what, done, total: None if bar is None else bar(done, total, what),
        )
    if plot is not None:
        _draw(report, Path(plot))
    if as_json:
        click.echo(json.dumps(report.record(), ensure_ascii=False))
    else:
        _print(report)


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"{file}: expected UTF-8, {error.reason} at byte {error.start}") from None


def _print(report: QuantizationReport) -> None:
    ratio = report.bytes_after / report.bytes_before
    click.echo(f"{report.destination}: {report.algorithm}, {len(report.tensors)} matrices quantised", nl=False)
    click.echo(f", {len(report.kept)} left, {report.files} files")
    click.echo(f"{size(report.bytes_before)} before, {size(report.bytes_after)} after ({ratio:.1%})")
    for format, tensors in _by_format(report).items():
        errors = sorted(t.relative_error for t in tensors)
        search = f" ({report.search})" if format == "nvfp4" else ""
        click.echo(f"{format}{search}: median relative error {errors[len(errors) // 2]:.2%}, largest {errors[-1]:.2%}")
    rows = [_row(tensor) for tensor in report.worst(WORST)]
    print_table(("worst", "format", "shape", "before", "after", "relative error", "rows"), rows)
    for note in report.notes:
        click.echo(f"note: {note}")


def _row(tensor: TensorReport) -> Sequence[str]:
    parts = " ".join(f"{name} {value:.2%}" for name, value in tensor.parts.items())
    shape = " × ".join(map(str, tensor.shape))
    before, after = size(tensor.bytes_before), size(tensor.bytes_after)
    return tensor.name, tensor.format, shape, before, after, f"{tensor.relative_error:.2%}", parts


def _by_format(report: QuantizationReport) -> dict[str, list[TensorReport]]:
    found: dict[str, list[TensorReport]] = {}
    for tensor in report.tensors:
        found.setdefault(tensor.format, []).append(tensor)
    return found


def _draw(report: QuantizationReport, file: Path) -> None:
    """Relative error of every matrix in the order of the model, one colour per format."""
    figure = _figure_class()(figsize=(10, 4), layout="constrained")
    axes = figure.add_subplot()
    places = {tensor.name: index for index, tensor in enumerate(report.tensors)}
    for format, tensors in _by_format(report).items():
        axes.plot([places[t.name] for t in tensors], [t.relative_error for t in tensors], ".", label=format)
    axes.set(xlabel="matrix, in the order of the files", ylabel="relative error", ylim=(0, None))
    axes.set_title(f"{report.algorithm}: {size(report.bytes_before)} to {size(report.bytes_after)}")
    axes.legend()
    figure.savefig(file, format="png", metadata={"Software": None})


def _figure_class() -> type:
    """matplotlib's Figure, which needs no display. Raises: an error of one line without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise NemotronMamba2Error("--plot: needs matplotlib: pip install matplotlib") from None
    return Figure
