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
#include "entry.cuh"
#include "unit_wgmma.cuh"
#include "w4a16.cuh"

#ifndef ENTRY
#define ENTRY w4a16_example
#define CONFIG FP16, 4, 0, 64, 4, 2, 4, 64, 4
#define BLOCKS 1
#endif

using T = Tile<CONFIG, WGMMA>;
#ifdef SHARED
static_assert(T::SHARED_BYTES == SHARED, "kernels/tiles.py and tile.cuh agree on the bytes of shared memory");
#endif

W4A16_ENTRY(ENTRY, BLOCKS, T::THREADS, (w4a16<T, WgmmaUnit<T>>))
