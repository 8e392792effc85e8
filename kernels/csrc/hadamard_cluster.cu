// codes, scales = quantize(x (H_m ⊗ Sylvester(C)) * f) of few rows: eight blocks of a cluster share a row of n = m * C.
//
// With one block a row, few rows leave the card empty: a row of 28672 values takes one multiprocessor some 8 us. Here a
// block has m lines of C / 8 neighbouring columns, and the row is sent twice:
//
//  1 Loads x (16 bit), or round16(act(gate) * up), into padded lines; tensor cores apply H_m, butterflies of the bits of
//    a column inside the slice follow, with one exchange in shared memory: steps 2 to 4 of hadamard_dense.cu.
//  2 Each sends every other an eighth of what it has, to where a thread will look for its 16 columns. The three highest
//    bits of a column are taken by shuffles: lane bits 1 to 3 are the block that a value came from.
//  3 The largest value of every warp goes to all blocks; codes.
//
// Blocks say that their barriers are there before their first word of x, and look whether all have before they send: what is
// sent is counted by a barrier where it arrives. Meeting in one place would cost a fence of all memory each time.
//
// Requires: m <= MP, C = 8 * SLICE, activation other than a norm, rows 16-byte aligned. Grid: 8 * rows.
// Tested by tests/gpu/test_hadamard.py; where values go by tests/kernels/test_hadamard_cluster.py.
#include "hadamard.cuh"

#ifndef ENTRY
#define ENTRY hadamard_cluster_example
#define CONFIG FP16, 32, 7
#endif

constexpr u32 BLOCKS = 8, THREADS = 256, WARPS = THREADS / 32;

template <int ACT_, u32 MP_, u32 LOG_SLICE_> struct Config {
  static constexpr int ACT = ACT_;
  static constexpr u32 MP = MP_, SLICE = 1 << LOG_SLICE_, C = BLOCKS * SLICE, KT = MP / 16;
  static constexpr u32 NT = SLICE / 16, PITCH = SLICE + 8, OCTETS = SLICE / 8;
  static constexpr u32 LOADS = MP * OCTETS / THREADS;  // octets of a thread
  static constexpr u32 FRAGMENTS = KT * KT * 32;
  static_assert(FRAGMENTS <= THREADS, "a fragment a thread");
  static_assert(MP % 16 == 0 && 2 * KT <= WARPS && MP * NT <= THREADS, "a task a warp, a group a thread");
  static_assert(MP * OCTETS % THREADS == 0 && (NT == 4 || NT == 8), "bits 3, 5 and perhaps 6 are the n-tile's");
};

// Where bits 3, 5, 6 of a column lie when they are counted together.
DEVICE constexpr u32 spread(u32 i) { return (i & 1) << 3 | (i >> 1 & 1) << 5 | (i >> 2 & 1) << 6; }

// Sends a value, or four, to a block of the cluster, whose barrier counts the bytes.
DEVICE void send(u32 to, float v, u32 barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(to), "f"(v),
               "r"(barrier)
               : "memory");
}
DEVICE void send(u32 to, const float *v, u32 barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to),
               "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]), "r"(barrier)
               : "memory");
}

