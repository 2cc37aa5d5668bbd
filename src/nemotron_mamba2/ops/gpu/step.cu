// Convolution and recurrence of generated and drafted rows, all slots in one launch.
//
// A block runs one head of one sequence (or WARPS · RPW of its P state rows). A warp holds RPW state rows in registers,
// lane l the inputs n = 128·v + 4·l .. + 3; the window of W rows (x, B, dt since the boundary) lies in shared memory. Per
// new row t, at window place i = t − boundary:
//
//   conv → x, B, C, dt      c = cumsum(dt·A)      y = exp(c_t)·state·C + Σ_{s ≤ i} exp(c_t − c_s)·dt_s·(C·B_s)·x_s + D·x
//
// First, one full window of *committed* rows is folded into the state and written: the state's only write, once per
// window. Where new rows cross into the next window, the fold stays in registers. Folds are fp32 FMAs. The lengths of the
// rings (`state.StateLayout`) keep every row that is read here apart from every row that is written here, whichever block
// runs first; B and C of a new row are convolved by every block of their group and stored by one.
//
// Each sum has one fixed tree: over n by lane xor 16, 8, 4, 2, 1, over the window in order, cumsum by shuffles. RPW,
// WARPS and the grid only say who computes which row, so they may follow the number of sequences: a row's bits do not.

constexpr int CONV = H * P + 2 * G * N, PER = H / G, NV = (N + 127) / 128, ROWS = RPW * WARPS, SPLITS = P / ROWS;
constexpr int THREADS = 32 * WARPS;

struct Window {
  float x[W][ROWS], B[W][N], C[N], dt[W], score[W];
};

DEVICE int wrap(int place, int length) { return place >= length ? place - length : place; }

DEVICE void widen8(uint4 q, float* out) {
  *(float4*)out = make_float4(low(q.x), high(q.x), low(q.y), high(q.y));
  *(float4*)(out + 4) = make_float4(low(q.z), high(q.z), low(q.w), high(q.w));
}

// Ring rows from place `first` on → window places [0, count): 16 bytes a load, all loads in flight at once.
DEVICE void load_window(Window& win, const u16* ring_x, const u16* ring_B, const float* ring_dt, int first, int count) {
  constexpr int XV = ROWS / 8, BV = N / 8, TRIPS = (W * (XV + BV) + THREADS - 1) / THREADS;
  uint4 q[TRIPS];
#pragma unroll
  for (int k = 0; k < TRIPS; k++) {
    int e = threadIdx.x + k * THREADS, s = e / (XV + BV), c = e % (XV + BV), place = wrap(first + s, R);
    if (s < count) q[k] = *(const uint4*)(c < XV ? ring_x + (long long)place * H * P + 8 * c : ring_B + (long long)place * G * N + 8 * (c - XV));
  }
  if (threadIdx.x < count) win.dt[threadIdx.x] = ring_dt[(long long)wrap(first + threadIdx.x, R) * H];
#pragma unroll
  for (int k = 0; k < TRIPS; k++) {
    int e = threadIdx.x + k * THREADS, s = e / (XV + BV), c = e % (XV + BV);
    if (s < count) widen8(q[k], c < XV ? &win.x[s][8 * c] : &win.B[s][8 * (c - XV)]);
  }
}

// Inclusive sum of dt·A up to each lane's window row; lanes past the window repeat nothing of use.
DEVICE float log_decay(const Window& win, float A, int count) {
  int lane = threadIdx.x & 31;
  float c = lane < count ? win.dt[lane] * A : 0.f;
#pragma unroll
  for (int d = 1; d < W; d <<= 1) {
    float before = __shfl_up_sync(0xFFFFFFFFu, c, d);
    if (lane >= d) c += before;
  }
  return c;
}

// The state one whole window later.
DEVICE void fold(float (*S)[NV][4], const Window& win, float A, int warp_row) {
  int lane = threadIdx.x & 31;
  float c = log_decay(win, A, W), total = __shfl_sync(0xFFFFFFFFu, c, W - 1);
  float weight = lane < W ? expf(fminf(total - c, 0.f)) * win.dt[lane] : 0.f, decay = expf(total);
#pragma unroll
  for (int r = 0; r < RPW; r++)
#pragma unroll
    for (int v = 0; v < NV; v++)
#pragma unroll
      for (int k = 0; k < 4; k++) S[r][v][k] *= decay;
#pragma unroll 1
  for (int s = 0; s < W; s++) {
    float w = __shfl_sync(0xFFFFFFFFu, weight, s);
    float B[NV][4];
#pragma unroll
    for (int v = 0; v < NV; v++) {
      int n = 128 * v + 4 * lane;
      float4 q = n < N ? *(const float4*)&win.B[s][n] : make_float4(0.f, 0.f, 0.f, 0.f);
      B[v][0] = q.x; B[v][1] = q.y; B[v][2] = q.z; B[v][3] = q.w;
    }
#pragma unroll
    for (int r = 0; r < RPW; r++) {
      float x = win.x[s][warp_row + r] * w;
#pragma unroll
      for (int v = 0; v < NV; v++)
#pragma unroll
        for (int k = 0; k < 4; k++) S[r][v][k] = fmaf(x, B[v][k], S[r][v][k]);
    }
  }
}

