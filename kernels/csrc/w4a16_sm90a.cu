// W4A16 with wgmma, the weight as the register operand, on the same bytes as w4a16_sm80.cu.
//
//   y (M, N) 16 bit = x (M, K) 16 bit  *  (q - z) * s, q (K, N) 4 or 8 bit in tiles of 16 x 64
//
//   slot   one or two warpgroups side by side along N; a slot's units have a ring and a barrier of their own
//   warp   WORDS words a lane and k-tile: WORDS products of 64 (n) x TOKENS x 16, whose row block w is warp w's own
//          16 columns; the activations are read from shared memory, K-major, by descriptor
//
// Bound by the bytes up to about 32 tokens, by the tensor cores above: a warpgroup's product of 64 x 128 x 16 takes 64
// clocks, and the 13 instructions a word costs to unpack and scale fit beside it. Two register sets take turns: while
// the products of one k-tile run, the next one's weights are unpacked. No product is waited for between units.
// Each weight is rounded to 16 bit after scaling, as the engines do.
//
// Requires what w4a16_sm80.cu requires; sm_90a. Tested by tests/gpu/test_w4a16.py.
#include "w4a16.cuh"
#include "wgmma.cuh"

#ifndef ENTRY
#define ENTRY w4a16_example
#define CONFIG FP16, 4, 0, 64, 4, 2, 4, 4
#define BLOCKS 1
#endif

using T = Tile<CONFIG, 1>;
#ifdef SHARED
static_assert(T::SHARED_BYTES == SHARED, "kernels/tiles.py and tile.cuh agree on the bytes of shared memory");
#endif

struct WgmmaUnit {
  const Lane<T> lane;
  const bool small_groups, scales_bf16;

  DEVICE WgmmaUnit(const Problem &p, int warp, int lane_)
      : lane(warp, lane_), small_groups(p.group_shift == 5), scales_bf16(p.scales_bf16) {}

  // The copies of this thread have arrived: let wgmma see them.
  DEVICE void before_barrier() const { ptx::fence_async_proxy(); }

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
    scales_as_pairs<T>(scale, s, scales_bf16);
  }

  DEVICE void operator()(Sums<T> &sums, u32 stage) const {
    u32 scale[T::WORDS][2];
    Zero<T::ACT, T::BITS> z[T::WORDS][2];
    columns(scale, z, stage, 0);
    u32 a[2][T::WORDS][4];
    const u64 x = wgmma::descriptor(stage);
#pragma unroll
    for (int row = 0; row < UNIT_TILES; row++) {
      if (row == 2 && small_groups) columns(scale, z, stage, 1);
      u32 w[T::WORDS * T::VECTORS];
      lane.words(w, stage, row);
      wgmma::wait<1>();  // the products that read this register set are done
#pragma unroll
      for (int j = 0; j < T::WORDS; j++) operand<T>(a[row % 2][j], w + j * T::VECTORS, z[j], scale[j]);
      wgmma::fence();
#pragma unroll
      for (int j = 0; j < T::WORDS; j++)
        wgmma::Product<T::ACT, T::TOKEN_TILES>::run(sums[j], a[row % 2][j], x + row * 2);  // 32 bytes on
      wgmma::commit();
    }
  }
};

W4A16_ENTRY(ENTRY, T, WgmmaUnit, BLOCKS)
