"""Causal attention over paged keys and values: grouped queries, no positional encoding.

    out_t = softmax(q_t · Kᵀ / sqrt(head_dim)) · V,   K and V of rows 0..t of the same sequence

`store_kv` writes the rows of a step into their pages, `attention` reads them back, so that new rows and old ones are
seen through the same rounding (FP8 pages: value = code × scale). Row t of a sequence reads no place past t, whatever
lies there.

Step rows attend one by one, with the query heads of a group as the rows of the product: a row's bits never depend on
its batch, and one row of 40 heads costs one pass over the keys. A prompt that starts at 0 is one causal call; one that
starts later attends in tiles of queries, each against the keys up to its end, so no mask is larger than a tile. When
bits must not depend on how a prompt was split, tiles lie at absolute positions and have one shape, whichever of their
rows are there: absent queries are zeros and absent keys are masked zeros.

Bytes: keys and values once per call. Flops: 4 × rows × keys × heads × head_dim (half of it in one causal call).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ...batch import Role, Rows
from ...formats import E4M3, E4M3_MAX
from .. import Pages

TILE_ROWS = 256  # queries that share a mask when a prompt goes on
FIXED_TILE_ROWS = 64  # queries of a tile of fixed shape


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
    """Write the keys and values of a step into pages.

    k, v: [T, kv_heads, head_dim]. keys, values: [pages, page_tokens, kv_heads, head_dim] in a plain dtype, or e4m3.
    places: int [T], flat rows of the pages. k_scale, v_scale: fp32 scalars of e4m3 pages; None is 1.
    """
    for rows, cache, scale in ((k, keys, k_scale), (v, values, v_scale)):
        if cache.dtype == E4M3:
            wide = rows.float() if scale is None else rows.float() / scale
            codes = wide.clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)
            cache.view(torch.uint8).flatten(0, 1)[places] = codes.view(torch.uint8)
        else:
            cache.flatten(0, 1)[places] = rows.to(cache.dtype)


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
    """Attend from the rows of one role to everything before them.

    q: bf16 or fp32 [T, heads, head_dim], the rows of that role. keys, values: as in `store_kv`, which has written these
    rows. reproducible: a prompt row's bits do not depend on how the prompt was split. Returns: [T, heads, head_dim] in
    the dtype of q; zeros for rows of padding.
    """
    out = torch.empty_like(q) if out is None else out
    for i, (count, start) in enumerate(zip(rows.rows, rows.positions, strict=True)):
        mine = slice(rows.cu_rows[i], rows.cu_rows[i] + count)
        if not count or not pages.lists[i]:
            out[mine] = 0
            continue
        k = _read(keys, pages.lists[i], pages.table[i], tokens=start + count, dtype=q.dtype, scale=k_scale)
        v = _read(values, pages.lists[i], pages.table[i], tokens=start + count, dtype=q.dtype, scale=v_scale)
        if role == "step":
            for j in range(count):
                out[mine.start + j] = _attend_one(q[mine.start + j], k[: start + j + 1], v[: start + j + 1])
        elif reproducible:
            attend_fixed_tiles(q[mine], k, v, start, out[mine])
        else:
            _attend_prompt(q[mine], k, v, start, out[mine])
    return out


def _read(
    cache: Tensor, ids: Sequence[int], table: Tensor, *, tokens: int, dtype: torch.dtype, scale: Tensor | None
) -> Tensor:
    """The first rows of a sequence: [tokens, kv_heads, head_dim]. Pages that lie in a row are read where they are."""
    count = -(-tokens // cache.shape[1])
    if list(ids[:count]) == list(range(ids[0], ids[0] + count)):
        return widen(cache[ids[0] : ids[0] + count].flatten(0, 1)[:tokens], dtype, scale)
    return gather(cache, table, tokens=tokens, dtype=dtype, scale=scale)


def gather(cache: Tensor, table: Tensor, *, tokens: int, dtype: torch.dtype, scale: Tensor | None) -> Tensor:
    """The first rows of a sequence, copied out of its pages. table: int32 [width]. Returns: [tokens, kv_heads, d]."""
    count = -(-tokens // cache.shape[1])
    raw = cache.view(torch.uint8) if cache.dtype == E4M3 else cache  # torch indexes few ops over FP8
    found = raw.index_select(0, table[:count]).flatten(0, 1)[:tokens]
    return widen(found.view(cache.dtype), dtype, scale)


def widen(rows: Tensor, dtype: torch.dtype, scale: Tensor | None) -> Tensor:
    """What rows of pages stand for: code × scale of e4m3, rounded to dtype."""
    if rows.dtype != E4M3:
        return rows.to(dtype)
    wide = rows.float()
    return (wide if scale is None else wide * scale).to(dtype)


def _attend_one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One row: q [heads, d] against all of k, v [n, kv_heads, d]. Returns: [heads, d]."""
    grouped = q.unflatten(0, (k.shape[1], -1))[None]
    return F.scaled_dot_product_attention(grouped, k.transpose(0, 1)[None], v.transpose(0, 1)[None])[0].flatten(0, 1)


def _attend(q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None, causal: bool = False) -> Tensor:
    """q: [T, heads, d]; k, v: [n, kv_heads, d]; mask: bool [T, n]. Returns: [T, heads, d].

    Key heads are batch entries and the query heads of a group share them through a stride of 0: nothing is repeated.
    """
    group = q.shape[1] // k.shape[1]
    queries = q.unflatten(1, (-1, group)).permute(1, 2, 0, 3)
    keys, values = (t.transpose(0, 1)[:, None].expand(-1, group, -1, -1) for t in (k, v))
    found = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, is_causal=causal)
    return found.permute(2, 0, 1, 3).flatten(1, 2)


def _attend_prompt(q: Tensor, k: Tensor, v: Tensor, start: int, out: Tensor) -> None:
    if start == 0:
        out.copy_(_attend(q, k, v, mask=None, causal=True))
        return
    for first in range(0, len(q), TILE_ROWS):
        tile = q[first : first + TILE_ROWS]
        end = start + first + len(tile)
        mask = torch.ones(len(tile), end, dtype=torch.bool, device=q.device).tril(start + first)
        out[first : first + TILE_ROWS] = _attend(tile, k[:end], v[:end], mask=mask)


def attend_fixed_tiles(q: Tensor, k: Tensor, v: Tensor, start: int, out: Tensor) -> None:
    """Prompt rows from position start on, in tiles at absolute positions. k, v: all rows up to the last of q."""
    end, size = start + len(q), FIXED_TILE_ROWS
    k, v = (F.pad(t, (0, 0, 0, 0, 0, -end % size)) for t in (k, v))
    for first in range(start // size * size, end, size):
        here = slice(max(start, first), min(end, first + size))
        inside = slice(here.start - first, here.stop - first)
        rows = slice(here.start - start, here.stop - start)
        queries = q.new_zeros(size, *q.shape[1:])
        queries[inside] = q[rows]
        mask = torch.ones(size, first + size, dtype=torch.bool, device=q.device).tril(first)
        out[rows] = _attend(queries, k[: first + size], v[: first + size], mask=mask)[inside]