DEVICE void round_all(float (*S)[NV][4], u32 key, int first_row) {
  if (STATE == 0) return;
  int lane = threadIdx.x & 31;
#pragma unroll
  for (int r = 0; r < RPW; r++)
#pragma unroll
    for (int v = 0; v < NV; v++)
#pragma unroll
      for (int k = 0; k < 4; k++) S[r][v][k] = rounded(S[r][v][k], key, (u32)((first_row + r) * N + 128 * v + 4 * lane + k));
}

// Sums of RPW values over the warp: lane r < RPW (r + 32/RPW·… folded below) ends with the sum of value r.
DEVICE float sum_rows(float* value) {
  int lane = threadIdx.x & 31;
  int count = RPW;
#pragma unroll
  for (int d = 16; d; d >>= 1) {
    if (count > 1) {
      count /= 2;
#pragma unroll
      for (int r = 0; r < RPW / 2; r++)
        if (r < count) {
          bool up = lane & d;
          float mine = up ? value[r + count] : value[r], other = up ? value[r] : value[r + count];
          value[r] = mine + __shfl_xor_sync(0xFFFFFFFFu, other, d);
        }
    } else {
      value[0] += __shfl_xor_sync(0xFFFFFFFFu, value[0], d);
    }
  }
  // Row r sits in the lanes whose top bits spell r: bring it to lane r.
  return __shfl_sync(0xFFFFFFFFu, value[0], lane % RPW * (32 / RPW));
}

