// From integer sums to values: scales and bias in fp32.
//
//   one scale a column   y = fma(fp32(acc) * sx, sw, b): sums of integers, exact in any order
//   groups               y = fma(sum, sx, b), sum = fma(fp32(acc_G), sw_G, sum) over G increasing
//
// The factor 16 of 4-bit weights is taken out of sx, which is exact.
#pragma once
#include "epilogue.cuh"
#include "int_tile.cuh"

// Bits of a column's scale, which lie in the grouped order: 8 (n % 8) + n % 64 / 8 inside a chunk; and of its bias.
DEVICE u16 column_scale(const IntProblem &p, int n) {
  return reinterpret_cast<const u16 *>(p.scales)[n - n % CHUNK_N + n % 8 * 8 + n % CHUNK_N / 8];
}
DEVICE u16 column_bias(const IntProblem &p, int n) {
  return p.column_bias == nullptr ? 0 : reinterpret_cast<const u16 *>(p.column_bias)[n];
}
// Past the L1: the kernel before this one may have written it while an older one still ran on this multiprocessor.
DEVICE float token_scale(const IntProblem &p, int token) { return token < p.m ? __ldcg(p.act_scales + token) : 0.0f; }

template <class T> DEVICE float scaled(float sum, float by, float scale, float offset) {
  if constexpr (T::GROUPED) return __fmaf_rn(sum, by, offset);
  return __fmaf_rn(__fmul_rn(__int2float_rn(__float_as_int(sum)), by), scale, offset);
}

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
      scale[pair] = T::GROUPED ? 1.0f : to_float(column_scale(p, n), p.scales_bf16);
      offset[pair] = Number<T::ACT>::to_float(column_bias(p, n));
    }
  }

  // The column of an accumulator pair: of the warp's words, or of the other warp's (IntTile::SPREAD).
  DEVICE int column(int column0, int pair) const {
    const int moved = T::SPREAD && lane & 8 ? (column0 & 32 ? -32 : 32) : 0;
    return column0 + moved + 8 * pair + lane / 4;
  }
  DEVICE float value(float sum, float by, int pair) const { return scaled<T>(sum, by, scale[pair], offset[pair]); }

  // All sums of a lane at once.
  DEVICE void operator()(Sums<T> &sums) const {
#pragma unroll
    for (int tile = 0; tile < T::TOKEN_TILES; tile++) {
      const float even = token_scale(p, token0 + 8 * tile) * T::FOLD, odd = token_scale(p, token0 + 8 * tile + 1) * T::FOLD;
#pragma unroll
      for (int pair = 0; pair < T::PAIRS; pair++) {
        float *const sum = &sums[pair / 2][tile][pair % 2 * 2];
        sum[0] = value(sum[0], even, pair), sum[1] = value(sum[1], odd, pair);
      }
    }
  }
};

// The same where slots share a tile's columns: asked for before the slots meet, where a trip to memory costs nothing, for
// the pairs that the lane's slot owns. The bits become numbers only after: they would be waited for before the meeting.
template <class T> struct EarlyScaling {
  const IntProblem &p;
  u16 scale[T::OWNED], offset[T::OWNED];
  float by[T::TOKEN_TILES][2];  // of tokens 2t and 2t + 1, with the factor 16: to take it out is to wait

  DEVICE EarlyScaling(const IntProblem &problem, int column0, int token0, int lane, int slot) : p(problem) {
    const int first = column0 + (T::OWNED == T::PAIRS ? 0 : 8 * T::OWNED * slot) + lane / 4;
#pragma unroll
    for (int i = 0; i < T::OWNED; i++) {
      scale[i] = T::GROUPED ? 0 : column_scale(p, first + 8 * i);
      offset[i] = column_bias(p, first + 8 * i);
    }
#pragma unroll
    for (int tile = 0; tile < T::TOKEN_TILES; tile++)
#pragma unroll
      for (int i = 0; i < 2; i++) by[tile][i] = token_scale(p, token0 + 8 * tile + lane % 4 * 2 + i);
  }

  // All sums, with columns that are right for the slot's own. The others are not stored; to ask whose each is would take
  // a third more registers.
  DEVICE void operator()(Sums<T> &sums) const {
    float s[T::OWNED], b[T::OWNED];
#pragma unroll
    for (int i = 0; i < T::OWNED; i++)
      s[i] = to_float(scale[i], p.scales_bf16), b[i] = Number<T::ACT>::to_float(offset[i]);
    each_pair<T>(sums, [&](int pair, int tile, float &one, float &other) {
      const int i = pair % T::OWNED;
      one = scaled<T>(one, by[tile][0] * T::FOLD, s[i], b[i]), other = scaled<T>(other, by[tile][1] * T::FOLD, s[i], b[i]);
    });
  }
};
