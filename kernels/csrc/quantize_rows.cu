// codes, scales = quantize(x (* gain) * f): rows without a transform and without an activation; f is a norm's 1/rms or 1.
//
// Bound by bytes. What a thread does once a row (sums over the warp, the scale, addresses) is shared by its PAIRS * 16
// values. It asks for all its octets of a row at once; while they are on their way, other blocks of the multiprocessor
// work, and with AHEAD this one, on the row before. One barrier a row serves the sum of squares and the largest value
// together (f is positive, so it can be multiplied in afterwards).
// WARPS: of a block at most; 16 * PAIRS * threads >= width. RESIDENT: blocks of so many warps that the registers allow.
// Requires width % 32 = 0 and k % 8 = 0. Tested by tests/gpu/test_hadamard.py.
#include "quantize_row.cuh"

constexpr int STEP = 512;  // columns that a warp reads at a time; PAIRS of these side by side are its own
constexpr int MOST = (WARPS + 3) / 4 * 4;

struct Octets {
  uint4 o[PAIRS][2];

  DEVICE void load(const u16 *x, int column, int k) {
#pragma unroll
    for (int p = 0; p < PAIRS; p++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int c = column + STEP * p + 16 * h;
        o[p][h] = c < k ? *reinterpret_cast<const uint4 *>(x + c) : make_uint4(0, 0, 0, 0);
      }
  }
};

template <int GAIN> DEVICE void gained(float (&v)[8], const void *gain, int column) {
  if constexpr (GAIN != GAIN_NONE) {
    float g[8];
    load_gain(g, gain, GAIN, column);
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] *= g[i];
  }
}

// Values with their gains, the sum of squares before them and the largest after.
template <int GAIN>
DEVICE void widened(float (&v)[PAIRS][2][8], const Octets &octets, const void *gain, int column, int k,
                    float &sum, float &most) {
  float sums[2] = {}, chains[2] = {};
#pragma unroll
  for (int p = 0; p < PAIRS; p++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float(&w)[8] = v[p][h];
      hadamard::widen<NUMBER>(w, octets.o[p][h]);
#pragma unroll
      for (int i = 0; i < 8; i++) sums[i % 2] = fmaf(w[i], w[i], sums[i % 2]);
      const int c = column + STEP * p + 16 * h;
      if (c < k) gained<GAIN>(w, gain, c);
#pragma unroll
      for (int i = 0; i < 8; i++) chains[i % 2] = hadamard::max_abs(chains[i % 2], w[i]);
    }
  sum = sums[0] + sums[1], most = hadamard::max_abs(chains[0], chains[1]);
}

struct Writer {
  const float (&v)[PAIRS][2][8];
  const hadamard::RowScale &scale;
  const Quantizer &q;
  u8 *row;
  int block;  // of 32 columns, this lane's first

  template <int MODE> DEVICE void write() const {
#pragma unroll
    for (int p = 0; p < PAIRS; p++) {
      const int b = block + STEP / 32 * p;
      hadamard::write_block<NUMBER, MODE>(row + hadamard::block_bytes(MODE) * b, v[p], scale, q, 32 * b < q.width);
    }
  }
};

extern "C" __global__ void __launch_bounds__(32 * WARPS, RESIDENT)
    ENTRY(const u16 *x, const void *gain, u8 *out, float *scales, int rows, u64 ldx, int k, int activation, int gain_type,
          float eps, float share, int width, int bits, int order, float clip) {
  __shared__ __align__(16) float most_of[2][MOST], sum_of[2][MOST];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int column = PAIRS * STEP * warp + lane / 2 * 32 + lane % 2 * 8;
  const Quantizer q{out, scales, width, bits, order, clip};
  int turn = 0;  // of the two sets of numbers: the next row may write while this one is read
  Octets octets;

  if (threadIdx.x < MOST)  // what warps that this block lacks would add
    for (int i = 0; i < 2; i++) most_of[i][lane] = sum_of[i][lane] = 0.0f;
  __syncthreads();
  ptx::launch_dependents();
  ptx::wait_for_previous_kernel();
  if (AHEAD && blockIdx.x < rows) octets.load(x + blockIdx.x * ldx, column, k);
  for (int row = blockIdx.x; row < rows; row += gridDim.x, turn ^= 1) {
    if (!AHEAD) octets.load(x + row * ldx, column, k);
    float v[PAIRS][2][8], most, sum;
    switch (gain_type) {
    case GAIN_NONE: widened<GAIN_NONE>(v, octets, gain, column, k, sum, most); break;
    case GAIN_FLOAT: widened<GAIN_FLOAT>(v, octets, gain, column, k, sum, most); break;
    case GAIN_FP16: widened<GAIN_FP16>(v, octets, gain, column, k, sum, most); break;
    default: widened<GAIN_BF16>(v, octets, gain, column, k, sum, most);
    }
    if (AHEAD && row + gridDim.x < rows) octets.load(x + ptx::opaque(row + gridDim.x) * ldx, column, k);
    most = hadamard::warp_max(most);
    if (activation == ACT_NORM) sum = hadamard::warp_sum(sum);
    if (lane == 0) most_of[turn][warp] = most, sum_of[turn][warp] = sum;
    __syncthreads();
    most = 0.0f, sum = 0.0f;
#pragma unroll
    for (int i = 0; i < WARPS; i++) most = hadamard::max_abs(most, most_of[turn][i]), sum += sum_of[turn][i];
    const hadamard::RowScale scale(most, activation == ACT_NORM ? rsqrtf(fmaf(sum, share, eps)) : 1.0f, q);
    if (threadIdx.x == 0 && bits != 16) scales[row] = scale.scale;
    hadamard::for_mode(q, Writer{v, scale, q, out + ptx::opaque(row) * q.row_bytes(), column / 32});
  }
}
