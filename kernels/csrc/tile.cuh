// Who holds what: the shape of one block's work, and where its bytes lie in shared memory.
//
//   block   = SLOTS slots; a slot takes every SLOTS-th unit (64 or 128 rows of K) of the block's range of work
//   slot    = WARPS warps side by side along N, sharing one tile of activations
//   warp    = WORDS tiles of 16 columns (WORDS = 4: a whole chunk of 64 columns, 2: half of one)
//   lane    = g8 = lane / 4 (column g8 and g8 + 8 of each 16), t = lane % 4 (tokens 2t, 2t + 1 of each 8)
//
// The product is transposed: the weight is the A operand (rows = columns n of the layer), the activations are the B
// operand (columns = tokens), so a token tile can be as narrow as 8 and a lane's word is a whole A operand.
#pragma once
#include "dequant.cuh"

constexpr int CHUNK_N = 64;        // columns of one run of the packed row
constexpr int X_ROW_BYTES = 128;   // one token's activations of 64 rows of K
constexpr int SMALLEST_GROUP_SHIFT = 5;  // groups of 32

// How a product is made and its operands are brought: mma.sync with cp.async; sm_90a's warpgroup product with cp.async
// by the same warps; the warpgroup product with a warp of its own that asks the copy engine.
constexpr int MMA = 0, WGMMA = 1, TMA = 2;

template <int ACT_,         // FP16 or BF16: activations and output
          int BITS_,        // 4 or 8
          int ZEROS_,       // 1: zero points are read, 0: the zero is 2^(BITS-1)
          int TOKENS_,      // tokens of a block: a multiple of 8
          int WARPS_,       // warps of a slot
          int SLOTS_,       // slots of a block
          int WORDS_,       // 4, 2 or 1
          int UNIT_K_,      // rows of K in a unit: 64, or 128 where K is a multiple of it
          int STAGES_,      // units in flight per slot, the one in use included
          int ENGINE_>      // MMA, WGMMA or TMA
struct Tile {
  static constexpr int ACT = ACT_, BITS = BITS_, TOKENS = TOKENS_, WARPS = WARPS_, SLOTS = SLOTS_;
  static constexpr int WORDS = WORDS_, UNIT_K = UNIT_K_, STAGES = STAGES_;
  static constexpr int UNIT_TILES = UNIT_K / 16, HALVES = UNIT_K / 64, CHECKS = UNIT_K / 32;
  static constexpr bool ZEROS = ZEROS_ != 0, WARPGROUP = ENGINE_ != MMA, PRODUCER = ENGINE_ == TMA;
  static constexpr bool INTEGER_SUMS = false, SPREAD = false;
  static constexpr int UNIT_SHIFT = UNIT_K == 128 ? 7 : 6;  // groups of a whole unit and more

  static constexpr int TOKEN_TILES = TOKENS / 8;
  static constexpr int SLOT_THREADS = WARPS * 32, THREADS = SLOT_THREADS * SLOTS;  // that multiply
  static constexpr int BLOCK_THREADS = THREADS + (PRODUCER ? 128 : 0);  // a warpgroup of producers: a warp a slot
  static constexpr int WARP_N = 16 * WORDS, TILE_N = WARP_N * WARPS, CHUNKS = TILE_N / CHUNK_N;
  static constexpr int VECTORS = BITS / 4;                  // 16-byte vectors of a lane in a 16 x 64 tile
  static constexpr int CHUNK_BYTES = 512 * VECTORS;         // one 16 x 64 tile
  static constexpr int PAIRS = 2 * WORDS;                   // (word, half) pairs: accumulator pairs of a token tile

  // Few tokens: the group's sum is multiplied by its scale. Many: each weight is, which needs no second sum, for which
  // there would be no registers.
  static constexpr bool SCALE_SUMS = TOKENS <= 32 && !WARPGROUP;
  // With the warpgroup product that pays up to 32 tokens, for groups of a whole unit: it saves two of the 13 instructions
  // a word costs, where unpacking bounds the kernel, and each unit's end leaves its stage free.
  static constexpr bool SCALE_GROUPS = TOKENS <= 32 && ENGINE_ == WGMMA && UNIT_K == 128;

  // Units asked for before the first is used. wgmma goes on reading a stage's activations during the next unit, if it is
  // not waited for: such a stage is refilled one unit later. A producer waits for each stage by itself.
  static constexpr int AHEAD = PRODUCER ? STAGES : STAGES - 1 - (WARPGROUP && !SCALE_GROUPS ? 1 : 0);

