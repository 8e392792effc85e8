// codes, scales = quantize(x (H_m ⊗ B) * f): as hadamard_dense.cu, without an exchange through shared memory. sm_90a.
//
//   H_m   any +-1 matrix, m <= 16 KT, on tensor cores: A = H_m^T, kept in registers for all rows
//   B     of order C: Sylvester, or (SIGNS given) H_12 ⊗ H_8, or (not STEPS) the identity: H_m goes across heads
//
// A row lies in shared memory as it is, 16 bit: blocks of 64 columns, lines of 128 bytes, chunk c of line j at c ^ (j % 8).
// Every warp takes 16 lines of H_m^T x and all C columns: lane (g, t) holds lines g, g + 8 and columns 8 i + 2t, 2t + 1.
//
//  1 the product: wgmma, four warps together, x from shared memory once for 64 lines (hadamard_wgmma.cuh)
//  2 bits 0 to 2 of a column: an 8 x 8 product in tf32; 3 the bits above: butterflies (hadamard_flat_steps.cuh)
//  4 the largest |value|, one barrier, codes (hadamard_flat_codes.cuh)
//
// Sums are held in PARTS: halves of a row's columns (JOINED), or whole rows of their own. The product of the second runs
// behind the butterflies of the first.
// One barrier a turn: before it a warp has given its largest values and waited for its share of the next rows' bytes.
// Without an activation x goes straight to one of STAGES places. With one, gate and up are brought to a place of their
// own, and a thread activates what it brought.
// Shared memory: HEAD_BYTES, STAGES places, or two and gate and up. Tested by tests/gpu/test_hadamard.py.
#include "hadamard_flat_codes.cuh"
#include "hadamard_flat_steps.cuh"
#include "hadamard_wgmma.cuh"

constexpr u32 HEAD_BYTES = 1024;  // numbers of the warps, in front of places that want this alignment

// Copies 16 bytes to shared memory if line < lines. Distances are part of the instruction: one address serves a thread.
template <u32 TO, u32 FROM> DEVICE void copy_octet(u32 to, const void *from, u32 line, u32 lines) {
  asm volatile("{ .reg .pred p;\n"
               "setp.lt.u32 p, %2, %3;\n"
               "@p cp.async.cg.shared.global.L2::128B [%0 + %4], [%1 + %5], 16; }" ::"r"(to),
               "l"(from), "r"(line), "r"(lines), "n"(TO), "n"(FROM)
               : "memory");
}

// 16-bit format; tiles of 16 lines of H_m; tiles of 8 columns of a part; parts; whether they are one row's; warpgroups;
// places; whether columns are transformed.
template <int ACT_, u32 KT_, u32 NT_, u32 PARTS_, bool JOINED_, u32 GROUPS_, u32 STAGES_, bool STEPS_> struct Config {
  static constexpr int ACT = ACT_;
  static constexpr u32 KT = KT_, NT = NT_, PARTS = PARTS_, GROUPS = GROUPS_, STAGES = STAGES_;
  static constexpr bool JOINED = JOINED_, STEPS = STEPS_;
  static constexpr u32 WARPS = 4 * GROUPS, THREADS = 32 * WARPS, MP = 16 * KT;
  static constexpr u32 C = 8 * NT * (JOINED ? PARTS : 1), ROWS = JOINED ? 1 : PARTS;  // of x, a turn
  static constexpr u32 BLOCK_BYTES = 128 * MP, BLOCKS = (C + 63) / 64, ROW_BYTES = BLOCK_BYTES * BLOCKS;
  static constexpr u32 STAGE_BYTES = ROW_BYTES * ROWS;
  static constexpr u32 OCTETS = C / 8, LINES = THREADS / OCTETS;        // of a line; lines that are copied at once
  static constexpr u32 PIECE = NT > 16 ? 16 : NT, PIECES = NT / PIECE;  // tiles of one instruction
  static_assert(KT <= 4 * GROUPS && NT % PIECE == 0 && NT % 4 == 0, "whole instructions and blocks of 32");
  static_assert(!JOINED || PARTS == 1 || (PARTS == 2 && 8 * NT % 64 == 0), "halves begin with a block");
  static_assert(STAGES >= 2 && THREADS % OCTETS == 0, "a thread copies one column of octets");
  static_assert(LINES % 8 == 0 || LINES == 4, "a line's chunks lie alike, or as every second line's");

  // The 16 lines of H_m^T x that a warp takes. Warps without lines do nothing: so that those of the blocks of one
  // multiprocessor are not all of the same scheduler, the four of a warpgroup are turned, differently from block to block.
  DEVICE static u32 tile() {
    const u32 warp = ptx::opaque(threadIdx.x) / 32;
    return KT % 4 == 0 ? warp : (warp & ~3u) | ((warp + blockIdx.x / 4) & 3);
  }
};

