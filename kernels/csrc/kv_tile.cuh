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

// A warp's 16 query rows, `stride` values apart, after R3, in the cache's order of columns, each times a power of two:
// value by value to `put(row, position, fp16)`, and that power's inverse to `power(row, value)`. Rows from `count` on
// become zeros. They come to shared memory first, 16 bytes to `raw(row, byte)`, all at once; a row is then made in place.
template <class Raw, class Put, class Power>
DEVICE void load_queries(const u8 *from, i64 stride, int count, bool bf16, const Turn &turn, float *scratch, int lane,
                         Raw raw, Put put, Power power) {
  typedef Vector<HEAD_DIM> Row;
  constexpr int CHUNKS = HEAD_DIM / 8;
  for (int i = lane; i < 16 * CHUNKS; i += 32) {
    const int row = i / CHUNKS, byte = i % CHUNKS * 16;
    ptx::copy_async_16_or_zero(ptx::shared_address(raw(row, byte)), from + 2 * row * stride + byte, row < count ? 16 : 0);
  }
  ptx::copy_async_commit();
  ptx::copy_async_wait<0>();
  __syncwarp();
#pragma unroll 1
  for (int row = 0; row < 16; row++) {
    Row v;
    v.load(raw(row, min(lane, Row::ACTIVE - 1) * Row::EACH * 2), lane < Row::ACTIVE, bf16);
    __syncwarp();
    v.turn(turn, scratch, lane);
    const int exponent = fp16_exponent(warp_max<32>(v.magnitude()));
    if (lane < Row::ACTIVE) {
#pragma unroll
      for (int i = 0; i < Row::EACH; i++) {
        const int channel = lane * Row::EACH + i;
        put(row, channel / 8 * 8 + position_of(channel % 8), to_half(v.x[i] * power_of_two(exponent), false));
      }
    }
    if (lane == 0) power(row, power_of_two(-exponent));
  }
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

// Scores of 16 rows and 8 TILES slots from `begin` on to weights, in place; older sums must be multiplied by `factor`.
// `total` is a lane's own part of the sums. `low`: slot of the warp's first row.
template <int TILES>
DEVICE void soften(float (&x)[TILES][4], const float (&unit)[2], const Cap &cap, const Sight &sight, int begin, int t,
                   int low, float (&largest)[2], float (&total)[2], float (&factor)[2]) {
  const bool whole = sight.all(begin, 8 * TILES, low);
  float top[2] = {largest[0], largest[1]};
  if (cap.outer > 0 || !whole) {
#pragma unroll
    for (int i = 0; i < TILES; i++) {
#pragma unroll
      for (int c = 0; c < 4; c++) x[i][c] *= unit[c / 2];
    }
    if (cap.outer > 0) {
#pragma unroll
      for (int i = 0; i < TILES; i++) {
#pragma unroll
        for (int c = 0; c < 4; c++) x[i][c] = cap.outer * tanh_fast(x[i][c] * cap.inner);
      }
    }
    if (!whole) {
#pragma unroll
      for (int i = 0; i < TILES; i++) {
#pragma unroll
        for (int c = 0; c < 4; c++)
          if (!sight.sees(begin + 8 * i + 2 * t + c % 2, c / 2)) x[i][c] = -infinity();
      }
    }
#pragma unroll
    for (int i = 0; i < TILES; i++) {
#pragma unroll
      for (int c = 0; c < 4; c++) top[c / 2] = fmaxf(top[c / 2], x[i][c]);
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
  factor[0] = ptx::exp2(largest[0] - top[0]), factor[1] = ptx::exp2(largest[1] - top[1]);
  largest[0] = top[0], largest[1] = top[1];
  total[0] *= factor[0], total[1] *= factor[1];
#pragma unroll
  for (int i = 0; i < TILES; i++) total[0] += x[i][0] + x[i][1], total[1] += x[i][2] + x[i][3];
}

// A warp's 16 rows to the output, from row `rows0` of `here` on; `row` is the block's first row of the output, in heads,
// `stride` heads apart. A lane holds columns 2t and 2t + 1, at 4 bit channels t and t + 4: two lanes' halves make a pair.
template <int TILES>
DEVICE void store_rows(u8 *out, const float (&y)[TILES][4], const float (&total)[2], i64 row, int stride, int rows0,
                       int here, bool bf16, int lane) {
  const int g = lane / 4, t = lane % 4, first = lane - t + 2 * t % 4;
#pragma unroll
  for (int second = 0; second < 2; second++) {
    const int at = rows0 + g + 8 * second;
    const float sum = quad_sum(total[second]), inverse = sum > 0 ? 1.0f / sum : 0.0f;
    u32 *to = reinterpret_cast<u32 *>(out + 2 * ((row + static_cast<i64>(at) * stride) * HEAD_DIM));
#pragma unroll
    for (int i = 0; i < TILES; i++) {
      const float a = y[i][2 * second] * inverse, b = y[i][2 * second + 1] * inverse;
      u32 pair = bf16 ? Number<BF16>::pack(a, b) : Number<FP16>::pack(a, b);
      if (BITS == 4) {
        const u32 low = __shfl_sync(WHOLE, pair, first), high = __shfl_sync(WHOLE, pair, first + 1);
        pair = ptx::permute_bytes(low, high, t < 2 ? 0x5410 : 0x7632);
      }
      if (at < here) to[4 * i + t] = pair;
    }
  }
}
