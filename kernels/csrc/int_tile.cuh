// The shape of an integer product's block, after that of tile.cuh: who holds what, and where its bytes lie.
//
// As there, the weight is the A operand and a lane's words are its own registers; activations are codes of 8 or 4 bit.
// A step is what one product of a tensor core takes of K: 32 bytes of a token's row, 2 or 4 tiles of 16 rows of K.
#pragma once
#include "tile.cuh"

// How wide the operands are: activations (s8 or s4) and weights. The order of activations follows from it.
constexpr int S8_W4 = 0, S8_W8 = 1, S4_W4 = 2;  // P32, Q32, S64

template <int ACT_,      // FP16 or BF16: the output
          int KIND_,     // S8_W4, S8_W8 or S4_W4
          int GROUP_STEPS_,  // 0: one scale a column, and sums are integers; else scales change along K, and sums are
                             // fp32: 1 if the launch says where, else the steps of a group
          int TOKENS_, int WARPS_, int SLOTS_, int WORDS_,
          int ROW_,      // bytes of a token's row in a unit: 128 or 256
          int STAGES_,
          int ENGINE_>   // MMA or TMA
struct IntTile {
  static constexpr int ACT = ACT_, KIND = KIND_, TOKENS = TOKENS_, WARPS = WARPS_, SLOTS = SLOTS_, WORDS = WORDS_;
  static constexpr int ROW = ROW_, STAGES = STAGES_, BITS = KIND == S8_W8 ? 8 : 4;
  static constexpr int GROUP_STEPS = GROUP_STEPS_;
  static constexpr bool GROUPED = GROUP_STEPS != 0, WARPGROUP = ENGINE_ == TMA, PRODUCER = ENGINE_ == TMA;
  static constexpr bool INTEGER_SUMS = !GROUPED;

  // Two warps share a chunk, two words each. A lane's 16 bytes there are four words, so that all lanes reading the
  // same two would use half of the banks: lanes 8 to 15 and 24 to 31 take the other warp's words instead, and results
  // change places on their way out (int_store.cuh).
  static constexpr bool SPREAD = WARPGROUP && WORDS == 2 && SLOTS_ == 1;

  static constexpr int STEP_BYTES = 32, STEPS = ROW / STEP_BYTES, HALVES = ROW / X_ROW_BYTES;
  static constexpr int STEP_SHIFT = KIND == S4_W4 ? 6 : 5, STEP_K = 1 << STEP_SHIFT, STEP_TILES = STEP_K / 16;
  static constexpr int UNIT_K = STEPS * STEP_K, UNIT_TILES = UNIT_K / 16;
  static constexpr int UNIT_GROUPS = STEPS / (GROUPED ? GROUP_STEPS : STEPS);  // where the length is known
  static constexpr float FOLD = KIND == S8_W4 ? 0.0625f : 1.0f;  // 4-bit codes become 16 (q - 8)

  static constexpr int TOKEN_TILES = TOKENS / 8;
  static constexpr int SLOT_THREADS = WARPS * 32, THREADS = SLOT_THREADS * SLOTS;
  static constexpr int BLOCK_THREADS = THREADS + (PRODUCER ? 128 : 0);
  static constexpr int WARP_N = 16 * WORDS, TILE_N = WARP_N * WARPS, CHUNKS = TILE_N / CHUNK_N;
  static constexpr int VECTORS = BITS / 4, CHUNK_BYTES = 512 * VECTORS, PAIRS = 2 * WORDS;
  static constexpr int OWNED = PAIRS % SLOTS ? PAIRS : PAIRS / SLOTS;  // pairs whose columns a slot scales
  static constexpr int AHEAD = PRODUCER ? STAGES : STAGES - 1;

  static constexpr int EXCHANGE_UNITS = 7, BAND = 4;  // of scheduler.cuh
  static constexpr int PRODUCER_REGISTERS = 40;

  static constexpr int X_BYTES = TOKENS * ROW, W_BYTES = CHUNKS * UNIT_TILES * CHUNK_BYTES;
  static constexpr int SCALE_ROW_BYTES = CHUNKS * 128;
  static constexpr int W_AT = X_BYTES, SCALES_AT = W_AT + W_BYTES;
  static constexpr int STAGE_BYTES = (SCALES_AT + (GROUPED ? STEPS * SCALE_ROW_BYTES : 0) + 1023) / 1024 * 1024;
  static constexpr int PARTIAL_FLOATS = TILE_N * TOKENS;
  static constexpr int RING_BYTES = SLOTS * STAGES * STAGE_BYTES;
  static constexpr int SUM_BYTES = (SLOTS - 1) * TILE_N * TOKENS * 4;
  static constexpr int BARRIERS_AT = RING_BYTES + SUM_BYTES, BARRIER_BYTES = PRODUCER ? 512 : 0;
  static constexpr bool STAGED_ROWS = PRODUCER && SLOTS == 1 && WORDS > 1;
  static constexpr int ROWS_AT = BARRIERS_AT + BARRIER_BYTES, WARP_ROWS_BYTES = SPREAD ? 2048 + 4 * TOKENS : 8 * 2 * WARP_N;
  static constexpr int SHARED_BYTES = ROWS_AT + (STAGED_ROWS ? WARPS * WARP_ROWS_BYTES : 0);

  static_assert(ACT == FP16 || ACT == BF16, "the output is fp16 or bf16");
  static_assert(KIND == S8_W4 || KIND == S8_W8 || (KIND == S4_W4 && !WARPGROUP), "wgmma knows no s4");
  static_assert(TOKENS % 8 == 0 && TOKENS >= 8, "tokens come in eights");
  static_assert(WORDS == 4 || WORDS == 2 || WORDS == 1, "a warp takes a chunk, half or a quarter of one");
  static_assert(TILE_N % CHUNK_N == 0, "a block takes whole chunks");
  static_assert(PAIRS >= SLOTS, "the slots share out the accumulator pairs");
  static_assert(ROW == 128 || ROW == 256, "a unit is one or two rows of 128 bytes a token");
  static_assert(!WARPGROUP || GROUP_STEPS == 0 || GROUP_STEPS == 2 || GROUP_STEPS == 4, "groups of 64 or 128");
  static_assert(AHEAD >= 1, "one unit in use, one on its way");
  static_assert(!WARPGROUP || WARPS % 4 == 0, "wgmma is issued by four warps");
  static_assert(!PRODUCER || 16 * STAGES * SLOTS <= BARRIER_BYTES, "the barriers have room");
};

// The arguments of every integer product, in the order of the launch. `x` are codes and `ldx` the bytes of their rows;
// the bias is here and not in Problem, because it is added together with the scales.
struct IntProblem : Problem {
  const float *act_scales;  // (M)
  const u8 *column_bias;    // (N) of the output's type, or null

  // Whether the group of a step ends with it.
  template <class T> DEVICE bool ends_group(int step) const {
    return ((step + 1) & ((1u << (group_shift - T::STEP_SHIFT)) - 1)) == 0;
  }
  template <class T> DEVICE int group_row(int step) const { return step >> (group_shift - T::STEP_SHIFT); }
  // Whether a group of a unit, by its row in the stage, begins before K ends: past it there are no scales.
  template <class T> DEVICE bool has_group(int unit, int row) const { return unit * T::UNIT_K + (row << group_shift) < k; }
};

// A lane's integer sums, placed as the fp32 sums of epilogue.cuh.
template <class T> using IntSums = int[T::WORDS][T::TOKEN_TILES][4];
