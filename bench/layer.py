"""One Mamba-2 layer on a GPU, step rows: microseconds per layer, and the share of the memory ceiling of the same run.

    python bench/layer.py [--shape nano30b …] [--format nvfp4 …] [--rows 1 4 …] [--state-dtype float32] [--json FILE]

A figure is the median time of a CUDA graph over 23 layers with their own weights (so that none come from L2), sequences
spread evenly over the places of a window. It is printed only if the same layers, in the same run, agree with the
reference; a layer that does not is reported as wrong, without a time.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from dataclasses import replace
from pathlib import Path

import torch
from timing import captured, ceilings, microseconds

from nemotron_mamba2.batch import Batch, Step
from nemotron_mamba2.config import Mamba2Config, Policy
from nemotron_mamba2.formats import FORMATS, Plain, Weight
from nemotron_mamba2.layer import NemotronMamba2Layer
from nemotron_mamba2.ops import Linear, reference
from nemotron_mamba2.plan import make_plan
from nemotron_mamba2.state import StatePool
from nemotron_mamba2.weights import Mamba2Weights

LAYERS = 23
TOLERANCE = 1e-2  # bf16 through a whole layer, against the reference on the same bf16 activations
SHAPES = {
    "nano30b": Mamba2Config(2688, 64, 64, 8, 128),
    "super120b": Mamba2Config(4096, 128, 64, 8, 128),
    "nano4b": Mamba2Config(3136, 96, 80, 8, 128),
    "9b-v2": Mamba2Config(4480, 128, 80, 8, 128),
    "ultra550b": Mamba2Config(8192, 256, 64, 8, 128),
}


def random_layer(config: Mamba2Config, format: str, index: int) -> NemotronMamba2Layer:
    """A layer of random weights on the GPU."""
    torch.manual_seed(index)
    heads = config.mamba_num_heads

    def matrix(rows: int, columns: int) -> Weight:
        values = torch.randn(rows, columns, device="cuda") * 0.02
        return Plain(values.bfloat16()) if format == "bf16" else reference.quantize(values, format)

    weights = Mamba2Weights(
        norm=torch.rand(config.hidden_size, device="cuda") + 0.5,
        in_proj=matrix(config.in_proj_rows, config.hidden_size),
        conv1d_weight=torch.randn(config.conv_dim, 4, device="cuda") * 0.4,
        conv1d_bias=torch.randn(config.conv_dim, device="cuda") * 0.1,
        dt_bias=torch.randn(heads, device="cuda") - 2,
        A_log=torch.rand(heads, device="cuda").mul(15).add(1).log(),
        D=torch.randn(heads, device="cuda"),
        gated_norm=torch.rand(config.d_inner, device="cuda") + 0.5,
        out_proj=matrix(config.hidden_size, config.d_inner),
    )
    plan = make_plan(config, weights, Policy(), device="cuda")
    return NemotronMamba2Layer(config, weights, plan, index=index)


def right(layer: NemotronMamba2Layer, rows: int) -> bool:
    """Whether the layer agrees with the reference after a prompt and three steps, outputs poisoned beforehand."""
    config, weights = layer.config, layer.weights
    outs = []
    for ops in (reference, layer._ops):
        torch.manual_seed(0)
        pool = StatePool(config, layers=layer.index + 1, slots=rows, device="cuda")
        slots, out = pool.acquire(rows), torch.full((rows, config.hidden_size), float("nan"), device="cuda")
        for _ in range(3):
            hidden = torch.randn(rows, config.hidden_size, device="cuda").bfloat16()
            with pool.step(Batch.decode(slots)) as step:
                assert step.step is not None
                linears = (
                    (layer._in_proj, layer._out_proj)
                    if ops is not reference
                    else (Linear(weights.in_proj), Linear(weights.out_proj))
                )
                y = ops.norm_linear(hidden, weights.norm, linears[0], eps=1e-5, role="step")
                z, xbc, dt = y.split([config.d_inner, config.conv_dim, config.mamba_num_heads], -1)
                y = ops.step(
                    xbc, dt, pool.layer_state(layer.index), step.step,
                    conv_weight=weights.conv1d_weight, conv_bias=weights.conv1d_bias, dt_bias=weights.dt_bias,
                    A_log=weights.A_log, D=weights.D,
                )  # fmt: skip
                out = ops.norm_linear_residual(
                    y, z, weights.gated_norm, linears[1], hidden, groups=config.n_groups, eps=1e-5, role="step"
                )
        outs.append(out.double())
    return ((outs[1] - outs[0]).norm() / outs[0].norm()).item() < TOLERANCE


def spread(step: Step, window: int) -> Step:
    """The step with its sequences spread over the places of a window, one in `window` about to fold."""
    assert step.step is not None
    count = len(step.step.slots)
    places = [i % window if count >= window else window // 2 for i in range(count)]
    positions = tuple(2 * window + place for place in places)
    boundaries = tuple(2 * window - (window if place == 0 else 0) for place in places)
    rows = replace(step.step, positions=positions, boundaries=boundaries)
    _ = rows.cursors  # on the device before capture
    return replace(step, step=rows)


def time_layers(layers: list[NemotronMamba2Layer], sequences: int, verify: int, state_dtype: torch.dtype) -> float:
    """Microseconds per layer of one step."""
    config = layers[0].config
    pool = StatePool(config, layers=len(layers), slots=sequences, device="cuda", state_dtype=state_dtype)
    slots = pool.acquire(sequences)
    hidden = torch.randn(sequences * verify, config.hidden_size, device="cuda").bfloat16()
    with pool.step(Batch.verify(slots, [verify] * sequences)) as begun:
        step = spread(begun, pool.layout.window_rows)

        def run() -> torch.Tensor:
            out = hidden
            for layer in layers:
                out = layer(out, step, pool)
            return out

        return microseconds(captured(run), repeats=15) / len(layers)


def step_bytes(layer: NemotronMamba2Layer, sequences: int, state_dtype: torch.dtype) -> float:
    """Bytes that a step must move: weights once, states once, and once more per window."""
    c = layer.config
    state = c.d_inner * c.ssm_state_size * state_dtype.itemsize
    return layer.weights.in_proj.nbytes + layer.weights.out_proj.nbytes + sequences * state * (1 + 1 / 16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="*", default=["nano30b", "super120b"], choices=SHAPES)
    parser.add_argument("--format", nargs="*", default=["bf16", "fp8_tensor", "nvfp4"], choices=FORMATS)
    parser.add_argument("--rows", nargs="*", type=int, default=[1, 4, 16, 64, 256], help="sequences of a step")
    parser.add_argument("--verify", type=int, default=1, help="rows of each sequence")
    parser.add_argument("--state-dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--commit", default="", help="what to record where git is absent")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    state_dtype = getattr(torch, options.state_dtype)
    commit = options.commit or subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], text=True).strip()
    ceiling = ceilings()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, ceilings {ceiling}", flush=True)
    records = []
    for shape in options.shape:
        for format in options.format:
            layers = [random_layer(SHAPES[shape], format, i) for i in range(LAYERS)]
            for sequences in options.rows:
                if not right(layers[0], min(sequences, 64)):
                    print(f"{shape} {format} {sequences}: wrong against the reference, no time is reported", flush=True)
                    continue
                us = time_layers(layers, sequences, options.verify, state_dtype)
                rate = step_bytes(layers[0], sequences, state_dtype) / us / 1e3
                records.append(
                    {
                        "shape": shape, "format": format, "rows": sequences * options.verify, "prefill_tokens": 0,
                        "window_rows": 16, "state_dtype": options.state_dtype, "us_per_layer": round(us, 2),
                        "gbytes_per_s": round(rate, 1), "hbm_share": round(rate / 1e3 / ceiling["copy_tb_s"], 3),
                        "peers": {}, "device": torch.cuda.get_device_name(), "torch": torch.__version__,
                        "triton": "", "commit": commit,
                    }
                )  # fmt: skip
                print(
                    f"{shape:10} {format:11} {sequences:4} × {options.verify}  {us:8.1f} µs {rate:7.0f} GB/s",
                    flush=True,
                )
            del layers
    if options.json:
        options.json.write_text(json.dumps(records, indent=1) + "\n")


if __name__ == "__main__":
    main()
