"""Convolution and recurrence of generated and drafted rows, all slots in one launch (Triton).

One program holds BP rows of one head's state of one sequence, its window of the rings, and runs the new rows in order:

    conv → x, B, C, dt → window row i = t − boundary → y = exp(c_t)·state·C + Σ_s exp(c_t − c_s)·dt_s·(C·B_s)·x_s + D·x

At the start one full window of *committed* rows is folded into the state and written: the only write of the state, once
per window. Where new rows cross into the next window the fold happens in registers. Folds run in fp32. The ring lengths
of `state.StateLayout` guarantee that no program writes a ring row that another program of the launch reads, so B and C
of a new row are convolved by every program of their group, and stored by one.

The same loop body runs for any number of rows and sequences, so a row's bits depend on its own sequence alone.
Bytes: state once (twice when it folds), live window rows, new rows. Source of the form: arXiv 2405.21060, `state.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda as tlx

from ...batch import Rows
from ...errors import ShapeError
from .. import LayerState

# Rows of a head's state per program, and warps. Written by measurement on H200; part of a result's bits.
TUNING: dict[str, tuple[int, int]] = {"default": (16, 4)}


@triton.jit
def _mix(h):
    h = (h ^ (h >> 16)) * 0x85EBCA6B + 0x9E3779B9
    h = (h ^ (h >> 16)) * 0xC2B2AE35 + 0x9E3779B9
    return h ^ (h >> 16)


@triton.jit
def _round_state(S, key, position, offset, KIND: tl.constexpr):
    """S as its stored dtype would hold it, still in fp32. KIND 0 fp32, 1 bf16, 2 fp16 with stochastic rounding."""
    if KIND == 1:
        S = S.to(tl.bfloat16).to(tl.float32)
    if KIND == 2:
        h = offset.to(tl.uint32) ^ _mix(key ^ position.to(tl.uint32))
        h = (h ^ (h >> 16)) * 0x85EBCA6B
        h = (h ^ (h >> 16)) * 0xC2B2AE35
        draw = (h ^ (h >> 16)) & 0x1FFF
        bits = S.to(tl.uint32, bitcast=True) + draw
        kept = (bits & 0xFFFFE000).to(tl.float32, bitcast=True)
        spacing = 5.9604644775390625e-08
        small = tl.floor(S / spacing + draw.to(tl.float32) / 8192.0) * spacing
        S = tl.where(tl.abs(S) < 6.103515625e-05, small, kept)
        S = tl.minimum(tl.maximum(S, -65504.0), 65504.0)
    return S


@triton.jit
def _fold(S, X, B, dt, A):
    """The state one whole window later: fp32 [BP, N] from X [W, BP], B [W, N], dt [W]."""
    c = tl.cumsum(dt * A, 0)
    total = tl.sum(dt * A, 0)
    weighted = X * (tl.exp(tl.minimum(total - c, 0.0)) * dt)[:, None]
    return S * tl.exp(total) + tl.dot(tl.trans(weighted), B, input_precision="ieee")


@triton.jit
def _conv_row(
    xbc, first, ring, weight, bias, channel, mask, position, j,
    KW: tl.constexpr, KR: tl.constexpr, HAS_BIAS: tl.constexpr, ld_xbc, CONV: tl.constexpr,
):  # fmt: skip
    """silu(conv + bias) of new row j at some channels, rounded to the activation dtype, as fp32; oldest tap first."""
    acc = tl.zeros(channel.shape, tl.float32)
    for k in tl.static_range(KW):
        back = j - (KW - 1) + k  # new row of this tap, negative: a row of the conv ring
        place = (position + back + KR * 4) % KR
        new = tl.load(xbc + (first + back) * ld_xbc + channel, mask=mask & (back >= 0), other=0.0)
        old = tl.load(ring + place * CONV + channel, mask=mask & (back < 0), other=0.0)
        acc += (new.to(tl.float32) + old.to(tl.float32)) * tl.load(weight + channel * KW + k, mask=mask, other=0.0)
    if HAS_BIAS:
        acc += tl.load(bias + channel, mask=mask, other=0.0)
    return (acc / (1.0 + tl.exp(-acc))).to(xbc.dtype.element_ty).to(tl.float32)


@triton.jit
def _step_kernel(
    y, ssm, ring_x, ring_B, ring_dt, ring_conv,
    xbc, dt_raw, slots, positions, boundaries, cu_rows, conv_weight, conv_bias, dt_bias, A_log, D,
    ld_y, ld_xbc, ld_dt, pad_slot, key, low, high,
    H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, W: tl.constexpr,
    R: tl.constexpr, KW: tl.constexpr, KR: tl.constexpr, BP: tl.constexpr, KIND: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_LIMIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    CONV: tl.constexpr = H * P + 2 * G * N
    block = tl.program_id(0)
    h = tl.program_id(1)
    s = tl.program_id(2)
    g = h // (H // G)
    p = block * BP + tl.arange(0, BP)
    n = tl.arange(0, NP)
    w = tl.arange(0, W)
    pm = p < P
    nm = n < N
    slot = tl.load(slots + s)
    position = tl.load(positions + s)
    boundary = tl.load(boundaries + s)
    first = tl.load(cu_rows + s)
    rows = tl.load(cu_rows + s + 1) - first
    stores_group = (h % (H // G) == 0) & (block == 0)

    if (slot == pad_slot) | (rows == 0):
        if PDL:
            tlx.gdc_wait()
            tlx.gdc_launch_dependents()
        j = rows * 0
        while j < rows:
            tl.store(y + (first + j) * ld_y + h * P + p, tl.zeros([BP], y.dtype.element_ty), mask=pm)
            j += 1
    else:
        A = -tl.exp(tl.load(A_log + h))
        bias = tl.load(dt_bias + h)
        skip = tl.load(D + h)
        ring_x += slot * R * H * P + h * P
        ring_B += slot * R * G * N + g * N
        ring_dt += slot * R * H + h
        ring_conv += slot * KR * CONV
        offset = (h * P + p[:, None]) * N + n[None, :]
        state = ssm + slot * H * P * N + offset
        tile = pm[:, None] & nm[None, :]
        S = tl.load(state, mask=tile, other=0.0).to(tl.float32)
        if position - boundary >= W:
            place = (boundary + w) % R
            X = tl.load(ring_x + place[:, None] * (H * P) + p[None, :], mask=pm[None, :], other=0.0).to(tl.float32)
            B = tl.load(ring_B + place[:, None] * (G * N) + n[None, :], mask=nm[None, :], other=0.0).to(tl.float32)
            S = _fold(S, X, B, tl.load(ring_dt + place * H), A)
            boundary += W
            S = _round_state(S, key, boundary, offset, KIND)
            tl.store(state, S.to(ssm.dtype.element_ty), mask=tile)
        live = w < position - boundary
        place = (boundary + w) % R
        X = tl.load(ring_x + place[:, None] * (H * P) + p[None, :], mask=live[:, None] & pm[None, :], other=0.0).to(tl.float32)
        B = tl.load(ring_B + place[:, None] * (G * N) + n[None, :], mask=live[:, None] & nm[None, :], other=0.0).to(tl.float32)
        dt = tl.load(ring_dt + place * H, mask=live, other=0.0)
        if PDL:
            tlx.gdc_wait()
            tlx.gdc_launch_dependents()
        j = rows * 0
        while j < rows:
            t = position + j
            if t - boundary == W:
                boundary += W
                S = _round_state(_fold(S, X, B, dt, A), key, boundary, offset, KIND)
                X = tl.zeros([W, BP], tl.float32)
                B = tl.zeros([W, NP], tl.float32)
                dt = tl.zeros([W], tl.float32)
            i = (t - boundary).to(tl.int32)
            row = first + j
            xj = _conv_row(xbc, first, ring_conv, conv_weight, conv_bias, h * P + p, pm, position, j, KW, KR, HAS_BIAS, ld_xbc, CONV)
            Bj = _conv_row(xbc, first, ring_conv, conv_weight, conv_bias, H * P + g * N + n, nm, position, j, KW, KR, HAS_BIAS, ld_xbc, CONV)
            Cj = _conv_row(xbc, first, ring_conv, conv_weight, conv_bias, H * P + (G + g) * N + n, nm, position, j, KW, KR, HAS_BIAS, ld_xbc, CONV)
            raw = tl.load(dt_raw + row * ld_dt + h).to(tl.float32) + bias
            # log1p(e) for e in (0, 1]: exact form u + (e - (u - 1)) correction
            e = tl.exp(-tl.abs(raw))
            u = 1.0 + e
            dtj = tl.maximum(raw, 0.0) + tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0)))
            if HAS_LIMIT:
                dtj = tl.minimum(tl.maximum(dtj, low), high)
            X = tl.where((w == i)[:, None], xj[None, :], X)
            B = tl.where((w == i)[:, None], Bj[None, :], B)
            dt = tl.where(w == i, dtj, dt)
            c = tl.cumsum(dt * A, 0)
            c_t = tl.sum(tl.where(w == i, c, 0.0), 0)
            weights = tl.sum(B * Cj[None, :], 1) * tl.where(w <= i, tl.exp(tl.minimum(c_t - c, 0.0)) * dt, 0.0)
            out = tl.sum(S * Cj[None, :], 1) * tl.exp(c_t) + tl.sum(X * weights[:, None], 0) + skip * xj
            tl.store(y + row * ld_y + h * P + p, out.to(y.dtype.element_ty), mask=pm)
            place_t = t % R
            tl.store(ring_x + place_t * (H * P) + p, xj.to(ring_x.dtype.element_ty), mask=pm)
            own = h * P + p
            conv_place = ring_conv + (t % KR) * CONV
            tl.store(conv_place + own, tl.load(xbc + row * ld_xbc + own, mask=pm, other=0.0), mask=pm)
            if block == 0:
                tl.store(ring_dt + place_t * H, dtj)
            if stores_group:
                tl.store(ring_B + place_t * (G * N) + n, Bj.to(ring_B.dtype.element_ty), mask=nm)
                group_B = H * P + g * N + n
                group_C = H * P + (G + g) * N + n
                tl.store(conv_place + group_B, tl.load(xbc + row * ld_xbc + group_B, mask=nm, other=0.0), mask=nm)
                tl.store(conv_place + group_C, tl.load(xbc + row * ld_xbc + group_C, mask=nm, other=0.0), mask=nm)
            j += 1


def step(
    xbc: Tensor,
    dt: Tensor,
    state: LayerState,
    rows: Rows,
    *,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    dt_bias: Tensor,
    A_log: Tensor,
    D: Tensor,
    time_step_limit: tuple[float, float] | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """As `ops.reference.step`. Needs window_rows of 16, 32 or 64 and draft rows ≤ window_rows. Raises: ShapeError."""
    _, H, P, N = state.ssm.shape
    R, KR, G, W = state.ring_dt.shape[1], state.ring_conv.shape[1], state.ring_B.shape[2], state.window_rows
    if W < 16 or R > 3 * W - 1:
        raise ShapeError(f"step: the kernel needs window_rows ≥ 16 and draft_rows ≤ window_rows, found {W} and {(R - W + 1) // 2}")
    if out is None:
        out = torch.empty(rows.total_rows, H * P, dtype=xbc.dtype, device=xbc.device)
    if not rows.slots:
        return out
    BP, warps = TUNING["default"]
    cursors = rows.cursors
    low, high = time_step_limit or (0.0, 0.0)
    programmatic = xbc.is_cuda and torch.cuda.get_device_capability(xbc.device)[0] >= 9
    _step_kernel[(triton.cdiv(P, BP), H, len(rows.slots))](
        out, state.ssm, state.ring_x, state.ring_B, state.ring_dt, state.ring_conv,
        xbc, dt, *cursors, conv_weight, conv_bias, dt_bias, A_log, D,
        out.stride(0), xbc.stride(0), dt.stride(0), state.pad_slot, _host_key(state.seed, state.layer), low, high,
        H=H, G=G, P=P, N=N, NP=triton.next_power_of_2(N), W=W, R=R, KW=conv_weight.shape[1], KR=KR, BP=BP,
        KIND={torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}[state.ssm.dtype],
        HAS_BIAS=conv_bias is not None, HAS_LIMIT=time_step_limit is not None, PDL=programmatic,
        num_warps=warps, **({"launch_pdl": True} if programmatic else {}),
    )  # fmt: skip
    return out


def step_cost(state: LayerState, sequences: int, rows: int) -> tuple[int, int]:
    """(bytes, flops) of a step, averaged over a window: the state read once and written once per window."""
    _, H, P, N = state.ssm.shape
    W, element = state.window_rows, state.ssm.element_size()
    live = W // 2 * (state.ring_x[0, 0].nbytes + state.ring_B[0, 0].nbytes + state.ring_dt[0, 0].nbytes)
    traffic = sequences * (H * P * N * element * (W + 2 * rows) // W + live) + rows * sequences * 4 * H * P
    return traffic, sequences * rows * (4 * H * P * N + 4 * W * H * (P + N))


def _host_key(seed: int, layer: int) -> int:
    key = 0
    for word in (seed, layer):
        key = _host_mix(key ^ (word & 0xFFFFFFFF))
    return key


def _host_mix(h: int) -> int:
    for factor in (0x85EBCA6B, 0xC2B2AE35):
        h = ((h ^ (h >> 16)) * factor + 0x9E3779B9) & 0xFFFFFFFF
    return h ^ (h >> 16)
