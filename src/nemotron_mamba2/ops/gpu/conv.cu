// silu(causal depthwise conv + bias) over ragged prompt rows, and softplus of dt; fills the rings. One launch.
//
// A thread takes 8 channels of TILE rows of one sequence, all loads in flight at once; tiles of a sequence start at its
// first row, so that only its first tile reads the rings. That tile also does what the rings need, each thread for its
// own channels: live window rows go in front of the new ones, then the rows after the last multiple of W and the last raw
// rows go into the rings. What it writes there no other thread reads, and it reads before it writes.
//
// blockIdx.x: tile; blockIdx.y: 8 · THREADS channels, or, past those, THREADS heads of dt.

constexpr int CONV = H * P + 2 * G * N, CHANNEL_BLOCKS = (CONV / 8 + THREADS - 1) / THREADS, TAIL = KW - 1;

struct Place {
  int sequence, tile;
  long long front;  // live window rows of the sequences before this one
};
DEVICE Place find(const long long* positions, const long long* boundaries, const long long* cu_rows, int sequences) {
  int lane = threadIdx.x & 31, tiles_before = 0, tile = blockIdx.x;
  long long front = 0;
  for (int j0 = 0;; j0 += 32) {
    int j = j0 + lane;
    bool real = j < sequences;
    int tiles = real ? (int)((cu_rows[j + 1] - cu_rows[j] + TILE - 1) / TILE) : 0;
    int live = real ? (int)(positions[j] - boundaries[j]) : 0, sum = tiles, fronts = live;
#pragma unroll
    for (int d = 1; d < 32; d <<= 1) {
      int below = __shfl_up_sync(0xFFFFFFFFu, sum, d), more = __shfl_up_sync(0xFFFFFFFFu, fronts, d);
      if (lane >= d) { sum += below; fronts += more; }
    }
    u32 hit = __ballot_sync(0xFFFFFFFFu, tiles_before + sum > tile);
    int owner = hit ? __ffs(hit) - 1 : 31;
    int end = __shfl_sync(0xFFFFFFFFu, sum, owner), mine = __shfl_sync(0xFFFFFFFFu, tiles, owner);
    int all = __shfl_sync(0xFFFFFFFFu, fronts, owner), own = __shfl_sync(0xFFFFFFFFu, live, owner);
    if (hit) return {j0 + owner, tile - (tiles_before + end - mine), front + all - own};
    tiles_before += end;
    front += all;
  }
}
DEVICE int modulo(long long t, int length) { return (int)((t % length + length) % length); }

DEVICE uint4 convolved(const uint4* raw, const float (*weight)[KW], const float* bias) {
  u32 out[4];
#pragma unroll
  for (int w = 0; w < 4; w++) {
    float lo = 0.f, hi = 0.f;
#pragma unroll
    for (int tap = 0; tap < KW; tap++) {
      u32 v = ((const u32*)&raw[tap])[w];
      lo = fmaf(low(v), weight[2 * w][tap], lo);
      hi = fmaf(high(v), weight[2 * w + 1][tap], hi);
    }
    if (HAS_BIAS) { lo += bias[2 * w]; hi += bias[2 * w + 1]; }
    out[w] = narrow2(silu(lo), silu(hi));
  }
  return make_uint4(out[0], out[1], out[2], out[3]);
}

