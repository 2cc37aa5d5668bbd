// A mixture of experts around its products: scores, choice, groups of rows that share an expert, ordered rows, the sum.
//
//   K_ inputs of a row   E experts   TOP experts of a row   VALUES experts of a lane, ⌈E / 32⌉

#ifdef SCORES
// scores[m][e] = sigmoid(x[m] · gate[e]) in fp32. A block takes 2 experts and BATCH rows; a warp one expert and a quarter of
// K, its gate values in registers before the kernel waits for its rows. Quarters are added in order. NORM 1: x is normed
// first, by every block (one row), and block 0 writes it.
constexpr int QUARTER = K_ / 4, LOADS = (QUARTER / 4 + 31) / 32;

extern "C" __global__ __launch_bounds__(256) void scores(
    float* scores, u16* normed, const u16* x, const float* norm_weight, const float* gate, long long ld_out, long long ldx, int M,
    float eps) {
  __shared__ float sums[BATCH][2][4];
  __shared__ __align__(16) u16 row[NORM ? K_ : 8];
  __shared__ float partial[SPANS];
  int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, expert = 2 * blockIdx.x + warp / 4, quarter = warp % 4;
  float4 g[LOADS];
  const float* from = gate + (long long)min(expert, E - 1) * K_ + quarter * QUARTER;
#pragma unroll
  for (int i = 0; i < LOADS; i++) {
    int at = 4 * (lane + 32 * i);
    g[i] = at < QUARTER ? *(const float4*)(from + at) : make_float4(0.f, 0.f, 0.f, 0.f);
  }
  wait_for_inputs();
  let_next_start();
  int first = blockIdx.y * BATCH, count = min(M - first, BATCH);
  if (NORM) {
    norm_row<false, 8>(x, x, norm_weight, row, partial, warp, eps);
    __syncthreads();
    if (blockIdx.x == 0)
      for (int at = 8 * threadIdx.x; at < K_; at += 8 * 256) *(uint4*)(normed + at) = *(const uint4*)(row + at);
  }
  for (int m = 0; m < count; m++) {
    const u16* mine = (NORM ? row : x + (first + m) * ldx) + quarter * QUARTER;
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
      int at = 4 * (lane + 32 * i);
      uint2 v = at < QUARTER ? *(const uint2*)(mine + at) : make_uint2(0, 0);
      sum = fmaf(low(v.x), g[i].x, sum);
      sum = fmaf(high(v.x), g[i].y, sum);
      sum = fmaf(low(v.y), g[i].z, sum);
      sum = fmaf(high(v.y), g[i].w, sum);
    }
    sum = warp_sum(sum);
    if (lane == 0) sums[m][warp / 4][quarter] = sum;
  }
  __syncthreads();
  int m = threadIdx.x / 2, e = threadIdx.x % 2;
  if (m >= count || 2 * blockIdx.x + e >= E) return;
  double logit = ((sums[m][e][0] + sums[m][e][1]) + sums[m][e][2]) + sums[m][e][3];
  scores[(first + m) * ld_out + 2 * blockIdx.x + e] = (float)(1.0 / (1.0 + exp(-logit)));  // in fp64 as the reference
}
#endif

