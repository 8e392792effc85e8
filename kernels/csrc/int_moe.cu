// The grouped integer product of a mixture of experts, with mma.sync and cp.async.
//
//   y (R, N) 16 bit = sx[rows] * sw * (codes (T, K)[rows] s8 or s4  *  (q - z) of each pair's expert)
//
// Tiles, rings and products are those of int_mma.cu, on the same bytes; the schedule is that of moe_schedule.cuh, worked
// out on the device from `offsets`: nothing of the launch depends on the routing. A token is quantized once, whatever
// the number of experts that read it.
//
// Requires what int_mma.cu requires, offsets that rise from 0 to at most R, rows of the codes that exist, y contiguous.
// Tested by tests/gpu/test_int_moe.py; the schedule by tests/kernels/test_moe_schedule.py.
#include "int_moe.cuh"

#ifndef ENTRY  // a build without defines compiles one kernel, for editors
#define ENTRY int_moe_example
#define CONFIG FP16, S8_W4, 0, 8, 2, 4, 4, 128, 3
#define BLOCKS 2
#endif

using T = Grouped<IntTile<CONFIG, MMA>>;
#ifdef SHARED
static_assert(T::SHARED_BYTES == SHARED, "kernels/quarot/int_tiles.py and int_tile.cuh agree on shared memory");
#endif

extern __shared__ __align__(1024) u8 shared[];

extern "C" __global__ void __launch_bounds__(T::THREADS, BLOCKS)
    ENTRY(const u8 *x, const float *act_scales, const u8 *weight, const u8 *scales, const int *rows, const int *offsets,
          u8 *y, float *partials, u32 *flags, int pairs, int n, int k, int ldx, int experts, int group_shift,
          int scales_bf16) {
  MoeProblem p{{x, weight, scales, nullptr, nullptr, y, partials, flags, pairs, n, k, ldx, n, group_shift,
                scales_bf16 != 0},
               rows, offsets, experts, nullptr, nullptr, 0, 0, 1};
  const IntProblem one{p, act_scales, nullptr};
  const int slot = threadIdx.x / T::SLOT_THREADS, in_slot = threadIdx.x % T::SLOT_THREADS;
  const u32 base = ptx::shared_address(shared), ring = base + slot * T::STAGES * T::STAGE_BYTES;
  const Lane<T> lane(in_slot / 32, in_slot % 32);

  ptx::launch_dependents();
  ptx::wait_for_previous_kernel();
  schedule<T>(p, reinterpret_cast<u32 *>(shared + T::SHARED_BYTES));
  clear_tail(p, T::THREADS);
  if (blockIdx.x >= p.blocks) return;

  Feed<T> feed(p, slot, in_slot);
#pragma unroll 1
  for (int i = 0; i < T::AHEAD; i++) feed.ask(ring + i * T::STAGE_BYTES);
  multiply<T>(one, p, lane, feed, slot, ring, [&](Sums<T> &sums, const Segment &segment) {
    finish_int_moe<T>(one, p, sums, segment, base + T::RING_BYTES);
  });
}
