// What FP8 products of prompt rows read: e4m3 codes of rows, normed first when a norm is given. A block per row.
//
// codes = e4m3(v / scale), v the bf16 value that the product would read otherwise; scale is the checkpoint's (DYNAMIC 0),
// or the row's largest |v| / 448 (DYNAMIC 1). NORM 0 v = x · 1 RMSNorm of x · 2 RMSNorm over groups of x·silu(z)

DEVICE u32 e4m3_pair(float lo, float hi) {  // nearest, ties to even, saturating at ±448
#if __CUDA_ARCH__ >= 890
  u16 r;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0,%1,%2;" : "=h"(r) : "f"(hi), "f"(lo));
  return r;
#else
  u32 r = 0;
  float v[2] = {lo, hi};
#pragma unroll
  for (int k = 0; k < 2; k++) {
    float a = fminf(fabsf(v[k]), 448.f);
    u32 bits = __float_as_uint(a);
    bits = a < 0.015625f ? (u32)rintf(a * 512.f) : ((bits + 0x7FFFFu + (bits >> 20 & 1)) >> 20) - (120u << 3);
    r |= (bits | (__float_as_uint(v[k]) >> 24 & 0x80u)) << 8 * k;
  }
  return r;
#endif
}

extern "C" __global__ __launch_bounds__(256) void cast(
    u8* codes, float* scales, const u16* x, const u16* z, const float* weight, const float* input_scale, long long ldx,
    long long ldz, float eps) {
  __shared__ __align__(16) u16 row[K_];
  __shared__ float partial[SPANS], largest[8];
  int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  long long m = blockIdx.x;
  wait_for_inputs();
  let_next_start();
  x += m * ldx;
  if (NORM) {
    norm_row<NORM == 2, 8>(x, z + m * ldz, weight, row, partial, warp, eps);
    __syncthreads();
    x = row;
  }
  float scale;
  if (DYNAMIC) {
    float most = 0.f;
    for (int at = 8 * threadIdx.x; at < K_; at += 8 * 256) {
      uint4 q = *(const uint4*)(x + at);
      const u32* w = (const u32*)&q;
#pragma unroll
      for (int k = 0; k < 4; k++) most = fmaxf(most, fmaxf(fabsf(low(w[k])), fabsf(high(w[k]))));
    }
#pragma unroll
    for (int d = 16; d; d >>= 1) most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFFu, most, d));
    if (lane == 0) largest[warp] = most;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < 8; w++) most = fmaxf(most, largest[w]);
    scale = fmaxf(__fdiv_rn(most, 448.f), 1.17549435e-38f);
    if (threadIdx.x == 0) scales[m] = scale;
  } else {
    scale = *input_scale;
  }
  for (int at = 8 * threadIdx.x; at < K_; at += 8 * 256) {
    uint4 q = *(const uint4*)(x + at);
    const u32* w = (const u32*)&q;
    u32 r[4];
#pragma unroll
    for (int k = 0; k < 4; k++) r[k] = e4m3_pair(__fdiv_rn(low(w[k]), scale), __fdiv_rn(high(w[k]), scale));
    *(uint2*)(codes + m * K_ + at) = make_uint2(r[0] | r[1] << 16, r[2] | r[3] << 16);
  }
}
