// Weights of every format as A operands of mma.m16n8k16: loads, exact unpacking to bf16, the product itself.
//
// The K order inside an mma is ours to choose: in a chunk of 64 inputs, thread t of a quad takes inputs 16t..16t+15 of
// its row (bf16: 8t..8t+7 and 32+8t..32+8t+7), four per k16 step. So a plain row-major bf16 or e4m3 row loads as 16-byte
// words straight into fragments, whole sectors at a time, and the 16 inputs of a thread are exactly one NVFP4 scale block.
// NVFP4 is repacked once at load (`linear.py: pack`).
//
// Unpacking is exact: e4m3 and e2m1 bits are moved into bf16 fields and multiplied by a power of two; e2m1 × e4m3 block
// scale has at most 6 significant bits, so it is a bf16 value. The remaining scale is applied to the fp32 sum.
//
// FORMAT 0 bf16 · 1 e4m3, one scale · 2 e4m3, scale per row · 3 e4m3, scale per 128×128 block · 4 nvfp4

DEVICE u32 bf16x2_times(u32 a, u32 b) {  // exact products; −0 keeps signs; fma exists from sm_80 on, mul does not
  u32 r;
  asm("fma.rn.bf16x2 %0,%1,%2,%3;" : "=r"(r) : "r"(a), "r"(b), "r"(0x80008000u));
  return r;
}
DEVICE uint4 stream16(const void* p) {  // read once: do not keep in L1
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3},[%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}

constexpr int CHUNKS = K_ / 64;
constexpr int WORDS = FORMAT == 0 ? 4 : FORMAT == 4 ? 1 : 2;  // 16-byte words of a chunk per thread and 16-row tile

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

// Ask for chunks [c, c + count) of the tiles to be brought to L2; nobody waits for them.
DEVICE void bring_to_l2(const u8* p, int bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0],%1;" ::"l"(p), "r"(bytes) : "memory");
#endif
}
DEVICE void bring(const u8* w, const u8* block_scales, int tile, int last_tile, int c, int count, int lane) {
  if (count <= 0) return;
  long long row = min(tile + lane / 16, last_tile);
  if (lane >= 16 * MT) return;
  if (FORMAT == 4) {
    long long at = row * CHUNKS + c;
    if (lane % 16 == 0) bring_to_l2(w + at * 512, count * 512);
    if (lane % 16 == 1) bring_to_l2(block_scales + at * 64, count * 64);
  } else {
    constexpr int B = FORMAT == 0 ? 2 : 1;
    bring_to_l2(w + ((row * 16 + lane % 16) * K_ + 64 * c) * B, count * 64 * B);
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

// Sums of one chunk: acc[i][n] += A tile i · token tile n, k16 steps in order; x(n, half) gives 8 inputs of token 8n + g.
template <class X>
DEVICE void multiply(float (*acc)[NT][4], const Chunk& q, const float* block_scale, int scale_pitch, const X& x) {
  float part[FORMAT == 3 ? MT : 1][FORMAT == 3 ? NT : 1][4] = {};
#pragma unroll
  for (int half = 0; half < 2; half++) {
    uint4 xs[NT];
#pragma unroll
    for (int n = 0; n < NT; n++) xs[n] = x(n, half);
#pragma unroll
    for (int i = 0; i < MT; i++) {
      u32 a[2][4];
      unpack(q, i, 2 * half, a[0]);
      unpack(q, i, 2 * half + 1, a[1]);
#pragma unroll
      for (int n = 0; n < NT; n++) {
        float* sum = FORMAT == 3 ? part[FORMAT == 3 ? i : 0][FORMAT == 3 ? n : 0] : acc[i][n];
        mma(sum, a[0], xs[n].x, xs[n].y);
        mma(sum, a[1], xs[n].z, xs[n].w);
      }
    }
  }
  if (FORMAT == 3) {
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
      for (int n = 0; n < NT; n++)
#pragma unroll
        for (int r = 0; r < 4; r++)
          acc[i][n][r] = fmaf(block_scale[i / 8 * scale_pitch], part[FORMAT == 3 ? i : 0][FORMAT == 3 ? n : 0][r], acc[i][n][r]);
  }
}

// Of the whole sum: what the format's scale still owes. Rows of fp8_channel have their own (`scale[n]`).
DEVICE float scale_of_sum(const float* scale) { return FORMAT == 1 ? *scale : FORMAT == 4 ? *scale * 256.f : 1.f; }

#ifndef SQUARE
#define SQUARE 0
#endif
DEVICE float squared(float v) {  // SQUARE: relu(v)², v rounded to bf16 first
  float r = fmaxf(widen(narrow(v)), 0.f);
  return r * r;
}

// Σ worth · found over TERMS rows, in order, as the reference adds them.
template <int TERMS_, int WEIGHED_>
DEVICE float sum_of_terms(const u16* found, const float* worth, long long pitch) {
  float sum = 0.f;
#pragma unroll
  for (int k = 0; k < TERMS_; k++) {
    float v = widen(found[k * pitch]);
    sum = __fadd_rn(sum, WEIGHED_ ? __fmul_rn(worth[k], v) : v);
  }
  return sum;
}

// From a stack of matrices of N rows to one of them.
DEVICE void enter_stack(const u8*& w, const u8*& block_scales, const float*& scale, int index, int N) {
  long long matrix = (long long)index * N * K_;
  w += FORMAT == 0 ? matrix * 2 : FORMAT == 4 ? matrix / 2 : matrix;
  if (FORMAT == 4) block_scales += matrix / 16;
  if (FORMAT == 1 || FORMAT == 4) scale += index;
  if (FORMAT == 2) scale += (long long)index * N;
  if (FORMAT == 3) scale += (long long)index * ((N + 127) / 128) * ((K_ + 127) / 128);
}
