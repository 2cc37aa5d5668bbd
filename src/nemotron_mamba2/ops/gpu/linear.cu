// y = norm(x) · Wᵀ (· scale) (+ residual) for few and many rows, weights streamed once and unpacked in registers.
//
// One instruction does the arithmetic for every format and row count: mma.m16n8k16 (bf16 in, fp32 out) with 16 weight
// rows as the A operand and 8 tokens as the B operand. K is cut into S *slices*; one warp sums one slice in order, and
// slices are added in order through shared memory. Nothing else decides a result's bits, so a token's bits do not depend
// on the other tokens, nor on MT, NT or WM, which only change with the row count:
//
//   MT, NT   tiles of 16 weight rows and of 8 tokens that a warp holds        WM   warps side by side over weight rows
//   S        slices of K, one warp each                                      DEPTH chunks of weights in flight per warp
//
// The K order inside an mma is ours to choose: in a chunk of 64 inputs, thread t of a quad takes inputs 16t..16t+15 of
// its row (bf16: 8t..8t+7 and 32+8t..32+8t+7), four per k16 step. So a plain row-major bf16 or e4m3 row loads as 16-byte
// words straight into fragments, whole sectors at a time, and the 16 inputs of a thread are exactly one NVFP4 scale block. NVFP4 is repacked once at load (`linear.py: pack`).
//
// Unpacking is exact: e4m3 and e2m1 bits are moved into bf16 fields and multiplied by a power of two; e2m1 × e4m3 block
// scale has at most 6 significant bits, so it is a bf16 value. The remaining scale is applied to the fp32 sum.
//
// FORMAT 0 bf16 · 1 e4m3, one scale · 2 e4m3, scale per row · 3 e4m3, scale per 128×128 block · 4 nvfp4
// NORM   0 x is read as it is · 1 RMSNorm of x · 2 RMSNorm over groups of x·silu(z)         (1, 2: the block norms its
//        rows into shared memory, by the same function as the kernel `norm_rows`)

DEVICE u32 bf16x2_times(u32 a, u32 b) {  // exact products; −0 keeps signs; fma exists from sm_80 on, mul does not
  u32 r;
  asm("fma.rn.bf16x2 %0,%1,%2,%3;" : "=r"(r) : "r"(a), "r"(b), "r"(0x80008000u));
  return r;
}
DEVICE void mma(float* d, const u32* a, u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
DEVICE uint4 stream16(const void* p) {  // read once: do not keep in L1
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3},[%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}

// -- norms ------------------------------------------------------------------------------------------------------------
//
// A row is summed in SPANS: its groups, or eighths of it when it has but one group. One warp sums a span (lanes, then xor
// 16, 8, 4, 2, 1), spans of one group are added in order. Everything a thread needs is in flight at once.

constexpr int SPANS = GROUPS == 1 ? 8 : GROUPS, SPAN = K_ / SPANS, VECTORS = (SPAN / 8 + 31) / 32;

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
    *(uint4*)(out + at) = r;
  }
}
DEVICE float norm_scale(const float* partial, float eps) {  // of one whole row
  float sum = 0.f;
#pragma unroll
  for (int s = 0; s < SPANS; s++) sum += partial[s];
  return rsqrtf(sum / (float)K_ + eps);
}

