// y = x · Wᵀ (· scale) (+ residual) for many rows on Hopper: wgmma over 64 weight rows and NTOK tokens at once.
//
// Weights are the A operand, unpacked in registers exactly as in `linear`; tokens are the B operand, in shared memory, their
// inputs in the order in which A holds them (`norm.cuh: ORDER`). wgmma.m64nNk16 adds the same 16 products to the same sum
// as mma.m16n8k16, with the same bits (a test compares), so slices of K added in order give what `linear` gives.
//
//   WR   warpgroups side by side over weight rows             WS   workers of a block: they share rows and split the slices
//   CL   blocks of a cluster, which split the slices further  STAGES   chunks of 64 inputs on their way, per worker
//   SUM  1: the only worker adds its groups in registers · 0: each group's sums go to shared memory, added at the end
//   AHEAD  chunks beyond the stages that are asked to come to L2 before the kernel waits for its tokens
//
// SQUARE 1: y = relu(·)², of the product rounded to bf16
// STACK  0 one matrix · 1 a stack of them, rows in groups of at most NTOK that share a matrix (`moe.cu: group_rows`), the
//        tokens of a group one after the other in x; blockIdx.y is the group. `order` names the row of y.
//
// Tokens come by the copy engine (one thread of a worker asks for them), weights by cp.async into a place of the thread's
// own, so that they need no barrier; they are on their way before the kernel waits for its tokens.

#ifndef STACK
#define STACK 0
#endif

constexpr int ROWS = 64 * WR, WARPS = 4 * WR, THREADS = 32 * WARPS * WS, PER = S / (WS * CL), LOCAL = SUM ? 1 : S / CL / GROUP;
constexpr int PITCH = ROWS + 4, SCALE_PITCH = (K_ + 127) / 128, SUMS = NTOK / 2;  // SUMS: of a thread
constexpr int TOKEN_BYTES = NTOK * 128, SLOT = WORDS * 512 + (FORMAT == 4 ? 128 : 0), WEIGHT_BYTES = SLOT * WARPS;
constexpr int RING = STAGES * (TOKEN_BYTES + WEIGHT_BYTES) * WS, SUM_BYTES = 4 * LOCAL * NTOK * PITCH;
constexpr bool OVER = SUM || PER == GROUP;  // sums lie over the ring: all of it is read before any is written
constexpr bool ADDS = SUM || GROUP > 1;     // slices in registers
static_assert(S % (WS * CL * GROUP) == 0 && (!SUM || (WS * CL == 1 && GROUP == 1)), "workers share the groups evenly");

