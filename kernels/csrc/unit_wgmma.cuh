// The product of one unit on wgmma: two register sets of weights take turns. Where weights are scaled nothing is waited
// for at its end; where the group's sum is, that sum is.
#pragma once
#include "epilogue.cuh"
#include "weights.cuh"
#include "wgmma.cuh"

// GROUP_K: rows of a group, or of a unit where a group has as many or more, if the kernel knows; 0: its launch says so.
template <class T, int GROUP_K = 0> struct WgmmaUnit {
  const Problem &p;
  const Lane<T> lane;

  DEVICE WgmmaUnit(const Problem &problem, int warp, int lane_) : p(problem), lane(warp, lane_) {}

  DEVICE void finish(Sums<T> &sums) const {
    settle(sums);
    in_units<T>(sums);
  }
  DEVICE static void settle(Sums<T> &sums) {
    wgmma::wait<0>();
    settled(sums);
  }

  // Sums that a product wrote beside the program's order: nothing may be read of them before this.
  DEVICE static void settled(Sums<T> &sums) {
    each_sum<T>([&](int j, int tile, int i) { asm volatile("" : "+f"(sums[j][tile][i])::"memory"); });
  }

  DEVICE void columns(u32 (&scale)[T::WORDS][2], Zero<T::ACT, T::BITS> (&z)[T::WORDS][2], u32 stage, int row) const {
    u32 s[T::WORDS];
    lane.scales(s, stage, row);
    lane.zeros(z, stage, row);
    scales_as_pairs<T>(scale, s, p.scales_bf16);
  }

  DEVICE bool begins_group(int row) const {
    if constexpr (GROUP_K != 0) return row * 16 % GROUP_K == 0;
    return row % 2 == 0 && p.new_group(row / 2);
  }
  DEVICE int group_row(int row) const { return GROUP_K != 0 ? row * 16 / GROUP_K : p.group_row(row / 2); }

  // `previous_is_free` is called once nothing reads the stage of the unit before any more.
  DEVICE void operator()(Sums<T> &sums, u32 stage) const {
    (*this)(sums, stage, [] {});
  }
  template <class F> DEVICE void operator()(Sums<T> &sums, u32 stage, const F &previous_is_free) const {
    if constexpr (T::SCALE_GROUPS) {
      if (p.group_shift >= T::UNIT_SHIFT) return one_group(sums, stage);
    }
    scaled_weights(sums, stage, previous_is_free);
    if constexpr (T::SCALE_GROUPS) wgmma::wait<0>();  // either way leaves the stage free
  }

  // All rows of the unit belong to one group: its sum is multiplied, not its weights.
  DEVICE void one_group(Sums<T> &sums, u32 stage) const {
    Zero<T::ACT, T::BITS> z[T::WORDS][2];
    lane.zeros(z, stage, 0);
    Sums<T> part;
    u32 a[2][T::WORDS][4];
#pragma unroll
    for (int row = 0; row < T::UNIT_TILES; row++) {
      u32 w[T::WORDS * T::VECTORS];
      lane.words(w, stage, row);
      if (row > 1) wgmma::wait<1>();  // the products that read this register set are done
#pragma unroll
      for (int j = 0; j < T::WORDS; j++) operand<T, false>(a[row % 2][j], w + j * T::VECTORS, z[j], {});
      wgmma::fence();
      const u64 x = wgmma::descriptor(stage + row / 4 * T::TOKENS * X_ROW_BYTES) + row % 4 * 2;  // 32 bytes on
#pragma unroll
      for (int j = 0; j < T::WORDS; j++) {
        using Product = wgmma::Product<T::ACT, T::TOKEN_TILES>;
        if (row == 0)
          Product::start(part[j], a[row % 2][j], x);
        else
          Product::run(part[j], a[row % 2][j], x);
      }
      wgmma::commit();
    }
    u32 s[T::WORDS];
    float f[T::WORDS][2];
    lane.scales(s, stage, 0);
    scales_as_float<T>(f, s, p.scales_bf16);
    settle(part);
    each_sum<T>([&](int j, int tile, int i) { sums[j][tile][i] += f[j][i / 2] * part[j][tile][i]; });
  }

  template <class F> DEVICE void scaled_weights(Sums<T> &sums, u32 stage, const F &previous_is_free) const {
    u32 scale[T::WORDS][2];
    Zero<T::ACT, T::BITS> z[T::WORDS][2];
    columns(scale, z, stage, 0);
    u32 a[2][T::WORDS][4];
#pragma unroll
    for (int row = 0; row < T::UNIT_TILES; row++) {
      if (row > 0 && begins_group(row)) columns(scale, z, stage, group_row(row));
      u32 w[T::WORDS * T::VECTORS];
      lane.words(w, stage, row);
      wgmma::wait<1>();  // the products that read this register set are done
      if (row == 1) previous_is_free();
#pragma unroll
      for (int j = 0; j < T::WORDS; j++) operand<T>(a[row % 2][j], w + j * T::VECTORS, z[j], scale[j]);
      wgmma::fence();
      const u64 x = wgmma::descriptor(stage + row / 4 * T::TOKENS * X_ROW_BYTES) + row % 4 * 2;  // 32 bytes on
#pragma unroll
      for (int j = 0; j < T::WORDS; j++)
        wgmma::Product<T::ACT, T::TOKEN_TILES>::run(sums[j], a[row % 2][j], x);
      wgmma::commit();
    }
  }
};
