// codes, scales = quantize(v (I ⊗ H_m1 ⊗ H_m2 ... ⊗ I) * f): every transform that the faster kernel does not make.
//
// A row is kept in fp32, in shared memory where it fits and else in a piece of global memory for each block, which
// stays in the L2 cache. Factor by factor: a power of two in place, up to three steps at once in registers; a small
// order in place too, a column of it in registers and H as floats that all lanes read at once; a larger one from one
// copy to the other, four sums a thread, signs from words of bits. Reads and writes the activations once, but its own
// traffic is many times theirs: right, not fast.
//
//   plan   ints: number of factors, then for each (m, stride, first word of signs or -1 for a power of two)
//   signs  for each factor m * ceil(m / 32) words: bit i % 32 of word i / 32 of row j is set where H[i, j] = -1
//
// Requires: m a multiple of 4 where it is no power of two. Tested by tests/gpu/test_hadamard.py.
#include "quantize_row.cuh"

constexpr int THREADS = 512, WARPS = THREADS / 32, MOST_SMALL = 28;
constexpr int RESIDENT = 2;  // blocks a multiprocessor; left to the assembler, it takes as many, and on sm_120 75 words spill

struct Plan {
  const int *entries;
  const u32 *signs;
  int n;
  float4 *table;  // shared: H of a small order, [j / 4][i] for outputs j to j + 3

  // STEPS butterflies: elements `stride` apart, then twice that, ...
  template <int STEPS> DEVICE void steps(float *row, int stride) const {
    constexpr int COUNT = 1 << STEPS;
    for (int i = threadIdx.x; i < n / COUNT; i += THREADS) {
      float *at = row + i / stride * stride * COUNT + i % stride;
      float v[COUNT];
#pragma unroll
      for (int e = 0; e < COUNT; e++) v[e] = at[e * stride];
      hadamard::butterfly<COUNT, 1>(v);
      if constexpr (STEPS > 1) hadamard::butterfly<COUNT, 2>(v);
      if constexpr (STEPS > 2) hadamard::butterfly<COUNT, 4>(v);
#pragma unroll
      for (int e = 0; e < COUNT; e++) at[e * stride] = v[e];
    }
    __syncthreads();
  }

  DEVICE void power_of_two(float *row, int m, int stride) const {
    for (; m >= 8; m /= 8, stride *= 8) steps<3>(row, stride);
    if (m == 4) steps<2>(row, stride);
    if (m == 2) steps<1>(row, stride);
  }

  template <int M> DEVICE void small(float *row, int stride, const u32 *bits) const {
    float *entry = reinterpret_cast<float *>(table);
    for (int e = threadIdx.x; e < M * M; e += THREADS) {
      const int i = e / 4 % M, j = e / (4 * M) * 4 + e % 4;
      entry[e] = bits[j] >> i & 1 ? -1.0f : 1.0f;
    }
    __syncthreads();
    for (int item = threadIdx.x; item < n / M; item += THREADS) {
      float *at = row + item / stride * stride * M + item % stride;
      float v[M];
#pragma unroll
      for (int i = 0; i < M; i++) v[i] = at[i * stride];
#pragma unroll 1
      for (int quad = 0; quad < M / 4; quad++) {
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int i = 0; i < M; i++) {
          const float4 h = table[quad * M + i];
          sum.x = fmaf(v[i], h.x, sum.x), sum.y = fmaf(v[i], h.y, sum.y);
          sum.z = fmaf(v[i], h.z, sum.z), sum.w = fmaf(v[i], h.w, sum.w);
        }
        float *to = at + 4 * quad * stride;
        to[0] = sum.x, to[stride] = sum.y, to[2 * stride] = sum.z, to[3 * stride] = sum.w;
      }
    }
    __syncthreads();
  }

  DEVICE void dense(const float *from, float *to, int m, int stride, const u32 *bits) const {
    const int words = (m + 31) / 32, quads = m / 4;
    for (int item = threadIdx.x; item < n / 4; item += THREADS) {
      const int inner = item % stride, rest = item / stride, j = rest % quads * 4;
      const u64 base = static_cast<u64>(rest / quads) * m * stride + inner;
      float sum[4] = {};
      for (int i0 = 0; i0 < m; i0 += 32) {
        u32 w[4];
#pragma unroll
        for (int e = 0; e < 4; e++) w[e] = bits[(j + e) * words + i0 / 32];
        for (int i = i0; i < min(m, i0 + 32); i++) {
          const u32 v = __float_as_uint(from[base + static_cast<u64>(i) * stride]);
#pragma unroll
          for (int e = 0; e < 4; e++) {
            sum[e] += __uint_as_float(v ^ w[e] << 31);
            w[e] >>= 1;
          }
        }
      }
#pragma unroll
      for (int e = 0; e < 4; e++) to[base + static_cast<u64>(j + e) * stride] = sum[e];
    }
    __syncthreads();
  }

  // All factors; returns where the row is afterwards.
  DEVICE float *run(float *row, float *other) const {
    for (int f = 0; f < entries[0]; f++) {
      const int m = entries[3 * f + 1], stride = entries[3 * f + 2], first = entries[3 * f + 3];
      if (first < 0) {
        power_of_two(row, m, stride);
      } else if (m == 12) {
        small<12>(row, stride, signs + first);
      } else if (m == 20) {
        small<20>(row, stride, signs + first);
      } else if (m == 28) {
        small<28>(row, stride, signs + first);
      } else {
        dense(row, other, m, stride, signs + first);
        float *swap = row;
        row = other, other = swap;
      }
    }
    return row;
  }
};

