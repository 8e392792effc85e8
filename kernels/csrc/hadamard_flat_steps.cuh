// Steps of hadamard_flat.cu on the sums that a thread holds of 16 lines and 8 NT columns: register e of tile i is line
// g + 8 (e / 2), column 8 i + 2t + e % 2 of lane 4 g + t.
#pragma once
#include "hadamard.cuh"

namespace flat {

// d = a * b + c, 16 x 8 x 8, operands fp32 of which the upper 19 bits count, fp32 sums.
DEVICE void product_tf32(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2], const float (&c)[4]) {
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
               "{%10, %11, %12, %13};"
               : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(c[0]), "f"(c[1]), "f"(c[2]),
                 "f"(c[3]));
}

// Bits 0 to 2 of a column, which lie across lanes: an 8 x 8 product in tf32 of the upper and of the lower part of each
// sum, an error of at most 2^-21 of each term.
struct LowBits {
  u32 h[2];        // H_8[2t][g], H_8[2t + 1][g] of this lane
  u32 upper_bits;  // what tf32 keeps

  // `zero` is 0, but not known to be: the assembler would drop an `and` with a constant, and move each value instead.
  DEVICE LowBits(u32 lane, u32 zero) : upper_bits(0xFFFFE000u | zero) {
    const u32 g = lane / 4, t = lane % 4;
    h[0] = 0x3F800000u | (__popc(2 * t & g) & 1) << 31, h[1] = 0x3F800000u | (__popc((2 * t | 1) & g) & 1) << 31;
  }

  template <u32 NT> DEVICE void apply(float (&d)[NT][4]) const {
#pragma unroll
    for (u32 i = 0; i < NT; i++) {
      u32 upper[4], lower[4];
      const float zeros[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
      for (u32 e = 0; e < 4; e++) {
        const float v = d[i][(e & 1) << 1 | e >> 1];  // an operand has lines in bit 0, the column's lowest bit in bit 1
        upper[e] = __float_as_uint(v) & upper_bits;
        lower[e] = __float_as_uint(v - __uint_as_float(upper[e]));
      }
      product_tf32(d[i], lower, h, zeros);
      product_tf32(d[i], upper, h, d[i]);
    }
  }
};

// One bit of a tile's number: tiles STEP apart.
template <u32 STEP, u32 NT> DEVICE void butterflies(float (&d)[NT][4]) {
#pragma unroll
  for (u32 i = 0; i < NT; i++)
    if ((i / STEP) % 2 == 0)
#pragma unroll
      for (u32 e = 0; e < 4; e++) {
        const float u = d[i][e], v = d[i + STEP][e];
        d[i][e] = u + v, d[i + STEP][e] = u - v;
      }
}

#ifdef SIGNS
// H_12 over tiles STEP apart: sums of three, with all signs, then of four of those. Bit i of SIGNS[j]: H[i][j] = -1.
template <u32 STEP, u32 NT> DEVICE void twelve(float (&d)[NT][4]) {
  constexpr u32 signs[12] = {SIGNS};
#pragma unroll
  for (u32 first = 0; first < STEP; first++)
#pragma unroll
    for (u32 e = 0; e < 4; e++) {
      float three[4][4];  // a + b + c, a - b + c, a + b - c, a - b - c
#pragma unroll
      for (u32 i = 0; i < 4; i++) {
        const u32 k = first + 3 * i * STEP;
        const float sum = d[k][e] + d[k + STEP][e], difference = d[k][e] - d[k + STEP][e], last = d[k + 2 * STEP][e];
        three[i][0] = sum + last, three[i][1] = difference + last, three[i][2] = sum - last, three[i][3] = difference - last;
      }
#pragma unroll
      for (u32 j = 0; j < 12; j++) {
        float sum = 0.0f;
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
          const u32 s = signs[j] >> 3 * i & 7;
          const bool negative = s & 1;
          const u32 which = (s >> 1 & 1 ^ s & 1) | (s >> 2 & 1 ^ s & 1) << 1;  // relative to the first one's sign
          const float v = three[i][which];
          sum = i == 0 ? (negative ? -v : v) : negative ? sum - v : sum + v;
        }
        d[first + j * STEP][e] = sum;
      }
    }
}
#endif

// The larger of `more` and |u + v|, |u - v|: one of the two is |u| + |v|, rounded alike.
DEVICE float most_of_pair(float more, float u, float v) { return hadamard::max_abs(more, fabsf(u) + fabsf(v)); }

// Of four numbers that were kept apart so that they do not wait for one another.
DEVICE float most_of(const float (&c)[4]) {
  return hadamard::max_abs(hadamard::max_abs(c[0], c[1]), hadamard::max_abs(c[2], c[3]));
}

// The highest bit of a tile's number. Returns the largest |value|.
template <u32 NT> DEVICE float highest_bit(float (&d)[NT][4]) {
  float chains[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
  for (u32 i = 0; i < NT / 2; i++)
#pragma unroll
    for (u32 e = 0; e < 4; e++) {
      const float u = d[i][e], v = d[i + NT / 2][e];
      chains[e] = most_of_pair(chains[e], u, v);
      d[i][e] = u + v, d[i + NT / 2][e] = u - v;
    }
  return most_of(chains);
}

// The bits of a column above 2, which are a tile's number: all but the highest.
template <u32 NT> DEVICE void high_bits(float (&d)[NT][4]) {
#ifdef SIGNS
  static_assert(NT == 12, "one tile apart");
  twelve<1>(d);
#else
  butterflies<1>(d);
  butterflies<2>(d);
  if constexpr (NT > 8) butterflies<4>(d);
  if constexpr (NT > 16) butterflies<8>(d);
#endif
}

template <u32 NT> DEVICE float squares(const float (&d)[NT][4]) {
  float sum = 0.0f;
#pragma unroll
  for (u32 i = 0; i < NT; i++)
#pragma unroll
    for (u32 e = 0; e < 4; e++) sum = fmaf(d[i][e], d[i][e], sum);
  return sum;
}

// The highest bit of a tile's number, if there is one that STEPS left. Returns the largest |value|.
template <bool STEPS, u32 NT> DEVICE float last_bit(float (&d)[NT][4]) {
#ifndef SIGNS
  if constexpr (STEPS) return highest_bit(d);
#endif
  float chains[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
  for (u32 i = 0; i < NT; i++)
#pragma unroll
    for (u32 e = 0; e < 4; e++) chains[e] = hadamard::max_abs(chains[e], d[i][e]);
  return most_of(chains);
}

}  // namespace flat
