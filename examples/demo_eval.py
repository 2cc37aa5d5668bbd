"""How good the demo model is: bits per byte, recall by distance, and agreement of the MTP head.

All three are teacher-forced, so one forward pass over a batch scores it. For recall this is exact: a greedy
reply equals the expected one if and only if the expected token is the most likely one at every place of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from demo_batches import PieceEncoder, Transcript
from demo_data import DISTANCES, KINDS, RecallCase, recall_cases
from demo_model import DemoModel
from demo_tokenizer import BEGIN, END, TURN_BEGIN, TURN_END, UNKNOWN
from tokenizers import Tokenizer
from torch import Tensor

IGNORED = -100


@dataclass(frozen=True)
class Exam:
    """Text windows with the bytes they hold, and conversations with their expected replies, all in tokens."""

    windows: list[list[int]]
    text_bytes: int
    recall: dict[str, list[tuple[list[int], list[int]]]]


def make_exam(
    tokenizer: Tokenizer, documents: Sequence[str], lines: Sequence[str], *, cases: int, seed: int, window_tokens: int
) -> Exam:
    """Documents are cut into windows of at most window_tokens, each behind a `<s>`; `cases` for each kind and distance.

    Recall entries are named "kind/distance".
    """
    windows = []
    for document in documents:
        ids = [*tokenizer.encode(document, add_special_tokens=False).ids, END]
        step = window_tokens - 1
        windows += [[BEGIN, *ids[start : start + step]] for start in range(0, len(ids), step)]
    encoder = PieceEncoder(tokenizer)
    recall = {}
    for distance in DISTANCES:
        if distance != "short" and int(distance) + 200 > window_tokens:
            continue
        for kind in KINDS:
            drawn = recall_cases(
                kind, distance, cases, seed=seed, lines=lines, count_tokens=lambda text: len(encoder.encode(text)) + 1
            )
            recall[f"{kind}/{distance}"] = [_encode_case(case, encoder) for case in drawn]
    return Exam(windows, sum(len(document.encode()) for document in documents), recall)


@torch.no_grad()
def take_exam(model: DemoModel, exam: Exam, *, device: str, batch_tokens: int = 1 << 17) -> dict[str, float]:
    """bits_per_byte, draft_acceptance (on text), "recall/kind/distance" and their means "recall/distance"."""
    model.eval()
    scores = _score_text(model, exam, device, batch_tokens)
    for name, cases in exam.recall.items():
        scores[f"recall/{name}"] = _score_recall(model, cases, device, batch_tokens)
    for distance in DISTANCES:
        values = [scores[name] for kind in KINDS if (name := f"recall/{kind}/{distance}") in scores]
        if values:
            scores[f"recall/{distance}"] = sum(values) / len(values)
    model.train()
    return scores


def _score_text(model: DemoModel, exam: Exam, device: str, batch_tokens: int) -> dict[str, float]:
    nats, agreed, compared = 0.0, 0, 0
    for ids, targets in _padded([(w[:1], w[1:]) for w in exam.windows], model.config.chunk_size, batch_tokens):
        ids, targets = ids.to(device), targets.to(device)
        main, draft = _logits(model, ids)
        nats += F.cross_entropy(main.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum").item()
        # The draft made at token t is for t + 2: what the main head says one token later.
        counts = targets[:, 1:] != IGNORED
        agreed += ((draft[:, :-1].argmax(-1) == main[:, 1:].argmax(-1)) & counts).sum().item()
        compared += counts.sum().item()
    return {"bits_per_byte": nats / math.log(2) / exam.text_bytes, "draft_acceptance": agreed / max(1, compared)}


def _score_recall(
    model: DemoModel, cases: Sequence[tuple[list[int], list[int]]], device: str, batch_tokens: int
) -> float:
    right = 0
    for ids, targets in _padded(cases, model.config.chunk_size, batch_tokens):
        ids, targets = ids.to(device), targets.to(device)
        guessed = _logits(model, ids)[0].argmax(-1)
        right += ((guessed == targets) | (targets == IGNORED)).all(-1).sum().item()
    return right / len(cases)


def _logits(model: DemoModel, ids: Tensor) -> tuple[Tensor, Tensor]:
    with torch.autocast(ids.device.type, dtype=torch.bfloat16, enabled=ids.is_cuda):
        main, draft = model.hidden_states(ids)
        return model.logits(main).float(), model.logits(draft).float()


def _encode_case(case: RecallCase, encoder: PieceEncoder) -> tuple[list[int], list[int]]:
    """(prompt, reply), the reply with the token that ends the turn."""
    out = Transcript(encoder)
    out.special(BEGIN, 0)
    for message in case.messages:
        out.turn(message["role"], [(message["content"], 0)])
    out.special(TURN_BEGIN, 0)
    out.text("assistant\n", 0)
    return out.ids, [*encoder.encode(case.reply), TURN_END]


def _padded(
    pairs: Sequence[tuple[list[int], list[int]]], multiple: int, batch_tokens: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of (prompt + reply, right-padded; the targets of the reply), the longest first.

    ids: [B, L + 1], L a multiple of the scan's chunk. targets: [B, L], IGNORED outside the replies.
    """
    waiting = sorted(pairs, key=lambda pair: len(pair[0]) + len(pair[1]))
    while waiting:
        tokens = -(-(len(waiting[-1][0]) + len(waiting[-1][1])) // multiple) * multiple
        count = min(len(waiting), max(1, batch_tokens // tokens))
        ids = torch.full((count, tokens + 1), UNKNOWN)
        targets = torch.full((count, tokens), IGNORED)
        for row in range(count):
            prompt, reply = waiting.pop()
            end = len(prompt) + len(reply)
            ids[row, :end] = torch.tensor(prompt + reply)
            targets[row, len(prompt) - 1 : end - 1] = torch.tensor(reply)
        yield ids, targets
