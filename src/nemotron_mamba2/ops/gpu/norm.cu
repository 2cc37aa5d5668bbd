// The norm as a kernel of its own.

// out[m] = norm(x[m]), a block per row: the same bits as the norm fused into `linear`.
extern "C" __global__ __launch_bounds__(256) void norm_rows(
    u16* out, const u16* x, const u16* z, const float* weight, long long ld_out, long long ldx, long long ldz, float eps) {
  __shared__ float partial[SPANS];
  wait_for_inputs();
  let_next_start();
  long long m = blockIdx.x;
  norm_row<GATED_>(x + m * ldx, z + m * ldz, weight, out + m * ld_out, partial, threadIdx.x >> 5, 8, eps);
}
