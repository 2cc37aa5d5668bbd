"""Files to typed weights: every published layout, nothing unread, nothing guessed.

files        headers and index        → the tensors of a directory
names        their names              → one canonical name each; the skip rules
recipe       quantisation configs     → advice
projection   a weight and its scales  → a format
reader       each tensor, once        → vectors, projections, stacks of experts
layers       the model's order        → typed layers
loading      a directory or hub id    → weights
report       headers                  → what `inspect` prints
"""

from .files import TensorEntry
from .loading import Checkpoint, load_layer, load_model, resolve
from .names import Skipped
from .report import CheckpointReport, LayerReport, ProjectionReport, inspect_checkpoint

__all__ = [
    "Checkpoint",
    "CheckpointReport",
    "LayerReport",
    "ProjectionReport",
    "Skipped",
    "TensorEntry",
    "inspect_checkpoint",
    "load_layer",
    "load_model",
    "resolve",
]
