// The warpgroup's product (sm_90a): D += A * B with A, the weight, in registers and B, the activations, in shared memory.
//
// Four warps issue it together; warp w's 16 rows are the 16 columns n of that warp's own word, so the accumulators lie
// as those of mma.sync do: register 4 i + c is token tile i, row g8 + 8 (c / 2), token 2t + c % 2. B is a tile of
// activations with rows of 128 bytes, 128-byte swizzle, groups of 8 rows 1024 bytes apart.
// The product runs on while the warp goes on; `wait` says how many groups may still be running.
#pragma once
#include "number.cuh"

namespace wgmma {

// Orders register writes before the products that read them.
DEVICE void fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING> DEVICE void wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory"); }

// The matrix descriptor of a B tile at a shared address: start / 16, stride of 8 rows / 16 at bit 32, 128-byte swizzle.
DEVICE u64 descriptor(u32 address) {
  constexpr u64 STRIDE = 1024 >> 4, SWIZZLE_128 = 1;
  return ((address & 0x3FFFF) >> 4) | (u64(1) << 16) | (STRIDE << 32) | (SWIZZLE_128 << 62);
}

// One instruction for each width; `NAME(TILES, N)` below lists them. The operands are d (four registers a token tile),
// a (four) and the descriptor; the strings number them in that order, eight registers, two token tiles, at a time.
template <int ACT, int TOKEN_TILES> struct Product;

#define REGISTERS_0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define REGISTERS_1 "%8, %9, %10, %11, %12, %13, %14, %15"
#define REGISTERS_2 "%16, %17, %18, %19, %20, %21, %22, %23"
#define REGISTERS_3 "%24, %25, %26, %27, %28, %29, %30, %31"
#define REGISTERS_4 "%32, %33, %34, %35, %36, %37, %38, %39"
#define REGISTERS_5 "%40, %41, %42, %43, %44, %45, %46, %47"
#define REGISTERS_6 "%48, %49, %50, %51, %52, %53, %54, %55"
#define REGISTERS_7 "%56, %57, %58, %59, %60, %61, %62, %63"
#define REGISTERS_8 "%64, %65, %66, %67, %68, %69, %70, %71"
#define REGISTERS_9 "%72, %73, %74, %75, %76, %77, %78, %79"
#define REGISTERS_10 "%80, %81, %82, %83, %84, %85, %86, %87"
#define REGISTERS_11 "%88, %89, %90, %91, %92, %93, %94, %95"
#define REGISTERS_12 "%96, %97, %98, %99, %100, %101, %102, %103"
#define REGISTERS_13 "%104, %105, %106, %107, %108, %109, %110, %111"
#define REGISTERS_14 "%112, %113, %114, %115, %116, %117, %118, %119"
#define REGISTERS_15 "%120, %121, %122, %123, %124, %125, %126, %127"
#define LIST_1 REGISTERS_0
#define LIST_2 LIST_1 ", " REGISTERS_1
#define LIST_3 LIST_2 ", " REGISTERS_2
#define LIST_4 LIST_3 ", " REGISTERS_3
#define LIST_5 LIST_4 ", " REGISTERS_4
#define LIST_6 LIST_5 ", " REGISTERS_5
#define LIST_7 LIST_6 ", " REGISTERS_6
#define LIST_8 LIST_7 ", " REGISTERS_7
#define LIST_9 LIST_8 ", " REGISTERS_8
#define LIST_10 LIST_9 ", " REGISTERS_9
#define LIST_11 LIST_10 ", " REGISTERS_10
#define LIST_12 LIST_11 ", " REGISTERS_11
#define LIST_13 LIST_12 ", " REGISTERS_12
#define LIST_14 LIST_13 ", " REGISTERS_13
#define LIST_15 LIST_14 ", " REGISTERS_14
#define LIST_16 LIST_15 ", " REGISTERS_15
#define LIST_24 LIST_1 ", %8, %9, %10, %11"  // 24 tokens: no whole number of halves
#define TILE_SUMS(HOW, I) HOW(d[I][0]), HOW(d[I][1]), HOW(d[I][2]), HOW(d[I][3])  // HOW: "+f", "=f", "+r"
#define SUMS_1(HOW) TILE_SUMS(HOW, 0), TILE_SUMS(HOW, 1)
#define SUMS_2(HOW) SUMS_1(HOW), TILE_SUMS(HOW, 2), TILE_SUMS(HOW, 3)
#define SUMS_3(HOW) SUMS_2(HOW), TILE_SUMS(HOW, 4), TILE_SUMS(HOW, 5)
#define SUMS_4(HOW) SUMS_3(HOW), TILE_SUMS(HOW, 6), TILE_SUMS(HOW, 7)
#define SUMS_5(HOW) SUMS_4(HOW), TILE_SUMS(HOW, 8), TILE_SUMS(HOW, 9)
#define SUMS_6(HOW) SUMS_5(HOW), TILE_SUMS(HOW, 10), TILE_SUMS(HOW, 11)
#define SUMS_7(HOW) SUMS_6(HOW), TILE_SUMS(HOW, 12), TILE_SUMS(HOW, 13)
#define SUMS_8(HOW) SUMS_7(HOW), TILE_SUMS(HOW, 14), TILE_SUMS(HOW, 15)
#define SUMS_9(HOW) SUMS_8(HOW), TILE_SUMS(HOW, 16), TILE_SUMS(HOW, 17)
#define SUMS_10(HOW) SUMS_9(HOW), TILE_SUMS(HOW, 18), TILE_SUMS(HOW, 19)
#define SUMS_11(HOW) SUMS_10(HOW), TILE_SUMS(HOW, 20), TILE_SUMS(HOW, 21)
#define SUMS_12(HOW) SUMS_11(HOW), TILE_SUMS(HOW, 22), TILE_SUMS(HOW, 23)
#define SUMS_13(HOW) SUMS_12(HOW), TILE_SUMS(HOW, 24), TILE_SUMS(HOW, 25)
#define SUMS_14(HOW) SUMS_13(HOW), TILE_SUMS(HOW, 26), TILE_SUMS(HOW, 27)
#define SUMS_15(HOW) SUMS_14(HOW), TILE_SUMS(HOW, 28), TILE_SUMS(HOW, 29)
#define SUMS_16(HOW) SUMS_15(HOW), TILE_SUMS(HOW, 30), TILE_SUMS(HOW, 31)
#define SUMS_24(HOW) SUMS_1(HOW), TILE_SUMS(HOW, 2)

// `run` adds to d; `start` overwrites it, and says so: what d held before takes no registers. A line of B in shared memory
// is a token's, or, ACROSS it, one term of every token's sums.
#define WGMMA_ISSUE(TYPE, N, HALF, OPERAND_A, OPERAND_B, KEEP, ACROSS, SUMS)                                           \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" LIST_##HALF "}, {" OPERAND_A       \
               "}, " OPERAND_B ", " KEEP ", 1, 1, " ACROSS ";"                                                         \
               : SUMS                                                                                                  \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
#define WGMMA_PRODUCT(NAME, ACROSS, ACT, TYPE, TILES, N, HALF, OPERAND_A, OPERAND_B)                                   \
  template <> struct NAME<ACT, TILES> {                                                                                \
    DEVICE static void run(float (&d)[TILES][4], const u32 (&a)[4], u64 b) {                                           \
      WGMMA_ISSUE(TYPE, N, HALF, OPERAND_A, OPERAND_B, "1", ACROSS, SUMS_##HALF("+f"));                                \
    }                                                                                                                  \
    DEVICE static void start(float (&d)[TILES][4], const u32 (&a)[4], u64 b) {                                         \
      WGMMA_ISSUE(TYPE, N, HALF, OPERAND_A, OPERAND_B, "0", ACROSS, SUMS_##HALF("=f"));                                \
    }                                                                                                                  \
  };
#define WGMMA_PRODUCTS_OF(NAME, ACROSS, TILES, N, HALF, OPERAND_A, OPERAND_B)         \
  WGMMA_PRODUCT(NAME, ACROSS, FP16, "f16", TILES, N, HALF, OPERAND_A, OPERAND_B)     \
  WGMMA_PRODUCT(NAME, ACROSS, BF16, "bf16", TILES, N, HALF, OPERAND_A, OPERAND_B)
#define WGMMA_PRODUCTS(...) WGMMA_PRODUCTS_OF(Product, "0", __VA_ARGS__)

WGMMA_PRODUCTS(2, 16, 1, "%8, %9, %10, %11", "%12")
WGMMA_PRODUCTS(3, 24, 24, "%12, %13, %14, %15", "%16")
WGMMA_PRODUCTS(4, 32, 2, "%16, %17, %18, %19", "%20")
WGMMA_PRODUCTS(6, 48, 3, "%24, %25, %26, %27", "%28")
WGMMA_PRODUCTS(8, 64, 4, "%32, %33, %34, %35", "%36")
WGMMA_PRODUCTS(10, 80, 5, "%40, %41, %42, %43", "%44")
WGMMA_PRODUCTS(12, 96, 6, "%48, %49, %50, %51", "%52")
WGMMA_PRODUCTS(16, 128, 8, "%64, %65, %66, %67", "%68")
WGMMA_PRODUCTS(20, 160, 10, "%80, %81, %82, %83", "%84")
WGMMA_PRODUCTS(22, 176, 11, "%88, %89, %90, %91", "%92")
WGMMA_PRODUCTS(24, 192, 12, "%96, %97, %98, %99", "%100")
WGMMA_PRODUCTS(32, 256, 16, "%128, %129, %130, %131", "%132")

}  // namespace wgmma
