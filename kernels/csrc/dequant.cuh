// Codes to 16-bit numbers, without an integer-to-float conversion.
//
// A lane's word of the tile (kernels/layout.py) holds the codes of columns n = g8 and g8 + 8 (g8 = lane / 4) and rows
// k = 2t, 2t+1, 2t+8, 2t+9 (t = lane % 4): the four registers of the A operand of one 16 (n) x 16 (k) product,
//     a0 = column g8, low rows   a1 = column g8+8, low rows   a2 = column g8, high rows   a3 = column g8+8, high rows.
//
// fp16 has 10 mantissa bits. 0x6400 is 1024.0, where the last bit is worth 1: OR-ing a code q into bits 0..3 gives
// 1024 + q. 0x5400 is 64.0, where bit 4 is worth 1: a code in bits 4..7 gives 64 + q without a shift. So a word needs
// one shift and four OR. Subtracting 1024 + z or 64 + z is exact (Sterbenz), and what is left is q - z.
// bf16 has 7 mantissa bits: 0x4300 is 128.0, where the last bit is worth 1, but no mantissa holds a code in bits
// 4..7 so. They are the last bit of the exponent and the first three of the mantissa: alone in a number they make the
// subnormals and the first normals, 16 q times 2^-133 on one line. One multiply-add by 2^127 makes (q - z) / 4 of that,
// another by 1/4 the same of 128 + q, so a word needs one shift as in fp16. All is exact; the sums are multiplied by 4
// at their end (`in_units`, weights.cuh).
// 8-bit codes: a byte under 0x64 is 1024 + q in fp16. bf16 cannot hold 128 + q for q > 127, so the byte goes under
// the fp32 number 0x4B000000 = 8388608.0, whose last bit is worth 1; q - z then fits bf16's 8 significant bits.
#pragma once
#include "number.cuh"

// What is subtracted from the raw values of one column.
template <int ACT, int BITS> struct Zero;

template <> struct Zero<FP16, 4> {
  u32 low, high;
  DEVICE void set(u32 z) {
    low = 0x64006400u + z * 0x00010001u;
    high = 0x54005400u + z * 0x00100010u;
  }
};
template <> struct Zero<BF16, 4> {
  u32 low, high;  // -(128 + z) / 4, -z / 4
  DEVICE void set(u32 z) {
    low = 0xC200C200u + z * 0x00010001u;
    high = Number<BF16>::multiply_add(0x43004300u + z * 0x00010001u, 0xBE80BE80u, 0x42004200u);
  }
};
template <> struct Zero<FP16, 8> {
  u32 low;
  DEVICE void set(u32 z) { low = 0x64006400u + z * 0x00010001u; }
};
template <> struct Zero<BF16, 8> {
  float low;
  DEVICE void set(u32 z) { low = 8388608.0f + static_cast<float>(z); }
};

// What operands are multiplied by to be q - z.
template <int ACT, int BITS> constexpr float OPERAND_UNIT = ACT == BF16 && BITS == 4 ? 4.0f : 1.0f;

// The A operand (q - z) / OPERAND_UNIT of one 16 x 16 tile, from a lane's word (4 bit) or two words (8 bit: column g8,
// column g8 + 8).
template <int ACT, int BITS> struct Dequant;

template <> struct Dequant<FP16, 4> {
  DEVICE static void run(u32 (&a)[4], const u32 *w, const Zero<FP16, 4> &z0, const Zero<FP16, 4> &z1) {
    const u32 next = w[0] >> 8;
    a[0] = Number<FP16>::subtract(ptx::and_or<0x000F000F, 0x64006400>(w[0]), z0.low);
    a[1] = Number<FP16>::subtract(ptx::and_or<0x000F000F, 0x64006400>(next), z1.low);
    a[2] = Number<FP16>::subtract(ptx::and_or<0x00F000F0, 0x54005400>(w[0]), z0.high);
    a[3] = Number<FP16>::subtract(ptx::and_or<0x00F000F0, 0x54005400>(next), z1.high);
  }
};

template <> struct Dequant<BF16, 4> {
  DEVICE static void run(u32 (&a)[4], const u32 *w, const Zero<BF16, 4> &z0, const Zero<BF16, 4> &z1) {
    constexpr u32 QUARTER = 0x3E803E80, POWER_127 = 0x7F007F00;
    const u32 next = w[0] >> 8;
    a[0] = Number<BF16>::multiply_add(ptx::and_or<0x000F000F, 0x43004300>(w[0]), QUARTER, z0.low);
    a[1] = Number<BF16>::multiply_add(ptx::and_or<0x000F000F, 0x43004300>(next), QUARTER, z1.low);
    a[2] = Number<BF16>::multiply_add(w[0] & 0x00F000F0, POWER_127, z0.high);
    a[3] = Number<BF16>::multiply_add(next & 0x00F000F0, POWER_127, z1.high);
  }
};

template <> struct Dequant<FP16, 8> {
  DEVICE static void run(u32 (&a)[4], const u32 *w, const Zero<FP16, 8> &z0, const Zero<FP16, 8> &z1) {
    constexpr u32 EXPONENT = 0x64646464;
    a[0] = Number<FP16>::subtract(ptx::permute_bytes(w[0], EXPONENT, 0x4240), z0.low);
    a[1] = Number<FP16>::subtract(ptx::permute_bytes(w[1], EXPONENT, 0x4240), z1.low);
    a[2] = Number<FP16>::subtract(ptx::permute_bytes(w[0], EXPONENT, 0x4341), z0.low);
    a[3] = Number<FP16>::subtract(ptx::permute_bytes(w[1], EXPONENT, 0x4341), z1.low);
  }
};

template <> struct Dequant<BF16, 8> {
  DEVICE static float value(u32 w, u32 byte, float z) {
    return __uint_as_float(ptx::permute_bytes(w, 0x4B000000u, 0x7650 | byte)) - z;
  }
  DEVICE static void run(u32 (&a)[4], const u32 *w, const Zero<BF16, 8> &z0, const Zero<BF16, 8> &z1) {
    a[0] = Number<BF16>::pack(value(w[0], 0, z0.low), value(w[0], 2, z0.low));
    a[1] = Number<BF16>::pack(value(w[1], 0, z1.low), value(w[1], 2, z1.low));
    a[2] = Number<BF16>::pack(value(w[0], 1, z0.low), value(w[0], 3, z0.low));
    a[3] = Number<BF16>::pack(value(w[1], 1, z1.low), value(w[1], 3, z1.low));
  }
};
