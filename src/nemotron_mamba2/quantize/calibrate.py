"""The largest input of every projection over a text: what a static activation scale is made from.

The model runs as it is, with its layers' operations wrapped: each product notes the largest magnitude of what it
multiplies, and nothing else changes. The experts of a layer share theirs, because a text need not reach all of them;
ModelOpt does the same. The model is in memory meanwhile, unlike while quantising.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..batch import Batch, Role
from ..config import Policy
from ..errors import RequestError
from ..formats import Weight, dequantize
from ..generate import Model
from ..model import NemotronH
from ..ops import Linear

SEQUENCE_TOKENS = 2048
_NAMES = {"experts_up": "experts.*.up_proj", "experts_down": "experts.*.down_proj"} | {
    "shared_up": "shared_experts.up_proj",
    "shared_down": "shared_experts.down_proj",
}


@torch.inference_mode()
def largest_inputs(
    source: Path, text: str, *, device: str | torch.device, progress: Callable[[int, int], None] = lambda *_: None
) -> dict[str, float]:
    """Group of projections (`choice.Projection.group`) → largest magnitude of its input.

    text: what to run, in pieces of at most 2048 tokens, each from the start. progress: called with (tokens done,
    tokens). Raises: RequestError when the checkpoint has no tokenizer or the text no token.
    """
    model = Model.from_checkpoint(source, device=device, policy=Policy(prompt="exact"))
    if model.tokenizer is None:
        raise RequestError(f"{source}: a calibration text needs a tokenizer, and there is no tokenizer.json")
    ids = model.tokenizer.encode(text)
    if not ids:
        raise RequestError("calibration text: expected at least one token, came none")
    network = model.network
    notes = _Notes(network)
    longest = min(SEQUENCE_TOKENS, model.config.max_position_embeddings)
    caches = model.caches(slots=1, tokens=min(len(ids), longest))
    tokens = torch.tensor(ids, dtype=torch.int64, device=network.device)
    for first in range(0, len(ids), longest):
        piece = tokens[first : first + longest]
        [slot] = caches.acquire(1)
        try:
            with caches.step(Batch.prefill([slot], [len(piece)])) as opened:
                notes.note("lm_head", network.final_norm(network.hidden_states(piece, opened)))
        finally:
            caches.release([slot])
        progress(first + len(piece), len(ids))
    return {name: value.item() for name, value in notes.found.items()}


class _Notes:
    """The largest input of each projection, by name; wraps the operations of every layer of a network."""

    def __init__(self, network: NemotronH) -> None:
        self.found: dict[str, Tensor] = {}
        self.names: dict[int, str] = {}
        for index, (layer, weights) in enumerate(zip(network.layers, network.weights.layers, strict=True)):
            for name, weight in weights.projections():
                self.names[id(weight)] = f"layers.{index}.mixer.{_NAMES.get(name, name)}"
            # Layers look their operations up here at every call; no other door into them is wide enough.
            vars(layer)["_ops"] = _NotingOps(layer._ops, self)

    def note(self, which: Weight | str, x: Tensor) -> None:
        """Take in an input. which: the weight that multiplies it, or its name."""
        name = which if isinstance(which, str) else self.names.get(id(which))
        if name is not None and x.numel():
            largest = x.abs().amax().float()
            self.found[name] = torch.maximum(largest, self.found[name]) if name in self.found else largest


class _NotingOps:
    """A back end whose products note their inputs first; everything else is the back end's own."""

    def __init__(self, ops: Any, notes: _Notes) -> None:
        self._ops = ops
        self._notes = notes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def linear(self, x: Tensor, linear: Linear, role: Role, **rest: Any) -> Tensor:
        self._notes.note(linear.weight, x)
        return self._ops.linear(x, linear, role, **rest)

    def norm_linear(self, hidden: Tensor, norm_weight: Tensor, weight: Linear, **rest: Any) -> Tensor:
        self._notes.note(weight.weight, self._ops.rms_norm(hidden, norm_weight, eps=rest["eps"]))
        return self._ops.norm_linear(hidden, norm_weight, weight, **rest)

    def norm_linear_residual(self, y: Tensor, z: Tensor, norm_weight: Tensor, *rest: Any, **named: Any) -> Tensor:
        gated = y.float() * F.silu(z.float())
        normed = self._ops.rms_norm(gated, norm_weight, eps=named["eps"], groups=named["groups"])
        self._notes.note(rest[0].weight, normed)
        return self._ops.norm_linear_residual(y, z, norm_weight, *rest, **named)

    def routed_experts(self, x: Tensor, chosen: Tensor, weights: Tensor, *rest: Any, **named: Any) -> Tensor:
        up, down = rest
        self._notes.note(up.weight, x)
        for hidden in _expert_inputs(x, chosen, up.weight):
            self._notes.note(down.weight, hidden)
        return self._ops.routed_experts(x, chosen, weights, up, down, **named)


def _expert_inputs(x: Tensor, chosen: Tensor, up: Weight) -> Iterator[Tensor]:
    """What each expert's down_proj multiplies: fp32 [rows of the expert, intermediate]."""
    values = dequantize(up, x.dtype)
    for expert in chosen.unique().tolist():
        rows = (chosen == expert).any(-1)
        yield F.linear(x[rows].float(), values[expert].float()).relu().square()
