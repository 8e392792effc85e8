// The way from sums to codes of hadamard_flat.cu: what a thread holds of a block of 32 columns is whole words of P32, Q32
// and S64. A warp brings eight lines of them to shared memory, and from there to global memory, 16 bytes a lane.
#pragma once
#include "hadamard.cuh"

namespace flat {

// a * b + c between 0 and 1; a NaN gives 0.
DEVICE float fma_saturated(float a, float b, float c) {
  float out;
  asm("fma.rn.sat.f32 %0, %1, %2, %3;" : "=f"(out) : "f"(a), "f"(b), "f"(c));
  return out;
}

// Sums to codes, in the low byte. CLIPPED: saturated, within 2^-15 of the quotient before it is rounded; else no
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

// The distance is part of the instruction.
template <u32 AT> DEVICE void store_16(u8 *to, uint4 v, bool real) {
  if (real)
    asm volatile("st.global.v4.u32 [%0 + %1], {%2, %3, %4, %5};" ::"l"(to), "n"(AT), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
}

// Eight lines of PIECES pieces of 16 bytes in shared memory, a warp's. A power of two of pieces is turned from line to
// line, so that neither rows of a matrix nor a line's pieces meet in a bank; other numbers meet at most in pairs.
template <u32 PIECES> struct Lines {
  static constexpr bool TURNED = (PIECES & (PIECES - 1)) == 0;
  static constexpr u32 STEP = 32 / PIECES;  // lines from one of a lane's pieces to its next
  u32 words, pieces, line, piece;

  DEVICE static u32 turn(u32 line) { return !TURNED ? 0 : PIECES >= 8 ? line % 8 : line * PIECES / 8 % PIECES; }
  DEVICE Lines(u32 at, u32 lane) {
    line = lane / PIECES, piece = lane % PIECES;
    words = at + 16 * (PIECES * (lane % 8) + (TURNED ? lane / 8 % PIECES ^ turn(lane % 8) : 0));
    pieces = at + 16 * (PIECES * line + (piece ^ turn(line)));
  }
  // Words of a line, FIRST and on: each lane's, four of them make a piece.
  template <u32 FIRST = 0> DEVICE void put(const u32 (&v)[PIECES], u32 lane) const {
    if constexpr (FIRST < PIECES) {
      constexpr u32 COUNT = PIECES - FIRST >= 4 ? 4 : PIECES - FIRST >= 2 ? 2 : 1;
      ptx::store_matrices<COUNT>(TURNED ? words ^ 16 * FIRST : words + 16 * (FIRST + lane / 8 % COUNT), v + FIRST);
      put<FIRST + COUNT>(v, lane);
    }
  }
  // Brings this lane's pieces to global memory, its first one AT bytes past `to`, PITCH from line to line. `before`: lines
  // from the first that has no place there to this lane's, negative.
  template <u32 PITCH, u32 AT, u32 I = 0> DEVICE void bring(u8 *to, int before) const {
    if constexpr (4 * I < PIECES) {
      if constexpr (TURNED) {
        const bool real = before < -static_cast<int>(I * STEP) && line < 8;
        store_16<AT + I * STEP * PITCH>(to, ptx::load_shared_16<512 * I>(pieces ^ 16 * turn(I * STEP)), real);
      } else {
        const u32 lane = PIECES * line + piece, at = 32 * I + lane, row = at / PIECES;
        const bool real = before + static_cast<int>(row - line) < 0;
        if (32 * I + 32 <= 8 * PIECES || at < 8 * PIECES)
          store_16<AT>(to + (row - line) * PITCH + 16 * (at % PIECES) - 16 * piece, ptx::load_shared_16<512 * I>(pieces), real);
      }
      bring<PITCH, AT, I + 1>(to, before);
    }
  }
};

// Writes what a warp holds of a row, its share of the columns; T is the kernel's Config.
template <class T> struct Writer {
  const float (&d)[T::NT][4];
  const hadamard::RowScale &scale;
  const Quantizer &q;
  u32 share;
  u8 *row;
  bool exists;
  u32 lines_at;  // shared address: eight lines of this warp's

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
    constexpr u32 BLOCKS = T::NT / 4, BYTES = hadamard::block_bytes(MODE), PITCH = T::C / 32 * BYTES;
    const u32 lane = ptx::opaque(threadIdx.x) % 32, first = 16 * T::tile();
    u8 *const to = row + first * PITCH + share * (BLOCKS * BYTES);
    const u32 left = exists ? T::M - first : 0;  // lines
    if constexpr (MODE == NATURAL || MODE == hadamard::WIDE) {
      const u32 line = lane / 4, t = lane % 4;
#pragma unroll
      for (u32 h = 0; h < 2; h++)
#pragma unroll
        for (u32 block = 0; block < BLOCKS; block++)
          write_block<MODE>(code, to + (line + 8 * h) * PITCH + BYTES * block, block, h, t, line + 8 * h < left);
    } else {
      constexpr u32 PIECES = BLOCKS * BYTES / 16;
      const Lines<PIECES> lines(lines_at, lane);
      u8 *const mine = to + lines.line * PITCH + 16 * lines.piece;
      const int before = static_cast<int>(lines.line) - static_cast<int>(left);
#pragma unroll
      for (u32 h = 0; h < 2; h++) {
        u32 words[PIECES];
#pragma unroll
        for (u32 block = 0; block < BLOCKS; block++) of_block<MODE>(&words[block * (BYTES / 16)], code, block, h);
        __syncwarp();  // the lines before have been read
        lines.put(words, lane);
        __syncwarp();
        if (h == 0)
          lines.template bring<PITCH, 0>(mine, before);
        else
          lines.template bring<PITCH, 8 * PITCH>(mine, before + 8);
      }
    }
  }
  template <int MODE, class Code> DEVICE void of_block(u32 *words, const Code &code, u32 block, u32 h) const {
    if constexpr (MODE == P32)
      words[0] = p32(code, block, h, 0), words[1] = p32(code, block, h, 1);
    else if constexpr (MODE == Q32)
      words[0] = q32(code, block, h, 0), words[1] = q32(code, block, h, 1);
    else
      words[0] = s64(code, block, h);
  }

  template <int MODE, class Code>
  DEVICE void write_block(const Code &code, u8 *to, u32 block, u32 h, u32 t, bool real) const {
    if constexpr (MODE == NATURAL) {
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
