// w[n, k] = (q[k, n] - z) * s, rounded once: the packed weight as the dense (N, K) matrix a library's GEMM takes.
//
// A block unpacks 64 columns of one chunk by 128 rows of K: warp w takes k-tile w, unpacks it as the GEMM does and
// leaves it in shared memory; then the block writes rows of 256 bytes. Bound by bytes: BITS / 8 in, 2 out.
// q - z and s are exact in fp32, so the product is rounded once.
// Requires: K % 64 = 0, N % 64 = 0. Tested by tests/gpu/test_other_ops.py bit for bit.
#include "number.cuh"

#ifndef ENTRY
#define ENTRY dequantize_example
#define OUT_TYPE FP16
#define CODE_BITS 4
#define HAS_ZEROS 1
#endif

constexpr int BLOCK_K = 128, ROW_PITCH = BLOCK_K + 8;  // 8 values more: rows 16 bytes off each other's banks

DEVICE u32 zero_of(const u32 *zeros, int chunk, int g8, int j, int half) {
  if (CODE_BITS == 4) return zeros[chunk * 8 + g8] >> (4 * j + 16 * half) & 15;
  return zeros[chunk * 16 + 2 * g8 + j / 2] >> (8 * (j % 2) + 16 * half) & 255;
}

extern "C" __global__ void __launch_bounds__(256)
    ENTRY(const u32 *weight, const u16 *scales, const u32 *zeros, u16 *out, int n, int k, int group_shift,
          int scales_bf16) {
  __shared__ __align__(16) u16 rows[64 * ROW_PITCH];
  ptx::launch_dependents();
  ptx::wait_for_previous_kernel();
  const int chunk = blockIdx.x, k0 = blockIdx.y * BLOCK_K;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g8 = lane / 4, t = lane % 4;
  const int k_tile = k0 / 16 + warp;
  if (k_tile * 16 < k) {
    const int group = (k_tile * 16) >> group_shift;
    const u32 *words = weight + (static_cast<u64>(k_tile) * (n / 64) + chunk) * 32 * CODE_BITS + lane * CODE_BITS;
    const u16 *scale_row = scales + static_cast<u64>(group) * n + chunk * 64 + g8 * 8;
    const u32 *zero_row = zeros + (HAS_ZEROS ? static_cast<u64>(group) * (n / 32 * CODE_BITS) : 0);
#pragma unroll
    for (int j = 0; j < 4; j++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const float scale = to_float(scale_row[2 * j + half], scales_bf16 != 0);
        const int zero = HAS_ZEROS ? zero_of(zero_row, chunk, g8, j, half) : 1 << (CODE_BITS - 1);
        const int row = (16 * j + 8 * half + g8) * ROW_PITCH + warp * 16 + 2 * t;
#pragma unroll
        for (int high = 0; high < 2; high++) {
          u32 first, second;
          if (CODE_BITS == 4) {
            const u32 word = words[j] >> (8 * half + 4 * high);
            first = word & 15, second = word >> 16 & 15;
          } else {
            const u32 word = words[2 * j + half] >> (8 * high);
            first = word & 255, second = word >> 16 & 255;
          }
          const u32 pair = Number<OUT_TYPE>::pack(static_cast<float>(static_cast<int>(first) - zero) * scale,
                                             static_cast<float>(static_cast<int>(second) - zero) * scale);
          *reinterpret_cast<u32 *>(rows + row + 8 * high) = pair;
        }
      }
  }
  __syncthreads();
  for (int piece = threadIdx.x; piece < 64 * BLOCK_K / 8; piece += 256) {
    const int column = piece / (BLOCK_K / 8), at = piece % (BLOCK_K / 8) * 8;
    if (k0 + at < k) {
      const uint4 v = *reinterpret_cast<const uint4 *>(rows + column * ROW_PITCH + at);
      *reinterpret_cast<uint4 *>(out + static_cast<u64>(chunk * 64 + column) * k + k0 + at) = v;
    }
  }
}
