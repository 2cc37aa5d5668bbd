// One product inside a kernel that stays: weights pass through rings in shared memory, a ring per warp, while the block's
// rows of tokens lie beside them. Sums are those of `linear.cu`, bit for bit.
//
//   K_ inputs   ROWS_OUT outputs   S slices of K, one warp each; SETS tiles of 16 outputs side by side
//   LATER       outputs at the front whose turn comes last        DEPTH  chunks of a warp on their way
//
// A thread copies what it will read itself, so a chunk is there when the thread's own copies are (NVFP4's scales: the
// warp's), and its place is free when it has been read.

constexpr int TILES = ROWS_OUT / 16, SETS = WARPS / S, SCALE_PITCH = (K_ + 127) / 128, GROUP = S > 4 ? S / 4 : 1;
constexpr int FIRST = TILES - LATER / 16;        // tiles before the later ones
constexpr int XPITCH = K_ + (FORMAT == 0 ? 32 : 8);  // of rows of tokens: no bank conflicts
constexpr int HELD = (MOST * SPANS + WARPS - 1) / WARPS;  // spans of tokens that a warp norms

struct Matrix {
  const u8 *w, *block_scales;
  const float* scale;
};

// The warp's turns: one tile of every SETS · gridDim.x, neighbouring blocks side by side.
DEVICE int first_turn(int warp) { return blockIdx.x + gridDim.x * (warp / S); }
DEVICE int tile_of(int turn) { return turn < FIRST ? turn + LATER / 16 : turn - FIRST; }

// What a warp copies next.
struct Walk {
  const u8 *w, *block_scales;
  int turn, left;
};
DEVICE void enter(Walk& at, const Matrix& a, int warp, int lane) {
  if (at.turn >= TILES) return;
  int chunk = warp % S * CHUNKS / S;
  at.left = (warp % S + 1) * CHUNKS / S - chunk;
  long long tile = tile_of(at.turn);
  if (FORMAT == 4) {
    at.w = a.w + (tile * CHUNKS + chunk) * 512 + 16 * lane;
    at.block_scales = a.block_scales + (tile * CHUNKS + chunk) * 64 + 4 * lane;
  } else {
    at.w = a.w + ((tile * 16 + (lane >> 2)) * K_ + 64 * chunk) * (FORMAT == 0 ? 2 : 1) + 16 * (lane & 3);
  }
}
DEVICE void send(u32 slot, const Matrix& a, Walk& at, int warp, int lane) {
  constexpr int B = FORMAT == 0 ? 2 : 1;
  if (FORMAT == 4) {
    copy16(slot + 16 * lane, at.w);
    if (lane < 16) copy4(slot + 512 + 4 * lane, at.block_scales);
    at.w += 512;
    at.block_scales += 64;
  } else {
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
      for (int k = 0; k < B; k++) copy16(slot + (B * h + k) * 512 + 16 * lane, at.w + (long long)h * 8 * K_ * B + 64 * k);
    at.w += 64 * B;
  }
  if (--at.left) return;
  at.turn += gridDim.x * SETS;
  enter(at, a, warp, lane);
}
// Ask for what the warp copies next, up to the end of so many turns, to be brought to L2.
DEVICE void bring_next(const Matrix& a, const Walk& at, int turns, int warp, int lane) {
  int end = (warp % S + 1) * CHUNKS / S, left = at.left;
  for (int turn = at.turn; turn < TILES && turns > 0; turn += gridDim.x * SETS, turns--) {
    bring(a.w, a.block_scales, tile_of(turn), TILES - 1, end - left, left, lane);
    left = end - warp % S * CHUNKS / S;
  }
}
DEVICE void take(Chunk& q, const u8* slot, int lane) {
#pragma unroll
  for (int k = 0; k < WORDS; k++) q.w[0][k] = *(const uint4*)(slot + 512 * k + 16 * lane);
  if (FORMAT == 4) q.scale[0] = *(const u16*)(slot + 512 + 2 * lane);
}

