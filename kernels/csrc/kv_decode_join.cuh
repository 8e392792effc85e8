// Decode attention: what warps and blocks leave of their sums, and how that is weighed, added and written.
//
// The loops over them are in the kernel: in functions of their own the compiler orders them otherwise.
#pragma once
#include "kv_decode_values.cuh"

// What a warp leaves, and what a block leaves for the one that joins the parts of a context.
struct Result {
  float y[HEADS][PITCH], largest[HEADS], total[HEADS];
};
constexpr int RESULT = sizeof(Result) / 4;  // floats
constexpr int QUADS = HEAD_DIM / 4;         // of values of a head

// A warp's sums to shared memory: y with its scale, relative to the warp's largest score.
DEVICE void leave(Result &to, Sums &sums, int g, int t) {
#pragma unroll
  for (int head = 0; head < 2; head++) {
#pragma unroll
    for (int step = 4; step < 32; step *= 2) sums.total[head] += __shfl_xor_sync(WHOLE, sums.total[head], step);
    const float z = __shfl_sync(WHOLE, sums.z[head], t);
    constexpr float UNIT = 16777216.0f, SECOND = BITS == 4 ? UNIT / 16 : UNIT;
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
      to.y[2 * t + head][16 * i + g] = fmaf(sums.y[i][head], UNIT, -z);
      to.y[2 * t + head][16 * i + 8 + g] = fmaf(sums.y[i][2 + head], SECOND, -z);
    }
    if (g == 0) to.largest[2 * t + head] = sums.largest[head], to.total[2 * t + head] = sums.total[head];
  }
}

// From `count` largest scores and sums of one head, HEADS apart, one warp makes weights in place of the first; returns
// the common largest score and the joined sum.
DEVICE float2 weigh(float *largest, const float *total, int count, int lane) {
  float most = NOTHING, sum = 0;
  for (int i = lane; i < count; i += 32) most = fmaxf(most, largest[i * HEADS]);
  most = warp_max<32>(most);
  for (int i = lane; i < count; i += 32) {
    const float weight = ptx::exp2(largest[i * HEADS] - most);
    sum = fmaf(total[i * HEADS], weight, sum);
    largest[i * HEADS] = weight;
  }
  return make_float2(most, warp_sum(sum));
}

DEVICE void add(float4 &to, float4 v, float weight) {
  to.x = fmaf(v.x, weight, to.x), to.y = fmaf(v.y, weight, to.y);
  to.z = fmaf(v.z, weight, to.z), to.w = fmaf(v.w, weight, to.w);
}

// Four values of the output, from position `at` of a head on.
DEVICE void store_output(u16 *head, int at, float4 y, float total, bool bf16) {
  const float inverse = total > 0 ? 1.0f / total : 0.0f;
  head[channel_of(at)] = to_half(y.x * inverse, bf16), head[channel_of(at + 1)] = to_half(y.y * inverse, bf16);
  head[channel_of(at + 2)] = to_half(y.z * inverse, bf16), head[channel_of(at + 3)] = to_half(y.w * inverse, bf16);
}
