// Instructions that only transforms and quantizers use; the others are in ptx.cuh.
#pragma once
#include "number.cuh"

namespace ptx {

// The larger of a and |b|, a from 0 on; keeps a NaN, which fmaxf drops.
DEVICE float max_abs(float a, float b) {
  float out;
  asm("{ .reg .f32 y; abs.f32 y, %2; max.NaN.f32 %0, %1, y; }" : "=f"(out) : "f"(a), "f"(b));
  return out;
}

// Within one ulp; of what is not normal it takes 0, and gives 0 instead.
DEVICE float reciprocal_or_zero(float a) {
  float out;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(a));
  return out;
}

// a * b, or 0 where that is not normal.
DEVICE float multiply_or_zero(float a, float b) {
  float out;
  asm("mul.ftz.f32 %0, %1, %2;" : "=f"(out) : "f"(a), "f"(b));
  return out;
}

// Copies 16 bytes if `line` is below `lines`. Distances are part of the instruction: one address serves a thread.
template <u32 TO, u32 FROM> DEVICE void copy_line(u32 to, const void *from, u32 line, u32 lines) {
  asm volatile(
      "{ .reg .pred p;\n"
      "setp.lt.u32 p, %2, %3;\n"
      "@p cp.async.cg.shared.global.L2::128B [%0 + %4], [%1 + %5], 16; }" ::"r"(to), "l"(from), "r"(line), "r"(lines),
      "n"(TO), "n"(FROM)
      : "memory");
}

}  // namespace ptx
