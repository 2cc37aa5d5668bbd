// The recurrence of `scan.cu` for Hopper: the same equations and chunks, on wgmma, with warpgroups of three roles.
//
// Each warp of the first group owns a stage of shared memory: it has the copy engine load a chunk, sums decays meanwhile,
// and weights x. The second group carries the state: accumulators of S[n, p] = Σ_q B[q, n] · weighted[q, p].
// OUTPUTS output groups take chunks in turn: scores C·Bᵀ and C·S start together, scores are weighted in registers while C·S
// runs, and become the A operand of scores · x. So a chunk's state waits only for the state before it, and everything
// else runs beside it. mbarriers hand over, per stage or buffer:
//
//   loaded the copy engine → its warp
//   full   loaded and weighted → state, output        empty  state, output → may be loaded again
//   ready  the state before a chunk → output          free   output → may be written again
//
// Tiles in shared memory are panels of rows of 128 bytes (x: 128, 64 or 32, the widest that divides PT), 16-byte units
// swizzled as wgmma's descriptors expect. wgmma_* come from `scan.py: products`, one function per shape.

constexpr int Q = 64, CONV = H * P + 2 * G * N, PER = H / G, SPLITS = P / PT, KN = N / 16, NM = N / 64;
constexpr int XW = PT % 64 == 0 ? 64 : PT % 32 == 0 ? 32 : 16;  // columns of an x panel
constexpr int XROW = 2 * XW, XSWIZZLE = XW == 64 ? 1 : XW == 32 ? 2 : 3, TILES = PT / 8;

constexpr int THREADS = 128 * (2 + OUTPUTS);

struct __align__(1024) Stage {  // swizzled tiles begin at whole atoms
  u16 C[Q * N], B[Q * N], x[Q * PT], weighted[Q * PT];  // weighted: x · exp(c_end − c) · dt
};
struct Decays {
  float total[4], dt[Q], sums[Q];  // total[0]: exp(c_end); the rest of it keeps what follows on 16 bytes
  float keys[4][Q];                // keys[r][j]: exp(c_(16r−1) − c_j) · dt_j for j < 16r, else 0
};
struct Shared {
  Stage stage[STAGES];
  u16 state[OUTPUTS][N * PT];  // each output group has its own
  Decays decays[STAGES];
  float weight[4][Q];  // exp(c_end − c_q) · dt_q, of each warp of the first group
  unsigned long long loaded[STAGES], full[STAGES], empty[STAGES], ready[OUTPUTS], free[OUTPUTS];
};
static_assert(sizeof(Shared) == (SHARED_BYTES + alignof(Shared) - 1) / alignof(Shared) * alignof(Shared), "scan.py: shared_bytes");

DEVICE u32 barrier(const unsigned long long& b) { return address(&b); }
DEVICE void show_writes() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Matrix descriptors. rows8: bytes from 8 rows to the next 8; panel: bytes from one panel to the next.
DEVICE unsigned long long matrix(const void* p, int swizzle, int rows8, int panel) {
  return (unsigned long long)(address(p) >> 4 & 0x3FFF) | (unsigned long long)(panel >> 4) << 16 |
         (unsigned long long)(rows8 >> 4) << 32 | (unsigned long long)swizzle << 62;
}
// Byte places of element (row, column) in the tiles.
DEVICE int place_wide(int row, int column) {  // C, B: panels of 64 columns
  return column / 64 * (Q * 128) + row * 128 + ((column % 64 / 8 ^ row & 7) * 16) + column % 8 * 2;
}
template <int ROWS>
DEVICE int place_x(int row, int column) {  // x, weighted, state: panels of XW columns
  int unit = column % XW / 8, mask = XW == 64 ? row & 7 : XW == 32 ? row >> 1 & 3 : row >> 2 & 1;
  return column / XW * (ROWS * XROW) + row * XROW + (unit ^ mask) * 16 + column % 8 * 2;
}
template <int ROWS>
DEVICE unsigned long long matrix_x(const u16* tile) {  // rows are K, columns are N
  return matrix(tile, XSWIZZLE, 8 * XROW, ROWS * XROW);
}
DEVICE constexpr unsigned long long bytes(int count) { return count >> 4; }  // what moves a descriptor on

struct Sequence {
  long long position, boundary, end, last, start, first_row;
  int chunks;
};

