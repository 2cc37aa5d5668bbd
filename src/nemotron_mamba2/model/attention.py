"""The attention layer (`*`): hidden + o_proj(attention(q, k, v)) of norm(hidden); grouped queries, no rotary, no bias.

Keys and values live in the pages of a `PagePool`; the layer writes the rows of a step and then reads everything up to
them. FP8 pages use the checkpoint's k and v scales, 1 where it has none.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..batch import Role, Rows, Step
from ..config import AttentionConfig
from ..ops import backend
from ..plan import JOINED, Capabilities, HostStep, Plan
from ..weights import AttentionWeights
from .shapes import check_shapes
from .tables import PageTable


class AttentionLayer:
    """One attention layer, ready to run.

    index: which of the page pool's layers holds its keys and values. Shapes are checked here, once. Raises: ShapeError.
    """

    capabilities = Capabilities(kind="*", kv=True)
    host_step: HostStep | None = None

    def __init__(self, config: AttentionConfig, weights: AttentionWeights, plan: Plan, *, index: int = 0) -> None:
        queries, keys = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
        hidden = config.hidden_size
        shapes = {"norm": (hidden,), "q_proj": (queries, hidden), "k_proj": (keys, hidden), "v_proj": (keys, hidden)}
        check_shapes("attention", weights, shapes | {"o_proj": (hidden, queries)})
        self.config = config
        self.weights = weights
        self.plan = plan
        self.index = index
        self._ops = backend(plan.device)
        self._linears = plan.prepare(weights)

    def __call__(self, hidden: Tensor, step: Step, pages: PageTable) -> Tensor:
        """Run the layer over every row of a step.

        hidden: [T, hidden] in the plan's dtype. pages: the table of this step. Returns: [T, hidden].
        """
        out = torch.empty_like(hidden)
        for role, rows in step.shares:
            mine = hidden[rows.slice]
            found = self._attend(mine, rows, role, pages=pages)
            self._ops.linear(found, self._linears["o_proj"], role, residual=mine, out=out[rows.slice])
        return out

    def _project_in(self, hidden: Tensor, role: Role) -> tuple[Tensor, ...]:
        """q, k, v: [T, heads or kv_heads, head_dim]; rows at a stride where one product gives all three."""
        ops, linears, norm, eps = self._ops, self._linears, self.weights.norm, self.config.layer_norm_epsilon
        parts: Sequence[Tensor]
        if role == "step" and "qkv_proj" in linears:
            widths = [linears[name].weight.shape[0] for name in JOINED]
            parts = ops.norm_linear(hidden, norm, linears["qkv_proj"], eps=eps, role=role).split(widths, -1)
        else:
            x = ops.rms_norm(hidden, norm, eps=eps)
            parts = [ops.linear(x, linears[name], role) for name in JOINED]
        return tuple(part.unflatten(-1, (-1, self.config.head_dim)) for part in parts)

    def _attend(self, hidden: Tensor, rows: Rows, role: Role, *, pages: PageTable) -> Tensor:
        ops, w = self._ops, self.weights
        q, k, v = self._project_in(hidden, role)
        keys, values, where = pages.keys[self.index], pages.values[self.index], pages.pages(role)
        scales = {"k_scale": w.k_scale, "v_scale": w.v_scale}
        ops.store_kv(k, v, keys, values, where.places, **scales)
        found = ops.attention(
            q,
            keys,
            values,
            rows,
            role,
            pages=where,
            reproducible=self.plan.reproducible,
            **scales,
        )
        return found.flatten(1)
