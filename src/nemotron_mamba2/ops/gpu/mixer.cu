// A whole Mamba-2 layer for few rows in one launch of one block per multiprocessor, all resident:
//
//   norm, in_proj  |  convolution and recurrence  |  gated norm, out_proj, residual            | all blocks have arrived
//
// Weights do not wait. Each warp's copies run DEPTH chunks ahead of its products, through in_proj into out_proj, so that
// memory is busy while blocks wait for each other, and before the layer's inputs are there. State, window and small weights
// are asked for before a wait as well. The parts are those of `linear.cu` and `step.cu`, and so are the bits.

constexpr int SLOT = FORMAT == 0 ? 2048 : FORMAT == 4 ? 576 : 1024;  // bytes of a chunk
constexpr int AREA = MOST * 2 * (in_proj::XPITCH > out_proj::XPITCH ? in_proj::XPITCH : out_proj::XPITCH);
constexpr int WINDOW_BYTES = (sizeof(Window) + 15) / 16 * 16;

DEVICE void bring_line(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }
// Of an array that every block will read: each block asks for its share of the lines.
DEVICE void bring_array(const float* p, int count) {
  for (int line = blockIdx.x * THREADS + threadIdx.x; line < (count + 31) / 32; line += gridDim.x * THREADS)
    bring_line(p + 32 * line);
}

// `arrivals` counts the blocks that have come to a meeting; each launch adds two for every block.
DEVICE void arrive(unsigned long long* arrivals) {
  __syncthreads();
  if (threadIdx.x == 0) asm volatile("fence.acq_rel.gpu; red.release.gpu.global.add.u64 [%0],1;" ::"l"(arrivals) : "memory");
}
DEVICE unsigned long long arrived(const unsigned long long* arrivals) {
  unsigned long long n;
  asm volatile("ld.acquire.gpu.global.u64 %0,[%1];" : "=l"(n) : "l"(arrivals) : "memory");
  return n;
}
DEVICE void await(const unsigned long long* arrivals, unsigned long long count) {
  if (threadIdx.x == 0)
    while (arrived(arrivals) < count) {}
  __syncthreads();
}

