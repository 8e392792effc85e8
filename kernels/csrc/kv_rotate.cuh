// R3 of 64 query rows on the tensor cores: y = q H, with H's entries 0, 1 and -1, so that every product is exact.
//
// H = I (x) H_m (x) H_r; a power of two is done in pieces of 64 columns, H_64 by the tensor cores and the rest as
// butterflies between pieces; 80 and 96 as one product with the whole matrix, whose signs the launch gives.
#pragma once
#include "kv_image.cuh"

constexpr bool POWER = (HEAD_DIM & (HEAD_DIM - 1)) == 0;
constexpr int PIECE = POWER ? 64 : HEAD_DIM, PIECES = HEAD_DIM / PIECE, PIECE_STEPS = PIECE / 16, PIECE_TILES = PIECE / 8;
constexpr int MATRIX_BYTES = PIECE * PIECE * 2;

// Entry (k, n) of H in 16 bits.
DEVICE u32 entry(const Turn &turn, int k, int n, u32 one) {
  if (POWER) {
    if (k >> turn.log_r != n >> turn.log_r) return 0;
    return one | (__popc(k & n & ((1 << turn.log_r) - 1)) & 1) << 15;
  }
  if (k / turn.block != n / turn.block) return 0;
  const int in = k % turn.block, out = n % turn.block, r = 1 << turn.log_r, column = out / r;
  u32 minus = __popc(in & out & (r - 1));
  if (turn.m > 1) minus += turn.signs[in / r * ((turn.m + 31) / 32) + column / 32] >> column % 32;
  return one | (minus & 1) << 15;
}

// Writes H as an operand, rows n: every thread of `threads` makes some chunks of eight.
DEVICE void make_matrix(u8 *to, const Turn &turn, bool bf16, int thread, int threads) {
  const u32 one = bf16 ? 0x3F80 : 0x3C00;
  for (int i = thread; i < PIECE * PIECE / 8; i += threads) {
    const int n = i / (PIECE / 8), chunk = i % (PIECE / 8);
    u32 words[4];
#pragma unroll
    for (int j = 0; j < 4; j++)
      words[j] = entry(turn, 8 * chunk + 2 * j, n, one) | entry(turn, 8 * chunk + 2 * j + 1, n, one) << 16;
    *reinterpret_cast<uint4 *>(to + image(n, chunk, PIECE)) = make_uint4(words[0], words[1], words[2], words[3]);
  }
}

// The sums of y = q H for 64 rows that one piece's product gives, from the request to the result.
template <int QUERIES, bool BF16> DEVICE void multiply_pieces(float (&y)[CHUNKS][4], u64 q, u64 matrix) {
#pragma unroll
  for (int i = 0; i < CHUNKS; i++) y[i][0] = y[i][1] = y[i][2] = y[i][3] = 0;  // or the compiler keeps what was there
  wgmma::hold(y);
  wgmma::fence();
#pragma unroll
  for (int piece = 0; piece < PIECES; piece++) {
    float(&part)[PIECE_TILES][4] = reinterpret_cast<float(&)[PIECE_TILES][4]>(y[piece * PIECE_TILES]);
#pragma unroll
    for (int step = 0; step < PIECE_STEPS; step++) {
      const u64 a = q + columns_on(piece * PIECE_STEPS + step, QUERIES), b = matrix + columns_on(step, PIECE);
      if constexpr (BF16)
        wgmma::Attention<PIECE_TILES>::scores_bf16(part, a, b, step > 0);
      else
        wgmma::Attention<PIECE_TILES>::scores(part, a, b, step > 0);
    }
  }
  wgmma::commit();
  wgmma::wait<0>();
  wgmma::hold(y);
}

// y = q H for a warpgroup's 64 rows; `q` and `matrix` are descriptors, q's tile has QUERIES rows.
template <int QUERIES> DEVICE void rotate(float (&y)[CHUNKS][4], u64 q, u64 matrix, const Turn &turn, bool bf16) {
  if (bf16)
    multiply_pieces<QUERIES, true>(y, q, matrix);
  else
    multiply_pieces<QUERIES, false>(y, q, matrix);
#pragma unroll
  for (int distance = 1; distance < PIECES; distance *= 2) {
    if ((PIECE * distance) >> turn.log_r) continue;  // pieces of different blocks do not meet
#pragma unroll
    for (int piece = 0; piece < PIECES; piece++) {
      if (piece & distance) continue;
#pragma unroll
      for (int i = 0; i < PIECE_TILES; i++) {
#pragma unroll
        for (int c = 0; c < 4; c++) {
          float &a = y[piece * PIECE_TILES + i][c], &b = y[(piece + distance) * PIECE_TILES + i][c];
          const float sum = a + b, difference = a - b;
          a = sum, b = difference;
        }
      }
    }
  }
}
