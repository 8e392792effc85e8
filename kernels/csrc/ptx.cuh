// One wrapper per instruction, so that the kernels read as C++. What several of them use is here; an instruction of one
// kernel alone is wrapped beside it.
//
// No header of the toolkit is included: 16-bit values travel as raw bits in 32-bit registers, two to a register.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define DEVICE __device__ __forceinline__

// What the copy engine knows of a matrix, made by the host.
struct alignas(64) TensorMap {
  u8 bytes[128];
};

namespace ptx {

// The 32-bit address of a shared-memory pointer, as the instructions below want it.
DEVICE u32 shared_address(const void *pointer) { return static_cast<u32>(__cvta_generic_to_shared(pointer)); }

// Copies 16 bytes from global to shared memory without a register in between, past the L1 cache; the hint makes
// the L2 fetch the whole 128-byte line from memory at once.
DEVICE void copy_async_16(u32 to, const void *from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// The same, but writes zeros when `bytes` is 0: rows past the end of a matrix need no branch.
DEVICE void copy_async_16_or_zero(u32 to, const void *from, u32 bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

// Closes the group of copies this thread has issued since the last call.
DEVICE void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most PENDING of this thread's groups are still on their way.
template <int PENDING> DEVICE void copy_async_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory"); }

// A barrier among the `threads` threads that name the same `id`: 0 is __syncthreads, slots and pairs of warps use 1 to 8,
// an exchange of sums 10 to 13, warpgroups that take turns 14, all that multiply 15.
DEVICE void barrier(u32 id, u32 threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

// Says to those who wait at a barrier that this warp has come, and goes on.
DEVICE void barrier_pass(u32 id, u32 threads) { asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

// Lets the next kernel of the stream start its prologue now (no effect without programmatic launch).
DEVICE void launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Waits until the previous kernel of the stream has finished and its writes can be seen.
DEVICE void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Four 8x8 matrices of 16-bit values from shared memory: lane L gives the address of row L % 8 of matrix L / 8 and
// receives, of each matrix, row L / 4, columns 2 (L % 4) and the next.
DEVICE void load_matrix_x4(u32 (&to)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(address)
               : "memory");
}

// The same as load_matrix_x4, each matrix transposed.
DEVICE void load_matrix_x4_transposed(u32 (&to)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(address)
               : "memory");
}

// d += a * b, 16 x 8 x 32 codes of 8 bits.
DEVICE void multiply_s8(int (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
               "{%0, %1, %2, %3};"
               : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// The same, 16 x 8 x 64 codes of 4 bits.
DEVICE void multiply_s4(int (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k64.row.col.s32.s4.s4.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
               "{%0, %1, %2, %3};"
               : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Transposes an 8x8 matrix of 16-bit values that lies across the warp.
DEVICE u32 transpose_matrix(u32 value) {
  u32 out;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(value));
  return out;
}

// AT bytes past `address`; where it is part of the instruction, one address serves many.
template <u32 AT = 0> DEVICE uint4 load_shared_16(u32 address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4 + %5];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address), "n"(AT)
               : "memory");
  return v;
}

DEVICE uint2 load_shared_8(u32 address) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address) : "memory");
  return v;
}

DEVICE u32 load_shared_4(u32 address) {
  u32 v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
  return v;
}

DEVICE void store_shared_4(u32 address, float v) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(v) : "memory");
}

DEVICE void store_shared_8(u32 address, float2 v) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(v.x), "f"(v.y) : "memory");
}

template <u32 AT = 0> DEVICE void store_shared_16(u32 address, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0 + %5], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w),
               "n"(AT)
               : "memory");
}

DEVICE float2 load_shared_float2(u32 address) {
  float2 v;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(address) : "memory");
  return v;
}

// COUNT 8x8 matrices of 16-bit pairs, a lane's word of each, to shared memory: lane L gives the address of row L % 8 of
// matrix L / 8 (sm_90).
template <u32 COUNT> DEVICE void store_matrices(u32 address, const u32 *v) {
  if constexpr (COUNT == 4)
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v[0]), "r"(v[1]),
                 "r"(v[2]), "r"(v[3])
                 : "memory");
  else if constexpr (COUNT == 2)
    asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};" ::"r"(address), "r"(v[0]), "r"(v[1]) : "memory");
  else
    asm volatile("stmatrix.sync.aligned.m8n8.x1.shared.b16 [%0], {%1};" ::"r"(address), "r"(v[0]) : "memory");
}

// Four of them, each transposed.
DEVICE void store_matrix_x4_transposed(u32 address, const u32 (&v)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v[0]),
               "r"(v[1]), "r"(v[2]), "r"(v[3])
               : "memory");
}

// Makes shared memory written by ordinary stores and cp.async visible to the wgmma unit.
DEVICE void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Gives registers back or takes them: all four warps of a warpgroup, a multiple of 8 a thread (sm_90a).
template <int COUNT> DEVICE void fewer_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT)); }
template <int COUNT> DEVICE void more_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT)); }

