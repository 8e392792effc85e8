// codes, scales = quantize(x (H_m ⊗ B) * f): a row of n = m * C values in one pass, x 16 bit, sums fp32.
//
//   H_m   any +-1 matrix of m <= MP rows, given as bits: the odd factor of a width, a power of two, or all heads
//   B     Sylvester of order C = 2^LOG_C over sqrt (STEPS), or the identity (across heads, C = head size)
//   f     1/sqrt(block), and the norm's 1/rms where x is what a norm reads; or x = round16(act(gate) * up)
//
// Bound by bytes: 2 in (4 with an activation), 1 out for each value. What must not cost more than the bytes is the
// fp32 work and the traffic to shared memory (128 bytes a cycle), so:
//
//  1 A row comes to shared memory by cp.async as it is, 16 bit, rows of C values padded by 16 bytes.
//  2 Tensor cores apply H_m: A = H_m^T from registers (+-1, exact), B = x by transposing ldmatrix, fp32 sums. It costs
//    MP multiply-adds a value but no traffic beyond reading 2 bytes. A warp's task is MT m-tiles of 16 rows x NT
//    n-tiles of 8 columns: lane (g, t) then holds rows g, g + 8 and columns 2t, 2t + 1 of each tile.
//  3 The n-tiles of a warp differ in bits 3, 5, 6 (and 7) of the column: butterflies between them stay in registers.
//  4 One exchange through shared memory. A thread takes bits 0, 1, 2, 4 and those above: whole octets, two to a block
//    of 32, butterflies in registers, and what `write_block` wants.
//  5 The largest |value| of the row, one barrier, codes.
//
// The exchange: row j, column c lies at float j * (C + 8) + 4 * (c / 4 ^ b5 ^ 4 * b6) + c % 4 with bits 5, 6 of c. The
// padding parts the rows of a store, the exclusive-or the columns of a load; neither meets a bank twice.
//
// The next row's bytes are asked for as soon as their place is free. Blocks are persistent: row = blockIdx.x + i * grid.
// Requires: m a multiple of 4, n = width, x's rows 16-byte aligned, shared memory as the launcher counts it.
// Tested by tests/gpu/test_hadamard.py.
#include "hadamard.cuh"

// Template parameters: 16-bit format, padded m (16, 32, 48, 64), log2 C, bits of the columns that n-tiles take, m-tiles
// of a task, warps, whether C is transformed too.
template <int ACT_, int MP_, int LOG_C_, int NT_BITS_, int MT_, int WARPS_, bool STEPS_> struct Config {
  static constexpr int ACT = ACT_, MP = MP_, LOG_C = LOG_C_, NT_BITS = NT_BITS_, MT = MT_, WARPS = WARPS_;
  static constexpr bool STEPS = STEPS_;
  static constexpr int C = 1 << LOG_C, NT = 1 << NT_BITS, KT = MP / 16, THREADS = 32 * WARPS;
  static constexpr int COLUMN_SETS = C / (8 * NT), TASKS = COLUMN_SETS * (MP / 16 / MT);
  static constexpr int HELD = 1 << (LOG_C - NT_BITS), HIGH = HELD / 16;  // values of a thread's group; above bit 4
  static constexpr int GROUPS = MP * NT, EACH = (GROUPS + THREADS - 1) / THREADS;
  static constexpr int PITCH = C + 8;  // of both buffers, in values
  static constexpr int OCTETS = C / 8, LINES = THREADS / OCTETS;  // of a line; lines that the threads copy at once
  static_assert(MP % 16 == 0 && MP <= 64 && (MP / 16) % MT == 0 && TASKS <= WARPS, "a task a warp");
  static_assert(LOG_C >= 5 && HELD >= 16 && NT_BITS >= 2, "a thread holds two octets");
};

// Where bits 3, 5, 6, 7 of a column lie when they are counted together: n-tiles and lanes of groups.
DEVICE constexpr int spread(int i) { return (i & 1) << 3 | (i >> 1 & 1) << 5 | (i >> 2 & 1) << 6 | (i >> 3 & 1) << 7; }

// Transposed ldmatrix: B fragments of rows k..k+15 (x2) or k..k+31 (x4) of a column tile.
DEVICE void load_transposed_x4(u32 (&to)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(address)
               : "memory");
}
DEVICE void load_transposed_x2(u32 &a, u32 &b, u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
               : "=r"(a), "=r"(b)
               : "r"(address)
               : "memory");
}