template <class T> struct Flat {
  using Sums = float[T::NT][4];

  const u16 *x;
  u64 ldx;
  u32 m, rows;
  int activation;
  float factor, eps, share;
  Quantizer q;
  u32 stages, staging;  // shared addresses
  float *numbers;       // [turn % 2][ROWS][largest, sum of squares][WARPS]
  flat::LowBits low_bits;
  u32 a[T::KT][4];  // 16 lines of H_m^T

  DEVICE static u32 thread() { return ptx::opaque(threadIdx.x); }
  DEVICE bool acts() const { return activation == ACT_SILU || activation == ACT_GELU_TANH; }
  DEVICE u32 gate_bytes() const { return 2 * m * T::C; }

  // Where a thread's octets lie in a stage: those of even and odd steps, which differ if a step has four lines.
  DEVICE static u32 place(u32 tid, u32 odd) {
    const u32 line = tid / T::OCTETS + odd * T::LINES, octet = tid % T::OCTETS;
    return octet / 8 * T::BLOCK_BYTES + 128 * line + 16 * (octet % 8 ^ line % 8);
  }

  // Lines I, I + LINES, ... of x.
  template <u32 I = 0> DEVICE void copy(u32 even, u32 odd, const u16 *from, u32 line) const {
    if constexpr (I * T::LINES < T::MP) {
      constexpr bool ODD = T::LINES == 4 && I % 2;
      copy_octet<128 * (I - ODD) * T::LINES, 2 * I * T::LINES * T::C>(ODD ? odd : even, from, line + I * T::LINES, m);
      copy<I + 1>(even, odd, from, line);
    }
  }
  // Lines of gate and up, to a place as they are.
  template <u32 I = 0> DEVICE void copy_both(u32 gate, u32 up, const u16 *from, const u16 *from_up, u32 line) const {
    if constexpr (I * T::LINES < T::MP) {
      copy_octet<16 * I * T::THREADS, 16 * I * T::THREADS>(gate, from, line + I * T::LINES, m);
      copy_octet<16 * I * T::THREADS, 16 * I * T::THREADS>(up, from_up, line + I * T::LINES, m);
      copy_both<I + 1>(gate, up, from, from_up, line);
    }
  }

  // Asks for the rows of a turn.
  DEVICE void ask(u32 turn, u32 stage) const {
    const u32 tid = thread(), line = tid / T::OCTETS;
#pragma unroll
    for (u32 r = 0; r < T::ROWS; r++) {
      const u32 row = ptx::opaque(turn) * T::ROWS + r;
      if (row < rows) {
        const u16 *from = x + row * ldx + 8 * tid;
        const u32 gate = staging + 16 * tid + 2 * r * gate_bytes(), to = stages + stage * T::STAGE_BYTES + r * T::ROW_BYTES;
        if (acts())
          copy_both(gate, gate + gate_bytes(), from, from + m * T::C, line);
        else
          copy(to + place(tid, 0), to + place(tid, 1), from, line);
      }
    }
    ptx::copy_async_commit();
  }

  // d = round16(act(gate) * up) to a stage: each thread what it asked for itself.
  template <int ACTIVATION> DEVICE void activate(u32 stage) const {
    const u32 tid = thread(), up = gate_bytes(), to = stages + stage * T::STAGE_BYTES;
#pragma unroll 1
    for (u32 r = 0; r < T::ROWS; r++) {
      const u32 even = to + r * T::ROW_BYTES + place(tid, 0), odd = to + r * T::ROW_BYTES + place(tid, 1);
      u32 gate = staging + 16 * tid + 2 * r * gate_bytes();
#pragma unroll 2
      for (u32 i = 0, line = tid / T::OCTETS; line < m; i++, line += T::LINES, gate += 16 * T::THREADS) {
        const bool is_odd = T::LINES == 4 && i % 2;
        const uint4 both = hadamard::activate_octet<T::ACT, ACTIVATION>(ptx::load_shared_16(gate), ptx::load_shared_16(gate + up));
        ptx::store_shared_16((is_odd ? odd : even) + 128 * (i - is_odd) * T::LINES, both);
      }
    }
  }
  DEVICE void activate_turn(u32 stage) const {
    ptx::copy_async_wait<0>();
    if (activation == ACT_SILU)
      activate<ACT_SILU>(stage);
    else
      activate<ACT_GELU_TANH>(stage);
  }

  // Step 1 of a part, which runs on.
  DEVICE void start(Sums &d, u32 part, u32 stage) const {
    const u32 from = stages + stage * T::STAGE_BYTES + part * (T::JOINED ? T::NT / 8 * T::BLOCK_BYTES : T::ROW_BYTES);
    const u64 block = wgmma::descriptor_across(from, T::BLOCK_BYTES);
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

  // Steps 2 and 3 of each part, when its product is there.
  template <u32 P = 0> DEVICE void transform(Sums (&d)[T::PARTS], float (&sums)[T::PARTS], bool busy) const {
    if constexpr (P < T::PARTS) {
      wgmma::wait<T::PARTS - 1 - P>();
      wgmma::hold(d[P]);
      if (busy) {
        if (activation == ACT_NORM) sums[P] = flat::squares(d[P]);
        if constexpr (T::STEPS) {
          low_bits.apply(d[P]);
          flat::high_bits(d[P]);
        }
      }
      transform<P + 1>(d, sums, busy);
    }
  }

  // Where the numbers of a turn's row lie.
  DEVICE float *of_row(u32 odd, u32 r) const { return numbers + (odd * T::ROWS + r) * 2 * T::WARPS; }
  DEVICE void publish(u32 odd, u32 r, float most, float sum) const {
    const u32 warp = thread() / 32, lane = thread() % 32;
    most = hadamard::warp_max(most);
    if (activation == ACT_NORM) sum = hadamard::warp_sum(sum);
    if (lane == 0) of_row(odd, r)[warp] = most, of_row(odd, r)[T::WARPS + warp] = sum;
  }
  DEVICE void publish_all(u32 odd, Sums (&d)[T::PARTS], const float (&sums)[T::PARTS]) const {
    if constexpr (T::JOINED) {
      if constexpr (T::STEPS && T::PARTS == 2) flat::join(d[0], d[1]);
      float most = 0.0f, sum = 0.0f;
#pragma unroll
      for (u32 p = 0; p < T::PARTS; p++) most = flat::largest(d[p], most), sum += sums[p];
      publish(odd, 0, most, sum);
    } else {
#pragma unroll
      for (u32 p = 0; p < T::PARTS; p++) publish(odd, p, flat::largest(d[p], 0.0f), sums[p]);
    }
  }

  DEVICE float row_factor(const float *sums) const {
    if (activation != ACT_NORM) return factor;
    float total = 0.0f;
#pragma unroll
    for (u32 i = 0; i < T::WARPS; i++) total += sums[i];
    return factor * rsqrtf(fmaf(total, share, eps));
  }
  DEVICE hadamard::RowScale scale_of(u32 row, u32 odd, u32 r) const {
    const u32 lane = thread() % 32;
    const float most = hadamard::warp_max(lane < T::WARPS ? of_row(odd, r)[lane] : 0.0f);
    const hadamard::RowScale scale(most, row_factor(of_row(odd, r) + T::WARPS), q);
    if (lane == 0 && T::tile() == 0 && q.bits != 16 && row < rows) q.scales[row] = scale.scale;
    return scale;
  }
  DEVICE void write(const Sums &d, const hadamard::RowScale &scale, u32 row, u32 part) const {
    hadamard::for_mode(q, flat::Writer<T>{d, scale, q, m, part, q.out + ptx::opaque(row) * q.row_bytes(), row < rows});
  }
  DEVICE void write_all(u32 odd, const Sums (&d)[T::PARTS], u32 turn) const {
    if constexpr (T::JOINED) {
      const hadamard::RowScale scale = scale_of(turn, odd, 0);
#pragma unroll
      for (u32 p = 0; p < T::PARTS; p++) write(d[p], scale, turn, p);
    } else {
#pragma unroll
      for (u32 p = 0; p < T::PARTS; p++) write(d[p], scale_of(turn * T::ROWS + p, odd, p), turn * T::ROWS + p, 0);
    }
  }

  // Brings the first turn's bytes, and asks for those behind them.
  DEVICE void begin(u32 turn) const {
    if (acts()) {
      ask(turn, 0);
      activate_turn(0);
      ask(turn + gridDim.x, 0);
    } else {
#pragma unroll 1
      for (u32 i = 0; i < T::STAGES; i++) ask(turn + i * gridDim.x, i);
      ptx::copy_async_wait<T::STAGES - 1>();
    }
    ptx::fence_async_proxy();
    __syncthreads();
  }

  DEVICE void run(u32 turn) const {
    const u32 turns = (rows + T::ROWS - 1) / T::ROWS, places = acts() ? 2 : T::STAGES;
    const bool busy = 16 * T::tile() < m;
    if (turn >= turns) return;
    begin(turn);
    Sums d[T::PARTS];
    // A turn's codes are written at the head of the loop, before the next products start: sums that are on their way may
    // not be carried over its end, and nothing but their products may touch any of them until they have come.
    u32 stage = 0, before = turn;
    bool made = false;
    for (u32 odd = 0;; odd ^= 1) {
      if (made && busy) write_all(odd ^ 1, d, before);
      if (turn >= turns) break;
#pragma unroll
      for (u32 p = 0; p < T::PARTS; p++) start(d[p], p, stage);
      const u32 next = turn + gridDim.x, next_stage = stage + 1 == places ? 0 : stage + 1;
      if (acts() && next < turns) {  // behind the products
        activate_turn(next_stage);
        ask(next + gridDim.x, 0);
      }
      float sums[T::PARTS];
      transform(d, sums, busy);
      if (busy) publish_all(odd, d, sums);
      if (!acts()) ptx::copy_async_wait<T::STAGES - 2>();
      ptx::fence_async_proxy();
      __syncthreads();
      if (!acts()) ask(turn + T::STAGES * gridDim.x, stage);
      made = true, before = turn, turn = next, stage = next_stage;
    }
  }
};

extern "C" __global__ void __launch_bounds__(128 * GROUP_COUNT, RESIDENT)
    ENTRY(const u16 *x, const uint4 *matrix, u8 *out, float *scales, u32 rows, u64 ldx, u32 m, int activation,
          float factor, float eps, float share, int width, int bits, int order, float clip) {
  using T = Config<CONFIG>;
  extern __shared__ __align__(1024) u8 memory[];
  const u32 lane = threadIdx.x % 32, stages = ptx::shared_address(memory) + HEAD_BYTES;
  Flat<T> f{x, ldx, m, rows, activation, factor, eps, share, Quantizer{out, scales, width, bits, order, clip}, stages,
            stages + 2 * T::STAGE_BYTES, reinterpret_cast<float *>(memory), flat::LowBits(lane, rows >> 31)};

  ptx::launch_dependents();
  for (u32 i = threadIdx.x; i < 4 * T::ROWS * T::WARPS; i += T::THREADS) f.numbers[i] = 0.0f;
  const u32 places = f.acts() ? 2 : T::STAGES, tail = (T::MP - m) * 8;  // 16-byte pieces of a block past line m
  for (u32 i = threadIdx.x; i < places * T::ROWS * T::BLOCKS * tail; i += T::THREADS)  // 0 * garbage need not be 0
    ptx::store_shared_16(stages + i / tail * T::BLOCK_BYTES + 128 * m + 16 * (i % tail), make_uint4(0, 0, 0, 0));
#pragma unroll
  for (u32 k = 0; k < T::KT; k++) {
    const uint4 r = matrix[(T::tile() * T::KT + k) * 32 + lane];
    f.a[k][0] = r.x, f.a[k][1] = r.y, f.a[k][2] = r.z, f.a[k][3] = r.w;
  }
  ptx::wait_for_previous_kernel();
  f.run(blockIdx.x);
}
