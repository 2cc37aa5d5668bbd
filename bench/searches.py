"""How NVFP4's block scales are best found, on the demo model: absmax, four over six (mse), and the sweep, pairwise.

    python bench/searches.py [--text DIR] [--draws N] [--json FILE]

One quantised model is one draw: which weights happen to round up moves the bits per byte of a text by more than the
searches differ in. So each search quantises the model several times, every time with other inputs sharing a block: the
inputs of each matrix are shuffled before and put back after, which changes nothing else. Draw 0 is not shuffled. Errors
are standard errors over the draws; of a single draw, over the text, eight windows at a time.

Two measures, on the same text for all: bits per byte, and the divergence from the source, Σ p · log2(p / q) over the
vocabulary for the token after each row, per byte. The divergence only grows when a model moves away from its source;
bits per byte may fall, and do where the source is too sure of itself (`tempered` shows by how much).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
import torch.nn.functional as F
from quality import DEMO_MODEL, QUANTISED, cpu_name, git, read_documents
from torch import Tensor

from nemotron_mamba2.batch import Batch
from nemotron_mamba2.chat import Tokenizer
from nemotron_mamba2.checkpoint import load_model
from nemotron_mamba2.config import ModelConfig, Policy
from nemotron_mamba2.formats import Plain, Weight, dequantize
from nemotron_mamba2.generate import Model
from nemotron_mamba2.model import NemotronH
from nemotron_mamba2.ops.reference import quantize
from nemotron_mamba2.plan import plan_model

SEARCHES = ("absmax", "mse", "sweep")
WINDOW_TOKENS = 1024
WINDOWS_AT_ONCE = 8
TEMPERATURES = (1.0, 1.05, 1.1)


def text_windows(tokenizer: Tokenizer, documents: Sequence[str], count: int) -> list[list[int]]:
    """`count` windows, spread evenly over the documents, `<s>` first; each ends with its document."""
    found = []
    for document in documents:
        ids = tokenizer.encode(document, add_special_tokens=False)
        starts = range(0, len(ids), WINDOW_TOKENS)
        found += [[tokenizer.bos_token_id, *ids[start : start + WINDOW_TOKENS]] for start in starts]
    found = [window for window in found if len(window) > WINDOW_TOKENS // 4]
    return [found[i * len(found) // count] for i in range(min(count, len(found)))]


def shuffled(weight: Weight, search: str, generator: torch.Generator | None) -> tuple[Plain, float]:
    """A weight quantised under an order of its inputs, in fp32, in the old order; and its squared relative error."""
    values = dequantize(weight)
    inputs = values.shape[-1]
    order = torch.arange(inputs) if generator is None else torch.randperm(inputs, generator=generator)
    found = torch.empty_like(values)
    found[..., order] = dequantize(quantize(values[..., order], "nvfp4", search=search))
    return Plain(found), ((found - values).norm() / values.norm()).square().item()


def model_of(search: str | None, draw: int) -> tuple[Model, float]:
    """The demo model under a search (None: as it ships), and the relative error of its quantised matrices."""
    config = replace(ModelConfig.from_checkpoint(DEMO_MODEL), mtp_layers=())
    weights = load_model(DEMO_MODEL, mtp=False)
    generator = torch.Generator().manual_seed(draw) if draw else None
    layers, errors = [], []
    for layer in weights.layers:
        names = QUANTISED.get(type(layer), ()) if search is not None else ()
        made = {n: shuffled(w, search, generator) for n in names if (w := getattr(layer, n)) is not None}
        layers.append(replace(layer, **{name: weight for name, (weight, _) in made.items()}))
        errors += [error for _, error in made.values()]
    weights = replace(weights, layers=tuple(layers))
    network = NemotronH(config, weights, plan_model(config, weights, Policy(), device="cpu"))
    return Model(network), math.sqrt(mean(errors)) if errors else 0.0


def logits(model: Model, windows: Sequence[list[int]]) -> Iterator[tuple[Tensor, Tensor]]:
    """fp32 [rows, vocabulary], and int64 [rows] of the tokens that follow, some windows at a time."""
    network = model.network
    for first in range(0, len(windows), WINDOWS_AT_ONCE):
        some = windows[first : first + WINDOWS_AT_ONCE]
        caches = model.caches(slots=len(some), tokens=sum(map(len, some)))
        slots = caches.acquire(len(some))
        tokens = torch.tensor([token for window in some for token in window[:-1]])
        following = torch.tensor([token for window in some for token in window[1:]])
        with caches.step(Batch.prefill(slots, [len(window) - 1 for window in some])) as opened:
            hidden = network.final_norm(network.hidden_states(tokens, opened))
        yield network.logits(hidden), following


@torch.inference_mode()
def measure(draw: int, windows: Sequence[list[int]], text_bytes: int) -> dict[str, Any]:
    """Every search at one draw; bits per byte of the source at TEMPERATURES too."""
    per_byte = 1 / math.log(2) / text_bytes
    models = {search: model_of(search, draw) for search in SEARCHES}
    running = {search: logits(model, windows) for search, (model, _) in models.items()}
    nats: dict[str, list[float]] = {search: [] for search in SEARCHES}
    moved: dict[str, list[float]] = {search: [] for search in SEARCHES}
    tempered = dict.fromkeys(map(str, TEMPERATURES), 0.0)
    for source, following in logits(model_of(None, 0)[0], windows):
        for temperature in TEMPERATURES:
            tempered[str(temperature)] += F.cross_entropy(source / temperature, following, reduction="sum").item()
        log_p = source.log_softmax(-1)
        for search in SEARCHES:
            log_q = next(running[search])[0].log_softmax(-1)
            nats[search].append(F.nll_loss(log_q, following, reduction="sum").item() * per_byte)
            moved[search].append((log_p.exp() * (log_p - log_q)).sum().item() * per_byte)
    record: dict[str, Any] = {"draw": draw, "tempered": {t: value * per_byte for t, value in tempered.items()}}
    for search in SEARCHES:
        record[search] = {"bits_per_byte": nats[search], "divergence": moved[search], "weight_error": models[search][1]}
    print(json.dumps(record), file=sys.stderr, flush=True)
    return record


def summary(draws: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One record per search: means over the draws, and how far below absmax they are, with the standard error."""
    source, records = draws[0]["tempered"]["1.0"], []
    for search in SEARCHES:
        record: dict[str, Any] = {"search": search, "weight_error": mean(d[search]["weight_error"] for d in draws)}
        for name, base in (("bits_per_byte", source), ("divergence", 0.0)):
            pairs = [(d["absmax"][name], d[search][name]) for d in draws]
            less = [sum(theirs) - sum(ours) for theirs, ours in pairs]
            error = stdev(less) / math.sqrt(len(less)) if len(less) > 1 else text_error(*pairs[0])
            record[f"{name}_above_source"] = mean(sum(ours) for _, ours in pairs) - base
            record |= {f"{name}_below_absmax": mean(less), f"{name}_error": error}
            record[f"{name}_draws_below_absmax"] = sum(value > 0 for value in less)
        records.append({name: round(v, 6) if isinstance(v, float) else v for name, v in record.items()})
    return records


