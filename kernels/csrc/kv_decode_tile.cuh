// Decode attention: a tile of slots, how it comes to shared memory, and what of it a lane holds.
#pragma once
#include "kv_cache.cuh"

constexpr int HEADS = 8;
constexpr int ROW = HEAD_DIM * BITS / 8;                    // bytes
constexpr int TILE = ROW <= 96 ? 32 : 16, TOKEN_TILES = TILE / 16;
constexpr int STAGES = ROW <= 128 ? 3 : 2;
constexpr int CODE_BYTES = TILE * ROW, STAGE = 2 * CODE_BYTES + 2 * 4 * TILE;
constexpr int RING = STAGES * STAGE;                        // of a warp
constexpr int WORDS = ROW / 16;                             // of a lane, of a row of K
constexpr bool TAIL = ROW % 16 != 0;                        // 8 bytes more, two of a lane
constexpr int STEPS = HEAD_DIM / 16;                        // of 16 channels
constexpr int UNITS = ROW / 16;                             // pairs of bytes of a lane, of a row of V; TAIL: and a byte
constexpr u32 LOW = BITS == 4 ? 0x000F000Fu : 0x00FF00FFu, HIGH = 0x00F000F0u;
constexpr bool SWIZZLED = ROW == 64;
constexpr float NOTHING = -1e30f;
constexpr int PITCH = HEAD_DIM + 4;                         // floats of a row of queries or results: other banks
constexpr int BLOCKS_PER_SM = (HEAD_DIM <= 128 ? 16 : 8) / WARPS;

// Where byte `at` of a row lies. With rows of 64 bytes, lanes t = 2, 3 of V's reads would meet the banks of t = 0, 1.
DEVICE int place(int row, int at) {
  return row * ROW + (SWIZZLED ? at ^ ((row & 4) << 3) : at);
}

struct Problem {
  const u8 *codes;
  const u32 *params;
  const int *pages;      // of this sequence
  int kv_head, kv_heads;

  DEVICE void fetch(u32 stage, int tile, int page, int lane) const {
    const int slot = tile * TILE % PAGE;
#pragma unroll
    for (int which = 0; which < 2; which++) {
      const i64 row = ((static_cast<i64>(page) * 2 + which) * kv_heads + kv_head) * PAGE + slot;
      const u8 *from = codes + row * ROW;
      const u32 to = stage + which * CODE_BYTES;
      const u32 place_here = SWIZZLED ? lane * 16 ^ (lane & 16) << 1 : lane * 16;  // of 16 bytes; bit 4 of lane: row & 4
#pragma unroll
      for (int i = 0; i < (CODE_BYTES + 511) / 512; i++)
        if (CODE_BYTES % 512 == 0 || i < CODE_BYTES / 512 || lane < CODE_BYTES % 512 / 16)
          ptx::copy_async_16(to + place_here + 512 * i, from + lane * 16 + 512 * i);
      if (lane < TILE / 4)
        ptx::copy_async_16(stage + 2 * CODE_BYTES + which * 4 * TILE + lane * 16, params + row + lane * 4);
    }
  }
};
