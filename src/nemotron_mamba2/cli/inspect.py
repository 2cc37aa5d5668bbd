"""`inspect` and `explain`: what a checkpoint holds, and how it would run here. Neither reads a weight."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from .shared import device_name, device_option, directory, json_option, memory_bytes, print_table, size

if TYPE_CHECKING:
    from ..checkpoint import CheckpointReport, LayerReport, ProjectionReport

REPORT_PARTS = ("layers", "ends", "mtp", "mtp_ends", "skipped")  # of CheckpointReport: tuples of records
CONTEXTS_TOKENS = (1024, 8192, 65536, 524288)


@click.command("inspect", short_help="What a checkpoint holds, and what fits.")
@click.argument("model", metavar="[DIR|HUB_ID]", required=False)
@click.option("--memory", callback=memory_bytes, metavar="SIZE", help="Say what fits into this, like 80GB.")
@click.option("--mtp", is_flag=True, help="Count the multi-token-prediction head too, which generate does not use.")
@json_option
def inspect_command(model: str | None, memory: int | None, mtp: bool, as_json: bool) -> None:
    """Say what a checkpoint holds: layers, formats, bytes, what is skipped, and what a sequence costs."""
    from ..checkpoint import inspect_checkpoint

    report = inspect_checkpoint(directory(model), mtp=mtp)
    costs = _costs(report, memory, mtp=mtp)
    if not as_json:
        _print_report(report, costs)
        return
    record = {name: value for name, value in vars(report).items() if name != "config"}
    record |= {part: [dataclasses.asdict(item) for item in record[part]] for part in REPORT_PARTS}
    record = {**record, "directory": str(report.directory), "pattern": report.config.pattern, **costs}
    click.echo(json.dumps(record, ensure_ascii=False))


@click.command("explain", short_help="How a checkpoint would run here, and why.")
@click.argument("model", metavar="[DIR|HUB_ID]", required=False)
@device_option
@json_option
def explain_command(model: str | None, device: str, as_json: bool) -> None:
    """Say how a checkpoint would run here: kernels, weight copies, memory, and the reasons. No weight is read."""
    from ..checkpoint import load_model
    from ..config import ModelConfig, Policy
    from ..plan import plan_model

    path = directory(model)
    config = dataclasses.replace(ModelConfig.from_checkpoint(path), mtp_layers=())
    plan = plan_model(config, load_model(path, device="meta", mtp=False), Policy(), device=device_name(device))
    click.echo(json.dumps(dataclasses.asdict(plan), default=str) if as_json else plan.explain())


def _costs(report: CheckpointReport, memory: int | None, *, mtp: bool) -> dict[str, Any]:
    """What a sequence takes beside the weights, and how many fit. Activations are not counted."""
    from ..model import PAGE_TOKENS, cache_bytes

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
    print_table(("layers", "kind", "projection", "format", "shape", "bytes each"), list(_projection_rows(report)))
    if report.skipped:
        rows = [(s.rule, str(s.tensors), size(s.nbytes), s.reason) for s in report.skipped]
        print_table(("skip rule", "tensors", "bytes", "why"), rows)
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
        print_table(("tokens each", "sequences that fit"), fits)


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
