// The product of one unit on wgmma: two register sets of weights take turns, and nothing is waited for at its end.
#pragma once
#include "epilogue.cuh"
#include "weights.cuh"
#include "wgmma.cuh"

template <class T> struct WgmmaUnit {
  const Problem &p;
  const Lane<T> lane;

  DEVICE WgmmaUnit(const Problem &problem, int warp, int lane_) : p(problem), lane(warp, lane_) {}

  DEVICE void finish(Sums<T> &sums) const {
    wgmma::wait<0>();
#pragma unroll
    for (int j = 0; j < T::WORDS; j++)
#pragma unroll
      for (int tile = 0; tile < T::TOKEN_TILES; tile++)
#pragma unroll
        for (int i = 0; i < 4; i++) asm volatile("" : "+f"(sums[j][tile][i])::"memory");
  }

  DEVICE void columns(u32 (&scale)[T::WORDS][2], Zero<T::ACT, T::BITS> (&z)[T::WORDS][2], u32 stage, int row) const {
    u32 s[T::WORDS];
    lane.scales(s, stage, row);
    lane.zeros(z, stage, row);
    scales_as_pairs<T>(scale, s, p.scales_bf16);
  }

  // `previous_is_free` is called once nothing reads the stage of the unit before any more.
  DEVICE void operator()(Sums<T> &sums, u32 stage) const {
    (*this)(sums, stage, [] {});
  }
  template <class F> DEVICE void operator()(Sums<T> &sums, u32 stage, const F &previous_is_free) const {
    u32 scale[T::WORDS][2];
    Zero<T::ACT, T::BITS> z[T::WORDS][2];
    columns(scale, z, stage, 0);
    u32 a[2][T::WORDS][4];
#pragma unroll
    for (int row = 0; row < T::UNIT_TILES; row++) {
      if (row % 2 == 0 && row > 0 && p.new_group(row / 2)) columns(scale, z, stage, p.group_row(row / 2));
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
