"""First light of the GPU step kernels: checks against float64, same bits over row counts, and times of many tilings."""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
import traceback
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "src"))
import importlib

import torch
from timing import captured, ceilings, microseconds

from nemotron_mamba2.batch import Batch
from nemotron_mamba2.config import Mamba2Config
from nemotron_mamba2.formats import Plain, dequantize
from nemotron_mamba2.ops import Linear, reference
from nemotron_mamba2.ops.gpu import nvrtc
from nemotron_mamba2.state import StatePool

gl = importlib.import_module("nemotron_mamba2.ops.gpu.linear")
gs = importlib.import_module("nemotron_mamba2.ops.gpu.step")  # noqa: E402
SHAPES = {
    "nano": Mamba2Config(2688, 64, 64, 8, 128),
    "super": Mamba2Config(4096, 128, 64, 8, 128),
}
ODD = {"nano4b": Mamba2Config(3136, 96, 80, 8, 128), "9b": Mamba2Config(4480, 128, 80, 8, 128), "ultra": Mamba2Config(8192, 256, 64, 8, 128), "s256": Mamba2Config(1024, 32, 64, 8, 256), "s96": Mamba2Config(1024, 16, 64, 2, 96)}
OUT = {}
T0 = time.time()


def rel(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def make(fmt, N, K, seed=0):
    torch.manual_seed(seed)
    w = torch.randn(N, K, device="cuda") * 0.02
    q = Plain(w.bfloat16()) if fmt == "bf16" else reference.quantize(w, fmt)
    return Linear(q, packed=gl.pack(q) if fmt == "nvfp4" else None)


ROWS_CHECKED = (1, 2, 4, 5, 8, 9, 17, 64, 255, 300)


def checked():
    for (name, c), fmt in itertools.product({**SHAPES, **ODD}.items(), ("bf16", "fp8_tensor", "fp8_channel", "fp8_block", "nvfp4")):
        if name in SHAPES or fmt in ("bf16", "nvfp4", "fp8_block"):
            yield name, c, fmt


def candidates(M, fmt="bf16"):
    if M <= 8:
        return [gl.Tiles(1, 1, 1, D) for D in (2, 4)] + [gl.Tiles(2, 1, 1, 3)]
    if M <= 16:
        return [gl.Tiles(1, 1, 2, 4), gl.Tiles(1, 2, 2, 2), gl.Tiles(2, 1, 1, 2, 2)]
    many = [(4, 1, 4, 2, 2), (2, 1, 2, 2, 4), (4, 1, 2, 2, 4), (2, 1, 4, 2, 2), (4, 1, 8, 2, 1), (4, 2, 4, 2, 2), (2, 2, 4, 2, 2), (2, 2, 4, 2, 4)]
    if M > 64:
        many += [(4, 2, 8, 2, 2), (4, 1, 8, 2, 2), (2, 2, 8, 2, 2)]
    return [gl.Tiles(*m) for m in many]


def fits(S, t):
    return gl.shared_bytes(S, t, normed_bytes=0) <= gl.SHARED_LIMIT_BYTES


TIMED = (1, 4, 16, 64, 256)


def compile_one(job):
    try:
        nvrtc.compile_cubin(gl.step_source(job)[0], job, "sm_90")
    except Exception as e:
        return repr(e)[:300]


def precompile(which):
    jobs = set()
    if "check_linear" in which:
        for name, c, fmt in checked():
            for norm, res, N, K in ((1, 0, c.in_proj_rows, c.hidden_size), (2, 1, c.hidden_size, c.d_inner)):
                S = gl.slices(N, K)
                for M in ROWS_CHECKED:
                    n = norm if M <= gl.FUSED_ROWS else 0
                    jobs.add(tuple(gl.step_defines(fmt, K, S, gl.tiles(fmt, N, M), n, groups=c.n_groups if n == 2 else 1, residual=bool(res))))
                    jobs.add(tuple(gl.step_defines(fmt, K, S, gl.tiles(fmt, N, M), 0, groups=1, residual=bool(res))))
    if "time_linear" in which:
        for (name, c), fmt in itertools.product(SHAPES.items(), ("bf16", "fp8_tensor", "nvfp4")):
            for norm, res, K in ((1, 0, c.hidden_size), (2, 1, c.d_inner)):
                for M in TIMED:
                    for S, t in itertools.product((4, 8), candidates(M)):
                        if fits(S, t):
                            for n in {0, norm if M <= gl.FUSED_ROWS else 0}:
                                jobs.add(tuple(gl.step_defines(fmt, K, S, t, n, groups=c.n_groups if n == 2 else 1, residual=bool(res))))
    with ProcessPoolExecutor(16) as pool:
        errors = [e for e in pool.map(compile_one, sorted(jobs), chunksize=4) if e]
    print(len(jobs), "variants compiled", round(time.time() - T0), errors[:3], flush=True)


def check_linear():
    for name, c, fmt in checked():
        for proj, (N, K) in {"in": (c.in_proj_rows, c.hidden_size), "out": (c.hidden_size, c.d_inner)}.items():
            lin = make(fmt, N, K)
            W = dequantize(lin.weight, torch.float32).double()
            x = torch.randn(300, K, device="cuda").bfloat16()
            z = torch.randn(300, K + 64, device="cuda").bfloat16()[:, 8 : K + 8]
            nw = torch.rand(K, device="cuda") + 0.5
            res = torch.randn(300, N, device="cuda").bfloat16()
            xn = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-5) * nw.double()
            g = x.double() * (z.double() * torch.sigmoid(z.double()))
            gn = g.view(300, c.n_groups, -1)
            gn = (gn * torch.rsqrt(gn.square().mean(-1, keepdim=True) + 1e-5)).flatten(1) * nw.double()
            ref0, ref1 = xn.bfloat16().double() @ W.T, gn.bfloat16().double() @ W.T + res.double()
            first, worst, same = None, 0.0, True
            for M in ROWS_CHECKED:
                y = torch.full((M, N), float("nan"), device="cuda", dtype=torch.bfloat16)
                y2 = y.clone()
                gl.norm_linear(x[:M], nw, lin, eps=1e-5, role="step", out=y)
                gl.norm_linear_residual(x[:M], z[:M], nw, lin, res[:M], groups=c.n_groups, eps=1e-5, role="step", out=y2)
                worst = max(worst, rel(y, ref0[:M]), rel(y2, ref1[:M]))
                if first is None:
                    first = (y[0].clone(), y2[0].clone())
                same &= torch.equal(y[0], first[0]) and torch.equal(y2[0], first[1])
            flag = "" if worst < 4e-3 and same else "   <<<<<<"
            print(f"{name} {proj} {fmt} err {worst:.2e} same bits {same}{flag}", flush=True)
            OUT[f"check {name} {proj} {fmt}"] = (worst, same)


