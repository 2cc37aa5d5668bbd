"""A checkpoint directory, and the way from it to weights.

Loading runs over the headers first and over the data second (see `reader`), so a checkpoint that does not fit its
config is refused before anything large is read. Files are mapped by the `safetensors` package; no code of a checkpoint
is ever run, and nothing but safetensors and JSON is opened.
"""

from __future__ import annotations

import importlib
import logging
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..config import ModelConfig
from ..errors import CheckpointError
from ..spellings import read_json
from ..weights import LayerWeights, ModelWeights
from .files import TensorEntry, scan
from .layers import read_layer, read_model
from .names import by_canonical_name
from .reader import CORRECTION_BIAS, KV_UNSCALED, Reader
from .recipe import read_recipe

_LOG = logging.getLogger(__name__)
_META = torch.device("meta")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_HUB_FILES = ("*.safetensors", "*.json", "tokenizer*", "*.jinja")


class Checkpoint:
    """An open checkpoint directory: its config, its tensors by name, and its mapped files.

    Opening reads config files and headers only. `close`, or a `with` block, lets go of the files; tensors read before
    stay valid.
    """

    def __init__(self, path: str | Path) -> None:
        """path: the directory.

        Raises: CheckpointError or ConfigError in one line when something is missing, corrupt or contradictory.
        """
        self.directory = Path(path).expanduser()
        self.tensors = scan(self.directory)
        self.config = ModelConfig.from_checkpoint(self.directory)
        self.recipe, self.notes = read_recipe(self.directory, read_json(self.directory / "config.json"))
        self._canonical = by_canonical_name(self.tensors.values())
        self._files: dict[Path, Any] = {}

    def read(self, entry: TensorEntry) -> Tensor:
        """A tensor of a file, on the CPU, as a view of the mapped file. Raises: CheckpointError."""
        try:
            if entry.file not in self._files:
                self._files[entry.file] = safe_open(entry.file, framework="pt", device="cpu")
            tensor = self._files[entry.file].get_tensor(entry.name)
        except (SafetensorError, OSError, ValueError, RuntimeError) as e:
            raise CheckpointError(f"{entry}: cannot be read: {' '.join(str(e).split())[:200]}") from e
        if tensor.dtype != entry.torch_dtype or tuple(tensor.shape) != entry.shape:
            raise CheckpointError(f"{entry}: the file has changed since it was opened; load it again")
        return tensor

    def reader(
        self, device: torch.device, *, prefix: str = "", taken: Callable[[int], None] = lambda _: None
    ) -> Reader:
        """A reader over the tensors whose canonical names have this prefix; on "meta" it touches no data."""
        tensors = {name: entry for name, entry in self._canonical.items() if name.startswith(prefix)}
        fetch = _shape_only if device.type == "meta" else self.read
        return Reader(tensors, fetch, self.recipe, device=device, taken=taken)

    def close(self) -> None:
        """Let go of the files."""
        self._files.clear()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _shape_only(entry: TensorEntry) -> Tensor:
    # A dtype that torch lacks is refused by its name in the header; the stand-in is never used.
    return torch.empty(entry.shape, dtype=entry.torch_dtype or torch.uint8, device=_META)


@contextmanager
def opened(source: str | Path | Checkpoint) -> Iterator[Checkpoint]:
    """A checkpoint that was given open stays open; one that was given by path is open within the block."""
    if isinstance(source, Checkpoint):
        yield source
    else:
        with Checkpoint(source) as checkpoint:
            yield checkpoint


def load_layer(source: str | Path | Checkpoint, layer: int, *, device: str | torch.device = "cpu") -> LayerWeights:
    """The weights of one layer, in the formats they are stored in.

    source: a checkpoint directory or an open checkpoint; layer: its index in the plan.
    Raises: CheckpointError or FormatError naming tensor, file, expectation and finding.
    """
    with opened(source) as checkpoint:
        layers = checkpoint.config.layers
        if not 0 <= layer < len(layers):
            raise CheckpointError(f"layer {layer}: {checkpoint.directory} has layers 0 to {len(layers) - 1}")
        prefix = f"layers.{layer}"
        for target in (_META, torch.device(device)):
            reader = checkpoint.reader(target, prefix=prefix + ".")
            weights = read_layer(reader, prefix, layers[layer])
            reader.finish()
            if target is _META:
                _tell(checkpoint, reader)
        return weights


def load_model(
    source: str | Path | Checkpoint,
    *,
    device: str | torch.device = "cpu",
    mtp: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> ModelWeights:
    """The weights of a whole model, in the formats they are stored in.

    On the CPU, what need not be stacked or widened stays a view of the mapped files.

    source: a checkpoint directory or an open checkpoint; mtp: load the multi-token-prediction head where there is one;
    progress: called with (bytes read, bytes to read).
    Raises: CheckpointError or FormatError naming tensor, file, expectation and finding, before any data is read.
    """
    with opened(source) as checkpoint:
        total, done = 0, 0

        def count(nbytes: int) -> None:
            nonlocal total
            total += nbytes

        def advance(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            if progress is not None:
                progress(done, total)

        dry = checkpoint.reader(_META, taken=count)
        read_model(dry, checkpoint.config, mtp=mtp)
        _tell(checkpoint, dry)
        return read_model(checkpoint.reader(torch.device(device), taken=advance), checkpoint.config, mtp=mtp)


def notes(checkpoint: Checkpoint, reader: Reader) -> tuple[str, ...]:
    """What was odd about a checkpoint, one line each."""
    odd = (
        f"{first[0]}{f' and {len(first) - 1} more' if len(first) > 1 else ''}: {what}"
        for what, first in reader.surprises.items()
    )
    return (*checkpoint.notes, *odd)


def _tell(checkpoint: Checkpoint, reader: Reader) -> None:
    for note in notes(checkpoint, reader):
        if CORRECTION_BIAS in note:  # wrong routing is worth more than a log line
            warnings.warn(f"{checkpoint.directory}: {note}", stacklevel=4)
        else:
            # Published files lack the scales though they name them: nothing that a user could mend.
            level = logging.INFO if KV_UNSCALED in note else logging.WARNING
            _LOG.log(level, "%s: %s", checkpoint.directory, note)
    for skipped in reader.skipped_by_rule():
        _LOG.info("%s: skipped %d tensors by rule %s", checkpoint.directory, skipped.tensors, skipped.rule)


def resolve(model: str | Path) -> Path:
    """The directory of a checkpoint that is named by path or by hub id ("org/name").

    A hub id needs the package huggingface_hub; safetensors, JSON and tokenizer files are fetched, never code.
    Raises: CheckpointError when there is neither such a directory nor a way to fetch it.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise CheckpointError(f"{model}: expected a checkpoint directory, found a file; give the directory")
    if not _HUB_ID.fullmatch(str(model)):
        raise CheckpointError(f"{model}: no such directory")
    try:
        # Optional, and slow to import: asked for only when a hub id is given.
        hub = importlib.import_module("huggingface_hub")
    except ImportError as e:
        raise CheckpointError(
            f"{model}: no such directory; to fetch it by hub id: pip install 'nemotron-mamba2[hub]'"
        ) from e
    try:
        return Path(hub.snapshot_download(str(model), allow_patterns=list(_HUB_FILES)))
    except Exception as e:  # the hub's own errors, and those of whatever HTTP library it uses
        reason = " ".join(str(e).split())[:300] or type(e).__name__
        raise CheckpointError(f"{model}: no such directory, and the hub does not give it: {reason}") from e
