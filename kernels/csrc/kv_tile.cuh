// What the two prefill kernels share: codes to fp16 values, queries, masks, the online softmax of a warp's 16 rows.
#pragma once
#include "kv_cache.cuh"

constexpr int ROW = HEAD_DIM * BITS / 8;  // bytes of a row of codes
constexpr float NOTHING = -1e30f;

// The pages of one sequence and KV head.
struct Cache {
  const u8 *codes;
  const u32 *params;
  const int *pages;
  int kv_head, kv_heads;

  DEVICE i64 row(int page, int which) const {
    return ((static_cast<i64>(page) * 2 + which) * kv_heads + kv_head) * PAGE;
  }
};

// Which channel of eight lies at position p: two codes of a word's halves come out of it together.
DEVICE constexpr int channel_at(int p) { return BITS == 8 ? p : p / 2 + p % 2 * 4; }
DEVICE constexpr int position_of(int c) { return BITS == 8 ? c : c % 4 * 2 + c / 4; }

// The values of a row: (code - z) * s in fp16 pairs. 0x6400 is 1024 with a last bit of 1, 0x5400 is 64 where bit 4 counts
// 1, so a code under them is 1024 + c or 64 + c; subtracting 1024 + z or 64 + z is exact.
struct Affine {
  u32 scale, low, high;

  DEVICE explicit Affine(u32 parameters) {
    const u32 z = static_cast<u32>(Number<FP16>::to_float(parameters >> 16));
    scale = ptx::permute_bytes(parameters, parameters, 0x1010);
    low = 0x64006400u + z * 0x00010001u;
    high = 0x54005400u + z * 0x00100010u;
  }
  DEVICE u32 pair(u32 raw, u32 zero) const { return Number<FP16>::multiply(Number<FP16>::subtract(raw, zero), scale); }

  DEVICE uint4 eight(u32 codes) const {
    if constexpr (BITS == 4) {
      return eight_of(ptx::load_shared_4(codes));
    } else {
      const uint2 w = ptx::load_shared_8(codes);
      return make_uint4(pair(ptx::permute_bytes(w.x, 0x64646464u, 0x4140), low),
                        pair(ptx::permute_bytes(w.x, 0x64646464u, 0x4342), low),
                        pair(ptx::permute_bytes(w.y, 0x64646464u, 0x4140), low),
                        pair(ptx::permute_bytes(w.y, 0x64646464u, 0x4342), low));
    }
  }
  DEVICE uint4 eight_of(u32 w) const {
    const u32 next = w >> 8;
    return make_uint4(pair(ptx::and_or<0x000F000F, 0x64006400>(w), low), pair(ptx::and_or<0x00F000F0, 0x54005400>(w), high),
                      pair(ptx::and_or<0x000F000F, 0x64006400>(next), low),
                      pair(ptx::and_or<0x00F000F0, 0x54005400>(next), high));
  }
};

// One query row to `to`, after R3, in the cache's order of columns, times a power of two; returns that power's inverse.
// Rows that do not exist become zeros.
DEVICE float load_query(u16 *to, float *scratch, const u8 *from, bool exists, bool bf16, const Turn &turn, int lane) {
  Vector<HEAD_DIM> v;
  float largest = 0;
#pragma unroll
  for (int i = 0; i < v.EACH; i++) v.x[i] = 0;
  if (exists) {
    v.load(from, bf16, lane);
    v.turn(turn, scratch, lane);
  }
#pragma unroll
  for (int i = 0; i < v.EACH; i++) largest = fmaxf(largest, fabsf(v.x[i]));
  const int exponent = fp16_exponent(warp_max<32>(largest));
  const float power = power_of_two(exponent);
  if (lane < v.ACTIVE) {
#pragma unroll
    for (int i = 0; i < v.EACH; i++) {
      const int channel = lane * v.EACH + i;
      to[channel / 8 * 8 + position_of(channel % 8)] = to_half(v.x[i] * power, false);
    }
  }
  return power_of_two(-exponent);
}

// What row g of a warp sees (row g + 8: a slot of 8 more).
struct Sight {
  int padded, window, slot;

  DEVICE bool sees(int j, int second) const {
    const int p = slot + 8 * second;
    return j <= p && j >= padded && (window <= 0 || j > p - window);
  }
  // Whether all 16 rows, the first at slot `low`, see all of `count` slots from j on.
  DEVICE bool all(int j, int count, int low) const {
    return j + count - 1 <= low && j >= padded && (window <= 0 || j > low + 15 - window);
  }
};

DEVICE float quad_max(float v) {
  v = fmaxf(v, __shfl_xor_sync(WHOLE, v, 1));
  return fmaxf(v, __shfl_xor_sync(WHOLE, v, 2));
}
DEVICE float quad_sum(float v) {
  v += __shfl_xor_sync(WHOLE, v, 1);
  return v + __shfl_xor_sync(WHOLE, v, 2);
}

// Scores of 16 rows and 8 TILES slots from `begin` on to weights, in place; `rescale` is given what older sums shrink by.
// `total` is a lane's own part of the sums. `low`: slot of the warp's first row.
template <int TILES, class Rescale>
DEVICE void soften(float (&x)[TILES][4], const float (&unit)[2], float softcap, const Sight &sight, int begin, int t,
                   int low, float (&largest)[2], float (&total)[2], Rescale rescale) {
  const bool whole = sight.all(begin, 8 * TILES, low);
  float top[2] = {largest[0], largest[1]};
  if (softcap > 0 || !whole) {
#pragma unroll
    for (int i = 0; i < TILES; i++) {
#pragma unroll
      for (int c = 0; c < 4; c++) {
        float v = x[i][c] * unit[c / 2];
        if (softcap > 0) v = softcap * LOG2E * tanh_fast(v * LN2 / softcap);
        if (!whole && !sight.sees(begin + 8 * i + 2 * t + c % 2, c / 2)) v = -infinity();
        x[i][c] = v;
        top[c / 2] = fmaxf(top[c / 2], v);
      }
    }
    top[0] = quad_max(top[0]), top[1] = quad_max(top[1]);
#pragma unroll
    for (int i = 0; i < TILES; i++) {
#pragma unroll
      for (int c = 0; c < 4; c++) x[i][c] = ptx::exp2(x[i][c] - top[c / 2]);
    }
  } else {  // the usual tile: the unit, which is positive, goes into the exponent's sum
    float most[2] = {x[0][0], x[0][2]};
#pragma unroll
    for (int i = 0; i < TILES; i++) {
#pragma unroll
      for (int c = 0; c < 4; c++) most[c / 2] = fmaxf(most[c / 2], x[i][c]);
    }
    top[0] = fmaxf(top[0], quad_max(most[0]) * unit[0]), top[1] = fmaxf(top[1], quad_max(most[1]) * unit[1]);
#pragma unroll
    for (int i = 0; i < TILES; i++) {
#pragma unroll
      for (int c = 0; c < 4; c++) x[i][c] = ptx::exp2(fmaf(x[i][c], unit[c / 2], -top[c / 2]));
    }
  }
  const float factor[2] = {ptx::exp2(largest[0] - top[0]), ptx::exp2(largest[1] - top[1])};
  largest[0] = top[0], largest[1] = top[1];
  total[0] *= factor[0], total[1] *= factor[1];
#pragma unroll
  for (int i = 0; i < TILES; i++) total[0] += x[i][0] + x[i][1], total[1] += x[i][2] + x[i][3];
  rescale(factor);
}
