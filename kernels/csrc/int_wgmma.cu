// Integer products with wgmma and a producer warp for each slot, on the same bytes as W4A16.
//
//   y (M, N) 16 bit = sx * sw * (codes (M, K) s8  *  (q - z)), q (K, N) 4 or 8 bit in tiles of 16 x 64
//
//   slot   warpgroups side by side along N; a slot's units have a ring and barriers of their own
//   warp   WORDS words a lane and k-tile: WORDS products of 64 (n) x TOKENS x 32, whose row block w is warp w's own 16
//          columns; activations are read from shared memory by descriptor, their rows in the order P32 or Q32
//
// A step of 32 rows costs 8 instructions a word to unpack and 64 clocks of the tensor cores at 128 tokens, so that
// unpacking hides behind the products of the step before: two register sets take turns. One scale a column: integer
// sums from the first unit to the last. Groups: at each group's end the sums are taken over into fp32, while other
// warpgroups go on.
//
// Requires K % 64 = 0, N % 64 = 0, the maps of producer.cuh (codes: boxes of 128 bytes x TOKENS), y rows 4-byte aligned;
// sm_90a. Tested by tests/gpu/test_int_gemm.py; lane arithmetic by tests/kernels/test_int_gemm.py.
#include "int_epilogue.cuh"
#include "int_exchange.cuh"
#include "int_operand.cuh"
#include "int_producer.cuh"
#include "int_wgmma.cuh"

#ifndef ENTRY  // a build without defines compiles one kernel, for editors
#define ENTRY int_example
#define CONFIG FP16, S8_W4, 0, 128, 8, 1, 2, 128, 6
#define BLOCKS 1
#endif

using T = IntTile<CONFIG, TMA>;
#ifdef SHARED
static_assert(T::SHARED_BYTES == SHARED, "kernels/quarot/int_tiles.py and int_tile.cuh agree on shared memory");
#endif

// Sums leave no room for two sets of operands; with two, ptxas lets products with 8-bit weights wait for one another
// (C7520).
constexpr bool FINE = T::WORDS * T::TOKENS > 256 || T::KIND == S8_W8;
constexpr int SKEW = 2;  // units the first of two warpgroups is ahead: as many stages less are on their way
static_assert(SKEW < T::STAGES - 1, "the second warpgroup's stages do not stop the first");
constexpr bool EARLY = Exchange<T>::USED;
static_assert(!EARLY || BLOCKS * Exchange<T>::WARPGROUPS <= 16, "tiles.py, FLAGS_PER_MULTIPROCESSOR");

extern __shared__ __align__(1024) u8 shared[];

DEVICE void finish_products(IntSums<T> &part) {
  wgmma::wait<0>();
  each_sum<T>([&](int j, int tile, int i) { asm volatile("" : "+r"(part[j][tile][i])::"memory"); });
}

// One step of a unit: unpacks a register set while the products before it run. ADD 0 begins new sums.
template <int ADD, class F>
DEVICE void step_product(const Lane<T> &lane, IntSums<T> &part, u32 (&a)[T::WORDS][4], u32 stage, int step,
                         const F &previous_is_free) {
  u32 w[T::STEP_TILES][T::WORDS * T::VECTORS];
#pragma unroll
  for (int i = 0; i < T::STEP_TILES; i++) lane.words(w[i], stage, step * T::STEP_TILES + i);
  wgmma::wait<1>();  // the products that read this register set are done
  if (step == 1) previous_is_free();
#pragma unroll
  for (int j = 0; j < T::WORDS; j++) int_operand::of_step<T>(a[j], w, j);
  wgmma::fence();
  const u64 x = wgmma::descriptor(stage + step / 4 * T::TOKENS * X_ROW_BYTES) + step % 4 * 2;  // 32 bytes on
#pragma unroll
  for (int j = 0; j < T::WORDS; j++) wgmma::IntProduct<T::TOKEN_TILES>::template run<ADD>(part[j], a[j], x);
  wgmma::commit();
}

// The same with half the registers for operands: each word's product by itself.
template <class F>
DEVICE void fine_step(const Lane<T> &lane, IntSums<T> &part, u32 (&a)[T::WORDS][4], u32 stage, int step,
                      const F &previous_is_free) {
  u32 w[T::STEP_TILES][T::WORDS * T::VECTORS];
#pragma unroll
  for (int i = 0; i < T::STEP_TILES; i++) lane.words(w[i], stage, step * T::STEP_TILES + i);
  const u64 x = wgmma::descriptor(stage + step / 4 * T::TOKENS * X_ROW_BYTES) + step % 4 * 2;
#pragma unroll
  for (int j = 0; j < T::WORDS; j++) {
    wgmma::wait<T::WORDS - 1>();
    if (step == 1 && j == 0) previous_is_free();
    int_operand::of_step<T>(a[j], w, j);
    wgmma::fence();
    wgmma::IntProduct<T::TOKEN_TILES>::template run<1>(part[j], a[j], x);
    wgmma::commit();
  }
}

