// Integer products with mma.sync and cp.async: every card from sm_80 on, and few tokens on sm_90 too.
//
//   y (M, N) 16 bit = sx * sw * (codes (M, K) s8 or s4  *  (q - z)), q (K, N) 4 or 8 bit in tiles of 16 x 64
//
//   block   one column tile of TILE_N, at most TOKENS tokens, whole tiles or a run of units (int_schedule.cuh)
//   slot    every SLOTS-th unit: 128 or 256 bytes of a token's codes; its own ring of stages, its own barrier
//   warp    64 columns: 4 words a lane and k-tile; a step's 2 or 4 words are the A operand of 16 columns
//
// Up to 32 tokens this is bound by the bytes of the weight. A step of 32 rows costs 8 instructions a word pair to
// unpack (s4: 8 for 64 rows; 8-bit codes: 4) and TOKENS / 8 products, half of what W4A16 spends. The weights of the next units are
// on their way across tiles, and the first ones before the previous kernel has finished.
//
// Requires K % 64 = 0, N % 64 = 0, codes 16-byte aligned rows, y 4-byte aligned; groups of 32 (not s4), 64, 128 or one.
// Tested by tests/gpu/test_int_gemm.py; lane arithmetic by tests/kernels/test_int_gemm.py.
#include "int_epilogue.cuh"
#include "int_operand.cuh"
#include "int_pipeline.cuh"

#ifndef ENTRY  // a build without defines compiles one kernel, for editors
#define ENTRY int_example
#define CONFIG FP16, S8_W4, 0, 8, 2, 4, 4, 128, 3
#define BLOCKS 2
#endif

using T = IntTile<CONFIG, MMA>;
#ifdef SHARED
static_assert(T::SHARED_BYTES == SHARED, "kernels/quarot/int_tiles.py and int_tile.cuh agree on shared memory");
#endif

extern __shared__ __align__(1024) u8 shared[];

// d += a * b, 16 x 8 x 32 s8 or 16 x 8 x 64 s4; the B registers of a step are the same bytes for both.
DEVICE void product(int (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  if constexpr (T::KIND == S4_W4)
    asm volatile("mma.sync.aligned.m16n8k64.row.col.s32.s4.s4.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// One step: 32 bytes of every token's row. `b` holds two steps of each token tile.
DEVICE void step_product(const Lane<T> &lane, IntSums<T> &part, const u32 (&b)[T::TOKEN_TILES][4], u32 stage, int step) {
  u32 w[T::STEP_TILES][T::WORDS * T::VECTORS];
#pragma unroll
  for (int i = 0; i < T::STEP_TILES; i++) lane.words(w[i], stage, step * T::STEP_TILES + i);
#pragma unroll
  for (int j = 0; j < T::WORDS; j++) {
    u32 a[4];
    int_operand::of_step<T>(a, w, j);
#pragma unroll
    for (int tile = 0; tile < T::TOKEN_TILES; tile++)
      product(part[j][tile], a, b[tile][step % 2 * 2], b[tile][step % 2 * 2 + 1]);
  }
}

DEVICE void unit_product(const IntProblem &p, const Lane<T> &lane, Sums<T> &sums, IntSums<T> &part, u32 stage, int unit) {
#pragma unroll
  for (int pair = 0; pair < T::STEPS / 2; pair++) {
    u32 b[T::TOKEN_TILES][4];
    const u32 piece = (4 * (pair % 2) + lane.lane / 8) ^ (lane.lane % 8);
    const u32 at = stage + pair / 2 * T::TOKENS * X_ROW_BYTES + lane.lane % 8 * X_ROW_BYTES + piece * 16;
#pragma unroll
    for (int tile = 0; tile < T::TOKEN_TILES; tile++) ptx::load_matrix_x4(b[tile], at + tile * 8 * X_ROW_BYTES);
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int step = 2 * pair + i;
      step_product(lane, part, b, stage, step);
      if constexpr (T::GROUPED) {
        const int row = p.group_row<T>(step);
        if (p.ends_group<T>(step) && p.has_group<T>(unit, row)) add_group<T>(p, lane, sums, part, stage, row);
      }
    }
  }
}

// A block's units, the first of which are on their way.
DEVICE void multiply(const IntProblem &p, const Lane<T> &lane, Feed<T> &feed, int slot, u32 base, u32 ring) {
  constexpr u32 RING = T::STAGES * T::STAGE_BYTES;
  u32 stage = ring, free_stage = ring + T::AHEAD * T::STAGE_BYTES;
  Run<T> run(p);
  while (run.more()) {
    const Segment segment = run.take(p);
    IntSums<T> part;
    Sums<T> sums;
    clear<T>(part);
    if constexpr (T::GROUPED) each_pair<T>(sums, [](int, int, float &a, float &b) { a = b = 0.0f; });
    for (int unit = segment.begin + slot; unit < segment.end; unit += T::SLOTS) {
      ptx::copy_async_wait<T::AHEAD - 1>();
      slot_meets<T>(slot);
      feed.ask(free_stage);
      unit_product(p, lane, sums, part, stage, unit);
      free_stage = free_stage + T::STAGE_BYTES == ring + RING ? ring : free_stage + T::STAGE_BYTES;
      stage = stage + T::STAGE_BYTES == ring + RING ? ring : stage + T::STAGE_BYTES;
    }
    if constexpr (!T::GROUPED) as_sums<T>(sums, part);
    finish_int_segment<T>(p, sums, segment, base + T::RING_BYTES);
  }
}

extern "C" __global__ void __launch_bounds__(T::THREADS, BLOCKS)
    ENTRY(const u8 *x, const float *act_scales, const u8 *weight, const u8 *scales, const u8 *bias, u8 *y, float *partials,
          u32 *flags, int m, int n, int k, int ldx, int ldy, int group_shift, int scales_bf16) {
  const IntProblem p{{x, weight, scales, nullptr, nullptr, y, partials, flags, m, n, k, ldx, ldy, group_shift,
                      scales_bf16 != 0}, act_scales, bias};
  const int slot = threadIdx.x / T::SLOT_THREADS, in_slot = threadIdx.x % T::SLOT_THREADS;
  const u32 base = ptx::shared_address(shared), ring = base + slot * T::STAGES * T::STAGE_BYTES;
  const Lane<T> lane(in_slot / 32, in_slot % 32);
  ptx::launch_dependents();
  Feed<T> feed(p, slot, in_slot);
  Feed<T> first = feed;
  first.ask_weights(ring);
  ptx::wait_for_previous_kernel();
  feed.ask_activations(ring);
  multiply(p, lane, feed, slot, base, ring);
}
