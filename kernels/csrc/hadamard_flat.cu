// codes, scales = quantize(x (H_m ⊗ B) * f): as hadamard_dense.cu, without an exchange through shared memory. sm_90a.
//
//   H_m   any +-1 matrix, m <= 64 GROUPS, on tensor cores: A = H_m^T, kept in registers for all rows
//   B     of order C: Sylvester, or (SIGNS given) H_12 ⊗ H_8, or (not STEPS) the identity: H_m goes across heads
//
// A row lies in shared memory as it is, 16 bit: blocks of 64 columns, lines of 128 bytes, chunk c of line j at c ^ (j % 8).
// A warp takes 16 lines of H_m^T x and all C columns, or one of SPLIT shares of them: lane (g, t) holds lines g, g + 8 and
// columns 8 i + 2t, 2t + 1.
//
//  1 the product: wgmma, four warps together, x from shared memory once for 64 lines (hadamard_wgmma.cuh), or mma.sync by
//    each warp alone (SPLIT): few lines would leave warps of a warpgroup without any
//  2 bits 0 to 2 of a column: an 8 x 8 product in tf32; 3 the bits above: butterflies (hadamard_flat_steps.cuh)
//  4 the largest |value|, one barrier, codes (hadamard_flat_codes.cuh)
//
// Sums are held of ROWS rows. The product of the second runs behind the butterflies of the first.
// One barrier a turn: before it a warp has given its largest values and read its stage, behind it one thread asks for the
// rows that come there next (hadamard_flat_rows.cuh). Behind an activation the next turn's rows are activated before it:
// while products run if there are few blocks to fill that time, else behind the butterflies; or by warpgroups of their own
// (APART), which need few registers and leave theirs to those that have sums.
// All sizes are known here: what depends on them costs no instruction.
// Shared memory: HEAD_BYTES, lines of codes, STAGES stages or two and up. Tested by tests/gpu/test_hadamard.py.
#include "hadamard_flat_codes.cuh"
#include "hadamard_flat_rows.cuh"
#include "hadamard_flat_steps.cuh"
#include "hadamard_wgmma.cuh"

constexpr u32 BARRIERS_AT = 512;  // behind the numbers of the warps
constexpr u32 HEAD_BYTES = 1024;  // in front of what wants this alignment

// 16-bit format; m; tiles of 8 columns of a warp; rows of a turn; warpgroups; stages; whether columns are transformed; shares
// of the columns, a warp's each; whether an activation may come before; warpgroups beside those that make nothing else (0:
// all make it), pieces of 16 bytes of gate that a thread of them holds at a time, and its registers.
template <int ACT_, u32 M_, u32 NT_, u32 ROWS_, u32 GROUPS_, u32 STAGES_, bool STEPS_, u32 SPLIT_, bool ACTS_, u32 ACTING_,
          u32 HELD_, int ACTING_REGISTERS_>
struct Config {
  static constexpr int ACT = ACT_;
  static constexpr u32 M = M_, NT = NT_, ROWS = ROWS_, GROUPS = GROUPS_, STAGES = STAGES_, SPLIT = SPLIT_;
  static constexpr bool STEPS = STEPS_, ACTS = ACTS_, APART = ACTING_ > 0;
  static constexpr u32 ACTING = ACTING_, HELD = HELD_;
  static constexpr u32 KT = (M + 15) / 16, MP = 16 * KT;  // tiles of 16 lines
  static constexpr u32 WARPS = 4 * GROUPS, SUM_THREADS = 32 * WARPS, THREADS = SUM_THREADS + 128 * ACTING;
  static constexpr u32 C = 8 * NT * SPLIT;
  static constexpr u32 BLOCK_BYTES = 128 * MP, BLOCKS = (C + 63) / 64, ROW_BYTES = BLOCK_BYTES * BLOCKS;
  static constexpr u32 STAGE_BYTES = ROW_BYTES * ROWS;
  static constexpr u32 PIECE = NT > 16 ? 16 : NT, PIECES = NT / PIECE;  // tiles of one instruction
  static constexpr u32 LINES_BYTES = 64 * NT;                           // of eight lines of codes, a warp's
  static constexpr bool ACTS_FIRST = ACTS && !APART && GROUPS > 1;      // while products run
  static constexpr bool ACTS_LAST = ACTS && !APART && GROUPS == 1;
  static_assert(NT % PIECE == 0 && NT % 4 == 0, "whole instructions and blocks of 32");
  static_assert(SPLIT == 1 ? KT <= 4 * GROUPS : KT * SPLIT == WARPS && ROWS == 1 && !STEPS, "each warp has its own sums");
  static_assert(STAGES >= 2 && STAGES <= 8 && 16 * ROWS * WARPS <= BARRIERS_AT, "the head's places");
  static_assert(!APART || ACTS && ROWS == 1 && STAGES == 2, "gate and up of one row");

