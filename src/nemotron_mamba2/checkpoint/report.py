"""What a checkpoint holds, layer by layer, from its headers alone: the data behind `inspect`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from ..config import LETTERS, LayerConfig, ModelConfig
from ..formats import Fp8Tensor, Nvfp4, Weight
from ..weights import AttentionWeights, LayerWeights, MtpWeights
from .layers import read_model
from .loading import Checkpoint, notes, opened
from .names import Skipped


@dataclass(frozen=True)
class ProjectionReport:
    """One matrix, or one stack of experts: format, logical shape, bytes with scales, dtype of a `bf16` weight
    (None for the other formats), and whether a static activation scale lies beside it."""

    name: str
    format: str
    shape: tuple[int, ...]
    nbytes: int
    dtype: str | None
    input_scale: bool


@dataclass(frozen=True)
class LayerReport:
    """One layer: place, letter, projections, bytes of all its weights as loaded, FP8 KV scales present."""

    index: int
    letter: str
    projections: tuple[ProjectionReport, ...]
    nbytes: int
    kv_scales: bool


@dataclass(frozen=True)
class CheckpointReport:
    """A whole checkpoint. ends: embeddings and lm_head; mtp: layers of the multi-token-prediction head, its eh_proj in
    mtp_ends, both empty without one; nbytes: of all weights as loaded; skipped: by which rule, and how much; notes:
    what is odd."""

    directory: Path
    config: ModelConfig
    algorithm: str | None
    files: int
    tensors: int
    layers: tuple[LayerReport, ...]
    ends: tuple[ProjectionReport, ...]
    mtp: tuple[LayerReport, ...]
    mtp_ends: tuple[ProjectionReport, ...]
    nbytes: int
    skipped: tuple[Skipped, ...]
    notes: tuple[str, ...]


def inspect_checkpoint(source: str | Path | Checkpoint, *, mtp: bool = True) -> CheckpointReport:
    """What `load_model` would make of a checkpoint; no data is read.

    Raises: what `load_model` raises for it.
    """
    with opened(source) as checkpoint:
        config = checkpoint.config
        reader = checkpoint.reader(torch.device("meta"))
        weights = read_model(reader, config, mtp=mtp)
        tied = weights.lm_head is weights.embeddings
        ends = (("embeddings", weights.embeddings), *(() if tied else (("lm_head", weights.lm_head),)))
        head = weights.mtp
        layers = _layers(config.layers, weights.layers)
        mtp_layers = () if head is None else _layers(config.mtp_layers, head.layers)
        end_reports = tuple(_projection(name, weight) for name, weight in ends)
        mtp_ends = () if head is None else (_projection("eh_proj", head.eh_proj),)
        parts = (*layers, *mtp_layers, *end_reports, *mtp_ends)
        return CheckpointReport(
            directory=checkpoint.directory,
            config=config,
            algorithm=None if checkpoint.recipe is None else checkpoint.recipe.algorithm,
            files=len({entry.file for entry in checkpoint.tensors.values()}),
            tensors=len(checkpoint.tensors),
            layers=layers,
            ends=end_reports,
            mtp=mtp_layers,
            mtp_ends=mtp_ends,
            nbytes=sum(part.nbytes for part in parts) + weights.norm_f.nbytes + _norm_bytes(head),
            skipped=reader.skipped_by_rule(),
            notes=notes(checkpoint, reader),
        )


def _norm_bytes(head: MtpWeights | None) -> int:
    return 0 if head is None else head.enorm.nbytes + head.hnorm.nbytes + head.final_layernorm.nbytes


def _layers(configs: tuple[LayerConfig, ...], weights: tuple[LayerWeights, ...]) -> tuple[LayerReport, ...]:
    return tuple(
        LayerReport(
            index=index,
            letter=LETTERS[type(config)],
            projections=tuple(_projection(name, weight) for name, weight in layer.projections()),
            nbytes=layer.nbytes,
            kv_scales=isinstance(layer, AttentionWeights) and layer.k_scale is not None,
        )
        for index, (config, layer) in enumerate(zip(configs, weights, strict=True))
    )


def _projection(name: str, weight: Weight) -> ProjectionReport:
    return ProjectionReport(
        name=name,
        format=weight.format,
        shape=weight.shape,
        nbytes=weight.nbytes,
        dtype=str(weight.weight.dtype).removeprefix("torch.") if weight.format == "bf16" else None,
        input_scale=isinstance(weight, Fp8Tensor | Nvfp4) and weight.input_scale is not None,
    )
