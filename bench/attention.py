"""Measures attention of step rows on this GPU: store, stretches and their sum, in a CUDA graph over layers.

    python bench/attention.py [--shape nano] [--sequences 1 64] [--context 1024 8192] [--fp8] [--sweep]

Every layer has its own keys and values, so that none comes from L2. A line is a JSON object: median microseconds per
layer, and the bytes of `attention_cost` over that time. --sweep: also other blocks, warps and stages than those that
ship; a cut counts only if it agrees with the reference, outputs poisoned beforehand.
"""

from __future__ import annotations

import argparse
import json
from importlib import import_module

import torch

from nemotron_mamba2.batch import Batch, Rows, Step
from nemotron_mamba2.bench.timing import captured, microseconds
from nemotron_mamba2.config import AttentionConfig
from nemotron_mamba2.formats import E4M3
from nemotron_mamba2.model import PagePool
from nemotron_mamba2.ops import reference

kernels = import_module("nemotron_mamba2.ops.gpu.attention")  # the package names the function

SHAPES = {"nano": (32, 2, 128), "super": (32, 2, 128), "nano4b": (40, 8, 128), "9b-v2": (40, 8, 128)}
SWEEP = [
    (block, warps, stages)
    for block, warps in ((64, 4), (128, 8), (128, 4), (64, 8), (32, 4), (32, 2))
    for stages in (2, 3, 5)
]
LAYERS = 12


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="nano")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--context", type=int, nargs="+", default=[1024])
    parser.add_argument("--fp8", action="store_true", help="pages of e4m3")
    parser.add_argument("--sweep", action="store_true", help="also other cuts than the one that ships")
    options = parser.parse_args()
    shipped = tuple(kernels.ATTEND.values())
    for cut in (shipped, *(cut for cut in SWEEP if options.sweep and cut != shipped)):
        kernels.ATTEND = dict(zip(kernels.ATTEND, cut, strict=True))
        for sequences in options.sequences:
            for context in options.context:
                try:
                    found = measure(SHAPES[options.shape], sequences, context, E4M3 if options.fp8 else torch.bfloat16)
                except Exception as error:  # a cut that does not fit is no reason to stop
                    found = {"error": repr(error)[:200]}
                print(json.dumps({"cut": cut, "sequences": sequences, "context": context, **found}), flush=True)


def measure(shape: tuple[int, int, int], sequences: int, context: int, dtype: torch.dtype) -> dict[str, float]:
    heads, kv_heads, head_dim = shape
    device = torch.device("cuda")
    config = AttentionConfig(64, heads, kv_heads, head_dim)
    pages = sequences * -(-context // 16)
    pool = PagePool([config] * LAYERS, pages=pages, slots=sequences, dtype=dtype, device=device)
    for tensor in (*pool.keys, *pool.values):
        for part in tensor.split(4096):
            part.copy_(torch.randn(part.shape, device=device))
    slots, ones, at = tuple(range(sequences)), (1,) * sequences, (context - 1,) * sequences
    pool.reserve(slots, [0] * sequences, [context] * sequences)
    rows = Rows(slots, ones, at, (0,) * sequences, 0, device)
    where = pool.table(Step(Batch.decode(slots), None, rows)).pages("step")
    q = torch.randn(sequences, heads, head_dim, device=device).bfloat16()
    k, v = torch.randn(2, sequences, kv_heads, head_dim, device=device).bfloat16()
    outs = [torch.full_like(q, float("nan")) for _ in range(LAYERS)]

    def work() -> None:
        for keys, values, out in zip(pool.keys, pool.values, outs, strict=True):
            kernels.store_kv(k, v, keys, values, where.places)
            kernels.attention(q, keys, values, rows, "step", pages=where, out=out)

    replay = captured(work)
    replay()
    truth = reference.attention(q.float(), pool.keys[0], pool.values[0], rows, "step", pages=where)
    error = float((outs[0].float() - truth).norm() / truth.norm())
    if not error < 6e-3:
        return {"wrong": error}
    time = microseconds(replay) / LAYERS
    moved, _ = kernels.attention_cost(pool.keys[0], context, heads=heads, rows=sequences)
    return {"microseconds": round(time, 2), "tb_s": round(moved / time / 1e6, 3)}


if __name__ == "__main__":
    main()