  // Registers are shared out anew: the sum may not pass what the block was given at its start.
  static constexpr int GIVEN = 65536 / (RESIDENT * THREADS) / 8 * 8, ACTING_REGISTERS = ACTING_REGISTERS_;
  static constexpr int SPARED = (GIVEN * static_cast<int>(THREADS) - ACTING_REGISTERS * 128 * static_cast<int>(ACTING)) /
                                static_cast<int>(SUM_THREADS) / 8 * 8;
  static constexpr int SUM_REGISTERS = SPARED < 240 ? SPARED : 240;

  // The 16 lines of H_m^T x that a warp takes. Warps without lines do nothing: so that those of the blocks of one
  // multiprocessor are not all of the same scheduler, the four of a warpgroup are turned, differently from block to block.
  DEVICE static u32 tile() {
    const u32 warp = ptx::opaque(threadIdx.x) / 32;
    if constexpr (SPLIT > 1) return warp % KT;
    return KT % 4 == 0 ? warp : (warp & ~3u) | ((warp + blockIdx.x / 4) & 3);
  }
  // Its share of the columns.
  DEVICE static u32 share() { return SPLIT > 1 ? ptx::opaque(threadIdx.x) / 32 / KT : 0; }
};

template <class T> struct Flat {
  using Sums = float[T::NT][4];

  flat::Rows<T> in;
  float factor, eps, share;
  Quantizer q;
  float *numbers;  // [turn % 2][ROWS][largest, sum of squares][WARPS]
  flat::LowBits low_bits;
  u32 a[T::KT][4];  // 16 lines of H_m^T

  DEVICE static u32 thread() { return ptx::opaque(threadIdx.x); }
  // Shared address of eight lines of codes of this warp's.
  DEVICE u32 lines() const { return in.stages - (T::WARPS - thread() / 32) * T::LINES_BYTES; }
  // All that have sums meet.
  DEVICE static void meet() {
    if constexpr (T::APART)
      ptx::barrier(15, T::SUM_THREADS);
    else
      __syncthreads();
  }
  DEVICE u64 row_bytes() const {
    constexpr u64 N = T::M * T::C;
    return q.bits == 16 ? 2 * N : q.order == S64 ? N / 2 : N;
  }

  // Step 1 of a row, which runs on.
  DEVICE void start(Sums &d, u32 row, u32 stage) const {
    if constexpr (T::SPLIT > 1) return multiply(d, stage);
    const u64 block = wgmma::descriptor_across(in.stage(stage) + row * T::ROW_BYTES, T::BLOCK_BYTES);
    wgmma::fence();
#pragma unroll
    for (u32 p = 0; p < T::PIECES; p++) {
      float(&piece)[T::PIECE][4] = reinterpret_cast<float(&)[T::PIECE][4]>(d[p * T::PIECE]);
      const u64 columns = block + (p * (T::PIECE / 8) * T::BLOCK_BYTES >> 4);
      wgmma::Across<T::ACT, T::PIECE>::start(piece, a[0], columns);
#pragma unroll
      for (u32 k = 1; k < T::KT; k++) wgmma::Across<T::ACT, T::PIECE>::run(piece, a[k], columns + (2048 * k >> 4));
    }
    wgmma::commit();
  }
  // Step 1 of a warp alone.
  DEVICE void multiply(Sums &d, u32 stage) const {
    const u32 lane = thread() % 32, from = in.stage(stage) + 128 * (lane % 16);
#pragma unroll
    for (u32 i = 0; i < T::NT; i += 2) {
      d[i][0] = d[i][1] = d[i][2] = d[i][3] = d[i + 1][0] = d[i + 1][1] = d[i + 1][2] = d[i + 1][3] = 0.0f;
      const u32 chunk = T::share() * T::NT + i, at = from + chunk / 8 * T::BLOCK_BYTES + 16 * (chunk % 8 + lane / 16 ^ lane % 8);
#pragma unroll
      for (u32 k = 0; k < T::KT; k++) {
        u32 v[4];
        ptx::load_matrix_x4_transposed(v, at + 2048 * k);
        Number<T::ACT>::product(d[i], a[k], v[0], v[1], d[i]);
        Number<T::ACT>::product(d[i + 1], a[k], v[2], v[3], d[i + 1]);
      }
    }
  }

  // Steps 2 and 3 of each row, when its product is there: all bits but the last.
  template <u32 R = 0> DEVICE void transform(Sums (&d)[T::ROWS], float (&sums)[T::ROWS], bool busy) const {
    if constexpr (R < T::ROWS) {
      if constexpr (T::SPLIT == 1) {
        wgmma::wait<T::ROWS - 1 - R>();
        wgmma::hold(d[R]);
      }
      if (busy) {
        if (in.activation == ACT_NORM) sums[R] = flat::squares(d[R]);
        if constexpr (T::STEPS) {
          low_bits.apply(d[R]);
          flat::high_bits(d[R]);
        }
      }
      transform<R + 1>(d, sums, busy);
    }
  }

  // Where the numbers of a turn's row lie, in the order of the lines: a row's sum does not depend on who makes it.
  DEVICE float *of_row(u32 odd, u32 r) const { return numbers + (odd * T::ROWS + r) * 2 * T::WARPS; }
  DEVICE void publish(u32 odd, u32 r, float most, float sum) const {
    const u32 at = T::tile() + T::share() * T::KT, lane = thread() % 32;
    most = hadamard::warp_max(most);
    if (in.activation == ACT_NORM) sum = hadamard::warp_sum(sum);
    if (lane == 0) of_row(odd, r)[at] = most, of_row(odd, r)[T::WARPS + at] = sum;
  }
  // The last bit, and the largest values.
  DEVICE void publish_all(u32 odd, Sums (&d)[T::ROWS], const float (&sums)[T::ROWS]) const {
#pragma unroll
    for (u32 r = 0; r < T::ROWS; r++) publish(odd, r, flat::last_bit<T::STEPS>(d[r]), sums[r]);
  }

  // Each lane reads all warps' at once: a lane's own and a reduction would be waited for one after the other.
  DEVICE static float largest(const float *most) {
    u32 bits = 0;  // as in warp_max
#pragma unroll
    for (u32 i = 0; i < T::WARPS; i += 4) {
      const uint4 v = *reinterpret_cast<const uint4 *>(most + i);
      bits = max(bits, max(max(v.x, v.y), max(v.z, v.w)));
    }
    return __uint_as_float(bits);
  }
  DEVICE float row_factor(const float *sums) const {
    if (in.activation != ACT_NORM) return factor;
    float total = 0.0f;
#pragma unroll
    for (u32 i = 0; i < T::WARPS; i++) total += sums[i];
    return factor * rsqrtf(fmaf(total, share, eps));
  }
  DEVICE hadamard::RowScale scale_of(u32 row, u32 odd, u32 r) const {
    const u32 lane = thread() % 32;
    const hadamard::RowScale scale(largest(of_row(odd, r)), row_factor(of_row(odd, r) + T::WARPS), q);
    const bool first = lane == 0 && T::tile() == 0 && T::share() == 0;
    if (first && q.bits != 16 && row < in.rows) q.scales[row] = scale.scale;
    return scale;
  }
  DEVICE void write(const Sums &d, const hadamard::RowScale &scale, u32 row) const {
    u8 *const to = q.out + ptx::opaque(row) * row_bytes();
    hadamard::for_mode(q, flat::Writer<T>{d, scale, q, T::share(), to, row < in.rows, lines()});
  }
  DEVICE void write_all(u32 odd, const Sums (&d)[T::ROWS], u32 turn) const {
#pragma unroll
    for (u32 r = 0; r < T::ROWS; r++) write(d[r], scale_of(turn * T::ROWS + r, odd, r), turn * T::ROWS + r);
  }

  DEVICE void run(u32 turn) const {
    const u32 turns = in.turns(), places = in.places();
    const bool busy = 16 * T::tile() < T::M;
    if (turn >= turns) return;
    in.begin(turn);
    Sums d[T::ROWS];
    // A turn's codes are written at the head of the loop, before the next products start: sums that are on their way may
    // not be carried over its end, and nothing but their products may touch any of them until they have come.
    u32 stage = 0, phase = 0, before = turn;
    bool made = false;
    for (u32 odd = 0;; odd ^= 1) {
      if (made && busy) write_all(odd ^ 1, d, before);
      if (turn >= turns) break;
      const bool last = stage + 1 == places, more = turn + gridDim.x < turns;
      if (T::APART)
        in.wait_for_activated(stage, phase);
      else if (!in.acts())
        in.wait(stage, phase);
#pragma unroll
      for (u32 r = 0; r < T::ROWS; r++) start(d[r], r, stage);
      if (T::ACTS_FIRST && in.acts() && more) in.activate(last ? 0 : stage + 1, phase ^ last);
      float sums[T::ROWS];
      transform(d, sums, busy);
      if (busy) publish_all(odd, d, sums);
      if (T::ACTS_LAST && in.acts() && more) in.activate(last ? 0 : stage + 1, phase ^ last);
      meet();
      if (threadIdx.x == 0) in.ask(turn + places * gridDim.x, stage);
      made = true, before = turn, turn += gridDim.x, stage = last ? 0 : stage + 1, phase ^= last;
    }
  }
};

