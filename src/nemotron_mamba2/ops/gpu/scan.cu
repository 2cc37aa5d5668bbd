// The recurrence over ragged prompt rows, from each sequence's boundary state: one launch, chunk after chunk.
//
//   y_i = exp(c_i)·C_i·S + Σ_{j ≤ i} exp(c_i − c_j)·dt_j·(C_i·B_j)·x_j + D·x_i        c = cumsum of dt·A over the chunk
//   S  ← exp(c_end)·S + Σ_j exp(c_end − c_j)·dt_j·x_j ⊗ B_j                            (arXiv 2405.21060, listing 1)
//
// A block runs PT of a head's P state rows through all of one sequence; the state stays in registers in fp32, so nothing
// per chunk goes to memory. Chunks of Q rows lie on a grid of absolute positions; rows outside the sequence count as
// zeros. Products run on mma.m16n8k16 (bf16 in, fp32 out): their operands C, B and x are bf16 already; the weights of
// the sums and the state that C reads are rounded to bf16, the state that is carried is not.
//
// Eight warps: warp (r, h) computes rows 16r .. 16r + 15 of a chunk over half h of the work: key blocks h, h + 2 of the
// causal part and half of C·S; halves are added through shared memory. For the state, warp w owns columns n of blocks
// w, w + 8 of 16. Decays before row 16r factor into exp(c_i − c_ref)·exp(c_ref − c_j), c_ref the sum before that row:
// both are ≤ 1, so only the block on the diagonal needs an exp for every pair.
//
// ROUND: the carried state is rounded at every chunk border as memory would hold it, so that a split there changes nothing.

constexpr int Q = 64, CONV = H * P + 2 * G * N, PER = H / G, SPLITS = P / PT, WARPS = 8, THREADS = 32 * WARPS;
constexpr int NP = N + 8, XP = PT + 8;  // pitches in shared memory: ldmatrix meets no bank twice
constexpr int PB = PT / 16, KN = N / 16, NB = (KN + WARPS - 1) / WARPS;

struct Stage {
  u16 C[Q][NP], B[Q][NP], x[Q][XP];
  float dt[Q];
};
struct Shared {
  Stage stage[STAGES];
  u16 weighted[Q][XP];  // x · exp(c_end − c) · dt
  u16 state[PT][NP];    // what C reads
  float4 partial[WARPS][PB][32];
  float sums[WARPS][Q];  // c, one copy per warp
};
static_assert(sizeof(Shared) == SHARED_BYTES, "scan.py: shared_bytes");

DEVICE void load_matrices(u32* r, const u16* p) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3},[%4];"
      : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address(p)) : "memory");
}
DEVICE void load_transposed(u32* r, const u16* p) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3},[%4];"
      : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address(p)) : "memory");
}

// Element pairs (n, n + 1) of the state in memory.
DEVICE float2 load_pair(const void* ssm, long long at) {
#if STATE == 0
  return *(const float2*)((const float*)ssm + at);
#else
  u32 v = *(const u32*)((const u16*)ssm + at);
  return STATE == 1 ? make_float2(low(v), high(v)) : make_float2(half_value(v & 0xFFFF), half_value(v >> 16));
#endif
}
DEVICE void store_pair(void* ssm, long long at, float a, float b) {  // of values rounded before
#if STATE == 0
  *(float2*)((float*)ssm + at) = make_float2(a, b);
#else
  *(u32*)((u16*)ssm + at) = STATE == 1 ? narrow2(a, b) : half_bits(a) | (u32)half_bits(b) << 16;
#endif
}

