// The two 16-bit number formats: conversions, packed arithmetic, the tensor-core product.
#pragma once
#include "ptx.cuh"

constexpr int FP16 = 0, BF16 = 1;  // legal values of every template parameter named ACT

template <int ACT> struct Number;

template <> struct Number<FP16> {
  DEVICE static float to_float(u32 bits) {
    float out;
    asm("{ .reg .b16 h; cvt.u16.u32 h, %1; cvt.f32.f16 %0, h; }" : "=f"(out) : "r"(bits));
    return out;
  }
  // Two floats to two rounded 16-bit values; `low` goes to the low half.
  DEVICE static u32 pack(float low, float high) {
    u32 out;
    asm("{ .reg .b16 l, h; cvt.rn.f16.f32 l, %1; cvt.rn.f16.f32 h, %2; mov.b32 %0, {l, h}; }"
        : "=r"(out)
        : "f"(low), "f"(high));
    return out;
  }
  DEVICE static u32 subtract(u32 a, u32 b) {
    u32 out;
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
    return out;
  }
  DEVICE static u32 multiply(u32 a, u32 b) {
    u32 out;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
    return out;
  }
  // d = a * b + c, 16 x 8 x 16, fp32 sums.
  DEVICE static void product(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, const float (&c)[4]) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%10, %11, %12, %13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
  }
};

template <> struct Number<BF16> {
  DEVICE static float to_float(u32 bits) { return __uint_as_float(bits << 16); }
  DEVICE static u32 pack(float low, float high) {
    u32 out;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
    return out;
  }
  DEVICE static u32 multiply_add(u32 a, u32 b, u32 c) {
    u32 out;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(c));
    return out;
  }
  // mul of bf16 pairs needs sm_90; as a fused multiply-add with -0.0 it runs from sm_80 on.
  DEVICE static u32 multiply(u32 a, u32 b) { return multiply_add(a, b, 0x80008000u); }
  // d = a * b + c, 16 x 8 x 16, fp32 sums.
  DEVICE static void product(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, const float (&c)[4]) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%10, %11, %12, %13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
  }
};

// A 16-bit value of a format known only at run time.
DEVICE float to_float(u32 bits, bool bf16) {
  return bf16 ? Number<BF16>::to_float(bits & 0xFFFF) : Number<FP16>::to_float(bits & 0xFFFF);
}
