// Decode attention: Y += V^T P of a tile, V's codes as operand A, the weights of eight heads as operand B.
#pragma once
#include "kv_decode_tile.cuh"

// The sums of a warp: Y as operand D, tile i: rows g and g + 8, heads 2t and 2t + 1.
struct Sums {
  float y[STEPS][4], z[4], largest[2], total[2];  // z: row 0 has the sums of p z

  DEVICE void clear() {
#pragma unroll
    for (int i = 0; i < STEPS; i++) y[i][0] = y[i][1] = y[i][2] = y[i][3] = 0;
    z[0] = z[1] = z[2] = z[3] = 0;
    largest[0] = largest[1] = NOTHING;
    total[0] = total[1] = 0;
  }

  DEVICE void rescale(float first, float second) {
#pragma unroll
    for (int i = 0; i < STEPS; i++) y[i][0] *= first, y[i][1] *= second, y[i][2] *= first, y[i][3] *= second;
    z[0] *= first, z[1] *= second;
    total[0] *= first, total[1] *= second;
  }

  // Adds 16 tokens of V, rows `row` and on, with their weights as operand B.
  DEVICE void add(u32 codes, u32 params, int row, const u32 (&p)[2], int g, int t) {
    const int odd = SWIZZLED ? t & 1 : 0;  // lanes of odd t read the second row of a pair first: other banks
    const int first = row + 2 * t + odd, second = row + 2 * t + 1 - odd;
    const u32 low = odd ? 0x1054u : 0x5410u, high = odd ? 0x3276u : 0x7632u;
    u32 words[4][(UNITS + 1) / 2];
    load_values(words[0], codes, first, g);
    load_values(words[1], codes, second, g);
    load_values(words[2], codes, first + 8, g);
    load_values(words[3], codes, second + 8, g);
#pragma unroll
    for (int unit = 0; unit < UNITS; unit++) {
      const u32 pick = unit % 2 ? high : low;
      u32 x = ptx::permute_bytes(words[0][unit / 2], words[1][unit / 2], pick);
      u32 y = ptx::permute_bytes(words[2][unit / 2], words[3][unit / 2], pick);
      if constexpr (BITS == 8) {
        multiply(unit, x & LOW, x >> 8 & LOW, y & LOW, y >> 8 & LOW, p);
      } else {
        multiply(2 * unit, x & LOW, x & HIGH, y & LOW, y & HIGH, p);
        x >>= 8, y >>= 8;
        multiply(2 * unit + 1, x & LOW, x & HIGH, y & LOW, y & HIGH, p);
      }
    }
    if constexpr (TAIL) {
      u32 bytes[4];
#pragma unroll
      for (int i = 0; i < 4; i++)
        bytes[i] = ptx::load_shared_1(codes + (row + 2 * t + (i & 1) + (i & 2) * 4) * ROW + 16 * UNITS + g);
      const u32 x = bytes[0] | bytes[1] << 16, y = bytes[2] | bytes[3] << 16;
      multiply(STEPS - 1, x & LOW, x & HIGH, y & LOW, y & HIGH, p);
    }
    const uint2 pair = ptx::load_shared_8(params + 4 * (row + 2 * t)), next = ptx::load_shared_8(params + 4 * (row + 2 * t + 8));
    const u32 zeros[4] = {g ? 0 : ptx::permute_bytes(pair.x, pair.y, 0x7632), 0,
                          g ? 0 : ptx::permute_bytes(next.x, next.y, 0x7632), 0};
    Number<FP16>::product(z, zeros, p[0], p[1], z);
  }

  DEVICE void multiply(int tile, u32 a0, u32 a1, u32 a2, u32 a3, const u32 (&p)[2]) {
    const u32 a[4] = {a0, a1, a2, a3};
    Number<FP16>::product(y[tile], a, p[0], p[1], y[tile]);
  }

  // A lane's bytes of a row of V: 2 UNITS from g * 2 UNITS on.
  DEVICE static void load_values(u32 (&words)[(UNITS + 1) / 2], u32 codes, int row, int g) {
    const int at = g * 2 * UNITS;
    if constexpr (UNITS % 8 == 0) {
#pragma unroll
      for (int i = 0; i < UNITS / 2; i += 4) {
        const uint4 v = ptx::load_shared_16(codes + place(row, at + 4 * i));
        words[i] = v.x, words[i + 1] = v.y, words[i + 2] = v.z, words[i + 3] = v.w;
      }
    } else if constexpr (UNITS % 4 == 0) {
      const uint2 v = ptx::load_shared_8(codes + place(row, at));
      words[0] = v.x, words[1] = v.y;
    } else if constexpr (UNITS % 2 == 0) {
#pragma unroll
      for (int i = 0; i < UNITS / 2; i++) words[i] = ptx::load_shared_4(codes + place(row, at + 4 * i));
    } else {
#pragma unroll
      for (int i = 0; i < UNITS; i += 2) {
        words[i / 2] = ptx::load_shared_2(codes + place(row, at + 2 * i));
        if (i + 1 < UNITS) words[i / 2] |= ptx::load_shared_2(codes + place(row, at + 2 * i + 2)) << 16;
      }
    }
  }
};

// Results lie by position: 8 (2 tile + second) + g is Y's tile, row g (second = 0) or g + 8 (1). Their channel:
DEVICE int channel_of(int position) {
  const int g = position % 8, second = position / 8 % 2, tile = position / 16;
  if (BITS == 8) return g * 2 * UNITS + 2 * tile + second;
  if (TAIL && tile == STEPS - 1) return 32 * UNITS + 2 * g + second;
  return (g * 2 * UNITS + 2 * (tile / 2)) * 2 + 2 * (tile % 2) + second;
}
