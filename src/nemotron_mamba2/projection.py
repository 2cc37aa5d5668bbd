"""Matrices of any format, ready to run alone: for models of other libraries, whose layers are not ours.

A `Projection` is one linear layer, `RoutedExperts` the two stacks of a mixture of experts. Both are planned like the
projections of our own layers (activation handling per role, copies within a budget) and run by the same ops.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .batch import Role
from .config import Policy
from .errors import ShapeError
from .formats import Weight
from .ops import backend
from .plan import plan_loose
from .weights import LooseWeights


class Projection:
    """x · Wᵀ for one weight of any format, on its device.

    dtype: of the activations. budget_bytes: what copies of the weight may take; None: what policy or device leaves.
    Raises: NoKernel.
    """

    def __init__(
        self, weight: Weight, policy: Policy | None = None, *, dtype: torch.dtype, budget_bytes: int | None = None
    ) -> None:
        weights, device = LooseWeights(weight), weight.weight.device
        self.weight = weight
        self.plan = plan_loose(weights, policy or Policy(), device=device, dtype=dtype, budget_bytes=budget_bytes)
        self._linear = self.plan.prepare(weights)["up"]
        self._ops = backend(device)

    def __call__(self, x: Tensor, role: Role) -> Tensor:
        """x: [..., in] in the plan's dtype. role: whether its rows are prompt or step rows. Returns: [..., out]."""
        _expect_dtype("projection", x, self.plan.dtype)
        found: Tensor = self._ops.linear(x.reshape(-1, x.shape[-1]), self._linear, role)
        return found.view(*x.shape[:-1], found.shape[-1])


class RoutedExperts:
    """The weighted sum of every row's experts: Σ_k w_k · down_e(relu(up_e(x))²), e = chosen_k.

    up: [E, intermediate, w]; down: [E, w, intermediate]. The rest as for `Projection`. Raises: NoKernel, ShapeError.
    """

    def __init__(
        self,
        up: Weight,
        down: Weight,
        policy: Policy | None = None,
        *,
        dtype: torch.dtype,
        budget_bytes: int | None = None,
    ) -> None:
        if len(up.shape) != 3 or down.shape != (up.shape[0], up.shape[2], up.shape[1]):
            raise ShapeError(f"experts: up {list(up.shape)} and down {list(down.shape)} are no pair of stacks")
        weights, device = LooseWeights(up, down), up.weight.device
        self.plan = plan_loose(weights, policy or Policy(), device=device, dtype=dtype, budget_bytes=budget_bytes)
        linears = self.plan.prepare(weights)
        self._up, self._down = linears["up"], linears["down"]
        self._ops = backend(device)

    def __call__(self, x: Tensor, chosen: Tensor, weights: Tensor, *, role: Role) -> Tensor:
        """x: [T, w] in the plan's dtype. chosen: int64 [T, k]. weights: [T, k]. Returns: [T, w]."""
        _expect_dtype("experts", x, self.plan.dtype)
        found: Tensor = self._ops.routed_experts(x, chosen, weights.float(), self._up, self._down, role=role)
        return found


def _expect_dtype(what: str, x: Tensor, dtype: torch.dtype) -> None:
    if x.dtype != dtype:
        raise ShapeError(f"{what}: planned for {dtype} activations, found {x.dtype}; make one for that dtype")
