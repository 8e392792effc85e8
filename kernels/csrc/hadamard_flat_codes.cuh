// The way from sums to codes of hadamard_flat.cu: what a thread holds of a block of 32 columns is whole words of P32, Q32
// and S64, so nothing is exchanged but two words between neighbours, for 32 bytes that are written at once.
#pragma once
#include "hadamard.cuh"

namespace flat {

// a * b + c between 0 and 1; a NaN gives 0.
DEVICE float fma_saturated(float a, float b, float c) {
  float out;
  asm("fma.rn.sat.f32 %0, %1, %2, %3;" : "=f"(out) : "f"(a), "f"(b), "f"(c));
  return out;
}

// Sums to codes, in the low byte. CLIPPED: saturated, within 2^-17 of the quotient before it is rounded; else no
// quotient may be too large, and none a NaN.
template <bool CLIPPED> struct Codes {
  float inverse, shift, levels, magic;

  DEVICE Codes(const hadamard::RowScale &scale, int bits) {
    const bool none = scale.inverse == 0.0f;  // 0 times what was saturated: no NaN is left
    inverse = scale.inverse * (!CLIPPED ? 1.0f : bits == 4 ? 1.0f / 15.0f : 1.0f / 255.0f);
    shift = bits == 4 ? 8.0f / 15.0f : 128.0f / 255.0f;
    levels = none ? 0.0f : bits == 4 ? 15.0f : 255.0f;
    magic = hadamard::MAGIC - (!CLIPPED || none ? 0.0f : bits == 4 ? 8.0f : 128.0f);
  }
  DEVICE u32 operator()(float v) const {
    return __float_as_uint(CLIPPED ? fmaf(fma_saturated(v, inverse, shift), levels, magic) : fmaf(v, inverse, magic));
  }
  DEVICE u32 pair(float a, float b) const { return ptx::permute_bytes((*this)(a), (*this)(b), 0x0040); }
  DEVICE u32 word(float a, float b, float c, float d) const {
    return ptx::permute_bytes(pair(a, b), pair(c, d), 0x5410);
  }
};

// Writes what a warp holds of a part of a row; T is the kernel's Config.
template <class T> struct Writer {
  const float (&d)[T::NT][4];
  const hadamard::RowScale &scale;
  const Quantizer &q;
  u32 m, part;
  u8 *row;
  bool exists;

  // Words that belong at 4 t and at 16 + 4 t of the 32 bytes at `to`.
  DEVICE static void store(u8 *to, u32 first, u32 second, u32 t, bool real) {
    const bool odd = t & 1;
    const u32 got = __shfl_xor_sync(0xFFFFFFFFu, odd ? first : second, 1);
    const uint2 both = make_uint2(odd ? got : first, odd ? second : got);
    if (real) *reinterpret_cast<uint2 *>(to + 16 * (t & 1) + 4 * (t & 2)) = both;
  }

  // A block of 32 columns of line h: what lane t holds of it, column 8 o + 2 t + e.
  DEVICE float at(u32 block, u32 h, u32 o, u32 e) const { return d[4 * block + o][2 * h + e]; }
  template <class Code> DEVICE u32 p32(const Code &code, u32 block, u32 h, u32 b3) const {
    return code.word(at(block, h, b3, 0), at(block, h, b3, 1), at(block, h, b3 + 2, 0), at(block, h, b3 + 2, 1));
  }
  template <class Code> DEVICE u32 q32(const Code &code, u32 block, u32 h, u32 b4) const {
    const u32 o = 2 * b4;
    return code.word(at(block, h, o, 0), at(block, h, o + 1, 0), at(block, h, o, 1), at(block, h, o + 1, 1));
  }
  template <class Code> DEVICE u32 s64(const Code &code, u32 block, u32 h) const {
    return p32(code, block, h, 0) & 0x0F0F0F0Fu | p32(code, block, h, 1) << 4 & 0xF0F0F0F0u;
  }

  // The orders of one code a byte, mostly of 8 bits and then rarely clipped, are made both ways.
  template <int MODE> DEVICE void write() const {
    if ((MODE == P32 || MODE == Q32) && q.clip == 1.0f && scale.inverse != 0.0f)
      write_lines<MODE>(Codes<false>(scale, q.bits));
    else
      write_lines<MODE>(Codes<true>(scale, q.bits));
  }

  template <int MODE, class Code> DEVICE void write_lines(const Code &code) const {
    const u32 thread = ptx::opaque(threadIdx.x), line = 16 * T::tile() + thread % 32 / 4, t = thread % 4;
    constexpr u32 BLOCKS = T::NT / 4, BYTES = hadamard::block_bytes(MODE);
    u8 *const first = row + line * (T::C / 32 * BYTES) + part * (BLOCKS * BYTES);
#pragma unroll
    for (u32 h = 0; h < 2; h++)
#pragma unroll
      for (u32 block = 0; block < BLOCKS; block++)
        write_block<MODE>(code, first + 8 * h * (T::C / 32 * BYTES) + BYTES * block, block, h, t, line + 8 * h < m && exists);
  }

  template <int MODE, class Code>
  DEVICE void write_block(const Code &code, u8 *to, u32 block, u32 h, u32 t, bool real) const {
    if constexpr (MODE == P32) {
      store(to, p32(code, block, h, 0), p32(code, block, h, 1), t, real);
    } else if constexpr (MODE == Q32) {
      store(to, q32(code, block, h, 0), q32(code, block, h, 1), t, real);
    } else if constexpr (MODE == S64) {  // two blocks are 32 bytes
      if (block % 2 == 1) return;
      if (block + 1 < T::NT / 4)
        store(to, s64(code, block, h), s64(code, block + 1, h), t, real);
      else if (const u32 word = s64(code, block, h); real)
        *reinterpret_cast<u32 *>(to + 4 * t) = word;
    } else if constexpr (MODE == NATURAL) {
#pragma unroll
      for (u32 o = 0; o < 4; o++) {
        const u32 pair = code.pair(at(block, h, o, 0), at(block, h, o, 1));
        if (real) *reinterpret_cast<u16 *>(to + 8 * o + 2 * t) = static_cast<u16>(pair);
      }
    } else {
#pragma unroll
      for (u32 o = 0; o < 4; o++) {
        const u32 pair = Number<T::ACT>::pack(at(block, h, o, 0) * scale.factor, at(block, h, o, 1) * scale.factor);
        if (real) *reinterpret_cast<u32 *>(to + 16 * o + 4 * t) = pair;
      }
    }
  }
};

}  // namespace flat
