"""`nemotron-mamba2 bench layer`, where the package is on the path but not installed."""

import sys

from nemotron_mamba2.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "layer", *sys.argv[1:]]))
