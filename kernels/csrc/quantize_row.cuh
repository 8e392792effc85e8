// A row as a quantizer reads it: x, x * gain, or round16(act(gate) * up), eight values at a time.
#pragma once
#include "hadamard.cuh"

enum GainType { GAIN_NONE = 0, GAIN_FLOAT = 1, GAIN_FP16 = 2, GAIN_BF16 = 3 };

// Eight factors of the norm, as floats.
DEVICE void load_gain(float (&v)[8], const void *gain, int type, int column) {
  if (type == GAIN_FLOAT) {
    const float4 *from = reinterpret_cast<const float4 *>(gain) + column / 4;
    const float4 a = from[0], b = from[1];
    v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
  } else {
    const uint4 octet = reinterpret_cast<const uint4 *>(gain)[column / 8];
    if (type == GAIN_FP16)
      hadamard::widen<FP16>(v, octet);
    else
      hadamard::widen<BF16>(v, octet);
  }
}

struct Row {
  const u16 *x;
  const void *gain;
  int k, activation, gain_type;

  DEVICE int column(int pair, int h) const {  // of octet h of a thread's pair
    const int unit = threadIdx.x + pair * blockDim.x;
    return unit / 2 * 32 + unit % 2 * 8 + 16 * h;
  }

  // Octet of x or of gate (source 0), or of up (1); zeros past the row.
  DEVICE uint4 load(int column, int source) const {
    if (column >= k) return make_uint4(0, 0, 0, 0);
    return *reinterpret_cast<const uint4 *>(x + source * k + column);
  }

  template <int ACT> DEVICE uint4 activated(uint4 gate, uint4 up) const {
    return activation == ACT_SILU ? hadamard::activate_octet<ACT, ACT_SILU>(gate, up)
                                  : hadamard::activate_octet<ACT, ACT_GELU_TANH>(gate, up);
  }

  DEVICE void gained(float (&v)[8], int column) const {
    if (gain_type == GAIN_NONE || column >= k) return;
    float g[8];
    load_gain(g, gain, gain_type, column);
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] *= g[i];
  }
};
