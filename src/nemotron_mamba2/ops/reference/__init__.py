"""Plain PyTorch for every op: the specification, and the CPU back end.

Written to be read beside the equations and fast enough to be the default on a CPU: batched matrix products, Python
loops over sequences and chunks but never over the tokens of a prompt. Runs on any device that torch runs on.
"""

from .linear import linear, norm_linear, norm_linear_residual, rms_norm
from .mamba2 import CHUNK_ROWS, conv, scan, scan_rows, step
from .quantize import quantize

__all__ = [
    "CHUNK_ROWS",
    "conv",
    "linear",
    "norm_linear",
    "norm_linear_residual",
    "quantize",
    "rms_norm",
    "scan",
    "scan_rows",
    "step",
]