def text_error(theirs: Sequence[float], ours: Sequence[float]) -> float:
    """Standard error of the difference of two sums over the same parts of a text; NaN of one part."""
    less = [a - b for a, b in zip(theirs, ours, strict=True)]
    return stdev(less) * math.sqrt(len(less)) if len(less) > 1 else math.nan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--text", type=Path, metavar="DIR", help="folder of kjv.txt, shakespeare.txt and speeches.txt")
    parser.add_argument("--windows", type=int, default=16, help="of text  [default: %(default)s]")
    parser.add_argument("--draws", type=int, default=16, help="quantised models of each search  [default: %(default)s]")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    tokenizer = Tokenizer.from_directory(DEMO_MODEL)
    windows = text_windows(tokenizer, read_documents(options.text), options.windows)
    text_bytes = sum(len(tokenizer.decode(window[1:]).encode()) for window in windows)
    with ProcessPoolExecutor(options.jobs, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        wanted = options.draws
        draws = list(pool.map(measure, range(wanted), [windows] * wanted, [text_bytes] * wanted))
    records = summary(draws)
    for record in records:
        print(json.dumps(record))
    if options.json:
        about = {"device": f"cpu: {cpu_name()}", "torch": torch.__version__, "commit": git("rev-parse", "HEAD")}
        about |= {"text_bytes": text_bytes, "text_tokens": sum(len(window) - 1 for window in windows)}
        whole = {**about, "records": records, "draws": draws}
        options.json.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
