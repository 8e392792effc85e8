// A CUDA machine on a CPU, as far as kernels of mma.sync and cp.async need it: every thread of every block is a fiber.
//
// Fibers run one at a time and change where an instruction waits for others: at barriers, in instructions of a whole warp,
// where a flag of another block is read. Warps have priorities that `seed` decides and changes: one runs until all its lanes
// wait, so that others may be far behind. Copies of cp.async happen as early or as late as the architecture allows: where they
// are asked for, or where a thread waits for their group.
// Shared memory begins as bytes of 0xFF (NaNs). What the instructions of ptx.cuh access must be inside of it and aligned;
// by pointer a kernel is only found to write behind its end. Lanes that execute different instructions of a warp, threads that
// count a barrier differently, copies from memory that no tensor has, and stand-stills are errors.
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
#define __shared__ static __attribute__((section("declared")))  // a block's while it runs
#define __align__(bytes) __attribute__((aligned(bytes)))
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
enum Instruction { SYNC, SHUFFLE, VOTE, REDUCE, MATRIX, PRODUCT };
struct Warp {
  u32 arrived = 0;
  Instruction instruction = SYNC;  // of those who have arrived
  u64 generation = 0;
  u32 words[2][32][16];
};
struct Barrier {
  u32 arrived = 0, count = 0;
  u64 generation = 0;
};
struct Block {
  Index index;
  std::vector<u8> memory;    // dynamic shared memory, and what tells of writes behind it
  std::vector<u8> declared;  // arrays that the kernel declares, while another block runs
  std::vector<Warp> warps;
  Barrier barriers[16];
};
struct Fiber {
  ucontext_t context;
  std::unique_ptr<u8[]> stack;
  Block *block;
  u32 thread;
  bool done = false;
  const u64 *watched = nullptr;  // waits until this is no longer `seen`
  u64 seen = 0, looked = ~0ull;  // `looked`: when it last read another's flag
  std::vector<Copy> open;
  std::deque<std::vector<Copy>> groups;
};

inline Fiber *current = nullptr;
inline ucontext_t scheduler;
inline bool late = false;
inline u64 events = 0;  // what happened that others may wait for
inline std::string failure;

constexpr u32 BEHIND = 64;  // bytes after a block's memory
constexpr u8 UNTOUCHED = 0xC3;

struct Range {
  const u8 *from;
  u64 bytes;
};
inline const Range *tensors = nullptr;  // what copies may read
inline u32 tensor_count = 0;

}  // namespace machine

// The arrays that kernels declare, one after the other.
extern u8 __start_declared[] __attribute__((weak, visibility("hidden")));
extern u8 __stop_declared[] __attribute__((weak, visibility("hidden")));

inline machine::Index threadIdx, blockIdx, gridDim, blockDim;

