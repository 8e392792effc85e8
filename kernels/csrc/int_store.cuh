// Results of a tile whose words are spread over the lanes of two warps (IntTile::SPREAD), to the output.
//
// Of each 8 columns that a warp made, columns 0, 1, 4, 5 are its own and 2, 3, 6, 7 the other warp's, in the same place
// of that warp's columns. So each warp leaves 16 tokens in shared memory as it has them, and a lane puts together the
// 16 bytes of a token from its own warp's row and the other's. Two buffers take turns: one barrier for 16 tokens. The
// tokens' scales are brought first, all at once: a trip to the L2 for every 8 tokens would take longer than the rest.
#pragma once
#include "int_scaling.cuh"

template <class T> struct SpreadStore {
  static constexpr int ROW_BYTES = 64, TILE_BYTES = 8 * ROW_BYTES;  // of a warp: 32 columns of 8 tokens
  static constexpr int ROUND = 2, SCALES_AT = 2 * ROUND * TILE_BYTES;  // token tiles of a buffer
  static_assert(T::TOKEN_TILES % ROUND == 0, "whole buffers");
  static_assert(T::WARP_ROWS_BYTES == SCALES_AT + 4 * T::TOKENS, "room for both buffers and the scales");

  const IntProblem &p;
  const Scaling<T> &scaling;
  const u32 staging;  // the rows of all warps
  const int warp, lane;

  DEVICE static u32 piece_at(int row, int piece) { return row * ROW_BYTES + (piece ^ (row / 2 & 3)) * 16; }
  DEVICE u32 rows_of(int of_warp) const {
    return staging + of_warp * T::WARP_ROWS_BYTES;
  }
  DEVICE void bring_scales(int token0) const {
    // One address for all: six would cost the registers of other values.
    const float *const from = p.act_scales + token0 + lane;
    const int left = p.m - token0 - lane;
    const u32 to = rows_of(warp) + SCALES_AT + lane * 4;
#pragma unroll
    for (int i = 0; i < T::TOKENS; i += 32)
      if (T::TOKENS % 32 == 0 || i + lane < T::TOKENS)
        ptx::store_shared_4(to + i * 4, i < left ? __ldcg(from + i) * T::FOLD : 0.0f);
    __syncwarp();
  }
  // A token tile's values, scaled only now: all of them at once would not fit beside their sums.
  DEVICE void packed(u32 (&v)[4], const Sums<T> &sums, int tile) const {
    const float2 by = ptx::load_shared_float2(rows_of(warp) + SCALES_AT + (tile * 8 + lane % 4 * 2) * 4);
#pragma unroll
    for (int pair = 0; pair < 4; pair++) {
      const float *const sum = &sums[pair / 2][tile][pair % 2 * 2];
      v[pair] = Number<T::ACT>::pack(scaling.value(sum[0], by.x, pair), scaling.value(sum[1], by.y, pair));
    }
  }

  DEVICE void operator()(const Sums<T> &sums, int token0, int column0) const {
    bring_scales(token0);
    if (p.ldy % 8 == 0 && reinterpret_cast<u64>(p.y) % 16 == 0)
      rows(sums, token0, column0);
    else
      pairs(sums, token0, column0);
  }

  DEVICE void rows(const Sums<T> &sums, int token0, int column0) const {
    const u32 own = rows_of(warp), other = rows_of(warp ^ 1);
    const u32 matrix_row = piece_at(lane % 8, lane / 8), at = piece_at(lane / 4, lane % 4);
    u8 *to = p.y + (static_cast<u64>(token0 + lane / 4) * p.ldy + column0 + lane % 4 * 8) * 2;
    int left = p.m - token0 - lane / 4;  // tokens from this lane's on
    const u32 step = p.ldy * 16;
#pragma unroll
    for (int first = 0; first < T::TOKEN_TILES; first += ROUND) {
      const u32 buffer = first / ROUND % 2 * ROUND * TILE_BYTES;
#pragma unroll
      for (int i = 0; i < ROUND; i++) {
        u32 v[4];
        packed(v, sums, first + i);
        ptx::store_matrix_x4_transposed(own + buffer + i * TILE_BYTES + matrix_row, v);
      }
      ptx::barrier(1 + warp / 2, 64);
#pragma unroll
      for (int i = 0; i < ROUND; i++) {
        const u32 from = buffer + i * TILE_BYTES + at;
        const uint4 mine = ptx::load_shared_16(own + from), theirs = ptx::load_shared_16(other + from);
        if (left > 0) *reinterpret_cast<uint4 *>(to) = make_uint4(mine.x, theirs.y, mine.z, theirs.w);
        to += ptx::opaque(step), left -= 8;
      }
    }
    ptx::barrier(1 + warp / 2, 64);  // the next tile writes the first buffer again
  }

  // Two columns at a time, where rows do not begin at multiples of 16 bytes.
  DEVICE void pairs(const Sums<T> &sums, int token0, int column0) const {
    const int moved = lane % 2 * 2;  // the transposed pair 2t: of the other warp's words where t is odd
    const int first = column0 / CHUNK_N * CHUNK_N + ((column0 % CHUNK_N / 16) ^ moved) * 16 + 2 * (lane % 4);
#pragma unroll
    for (int tile = 0; tile < T::TOKEN_TILES; tile++) {
      u32 v[4];
      packed(v, sums, tile);
      const int token = token0 + tile * 8 + lane / 4;
      u8 *const to = p.y + (static_cast<u64>(token) * p.ldy + first) * 2;
#pragma unroll
      for (int pair = 0; pair < 4; pair++) {
        const u32 transposed = ptx::transpose_matrix(v[pair]);
        if (token < p.m) *reinterpret_cast<u32 *>(to + 16 * pair) = transposed;
      }
    }
  }
};
