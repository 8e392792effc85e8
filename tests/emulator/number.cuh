// In the place of csrc/number.cuh: the two 16-bit formats and the product of tensor cores.
#pragma once
#include "ptx.cuh"

constexpr int FP16 = 0, BF16 = 1;

template <int ACT> struct Number;

namespace machine {

inline float of_fp16(u32 bits) {
  const u16 low = static_cast<u16>(bits);
  _Float16 v;
  std::memcpy(&v, &low, 2);
  return static_cast<float>(v);
}
inline u32 to_fp16(float v) {
  const _Float16 rounded = static_cast<_Float16>(v);
  u16 out;
  std::memcpy(&out, &rounded, 2);
  return out;
}
inline float of_bf16(u32 bits) { return __uint_as_float(bits << 16); }
inline u32 to_bf16(float v) {
  const u32 bits = __float_as_uint(v);
  if (v != v) return 0x7FFF;
  return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}
// Of a value that is exact in double, rounded once.
inline u32 to_bf16_exactly(double v) {
  float f = static_cast<float>(v);  // the odd one of the two neighbours, so that the second rounding is right
  if (f != v && !(__float_as_uint(f) & 1)) f = std::nextafter(f, f < v ? INFINITY : -INFINITY);
  return to_bf16(f);
}

// d = a * b + c, 16 x 8 x 16: sums in fp64, rounded once. Lane 4 g + t holds rows g, g + 8 of A and column g of B.
template <class F> void multiply_16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, const float (&c)[4], const F &number) {
  const u32 words[6] = {a[0], a[1], a[2], a[3], b0, b1};
  const auto given = together(PRODUCT, words, 6);
  const u32 g = lane() / 4, t = lane() % 4;
  for (u32 i = 0; i < 4; i++) {
    double sum = c[i];
    for (u32 k = 0; k < 4; k++)
      for (u32 half = 0; half < 2; half++)
        for (u32 e = 0; e < 2; e++)
          sum += double(number(given[4 * g + k][2 * half + i / 2] >> 16 * e & 0xFFFF)) *
                 number(given[4 * (2 * t + i % 2) + k][4 + half] >> 16 * e & 0xFFFF);
    d[i] = static_cast<float>(sum);
  }
}

}  // namespace machine

template <> struct Number<FP16> {
  static float to_float(u32 bits) { return machine::of_fp16(bits); }
  static u32 pack(float low, float high) { return machine::to_fp16(low) | machine::to_fp16(high) << 16; }
  static u32 subtract(u32 a, u32 b) {
    return pack(to_float(a & 0xFFFF) - to_float(b & 0xFFFF), to_float(a >> 16) - to_float(b >> 16));
  }
  static u32 multiply(u32 a, u32 b) {
    return pack(to_float(a & 0xFFFF) * to_float(b & 0xFFFF), to_float(a >> 16) * to_float(b >> 16));
  }
  static void product(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, const float (&c)[4]) {
    machine::multiply_16(d, a, b0, b1, c, machine::of_fp16);
  }
};

template <> struct Number<BF16> {
  static float to_float(u32 bits) { return machine::of_bf16(bits); }
  static u32 pack(float low, float high) { return machine::to_bf16(low) | machine::to_bf16(high) << 16; }
  static u32 multiply_add(u32 a, u32 b, u32 c) {
    const auto one = [&](u32 at) {
      return machine::to_bf16_exactly(double(to_float(a >> at & 0xFFFF)) * to_float(b >> at & 0xFFFF) +
                                      to_float(c >> at & 0xFFFF));
    };
    return one(0) | one(16) << 16;
  }
  static u32 multiply(u32 a, u32 b) { return multiply_add(a, b, 0x80008000u); }
  static void product(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, const float (&c)[4]) {
    machine::multiply_16(d, a, b0, b1, c, machine::of_bf16);
  }
};

inline float to_float(u32 bits, bool bf16) {
  return bf16 ? Number<BF16>::to_float(bits & 0xFFFF) : Number<FP16>::to_float(bits & 0xFFFF);
}
