// What the kernels of the quantized KV cache share: pages, R3 on one vector, the signature's parts.
//
// A page holds 64 tokens (kernels/quarot/kv_layout.py): codes [page][K, V][kv head][64][ROW] bytes, params the same
// without the last axis, one pair (scale, zero) of halves a row. 4-bit codes lie two to a byte, the even channel low.
//
// R3 of one vector is done by one warp in fp32: butterflies in registers and shuffles where head_dim is a power of two,
// through a row of shared memory where it is not (80 = 20 x 4, 96 = 12 x 8: sums of m signed values, then butterflies).
#pragma once
#include "kv_ptx.cuh"

typedef long long i64;
constexpr int PAGE = 64;
constexpr float LOG2E = 1.442695041f, LN2 = 0.6931471806f;
constexpr u32 WHOLE = 0xFFFFFFFFu;

// The transform: `block` = m * 2^log_r; row j of the m x m matrix of signs has (m + 31) / 32 words, 1 for minus.
struct Turn {
  const u32 *signs;
  int m, log_r, block;
  float norm;
};
#define TURN_PARAMETERS const u32 *signs, int turn_m, int turn_log_r, int turn_block, float turn_norm
#define TURN_ARGUMENTS Turn{signs, turn_m, turn_log_r, turn_block, turn_norm}

// Strides of (batch, head, token), in values.
struct Strides {
  i64 batch, head, token;
};

// One vector of SIZE values across a warp: EACH neighbours a lane, lanes from ACTIVE on hold zeros.
template <int SIZE> struct Vector {
  static constexpr int EACH = SIZE == 64 ? 2 : SIZE == 256 ? 8 : 4, ACTIVE = SIZE / EACH;
  static constexpr bool POWER = (SIZE & (SIZE - 1)) == 0;
  static_assert(SIZE % EACH == 0 && ACTIVE <= 32, "a vector fits a warp");
  float x[EACH];

  // A lane's values, from where they lie; zeros where they do not exist.
  DEVICE void load(const u8 *from, bool exists, bool bf16) {
    u32 words[EACH / 2] = {};
    if (exists) {
      if constexpr (EACH == 2) words[0] = *reinterpret_cast<const u32 *>(from);
      if constexpr (EACH == 4) {
        const uint2 v = *reinterpret_cast<const uint2 *>(from);
        words[0] = v.x, words[1] = v.y;
      }
      if constexpr (EACH == 8) {
        const uint4 v = *reinterpret_cast<const uint4 *>(from);
        words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
      }
    }
#pragma unroll
    for (int i = 0; i < EACH / 2; i++) {
      x[2 * i] = to_float(words[i] & 0xFFFF, bf16);
      x[2 * i + 1] = to_float(words[i] >> 16, bf16);
    }
  }
  DEVICE void load_row(const u8 *row, bool exists, bool bf16, int lane) {
    load(row + lane * EACH * 2, exists && lane < ACTIVE, bf16);
  }
  DEVICE float magnitude() const {
    float largest = 0;
#pragma unroll
    for (int i = 0; i < EACH; i++) largest = fmaxf(largest, fabsf(x[i]));
    return largest;
  }

  // x <- x (I (x) H_m (x) H_r) / sqrt(block). `row` is SIZE floats of shared memory, this warp's own.
  DEVICE void turn(const Turn &turn, float *row, int lane) {
    if constexpr (POWER) {
#pragma unroll
      for (int step = 0; (1 << step) < EACH; step++) {
        if (step >= turn.log_r) continue;
#pragma unroll
        for (int i = 0; i < EACH; i++) {
          if (i & (1 << step)) continue;
          const float a = x[i], b = x[i | (1 << step)];
          x[i] = a + b, x[i | (1 << step)] = a - b;
        }
      }
#pragma unroll
      for (int distance = 1; distance < 32; distance *= 2) {
        if (EACH * distance >= (1 << turn.log_r)) continue;
        const float sign = lane & distance ? -1.0f : 1.0f;
#pragma unroll
        for (int i = 0; i < EACH; i++) x[i] = fmaf(sign, x[i], __shfl_xor_sync(WHOLE, x[i], distance));
      }
    } else {
      if (turn.block > 1) through_shared(turn, row, lane);
    }
#pragma unroll
    for (int i = 0; i < EACH; i++) x[i] *= turn.norm;
  }

  DEVICE void through_shared(const Turn &turn, float *row, int lane) {
    const int r = 1 << turn.log_r, words = (turn.m + 31) / 32;
    store(row, lane);
    if (turn.m > 1) {
      float sums[EACH] = {};
      if (lane < ACTIVE) {
#pragma unroll
        for (int i = 0; i < EACH; i++) {
          const int at = lane * EACH + i, in_block = at % turn.block, column = in_block / r;
          const float *from = row + at - in_block + in_block % r;
          for (int j = 0; j < turn.m; j++) {
            const bool minus = turn.signs[j * words + column / 32] >> column % 32 & 1;
            sums[i] += minus ? -from[j * r] : from[j * r];
          }
        }
      }
      __syncwarp();
#pragma unroll
      for (int i = 0; i < EACH; i++) x[i] = sums[i];
      store(row, lane);
    }
    for (int step = 1; step < r; step *= 2) {
      if (lane < ACTIVE) {
#pragma unroll
        for (int i = 0; i < EACH; i++) {
          const float other = row[(lane * EACH + i) ^ step];
          x[i] = (lane * EACH + i) & step ? other - x[i] : x[i] + other;
        }
      }
      __syncwarp();
      store(row, lane);
    }
  }

  DEVICE void store(float *row, int lane) const {
    if (lane < ACTIVE) {
#pragma unroll
      for (int i = 0; i < EACH; i++) row[lane * EACH + i] = x[i];
    }
    __syncwarp();
  }
};

template <int COUNT> DEVICE float warp_max(float v) {
#pragma unroll
  for (int step = COUNT / 2; step > 0; step /= 2) v = fmaxf(v, __shfl_xor_sync(WHOLE, v, step));
  return v;
}
DEVICE float warp_sum(float v) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) v += __shfl_xor_sync(WHOLE, v, step);
  return v;
}

// tanh with an error of some 2^-22: what a soft cap needs.
DEVICE float tanh_fast(float v) {
  const float e = ptx::exp2(fabsf(v) * -2.0f * LOG2E);
  return copysignf(__fdividef(1.0f - e, 1.0f + e), v);
}

// The soft cap on scores in units of log2: c tanh(x / c).
struct Cap {
  float outer, inner;

  DEVICE explicit Cap(float softcap) : outer(softcap * LOG2E), inner(softcap > 0 ? LN2 / softcap : 0) {}
};

// The power of two that takes a largest magnitude into [2^14, 2^15): as q times it, in fp16, keeps 11 bits from 2^-29
// of the largest on. 1 for zero. The exponent is held where the power and its inverse are normal numbers.
DEVICE int fp16_exponent(float largest) {
  const int exponent = static_cast<int>(__float_as_uint(largest) >> 23 & 0xFF) - 127;
  return largest > 0 ? max(-90, min(90, 14 - exponent)) : 0;
}
DEVICE float infinity() { return __uint_as_float(0x7F800000u); }
DEVICE u16 to_half(float v, bool bf16) {
  return static_cast<u16>(bf16 ? Number<BF16>::pack(v, 0) : Number<FP16>::pack(v, 0));
}
DEVICE float power_of_two(int exponent) { return __uint_as_float(static_cast<u32>(exponent + 127) << 23); }
