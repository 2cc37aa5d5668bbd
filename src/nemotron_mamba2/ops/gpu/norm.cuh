// RMSNorm of a row x, or of x·silu(z), over GROUPS parts of it, by one block.
//
// A row is summed in SPANS: its groups, or eighths of it when it has but one group. One warp sums a span (lanes, then xor
// 16, 8, 4, 2, 1), spans of one group are added in order. Everything a thread needs is in flight at once.

// ORDER: of the inputs of a written row. 0 as they are · 1, 2: in each 64, as the fragments of `weights.cuh` hold them, so that
// wgmma can read them (1 bf16, 2 the other formats). Rows then begin at multiples of 128 bytes.

#ifndef ORDER
#define ORDER 0
#endif

constexpr int SPANS = GROUPS == 1 ? 8 : GROUPS, SPAN = K_ / SPANS, VECTORS = (SPAN / 8 + 31) / 32;

// Eight inputs of a row, the first of them a multiple of eight.
DEVICE void store8(u16* to, uint4 r) {
  if (ORDER == 0) {
    *(uint4*)to = r;
    return;
  }
  u16* chunk = (u16*)((unsigned long long)to & ~127ull);
  int unit = (int)((unsigned long long)to >> 4 & 7), t = ORDER == 1 ? unit & 3 : unit >> 1, half = ORDER == 1 ? unit >> 2 : unit & 1;
  u32* place = (u32*)chunk + 16 * half + t;
  place[0] = r.x;
  place[4] = r.y;
  place[8] = r.z;
  place[12] = r.w;
}
template <bool GATED>
DEVICE void load_span(const u16* x, const u16* z, float (*v)[8]) {
  int lane = threadIdx.x & 31;
#pragma unroll
  for (int i = 0; i < VECTORS; i++) {
    int at = 8 * (lane + 32 * i);
    uint4 a = make_uint4(0, 0, 0, 0), b = a;
    if (at < SPAN) {
      a = *(const uint4*)(x + at);
      if (GATED) b = *(const uint4*)(z + at);
    }
    const u32 *w = (const u32*)&a, *s = (const u32*)&b;
#pragma unroll
    for (int j = 0; j < 4; j++) {
      v[i][2 * j] = GATED ? low(w[j]) * silu(low(s[j])) : low(w[j]);
      v[i][2 * j + 1] = GATED ? high(w[j]) * silu(high(s[j])) : high(w[j]);
    }
  }
}
DEVICE float span_sum(const float (*v)[8]) {
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < VECTORS; i++)
#pragma unroll
    for (int j = 0; j < 8; j++) sum = fmaf(v[i][j], v[i][j], sum);
  return warp_sum(sum);
}
DEVICE void store_span(const float (*v)[8], float scale, const float* weight, u16* out) {
  int lane = threadIdx.x & 31;
#pragma unroll
  for (int i = 0; i < VECTORS; i++) {
    int at = 8 * (lane + 32 * i);
    if (at >= SPAN) break;
    float4 w0 = *(const float4*)(weight + at), w1 = *(const float4*)(weight + at + 4);
    uint4 r;
    r.x = narrow2(v[i][0] * scale * w0.x, v[i][1] * scale * w0.y);
    r.y = narrow2(v[i][2] * scale * w0.z, v[i][3] * scale * w0.w);
    r.z = narrow2(v[i][4] * scale * w1.x, v[i][5] * scale * w1.y);
    r.w = narrow2(v[i][6] * scale * w1.z, v[i][7] * scale * w1.w);
    store8(out + at, r);
  }
}
DEVICE float norm_scale(const float* partial, float eps) {  // of one whole row
  float sum = 0.f;
#pragma unroll
  for (int s = 0; s < SPANS; s++) sum += partial[s];
  return rsqrtf(sum / (float)K_ + eps);
}

// A block of `warps` warps norms one row into out; partial: SPANS floats of shared memory.
template <bool GATED, int warps>
DEVICE void norm_row(const u16* x, const u16* z, const float* weight, u16* out, float* partial, int warp, float eps) {
  if (GROUPS == 1) {
    constexpr int MOST = (SPANS + warps - 1) / warps;  // spans that a warp holds
    float v[MOST][VECTORS][8];
#pragma unroll
    for (int k = 0; k < MOST; k++)
      if (warp + k * warps < SPANS) load_span<GATED>(x + (warp + k * warps) * SPAN, z + (warp + k * warps) * SPAN, v[k]);
#pragma unroll
    for (int k = 0; k < MOST; k++)
      if (warp + k * warps < SPANS) partial[warp + k * warps] = span_sum(v[k]);
    __syncthreads();
    float scale = norm_scale(partial, eps);
#pragma unroll
    for (int k = 0; k < MOST; k++) {
      int at = (warp + k * warps) * SPAN;
      if (at < K_) store_span(v[k], scale, weight + at, out + at);
    }
  } else {
    for (int span = warp; span < SPANS; span += warps) {
      float v[VECTORS][8];
      load_span<GATED>(x + span * SPAN, z + span * SPAN, v);
      store_span(v, rsqrtf(span_sum(v) / (float)SPAN + eps), weight + span * SPAN, out + span * SPAN);
    }
  }
}
