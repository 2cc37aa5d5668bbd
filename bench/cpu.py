"""Prefill and decode on a CPU, side by side with `transformers` on the same checkpoint.

    python bench/cpu.py [--model DIR] [--rounds N] [--threads N] [--json FILE]

The checkpoint is eight neighbouring layers of Nemotron-3-Nano-4B (`-MM-M-M*`: four Mamba-2, three MLP, one attention)
in their real widths with random bf16 weights, 2.8 GB; it is written once into a temporary folder, or into --model
when that folder is empty. Each side runs in a process of its own, with the same number of threads, and takes its turn
after the other in every round: a busy machine slows both. Both sides compute the logits of the last row only and pick
tokens greedily. The table shows medians over the rounds; a ratio is the median of the ratios of single rounds. Peak
memory is the largest sum of a process's anonymous memory, and its largest resident set with mapped files, from the
start of loading.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from sides import Side, serve, take_turns

ROOT = Path(__file__).parent.parent
NANO_4B = {
    "hidden_size": 3136,
    "intermediate_size": 12544,
    "mamba_num_heads": 96,
    "mamba_head_dim": 80,
    "n_groups": 8,
    "ssm_state_size": 128,
    "chunk_size": 256,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 131072,
}
PATTERN = "-MM-M-M*"  # layers 5 to 12 of Nano-4B
SIDES = ("nemotron_mamba2", "transformers")
PROMPT = 64  # tokens before the decoded ones
STEPS = 16  # decoded tokens per sequence and round: one window of the state
CASES = {"prefill 512": (512, 1), "prefill 2048": (2048, 1), "decode 1": (0, 1), "decode 8": (0, 8)}
BARS = {"prefill 512": 2.0, "prefill 2048": 2.5, "decode 1": 1.5, "decode 8": 1.5}


def write_checkpoint(directory: Path) -> Path:
    """The checkpoint, unless it is there."""
    if not (directory / "config.json").is_file():
        sys.path.insert(0, str(ROOT / "tests"))
        from checkpoints import write_model
        from random_models import small_config

        write_model(directory, small_config(PATTERN, **NANO_4B))
    return directory


# one side, in its own process ---------------------------------------------------------------------------------------


def random_tokens(batch: int, length: int) -> torch.Tensor:
    return torch.randint(100, NANO_4B["vocab_size"], (batch, length), generator=torch.Generator().manual_seed(length))


def our_side(directory: Path) -> Callable[[int, int], float]:
    """The package's forward: (prompt rows or 0, sequences) → tokens per second."""
    from nemotron_mamba2 import Batch, Model

    model = Model.from_checkpoint(directory)

    def run(length: int, batch: int) -> float:
        decode, rows = not length, length or PROMPT
        caches = model.caches(slots=batch, tokens=batch * (rows + STEPS + 1))
        slots = caches.acquire(batch)
        start = time.perf_counter()
        tokens = random_tokens(batch, rows).flatten()
        logits = model.network.forward(tokens, Batch.prefill(slots, [rows] * batch), caches)
        if decode:
            start = time.perf_counter()
            for _ in range(STEPS):
                logits = model.network.forward(logits.argmax(-1), Batch.decode(slots), caches)
        return batch * (STEPS if decode else rows) / (time.perf_counter() - start)

    return run


def transformers_side(directory: Path) -> Callable[[int, int], float]:
    """transformers' own model, cache and default attention."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    model = transformers.NemotronHForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).eval()
    for layer in model.model.layers:
        layer.mixer.time_step_limit = (0.0, math.inf)  # what the checkpoint says; it takes time_step_min else

    def run(length: int, batch: int) -> float:
        decode, rows = not length, length or PROMPT
        start = time.perf_counter()
        found = model(random_tokens(batch, rows), use_cache=True, logits_to_keep=1)
        if decode:
            start = time.perf_counter()
            for _ in range(STEPS):
                token = found.logits[:, -1].argmax(-1, keepdim=True)
                found = model(token, past_key_values=found.past_key_values, use_cache=True, logits_to_keep=1)
        return batch * (STEPS if decode else rows) / (time.perf_counter() - start)

    return run


# both sides ---------------------------------------------------------------------------------------------------------


def measure(directory: Path, rounds: int, threads: int) -> dict[str, Any]:
    """Tokens per second of every case, side and round, and peak memory in GB."""
    arguments = ["--model", str(directory), "--threads", str(threads)]
    sides = [Side(name, __file__, arguments) for name in SIDES]
    speeds = take_turns(sides, CASES, rounds)
    memory = {side.name: {key: kb * 1024 / 1e9 for key, kb in side.peak.items()} for side in sides}
    return {"tokens_per_second": speeds, "peak_gb": memory}


def summary(found: dict[str, Any]) -> list[dict[str, Any]]:
    """One row per measure: both sides, the ratio, and the bar that it must reach."""
    rows = []
    for case, speeds in found["tokens_per_second"].items():
        ours, theirs = (speeds[name] for name in SIDES)
        ratio = median(a / b for a, b in zip(ours, theirs, strict=True))
        row = {"measure": f"{case}, tokens/s", SIDES[0]: median(ours), SIDES[1]: median(theirs)}
        rows.append(row | {"ratio": ratio, "bar": f"≥ {BARS[case]}", "holds": ratio >= BARS[case]})
    for key, words in (("RssAnon", "peak anonymous memory, GB"), ("VmHWM", "peak with mapped files, GB")):
        ours, theirs = (found["peak_gb"][name][key] for name in SIDES)
        row = {"measure": words, SIDES[0]: ours, SIDES[1]: theirs}
        rows.append(row | {"ratio": ours / theirs, "bar": "< 1", "holds": ours < theirs})
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    lines = [f"| | {SIDES[0]} | {SIDES[1]} | ratio | bar |", "|---|---|---|---|---|"]
    for row in rows:
        numbers = " | ".join(f"{row[key]:.3g}" for key in (*SIDES, "ratio"))
        lines.append(f"| {row['measure']} | {numbers} | {row['bar']}{'' if row['holds'] else ' (missed)'} |")
    return "\n".join(lines)


def machine(threads: int) -> dict[str, Any]:
    """What the numbers belong to."""
    from importlib.metadata import version

    from nemotron_mamba2 import __version__

    info = Path("/proc/cpuinfo")
    names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    return {
        "device": f"{names[0] if names else platform.processor()}, {os.cpu_count()} cores, "
        + torch.backends.cpu.get_cpu_capability(),
        "threads": threads,
        "load_before": os.getloadavg()[0],
        "versions": {"nemotron-mamba2": __version__} | {name: version(name) for name in ("torch", "transformers")},
        "commit": commit,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, help="folder of the checkpoint, written when it is not there")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--json", type=Path, help="also write the JSON line there")
    parser.add_argument("--serve", choices=SIDES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        load = our_side if args.serve == "nemotron_mamba2" else transformers_side
        serve(lambda: load(args.model), args.threads)
        return
    about = machine(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        found = measure(write_checkpoint(args.model or Path(folder)), args.rounds, args.threads)
    rows = summary(found)
    print(table(rows))
    line = json.dumps({"bench": "cpu", **about, "rows": rows, **found})
    print(line)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(line + "\n")


if __name__ == "__main__":
    main()
