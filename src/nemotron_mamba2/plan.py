"""What runs, decided once at load: op × role → kernel, weight copies, bytes, and the reason for every choice.

A plan is a frozen table. `make_plan` refuses there what nothing serves (`NoKernel`), so that nothing fails at the first
token; `explain` prints the table. The scheduler reads what a layer can do from one record, `Capabilities`.

On the reference back end a bf16 weight is used as it lies in the file. A quantised weight gets a copy in the activation
dtype when memory allows, because steps of few rows would otherwise dequantise it every time; prompt rows dequantise in
blocks, so they need no copy.

On a GPU NVFP4 is repacked once. A single layer keeps the checkpoint's weight beside it; a whole model gives it back
(`formats.give_back`), matrix by matrix as its layers are made: its weights then hold shapes and tensor scales only.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from .batch import Step
from .config import LETTERS, LayerConfig, Mamba2Config, ModelConfig, Policy
from .errors import NoKernel
from .formats import Fp8Channel, Fp8Tensor, Nvfp4, Plain, Weight, dequantize, give_back, join, on_meta
from .ops import Linear, Quantization, backend
from .weights import LayerWeights, LooseWeights, ModelWeights

JOINED = ("q_proj", "k_proj", "v_proj")  # of "qkv_proj"


@dataclass(frozen=True)
class LinearPlan:
    """How one projection runs. why: one clause per choice that is not the plain one."""

    name: str
    format: str
    shape: tuple[int, ...]
    weight_bytes: int
    copy: str  # "none", the dtype of the copy, "packed": repacked in the order a kernel reads, or "joined": of JOINED
    copy_bytes: int
    prompt_copy: str  # "none", or the format that prompt rows use instead
    prompt: Quantization
    step: Quantization
    why: str


@dataclass(frozen=True)
class Plan:
    """How one layer runs on one device."""

    kind: str
    device: torch.device
    dtype: torch.dtype
    backend: str
    upcast: bool
    reproducible: bool
    linears: tuple[LinearPlan, ...]
    gives_back: bool = False

    @property
    def copy_bytes(self) -> int:
        return sum(linear.copy_bytes for linear in self.linears)

    def prepare(self, weights: LayerWeights | LooseWeights) -> dict[str, Linear]:
        """The layer's projections, ready to run: copies are made here. gives_back: and what is repacked is let go."""
        found = dict(weights.projections())
        ready = {}
        for plan in self.linears:
            if plan.copy == "joined":
                joined = join([found[name] for name in JOINED])
                assert joined is not None  # it was planned
                ready[plan.name] = self._prepare(replace(plan, copy="none"), joined)
                continue
            weight = found[plan.name]
            ready[plan.name] = self._prepare(plan, weight)
            shared = sum(other is weight for other in found.values()) > 1  # tied embeddings
            if self.gives_back and plan.copy == "packed" and isinstance(weight, Nvfp4) and not shared:
                give_back(weight)
        return ready

    def _prepare(self, plan: LinearPlan, weight: Weight) -> Linear:
        ops = backend(self.device)
        return Linear(
            weight=weight,
            copy=None if plan.copy in ("none", "packed") else dequantize(weight, self.dtype),
            prompt_weight=None if plan.prompt_copy == "none" else ops.quantize(dequantize(weight), plan.prompt_copy),
            packed=ops.pack(weight) if plan.copy == "packed" else None,
            prompt=plan.prompt,
            step=plan.step,
            upcast=self.upcast,
            reproducible=self.reproducible,
        )


