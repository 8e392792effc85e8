// codes, scales = quantize(v * f): rows without a transform. v is x, x * gain (a norm's, f = 1/rms) or
// round16(act(gate) * up).
//
// Bound by bytes, so by how many of them are on their way: a thread asks for its octets of the next row before it works
// on those of this one, and keeps v in fp32 registers; one barrier a row serves the sum of squares and the largest
// value together (f is positive, so it can be multiplied in afterwards).
// PAIR_COUNT: how many times two octets a thread holds; threads * PAIR_COUNT * 16 >= width. ACTS: whether x is gate and
// up. Tested by tests/gpu/test_hadamard.py.
#include "quantize_row.cuh"

constexpr int MOST_WARPS = 16, OCTETS = 2 * PAIR_COUNT, SOURCES = ACTS ? 2 : 1;
#if __CUDA_ARCH__ >= 900
constexpr int RESIDENT = PAIR_COUNT == 1 ? 2 : 1;  // blocks of 512 threads
#else
constexpr int RESIDENT = 1;  // two would spill
#endif
constexpr bool AHEAD = PAIR_COUNT * SOURCES <= 2;  // else the next row's values find no registers

// What a thread asks for of a row: octets of x, or of gate and up.
struct Asked {
  uint4 octets[OCTETS][SOURCES];

  DEVICE void load(const Row &row) {
#pragma unroll
    for (int o = 0; o < OCTETS; o++)
#pragma unroll
      for (int s = 0; s < SOURCES; s++) octets[o][s] = row.load(row.column(o / 2, o % 2), s);
  }
};

struct Writer {
  const Row &from;
  const float (&v)[PAIR_COUNT][2][8];
  const hadamard::RowScale &scale;
  const Quantizer &q;
  u8 *row;

  template <int MODE> DEVICE void write() const {
#pragma unroll
    for (int p = 0; p < PAIR_COUNT; p++) {
      const int block = from.column(p, 0) / 32;
      hadamard::write_block<NUMBER, MODE>(row + hadamard::block_bytes(MODE) * block, v[p], scale, q, 32 * block < q.width);
    }
  }
};

extern "C" __global__ void __launch_bounds__(512, RESIDENT)
    ENTRY(const u16 *x, const void *gain, u8 *out, float *scales, int rows, u64 ldx, int k, int activation, int gain_type,
          float eps, float share, int width, int bits, int order, float clip) {
  __shared__ float most_of[2][MOST_WARPS], sum_of[2][MOST_WARPS];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
  const Quantizer q{out, scales, width, bits, order, clip};
  int turn = 0;  // of the two sets of sums: the next row may write while this one is read
  Asked asked;

  ptx::launch_dependents();
  ptx::wait_for_previous_kernel();
  if (AHEAD && blockIdx.x < rows) asked.load(Row{x + blockIdx.x * ldx, gain, k, activation, gain_type});
  for (int row = blockIdx.x; row < rows; row += gridDim.x, turn ^= 1) {
    const Row from{x + row * ldx, gain, k, activation, gain_type};
    if (!AHEAD) asked.load(from);
    float v[PAIR_COUNT][2][8], most = 0.0f, sum = 0.0f;
#pragma unroll
    for (int o = 0; o < OCTETS; o++) {
      uint4 octet = asked.octets[o][0];
      if constexpr (ACTS) octet = from.activated<NUMBER>(octet, asked.octets[o][SOURCES - 1]);
      hadamard::widen<NUMBER>(v[o / 2][o % 2], octet);
    }
    if (AHEAD && row + gridDim.x < rows)
      asked.load(Row{x + ptx::opaque(row + gridDim.x) * ldx, gain, k, activation, gain_type});
#pragma unroll
    for (int o = 0; o < OCTETS; o++) {
      float(&w)[8] = v[o / 2][o % 2];
      if (activation == ACT_NORM) {
#pragma unroll
        for (int i = 0; i < 8; i++) sum = fmaf(w[i], w[i], sum);
        from.gained(w, from.column(o / 2, o % 2));
      }
#pragma unroll
      for (int i = 0; i < 8; i++) most = hadamard::max_abs(most, w[i]);
    }
    most = hadamard::warp_max(most);
    if (activation == ACT_NORM) sum = hadamard::warp_sum(sum);
    if (lane == 0) most_of[turn][warp] = most, sum_of[turn][warp] = sum;
    __syncthreads();
    most = hadamard::warp_max(lane < warps ? most_of[turn][lane] : 0.0f);
    float factor = 1.0f;
    if (activation == ACT_NORM)
      factor = rsqrtf(fmaf(hadamard::warp_sum(lane < warps ? sum_of[turn][lane] : 0.0f), share, eps));
    const hadamard::RowScale scale(most, factor, q);
    if (threadIdx.x == 0 && bits != 16) scales[row] = scale.scale;
    hadamard::for_mode(q, Writer{from, v, scale, q, out + ptx::opaque(row) * q.row_bytes()});
  }
}
