"""The truth that tests compare with: the Mamba-2 layer in float64, one token after another.

The first half uses plain torch and nothing of the package: every equation of a block (norm, in_proj, causal conv, dt,
recurrence, gated norm, out_proj), weights decoded from their bytes by hand, the state rounded where a test asks for
it. The second half makes random weights, inputs and layers, and is the only part that knows the package's types.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import torch
from hypothesis import HealthCheck, Phase, settings
from torch import Tensor

from nemotron_mamba2.batch import Batch
from nemotron_mamba2.config import Mamba2Config, Policy
from nemotron_mamba2.formats import Fp8Block, Fp8Channel, Fp8Tensor, Nvfp4, Plain
from nemotron_mamba2.layer import NemotronMamba2Layer
from nemotron_mamba2.plan import make_plan
from nemotron_mamba2.state import StatePool
from nemotron_mamba2.weights import Mamba2Weights

F64 = torch.float64
FP16_MAX = 65504.0

# -- bytes → values, by hand -------------------------------------------------------------------------------------------


def e4m3_values(codes: Tensor) -> Tensor:
    """uint8 codes, 1 sign, 4 exponent (bias 7) and 3 mantissa bits → float64."""
    sign = 1.0 - 2.0 * (codes >> 7).to(F64)
    exponent, mantissa = ((codes >> 3) & 15).to(F64), (codes & 7).to(F64)
    magnitude = torch.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * torch.exp2(exponent - 7))
    return sign * magnitude.masked_fill((codes & 127) == 127, float("nan"))


def e2m1_values(packed: Tensor) -> Tensor:
    """uint8 [..., n], two codes a byte, the even index in the low nibble → float64 [..., 2n]."""
    codes = torch.stack((packed % 16, packed // 16), -1).flatten(-2)
    exponent, mantissa = ((codes >> 1) & 3).to(F64), (codes & 1).to(F64)
    magnitude = torch.where(exponent == 0, mantissa / 2, (1 + mantissa / 2) * torch.exp2(exponent - 1))
    return (1.0 - 2.0 * (codes >> 3).to(F64)) * magnitude


def to_e4m3(values: Tensor) -> Tensor:
    """float64 → the nearest e4m3 value (ties to even, saturating at ±448), as float64."""
    magnitude = values.abs().clamp(max=448.0)
    step = torch.exp2(torch.floor(torch.log2(magnitude.clamp(min=2.0**-6))) - 3)
    return torch.sign(values) * (torch.round(magnitude / step) * step).clamp(max=448.0)


def decoded(weight: object) -> Tensor:
    """float64 values of a weight of any format, from its raw tensors alone."""
    name, raw = type(weight).__name__, weight.weight
    if name == "Plain":
        return raw.to(F64)
    if name == "Nvfp4":
        blocks = e4m3_values(weight.scale.view(torch.uint8)).repeat_interleave(16, -1)
        return e2m1_values(raw) * blocks * weight.global_scale.to(F64)
    values, scale = e4m3_values(raw.view(torch.uint8)), weight.scale.to(F64)
    if name == "Fp8Tensor":
        return values * scale
    if name == "Fp8Channel":
        return values * scale[:, None]
    rows, columns = values.shape
    row, column = torch.arange(rows) // 128, torch.arange(columns) // 128
    return values * scale[row][:, column]


# -- the equations -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Truth:
    """One layer's weights in float64. in_act, out_act: what happens to the activations of prompt rows."""

    config: Mamba2Config
    norm: Tensor
    in_proj: Tensor
    conv1d_weight: Tensor
    conv1d_bias: Tensor | None
    dt_bias: Tensor
    A_log: Tensor
    D: Tensor
    gated_norm: Tensor
    out_proj: Tensor
    in_act: Callable[[Tensor], Tensor] | None = None
    out_act: Callable[[Tensor], Tensor] | None = None


