"""What tensors are called, and which of them are not ours to read.

Published files put `backbone.` in front of every name, files saved again by transformers `model.`, VL and Omni files
`language_model.` before either. All become one canonical name (`layers.0.mixer.in_proj.weight`, `embeddings.weight`,
`norm_f.weight`, `lm_head.weight`, `mtp.…`). What no layer reads must match a skip rule here, by name; the rules that
were used, and what they skipped, are printed by `inspect`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..errors import CheckpointError
from .files import TensorEntry

_PREFIX = re.compile(
    r"^(?:model\.)?(?:language_model\.)?(?:backbone\.|model\.)?"
    r"(?=(?:layers|embeddings|embed_tokens|norm_f|lm_head|mtp)(?:\.|$))"
)


def canonical(name: str) -> str:
    """The one name for a tensor or module, whatever prefix its file gives it; foreign names stay as they are."""
    name = _PREFIX.sub("", name)
    return "embeddings" + name.removeprefix("embed_tokens") if name.split(".")[0] == "embed_tokens" else name


def by_canonical_name(tensors: Iterable[TensorEntry]) -> dict[str, TensorEntry]:
    """Tensors by canonical name. Raises: CheckpointError when two spellings of one name are present."""
    found: dict[str, TensorEntry] = {}
    for entry in tensors:
        name = canonical(entry.name)
        if name in found:
            raise CheckpointError(f"{found[name]} and {entry} are the same tensor under two names; keep one")
        found[name] = entry
    return found


@dataclass(frozen=True)
class SkipRule:
    """Names that nobody reads, and why."""

    name: str
    reason: str
    pattern: re.Pattern[str]


SKIP_RULES: tuple[SkipRule, ...] = (
    SkipRule(
        "vision",
        "a VL or Omni file's image tower; the language model runs alone",
        re.compile(r"(?:model\.)?(?:vision_model|vision_tower|radio_model|image_newline)\b"),
    ),
    SkipRule(
        "audio",
        "an Omni file's sound tower; the language model runs alone",
        re.compile(r"(?:model\.)?(?:sound|audio)_\w+\b"),
    ),
    SkipRule(
        "projector",
        "carries image or sound features into the language model",
        re.compile(r"(?:model\.)?(?:mlp1|multi_modal_projector|vision_projector|vision_projection)\b"),
    ),
    SkipRule(
        "rotary", "a buffer; these models have no rotary encoding", re.compile(r".*\.(?:inv_freq|rotary_emb\.\w+)$")
    ),
)
MTP_UNUSED = SkipRule("mtp", "the multi-token-prediction head is not used", re.compile(r"mtp\."))
STRAY_INPUT_SCALE = SkipRule(
    "weight-only-input-scale",
    "the config says that this projection's activations stay bf16, so their scale has no meaning",
    re.compile(r".*\.(?:input_scale|input_global_scale)$"),
)
TIED_HEAD = SkipRule("tied-lm-head", "tie_word_embeddings: the same values as the embeddings", re.compile(r"lm_head\."))


@dataclass(frozen=True)
class Skipped:
    """What one rule skipped."""

    rule: str
    reason: str
    tensors: int
    nbytes: int


def skipped(used: Mapping[str, SkipRule], tensors: Mapping[str, TensorEntry]) -> tuple[Skipped, ...]:
    """Count and bytes per rule. used: canonical name → the rule that skipped it."""
    rules = dict.fromkeys(used.values())
    names = {rule: [name for name in used if used[name] is rule] for rule in rules}
    return tuple(
        Skipped(rule.name, rule.reason, len(names[rule]), sum(tensors[name].nbytes for name in names[rule]))
        for rule in rules
    )
