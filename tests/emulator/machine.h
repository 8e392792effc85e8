// A CUDA machine on a CPU, as far as kernels of mma.sync and cp.async need it: every thread of every block is a fiber.
//
// Fibers run one at a time, in an order that `seed` shuffles, and change where an instruction waits for others: at
// barriers, in instructions of a whole warp, where a flag of another block is read. Copies of cp.async happen as early or
// as late as the architecture allows: where they are asked for, or where a thread waits for their group.
// Dynamic shared memory begins as bytes of 0xFF (NaNs); accesses past its end, misaligned ones and stand-stills are errors.
// Arrays that a kernel declares itself are one for all blocks: such kernels run block after block.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <exception>
#include <memory>
#include <random>
#include <string>
#include <type_traits>
#include <ucontext.h>
#include <vector>

#define __device__
#define __forceinline__ inline
#define __global__
#define __shared__ static
#define __align__(bytes)
#define __launch_bounds__(...)

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
#define DEVICE inline

struct uint2 { u32 x, y; };
struct alignas(16) uint4 { u32 x, y, z, w; };
struct alignas(16) int4 { int x, y, z, w; };
struct float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

template <class A, class B> std::common_type_t<A, B> min(A a, B b) {
  using C = std::common_type_t<A, B>;
  return static_cast<C>(a) < static_cast<C>(b) ? static_cast<C>(a) : static_cast<C>(b);
}
template <class A, class B> std::common_type_t<A, B> max(A a, B b) {
  using C = std::common_type_t<A, B>;
  return static_cast<C>(a) < static_cast<C>(b) ? static_cast<C>(b) : static_cast<C>(a);
}

namespace machine {

struct Failure : std::exception {
  std::string text;
  explicit Failure(std::string t) : text(std::move(t)) {}
};

struct Index {
  u32 x = 0, y = 0, z = 0;
};
struct Copy {
  u32 to;
  const void *from;
  u32 bytes;  // the rest of 16 are zeros
};
struct Warp {
  u32 arrived = 0;
  u64 generation = 0;
  u32 words[2][32][16];
};
struct Barrier {
  u32 arrived = 0;
  u64 generation = 0;
};
struct Block {
  Index index;
  std::vector<u8> memory;  // dynamic shared memory
  std::vector<Warp> warps;
  Barrier barriers[16];
};
struct Fiber {
  ucontext_t context;
  std::unique_ptr<u8[]> stack;
  Block *block;
  u32 thread;
  bool done = false;
  std::vector<Copy> open;
  std::deque<std::vector<Copy>> groups;
};

inline Fiber *current = nullptr;
inline ucontext_t scheduler;
inline bool late = false;
inline u64 events = 0;  // what happened that others may wait for
inline std::string failure;

}  // namespace machine

inline machine::Index threadIdx, blockIdx, gridDim, blockDim;

