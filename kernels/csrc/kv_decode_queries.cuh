// Decode attention: the queries of a block, turned, scaled into fp16's range, in shared memory.
#pragma once
#include "kv_decode_tile.cuh"

// R3, then q's power of two; leaves fp16-rounded rows in `rows` and returns the exponent; heads past the last are zeros.
DEVICE int prepare_queries(float *rows, float *sums, float *maxima, const u8 *q, i64 stride, int heads, bool bf16,
                           const Turn &turn, int warp, int lane) {
  constexpr int EACH = HEADS / WARPS;
  Vector<HEAD_DIM> v[EACH];
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    const int head = i * WARPS + warp;
    v[i].load_row(q + 2 * head * stride, head < heads, bf16, lane);
  }
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    v[i].turn(turn, rows + HEADS * PITCH + warp * HEAD_DIM, lane);
    const float largest = warp_max<32>(v[i].magnitude());
    if (lane == 0) maxima[i * WARPS + warp] = largest;
  }
  __syncthreads();
  float largest = 0;
#pragma unroll
  for (int head = 0; head < HEADS; head++) largest = fmaxf(largest, maxima[head]);
  const int exponent = fp16_exponent(largest);
  const float power = power_of_two(exponent);
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    float sum = 0;
#pragma unroll
    for (int j = 0; j < v[i].EACH; j++) {
      v[i].x[j] = Number<FP16>::to_float(Number<FP16>::pack(v[i].x[j] * power, 0.0f));
      sum += v[i].x[j];
    }
    v[i].store(rows + (i * WARPS + warp) * PITCH, lane);
    sum = warp_sum(sum);
    if (lane == 0) sums[i * WARPS + warp] = sum;
  }
  __syncthreads();
  return exponent;
}
