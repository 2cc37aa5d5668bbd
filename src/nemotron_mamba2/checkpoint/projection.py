"""One projection from its tensors: which format they are, decided from their dtypes and shapes alone.

A projection lies in a file as a weight and up to three scales, named by suffix. `format_of` decides from the headers;
`build` makes the typed weight, whose constructor checks every dtype and shape again. A scale that the format does not
read is refused: it would mean that the weight is something else.

| weight                | scales                                             | format       |
|-----------------------|----------------------------------------------------|--------------|
| BF16, F16, F32        | –                                                  | bf16         |
| F8_E4M3               | weight_scale [] or [1]; input_scale                | fp8_tensor   |
| F8_E4M3               | weight_scale [out] or [out, 1]                     | fp8_channel  |
| F8_E4M3               | weight_scale 2-D or 4-D, or weight_scale_inv       | fp8_block    |
| U8                    | weight_scale, weight_scale_2; input_scale          | nvfp4        |
| U8 as weight_packed   | weight_scale, weight_global_scale; input_global_…  | nvfp4        |

Source: ModelOpt's and compressed-tensors' export code. compressed-tensors stores the reciprocals of global scales.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..errors import CheckpointError, FormatError
from ..formats import FORMATS, Fp8Block, Fp8Channel, Fp8Tensor, Nvfp4, Plain, Weight
from .files import TensorEntry

SUFFIXES = (
    "weight",
    "weight_packed",
    "weight_scale",
    "weight_scale_2",
    "weight_scale_inv",
    "weight_global_scale",
    "input_scale",
    "input_global_scale",
)
INPUT_SCALES = ("input_scale", "input_global_scale")
_RECIPROCAL = ("weight_global_scale", "input_global_scale")
_FLOATS = ("F32", "BF16", "F16")
_SUPPORTED = f"supported: {', '.join(FORMATS)}"

Parts = Mapping[str, TensorEntry]


def weight_of(module: str, parts: Parts) -> TensorEntry:
    """The tensor that holds the matrix itself. Raises: CheckpointError when none or two do."""
    found = [parts[suffix] for suffix in ("weight", "weight_packed") if suffix in parts]
    if len(found) == 1:
        return found[0]
    if found:
        raise CheckpointError(f"{found[0]} and {found[1]} are both the weight of {module}; keep one")
    orphan = f"; its {next(iter(parts.values()))} is there" if parts else ""
    raise CheckpointError(f"{module}.weight: missing{orphan}; fetch the checkpoint again")


def format_of(module: str, parts: Parts) -> str:
    """The format of a projection. parts: suffix → tensor.

    Raises: FormatError for a dtype or combination that no format has, CheckpointError when the weight is missing.
    """
    weight = weight_of(module, parts)
    packed = "weight_packed" in parts
    if weight.dtype in _FLOATS and not packed:
        name, needed, optional = "bf16", [], []
    elif weight.dtype == "F8_E4M3" and not packed:
        name = _fp8_kind(weight, parts)
        needed = ["weight_scale_inv" if "weight_scale_inv" in parts else "weight_scale"]
        optional = ["input_scale"] if name == "fp8_tensor" else []
    elif weight.dtype == "U8":
        name = "nvfp4"
        needed = ["weight_scale", "weight_global_scale" if packed else "weight_scale_2"]
        optional = ["input_global_scale" if packed else "input_scale"]
    else:
        raise FormatError(f"{weight}: no format has a weight of dtype {weight.dtype}; {_SUPPORTED}")
    for suffix in needed:
        if suffix not in parts:
            raise FormatError(f"{weight}: a {weight.dtype} weight needs {module}.{suffix}, which is missing")
    for suffix, entry in parts.items():
        if suffix not in (*needed, *optional, "weight", "weight_packed"):
            raise FormatError(f"{entry}: an orphan scale; a {weight.dtype} weight read as {name} has no {suffix}")
    return name


def _fp8_kind(weight: TensorEntry, parts: Parts) -> str:
    if "weight_scale_inv" in parts:
        return "fp8_block"
    scale = parts.get("weight_scale")
    if scale is None:
        raise FormatError(f"{weight}: an F8_E4M3 weight needs weight_scale or weight_scale_inv; both are missing")
    if scale.dtype in ("U8", "F8_E8M0"):
        raise FormatError(f"{scale}: {scale.dtype} scales mean MXFP8, which is not read; {_SUPPORTED}")
    rows = weight.shape[0] if weight.shape else 0
    if scale.shape in ((), (1,)):
        return "fp8_tensor"
    if scale.shape in ((rows,), (rows, 1)) and rows > 1:
        return "fp8_channel"
    return "fp8_block"


def signature(name: str, parts: Parts) -> tuple[object, ...]:
    """What experts that share one stack must have in common."""
    return (name, *sorted((suffix, entry.dtype) for suffix, entry in parts.items()))


def prepare(suffix: str, name: str, *, entry: TensorEntry, tensor: Tensor) -> Tensor:
    """A tensor as its format holds it: scales that multiply, in fp32, without dimensions of one.

    suffix, name: which part of which format. Raises: FormatError.
    """
    if suffix in ("weight", "weight_packed") or (suffix == "weight_scale" and name == "nvfp4"):
        return tensor
    if entry.dtype not in _FLOATS:
        raise FormatError(f"{entry}: expected a scale of dtype {' or '.join(_FLOATS)}, found {entry.dtype}")
    tensor = tensor.to(torch.float32)
    if name == "fp8_channel":
        return tensor.flatten()
    if name == "fp8_block":
        if tensor.dim() == 4 and tensor.shape[1] == tensor.shape[3] == 1:  # ModelOpt: [rows, 1, columns, 1]
            return tensor[:, 0, :, 0]
        return tensor
    tensor = scalar(entry, tensor)
    if suffix not in _RECIPROCAL:
        return tensor
    if tensor.device.type != "meta" and tensor.item() == 0:
        raise FormatError(f"{entry}: expected the reciprocal of a scale, found 0")
    return tensor.reciprocal()


def scalar(entry: TensorEntry, tensor: Tensor) -> Tensor:
    """One finite number as an fp32 tensor without dimensions, from [] or [1]. Raises: FormatError."""
    if entry.shape not in ((), (1,)) or entry.dtype not in _FLOATS:
        raise FormatError(f"{entry}: expected one number, F32 [] or [1], found {entry.dtype} {list(entry.shape)}")
    tensor = tensor.to(torch.float32).reshape(())
    if tensor.device.type != "meta" and not tensor.isfinite():
        raise FormatError(f"{entry}: expected a finite number, found {tensor.item()}")
    return tensor


def build(name: str, where: TensorEntry, parts: Mapping[str, Tensor], *, dynamic_rows: bool) -> Weight:
    """The typed weight of a format. parts: suffix → prepared tensor; where: the tensor to name in an error.

    Raises: FormatError when the type refuses them.
    """
    weight = parts["weight"] if "weight" in parts else parts["weight_packed"]
    inputs = next((parts[suffix] for suffix in INPUT_SCALES if suffix in parts), None)
    try:
        match name:
            case "bf16":
                return Plain(weight)
            case "fp8_tensor":
                return Fp8Tensor(weight, parts["weight_scale"], inputs)
            case "fp8_channel":
                return Fp8Channel(weight, parts["weight_scale"], dynamic_rows)
            case "fp8_block":
                return Fp8Block(weight, parts.get("weight_scale_inv", parts.get("weight_scale")))  # type: ignore[arg-type]
            case _:
                second = parts["weight_scale_2"] if "weight_scale_2" in parts else parts["weight_global_scale"]
                return Nvfp4(weight, parts["weight_scale"], second, inputs)
    except FormatError as e:
        raise FormatError(f"{where}: {e}") from e