// One unit; `previous_is_free` is called once nothing reads the stage of the unit before any more.
template <class F>
DEVICE void unit_product(const IntProblem &p, const Lane<T> &lane, Sums<T> &sums, IntSums<T> &part, u32 stage, int unit,
                         const F &previous_is_free) {
  u32 a[2][T::WORDS][4];
  if constexpr (!T::GROUPED) {
#pragma unroll
    for (int step = 0; step < T::STEPS; step++) {
      if constexpr (FINE)
        fine_step(lane, part, a[0], stage, step, previous_is_free);
      else
        step_product<1>(lane, part, a[step % 2], stage, step, previous_is_free);
    }
  } else {
#pragma unroll
    for (int row = 0; row < T::UNIT_GROUPS; row++) {
      step_product<0>(lane, part, a[0], stage, row * T::GROUP_STEPS, previous_is_free);
#pragma unroll
      for (int i = 1; i < T::GROUP_STEPS; i++)
        step_product<1>(lane, part, a[i % 2], stage, row * T::GROUP_STEPS + i, previous_is_free);
      finish_products(part);
      if (p.has_group<T>(unit, row)) add_group<T>(p, lane, sums, part, stage, row);
    }
  }
}

// The second of two warpgroups begins when the first is some units ahead, and stays behind: so each multiplies while
// the other stores its results.
struct Stagger {
  static constexpr bool USED = T::THREADS == 256 && T::SLOTS == 1;
  static constexpr u32 ID = 14;
  int left = USED && threadIdx.x < 128 ? SKEW : 0;

  DEVICE Stagger() {
    if (USED && threadIdx.x >= 128) ptx::barrier(ID, T::THREADS);
  }
  DEVICE void pass() {
    if (left > 0) left = 0, ptx::barrier_pass(ID, T::THREADS);
  }
  DEVICE void unit_done() {
    if (left > 0 && --left == 0) ptx::barrier_pass(ID, T::THREADS);
  }
};

DEVICE void multiply(const IntProblem &p, int slot) {
  const Lane<T> lane(threadIdx.x % T::SLOT_THREADS / 32, threadIdx.x % 32);
  Ring<T> ring(ptx::shared_address(shared), slot);
  u32 in_use = 0;  // the barrier of the stage that products may still read
  const auto release = [&] {
    if (in_use != 0 && lane.lane == 0) ptx::barrier_arrive(in_use);
    in_use = 0;
  };
  Run<T> run(p);
  Stagger stagger;
  if constexpr (EARLY) ptx::wait_for_previous_kernel();  // its flags are not taken for this one's
  while (run.more()) {
    const Segment segment = run.take(p);
    IntSums<T> part;
    Sums<T> sums;
    Exchange<T> exchange(p);
    if constexpr (EARLY)
      exchange.start(part, segment);
    else
      clear<T>(part);
    if constexpr (T::GROUPED) each_pair<T>(sums, [](int, int, float &a, float &b) { a = b = 0.0f; });
    for (int unit = segment.begin + slot; unit < segment.end; unit += T::SLOTS) {
      ptx::barrier_wait(ring.full(), ring.phase);
      unit_product(p, lane, sums, part, ring.stage(), unit, release);
      in_use = ring.empty();
      ring.advance();
      stagger.unit_done();
    }
    finish_products(part);
    release();
    stagger.pass();
    const u32 shared_sums = ptx::shared_address(shared) + T::RING_BYTES;
    if constexpr (EARLY) {
      if (segment.begin != 0) {
        exchange.hand_over(part);
        continue;
      }
      exchange.finish(part, segment);
      as_sums<T>(sums, part);
      store_int_segment<T>(p, Epilogue<T>(p, shared_sums, ptx::opaque(threadIdx.x)), sums, segment, shared_sums);
    } else {
      if constexpr (!T::GROUPED) as_sums<T>(sums, part);
      finish_int_segment<T>(p, sums, segment, shared_sums);
    }
  }
  stagger.pass();  // of a block without work
}

extern "C" __global__ void __launch_bounds__(T::BLOCK_THREADS, BLOCKS)
    ENTRY(const __grid_constant__ TensorMap x, const float *act_scales, const __grid_constant__ TensorMap weight,
          const __grid_constant__ TensorMap scale_rows, const u8 *scales, const u8 *bias, u8 *y, float *partials,
          u32 *flags, int m, int n, int k, int ldx, int ldy, int group_shift, int scales_bf16) {
  const IntProblem p{{nullptr, nullptr, scales, nullptr, nullptr, y, partials, flags, m, n, k, ldx, ldy, group_shift,
                      scales_bf16 != 0}, act_scales, bias};
  const Maps maps{x, weight, scale_rows};
  PRODUCE_AND_MULTIPLY(IntProducer<T>, p, maps, BLOCKS)
}
