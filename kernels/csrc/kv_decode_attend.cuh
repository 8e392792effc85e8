// Decode attention: a warp's tile from scores to values, by way of the running softmax.
#pragma once
#include "kv_decode_scores.cuh"
#include "kv_decode_values.cuh"

struct View {
  int begin, end;         // visible slots
  float unit;             // of scores: scale, log2(e), the power of two of q and 2^24
  Cap cap;
  float sums[2];          // of q, in S's units, heads 2t and 2t + 1

  DEVICE bool sees(int slot) const { return slot >= begin && slot < end; }
};

// One tile: scores, softmax, values. PLAIN: all slots are seen and there is no soft cap.
template <bool PLAIN> DEVICE void attend(Sums &sums, u32 stage, int tile, const View &view, const Queries &q, int lane) {
  const int g = lane / 4, t = lane % 4;
  const u32 key_params = stage + 2 * CODE_BYTES, value_params = key_params + 4 * TILE;
  if (!PLAIN) {  // what was never written may be NaN, and 0 times that is no 0
    if (lane < TILE && !view.sees(tile * TILE + lane)) ptx::store_shared_word(value_params + 4 * lane, 0);
    __syncwarp();
  }
  float x[TOKEN_TILES][4], mantissa[TOKEN_TILES][2], share[TOKEN_TILES][2];
  score(x, stage, q, g, t);
  float largest[2] = {sums.largest[0], sums.largest[1]};
#pragma unroll
  for (int i = 0; i < TOKEN_TILES; i++) {
#pragma unroll
    for (int second = 0; second < 2; second++) {
      const int row = 16 * i + g + 8 * second;
      const u32 key = ptx::load_shared_4(key_params + 4 * row), value = ptx::load_shared_4(value_params + 4 * row);
      const float s = Number<FP16>::to_float(key & 0xFFFF) * view.unit, z = Number<FP16>::to_float(key >> 16);
      const int exponent = static_cast<int>(value >> 10 & 31) - 15;
      mantissa[i][second] = Number<FP16>::to_float((value & 0x3FF) | 0x3C00);
      share[i][second] = power_of_two(-exponent);
#pragma unroll
      for (int head = 0; head < 2; head++) {
        float &v = x[i][2 * second + head];
        v = fmaf(-z, view.sums[head], v);
        if constexpr (PLAIN) {
          v = fmaf(v, s, static_cast<float>(exponent));
        } else {
          v *= s;
          if (view.cap.outer > 0) v = view.cap.outer * tanh_fast(v * view.cap.inner);
          v = view.sees(tile * TILE + row) ? v + exponent : -infinity();
        }
        largest[head] = fmaxf(largest[head], v);
      }
    }
  }
#pragma unroll
  for (int step = 4; step < 32; step *= 2) {
#pragma unroll
    for (int head = 0; head < 2; head++) largest[head] = fmaxf(largest[head], __shfl_xor_sync(WHOLE, largest[head], step));
  }
  if (__any_sync(WHOLE, largest[0] > sums.largest[0] || largest[1] > sums.largest[1]))
    sums.rescale(ptx::exp2(sums.largest[0] - largest[0]), ptx::exp2(sums.largest[1] - largest[1]));
  sums.largest[0] = largest[0], sums.largest[1] = largest[1];
  u32 p[TOKEN_TILES][2];
#pragma unroll
  for (int i = 0; i < TOKEN_TILES; i++) {
#pragma unroll
    for (int second = 0; second < 2; second++) {
      const float a = ptx::exp2(x[i][2 * second] - largest[0]), b = ptx::exp2(x[i][2 * second + 1] - largest[1]);
      sums.total[0] = fmaf(a, share[i][second], sums.total[0]);
      sums.total[1] = fmaf(b, share[i][second], sums.total[1]);
      p[i][second] = ptx::transpose_matrix(Number<FP16>::pack(a * mantissa[i][second], b * mantissa[i][second]));
    }
  }
#pragma unroll
  for (int i = 0; i < TOKEN_TILES; i++) sums.add(stage + CODE_BYTES, value_params, 16 * i, p[i], g, t);
}
