// GPTQ words (K * BITS / 32, N), codes of 32 / BITS rows in a word, to the Marlin tile (K / 16, N * BITS / 2).
//
// A thread makes one output word: it knows from kernels/layout.py which codes lie there and fetches each from its
// word. `perm`, if given, names the source row of each packed row (act-order). Bound by bytes, BITS / 8 in and out
// for each code; the 8 (4) source words of neighbours come from the caches.
// The next kernel is not let in early: a product asks for its weights, which these may be, before it waits.
// Requires: K % 16 = 0, N % 64 = 0. Tested by tests/gpu/test_other_ops.py against the engine's own repack.
#include "ptx.cuh"

#ifndef ENTRY
#define ENTRY repack_example
#define BITS 4
#endif

DEVICE u32 code_at(const u32 *words, int k, int column, int n) {
  constexpr int PER_WORD = 32 / BITS;
  const u32 word = words[static_cast<u64>(k / PER_WORD) * n + column];
  return word >> (k % PER_WORD * BITS) & ((1u << BITS) - 1);
}

extern "C" __global__ void __launch_bounds__(256) ENTRY(const u32 *words, const int *perm, u32 *out, int k, int n) {
  ptx::wait_for_previous_kernel();
  const int row_words = n / 2 * BITS;
  const u64 total = static_cast<u64>(k / 16) * row_words;
  for (u64 at = blockIdx.x * 256ull + threadIdx.x; at < total; at += gridDim.x * 256ull) {
    const int row = static_cast<int>(at / row_words), word = static_cast<int>(at % row_words);
    const int lane_words = BITS;  // words of a lane in one tile: 4 or 8
    const int chunk = word / (32 * lane_words), inside = word % (32 * lane_words);
    const int lane = inside / lane_words, j = inside % lane_words;
    const int g8 = lane / 4, t = lane % 4;
    u32 packed = 0;
#pragma unroll
    for (int slot = 0; slot < 32 / BITS; slot++) {
      const int column = chunk * 64 + g8 + (BITS == 4 ? 16 * j + 8 * (slot / 2 % 2) : 8 * j);
      const int packed_row = 16 * row + 2 * t + slot / (BITS == 4 ? 4 : 2) + 8 * (slot % 2);
      const int source = perm == nullptr ? packed_row : perm[packed_row];
      packed |= code_at(words, source, column, n) << (slot * BITS);
    }
    out[at] = packed;
  }
}
