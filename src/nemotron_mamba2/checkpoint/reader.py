"""Tensors handed out by name, each once, as what the layers hold: fp32 vectors, projections, stacks of experts.

A `Reader` runs twice over a checkpoint. On the device "meta" it touches headers only, so that every name, dtype and
shape has been checked before a byte of data is read; then it runs again with the data. On the CPU a tensor stays a view
of the mapped file; only what must be stacked (experts) or held in fp32 (vectors) takes memory of its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ..errors import CheckpointError, FormatError
from ..formats import Weight
from .files import TensorEntry
from .names import SKIP_RULES, STRAY_INPUT_SCALE, Skipped, SkipRule, skipped
from .projection import INPUT_SCALES, SUFFIXES, build, format_of, prepare, scalar, signature, weight_of
from .recipe import Recipe

_VECTOR_DTYPES = ("F32", "BF16", "F16")
KV_UNSCALED = "the config asks for an FP8 KV cache, the file has no scales for it; they count as 1"
CORRECTION_BIAS = "the router's correction bias is not F32; near 57 a bf16 step is 0.25, which breaks routing"


class Reader:
    """Hands out tensors by canonical name and remembers what was taken, what was skipped, and what was odd.

    tensors: canonical name → entry; fetch: entry → its tensor; recipe: advice, or None; device: where weights go;
    taken: called with the bytes of each tensor.
    """

    def __init__(
        self,
        tensors: Mapping[str, TensorEntry],
        fetch: Callable[[TensorEntry], Tensor],
        recipe: Recipe | None,
        *,
        device: torch.device,
        taken: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.tensors = tensors
        self.recipe = recipe
        self.device = device
        self.unread = set(tensors)
        self.skipped: dict[str, SkipRule] = {}
        self.surprises: defaultdict[str, list[str]] = defaultdict(list)  # what was odd → the tensors
        self._fetch = fetch
        self._taken = taken

    # tensors

    def take(self, name: str) -> tuple[TensorEntry, Tensor]:
        """A tensor and its entry, where the files keep it (on the CPU, or on meta)."""
        entry = self._claim(name)
        tensor = self._fetch(entry)
        self._taken(entry.nbytes)
        return entry, tensor

    def _claim(self, name: str) -> TensorEntry:
        if name not in self.unread:
            raise CheckpointError(f"{name}: missing; fetch the checkpoint again, or check config.json")
        self.unread.discard(name)
        return self.tensors[name]

    def vector(self, name: str, *shape: int, dtypes: tuple[str, ...] = _VECTOR_DTYPES) -> Tensor:
        """A plain tensor of this shape as fp32 on the device."""
        entry, tensor = self.take(name)
        if entry.dtype not in dtypes or entry.shape != shape:
            raise CheckpointError(
                f"{entry}: expected {' or '.join(dtypes)} {list(shape)}, found {entry.dtype} {list(entry.shape)}"
            )
        return tensor.to(self.device, torch.float32)

    def scalar(self, name: str) -> Tensor:
        """One number, as fp32 [] on the device."""
        return scalar(*self.take(name)).to(self.device)

    # projections

    def projection(self, module: str, rows: int, columns: int) -> Weight:
        """A matrix [rows, columns] in whatever format it is stored."""
        parts = self._parts(module)
        name = format_of(module, parts)
        tensors = {}
        for suffix in parts:
            entry, tensor = self.take(f"{module}.{suffix}")
            tensors[suffix] = prepare(suffix, name, entry=entry, tensor=tensor).to(self.device)
        return self._finish(module, name, parts, tensors=tensors, shape=(rows, columns))

    def experts(self, module: str, projection: str, shape: tuple[int, int, int]) -> Weight:
        """The matrices of all experts of a layer, stacked: [experts, rows, columns].

        Files hold one matrix per expert, or (saved again by transformers) the stack itself.
        """
        stacked = f"{module}.{projection}"
        if stacked in self.unread:
            entry, tensor = self.take(stacked)
            _expect_shape(entry, entry.shape, shape)
            return build("bf16", entry, {"weight": tensor.to(self.device)}, dynamic_rows=False)
        modules = [f"{module}.{expert}.{projection}" for expert in range(shape[0])]
        every = [self._parts(one) for one in modules]
        name = format_of(modules[0], every[0])
        for one, parts in zip(modules, every, strict=True):
            self._check_alike(one, parts, like=(modules[0], every[0]), name=name)
        tensors = {suffix: self._stack(modules, suffix, name) for suffix in every[0]}
        return self._finish(modules[0], name, every[0], tensors=tensors, shape=shape)

    def _parts(self, module: str) -> dict[str, TensorEntry]:
        names = {suffix: f"{module}.{suffix}" for suffix in SUFFIXES if f"{module}.{suffix}" in self.unread}
        if self.recipe is not None and any(suffix in names for suffix in INPUT_SCALES):
            advice = self.recipe.advice(module)
            if advice.weight_only and advice.format != "bf16":
                for name in [names.pop(suffix) for suffix in INPUT_SCALES if suffix in names]:
                    self.skip(name, STRAY_INPUT_SCALE)
        return {suffix: self.tensors[name] for suffix, name in names.items()}

    def _check_alike(
        self, module: str, parts: dict[str, TensorEntry], *, like: tuple[str, dict[str, TensorEntry]], name: str
    ) -> None:
        other = format_of(module, parts)
        if signature(other, parts) != signature(name, like[1]):
            first, second = (
                f"{where} is {form} ({', '.join(f'{suffix} {entry.dtype}' for suffix, entry in those.items())})"
                for where, form, those in ((like[0], name, like[1]), (module, other, parts))
            )
            raise FormatError(f"experts of one layer must share a format, but {first} and {second}")
        for suffix, entry in parts.items():
            _expect_shape(entry, entry.shape, like[1][suffix].shape)

    def _stack(self, modules: list[str], suffix: str, name: str) -> Tensor:
        entry, first = self.take(f"{modules[0]}.{suffix}")
        first = prepare(suffix, name, entry=entry, tensor=first)
        out = torch.empty((len(modules), *first.shape), dtype=first.dtype, device=self.device)
        if self.device.type == "meta":  # the experts were compared before, and there is nothing to copy
            for module in modules[1:]:
                self._taken(self._claim(f"{module}.{suffix}").nbytes)
            return out
        out[0].copy_(first)
        for index, module in enumerate(modules[1:], start=1):
            entry, tensor = self.take(f"{module}.{suffix}")
            out[index].copy_(prepare(suffix, name, entry=entry, tensor=tensor))
        return out

    def _finish(
        self,
        module: str,
        name: str,
        parts: dict[str, TensorEntry],
        *,
        tensors: dict[str, Tensor],
        shape: tuple[int, ...],
    ) -> Weight:
        where = weight_of(module, parts)
        advice = None if self.recipe is None else self.recipe.advice(module)
        dynamic = advice is not None and advice.dynamic_rows
        if len(where.shape) != 2:
            raise FormatError(f"{where}: expected a matrix {list(shape[-2:])}, found {list(where.shape)}")
        columns = where.shape[1] * (2 if name == "nvfp4" else 1)
        _expect_shape(where, (*shape[:-2], where.shape[0], columns), shape)
        if advice is not None and advice.format not in (name, None):
            self.surprises[f"the config says {advice.format}, the file holds {name}; the file is used"].append(module)
        elif advice is not None and advice.static_input and not any(suffix in parts for suffix in INPUT_SCALES):
            self.surprises["the config says static activation scales, the file has none"].append(module)
        return build(name, where, tensors, dynamic_rows=dynamic)

    # what is left

    def skip(self, name: str, rule: SkipRule) -> None:
        """Leave a tensor unread, by rule."""
        self.unread.discard(name)
        self.skipped[name] = rule

    def skipped_by_rule(self) -> tuple[Skipped, ...]:
        """What was skipped, by rule."""
        return skipped(self.skipped, self.tensors)

    def finish(self) -> None:
        """Match what is left with the skip rules. Raises: CheckpointError when anything remains."""
        for name in sorted(self.unread):
            if rule := next((rule for rule in SKIP_RULES if rule.pattern.match(name)), None):
                self.skip(name, rule)
        if self.unread:
            first = self.tensors[min(self.unread)]
            more = f", and {len(self.unread) - 1} more" if len(self.unread) > 1 else ""
            raise CheckpointError(
                f"{first}: {first.dtype} {list(first.shape)} is read by nothing{more}; check config.json's layer plan"
            )


def _expect_shape(entry: TensorEntry, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if found != expected:
        raise CheckpointError(f"{entry}: expected {list(expected)}, found {list(found)}")
