// codes, scales = quantize(x (H_m ⊗ B) * f): a row of n = m * C values in one pass, x 16 bit, sums fp32.
//
//   H_m   any +-1 matrix of m <= MP rows: the odd factors of a width, a power of two, or all heads
//   B     Sylvester of order C = 2^LOG_C over sqrt (STEPS), or the identity (across heads, C = head size)
//   f     1/sqrt(block), and the norm's 1/rms where x is what a norm reads; or x = round16(act(gate) * up)
//
// Bound by bytes: 2 in (4 with an activation), 1 out for each value. What must not cost more than the bytes is the
// fp32 work and the traffic to shared memory (128 bytes a cycle), so:
//
//  1 A row comes to shared memory by cp.async as it is, 16 bit, rows of C values padded by 16 bytes.
//  2 Tensor cores apply H_m: A = H_m^T (+-1, exact), B = x by transposing ldmatrix, fp32 sums. It costs m
//    multiply-adds a value but no traffic beyond reading 2 bytes. A warp's task is MT m-tiles of 16 rows x NT n-tiles
//    of 8 columns: lane (g, t) then holds rows g, g + 8 and columns 2t, 2t + 1 of each tile.
//  3 The n-tiles of a warp differ in bits 3, 5, 6 (and 7) of the column: butterflies between them stay in registers.
//  4 One exchange through shared memory. A thread takes bits 0, 1, 2, 4 and those above: whole octets, two to a block
//    of 32, butterflies in registers, and what `write_block` wants.
//  5 The largest |value| of the row, one barrier, codes.
//
// The exchange: row j, column c lies at float j * (C + 8) + 4 * (c / 4 ^ b5 ^ 4 * b6) + c % 4 with bits 5, 6 of c. The
// padding parts the rows of a store, the exclusive-or the columns of a load; neither meets a bank twice.
//
// The next row's bytes are asked for as soon as their place is free. Blocks are persistent: row = blockIdx.x + i * grid.
// `matrix` holds H_m^T as A fragments, uint4 [m-tiles, a multiple of MT][MP / 16][lane]; up to 64 rows they are copied
// to shared memory, larger ones stay in the caches.
// Requires: n = width, n % 32 = 0, x's rows 16-byte aligned, shared memory as the launcher counts it.
// Tested by tests/gpu/test_hadamard.py.
#include "hadamard.cuh"

// Template parameters: 16-bit format, padded m, log2 C, bits of the columns that n-tiles take, m-tiles of a task, warps,
// whether C is transformed too.
template <int ACT_, u32 MP_, u32 LOG_C_, u32 NT_BITS_, u32 MT_, u32 WARPS_, bool STEPS_> struct Config {
  static constexpr int ACT = ACT_;
  static constexpr u32 MP = MP_, LOG_C = LOG_C_, NT_BITS = NT_BITS_, MT = MT_, WARPS = WARPS_;
  static constexpr bool STEPS = STEPS_, SMALL = MP <= 64;
  static constexpr u32 C = 1 << LOG_C, NT = 1 << NT_BITS, KT = MP / 16, THREADS = 32 * WARPS;
  static constexpr u32 COLUMN_SETS = C / (8 * NT), TASKS = COLUMN_SETS * ((KT + MT - 1) / MT);
  static constexpr u32 HELD = 1 << (LOG_C - NT_BITS), HIGH = HELD / 16;  // values of a thread's group; above bit 4
  static constexpr u32 EACH = (MP * NT + THREADS - 1) / THREADS;         // groups of a thread
  static constexpr u32 PITCH = C + 8;                                    // of both buffers, in values
  static constexpr u32 OCTETS = C / 8, LINES = THREADS / OCTETS;         // of a line; lines that are copied at once
  static_assert(MP % 16 == 0 && TASKS <= WARPS && (!SMALL || KT % MT == 0), "a task a warp");
  static_assert(LOG_C >= 5 && HELD >= 16 && NT_BITS >= 1, "a thread holds two octets, a warp two tiles");
  static_assert(THREADS % OCTETS == 0, "a thread copies one column of octets");
};

// Where bits 3, 5, 6, 7 of a column lie when they are counted together: n-tiles and lanes of groups.
DEVICE constexpr u32 spread(u32 i) { return (i & 1) << 3 | (i >> 1 & 1) << 5 | (i >> 2 & 1) << 6 | (i >> 3 & 1) << 7; }

// Lines I, I + STEP, ... below MOST of C values each, to lines of PITCH values.
template <class T, u32 PITCH, u32 MOST, u32 I = 0>
DEVICE void copy_lines(u32 to, const void *from, u32 line, u32 lines) {
  if constexpr (I < MOST) {
    ptx::copy_line<2 * I * PITCH, 2 * I * T::C>(to, from, line + I, lines);
    copy_lines<T, PITCH, MOST, I + T::LINES>(to, from, line, lines);
  }
}