DEVICE void prepare(Shared& shared, const Sequence& s, const Map& map, const Map& map_x, int place, int column_B, int column_x,
                    const float* dt_rows, long long ld_dt, float A) {
  int mine = uniform(threadIdx.x >> 5), lane = threadIdx.x & 31;
  if (mine >= STAGES) return;
  Stage& stage = shared.stage[mine];
  Decays& decays = shared.decays[mine];
  float* weight = shared.weight[mine];
  for (int c = mine; c < s.chunks; c += STAGES) {
    long long from = s.start + (long long)c * Q, row = from + 2 * lane;
    int kept = (int)min(max(s.last - from, 0ll), (long long)Q);
    float2 dt = make_float2(0.f, 0.f);  // zero for rows outside the sequence: they add nothing and decay nothing
    if (row >= s.boundary && row < s.end) dt.x = dt_rows[row * ld_dt];
    if (row + 1 >= s.boundary && row + 1 < s.end) dt.y = dt_rows[(row + 1) * ld_dt];
    if (c >= STAGES) await(barrier(shared.empty[mine]), c / STAGES - 1);
    if (lane == 0) {
      u32 loaded = barrier(shared.loaded[mine]);
      expect(loaded, 2 * Q * (2 * N + PT));
      int at = place + (int)(from - s.boundary);
#pragma unroll
      for (int k = 0; k < N; k += 64) {
        load_tile(address(stage.B + Q * k), map, column_B + k, at, loaded);
        load_tile(address(stage.C + Q * k), map, column_B + G * N + k, at, loaded);
      }
#pragma unroll
      for (int k = 0; k < PT; k += XW) load_tile(address(stage.x + Q * k), map_x, column_x + k, at, loaded);
    }
    float2 sums = log_decays(dt, A);
    int end = max(kept - 1, 0);
    float even = __shfl_sync(0xFFFFFFFFu, sums.x, end >> 1), odd = __shfl_sync(0xFFFFFFFFu, sums.y, end >> 1);
    float total = kept == 0 ? 0.f : end & 1 ? odd : even;
    *(float2*)&weight[2 * lane] = make_float2(2 * lane < kept ? decay(total - sums.x) * dt.x : 0.f,
                                              2 * lane + 1 < kept ? decay(total - sums.y) * dt.y : 0.f);
    *(float2*)&decays.sums[2 * lane] = sums;
    *(float2*)&decays.dt[2 * lane] = dt;
    if (lane == 0) decays.total[0] = decay(total);
#pragma unroll
    for (int r = 1; r < 4; r++) {
      float before = __shfl_sync(0xFFFFFFFFu, sums.y, 8 * r - 1);  // c before row 16r
      bool earlier = lane < 8 * r;
      *(float2*)&decays.keys[r][2 * lane] =
          make_float2(earlier ? decay(before - sums.x) * dt.x : 0.f, earlier ? decay(before - sums.y) * dt.y : 0.f);
    }
    __syncwarp();
    await(barrier(shared.loaded[mine]), c / STAGES);
    if (from < s.boundary || from + Q > s.end) {  // rows of other sequences, or none: whatever they hold, they count as zeros
      for (int e = lane; e < Q * (N + PT) / 8; e += 32) {
        int q = e / ((N + PT) / 8), column = e % ((N + PT) / 8) * 8;
        if (from + q >= s.boundary && from + q < s.end) continue;
        u8* to = column < N ? (u8*)stage.B + place_wide(q, column) : (u8*)stage.x + place_x<Q>(q, column - N);
        *(uint4*)to = make_uint4(0, 0, 0, 0);
      }
      __syncwarp();
    }
#pragma unroll 8
    for (int e = lane; e < Q * PT / 8; e += 32) {
      int q = e / (PT / 8), at = place_x<Q>(q, e % (PT / 8) * 8);
      float w = weight[q];
      uint4 x = *(const uint4*)((const u8*)stage.x + at);
      x.x = narrow2(low(x.x) * w, high(x.x) * w);
      x.y = narrow2(low(x.y) * w, high(x.y) * w);
      x.z = narrow2(low(x.z) * w, high(x.z) * w);
      x.w = narrow2(low(x.w) * w, high(x.w) * w);
      *(uint4*)((u8*)stage.weighted + at) = x;
    }
    show_writes();
    signal(barrier(shared.full[mine]));
  }
}

DEVICE void run_state(Shared& shared, const Sequence& s, void* ssm, long long base, u32 first_element, u32 key) {
  int warp = uniform(threadIdx.x >> 5 & 3), lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  float S[NM][PT / 2];  // 64 rows n each: rows 16·warp + g, + 8; columns p = 8j + 2t, + 1
  auto element = [&](int m, int k) { return (long long)(8 * (k / 4) + 2 * t + (k & 1)) * N + 64 * m + 16 * warp + g + 8 * (k >> 1 & 1); };
#pragma unroll
  for (int m = 0; m < NM; m++)
#pragma unroll
    for (int k = 0; k < PT / 2; k++) S[m][k] = load_one(ssm, base + element(m, k));
  for (int c = 0; c < s.chunks; c++) {
    if (c >= OUTPUTS) await(barrier(shared.free[c % OUTPUTS]), c / OUTPUTS - 1);
#pragma unroll
    for (int m = 0; m < NM; m++)
#pragma unroll
      for (int j = 0; j < TILES; j += 2) {  // rounded to bf16, where C reads it
        const float* v = &S[m][4 * j];
        u32 to = address(shared.state[c % OUTPUTS]) + place_x<N>(64 * m + 16 * warp + (lane & 15), 8 * (j + (lane >> 4)));
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0],{%1,%2,%3,%4};" ::"r"(to), "r"(narrow2(v[0], v[1])),
                     "r"(narrow2(v[2], v[3])), "r"(narrow2(v[4], v[5])), "r"(narrow2(v[6], v[7])) : "memory");
      }
    show_writes();
    signal(barrier(shared.ready[c % OUTPUTS]));

    await(barrier(shared.full[c % STAGES]), c / STAGES);
    const Stage& stage = shared.stage[c % STAGES];
    float carried = shared.decays[c % STAGES].total[0];
