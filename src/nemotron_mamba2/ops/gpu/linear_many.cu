// y = x · Wᵀ (· scale) (+ residual) for many rows: tokens shared through shared memory, slices of K one after the other.
//
// The same instruction, K order and slice order as `linear`, so the same bits. A block holds 16·MT·WM weight rows and
// 8·NT·WN tokens; weights go from memory to registers, DEPTH chunks ahead; tokens arrive by cp.async, STAGES chunks of 64
// inputs deep, swizzled so that a quad's 16-byte reads meet no bank twice.

constexpr int WARPS = WM * WN, ROWS = 16 * MT * WM, TOKENS = 8 * NT * WN, THREADS = 32 * WARPS, SCALE_PITCH = (K_ + 127) / 128;

extern "C" __global__ __launch_bounds__(THREADS) void linear_many(
    u16* y, const u8* w, const u8* block_scales, const float* scale, const u16* x, const u16* z, const float* norm_weight,
    const u16* residual, long long ldy, long long ldx, long long ldz, long long ldr, int N, int M, float eps) {
  extern __shared__ __align__(128) u8 shared[];
  int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  int wm = warp % WM, wn = warp / WM, token0 = blockIdx.y * TOKENS;
  int tile = (blockIdx.x * WM + wm) * MT, last_tile = N / 16 - 1;
  M = min(M - token0, TOKENS);
  x += token0 * ldx;
  float factor = scale_of_sum(scale);
  Chunk q[DEPTH];
#pragma unroll
  for (int d = 0; d < DEPTH; d++)
    if (d < CHUNKS) load(q[d], w, block_scales, tile, last_tile, d, lane);
  wait_for_inputs();
  let_next_start();

  u32 base = (u32)__cvta_generic_to_shared(shared);
  auto fetch = [&](int c) {
    if (c < CHUNKS) {
      u32 stage = base + (c % STAGES) * TOKENS * 128;
#pragma unroll
      for (int e = threadIdx.x; e < TOKENS * 8; e += THREADS) {
        int m = e / 8, unit = e % 8, place = unit ^ ((m & 1) * (FORMAT == 0 ? 4 : 1));
        copy16(stage + m * 128 + place * 16, x + (long long)min(m, M - 1) * ldx + 64 * c + 8 * unit, m < M);
      }
    }
    asm volatile("cp.async.commit_group;");
  };
#pragma unroll
  for (int c = 0; c < STAGES - 1; c++) fetch(c);

  float acc[MT][NT][4] = {}, of_group[MT][NT][4] = {}, total[MT][NT][4] = {};
  int slice = 0;
  for (int c0 = 0; c0 < CHUNKS; c0 += DEPTH) {
#pragma unroll
    for (int d = 0; d < DEPTH; d++) {
      int c = c0 + d;
      if (c >= CHUNKS) break;
      asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2));
      __syncthreads();
      fetch(c + STAGES - 1);
      const u8* stage = shared + (c % STAGES) * TOKENS * 128;
      multiply(acc, q[d], scale + (long long)(min(tile, last_tile) / 8) * SCALE_PITCH + c / 2, SCALE_PITCH, [&](int n, int half) {
        int m = 8 * (wn * NT + n) + g, unit = FORMAT == 0 ? t + 4 * half : 2 * t + half;
        return *(const uint4*)(stage + m * 128 + (unit ^ ((m & 1) * (FORMAT == 0 ? 4 : 1))) * 16);
      });
      if (c + DEPTH < CHUNKS) load(q[d], w, block_scales, tile, last_tile, c + DEPTH, lane);
      if (c + 1 == (slice + 1) * CHUNKS / S) {  // the slice is whole
        slice++;
#pragma unroll
        for (int i = 0; i < MT; i++)
#pragma unroll
          for (int n = 0; n < NT; n++)
#pragma unroll
            for (int r = 0; r < 4; r++) {
              of_group[i][n][r] += acc[i][n][r];
              acc[i][n][r] = 0.f;
              if (slice % GROUP == 0) {
                total[i][n][r] += of_group[i][n][r];
                of_group[i][n][r] = 0.f;
              }
            }
      }
    }
  }

  // Through shared memory, so that stores run along rows of y.
  asm volatile("cp.async.wait_all;");
  __syncthreads();
  constexpr int PITCH = ROWS + 2;
  u16* sums = (u16*)shared;
#pragma unroll
  for (int i = 0; i < MT; i++)
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int r = 0; r < 4; r++) {
        int row = (wm * MT + i) * 16 + g + (r >= 2 ? 8 : 0), m = 8 * (wn * NT + n) + 2 * t + (r & 1);
        int column = blockIdx.x * ROWS + row;
        if (column >= N || m >= M) continue;
        float v = total[i][n][r] * (FORMAT == 2 ? scale[column] : factor);
        if (SQUARE) v = squared(v);
        if (RESIDUAL) v += widen(residual[(token0 + m) * ldr + column]);
        if (OUT32) ((float*)y)[(token0 + m) * ldy + column] = v;
        else sums[m * PITCH + row] = narrow(v);
      }
  if (OUT32) return;
  __syncthreads();
  for (int e = threadIdx.x; e < TOKENS * (ROWS / 2); e += THREADS) {
    int m = e / (ROWS / 2), row = e % (ROWS / 2) * 2, column = blockIdx.x * ROWS + row;
    if (m < M && column < N) *(u32*)(y + (token0 + m) * ldy + column) = *(const u32*)(sums + m * PITCH + row);
  }
}