extern "C" __global__ __launch_bounds__(THREADS, N > 128 || THREADS > 512 ? 1 : 512 / THREADS) void step(
    u16* y, void* ssm, u16* ring_x, u16* ring_B, float* ring_dt, u16* ring_conv, const u16* xbc, const u16* dt_raw,
    const long long* slots, const long long* positions, const long long* boundaries, const long long* cu_rows,
    const float* conv_weight, const float* conv_bias, const float* dt_bias, const float* A_log, const float* D,
    long long ld_y, long long ld_xbc, long long ld_dt, long long pad_slot, u32 key, float low_limit, float high_limit) {
  __shared__ __align__(16) Window win;
  int head = blockIdx.x / SPLITS, split = blockIdx.x % SPLITS, group = head / PER, sequence = blockIdx.y;
  int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, warp_row = warp * RPW, block_row = split * ROWS;
  long long slot = slots[sequence], position = positions[sequence], boundary = boundaries[sequence];
  long long first = cu_rows[sequence];
  int rows = (int)(cu_rows[sequence + 1] - first);
  if (slot == pad_slot || rows == 0) {
    wait_for_inputs();
    let_next_start();
    for (int e = threadIdx.x; e < rows * ROWS; e += THREADS)
      y[(first + e / ROWS) * ld_y + head * P + block_row + e % ROWS] = 0;
    return;
  }
  int first_row = head * P + block_row + warp_row;  // of this warp, among all H · P
  ring_x += slot * R * H * P + head * P + block_row;
  ring_B += slot * R * G * N + group * N;
  ring_dt += slot * R * H + head;
  ring_conv += slot * KR * CONV;
  Packed* state = (Packed*)ssm + (slot * H * P + first_row) * (N / 4);
  float A = -expf(A_log[head]), skip = D[head], step_bias = dt_bias[head];
  bool stores_group = head % PER == 0 && split == 0;
  int ring_place = (int)(position % R), raw_place = (int)(position % KR);
  wait_for_inputs();
  let_next_start();

  float S[RPW][NV][4];
#pragma unroll
  for (int r = 0; r < RPW; r++)
#pragma unroll
    for (int v = 0; v < NV; v++)
      if (128 * v + 4 * lane < N) unpack(state[r * (N / 4) + 32 * v + lane], S[r][v]);
      else S[r][v][0] = S[r][v][1] = S[r][v][2] = S[r][v][3] = 0.f;

  int live = (int)(position - boundary);
  if (live >= W) {
    load_window(win, ring_x, ring_B, ring_dt, (int)(boundary % R), W);
    __syncthreads();
    boundary += W;
    live -= W;
    fold(S, win, A, warp_row);
    round_all(S, mix(key ^ (u32)boundary), first_row);
#pragma unroll
    for (int r = 0; r < RPW; r++)
#pragma unroll
      for (int v = 0; v < NV; v++)
        if (128 * v + 4 * lane < N) state[r * (N / 4) + 32 * v + lane] = pack(S[r][v]);
    __syncthreads();
  }
  load_window(win, ring_x, ring_B, ring_dt, (int)(boundary % R), live);

  for (int j = 0; j < rows; j++) {
    long long t = position + j;
    if (t - boundary == W) {
      boundary += W;
      fold(S, win, A, warp_row);
      round_all(S, mix(key ^ (u32)boundary), first_row);
      __syncthreads();
    }
    int i = (int)(t - boundary);
    int place = wrap(ring_place + j, R), new_raw = (raw_place + j) % KR;
    constexpr int TRIPS = (ROWS + 2 * N + THREADS - 1) / THREADS;
    int channel[TRIPS];
    u16 raw[TRIPS][KW];
#pragma unroll
    for (int k = 0; k < TRIPS; k++) {
      int e = threadIdx.x + k * THREADS;
      channel[k] = e < ROWS ? head * P + block_row + e : H * P + (e < ROWS + N ? group : G + group) * N + (e - ROWS) % N;
      if (e < ROWS + 2 * N)
#pragma unroll
        for (int tap = 0; tap < KW; tap++) {
          int back = j - (KW - 1) + tap;
          raw[k][tap] = back >= 0 ? xbc[(first + back) * ld_xbc + channel[k]]
                                  : ring_conv[wrap(raw_place + back + KR, KR) * CONV + channel[k]];
        }
    }
#pragma unroll
    for (int k = 0; k < TRIPS; k++) {
      int e = threadIdx.x + k * THREADS, c = channel[k];
      if (e >= ROWS + 2 * N) break;
      float acc = 0.f;
#pragma unroll
      for (int tap = 0; tap < KW; tap++) acc = fmaf(widen(raw[k][tap]), conv_weight[c * KW + tap], acc);
      if (HAS_BIAS) acc += conv_bias[c];
      u16 bits = narrow(silu(acc));
      float value = widen(bits);
      if (e < ROWS) {
        win.x[i][e] = value;
        ring_x[(long long)place * H * P + e] = bits;
      } else if (e < ROWS + N) {
        win.B[i][e - ROWS] = value;
        if (stores_group) ring_B[(long long)place * G * N + e - ROWS] = bits;
      } else {
        win.C[e - ROWS - N] = value;
      }
      if (e < ROWS || stores_group) ring_conv[new_raw * CONV + c] = raw[k][KW - 1];
    }
    if (threadIdx.x == 0) {
      float raw_dt = widen(dt_raw[(first + j) * ld_dt + head]) + step_bias;
      float dt = fmaxf(raw_dt, 0.f) + log1pf(expf(-fabsf(raw_dt)));
      if (HAS_LIMIT) dt = fminf(fmaxf(dt, low_limit), high_limit);
      win.dt[i] = dt;
      if (split == 0) ring_dt[(long long)place * H] = dt;
    }
    __syncthreads();
    float C[NV][4], part[RPW];
#pragma unroll
    for (int v = 0; v < NV; v++) {
      int n = 128 * v + 4 * lane;
      float4 q = n < N ? *(const float4*)&win.C[n] : make_float4(0.f, 0.f, 0.f, 0.f);
      C[v][0] = q.x; C[v][1] = q.y; C[v][2] = q.z; C[v][3] = q.w;
    }
    for (int s = warp; s <= i; s += WARPS) {
      float dot = 0.f;
#pragma unroll
      for (int v = 0; v < NV; v++) {
        int n = 128 * v + 4 * lane;
        float4 q = n < N ? *(const float4*)&win.B[s][n] : make_float4(0.f, 0.f, 0.f, 0.f);
        dot = fmaf(q.x, C[v][0], fmaf(q.y, C[v][1], fmaf(q.z, C[v][2], fmaf(q.w, C[v][3], dot))));
      }
      dot = warp_sum(dot);
      if (lane == 0) win.score[s] = dot;
    }
#pragma unroll
    for (int r = 0; r < RPW; r++) {
      part[r] = 0.f;
#pragma unroll
      for (int v = 0; v < NV; v++)
#pragma unroll
        for (int k = 0; k < 4; k++) part[r] = fmaf(S[r][v][k], C[v][k], part[r]);
    }
    float past = sum_rows(part);
    float c = log_decay(win, A, i + 1), c_t = __shfl_sync(0xFFFFFFFFu, c, i);
    __syncthreads();
    float weight = lane <= i ? expf(fminf(c_t - c, 0.f)) * win.dt[lane] * win.score[lane] : 0.f;
    float out = past * expf(c_t);
    int p = warp_row + lane % RPW;
    for (int s = 0; s <= i; s++) out = fmaf(__shfl_sync(0xFFFFFFFFu, weight, s), win.x[s][p], out);
    out = fmaf(skip, win.x[i][p], out);
    if (lane < RPW) y[(first + j) * ld_y + head * P + block_row + p] = narrow(out);
    __syncthreads();
  }
}