extern "C" __global__ __launch_bounds__(THREADS, 1) void scan(
    u16* y, void* ssm, const u16* xbc, const float* dt, const long long* slots, const long long* positions,
    const long long* boundaries, const long long* cu_rows, const float* A_log, const float* D, long long ld_y,
    long long ld_xbc, long long ld_dt, u32 key) {
  extern __shared__ __align__(128) u8 memory[];
  Shared& shared = *(Shared*)memory;
  int head = blockIdx.x / SPLITS, p0 = blockIdx.x % SPLITS * PT, group = head / PER, sequence = blockIdx.y;
  int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  int half = warp >> 2, row16 = 16 * (half ? 7 - warp : warp), partner = 7 - warp;
  wait_for_inputs();
  let_next_start();

  long long position = positions[sequence], boundary = boundaries[sequence], first_row = cu_rows[sequence];
  int rows = (int)(cu_rows[sequence + 1] - first_row);
  if (rows == 0) return;
  float before = 0.f;  // live window rows of the sequences before this one: small whole numbers
  for (int j = lane; j < sequence; j += 32) before += (float)(positions[j] - boundaries[j]);
  long long place = first_row + (long long)warp_sum(before), end = position + rows, last = end / W * W;
  long long start = boundary / Q * Q;
  int chunks = (int)((end - start + Q - 1) / Q);
  const u16* x_rows = xbc + (place - boundary) * ld_xbc + head * P + p0;
  const u16* B_rows = xbc + (place - boundary) * ld_xbc + H * P + group * N;
  const float* dt_rows = dt + (place - boundary) * ld_dt + head;
  float A = -expf(A_log[head]), skip = D[head];

  auto fetch = [&](int c) {
    if (c < chunks) {
      Stage& stage = shared.stage[c % STAGES];
      long long from = start + (long long)c * Q;
      constexpr int NV = N / 8, XV = PT / 8;
#pragma unroll
      for (int e = threadIdx.x; e < Q * NV; e += THREADS) {
        int q = e / NV, v = e % NV * 8;
        bool valid = from + q >= boundary && from + q < end;
        const u16* source = B_rows + (valid ? from + q : boundary) * ld_xbc + v;
        copy16(address(&stage.B[q][v]), source, valid);
        copy16(address(&stage.C[q][v]), source + G * N, valid);
      }
#pragma unroll
      for (int e = threadIdx.x; e < Q * XV; e += THREADS) {
        int q = e / XV, v = e % XV * 8;
        bool valid = from + q >= boundary && from + q < end;
        copy16(address(&stage.x[q][v]), x_rows + (valid ? from + q : boundary) * ld_xbc + v, valid);
      }
      if (threadIdx.x < Q) {
        long long q = from + threadIdx.x;
        bool valid = q >= boundary && q < end;
        copy4(address(&stage.dt[threadIdx.x]), dt_rows + (valid ? q : boundary) * ld_dt, valid);
      }
    }
    asm volatile("cp.async.commit_group;");
  };
#pragma unroll
  for (int c = 0; c < STAGES - 1; c++) fetch(c);

  float S[NB][PB][2][4];  // n block, p block, n tile of 8: rows p = g, g + 8, columns n = 2t, 2t + 1
  long long first_element = (long long)(head * P + p0) * N;
  const long long base = slots[sequence] * H * P * N + first_element;
#pragma unroll
  for (int b = 0; b < NB; b++)
#pragma unroll
    for (int i = 0; i < PB; i++)
#pragma unroll
      for (int k = 0; k < 4; k++) {
        int n = 16 * (warp + WARPS * b) + 8 * (k >> 1) + 2 * t, p = 16 * i + 8 * (k & 1) + g;
        float2 v = n < N ? load_pair(ssm, base + p * N + n) : make_float2(0.f, 0.f);
        S[b][i][k >> 1][2 * (k & 1)] = v.x;
        S[b][i][k >> 1][2 * (k & 1) + 1] = v.y;
        if (n < N) *(u32*)&shared.state[p][n] = narrow2(v.x, v.y);
      }

  float* sums = shared.sums[warp];
  for (int c = 0; c < chunks; c++) {
    asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2));
    __syncthreads();
    fetch(c + STAGES - 1);
    const Stage& stage = shared.stage[c % STAGES];
    long long from = start + (long long)c * Q;
    int kept = (int)min(max(last - from, 0ll), (long long)Q);

    *(float2*)&sums[2 * lane] = log_decays(*(const float2*)&stage.dt[2 * lane], A);
    __syncwarp();
    float total = kept ? sums[kept - 1] : 0.f;
