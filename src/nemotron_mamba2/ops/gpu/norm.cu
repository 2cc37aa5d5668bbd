// The norm as a kernel of its own.

// out[m] = norm(x[m]), a block per row: the same bits as the norm fused into `linear`.
extern "C" __global__ __launch_bounds__(256) void norm_rows(
    u16* out, const u16* x, const u16* z, const float* weight, long long ld_out, long long ldx, long long ldz, float eps) {
  __shared__ float partial[SPANS];
  let_next_start();  // before waiting: the product asks for its weights meanwhile, and this kernel needs few places
  wait_for_inputs();
  long long m = blockIdx.x;
  norm_row<GATED_, 8>(x + m * ldx, z + m * ldz, weight, out + m * ld_out, partial, threadIdx.x >> 5, eps);
}

// out[m] = x[m], in ORDER.
extern "C" __global__ __launch_bounds__(256) void order_rows(u16* out, const u16* x, long long ld_out, long long ldx) {
  let_next_start();
  wait_for_inputs();
  long long m = blockIdx.x;
  for (int at = 8 * threadIdx.x; at < K_; at += 8 * 256) store8(out + m * ld_out + at, *(const uint4*)(x + m * ldx + at));
}
