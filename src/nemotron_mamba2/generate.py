"""Model: a checkpoint made ready, and what it does with prompts.

`generate` runs any number of prompts of any lengths at once, without padding (`decoding.Loop`); on a device its decode
steps are CUDA graphs. On every way out, also by an exception of the callback, slots and pages go back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from .batch import Batch
from .chat import StreamDecoder, Tokenizer
from .checkpoint import load_model, resolve
from .config import ModelConfig, Policy
from .decoding import PROMPT_ROWS, Completion, Continuation, Loop, TokenEvent
from .errors import CheckpointError, RequestError
from .graph import ModelGraph, captures, uncapturable
from .model import PAGE_TOKENS, Caches, NemotronH
from .plan import plan_model
from .sampling import SamplingParams

__all__ = ["Completion", "Model", "TokenEvent"]

SCORE_ROWS = 256  # rows whose logits exist at once while scoring
MAX_SEQUENCES = 32  # most sequences that run at once; the others wait


class Model:
    """A loaded checkpoint: network, config, tokenizer, policy."""

    def __init__(self, network: NemotronH, tokenizer: Tokenizer | None = None, *, policy: Policy | None = None) -> None:
        """tokenizer: None when prompts are token ids and no text is wanted."""
        self.network = network
        self.config: ModelConfig = network.config
        self.tokenizer = tokenizer
        self.policy = policy or Policy()
        self._graph: ModelGraph | None = None

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

        device: "auto" is the GPU where torch finds one, else the CPU. dtype: of the activations; None: the
        checkpoint's. progress: is called with bytes done and bytes in all. Raises: CheckpointError, ConfigError,
        FormatError, NoKernel.
        """
        policy = policy or Policy()
        directory = resolve(path)
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
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
        token as it comes. caches: pools to use; None: pools of the right size for this call. On a device the pools of
        the last call and the graphs of its steps are kept for the next. Returns: completions in the order of the
        prompts. Raises: RequestError, OutOfPages; NemotronMamba2Error when logits are not finite.
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
            caches = self._pools(slots=len(longest), tokens=sum(longest))
        on_device = captures(self.network.device)
        graph = self._graph_for(caches) if on_device else None
        Loop(self.network, caches, deque(sequences), on_token, graph, ahead=on_device).run()
        return [sequence.completion() for sequence in sequences]

    def _pools(self, *, slots: int, tokens: int) -> Caches:
        """Free pools of at least these sizes: those of the last call when they will do."""
        kept = self._graph.caches if self._graph is not None else None
        if kept is not None and kept.free_slots >= slots and kept.free_pages >= slots + -(-tokens // PAGE_TOKENS):
            return kept
        kept = self._graph = None  # before others are made beside them
        return self.caches(slots=slots, tokens=tokens)

    def _graph_for(self, caches: Caches) -> ModelGraph | None:
        """The graphs of these pools; None where a layer cannot be captured."""
        sequences = caches.state.slots
        if uncapturable(self.network.capabilities, sequences=sequences):
            return None
        if self._graph is None or self._graph.caches is not caches:
            self._graph = ModelGraph(self.network, caches, sequences=sequences)
        return self._graph

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
    ) -> Continuation:
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
        return Continuation(index, ids, sampling.seeded(), most_tokens=most, ends=frozenset(ends), decoder=decoder)

    def _eos_token_ids(self) -> set[int]:
        if self.config.eos_token_ids or self.tokenizer is None:
            return set(self.config.eos_token_ids)
        return {token for token in (self.tokenizer.eos_token_id,) if token is not None}
