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


def model_record(
    run: Run,
    *,
    shape: str,
    format: str,
    batch: int,
    context: int,
    step_us: float,
    step_with_host_us: float,
    kinds_us: dict[str, float],
    kinds_bytes: dict[str, float],
    layers: dict[str, int],
    first_token_ms: dict[str, float],
    memory: dict[str, int],
) -> Record:
    """One measurement of a whole model in steps of decode.

    kinds_us, kinds_bytes: of the layers of each kind alone, and of what stands before and after them ("ends").
    step_with_host_us: of steps in a row, as the host can queue them. first_token_ms: by prompt tokens. memory: bytes.
    """
    nbytes = sum(kinds_bytes.values())
    floor = nbytes / run.ceilings.read_tb_s / 1e6
    return {
        "model": shape,
        "format": format,
        "batch": batch,
        "context": context,
        "step_us": round(step_us, 1),
        "step_with_host_us": round(step_with_host_us, 1),
        "tokens_per_s": round(batch / step_us * 1e6, 1),
        "floor_us": round(floor, 1),
        "floor_share": round(floor / step_us, 3),
        "bytes_per_token": round(nbytes / batch),
        "gbytes_per_s": round(nbytes / step_us / 1e3, 1),
        "kinds": {
            kind: {
                "layers": layers.get(kind, 0),
                "us": round(us, 1),
                "floor_us": round(kinds_bytes[kind] / run.ceilings.read_tb_s / 1e6, 1),
                "share": round(us / step_us, 3),
            }
            for kind, us in kinds_us.items()
        },
        "first_token_ms": {tokens: round(ms, 2) for tokens, ms in first_token_ms.items()},
        "memory": memory,
        "ceilings": {"copy_tb_s": round(run.ceilings.copy_tb_s, 3), "read_tb_s": round(run.ceilings.read_tb_s, 3)},
        "device": run.device,
        "torch": run.torch,
        "triton": run.triton,
        "commit": run.commit,
    }


def _commit() -> str:
    """The commit of the source, or "" outside a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
