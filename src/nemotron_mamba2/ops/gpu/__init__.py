"""NVIDIA GPU back end: the names and signatures of `ops.reference`, served by kernels.

Step rows run CUDA C++ that NVRTC compiles at run time: `linear.cu`, `linear_wide.cu` (Hopper) and `linear_many.cu` for
products of every format (norms fused in at one row), also over stacks of experts (`moe.cu` sorts rows and chooses),
`step.cu` for convolution and recurrence; attention is Triton (`attention.py`). Prompt rows: `conv.cu` and `scan.cu`;
products on cuBLAS, with casts and dequantised weights from `cast.cu` and `dequantize.cu`; torch's flash attention. What
has no kernel here is the reference's own, which torch runs on the device.
"""

from ..reference import CHUNK_ROWS, quantize, scan_rows
from .attention import attention, store_kv
from .conv import conv
from .linear import linear, norm_linear, norm_linear_residual, pack, rms_norm, unserved
from .moe import mixture, route, routed_experts, unserved_mixture
from .scan import scan, unserved_mixer
from .step import step

__all__ = [
    "CHUNK_ROWS",
    "attention",
    "conv",
    "linear",
    "mixture",
    "norm_linear",
    "norm_linear_residual",
    "pack",
    "quantize",
    "rms_norm",
    "route",
    "routed_experts",
    "scan",
    "scan_rows",
    "step",
    "store_kv",
    "unserved",
    "unserved_mixer",
    "unserved_mixture",
]