#pragma unroll
    for (int m = 0; m < NM; m++)
#pragma unroll
      for (int k = 0; k < PT / 2; k++) S[m][k] *= carried;
    settle<NM * PT / 2>(&S[0][0]);
    auto B = matrix(stage.B, 1, 1024, Q * 128), weighted = matrix_x<Q>(stage.weighted);
    begin();
#pragma unroll
    for (int m = 0; m < NM; m++)
#pragma unroll
      for (int q = 0; q < Q; q += 16) wgmma_state(S[m], B + bytes(m * (Q * 128) + q * 128), weighted + bytes(q * XROW), 1);
    commit();
    finish<0>();
    settle<NM * PT / 2>(&S[0][0]);
    signal(barrier(shared.empty[c % STAGES]));
    if (ROUND || c + 1 == s.chunks) {  // what memory would hold at this place
      u32 drawn = mix(key ^ (u32)(c + 1 == s.chunks ? s.last : s.start + (long long)(c + 1) * Q));
#pragma unroll
      for (int m = 0; m < NM; m++)
#pragma unroll
        for (int k = 0; k < PT / 2; k++) S[m][k] = rounded(S[m][k], drawn, first_element + (u32)element(m, k));
    }
  }
  if (s.last > s.boundary)
#pragma unroll
    for (int m = 0; m < NM; m++)
#pragma unroll
      for (int k = 0; k < PT / 2; k++) store_one(ssm, base + element(m, k), S[m][k]);
}

DEVICE void run_output(Shared& shared, const Sequence& s, int group, u16* y, long long ld_y, float skip) {
  int warp = uniform(threadIdx.x >> 5 & 3), lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  for (int c = group; c < s.chunks; c += OUTPUTS) {
    const Stage& stage = shared.stage[c % STAGES];
    const Decays& decays = shared.decays[c % STAGES];
    auto C = matrix(stage.C, 1, 1024, 0), B = matrix(stage.B, 1, 1024, 0), values = matrix_x<Q>(stage.x);
    auto state = matrix_x<N>(shared.state[c % OUTPUTS]);
    float scores[32], acc[PT / 2];
#pragma unroll
    for (int k = 0; k < 32; k++) scores[k] = 0.f;
#pragma unroll
    for (int k = 0; k < PT / 2; k++) acc[k] = 0.f;
    await(barrier(shared.full[c % STAGES]), c / STAGES);
    settle<32>(scores);
    settle<PT / 2>(acc);
    begin();
#pragma unroll
    for (int k = 0; k < KN; k++) wgmma_scores(scores, C + bytes(k / 4 * (Q * 128) + k % 4 * 32), B + bytes(k / 4 * (Q * 128) + k % 4 * 32), 1);
    commit();
    await(barrier(shared.ready[c % OUTPUTS]), c / OUTPUTS);
#pragma unroll
    for (int k = 0; k < KN; k++) wgmma_past(acc, C + bytes(k / 4 * (Q * 128) + k % 4 * 32), state + bytes(16 * k * XROW), 1);
    commit();
    int row = 16 * warp + g;
    float before = warp ? decays.sums[16 * warp - 1] : 0.f, c_low = decays.sums[row], c_high = decays.sums[row + 8];
    float r_low = decay(c_low - before), r_high = decay(c_high - before), e_low = decay(c_low), e_high = decay(c_high);
    u32 x[TILES][2];
#pragma unroll
    for (int j = 0; j < TILES; j++)
#pragma unroll
      for (int k = 0; k < 2; k++) x[j][k] = *(const u32*)((const u8*)stage.x + place_x<Q>(row + 8 * k, 8 * j + 2 * t));
    finish<1>();
    settle<32>(scores);
    u32 weights[4][4];
#pragma unroll
    for (int block = 0; block < 4; block++)
#pragma unroll
      for (int tile = 0; tile < 2; tile++) {
        float* v = &scores[8 * block + 4 * tile];
        int q = 8 * tile + 2 * t;
        if (block < warp) {
          float2 k = *(const float2*)&decays.keys[warp][16 * block + q];
          v[0] *= r_low * k.x; v[1] *= r_low * k.y; v[2] *= r_high * k.x; v[3] *= r_high * k.y;
        } else if (block == warp) {
          float2 k = *(const float2*)&decays.sums[16 * block + q], dt = *(const float2*)&decays.dt[16 * block + q];
          v[0] = q <= g ? v[0] * decay(c_low - k.x) * dt.x : 0.f;
          v[1] = q + 1 <= g ? v[1] * decay(c_low - k.y) * dt.y : 0.f;
          v[2] = q <= g + 8 ? v[2] * decay(c_high - k.x) * dt.x : 0.f;
          v[3] = q + 1 <= g + 8 ? v[3] * decay(c_high - k.y) * dt.y : 0.f;
        } else {
          v[0] = v[1] = v[2] = v[3] = 0.f;
        }
        weights[block][2 * tile] = narrow2(v[0], v[1]);
        weights[block][2 * tile + 1] = narrow2(v[2], v[3]);
      }
    finish<0>();
    settle<PT / 2>(acc);
    signal(barrier(shared.free[c % OUTPUTS]));
#pragma unroll
    for (int j = 0; j < TILES; j++) {
      acc[4 * j] *= e_low; acc[4 * j + 1] *= e_low; acc[4 * j + 2] *= e_high; acc[4 * j + 3] *= e_high;
    }
    settle<PT / 2>(acc);
    settle<16>(&weights[0][0]);
    begin();
#pragma unroll
    for (int block = 0; block < 4; block++) wgmma_values(acc, weights[block], values + bytes(16 * block * XROW), 1);
    commit();
    finish<0>();
    settle<PT / 2>(acc);
    signal(barrier(shared.empty[c % STAGES]));
    long long from = s.start + (long long)c * Q + row;
#pragma unroll
    for (int k = 0; k < 2; k++) {
      long long at = from + 8 * k;
      if (at < s.position || at >= s.end) continue;
      u16* out = y + (s.first_row + at - s.position) * ld_y + 2 * t;
#pragma unroll
      for (int j = 0; j < TILES; j++)
        *(u32*)(out + 8 * j) = narrow2(fmaf(skip, low(x[j][k]), acc[4 * j + 2 * k]), fmaf(skip, high(x[j][k]), acc[4 * j + 2 * k + 1]));
    }
  }
}

