"""The loop from prompts to tokens: who is in the next step, and what becomes of the tokens it gives.

Prompts go in as pieces of at most PROMPT_ROWS rows a step; then every step adds one token to each running sequence. A
sequence that ends frees its slot and pages at once, and the next waiting one takes its place. A sequence is admitted
only when its whole length fits, so no step can run out of pages.

On a device the loop is one step ahead of what it has seen: a step takes its tokens from the step before where they
lie, and is under way before the host reads those and looks for the end. A sequence found ended has run one row too
many, in its own slot and pages, and that row's token is dropped.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from .batch import Batch
from .chat import StreamDecoder
from .errors import OutOfPages
from .graph import ModelGraph
from .model import Caches, NemotronH
from .sampling import SampledTokens, SamplingParams, check_finite, sample

FinishReason: TypeAlias = Literal["stop", "length"]
PROMPT_ROWS = 2048  # most prompt rows of one step
PIECE_ROWS = 256  # a prompt is cut at multiples of this, so at multiples of every chunk


@dataclass(frozen=True)
class TokenEvent:
    """One generated token, as it comes: index of its prompt, text that is now certain (often "" or that of more than
    one token), log-probability if asked for, and the reason on the last one."""

    index: int
    token_id: int
    text: str
    logprob: float | None
    finish_reason: FinishReason | None


@dataclass(frozen=True)
class Completion:
    """What one prompt became.

    token_ids: every generated token, the one that ended it too. text: without end tokens and stop string.
    finish_reason: "stop" by an end token or stop string, "length" otherwise. logprobs, top_logprobs: per token, and
    (id, log-probability) of the most likely ones; None unless asked for. prompt_seconds: until the first token was
    there; decode_seconds: from then to the last.
    """

    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    prompt_tokens: int
    logprobs: tuple[float, ...] | None = None
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] | None = None
    prompt_seconds: float = 0.0
    decode_seconds: float = 0.0


@dataclass(eq=False)
class Continuation:
    """One prompt under way. ends: the token ids that end it."""

    index: int
    prompt: list[int]
    sampling: SamplingParams
    most_tokens: int
    ends: frozenset[int]
    decoder: StreamDecoder | None
    slot: int | None = None
    rows_done: int = 0
    output: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[tuple[tuple[int, float], ...]] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    times: list[float] = field(default_factory=list)  # admitted, first token, last token

    @property
    def most_rows(self) -> int:
        """Rows that it may come to; the last token is never run."""
        return len(self.prompt) + self.most_tokens - 1

    @property
    def prompt_rows_left(self) -> int:
        return len(self.prompt) - self.rows_done

    def accept(self, token: int, picked: SampledTokens, row: int) -> TokenEvent:
        """Take the next token: text, log-probabilities, and whether it is the last."""
        self.output.append(token)
        self.times[2:] = [time.perf_counter()]
        if len(self.output) == 1:
            self.times.insert(1, self.times[-1])
        logprob = self._take_logprobs(picked, row)
        text = ""
        if token in self.ends:
            self.finish_reason = "stop"
        elif self.decoder is not None:
            text = self.decoder.push(token)
            if self.decoder.stopped is not None:
                self.finish_reason = "stop"
        if self.finish_reason is None and len(self.output) >= self.most_tokens:
            self.finish_reason = "length"
        if self.finish_reason is not None and self.decoder is not None:
            text += self.decoder.finish()
        self.text += text
        return TokenEvent(self.index, token, text, logprob, self.finish_reason)

    def _take_logprobs(self, picked: SampledTokens, row: int) -> float | None:
        wanted = self.sampling.logprobs
        if wanted is None or picked.logprobs is None or picked.top_tokens is None or picked.top_logprobs is None:
            return None
        self.logprobs.append(float(picked.logprobs[row]))
        ids, values = picked.top_tokens[row, :wanted].tolist(), picked.top_logprobs[row, :wanted].tolist()
        self.top_logprobs.append(tuple(zip(ids, values, strict=True)))
        return self.logprobs[-1]

    def completion(self) -> Completion:
        """What it became."""
        asked = self.sampling.logprobs is not None
        begin, first, last = self.times[0], self.times[1], self.times[-1]
        return Completion(
            token_ids=tuple(self.output),
            text=self.text,
            finish_reason=self.finish_reason or "length",
            prompt_tokens=len(self.prompt),
            logprobs=tuple(self.logprobs) if asked else None,
            top_logprobs=tuple(self.top_logprobs) if asked else None,
            prompt_seconds=first - begin,
            decode_seconds=last - first,
        )


@dataclass(frozen=True, eq=False)
class _Flight:
    """Tokens that a step has been told to give. arrived: waits for them, and for whether their logits were finite."""

    sequences: list[Continuation]
    picked: SampledTokens
    arrived: Callable[[], tuple[list[int], list[int]]]


@dataclass(eq=False)
class Loop:
    """The sequences of one `generate` call, waiting and running.

    graph: runs decode steps; None: they run eagerly. ahead: begin a step before the tokens of the last are seen.
    """

    network: NemotronH
    caches: Caches
    waiting: deque[Continuation]
    on_token: Callable[[TokenEvent], None] | None = None
    graph: ModelGraph | None = None
    ahead: bool = False
    running: list[Continuation] = field(default_factory=list)
    _flight: _Flight | None = None

    def run(self) -> None:
        """Until every sequence has ended; slots go back on every way out."""
        try:
            while self.waiting or self.running:
                self._advance()
        finally:
            self.caches.release([s.slot for s in self.running if s.slot is not None])

    def _advance(self) -> None:
        """One step: admit who fits; run prompt rows if any are left, else one token for each sequence."""
        self._admit()
        pieces = self._prompt_pieces()
        if pieces:
            self._land(self._flight)
            self._flight = self._prompt_step(pieces)
        else:
            self._decode_step()
        if not self.ahead:
            self._land(self._flight)

    def _admit(self) -> None:
        pages = self.caches.pages
        promised = sum(pages.pages_for(s.most_rows) - len(pages.held(_slot(s))) for s in self.running)
        while self.waiting and self.caches.free_slots:
            needed = pages.pages_for(self.waiting[0].most_rows)
            if promised + needed > pages.free_pages:
                break
            sequence = self.waiting.popleft()
            self.running.append(sequence)
            [sequence.slot] = self.caches.acquire(1)
            sequence.times = [time.perf_counter()]
            promised += needed
        if not self.running:
            sequence = self.waiting[0]
            raise OutOfPages(
                f"generate: prompt {sequence.index} may come to {sequence.most_rows} rows and needs a slot and "
                f"{pages.pages_for(sequence.most_rows)} pages; {self.caches.free_slots} slots and {pages.free_pages} "
                "pages are free"
            )

    def _prompt_pieces(self) -> list[tuple[Continuation, int]]:
        """Prompt rows of the next step, whole prompts or cuts at multiples of PIECE_ROWS."""
        pieces, room = [], PROMPT_ROWS
        for sequence in self.running:
            rows = sequence.prompt_rows_left
            if rows > room:
                rows = room // PIECE_ROWS * PIECE_ROWS
            if rows > 0:
                pieces.append((sequence, rows))
                room -= rows
        return pieces

    def _prompt_step(self, pieces: Sequence[tuple[Continuation, int]]) -> _Flight | None:
        batch = Batch.prefill([_slot(s) for s, _ in pieces], [rows for _, rows in pieces])
        ids = [token for s, rows in pieces for token in s.prompt[s.rows_done : s.rows_done + rows]]
        ready, rows = [], []
        for i, (sequence, count) in enumerate(pieces):
            sequence.rows_done += count
            if sequence.prompt_rows_left <= 0:
                ready.append(sequence)
                rows.append(sum(batch.rows[: i + 1]) - 1)
        logits = self.network.forward(self._on_device(ids), batch, self.caches, logits_rows=rows)
        return self._pick(ready, logits) if ready else None

    def _decode_step(self) -> None:
        """One row for every sequence that goes on; its tokens come from the flight where they can."""
        flight = self._flight
        mine = flight.sequences if flight is not None else []
        going = [s for s in self.running if len(s.output) + (s in mine) < s.most_tokens]
        if flight is not None and going and all(s in mine and s.sampling.repetition_penalty == 1 for s in going):
            tokens = flight.picked.tokens
            if going != mine:
                tokens = tokens[self._on_device([mine.index(s) for s in going])]
            self._flight = self._decode(going, tokens, unseen=1)
            self._land(flight)
            return
        self._land(flight)
        if flight is None:
            self._flight = self._decode(self.running, self._on_device([s.output[-1] for s in self.running]))

    def _decode(self, sequences: Sequence[Continuation], tokens: Tensor, *, unseen: int = 0) -> _Flight:
        batch = Batch.decode([_slot(s) for s in sequences])
        if self.graph is None:
            return self._pick(sequences, self.network.forward(tokens, batch, self.caches), unseen=unseen)
        with self.caches.step(batch) as opened:
            found = self.graph(tokens, opened)
        return self._pick(sequences, found.logits, likeliest=(found.tokens, found.finite), unseen=unseen)

    def _pick(
        self,
        sequences: Sequence[Continuation],
        logits: Tensor,
        *,
        likeliest: tuple[Tensor, Tensor] | None = None,
        unseen: int = 0,
    ) -> _Flight:
        """Begin to bring the next tokens to the host. unseen: tokens of each sequence that are still under way."""
        requests = [s.sampling for s in sequences]
        if likeliest is not None and all(
            r.greedy and r.repetition_penalty == 1 and r.logprobs is None for r in requests
        ):
            picked = SampledTokens(*likeliest)
        else:
            penalised = any(r.repetition_penalty != 1 for r in requests)
            picked = sample(
                logits,
                requests,
                positions=[len(s.output) + unseen for s in sequences],
                histories=[s.prompt + s.output for s in sequences] if penalised else None,
            )
        return _Flight(list(sequences), picked, picked.fetch())

    def _land(self, flight: _Flight | None) -> None:
        """Take the tokens of a flight; those of sequences that have ended since are dropped."""
        if flight is None:
            return
        if self._flight is flight:
            self._flight = None
        tokens, finite = flight.arrived()
        ended = [s.finish_reason is not None for s in flight.sequences]
        check_finite([bool(ok) or over for ok, over in zip(finite, ended, strict=True)])
        for row, (sequence, token) in enumerate(zip(flight.sequences, tokens, strict=True)):
            if ended[row]:
                continue
            event = sequence.accept(token, flight.picked, row)
            if sequence.finish_reason is not None:
                self.running.remove(sequence)
                self.caches.release([_slot(sequence)])
            if self.on_token is not None:
                self.on_token(event)

    def _on_device(self, values: Sequence[int]) -> Tensor:
        """int64 [·], by a copy that does not wait for the device."""
        return torch.tensor(values, dtype=torch.int64).to(self.network.device, non_blocking=True)


def _slot(sequence: Continuation) -> int:
    assert sequence.slot is not None  # running sequences have one
    return sequence.slot
