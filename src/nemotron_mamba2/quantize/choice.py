"""Which projection gets which format: presets after NVIDIA's recipes, and recipe files that overrule them.

Every preset leaves attention, embeddings, lm_head, latent projections and the multi-token-prediction head as they are;
convolutions, norms, router gates and vectors are no projections and cannot be quantised at all.

    fp8, fp8_block, nvfp4   Mamba, MLP and expert projections
    mixed                   FP8 for Mamba projections and shared experts, NVFP4 for routed experts and MLPs, but FP8 for
                            the down_proj of the MLP layers that lose most

A recipe file is a JSON object of patterns (`fnmatch`, over `layers.3.mixer.in_proj` or the name in the files) to
formats. Where several patterns match, the last one counts, as in ModelOpt's lists.

Sources: the recipes for Super, Ultra and Nano-4B that ModelOpt ships; the published exclude lists.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from ..checkpoint import Checkpoint, TensorEntry
from ..checkpoint.names import canonical
from ..config import MlpConfig, ModelConfig
from ..errors import CheckpointError, ConfigError
from ..formats import NVFP4_BLOCK
from ..spellings import read_json

PRESETS = ("fp8", "fp8_block", "nvfp4", "mixed")
SEARCHES = ("absmax", "mse", "sweep")
WORDS = {  # of a recipe → formats
    "bf16": "bf16",
    "fp8": "fp8_tensor",
    "fp8_channel": "fp8_channel",
    "fp8_block": "fp8_block",
    "nvfp4": "nvfp4",
}
_PROJECTION = re.compile(
    r"embeddings|lm_head|mtp\.layers\.\d+\.eh_proj|(?:mtp\.)?layers\.\d+\.mixer\."
    r"(?:in_proj|out_proj|[qkvo]_proj|up_proj|down_proj|fc[12]_latent_proj|(?:experts\.\d+|shared_experts)\.(?:up|down)_proj)"
)
_STACK = re.compile(r"((?:mtp\.)?layers\.\d+\.mixer\.experts)\.((?:up|down)_proj)")
_QUANTISED = re.compile(
    r"layers\.\d+\.mixer\.(?:in_proj|out_proj|(?:experts\.\d+\.|shared_experts\.)?(?:up|down)_proj)"
)


@dataclass(frozen=True)
class Projection:
    """One matrix of the source: canonical module, name of the module in the output, its tensor, and which matrix of it
    when experts are stacked; rows and columns."""

    module: str
    name: str
    entry: TensorEntry
    expert: int | None
    rows: int
    columns: int

    @property
    def group(self) -> str:
        """Projections with one group share a format: the experts of a layer; else the module itself."""
        return re.sub(r"\.experts\.\d+\.", ".experts.*.", self.module)


@dataclass(frozen=True)
class Choice:
    """A format, and whether a recipe file asked for it by name."""

    format: str
    by_recipe: bool = False


def projections(checkpoint: Checkpoint) -> list[Projection]:
    """All projections of a checkpoint, in the order of its files."""
    found = []
    for entry in checkpoint.tensors.values():
        module = canonical(entry.name)
        if stack := _STACK.fullmatch(module):
            head, tail = entry.name[: -len(stack[2]) - 1], stack[2]
            experts, rows, columns = entry.shape
            for expert in range(experts):
                own = f"{stack[1]}.{expert}.{tail}"
                found.append(Projection(own, f"{head}.{expert}.{tail}", entry, expert, rows, columns))
        elif module.endswith(".weight") and _PROJECTION.fullmatch(module.removesuffix(".weight")):
            rows, columns = entry.shape
            name = entry.name.removesuffix(".weight")
            found.append(Projection(module.removesuffix(".weight"), name, entry, None, rows, columns))
    return found


def read_recipe(file: str | Path) -> dict[str, str]:
    """Patterns → words of a recipe file. Raises: ConfigError."""
    recipe = read_json(Path(file))
    for pattern, word in recipe.items():
        if word not in WORDS:
            raise ConfigError(f"{file}: {pattern!r}: expected one of {', '.join(WORDS)}, found {word!r}")
    return recipe


def choose(
    found: Iterable[Projection], config: ModelConfig, preset: str, *, recipe: Mapping[str, str] | None = None
) -> dict[str, Choice]:
    """The format of every projection, by canonical module.

    Raises: ConfigError when a pattern matches nothing, when experts of one layer would differ, or when a recipe asks
    for NVFP4 where the inputs are not in blocks of 16.
    """
    found = list(found)
    tender = _tender_mlps(config)
    choices = {p.module: Choice(_preset_format(preset, p, tender)) for p in found}
    for pattern, word in (recipe or {}).items():
        matched = [p for p in found if _matches(pattern, p)]
        if not matched:
            raise ConfigError(
                f"recipe: {pattern!r} matches no projection; "
                "patterns look like *.mixer.in_proj, layers.3.mixer.experts.* or lm_head"
            )
        choices |= {p.module: Choice(WORDS[word], by_recipe=True) for p in matched}
    _check(found, choices)
    return choices


def _matches(pattern: str, projection: Projection) -> bool:
    pattern = pattern.removesuffix(".weight")
    return any(fnmatchcase(name, pattern) for name in (projection.module, projection.name))


def _preset_format(preset: str, projection: Projection, tender: frozenset[int]) -> str:
    if preset not in PRESETS:
        raise ConfigError(f"format: expected one of {', '.join(PRESETS)}, found {preset!r}")
    module = projection.module
    if not _QUANTISED.fullmatch(module):
        return "bf16"
    word = preset
    if preset == "mixed":
        kept_wide = module.endswith(("in_proj", "out_proj")) or ".shared_experts." in module
        kept_wide |= module.endswith(".mixer.down_proj") and int(module.split(".")[1]) in tender
        word = "fp8" if kept_wide else "nvfp4"
    if word == "nvfp4" and projection.columns % NVFP4_BLOCK:
        return "bf16"
    return WORDS[word]


def _tender_mlps(config: ModelConfig) -> frozenset[int]:
    """Layers whose MLP down_proj loses most in four bits: the first eighth, the last, and every third between.

    The rule counts MLP layers against the number of all layers; for Nano-4B it gives the list in NVIDIA's own recipe,
    which in turn follows llama.cpp's Q4_K_M.
    """
    total = len(config.layers)
    mlps = [index for index, layer in enumerate(config.layers) if isinstance(layer, MlpConfig)]
    first, last = total // 8, 7 * total // 8
    return frozenset(layer for i, layer in enumerate(mlps) if i < first or i >= last or (i - first) % 3 == 2)


def _check(found: Iterable[Projection], choices: Mapping[str, Choice]) -> None:
    groups: dict[str, Projection] = {}
    for p in found:
        other = groups.setdefault(p.group, p)
        format, like = choices[p.module].format, choices[other.module].format
        if format != like:
            raise ConfigError(
                f"recipe: experts of one layer must share a format, but {other.module} is {like} "
                f"and {p.module} is {format}"
            )
        if format == "nvfp4" and p.columns % NVFP4_BLOCK:
            raise ConfigError(
                f"recipe: {p.module} has {p.columns} inputs; nvfp4 needs a multiple of {NVFP4_BLOCK}; take fp8 or bf16"
            )
    if all(choice.format == "bf16" for choice in choices.values()):
        raise CheckpointError("nothing would be quantised: no projection is left to the format asked for")
