// What the transform-and-quantize kernels share: butterflies, activations, and the way from fp32 values to codes.
//
// A row of n values is cut into blocks of 32. Two neighbouring lanes make a block, each with two octets:
//
//     lane b3 = 0:  columns 0..7 and 16..23        lane b3 = 1:  columns 8..15 and 24..31
//
// so that in every order of codes (kernels/quarot/orders_int.py) a lane writes 16 bytes at once.
#pragma once
#include "hadamard_ptx.cuh"

enum Activation { ACT_NONE = 0, ACT_SILU = 1, ACT_GELU_TANH = 2, ACT_NORM = 3 };  // what the input is
enum Order { NATURAL = 0, P32 = 1, S64 = 2, Q32 = 3 };                           // of the codes

// How y becomes codes: same for all rows of a launch.
struct Quantizer {
  u8 *out;
  float *scales;
  int width;  // columns of a row of out
  int bits, order;
  float clip;

  DEVICE u64 row_bytes() const { return bits == 16 ? 2ull * width : order == S64 ? width / 2 : width; }
};

namespace hadamard {

constexpr float MAGIC = 12582912.0f;       // 1.5 * 2^23: adding it rounds to an integer, half to even, in the low bits
constexpr float SMALLEST = 1.17549435e-38f;  // a smaller scale has no reciprocal: the row counts as zeros

using ptx::max_abs;

// The largest |v| of a warp; bits of non-negative floats are ordered as integers, NaN above all.
DEVICE float warp_max(float v) { return __uint_as_float(__reduce_max_sync(0xFFFFFFFFu, __float_as_uint(v))); }

DEVICE float warp_sum(float v) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) v += __shfl_xor_sync(0xFFFFFFFFu, v, step);
  return v;
}

// One step of a Sylvester matrix on every pair of values `STEP` apart.
template <int COUNT, int STEP> DEVICE void butterfly(float (&v)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; i++)
    if ((i & STEP) == 0) {
      const float a = v[i], b = v[i + STEP];
      v[i] = a + b, v[i + STEP] = a - b;
    }
}

// What the activation multiplies g by is 1 / (1 + 2^z): SiLU is g * sigmoid(g); GELU's tanh form is g * sigmoid(2 v),
// v = sqrt(2 / pi) * (g + 0.044715 g^3).
template <int ACTIVATION> DEVICE float exponent(float g) {
  constexpr float LOG2_E = 1.4426950408889634f, TWICE_ROOT = 1.5957691216057308f;
  return ACTIVATION == ACT_SILU ? -LOG2_E * g : -LOG2_E * TWICE_ROOT * fmaf(0.044715f * g * g, g, g);
}

// d = round16(act(gate) * up) of a packed pair, within some ulp of fp32 before it is rounded. One reciprocal serves two,
// because the unit that makes them is the slowest here: both factors times 2^-63, their product is finite. Beyond z = 126
// 1 / (1 + 2^z) is not normal and taken for 0: so large a negative gate gives 0, whatever its size. So may its neighbour
// that gives less than 1e-24.
template <int ACT, int ACTIVATION> DEVICE u32 activate_pair(u32 gate, u32 up) {
  using N = Number<ACT>;
  constexpr float SMALL = 1.0842021724855044e-19f, MOST = 126.9f;  // 2^-63
  const float g = N::to_float(gate & 0xFFFF), h = N::to_float(gate >> 16);
  const float a = fmaf(ptx::exp2(fminf(exponent<ACTIVATION>(g), MOST)), SMALL, SMALL);
  const float b = fmaf(ptx::exp2(fminf(exponent<ACTIVATION>(h), MOST)), SMALL, SMALL);
  const float both = ptx::reciprocal_or_zero(a * b) * SMALL;
  return N::pack(g * ptx::multiply_or_zero(both, b) * N::to_float(up & 0xFFFF), h * ptx::multiply_or_zero(both, a) * N::to_float(up >> 16));
}

