// What the CUDA sources share: names of the integer types, bf16 in integer registers, warp sums, dependent launch.

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;

#define DEVICE __device__ __forceinline__

DEVICE float low(u32 v) { return __uint_as_float(v << 16); }
DEVICE float high(u32 v) { return __uint_as_float(v & 0xFFFF0000u); }
DEVICE float widen(u16 v) { return __uint_as_float((u32)v << 16); }
DEVICE u32 narrow2(float lo, float hi) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0,%1,%2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}
DEVICE u16 narrow(float v) { return (u16)narrow2(v, 0.f); }
DEVICE float silu(float z) { return z / (1.f + __expf(-z)); }
DEVICE float warp_sum(float v) {
#pragma unroll
  for (int d = 16; d; d >>= 1) v += __shfl_xor_sync(0xFFFFFFFFu, v, d);
  return v;
}
DEVICE u32 address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
// Copies to shared memory that are on their way until cp.async.wait_group; what is not valid becomes zeros.
DEVICE void copy16(u32 to, const void* from, bool valid = true) {
  asm volatile("cp.async.cg.shared.global [%0],[%1],16,%2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0) : "memory");
}
DEVICE void copy4(u32 to, const void* from, bool valid = true) {
  asm volatile("cp.async.ca.shared.global [%0],[%1],4,%2;" ::"r"(to), "l"(from), "r"(valid ? 4 : 0) : "memory");
}
DEVICE void mma(float* d, const u32* a, u32 b0, u32 b1) {  // m16n8k16: fp32 += bf16 · bf16
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// Dependent launch: a kernel reads nothing but constants (weights, scales) and cursors before it waits. Waiting means that
// the kernel before is complete, and so, since that one waited, all before it. A kernel lets the next one start when it has
// waited itself: earlier was no faster, the next one's blocks wait in places that this kernel needs (norms need few, and do).
#if __CUDA_ARCH__ >= 900
DEVICE void wait_for_inputs() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
DEVICE void let_next_start() { asm volatile("griddepcontrol.launch_dependents;"); }
#else
DEVICE void wait_for_inputs() {}
DEVICE void let_next_start() {}
#endif
