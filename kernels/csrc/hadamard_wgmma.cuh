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

#define ACROSS_PRODUCTS(...) WGMMA_PRODUCTS_OF(Across, "1", __VA_ARGS__)

ACROSS_PRODUCTS(8, 64, 4, "%32, %33, %34, %35", "%36")
ACROSS_PRODUCTS(12, 96, 6, "%48, %49, %50, %51", "%52")
ACROSS_PRODUCTS(16, 128, 8, "%64, %65, %66, %67", "%68")

}  // namespace wgmma
