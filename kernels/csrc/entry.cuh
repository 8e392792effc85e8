// The signature of every W4A16 kernel.
#pragma once
#include "tile.cuh"

// The entry of one kernel: everything a launch passes, gathered into a Problem.
#define W4A16_ENTRY(NAME, RESIDENT, COUNT, BODY)                                                           \
  extern "C" __global__ void __launch_bounds__(COUNT, RESIDENT)                                                        \
      NAME(const u8 *x, const u8 *weight, const u8 *scales, const u8 *zeros, const u8 *bias, u8 *y,                  \
           float *partials, u32 *flags, int m, int n, int k, int ldx, int ldy, int group_shift, int scales_bf16) {   \
    const Problem problem{x, weight, scales, zeros, bias, y, partials, flags, m, n, k, ldx, ldy, group_shift,        \
                          scales_bf16 != 0};                                                                         \
    BODY(problem);                                                                                       \
  }