  // Whole tiles in turns (scheduler.cuh): units that handing sums over costs a block. No bands: a tile's bytes of weights
  // are few, and finding a place in a band takes registers.
  static constexpr int EXCHANGE_UNITS = PRODUCER && TOKENS >= 128 ? 512 / UNIT_K : 0, BAND = 0;
  static constexpr int PRODUCER_REGISTERS = 56;  // of a thread of a producer

  static constexpr int X_BYTES = TOKENS * X_ROW_BYTES * HALVES;
  static constexpr int W_BYTES = CHUNKS * UNIT_TILES * CHUNK_BYTES;
  static constexpr int SCALE_ROW_BYTES = CHUNKS * 128, ZERO_ROW_BYTES = CHUNKS * 8 * BITS;
  static constexpr int W_AT = X_BYTES, SCALES_AT = W_AT + W_BYTES, ZEROS_AT = SCALES_AT + CHECKS * SCALE_ROW_BYTES;
  static constexpr int STAGE_BYTES = (ZEROS_AT + (ZEROS ? CHECKS * ZERO_ROW_BYTES : 0) + 1023) / 1024 * 1024;
  static constexpr int PARTIAL_FLOATS = TILE_N * TOKENS;    // of one block, in the workspace
  static constexpr int RING_BYTES = SLOTS * STAGES * STAGE_BYTES;
  static constexpr int SUM_BYTES = (SLOTS - 1) * TILE_N * TOKENS * 4;
  static constexpr int BARRIERS_AT = RING_BYTES + SUM_BYTES;  // a producer's: a pair for each stage
  static constexpr int BARRIER_BYTES = PRODUCER ? 512 : 0;
  static constexpr bool STAGED_ROWS = PRODUCER && SLOTS == 1 && WORDS > 1;  // results leave by way of shared memory
  static constexpr int ROWS_AT = BARRIERS_AT + BARRIER_BYTES, WARP_ROWS_BYTES = 8 * 2 * WARP_N;
  static constexpr int SHARED_BYTES = ROWS_AT + (STAGED_ROWS ? WARPS * WARP_ROWS_BYTES : 0);
  static_assert(!PRODUCER || 16 * STAGES * SLOTS <= BARRIER_BYTES, "the barriers have room");

  static_assert(ACT == FP16 || ACT == BF16, "activations are fp16 or bf16");
  static_assert(BITS == 4 || BITS == 8, "codes are 4 or 8 bits wide");
  static_assert(TOKENS % 8 == 0 && TOKENS >= 8, "tokens come in eights");
  static_assert(WORDS == 4 || WORDS == 2 || WORDS == 1, "a warp takes a chunk, half or a quarter of one");
  static_assert(TILE_N % CHUNK_N == 0, "a block takes whole chunks");
  static_assert(PAIRS >= SLOTS, "the slots share out the accumulator pairs");
  static_assert(UNIT_K == 64 || UNIT_K == 128, "a unit is 64 or 128 rows");
  static_assert(AHEAD >= 1, "one unit in use, one on its way");
  static_assert(!WARPGROUP || WARPS % 4 == 0, "wgmma is issued by four warps");
};

// Calls f(word, token tile, register) for each of a lane's sums.
template <class T, class F> DEVICE void each_sum(const F &f) {
#pragma unroll
  for (int j = 0; j < T::WORDS; j++)
#pragma unroll
    for (int tile = 0; tile < T::TOKEN_TILES; tile++)
#pragma unroll
      for (int i = 0; i < 4; i++) f(j, tile, i);
}

// The arguments of every W4A16 kernel, in the order of the launch.
struct Problem {
  const u8 *x;             // (M, ldx) 16-bit activations
  const u8 *weight;        // (K / 16, N * BITS / 2) words; null where a map brings them
  const u8 *scales;        // (groups, N) 16-bit, grouped order; null where a map brings them
  const u8 *zeros;         // (groups, N * BITS / 32) words or null
  const u8 *bias;          // (N) of the activations' type, or null
  u8 *y;                   // (M, ldy)
  float *partials;         // a block's sums, or two tiles of them where blocks share sums out; MARKED: all marks before and after
  u32 *flags;              // of blocks, or of their warps or warpgroups; zero before and after
  int m, n, k, ldx, ldy;
  int group_shift;         // log2 of the group size; 31 where one group spans K
  bool scales_bf16;

  // Groups may change every 32 rows: whether those from `check` * 32 of a unit on belong to another group than those
  // before, and in which row of the stage's scales they are found.
  DEVICE bool new_group(int check) const { return (check & ((1u << (group_shift - SMALLEST_GROUP_SHIFT)) - 1)) == 0; }
  DEVICE int group_row(int check) const { return check >> (group_shift - SMALLEST_GROUP_SHIFT); }
};
