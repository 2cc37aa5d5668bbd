"""Plain PyTorch for every op: the specification, and the CPU back end.

Written to be read beside the equations and fast enough to be the default on a CPU: batched matrix products, Python
loops over sequences and chunks but never over the tokens of a prompt. Runs on any device that torch runs on.
"""

from .attention import attention, store_kv
from .linear import linear, norm_linear, norm_linear_residual, rms_norm
from .mamba2 import CHUNK_ROWS, conv, scan, scan_rows, step
from .moe import route, routed_experts
from .quantize import quantize

__all__ = [
    "CHUNK_ROWS",
    "attention",
    "conv",
    "linear",
    "norm_linear",
    "norm_linear_residual",
    "quantize",
    "rms_norm",
    "route",
    "routed_experts",
    "scan",
    "scan_rows",
    "step",
    "store_kv",
]
