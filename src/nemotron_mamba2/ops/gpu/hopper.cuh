// What only Hopper has, as functions: the copy engine, mbarriers, wgmma's fences and descriptors, clusters.

// A tensor map of the driver: where a tile of the rows lies, how it is swizzled.
struct __align__(64) Map {
  u8 bytes[128];
};
DEVICE void load_tile(u32 to, const Map& map, int column, int row, u32 barrier) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0],[%1,{%2,%3}],[%4];"
      ::"r"(to), "l"(&map), "r"(column), "r"(row), "r"(barrier) : "memory");
}
DEVICE void expect(u32 barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _,[%0],%1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// A barrier counts arrivals. Waits name the round that must be over: round r has parity r mod 2. So nobody may wait for a
// round before the one before it is over: the wait would return at once.
DEVICE void set_barrier(u32 barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0],%1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
DEVICE void show_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEVICE void signal(u32 barrier) {  // of a warp
  __syncwarp();
  if ((threadIdx.x & 31) == 0) asm volatile("mbarrier.arrive.shared::cta.b64 _,[%0];" ::"r"(barrier) : "memory");
}
DEVICE void await(u32 barrier, int round) {
  asm volatile("{.reg .pred p; AGAIN_%=: mbarrier.try_wait.parity.shared::cta.b64 p,[%0],%1; @!p bra AGAIN_%=;}"
      ::"r"(barrier), "r"(round & 1) : "memory");
}
// Values a product reads or adds to must be whole before it begins, and none may be touched until it is finished: the
// compiler moves plain arithmetic past asm statements unless they name the registers.
template <int COUNT>
DEVICE void settle(float* v) {
#pragma unroll
  for (int k = 0; k < COUNT; k++) asm volatile("" : "+f"(v[k])::"memory");
}
template <int COUNT>
DEVICE void settle(u32* v) {
#pragma unroll
  for (int k = 0; k < COUNT; k++) asm volatile("" : "+r"(v[k])::"memory");
}
// One value for a warp: branches on it do not diverge, as wgmma needs.
DEVICE int uniform(int v) { return __shfl_sync(0xFFFFFFFFu, v, 0); }
DEVICE void begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT>
DEVICE void finish() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory"); }
// The descriptor of a tile whose rows are 128 bytes, swizzled over 8 rows.
DEVICE unsigned long long matrix(u32 tile) {
  return (unsigned long long)(tile >> 4 & 0x3FFF) | 1ull << 16 | (unsigned long long)(1024 >> 4) << 32 | 1ull << 62;
}
DEVICE void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
DEVICE u32 cluster_rank() {
  u32 r;
  asm volatile("mov.u32 %0,%%cluster_ctarank;" : "=r"(r));
  return r;
}
DEVICE float2 load_remote(u32 at, u32 rank) {  // shared memory of another block of the cluster
  float2 v;
  asm volatile("{.reg .u32 a; mapa.shared::cluster.u32 a,%2,%3; ld.shared::cluster.v2.f32 {%0,%1},[a];}"
      : "=f"(v.x), "=f"(v.y) : "r"(at), "r"(rank) : "memory");
  return v;
}