// Norm weights of the warp's span, which is the same in every row: asked for before the rows are there.
DEVICE void hold_weights(float4 (*w)[2], const float* weight) {
  int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
#pragma unroll
  for (int i = 0; i < VECTORS; i++) {
    int at = 8 * (lane + 32 * i);
    const float4* from = (const float4*)(weight + warp % SPANS * SPAN + at);
    if (at < SPAN) w[i][0] = from[0], w[i][1] = from[1];
  }
}
// All warps norm M rows into shared memory; partial: [MOST][SPANS] floats there.
template <bool GATED>
DEVICE void norm_tokens(
    u16* to, const u16* x, const u16* z, const float4 (*w)[2], long long ldx, long long ldz, int M, float eps, float* partial) {
  static_assert(WARPS % SPANS == 0, "a warp has one span");
  int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, span = warp % SPANS;
  float v[HELD][VECTORS][8];
#pragma unroll
  for (int k = 0; k < HELD; k++) {
    int m = warp / SPANS + k * (WARPS / SPANS);
    if (m < M) load_span<GATED>(x + m * ldx + span * SPAN, z + m * ldz + span * SPAN, v[k]);
  }
#pragma unroll
  for (int k = 0; k < HELD; k++) {
    int m = warp / SPANS + k * (WARPS / SPANS);
    if (m < M) partial[m * SPANS + span] = span_sum(v[k]);
  }
  if (GROUPS == 1) __syncthreads();
#pragma unroll
  for (int k = 0; k < HELD; k++) {
    int m = warp / SPANS + k * (WARPS / SPANS);
    if (m >= M) break;
    float scale = GROUPS == 1 ? norm_scale(partial + m * SPANS, eps) : rsqrtf(partial[m * SPANS + span] / (float)SPAN + eps);
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
      int at = 8 * (lane + 32 * i);
      if (at < SPAN) *(uint4*)(to + m * XPITCH + span * SPAN + at) = normed8(v[k][i], scale, w[i][0], w[i][1]);
    }
  }
  __syncthreads();
}

// store(n, m, sum) for every output of the turns from `turn` to before `end`. oldest(): waits for the warp's oldest chunk,
// and says where it lies; refill(): puts another one there. sums: [2][WARPS][16 · 9] floats.
template <class Oldest, class Refill, class Store>
DEVICE void product(
    const Matrix& a, const u16* tokens, int M, int& turn, int end, float* sums, const Oldest& oldest, const Refill& refill,
    const Store& store) {
  int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, set = warp / S;
  int c0 = warp % S * CHUNKS / S, c1 = (warp % S + 1) * CHUNKS / S;
  float factor = scale_of_sum(a.scale);
  float* mine = sums + set * S * 144;
  for (; turn < end; turn += gridDim.x * SETS) {
    int tile = tile_of(turn);
    float acc[1][1][4] = {};
    for (int c = c0; c < c1; c++) {
      Chunk q;
      take(q, oldest(), lane);
      refill();
      multiply(acc, q, a.scale + tile / 8 * SCALE_PITCH + c / 2, SCALE_PITCH, [&](int, int half) {
        int k = 64 * c + (FORMAT == 0 ? 8 * t + 32 * half : 16 * t + 8 * half);
        return g < M ? *(const uint4*)(tokens + g * XPITCH + k) : make_uint4(0, 0, 0, 0);
      });
    }
#pragma unroll
    for (int r = 0; r < 4; r++) mine[warp % S * 144 + (g + (r >= 2 ? 8 : 0)) * 9 + 2 * t + (r & 1)] = acc[0][0][r];
    asm volatile("bar.sync %0,%1;" ::"r"(1 + set), "n"(32 * S) : "memory");
    for (int e = threadIdx.x % (32 * S); e < 16 * M; e += 32 * S) {
      int row = e % 16, m = e / 16;
      float v = 0.f;
#pragma unroll
      for (int s = 0; s < S; s += GROUP) {
        float of_group = 0.f;
#pragma unroll
        for (int k = 0; k < GROUP; k++) of_group += mine[(s + k) * 144 + row * 9 + m];
        v += of_group;
      }
      if (FORMAT == 2) factor = a.scale[16 * tile + row];
      store(16 * tile + row, m, v * factor);
    }
    mine = mine == sums + set * S * 144 ? mine + WARPS * 144 : sums + set * S * 144;  // the other is still being read
  }
}
