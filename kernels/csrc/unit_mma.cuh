// The product of one unit on mma.sync: four k-tiles of a warp's columns by all tokens of the block.
#pragma once
#include "epilogue.cuh"
#include "weights.cuh"

template <class T> struct MmaUnit {
  const Problem &p;
  const Lane<T> lane;
  const u32 x_row, x_row_bits;  // this lane's row address for ldmatrix, and its swizzle

  DEVICE MmaUnit(const Problem &problem, int warp, int lane_)
      : p(problem), lane(warp, lane_), x_row((lane_ % 8) * X_ROW_BYTES), x_row_bits(lane_ % 8) {}

  DEVICE void finish(Sums<T> &sums) const { in_units<T>(sums); }

  // B operands of k-tiles 2 check and 2 check + 1, all tokens.
  DEVICE void tokens(u32 (&b)[T::TOKEN_TILES][4], u32 stage, int check) const {
    const u32 piece = (4 * (check % 2) + lane.lane / 8) ^ x_row_bits;
    const u32 half = stage + check / 2 * T::TOKENS * X_ROW_BYTES;
#pragma unroll
    for (int tile = 0; tile < T::TOKEN_TILES; tile++)
      ptx::load_matrix_x4(b[tile], half + tile * 8 * X_ROW_BYTES + x_row + piece * 16);
  }

  // 32 rows, two k-tiles: never more than one group. FRESH starts the sums at zero.
  template <bool FRESH>
  DEVICE void rows_32(Sums<T> &sums, u32 stage, int check, const Zero<T::ACT, T::BITS> (&z)[T::WORDS][2],
                      const u32 (&scale)[T::WORDS][2]) const {
    constexpr float NOTHING[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    u32 b[T::TOKEN_TILES][4];
    tokens(b, stage, check);
#pragma unroll
    for (int i = 0; i < 2; i++) {
      u32 w[T::WORDS * T::VECTORS];
      if (T::ZEROS) __syncwarp();  // see `group`
      lane.words(w, stage, 2 * check + i);
#pragma unroll
      for (int j = 0; j < T::WORDS; j++) {
        u32 a[4];
        operand<T>(a, w + j * T::VECTORS, z[j], scale[j]);
#pragma unroll
        for (int tile = 0; tile < T::TOKEN_TILES; tile++) {
          float(&d)[4] = sums[j][tile];
          if (FRESH && i == 0)
            Number<T::ACT>::product(d, a, b[tile][0], b[tile][1], NOTHING);
          else
            Number<T::ACT>::product(d, a, b[tile][2 * i], b[tile][2 * i + 1], d);
        }
      }
    }
  }

  // The scales are read late: held through the products they would cost four registers.
  DEVICE void add_scaled(Sums<T> &sums, const Sums<T> &part, u32 stage, int row) const {
    u32 s[T::WORDS];
    float f[T::WORDS][2];
    lane.scales(s, stage, row);
    scales_as_float<T>(f, s, p.scales_bf16);
    each_sum<T>([&](int j, int tile, int i) { sums[j][tile][i] += f[j][i / 2] * part[j][tile][i]; });
  }

  DEVICE void columns(u32 (&scale)[T::WORDS][2], Zero<T::ACT, T::BITS> (&z)[T::WORDS][2], u32 stage, int row) const {
    lane.zeros(z, stage, row);
    if constexpr (!T::SCALE_SUMS) {
      u32 s[T::WORDS];
      lane.scales(s, stage, row);
      scales_as_pairs<T>(scale, s, p.scales_bf16);
    }
  }

  // Weights are scaled: a group changes what they are multiplied by.
  DEVICE void scaled_weights(Sums<T> &sums, u32 stage) const {
    u32 scale[T::WORDS][2];
    Zero<T::ACT, T::BITS> z[T::WORDS][2];
    columns(scale, z, stage, 0);
#pragma unroll
    for (int check = 0; check < T::CHECKS; check++) {
      if (check > 0 && p.new_group(check)) columns(scale, z, stage, p.group_row(check));
      rows_32<false>(sums, stage, check, z, scale);
    }
  }

  // Sums are scaled: the rows of one group, CHECKS times 32; `row` of the stage's scales. Meeting costs a warp nothing
  // here: it keeps the compiler from loading what comes next before this is done, for which there are no registers.
  template <int CHECKS> DEVICE void group(Sums<T> &sums, u32 stage, int row) const {
    u32 scale[T::WORDS][2];
    Zero<T::ACT, T::BITS> z[T::WORDS][2];
    Sums<T> part;
    columns(scale, z, stage, row);
    rows_32<true>(part, stage, row * CHECKS, z, scale);
#pragma unroll
    for (int i = 1; i < CHECKS; i++) {
      __syncwarp();
      rows_32<false>(part, stage, row * CHECKS + i, z, scale);
    }
    __syncwarp();
    add_scaled(sums, part, stage, row);
  }

  // A unit whose groups have CHECKS times 32 rows. In a loop where there are registers for one of them only.
  template <int CHECKS> DEVICE void groups(Sums<T> &sums, u32 stage) const {
    constexpr bool AT_ONCE = T::TOKENS == 8 && !T::ZEROS;
#pragma unroll AT_ONCE ? T::CHECKS : 1
    for (int row = 0; row < T::CHECKS / CHECKS; row++) group<CHECKS>(sums, stage, row);
  }

  // Where sums are scaled each size of group has its code: asking every 32 rows costs as much as unpacking a word, and a
  // group's first product would have to find zeros.
  DEVICE void operator()(Sums<T> &sums, u32 stage) const {
    if constexpr (T::SCALE_SUMS) {
      if (p.group_shift >= T::UNIT_SHIFT) return groups<T::CHECKS>(sums, stage);
      if constexpr (T::CHECKS > 2) {
        if (p.group_shift > SMALLEST_GROUP_SHIFT) return groups<2>(sums, stage);
      }
      groups<1>(sums, stage);
    } else {
      scaled_weights(sums, stage);
    }
  }
};
