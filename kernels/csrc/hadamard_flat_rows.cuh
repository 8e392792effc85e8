// How rows come to hadamard_flat.cu: the copy engine brings boxes of all lines and 64 columns to a stage, one thread asks.
//
// Behind an activation a stage is gate's, up comes to a place beside the stages, and every thread activates a share of
// them there. The engine leaves what lies past line M of a box alone.
#pragma once
#include "hadamard.cuh"

namespace flat {

// T is the kernel's Config.
template <class T> struct Rows {
  const TensorMap *map;  // rows of lines: x's, or gate's and then up's
  u32 rows;
  int activation;
  u32 stages, barriers;  // shared addresses; a stage's barrier says that its bytes have come

  DEVICE bool acts() const { return T::ACTS && (activation == ACT_SILU || activation == ACT_GELU_TANH); }
  DEVICE u32 places() const { return acts() ? 2 : T::STAGES; }
  DEVICE u32 turns() const { return (rows + T::ROWS - 1) / T::ROWS; }
  DEVICE u32 stage(u32 i) const { return stages + i * T::STAGE_BYTES; }
  DEVICE u32 up() const { return stage(2); }
  DEVICE u32 barrier(u32 i) const { return ptx::opaque(barriers) + 8 * i; }

  DEVICE void init() const {
    constexpr u32 TAIL = 8 * (T::MP - T::M);  // 16-byte pieces of a block past line M: 0 * garbage need not be 0
    if constexpr (TAIL > 0)
      for (u32 i = threadIdx.x; i < places() * T::ROWS * T::BLOCKS * TAIL; i += T::THREADS)
        ptx::store_shared_16(stages + i / TAIL * T::BLOCK_BYTES + 128 * T::M + 16 * (i % TAIL), make_uint4(0, 0, 0, 0));
    if (threadIdx.x < T::STAGES) ptx::barrier_init(barrier(threadIdx.x), 1);
    ptx::barrier_init_fence();
    ptx::fence_async_proxy();
  }

  // Asks for the rows of a turn. One thread; what was there has been read.
  DEVICE void ask(u32 turn, u32 i) const {
    const u32 row = turn * T::ROWS;
    if (row >= rows) return;
    const u32 count = T::ROWS == 1 ? 1 : min(rows - row, T::ROWS);
    ptx::barrier_arrive_expect(barrier(i), count * T::BLOCKS * 128 * T::M * (acts() ? 2 : 1));
#pragma unroll
    for (u32 r = 0; r < T::ROWS; r++)
      if (r < count)
#pragma unroll
        for (u32 b = 0; b < T::BLOCKS; b++) {
          const u32 at = r * T::ROW_BYTES + b * T::BLOCK_BYTES;
          ptx::copy_box(stage(i) + at, map, 64 * b, 0, row + r, barrier(i));
          if (acts()) ptx::copy_box(up() + at, map, 64 * b, T::M, row + r, barrier(i));
        }
  }
  DEVICE void wait(u32 i, u32 phase) const { ptx::barrier_wait(barrier(i), phase); }

  // d = round16(act(gate) * up), when both have come.
  DEVICE void activate(u32 i, u32 phase) const {
    wait(i, phase);
    if (activation == ACT_SILU)
      activate<ACT_SILU>(stage(i));
    else
      activate<ACT_GELU_TANH>(stage(i));
    ptx::fence_async_proxy();
  }
  template <int ACTIVATION> DEVICE void activate(u32 gates) const {
    constexpr u32 BLOCK = T::BLOCK_BYTES / 16, PIECES = T::ROWS * T::BLOCKS * BLOCK;
    const u32 thread = ptx::opaque(threadIdx.x), gate = gates + 16 * thread, other = up() + 16 * thread;
#pragma unroll 2
    for (u32 i = 0; i < PIECES; i += T::THREADS) {
      if (T::M < T::MP && (i + thread) % BLOCK >= 8 * T::M) continue;  // past line M
      if (PIECES % T::THREADS != 0 && i + thread >= PIECES) break;
      const uint4 both = hadamard::activate_octet<T::ACT, ACTIVATION>(ptx::load_shared_16(gate + 16 * i), ptx::load_shared_16(other + 16 * i));
      ptx::store_shared_16(gate + 16 * i, both);
    }
  }

  // Asks for the first turns' bytes, from the first on; all threads.
  DEVICE void begin(u32 turn) const {
    const bool one = threadIdx.x == 0;
    if (one) ask(turn, 0);
    if (acts()) {
      activate(0, 0);
      __syncthreads();
    }
    if (one)
      for (u32 i = 1; i < places(); i++) ask(turn + i * gridDim.x, i);
  }
};

}  // namespace flat
