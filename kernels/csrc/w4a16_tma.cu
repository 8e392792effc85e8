// W4A16 with wgmma and a producer warp for each slot, on the same bytes as w4a16_sm80.cu.
//
//   y (M, N) 16 bit = x (M, K) 16 bit  *  (q - z) * s, q (K, N) 4 or 8 bit in tiles of 16 x 64
//
// As w4a16_sm90a.cu, but the warps that multiply copy nothing and meet at no barrier: each warpgroup waits for a stage
// to be full and goes on, so that one unpacks while the other's products run. With two warpgroups, two words a lane
// and 128 tokens the loop alone keeps the tensor cores busy at every clock; below 128 tokens unpacking is the limit.
//
// Requires what w4a16_sm80.cu requires, and the maps of producer.cuh; sm_90a.
// Tested by tests/gpu/test_w4a16.py.
#include "producer.cuh"
#include "scatter.cuh"
#include "unit_wgmma.cuh"

#ifndef ENTRY
#define ENTRY w4a16_example
#define CONFIG FP16, 4, 0, 128, 8, 1, 2, 64, 5
#define BLOCKS 1
#endif

using T = Tile<CONFIG, TMA>;
#ifdef SHARED
static_assert(T::SHARED_BYTES == SHARED, "kernels/tiles.py and tile.cuh agree on the bytes of shared memory");
#endif

extern __shared__ __align__(1024) u8 shared[];

template <class UNIT> DEVICE void multiply_by(const Problem &p, int slot) {
  const int warp = threadIdx.x % T::SLOT_THREADS / 32, lane = threadIdx.x % 32;
  const UNIT product(p, warp, lane);
  Ring<T> ring(ptx::shared_address(shared), slot);
  u32 in_use = 0;  // the barrier of the stage that products may still read
  const auto release = [&] {
    if (in_use != 0 && lane == 0) ptx::barrier_arrive(in_use);
    in_use = 0;
  };
  Run<T> run(p);
  while (run.more()) {
    const Segment segment = run.take(p);
    Sums<T> sums;
    each_pair<T>(sums, [](int, int, float &a, float &b) { a = b = 0.0f; });
    for (int unit = segment.begin + slot; unit < segment.end; unit += T::SLOTS) {
      ptx::barrier_wait(ring.full(), ring.phase);
      product(sums, ring.stage(), release);
      in_use = ring.empty();
      ring.advance();
    }
    product.finish(sums);
    release();
    end_segment<T>(p, sums, segment, ptx::shared_address(shared) + T::RING_BYTES);
  }
}

// Each size of group has its loop: without branches between products that of a whole unit, with one look at scales, has a
// fifth fewer instructions. With zero points the others gain nothing that would be worth their compile.
DEVICE void multiply(const Problem &p, int slot) {
  if (p.group_shift >= T::UNIT_SHIFT) return multiply_by<WgmmaUnit<T, T::UNIT_K>>(p, slot);
  if constexpr (T::ZEROS) {
    multiply_by<WgmmaUnit<T>>(p, slot);
  } else {
    if constexpr (T::UNIT_K > 64) {
      if (p.group_shift > SMALLEST_GROUP_SHIFT) return multiply_by<WgmmaUnit<T, 64>>(p, slot);
    }
    multiply_by<WgmmaUnit<T, 32>>(p, slot);
  }
}

extern "C" __global__ void __launch_bounds__(T::BLOCK_THREADS, BLOCKS)
    ENTRY(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap weight,
          const __grid_constant__ TensorMap scales, const u8 *zeros, const u8 *bias, u8 *y, float *partials,
          u32 *flags, int m, int n, int k, int ldx, int ldy, int group_shift, int scales_bf16) {
  const Problem p{nullptr, nullptr, nullptr, zeros, bias, y, partials, flags, m, n, k, ldx, ldy, group_shift,
                  scales_bf16 != 0};
  const Maps maps{x, weight, scales};
  PRODUCE_AND_MULTIPLY(Producer<T>, p, maps, BLOCKS)
}
