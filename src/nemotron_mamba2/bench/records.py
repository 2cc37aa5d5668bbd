"""What a figure stands for: the record of one measurement, and the run that it belongs to.

Every command under `bench` writes records of this form, so that files of different runs can be put side by side.
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, TypeAlias

import torch

from ..config import Mamba2Config
from .timing import Ceilings

Record: TypeAlias = dict[str, Any]

SHAPES = {
    "nano30b": Mamba2Config(2688, 64, 64, 8, 128),
    "super120b": Mamba2Config(4096, 128, 64, 8, 128),
    "nano4b": Mamba2Config(3136, 96, 80, 8, 128),
    "9b-v2": Mamba2Config(4480, 128, 80, 8, 128),
    "ultra550b": Mamba2Config(8192, 256, 64, 8, 128),
}


@dataclass(frozen=True)
class Run:
    """Where and with what a run measures. commit: of the package's source."""

    ceilings: Ceilings
    device: str
    torch: str
    triton: str
    commit: str


def describe_run(ceilings: Ceilings, commit: str | None = None) -> Run:
    """The run on the current CUDA device. commit: None asks git."""
    try:
        triton = metadata.version("triton")
    except metadata.PackageNotFoundError:
        triton = ""
    return Run(ceilings, torch.cuda.get_device_name(), torch.__version__, triton, commit or _commit())


def record(
    run: Run,
    *,
    shape: str,
    format: str,
    rows: int,
    prefill_tokens: int,
    window_rows: int,
    state_dtype: str,
    us_per_layer: float,
    nbytes: float,
    peers: dict[str, float],
    **more: Any,
) -> Record:
    """One measurement of one layer. rows: step rows, prefill_tokens: prompt rows. nbytes: what a layer must move, for
    the rate and its share of the copy ceiling. more: keys of one command alone."""
    rate = nbytes / us_per_layer / 1e3
    return {
        "shape": shape,
        "format": format,
        "rows": rows,
        "prefill_tokens": prefill_tokens,
        "window_rows": window_rows,
        "state_dtype": state_dtype,
        "us_per_layer": round(us_per_layer, 2),
        "gbytes_per_s": round(rate, 1),
        "hbm_share": round(rate / 1e3 / run.ceilings.copy_tb_s, 3),
        "peers": {name: round(us, 2) for name, us in peers.items()},
        "device": run.device,
        "torch": run.torch,
        "triton": run.triton,
        "commit": run.commit,
        **more,
    }


def _commit() -> str:
    """The commit of the source, or "" outside a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
