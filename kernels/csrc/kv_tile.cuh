// What kernels that turn codes of the cache into fp16 values share: where rows lie, the values, sums over four lanes.
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

  // Eight values of the words that hold their codes.
  DEVICE uint4 eight(u32 w) const {
    const u32 next = w >> 8;
    return make_uint4(pair(ptx::and_or<0x000F000F, 0x64006400>(w), low), pair(ptx::and_or<0x00F000F0, 0x54005400>(w), high),
                      pair(ptx::and_or<0x000F000F, 0x64006400>(next), low),
                      pair(ptx::and_or<0x00F000F0, 0x54005400>(next), high));
  }
  DEVICE uint4 eight(u32 first, u32 second) const {
    return make_uint4(pair(ptx::permute_bytes(first, 0x64646464u, 0x4140), low),
                      pair(ptx::permute_bytes(first, 0x64646464u, 0x4342), low),
                      pair(ptx::permute_bytes(second, 0x64646464u, 0x4140), low),
                      pair(ptx::permute_bytes(second, 0x64646464u, 0x4342), low));
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
