// Sums of a tile that several blocks share, handed over from warpgroup to warpgroup (integer sums, one slot, sm_90a).
//
// Integers may be added in any order. So a block that begins a tile starts from the sums of the block that did what
// follows, where they are there already, and mostly they are: blocks hand over at the beginning of their runs. All loads
// of a thread are then under way at once, straight to its accumulators, while the other warpgroup multiplies; added at
// the end they would come a few at a time, with nothing left to do meanwhile. A warpgroup takes what the same one of
// another block made: none waits for the other of its own block. Flags: one for each block and warpgroup, zero before
// and after. tests/kernels/test_schedule.py runs it in random order.
#pragma once
#include "epilogue.cuh"
#include "int_tile.cuh"

template <class T> struct Exchange {
  // Not for few tokens: where tiles are fewer than blocks, all hand over at the same time. Not with 8-bit weights:
  // unpacking them leaves no registers for it.
  static constexpr bool USED = T::WARPGROUP && T::SLOTS == 1 && T::TOKENS >= 128 && !T::GROUPED && T::KIND == S8_W4;
  static constexpr u32 WARPGROUPS = T::WARPS / 4, BARRIER = 10;  // and the following
  static_assert(WARPGROUPS <= 4, "barriers 10 to 13");
  static_assert(!USED || !MARKED, "what lies here is not marked again");
  using G = Grid<T>;

  const IntProblem &p;
  u32 taken = 0;  // 1: the sums of the first of the others are in; who they are is worked out twice, and kept in no register

  DEVICE explicit Exchange(const IntProblem &problem) : p(problem) {}

  DEVICE static u32 warpgroup() { return ptx::opaque(threadIdx.x) / 128; }
  DEVICE u32 *flag(u32 block) const { return p.flags + block * WARPGROUPS + warpgroup(); }
  DEVICE static void meet() { ptx::barrier(BARRIER + warpgroup(), 128); }
  DEVICE u8 *partials(u32 block) const {
    return Epilogue<T>(p, 0, ptx::opaque(threadIdx.x)).partials_of(block);
  }

  // Which blocks have the rest of a segment's tile: from the next one up to this one, which is not among them.
  DEVICE u32 end_of_others(const Segment &segment) const {
    const bool alone = segment.begin != 0 || segment.end == G::units(p);
    return alone ? blockIdx.x + 1 : end_of_tile<T>(p, segment.tile);
  }

  // Starts the tile's sums: at those of the next block, if it has handed over. One way for both cases: ptxas lets
  // products wait for one another where accumulators come from two (C7515).
  DEVICE void start(IntSums<T> &part, const Segment &segment) {
    const u32 next = blockIdx.x + 1;
    u32 there = next != end_of_others(segment);
    if (there) there = ptx::load_acquire(flag(next));
    there = __all_sync(0xFFFFFFFFu, there != 0);  // every lane has seen it, and may read
    const u8 *const source = partials(next);
    each_pair<T>(part, [&](int pair, int tile, int &a, int &b) {
      a = b = 0;
      ptx::load_8_if(there, source + Epilogue<T>::partial_at(pair, tile), a, b);
    });
    taken = there != 0;
  }

  // The tile's end: what was not there at its start, and the flags for the next launch.
  DEVICE void finish(IntSums<T> &part, const Segment &segment) const {
    const u32 from = blockIdx.x + 1, to = end_of_others(segment), next = from + taken;
    if (from == to) return;
    for (u32 block = next + threadIdx.x % 32; block < to; block += 32)
      while (ptx::load_acquire(flag(block)) == 0) {
      }
    __syncwarp();
#pragma unroll 1
    for (u32 block = next; block < to; block++) add(part, block);
    meet();  // every warp has seen the flags
    for (u32 block = from + threadIdx.x % 128; block < to; block += 128) *flag(block) = 0;
  }

  DEVICE void add(IntSums<T> &part, u32 block) const {
    const u8 *const source = partials(block);
    each_pair<T>(part, [&](int pair, int tile, int &a, int &b) {
      const int2 v = __ldcg(reinterpret_cast<const int2 *>(source + Epilogue<T>::partial_at(pair, tile)));
      a += v.x, b += v.y;
    });
  }

  DEVICE void hand_over(const IntSums<T> &part) const {
    u8 *const target = partials(blockIdx.x);
    each_pair<T>(part, [&](int pair, int tile, int a, int b) {
      __stcg(reinterpret_cast<int2 *>(target + Epilogue<T>::partial_at(pair, tile)), make_int2(a, b));
    });
    meet();
    if (threadIdx.x % 128 == 0) ptx::store_release(flag(blockIdx.x), 1);
  }
};
