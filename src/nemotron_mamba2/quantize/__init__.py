"""A checkpoint in BF16 becomes one in ModelOpt's layout, in FP8, NVFP4 or a mix of them.

choice       which projection gets which format: presets, recipe files
calibrate    the largest input of every projection over a text
layout       the tensors of the output, their names, shapes and places in files
rows         one matrix, some rows at a time: codes, scales, errors
configs      hf_quant_config.json and quantization_config
convert      the whole: checks, streaming, and a folder that appears complete or not at all
report       what was written, and how far it is from the source

Nothing is guessed for the user: what stays in BF16 is listed in the config files and in the report.
"""

from .choice import PRESETS, SEARCHES, read_recipe
from .convert import quantize_checkpoint
from .report import QuantizationReport, TensorReport

__all__ = ["PRESETS", "SEARCHES", "QuantizationReport", "TensorReport", "quantize_checkpoint", "read_recipe"]
