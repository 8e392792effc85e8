// The warpgroup's product of a transform (sm_90a): D = A * B, A = 64 rows of H_m^T in registers, B = a row x in shared
// memory, whose lines are the sums' terms: blocks of 64 columns, lines of 128 bytes, the 16-byte chunk c of line j at place
// c ^ (j % 8). Sums lie as those of mma.sync do: tile i, row g or g + 8, columns 2t, 2t + 1.
#pragma once
#include "kv_wgmma.cuh"

namespace wgmma {

// The descriptor of an operand whose lines are the sums' terms; `block`: bytes from 64 columns to the next.
DEVICE u64 descriptor_across(u32 address, u32 block) {
  return (descriptor(address) & ~(u64(0x3FFF) << 16)) | (u64(block >> 4) << 16);
}

template <int ACT, int TILES> struct Across;

#define ACROSS_TILE(I) "=f"(d[I][0]), "=f"(d[I][1]), "=f"(d[I][2]), "=f"(d[I][3])
#define ACROSS_TILES_4(I) ACROSS_TILE(I), ACROSS_TILE(I + 1), ACROSS_TILE(I + 2), ACROSS_TILE(I + 3)
#define ACROSS_SUMS_4 ACROSS_TILES_4(0), ACROSS_TILES_4(4)
#define ACROSS_SUMS_6 ACROSS_SUMS_4, ACROSS_TILES_4(8)
#define ACROSS_SUMS_8 ACROSS_SUMS_6, ACROSS_TILES_4(12)

// `run` adds to d; `start` overwrites it, and says so: what d held before takes no registers.
#define ACROSS_ISSUE(TYPE, N, HALF, A, B, KEEP, SUMS)                                                                  \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" LIST_##HALF "}, {" A "}, " B ", "  \
               KEEP ", 1, 1, 1;"                                                                                       \
               : SUMS                                                                                                  \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
#define ACROSS_PRODUCT(ACT, TYPE, TILES, N, HALF, A, B)                                                                \
  template <> struct Across<ACT, TILES> {                                                                              \
    DEVICE static void run(float (&d)[TILES][4], const u32 (&a)[4], u64 b) {                                           \
      ACROSS_ISSUE(TYPE, N, HALF, A, B, "1", SUMS_##HALF);                                                             \
    }                                                                                                                  \
    DEVICE static void start(float (&d)[TILES][4], const u32 (&a)[4], u64 b) {                                         \
      ACROSS_ISSUE(TYPE, N, HALF, A, B, "0", ACROSS_SUMS_##HALF);                                                      \
    }                                                                                                                  \
  };
#define ACROSS_PRODUCTS(TILES, N, HALF, A, B)        \
  ACROSS_PRODUCT(FP16, "f16", TILES, N, HALF, A, B)  \
  ACROSS_PRODUCT(BF16, "bf16", TILES, N, HALF, A, B)

ACROSS_PRODUCTS(8, 64, 4, "%32, %33, %34, %35", "%36")
ACROSS_PRODUCTS(12, 96, 6, "%48, %49, %50, %51", "%52")
ACROSS_PRODUCTS(16, 128, 8, "%64, %65, %66, %67", "%68")

}  // namespace wgmma
