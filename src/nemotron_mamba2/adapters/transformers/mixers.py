"""`accelerate` and `restore`: the Mamba-2 layers of one loaded model, run by ours over the model's own weights.

Each Mamba-2 block of the instance gets two methods of its own, `forward` of the block and of its mixer; classes and
other instances stay as they are. A block whose norms and projections are plain runs whole: norm, in_proj, convolution,
recurrence, gated norm, out_proj and residual are our layer over the same tensors. Where in_proj or out_proj is anything
else (LoRA, hooks, biases, other quantisers), or a norm is hooked, the modules are called, and only convolution and
recurrence are ours. What is plain is looked at in every forward, so adapters may come and go.

In training mode the original runs. Outputs carry no gradient: a backward pass through them raises.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.models.nemotron_h import modeling_nemotron_h as original

from ... import AdapterError, NemotronMamba2Error, NemotronMamba2Layer, Plain, Policy, StatePool, Weight
from .cache import MambaState, StateSettings, empty_places, state_of
from .gradients import without_gradient
from .layers import hooked, identity, layer_over, plain, recur, settings_of, weight_of
from .modules import use_policy
from .rows import Forward, plan_forward

_RECORD = "_nemotron_mamba2"
_BLOCK_ARGUMENTS = ("cache", "attention_mask", "position_ids", "use_cache")
_MIXER_ARGUMENTS = ("cache", "attention_mask")
_PACKED = ("seq_idx", "cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens")


class Shared:
    """What the blocks of one model share, and the plan of the forward that is under way."""

    def __init__(self, policy: Policy, draft_rows: int, block_types: tuple[str, ...]) -> None:
        self.policy = policy
        self.draft_rows = draft_rows
        self.block_types = block_types
        self.seen_positions = 0  # of the first layer's state, before this forward
        self._mask: Tensor | None = None
        self._rest: tuple[Any, ...] = ()
        self._forward: Forward | None = None

    def plan(self, hidden: Tensor, mask: Tensor | None, *, state: MambaState, first: bool) -> Forward:
        """`plan_forward`, once for all layers of a forward. first: this is the model's first Mamba-2 layer."""
        sequences, positions = hidden.shape[:2]
        rest = (sequences, positions, hidden.device, state.started, state.record_past, state.draft_rows)
        if first or self._forward is None or self._mask is not mask or self._rest != rest:
            self._mask, self._rest = mask, rest
            self._forward = plan_forward(
                sequences,
                positions,
                mask,
                started=state.started,
                recording=state.record_past,
                draft_rows=state.draft_rows,
                device=hidden.device,
            )
        return self._forward


def accelerate(model: nn.Module, policy: Policy | None = None, *, draft_rows: int = 32) -> nn.Module:
    """Run the Mamba-2 layers of this Nemotron-H model by our layer, over the model's own weights.

    Nothing is copied but vectors that enter fp32 arithmetic. policy: None is `Policy()`. draft_rows: how many tokens
    `cache.crop` can take back when a cache records its past, as assisted generation does, which this enables on the
    instance. Calling it again sets another policy. Returns: the model. Raises: AdapterError for what is not served.
    """
    policy = policy or Policy()
    if policy.kv != "bf16":
        raise AdapterError(f"accelerate: Policy(kv={policy.kv!r}): keys and values belong to transformers' cache")
    if not 1 <= draft_rows <= 32:
        raise AdapterError(f"accelerate: draft_rows must be from 1 to 32, found {draft_rows}")
    blocks = [block for block in model.modules() if isinstance(block, original.NemotronHBlock)]
    mamba = [block for block in blocks if isinstance(block.mixer, original.NemotronHMamba2Mixer)]
    if not mamba:
        raise AdapterError(
            f"accelerate: {type(model).__name__} has no Mamba-2 layer of transformers' Nemotron-H; models of remote "
            "code are not served, load without trust_remote_code"
        )
    restore(model)
    use_policy(model, policy)
    shared = Shared(policy, draft_rows, tuple(block.block_type for block in blocks))
    made = [AcceleratedBlock(block, shared, first=block is mamba[0]) for block in mamba]
    for one in made:
        one.attach()
    model.__dict__[_RECORD] = made
    try:
        for one in made:
            one.prepare()
    except NemotronMamba2Error:
        restore(model)
        raise
    for module in model.modules():
        if isinstance(module, original.NemotronHPreTrainedModel):
            module._is_stateful = False
    return model


