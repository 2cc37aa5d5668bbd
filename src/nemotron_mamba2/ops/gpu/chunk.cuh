// Decays over a chunk of 64 rows, for both scans.
//
// A step's log decay is held at −128: exp of that is zero in fp32 beside anything, and the sums stay small enough for
// their differences to be exact to 5e-4 for any A and dt.

DEVICE float decay(float difference) { return __expf(fminf(difference, 0.f)); }

// Inclusive sums of dt·A up to rows 2·lane and 2·lane + 1, of which dt is given; rows in pairs, then lanes in turn.
DEVICE float2 log_decays(float2 dt, float A) {
  int lane = threadIdx.x & 31;
  float a = fmaxf(dt.x * A, -128.f), b = fmaxf(dt.y * A, -128.f), sum = a + b;
#pragma unroll
  for (int d = 1; d < 32; d <<= 1) {
    float below = __shfl_up_sync(0xFFFFFFFFu, sum, d);
    if (lane >= d) sum += below;
  }
  return make_float2(sum - b, sum);
}