extern "C" __global__ __cluster_dims__(CL, 1, 1) __launch_bounds__(THREADS) void linear_wide(
    u16* y, const u8* w, const u8* block_scales, const float* scale, const u16* residual, long long ldy, long long ldr, int N,
    int M, const __grid_constant__ Map map, const int4* groups, const int* order) {
  extern __shared__ __align__(1024) u8 shared[];
  int warp = uniform(threadIdx.x >> 5), lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  int worker = warp / WARPS, in_worker = warp % WARPS, rank = CL > 1 ? blockIdx.x % CL : 0;
  int token_tiles = STACK ? 1 : (M + NTOK - 1) / NTOK, place = blockIdx.x / CL;
  int token0 = place % token_tiles * NTOK, row0 = place / token_tiles * ROWS;
  if (STACK) {  // which matrix is read is known only now
    wait_for_inputs();
    let_next_start();
    if (blockIdx.y >= groups[0].x) return;
    int4 group = groups[blockIdx.y + 1];
    enter_stack(w, block_scales, scale, uniform(group.x), N);
    token0 = uniform(group.y);
    M = token0 + uniform(group.z);
  }
  int tile = min(row0 / 16 + in_worker, N / 16 - 1), first = (rank * WS + worker) * PER;
  int start = first * CHUNKS / S, count = (first + PER) * CHUNKS / S - start;

  u32 base = address(shared), tokens = base + worker * STAGES * TOKEN_BYTES;
  u32 slots = STAGES * (WS * TOKEN_BYTES + warp * SLOT);  // of this warp's weights, from `shared` on
  u32 full = base + RING + (OVER ? max(SUM_BYTES - RING, 0) : SUM_BYTES) + worker * STAGES * 16, empty = full + STAGES * 8;
  bool asks = in_worker == 0 && lane == 0;
  if (asks) {
    for (int k = 0; k < STAGES; k++) {
      set_barrier(full + 8 * k, 1);
      set_barrier(empty + 8 * k, WARPS);
    }
    show_barriers();
  }

  constexpr int B = FORMAT == 0 ? 2 : 1;
  const u8* mine = FORMAT == 4 ? w + ((long long)tile * CHUNKS + start) * 512 + lane * 16
                               : w + (((long long)tile * 16 + g) * K_ + 64 * start) * B + 16 * t;
  const u8* my_scales = block_scales + ((long long)tile * CHUNKS + start) * 64 + (lane & ~1) * 2;
  auto fetch = [&](int i) {
    if (i < count) {
      u32 to = base + slots + i % STAGES * SLOT + lane * 16;
      if (FORMAT == 4) {
        copy16(to, mine + i * 512);
        copy4(base + slots + i % STAGES * SLOT + 512 + lane * 4, my_scales + i * 64);
      } else {
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
          for (int k = 0; k < B; k++) copy16(to + (B * h + k) * 512, mine + i * 64 * B + h * 8 * K_ * B + 64 * k);
      }
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  };
  auto ask = [&](int i) {
    u32 barrier = full + i % STAGES * 8;
    expect(barrier, TOKEN_BYTES);
    load_tile(tokens + i % STAGES * TOKEN_BYTES, map, 64 * (start + i), token0, barrier);
  };
#pragma unroll
  for (int i = 0; i < STAGES; i++) fetch(i);
  if (AHEAD) bring(w, block_scales, tile, N / 16 - 1, start + STAGES, min(AHEAD, count - STAGES), lane);
  __syncthreads();
  if (!STACK) {
    wait_for_inputs();
    let_next_start();
  }
  if (asks)
    for (int i = 0; i < min(STAGES, count); i++) ask(i);
  __syncwarp();

  float acc[SUMS], total[ADDS ? SUMS : 1], part[FORMAT == 3 ? SUMS : 1];
  u32 a[2][16] = {};
  if (ADDS)
#pragma unroll
    for (int k = 0; k < SUMS; k++) total[ADDS ? k : 0] = 0.f;
  // The tokens of chunk i are read: when all warps say so, others may lie there. One chunk later, so that none waits long.
  auto release = [&](int i) {
    signal(empty + i % STAGES * 8);
    int next = i - 1 + STAGES;
    if (asks && i > 0 && next < count) {
      await(empty + (i - 1) % STAGES * 8, (i - 1) / STAGES);
      ask(next);
    }
    __syncwarp();
  };
  auto multiply_chunk = [&](int i, u32* a, u32* before, bool fresh) {
    asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 1) : "memory");
    Chunk q;
    const u8* slot = shared + slots + i % STAGES * SLOT;
#pragma unroll
    for (int k = 0; k < WORDS; k++) q.w[0][k] = *(const uint4*)(slot + k * 512 + lane * 16);
    if (FORMAT == 4) q.scale[0] = *(const u32*)(slot + 512 + lane * 4) >> (lane & 1) * 16 & 0xFFFF;
#pragma unroll
    for (int j = 0; j < 4; j++) unpack(q, 0, j, a + 4 * j);
    settle<16>(a);
    await(full + i % STAGES * 8, i / STAGES);
    unsigned long long b = matrix(tokens + i % STAGES * TOKEN_BYTES);
    float* sums = FORMAT == 3 ? part : acc;
    settle<SUMS>(sums);
    begin();
#pragma unroll
    for (int j = 0; j < 4; j++) wgmma(sums, a + 4 * j, b + 2 * j, j > 0 || (FORMAT != 3 && !fresh));
    commit();
    fetch(i + STAGES);
    if (FORMAT == 3) {
      finish<0>();
      settle<SUMS>(part);
      float s = scale[(long long)(tile / 8) * SCALE_PITCH + (start + i) / 2];
#pragma unroll
      for (int k = 0; k < SUMS; k++) acc[k] = fmaf(s, part[FORMAT == 3 ? k : 0], fresh ? 0.f : acc[k]);
      release(i);
    } else {
      finish<1>();
      settle<16>(before);  // may be unpacked into from here on
      if (!fresh) release(i - 1);
    }
  };
  float* sums = (float*)(shared + (OVER ? 0 : RING));
  auto store = [&](int s, const float* v) {
#pragma unroll
    for (int k = 0; k < SUMS; k++) {
      int row = in_worker * 16 + g + (k & 2 ? 8 : 0), token = k / 4 * 8 + 2 * t + (k & 1);
      sums[(s * NTOK + token) * PITCH + row] = v[k];
    }
  };

  int i = 0;
  for (int s = 0; s < PER; s++) {
    int end = (first + s + 1) * CHUNKS / S - start;
    bool fresh = true;
    for (; i + 1 < end; i += 2) {
      multiply_chunk(i, a[0], a[1], fresh);
      multiply_chunk(i + 1, a[1], a[0], false);
      fresh = false;
    }
    if (i < end) multiply_chunk(i++, a[0], a[1], fresh);
    if (FORMAT != 3) {
      finish<0>();
      settle<SUMS>(acc);
      release(i - 1);
    }
    if (ADDS)
#pragma unroll
      for (int k = 0; k < SUMS; k++) total[ADDS ? k : 0] += acc[k];
    if (!OVER && (s + 1) % GROUP == 0) {
      store((worker * PER + s) / GROUP, ADDS ? total : acc);
      if (ADDS)
#pragma unroll
        for (int k = 0; k < SUMS; k++) total[ADDS ? k : 0] = 0.f;
    }
  }
  if (OVER) {
    __syncthreads();
    store(SUM ? 0 : worker, ADDS ? total : acc);
  }
  if (CL > 1) cluster_sync();
  else __syncthreads();

  float factor = scale_of_sum(scale);
  for (int e = threadIdx.x; e < NTOK / CL * (ROWS / 2); e += THREADS) {
    int token = rank * (NTOK / CL) + e / (ROWS / 2), row = e % (ROWS / 2) * 2, column = row0 + row;
    long long m = token0 + token;
    if (m >= M || column >= N) continue;
    float2 v = make_float2(0.f, 0.f);
    u32 at = address(sums + token * PITCH + row);
#pragma unroll
    for (int s = 0; s < (SUM ? 1 : S / GROUP); s++) {
      u32 from = at + s % LOCAL * (NTOK * PITCH * 4);
      float2 p = CL > 1 ? load_remote(from, s / LOCAL) : *(const float2*)(sums + (s * NTOK + token) * PITCH + row);
      v.x += p.x;
      v.y += p.y;
    }
    v.x *= FORMAT == 2 ? scale[column] : factor;
    v.y *= FORMAT == 2 ? scale[column + 1] : factor;
    if (RESIDUAL) {
      u32 r = *(const u32*)(residual + m * ldr + column);
      v.x += low(r);
      v.y += high(r);
    }
    if (SQUARE) v = make_float2(squared(v.x), squared(v.y));
    if (STACK) m = order[m];
    if (OUT32) *(float2*)((float*)y + m * ldy + column) = v;
    else *(u32*)(y + m * ldy + column) = narrow2(v.x, v.y);
  }
  if (CL > 1) cluster_sync();  // none leaves while another reads its sums
}