@dataclass(frozen=True)
class ModelPlan:
    """How a whole model runs. outer: embeddings, lm_head and the MTP projection; mtp: its layers."""

    layers: tuple[Plan, ...]
    outer: Plan
    mtp: tuple[Plan, ...]
    weight_bytes: int
    budget_bytes: int

    @property
    def copy_bytes(self) -> int:
        return sum(plan.copy_bytes for plan in (*self.layers, self.outer, *self.mtp))

    def explain(self) -> str:
        """The plan as text: bytes per format, then every projection, equal layers on one line."""
        lines = [
            f"back end {self.outer.backend} on {self.outer.device}, activations {_name(self.outer.dtype)}"
            + (", reproducible" if self.outer.reproducible else ""),
            f"weights {_size(self.weight_bytes)}, copies {_size(self.copy_bytes)}, budget {_size(self.budget_bytes)}",
        ]
        every = [linear for plan in (*self.layers, self.outer, *self.mtp) for linear in plan.linears]
        for format in dict.fromkeys(linear.format for linear in every):
            mine = [linear for linear in every if linear.format == format]
            lines.append(f"  {format:<12}{len(mine):>6} projections  {_size(sum(m.weight_bytes for m in mine)):>10}")
        named = [(str(i), plan) for i, plan in enumerate(self.layers)]
        named += [("model", self.outer), *((f"mtp.{i}", plan) for i, plan in enumerate(self.mtp))]
        groups: dict[tuple[str, LinearPlan], list[str]] = {}
        for name, plan in named:
            for linear in plan.linears:
                groups.setdefault((plan.kind, linear), []).append(name)
        for (kind, linear), names in groups.items():
            lines.append(f"{kind} {_ranges(names):<24} {_describe(linear)}")
        return "\n".join(lines)


def make_plan(
    config: LayerConfig,
    weights: LayerWeights,
    policy: Policy,
    *,
    device: torch.device | str,
    dtype: torch.dtype = torch.bfloat16,
    budget_bytes: int | None = None,
) -> Plan:
    """Decide how one layer runs.

    dtype: of the activations. budget_bytes: what copies may take; None: what policy or the device leaves.
    Raises: NoKernel.
    """
    _check_mixer(config, torch.device(device))
    if budget_bytes is None:
        budget_bytes = _budget(policy, torch.device(device)) - weights.nbytes
    return _plan(LETTERS[type(config)], weights.projections(), policy, torch.device(device), dtype, budget_bytes)


def plan_loose(
    weights: LooseWeights,
    policy: Policy,
    *,
    device: torch.device | str,
    dtype: torch.dtype = torch.bfloat16,
    budget_bytes: int | None = None,
) -> Plan:
    """Decide how matrices outside of any layer run; arguments as for `make_plan`. Raises: NoKernel."""
    if budget_bytes is None:
        budget_bytes = _budget(policy, torch.device(device)) - weights.nbytes
    return _plan("loose", weights.projections(), policy, torch.device(device), dtype, budget_bytes)


def plan_model(
    config: ModelConfig,
    weights: ModelWeights,
    policy: Policy,
    *,
    device: torch.device | str,
    dtype: torch.dtype | None = None,
) -> ModelPlan:
    """Decide how a whole model runs; the memory budget goes to its layers in order. Raises: NoKernel.

    On a GPU, making the model gives back the weights that it repacks: they serve no second model.
    """
    device, dtype = torch.device(device), dtype or config.dtype
    for layer in (*config.layers, *config.mtp_layers):
        _check_mixer(layer, device)
    mtp_layers = weights.mtp.layers if weights.mtp else ()
    outer = [("embeddings", weights.embeddings), ("lm_head", weights.lm_head)]
    outer += [("eh_proj", weights.mtp.eh_proj)] if weights.mtp else []
    weight_bytes = sum(w.nbytes for w in (*weights.layers, *mtp_layers)) + sum(w.nbytes for _, w in outer)
    budget = _budget(policy, device)
    left = budget - weight_bytes
    plans: list[Plan] = []
    parts: list[tuple[str, Iterable[tuple[str, Weight]]]] = [("model", outer)]
    parts += [
        (LETTERS[type(c)], w.projections())
        for c, w in zip((*config.layers, *config.mtp_layers), (*weights.layers, *mtp_layers), strict=False)
    ]
    for kind, projections in parts:
        plans.append(_plan(kind, projections, policy, device, dtype, left, gives_back=device.type == "cuda"))
        left -= plans[-1].copy_bytes
    count = len(weights.layers)
    return ModelPlan(tuple(plans[1 : count + 1]), plans[0], tuple(plans[count + 1 :]), weight_bytes, budget)


