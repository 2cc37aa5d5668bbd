"""How much quality a weight format and a state dtype cost, measured on the demo model with the package's own engine.

    python bench/quality.py [--text DIR] [--json FILE] [--plot FILE] [--quick]

Held-out bits per byte, recall of facts by distance (greedy: prefill, then decode), and draft acceptance (the MTP head's
greedy draft equals the model's own greedy next token, teacher-forced), for every format × state dtype. Prompts run in
pieces of PIECE_ROWS, so the state is rounded to its dtype at each of them, and once per window while decoding.

Weights are quantised in memory as `quantize` does it, the projections that NVIDIA's recipes quantise: Mamba-2, MLP,
experts and shared experts. Two of the choices do not exist in the package and are made here: `nvfp4_global` (e2m1 under
one scale per matrix, without block scales: the way known to be bad) and `fp16` (a state that rounds to nearest).

All records share the same text and the same cases, so that differences between them are paired; which cases went wrong
stands beside the records. Recall with a state other than fp32 is taken from the first few of the cases, because time
is short on a CPU. Without --text the excerpt in tests/data is used; with it, excerpts
of the held-out part of that folder.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "examples"))

from demo_data import DISTANCES, KINDS, filler_lines, recall_cases, split_text  # noqa: E402

from nemotron_mamba2.batch import Batch  # noqa: E402
from nemotron_mamba2.chat import Tokenizer  # noqa: E402
from nemotron_mamba2.checkpoint import load_model  # noqa: E402
from nemotron_mamba2.cli import DEMO_MODEL  # noqa: E402
from nemotron_mamba2.config import ModelConfig, Policy  # noqa: E402
from nemotron_mamba2.formats import E2M1_VALUES, Plain, Weight, dequantize  # noqa: E402
from nemotron_mamba2.generate import Model  # noqa: E402
from nemotron_mamba2.model import NemotronH  # noqa: E402
from nemotron_mamba2.ops import LayerState  # noqa: E402
from nemotron_mamba2.ops.reference import mamba2, quantize  # noqa: E402
from nemotron_mamba2.ops.reference.quantize import E2M1_MAX, e2m1_codes  # noqa: E402
from nemotron_mamba2.ops.reference.rounding import FP16_MAX  # noqa: E402
from nemotron_mamba2.plan import plan_model  # noqa: E402
from nemotron_mamba2.weights import Mamba2Weights, MlpWeights, ModelWeights, MoeWeights  # noqa: E402

FORMATS = ("bf16", "fp8_tensor", "fp8_block", "nvfp4", "nvfp4_global")
STATES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp16_sr": torch.float16}
QUANTISED = {
    Mamba2Weights: ("in_proj", "out_proj"),
    MlpWeights: ("up_proj", "down_proj"),
    MoeWeights: ("experts_up", "experts_down", "shared_up", "shared_down"),
}
EXCERPT = ROOT / "tests" / "data" / "heldout.txt"
BETWEEN_DOCUMENTS = "\n\f\n"
EXCERPT_BYTES = 5000  # of one document: fewer tokens than the model's longest context
PIECE_ROWS = 128  # prompt rows of a sequence in one step: two chunks of the scan
RECALL_NAMES = {distance: distance if distance == "short" else f"d{distance}" for distance in DISTANCES}


@dataclass(frozen=True)
class Sizes:
    """documents: text excerpts; cases: of recall, for each kind, by distance; fewer: the same where the state is other
    than fp32."""

    documents: int
    cases: dict[str, int]
    fewer: dict[str, int]
    seed: int = 0


FULL = Sizes(6, {"short": 20, "d256": 20, "d1024": 40}, {"short": 10, "d256": 10, "d1024": 4})
QUICK = Sizes(1, {"short": 1, "d256": 1, "d1024": 0}, {"short": 1, "d256": 0, "d1024": 0})


@dataclass(frozen=True)
class Exam:
    """windows: token ids of each text, `<s>` first; text_bytes: in all of them; recall: (prompt, reply) by distance."""

    windows: list[list[int]]
    text_bytes: int
    recall: dict[str, list[tuple[list[int], list[int]]]]


# -- data --------------------------------------------------------------------------------------------------------------


def excerpts(documents: Sequence[str], count: int) -> list[str]:
    """The beginnings of the longest documents, EXCERPT_BYTES each, cut after a line or a sentence."""
    longest = sorted(documents, key=lambda document: -len(document.encode()))[:count]
    found = []
    for document in longest:
        text = document.encode()[:EXCERPT_BYTES].decode(errors="ignore")
        end = max(text.rfind("\n"), text.rfind(". ") + 1)
        found.append(text[:end] if end > 0 and len(text) < len(document) else text)
    return found


def read_documents(text: Path | None) -> list[str]:
    """Held-out documents: of a text folder, or the excerpts in the repository."""
    if text is not None:
        return split_text(text)[1]
    return EXCERPT.read_text(encoding="utf-8").split(BETWEEN_DOCUMENTS)


def make_exam(
    tokenizer: Tokenizer, documents: Sequence[str], *, texts: int, cases: dict[str, int], seed: int = 0
) -> Exam:
    """The same arguments give the same exam, and fewer cases the first ones of more.

    texts: how many excerpts; cases: for each kind, by distance. Lines of the documents fill the distance.
    """
    chosen, lines = excerpts(documents, texts), filler_lines(documents)
    end_of_turn = tokenizer.token_id("<|im_end|>")
    assert end_of_turn is not None
    recall: dict[str, list[tuple[list[int], list[int]]]] = {}
    for distance, name in RECALL_NAMES.items():
        recall[name] = []
        for kind in KINDS:
            for case in recall_cases(
                kind,
                distance,
                cases[name],
                seed=seed,
                lines=lines,
                count_tokens=lambda text: len(tokenizer.encode(text, add_special_tokens=False)) + 1,
            ):
                prompt = tokenizer.render_chat(case.messages)
                reply = tokenizer.encode(case.reply, add_special_tokens=False)
                recall[name].append((tokenizer.encode(prompt, add_special_tokens=False), [*reply, end_of_turn]))
    return Exam([tokenizer.encode(text) for text in chosen], sum(len(text.encode()) for text in chosen), recall)


# -- models ------------------------------------------------------------------------------------------------------------


def in_format(weight: Weight, format: str) -> Weight:
    """A weight in one of FORMATS."""
    if format != "nvfp4_global":
        return quantize(dequantize(weight), format, search="mse")
    values = dequantize(weight)
    scale = values.abs().amax((-2, -1), keepdim=True) / E2M1_MAX
    codes = e2m1_codes(values / scale)
    return Plain((torch.tensor(E2M1_VALUES)[codes.int()] * scale).to(torch.bfloat16))


def quantised(weights: ModelWeights, format: str) -> ModelWeights:
    """The same model with the projections of QUANTISED in another format; all else as it is."""
    layers = []
    for layer in weights.layers:
        chosen = {name: getattr(layer, name) for name in QUANTISED.get(type(layer), ())}
        layers.append(replace(layer, **{name: in_format(w, format) for name, w in chosen.items() if w is not None}))
    return replace(weights, layers=tuple(layers))


def demo_model(format: str, state_dtype: torch.dtype) -> Model:
    """The demo model with its MTP head, in one of FORMATS, activations in bf16."""
    config = ModelConfig.from_checkpoint(DEMO_MODEL)
    weights = load_model(DEMO_MODEL)
    weights = weights if format == "bf16" else quantised(weights, format)
    policy = Policy(state_dtype=state_dtype)
    network = NemotronH(config, weights, plan_model(config, weights, policy, device="cpu"))
    return Model(network, Tokenizer.from_directory(DEMO_MODEL), policy=policy)


@contextmanager
def state_rounding(state: str) -> Iterator[None]:
    """Within it, an fp16 state rounds to nearest where `state` is "fp16"; the package always rounds stochastically."""
    stochastic = mamba2.round_state

    def nearest(values: Tensor, state: LayerState, position: int) -> Tensor:
        return values.clamp(-FP16_MAX, FP16_MAX).to(state.ssm.dtype)

    mamba2.round_state = nearest if state == "fp16" else stochastic
    try:
        yield
    finally:
        mamba2.round_state = stochastic


# -- measures ----------------------------------------------------------------------------------------------------------


def prompt_steps(lengths: Sequence[int]) -> Iterator[list[tuple[int, int]]]:
    """(first, end) of the rows that each sequence runs in a step, until all are through."""
    for first in range(0, max(lengths), PIECE_ROWS):
        yield [(min(first, length), min(first + PIECE_ROWS, length)) for length in lengths]


@torch.inference_mode()
def score_text(model: Model, windows: Sequence[list[int]]) -> tuple[float, float]:
    """Bits of all windows together, given the first token of each; and the draft acceptance."""
    network, caches = model.network, model.caches(slots=len(windows), tokens=sum(map(len, windows)))
    slots = caches.acquire(len(windows))
    nats, agreed, compared = 0.0, 0, 0
    main: list[list[int]] = [[] for _ in windows]
    draft: list[list[int]] = [[] for _ in windows]
    for spans in prompt_steps([len(window) - 1 for window in windows]):
        rows = [end - first for first, end in spans]
        pieces = list(zip(windows, spans, strict=True))
        tokens = torch.tensor([token for window, (first, end) in pieces for token in window[first:end]])
        following = torch.tensor([token for window, (first, end) in pieces for token in window[first + 1 : end + 1]])
        with caches.step(Batch.prefill(slots, rows)) as opened:
            hidden = network.final_norm(network.hidden_states(tokens, opened))
            drafted, _ = network.draft(hidden, following, opened, logits_rows="all")
        logits = network.logits(hidden)
        nats += F.cross_entropy(logits, following, reduction="sum").item()
        for found, own in ((logits, main), (drafted, draft)):
            for ids, new in zip(own, found.argmax(-1).split(rows), strict=True):
                ids += new.tolist()
    for own, guessed in zip(main, draft, strict=True):
        # The draft made at row t is for token t + 2: what the model itself says at row t + 1.
        agreed += sum(a == b for a, b in zip(own[1:], guessed[:-1], strict=True))
        compared += len(own) - 1
    return nats / math.log(2), agreed / compared


@torch.inference_mode()
def recalled(model: Model, cases: Sequence[tuple[list[int], list[int]]]) -> int:
    """How many greedy replies equal the expected ones."""
    return sum(which_recalled(model, cases))


@torch.inference_mode()
def which_recalled(model: Model, cases: Sequence[tuple[list[int], list[int]]]) -> list[bool]:
    """Whether each greedy reply equals the expected one token by token, the end of the turn too."""
    network = model.network
    caches = model.caches(slots=len(cases), tokens=sum(len(p) + len(r) for p, r in cases))
    slots = caches.acquire(len(cases))
    replies: list[list[int]] = [[] for _ in cases]
    for spans in prompt_steps([len(prompt) for prompt, _ in cases]):
        rows = [end - first for first, end in spans]
        pieces = zip(cases, spans, strict=True)
        tokens = torch.tensor([token for (prompt, _), (first, end) in pieces for token in prompt[first:end]])
        picked = network.forward(tokens, Batch.prefill(slots, rows), caches).argmax(-1).tolist()
        for i in (i for i, count in enumerate(rows) if count):
            replies[i] = [picked.pop(0)]  # that of the last piece stays
    live = list(range(len(cases)))
    # A reply that has gone wrong cannot become right: it stops there.
    while live := [i for i in live if replies[i] == cases[i][1][: len(replies[i])] and replies[i] != cases[i][1]]:
        tokens = torch.tensor([replies[i][-1] for i in live])
        logits = network.forward(tokens, Batch.decode([slots[i] for i in live]), caches)
        for i, token in zip(live, logits.argmax(-1).tolist(), strict=True):
            replies[i].append(token)
    return [reply == expected for reply, (_, expected) in zip(replies, cases, strict=True)]


def measure(format: str, state: str, exam: Exam) -> tuple[dict[str, Any], dict[str, list[int]]]:
    """One record of the result, and the numbers of the cases that went wrong, by distance."""
    begin = time.perf_counter()
    model = demo_model(format, STATES[state])
    with state_rounding(state):
        bits, acceptance = score_text(model, exam.windows)
        wrong, recall = {}, {}
        for name, cases in exam.recall.items():
            batches = [cases[first : first + 20] for first in range(0, len(cases), 20)]
            right = [one for batch in batches for one in which_recalled(model, batch)]
            wrong[name] = [index for index, one in enumerate(right) if not one]
            recall[name] = round(sum(right) / len(cases), 4) if cases else None
    record = {
        "format": format,
        "state_dtype": state,
        "bits_per_byte": round(bits / exam.text_bytes, 5),
        "recall": recall,
        "draft_acceptance": round(acceptance, 4),
    }
    print(f"{time.perf_counter() - begin:6.1f} s  {json.dumps(record)}", file=sys.stderr, flush=True)
    return record, wrong


def measure_all(full: Exam, fewer: Exam, *, jobs: int) -> tuple[list[dict[str, Any]], dict[str, dict[str, list[int]]]]:
    """All records, formats outside, and "format/state" → cases that went wrong; one thread for each process, the long
    ones first."""
    pairs = [(format, state) for format in FORMATS for state in STATES]
    with ProcessPoolExecutor(jobs, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        running = {
            pair: pool.submit(measure, *pair, full if pair[1] == "fp32" else fewer)
            for pair in sorted(pairs, key=lambda pair: pair[1] != "fp32")
        }
        found = [running[pair].result() for pair in pairs]
    return [record for record, _ in found], {"/".join(p): wrong for p, (_, wrong) in zip(pairs, found, strict=True)}


# -- results -----------------------------------------------------------------------------------------------------------


def circumstances(exam: Exam, sizes: Sizes, *, text: Path | None, seconds: float) -> dict[str, Any]:
    """What the records were measured with: device, versions, commit, sizes."""
    return {
        "device": f"cpu: {cpu_name()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": git("rev-parse", "HEAD"),
        "clean": not git("status", "--porcelain", "--", "src", "examples", "bench/quality.py"),
        "text": "tests/data/heldout.txt" if text is None else "held-out part of the text folder",
        "text_bytes": exam.text_bytes,
        "text_tokens": sum(len(window) - 1 for window in exam.windows),
        "recall_cases": {name: count * len(KINDS) for name, count in sizes.cases.items()},
        "recall_cases_of_other_states": {name: count * len(KINDS) for name, count in sizes.fewer.items()},
        "piece_rows": PIECE_ROWS,
        "seed": sizes.seed,
        "seconds": round(seconds),
    }


def cpu_name() -> str:
    """The processor's name, as far as the system tells."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def git(*arguments: str) -> str:
    """What git says, or "" outside a repository."""
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()