template <class T> struct Slice {
  u32 in, exchange, gathered, m, rank;
  u32 each;  // pairs of groups of a block: 16 threads take one, two of them what one block sent

  // Steps 1: what the block has of the row, to padded lines.
  template <int ACTIVATION> DEVICE void load(const u16 *x) const {
    constexpr bool ACTS = ACTIVATION != ACT_NONE;
    uint4 gate[T::LOADS], up[ACTS ? T::LOADS : 1];
#pragma unroll
    for (u32 i = 0; i < T::LOADS; i++) {
      const u32 octet = threadIdx.x + i * THREADS, line = octet / T::OCTETS;
      const u16 *from = x + line * T::C + rank * T::SLICE + octet % T::OCTETS * 8;
      gate[i] = make_uint4(0, 0, 0, 0);  // lines past m: 0 * garbage need not be 0
      if (line < m) {
        gate[i] = *reinterpret_cast<const uint4 *>(from);
        if constexpr (ACTS) up[i] = *reinterpret_cast<const uint4 *>(from + m * T::C);
      }
    }
#pragma unroll
    for (u32 i = 0; i < T::LOADS; i++) {
      const u32 octet = threadIdx.x + i * THREADS, line = octet / T::OCTETS;
      if constexpr (ACTS)
        if (line < m) gate[i] = hadamard::activate_octet<T::ACT, ACTIVATION>(gate[i], up[i]);
      ptx::store_shared_16(in + 2 * (line * T::PITCH + octet % T::OCTETS * 8), gate[i]);
    }
  }

  // H_m on 16 of its rows and the columns of one value of bit 4, then the n-tiles' butterflies, to the exchange.
  DEVICE void task(const uint4 *fragments, u32 m_tile, u32 bit4, u32 lane) const {
    const u32 from = in + 2 * (lane % 16 * T::PITCH + 16 * bit4 + lane / 16 * 8);
    float d[T::NT][4] = {};
#pragma unroll
    for (u32 k = 0; k < T::KT; k++) {
      const uint4 r = fragments[(m_tile * T::KT + k) * 32 + lane];
      const u32 a[4] = {r.x, r.y, r.z, r.w};
#pragma unroll
      for (u32 n = 0; n < T::NT; n += 2) {
        u32 b[4];
        ptx::load_matrix_x4_transposed(b, from + 32 * k * T::PITCH + 2 * spread(n));
        Number<T::ACT>::product(d[n], a, b[0], b[1], d[n]);
        Number<T::ACT>::product(d[n + 1], a, b[2], b[3], d[n + 1]);
      }
    }
#pragma unroll
    for (u32 step = 1; step < T::NT; step *= 2)
#pragma unroll
      for (u32 n = 0; n < T::NT; n++)
        if ((n & step) == 0)
#pragma unroll
          for (u32 e = 0; e < 4; e++) {
            const float u = d[n][e], v = d[n + step][e];
            d[n][e] = u + v, d[n + step][e] = u - v;
          }
    put(d, m_tile, bit4, lane);
  }

  // Value (row j, column c) lies at float j * PITCH + 4 * (c / 4 ^ b5 ^ 4 * b6) + c % 4 with bits 5, 6 of c.
  DEVICE void put(const float (&d)[T::NT][4], u32 m_tile, u32 bit4, u32 lane) const {
    const u32 first = 16 * m_tile + lane / 4, t = lane % 4;
#pragma unroll
    for (u32 h = 0; h < 2; h++)
      if (first + 8 * h < m)
#pragma unroll
        for (u32 n = 0; n < T::NT; n++) {
          const u32 b5 = n >> 1 & 1, b6 = n >> 2 & 1;
          const u32 at = (first + 8 * h) * T::PITCH + 16 * (bit4 ^ b6) + 4 * (t >> 1 ^ b5) + 2 * (t & 1) + spread(n);
          ptx::store_shared_8(exchange + 4 * at, make_float2(d[n][2 * h], d[n][2 * h + 1]));
        }
  }

  // A group: row group / NT, columns that differ in bits 0, 1, 2, 4. Butterflies of these, to the thread that takes them.
  DEVICE void group(u32 group, u32 barrier) const {
    const u32 low = spread(group % T::NT), b5 = low >> 5 & 1, b6 = low >> 6 & 1;
    const u32 line = exchange + 4 * (group / T::NT * T::PITCH + low);
    float v[16];
#pragma unroll
    for (u32 q = 0; q < 4; q++) {  // bit 4, then bit 2
      const uint4 r = ptx::load_shared_16(line + 4 * (16 * (q / 2 ^ b6) + 4 * (q % 2 ^ b5)));
      v[4 * q] = __uint_as_float(r.x), v[4 * q + 1] = __uint_as_float(r.y);
      v[4 * q + 2] = __uint_as_float(r.z), v[4 * q + 3] = __uint_as_float(r.w);
    }
    hadamard::butterfly<16, 1>(v);
    hadamard::butterfly<16, 2>(v);
    hadamard::butterfly<16, 4>(v);
    hadamard::butterfly<16, 8>(v);
    const u32 pair = group / 2, owner = pair / each, thread = pair % each * 16 + rank * 2 + group % 2;
    const u32 to = ptx::in_block(gathered, owner);
#pragma unroll
    for (u32 q = 0; q < 4; q++) send(to + place(thread, q), v + 4 * q, ptx::in_block(barrier, owner));
  }

  // A thread's 64 bytes, their pieces XOR-ed so that neighbours do not meet in a bank.
  DEVICE static u32 place(u32 thread, u32 q) { return 64 * thread + 16 * (q ^ thread / 2 % 4); }

  // This thread's values, and the butterflies between blocks: lane bits 1 to 3 count them.
  DEVICE void collect(float (&v)[2][8], bool real, u32 lane) const {
    float(&flat)[16] = reinterpret_cast<float(&)[16]>(v);
#pragma unroll
    for (u32 q = 0; q < 4; q++) {
      const uint4 r = ptx::load_shared_16(gathered + place(threadIdx.x, q));
      flat[4 * q] = __uint_as_float(r.x), flat[4 * q + 1] = __uint_as_float(r.y);
      flat[4 * q + 2] = __uint_as_float(r.z), flat[4 * q + 3] = __uint_as_float(r.w);
    }
#pragma unroll
    for (u32 i = 0; i < 16; i++) flat[i] = real ? flat[i] : 0.0f;  // nothing was sent
#pragma unroll
    for (u32 step = 2; step < 16; step *= 2) {
      const float sign = lane & step ? -1.0f : 1.0f;
#pragma unroll
      for (u32 i = 0; i < 16; i++) flat[i] = fmaf(sign, flat[i], __shfl_xor_sync(0xFFFFFFFFu, flat[i], step));
    }
  }
};

