"""NemotronH: token ids in, logits out. Embeddings, the layer pattern, norm_f, lm_head; the MTP head where there is one.

The model owns weights and nothing per sequence: state and pages live in `Caches`, the sequences and rows of a step
in a `Batch`. `forward` is one step, made of parts that a caller may run by itself: `hidden_states` (all layers),
`final_norm`, `logits` and `draft`. Nothing here waits for the device.

Logits are fp32 products of the hidden state and the weight as it is (blocks of it are upcast), never rounded to bf16:
two tokens tie only when they are equal. They are computed only for the rows asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from ..batch import Batch, Step
from ..config import AttentionConfig, LayerConfig, Mamba2Config, MlpConfig, ModelConfig, MoeConfig
from ..errors import CheckpointError, ConfigError, ShapeError
from ..formats import Plain, Weight, dequantize, gather
from ..layer import NemotronMamba2Layer
from ..ops import backend
from ..plan import Capabilities, HostStep, ModelPlan, Plan, combine
from ..weights import AttentionWeights, LayerWeights, Mamba2Weights, MlpWeights, ModelWeights, MoeWeights
from .attention import AttentionLayer
from .caches import Caches, CacheStep, kv_layers
from .mlp import MlpLayer
from .moe import MoeLayer
from .mtp import MtpHead
from .shapes import check_shapes

Layer: TypeAlias = NemotronMamba2Layer | AttentionLayer | MlpLayer | MoeLayer
LogitsRows: TypeAlias = Literal["last", "all"] | Sequence[int]


class NemotronH:
    """A whole model, ready to run. plan: from `plan_model`. Raises: ConfigError, ShapeError, NoKernel."""

    def __init__(self, config: ModelConfig, weights: ModelWeights, plan: ModelPlan) -> None:
        table = (config.vocab_size, config.hidden_size)
        check_shapes("model", weights, {"embeddings": table, "lm_head": table, "norm_f": (config.hidden_size,)})
        if len(config.layers) != len(weights.layers):
            raise ConfigError(f"model: the config has {len(config.layers)} layers, the weights {len(weights.layers)}")
        self.config = config
        self.weights = weights
        self.plan = plan
        self.device = plan.outer.device
        self.dtype = plan.outer.dtype
        self._ops = backend(self.device)
        outer = plan.outer.prepare(_Outer(weights))  # type: ignore[arg-type]
        self._embeddings, self._lm_head = outer["embeddings"], outer["lm_head"]
        self.layers: list[Layer] = _build_layers(config, weights, plan)
        self.mtp: MtpHead | None = None
        if weights.mtp is not None:
            first = len(kv_layers(replace(config, mtp_layers=())))
            self.mtp = MtpHead(config, weights.mtp, plan.mtp, eh_proj=outer["eh_proj"], first_kv_layer=first)

    @property
    def capabilities(self) -> Capabilities:
        """What all layers can do together."""
        return combine([layer.capabilities for layer in self.layers])

    def forward(self, tokens: Tensor, batch: Batch, caches: Caches, *, logits_rows: LogitsRows = "last") -> Tensor:
        """Run one step: every row of the batch through every layer.

        tokens: int64 [T], ids of the batch's rows. logits_rows: "last": of the last row of every sequence that has
        rows, in order; "all"; or indices of rows. Returns: fp32 [rows asked for, vocab]. Raises: ShapeError,
        StateError, OutOfPages; nothing has been written then.
        """
        if tokens.shape != (batch.total_rows,):
            raise ShapeError(f"forward: the batch needs tokens [{batch.total_rows}], found {list(tokens.shape)}")
        pieces = caches.pieces(batch)
        hidden = torch.empty(len(tokens), self.config.hidden_size, dtype=self.dtype, device=self.device)
        done = [0] * len(batch.slots)
        for piece in pieces:
            rows = slice(None) if len(pieces) == 1 else _rows_of_piece(batch, piece, done, hidden.device)
            with caches.step(piece) as opened:
                hidden[rows] = self.hidden_states(tokens[rows], opened)
            caches.keep_snapshots(batch)
            done = [before + now for before, now in zip(done, piece.rows, strict=True)]
        picked = pick_rows(hidden, batch, logits_rows)
        return self.logits(self.final_norm(picked))

    def hidden_states(self, tokens: Tensor, opened: CacheStep) -> Tensor:
        """All layers over the rows of an opened step, with the host work of layers that have some around it.

        tokens: int64 [T]. Returns: [T, hidden] in the activation dtype, before `final_norm`.
        """
        hooks = [layer.host_step for layer in self.layers if layer.host_step is not None]
        with host_steps(hooks, opened.step):
            return self.run_layers(self.embed(tokens), opened)

    def run_layers(self, hidden: Tensor, opened: CacheStep) -> Tensor:
        """All layers over embedded rows, without host work around them: what a graph captures. [T, hidden] → same."""
        for layer in self.layers:
            if isinstance(layer, NemotronMamba2Layer):
                hidden = layer(hidden, opened.step, opened.state)
            elif isinstance(layer, AttentionLayer):
                hidden = layer(hidden, opened.step, opened.table)
            else:
                hidden = layer(hidden, opened.step)
        return hidden

    def draft(
        self, hidden: Tensor, next_tokens: Tensor, opened: CacheStep, *, logits_rows: LogitsRows = "last"
    ) -> tuple[Tensor, Tensor]:
        """Run the MTP head over the rows of an opened step: logits of the token after next.

        hidden: [T, hidden], after `final_norm`, or what the draft before returned. next_tokens: int64 [T], the token
        that follows each row. Returns: fp32 [rows asked for, vocab], and [T, hidden] for the next draft. Raises:
        CheckpointError when the model has no MTP head.
        """
        if self.mtp is None:
            raise CheckpointError("draft: the model was loaded without an MTP head; load it with mtp=True")
        new = self.mtp(self.embed(next_tokens), hidden, opened.step, pages=opened.table)
        return self.logits(pick_rows(new, opened.step.batch, logits_rows)), new

    def embed(self, tokens: Tensor) -> Tensor:
        """int64 [T] → [T, hidden] in the activation dtype."""
        weight = self._embeddings.weight
        values = weight.weight if isinstance(weight, Plain) else self._embeddings.copy
        if values is not None:
            return F.embedding(tokens, values).to(self.dtype)
        return dequantize(gather(weight, tokens), self.dtype)

    def final_norm(self, hidden: Tensor) -> Tensor:
        """RMSNorm with `norm_f` of any rows: [T, hidden]."""
        normed: Tensor = self._ops.rms_norm(hidden, self.weights.norm_f, eps=self.config.layer_norm_epsilon)
        return normed

    def logits(self, normed: Tensor) -> Tensor:
        """lm_head over any rows: [T, hidden] → fp32 [T, vocab]. Each row counts as a step row."""
        # On a CPU the product upcasts blocks of the weight. On AVX2, 32768 × 3136: 35 ms against 22 for a product
        # rounded to bf16 at one row, 71 against 156 at eight.
        out = torch.empty(len(normed), self.config.vocab_size, dtype=torch.float32, device=normed.device)
        found: Tensor = self._ops.linear(normed, self._lm_head, "step", out=out)
        return found


@contextmanager
def host_steps(hooks: Sequence[HostStep], step: Step) -> Iterator[None]:
    """Host work around a step, eager or replayed: `before` in order, then `after` in order once the step succeeded.

    When it raises, `undo` in reverse order of those that had begun.
    """
    begun: list[HostStep] = []
    try:
        for hook in hooks:
            hook.before(step)
            begun.append(hook)
        yield
    except BaseException:
        for hook in reversed(begun):
            hook.undo(step)
        raise
    for hook in begun:
        hook.after(step)


def pick_rows(hidden: Tensor, batch: Batch, which: LogitsRows) -> Tensor:
    """The rows of hidden [T, …] that logits are wanted for (`NemotronH.forward`)."""
    if which == "all":
        return hidden
    if which == "last":
        ends = [sum(batch.rows[: i + 1]) for i in range(len(batch.rows))]
        which = [end - 1 for end, count in zip(ends, batch.rows, strict=True) if count]
    if list(which) == list(range(len(hidden))):
        return hidden
    return hidden[_on_device(which, hidden.device)]


def _rows_of_piece(batch: Batch, piece: Batch, done: Sequence[int], device: torch.device) -> Tensor:
    """Rows of the batch that a piece of it runs, when so many rows of each sequence are done."""
    starts = [sum(batch.rows[:i]) for i in range(len(batch.rows))]
    pairs = zip(starts, done, piece.rows, strict=True)
    return _on_device([s + d + j for s, d, count in pairs for j in range(count)], device)


def _on_device(rows: Sequence[int], device: torch.device) -> Tensor:
    """Row indices, int64 [·], by a copy that does not wait for the device."""
    return torch.tensor(rows, dtype=torch.int64).to(device, non_blocking=True)


@dataclass(frozen=True, eq=False)
class _Outer:
    """The projections outside the layers, by the names of the plan."""

    weights: ModelWeights

    def projections(self) -> Iterator[tuple[str, Weight]]:
        yield "embeddings", self.weights.embeddings
        yield "lm_head", self.weights.lm_head
        if self.weights.mtp is not None:
            yield "eh_proj", self.weights.mtp.eh_proj


def _build_layers(config: ModelConfig, weights: ModelWeights, plan: ModelPlan) -> list[Layer]:
    layers: list[Layer] = []
    counts = {"M": 0, "*": 0}
    for i, (shape, own, how) in enumerate(zip(config.layers, weights.layers, plan.layers, strict=True)):
        try:
            layers.append(_build_layer(shape, own, how, counts))
        except ShapeError as error:
            raise ShapeError(f"layer {i}: {error}") from None
    return layers


def _build_layer(config: LayerConfig, weights: LayerWeights, plan: Plan, counts: dict[str, int]) -> Layer:
    """counts: how many layers of a kind there are so far; it is counted up here."""
    if isinstance(config, Mamba2Config) and isinstance(weights, Mamba2Weights):
        counts["M"] += 1
        return NemotronMamba2Layer(config, weights, plan, index=counts["M"] - 1)
    if isinstance(config, AttentionConfig) and isinstance(weights, AttentionWeights):
        counts["*"] += 1
        return AttentionLayer(config, weights, plan, index=counts["*"] - 1)
    if isinstance(config, MlpConfig) and isinstance(weights, MlpWeights):
        return MlpLayer(config, weights, plan)
    if isinstance(config, MoeConfig) and isinstance(weights, MoeWeights):
        return MoeLayer(config, weights, plan)
    raise ConfigError(f"model: the config says {type(config).__name__}, the weights are {type(weights).__name__}")
