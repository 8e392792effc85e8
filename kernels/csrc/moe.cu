// The grouped product of a mixture of experts, on mma.sync (sm_80 on) or wgmma (sm_90a).
//
//   y (R, N) 16 bit = x (T, K)[rows] 16 bit  *  the dequantized weight (K, N) of each pair's expert
//
// The tiles, rings and products are those of w4a16_sm80.cu and w4a16_sm90a.cu, on the same bytes. A token's few pairs
// fall on many experts, so most tiles have few tokens: the kernel is bound by the bytes of the experts that are used.
// Blocks find their work from `offsets` on the device; nothing of the launch depends on the routing.
//
// Requires what those kernels require, offsets that rise from 0 to at most R, rows of x that exist.
// Tested by tests/gpu/test_moe.py; the schedule's arithmetic by tests/kernels/test_moe_schedule.py.
#ifndef ENTRY
#define ENTRY moe_example
#define CONFIG FP16, 4, 0, 8, 2, 4, 4, 64, 4
#define BLOCKS 1
#define ENGINE MMA
#endif

#include "moe.cuh"
#include "unit_mma.cuh"
#if __CUDA_ARCH_FEAT_SM90_ALL
#include "unit_wgmma.cuh"
#endif

using T = Grouped<Tile<CONFIG, ENGINE>>;
#ifdef SHARED
static_assert(T::SHARED_BYTES == SHARED, "kernels/tiles.py and tile.cuh agree on the bytes of shared memory");
#endif

template <class T, bool WARPGROUP> struct UnitOf {
  using Type = MmaUnit<T>;
};
#if __CUDA_ARCH_FEAT_SM90_ALL
template <class T> struct UnitOf<T, true> {
  using Type = WgmmaUnit<T>;
};
#endif

extern "C" __global__ void __launch_bounds__(T::THREADS, BLOCKS)
    ENTRY(const u8 *x, const u8 *weight, const u8 *scales, const u8 *zeros, const int *rows, const int *offsets, u8 *y,
          float *partials, u32 *flags, int pairs, int n, int k, int ldx, int experts, int group_shift,
          int scales_bf16) {
  MoeProblem p{{x, weight, scales, zeros, nullptr, y, partials, flags, pairs, n, k, ldx, n, group_shift,
                scales_bf16 != 0},
               rows, offsets, experts, nullptr, nullptr, 0, 0, 1};
  moe<T, UnitOf<T, T::WARPGROUP>::Type>(p);
}
