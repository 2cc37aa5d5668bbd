"""Batches for training the demo model: rows of text, and rows of conversations with facts and questions.

A row is `row_tokens + 2` tokens: the inputs, and the targets of both heads. Documents are packed one after
another, each behind its `<s>`. Every token carries a tag that says how its prediction counts: text, the reply
to a question, other chat tokens, or not at all (filler between a fact and its question, which is training text
that must not be learned by heart here).

`Mix` is the knob the trainer turns while worker processes draw: the share of text rows, and how far apart facts
and questions may be.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from random import Random
from typing import NamedTuple

import numpy as np
import torch
from demo_data import ACKNOWLEDGEMENTS, Query, draw_facts
from demo_tokenizer import BEGIN, END, TURN_BEGIN, TURN_END
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

SILENT, TEXT, ANSWER, CHAT = range(4)
TARGET_TOKENS = 2  # the next token, and the one after it for the MTP head
FILLER_LINE_TOKENS = 30  # about
LONG_ROOM_TOKENS = 450  # what a long conversation needs beside its gap, for facts and questions


class Targets(NamedTuple):
    """What one head learns from a batch: flat positions in [B·L], and the tag of each position's target."""

    position: Tensor
    tag: Tensor


class Batch(NamedTuple):
    """ids: [B, L + 2]; one `Targets` for each head; is_text: [B].

    Integers are narrow until `to_device` widens them: many batches wait in shared memory, which may be small.
    """

    ids: Tensor
    heads: tuple[Targets, Targets]
    is_text: Tensor


class Mix:
    """Shared with the worker processes: share of text rows, longest gap in tokens, share of long rows."""

    def __init__(self) -> None:
        self._values = multiprocessing.Array("d", [0.25, 64.0, 0.0], lock=False)

    def set(self, *, text_share: float, gap_tokens: float, long_share: float) -> None:
        self._values[:] = [text_share, gap_tokens, long_share]

    def get(self) -> tuple[float, int, float]:
        text_share, gap_tokens, long_share = self._values
        return text_share, int(gap_tokens), long_share