#pragma unroll
    for (int e = threadIdx.x; e < Q * (PT / 8); e += THREADS) {
      int q = e / (PT / 8), v = e % (PT / 8) * 8;
      float w = q < kept ? decay(total - sums[q]) * stage.dt[q] : 0.f;
      uint4 x = *(const uint4*)&stage.x[q][v];
      x.x = narrow2(low(x.x) * w, high(x.x) * w);
      x.y = narrow2(low(x.y) * w, high(x.y) * w);
      x.z = narrow2(low(x.z) * w, high(x.z) * w);
      x.w = narrow2(low(x.w) * w, high(x.w) * w);
      *(uint4*)&shared.weighted[q][v] = x;
    }

    // C·S over half the columns, and C·Bᵀ of up to two blocks of 16 keys.
    int r = row16 / 16, blocks = (r - half + 2) / 2;  // of 16 keys, the diagonal one included
    bool diagonal = (r - half) % 2 == 0;
    float acc[2 * PB][4] = {}, scores[2][2][4] = {};
#pragma unroll
    for (int k = 0; k < KN; k++) {
      u32 a[4], b[4];
      load_matrices(a, &stage.C[row16 + (lane & 15)][16 * k + 8 * (lane >> 4)]);
      if (k / (KN / 2) == half)
#pragma unroll
        for (int i = 0; i < PB; i++) {
          load_matrices(b, &shared.state[16 * i + (lane & 7) + 8 * (lane >> 4)][16 * k + 8 * (lane >> 3 & 1)]);
          mma(acc[2 * i], a, b[0], b[1]);
          mma(acc[2 * i + 1], a, b[2], b[3]);
        }
#pragma unroll
      for (int j = 0; j < 2; j++)
        if (j < blocks) {
          load_matrices(b, &stage.B[16 * (half + 2 * j) + (lane & 7) + 8 * (lane >> 4)][16 * k + 8 * (lane >> 3 & 1)]);
          mma(scores[j][0], a, b[0], b[1]);
          mma(scores[j][1], a, b[2], b[3]);
        }
    }
    float reference = row16 ? sums[row16 - 1] : 0.f, c_low = sums[row16 + g], c_high = sums[row16 + g + 8];
    float scale = decay(reference), scale_low = decay(c_low - reference), scale_high = decay(c_high - reference);
#pragma unroll
    for (int i = 0; i < 2 * PB; i++)
#pragma unroll
      for (int k = 0; k < 4; k++) acc[i][k] *= scale;
    auto add = [&](float (*s)[4], int key16, bool masked) {  // weights the scores, then adds scores · x
      u32 weights[4], b[4];
#pragma unroll
      for (int tile = 0; tile < 2; tile++) {
        int q = 8 * tile + 2 * t;
        float2 c = *(const float2*)&sums[key16 + q], step = *(const float2*)&stage.dt[key16 + q];
        if (masked) {
          s[tile][0] = q <= g ? s[tile][0] * decay(c_low - c.x) * step.x : 0.f;
          s[tile][1] = q + 1 <= g ? s[tile][1] * decay(c_low - c.y) * step.y : 0.f;
          s[tile][2] = q <= g + 8 ? s[tile][2] * decay(c_high - c.x) * step.x : 0.f;
          s[tile][3] = q + 1 <= g + 8 ? s[tile][3] * decay(c_high - c.y) * step.y : 0.f;
        } else {
          float wx = decay(reference - c.x) * step.x, wy = decay(reference - c.y) * step.y;
          s[tile][0] *= wx; s[tile][1] *= wy; s[tile][2] *= wx; s[tile][3] *= wy;
        }
        weights[2 * tile] = narrow2(s[tile][0], s[tile][1]);
        weights[2 * tile + 1] = narrow2(s[tile][2], s[tile][3]);
      }
#pragma unroll
      for (int i = 0; i < PB; i++) {
        load_transposed(b, &stage.x[key16 + (lane & 15)][16 * i + 8 * (lane >> 4)]);
        mma(acc[2 * i], weights, b[0], b[1]);
        mma(acc[2 * i + 1], weights, b[2], b[3]);
      }
    };
