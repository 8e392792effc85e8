// out[m, r] = x[m, perm[r]] for r < K, 0 for K <= r < width: activations in the order of an act-order weight's rows.
//
// Bound by bytes: 2 in, 2 out for each value, 4 of perm for each column, read once a block. A thread makes 8 columns
// of one row, written as 16 bytes; the reads of a row hit one another's lines.
// Requires: width % 8 = 0, out rows 16-byte aligned. Tested by tests/gpu/test_other_ops.py.
#include "ptx.cuh"

extern "C" __global__ void __launch_bounds__(256)
    gather(const u16 *x, const int *perm, u16 *out, int m, int k, int ldx, int width) {
  ptx::launch_dependents();
  const int column = (blockIdx.x * 256 + threadIdx.x) * 8;
  if (column >= width) return;
  int from[8];
#pragma unroll
  for (int i = 0; i < 8; i++) from[i] = column + i < k ? perm[column + i] : -1;
  ptx::wait_for_previous_kernel();
  for (int row = blockIdx.y; row < m; row += gridDim.y) {
    const u16 *source = x + static_cast<u64>(row) * ldx;
    u32 pairs[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const u32 low = from[2 * i] < 0 ? 0 : source[from[2 * i]];
      const u32 high = from[2 * i + 1] < 0 ? 0 : source[from[2 * i + 1]];
      pairs[i] = low | high << 16;
    }
    uint4 *to = reinterpret_cast<uint4 *>(out + static_cast<u64>(row) * width + column);
    *to = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
  }
}