extern "C" __global__ __launch_bounds__(THREADS) void conv(
    u16* wide, float* wide_dt, u16* ring_x, u16* ring_B, float* ring_dt, u16* ring_conv, const u16* xbc, const u16* dt_raw,
    const long long* slots, const long long* positions, const long long* boundaries, const long long* cu_rows,
    const float* conv_weight, const float* conv_bias, const float* dt_bias, long long ld_wide, long long ld_wide_dt,
    long long ld_xbc, long long ld_dt, int sequences, float low_limit, float high_limit) {
  wait_for_inputs();
  let_next_start();
  Place at = find(positions, boundaries, cu_rows, sequences);
  long long slot = slots[at.sequence], position = positions[at.sequence], boundary = boundaries[at.sequence];
  long long first = cu_rows[at.sequence], rows = cu_rows[at.sequence + 1] - first, from = (long long)at.tile * TILE;
  int live = (int)(position - boundary);
  long long window = max((position + rows) / W * W - position, 0ll);  // the first new row that the rings keep
  wide += (first + at.front + live) * ld_wide;
  wide_dt += (first + at.front + live) * ld_wide_dt;

  if (blockIdx.y >= CHANNEL_BLOCKS) {  // dt
    int head = (blockIdx.y - CHANNEL_BLOCKS) * THREADS + threadIdx.x;
    if (head >= H) return;
    dt_raw += first * ld_dt + head;
    ring_dt += slot * R * H + head;
    float bias = dt_bias[head];
    auto step = [&](long long row) {
      float raw = widen(dt_raw[row * ld_dt]) + bias;
      float dt = fmaxf(raw, 0.f) + log1pf(expf(-fabsf(raw)));
      return HAS_LIMIT ? fminf(fmaxf(dt, low_limit), high_limit) : dt;
    };
#pragma unroll
    for (int k = 0; k < TILE; k++)
      if (from + k < rows) wide_dt[(from + k) * ld_wide_dt + head] = step(from + k);
    if (at.tile) return;
    for (int k = 0; k < live; k++) wide_dt[(k - live) * ld_wide_dt + head] = ring_dt[(boundary + k) % R * H];
    for (long long k = window; k < rows; k++) ring_dt[(position + k) % R * H] = step(k);
    return;
  }

  int channel = 8 * (blockIdx.y * THREADS + threadIdx.x);
  if (channel >= CONV) return;
  xbc += first * ld_xbc + channel;
  ring_conv += slot * KR * CONV + channel;
  float weight[8][KW], bias[8];
#pragma unroll
  for (int e = 0; e < 8; e++) {
#pragma unroll
    for (int tap = 0; tap < KW; tap++) weight[e][tap] = conv_weight[(channel + e) * KW + tap];
    bias[e] = HAS_BIAS ? conv_bias[channel + e] : 0.f;
  }
  auto raw = [&](long long row) {  // also of the TAIL rows before the new ones
    return row < 0 ? *(const uint4*)(ring_conv + modulo(position + row, KR) * CONV) : *(const uint4*)(xbc + row * ld_xbc);
  };
  uint4 q[TILE + TAIL];
#pragma unroll
  for (int k = 0; k < TILE + TAIL; k++) q[k] = raw(min(from + k - TAIL, rows - 1));
#pragma unroll
  for (int k = 0; k < TILE; k++)
    if (from + k < rows) *(uint4*)(wide + (from + k) * ld_wide + channel) = convolved(q + k, weight, bias);
  if (at.tile) return;

  u16* ring = channel < H * P ? ring_x + slot * R * H * P + channel : ring_B + slot * R * G * N + channel - H * P;
  int pitch = channel < H * P ? H * P : G * N;
  bool kept = channel < H * P + G * N;
  for (int k = 0; k < live; k++)
    *(uint4*)(wide + (k - live) * ld_wide + channel) =
        kept ? *(const uint4*)(ring + (boundary + k) % R * pitch) : make_uint4(0, 0, 0, 0);
  if (kept)
    for (long long row = window; row < rows; row++) {
      uint4 taps[KW];
#pragma unroll
      for (int tap = 0; tap < KW; tap++) taps[tap] = raw(row - TAIL + tap);
      *(uint4*)(ring + (position + row) % R * pitch) = convolved(taps, weight, bias);
    }
  for (long long row = max(rows - KR, 0ll); row < rows; row++)
    *(uint4*)(ring_conv + (position + row) % KR * CONV) = *(const uint4*)(xbc + row * ld_xbc);
}
