// W4A16 with mma.sync and cp.async: every card from sm_80 on, and few tokens on sm_90 too.
//
//   y (M, N) 16 bit = x (M, K) 16 bit  *  (q - z) * s, q (K, N) 4 or 8 bit in tiles of 16 x 64
//
//   block   one column tile of TILE_N, at most TOKENS tokens, a run of units of K (scheduler.cuh)
//   slot    every SLOTS-th unit: 64 rows of K; its own ring of stages, its own barrier
//   warp    64 columns: 4 words a lane and k-tile; one word is the A operand of 16 columns x 16 rows
//
// Bytes of a unit and warp: 64 x 64 codes = 2048 (4 bit), 128 of scales, 128 a token of activations shared by the
// slot's warps. Operations: 4 k-tiles x 4 words x TOKENS / 8 products of 16 x 8 x 16.
//
// Up to 16 tokens this is bound by the bytes of the weight: 20 bytes a clock and multiprocessor on an H200, so 26
// issue slots for a word of a warp. A word costs 9 instructions to unpack, TOKENS / 8 products and 3 to 4 of loads,
// scales and loop. The weights of the next units are always on their way (STAGES - 1 units a slot), across tiles, and
// the first ones are asked for before the previous kernel has finished. K is split over the slots of a block, so a
// tile's sum is ready after one exchange in shared memory; blocks that share a tile exchange through the workspace.
//
// Requires: K % 64 = 0, N % 64 = 0, x and y rows 16-byte aligned (y: 4), groups of 32, 64, 128 or one.
// Tested by tests/gpu/test_w4a16.py; lane arithmetic by tests/kernels/test_fragments.py.
#include "w4a16.cuh"

#ifndef ENTRY  // a build without defines compiles one kernel, for editors
#define ENTRY w4a16_example
#define CONFIG FP16, 4, 0, 8, 2, 4, 4, 4
#define BLOCKS 2
#endif

using T = Tile<CONFIG, 0>;
#ifdef SHARED
static_assert(T::SHARED_BYTES == SHARED, "kernels/tiles.py and tile.cuh agree on the bytes of shared memory");
#endif

struct MmaUnit {
  const Lane<T> lane;
  const u32 x_row, x_row_bits;  // this lane's row address for ldmatrix, and its swizzle
  const bool small_groups, scales_bf16;

  DEVICE MmaUnit(const Problem &p, int warp, int lane_)
      : lane(warp, lane_), x_row((lane_ % 8) * X_ROW_BYTES), x_row_bits(lane_ % 8), small_groups(p.group_shift == 5),
        scales_bf16(p.scales_bf16) {}

  DEVICE void before_barrier() const {}
  DEVICE void finish(Sums<T> &) const {}

  // B operands of k-tiles 2 pair and 2 pair + 1, all tokens.
  DEVICE void tokens(u32 (&b)[T::TOKEN_TILES][4], u32 stage, int pair) const {
    const u32 piece = (4 * pair + lane.lane / 8) ^ x_row_bits;
#pragma unroll
    for (int tile = 0; tile < T::TOKEN_TILES; tile++)
      ptx::load_matrix_x4(b[tile], stage + tile * 8 * X_ROW_BYTES + x_row + piece * 16);
  }

  // Two k-tiles, 32 rows: never more than one group.
  DEVICE void half_unit(Sums<T> &sums, u32 stage, int pair, const Zero<T::ACT, T::BITS> (&z)[T::WORDS][2],
                        const u32 (&scale)[T::WORDS][2]) const {
    u32 b[T::TOKEN_TILES][4];
    tokens(b, stage, pair);
#pragma unroll
    for (int i = 0; i < 2; i++) {
      u32 w[T::WORDS * T::VECTORS];
      lane.words(w, stage, 2 * pair + i);
#pragma unroll
      for (int j = 0; j < T::WORDS; j++) {
        u32 a[4];
        operand<T>(a, w + j * T::VECTORS, z[j], scale[j]);
#pragma unroll
        for (int tile = 0; tile < T::TOKEN_TILES; tile++)
          Number<T::ACT>::product(sums[j][tile], a, b[tile][2 * i], b[tile][2 * i + 1]);
      }
    }
  }

  DEVICE void add_scaled(Sums<T> &sums, Sums<T> &part, const u32 (&s)[T::WORDS]) const {
    float f[T::WORDS][2];
    scales_as_float<T>(f, s, scales_bf16);
#pragma unroll
    for (int j = 0; j < T::WORDS; j++)
#pragma unroll
      for (int tile = 0; tile < T::TOKEN_TILES; tile++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
          sums[j][tile][i] += f[j][i / 2] * part[j][tile][i];
          part[j][tile][i] = 0.0f;
        }
  }

  DEVICE void operator()(Sums<T> &sums, u32 stage) const {
    u32 s[T::WORDS], scale[T::WORDS][2];
    Zero<T::ACT, T::BITS> z[T::WORDS][2];
    lane.scales(s, stage, 0);
    lane.zeros(z, stage, 0);
    if constexpr (T::SCALE_SUMS) {
      Sums<T> part;
#pragma unroll
      for (int i = 0; i < T::WORDS * T::TOKEN_TILES * 4; i++) (&part[0][0][0])[i] = 0.0f;
      half_unit(part, stage, 0, z, scale);
      if (small_groups) {
        add_scaled(sums, part, s);
        lane.scales(s, stage, 1);
        lane.zeros(z, stage, 1);
      }
      half_unit(part, stage, 1, z, scale);
      add_scaled(sums, part, s);
    } else {
      scales_as_pairs<T>(scale, s, scales_bf16);
      half_unit(sums, stage, 0, z, scale);
      if (small_groups) {
        lane.scales(s, stage, 1);
        lane.zeros(z, stage, 1);
        scales_as_pairs<T>(scale, s, scales_bf16);
      }
      half_unit(sums, stage, 1, z, scale);
    }
  }
};

W4A16_ENTRY(ENTRY, T, MmaUnit, BLOCKS)
