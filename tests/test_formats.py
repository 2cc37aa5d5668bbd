"""Weight formats: what their constructors refuse, and that `dequantize` gives the values a file means."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nemotron_mamba2.errors import FormatError
from nemotron_mamba2.formats import (
    E2M1_VALUES,
    FORMATS,
    Fp8Block,
    Fp8Channel,
    Fp8Tensor,
    Nvfp4,
    Plain,
    dequantize,
    join,
    on_meta,
    unpack_e2m1,
)
from quantised import E4M3, fp8_block, fp8_channel, fp8_tensor, nvfp4, nvfp4_packed

SHAPES = [(16, 16), (48, 32), (200, 272), (129, 128), (1, 160)]


def typed(name: str, weight: torch.Tensor):
    """(typed weight, its truth) of a float32 matrix, in a format."""
    if name == "bf16":
        return Plain(weight.bfloat16()), weight.bfloat16().float()
    by_hand = {"fp8_tensor": fp8_tensor, "fp8_channel": fp8_channel, "fp8_block": fp8_block, "nvfp4": nvfp4}
    parts, truth = by_hand[name](weight)
    match name:
        case "fp8_tensor":
            return Fp8Tensor(parts["weight"], parts["weight_scale"], parts["input_scale"]), truth
        case "fp8_channel":
            return Fp8Channel(parts["weight"], parts["weight_scale"]), truth
        case "fp8_block":
            return Fp8Block(parts["weight"], parts["weight_scale"]), truth
        case _:
            return Nvfp4(parts["weight"], parts["weight_scale"], parts["weight_scale_2"], parts["input_scale"]), truth


def stacked(weights):
    """Several typed weights of one format as one stack."""
    first = weights[0]
    names = [name for name, value in vars(first).items() if isinstance(value, torch.Tensor)]
    return type(first)(**{name: torch.stack([getattr(weight, name) for weight in weights]) for name in names})


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_dequantize_gives_the_values_of_the_file(name, shape, generator):
    matrices = [torch.randn(shape, generator=generator) * 0.05 for _ in range(3)]
    pairs = [typed(name, matrix) for matrix in matrices]
    for (weight, truth), matrix in zip(pairs, matrices, strict=True):
        assert weight.format == name and weight.shape == shape
        values = dequantize(weight)
        assert values.dtype == torch.float32 and torch.equal(values, truth)
        assert torch.equal(dequantize(weight, torch.bfloat16), truth.bfloat16())
        tolerance = {"bf16": 0.005, "nvfp4": 0.2}.get(name, 0.05)
        assert (values - matrix).norm() <= tolerance * matrix.norm()
    stack = stacked([weight for weight, _ in pairs])
    assert stack.shape == (3, *shape) and stack.nbytes == sum(weight.nbytes for weight, _ in pairs)
    assert torch.equal(dequantize(stack), torch.stack([truth for _, truth in pairs]))


def test_a_plain_weight_of_the_wanted_dtype_is_not_copied():
    weight = torch.randn(8, 8)
    assert dequantize(Plain(weight)) is weight


def test_bytes_per_weight(generator):
    matrix = torch.randn(256, 512, generator=generator)
    scales = {"bf16": 0, "fp8_tensor": 8, "fp8_channel": 4 * 256, "fp8_block": 4 * 2 * 4, "nvfp4": 256 * 32 + 8}
    per_weight = {"bf16": 2, "nvfp4": 0.5}
    for name in FORMATS:
        assert typed(name, matrix)[0].nbytes == matrix.numel() * per_weight.get(name, 1) + scales[name]


def test_e2m1_codes_low_nibble_first():
    codes = torch.arange(16, dtype=torch.uint8)
    packed = codes[0::2] | (codes[1::2] << 4)
    expected = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    values = unpack_e2m1(packed)
    assert torch.equal(values, expected) and torch.equal(values, torch.tensor(E2M1_VALUES))
    assert torch.equal(values.signbit(), expected.signbit())
    assert unpack_e2m1(torch.tensor([0x20, 0xF7], dtype=torch.uint8)).tolist() == [0.0, 1.0, 6.0, -6.0]


@given(st.integers(1, 6), st.integers(1, 5), st.floats(1e-4, 1e3), st.integers(0, 1000))
def test_nvfp4_by_both_wires_means_the_same(rows, blocks, size, seed):
    matrix = torch.randn(rows, 16 * blocks, generator=torch.Generator().manual_seed(seed)) * size
    ours, _ = nvfp4(matrix)
    theirs, truth = nvfp4_packed(matrix)
    assert torch.equal(ours["weight"], theirs["weight_packed"])
    scale = theirs["weight_global_scale"].reshape(()).reciprocal()
    weight = Nvfp4(theirs["weight_packed"], theirs["weight_scale"], scale)
    assert torch.equal(dequantize(weight), truth)
    torch.testing.assert_close(ours["weight_scale_2"], scale, rtol=1e-6, atol=0)


# refused ----------------------------------------------------------------------------------------------------------

F8 = torch.zeros(256, 256).to(E4M3)
ONE = torch.tensor(1.0)
PACKED = torch.zeros(256, 128, dtype=torch.uint8)
BLOCKS = torch.zeros(256, 16).to(E4M3)
REFUSED = {
    "plain int8": lambda: Plain(torch.zeros(2, 2, dtype=torch.int8)),
    "plain fp8": lambda: Plain(F8),
    "plain vector": lambda: Plain(torch.zeros(4)),
    "plain 4-D": lambda: Plain(torch.zeros(1, 1, 2, 2)),
    "tensor: bf16 weight": lambda: Fp8Tensor(F8.bfloat16(), ONE),
    "tensor: scale [1]": lambda: Fp8Tensor(F8, ONE.reshape(1)),
    "tensor: channel scale": lambda: Fp8Tensor(F8, torch.ones(256)),
    "tensor: bf16 scale": lambda: Fp8Tensor(F8, ONE.bfloat16()),
    "tensor: input scale [1]": lambda: Fp8Tensor(F8, ONE, ONE.reshape(1)),
    "tensor: one scale for a stack": lambda: Fp8Tensor(F8[None], ONE),
    "channel: scalar": lambda: Fp8Channel(F8, ONE),
    "channel: column": lambda: Fp8Channel(F8, torch.ones(256, 1)),
    "channel: by input": lambda: Fp8Channel(F8[:128], torch.ones(256)),
    "block: scalar": lambda: Fp8Block(F8, ONE),
    "block: channel": lambda: Fp8Block(F8, torch.ones(256)),
    "block: 4-D": lambda: Fp8Block(F8, torch.ones(2, 1, 2, 1)),
    "block: transposed": lambda: Fp8Block(F8[:128], torch.ones(2, 1)),
    "nvfp4: int8 weight": lambda: Nvfp4(PACKED.to(torch.int8), BLOCKS, ONE),
    "nvfp4: scalar scale": lambda: Nvfp4(PACKED, ONE.to(E4M3), ONE),
    "nvfp4: fp32 scale": lambda: Nvfp4(PACKED, BLOCKS.float(), ONE),
    "nvfp4: blocks of 32": lambda: Nvfp4(PACKED, BLOCKS[:, :8], ONE),
    "nvfp4: global scale [1]": lambda: Nvfp4(PACKED, BLOCKS, ONE.reshape(1)),
    "nvfp4: input not in blocks": lambda: Nvfp4(PACKED[:, :124], BLOCKS, ONE),
    "nvfp4: input scale of a stack": lambda: Nvfp4(PACKED, BLOCKS, ONE, torch.ones(256)),
}


@pytest.mark.parametrize("case", REFUSED, ids=str)
def test_p83_a_scale_of_another_layout_never_becomes_a_weight(case):
    with pytest.raises(FormatError) as caught:
        REFUSED[case]()
    assert "\n" not in str(caught.value) and ("expected" in str(caught.value) or "multiple" in str(caught.value))


def test_a_vector_is_no_weight_of_any_format():
    """Not one of the types may end in another exception, whatever it is given."""
    for tensor in (torch.tensor(1), torch.zeros(3), torch.zeros(0), torch.zeros(16, dtype=torch.uint8), F8[0]):
        for make in (
            lambda t: Plain(t),
            lambda t: Fp8Tensor(t, ONE),
            lambda t: Fp8Channel(t, ONE),
            lambda t: Fp8Block(t, ONE),
            lambda t: Nvfp4(t, BLOCKS, ONE),
        ):
            with pytest.raises(FormatError):
                make(tensor)


def test_joined_rows_have_the_values_of_their_parts():
    plain = [Plain(torch.randn(n, 64).bfloat16()) for n in (48, 16)]
    codes = [torch.randn(n, 64).to(E4M3) for n in (48, 16)]
    fp8 = [Fp8Tensor(codes[0], torch.tensor(0.3)), Fp8Channel(codes[1], torch.rand(16))]
    for parts in (plain, fp8):
        joined = join(parts)
        assert dequantize(joined).equal(torch.cat([dequantize(part) for part in parts]))
        assert on_meta(joined).nbytes == joined.nbytes and on_meta(joined).weight.is_meta
    assert join([plain[0], fp8[1]]) is None
