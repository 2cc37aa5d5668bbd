"""The multi-token-prediction head: from a token's final hidden state and the next token, the token after that.

    x = eh_proj([enorm(embed(next token)), hnorm(hidden)])      embedding half first
    hidden' = final_layernorm(layers(x))                         an attention and a MoE layer, each with its residual

hidden is the model's after `norm_f`, or hidden' of the draft before: the head may run again on its own output. Its
attention keeps keys and values of its own, at the same positions and in the same pages as the model's. Embeddings and
lm_head are the model's. Source: vLLM's `nemotron_h_mtp`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..batch import Step
from ..config import AttentionConfig, ModelConfig, MoeConfig
from ..errors import ConfigError
from ..ops import Linear, backend
from ..plan import Plan
from ..weights import AttentionWeights, MoeWeights, MtpWeights
from .attention import AttentionLayer
from .moe import MoeLayer
from .shapes import check_shapes
from .tables import PageTable


class MtpHead:
    """The head, ready to run. first_kv_layer: which of the page pool's layers its first attention layer uses."""

    def __init__(
        self, config: ModelConfig, weights: MtpWeights, plans: Sequence[Plan], *, eh_proj: Linear, first_kv_layer: int
    ) -> None:
        hidden = config.hidden_size
        shapes = {"eh_proj": (hidden, 2 * hidden), "enorm": (hidden,), "hnorm": (hidden,), "final_layernorm": (hidden,)}
        check_shapes("MTP", weights, shapes)
        self.config = config
        self.weights = weights
        self._ops = backend(plans[0].device)
        self._eh_proj = eh_proj
        self.layers: list[AttentionLayer | MoeLayer] = []
        kv_layer = first_kv_layer
        for layer, own, plan in zip(config.mtp_layers, weights.layers, plans, strict=True):
            if isinstance(layer, AttentionConfig) and isinstance(own, AttentionWeights):
                self.layers.append(AttentionLayer(layer, own, plan, index=kv_layer))
                kv_layer += 1
            elif isinstance(layer, MoeConfig) and isinstance(own, MoeWeights):
                self.layers.append(MoeLayer(layer, own, plan))
            else:
                raise ConfigError(f"MTP head: expected attention and MoE layers, found {type(layer).__name__}")

    def __call__(self, embedded: Tensor, hidden: Tensor, step: Step, *, pages: PageTable) -> Tensor:
        """Run the head over every row of a step.

        embedded: [T, hidden], embeddings of the token after each row. hidden: [T, hidden], of each row. Returns:
        [T, hidden], after final_layernorm.
        """
        ops, w, eps = self._ops, self.weights, self.config.layer_norm_epsilon
        both = torch.cat((ops.rms_norm(embedded, w.enorm, eps=eps), ops.rms_norm(hidden, w.hnorm, eps=eps)), -1)
        x = torch.cat([ops.linear(both[rows.slice], self._eh_proj, role) for role, rows in step.shares])
        for layer in self.layers:
            x = layer(x, step, pages) if isinstance(layer, AttentionLayer) else layer(x, step)
        normed: Tensor = ops.rms_norm(x, w.final_layernorm, eps=eps)
        return normed
