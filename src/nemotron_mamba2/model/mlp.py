"""The MLP layer (`-`): hidden + down(relu(up(norm(hidden)))²), without a gate."""

from __future__ import annotations

import torch
from torch import Tensor

from ..batch import Step
from ..config import MlpConfig
from ..ops import backend
from ..plan import Capabilities, HostStep, Plan
from ..weights import MlpWeights
from .shapes import check_shapes


class MlpLayer:
    """One MLP layer, ready to run. Shapes are checked here, once. Raises: ShapeError."""

    capabilities = Capabilities(kind="-")
    host_step: HostStep | None = None

    def __init__(self, config: MlpConfig, weights: MlpWeights, plan: Plan) -> None:
        wide, hidden = config.intermediate_size, config.hidden_size
        check_shapes("MLP", weights, {"norm": (hidden,), "up_proj": (wide, hidden), "down_proj": (hidden, wide)})
        self.config = config
        self.weights = weights
        self.plan = plan
        self._ops = backend(plan.device)
        linears = plan.prepare(weights)
        self._up, self._down = linears["up_proj"], linears["down_proj"]

    def __call__(self, hidden: Tensor, step: Step) -> Tensor:
        """Run the layer over every row of a step. hidden: [T, hidden] in the plan's dtype. Returns: the same shape."""
        out = torch.empty_like(hidden)
        for role, rows in step.shares:
            mine = hidden[rows.slice]
            wide = self._ops.norm_linear(
                mine, self.weights.norm, self._up, eps=self.config.layer_norm_epsilon, role=role
            )
            self._ops.linear(wide.relu_().square_(), self._down, role, residual=mine, out=out[rows.slice])
        return out