def _check_mixer(config: LayerConfig, device: torch.device) -> None:
    if isinstance(config, Mamba2Config) and device.type == "cuda":
        why = backend(device).unserved_mixer(config.mamba_head_dim, config.ssm_state_size)
        if why:
            raise NoKernel(f"plan: no kernel for this Mamba-2 layer on {device}: {why}; use device='cpu'")


def _plan(
    kind: str,
    projections: Iterable[tuple[str, Weight]],
    policy: Policy,
    device: torch.device,
    dtype: torch.dtype,
    budget_bytes: int,
    *,
    gives_back: bool = False,
) -> Plan:
    allowed = (torch.bfloat16,) if device.type == "cuda" else (torch.bfloat16, torch.float32)
    if dtype not in allowed:
        names = " or ".join(map(_name, allowed))
        raise NoKernel(f"plan: activations on {device.type} must be {names}, found {_name(dtype)}; pass dtype=")
    upcast = device.type == "cpu" and not has_bf16_units()
    linears, weights = [], dict(projections)
    for name, weight in weights.items():
        linear = _plan_linear(name, weight, policy, device, dtype)
        if gives_back and linear.copy == "packed":
            linear = replace(linear, copy_bytes=linear.copy_bytes - weight.nbytes)
        if linear.copy == "packed" and linear.copy_bytes > budget_bytes:
            raise NoKernel(
                f"plan: {name} needs {_size(linear.copy_bytes)} for its repacked copy, {_size(budget_bytes)} are left"
            )
        if linear.copy_bytes > max(budget_bytes, 0):
            prompt = "none" if linear.prompt_copy != "none" else linear.prompt
            why = _join(linear.why, "no memory for a copy: dequantised at every call")
            linear = replace(linear, copy="none", copy_bytes=0, prompt_copy="none", prompt=prompt, why=why)
        budget_bytes -= linear.copy_bytes
        linears.append(linear)
    if kind == "*" and device.type == "cuda":
        linears += _plan_joined(weights, device, budget_bytes)
    name = "gpu" if device.type == "cuda" else "reference"
    return Plan(kind, device, dtype, name, upcast, policy.reproducible, tuple(linears), gives_back)


def _plan_linear(name: str, weight: Weight, policy: Policy, device: torch.device, dtype: torch.dtype) -> LinearPlan:
    elements = torch.Size(weight.shape).numel()
    copy = "none" if isinstance(weight, Plain) and weight.weight.dtype == dtype else _name(dtype)
    why = ""
    if device.type == "cuda":
        why = backend(device).unserved(weight)
        if name == "embeddings":  # its rows are read, nothing is multiplied by it
            copy, why = "none", ""
        elif not why:
            copy = "packed" if isinstance(weight, Nvfp4) else "none"
    copy_bytes = {"none": 0, "packed": weight.nbytes}.get(copy, elements * dtype.itemsize)
    prompt: Quantization = "none"
    prompt_copy = "none"
    if policy.prompt != "exact":
        if isinstance(weight, Fp8Tensor) and weight.input_scale is not None and len(weight.shape) == 2:
            prompt, why = "fp8_static", "the checkpoint has a static activation scale: W8A8 for prompt rows"
        elif isinstance(weight, Fp8Channel) and weight.dynamic:
            prompt, why = "fp8_per_row", "the checkpoint wants FP8 activations per token: W8A8 for prompt rows"
        elif isinstance(weight, Nvfp4) and policy.prompt == "fp8" and len(weight.shape) == 2:
            prompt, prompt_copy, why = "fp8_per_row", "fp8_channel", "policy prompt='fp8': FP8 copy for prompt rows"
            copy_bytes += elements
        elif isinstance(weight, Nvfp4) and weight.input_scale is not None:
            why = _join(why, "W4A4 in the checkpoint; no FP4 units here: activations stay unquantised")
    return LinearPlan(
        name, weight.format, weight.shape, weight.nbytes, copy, copy_bytes, prompt_copy, prompt, "none", why
    )


