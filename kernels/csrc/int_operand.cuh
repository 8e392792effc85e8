// A lane's words as the A operand of an integer product: bytes or nibbles of one column in each register.
//
// A word holds the codes of two columns, g8 in its even nibbles' bytes and g8 + 8 in the odd ones. One byte permute of
// two words of neighbouring k-tiles parts the columns; which rows of K lie where afterwards is the order P32 or S64 in
// which the quantizer writes activations. 4-bit codes for s8 go to the high half of a byte: 16 (q - 8), so that
// flipping the top bit subtracts 8. As s4, q ^ 8 is q - 8; an 8-bit code needs nothing but its top bit flipped.
#pragma once
#include "int_tile.cuh"

namespace int_operand {

constexpr u32 EVEN_BYTES = 0x6420, ODD_BYTES = 0x7531;

DEVICE u32 low_codes(u32 x) { return ((x << 4) & 0xF0F0F0F0u) ^ 0x80808080u; }
DEVICE u32 high_codes(u32 x) { return (x & 0xF0F0F0F0u) ^ 0x80808080u; }

// `w` are the words of a step's k-tiles, j the word's number in the warp's columns.
template <class T>
DEVICE void of_step(u32 (&a)[4], const u32 (&w)[T::STEP_TILES][T::WORDS * T::VECTORS], int j) {
  if constexpr (T::KIND == S8_W4) {
    const u32 u = ptx::permute_bytes(w[0][j], w[1][j], EVEN_BYTES), v = ptx::permute_bytes(w[0][j], w[1][j], ODD_BYTES);
    a[0] = low_codes(u), a[1] = low_codes(v), a[2] = high_codes(u), a[3] = high_codes(v);
  } else if constexpr (T::KIND == S8_W8) {
#pragma unroll
    for (int i = 0; i < 4; i++) a[i] = w[i / 2][2 * j + i % 2] ^ 0x80808080u;
  } else {
#pragma unroll
    for (int i = 0; i < 4; i++)
      a[i] = ptx::permute_bytes(w[i / 2 * 2][j], w[i / 2 * 2 + 1][j], i % 2 ? ODD_BYTES : EVEN_BYTES) ^ 0x88888888u;
  }
}

}  // namespace int_operand