extern "C" __global__ __launch_bounds__(THREADS, 1) void scan(
    u16* y, void* ssm, const float* dt, const long long* slots, const long long* positions,
    const long long* boundaries, const long long* cu_rows, const float* A_log, const float* D, long long ld_y,
    long long ld_dt, u32 key, const __grid_constant__ Map map, const __grid_constant__ Map map_x) {
  extern __shared__ __align__(1024) u8 memory[];
  Shared& shared = *(Shared*)memory;
  int head = blockIdx.x / SPLITS, p0 = blockIdx.x % SPLITS * PT, sequence = blockIdx.y, lane = threadIdx.x & 31;
  wait_for_inputs();
  let_next_start();

  Sequence s;
  s.position = positions[sequence];
  s.boundary = boundaries[sequence];
  s.first_row = cu_rows[sequence];
  int rows = (int)(cu_rows[sequence + 1] - s.first_row);
  if (rows == 0) return;
  s.end = s.position + rows;
  s.last = s.end / W * W;
  s.start = s.boundary / Q * Q;
  s.chunks = uniform((int)((s.end - s.start + Q - 1) / Q));
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) { set_barrier(barrier(shared.loaded[i]), 1); set_barrier(barrier(shared.full[i]), 1); set_barrier(barrier(shared.empty[i]), 8); }
    for (int i = 0; i < OUTPUTS; i++) { set_barrier(barrier(shared.ready[i]), 4); set_barrier(barrier(shared.free[i]), 4); }
    show_barriers();
  }
  __syncthreads();
  int role = uniform(threadIdx.x >> 7);
  if (role == 0) {
    float fronts = 0.f;  // live window rows of the sequences before this one: small whole numbers
    for (int j = lane; j < sequence; j += 32) fronts += (float)(positions[j] - boundaries[j]);
    long long place = s.first_row + (long long)warp_sum(fronts);
    prepare(shared, s, map, map_x, (int)place, H * P + head / PER * N, head * P + p0, dt + (place - s.boundary) * ld_dt + head,
            ld_dt, -expf(A_log[head]));
  } else if (role == 1) {
    u32 first_element = (u32)(head * P + p0) * N;
    run_state(shared, s, ssm, slots[sequence] * H * P * N + first_element, first_element, key);
  } else {
    run_output(shared, s, role - 2, y + head * P + p0, ld_y, D[head]);
  }
}
