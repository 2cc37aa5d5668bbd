"""Weight formats: the tensors of each, what they must look like, and `dequantize` in plain torch.

A format is a type, never a guess: its constructor checks dtypes and shapes, so a scalar scale cannot reach code
that indexes blocks. All formats hold one matrix [out, in], or a stack of them [experts, out, in]; scales carry the
same leading dimension. Every scale here multiplies (compressed-tensors files store the reciprocal of NVFP4's global
scale; the reader inverts it).

| format        | weight                    | scale                                    | bytes per weight |
|---------------|---------------------------|------------------------------------------|------------------|
| `bf16`        | bf16, fp16 or fp32        | –                                        | 2 (4)            |
| `fp8_tensor`  | e4m3                      | fp32, one                                | 1                |
| `fp8_channel` | e4m3                      | fp32 [out]                               | 1                |
| `fp8_block`   | e4m3                      | fp32 [⌈out/128⌉, ⌈in/128⌉]               | 1                |
| `nvfp4`       | e2m1 pairs, uint8 [in/2]  | e4m3 [out, in/16] and fp32, one          | 0.5625           |

Two e2m1 codes share a byte: the even index sits in the low nibble. Codes 0..7 are 0, ½, 1, 1½, 2, 3, 4, 6; bit 3
is the sign. Source: NVIDIA ModelOpt's export format, vLLM's and compressed-tensors' readers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import ClassVar, TypeAlias

import torch
from torch import Tensor

from .errors import FormatError

BLOCK = 128  # rows and columns that share one scale in fp8_block
NVFP4_BLOCK = 16  # consecutive inputs that share one scale in nvfp4
E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
PLAIN_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def _expect(what: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...], shape: tuple[int, ...]) -> None:
    if tensor.dtype not in dtypes or tuple(tensor.shape) != shape:
        names = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
        raise FormatError(
            f"{what}: expected {names} {list(shape)}, found "
            f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
        )


def _expect_matrix(what: str, tensor: Tensor) -> None:
    if tensor.dim() not in (2, 3):
        raise FormatError(f"{what}: expected [out, in] or [experts, out, in], found {list(tensor.shape)}")


class _Matrix:
    """What all formats share: the logical shape, and the bytes they hold."""

    weight: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape, [out, in] or [experts, out, in]."""
        return tuple(self.weight.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the weight and all its scales."""
        tensors = (getattr(self, f.name) for f in fields(self))  # type: ignore[arg-type]
        return sum(t.nbytes for t in tensors if isinstance(t, Tensor))

    @property
    def device(self) -> torch.device:
        return self.weight.device


@dataclass(frozen=True, eq=False)
class Plain(_Matrix):
    """weight: bf16, fp16 or fp32 [..., out, in]."""

    format: ClassVar[str] = "bf16"
    weight: Tensor

    def __post_init__(self) -> None:
        if self.weight.dtype not in PLAIN_DTYPES or self.weight.dim() not in (2, 3):
            raise FormatError(
                f"bf16 weight: expected bfloat16, float16 or float32 in two or three dimensions, "
                f"found {self.weight.dtype} {list(self.weight.shape)}"
            )


@dataclass(frozen=True, eq=False)
class Fp8Tensor(_Matrix):
    """weight: e4m3 [..., out, in]; scale: fp32 [...]; input_scale: fp32 [...] of a static activation scale, or None."""

    format: ClassVar[str] = "fp8_tensor"
    weight: Tensor
    scale: Tensor
    input_scale: Tensor | None = None

    def __post_init__(self) -> None:
        _expect_matrix("fp8_tensor weight", self.weight)
        lead = self.shape[:-2]
        _expect("fp8_tensor weight", self.weight, (E4M3,), self.shape)
        _expect("fp8_tensor scale", self.scale, (torch.float32,), lead)
        if self.input_scale is not None:
            _expect("fp8_tensor input_scale", self.input_scale, (torch.float32,), lead)


@dataclass(frozen=True, eq=False)
class Fp8Channel(_Matrix):
    """weight: e4m3 [..., out, in]; scale: fp32 [..., out]. dynamic: activations are quantised per row at run time."""

    format: ClassVar[str] = "fp8_channel"
    weight: Tensor
    scale: Tensor
    dynamic: bool = True

    def __post_init__(self) -> None:
        _expect_matrix("fp8_channel weight", self.weight)
        _expect("fp8_channel weight", self.weight, (E4M3,), self.shape)
        _expect("fp8_channel scale", self.scale, (torch.float32,), self.shape[:-1])


@dataclass(frozen=True, eq=False)
class Fp8Block(_Matrix):
    """weight: e4m3 [..., out, in]; scale: fp32 [..., ⌈out/128⌉, ⌈in/128⌉]."""

    format: ClassVar[str] = "fp8_block"
    weight: Tensor
    scale: Tensor

    def __post_init__(self) -> None:
        _expect_matrix("fp8_block weight", self.weight)
        *lead, rows, columns = self.shape
        _expect("fp8_block weight", self.weight, (E4M3,), self.shape)
        _expect("fp8_block scale", self.scale, (torch.float32,), (*lead, -(-rows // BLOCK), -(-columns // BLOCK)))


@dataclass(frozen=True, eq=False)
class Nvfp4(_Matrix):
    """weight: uint8 [..., out, in/2], two e2m1 codes a byte; scale: e4m3 [..., out, in/16]; global_scale: fp32 [...];
    input_scale: fp32 [...] when the checkpoint wants FP4 activations (W4A4), else None (W4A16)."""

    format: ClassVar[str] = "nvfp4"
    weight: Tensor
    scale: Tensor
    global_scale: Tensor
    input_scale: Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape, [out, in] or [experts, out, in]."""
        *lead, columns = self.weight.shape
        return (*lead, 2 * columns)

    def __post_init__(self) -> None:
        _expect_matrix("nvfp4 weight", self.weight)
        *lead, rows, columns = self.shape
        if columns % NVFP4_BLOCK:
            raise FormatError(f"nvfp4 weight: {columns} inputs are not a multiple of the block of {NVFP4_BLOCK}")
        _expect("nvfp4 weight", self.weight, (torch.uint8,), (*lead, rows, columns // 2))
        _expect("nvfp4 scale", self.scale, (E4M3,), (*lead, rows, columns // NVFP4_BLOCK))
        _expect("nvfp4 global scale", self.global_scale, (torch.float32,), tuple(lead))
        if self.input_scale is not None:
            _expect("nvfp4 input_scale", self.input_scale, (torch.float32,), tuple(lead))


Weight: TypeAlias = Plain | Fp8Tensor | Fp8Channel | Fp8Block | Nvfp4
FORMATS: tuple[str, ...] = ("bf16", "fp8_tensor", "fp8_channel", "fp8_block", "nvfp4")


def dequantize(weight: Weight, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values that a weight stands for.

    The product with its scales is formed in fp32 (exact for e2m1 × e4m3) and rounded to dtype once.

    Returns: dtype [out, in], or [experts, out, in]. A plain weight of that dtype comes back uncopied.
    """
    if isinstance(weight, Plain):
        return weight.weight.to(dtype)
    if isinstance(weight, Nvfp4):
        values = unpack_e2m1(weight.weight).unflatten(-1, (-1, NVFP4_BLOCK))
        values = values.mul_(weight.scale.float().unsqueeze(-1)).flatten(-2)
        return values.mul_(weight.global_scale[..., None, None]).to(dtype)
    values = weight.weight.float()
    if isinstance(weight, Fp8Tensor):
        return values.mul_(weight.scale[..., None, None]).to(dtype)
    if isinstance(weight, Fp8Channel):
        return values.mul_(weight.scale[..., None]).to(dtype)
    rows, columns = weight.shape[-2:]
    scale = weight.scale.repeat_interleave(BLOCK, -2)[..., :rows, :].repeat_interleave(BLOCK, -1)[..., :columns]
    return values.mul_(scale).to(dtype)


def on_meta(weight: Weight) -> Weight:
    """A weight of the same format and shape, without values."""
    tensors = {f.name: getattr(weight, f.name) for f in fields(weight)}
    return replace(weight, **{name: t.to("meta") for name, t in tensors.items() if isinstance(t, Tensor)})  # type: ignore[arg-type]


def give_back(weight: Nvfp4) -> None:
    """Let go of the codes and block scales of a weight that is kept in another order: both move to the meta device, so
    shape, format and bytes stay known, and whoever still reads the values is refused."""
    for name in ("weight", "scale"):
        object.__setattr__(weight, name, getattr(weight, name).to("meta"))


def join(weights: Sequence[Weight]) -> Weight | None:
    """One matrix of the output rows of several, with exactly their values; None when no format holds it."""
    if all(isinstance(w, Plain) for w in weights) and len({w.weight.dtype for w in weights}) == 1:
        return Plain(torch.cat([w.weight for w in weights]))
    if all(isinstance(w, Fp8Tensor | Fp8Channel) and len(w.shape) == 2 for w in weights):
        # torch joins few tensors of FP8
        codes = torch.cat([w.weight.view(torch.uint8) for w in weights]).view(E4M3)
        scales = [w.scale.expand(w.shape[0]) for w in weights if isinstance(w, Fp8Tensor | Fp8Channel)]
        return Fp8Channel(codes, torch.cat(scales))
    return None


def unpack_e2m1(packed: Tensor) -> Tensor:
    """uint8 [..., n], two e2m1 codes a byte, low nibble first → fp32 [..., 2n]."""
    codes = torch.arange(16, device=packed.device)  # E2M1_VALUES, made where they are used: no copy from the host
    exponent, fraction = (codes & 7) >> 1, codes & 1
    doubled = torch.where(exponent == 0, 2 * fraction, (2 + fraction) << exponent)
    values = doubled.float() / 4 * (1 - 2 * (codes >> 3))
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)
    return values[codes.int()]


def gather(weight: Weight, rows: Tensor) -> Weight:
    """Some rows of a matrix (int64 [T], or any shape of indices flattened), as a weight [T, in] of its own."""
    rows = rows.flatten()
    picked = weight.weight.view(torch.uint8)[rows].view(weight.weight.dtype)  # indexing knows no e4m3
    if isinstance(weight, Nvfp4):
        return Nvfp4(picked, weight.scale.view(torch.uint8)[rows].view(weight.scale.dtype), weight.global_scale)
    if isinstance(weight, Fp8Tensor):
        return Fp8Tensor(picked, weight.scale)
    if isinstance(weight, Fp8Channel):
        return Fp8Channel(picked, weight.scale[rows])
    if isinstance(weight, Fp8Block):
        # Each row with the block scales of its own row block, spread over its columns.
        spread = weight.scale[rows // BLOCK].repeat_interleave(BLOCK, -1)[:, : picked.shape[1]]
        return Plain(picked.float() * spread)
    return Plain(picked)