DEVICE void store_shared_16(u32 address, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

template <class T> struct Dense {
  const u16 *x;
  u64 ldx;
  int m, count, activation;  // rows of H, values of x a row, what x is
  float factor, eps, share;  // 1 / sqrt(block); the norm's; 1 / (m * n): H_m makes squares m times as large
  Quantizer q;
  u32 in;        // shared address: u16 [MP][PITCH], rows past m are zeros
  u32 exchange;  // float [m][PITCH]; with an activation it receives gate and up first
  float *most;      // of each warp
  float *squares;
  uint4 *matrix;  // H^T as A fragments: [m-tile][k-tile][lane]

  // What follows from it is made where it is wanted: kept, the addresses of a later step would spill.
  DEVICE static int thread() { return static_cast<int>(ptx::opaque(threadIdx.x)); }

  DEVICE int n() const { return m * T::C; }

  DEVICE bool acts() const { return activation == ACT_SILU || activation == ACT_GELU_TANH; }

  // Asks for a row: x itself to its padded place, gate and up to the exchange's.
  DEVICE void ask(int row) const {
    const int tid = thread();
    const u16 *from = x + ptx::opaque(row) * ldx + 8 * tid;
    if (acts())
      copy<2 * T::MP, T::C>(from, exchange, 2 * m, tid);
    else
      copy<T::MP, T::PITCH>(from, in, m, tid);
    ptx::copy_async_commit();
  }

  // Copies `lines` lines of C values to lines of PITCH values; a thread's octets are as many lines apart.
  template <int MOST, int PITCH> DEVICE static void copy(const u16 *from, u32 base, int lines, int tid) {
    const int line = tid / T::OCTETS;
    const u32 to = base + 2 * (line * PITCH + 8 * (tid % T::OCTETS));
#pragma unroll
    for (int i = 0; i < MOST; i += T::LINES)
      if (line + i < lines) ptx::copy_async_16(to + 2 * i * PITCH, from + i * T::C);
  }

  // d = round16(act(gate) * up), from the exchange to the input's place.
  DEVICE void activate() const {
    const int tid = thread();
    const int line = tid / T::OCTETS;
    const u32 from = exchange + 16 * tid, to = in + 2 * (line * T::PITCH + 8 * (tid % T::OCTETS)), up = 2 * n();
#pragma unroll 2
    for (int i = 0; line + i < m; i += T::LINES) {
      const u32 gate = from + 2 * i * T::C;
      store_shared_16(to + 2 * i * T::PITCH,
                      hadamard::activate_octet<T::ACT>(ptx::load_shared_16(gate), ptx::load_shared_16(gate + up),
                                                       activation));
    }
  }

  // Makes the fragments of H^T from its bits: row i of H is word i.
  DEVICE void load_matrix(const u64 *rows) const {
    const u32 one = T::ACT == FP16 ? 0x3C00 : 0x3F80;
    const int lane = threadIdx.x % 32;
    for (int i = threadIdx.x / 32; i < T::MP / 16 * T::KT; i += T::WARPS) {
      const int g = lane / 4, t = lane % 4;
      u32 a[4];
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const int j = i / T::KT * 16 + g + 8 * (e % 2), column = i % T::KT * 16 + 8 * (e / 2) + 2 * t;
        a[e] = j < m ? matrix_value(rows, column, j, one) | matrix_value(rows, column + 1, j, one) << 16 : 0;
      }
      matrix[32 * i + lane] = make_uint4(a[0], a[1], a[2], a[3]);
    }
  }

  DEVICE u32 matrix_value(const u64 *rows, int i, int j, u32 one) const {
    return i < m ? one | static_cast<u32>(rows[i] >> j & 1) << 15 : 0;
  }

  // Puts a task's values into the exchange. Bits 4, 5 and 6 of a column decide about the exclusive-or: 5 and 6 are the
  // n-tile's, 4 the task's.
  DEVICE void put(const float (&d)[T::MT][T::NT][4], int m_tile, int column0, int lane) const {
    const int g = lane / 4, t = lane % 4, first = 16 * m_tile + g;
    const u32 line = exchange + 4 * (first * T::PITCH + (column0 & ~16) + 2 * (t & 1));
    u32 to[2][2];  // for bits 6 and 5
#pragma unroll
    for (int b6 = 0; b6 < 2; b6++)
#pragma unroll
      for (int b5 = 0; b5 < 2; b5++) to[b6][b5] = line + 4 * ((column0 & 16 ^ b6 << 4) + 4 * (t >> 1 ^ b5));
#pragma unroll
    for (int i = 0; i < T::MT; i++)
#pragma unroll
      for (int h = 0; h < 2; h++)
        if (first + 16 * i + 8 * h < m)
#pragma unroll
          for (int n = 0; n < T::NT; n++)
            ptx::store_shared_8(to[n >> 2 & 1][n >> 1 & 1] + 4 * ((16 * i + 8 * h) * T::PITCH + spread(n)),
                                make_float2(d[i][n][2 * h], d[i][n][2 * h + 1]));
  }

  // Steps 2 to 4, first half: H_m, the n-tiles' butterflies, into the exchange. Returns the sum of squares.
  DEVICE float task(int m_tile, int set, int lane) const {
    // The set counts bit 4 and those above the n-tiles'.
    const int column0 = (set & 1) << 4 | (set >> 1) << (T::NT_BITS + 4);
    u32 a[T::MT][T::KT][4];
#pragma unroll
    for (int i = 0; i < T::MT; i++)
#pragma unroll
      for (int k = 0; k < T::KT; k++) {
        const uint4 r = matrix[32 * ((m_tile + i) * T::KT + k) + lane];
        a[i][k][0] = r.x, a[i][k][1] = r.y, a[i][k][2] = r.z, a[i][k][3] = r.w;
      }
    float d[T::MT][T::NT][4];
    const u32 from = in + 2 * ((T::KT == 1 ? lane % 16 : lane) * T::PITCH + column0);
#pragma unroll
    for (int n = 0; n < T::NT; n++) {
      if (n % 8 == 0 && n > 0) __syncwarp();  // no more than eight tiles are loaded ahead, or registers spill
#pragma unroll
      for (int i = 0; i < T::MT; i++)
#pragma unroll
        for (int e = 0; e < 4; e++) d[i][n][e] = 0.0f;
#pragma unroll
      for (int k = 0; k < T::KT; k += 2) {
        u32 b[4];
        if (k + 1 < T::KT)
          load_transposed_x4(b, from + 2 * (T::PITCH * 16 * k + spread(n)));
        else
          load_transposed_x2(b[0], b[1], from + 2 * (T::PITCH * 16 * k + spread(n)));
#pragma unroll
        for (int i = 0; i < T::MT; i++) {
          Number<T::ACT>::product(d[i][n], a[i][k], b[0], b[1], d[i][n]);
          if (k + 1 < T::KT) Number<T::ACT>::product(d[i][n], a[i][k + 1], b[2], b[3], d[i][n]);
        }
      }
    }
    float sum = 0.0f;
    if (activation == ACT_NORM) {
#pragma unroll
      for (int i = 0; i < T::MT; i++)
#pragma unroll
        for (int n = 0; n < T::NT; n++)
#pragma unroll
          for (int e = 0; e < 4; e++) sum = fmaf(d[i][n][e], d[i][n][e], sum);
    }
    if (T::STEPS) {
#pragma unroll
      for (int step = 1; step < T::NT; step *= 2)
#pragma unroll
        for (int i = 0; i < T::MT; i++)
#pragma unroll
          for (int n = 0; n < T::NT; n++)
            if ((n & step) == 0)
#pragma unroll
              for (int e = 0; e < 4; e++) {
                const float u = d[i][n][e], v = d[i][n + step][e];
                d[i][n][e] = u + v, d[i][n + step][e] = u - v;
              }
    }
    put(d, m_tile, column0, lane);
    return sum;
  }

  // The second half: a group's values from the exchange, butterflies of the other bits.
  DEVICE void gather(float (&v)[T::HIGH][2][8], int group) const {
    const int j = group / T::NT, low = spread(group % T::NT);
    const int b5 = low >> 5 & 1, b6 = low >> 6 & 1;
    const u32 line = exchange + 4 * (j * T::PITCH + low);
    u32 from[2][2];
#pragma unroll
    for (int b4 = 0; b4 < 2; b4++)
#pragma unroll
      for (int h = 0; h < 2; h++) from[b4][h] = line + 4 * (16 * (b4 ^ b6) + 4 * (h ^ b5));
#pragma unroll
    for (int high = 0; high < T::HIGH; high++)
#pragma unroll
      for (int b4 = 0; b4 < 2; b4++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const uint4 r = ptx::load_shared_16(from[b4][h] + (4 << T::NT_BITS + 4) * high);
          float *to = &v[high][b4][4 * h];
          to[0] = __uint_as_float(r.x), to[1] = __uint_as_float(r.y);
          to[2] = __uint_as_float(r.z), to[3] = __uint_as_float(r.w);
        }
    if (T::STEPS) {
      float(&flat)[T::HELD] = reinterpret_cast<float(&)[T::HELD]>(v);
      hadamard::butterfly<T::HELD, 1>(flat);
      hadamard::butterfly<T::HELD, 2>(flat);
      hadamard::butterfly<T::HELD, 4>(flat);
      hadamard::butterfly<T::HELD, 8>(flat);
      if constexpr (T::HELD > 16) hadamard::butterfly<T::HELD, 16>(flat);
      if constexpr (T::HELD > 32) hadamard::butterfly<T::HELD, 32>(flat);
    }
  }

  DEVICE void row(int row, int next, int rows) const {
    const int warp = thread() / 32, lane = thread() % 32;
    ptx::copy_async_wait<0>();
    __syncthreads();
    if (acts()) {
      activate();
      __syncthreads();
    }
    float sum = 0.0f;
    if (T::TASKS >= T::WARPS || warp < T::TASKS) sum = task(warp / T::COLUMN_SETS * T::MT, warp % T::COLUMN_SETS, lane);
    if (activation == ACT_NORM) {
      sum = hadamard::warp_sum(sum);
      if (lane == 0) squares[warp] = sum;
    }
    __syncthreads();
    if (!acts() && next < rows) ask(next);  // the input's place is free
    // Threads past the last group repeat it: a branch around this would cost the compiler its registers.
    float v[T::EACH][T::HIGH][2][8], most = 0.0f;
#pragma unroll
    for (int e = 0; e < T::EACH; e++) {
      gather(v[e], min(thread() + e * T::THREADS, m * T::NT - 1));
#pragma unroll
      for (int i = 0; i < T::HELD; i++) most = hadamard::max_abs(most, (&v[e][0][0][0])[i]);
    }
    most = hadamard::warp_max(most);
    if (lane == 0) this->most[warp] = most;
    __syncthreads();
    if (acts() && next < rows) ask(next);  // the exchange's place is free
    most = hadamard::warp_max(lane < T::WARPS ? this->most[lane] : 0.0f);
    float f = factor;
    if (activation == ACT_NORM) {
      float total = 0.0f;
#pragma unroll
      for (int i = 0; i < T::WARPS; i++) total += squares[i];
      f *= rsqrtf(fmaf(total, share, eps));
    }
    const hadamard::RowScale scale(most, f, q);
    if (threadIdx.x == 0 && q.bits != 16) q.scales[row] = scale.scale;
    hadamard::for_mode(q, Writer{*this, v, scale, q.out + ptx::opaque(row) * q.row_bytes()});
  }

  struct Writer {
    const Dense &d;
    const float (&v)[T::EACH][T::HIGH][2][8];
    const hadamard::RowScale &scale;
    u8 *row;
    template <int MODE> DEVICE void write() const {
      const int thread = d.thread();
#pragma unroll
      for (int e = 0; e < T::EACH; e++) {
        const int group = thread + e * T::THREADS;
        const bool real = group < d.m * T::NT;
        if (__any_sync(0xFFFFFFFFu, real)) {  // of a whole warp, as the shuffles want it
          const int block = (group / T::NT * T::C + (spread(group % T::NT) & ~8)) / 32;
          u8 *to = row + hadamard::block_bytes(MODE) * block;
#pragma unroll
          for (int high = 0; high < T::HIGH; high++)
            hadamard::write_block<T::ACT, MODE>(to + hadamard::block_bytes(MODE) * (high << T::NT_BITS - 1), v[e][high],
                                                scale, d.q, real);
        }
      }
    }
  };
};