// A block of `warps` warps norms one row into out; partial: SPANS floats of shared memory.
template <bool GATED>
DEVICE void norm_row(const u16* x, const u16* z, const float* weight, u16* out, float* partial, int warp, int warps, float eps) {
  if (GROUPS == 1) {
    constexpr int MOST = 2;  // spans a warp may hold: blocks have at least 4 warps
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

#ifdef NORM_KERNEL
// out[m] = norm(x[m]), a block per row: the same bits as the norm fused into `linear`.
extern "C" __global__ __launch_bounds__(256) void norm_rows(
    u16* out, const u16* x, const u16* z, const float* weight, long long ld_out, long long ldx, long long ldz, float eps) {
  __shared__ float partial[SPANS];
  wait_for_inputs();
  let_next_start();
  long long m = blockIdx.x;
  norm_row<GATED_>(x + m * ldx, z + m * ldz, weight, out + m * ld_out, partial, threadIdx.x >> 5, 8, eps);
}
#else

// -- the product ------------------------------------------------------------------------------------------------------

constexpr int CHUNKS = K_ / 64, WARPS = S * WM, ROWS = 16 * MT * WM, TOKENS = 8 * NT, PITCH = TOKENS + 1;
constexpr int WORDS = FORMAT == 0 ? 4 : FORMAT == 4 ? 1 : 2;  // 16-byte words of a chunk per thread and 16-row tile
constexpr int XPITCH = K_ + (FORMAT == 0 ? 32 : 8);           // of normed rows in shared memory: no bank conflicts

struct Chunk {
  uint4 w[MT][WORDS];
  u32 scale[FORMAT == 4 ? MT : 1];  // nvfp4: two block scale codes, of rows g and g + 8
};

DEVICE void load(Chunk& q, const u8* w, const u8* block_scales, int tile, int last_tile, int c, int lane) {
  int g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int i = 0; i < MT; i++) {
    long long row = min(tile + i, last_tile);
    if (FORMAT == 4) {
      long long at = (row * CHUNKS + c) * 32 + lane;
      q.w[i][0] = stream16(w + at * 16);
      q.scale[i] = __ldg((const u16*)block_scales + at);
    } else {
      constexpr int B = FORMAT == 0 ? 2 : 1;
      const u8* p = w + ((row * 16 + g) * K_ + 64 * c) * B + 16 * t;
#pragma unroll
      for (int h = 0; h < 2; h++)
#pragma unroll
        for (int k = 0; k < B; k++) q.w[i][B * h + k] = stream16(p + (long long)h * 8 * K_ * B + 64 * k);
    }
  }
}

DEVICE u32 e4m3_pair(u32 v, u32 selector) {  // two bytes of v → bf16x2
  u32 lanes = __byte_perm(v, 0, selector);
  return bf16x2_times((lanes & 0x80008000u) | ((lanes >> 4) & 0x07F007F0u), 0x7B807B80u);
}

// The A operand of k16 step j: a0 (row g, first pair), a1 (row g + 8, first), a2 (g, second), a3 (g + 8, second).
DEVICE void unpack(const Chunk& q, int i, int j, u32* a) {
  if (FORMAT == 0) {
    const u32* r = (const u32*)q.w[i];
    a[0] = r[2 * j]; a[2] = r[2 * j + 1]; a[1] = r[8 + 2 * j]; a[3] = r[9 + 2 * j];
  } else if (FORMAT != 4) {
    const u32* r = (const u32*)q.w[i];
    a[0] = e4m3_pair(r[j], 0x1404); a[2] = e4m3_pair(r[j], 0x3424);
    a[1] = e4m3_pair(r[4 + j], 0x1404); a[3] = e4m3_pair(r[4 + j], 0x3424);
  } else {
    const u32 M = 0x81C081C0u;
    u32 v = ((const u32*)q.w[i])[j];
    u32 s0 = (q.scale[i] & 255u) * 0x00100010u + 0x76007600u, s1 = (q.scale[i] >> 8) * 0x00100010u + 0x76007600u;
    a[0] = bf16x2_times(v & M, s0);
    a[1] = bf16x2_times((v << 3) & M, s1);
    a[2] = bf16x2_times((v << 6) & M, s0);
    a[3] = bf16x2_times(((v >> 6) & 0x01800180u) | ((v >> 4) & 0x00400040u) | ((v << 4) & 0x80008000u), s1);
  }
}

extern "C" __global__ __launch_bounds__(WARPS * 32) void linear(
    u16* y, const u8* w, const u8* block_scales, const float* scale, const u16* x, const u16* z, const float* norm_weight,
    const u16* residual, long long ldy, long long ldx, long long ldz, long long ldr, int N, int M, float eps) {
  extern __shared__ __align__(16) u8 shared[];
  int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  int slice = warp / WM, wm = warp % WM, token0 = blockIdx.y * TOKENS;
  int tile = (blockIdx.x * WM + wm) * MT, last_tile = N / 16 - 1;
  int c0 = slice * CHUNKS / S, c1 = (slice + 1) * CHUNKS / S;
  M = min(M - token0, TOKENS);

  float factor = FORMAT == 1 ? *scale : FORMAT == 4 ? *scale * 256.f : 1.f;
  Chunk q[DEPTH];
#pragma unroll
  for (int d = 0; d < DEPTH; d++)
    if (c0 + d < c1) load(q[d], w, block_scales, tile, last_tile, c0 + d, lane);
  wait_for_inputs();
  let_next_start();

  const u16* tokens = x + token0 * ldx;
  long long pitch = ldx;
  if (NORM) {
    __shared__ float partial[TOKENS][SPANS];
    u16* normed = (u16*)shared;
    for (int m = 0; m < M; m++)
      norm_row<NORM == 2>(tokens + m * ldx, z + (token0 + m) * ldz, norm_weight, normed + m * XPITCH, partial[m], warp, WARPS, eps);
    __syncthreads();
    tokens = normed;
    pitch = XPITCH;
  }

  float acc[MT][NT][4] = {};
  for (int c = c0; c < c1; c += DEPTH) {
#pragma unroll
    for (int d = 0; d < DEPTH; d++) {
      if (c + d >= c1) break;
      float part[FORMAT == 3 ? MT : 1][FORMAT == 3 ? NT : 1][4] = {};
#pragma unroll
      for (int half = 0; half < 2; half++) {
        uint4 xs[NT];
#pragma unroll
        for (int n = 0; n < NT; n++) {
          int m = 8 * n + g;
          int k = 64 * (c + d) + (FORMAT == 0 ? 8 * t + 32 * half : 16 * t + 8 * half);
          xs[n] = m < M ? *(const uint4*)(tokens + m * pitch + k) : make_uint4(0, 0, 0, 0);
        }
#pragma unroll
        for (int i = 0; i < MT; i++) {
          u32 a[2][4];
          unpack(q[d], i, 2 * half, a[0]);
          unpack(q[d], i, 2 * half + 1, a[1]);
#pragma unroll
          for (int n = 0; n < NT; n++) {
            float* sum = FORMAT == 3 ? part[i % (FORMAT == 3 ? MT : 1)][n % (FORMAT == 3 ? NT : 1)] : acc[i][n];
            mma(sum, a[0], xs[n].x, xs[n].y);
            mma(sum, a[1], xs[n].z, xs[n].w);
          }
        }
      }
      if (FORMAT == 3) {
#pragma unroll
        for (int i = 0; i < MT; i++) {
          float s = scale[(long long)(min(tile + i, last_tile) / 8) * ((K_ + 127) / 128) + (c + d) / 2];
#pragma unroll
          for (int n = 0; n < NT; n++)
#pragma unroll
            for (int r = 0; r < 4; r++) acc[i][n][r] = fmaf(s, part[i % (FORMAT == 3 ? MT : 1)][n % (FORMAT == 3 ? NT : 1)][r], acc[i][n][r]);
        }
      }
      if (c + d + DEPTH < c1) load(q[d], w, block_scales, tile, last_tile, c + d + DEPTH, lane);
    }
  }

  if (NORM) __syncthreads();  // the normed rows lie where the sums go
  float* sums = (float*)shared;
#pragma unroll
  for (int i = 0; i < MT; i++)
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int r = 0; r < 4; r++) {
        int row = (wm * MT + i) * 16 + g + (r >= 2 ? 8 : 0), token = 8 * n + 2 * t + (r & 1);
        sums[(slice * ROWS + row) * PITCH + token] = acc[i][n][r];
      }
  __syncthreads();
  for (int e = threadIdx.x; e < ROWS * TOKENS; e += WARPS * 32) {
    int row = e % ROWS, m = e / ROWS, n = blockIdx.x * ROWS + row;
    if (m >= M || n >= N) continue;
    float v = 0.f;
#pragma unroll
    for (int s = 0; s < S; s++) v += sums[(s * ROWS + row) * PITCH + m];
    if (FORMAT == 2) factor = scale[n];
    v *= factor;
    if (RESIDUAL) v += widen(residual[(token0 + m) * ldr + n]);
    y[(token0 + m) * ldy + n] = narrow(v);
  }
}
#endif
