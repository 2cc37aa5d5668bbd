"""`python -m nemotron_mamba2`: the command line where the package is on the path but not installed."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