template <class T> struct Dense {
  const u16 *x;
  u64 ldx;
  u32 m;           // rows of H
  int activation;  // what x is
  float factor, eps, share;  // 1 / sqrt(block); the norm's; 1 / (m * n): H_m makes squares m times as large
  Quantizer q;
  const uint4 *matrix;
  u32 in;        // shared address: u16 [MP][PITCH], rows past m are zeros
  u32 exchange;  // float [m][PITCH]; with an activation it receives gate and up first
  float *most;   // of each warp
  float *squares;

  // What follows from it is made where it is wanted: kept, the addresses of a later step would spill.
  DEVICE static u32 thread() { return ptx::opaque(threadIdx.x); }

  DEVICE bool acts() const { return activation == ACT_SILU || activation == ACT_GELU_TANH; }

  // Asks for a row: x itself to its padded place, gate and up to the exchange's.
  DEVICE void ask(u32 row) const {
    const u32 tid = thread(), line = tid / T::OCTETS, octet = tid % T::OCTETS;
    const u16 *from = x + ptx::opaque(row) * ldx + 8 * tid;
    if (acts())
      copy_lines<T, T::C, 2 * T::MP>(exchange + 16 * tid, from, line, 2 * m);
    else
      copy_lines<T, T::PITCH, T::MP>(in + 2 * (line * T::PITCH + 8 * octet), from, line, m);
    ptx::copy_async_commit();
  }

  // d = round16(act(gate) * up), from the exchange to the input's place.
  template <int ACTIVATION> DEVICE void activate() const {
    const u32 tid = thread(), line = tid / T::OCTETS;
    u32 gate = exchange + 16 * tid, to = in + 2 * (line * T::PITCH + 8 * (tid % T::OCTETS));
    const u32 up = 2 * m * T::C;
#pragma unroll 2
    for (u32 i = line; i < m; i += T::LINES, gate += 2 * T::LINES * T::C, to += 2 * T::LINES * T::PITCH)
      ptx::store_shared_16(to, hadamard::activate_octet<T::ACT, ACTIVATION>(ptx::load_shared_16(gate),
                                                                       ptx::load_shared_16(gate + up)));
  }

  // Puts a task's values into the exchange. Bits 4, 5 and 6 of a column decide about the exclusive-or: 5 and 6 are the
  // n-tile's, 4 the task's.
  DEVICE void put(const float (&d)[T::MT][T::NT][4], u32 m_tile, u32 column0, u32 lane) const {
    const u32 g = lane / 4, t = lane % 4, first = 16 * m_tile + g;
    const u32 line = exchange + 4 * (first * T::PITCH + (column0 & ~16u) + 2 * (t & 1));
    u32 to[2][2];  // for bits 6 and 5
#pragma unroll
    for (u32 b6 = 0; b6 < 2; b6++)
#pragma unroll
      for (u32 b5 = 0; b5 < 2; b5++) to[b6][b5] = line + 4 * ((column0 & 16 ^ b6 << 4) + 4 * (t >> 1 ^ b5));
#pragma unroll
    for (u32 i = 0; i < T::MT; i++)
#pragma unroll
      for (u32 h = 0; h < 2; h++)
        if (first + 16 * i + 8 * h < m)
#pragma unroll
          for (u32 n = 0; n < T::NT; n++)
            ptx::store_shared_8(to[n >> 2 & 1][n >> 1 & 1] + 4 * ((16 * i + 8 * h) * T::PITCH + spread(n)),
                                make_float2(d[i][n][2 * h], d[i][n][2 * h + 1]));
  }

  // One k-tile of H_m: 16 rows of x.
  DEVICE void multiply(float (&d)[T::MT][T::NT][4], const uint4 *fragment, u32 from) const {
    u32 a[T::MT][4];
#pragma unroll
    for (u32 i = 0; i < T::MT; i++) {
      const uint4 r = fragment[32 * i * T::KT];
      a[i][0] = r.x, a[i][1] = r.y, a[i][2] = r.z, a[i][3] = r.w;
    }
#pragma unroll
    for (u32 n = 0; n < T::NT; n += 2) {
      u32 b[4];
      if (n % 8 == 0 && n > 0) __syncwarp();  // no more than eight tiles are loaded ahead, or registers spill
      // B fragments of 16 rows of two column tiles: lane L points at row L % 16 of tile L / 16.
      ptx::load_matrix_x4_transposed(b, from + 2 * spread(n));
#pragma unroll
      for (u32 i = 0; i < T::MT; i++) {
        Number<T::ACT>::product(d[i][n], a[i], b[0], b[1], d[i][n]);
        Number<T::ACT>::product(d[i][n + 1], a[i], b[2], b[3], d[i][n + 1]);
      }
    }
  }

  // Steps 2 to 4, first half: H_m, the n-tiles' butterflies, into the exchange. Returns the sum of squares.
  DEVICE float task(u32 m_tile, u32 set, u32 lane) const {
    // The set counts bit 4 and those above the n-tiles'.
    const u32 column0 = (set & 1) << 4 | (set >> 1) << (T::NT_BITS + 4);
    const u32 from = in + 2 * (lane % 16 * T::PITCH + column0 + lane / 16 * 8);
    const uint4 *fragment = matrix + 32 * m_tile * T::KT + lane;
    float d[T::MT][T::NT][4];
#pragma unroll
    for (u32 i = 0; i < T::MT; i++)
#pragma unroll
      for (u32 n = 0; n < T::NT; n++)
#pragma unroll
        for (u32 e = 0; e < 4; e++) d[i][n][e] = 0.0f;
    if constexpr (T::SMALL) {
#pragma unroll
      for (u32 k = 0; k < T::KT; k++) multiply(d, fragment + 32 * k, from + 32 * k * T::PITCH);
    } else {
      const u32 steps = (m + 15) / 16;
#pragma unroll 1
      for (u32 k = 0; k < steps; k++) multiply(d, fragment + 32 * k, from + 32 * k * T::PITCH);
    }
    float sum = 0.0f;
    if (activation == ACT_NORM) {
#pragma unroll
      for (u32 i = 0; i < T::MT; i++)
#pragma unroll
        for (u32 n = 0; n < T::NT; n++)
#pragma unroll
          for (u32 e = 0; e < 4; e++) sum = fmaf(d[i][n][e], d[i][n][e], sum);
    }
    if constexpr (T::STEPS) {
#pragma unroll
      for (u32 step = 1; step < T::NT; step *= 2)
#pragma unroll
        for (u32 i = 0; i < T::MT; i++)
#pragma unroll
          for (u32 n = 0; n < T::NT; n++)
            if ((n & step) == 0)
#pragma unroll
              for (u32 e = 0; e < 4; e++) {
                const float u = d[i][n][e], v = d[i][n + step][e];
                d[i][n][e] = u + v, d[i][n + step][e] = u - v;
              }
    }
    put(d, m_tile, column0, lane);
    return sum;
  }

  // The second half: a group's values from the exchange, butterflies of the other bits.
  DEVICE void gather(float (&v)[T::HIGH][2][8], u32 group) const {
    const u32 j = group / T::NT, low = spread(group % T::NT);
    const u32 b5 = low >> 5 & 1, b6 = low >> 6 & 1;
    const u32 line = exchange + 4 * (j * T::PITCH + low);
    u32 from[2][2];
#pragma unroll
    for (u32 b4 = 0; b4 < 2; b4++)
#pragma unroll
      for (u32 h = 0; h < 2; h++) from[b4][h] = line + 4 * (16 * (b4 ^ b6) + 4 * (h ^ b5));
#pragma unroll
    for (u32 high = 0; high < T::HIGH; high++)
#pragma unroll
      for (u32 b4 = 0; b4 < 2; b4++)
#pragma unroll
        for (u32 h = 0; h < 2; h++) {
          const uint4 r = ptx::load_shared_16(from[b4][h] + (4 << T::NT_BITS + 4) * high);
          float *to = &v[high][b4][4 * h];
          to[0] = __uint_as_float(r.x), to[1] = __uint_as_float(r.y);
          to[2] = __uint_as_float(r.z), to[3] = __uint_as_float(r.w);
        }
    if constexpr (T::STEPS) {
      float(&flat)[T::HELD] = reinterpret_cast<float(&)[T::HELD]>(v);
      hadamard::butterfly<T::HELD, 1>(flat);
      hadamard::butterfly<T::HELD, 2>(flat);
      hadamard::butterfly<T::HELD, 4>(flat);
      hadamard::butterfly<T::HELD, 8>(flat);
      if constexpr (T::HELD > 16) hadamard::butterfly<T::HELD, 16>(flat);
      if constexpr (T::HELD > 32) hadamard::butterfly<T::HELD, 32>(flat);
    }
  }

  // The row's factor: 1 / sqrt(block), and 1 / rms behind a norm.
  DEVICE float row_factor() const {
    if (activation != ACT_NORM) return factor;
    float total = 0.0f;
#pragma unroll
    for (u32 i = 0; i < T::WARPS; i++) total += squares[i];
    return factor * rsqrtf(fmaf(total, share, eps));
  }

  DEVICE void row(u32 row, u32 next, u32 rows) const {
    const u32 warp = thread() / 32, lane = thread() % 32;
    ptx::copy_async_wait<0>();
    __syncthreads();
    if (acts()) {
      if (activation == ACT_SILU)
        activate<ACT_SILU>();
      else
        activate<ACT_GELU_TANH>();
      __syncthreads();
    }
    float sum = 0.0f;
    const u32 m_tile = warp / T::COLUMN_SETS * T::MT;
    if ((T::SMALL && T::TASKS >= T::WARPS) || 16 * m_tile < m) sum = task(m_tile, warp % T::COLUMN_SETS, lane);
    if (activation == ACT_NORM) {
      sum = hadamard::warp_sum(sum);
      if (lane == 0) squares[warp] = sum;
    }
    __syncthreads();
    if (!acts() && next < rows) ask(next);  // the input's place is free
    // Threads past the last group repeat it: a branch around this would cost the compiler its registers.
    float v[T::EACH][T::HIGH][2][8], chains[4] = {};  // of maxima, so that they do not wait for one another
#pragma unroll
    for (u32 e = 0; e < T::EACH; e++) {
      gather(v[e], min(thread() + e * T::THREADS, m * T::NT - 1));
#pragma unroll
      for (u32 i = 0; i < T::HELD; i++) chains[i % 4] = hadamard::max_abs(chains[i % 4], (&v[e][0][0][0])[i]);
    }
    float largest = hadamard::max_abs(hadamard::max_abs(chains[0], chains[1]), hadamard::max_abs(chains[2], chains[3]));
    largest = hadamard::warp_max(largest);
    if (lane == 0) most[warp] = largest;
    __syncthreads();
    if (acts() && next < rows) ask(next);  // the exchange's place is free
    largest = hadamard::warp_max(lane < T::WARPS ? most[lane] : 0.0f);
    const hadamard::RowScale scale(largest, row_factor(), q);
    if (threadIdx.x == 0 && q.bits != 16) q.scales[row] = scale.scale;
    hadamard::for_mode(q, Writer{*this, v, scale, q.out + ptx::opaque(row) * q.row_bytes()});
  }

  struct Writer {
    const Dense &d;
    const float (&v)[T::EACH][T::HIGH][2][8];
    const hadamard::RowScale &scale;
    u8 *row;
    template <int MODE> DEVICE void write() const {
      const u32 thread = d.thread();
#pragma unroll
      for (u32 e = 0; e < T::EACH; e++) {
        const u32 group = thread + e * T::THREADS;
        const bool real = group < d.m * T::NT;
        if (__any_sync(0xFFFFFFFFu, real)) {  // of a whole warp, as the shuffles want it
          const u32 block = (group / T::NT * T::C + (spread(group % T::NT) & ~8u)) / 32;
          u8 *to = row + hadamard::block_bytes(MODE) * block;
#pragma unroll
          for (u32 high = 0; high < T::HIGH; high++)
            hadamard::write_block<T::ACT, MODE>(to + hadamard::block_bytes(MODE) * (high << T::NT_BITS - 1), v[e][high],
                                                scale, d.q, real);
        }
      }
    }
  };
};