def time_linear(L=23):
    for (name, c), fmt in itertools.product(SHAPES.items(), ("bf16", "fp8_tensor", "nvfp4")):
        for proj, (N, K) in {"in": (c.in_proj_rows, c.hidden_size), "out": (c.hidden_size, c.d_inner)}.items():
            lins = [make(fmt, N, K, i) for i in range(L)]
            nbytes = lins[0].weight.nbytes
            nw = torch.ones(K, device="cuda")
            for M in TIMED:
                x = torch.randn(M, K, device="cuda").bfloat16()
                res = torch.randn(M, N, device="cuda").bfloat16()
                z = torch.randn(M, K, device="cuda").bfloat16()
                best = {}
                for S in (4, 8):
                    for t, fused in itertools.product(candidates(M), (1, 0) if M <= 1 else (0,)):
                        if not fits(S, t):
                            continue
                        try:
                            gl.FUSED_ROWS = fused
                            gl.tiles = lambda f, n, m, t=t: t
                            gl.slices = lambda n, k, S=S: S
                            if proj == "in":
                                run = lambda: [gl.norm_linear(x, nw, l, eps=1e-5, role="step") for l in lins]
                            else:
                                run = lambda: [gl.norm_linear_residual(x, z, nw, l, res, groups=c.n_groups, eps=1e-5, role="step") for l in lins]
                            best[(S, t.WM, t.MT, t.NT, t.DEPTH, t.WN, fused)] = microseconds(captured(run), repeats=7) / L
                        except Exception as e:
                            best[(S, t.WM, t.MT, t.NT, t.DEPTH, t.WN, fused)] = 1e9
                            print("fail", S, t, repr(e)[:150])
                rank = sorted(best, key=best.get)
                OUT[f"time {name} {proj} {fmt} {M}"] = {str(k): round(best[k], 2) for k in rank}
                CHOICE[(name, proj, fmt, M)] = best
                print(f"{name} {proj:3s} {fmt:10s} M={M:3d} " + "  ".join(f"{k}:{best[k]:.1f}" for k in rank[:4]) + f"  {nbytes / best[rank[0]] / 1e6:.2f} TB/s", flush=True)
            del lins