def table(records: Sequence[dict[str, Any]]) -> str:
    """The records as a Markdown table."""
    names = list(RECALL_NAMES.values())
    lines = [
        "| format | state | bits per byte | "
        + " | ".join(f"recall {name}" for name in names)
        + " | draft acceptance |",
        "|---|---" + "|---:" * (len(names) + 2) + "|",
    ]
    for record in records:
        shares = [*(record["recall"][name] for name in names), record["draft_acceptance"]]
        cells = [record["format"], record["state_dtype"], f"{record['bits_per_byte']:.4f}"]
        cells += ["–" if share is None else f"{share:.1%}" for share in shares]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def plot(records: Sequence[dict[str, Any]], file: Path) -> None:
    """Bars by format and state dtype, where matplotlib is installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print(f"no {file.name}: matplotlib is not installed; --plot-only draws it later", file=sys.stderr)
        return
    base = records[0]
    measures = {
        "bits per byte, above bf16": lambda record: record["bits_per_byte"] - base["bits_per_byte"],
        "draft acceptance, below bf16": lambda record: base["draft_acceptance"] - record["draft_acceptance"],
        "cases not recalled over 256 tokens": lambda record: 1 - record["recall"]["d256"],
        "cases not recalled over 1024 tokens": lambda record: 1 - record["recall"]["d1024"],
    }
    figure = Figure(figsize=(11, 7), layout="constrained")
    for axes, (title, value) in zip(figure.subplots(2, 2).flat, measures.items(), strict=True):
        # Recall with other states is of fewer cases, and not to be put beside that of all.
        states = [state for state in STATES if state == "fp32" or "recalled" not in title]
        for place, state in enumerate(states):
            mine = [value(record) for record in records if record["state_dtype"] == state]
            at = [i + (place - (len(states) - 1) / 2) * 0.2 for i in range(len(mine))]
            axes.bar(at, mine, width=0.19, label=f"state {state}")
        axes.set_xticks(range(len(FORMATS)), FORMATS, fontsize=8)
        axes.set_title(title)
        axes.grid(axis="y", alpha=0.3)
    figure.axes[0].legend(fontsize=8, loc="upper left")
    figure.savefig(file, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--text", type=Path, metavar="DIR", help="folder of kjv.txt, shakespeare.txt and speeches.txt")
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="write the records; what they were measured with: beside it, FILE with .meta before the suffix",
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write a PNG")
    parser.add_argument("--plot-only", action="store_true", help="draw the records of --json again")
    parser.add_argument("--quick", action="store_true", help="a few cases, to see that it runs")
    parser.add_argument(
        "--jobs", type=int, default=min(2, os.cpu_count() or 1), help="processes  [default: %(default)s]"
    )
    options = parser.parse_args()
    if options.plot_only:
        plot(json.loads(options.json.read_text(encoding="utf-8")), options.plot)
        return
    begin, sizes = time.perf_counter(), QUICK if options.quick else FULL
    tokenizer, documents = Tokenizer.from_directory(DEMO_MODEL), read_documents(options.text)
    full, fewer = (
        make_exam(tokenizer, documents, texts=sizes.documents, cases=cases, seed=sizes.seed)
        for cases in (sizes.cases, sizes.fewer)
    )
    records, wrong = measure_all(full, fewer, jobs=options.jobs)
    meta = circumstances(full, sizes, text=options.text, seconds=time.perf_counter() - begin) | {"wrong": wrong}
    print(table(records))
    if options.json is not None:
        options.json.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
        beside = options.json.with_suffix(".meta" + options.json.suffix)
        beside.write_text(json.dumps(meta) + "\n", encoding="utf-8")
    if options.plot is not None:
        plot(records, options.plot)


if __name__ == "__main__":
    main()
