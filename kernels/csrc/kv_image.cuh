// How fp16 tiles lie for warpgroup products (sm_90a): in blocks of COLUMNS columns, whose rows are swizzled.
//
//     COLUMNS 64 (HEAD_DIM 64, 128, 256), 32 (96) or 16 (80): rows of 128, 64 or 32 bytes with the swizzle of that width:
//     of a block, the 16-byte chunk c of row r lies at place c ^ (r * row bytes / 128 % chunks of a row)
//
// kv_unpack.cu writes tiles of K and V in this form to memory; kv_flash_sm90a.cu copies them as they are.
#pragma once
#include "kv_tile.cuh"
#include "kv_wgmma.cuh"

constexpr int COLUMNS = HEAD_DIM % 64 == 0 ? 64 : HEAD_DIM % 32 == 0 ? 32 : 16;
constexpr int BLOCK_ROW = 2 * COLUMNS, BLOCK_CHUNKS = COLUMNS / 8;  // bytes, chunks of 16 bytes
// Slots of a tile: two of K and two of V fill the shared memory; at 64 three warpgroups' registers bound the scores.
constexpr int TOKENS = HEAD_DIM == 64 ? 96 : HEAD_DIM == 256 ? 64 : 128;
constexpr int TILE_BYTES = TOKENS * HEAD_DIM * 2;  // of K or of V
constexpr int CHUNKS = HEAD_DIM / 8;               // of a row
static_assert(TILE_BYTES % 1024 == 0 && TOKENS * BLOCK_ROW % 1024 == 0, "swizzles repeat every 1024 bytes");

// Where chunk `chunk` of a row lies in a tile of `rows` rows, in bytes.
DEVICE int image(int row, int chunk, int rows) {
  return (chunk / BLOCK_CHUNKS * rows + row) * BLOCK_ROW + ((chunk % BLOCK_CHUNKS ^ row * BLOCK_ROW / 128 % BLOCK_CHUNKS) << 4);
}

// The descriptor of a tile at a shared address: start / 16, bytes from block to block / 16 (for operands read across their
// rows), bytes of eight rows / 16, swizzle of 128, 64 or 32 bytes.
DEVICE u64 image_descriptor(u32 address, int rows) {
  constexpr u64 SWIZZLE = COLUMNS == 64 ? 1 : COLUMNS == 32 ? 2 : 3;
  return ((address & 0x3FFFF) >> 4) | (u64(rows * BLOCK_ROW >> 4) << 16) | (u64(8 * BLOCK_ROW >> 4) << 32) | (SWIZZLE << 62);
}

// What a descriptor's start moves by for 16 columns `step` of a tile of `rows` rows, and for `rows` rows.
DEVICE constexpr u64 columns_on(int step, int rows) {
  return step / (COLUMNS / 16) * (rows * BLOCK_ROW >> 4) + step % (COLUMNS / 16) * 2;
}
DEVICE constexpr u64 rows_on(int rows) { return rows * BLOCK_ROW >> 4; }
