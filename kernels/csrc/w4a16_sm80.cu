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
#include "entry.cuh"
#include "unit_mma.cuh"
#include "w4a16.cuh"

#ifndef ENTRY  // a build without defines compiles one kernel, for editors
#define ENTRY w4a16_example
#define CONFIG FP16, 4, 0, 8, 2, 4, 4, 64, 4
#define BLOCKS 2
#endif

using T = Tile<CONFIG, MMA>;
#ifdef SHARED
static_assert(T::SHARED_BYTES == SHARED, "kernels/tiles.py and tile.cuh agree on the bytes of shared memory");
#endif

W4A16_ENTRY(ENTRY, BLOCKS, T::THREADS, (w4a16<T, MmaUnit<T>>))
