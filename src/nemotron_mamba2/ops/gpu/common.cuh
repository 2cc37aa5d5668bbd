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
// Dependent launch: a kernel reads nothing but constants (weights, scales) and cursors before it waits, and lets the next
// one start when it has waited. Waiting means that the kernel before is complete, and so, since that one waited, all before
// it. (Letting the next one start earlier still was no faster: its blocks wait in places that this kernel needs.)
#if __CUDA_ARCH__ >= 900
DEVICE void wait_for_inputs() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
DEVICE void let_next_start() { asm volatile("griddepcontrol.launch_dependents;"); }
#else
DEVICE void wait_for_inputs() {}
DEVICE void let_next_start() {}
#endif
