"""Measures cuts of the one launch of a whole layer against three launches, on this GPU.

    python bench/mixer.py [--shape nano30b …] [--format bf16 …] [--rows 1 4 …] [--cuts 8,8,6,0 …]

A cut is WARPS,RPW,DEPTH,AHEAD (`ops/gpu/mixer.py`). A figure is that of `bench layer`: microseconds a layer in a graph
of layers with their own weights, and counts only if the layer's bits are those of the three launches and agree with the
reference. `mixer.choose` holds the best.
"""

from __future__ import annotations

import argparse
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module

import torch

from nemotron_mamba2.bench import layer as bench
from nemotron_mamba2.bench.records import SHAPES
from nemotron_mamba2.ops.gpu import nvrtc
from nemotron_mamba2.state import StatePool

mixer = import_module("nemotron_mamba2.ops.gpu.mixer")  # the package names the function

CUTS = [(8, 8, 6, 0), (16, 4, 4, 0)]


def fitting(shape: str, format: str, rows: int, cuts: list[tuple[int, ...]]) -> list[mixer.Resident]:
    """Cuts that a shape allows."""
    config, most = SHAPES[shape], 1 << (rows - 1).bit_length()
    found = [mixer.Resident(most, warps, rpw, depth, ahead) for warps, rpw, depth, ahead in cuts]
    limit = mixer.SHARED_BYTES - mixer.STATIC_BYTES
    return [
        cut for cut in found
        if config.mamba_head_dim % (cut.RPW * cut.WARPS) == 0 and cut.shared_bytes(config, format, 16) <= limit
    ]  # fmt: skip


def build(job: tuple[str, str, mixer.Resident]) -> None:
    """Compile a variant into the cache."""
    shape, format, cut = job
    state = StatePool(SHAPES[shape], layers=1, slots=1, device="cpu").layer_state(0)
    nvrtc.compile_cubin(mixer.text(SHAPES[shape]), mixer.defines(cut, SHAPES[shape], format, state, bias=True), "sm_90")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="*", default=["nano30b", "super120b"], choices=SHAPES)
    parser.add_argument("--format", nargs="*", default=["bf16", "fp8_tensor", "nvfp4"])
    parser.add_argument("--rows", nargs="*", type=int, default=[1, 4])
    parser.add_argument("--cuts", nargs="*", type=lambda text: tuple(map(int, text.split(","))), default=CUTS)
    options = parser.parse_args()
    cases = [(s, f, rows) for s in options.shape for f in options.format for rows in options.rows]
    jobs = [(s, f, cut) for s, f, rows in cases for cut in fitting(s, f, rows, options.cuts)]
    with ProcessPoolExecutor() as pool:
        list(pool.map(build, jobs))
    print(f"{len(jobs)} variants compiled", flush=True)
    layers: list[bench.NemotronMamba2Layer] = []
    for at, (shape, format, rows) in enumerate(cases):
        if not at or cases[at - 1][:2] != (shape, format):
            layers.clear()
            torch.cuda.empty_cache()
            layers += [bench.random_layer(SHAPES[shape], format, i) for i in range(bench.LAYERS)]
        case = bench.Case(shape, format, rows)
        found = []
        for cut in (None, *fitting(shape, format, rows, options.cuts)):
            mixer.choose = lambda *_, cut=cut: cut
            error = bench.check(layers[0], case)
            us = bench.time_layers(layers, case)[0] if error < bench.TOLERANCE else float("nan")
            name = "three" if cut is None else f"{cut.WARPS},{cut.RPW},{cut.DEPTH},{cut.AHEAD}"
            found.append(f"{name} {us:.2f}")
        print(f"{shape} {format} {rows}: {' | '.join(found)}", flush=True)


if __name__ == "__main__":
    main()
