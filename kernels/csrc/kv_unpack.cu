// The quantized cache of some (sequence, KV head) pairs as fp16 tiles, as kv_flash_sm90a.cu reads them.
//
//     out [pair][tile][K, V][TILE_BYTES], each tile in the form of kv_image.cuh; value = (code - z) s, rounded once
//
// A block makes one tile of K or V, a thread 8 values at a time. Bound by bytes: HEAD_DIM BITS / 8 + 4 in, 2 HEAD_DIM out
// a row. Rows that no query sees become zeros where their tile is read (what was never written may be NaN); tiles that no
// query reads are left alone. Tested by tests/gpu/test_kv.py.
#include "kv_image.cuh"

constexpr int THREADS = 256, EACH = TOKENS * CHUNKS / THREADS;
static_assert(EACH * THREADS == TOKENS * CHUNKS, "every thread makes as many values");

// Eight values, their channels in order.
DEVICE uint4 in_order(uint4 v) {
  if (BITS == 8) return v;
  return make_uint4(ptx::permute_bytes(v.x, v.y, 0x5410), ptx::permute_bytes(v.z, v.w, 0x5410),
                    ptx::permute_bytes(v.x, v.y, 0x7632), ptx::permute_bytes(v.z, v.w, 0x7632));
}

extern "C" __global__ void __launch_bounds__(THREADS)
    ENTRY(const u8 *codes, const u32 *params, const int *block_table, const int *lengths, const int *padding, u8 *out,
          int kv_heads, int table_width, int tokens, int window, int first_pair) {
  const int tile = blockIdx.x / 2, which = blockIdx.x % 2, pair = first_pair + blockIdx.y, sequence = pair / kv_heads;
  ptx::wait_for_previous_kernel();
  ptx::launch_dependents();
  const int end = min(lengths[sequence], table_width * PAGE);
  const int padded = padding == nullptr ? 0 : max(0, padding[sequence]);
  const int begin = max(padded, window > 0 ? end - tokens - window + 1 : 0);
  if ((tile + 1) * TOKENS <= begin || tile * TOKENS >= end) return;

  const Cache cache{codes, params, block_table + static_cast<i64>(sequence) * table_width, pair % kv_heads, kv_heads};
  u32 words[EACH][BITS / 4], parameters[EACH];
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    const int at = threadIdx.x + i * THREADS, row = at / CHUNKS, chunk = at % CHUNKS, slot = tile * TOKENS + row;
    const bool exists = slot >= padded && slot < end;
    const i64 from = cache.row(exists ? cache.pages[slot / PAGE] : 0, which) + slot % PAGE;
    parameters[i] = exists ? params[from] : 0;
#pragma unroll
    for (int j = 0; j < BITS / 4; j++)
      words[i][j] = exists ? *reinterpret_cast<const u32 *>(codes + from * ROW + chunk * BITS + 4 * j) : 0;
  }
  u8 *to = out + ((static_cast<i64>(blockIdx.y) * (gridDim.x / 2) + tile) * 2 + which) * TILE_BYTES;
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    const int at = threadIdx.x + i * THREADS;
    const Affine affine(parameters[i]);
    uint4 values;
    if constexpr (BITS == 4)
      values = in_order(affine.eight(words[i][0]));
    else
      values = affine.eight(words[i][0], words[i][1]);
    *reinterpret_cast<uint4 *>(to + image(at / CHUNKS, at % CHUNKS, TOKENS)) = values;
  }
}