def rms_norm(x: Tensor, weight: Tensor, eps: float, groups: int = 1) -> Tensor:
    parts = x.to(F64).reshape(len(x), groups, x.shape[1] // groups)
    return (parts / (parts.square().mean(-1, keepdim=True) + eps).sqrt()).reshape(x.shape) * weight.to(F64)


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def softplus(x: Tensor) -> Tensor:
    return torch.where(x > 0, x, 0.0) + torch.log1p(torch.exp(-x.abs()))


def time_steps(dt: Tensor, dt_bias: Tensor, limit: tuple[float, float] | None) -> Tensor:
    steps = softplus(dt.to(F64) + dt_bias.to(F64))
    return steps if limit is None else steps.clamp(limit[0], limit[1])


def convolve(raw: Tensor, before: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """silu(causal depthwise conv). raw: [T, C]; before: the W − 1 rows ahead of them; weight: [C, W]."""
    wide = torch.cat([before.to(F64), raw.to(F64)])
    width = weight.shape[1]
    total = sum(wide[k : k + len(raw)] * weight[:, k].to(F64) for k in range(width))
    return silu(total if bias is None else total + bias.to(F64))


def recurrence(
    state: Tensor,
    x: Tensor,
    B: Tensor,
    C: Tensor,
    dt: Tensor,
    A_log: Tensor,
    D: Tensor,
    *,
    position: int = 0,
    window_rows: int = 0,
    store: Callable[[Tensor], Tensor] | None = None,
    kept: dict[int, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """state ← exp(dt·A)·state + dt·x⊗B; y = state·C + D·x, row after row.

    state: [H, P, N]; x: [T, H, P]; B, C: [T, G, N]; dt: [T, H]. store: applied to the state wherever the position is
    a multiple of window_rows (the state as memory holds it). kept: receives those states. Returns: y [T, H, P], state.
    """
    heads_per_group = state.shape[0] // B.shape[1]
    x, B, C, dt = (t.to(F64) for t in (x, B, C, dt))
    B, C = B.repeat_interleave(heads_per_group, 1), C.repeat_interleave(heads_per_group, 1)
    decay = torch.exp(dt * -torch.exp(A_log.to(F64)))
    y = torch.empty_like(x)
    for t in range(len(x)):
        state = state * decay[t, :, None, None] + (dt[t, :, None] * x[t])[:, :, None] * B[t][:, None, :]
        y[t] = (state @ C[t].unsqueeze(-1)).squeeze(-1) + D.to(F64)[:, None] * x[t]
        if window_rows and (position + t + 1) % window_rows == 0:
            state = state if store is None else store(state)
            if kept is not None:
                kept[position + t + 1] = state
    return y, state


def split_xbc(xbc: Tensor, config: Mamba2Config) -> tuple[Tensor, Tensor, Tensor]:
    """[T, conv_dim] → x [T, H, P], B and C [T, G, N]."""
    c, states = config, config.n_groups * config.ssm_state_size
    x, B, C = xbc.split([c.d_inner, states, states], -1)
    B, C = (t.reshape(len(t), c.n_groups, c.ssm_state_size) for t in (B, C))
    return x.reshape(len(x), c.mamba_num_heads, c.mamba_head_dim), B, C


def project_in(truth: Truth, hidden: Tensor, role: str) -> tuple[Tensor, Tensor, Tensor]:
    """→ z, xBC, dt."""
    c = truth.config
    normed = rms_norm(hidden, truth.norm, c.layer_norm_epsilon)
    if role == "prompt" and truth.in_act is not None:
        normed = truth.in_act(normed)
    return (normed @ truth.in_proj.T).split([c.d_inner, c.conv_dim, c.mamba_num_heads], -1)


def project_out(truth: Truth, y: Tensor, z: Tensor, residual: Tensor, role: str) -> Tensor:
    c = truth.config
    gated = rms_norm(y.to(F64) * silu(z.to(F64)), truth.gated_norm, c.layer_norm_epsilon, c.n_groups)
    if role == "prompt" and truth.out_act is not None:
        gated = truth.out_act(gated)
    return residual.to(F64) + gated @ truth.out_proj.T


@dataclass
class Sequence64:
    """One sequence through one layer: feed it rows and it answers with the rows after the layer.

    store: rounding of the state at multiples of window_rows. kept: the states there, by position.
    """

    truth: Truth
    window_rows: int = 16
    store: Callable[[Tensor], Tensor] | None = None
    position: int = 0
    kept: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        c = self.truth.config
        self.state = torch.zeros(c.mamba_num_heads, c.mamba_head_dim, c.ssm_state_size, dtype=F64)
        self.tail = torch.zeros(c.conv_kernel - 1, c.conv_dim, dtype=F64)
        self.kept[0] = self.state

    def feed(self, hidden: Tensor, role: str = "prompt") -> Tensor:
        truth, c = self.truth, self.truth.config
        z, raw, dt = project_in(truth, hidden, role)
        x, B, C = split_xbc(convolve(raw, self.tail, truth.conv1d_weight, truth.conv1d_bias), c)
        self.tail = torch.cat([self.tail, raw])[len(raw) :]
        y, self.state = recurrence(
            self.state,
            x,
            B,
            C,
            time_steps(dt, truth.dt_bias, c.time_step_limit),
            truth.A_log,
            truth.D,
            position=self.position,
            window_rows=self.window_rows,
            store=self.store,
            kept=self.kept,
        )
        self.position += len(hidden)
        return project_out(truth, y.flatten(1), z, hidden, role)

    def copy(self) -> Sequence64:
        twin = replace(self, kept=dict(self.kept))
        twin.state, twin.tail = self.state, self.tail
        return twin


def saturating(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """Rounding of a state to its dtype: nearest, and ±65504 is the end of fp16."""
    largest = FP16_MAX if dtype == torch.float16 else torch.finfo(dtype).max
    return lambda state: state.clamp(-largest, largest).to(torch.float32).to(dtype).to(F64)


def error(found: Tensor, truth: Tensor) -> float:
    """‖found − truth‖ / ‖truth‖; infinite where anything found is not finite, or shapes differ."""
    if found.shape != truth.shape or not bool(torch.isfinite(found.to(F64)).all()):
        return float("inf")
    if not truth.numel():
        return 0.0
    size = truth.to(F64).norm()
    return float((found.to(F64) - truth.to(F64)).norm() / size) if size else float(found.to(F64).norm())


def mixer_error(found: Tensor, truth: Tensor, hidden: Tensor) -> float:
    """The error of what the layer added to its residual: the residual itself cannot hide it."""
    return error(found.to(F64) - hidden.to(F64), truth - hidden.to(F64))


# -- random layers -----------------------------------------------------------------------------------------------------

FORMATS = ("bf16", "fp8_tensor", "fp8_channel", "fp8_block", "nvfp4")

TINY = Mamba2Config(hidden_size=160, mamba_num_heads=8, mamba_head_dim=64, n_groups=2, ssm_state_size=128)
D80 = Mamba2Config(hidden_size=64, mamba_num_heads=24, mamba_head_dim=80, n_groups=2, ssm_state_size=128)
S256 = Mamba2Config(hidden_size=64, mamba_num_heads=4, mamba_head_dim=64, n_groups=2, ssm_state_size=256)
S96 = Mamba2Config(hidden_size=64, mamba_num_heads=4, mamba_head_dim=64, n_groups=2, ssm_state_size=96)
SMALL = Mamba2Config(hidden_size=48, mamba_num_heads=4, mamba_head_dim=16, n_groups=2, ssm_state_size=16)
# No width here is a multiple of 16: what a vector unit leaves over differs from row to row.
ODD = Mamba2Config(hidden_size=42, mamba_num_heads=6, mamba_head_dim=10, n_groups=2, ssm_state_size=18)
SHAPES = {"TINY": TINY, "D80": D80, "S256": S256, "S96": S96, "SMALL": SMALL, "ODD": ODD}


def quantized(values: Tensor, format: str, seed: int, *, static: bool = True) -> object:
    """A weight of a format near some values, made by hand; `decoded` of it is the truth.

    static: fp8_tensor gets an input_scale (W8A8 for prompt rows); fp8_channel quantises its activations per row.
    """
    draw = torch.Generator().manual_seed(seed)
    if format == "bf16":
        return Plain(values.to(torch.bfloat16))
    if format == "nvfp4":
        blocks = values.reshape(len(values), -1, 16)
        global_scale = values.abs().max() / (6 * 448)
        scale = (blocks.abs().amax(-1) / 6 / global_scale).clamp(2.0**-9, 448).to(torch.float8_e4m3fn)
        wanted = (blocks / (scale.float() * global_scale).clamp(min=1e-30).unsqueeze(-1)).flatten(1)
        grid = e2m1_values(torch.arange(16, dtype=torch.uint8))[::2]  # the low nibbles: all sixteen codes
        codes = (wanted.to(F64).unsqueeze(-1) - grid).abs().argmin(-1).to(torch.uint8)
        return Nvfp4(codes[:, ::2] + 16 * codes[:, 1::2], scale, global_scale.float())
    if format == "fp8_tensor":
        scale = values.abs().max() / 448
        codes = (values / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        input_scale = torch.tensor(0.017) if static else None  # ±7.6: a few activations saturate
        return Fp8Tensor(codes, scale.float(), input_scale)
    if format == "fp8_channel":
        scale = values.abs().amax(1) / 448 * (0.5 + torch.rand(len(values), generator=draw)).clamp(min=1)
        return Fp8Channel((values / scale[:, None]).clamp(-448, 448).to(torch.float8_e4m3fn), scale, dynamic=static)
    rows, columns = -(-values.shape[0] // 128), -(-values.shape[1] // 128)
    scale = values.abs().max() / 448 * (1 + torch.rand(rows, columns, generator=draw))
    wide = scale.repeat_interleave(128, 0)[: len(values)].repeat_interleave(128, 1)[:, : values.shape[1]]
    return Fp8Block((values / wide).clamp(-448, 448).to(torch.float8_e4m3fn), scale)


def mamba2_weights(
    config: Mamba2Config, format: str = "bf16", seed: int = 0, *, static: bool = True, bias: bool = True
) -> Mamba2Weights:
    """Random weights of one layer; vectors hold values that bf16 files can hold."""
    draw = torch.Generator().manual_seed(1000 + seed)

    def normal(*shape: int, scale: float = 1.0, mean: float = 0.0) -> Tensor:
        return torch.randn(*shape, generator=draw) * scale + mean

    def stored(values: Tensor) -> Tensor:
        return values.to(torch.bfloat16).float()

    c, heads = config, config.mamba_num_heads
    in_proj = normal(c.in_proj_rows, c.hidden_size, scale=c.hidden_size**-0.5)
    out_proj = normal(c.hidden_size, c.d_inner, scale=c.d_inner**-0.5)
    return Mamba2Weights(
        norm=stored(normal(c.hidden_size, scale=0.2, mean=1.0)),
        in_proj=quantized(in_proj, format, seed + 1, static=static),
        conv1d_weight=stored(normal(c.conv_dim, c.conv_kernel, scale=0.5)),
        conv1d_bias=stored(normal(c.conv_dim, scale=0.2)) if bias else None,
        dt_bias=stored(torch.rand(heads, generator=draw) * 6 - 5),
        # Slow decays and a small skip: most of y comes out of the state, so that a wrong state shows.
        A_log=stored(torch.rand(heads, generator=draw) * 4.4 - 3),
        D=stored(normal(heads, scale=0.3, mean=0.3)),
        gated_norm=stored(normal(c.d_inner, scale=0.2, mean=1.0)),
        out_proj=quantized(out_proj, format, seed + 2, static=static),
    )


def truth_of(config: Mamba2Config, weights: Mamba2Weights, *, exact: bool = False) -> Truth:
    """The float64 layer of some weights. exact: prompt rows keep their activations whatever the weights ask for."""

    def activation(weight: object) -> Callable[[Tensor], Tensor] | None:
        if exact:
            return None
        if getattr(weight, "input_scale", None) is not None and type(weight).__name__ == "Fp8Tensor":
            scale = weight.input_scale.to(F64)
            return lambda x: to_e4m3(x / scale) * scale
        if getattr(weight, "dynamic", False):
            return per_row_e4m3
        return None

    vectors = ("norm", "conv1d_weight", "dt_bias", "A_log", "D", "gated_norm")
    return Truth(
        config,
        **{name: getattr(weights, name).to(F64) for name in vectors},
        conv1d_bias=None if weights.conv1d_bias is None else weights.conv1d_bias.to(F64),
        in_proj=decoded(weights.in_proj),
        out_proj=decoded(weights.out_proj),
        in_act=activation(weights.in_proj),
        out_act=activation(weights.out_proj),
    )


def per_row_e4m3(x: Tensor) -> Tensor:
    scale = (x.abs().amax(-1, keepdim=True) / 448).clamp(min=1e-300)
    return to_e4m3(x / scale) * scale


def rows_of(config: Mamba2Config, rows: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random hidden states [rows, hidden]."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(rows, config.hidden_size, generator=draw).to(dtype)


@dataclass(frozen=True)
class Rig:
    """A layer, and the truth about it."""

    config: Mamba2Config
    weights: Mamba2Weights
    truth: Truth
    layer: NemotronMamba2Layer
    dtype: torch.dtype

    def pool(self, slots: int = 4, **settings: object) -> StatePool:
        return StatePool(self.config, layers=1, slots=slots, dtype=self.dtype, **settings)

    def hidden(self, rows: int, seed: int) -> Tensor:
        return rows_of(self.config, rows, seed, self.dtype)

    def prefill(self, pool: StatePool, slot: int, hidden: Tensor) -> Tensor:
        return self.layer(hidden, Batch.prefill([slot], [len(hidden)]), pool)

    def decode(self, pool: StatePool, slot: int, hidden: Tensor) -> Tensor:
        """All rows, one step each."""
        return torch.cat([hidden[:0], *(self.layer(row[None], Batch.decode([slot]), pool) for row in hidden)])


@lru_cache(maxsize=32)
def rig(
    shape: str = "TINY",
    format: str = "bf16",
    dtype: torch.dtype = torch.float32,
    *,
    reproducible: bool = False,
    prompt: str = "checkpoint",
    time_step_limit: tuple[float, float] | None = None,
    memory_bytes: int | None = None,
    seed: int = 0,
    bias: bool = True,
) -> Rig:
    """A random layer of a shape and format; equal arguments share one."""
    config = replace(SHAPES[shape], time_step_limit=time_step_limit)
    weights = mamba2_weights(config, format, seed, bias=bias)
    policy = Policy(prompt=prompt, reproducible=reproducible, memory_bytes=memory_bytes)
    plan = make_plan(config, weights, policy, device="cpu", dtype=dtype)
    truth = truth_of(config, weights, exact=prompt == "exact")
    return Rig(config, weights, truth, NemotronMamba2Layer(config, weights, plan), dtype)


# -- comparing ---------------------------------------------------------------------------------------------------------


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal dtype, shape and bytes (NaN equals itself, +0 is not −0)."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return a.contiguous().view(torch.uint8).equal(b.contiguous().view(torch.uint8)) if a.numel() else True


def pool_bytes(pool: StatePool) -> list[Tensor]:
    """A copy of every byte of a pool, pad slot included."""
    parts = []
    for layer in range(pool.layout.layers):
        state = pool.layer_state(layer)
        tensors = (state.ssm, state.ring_x, state.ring_B, state.ring_dt, state.ring_conv)
        parts += [t.clone().contiguous().view(torch.uint8) for t in tensors]
    return parts


def unchanged(pool: StatePool, before: Sequence[Tensor]) -> bool:
    return all(a.equal(b) for a, b in zip(pool_bytes(pool), before, strict=True))


def few(examples: int) -> settings:
    """Hypothesis settings of the layer's tests: few examples, always the same ones, shown as drawn (shrinking runs a
    failing test hundreds of times)."""
    return settings(
        max_examples=examples,
        derandomize=True,
        deadline=None,
        database=None,
        phases=(Phase.explicit, Phase.generate),
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
    )
