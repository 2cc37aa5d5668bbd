"""Modules that hold quantised weights as they lie in the files, and run them by our ops.

Each takes the place of a module of transformers: a linear layer, the embeddings, or the experts of a layer. Weights and
scales are buffers, so they count in the memory footprint and move with the model; `.to(dtype)` leaves them alone. What
a kernel needs beyond them is made at the first call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn

from ... import Policy, Projection, RoutedExperts, Weight, dequantize, gather
from .cache import DRAFT_ROWS, MambaState
from .gradients import without_gradient

Role = Any  # "prompt" or "step"


class Roles:
    """Which role the rows of the forward under way have. transformers does not say it to its linear layers, so a hook
    on the model looks: a sequence that goes on with few rows has step rows, all else are prompt rows."""

    def __init__(self) -> None:
        self.role: Role = "prompt"

    def observe(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Forward pre-hook of the model without its head."""
        ids = args[0] if args else kwargs.get("input_ids")
        ids = kwargs.get("inputs_embeds") if ids is None else ids
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        started = cache is not None and any(
            state.started if isinstance(state, MambaState) else any(getattr(state, "has_previous_state", {}).values())
            for state in getattr(cache, "layers", ())
        )
        self.role = "step" if started and ids is not None and ids.shape[1] <= DRAFT_ROWS else "prompt"


class Quantised(nn.Module):
    """Keeps weights as buffers. prefixes: one per weight, in front of its buffers' names."""

    def __init__(self, roles: Roles | None, *prefixes: str) -> None:
        super().__init__()
        self.roles = roles
        self.policy = Policy()
        self.granted_bytes = 0
        self._prefixes = prefixes
        self._types: list[tuple[type, dict[str, Any]]] = []
        self._made: dict[str, Any] = {}

    def hold(self, *weights: Weight) -> None:
        """Take these weights."""
        self._types, self._made = [], {}
        for prefix, weight in zip(self._prefixes, weights, strict=True):
            parts = {field.name: getattr(weight, field.name) for field in fields(weight)}
            for name, part in parts.items():
                if isinstance(part, Tensor):
                    self.register_buffer(prefix + name, part)
            self._types.append((type(weight), {n: p for n, p in parts.items() if not isinstance(p, Tensor)}))

    def weights(self) -> list[Weight]:
        """What it holds now."""
        if "weights" not in self._made:
            self._made["weights"] = [
                kind(
                    **rest,
                    **{
                        field.name: self.get_buffer(prefix + field.name)
                        for field in fields(kind)
                        if field.name not in rest
                    },
                )
                for prefix, (kind, rest) in zip(self._prefixes, self._types, strict=True)
            ]
        found: list[Weight] = self._made["weights"]
        return found

    def use(self, policy: Policy, granted_bytes: int) -> None:
        """Run by this policy from now on, with so much memory for copies."""
        self.policy, self.granted_bytes = policy, granted_bytes
        self._made = {}

    @property
    def role(self) -> Role:
        return "step" if self.roles is None else self.roles.role

    @property
    def budget_bytes(self) -> int:
        """What copies may take: what was granted, and on a GPU as much as the matrices (NVFP4 is repacked there)."""
        weights = self.weights()
        if weights[0].weight.device.type == "cpu":
            return self.granted_bytes
        return max(self.granted_bytes, sum(weight.nbytes for weight in weights))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Quantised:
        def move(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        self._made = {}
        super()._apply(move, recurse)
        return self

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_made": {}}

    def extra_repr(self) -> str:
        """Formats and shapes."""
        return ", ".join(f"{w.format} {list(w.shape)}" for w in self.weights()) if self._types else "not loaded"


class QuantisedLinear(Quantised):
    """A linear layer without bias, in any format. roles: None for lm_head, whose rows all count as step rows."""

    def __init__(self, in_features: int, out_features: int, roles: Roles | None) -> None:
        super().__init__(roles, "")
        self.in_features, self.out_features = in_features, out_features
        self.bias = None  # mixers of transformers look

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] → [..., out] in the dtype of x."""
        made = self._made.get("run")
        if made is None or made.plan.dtype != x.dtype:
            [weight] = self.weights()
            made = Projection(weight, self.policy, dtype=x.dtype, budget_bytes=self.budget_bytes)
            self._made["run"] = made
        with torch.no_grad():
            out = made(x, self.role)
        return without_gradient(out, x, self)


class QuantisedEmbedding(Quantised):
    """Embeddings in any format; the rows asked for are dequantised to dtype."""

    def __init__(self, num_embeddings: int, embedding_dim: int, dtype: torch.dtype) -> None:
        super().__init__(None, "")
        self.num_embeddings, self.embedding_dim, self.dtype = num_embeddings, embedding_dim, dtype

    def forward(self, ids: Tensor) -> Tensor:
        """int64 [...] → [..., hidden]."""
        [weight] = self.weights()
        return dequantize(gather(weight, ids), self.dtype).view(*ids.shape, self.embedding_dim)


class QuantisedExperts(Quantised):
    """The routed experts of one layer."""

    def __init__(self, roles: Roles) -> None:
        super().__init__(roles, "up_", "down_")

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """[T, w], the experts chosen for every row and what each is worth, [T, k] → [T, w]."""
        made = self._made.get("run")
        if made is None or made.plan.dtype != hidden_states.dtype:
            up, down = self.weights()
            made = RoutedExperts(up, down, self.policy, dtype=hidden_states.dtype, budget_bytes=self.budget_bytes)
            self._made["run"] = made
        with torch.no_grad():
            out = made(hidden_states, top_k_index, top_k_weights, role=self.role)
        return without_gradient(out, hidden_states, self)


def use_policy(model: nn.Module, policy: Policy) -> None:
    """Give every quantised module of a model the policy, and its memory to those that it suffices for, in order."""
    held = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    left = 0 if policy.memory_bytes is None else policy.memory_bytes - held
    itemsize = next(model.parameters()).dtype.itemsize
    for module in model.modules():
        if isinstance(module, Quantised):
            copy_bytes = sum(itemsize * torch.Size(weight.shape).numel() for weight in module.weights())
            granted = 0 if isinstance(module, QuantisedEmbedding) or copy_bytes > left else copy_bytes
            left -= granted
            module.use(policy, granted)
