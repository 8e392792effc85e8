// y[m, n] = sum_k x[m, k] * (q[k, n] - z[group(k), n]) * s[group(k), n] + bias[n], rounded once.
//
// The order of events of every W4A16 kernel; the product of one unit is the parameter UNIT. See w4a16_sm80.cu for
// what bounds it and why it is built like this.
#pragma once
#include "epilogue.cuh"
#include "pipeline.cuh"
#include "scatter.cuh"

// A block's units, the first of which are on their way.
template <class T, class UNIT>
DEVICE void multiply(const Problem &p, const UNIT &product, Feed<T> &feed, int slot, u32 base, u32 ring) {
  constexpr u32 RING = T::STAGES * T::STAGE_BYTES;
  u32 stage = ring, free_stage = ring + T::AHEAD * T::STAGE_BYTES;
  Run<T> run(p);
  while (run.more()) {
    const Segment segment = run.take(p);
    Sums<T> sums;
    each_pair<T>(sums, [](int, int, float &a, float &b) { a = b = 0.0f; });
    for (int unit = segment.begin + slot; unit < segment.end; unit += T::SLOTS) {
      ptx::copy_async_wait<T::AHEAD - 1>();
      if constexpr (T::WARPGROUP) ptx::fence_async_proxy();
      slot_meets<T>(slot);
      feed.ask(free_stage);
      product(sums, stage);
      free_stage = free_stage + T::STAGE_BYTES == ring + RING ? ring : free_stage + T::STAGE_BYTES;
      stage = stage + T::STAGE_BYTES == ring + RING ? ring : stage + T::STAGE_BYTES;
    }
    product.finish(sums);
    end_segment<T>(p, sums, segment, base + T::RING_BYTES);
  }
}

template <class T, class UNIT> DEVICE void w4a16(const Problem &p) {
  extern __shared__ __align__(1024) u8 shared[];
  const int slot = threadIdx.x / T::SLOT_THREADS, in_slot = threadIdx.x % T::SLOT_THREADS;
  const int warp = in_slot / 32, lane = in_slot % 32;
  const u32 base = ptx::shared_address(shared), ring = base + slot * T::STAGES * T::STAGE_BYTES;

  const UNIT product(p, warp, lane);

  ptx::launch_dependents();
  Feed<T> feed(p, slot, in_slot);
  Feed<T> first = feed;
  first.ask_weights(ring);
  ptx::wait_for_previous_kernel();
  feed.ask_activations(ring);
  multiply<T>(p, product, feed, slot, base, ring);
}
