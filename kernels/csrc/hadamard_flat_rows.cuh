// How rows come to hadamard_flat.cu: the copy engine brings boxes of all lines and 64 columns to a stage, one thread asks.
//
// Behind an activation a stage is gate's, up comes to a place beside the stages, and every thread activates a share of
// them there; or warpgroups of their own (APART) do, block by block, and ask for the next row's up as soon as they have read
// a block of this one's. The engine leaves what lies past line M of a box alone.
#pragma once
#include "hadamard.cuh"

namespace flat {

// T is the kernel's Config.
template <class T> struct Rows {
  const TensorMap *map;  // rows of lines: x's, or gate's and then up's
  u32 rows;
  int activation;
  u32 stages, barriers;  // shared addresses; a stage's barrier says that its bytes have come. APART: behind those, a
                         // stage's that it is activated, and a block's of up

  DEVICE bool acts() const { return T::APART || T::ACTS && (activation == ACT_SILU || activation == ACT_GELU_TANH); }
  DEVICE u32 places() const { return acts() ? 2 : T::STAGES; }
  DEVICE u32 turns() const { return (rows + T::ROWS - 1) / T::ROWS; }
  DEVICE u32 stage(u32 i) const { return stages + i * T::STAGE_BYTES; }
  DEVICE u32 up() const { return stage(2); }
  DEVICE u32 barrier(u32 i) const { return ptx::opaque(barriers) + 8 * i; }
  DEVICE u32 activated(u32 i) const { return barrier(T::STAGES + i); }
  DEVICE u32 up_barrier(u32 block) const { return barrier(2 * T::STAGES + block); }

  DEVICE void init() const {
    constexpr u32 TAIL = 8 * (T::MP - T::M);  // 16-byte pieces of a block past line M: 0 * garbage need not be 0
    if constexpr (TAIL > 0)
      for (u32 i = threadIdx.x; i < places() * T::ROWS * T::BLOCKS * TAIL; i += T::THREADS)
        ptx::store_shared_16(stages + i / TAIL * T::BLOCK_BYTES + 128 * T::M + 16 * (i % TAIL), make_uint4(0, 0, 0, 0));
    if (threadIdx.x < T::STAGES) ptx::barrier_init(barrier(threadIdx.x), 1);
    if constexpr (T::APART) {
      if (threadIdx.x < T::STAGES) ptx::barrier_init(activated(threadIdx.x), 4 * T::ACTING);  // a warp's arrival each
      if (threadIdx.x < T::BLOCKS) ptx::barrier_init(up_barrier(threadIdx.x), 1);
    }
    ptx::barrier_init_fence();
    ptx::fence_async_proxy();
  }

  // Asks for the rows of a turn. One thread; what was there has been read.
  DEVICE void ask(u32 turn, u32 i) const {
    const u32 row = turn * T::ROWS;
    if (row >= rows) return;
    const u32 count = T::ROWS == 1 ? 1 : min(rows - row, T::ROWS);
    ptx::barrier_arrive_expect(barrier(i), count * T::BLOCKS * 128 * T::M * (acts() && !T::APART ? 2 : 1));
#pragma unroll
    for (u32 r = 0; r < T::ROWS; r++)
      if (r < count)
#pragma unroll
        for (u32 b = 0; b < T::BLOCKS; b++) {
          const u32 at = r * T::ROW_BYTES + b * T::BLOCK_BYTES;
          ptx::copy_box(stage(i) + at, map, 64 * b, 0, row + r, barrier(i));
          if (acts() && !T::APART) ptx::copy_box(up() + at, map, 64 * b, T::M, row + r, barrier(i));
        }
  }
  DEVICE void wait(u32 i, u32 phase) const { ptx::barrier_wait(barrier(i), phase); }
  DEVICE void wait_for_activated(u32 i, u32 phase) const { ptx::barrier_wait(activated(i), phase); }

  // Asks for a block of a row's up. One thread; what was there has been read.
  DEVICE void ask_up(u32 row, u32 block) const {
    if (row >= rows) return;
    ptx::barrier_arrive_expect(up_barrier(block), 128 * T::M);
    ptx::copy_box(up() + block * T::BLOCK_BYTES, map, 64 * block, T::M, row, up_barrier(block));
  }

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
  // What warpgroups do that only activate: the rows of this block from `row` on, a block of columns by one of them.
  DEVICE void activate_all(u32 row) const {
    if (activation == ACT_SILU)
      activate_rows<ACT_SILU>(row);
    else
      activate_rows<ACT_GELU_TANH>(row);
  }
  template <int ACTIVATION> DEVICE void activate_rows(u32 row) const {
    const u32 thread = threadIdx.x % 128, group = T::ACTING == 1 ? 0 : (threadIdx.x - T::SUM_THREADS) / 128;
    if (thread == 0)
      for (u32 b = group; b < T::BLOCKS; b += T::ACTING) ask_up(row, b);
    u32 i = 0, phase = 0;
    for (u32 odd = 0; row < rows; row += gridDim.x, odd ^= 1) {
      u32 at = group * T::BLOCK_BYTES + 16 * thread;
      wait(i, phase);
#pragma unroll 1
      for (u32 b = group; b < T::BLOCKS; b += T::ACTING, at += T::ACTING * T::BLOCK_BYTES) {
        ptx::barrier_wait(up_barrier(b), odd);
        activate_block<ACTIVATION>(stage(i) + at, up() + at, thread);
        ptx::barrier(13 + group, 128);
        if (thread == 0) ask_up(row + gridDim.x, b);
      }
      ptx::fence_async_proxy();
      __syncwarp();
      if (thread % 32 == 0) ptx::barrier_arrive(activated(i));
      if (++i == T::STAGES) i = 0, phase ^= 1;
    }
  }
  // A block's pieces of 16 bytes, some of a thread's at a time. All of those are read first: a read waits for the stores
  // in front of it.
  template <int ACTIVATION, u32 FIRST = 0> DEVICE static void activate_block(u32 gate, u32 other, u32 thread) {
    constexpr u32 PIECES = 8 * T::M, LEFT = (PIECES - FIRST + 127) / 128, COUNT = LEFT < T::HELD ? LEFT : T::HELD;
    uint4 g[COUNT], u[COUNT];
    read_pieces<FIRST>(g, gate, thread);
    read_pieces<FIRST>(u, other, thread);
#pragma unroll
    for (u32 i = 0; i < COUNT; i++) g[i] = hadamard::activate_octet<T::ACT, ACTIVATION>(g[i], u[i]);
    write_pieces<FIRST>(g, gate, thread);
    if constexpr (LEFT > T::HELD) activate_block<ACTIVATION, FIRST + 128 * T::HELD>(gate, other, thread);
  }
  // Whether the piece exists that a thread takes of 128 from FIRST on.
  template <u32 FIRST> DEVICE static bool exists(u32 thread) { return FIRST + 128 <= 8 * T::M || FIRST + thread < 8 * T::M; }
  template <u32 FIRST, u32 I = 0, u32 COUNT> DEVICE static void read_pieces(uint4 (&v)[COUNT], u32 from, u32 thread) {
    if (exists<FIRST + 128 * I>(thread)) v[I] = ptx::load_shared_16<16 * (FIRST + 128 * I)>(from);
    if constexpr (I + 1 < COUNT) read_pieces<FIRST, I + 1>(v, from, thread);
  }
  template <u32 FIRST, u32 I = 0, u32 COUNT> DEVICE static void write_pieces(const uint4 (&v)[COUNT], u32 to, u32 thread) {
    if (exists<FIRST + 128 * I>(thread)) ptx::store_shared_16<16 * (FIRST + 128 * I)>(to, v[I]);
    if constexpr (I + 1 < COUNT) write_pieces<FIRST, I + 1>(v, to, thread);
  }

  // Asks for the first turns' bytes, from the first on; all threads that have sums.
  DEVICE void begin(u32 turn) const {
    const bool one = threadIdx.x == 0;
    if (one) ask(turn, 0);
    if (acts() && !T::APART) {
      activate(0, 0);
      __syncthreads();
    }
    if (one)
      for (u32 i = 1; i < places(); i++) ask(turn + i * gridDim.x, i);
  }
};

}  // namespace flat