CHOICE = {}


def time_layer(L=23):
    from nemotron_mamba2.config import Policy
    from nemotron_mamba2.layer import NemotronMamba2Layer
    from nemotron_mamba2.plan import make_plan
    from nemotron_mamba2.weights import Mamba2Weights

    for (name, c), fmt in itertools.product(SHAPES.items(), ("bf16", "fp8_tensor", "nvfp4")):
        shape = {(c.in_proj_rows, c.hidden_size): "in", (c.hidden_size, c.d_inner): "out"}
        slices = {}
        for key, proj in shape.items():
            score = {S: sum(min(v for k, v in CHOICE[(name, proj, fmt, M)].items() if k[0] == S) / min(CHOICE[(name, proj, fmt, M)].values()) for M in TIMED) for S in (4, 8)}
            slices[key] = min(score, key=score.get)
        gl.slices = lambda n, k: slices[(n, k)]
        layers = []
        for i in range(L):
            pr = params(c)
            w = Mamba2Weights(norm=torch.ones(c.hidden_size, device="cuda"), in_proj=make(fmt, c.in_proj_rows, c.hidden_size, i).weight, out_proj=make(fmt, c.hidden_size, c.d_inner, i).weight, conv1d_weight=pr["conv_weight"], conv1d_bias=pr["conv_bias"], dt_bias=pr["dt_bias"], A_log=pr["A_log"], D=pr["D"], gated_norm=torch.ones(c.d_inner, device="cuda"))
            layers.append(NemotronMamba2Layer(c, w, make_plan(c, w, Policy(), device="cuda"), index=i))
        for S in TIMED:
            chosen = {}
            for key, proj in shape.items():
                best = {k: v for k, v in CHOICE[(name, proj, fmt, S)].items() if k[0] == slices[key]}
                chosen[key[0]] = gl.Tiles(*min(best, key=best.get)[1:6])
            gl.tiles = lambda f, n, m: chosen[n]
            res = {}
            for fused, steps in itertools.product((1, 0) if S <= 1 else (0,), ((8, 8), (16, 4))):
                gl.FUSED_ROWS = fused
                gs.tiles = lambda p, n, s, steps=steps: steps
                p = StatePool(c, layers=L, slots=S, device="cuda")
                for t in p._tensors.values():
                    t.normal_()
                slots = p.acquire(S)
                hidden = torch.randn(S, c.hidden_size, device="cuda").bfloat16()
                with p.step(Batch.decode(slots)) as st:
                    spread = S >= 16
                    object.__setattr__(st.step, "positions", tuple(32 + (i % 16) if spread else 24 for i in range(S)))
                    object.__setattr__(st.step, "boundaries", tuple((16 if i % 16 == 0 else 32) if spread else 16 for i in range(S)))
                    st.step.cursors

                    def run():
                        h = hidden
                        for layer in layers:
                            h = layer(h, st, p)

                    res[(fused, steps)] = round(microseconds(captured(run), repeats=9) / L, 2)
                del p
            OUT[f"layer {name} {fmt} {S}"] = {str(k): v for k, v in res.items()}
            print(f"LAYER {name} {fmt} S={S} slices {list(slices.values())} {res}", flush=True)
        del layers


def params(c):
    r = lambda *s: torch.randn(*s, device="cuda")
    H = c.mamba_num_heads
    return dict(conv_weight=r(c.conv_dim, 4) * 0.4, conv_bias=r(c.conv_dim) * 0.1, dt_bias=r(H) - 2, A_log=torch.rand(H, device="cuda").mul(15).add(1).log(), D=r(H))


