"""Attention over paged keys and values on NVIDIA GPUs, as `ops.reference.attention` defines it.

Step rows: `_attend` takes one row, the query heads of one key head and one stretch of positions, and leaves maximum,
sum and weighted values in fp32; `_combine` adds the stretches of a row in order. Stretches lie at absolute positions
(`FINE_TOKENS` each, from `FINE_SPLITS` of them on `COARSE_TOKENS`) and every constant is fixed per shape and dtype, so
a row's bits depend on its own keys alone; how many programs share the stretches of a row follows the batch. Nothing is
read on the host: rows learn their sequence and their number of keys from `Pages`. FP8 codes enter the products as they
are, exact in bf16; their scales go to the scores and to the sum.

Prompt rows: torch's flash attention over a sequence's rows, gathered through the table on the device.

Bytes of a step: keys and values once per row (rows of one sequence share them in L2), 4 × heads × head_dim written and
read per stretch. Flops: 4 × keys × heads × head_dim per row.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from ...batch import Role, Rows
from ...formats import E4M3
from .. import Pages, reference
from ..reference.attention import attend_fixed_tiles, gather

FINE_TOKENS, FINE_SPLITS, COARSE_TOKENS = 128, 32, 512
ATTEND = {"BLOCK": 64, "num_warps": 4, "num_stages": 5}  # two blocks of 64 keys and values in flight: a fine stretch
COMBINE = {"BLOCK": 16, "num_warps": 4, "num_stages": 2}
PROGRAMS, LEAST_PROGRAMS = 1056, 4  # programs wanted in all; for each row and key head, at least
LOG2_E = 1.4426950408889634
INTEGERS = ["places", "table", "row_sequence", "row_keys"]  # lie anywhere in one buffer, at any alignment


@triton.jit
def _split_count(tokens, FINE: tl.constexpr, SPLITS: tl.constexpr, COARSE: tl.constexpr):
    """Stretches of the first `tokens` positions."""
    coarse = SPLITS + tl.cdiv(tokens - SPLITS * FINE, COARSE)
    return tl.where(tokens <= SPLITS * FINE, tl.cdiv(tokens, FINE), coarse)


@triton.jit
def _load_rows(cache, offsets, mask, dtype: tl.constexpr, FP8: tl.constexpr, DECODE: tl.constexpr):
    """Keys or values, 0 where masked. FP8: bytes of e4m3. DECODE: by bits, where the device has no conversion."""
    found = tl.load(cache + offsets, mask=mask, other=0)
    if FP8 and DECODE:
        bits = found.to(tl.uint32)
        word = ((bits & 0x80) << 24) | ((bits & 0x7F) << 20)
        wide = word.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120: from e4m3's bias to fp32's
        found = tl.where((bits & 0x7F) == 0x7F, float("nan"), wide)
    elif FP8:
        found = found.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    return found.to(dtype)


@triton.jit(
    do_not_specialize=["table_sequence_stride", "table_page_stride", "max_splits"],
    do_not_specialize_on_alignment=INTEGERS,
)
def _attend(
    found, stats, q, keys, values, k_scale, table, row_sequence, row_keys,
    q_stride, table_sequence_stride, table_page_stride, max_splits, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, GROUP_PAD: tl.constexpr, D_PAD: tl.constexpr,
    PAGE_TOKENS: tl.constexpr, FINE: tl.constexpr, SPLITS: tl.constexpr, COARSE: tl.constexpr, BLOCK: tl.constexpr,
    FP8: tl.constexpr, DECODE: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """found: fp32 [T, heads, max_splits, D], sums of weighted values. stats: fp32 [2, T, heads, max_splits], maximum
    (of scores times log2 e) and sum of the weights. Grid: rows, key heads, programs that share the stretches."""
    row, head = tl.program_id(0), tl.program_id(1)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    seen, sequence = tl.load(row_keys + row), tl.load(row_sequence + row)
    lanes, d, within = tl.arange(0, GROUP_PAD), tl.arange(0, D_PAD), tl.arange(0, BLOCK)
    query = tl.load(
        q + row.to(tl.int64) * q_stride + (head * GROUP + lanes[:, None]) * D + d[None, :],
        mask=(lanes[:, None] < GROUP) & (d[None, :] < D), other=0,
    )  # fmt: skip
    if SCALED:
        scale = scale * tl.load(k_scale)
    mine = table + sequence.to(tl.int64) * table_sequence_stride
    heads = (row.to(tl.int64) * HEADS + head * GROUP + lanes) * max_splits
    half = tl.num_programs(0).to(tl.int64) * HEADS * max_splits
    for split in range(tl.program_id(2), _split_count(seen, FINE, SPLITS, COARSE), tl.num_programs(2)):
        begin = tl.where(split < SPLITS, split * FINE, SPLITS * FINE + (split - SPLITS) * COARSE)
        end = tl.minimum(begin + tl.where(split < SPLITS, FINE, COARSE), seen)
        top = tl.full([GROUP_PAD], float("-inf"), tl.float32)
        total = tl.zeros([GROUP_PAD], tl.float32)
        sums = tl.zeros([GROUP_PAD, D_PAD], tl.float32)
        for first in range(begin, end, BLOCK):
            tokens = first + within
            inside = tokens < end
            page = tl.load(mine + (tokens // PAGE_TOKENS) * table_page_stride, mask=inside, other=0).to(tl.int64)
            offsets = ((page * PAGE_TOKENS + tokens % PAGE_TOKENS) * KV_HEADS + head)[:, None] * D + d[None, :]
            mask = inside[:, None] & (d[None, :] < D)
            k = _load_rows(keys, offsets, mask, query.dtype, FP8, DECODE)
            v = _load_rows(values, offsets, mask, query.dtype, FP8, DECODE)
            scores = tl.dot(query, tl.trans(k), input_precision="ieee") * scale
            scores = tl.where(inside[None, :], scores, float("-inf"))
            higher = tl.maximum(top, tl.max(scores, 1))
            weights = tl.exp2(scores - higher[:, None])
            fade = tl.exp2(top - higher)
            total = total * fade + tl.sum(weights, 1)
            sums = sums * fade[:, None] + tl.dot(weights.to(query.dtype), v, input_precision="ieee")
            top = higher
        tl.store(stats + heads + split, top, mask=lanes < GROUP)
        tl.store(stats + half + heads + split, total, mask=lanes < GROUP)
        tl.store(
            found + (heads + split)[:, None] * D + d[None, :], sums,
            mask=(lanes[:, None] < GROUP) & (d[None, :] < D),
        )  # fmt: skip


@triton.jit(do_not_specialize=["max_splits"], do_not_specialize_on_alignment=INTEGERS)
def _combine(
    out, found, stats, v_scale, row_keys, out_stride, max_splits,
    HEADS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, FINE: tl.constexpr, SPLITS: tl.constexpr,
    COARSE: tl.constexpr, BLOCK: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """out: [T, heads, D]; zeros for rows that see nothing. Grid: rows, heads."""
    row, head = tl.program_id(0), tl.program_id(1)
    splits = _split_count(tl.load(row_keys + row), FINE, SPLITS, COARSE)
    mine = (row.to(tl.int64) * HEADS + head) * max_splits
    half = tl.num_programs(0).to(tl.int64) * HEADS * max_splits
    d, within = tl.arange(0, D_PAD), tl.arange(0, BLOCK)
    top, total = float("-inf"), 0.0
    sums = tl.zeros([D_PAD], tl.float32)
    for first in range(0, splits, BLOCK):
        split = first + within
        inside = split < splits
        tops = tl.load(stats + mine + split, mask=inside, other=float("-inf"))
        totals = tl.load(stats + half + mine + split, mask=inside, other=0)
        parts = tl.load(
            found + (mine + split)[:, None] * D + d[None, :], mask=inside[:, None] & (d[None, :] < D), other=0
        )
        higher = tl.maximum(top, tl.max(tops, 0))
        weights, fade = tl.exp2(tops - higher), tl.exp2(top - higher)
        total = total * fade + tl.sum(weights * totals, 0)
        sums = sums * fade + tl.sum(weights[:, None] * parts, 0)
        top = higher
    worth = 1.0
    if SCALED:
        worth = tl.load(v_scale)
    result = sums * worth / tl.where(splits > 0, total, 1.0)
    tl.store(out + row.to(tl.int64) * out_stride + head * D + d, result.to(out.dtype.element_ty), mask=d < D)


@triton.jit
def _store_row(cache, rows, scale, place, row, stride, WIDTH: tl.constexpr, PAD: tl.constexpr, FP8: tl.constexpr,
               SCALED: tl.constexpr):  # fmt: skip
    i = tl.arange(0, PAD)
    found = tl.load(rows + row * stride + i, mask=i < WIDTH, other=0)
    if FP8:
        wide = found.to(tl.float32)
        if SCALED:
            wide = tl.div_rn(wide, tl.zeros_like(wide) + tl.load(scale))
        wide = tl.clamp(wide, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
        tl.store(cache + place * WIDTH + i, wide.to(tl.float8e4nv).to(tl.uint8, bitcast=True), mask=i < WIDTH)
    else:
        tl.store(cache + place * WIDTH + i, found.to(cache.dtype.element_ty), mask=i < WIDTH)


@triton.jit(do_not_specialize_on_alignment=INTEGERS)
def _store(
    keys, values, k, v, k_scale, v_scale, places, k_stride, v_stride,
    WIDTH: tl.constexpr, PAD: tl.constexpr, FP8: tl.constexpr, K_SCALED: tl.constexpr, V_SCALED: tl.constexpr,
):  # fmt: skip
    """Grid: rows."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.load(places + row).to(tl.int64)
    _store_row(keys, k, k_scale, place, row, k_stride, WIDTH, PAD, FP8, K_SCALED)
    _store_row(values, v, v_scale, place, row, v_stride, WIDTH, PAD, FP8, V_SCALED)


