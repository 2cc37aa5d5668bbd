"""A Nemotron-H model of `transformers` as it is and after `accelerate`, side by side, on a CPU or a GPU.

    python bench/transformers.py [--device cpu|cuda] [--model DIR] [--rounds N] [--threads N] [--json FILE]

The checkpoint is that of `bench/cpu.py`: eight neighbouring layers of Nemotron-3-Nano-4B in their real widths, random
bf16 weights, 2.8 GB; written once into a temporary folder, or into --model when that folder is empty. Each side is a
process of its own and takes its turn after the others in every round. All run the same model class, cache and loop;
only the Mamba-2 layers differ. `torch`: what transformers falls back to; `kernels`: with mamba_ssm's Triton kernels and
causal_conv1d, where both can be imported (a line says when not); `accelerate`: ours. The table shows medians over the
rounds; a ratio is the median of the ratios of single rounds, accelerated against the other side.

The file is named like the library that it measures. Where this folder stands on the path before the library, an import
of that name comes here, and is passed on (last lines).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.machinery import PathFinder
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any

from sides import Side, Speeds, serve, take_turns

HERE = Path(__file__).resolve().parent
SIDES = ("torch", "kernels", "accelerate")
KERNELS = ("mamba_ssm", "causal_conv1d")
PROMPT, STEPS = 64, 16  # tokens before the decoded ones; decoded tokens per sequence and round
CASES = {
    "cpu": {"prefill 512": (512, 1), "prefill 2048": (2048, 1), "decode 1": (0, 1), "decode 8": (0, 8)},
    "cuda": {
        "prefill 2048": (2048, 1),
        "prefill 8 × 2048": (2048, 8),
        "prefill 16384": (16384, 1),
        "decode 1": (0, 1),
        "decode 8": (0, 8),
        "decode 64": (0, 64),
    },
}
BARS = {"prefill 2048": 2.0, "decode 1": 1.0, "decode 8": 1.0}  # on a CPU, against torch


def library() -> ModuleType:
    """transformers itself, whatever stands in front of it on the path."""
    paths = [path for path in sys.path if Path(path or ".").resolve() != HERE]
    spec = PathFinder.find_spec("transformers", paths)
    if spec is None or spec.loader is None:
        raise SystemExit("bench/transformers.py needs transformers: pip install 'nemotron-mamba2[transformers]'")
    sys.modules["transformers"] = module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return sys.modules["transformers"]


# one side, in its own process ---------------------------------------------------------------------------------------


def load(side: str, directory: Path, device: str) -> Callable[[int, int], float]:
    """One side's model: (prompt rows or 0, sequences) → tokens per second."""
    import torch

    if side == "torch":
        for name in KERNELS:
            sys.modules[name] = None  # type: ignore[assignment]  # as if it were not installed
    transformers = library()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).to(device).eval()
    for layer in model.model.layers:
        layer.mixer.time_step_limit = (0.0, math.inf)  # what the checkpoint says; it takes time_step_min else
    if side == "accelerate":
        from nemotron_mamba2.adapters.transformers import accelerate

        accelerate(model)
    vocab = model.config.vocab_size
    name = "cache" if hasattr(transformers.modeling_outputs.MoeCausalLMOutputWithPast, "cache") else "past_key_values"

    def forward(tokens: Any, cache: Any = None) -> tuple[Any, Any]:
        how = {} if cache is None else {name: cache}
        found = model(tokens, use_cache=True, logits_to_keep=1, **how)
        return found.logits[:, -1].argmax(-1, keepdim=True), getattr(found, name)

    def run(length: int, batch: int) -> float:
        draw = torch.Generator().manual_seed(length)
        tokens = torch.randint(100, vocab, (batch, length or PROMPT), generator=draw).to(device)
        wait(device)
        start = time.perf_counter()
        token, cache = forward(tokens)
        if not length:
            wait(device)
            start = time.perf_counter()
            for _ in range(STEPS):
                token, cache = forward(token, cache)
        wait(device)
        return batch * (length or STEPS) / (time.perf_counter() - start)

    return run


