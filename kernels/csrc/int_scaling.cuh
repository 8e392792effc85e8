// From integer sums to values: scales and bias in fp32.
//
//   one scale a column   y = fma(fp32(acc) * sx, sw, b): sums of integers, exact in any order
//   groups               y = fma(sum, sx, b), sum = fma(fp32(acc_G), sw_G, sum) over G increasing
//
// The factor 16 of 4-bit weights is taken out of sx, which is exact.
#pragma once
#include "epilogue.cuh"
#include "int_tile.cuh"

// What a lane needs for its columns of a tile; the columns must exist.
template <class T> struct Scaling {
  const IntProblem &p;
  const int token0, lane;
  float scale[T::PAIRS], offset[T::PAIRS];

  DEVICE Scaling(const IntProblem &problem, int column0, int token0_, int lane_)
      : p(problem), token0(token0_ + lane_ % 4 * 2), lane(lane_) {
#pragma unroll
    for (int pair = 0; pair < T::PAIRS; pair++) {
      const int n = column(column0, pair);
      scale[pair] = T::GROUPED ? 1.0f : column_scale(n);
      offset[pair] = bias(n);
    }
  }

  // The column of an accumulator pair: of the warp's words, or of the other warp's (IntTile::SPREAD).
  DEVICE int column(int column0, int pair) const {
    const int moved = T::SPREAD && lane & 8 ? (column0 & 32 ? -32 : 32) : 0;
    return column0 + moved + 8 * pair + lane / 4;
  }
  // Scales lie in the grouped order: 8 (n % 8) + n % 64 / 8 inside a chunk.
  DEVICE float column_scale(int n) const {
    const int at = n - n % CHUNK_N + n % 8 * 8 + n % CHUNK_N / 8;
    return to_float(reinterpret_cast<const u16 *>(p.scales)[at], p.scales_bf16);
  }
  DEVICE float bias(int n) const {
    return p.column_bias == nullptr ? 0.0f : Number<T::ACT>::to_float(reinterpret_cast<const u16 *>(p.column_bias)[n]);
  }

  // Of tokens 2t and 2t + 1 of a token tile. Past the L1: the kernel before this one may have written them while an
  // older one still ran on this multiprocessor.
  DEVICE float2 act_scales(int tile) const { return {act_scale(token0 + 8 * tile), act_scale(token0 + 8 * tile + 1)}; }
  DEVICE float act_scale(int token) const { return token < p.m ? __ldcg(p.act_scales + token) * T::FOLD : 0.0f; }

  DEVICE float value(float sum, float by, int pair) const {
    if constexpr (T::GROUPED) return __fmaf_rn(sum, by, offset[pair]);
    return __fmaf_rn(__fmul_rn(__int2float_rn(__float_as_int(sum)), by), scale[pair], offset[pair]);
  }

  // All sums of a lane at once.
  DEVICE void operator()(Sums<T> &sums) const {
#pragma unroll
    for (int tile = 0; tile < T::TOKEN_TILES; tile++) {
      const float2 by = act_scales(tile);
#pragma unroll
      for (int pair = 0; pair < T::PAIRS; pair++) {
        float *const sum = &sums[pair / 2][tile][pair % 2 * 2];
        sum[0] = value(sum[0], by.x, pair), sum[1] = value(sum[1], by.y, pair);
      }
    }
  }
};
