"""The Mamba-2 ops: convolution, chunked scan of prompt rows, and the step of generated and drafted rows.

    state_t = exp(dt_t·A) · state_{t−1} + dt_t · x_t ⊗ B_t          y_t = state_t · C_t + D · x_t       (per head, fp32)

State lives as a *boundary* and a *window*: memory holds the state at a multiple of window_rows, rings hold the rows
since then (x and B after conv, rounded to the activation dtype; dt in fp32), and row t is computed from the state at
window_rows·⌊t / window_rows⌋ and the rows from there to t:

    y_t = exp(c_t) · state · C_t + Σ_s exp(c_t − c_s) · dt_s · (C_t·B_s) · x_s + D · x_t       c = cumsum of dt·A

The same sum over a whole chunk is the SSD form (arXiv 2405.21060, listing 1). Every row of a step is computed by calls
of the same shape, whatever its batch, so its bits do not depend on its neighbours. Decay differences are clamped to
≤ 0 before exp; nothing else is clamped.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ...batch import Rows
from ...errors import ShapeError
from .. import LayerState
from .linear import silu
from .rounding import round_state

CHUNK_ROWS = 64  # rows of one SSD tile, anchored at absolute positions (measured: best of 32, 64, 128 on a CPU)
CONV_ROWS = 64  # rows convolved at a time, so that the passes over them stay in cache


def conv(
    xbc: Tensor,
    dt: Tensor,
    state: LayerState,
    rows: Rows,
    *,
    weight: Tensor,
    bias: Tensor | None,
    dt_bias: Tensor,
    time_step_limit: tuple[float, float] | None = None,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """silu(causal depthwise conv + bias) over ragged prompt rows, and softplus of dt.

    Puts the live window rows of each sequence in front of its new rows, so that the scan starts at a boundary, and
    leaves the rows after the last multiple of window_rows in the rings (and the raw tail in the conv ring).
    xbc: [T, conv_dim] raw x·B·C. dt: [T, H] raw. weight: fp32 [conv_dim, W]; bias: fp32 [conv_dim] or None; dt_bias:
    fp32 [H]. Returns: ([T', conv_dim] in xbc's dtype, fp32 [T', H]) with T' rows counted by `scan_rows`; C of the
    live rows is zero.
    """
    fronts = [position - boundary for position, boundary in zip(rows.positions, rows.boundaries, strict=True)]
    total = rows.total_rows + sum(fronts)
    if out is None:
        out = (xbc.new_empty(total, xbc.shape[1]), torch.empty(total, dt.shape[1], device=dt.device))
    wide_xbc, wide_dt = out
    if len(wide_xbc) != total or len(wide_dt) != total:
        raise ShapeError(f"conv: out needs {total} rows (window rows included), found {len(wide_xbc)}, {len(wide_dt)}")
    steps = _time_steps(dt, dt_bias, time_step_limit)
    place = 0
    for i, slot in enumerate(rows.slots):
        new, position = slice(rows.cu_rows[i], rows.cu_rows[i + 1]), rows.positions[i]
        ours = slice(place + fronts[i], place + fronts[i] + rows.rows[i])
        _load_window(
            state, slot, rows.boundaries[i], position, wide_xbc[place : ours.start], wide_dt[place : ours.start]
        )
        _convolve(_conv_tail(state, slot, position, weight.shape[1] - 1), xbc[new], weight, bias, wide_xbc[ours])
        wide_dt[ours] = steps[new]
        boundary = _floor(position + rows.rows[i], state.window_rows)
        _append_raw(state, slot, position, xbc[new])
        _append_window(state, slot, position, wide_xbc[ours], wide_dt[ours], first=boundary)
        place = ours.stop
    return out


def scan_rows(rows: Rows) -> int:
    """Rows that `conv` returns and `scan` reads: the new ones and the live window rows in front of them."""
    return rows.total_rows + sum(rows.positions) - sum(rows.boundaries)


def scan(
    xbc: Tensor,
    dt: Tensor,
    state: LayerState,
    rows: Rows,
    *,
    A_log: Tensor,
    D: Tensor,
    reproducible: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """The recurrence over ragged prompt rows, chunk by chunk from each sequence's boundary state.

    Stores the state at the last multiple of window_rows. xbc, dt: what `conv` returned. A_log, D: fp32 [H].
    reproducible: the carried state is rounded to its dtype at each chunk border, as a split there would.
    Returns: y [T, d_inner] in xbc's dtype.
    """
    _, H, P, _ = state.ssm.shape
    if out is None:
        out = xbc.new_empty(rows.total_rows, H * P)
    place = 0
    for i, slot in enumerate(rows.slots):
        boundary, position = rows.boundaries[i], rows.positions[i]
        end = position + rows.rows[i]
        if end == position:
            place += position - boundary
            continue
        last = _floor(end, state.window_rows)
        carried = state.ssm[slot].float()
        for start in range(_floor(boundary, CHUNK_ROWS), end, CHUNK_ROWS):
            first, stop = max(start, boundary), min(start + CHUNK_ROWS, end)
            here = slice(place + first - boundary, place + stop - boundary)
            y, carried = _chunk(
                xbc[here], dt[here], carried, A_log=A_log, D=D, groups=state.ring_B.shape[2], kept=last - first
            )
            if reproducible and stop < end:
                carried = round_state(carried, state, stop).float()
            done = min(max(position - first, 0), len(y))  # live window rows: their outputs are known already
            row = rows.cu_rows[i] + max(first, position) - position
            out[row : row + len(y) - done] = y[done:].flatten(1)
        if last > boundary:
            state.ssm[slot] = round_state(carried, state, last)
        place += end - boundary
    return out


def _chunk(
    xbc: Tensor, dt: Tensor, carried: Tensor, *, A_log: Tensor, D: Tensor, groups: int, kept: int
) -> tuple[Tensor, Tensor]:
    """One SSD tile of Q rows → y fp32 [Q, H, P] and the state after its first `kept` rows [H, P, N].

    The tile is padded to CHUNK_ROWS, so that a row's bits do not depend on how many rows follow it.
    """
    H, P, N = carried.shape
    Q = len(dt)
    pad = (0, 0, 0, CHUNK_ROWS - Q)
    x, B, C = F.pad(xbc.float(), pad).split([H * P, groups * N, groups * N], -1)
    dt = F.pad(dt, pad)
    B, C = (t.unflatten(-1, (groups, N)).transpose(0, 1) for t in (B, C))  # [G, Q, N]
    log_decay = (dt * -A_log.exp()).T.cumsum(-1)  # [H, Q]
    between = log_decay.unsqueeze(-1) - log_decay.unsqueeze(-2)  # [H, to, from]
    weights = between.clamp_(max=0).exp_().tril_().mul_(dt.T.unsqueeze(1))
    weights = weights.unflatten(0, (groups, -1)).mul_((C @ B.mT).unsqueeze(1)).flatten(0, 1)
    heads = x.unflatten(-1, (H, P)).transpose(0, 1)  # [H, Q, P]
    y = torch.bmm(weights, heads)
    past = (C @ carried.view(groups, -1, N).mT).unflatten(-1, (-1, P)).transpose(1, 2).flatten(0, 1)  # [H, Q, P]
    y.addcmul_(past, log_decay.exp().unsqueeze(-1)).addcmul_(heads, D[:, None, None])
    kept = min(kept, Q)
    if kept > 0:
        to_end = (log_decay[:, kept - 1 : kept] - log_decay).clamp_(max=0).exp_() * dt.T  # [H, Q]
        to_end[:, kept:] = 0
        weighted = (heads * to_end.unsqueeze(-1)).unflatten(0, (groups, -1)).transpose(1, 2).flatten(2)  # [G, Q, ·]
        carried = torch.baddbmm(
            (carried * log_decay[:, kept - 1].exp()[:, None, None]).view(groups, -1, N), weighted.mT, B
        ).view(H, P, N)
    return y.transpose(0, 1)[:Q], carried


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
    """Convolution and recurrence of generated or drafted rows, all slots at once.

    First folds full windows of committed rows into the state in memory; then appends the new rows to the rings and
    computes each from the boundary it belongs to. Folds that new rows make necessary stay in registers. Rows of the
    pad slot give zeros and touch nothing. Tensors as for `conv` and `scan`. Returns: y [T, d_inner].
    """
    _, H, P, _ = state.ssm.shape
    out = xbc.new_zeros(rows.total_rows, H * P) if out is None else out.zero_()
    live = [i for i, slot in enumerate(rows.slots) if slot != state.pad_slot and rows.rows[i]]
    steps = _time_steps(dt, dt_bias, time_step_limit)
    for i in live:
        _fold_committed(state, rows.slots[i], rows.boundaries[i], rows.positions[i], A_log)
    for i in live:
        new = slice(rows.cu_rows[i], rows.cu_rows[i + 1])
        slot, position = rows.slots[i], rows.positions[i]
        tail = _conv_tail(state, slot, position, conv_weight.shape[1] - 1)
        wide = xbc.new_empty(rows.rows[i], xbc.shape[1])
        _convolve(tail, xbc[new], conv_weight, conv_bias, wide)
        _append_raw(state, slot, position, xbc[new])
        _append_window(state, slot, position, wide, steps[new], first=position)
        boundary = _floor(position, state.window_rows)
        carried = state.ssm[slot].float()
        for j in range(rows.rows[i]):
            if position + j == boundary + state.window_rows:
                carried = round_state(_fold(state, slot, boundary, carried, A_log), state, boundary + state.window_rows)
                carried, boundary = carried.float(), boundary + state.window_rows
            C = wide[j, -state.ring_B.shape[2] * state.ring_B.shape[3] :].float().view(state.ring_B.shape[2:])
            out[new.start + j] = _row(state, slot, boundary, position + j, carried, C, A_log, D).flatten()
    return out


def _row(
    state: LayerState, slot: int, boundary: int, t: int, carried: Tensor, C: Tensor, A_log: Tensor, D: Tensor
) -> Tensor:
    """y of row t [H, P] from the state at boundary and the window rows boundary..t. C: [G, N]."""
    G, N = C.shape
    x, B, dt = _window(state, slot, boundary, t + 1)
    log_decay = (dt * -A_log.exp()).cumsum(0)  # [window, H]
    to_t = (log_decay[t - boundary] - log_decay).clamp_(max=0).exp_() * dt  # [window, H]
    scores = torch.bmm(B.transpose(0, 1), C.unsqueeze(-1)).squeeze(-1)  # [G, window]
    weights = to_t.T.unflatten(0, (G, -1)) * scores.unsqueeze(1)  # [G, H/G, window]
    y = torch.bmm(weights.flatten(0, 1).unsqueeze(1), x.transpose(0, 1)).squeeze(1)  # [H, P]
    past = torch.bmm(carried.view(G, -1, N), C.unsqueeze(-1)).view(y.shape)
    return y + past * log_decay[t - boundary].exp().unsqueeze(-1) + D.unsqueeze(-1) * x[t - boundary]


def _fold_committed(state: LayerState, slot: int, boundary: int, position: int, A_log: Tensor) -> None:
    """Move the state in memory over every full window of committed rows."""
    while position - boundary >= state.window_rows:
        folded = _fold(state, slot, boundary, state.ssm[slot].float(), A_log)
        boundary += state.window_rows
        state.ssm[slot] = round_state(folded, state, boundary)


def _fold(state: LayerState, slot: int, boundary: int, carried: Tensor, A_log: Tensor) -> Tensor:
    """The state one window later, fp32 [H, P, N]."""
    x, B, dt = _window(state, slot, boundary, boundary + state.window_rows)
    log_decay = (dt * -A_log.exp()).cumsum(0)
    to_end = (log_decay[-1] - log_decay).clamp_(max=0).exp_() * dt
    G, N = B.shape[1:]
    weighted = (x * to_end.unsqueeze(-1)).unflatten(1, (G, -1)).permute(1, 2, 3, 0).flatten(1, 2)  # [G, H/G·P, window]
    decayed = carried * log_decay[-1].exp()[:, None, None]
    return torch.baddbmm(decayed.view(G, -1, N), weighted, B.transpose(0, 1)).view(carried.shape)


def _window(state: LayerState, slot: int, boundary: int, stop: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows boundary..stop−1 of a slot's rings in fp32, padded with zero rows to window_rows: x [·, H, P], B [·, G, N],
    dt [·, H]. The fixed length fixes the order of every sum over the window."""
    places = [t % state.ring_dt.shape[1] for t in range(boundary, stop)]
    pad = state.window_rows - len(places)
    x, B, dt = (_take(ring[slot], places).float() for ring in (state.ring_x, state.ring_B, state.ring_dt))
    if pad:
        x, B, dt = F.pad(x, (0, 0, 0, 0, 0, pad)), F.pad(B, (0, 0, 0, 0, 0, pad)), F.pad(dt, (0, 0, 0, pad))
    return x, B, dt


def _time_steps(dt: Tensor, dt_bias: Tensor, limit: tuple[float, float] | None) -> Tensor:
    """softplus(dt + dt_bias) in fp32, exact for any argument; clamped only where the config has a limit."""
    raw = dt.float() + dt_bias
    steps = raw.clamp(min=0) + torch.log1p(torch.exp(-raw.abs()))
    return steps if limit is None else steps.clamp(*limit)


def _convolve(tail: Tensor, xbc: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """silu(conv + bias) of new rows, given the W − 1 raw rows before them; fp32 sums, oldest tap first."""
    W = weight.shape[1]
    taps = weight.T.contiguous()
    for start in range(0, len(xbc), CONV_ROWS):
        rows = xbc[start : start + CONV_ROWS]
        before = torch.cat([tail, xbc[max(start - W + 1, 0) : start]])[-(W - 1) :]
        raw = torch.cat([before, rows]).float()
        acc = raw[: len(rows)] * taps[0]
        for k in range(1, W):
            acc.addcmul_(raw[k : k + len(rows)], taps[k])
        if bias is not None:
            acc += bias
        out[start : start + CONV_ROWS] = silu(acc)


def _conv_tail(state: LayerState, slot: int, position: int, n: int) -> Tensor:
    """The n raw conv inputs before position; zeros before the sequence starts (a slot is zeroed when acquired)."""
    return _take(state.ring_conv[slot], [(position - k) % state.ring_conv.shape[1] for k in range(n, 0, -1)])


def _append_raw(state: LayerState, slot: int, position: int, xbc: Tensor) -> None:
    ring = state.ring_conv[slot]
    _put(ring, position, xbc, first=position + len(xbc) - ring.shape[0])


def _append_window(state: LayerState, slot: int, position: int, xbc: Tensor, dt: Tensor, *, first: int) -> None:
    """Leave the rows from position `first` on in the rings."""
    H, P = state.ring_x.shape[2:]
    G, N = state.ring_B.shape[2:]
    _put(state.ring_x[slot], position, xbc[:, : H * P].unflatten(1, (H, P)), first=first)
    _put(state.ring_B[slot], position, xbc[:, H * P : H * P + G * N].unflatten(1, (G, N)), first=first)
    _put(state.ring_dt[slot], position, dt, first=first)


def _load_window(state: LayerState, slot: int, boundary: int, position: int, xbc: Tensor, dt: Tensor) -> None:
    """Copy the live window rows out of the rings, with C zero."""
    places = [t % state.ring_dt.shape[1] for t in range(boundary, position)]
    x, B = _take(state.ring_x[slot], places).flatten(1), _take(state.ring_B[slot], places).flatten(1)
    xbc[:, : x.shape[1]] = x
    xbc[:, x.shape[1] : x.shape[1] + B.shape[1]] = B
    xbc[:, x.shape[1] + B.shape[1] :] = 0
    dt.copy_(_take(state.ring_dt[slot], places))


def _put(ring: Tensor, position: int, rows: Tensor, *, first: int) -> None:
    """Store row t of rows (t counted from position) at t mod ring length, for t ≥ first."""
    skip = max(first - position, 0)
    places = [t % ring.shape[0] for t in range(position + skip, position + len(rows))]
    if places:
        ring[_contiguous(places)] = rows[skip:]


def _take(ring: Tensor, places: Sequence[int]) -> Tensor:
    return ring[_contiguous(places)] if places else ring[:0]


def _contiguous(places: Sequence[int]) -> slice | list[int]:
    """The places as a slice when they do not wrap: a view instead of a gather."""
    return slice(places[0], places[-1] + 1) if places[-1] - places[0] == len(places) - 1 else list(places)


def _floor(position: int, unit: int) -> int:
    return position - position % unit
