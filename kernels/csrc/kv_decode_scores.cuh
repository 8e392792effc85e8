// Decode attention: S = K q^T of a tile, K's codes as operand A, the queries of eight heads as operand B.
#pragma once
#include "kv_decode_tile.cuh"

// A lane's words of row `row` of K: bytes t * 4 WORDS and on; the tail's two bytes one to a half.
DEVICE void load_keys(u32 (&words)[WORDS + TAIL], u32 codes, int row, int t) {
  const int from = t * 4 * WORDS;
  if constexpr (WORDS % 4 == 0) {
#pragma unroll
    for (int i = 0; i < WORDS; i += 4) {
      const uint4 v = ptx::load_shared_16(codes + place(row, from + 4 * i));
      words[i] = v.x, words[i + 1] = v.y, words[i + 2] = v.z, words[i + 3] = v.w;
    }
  } else if constexpr (WORDS % 2 == 0) {
#pragma unroll
    for (int i = 0; i < WORDS; i += 2) {
      const uint2 v = ptx::load_shared_8(codes + place(row, from + 4 * i));
      words[i] = v.x, words[i + 1] = v.y;
    }
  } else {
#pragma unroll
    for (int i = 0; i < WORDS; i++) words[i] = ptx::load_shared_4(codes + place(row, from + 4 * i));
  }
  if constexpr (TAIL) {
    const u32 v = ptx::load_shared_2(codes + row * ROW + 16 * WORDS + 2 * t);
    words[WORDS] = ptx::permute_bytes(v, 0, 0x4140);
  }
}

// The channel of code `n` of word `word` of a lane.
DEVICE int key_channel(int word, int n, int t) {
  if (TAIL && word == WORDS) return 32 * WORDS + 4 * t + n;
  return (t * 4 * WORDS + 4 * word) * (8 / BITS) + n;
}

// q as operand B: two registers a step of 16 channels, in the order in which K's words give them.
struct Queries {
  u32 b[STEPS][2];

  DEVICE void make(const float *q, int g, int t) {
    const float *row = q + g * PITCH;
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
      int c[4];  // low pair, high pair
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int second = i % 2, high = i / 2;
        if (BITS == 8)
          c[i] = key_channel(step, 2 * second + high, t);
        else if (TAIL && step == STEPS - 1)
          c[i] = key_channel(WORDS, 2 * second + high, t);
        else
          c[i] = key_channel(step / 2, 2 * (step % 2) + high + 4 * second, t);
      }
      constexpr float SHARE = BITS == 4 ? 0.0625f : 1.0f;
      b[step][0] = Number<FP16>::pack(row[c[0]], row[c[1]]);
      b[step][1] = Number<FP16>::pack(row[c[2]] * SHARE, row[c[3]] * SHARE);
    }
  }
};

// S of a tile: s[i][0], s[i][1] row 16 i + g, heads 2t and 2t + 1; s[i][2], s[i][3] row g + 8. In units of 2^-24.
DEVICE void score(float (&s)[TOKEN_TILES][4], u32 codes, const Queries &q, int g, int t) {
  u32 words[TOKEN_TILES][2][WORDS + TAIL];
#pragma unroll
  for (int i = 0; i < TOKEN_TILES; i++) {
    load_keys(words[i][0], codes, 16 * i + g, t);
    load_keys(words[i][1], codes, 16 * i + g + 8, t);
    s[i][0] = s[i][1] = s[i][2] = s[i][3] = 0;
  }
#pragma unroll
  for (int step = 0; step < STEPS; step++) {
    const bool tail = TAIL && step == STEPS - 1;
    const int word = BITS == 8 ? step : tail ? WORDS : step / 2;
#pragma unroll
    for (int i = 0; i < TOKEN_TILES; i++) {
      u32 x = words[i][0][word], y = words[i][1][word];
      if (BITS == 4 && !tail && step % 2) x >>= 8, y >>= 8;
      const u32 a[4] = {x & LOW, y & LOW, BITS == 4 ? x & HIGH : x >> 8 & LOW, BITS == 4 ? y & HIGH : y >> 8 & LOW};
      Number<FP16>::product(s[i], a, q.b[step][0], q.b[step][1], s[i]);
    }
  }
}
