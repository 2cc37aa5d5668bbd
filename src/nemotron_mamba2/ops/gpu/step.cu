// One launch of `step.cuh`: blocks of a sequence along x, sequences along y.

extern "C" __global__ __launch_bounds__(THREADS, N > 128 || THREADS > 512 ? 1 : 512 / THREADS) void step(
    u16* y, void* ssm, u16* ring_x, u16* ring_B, float* ring_dt, u16* ring_conv, const u16* xbc, const u16* dt_raw,
    const long long* slots, const long long* positions, const long long* boundaries, const long long* cu_rows,
    const float* conv_weight, const float* conv_bias, const float* dt_bias, const float* A_log, const float* D,
    long long ld_y, long long ld_xbc, long long ld_dt, long long pad_slot, u32 key, float low_limit, float high_limit) {
  __shared__ __align__(16) Window win;
  Step in = {y, ssm, ring_x, ring_B, ring_dt, ring_conv, xbc, dt_raw, slots, positions, boundaries, cu_rows, conv_weight,
             conv_bias, dt_bias, A_log, D, ld_y, ld_xbc, ld_dt, pad_slot, key, low_limit, high_limit};
  auto begin = [] { wait_for_inputs(); let_next_start(); };
  step_block(win, in, blockIdx.x, blockIdx.y, begin, [] {});
}
