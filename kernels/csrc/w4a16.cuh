// y[m, n] = sum_k x[m, k] * (q[k, n] - z[group(k), n]) * s[group(k), n] + bias[n], rounded once.
//
// The order of events of every W4A16 kernel; the product of one unit is the parameter UNIT. See w4a16_sm80.cu for
// what bounds it and why it is built like this.
#pragma once
#include "epilogue.cuh"
#include "weights.cuh"

template <class T, class UNIT> DEVICE void w4a16(const Problem &p) {
  extern __shared__ __align__(1024) u8 shared[];
  const int slot = threadIdx.x / T::SLOT_THREADS, in_slot = threadIdx.x % T::SLOT_THREADS;
  const int warp = in_slot / 32, lane = in_slot % 32;
  const u32 base = ptx::shared_address(shared), ring = base + slot * T::STAGES * T::STAGE_BYTES;

  const int token_blocks = (p.m + T::TOKENS - 1) / T::TOKENS;
  const int column_tiles = (p.n + T::TILE_N - 1) / T::TILE_N;
  const u32 units = p.k / UNIT_K, total = static_cast<u32>(token_blocks) * column_tiles * units;
  Run run(blockIdx.x, gridDim.x, total, units);
  const Loader<T> loader(p, in_slot, token_blocks);
  const Epilogue<T> epilogue{p, base + T::RING_BYTES, slot, warp, lane};
  const UNIT product(p, warp, lane);

  ptx::launch_dependents();
  UnitCursor<T> ahead(run, slot);
  {
    UnitCursor<T> first(run, slot);
#pragma unroll
    for (int i = 0; i < T::AHEAD; i++) {
      if (first.valid()) loader.weights(ring + i * T::STAGE_BYTES, first.segment.tile, first.unit);
      ptx::copy_async_commit();
      first.advance();
    }
  }
  ptx::wait_for_previous_kernel();
#pragma unroll
  for (int i = 0; i < T::AHEAD; i++) {
    if (ahead.valid()) loader.activations(ring + i * T::STAGE_BYTES, ahead.segment.tile, ahead.unit);
    ptx::copy_async_commit();
    ahead.advance();
  }

  constexpr u32 RING = T::STAGES * T::STAGE_BYTES;
  u32 stage = ring, free_stage = ring + T::AHEAD * T::STAGE_BYTES;
  while (run.more()) {
    const Segment segment = run.take();
    Sums<T> sums;
    epilogue.each_pair(sums, [](int, int, float &a, float &b) { a = b = 0.0f; });
    for (int unit = segment.begin + slot; unit < segment.end; unit += T::SLOTS) {
      ptx::copy_async_wait<T::AHEAD - 1>();
      product.before_barrier();
      ptx::barrier(1 + slot, T::SLOT_THREADS);
      if (ahead.valid()) {
        loader.weights(free_stage, ahead.segment.tile, ahead.unit);
        loader.activations(free_stage, ahead.segment.tile, ahead.unit);
      }
      ptx::copy_async_commit();
      ahead.advance();
      product(sums, stage);
      free_stage = free_stage + T::STAGE_BYTES == ring + RING ? ring : free_stage + T::STAGE_BYTES;
      stage = stage + T::STAGE_BYTES == ring + RING ? ring : stage + T::STAGE_BYTES;
    }
    product.finish(sums);
    epilogue.over_slots(sums);
    if (segment.begin != 0) {
      epilogue.hand_over(sums, blockIdx.x);
      continue;
    }
    const u32 tile_end = (segment.tile + 1) * units;
    u32 last = blockIdx.x + 1;
    while (last < gridDim.x && run_begin(last, gridDim.x, total) < tile_end) last++;
    if (last > blockIdx.x + 1) epilogue.collect(sums, blockIdx.x + 1, last);
    epilogue.store(sums, segment.tile, token_blocks);
  }
}

// The entry of one kernel: everything a launch passes, gathered into a Problem.
#define W4A16_ENTRY(NAME, TILE, UNIT, BLOCKS)                                                                        \
  extern "C" __global__ void __launch_bounds__(TILE::THREADS, BLOCKS)                                                \
      NAME(const u8 *x, const u8 *weight, const u8 *scales, const u8 *zeros, const u8 *bias, u8 *y,                  \
           float *partials, u32 *flags, int m, int n, int k, int ldx, int ldy, int group_shift, int scales_bf16) {   \
    const Problem problem{x, weight, scales, zeros, bias, y, partials, flags, m, n, k, ldx, ldy, group_shift,        \
                          scales_bf16 != 0};                                                                         \
    w4a16<TILE, UNIT>(problem);                                                                                      \
  }