extern "C" __global__ void __launch_bounds__(32 * WARP_COUNT, RESIDENT)
    ENTRY(const u16 *x, const uint4 *matrix, u8 *out, float *scales, u32 rows, u64 ldx, u32 m, int activation,
          float factor, float eps, float share, int width, int bits, int order, float clip) {
  using T = Config<CONFIG>;
  extern __shared__ __align__(128) u8 memory[];
  __shared__ float most[T::WARPS], squares[T::WARPS];
  __shared__ uint4 fragments[T::SMALL ? T::KT * T::KT * 32 : 1];
  Dense<T> d;
  d.x = x, d.ldx = ldx, d.m = m, d.activation = activation, d.factor = factor, d.eps = eps, d.share = share;
  d.q = Quantizer{out, scales, width, bits, order, clip};
  d.in = ptx::shared_address(memory), d.exchange = d.in + 2 * T::MP * T::PITCH;
  d.most = most, d.squares = squares, d.matrix = T::SMALL ? fragments : matrix;

  ptx::launch_dependents();
  for (u32 i = threadIdx.x; i < (T::MP - m) * T::PITCH / 2; i += T::THREADS)
    reinterpret_cast<u32 *>(memory)[m * T::PITCH / 2 + i] = 0;  // H has no rows there, but 0 * garbage need not be 0
  if (T::SMALL)
    for (u32 i = threadIdx.x; i < T::KT * T::KT * 32; i += T::THREADS) fragments[i] = matrix[i];
  ptx::wait_for_previous_kernel();
  u32 row = blockIdx.x;
  if (row < rows) d.ask(row);
  for (; row < rows; row += gridDim.x) {
    d.in = ptx::opaque(ptx::shared_address(memory)), d.exchange = d.in + 2 * T::MP * T::PITCH;
    d.row(row, row + gridDim.x, rows);
  }
}
