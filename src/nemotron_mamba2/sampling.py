"""From logits to the next token, for a whole batch at once.

A request's draws depend on its seed and on the index of the token, on nothing else: not on its batch mates, its row
or the device. The noise of token v is a hash of (seed, position, v), computed where the logits are; the largest
noisy logit wins (Gumbel's trick), so no sum over the vocabulary decides a draw. Noise is fp64: two tokens then tie
about once in 2³² draws, not in 2²⁴. The hash is two rounds of the 32-bit finaliser found by C. Wellons ("lowbias32").

Every filter is a lower bound on the logit, so it keeps all tokens that tie with the last one it keeps, and no order
among equals can matter. `sample` never waits for the device; logits that are NaN or all −inf are reported by
`SampledTokens.finite`, which the caller reads together with the tokens.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .errors import NemotronMamba2Error, RequestError, ShapeError

_MASK32 = 0xFFFFFFFF
_MASK64 = 0xFFFFFFFFFFFFFFFF


@dataclass(frozen=True)
class SamplingParams:
    """How one request picks its tokens, and when it ends.

    max_tokens: most tokens to generate.
    temperature: 0 takes the most likely token; above 0, logits are divided by it.
    top_k: keep the k most likely tokens. top_p: of those, keep the fewest whose probabilities reach p.
    min_p: keep tokens with at least this share of the most likely one's probability.
    repetition_penalty: logits of tokens seen in the prompt or output are divided by it (multiplied, when negative).
    seed: same seed, same prompt, same tokens; None: drawn from the system.
    stop: the text ends before the first of these. stop_token_ids: these end it too. ignore_eos: the model's own
        end tokens do not.
    logprobs: report log-probabilities, and those of this many most likely tokens; None: report none.

    Raises: RequestError when a value is out of range.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        _integer("max_tokens", self.max_tokens, at_least=1)
        _real("temperature", self.temperature, "a finite number, at least 0", lambda t: t >= 0)
        _real("repetition_penalty", self.repetition_penalty, "a finite number above 0", lambda r: r > 0)
        if self.top_k is not None:
            _integer("top_k", self.top_k, at_least=1)
        if self.top_p is not None:
            _real("top_p", self.top_p, "a number above 0, at most 1", lambda p: 0 < p <= 1)
        if self.min_p is not None:
            _real("min_p", self.min_p, "a number from 0 to 1", lambda p: 0 <= p <= 1)
        if self.seed is not None:
            _integer("seed", self.seed, at_least=0, below=2**63)
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, at_least=0)
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if not all(isinstance(text, str) and text for text in stop):
            raise RequestError(f"stop: expected strings that are not empty, came {list(stop)!r}")
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        for token in self.stop_token_ids:
            _integer("stop_token_ids", token, at_least=0)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken, without a draw."""
        return self.temperature == 0

    def seeded(self) -> SamplingParams:
        """The same, with a seed: its own, or one drawn now. A request that may be resumed is seeded when it enters."""
        return self if self.seed is not None else replace(self, seed=secrets.randbits(63))


@dataclass(frozen=True, eq=False)
class SampledTokens:
    """One token per sequence, all on the device of the logits.

    tokens: int64 [S]. finite: bool [S], False where the logits held NaN or +inf, or nothing but −inf: such a token
    means nothing. logprobs: fp32 [S] of the tokens; top_tokens: int64 [S, n] and top_logprobs: fp32 [S, n], most
    likely first, n the most that any sequence asked for; all three None when no sequence asked. Log-probabilities
    are the model's own: before penalty, temperature and filters.
    """

    tokens: Tensor
    finite: Tensor
    logprobs: Tensor | None = None
    top_tokens: Tensor | None = None
    top_logprobs: Tensor | None = None

    def raise_if_not_finite(self) -> None:
        """Wait for the device. Raises: NemotronMamba2Error that names the sequences whose logits mean nothing."""
        check_finite(self.finite.tolist())

    def fetch(self) -> Callable[[], tuple[list[int], list[int]]]:
        """Begin to copy `tokens` and `finite` (1 or 0) to the host. Returns: what waits for them and gives both.

        The memory of both may be written again at once by work that is queued behind.
        """
        both = torch.stack((self.tokens, self.finite.to(self.tokens.dtype)))
        if both.device.type != "cuda":
            tokens, finite = both.tolist()
            return lambda: (tokens, finite)
        host = torch.empty(both.shape, dtype=both.dtype, pin_memory=True)
        host.copy_(both, non_blocking=True)
        event = torch.cuda.Event()
        event.record()

        def arrived() -> tuple[list[int], list[int]]:
            event.synchronize()
            tokens, finite = host.tolist()
            return tokens, finite

        return arrived


def check_finite(finite: Sequence[bool]) -> None:
    """Raises: NemotronMamba2Error that names the sequences for which it is False, as their logits mean nothing."""
    bad = [row for row, fine in enumerate(finite) if not fine]
    if bad:
        raise NemotronMamba2Error(
            f"logits of sequence {', '.join(map(str, bad))} of {len(finite)}: expected finite values, found "
            "NaN or infinity; the weights or the state are damaged"
        )


def sample(
    logits: Tensor,
    sampling: Sequence[SamplingParams],
    *,
    positions: Sequence[int],
    histories: Sequence[Sequence[int]] | None = None,
) -> SampledTokens:
    """Pick the next token of every sequence: penalty, temperature, top-k, top-p, min-p, then a seeded draw.

    logits: fp32 [S, vocab], left unchanged; sampling: one per sequence; positions: index of the token within its
    output; histories: ids of prompt and output so far, read only for sequences with a repetition penalty. Among
    equally likely tokens greedy takes the lowest id.

    Raises: ShapeError when the lengths differ or a needed history is missing.
    """
    _check_lengths(logits, sampling, positions, histories)
    best, _ = raw = torch.max(logits, -1)
    finite = torch.isfinite(best)
    adjusted = _penalise(logits, sampling, histories)
    tokens = raw.indices if adjusted is logits else torch.argmax(adjusted, -1)
    drawn = [row for row, request in enumerate(sampling) if not request.greedy]
    if drawn:
        rows = _on_device(drawn, torch.int64, logits.device)
        picked = [sampling[row] for row in drawn]
        noise = gumbel_noise(
            [request.seeded().seed or 0 for request in picked],
            [positions[row] for row in drawn],
            vocab_size=logits.shape[-1],
            device=logits.device,
        )
        scores = _filtered(adjusted[rows], picked).double().add_(noise)
        tokens = tokens.index_copy(0, rows, torch.argmax(scores, -1))
    return _with_logprobs(logits, tokens, finite, sampling)


def gumbel_noise(
    seeds: Sequence[int], positions: Sequence[int], *, vocab_size: int, device: torch.device | str = "cpu"
) -> Tensor:
    """Gumbel noise −log(−log u) for each (seed, position) and token id.

    u = (h + ½) / 2³², h a 32-bit hash of (seed, position, token id). Returns: fp64 [S, vocab].
    """
    keys = [_key(seed, position) for seed, position in zip(seeds, positions, strict=True)]
    low = _on_device([key & _MASK32 for key in keys], torch.int64, device)[:, None]
    high = _on_device([key >> 32 for key in keys], torch.int64, device)[:, None]
    ids = torch.arange(vocab_size, dtype=torch.int64, device=device).mul_(0x9E3779B1)
    bits = _mix32_(ids + low & _MASK32)
    bits = _mix32_(bits.bitwise_xor_(high))
    return bits.double().add_(0.5).mul_(2.0**-32).log_().neg_().log_().neg_()


def _key(seed: int, position: int) -> int:
    """64 well-mixed bits of (seed, position), by the splitmix64 finaliser; host integers."""
    key = seed & _MASK64
    for word in (position, 0x6A09E667F3BCC909):
        key = (key + 0x9E3779B97F4A7C15 * (word + 1)) & _MASK64
        key = (key ^ key >> 30) * 0xBF58476D1CE4E5B9 & _MASK64
        key = (key ^ key >> 27) * 0x94D049BB133111EB & _MASK64
        key ^= key >> 31
    return key


def _mix32_(x: Tensor) -> Tensor:
    """Hash 32-bit values held in int64, in place. Products wrap; only their low 32 bits are kept."""
    x.bitwise_xor_(x >> 16).mul_(0x7FEB352D).bitwise_and_(_MASK32)
    x.bitwise_xor_(x >> 15).mul_(0x846CA68B).bitwise_and_(_MASK32)
    return x.bitwise_xor_(x >> 16)


def _penalise(logits: Tensor, sampling: Sequence[SamplingParams], histories: Sequence[Sequence[int]] | None) -> Tensor:
    """Logits after the repetition penalty; the same tensor when no sequence has one."""
    rows: list[int] = []
    ids: list[int] = []
    penalties: list[float] = []
    for row, request in enumerate(sampling):
        if request.repetition_penalty != 1 and histories is not None:
            seen = set(histories[row])
            rows += [row] * len(seen)
            ids += seen
            penalties += [request.repetition_penalty] * len(seen)
    if not ids:
        return logits
    row_index = _on_device(rows, torch.int64, logits.device)
    id_index = _on_device(ids, torch.int64, logits.device)
    penalty = _on_device(penalties, torch.float32, logits.device)
    values = logits[row_index, id_index]
    values = torch.where(values > 0, values / penalty, values * penalty)
    return logits.index_put((row_index, id_index), values)


def _filtered(logits: Tensor, sampling: Sequence[SamplingParams]) -> Tensor:
    """Logits over temperature, the largest at 0, and −inf for every token that a filter drops: fp32 [S, vocab]."""
    temperature = _on_device([request.temperature for request in sampling], torch.float32, logits.device)
    # The largest goes to 0 before the division: a tiny temperature then cannot turn inf − inf into NaN. A temperature
    # that is 0 in fp32 divides 0 by the smallest normal number instead.
    temperature = temperature.clamp_(min=torch.finfo(torch.float32).tiny)
    scaled = (logits - logits.amax(-1, keepdim=True)).div_(temperature[:, None])
    bound = _min_p_bound(sampling, logits.device)
    cut = [row for row, r in enumerate(sampling) if r.top_k is not None or (r.top_p is not None and r.top_p < 1)]
    if cut:
        rows = _on_device(cut, torch.int64, logits.device)
        tail = _top_bound(scaled if len(cut) == len(sampling) else scaled[rows], [sampling[row] for row in cut])
        bound = bound.index_copy(0, rows, torch.maximum(bound[rows], tail))
    return scaled.masked_fill_(scaled < bound[:, None], -math.inf)


def _min_p_bound(sampling: Sequence[SamplingParams], device: torch.device) -> Tensor:
    """p ≥ min_p · p_max is logit ≥ log(min_p), when the largest logit is 0."""
    return _on_device([math.log(r.min_p) if r.min_p else -math.inf for r in sampling], torch.float32, device)


def _top_bound(scaled: Tensor, sampling: Sequence[SamplingParams]) -> Tensor:
    """The smallest logit that top-k and then top-p keep, per sequence: fp32 [S].

    Only the k largest values matter, so only as many are sorted as the widest request needs. The sums are fp64,
    which makes the place of the cut independent of how wide that was.
    """
    vocab_size = scaled.shape[-1]
    kept = [min(r.top_k or vocab_size, vocab_size) for r in sampling]
    width = max(kept)
    values = torch.topk(scaled, width, dim=-1).values if width < vocab_size else scaled.sort(-1, descending=True).values
    count = _on_device(kept, torch.int64, scaled.device)[:, None]
    share = _on_device([r.top_p or 1.0 for r in sampling], torch.float64, scaled.device)[:, None]
    place = torch.arange(width, device=scaled.device)
    weight = values.double().exp_().masked_fill_(place >= count, 0.0)
    total = weight.cumsum(-1)
    # A token stays while the ones before it do not reach p. Without top-p all k stay, whatever the sums round to.
    before_is_short = (total - weight < share * total[:, -1:]) | (share >= 1)
    last = (before_is_short & (place < count)).sum(-1, keepdim=True).clamp_(min=1).sub_(1)
    return values.gather(-1, last).squeeze(-1)


def _with_logprobs(logits: Tensor, tokens: Tensor, finite: Tensor, sampling: Sequence[SamplingParams]) -> SampledTokens:
    wanted = [request.logprobs for request in sampling if request.logprobs is not None]
    if not wanted:
        return SampledTokens(tokens, finite)
    norm = torch.logsumexp(logits, -1, keepdim=True)
    chosen = (logits.gather(-1, tokens[:, None]) - norm).squeeze(-1)
    top = torch.topk(logits, min(max(wanted), logits.shape[-1]), dim=-1)
    return SampledTokens(tokens, finite, chosen, top.indices, top.values - norm)


def _check_lengths(
    logits: Tensor,
    sampling: Sequence[SamplingParams],
    positions: Sequence[int],
    histories: Sequence[Sequence[int]] | None,
) -> None:
    if logits.dim() != 2 or logits.dtype != torch.float32:
        raise ShapeError(f"logits: expected float32 [S, vocab], came {logits.dtype} {list(logits.shape)}")
    lengths = {"sampling": len(sampling), "positions": len(positions)}
    if histories is not None:
        lengths["histories"] = len(histories)
    for name, length in lengths.items():
        if length != len(logits):
            raise ShapeError(f"{name}: expected one entry for each of {len(logits)} rows of logits, came {length}")
    if histories is None and any(request.repetition_penalty != 1 for request in sampling):
        raise ShapeError("histories: expected the token ids of each sequence, since one has a repetition penalty")


def _on_device(values: Sequence[int] | Sequence[float], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """A host list as a tensor, by way of pinned memory, so that the copy does not wait for the device."""
    pinned = torch.device(device).type == "cuda"
    return torch.tensor(values, dtype=dtype, pin_memory=pinned).to(device, non_blocking=True)


def _integer(name: str, value: object, *, at_least: int, below: int | None = None) -> None:
    inside = isinstance(value, int) and not isinstance(value, bool) and value >= at_least
    if not inside or (below is not None and isinstance(value, int) and value >= below):
        limit = "" if below is None else f" and below {below}"
        raise RequestError(f"{name}: expected a whole number, at least {at_least}{limit}, came {value!r}")


def _real(name: str, value: object, expected: str, inside: Callable[[float], bool]) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not (number and math.isfinite(value) and inside(value)):  # type: ignore[arg-type]
        raise RequestError(f"{name}: expected {expected}, came {value!r}")