namespace machine {

inline void wait_while(const u64 &what, u64 is) {
  current->watched = &what, current->seen = is;
  swapcontext(&current->context, &scheduler);
  current->watched = nullptr;
}

inline u8 *dynamic_memory() { return current->block->memory.data(); }

inline u32 dynamic_bytes() { return static_cast<u32>(current->block->memory.size()) - BEHIND; }

constexpr u32 DECLARED = 0x80000000u;  // the address of the first array that a kernel declares
inline u32 shared_address(const void *pointer) {
  const u8 *const at = static_cast<const u8 *>(pointer), *const memory = dynamic_memory();
  if (at >= memory && at <= memory + dynamic_bytes()) return static_cast<u32>(at - memory);
  if (at < __start_declared || at >= __stop_declared) throw Failure("the shared address of what is not shared memory");
  return DECLARED + static_cast<u32>(at - __start_declared);
}

inline u8 *shared_at(u32 address, u32 bytes) {
  const bool declared = address >= DECLARED;
  const u64 size = declared ? __stop_declared - __start_declared : dynamic_bytes(), at = declared ? address - DECLARED : address;
  if (at % bytes != 0) throw Failure("misaligned access of shared memory at " + std::to_string(at));
  if (at + bytes > size) throw Failure("shared memory has " + std::to_string(size) + " bytes, accessed at " + std::to_string(at));
  return (declared ? __start_declared : dynamic_memory()) + at;
}
template <class V> V load_shared(u32 address) {
  V v;
  std::memcpy(&v, shared_at(address, sizeof(V)), sizeof(V));
  return v;
}
template <class V> void store_shared(u32 address, V v) { std::memcpy(shared_at(address, sizeof(V)), &v, sizeof(V)); }

inline void perform(const Copy &copy) {
  u8 *to = shared_at(copy.to, 16);
  const u8 *const from = static_cast<const u8 *>(copy.from);
  if (reinterpret_cast<std::uintptr_t>(from) % 16 != 0) throw Failure("misaligned source of an asynchronous copy");
  const bool known = std::any_of(tensors, tensors + tensor_count, [&](const Range &tensor) {
    return from >= tensor.from && from + copy.bytes <= tensor.from + tensor.bytes;
  });
  if (copy.bytes > 0 && !known) throw Failure("an asynchronous copy reads what no tensor has");
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
  if (barrier.arrived > 0 && barrier.count != count) throw Failure("threads count a barrier differently");
  barrier.count = count;
  if (++barrier.arrived == count) barrier.arrived = 0, barrier.generation++, events++;
}
inline void meet(Barrier &barrier, u32 count) {
  const u64 generation = barrier.generation;
  arrive(barrier, count);
  while (barrier.generation == generation) wait_while(barrier.generation, generation);
}

// What all lanes of this warp give to an instruction that they execute together.
inline const u32 (*together(Instruction instruction, const u32 *words, u32 count))[16] {
  Warp &warp = current->block->warps[current->thread / 32];
  if (warp.arrived > 0 && warp.instruction != instruction) throw Failure("lanes of a warp execute different instructions");
  warp.instruction = instruction;
  const u64 generation = warp.generation;
  auto &given = warp.words[generation & 1];
  std::memcpy(given[current->thread % 32], words, 4 * count);
  if (++warp.arrived == 32)
    warp.arrived = 0, warp.generation++, events++;
  else
    while (warp.generation == generation) wait_while(warp.generation, generation);
  return given;
}
inline u32 lane() { return current->thread % 32; }

}  // namespace machine

inline void __syncthreads() { machine::meet(machine::current->block->barriers[0], blockDim.x); }
inline void __syncwarp() {
  const u32 nothing = 0;
  machine::together(machine::SYNC, &nothing, 1);
}
// What lane `from` of the warp gave.
template <class V> V of_lane(V v, u32 from) {
  static_assert(sizeof(V) == 4);
  u32 word;
  std::memcpy(&word, &v, 4);
  word = machine::together(machine::SHUFFLE, &word, 1)[from % 32][0];
  std::memcpy(&v, &word, 4);
  return v;
}
template <class V> V __shfl_xor_sync(u32, V v, u32 mask) { return of_lane(v, machine::lane() ^ mask); }
template <class V> V __shfl_sync(u32, V v, u32 from) { return of_lane(v, from); }
template <class V> V __shfl_up_sync(u32, V v, u32 by) { return of_lane(v, machine::lane() < by ? machine::lane() : machine::lane() - by); }
inline bool __all_sync(u32, bool v) {
  const u32 given = v;
  const auto all = machine::together(machine::VOTE, &given, 1);
  return std::all_of(all, all + 32, [](const u32 *words) { return words[0] != 0; });
}
inline bool __any_sync(u32, bool v) { return !__all_sync(0, !v); }
inline u32 __ballot_sync(u32, bool v) {
  const u32 given = v;
  const auto all = machine::together(machine::VOTE, &given, 1);
  u32 out = 0;
  for (u32 i = 0; i < 32; i++) out |= all[i][0] << i;
  return out;
}
inline u32 __reduce_max_sync(u32, u32 v) {
  const auto all = machine::together(machine::REDUCE, &v, 1);
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
