"""A small Nemotron-H model that can be trained: plain PyTorch, differentiable, no kernels of its own.

Layout and numerics are those of the Nemotron-3 checkpoints: Mamba-2 with B and C shared by the heads of
a group and a gated group norm, attention without rotary, relu² MLPs, relu² experts behind a sigmoid
router whose correction bias only selects, and one multi-token-prediction (MTP) head of an attention and
an expert layer. Attribute names are the checkpoint's tensor names; only the experts are stacked.

The scan is the chunked form of Mamba-2 (arXiv 2405.21060, section 6) as batched matrix products; every
decay is an exp of a float32 difference that is at most 0. All experts are computed for all tokens, as
one wide MLP whose unused columns are multiplied by 0: with experts this small it beats any dispatch.

Shapes in comments: B rows, L tokens, C chunks, Q chunk length, G groups, R heads per group, P head
width, N state size, E experts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class DemoConfig:
    """Sizes, under the names of config.json."""

    hybrid_override_pattern: str = "MEM*MEM*M-"
    vocab_size: int = 4096
    hidden_size: int = 256
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    mamba_num_heads: int = 8
    mamba_head_dim: int = 64
    ssm_state_size: int = 128
    n_groups: int = 2
    conv_kernel: int = 4
    chunk_size: int = 128
    intermediate_size: int = 512
    n_routed_experts: int = 8
    num_experts_per_tok: int = 2
    moe_intermediate_size: int = 128
    moe_shared_expert_intermediate_size: int = 256
    routed_scaling_factor: float = 2.5
    layer_norm_epsilon: float = 1e-5
    max_position_embeddings: int = 2048

    @property
    def mamba_width(self) -> int:
        return self.mamba_num_heads * self.mamba_head_dim

    @property
    def conv_width(self) -> int:
        return self.mamba_width + 2 * self.n_groups * self.ssm_state_size


def ssd_scan(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, *, chunk_tokens: int) -> Tensor:
    """state ← exp(dt·a)·state + dt·x⊗b, y = c·state, from a zero state.

    x: [B, L, H, P]. dt: float32 [B, L, H], after softplus. a: float32 [H], negative. b, c: [B, L, G, N], in the
    dtype of x. L must be a multiple of chunk_tokens. Result: [B, L, H, P] in the dtype of x.
    """
    rows, tokens, heads, width = x.shape
    groups, dtype, q = b.shape[2], x.dtype, chunk_tokens
    if tokens % q:
        raise ValueError(f"{tokens} tokens are not a multiple of the chunk of {q}")
    chunked = (rows, tokens // q, q, groups)
    x = (x * dt[..., None].to(dtype)).view(*chunked, heads // groups, width).permute(0, 1, 3, 4, 2, 5)  # [B,C,G,R,Q,P]
    b, c = (v.view(*chunked, -1).transpose(2, 3) for v in (b, c))  # [B, C, G, Q, N]
    log_decay = (dt * a).view(*chunked, -1).permute(0, 1, 3, 4, 2).cumsum(-1)  # [B, C, G, R, Q]
    total = log_decay[..., -1]  # [B, C, G, R]

    # Inside a chunk: attention with decays in place of the softmax.
    causal = torch.ones(q, q, dtype=torch.bool, device=x.device).tril()
    decay = _decay(log_decay[..., :, None] - log_decay[..., None, :], causal).to(dtype)
    y = ((c @ b.mT)[:, :, :, None] * decay) @ x  # [B, C, G, R, Q, P]

    # What each chunk adds to the state, then the state each chunk starts from.
    to_end = (total[..., None] - log_decay).exp().to(dtype)
    added = (x * to_end[..., None]).mT.flatten(3, 4) @ b  # [B, C, G, R·P, N]
    start = _carry(total, added.unflatten(3, (-1, width)))  # [B, C, G, R, P, N]
    from_start = c @ start.flatten(3, 4).mT  # [B, C, G, Q, R·P]
    from_start = from_start.unflatten(-1, (-1, width)).transpose(3, 4)  # [B, C, G, R, Q, P]
    y = y + from_start * log_decay.exp().to(dtype)[..., None]
    return y.permute(0, 1, 4, 2, 3, 5).reshape(rows, tokens, heads, width)


def _decay(difference: Tensor, keep: Tensor) -> Tensor:
    return difference.masked_fill(~keep, -math.inf).exp()


def _carry(total: Tensor, added: Tensor) -> Tensor:
    """The state before each chunk: a strictly lower triangular product over the chunks."""
    chunks = total.shape[1]
    through = total.permute(0, 2, 3, 1).cumsum(-1)  # [B, G, R, C]: log decay up to the end of a chunk
    before = through - total.permute(0, 2, 3, 1)
    earlier = torch.ones(chunks, chunks, dtype=torch.bool, device=total.device).tril(-1)
    weight = _decay(before[..., :, None] - through[..., None, :], earlier).to(added.dtype)
    start = weight @ added.permute(0, 2, 3, 1, 4, 5).flatten(4)  # [B, G, R, C, P·N]
    return start.unflatten(-1, added.shape[-2:]).permute(0, 3, 1, 2, 4, 5)


class RMSNorm(nn.Module):
    """x / rms(x) · weight over the last dimension, in float32, with one cast at the end."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight, self.eps)


