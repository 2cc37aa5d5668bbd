"""The state of one Mamba-2 layer inside a cache of transformers.

`MambaState` takes the place of the linear-attention layer in `cache.layers` at the first accelerated forward, and keeps
that object's contract: reorder, crop, reset, deepcopy, repeat and select. It owns a state pool of one layer with a slot
per sequence. `crop` is a commit of fewer rows: it costs nothing and is exact, but reaches only into the last forward.
The tensors of the original are not there: reading them raises, because what reads them would compute something else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers.cache_utils import Cache, LinearAttentionCacheLayerMixin, LinearAttentionLayer

from ... import AdapterError, Mamba2Config, StatePool
from .rows import Forward

DRAFT_ROWS = 8  # rows that crop can take back when the cache does not record its past
_FOREIGN = "this cache holds the state of an accelerated model; use it with that model, or start a new one"


@dataclass(frozen=True)
class StateSettings:
    """What a layer's pool is made with. draft_rows: rows that crop can take back when the cache records its past."""

    config: Mamba2Config
    state_dtype: torch.dtype
    draft_rows: int


class MambaState(LinearAttentionCacheLayerMixin):
    """One layer's recurrent state for the sequences of a cache. `started`: whether there is one yet."""

    def __init__(self, settings: StateSettings, *, recording: bool = False) -> None:
        super().__init__(number_of_states=1)
        self.settings = settings
        self.record_past = recording
        self.pool: StatePool | None = None
        self.positions = 0
        self._kept: tuple[tuple[int, ...], ...] = ()  # of the last forward, until it is committed

    # -- for our layers -----------------------------------------------------------------------------------------------

    @property
    def started(self) -> bool:
        return self.pool is not None

    @property
    def draft_rows(self) -> int:
        """Most rows of a verify batch; fixed when the pool is made."""
        if self.pool is not None:
            return self.pool.layout.draft_rows
        return self.settings.draft_rows if self.record_past else min(DRAFT_ROWS, self.settings.draft_rows)

    def open(self, sequences: int, device: torch.device, dtype: torch.dtype) -> StatePool:
        """The pool, ready for the next forward: made at the first one; what could be cropped until now is kept."""
        if self.pool is None:
            self.pool = self._new_pool(sequences, device, dtype)
        self._commit(0)
        if self.pool.slots != sequences:
            raise AdapterError(
                f"cache: it holds {self.pool.slots} sequences, this forward has {sequences}; start a new cache"
            )
        return self.pool

    def close(self, forward: Forward, positions: int) -> None:
        """The forward is done; its last rows may still be taken back."""
        self._kept = forward.kept
        self.positions += positions
        self.has_previous_state[0] = True

    # -- the contract -------------------------------------------------------------------------------------------------

    is_compileable = True  # as the original: beside static attention layers, masks are made only when all say so
    is_croppable = True
    keys = values = None

    def get_seq_length(self) -> int:
        """Positions seen, padding included, as attention layers count them."""
        return self.positions

    def get_max_length(self) -> int:
        """−1: there is no limit."""
        return -1

    def activate_past_recording(self) -> None:
        """From the next forward on, its last draft_rows rows can be taken back, however long it is."""
        self.record_past = True

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last −tokens_to_remove positions, exactly. Raises: AdapterError beyond the last forward's
        reach."""
        back = -int(tokens_to_remove)  # some versions pass a tensor
        if back < 0:
            raise AdapterError(f"cache.crop({tokens_to_remove}): give minus the number of tokens to remove")
        if back and back >= len(self._kept):
            reach = max(len(self._kept) - 1, 0)
            way = "" if self.record_past else "; cache.activate_past_recording() before that forward reaches further"
            raise AdapterError(
                f"cache.crop({tokens_to_remove}): the recurrent state can go back {reach} of the last forward's "
                f"tokens{way}; accelerate(…, draft_rows=…) sets how many a recording cache can"
            )
        self._commit(back)
        self.positions -= back

    def reset(self) -> None:
        """Forget everything; the next forward starts anew."""
        self.pool, self.positions, self._kept = None, 0, ()
        self.has_previous_state[0] = False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Sequence i goes on from what sequence beam_idx[i] was."""
        self._select(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every sequence `repeats` times, side by side."""
        if self.pool is not None:
            self._select([i for i in range(self.pool.slots) for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        """Only these sequences (indices, or a mask)."""
        if self.pool is not None:
            self._select(torch.arange(self.pool.slots)[indices.cpu()].tolist())

    def offload(self) -> None:
        """Nothing: the state stays where it is."""

    def prefetch(self) -> None:
        """Nothing: the state stays where it is."""

    # -- what belongs to the original layer ---------------------------------------------------------------------------

    @property
    def conv_states(self) -> NoReturn:
        """Not here. Raises: AdapterError."""
        raise AdapterError(_FOREIGN)

    @conv_states.setter
    def conv_states(self, value: object) -> None:
        """Ignored: the class above sets it once."""

    @property
    def recurrent_states(self) -> NoReturn:
        """Not here. Raises: AdapterError."""
        raise AdapterError(_FOREIGN)

    @recurrent_states.setter
    def recurrent_states(self, value: object) -> None:
        """Ignored: the class above sets it once."""

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Refused: the original mixer asks for it. Raises: AdapterError."""
        raise AdapterError(_FOREIGN)

    update_conv_state = update_recurrent_state = lazy_initialization

    # -- inside -------------------------------------------------------------------------------------------------------

    def _new_pool(self, sequences: int, device: torch.device, dtype: torch.dtype) -> StatePool:
        draft_rows = self.draft_rows
        with torch.inference_mode(False):  # tensors made under inference mode could not be written outside of it
            pool = StatePool(
                self.settings.config,
                layers=1,
                slots=sequences,
                device=device,
                dtype=dtype,
                state_dtype=self.settings.state_dtype,
                window_rows=16 if draft_rows <= 16 else 32,
                draft_rows=draft_rows,
            )
        pool.acquire(sequences)
        return pool

    def _commit(self, back: int) -> None:
        if self.pool is not None and self._kept:
            self.pool.commit(range(self.pool.slots), self._kept[back])
        self._kept = ()

    def _select(self, order: Sequence[int]) -> None:
        if self.pool is None:
            return
        self._commit(0)
        old = self.pool
        if len(order) == old.slots:
            old.reorder(range(old.slots), order)
            return
        layout, device = old.layout, old.device
        self.pool = self._new_pool(len(order), device, layout.dtype)
        for slot, source in enumerate(order):
            self.pool.restore(slot, old.snapshot(source))


class NoState(LinearAttentionCacheLayerMixin):
    """A layer that keeps nothing. transformers < 5.17 puts linear-attention layers where MLP and MoE layers are, and
    those cannot be cropped."""

    is_compileable = True
    is_croppable = True
    keys = values = None

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Refused: nothing may be kept here. Raises: AdapterError."""
        raise AdapterError("cache: an MLP or MoE layer keeps no state")

    update_conv_state = update_recurrent_state = lazy_initialization

    def crop(self, tokens_to_remove: int) -> None:
        """Nothing to take back."""

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Nothing to repeat."""

    def batch_select_indices(self, indices: Tensor) -> None:
        """Nothing to select."""


def state_of(cache: Cache, layer: int, settings: StateSettings) -> MambaState:
    """The state of a layer in a cache, put there when the cache is new. Raises: AdapterError for a cache that is not
    made for this model, or was filled without acceleration."""
    layers = getattr(cache, "layers", None)
    if not isinstance(layers, list) or layer >= len(layers):
        raise AdapterError(
            f"cache: {type(cache).__name__} has no layer {layer}; make it as DynamicCache(config=model.config)"
        )
    found = layers[layer]
    if isinstance(found, MambaState):
        if found.settings.config != settings.config:
            raise AdapterError(f"cache: layer {layer} holds the state of another model; start a new cache")
        return found
    if type(found) is not LinearAttentionLayer:
        raise AdapterError(
            f"cache: layer {layer} of {type(cache).__name__} is a {type(found).__name__}, expected a "
            "LinearAttentionLayer; make the cache as DynamicCache(config=model.config)"
        )
    if any(found.has_previous_state.values()):
        raise AdapterError("cache: it was filled without acceleration; start a new cache, or restore(model)")
    layers[layer] = state = MambaState(settings, recording=found.record_past)
    return state


def empty_places(cache: Cache, block_types: Sequence[str]) -> None:
    """Put `NoState` where this version of transformers keeps linear-attention layers for MLP and MoE layers."""
    for index, kind in enumerate(block_types[: len(cache.layers)]):
        if kind in ("mlp", "moe") and type(cache.layers[index]) is LinearAttentionLayer:
            recording = cache.layers[index].record_past
            cache.layers[index] = NoState()
            cache.layers[index].record_past = recording
