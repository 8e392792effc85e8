// The integer product of a block with mma.sync: a step, a unit, all units of a block's run.
#pragma once
#include "int_epilogue.cuh"
#include "int_operand.cuh"
#include "int_pipeline.cuh"

// d += a * b, 16 x 8 x 32 s8 or 16 x 8 x 64 s4; the B registers of a step are the same bytes for both.
template <class T> DEVICE void product(int (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  if constexpr (T::KIND == S4_W4)
    ptx::multiply_s4(d, a, b0, b1);
  else
    ptx::multiply_s8(d, a, b0, b1);
}

// One step: 32 bytes of every token's row. `b` holds two steps of each token tile.
template <class T>
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
      product<T>(part[j][tile], a, b[tile][step % 2 * 2], b[tile][step % 2 * 2 + 1]);
  }
}

template <class T>
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
      step_product<T>(lane, part, b, stage, step);
      if constexpr (T::GROUPED) {
        const int row = p.template group_row<T>(step);
        if (p.template ends_group<T>(step) && p.template has_group<T>(unit, row)) add_group<T>(p, lane, sums, part, stage, row);
      }
    }
  }
}

// A block's units, the first of which are on their way; `work` says which they are, `finish` takes a segment's sums.
template <class T, class Finish>
DEVICE void multiply(const IntProblem &p, const Problem &work, const Lane<T> &lane, Feed<T> &feed, int slot, u32 ring,
                     const Finish &finish) {
  constexpr u32 RING = T::STAGES * T::STAGE_BYTES;
  u32 stage = ring, free_stage = ring + T::AHEAD * T::STAGE_BYTES;
  Run<T> run(work);
  while (run.more()) {
    const Segment segment = run.take(work);
    IntSums<T> part;
    Sums<T> sums;
    clear<T>(part);
    if constexpr (T::GROUPED) each_pair<T>(sums, [](int, int, float &a, float &b) { a = b = 0.0f; });
    for (int unit = segment.begin + slot; unit < segment.end; unit += T::SLOTS) {
      ptx::copy_async_wait<T::AHEAD - 1>();
      slot_meets<T>(slot);
      feed.ask(free_stage);
      unit_product<T>(p, lane, sums, part, stage, unit);
      free_stage = free_stage + T::STAGE_BYTES == ring + RING ? ring : free_stage + T::STAGE_BYTES;
      stage = stage + T::STAGE_BYTES == ring + RING ? ring : stage + T::STAGE_BYTES;
    }
    if constexpr (!T::GROUPED) as_sums<T>(sums, part);
    finish(sums, segment);
  }
}
