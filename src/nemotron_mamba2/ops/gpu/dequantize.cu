// The values of a quantised weight, rounded to bf16: bit for bit `formats.dequantize`. A thread takes 16 weights of a row.
//
// FORMAT 1 e4m3, one scale · 2 e4m3, scale per row · 3 e4m3, scale per 128×128 block · 4 e2m1 pairs, e4m3 scale per 16 · 5 as 4,
// in the order of `linear.py: pack` (a block whose scale is zero comes back as +0)

DEVICE float e4m3_value(u32 code) {
  float v = __uint_as_float((code & 127u) << 20) * 1.329227995784916e36f;  // 2^120
  return code & 128u ? -v : v;
}
DEVICE float e2m1_value(u32 code) {
  u32 m = code & 7u;
  float v = m < 2 ? 0.5f * (float)m : __uint_as_float((m << 22) + (126u << 23));
  return code & 8u ? -v : v;
}

extern "C" __global__ __launch_bounds__(256) void dequantize(
    u16* out, const u8* codes, const u8* block_scales, const float* scale, int rows, int columns) {
  wait_for_inputs();
  let_next_start();
  int row = blockIdx.y, at = 16 * (blockIdx.x * 256 + threadIdx.x);
  if (at >= columns) return;
  long long place = (long long)row * columns + at;
  float v[16];
  if (FORMAT == 5) {
    long long lane = ((long long)(row / 16) * (columns / 64) + at / 64) * 32 + row % 8 * 4 + at % 64 / 16;
    int half = row % 16 / 8;
    uint4 q = ((const uint4*)codes)[lane];
    const u32* w = (const u32*)&q;
    u32 code = block_scales[2 * lane + half];
    float block = __uint_as_float((code >> 3) + 118u << 23 | (code & 7u) << 20), whole = *scale;
#pragma unroll
    for (int k = 0; k < 16; k++) {  // k16 step, pair, element
      u32 b = w[k / 4] >> 16 * (k % 2), e2m1;
      if (k / 2 % 2) e2m1 = half ? (b >> 12 & 6u) | (b >> 10 & 1u) | (b >> 8 & 8u) : (b & 7u) | (b >> 6 & 8u);
      else e2m1 = half ? (b >> 3 & 7u) | (b >> 9 & 8u) : (b >> 6 & 7u) | (b >> 12 & 8u);
      v[k] = e2m1_value(e2m1) * block * whole;
    }
  } else if (FORMAT == 4) {
    uint2 q = *(const uint2*)(codes + place / 2);
    float block = e4m3_value(block_scales[place / 16]), whole = *scale;
#pragma unroll
    for (int k = 0; k < 16; k++) v[k] = e2m1_value((k < 8 ? q.x : q.y) >> 4 * (k % 8)) * block * whole;
  } else {
    uint4 q = *(const uint4*)(codes + place);
    const u32* w = (const u32*)&q;
    float s = FORMAT == 1 ? *scale : FORMAT == 2 ? scale[row] : scale[(long long)(row / 128) * ((columns + 127) / 128) + at / 128];
#pragma unroll
    for (int k = 0; k < 16; k++) v[k] = e4m3_value(w[k / 4] >> 8 * (k % 4)) * s;
  }
  u32 r[8];
#pragma unroll
  for (int k = 0; k < 8; k++) r[k] = narrow2(v[2 * k], v[2 * k + 1]);
  *(uint4*)(out + place) = make_uint4(r[0], r[1], r[2], r[3]);
  *(uint4*)(out + place + 8) = make_uint4(r[4], r[5], r[6], r[7]);
}
