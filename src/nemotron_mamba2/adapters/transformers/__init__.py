"""The adapter for transformers: `pip install nemotron-mamba2[transformers]`, then

    from nemotron_mamba2.adapters.transformers import accelerate

`accelerate(model)` runs the Mamba-2 layers of a loaded Nemotron-H model by ours, `restore(model)` undoes it. Importing
this also registers the `modelopt` quantiser and a reader of every spelling of config.json with transformers, so that
`AutoModelForCausalLM.from_pretrained` loads all published Nemotron-H directories.
"""

from . import configs, quantizer
from .mixers import accelerate, restore
from .quantizer import ModelOptConfig

__all__ = ["ModelOptConfig", "accelerate", "restore"]

configs.register()
quantizer.register()
