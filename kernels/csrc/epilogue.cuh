// From accumulators to the output: over the slots of the block, over blocks that share a tile, then bias, one rounding.
//
// All sums are fp32 and added in a fixed order. A warp that owns an accumulator pair (word j, half h) finishes it.
#pragma once
#include "scheduler.cuh"

// Who adds up a tile's sums. 0: its first block. 1: all its blocks, a share each (scatter.cuh); 2: so, and the grid cuts
// every tile alike. 3 and 4: as 2 and 0, and places are MARKED.
#ifndef SHARING
#define SHARING 0
#endif

// Marked places hold what no sum is until a sum comes; who waits for it reads the place until it does, and marks it again
// for the next launch. A flag takes two trips to the L2 more, after the sums: 0.6 us, as long as some units of the smallest
// products. The mark is a NaN, but not the one that arithmetic gives (0x7FFFFFFF); as an integer it is -1, and sums of S8_W4
// are multiples of 16.
constexpr bool MARKED = SHARING >= 3;
constexpr u32 MARK = 0xFFFFFFFF;

template <class T> using Sums = float[T::WORDS][T::TOKEN_TILES][4];

// Calls f(pair, token tile, the pair's sum of token 2t, of token 2t + 1) for every pair of a lane; sums of fp32 or int.
template <class T, class S, class F> DEVICE void each_pair(S &sums, const F &f) {
#pragma unroll
  for (int j = 0; j < T::WORDS; j++)
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
      for (int tile = 0; tile < T::TOKEN_TILES; tile++)
        f(2 * j + half, tile, sums[j][tile][2 * half], sums[j][tile][2 * half + 1]);
}

// Adds two sums; those of an integer product are integers in the registers of fp32 ones.
template <class T> DEVICE void add_to(float &sum, float more) {
  if constexpr (T::INTEGER_SUMS)
    sum = __int_as_float(__float_as_int(sum) + __float_as_int(more));
  else
    sum += more;
}

