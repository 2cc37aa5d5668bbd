"""What a training run leaves for readers: the loss as JSON and as a plot, and the model card."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from demo_data import DISTANCES, KINDS

CARD = """---
library_name: nemotron-mamba2
tags: [mamba-2, nemotron_h, demo]
---

# A small Nemotron-H model

A hybrid of Mamba-2, attention, MLP and expert layers in the layout of Nemotron-3, with {parameters:.1f} million
parameters, one multi-token-prediction head included. It exists to try an engine and to measure what a change costs:
its weights are trained, so errors that random weights hide show up as lost recall or worse bits per byte.

| | |
|---|---|
| layers | `{pattern}` (M Mamba-2, `*` attention, `-` MLP, E experts), then an MTP head `*E` |
| width | {hidden} hidden; Mamba {heads} heads of {head_dim} in {groups} groups, state {state} |
| experts | {experts}, {top_k} of them for each token, and a shared one |
| tokenizer | byte-level BPE, {vocabulary} entries, ChatML-like template |
| weights | bf16; router weights and correction bias float32 |

## Data

Public-domain English: the King James Bible, plays of Shakespeare, addresses of presidents of the United States.
Mixed with conversations made by code (`examples/demo_data.py`, seed {seed}): a pet's name, who is older, the colour
of a thing, values of a list, a quotation, stated and asked for up to {gap} tokens later. Held out: whole chapters,
one whole play, whole speeches, and a tenth of all combinations of entities, each picked by hash. Some
training documents, picked likewise, were kept aside to choose the best snapshot.

## Training

`examples/train_demo.py`: {steps} steps of {rows} rows of {row_tokens} tokens in {train_minutes:.1f} minutes, AdamW,
bf16 autocast over float32 weights, about {epochs:.0f} passes over the text.

## Scores

On held-out data, with the bf16 weights as shipped, teacher-forced. Recall is the share of greedy replies that equal
the expected one word for word; the draft acceptance is how often the MTP head's greedy token equals the model's own.

| measure | score |
|---|---|
| bits per byte, held-out text | {bits_per_byte:.3f} |
| MTP draft acceptance, held-out text | {draft_acceptance:.1%} |

{recall}

## Limits

It knows old books and five kinds of questions, in the wording it was trained on, facts and questions on lines of their
own. It is no assistant, its continuations mean nothing, and it has read nothing longer than {row_tokens} tokens. Old
texts carry the views of their time.
"""


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def write_card(folder: Path, record: dict[str, Any], *, parameters: int) -> None:
    """README.md, filled from the record of the run."""
    settings, scores = record["settings"], record["scores"]
    model, last = settings["model"], record["exams"][-1]
    card = CARD.format(
        parameters=parameters / 1e6,
        pattern=model["hybrid_override_pattern"],
        hidden=model["hidden_size"],
        heads=model["mamba_num_heads"],
        head_dim=model["mamba_head_dim"],
        groups=model["n_groups"],
        state=model["ssm_state_size"],
        experts=model["n_routed_experts"],
        top_k=model["num_experts_per_tok"],
        vocabulary=model["vocab_size"],
        gap=settings["longest_gap_tokens"],
        steps=last["step"],
        train_minutes=last["seconds"] / 60,
        epochs=settings["text_epochs"],
        recall=recall_table(scores),
        **{name: settings[name] for name in ("seed", "rows", "row_tokens")},
        **{name: scores[name] for name in ("bits_per_byte", "draft_acceptance")},
    )
    (folder / "README.md").write_text(card, encoding="utf-8")


def recall_table(scores: dict[str, float]) -> str:
    """Recall by kind and distance in tokens, as Markdown."""
    distances = [distance for distance in DISTANCES if f"recall/{distance}" in scores]
    lines = [
        "| recall, distance in tokens | " + " | ".join(map(str, distances)) + " |",
        "|---" * (len(distances) + 1) + "|",
    ]
    for kind in (*KINDS, "all"):
        names = [f"recall/{distance}" if kind == "all" else f"recall/{kind}/{distance}" for distance in distances]
        lines.append(f"| {kind} | " + " | ".join(f"{scores[name]:.0%}" for name in names) + " |")
    return "\n".join(lines)


def plot_loss(folder: Path) -> None:
    """loss.png from loss.json, where matplotlib is installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no loss.png: matplotlib is not installed; --plot-only draws it later")
        return
    record = json.loads((folder / "loss.json").read_text(encoding="utf-8"))
    figure = Figure(figsize=(8, 8), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    steps = record["steps"]
    for name in ("text", "answer", "mtp_text", "mtp_answer"):
        shown = [(entry["step"], entry[name]) for entry in steps if entry[name] > 0]
        if shown:
            above.plot(*zip(*shown, strict=True), label=name.replace("_", " "), linewidth=1)
    above.set(yscale="log", ylabel="training loss, nats per token")
    for distance in DISTANCES:
        shown = [(exam["step"], exam[f"recall/{distance}"]) for exam in record["exams"] if f"recall/{distance}" in exam]
        if shown:
            below.plot(*zip(*shown, strict=True), marker="o", label=f"recall, {distance}")
    for name in ("draft_acceptance", "bits_per_byte"):
        below.plot(
            [exam["step"] for exam in record["exams"]],
            [exam[name] for exam in record["exams"]],
            marker=".",
            linestyle="--",
            label=name.replace("_", " "),
        )
    below.set(xlabel="step", ylabel="validation")
    for axes in (above, below):
        axes.legend()
        axes.grid(alpha=0.3)
    figure.savefig(folder / "loss.png", dpi=110)