def wait(device: str) -> None:
    if device == "cuda":
        import torch

        torch.cuda.synchronize()


# all sides ----------------------------------------------------------------------------------------------------------


def measure(
    directory: Path, names: list[str], cases: dict[str, tuple[int, int]], *, device: str, threads: int, rounds: int
) -> Speeds:
    """Tokens per second of every case, side and round. On a GPU each shape runs once before it counts."""
    arguments = ["--model", str(directory), "--device", device, "--threads", str(threads)]
    warm = int(device == "cuda")
    speeds = take_turns([Side(name, __file__, arguments) for name in names], cases, rounds + warm)
    return {case: {name: found[warm:] for name, found in by_side.items()} for case, by_side in speeds.items()}


def summary(speeds: Speeds, device: str) -> list[dict[str, Any]]:
    """One row per case: all sides, and the ratios of ours to the others."""
    rows = []
    for case, found in speeds.items():
        ours = found["accelerate"]
        row: dict[str, Any] = {
            "measure": f"{case}, tokens/s",
            **{name: middle(values) for name, values in found.items()},
        }
        for other in [name for name in found if name != "accelerate"]:
            row[f"× {other}"] = middle([a / b for a, b in zip(ours, found[other], strict=True)])
        if device == "cpu" and case in BARS:
            row |= {"bar": BARS[case], "holds": row["× torch"] >= BARS[case]}
        rows.append(row)
    return rows


def middle(values: list[float]) -> float:
    """The median, or nan where a round ran out of memory."""
    return math.nan if any(map(math.isnan, values)) else median(values)


def table(rows: list[dict[str, Any]]) -> str:
    columns = [key for key in rows[0] if key not in ("measure", "bar", "holds")]
    lines = [f"| | {' | '.join(columns)} | bar |", "|---|" + "---|" * (len(columns) + 1)]
    for row in rows:
        bar = f"≥ {row['bar']}{'' if row['holds'] else ' (missed)'}" if "bar" in row else ""
        cells = ["out of memory" if math.isnan(row[key]) else f"{row[key]:.3g}" for key in columns]
        lines.append(f"| {row['measure']} | {' | '.join(cells)} | {bar} |")
    return "\n".join(lines)


def plain(value: Any) -> Any:
    """The same for JSON, which has no nan."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", choices=sorted(CASES), default="cpu")
    parser.add_argument("--model", type=Path, help="folder of the checkpoint, written when it is not there")
    parser.add_argument("--cases", nargs="*", metavar="CASE", help='only these, for example "decode 1"')
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--json", type=Path, help="also write the JSON line there")
    parser.add_argument("--serve", choices=SIDES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(lambda: load(args.serve, args.model, args.device), args.threads)
        return
    from cpu import machine, write_checkpoint  # bench/cpu.py

    cases = {name: case for name, case in CASES[args.device].items() if args.cases is None or name in args.cases}
    names = list(SIDES)
    if missing := [name for name in KERNELS if find_spec(name) is None] or (["a GPU"] if args.device == "cpu" else []):
        print(f"side `kernels` left out: {', '.join(missing)} not there", file=sys.stderr)
        names.remove("kernels")
    about = machine(args.threads) | {"left_out": missing}
    if args.device == "cuda":
        import torch

        about["device"] = torch.cuda.get_device_name()
    with tempfile.TemporaryDirectory() as folder:
        directory = write_checkpoint(args.model or Path(folder))
        speeds = measure(directory, names, cases, device=args.device, threads=args.threads, rounds=args.rounds)
    rows = summary(speeds, args.device)
    print(table(rows))
    line = json.dumps(plain({"bench": "transformers", **about, "rows": rows, "tokens_per_second": speeds}))
    print(line)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(line + "\n")


if __name__ == "__main__":
    main()
elif __name__ == "transformers":
    library()