def check_step():
    for (name, c), sd in itertools.product({**SHAPES, **ODD}.items(), (torch.float32, torch.bfloat16, torch.float16)):
        pr = params(c)
        outs = {}
        for which, fn in (("ref", reference.step), ("gpu", gs.step)):
            torch.manual_seed(1)
            p = StatePool(c, layers=1, slots=6, device="cuda", state_dtype=sd)
            for t in p._tensors.values():
                t[:, :6].fill_(float("nan"))
            slots = p.acquire(4)
            o = []
            for it in range(10):
                rows = [3, 1, 8, 5]
                T = sum(rows)
                big = torch.randn(T, c.in_proj_rows, device="cuda").bfloat16()
                xbc, dt = big[:, c.d_inner : c.d_inner + c.conv_dim], big[:, -c.mamba_num_heads :]
                with p.step(Batch.verify(slots, rows)) as st:
                    o.append(fn(xbc, dt, p.layer_state(0), st.step, **pr))
                p.commit(slots, [3, 0 if it % 2 else 1, 7, 2])
            outs[which] = (torch.cat(o), p._tensors["ssm"][0, slots].float())
        e, s = rel(outs["gpu"][0], outs["ref"][0]), rel(outs["gpu"][1], outs["ref"][1])
        print(f"step {name} {sd} y {e:.2e} state {s:.2e}" + ("" if e < 5e-3 and s < 5e-3 else "  <<<<<<"), flush=True)
        OUT[f"check step {name} {sd}"] = (e, s)


def time_step(L=23):
    for (name, c), sd in itertools.product(SHAPES.items(), (torch.float32, torch.bfloat16)):
        pr = params(c)
        for S in (1, 4, 16, 64, 256):
            if name == "super" and S == 256 and sd == torch.float32 and False:
                continue
            p = StatePool(c, layers=L, slots=S, device="cuda", state_dtype=sd)
            for t in p._tensors.values():
                t.normal_()
            slots = p.acquire(S)
            big = torch.randn(S, c.in_proj_rows, device="cuda").bfloat16()
            xbc, dt = big[:, c.d_inner : c.d_inner + c.conv_dim], big[:, -c.mamba_num_heads :]
            states = [p.layer_state(i) for i in range(L)]
            res = {}
            for cfg in ((16, 4), (8, 4), (8, 8)):
                gs.tiles = lambda p, n, s, cfg=cfg: cfg
                try:
                    def timed(positions, boundaries):
                        with p.step(Batch.decode(slots)) as st:
                            object.__setattr__(st.step, "positions", tuple(positions))
                            object.__setattr__(st.step, "boundaries", tuple(boundaries))
                            st.step.cursors
                            us = microseconds(captured(lambda: [gs.step(xbc, dt, s, st.step, **pr) for s in states]), repeats=7) / L
                        return us
                    half = timed([24] * S, [16] * S)
                    mixed = timed([16 + 16 + (i % 16) for i in range(S)], [16 if i % 16 == 0 else 32 for i in range(S)]) if S >= 16 else (half * 15 + timed([32] * S, [16] * S)) / 16
                    res[cfg] = (round(mixed, 2), round(half, 2))
                except Exception as e:
                    print("fail", cfg, repr(e)[:200])
            rank = sorted(res, key=res.get)
            OUT[f"time step {name} {sd} {S}"] = {str(k): res[k] for k in rank}
            print(f"step {name} {sd} S={S}: " + "  ".join(f"{k}:{res[k]}" for k in rank), flush=True)
            del p, states


if __name__ == "__main__":
    precompile(sys.argv[1:])
    OUT["ceilings"] = ceilings()
    print(OUT["ceilings"], torch.__version__, flush=True)
    for f in [globals()[a] for a in sys.argv[1:]]:
        try:
            f()
        except Exception:
            traceback.print_exc()
        print(f.__name__, "done at", round(time.time() - T0), flush=True)
        Path(os.environ.get("OUT", "."), "probe_step.json").write_text(json.dumps(OUT, indent=1))
