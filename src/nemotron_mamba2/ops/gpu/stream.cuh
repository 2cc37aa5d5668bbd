// One product inside a kernel that stays: weights pass through rings in shared memory, a ring per warp, while the block's
// rows of tokens lie beside them. Sums are those of `linear.cu`, bit for bit.
//
//   K_ inputs   ROWS_OUT outputs   S slices of K, one warp each; WARPS / S tiles of 16 outputs side by side
//   DEPTH chunks of a warp on their way
//
// A thread copies what it will read itself, so a chunk is there when the thread's own copies are (NVFP4's scales: the
// warp's), and its place is free when it has been read.

constexpr int TILES = ROWS_OUT / 16, SETS = WARPS / S, SCALE_PITCH = (K_ + 127) / 128;
constexpr int GROUP = S > 4 ? S / 4 : 1;
constexpr int XPITCH = K_ + (FORMAT == 0 ? 32 : 8);  // of rows of tokens: no bank conflicts

struct Matrix {
  const u8 *w, *block_scales;
  const float* scale;
};

// Which tile and chunk of it a warp copies next.
struct Place {
  int tile, chunk;
};
DEVICE int first_chunk(int warp) { return warp % S * CHUNKS / S; }
DEVICE Place first_place(int warp) { return {(int)blockIdx.x * SETS + warp / S, first_chunk(warp)}; }

DEVICE void send(u32 slot, const Matrix& a, Place& at, int warp, int lane) {
  if (FORMAT == 4) {
    long long unit = (long long)at.tile * CHUNKS + at.chunk;
    copy16(slot + 16 * lane, a.w + unit * 512 + 16 * lane);
    if (lane < 16) copy4(slot + 512 + 4 * lane, a.block_scales + unit * 64 + 4 * lane);
  } else {
    constexpr int B = FORMAT == 0 ? 2 : 1;
    const u8* p = a.w + ((long long)(at.tile * 16 + (lane >> 2)) * K_ + 64 * at.chunk) * B + 16 * (lane & 3);
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
      for (int k = 0; k < B; k++) copy16(slot + (B * h + k) * 512 + 16 * lane, p + (long long)h * 8 * K_ * B + 64 * k);
  }
  if (++at.chunk < (warp % S + 1) * CHUNKS / S) return;
  at.chunk = first_chunk(warp);
  at.tile += gridDim.x * SETS;
}
DEVICE void take(Chunk& q, const u8* slot, int lane) {
#pragma unroll
  for (int k = 0; k < WORDS; k++) q.w[0][k] = *(const uint4*)(slot + 512 * k + 16 * lane);
  if (FORMAT == 4) q.scale[0] = *(const u16*)(slot + 512 + 2 * lane);
}

// All warps norm M rows into shared memory; partial: [M][SPANS] floats there.
template <bool GATED>
DEVICE void norm_tokens(
    u16* to, const u16* x, const u16* z, const float* weight, long long ldx, long long ldz, int M, float eps, float* partial) {
  int warp = threadIdx.x >> 5;
  float v[VECTORS][8];
#pragma unroll 4
  for (int e = warp; e < M * SPANS; e += WARPS) {
    int m = e / SPANS, at = e % SPANS * SPAN;
    load_span<GATED>(x + m * ldx + at, z + m * ldz + at, v);
    float sum = span_sum(v);
    if (GROUPS == 1) partial[e] = sum;
    else store_span(v, rsqrtf(sum / (float)SPAN + eps), weight + at, to + m * XPITCH + at);
  }
  __syncthreads();
  if (GROUPS > 1) return;
#pragma unroll 4
  for (int e = warp; e < M * SPANS; e += WARPS) {
    int m = e / SPANS, at = e % SPANS * SPAN;
    load_span<GATED>(x + m * ldx + at, z + m * ldz + at, v);
    store_span(v, norm_scale(partial + m * SPANS, eps), weight + at, to + m * XPITCH + at);
  }
  __syncthreads();
}

// store(n, m, sum) for every output of this block's tiles. oldest(): waits for the warp's oldest chunk, and says where it
// lies; refill(): puts another one there. sums: [2][WARPS][16 · 9] floats.
template <class Oldest, class Refill, class Store>
DEVICE void product(
    const Matrix& a, const u16* tokens, int M, float* sums, const Oldest& oldest, const Refill& refill, const Store& store) {
  int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, set = warp / S;
  int c0 = first_chunk(warp), c1 = (warp % S + 1) * CHUNKS / S;
  float factor = scale_of_sum(a.scale);
  float* mine = sums + set * S * 144;
  for (int tile = first_place(warp).tile; tile < TILES; tile += gridDim.x * SETS) {
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
