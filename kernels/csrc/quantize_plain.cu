// codes, scales = quantize(v * f): rows without a transform. v is x, x * gain (a norm's, f = 1/rms) or
// round16(act(gate) * up).
//
// Bound by bytes: a thread keeps its octets packed in registers, reads them once, and one barrier serves the sum of
// squares and the largest value together (f is positive, so it can be multiplied in afterwards).
// PAIRS: how many times two octets a thread holds; threads * PAIRS * 16 >= width. Tested by tests/gpu/test_hadamard.py.
#include "quantize_row.cuh"

constexpr int MOST_WARPS = 32;

template <int ACT, int PAIRS> struct Writer {
  const Row &from;
  const uint4 (&octets)[PAIRS][2];
  const hadamard::RowScale &scale;
  const Quantizer &q;
  u8 *row;

  template <int MODE> DEVICE void write() const {
#pragma unroll
    for (int p = 0; p < PAIRS; p++) {
      float v[2][8];
#pragma unroll
      for (int h = 0; h < 2; h++) from.values<ACT>(v[h], octets[p][h], from.column(p, h));
      const int block = from.column(p, 0) / 32;
      hadamard::write_block<ACT, MODE>(row + hadamard::block_bytes(MODE) * block, v, scale, q, 32 * block < q.width);
    }
  }
};

extern "C" __global__ void __launch_bounds__(512)
    ENTRY(const u16 *x, const void *gain, u8 *out, float *scales, int rows, u64 ldx, int k, int activation, int gain_type,
          float eps, int width, int bits, int order, float clip) {
  __shared__ float most_of[2][MOST_WARPS], sum_of[2][MOST_WARPS];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
  const Quantizer q{out, scales, width, bits, order, clip};
  int turn = 0;  // of the two sets of sums: the next row may write while this one is read

  ptx::launch_dependents();
  ptx::wait_for_previous_kernel();
  for (int row = blockIdx.x; row < rows; row += gridDim.x, turn ^= 1) {
    const Row from{x + row * ldx, gain, k, activation, gain_type};
    uint4 octets[PAIR_COUNT][2];
#pragma unroll
    for (int p = 0; p < PAIR_COUNT; p++)
#pragma unroll
      for (int h = 0; h < 2; h++) octets[p][h] = from.load<NUMBER>(from.column(p, h));
    float most = 0.0f, sum = 0.0f;
#pragma unroll
    for (int p = 0; p < PAIR_COUNT; p++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        float v[8];
        if (activation == ACT_NORM) {
          hadamard::widen<NUMBER>(v, octets[p][h]);
#pragma unroll
          for (int i = 0; i < 8; i++) sum = fmaf(v[i], v[i], sum);
        }
        from.values<NUMBER>(v, octets[p][h], from.column(p, h));
#pragma unroll
        for (int i = 0; i < 8; i++) most = hadamard::max_abs(most, v[i]);
      }
    most = hadamard::warp_max(most);
    if (activation == ACT_NORM) sum = hadamard::warp_sum(sum);
    if (lane == 0) most_of[turn][warp] = most, sum_of[turn][warp] = sum;
    __syncthreads();
    most = hadamard::warp_max(lane < warps ? most_of[turn][lane] : 0.0f);
    float factor = 1.0f;
    if (activation == ACT_NORM)
      factor = rsqrtf(hadamard::warp_sum(lane < warps ? sum_of[turn][lane] : 0.0f) / static_cast<float>(k) + eps);
    const hadamard::RowScale scale(most, factor, q);
    if (threadIdx.x == 0 && bits != 16) scales[row] = scale.scale;
    hadamard::for_mode(q, Writer<NUMBER, PAIR_COUNT>{from, octets, scale, q, out + row * q.row_bytes()});
  }
}
