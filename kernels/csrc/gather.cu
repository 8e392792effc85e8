// out[r, j] = x[rows[r], perm[expert of r, j]] for j < K, 0 for K <= j < width: activations in the order of an
// act-order weight's rows. Without rows, row r reads row r; without offsets one order (`experts` is 1) serves all.
//
// Bound by bytes, 2 in and 2 out for each value, but single values in a random order cost a transaction each. So a
// block brings its rows to shared memory first (`staged`), where 32 random 2-byte reads meet a bank three to four
// times on average; a thread makes 8 columns, written as 16 bytes, and keeps their order for all rows of one expert.
// Rows too long for it are read in place.
// Requires: width % 8 = 0, out 16-byte aligned, `each` at most 8; shared memory for `each` rows where they are staged.
// Tested by tests/gpu/test_other_ops.py and test_moe.py.
#include "ptx.cuh"

constexpr int THREADS = 256, MOST_ROWS = 8;

struct Order {
  const int *perm;  // of all experts
  int k, width;
  bool vectors;     // whether four entries can be read at once

  // Which columns of x the eight from `column` on come from; -1: none, a zero.
  DEVICE void load(int (&from)[8], int expert, int column) const {
    const int *at = perm + static_cast<u64>(expert) * k + column;
    if (vectors && column + 8 <= k) {
      const int4 low = *reinterpret_cast<const int4 *>(at), high = *reinterpret_cast<const int4 *>(at + 4);
      from[0] = low.x, from[1] = low.y, from[2] = low.z, from[3] = low.w;
      from[4] = high.x, from[5] = high.y, from[6] = high.z, from[7] = high.w;
    } else {
#pragma unroll
      for (int i = 0; i < 8; i++) from[i] = column + i < k ? at[i] : -1;
    }
  }
};

DEVICE uint4 pick(const u16 *source, const int (&from)[8]) {
  u32 pairs[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const u32 low = from[2 * i] < 0 ? 0 : source[from[2 * i]];
    const u32 high = from[2 * i + 1] < 0 ? 0 : source[from[2 * i + 1]];
    pairs[i] = low | high << 16;
  }
  return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}

// The expert of a pair: how many experts end at or before it. One warp; the loads do not wait for one another.
DEVICE int expert_of(const int *offsets, int experts, int pair, int lane) {
  int ended = 0;
  for (int e = lane; e < experts; e += 32) ended += offsets[e + 1] <= pair;
#pragma unroll
  for (int step = 16; step > 0; step /= 2) ended += __shfl_xor_sync(0xFFFFFFFFu, ended, step);
  return ended;
}

// Asks for one row of x; 16 bytes at a time where it is aligned.
DEVICE void stage_row(u16 *to, const u16 *from, int k, bool aligned) {
  const int whole = aligned ? k / 8 : 0;
  for (int i = threadIdx.x; i < whole; i += THREADS) ptx::copy_async_16(ptx::shared_address(to + 8 * i), from + 8 * i);
  for (int i = 8 * whole + threadIdx.x; i < k; i += THREADS) to[i] = from[i];
}

extern "C" __global__ void __launch_bounds__(THREADS)
    gather(const u16 *x, const int *rows, const int *offsets, const int *perm, u16 *out, int m, int k, int ldx,
           int width, int experts, int each, int staged) {
  extern __shared__ __align__(16) u16 stage[];
  __shared__ int source[MOST_ROWS], owner[MOST_ROWS];  // the row read, the expert; `experts`: nobody's, zeros
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, pitch = (k + 7) / 8 * 8;
  const bool aligned = (reinterpret_cast<u64>(x) & 15) == 0 && ldx % 8 == 0;
  const Order order{perm, k, width, (reinterpret_cast<u64>(perm) & 15) == 0 && k % 4 == 0};
  const int column0 = (blockIdx.x * THREADS + threadIdx.x) * 8;

  ptx::launch_dependents();
  int from[8], expert_held = -1, column_held = -1;  // whose eight entries are in `from`
  if (offsets == nullptr && column0 < width) order.load(from, expert_held = 0, column_held = column0);
  ptx::wait_for_previous_kernel();
  for (int first = blockIdx.y * each; first < m; first += gridDim.y * each) {
    const int count = min(each, m - first);
    if (warp < count) {
      const int expert = offsets == nullptr ? 0 : expert_of(offsets, experts, first + warp, lane);
      if (lane == 0) {
        owner[warp] = expert;
        source[warp] = expert == experts ? 0 : rows == nullptr ? first + warp : rows[first + warp];
      }
    }
    __syncthreads();
    if (staged) {
      for (int i = 0; i < count; i++) stage_row(stage + i * pitch, x + static_cast<u64>(source[i]) * ldx, k, aligned);
      ptx::copy_async_commit();
      ptx::copy_async_wait<0>();
      __syncthreads();
    }
    for (int column = column0; column < width; column += gridDim.x * THREADS * 8) {
      for (int i = 0; i < count; i++) {
        const int expert = owner[i];
        if (expert < experts && (expert != expert_held || column != column_held))
          order.load(from, expert_held = expert, column_held = column);
        uint4 v = make_uint4(0, 0, 0, 0);
        if (expert < experts)
          v = staged ? pick(stage + i * pitch, from) : pick(x + static_cast<u64>(source[i]) * ldx, from);
        *reinterpret_cast<uint4 *>(out + static_cast<u64>(first + i) * width + column) = v;
      }
    }
    __syncthreads();
  }
}
