// The warpgroup's integer product (sm_90a), as that of wgmma.cuh: D += A * B, 64 (n) x tokens x 32 of K, s8 to s32.
//
// The operands are d (four registers a token tile), a (four) and the descriptor of B: rows of 128 bytes, a code a byte.
#pragma once
#include "wgmma.cuh"

namespace wgmma {

template <int TOKEN_TILES> struct IntProduct;

#define INT_PRODUCT(TILES, N, HALF, OPERAND_A, OPERAND_B)                                                              \
  template <> struct IntProduct<TILES> {                                                                               \
    /* ADD 0 overwrites d: the constant is the last operand */                                                         \
    template <int ADD> DEVICE static void run(int (&d)[TILES][4], const u32 (&a)[4], u64 b) {                          \
      asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k32.s32.s8.s8 {" LIST_##HALF "}, {" OPERAND_A "}, "         \
                   OPERAND_B ";"                                                                                       \
                   : SUMS_##HALF("+r")                                                                                 \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(ADD));                                    \
    }                                                                                                                  \
  };

INT_PRODUCT(2, 16, 1, "%8, %9, %10, %11", "%12, %13")
INT_PRODUCT(4, 32, 2, "%16, %17, %18, %19", "%20, %21")
INT_PRODUCT(6, 48, 3, "%24, %25, %26, %27", "%28, %29")
INT_PRODUCT(8, 64, 4, "%32, %33, %34, %35", "%36, %37")
INT_PRODUCT(12, 96, 6, "%48, %49, %50, %51", "%52, %53")
INT_PRODUCT(16, 128, 8, "%64, %65, %66, %67", "%68, %69")
INT_PRODUCT(20, 160, 10, "%80, %81, %82, %83", "%84, %85")
INT_PRODUCT(24, 192, 12, "%96, %97, %98, %99", "%100, %101")
INT_PRODUCT(32, 256, 16, "%128, %129, %130, %131", "%132, %133")

}  // namespace wgmma