// A barrier among the threads that multiply: a producer's warps are elsewhere.
template <class T> DEVICE void multiplying_threads_meet() {
  if constexpr (T::PRODUCER)
    ptx::barrier(15, T::THREADS);
  else
    __syncthreads();
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
  // This lane's sums in a block's partial tile: pair by pair, token tile by token tile, each lane's next to its
  // neighbour's. One pointer and constant offsets from it, or the addresses would take the registers of the loads.
  DEVICE u8 *partials_of(u32 block) const {
    const u32 lane_at = (warp * T::PAIRS * T::TOKEN_TILES * 32 + lane) * 8;
    return reinterpret_cast<u8 *>(p.partials) + static_cast<u64>(ptx::opaque(block)) * (T::PARTIAL_FLOATS * 4) + lane_at;
  }
  DEVICE static constexpr int partial_at(int pair, int tile) { return (pair * T::TOKEN_TILES + tile) * 256; }

  // Adds the slots' sums; afterwards each pair's owner has its total.
  DEVICE void over_slots(Sums<T> &sums) const {
    if constexpr (T::SLOTS == 1) return;
    each_pair<T>(sums, [&](int pair, int tile, float &a, float &b) {
      if (!owns(pair)) ptx::store_shared_8(shared_at(slot, pair, tile), make_float2(a, b));
    });
    multiplying_threads_meet<T>();
    each_pair<T>(sums, [&](int pair, int tile, float &a, float &b) {
      if (owns(pair)) {
#pragma unroll
        for (int other = 0; other < T::SLOTS; other++) {
          if (other != slot) {
            const float2 v = ptx::load_shared_float2(shared_at(other, pair, tile));
            add_to<T>(a, v.x), add_to<T>(b, v.y);
          }
        }
      }
    });
    multiplying_threads_meet<T>();
  }

  // The release is of all that the block's threads wrote before they met: what one thread releases includes what it has
  // seen by way of a barrier (causality order of the PTX memory model). A fence of every thread's own costs 0.4 us more.
  DEVICE void hand_over(Sums<T> &sums, u32 block) const {
    u8 *const to = partials_of(block);
    each_pair<T>(sums, [&](int pair, int tile, float &a, float &b) {
      if (!owns(pair)) return;
      const float both[2] = {a, b};
      if constexpr (MARKED)
        ptx::store_8_relaxed(to + partial_at(pair, tile), both);  // read while it is written
      else
        __stcg(reinterpret_cast<float2 *>(to + partial_at(pair, tile)), make_float2(a, b));
    });
    if constexpr (MARKED) return;
    multiplying_threads_meet<T>();
    if (threadIdx.x == 0) ptx::store_release(p.flags + block, 1);
  }

  // Adds what blocks `from` to `to` - 1 handed over, in that order, and clears their flags for the next launch.
  DEVICE void collect(Sums<T> &sums, u32 from, u32 to) const {
    if constexpr (!MARKED) {
      for (u32 block = from + threadIdx.x; block < to; block += T::THREADS) {
        while (ptx::load_acquire(p.flags + block) == 0) {
        }
        p.flags[block] = 0;
      }
      multiplying_threads_meet<T>();
    }
#pragma unroll 1
    for (u32 block = from; block < to; block++)
      if constexpr (MARKED)
        add_marked(sums, block);
      else
        add_partial(sums, block);
  }

  // Adds a block's sums when all of this warp's have come, and marks their places.
  DEVICE void add_marked(Sums<T> &sums, u32 block) const {
    u8 *const from = partials_of(block);
    u32 v[T::PAIRS * T::TOKEN_TILES][2];
    for (;;) {
      bool missing = false;
      each_pair<T>(sums, [&](int pair, int tile, float &, float &) {
        u32(&both)[2] = v[pair * T::TOKEN_TILES + tile];
        ptx::load_8_if(both, from + partial_at(pair, tile), owns(pair));
        missing |= both[0] == MARK || both[1] == MARK;
      });
      if (!__any_sync(0xFFFFFFFFu, missing)) break;
      ptx::look_again();
    }
    each_pair<T>(sums, [&](int pair, int tile, float &a, float &b) {
      if (owns(pair)) {
        const float marks[2] = {__uint_as_float(MARK), __uint_as_float(MARK)};
        ptx::store_8_relaxed(from + partial_at(pair, tile), marks);
        const u32(&both)[2] = v[pair * T::TOKEN_TILES + tile];
        add_to<T>(a, __uint_as_float(both[0])), add_to<T>(b, __uint_as_float(both[1]));
      }
    });
  }

  DEVICE void add_partial(Sums<T> &sums, u32 block) const {
    const u8 *const from = partials_of(block);
    each_pair<T>(sums, [&](int pair, int tile, float &a, float &b) {
      if (owns(pair)) {
        const float2 v = __ldcg(reinterpret_cast<const float2 *>(from + partial_at(pair, tile)));
        add_to<T>(a, v.x), add_to<T>(b, v.y);
      }
    });
  }

  DEVICE void store(Sums<T> &sums, const Segment &segment) const {
    const Place place = Grid<T>::place(p, segment);
    const int column0 = place.column_tile * T::TILE_N + warp * T::WARP_N;
    if (column0 >= p.n) return;  // the same for the whole warp
    if constexpr (T::STAGED_ROWS) {
      const bool aligned = p.ldy % 8 == 0 && reinterpret_cast<u64>(p.y) % 16 == 0;
      if (aligned) return store_rows(sums, place.token0, Grid<T>::token_end(p, segment), column0);
    }
    each_pair<T>(sums, [&](int pair, int tile, float &a, float &b) {
      if (owns(pair)) {
        const int column = column0 + 8 * pair;
        const float bias = p.bias == nullptr ? 0.0f : bias_at(column + lane / 4);
        const u32 transposed = ptx::transpose_matrix(Number<T::ACT>::pack(a + bias, b + bias));
        const int token = place.token0 + tile * 8 + lane / 4;
        if (token < Grid<T>::token_end(p, segment)) {
          const u64 at = (static_cast<u64>(token) * p.ldy + column + 2 * (lane % 4)) * 2;
          *reinterpret_cast<u32 *>(p.y + at) = transposed;
        }
      }
    });
  }

  // Eight tokens at a time through shared memory, from where each lane takes 16 bytes of a token's row. The pieces of a
  // row are XOR-ed with the row so that neither way meets a bank twice.
  DEVICE void store_rows(Sums<T> &sums, int token0, int token_end, int column0) const {
    constexpr int PIECES = 2 * T::WORDS, ROW_BYTES = 16 * PIECES, ROWS_AT_ONCE = 32 / PIECES;
    const u32 rows = shared_sums - T::RING_BYTES + T::ROWS_AT + warp * T::WARP_ROWS_BYTES;
    const int row = lane / PIECES, piece = lane % PIECES;
    const u32 matrix_row = rows + lane % 8 * ROW_BYTES;
    u8 *to = p.y + (static_cast<u64>(token0 + row) * p.ldy + column0 + 8 * piece) * 2;
    int left = token_end - token0 - row;  // tokens from this lane's on; one pointer that moves, or there are too many
    const u32 step = p.ldy * 2 * ROWS_AT_ONCE;
#pragma unroll
    for (int tile = 0; tile < T::TOKEN_TILES; tile++) {
#pragma unroll
      for (int word = 0; word < T::WORDS; word += 2) {
        u32 v[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const float *sum = &sums[word + i / 2][tile][i % 2 * 2];
          const float bias = p.bias == nullptr ? 0.0f : bias_at(column0 + 8 * (2 * word + i) + lane / 4);
          v[i] = Number<T::ACT>::pack(sum[0] + bias, sum[1] + bias);
        }
        ptx::store_matrix_x4_transposed(matrix_row + swizzled(lane % 8, 2 * word + lane / 8) * 16, v);
      }
      __syncwarp();
#pragma unroll
      for (int part = 0; part < 8; part += ROWS_AT_ONCE) {
        if (left > 0) {
          const u32 at = rows + (part + row) * ROW_BYTES + swizzled(part + row, piece) * 16;
          *reinterpret_cast<uint4 *>(to) = ptx::load_shared_16(at);
        }
        to += ptx::opaque(step), left -= ROWS_AT_ONCE;
      }
      __syncwarp();
    }
  }
  DEVICE static int swizzled(int row, int piece) {
    return T::WORDS == 4 ? piece ^ row : piece ^ (row / 2 & 3);
  }

  DEVICE float bias_at(int column) const {
    return Number<T::ACT>::to_float(reinterpret_cast<const u16 *>(p.bias)[column]);
  }
};

// A segment's sums are complete in the slots: add them up and hand over, or call store(epilogue).
template <class T, class Store>
DEVICE void finish_segment(const Problem &p, Sums<T> &sums, const Segment &segment, u32 shared_sums, const Store &store) {
  const Epilogue<T> epilogue(p, shared_sums, ptx::opaque(threadIdx.x));
  epilogue.over_slots(sums);
  if (segment.begin != 0) {
    epilogue.hand_over(sums, blockIdx.x);
    return;
  }
  if (segment.end != Grid<T>::units(p)) epilogue.collect(sums, blockIdx.x + 1, end_of_tile<T>(p, segment.tile));
  store(epilogue);
}
