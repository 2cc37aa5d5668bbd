"""Times mixture-of-experts layers of the published shapes on this GPU, against the bytes that they must read.

    python bench/moe.py [--shape nano30b super120b] [--format nvfp4 …] [--rows 1 4 16 64 256] [--prompt 1024 8192]
                        [--tokens] [--layouts]

Step rows: microseconds per layer in a CUDA graph over LAYERS layers of their own random weights; floor: the bytes of
the experts hit, shared expert, latent projections and router, at 4.39 TB/s. Prompt rows: the routed experts alone, by
our kernels and, for bf16, by torch's grouped product. --tokens: the routed experts by size of groups, to choose
`moe.py: _tokens`. --layouts, bf16 alone: torch's grouped product of the up and the down projections, weights with their
inputs contiguous, as in the files, and transposed. One JSON object a line.
"""

from __future__ import annotations

import argparse
import json
from importlib import import_module

import torch
from torch import Tensor

from nemotron_mamba2.bench.timing import captured, microseconds
from nemotron_mamba2.config import MoeConfig
from nemotron_mamba2.formats import E4M3, Fp8Block, Fp8Channel, Fp8Tensor, Nvfp4, Plain, Weight
from nemotron_mamba2.ops import Linear, Mixture, gpu, reference

moe = import_module("nemotron_mamba2.ops.gpu.moe")

LAYERS = 4
READ_TB_S = 4.39
SHAPES = {
    "nano30b": MoeConfig(2688, 128, 6, 1856, 3712, routed_scaling_factor=2.5),
    "super120b": MoeConfig(4096, 512, 22, 2688, 5376, moe_latent_size=1024, routed_scaling_factor=5.0),
}


def codes(*shape: int) -> Tensor:
    """Random bytes, none of which is an e4m3 NaN, of small values."""
    sign = torch.randint(0, 2, shape, dtype=torch.uint8, device="cuda") << 7
    return sign | torch.randint(8, 56, shape, dtype=torch.uint8, device="cuda")


