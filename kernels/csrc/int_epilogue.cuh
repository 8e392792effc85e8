// From integer sums to the output: the sums of slots and blocks, then scales and bias in fp32, then one rounding.
//
//   one scale a column   y = fma(fp32(acc) * sx, sw, b): sums of integers, exact in any order
//   groups               y = fma(sum, sx, b), sum = fma(fp32(acc_G), sw_G, sum) over G increasing
//
// The factor 16 of 4-bit weights is taken out of sx, which is exact.
#pragma once
#include "epilogue.cuh"
#include "int_schedule.cuh"
#include "weights.cuh"

template <class T> struct Scaling {
  const IntProblem &p;
  const int column0, token0, lane;

  // Past the L1: the kernel before this one may have written them while an older one still ran on this multiprocessor.
  DEVICE float act_scale(int token) const { return token < p.m ? __ldcg(p.act_scales + token) * T::FOLD : 0.0f; }

  // Scales lie in the grouped order: column 8 pair + g8 of a chunk is value 8 g8 + pair.
  DEVICE float column_scale(int pair) const {
    const int at = column0 % CHUNK_N / 8 + pair, chunk = column0 / CHUNK_N;
    return to_float(reinterpret_cast<const u16 *>(p.scales)[chunk * CHUNK_N + lane / 4 * 8 + at], p.scales_bf16);
  }
  DEVICE float bias(int pair) const {
    if (p.column_bias == nullptr) return 0.0f;
    return Number<T::ACT>::to_float(reinterpret_cast<const u16 *>(p.column_bias)[column0 + 8 * pair + lane / 4]);
  }

  // Sums become values; the columns must exist.
  DEVICE void operator()(Sums<T> &sums) const {
    float scale[T::PAIRS], offset[T::PAIRS];
#pragma unroll
    for (int pair = 0; pair < T::PAIRS; pair++) {
      scale[pair] = T::GROUPED ? 1.0f : column_scale(pair);
      offset[pair] = bias(pair);
    }
#pragma unroll
    for (int tile = 0; tile < T::TOKEN_TILES; tile++) {
      const int token = token0 + 8 * tile + 2 * (lane % 4);
      const float by[2] = {act_scale(token), act_scale(token + 1)};
#pragma unroll
      for (int pair = 0; pair < T::PAIRS; pair++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
          float &v = sums[pair / 2][tile][pair % 2 * 2 + i];
          if constexpr (T::GROUPED)
            v = __fmaf_rn(v, by[i], offset[pair]);
          else
            v = __fmaf_rn(__fmul_rn(__int2float_rn(__float_as_int(v)), by[i]), scale[pair], offset[pair]);
        }
    }
  }
};

// A segment's sums are complete in the slots: add them up and hand over or store.
template <class T>
DEVICE void finish_int_segment(const IntProblem &p, Sums<T> &sums, const Segment &segment, u32 shared_sums) {
  using G = Grid<T>;
  const Epilogue<T> epilogue(p, shared_sums, ptx::opaque(threadIdx.x));
  epilogue.over_slots(sums);
  if (segment.begin != 0) {
    epilogue.hand_over(sums, blockIdx.x);
    return;
  }
  if (segment.end != G::units(p)) {
    const u32 tile_end = (segment.tile - G::whole(p) + 1) * G::units(p);
    u32 last = blockIdx.x + 1;
    while (last < gridDim.x && G::begin(p, last) < tile_end) last++;
    epilogue.collect(sums, blockIdx.x + 1, last);
  }
  const Place place = G::place(p, segment);
  const int column0 = place.column_tile * T::TILE_N + epilogue.warp * T::WARP_N;
  if (column0 < p.n) Scaling<T>{p, column0, place.token0, epilogue.lane}(sums);
  epilogue.store(sums, segment);
}

// Integer sums travel in the registers of fp32 ones.
template <class T> DEVICE void as_sums(Sums<T> &sums, const IntSums<T> &part) {
#pragma unroll
  for (int j = 0; j < T::WORDS; j++)
#pragma unroll
    for (int tile = 0; tile < T::TOKEN_TILES; tile++)
#pragma unroll
      for (int i = 0; i < 4; i++) sums[j][tile][i] = __int_as_float(part[j][tile][i]);
}
template <class T> DEVICE void clear(IntSums<T> &part) {
#pragma unroll
  for (int j = 0; j < T::WORDS; j++)
#pragma unroll
    for (int tile = 0; tile < T::TOKEN_TILES; tile++)
#pragma unroll
      for (int i = 0; i < 4; i++) part[j][tile][i] = 0;
}

// A group ends: its integer sums, scaled, go to the fp32 sums, and the next group begins at zero. `row` is the
// group's row in the stage.
template <class T>
DEVICE void add_group(const IntProblem &p, const Lane<T> &lane, Sums<T> &sums, IntSums<T> &part, u32 stage, int row) {
  u32 s[T::WORDS];
  float f[T::WORDS][2];
  lane.scales(s, stage, row);
  scales_as_float<T>(f, s, p.scales_bf16);
#pragma unroll
  for (int j = 0; j < T::WORDS; j++)
#pragma unroll
    for (int tile = 0; tile < T::TOKEN_TILES; tile++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        sums[j][tile][i] = __fmaf_rn(__int2float_rn(part[j][tile][i]), f[j][i / 2], sums[j][tile][i]);
        if constexpr (!T::WARPGROUP) part[j][tile][i] = 0;  // a warpgroup's first product overwrites
      }
}
