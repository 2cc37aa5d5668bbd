// The state in memory: four neighbouring elements as one word, and fp32 rounded as the stored dtype would hold it.
//
// STATE 0 fp32 · 1 bf16 · 2 fp16 with stochastic rounding (as ops/reference/rounding.py, bit for bit)

#if STATE == 0
typedef float4 Packed;
#else
typedef uint2 Packed;
#endif

DEVICE u32 mix(u32 h) {
  h = (h ^ (h >> 16)) * 0x85EBCA6Bu + 0x9E3779B9u;
  h = (h ^ (h >> 16)) * 0xC2B2AE35u + 0x9E3779B9u;
  return h ^ (h >> 16);
}
DEVICE u16 half_bits(float v) {
  u16 r;
  asm("cvt.rn.f16.f32 %0,%1;" : "=h"(r) : "f"(v));
  return r;
}
DEVICE float half_value(u32 bits) {
  float r;
  asm("cvt.f32.f16 %0,%1;" : "=f"(r) : "h"((u16)bits));
  return r;
}
// fp32 as the stored dtype would hold it. key: of (seed, layer, position).
DEVICE float rounded(float v, u32 key, u32 element) {
  if (STATE == 1) return widen(narrow(v));
  if (STATE == 2) {
    u32 h = element ^ key;
    h = (h ^ (h >> 16)) * 0x85EBCA6Bu;
    h = (h ^ (h >> 16)) * 0xC2B2AE35u;
    u32 draw = (h ^ (h >> 16)) & 0x1FFFu;
    float kept = __uint_as_float((__float_as_uint(v) + draw) & 0xFFFFE000u);
    float small = floorf(v * 16777216.f + (float)draw * (1.f / 8192.f)) * (1.f / 16777216.f);
    return fminf(fmaxf(fabsf(v) < 6.103515625e-05f ? small : kept, -65504.f), 65504.f);
  }
  return v;
}
DEVICE void unpack(Packed q, float* v) {
#if STATE == 0
  v[0] = q.x; v[1] = q.y; v[2] = q.z; v[3] = q.w;
#elif STATE == 1
  v[0] = low(q.x); v[1] = high(q.x); v[2] = low(q.y); v[3] = high(q.y);
#else
  v[0] = half_value(q.x & 0xFFFF); v[1] = half_value(q.x >> 16); v[2] = half_value(q.y & 0xFFFF); v[3] = half_value(q.y >> 16);
#endif
}
DEVICE Packed pack(const float* v) {
#if STATE == 0
  return make_float4(v[0], v[1], v[2], v[3]);
#elif STATE == 1
  return make_uint2(narrow2(v[0], v[1]), narrow2(v[2], v[3]));
#else
  return make_uint2(half_bits(v[0]) | (u32)half_bits(v[1]) << 16, half_bits(v[2]) | (u32)half_bits(v[3]) << 16);
#endif
}

// Single elements of the state in memory; stored values are rounded before.
DEVICE float load_one(const void* ssm, long long at) {
  if (STATE == 0) return ((const float*)ssm)[at];
  u16 bits = ((const u16*)ssm)[at];
  return STATE == 1 ? widen(bits) : half_value(bits);
}
DEVICE void store_one(void* ssm, long long at, float v) {
  if (STATE == 0) ((float*)ssm)[at] = v;
  else ((u16*)ssm)[at] = STATE == 1 ? narrow(v) : half_bits(v);
}
