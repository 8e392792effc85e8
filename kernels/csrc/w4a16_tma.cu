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

// Whether the loops for sizes of groups (by_group) share the code after them, which is half the code of a kernel. With 128
// tokens that is up to 2 % slower; sums of two words of 12 warps leave no registers for what then stays between segments.
constexpr bool SHARED_END = T::TOKENS <= 64 && T::WORDS * T::WARPS <= 16;
// Whether what a loop works out of its thread is worked out again for each segment and stays in no register between: 3 %
// faster with 64 tokens of 12 warps, up to 2 % slower with 128 tokens.
constexpr bool ANEW = T::TOKENS <= 64;

// The units of a slot. GROUP_K: rows of a group (WgmmaUnit).
template <int GROUP_K> struct Units {
  const WgmmaUnit<T, GROUP_K> product;
  const int slot, lane;
  Ring<T> &ring;
  u32 in_use = 0;  // the barrier of the stage that products may still read

  DEVICE Units(const Problem &p, int slot_, u32 thread, Ring<T> &ring_)
      : product(p, thread % T::SLOT_THREADS / 32, thread % 32), slot(slot_), lane(thread % 32), ring(ring_) {}

  DEVICE void release() {
    if (in_use != 0 && lane == 0) ptx::barrier_arrive(in_use);
    in_use = 0;
  }
  // Adds those of a segment.
  DEVICE void add(Sums<T> &sums, const Segment &segment) {
    for (int unit = segment.begin + slot; unit < segment.end; unit += T::SLOTS) {
      ptx::barrier_wait(ring.full(), ring.phase);
      product(sums, ring.stage(), [&] { release(); });
      in_use = ring.empty();
      ring.advance();
    }
    product.finish(sums);
    release();
  }
};

// Each segment of a block's run: what `add` adds to its sums, and its end.
template <class F> DEVICE void each_segment(const Problem &p, const F &add) {
  Run<T> run(p);
  while (run.more()) {
    const Segment segment = run.take(p);
    Sums<T> sums;
    each_pair<T>(sums, [](int, int, float &a, float &b) { a = b = 0.0f; });
    add(sums, segment);
    end_segment<T>(p, sums, segment, ptx::shared_address(shared) + T::RING_BYTES);
  }
}

// Each size of group has its loop: without branches between products that of a whole unit, with one look at scales, has a
// fifth fewer instructions. With zero points the others gain nothing that would be worth their compile.
template <class F> DEVICE void by_group(const Problem &p, const F &loop) {
  if (p.group_shift >= T::UNIT_SHIFT) return loop.template run<T::UNIT_K>();
  if constexpr (T::ZEROS) {
    loop.template run<0>();
  } else {
    if constexpr (T::UNIT_K > 64) {
      if (p.group_shift > SMALLEST_GROUP_SHIFT) return loop.template run<64>();
    }
    loop.template run<32>();
  }
}

// A segment by one of the loops.
struct OfSegment {
  const Problem &p;
  const int slot;
  Ring<T> &ring;
  Sums<T> &sums;
  const Segment &segment;

  template <int GROUP_K> DEVICE void run() const {
    Units<GROUP_K>(p, slot, ptx::opaque(threadIdx.x), ring).add(sums, segment);
  }
};

// All of a run by one of the loops.
struct OfRun {
  const Problem &p;
  const int slot;
  Ring<T> &ring;

  template <int GROUP_K> DEVICE void run() const {
    Units<GROUP_K> units(p, slot, threadIdx.x, ring);
    each_segment(p, [&](Sums<T> &sums, const Segment &segment) {
      if constexpr (ANEW)
        OfSegment{p, slot, ring, sums, segment}.template run<GROUP_K>();
      else
        units.add(sums, segment);
    });
  }
};

DEVICE void multiply(const Problem &p, int slot) {
  Ring<T> ring(ptx::shared_address(shared), slot);
  if constexpr (SHARED_END)
    each_segment(p, [&](Sums<T> &sums, const Segment &segment) { by_group(p, OfSegment{p, slot, ring, sums, segment}); });
  else
    by_group(p, OfRun{p, slot, ring});
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
