// codes, scales = quantize(round16(act(gate) * up)): rows without a transform behind an activation. quantize_rows.cu has
// those without one.
//
// Bound by bytes, so by how many of them are on their way: a thread asks for its octets of the next row before it works
// on those of this one, and keeps the values in fp32 registers; one barrier a row.
// PAIRS: how many times two octets a thread holds; 16 * PAIRS * threads >= width. RESIDENT: blocks of 512 threads that
// the registers allow. Tested by tests/gpu/test_hadamard.py.
#include "quantize_row.cuh"

constexpr int MOST_WARPS = 16, OCTETS = 2 * PAIRS;
constexpr bool AHEAD = PAIRS == 1;  // else the next row's values find no registers

// What a thread asks for of a row: octets of gate and of up.
struct Asked {
  uint4 octets[OCTETS][2];

  DEVICE void load(const Row &row) {
#pragma unroll
    for (int o = 0; o < OCTETS; o++)
#pragma unroll
      for (int s = 0; s < 2; s++) octets[o][s] = row.load(row.column(o / 2, o % 2), s);
  }
};

struct Writer {
  const Row &from;
  const float (&v)[PAIRS][2][8];
  const hadamard::RowScale &scale;
  const Quantizer &q;
  u8 *row;

  template <int MODE> DEVICE void write() const {
#pragma unroll
    for (int p = 0; p < PAIRS; p++) {
      const int block = from.column(p, 0) / 32;
      hadamard::write_block<NUMBER, MODE>(row + hadamard::block_bytes(MODE) * block, v[p], scale, q, 32 * block < q.width);
    }
  }
};

extern "C" __global__ void __launch_bounds__(512, RESIDENT)
    ENTRY(const u16 *x, const void *gain, u8 *out, float *scales, int rows, u64 ldx, int k, int activation, int gain_type,
          float eps, float share, int width, int bits, int order, float clip) {
  __shared__ float most_of[2][MOST_WARPS];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
  const Quantizer q{out, scales, width, bits, order, clip};
  int turn = 0;  // of the two sets of numbers: the next row may write while this one is read
  Asked asked;

  ptx::launch_dependents();
  ptx::wait_for_previous_kernel();
  if (AHEAD && blockIdx.x < rows) asked.load(Row{x + blockIdx.x * ldx, gain, k, activation, gain_type});
  for (int row = blockIdx.x; row < rows; row += gridDim.x, turn ^= 1) {
    const Row from{x + row * ldx, gain, k, activation, gain_type};
    if (!AHEAD) asked.load(from);
    float v[PAIRS][2][8], most = 0.0f;
#pragma unroll
    for (int o = 0; o < OCTETS; o++)
      hadamard::widen<NUMBER>(v[o / 2][o % 2], from.activated<NUMBER>(asked.octets[o][0], asked.octets[o][1]));
    if (AHEAD && row + gridDim.x < rows)
      asked.load(Row{x + ptx::opaque(row + gridDim.x) * ldx, gain, k, activation, gain_type});
#pragma unroll
    for (int o = 0; o < OCTETS; o++)
#pragma unroll
      for (int i = 0; i < 8; i++) most = hadamard::max_abs(most, v[o / 2][o % 2][i]);
    most = hadamard::warp_max(most);
    if (lane == 0) most_of[turn][warp] = most;
    __syncthreads();
    most = hadamard::warp_max(lane < warps ? most_of[turn][lane] : 0.0f);
    const hadamard::RowScale scale(most, 1.0f, q);
    if (threadIdx.x == 0 && bits != 16) scales[row] = scale.scale;
    hadamard::for_mode(q, Writer{from, v, scale, q, out + ptx::opaque(row) * q.row_bytes()});
  }
}