template <class T> struct Writer {
  const float (&v)[2][8];
  const hadamard::RowScale &scale;
  const Quantizer &q;
  u8 *row;
  u32 block;
  bool real;
  template <int MODE> DEVICE void write() const {
    hadamard::write_block<T::ACT, MODE>(row + hadamard::block_bytes(MODE) * block, v, scale, q, real);
  }
};

extern "C" __global__ void __cluster_dims__(8, 1, 1) __launch_bounds__(256, 2)
    ENTRY(const u16 *x, const uint4 *matrix, u8 *out, float *scales, u64 ldx, u32 m, int activation, float factor,
          int width, int bits, int order, float clip) {
  using T = Config<CONFIG>;
  __shared__ __align__(16) u8 in[2 * T::MP * T::PITCH];
  __shared__ __align__(16) float exchange[T::MP * T::PITCH], gathered[16 * THREADS];
  __shared__ float most[BLOCKS * WARPS];
  __shared__ u64 barriers[2];  // of what comes to `gathered`, to `most`
  __shared__ uint4 fragments[T::FRAGMENTS];
  const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, rank = blockIdx.x % BLOCKS, row = blockIdx.x / BLOCKS;
  const u32 pairs = m * T::NT / 2, each = (pairs + BLOCKS - 1) / BLOCKS;
  const Slice<T> slice{ptx::shared_address(in), ptx::shared_address(exchange), ptx::shared_address(gathered), m, rank, each};
  const Quantizer q{out, scales, width, bits, order, clip};
  const u32 values_come = ptx::shared_address(barriers), largest_come = values_come + 8;

  if (threadIdx.x == 0) {
    ptx::barrier_init(values_come, 1), ptx::barrier_init(largest_come, 1);
    ptx::barrier_init_fence();
    const u32 own = rank * each < pairs ? min(each, pairs - rank * each) : 0;
    ptx::barrier_arrive_expect(values_come, own * 16 * 64);
    ptx::barrier_arrive_expect(largest_come, BLOCKS * WARPS * 4);
  }
  ptx::cluster_arrives();
  const uint4 fragment = threadIdx.x < T::FRAGMENTS ? matrix[threadIdx.x] : uint4{};  // waited for behind x
  ptx::wait_for_previous_kernel();
  x += row * ldx;
  if (activation == ACT_SILU)
    slice.template load<ACT_SILU>(x);
  else if (activation == ACT_GELU_TANH)
    slice.template load<ACT_GELU_TANH>(x);
  else
    slice.template load<ACT_NONE>(x);
  ptx::launch_dependents();  // not before x is here: a product's first weights would come in front of it
  if (threadIdx.x < T::FRAGMENTS) fragments[threadIdx.x] = fragment;
  __syncthreads();
  if (warp < 2 * T::KT) slice.task(fragments, warp / 2, warp % 2, lane);
  __syncthreads();
  ptx::cluster_is_there();
  if (threadIdx.x < m * T::NT) slice.group(threadIdx.x, values_come);

  // A pair of groups makes whole blocks of 32 columns; this block's share of them: 16 lanes a pair.
  const u32 pair = rank * each + threadIdx.x / 16, from = threadIdx.x / 2 % BLOCKS;
  const bool real = threadIdx.x / 16 < each && pair < pairs;
  const u32 group = 2 * (real ? pair : 0) + threadIdx.x % 2;
  float v[2][8], largest = 0.0f;
  ptx::barrier_wait_for_cluster(values_come, 0);
  slice.collect(v, real, lane);
#pragma unroll
  for (u32 i = 0; i < 16; i++) largest = hadamard::max_abs(largest, v[i / 8][i % 8]);
  largest = hadamard::warp_max(largest);
  if (lane < BLOCKS)
    send(ptx::in_block(ptx::shared_address(most + rank * WARPS + warp), lane), largest, ptx::in_block(largest_come, lane));
  ptx::barrier_wait_for_cluster(largest_come, 0);
  largest = hadamard::warp_max(hadamard::max_abs(most[lane], most[lane + 32]));
  const hadamard::RowScale scale(largest, factor, q);
  if (blockIdx.x % BLOCKS == 0 && threadIdx.x == 0 && bits != 16) scales[row] = scale.scale;
  const u32 block = (group / T::NT * T::C + from * T::SLICE + (spread(group % T::NT) & ~8u)) / 32;
  hadamard::for_mode(q, Writer<T>{v, scale, q, out + row * q.row_bytes(), block, real});
}