extern "C" __global__ void __launch_bounds__(32 * WARP_COUNT, RESIDENT)
    ENTRY(const u16 *x, const u64 *matrix, u8 *out, float *scales, int rows, u64 ldx, int m, int activation, float factor,
          float eps, float share, int width, int bits, int order, float clip) {
  using T = Config<CONFIG>;
  extern __shared__ __align__(128) u8 memory[];
  __shared__ float most[T::WARPS], squares[T::WARPS];
  __shared__ uint4 fragments[T::MP / 16 * T::KT * 32];
  Dense<T> d;
  d.x = x, d.ldx = ldx, d.m = m, d.activation = activation, d.factor = factor, d.eps = eps, d.share = share;
  d.q = Quantizer{out, scales, width, bits, order, clip};
  d.in = ptx::shared_address(memory), d.exchange = d.in + 2 * T::MP * T::PITCH;
  d.most = most, d.squares = squares, d.matrix = fragments;

  ptx::launch_dependents();
  for (int i = threadIdx.x; i < (T::MP - m) * T::PITCH / 2; i += T::THREADS)
    reinterpret_cast<u32 *>(memory)[m * T::PITCH / 2 + i] = 0;  // H has no rows there, but 0 * garbage need not be 0
  d.load_matrix(matrix);
  ptx::wait_for_previous_kernel();
  int row = blockIdx.x;
  if (row < rows) d.ask(row);
  for (; row < rows; row += static_cast<int>(gridDim.x)) {
    d.in = ptx::opaque(ptx::shared_address(memory)), d.exchange = d.in + 2 * T::MP * T::PITCH;
    d.row(row, row + static_cast<int>(gridDim.x), rows);
  }
}
