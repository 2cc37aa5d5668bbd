"""`nemotron-mamba2 bench layer` by another name, and what the other programs of this folder use of it."""

import sys

from nemotron_mamba2.bench.layer import random_layer
from nemotron_mamba2.bench.records import SHAPES
from nemotron_mamba2.cli import main

__all__ = ["SHAPES", "random_layer"]

if __name__ == "__main__":
    sys.exit(main(["bench", "layer", *sys.argv[1:]]))
