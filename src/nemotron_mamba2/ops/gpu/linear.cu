// y = norm(x) · Wᵀ (· scale) (+ residual) for few rows: weights stream once, one warp per slice of K.
//
// One instruction does the arithmetic for every format and row count: mma.m16n8k16 (bf16 in, fp32 out) with 16 weight
// rows as the A operand and 8 tokens as the B operand. K is cut into S *slices*; each is summed in order, GROUP slices are
// added in order, and so are the groups. Nothing else decides a result's bits, so a token's bits do not depend on the other
// tokens, nor on which kernel ran: `linear_wide` and `linear_many` add the same slices in the same order.
//
//   MT, NT   tiles of 16 weight rows and of 8 tokens that a warp holds        WM   warps side by side over weight rows
//   S        slices of K, one warp each                                      DEPTH chunks of weights in flight per warp
//   AHEAD    chunks beyond them that are asked to come to L2 before the kernel waits for its tokens
//   OUT32    y is fp32, the sums as they are; else bf16
//
// NORM   0 x is read as it is · 1 RMSNorm of x · 2 RMSNorm over groups of x·silu(z)         (1, 2: the block norms its
//        rows into shared memory, by the same function as `norm_rows`)
// SQUARE 1: y = relu(·)², of the product rounded to bf16
// TERMS  n: y = Σ worth · found over n rows of `found` for each token, + the product rounded to bf16, + residual, rounded once
//        (WEIGHED 0: worth is 1)
// STACK  0 one matrix · n: a stack of them, rows in groups of at most 8·NT tokens that share a matrix (`moe.cu: group_rows`);
//        blockIdx.y is the group. `order` names the rows of a group: row a of y is the product of row a / n of x.

#ifndef STACK
#define STACK 0
#endif
#ifndef TERMS
#define TERMS 0
#endif
#ifndef WEIGHED
#define WEIGHED 0
#endif

constexpr int WARPS = S * WM, ROWS = 16 * MT * WM, TOKENS = 8 * NT, PITCH = TOKENS + 1, SCALE_PITCH = (K_ + 127) / 128;
constexpr int XPITCH = K_ + (FORMAT == 0 ? 32 : 8);  // of normed rows in shared memory: no bank conflicts

extern "C" __global__ __launch_bounds__(WARPS * 32) void linear(
    u16* y, const u8* w, const u8* block_scales, const float* scale, const u16* x, const u16* z, const float* norm_weight,
    const u16* residual, long long ldy, long long ldx, long long ldz, long long ldr, int N, int M, float eps,
    const int4* groups, const int* order, const u16* found, const float* worth, long long ldf) {
  extern __shared__ __align__(16) u8 shared[];
  int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  int slice = warp / WM, wm = warp % WM, token0 = blockIdx.y * TOKENS;
  int tile = (blockIdx.x * WM + wm) * MT, last_tile = N / 16 - 1;
  int c0 = slice * CHUNKS / S, c1 = (slice + 1) * CHUNKS / S;
  M = min(M - token0, TOKENS);
  if (STACK) {  // which matrix is read is known only now
    wait_for_inputs();
    let_next_start();
    if (blockIdx.y >= groups[0].x) return;
    int4 group = groups[blockIdx.y + 1];
    enter_stack(w, block_scales, scale, group.x, N);
    order += group.y;
    M = group.z;
    token0 = 0;
  }

  float factor = scale_of_sum(scale);
  Chunk q[DEPTH];
#pragma unroll
  for (int d = 0; d < DEPTH; d++)
    if (c0 + d < c1) load(q[d], w, block_scales, tile, last_tile, c0 + d, lane);
  if (AHEAD) bring(w, block_scales, tile, last_tile, c0 + DEPTH, min(AHEAD, c1 - c0 - DEPTH), lane);
  if (!STACK) {
    wait_for_inputs();
    let_next_start();
  }

  const u16* tokens = x + token0 * ldx;
  long long pitch = ldx;
  const u16* picked[STACK ? NT : 1];
  if (STACK)
#pragma unroll
    for (int n = 0; n < NT; n++) picked[STACK ? n : 0] = x + order[min(8 * n + g, M - 1)] / (STACK ? STACK : 1) * ldx;
  if (NORM) {
    __shared__ float partial[TOKENS][SPANS];
    u16* normed = (u16*)shared;
    for (int m = 0; m < M; m++)
      norm_row<NORM == 2, WARPS>(tokens + m * ldx, z + (token0 + m) * ldz, norm_weight, normed + m * XPITCH, partial[m], warp, eps);
    __syncthreads();
    tokens = normed;
    pitch = XPITCH;
  }

  float acc[MT][NT][4] = {};
  for (int c = c0; c < c1; c += DEPTH) {
#pragma unroll
    for (int d = 0; d < DEPTH; d++) {
      if (c + d >= c1) break;
      int chunk = c + d;
      multiply(acc, q[d], scale + (long long)(min(tile, last_tile) / 8) * SCALE_PITCH + chunk / 2, SCALE_PITCH, [&](int n, int half) {
        int m = 8 * n + g, k = 64 * chunk + (FORMAT == 0 ? 8 * t + 32 * half : 16 * t + 8 * half);
        const u16* token = STACK ? picked[STACK ? n : 0] : tokens + m * pitch;
        return m < M ? *(const uint4*)(token + k) : make_uint4(0, 0, 0, 0);
      });
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
    for (int s = 0; s < S; s += GROUP) {
      float of_group = 0.f;
#pragma unroll
      for (int k = 0; k < GROUP; k++) of_group += sums[((s + k) * ROWS + row) * PITCH + m];
      v += of_group;
    }
    if (FORMAT == 2) factor = scale[n];
    v *= factor;
    long long at = STACK ? order[m] : token0 + m;
    if (SQUARE) v = squared(v);
    if (TERMS) v = __fadd_rn(sum_of_terms<TERMS, WEIGHED>(found + at * TERMS * ldf + n, worth + at * TERMS, ldf), widen(narrow(v)));
    if (RESIDUAL) v += widen(residual[at * ldr + n]);
    if (OUT32) ((float*)y)[at * ldy + n] = v;
    else y[at * ldy + n] = narrow(v);
  }
}