class PieceEncoder:
    """Encodes pieces of text, each once: filler and templates come again and again."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        (self.newline,) = self._encode("\n")
        self.encode = lru_cache(maxsize=1 << 18)(self._encode)

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)


class Transcript:
    """A growing row of tokens and tags."""

    def __init__(self, encoder: PieceEncoder) -> None:
        self._encoder = encoder
        self.ids: list[int] = []
        self.tags: list[int] = []

    def __len__(self) -> int:
        return len(self.ids)

    def tokens(self, text: str) -> int:
        return len(self._encoder.encode(text))

    def special(self, token: int, tag: int) -> None:
        self.ids.append(token)
        self.tags.append(tag)

    def text(self, text: str, tag: int) -> None:
        ids = self._encoder.encode(text)
        self.ids.extend(ids)
        self.tags.extend([tag] * len(ids))

    def turn(self, role: str, pieces: Sequence[tuple[str, int]]) -> None:
        """One message in the form of the chat template."""
        self.special(TURN_BEGIN, CHAT)
        self.text(f"{role}\n", CHAT)
        for text, tag in pieces:
            self.text(text, tag)
        self.special(TURN_END, pieces[-1][1])
        self.special(self._encoder.newline, SILENT)

    def user(self, lines: Sequence[tuple[str, int]]) -> None:
        self.turn("user", [piece for line in lines for piece in (("\n", SILENT), line)][1:])


class Conversation:
    """Writes one conversation: user lines pile up until the assistant acknowledges them or answers."""

    def __init__(self, out: Transcript, rng: Random, lines: Sequence[str]) -> None:
        self._out, self._rng, self._lines = out, rng, lines
        self._pause = rng.choice((0.0, 0.5, 1.0))  # how readily the assistant acknowledges
        self._said: list[tuple[str, int]] = []
        out.special(BEGIN, SILENT)

    def write(self, facts: int, gap_tokens: int) -> None:
        """State facts, let a gap pass that states some more, then ask for all of them in any order."""
        stated = draw_facts(facts, self._rng, self._lines)
        early = self._rng.randint(1, facts) if gap_tokens else facts
        for fact in stated[:early]:
            self._state(fact.statement)
        self._gap(gap_tokens, [fact.statement for fact in stated[early:]])
        queries = [query for fact in stated for query in fact.queries]
        for query in self._rng.sample(queries, len(queries)):
            if self._rng.random() < 0.1:
                self._say(self._rng.choice(self._lines), SILENT)
            self._ask(query)

    def _gap(self, tokens: int, statements: list[str]) -> None:
        """Filler lines with the statements at random places among them."""
        chance = len(statements) * FILLER_LINE_TOKENS / max(1, tokens)
        while tokens > 0:
            line = self._rng.choice(self._lines)
            tokens -= self._say(line, SILENT)
            if self._rng.random() < 0.02:
                self._acknowledge()
            if statements and self._rng.random() < chance:
                self._state(statements.pop())
        for statement in statements:
            self._state(statement)
        if self._said and self._rng.random() < self._pause:
            self._acknowledge()

    def _say(self, line: str, tag: int) -> int:
        self._said.append((line, tag))
        return self._out.tokens(line)

    def _state(self, statement: str) -> None:
        self._say(statement, CHAT)
        if self._rng.random() < self._pause:
            self._acknowledge()

    def _acknowledge(self) -> None:
        self._reply([(self._rng.choice(ACKNOWLEDGEMENTS), CHAT)])

    def _ask(self, query: Query) -> None:
        self._say(query.question, CHAT)
        self._reply([(query.before, ANSWER), (query.answer, ANSWER), (query.after, ANSWER)])

    def _reply(self, pieces: Sequence[tuple[str, int]]) -> None:
        self._out.user(self._said)
        self._out.turn("assistant", pieces)
        self._said = []


@dataclass(frozen=True)
class Source:
    """What rows are drawn from: the tokenizer, the training documents in tokens, and lines for filler."""

    tokenizer: Tokenizer
    documents: list[np.ndarray]
    lines: list[str]

    @classmethod
    def from_text(cls, tokenizer: Tokenizer, documents: Sequence[str], lines: list[str]) -> Source:
        encoded = tokenizer.encode_batch(list(documents), add_special_tokens=True)
        return cls(tokenizer, [np.array([*e.ids, END], dtype=np.uint16) for e in encoded], lines)

    @property
    def text_tokens(self) -> int:
        return sum(map(len, self.documents))


class Batches(IterableDataset):
    """Endless batches; each worker process draws from a seed of its own."""

    def __init__(self, source: Source, mix: Mix, *, rows: int, row_tokens: int, seed: int) -> None:
        self._source, self._mix = source, mix
        self._rows, self._row_tokens, self._seed = rows, row_tokens + TARGET_TOKENS, seed

    def __iter__(self) -> Iterator[Batch]:
        worker = torch.utils.data.get_worker_info()
        rng = Random(f"{self._seed} {worker.id if worker else 0}")
        encoder, text = PieceEncoder(self._source.tokenizer), self._text_rows(rng)
        owed = rng.random()  # text rows; a running sum gives every batch nearly the same number
        while True:
            text_share, gap_tokens, long_share = self._mix.get()
            owed += text_share * self._rows
            is_text = [row < int(owed) for row in range(self._rows)]
            owed -= sum(is_text)
            rows = [
                (next(text), np.full(self._row_tokens, TEXT))
                if text_row
                else self._task_row(rng, encoder, gap_tokens if rng.random() < long_share else 0)
                for text_row in is_text
            ]
            yield make_batch(*map(np.stack, zip(*rows, strict=True)), is_text)

    def _text_rows(self, rng: Random) -> Iterator[np.ndarray]:
        while True:
            documents = rng.sample(self._source.documents, len(self._source.documents))
            stream = np.concatenate(documents)
            stream = stream[rng.randrange(self._row_tokens) :]
            for start in range(0, len(stream) - self._row_tokens + 1, self._row_tokens):
                yield stream[start : start + self._row_tokens]

    def _task_row(self, rng: Random, encoder: PieceEncoder, gap_tokens: int) -> tuple[np.ndarray, np.ndarray]:
        """Short conversations only, or a long one with short ones around it."""
        out, lines = Transcript(encoder), self._source.lines
        before = rng.choice((0, 0, 300)) if gap_tokens else self._row_tokens
        while len(out) < before:
            Conversation(out, rng, lines).write(rng.randint(1, 4), rng.choice((0, 0, 0, 30, 60)))
        if gap_tokens:
            longest = max(1, min(gap_tokens, self._row_tokens - len(out) - LONG_ROOM_TOKENS))
            Conversation(out, rng, lines).write(rng.randint(2, 8), rng.randint(1, longest))
        while len(out) < self._row_tokens:
            Conversation(out, rng, lines).write(rng.randint(1, 3), 0)
        return np.array(out.ids[: self._row_tokens]), np.array(out.tags[: self._row_tokens])


def make_batch(ids: np.ndarray, tags: np.ndarray, is_text: Sequence[bool]) -> Batch:
    """ids and tags: [B, L + 2]."""
    tokens = ids.shape[1] - TARGET_TOKENS

    def targets(ahead: int) -> Targets:
        tag = torch.from_numpy(tags[:, ahead : ahead + tokens].astype(np.uint8)).flatten()
        position = tag.nonzero().flatten()
        return Targets(position.int(), tag[position])

    return Batch(torch.from_numpy(ids.astype(np.int32)), (targets(1), targets(2)), torch.tensor(is_text))


def to_device(batch: Batch, device: str) -> Batch:
    """The batch on a device, its integers wide enough to index with."""

    def move(tensor: Tensor) -> Tensor:
        return tensor.to(device, non_blocking=True).long()

    first, second = (Targets(*map(move, head)) for head in batch.heads)
    return Batch(move(batch.ids), (first, second), move(batch.is_text))


def load_batches(batches: Batches, *, workers: int, pin: bool) -> Iterator[Batch]:
    """Batches drawn by worker processes ahead of their use, or by this one when there are no workers."""
    prefetch = 2 if workers else None
    return iter(DataLoader(batches, batch_size=None, num_workers=workers, prefetch_factor=prefetch, pin_memory=pin))