template <int ACT, int ACTIVATION> DEVICE uint4 activate_octet(uint4 gate, uint4 up) {
  return make_uint4(activate_pair<ACT, ACTIVATION>(gate.x, up.x), activate_pair<ACT, ACTIVATION>(gate.y, up.y),
                    activate_pair<ACT, ACTIVATION>(gate.z, up.z), activate_pair<ACT, ACTIVATION>(gate.w, up.w));
}

template <int ACT> DEVICE void widen(float (&v)[8], uint4 octet) {
  const u32 pairs[4] = {octet.x, octet.y, octet.z, octet.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    v[2 * i] = Number<ACT>::to_float(pairs[i] & 0xFFFF);
    v[2 * i + 1] = Number<ACT>::to_float(pairs[i] >> 16);
  }
}

// a / 7 and a / 127, correctly rounded: a quotient with the rounded reciprocal, then its remainder. The operator / is
// a call here, and everything held would be spilled around it.
DEVICE float over(float a, float divisor, float reciprocal) {
  const float quotient = a * reciprocal;
  return fmaf(fmaf(-divisor, quotient, a), reciprocal, quotient);
}

// 1 / a of a normal a with a normal reciprocal, for the same reason.
DEVICE float reciprocal(float a) {
  const float r = ptx::reciprocal_or_zero(a);
  return fmaf(fmaf(-a, r, 1.0f), r, r);
}

// The scale of a row from its largest |y|, and what its sums are multiplied by on the way to codes.
struct RowScale {
  float factor;   // sums to y
  float scale;    // stored
  float inverse;  // sums to codes; 0 where the row has none

  DEVICE RowScale(float most, float factor, const Quantizer &q) : factor(factor) {
    const float y = most * factor;
    scale = q.bits == 4 ? over(y * q.clip, 7.0f, 1.0f / 7.0f) : over(y * q.clip, 127.0f, 1.0f / 127.0f);
    inverse = reciprocal(scale) * factor;
    if (scale < SMALLEST || !(inverse < __int_as_float(0x7F800000))) scale = 1.0f, inverse = 0.0f;
    if (!(y < __int_as_float(0x7F800000))) scale = __int_as_float(0x7FC00000), inverse = 0.0f;
  }
};

// Codes of eight sums, as bytes of two words.
DEVICE uint2 codes(const float (&v)[8], const RowScale &row, int bits, bool clipped) {
  if (row.inverse == 0.0f) return make_uint2(0, 0);
  u32 q[8];
  const float low = MAGIC + (bits == 4 ? -8.0f : -128.0f), high = MAGIC + (bits == 4 ? 7.0f : 127.0f);
#pragma unroll
  for (int i = 0; i < 8; i++) {
    float code = fmaf(v[i], row.inverse, MAGIC);
    if (clipped) code = fminf(fmaxf(code, low), high);
    q[i] = __float_as_uint(code);
  }
  const u32 a = ptx::permute_bytes(q[0], q[1], 0x0040), b = ptx::permute_bytes(q[2], q[3], 0x0040);
  const u32 c = ptx::permute_bytes(q[4], q[5], 0x0040), d = ptx::permute_bytes(q[6], q[7], 0x0040);
  return make_uint2(ptx::permute_bytes(a, b, 0x5410), ptx::permute_bytes(c, d, 0x5410));
}

// Nibbles of two octets' codes, spread to where the order S64 wants this lane's: word t holds columns 2t, 2t + 1 of
// the first octet in nibbles b3, b3 + 2 and of the second in b3 + 4, b3 + 6.
DEVICE void nibbles(u32 (&words)[4], uint2 first, uint2 second, u32 b3) {
#pragma unroll
  for (int t = 0; t < 4; t++) {
    const u32 select = t % 2 ? 0x7632 : 0x5410;
    const u32 bytes = ptx::permute_bytes(t < 2 ? first.x : first.y, t < 2 ? second.x : second.y, select);
    words[t] = (bytes & 0x0F0F0F0Fu) << 4 * b3;
  }
}

DEVICE void store(u8 *to, uint4 v, bool real) {
  if (real) *reinterpret_cast<uint4 *>(to) = v;
}