class GatedGroupNorm(nn.Module):
    """y·silu(z) first, then RMS over each group, then the weight."""

    def __init__(self, width: int, groups: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.groups, self.eps = groups, eps

    def forward(self, y: Tensor, z: Tensor) -> Tensor:
        gated = (y.float() * F.silu(z.float())).unflatten(-1, (self.groups, -1))
        return F.rms_norm(gated, (gated.shape[-1],), eps=self.eps).flatten(-2) * self.weight


class Mamba2(nn.Module):
    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        self.config = config
        width, heads = config.mamba_width, config.mamba_num_heads
        self.in_proj = nn.Linear(config.hidden_size, width + config.conv_width + heads, bias=False)
        self.conv1d = nn.Conv1d(config.conv_width, config.conv_width, config.conv_kernel, groups=config.conv_width)
        self.dt_bias = nn.Parameter(torch.empty(heads))
        self.A_log = nn.Parameter(torch.empty(heads))
        self.D = nn.Parameter(torch.ones(heads))
        self.norm = GatedGroupNorm(width, config.n_groups, config.layer_norm_epsilon)
        self.out_proj = nn.Linear(width, config.hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        c = self.config
        z, xbc, dt = self.in_proj(hidden).split([c.mamba_width, c.conv_width, c.mamba_num_heads], dim=-1)
        x, b, c_ = self._convolve(xbc).split([c.mamba_width, *[c.n_groups * c.ssm_state_size] * 2], dim=-1)
        x = x.unflatten(-1, (-1, c.mamba_head_dim))
        b, c_ = (v.unflatten(-1, (c.n_groups, -1)) for v in (b, c_))
        dt = F.softplus(dt.float() + self.dt_bias)
        y = ssd_scan(x, dt, -self.A_log.exp(), b, c_, chunk_tokens=c.chunk_size)
        y = y + self.D.to(x.dtype)[:, None] * x
        return self.out_proj(self.norm(y.flatten(-2), z))

    def _convolve(self, xbc: Tensor) -> Tensor:
        """Causal depthwise convolution, bias and SiLU over [B, L, channels].

        As shifted products: cuDNN's depthwise backward is many times slower.
        """
        width, tokens = self.config.conv_kernel, xbc.shape[1]
        taps = self.conv1d.weight[:, 0].to(xbc.dtype)  # [channels, width]
        padded = F.pad(xbc, (0, 0, width - 1, 0))
        total = sum(padded[:, i : i + tokens] * taps[:, i] for i in range(width))
        return F.silu(total + self.conv1d.bias.to(xbc.dtype))


class Attention(nn.Module):
    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        queries, keys = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.repeats = config.num_attention_heads // config.num_key_value_heads
        self.q_proj = nn.Linear(config.hidden_size, queries, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        q, k, v = (
            proj(hidden).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        k, v = (t.repeat_interleave(self.repeats, dim=1) for t in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(-2))


class MLP(nn.Module):
    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down_proj(F.relu(self.up_proj(hidden)).square())


class Router(nn.Module):
    """Scores are sigmoids; the correction bias picks experts but never weighs them, and gets no gradient."""

    e_score_correction_bias: Tensor
    load: Tensor

    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        self.top_k, self.factor = config.num_experts_per_tok, config.routed_scaling_factor
        self.weight = nn.Parameter(torch.empty(config.n_routed_experts, config.hidden_size))
        self.register_buffer("e_score_correction_bias", torch.zeros(config.n_routed_experts))
        self.register_buffer("load", torch.zeros(config.n_routed_experts), persistent=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """float32 [B, L, E]: what each expert's output counts, 0 for those not picked."""
        with torch.autocast(hidden.device.type, enabled=False):
            scores = F.linear(hidden.float(), self.weight.float()).sigmoid()
        picked = (scores + self.e_score_correction_bias).topk(self.top_k, dim=-1, sorted=False).indices
        kept = scores * torch.zeros_like(scores).scatter(-1, picked, 1.0)
        if self.training:
            self.load.copy_((kept.detach() > 0).sum((0, 1)))
        return kept / (kept.sum(-1, keepdim=True) + 1e-20) * self.factor

    @torch.no_grad()
    def balance(self, rate: float) -> None:
        """Make experts that got less than their share of the last batch likelier to be picked."""
        self.e_score_correction_bias += rate * (self.load.mean() - self.load).sign()


class Experts(nn.Module):
    """Stacked expert weights: up_proj [E, I, H], down_proj [E, H, I]."""

    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        shape = config.n_routed_experts, config.moe_intermediate_size, config.hidden_size
        self.up_proj = nn.Parameter(torch.empty(shape))
        self.down_proj = nn.Parameter(torch.empty(shape[0], shape[2], shape[1]))

    def forward(self, hidden: Tensor, weights: Tensor) -> Tensor:
        up = F.relu(F.linear(hidden, self.up_proj.flatten(0, 1))).square()
        up = up.unflatten(-1, self.up_proj.shape[:2]) * weights[..., None].to(up.dtype)
        return F.linear(up.flatten(-2), self.down_proj.transpose(0, 1).flatten(1))


class MoE(nn.Module):
    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        self.gate = Router(config)
        self.experts = Experts(config)
        self.shared_experts = MLP(config.hidden_size, config.moe_shared_expert_intermediate_size)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.experts(hidden, self.gate(hidden)) + self.shared_experts(hidden)


def make_mixer(letter: str, config: DemoConfig) -> nn.Module:
    if letter == "M":
        return Mamba2(config)
    if letter == "*":
        return Attention(config)
    if letter == "-":
        return MLP(config.hidden_size, config.intermediate_size)
    if letter == "E":
        return MoE(config)
    raise ValueError(f"{letter!r} is no layer kind: M, *, - and E are")


class Block(nn.Module):
    """hidden + dropout(mixer(norm(hidden))). keep: [B, 1, 1], the part that each row's dropout lets through."""

    def __init__(self, letter: str, config: DemoConfig) -> None:
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, config.layer_norm_epsilon)
        self.mixer = make_mixer(letter, config)

    def forward(self, hidden: Tensor, keep: Tensor | None = None) -> Tensor:
        return hidden + dropout(self.mixer(self.norm(hidden)), keep)


class MTPHead(nn.Module):
    """Guesses the token after next from the final hidden state and the next token's embedding.

    The embedding is the first half of what `eh_proj` reads; the hidden state comes from behind `norm_f`.
    """

    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.layer_norm_epsilon
        self.layers = nn.ModuleList([Block("*", config), Block("E", config)])
        self.layers[0].eh_proj = nn.Linear(2 * width, width, bias=False)
        self.layers[0].enorm = RMSNorm(width, eps)
        self.layers[0].hnorm = RMSNorm(width, eps)
        self.layers[1].final_layernorm = RMSNorm(width, eps)

    def forward(self, embedded: Tensor, hidden: Tensor, keep: Tensor | None = None) -> Tensor:
        first, last = self.layers
        both = torch.cat([first.enorm(embedded), first.hnorm(hidden)], dim=-1)
        hidden = first.eh_proj(both).to(hidden.dtype)  # under autocast, the residual stream stays float32
        return last.final_layernorm(last(first(hidden, keep), keep))


class Backbone(nn.Module):
    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(letter, config) for letter in config.hybrid_override_pattern)
        self.norm_f = RMSNorm(config.hidden_size, config.layer_norm_epsilon)

    def forward(self, ids: Tensor, keep: Tensor | None = None) -> Tensor:
        hidden = dropout(self.embeddings(ids), keep)
        for layer in self.layers:
            hidden = layer(hidden, keep)
        return self.norm_f(hidden)


class DemoModel(nn.Module):
    """The whole model. `hidden_states` gives what both heads read; `logits` reads it."""

    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        self.config = config
        self.backbone = Backbone(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.mtp = MTPHead(config)
        self._initialise()

    def hidden_states(self, ids: Tensor, keep: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """ids: [B, L + 1]. Results: [B, L, H] at token t, to guess t + 1 and, by the MTP head, t + 2."""
        hidden = self.backbone(ids[:, :-1], keep)
        return hidden, self.mtp(self.backbone.embeddings(ids[:, 1:]), hidden, keep)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.lm_head(hidden)

    def forward(self, ids: Tensor) -> Tensor:
        """ids: [B, L]. Result: logits [B, L, V]."""
        return self.logits(self.backbone(ids))

    def routers(self) -> list[Router]:
        return [module for module in self.modules() if isinstance(module, Router)]

    @torch.no_grad()
    def _initialise(self) -> None:
        """Unit gain in, 1/√depth out, so that the residual stream has about unit scale at any depth."""
        depth = len(self.backbone.layers) + len(self.mtp.layers)
        for name, parameter in self.named_parameters():
            if parameter.ndim < 2:
                continue
            out = name.endswith(("out_proj.weight", "o_proj.weight", "down_proj", "down_proj.weight"))
            parameter.normal_(std=parameter.shape[-1] ** -0.5 * (depth**-0.5 if out else 1.0))
        self.backbone.embeddings.weight.normal_(std=0.5)
        self.lm_head.weight.normal_(std=0.02)
        for module in self.modules():
            if isinstance(module, Mamba2):
                _initialise_mamba(module)


def _initialise_mamba(mixer: Mamba2) -> None:
    """The paper's: time steps log-uniform in [0.001, 0.1], A uniform in [-16, -1]."""
    step = torch.empty_like(mixer.dt_bias).uniform_(math.log(0.001), math.log(0.1)).exp()
    mixer.dt_bias.copy_(step + (-torch.expm1(-step)).log())  # the inverse of softplus
    mixer.A_log.copy_(torch.empty_like(mixer.A_log).uniform_(1, 16).log())
    nn.init.uniform_(mixer.conv1d.weight, -0.5, 0.5)
    nn.init.zeros_(mixer.conv1d.bias)


def dropout(x: Tensor, keep: Tensor | None) -> Tensor:
    """Dropout with a rate of its own for each row: text is regularised, the tasks, always new, are not."""
    if keep is None:
        return x
    return x * ((torch.rand_like(x, dtype=torch.float32) < keep) / keep).to(x.dtype)
