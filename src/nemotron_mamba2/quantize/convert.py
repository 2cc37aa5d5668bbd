"""A checkpoint directory in, a quantised one out: streamed, and there as a whole or not at all.

Everything is decided before the first weight is read: formats, names, shapes, files. Then tensors pass one by one, some
rows at a time, straight into their places. The folder is built under another name beside its own
(`.NAME.partial`), config.json last, synced, and renamed when it is complete; a run that dies leaves nothing under the
name that was asked for. The same source and options give the same bytes, on any machine.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from ..checkpoint import Checkpoint, inspect_checkpoint, resolve
from ..config import Mamba2Config
from ..errors import CheckpointError, ConfigError
from ..ops import backend
from ..spellings import read_json
from .calibrate import largest_inputs
from .choice import SEARCHES, Choice, Projection, choose, projections
from .configs import flat_config, quant_file
from .layout import SHARD_BYTES, Job, ShardFile, copied, into_shards, quantised
from .report import QuantizationReport, TensorReport
from .rows import Means, in_proj_parts, lost_parts, relative_errors, write_quantised

Progress = Callable[[str, int, int], None]

INPUT_MAX = {"fp8_tensor": 448.0, "nvfp4": 6.0 * 448.0}  # formats with static activation scales
_WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".npz", ".nemo", ".h5", ".msgpack", ".onnx")
_OWN_FILES = ("config.json", "hf_quant_config.json")


def quantize_checkpoint(
    source: str | Path,
    destination: str | Path,
    format: str,
    *,
    recipe: Mapping[str, str] | None = None,
    search: str | None = None,
    calibration_text: str | None = None,
    device: str | torch.device = "cpu",
    shard_bytes: int = SHARD_BYTES,
    progress: Progress = lambda *_: None,
) -> QuantizationReport:
    """Write a quantised copy of a checkpoint.

    source: a BF16 (or FP16, FP32) checkpoint directory, or a hub id. destination: a directory that is not there yet.
    format: one of PRESETS. recipe: patterns → formats that overrule the preset (`read_recipe`). search: "mse" (None),
    "absmax" or "sweep", for NVFP4 block scales. calibration_text: when given, FP8 and NVFP4 get static activation
    scales from it. device: where to quantise, and to run the text. progress: called with (what, bytes done, bytes in
    all).
    Raises: CheckpointError, ConfigError, FormatError, RequestError, in one line; nothing has been written then.
    """
    source, destination = resolve(source), Path(destination).expanduser()
    if search is not None and search not in SEARCHES:
        raise ConfigError(f"search: expected one of {', '.join(SEARCHES)}, found {search!r}")
    _check_destination(source, destination)
    with Checkpoint(source) as checkpoint:
        _check_source(checkpoint)
        where = torch.device(device)
        means = Means(backend(where), where, search or "mse")
        plan = _plan(checkpoint, choose(projections(checkpoint), checkpoint.config, format, recipe=recipe), means)
        if search in ("mse", "sweep") and not any(job.format == "nvfp4" for job in plan.jobs):
            raise ConfigError(f"search {search}: it looks for NVFP4 block scales, and nothing here would be NVFP4")
        if calibration_text is not None:
            _calibrate(plan, source, calibration_text, device=where, progress=progress)
        plan.note_missing_scales(calibrated=calibration_text is not None)
        shards = into_shards(plan.jobs, shard_bytes)
        files = dict(zip(_file_names(len(shards)), shards, strict=True))
        with _appearing(destination) as folder:
            tensors = _write_tensors(files, checkpoint, folder, means=means, progress=progress)
            quant = quant_file(plan.jobs, checkpoint.tensors.values(), _version())
            _write_rest(checkpoint.directory, folder, quant)
            inspect_checkpoint(folder)  # what was written must load
        return QuantizationReport(
            source=str(source),
            destination=str(destination),
            format=format,
            algorithm=quant["quantization"]["quant_algo"],
            search=means.search if any(job.format == "nvfp4" for job in plan.jobs) else None,
            tensors=tuple(tensors),
            kept=tuple(plan.kept),
            bytes_before=sum(entry.nbytes for entry in checkpoint.tensors.values()),
            bytes_after=sum(job.nbytes for job in plan.jobs),
            files=len(files),
            notes=tuple(plan.notes),
        )


def _check_destination(source: Path, destination: Path) -> None:
    if destination.exists() or destination.is_symlink():
        raise CheckpointError(f"{destination}: is there already; name a directory that is not, or move it away")
    if not destination.parent.is_dir():
        raise CheckpointError(f"{destination.parent}: no such directory; make it first")
    if destination.resolve().is_relative_to(source.resolve()):
        raise CheckpointError(f"{destination}: lies inside the source {source}; name a directory outside it")


def _check_source(checkpoint: Checkpoint) -> None:
    """Refuse what is quantised, and what would not load."""
    where = checkpoint.directory
    if checkpoint.recipe is not None:
        raise CheckpointError(
            f"{where}: is quantised already ({checkpoint.recipe.source} says {checkpoint.recipe.algorithm}); "
            "give the checkpoint it was made from"
        )
    report = inspect_checkpoint(checkpoint)
    parts = (*report.layers, *report.mtp)
    for projection in (*report.ends, *report.mtp_ends, *(p for part in parts for p in part.projections)):
        if projection.format != "bf16":
            raise CheckpointError(
                f"{where}: is quantised already ({projection.name} is {projection.format}); "
                "give the checkpoint it was made from"
            )


# what is to be done ----------------------------------------------------------------------------------------------


@dataclass
class _Plan:
    """Jobs in the order of the source, the projections that stay, and what to tell."""

    jobs: list[Job] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def note_missing_scales(self, *, calibrated: bool) -> None:
        """Say which FP8 tensors have no static activation scale."""
        bare = [j.projection.name for j in self.jobs if j.projection and j.format == "fp8_tensor" and not j.input_scale]
        if bare:
            why = "the text does not reach them" if calibrated else "there was no calibration text"
            more = f" and {len(bare) - 1} more" if len(bare) > 1 else ""
            self.notes.append(
                f"{bare[0]}{more}: no input_scale, because {why}. This package then multiplies with 16-bit "
                "activations; vLLM and others that run FP8 statically need one"
            )


def _plan(checkpoint: Checkpoint, choices: Mapping[str, Choice], means: Means) -> _Plan:
    plan = _Plan()
    matrices: dict[str, list[Projection]] = {}
    for p in projections(checkpoint):
        matrices.setdefault(p.entry.name, []).append(p)
    for entry in checkpoint.tensors.values():
        mine = matrices.get(entry.name, [])
        # The experts of a stack share a format.
        choice = choices[mine[0].module] if mine else Choice("bf16")
        if mine and choice.format != "bf16":
            choice = _spare_small_rows(checkpoint, mine[0], choice, means=means, plan=plan)
        if choice.format == "bf16":
            plan.jobs.append(copied(entry))
            plan.kept += [p.name for p in mine]
        else:
            plan.jobs += [quantised(p, choice.format, input_scale=None) for p in mine]
    if not any(job.projection for job in plan.jobs):
        raise CheckpointError("nothing would be quantised: every projection stays as it is")
    _note_block_sizes(plan)
    return plan


def _spare_small_rows(
    checkpoint: Checkpoint, projection: Projection, choice: Choice, *, means: Means, plan: _Plan
) -> Choice:
    """Leave an in_proj alone whose B, C or dt would drown under the scale of z and x, unless a recipe named it."""
    config = _mamba_config(checkpoint, projection)
    if config is None or choice.by_recipe:
        return choice
    lost = lost_parts(checkpoint.read(projection.entry), config, choice.format, means=means)
    if not lost:
        return choice
    parts = ", ".join(f"{name} {value:.0%}" for name, value in lost.items())
    plan.notes.append(f"{projection.name}: stays as it is; {choice.format} would lose too much of its rows ({parts})")
    return Choice("bf16")


def _note_block_sizes(plan: _Plan) -> None:
    odd = [j.projection for j in plan.jobs if j.projection is not None and j.format == "fp8_block"]
    odd = [p for p in odd if p.rows % 128 or p.columns % 128]
    if odd:
        more = f" and {len(odd) - 1} more" if len(odd) > 1 else ""
        plan.notes.append(
            f"{odd[0].name}{more}: not a multiple of 128 in both sizes. The last tiles are cut, which this package "
            "reads and vLLM does not"
        )


def _mamba_config(checkpoint: Checkpoint, projection: Projection) -> Mamba2Config | None:
    """The config of the layer when this is an in_proj, else None."""
    if not projection.module.endswith(".in_proj"):
        return None
    config = checkpoint.config.layers[int(projection.module.split(".")[1])]
    return config if isinstance(config, Mamba2Config) else None


def _calibrate(plan: _Plan, source: Path, text: str, *, device: torch.device, progress: Progress) -> None:
    """Give every job its static activation scale."""
    size = len(text.encode())
    largest = largest_inputs(
        source, text, device=device, progress=lambda done, total: progress("calibrating", size * done // total, size)
    )
    for index, job in enumerate(plan.jobs):
        p = job.projection
        # Embeddings multiply nothing, and the multi-token-prediction head does not run here.
        if p is None or job.format not in INPUT_MAX or p.module == "embeddings" or p.module.startswith("mtp."):
            continue
        if not largest.get(p.group):
            raise CheckpointError(f"{p.name}: the calibration text gave it no input above 0; give a longer text")
        scale = torch.tensor(largest[p.group], dtype=torch.float32) / INPUT_MAX[job.format]
        plan.jobs[index] = quantised(p, job.format, input_scale=scale.item())


# doing it ---------------------------------------------------------------------------------------------------------


@contextmanager
def _appearing(destination: Path) -> Iterator[Path]:
    """A folder to fill that takes its name when the block ends, and is removed when the block raises."""
    folder = destination.with_name(f".{destination.name}.partial")
    try:
        folder.mkdir()
    except FileExistsError:
        raise CheckpointError(
            f"{folder}: left by a run that was killed, or another run is writing it; delete it if none is"
        ) from None
    try:
        yield folder
        _sync(folder)
        if destination.exists():  # a rename would silently replace an empty directory
            raise CheckpointError(f"{destination}: came to be while this ran; move it away and start again")
        folder.rename(destination)
        _sync(destination.parent)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _write_tensors(
    files: Mapping[str, list[Job]], checkpoint: Checkpoint, folder: Path, *, means: Means, progress: Progress
) -> list[TensorReport]:
    total, done = sum(job.source_nbytes for jobs in files.values() for job in jobs), 0
    tensors: list[TensorReport] = []
    progress("quantising", done, total)
    for file, jobs in files.items():
        with ShardFile(folder / file, [output for job in jobs for output in job.outputs]) as shard:
            for job in jobs:
                if (report := _run(job, checkpoint, shard, means=means)) is not None:
                    tensors.append(report)
                done += job.source_nbytes
                progress("quantising", done, total)
    _write_index(folder, files)
    return tensors


def _run(job: Job, checkpoint: Checkpoint, shard: ShardFile, *, means: Means) -> TensorReport | None:
    tensor = checkpoint.read(job.entry)
    if job.projection is None:
        shard.append(job.entry.name, tensor)
        return None
    p = job.projection
    wrong, power = write_quantised(job, tensor if p.expert is None else tensor[p.expert], shard, means=means)
    config = _mamba_config(checkpoint, p)
    return TensorReport(
        name=p.name,
        format=job.format,
        shape=(p.rows, p.columns),
        bytes_before=job.source_nbytes,
        bytes_after=job.nbytes,
        relative_error=relative_errors(wrong, power, {"all": slice(None)})["all"],
        parts={} if config is None else relative_errors(wrong, power, in_proj_parts(config)),
        input_scale=job.input_scale,
    )


def _version() -> str:
    try:
        return version("nemotron-mamba2")
    except PackageNotFoundError:  # run from a source tree
        return "0"


def _file_names(count: int) -> list[str]:
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{index + 1:05}-of-{count:05}.safetensors" for index in range(count)]


def _write_index(folder: Path, shards: Mapping[str, list[Job]]) -> None:
    if len(shards) == 1:
        return
    outputs = {output.name: (file, output) for file, jobs in shards.items() for job in jobs for output in job.outputs}
    total = sum(output.nbytes for _, output in outputs.values())
    weight_map = {name: outputs[name][0] for name in sorted(outputs)}
    _write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})


def _write_rest(source: Path, folder: Path, quant: dict[str, Any]) -> None:
    """All that is not tensors, config.json last: without it nothing loads."""
    _copy_rest(source, folder)
    _write_json(folder / "hf_quant_config.json", quant)
    config = read_json(source / "config.json") | {"quantization_config": flat_config(quant)}
    _write_json(folder / "config.json", config)


def _copy_rest(source: Path, folder: Path) -> None:
    """Tokenizer, generation_config, remote code: every file that is neither weights nor written here."""
    for place, folders, names in os.walk(source):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            file = Path(place) / name
            weights = name.endswith((*_WEIGHT_FILES, ".safetensors.index.json", ".bin.index.json"))
            if name.startswith(".") or weights or not file.is_file() or (place == str(source) and name in _OWN_FILES):
                continue
            target = folder / file.relative_to(source)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target)
            _sync(target)


def _write_json(file: Path, value: Any) -> None:
    with file.open("x", encoding="utf-8") as stream:
        json.dump(value, stream, indent=2, ensure_ascii=False)
        stream.write("\n")
        stream.flush()
        os.fsync(stream.fileno())


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