// How a block is written: one of the orders, or 16-bit values.
constexpr int WIDE = 4;
DEVICE int mode_of(const Quantizer &q) { return q.bits == 16 ? WIDE : q.order; }
DEVICE constexpr int block_bytes(int mode) { return mode == WIDE ? 64 : mode == S64 ? 16 : 32; }

// Writes the two octets of a lane and its neighbour's to the block's bytes at `to`. All lanes of a warp must call it;
// those whose block is not `real` write nothing.
template <int ACT, int MODE>
DEVICE void write_block(u8 *to, const float (&v)[2][8], const RowScale &scale, const Quantizer &q, bool real) {
  const u32 b3 = threadIdx.x & 1;
  if constexpr (MODE == WIDE) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const float(&o)[8] = v[h];
      const float f = scale.factor;
      store(to + 32 * h + 16 * b3,
            make_uint4(Number<ACT>::pack(o[0] * f, o[1] * f), Number<ACT>::pack(o[2] * f, o[3] * f),
                       Number<ACT>::pack(o[4] * f, o[5] * f), Number<ACT>::pack(o[6] * f, o[7] * f)),
            real);
    }
    return;
  }
  const bool clipped = q.clip != 1.0f;
  const uint2 first = codes(v[0], scale, q.bits, clipped), second = codes(v[1], scale, q.bits, clipped);
  if constexpr (MODE == P32) {  // word t: columns 2t, 2t + 1 of the first octet, then of the second
    store(to + 16 * b3,
          make_uint4(ptx::permute_bytes(first.x, second.x, 0x5410), ptx::permute_bytes(first.x, second.x, 0x7632),
                     ptx::permute_bytes(first.y, second.y, 0x5410), ptx::permute_bytes(first.y, second.y, 0x7632)),
          real);
  } else if constexpr (MODE == S64) {  // the lane b3 = 0 makes the first half of the block's bytes, the other the second
    u32 w[4];
    nibbles(w, first, second, b3);
    const u32 x = __shfl_xor_sync(0xFFFFFFFFu, b3 ? w[0] : w[2], 1);
    const u32 y = __shfl_xor_sync(0xFFFFFFFFu, b3 ? w[1] : w[3], 1);
    const uint2 both = make_uint2((b3 ? w[2] : w[0]) | x, (b3 ? w[3] : w[1]) | y);
    if (real) *reinterpret_cast<uint2 *>(to + 8 * b3) = both;
  } else {
    const uint2 mine = b3 ? second : first, sent = b3 ? first : second;
    const uint2 got = make_uint2(__shfl_xor_sync(0xFFFFFFFFu, sent.x, 1), __shfl_xor_sync(0xFFFFFFFFu, sent.y, 1));
    const uint2 low = b3 ? got : mine, high = b3 ? mine : got;  // the octets of b3 = 0 and 1
    store(to + 16 * b3,
          MODE == NATURAL ? make_uint4(low.x, low.y, high.x, high.y)
                          : make_uint4(ptx::permute_bytes(low.x, high.x, 0x5140), ptx::permute_bytes(low.x, high.x, 0x7362),
                                       ptx::permute_bytes(low.y, high.y, 0x5140), ptx::permute_bytes(low.y, high.y, 0x7362)),
          real);
  }
}

// Calls `body.template write<MODE>()` for the mode of a launch: the loops of a row are made once for each mode. Asked for one
// after the other, the usual one first: of a switch a table of branches is made, which every row would wait for.
template <class Body> DEVICE void for_mode(const Quantizer &q, const Body &body) {
  const u32 mode = mode_of(q);
  if (ptx::opaque(mode) == P32)
    body.template write<P32>();
  else if (ptx::opaque(mode) == S64)
    body.template write<S64>();
  else if (ptx::opaque(mode) == Q32)
    body.template write<Q32>();
  else if (ptx::opaque(mode) == WIDE)
    body.template write<WIDE>();
  else
    body.template write<NATURAL>();
}

}  // namespace hadamard
