"""The adapter for transformers: `pip install nemotron-mamba2[transformers]`, then

    from nemotron_mamba2.adapters.transformers import accelerate

`accelerate(model)` runs the Mamba-2 layers of a loaded Nemotron-H model by ours, `restore(model)` undoes it.
"""

from .mixers import accelerate, restore

__all__ = ["accelerate", "restore"]