def store_kv(
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    places: Tensor,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """As `ops.reference.store_kv`, keys and values in one launch; the same bits."""
    fp8 = keys.dtype == E4M3
    if fp8 and _without_e4m3(k.device):
        return reference.store_kv(k, v, keys, values, places, k_scale=k_scale, v_scale=v_scale)
    if not len(k):
        return
    width = k.shape[1] * k.shape[2]
    k, v, keys, values = _flat(k), _flat(v), _raw(keys), _raw(values)
    _store[(len(k),)](
        keys, values, k, v, keys if k_scale is None else k_scale, keys if v_scale is None else v_scale, places,
        k.stride(0), v.stride(0), WIDTH=width, PAD=triton.next_power_of_2(width), FP8=fp8,
        K_SCALED=k_scale is not None, V_SCALED=v_scale is not None,
        num_warps=4 if width > 512 else 2,
    )  # fmt: skip


def attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: Rows,
    role: Role,
    *,
    pages: Pages,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    reproducible: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """As `ops.reference.attention`. Step rows read no value of `rows` and `pages` on the host: they may be captured."""
    if role == "prompt":
        return _prompt(
            q, keys, values, rows, pages=pages, k_scale=k_scale, v_scale=v_scale, reproducible=reproducible, out=out
        )
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    if len(q):
        _step(q, keys, values, pages, k_scale=k_scale, v_scale=v_scale, out=out)
    return out


def attention_cost(keys: Tensor, tokens: int, *, heads: int, rows: int = 1) -> tuple[int, int]:
    """(bytes, flops) of step rows that see `tokens` keys each."""
    _, _, kv_heads, head_dim = keys.shape
    moved = 2 * tokens * kv_heads * head_dim * keys.element_size()
    parts = 2 * 4 * split_count(tokens) * heads * head_dim
    return rows * (moved + parts + 4 * heads * head_dim), 4 * rows * tokens * heads * head_dim


def split_count(tokens: int) -> int:
    """Stretches of the first `tokens` positions."""
    fine = FINE_SPLITS * FINE_TOKENS
    return -(-tokens // FINE_TOKENS) if tokens <= fine else FINE_SPLITS - (fine - tokens) // COARSE_TOKENS


def _step(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    pages: Pages,
    *,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    out: Tensor,
) -> None:
    rows, heads, head_dim = q.shape
    _, page_tokens, kv_heads, _ = keys.shape
    max_splits = split_count(pages.table.shape[1] * page_tokens)
    found = torch.empty(rows, heads, max_splits, head_dim, dtype=torch.float32, device=q.device)
    stats = torch.empty(2, rows, heads, max_splits, dtype=torch.float32, device=q.device)
    fp8, q, result = keys.dtype == E4M3, _flat(q), out.view(rows, heads * head_dim)
    shares = min(max_splits, max(LEAST_PROGRAMS, PROGRAMS // (rows * kv_heads)))
    cut = {"FINE": FINE_TOKENS, "SPLITS": FINE_SPLITS, "COARSE": COARSE_TOKENS}
    shape = {"HEADS": heads, "D": head_dim, "D_PAD": max(16, triton.next_power_of_2(head_dim))}
    _attend[(rows, kv_heads, shares)](
        found, stats, q, _raw(keys), _raw(values), stats if k_scale is None else k_scale,
        pages.table, pages.row_sequence, pages.row_keys,
        q.stride(0), pages.table.stride(0), pages.table.stride(1), max_splits, head_dim**-0.5 * LOG2_E,
        KV_HEADS=kv_heads, GROUP_PAD=max(16, triton.next_power_of_2(heads // kv_heads)), PAGE_TOKENS=page_tokens,
        FP8=fp8, DECODE=fp8 and _without_e4m3(q.device), SCALED=fp8 and k_scale is not None,
        **shape, **cut, **ATTEND, enable_fp_fusion=True,
    )  # fmt: skip
    _combine[(rows, heads)](
        result, found, stats, stats if v_scale is None else v_scale, pages.row_keys, result.stride(0), max_splits,
        SCALED=fp8 and v_scale is not None, **shape, **cut, **COMBINE, enable_fp_fusion=True,
    )  # fmt: skip


def _prompt(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: Rows,
    *,
    pages: Pages,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    reproducible: bool,
    out: Tensor | None,
) -> Tensor:
    parts: list[Tensor] = []
    for i, (count, start) in enumerate(zip(rows.rows, rows.positions, strict=True)):
        mine = q[rows.cu_rows[i] : rows.cu_rows[i] + count]
        if not count or not pages.lists[i]:
            parts.append(torch.zeros_like(mine))
            continue
        k, v = (
            gather(cache, pages.table[i], tokens=start + count, dtype=q.dtype, scale=scale)
            for cache, scale in ((keys, k_scale), (values, v_scale))
        )
        if reproducible:
            parts.append(torch.empty(mine.shape, dtype=q.dtype, device=q.device))
            attend_fixed_tiles(mine, k, v, start, parts[-1])
        else:
            parts.append(_flash(mine, k, v, start))
    if len(parts) == 1 and out is None:
        return parts[0]
    return torch.cat(parts, out=out) if parts else torch.empty_like(q)


def _flash(q: Tensor, k: Tensor, v: Tensor, start: int) -> Tensor:
    """q: [T, heads, d] from position start on; k, v: [start + T, kv_heads, d]. Returns: [T, heads, d]."""
    mask = causal_lower_right(len(q), len(k)) if start else None
    queries, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
    found = F.scaled_dot_product_attention(queries, k, v, attn_mask=mask, is_causal=not start, enable_gqa=True)
    return found[0].transpose(0, 1)


def _without_e4m3(device: torch.device) -> bool:
    """Whether the device cannot convert e4m3 by itself."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9)


def _raw(cache: Tensor) -> Tensor:
    """FP8 as bytes: not every device's compiler takes it as a type."""
    return cache.view(torch.uint8) if cache.dtype == E4M3 else cache


def _flat(x: Tensor) -> Tensor:
    """[T, heads, d] as [T, heads · d], rows at any stride."""
    return x.flatten(1) if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous().flatten(1)
