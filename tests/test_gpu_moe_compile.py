"""What can be known of the kernels of mixtures of experts without a GPU: they compile for every architecture and do not
spill, and NVFP4 stacks are packed matrix by matrix."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest
import torch

from nemotron_mamba2.config import MoeConfig
from nemotron_mamba2.formats import FORMATS, Nvfp4, Plain, dequantize, give_back
from nemotron_mamba2.ops import Linear, reference
from nemotron_mamba2.ops.gpu import nvrtc, tiles
from nemotron_mamba2.ops.gpu.tiles import Few, Tiles, Wide
from test_gpu_compile import ARCHITECTURES, SHARED_BYTES, _own_cache, unpack, unspilt, usage  # noqa: F401  (a fixture)

linear = import_module("nemotron_mamba2.ops.gpu.linear")  # the package names the functions
moe = import_module("nemotron_mamba2.ops.gpu.moe")

NANO = MoeConfig(2688, 128, 6, 1856, 3712, routed_scaling_factor=2.5)
SUPER = MoeConfig(4096, 512, 22, 2688, 5376, moe_latent_size=1024, routed_scaling_factor=5.0)
STACKS = ((1856, 2688), (2688, 1856), (2688, 1024), (1024, 2688))
TOKENS = (8, 16, 32, 64, 128)


def stack_image(format: str, rows_out: int, columns: int, tokens: int, architecture: str, *, per_row: int) -> bytes:
    hopper = architecture == "sm_90"
    tile = moe.stack_tile(format, columns, tokens, hopper=hopper)
    constants = tiles.defines(format, columns, moe.slices_of_stack(columns), tile)
    constants += linear._extras(tile, per_row > 1, per_row, None)
    return nvrtc.compile_cubin(tiles.source(tile)[0], constants, architecture + "a" * isinstance(tile, Wide))


def images(config: MoeConfig, architecture: str) -> list[bytes]:
    """Every other kernel of a layer."""
    norms, plain = moe.text(norms=True), moe.text()
    variants = [(norms, moe.scores_defines(config.n_routed_experts, config.hidden_size, fused)) for fused in (0, 1)]
    variants += [(plain, moe.choice_defines(config, tokens)) for tokens in (0, 8)]
    variants += [(plain, (("GROUPS_OF", 16),)), (norms, moe.pick_defines(config.expert_input_size, 2, 6))]
    for adds, residual in ((0, 0), (1, 1)):
        sizes = {"SUM": 1, "TERMS": config.num_experts_per_tok, "WEIGHED": 1, "ADDS": adds, "RESIDUAL": residual}
        variants.append((plain, tuple(sizes.items())))
    return [nvrtc.compile_cubin(text, defines, architecture) for text, defines in variants]


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("format", ["bf16", "fp8_block", "nvfp4"])
@pytest.mark.parametrize(("rows_out", "columns"), [STACKS[0], STACKS[2]])
def test_products_of_stacks_do_not_spill(format: str, rows_out: int, columns: int, tokens: int, tmp_path: Path) -> None:
    used = usage(stack_image(format, rows_out, columns, tokens, "sm_90", per_row=6), tmp_path)
    assert unspilt(used), used


@pytest.mark.parametrize("format", ["bf16", "nvfp4"])
def test_products_with_terms_do_not_spill(format: str, tmp_path: Path) -> None:
    tile = tiles.choose(format, 2688, 3712, 1, hopper=True)
    assert isinstance(tile, Few)
    terms = linear.Terms(torch.empty(0), 6, torch.empty(0))
    constants = tiles.defines(format, 3712, tiles.slices(2688, 3712), tile, residual=True)
    constants += linear._extras(tile, False, None, terms)
    used = usage(nvrtc.compile_cubin(tiles.source(tile)[0], constants, "sm_90"), tmp_path)
    assert unspilt(used), used


@pytest.mark.parametrize("config", [NANO, SUPER], ids=["nano", "super"])
def test_router_and_sums_do_not_spill(config: MoeConfig, tmp_path: Path) -> None:
    for image in images(config, "sm_90"):
        used = usage(image, tmp_path)
        assert used["LOCAL"] == 0 and used["STACK"] <= 64, used


@pytest.mark.parametrize("architecture", [a for a in ARCHITECTURES if a != "sm_90"])
def test_every_kernel_compiles_for(architecture: str) -> None:
    assert images(NANO, architecture)
    for format, tokens in (("fp8_tensor", 8), ("nvfp4", 32)):
        assert stack_image(format, 1856, 2688, tokens, architecture, per_row=6)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("hopper", [False, True])
def test_every_group_has_a_cut(format: str, tokens: int, hopper: bool) -> None:
    for _, columns in (*STACKS, (64, 128)):
        slices = moe.slices_of_stack(columns)
        if tokens > 32 and (not hopper or slices == 1):
            continue  # groups are never so large there
        tile: Tiles = moe.stack_tile(format, columns, tokens, hopper=hopper)
        assert (tile.NTOK if isinstance(tile, Wide) else 8 * tile.NT) == tokens
        assert tile.shared_bytes(format, slices) <= (SHARED_BYTES if hopper else 96 << 10)
        assert tile.threads(slices) <= 1024


def test_groups_fit_into_their_bound() -> None:
    for rows, experts, tokens in ((1, 8, 8), (300, 8, 8), (40, 128, 16), (4000, 16, 32)):
        chosen = torch.randint(0, experts, (rows, 3))
        groups = moe._new_groups(chosen, experts, tokens)
        counts = torch.bincount(chosen.flatten(), minlength=experts)
        assert (-(-counts // tokens)).sum() <= groups.most == len(groups.table) - 1
        assert len(groups.order) == chosen.numel()


def test_packing_a_stack_packs_its_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    stack = reference.quantize(torch.randn(5, 32, 128), "nvfp4")
    assert isinstance(stack, Nvfp4)
    whole = linear.pack(stack)
    for size in (1 << 10, 5 << 10):  # weights at once: part of a matrix, more than one
        monkeypatch.setattr(linear, "PACKED_AT_ONCE", size)
        assert all(map(torch.equal, linear.pack(stack), whole))
    words, codes = (part.view(5, -1) for part in whole)
    for e in range(5):
        one = Nvfp4(stack.weight[e], stack.scale[e], stack.global_scale[e])
        assert torch.equal(words[e], linear.pack(one)[0]) and torch.equal(codes[e], linear.pack(one)[1])
        torch.testing.assert_close(unpack(one), dequantize(one), rtol=1e-6, atol=0)


def test_a_weight_given_back_keeps_its_shape_and_refuses_to_be_read() -> None:
    weight = reference.quantize(torch.randn(32, 128), "nvfp4")
    assert isinstance(weight, Nvfp4)
    shape, size = weight.shape, weight.nbytes
    give_back(weight)
    assert (weight.shape, weight.nbytes) == (shape, size)
    with pytest.raises((RuntimeError, NotImplementedError)):
        dequantize(weight).sum().item()
    assert weight.global_scale.item() > 0


def test_what_the_kernels_do_not_take_is_said() -> None:
    odd, plain = Linear(Plain(torch.zeros(8, 48, 40).bfloat16())), Linear(Plain(torch.zeros(8, 64, 64).bfloat16()))
    assert "out % 16" in moe.unserved_experts(odd, plain) and not moe.unserved_experts(plain, plain)
