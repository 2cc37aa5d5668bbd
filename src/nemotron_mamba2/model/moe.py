"""The mixture-of-experts layer (`E`): hidden + fc2(experts(fc1(x))) + shared(x), x = norm(hidden).

Router and shared expert read the full hidden width. Where the model has latent projections, the routed experts work in
the narrow width between `fc1_latent_proj` and `fc2_latent_proj`; else there are none. The router runs in fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..batch import Role, Step
from ..config import MoeConfig
from ..formats import Plain
from ..ops import Linear, Mixture, backend
from ..plan import Capabilities, HostStep, Plan
from ..weights import MoeWeights
from .shapes import check_shapes


class MoeLayer:
    """One mixture-of-experts layer, ready to run. Shapes are checked here, once. Raises: ShapeError."""

    capabilities = Capabilities(kind="E")
    host_step: HostStep | None = None

    def __init__(self, config: MoeConfig, weights: MoeWeights, plan: Plan) -> None:
        check_shapes("MoE", weights, _shapes(config))
        self.config = config
        self.weights = weights
        self.plan = plan
        self._ops = backend(plan.device)
        self._linears = plan.prepare(weights)
        self._gate = Linear(Plain(weights.gate), upcast=plan.upcast, reproducible=plan.reproducible)
        self._mixture = self._parts()
        self._fused = plan.device.type == "cuda" and not self._ops.unserved_mixture(self._mixture, config)

    def __call__(self, hidden: Tensor, step: Step) -> Tensor:
        """Run the layer over every row of a step. hidden: [T, hidden] in the plan's dtype. Returns: the same shape."""
        out = torch.empty_like(hidden)
        for role, rows in step.shares:
            mine = hidden[rows.slice]
            if self._fused and role == "step":
                self._ops.mixture(mine, self._mixture, config=self.config, out=out[rows.slice])
            else:
                out[rows.slice] = mine.float() + self._mix(mine, role)
        return out

    def _parts(self) -> Mixture:
        names = {"up": "experts_up", "down": "experts_down", "fc1": "fc1_latent_proj", "fc2": "fc2_latent_proj"}
        names |= {name: name for name in ("shared_up", "shared_down")}
        parts = {part: self._linears[name] for part, name in names.items() if name in self._linears}
        return Mixture(self.weights.norm, self._gate, self.weights.e_score_correction_bias, **parts)

    def _mix(self, hidden: Tensor, role: Role) -> Tensor:
        """fp32 [T, hidden], what the layer adds to the residual."""
        ops, linears = self._ops, self._linears
        x = ops.rms_norm(hidden, self.weights.norm, eps=self.config.layer_norm_epsilon)
        chosen, worth = ops.route(x, self._gate, self.weights.e_score_correction_bias, config=self.config, role=role)
        narrow = ops.linear(x, linears["fc1_latent_proj"], role) if "fc1_latent_proj" in linears else x
        mixed = ops.routed_experts(narrow, chosen, worth, linears["experts_up"], linears["experts_down"], role=role)
        if "fc2_latent_proj" in linears:
            mixed = ops.linear(mixed, linears["fc2_latent_proj"], role)
        if "shared_up" not in linears:
            return mixed.float()
        wide = ops.linear(x, linears["shared_up"], role)
        return mixed.float() + ops.linear(wide.relu_().square_(), linears["shared_down"], role)


def _shapes(config: MoeConfig) -> dict[str, tuple[int, ...]]:
    experts, hidden = config.n_routed_experts, config.hidden_size
    width, wide, shared = (
        config.expert_input_size,
        config.moe_intermediate_size,
        config.moe_shared_expert_intermediate_size,
    )
    shapes: dict[str, tuple[int, ...]] = {
        "norm": (hidden,),
        "gate": (experts, hidden),
        "e_score_correction_bias": (experts,),
        "experts_up": (experts, wide, width),
        "experts_down": (experts, width, wide),
    }
    if shared:
        shapes |= {"shared_up": (shared, hidden), "shared_down": (hidden, shared)}
    if config.moe_latent_size:
        shapes |= {"fc1_latent_proj": (width, hidden), "fc2_latent_proj": (hidden, width)}
    return shapes
