"""One Mamba-2 layer on a GPU, prompt rows: the pieces and the whole, microseconds, beside mamba_ssm's Triton kernels.

    python bench/prefill.py [--shape nano30b …] [--tokens 256 1024 …] [--sequences S] [--format bf16 …] [--peers]

Pieces: conv, scan, gated_norm, the three in a row (conv_scan_norm), and whole layers of each format. Each figure is the
median of a CUDA graph that runs the piece four times; it is printed only if the same kernels, in the same run, agree
with the reference. --peers needs `mamba_ssm` on the path (its Triton files suffice); its layer is cuBLAS, chunk scan
and gated norm, without any convolution, which it has only as compiled code.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from layer import SHAPES, random_layer
from timing import captured, ceilings, microseconds
from torch import Tensor

from nemotron_mamba2.batch import Batch, Rows
from nemotron_mamba2.config import Mamba2Config, Policy
from nemotron_mamba2.formats import Fp8Tensor
from nemotron_mamba2.layer import NemotronMamba2Layer
from nemotron_mamba2.ops import LayerState, gpu, reference
from nemotron_mamba2.ops.gpu.conv import conv_cost
from nemotron_mamba2.ops.gpu.scan import scan_cost
from nemotron_mamba2.plan import make_plan
from nemotron_mamba2.state import StatePool
from nemotron_mamba2.weights import Mamba2Weights

CHECKED_TOKENS = 300
TOLERANCE = 1e-2  # bf16 through conv, scan and norm; measured 3e-3
FORMATS = ("bf16", "fp8", "fp8_channel", "fp8_block", "nvfp4", "nvfp4 as fp8")


def time_us(work: Callable[[], object]) -> float:
    return microseconds(captured(lambda: [work() for _ in range(4)])) / 4


def with_input_scales(weights: Mamba2Weights) -> Mamba2Weights:
    """Static activation scales, as checkpoints quantised to FP8 have them: prompt rows run W8A8."""
    scale = torch.tensor(0.02, device="cuda")
    fields = {name: getattr(weights, name) for name in ("in_proj", "out_proj")}
    return replace(weights, **{n: replace(w, input_scale=scale) for n, w in fields.items() if isinstance(w, Fp8Tensor)})


def make_layer(config: Mamba2Config, format: str) -> NemotronMamba2Layer:
    name = {"fp8": "fp8_tensor", "nvfp4 as fp8": "nvfp4"}.get(format, format)
    weights = with_input_scales(random_layer(config, name, 0).weights)
    policy = Policy(prompt="fp8" if format == "nvfp4 as fp8" else "checkpoint")
    return NemotronMamba2Layer(config, weights, make_plan(config, weights, policy, device="cuda"))


def begun(config: Mamba2Config, tokens: int, sequences: int) -> tuple[StatePool, Any]:
    """A pool, and a step of fresh prompts whose cursors lie on the device."""
    pool = StatePool(config, layers=1, slots=sequences, device="cuda")
    with pool.step(Batch.prefill(pool.acquire(sequences), [tokens] * sequences)) as step:
        assert step.prompt is not None
        for piece in step.prompt.pieces:
            _ = piece.cursors
    return pool, step


def pieces(
    ops: Any, weights: Mamba2Weights, config: Mamba2Config, state: LayerState, rows: Rows, projected: Tensor
) -> dict[str, Callable[[], Any]]:
    """conv, scan and gated_norm as calls, each on what the one before it returns."""
    z, xbc, dt = projected.split([config.d_inner, config.conv_dim, config.mamba_num_heads], -1)
    taps = {"weight": weights.conv1d_weight, "bias": weights.conv1d_bias, "dt_bias": weights.dt_bias}
    wide = ops.conv(xbc, dt, state, rows, **taps)
    y = ops.scan(*wide, state, rows, A_log=weights.A_log, D=weights.D)
    norm = {"eps": config.layer_norm_epsilon, "groups": config.n_groups, "gate": z}
    return {
        "conv": lambda: ops.conv(xbc, dt, state, rows, out=wide, **taps),
        "scan": lambda: ops.scan(*wide, state, rows, A_log=weights.A_log, D=weights.D, out=y),
        "gated_norm": lambda: ops.rms_norm(y, weights.gated_norm, **norm),
    }


def right(layer: NemotronMamba2Layer) -> bool:
    """Whether conv, scan and gated norm agree with the reference over ragged prompts in two steps."""
    config, found = layer.config, []
    for ops in (reference, gpu):
        torch.manual_seed(0)
        pool, results = StatePool(config, layers=1, slots=3, device="cuda"), []
        slots = pool.acquire(3)
        for _ in range(2):
            with pool.step(Batch.prefill(slots, [CHECKED_TOKENS, 1, 77])) as step:
                assert step.prompt is not None
                rows = step.prompt
                projected = torch.randn(rows.total_rows, config.in_proj_rows, device="cuda").bfloat16()
                results.append(pieces(ops, layer.weights, config, pool.layer_state(0), rows, projected)["gated_norm"]())
        found.append(torch.cat(results).double())
    return ((found[1] - found[0]).norm() / found[0].norm()).item() < TOLERANCE


def peer_pieces(
    weights: Mamba2Weights, config: Mamba2Config, tokens: int, sequences: int
) -> dict[str, Callable[[], Any]]:
    """mamba_ssm's chunk scan and gated norm, and a bf16 layer of them without a convolution; {} without the package."""
    try:
        from mamba_ssm.ops.triton.layernorm_gated import rmsnorm_fn
        from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined
    except ImportError:
        return {}
    H, P, G, N = config.mamba_num_heads, config.mamba_head_dim, config.n_groups, config.ssm_state_size
    hidden = torch.randn(sequences * tokens, config.hidden_size, device="cuda").bfloat16()
    projected = torch.randn(sequences * tokens, config.in_proj_rows, device="cuda").bfloat16()
    A, gain = -weights.A_log.exp(), weights.gated_norm.bfloat16()

    def scan(projected: Tensor) -> Tensor:
        _, xbc, dt = projected.split([config.d_inner, config.conv_dim, H], -1)
        x, B, C = xbc.view(sequences, tokens, -1).split([H * P, G * N, G * N], -1)
        x, B, C = x.unflatten(-1, (H, P)), B.unflatten(-1, (G, N)), C.unflatten(-1, (G, N))
        return mamba_chunk_scan_combined(
            x, dt.view(sequences, tokens, H), A, B, C, 256, D=weights.D, dt_bias=weights.dt_bias, dt_softplus=True
        )

    def norm(y: Tensor, z: Tensor) -> Tensor:
        size = config.d_inner // G
        return rmsnorm_fn(y, gain, None, z=z, eps=config.layer_norm_epsilon, group_size=size, norm_before_gate=False)

    def layer() -> Tensor:
        normed = torch.nn.functional.rms_norm(hidden, (config.hidden_size,), weights.norm.bfloat16())
        projected = normed @ weights.in_proj.weight.T
        y = norm(scan(projected).view(-1, config.d_inner), projected[:, : config.d_inner])
        return torch.addmm(hidden, y, weights.out_proj.weight.T)

    y, z = scan(projected).view(-1, config.d_inner), projected[:, : config.d_inner]
    return {"scan": lambda: scan(projected), "gated_norm": lambda: norm(y, z), "layer": layer}