extern "C" __global__ void __launch_bounds__(THREAD_COUNT, RESIDENT)
    ENTRY(const __grid_constant__ TensorMap x, const uint4 *matrix, u8 *out, float *scales, u32 rows, int activation,
          float factor, float eps, float share, int width, int bits, int order, float clip) {
  using T = Config<CONFIG>;
  static_assert(T::THREADS == THREAD_COUNT, "kernels/quarot/flat_plan.py counts alike");
  extern __shared__ __align__(1024) u8 memory[];
  const u32 head = ptx::shared_address(memory), stages = head + HEAD_BYTES + T::WARPS * T::LINES_BYTES;
  Flat<T> f{{&x, rows, activation, stages, head + BARRIERS_AT}, factor, eps, share, {out, scales, width, bits, order, clip},
            reinterpret_cast<float *>(memory), flat::LowBits(threadIdx.x % 32, rows >> 31)};

  ptx::launch_dependents();
  if (threadIdx.x == 0) ptx::prefetch_map(&x);
  for (u32 i = threadIdx.x; i < 4 * T::ROWS * T::WARPS; i += T::THREADS) f.numbers[i] = 0.0f;
  f.in.init();
  if constexpr (T::APART) {
    __syncthreads();
    if (threadIdx.x >= T::SUM_THREADS) {
      ptx::fewer_registers<T::ACTING_REGISTERS>();
      ptx::wait_for_previous_kernel();
      f.in.activate_all(blockIdx.x);
      return;
    }
    ptx::more_registers<T::SUM_REGISTERS>();
  }
#pragma unroll
  for (u32 k = 0; k < T::KT; k++) {
    const uint4 r = matrix[(T::tile() * T::KT + k) * 32 + threadIdx.x % 32];
    f.a[k][0] = r.x, f.a[k][1] = r.y, f.a[k][2] = r.z, f.a[k][3] = r.w;
  }
  if constexpr (!T::APART) __syncthreads();
  ptx::wait_for_previous_kernel();
  f.run(blockIdx.x);
}
