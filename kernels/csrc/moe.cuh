// y[r] = x[rows[r]] * the weight of r's expert, for R pairs sorted by expert: w4a16.cuh with another scheduler.
//
// Which weight a block reads depends on the routing, so nothing is asked for before the previous kernel has finished.
#pragma once
#include "moe_pipeline.cuh"
#include "w4a16.cuh"

template <class T, class UNIT> DEVICE void moe(MoeProblem &p) {
  extern __shared__ __align__(1024) u8 shared[];
  const int slot = threadIdx.x / T::SLOT_THREADS, in_slot = threadIdx.x % T::SLOT_THREADS;
  const int warp = in_slot / 32, lane = in_slot % 32;
  const u32 base = ptx::shared_address(shared), ring = base + slot * T::STAGES * T::STAGE_BYTES;

  const UNIT product(p, warp, lane);

  ptx::launch_dependents();
  ptx::wait_for_previous_kernel();
  schedule<T>(p, reinterpret_cast<u32 *>(shared + T::SHARED_BYTES));
  clear_tail(p, T::THREADS);
  if (blockIdx.x >= p.blocks) return;

  Feed<T> feed(p, slot, in_slot);
  Feed<T> first = feed;
  first.ask_weights(ring);
  feed.ask_activations(ring);
  multiply<T>(p, product, feed, slot, base, ring);
}
