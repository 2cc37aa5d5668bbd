"""Model: a checkpoint made ready, and the plain loop from prompts to text.

`generate` runs any number of prompts of any lengths at once, without padding: prompts go in as pieces of at most
PROMPT_ROWS rows a step, then every step adds one token to each running sequence. A sequence that ends frees its
slot and pages at once, and the next waiting one takes its place. A sequence is admitted only when its whole length
fits, so no step can run out of pages. On every way out, also by an exception of the callback, slots and pages go back.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from .batch import Batch
from .chat import StreamDecoder, Tokenizer
from .checkpoint import load_model, resolve
from .config import ModelConfig, Policy
from .errors import CheckpointError, OutOfPages, RequestError
from .model import PAGE_TOKENS, Caches, NemotronH
from .plan import plan_model
from .sampling import SampledTokens, SamplingParams, sample

FinishReason: TypeAlias = Literal["stop", "length"]
PROMPT_ROWS = 2048  # most prompt rows of one step
PIECE_ROWS = 256  # a prompt is cut at multiples of this, so at multiples of every chunk
SCORE_ROWS = 256  # rows whose logits exist at once while scoring
MAX_SEQUENCES = 32  # most sequences that run at once; the others wait


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


class Model:
    """A loaded checkpoint: network, config, tokenizer, policy."""

    def __init__(self, network: NemotronH, tokenizer: Tokenizer | None = None, *, policy: Policy | None = None) -> None:
        """tokenizer: None when prompts are token ids and no text is wanted."""
        self.network = network
        self.config: ModelConfig = network.config
        self.tokenizer = tokenizer
        self.policy = policy or Policy()

    @classmethod
    def from_checkpoint(
        cls,
        path: str | Path,
        *,
        device: str | torch.device = "cpu",
        policy: Policy | None = None,
        dtype: torch.dtype | None = None,
        mtp: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ) -> Model:
        """Load a checkpoint directory, or a hub id.

        device: "auto" is the CPU (on a GPU only the step rows of Mamba-2 layers have kernels so far). dtype: of the
        activations; None: the checkpoint's. progress: is called with bytes done and bytes in all. Raises:
        CheckpointError, ConfigError, FormatError, NoKernel.
        """
        policy = policy or Policy()
        directory = resolve(path)
        if device == "auto":
            device = "cpu"
        config = ModelConfig.from_checkpoint(directory)
        if dtype is not None:
            config = replace(config, dtype=dtype)
        if mtp and not config.mtp_layers:
            raise CheckpointError(f"{directory}: an MTP head is wanted, config.json describes none")
        if not mtp:
            config = replace(config, mtp_layers=())
        weights = load_model(directory, device=device, mtp=mtp, progress=progress)
        tokenizer = Tokenizer.from_directory(directory) if (directory / "tokenizer.json").is_file() else None
        return cls(
            NemotronH(config, weights, plan_model(config, weights, policy, device=device)), tokenizer, policy=policy
        )

    def explain(self) -> str:
        """The plan, as text: what runs, weight copies, memory, and the reasons."""
        return self.network.plan.explain()

    def caches(self, *, slots: int, tokens: int) -> Caches:
        """Pools for so many sequences and, in all of them together, so many tokens (rounded up to pages of each)."""
        pages = slots + -(-tokens // PAGE_TOKENS)
        return Caches.for_model(self.config, slots=slots, pages=pages, policy=self.policy, device=self.network.device)

    @torch.inference_mode()
    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_token: Callable[[TokenEvent], None] | None = None,
        caches: Caches | None = None,
    ) -> list[Completion]:
        """Continue every prompt.

        prompts: texts, or token ids. sampling: one for all, or one each; None: greedy. on_token: called for every
        token as it comes. caches: pools to use; None: pools of the right size for this call. Returns: completions in
        the order of the prompts. Raises: RequestError, OutOfPages; NemotronMamba2Error when logits are not finite.
        """
        if isinstance(sampling, SamplingParams) or sampling is None:
            sampling = [sampling or SamplingParams()] * len(prompts)
        if len(sampling) != len(prompts):
            raise RequestError(f"sampling: expected one for each of {len(prompts)} prompts, came {len(sampling)}")
        sequences = [
            self._sequence(i, prompt, request)
            for i, (prompt, request) in enumerate(zip(prompts, sampling, strict=True))
        ]
        if not sequences:
            return []
        if caches is None:
            longest = sorted((s.most_rows for s in sequences), reverse=True)[:MAX_SEQUENCES]
            caches = self.caches(slots=len(longest), tokens=sum(longest))
        loop = _Loop(self.network, caches, deque(sequences), on_token)
        try:
            while loop.waiting or loop.running:
                loop.advance()
        finally:
            caches.release([s.slot for s in loop.running if s.slot is not None])
        return [sequence.completion() for sequence in sequences]

    @torch.inference_mode()
    def score(self, prompts: Sequence[str | Sequence[int]], *, caches: Caches | None = None) -> list[list[float]]:
        """Log-probability of every token of each prompt, given the ones before it; the first token has none.

        Returns: n − 1 natural logarithms for a prompt of n tokens. Raises: RequestError, OutOfPages.
        """
        sequences = [self._sequence(i, p, SamplingParams(max_tokens=1), room=0) for i, p in enumerate(prompts)]
        if caches is None and sequences:
            caches = self.caches(slots=1, tokens=max(len(s.prompt) for s in sequences))
        return [list(self._scores(s.prompt, caches)) for s in sequences] if caches else []

    def _scores(self, ids: list[int], caches: Caches) -> Iterator[float]:
        tokens = torch.tensor(ids, dtype=torch.int64, device=self.network.device)
        [slot] = caches.acquire(1)
        try:
            for first in range(0, len(ids) - 1, PROMPT_ROWS):
                piece = tokens[first : first + PROMPT_ROWS]
                with caches.step(Batch.prefill([slot], [len(piece)])) as opened:
                    hidden = self.network.final_norm(self.network.hidden_states(piece, opened))
                for row in range(0, len(piece), SCORE_ROWS):
                    following = tokens[first + row + 1 : first + min(row + SCORE_ROWS, len(piece)) + 1]
                    logits = self.network.logits(hidden[row : row + len(following)])
                    yield from logits.log_softmax(-1).gather(-1, following[:, None]).flatten().tolist()
        finally:
            caches.release([slot])

    def _sequence(
        self, index: int, prompt: str | Sequence[int], sampling: SamplingParams, *, room: int = 1
    ) -> _Sequence:
        """A prompt checked and turned into token ids. room: tokens that must fit after it."""
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError(f"prompt {index}: the checkpoint has no tokenizer; pass token ids")
            ids = self.tokenizer.encode(prompt)
        else:
            ids = list(prompt)
        c = self.config
        if not ids:
            raise RequestError(f"prompt {index}: expected at least one token, came none")
        for token in ids:
            if not isinstance(token, int) or not 0 <= token < c.vocab_size:
                raise RequestError(f"prompt {index}: token ids go from 0 to {c.vocab_size - 1}, came {token!r}")
        if len(ids) + room > c.max_position_embeddings:
            raise RequestError(
                f"prompt {index}: {len(ids)} tokens, expected at most {c.max_position_embeddings - room} "
                f"(max_position_embeddings {c.max_position_embeddings}); shorten it"
            )
        decoder = StreamDecoder(self.tokenizer, stop=sampling.stop) if self.tokenizer is not None else None
        if sampling.stop and decoder is None:
            raise RequestError(f"prompt {index}: stop strings need a tokenizer, the checkpoint has none")
        ends = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else self._eos_token_ids())
        most = min(sampling.max_tokens, c.max_position_embeddings - len(ids))
        return _Sequence(index, ids, sampling.seeded(), most_tokens=most, ends=frozenset(ends), decoder=decoder)

    def _eos_token_ids(self) -> set[int]:
        if self.config.eos_token_ids or self.tokenizer is None:
            return set(self.config.eos_token_ids)
        return {token for token in (self.tokenizer.eos_token_id,) if token is not None}


@dataclass(eq=False)
class _Sequence:
    """One request under way."""

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


@dataclass(eq=False)
class _Loop:
    """The sequences of one `generate` call, waiting and running."""

    network: NemotronH
    caches: Caches
    waiting: deque[_Sequence]
    on_token: Callable[[TokenEvent], None] | None
    running: list[_Sequence] = field(default_factory=list)

    def advance(self) -> None:
        """One step: admit who fits; run prompt rows if any are left, else one token for each sequence."""
        self._admit()
        pieces = self._prompt_pieces()
        if pieces:
            batch = Batch.prefill([self._slot(s) for s, _ in pieces], [rows for _, rows in pieces])
            ids = [token for s, rows in pieces for token in s.prompt[s.rows_done : s.rows_done + rows]]
        else:
            pieces = [(s, 1) for s in self.running]
            batch = Batch.decode([self._slot(s) for s in self.running])
            ids = [s.output[-1] for s in self.running]
        ready, rows = [], []
        for i, (sequence, count) in enumerate(pieces):
            sequence.rows_done += count
            if sequence.prompt_rows_left <= 0:
                ready.append(sequence)
                rows.append(sum(batch.rows[: i + 1]) - 1)
        tokens = torch.tensor(ids, dtype=torch.int64, device=self.network.device)
        logits = self.network.forward(tokens, batch, self.caches, logits_rows=rows)
        if ready:
            self._sample(ready, logits)

    def _admit(self) -> None:
        pages = self.caches.pages
        promised = sum(pages.pages_for(s.most_rows) - len(pages.held(self._slot(s))) for s in self.running)
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

    def _prompt_pieces(self) -> list[tuple[_Sequence, int]]:
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

    def _sample(self, sequences: list[_Sequence], logits: Tensor) -> None:
        picked = sample(
            logits,
            [s.sampling for s in sequences],
            positions=[len(s.output) for s in sequences],
            histories=[s.prompt + s.output for s in sequences]
            if any(s.sampling.repetition_penalty != 1 for s in sequences)
            else None,
        )
        picked.raise_if_not_finite()
        for row, (sequence, token) in enumerate(zip(sequences, picked.tokens.tolist(), strict=True)):
            event = sequence.accept(token, picked, row)
            if sequence.finish_reason is not None:
                self.running.remove(sequence)
                self.caches.release([self._slot(sequence)])
            if self.on_token is not None:
                self.on_token(event)

    @staticmethod
    def _slot(sequence: _Sequence) -> int:
        assert sequence.slot is not None  # running sequences have one
        return sequence.slot