extern "C" __global__ __launch_bounds__(THREADS, 1) void mixer(
    u16* out, const u16* hidden, const float* norm_weight, const u8* in_w, const u8* in_block_scales, const float* in_scale,
    const float* gated_weight, const u8* out_w, const u8* out_block_scales, const float* out_scale, u16* projected, u16* y,
    unsigned long long* arrivals, void* ssm, u16* ring_x, u16* ring_B, float* ring_dt, u16* ring_conv, const long long* slots,
    const long long* positions, const long long* boundaries, const long long* cu_rows, const float* conv_weight,
    const float* conv_bias, const float* dt_bias, const float* A_log, const float* D, long long ld_out, long long ld_hidden,
    long long pad_slot, int M, int sequences, u32 key, float low_limit, float high_limit, float eps) {
  extern __shared__ __align__(128) u8 shared[];
  __shared__ float sums[2 * WARPS * 144], partial[MOST * (in_proj::SPANS > out_proj::SPANS ? in_proj::SPANS : out_proj::SPANS)];
  int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  u8* ring = shared + warp * DEPTH * SLOT;
  u8* area = shared + WARPS * DEPTH * SLOT;
  in_proj::Matrix a = {in_w, in_block_scales, in_scale};
  out_proj::Matrix b = {out_w, out_block_scales, out_scale};

  in_proj::Walk in_at = {nullptr, nullptr, in_proj::first_turn(warp), 0};
  out_proj::Walk out_at = {nullptr, nullptr, out_proj::first_turn(warp), 0};
  in_proj::enter(in_at, a, warp, lane);
  out_proj::enter(out_at, b, warp, lane);
  int slot = 0, turn = in_at.turn;
  auto refill = [&] {
    if (FORMAT == 4) __syncwarp();
    u32 to = address(ring + slot * SLOT);
    if (in_at.turn < in_proj::TILES) in_proj::send(to, a, in_at, warp, lane);
    else if (out_at.turn < out_proj::TILES) out_proj::send(to, b, out_at, warp, lane);
    asm volatile("cp.async.commit_group;" ::: "memory");
    slot = slot + 1 == DEPTH ? 0 : slot + 1;
  };
  auto oldest = [&]() -> const u8* {
    asm volatile("cp.async.wait_group %0;" ::"n"(DEPTH - 1) : "memory");
    if (FORMAT == 4) __syncwarp();
    return ring + slot * SLOT;
  };
#pragma unroll 1
  for (int d = 0; d < DEPTH; d++) refill();
  float4 in_norm[in_proj::VECTORS][2], out_norm[out_proj::VECTORS][2];
  in_proj::hold_weights(in_norm, norm_weight);
  bring_array(conv_weight, CONV * KW);
  if (HAS_BIAS) bring_array(conv_bias, CONV);
  bring_array(gated_weight, out_proj::K_);
  if (AHEAD & 24) in_proj::bring_next(a, in_at, AHEAD & 16 ? 2 : 1, warp, lane);

  wait_for_inputs();
  // Lane l of the first warp knows the block's part 1 + l, whose state is asked for while in_proj runs.
  int later = blockIdx.x + gridDim.x * (1 + lane), parts = sequences * H * SPLITS;
  long long later_slot = AHEAD & 4 && warp == 0 && later < parts ? slots[later / (H * SPLITS)] : pad_slot;
  constexpr int IN = in_proj::ROWS_OUT;
  unsigned long long met = 0;
  if (threadIdx.x == 0) met = arrived(arrivals) / (2 * gridDim.x) * (2 * gridDim.x);
  auto to_projected = [&](int n, int m, float v) { projected[m * IN + n] = narrow(v); };
  in_proj::norm_tokens<false>((u16*)area, hidden, hidden, in_norm, ld_hidden, ld_hidden, M, eps, partial);
  in_proj::product(a, (const u16*)area, M, turn, in_proj::FIRST, sums, oldest, refill, to_projected);
  arrive(arrivals);  // with xBC and dt; z is not needed before the second meeting
  if (later_slot != pad_slot) {
    long long row = later_slot * H * P + later % (H * SPLITS) * ROWS;
    in_proj::bring_to_l2((const u8*)ssm + row * N * (sizeof(Packed) / 4), ROWS * N * (sizeof(Packed) / 4));
  }
  in_proj::product(a, (const u16*)area, M, turn, in_proj::TILES, sums, oldest, refill, to_projected);
  __syncthreads();
  let_next_start();
  if (AHEAD & 1) out_proj::bring_next(b, out_at, 1 << 20, warp, lane);

  const u16 *z = projected, *xbc = projected + H * P, *dt = xbc + CONV;
  Step in = {y, ssm, ring_x, ring_B, ring_dt, ring_conv, xbc, dt, slots, positions, boundaries, cu_rows, conv_weight,
             conv_bias, dt_bias, A_log, D, H * P, IN, IN, pad_slot, key, low_limit, high_limit};
  bool waiting = true;
  auto meet = [&] {
    if (!waiting) return;
    if (AHEAD & 2) out_proj::bring_next(b, out_at, 1 << 20, warp, lane);
    await(arrivals, met + gridDim.x);
    waiting = false;
  };
  for (int part = blockIdx.x; part < parts; part += gridDim.x)
    step_block(*(Window*)area, in, part % (H * SPLITS), part / (H * SPLITS), [] {}, meet);
  meet();
  arrive(arrivals);

  out_proj::hold_weights(out_norm, gated_weight);
  await(arrivals, met + 2 * gridDim.x);
  out_proj::norm_tokens<true>((u16*)area, y, z, out_norm, H * P, IN, M, eps, partial);
  turn = out_proj::first_turn(warp);
  out_proj::product(b, (const u16*)area, M, turn, out_proj::TILES, sums, oldest, refill, [&](int n, int m, float v) {
    out[m * ld_out + n] = narrow(v + widen(hidden[m * ld_hidden + n]));
  });
}
