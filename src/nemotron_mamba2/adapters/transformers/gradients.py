"""Results of ours inside a graph of autograd: they pass on, but no gradient goes back through them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ... import AdapterError


def without_gradient(out: Tensor, x: Tensor, module: nn.Module) -> Tensor:
    """out, so that a backward pass through it raises instead of giving wrong gradients.

    x, module: the input, and what computed out under no_grad.
    """
    if not torch.is_grad_enabled():
        return out
    anchor = next((p for p in (x, *module.parameters()) if p.requires_grad), None)
    return out if anchor is None else _NoGradient.apply(out, anchor)


class _NoGradient(torch.autograd.Function):
    """Passes its first argument on; the second one ties it to the graph."""

    @staticmethod
    def forward(context: Any, out: Tensor, anchor: Tensor) -> Tensor:
        return out.view_as(out)

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        raise AdapterError(
            "an accelerated Mamba-2 layer has no gradient in eval mode, a quantised layer never; "
            "call model.train(), or restore(model)"
        )
