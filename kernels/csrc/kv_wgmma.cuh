// The warpgroup's products of attention (sm_90a), fp16 in, fp32 sums, 64 rows: S = Q K^T with both operands in shared
// memory, and Y += P V with P in registers and V, whose rows are tokens, read across its rows.
//
// Every tile lies in blocks of 64 columns: rows of 128 bytes, the 16-byte chunk c of row r at place c ^ (r % 8), eight
// rows 1024 bytes apart from the next eight. Sums lie as those of mma.sync do: tile i, row g or g + 8, columns 2t, 2t + 1.
#pragma once
#include "wgmma.cuh"

namespace wgmma {

// The descriptor of an operand whose columns are the products' other axis (V): blocks of 64 columns `block` bytes apart.
DEVICE u64 descriptor_across(u32 address, u32 block) {
  return (descriptor(address) & ~(u64(0x3FFF) << 16)) | (u64(block >> 4) << 16);
}

// Ties registers to this place: what computes with them does not move over it.
template <int TILES> DEVICE void hold(float (&d)[TILES][4]) {
#pragma unroll
  for (int i = 0; i < TILES; i++)
    asm volatile("" : "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])::"memory");
}

template <int TILES> struct Attention;

#define ATTENTION_PRODUCTS(TILES, N, HALF, A, B, C, D, E)                                                              \
  template <> struct Attention<TILES> {                                                                                \
    /* d = a b^T, or d += where `more` is set. */                                                                      \
    DEVICE static void scores(float (&d)[TILES][4], u64 a, u64 b, u32 more) {                                          \
      asm volatile("{ .reg .pred p; setp.ne.u32 p, " C ", 0; "                                                         \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.f16.f16 {" LIST_##HALF "}, " A ", " B               \
                   ", p, 1, 1, 0, 0; }"                                                                                \
                   : SUMS_##HALF                                                                                       \
                   : "l"(a), "l"(b), "r"(more));                                                                       \
    }                                                                                                                  \
    /* d += a b, the rows of b are its sums' terms. */                                                                 \
    DEVICE static void values(float (&d)[TILES][4], const u32 (&a)[4], u64 b) {                                        \
      asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.f16.f16 {" LIST_##HALF "}, {" A ", " B ", " C ", "  \
                   D "}, " E ", 1, 1, 1, 1;"                                                                           \
                   : SUMS_##HALF                                                                                       \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                              \
    }                                                                                                                  \
  };
ATTENTION_PRODUCTS(8, 64, 4, "%32", "%33", "%34", "%35", "%36")
ATTENTION_PRODUCTS(16, 128, 8, "%64", "%65", "%66", "%67", "%68")

}  // namespace wgmma