namespace machine {

inline void yield() { swapcontext(&current->context, &scheduler); }

inline u8 *dynamic_memory() { return current->block->memory.data(); }

// Addresses of arrays that a kernel declares: each a megabyte above the last, behind all dynamic memory.
constexpr u32 DECLARED = 0x80000000u, APART = 1u << 20;
inline std::vector<const u8 *> declared;
inline u32 shared_address(const void *pointer) {
  const u8 *const at = static_cast<const u8 *>(pointer), *const memory = dynamic_memory();
  if (at >= memory && at <= memory + current->block->memory.size()) return static_cast<u32>(at - memory);
  const auto found = std::find(declared.begin(), declared.end(), at);
  const u32 place = static_cast<u32>(found - declared.begin());
  if (found == declared.end()) declared.push_back(at);
  return DECLARED + place * APART;
}

inline u8 *shared_at(u32 address, u32 bytes) {
  auto &memory = current->block->memory;
  if (address % bytes != 0) throw Failure("misaligned access of shared memory at " + std::to_string(address));
  if (address >= DECLARED) {
    const u32 place = (address - DECLARED) / APART;
    if (place >= declared.size()) throw Failure("an address of no array");
    return const_cast<u8 *>(declared[place]) + (address - DECLARED) % APART;
  }
  if (u64(address) + bytes > memory.size())
    throw Failure("shared memory has " + std::to_string(memory.size()) + " bytes, accessed at " + std::to_string(address));
  return memory.data() + address;
}
template <class V> V load_shared(u32 address) {
  V v;
  std::memcpy(&v, shared_at(address, sizeof(V)), sizeof(V));
  return v;
}
template <class V> void store_shared(u32 address, V v) { std::memcpy(shared_at(address, sizeof(V)), &v, sizeof(V)); }

inline void perform(const Copy &copy) {
  u8 *to = shared_at(copy.to, 16);
  if (reinterpret_cast<std::uintptr_t>(copy.from) % 16 != 0) throw Failure("misaligned source of an asynchronous copy");
  std::memcpy(to, copy.from, copy.bytes);
  std::memset(to + copy.bytes, 0, 16 - copy.bytes);
}
inline void copy_async(const Copy &copy) {
  if (late)
    current->open.push_back(copy);
  else
    perform(copy);
}
inline void commit() {
  current->groups.push_back(std::move(current->open));
  current->open.clear();
}
inline void wait_for_copies(u32 pending) {
  while (current->groups.size() > pending) {
    for (const Copy &copy : current->groups.front()) perform(copy);
    current->groups.pop_front();
  }
}

inline void arrive(Barrier &barrier, u32 count) {
  if (++barrier.arrived == count) barrier.arrived = 0, barrier.generation++, events++;
}
inline void meet(Barrier &barrier, u32 count) {
  const u64 generation = barrier.generation;
  arrive(barrier, count);
  while (barrier.generation == generation) yield();
}

// What all lanes of this warp give to an instruction that they execute together.
inline const u32 (*together(const u32 *words, u32 count))[16] {
  Warp &warp = current->block->warps[current->thread / 32];
  const u64 generation = warp.generation;
  auto &given = warp.words[generation & 1];
  std::memcpy(given[current->thread % 32], words, 4 * count);
  if (++warp.arrived == 32)
    warp.arrived = 0, warp.generation++, events++;
  else
    while (warp.generation == generation) yield();
  return given;
}
inline u32 lane() { return current->thread % 32; }

}  // namespace machine

inline void __syncthreads() { machine::meet(machine::current->block->barriers[0], blockDim.x); }
inline void __syncwarp() {
  const u32 nothing = 0;
  machine::together(&nothing, 1);
}
// What lane `from` of the warp gave.
template <class V> V of_lane(V v, u32 from) {
  static_assert(sizeof(V) == 4);
  u32 word;
  std::memcpy(&word, &v, 4);
  word = machine::together(&word, 1)[from % 32][0];
  std::memcpy(&v, &word, 4);
  return v;
}
template <class V> V __shfl_xor_sync(u32, V v, u32 mask) { return of_lane(v, machine::lane() ^ mask); }
template <class V> V __shfl_sync(u32, V v, u32 from) { return of_lane(v, from); }
template <class V> V __shfl_up_sync(u32, V v, u32 by) { return of_lane(v, machine::lane() < by ? machine::lane() : machine::lane() - by); }
inline bool __all_sync(u32, bool v) {
  const u32 given = v;
  const auto all = machine::together(&given, 1);
  return std::all_of(all, all + 32, [](const u32 *words) { return words[0] != 0; });
}
inline bool __any_sync(u32, bool v) { return !__all_sync(0, !v); }
inline u32 __ballot_sync(u32, bool v) {
  const u32 given = v;
  const auto all = machine::together(&given, 1);
  u32 out = 0;
  for (u32 i = 0; i < 32; i++) out |= all[i][0] << i;
  return out;
}
inline u32 __reduce_max_sync(u32, u32 v) {
  const auto all = machine::together(&v, 1);
  u32 out = 0;
  for (u32 i = 0; i < 32; i++) out = std::max(out, all[i][0]);
  return out;
}
inline int __popc(u32 v) { return __builtin_popcount(v); }
inline int __ffs(int v) { return __builtin_ffs(v); }
inline void __threadfence() {}
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fdividef(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float rsqrtf(float a) { return static_cast<float>(1.0 / std::sqrt(double(a))); }
inline float __uint_as_float(u32 v) {
  float out;
  std::memcpy(&out, &v, 4);
  return out;
}
inline u32 __float_as_uint(float v) {
  u32 out;
  std::memcpy(&out, &v, 4);
  return out;
}
inline float __int_as_float(int v) { return __uint_as_float(static_cast<u32>(v)); }
inline int __float_as_int(float v) { return static_cast<int>(__float_as_uint(v)); }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __int2float_rn(int v) { return static_cast<float>(v); }
template <class V> V __ldcg(const V *from) { return *from; }
template <class V> void __stcg(V *to, V v) { *to = v; }
