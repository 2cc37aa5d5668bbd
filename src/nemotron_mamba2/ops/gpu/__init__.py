"""NVIDIA GPU back end: the names and signatures of `ops.reference`, served by kernels.

Step rows: `linear.cu` (CUDA C++ through NVRTC) for norms and products of every format, `step.py` (Triton) for convolution
and recurrence; three launches per layer at few rows. Prompt rows: cuBLAS for products. What has no kernel here yet is the
reference's own, which torch runs on the device.
"""

from ..reference import *  # noqa: F403
from ..reference import __all__ as __all__
from .linear import check_linear, linear, norm_linear, norm_linear_residual, pack, rms_norm
from .step import step
