// silu(causal depthwise conv + bias) over ragged prompt rows, and softplus of dt; fills the rings. One launch.
//
// A thread takes VEC channels of TILE rows of one sequence, STEP rows in flight; tiles of a sequence start at its
// first row, so that only its first tile reads the rings. That tile also does what the rings need, each thread for its
// own channels: live window rows go in front of the new ones, then the rows after the last multiple of W and the last raw
// rows go into the rings. What it writes there no other thread reads, and it reads before it writes.
//
// blockIdx.y: tile; blockIdx.x: VEC · THREADS channels, or, past those, THREADS heads of dt. So blocks that run together
// read whole rows.

constexpr int CONV = H * P + 2 * G * N, CHANNEL_BLOCKS = (CONV / VEC + THREADS - 1) / THREADS, TAIL = KW - 1;

struct Place {
  int sequence, tile;
  long long front;  // live window rows of the sequences before this one
};
DEVICE Place find(const long long* positions, const long long* boundaries, const long long* cu_rows, int sequences) {
  int lane = threadIdx.x & 31, tiles_before = 0, tile = blockIdx.y;
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
DEVICE void widen4(uint2 q, float* v) { v[0] = low(q.x); v[1] = high(q.x); v[2] = low(q.y); v[3] = high(q.y); }
// One more row of VEC channels: the window of raw rows moves on by one. Oldest tap first, as in `step.cu`.
DEVICE uint2 next_row(float (*window)[VEC], uint2 raw, const float (*weight)[KW], const float* bias) {
  float now[VEC], out[VEC];
  widen4(raw, now);
#pragma unroll
  for (int e = 0; e < VEC; e++) {
    float acc = 0.f;
#pragma unroll
    for (int tap = 0; tap < TAIL; tap++) acc = fmaf(window[tap][e], weight[e][tap], acc);
    acc = fmaf(now[e], weight[e][TAIL], acc);
    if (HAS_BIAS) acc += bias[e];
    // silu by the fast division, which is right to 2 ulp for divisors below 2^126: hence the bound.
    out[e] = __fdividef(acc, 1.f + __expf(fminf(-acc, 80.f)));
#pragma unroll
    for (int tap = 0; tap + 1 < TAIL; tap++) window[tap][e] = window[tap + 1][e];
    window[TAIL - 1][e] = now[e];
  }
  return make_uint2(narrow2(out[0], out[1]), narrow2(out[2], out[3]));
}

// The raw rows of VEC channels of one sequence.
struct Channels {
  const u16 *xbc, *ring;
  long long ld, position;
  int rows;
  DEVICE uint2 raw(int row) const {  // also of the TAIL rows before the new ones; past the last one, that one
    row = min(row, rows - 1);
    return *(const uint2*)(row < 0 ? ring + modulo(position + row, KR) * CONV : xbc + row * ld);
  }
};
// Rows from, from + 1, … before `end`: STEP of them in flight while as many are computed.
template <class Store>
DEVICE void run(const Channels& rows, int from, int end, const float (*weight)[KW], const float* bias, const Store& store) {
  float past[TAIL][VEC];
  uint2 q[STEP], ahead[STEP];
#pragma unroll
  for (int k = 0; k < TAIL; k++) widen4(rows.raw(from + k - TAIL), past[k]);
  const u16* source = rows.xbc + from * rows.ld;
#pragma unroll
  for (int k = 0; k < STEP; k++) ahead[k] = from + k < end ? *(const uint2*)(source + k * rows.ld) : make_uint2(0, 0);
  for (; from < end; from += STEP) {
    source += STEP * rows.ld;
#pragma unroll
    for (int k = 0; k < STEP; k++) q[k] = ahead[k];
#pragma unroll
    for (int k = 0; k < STEP; k++)
      if (from + STEP + k < end) ahead[k] = *(const uint2*)(source + k * rows.ld);
#pragma unroll
    for (int k = 0; k < STEP; k++) {
      uint2 out = next_row(past, q[k], weight, bias);
      if (from + k < end) store(from + k, out);
    }
  }
}

extern "C" __global__ __launch_bounds__(THREADS, BLOCKS) void conv(
    u16* wide, float* wide_dt, u16* ring_x, u16* ring_B, float* ring_dt, u16* ring_conv, const u16* xbc, const u16* dt_raw,
    const long long* slots, const long long* positions, const long long* boundaries, const long long* cu_rows,
    const float* conv_weight, const float* conv_bias, const float* dt_bias, long long ld_wide, long long ld_wide_dt,
    long long ld_xbc, long long ld_dt, int sequences, float low_limit, float high_limit) {
  Place at = find(positions, boundaries, cu_rows, sequences);
  long long slot = slots[at.sequence], position = positions[at.sequence], boundary = boundaries[at.sequence];
  long long first = cu_rows[at.sequence];
  int rows = (int)(cu_rows[at.sequence + 1] - first), from = at.tile * TILE;
  int live = (int)(position - boundary);
  int window = (int)max(rows - (position + rows) % W, 0ll);  // the first new row that the rings keep
  wide += (first + at.front + live) * ld_wide;
  wide_dt += (first + at.front + live) * ld_wide_dt;

  if (blockIdx.x >= CHANNEL_BLOCKS) {  // dt
    int head = (blockIdx.x - CHANNEL_BLOCKS) * THREADS + threadIdx.x;
    float bias = head < H ? dt_bias[head] : 0.f;
    wait_for_inputs();
    let_next_start();
    if (head >= H) return;
    dt_raw += first * ld_dt + head;
    ring_dt += slot * R * H + head;
    auto step = [&](u16 bits) {
      float raw = widen(bits) + bias, dt = fmaxf(raw, 0.f) + log1pf(expf(-fabsf(raw)));
      return HAS_LIMIT ? fminf(fmaxf(dt, low_limit), high_limit) : dt;
    };
    for (int k0 = 0; k0 < TILE && from + k0 < rows; k0 += STEP) {
      u16 bits[STEP];
#pragma unroll
      for (int k = 0; k < STEP; k++) bits[k] = dt_raw[min(from + k0 + k, rows - 1) * ld_dt];
#pragma unroll
      for (int k = 0; k < STEP; k++)
        if (from + k0 + k < rows) wide_dt[(from + k0 + k) * ld_wide_dt + head] = step(bits[k]);
    }
    if (at.tile) return;
    for (int k = 0; k < live; k++) wide_dt[(k - live) * ld_wide_dt + head] = ring_dt[(boundary + k) % R * H];
    for (int k0 = window; k0 < rows; k0 += STEP) {
      u16 bits[STEP];
#pragma unroll
      for (int k = 0; k < STEP; k++) bits[k] = dt_raw[min(k0 + k, rows - 1) * ld_dt];
#pragma unroll
      for (int k = 0; k < STEP; k++)
        if (k0 + k < rows) ring_dt[(position + k0 + k) % R * H] = step(bits[k]);
    }
    return;
  }

  int channel = VEC * (blockIdx.x * THREADS + threadIdx.x);
  bool mine = channel < CONV;
  float weight[VEC][KW], bias[VEC];
#pragma unroll
  for (int e = 0; e < VEC; e++) {
#pragma unroll
    for (int tap = 0; tap < KW; tap++) weight[e][tap] = mine ? conv_weight[(channel + e) * KW + tap] : 0.f;
    bias[e] = HAS_BIAS && mine ? conv_bias[channel + e] : 0.f;
  }
  wait_for_inputs();
  let_next_start();
  if (!mine) return;
  xbc += first * ld_xbc + channel;
  ring_conv += slot * KR * CONV + channel;
  Channels rows_of{xbc, ring_conv, ld_xbc, position, rows};
  run(rows_of, from, min(from + TILE, rows), weight, bias, [&](int row, uint2 v) { *(uint2*)(wide + row * ld_wide + channel) = v; });
  if (at.tile) return;

  u16* ring = channel < H * P ? ring_x + slot * R * H * P + channel : ring_B + slot * R * G * N + channel - H * P;
  int pitch = channel < H * P ? H * P : G * N;
  bool kept = channel < H * P + G * N;
  for (int k0 = 0; k0 < live; k0 += STEP) {
    uint2 q[STEP];
#pragma unroll
    for (int k = 0; k < STEP; k++) q[k] = kept ? *(const uint2*)(ring + (boundary + min(k0 + k, live - 1)) % R * pitch) : make_uint2(0, 0);
#pragma unroll
    for (int k = 0; k < STEP; k++)
      if (k0 + k < live) *(uint2*)(wide + (k0 + k - live) * ld_wide + channel) = q[k];
  }
  if (kept && window < rows)
    run(rows_of, window, rows, weight, bias, [&](int row, uint2 v) { *(uint2*)(ring + (position + row) % R * pitch) = v; });
#pragma unroll 1
  for (int k0 = max(rows - KR, 0); k0 < rows; k0 += STEP) {
    uint2 q[STEP];
#pragma unroll
    for (int k = 0; k < STEP; k++) q[k] = rows_of.raw(k0 + k);
#pragma unroll
    for (int k = 0; k < STEP; k++)
      if (k0 + k < rows) *(uint2*)(ring_conv + (position + k0 + k) % KR * CONV) = q[k];
  }
}
