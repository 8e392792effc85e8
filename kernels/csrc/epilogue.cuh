// From accumulators to the output: over the slots of the block, over blocks that share a tile, then bias, one rounding.
//
// All sums are fp32 and added in a fixed order. A warp that owns an accumulator pair (word j, half h) finishes it.
#pragma once
#include "scheduler.cuh"

template <class T> using Sums = float[T::WORDS][T::TOKEN_TILES][4];

// Calls f(pair, token tile, the pair's sum of token 2t, of token 2t + 1) for every pair of a lane.
template <class T, class F> DEVICE void each_pair(Sums<T> &sums, const F &f) {
#pragma unroll
  for (int j = 0; j < T::WORDS; j++)
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
      for (int tile = 0; tile < T::TOKEN_TILES; tile++)
        f(2 * j + half, tile, sums[j][tile][2 * half], sums[j][tile][2 * half + 1]);
}

template <class T> struct Epilogue {
  const Problem &p;
  const u32 shared_sums;  // SUM_BYTES, after the ring
  const int slot, warp, lane;

  DEVICE Epilogue(const Problem &problem, u32 shared, u32 thread)
      : p(problem), shared_sums(shared), slot(thread / T::SLOT_THREADS), warp(thread % T::SLOT_THREADS / 32),
        lane(thread % 32) {}

  DEVICE static int owner(int pair) { return pair * T::SLOTS / T::PAIRS; }
  DEVICE bool owns(int pair) const { return T::SLOTS == 1 || owner(pair) == slot; }

  // Where a slot leaves a pair for its owner; the owner's own place is left out.
  DEVICE u32 shared_at(int of_slot, int pair, int tile) const {
    const int source = of_slot > owner(pair) ? of_slot - 1 : of_slot;
    return shared_sums + ((((source * T::WARPS + warp) * T::PAIRS + pair) * T::TOKEN_TILES + tile) * 32 + lane) * 8;
  }
  DEVICE float2 *partial_at(u32 block, int pair, int tile) const {
    const u64 at = static_cast<u64>(block) * T::PARTIAL_FLOATS / 2 +
                   ((warp * T::PAIRS + pair) * T::TOKEN_TILES + tile) * 32 + lane;
    return reinterpret_cast<float2 *>(p.partials) + at;
  }

  // Adds the slots' sums; afterwards each pair's owner has its total.
  DEVICE void over_slots(Sums<T> &sums) const {
    if constexpr (T::SLOTS == 1) return;
    each_pair<T>(sums, [&](int pair, int tile, float &a, float &b) {
      if (!owns(pair)) ptx::store_shared_8(shared_at(slot, pair, tile), make_float2(a, b));
    });
    __syncthreads();
    each_pair<T>(sums, [&](int pair, int tile, float &a, float &b) {
      if (owns(pair)) {
#pragma unroll
        for (int other = 0; other < T::SLOTS; other++) {
          if (other != slot) {
            const float2 v = ptx::load_shared_float2(shared_at(other, pair, tile));
            a += v.x, b += v.y;
          }
        }
      }
    });
    __syncthreads();
  }

  DEVICE void hand_over(Sums<T> &sums, u32 block) const {
    each_pair<T>(sums, [&](int pair, int tile, float &a, float &b) {
      if (owns(pair)) __stcg(partial_at(block, pair, tile), make_float2(a, b));
    });
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) ptx::store_release(p.flags + block, 1);
  }

  // Adds what blocks `from` to `to` - 1 handed over, in that order, and clears their flags for the next launch.
  DEVICE void collect(Sums<T> &sums, u32 from, u32 to) const {
    for (u32 block = from + threadIdx.x; block < to; block += T::THREADS) {
      while (ptx::load_acquire(p.flags + block) == 0) {
      }
      p.flags[block] = 0;
    }
    __syncthreads();
#pragma unroll 1
    for (u32 block = from; block < to; block++) {
      each_pair<T>(sums, [&](int pair, int tile, float &a, float &b) {
        if (owns(pair)) {
          const float2 v = __ldcg(partial_at(block, pair, tile));
          a += v.x, b += v.y;
        }
      });
    }
  }

  DEVICE void store(Sums<T> &sums, int tile_index) const {
    const int token_blocks = Grid<T>::token_blocks(p);
    const int token0 = tile_index % token_blocks * T::TOKENS;
    const int column0 = tile_index / token_blocks * T::TILE_N + warp * T::WARP_N;
    if (column0 >= p.n) return;  // the same for the whole warp
    each_pair<T>(sums, [&](int pair, int tile, float &a, float &b) {
      if (owns(pair)) {
        const int column = column0 + 8 * pair;
        const float bias = p.bias == nullptr ? 0.0f : bias_at(column + lane / 4);
        const u32 transposed = ptx::transpose_matrix(Number<T::ACT>::pack(a + bias, b + bias));
        const int token = token0 + tile * 8 + lane / 4;
        if (token < p.m) {
          const u64 at = (static_cast<u64>(token) * p.ldy + column + 2 * (lane % 4)) * 2;
          *reinterpret_cast<u32 *>(p.y + at) = transposed;
        }
      }
    });
  }

  DEVICE float bias_at(int column) const {
    return Number<T::ACT>::to_float(reinterpret_cast<const u16 *>(p.bias)[column]);
  }
};

// A segment's sums are complete in the slots: add them up and hand over or store.
template <class T> DEVICE void finish_segment(const Problem &p, Sums<T> &sums, const Segment &segment, u32 shared_sums) {
  const Epilogue<T> epilogue(p, shared_sums, ptx::opaque(threadIdx.x));
  epilogue.over_slots(sums);
  if (segment.begin != 0) {
    epilogue.hand_over(sums, blockIdx.x);
    return;
  }
  const u32 tile_end = (segment.tile + 1) * Grid<T>::units(p);
  u32 last = blockIdx.x + 1;
  while (last < gridDim.x && Grid<T>::begin(p, last) < tile_end) last++;
  if (last > blockIdx.x + 1) epilogue.collect(sums, blockIdx.x + 1, last);
  epilogue.store(sums, segment.tile);
}
