// A lane's share of a stage: its words, the zeros and scales of its columns, ready for the product.
#pragma once
#include "tile.cuh"

template <class T> struct Lane {
  int lane, chunk, word0;  // chunk within the block's tile, first word within the chunk

  DEVICE Lane(int warp, int lane_)
      : lane(lane_), chunk(warp * T::WORDS / 4), word0(warp * T::WORDS % 4 ^ (T::SPREAD ? lane_ / 8 % 2 * 2 : 0)) {}

  // The words of k-tile `row`; one word a column tile (4 bit) or two (8 bit).
  DEVICE void words(u32 (&w)[T::WORDS * T::VECTORS], u32 stage, int row) const {
    const u32 at = stage + T::W_AT + (row * T::CHUNKS + chunk) * T::CHUNK_BYTES +
                   (lane * 4 + word0) * 4 * T::VECTORS;
    if constexpr (T::WORDS * T::VECTORS == 1) {
      w[0] = ptx::load_shared_4(at);
    } else if constexpr (T::WORDS * T::VECTORS == 2) {
      const uint2 v = ptx::load_shared_8(at);
      w[0] = v.x, w[1] = v.y;
    } else {
#pragma unroll
      for (int i = 0; i < T::WORDS * T::VECTORS / 4; i++) {
        const uint4 v = ptx::load_shared_16(at + i * 16);
        w[4 * i] = v.x, w[4 * i + 1] = v.y, w[4 * i + 2] = v.z, w[4 * i + 3] = v.w;
      }
    }
  }

  // The scales of the lane's columns, two to a register: word j's columns g8 (low half) and g8 + 8 (high half).
  DEVICE void scales(u32 (&s)[T::WORDS], u32 stage, int row) const {
    const u32 at = stage + T::SCALES_AT + row * T::SCALE_ROW_BYTES + chunk * 128 + (lane / 4) * 16 + word0 * 4;
    if constexpr (T::WORDS == 4) {
      const uint4 v = ptx::load_shared_16(at);
      s[0] = v.x, s[1] = v.y, s[2] = v.z, s[3] = v.w;
    } else if constexpr (T::WORDS == 2) {
      const uint2 v = ptx::load_shared_8(at);
      s[0] = v.x, s[1] = v.y;
    } else {
      s[0] = ptx::load_shared_4(at);
    }
  }

  // What to subtract. The packed zeros are interleaved so that shifting by j codes leaves the zero of column g8 in
  // the low half and that of g8 + 8 in the high half (kernels/layout.py, zero_position).
  DEVICE void zeros(Zero<T::ACT, T::BITS> (&z)[T::WORDS][2], u32 stage, int row) const {
    if constexpr (!T::ZEROS) {
#pragma unroll
      for (int j = 0; j < T::WORDS; j++) z[j][0].set(1 << (T::BITS - 1)), z[j][1].set(1 << (T::BITS - 1));
    } else {
      const u32 at = stage + T::ZEROS_AT + row * T::ZERO_ROW_BYTES + chunk * 8 * T::BITS + (lane / 4) * T::BITS;
      constexpr u32 MASK = T::BITS == 4 ? 0x000F000F : 0x00FF00FF;
#pragma unroll
      for (int j = 0; j < T::WORDS; j++) {
        const int word = word0 + j;
        const u32 packed = ptx::load_shared_4(T::BITS == 4 ? at : at + word / 2 * 4);
        const u32 pair = (packed >> (T::BITS == 4 ? 4 * word : 8 * (word % 2))) & MASK;
        z[j][0].set(pair & 0xFFFF), z[j][1].set(pair >> 16);
      }
    }
  }
};

// The scales as fp32: of column g8 and of column g8 + 8 of each word.
template <class T> DEVICE void scales_as_float(float (&f)[T::WORDS][2], const u32 (&s)[T::WORDS], bool bf16) {
  if (bf16) {
#pragma unroll
    for (int j = 0; j < T::WORDS; j++)
      f[j][0] = Number<BF16>::to_float(s[j] & 0xFFFF), f[j][1] = Number<BF16>::to_float(s[j] >> 16);
  } else {
#pragma unroll
    for (int j = 0; j < T::WORDS; j++)
      f[j][0] = Number<FP16>::to_float(s[j] & 0xFFFF), f[j][1] = Number<FP16>::to_float(s[j] >> 16);
  }
}

// The scales as pairs of the activations' type, both halves alike. Where the types differ the scale is rounded.
template <class T> DEVICE void scales_as_pairs(u32 (&d)[T::WORDS][2], const u32 (&s)[T::WORDS], bool bf16) {
  if (bf16 == (T::ACT == BF16)) {
#pragma unroll
    for (int j = 0; j < T::WORDS; j++)
      d[j][0] = ptx::permute_bytes(s[j], 0, 0x1010), d[j][1] = ptx::permute_bytes(s[j], 0, 0x3232);
  } else {
    float f[T::WORDS][2];
    scales_as_float<T>(f, s, bf16);
#pragma unroll
    for (int j = 0; j < T::WORDS; j++)
      d[j][0] = Number<T::ACT>::pack(f[j][0], f[j][0]), d[j][1] = Number<T::ACT>::pack(f[j][1], f[j][1]);
  }
}

// Sums of products of such operands, as those of q - z.
template <class T> DEVICE void in_units(float (&sums)[T::WORDS][T::TOKEN_TILES][4]) {
  constexpr float UNIT = OPERAND_UNIT<T::ACT, T::BITS>;
  if constexpr (UNIT != 1.0f) each_sum<T>([&](int j, int tile, int i) { sums[j][tile][i] *= UNIT; });
}

// The A operand of one word, scaled where weights are and not sums.
template <class T, bool SCALED = !T::SCALE_SUMS>
DEVICE void operand(u32 (&a)[4], const u32 *w, const Zero<T::ACT, T::BITS> (&z)[2], const u32 (&scale)[2]) {
  Dequant<T::ACT, T::BITS>::run(a, w, z[0], z[1]);
  if constexpr (SCALED) {
    a[0] = Number<T::ACT>::multiply(a[0], scale[0]);
    a[1] = Number<T::ACT>::multiply(a[1], scale[1]);
    a[2] = Number<T::ACT>::multiply(a[2], scale[0]);
    a[3] = Number<T::ACT>::multiply(a[3], scale[1]);
  }
}