// Barriers in shared memory (sm_90). `init` says how many arrivals end a phase; phases count 0, 1, 0, ...
DEVICE void barrier_init(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// Makes initialised barriers visible to the copy engine.
DEVICE void barrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEVICE void barrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Arrives, and lets the phase end only when the copy engine has brought `bytes` too.
DEVICE void barrier_arrive_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
DEVICE void barrier_wait(u32 barrier, u32 phase) {
  asm volatile(
      "{ .reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again; }" ::"r"(barrier), "r"(phase)
      : "memory");
}

// The same where other blocks of the cluster have sent what the barrier counts.
DEVICE void barrier_wait_for_cluster(u32 barrier, u32 phase) {
  asm volatile(
      "{ .reg .pred done;\n"
      "again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again; }" ::"r"(barrier), "r"(phase)
      : "memory");
}

// Asks the copy engine for a run of bytes (a multiple of 16, both ends aligned to 16); the barrier counts them.
DEVICE void copy_bulk(u32 to, const void *from, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}
// The same for the box of a tensor map at (column, row); rows past its end arrive as zeros and count.
DEVICE void copy_box(u32 to, const void *map, int column, int row, u32 barrier) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
               ::"r"(to), "l"(map), "r"(column), "r"(row), "r"(barrier)
               : "memory");
}
// The same of a map of three dimensions, fastest first.
DEVICE void copy_box(u32 to, const void *map, int column, int line, int row, u32 barrier) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];"
               ::"r"(to), "l"(map), "r"(column), "r"(line), "r"(row), "r"(barrier)
               : "memory");
}
// Where another block of the cluster has what lies at `address` here.
DEVICE u32 in_block(u32 address, u32 rank) {
  u32 out;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(out) : "r"(address), "r"(rank));
  return out;
}
// The two halves of a meeting of all threads of the cluster's blocks. Without a release, which is a fence of all memory:
// what is made known is that barriers are there (barrier_init_fence).
DEVICE void cluster_arrives() { asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory"); }
DEVICE void cluster_is_there() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }
DEVICE void prefetch_map(const void *map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }

// Reads a flag so that whatever was written before its release can be read after.
DEVICE u32 load_acquire(const u32 *flag) {
  u32 v;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(flag) : "memory");
  return v;
}

// Loads two integers past the L1 if `there`, else leaves them.
DEVICE void load_8_if(u32 there, const void *from, int &a, int &b) {
  asm volatile("{ .reg .pred p; setp.ne.u32 p, %3, 0;\n"
               "@p ld.global.cg.v2.s32 {%0, %1}, [%2]; }"
               : "+r"(a), "+r"(b)
               : "l"(from), "r"(there)
               : "memory");
}

// Sets a flag after everything this thread (and, past a barrier, its block) has written.
DEVICE void store_release(u32 *flag, u32 v) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(flag), "r"(v) : "memory");
}

// Adds to a count after everything the warp has written before its last meeting.
DEVICE void add_release(u32 *count, u32 v) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(count), "r"(v) : "memory");
}
DEVICE u32 fetch_add(u32 *count, u32 v) {
  u32 old;
  asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;" : "=r"(old) : "l"(count), "r"(v) : "memory");
  return old;
}

// Counts up to `last` and begins again; what this thread's block wrote before it met is there for who counts after.
DEVICE u32 count_arrival(u32 *count, u32 last) {
  u32 old;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(old) : "l"(count), "r"(last) : "memory");
  return old;
}

// Through the L2, where other blocks see it.
DEVICE void store_16_relaxed(void *to, const float *v) {
  asm volatile("st.relaxed.gpu.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3])
               : "memory");
}
DEVICE void store_8_relaxed(void *to, const float *v) {
  asm volatile("st.relaxed.gpu.global.v2.f32 [%0], {%1, %2};" ::"l"(to), "f"(v[0]), "f"(v[1]) : "memory");
}
// Between two looks at what another block will write; where kernels are emulated, lets the others go on.
DEVICE void look_again() {}
// What other blocks have written, past the L1; zeros where it is not `there`.
DEVICE void load_16_if(u32 (&v)[4], const void *from, bool there) {
  asm volatile("{ .reg .pred p; setp.ne.u32 p, %5, 0;\n"
               "mov.u32 %0, 0; mov.u32 %1, 0; mov.u32 %2, 0; mov.u32 %3, 0;\n"
               "@p ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4]; }"
               : "=&r"(v[0]), "=&r"(v[1]), "=&r"(v[2]), "=&r"(v[3])
               : "l"(from), "r"(static_cast<u32>(there))
               : "memory");
}
DEVICE void load_8_if(u32 (&v)[2], const void *from, bool there) {
  asm volatile("{ .reg .pred p; setp.ne.u32 p, %3, 0;\n"
               "mov.u32 %0, 0; mov.u32 %1, 0;\n"
               "@p ld.relaxed.gpu.global.v2.u32 {%0, %1}, [%2]; }"
               : "=&r"(v[0]), "=&r"(v[1])
               : "l"(from), "r"(static_cast<u32>(there))
               : "memory");
}

// A value the compiler knows nothing about: what is computed from it is not kept in registers across a loop.
DEVICE u32 opaque(u32 value) {
  asm volatile("" : "+r"(value));
  return value;
}

// (a & b) | c in one instruction: 0xEA is that function's truth table.
template <u32 MASK, u32 SET> DEVICE u32 and_or(u32 a) {
  u32 out;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(out) : "r"(a), "n"(MASK), "n"(SET));
  return out;
}

// 2^v, as the hardware has it.
DEVICE float exp2(float v) {
  float out;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(v));
  return out;
}

// Picks four bytes of the eight of b:a; nibble i of `selector` names the source of byte i.
DEVICE u32 permute_bytes(u32 a, u32 b, u32 selector) {
  u32 out;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(selector));
  return out;
}

}  // namespace ptx