def random_linear(format: str, *shape: int) -> Linear:
    lead, rows, columns = shape[:-2], shape[-2], shape[-1]
    one = torch.full(lead, columns**-0.5, device="cuda")
    if format == "bf16":
        values = torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(std=columns**-0.5)
        return Linear(Plain(values))
    if format == "nvfp4":
        scale = torch.randint(48, 64, (*lead, rows, columns // 16), dtype=torch.uint8, device="cuda").view(E4M3)
        packed = torch.randint(0, 256, (*lead, rows, columns // 2), dtype=torch.uint8, device="cuda")
        weight: Weight = Nvfp4(packed, scale, one)
        assert isinstance(weight, Nvfp4)
        return Linear(weight, packed=gpu.pack(weight))
    values = codes(*shape).view(E4M3)
    if format == "fp8_channel":
        return Linear(Fp8Channel(values, one[..., None].expand(*lead, rows).contiguous()))
    if format == "fp8_block":
        blocks = one[..., None, None].expand(*lead, -(-rows // 128), -(-columns // 128))
        return Linear(Fp8Block(values, blocks.contiguous()))
    return Linear(Fp8Tensor(values, one))


def random_parts(config: MoeConfig, format: str) -> Mixture:
    hidden, experts, width = config.hidden_size, config.n_routed_experts, config.expert_input_size
    wide, shared = config.moe_intermediate_size, config.moe_shared_expert_intermediate_size
    parts = {
        "up": random_linear(format, experts, wide, width),
        "down": random_linear(format, experts, width, wide),
        "shared_up": random_linear(format, shared, hidden),
        "shared_down": random_linear(format, hidden, shared),
    }
    if config.moe_latent_size:
        parts |= {"fc1": random_linear(format, width, hidden), "fc2": random_linear(format, hidden, width)}
    gate = Linear(Plain(torch.randn(experts, hidden, device="cuda") * hidden**-0.5))
    return Mixture(torch.ones(hidden, device="cuda"), gate, torch.zeros(experts, device="cuda"), **parts)


def floor_bytes(parts: Mixture, hit: float) -> float:
    experts = parts.up.weight.shape[0]
    others = (parts.gate, parts.shared_up, parts.shared_down, parts.fc1, parts.fc2)
    read = sum(part.weight.nbytes for part in others if part is not None)
    return read + (parts.up.weight.nbytes + parts.down.weight.nbytes) * hit / experts


def choose(x: Tensor, parts: Mixture, config: MoeConfig) -> tuple[Tensor, Tensor]:
    return gpu.route(x, parts.gate, parts.bias, config=config, role="step")


def step_rows(config: MoeConfig, layers: list[Mixture], rows: int) -> dict[str, float]:
    hidden = torch.randn(rows, config.hidden_size, device="cuda").bfloat16()
    hits = [choose(hidden, parts, config)[0].unique().numel() for parts in layers]
    floor = sum(map(floor_bytes, layers, hits)) / len(layers) / READ_TB_S / 1e6
    run = captured(lambda: [gpu.mixture(hidden, parts, config=config) for parts in layers])
    return {"us": microseconds(run) / len(layers), "floor_us": floor}


def prompt_rows(config: MoeConfig, parts: Mixture, rows: int) -> dict[str, float]:
    x = torch.randn(rows, config.expert_input_size, device="cuda").bfloat16()
    chosen, weights = choose(torch.randn(rows, config.hidden_size, device="cuda").bfloat16(), parts, config)
    found = {"us": microseconds(lambda: moe.routed_experts(x, chosen, weights, parts.up, parts.down, role="step"))}
    if isinstance(parts.up.weight, Plain):
        torches = reference.routed_experts
        found["torch_us"] = microseconds(lambda: torches(x, chosen, weights, parts.up, parts.down, role="prompt"))
    flops = 4 * chosen.numel() * config.moe_intermediate_size * config.expert_input_size
    return found | {"tflop_s": flops / found["us"] / 1e6}


def group_sizes(config: MoeConfig, parts: Mixture, rows: int) -> dict[str, float]:
    x = torch.randn(rows, config.expert_input_size, device="cuda").bfloat16()
    chosen, _ = choose(torch.randn(rows, config.hidden_size, device="cuda").bfloat16(), parts, config)
    found = {}
    for tokens in (8, 16, 32, 64, 128):
        groups = moe._new_groups(chosen, config.n_routed_experts, tokens)
        moe._fill_groups(groups, chosen)
        run = captured(lambda g=groups: moe._experts(x, g, parts.up, parts.down, config.num_experts_per_tok))
        found[f"tokens_{tokens}_us"] = microseconds(run)
    return found


def layouts(config: MoeConfig, parts: Mixture, rows: int) -> dict[str, float]:
    """Both products of the routed experts, their rows already in the order of the experts."""
    chosen, _ = choose(torch.randn(rows, config.hidden_size, device="cuda").bfloat16(), parts, config)
    ends = torch.bincount(chosen.flatten(), minlength=config.n_routed_experts).cumsum(0).int()
    found = {}
    for name in ("up", "down"):
        weight = getattr(parts, name).weight.weight  # [experts, outputs, inputs]
        x = torch.randn(chosen.numel(), weight.shape[-1], device="cuda").bfloat16()
        turned = weight.transpose(-1, -2)
        for layout, operand in (("rows", turned), ("transposed", turned.contiguous())):
            run = captured(lambda x=x, w=operand: torch._grouped_mm(x, w, offs=ends))
            found[f"{name}_{layout}_us"] = microseconds(run)
    return found


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="*", default=["nano30b"], choices=SHAPES)
    parser.add_argument("--format", nargs="*", default=["nvfp4"])
    parser.add_argument("--rows", nargs="*", type=int, default=[1, 4, 16, 64, 256])
    parser.add_argument("--prompt", nargs="*", type=int, default=[1024, 8192])
    parser.add_argument("--tokens", action="store_true")
    parser.add_argument("--layouts", action="store_true")
    arguments = parser.parse_args()
    for shape in arguments.shape:
        for format in arguments.format:
            config = SHAPES[shape]
            layers = [random_parts(config, format) for _ in range(LAYERS)]
            for rows in arguments.rows:
                line = {"shape": shape, "format": format, "rows": rows} | step_rows(config, layers, rows)
                line |= group_sizes(config, layers[0], rows) if arguments.tokens else {}
                print(json.dumps(line), flush=True)
            for rows in arguments.prompt:
                line = {"shape": shape, "format": format, "prompt": rows} | prompt_rows(config, layers[0], rows)
                line |= group_sizes(config, layers[0], rows) if arguments.tokens and rows <= 4096 else {}
                print(json.dumps(line), flush=True)
            if arguments.layouts and format == "bf16":
                for rows in arguments.rows + arguments.prompt:
                    line = {"shape": shape, "layouts": rows} | layouts(config, layers[0], rows)
                    print(json.dumps(line), flush=True)
            del layers


if __name__ == "__main__":
    main()