template <int ACT> struct Writer {
  const float *from;
  int k;
  const hadamard::RowScale &scale;
  const Quantizer &q;
  u8 *row;

  template <int MODE> DEVICE void write() const {
    for (int first = 0; first < q.width / 16; first += THREADS) {  // whole warps: they exchange values
      const int unit = first + threadIdx.x, block = unit / 2, column = 32 * block + unit % 2 * 8;
      float v[2][8];
#pragma unroll
      for (int h = 0; h < 2; h++)
#pragma unroll
        for (int i = 0; i < 8; i++) v[h][i] = column + 16 * h < k ? from[column + 16 * h + i] : 0.0f;
      hadamard::write_block<ACT, MODE>(row + static_cast<u64>(hadamard::block_bytes(MODE)) * block, v, scale, q,
                                       32 * block < q.width);
    }
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    ENTRY(const u16 *x, const void *gain, const int *entries, const u32 *signs, float *scratch, u8 *out, float *scales,
          int rows, u64 ldx, int k, int activation, int gain_type, float scaling, float eps, float share, int width,
          int bits, int order, float clip) {
  extern __shared__ __align__(16) float memory[];
  __shared__ float most_of[WARPS], sum_of[WARPS];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Quantizer q{out, scales, width, bits, order, clip};
  __shared__ float4 table[MOST_SMALL * MOST_SMALL / 4];
  const Plan plan{entries, signs, k, table};
  float *first = scratch == nullptr ? memory : scratch + 2ull * k * blockIdx.x;

  ptx::launch_dependents();
  ptx::wait_for_previous_kernel();
  for (int row = blockIdx.x; row < rows; row += gridDim.x) {
    const Row from{x + row * ldx, gain, k, activation, gain_type};
    float sum = 0.0f, most = 0.0f, factor = scaling;
    for (int column = 8 * threadIdx.x; column < k; column += 8 * THREADS) {
      uint4 octet = from.load(column, 0);
      if (activation == ACT_SILU || activation == ACT_GELU_TANH)
        octet = from.activated<NUMBER>(octet, from.load(column, 1));
      float v[8];
      hadamard::widen<NUMBER>(v, octet);
#pragma unroll
      for (int i = 0; i < 8; i++) sum = fmaf(v[i], v[i], sum);
      from.gained(v, column);
#pragma unroll
      for (int i = 0; i < 8; i++) first[column + i] = v[i];
    }
    sum = hadamard::warp_sum(sum);
    if (lane == 0) sum_of[warp] = sum;
    __syncthreads();
    float *made = plan.run(first, first + k);
    for (int i = threadIdx.x; i < k; i += THREADS) most = hadamard::max_abs(most, made[i]);
    most = hadamard::warp_max(most);
    if (lane == 0) most_of[warp] = most;
    __syncthreads();
    most = hadamard::warp_max(lane < WARPS ? most_of[lane] : 0.0f);
    if (activation == ACT_NORM)
      factor *= rsqrtf(fmaf(hadamard::warp_sum(lane < WARPS ? sum_of[lane] : 0.0f), share, eps));
    const hadamard::RowScale scale(most, factor, q);
    if (threadIdx.x == 0 && bits != 16) scales[row] = scale.scale;
    hadamard::for_mode(q, Writer<NUMBER>{made, k, scale, q, out + row * q.row_bytes()});
    __syncthreads();  // the row's place and the sums are free
  }
}
