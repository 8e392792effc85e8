// In the place of csrc/hadamard_ptx.cuh.
#pragma once
#include "number.cuh"

namespace ptx {

inline float normal_or_zero(float v) { return std::fabs(v) < 1.17549435e-38f ? std::copysign(0.0f, v) : v; }
inline float max_abs(float a, float b) { return a != a || b != b ? NAN : std::max(a, std::fabs(b)); }
inline float reciprocal_or_zero(float a) { return normal_or_zero(1.0f / normal_or_zero(a)); }
inline float multiply_or_zero(float a, float b) { return normal_or_zero(normal_or_zero(a) * normal_or_zero(b)); }

template <u32 TO, u32 FROM> void copy_line(u32 to, const void *from, u32 line, u32 lines) {
  if (line < lines) copy_async_16(to + TO, static_cast<const u8 *>(from) + FROM);
}

}  // namespace ptx
