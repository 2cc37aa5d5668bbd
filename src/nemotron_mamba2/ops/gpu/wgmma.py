"""Hopper's matrix instruction as CUDA text: inline assembly names every register, so each shape is its own function."""


def wgmma(name: str, columns: int, *, a: str = "registers", transpose_a: int = 0, transpose_b: int = 0) -> str:
    """A function d[64, columns] (+)= a[64, 16] · b[16, columns]; fp32 sums, columns / 2 per thread, of bf16 products.

    a: "registers", or "descriptor" of a tile in shared memory; transpose_a, transpose_b: 1 where neighbours in memory
    lie along rows of a, or columns of b, instead of along the 16. The function's last argument says whether to add.
    """
    n = columns // 2
    held = 4 if a == "registers" else 1
    b, add = f"%{n + held}", f"%{n + held + 1}"
    sums = ",".join(f"%{i}" for i in range(n))
    left = "{" + ",".join(f"%{i}" for i in range(n, n + 4)) + "}" if held == 4 else f"%{n}"
    flags = f"{transpose_b}" if held == 4 else f"{transpose_a},{transpose_b}"
    outputs = ",".join(f'"+f"(d[{i}])' for i in range(n))
    inputs = ",".join(f'"r"(a[{i}])' for i in range(4)) if held == 4 else '"l"(a)'
    return (
        f"DEVICE void {name}(float* d, {'const u32*' if held == 4 else 'unsigned long long'} a, "
        "unsigned long long b, int add) {\n"
        f'  asm volatile("{{.reg .pred p; setp.ne.s32 p,{add},0; "\n'
        f'    "wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.bf16.bf16 {{{sums}}},{left},{b},p,1,1,{flags};}}"\n'
        f'    : {outputs} : {inputs},"l"(b),"r"(add));\n}}'
    )
