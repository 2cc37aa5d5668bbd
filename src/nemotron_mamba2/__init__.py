"""Run NVIDIA's Nemotron-H models, and their Mamba-2 layer alone.

The names below are the public surface. They load when first used, so that the command line answers without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .batch import Batch, Step
    from .checkpoint import load_layer, load_model
    from .config import Mamba2Config, ModelConfig, Policy
    from .errors import AdapterError, NemotronMamba2Error
    from .formats import Fp8Block, Fp8Channel, Fp8Tensor, Nvfp4, Plain, Weight, dequantize, gather
    from .generate import Completion, Model, TokenEvent
    from .graph import StepGraph
    from .layer import NemotronMamba2Layer
    from .plan import Capabilities, Plan, make_plan
    from .projection import Projection, RoutedExperts
    from .quantize import quantize_checkpoint
    from .sampling import SamplingParams
    from .state import Snapshot, StatePool
    from .weights import Mamba2Weights

__version__ = "0.1.0"

_HOMES = {
    "AdapterError": "errors",
    "Batch": "batch",
    "Capabilities": "plan",
    "Completion": "generate",
    "Fp8Block": "formats",
    "Fp8Channel": "formats",
    "Fp8Tensor": "formats",
    "Mamba2Config": "config",
    "Mamba2Weights": "weights",
    "Model": "generate",
    "ModelConfig": "config",
    "NemotronMamba2Error": "errors",
    "NemotronMamba2Layer": "layer",
    "Nvfp4": "formats",
    "Plain": "formats",
    "Plan": "plan",
    "Policy": "config",
    "Projection": "projection",
    "RoutedExperts": "projection",
    "SamplingParams": "sampling",
    "Snapshot": "state",
    "StatePool": "state",
    "Step": "batch",
    "StepGraph": "graph",
    "TokenEvent": "generate",
    "Weight": "formats",
    "dequantize": "formats",
    "gather": "formats",
    "load_layer": "checkpoint",
    "load_model": "checkpoint",
    "make_plan": "plan",
    "quantize_checkpoint": "quantize",
}

__all__ = [
    "AdapterError",
    "Batch",
    "Capabilities",
    "Completion",
    "Fp8Block",
    "Fp8Channel",
    "Fp8Tensor",
    "Mamba2Config",
    "Mamba2Weights",
    "Model",
    "ModelConfig",
    "NemotronMamba2Error",
    "NemotronMamba2Layer",
    "Nvfp4",
    "Plain",
    "Plan",
    "Policy",
    "Projection",
    "RoutedExperts",
    "SamplingParams",
    "Snapshot",
    "StatePool",
    "Step",
    "StepGraph",
    "TokenEvent",
    "Weight",
    "dequantize",
    "gather",
    "load_layer",
    "load_model",
    "make_plan",
    "quantize_checkpoint",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
