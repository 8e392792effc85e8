// The end of a segment of an integer product: sums of slots and blocks, then values, then the output.
#pragma once
#include "int_store.cuh"
#include "weights.cuh"

// Values of a warpgroup's tile whose sums are complete, to the output.
template <class T>
DEVICE void store_int_segment(const IntProblem &p, const Epilogue<T> &epilogue, Sums<T> &sums, const Segment &segment,
                              u32 shared_sums) {
  const Place place = Grid<T>::place(p, segment);
  const int column0 = place.column_tile * T::TILE_N + epilogue.warp * T::WARP_N;
  if (column0 >= p.n) return;  // the same for the whole warp, and for both that share a chunk
  const Scaling<T> scaling(p, column0, place.token0, epilogue.lane);
  if constexpr (T::SPREAD) {
    const u32 staging = shared_sums - T::RING_BYTES + T::ROWS_AT;
    SpreadStore<T>{p, scaling, staging, epilogue.warp, epilogue.lane}(sums, place.token0, column0);
  } else {
    scaling(sums);
    epilogue.store(sums, segment);
  }
}

// A segment's sums are complete in the slots: add them up and hand over or store.
template <class T>
DEVICE void finish_int_segment(const IntProblem &p, Sums<T> &sums, const Segment &segment, u32 shared_sums) {
  static_assert(!MARKED || T::GROUPED || T::KIND == S8_W4, "a sum of others might be -1, the mark");
  if constexpr (T::WARPGROUP) {
    finish_segment<T>(p, sums, segment, shared_sums, [&](const Epilogue<T> &epilogue) {
      store_int_segment<T>(p, epilogue, sums, segment, shared_sums);
    });
  } else {
    const u32 thread = ptx::opaque(threadIdx.x);
    const Place place = Grid<T>::place(p, segment);
    const int column0 = place.column_tile * T::TILE_N + thread % T::SLOT_THREADS / 32 * T::WARP_N;
    const EarlyScaling<T> scaling(p, min(column0, p.n - T::WARP_N), place.token0, thread % 32, thread / T::SLOT_THREADS);
    finish_segment<T>(p, sums, segment, shared_sums, [&](const Epilogue<T> &epilogue) {
      scaling(sums);
      epilogue.store(sums, segment);
    });
  }
}

// Integer sums travel in the registers of fp32 ones.
template <class T> DEVICE void as_sums(Sums<T> &sums, const IntSums<T> &part) {
  each_sum<T>([&](int j, int tile, int i) { sums[j][tile][i] = __int_as_float(part[j][tile][i]); });
}
template <class T> DEVICE void clear(IntSums<T> &part) {
  each_sum<T>([&](int j, int tile, int i) { part[j][tile][i] = 0; });
}

// A group ends: its integer sums, scaled, go to the fp32 sums, and the next group begins at zero. `row` is the
// group's row in the stage.
template <class T>
DEVICE void add_group(const IntProblem &p, const Lane<T> &lane, Sums<T> &sums, IntSums<T> &part, u32 stage, int row) {
  u32 s[T::WORDS];
  float f[T::WORDS][2];
  lane.scales(s, stage, row);
  scales_as_float<T>(f, s, p.scales_bf16);
  each_sum<T>([&](int j, int tile, int i) {
    sums[j][tile][i] = __fmaf_rn(__int2float_rn(part[j][tile][i]), f[j][i / 2], sums[j][tile][i]);
    if constexpr (!T::WARPGROUP) part[j][tile][i] = 0;  // a warpgroup's first product overwrites
  });
}
