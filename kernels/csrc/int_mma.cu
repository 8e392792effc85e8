// Integer products with mma.sync and cp.async: every card from sm_80 on, and few tokens on sm_90 too.
//
//   y (M, N) 16 bit = sx * sw * (codes (M, K) s8 or s4  *  (q - z)), q (K, N) 4 or 8 bit in tiles of 16 x 64
//
//   block   one column tile of TILE_N, at most TOKENS tokens, whole tiles or a run of units (scheduler.cuh)
//   slot    every SLOTS-th unit: 128 or 256 bytes of a token's codes; its own ring of stages, its own barrier
//   warp    64 columns: 4 words a lane and k-tile; a step's 2 or 4 words are the A operand of 16 columns
//
// Up to 32 tokens this is bound by the bytes of the weight. A step of 32 rows costs 8 instructions a word pair to
// unpack (s4: 8 for 64 rows; 8-bit codes: 4) and TOKENS / 8 products, half of what W4A16 spends. The weights of the next units are
// on their way across tiles, and the first ones before the previous kernel has finished.
//
// Requires K % 64 = 0, N % 64 = 0, codes 16-byte aligned rows, y 4-byte aligned; groups of 32 (not s4), 64, 128 or one.
// Tested by tests/gpu/test_int_gemm.py; lane arithmetic by tests/kernels/test_int_gemm.py.
#include "int_unit.cuh"

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
  multiply<T>(p, p, lane, feed, slot, ring, [&](Sums<T> &sums, const Segment &segment) {
    finish_int_segment<T>(p, sums, segment, base + T::RING_BYTES);
  });
}