def measure(
    shape: str, tokens: int, sequences: int, formats: list[str], peers: bool
) -> Iterator[tuple[str, str, float, float, dict[str, float]]]:
    """(piece, format, µs, bytes, peers' µs) of every piece and of the layer in every format."""
    config, rows = SHAPES[shape], tokens * sequences
    layer = make_layer(config, "bf16")
    if not right(layer):
        print(f"{shape}: wrong against the reference, no time is reported", flush=True)
        return
    pool, step = begun(config, tokens, sequences)
    state, prompt = pool.layer_state(0), step.prompt
    projected = torch.randn(rows, config.in_proj_rows, device="cuda").bfloat16()
    ours = pieces(gpu, layer.weights, config, state, prompt, projected)
    theirs = peer_pieces(layer.weights, config, tokens, sequences) if peers else {}
    traffic = {
        "conv": conv_cost(state, rows)[0],
        "scan": scan_cost(state, sequences, rows)[0],
        "gated_norm": rows * 6 * config.d_inner,
    }
    parts = list(ours.values())
    ours["conv_scan_norm"] = lambda: [part() for part in parts]
    traffic["conv_scan_norm"] = sum(traffic.values())
    for piece, work in ours.items():
        peer = {"mamba_ssm": time_us(theirs[piece])} if piece in theirs else {}
        yield piece, "bf16", time_us(work), traffic[piece], peer
    hidden = torch.randn(rows, config.hidden_size, device="cuda").bfloat16()
    for format in formats:
        layer = make_layer(config, format)
        peer = {"mamba_ssm, no conv": time_us(theirs["layer"])} if theirs and format == "bf16" else {}
        weights = layer.weights.in_proj.nbytes + layer.weights.out_proj.nbytes
        moved = weights + traffic["conv_scan_norm"] + rows * 2 * (3 * config.hidden_size + config.in_proj_rows)
        yield "layer", format, time_us(lambda layer=layer: layer(hidden, step, pool)), moved, peer
        del layer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="*", default=["nano30b", "super120b"], choices=SHAPES)
    parser.add_argument("--tokens", nargs="*", type=int, default=[256, 1024, 4096, 8192, 32768])
    parser.add_argument("--sequences", type=int, default=1)
    parser.add_argument("--format", nargs="*", default=["bf16", "fp8", "nvfp4", "nvfp4 as fp8"], choices=FORMATS)
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--commit", default="", help="what to record where git is absent")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    commit = options.commit or subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], text=True).strip()
    ceiling = ceilings()
    device = torch.cuda.get_device_name()
    print(f"{device}, torch {torch.__version__}, ceilings {ceiling}", flush=True)
    records = []
    for shape in options.shape:
        for tokens in options.tokens:
            for piece, format, us, moved, peers in measure(
                shape, tokens, options.sequences, options.format, options.peers
            ):
                rate = moved / us / 1e3
                records.append(
                    {
                        "shape": shape, "format": format, "rows": 0, "prefill_tokens": tokens,
                        "sequences": options.sequences, "piece": piece, "window_rows": 16, "state_dtype": "float32",
                        "us_per_layer": round(us, 2), "gbytes_per_s": round(rate, 1),
                        "hbm_share": round(rate / 1e3 / ceiling["copy_tb_s"], 3),
                        "peers": {name: round(value, 2) for name, value in peers.items()},
                        "device": device, "torch": torch.__version__, "triton": "", "commit": commit,
                    }
                )  # fmt: skip
                found = " ".join(f"{name} {value:.1f}" for name, value in peers.items())
                print(
                    f"{shape:10} {tokens:6} {piece:15} {format:13} {us:8.1f} µs {rate:6.0f} GB/s  {found}", flush=True
                )
            if options.json:
                options.json.write_text(json.dumps(records, indent=1) + "\n")


if __name__ == "__main__":
    main()