def _plan_joined(weights: dict[str, Weight], device: torch.device, budget_bytes: int) -> list[LinearPlan]:
    """q, k and v of step rows as one product, where one matrix can hold them."""
    joined = join([on_meta(weights[name]) for name in JOINED])
    if joined is None or backend(device).unserved(joined) or joined.nbytes > budget_bytes:
        return []
    why = "q, k and v once more: one product for step rows"
    return [
        LinearPlan("qkv_proj", joined.format, joined.shape, 0, "joined", joined.nbytes, "none", "none", "none", why)
    ]


def has_bf16_units() -> bool:
    """Whether this CPU multiplies bf16 matrices faster than fp32 ones."""
    probes = (getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))
    return any(probe() for probe in probes if probe is not None)


def _budget(policy: Policy, device: torch.device) -> int:
    """Bytes that weights and copies may take together."""
    if policy.memory_bytes is not None:
        return policy.memory_bytes
    if device.type == "cuda":
        # The weights lie there already: what this process holds counts as well as what is free.
        return (torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)) * 9 // 10
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * 7 // 10


# -- what a layer can do ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Capabilities:
    """What a layer, or a whole model, can do in a step; the scheduler reads this and nothing else.

    kind: the layer's letter. state: it keeps recurrent state in a StatePool; kv: it keeps keys and values in pages.
    max_sequences: most sequences of one step, or None. verify: several step rows of a sequence at once, with rollback.
    resume: prompt rows may start anywhere. graph: a step can be captured; graph_survives: and replayed for sequences
    that came later. why: (field, reason) for every field that limits.
    """

    kind: str
    state: bool = False
    kv: bool = False
    max_sequences: int | None = None
    verify: bool = True
    resume: bool = True
    graph: bool = True
    graph_survives: bool = True
    why: tuple[tuple[str, str], ...] = ()


def combine(capabilities: Sequence[Capabilities]) -> Capabilities:
    """What a model of these layers can do: an ability counts when all have it; reasons keep their layer's kind."""
    limits = [c.max_sequences for c in capabilities if c.max_sequences is not None]
    why = dict.fromkeys((field, f"{c.kind}: {reason}") for c in capabilities for field, reason in c.why)
    return Capabilities(
        kind="".join(c.kind for c in capabilities),
        state=any(c.state for c in capabilities),
        kv=any(c.kv for c in capabilities),
        max_sequences=min(limits, default=None),
        verify=all(c.verify for c in capabilities),
        resume=all(c.resume for c in capabilities),
        graph=all(c.graph for c in capabilities),
        graph_survives=all(c.graph_survives for c in capabilities),
        why=tuple(why),
    )


@dataclass(frozen=True)
class HostStep:
    """Host work of a layer around a step, eager or replayed: `before` it; `undo` if it fails; `after` it succeeds."""

    before: Callable[[Step], None]
    undo: Callable[[Step], None]
    after: Callable[[Step], None]


# -- text ------------------------------------------------------------------------------------------------------------


def _describe(linear: LinearPlan) -> str:
    how = f"{linear.name:<16} {linear.format:<12}{'×'.join(map(str, linear.shape)):<16}{_size(linear.weight_bytes):>10}"
    if linear.copy != "none":
        how += f"  {linear.copy} copy"
    if linear.prompt != "none":
        how += f"  prompt activations {linear.prompt}"
    return how + (f"  ({linear.why})" if linear.why else "")


def _join(*clauses: str) -> str:
    return "; ".join(clause for clause in clauses if clause)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if abs(count) < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.4g} GB"


def _ranges(names: list[str]) -> str:
    """ "0, 1, 2, 5" as "0–2,5"."""
    parts: list[list[str]] = []
    for name in names:
        if parts and name.isdigit() and parts[-1][-1].isdigit() and int(name) == int(parts[-1][-1]) + 1:
            parts[-1] = [parts[-1][0], name]
        else:
            parts.append([name])
    return ",".join("–".join(part) for part in parts)
