// The warpgroup's products of attention (sm_90a), fp16 in (bf16 for the queries' transform), fp32 sums, 64 rows: S = Q K^T
// with K in shared memory and Q there or in registers, and Y += P V with P in registers and V, whose rows are tokens, read
// across its rows.
//
// How tiles lie, and their descriptors: kv_image.cuh. Sums lie as those of mma.sync do: tile i, row g or g + 8, columns 2t,
// 2t + 1.
#pragma once
#include "wgmma.cuh"

namespace wgmma {

// Ties registers to this place: what computes with them does not move over it.
template <int TILES> DEVICE void hold(float (&d)[TILES][4]) {
#pragma unroll
  for (int i = 0; i < TILES; i++)
    asm volatile("" : "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])::"memory");
}

template <int TILES> struct Attention;

#define ATTENTION_SCORES(NAME, TYPE, TILES, N, HALF, A, B, C)                                                           \
  DEVICE static void NAME(float (&d)[TILES][4], u64 a, u64 b, u32 more) {                                              \
    asm volatile("{ .reg .pred p; setp.ne.u32 p, " C ", 0; "                                                           \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" LIST_##HALF "}, " A ", " B        \
                 ", p, 1, 1, 0, 0; }"                                                                                  \
                 : SUMS_##HALF("+f")                                                                                   \
                 : "l"(a), "l"(b), "r"(more));                                                                         \
  }
#define ATTENTION_PRODUCTS(TILES, N, HALF, A, B, C, D, E, F)                                                           \
  template <> struct Attention<TILES> {                                                                                \
    /* d = a b^T, or d += where `more` is set. */                                                                      \
    ATTENTION_SCORES(scores, "f16", TILES, N, HALF, A, B, C)                                                           \
    ATTENTION_SCORES(scores_bf16, "bf16", TILES, N, HALF, A, B, C)                                                     \
    /* The same with a in registers. */                                                                                \
    DEVICE static void scores(float (&d)[TILES][4], const u32 (&a)[4], u64 b, u32 more) {                              \
      asm volatile("{ .reg .pred p; setp.ne.u32 p, " F ", 0; "                                                         \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.f16.f16 {" LIST_##HALF "}, {" A ", " B ", " C ", "  \
                   D "}, " E ", p, 1, 1, 0; }"                                                                         \
                   : SUMS_##HALF("+f")                                                                                 \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(more));                                   \
    }                                                                                                                  \
    /* d += a b, the rows of b are its sums' terms. */                                                                 \
    DEVICE static void values(float (&d)[TILES][4], const u32 (&a)[4], u64 b) {                                        \
      asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.f16.f16 {" LIST_##HALF "}, {" A ", " B ", " C ", "  \
                   D "}, " E ", 1, 1, 1, 1;"                                                                           \
                   : SUMS_##HALF("+f")                                                                                 \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                              \
    }                                                                                                                  \
  };
ATTENTION_PRODUCTS(8, 64, 4, "%32", "%33", "%34", "%35", "%36", "%37")
ATTENTION_PRODUCTS(10, 80, 5, "%40", "%41", "%42", "%43", "%44", "%45")
ATTENTION_PRODUCTS(12, 96, 6, "%48", "%49", "%50", "%51", "%52", "%53")
ATTENTION_PRODUCTS(16, 128, 8, "%64", "%65", "%66", "%67", "%68", "%69")
ATTENTION_PRODUCTS(32, 256, 16, "%128", "%129", "%130", "%131", "%132", "%133")

}  // namespace wgmma