def restore(model: nn.Module) -> nn.Module:
    """Undo `accelerate`, wherever in the model it was called. Caches that it filled are refused from then on.
    Returns: the model."""
    for module in model.modules():
        for one in module.__dict__.pop(_RECORD, ()):
            one.detach()
        if isinstance(module, original.NemotronHPreTrainedModel):
            module.__dict__.pop("_is_stateful", None)
    return model


class AcceleratedBlock:
    """One Mamba-2 block of one model: its original, and our layer over its weights."""

    def __init__(self, block: Any, shared: Shared, *, first: bool) -> None:
        self.block = block
        self.mixer = block.mixer
        self.shared = shared
        self.first = first
        self.settings = StateSettings(*settings_of(self.mixer, shared.policy), shared.draft_rows)
        self._replaced: list[tuple[nn.Module, str, Any]] = []
        self._layers: dict[bool, tuple[tuple[Any, ...], NemotronMamba2Layer]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_layers": {}}  # made anew, over the weights of the copy

    # -- on and off ---------------------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Put our methods on the instance; where a device hook wraps forward, inside of it."""
        for module, method in ((self.block, self.forward), (self.mixer, self.mix)):
            name = "_old_forward" if "_old_forward" in module.__dict__ else "forward"
            self._replaced.append((module, name, module.__dict__.get(name)))
            module.__dict__[name] = method

    def prepare(self) -> None:
        """Make our layer now, so that what nothing serves is refused before the first token."""
        weight = self.block.norm.weight
        if weight.device.type == "meta":
            raise AdapterError(f"accelerate: layer {self.mixer.layer_idx} is on meta; offloaded models are not served")
        hidden = weight.new_empty(0)
        self._layer(hidden, whole=self._whole(hidden))

    def detach(self) -> None:
        """Take them off again."""
        for module, name, before in self._replaced:
            module.__dict__.pop(name, None)
            if before is not None:
                module.__dict__[name] = before
        self._replaced.clear()

    def _original(self, module: Any, *args: Any, **kwargs: Any) -> Tensor:
        before = next(before for replaced, _, before in self._replaced if replaced is module)
        return type(module).forward(module, *args, **kwargs) if before is None else before(*args, **kwargs)

    # -- the two methods ----------------------------------------------------------------------------------------------

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The block: [B, L, hidden] → the same, residual included."""
        if self.mixer.training or not self._whole(hidden_states):
            return self._original(self.block, hidden_states, *args, **kwargs)
        cache, mask = _read(_BLOCK_ARGUMENTS, args, kwargs)
        with torch.no_grad():
            layer = self._layer(hidden_states, whole=True)
            out = self._run(layer, hidden_states, cache, mask=mask)
        return without_gradient(out, hidden_states, self.mixer)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def mix(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The mixer: normed [B, L, hidden] → what the layer adds to the residual. Projections and norm are called."""
        cache, mask = _read(_MIXER_ARGUMENTS, args, kwargs)
        if self.mixer.training:
            layers = getattr(cache, "layers", [])
            if any(isinstance(layer, MambaState) for layer in layers):
                raise AdapterError("accelerated model in training mode: its cache was filled in eval mode; call eval()")
            return self._original(self.mixer, hidden_states, *args, **kwargs)
        with torch.no_grad():
            layer = self._layer(hidden_states, whole=False)
            out = self._run_modules(layer, hidden_states, cache, mask=mask)
        return without_gradient(out, hidden_states, self.mixer)

    def _run(self, layer: NemotronMamba2Layer, hidden: Tensor, cache: Cache | None, *, mask: Tensor | None) -> Tensor:
        state, pool, forward = self._begin(hidden, cache, mask)
        flat = hidden.reshape(-1, hidden.shape[-1])
        if len(forward.pieces) == 1 and forward.pieces[0].index is None:
            out = layer(flat, forward.pieces[0].batch, pool)
        else:
            out = flat.clone()  # padding passes as it came
            for piece in forward.pieces:
                index = slice(None) if piece.index is None else piece.index
                out[index] = layer(flat[index], piece.batch, pool)
        state.close(forward, hidden.shape[1])
        return out.view(hidden.shape)

    def _run_modules(
        self, layer: NemotronMamba2Layer, hidden: Tensor, cache: Cache | None, *, mask: Tensor | None
    ) -> Tensor:
        state, pool, forward = self._begin(hidden, cache, mask)
        if mask is not None:
            hidden = (hidden * mask[:, -hidden.shape[1] :, None]).to(hidden.dtype)
        c, mixer = layer.config, self.mixer
        projected = mixer.in_proj(hidden)
        rows = projected.shape[:2]
        z, xbc, dt = projected.split([c.d_inner, c.conv_dim, c.mamba_num_heads], -1)
        xbc, dt = (t.flatten(0, 1).to(hidden.dtype) for t in (xbc, dt))
        y = xbc.new_zeros(len(xbc), c.d_inner)
        for piece in forward.pieces:
            index = slice(None) if piece.index is None else piece.index
            with pool.step(piece.batch) as step:
                y[index] = recur(layer, xbc[index], dt[index], step=step, pool=pool)
        state.close(forward, hidden.shape[1])
        return mixer.out_proj(mixer.norm(y.view(*rows, -1), z).to(hidden.dtype))

    def _begin(self, hidden: Tensor, cache: Cache | None, mask: Tensor | None) -> tuple[MambaState, StatePool, Forward]:
        if mask is not None and mask.dim() != 2:
            raise AdapterError(f"accelerated layer: expected a mask [batch, positions], found {list(mask.shape)}")
        if cache is None:
            state = MambaState(self.settings)
        else:
            empty_places(cache, self.shared.block_types)
            state = state_of(cache, self.mixer.layer_idx, self.settings)
        if self.first:
            self.shared.seen_positions = state.positions
        elif state.positions != self.shared.seen_positions:
            raise AdapterError(
                f"cache: layer {self.mixer.layer_idx} has seen {state.positions} positions, the first "
                f"{self.shared.seen_positions}: a forward ended midway; start a new cache"
            )
        forward = self.shared.plan(hidden, mask, state=state, first=self.first)
        return state, state.open(len(hidden), hidden.device, hidden.dtype), forward

    # -- our layer ----------------------------------------------------------------------------------------------------

    def _whole(self, hidden: Tensor) -> bool:
        """Whether the block can run whole: norms and projections are plain, and in the dtype of hidden."""
        block, mixer = self.block, self.mixer
        method = mixer.__dict__.get("forward")
        if getattr(method, "__self__", None) is not self or hooked(mixer):
            return False
        if not plain(block.norm) or not plain(mixer.norm) or block.norm.weight.dtype != hidden.dtype:
            return False
        if block.norm.variance_epsilon != mixer.norm.variance_epsilon:
            return False
        weights = (weight_of(mixer.in_proj), weight_of(mixer.out_proj))
        return all(w is not None and (not isinstance(w, Plain) or w.weight.dtype == hidden.dtype) for w in weights)

    def _layer(self, hidden: Tensor, *, whole: bool) -> NemotronMamba2Layer:
        """Our layer over the tensors that the modules hold now; made anew when one of them changed."""
        mixer = self.mixer
        sources = [self.block.norm.weight, mixer.norm.weight, mixer.A_log, mixer.D, mixer.dt_bias]
        sources += [mixer.conv1d.weight] if mixer.conv1d.bias is None else [mixer.conv1d.weight, mixer.conv1d.bias]
        projections: list[Weight | None] = [None, None]
        if whole:
            projections = [weight_of(mixer.in_proj), weight_of(mixer.out_proj)]
        held = [w.weight for w in projections if w is not None]
        key = (hidden.dtype, hidden.device, *map(identity, (*sources, *held)))
        made = self._layers.get(whole)
        if made is None or made[0] != key:
            with torch.inference_mode(False), torch.no_grad():
                made = self._layers[whole] = (
                    key,
                    layer_over(self.block, hidden, projections, config=self.settings.config, policy=self.shared.policy),
                )
        return made[1]


def _read(names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Cache and mask of a call, under the names of any version."""
    given = dict(zip(names, args, strict=False)) | kwargs
    for name in _PACKED:
        if given.get(name) is not None:
            raise AdapterError(f"accelerated layer: sequences packed by {name} are not served; pass a padding mask")
    cache = next((given[n] for n in ("cache", "past_key_values", "cache_params") if given.get(n) is not None), None)
    return cache, given.get("attention_mask")