#pragma unroll
    for (int j = 0; j < 2; j++)
      if (j < blocks - diagonal) add(scores[j], 16 * (half + 2 * j), false);
#pragma unroll
    for (int i = 0; i < 2 * PB; i++) {
      acc[i][0] *= scale_low; acc[i][1] *= scale_low; acc[i][2] *= scale_high; acc[i][3] *= scale_high;
    }
    if (diagonal) {
      float own[2][4];
#pragma unroll
      for (int k = 0; k < 8; k++) own[k / 4][k % 4] = blocks == 2 ? scores[1][k / 4][k % 4] : scores[0][k / 4][k % 4];
      add(own, row16, true);
    }

    // Halves meet: each warp keeps PB of the 2·PB column tiles and hands its partner the others.
#pragma unroll
    for (int i = 0; i < PB; i++) {
      float4 v;
      float* f = (float*)&v;
#pragma unroll
      for (int k = 0; k < 4; k++) f[k] = half ? acc[i][k] : acc[PB + i][k];
      shared.partial[warp][i][lane] = v;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < PB; i++) {
      float4 other = shared.partial[partner][i][lane];
      const float* o = (const float*)&other;
      int column = 8 * (half * PB + i) + 2 * t;
#pragma unroll
      for (int k = 0; k < 2; k++) {
        int row = row16 + g + 8 * k;
        long long at = from + row;
        if (at < position || at >= end) continue;
        u32 x = *(const u32*)&stage.x[row][column];
        float lo = (half ? acc[PB + i][2 * k] : acc[i][2 * k]) + o[2 * k] + skip * low(x);
        float hi = (half ? acc[PB + i][2 * k + 1] : acc[i][2 * k + 1]) + o[2 * k + 1] + skip * high(x);
        *(u32*)(y + (first_row + at - position) * ld_y + head * P + p0 + column) = narrow2(lo, hi);
      }
    }

    // The state after the kept rows.
    float carried = kept ? decay(total) : 1.f;
#pragma unroll
    for (int b = 0; b < NB; b++) {
      int n16 = 16 * (warp + WARPS * b);
      if (n16 >= N) break;
#pragma unroll
      for (int i = 0; i < PB; i++)
#pragma unroll
        for (int k = 0; k < 8; k++) S[b][i][k / 4][k % 4] *= carried;
#pragma unroll
      for (int q = 0; q < Q; q += 16) {
        u32 rhs[4];
        load_transposed(rhs, &stage.B[q + (lane & 15)][n16 + 8 * (lane >> 4)]);
#pragma unroll
        for (int i = 0; i < PB; i++) {
          u32 lhs[4];
          load_transposed(lhs, &shared.weighted[q + (lane & 7) + 8 * (lane >> 4)][16 * i + 8 * (lane >> 3 & 1)]);
          mma(S[b][i][0], lhs, rhs[0], rhs[1]);
          mma(S[b][i][1], lhs, rhs[2], rhs[3]);
        }
      }
#pragma unroll
      for (int i = 0; i < PB; i++)
#pragma unroll
        for (int k = 0; k < 4; k++) {
          int n = n16 + 8 * (k >> 1) + 2 * t, p = 16 * i + 8 * (k & 1) + g;
          float* v = &S[b][i][k >> 1][2 * (k & 1)];
          if (c + 1 == chunks || ROUND) {  // what memory would hold at this place
            u32 element = (u32)first_element + p * N + n, drawn = mix(key ^ (u32)(from + kept));
            v[0] = rounded(v[0], drawn, element);
            v[1] = rounded(v[1], drawn, element + 1);
          }
          if (c + 1 == chunks && last > boundary) store_pair(ssm, base + p * N + n, v[0], v[1]);
          *(u32*)&shared.state[p][n] = narrow2(v[0], v[1]);
        }
    }
  }
}
