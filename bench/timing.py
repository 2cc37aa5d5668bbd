"""What the programs of this folder measure with: the package's own (`nemotron_mamba2.bench.timing`)."""

from dataclasses import asdict

from nemotron_mamba2.bench import timing
from nemotron_mamba2.bench.timing import captured, microseconds

__all__ = ["captured", "ceilings", "microseconds"]


def ceilings() -> dict[str, float]:
    """TB/s of a large copy and of a read, TFLOP/s of a bf16 product, on this device now."""
    return asdict(timing.ceilings())
