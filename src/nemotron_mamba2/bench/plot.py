"""A roofline of records: rate over arithmetic intensity, below what the same run's device reaches. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from .records import SHAPES, Record
from .timing import Ceilings

OWN = "nemotron-mamba2"
MARKERS = {OWN: "o", "torch": "v", "mamba_ssm": "s", "humming": "D"}


def figure_class() -> Any:
    """matplotlib's Figure. Raises: ConfigError when it is not installed."""
    try:
        return import_module("matplotlib.figure").Figure
    except ImportError:
        raise ConfigError("--plot needs matplotlib; install nemotron-mamba2[bench]") from None


def layer_flops(record: Record) -> float:
    """Floating-point operations of one layer over a record's rows: projections, state, window of a step row."""
    c = SHAPES[record["shape"]]
    rows = record["rows"] + record["prefill_tokens"]
    projections = 2 * c.hidden_size * (c.in_proj_rows + c.d_inner)
    state = 4 * c.d_inner * c.ssm_state_size + 2 * record["window_rows"] * (c.d_inner + c.n_groups * c.ssm_state_size)
    return rows * (projections + state)


def roofline(records: Sequence[Record], ceilings: Ceilings, file: Path) -> None:
    """Draw the records into a file; its suffix says the form. One colour per shape and format, one mark per program."""
    figure = figure_class()(figsize=(9, 6), layout="constrained")
    axes = figure.add_subplot()
    edges = [0.5, ceilings.bf16_tflop_s / ceilings.copy_tb_s, 2000.0]
    axes.plot(edges, [min(x * ceilings.copy_tb_s, ceilings.bf16_tflop_s) for x in edges], color="black", linewidth=1)
    axes.text(0.55, 0.6 * ceilings.copy_tb_s, f"copy {ceilings.copy_tb_s:.2f} TB/s", rotation=0)
    axes.text(edges[1], 1.1 * ceilings.bf16_tflop_s, f"bf16 {ceilings.bf16_tflop_s:.0f} TFLOP/s")
    pairs = list(dict.fromkeys((r["shape"], r["format"]) for r in records))
    for i, pair in enumerate(pairs):
        mine = [r for r in records if (r["shape"], r["format"]) == pair]
        for name, marker in MARKERS.items():
            points = [_point(r, r["us_per_layer"] if name == OWN else r["peers"].get(name)) for r in mine]
            found = [point for point in points if point is not None]
            if found:
                label = " ".join((*pair, name))
                axes.plot(*zip(*found, strict=True), marker, color=f"C{i % 10}", label=label, alpha=_alpha(name))
    device = records[0]["device"] if records else ""
    axes.set(xscale="log", yscale="log", xlabel="flop per byte that must move", ylabel="TFLOP/s", title=device)
    axes.legend(fontsize="x-small", ncols=2)
    figure.savefig(file, dpi=150)


def bars(records: Sequence[Record], file: Path) -> None:
    """Draw whole-model records into a file: a bar per step, a part per kind of layer, the floor as a line across it."""
    figure = figure_class()(figsize=(9, 6), layout="constrained")
    axes = figure.add_subplot()
    kinds = list(dict.fromkeys(kind for record in records for kind in record["kinds"]))
    bottoms = [0.0] * len(records)
    for i, kind in enumerate(kinds):
        heights = [record["kinds"].get(kind, {"us": 0.0})["us"] for record in records]
        axes.bar(range(len(records)), heights, bottom=bottoms, color=f"C{i}", label=kind)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    for name, key, colour in (("whole step", "step_us", "black"), ("floor", "floor_us", "red")):
        starts, stops = ([i + side for i in range(len(records))] for side in (-0.45, 0.45))
        axes.hlines([record[key] for record in records], starts, stops, color=colour, label=name)
    words = [f"{r['model']} {r['format']}\n{r['batch']} × {r['context']}" for r in records]
    axes.set_xticks(range(len(records)), words, fontsize="x-small")
    axes.set(ylabel="µs per step of decode", title=records[0]["device"] if records else "")
    axes.legend(fontsize="small")
    figure.savefig(file, dpi=150)


def _point(record: Record, us: float | None) -> tuple[float, float] | None:
    """(flop per byte, TFLOP/s) of a time."""
    if us is None:
        return None
    flops = layer_flops(record)
    return flops / (record["gbytes_per_s"] * record["us_per_layer"] * 1e3), flops / us / 1e6


def _alpha(name: str) -> float:
    return 1.0 if name == OWN else 0.5