#ifdef CHOICE
// The TOP best of scores + bias, best first, the lower expert where two are equal; a warp per row.
DEVICE u32 ranked(float v) {  // orders floats as integers; −∞ is above 0, which stands for "taken"
  u32 bits = __float_as_uint(v);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
DEVICE void choose_row(long long* chosen, float* worth, const float* scores, const float* bias, float factor) {
  int lane = threadIdx.x & 31, best = 0;
  u32 left[VALUES];
#pragma unroll
  for (int i = 0; i < VALUES; i++) {
    int e = lane + 32 * i;
    left[i] = e < E ? ranked(__fadd_rn(scores[e], bias[e])) : 0u;
  }
  for (int k = 0; k < TOP; k++) {
    u32 most = 0u;
#pragma unroll
    for (int i = 0; i < VALUES; i++) most = max(most, left[i]);
    most = __reduce_max_sync(0xFFFFFFFFu, most);
    u32 mine = E;
#pragma unroll
    for (int i = VALUES - 1; i >= 0; i--)
      if (left[i] == most) mine = lane + 32 * i;
    u32 e = __reduce_min_sync(0xFFFFFFFFu, mine);
#pragma unroll
    for (int i = 0; i < VALUES; i++)
      if (lane + 32 * i == e) left[i] = 0u;
    if (lane == k) best = min((int)e, E - 1);  // NaN has no rank
  }
  float mine = lane < TOP ? scores[best] : 0.f;
  if (NORMED) {
    float sum = __shfl_sync(0xFFFFFFFFu, mine, 0);
    for (int k = 1; k < TOP; k++) sum = __fadd_rn(sum, __shfl_sync(0xFFFFFFFFu, mine, k));
    mine = __fdiv_rn(mine, __fadd_rn(sum, 1e-20f));
  }
  if (lane < TOP) {
    chosen[lane] = best;
    worth[lane] = __fmul_rn(mine, factor);
  }
}
#endif

#ifdef CHOICE_ROWS
extern "C" __global__ __launch_bounds__(256) void choose_rows(
    long long* chosen, float* worth, const float* scores, const float* bias, long long lds, int M, float factor) {
  wait_for_inputs();
  let_next_start();
  long long m = blockIdx.x * 8 + (threadIdx.x >> 5);
  if (m < M) choose_row(chosen + m * TOP, worth + m * TOP, scores + m * lds, bias, factor);
}
#endif

#ifdef GROUPS_OF
// Assignments sorted by expert, cut into groups of at most GROUPS_OF; one block of 1024 threads, E at most 1024.
// table[0].x: groups that there are; table[1 + j]: expert, first place, count. order: the assignment at each place; those of
// one expert lie in any order, which no result sees.
DEVICE int scan_sum(int v, int* total_of_warp) {  // of all threads before this one; total_of_warp[32]: of all
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, sum = v;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    int other = __shfl_up_sync(0xFFFFFFFFu, sum, d);
    if (lane >= d) sum += other;
  }
  if (lane == 31) total_of_warp[warp] = sum;
  __syncthreads();
  if (warp == 0) {
    int of_warp = total_of_warp[lane], before = of_warp;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      int other = __shfl_up_sync(0xFFFFFFFFu, before, d);
      if (lane >= d) before += other;
    }
    total_of_warp[lane] = before - of_warp;
    if (lane == 31) total_of_warp[32] = before;
  }
  __syncthreads();
  return total_of_warp[warp] + sum - v;
}
DEVICE void group_all(int4* table, int* order, const long long* chosen, int count) {
  __shared__ int rows[1024], totals[2][33];
  int e = threadIdx.x;
  rows[e] = 0;
  __syncthreads();
  for (int a = e; a < count; a += 1024) atomicAdd(rows + (int)chosen[a], 1);
  __syncthreads();
  int mine = rows[e], groups = (mine + GROUPS_OF - 1) / GROUPS_OF;
  int first = scan_sum(mine, totals[0]), group = scan_sum(groups, totals[1]);
  rows[e] = first;
  if (e == 0) table[0] = make_int4(totals[1][32], 0, 0, 0);
  for (int j = 0; j < groups; j++)
    table[1 + group + j] = make_int4(e, first + j * GROUPS_OF, min(GROUPS_OF, mine - j * GROUPS_OF), 0);
  __syncthreads();
  for (int a = e; a < count; a += 1024) order[atomicAdd(rows + (int)chosen[a], 1)] = a;
}
#ifndef CHOICE
extern "C" __global__ __launch_bounds__(1024) void group_rows(int4* table, int* order, const long long* chosen, int count) {
  wait_for_inputs();
  let_next_start();
  group_all(table, order, chosen, count);
}
#else
// Both for at most 32 rows: a warp chooses for each.
extern "C" __global__ __launch_bounds__(1024) void choose_and_group(
    long long* chosen, float* worth, const float* scores, const float* bias, long long lds, int M, float factor, int4* table,
    int* order) {
  wait_for_inputs();
  let_next_start();
  int m = threadIdx.x >> 5;
  if (m < M) choose_row(chosen + m * TOP, worth + m * TOP, scores + m * lds, bias, factor);
  __threadfence_block();
  __syncthreads();
  group_all(table, order, chosen, M * TOP);
}
#endif
#endif

#ifdef PICK
// out[p] = x[order[p] / PER_ROW], in the order that wgmma reads (`norm.cuh`).
extern "C" __global__ __launch_bounds__(256) void pick_rows(u16* out, const u16* x, const int* order, long long ld_out, long long ldx) {
  let_next_start();
  wait_for_inputs();
  long long m = blockIdx.x, from = order[m] / PER_ROW;
  for (int at = 8 * threadIdx.x; at < K_; at += 8 * 256) store8(out + m * ld_out + at, *(const uint4*)(x + from * ldx + at));
}
#endif

#ifdef SUM
// out[m] = Σ worth · found over TERMS rows, + other (ADDS), + residual (RESIDUAL), rounded once. Eight outputs a thread.
DEVICE void unpack8(float* v, uint4 r) {
  const u32* w = (const u32*)&r;
#pragma unroll
  for (int k = 0; k < 4; k++) {
    v[2 * k] = low(w[k]);
    v[2 * k + 1] = high(w[k]);
  }
}
extern "C" __global__ __launch_bounds__(128) void sum_rows(
    u16* out, const u16* found, const float* worth, const u16* other, const u16* residual, long long ld_out, long long ldf,
    long long ldo, long long ldr, int width) {
  wait_for_inputs();
  let_next_start();
  long long m = blockIdx.y;
  int at = 8 * (blockIdx.x * 128 + threadIdx.x);
  if (at >= width) return;
  float sum[8] = {}, v[8];
#pragma unroll 8
  for (int k = 0; k < TERMS; k++) {
    unpack8(v, *(const uint4*)(found + (m * TERMS + k) * ldf + at));
    float w = WEIGHED ? worth[m * TERMS + k] : 1.f;
#pragma unroll
    for (int i = 0; i < 8; i++) sum[i] = __fadd_rn(sum[i], WEIGHED ? __fmul_rn(w, v[i]) : v[i]);
  }
  if (ADDS) {
    unpack8(v, *(const uint4*)(other + m * ldo + at));
#pragma unroll
    for (int i = 0; i < 8; i++) sum[i] = __fadd_rn(sum[i], v[i]);
  }
  if (RESIDUAL) {
    unpack8(v, *(const uint4*)(residual + m * ldr + at));
#pragma unroll
    for (int i = 0; i < 8; i++) sum[i] = __fadd_rn(sum[i], v[i]);
  }
  *(uint4*)(out + m * ld_out + at) =
      make_uint4(narrow2(sum[0], sum[1]), narrow2(sum[2], sum[3]), narrow2(sum[4], sum[5]), narrow2(sum[6], sum[7]));
}
#endif
